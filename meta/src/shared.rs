//! What drivers, coordinators and sessions share: the folded state and ways to wake each other.
//!
//! Locks here are held for lookups only, never across an await. The folded state is written by the log
//! writer alone; only what is published is taken out of `unpublished` by others.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, OnceLock, Weak};

use millrace_common::task::spawn;
use millrace_common::{EnvHandle, Epoch, Generation, JobId, RelationId, SqlError};
use millrace_rpc::catalog::RelationKind;
use millrace_rpc::log::{Entry, LogRecord};
use millrace_rpc::services::{CompactorService, ComputeService};
use millrace_rpc::stream::{Acknowledged, AppliedRecord};
use millrace_rpc::version::JobCommit;
use millrace_storage::given_up::GivenUp;
use parking_lot::{Mutex, RwLock};
use tokio::sync::{Notify, broadcast};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::advisory::AdvisoryLocks;
use crate::backlog::StepLimit;
use crate::catalog::Catalog;
use crate::clock::ClockGuard;
use crate::collection::Rounds;
use crate::compaction_board::CompactionBoard;
use crate::compaction_queue::CompactionQueue;
use crate::driver::Driver;
use crate::epoch_waiters::Waits;
use crate::error::MetaError;
use crate::fold::Verdict;
use crate::groups::Groups;
use crate::job::JobHandle;
use crate::job_loads::LoadBoard;
use crate::log::{LogWriter, Observer};
use crate::lookups::Lookups;
use crate::members::Members;
use crate::processes::AppliedRecords;
use crate::relation_changes::RelationChanges;
use crate::segments::{ListedSizes, RewriteCounters};
use crate::sessions::SessionBoard;
use crate::settings::Settings;
use crate::source::{self, SourceStatus};
use crate::state::{JobRecord, MetaState};
use crate::stream::{RecordStream, RecordStreams, applied};

/// Records that are kept for a slow follower; it reads from the bucket what it misses.
const FOLLOWED_RECORDS: usize = 256;

/// The services a started meta calls.
#[derive(Clone)]
pub struct Services {
    pub compute: Arc<dyn ComputeService>,
    pub compactor: Arc<dyn CompactorService>,
}

/// A running source coordinator.
struct SourceHandle {
    notify: Arc<Notify>,
    status: Arc<Mutex<SourceStatus>>,
    cancel: CancellationToken,
}

pub struct Shared {
    me: Weak<Shared>,
    pub env: EnvHandle,
    /// When this process began to lead.
    pub opened: Instant,
    pub state: Arc<RwLock<MetaState>>,
    pub parallelism: usize,
    /// See `MetaOptions`.
    pub source_epoch_events: OnceLock<u64>,
    /// See `MetaOptions`.
    pub step_bytes: OnceLock<u64>,
    base_settings: BTreeMap<String, String>,
    settings: RwLock<Settings>,
    catalog: RwLock<Arc<Catalog>>,
    log: OnceLock<LogWriter>,
    pub services: OnceLock<Services>,
    jobs: RwLock<BTreeMap<JobId, Arc<JobHandle>>>,
    sources: RwLock<BTreeMap<RelationId, SourceHandle>>,
    pub waits: Waits,
    /// Transactions over several tables on their way to the log.
    pub groups: Groups,
    /// What compute processes are told of the log.
    pub streams: RecordStreams,
    /// Wakes those who wait for a relation.
    pub changes: RelationChanges,
    /// Told of every record: there may be garbage.
    pub appended: Notify,
    /// When the collector is to run at once.
    pub collection: Rounds,
    /// Jobs that have committed since the collector last moved their horizons.
    pub committed: Mutex<BTreeSet<JobId>>,
    /// Held while horizons are computed and given out.
    pub giving: Mutex<()>,
    /// Jobs whose runs may need compaction.
    pub compaction: CompactionQueue,
    /// How often state tables are looked up on other processes.
    pub lookups: Lookups,
    /// Compactions under way, and those that wait.
    pub compactions: Arc<CompactionBoard>,
    /// What segments with little live data were rewritten.
    pub rewrites: RewriteCounters,
    /// How far each process has come.
    pub applied: AppliedRecords,
    /// What this process has written for nothing; set when it leads.
    pub given_up: OnceLock<Arc<GivenUp>>,
    /// Of this process; set when it leads.
    pub incarnation: OnceLock<u64>,
    /// Advisory locks are given from then on.
    pub locks_from: OnceLock<Instant>,
    /// Whether jobs run on this process; set when it leads.
    pub is_alone: OnceLock<bool>,
    /// Generations that were there when this process began to lead, and may run: they are not started before their
    /// processes have been asked.
    pub inherited: Mutex<BTreeMap<JobId, Generation>>,
    /// The other processes of a cluster.
    pub members: Members,
    /// How much of a core each job takes.
    pub loads: LoadBoard,
    /// Whether this process's clock is right.
    pub clock: Arc<ClockGuard>,
    /// Advisory locks of the sessions of all frontends of a cluster.
    pub advisory: AdvisoryLocks,
    /// Sessions of all frontends of a cluster.
    pub sessions: SessionBoard,
    /// Those who follow the log.
    pub followers: broadcast::Sender<AppliedRecord>,
    /// Sizes of objects that earlier incarnations wrote.
    pub listed_sizes: ListedSizes,
    /// Stops everything.
    pub shutdown: CancellationToken,
}

impl Shared {
    pub fn new(
        env: EnvHandle,
        parallelism: usize,
        base_settings: BTreeMap<String, String>,
        clock: Arc<ClockGuard>,
    ) -> Arc<Shared> {
        Arc::new_cyclic(|me| Shared {
            me: me.clone(),
            opened: env.now(),
            env,
            state: Arc::default(),
            parallelism: parallelism.max(1),
            source_epoch_events: OnceLock::new(),
            step_bytes: OnceLock::new(),
            settings: RwLock::new(Settings::resolve(&base_settings, &BTreeMap::new())),
            base_settings,
            catalog: RwLock::default(),
            log: OnceLock::new(),
            services: OnceLock::new(),
            jobs: RwLock::default(),
            sources: RwLock::default(),
            waits: Waits::default(),
            groups: Groups::default(),
            streams: RecordStreams::default(),
            changes: RelationChanges::default(),
            appended: Notify::new(),
            collection: Rounds::default(),
            committed: Mutex::default(),
            giving: Mutex::default(),
            compaction: CompactionQueue::default(),
            lookups: Lookups::default(),
            compactions: Arc::default(),
            rewrites: RewriteCounters::default(),
            applied: AppliedRecords::default(),
            given_up: OnceLock::new(),
            incarnation: OnceLock::new(),
            locks_from: OnceLock::new(),
            is_alone: OnceLock::new(),
            inherited: Mutex::default(),
            members: Members::default(),
            loads: LoadBoard::default(),
            clock,
            advisory: AdvisoryLocks::default(),
            sessions: SessionBoard::default(),
            followers: broadcast::Sender::new(FOLLOWED_RECORDS),
            listed_sizes: ListedSizes::default(),
            shutdown: CancellationToken::new(),
        })
    }

    /// What one step of a job may take in.
    pub fn step_limit(&self) -> StepLimit {
        let Some(bytes) = self.step_bytes.get().copied() else { return StepLimit::NONE };
        let events = self.source_epoch_events.get().copied().unwrap_or(source::MAX_EVENTS).max(1);
        // Sources are paced so that an epoch of theirs is half a step at most, or one that nobody can divide.
        StepLimit { bytes, source_row_bytes: (bytes / 2 / events).max(1) }
    }

    pub fn set_log(&self, log: LogWriter) {
        let _ = self.log.set(log);
    }

    pub fn log(&self) -> Result<&LogWriter, SqlError> {
        self.log.get().ok_or_else(|| MetaError::Closed.into())
    }

    pub fn settings(&self) -> Settings {
        *self.settings.read()
    }

    pub fn catalog(&self) -> Arc<Catalog> {
        Arc::clone(&self.catalog.read())
    }

    pub fn job(&self, id: JobId) -> Option<Arc<JobHandle>> {
        self.jobs.read().get(&id).cloned()
    }

    /// What a source's coordinator says of it.
    pub fn source_status(&self, id: RelationId) -> SourceStatus {
        let sources = self.sources.read();
        sources.get(&id).map(|s| s.status.lock().clone()).unwrap_or_default()
    }

    /// Where the content of a source's splits will end when the record on its way has been logged.
    pub fn planned(&self, id: RelationId) -> BTreeMap<u32, u64> {
        let sources = self.sources.read();
        let Some(source) = sources.get(&id) else { return BTreeMap::new() };
        source.status.lock().planned.iter().map(|o| (o.split, o.offset)).collect()
    }

    /// Whether some source has fixed a full epoch ([`SourceStatus::is_full`]) that a job, which is at `own`, lacks.
    pub fn lacks_full_epoch(&self, job: JobId, own: Epoch) -> bool {
        let state = self.state.read();
        let has_more = |id: &RelationId| {
            let newest = state.sources.get(id).and_then(|s| s.history.back());
            newest.is_some_and(|(epoch, _)| *epoch > own)
        };
        let ahead: Vec<RelationId> = state.inputs(job).iter().copied().filter(has_more).collect();
        drop(state);
        let sources = self.sources.read();
        ahead.iter().filter_map(|id| sources.get(id)).any(|s| s.status.lock().is_full)
    }

    /// The generation in the log; `None`: dropped.
    pub fn generation(&self, id: JobId) -> Option<Generation> {
        self.state.read().jobs.get(&id).map(|j| Generation(j.version.generation))
    }

    /// Wakes the drivers of jobs that wait for the snapshot to begin at: what they waited for may be rebuilt.
    pub fn wake_beginners(&self) {
        let waits = |job: &JobRecord| {
            job.version.backfill.as_ref().is_some_and(|backfill| backfill.snapshot_epoch == 0)
        };
        let state = self.state.read();
        let waiting: Vec<JobId> =
            state.jobs.iter().filter(|(_, job)| waits(job)).map(|(id, _)| *id).collect();
        drop(state);
        self.wake(waiting);
    }

    /// Wakes the drivers of these jobs.
    pub fn wake(&self, jobs: impl IntoIterator<Item = JobId>) {
        let handles = self.jobs.read();
        for id in jobs {
            if let Some(handle) = handles.get(&id) {
                handle.notify.notify_one();
            }
        }
    }

    /// The epoch after which a job has committed no more than so many bytes.
    pub fn written_since(&self, id: JobId, bytes: u64) -> Epoch {
        self.job(id).map_or(Epoch::ZERO, |job| job.written_since(bytes))
    }

    /// The job of a relation and those it depends on, inputs first.
    pub fn path_to(&self, id: RelationId) -> Vec<JobId> {
        let state = self.state.read();
        let mut path = state.closure(&[id]);
        path.retain(|id| state.jobs.contains_key(id));
        path
    }

    /// What the job has committed up to this record can be read where it is to be read.
    pub fn published(&self, id: JobId, record: u64) {
        self.take_unpublished(&[(id, record)]);
    }

    /// The job's worker has begun with everything that is committed.
    pub fn published_all(&self, id: JobId) {
        self.take_unpublished(&[(id, u64::MAX)]);
    }

    fn take_unpublished(&self, published: &[(JobId, u64)]) {
        let mut woken = Vec::new();
        let mut touched = Vec::new();
        {
            let mut state = self.state.write();
            for (id, record) in published {
                let Some(commits) = state.unpublished.get_mut(id) else { continue };
                let before = commits.len();
                while commits.pop_front_if(|(of, _)| *of <= *record).is_some() {}
                let is_news = commits.len() < before;
                if commits.is_empty() {
                    state.unpublished.remove(id);
                }
                if is_news {
                    woken.extend(state.readers(*id));
                    touched.push(*id);
                }
            }
        }
        self.wake(woken);
        touched.into_iter().for_each(|id| self.changes.touch(id));
    }

    /// A compute process has applied records. What a job that runs there has committed is readable then, unless its
    /// generation is being ended: who is not running is told nothing, and begins with all that is committed.
    pub fn acknowledge(&self, incarnation: u64, stream: &RecordStream, at: &Acknowledged) {
        let further = stream.acknowledge(at);
        let mut handles: Vec<(Arc<JobHandle>, u64)> = {
            let jobs = self.jobs.read();
            let further = further.into_iter();
            further.filter_map(|(id, record)| Some((Arc::clone(jobs.get(&id)?), record))).collect()
        };
        let published: Vec<(JobId, u64)> = {
            let state = self.state.read();
            let runs_there =
                |id: &JobId| state.jobs.get(id).is_some_and(|job| job.process == incarnation);
            handles.retain(|(handle, _)| runs_there(&handle.id));
            // What a sink has committed is published when its target has it.
            let is_sink = |id: &JobId| {
                state.relations.get(id).is_some_and(|r| r.kind() == RelationKind::Sink)
            };
            let running = handles.iter().filter(|(h, _)| h.started().is_some() && !is_sink(&h.id));
            running.map(|(handle, record)| (handle.id, *record)).collect()
        };
        self.take_unpublished(&published);
        for (handle, record) in &handles {
            handle.set_applied(*record);
        }
        stream.set_applied(at.applied());
        if self.is_alone.get() == Some(&true) {
            // Other processes tell it together with what they read.
            self.applied.acknowledge(incarnation, at.applied());
        }
    }

    /// Completes when the worker has applied this record to the job, or the job is dropped or the server stops.
    pub async fn wait_applied(&self, id: JobId, record: u64) {
        let Some(handle) = self.job(id) else { return };
        let _ = handle.cancel.run_until_cancelled(handle.wait_applied(record)).await;
    }

    /// Completes when the process that a job runs on has applied to it and its inputs what earlier leaders have logged, or
    /// is gone. Returns at once while there is none.
    pub async fn wait_begun(&self, id: JobId) {
        let (process, jobs) = {
            let state = self.state.read();
            let Some(job) = state.jobs.get(&id) else { return };
            let jobs: Vec<JobId> = job.inputs.iter().copied().chain([id]).collect();
            (job.process, jobs)
        };
        self.streams.wait_begun(process, &jobs).await;
    }

    /// Completes when every compute process has applied everything up to this record, or the server stops.
    pub async fn wait_all_applied(&self, record: u64) {
        let _ = self.shutdown.run_until_cancelled(self.streams.wait_applied(record)).await;
    }

    /// Completes when the process that a job runs on has applied everything up to this record, or the server stops.
    pub async fn wait_applied_by_process_of(&self, id: JobId, record: u64) {
        let process = self.state.read().jobs.get(&id).map_or(0, |job| job.process);
        let applied = self.streams.wait_applied_by(process, record);
        let _ = self.shutdown.run_until_cancelled(applied).await;
    }

    /// These objects, which no version names, are of no use.
    pub fn give_up(&self, names: impl IntoIterator<Item = String>) {
        if let Some(given_up) = self.given_up.get() {
            given_up.add(names);
        }
    }

    /// No worker runs yet: each begins with everything committed. Only what a sink has staged may not
    /// have reached its target.
    pub fn forget_unpublished(&self) {
        let mut state = self.state.write();
        let number = state.number;
        state.unpublished = state
            .jobs
            .iter()
            .filter(|(_, job)| !job.version.publish.is_empty())
            .map(|(id, job)| (*id, [(number, Epoch(job.version.epoch))].into()))
            .collect();
    }

    /// A reader of these sources has made progress, or a table with a connector of its own.
    pub fn notify_sources_of(&self, job: JobId) {
        let sources = self.sources.read();
        for input in self.state.read().inputs(job).iter().chain([&job]) {
            if let Some(source) = sources.get(input) {
                source.notify.notify_one();
            }
        }
    }

    /// Everything derived from the state, once it has been read.
    pub fn refresh(&self) {
        self.refresh_catalog();
        self.start_tasks();
    }

    /// Replaces the catalog. Returns what is new, gone or changed in it.
    fn refresh_catalog(&self) -> BTreeSet<RelationId> {
        let state = self.state.read();
        let previous = self.catalog();
        let catalog = Catalog::after(
            &previous,
            state.catalog_version,
            state.relations.clone(),
            state.schemas.clone(),
            state.settings.clone(),
            state.users.clone(),
            |id| state.inputs(id).to_vec(),
        );
        *self.settings.write() = Settings::resolve(&self.base_settings, &state.settings);
        drop(state);
        let differ = catalog.differs_from(&previous);
        *self.catalog.write() = Arc::new(catalog);
        differ
    }

    /// Starts what the catalog says when the services are there.
    pub fn start_tasks(&self) {
        let all = self.state.read().relations.keys().copied().collect();
        self.sync_tasks(&all);
    }

    /// One driver per job and one coordinator per source: starts and stops those of these relations, as the state says.
    fn sync_tasks(&self, ids: &BTreeSet<RelationId>) {
        let (Some(services), Some(me)) = (self.services.get(), self.me.upgrade()) else { return };
        if self.shutdown.is_cancelled() {
            return;
        }
        let (jobs, sources): (BTreeSet<JobId>, BTreeSet<RelationId>) = {
            let state = self.state.read();
            let jobs = ids.iter().copied().filter(|id| state.jobs.contains_key(id));
            let sources = ids.iter().copied().filter(|id| state.sources.contains_key(id));
            (jobs.collect(), sources.collect())
        };
        self.sync_jobs(&me, services, ids, &jobs);
        let mut running = self.sources.write();
        for gone in ids.difference(&sources) {
            if let Some(handle) = running.remove(gone) {
                handle.cancel.cancel();
            }
        }
        for id in sources {
            running.entry(id).or_insert_with(|| {
                let (notify, cancel) = (Arc::new(Notify::new()), self.shutdown.child_token());
                let status = Arc::<Mutex<SourceStatus>>::default();
                let coordinator = source::Coordinator::new(
                    Arc::clone(&me),
                    Arc::clone(&services.compute),
                    id,
                    Arc::clone(&notify),
                    Arc::clone(&status),
                );
                let run = cancel.clone().run_until_cancelled_owned(coordinator.run());
                spawn("pace a source", run);
                SourceHandle { notify, status, cancel }
            });
        }
    }

    fn sync_jobs(
        &self,
        me: &Arc<Shared>,
        services: &Services,
        ids: &BTreeSet<RelationId>,
        jobs: &BTreeSet<JobId>,
    ) {
        let mut running = self.jobs.write();
        for gone in ids.difference(jobs) {
            if let Some(handle) = running.remove(gone) {
                handle.cancel.cancel();
            }
        }
        let new: Vec<Arc<JobHandle>> = jobs
            .iter()
            .filter(|id| !running.contains_key(id))
            .map(|id| Arc::new(JobHandle::new(*id, self.shutdown.child_token())))
            .collect();
        running.extend(new.iter().map(|h| (h.id, Arc::clone(h))));
        drop(running);
        ids.difference(jobs).for_each(|gone| self.lookups.forget(*gone));
        for handle in new {
            let compute = Arc::clone(&services.compute);
            spawn("drive a job", Driver { shared: Arc::clone(me), handle, compute }.run());
        }
    }

    /// What logs call a relation; its number when it is gone.
    pub fn label(&self, id: RelationId) -> String {
        let state = self.state.read();
        state.relations.get(&id).map_or_else(|| id.to_string(), |r| r.label())
    }

    /// Wakes those that may have something to do after this record: drivers of the jobs it names and of what reads the
    /// relations it changed, coordinators of sources, and those who wait for a relation. What reads a job's commit is
    /// woken when its worker has published it, not before ([`Shared::acknowledge`]); what reads a job that keeps its content
    /// although an input behind it has moved is woken at once, because that job commits nothing.
    fn wake_after(&self, touched: &Touched) {
        let moved = std::mem::take(&mut self.state.write().moved);
        let state = self.state.read();
        let inputs = touched.all().flat_map(|id| state.inputs(id).iter().copied().chain([id]));
        let sources: BTreeSet<RelationId> =
            inputs.filter(|id| state.sources.contains_key(id)).collect();
        let changed = touched.changed.iter().chain(&moved);
        let readers = changed.flat_map(|id| state.dependencies.readers(*id));
        let woken: BTreeSet<JobId> = readers.chain(touched.changed.iter().copied()).collect();
        drop(state);
        self.wake(woken);
        for id in &touched.changed {
            self.changes.touch(*id);
        }
        let running = self.sources.read();
        for source in sources.iter().filter_map(|id| running.get(id)) {
            source.notify.notify_one();
        }
    }
}

/// What the entries of a record that took effect were about.
#[derive(Default)]
pub struct Touched {
    /// Jobs that committed.
    committed: BTreeSet<JobId>,
    /// Relations that changed in another way.
    changed: BTreeSet<RelationId>,
    /// Jobs whose runs or tail are others.
    edited: BTreeSet<JobId>,
    /// Jobs that were detached or rebuilt.
    superseded: BTreeSet<JobId>,
}

impl Touched {
    pub fn of(record: &LogRecord, verdicts: &[Verdict]) -> Touched {
        let mut touched = Touched::default();
        for (entry, verdict) in record.entries.iter().zip(verdicts) {
            let (Some(entry), Ok(verdict)) = (entry.entry.as_ref(), verdict) else { continue };
            match entry {
                Entry::Commit(c) => touched.commit(c),
                Entry::Transaction(t) => t.commits.iter().for_each(|c| touched.commit(c)),
                Entry::EditVersion(e) => drop(touched.edited.insert(RelationId(e.job))),
                Entry::SourceAdvance(a) => drop(touched.changed.insert(RelationId(a.source))),
                Entry::StartBackfill(b) => drop(touched.changed.insert(RelationId(b.job))),
                Entry::AlterRelation(a) if a.parallelism.is_some() => {
                    touched.supersede(RelationId(a.id));
                }
                Entry::AlterRelation(a) => drop(touched.changed.insert(RelationId(a.id))),
                Entry::CreateRelation(_) => touched.changed.extend(verdict.relation),
                Entry::Detach(d) => touched.supersede(RelationId(d.job)),
                Entry::Rebuild(r) => touched.supersede(RelationId(r.job)),
                _ => {}
            }
        }
        touched
    }

    fn commit(&mut self, commit: &JobCommit) {
        self.committed.insert(RelationId(commit.job));
        if commit.edit.is_some() {
            self.edited.insert(RelationId(commit.job));
        }
    }

    fn supersede(&mut self, job: JobId) {
        self.superseded.insert(job);
        self.changed.insert(job);
    }

    /// Relations whose content or description is another.
    pub fn all(&self) -> impl Iterator<Item = RelationId> {
        self.committed.union(&self.changed).copied()
    }
}

/// What the log writer holds: not `Shared` itself, which holds the writer's handle.
pub struct Follower(pub Weak<Shared>);

impl Observer for Follower {
    fn folded(&self, record: &Arc<LogRecord>, verdicts: &[Verdict]) {
        if let Some(shared) = self.0.upgrade() {
            shared.streams.push(record, verdicts);
            if shared.followers.receiver_count() > 0 {
                // Nobody may be there any more.
                let _ = shared.followers.send(applied(Arc::clone(record), verdicts));
            }
            shared.folded(record, verdicts);
        }
    }
}

impl Shared {
    fn folded(&self, record: &LogRecord, verdicts: &[Verdict]) {
        let catalog_changed = self.state.read().catalog_version != self.catalog.read().version;
        if catalog_changed {
            let differ = self.refresh_catalog();
            self.sync_tasks(&differ);
        }
        let touched = Touched::of(record, verdicts);
        touched.superseded.iter().for_each(|id| self.end_generation(*id));
        self.wake_after(&touched);
        if catalog_changed {
            let catalog = self.catalog();
            self.changes.touch_where(|id| catalog.relation(id).is_none());
        }
        let has = |wanted: fn(&Entry) -> bool| {
            record.entries.iter().any(|e| e.entry.as_ref().is_some_and(wanted))
        };
        if has(|e| matches!(e, Entry::RegisterProcess(_) | Entry::FenceProcess(_))) {
            self.applied.sync(&self.state.read().processes);
        }
        if has(|e| matches!(e, Entry::PlaceJobs(_) | Entry::FenceProcess(_))) {
            self.end_old_generations();
        }
        if self.is_alone.get() == Some(&false)
            && let Some(own) = self.incarnation.get()
        {
            // Nothing here reads what the log drops.
            self.applied.acknowledge(*own, record.number);
        }
        self.compaction.look_at(touched.edited.iter().copied());
        self.committed.lock().extend(touched.committed);
        self.appended.notify_one();
    }

    /// Jobs may have been placed elsewhere: drivers end the generations that they run.
    fn end_old_generations(&self) {
        let running: Vec<(JobId, Option<Generation>)> =
            self.jobs.read().iter().map(|(id, handle)| (*id, handle.generation())).collect();
        for (id, generation) in running {
            if generation.is_some() && generation != self.generation(id) {
                self.end_generation(id);
            }
        }
    }

    /// The log has begun another generation of the job: its driver ends the one before, whatever that is at.
    fn end_generation(&self, id: JobId) {
        let (Some(handle), Some(now)) = (self.job(id), self.generation(id)) else { return };
        let before = Generation(now.0.saturating_sub(1));
        handle.report_failure(before, SqlError::internal("another generation has begun"));
        // One that failed does not wait for its next attempt, nor does a sink.
        handle.retry.notify_waiters();
    }

    pub fn head(&self) -> Epoch {
        self.state.read().epoch
    }
}
