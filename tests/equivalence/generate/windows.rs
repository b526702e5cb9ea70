//! Queries with window functions.

use super::{Query, Table, condition, table_name, tagged};
use crate::rng::Rng;

fn partition(rng: &mut Rng) -> &'static str {
    rng.pick(&["", "PARTITION BY a ", "PARTITION BY s ", "PARTITION BY a, b "])
}

/// Functions of places and bounded frames, over a total order.
pub fn window_rows(rng: &mut Rng, t: &[Table]) -> Query {
    let functions = [
        "lag(n) OVER w AS w0",
        "lead(s, 2) OVER w AS w1",
        "lag(b, 2, 7) OVER w AS w2",
        "sum(b) OVER (w ROWS BETWEEN 2 PRECEDING AND CURRENT ROW) AS w3",
        "count(*) OVER (w ROWS BETWEEN 1 PRECEDING AND 2 FOLLOWING) AS w4",
        "max(n) OVER (w ROWS BETWEEN 3 PRECEDING AND 1 PRECEDING) AS w5",
        "min(t) OVER (w ROWS BETWEEN CURRENT ROW AND 1 FOLLOWING) AS w6",
        "first_value(s) OVER w AS w7",
        "last_value(b) OVER (w ROWS BETWEEN CURRENT ROW AND UNBOUNDED FOLLOWING) AS w8",
        "nth_value(n, 2) OVER w AS w9",
        "sum(n) OVER w AS w10",
        "count(a) FILTER (WHERE b > 1) OVER (w ROWS 2 PRECEDING) AS w11",
        "avg(b) OVER (w ROWS 1 PRECEDING) AS w12",
        "ntile(3) OVER w AS w13",
        "var_pop(b) OVER (w ROWS 3 PRECEDING) AS w14",
        "bit_or(a) OVER (w ROWS BETWEEN 1 PRECEDING AND 1 FOLLOWING) AS w15",
        "sum(n) OVER (w ROWS BETWEEN 2 PRECEDING AND 2 FOLLOWING EXCLUDE CURRENT ROW) AS w16",
        "nth_value(b, 2) OVER (w ROWS BETWEEN 1 PRECEDING AND 2 FOLLOWING EXCLUDE GROUP) AS w17",
        "lag(n, b) OVER w AS w18",
        "lead(b, a, o) OVER w AS w19",
    ];
    let first = rng.below(functions.len());
    let count = 1 + rng.below(3);
    let chosen: Vec<&str> =
        (0..count).map(|i| functions[(first + i * 5) % functions.len()]).collect();
    let direction = rng.pick(&["", " DESC", " NULLS FIRST"]);
    tagged(
        format!(
            "SELECT id, o, {} FROM {} WINDOW w AS ({}ORDER BY {}{direction}, o)",
            chosen.join(", "),
            table_name(rng, t),
            partition(rng),
            rng.pick(&["a", "b", "s", "t", "n"])
        ),
        &["window rows"],
    )
}

/// Frames of peers: rows that are level have equal results.
pub fn window_peers(rng: &mut Rng, t: &[Table]) -> Query {
    let frame = rng.pick(&[
        "",
        " RANGE BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW",
        " RANGE BETWEEN CURRENT ROW AND UNBOUNDED FOLLOWING",
        " RANGE CURRENT ROW",
        " GROUPS BETWEEN 1 PRECEDING AND CURRENT ROW",
        " GROUPS BETWEEN 1 PRECEDING AND 1 FOLLOWING",
        " RANGE BETWEEN 1 PRECEDING AND 1 FOLLOWING",
    ]);
    let function = rng.pick(&["sum(n)", "count(*)", "min(s)", "max(t)", "avg(a)", "count(n)"]);
    tagged(
        format!(
            "SELECT id, o, b, {function} OVER ({}ORDER BY b{frame}) AS w FROM {}",
            rng.pick(&["", "PARTITION BY s ", "PARTITION BY a "]),
            table_name(rng, t)
        ),
        &["window peers"],
    )
}

/// Frames by value and by groups, with rows left out or not.
pub fn window_values(rng: &mut Rng, t: &[Table]) -> Query {
    let (order, near, far) = *rng.pick(&[
        &("a", "1", "2"),
        &("b", "0", "3"),
        &("n", "1.75", "94.26"),
        &("f", "0.1", "1"),
        &("t", "INTERVAL '20 seconds'", "INTERVAL '1 minute 5 seconds'"),
        &("t::date", "INTERVAL '12 hours'", "INTERVAL '1 day'"),
        &("t::time", "INTERVAL '7 seconds'", "INTERVAL '1 hour'"),
        &("t", "INTERVAL '1 month'", "INTERVAL '1 year'"),
    ]);
    let frame = match rng.below(9) {
        0 => format!("RANGE BETWEEN {near} PRECEDING AND CURRENT ROW"),
        1 => format!("RANGE BETWEEN {far} PRECEDING AND {near} FOLLOWING"),
        2 => format!("RANGE BETWEEN {far} PRECEDING AND {near} PRECEDING"),
        3 => format!("RANGE BETWEEN {near} FOLLOWING AND {far} FOLLOWING"),
        4 => format!("RANGE BETWEEN CURRENT ROW AND {far} FOLLOWING"),
        5 => format!("RANGE BETWEEN UNBOUNDED PRECEDING AND {near} PRECEDING"),
        6 => format!("RANGE BETWEEN {near} PRECEDING AND UNBOUNDED FOLLOWING"),
        7 => "GROUPS BETWEEN 2 PRECEDING AND 1 PRECEDING".into(),
        _ => "GROUPS BETWEEN CURRENT ROW AND 1 FOLLOWING".into(),
    };
    let exclude =
        rng.pick(&["", "", "", " EXCLUDE CURRENT ROW", " EXCLUDE GROUP", " EXCLUDE TIES"]);
    let direction = rng.pick(&["", " DESC", " NULLS FIRST", " DESC NULLS LAST"]);
    let function = rng.pick(&["sum(n)", "count(*)", "min(s)", "max(t)", "avg(a)", "count(b)"]);
    let filter = if rng.chance(20) { " FILTER (WHERE a > 1)" } else { "" };
    tagged(
        format!(
            "SELECT id, o, {function}{filter} OVER ({}ORDER BY {order}{direction} {frame}{exclude}) AS w FROM {}",
            rng.pick(&["", "PARTITION BY s ", "PARTITION BY a "]),
            table_name(rng, t)
        ),
        &["window values"],
    )
}

pub fn window_numbers(rng: &mut Rng, t: &[Table]) -> Query {
    let rank = rng.pick(&["rank()", "dense_rank()", "percent_rank()", "cume_dist()"]);
    let order = rng.pick(&["b", "n DESC", "s NULLS FIRST", "t"]);
    tagged(
        format!(
            "SELECT id, o, row_number() OVER ({p}ORDER BY {order}, o) AS r, {rank} OVER ({p}ORDER BY {order}) AS k FROM {}",
            table_name(rng, t),
            p = partition(rng)
        ),
        &["window rank"],
    )
}

pub fn two_windows(rng: &mut Rng, t: &[Table]) -> Query {
    tagged(
        format!(
            "SELECT x.id AS xid, x.o AS xo, y.o AS yo, count(*) OVER (PARTITION BY x.a) AS n, lag(y.n) OVER (PARTITION BY x.s ORDER BY x.o, y.o) AS l, row_number() OVER (PARTITION BY x.a ORDER BY y.o DESC, x.o) AS r FROM {} x JOIN {} y ON x.a = y.b WHERE {}",
            table_name(rng, t),
            table_name(rng, t),
            condition(rng, "x.")
        ),
        &["window rows", "window rank", "join inner"],
    )
}
