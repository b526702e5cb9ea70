//! K-way merge of sorted sources into consolidated entries: the one place where entries of the same
//! key meet. Scans, flushes, compactions, in-memory merges and change reads are all this merge under a
//! different [`Mode`].
//!
//! Sources are read in slabs: all rows of the smallest source below the next source's key are handled
//! together, so disjoint and clustered sources cost one key comparison per slab, and a lone source
//! none. Output rows are (batch, row) picks, gathered once per output batch.

use std::cmp::Ordering;
use std::collections::VecDeque;
use std::sync::Arc;

use arrow::array::UInt64Array;
use arrow::datatypes::SchemaRef;
use futures::StreamExt;
use futures::stream::BoxStream;
use millrace_common::Epoch;
use millrace_rpc::catalog::RowStorage;

use crate::block::{Entries, Epochs};
use crate::entry::Gather;
use crate::error::StorageError;
use crate::memtable::weights_of;
use crate::ttl_filter::Retain;

/// What the merged entries are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// The rows that exist at an epoch: at most one entry a key, weights > 0.
    AsOf(Epoch),
    /// What was written in (from, to]: the newest entry a key (`Keyed`, deletes included), the sum of
    /// weights if not zero (`Multiset`), the arrivals (`Append`).
    Written { from: Epoch, to: Epoch },
    /// The entries themselves, with versions at or below `horizon` merged into the newest. `bottom`:
    /// no older entry of these keys exists elsewhere, so deletes at or below the horizon vanish.
    Compact { horizon: Epoch, bottom: bool },
}

impl Mode {
    /// Whether entries between these epochs can matter.
    pub fn wants(&self, min: Epoch, max: Epoch) -> bool {
        match *self {
            Mode::AsOf(epoch) => min <= epoch,
            Mode::Written { from, to } => min <= to && max > from,
            Mode::Compact { .. } => true,
        }
    }

    fn wants_entry(&self, epoch: Epoch) -> bool {
        self.wants(epoch, epoch)
    }
}

/// Breaks ties of equal key and epoch between runs that a version names: the larger was written later. Of one key, a
/// lower level always has the newer entry; in level 0 and in memory, which is one level here, the commit decides. A
/// run's sequence alone does not: moved to the next level it is that of the newest commit of all that was merged, also
/// for keys of which the level above has newer entries. Sequences stay below 2^60.
pub(crate) fn rank(level: u32, sequence: u64) -> u64 {
    const SEQUENCE_BITS: u32 = 60;
    let above = 15 - u64::from(level.min(15));
    above << SEQUENCE_BITS | sequence & ((1 << SEQUENCE_BITS) - 1)
}

/// A sorted source of entries.
pub struct Source {
    /// As [`rank`] gives it, or in another order of one's own.
    pub rank: u64,
    pub input: Input,
    /// Sources whose keys all lie above, read one after the other when this one has ended: only one of
    /// a chain holds memory.
    pub then: VecDeque<Source>,
}

pub enum Input {
    Batches(VecDeque<Entries>),
    Stream(BoxStream<'static, Result<Entries, StorageError>>),
}

impl Source {
    pub fn memory(batches: impl IntoIterator<Item = Entries>, rank: u64) -> Source {
        Source::new(rank, Input::Batches(batches.into_iter().collect()))
    }

    pub fn new(rank: u64, input: Input) -> Source {
        Source { rank, input, then: VecDeque::new() }
    }
}

struct Cursor {
    source: Source,
    batch: Entries,
    position: usize,
    /// The batch's place in the output being built.
    slot: Option<usize>,
    /// Of the batch, on average.
    row_bytes: usize,
}

impl Cursor {
    fn key(&self) -> &[u8] {
        self.batch.keys.value(self.position)
    }

    fn compare(&self, other: &Cursor) -> Ordering {
        let order = |c: &Cursor| (c.batch.epochs.at(c.position), c.source.rank);
        self.key().cmp(other.key()).then_with(|| order(self).cmp(&order(other)))
    }

    /// Loads the next batch that has rows.
    async fn refill(&mut self) -> Result<bool, StorageError> {
        loop {
            let next = match &mut self.source.input {
                Input::Batches(batches) => batches.pop_front(),
                Input::Stream(stream) => stream.next().await.transpose()?,
            };
            match next {
                None => match self.source.then.pop_front() {
                    None => return Ok(false),
                    Some(next) => {
                        let then = std::mem::take(&mut self.source.then);
                        self.source = Source { then, ..next };
                    }
                },
                Some(batch) if batch.is_empty() => {}
                Some(batch) => {
                    self.row_bytes = batch.content_bytes() / batch.len();
                    self.batch = batch;
                    self.position = 0;
                    self.slot = None;
                    return Ok(true);
                }
            }
        }
    }
}

/// One entry that may become an output row.
#[derive(Clone, Copy)]
struct Candidate {
    pick: (usize, usize),
    epoch: Epoch,
    weight: i64,
}

/// Rows of one output batch take at most about this, however few that are.
const BATCH_BYTES: usize = 4 << 20;

/// Merges sources of one table.
pub struct Merger {
    storage: RowStorage,
    mode: Mode,
    /// Of the values, as projected.
    schema: SchemaRef,
    batch_rows: usize,
    waiting: Vec<Source>,
    cursors: Vec<Cursor>,
    /// Live cursors, the smallest last.
    order: Vec<usize>,
    batches: Vec<Entries>,
    picks: Vec<(usize, usize)>,
    /// Bytes of the rows looked at for the output batch.
    taken_bytes: usize,
    weights: Vec<i64>,
    epochs: Vec<u64>,
    pending: Option<Candidate>,
    retain: Option<Retain>,
}

impl Merger {
    pub fn new(
        storage: RowStorage,
        mode: Mode,
        schema: SchemaRef,
        batch_rows: usize,
        sources: Vec<Source>,
    ) -> Merger {
        Merger {
            storage,
            mode,
            schema,
            batch_rows: batch_rows.max(1),
            waiting: sources,
            cursors: Vec::new(),
            order: Vec::new(),
            batches: Vec::new(),
            picks: Vec::new(),
            taken_bytes: 0,
            weights: Vec::new(),
            epochs: Vec::new(),
            pending: None,
            retain: None,
        }
    }

    /// Leaves entries out that are too old, where that is safe.
    pub(crate) fn retaining(mut self, retain: Option<Retain>) -> Merger {
        self.retain = retain.filter(|r| r.applies(self.storage, self.mode));
        self
    }

    /// The next consolidated entries, in key order; `None` at the end.
    pub async fn next(&mut self) -> Result<Option<Entries>, StorageError> {
        while let Some(merged) = self.next_merged().await? {
            let Some(retain) = self.retain else { return Ok(Some(merged)) };
            let kept = retain.entries(merged)?;
            if !kept.is_empty() {
                return Ok(Some(kept));
            }
        }
        Ok(None)
    }

    async fn next_merged(&mut self) -> Result<Option<Entries>, StorageError> {
        self.open().await?;
        while let Some(&at) = self.order.last() {
            if self.is_full() {
                if self.pending.is_some_and(|p| self.key(p.pick) != self.cursors[at].key()) {
                    self.close();
                }
                match (&self.pending, self.picks.is_empty()) {
                    (None, false) => return self.flush().map(Some),
                    // Nothing of what was looked at is left, as where all has been deleted.
                    (None, true) => self.forget(),
                    (Some(_), _) => {}
                }
            }
            self.step(at);
            if self.cursors[at].position == self.cursors[at].batch.len()
                && !self.cursors[at].refill().await?
            {
                self.order.pop();
            } else {
                self.reinsert();
            }
        }
        self.close();
        if self.picks.is_empty() { Ok(None) } else { self.flush().map(Some) }
    }

    fn is_full(&self) -> bool {
        self.picks.len() >= self.batch_rows || self.taken_bytes >= BATCH_BYTES
    }

    /// Everything as one list of batches.
    pub async fn collect(mut self) -> Result<Vec<Entries>, StorageError> {
        let mut all = Vec::new();
        while let Some(batch) = self.next().await? {
            all.push(batch);
        }
        Ok(all)
    }

    /// As a stream.
    pub fn into_stream(self) -> BoxStream<'static, Result<Entries, StorageError>> {
        futures::stream::try_unfold(self, |mut merger| async move {
            Ok(merger.next().await?.map(|batch| (batch, merger)))
        })
        .boxed()
    }

    async fn open(&mut self) -> Result<(), StorageError> {
        if self.waiting.is_empty() {
            return Ok(());
        }
        let empty = Entries {
            keys: arrow::array::BinaryArray::from(Vec::<&[u8]>::new()),
            weights: None,
            epochs: Epochs::Uniform(Epoch::ZERO),
            values: arrow::array::RecordBatch::new_empty(Arc::clone(&self.schema)),
        };
        // All sources read their first batch at the same time: one round, not one a source.
        let opening = std::mem::take(&mut self.waiting).into_iter().map(|source| {
            let mut cursor =
                Cursor { source, batch: empty.clone(), position: 0, slot: None, row_bytes: 0 };
            async move { Ok::<_, StorageError>(cursor.refill().await?.then_some(cursor)) }
        });
        for cursor in futures::future::try_join_all(opening).await?.into_iter().flatten() {
            self.order.push(self.cursors.len());
            self.cursors.push(cursor);
        }
        let cursors = &self.cursors;
        self.order.sort_by(|&a, &b| cursors[b].compare(&cursors[a]));
        Ok(())
    }

    /// Puts the cursor that moved, the last in order, where it belongs now.
    fn reinsert(&mut self) {
        let Some(moved) = self.order.pop() else { return };
        let cursors = &self.cursors;
        let at = self.order.partition_point(|&c| cursors[c].compare(&cursors[moved]).is_gt());
        self.order.insert(at, moved);
    }

    /// Handles the rows of the smallest cursor that are below every other cursor's key, at least one.
    fn step(&mut self, at: usize) {
        let start = self.cursors[at].position;
        let rival = self.order.len().checked_sub(2).map(|i| self.order[i]);
        // Bounded by what the output batch still wants, so that a lone source does not overfill it.
        let cursor = &self.cursors[at];
        let bytes_left = BATCH_BYTES.saturating_sub(self.taken_bytes);
        let room = self.batch_rows.saturating_sub(self.picks.len());
        let room = room.min(bytes_left / cursor.row_bytes.max(1)).max(1);
        let limit = cursor.batch.len().min(start + room);
        let end = match rival {
            None => limit,
            Some(r) => {
                cursor.batch.lower_bound(self.cursors[r].key(), start).clamp(start + 1, limit)
            }
        };
        self.taken_bytes += (end - start) * cursor.row_bytes;
        let slot = match cursor.slot {
            Some(slot) => slot,
            None => {
                self.batches.push(cursor.batch.clone());
                self.cursors[at].slot = Some(self.batches.len() - 1);
                self.batches.len() - 1
            }
        };
        // A rival with the same key: its entries belong to this group, so it stays open.
        let contested = rival.is_some_and(|r| self.cursors[r].key() == self.cursors[at].key());
        match self.batches[slot].epochs {
            // Keys are unique where the epoch is uniform: all but the ends are alone with their key.
            Epochs::Uniform(epoch) if !contested && end - start > 2 => {
                self.add(slot, start);
                self.close();
                self.add_unique(slot, start + 1, end - 1, epoch);
                self.add(slot, end - 1);
            }
            _ => (start..end).for_each(|row| self.add(slot, row)),
        }
        self.cursors[at].position = end;
    }

    /// Rows that are each alone with their key.
    fn add_unique(&mut self, slot: usize, start: usize, end: usize, epoch: Epoch) {
        if !self.mode.wants_entry(epoch) {
            return;
        }
        for row in start..end {
            let weight = self.batches[slot].weight(row);
            if keeps(self.storage, self.mode, epoch, weight) {
                self.picks.push((slot, row));
                self.weights.push(weight);
                if matches!(self.mode, Mode::Compact { .. }) {
                    self.epochs.push(epoch.0);
                }
            }
        }
    }

    /// One entry, in (key, epoch, rank) order.
    fn add(&mut self, slot: usize, row: usize) {
        let epoch = self.batches[slot].epochs.at(row);
        if !self.mode.wants_entry(epoch) {
            return;
        }
        let weight = self.batches[slot].weight(row);
        let new = Candidate { pick: (slot, row), epoch, weight };
        let Some(old) = self.pending else {
            self.pending = Some(new);
            return;
        };
        let same_key = self.key(old.pick) == self.key(new.pick);
        if same_key && self.absorbs(old, new) {
            let sum = match self.storage {
                RowStorage::Multiset => old.weight.wrapping_add(new.weight),
                RowStorage::Keyed | RowStorage::Append => new.weight,
            };
            self.pending = Some(Candidate { weight: sum, ..new });
        } else {
            self.close();
            self.pending = Some(new);
        }
    }

    /// Whether the newer of two neighbouring entries of a key replaces or joins the older.
    fn absorbs(&self, old: Candidate, new: Candidate) -> bool {
        match self.mode {
            Mode::AsOf(_) | Mode::Written { .. } => true,
            Mode::Compact { horizon, .. } => new.epoch <= horizon || new.epoch == old.epoch,
        }
    }

    fn close(&mut self) {
        let Some(done) = self.pending.take() else { return };
        if keeps(self.storage, self.mode, done.epoch, done.weight) {
            self.picks.push(done.pick);
            self.weights.push(done.weight);
            if matches!(self.mode, Mode::Compact { .. }) {
                self.epochs.push(done.epoch.0);
            }
        }
    }

    fn key(&self, pick: (usize, usize)) -> &[u8] {
        self.batches[pick.0].keys.value(pick.1)
    }

    fn flush(&mut self) -> Result<Entries, StorageError> {
        let gather = Gather::new(&self.picks);
        let epochs = match self.mode {
            Mode::Compact { .. } => epochs_of(std::mem::take(&mut self.epochs)),
            Mode::AsOf(_) | Mode::Written { .. } => Epochs::Uniform(Epoch::ZERO),
        };
        let out = Entries {
            keys: gather.keys(&self.batches)?,
            weights: weights_of(&std::mem::take(&mut self.weights)),
            epochs,
            values: gather.values(&self.schema, &self.batches)?,
        };
        self.picks.clear();
        self.forget();
        Ok(out)
    }

    /// Lets go of the batches that no row of the output is picked from.
    fn forget(&mut self) {
        self.taken_bytes = 0;
        self.batches.clear();
        for cursor in &mut self.cursors {
            cursor.slot = None;
        }
    }
}

/// Whether a key's final entry is part of the output.
fn keeps(storage: RowStorage, mode: Mode, epoch: Epoch, weight: i64) -> bool {
    match (mode, storage) {
        (Mode::AsOf(_), _) => weight > 0,
        (_, RowStorage::Multiset) => weight != 0,
        (Mode::Compact { horizon, bottom: true }, RowStorage::Keyed) => {
            weight > 0 || epoch > horizon
        }
        _ => true,
    }
}

/// One epoch for all where that is so.
fn epochs_of(epochs: Vec<u64>) -> Epochs {
    match epochs.first() {
        Some(&first) if epochs.iter().all(|&e| e == first) => Epochs::Uniform(Epoch(first)),
        _ => Epochs::Each(UInt64Array::from(epochs)),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Mutex, Weak};

    use arrow::array::{
        Array, ArrayRef, AsArray, BinaryArray, Int64Array, RecordBatch, StringArray,
    };
    use arrow::datatypes::{DataType, Field, Schema};

    use super::*;

    const BATCHES: usize = 400;
    const ROWS: usize = 1_000;

    /// Values that were handed out, to see which are held.
    type Given = Arc<Mutex<Vec<Weak<dyn Array>>>>;

    fn schema() -> SchemaRef {
        Arc::new(Schema::new(vec![Field::new("v", DataType::Utf8, true)]))
    }

    /// Every key once, in batches that are made when they are asked for.
    fn source(weight: i64, epoch: u64, given: &Given, most: &Arc<Mutex<usize>>) -> Source {
        let (given, most) = (Arc::clone(given), Arc::clone(most));
        let batches = futures::stream::iter(0..BATCHES).map(move |batch| {
            let keys = (0..ROWS).map(|row| ((batch * ROWS + row) as u64).to_be_bytes());
            let values: ArrayRef = Arc::new(StringArray::from(vec!["x".repeat(100); ROWS]));
            let mut given = given.lock().unwrap();
            given.push(Arc::downgrade(&values));
            given.retain(|v| v.strong_count() > 0);
            let mut most = most.lock().unwrap();
            *most = given.len().max(*most);
            Ok(Entries {
                keys: BinaryArray::from_iter_values(keys),
                weights: Some(Int64Array::from_value(weight, ROWS)),
                epochs: Epochs::Uniform(Epoch(epoch)),
                values: RecordBatch::try_new(schema(), vec![values]).unwrap(),
            })
        });
        Source::new(epoch, Input::Stream(batches.boxed()))
    }

    /// A table from which everything was deleted is read, and merged, in the memory of one output batch.
    #[tokio::test]
    async fn rows_that_are_gone_are_not_held() {
        let horizon = Epoch(9);
        for mode in [Mode::AsOf(Epoch(3)), Mode::Compact { horizon, bottom: true }] {
            let (given, most) = (Given::default(), Arc::new(Mutex::new(0)));
            let sources = vec![source(1, 1, &given, &most), source(-1, 2, &given, &most)];
            let mut merger = Merger::new(RowStorage::Keyed, mode, schema(), 1_024, sources);
            assert!(merger.next().await.unwrap().is_none(), "{mode:?}");
            // Each batch has about 110 KB.
            let held = *most.lock().unwrap();
            assert!(held <= BATCH_BYTES / (100 * ROWS) + 4, "{held} batches in memory, {mode:?}");
        }
    }

    /// Two commits of one epoch (a backfill) wrote the key: the older entry was moved down with a run of the newest
    /// commit, or even of a later one.
    #[tokio::test]
    async fn of_one_epoch_the_entry_of_the_lower_level_is_newer() {
        let one = |value: &str, level: u32, sequence: u64| {
            let values: ArrayRef = Arc::new(StringArray::from(vec![value]));
            let entries = Entries {
                keys: BinaryArray::from_iter_values([b"n"]),
                weights: None,
                epochs: Epochs::Uniform(Epoch(5)),
                values: RecordBatch::try_new(schema(), vec![values]).unwrap(),
            };
            Source::memory([entries], rank(level, sequence))
        };
        let memory = || one("newest", 0, 9);
        for sources in [
            vec![one("old", 2, 20), one("new", 1, 20)],
            vec![one("new", 1, 20), one("old", 2, 20)],
            vec![one("new", 1, 8), one("old", 2, 20)],
            vec![one("old", 1, 20), one("new", 0, 21)],
            vec![one("old", 0, 21), one("new", 0, 22)],
        ] {
            for (sources, expected) in
                [(sources, "new"), (vec![memory(), one("old", 0, 8)], "newest")]
            {
                let mode = Mode::AsOf(Epoch(5));
                let mut merger = Merger::new(RowStorage::Keyed, mode, schema(), 16, sources);
                let found = merger.next().await.unwrap().unwrap();
                let values = found.values.column(0).as_string::<i32>();
                assert_eq!((values.len(), values.value(0)), (1, expected));
            }
        }
    }
}
