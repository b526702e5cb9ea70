//! Which of DataFusion's rules run, and why.
use std::sync::Arc;

use datafusion::config::ConfigOptions;
use datafusion::logical_expr::LogicalPlan;
use datafusion::optimizer::OptimizerRule;
use millrace_common::SqlError;

/// The options both batch and views are planned with.
pub fn config_options() -> ConfigOptions {
    ConfigOptions::new()
}

/// Analyser and optimiser rules of the batch session.
pub fn batch_rules() -> Vec<Arc<dyn OptimizerRule + Send + Sync>> {
    Vec::new()
}

/// The plan a view's stream plan is made of.
pub fn optimize_for_view(plan: LogicalPlan) -> Result<LogicalPlan, SqlError> {
    Ok(plan)
}

/// The plan a batch query runs as.
pub fn optimize_for_batch(plan: LogicalPlan) -> Result<LogicalPlan, SqlError> {
    Ok(plan)
}
