//! How often each value of a group occurs, by `group | value`: the entries of a value table's keyed state.
//!
//! A count that has been read stays in memory from epoch to epoch, as far as the cache's budget goes. The epoch's
//! changes stand beside the counts until the barrier applies them: an entry with a change is dirty and stays.

use arrow::array::BinaryArray;
use millrace_storage::{Found, Lookup};

use crate::error::ExecError;
use crate::state::{Entries, KeyTable, Slot, StateTable};

/// Bytes of an entry's columns.
const CONTENT: usize = 2 * size_of::<i64>() + size_of::<Slot>();

/// Counts in columns indexed by slot. See the module.
pub struct ValueCounts {
    pub table: Box<dyn StateTable>,
    /// When the epoch began.
    pub counts: Vec<i64>,
    /// The epoch's changes.
    pub deltas: Vec<i64>,
    /// The group of each dirty entry.
    pub groups: Vec<Slot>,
}

impl ValueCounts {
    pub fn new(table: Box<dyn StateTable>) -> ValueCounts {
        ValueCounts { table, counts: Vec::new(), deltas: Vec::new(), groups: Vec::new() }
    }
}

impl Entries for ValueCounts {
    fn ensure(&mut self, capacity: usize) {
        self.counts.resize(capacity, 0);
        self.deltas.resize(capacity, 0);
        self.groups.resize(capacity, 0);
    }

    fn give_back(&mut self) {
        (self.counts, self.deltas, self.groups) = Default::default();
    }

    fn read(&self, _: usize, keys: BinaryArray) -> Lookup {
        self.table.multi_get(keys)
    }

    fn load(&mut self, _: usize, slots: &[Slot], found: &Found) -> Result<(), ExecError> {
        slots.iter().for_each(|&slot| self.counts[slot as usize] = 0);
        for (i, &input) in found.input.values().iter().enumerate() {
            self.counts[slots[input as usize] as usize] = found.weights.value(i);
        }
        Ok(())
    }

    fn absent(&mut self, slot: Slot) {
        self.counts[slot as usize] = 0;
    }

    fn size(&self, _: Slot) -> usize {
        CONTENT
    }

    fn release(&mut self, slot: Slot) -> bool {
        self.counts[slot as usize] != 0
    }

    /// Of entries that may leave. Those with a change stay until the barrier and are accounted for as changes.
    fn held(&self, keys: &KeyTable) -> usize {
        keys.bytes() - dirty_bytes(keys)
    }
}

/// Bytes of the entries with a change, as many as they are of all.
pub fn dirty_bytes(keys: &KeyTable) -> usize {
    let share = keys.dirty().len() as f64 / keys.len().max(1) as f64;
    (keys.bytes() as f64 * share) as usize
}
