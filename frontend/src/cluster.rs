//! What a frontend needs of the rest of the system, as one trait.
//!
//! Purpose: sessions, DDL, DML and batch queries are written against [`Cluster`] and know neither
//! meta, worker nor store. Where all roles are in one process it is served by direct calls
//! ([`crate::local_cluster`]), elsewhere by log, bucket and network ([`crate::remote_cluster`]).

mod reports;
pub mod snapshot;
pub mod source_scan;
mod statements;
mod worker_reports;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use arrow::array::{BinaryArray, RecordBatch, UInt32Array};
use async_trait::async_trait;
use futures::stream::BoxStream;
use millrace_common::shared_map::SharedMap;
use millrace_common::{DeltaChunk, Epoch, RelationId, SqlError};
use millrace_executor::dml::{Announced, DmlKind, EntryFlag, LoadKind};
use millrace_executor::error_sink::ErrorKind;
use millrace_executor::stats::OperatorStats;
use millrace_meta::feed::Follow;
use millrace_meta::processes::Process;
use millrace_meta::report::SplitReport;
use millrace_meta::state::{JobRecord, MetaState};
use millrace_rpc::catalog::{Relation, RelationKind};
use millrace_rpc::catalog_diff::differences;
use millrace_rpc::control::{CompactionReport, ProcessUsage};
use millrace_rpc::log::{AlterRelation, ProcessRole, UserChange};
use millrace_rpc::version::{JobVersion, StatementId};
use tokio_util::sync::CancellationToken;

pub use self::reports::{job_report, job_row};
pub use self::statements::{Load, Locks, ReadSet};
pub use self::worker_reports::worker_report;
use crate::advisory::LockLeader;
use crate::catalog::mentions::mentions_catalogs;

/// An immutable copy of the catalog.
#[derive(Debug, Default)]
pub struct CatalogSnapshot {
    pub schemas: Vec<String>,
    relations: Vec<Arc<Relation>>,
    /// Those that users see as relations: neither subscriptions nor what ends with a session.
    listed: Vec<Arc<Relation>>,
    by_name: SharedMap<(String, String), Arc<Relation>>,
    /// By the id of what they read or belong to, by ascending ids.
    dependants: SharedMap<u32, Vec<Arc<Relation>>>,
    /// Plain views whose own queries may name system tables.
    catalog_views: BTreeSet<u32>,
}

impl CatalogSnapshot {
    /// The one that follows `previous`. Costs what differs, but for a look at each pointer. `relations` ascend by id.
    pub fn after(
        previous: &CatalogSnapshot,
        schemas: Vec<String>,
        relations: Vec<Arc<Relation>>,
    ) -> CatalogSnapshot {
        let mut by_name = previous.by_name.clone();
        let mut dependants = previous.dependants.clone();
        let mut catalog_views = previous.catalog_views.clone();
        let (gone, added) = differences(&previous.relations, &relations);
        for r in gone {
            by_name.remove(&(r.schema.clone(), r.name.clone()));
            catalog_views.remove(&r.id);
            for on in reads_or_belongs_to(r) {
                let mut all = dependants.get(&on).cloned().unwrap_or_default();
                all.retain(|d| d.id != r.id);
                match all.is_empty() {
                    true => drop(dependants.remove(&on)),
                    false => drop(dependants.insert(on, all)),
                }
            }
        }
        for r in added {
            by_name.insert((r.schema.clone(), r.name.clone()), Arc::clone(r));
            if r.kind() == RelationKind::View && mentions_catalogs(&r.query) {
                catalog_views.insert(r.id);
            }
            for on in reads_or_belongs_to(r) {
                let mut all = dependants.get(&on).cloned().unwrap_or_default();
                let at = all.partition_point(|d| d.id < r.id);
                all.insert(at, Arc::clone(r));
                dependants.insert(on, all);
            }
        }
        let is_listed =
            |r: &&Arc<Relation>| r.ephemeral == 0 && r.kind != RelationKind::Subscription as i32;
        let listed = relations.iter().filter(is_listed).cloned().collect();
        CatalogSnapshot { schemas, relations, listed, by_name, dependants, catalog_views }
    }

    /// The relations that users see as such, by ascending id.
    pub fn relations(&self) -> &[Arc<Relation>] {
        &self.listed
    }

    /// Everything with a name, by ascending id.
    pub fn all(&self) -> &[Arc<Relation>] {
        &self.relations
    }

    pub fn get(&self, schema: &str, name: &str) -> Option<&Arc<Relation>> {
        self.by_name.get(&(schema.to_owned(), name.to_owned()))
    }

    pub fn by_id(&self, id: u32) -> Option<&Arc<Relation>> {
        let at = self.relations.binary_search_by_key(&id, |r| r.id).ok()?;
        self.relations.get(at)
    }

    /// Whether there are plain views whose queries may name system tables.
    pub fn has_catalog_views(&self) -> bool {
        !self.catalog_views.is_empty()
    }

    /// Of these relations, and of what the plain views among them read: the plain views whose own queries may name system
    /// tables.
    pub fn catalog_views(&self, ids: impl IntoIterator<Item = u32>) -> Vec<Arc<Relation>> {
        let (mut found, mut seen) = (Vec::new(), BTreeSet::new());
        let mut ids: Vec<u32> = ids.into_iter().collect();
        while let Some(id) = ids.pop() {
            let relation = self.by_id(id).filter(|r| r.kind() == RelationKind::View);
            let Some(view) = relation.filter(|_| seen.insert(id)) else { continue };
            if self.catalog_views.contains(&id) {
                found.push(Arc::clone(view));
            }
            ids.extend(&view.depends_on);
        }
        found
    }

    /// Relations that read `id` or belong to it, directly.
    pub fn dependants(&self, id: u32) -> impl Iterator<Item = &Arc<Relation>> {
        self.dependants.get(&id).into_iter().flatten()
    }
}

/// Each once.
fn reads_or_belongs_to(relation: &Relation) -> BTreeSet<u32> {
    let target = Some(relation.target).filter(|t| *t != 0);
    relation.depends_on.iter().copied().chain(target).collect()
}

/// What a scan reads.
#[derive(Clone, Debug, Default)]
pub struct ScanRequest {
    /// Positions in [`Relation::columns`].
    pub columns: Vec<usize>,
    /// Stop after about this many rows.
    pub limit: Option<usize>,
    /// Storage keys, when only these rows are wanted (relations stored by key).
    pub keys: Option<BinaryArray>,
    /// Ranges of storage keys, when only rows in them are wanted.
    pub ranges: Option<Vec<KeyBounds>>,
    /// Generated columns that a source's readers compute are NULL where they fail, as in views.
    pub null_errors: bool,
}

/// Storage keys from one (inclusive) to another (exclusive).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyBounds {
    pub from: Vec<u8>,
    pub until: Vec<u8>,
}

pub type BatchStream = BoxStream<'static, Result<RecordBatch, SqlError>>;

/// What came of a statement.
#[derive(Debug)]
pub enum DmlResult {
    Applied {
        /// Visible from this epoch on.
        epoch: Epoch,
        rows: u64,
        /// Rows older than the table's watermark: left out.
        late: u64,
    },
    /// The rows it was evaluated on have changed: evaluate it again.
    Conflict,
}

/// A job as SHOW JOBS, EXPLAIN ANALYZE, the metrics and the console show it. Counters count since the
/// process (operators: the job's last start) began.
#[derive(Clone, Debug, Default)]
pub struct JobRow {
    pub relation: u32,
    pub state: String,
    pub progress: Option<String>,
    /// Rows of its inputs that its first scan has read, of about so many; 0: not known.
    pub scanned: u64,
    pub to_scan: u64,
    pub reason: Option<String>,
    /// It is to compute anew what its relation has, whatever the state that it is in meanwhile.
    pub rebuilding: bool,
    pub epoch: u64,
    /// `None` while it is being created, and where it is not known.
    pub lag_ms: Option<u64>,
    /// Rows that came too late.
    pub late_rows: u64,
    /// (column, microseconds).
    pub watermarks: Vec<(u32, i64)>,
    /// From when on rows of state tables are kept: (table, microseconds).
    pub cleaned: Vec<(u32, i64)>,
    /// Rows of the relation.
    pub rows: i64,
    pub commits: u64,
    pub restarts: u64,
    /// From asking for a cut to its commit.
    pub barrier_p50: Duration,
    pub barrier_p99: Duration,
    pub operators: Vec<OperatorStats>,
    pub tables: Vec<TableRow>,
    /// Of a sink: changes its target has, and changes staged that it does not have yet.
    pub published: u64,
    pub staged: usize,
    /// How many tasks each of its fragments has; none: it is not open on its process.
    pub fragment_tasks: Vec<usize>,
    /// Thousandths of a core that it has taken of late; `None`: not known.
    pub load: Option<u32>,
}

impl TableRow {
    /// In memory and in the store.
    pub fn bytes(&self) -> u64 {
        self.memory_bytes + self.stored_bytes
    }
}

impl JobRow {
    /// State in memory (committed and open) and in the store.
    pub fn state_bytes(&self) -> u64 {
        self.tables.iter().map(TableRow::bytes).sum()
    }

    /// Reads of keyed state that a cache answered, of all: (hits, reads).
    pub fn cache(&self) -> (u64, u64) {
        let add = |f: fn(&OperatorStats) -> u64| self.operators.iter().map(f).sum::<u64>();
        let hits = add(|o| o.cache_hits);
        (hits, hits + add(|o| o.cache_misses))
    }
}

/// One state table of a job.
#[derive(Clone, Debug, Default)]
pub struct TableRow {
    pub id: u32,
    pub name: String,
    pub memory_bytes: u64,
    pub stored_bytes: u64,
    /// Entries, older versions and deletes included.
    pub entries: u64,
}

/// A source, or the connector of a table.
#[derive(Clone, Debug, Default)]
pub struct SourceRow {
    pub state: String,
    pub reason: Option<String>,
    pub splits: Vec<SplitRow>,
    /// Files found.
    pub files: usize,
}

/// How far a split is.
#[derive(Clone, Debug, Default)]
pub struct SplitRow {
    pub split: u32,
    pub name: String,
    /// Where it begins, and where its content ends.
    pub start: u64,
    pub offset: u64,
    /// How far it could go; `None`: not known, or without end.
    pub available: Option<u64>,
}

impl From<SplitReport> for SplitRow {
    fn from(s: SplitReport) -> SplitRow {
        SplitRow {
            split: s.split,
            name: s.name,
            start: s.start,
            offset: s.taken.unwrap_or(s.offset),
            available: s.available.map(|end| end.max(s.offset)).or(s.taken.map(|_| s.offset)),
        }
    }
}

impl SplitRow {
    /// Offsets that are there and not taken in.
    pub fn lag(&self) -> Option<u64> {
        self.available.map(|end| end.saturating_sub(self.offset))
    }
}

/// A line of `millrace_catalog.processes`: a process that takes part.
#[derive(Clone, Debug, Default)]
pub struct ProcessRow {
    pub incarnation: u64,
    /// What it does, in lower case.
    pub roles: Vec<&'static str>,
    /// Where others reach it; empty: nobody does.
    pub address: String,
    /// Of the record that registered it.
    pub epoch: Epoch,
    /// Number of the last record of the log that it has applied; `None`: not known here.
    pub applied: Option<u64>,
    /// How long ago it has told the leader of itself; `None`: it does not, or that is not known here.
    pub heartbeat: Option<Duration>,
    /// How many jobs run on it.
    pub jobs: usize,
    /// Thousandths of a core that they have taken of late; `None`: not known.
    pub load: Option<u32>,
    /// It is given no jobs.
    pub drained: bool,
}

impl ProcessRow {
    pub fn new(incarnation: u64, process: Process, jobs: usize) -> ProcessRow {
        let role = |role: ProcessRole| match role {
            ProcessRole::Unspecified => "unspecified",
            ProcessRole::Meta => "meta",
            ProcessRole::Frontend => "frontend",
            ProcessRole::Compute => "compute",
            ProcessRole::Compactor => "compactor",
        };
        let roles = process.registration.roles().map(role).collect();
        let (address, epoch, drained) =
            (process.registration.address, process.epoch, process.drained);
        let (applied, heartbeat, load) = (None, None, None);
        ProcessRow { incarnation, roles, address, epoch, applied, heartbeat, jobs, load, drained }
    }
}

/// The newest version of a job that is known here.
#[derive(Clone, Debug)]
pub struct PlacedVersion {
    pub relation: u32,
    /// The incarnation of the process that the job runs on; 0: none.
    pub process: u64,
    pub version: Arc<JobVersion>,
}

impl PlacedVersion {
    /// Those of all jobs.
    pub fn all(state: &MetaState) -> Vec<PlacedVersion> {
        let placed = |(id, job): (&RelationId, &JobRecord)| PlacedVersion {
            relation: id.0,
            process: job.process,
            version: Arc::clone(&job.version),
        };
        state.jobs.iter().map(placed).collect()
    }
}

/// A line of `millrace_catalog.errors`: failures of one expression of a view with one SQLSTATE.
#[derive(Clone, Debug)]
pub struct ExpressionError {
    pub place: String,
    pub sqlstate: String,
    pub count: u64,
    /// The first messages.
    pub samples: Vec<String>,
}

impl From<ErrorKind> for ExpressionError {
    fn from(e: ErrorKind) -> ExpressionError {
        let ErrorKind { place, state: sqlstate, count, samples, .. } = e;
        ExpressionError { place, sqlstate, count, samples }
    }
}

/// What comes next of a relation's changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FollowStep {
    /// It changed at this epoch.
    Change(Epoch),
    /// It did not change up to here.
    Unchanged(Epoch),
}

impl From<Follow> for FollowStep {
    fn from(follow: Follow) -> FollowStep {
        match follow {
            Follow::Change(epoch) => FollowStep::Change(epoch),
            Follow::Unchanged(epoch) => FollowStep::Unchanged(epoch),
        }
    }
}

/// Net rows with weights.
pub type ChangeStream = BoxStream<'static, Result<DeltaChunk, SqlError>>;

#[async_trait]
pub trait Cluster: Send + Sync + 'static {
    fn catalog(&self) -> Arc<CatalogSnapshot>;
    /// Returns when the catalog has everything that was acknowledged before. Whether it may be another one than before
    /// the call. Called before definitions, and when something that a statement names is not known.
    async fn refresh_catalog(&self) -> Result<bool, SqlError> {
        Ok(false)
    }
    /// Returns when `jobs`, `source_report` and `expression_errors` tell how things are now. Called before statements
    /// that ask for them, which fail if it does.
    async fn refresh_reports(&self) -> Result<(), SqlError> {
        Ok(())
    }

    /// The same for statements that show them: where the leader does not answer, the jobs are shown as the log has them,
    /// waiting for one.
    async fn show_reports(&self) -> Result<(), SqlError> {
        self.refresh_reports().await
    }

    /// Returns when `processes` tells how they are now, or the leader does not answer.
    async fn refresh_processes(&self) {}

    /// What a statement that takes long may be waiting for, in a sentence: processes that the cluster lacks. `None`: none
    /// is missing.
    fn missing_process(&self) -> Option<String> {
        None
    }

    /// The leader that has the advisory locks of all frontends; `None`: there is no other frontend.
    fn lock_leader(&self) -> Option<LockLeader> {
        None
    }

    /// Returns when there is a process for a relation's job, if it has one; an error if none comes. Nothing has been asked
    /// for yet: whoever stops waiting has done nothing.
    async fn await_process_for(&self, _relation: &Relation) -> Result<(), SqlError> {
        Ok(())
    }

    /// Durable when it returns; the job starts by itself.
    async fn create_relation(
        &self,
        relation: Relation,
        table_count: u32,
        or_replace: bool,
    ) -> Result<RelationId, SqlError>;
    async fn drop_relations(&self, ids: Vec<RelationId>) -> Result<(), SqlError>;
    /// Changes of a relation are kept from this epoch on.
    fn kept_since(&self, relation: RelationId) -> Epoch;

    /// Replaces options of a relation, or pauses and resumes what feeds it.
    async fn alter_relation(&self, change: AlterRelation) -> Result<(), SqlError> {
        let _ = change;
        Err(SqlError::unsupported("ALTER"))
    }
    /// Has a view, index or sink computed anew. Durable when it returns.
    async fn rebuild(&self, id: RelationId) -> Result<(), SqlError> {
        let _ = id;
        Err(SqlError::unsupported("REBUILD"))
    }
    /// Returns when that is done, or has failed.
    async fn wait_rebuilt(
        &self,
        id: RelationId,
        cancel: CancellationToken,
    ) -> Result<(), SqlError> {
        let _ = (id, cancel);
        Err(SqlError::unsupported("REBUILD"))
    }
    /// How far a source, or a table's connector, is.
    fn source_report(&self, id: RelationId) -> Option<SourceRow> {
        let _ = id;
        None
    }
    async fn create_schema(&self, name: &str) -> Result<(), SqlError>;
    async fn drop_schema(&self, name: &str) -> Result<(), SqlError>;

    /// Returns when the relation is readable, or has failed.
    async fn wait_created(&self, id: RelationId, cancel: CancellationToken)
    -> Result<(), SqlError>;
    /// One epoch at which all are exact; `fresh`: nothing acknowledged before is missing.
    async fn read_epoch(
        &self,
        ids: &[RelationId],
        timeout: Duration,
        fresh: bool,
    ) -> Result<Epoch, SqlError>;
    /// Returns when the catalog has everything that was acknowledged before: of a read that reads no relation, and rests on
    /// definitions all the same. Costs what a read's question for its epoch costs.
    async fn fresh_catalog(&self, _timeout: Duration) -> Result<(), SqlError> {
        Ok(())
    }
    /// The same, of users too, for what need not fail without the leader: where that does not answer, what is known here
    /// counts.
    async fn newest_definitions(&self) {}
    async fn flush(&self) -> Result<(), SqlError>;
    /// The stored value of a setting that the cluster keeps.
    fn setting(&self, name: &str) -> Option<String>;
    /// Changes it for everybody; `None`: back to the default.
    async fn set_setting(&self, name: &str, value: Option<&str>) -> Result<(), SqlError>;
    /// The processes that take part, by incarnation.
    fn processes(&self) -> Vec<ProcessRow>;
    /// What processes have in their caches and ask of the object store, as each has told last.
    fn usages(&self) -> Vec<ProcessUsage> {
        Vec::new()
    }
    /// Compactions that are under way, and jobs that wait for one.
    fn compactions(&self) -> Vec<CompactionReport> {
        Vec::new()
    }
    /// The newest version of each job, by relation.
    fn versions(&self) -> Vec<PlacedVersion>;
    /// Users that were created or changed, and their SCRAM verifiers (`None`: no password).
    fn users(&self) -> BTreeMap<String, Option<String>>;
    async fn set_user(
        &self,
        name: &str,
        change: UserChange,
        verifier: Option<String>,
    ) -> Result<(), SqlError>;
    fn jobs(&self) -> Vec<JobRow>;
    /// Expressions of a running job that failed on rows: their values are NULL.
    fn expression_errors(&self, id: RelationId) -> Vec<ExpressionError>;

    /// Rows of a relation at an epoch; a row of multiplicity n comes n times.
    async fn scan(
        &self,
        relation: &Relation,
        epoch: Epoch,
        request: ScanRequest,
    ) -> Result<BatchStream, SqlError>;
    /// The rows of `scan` in several parts that can be read beside each other: one after the other they are the rows of
    /// `scan`, in its order. One part where the relation is small or little of it is wanted.
    async fn scan_parts(
        &self,
        relation: &Relation,
        epoch: Epoch,
        request: ScanRequest,
    ) -> Result<Vec<BatchStream>, SqlError> {
        Ok(vec![self.scan(relation, epoch, request).await?])
    }
    /// Rows of a keyed relation by storage key: positions in `keys`, ascending, and all columns.
    async fn multi_get(
        &self,
        relation: &Relation,
        epoch: Epoch,
        keys: BinaryArray,
    ) -> Result<(UInt32Array, RecordBatch), SqlError>;

    /// What comes after `seen` of a relation's changes; `None`: nothing yet.
    fn follow_now(&self, id: RelationId, seen: Epoch) -> Option<FollowStep>;
    /// Waits for it. With `progress`, also returns when nothing has changed for that long.
    async fn follow(
        &self,
        id: RelationId,
        seen: Epoch,
        progress: Option<Duration>,
    ) -> Result<FollowStep, SqlError>;
    /// The net change of a relation after one epoch through another, all columns.
    async fn changes(
        &self,
        relation: &Relation,
        from: Epoch,
        to: Epoch,
    ) -> Result<ChangeStream, SqlError>;

    /// Commits a statement's rows; `entered` is set when they may be committed.
    async fn apply_dml(
        &self,
        table: RelationId,
        id: StatementId,
        delta: DeltaChunk,
        kind: DmlKind,
        entered: &EntryFlag,
    ) -> Result<DmlResult, SqlError>;
    /// Tells those that look ahead of rows of a table that are staged and may be committed: what comes back is told when
    /// they are, or dropped. `None`: nobody wants to know.
    fn announce_staged(&self, table: RelationId, rows: &DeltaChunk) -> Option<Announced>;
    /// A statement whose rows come in pieces; nothing is visible before it is finished.
    async fn begin_load(
        &self,
        table: RelationId,
        id: StatementId,
        kind: LoadKind,
    ) -> Result<Load, SqlError>;
    /// Net changes of several tables at one epoch, or none of them; a conflict if what was read has changed.
    async fn apply_transaction(
        &self,
        id: StatementId,
        changes: Vec<(RelationId, DeltaChunk, DmlKind)>,
        read: ReadSet,
        entered: &EntryFlag,
    ) -> Result<DmlResult, SqlError>;
    /// Makes other statements of these tables wait, and waits for those that are under way. `None`: a table has been
    /// started again meanwhile.
    async fn lock_tables(&self, tables: &[RelationId]) -> Result<Option<Locks>, SqlError>;
    /// The tables whose rows a relation's rows follow from; a table's is itself.
    fn tables_behind(&self, id: RelationId) -> Vec<RelationId>;
    /// Whether all of these are exact, and readable, at an epoch.
    fn exact_at(&self, ids: &[RelationId], epoch: Epoch) -> bool;
    /// The first of `n` new row ids.
    async fn allocate_row_ids(&self, table: RelationId, n: u64) -> Result<u64, SqlError>;
}
