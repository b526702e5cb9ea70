//! A memory run: the sorted, immutable delta of one state table. A task seals its open memtable into
//! one at every barrier; publishing gives it its epoch and makes it visible.
//!
//! Sealing does not know the epoch (a root's is assigned by the log, docs/design.md §4): batches are
//! sealed with the uniform epoch `ZERO`, and publishing relabels them, which copies no data. Runs
//! merged from several epochs carry an epoch column.

use std::sync::Arc;

use millrace_common::{Epoch, TableId};

use crate::block::{Entries, Epochs};
use crate::spill::Spill;

/// Rows of one batch inside a run: large enough to sort and gather in one go, small enough for the
/// 32-bit offsets of keys and strings.
pub(crate) const RUN_BATCH_ROWS: usize = 1 << 16;

/// Which seal of which writer made a run. A writer stops counting a run as its own once the shared
/// version says that this seal is committed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SealId {
    pub writer: u64,
    pub seal: u64,
}

/// Sorted, immutable entries of one table. Cloning shares them.
#[derive(Clone, Debug)]
pub struct MemRun {
    pub(crate) table: TableId,
    pub(crate) batches: Arc<[Entries]>,
    /// Both `ZERO` until published.
    pub(crate) min_epoch: Epoch,
    pub(crate) max_epoch: Epoch,
    /// Commit sequences that this run holds, both inclusive. 0 until persisted.
    pub(crate) min_sequence: u64,
    pub(crate) max_sequence: u64,
    /// Runs of one group may be merged with each other; see `version`.
    pub(crate) group: u64,
    pub(crate) seal: SealId,
    /// It was sealed before its epoch ended, and is on its way to the store.
    pub(crate) spill: Option<Arc<Spill>>,
    /// Each entry is a row of a key that had none.
    pub(crate) new_keys: bool,
    rows: usize,
    bytes: usize,
    tombstones: usize,
}

impl MemRun {
    /// A run of batches that are sorted and have no epochs.
    pub(crate) fn sealed(table: TableId, batches: Arc<[Entries]>, seal: SealId) -> MemRun {
        let mut run = MemRun::sorted(table, batches, Epoch::ZERO, Epoch::ZERO);
        run.seal = seal;
        run
    }

    /// The merge of these neighbours. `None`: their entries cancelled out.
    pub(crate) fn merged(
        table: TableId,
        batches: Vec<Entries>,
        inputs: &[MemRun],
    ) -> Option<MemRun> {
        let (first, last) = (inputs.first()?, inputs.last()?);
        if batches.is_empty() {
            return None;
        }
        let mut run = MemRun::sorted(table, batches.into(), first.min_epoch, last.max_epoch);
        run.min_sequence = first.min_sequence;
        run.max_sequence = last.max_sequence;
        run.group = last.group;
        run.new_keys = inputs.iter().all(|input| input.new_keys);
        Some(run)
    }

    fn sorted(table: TableId, batches: Arc<[Entries]>, min: Epoch, max: Epoch) -> MemRun {
        let rows = batches.iter().map(Entries::len).sum();
        let bytes = batches.iter().map(Entries::content_bytes).sum();
        let tombstones = batches
            .iter()
            .filter_map(|b| b.weights.as_ref())
            .map(|w| w.values().iter().filter(|w| **w <= 0).count())
            .sum();
        MemRun {
            table,
            batches,
            min_epoch: min,
            max_epoch: max,
            min_sequence: 0,
            max_sequence: 0,
            group: 0,
            seal: SealId::default(),
            spill: None,
            new_keys: false,
            rows,
            bytes,
            tombstones,
        }
    }

    /// The same entries, committed at `epoch`.
    pub(crate) fn at(&self, epoch: Epoch, sequence: u64, group: u64) -> MemRun {
        let relabel = |b: &Entries| Entries { epochs: Epochs::Uniform(epoch), ..b.clone() };
        MemRun {
            batches: self.batches.iter().map(relabel).collect(),
            min_epoch: epoch,
            max_epoch: epoch,
            min_sequence: sequence,
            max_sequence: sequence,
            group,
            ..self.clone()
        }
    }

    /// The same run, whose entries are to be had elsewhere.
    pub(crate) fn without_batches(&self) -> MemRun {
        MemRun { batches: Arc::from([]), bytes: 0, ..self.clone() }
    }

    pub fn table(&self) -> TableId {
        self.table
    }

    pub fn batches(&self) -> &[Entries] {
        &self.batches
    }

    pub fn num_rows(&self) -> usize {
        self.rows
    }

    /// Heap bytes, for budgets.
    pub fn memory_size(&self) -> usize {
        self.bytes
    }

    /// Entries that delete.
    pub fn tombstones(&self) -> usize {
        self.tombstones
    }

    /// Invariant: keys ascend, and `(key, epoch)` is unique. For debug builds and tests.
    pub fn is_sorted(&self) -> bool {
        let entries = self
            .batches
            .iter()
            .flat_map(|b| (0..b.len()).map(move |i| (b.keys.value(i), b.epochs.at(i))));
        entries.clone().zip(entries.skip(1)).all(|(a, b)| a < b)
    }
}
