//! Lists that compare the same value, which DataFusion merges: `x IN (a, b) AND x IN (c, d)` becomes one list of the items that
//! both have.
//!
//! It compares items as expressions: of columns it finds none in both lists, and of NULL it does not know that it may be
//! equal to any. And it makes `x NOT IN (1) OR x NOT IN (2)` true, which is NULL for an x that is. So where there may be two
//! lists, each is an argument of a function while the rule runs ([`each_row`]), and is simplified for itself.

use std::sync::Arc;

use datafusion::common::Result;
use datafusion::common::tree_node::{Transformed, TreeNode, TreeNodeRecursion};
use datafusion::logical_expr::expr::{InList, ScalarFunction};
use datafusion::logical_expr::expr_rewriter::NamePreserver;
use datafusion::logical_expr::{BinaryExpr, Expr, LogicalPlan, Operator};
use datafusion::optimizer::optimizer::ApplyOrder;
use datafusion::optimizer::{OptimizerConfig, OptimizerRule};
use millrace_functions::each_row::each_row;
use millrace_functions::quantified::compare_any;
use millrace_functions::tree::Walk;

use super::Rule;

/// A rule that merges lists, and meets none that it would merge to something else.
#[derive(Debug)]
pub struct ApartLists(pub Rule);

impl OptimizerRule for ApartLists {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn apply_order(&self) -> Option<ApplyOrder> {
        self.0.apply_order()
    }

    fn rewrite(
        &self,
        plan: LogicalPlan,
        config: &dyn OptimizerConfig,
    ) -> Result<Transformed<LogicalPlan>> {
        if !has_lists(&plan)? {
            return self.0.rewrite(plan, config);
        }
        let grouped = matches!(plan, LogicalPlan::Aggregate(_));
        let done = match self.0.rewrite(changed(plan, apart)?.data, config)?.data {
            // What is no plain aggregate the rule computes above it.
            LogicalPlan::Projection(mut above) if grouped => {
                let below = changed(Arc::unwrap_or_clone(above.input), joined)?.data;
                above.input = Arc::new(below);
                LogicalPlan::Projection(above)
            }
            done => done,
        };
        Ok(Transformed::yes(changed(done, joined)?.data))
    }
}

/// Changes a node's expressions, which keep their names.
fn changed(
    node: LogicalPlan,
    change: fn(Expr) -> Result<Transformed<Expr>>,
) -> Result<Transformed<LogicalPlan>> {
    let names = NamePreserver::new(&node);
    let one = |e: Expr| {
        let name = names.save(&e);
        Ok(change(e)?.update_data(|e| name.restore(e)))
    };
    node.map_expressions(|e| match e {
        // Not its name counts, but those of what it groups by.
        Expr::GroupingSet(_) => e.map_children(one),
        e => one(e),
    })
}

/// Whether an expression of a node may have two lists.
fn has_lists(node: &LogicalPlan) -> Result<bool> {
    let mut found = false;
    node.apply_expressions(|e| {
        found = may_meet(e)?;
        Ok(if found { TreeNodeRecursion::Stop } else { TreeNodeRecursion::Continue })
    })?;
    Ok(found)
}

/// Of which values they are is known only when the rule has simplified them.
fn may_meet(e: &Expr) -> Result<bool> {
    let mut lists = 0;
    e.walk(|e| {
        let (is_list, next) = match e {
            Expr::InList(_) | Expr::Case(_) => (true, TreeNodeRecursion::Continue),
            Expr::ScalarFunction(call) => (is_any(call), TreeNodeRecursion::Continue),
            // The rule makes one list of alternatives, also of those that it makes equalities.
            Expr::BinaryExpr(BinaryExpr { op: Operator::Or, .. }) => match compared(e) {
                Some(_) => (true, TreeNodeRecursion::Jump),
                None => (true, TreeNodeRecursion::Continue),
            },
            Expr::Not(of) => (is_and(of), TreeNodeRecursion::Continue),
            _ => (false, TreeNodeRecursion::Continue),
        };
        lists += usize::from(is_list);
        Ok(if lists > 1 { TreeNodeRecursion::Stop } else { next })
    })?;
    Ok(lists > 1)
}

fn is_and(e: &Expr) -> bool {
    matches!(e, Expr::BinaryExpr(BinaryExpr { op: Operator::And, .. }))
}

/// The rule takes casts from a value and puts them into the constants of its list.
fn without_casts(mut value: &Expr) -> &Expr {
    loop {
        value = match value {
            Expr::Cast(cast) => &cast.expr,
            Expr::TryCast(cast) => &cast.expr,
            value => return value,
        };
    }
}

/// The one column that alternatives compare with constants.
fn compared(e: &Expr) -> Option<&Expr> {
    let (mut column, mut parts) = (None, vec![e]);
    while let Some(part) = parts.pop() {
        if let Expr::BinaryExpr(BinaryExpr { left, op: Operator::Or, right }) = part {
            parts.extend([left.as_ref(), right.as_ref()]);
            continue;
        }
        let other = equal_to(part)?;
        if *column.get_or_insert(other) != other {
            return None;
        }
    }
    column
}

/// The column that is compared with constants.
fn equal_to(e: &Expr) -> Option<&Expr> {
    let value = match e {
        Expr::BinaryExpr(BinaryExpr { left, op: Operator::Eq, right }) => {
            match (is_constant(left), is_constant(right)) {
                (false, true) => left,
                (true, false) => right,
                _ => return None,
            }
        }
        Expr::InList(InList { expr, list, negated: false }) if list.iter().all(is_constant) => expr,
        _ => return None,
    };
    let value = without_casts(value);
    matches!(value, Expr::Column(_)).then_some(value)
}

/// Whether there is nothing in it that has other values for other rows.
fn is_constant(e: &Expr) -> bool {
    let varies = |e: &Expr| {
        Ok(matches!(
            e,
            Expr::Column(_)
                | Expr::OuterReferenceColumn(..)
                | Expr::ScalarSubquery(_)
                | Expr::Exists(_)
                | Expr::InSubquery(_)
                | Expr::SetComparison(_)
                | Expr::AggregateFunction(_)
                | Expr::WindowFunction(_)
        ))
    };
    matches!(e.any(varies), Ok(false))
}

/// Every comparison as an argument: no two of them meet, whatever the rule makes of each.
fn apart(e: Expr) -> Result<Transformed<Expr>> {
    e.transform_down_up(kept_whole, kept)
}

fn joined(e: Expr) -> Result<Transformed<Expr>> {
    e.rewrite_up(no_longer_kept)
}

/// Alternatives that become one list stay together.
fn kept_whole(e: Expr) -> Result<Transformed<Expr>> {
    let is_or = matches!(e, Expr::BinaryExpr(BinaryExpr { op: Operator::Or, .. }));
    Ok(match is_or && compared(&e).is_some() {
        true => Transformed::new(each_row().call(vec![e]), true, TreeNodeRecursion::Jump),
        false => Transformed::no(e),
    })
}

fn kept(e: Expr) -> Result<Transformed<Expr>> {
    let is_kept = match &e {
        Expr::InList(_) | Expr::Between(_) | Expr::Like(_) => true,
        Expr::ScalarFunction(call) => is_any(call),
        // Comparisons, and matches of patterns.
        Expr::BinaryExpr(of) => of.op.supports_propagation(),
        _ => false,
    };
    Ok(match is_kept {
        true => Transformed::yes(each_row().call(vec![e])),
        false => Transformed::no(e),
    })
}

fn no_longer_kept(e: Expr) -> Result<Transformed<Expr>> {
    Ok(match e {
        Expr::ScalarFunction(ScalarFunction { func, mut args })
            if func == each_row() && args.len() == 1 =>
        {
            Transformed::yes(args.remove(0))
        }
        e => Transformed::no(e),
    })
}

/// `value = ANY (array)`, which becomes a list.
fn is_any(call: &ScalarFunction) -> bool {
    call.func == compare_any()
}

#[cfg(test)]
mod tests {
    use crate::bind::rewrites::testing::rows;

    const V: &str = "(VALUES (1, 5, 5, 6, 5, 7), (2, 1, 9, 1, 1, 9), (3, 1, 0, 0, 0, 0), (4, NULL, 1, 2, 1, 2)) \
                     AS v (id, x, a, b, c, d)";

    /// The rows of [`V`], by their `id`, for which a condition is true. By hand, as PostgreSQL 15 has them.
    fn found(condition: &str) -> Vec<String> {
        rows(&format!("SELECT id FROM {V} WHERE {condition} ORDER BY id"))
    }

    #[test]
    fn lists_of_columns_are_not_merged() {
        assert_eq!(found("x IN (a, b) AND x IN (c, d)"), ["1", "2"]);
        assert!(found("x IN (a, b) AND x NOT IN (c)").is_empty());
        assert_eq!(found("x NOT IN (a, b) OR x NOT IN (c, d)"), ["3"]);
        assert_eq!(found("x IN (a, b) OR x IN (c, d, 1)"), ["1", "2", "3"]);
    }

    #[test]
    fn null_in_a_list_is_not_lost() {
        assert!(found("x IN (1, 2, 5, 6, 7) AND x NOT IN (3, 4, 8, 9, NULL)").is_empty());
        assert_eq!(found("x IN (1, NULL) AND x IN (1, 2, 3, 4, 5)"), ["2", "3"]);
    }

    #[test]
    fn lists_that_no_value_is_in_do_not_make_null_a_value() {
        assert_eq!(found("x NOT IN (1, 2, 3, 4) OR x NOT IN (6, 7, 8, 9)"), ["1", "2", "3"]);
        assert_eq!(found("NOT (x IN (1, 2, 3, 4) AND x IN (6, 7, 8, 9))"), ["1", "2", "3"]);
        let value = "SELECT (x IN (1, 2, 3, 4) AND x IN (6, 7, 8, 9)) IS NULL";
        assert_eq!(rows(&format!("{value} FROM {V} WHERE id = 4")), ["true"]);
    }

    /// The rule makes lists of them itself.
    #[test]
    fn alternatives_and_arrays_are_lists() {
        assert_eq!(found("(x = 1 OR x = 5) AND x IN (a, b)"), ["1", "2"]);
        assert!(found("x NOT IN (a, b, c, d) AND (x = 5 OR x = 6)").is_empty());
        assert_eq!(found("x = ANY (ARRAY[a, b]) AND x = ANY (ARRAY[c, d])"), ["1", "2"]);
        assert_eq!(found("x IN (a, b) AND x = ANY (ARRAY[c, d])"), ["1", "2"]);
        assert!(found("x = ANY ('{1,5}') AND x <> ALL ('{3,NULL}')").is_empty());
        let two = "(x = 1 OR x = 2) AND (x = 3 OR x = 4)";
        assert_eq!(found(&format!("NOT ({two})")), ["1", "2", "3"]);
        let inner = format!("SELECT * FROM {V} WHERE x IN (a, b, c, d)");
        let both = format!("SELECT id FROM ({inner}) AS s WHERE x IN (1, 5) ORDER BY id");
        assert_eq!(rows(&both), ["1", "2"]);
    }

    /// What the rule makes equalities, and lists of them.
    #[test]
    fn lists_that_arise_are_not_merged_either() {
        let by_type = |t: &str, condition: &str| {
            let columns = ["x", "a", "b", "c", "d"].map(|c| format!("{c}::{t} AS {c}")).join(", ");
            let from = format!("(SELECT id, {columns} FROM {V}) AS s");
            rows(&format!("SELECT id FROM {from} WHERE {condition} ORDER BY id"))
        };
        for t in ["smallint", "int", "bigint", "numeric", "float8"] {
            for condition in [
                "(x = 1 OR x = 5) AND x IN (a, b)",
                "(x = 1 OR x = 2 + 3) AND x IN (a, b)",
                "NOT (x <> 1 AND x <> 5) AND x IN (a, b)",
                "(x BETWEEN 5 AND 5 OR x = 1) AND x IN (a, b)",
                "(x = 1 OR (x = 5 AND 1 = 1)) AND x IN (a, b)",
                "x IN (a, b) AND x = ANY (ARRAY[c, d])",
                "coalesce(x) IN (a, b) AND x IN (c, d)",
                "CASE WHEN true THEN x END IN (a, b) AND x IN (c, d)",
            ] {
                assert_eq!(by_type(t, condition), ["1", "2"], "{t}: {condition}");
            }
        }
        assert_eq!(found("5 IN (a, b) AND 2 + 3 IN (c, d)"), ["1"]);
        let inner = format!("(SELECT *, x > 0 AS f FROM {V}) AS s");
        let condition = "f IN (x IN (a, b) AND x IN (c, d)) OR f = false";
        assert_eq!(
            rows(&format!("SELECT id FROM {inner} WHERE {condition} ORDER BY id")),
            ["1", "2"]
        );
    }

    /// The rule takes the cast away.
    #[test]
    fn a_cast_value_is_the_same() {
        let lists = "x NOT IN (1::bigint, 2, 3, 4) OR x NOT IN (6, 7, 8, 9)";
        let sql = format!("SELECT id FROM (SELECT id, x::int AS x FROM {V}) AS s WHERE {lists}");
        assert_eq!(rows(&format!("{sql} ORDER BY id")), ["1", "2", "3"]);
    }

    #[test]
    fn groups_by_lists_stay_groups() {
        let lists = "x IN (a, b) AND x IN (c, d)";
        let sql = format!("SELECT count(*) FROM {V} WHERE x > 0 GROUP BY ROLLUP ({lists})");
        assert_eq!(rows(&format!("{sql} ORDER BY 1")), ["1", "2", "3"]);
    }

    #[test]
    fn conditions_with_constants_hold() {
        assert_eq!(found("x IN (1, 2, 3, 4, 5) AND x IN (5, 6, 7, 8)"), ["1"]);
        assert_eq!(found("x IN (1, 2, 3, 4, 5) AND x NOT IN (5, 6, 7, 8)"), ["2", "3"]);
    }
}
