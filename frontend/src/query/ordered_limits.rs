//! LIMIT and OFFSET take rows in the order of the sort below them, which must not get lost.
//!
//! DataFusion leaves a sort out where the rows of the node above it are in no order that its columns tell, as those of a
//! projection without the key. So a limit comes right above its sort, below such projections. With LIMIT the sort itself
//! ends early, and stays. For OFFSET by itself there is a node that requires the order, and
//! for the sorted branches of a union, which come one after the other.

use std::fmt;
use std::sync::Arc;

use datafusion::common::Result;
use datafusion::common::tree_node::Transformed;
use datafusion::execution::TaskContext;
use datafusion::physical_expr::LexOrdering;
use datafusion::physical_plan::limit::{GlobalLimitExec, LimitStream};
use datafusion::physical_plan::metrics::BaselineMetrics;
use datafusion::physical_plan::projection::ProjectionExec;
use datafusion::physical_plan::sorts::sort::SortExec;
use datafusion::physical_plan::union::UnionExec;
use datafusion::physical_plan::{
    ExecutionPlan, ExecutionPlanProperties, Partitioning, PlanProperties,
};

use super::node_rule::{Changed, NodeRule};
use super::one_input::{OneInput, Operation, StreamResult};
use super::over;

/// Runs before DataFusion's rules.
pub const ORDERED_LIMITS: NodeRule = NodeRule::new("ordered_limits", ordered);

fn ordered(node: Arc<dyn ExecutionPlan>) -> Changed {
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
        None => {
            let offset = OrderedOffset { order: sort.expr().clone(), skip };
            Arc::new(OneInput::new(offset, Arc::clone(plan)))
        }
    }))
}

/// Gives all rows of its input but the first ones of an order.
#[derive(Clone, Debug)]
struct OrderedOffset {
    order: LexOrdering,
    skip: usize,
}

impl Operation for OrderedOffset {
    const NAME: &'static str = "OrderedOffset";
    /// It does, but no other order may be asked for below it.
    const KEEPS_ORDER: bool = false;

    fn properties(&self, input: &Arc<dyn ExecutionPlan>) -> Arc<PlanProperties> {
        Arc::new(PlanProperties::new(
            input.equivalence_properties().clone(),
            Partitioning::UnknownPartitioning(1),
            input.pipeline_behavior(),
            input.boundedness(),
        ))
    }

    fn required_order(&self) -> Option<&LexOrdering> {
        Some(&self.order)
    }

    fn describe(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "OrderedOffset: skip={}, order=[{}]", self.skip, self.order)
    }

    fn execute(node: &OneInput<Self>, partition: usize, context: Arc<TaskContext>) -> StreamResult {
        let metrics = BaselineMetrics::new(&node.metrics, partition);
        let rows = node.input.execute(partition, context)?;
        Ok(Box::pin(LimitStream::new(rows, node.operation.skip, None, metrics)))
    }
}
