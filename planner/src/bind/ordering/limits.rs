//! LIMIT and OFFSET of a subquery's value, in batch: rows are numbered, and a filter compares their numbers with it.
//! Constant expressions are folded when the plan is optimised.

use std::sync::Arc;

use datafusion::arrow::datatypes::DataType;
use datafusion::common::tree_node::Transformed;
use datafusion::common::{Result, ScalarValue};
use datafusion::logical_expr::expr::WindowFunction;
use datafusion::logical_expr::{
    Distinct, Expr, ExprFunctionExt, Limit, LogicalPlan, LogicalPlanBuilder, Projection, ScalarUDF,
    SortExpr, cast, ident, lit,
};
use millrace_common::{SqlError, SqlState};
use millrace_functions::error::{external, sql_error_from_datafusion};
use millrace_functions::functions;
use millrace_functions::row_counts::{self, Clause};
use millrace_functions::tree::{Walk, WalkPlan};
use sqlparser::ast::Expr as Ast;

use crate::bind::expressions::clause_expressions::any_own;
use crate::bind::relations::provider::columns_of;
use crate::bind::relations::series::constant;
use crate::bind::rewrites::plan::PlanRewrite;
use crate::bind::subqueries::outer_references::subquery_of;

/// 42P10 where a LIMIT names a column: it has no rows to read one of.
pub fn check(e: &Ast, clause: &str) -> std::result::Result<(), SqlError> {
    if any_own(e, |e| matches!(e, Ast::Identifier(_) | Ast::CompoundIdentifier(_))) {
        let message = format!("argument of {clause} must not contain variables");
        return Err(SqlError::new(SqlState("42P10"), message));
    }
    Ok(())
}

/// 22003 where a number of rows is beyond what rows are counted in. `text`: the number.
pub fn check_size(text: &str) -> std::result::Result<(), SqlError> {
    let beyond =
        text.parse::<i64>().is_err() && text.parse::<f64>().is_ok_and(|n| n >= 2f64.powi(63));
    match beyond {
        true => Err(SqlError::new(SqlState("22003"), "bigint out of range")),
        false => Ok(()),
    }
}

/// Makes filters of limits that subqueries compute.
pub const FILTER_BY_LIMITS: PlanRewrite =
    PlanRewrite::new("filter by limits", |plan, session| rewrite(plan, session.for_view));

/// Rewrites every limit by a subquery; an error where a constant one is below zero.
fn rewrite(plan: LogicalPlan, for_view: bool) -> std::result::Result<LogicalPlan, SqlError> {
    let rewritten = plan.rewrite_up_with_subqueries(|node| {
        let LogicalPlan::Limit(limit) = &node else { return Ok(Transformed::no(node)) };
        if !has_subquery(limit)? {
            check_constant(&limit.fetch, Clause::Limit)?;
            check_constant(&limit.skip, Clause::Offset)?;
            return Ok(Transformed::no(node));
        }
        if for_view {
            let e = SqlError::unsupported("LIMIT of a subquery in a view");
            return Err(external(e.with_hint("A view's LIMIT is a constant.")));
        }
        numbered(&limit.input, limit).map(Transformed::yes)
    });
    rewritten.map(|t| t.data).map_err(sql_error_from_datafusion)
}

/// The planner would leave some of these out together with their subqueries, of which EXISTS is one.
fn check_constant(e: &Option<Box<Expr>>, clause: Clause) -> Result<()> {
    let Some(e) = e.as_deref().filter(|e| !e.is_volatile()) else { return Ok(()) };
    if let Some(ScalarValue::Int64(count)) = constant(e) {
        clause.rows(count).map_err(external)?;
    }
    Ok(())
}

fn has_subquery(limit: &Limit) -> Result<bool> {
    for e in [&limit.skip, &limit.fetch].into_iter().flatten() {
        if e.as_ref().any(|e| Ok(subquery_of(e).is_some()))? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Finds the order that the limit means, below projections.
fn numbered(plan: &LogicalPlan, limit: &Limit) -> Result<LogicalPlan> {
    match plan {
        LogicalPlan::Sort(sort) => {
            let kept = among_numbered(&sort.input, sort.expr.clone(), limit)?;
            LogicalPlanBuilder::from(kept).sort(sort.expr.clone())?.build()
        }
        LogicalPlan::Projection(p) if matches!(p.input.as_ref(), LogicalPlan::Sort(_)) => {
            let input = Arc::new(numbered(&p.input, limit)?);
            Projection::try_new(p.expr.clone(), input).map(LogicalPlan::Projection)
        }
        LogicalPlan::Distinct(Distinct::On(on)) if on.sort_expr.is_some() => {
            let e = SqlError::unsupported("LIMIT of a subquery after DISTINCT ON with ORDER BY");
            Err(external(e.with_hint("Write the query with DISTINCT ON in FROM.")))
        }
        other => among_numbered(other, Vec::new(), limit),
    }
}

const ROW: &str = "#row";

fn among_numbered(input: &LogicalPlan, order: Vec<SortExpr>, limit: &Limit) -> Result<LogicalPlan> {
    let missing = |name: &str| external(SqlError::internal(format!("{name} is not registered")));
    let row_number = functions().window("row_number").ok_or_else(|| missing("row_number"))?;
    let bigint = |e: Expr| cast(e, DataType::Int64);
    let given = |e: &Option<Box<Expr>>, rows: Arc<ScalarUDF>, otherwise: i64| match e.as_deref() {
        Some(e) => rows.call(vec![bigint(e.clone())]),
        None => lit(otherwise),
    };
    let call = Expr::from(WindowFunction::new(row_number, vec![]));
    let number = match order.is_empty() {
        true => call,
        false => call.order_by(order).build()?,
    };
    // Of a row behind the skipped ones; those themselves have none above zero.
    let place = bigint(ident(ROW)) - given(&limit.skip, row_counts::offset(), 0);
    let fetch = given(&limit.fetch, row_counts::limit(), i64::MAX);
    let kept = place.clone().gt(lit(0i64)).and(place.lt_eq(fetch));
    LogicalPlanBuilder::from(input.clone())
        .window([number.alias(ROW)])?
        .filter(kept)?
        .project(columns_of(input))?
        .build()
}

#[cfg(test)]
mod tests {
    use crate::bind::rewrites::testing::rows;

    #[test]
    fn a_subquery_says_how_many_rows_there_are() {
        let sql = "SELECT a FROM (VALUES (3), (1), (2)) AS v (a) ORDER BY a LIMIT (SELECT 2)";
        assert_eq!(rows(sql), ["1", "2"]);
        let sql = "SELECT a FROM (VALUES (3), (1), (2)) AS v (a) ORDER BY a OFFSET (SELECT 2)";
        assert_eq!(rows(sql), ["3"]);
    }
}
