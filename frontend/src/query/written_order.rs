//! UNION ALL in the order in which its branches are written, as clients of PostgreSQL see it.
//!
//! DataFusion runs the branches beside each other and takes rows as they come. Here they run beside each other too, each
//! as far as a few batches ahead, but their rows come branch by branch. Under a LIMIT a branch begins when the one before
//! it has ended: it may not be needed.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use arrow::array::RecordBatch;
use datafusion::common::Result;
use datafusion::common::tree_node::Transformed;
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::physical_plan::aggregates::{AggregateExec, AggregateMode};
use datafusion::physical_plan::coalesce_partitions::CoalescePartitionsExec;
use datafusion::physical_plan::coop::CooperativeExec;
use datafusion::physical_plan::filter::FilterExec;
use datafusion::physical_plan::limit::{LimitStream, LocalLimitExec};
use datafusion::physical_plan::metrics::BaselineMetrics;
use datafusion::physical_plan::projection::ProjectionExec;
use datafusion::physical_plan::repartition::RepartitionExec;
use datafusion::physical_plan::scalar_subquery::ScalarSubqueryExec;
use datafusion::physical_plan::stream::{RecordBatchReceiverStream, RecordBatchStreamAdapter};
use datafusion::physical_plan::union::UnionExec;
use datafusion::physical_plan::{
    ExecutionPlan, ExecutionPlanProperties, Partitioning, PlanProperties,
};
use futures::StreamExt;
use futures::stream;

use super::node_rule::{Changed, NodeRule};
use super::one_input::{OneInput, Operation, StreamResult};
use super::over;

/// Aggregates whose results are in the order of their rows.
const ORDERED: [&str; 2] = ["array_agg", "string_agg"];

/// Brings the branches of unions together in order. Runs after DataFusion's rules, which know nothing of it.
pub const WRITTEN_ORDER: NodeRule = NodeRule::new("written_order", in_order).then(result);

fn in_order(node: Arc<dyn ExecutionPlan>) -> Changed {
    Ok(match brought_together(&node)? {
        Some(ordered) => Transformed::yes(ordered),
        None => Transformed::no(node),
    })
}

/// What a client reads: partitions of a result are brought together where it runs.
fn result(plan: Arc<dyn ExecutionPlan>) -> Result<Arc<dyn ExecutionPlan>> {
    if plan.is::<ScalarSubqueryExec>() {
        let mut children: Vec<_> = plan.children().into_iter().map(Arc::clone).collect();
        if let Some(input) = children.first_mut() {
            *input = result(Arc::clone(input))?;
        }
        return over(plan, children);
    }
    Ok(match branches(&plan)? {
        Some((input, branches)) => InOrder::over(input, branches, None),
        None => plan,
    })
}

fn brought_together(node: &Arc<dyn ExecutionPlan>) -> Result<Option<Arc<dyn ExecutionPlan>>> {
    if let Some(coalesce) = node.downcast_ref::<CoalescePartitionsExec>() {
        let branches = branches(coalesce.input())?;
        return Ok(
            branches.map(|(input, branches)| InOrder::over(input, branches, coalesce.fetch()))
        );
    }
    match node.downcast_ref::<AggregateExec>() {
        Some(aggregate) if in_groups(aggregate) => match branches(aggregate.input())? {
            Some((input, branches)) => {
                let input = InOrder::over(input, branches, None);
                over(Arc::clone(node), vec![input]).map(Some)
            }
            None => Ok(None),
        },
        _ => Ok(None),
    }
}

/// Whether an aggregate reads rows whose order its results have, in groups that are then brought together by key.
fn in_groups(aggregate: &AggregateExec) -> bool {
    let ordered = aggregate
        .aggr_expr()
        .iter()
        .any(|f| f.order_bys().is_empty() && ORDERED.contains(&f.fun().name()));
    ordered
        && matches!(aggregate.mode(), AggregateMode::Partial)
        && !aggregate.group_expr().is_true_no_grouping()
}

/// How many partitions each branch has.
type Branches = Vec<usize>;

/// A plan whose partitions are those of the branches of a union, one after the other; `None`: it is none.
fn branches(plan: &Arc<dyn ExecutionPlan>) -> Result<Option<(Arc<dyn ExecutionPlan>, Branches)>> {
    if plan.is::<UnionExec>() {
        let mut all = Vec::new();
        let mut inputs = Vec::new();
        for input in plan.children() {
            let (input, parts) = match branches(input)? {
                Some(found) => found,
                None => {
                    let partitions = input.output_partitioning().partition_count();
                    (Arc::clone(input), vec![partitions])
                }
            };
            inputs.push(input);
            all.extend(parts);
        }
        let union = over(Arc::clone(plan), inputs)?;
        return Ok(Some((union, all)));
    }
    if let Some(repartition) = plan.downcast_ref::<RepartitionExec>() {
        return match repartition.partitioning() {
            // The branches run beside each other without it.
            Partitioning::RoundRobinBatch(_) => branches(repartition.input()),
            _ => Ok(None),
        };
    }
    if !by_rows(plan) {
        return Ok(None);
    }
    let [input] = plan.children()[..] else { return Ok(None) };
    match branches(input)? {
        Some((input, branches)) => Ok(Some((over(Arc::clone(plan), vec![input])?, branches))),
        None => Ok(None),
    }
}

/// Whether a node's partitions are those of its input, in the same order.
fn by_rows(plan: &Arc<dyn ExecutionPlan>) -> bool {
    let partial = |a: &AggregateExec| {
        matches!(a.mode(), AggregateMode::Partial) && a.group_expr().is_true_no_grouping()
    };
    plan.is::<ProjectionExec>()
        || plan.is::<FilterExec>()
        || plan.is::<CooperativeExec>()
        || plan.is::<LocalLimitExec>()
        || plan.downcast_ref::<AggregateExec>().is_some_and(partial)
}

/// Brings the partitions of branches into one, branch by branch.
#[derive(Clone, Debug)]
struct InOrder {
    branches: Branches,
    fetch: Option<usize>,
}

impl InOrder {
    fn over(
        input: Arc<dyn ExecutionPlan>,
        branches: Branches,
        fetch: Option<usize>,
    ) -> Arc<dyn ExecutionPlan> {
        Arc::new(OneInput::new(InOrder { branches, fetch }, input))
    }

    /// The partitions of each branch.
    fn ranges(&self) -> Vec<Range<usize>> {
        let mut next = 0;
        let range = |count: &usize| {
            let first = next;
            next += count;
            first..next
        };
        self.branches.iter().map(range).collect()
    }
}

/// Runs the partitions of a branch beside each other.
fn branch(
    input: &Arc<dyn ExecutionPlan>,
    partitions: Range<usize>,
    context: &Arc<TaskContext>,
) -> SendableRecordBatchStream {
    let mut builder = RecordBatchReceiverStream::builder(input.schema(), partitions.len().max(1));
    for partition in partitions {
        let (input, context, rows) = (Arc::clone(input), Arc::clone(context), builder.tx());
        builder.spawn(async move {
            let mut stream = input.execute(partition, context)?;
            while let Some(batch) = stream.next().await {
                let failed = batch.is_err();
                // Nobody reads on after an error, or where enough has been read.
                if rows.send(batch).await.is_err() || failed {
                    break;
                }
            }
            Ok(())
        });
    }
    builder.build()
}

impl Operation for InOrder {
    const NAME: &'static str = "InOrder";

    fn properties(&self, input: &Arc<dyn ExecutionPlan>) -> Arc<PlanProperties> {
        let mut equivalences = input.equivalence_properties().clone();
        equivalences.clear_orderings();
        equivalences.clear_per_partition_constants();
        Arc::new(PlanProperties::new(
            equivalences,
            Partitioning::UnknownPartitioning(1),
            input.pipeline_behavior(),
            input.boundedness(),
        ))
    }

    fn fetch(&self) -> Option<usize> {
        self.fetch
    }

    fn describe(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "InOrder: branches={:?}", self.branches)?;
        self.fetch.map_or(Ok(()), |fetch| write!(f, ", fetch={fetch}"))
    }

    fn execute(node: &OneInput<Self>, partition: usize, context: Arc<TaskContext>) -> StreamResult {
        let input = Arc::clone(&node.input);
        let schema = input.schema();
        let metrics = BaselineMetrics::new(&node.metrics, partition);
        let InOrder { fetch, .. } = node.operation;
        let ranges = node.operation.ranges().into_iter();
        let rows: stream::BoxStream<'static, Result<RecordBatch>> = match fetch {
            Some(_) => {
                let lazily = ranges.map(move |partitions| branch(&input, partitions, &context));
                stream::iter(lazily).flatten().boxed()
            }
            None => {
                let all: Vec<_> =
                    ranges.map(|partitions| branch(&input, partitions, &context)).collect();
                stream::iter(all).flatten().boxed()
            }
        };
        let rows = Box::pin(RecordBatchStreamAdapter::new(schema, rows));
        Ok(Box::pin(LimitStream::new(rows, 0, fetch, metrics)))
    }
}
