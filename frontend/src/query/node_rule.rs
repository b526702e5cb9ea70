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
    name: &'static str,
    /// Whether columns keep their types and whether they may be NULL.
    keeps_schema: bool,
    change: fn(Arc<dyn ExecutionPlan>) -> Changed,
    finish: Finish,
}

type Finish = fn(Arc<dyn ExecutionPlan>) -> Result<Arc<dyn ExecutionPlan>>;

impl NodeRule {
    /// A rule by its name, for columns that keep their types and that may be NULL as before.
    pub const fn new(
        name: &'static str,
        change: fn(Arc<dyn ExecutionPlan>) -> Changed,
    ) -> NodeRule {
        NodeRule { name, keeps_schema: true, change, finish: Ok }
    }

    /// The rule makes other columns.
    pub const fn of_other_columns(mut self) -> NodeRule {
        self.keeps_schema = false;
        self
    }

    /// What is done to the whole plan when all nodes have been looked at.
    pub const fn then(mut self, finish: Finish) -> NodeRule {
        self.finish = finish;
        self
    }
}

impl PhysicalOptimizerRule for NodeRule {
    fn optimize(
        &self,
        plan: Arc<dyn ExecutionPlan>,
        _: &ConfigOptions,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        (self.finish)(plan.rewrite_up(self.change).data()?)
    }

    fn name(&self) -> &str {
        self.name
    }

    fn schema_check(&self) -> bool {
        self.keeps_schema
    }
}
