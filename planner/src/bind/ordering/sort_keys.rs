//! What rows are ordered by where the bytes of values do not say it: intervals by their length, documents by
//! an order of their own ([`millrace_functions::byte_order`]).
//!
//! DataFusion and the keys of views order by bytes. Here ORDER BY, DISTINCT ON and the ORDER BY of
//! aggregates come to order by a value's key, in batch and views alike; windows do so in
//! [`crate::bind::windows::peers`], and comparisons in [`crate::bind::expressions::operators`].

use datafusion::arrow::datatypes::DataType;
use datafusion::common::{DFSchema, Result};
use datafusion::logical_expr::{Expr, ExprSchemable, LogicalPlan};
use millrace_common::SqlError;
use millrace_functions::error::external;
use millrace_functions::{byte_order, functions};

use super::by_keys::{change_aggregates, sort_by_keys, sorted};
use crate::bind::rewrites::plan::{PlanRewrite, change_nodes};

/// Orders values by their keys where bytes do not order them.
pub const ORDER_BY_KEYS: PlanRewrite = PlanRewrite::new("order by keys", |plan, _| rewrite(plan));

/// Rewrites the orders of a plan.
fn rewrite(plan: LogicalPlan) -> std::result::Result<LogicalPlan, SqlError> {
    change_nodes(plan, |node| match node {
        LogicalPlan::Aggregate(node) => change_aggregates(node, aggregate),
        other => sort_by_keys(other, key_of),
    })
}

/// An aggregate that DataFusion sorts the rows of; ours know the order of values themselves, and so does the
/// one that sorts distinct values.
fn aggregate(e: Expr, schema: &DFSchema) -> Result<Expr> {
    match e {
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
