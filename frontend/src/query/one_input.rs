//! Nodes with one input: what all of them do alike, around the little in which each differs.

use std::fmt;
use std::sync::Arc;

use datafusion::common::Result;
use datafusion::common::tree_node::TreeNodeRecursion;
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::physical_expr::{LexOrdering, OrderingRequirements, PhysicalExpr};
use datafusion::physical_plan::metrics::{ExecutionPlanMetricsSet, MetricsSet};
use datafusion::physical_plan::{
    DisplayAs, DisplayFormatType, Distribution, ExecutionPlan, InputDistributionRequirements,
    PlanProperties, ReplaceChildrenOptions,
};

use super::over;

/// The rows of a partition as they come.
pub type StreamResult = Result<SendableRecordBatchStream>;

/// What a node makes of the rows of its only input.
pub trait Operation: fmt::Debug + Clone + Send + Sync + Sized + 'static {
    const NAME: &'static str;

    /// Whether rows come out in the partitions and in the order in which they went in.
    const KEEPS_ORDER: bool = false;

    /// What is known of the node's rows: by default what is known of its input's.
    fn properties(&self, input: &Arc<dyn ExecutionPlan>) -> Arc<PlanProperties> {
        Arc::clone(input.properties())
    }

    /// The order in which the input's rows must come, in one partition; it is then not asked for another.
    fn required_order(&self) -> Option<&LexOrdering> {
        None
    }

    /// How many rows come out at the most.
    fn fetch(&self) -> Option<usize> {
        None
    }

    /// The node in a plan that is shown.
    fn describe(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(Self::NAME)
    }

    /// The rows of one of the node's partitions.
    fn execute(node: &OneInput<Self>, partition: usize, context: Arc<TaskContext>) -> StreamResult;
}

/// A node of a plan that does one [`Operation`] to the rows of its input.
#[derive(Debug)]
pub struct OneInput<O: Operation> {
    pub operation: O,
    pub input: Arc<dyn ExecutionPlan>,
    pub metrics: ExecutionPlanMetricsSet,
    properties: Arc<PlanProperties>,
}

impl<O: Operation> OneInput<O> {
    pub fn new(operation: O, input: Arc<dyn ExecutionPlan>) -> OneInput<O> {
        let properties = operation.properties(&input);
        OneInput { operation, input, metrics: ExecutionPlanMetricsSet::new(), properties }
    }
}

impl<O: Operation> DisplayAs for OneInput<O> {
    fn fmt_as(&self, _: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.operation.describe(f)
    }
}

impl<O: Operation> ExecutionPlan for OneInput<O> {
    fn name(&self) -> &str {
        O::NAME
    }

    fn properties(&self) -> &Arc<PlanProperties> {
        &self.properties
    }

    fn input_distribution_requirements(&self) -> InputDistributionRequirements {
        InputDistributionRequirements::new(vec![match self.operation.required_order() {
            Some(_) => Distribution::SinglePartition,
            None => Distribution::UnspecifiedDistribution,
        }])
    }

    fn required_input_ordering(&self) -> Vec<Option<OrderingRequirements>> {
        vec![self.operation.required_order().map(|order| OrderingRequirements::from(order.clone()))]
    }

    fn maintains_input_order(&self) -> Vec<bool> {
        vec![O::KEEPS_ORDER]
    }

    fn benefits_from_input_partitioning(&self) -> Vec<bool> {
        vec![!O::KEEPS_ORDER && self.operation.required_order().is_none()]
    }

    fn children(&self) -> Vec<&Arc<dyn ExecutionPlan>> {
        vec![&self.input]
    }

    fn apply_expressions(
        &self,
        f: &mut dyn FnMut(&Arc<dyn PhysicalExpr>) -> Result<TreeNodeRecursion>,
    ) -> Result<TreeNodeRecursion> {
        for by in self.operation.required_order().into_iter().flatten() {
            if f(&by.expr)? == TreeNodeRecursion::Stop {
                return Ok(TreeNodeRecursion::Stop);
            }
        }
        Ok(TreeNodeRecursion::Continue)
    }

    fn replace_children(
        self: Arc<Self>,
        mut children: Vec<Arc<dyn ExecutionPlan>>,
        _: ReplaceChildrenOptions,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let input = children.pop().unwrap_or_else(|| Arc::clone(&self.input));
        Ok(Arc::new(OneInput::new(self.operation.clone(), input)))
    }

    fn with_new_children(
        self: Arc<Self>,
        children: Vec<Arc<dyn ExecutionPlan>>,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        over(self, children)
    }

    fn execute(&self, partition: usize, context: Arc<TaskContext>) -> StreamResult {
        O::execute(self, partition, context)
    }

    fn metrics(&self) -> Option<MetricsSet> {
        Some(self.metrics.clone_inner())
    }

    fn fetch(&self) -> Option<usize> {
        self.operation.fetch()
    }
}
