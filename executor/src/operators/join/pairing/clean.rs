//! Rows that no later row can meet leave the cache, as they leave the store (docs/design.md §5, pass 6).
//!
//! Where the time is a column of the join key, whole keys go. Where it is bound by an interval only, the
//! rows of a key go one by one; they are looked through when as many have come as there were left the last
//! time, so that a row is looked at a bounded number of times on average.

use arrow::array::Array;
use millrace_common::access::RetentionBy;
use millrace_graph::JoinSide;

use super::PairingCore;
use super::side::END;
use crate::error::ExecError;
use crate::operators::times_of;
use crate::state::Slot;
use crate::state::arena::RowRef;

/// Rows in memory below which nobody looks.
const FEW: usize = 1_024;

/// How far each side is cleaned.
pub struct Cleaning {
    tables: [usize; 2],
    keys: [Vec<usize>; 2],
    /// Column and bound of a side.
    pub bounds: [Option<(usize, i64)>; 2],
    /// Rows that were left on each side.
    left: [usize; 2],
}

impl Cleaning {
    pub fn new(sides: [&JoinSide; 2]) -> Cleaning {
        Cleaning {
            tables: sides.map(|side| side.state.table),
            keys: sides.map(|side| side.keys.clone()),
            bounds: [None, None],
            left: [0, 0],
        }
    }

    pub fn raise(&mut self, table: usize, by: RetentionBy, bound: i64) {
        for side in 0..2 {
            if let (true, RetentionBy::Value(column)) = (self.tables[side] == table, by) {
                self.bounds[side] = Some((column, bound));
            }
        }
    }

    /// The key column that both sides are cleaned by, and how far.
    fn by_key(&self) -> Option<(usize, i64)> {
        let [Some((l, l_bound)), Some((r, r_bound))] = self.bounds else { return None };
        let at = self.keys[0].iter().zip(&self.keys[1]).position(|k| k == (&l, &r))?;
        Some((at, l_bound.min(r_bound)))
    }
}

impl PairingCore {
    /// At a barrier, when everything is written.
    pub(super) fn clean(&mut self) -> Result<(), ExecError> {
        match self.cleaning.by_key() {
            Some((at, bound)) => {
                self.state.close(at, bound);
                self.state.sweep()?;
            }
            None => {
                for side in 0..2 {
                    if let Some((column, bound)) = self.cleaning.bounds[side] {
                        self.clean_side(side, column, bound)?;
                    }
                }
            }
        }
        self.state.compact()
    }

    fn clean_side(&mut self, port: usize, column: usize, bound: i64) -> Result<(), ExecError> {
        let side = &mut self.state.entries.sides[port];
        let live = side.nodes.iter().enumerate().filter(|(_, n)| n.slot != Slot::MAX);
        let live: Vec<(u32, RowRef)> = live.map(|(i, n)| (i as u32, n.at)).collect();
        if live.len() < FEW.max(self.cleaning.left[port] * 2) {
            return Ok(());
        }
        let rows: Vec<RowRef> = live.iter().map(|n| n.1).collect();
        let columns = side.arena.gather(&rows, &[column])?;
        let times = times_of(&columns[0])?;
        let mut left = live.len();
        for (i, (node, _)) in live.into_iter().enumerate() {
            if times.is_null(i) || times.value(i) >= bound {
                continue;
            }
            let slot = self.state.entries.sides[port].nodes[node as usize].slot;
            let list = &mut self.state.entries.of[slot as usize].sides[port];
            self.state.entries.sides[port].unlink(list, node);
            self.state.resize(slot);
            left -= 1;
            let entry = &self.state.entries.of[slot as usize];
            if self.state.keys.is_complete() && entry.sides.iter().all(|l| l.head == END) {
                self.state.remove(slot);
            }
        }
        self.cleaning.left[port] = left;
        Ok(())
    }
}
