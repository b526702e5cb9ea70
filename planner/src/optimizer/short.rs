//! A short way for plans that look up a row and compute little of it.
//!
//! A statement by key is planned in a fraction of the time that all rules take to find nothing to do. What is simple
//! ([`is_simple`]) consists of nodes and expressions of which most rules know nothing; those that change such a plan run in
//! the order that they have in the whole list. The expressions are such that a row of them takes no time that anybody
//! would wait for: nobody has to be able to interrupt them.

use std::sync::{Arc, OnceLock};

use datafusion::common::tree_node::TreeNodeRecursion;
use datafusion::config::ConfigOptions;
use datafusion::logical_expr::{Expr, LogicalPlan, Operator};
use datafusion::optimizer::optimizer::Optimizer;
use millrace_common::SqlError;
use millrace_common::collections::HashSet;
use millrace_functions::tree::Walk;

use super::{Rule, batch_options, batch_rules, run_rules};

/// Rows of VALUES that are few.
pub const FEW_ROWS: usize = 16;
/// Parts of a plan's expressions that are few.
const FEW_PARTS: usize = 500;
/// Nodes of a plan that are few.
const FEW_NODES: usize = 16;

/// The rules that change plans of projections and filters over one table.
const RULES: [&str; 5] = [
    "simplify_expressions",
    "eliminate_filter",
    "propagate_empty_relation",
    "push_down_filter",
    "optimize_projections",
];

/// The same where a node computes something twice.
const SHARING: &str = "common_sub_expression_eliminate";

/// Functions of ours that are quick on any row. Casts are too.
const QUICK: [&str; 10] = [
    "coalesce",
    "nullif",
    "pg_abs",
    "pg_add",
    "pg_div",
    "pg_mod",
    "pg_mul",
    "pg_neg",
    "pg_sub",
    "canonical_float",
];

/// Whether a plan is made of projections and filters over one scan, or over a few given rows, whose expressions are quick.
pub fn is_simple(plan: &LogicalPlan) -> bool {
    let mut left = FEW_PARTS;
    let mut node = plan;
    for _ in 0..FEW_NODES {
        node = match node {
            LogicalPlan::Projection(p) if p.expr.iter().all(|e| is_quick(e, &mut left)) => &p.input,
            LogicalPlan::Filter(f) if is_quick(&f.predicate, &mut left) => &f.input,
            LogicalPlan::SubqueryAlias(a) => &a.input,
            LogicalPlan::TableScan(scan) => return scan.fetch.is_none() && scan.filters.is_empty(),
            LogicalPlan::EmptyRelation(_) => return true,
            LogicalPlan::Values(v) => {
                return v.values.len() <= FEW_ROWS
                    && v.values.iter().flatten().all(|e| is_quick(e, &mut left));
            }
            _ => return false,
        };
    }
    false
}

/// Whether an expression is quick on any row, and has no more than these parts, which it uses up.
fn is_quick(e: &Expr, left: &mut usize) -> bool {
    let mut quick = true;
    let walked = e.walk(|e| {
        quick = *left > 0 && is_quick_part(e);
        *left = left.saturating_sub(1);
        Ok(if quick { TreeNodeRecursion::Continue } else { TreeNodeRecursion::Stop })
    });
    walked.is_ok() && quick
}

fn is_quick_part(e: &Expr) -> bool {
    use Operator as Op;
    match e {
        Expr::Alias(_) | Expr::Column(_) | Expr::Literal(..) | Expr::Cast(_) => true,
        Expr::Not(_) | Expr::Negative(_) | Expr::IsNull(_) | Expr::IsNotNull(_) => true,
        Expr::IsTrue(_) | Expr::IsFalse(_) | Expr::IsUnknown(_) => true,
        Expr::IsNotTrue(_) | Expr::IsNotFalse(_) | Expr::IsNotUnknown(_) => true,
        Expr::Between(_) | Expr::Case(_) | Expr::InList(_) => true,
        Expr::BinaryExpr(b) => matches!(
            b.op,
            Op::And
                | Op::Or
                | Op::Eq
                | Op::NotEq
                | Op::Lt
                | Op::LtEq
                | Op::Gt
                | Op::GtEq
                | Op::Plus
                | Op::Minus
                | Op::Multiply
                | Op::Divide
                | Op::Modulo
                | Op::IsDistinctFrom
                | Op::IsNotDistinctFrom
        ),
        Expr::ScalarFunction(f) => {
            let name = f.func.name();
            QUICK.contains(&name) || name.starts_with("cast_to_")
        }
        _ => false,
    }
}

/// The optimised form of a plan that [`is_simple`].
pub fn optimize_simple(plan: LogicalPlan) -> Result<LogicalPlan, SqlError> {
    static OPTIONS: OnceLock<[Arc<ConfigOptions>; 2]> = OnceLock::new();
    static LISTS: OnceLock<[Optimizer; 2]> = OnceLock::new();
    let [once, again] = OPTIONS.get_or_init(|| {
        let (mut once, again) = (batch_options(), batch_options());
        once.optimizer.max_passes = 1;
        [Arc::new(once), Arc::new(again)]
    });
    let [apart, sharing] = LISTS.get_or_init(|| [list(|name| name != SHARING), list(|_| true)]);
    // What has no projection over another one is done after one pass: nothing is merged that would be looked at again.
    let (projections, repeats) = looked_over(&plan);
    match projections > 1 || repeats {
        true => run_rules(plan, sharing, again),
        false => run_rules(plan, apart, once),
    }
}

fn list(wanted: impl Fn(&str) -> bool) -> Optimizer {
    let listed = |rule: &Rule| {
        let name = rule.name();
        (RULES.contains(&name) || name == SHARING) && wanted(name)
    };
    Optimizer::with_rules(super::interruptible(batch_rules().into_iter().filter(listed)))
}

/// How many projections a simple plan has, and whether a node of it has the same computation in two places.
fn looked_over(plan: &LogicalPlan) -> (usize, bool) {
    let (mut projections, mut repeats) = (0, false);
    let mut next = Some(plan);
    while let Some(node) = next {
        let mut seen = HashSet::default();
        match node {
            LogicalPlan::Projection(p) => {
                projections += 1;
                repeats |= p.expr.iter().any(|e| has_repeats(e, &mut seen));
            }
            LogicalPlan::Filter(f) => repeats |= has_repeats(&f.predicate, &mut seen),
            _ => {}
        }
        next = node.inputs().into_iter().next();
    }
    (projections, repeats)
}

fn has_repeats<'n>(e: &'n Expr, seen: &mut HashSet<&'n Expr>) -> bool {
    let mut repeats = false;
    let walked = e.walk(|e| {
        let computes = !matches!(e, Expr::Alias(_) | Expr::Column(_) | Expr::Literal(..));
        repeats |= computes && !seen.insert(e);
        Ok(TreeNodeRecursion::Continue)
    });
    repeats || walked.is_err()
}

#[cfg(test)]
mod tests {
    use datafusion::logical_expr::LogicalPlanBuilder;
    use datafusion::logical_expr::{col, lit};
    use datafusion::prelude::SessionContext;

    use super::*;

    async fn plan(query: &str) -> LogicalPlan {
        let tables = SessionContext::new();
        let made = "CREATE TABLE t (id BIGINT, v BIGINT, name VARCHAR) AS VALUES (1, 2, 'a')";
        tables.sql(made).await.unwrap();
        tables.state().create_logical_plan(query).await.unwrap()
    }

    #[tokio::test]
    async fn only_quick_plans_over_one_relation_are_simple() {
        for query in [
            "SELECT * FROM t",
            "SELECT id, v + 1 AS w FROM t AS s WHERE s.id = 5 AND v > 3",
            "SELECT x FROM (SELECT v * 2 AS x, id FROM t) AS s WHERE id = 5",
            "SELECT 1, CAST('2' AS BIGINT)",
            "VALUES (1, 'a'), (2, 'b')",
            "SELECT CASE WHEN v IN (1, 2) THEN id ELSE coalesce(v, 0) END FROM t",
        ] {
            assert!(is_simple(&plan(query).await), "{query}");
        }
        for query in [
            "SELECT * FROM t LIMIT 1",
            "SELECT * FROM t ORDER BY v",
            "SELECT DISTINCT v FROM t",
            "SELECT count(*) FROM t",
            "SELECT row_number() OVER () FROM t",
            "SELECT a.id FROM t AS a, t AS b",
            "SELECT id FROM t UNION ALL SELECT v FROM t",
            "SELECT id FROM t WHERE v IN (SELECT id FROM t)",
            "SELECT (SELECT max(v) FROM t) FROM t",
            "SELECT random() FROM t",
            "SELECT repeat(name, 1000000) FROM t WHERE id = 1",
            "SELECT id FROM t WHERE name LIKE '%a%b%'",
        ] {
            assert!(!is_simple(&plan(query).await), "{query}");
        }
    }

    #[tokio::test]
    async fn what_is_large_is_not_simple() {
        let rows: Vec<String> = (0..=FEW_ROWS).map(|row| format!("({row})")).collect();
        assert!(is_simple(&plan(&format!("VALUES {}", rows[1..].join(", "))).await));
        assert!(!is_simple(&plan(&format!("VALUES {}", rows.join(", "))).await));
        let table = plan("SELECT v FROM t").await;
        let list = |parts: i64| (0..parts).map(lit).collect::<Vec<Expr>>();
        for (parts, simple) in [(10, true), (FEW_PARTS as i64, false)] {
            let filter = col("v").in_list(list(parts), false);
            let filtered = LogicalPlanBuilder::from(table.clone()).filter(filter).unwrap();
            assert_eq!(is_simple(&filtered.build().unwrap()), simple, "{parts} parts");
        }
    }

    /// All rules change a plan that the short list has been over no more than to what they make of it themselves.
    #[tokio::test]
    async fn the_short_list_finds_the_plan_of_the_long_one() {
        for query in [
            "SELECT id, v + 1 AS w FROM t AS s WHERE s.id = 5 AND v > 3",
            "SELECT v + 1, (v + 1) * 2, -(v + 1) FROM t WHERE id = CAST('5' AS BIGINT)",
            "SELECT name FROM (SELECT v * 2 AS x, id, name FROM t) AS s WHERE x > 7 AND id = 1",
            "SELECT x + x FROM (SELECT v * 2 AS x, id FROM t) AS s",
            "SELECT * FROM t WHERE 1 = 2",
            "SELECT * FROM t WHERE 1 = 1",
            "SELECT * FROM t WHERE id = 1 AND NULL",
            "SELECT id FROM (SELECT id FROM t WHERE v = 1) AS s WHERE id = 2",
            "SELECT id FROM t WHERE id = 1 AND (id = 1 OR v / 0 = 1)",
            "SELECT 1 + 1",
            "VALUES (1 + 1), (2)",
        ] {
            let plan = plan(query).await;
            assert!(is_simple(&plan), "{query}");
            let short = optimize_simple(plan.clone()).unwrap().display_indent().to_string();
            let long = super::super::optimize_for_batch(plan).unwrap().display_indent().to_string();
            assert_eq!(short, long, "{query}");
        }
    }

    #[test]
    fn computations_in_two_places_are_found() {
        let of = |exprs: Vec<Expr>| {
            let plan = LogicalPlanBuilder::empty(true).build().unwrap();
            let one = LogicalPlanBuilder::from(plan).project([lit(1_i64).alias("v")]).unwrap();
            looked_over(&one.project(exprs).unwrap().build().unwrap())
        };
        let sum = || col("v") + lit(1_i64);
        assert_eq!(of(vec![sum(), col("v").alias("w")]), (2, false));
        assert_eq!(of(vec![sum(), (sum() * lit(2_i64)).alias("w")]), (2, true));
    }
}
