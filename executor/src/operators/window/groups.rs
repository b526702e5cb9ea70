//! The groups of a window operator by slot, the rows they refer to, and the epoch's changes to them.

use arrow::array::BinaryArray;
use arrow::datatypes::SchemaRef;
use millrace_storage::{Found, Lookup};

use super::rows::Rows;
use crate::error::ExecError;
use crate::operators::ordered::{Change, Changes, Ranked, RowOrder};
use crate::state::arena::RowRef;
use crate::state::{Entries, KeyBytes, KeyTable, RowArena, Slot, StateTable};

/// See the module.
pub struct Groups {
    pub table: Box<dyn StateTable>,
    pub order: RowOrder,
    /// All rows of a group in order, as they were when the epoch began.
    pub of: Vec<Rows>,
    pub arena: RowArena,
    pub pending: Changes,
}

impl Groups {
    pub fn new(table: Box<dyn StateTable>, order: RowOrder, input: SchemaRef) -> Groups {
        let (of, arena, pending) = (Vec::new(), RowArena::new(input), Changes::default());
        Groups { table, order, of, arena, pending }
    }

    /// Writes net changes, given in order.
    pub fn write(
        &mut self,
        changes: &[((Slot, KeyBytes), Change)],
        keys: &KeyTable,
    ) -> Result<(), ExecError> {
        self.order.write(changes, keys, &self.arena, self.table.as_mut())
    }
}

impl Entries for Groups {
    fn ensure(&mut self, capacity: usize) {
        self.of.resize(capacity, Rows::default());
    }

    fn read(&self, _: usize, keys: BinaryArray) -> Lookup {
        self.table.multi_scan(keys, None)
    }

    fn load(&mut self, _: usize, slots: &[Slot], found: &Found) -> Result<(), ExecError> {
        let mut read: Vec<Vec<Ranked>> = slots.iter().map(|_| Vec::new()).collect();
        if !found.is_empty() {
            let keys = self.order.keys(&found.values)?;
            let chunk = self.arena.insert(found.values.clone(), found.len());
            let mut scratch = Vec::with_capacity(64);
            for (row, &input) in found.input.values().iter().enumerate() {
                let order = keys.write(row, &mut scratch);
                let at = RowRef { chunk, row: row as u32 };
                let (key, weight) = (KeyBytes::new(&scratch), found.weights.value(row));
                read[input as usize].push(Ranked { key, order, at, weight });
            }
        }
        for (&slot, rows) in slots.iter().zip(read) {
            self.of[slot as usize] = Rows::from_sorted(rows);
        }
        Ok(())
    }

    fn absent(&mut self, slot: Slot) {
        self.of[slot as usize] = Rows::default();
    }

    fn size(&self, slot: Slot) -> usize {
        let rows = &self.of[slot as usize];
        rows.bytes() + rows.len() * self.arena.row_bytes()
    }

    fn release(&mut self, slot: Slot) -> bool {
        let rows = std::mem::take(&mut self.of[slot as usize]);
        rows.iter().for_each(|r| self.arena.release(r.at));
        rows.len() > 0
    }

    fn held(&self, keys: &KeyTable) -> usize {
        keys.bytes().max(self.arena.bytes()) + self.pending.len() * 64
    }

    /// Rewrites the rows in memory densely; only when nothing else refers to them.
    fn compact(&mut self, _: &KeyTable) -> Result<(), ExecError> {
        if self.pending.is_empty() && self.arena.wants_compaction() {
            let mut refs: Vec<&mut RowRef> = self.of.iter_mut().flat_map(Rows::refs_mut).collect();
            self.arena.compact(&mut refs)?;
        }
        Ok(())
    }
}
