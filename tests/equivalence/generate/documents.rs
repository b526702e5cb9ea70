//! Queries over jsonb of all kinds: null, booleans, numbers, strings, arrays and objects.

use super::{Query, Shape, Table, condition, table_name, tagged};
use crate::rng::Rng;

pub const SHAPES: &[Shape] = &[shown, grouped, first, ranked, joined];

/// A document made of a row. Numbers are integers: two that are equal are written alike.
fn document(q: &str) -> String {
    format!(
        "CASE {q}a WHEN -1 THEN 'null'::jsonb WHEN 0 THEN to_jsonb({q}b > 2) WHEN 1 THEN to_jsonb({q}b) \
         WHEN 2 THEN to_jsonb({q}s) WHEN 3 THEN jsonb_build_array({q}b, {q}s) \
         WHEN 4 THEN jsonb_build_object('k', {q}s, 'b', {q}b) WHEN 5 THEN jsonb_build_array() END"
    )
}

fn shown(rng: &mut Rng, t: &[Table]) -> Query {
    let shown = rng.pick(&[
        "j",
        "j -> 0 AS e",
        "j ->> 'k' AS e",
        "jsonb_typeof(j) AS e",
        "j @> '[1]' AS e",
        "j || '[1]'::jsonb AS e",
        "j < '[2]'::jsonb AS e",
        "j = to_jsonb(b) AS e",
    ]);
    tagged(
        format!(
            "SELECT id, o, {shown} FROM (SELECT *, {} AS j FROM {}) d WHERE {}",
            document(""),
            table_name(rng, t),
            condition(rng, "")
        ),
        &["documents"],
    )
}

fn grouped(rng: &mut Rng, t: &[Table]) -> Query {
    let (table, j) = (table_name(rng, t), document(""));
    let sql = match rng.below(3) {
        0 => format!("SELECT DISTINCT {j} AS j FROM {table}"),
        1 => format!("SELECT {j} AS j, count(*) AS c, max(s) AS m FROM {table} GROUP BY 1"),
        _ => format!(
            "SELECT b, count(DISTINCT j) AS c, jsonb_agg(j ORDER BY j, o) AS g FROM (SELECT *, {j} AS j FROM {table}) d GROUP BY b"
        ),
    };
    tagged(sql, &["documents", "aggregate"])
}

fn first(rng: &mut Rng, t: &[Table]) -> Query {
    tagged(
        format!(
            "SELECT id, o, {} AS j FROM {} ORDER BY j{}, o LIMIT {}",
            document(""),
            table_name(rng, t),
            rng.pick(&["", " DESC", " NULLS FIRST"]),
            rng.between(1, 8)
        ),
        &["documents", "top-n global"],
    )
}

fn ranked(rng: &mut Rng, t: &[Table]) -> Query {
    tagged(
        format!(
            "SELECT id, o, row_number() OVER (ORDER BY j{}, o) AS r, rank() OVER (PARTITION BY b ORDER BY j) AS k FROM (SELECT *, {} AS j FROM {}) d",
            rng.pick(&["", " DESC"]),
            document(""),
            table_name(rng, t)
        ),
        &["documents", "window rank"],
    )
}

fn joined(rng: &mut Rng, t: &[Table]) -> Query {
    tagged(
        format!(
            "SELECT x.o AS xo, y.o AS yo, y.j FROM (SELECT o, {} AS j FROM {}) x {} JOIN (SELECT o, {} AS j FROM {}) y ON x.j = y.j",
            document(""),
            table_name(rng, t),
            rng.pick(&["", "LEFT", "FULL"]),
            document(""),
            table_name(rng, t)
        ),
        &["documents", "join inner"],
    )
}
