//! LIMIT and OFFSET take rows in the order of the sort below them, which must not get lost.
//!
//! DataFusion leaves a sort out where the rows of the node above it are in no order that its columns tell, as those of a
//! projection without the key. So a limit comes right above its sort, below such projections. With LIMIT the sort itself
//! ends early, and stays. For OFFSET by itself there is a node that requires the order, and
//! for the sorted branches of a union, which come one after the other.

use std::fmt;
use std::sync::Arc;

use datafusion::common::Result;
use datafusion::common::tree_node::{Transformed, TransformedResult, TreeNodeRecursion};
use datafusion::config::ConfigOptions;
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::physical_expr::{LexOrdering, OrderingRequirements, PhysicalExpr};
use datafusion::physical_optimizer::PhysicalOptimizerRule;
use datafusion::physical_plan::limit::{GlobalLimitExec, LimitStream};
use datafusion::physical_plan::metrics::{BaselineMetrics, ExecutionPlanMetricsSet, MetricsSet};
use datafusion::physical_plan::projection::ProjectionExec;
use datafusion::physical_plan::sorts::sort::SortExec;
use datafusion::physical_plan::union::UnionExec;
use datafusion::physical_plan::{
    DisplayAs, DisplayFormatType, Distribution, ExecutionPlan, ExecutionPlanProperties,
    InputDistributionRequirements, Partitioning, PlanProperties, ReplaceChildrenOptions,
};
use millrace_functions::tree::Walk;

use super::over;

/// Runs before DataFusion's rules.
#[derive(Debug)]
pub struct OrderedLimits;

impl PhysicalOptimizerRule for OrderedLimits {
    fn optimize(
        &self,
        plan: Arc<dyn ExecutionPlan>,
        _: &ConfigOptions,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        plan.rewrite_up(|node| {
            if let Some(limit) = node.downcast_ref::<GlobalLimitExec>()
                && let Some(limited) = above_sort(limit.input(), limit.skip(), limit.fetch())?
            {
                return Ok(Transformed::yes(limited));
            }
            if !node.is::<UnionExec>() {
                return Ok(Transformed::no(node));
            }
            let inputs = node
                .children()
                .into_iter()
                .map(|input| Ok(above_sort(input, 0, None)?.unwrap_or_else(|| Arc::clone(input))));
            let inputs = inputs.collect::<Result<Vec<_>>>()?;
            over(node, inputs).map(Transformed::yes)
        })
        .data()
    }

    fn name(&self) -> &str {
        "ordered_limits"
    }

    fn schema_check(&self) -> bool {
        true
    }
}

/// A limit of a sort's rows, below the projections that stand between the two.
fn above_sort(
    plan: &Arc<dyn ExecutionPlan>,
    skip: usize,
    fetch: Option<usize>,
) -> Result<Option<Arc<dyn ExecutionPlan>>> {
    if let Some(projection) = plan.downcast_ref::<ProjectionExec>() {
        return match above_sort(projection.input(), skip, fetch)? {
            Some(limited) => over(Arc::clone(plan), vec![limited]).map(Some),
            None => Ok(None),
        };
    }
    let Some(sort) = plan.downcast_ref::<SortExec>() else { return Ok(None) };
    Ok(Some(match fetch {
        Some(fetch) => {
            let rows = skip.saturating_add(fetch);
            let rows = sort.fetch().map_or(rows, |before| before.min(rows));
            let sort = Arc::new(sort.with_fetch(Some(rows)));
            Arc::new(GlobalLimitExec::new(sort, skip, Some(fetch)))
        }
        None => Arc::new(OrderedOffset::new(Arc::clone(plan), sort.expr().clone(), skip)),
    }))
}

/// All rows of its input but the first ones of an order.
#[derive(Debug)]
struct OrderedOffset {
    input: Arc<dyn ExecutionPlan>,
    order: LexOrdering,
    skip: usize,
    metrics: ExecutionPlanMetricsSet,
    properties: Arc<PlanProperties>,
}

impl OrderedOffset {
    fn new(input: Arc<dyn ExecutionPlan>, order: LexOrdering, skip: usize) -> OrderedOffset {
        let properties = PlanProperties::new(
            input.equivalence_properties().clone(),
            Partitioning::UnknownPartitioning(1),
            input.pipeline_behavior(),
            input.boundedness(),
        );
        let metrics = ExecutionPlanMetricsSet::new();
        OrderedOffset { input, order, skip, metrics, properties: Arc::new(properties) }
    }
}

impl DisplayAs for OrderedOffset {
    fn fmt_as(&self, _: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "OrderedOffset: skip={}, order=[{}]", self.skip, self.order)
    }
}

impl ExecutionPlan for OrderedOffset {
    fn name(&self) -> &str {
        "OrderedOffset"
    }

    fn properties(&self) -> &Arc<PlanProperties> {
        &self.properties
    }

    fn input_distribution_requirements(&self) -> InputDistributionRequirements {
        InputDistributionRequirements::new(vec![Distribution::SinglePartition])
    }

    fn required_input_ordering(&self) -> Vec<Option<OrderingRequirements>> {
        vec![Some(OrderingRequirements::from(self.order.clone()))]
    }

    /// It does, but no other order may be asked for below it.
    fn maintains_input_order(&self) -> Vec<bool> {
        vec![false]
    }

    fn benefits_from_input_partitioning(&self) -> Vec<bool> {
        vec![false]
    }

    fn children(&self) -> Vec<&Arc<dyn ExecutionPlan>> {
        vec![&self.input]
    }

    fn apply_expressions(
        &self,
        f: &mut dyn FnMut(&Arc<dyn PhysicalExpr>) -> Result<TreeNodeRecursion>,
    ) -> Result<TreeNodeRecursion> {
        for by in &self.order {
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
        Ok(Arc::new(OrderedOffset::new(input, self.order.clone(), self.skip)))
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
        let metrics = BaselineMetrics::new(&self.metrics, partition);
        let rows = self.input.execute(partition, context)?;
        Ok(Box::pin(LimitStream::new(rows, self.skip, None, metrics)))
    }

    fn metrics(&self) -> Option<MetricsSet> {
        Some(self.metrics.clone_inner())
    }
}
