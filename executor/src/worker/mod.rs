//! A compute worker: the jobs that run on it, as meta asks (docs/design.md §6, §11).
//!
//! Every call names a job and its generation; calls of another generation are ignored or refused. A
//! job that has been stopped stays readable for a while, since a failed job is stopped and started
//! again and its readers should not notice; then its state is closed.

mod calls;
mod cuts;
mod derived;
mod dml_service;
mod feed;
pub(crate) mod into_table;
mod job;
mod maintenance;
mod reads;
mod sources;
mod start;
mod statements;
mod stream;
mod table;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use millrace_common::fair_shares::{FairShares, threads_for};
use millrace_common::{Epoch, Generation, JobId, SqlError, SqlState};
use millrace_rpc::services::{ComputeService, Cut, JobToStart, MetaService, RunningJob, StartJob};
use millrace_rpc::source_poll::{PollSource, Polled};
use millrace_rpc::stream::{Acknowledged, StreamError, StreamMessage};
use millrace_rpc::version::{JobCommit, PublishHandle, VersionEdit};
use millrace_storage::StateStore;
use parking_lot::RwLock;
use tokio::runtime::Handle;
use tokio::time::{Instant, timeout};
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;

use self::calls::StatementCalls;
use self::dml_service::LocksOfFrontends;
use self::job::{Job, Kind};
use self::reads::ReadsOfFrontends;
use self::sources::PolledSources;
pub use self::start::{describe_table, rows_table};
pub(crate) use self::statements::TableSource;
use self::stream::RecordStream;
use crate::blackhole::Digest;
use crate::changelog_cache::ChangelogCache;
use crate::dml::sequencer::TransactionGroups;
use crate::error_sink::ErrorKind;
use crate::input::relations::{Elsewhere, Relations};
use crate::memory::MemoryGovernor;
use crate::options::ExecOptions;
use crate::stats::{EpochTimes, JobStats};

/// How long a call waits for the tasks of a job that another call has begun to end. Tasks that do not let themselves be
/// stopped keep no later generation from running.
const ENDING_WAIT: Duration = Duration::from_secs(2);

/// What a worker is made of.
pub struct WorkerOptions {
    pub store: Arc<StateStore>,
    pub exec: ExecOptions,
    /// Bytes for caches, memtables, channels and statements together.
    pub memory_limit: usize,
    /// Where tasks run; `None`: the runtime the worker is made on.
    pub runtime: Option<Handle>,
    /// What other processes commit; `None`: all jobs run here.
    pub elsewhere: Option<Arc<dyn Elsewhere>>,
    /// Tasks that are polled at a time: as many as `runtime` has threads for them.
    pub task_permits: usize,
}

impl WorkerOptions {
    pub fn new(store: Arc<StateStore>) -> WorkerOptions {
        WorkerOptions {
            store,
            exec: ExecOptions::default(),
            memory_limit: 1 << 30,
            runtime: None,
            elsewhere: None,
            task_permits: threads_for(std::thread::available_parallelism().map_or(2, usize::from)),
        }
    }
}

/// Shared by the worker and its background work.
struct Shared {
    store: Arc<StateStore>,
    options: Arc<ExecOptions>,
    governor: Arc<MemoryGovernor>,
    changelogs: Arc<ChangelogCache>,
    elsewhere: Option<Arc<dyn Elsewhere>>,
    ties: Arc<TransactionGroups>,
    runtime: Handle,
    /// Each job has one share of the cores for its tasks.
    shares: Arc<FairShares>,
    meta: OnceLock<Arc<dyn MetaService>>,
    jobs: RwLock<BTreeMap<JobId, Arc<Job>>>,
    /// Stopped jobs whose state is still open, and since when.
    stopped: RwLock<BTreeMap<JobId, Stopped>>,
    /// A job was started.
    started: tokio::sync::Notify,
    /// What the log says of the jobs.
    stream: RecordStream,
    /// Locks of tables that frontends of other processes hold.
    locks_of_frontends: Arc<LocksOfFrontends>,
    /// Their calls for statements.
    calls_of_frontends: Arc<StatementCalls>,
    /// What they read here.
    reads_of_frontends: ReadsOfFrontends,
    /// Sources that the leader asks about.
    sources: PolledSources,
}

/// A job that was stopped and may be started again.
struct Stopped {
    since: Instant,
    why: Option<SqlError>,
    /// They may not be gone yet.
    tasks: TaskTracker,
}

pub struct Worker {
    shared: Arc<Shared>,
    _maintenance: DropGuard,
}

impl Worker {
    /// Must be called on a runtime, or be given one.
    pub fn new(options: WorkerOptions) -> Arc<Worker> {
        let runtime = options.runtime.unwrap_or_else(Handle::current);
        let governor = MemoryGovernor::new(options.memory_limit);
        let env = options.store.env().clone();
        let bytes = options.exec.changelog_bytes;
        let changelogs = Arc::new(ChangelogCache::new(bytes, Arc::clone(&governor), env.clone()));
        let shares = FairShares::new(options.task_permits, env.clone());
        let reads_of_frontends = ReadsOfFrontends::new(&shares);
        let shared = Arc::new(Shared {
            store: options.store,
            options: Arc::new(options.exec),
            governor,
            changelogs,
            elsewhere: options.elsewhere,
            ties: Arc::default(),
            runtime,
            shares,
            meta: OnceLock::new(),
            jobs: RwLock::default(),
            stopped: RwLock::default(),
            started: tokio::sync::Notify::new(),
            stream: RecordStream::default(),
            locks_of_frontends: Arc::default(),
            calls_of_frontends: Arc::new(StatementCalls::new(env)),
            reads_of_frontends,
            sources: PolledSources::default(),
        });
        let stop = CancellationToken::new();
        maintenance::spawn(&shared, stop.clone());
        Arc::new(Worker { shared, _maintenance: stop.drop_guard() })
    }

    /// The meta service that the worker reports to; the first one given stays.
    pub fn set_meta(&self, meta: Arc<dyn MetaService>) {
        let _ = self.shared.meta.set(meta);
    }

    pub fn store(&self) -> &Arc<StateStore> {
        &self.shared.store
    }

    pub fn governor(&self) -> &Arc<MemoryGovernor> {
        &self.shared.governor
    }

    /// Counters of a running job.
    pub fn stats(&self, job: JobId) -> Option<JobStats> {
        self.shared.job(job).map(|j| j.stats())
    }

    /// The last record of the log up to which everything is applied to the jobs that run here; `None`: there was neither
    /// a record nor a job yet.
    pub fn applied(&self) -> Option<u64> {
        let acknowledged = self.shared.stream.acknowledged();
        (acknowledged.received > 0).then(|| acknowledged.applied())
    }

    /// The jobs that are open here, and the generation of each, those that have stopped included.
    pub fn open_jobs(&self) -> Vec<(JobId, Generation)> {
        self.shared.store.open_jobs()
    }

    /// The generation of a job that runs here.
    pub fn running(&self, job: JobId) -> Option<Generation> {
        self.shared.job(job).map(|job| job.generation)
    }

    /// The jobs that run here, and the generation of each.
    pub fn running_jobs(&self) -> Vec<(JobId, Generation)> {
        self.shared.jobs.read().iter().map(|(id, job)| (*id, job.generation)).collect()
    }

    /// The log has begun this generation of a job that stays here: those before it end. What they have had committed stays
    /// readable until it is started, for a while.
    pub async fn end_before(&self, job: JobId, generation: Generation) {
        self.shared.remove(job, |j| j.generation < generation).await;
    }

    /// The log has placed a job elsewhere: its generations before this one end here, and nothing is kept of them.
    pub async fn leave(&self, job: JobId, before: Generation) {
        let opened = self.shared.stream.opened(job);
        self.shared.remove(job, |j| j.generation < before).await;
        if self.shared.store.close_job_before(job, before) {
            self.shared.stopped.write().remove(&job);
            self.shared.stream.forget_opened(job, opened);
        }
        // Statements that wait for it wait in vain.
        self.shared.started.notify_waiters();
    }

    /// When the newest epochs of a job were sealed and committed.
    pub fn epoch_times(&self, job: JobId) -> Option<Vec<EpochTimes>> {
        self.shared.job(job).map(|j| j.metrics.progress.epochs.read())
    }

    /// Versions of a job's rows below this epoch are gone.
    pub fn kept_since(&self, job: JobId) -> Epoch {
        let job = self.shared.job(job);
        job.and_then(|j| Some(j.store.as_ref()?.horizon())).unwrap_or_default()
    }

    /// Why a table's connector is not going on.
    pub fn feed_error(&self, job: JobId) -> Option<SqlError> {
        self.shared.job(job)?.feed.lock().clone()
    }

    /// Failed expressions of a job since it started here.
    pub fn errors(&self, job: JobId) -> Vec<ErrorKind> {
        self.shared.job(job).map(|j| j.errors.kinds()).unwrap_or_default()
    }

    /// What a job with a blackhole has computed, as committed.
    pub fn blackhole_result(&self, job: JobId) -> Option<Digest> {
        match &self.shared.job(job)?.kind {
            Kind::Derived(derived) => derived.digest(),
            _ => None,
        }
    }
}

impl Shared {
    fn job(&self, id: JobId) -> Option<Arc<Job>> {
        self.jobs.read().get(&id).cloned()
    }

    fn relations(&self) -> Relations {
        Relations {
            store: Arc::clone(&self.store),
            changelogs: Arc::clone(&self.changelogs),
            elsewhere: self.elsewhere.clone(),
        }
    }

    /// The job if it is of this generation.
    fn job_of(&self, id: JobId, generation: Generation) -> Option<Arc<Job>> {
        self.job(id).filter(|j| j.generation == generation)
    }

    fn meta(&self) -> Result<Arc<dyn MetaService>, SqlError> {
        let meta = self.meta.get().cloned();
        meta.ok_or_else(|| SqlError::internal("a worker without a meta service"))
    }

    /// What the log has of the job now; an error if that is another generation, or there is no such job.
    fn logged(&self, job: JobId, generation: Generation) -> Result<JobToStart, SqlError> {
        let logged = self.meta()?.job_to_start(job).filter(|job| job.generation == generation);
        logged.ok_or_else(|| not_running(job))
    }

    fn add(&self, job: Arc<Job>) {
        self.stopped.write().remove(&job.id);
        let before = self.jobs.write().insert(job.id, job);
        debug_assert!(before.is_none(), "one that runs is taken off first");
        self.started.notify_waiters();
    }

    /// Takes the job off the list, if `leave` says so, and ends it. One that another call has taken off has ended, too, when
    /// this returns, unless that takes long: what its tasks hold outside, the next generation may need.
    async fn remove(&self, id: JobId, leave: impl FnOnce(&Job) -> bool) {
        if let Some(job) = self.take_off(id, leave) {
            return job.stop().await;
        }
        let ending = self.stopped.read().get(&id).map(|stopped| stopped.tasks.clone());
        if let Some(tasks) = ending {
            let _ = timeout(ENDING_WAIT, tasks.wait()).await;
        }
    }

    fn take_off(&self, id: JobId, leave: impl FnOnce(&Job) -> bool) -> Option<Arc<Job>> {
        // Locked: who does not find the job any more and starts it again undoes all of this.
        let mut jobs = self.jobs.write();
        if !jobs.get(&id).is_some_and(|job| leave(job)) {
            return None;
        }
        let job = jobs.remove(&id)?;
        // What is committed from now on it is not told.
        self.changelogs.close(id);
        let since = self.store.env().now();
        let stopped = Stopped { since, why: job.failure(), tasks: job.tasks() };
        self.stopped.write().insert(id, stopped);
        Some(job)
    }
}

fn not_running(job: JobId) -> SqlError {
    SqlError::new(
        SqlState::OBJECT_NOT_IN_PREREQUISITE_STATE,
        format!("job {job} is not running in this generation"),
    )
}

#[async_trait]
impl ComputeService for Worker {
    async fn start_job(&self, start: StartJob) -> Result<(), SqlError> {
        let StartJob { job: id, generation, record, parallelism } = start;
        // An order that the log does not bear out ends nothing.
        self.shared.logged(id, generation)?;
        let is_past = |job: &Job| {
            let was_adopted = job.generation == generation && job.cuts.are_after(record);
            job.generation > generation || was_adopted
        };
        if self.shared.job(id).is_some_and(|job| is_past(&job)) {
            return Err(not_running(id));
        }
        self.shared.remove(id, |_| true).await;
        // Also where another call has taken the job off and not come so far.
        self.shared.changelogs.close(id);
        let opening = self.shared.begin_opening(id, record).await;
        let opening = opening.ok_or_else(|| not_running(id))?;
        // A call before this one may have added its job meanwhile. From now on it does not.
        self.shared.remove(id, |_| true).await;
        // Read now: what the log says later waits.
        let logged = self.shared.logged(id, generation)?;
        opening.set_as_of(logged.record);
        let (horizon, commits) = (logged.horizon, logged.version.commits);
        let job = tokio::select! {
            biased;
            // What is opened late would replace what the other call has opened.
            () = opening.superseded() => return Err(not_running(id)),
            job = start::start(&self.shared, logged, parallelism) => {
                job.map_err(|e| e.into_sql())?
            }
        };
        job.cuts.begin_after(commits);
        if let Some(store) = &job.store {
            store.set_horizon(horizon);
        }
        if let Err(job) = opening.add(job) {
            job.stop().await;
            return Err(not_running(id));
        }
        // Who ends what the log has ended has not found it here if that was while it was being opened.
        if let Err(ended) = self.shared.logged(id, generation) {
            self.shared.remove(id, |job| job.generation <= generation).await;
            return Err(ended);
        }
        Ok(())
    }

    async fn adopt_job(
        &self,
        job: JobId,
        generation: Generation,
        record: u64,
        after: u64,
    ) -> Result<Option<RunningJob>, SqlError> {
        let Some(job) = self.shared.job_of(job, generation) else { return Ok(None) };
        let handed_over = tokio::select! {
            biased;
            () = job.stopped() => return Ok(None),
            handed_over = job.cuts.hand_over(record, after) => handed_over,
        };
        if job.is_stopped() {
            return Ok(None);
        }
        let horizon = job.store.as_ref().map_or(Epoch::ZERO, |store| store.horizon());
        Ok(Some(RunningJob { horizon, ..handed_over }))
    }

    async fn cut(
        &self,
        job: JobId,
        generation: Generation,
        cut: Cut,
    ) -> Result<JobCommit, SqlError> {
        let job = self.shared.job_of(job, generation).ok_or_else(|| not_running(job))?;
        let _running = job.cuts.begin(cut)?;
        if let Kind::Table(table) = &job.kind {
            job.guard(table.await_batch()).await?;
        }
        let began = self.shared.store.env().now();
        let commit = match &job.kind {
            Kind::Nothing => Err(SqlError::internal("a source has nothing to cut")),
            Kind::Table(table) => job.guard(table.cut(cut.number)).await,
            Kind::Derived(derived) => job.guard(derived.cut(cut)).await,
        }?;
        // Where other processes lead, one may have to go on with it.
        let is_logged = !commit.is_empty() || matches!(job.kind, Kind::Derived(_));
        if self.shared.elsewhere.is_some() && is_logged {
            job.cuts.seal(&commit);
        }
        job.barriers.record(self.shared.store.env().elapsed(began));
        job.epochs.add(1);
        Ok(commit)
    }

    async fn apply_records(&self, message: StreamMessage) -> Result<Acknowledged, StreamError> {
        self.shared.receive(&message)
    }

    async fn applied_since(&self, known: Acknowledged) -> Acknowledged {
        self.shared.stream.applied_since(&known).await
    }

    async fn prepare_edit(&self, job: JobId, generation: Generation, edit: VersionEdit) {
        let Some(job) = self.shared.job_of(job, generation) else { return };
        let Some(store) = &job.store else { return };
        tokio::select! {
            biased;
            () = job.stopped() => {}
            () = store.fetch_hot(&edit) => {}
        }
    }

    async fn abort_epoch(&self, job: JobId, generation: Generation, error: SqlError) {
        let Some(job) = self.shared.job_of(job, generation) else { return };
        if let Kind::Table(table) = &job.kind {
            table.sequencer.void(Some(&error));
        }
        job.set_failure(error);
        job.stop().await;
    }

    async fn publish(
        &self,
        job: JobId,
        generation: Generation,
        handles: Vec<PublishHandle>,
    ) -> Result<(), SqlError> {
        let job = self.shared.job_of(job, generation).ok_or_else(|| not_running(job))?;
        let Kind::Derived(derived) = &job.kind else {
            return Err(SqlError::internal("only a sink publishes"));
        };
        tokio::select! {
            biased;
            () = job.stopped() => Err(not_running(job.id)),
            published = derived.publish(&handles) => published.map_err(|e| e.into_sql()),
        }
    }

    async fn stop_job(&self, job: JobId, generation: Generation) {
        self.shared.remove(job, |j| j.generation <= generation).await;
    }

    async fn poll_source(&self, poll: PollSource) -> Result<Polled, SqlError> {
        self.shared.poll_source(poll).await
    }
}
