//! ORDER BY of aggregates and of DISTINCT ON that names an expression twice. The second time says nothing,
//! but DataFusion keeps as many columns as there are expressions for fewer values.

use datafusion::common::tree_node::Transformed;
use datafusion::logical_expr::expr::AggregateFunction;
use datafusion::logical_expr::{Distinct, DistinctOn, Expr, LogicalPlan, SortExpr};
use millrace_common::SqlError;

use super::by_keys::change_aggregates;
use crate::bind::rewrites::plan::{PlanRewrite, change_nodes};

/// Leaves out of orders what they name twice.
pub const DROP_REPEATED_ORDERS: PlanRewrite =
    PlanRewrite::new("drop repeated orders", |plan, _| rewrite(plan));

/// Leaves out what is repeated.
fn rewrite(plan: LogicalPlan) -> Result<LogicalPlan, SqlError> {
    change_nodes(plan, |node| match node {
        LogicalPlan::Aggregate(aggregate) if aggregate.aggr_expr.iter().any(repeats) => {
            change_aggregates(aggregate, |e, _| Ok(once(e)))
        }
        LogicalPlan::Distinct(Distinct::On(DistinctOn {
            on_expr,
            select_expr,
            sort_expr: Some(order),
            input,
            ..
        })) => {
            let on = DistinctOn::try_new(on_expr, select_expr, Some(first(order)), input)?;
            Ok(Transformed::yes(LogicalPlan::Distinct(Distinct::On(on))))
        }
        other => Ok(Transformed::no(other)),
    })
}

fn repeats(e: &Expr) -> bool {
    match e {
        Expr::Alias(alias) => repeats(&alias.expr),
        Expr::AggregateFunction(f) => {
            first(f.params.order_by.clone()).len() < f.params.order_by.len()
        }
        _ => false,
    }
}

fn once(e: Expr) -> Expr {
    match e {
        Expr::AggregateFunction(AggregateFunction { func, mut params }) => {
            params.order_by = first(params.order_by);
            Expr::AggregateFunction(AggregateFunction { func, params })
        }
        other => other,
    }
}

/// Each expression where it stands first.
fn first(order: Vec<SortExpr>) -> Vec<SortExpr> {
    let mut kept: Vec<SortExpr> = Vec::with_capacity(order.len());
    for by in order {
        if !kept.iter().any(|before| before.expr == by.expr) {
            kept.push(by);
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use crate::bind::rewrites::testing::rows;

    #[test]
    fn an_order_that_is_named_twice_orders_once() {
        let sql = "SELECT DISTINCT ON (a) a, b FROM (VALUES (1, 2), (1, 1)) AS v (a, b) \
                   ORDER BY a, a, b";
        assert_eq!(rows(sql), ["1|1"]);
        let sql = "SELECT array_agg(a ORDER BY b, b) FROM (VALUES (1, 2), (2, 1)) AS v (a, b)";
        assert_eq!(rows(sql), ["{2,1}"]);
    }
}
