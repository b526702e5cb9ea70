//! One followed job.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt;
use futures::stream::BoxStream;
use millrace_common::collections::{HashMap, HashSet};
use millrace_common::{DeltaChunk, Epoch, Generation, JobId, TableId, Vnode};
use millrace_rpc::version::{JobVersion, SliceRef};
use parking_lot::Mutex;
use tokio::time::Instant;

use super::FollowedVersion;
use super::held::{Held, OpenVersions, explain};
use crate::committed::{Committed, changes_of};
use crate::error::Result;
use crate::job_store::{OPEN_READS, read_slice};
use crate::memrun::MemRun;
use crate::read_counts::TableReads;
use crate::snapshot::Snapshot;
use crate::state_store::Shared;
use crate::table::TableDesc;
use crate::version::Version;

/// What a slice is known by wherever it lies: moved parts have another object and offset.
#[derive(Clone, PartialEq, Eq, Hash)]
struct SliceKey {
    sequence: u64,
    epoch: u64,
    length: u64,
    vnodes: Bytes,
}

impl SliceKey {
    fn of(slice: &SliceRef) -> SliceKey {
        SliceKey {
            sequence: slice.sequence,
            epoch: slice.epoch,
            length: slice.length.max(slice.inline.len() as u64),
            vnodes: slice.vnodes.clone(),
        }
    }
}

/// Where the job is.
struct Place {
    record: u64,
    version: Arc<JobVersion>,
    /// The slices of its tail, decoded; while it is being moved on, also those of the version to come.
    slices: HashMap<SliceKey, Vec<MemRun>>,
}

/// The committed state of a job as of a record of the log.
pub struct FollowedJob {
    committed: Arc<Committed>,
    place: Mutex<Place>,
    read: Mutex<Instant>,
    open: Arc<OpenVersions>,
}

impl std::fmt::Debug for FollowedJob {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FollowedJob")
            .field("job", &self.job())
            .field("record", &self.record())
            .finish_non_exhaustive()
    }
}

impl FollowedJob {
    /// With nothing in it, before all records, but with the state tables that the job has at `at`.
    pub(super) fn new(
        shared: Arc<Shared>,
        job: JobId,
        tables: Vec<TableDesc>,
        at: &FollowedVersion,
        open: Arc<OpenVersions>,
    ) -> FollowedJob {
        let rebuilt_tables = at.version.rebuilt_tables;
        let version = Arc::new(JobVersion { rebuilt_tables, ..JobVersion::default() });
        let empty = Version::new(tables, Arc::clone(&shared.pins));
        FollowedJob {
            read: Mutex::new(shared.options.env.now()),
            committed: Arc::new(Committed::new(shared, job, empty)),
            place: Mutex::new(Place { record: 0, version, slices: HashMap::default() }),
            open,
        }
    }

    pub fn job(&self) -> JobId {
        self.committed.job
    }

    /// The record of the log as of which it is.
    pub fn record(&self) -> u64 {
        self.place.lock().record
    }

    /// The generation that has written last.
    pub fn generation(&self) -> Generation {
        Generation(self.place.lock().version.generation)
    }

    /// The newest committed epoch.
    pub fn epoch(&self) -> Epoch {
        self.committed.version().epoch
    }

    /// Snapshots below are refused.
    pub fn horizon(&self) -> Epoch {
        self.committed.version().horizon
    }

    /// Heap bytes of decoded slices.
    pub fn memory_bytes(&self) -> usize {
        self.committed.version().mem_bytes()
    }

    /// The state as of an epoch; `Epoch::MAX`: all that is committed. The snapshot stays readable while it lives and
    /// what it holds ([`VersionFollower::pinned`](super::VersionFollower::pinned)) is not deleted.
    pub fn snapshot(&self, epoch: Epoch) -> Result<Snapshot> {
        *self.read.lock() = self.committed.shared.options.env.now();
        let hold = |version: &Arc<Version>| Held::new(&self.open, self.job(), epoch, version);
        Ok(self.committed.snapshot(epoch)?.held(hold))
    }

    /// The net change of a table in (from, to] under some vnodes: old rows −1, new rows +1.
    pub fn changes(
        &self,
        table: TableId,
        from: Epoch,
        to: Epoch,
        vnodes: Range<Vnode>,
    ) -> BoxStream<'static, Result<DeltaChunk>> {
        changes_of(self.snapshot(from), table, to, vnodes)
    }

    pub(super) fn take_reads(&self) -> Vec<(JobId, TableId, TableReads)> {
        self.committed.take_reads()
    }

    /// How long ago the last snapshot was opened.
    pub(super) fn since_read(&self) -> Duration {
        self.committed.shared.options.env.elapsed(*self.read.lock())
    }

    /// Whether a version has the state tables that the job was opened with.
    pub(super) fn has_tables_of(&self, version: &JobVersion) -> bool {
        self.place.lock().version.rebuilt_tables == version.rebuilt_tables
    }

    /// Fetches the slices that are new, and swaps the version. One caller at a time.
    pub(super) async fn move_on(&self, at: FollowedVersion) -> Result<()> {
        self.fetch(&at.version).await?;
        self.swap(at);
        Ok(())
    }

    async fn fetch(&self, version: &JobVersion) -> Result<()> {
        let missing: Vec<SliceRef> = {
            let place = self.place.lock();
            let is_missing = |s: &&SliceRef| !place.slices.contains_key(&SliceKey::of(s));
            version.tail.iter().filter(is_missing).cloned().collect()
        };
        // Collected first: a closure held across an await would not be `Send` for every lifetime.
        let fetch = |slice: SliceRef| {
            let committed = Arc::clone(&self.committed);
            async move {
                let runs = read_slice(&committed.shared, &committed.codecs, &slice).await;
                (SliceKey::of(&slice), runs)
            }
        };
        let fetches: Vec<_> = missing.into_iter().map(fetch).collect();
        let mut fetched = futures::stream::iter(fetches).buffer_unordered(OPEN_READS);
        while let Some((key, runs)) = fetched.next().await {
            let runs = runs.map_err(explain)?;
            self.place.lock().slices.insert(key, runs);
        }
        Ok(())
    }

    /// All slices of the version are here.
    fn swap(&self, at: FollowedVersion) {
        let mut place = self.place.lock();
        let mut tail: Vec<SliceRef> = at.version.tail.clone();
        tail.sort_by_key(|s| s.sequence);
        let keys: HashSet<SliceKey> = tail.iter().map(SliceKey::of).collect();
        let slices_of = |slices: &[SliceRef], place: &Place| -> Vec<Vec<MemRun>> {
            let held = |s: &SliceRef| place.slices.get(&SliceKey::of(s)).cloned();
            slices.iter().map(|s| held(s).unwrap_or_default()).collect()
        };
        let before = self.committed.version();
        match added_slices(&place.version, &at.version, &tail) {
            Some(added) => {
                let runs = slices_of(added, &place);
                self.update(&at, |version| {
                    for (slice, runs) in added.iter().zip(&runs) {
                        version.add_runs(Epoch(slice.epoch), slice.sequence, runs);
                    }
                });
            }
            None => {
                let runs = slices_of(&tail, &place);
                self.update(&at, |version| {
                    for table in version.tables_mut() {
                        table.mem.clear();
                        table.disk.clear();
                    }
                    version.load(&at.version.runs, &tail, runs);
                });
                self.forget_runs(&before, &at.version);
            }
        }
        place.slices.retain(|key, _| keys.contains(key));
        place.record = at.record;
        place.version = at.version;
    }

    /// Changes the version; what counts up follows from `at`.
    fn update(&self, at: &FollowedVersion, change: impl FnOnce(&mut Version)) {
        let runs = at.version.runs.iter().map(|r| r.sequence);
        let newest = runs.chain(at.version.tail.iter().map(|s| s.sequence)).max().unwrap_or(0);
        self.committed.update(|version| {
            let sequence = version.sequence.max(newest);
            version.epoch = version.epoch.max(Epoch(at.version.epoch));
            version.horizon = version.horizon.max(at.horizon);
            change(version);
            version.sequence = sequence;
        });
    }

    /// The cache need not hold blocks of runs that are not part of the version any more. Who still reads them reads
    /// past it.
    fn forget_runs(&self, before: &Version, now: &JobVersion) {
        let kept: HashSet<u64> = now.runs.iter().map(|r| r.run_id).collect();
        let disk = before.tables().flat_map(|t| &t.disk);
        for run in disk.filter(|run| !kept.contains(&run.meta().run_id)) {
            self.committed.shared.cache.forget_run(run);
        }
    }
}

/// What `next` has besides what `version` has, if that is slices alone and they come after all others. `tail`: of
/// `next`, in order.
fn added_slices<'a>(
    version: &JobVersion,
    next: &JobVersion,
    tail: &'a [SliceRef],
) -> Option<&'a [SliceRef]> {
    let mut known: Vec<&SliceRef> = version.tail.iter().collect();
    known.sort_by_key(|s| s.sequence);
    let (same, added) = tail.split_at_checked(known.len())?;
    let is_same = known.iter().zip(same).all(|(a, b)| SliceKey::of(a) == SliceKey::of(b));
    (is_same && version.runs == next.runs).then_some(added)
}
