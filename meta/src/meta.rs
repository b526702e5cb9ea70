//! The handle everybody holds: opening, DDL, reads, and the service workers call.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use millrace_common::task::spawn;
use millrace_common::{Epoch, Generation, JobId, RelationId, SqlError, SqlState, crash};
use millrace_rpc::catalog::{Relation, RelationKind};
use millrace_rpc::control::{CompactionReport, ProcessUsage};
use millrace_rpc::log::{
    AlterRelation, CreateRelation, CreateSchema, DropRelations, DropSchema, EditVersion, Entry,
    FenceProcess, LogEntry, Rebuild, RegisterProcess, SetSetting, SetUser, SplitMarkAt, UserChange,
};
use millrace_rpc::services::{CompactorService, ComputeService, MetaService, SourceParts};
use millrace_rpc::store_id::StoreId;
use millrace_rpc::version::{ColumnWatermark, JobVersion, StatementId, VersionEdit};
use millrace_storage::given_up::GivenUp;
use parking_lot::Mutex;
use prost::bytes::Bytes;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::backup::files::BackupFiles;
use crate::catalog::Catalog;
use crate::clock::{ClockGuard, ClockSkew, watch_clock};
use crate::cluster::{self, Cluster, Connect};
use crate::compact::{ReadsOfTable, Scheduler, TableClass};
use crate::error::VoidReason;
use crate::feed::{self, Follow};
use crate::first_record::{alone, leaders_before};
use crate::fold::Verdict;
use crate::gc::{Collector, GcOptions};
use crate::job_loads::load_of;
use crate::log::{LogStore, LogWriter, Retention, WriterOptions};
use crate::lookups;
use crate::options::MetaOptions;
use crate::processes::{Process, ProcessStatus};
use crate::read;
use crate::segments::{RewriteOptions, SegmentRewriter};
use crate::settings::{self, Settings};
use crate::shared::{Follower, Services, Shared};
use crate::state::MetaState;
use crate::stream::Sender;

/// Clauses of a CREATE.
#[derive(Clone, Copy, Debug, Default)]
pub struct CreateOptions {
    /// State tables of the job; table 0 is the relation's rows. At least 1 where there is a job.
    pub table_count: u32,
    pub or_replace: bool,
    pub if_not_exists: bool,
    /// By which the creation is asked for, once or again.
    pub statement: Option<StatementId>,
}

/// How long a CREATE TABLE waits for the table's tasks; the table exists whatever comes of it.
const TABLE_START_LIMIT: Duration = Duration::from_secs(10);
/// How long a start that is refused waits until nothing is left of its probe.
const PROBE_LEFT: Duration = Duration::from_secs(3);
/// How long a DDL statement waits for its record.
const DDL_LIMIT: Duration = Duration::from_secs(30);
/// How long `start` waits for the jobs' first start.
const START_LIMIT: Duration = Duration::from_secs(5);
/// A setting of the log that SQL neither shows nor sets.
const AUTHENTICATION_SECRET: &str = "#authentication_secret";

/// What a process has in its caches and asks of the store, now.
pub type UsageOf = Box<dyn Fn() -> ProcessUsage + Send + Sync>;

/// Leads one object store, until dropped or deposed.
pub struct Meta {
    pub(crate) shared: Arc<Shared>,
    store: LogStore,
    incarnation: u64,
    nonce: u64,
    predecessors: Vec<u64>,
    table_class: TableClass,
    table_reads: ReadsOfTable,
    pinned: Arc<dyn Fn(&str) -> bool + Send + Sync>,
    given_up: Arc<GivenUp>,
    pub(crate) backup_files: Arc<BackupFiles>,
    gc: GcOptions,
    rewrite: RewriteOptions,
    /// Of a leader whose jobs run on other processes; set when it starts.
    pub(crate) cluster: OnceLock<Arc<Cluster>>,
    /// Of this process.
    usage: OnceLock<UsageOf>,
}

impl Meta {
    /// Probes the store, reads the log and takes the lead. Alone: one record raises the term, registers this process,
    /// places all jobs on it, which raises their generations, and fences every earlier process. In a cluster it fences
    /// earlier leaders only, and jobs stay where they run.
    pub async fn open(options: MetaOptions) -> Result<Arc<Meta>, SqlError> {
        let store = LogStore::new(options.store);
        let clock = Arc::new(ClockGuard::new(options.env.clone(), options.max_clock_skew));
        let set_to = clock.set_to();
        // At the same time: a start takes few rounds. Whoever is refused leaves nothing behind, if the store answers.
        let (opened, (offset, deleted)) = futures::join!(store.open(), store.probe(&options.env));
        let opened = match opened {
            Ok(opened) => opened,
            Err(error) => {
                let _ = tokio::time::timeout(PROBE_LEFT, deleted).await;
                return Err(error.into());
            }
        };
        if let Some(recovering) = options.recovering {
            let jobs = opened.state.jobs.values();
            recovering(jobs.flat_map(|j| j.version.tail.iter().cloned()).collect());
        }
        let may_lead = options.may_claim.is_some().then(|| leaders_before(&opened.state));
        if let Some(may_claim) = options.may_claim
            && let Err(refused) = may_claim(&opened.state).await
        {
            let _ = tokio::time::timeout(PROBE_LEFT, deleted).await;
            return Err(refused);
        }
        clock.note_store(offset?, opened.state.number, set_to);
        clock.check()?;
        let shared = Shared::new(
            options.env.clone(),
            options.parallelism,
            options.settings,
            Arc::clone(&clock),
        );
        // Set once, here.
        let _ = shared.source_epoch_events.set(options.source_epoch_events);
        let _ = shared.step_bytes.set(options.step_bytes.max(1));
        let setting = |of: fn(&Settings) -> Duration| -> Retention {
            let shared = Arc::downgrade(&shared);
            Arc::new(move || shared.upgrade().map_or(Duration::MAX, |s| of(&s.settings())))
        };
        let writer = WriterOptions {
            env: options.env,
            policy: options.snapshots,
            log_retention: setting(|s| s.log_retention),
            object_retention: setting(|s| s.object_retention),
            observer: Arc::new(Follower(Arc::downgrade(&shared))),
            clock,
        };
        let process = RegisterProcess {
            nonce: options.nonce.unwrap_or_else(|| shared.env.random().max(1)),
            roles: options.roles.iter().map(|role| *role as i32).collect(),
            address: options.address,
        };
        let _ = shared.is_alone.set(options.alone);
        let predecessors = Mutex::new(Vec::new());
        let first = |state: &MetaState, term| {
            if options.only_after.is_some_and(|last| last != state.number) {
                return None;
            }
            let leaders = leaders_before(state);
            if may_lead.as_ref().is_some_and(|asked| *asked != leaders) {
                return None;
            }
            *predecessors.lock() = leaders;
            Some(match options.alone {
                true => alone(state, term, &process),
                false => cluster::leading(state, &process),
            })
        };
        let state = Arc::clone(&shared.state);
        let (log, _) = LogWriter::lead(store.clone(), opened, state, &first, writer).await?;
        shared.set_log(log);
        let incarnation = shared.state.read().processes.by_nonce(process.nonce);
        let incarnation =
            incarnation.ok_or_else(|| SqlError::internal("this process was not registered"))?;
        let _ = shared.incarnation.set(incarnation);
        let given_up = options.given_up;
        let _ = shared.given_up.set(Arc::clone(&given_up));
        // No worker runs yet; each begins with everything committed.
        shared.forget_unpublished();
        shared.refresh();
        let (table_class, pinned) = (options.table_class, options.pinned);
        let told = Arc::clone(&shared);
        let as_told = move |job, table| lookups::since_merge(&told, job, table);
        let table_reads = options.table_reads.unwrap_or_else(|| Arc::new(as_told));
        let (gc, rewrite) = (options.gc, options.rewrite);
        let backup_files = Arc::new(BackupFiles::new(Arc::clone(&shared), store.clone()));
        let meta = Arc::new(Meta {
            shared,
            store,
            incarnation,
            nonce: process.nonce,
            predecessors: predecessors.into_inner(),
            table_class,
            table_reads,
            pinned,
            given_up,
            backup_files,
            gc,
            rewrite,
            cluster: OnceLock::new(),
            usage: OnceLock::new(),
        });
        if let Some(opened) = options.opened {
            opened(&meta);
        }
        Ok(meta)
    }

    /// As the log has registered this process: it names its objects, `data/<incarnation>/…`, and its statements.
    pub fn incarnation(&self) -> u64 {
        self.incarnation
    }

    /// The random number by which this process has registered.
    pub fn nonce(&self) -> u64 {
        self.nonce
    }

    /// The nonces of the leaders that this one has taken the lead from and that had not resigned; 0: of one that had none.
    /// Until each is known to be dead, or the lease of its last proof is over
    /// ([`LEADER_LEASE`](crate::log::LEADER_LEASE)), it may still answer reads.
    pub fn predecessors(&self) -> &[u64] {
        &self.predecessors
    }

    /// The last record of a leader that ends: it fences itself, so that its successor need not wait. Nothing may be
    /// answered any more.
    pub async fn resign(&self) -> Result<(), SqlError> {
        let incarnations = vec![self.incarnation];
        self.apply(Entry::FenceProcess(FenceProcess { incarnations })).await
    }

    /// Number of the log's last record.
    pub fn record(&self) -> u64 {
        self.shared.state.read().number
    }

    /// Something of the folded state; nothing is logged meanwhile.
    pub fn read_state<T>(&self, read: impl FnOnce(&MetaState) -> T) -> T {
        read(&self.shared.state.read())
    }

    /// The term in which this process leads.
    pub fn term(&self) -> u64 {
        self.shared.state.read().term
    }

    /// The id of the store that this process leads. Some from the record on by which it leads.
    pub fn store_id(&self) -> Option<StoreId> {
        self.shared.state.read().store_id
    }

    /// The processes that are not fenced, and how each is.
    pub fn processes(&self) -> Vec<ProcessStatus> {
        let state = self.shared.state.read();
        let (now, loads) = (self.shared.env.now(), self.shared.loads.loads(&state));
        let status = |(incarnation, process): (&u64, &Process)| ProcessStatus {
            incarnation: *incarnation,
            process: process.clone(),
            applied: self.shared.applied.last_applied(*incarnation).unwrap_or(process.number),
            heartbeat: self.shared.members.heartbeat_age(*incarnation, now),
            jobs: state.jobs_of(*incarnation),
            load: load_of(&state, &loads, *incarnation),
        };
        state.processes.live().iter().map(status).collect()
    }

    /// Where this process's own caches and requests are told. Once; a second call changes nothing.
    pub fn set_usage(&self, usage: UsageOf) {
        let _ = self.usage.set(usage);
    }

    /// The caches and requests of this process, and of the others as each has told last.
    pub fn usages(&self) -> Vec<ProcessUsage> {
        let own = self.usage.get().map(|usage| usage());
        let own = own.map(|usage| ProcessUsage { incarnation: self.incarnation, ..usage });
        let others = self.shared.members.usages().into_iter();
        own.into_iter().chain(others.filter(|u| u.incarnation != self.incarnation)).collect()
    }

    /// Compactions that are under way, and jobs that wait for one.
    pub fn compactions(&self) -> Vec<CompactionReport> {
        self.shared.compactions.reports(self.shared.env.now())
    }

    /// Starts a driver for every job, from its committed version and stored graph. Returns when all have
    /// started or failed to, or after a few seconds: a job that hangs holds nobody up.
    pub async fn start(
        self: &Arc<Self>,
        compute: Arc<dyn ComputeService>,
        compactor: Arc<dyn CompactorService>,
    ) -> Result<(), SqlError> {
        self.set_services(Services { compute: Arc::clone(&compute), compactor })?;
        let (shared, log) = (Arc::clone(&self.shared), self.store.clone());
        let sender = Sender::new(shared, compute, log, self.incarnation);
        let shutdown = &self.shared.shutdown;
        spawn("send records", shutdown.clone().run_until_cancelled_owned(sender.run()));
        self.start_tasks();
        let ids: Vec<JobId> = self.shared.state.read().jobs.keys().copied().collect();
        let handles = ids.into_iter().filter_map(|id| self.shared.job(id)).collect::<Vec<_>>();
        futures::future::join_all(handles.iter().map(|h| h.wait_attempted(START_LIMIT))).await;
        Ok(())
    }

    /// The same for jobs that run on other processes: those that the log knows, and those that register from now on.
    pub async fn start_cluster(
        self: &Arc<Self>,
        connect: Arc<dyn Connect>,
    ) -> Result<(), SqlError> {
        *self.shared.inherited.lock() = {
            let state = self.shared.state.read();
            let running = state.jobs.iter().filter(|(_, job)| job.process != 0);
            running.map(|(id, job)| (*id, Generation(job.version.generation))).collect()
        };
        let cluster = Cluster::new(&self.shared, self.store.clone(), connect);
        let compute = Arc::clone(&cluster.computes) as Arc<dyn ComputeService>;
        let compactor = Arc::clone(&cluster.compactors) as Arc<dyn CompactorService>;
        self.set_services(Services { compute, compactor })?;
        cluster.start().await;
        // Set once: the services were.
        let _ = self.cluster.set(cluster);
        self.start_tasks();
        Ok(())
    }

    fn set_services(&self, services: Services) -> Result<(), SqlError> {
        if self.shared.services.set(services).is_err() {
            return Err(SqlError::internal("meta was started twice"));
        }
        Ok(())
    }

    /// Drivers and background work.
    fn start_tasks(&self) {
        self.shared.start_tasks();
        let collector = Collector {
            shared: Arc::clone(&self.shared),
            store: self.store.clone(),
            incarnation: self.incarnation,
            pinned: Arc::clone(&self.pinned),
            given_up: Arc::clone(&self.given_up),
            backup_files: Arc::clone(&self.backup_files),
            options: self.gc,
        };
        let scheduler = Scheduler::new(
            Arc::clone(&self.shared),
            Arc::clone(&self.table_class),
            Arc::clone(&self.table_reads),
        );
        let rewriter = SegmentRewriter {
            shared: Arc::clone(&self.shared),
            busy: scheduler.busy(),
            options: self.rewrite,
        };
        let shutdown = &self.shared.shutdown;
        if self.shared.clock.is_on() {
            let watch = watch_clock(Arc::clone(&self.shared), self.store.clone());
            spawn("watch the clock", shutdown.clone().run_until_cancelled_owned(watch));
        }
        spawn("rewrite segments", shutdown.clone().run_until_cancelled_owned(rewriter.run()));
        spawn("collect garbage", shutdown.clone().run_until_cancelled_owned(collector.run()));
        spawn("plan compactions", shutdown.clone().run_until_cancelled_owned(scheduler.run()));
    }

    /// Stops all drivers; nothing durable needs it.
    pub async fn shutdown(&self) {
        self.shared.shutdown.cancel();
        self.shared.changes.touch_where(|_| true);
    }

    /// The catalog after the newest record.
    pub fn catalog(&self) -> Arc<Catalog> {
        self.shared.catalog()
    }

    pub fn settings(&self) -> Settings {
        self.shared.settings()
    }

    /// Durable when it returns; the job starts by itself (a table's is running when this returns).
    /// `relation.id`, `first_table_id`, `table_count` and `created_epoch` are filled in here.
    pub async fn create_relation(
        &self,
        mut relation: Relation,
        options: CreateOptions,
    ) -> Result<RelationId, SqlError> {
        if options.if_not_exists
            && let Some(found) = self.catalog().by_name(&relation.schema, &relation.name)
        {
            return Ok(RelationId(found.id));
        }
        relation.table_count = options.table_count;
        let (schema, name) = (relation.schema.clone(), relation.name.clone());
        let is_table = relation.kind() == RelationKind::Table;
        let (or_replace, process) = (options.or_replace, self.runs_on(&relation));
        let entry = CreateRelation { relation, or_replace, process };
        let verdict = self.append(options.statement, Entry::CreateRelation(entry)).await?;
        let id = match verdict {
            Ok(applied) => {
                applied.relation.ok_or_else(|| SqlError::internal("a creation without an id"))?
            }
            Err(VoidReason::DuplicateRelation(_)) if options.if_not_exists => {
                let catalog = self.catalog();
                let found = catalog.by_name(&schema, &name);
                return found.map(|r| RelationId(r.id)).ok_or_else(|| {
                    SqlError::new(
                        SqlState::SERIALIZATION_FAILURE,
                        format!("\"{name}\" was dropped concurrently"),
                    )
                });
            }
            Err(void) => return Err(void.into()),
        };
        if is_table && let Some(handle) = self.shared.job(id) {
            handle.wait_attempted(TABLE_START_LIMIT).await;
        }
        Ok(id)
    }

    /// The process that a new relation's job runs on; 0: there is none.
    fn runs_on(&self, relation: &Relation) -> u64 {
        match self.cluster.get() {
            None => self.incarnation,
            Some(cluster) => cluster.place_of_new(relation),
        }
    }

    /// All or none; error 2BP01 when something outside the list depends on one inside
    /// (see `Catalog::cascade`). Never waits for a barrier or a job.
    pub async fn drop_relations(&self, ids: &[RelationId]) -> Result<(), SqlError> {
        self.apply(Entry::DropRelations(DropRelations { ids: ids.iter().map(|i| i.0).collect() }))
            .await
    }

    pub async fn create_schema(&self, name: &str, if_not_exists: bool) -> Result<(), SqlError> {
        let entry = Entry::CreateSchema(CreateSchema { name: name.to_owned() });
        match self.append(None, entry).await? {
            Err(VoidReason::DuplicateSchema(_)) if if_not_exists => Ok(()),
            Err(void) => Err(void.into()),
            Ok(_) => Ok(()),
        }
    }

    /// `cascade`: with all relations in it and everything that depends on them.
    pub async fn drop_schema(&self, name: &str, cascade: bool) -> Result<(), SqlError> {
        self.apply(Entry::DropSchema(DropSchema { name: name.to_owned(), cascade })).await
    }

    /// A cluster-wide setting; `None` resets it.
    pub async fn set_setting(&self, name: &str, value: Option<&str>) -> Result<(), SqlError> {
        self.apply(setting_entry(name, value)?).await
    }

    /// What nobody outside knows and every start finds again. It is made at the first; where it cannot be kept, it
    /// comes with the error.
    pub async fn authentication_secret(&self) -> Result<String, (String, SqlError)> {
        if let Some(kept) = self.catalog().settings().get(AUTHENTICATION_SECRET) {
            return Ok(kept.clone());
        }
        let made: String = (0..4).map(|_| format!("{:016x}", self.shared.env.random())).collect();
        let (name, value) = (AUTHENTICATION_SECRET.to_owned(), Some(made.clone()));
        match self.apply(Entry::SetSetting(SetSetting { name, value })).await {
            Ok(()) => Ok(made),
            Err(error) => Err((made, error)),
        }
    }

    /// Creates, changes or removes a user; `verifier` is SCRAM's, none: no password.
    pub async fn set_user(
        &self,
        name: &str,
        change: UserChange,
        verifier: Option<String>,
    ) -> Result<(), SqlError> {
        let entry = SetUser { name: name.to_owned(), change: change as i32, verifier };
        self.apply(Entry::SetUser(entry)).await
    }

    pub(crate) async fn apply(&self, entry: Entry) -> Result<(), SqlError> {
        self.apply_by(None, entry).await
    }

    /// The same for a definition that is asked for by this id, once or again.
    pub(crate) async fn apply_by(
        &self,
        statement: Option<StatementId>,
        entry: Entry,
    ) -> Result<(), SqlError> {
        self.append(statement, entry).await?.map(drop).map_err(SqlError::from)
    }

    /// A statement does not wait for ever for a store that does not answer; what became of it is then
    /// not known, and the error says so.
    async fn append(
        &self,
        statement: Option<StatementId>,
        entry: Entry,
    ) -> Result<Verdict, SqlError> {
        let append = self.shared.log()?.append_once(LogEntry { statement, entry: Some(entry) });
        match tokio::time::timeout(DDL_LIMIT, append).await {
            Ok(verdict) => Ok(verdict?),
            Err(_) => Err(SqlError::new(
                SqlState::TRANSACTION_RESOLUTION_UNKNOWN,
                format!(
                    "the object store has not confirmed the statement within {} s",
                    DDL_LIMIT.as_secs()
                ),
            )
            .with_detail("It takes effect if the store still confirms it.")
            .with_hint(
                "Check the object store and the server's log, then whether the object exists.",
            )),
        }
    }

    /// Returns when the relation has caught up for the first time, or with the error that its job
    /// failed with, or 57014 when `cancel` fires, or 57P03 where no compute process is there for it (the caller drops the
    /// relation then). A sink that is paused is not waited for.
    pub async fn wait_created(
        &self,
        id: RelationId,
        cancel: &CancellationToken,
    ) -> Result<(), SqlError> {
        self.with_computes(read::wait_created(&self.shared, id, cancel)).await
    }

    /// The newest epoch at which all these relations (no plain views) are exact and, if `fresh`, that
    /// misses nothing acknowledged before the call. `timeout`: default `read_wait_timeout`. Dropping the
    /// future cancels.
    pub async fn read_epoch(
        &self,
        relations: &[RelationId],
        timeout: Option<Duration>,
        fresh: bool,
    ) -> Result<Epoch, SqlError> {
        let read = read::read_epoch(&self.shared, relations, timeout, fresh).await;
        read.map_err(|error| self.for_want_of_compute(error))
    }

    /// Whether all these relations are exact, and published, at an epoch.
    pub fn exact_at(&self, relations: &[RelationId], epoch: Epoch) -> bool {
        self.shared.state.read().exact_at(relations, epoch)
    }

    /// Returns when every running job has committed everything acknowledged before the call. In a cluster an error once
    /// there have been no compute processes for too long.
    pub async fn flush(&self) -> Result<(), SqlError> {
        self.with_computes(read::flush(&self.shared)).await
    }

    /// Replaces options of a relation, pauses and resumes a source or sink, or changes how many tasks a job has. Durable
    /// when it returns.
    pub async fn alter_relation(&self, change: AlterRelation) -> Result<(), SqlError> {
        self.alter_by(None, change).await
    }

    pub(crate) async fn alter_by(
        &self,
        statement: Option<StatementId>,
        change: AlterRelation,
    ) -> Result<(), SqlError> {
        let id = RelationId(change.id);
        self.apply_by(statement, Entry::AlterRelation(change)).await?;
        // Jobs that failed at what was altered need not wait.
        let readers = self.shared.state.read().readers(id);
        for job in readers.into_iter().chain([id]).filter_map(|j| self.shared.job(j)) {
            job.retry.notify_waiters();
        }
        Ok(())
    }

    /// Has a derived relation's job compute its result anew, from a snapshot of its inputs: a view or index keeps its
    /// content meanwhile and then changes by the difference; a sink begins with another snapshot. Durable when it
    /// returns.
    pub async fn rebuild(&self, id: RelationId) -> Result<(), SqlError> {
        self.rebuild_by(None, id).await
    }

    pub(crate) async fn rebuild_by(
        &self,
        statement: Option<StatementId>,
        id: RelationId,
    ) -> Result<(), SqlError> {
        crash::point("rebuild-before-log");
        self.apply_by(statement, Entry::Rebuild(Rebuild { job: id.0 })).await?;
        crash::point("rebuild-after-log");
        Ok(())
    }

    /// Returns when a rebuild is done, or with the error that its job failed with: then it goes on all the same. 57014
    /// when `cancel` fires.
    pub async fn wait_rebuilt(
        &self,
        id: RelationId,
        cancel: &CancellationToken,
    ) -> Result<(), SqlError> {
        self.with_computes(read::wait_rebuilt(&self.shared, id, cancel)).await
    }

    /// The tables that a relation's rows follow from; a table's is itself.
    pub fn tables_behind(&self, id: RelationId) -> Vec<RelationId> {
        self.shared.state.read().tables_behind(id)
    }

    /// What a job reads directly.
    pub fn inputs(&self, job: JobId) -> Vec<RelationId> {
        self.shared.state.read().inputs(job).to_vec()
    }

    /// The newest epoch at which the relation is exact; `None`: none yet, or no such relation.
    pub fn frontier(&self, id: RelationId) -> Option<Epoch> {
        self.shared.state.read().readable_frontier(id)
    }

    /// What comes after `seen` of a relation's changes; `None`: nothing yet.
    pub fn follow_now(&self, id: RelationId, seen: Epoch) -> Option<Follow> {
        self.shared.state.read().follow(id, seen)
    }

    /// Waits for it. With `progress`, also returns when nothing has changed for that long.
    pub async fn follow(
        &self,
        id: RelationId,
        seen: Epoch,
        progress: Option<Duration>,
    ) -> Result<Follow, SqlError> {
        feed::follow(&self.shared, id, seen, progress).await
    }

    /// The log's head: the newest durable epoch.
    pub fn head(&self) -> Epoch {
        self.shared.head()
    }

    /// The epoch a statement was committed at, if it is among the newest that were.
    pub fn statement_epoch(&self, id: StatementId) -> Option<Epoch> {
        self.shared.state.read().statements.get(id)
    }

    /// The committed version of a job, for EXPLAIN ANALYZE and tests.
    pub fn version(&self, id: JobId) -> Option<Arc<JobVersion>> {
        self.shared.state.read().jobs.get(&id).map(|j| Arc::clone(&j.version))
    }

    #[cfg(test)]
    pub(crate) fn state_for_tests(&self) -> MetaState {
        self.shared.state.read().clone()
    }

    #[cfg(test)]
    pub(crate) fn horizon_for_tests(&self, id: JobId) -> Epoch {
        self.shared.job(id).map(|handle| handle.horizon()).unwrap_or_default()
    }

    /// Returns once it is known that nobody else had taken the lead two seconds ago, or with the error that somebody has.
    pub async fn prove_lead(&self) -> Result<(), SqlError> {
        read::prove_lead(&self.shared, self.shared.settings().read_wait_timeout).await
    }

    /// Why this process does not lead at present although nobody else does; `None`: its clock is right.
    pub fn clock_skew(&self) -> Option<ClockSkew> {
        self.shared.clock.skew()
    }

    /// The same as an error, for what need not wait until it is refused.
    pub fn check_clock(&self) -> Result<(), SqlError> {
        Ok(self.shared.clock.check()?)
    }

    /// Completes when another server has taken over this store: nothing is acknowledged any more.
    pub async fn deposed(&self) -> SqlError {
        match self.shared.log() {
            Ok(log) => log.deposed().await.into(),
            Err(error) => error,
        }
    }
}

/// Sets a cluster-wide setting, if there is one of that name that may have that value.
pub(crate) fn setting_entry(name: &str, value: Option<&str>) -> Result<Entry, SqlError> {
    let setting = settings::find(name)?;
    let value = value.map(|v| setting.check(v)).transpose()?;
    Ok(Entry::SetSetting(SetSetting { name: setting.name.to_owned(), value }))
}

/// Whether a process did not take the lead because the log had gone on.
pub fn is_overtaken(error: &SqlError) -> bool {
    error.state == SqlState::SERIALIZATION_FAILURE
}

impl Drop for Meta {
    fn drop(&mut self) {
        self.shared.shutdown.cancel();
    }
}

#[async_trait::async_trait]
impl MetaService for Meta {
    fn request_cut(&self, job: JobId) {
        if let Some(handle) = self.shared.job(job) {
            handle.request_cut();
        }
    }

    fn request_compaction(&self, job: JobId) {
        self.shared.compaction.look_at([job]);
    }

    async fn commit_edit(
        &self,
        job: JobId,
        generation: Generation,
        edit: VersionEdit,
    ) -> Result<bool, SqlError> {
        // Which horizon another leader has told the process is known when the job is adopted.
        if let Some(handle) = self.shared.job(job)
            && !handle.wait_attempted(START_LIMIT).await
        {
            let message = format!("the leader does not know yet how far job {job} is");
            return Err(SqlError::new(SqlState::CANNOT_CONNECT_NOW, message));
        }
        // After a restart nobody may read what a flush with this horizon has left out.
        let horizon = self.shared.job(job).map_or(0, |handle| handle.horizon().0);
        let entry = EditVersion { job: job.0, generation: generation.0, edit, horizon };
        let verdict = self.shared.log()?.append(Entry::EditVersion(entry)).await?;
        if let Ok(applied) = &verdict {
            crash::point("flush-after-commit");
            self.shared.wait_applied(job, applied.record).await;
        }
        Ok(verdict.is_ok())
    }

    fn report_failure(&self, job: JobId, generation: Generation, error: SqlError) {
        if let Some(handle) = self.shared.job(job) {
            handle.report_failure(generation, error);
        }
    }

    fn source_offsets(&self, source: RelationId, epoch: Epoch) -> Vec<(u32, u64)> {
        self.shared.state.read().source_offsets(source, epoch)
    }

    fn source_ahead(&self, source: RelationId, splits: &[(u32, u64)]) -> Vec<Option<u64>> {
        let planned = self.shared.planned(source);
        let state = self.shared.state.read();
        let Some(record) = state.sources.get(&source) else { return vec![None; splits.len()] };
        let next = |&(split, offset): &(u32, u64)| {
            let planned = || planned.get(&split).copied().filter(|end| *end > offset);
            record.next_end(split, offset).or_else(planned)
        };
        splits.iter().map(next).collect()
    }

    fn is_behind(&self, job: JobId) -> bool {
        self.shared.state.read().is_behind(job)
    }

    fn source_marks(&self, source: RelationId, epoch: Epoch) -> Vec<SplitMarkAt> {
        self.shared.state.read().source_marks(source, epoch)
    }

    fn watermarks(&self, relation: RelationId, epoch: Epoch) -> Vec<ColumnWatermark> {
        self.shared.state.read().watermarks(relation, epoch)
    }

    fn row_count(&self, relation: RelationId) -> Option<u64> {
        self.shared.state.read().row_count(relation)
    }

    fn source_parts(&self, source: RelationId) -> SourceParts {
        self.shared.state.read().source_parts(source)
    }

    fn relation(&self, relation: RelationId) -> Option<Arc<Relation>> {
        self.shared.state.read().relations.get(&relation).cloned()
    }

    fn option(&self, relation: RelationId, name: &str) -> Option<String> {
        self.shared.state.read().option(relation, name)
    }

    fn changes(&self, relation: RelationId) -> Option<watch::Receiver<u64>> {
        Some(self.shared.changes.subscribe(relation))
    }

    fn graph(&self, relation: RelationId) -> Option<Bytes> {
        self.shared.state.read().graph(relation)
    }
}
