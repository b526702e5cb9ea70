//! What rows are ordered by where the bytes of values do not say it: intervals by their length, documents by
//! an order of their own ([`millrace_functions::byte_order`]).
//!
//! DataFusion and the keys of views order by bytes. Here ORDER BY, DISTINCT ON and the ORDER BY of
//! aggregates come to order by a value's key, in batch and views alike; windows do so in
//! [`crate::bind::windows::peers`], and comparisons in [`crate::bind::expressions::operators`].

use datafusion::arrow::datatypes::DataType;
use datafusion::common::tree_node::Transformed;
use datafusion::common::{DFSchema, Result};
use datafusion::logical_expr::{Aggregate, Expr, ExprSchemable, LogicalPlan};
use millrace_common::SqlError;
use millrace_functions::error::{external, sql_error_from_datafusion};
use millrace_functions::tree::WalkPlan;
use millrace_functions::{byte_order, functions};

use super::by_keys::{keeping_names, sort_by_keys, sorted};
use crate::bind::rewrites::plan::PlanRewrite;

/// Orders values by their keys where bytes do not order them.
pub const ORDER_BY_KEYS: PlanRewrite = PlanRewrite::new("order by keys", |plan, _| rewrite(plan));

/// Rewrites the orders of a plan.
fn rewrite(plan: LogicalPlan) -> std::result::Result<LogicalPlan, SqlError> {
    let rewritten = plan.rewrite_up_with_subqueries(|node| {
        Ok(match node {
            LogicalPlan::Aggregate(Aggregate { input, group_expr, aggr_expr, schema, .. }) => {
                let aggr_expr = keeping_names(aggr_expr, input.schema(), aggregate)?;
                let aggregate =
                    Aggregate::try_new_with_schema(input, group_expr, aggr_expr, schema)?;
                Transformed::yes(LogicalPlan::Aggregate(aggregate))
            }
            other => sort_by_keys(other, key_of)?,
        })
    });
    rewritten.map(|t| t.data).map_err(sql_error_from_datafusion)
}

/// An aggregate that DataFusion sorts the rows of; ours know the order of values themselves, and so does the
/// one that sorts distinct values.
fn aggregate(e: Expr, schema: &DFSchema) -> Result<Expr> {
    match e {
        Expr::Alias(mut alias) => {
            *alias.expr = aggregate(*alias.expr, schema)?;
            Ok(Expr::Alias(alias))
        }
        Expr::AggregateFunction(mut call)
            if !call.params.distinct && DATAFUSIONS.contains(&call.func.name()) =>
        {
            call.params.order_by =
                sorted(std::mem::take(&mut call.params.order_by), schema, key_of)?;
            Ok(Expr::AggregateFunction(call))
        }
        other => Ok(other),
    }
}

const DATAFUSIONS: [&str; 4] = ["array_agg", "first_value", "last_value", "nth_value"];

/// What an expression is ordered by.
pub fn key_of(e: &Expr, schema: &DFSchema) -> Result<Expr> {
    // A constant orders nothing.
    if matches!(e, Expr::Literal(..)) {
        return Ok(e.clone());
    }
    Ok(match e.get_type(schema)? {
        DataType::Interval(_) => {
            let missing = || external(SqlError::internal("no function interval_span"));
            functions().scalar("interval_span").ok_or_else(missing)?.call(vec![e.clone()])
        }
        t if byte_order::by_value(&t) => byte_order::order_key().call(vec![e.clone()]),
        _ => e.clone(),
    })
}

#[cfg(test)]
mod tests {
    use crate::bind::rewrites::testing::rows;

    /// A month is 30 days.
    #[test]
    fn intervals_are_ordered_by_their_length() {
        let sql = "SELECT n FROM (VALUES (1, interval '40 days'), (2, interval '1 month'), \
                   (3, interval '1 day')) AS v (n, i) ORDER BY i";
        assert_eq!(rows(sql), ["3", "2", "1"]);
    }
}
