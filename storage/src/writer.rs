//! One task's hold on one state table: writes of the epoch in flight, and reads that see them.
//!
//! A read looks at, newest first: the open memtable, runs sealed but not yet in the shared version
//! (the barrier has passed, the commit has not), and the version. A sealed run moves from private to
//! shared when its commit is published; the version names the seals it holds, so one load of it
//! decides for each private run, and none is counted twice or missed.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use arrow::array::{Array, BinaryArray, Int64Array, RecordBatch};
use millrace_common::Epoch;
use parking_lot::Mutex;

use crate::block::{Entries, stored_schema};
use crate::committed::Committed;
use crate::disk;
use crate::entry::Found;
use crate::error::Result;
use crate::job_store::JobStore;
use crate::lookup::{Lookups, Sorted};
use crate::memrun::{MemRun, SealId};
use crate::memtable::Memtable;
use crate::merge::rank;
use crate::reading::Lookup;
use crate::run::RunReader;
use crate::spill::{self, Spill};
use crate::table::TableDesc;
use crate::ttl_filter::Retain;
use crate::version::TableVersion;

/// Runs sealed by a writer and not yet in the shared version. Shared with the job's store, which takes out
/// what it publishes: a writer may be idle from then on.
pub(crate) type SealedRuns = Arc<Mutex<Vec<MemRun>>>;

/// Owned by one task.
pub struct TableWriter {
    store: Arc<JobStore>,
    desc: Arc<TableDesc>,
    /// Behind a lock only because reads build its index lazily; never contended.
    open: Mutex<Memtable>,
    /// Oldest first.
    sealed: SealedRuns,
    next_seal: SealId,
    /// Sealed before the open epoch's end, oldest first, without their entries.
    early: Vec<MemRun>,
    /// Bytes of `open` that the totals know of.
    counted: usize,
    /// All keys in `open` were new.
    new_keys: bool,
}

/// A memtable smaller than this part of what all may hold is not worth a run of its own.
const SPILL_SHARE: usize = 16;

impl TableWriter {
    pub(crate) fn new(store: Arc<JobStore>, desc: Arc<TableDesc>, writer: u64) -> TableWriter {
        let open = Memtable::new(desc.storage, stored_schema(&desc.value_schema));
        let next_seal = SealId { writer, seal: 1 };
        let sealed = SealedRuns::default();
        store.watch_sealed(&sealed);
        TableWriter {
            store,
            desc,
            open: Mutex::new(open),
            sealed,
            next_seal,
            early: Vec::new(),
            counted: 0,
            new_keys: true,
        }
    }

    /// Of the job whose table it is.
    pub fn store(&self) -> &Arc<JobStore> {
        &self.store
    }

    pub fn desc(&self) -> &Arc<TableDesc> {
        &self.desc
    }

    /// Writes into the open epoch. Weights absent: all +1. Keys and weights have no nulls. Never waits: see
    /// [`JobStore::wait_for_spills`].
    pub fn write(&mut self, keys: BinaryArray, weights: Option<Int64Array>, values: RecordBatch) {
        self.new_keys = false;
        self.add(keys, weights, values);
    }

    /// The same for rows of keys that have none, committed or written: whoever reads the change of the epoch back
    /// ([`JobStore::changes`]) then looks for no rows that they replace.
    pub fn write_new(&mut self, keys: BinaryArray, values: RecordBatch) {
        // An entry that is too old is there for who reads changes, and not for who looks up its key.
        debug_assert!(self.desc.retention.is_none());
        self.add(keys, None, values);
    }

    fn add(&mut self, keys: BinaryArray, weights: Option<Int64Array>, values: RecordBatch) {
        self.open.get_mut().write(keys, weights, values);
        self.count_open();
        let most = self.store.shared.options.spill_bytes;
        let all = self.store.shared.open_bytes.load(Ordering::Relaxed);
        if all > most && self.counted > most / SPILL_SHARE {
            self.spill();
        }
    }

    fn count_open(&mut self) {
        let bytes = self.open.get_mut().memory_size();
        for counter in [&self.store.open_bytes, &self.store.shared.open_bytes] {
            counter.fetch_add(bytes, Ordering::Relaxed);
            counter.fetch_sub(self.counted, Ordering::Relaxed);
        }
        self.counted = bytes;
        self.store.touch();
    }

    /// Sends what the open epoch has written so far on its way to the store.
    fn spill(&mut self) {
        if tokio::runtime::Handle::try_current().is_err() {
            return;
        }
        // What cannot be sorted stays open, and fails when the epoch ends.
        let Ok(Some(mut run)) = self.seal_open() else { return };
        let spill = Spill::new(&self.store.shared);
        run.spill = Some(Arc::clone(&spill));
        self.early.push(run.without_batches());
        self.sealed.lock().push(run.clone());
        spill::start(&self.store, run, &spill, &self.sealed);
    }

    fn seal_open(&mut self) -> Result<Option<MemRun>> {
        let batches = self.open.get_mut().seal()?;
        let new_keys = std::mem::replace(&mut self.new_keys, true);
        self.count_open();
        if batches.is_empty() {
            return Ok(None);
        }
        let mut run = MemRun::sealed(self.desc.id, batches, self.next_seal);
        run.new_keys = new_keys;
        self.next_seal.seal += 1;
        Ok(Some(run))
    }

    /// Ends the epoch: what it wrote, sorted and consolidated; of a large one in several parts, oldest
    /// first.
    pub fn seal(&mut self) -> Result<Vec<MemRun>> {
        let last = self.seal_open()?;
        self.sealed.lock().extend(last.iter().cloned());
        let mut runs = std::mem::take(&mut self.early);
        runs.extend(last);
        Ok(runs)
    }

    /// The current entry of each key, own writes included.
    pub fn multi_get(&self, keys: BinaryArray) -> Lookup {
        self.lookup(LookupRequest::Keys(keys))
    }

    /// All current entries whose key starts with a prefix, in key order, at most `limit` a prefix.
    pub fn multi_scan(&self, prefixes: BinaryArray, limit: Option<usize>) -> Lookup {
        self.lookup(LookupRequest::Prefixes(prefixes, limit))
    }

    /// All current entries with start ≤ key < end, in key order, at most `limit` a range. Ranges are
    /// disjoint and ascend.
    pub fn multi_range(
        &self,
        starts: BinaryArray,
        ends: BinaryArray,
        limit: Option<usize>,
    ) -> Lookup {
        self.lookup(LookupRequest::Ranges { starts, ends, limit })
    }

    /// Without what the table's retention has dropped.
    fn lookup(&self, question: LookupRequest) -> Lookup {
        self.ask(question, |table| table.retain)
    }

    fn ask(
        &self,
        question: LookupRequest,
        retain: impl Fn(&TableVersion) -> Option<Retain>,
    ) -> Lookup {
        let sources = match self.sources(&question) {
            Ok(sources) => sources,
            Err(e) => return Lookup::failed(e),
        };
        let (table, memory, early) = sources;
        let lookups = lookups(&table, memory, Epoch::MAX, retain(&table));
        ask_all(&self.store.committed, table, lookups, &early, question)
    }

    /// The version's table, all sources in memory, and the runs of early seals.
    fn sources(
        &self,
        question: &LookupRequest,
    ) -> Result<(Arc<TableVersion>, Vec<Sorted>, Vec<EarlyRun>)> {
        // Before the version: what is published in between is in both, and told apart by its seal.
        let sealed: Vec<MemRun> = self.sealed.lock().clone();
        let version = self.store.version();
        let table = Arc::clone(version.table(self.desc.id)?);
        let mut memory = memory_sources(&table, Epoch::MAX);
        let mut early = Vec::new();
        for run in sealed.into_iter().filter(|run| !table.has_committed(run.seal)) {
            let rank = run.seal.seal;
            // A run that was written since the list was copied still has its entries here.
            let readers = match run.batches.is_empty() {
                true => run.spill.and_then(|s| s.readers()),
                false => None,
            };
            match readers {
                Some(runs) => early.extend(runs.iter().map(|r| (Arc::clone(r), rank))),
                None => memory.push(Sorted { batches: run.batches, private: true, rank }),
            }
        }
        let mut open = self.open.lock();
        if !open.is_empty() {
            let batches: Arc<[Entries]> = match question {
                LookupRequest::Keys(keys) => open.matching(keys)?,
                LookupRequest::Prefixes(..) | LookupRequest::Ranges { .. } => open.sorted()?,
            };
            memory.push(Sorted { batches, private: true, rank: u64::MAX });
        }
        Ok((table, memory, early))
    }

    /// Whether the table, all of it in memory, has no entry at all, cleaned ones included.
    pub fn is_empty(&self) -> bool {
        let everything = BinaryArray::from_iter_values([b""]);
        self.memory_complete()
            && matches!(self.ask(LookupRequest::Prefixes(everything, Some(1)), |_| None),
                Lookup::Ready(found) if found.is_empty())
    }

    /// From when on entries are kept (microseconds), as committed; `None`: all are.
    pub fn bound(&self) -> Option<i64> {
        Some(self.store.version().table(self.desc.id).ok()?.retain?.bound)
    }

    /// Nothing of this table is on disk: memory alone answers, absence included.
    pub fn memory_complete(&self) -> bool {
        self.early.is_empty()
            && self.store.version().table(self.desc.id).is_ok_and(|t| t.disk.is_empty())
    }

    /// Heap bytes of the open epoch and of runs that only this writer holds.
    pub fn memory_size(&self) -> usize {
        self.counted + self.sealed.lock().iter().map(MemRun::memory_size).sum::<usize>()
    }
}

impl Drop for TableWriter {
    fn drop(&mut self) {
        self.store.open_bytes.fetch_sub(self.counted, Ordering::Relaxed);
        self.store.shared.open_bytes.fetch_sub(self.counted, Ordering::Relaxed);
        self.store.touch();
    }
}

/// What a lookup asks.
pub(crate) enum LookupRequest {
    Keys(BinaryArray),
    Prefixes(BinaryArray, Option<usize>),
    Ranges { starts: BinaryArray, ends: BinaryArray, limit: Option<usize> },
}

impl LookupRequest {
    pub fn answer(&self, lookups: &Lookups) -> Result<Found> {
        match self {
            LookupRequest::Keys(keys) => lookups.get(keys),
            LookupRequest::Prefixes(prefixes, limit) => lookups.scan(prefixes, *limit),
            LookupRequest::Ranges { starts, ends, limit } => lookups.ranges(starts, ends, *limit),
        }
    }

    pub fn strings(&self) -> &BinaryArray {
        match self {
            LookupRequest::Keys(keys) | LookupRequest::Prefixes(keys, _) => keys,
            LookupRequest::Ranges { starts, .. } => starts,
        }
    }
}

/// The committed memory runs that an epoch sees.
pub(crate) fn memory_sources(table: &TableVersion, as_of: Epoch) -> Vec<Sorted> {
    let visible = table.mem.iter().filter(|run| run.min_epoch <= as_of);
    visible
        .map(|run| Sorted {
            batches: Arc::clone(&run.batches),
            private: false,
            rank: rank(0, run.max_sequence),
        })
        .collect()
}

/// A run that no version names, and its rank among what its writer holds.
pub(crate) type EarlyRun = (Arc<RunReader>, u64);

/// Answers at once where memory can, else with the batched reads that will.
pub(crate) fn ask(
    committed: &Committed,
    table: Arc<TableVersion>,
    memory: Vec<Sorted>,
    as_of: Epoch,
    question: LookupRequest,
) -> Lookup {
    let lookups = lookups(&table, memory, as_of, None);
    ask_all(committed, table, lookups, &[], question)
}

fn lookups(
    table: &TableVersion,
    memory: Vec<Sorted>,
    as_of: Epoch,
    retain: Option<Retain>,
) -> Lookups {
    Lookups {
        storage: table.desc.storage,
        schema: Arc::clone(&table.desc.value_schema),
        as_of,
        retain,
        sources: memory,
    }
}

fn ask_all(
    committed: &Committed,
    table: Arc<TableVersion>,
    lookups: Lookups,
    early: &[EarlyRun],
    question: LookupRequest,
) -> Lookup {
    let keys = question.strings().len() as u64;
    let reads = (!table.disk.is_empty() && keys > 0).then(|| Arc::clone(&table.reads));
    let lookup = match disk::ask(&committed.shared, &table, early, question, lookups) {
        Ok(lookup) => lookup,
        Err(e) => return Lookup::failed(e),
    };
    if let Some(reads) = reads {
        committed.note_reads(&reads, keys, matches!(lookup, Lookup::Pending(_)));
    }
    lookup
}
