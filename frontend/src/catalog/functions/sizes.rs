//! Sizes of relations and values, in bytes.

use arrow::array::{Array, ArrayRef, AsArray};
use arrow::datatypes::DataType;
use millrace_common::{SqlError, SqlState};
use millrace_rpc::catalog::RelationKind;

use super::names::relation_argument;
use super::{Entry, NULL, int, text};
use crate::catalog::SystemTables;
use crate::catalog::columns::SYSTEM_TABLES;
use crate::catalog::rows::Cell;

/// The function that is told values as they are kept.
pub(super) const COLUMN_SIZE: &str = "pg_column_size";

pub(super) const FUNCTIONS: &[Entry] = &[
    ("pg_relation_filenode", 'o', |_, a| Ok(int(a, 0)?.into())),
    ("pg_size_pretty", 't', |_, a| match a.first() {
        Some(Cell::Int(bytes)) => Ok(size_pretty(*bytes).into()),
        _ => Ok(text(a, 0).and_then(numeric_pretty).into()),
    }),
    ("pg_size_bytes", 'i', |_, a| text(a, 0).map(size_bytes).transpose().map(Cell::from)),
    // Depends on the value's type: see `of_values`.
    (COLUMN_SIZE, 'd', NULL),
    ("pg_relation_size", 'i', |t, a| size_of(t, a, Size::Rows)),
    ("pg_table_size", 'i', |t, a| size_of(t, a, Size::Rows)),
    ("pg_indexes_size", 'i', |t, a| size_of(t, a, Size::Indexes)),
    ("pg_total_relation_size", 'i', |t, a| size_of(t, a, Size::All)),
    ("pg_database_size", 'i', size_of_all),
    ("pg_tablespace_size", 'i', size_of_all),
];

fn size_of_all(t: &SystemTables, a: &[Cell]) -> Result<Cell, SqlError> {
    let all = || t.shared.cluster.jobs().iter().map(|j| j.state_bytes()).sum::<u64>() as i64;
    Ok(a.first().filter(|c| **c != Cell::Null).map(|_| all()).into())
}

/// What of a relation is measured.
#[derive(Clone, Copy, PartialEq)]
enum Size {
    Rows,
    Indexes,
    All,
}

/// Bytes of a relation, in memory and in the store; NULL for one that does not exist.
fn size_of(t: &SystemTables, args: &[Cell], what: Size) -> Result<Cell, SqlError> {
    let Some(oid) = relation_argument(t, args)? else { return Ok(Cell::Null) };
    let Some(relation) = u32::try_from(oid).ok().and_then(|id| t.catalog().by_id(id)) else {
        // Catalogs are made when they are asked for.
        let system = SYSTEM_TABLES.iter().any(|s| i64::from(s.2) == oid);
        return Ok(system.then_some(0i64).into());
    };
    let index = |id: u32| {
        let found = t.catalog().by_id(id);
        found.is_some_and(|r| {
            r.kind == RelationKind::Index as i32 && r.depends_on.contains(&relation.id)
        })
    };
    let mut bytes = 0;
    for job in t.shared.cluster.jobs() {
        if job.relation == relation.id {
            bytes += match what {
                Size::Rows => {
                    let own = job.tables.iter().filter(|t| t.id == relation.first_table_id);
                    own.map(|t| t.bytes()).sum()
                }
                Size::Indexes => 0,
                Size::All => job.state_bytes(),
            };
        } else if what != Size::Rows && index(job.relation) {
            bytes += job.state_bytes();
        }
    }
    Ok((bytes as i64).into())
}

/// PostgreSQL's rounding: a unit is used up to ten thousand of it. Beyond bytes twice the size is
/// kept, so that the half can be rounded.
fn size_pretty(bytes: i64) -> String {
    if bytes.unsigned_abs() < 10 * 1024 {
        return format!("{bytes} bytes");
    }
    let mut twice = bytes / 512;
    for unit in ["kB", "MB", "GB", "TB"] {
        if twice.unsigned_abs() < 20 * 1024 - 1 {
            return format!("{} {unit}", (twice + twice.signum()) / 2);
        }
        twice /= 1024;
    }
    format!("{} PB", (twice + twice.signum()) / 2)
}

/// A size with a fraction, of which PostgreSQL keeps as much as it was given.
fn numeric_pretty(bytes: &str) -> Option<String> {
    let (whole, fraction) = bytes.split_once('.').unwrap_or((bytes, ""));
    let whole: i64 = whole.parse().ok()?;
    let fraction = fraction.trim_end_matches('0');
    if fraction.is_empty() || whole.unsigned_abs() >= 10 * 1024 {
        return Some(size_pretty(whole));
    }
    let sign = if whole == 0 && bytes.starts_with('-') { "-" } else { "" };
    Some(format!("{sign}{whole}.{fraction} bytes"))
}

/// `10 MB` in bytes.
fn size_bytes(size: &str) -> Result<i64, SqlError> {
    let invalid = || {
        let message = format!("invalid size: \"{size}\"");
        SqlError::new(SqlState::INVALID_PARAMETER_VALUE, message)
    };
    let trimmed = size.trim();
    let is_number = |c: char| c.is_ascii_digit() || matches!(c, '.' | '+' | '-');
    let end = trimmed.find(|c| !is_number(c)).unwrap_or(trimmed.len());
    let (number, unit) = trimmed.split_at(end);
    let unit = unit.trim();
    let factor: i64 = match unit.to_ascii_lowercase().as_str() {
        "" | "bytes" => 1,
        "kb" => 1 << 10,
        "mb" => 1 << 20,
        "gb" => 1 << 30,
        "tb" => 1 << 40,
        "pb" => 1 << 50,
        _ => {
            return Err(invalid()
                .with_detail(format!("Invalid size unit: \"{unit}\"."))
                .with_hint(
                    "Valid units are \"bytes\", \"kB\", \"MB\", \"GB\", \"TB\", and \"PB\".",
                ));
        }
    };
    let too_large = || SqlError::new(SqlState::NUMERIC_VALUE_OUT_OF_RANGE, "bigint out of range");
    if !number.contains('.') {
        let number: i64 = number.parse().map_err(|_| invalid())?;
        return number.checked_mul(factor).ok_or_else(too_large);
    }
    let number: f64 = number.parse().map_err(|_| invalid())?;
    let bytes = (number * factor as f64).round();
    if bytes.abs() < i64::MAX as f64 { Ok(bytes as i64) } else { Err(too_large()) }
}

/// Bytes of each value, as PostgreSQL would store it.
pub(super) fn of_values(values: &ArrayRef) -> Result<Vec<Cell>, SqlError> {
    let fixed = match values.data_type() {
        DataType::Boolean => Some(1),
        DataType::FixedSizeBinary(width) => Some(i64::from(*width)),
        DataType::Decimal128(..) | DataType::Decimal256(..) => None,
        t => t.primitive_width().and_then(|width| i64::try_from(width).ok()),
    };
    if let Some(width) = fixed {
        let sizes = (0..values.len()).map(|i| Cell::from(values.is_valid(i).then_some(width)));
        return Ok(sizes.collect());
    }
    if matches!(values.data_type(), DataType::List(_) | DataType::LargeList(_)) {
        return Err(SqlError::unsupported("pg_column_size of an array"));
    }
    let numeric = matches!(values.data_type(), DataType::Decimal128(..) | DataType::Decimal256(..));
    let size = |text: &str| {
        // Four digits to two bytes, before and after the point; short values have a header of one byte.
        let groups = |digits: &str| digits.trim_start_matches('-').len().div_ceil(4);
        let length = match (numeric, text.split_once('.')) {
            (false, _) => text.len(),
            (true, None) => 2 + 2 * groups(text),
            (true, Some((whole, fraction))) => {
                2 + 2 * (groups(whole) + groups(fraction.trim_end_matches('0')))
            }
        };
        (length + if length < 127 { 1 } else { 4 }) as i64
    };
    let texts = arrow::compute::cast(values, &DataType::LargeUtf8);
    let texts = texts.map_err(crate::dml::rows::arrow_error)?;
    Ok(texts.as_string::<i64>().iter().map(|text| Cell::from(text.map(size))).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_printed_as_postgresql_does() {
        let shown = |n| size_pretty(n);
        assert_eq!(shown(0), "0 bytes");
        assert_eq!(shown(10_239), "10239 bytes");
        assert_eq!(shown(10_240), "10 kB");
        assert_eq!(shown(1_048_576), "1024 kB");
        assert_eq!(shown(10_485_760), "10 MB");
        assert_eq!(shown(-20_480), "-20 kB");
        assert_eq!(numeric_pretty("1234.5000").as_deref(), Some("1234.5 bytes"));
        assert_eq!(numeric_pretty("-0.5").as_deref(), Some("-0.5 bytes"));
        assert_eq!(numeric_pretty("123456789.70").as_deref(), Some("118 MB"));
    }

    #[test]
    fn sizes_are_read_as_postgresql_does() {
        assert_eq!(size_bytes(" 10 MB ").unwrap(), 10 << 20);
        assert_eq!(size_bytes("1.5kB").unwrap(), 1536);
        assert_eq!(size_bytes("-3 bytes").unwrap(), -3);
        assert_eq!(size_bytes("7").unwrap(), 7);
        assert_eq!(size_bytes("1 XB").unwrap_err().state.0, "22023");
        assert_eq!(size_bytes("").unwrap_err().state.0, "22023");
        assert_eq!(size_bytes("99999999 PB").unwrap_err().state.0, "22003");
    }
}
