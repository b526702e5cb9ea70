//! Rows held until their windows close, over a simulated store: the range that a watermark is about to close is read
//! before it has, and what is emitted is the same whatever was foreseen.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use arrow::array::{
    ArrayRef, AsArray, BinaryArray, Int64Array, RecordBatch, TimestampMicrosecondArray,
};
use arrow::datatypes::{
    DataType, Field, Int64Type, Schema, SchemaRef, TimeUnit, TimestampMicrosecondType,
};
use millrace_common::access::AccessClass;
use millrace_common::{DeltaChunk, EnvHandle, Epoch, RelationId, TableId};
use millrace_graph::{BufferMode, EventTimeBuffer, Node, Operator as Op};
use millrace_rpc::catalog::RowStorage;
use millrace_rpc::version::JobVersion;
use millrace_storage::sim::{Profile, SimStore};
use millrace_storage::{JobStore, StateStore, StoreOptions, TableDesc};
use rand::Rng;

use super::seeded;
use crate::error::ExecError;
use crate::error_sink::ErrorSink;
use crate::memory::MemoryGovernor;
use crate::operator::{Operator, Output};
use crate::operators::{Env, build_with};
use crate::options::{ExecOptions, LookaheadMode};
use crate::state::StateTable;
use crate::stats::{LookaheadStats, OperatorMetrics};

/// Every answer takes as long as any other.
pub(super) const STEADY: Profile =
    Profile { p50: Duration::from_millis(5), p99: Duration::from_millis(5), ..Profile::INSTANT };
/// Rows are this far apart, and windows so many rows long.
pub(super) const APART: i64 = 1_000;
pub(super) const WINDOW: i64 = 300;

type Rows = Vec<(i64, i64)>;

/// An operator over state tables in a simulated store.
pub(super) struct Held {
    pub store: Arc<StateStore>,
    pub sim: SimStore,
    job: Arc<JobStore>,
    node: Node,
    options: Arc<ExecOptions>,
    metrics: Arc<OperatorMetrics>,
    pub op: Box<dyn Operator>,
    commits: u64,
}

/// Of the rows that come in.
pub(super) fn schema() -> SchemaRef {
    let at = DataType::Timestamp(TimeUnit::Microsecond, None);
    Arc::new(Schema::new(vec![Field::new("at", at, true), Field::new("id", DataType::Int64, true)]))
}

fn chunk(rows: &[(i64, i64)]) -> DeltaChunk {
    let at: ArrayRef =
        Arc::new(TimestampMicrosecondArray::from_iter_values(rows.iter().map(|r| r.0)));
    let ids: ArrayRef = Arc::new(Int64Array::from_iter_values(rows.iter().map(|r| r.1)));
    DeltaChunk::new(RecordBatch::try_new(schema(), vec![at, ids]).unwrap(), None)
}

fn build(
    job: &Arc<JobStore>,
    node: &Node,
    options: &Arc<ExecOptions>,
    metrics: &Arc<OperatorMetrics>,
) -> Box<dyn Operator> {
    let env = Env {
        options: Arc::clone(options),
        errors: Arc::new(ErrorSink::default()),
        metrics: Arc::clone(metrics),
        clock: EnvHandle::default(),
        governor: MemoryGovernor::new(1 << 30),
        lookahead: Arc::default(),
        shed: Arc::default(),
        vnodes: 0..256,
        event_time: vec![Some(0)],
        restored: Epoch::ZERO,
        first_arrival: 0,
    };
    let mut writer = |local: usize| -> Result<Box<dyn StateTable>, ExecError> {
        Ok(Box::new(job.writer(TableId(local as u32))?))
    };
    build_with(node, &[schema()], env, &mut writer).unwrap()
}

/// In order.
fn listed(out: &mut Output) -> Rows {
    let mut rows = Vec::new();
    for chunk in out.take() {
        let at = chunk.batch.column(0).as_primitive::<TimestampMicrosecondType>();
        let ids = chunk.batch.column(1).as_primitive::<Int64Type>();
        for (row, (at, id)) in at.values().iter().zip(ids.values()).enumerate() {
            assert_eq!(chunk.weight(row), 1);
            rows.push((*at, *id));
        }
    }
    rows.sort_unstable();
    rows
}

impl Held {
    /// `vnode`: columns whose hash is the vnode.
    async fn new(options: ExecOptions, vnode: Vec<usize>) -> Held {
        let mode = BufferMode::WindowClose;
        let buffer = EventTimeBuffer { mode, column: 0, vnode, table: 0 };
        let table = (schema(), RowStorage::Multiset);
        Held::over(options, Op::Buffer(buffer), schema(), vec![table]).await
    }

    /// An operator that puts out rows of a schema, with state tables of these.
    pub async fn over(
        options: ExecOptions,
        op: Op,
        schema: SchemaRef,
        tables: Vec<(SchemaRef, RowStorage)>,
    ) -> Held {
        let sim = SimStore::in_memory(Profile::INSTANT, 1);
        let mut of_store = StoreOptions::new(Arc::new(sim.clone()), 1);
        of_store.block_bytes = Some(1_024);
        of_store.cache.max_read_bytes = 1_024;
        let store = StateStore::open(of_store).await.unwrap();
        let desc = |(i, (value_schema, storage)): (usize, (SchemaRef, RowStorage))| TableDesc {
            id: TableId(i as u32),
            name: "state".into(),
            value_schema,
            storage,
            class: AccessClass::RangeRead,
            relation: false,
            retention: None,
        };
        let tables = tables.into_iter().enumerate().map(desc).collect();
        let job = store.open_job(RelationId(9), tables, &JobVersion::default()).await.unwrap();
        let node = Node { op, inputs: vec![0], schema, append_only: true, marks: vec![] };
        let (options, metrics) = (Arc::new(options), OperatorMetrics::new(0, 0, "test"));
        let op = build(&job, &node, &options, &metrics);
        Held { store, sim, job, node, options, metrics, op, commits: 0 }
    }

    /// Starts the operator again, with nothing in its caches.
    pub fn restart(&mut self) {
        self.op = build(&self.job, &self.node, &self.options, &self.metrics);
    }

    pub fn push(&mut self, rows: &[(i64, i64)]) {
        let mut out = Output::default();
        self.op.push(0, chunk(rows), &mut out).unwrap();
        assert!(out.is_empty(), "they wait for the barrier at least");
    }

    /// Ends an epoch with a watermark: what is emitted, and how many requests that took.
    pub async fn barrier(&mut self, watermark: i64) -> (Rows, u64) {
        let mut out = Output::default();
        self.commits += 1;
        self.op.watermark(0, &[(0, watermark)]);
        self.op.time(Epoch(self.commits));
        let before = self.sim.stats().gets;
        while self.op.is_pending() {
            self.op.progress(&mut out).await.unwrap();
        }
        self.op.barrier(&mut out).await.unwrap();
        let requests = self.sim.stats().gets - before;
        let mut sealed = Vec::new();
        self.op.seal(&mut sealed).unwrap();
        if !sealed.is_empty() {
            let persisted = self.job.persist(self.commits, sealed).await.unwrap();
            self.job.publish(Epoch(self.commits), persisted);
        }
        (listed(&mut out), requests)
    }

    /// All that is committed is in the store, and nothing of it in memory.
    pub async fn cool(&mut self) {
        let edit = self.job.flush().await.unwrap();
        self.job.apply_edit(&edit);
        // What is being cached of new runs.
        tokio::time::sleep(Duration::from_secs(1)).await;
        self.store.cache().clear_memory();
    }

    /// Tells what the next watermark is likely to be, if that is wanted.
    pub fn foresee(&mut self, watermark: i64) -> bool {
        let is_wanted = self.op.foresight().is_some();
        if is_wanted {
            self.op.expect(0, &[(0, watermark)]).unwrap();
        }
        is_wanted
    }

    /// Waits for what is read ahead.
    pub async fn read_ahead(&mut self) {
        let mut out = Output::default();
        while self.op.is_prefetching() {
            self.op.progress(&mut out).await.unwrap();
        }
        assert!(out.is_empty());
    }

    /// How many entries a state table has.
    pub async fn entries(&self, table: u32) -> usize {
        let writer = self.job.writer(TableId(table)).unwrap();
        let everything = BinaryArray::from_iter_values([b""]);
        writer.multi_scan(everything, None).wait().await.unwrap().values.num_rows()
    }

    pub fn told(&self) -> LookaheadStats {
        self.metrics.lookahead.read()
    }

    pub fn requests_ahead(&self) -> u64 {
        self.metrics.lookahead.ahead_requests.load(Ordering::Relaxed)
    }
}

/// Windows full of rows in the store.
async fn windows(count: i64, options: ExecOptions, vnode: Vec<usize>) -> (Held, Vec<Rows>) {
    let mut held = Held::new(options, vnode).await;
    let rows: Rows = (0..count * WINDOW).map(|i| (i * APART, i)).collect();
    held.push(&rows);
    assert_eq!(held.barrier(0).await, (vec![], 0));
    held.cool().await;
    held.sim.set_profile(STEADY);
    (held, rows.chunks(WINDOW as usize).map(<[_]>::to_vec).collect())
}

pub(super) const fn end(window: usize) -> i64 {
    (window as i64 + 1) * WINDOW * APART
}

#[tokio::test(start_paused = true)]
async fn a_range_that_is_read_ahead_makes_no_request_when_it_closes() {
    for vnode in [vec![], vec![1]] {
        let (mut held, windows) = windows(6, ExecOptions::default(), vnode).await;
        assert!(!held.foresee(end(0)), "nothing has been missed");
        let (rows, demand) = held.barrier(end(0)).await;
        assert!(rows == windows[0] && demand > 0, "the state is cold: {demand}");
        assert_eq!((held.told().missed, held.told().active), (1, 1));
        for (window, expected) in windows.iter().enumerate().skip(1) {
            held.store.cache().clear_memory();
            assert!(held.foresee(end(window)));
            held.read_ahead().await;
            let before = held.requests_ahead();
            assert!(before > 0);
            // What has been read is not read again.
            held.foresee(end(window));
            held.read_ahead().await;
            assert_eq!(held.requests_ahead(), before);
            let (rows, requests) = held.barrier(end(window)).await;
            assert_eq!((&rows, requests), (expected, 0), "window {window}");
        }
        let told = held.told();
        let expected = LookaheadStats {
            active: 1,
            hinted: 5,
            prefetched: 5,
            in_time: 5,
            missed: 1,
            ..LookaheadStats::default()
        };
        assert_eq!(told, expected);
        assert_eq!(held.metrics.lookahead.measures().places(), ["watermark"]);
    }
}

#[tokio::test(start_paused = true)]
async fn lookahead_that_is_off_reads_nothing_ahead() {
    let off = ExecOptions { lookahead: LookaheadMode::Off, ..ExecOptions::default() };
    let (mut held, windows) = windows(4, off, vec![]).await;
    for (window, expected) in windows.iter().enumerate() {
        held.store.cache().clear_memory();
        assert!(!held.foresee(end(window)));
        let (rows, demand) = held.barrier(end(window)).await;
        assert!(rows == *expected && demand > 0);
    }
    let (told, measures) = (held.told(), held.metrics.lookahead.measures());
    assert_eq!((told.missed, told.hinted, measures.ahead_requests), (4, 0, 0));
    assert!(measures.places().is_empty() && measures.demand_requests > 0);
    assert_eq!(measures.reads.without_demand, Some(0.0));
}

#[tokio::test(start_paused = true)]
async fn state_in_memory_is_never_read_ahead() {
    let mut held = Held::new(ExecOptions::default(), vec![1]).await;
    for window in 0..10 {
        let rows: Rows = (0..WINDOW).map(|i| (end(window) - (i + 1) * APART, i)).collect();
        held.push(&rows);
        assert!(!held.foresee(end(window)));
        let (emitted, requests) = held.barrier(end(window)).await;
        assert_eq!((emitted.len(), requests), (WINDOW as usize, 0));
    }
    assert_eq!(held.told(), LookaheadStats::default());
}

#[tokio::test(start_paused = true)]
async fn a_close_that_overtakes_its_read_waits_for_it_and_looks_farther_ahead_next_time() {
    let (mut held, windows) = windows(4, ExecOptions::default(), vec![]).await;
    held.barrier(end(0)).await;
    assert_eq!(held.op.foresight(), Some(1));
    for (window, expected) in (1..3).zip(&windows[1..]) {
        held.store.cache().clear_memory();
        held.foresee(end(window));
        assert!(held.op.is_prefetching());
        let (rows, _) = held.barrier(end(window)).await;
        assert!(rows == *expected && !held.op.is_prefetching());
        assert_eq!(held.op.foresight(), Some(1 << window));
    }
    assert_eq!((held.told().late, held.told().in_time), (2, 0));
}

#[tokio::test(start_paused = true)]
async fn a_read_that_takes_too_long_is_given_up() {
    let (mut held, windows) = windows(3, ExecOptions::default(), vec![]).await;
    held.barrier(end(0)).await;
    held.store.cache().clear_memory();
    held.sim.hang_reads(None);
    held.foresee(end(1));
    let clock = EnvHandle::default();
    let began = clock.now();
    held.read_ahead().await;
    let took = clock.elapsed(began);
    assert!((Duration::from_secs(2)..Duration::from_secs(3)).contains(&took), "{took:?}");
    assert_eq!(held.told().dropped, 1);
    held.sim.release_reads();
    held.foresee(end(1));
    held.read_ahead().await;
    assert_eq!(held.barrier(end(1)).await, (windows[1].clone(), 0), "it was asked for again");
}

#[tokio::test(start_paused = true)]
async fn a_read_that_is_given_up_while_memory_is_tight_is_asked_for_again() {
    let (mut held, windows) = windows(3, ExecOptions::default(), vec![]).await;
    held.barrier(end(0)).await;
    held.store.cache().clear_memory();
    held.foresee(end(1));
    assert!(held.op.is_prefetching());
    held.op.give_up_expected();
    assert!(!held.op.is_prefetching());
    held.foresee(end(1));
    held.read_ahead().await;
    assert_eq!(held.barrier(end(1)).await, (windows[1].clone(), 0));
}

#[tokio::test(start_paused = true)]
async fn what_was_foreseen_too_far_is_read_ahead_again_once_it_has_left_memory() {
    let (mut held, windows) = windows(6, ExecOptions::default(), vec![]).await;
    held.barrier(end(0)).await;
    held.store.cache().clear_memory();
    // As after a jump of the watermark.
    held.foresee(end(4));
    held.read_ahead().await;
    held.store.cache().clear_memory();
    assert!(held.barrier(end(1)).await.1 > 0);
    for (window, expected) in windows.iter().enumerate().skip(2) {
        held.store.cache().clear_memory();
        held.foresee(end(window));
        held.read_ahead().await;
        assert_eq!(held.barrier(end(window)).await, (expected.clone(), 0), "window {window}");
    }
    assert_eq!((held.told().unused, held.told().in_time), (1, 4));
}

#[tokio::test(start_paused = true)]
async fn reads_ahead_have_a_budget() {
    let few = ExecOptions { prefetch_requests: 1, ..ExecOptions::default() };
    let (mut held, windows) = windows(4, few, vec![1]).await;
    held.barrier(end(0)).await;
    held.store.cache().clear_memory();
    held.foresee(end(1));
    held.read_ahead().await;
    let before = held.requests_ahead();
    assert!(before > 1, "all at once");
    held.foresee(end(2));
    assert!(!held.op.is_prefetching());
    assert_eq!((held.requests_ahead(), held.told().dropped), (before, 1));
    assert_eq!(held.barrier(end(1)).await, (windows[1].clone(), 0));
}

#[tokio::test(start_paused = true)]
async fn reads_in_vain_end_for_a_while() {
    let (mut held, windows) = windows(12, ExecOptions::default(), vec![]).await;
    let mut active = 0;
    for (window, expected) in windows.iter().enumerate() {
        held.store.cache().clear_memory();
        if held.foresee(end(window)) {
            held.read_ahead().await;
            // It leaves memory before it is used.
            held.store.cache().clear_memory();
            active += 1;
        }
        assert_eq!(held.barrier(end(window)).await.0, *expected);
    }
    assert_eq!((active, held.told().unused, held.told().active), (5, 5, 0));
}

/// Rows, epochs and watermarks at random, foreseen rightly, wrongly, too late or not at all.
#[tokio::test(start_paused = true)]
async fn whatever_is_foreseen_the_same_rows_are_emitted() {
    for (seed, ref mut rng) in seeded(40, 1_000) {
        let random_hints = rng.random_bool(0.5);
        let options = ExecOptions { random_hints, ..ExecOptions::default() };
        let vnode = if rng.random_bool(0.5) { vec![1] } else { vec![] };
        let mut held = Held::new(options, vnode).await;
        held.sim.set_profile(STEADY);
        let (mut waiting, mut watermark, mut id) = (Rows::new(), 0, 0);
        for epoch in 0..rng.random_range(1..12) {
            for _ in 0..rng.random_range(0..40) {
                id += 1;
                let row = (watermark + rng.random_range(0..300), id);
                held.push(&[row]);
                waiting.push(row);
            }
            watermark += rng.random_range(0..200);
            let (emitted, _) = held.barrier(watermark).await;
            waiting.sort_unstable();
            let closed = waiting.partition_point(|row| row.0 < watermark);
            let expected: Rows = waiting.drain(..closed).collect();
            assert_eq!(emitted, expected, "seed {seed} epoch {epoch}");
            if rng.random_bool(0.5) {
                // What is written waits on a thread for which the clock does not go on by itself.
                held.sim.set_profile(Profile::INSTANT);
                held.cool().await;
                held.sim.set_profile(STEADY);
            }
            for _ in 0..rng.random_range(0..3) {
                held.foresee(watermark + rng.random_range(-300..600));
                if rng.random_bool(0.5) {
                    held.read_ahead().await;
                }
            }
        }
    }
}
