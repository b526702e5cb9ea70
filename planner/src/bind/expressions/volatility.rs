//! A view's rows must be a function of its inputs: functions that are not are refused.

use std::ops::ControlFlow;

use datafusion::common::tree_node::TreeNodeRecursion;
use datafusion::logical_expr::{Expr, LogicalPlan, Volatility};
use millrace_common::SqlError;
use millrace_functions::error::sql_error_from_datafusion;
use millrace_functions::tree::{Walk, WalkPlan};

/// Refuses (0A000) functions in a view whose result changes from call to call or with the session.
pub fn check_view_volatility(plan: &LogicalPlan) -> Result<(), SqlError> {
    let mut found: ControlFlow<String> = ControlFlow::Continue(());
    plan.walk_with_subqueries(|node| {
        // Temporal filters: the stream planner takes those it understands and refuses the others.
        let in_filter = matches!(node, LogicalPlan::Filter(_));
        node.apply_expressions(|e| {
            e.walk(|e| {
                if let Some(name) = volatile(e).filter(|name| !(in_filter && name == "now")) {
                    found = ControlFlow::Break(name);
                    return Ok(TreeNodeRecursion::Stop);
                }
                Ok(TreeNodeRecursion::Continue)
            })
        })
    })
    .map_err(sql_error_from_datafusion)?;
    match found {
        ControlFlow::Continue(()) => Ok(()),
        ControlFlow::Break(name) => Err(SqlError::unsupported(format!("{name}() in a view"))
            .with_detail("Its result would depend on when the view is computed.")),
    }
}

fn volatile(e: &Expr) -> Option<String> {
    match e {
        Expr::ScalarFunction(f) if f.func.signature().volatility != Volatility::Immutable => {
            Some(f.func.name().to_owned())
        }
        Expr::AggregateFunction(f) if f.func.signature().volatility == Volatility::Volatile => {
            Some(f.func.name().to_owned())
        }
        Expr::Placeholder(p) => Some(format!("parameter {}", p.id)),
        _ => None,
    }
}
