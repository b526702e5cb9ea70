//! Expressions of views, compiled.

use std::sync::{Arc, LazyLock};

use datafusion::common::DFSchema;
use datafusion::common::tree_node::TreeNodeRecursion;
use datafusion::config::ConfigOptions;
use datafusion::logical_expr::execution_props::ExecutionProps;
use datafusion::logical_expr::physical_planning_context::PhysicalPlanningContext;
use datafusion::logical_expr::{Expr, Volatility};
use datafusion::physical_expr::create_physical_expr;
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

/// What functions of views are told of settings. Calls that share them are compared by the pointer; otherwise DataFusion
/// compares all settings as texts.
static OPTIONS: LazyLock<Arc<ConfigOptions>> = LazyLock::new(Arc::default);

/// Compiles an expression over the columns of `schema`. Volatile functions, the clock, subqueries
/// that are still expressions, parameters: 0A000.
pub fn compile(e: &Expr, schema: &DFSchema) -> std::result::Result<ExprRef, SqlError> {
    check(e)?;
    let mut props = ExecutionProps::new();
    props.config_options = Some(Arc::clone(&OPTIONS));
    create_physical_expr(e, schema, &props, &PhysicalPlanningContext::default())
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
