//! `FETCH FIRST n ROWS WITH TIES`: the first `n` rows and those that are level with the last of them.
//!
//! [`crate::bind::expressions::desugar`] marks the limit with a call of `with_ties`; here the limited sort becomes a
//! filter on `rank() OVER (ORDER BY …) <= offset + n`, and with an offset also on `row_number()`, which
//! batch and views both know.

use std::sync::Arc;

use datafusion::arrow::datatypes::DataType;
use datafusion::common::Result;
use datafusion::common::tree_node::Transformed;
use datafusion::logical_expr::expr::WindowFunction;
use datafusion::logical_expr::{
    Distinct, Expr, ExprFunctionExt, Limit, LogicalPlan, LogicalPlanBuilder, Projection, Sort,
    SubqueryAlias, cast, ident, lit,
};
use millrace_common::{SqlError, SqlState};
use millrace_functions::error::{external, sql_error_from_datafusion};
use millrace_functions::functions;
use millrace_functions::tree::WalkPlan;
use millrace_functions::window_fn::WITH_TIES;

use crate::bind::relations::provider::columns_of;
use crate::bind::rewrites::plan::PlanRewrite;

const RANK: &str = "#rank";
const ROW: &str = "#row";

/// Makes ranks of limits with ties.
pub const RANK_TIES: PlanRewrite = PlanRewrite::new("rank ties", |plan, _| rewrite(plan));

/// Rewrites every limit with ties.
fn rewrite(plan: LogicalPlan) -> std::result::Result<LogicalPlan, SqlError> {
    plan.rewrite_down_with_subqueries(|node| match marked(&node) {
        Some((limit, rows)) => {
            let skip = limit.skip.as_deref().cloned().unwrap_or_else(|| lit(0i64));
            Ok(Transformed::yes(limited(&limit.input, skip, rows)?))
        }
        None => Ok(Transformed::no(node)),
    })
    .map(|t| t.data)
    .map_err(sql_error_from_datafusion)
}

/// A limit with ties, and its number of rows.
fn marked(plan: &LogicalPlan) -> Option<(&Limit, &Expr)> {
    let LogicalPlan::Limit(limit) = plan else { return None };
    let Expr::ScalarFunction(call) = limit.fetch.as_deref()? else { return None };
    (call.func.name() == WITH_TIES).then_some((limit, call.args.first()?))
}

/// Finds the sort that the limit means, below projections.
fn limited(plan: &LogicalPlan, skip: Expr, rows: &Expr) -> Result<LogicalPlan> {
    match plan {
        LogicalPlan::Sort(sort) => with_ties(sort, skip, rows),
        // In an order that begins with all of its keys no two of its rows are level.
        LogicalPlan::Distinct(Distinct::On(on)) if on.sort_expr.is_some() => {
            let (skip, fetch) = (Some(Box::new(skip)), Some(Box::new(rows.clone())));
            Ok(LogicalPlan::Limit(Limit { skip, fetch, input: Arc::new(plan.clone()) }))
        }
        LogicalPlan::Projection(p) => {
            let input = Arc::new(limited(&p.input, skip, rows)?);
            Projection::try_new(p.expr.clone(), input).map(LogicalPlan::Projection)
        }
        LogicalPlan::SubqueryAlias(a) => {
            let input = Arc::new(limited(&a.input, skip, rows)?);
            SubqueryAlias::try_new(input, a.alias.clone()).map(LogicalPlan::SubqueryAlias)
        }
        _ => Err(external(SqlError::new(
            SqlState::SYNTAX_ERROR,
            "WITH TIES cannot be specified without ORDER BY clause",
        ))),
    }
}

fn with_ties(sort: &Sort, skip: Expr, rows: &Expr) -> Result<LogicalPlan> {
    let ranked = |function: &str, name: &str| -> Result<Expr> {
        let Some(udf) = functions().window(function) else {
            return Err(external(SqlError::internal(format!("{function} is not registered"))));
        };
        let call = Expr::from(WindowFunction::new(udf, vec![]));
        Ok(call.order_by(sort.expr.clone()).build()?.alias(name))
    };
    let bigint = |e: Expr| cast(e, DataType::Int64);
    let first = matches!(&skip, Expr::Literal(v, _) if v.to_string() == "0");
    let mut windows = vec![ranked("rank", RANK)?];
    let last =
        if first { bigint(rows.clone()) } else { bigint(skip.clone()) + bigint(rows.clone()) };
    let mut kept = bigint(ident(RANK)).lt_eq(last).and(bigint(rows.clone()).gt(lit(0i64)));
    if !first {
        windows.push(ranked("row_number", ROW)?);
        kept = kept.and(bigint(ident(ROW)).gt(bigint(skip)));
    }
    LogicalPlanBuilder::from(sort.input.as_ref().clone())
        .window(windows)?
        .filter(kept)?
        .project(columns_of(&sort.input))?
        .sort(sort.expr.clone())?
        .build()
}

#[cfg(test)]
mod tests {
    use crate::bind::rewrites::testing::rows;

    #[test]
    fn rows_that_are_level_with_the_last_are_taken_too() {
        let sql = "SELECT a FROM (VALUES (1), (3), (2), (2)) AS v (a) ORDER BY a \
                   FETCH FIRST 2 ROWS WITH TIES";
        assert_eq!(rows(sql), ["1", "2", "2"]);
    }
}
