//! The version follower: committed state of jobs that other processes write, read only (docs/design.md §9).
//!
//! It is moved on by whoever follows the log ([`VersionFollower::advance`]) and needs nothing of the writers but what
//! they have committed: runs are read through the block cache when a read asks for them, tail slices are fetched once,
//! many at a time, and kept decoded. What a version says of runs and slices is taken as it is, so flushes, compactions,
//! moved parts and early seals need no care of their own.
//!
//! Slices are fetched for jobs that somebody reads: a job is opened when it is first asked for, and closed when nobody
//! has read it for a while. A job's slices are bounded by the limits of the tail. They are not merged in memory:
//! nobody here knows which of them the next flush retires.

mod held;
mod job;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use millrace_common::collections::HashMap;
use millrace_common::{Epoch, JobId, TableId};
use millrace_rpc::version::JobVersion;
use parking_lot::Mutex;

pub(crate) use held::Held;
use held::OpenVersions;
pub use job::FollowedJob;

use crate::error::Result;
use crate::read_counts::TableReads;
use crate::state_store::{Shared, StateStore};
use crate::table::TableDesc;

/// A version of a job, as a follower of the log shows it.
#[derive(Clone, Debug)]
pub struct FollowedVersion {
    /// The record of the log as of which it is. A later one moves a job on, an earlier one has no effect.
    pub record: u64,
    pub version: Arc<JobVersion>,
    /// What is below may be gone.
    pub horizon: Epoch,
}

/// What open snapshots hold, those of which only a scan is still under way included.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pinned {
    /// The lowest epoch that is being read; `None`: nothing is.
    pub epoch: Option<Epoch>,
    /// The objects of the versions that are being read.
    pub objects: BTreeSet<String>,
}

/// A job that is open, or being opened.
#[derive(Default)]
struct Slot {
    /// One moves it on at a time.
    moving: tokio::sync::Mutex<()>,
    job: Mutex<Option<Arc<FollowedJob>>>,
}

/// The jobs that are followed in this process.
pub struct VersionFollower {
    shared: Arc<Shared>,
    jobs: Mutex<HashMap<JobId, Arc<Slot>>>,
    open: Arc<OpenVersions>,
}

impl std::fmt::Debug for VersionFollower {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VersionFollower").field("jobs", &self.jobs.lock().len()).finish()
    }
}

impl VersionFollower {
    /// Reads through the store's cache. Nothing is written.
    pub fn new(store: &StateStore) -> VersionFollower {
        let shared = Arc::clone(store.shared());
        VersionFollower { shared, jobs: Mutex::default(), open: Arc::default() }
    }

    /// Opens a job at this version, or moves it on to it; one that is there already costs nothing. `tables` describes
    /// its state tables, and is asked when the job is opened. On [`StorageError::Superseded`] the caller follows the
    /// log further and tries again: a newer version has taken this one's place. A job that is open keeps the slices
    /// that were fetched by then.
    ///
    /// [`StorageError::Superseded`]: crate::StorageError::Superseded
    pub async fn advance(
        &self,
        job: JobId,
        at: FollowedVersion,
        tables: impl FnOnce() -> Vec<TableDesc>,
    ) -> Result<Arc<FollowedJob>> {
        let slot = Arc::clone(self.jobs.lock().entry(job).or_default());
        if let Some(open) = slot.at(at.record) {
            return Ok(open);
        }
        let _one = slot.moving.lock().await;
        let open = slot.job.lock().clone();
        match open {
            Some(open) if open.record() >= at.record => Ok(open),
            Some(open) if open.has_tables_of(&at.version) => {
                open.move_on(at).await?;
                Ok(open)
            }
            // New, or rebuilt: then it has other state tables.
            _ => {
                let tables = tables();
                self.shared.cache.set_owner(job, tables.iter().map(|t| t.id));
                let shared = Arc::clone(&self.shared);
                let opened = FollowedJob::new(shared, job, tables, &at, Arc::clone(&self.open));
                opened.move_on(at).await?;
                let opened = Arc::new(opened);
                *slot.job.lock() = Some(Arc::clone(&opened));
                Ok(opened)
            }
        }
    }

    /// A job that is open, as of the record that it was last moved to.
    pub fn job(&self, job: JobId) -> Option<Arc<FollowedJob>> {
        let slot = Arc::clone(self.jobs.lock().get(&job)?);
        slot.job.lock().clone()
    }

    /// The jobs that are open, to be moved on with the log.
    pub fn open_jobs(&self) -> Vec<JobId> {
        let jobs = self.jobs.lock();
        let open = jobs.iter().filter(|(_, slot)| slot.job.lock().is_some());
        let mut open: Vec<JobId> = open.map(|(id, _)| *id).collect();
        open.sort_unstable();
        open
    }

    /// Forgets a job; snapshots that are open stay readable.
    pub fn close(&self, job: JobId) {
        if self.jobs.lock().remove(&job).is_some() {
            self.shared.cache.forget_owner(job);
        }
    }

    /// Closes the jobs that nobody has read for so long, nor reads now; returns them.
    pub fn close_idle(&self, idle: Duration) -> Vec<JobId> {
        let read = self.open.jobs();
        let is_idle = |id: &JobId| {
            self.job(*id).is_some_and(|job| !read.contains(id) && job.since_read() >= idle)
        };
        let closed: Vec<JobId> = self.open_jobs().into_iter().filter(is_idle).collect();
        closed.iter().for_each(|id| self.close(*id));
        closed
    }

    /// Heap bytes of decoded slices.
    pub fn memory_bytes(&self) -> usize {
        let jobs: Vec<Arc<Slot>> = self.jobs.lock().values().cloned().collect();
        jobs.iter().filter_map(|slot| slot.job.lock().clone()).map(|job| job.memory_bytes()).sum()
    }

    /// How often the runs of state tables of open jobs were read since this was called last; tables that were not are
    /// left out. For one caller.
    pub fn take_reads(&self) -> Vec<(JobId, TableId, TableReads)> {
        let jobs: Vec<Arc<Slot>> = self.jobs.lock().values().cloned().collect();
        let open = jobs.iter().filter_map(|slot| slot.job.lock().clone());
        open.flat_map(|job| job.take_reads()).collect()
    }

    /// What must not be deleted, nor its epochs merged, while it is being read.
    pub fn pinned(&self) -> Pinned {
        self.open.pinned()
    }
}

impl Slot {
    /// The job, if it is as of this record or a later one.
    fn at(&self, record: u64) -> Option<Arc<FollowedJob>> {
        self.job.lock().as_ref().filter(|job| job.record() >= record).cloned()
    }
}
