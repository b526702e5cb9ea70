//! What is known of the rows below GROUPING SETS, ROLLUP or CUBE does not hold above them.
//!
//! A column that a set leaves out is NULL there. DataFusion goes on taking it for the constant that it was, for equal to
//! another column or for the key by which rows are spread. So between such an aggregate and its input stands a node that
//! says nothing of its rows.

use std::fmt;
use std::sync::Arc;

use datafusion::common::Result;
use datafusion::common::tree_node::{Transformed, TransformedResult, TreeNodeRecursion};
use datafusion::config::ConfigOptions;
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::physical_expr::{EquivalenceProperties, PhysicalExpr};
use datafusion::physical_optimizer::PhysicalOptimizerRule;
use datafusion::physical_plan::aggregates::AggregateExec;
use datafusion::physical_plan::{
    DisplayAs, DisplayFormatType, ExecutionPlan, ExecutionPlanProperties, Partitioning,
    PlanProperties, ReplaceChildrenOptions,
};
use millrace_functions::tree::Walk;

use super::over;

/// Runs before DataFusion's rules.
#[derive(Debug)]
pub struct GroupingSetsApart;

impl PhysicalOptimizerRule for GroupingSetsApart {
    fn optimize(
        &self,
        plan: Arc<dyn ExecutionPlan>,
        _: &ConfigOptions,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        plan.rewrite_up(|node| match node.downcast_ref::<AggregateExec>() {
            Some(aggregate) if aggregate.group_expr().has_grouping_set() => {
                let apart = Arc::new(Apart::new(Arc::clone(aggregate.input())));
                over(node, vec![apart]).map(Transformed::yes)
            }
            _ => Ok(Transformed::no(node)),
        })
        .data()
    }

    fn name(&self) -> &str {
        "grouping_sets_apart"
    }

    fn schema_check(&self) -> bool {
        true
    }
}

/// The rows of its input, of which nothing is known but their types.
#[derive(Debug)]
struct Apart {
    input: Arc<dyn ExecutionPlan>,
    properties: Arc<PlanProperties>,
}

impl Apart {
    fn new(input: Arc<dyn ExecutionPlan>) -> Apart {
        let properties = PlanProperties::new(
            EquivalenceProperties::new(input.schema()),
            Partitioning::UnknownPartitioning(input.output_partitioning().partition_count()),
            input.pipeline_behavior(),
            input.boundedness(),
        );
        Apart { input, properties: Arc::new(properties) }
    }
}

impl DisplayAs for Apart {
    fn fmt_as(&self, _: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Apart")
    }
}

impl ExecutionPlan for Apart {
    fn name(&self) -> &str {
        "Apart"
    }

    fn properties(&self) -> &Arc<PlanProperties> {
        &self.properties
    }

    fn children(&self) -> Vec<&Arc<dyn ExecutionPlan>> {
        vec![&self.input]
    }

    fn apply_expressions(
        &self,
        _: &mut dyn FnMut(&Arc<dyn PhysicalExpr>) -> Result<TreeNodeRecursion>,
    ) -> Result<TreeNodeRecursion> {
        Ok(TreeNodeRecursion::Continue)
    }

    fn replace_children(
        self: Arc<Self>,
        mut children: Vec<Arc<dyn ExecutionPlan>>,
        _: ReplaceChildrenOptions,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let input = children.pop().unwrap_or_else(|| Arc::clone(&self.input));
        Ok(Arc::new(Apart::new(input)))
    }

    fn with_new_children(
        self: Arc<Self>,
        children: Vec<Arc<dyn ExecutionPlan>>,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        over(self, children)
    }

    fn execute(
        &self,
        partition: usize,
        context: Arc<TaskContext>,
    ) -> Result<SendableRecordBatchStream> {
        self.input.execute(partition, context)
    }
}
