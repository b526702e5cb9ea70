//! What drivers, coordinators and sessions share: the folded state and ways to wake each other.
//!
//! Locks here are held for lookups only, never across an await. The folded state is written by the log
//! writer alone; only what is published is taken out of `unpublished` by others.

mod folded;
mod publication;
mod tasks;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, OnceLock, Weak};

use millrace_common::{EnvHandle, Epoch, Generation, JobId, RelationId, SqlError};
use millrace_rpc::request::RequestId;
use millrace_rpc::services::{CompactorService, ComputeService};
use millrace_rpc::stream::AppliedRecord;
use millrace_storage::given_up::GivenUp;
use parking_lot::{Mutex, RwLock};
use tokio::sync::{Notify, broadcast};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

pub use self::folded::{Follower, Touched};
use crate::advisory::AdvisoryLocks;
use crate::backlog::StepLimit;
use crate::catalog::Catalog;
use crate::clock::ClockGuard;
use crate::collection::Rounds;
use crate::compaction_board::CompactionBoard;
use crate::compaction_queue::CompactionQueue;
use crate::epoch_waiters::Waits;
use crate::error::MetaError;
use crate::groups::Groups;
use crate::job::JobHandle;
use crate::job_loads::LoadBoard;
use crate::log::LogWriter;
use crate::lookups::Lookups;
use crate::members::Members;
use crate::processes::AppliedRecords;
use crate::relation_changes::RelationChanges;
use crate::segments::{ListedSizes, RewriteCounters};
use crate::sessions::SessionBoard;
use crate::settings::Settings;
use crate::source::{self, SourceStatus};
use crate::state::{JobRecord, MetaState};
use crate::stream::RecordStreams;

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

    /// The id of what this process is about to do by itself, for the logs of all that have to do with it.
    pub fn new_request(&self) -> RequestId {
        RequestId::next(self.incarnation.get().copied().unwrap_or_default())
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

    /// These objects, which no version names, are of no use.
    pub fn give_up(&self, names: impl IntoIterator<Item = String>) {
        if let Some(given_up) = self.given_up.get() {
            given_up.add(names);
        }
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

    /// What logs call a relation; its number when it is gone.
    pub fn label(&self, id: RelationId) -> String {
        let state = self.state.read();
        state.relations.get(&id).map_or_else(|| id.to_string(), |r| r.label())
    }

    pub fn head(&self) -> Epoch {
        self.state.read().epoch
    }
}
