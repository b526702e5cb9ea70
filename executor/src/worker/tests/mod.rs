//! A worker on an in-memory store, with a meta service that fits in a page: an epoch counter, each
//! job's version, and cuts on request.

mod adoption;
mod ahead;
mod chains;
mod closing;
mod compaction;
mod fed;
mod frontends;
mod inside;
mod lookahead;
mod lookups;
mod opening;
mod pipeline;
mod places;
mod reads;
mod recovery;
mod requests;
mod sources;
mod staged;
mod stream;
mod tables;
mod values;
mod views;

use std::sync::{Arc, OnceLock, Weak};

use arrow::array::{ArrayRef, AsArray, Int64Array, RecordBatch};
use arrow::datatypes::{DataType, Field, Int64Type, Schema, SchemaRef};
use async_trait::async_trait;
use bytes::Bytes;
use futures::TryStreamExt;
use millrace_common::access::AccessClass;
use millrace_common::collections::HashMap;
use millrace_common::{
    DeltaChunk, Epoch, Generation, JobId, RelationId, SqlError, SqlType, TableId,
};
use millrace_graph::codec::encode_graph;
use millrace_graph::{
    Blackhole, Edge, EdgeKind, Exchange, Fragment, JobGraph, Materialize, Node, Operator as Op,
    RelationLayout, StateTable, Subscribe, Union,
};
use millrace_rpc::catalog::{Column, Relation, RelationKind, RowStorage};
use millrace_rpc::log::{EditVersion, Entry, LogEntry, LogRecord, Tick};
use millrace_rpc::services::{ComputeService, Cut, JobToStart, MetaService, StartJob};
use millrace_rpc::stream::{AppliedRecord, EntryOutcome, StreamError, StreamMessage};
use millrace_rpc::version::{
    BackfillState, ColumnWatermark, JobCommit, JobVersion, StatementId, VersionEdit,
};
use millrace_storage::sim::{Profile, SimStore};
use millrace_storage::{ScanOptions, StateStore, StoreOptions};
use parking_lot::Mutex;
use tokio::sync::watch;

use super::{Worker, WorkerOptions, start};
use crate::dml::{DmlError, DmlKind, DmlOutcome, DmlStatement, EntryFlag, InsertConflict};
use crate::input::relations::Elsewhere;
use crate::options::ExecOptions;

/// (id, value, weight)
pub type Row = (i64, i64, i64);

/// What the log has of a job, and with how many tasks it is started.
#[derive(Clone)]
struct Logged {
    relation: Relation,
    generation: Generation,
    version: JobVersion,
    inputs: Vec<Relation>,
    parallelism: usize,
}

struct FakeJob {
    start: Logged,
    graph: Option<Arc<JobGraph>>,
    turn: Arc<tokio::sync::Mutex<()>>,
    /// Of the last commit that was cut.
    number: u64,
}

#[derive(Default)]
pub struct FakeMeta {
    worker: OnceLock<Weak<Worker>>,
    epoch: Mutex<u64>,
    jobs: Mutex<HashMap<JobId, FakeJob>>,
    pub failures: Mutex<Vec<(JobId, SqlError)>>,
    pub offsets: Mutex<Vec<(u64, Vec<(u32, u64)>)>>,
    /// Where splits are to end that no epoch fixes yet.
    pub planned: Mutex<Vec<(u32, u64)>>,
    /// Tells of either; `None`: nothing does.
    pub changes: OnceLock<watch::Sender<u64>>,
    /// Of the column 1 of all relations, by epoch.
    pub watermarks: Mutex<Vec<(u64, i64)>>,
    statements: Mutex<u64>,
    /// All records.
    log: Mutex<Vec<AppliedRecord>>,
    /// The last record that the worker has said it has.
    received: Mutex<u64>,
    /// What is random of a stream that loses, repeats and delays; `None`: it does not.
    pub faults: Mutex<Option<u64>>,
    /// The log ends a job's generation when so many times more was asked what it has of the job; 0: it does not.
    pub ends_after: Mutex<usize>,
    /// The incarnation that the log has fenced.
    pub fenced: Mutex<Option<u64>>,
}

impl FakeMeta {
    pub fn next_epoch(&self) -> Epoch {
        let mut epoch = self.epoch.lock();
        *epoch += 1;
        Epoch(*epoch)
    }

    fn worker(&self) -> Arc<Worker> {
        self.worker.get().unwrap().upgrade().unwrap()
    }

    /// An order to start a job, as of the last record.
    fn order(&self, id: JobId) -> StartJob {
        let jobs = self.jobs.lock();
        let Logged { generation, parallelism, .. } = jobs[&id].start;
        StartJob { job: id, generation, record: self.log.lock().len() as u64, parallelism }
    }

    /// What the log's fold makes of a commit.
    fn fold(&self, id: JobId, commit: &JobCommit) -> Epoch {
        let epoch = match commit.epoch {
            0 => self.next_epoch(),
            e => Epoch(e),
        };
        let mut jobs = self.jobs.lock();
        let version = &mut jobs.get_mut(&id).unwrap().start.version;
        assert_eq!(version.commits + 1, commit.number);
        version.commits += u64::from(commit.epoch != 0 || !commit.is_empty());
        version.tail.extend(commit.slices.iter().cloned().map(|mut s| {
            s.epoch = epoch.0;
            s
        }));
        for mut run in commit.edit.iter().flat_map(|e| e.add_runs.iter().cloned()) {
            run.min_epoch = epoch.0;
            run.max_epoch = epoch.0;
            version.runs.push(run);
        }
        version.epoch = epoch.0;
        version.row_count += commit.row_count_delta;
        version.counters.extend(commit.counters.clone());
        version.backfill = commit.backfill.clone();
        if commit.epoch != 0 || !commit.is_empty() {
            // Locked: who starts the job knows which record its version is of.
            self.append(Entry::Commit(commit.clone()), EntryOutcome::Applied(epoch));
        }
        epoch
    }

    fn fold_edit(&self, id: JobId, edit: VersionEdit) {
        let mut jobs = self.jobs.lock();
        let version = &mut jobs.get_mut(&id).unwrap().start.version;
        version.runs.extend(edit.add_runs.clone());
        version.runs.retain(|r| !edit.remove_runs.contains(&r.run_id));
        version.tail.retain(|s| !edit.retires(s));
        let entry = EditVersion { job: id.0, edit, ..EditVersion::default() };
        let outcome = EntryOutcome::Applied(Epoch(version.epoch));
        self.append(Entry::EditVersion(entry), outcome);
    }

    /// Adds a record to the log; where records are lost, followed by another.
    fn append(&self, entry: Entry, outcome: EntryOutcome) {
        let mut log = self.log.lock();
        let mut add = |entry| {
            let number = log.len() as u64 + 1;
            let entries = vec![LogEntry::from(entry)];
            let record = Arc::new(LogRecord { number, entries, ..LogRecord::default() });
            log.push(AppliedRecord { record, outcomes: [outcome.clone()].into() });
        };
        add(entry);
        if self.faults.lock().is_some() {
            add(Entry::Tick(Tick {}));
        }
    }

    /// Sends the worker what it lacks.
    async fn send(&self) {
        let last = self.log.lock().len() as u64;
        while *self.received.lock() < last {
            let message = self.next_message();
            match self.worker().apply_records(message).await {
                // An answer that is lost.
                Ok(_) if self.chance(4) => {}
                Ok(at) => *self.received.lock() = at.received,
                Err(StreamError::Gap { next }) => *self.received.lock() = next - 1,
                Err(StreamError::Failed(error)) => panic!("{error}"),
            }
        }
        let mut at = self.worker().shared.stream.acknowledged();
        while at.applied() < last {
            at = self.worker().applied_since(at).await;
        }
    }

    /// What was not received; of a faulty stream also what was, or not the next.
    fn next_message(&self) -> StreamMessage {
        let log = self.log.lock();
        let next = *self.received.lock() as usize;
        let first = match next {
            _ if self.chance(4) => self.random(log.len()),
            next => next,
        };
        let mut records = log[first.min(log.len())..].to_vec();
        if self.chance(4) {
            records.truncate(1);
        }
        StreamMessage { records, horizons: Vec::new() }
    }

    /// One time in `n`, if the stream is faulty.
    fn chance(&self, n: usize) -> bool {
        self.faults.lock().is_some() && self.random(n) == 0
    }

    fn random(&self, below: usize) -> usize {
        let mut faults = self.faults.lock();
        let Some(seed) = faults.as_mut() else { return 0 };
        *seed =
            seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (*seed >> 33) as usize % below.max(1)
    }

    /// Cuts an epoch, which is still to be committed.
    async fn cut_only(
        &self,
        id: JobId,
        generation: Generation,
        epoch: Epoch,
    ) -> Result<JobCommit, SqlError> {
        let number = self.jobs.lock()[&id].number + 1;
        let commit = self.worker().cut(id, generation, Cut { epoch, number, record: 0 }).await?;
        if epoch != Epoch::ZERO || !commit.is_empty() {
            let mut jobs = self.jobs.lock();
            // It may have been started again.
            let job = jobs.get_mut(&id).filter(|job| job.start.generation == generation);
            job.into_iter().for_each(|job| job.number = commit.number);
        }
        Ok(commit)
    }

    /// Cuts and commits one epoch.
    pub async fn cut(&self, id: JobId, epoch: Epoch) -> Result<JobCommit, SqlError> {
        let (turn, generation) = {
            let jobs = self.jobs.lock();
            let job = &jobs[&id];
            (Arc::clone(&job.turn), job.start.generation)
        };
        let _turn = turn.lock().await;
        let commit = self.cut_only(id, generation, epoch).await?;
        self.fold(id, &commit);
        self.send().await;
        Ok(commit)
    }
}

/// A handle that can be cloned into background cuts.
pub struct Meta(pub Arc<FakeMeta>);

#[async_trait]
impl MetaService for Meta {
    fn request_cut(&self, job: JobId) {
        let meta = Arc::clone(&self.0);
        tokio::spawn(async move {
            // A cut of a job that stops meanwhile fails; its statements are told by the worker.
            let _ = meta.cut(job, Epoch::ZERO).await;
        });
    }

    async fn commit_edit(
        &self,
        job: JobId,
        _: Generation,
        edit: VersionEdit,
    ) -> Result<bool, SqlError> {
        self.0.fold_edit(job, edit);
        self.0.send().await;
        Ok(true)
    }

    fn report_failure(&self, job: JobId, _: Generation, error: SqlError) {
        self.0.failures.lock().push((job, error));
    }

    fn source_offsets(&self, _: RelationId, epoch: Epoch) -> Vec<(u32, u64)> {
        let fixed = self.0.offsets.lock();
        let last = fixed.iter().rev().find(|(e, _)| *e <= epoch.0);
        last.map(|(_, o)| o.clone()).unwrap_or_default()
    }

    fn source_ahead(&self, _: RelationId, splits: &[(u32, u64)]) -> Vec<Option<u64>> {
        let (fixed, planned) = (self.0.offsets.lock(), self.0.planned.lock());
        let next = |&(split, offset): &(u32, u64)| {
            let ends = fixed.iter().flat_map(|(_, ends)| ends).chain(planned.iter());
            ends.filter(|(s, _)| *s == split).map(|(_, end)| *end).find(|end| *end > offset)
        };
        splits.iter().map(next).collect()
    }

    fn changes(&self, _: RelationId) -> Option<watch::Receiver<u64>> {
        Some(self.0.changes.get()?.subscribe())
    }

    fn watermarks(&self, _: RelationId, epoch: Epoch) -> Vec<ColumnWatermark> {
        let known = self.0.watermarks.lock();
        let last = known.iter().rev().find(|(e, _)| *e <= epoch.0);
        last.map(|&(_, value)| ColumnWatermark { column: 1, value }).into_iter().collect()
    }

    fn is_fenced(&self, incarnation: u64) -> bool {
        *self.0.fenced.lock() == Some(incarnation)
    }

    fn is_behind(&self, job: JobId) -> bool {
        let jobs = self.0.jobs.lock();
        let epoch = |id: JobId| jobs.get(&id).map_or(0, |job| job.start.version.epoch);
        let committed = jobs.get(&job).filter(|job| job.start.version.commits > 0);
        let inputs = committed.map(|job| job.start.inputs.as_slice()).unwrap_or_default();
        let newest = |input: &Relation| match input.kind() {
            RelationKind::Source => self.0.offsets.lock().last().map_or(0, |(epoch, _)| *epoch),
            _ => epoch(RelationId(input.id)),
        };
        inputs.iter().any(|input| newest(input) > epoch(job))
    }

    fn job_to_start(&self, id: JobId) -> Option<JobToStart> {
        // Locked: the version is as of the last record.
        let mut jobs = self.0.jobs.lock();
        let Logged { relation, generation, version, inputs, .. } = &mut jobs.get_mut(&id)?.start;
        let found = JobToStart {
            record: self.0.log.lock().len() as u64,
            generation: *generation,
            relation: Arc::new(relation.clone()),
            version: Arc::new(version.clone()),
            inputs: inputs.iter().cloned().map(Arc::new).collect(),
            horizon: Epoch::ZERO,
        };
        let mut ends_after = self.0.ends_after.lock();
        generation.0 += u64::from(*ends_after == 1);
        *ends_after = ends_after.saturating_sub(1);
        Some(found)
    }

    fn relation(&self, id: RelationId) -> Option<Arc<Relation>> {
        Some(Arc::new(self.0.jobs.lock().get(&id)?.start.relation.clone()))
    }

    fn graph(&self, id: RelationId) -> Option<Bytes> {
        let jobs = self.0.jobs.lock();
        encode_graph(jobs.get(&id)?.graph.as_ref()?).ok()
    }
}

pub struct Cluster {
    pub worker: Arc<Worker>,
    pub meta: Arc<FakeMeta>,
    pub store: Arc<StateStore>,
    pub sim: SimStore,
}

impl Cluster {
    pub async fn new(exec: ExecOptions) -> Cluster {
        Cluster::with(exec, |_| {}).await
    }

    /// With the table 1.
    pub async fn with_table(exec: ExecOptions) -> (Cluster, JobId) {
        let cluster = Cluster::new(exec).await;
        let table = cluster.table(1).await;
        (cluster, table)
    }

    pub async fn with(exec: ExecOptions, set: impl FnOnce(&mut StoreOptions)) -> Cluster {
        Cluster::over(Profile::INSTANT, exec, set).await
    }

    /// On a store of this kind.
    pub async fn over(
        profile: Profile,
        exec: ExecOptions,
        set: impl FnOnce(&mut StoreOptions),
    ) -> Cluster {
        Cluster::led(profile, exec, set, |_| None).await
    }

    /// With jobs on other processes, as far as there are any.
    async fn led(
        profile: Profile,
        exec: ExecOptions,
        set: impl FnOnce(&mut StoreOptions),
        elsewhere: impl FnOnce(&Arc<FakeMeta>) -> Option<Arc<dyn Elsewhere>>,
    ) -> Cluster {
        let sim = SimStore::in_memory(profile, 1);
        let mut options = StoreOptions::new(Arc::new(sim.clone()), 1);
        set(&mut options);
        let store = StateStore::open(options).await.unwrap();
        let mut options = WorkerOptions::new(Arc::clone(&store));
        options.exec = exec;
        let meta = Arc::new(FakeMeta::default());
        options.elsewhere = elsewhere(&meta);
        let worker = Worker::new(options);
        meta.worker.set(Arc::downgrade(&worker)).unwrap();
        worker.set_meta(Arc::new(Meta(Arc::clone(&meta))));
        Cluster { worker, meta, store, sim }
    }

    /// Starts a job, or starts it again from its committed version in the next generation.
    pub async fn start(&self, id: JobId) -> Result<(), SqlError> {
        let graph = {
            let mut jobs = self.meta.jobs.lock();
            let job = jobs.get_mut(&id).unwrap();
            job.start.generation.0 += 1;
            job.turn = Arc::default();
            job.number = job.start.version.commits;
            job.graph.clone()
        };
        let order = self.meta.order(id);
        let Some(graph) = graph else { return self.worker.start_job(order).await };
        let shared = &self.worker.shared;
        shared.remove(id, |_| true).await;
        let opening = shared.begin_opening(id, order.record).await.unwrap();
        let logged = shared.logged(id, order.generation)?;
        opening.set_as_of(logged.record);
        let commits = logged.version.commits;
        let job = start::start_graph(shared, logged, &graph, order.parallelism);
        let job = job.await.map_err(SqlError::from)?;
        job.cuts.begin_after(commits);
        shared.add(job);
        Ok(())
    }

    fn register(&self, start: Logged, graph: Option<Arc<JobGraph>>) -> JobId {
        let id = RelationId(start.relation.id);
        let (turn, number) = (Arc::default(), start.version.commits);
        self.meta.jobs.lock().insert(id, FakeJob { start, graph, turn, number });
        id
    }

    /// `CREATE TABLE (id BIGINT PRIMARY KEY, v BIGINT)`
    pub async fn table(&self, id: u32) -> JobId {
        let mut relation = relation(id, RelationKind::Table);
        relation.key = vec![0];
        relation.primary_key = true;
        relation.distribution = vec![0];
        let version = JobVersion { epoch: self.meta.next_epoch().0, ..JobVersion::default() };
        let id = self.register(logged(relation, version, Vec::new(), 1), None);
        self.start(id).await.unwrap();
        id
    }

    /// A view over `input`, scanning it as of now; the first cut is still to be made.
    pub async fn view(&self, id: u32, input: JobId, graph: JobGraph, parallelism: usize) -> JobId {
        let mut relation = relation(id, RelationKind::MaterializedView);
        relation.key = graph.output.key.iter().map(|&k| k as u32).collect();
        relation.distribution = graph.output.distribution.iter().map(|&k| k as u32).collect();
        relation.storage = graph.output.storage as i32;
        let inputs = vec![self.meta.jobs.lock()[&input].start.relation.clone()];
        let snapshot_epoch = self.meta.jobs.lock()[&input].start.version.epoch;
        let backfill = Some(BackfillState { snapshot_epoch, ..BackfillState::default() });
        let version = JobVersion { backfill, ..JobVersion::default() };
        let id =
            self.register(logged(relation, version, inputs, parallelism), Some(Arc::new(graph)));
        self.start(id).await.unwrap();
        id
    }

    pub fn version(&self, id: JobId) -> JobVersion {
        self.meta.jobs.lock()[&id].start.version.clone()
    }

    /// Cuts until the first scan is done; how many cuts that took.
    pub async fn catch_up(&self, id: JobId) -> usize {
        let mut cuts = 0;
        while let Some(backfill) = self.version(id).backfill {
            self.meta.cut(id, Epoch(backfill.snapshot_epoch)).await.unwrap();
            cuts += 1;
        }
        cuts
    }

    /// Cuts a view at its input's newest epoch.
    pub async fn follow(&self, view: JobId, input: JobId) {
        let epoch = Epoch(self.version(input).epoch);
        if self.version(view).epoch < epoch.0 {
            self.meta.cut(view, epoch).await.unwrap();
        }
    }

    /// What is committed.
    pub async fn rows(&self, id: JobId) -> Vec<Row> {
        let store = self.store.job(id).unwrap();
        let scan =
            store.snapshot(Epoch::MAX).unwrap().scan(TableId(id.0 * 10), ScanOptions::default());
        let batches: Vec<_> = scan.try_collect().await.unwrap();
        let mut rows = Vec::new();
        for b in batches {
            rows.extend(listed(&DeltaChunk::new(b.values, Some(b.weights))));
        }
        rows.sort_unstable();
        rows
    }

    pub async fn dml(
        &self,
        table: JobId,
        rows: &[Row],
        kind: DmlKind,
    ) -> Result<DmlOutcome, DmlError> {
        let number = {
            let mut statements = self.meta.statements.lock();
            *statements += 1;
            *statements
        };
        let id = StatementId { frontend: 1, number };
        let entered = EntryFlag::default();
        let (delta, of) = (delta(rows), entered.clone());
        let statement = DmlStatement { id, delta, kind, mark: None, entered: of, announced: None };
        let result = self.worker.apply_dml(table, statement).await;
        assert!(entered.is_set() || !result.as_ref().is_ok_and(|done| done.rows_affected > 0));
        result
    }

    pub async fn insert(&self, table: JobId, rows: impl IntoIterator<Item = (i64, i64)>) {
        let rows: Vec<Row> = rows.into_iter().map(|(id, v)| (id, v, 1)).collect();
        self.dml(table, &rows, INSERT).await.unwrap();
    }
}

pub const INSERT: DmlKind = DmlKind::Insert { on_conflict: InsertConflict::Error };

/// Of a job that has not been started.
fn logged(
    relation: Relation,
    version: JobVersion,
    inputs: Vec<Relation>,
    parallelism: usize,
) -> Logged {
    Logged { relation, generation: Generation(0), version, inputs, parallelism }
}

fn relation(id: u32, kind: RelationKind) -> Relation {
    let column = |name: &str| Column {
        name: name.to_string(),
        sql_type: SqlType::BigInt.into(),
        nullable: name != "id",
        default_sql: None,
        hidden: false,
        ..Column::default()
    };
    Relation {
        id,
        name: format!("r{id}"),
        kind: kind as i32,
        columns: vec![column("id"), column("v")],
        first_table_id: id * 10,
        table_count: 1,
        ..Relation::default()
    }
}

pub fn schema() -> SchemaRef {
    Arc::new(Schema::new(vec![
        Field::new("id", DataType::Int64, false),
        Field::new("v", DataType::Int64, true),
    ]))
}

pub fn delta(rows: &[Row]) -> DeltaChunk {
    let ids: ArrayRef = Arc::new(Int64Array::from_iter_values(rows.iter().map(|r| r.0)));
    let values: ArrayRef = Arc::new(Int64Array::from_iter_values(rows.iter().map(|r| r.1)));
    let batch = RecordBatch::try_new(schema(), vec![ids, values]).unwrap();
    DeltaChunk::new(batch, Some(Int64Array::from_iter_values(rows.iter().map(|r| r.2))))
}

pub fn listed(chunk: &DeltaChunk) -> Vec<Row> {
    let column = |i: usize| chunk.batch.column(i).as_primitive::<Int64Type>().values().to_vec();
    let (ids, values) = (column(0), column(1));
    (0..ids.len()).map(|i| (ids[i], values[i], chunk.weight(i))).collect()
}

pub fn node(op: Op, inputs: Vec<usize>) -> Node {
    Node { op, inputs, schema: schema(), append_only: false, marks: vec![] }
}

pub fn layout(storage: RowStorage, distribution: Vec<usize>) -> RelationLayout {
    let key = if storage == RowStorage::Keyed { vec![0] } else { Vec::new() };
    RelationLayout {
        schema: schema(),
        storage,
        key,
        distribution,
        append_only: false,
        marks: vec![],
    }
}

pub fn subscribe(input: JobId) -> Node {
    node(Op::Subscribe(Subscribe { relation: input, columns: vec![0, 1] }), vec![])
}

/// A node's rows to another fragment, by the hash of these columns.
pub fn rows(from: usize, to: usize, hash: Vec<usize>) -> Edge {
    Edge { from, to, carries: EdgeKind::Rows { hash } }
}

/// The graph of one fragment, or of several, producers first.
pub fn graph(
    fragments: Vec<Vec<Node>>,
    outputs: Vec<Vec<Edge>>,
    output: RelationLayout,
) -> JobGraph {
    let rows = StateTable {
        name: "rows".to_string(),
        class: AccessClass::PointUpdate,
        value_schema: schema(),
        storage: output.storage,
        relation: true,
        retention: None,
    };
    let fragments = fragments.into_iter().zip(outputs);
    let fragments =
        fragments.map(|(nodes, outputs)| Fragment { nodes, singleton: false, outputs }).collect();
    JobGraph { fragments, tables: vec![rows], output }
}

/// `SELECT * FROM input`, keyed as the input is.
pub fn copy_of(input: JobId) -> JobGraph {
    let nodes = vec![subscribe(input), node(Op::Materialize(Materialize), vec![0])];
    graph(vec![nodes], vec![vec![]], layout(RowStorage::Keyed, vec![0]))
}
