//! −0 and NaN of floats in batch: as PostgreSQL has it, −0 is 0 and every NaN is the same and larger than all numbers.
//!
//! DataFusion sorts and parts rows by a float's bits. Where a query orders by a float, or parts rows by one in
//! DISTINCT ON, aggregates of distinct values and windows, it now does so by [`canonical`]. Views keep keys
//! in that form anyway, and DataFusion those of GROUP BY.

use datafusion::arrow::datatypes::DataType;
use datafusion::common::{DFSchema, Result};
use datafusion::logical_expr::expr::WindowFunction;
use datafusion::logical_expr::{Expr, ExprSchemable, LogicalPlan};
use millrace_common::SqlError;
use millrace_functions::canonical::canonical;

use super::by_keys::{all, change_aggregates, change_windows, keeping_names, sort_by_keys, sorted};
use crate::bind::rewrites::plan::{PlanRewrite, change_nodes};

/// Orders floats by value, in batch: views keep keys in that form anyway.
pub const ORDER_FLOATS: PlanRewrite =
    PlanRewrite::in_batch("order floats", |plan, _| rewrite(plan));

/// Rewrites sorts, DISTINCT ON and windows of a plan.
fn rewrite(plan: LogicalPlan) -> std::result::Result<LogicalPlan, SqlError> {
    change_nodes(plan, |node| match node {
        LogicalPlan::Window(node) => change_windows(node, window),
        LogicalPlan::Aggregate(mut node) => {
            node.group_expr = keeping_names(node.group_expr, node.input.schema(), group)?;
            change_aggregates(node, distinct)
        }
        other => sort_by_keys(other, one),
    })
}

fn window(e: Expr, schema: &DFSchema) -> Result<Expr> {
    match e {
        Expr::WindowFunction(mut call) => {
            let WindowFunction { params, .. } = call.as_mut();
            params.partition_by = all(&params.partition_by, schema, one)?;
            params.order_by = sorted(std::mem::take(&mut params.order_by), schema, one)?;
            Ok(Expr::WindowFunction(call))
        }
        other => Ok(other),
    }
}

/// What rows are grouped by, where it is an array: floats by themselves DataFusion compares by value.
fn group(e: Expr, schema: &DFSchema) -> Result<Expr> {
    match &e {
        Expr::GroupingSet(_) => Ok(e),
        e if matches!(e.get_type(schema)?, DataType::List(_)) => one(e, schema),
        _ => Ok(e),
    }
}

/// Aggregates whose results are in the order of their rows.
const ORDERED: [&str; 2] = ["array_agg", "string_agg"];

/// An aggregate of distinct values, or of values in an order.
fn distinct(e: Expr, schema: &DFSchema) -> Result<Expr> {
    match e {
        Expr::AggregateFunction(mut call) if ORDERED.contains(&call.func.name()) => {
            if call.params.distinct {
                call.params.args = all(&call.params.args, schema, one)?;
            }
            call.params.order_by = sorted(std::mem::take(&mut call.params.order_by), schema, one)?;
            Ok(Expr::AggregateFunction(call))
        }
        Expr::AggregateFunction(mut call) if call.params.distinct => {
            call.params.args = all(&call.params.args, schema, one)?;
            // One of its arguments: still the same expression.
            call.params.order_by = sorted(std::mem::take(&mut call.params.order_by), schema, one)?;
            Ok(Expr::AggregateFunction(call))
        }
        other => Ok(other),
    }
}

fn one(e: &Expr, schema: &DFSchema) -> Result<Expr> {
    let is_float = |t: &DataType| match t {
        DataType::List(item) => item.data_type().is_floating(),
        t => t.is_floating(),
    };
    let wrapped = |e: &Expr| matches!(e, Expr::ScalarFunction(f) if f.func == canonical());
    Ok(match is_float(&e.get_type(schema)?) && !wrapped(e) {
        true => canonical().call(vec![e.clone()]),
        false => e.clone(),
    })
}

#[cfg(test)]
mod tests {
    use crate::bind::rewrites::testing::rows;

    /// Both zeros are one value, and NaN is the largest.
    #[test]
    fn floats_are_ordered_by_value() {
        let values = "(VALUES (1, 'NaN'::float8), (2, '0'::float8), (3, '-0'::float8), \
                      (4, 'Infinity'::float8)) AS v (n, f)";
        assert_eq!(rows(&format!("SELECT n FROM {values} ORDER BY f, n")), ["2", "3", "4", "1"]);
        let sql = format!("SELECT DISTINCT ON (f) n FROM {values} ORDER BY f, n");
        assert_eq!(rows(&sql), ["2", "4", "1"]);
    }
}
