//! Lists that compare the same value, which DataFusion merges: `x IN (a, b) AND x IN (c, d)` becomes one list of the items that
//! both have.
//!
//! It compares items as expressions: of columns it finds none in both lists, and of NULL it does not know that it may be
//! equal to any. And it makes `x NOT IN (1) OR x NOT IN (2)` true, which is NULL for an x that is. What is
//! merged well are conditions of a filter with constants: they keep the same rows whether they are false or NULL. Lists
//! anywhere else that meet another of the same value become calls ([`in_list`]), which nothing merges.

use std::sync::Arc;

use datafusion::common::tree_node::{Transformed, TreeNodeRecursion};
use datafusion::common::{DFSchema, Result};
use datafusion::logical_expr::expr::InList;
use datafusion::logical_expr::expr_rewriter::NamePreserver;
use datafusion::logical_expr::utils::{merge_schema, split_conjunction};
use datafusion::logical_expr::{Expr, ExprSchemable, LogicalPlan, Operator};
use datafusion::optimizer::optimizer::ApplyOrder;
use datafusion::optimizer::{OptimizerConfig, OptimizerRule};
use millrace_common::collections::HashMap;
use millrace_functions::in_list::in_list;
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
        let apart = kept_apart(plan)?;
        let done = self.0.rewrite(apart.data, config)?;
        Ok(Transformed::new_transformed(done.data, apart.transformed || done.transformed))
    }
}

fn kept_apart(plan: LogicalPlan) -> Result<Transformed<LogicalPlan>> {
    let filters = filters(&plan);
    let mut some = false;
    plan.apply_expressions(|e| {
        some |= meet(e, filters)?;
        Ok(if some { TreeNodeRecursion::Stop } else { TreeNodeRecursion::Continue })
    })?;
    // A scan has no lists of values that it does not compare with columns of its own.
    if !some {
        return Ok(Transformed::no(plan));
    }
    let schema = match &plan {
        LogicalPlan::TableScan(scan) => Arc::new(DFSchema::try_from_qualified_schema(
            scan.table_name.clone(),
            &scan.source.schema(),
        )?),
        plan => Arc::new(merge_schema(&plan.inputs())),
    };
    let names = NamePreserver::new(&plan);
    plan.map_expressions(|e| {
        if !meet(&e, filters)? {
            return Ok(Transformed::no(e));
        }
        let name = names.save(&e);
        let called = with_calls(e, filters, &schema)?;
        Ok(called.update_data(|e| name.restore(e)))
    })
}

/// Whether a node's expressions are conditions that its rows have to meet.
fn filters(plan: &LogicalPlan) -> bool {
    matches!(plan, LogicalPlan::Filter(_) | LogicalPlan::TableScan(_))
}

/// Whether lists of an expression compare the same value, one of which must not be merged with others.
fn meet(e: &Expr, filters: bool) -> Result<bool> {
    // By value: how many lists there are, and whether all of them are merged well.
    let mut met: HashMap<&Expr, (usize, bool)> = HashMap::default();
    let conditions = if filters { split_conjunction(e) } else { vec![e] };
    for condition in conditions {
        let fits = |list: &InList| filters && is_list(condition, list) && is_constant(list);
        condition.walk(|e| {
            if let Expr::InList(list) = e {
                let (count, fit) = met.entry(list.expr.as_ref()).or_insert((0, true));
                *count += 1;
                *fit &= fits(list);
            }
            Ok(TreeNodeRecursion::Continue)
        })?;
    }
    Ok(met.values().any(|(count, fit)| *count > 1 && !fit))
}

fn is_list(condition: &Expr, list: &InList) -> bool {
    matches!(condition, Expr::InList(l) if std::ptr::eq(l, list))
}

fn is_constant(list: &InList) -> bool {
    list.list.iter().all(|item| matches!(item, Expr::Literal(value, _) if !value.is_null()))
}

/// Calls instead of lists, but of conditions that are merged well.
fn with_calls(e: Expr, filters: bool, schema: &DFSchema) -> Result<Transformed<Expr>> {
    if filters && matches!(&e, Expr::InList(list) if is_constant(list)) {
        return Ok(Transformed::no(e));
    }
    if filters && let Expr::BinaryExpr(both) = e {
        if both.op != Operator::And {
            return all_called(Expr::BinaryExpr(both), schema);
        }
        let [left, right] = [*both.left, *both.right].map(|e| with_calls(e, filters, schema));
        let (left, right) = (left?, right?);
        let transformed = left.transformed || right.transformed;
        return Ok(Transformed::new_transformed(left.data.and(right.data), transformed));
    }
    all_called(e, schema)
}

fn all_called(e: Expr, schema: &DFSchema) -> Result<Transformed<Expr>> {
    e.rewrite_up(|e| match e {
        // Nothing is compared by a call that the call cannot compare.
        Expr::InList(list) if !list.expr.get_type(schema)?.is_nested() => {
            let args = [vec![*list.expr], list.list].concat();
            let call = in_list().call(args);
            Ok(Transformed::yes(if list.negated { !call } else { call }))
        }
        e => Ok(Transformed::no(e)),
    })
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

    #[test]
    fn conditions_with_constants_are_merged() {
        assert_eq!(found("x IN (1, 2, 3, 4, 5) AND x IN (5, 6, 7, 8)"), ["1"]);
        assert_eq!(found("x IN (1, 2, 3, 4, 5) AND x NOT IN (5, 6, 7, 8)"), ["2", "3"]);
    }
}
