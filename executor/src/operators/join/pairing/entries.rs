//! What a join keeps for its keys: for each side a list of rows, and what has been emitted of them.

use arrow::array::{Array, AsArray, BinaryArray, UInt32Array};
use arrow::compute::take;
use arrow::datatypes::{Int64Type, UInt32Type};
use millrace_common::DeltaChunk;
use millrace_common::delta::take_rows;
use millrace_storage::{Found, Lookup};

use super::super::policy::Rules;
use super::pairs::Condition;
use super::side::{END, List, Side};
use crate::error::ExecError;
use crate::operators::times_of;
use crate::state::arena::RowRef;
use crate::state::keyed::{Met, Missing, MostMet};
use crate::state::{Entries, KeyTable, Slot};

/// State of a join key.
#[derive(Clone, Copy, Default)]
pub struct Entry {
    pub sides: [List; 2],
    /// Whether rows of a preserved side were last emitted as having matches (no residual).
    pub matched: [bool; 2],
    /// In the list of keys to settle.
    pub touched: bool,
}

/// See the module. The table of a side has its number.
pub struct JoinEntries {
    pub rules: Rules,
    pub sides: [Side; 2],
    pub condition: Option<Condition>,
    pub left_width: usize,
    pub chunk_rows: usize,
    pub of: Vec<Entry>,
    /// Column and bound of a side: rows below are never met again.
    pub bounds: [Option<(usize, i64)>; 2],
}

impl Entries for JoinEntries {
    const IS_PARTIAL: bool = true;
    const TAKES_NOTES: bool = true;

    fn ensure(&mut self, capacity: usize) {
        self.of.resize(capacity, Entry::default());
    }

    /// A row needs the other side if it is paired. It needs its own side if its place there matters now: not if it
    /// is not kept, or if it may be written blind and no match state has to be derived.
    fn missing(&self, slot: Slot, _: bool, port: usize, weight: i64) -> Missing {
        let own = self.rules.keeps[port]
            && (self.rules.is_any_preserved() || !self.sides[port].may_write_blind(weight));
        let other = self.rules.probes[port];
        let lists = &self.of[slot as usize].sides;
        let mut missing = [false; 2];
        missing[port] = own && !lists[port].loaded;
        missing[1 - port] = other && !lists[1 - port].loaded;
        missing
    }

    fn read(&self, side: usize, keys: BinaryArray) -> Lookup {
        self.sides[side].read(keys)
    }

    fn read_ahead(&self, side: usize, keys: BinaryArray, rows: usize) -> Lookup {
        self.sides[side].read_rows(keys, Some(rows))
    }

    /// Notes are the only rows of a list that is not loaded.
    fn forget_notes(&mut self, at: usize, slot: Slot) {
        let list = &mut self.of[slot as usize].sides[at];
        while !list.loaded && list.head != END {
            let head = list.head;
            self.sides[at].unlink(list, head);
        }
    }

    fn within_bound(&self, side: usize, found: Found) -> Result<Found, ExecError> {
        let Some((column, bound)) = self.bounds[side] else { return Ok(found) };
        let times = times_of(found.values.column(column))?;
        let is_kept = |row: usize| times.is_null(row) || times.value(row) >= bound;
        let kept: Vec<u32> = (0..found.len()).filter(|&r| is_kept(r)).map(|r| r as u32).collect();
        if kept.len() == found.len() {
            return Ok(found);
        }
        let kept = UInt32Array::from(kept);
        Ok(Found {
            input: take(&found.input, &kept, None)?.as_primitive::<UInt32Type>().clone(),
            keys: take(&found.keys, &kept, None)?.as_binary::<i32>().clone(),
            weights: take(&found.weights, &kept, None)?.as_primitive::<Int64Type>().clone(),
            values: take_rows(&found.values, &kept)?,
        })
    }

    /// Rows that were noted while they were read ahead are linked already.
    fn load(&mut self, at: usize, slots: &[Slot], found: &Found) -> Result<(), ExecError> {
        let side = &mut self.sides[at];
        for &slot in slots {
            self.of[slot as usize].sides[at].loaded = true;
        }
        if found.is_empty() {
            return Ok(());
        }
        let hashes = side.hashes(&DeltaChunk::inserts(found.values.clone()))?;
        let chunk = side.arena.insert(found.values.clone(), found.len());
        for (row, &input) in found.input.values().iter().enumerate() {
            let slot = slots[input as usize];
            let list = &mut self.of[slot as usize].sides[at];
            let at = RowRef { chunk, row: row as u32 };
            side.link(list, slot, at, found.weights.value(row), hashes[row]);
        }
        Ok(())
    }

    fn complete(&mut self, slots: &[Slot]) -> Result<(), ExecError> {
        if self.rules.is_any_preserved() { self.restore_marks(slots) } else { Ok(()) }
    }

    fn met(
        &self,
        port: usize,
        slots: &[Slot],
        most: &MostMet,
        columns: &[usize],
    ) -> Result<Met, ExecError> {
        let side = &self.sides[1 - port];
        let (mut of, mut rows) = (Vec::new(), Vec::new());
        for (i, &slot) in (0u32..).zip(slots) {
            let list = &self.of[slot as usize].sides[1 - port];
            let mut at = if list.loaded { list.head } else { END };
            let end = of.len() + most.rows;
            while at != END && of.len() < end {
                let node = &side.nodes[at as usize];
                if node.weight > 0 {
                    of.push(i);
                    rows.push(node.at);
                }
                at = node.next;
            }
        }
        let all = rows.len();
        side.arena.keep_fitting(&mut rows, &mut of, columns, most.bytes);
        let columns =
            if rows.is_empty() { Vec::new() } else { side.arena.gather(&rows, columns)? };
        Ok(Met { of, columns, dropped: all - rows.len() })
    }

    fn absent(&mut self, slot: Slot) {
        self.of[slot as usize].sides.iter_mut().for_each(|list| list.loaded = true);
    }

    fn size(&self, slot: Slot) -> usize {
        let lists = self.of[slot as usize].sides.iter().zip(&self.sides);
        let rows: usize = lists.map(|(list, side)| list.len as usize * side.row_bytes()).sum();
        rows + size_of::<Entry>()
    }

    fn release(&mut self, slot: Slot) -> bool {
        let entry = &mut self.of[slot as usize];
        let mut any = false;
        for (side, list) in self.sides.iter_mut().zip(&mut entry.sides) {
            any |= !list.loaded || list.len > 0;
            while list.head != END {
                let head = list.head;
                side.unlink(list, head);
            }
        }
        *entry = Entry::default();
        any
    }

    fn held(&self, keys: &KeyTable) -> usize {
        keys.bytes().max(self.sides.iter().map(Side::memory_size).sum())
    }

    fn give_back(&mut self) {
        self.of = Vec::new();
        self.sides.iter_mut().for_each(Side::give_back);
    }

    fn compact(&mut self, _: &KeyTable) -> Result<(), ExecError> {
        self.sides.iter_mut().try_for_each(Side::compact)
    }
}
