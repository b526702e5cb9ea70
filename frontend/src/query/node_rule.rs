//! Rules that change a plan node by node.

use std::sync::Arc;

use datafusion::common::Result;
use datafusion::common::tree_node::{Transformed, TransformedResult};
use datafusion::config::ConfigOptions;
use datafusion::physical_optimizer::PhysicalOptimizerRule;
use datafusion::physical_plan::ExecutionPlan;
use millrace_functions::tree::Walk;

/// A node of a plan as a rule leaves it.
pub type Changed = Result<Transformed<Arc<dyn ExecutionPlan>>>;

/// A rule that looks at each node by itself, inputs first.
#[derive(Debug)]
pub struct NodeRule {
    pub name: &'static str,
    /// Whether columns keep their types and whether they may be NULL.
    pub keeps_schema: bool,
    pub change: fn(Arc<dyn ExecutionPlan>) -> Changed,
}

impl PhysicalOptimizerRule for NodeRule {
    fn optimize(
        &self,
        plan: Arc<dyn ExecutionPlan>,
        _: &ConfigOptions,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        plan.rewrite_up(self.change).data()
    }

    fn name(&self) -> &str {
        self.name
    }

    fn schema_check(&self) -> bool {
        self.keeps_schema
    }
}
