//! −0 and NaN of floats in batch: as PostgreSQL has it, −0 is 0 and every NaN is the same and larger than all numbers.
//!
//! DataFusion sorts and parts rows by a float's bits. Where a query orders by a float, or parts rows by one in
//! DISTINCT ON, aggregates of distinct values and windows, it now does so by [`canonical`]. Views keep keys
//! in that form anyway, and DataFusion those of GROUP BY.

use datafusion::arrow::datatypes::DataType;
use datafusion::common::tree_node::Transformed;
use datafusion::common::{DFSchema, Result};
use datafusion::logical_expr::expr::WindowFunction;
use datafusion::logical_expr::{Aggregate, Expr, ExprSchemable, LogicalPlan, Window};
use millrace_common::SqlError;
use millrace_functions::canonical::canonical;
use millrace_functions::error::sql_error_from_datafusion;
use millrace_functions::tree::WalkPlan;

use super::by_keys::{all, keeping_names, sort_by_keys, sorted};
use crate::bind::rewrites::plan::PlanRewrite;

/// Orders floats by value, in batch: views keep keys in that form anyway.
pub const ORDER_FLOATS: PlanRewrite =
    PlanRewrite::new("order floats", |plan, session| match session.for_view {
        true => Ok(plan),
        false => rewrite(plan),
    });

/// Rewrites sorts, DISTINCT ON and windows of a plan.
fn rewrite(plan: LogicalPlan) -> std::result::Result<LogicalPlan, SqlError> {
    let rewritten = plan.rewrite_up_with_subqueries(|node| {
        Ok(match node {
            LogicalPlan::Window(Window { input, window_expr, schema }) => {
                let window_expr = keeping_names(window_expr, input.schema(), window)?;
                Transformed::yes(LogicalPlan::Window(Window { input, window_expr, schema }))
            }
            LogicalPlan::Aggregate(Aggregate { input, group_expr, aggr_expr, schema, .. }) => {
                let group_expr = keeping_names(group_expr, input.schema(), group)?;
                let aggr_expr = keeping_names(aggr_expr, input.schema(), distinct)?;
                let aggregate =
                    Aggregate::try_new_with_schema(input, group_expr, aggr_expr, schema)?;
                Transformed::yes(LogicalPlan::Aggregate(aggregate))
            }
            other => sort_by_keys(other, one)?,
        })
    });
    rewritten.map(|t| t.data).map_err(sql_error_from_datafusion)
}

fn window(e: Expr, schema: &DFSchema) -> Result<Expr> {
    match e {
        Expr::Alias(mut alias) => {
            *alias.expr = window(*alias.expr, schema)?;
            Ok(Expr::Alias(alias))
        }
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
        Expr::Alias(mut alias) => {
            *alias.expr = distinct(*alias.expr, schema)?;
            Ok(Expr::Alias(alias))
        }
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
