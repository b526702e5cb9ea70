//! The open memtable of one task and state table: what the epoch in flight has written.
//!
//! Writes only append batches. A hash index by key is built the first time somebody reads while
//! entries are open (and kept up from then on), a sorted view the first time somebody scans: state
//! that is written at the barrier and read from caches, the usual case, pays for neither. Sealing
//! sorts row numbers by key and gathers once.

use std::sync::Arc;

use arrow::array::{Array, BinaryArray, Int64Array, RecordBatch};
use arrow::datatypes::SchemaRef;
use arrow::error::ArrowError;
use hashbrown::HashTable;
use hashbrown::hash_table::Entry;
use millrace_common::Epoch;
use millrace_common::hash::hash_bytes;
use millrace_rpc::catalog::RowStorage;

use crate::block::{Entries, Epochs};
use crate::entry::{Gather, compare_rest, key_head, rebuild};
use crate::lookup::sorted_order;
use crate::memrun::RUN_BATCH_ROWS;

/// Chunks of at least this many rows on average need not be joined into larger ones.
const WHOLE_CHUNK_ROWS: usize = 512;

/// Where an entry lies.
type Place = (u32, u32);

#[derive(Debug, Default)]
struct Index {
    /// Positions in `slots`, by key hash.
    table: HashTable<u32>,
    slots: Vec<Slot>,
    /// Chunks already indexed.
    chunks: usize,
}

#[derive(Clone, Copy, Debug)]
struct Slot {
    place: Place,
    weight: i64,
}

#[derive(Debug)]
pub(crate) struct Memtable {
    storage: RowStorage,
    /// As stored: every field nullable.
    schema: SchemaRef,
    chunks: Vec<Entries>,
    rows: usize,
    bytes: usize,
    index: Index,
    sorted: Option<Arc<[Entries]>>,
}

impl Memtable {
    pub fn new(storage: RowStorage, schema: SchemaRef) -> Memtable {
        Memtable {
            storage,
            schema,
            chunks: Vec::new(),
            rows: 0,
            bytes: 0,
            index: Index::default(),
            sorted: None,
        }
    }

    pub fn is_empty(&self) -> bool {
        self.rows == 0
    }

    pub fn memory_size(&self) -> usize {
        self.bytes + self.index.slots.len() * (size_of::<Slot>() + 8)
    }

    pub fn write(&mut self, keys: BinaryArray, weights: Option<Int64Array>, values: RecordBatch) {
        if keys.is_empty() {
            return;
        }
        debug_assert_eq!(keys.len(), values.num_rows());
        let chunk = Entries { keys, weights, epochs: Epochs::Uniform(Epoch::ZERO), values };
        self.rows += chunk.len();
        self.bytes += chunk.content_bytes();
        self.sorted = None;
        self.chunks.push(chunk);
    }

    /// The net entries of those of these keys that are open, as sorted batches.
    pub fn matching(&mut self, keys: &BinaryArray) -> Result<Arc<[Entries]>, ArrowError> {
        self.update_index();
        let Memtable { index, chunks, .. } = self;
        let mut picks = Vec::new();
        let mut weights = Vec::new();
        let mut last: Option<&[u8]> = None;
        for i in sorted_order(keys) {
            let key = keys.value(i as usize);
            if last.replace(key) == Some(key) {
                continue;
            }
            let same = |&s: &u32| key_at(chunks, index.slots[s as usize].place) == key;
            if let Some(&at) = index.table.find(hash_bytes(key), same) {
                let slot = index.slots[at as usize];
                picks.push((slot.place.0 as usize, slot.place.1 as usize));
                weights.push(slot.weight);
            }
        }
        Ok(self.gather(&picks, &weights)?.into())
    }

    fn update_index(&mut self) {
        let Memtable { index, chunks, storage, .. } = self;
        let Index { table, slots, chunks: indexed } = index;
        for (c, chunk) in chunks.iter().enumerate().skip(*indexed) {
            for row in 0..chunk.len() {
                let key = chunk.keys.value(row);
                let new = Slot { place: (c as u32, row as u32), weight: chunk.weight(row) };
                let entry = table.entry(
                    hash_bytes(key),
                    |&s| key_at(chunks, slots[s as usize].place) == key,
                    |&s| hash_bytes(key_at(chunks, slots[s as usize].place)),
                );
                match entry {
                    Entry::Occupied(at) => {
                        let slot = &mut slots[*at.get() as usize];
                        match storage {
                            RowStorage::Multiset => {
                                slot.weight = slot.weight.wrapping_add(new.weight)
                            }
                            RowStorage::Keyed | RowStorage::Append => *slot = new,
                        }
                    }
                    Entry::Vacant(at) => {
                        at.insert(slots.len() as u32);
                        slots.push(new);
                    }
                }
            }
        }
        *indexed = chunks.len();
    }

    /// The open entries as sorted batches; kept until the next write.
    pub fn sorted(&mut self) -> Result<Arc<[Entries]>, ArrowError> {
        if let Some(sorted) = &self.sorted {
            return Ok(Arc::clone(sorted));
        }
        let sorted: Arc<[Entries]> = self.sort()?.into();
        self.sorted = Some(Arc::clone(&sorted));
        Ok(sorted)
    }

    /// Ends the epoch: its entries, sorted; the memtable is empty.
    pub fn seal(&mut self) -> Result<Arc<[Entries]>, ArrowError> {
        let sorted = self.sorted()?;
        *self = Memtable::new(self.storage, Arc::clone(&self.schema));
        Ok(sorted)
    }

    /// Whether the chunks, one after the other, already are what sorting would make of them.
    fn is_ascending(&self) -> bool {
        if self.storage == RowStorage::Multiset
            && self
                .chunks
                .iter()
                .filter_map(|c| c.weights.as_ref())
                .any(|w| w.values().contains(&0))
        {
            return false;
        }
        let mut last: Option<&[u8]> = None;
        self.chunks.iter().all(|chunk| {
            (0..chunk.len()).all(|row| {
                let key = chunk.keys.value(row);
                last.replace(key).is_none_or(|l| l < key)
            })
        })
    }

    /// Rows that came in key order, as arrivals do, are taken as they are.
    fn as_written(&self) -> Result<Vec<Entries>, ArrowError> {
        self.chunks
            .iter()
            .map(|chunk| {
                let columns = chunk.values.columns().to_vec();
                let values = rebuild(&self.schema, columns, chunk.len())?;
                let weights = chunk.weights.as_ref().and_then(|w| weights_of(w.values()));
                Ok(Entries { values, weights, ..chunk.clone() })
            })
            .collect()
    }

    fn sort(&self) -> Result<Vec<Entries>, ArrowError> {
        if self.rows >= self.chunks.len() * WHOLE_CHUNK_ROWS && self.is_ascending() {
            return self.as_written();
        }
        let order = self.sorted_places();
        let mut picks: Vec<(usize, usize)> = Vec::with_capacity(order.len());
        let mut weights: Vec<i64> = Vec::with_capacity(order.len());
        for place in order {
            let weight = self.chunks[place.0 as usize].weight(place.1 as usize);
            let pick = (place.0 as usize, place.1 as usize);
            let same = picks.last().is_some_and(|&(c, r)| {
                key_at(&self.chunks, (c as u32, r as u32)) == key_at(&self.chunks, place)
            });
            match (same.then(|| picks.len() - 1), self.storage) {
                (Some(last), RowStorage::Multiset) => {
                    weights[last] = weights[last].wrapping_add(weight);
                }
                (Some(last), RowStorage::Keyed | RowStorage::Append) => {
                    picks[last] = pick;
                    weights[last] = weight;
                }
                (None, _) => {
                    picks.push(pick);
                    weights.push(weight);
                }
            }
        }
        if self.storage == RowStorage::Multiset && weights.contains(&0) {
            let keep = |w: &[i64], i: usize| w[i] != 0;
            let mut i = 0;
            picks.retain(|_| {
                i += 1;
                keep(&weights, i - 1)
            });
            weights.retain(|w| *w != 0);
        }
        self.gather(&picks, &weights)
    }

    /// All places, by key and then by arrival.
    fn sorted_places(&self) -> Vec<Place> {
        struct Item {
            head: u128,
            place: Place,
        }
        let mut items = Vec::with_capacity(self.rows);
        for (c, chunk) in self.chunks.iter().enumerate() {
            items.extend((0..chunk.len()).map(|row| Item {
                head: key_head(chunk.keys.value(row)),
                place: (c as u32, row as u32),
            }));
        }
        items.sort_unstable_by(|a, b| {
            a.head
                .cmp(&b.head)
                .then_with(|| {
                    compare_rest(key_at(&self.chunks, a.place), key_at(&self.chunks, b.place))
                })
                .then_with(|| a.place.cmp(&b.place))
        });
        items.into_iter().map(|i| i.place).collect()
    }

    fn gather(
        &self,
        picks: &[(usize, usize)],
        weights: &[i64],
    ) -> Result<Vec<Entries>, ArrowError> {
        picks
            .chunks(RUN_BATCH_ROWS)
            .zip(weights.chunks(RUN_BATCH_ROWS))
            .map(|(picks, weights)| {
                let gather = Gather::new(picks);
                Ok(Entries {
                    keys: gather.keys(&self.chunks)?,
                    weights: weights_of(weights),
                    epochs: Epochs::Uniform(Epoch::ZERO),
                    values: gather.values(&self.schema, &self.chunks)?,
                })
            })
            .collect()
    }
}

fn key_at(chunks: &[Entries], place: Place) -> &[u8] {
    chunks[place.0 as usize].keys.value(place.1 as usize)
}

/// Weights as entries keep them: absent where all are +1.
pub(crate) fn weights_of(weights: &[i64]) -> Option<Int64Array> {
    weights.iter().any(|&w| w != 1).then(|| Int64Array::from(weights.to_vec()))
}
