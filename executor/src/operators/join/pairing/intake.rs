//! Rows enter their own side of a join, in the store and in memory.
//!
//! A row that adds may be written while its key's rows are not in memory. If these are being read ahead it is *noted*:
//! linked into the list that is to be loaded, which then has what was read and what came since.

use arrow::array::UInt32Array;
use millrace_common::delta::take_rows;
use millrace_common::fault_injection::is_planted;
use millrace_common::{DeltaChunk, Vnode};

use super::PairingCore;
use super::match_status::touch_row;
use super::side::END;
use super::work::Work;
use crate::error::ExecError;
use crate::state::Slot;
use crate::state::arena::RowRef;

/// Rows of a key that are noted at most: with more, what is read ahead is dropped.
pub(in crate::operators) const MAX_NOTES: u32 = 256;

impl PairingCore {
    /// Puts rows into their own side, if it is kept, and begins to pair them, if they probe.
    pub(super) fn start(
        &mut self,
        port: usize,
        chunk: DeltaChunk,
        slots: Vec<Slot>,
    ) -> Result<(), ExecError> {
        let nodes = match self.state.entries.rules.keeps[port] {
            true => self.keep(port, &chunk, &slots)?,
            false => vec![END; slots.len()],
        };
        if self.state.entries.rules.probes[port] {
            self.work = Some(Work::new(port, chunk, slots, nodes));
        }
        Ok(())
    }

    /// Puts rows into their own side, in the store and in memory; their nodes where they have new ones.
    fn keep(
        &mut self,
        port: usize,
        chunk: &DeltaChunk,
        slots: &[Slot],
    ) -> Result<Vec<u32>, ExecError> {
        let keys: Vec<(Vnode, &[u8])> =
            slots.iter().map(|&s| (self.state.keys.vnode(s), self.state.keys.key(s))).collect();
        self.state.entries.sides[port].store(chunk, &keys, slots)?;
        self.insert(port, chunk, slots)
    }

    /// The in-memory half of `keep`: new nodes, or weights of existing ones.
    fn insert(
        &mut self,
        port: usize,
        chunk: &DeltaChunk,
        slots: &[Slot],
    ) -> Result<Vec<u32>, ExecError> {
        let mut nodes = vec![END; slots.len()];
        let mut noted = Vec::new();
        let mut loaded = Vec::with_capacity(slots.len());
        for (row, &slot) in slots.iter().enumerate() {
            if !self.state.entries.of[slot as usize].sides[port].loaded {
                if !self.state.is_read_ahead(slot, port)
                    || is_planted("blind-write-during-prefetch-lost")
                {
                    continue;
                }
                noted.push((row, slot));
            }
            loaded.push((row as u32, slot));
        }
        if loaded.is_empty() {
            return Ok(nodes);
        }
        let side = &self.state.entries.sides[port];
        let hashes = side.hashes(chunk)?;
        // Insertions first, so that a retraction in the same chunk finds its row.
        let (plus, minus): (Vec<_>, Vec<_>) =
            loaded.into_iter().partition(|&(row, _)| chunk.weight(row as usize) > 0);
        for rows in [plus, minus] {
            if rows.is_empty() {
                continue;
            }
            let side = &self.state.entries.sides[port];
            let opposite = if side.may_cancel(chunk) {
                side.find_opposites(chunk, &hashes, &rows)?
            } else {
                vec![END; rows.len()]
            };
            self.apply(port, chunk, &hashes, &rows, &opposite, &mut nodes)?;
        }
        for (row, slot) in noted {
            // It may leave before its pairs are made, which do not need it.
            nodes[row] = END;
            if self.state.entries.of[slot as usize].sides[port].len > MAX_NOTES {
                self.state.abandon_ahead(slot, port);
            }
        }
        Ok(nodes)
    }

    fn apply(
        &mut self,
        port: usize,
        chunk: &DeltaChunk,
        hashes: &[u64],
        rows: &[(u32, Slot)],
        opposite: &[u32],
        nodes: &mut [u32],
    ) -> Result<(), ExecError> {
        let preserved = self.state.entries.rules.preserved[port];
        let side = &mut self.state.entries.sides[port];
        let fresh: Vec<(u32, Slot)> =
            rows.iter().zip(opposite).filter(|(_, n)| **n == END).map(|(r, _)| *r).collect();
        if !fresh.is_empty() {
            let whole = fresh.len() * 2 > chunk.num_rows();
            let batch = if whole {
                chunk.batch.clone()
            } else {
                let indices = UInt32Array::from_iter_values(fresh.iter().map(|r| r.0));
                take_rows(&chunk.batch, &indices)?
            };
            let id = side.arena.insert(batch, fresh.len());
            for (i, &(row, slot)) in fresh.iter().enumerate() {
                let at = RowRef { chunk: id, row: if whole { row } else { i as u32 } };
                let list = &mut self.state.entries.of[slot as usize].sides[port];
                let weight = chunk.weight(row as usize);
                nodes[row as usize] = side.link(list, slot, at, weight, hashes[row as usize]);
            }
        }
        for (&(row, slot), &node) in rows.iter().zip(opposite) {
            let weight = chunk.weight(row as usize);
            let list = &mut self.state.entries.of[slot as usize].sides[port];
            let touched = if node == END { nodes[row as usize] } else { node };
            if node != END {
                side.add_weight(list, node, weight);
                if side.nodes[node as usize].weight == 0 && !preserved {
                    side.unlink(list, node);
                }
            }
            if preserved {
                touch_row(side, &mut self.touched_rows[port], touched);
            }
            // What the store cannot show for a moment, or does not have yet, must stay in memory.
            if weight < 0 || !side.may_write_blind(weight) || preserved {
                self.state.keys.mark_dirty(slot);
            }
        }
        for &(_, slot) in rows {
            self.state.resize(slot);
        }
        Ok(())
    }
}
