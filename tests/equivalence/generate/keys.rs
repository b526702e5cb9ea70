//! Queries whose joins, groups and orders are by keys: of tables, whole or in part, and derived ones that may be
//! NULL. What is stored under such a column has no other name, so it shows when state is read back.

use super::{Query, Shape, Table, combined, condition, table_name, tagged};
use crate::rng::Rng;

pub const SHAPES: &[Shape] = &[
    not_in,
    not_in,
    not_in_groups,
    not_in_few,
    not_in_correlated,
    marked,
    mark_shown,
    first_of_rows,
    membership,
    membership,
    joined,
    joined,
    joined_groups,
    counted,
    first_of_key,
    window_of_key,
    key_sets,
];

/// A column of a key, or one that is not.
fn column(rng: &mut Rng) -> &'static str {
    rng.pick(&["id", "id", "o", "a", "b"])
}

/// A condition that two rows have one key, or a part of one.
fn same(rng: &mut Rng) -> String {
    let pairs: [&str; 7] = [
        "x.id = y.id",
        "x.id = y.id",
        "x.o = y.o",
        "x.id = y.id AND x.o = y.o",
        "x.id = y.a",
        "x.a = y.id",
        "x.id = y.id AND x.a = y.a",
    ];
    pairs[rng.below(pairs.len())].to_string()
}

fn not_in(rng: &mut Rng, t: &[Table]) -> Query {
    let (left, right) = (column(rng), column(rng));
    let filter = if rng.chance(70) { format!(" WHERE {}", condition(rng, "")) } else { "".into() };
    // Without a NULL on the right the answer is not always empty.
    let known = match (rng.chance(60), filter.is_empty()) {
        (false, _) => String::new(),
        (true, true) => format!(" WHERE {right} IS NOT NULL"),
        (true, false) => format!(" AND {right} IS NOT NULL"),
    };
    let filter = filter.replace(" WHERE ", " WHERE (") + if filter.is_empty() { "" } else { ")" };
    tagged(
        format!(
            "SELECT id, o, a, s FROM {} WHERE {left} NOT IN (SELECT {right} FROM {}{filter}{known})",
            table_name(rng, t),
            table_name(rng, t)
        ),
        &["not in over keys"],
    )
}

/// The column is a key that may be NULL.
fn not_in_groups(rng: &mut Rng, t: &[Table]) -> Query {
    let (left, right) = (table_name(rng, t), table_name(rng, t));
    let groups = |table: &str, least: i64| {
        format!("SELECT a, count(*) AS c FROM {table} GROUP BY a HAVING count(*) > {least}")
    };
    let least = rng.between(1, 4);
    let sql = match rng.below(2) {
        0 => format!(
            "SELECT a, c FROM ({}) x WHERE a NOT IN (SELECT a FROM ({}) y WHERE a > 1)",
            groups(left, 0),
            groups(right, least)
        ),
        _ => format!(
            "SELECT id, a FROM {left} WHERE a NOT IN (SELECT a FROM ({}) y)",
            groups(right, least)
        ),
    };
    tagged(sql, &["not in over nullable keys"])
}

/// At most one row, or rows without doubles, on the right; groups over the answer.
fn not_in_few(rng: &mut Rng, t: &[Table]) -> Query {
    let (left, right) = (table_name(rng, t), table_name(rng, t));
    let of = column(rng);
    let few = match rng.below(3) {
        0 => format!("SELECT max({of}) FROM {right} WHERE {}", condition(rng, "")),
        1 => format!("SELECT DISTINCT {of} FROM {right} WHERE {of} > {}", rng.between(0, 3)),
        _ => format!("SELECT {of} FROM {right} WHERE {of} IS NOT NULL ORDER BY o, id LIMIT 3"),
    };
    tagged(
        format!(
            "SELECT a, count(*) AS c, sum(id) AS i FROM {left} WHERE {} NOT IN ({few}) GROUP BY a",
            column(rng)
        ),
        &["not in over keys", "aggregate"],
    )
}

fn not_in_correlated(rng: &mut Rng, t: &[Table]) -> Query {
    let (l, r) = *rng.pick(&[&("id", "b"), &("id", "id"), &("b", "id"), &("o", "o")]);
    tagged(
        format!(
            "SELECT id, o, a FROM {} x WHERE x.{l} NOT IN (SELECT y.{r} FROM {} y WHERE {} AND y.b > {})",
            table_name(rng, t),
            table_name(rng, t),
            rng.pick(&["y.a = x.a", "y.id = x.id", "y.id = x.a"]),
            rng.between(-1, 3)
        ),
        &["not in correlated"],
    )
}

fn marked(rng: &mut Rng, t: &[Table]) -> Query {
    let not = rng.pick(&["", "NOT "]);
    let (left, right) = (table_name(rng, t), table_name(rng, t));
    let (of, is) = (column(rng), column(rng));
    let filter = condition(rng, "");
    let sql = match rng.below(2) {
        0 => format!(
            "SELECT id, o, a FROM {left} WHERE {of} {not}IN (SELECT {is} FROM {right} WHERE {filter}) OR s = 'x'"
        ),
        _ => format!(
            "SELECT id, o, a FROM {left} x WHERE {not}EXISTS (SELECT 1 FROM {right} y WHERE {}) OR b > 3",
            same(rng)
        ),
    };
    tagged(sql, &["mark over keys"])
}

/// All three truth values of the membership.
fn mark_shown(rng: &mut Rng, t: &[Table]) -> Query {
    tagged(
        format!(
            "SELECT id, o, {} {}IN (SELECT {} FROM {} WHERE {}) AS m FROM {}",
            column(rng),
            rng.pick(&["", "NOT "]),
            rng.pick(&["a", "b"]),
            table_name(rng, t),
            condition(rng, ""),
            table_name(rng, t)
        ),
        &["mark over keys"],
    )
}

/// Rows without a key, some of them more than once.
fn first_of_rows(rng: &mut Rng, t: &[Table]) -> Query {
    let (x, y) = (table_name(rng, t), table_name(rng, t));
    let both = format!("SELECT a, b, f FROM {x} UNION ALL SELECT b, id, f FROM {y}");
    let n = rng.between(1, 8);
    tagged(format!("SELECT a, b FROM ({both}) u ORDER BY b DESC, a LIMIT {n}"), &["top-n of rows"])
}

fn membership(rng: &mut Rng, t: &[Table]) -> Query {
    let (left, right) = (table_name(rng, t), table_name(rng, t));
    let filter = condition(rng, "y.");
    let sql = match rng.below(3) {
        0 => format!(
            "SELECT id, o, s FROM {left} x WHERE EXISTS (SELECT 1 FROM {right} y WHERE {} AND ({filter}))",
            same(rng)
        ),
        1 => format!(
            "SELECT id, o, s FROM {left} x WHERE NOT EXISTS (SELECT 1 FROM {right} y WHERE {} AND ({filter}))",
            same(rng)
        ),
        _ => format!(
            "SELECT id, o, s FROM {left} WHERE {} IN (SELECT y.{} FROM {right} y WHERE {filter})",
            column(rng),
            column(rng)
        ),
    };
    tagged(sql, &["membership over keys"])
}

fn joined(rng: &mut Rng, t: &[Table]) -> Query {
    let residual = rng.pick(&["", "", " AND x.b <= y.b", " AND y.a > 1"]);
    tagged(
        format!(
            "SELECT x.id AS xid, x.o AS xo, x.a AS xa, y.id AS yid, y.o AS yo, y.s AS ys FROM {} x {} JOIN {} y ON {}{residual}",
            table_name(rng, t),
            rng.pick(&["", "LEFT", "RIGHT", "FULL"]),
            table_name(rng, t),
            same(rng)
        ),
        &["join over keys"],
    )
}

fn joined_groups(rng: &mut Rng, t: &[Table]) -> Query {
    let equal = rng.pick(&["x.g = y.g", "x.g IS NOT DISTINCT FROM y.g"]);
    let kind = rng.pick(&["", "LEFT", "RIGHT"]);
    tagged(
        format!(
            "SELECT x.g AS xg, x.c AS xc, y.g AS yg, y.c AS yc FROM (SELECT a AS g, count(*) AS c FROM {} GROUP BY a) x \
             {kind} JOIN (SELECT b AS g, max(id) AS c FROM {} GROUP BY b) y ON {equal}",
            table_name(rng, t),
            table_name(rng, t),
        ),
        &["join over nullable keys"],
    )
}

fn counted(rng: &mut Rng, t: &[Table]) -> Query {
    let group = rng.pick(&["id", "o", "id, a", "o, id"]);
    tagged(
        format!(
            "SELECT {group}, count(*) AS c, count(DISTINCT b) AS d, max(s) AS m, min(n) AS l, array_agg(a ORDER BY a) AS g FROM {} GROUP BY {group}",
            table_name(rng, t)
        ),
        &["aggregate by key"],
    )
}

fn first_of_key(rng: &mut Rng, t: &[Table]) -> Query {
    let (by, order) = *rng.pick(&[&("id", "o DESC"), &("o", "id"), &("a", "id"), &("id, o", "a")]);
    tagged(
        format!(
            "SELECT id, o, a, b FROM (SELECT *, row_number() OVER (PARTITION BY {by} ORDER BY {order}, o, id) AS rn FROM {}) q WHERE rn = 1",
            table_name(rng, t)
        ),
        &["first of key"],
    )
}

fn window_of_key(rng: &mut Rng, t: &[Table]) -> Query {
    let (by, order) = *rng.pick(&[&("id", "o"), &("a", "id"), &("id, o", "b"), &("id % 3", "id")]);
    tagged(
        format!(
            "SELECT id, o, lag(b) OVER w AS l, sum(n) OVER w AS s, count(*) OVER (PARTITION BY {by}) AS c FROM {} WINDOW w AS (PARTITION BY {by} ORDER BY {order}, o, id)",
            table_name(rng, t)
        ),
        &["window by key"],
    )
}

fn key_sets(rng: &mut Rng, t: &[Table]) -> Query {
    let operation = rng.pick(&["EXCEPT", "EXCEPT ALL", "INTERSECT", "INTERSECT ALL", "UNION"]);
    let (l, r) = *rng.pick(&[&("id", "id"), &("id", "a"), &("id, o", "id, o"), &("a", "id")]);
    combined(rng, t, operation, (l, r), "set operation over keys")
}
