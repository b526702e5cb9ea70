//! PostgreSQL 15's system tables and views: OID, `relkind`, and columns with their types.
//!
//! A column is `name:kind`; the kinds are in [`super::rows`]. Tables that [`super::pg`] and
//! [`super::information`] do not fill are empty.

mod information_schema;
mod pg_catalog;
mod pg_stat;

/// Schema, name, OID, relkind, columns.
pub type SystemTable = (&'static str, &'static str, u32, &'static str, &'static str);

/// In the order in which they are listed.
const PARTS: [&[SystemTable]; 4] =
    [information_schema::VIEWS, pg_catalog::FIRST, pg_stat::TABLES, pg_catalog::LAST];

pub static SYSTEM_TABLES: &[SystemTable] = &joined::<{ count() }>();

const fn count() -> usize {
    let (mut n, mut part) = (0, 0);
    while part < PARTS.len() {
        n += PARTS[part].len();
        part += 1;
    }
    n
}

/// All parts as one; `const`, so loops are written out.
const fn joined<const N: usize>() -> [SystemTable; N] {
    let mut all: [SystemTable; N] = [("", "", 0, "", ""); N];
    let (mut n, mut part) = (0, 0);
    while part < PARTS.len() {
        let mut i = 0;
        while i < PARTS[part].len() {
            all[n] = PARTS[part][i];
            n += 1;
            i += 1;
        }
        part += 1;
    }
    all
}
