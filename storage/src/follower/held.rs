//! Which versions are being read.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use millrace_common::{Epoch, JobId};
use parking_lot::Mutex;

use super::Pinned;
use crate::error::StorageError;
use crate::version::Version;

/// The versions that open snapshots and scans of followed jobs read.
#[derive(Default)]
pub struct OpenVersions(Mutex<Open>);

#[derive(Default)]
struct Open {
    next: u64,
    versions: BTreeMap<u64, OpenVersion>,
}

struct OpenVersion {
    job: JobId,
    epoch: Epoch,
    version: Arc<Version>,
}

impl OpenVersions {
    /// The jobs that are being read.
    pub fn jobs(&self) -> BTreeSet<JobId> {
        self.0.lock().versions.values().map(|open| open.job).collect()
    }

    pub fn pinned(&self) -> Pinned {
        let open = self.0.lock();
        let runs = open.versions.values().flat_map(|v| v.version.tables()).flat_map(|t| &t.disk);
        Pinned {
            objects: runs.map(|run| run.meta().object.clone()).collect(),
            epoch: open.versions.values().map(|v| v.epoch).min(),
        }
    }
}

/// One snapshot, or a scan that was begun with it, is open.
pub struct Held {
    open: Arc<OpenVersions>,
    number: u64,
}

impl Held {
    pub(super) fn new(
        open: &Arc<OpenVersions>,
        job: JobId,
        epoch: Epoch,
        version: &Arc<Version>,
    ) -> Held {
        let mut all = open.0.lock();
        let number = all.next;
        all.next += 1;
        // What is asked beyond the version is answered by its newest content.
        let epoch = epoch.min(version.epoch);
        all.versions.insert(number, OpenVersion { job, epoch, version: Arc::clone(version) });
        drop(all);
        Held { open: Arc::clone(open), number }
    }

    /// An object that a version names is gone once another version has taken its place.
    pub fn explain(&self, error: StorageError) -> StorageError {
        explain(error)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // What it held is dropped after the lock.
        let closed = self.open.0.lock().versions.remove(&self.number);
        drop(closed);
    }
}

/// What an error of reading a committed version means to a follower.
pub(super) fn explain(error: StorageError) -> StorageError {
    match error {
        StorageError::NotFound { object } => StorageError::Superseded { object },
        other => other,
    }
}
