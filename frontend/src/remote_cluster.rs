//! [`Cluster`] for a process with a frontend alone (docs/design.md §4, §10): what is committed it reads from log and
//! bucket, by followers that need nobody else; changes it asks the leader for, and rows it sends to the process that
//! their table runs on.
//!
//! A read's answer names an epoch, the record of the log with which it can be read, and the catalog version; the read
//! waits until that record is here, and a statement that was planned on an older catalog is planned again. A definition
//! waits for the record that it is answered with: what a session has made it sees. What a session names and is not
//! known here is looked for at the log's head before it counts as unknown. So definitions wait for no frontend.

mod definitions;
mod leader;
mod owners;
mod reads;
mod statements;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use arrow::array::{BinaryArray, RecordBatch, UInt32Array};
use async_trait::async_trait;
use millrace_common::{DeltaChunk, EnvHandle, Epoch, RelationId, SqlError};
use millrace_executor::dml::{Announced, DmlKind, EntryFlag, LoadKind};
use millrace_executor::error_sink::ErrorSink;
use millrace_meta::cluster::{COMPUTE_WAIT, has_role, no_compute};
use millrace_meta::processes::Process;
use millrace_meta::settings::Settings;
use millrace_meta::state::{JobRecord, MetaState, has_job};
use millrace_meta::{LogFollower, ReadLease};
use millrace_rpc::catalog::{Relation, RelationKind};
use millrace_rpc::control::{
    CompactionReport, CreateRelationRequest, Definition, JobReports, MetaControl, ProcessReport,
    ProcessUsage, SourceReport,
};
use millrace_rpc::log::{
    AlterRelation, CreateSchema, DropRelations, DropSchema, ProcessRole, Rebuild, SetSetting,
    SetUser, UserChange,
};
use millrace_rpc::version::StatementId;
use millrace_storage::VersionFollower;
use parking_lot::Mutex;
use tokio::time::timeout_at;
use tokio_util::sync::CancellationToken;

use self::owners::Owners;
pub use self::owners::ReadWays;
pub use self::statements::{HeldLocks, RemoteLoad, TableProcess, TableRoutes};
use crate::advisory::LockLeader;
use crate::cluster::source_scan::scan_source;
use crate::cluster::{
    BatchStream, CatalogSnapshot, ChangeStream, Cluster, DmlResult, ExpressionError, FollowStep,
    JobRow, Load, Locks, PlacedVersion, ProcessRow, ReadSet, ScanRequest, SourceRow, SplitRow,
    job_row,
};
use crate::incarnation::REGISTRATION_WAIT;

/// How long a look at processes, jobs and definitions waits for the leader, which may be the one that is missed.
const LOOK_WAIT: Duration = Duration::from_secs(2);

/// What a frontend's process is made of.
pub struct RemoteOptions {
    /// The folded state. Whoever receives the leader's record stream hands it over; without, it is read from the bucket.
    pub log: Arc<LogFollower>,
    /// The committed state of jobs. Nothing of it is written.
    pub versions: Arc<VersionFollower>,
    /// Calls the leader.
    pub meta: Arc<dyn MetaControl>,
    pub routes: Arc<dyn TableRoutes>,
    pub env: EnvHandle,
    /// Settings of the cluster that the command line gives, beside those that the log has.
    pub settings: BTreeMap<String, String>,
    /// For how long others keep what is read here; `None`: the leader is in this process.
    pub lease: Option<Arc<ReadLease>>,
}

/// See the module.
pub struct RemoteCluster {
    log: Arc<LogFollower>,
    versions: Arc<VersionFollower>,
    meta: Arc<dyn MetaControl>,
    routes: Arc<dyn TableRoutes>,
    env: EnvHandle,
    settings: BTreeMap<String, String>,
    lease: Option<Arc<ReadLease>>,
    /// The processes that small reads are sent to.
    owners: Arc<Owners>,
    /// The catalog as sessions see it, of this version of the folded one.
    catalog: Mutex<Option<(u64, Arc<CatalogSnapshot>)>>,
    /// How jobs, sources and processes were when the leader was last asked.
    reports: Mutex<Arc<Reports>>,
}

/// What the leader has told.
#[derive(Default)]
struct Reports {
    jobs: Vec<JobRow>,
    sources: HashMap<u32, SourceReport>,
    processes: HashMap<u64, ProcessReport>,
    usages: Vec<ProcessUsage>,
    compactions: Vec<CompactionReport>,
}

impl From<JobReports> for Reports {
    fn from(reports: JobReports) -> Reports {
        let JobReports { jobs, sources, processes, usages, compactions } = reports;
        Reports {
            jobs: jobs.into_iter().map(job_row).collect(),
            sources: sources.into_iter().map(|s| (s.relation, s)).collect(),
            processes: processes.into_iter().map(|p| (p.incarnation, p)).collect(),
            usages,
            compactions,
        }
    }
}

/// The jobs while nobody leads: they run, and commit nothing.
fn waiting_for_leader(state: &MetaState) -> Vec<JobRow> {
    let row = |(id, job): (&RelationId, &JobRecord)| JobRow {
        relation: id.0,
        state: "waiting".to_owned(),
        reason: Some("the leader does not answer: the job goes on when one does".to_owned()),
        epoch: job.version.epoch,
        rows: job.version.row_count,
        ..JobRow::default()
    };
    state.jobs.iter().map(row).collect()
}

impl std::fmt::Debug for RemoteCluster {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RemoteCluster").field("log", &self.log).finish_non_exhaustive()
    }
}

impl RemoteCluster {
    pub fn new(options: RemoteOptions) -> RemoteCluster {
        let RemoteOptions { log, versions, meta, routes, env, settings, lease } = options;
        RemoteCluster {
            owners: Arc::new(Owners::new(env.clone())),
            log,
            versions,
            meta,
            routes,
            env,
            settings,
            lease,
            catalog: Mutex::default(),
            reports: Mutex::default(),
        }
    }

    /// Counts reads by the way that they take.
    pub fn read_ways(&self) -> Arc<ReadWays> {
        Arc::clone(&self.owners.ways)
    }

    /// The settings of the cluster as this process knows them.
    fn cluster_settings(&self) -> Settings {
        self.log.read(|state| Settings::resolve(&self.settings, &state.settings))
    }
}

/// Whether there is a compute process, as far as the log says.
fn has_compute(state: &MetaState) -> bool {
    let is_compute = |p: &Process| has_role(&p.registration, ProcessRole::Compute);
    state.processes.live().values().any(is_compute)
}

#[async_trait]
impl Cluster for RemoteCluster {
    fn catalog(&self) -> Arc<CatalogSnapshot> {
        let mut cached = self.catalog.lock();
        let known = cached.as_ref().map(|(version, _)| *version);
        let newer = self.log.read(|state| {
            (known != Some(state.catalog_version)).then(|| {
                let schemas = state.schemas.iter().cloned().collect();
                let relations = state.relations.values().cloned().collect();
                (state.catalog_version, schemas, relations)
            })
        });
        match (newer, cached.take()) {
            (None, Some((version, snapshot))) => {
                *cached = Some((version, Arc::clone(&snapshot)));
                snapshot
            }
            (None, None) => Arc::default(),
            (Some((version, schemas, relations)), previous) => {
                let previous = previous.map(|(_, snapshot)| snapshot).unwrap_or_default();
                let snapshot = Arc::new(CatalogSnapshot::after(&previous, schemas, relations));
                *cached = Some((version, Arc::clone(&snapshot)));
                snapshot
            }
        }
    }

    async fn refresh_catalog(&self) -> Result<bool, SqlError> {
        let version = || self.log.read(|state| state.catalog_version);
        let before = version();
        self.catch_up().await?;
        Ok(version() != before)
    }

    async fn refresh_reports(&self) -> Result<(), SqlError> {
        let reports = self.ask(|meta| async move { meta.jobs().await }).await?;
        *self.reports.lock() = Arc::new(Reports::from(reports));
        Ok(())
    }

    async fn show_reports(&self) -> Result<(), SqlError> {
        let reports = match tokio::time::timeout(LOOK_WAIT, self.meta.jobs()).await {
            Ok(Ok(reports)) => Reports::from(reports),
            Ok(Err(error)) if !error.is_retryable() => return Err(error.into()),
            Ok(Err(_)) | Err(_) => {
                Reports { jobs: self.log.read(waiting_for_leader), ..Reports::default() }
            }
        };
        *self.reports.lock() = Arc::new(reports);
        Ok(())
    }

    async fn refresh_processes(&self) {
        let reports = match tokio::time::timeout(LOOK_WAIT, self.meta.jobs()).await {
            Ok(Ok(reports)) => Reports::from(reports),
            // What the log says is shown all the same, and nothing that may be past.
            Ok(Err(_)) | Err(_) => Reports::default(),
        };
        *self.reports.lock() = Arc::new(reports);
    }

    fn missing_process(&self) -> Option<String> {
        if self.lease.as_ref().is_some_and(|lease| !lease.is_registered()) {
            let limit = REGISTRATION_WAIT.as_secs();
            return Some(format!(
                "no meta process leads, or this frontend has not registered with it yet; the statement waits up to \
                 {limit} s for that"
            ));
        }
        let limit = COMPUTE_WAIT.as_secs();
        (!self.log.read(has_compute)).then(|| {
            format!("no compute process is there; the statement waits up to {limit} s for one")
        })
    }

    async fn await_process_for(&self, relation: &Relation) -> Result<(), SqlError> {
        if !has_job(relation) {
            return Ok(());
        }
        let deadline = self.env.now() + COMPUTE_WAIT;
        loop {
            let known = self.log.number();
            if self.log.read(has_compute) {
                return Ok(());
            }
            if timeout_at(deadline, self.log.changed_since(known)).await.is_err() {
                return Err(no_compute());
            }
        }
    }

    fn lock_leader(&self) -> Option<LockLeader> {
        let (meta, log) = (Arc::clone(&self.meta), Arc::clone(&self.log));
        Some(LockLeader { meta, term: Box::new(move || log.read(|state| state.term)) })
    }

    async fn create_relation(
        &self,
        relation: Relation,
        table_count: u32,
        or_replace: bool,
    ) -> Result<RelationId, SqlError> {
        let relation = Some(relation);
        let create = CreateRelationRequest { relation, table_count, or_replace };
        let created = self.define(Definition::CreateRelation(create)).await?;
        created.ok_or_else(|| SqlError::internal("a creation without an id"))
    }

    async fn drop_relations(&self, ids: Vec<RelationId>) -> Result<(), SqlError> {
        let ids = ids.into_iter().map(|id| id.0).collect();
        self.define(Definition::DropRelations(DropRelations { ids })).await.map(drop)
    }

    fn kept_since(&self, relation: RelationId) -> Epoch {
        self.log.read(|state| state.jobs.get(&relation).map(|job| job.horizon)).unwrap_or_default()
    }

    async fn alter_relation(&self, change: AlterRelation) -> Result<(), SqlError> {
        self.define(Definition::AlterRelation(change)).await.map(drop)
    }

    async fn rebuild(&self, id: RelationId) -> Result<(), SqlError> {
        self.define(Definition::Rebuild(Rebuild { job: id.0 })).await.map(drop)
    }

    async fn wait_rebuilt(
        &self,
        id: RelationId,
        cancel: CancellationToken,
    ) -> Result<(), SqlError> {
        let rebuilt = self.ask(|meta| async move { meta.wait_rebuilt(id).await });
        leader::unless_cancelled(&cancel, rebuilt).await
    }

    fn source_report(&self, id: RelationId) -> Option<SourceRow> {
        let reports = Arc::clone(&self.reports.lock());
        let told = reports.sources.get(&id.0);
        let available = told.into_iter().flat_map(|told| &told.available);
        let available: Vec<(u32, u64)> = available.map(|a| (a.split, a.offset)).collect();
        self.log.read(|state| {
            let splits = state.split_reports(id, &available)?.into_iter().map(SplitRow::from);
            let is_paused = state.relations.get(&id).is_some_and(|r| r.paused);
            // The leader has not been asked: it runs, as far as the log says.
            let unknown = || if is_paused { "paused" } else { "running" }.to_owned();
            Some(SourceRow {
                state: told.map_or_else(unknown, |told| told.state.clone()),
                reason: told.and_then(|told| told.reason.clone()),
                splits: splits.collect(),
                files: state.source_parts(id).files.len(),
            })
        })
    }

    async fn create_schema(&self, name: &str) -> Result<(), SqlError> {
        let name = name.to_owned();
        self.define(Definition::CreateSchema(CreateSchema { name })).await.map(drop)
    }

    async fn drop_schema(&self, name: &str) -> Result<(), SqlError> {
        let (name, cascade) = (name.to_owned(), false);
        self.define(Definition::DropSchema(DropSchema { name, cascade })).await.map(drop)
    }

    async fn wait_created(
        &self,
        id: RelationId,
        cancel: CancellationToken,
    ) -> Result<(), SqlError> {
        let created = self.ask(|meta| async move { meta.wait_created(id).await });
        leader::unless_cancelled(&cancel, created).await
    }

    async fn read_epoch(
        &self,
        ids: &[RelationId],
        timeout: Duration,
        fresh: bool,
    ) -> Result<Epoch, SqlError> {
        match fresh {
            true => self.fresh_epoch(ids, timeout).await,
            false => self.any_epoch(ids, timeout).await,
        }
    }

    async fn fresh_catalog(&self, timeout: Duration) -> Result<(), SqlError> {
        self.fresh_epoch(&[], timeout).await.map(drop)
    }

    async fn newest_definitions(&self) {
        // It is not waited for once it has been silent for long.
        if self.lease.as_ref().is_none_or(|lease| lease.is_answered()) {
            let _ = tokio::time::timeout(LOOK_WAIT, self.fresh_epoch(&[], LOOK_WAIT)).await;
        }
    }

    async fn flush(&self) -> Result<(), SqlError> {
        self.ask(|meta| async move { meta.flush().await }).await
    }

    fn setting(&self, name: &str) -> Option<String> {
        self.cluster_settings().stored(name)
    }

    async fn set_setting(&self, name: &str, value: Option<&str>) -> Result<(), SqlError> {
        let (name, value) = (name.to_owned(), value.map(str::to_owned));
        self.define(Definition::SetSetting(SetSetting { name, value })).await.map(drop)
    }

    fn processes(&self) -> Vec<ProcessRow> {
        let reports = Arc::clone(&self.reports.lock());
        self.log.read(|state| {
            let live = state.processes.live().iter();
            live.map(|(id, process)| {
                let told = reports.processes.get(id);
                let age = told.and_then(|told| told.heartbeat_ms).map(Duration::from_millis);
                ProcessRow {
                    applied: told.map(|told| told.applied),
                    heartbeat: age,
                    load: told.and_then(|told| told.load),
                    ..ProcessRow::new(*id, process.clone(), state.jobs_of(*id))
                }
            })
            .collect()
        })
    }

    fn usages(&self) -> Vec<ProcessUsage> {
        self.reports.lock().usages.clone()
    }

    fn compactions(&self) -> Vec<CompactionReport> {
        self.reports.lock().compactions.clone()
    }

    fn versions(&self) -> Vec<PlacedVersion> {
        self.log.read(PlacedVersion::all)
    }

    fn users(&self) -> BTreeMap<String, Option<String>> {
        self.log.read(|state| state.users.clone())
    }

    async fn set_user(
        &self,
        name: &str,
        change: UserChange,
        verifier: Option<String>,
    ) -> Result<(), SqlError> {
        let (name, change) = (name.to_owned(), change as i32);
        self.define(Definition::SetUser(SetUser { name, change, verifier })).await.map(drop)
    }

    fn jobs(&self) -> Vec<JobRow> {
        self.reports.lock().jobs.clone()
    }

    fn expression_errors(&self, id: RelationId) -> Vec<ExpressionError> {
        let version = self.log.read(|state| state.jobs.get(&id).map(|j| Arc::clone(&j.version)));
        // Counts and first samples are committed with the job's counters.
        let kinds = version.map(|version| ErrorSink::load(&version.counters).kinds());
        kinds.unwrap_or_default().into_iter().map(ExpressionError::from).collect()
    }

    async fn scan(
        &self,
        relation: &Relation,
        epoch: Epoch,
        request: ScanRequest,
    ) -> Result<BatchStream, SqlError> {
        match relation.kind == RelationKind::Source as i32 {
            true => scan_source(relation, self.source_at(relation, epoch), &request),
            false => self.reader(relation, epoch).scan(request).await,
        }
    }

    async fn scan_parts(
        &self,
        relation: &Relation,
        epoch: Epoch,
        request: ScanRequest,
    ) -> Result<Vec<BatchStream>, SqlError> {
        match relation.kind == RelationKind::Source as i32 {
            true => Ok(vec![scan_source(relation, self.source_at(relation, epoch), &request)?]),
            false => self.reader(relation, epoch).scan_parts(request).await,
        }
    }

    async fn multi_get(
        &self,
        relation: &Relation,
        epoch: Epoch,
        keys: BinaryArray,
    ) -> Result<(UInt32Array, RecordBatch), SqlError> {
        self.reader(relation, epoch).multi_get(keys).await
    }

    fn follow_now(&self, id: RelationId, seen: Epoch) -> Option<FollowStep> {
        self.log.follow_now(id, seen).map(FollowStep::from)
    }

    async fn follow(
        &self,
        id: RelationId,
        seen: Epoch,
        progress: Option<Duration>,
    ) -> Result<FollowStep, SqlError> {
        let behind = leader::Cuts::new(&self.meta);
        let step = self.log.follow(id, seen, progress, |jobs| behind.ask(jobs)).await?;
        Ok(step.into())
    }

    async fn changes(
        &self,
        relation: &Relation,
        from: Epoch,
        to: Epoch,
    ) -> Result<ChangeStream, SqlError> {
        self.reader(relation, from).changes(to).await
    }

    async fn apply_dml(
        &self,
        table: RelationId,
        id: StatementId,
        delta: DeltaChunk,
        kind: DmlKind,
        entered: &EntryFlag,
    ) -> Result<DmlResult, SqlError> {
        self.send_dml(table, id, delta, kind, entered).await
    }

    fn announce_staged(&self, _: RelationId, _: &DeltaChunk) -> Option<Announced> {
        // Whoever looks ahead does so in the process that the table runs on.
        None
    }

    async fn begin_load(
        &self,
        table: RelationId,
        id: StatementId,
        kind: LoadKind,
    ) -> Result<Load, SqlError> {
        Ok(Load::Elsewhere(Box::new(self.send_load(table, id, kind).await?)))
    }

    async fn apply_transaction(
        &self,
        id: StatementId,
        changes: Vec<(RelationId, DeltaChunk, DmlKind)>,
        read: ReadSet,
        entered: &EntryFlag,
    ) -> Result<DmlResult, SqlError> {
        self.send_transaction(id, changes, read, entered).await
    }

    async fn lock_tables(&self, tables: &[RelationId]) -> Result<Option<Locks>, SqlError> {
        Ok(self.send_locks(tables).await?.map(Locks::Elsewhere))
    }

    fn tables_behind(&self, id: RelationId) -> Vec<RelationId> {
        self.log.read(|state| state.tables_behind(id))
    }

    fn exact_at(&self, ids: &[RelationId], epoch: Epoch) -> bool {
        self.log.read(|state| state.exact_at(ids, epoch))
    }

    async fn allocate_row_ids(&self, table: RelationId, n: u64) -> Result<u64, SqlError> {
        self.at_table(table, |process| async move { process.allocate_row_ids(table, n).await })
            .await
    }
}
