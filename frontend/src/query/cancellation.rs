//! Joins that end with their statement and leave room for other queries.
//!
//! A join without an equality compares every row with every other. DataFusion does this inside one poll until it has
//! rows to show, which may be never: for so long the task that runs it can be neither aborted nor put aside, and a
//! few such joins hold all threads for queries. So each join of a plan is wrapped in two places. Its stream gives the
//! thread back every few milliseconds, where rows do come. Its condition, which is computed for some thousand pairs at
//! a time, looks whether the statement has ended, and when the poll has gone on for long passes the other tasks of
//! its thread on to another thread.

use std::any::Any;
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use arrow::array::RecordBatch;
use arrow::datatypes::{Schema, SchemaRef};
use datafusion::common::tree_node::{Transformed, TreeNodeRecursion};
use datafusion::common::{JoinType, ScalarValue};
use datafusion::error::Result;
use datafusion::execution::session_state::SessionState;
use datafusion::execution::{RecordBatchStream, SendableRecordBatchStream, TaskContext};
use datafusion::logical_expr::ColumnarValue;
use datafusion::physical_expr::PhysicalExpr;
use datafusion::physical_expr::expressions::Literal;
use datafusion::physical_plan::execution_plan::InvariantLevel;
use datafusion::physical_plan::joins::utils::JoinFilter;
use datafusion::physical_plan::joins::{
    CrossJoinExec, HashJoinExec, HashJoinExecBuilder, NestedLoopJoinExec,
    NestedLoopJoinExecBuilder, SortMergeJoinExec,
};
use datafusion::physical_plan::metrics::MetricsSet;
use datafusion::physical_plan::{
    ChildrenPropertiesMode, DisplayAs, DisplayFormatType, ExecutionPlan,
    InputDistributionRequirements, PlanProperties, ReplaceChildrenOptions,
};
use futures::{Stream, StreamExt};

use crate::query::conditions::merge_join;
use crate::query::execution::{Execution, has_held_thread};
use crate::query::node_rule::{Changed, NodeRule};
use crate::query::short_plans::bare_context;
use crate::query::wrapped_expr::{Around, wrapped};
use crate::session::busy;

/// How long a stream is polled before other tasks have their turn.
const SLICE: Duration = Duration::from_millis(10);
/// How long one poll of a task may go on before the other tasks of its thread go to another one.
const HOLD: Duration = Duration::from_millis(50);
/// What the other thread has for taking them: nothing says when it has.
const YIELD_TIME: Duration = Duration::from_millis(1);

/// What a plan runs in that ends with a statement.
pub fn context(state: &SessionState, execution: &Arc<Execution>) -> Arc<TaskContext> {
    let config = state.config().clone().with_extension(Arc::clone(execution));
    Arc::new(bare_context(state, config))
}

/// What a condition does before it is computed.
fn check_cancelled() -> Result<()> {
    if has_held_thread(HOLD)? {
        // What does not take long is over before another thread has come for the tasks.
        busy(|| std::thread::sleep(YIELD_TIME));
    }
    Ok(())
}

/// A condition that looks up before it is computed.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Cancellable;

impl Around for Cancellable {
    const ADDS_NULLS: bool = false;

    fn evaluate(&self, inner: &dyn PhysicalExpr, batch: &RecordBatch) -> Result<ColumnarValue> {
        check_cancelled()?;
        inner.evaluate(batch)
    }

    fn show(&self, inner: &dyn PhysicalExpr, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(inner, f)
    }
}

fn looks_up(filter: &JoinFilter) -> JoinFilter {
    let condition = wrapped(filter.expression(), Cancellable);
    JoinFilter::new(condition, filter.column_indices().to_vec(), Arc::clone(filter.schema()))
}

/// A condition for joins that have none.
fn always() -> JoinFilter {
    let inner: Arc<dyn PhysicalExpr> = Arc::new(Literal::new(ScalarValue::Boolean(Some(true))));
    JoinFilter::new(wrapped(&inner, Cancellable), vec![], Arc::new(Schema::empty()))
}

/// Whether a join shows rows of one side only, and none of them before it is through.
fn shows_late(join: JoinType) -> bool {
    !matches!(join, JoinType::Inner | JoinType::Left | JoinType::Right | JoinType::Full)
}

/// The same join with a condition that looks up; nothing if the node is no join or is wrapped already, as those of a
/// subquery that has been planned before.
fn rewritten(node: &Arc<dyn ExecutionPlan>) -> Result<Option<Arc<dyn ExecutionPlan>>> {
    if (node.as_ref() as &dyn Any).is::<Pausing>() {
        return Ok(None);
    }
    if let Some(join) = node.downcast_ref::<NestedLoopJoinExec>() {
        let filter = match join.filter() {
            Some(filter) => Some(looks_up(filter)),
            None => shows_late(*join.join_type()).then(always),
        };
        let join = NestedLoopJoinExecBuilder::from(join).with_filter(filter).build()?;
        return Ok(Some(Arc::new(join)));
    }
    if let Some(join) = node.downcast_ref::<HashJoinExec>() {
        let Some(filter) = join.filter() else { return Ok(Some(Arc::clone(node))) };
        let builder = HashJoinExecBuilder::from(join).with_filter(Some(looks_up(filter)));
        return builder.build_exec().map(Some);
    }
    if let Some(join) = node.downcast_ref::<SortMergeJoinExec>() {
        let Some(filter) = join.filter() else { return Ok(Some(Arc::clone(node))) };
        return merge_join(join, looks_up(filter)).map(Some);
    }
    Ok(node.is::<CrossJoinExec>().then(|| Arc::clone(node)))
}

/// Wraps the joins of a plan. Runs after all other rules: none of them has to know the wrapped ones.
pub const PAUSING_JOINS: NodeRule = NodeRule::new("pausing_joins", pausing);

fn pausing(shown: Arc<dyn ExecutionPlan>) -> Changed {
    Ok(match rewritten(&shown)? {
        Some(inner) => Transformed::yes(Arc::new(Pausing { shown, inner })),
        None => Transformed::no(shown),
    })
}

/// A join that pauses. Whoever looks at it sees the join.
struct Pausing {
    /// As it was planned: what EXPLAIN tells of it.
    shown: Arc<dyn ExecutionPlan>,
    /// What runs.
    inner: Arc<dyn ExecutionPlan>,
}

impl fmt::Debug for Pausing {
    /// Without the join as it was planned, which would print everything below twice for each join above.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Pausing").field(&self.inner).finish()
    }
}

impl DisplayAs for Pausing {
    fn fmt_as(&self, t: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.shown.fmt_as(t, f)
    }
}

impl ExecutionPlan for Pausing {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn downcast_delegate(&self) -> Option<&dyn ExecutionPlan> {
        Some(self.inner.as_ref())
    }

    fn properties(&self) -> &Arc<PlanProperties> {
        self.inner.properties()
    }

    fn check_invariants(&self, check: InvariantLevel) -> Result<()> {
        self.inner.check_invariants(check)
    }

    fn dynamic_expressions_produced(&self) -> Vec<Arc<dyn PhysicalExpr>> {
        self.inner.dynamic_expressions_produced()
    }

    fn input_distribution_requirements(&self) -> InputDistributionRequirements {
        self.inner.input_distribution_requirements()
    }

    fn maintains_input_order(&self) -> Vec<bool> {
        self.inner.maintains_input_order()
    }

    fn children(&self) -> Vec<&Arc<dyn ExecutionPlan>> {
        self.inner.children()
    }

    fn apply_expressions(
        &self,
        f: &mut dyn FnMut(&Arc<dyn PhysicalExpr>) -> Result<TreeNodeRecursion>,
    ) -> Result<TreeNodeRecursion> {
        self.inner.apply_expressions(f)
    }

    fn replace_children(
        self: Arc<Self>,
        children: Vec<Arc<dyn ExecutionPlan>>,
        options: ReplaceChildrenOptions,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let shown = Arc::clone(&self.shown).replace_children(children.clone(), options)?;
        let inner = Arc::clone(&self.inner).replace_children(children, options)?;
        Ok(Arc::new(Pausing { shown, inner }))
    }

    fn with_new_children(
        self: Arc<Self>,
        children: Vec<Arc<dyn ExecutionPlan>>,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let options = ReplaceChildrenOptions::new(ChildrenPropertiesMode::Recompute);
        self.replace_children(children, options)
    }

    fn reset_state(self: Arc<Self>) -> Result<Arc<dyn ExecutionPlan>> {
        let inner = Arc::clone(&self.inner).reset_state()?;
        Ok(Arc::new(Pausing { shown: Arc::clone(&self.shown), inner }))
    }

    fn execute(
        &self,
        partition: usize,
        context: Arc<TaskContext>,
    ) -> Result<SendableRecordBatchStream> {
        // A plan that runs in any other context never ends early.
        let execution = context.session_config().get_extension::<Execution>().unwrap_or_default();
        let inner = self.inner.execute(partition, context)?;
        Ok(Box::pin(PausingStream { inner, execution, since: None }))
    }

    fn metrics(&self) -> Option<MetricsSet> {
        self.inner.metrics()
    }
}

struct PausingStream {
    inner: SendableRecordBatchStream,
    execution: Arc<Execution>,
    /// Since when it has been polled without a pause.
    since: Option<Instant>,
}

impl Stream for PausingStream {
    type Item = Result<RecordBatch>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        if let Err(e) = this.execution.check() {
            return Poll::Ready(Some(Err(e)));
        }
        let now = Instant::now();
        if now.duration_since(*this.since.get_or_insert(now)) >= SLICE {
            this.since = None;
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        let polled = this.inner.poll_next_unpin(cx);
        if polled.is_pending() {
            this.since = None;
        }
        polled
    }
}

impl RecordBatchStream for PausingStream {
    fn schema(&self) -> SchemaRef {
        self.inner.schema()
    }
}
