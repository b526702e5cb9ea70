//! The services roles offer each other, as traits. One process serves them by direct calls.

use std::sync::Arc;

use async_trait::async_trait;
use millrace_common::{Epoch, Generation, JobId, RelationId, SqlError};
use prost::bytes::Bytes;
use tokio::sync::watch;

use crate::catalog::Relation;
use crate::log::{MoveParts, SourceFile, SourceSplit, SplitMarkAt};
use crate::source_poll::{PollSource, Polled};
use crate::stream::{Acknowledged, StreamError, StreamMessage};
use crate::version::{ColumnWatermark, JobCommit, JobVersion, PublishHandle, RunMeta, VersionEdit};

/// An order to run a job. What it is, and what it goes on from, the log says: see [`JobToStart`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StartJob {
    pub job: JobId,
    /// Refused if the log has another one by then.
    pub generation: Generation,
    /// The record of the log as of which the order was given: what the log says by then counts.
    pub record: u64,
    /// Number of parallel tasks of each fragment that is not a singleton. The vnode map is
    /// `vnode * parallelism / 256` until meta moves vnodes.
    pub parallelism: usize,
}

/// What the log says of a job to who is to run it, as of one record. Large parts are shared with the folded state: who
/// holds them for long has it copied when the job commits.
#[derive(Clone, Debug)]
pub struct JobToStart {
    /// The last record that was folded by then: the record stream goes on from there.
    pub record: u64,
    pub generation: Generation,
    pub relation: Arc<Relation>,
    /// Its state as committed; empty for a new job.
    pub version: Arc<JobVersion>,
    /// The catalog entries of all relations it reads, directly.
    pub inputs: Vec<Arc<Relation>>,
    /// Versions below are gone, since compactions have dropped them: nobody may read there.
    pub horizon: Epoch,
}

/// How to end the epoch in flight.
#[derive(Clone, Copy, Debug)]
pub struct Cut {
    /// Derived jobs: process every input through this epoch, then end. While the job backfills this
    /// is the snapshot epoch: end wherever the scans are. Roots: `Epoch::ZERO`, the log assigns it.
    pub epoch: Epoch,
    /// The number of the commit that becomes of it ([`JobCommit::number`]): one more than that of the cut before; the
    /// same again, if that one's commit was empty, because an empty one of a root is not logged.
    pub number: u64,
    /// The record of the log as of which the cut was decided: what it says of inputs and sources counts.
    pub record: u64,
}

/// A generation of a job as its process runs it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RunningJob {
    /// Of the last commit that is sealed or was concluded.
    pub number: u64,
    /// Versions of its rows below may be gone.
    pub horizon: Epoch,
    /// What is sealed and not concluded, oldest first: as far as the process knows, the log lacks it.
    pub sealed: Vec<JobCommit>,
    /// A cut is under way.
    pub is_cutting: bool,
}

/// Served by a compute worker, called by meta.
#[async_trait]
pub trait ComputeService: Send + Sync {
    /// Builds the job's tasks from what the log has of it by now; they wait for cuts (derived) or statements (tables).
    async fn start_job(&self, start: StartJob) -> Result<(), SqlError>;

    /// What a leader that takes over goes on with, if this generation of the job runs and is well; `None`: it is to be
    /// started. Completes when a commit after number `after` is sealed or no cut is under way: a cut may wait for those
    /// before it to be concluded. Asked again, the answer is the same. Cuts that were decided before `record`, which are
    /// an earlier leader's, are refused from then on.
    async fn adopt_job(
        &self,
        job: JobId,
        generation: Generation,
        record: u64,
        after: u64,
    ) -> Result<Option<RunningJob>, SqlError> {
        let _ = (job, generation, record, after);
        Ok(None)
    }

    /// Ends an epoch in all tasks of the job and makes its delta durable (uploads done when this
    /// returns). The commit's `epoch` and `number` are as in the cut. A job may be cut again before earlier commits are
    /// concluded.
    /// An error means that the job's tasks failed and have stopped: meta starts a new generation.
    async fn cut(
        &self,
        job: JobId,
        generation: Generation,
        cut: Cut,
    ) -> Result<JobCommit, SqlError>;

    /// What the log says, in its order. Commits are concluded: their changes are published to snapshots and
    /// subscribers, and statements acknowledged; a void commit ends its generation, and those that were cut after it are
    /// void too. Flushes and compactions swap runs; parts that were moved are read where they are now. An empty commit of
    /// a root is not logged and is concluded after the one before it, without being told.
    /// A record that comes again has no effect.
    async fn apply_records(&self, message: StreamMessage) -> Result<Acknowledged, StreamError>;

    /// Completes when more is applied than `known` says.
    async fn applied_since(&self, known: Acknowledged) -> Acknowledged;

    /// The job's runs are about to be replaced as this edit says. Returns when what the process needs of the new ones is in
    /// its memory, or after a bounded time: for speed only.
    async fn prepare_edit(&self, job: JobId, generation: Generation, edit: VersionEdit);

    /// The commit that the last `cut` returned is not in the log and never will be, for this reason. The job's
    /// generation ends with it.
    async fn abort_epoch(&self, job: JobId, generation: Generation, error: SqlError);

    /// Brings committed changes of a sink to its target as one, under the last one's sequence; returns when
    /// the target has it for good. Repeating it changes nothing.
    async fn publish(
        &self,
        job: JobId,
        generation: Generation,
        handles: Vec<PublishHandle>,
    ) -> Result<(), SqlError> {
        let _ = (job, generation, handles);
        Err(SqlError::internal("this worker publishes nothing"))
    }

    /// Stops the job's tasks without a barrier; returns when they are gone.
    async fn stop_job(&self, job: JobId, generation: Generation);

    /// Asks the outside what there is of a source beyond what the log says; its catalog entry and parts are those of the
    /// log, too. One poll of a source is under way at a time: after a caller has given up, the next one waits until the
    /// outside has answered.
    async fn poll_source(&self, poll: PollSource) -> Result<Polled, SqlError>;
}

/// What the catalog entry of a job does not tell of a state table, as of the version that has the runs to be merged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MergedTable {
    /// Its place among the tables of the job's graph; `None`: it has the relation's rows, as the catalog entry says.
    pub position: Option<u32>,
    /// From when on its entries are kept, in microseconds; `None`: all are.
    pub bound: Option<i64>,
}

/// A compaction that meta asks for. Who does it needs to know nothing else of the job.
#[derive(Clone, Debug)]
pub struct CompactionTask {
    pub task_id: u64,
    pub job: JobId,
    pub relation: Relation,
    /// Of one state table.
    pub inputs: Vec<RunMeta>,
    /// That table.
    pub table: MergedTable,
    pub target_level: u32,
    /// Versions at or below may be merged into one.
    pub horizon: Epoch,
    /// Whether nothing older lies below `target_level`: tombstones can go.
    pub bottom: bool,
}

/// What a part of an object is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PartKind {
    /// A run. `meta_length`: as in its [`RunMeta`].
    Run {
        run_id: u64,
        meta_length: u64,
    },
    Slice,
    /// A staged change of a sink.
    Staged,
}

/// A byte range of an object that a job's version names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LivePart {
    pub job: JobId,
    pub object: String,
    pub offset: u64,
    pub length: u64,
    pub kind: PartKind,
}

/// Served by a compactor, called by meta.
#[async_trait]
pub trait CompactorService: Send + Sync {
    async fn compact(&self, task: CompactionTask) -> Result<VersionEdit, SqlError>;

    /// Copies parts of objects into a new one, which is durable when this returns. Each is checked on the way: damaged
    /// bytes are an error.
    async fn copy_parts(&self, parts: Vec<LivePart>) -> Result<MoveParts, SqlError>;

    /// How many processes share the work.
    fn processes(&self) -> usize {
        1
    }
}

/// What a source consists of. Only ever grows.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SourceParts {
    pub splits: Arc<Vec<SourceSplit>>,
    /// Of all splits, in the order of their discovery.
    pub files: Arc<Vec<SourceFile>>,
}

impl SourceParts {
    /// Where a split begins.
    pub fn start(&self, split: u32) -> u64 {
        self.splits.iter().find(|s| s.split == split).map_or(0, |s| s.start)
    }

    /// As the outside calls it.
    pub fn name(&self, split: u32) -> &str {
        self.splits.iter().find(|s| s.split == split).map_or("", |s| s.name.as_str())
    }
}

/// Served by meta, called by workers and frontends.
#[async_trait]
pub trait MetaService: Send + Sync {
    /// A waiter wants the job's open epoch to end now (a statement waits for its acknowledgement).
    fn request_cut(&self, job: JobId);

    /// State tables of the job are read so often that merging their runs may have become of use.
    fn request_compaction(&self, job: JobId) {
        let _ = job;
    }

    /// Commits a flush that a worker made. The record stream has brought it to the worker when this returns; `false`:
    /// void (another generation).
    async fn commit_edit(
        &self,
        job: JobId,
        generation: Generation,
        edit: VersionEdit,
    ) -> Result<bool, SqlError>;

    /// A task of the job failed on its own, between cuts.
    fn report_failure(&self, job: JobId, generation: Generation, error: SqlError);

    /// The split offsets that the source's content ends at, at an epoch: (split, offset exclusive).
    /// The newest fixed at or before `epoch`.
    fn source_offsets(&self, source: RelationId, epoch: Epoch) -> Vec<(u32, u64)>;

    /// Where content of each of these splits that begins at its offset ends next: by a record of the log, or by one that
    /// is on its way there. `None`: nothing is known beyond. For reading ahead only: what is on its way may end up
    /// elsewhere, or not at all.
    fn source_ahead(&self, source: RelationId, splits: &[(u32, u64)]) -> Vec<Option<u64>> {
        let _ = source;
        vec![None; splits.len()]
    }

    /// Whether the log has fenced the process of this incarnation: its statements enter no table from then on. Never where
    /// one process does everything.
    fn is_fenced(&self, incarnation: u64) -> bool {
        let _ = incarnation;
        false
    }

    /// Whether inputs of a job have changes that it has not committed.
    fn is_behind(&self, job: JobId) -> bool {
        let _ = job;
        false
    }

    /// What is logged, through `epoch`, of splits that became idle or active, oldest first.
    fn source_marks(&self, source: RelationId, epoch: Epoch) -> Vec<SplitMarkAt> {
        let _ = (source, epoch);
        Vec::new()
    }

    /// A relation's watermarks (not a source's) as of an epoch at which it is exact: of columns by
    /// position, in microseconds.
    fn watermarks(&self, relation: RelationId, epoch: Epoch) -> Vec<ColumnWatermark> {
        let _ = (relation, epoch);
        Vec::new()
    }

    /// About how many rows a relation (not a source) has now.
    fn row_count(&self, relation: RelationId) -> Option<u64> {
        let _ = relation;
        None
    }

    /// The splits and files of a source that are known by now: at least those of every epoch.
    fn source_parts(&self, source: RelationId) -> SourceParts {
        let _ = source;
        SourceParts::default()
    }

    /// What the log has of a job now; `None`: there is none. It is at least as of every record that the record stream has
    /// brought, and an answer is never older than the one before.
    fn job_to_start(&self, job: JobId) -> Option<JobToStart> {
        let _ = job;
        None
    }

    /// The catalog entry of a relation as it is now; `None`: there is none.
    fn relation(&self, relation: RelationId) -> Option<Arc<Relation>> {
        let _ = relation;
        None
    }

    /// An option of a relation as it is now; `None`: it is not set.
    fn option(&self, relation: RelationId, name: &str) -> Option<String> {
        let _ = (relation, name);
        None
    }

    /// Changes its value whenever offsets of this source may have been fixed, or its options changed.
    fn changes(&self, relation: RelationId) -> Option<watch::Receiver<u64>> {
        let _ = relation;
        None
    }

    /// Reads a graph of a relation again; for EXPLAIN.
    fn graph(&self, relation: RelationId) -> Option<Bytes>;
}
