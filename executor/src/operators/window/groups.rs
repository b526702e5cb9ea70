//! The groups of a window operator by slot, the rows they refer to, and the epoch's changes to them.

use arrow::array::BinaryArray;
use arrow::datatypes::SchemaRef;
use millrace_storage::{Found, Lookup};

use super::rows::Rows;
use crate::error::ExecError;
use crate::operators::ordered::{Changes, Listed, Ranked, RowOrder};
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
    pub fn write(&mut self, changes: &[Listed], keys: &KeyTable) -> Result<(), ExecError> {
        self.order.write(changes, keys, &self.arena, self.table.as_mut())
    }

    /// Of changes in the middle of an epoch, those that can be made; the others are noted again.
    pub fn settled(&mut self, changes: Vec<Listed>) -> Vec<Listed> {
        let Groups { order, of, pending, .. } = self;
        let mut is_settled = Vec::with_capacity(changes.len());
        for versions in order.by_stored(&changes) {
            let Some(((slot, key), _)) = versions.first() else { continue };
            let rows = &of[*slot as usize];
            let stored = order.stored(key);
            let from = rows.partition_point(|r| order.stored(&r.key) < stored);
            let now: Vec<(&[u8], i64)> = (rows.after(from))
                .take_while(|r| order.stored(&r.key) == stored)
                .map(|r| (&r.key[..], r.weight))
                .collect();
            let is_changed = |key: &[u8]| versions.iter().any(|((_, k), _)| k[..] == *key);
            let others = now.iter().filter(|(key, _)| !is_changed(key)).count();
            let weight = |key: &[u8]| now.iter().find(|(k, _)| *k == key).map_or(0, |n| n.1);
            let settled = order.is_settled(versions, weight, others);
            is_settled.extend(std::iter::repeat_n(settled, versions.len()));
        }
        let mut settled = Vec::with_capacity(changes.len());
        for ((place, change), is) in changes.into_iter().zip(is_settled) {
            match is {
                true => settled.push((place, change)),
                // Alone at its place: no reference is given back.
                false => drop(pending.add(place, change)),
            }
        }
        settled
    }
}

impl Entries for Groups {
    fn ensure(&mut self, capacity: usize) {
        self.of.resize(capacity, Rows::default());
    }

    fn give_back(&mut self) {
        self.of = Vec::new();
    }

    fn read(&self, _: usize, keys: BinaryArray) -> Lookup {
        self.table.multi_scan(keys, None)
    }

    fn read_ahead(&self, _: usize, keys: BinaryArray, rows: usize) -> Lookup {
        self.table.multi_scan(keys, Some(rows))
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
        let pending = self.pending.len() * self.arena.row_bytes();
        keys.bytes().max(self.arena.bytes().saturating_sub(pending))
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
