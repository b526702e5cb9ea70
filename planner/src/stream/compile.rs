//! Expressions of views, compiled.

use datafusion::common::DFSchema;
use datafusion::common::tree_node::TreeNodeRecursion;
use datafusion::logical_expr::execution_props::ExecutionProps;
use datafusion::logical_expr::physical_planning_context::PhysicalPlanningContext;
use datafusion::logical_expr::{Expr, Volatility};
use millrace_common::SqlError;
use millrace_functions::error::sql_error_from_datafusion;
use millrace_functions::expr::ExprRef;
use millrace_functions::tree::Walk;

/// Functions that DataFusion calls stable and whose value is the clock's.
const CLOCK: [&str; 7] = [
    "now",
    "current_timestamp",
    "current_date",
    "current_time",
    "localtimestamp",
    "localtime",
    "today",
];

/// Compiles an expression over the columns of `schema`. Volatile functions, the clock, subqueries
/// that are still expressions, parameters: 0A000.
pub fn compile(e: &Expr, schema: &DFSchema) -> std::result::Result<ExprRef, SqlError> {
    check(e)?;
    datafusion::physical_expr::create_physical_expr(
        e,
        schema,
        &ExecutionProps::new(),
        &PhysicalPlanningContext::default(),
    )
    .map_err(sql_error_from_datafusion)
}

fn check(e: &Expr) -> std::result::Result<(), SqlError> {
    let mut refused = None;
    let walked = e.walk(|e| {
        refused = refusal(e);
        Ok(if refused.is_some() { TreeNodeRecursion::Stop } else { TreeNodeRecursion::Continue })
    });
    walked.map_err(sql_error_from_datafusion)?;
    refused.map_or(Ok(()), Err)
}

fn refusal(e: &Expr) -> Option<SqlError> {
    match e {
        Expr::ScalarFunction(f) => {
            let name = f.func.name();
            let volatile = f.func.signature().volatility == Volatility::Volatile;
            (volatile || CLOCK.contains(&name)).then(|| {
                SqlError::unsupported(format!("the function {name}() in a materialized view"))
                    .with_hint("Its result changes while the data does not.")
            })
        }
        Expr::ScalarSubquery(_)
        | Expr::InSubquery(_)
        | Expr::Exists(_)
        | Expr::SetComparison(_) => Some(
            SqlError::unsupported("this kind of correlated subquery in a materialized view")
                .with_hint("Write it as a join."),
        ),
        Expr::OuterReferenceColumn(_, c) => Some(
            SqlError::unsupported(format!("the reference to {} of an outer query", c.name))
                .with_hint("Write the subquery as a join."),
        ),
        Expr::Placeholder(p) => {
            Some(SqlError::unsupported(format!("the parameter {} in a materialized view", p.id)))
        }
        Expr::GroupingSet(_) => {
            Some(SqlError::unsupported("GROUPING SETS, ROLLUP or CUBE in a materialized view"))
        }
        _ => None,
    }
}
