//! Large epochs in a join: writing what a Keyed side holds back, and unpinning entries, before
//! the barrier.
//!
//! A Keyed side's changes wait for the barrier because within an epoch the new row of a key may overtake the
//! old one. When they have grown large, the stored rows of their keys are read, in one batch: a change
//! that leaves a key with at most one row, given what is stored, is complete so far and is written; any other
//! one waits on. Keys that wait, or whose rows in memory have negative weights, stay pinned; all others
//! may leave memory, since the store now says the same of them.

use arrow::array::{Array, BinaryArray, BinaryBuilder, UInt32Array};
use arrow::row::Rows;
use millrace_common::DeltaChunk;
use millrace_common::collections::HashMap;
use millrace_common::delta::take_rows;
use millrace_common::identity::RowCodec;
use millrace_storage::{Found, Lookup};

use super::super::emitter::Emitter;
use super::PairingCore;
use super::side::Side;
use crate::error::ExecError;
use crate::materialize::take_binary;
use crate::operator::Output;
use crate::state::Slot;
use crate::state::arena::{batch_bytes, gather_batch};

/// Changes of a Keyed side that are not written yet.
pub(super) struct Held {
    /// Storage keys.
    pub keys: BinaryArray,
    pub chunk: DeltaChunk,
    /// Of the join keys.
    pub slots: Vec<Slot>,
}

impl Held {
    pub fn bytes(&self) -> usize {
        batch_bytes(&self.chunk.batch) + self.slots.len() * size_of::<Slot>()
    }
}

/// Changes by storage key: rows equal in full are added up, and those that cancel are left out.
pub(super) struct ByKey<'a> {
    /// Whole rows, by piece.
    rows: Vec<Rows>,
    /// (piece, row, weight).
    pub changes: HashMap<&'a [u8], Vec<(usize, usize, i64)>>,
}

impl<'a> ByKey<'a> {
    pub fn new(codec: &RowCodec, held: &'a [Held]) -> Result<ByKey<'a>, ExecError> {
        let rows = held.iter().map(|h| codec.rows(h.chunk.batch.columns(), h.chunk.num_rows()));
        let rows: Vec<Rows> = rows.collect::<Result<_, _>>()?;
        let mut changes: HashMap<&[u8], Vec<(usize, usize, i64)>> = HashMap::default();
        for (piece, h) in held.iter().enumerate() {
            for i in 0..h.keys.len() {
                let of_key = changes.entry(h.keys.value(i)).or_default();
                let (row, weight) = (rows[piece].row(i), h.chunk.weight(i));
                match of_key.iter_mut().find(|(p, r, _)| rows[*p].row(*r) == row) {
                    Some(same) => same.2 += weight,
                    None => of_key.push((piece, i, weight)),
                }
            }
        }
        changes.values_mut().for_each(|of_key| of_key.retain(|c| c.2 != 0));
        Ok(ByKey { rows, changes })
    }

    /// What a key's change makes of its stored row, if that leaves at most one row: the row to put
    /// (piece, row, true), or one to delete (…, false). `Err`: the rest of the change is still to come.
    fn outcome(
        &self,
        of_key: &[(usize, usize, i64)],
        stored: Option<arrow::row::Row<'_>>,
    ) -> Result<Option<(usize, usize, bool)>, Unsettled> {
        let mut put = None;
        let mut taken = None;
        for &(piece, row, weight) in of_key {
            let place = match weight {
                1 => &mut put,
                -1 => &mut taken,
                _ => return Err(Unsettled),
            };
            if place.replace((piece, row)).is_some() {
                return Err(Unsettled);
            }
        }
        let is_stored = |(p, r): (usize, usize)| stored.is_some_and(|s| s == self.rows[p].row(r));
        match (taken, put) {
            (None, None) => Ok(None),
            (None, Some((p, r))) if stored.is_none() => Ok(Some((p, r, true))),
            (Some(old), Some((p, r))) if is_stored(old) => Ok(Some((p, r, true))),
            (Some(old), None) if is_stored(old) => Ok(Some((old.0, old.1, false))),
            _ => Err(Unsettled),
        }
    }
}

struct Unsettled;

impl Side {
    /// Takes what is held back aside and asks for the stored rows of its keys; `None`: nothing is held.
    pub(super) fn ask_stored(&mut self) -> Result<Option<Lookup>, ExecError> {
        self.asked.append(&mut self.held);
        if self.asked.is_empty() {
            return Ok(None);
        }
        let by_key = ByKey::new(&self.row_codec, &self.asked)?;
        let mut keys: Vec<&[u8]> = by_key.changes.keys().copied().collect();
        keys.sort_unstable();
        let keys = BinaryArray::from_iter_values(keys);
        self.asked_keys = keys.clone();
        Ok(Some(self.table.multi_get(keys)))
    }

    /// Writes what is settled, given the stored rows of the keys that were asked for; the rest is held on.
    pub(super) fn write_settled(&mut self, found: &Found) -> Result<(), ExecError> {
        let asked = std::mem::take(&mut self.asked);
        let keys =
            std::mem::replace(&mut self.asked_keys, BinaryArray::from_iter_values([[0u8; 0]; 0]));
        let by_key = ByKey::new(&self.row_codec, &asked)?;
        let stored_rows = self.row_codec.rows(found.values.columns(), found.len())?;
        let mut stored: Vec<Option<usize>> = vec![None; keys.len()];
        for (row, &input) in found.input.values().iter().enumerate() {
            stored[input as usize] = Some(row);
        }
        let mut out = BinaryBuilder::new();
        let (mut picks, mut weights) = (Vec::new(), Vec::new());
        let mut waiting: Vec<Vec<u32>> = vec![Vec::new(); asked.len()];
        for (key, stored) in keys.iter().flatten().zip(stored) {
            let Some(of_key) = by_key.changes.get(key) else { continue };
            match by_key.outcome(of_key, stored.map(|row| stored_rows.row(row))) {
                Ok(None) => {}
                Ok(Some((piece, row, put))) => {
                    out.append_value(key);
                    picks.push((piece, row));
                    weights.push(i64::from(put));
                }
                // Added up they are what they were one by one.
                Err(Unsettled) => of_key.iter().for_each(|c| waiting[c.0].push(c.1 as u32)),
            }
        }
        if !picks.is_empty() {
            let batches: Vec<_> = asked.iter().map(|h| &h.chunk.batch).collect();
            let batch = gather_batch(self.arena.schema(), &batches, &picks)?;
            self.write(out.finish(), Some(weights.into()), batch.columns())?;
        }
        let net = net_weights(&by_key, &waiting);
        for ((h, rows), weights) in asked.iter().zip(waiting).zip(net) {
            if !rows.is_empty() {
                self.held.push(part(h, rows, weights)?);
            }
        }
        self.pending_bytes = self.held.iter().map(Held::bytes).sum();
        Ok(())
    }

    /// Join keys that must stay in memory: of changes that wait, and of rows with negative weights.
    pub(super) fn pinned(&self) -> Vec<Slot> {
        let mut slots: Vec<Slot> = self.held.iter().flat_map(|h| h.slots.iter().copied()).collect();
        if self.negatives() > 0 {
            let negative = self.nodes.iter().filter(|n| n.slot != Slot::MAX && n.weight < 0);
            slots.extend(negative.map(|n| n.slot));
        }
        slots
    }
}

/// Weights of the rows that wait, added up.
fn net_weights(by_key: &ByKey<'_>, waiting: &[Vec<u32>]) -> Vec<Vec<i64>> {
    let mut of: HashMap<(usize, usize), i64> = HashMap::default();
    for &(piece, row, weight) in by_key.changes.values().flatten() {
        of.insert((piece, row), weight);
    }
    let weight = |piece: usize, row: u32| of.get(&(piece, row as usize)).copied().unwrap_or(0);
    let piece = |(p, rows): (usize, &Vec<u32>)| rows.iter().map(|&r| weight(p, r)).collect();
    waiting.iter().enumerate().map(piece).collect()
}

fn part(h: &Held, rows: Vec<u32>, weights: Vec<i64>) -> Result<Held, ExecError> {
    let slots = rows.iter().map(|&r| h.slots[r as usize]).collect();
    let rows = UInt32Array::from(rows);
    let batch = take_rows(&h.chunk.batch, &rows)?;
    let chunk = DeltaChunk::new(batch, Some(weights.into()));
    Ok(Held { keys: take_binary(&h.keys, &rows)?, chunk, slots })
}

/// When a join ends an epoch's part early.
pub(super) struct FlushThresholds {
    /// Bytes held back beyond which it does.
    held_at: usize,
    /// Bytes of the cache that could not be evicted beyond which it does.
    pinned_at: usize,
}

impl FlushThresholds {
    pub fn new(held_at: usize, pinned_at: usize) -> FlushThresholds {
        FlushThresholds { held_at, pinned_at }
    }
}

impl PairingCore {
    fn held_bytes(&self) -> usize {
        self.state.entries.sides.iter().map(|s| s.pending_bytes).sum()
    }

    /// Whether so much waits for the barrier that memory should not wait for it too.
    pub(super) fn wants_early_flush(&self) -> bool {
        self.held_bytes() > self.flush_thresholds.held_at
            || self.state.pinned() > self.flush_thresholds.pinned_at
    }

    /// Nothing is parked, being read or half paired: asks what the early flush has to know.
    pub(super) fn begin_early_flush(
        &mut self,
        emitter: &Emitter,
        out: &mut Output,
    ) -> Result<(), ExecError> {
        self.update_match_status(emitter, out)?;
        for port in 0..2 {
            let Some(lookup) = self.state.entries.sides[port].ask_stored()? else { continue };
            match self.stored_reads.submit(port, lookup)? {
                Some((port, found)) => self.state.entries.sides[port].write_settled(&found)?,
                None => self.env.metrics.fetch_rounds.add(1),
            }
        }
        if self.stored_reads.is_empty() { self.end_early_flush() } else { Ok(()) }
    }

    /// Waits for an answer. Cancel-safe.
    pub(super) async fn continue_early_flush(&mut self) -> Result<(), ExecError> {
        for (port, found) in self.stored_reads.completed().await? {
            self.state.entries.sides[port].write_settled(&found)?;
        }
        if self.stored_reads.is_empty() { self.end_early_flush() } else { Ok(()) }
    }

    fn end_early_flush(&mut self) -> Result<(), ExecError> {
        let pinned: Vec<Slot> = self.state.entries.sides.iter().flat_map(Side::pinned).collect();
        self.state.keys.take_dirty();
        for slot in pinned {
            self.state.keys.mark_dirty(slot);
        }
        self.state.unpin();
        self.make_room()?;
        // What could not be helped must not be tried again and again.
        let options = &self.env.options;
        self.flush_thresholds.held_at = options.group_change_bytes.max(2 * self.held_bytes());
        self.flush_thresholds.pinned_at = options.cache_bytes.max(2 * self.state.pinned());
        Ok(())
    }

    /// The epoch has ended: nothing is held back.
    pub(super) fn reset_flush_thresholds(&mut self) {
        let options = &self.env.options;
        self.flush_thresholds =
            FlushThresholds::new(options.group_change_bytes, options.cache_bytes);
    }
}
