//! DataFusion's rules over physical plans, which end with the statement that is planned.

use std::sync::Arc;

use datafusion::config::ConfigOptions;
use datafusion::error::{DataFusionError, Result};
use datafusion::physical_optimizer::{PhysicalOptimizerContext, PhysicalOptimizerRule};
use datafusion::physical_plan::ExecutionPlan;

pub type Rule = Arc<dyn PhysicalOptimizerRule + Send + Sync>;

/// Rules before each of which it is asked whether the statement is still wanted.
pub fn interruptible(rules: impl IntoIterator<Item = Rule>) -> Vec<Rule> {
    rules.into_iter().map(|rule| Arc::new(Interruptible(rule)) as Rule).collect()
}

#[derive(Debug)]
struct Interruptible(Rule);

fn check() -> Result<()> {
    millrace_functions::interrupt::check().map_err(|e| DataFusionError::External(Box::new(e)))
}

impl PhysicalOptimizerRule for Interruptible {
    fn optimize(
        &self,
        plan: Arc<dyn ExecutionPlan>,
        config: &ConfigOptions,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        check()?;
        self.0.optimize(plan, config)
    }

    fn optimize_with_context(
        &self,
        plan: Arc<dyn ExecutionPlan>,
        context: &dyn PhysicalOptimizerContext,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        check()?;
        self.0.optimize_with_context(plan, context)
    }

    fn name(&self) -> &str {
        self.0.name()
    }

    fn schema_check(&self) -> bool {
        self.0.schema_check()
    }
}
