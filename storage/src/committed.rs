//! The committed state of one job as it is read: what its writer ([`JobStore`](crate::JobStore)) and its followers
//! ([`follower`](crate::follower)) have in common.

use std::ops::Range;
use std::sync::Arc;

use futures::StreamExt;
use futures::stream::BoxStream;
use millrace_common::collections::HashMap;
use millrace_common::{DeltaChunk, Epoch, JobId, TableId, Vnode};
use parking_lot::RwLock;

use crate::block::BlockCodec;
use crate::changes;
use crate::error::{Result, StorageError};
use crate::read_counts::{ReadCounts, TableReads};
use crate::snapshot::Snapshot;
use crate::state_store::Shared;
use crate::version::{TableVersion, Version};

pub(crate) type Codecs = HashMap<TableId, Arc<BlockCodec>>;

/// A version, swapped whole, and what reading it takes.
pub(crate) struct Committed {
    pub job: JobId,
    pub shared: Arc<Shared>,
    pub codecs: Codecs,
    version: RwLock<Arc<Version>>,
}

impl Committed {
    pub fn new(shared: Arc<Shared>, job: JobId, version: Version) -> Committed {
        let codecs = codecs_of(&version);
        Committed { job, shared, codecs, version: RwLock::new(Arc::new(version)) }
    }

    pub fn version(&self) -> Arc<Version> {
        Arc::clone(&self.version.read())
    }

    /// Swaps in a changed copy of the version. `change` does no I/O and little work.
    pub fn update<T>(&self, change: impl FnOnce(&mut Version) -> T) -> T {
        let mut current = self.version.write();
        let mut next = Version::clone(&current);
        let result = change(&mut next);
        debug_check(self.job, &current, &next);
        *current = Arc::new(next);
        result
    }

    /// The state as of an epoch. The version stays readable as long as the snapshot lives.
    pub fn snapshot(self: &Arc<Self>, epoch: Epoch) -> Result<Snapshot> {
        let version = self.version();
        if epoch < version.horizon {
            return Err(StorageError::SnapshotTooOld { epoch, horizon: version.horizon });
        }
        Ok(Snapshot::new(Arc::clone(self), version, epoch))
    }

    /// The tables whose runs were read since this was called last. For one caller.
    pub fn take_reads(&self) -> Vec<(JobId, TableId, TableReads)> {
        let version = self.version();
        let new =
            |table: &Arc<TableVersion>| Some((self.job, table.desc.id, table.reads.take_new()?));
        version.tables().filter_map(new).collect()
    }

    /// Notes that so many keys were looked up in a table's runs; `cold`: some had to be read.
    pub fn note_reads(&self, reads: &ReadCounts, keys: u64, cold: bool) {
        if reads.note(keys, cold) {
            self.shared.read_bursts.lock().insert(self.job);
        }
    }
}

/// The net change of a table in (from, to] under some vnodes, where the snapshot as of `from` could be taken.
pub(crate) fn changes_of(
    from: Result<Snapshot>,
    table: TableId,
    to: Epoch,
    vnodes: Range<Vnode>,
) -> BoxStream<'static, Result<DeltaChunk>> {
    match from {
        Err(e) => futures::stream::once(futures::future::ready(Err(e))).boxed(),
        Ok(snapshot) => changes::changes(snapshot, table, to, vnodes),
    }
}

/// What decodes a job's slices.
pub(crate) fn codecs_of(version: &Version) -> Codecs {
    version.tables().map(|t| (t.desc.id, Arc::clone(&t.codec))).collect()
}

/// In debug builds, the invariants of a version that is about to take effect.
fn debug_check(job: JobId, current: &Version, next: &Version) {
    if !cfg!(debug_assertions) {
        return;
    }
    if let Err(broken) = next.check_invariants().and_then(|()| current.check_next(next)) {
        debug_assert!(false, "version of job {job}: {broken}");
    }
}
