//! Lists that compare the same value, which DataFusion merges: `x IN (a, b) AND x IN (c, d)` becomes one list of the items that
//! both have.
//!
//! It compares items as expressions: of columns it finds none in both lists, and of NULL it does not know that it may be
//! equal to any. And it makes `x NOT IN (1) OR x NOT IN (2)` true, which is NULL for an x that is. So lists that meet another
//! of the same value are arguments of a function while the rule runs ([`each_row`]): each is simplified for itself.

use datafusion::common::Result;
use datafusion::common::tree_node::{Transformed, TreeNode, TreeNodeRecursion};
use datafusion::logical_expr::expr::{InList, ScalarFunction};
use datafusion::logical_expr::expr_rewriter::NamePreserver;
use datafusion::logical_expr::{BinaryExpr, Expr, LogicalPlan, Operator};
use datafusion::optimizer::optimizer::ApplyOrder;
use datafusion::optimizer::{OptimizerConfig, OptimizerRule};
use millrace_common::collections::HashSet;
use millrace_functions::each_row::each_row;
use millrace_functions::quantified::compare_any;
use millrace_functions::tree::{Walk, WalkPlan};

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
        if !has_pairs(&plan)? {
            return self.0.rewrite(plan, config);
        }
        let apart = changed(plan, kept)?.data;
        let done = self.0.rewrite(apart, config)?.data;
        // The rule may put a node above this one, or below.
        Ok(Transformed::yes(
            done.rewrite_up_with_subqueries(|node| changed(node, no_longer_kept))?.data,
        ))
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
        Ok(e.rewrite_up(change)?.update_data(|e| name.restore(e)))
    };
    node.map_expressions(|e| match e {
        // Not its name counts, but those of what it groups by.
        Expr::GroupingSet(_) => e.map_children(one),
        e => one(e),
    })
}

/// Whether an expression of a node has lists of the same value.
fn has_pairs(node: &LogicalPlan) -> Result<bool> {
    let mut found = false;
    node.apply_expressions(|e| {
        found = meet(e)?;
        Ok(if found { TreeNodeRecursion::Stop } else { TreeNodeRecursion::Continue })
    })?;
    Ok(found)
}

fn meet(e: &Expr) -> Result<bool> {
    let (mut seen, mut twice) = (HashSet::default(), false);
    e.walk(|e| {
        let (value, next) = match e {
            Expr::InList(list) => (Some(list.expr.as_ref()), TreeNodeRecursion::Continue),
            Expr::ScalarFunction(call) => (any_of(call), TreeNodeRecursion::Continue),
            // The rule makes one list of it.
            Expr::BinaryExpr(BinaryExpr { op: Operator::Or, .. }) => match compared(e) {
                Some(value) => (Some(value), TreeNodeRecursion::Jump),
                None => (None, TreeNodeRecursion::Continue),
            },
            _ => (None, TreeNodeRecursion::Continue),
        };
        twice |= value.is_some_and(|value| !seen.insert(without_casts(value)));
        Ok(if twice { TreeNodeRecursion::Stop } else { next })
    })?;
    Ok(twice)
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
            match (left.as_ref(), right.as_ref()) {
                (value, Expr::Literal(..)) | (Expr::Literal(..), value) => value,
                _ => return None,
            }
        }
        Expr::InList(InList { expr, negated: false, .. }) => expr.as_ref(),
        _ => return None,
    };
    matches!(value, Expr::Column(_)).then_some(value)
}

/// Lists, and what the rule makes a list, as arguments.
fn kept(e: Expr) -> Result<Transformed<Expr>> {
    let is_list = match &e {
        Expr::InList(_) => true,
        Expr::ScalarFunction(call) => any_of(call).is_some(),
        Expr::BinaryExpr(BinaryExpr { op: Operator::Or, .. }) => compared(&e).is_some(),
        _ => false,
    };
    Ok(match is_list {
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

/// The value of `value = ANY (array)`, which becomes a list.
fn any_of(call: &ScalarFunction) -> Option<&Expr> {
    match call.args.as_slice() {
        [_, value, _] if call.func == compare_any() => Some(value),
        _ => None,
    }
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
        assert_eq!(rows(&format!("{value} FROM {V} WHERE id = 4")), ["t"]);
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
