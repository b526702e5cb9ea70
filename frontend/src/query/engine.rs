//! Runs plans: one memory pool for all queries, a runtime of their own, streams of batches back.

use std::sync::Arc;

use arrow::array::RecordBatch;
use datafusion::config::ConfigOptions;
use datafusion::error::DataFusionError;
use datafusion::execution::SessionStateBuilder;
use datafusion::execution::SpillFile;
use datafusion::execution::TaskContext;
use datafusion::execution::memory_pool::{MemoryConsumer, MemoryReservation};
use datafusion::execution::runtime_env::{RuntimeEnv, RuntimeEnvBuilder};
use datafusion::execution::session_state::SessionState;
use datafusion::logical_expr::LogicalPlan;
use datafusion::physical_optimizer::optimizer::PhysicalOptimizer;
use datafusion::physical_plan::joins::HashJoinExec;
use datafusion::physical_plan::{ExecutionPlan, execute_stream};
use datafusion::prelude::SessionConfig;
use futures::StreamExt;
use millrace_common::fair_shares::{FairShares, threads_for};
use millrace_common::{EnvHandle, SqlError, heap};
use millrace_functions::error::sql_error_from_datafusion;
use millrace_planner::optimizer::{
    batch_options, config_options, optimize_for_batch, optimize_like_view,
};
use millrace_rpc::request::carried;
use tokio::sync::mpsc;

use crate::cluster::BatchStream;
use crate::error::FrontendError;
use crate::query::batch_size;
use crate::query::cancellation::{PAUSING_JOINS, context};
use crate::query::conditions::WHOLE_CONDITIONS;
use crate::query::execution::{self, Execution};
use crate::query::grouping_sets::GROUPING_SETS_APART;
use crate::query::interruptible::interruptible;
use crate::query::large_limits::{COUNTABLE_LIMITS, LARGE_LIMITS};
use crate::query::null_errors::NULL_ON_ERROR;
use crate::query::ordered_limits::ORDERED_LIMITS;
use crate::query::planning::Held;
use crate::query::pool::{SharedPool, first_of_merge};
use crate::query::short_plans::{Begun, ShortPlans};
use crate::query::wide_rows::{self, Outcome, too_wide};
use crate::query::written_order::WRITTEN_ORDER;
use crate::session::busy;

/// Batches on their way to a client: enough to overlap computing with sending.
const CHANNEL_BATCHES: usize = 2;

pub struct QueryEngine {
    runtime: Option<tokio::runtime::Runtime>,
    handle: tokio::runtime::Handle,
    /// Each query has one share of the runtime's threads.
    shares: Arc<FairShares>,
    environment: Arc<RuntimeEnv>,
    memory_bytes: usize,
    state: SessionState,
    short: ShortPlans,
    /// For queries whose failing expressions are NULL.
    null_state: SessionState,
    /// For queries whose joins do not fit into memory: both sides are sorted, which can go to disk.
    sorting_state: Arc<SessionState>,
}

/// What a failing expression does to a query (the setting `expression_errors`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ExpressionErrors {
    #[default]
    Raised,
    /// As in views.
    Null,
}

impl Drop for QueryEngine {
    /// A runtime must not be waited for on another runtime's thread.
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl QueryEngine {
    /// What queries run on.
    pub(crate) fn runtime(&self) -> &tokio::runtime::Handle {
        &self.handle
    }

    /// An engine whose queries run on this many cores. `start_thread` is called on each of its threads.
    pub fn new(
        cores: usize,
        memory_bytes: usize,
        start_thread: fn(),
    ) -> Result<QueryEngine, FrontendError> {
        let threads = threads_for(cores);
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(threads)
            .on_thread_start(start_thread)
            .on_thread_stop(heap::report)
            .thread_name("millrace-query")
            .thread_stack_size(crate::STACK_BYTES)
            .enable_all()
            .build()
            .map_err(FrontendError::Runtime)?;
        millrace_functions::size_limits::fit_to_memory(memory_bytes);
        execution::follow_spawned();
        let environment = RuntimeEnvBuilder::new()
            .with_memory_pool(SharedPool::new(memory_bytes))
            .build_arc()
            .map_err(|e| FrontendError::Sql(sql_error_from_datafusion(e)))?;
        let build = |options: ConfigOptions, partitions: usize, errors: ExpressionErrors| {
            // Scans ask what failing expressions are.
            let config = SessionConfig::from(options)
                .with_target_partitions(partitions)
                .with_extension(Arc::new(errors));
            let mut rules = PhysicalOptimizer::new().rules;
            rules.insert(0, Arc::new(WHOLE_CONDITIONS));
            rules.insert(0, Arc::new(ORDERED_LIMITS));
            rules.insert(0, Arc::new(COUNTABLE_LIMITS));
            rules.insert(0, Arc::new(GROUPING_SETS_APART));
            if errors == ExpressionErrors::Null {
                rules.insert(0, Arc::new(NULL_ON_ERROR));
            }
            rules.push(Arc::new(LARGE_LIMITS));
            rules.push(Arc::new(WRITTEN_ORDER));
            rules.push(Arc::new(PAUSING_JOINS));
            let mut state = SessionStateBuilder::new_with_default_features()
                .with_config(config)
                .with_runtime_env(environment.clone())
                .with_physical_optimizer_rules(interruptible(rules))
                .build();
            millrace_functions::register_all(&mut state)
                .map_err(|e| FrontendError::Sql(sql_error_from_datafusion(e)))?;
            Ok::<_, FrontendError>(state)
        };
        let partitions = cores.max(1);
        let hashing = with_merges(batch_options(), memory_bytes);
        let state = build(hashing, partitions, ExpressionErrors::Raised)?;
        let null_options = with_merges(config_options(), memory_bytes);
        let null_state = build(null_options, partitions, ExpressionErrors::Null)?;
        // With a single partition every join is a hash join.
        let sorting =
            build(sorting_options(memory_bytes), partitions.max(2), ExpressionErrors::Raised)?;
        let handle = runtime.handle().clone();
        Ok(QueryEngine {
            runtime: Some(runtime),
            handle,
            shares: FairShares::new(threads, EnvHandle::default()),
            environment,
            memory_bytes,
            short: ShortPlans::new(&state),
            state,
            null_state,
            sorting_state: Arc::new(sorting),
        })
    }

    #[cfg(test)]
    pub fn usual_state(&self) -> &SessionState {
        &self.state
    }

    /// Bytes that running queries have reserved.
    pub fn memory_used(&self) -> usize {
        self.environment.memory_pool.reserved()
    }

    /// Memory of queries for rows that a statement keeps.
    pub fn reservation(&self, name: &str) -> MemoryReservation {
        MemoryConsumer::new(name).register(&self.environment.memory_pool)
    }

    /// A file that is gone when it is dropped.
    pub fn temporary_file(&self) -> Result<Arc<dyn SpillFile>, SqlError> {
        let manager = &self.environment.disk_manager;
        manager.create_tmp_file("rows for RETURNING").map_err(sql_error_from_datafusion)
    }

    pub fn optimize(&self, plan: LogicalPlan) -> Result<LogicalPlan, SqlError> {
        busy(|| optimize_for_batch(plan))
    }

    /// The physical plan of an optimised logical plan.
    pub async fn physical(&self, plan: &LogicalPlan) -> Result<Arc<dyn ExecutionPlan>, SqlError> {
        let planner = self.state.query_planner().clone();
        planner.create_physical_plan(plan, &self.state).await.map_err(sql_error_from_datafusion)
    }

    /// Starts a plan under either treatment of failing expressions.
    pub async fn run_with(
        &self,
        plan: LogicalPlan,
        errors: ExpressionErrors,
        held: &Arc<Held>,
    ) -> Result<BatchStream, SqlError> {
        if errors == ExpressionErrors::Raised {
            return self.run(plan, held).await;
        }
        held.planning(self.started_as_view(plan, held)).await
    }

    async fn started_as_view(
        &self,
        plan: LogicalPlan,
        held: &Arc<Held>,
    ) -> Result<BatchStream, SqlError> {
        let plan = busy(|| optimize_like_view(plan))?;
        let planner = self.null_state.query_planner().clone();
        let physical = planner
            .create_physical_plan(&plan, &self.null_state)
            .await
            .map_err(sql_error_from_datafusion)?;
        Ok(self.execute(physical, held))
    }

    /// Starts a plan; its batches come through the stream, which aborts the plan when dropped.
    /// `held` counts the memory of planning it.
    pub async fn run(&self, plan: LogicalPlan, held: &Arc<Held>) -> Result<BatchStream, SqlError> {
        match held.planning(self.short.answer(plan)).await? {
            Begun::Answered(rows) => Ok(rows),
            Begun::Other(plan) => held.planning(self.started(plan, held)).await,
        }
    }

    async fn started(&self, plan: LogicalPlan, held: &Arc<Held>) -> Result<BatchStream, SqlError> {
        let plan = self.optimize(plan)?;
        let physical = self.physical(&plan).await?;
        let fallback = joins_by_hash(&physical)
            .then(|| Fallback { plan, state: Arc::clone(&self.sorting_state) });
        Ok(self.start(physical, fallback, held))
    }

    /// A plan as it runs, whose counters can be read afterwards.
    pub fn measured(physical: Arc<dyn ExecutionPlan>) -> Result<Arc<dyn ExecutionPlan>, SqlError> {
        wide_rows::measured(physical).map(|plan| plan.data).map_err(sql_error_from_datafusion)
    }

    /// Starts a physical plan, whose memory `held` counts until its rows have been read.
    pub fn execute(&self, physical: Arc<dyn ExecutionPlan>, held: &Arc<Held>) -> BatchStream {
        self.start(physical, None, held)
    }

    fn start(
        &self,
        physical: Arc<dyn ExecutionPlan>,
        fallback: Option<Fallback>,
        held: &Arc<Held>,
    ) -> BatchStream {
        let (sender, receiver) = mpsc::channel(CHANNEL_BATCHES);
        let execution = Execution::new(self.memory_bytes, Some(self.shares.holder()));
        let running = Arc::clone(&execution);
        let context = context(&self.state, &running);
        let work = async move {
            if let Some(fallback) = drive(physical, context, &sender, fallback).await {
                fallback.drive(&sender, &running).await;
            }
        };
        let task = self.handle.spawn(carried(execution::task(Arc::clone(&execution), work)));
        let _held = Arc::clone(held);
        let stream = Running { receiver, task, execution, ended: false, _held };
        Box::pin(futures::stream::unfold(stream, |mut s| async move {
            let item = s.next().await?;
            Some((item, s))
        }))
    }
}

/// A query under way; aborted when its reader is gone.
struct Running {
    receiver: mpsc::Receiver<Result<RecordBatch, SqlError>>,
    task: tokio::task::JoinHandle<()>,
    /// Ended when its reader is gone: aborting reaches a task only between its polls, and those of a join may be long.
    execution: Arc<Execution>,
    ended: bool,
    /// The memory of its plan.
    _held: Arc<Held>,
}

impl Running {
    /// The next batch. A query that died must not look like one that ended.
    async fn next(&mut self) -> Option<Result<RecordBatch, SqlError>> {
        if self.ended {
            return None;
        }
        if let Some(batch) = self.receiver.recv().await {
            return Some(batch);
        }
        self.ended = true;
        match (&mut self.task).await {
            Ok(()) => None,
            Err(e) if e.is_panic() => Some(Err(SqlError::internal("the query's task panicked"))),
            Err(_) => Some(Err(SqlError::new(
                millrace_common::SqlState::ADMIN_SHUTDOWN,
                "the server is shutting down",
            ))),
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.execution.end();
        self.task.abort();
    }
}

/// Rows of a batch where joins sort.
const SORTING_ROWS: usize = 512;

/// Options with what each sort keeps free for its merge: a plan may have a dozen of them in each partition.
fn with_merges(mut options: ConfigOptions, memory_bytes: usize) -> ConfigOptions {
    let usual = options.execution.sort_spill_reservation_bytes;
    options.execution.sort_spill_reservation_bytes = first_of_merge(memory_bytes).min(usual);
    options
}

/// [`batch_options`] for joins that sort.
fn sorting_options(memory_bytes: usize) -> ConfigOptions {
    let mut options = batch_options();
    options.optimizer.prefer_hash_join = false;
    // A sort must at least hold a batch, and many share the memory.
    options
        .set("datafusion.execution.batch_size", &SORTING_ROWS.to_string())
        .expect("DataFusion has the option and takes any number but 0");
    with_merges(options, memory_bytes)
}

fn joins_by_hash(plan: &Arc<dyn ExecutionPlan>) -> bool {
    plan.is::<HashJoinExec>() || plan.children().into_iter().any(joins_by_hash)
}

/// How to run a plan whose hash join turns out not to fit.
struct Fallback {
    plan: LogicalPlan,
    state: Arc<SessionState>,
}

impl Fallback {
    async fn drive(self, sender: &BatchSender, running: &Arc<Execution>) {
        let planner = self.state.query_planner().clone();
        match planner.create_physical_plan(&self.plan, self.state.as_ref()).await {
            Ok(physical) => {
                let context = context(&self.state, running);
                drive(physical, context, sender, None).await;
            }
            Err(e) => drop(sender.send(Err(sql_error_from_datafusion(e))).await),
        }
    }
}

type BatchSender = mpsc::Sender<Result<RecordBatch, SqlError>>;

/// Sends a plan's batches. Gives the fallback back if memory ran out before the first of them.
async fn drive(
    physical: Arc<dyn ExecutionPlan>,
    context: Arc<TaskContext>,
    sender: &BatchSender,
    fallback: Option<Fallback>,
) -> Option<Fallback> {
    let mut next = batch_size::fitted(physical, context);
    loop {
        let e = match next {
            Ok((physical, context)) => match send_rows(&physical, &context, sender).await? {
                Failure { e, begun: true } => e,
                Failure { e, .. } if fallback.is_some() && is_out_of_memory(&e) => return fallback,
                Failure { e, .. } => match batch_size::narrower(&physical, &context, &e) {
                    Ok(Some(narrower)) => {
                        next = Ok(narrower);
                        continue;
                    }
                    Ok(None) => e,
                    Err(e) => e,
                },
            },
            Err(e) => e,
        };
        let _ = sender.send(Err(sql_error_from_datafusion(e))).await;
        return None;
    }
}

fn is_out_of_memory(e: &DataFusionError) -> bool {
    matches!(e.find_root(), DataFusionError::ResourcesExhausted(_))
}

/// How a plan failed, and whether rows had been sent before.
struct Failure {
    e: DataFusionError,
    begun: bool,
}

/// Sends a plan's batches to the end, unless it fails or nobody takes them.
async fn send_rows(
    physical: &Arc<dyn ExecutionPlan>,
    context: &Arc<TaskContext>,
    sender: &BatchSender,
) -> Option<Failure> {
    let execution = context.session_config().get_extension::<Execution>().unwrap_or_default();
    let outcome = context.session_config().get_extension::<Outcome>();
    let mut begun = false;
    let mut stream = match execute_stream(Arc::clone(physical), Arc::clone(context)) {
        Ok(stream) => stream,
        Err(e) => return Some(Failure { e, begun }),
    };
    while let Some(batch) = stream.next().await {
        let batch = match batch.and_then(|batch| execution.check().map(|()| batch)) {
            Ok(batch) => batch,
            Err(e) => return Some(Failure { e, begun }),
        };
        if batch.num_rows() > 0 && !begun {
            if outcome.as_ref().is_some_and(|outcome| !outcome.answer()) {
                return Some(Failure { e: too_wide(), begun });
            }
            begun = true;
        }
        execution.give_away(batch.get_array_memory_size());
        sender.send(Ok(batch)).await.ok()?;
    }
    None
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use arrow::array::Int64Array;
    use arrow::datatypes::{DataType, Field, Schema};
    use datafusion::physical_plan::displayable;
    use datafusion::prelude::SessionContext;

    use super::*;

    /// An engine of one core, with tables of which each pair of rows takes a while.
    fn engine() -> (QueryEngine, SessionContext) {
        let engine = QueryEngine::new(1, 256 << 20, || {}).unwrap();
        let tables = SessionContext::new_with_state(engine.state.clone());
        let schema = Schema::new(vec![Field::new("x", DataType::Int64, true)]);
        let rows = Int64Array::from_iter_values(0..200_000);
        let batch = RecordBatch::try_new(Arc::new(schema), vec![Arc::new(rows)]).unwrap();
        tables.register_batch("a", batch.clone()).unwrap();
        tables.register_batch("b", batch).unwrap();
        (engine, tables)
    }

    async fn planned(tables: &SessionContext, query: &str) -> Arc<dyn ExecutionPlan> {
        tables.sql(query).await.unwrap().create_physical_plan().await.unwrap()
    }

    /// While the query runs another one is answered; when its reader is gone it gives its memory back.
    async fn leaves_room_and_ends(query: &str) {
        let (engine, tables) = engine();
        let mut long = engine.execute(planned(&tables, query).await, &Held::new(&engine));
        let early = tokio::time::timeout(Duration::from_millis(500), long.next()).await;
        assert!(early.is_err(), "{query} takes longer");
        let mut short = engine.execute(planned(&tables, "SELECT 1").await, &Held::new(&engine));
        let answer = tokio::time::timeout(Duration::from_secs(30), short.next()).await;
        let batch = answer.unwrap_or_else(|_| panic!("no room beside {query}"));
        assert_eq!(batch.unwrap().unwrap().num_rows(), 1);
        drop((long, short));
        let until = Instant::now() + Duration::from_secs(30);
        while engine.memory_used() > 0 {
            assert!(Instant::now() < until, "{query} goes on");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn joins_leave_room_and_end_with_their_statement() {
        for query in [
            "SELECT count(*) FROM a JOIN b ON a.x % 7 <> b.x % 5",
            "SELECT count(*) FROM a JOIN b ON a.x * b.x < 0",
            "SELECT count(a.x + b.x) FROM a, b",
            "SELECT count(*) FROM a WHERE EXISTS (SELECT 1 FROM b WHERE a.x + b.x < 0)",
            "SELECT count(*) FROM a WHERE NOT EXISTS (SELECT 1 FROM b WHERE a.x + b.x < 0)",
            "SELECT count(*) FROM a JOIN b ON a.x % 2 = b.x % 2 AND a.x + b.x < 0",
        ] {
            leaves_room_and_ends(query).await;
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_join_looks_and_counts_as_before() {
        let (engine, tables) = engine();
        let query = "SELECT count(*) FROM (SELECT x FROM a WHERE x < 30) a \
                     JOIN (SELECT x FROM b WHERE x < 20) b ON a.x < b.x";
        let plan = planned(&tables, query).await;
        let shown = displayable(plan.as_ref()).indent(false).to_string();
        assert!(shown.contains("NestedLoopJoinExec: join_type=Inner, filter=x@"), "{shown}");
        let batch = engine.execute(plan, &Held::new(&engine)).next().await.unwrap().unwrap();
        let counts = batch.column(0).as_any().downcast_ref::<Int64Array>().unwrap();
        // 0 + 1 + ... + 19 smaller ones.
        assert_eq!(counts.value(0), 190);
        let plan = planned(&tables, "SELECT 1 FROM a JOIN b USING (x)").await;
        assert!(joins_by_hash(&plan));
    }
}
