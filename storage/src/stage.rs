//! Rows of a large statement on their way into a table (docs/design.md §4, "Statements"): written as
//! runs that no version names, and linked into it by one commit, or deleted.
//!
//! Until then their epoch is not known and nobody reads them but the statement's own check. Linking
//! gives every run a new id, so that nothing a cache has kept of the unlinked run is found under it.

use std::ops::Bound;
use std::sync::Arc;

use arrow::array::{Array, AsArray, BinaryArray, Int64Array, RecordBatch, UInt32Array};
use arrow::compute::take;
use millrace_common::collections::HashSet;
use millrace_common::delta::take_rows;
use millrace_common::{Epoch, TableId};
use millrace_rpc::sequence::Sequence;
use millrace_rpc::version::{RunMeta, VersionEdit};

use crate::block::{Entries, stored_schema};
use crate::cache::Priority;
use crate::disk;
use crate::error::{Result, StorageError};
use crate::given_up::Claim;
use crate::job_store::{JobStore, Persisted};
use crate::memtable::Memtable;
use crate::merge::{Merger, Mode};
use crate::run::RunReader;
use crate::spill::{delete_unnamed, write_unnamed};
use crate::state_store::Shared;
use crate::table::RowStorage;

/// Rows of one batch of a check.
const CHECK_ROWS: usize = 8192;
/// Entries as they were written: nothing is dropped, and what becomes of a key that comes twice is the storage's.
const ALL: Mode = Mode::Compact { horizon: Epoch::ZERO, bottom: false };

/// What [`Staging::merged`] has of a key that was written several times.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Repeated {
    /// One entry with the sum of the weights, so that it is seen.
    Add,
    /// The entry that was written first.
    First,
    /// The entry that was written last.
    Last,
}

impl Repeated {
    fn storage(self) -> RowStorage {
        match self {
            Repeated::Add => RowStorage::Multiset,
            Repeated::First | Repeated::Last => RowStorage::Keyed,
        }
    }
}

/// Staged rows of one table. Dropping it deletes them.
pub struct Staging {
    shared: Arc<Shared>,
    store: Arc<JobStore>,
    table: TableId,
    repeated: Repeated,
    open: Memtable,
    /// Times that rows were written as runs.
    spills: u64,
    runs: Vec<RunMeta>,
    /// On the objects of the runs, until they are kept.
    claims: Vec<Claim>,
}

impl std::fmt::Debug for Staging {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Staging").field("table", &self.table).finish_non_exhaustive()
    }
}

impl JobStore {
    /// Begins to stage rows of a table.
    pub fn begin_staging(self: &Arc<Self>, table: TableId, repeated: Repeated) -> Result<Staging> {
        let version = self.version();
        let schema = stored_schema(&version.table(table)?.desc.value_schema);
        Ok(Staging {
            shared: Arc::clone(&self.shared),
            store: Arc::clone(self),
            table,
            repeated,
            open: Memtable::new(repeated.storage(), schema),
            spills: 0,
            runs: Vec::new(),
            claims: Vec::new(),
        })
    }

    /// Makes staged runs a commit of this job, of this number, as `persist` would; no I/O.
    pub fn link(&self, commit: u64, runs: &[RunMeta]) -> Result<Persisted> {
        let sequence = Sequence::new(commit, 0)?.get();
        let link = |run: &RunMeta| RunMeta {
            run_id: self.shared.namer.next_run_id(),
            sequence,
            min_epoch: 0,
            max_epoch: 0,
            ..run.clone()
        };
        let add_runs = runs.iter().map(link).collect();
        let edit = Some(VersionEdit { add_runs, ..VersionEdit::default() });
        let claims = self.take_pending_claims();
        Ok(Persisted { edit, sequence, claims, ..Persisted::default() })
    }
}

impl Staging {
    /// Adds rows to what is in memory. Weights absent: all +1.
    pub fn write(
        &mut self,
        keys: BinaryArray,
        weights: Option<Int64Array>,
        values: RecordBatch,
    ) -> Result<()> {
        if self.repeated != Repeated::First {
            self.open.write(keys, weights, values);
            return Ok(());
        }
        // The later of two entries in memory would win.
        let mut seen: HashSet<&[u8]> = HashSet::default();
        let there = self.open.matching(&keys)?;
        seen.extend(there.iter().flat_map(|e| (0..e.len()).map(|i| e.keys.value(i))));
        let first = |i: &u32| seen.insert(keys.value(*i as usize));
        let fresh: Vec<u32> = (0..keys.len() as u32).filter(first).collect();
        let fresh = UInt32Array::from(fresh);
        let kept = take(&keys, &fresh, None)?.as_binary::<i32>().clone();
        let weights =
            weights.map(|w| fresh.values().iter().map(|&i| w.value(i as usize)).collect());
        self.open.write(kept, weights, take_rows(&values, &fresh)?);
        Ok(())
    }

    /// Heap bytes of rows that are not in runs yet.
    pub fn memory_size(&self) -> usize {
        self.open.memory_size()
    }

    /// Writes what is in memory as sorted runs.
    pub async fn spill(&mut self) -> Result<()> {
        if self.open.is_empty() {
            return Ok(());
        }
        let table = Arc::clone(self.store.version().table(self.table)?);
        let storage = self.repeated.storage();
        let empty = Memtable::new(storage, Arc::clone(table.schema()));
        self.spills += 1;
        let sequence = match self.repeated {
            Repeated::Add => 0,
            Repeated::First => u64::from(u32::MAX) - self.spills,
            Repeated::Last => self.spills,
        };
        let mut full = std::mem::replace(&mut self.open, empty);
        let sorted = move || Ok(full.seal()?);
        let closed = |_| StorageError::internal("the state store is closed");
        let _turn = self.shared.staging.acquire().await.map_err(closed)?;
        let written = write_unnamed(&self.store, &table, storage, sequence, sorted).await?;
        self.runs.extend(written.runs);
        self.claims.extend(written.claims);
        Ok(())
    }

    /// All staged entries in key order, one a key. After the last `spill`.
    pub fn merged(&self) -> Result<Merged> {
        let table = Arc::clone(self.store.version().table(self.table)?);
        let range = (Bound::Unbounded, Bound::Unbounded);
        let readers: Vec<Arc<RunReader>> = self
            .runs
            .iter()
            .map(|run| Arc::new(RunReader::new(run.clone(), Arc::clone(&table.codec))))
            .collect();
        let sources = disk::scan_all(
            &self.shared,
            readers.iter().cloned(),
            ALL,
            &range,
            None,
            Priority::Flush,
        );
        let schema = Arc::clone(table.schema());
        let merger = Merger::new(self.repeated.storage(), ALL, schema, CHECK_ROWS, sources);
        Ok(Merged { merger, readers, shared: Arc::clone(&self.shared) })
    }

    /// The runs, to be linked by the next commit of the job. From now on they are deleted only if that is void, or
    /// never comes: the log may come to name them.
    pub fn keep(&mut self) -> Vec<RunMeta> {
        self.store.add_pending_claims(std::mem::take(&mut self.claims));
        self.runs.clone()
    }
}

/// The check's read of staged rows.
pub struct Merged {
    merger: Merger,
    readers: Vec<Arc<RunReader>>,
    shared: Arc<Shared>,
}

impl Merged {
    pub async fn next(&mut self) -> Result<Option<Entries>> {
        self.merger.next().await
    }
}

impl Drop for Merged {
    fn drop(&mut self) {
        self.readers.iter().for_each(|run| self.shared.cache.forget_run(run));
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        delete_unnamed(&self.shared, std::mem::take(&mut self.claims));
    }
}
