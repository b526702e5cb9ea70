//! The committed state of one job on this worker (docs/design.md §9): durable writes, visibility, and
//! reads as of an epoch.
//!
//! A commit goes persist → (the log decides) → publish. `persist` makes bytes durable and nothing
//! else; `publish` makes them visible and does no I/O. All changes build a new [`Version`] and swap it
//! under one short lock; readers load it and go on without.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use bytes::Bytes;
use futures::future::BoxFuture;
use futures::stream::BoxStream;
use futures::{StreamExt, TryStreamExt};
use millrace_common::collections::HashMap;
use millrace_common::fault_injection::is_planted;
use millrace_common::{DeltaChunk, EnvHandle, Epoch, Generation, JobId, TableId, Vnode};
use millrace_rpc::log::MovedPart;
use millrace_rpc::sequence::Sequence;
use millrace_rpc::version::{JobVersion, RunMeta, SliceRef, VersionEdit};
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::committed::{Codecs, Committed, changes_of, codecs_of};
use crate::error::Result;
use crate::given_up::{self, Claim};
use crate::memrun::{MemRun, SealId};
use crate::put_waits::{PutKind, PutWaits};
use crate::read_counts::TableReads;
use crate::run_writer::{Built, in_background};
use crate::snapshot::Snapshot;
use crate::state_store::Shared;
use crate::table::TableDesc;
use crate::tail_limits::{JobTail, TailSize};
use crate::ttl_filter::Retain;
use crate::version::{Version, check_rewrite};
use crate::write_delay::Overlap;
use crate::writer::{SealedRuns, TableWriter};
use crate::{flush, memory_compaction, slice, write_delay};

/// Tail slices read at the same time when a job is opened.
pub(crate) const OPEN_READS: usize = 64;
/// Level-0 runs of one table that memory runs keep from being compacted, at most.
const HELD_BACK_RUNS: usize = 8;

/// A commit up to this size is encoded where it is made: in less than a millisecond.
const INLINE_ENCODE_BYTES: usize = 256 << 10;

/// A durable delta that is not visible yet.
#[derive(Debug, Default)]
pub struct Persisted {
    /// For the job's commit; their epoch is still to be filled in.
    pub slices: Vec<SliceRef>,
    /// For the job's commit: a large delta went into runs instead. Their epochs are 0.
    pub edit: Option<VersionEdit>,
    /// What `publish` makes visible in memory; none where `edit` holds it.
    pub runs: Vec<MemRun>,
    pub(crate) sequence: u64,
    /// Seals that `edit` holds.
    pub(crate) seals: Vec<(TableId, SealId)>,
    /// The runs of `edit`, for the cache.
    pub(crate) built: Vec<Built>,
    /// On the objects of `slices` and `edit`, and of what was staged for the commit: dropped without having been
    /// published, they are given up.
    pub(crate) claims: Vec<Claim>,
}

/// Numbers about one table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TableStats {
    pub table: TableId,
    pub name: String,
    /// Entries, older versions and deletes included.
    pub mem_rows: u64,
    pub mem_bytes: u64,
    pub mem_runs: usize,
    pub disk_rows: u64,
    pub disk_bytes: u64,
    pub disk_runs: usize,
}

/// Numbers about a job's state.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct JobStats {
    pub tables: Vec<TableStats>,
    /// Bytes of committed memory runs.
    pub memrun_bytes: usize,
    /// Bytes of open memtables.
    pub open_bytes: usize,
}

pub struct JobStore {
    /// Of the version that it was opened with.
    generation: Generation,
    /// What is read of it.
    pub(crate) committed: Arc<Committed>,
    /// What logs call the job.
    label: OnceLock<String>,
    pub(crate) shared: Arc<Shared>,
    next_writer: AtomicU64,
    pub(crate) open_bytes: AtomicUsize,
    /// The slices of what is published.
    tail: Mutex<JobTail>,
    /// Of the job's writers.
    sealed: Mutex<Vec<Weak<Mutex<Vec<MemRun>>>>>,
    /// The edit of the last flush, applied or not. Held while one is being made.
    flushed: tokio::sync::Mutex<VersionEdit>,
    /// On the objects of that edit, until it is applied.
    flush_claims: Mutex<Vec<Claim>>,
    /// On objects of what has been staged for the next commit.
    pending_claims: Mutex<Vec<Claim>>,
    /// A background merge of memory runs is under way.
    pub(crate) merging: AtomicBool,
    /// Bytes sealed early that are not durable yet.
    pub(crate) spilling: AtomicUsize,
    /// When a part of a large delta was last encoded or uploaded.
    uploaded: Mutex<Option<Instant>>,
    /// What its epochs wait for.
    pub(crate) puts: PutWaits,
    /// The most runs of one of its tables that may hold one key.
    overlap: AtomicUsize,
    /// Whether the job is among those to be looked at (`Shared::touched`).
    touched: AtomicBool,
}

impl std::fmt::Debug for JobStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("JobStore").field("job", &self.job()).finish_non_exhaustive()
    }
}

impl JobStore {
    /// What logs are to call the job; the first one given stays.
    pub fn set_label(&self, label: String) {
        let _ = self.label.set(label);
    }

    pub(crate) fn label(&self) -> String {
        self.label.get().cloned().unwrap_or_else(|| self.job().to_string())
    }

    /// The clocks of the store that the job is open in.
    pub fn env(&self) -> &EnvHandle {
        &self.shared.options.env
    }

    /// Part of a large delta has been encoded or uploaded.
    pub(crate) fn note_upload(&self) {
        *self.uploaded.lock() = Some(self.env().now());
    }

    /// How long ago the last part of a large delta was encoded or uploaded.
    pub fn since_upload(&self) -> Option<Duration> {
        self.uploaded.lock().map(|at| self.env().elapsed(at))
    }

    /// Opens the committed version: fetches and decodes all tail slices, in one round.
    pub(crate) async fn open(
        shared: Arc<Shared>,
        job: JobId,
        tables: Vec<TableDesc>,
        committed: &JobVersion,
    ) -> Result<Arc<JobStore>> {
        let mut version = Version::new(tables, Arc::clone(&shared.pins));
        version.epoch = Epoch(committed.epoch);
        let codecs = codecs_of(&version);
        let mut tail = committed.tail.clone();
        tail.sort_by_key(|s| s.sequence);
        if is_planted("tail-not-replayed") {
            tail.pop();
        }
        // Collected first: a closure held across an await would not be `Send` for every lifetime.
        let fetches: Vec<_> = tail.iter().map(|s| read_slice(&shared, &codecs, s)).collect();
        let slices = futures::stream::iter(fetches).buffered(OPEN_READS).try_collect().await?;
        version.load(&committed.runs, &tail, slices);
        let (mut held, now) = (JobTail::default(), shared.options.env.now());
        tail.iter().for_each(|s| held.add(s.sequence, s.length, now));
        let overlap = write_delay::deepest(&version).map_or(0, |o| o.runs);
        Ok(Arc::new(JobStore {
            generation: Generation(committed.generation),
            committed: Arc::new(Committed::new(Arc::clone(&shared), job, version)),
            label: OnceLock::new(),
            shared,
            next_writer: AtomicU64::new(1),
            open_bytes: AtomicUsize::new(0),
            tail: Mutex::new(held),
            sealed: Mutex::default(),
            flushed: tokio::sync::Mutex::default(),
            flush_claims: Mutex::default(),
            pending_claims: Mutex::default(),
            merging: AtomicBool::new(false),
            spilling: AtomicUsize::new(0),
            uploaded: Mutex::default(),
            puts: PutWaits::default(),
            overlap: AtomicUsize::new(overlap),
            touched: AtomicBool::new(false),
        }))
    }

    pub fn job(&self) -> JobId {
        self.committed.job
    }

    /// The generation of the job that it was opened for.
    pub fn generation(&self) -> Generation {
        self.generation
    }

    pub(crate) fn version(&self) -> Arc<Version> {
        self.committed.version()
    }

    /// Swaps in a changed copy of the version. `change` does no I/O and little work.
    pub(crate) fn update<T>(&self, change: impl FnOnce(&mut Version) -> T) -> T {
        let result = self.committed.update(change);
        self.shared.changed.notify_waiters();
        self.touch();
        result
    }

    /// Has whoever looks after memory and flushes look at this job again (`StateStore::take_touched`).
    pub fn touch(&self) {
        if !self.touched.swap(true, Ordering::AcqRel) {
            self.shared.touched.lock().insert(self.job());
        }
    }

    /// It is being looked at: the next change is news.
    pub(crate) fn begin_look(&self) {
        // Acquires what came before a touch that found the mark set.
        self.touched.swap(false, Ordering::AcqRel);
    }

    /// What is known of a table of this job.
    pub fn table(&self, table: TableId) -> Option<Arc<TableDesc>> {
        self.version().table(table).ok().map(|t| Arc::clone(&t.desc))
    }

    /// A task's writer of a table. One per task and table.
    pub fn writer(self: &Arc<Self>, table: TableId) -> Result<TableWriter> {
        let desc = Arc::clone(&self.version().table(table)?.desc);
        let id = self.next_writer.fetch_add(1, Ordering::Relaxed);
        Ok(TableWriter::new(Arc::clone(self), desc, id))
    }

    /// The state as of an epoch; `Epoch::MAX`: all that is published. The version stays readable as
    /// long as the snapshot lives.
    pub fn snapshot(self: &Arc<Self>, epoch: Epoch) -> Result<Snapshot> {
        self.committed.snapshot(epoch)
    }

    /// The net change of a table in (from, to] under some vnodes: old rows −1, new rows +1.
    pub fn changes(
        self: &Arc<Self>,
        table: TableId,
        from: Epoch,
        to: Epoch,
        vnodes: Range<Vnode>,
    ) -> BoxStream<'static, Result<DeltaChunk>> {
        changes_of(self.snapshot(from), table, to, vnodes)
    }

    /// Makes the delta of a commit durable, by the commit's number: one that was not used before, and more than that of
    /// all that is published. Commits are ordered by it, however they are persisted. One with rows waits while compaction
    /// is behind the job.
    pub fn persist(
        self: &Arc<Self>,
        commit: u64,
        runs: Vec<MemRun>,
    ) -> BoxFuture<'static, Result<Persisted>> {
        let has_rows = runs.iter().any(|r| r.num_rows() > 0);
        let persisting = self.persist_now(commit, runs);
        if !has_rows || self.overlap() <= self.shared.options.overlap_limit {
            return persisting;
        }
        let store = Arc::clone(self);
        Box::pin(async move {
            store.wait_for_compaction().await;
            persisting.await
        })
    }

    /// Waits as a commit does while compaction is behind the job: for one whose rows are in the store already.
    pub async fn wait_for_compaction(&self) {
        if self.overlap() > self.shared.options.overlap_limit {
            write_delay::wait(self).await;
        }
    }

    /// The next commit of the job will name these objects.
    pub(crate) fn add_pending_claims(&self, claims: impl IntoIterator<Item = Claim>) {
        self.pending_claims.lock().extend(claims);
    }

    /// For a commit: it names these objects, or an earlier one does.
    pub(crate) fn take_pending_claims(&self) -> Vec<Claim> {
        std::mem::take(&mut *self.pending_claims.lock())
    }

    fn persist_now(
        self: &Arc<Self>,
        commit: u64,
        runs: Vec<MemRun>,
    ) -> BoxFuture<'static, Result<Persisted>> {
        let runs = runs.into_iter().filter(|r| r.num_rows() > 0);
        let (early, runs): (Vec<MemRun>, Vec<MemRun>) = runs.partition(|r| r.spill.is_some());
        let store = Arc::clone(self);
        if !early.is_empty() {
            return self.persist_large(commit, early, runs);
        }
        if runs.is_empty() {
            let claims = self.take_pending_claims();
            return Box::pin(futures::future::ready(Ok(Persisted {
                claims,
                ..Persisted::default()
            })));
        }
        let sequence = match Sequence::new(commit, 0) {
            Ok(sequence) => sequence.get(),
            Err(error) => return Box::pin(futures::future::ready(Err(error.into()))),
        };
        let bytes: usize = runs.iter().map(MemRun::memory_size).sum();
        if bytes > store.shared.options.direct_run_bytes {
            return Box::pin(async move {
                let mut persisted = flush::persist_as_runs(&store, runs, sequence).await?;
                persisted.claims.extend(store.take_pending_claims());
                Ok(persisted)
            });
        }
        Box::pin(async move {
            let (encoded, runs) = encode(&store, runs, bytes).await?;
            let waiting = store.wait_for_put(PutKind::Tail);
            let (slice, claim) = store.shared.tail.put(encoded, sequence, &waiting).await?;
            let mut claims = store.take_pending_claims();
            claims.extend(claim);
            Ok(Persisted { slices: vec![slice], runs, sequence, claims, ..Persisted::default() })
        })
    }

    /// A delta of which parts were sealed early, those of one writer in order; what was sealed at the end is the last
    /// part.
    fn persist_large(
        self: &Arc<Self>,
        commit: u64,
        early: Vec<MemRun>,
        runs: Vec<MemRun>,
    ) -> BoxFuture<'static, Result<Persisted>> {
        let store = Arc::clone(self);
        Box::pin(async move {
            let last = Sequence::new(commit, early.len() as u64)?.get();
            let mut all = flush::persist_as_runs(&store, runs, last).await?;
            let mut edit = all.edit.take().unwrap_or_default();
            for (run, part) in early.iter().zip(0..) {
                if is_planted("early-part-lost") && part == 0 {
                    continue;
                }
                if let Some(spill) = &run.spill {
                    let sequence = Sequence::new(commit, part)?.get();
                    let (runs, claims) = spill.keep(sequence).await?;
                    edit.add_runs.extend(runs);
                    all.claims.extend(claims);
                }
                all.seals.push((run.table(), run.seal));
            }
            all.claims.extend(store.take_pending_claims());
            Ok(Persisted { edit: Some(edit), sequence: last, ..all })
        })
    }

    /// Waits while much that was sealed early, by all jobs, is still on its way to the store, some of it from this job:
    /// whoever writes more would only add to it.
    pub async fn wait_for_spills(&self) {
        let much = || {
            self.spilling.load(Ordering::Relaxed) > 0
                && self.shared.spilling.load(Ordering::Relaxed)
                    > self.shared.options.spill_bytes / 2
        };
        while much() {
            let told = self.shared.spilled.notified();
            if much() {
                told.await;
            }
        }
    }

    /// Makes bytes durable that are no state: what a commit hands on. Small ones ride in the log record,
    /// others share the tail's objects. The reference belongs into the job's next commit.
    pub async fn stage(&self, bytes: Bytes) -> Result<SliceRef> {
        let waiting = self.wait_for_put(PutKind::Tail);
        let (slice, claim) = self.shared.tail.put(bytes, 0, &waiting).await?;
        self.add_pending_claims(claim);
        Ok(slice)
    }

    /// What `stage` was given.
    pub async fn read_staged(&self, part: &SliceRef) -> Result<Bytes> {
        if part.object.is_empty() {
            return Ok(part.inline.clone());
        }
        self.shared.read(&part.object, part.offset..part.offset + part.length).await
    }

    /// Makes a committed delta visible at its epoch. In commit order.
    pub fn publish(self: &Arc<Self>, epoch: Epoch, persisted: Persisted) {
        let now = self.env().now();
        given_up::settle(persisted.claims);
        let mut tail = self.tail.lock();
        persisted.slices.iter().for_each(|s| tail.add(s.sequence, s.length, now));
        drop(tail);
        let adds_runs = persisted.edit.is_some();
        self.update(|version| {
            version.epoch = version.epoch.max(epoch);
            version.sequence = version.sequence.max(persisted.sequence);
            version.add_runs(epoch, persisted.sequence, &persisted.runs);
            if let Some(mut edit) = persisted.edit {
                for run in edit.add_runs.iter_mut().filter(|r| r.max_epoch == 0) {
                    run.min_epoch = epoch.0;
                    run.max_epoch = epoch.0;
                }
                version.apply(&edit);
                version.commit_seals(&persisted.seals);
            }
        });
        if adds_runs {
            self.note_overlap();
        }
        self.forget_published();
        flush::admit(self, epoch, persisted.built);
        memory_compaction::compact_memory(self);
    }

    /// Keeps track of what a new writer seals.
    pub(crate) fn watch_sealed(&self, sealed: &SealedRuns) {
        let mut watched = self.sealed.lock();
        watched.retain(|w| w.strong_count() > 0);
        watched.push(Arc::downgrade(sealed));
    }

    /// Takes what the version holds from the writers that sealed it.
    fn forget_published(&self) {
        let version = self.version();
        let committed = |run: &MemRun| {
            version.table(run.table()).is_ok_and(|table| table.has_committed(run.seal))
        };
        for sealed in self.sealed.lock().iter().filter_map(Weak::upgrade) {
            sealed.lock().retain(|run| !committed(run));
        }
        self.touch();
    }

    fn sealed_bytes(&self) -> usize {
        let bytes = |runs: SealedRuns| runs.lock().iter().map(MemRun::memory_size).sum::<usize>();
        self.sealed.lock().iter().filter_map(Weak::upgrade).map(bytes).sum()
    }

    /// Takes in a committed flush or compaction. What a compaction replaces must be here already, or never
    /// come: runs that came later would be read beside those made of them. See
    /// [`StateStore::wait_for_runs`](crate::StateStore::wait_for_runs).
    pub fn apply_edit(&self, edit: &VersionEdit) {
        if cfg!(debug_assertions)
            && let Err(broken) = check_rewrite(edit)
        {
            debug_assert!(false, "an edit of job {}: {broken}", self.job());
        }
        let replaced = self.update(|version| {
            let replaced = version.runs(&edit.remove_runs);
            // A compaction that the version was opened with already: what it added may be gone again.
            if edit.remove_runs.is_empty() || !replaced.is_empty() {
                version.apply(edit);
            }
            replaced
        });
        self.note_overlap();
        if edit.flushed_to() > 0 {
            given_up::settle(std::mem::take(&mut *self.flush_claims.lock()));
        }
        self.tail.lock().retire(edit.flushed_to());
        let merged: BTreeSet<u32> = replaced.iter().map(|run| run.meta().table_id).collect();
        let version = self.version();
        for table in merged.into_iter().filter_map(|id| version.table(TableId(id)).ok()) {
            table.reads.merged();
        }
        // Who still reads them reads past the cache.
        for run in replaced {
            self.shared.cache.forget_run(&run);
        }
    }

    /// The most runs of one of its tables that may hold one key.
    pub(crate) fn overlap(&self) -> usize {
        self.overlap.load(Ordering::Relaxed)
    }

    fn note_overlap(&self) {
        let runs = write_delay::deepest(&self.version()).map_or(0, |o| o.runs);
        self.overlap.store(runs, Ordering::Relaxed);
        // Commits may wait for it.
        self.shared.changed.notify_waiters();
    }

    /// The state table for which commits of this job are delayed at present.
    pub fn delayed_by(&self) -> Option<Overlap> {
        if self.overlap() <= self.shared.options.overlap_limit {
            return None;
        }
        write_delay::deepest(&self.version())
    }

    /// The reads of a table's runs since they were last merged.
    pub fn reads_since_merge(&self, table: TableId) -> TableReads {
        self.version().table(table).map_or(TableReads::MANY, |t| t.reads.since_merge())
    }

    /// Runs lie in another object from now on; by their ids, what is cached of them stays. Who holds a version goes on
    /// reading where they were.
    pub fn move_parts(&self, object: &str, parts: &[MovedPart]) {
        let places: HashMap<(&str, u64, u64), u64> = parts
            .iter()
            .filter(|p| p.job == self.job().0)
            .map(|p| ((p.from_object.as_str(), p.from_offset, p.length), p.offset))
            .collect();
        let current = self.version();
        let mut disk = current.tables().flat_map(|t| &t.disk);
        let moves =
            |run: &RunMeta| places.get(&(run.object.as_str(), run.offset, run.length)).copied();
        if disk.any(|run| moves(run.meta()).is_some()) {
            self.update(|version| version.move_runs(object, moves));
        }
    }

    /// The slices that no flush has retired.
    pub fn tail_size(&self) -> TailSize {
        self.tail.lock().size()
    }

    /// Whether memory runs exceed the job's budget, or keep disk runs from being compacted, or the tail exceeds a
    /// limit of one job, and no flush is under way.
    pub fn needs_flush(&self) -> bool {
        let version = self.version();
        // Locked: one is being made.
        if self.flushed.try_lock().map_or(true, |e| e.flushed_to() > version.flushed_sequence) {
            return false;
        }
        version.mem_bytes() > self.shared.options.flush_bytes
            || version.held_back_runs() >= HELD_BACK_RUNS
            || self.shared.options.tail.exceeded_by(self.tail_size(), self.env().now())
    }

    /// Writes everything published so far as level-0 runs. Nothing changes until the edit is committed
    /// and applied; until then a repeated call returns the same edit, because another one would hold
    /// the same entries again.
    pub async fn flush(self: &Arc<Self>) -> Result<VersionEdit> {
        let mut flushed = self.flushed.lock().await;
        if flushed.flushed_to() > self.version().flushed_sequence {
            return Ok(flushed.clone());
        }
        let version = self.update(|version| {
            version.seal_groups();
            version.clone()
        });
        // What the tail holds may have cancelled out: then there is nothing to write, and the tail goes all the same.
        if version.mem_bytes() == 0 && self.tail_size().slices == 0 {
            return Ok(VersionEdit::default());
        }
        let (edit, claims) = flush::flush(self, &version).await?;
        *flushed = edit.clone();
        *self.flush_claims.lock() = claims;
        Ok(edit)
    }

    /// Entries of these tables with a time below (microseconds) are never asked for again. Bounds only
    /// rise. Only of commits that are published.
    pub fn set_bounds(&self, bounds: &[(TableId, i64)]) {
        let version = self.version();
        let rises = |(id, bound): &&(TableId, i64)| {
            version.table(*id).is_ok_and(|t| t.retain.is_none_or(|r| r.bound < *bound))
        };
        let rising: Vec<_> = bounds.iter().filter(rises).collect();
        if rising.is_empty() {
            return;
        }
        self.update(|version| {
            for (id, bound) in rising {
                if let Some(table) = version.table_mut(*id)
                    && let Some(by) = table.desc.retention
                {
                    table.retain = Some(Retain { by, bound: *bound });
                }
            }
        });
    }

    /// No read will need versions below this epoch.
    pub fn set_horizon(&self, horizon: Epoch) {
        self.update(|version| version.horizon = version.horizon.max(horizon));
    }

    pub fn horizon(&self) -> Epoch {
        self.version().horizon
    }

    /// Heap bytes: memory runs, runs on their way there, and open memtables.
    pub fn memory_size(&self) -> usize {
        self.version().mem_bytes() + self.sealed_bytes() + self.open_bytes.load(Ordering::Relaxed)
    }

    /// Heap bytes of memory runs: what a flush takes out of memory.
    pub fn committed_bytes(&self) -> usize {
        self.version().mem_bytes()
    }

    pub fn stats(&self) -> JobStats {
        let version = self.version();
        let tables = version
            .tables()
            .map(|t| TableStats {
                table: t.desc.id,
                name: t.desc.name.clone(),
                mem_rows: t.mem.iter().map(|r| r.num_rows() as u64).sum(),
                mem_bytes: t.mem_bytes() as u64,
                mem_runs: t.mem.len(),
                disk_rows: t.disk.iter().map(|r| r.meta().rows).sum(),
                disk_bytes: t.disk.iter().map(|r| r.meta().length).sum(),
                disk_runs: t.disk.len(),
            })
            .collect();
        JobStats {
            tables,
            memrun_bytes: version.mem_bytes(),
            open_bytes: self.open_bytes.load(Ordering::Relaxed),
        }
    }
}

/// The slice of a commit, and its runs again.
async fn encode(
    store: &Arc<JobStore>,
    runs: Vec<MemRun>,
    bytes: usize,
) -> Result<(Bytes, Vec<MemRun>)> {
    if bytes <= INLINE_ENCODE_BYTES {
        return Ok((slice::encode(&runs, &store.committed.codecs)?, runs));
    }
    let committed = Arc::clone(&store.committed);
    let encode = async move { Ok((slice::encode(&runs, &committed.codecs)?, runs)) };
    in_background(&store.shared, encode).await
}

/// The rows of a committed slice.
pub(crate) async fn read_slice(
    shared: &Shared,
    codecs: &Codecs,
    slice: &SliceRef,
) -> Result<Vec<MemRun>> {
    let epoch = Epoch(slice.epoch);
    if slice.object.is_empty() {
        return slice::decode(&slice.inline, codecs, epoch, "meta log (inline slice)", 0);
    }
    let read_ahead = match &shared.options.prefetch {
        Some(prefetch) => prefetch.take(slice).await,
        None => None,
    };
    let bytes = match read_ahead {
        Some(bytes) => bytes,
        None => shared.read(&slice.object, slice.offset..slice.offset + slice.length).await?,
    };
    slice::decode(&bytes, codecs, epoch, &slice.object, slice.offset)
}
