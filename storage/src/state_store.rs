//! The state store of one worker: what its jobs share (object store, block cache, names, the tail) and
//! the list of open jobs.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use bytes::Bytes;
use millrace_common::collections::{HashMap, HashSet};
use millrace_common::{EnvHandle, Generation, JobId, TableId};
use millrace_rpc::version::JobVersion;
use object_store::ObjectStore;
use parking_lot::{Mutex, RwLock};
use tokio::runtime::Handle;
use tokio::sync::{Notify, Semaphore};

use crate::cache::{BlockCache, CacheOptions, Priority};
use crate::error::Result;
use crate::given_up::GivenUp;
use crate::hot_fetch::{HotFetchCounters, HotFetchStats};
use crate::job_store::JobStore;
use crate::pins::ObjectPins;
use crate::read_counts::TableReads;
use crate::recovery_reads::TailPrefetch;
use crate::run::PrefixLengths;
use crate::segment::ObjectNamer;
use crate::table::TableDesc;
use crate::tail::Tail;
use crate::tail_limits::TailLimits;
use crate::write_delay::{DelayCounters, DelayStats};

/// Where runs are made smaller than this, memory is scarce: one is written at a time.
const LARGE_RUN_BYTES: usize = 16 << 20;

/// Above what compaction lets come to be where it is not behind.
const OVERLAP_LIMIT: usize = 64;

/// How the store works.
#[derive(Clone, Debug)]
pub struct StoreOptions {
    pub store: Arc<dyn ObjectStore>,
    /// From the meta log; never given twice.
    pub incarnation: u64,
    pub cache: CacheOptions,
    /// A job's committed memory runs are flushed beyond this.
    pub flush_bytes: usize,
    /// Rows of epochs under way beyond which the largest parts are written before their epochs end.
    pub spill_bytes: usize,
    /// A commit larger than this goes into runs of its own instead of the tail.
    pub direct_run_bytes: usize,
    /// How much may be committed and not flushed.
    pub tail: TailLimits,
    /// Runs of a state table that may hold one key, beyond which the job's commits are delayed.
    pub overlap_limit: usize,
    /// A slice up to this rides in the log record.
    pub inline_bytes: usize,
    /// Blocks of this many bytes instead of the class's; tests make them tiny.
    pub block_bytes: Option<usize>,
    /// Partitions of indexes of this many bytes instead of the usual; tests make them tiny.
    pub partition_bytes: Option<usize>,
    /// Compaction output aims at this.
    pub run_bytes: usize,
    /// Blocks that one lookup holds, decoded; one that needs more reads them in several rounds.
    pub lookup_bytes: usize,
    /// Blocks that scans and compactions hold, decoded, before their rows are asked for.
    pub scan_bytes: usize,
    /// Tail slices that are being read already.
    pub prefetch: Option<Arc<TailPrefetch>>,
    /// Where what computes much runs: encoding of large commits, merges, filling the cache. `None`: the caller's
    /// runtime.
    pub background: Option<Handle>,
    /// Clocks and random numbers, of the store and of the worker that is given it.
    pub env: EnvHandle,
    /// Told of objects that were written for nothing.
    pub given_up: Arc<GivenUp>,
}

impl StoreOptions {
    pub fn new(store: Arc<dyn ObjectStore>, incarnation: u64) -> StoreOptions {
        StoreOptions {
            store,
            incarnation,
            cache: CacheOptions::default(),
            flush_bytes: 64 << 20,
            spill_bytes: 256 << 20,
            direct_run_bytes: 8 << 20,
            tail: TailLimits::default(),
            overlap_limit: OVERLAP_LIMIT,
            inline_bytes: 16 << 10,
            block_bytes: None,
            partition_bytes: None,
            run_bytes: 64 << 20,
            lookup_bytes: 256 << 20,
            scan_bytes: 256 << 20,
            prefetch: None,
            background: None,
            env: EnvHandle::default(),
            given_up: Arc::default(),
        }
    }
}

/// What all jobs of a worker use.
pub(crate) struct Shared {
    pub options: StoreOptions,
    pub namer: Arc<ObjectNamer>,
    pub tail: Tail,
    pub cache: Arc<BlockCache>,
    pub pins: Arc<ObjectPins>,
    /// Bytes of all open memtables.
    pub open_bytes: AtomicUsize,
    /// Bytes sealed early that are not durable yet, of all jobs.
    pub spilling: AtomicUsize,
    /// Told when `spilling` falls.
    pub spilled: Notify,
    /// Scans under way, which share `scan_bytes`.
    pub scans: AtomicUsize,
    /// Held while memory runs become runs of the store: their blocks, filter and index are in memory.
    pub flushing: Semaphore,
    /// For what stages runs: each holds a sorted copy and a blocking thread while it waits for the store, which may need
    /// a blocking thread itself.
    pub staging: Semaphore,
    /// Held while runs are rewritten.
    pub compacting: Semaphore,
    /// Told when some job's version has changed, and when a job was opened or closed.
    pub changed: Notify,
    /// Jobs whose memory or need for a flush may have changed since [`StateStore::take_touched`].
    pub touched: Mutex<HashSet<JobId>>,
    /// Jobs with a table whose runs are read so often that merging them may have become of use.
    pub read_bursts: Mutex<HashSet<JobId>>,
    /// What commits have waited for compaction.
    pub delays: DelayCounters,
    /// What was read before runs were replaced.
    pub hot_fetches: HotFetchCounters,
    prefixes: RwLock<HashMap<TableId, Arc<PrefixLengths>>>,
}

impl Shared {
    /// The prefix lengths that lookups of a table ask for.
    pub fn prefixes(&self, table: TableId) -> Arc<PrefixLengths> {
        if let Some(known) = self.prefixes.read().get(&table) {
            return Arc::clone(known);
        }
        Arc::clone(self.prefixes.write().entry(table).or_default())
    }

    /// The runtime for what computes much; `None`: there is none, and the caller does it.
    pub fn background(&self) -> Option<Handle> {
        self.options.background.clone().or_else(|| Handle::try_current().ok())
    }

    /// A byte range of an object.
    pub async fn read(&self, object: &str, range: Range<u64>) -> Result<Bytes> {
        self.cache.read_uncached(object, range, Priority::Demand).await
    }
}

/// The state of all jobs of a worker.
pub struct StateStore {
    shared: Arc<Shared>,
    jobs: Mutex<HashMap<JobId, Arc<JobStore>>>,
}

impl std::fmt::Debug for StateStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StateStore").field("options", &self.shared.options).finish_non_exhaustive()
    }
}

impl StateStore {
    /// Bytes of a commit that its log record holds itself.
    pub fn inline_bytes(&self) -> usize {
        self.shared.options.inline_bytes
    }

    /// Does no I/O on the object store.
    pub async fn open(options: StoreOptions) -> Result<Arc<StateStore>> {
        let namer = Arc::new(ObjectNamer::new(options.incarnation));
        let tail = Tail::new(
            Arc::clone(&options.store),
            Arc::clone(&namer),
            Arc::clone(&options.given_up),
            &options.env,
            options.inline_bytes,
        );
        let cache = CacheOptions { env: options.env.clone(), ..options.cache.clone() };
        let cache = BlockCache::open(Arc::clone(&options.store), cache);
        let writers = if options.run_bytes < LARGE_RUN_BYTES { 1 } else { 2 };
        let shared = Arc::new(Shared {
            options,
            namer,
            tail,
            cache,
            pins: Arc::default(),
            open_bytes: AtomicUsize::new(0),
            spilling: AtomicUsize::new(0),
            spilled: Notify::new(),
            scans: AtomicUsize::new(0),
            flushing: Semaphore::new(writers),
            staging: Semaphore::new(writers * 2),
            compacting: Semaphore::new(writers),
            changed: Notify::new(),
            touched: Mutex::default(),
            read_bursts: Mutex::default(),
            delays: DelayCounters::default(),
            hot_fetches: HotFetchCounters::default(),
            prefixes: RwLock::default(),
        });
        Ok(Arc::new(StateStore { shared, jobs: Mutex::new(HashMap::default()) }))
    }

    pub fn object_store(&self) -> &Arc<dyn ObjectStore> {
        &self.shared.options.store
    }

    /// The clocks and random numbers of the worker that the store belongs to.
    pub fn env(&self) -> &EnvHandle {
        &self.shared.options.env
    }

    pub fn incarnation(&self) -> u64 {
        self.shared.options.incarnation
    }

    /// Opens a job at its committed version, in place of what was open under its id. Replays the tail
    /// slices; no other I/O.
    pub async fn open_job(
        &self,
        job: JobId,
        tables: Vec<TableDesc>,
        version: &JobVersion,
    ) -> Result<Arc<JobStore>> {
        self.shared.cache.set_owner(job, tables.iter().map(|t| t.id));
        let store = JobStore::open(Arc::clone(&self.shared), job, tables, version).await?;
        self.jobs.lock().insert(job, Arc::clone(&store));
        self.shared.touched.lock().insert(job);
        self.shared.changed.notify_waiters();
        Ok(store)
    }

    pub fn job(&self, job: JobId) -> Option<Arc<JobStore>> {
        self.jobs.lock().get(&job).cloned()
    }

    /// Forgets a job; snapshots that are open stay readable.
    pub fn close_job(&self, job: JobId) {
        self.jobs.lock().remove(&job);
        self.shared.cache.forget_owner(job);
        self.shared.touched.lock().insert(job);
        self.shared.changed.notify_waiters();
    }

    /// The same, unless what is open is of this generation or a newer one; whether nothing is open now.
    pub fn close_job_before(&self, job: JobId, generation: Generation) -> bool {
        let mut jobs = self.jobs.lock();
        if jobs.get(&job).is_some_and(|open| open.generation() >= generation) {
            return false;
        }
        jobs.remove(&job);
        drop(jobs);
        self.shared.cache.forget_owner(job);
        self.shared.touched.lock().insert(job);
        self.shared.changed.notify_waiters();
        true
    }

    /// The jobs that are open, and the generation that each was opened for.
    pub fn open_jobs(&self) -> Vec<(JobId, Generation)> {
        self.jobs.lock().iter().map(|(id, job)| (*id, job.generation())).collect()
    }

    /// Waits until the version of a job that is open here has all of these runs: the log names what a
    /// commit or a flush adds before it is published or applied here. False: the job is not open.
    pub async fn wait_for_runs(&self, job: JobId, runs: &[u64]) -> bool {
        loop {
            let changed = self.shared.changed.notified();
            match self.job(job) {
                None => return false,
                Some(open) if open.version().runs(runs).len() == runs.len() => return true,
                Some(_) => {}
            }
            changed.await;
        }
    }

    /// Jobs that may hold more or less memory, or need a flush, since the last call: opened, closed, written to, or
    /// with another version. For one caller, who looks after all of them.
    pub fn take_touched(&self) -> Vec<(JobId, Option<Arc<JobStore>>)> {
        let touched = std::mem::take(&mut *self.shared.touched.lock());
        let jobs = self.jobs.lock();
        let mut touched: Vec<_> =
            touched.into_iter().map(|id| (id, jobs.get(&id).cloned())).collect();
        drop(jobs);
        // Marked before it is looked at: what happens from here on counts as new.
        for store in touched.iter_mut().filter_map(|(_, store)| store.as_ref()) {
            store.begin_look();
        }
        touched
    }

    /// Jobs with a table whose runs have been read often since they were merged, since the last call.
    pub fn take_read_bursts(&self) -> Vec<JobId> {
        let mut bursts: Vec<JobId> =
            std::mem::take(&mut *self.shared.read_bursts.lock()).into_iter().collect();
        bursts.sort_unstable();
        bursts
    }

    /// How often the runs of state tables of open jobs were read since this was called last; tables that were not are
    /// left out. For one caller.
    pub fn take_reads(&self) -> Vec<(JobId, TableId, TableReads)> {
        let jobs: Vec<Arc<JobStore>> = self.jobs.lock().values().cloned().collect();
        jobs.iter().flat_map(|job| job.committed.take_reads()).collect()
    }

    /// Commits that were delayed because compaction was behind.
    pub fn delayed_commits(&self) -> DelayStats {
        self.shared.delays.read()
    }

    /// What was read into memory before compactions of other processes took effect.
    pub fn hot_fetches(&self) -> HotFetchStats {
        self.shared.hot_fetches.read()
    }

    /// How much may be committed and not flushed.
    pub fn tail_limits(&self) -> TailLimits {
        self.shared.options.tail
    }

    /// Bytes of commits that wait for a put of the tail or are being written.
    pub fn unwritten_tail_bytes(&self) -> usize {
        self.shared.tail.held_bytes()
    }

    /// Whether some reader (an open version, scan or compaction) may still read an object.
    pub fn holds_object(&self, name: &str) -> bool {
        self.shared.pins.holds(name)
    }

    /// All of them.
    pub fn held_objects(&self) -> Vec<String> {
        self.shared.pins.objects()
    }

    pub fn cache(&self) -> &Arc<BlockCache> {
        &self.shared.cache
    }

    /// Waits until what is on its way to the local cache is there. Call before the process ends.
    pub async fn close(&self) -> Result<()> {
        self.shared.cache.close().await
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }
}
