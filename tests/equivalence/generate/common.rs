//! Queries that name one subquery several times: its plan is shared, and its rows meet those made of them.

use super::{Query, Shape, Table, condition, group_columns, table_name, tagged};
use crate::rng::Rng;

pub const SHAPES: &[Shape] = &[beside_its_extreme, in_branches, twice_doubled, ranked_and_counted];

/// A subquery with state, its columns `k` and `c`.
fn counted(rng: &mut Rng, t: &[Table]) -> String {
    let table = table_name(rng, t);
    match rng.below(3) {
        0 => {
            format!(
                "SELECT a AS k, count(*) AS c FROM {table} WHERE {} GROUP BY a",
                condition(rng, "")
            )
        }
        1 => {
            format!("SELECT a AS k, count(b) AS c FROM {table} GROUP BY {}, a", group_columns(rng))
        }
        _ => format!(
            "SELECT x.a AS k, y.b AS c FROM {table} x JOIN {} y ON x.id = y.id AND x.o <= y.o",
            table_name(rng, t)
        ),
    }
}

fn beside_its_extreme(rng: &mut Rng, t: &[Table]) -> Query {
    let (extreme, op) = *rng.pick(&[&("max(c)", "="), &("min(c)", "<="), &("sum(k)", "<>")]);
    tagged(
        format!(
            "WITH n AS ({}) SELECT n.k, n.c, m.e FROM n JOIN (SELECT {extreme} AS e FROM n) m ON n.c {op} m.e",
            counted(rng, t)
        ),
        &["common subplan"],
    )
}

fn in_branches(rng: &mut Rng, t: &[Table]) -> Query {
    let join = rng.pick(&["LEFT JOIN", "JOIN", "FULL JOIN"]);
    tagged(
        format!(
            "WITH n AS ({}) SELECT x.k, x.s, y.s AS ys FROM (SELECT k, sum(c) AS s FROM n GROUP BY k) x \
             {join} (SELECT c, sum(k) AS s FROM n GROUP BY c) y ON x.k = y.c \
             UNION ALL SELECT k, c, NULL FROM n WHERE k > {}",
            counted(rng, t),
            rng.between(0, 3)
        ),
        &["common subplan"],
    )
}

/// What is shared shares what it is made of.
fn twice_doubled(rng: &mut Rng, t: &[Table]) -> Query {
    tagged(
        format!(
            "WITH n AS (SELECT k, max(c) AS c FROM ({}) i GROUP BY k), \
             m AS (SELECT x.k, x.c, y.k AS yk FROM n x LEFT JOIN n y ON x.c = y.c AND x.k < y.k) \
             SELECT p.k, p.yk, q.k AS qk FROM m p JOIN m q ON p.yk = q.k WHERE p.k IN (SELECT c FROM n)",
            counted(rng, t)
        ),
        &["common subplan"],
    )
}

fn ranked_and_counted(rng: &mut Rng, t: &[Table]) -> Query {
    let (limit, op) = (rng.between(1, 3), rng.pick(&["IN", "NOT IN"]));
    tagged(
        format!(
            "WITH n AS (SELECT k, sum(c) AS c FROM ({}) i WHERE k IS NOT NULL GROUP BY k), \
             f AS (SELECT k, c FROM n ORDER BY c DESC, k LIMIT {limit}) \
             SELECT n.k, n.c, (SELECT count(*) FROM f) AS r FROM n WHERE n.k {op} (SELECT k FROM f)",
            counted(rng, t)
        ),
        &["common subplan"],
    )
}
