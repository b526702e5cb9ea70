//! One side of a join: its rows in memory by join key, and how they are stored.
//!
//! In memory a row is a node (chunk, row, weight) in a doubly linked list of its key; rows stay in
//! the chunks they came in. An index by row hash finds the row that a retraction takes back; equality
//! is then checked for the whole chunk at once. A retraction that finds nothing (it overtook its insertion)
//! is a node of negative weight, which the insertion cancels.
//!
//! Stored: `join key | identity → row`. Append: identity is a sequence, written at once. Multiset: the
//! whole row, weights written at once and added up by the store. Keyed: the unique key; within an
//! epoch +new may overtake −old of one key, so changes are consolidated and written at the barrier
//! (at once where the join's inputs are append-only; in part earlier where they are many, see [`super::early_flush`]).
//!
//! Rows that only add may be written without their key's rows being in memory (read avoidance);
//! retractions, and everything on a Keyed side that may retract, need them there: the store hides
//! what is negative for a moment, and an overwritten row is gone.

use arrow::array::{Array, ArrayRef, BinaryArray, BinaryBuilder, Int64Array, UInt32Array};
use arrow::datatypes::SchemaRef;
use hashbrown::HashTable;
use millrace_common::collections::HashMap;
use millrace_common::delta::take_rows;
use millrace_common::identity::{RowCodec, hash_rows, negative_zeros};
use millrace_common::keys::canonicalise;
use millrace_common::{DeltaChunk, Vnode};
use millrace_graph::JoinSide;
use millrace_rpc::catalog::RowStorage;
use millrace_storage::Lookup;

use super::early_flush::{ByKey, Held};
use crate::error::ExecError;
use crate::operators::aggregate::differ;
use crate::operators::{Env, nullable};
use crate::sequence::ArrivalSequence;
use crate::state::arena::{RowArena, RowRef, gather_batch, new_batch};
use crate::state::keys::append_storage_key;
use crate::state::{Slot, StateTable};

/// End of a list; no node.
pub const END: u32 = u32::MAX;

/// A row in memory.
#[derive(Clone, Copy)]
pub struct Node {
    pub at: RowRef,
    pub next: u32,
    prev: u32,
    pub slot: Slot,
    pub weight: i64,
    hash: u64,
}

/// What has been emitted for a row of a preserved side.
#[derive(Clone, Copy, Default)]
pub struct MatchState {
    /// Weight of matching rows of the other side (with a residual).
    pub degree: i64,
    /// Weight of rows for which the match is unknown (null-aware).
    pub unknown: i64,
    pub emitted: i64,
    /// The mark it was emitted with.
    pub emitted_as: Option<bool>,
    pub touched: bool,
}

/// The rows of one key.
#[derive(Clone, Copy)]
pub struct List {
    pub head: u32,
    pub len: u32,
    /// All rows of the key are here.
    pub loaded: bool,
    /// Sum of weights.
    pub total: i64,
}

impl Default for List {
    fn default() -> List {
        List { head: END, len: 0, loaded: false, total: 0 }
    }
}

/// Bytes of a node, with its share of the index.
pub const NODE_BYTES: usize = size_of::<Node>() + 8;

/// See the module.
pub struct Side {
    pub table: Box<dyn StateTable>,
    pub arena: RowArena,
    pub nodes: Vec<Node>,
    /// Parallel to `nodes` on a preserved side.
    pub match_states: Vec<MatchState>,
    free: u32,
    preserved: bool,
    storage: RowStorage,
    /// At most one row a key, stored under the key itself: read with a point lookup.
    point: bool,
    /// Rows may be retracted: the index is kept.
    index: Option<HashTable<u32>>,
    /// Nodes of negative weight.
    negatives: usize,
    identity: RowCodec,
    pub(super) row_codec: RowCodec,
    arrivals: ArrivalSequence,
    /// Changes of the epoch of a Keyed side.
    pub(super) held: Vec<Held>,
    /// Those whose keys' stored rows are being read, and these keys.
    pub(super) asked: Vec<Held>,
    pub(super) asked_keys: BinaryArray,
    /// Of what is held and asked.
    pub(super) pending_bytes: usize,
}

impl Side {
    pub fn new(
        side: &JoinSide,
        keys: &[usize],
        schema: &SchemaRef,
        table: Box<dyn StateTable>,
        preserved: bool,
        append_only: bool,
        env: &Env,
    ) -> Result<Side, ExecError> {
        let all: Vec<usize> = (0..schema.fields().len()).collect();
        let others: Vec<usize> = all.iter().copied().filter(|c| !keys.contains(c)).collect();
        let identity = match side.state.storage {
            RowStorage::Keyed => RowCodec::of_values(schema, &side.state.unique_key)?,
            RowStorage::Multiset => RowCodec::of_rows(schema, &others)?,
            RowStorage::Append => RowCodec::of_values(schema, &[])?,
        };
        let indexed = side.state.storage != RowStorage::Append && !append_only;
        Ok(Side {
            table,
            arena: RowArena::new(nullable(schema)),
            nodes: Vec::new(),
            match_states: Vec::new(),
            free: END,
            preserved,
            storage: side.state.storage,
            point: side.state.storage == RowStorage::Keyed
                && identity.is_empty()
                && !keys.is_empty(),
            index: indexed.then(HashTable::new),
            negatives: 0,
            row_codec: RowCodec::whole(schema)?,
            identity,
            arrivals: ArrivalSequence::new(side.state.table, env.vnodes.start, env.first_arrival),
            held: Vec::new(),
            asked: Vec::new(),
            asked_keys: BinaryArray::from_iter_values([[0u8; 0]; 0]),
            pending_bytes: 0,
        })
    }

    /// Whether rows of this weight may be written while their key's rows are not in memory.
    pub fn may_write_blind(&self, weight: i64) -> bool {
        weight > 0 && (self.storage != RowStorage::Keyed || self.index.is_none())
    }

    /// Reads the rows of join keys.
    pub fn read(&self, keys: BinaryArray) -> Lookup {
        self.read_rows(keys, None)
    }

    /// The same, at most so many of each.
    pub fn read_rows(&self, keys: BinaryArray, rows: Option<usize>) -> Lookup {
        if self.point { self.table.multi_get(keys) } else { self.table.multi_scan(keys, rows) }
    }

    pub fn row_bytes(&self) -> usize {
        NODE_BYTES
            + self.arena.row_bytes()
            + if self.preserved { size_of::<MatchState>() } else { 0 }
    }

    pub fn memory_size(&self) -> usize {
        self.arena.bytes()
            + self.nodes.capacity() * NODE_BYTES
            + self.match_states.capacity() * size_of::<MatchState>()
            + self.pending_bytes
    }

    /// Writes a chunk to the state table, or holds it back; `keys` and `slots` are its rows' join keys.
    pub fn store(
        &mut self,
        chunk: &DeltaChunk,
        keys: &[(Vnode, &[u8])],
        slots: &[Slot],
    ) -> Result<(), ExecError> {
        let mut out = BinaryBuilder::with_capacity(keys.len(), keys.len() * 32);
        let mut scratch = Vec::with_capacity(64);
        if self.storage == RowStorage::Append {
            for ((vnode, key), number) in keys.iter().zip(self.arrivals.take(keys.len() as u64)) {
                append_storage_key(&mut out, &mut scratch, *vnode, &[key, &number.to_be_bytes()]);
            }
        } else if self.identity.is_empty() {
            for (vnode, key) in keys {
                append_storage_key(&mut out, &mut scratch, *vnode, &[key]);
            }
        } else {
            let rows = self.identity.rows(chunk.batch.columns(), chunk.num_rows())?;
            for (i, (vnode, key)) in keys.iter().enumerate() {
                append_storage_key(&mut out, &mut scratch, *vnode, &[key, rows.row(i).data()]);
            }
        }
        let keys = out.finish();
        match self.storage {
            RowStorage::Keyed if self.index.is_some() => {
                let held = Held { keys, chunk: chunk.clone(), slots: slots.to_vec() };
                self.pending_bytes += held.bytes();
                self.held.push(held);
                Ok(())
            }
            RowStorage::Append
                if chunk.weights.as_ref().is_some_and(|w| w.values().iter().any(|&w| w != 1)) =>
            {
                self.store_append(keys, chunk)
            }
            _ => self.write(keys, chunk.weights.clone(), chunk.batch.columns()),
        }
    }

    /// Append: a row of weight n is n rows.
    fn store_append(&mut self, keys: BinaryArray, chunk: &DeltaChunk) -> Result<(), ExecError> {
        let mut rows = Vec::new();
        let mut out = BinaryBuilder::new();
        for i in 0..chunk.num_rows() {
            let weight = chunk.weight(i);
            if weight < 0 {
                return Err(ExecError::internal("an append-only side of a join got a retraction"));
            }
            let key = keys.value(i);
            for number in self.arrivals.take(weight as u64) {
                let mut one = key[..key.len() - 8].to_vec();
                one.extend_from_slice(&number.to_be_bytes());
                out.append_value(&one);
                rows.push(i as u32);
            }
        }
        let batch = take_rows(&chunk.batch, &UInt32Array::from(rows))?;
        self.write(out.finish(), None, batch.columns())
    }

    pub(super) fn write(
        &mut self,
        keys: BinaryArray,
        weights: Option<Int64Array>,
        columns: &[ArrayRef],
    ) -> Result<(), ExecError> {
        let rows = keys.len();
        let values = new_batch(&nullable(&self.table.value_schema()), columns.to_vec(), rows)?;
        self.table.write(keys, weights, values)
    }

    /// The barrier: writes what was held back.
    pub fn flush(&mut self) -> Result<(), ExecError> {
        let held = std::mem::take(&mut self.held);
        self.pending_bytes = 0;
        if held.iter().all(|h| h.chunk.weights.is_none()) {
            for Held { keys, chunk, .. } in held {
                self.write(keys, None, chunk.batch.columns())?;
            }
            return Ok(());
        }
        self.flush_consolidated(&held)
    }

    /// One put or delete a key: rows equal in full cancel; of what is left, a row to insert wins.
    fn flush_consolidated(&mut self, held: &[Held]) -> Result<(), ExecError> {
        let by_key = ByKey::new(&self.row_codec, held)?;
        let mut keys = BinaryBuilder::new();
        let (mut picks, mut weights) = (Vec::new(), Vec::new());
        for (key, rows) in &by_key.changes {
            let inserted = rows.iter().find(|r| r.2 > 0);
            let deleted = rows.iter().find(|r| r.2 < 0);
            if let Some(&(c, i, _)) = inserted.or(deleted) {
                keys.append_value(key);
                picks.push((c, i));
                weights.push(i64::from(inserted.is_some()));
            }
        }
        if picks.is_empty() {
            return Ok(());
        }
        let batches: Vec<_> = held.iter().map(|h| &h.chunk.batch).collect();
        let batch = gather_batch(self.arena.schema(), &batches, &picks)?;
        self.write(keys.finish(), Some(weights.into()), batch.columns())
    }

    /// Nodes of negative weight.
    pub(super) fn negatives(&self) -> usize {
        self.negatives
    }

    /// The hash of whole rows, for the index.
    fn row_hashes(&self, chunk: &DeltaChunk) -> Result<Vec<u64>, ExecError> {
        match self.index {
            Some(_) => Ok(hash_rows(chunk.batch.columns(), chunk.num_rows())?),
            None => Ok(vec![0; chunk.num_rows()]),
        }
    }

    /// Links a new node in front of a list.
    pub fn link(&mut self, list: &mut List, slot: Slot, at: RowRef, weight: i64, hash: u64) -> u32 {
        let node = Node { at, next: list.head, prev: END, slot, weight, hash };
        let id = if self.free == END {
            self.nodes.push(node);
            if self.preserved {
                self.match_states.push(MatchState::default());
            }
            (self.nodes.len() - 1) as u32
        } else {
            let id = self.free;
            self.free = self.nodes[id as usize].next;
            self.nodes[id as usize] = node;
            if self.preserved {
                self.match_states[id as usize] = MatchState::default();
            }
            id
        };
        if list.head != END {
            self.nodes[list.head as usize].prev = id;
        }
        list.head = id;
        list.len += 1;
        list.total += weight;
        self.negatives += usize::from(weight < 0);
        let nodes = &self.nodes;
        if let Some(index) = &mut self.index {
            index.insert_unique(hash, id, |&n| nodes[n as usize].hash);
        }
        id
    }

    /// Takes a node out of its list and lets go of its row.
    pub fn unlink(&mut self, list: &mut List, id: u32) {
        let node = self.nodes[id as usize];
        if node.prev == END {
            list.head = node.next;
        } else {
            self.nodes[node.prev as usize].next = node.next;
        }
        if node.next != END {
            self.nodes[node.next as usize].prev = node.prev;
        }
        list.len -= 1;
        list.total -= node.weight;
        self.negatives -= usize::from(node.weight < 0);
        if let Some(index) = &mut self.index
            && let Ok(entry) = index.find_entry(node.hash, |&n| n == id)
        {
            entry.remove();
        }
        self.arena.release(node.at);
        self.nodes[id as usize].next = self.free;
        self.nodes[id as usize].slot = Slot::MAX;
        self.free = id;
    }

    /// Adds to a node's weight.
    pub fn add_weight(&mut self, list: &mut List, id: u32, weight: i64) {
        let node = &mut self.nodes[id as usize];
        self.negatives -= usize::from(node.weight < 0);
        node.weight += weight;
        self.negatives += usize::from(node.weight < 0);
        list.total += weight;
    }

    /// Whether rows of a chunk may have counterparts here to cancel.
    pub fn may_cancel(&self, chunk: &DeltaChunk) -> bool {
        self.index.is_some()
            && (self.negatives > 0
                || chunk.weights.as_ref().is_some_and(|w| w.values().iter().any(|&w| w < 0)))
    }

    /// For rows (chunk row, slot, weight): a node with the same row and opposite sign, if there is
    /// one. Every node is given to one row at most.
    pub fn find_opposites(
        &self,
        chunk: &DeltaChunk,
        hashes: &[u64],
        rows: &[(u32, Slot)],
    ) -> Result<Vec<u32>, ExecError> {
        let mut found = vec![END; rows.len()];
        let Some(index) = &self.index else { return Ok(found) };
        let mut left: HashMap<u32, i64> = HashMap::default();
        let mut candidates: Vec<usize> = Vec::new();
        for (i, &(row, slot)) in rows.iter().enumerate() {
            let weight = chunk.weight(row as usize);
            let hash = hashes[row as usize];
            let opposite = index.find(hash, |&n| {
                let node = &self.nodes[n as usize];
                let remaining = *left.get(&n).unwrap_or(&node.weight);
                node.hash == hash && node.slot == slot && remaining.signum() == -weight.signum()
            });
            if let Some(&n) = opposite {
                *left.entry(n).or_insert(self.nodes[n as usize].weight) += weight;
                found[i] = n;
                candidates.push(i);
            }
        }
        self.verify(chunk, rows, &candidates, &mut found)?;
        Ok(found)
    }

    /// Drops candidates that are not equal in full (a hash collision).
    fn verify(
        &self,
        chunk: &DeltaChunk,
        rows: &[(u32, Slot)],
        candidates: &[usize],
        found: &mut [u32],
    ) -> Result<(), ExecError> {
        if candidates.is_empty() {
            return Ok(());
        }
        let here: Vec<RowRef> =
            candidates.iter().map(|&i| self.nodes[found[i] as usize].at).collect();
        let stored = self.arena.batch(&here)?;
        let indices = UInt32Array::from_iter_values(candidates.iter().map(|&i| rows[i].0));
        let new = take_rows(&chunk.batch, &indices)?;
        for (new, stored) in new.columns().iter().zip(stored.columns()) {
            let differ = differ(&canonicalise(new), &canonicalise(stored))?;
            for i in differ.set_indices() {
                found[candidates[i]] = END;
            }
        }
        let signs = [&new, &stored].map(|b| negative_zeros(b.columns(), b.num_rows()));
        if signs.iter().any(Option::is_some) {
            let [new, stored] = signs.map(|s| s.unwrap_or_else(|| vec![0; candidates.len()]));
            for i in (0..candidates.len()).filter(|&i| new[i] != stored[i]) {
                found[candidates[i]] = END;
            }
        }
        Ok(())
    }

    pub fn hashes(&self, chunk: &DeltaChunk) -> Result<Vec<u64>, ExecError> {
        self.row_hashes(chunk)
    }

    /// Rewrites the arena when it is mostly dead.
    pub fn compact(&mut self) -> Result<(), ExecError> {
        if self.arena.wants_compaction() {
            let live = self.nodes.iter_mut().filter(|n| n.slot != Slot::MAX);
            let mut refs: Vec<&mut RowRef> = live.map(|n| &mut n.at).collect();
            self.arena.compact(&mut refs)?;
        }
        Ok(())
    }

    /// No row is in memory: gives back the places of rows.
    pub fn give_back(&mut self) {
        debug_assert!(self.nodes.iter().all(|node| node.slot == Slot::MAX));
        self.nodes = Vec::new();
        self.match_states = Vec::new();
        self.free = END;
        self.index = self.index.take().map(|_| HashTable::new());
    }

    /// The counter of an append-only side.
    pub fn counter(&self) -> Option<(String, u64)> {
        (self.storage == RowStorage::Append).then(|| self.arrivals.counter())
    }
}
