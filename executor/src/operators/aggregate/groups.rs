//! What an aggregate keeps for its groups: row counts and accumulators in columns indexed by slot.

use arrow::array::{ArrayRef, AsArray, BinaryArray, Int64Array, UInt32Array};
use arrow::buffer::BooleanBuffer;
use arrow::datatypes::{DataType, Int64Type, SchemaRef};
use millrace_common::delta::take_rows;
use millrace_common::fault_injection::is_planted;
use millrace_storage::{Found, Lookup};

use super::accumulator::Accumulator;
use super::value_tables::ValueTables;
use crate::error::ExecError;
use crate::state::arena::new_batch;
use crate::state::keys::storage_keys;
use crate::state::{Entries, KeyTable, Slot, StateTable};

/// See the module.
pub struct Groups {
    pub table: Box<dyn StateTable>,
    schema: SchemaRef,
    /// Group columns: a value of the table begins with them.
    width: usize,
    /// Input rows of each group.
    pub rows: Vec<i64>,
    /// Whether its row has been emitted.
    pub emitted: Vec<bool>,
    /// Whether the state table has a row of it.
    written: Vec<bool>,
    pub accumulators: Vec<Accumulator>,
    pub values: ValueTables,
    slot_bytes: usize,
    /// Groups hold more than that, each as much as it does.
    is_variable: bool,
}

impl Groups {
    pub fn new(
        table: Box<dyn StateTable>,
        width: usize,
        accumulators: Vec<Accumulator>,
        values: ValueTables,
    ) -> Groups {
        Groups {
            schema: table.value_schema(),
            table,
            width,
            rows: Vec::new(),
            emitted: Vec::new(),
            written: Vec::new(),
            is_variable: accumulators.iter().any(Accumulator::is_variable) || !values.is_none(),
            slot_bytes: 9 + accumulators.iter().map(Accumulator::slot_bytes).sum::<usize>(),
            accumulators,
            values,
        }
    }

    /// State rows of the slots: put where the group exists, deleted where it no longer does.
    pub fn write(
        &mut self,
        keys: &KeyTable,
        slots: &[Slot],
        groups: Vec<ArrayRef>,
        exists: &BooleanBuffer,
        barrier: bool,
    ) -> Result<(), ExecError> {
        let columns = self.columns(slots, groups)?;
        let mut weights = Vec::with_capacity(slots.len());
        let mut kept = Vec::with_capacity(slots.len());
        for (i, &slot) in slots.iter().enumerate() {
            if self.rows[slot as usize] < 0 && barrier {
                return Err(ExecError::internal("a group has more retractions than rows"));
            }
            // Between barriers, where a retraction has overtaken its row, a group may have a negative number of
            // rows, or none and sums that are not zero: what it holds must not be lost then.
            let put = exists.value(i)
                || self.rows[slot as usize] != 0
                || (!barrier && self.holds_something(slot));
            if put || self.written[slot as usize] {
                kept.push(i as u32);
                weights.push(i64::from(put));
            }
            self.written[slot as usize] = put;
            self.emitted[slot as usize] = exists.value(i);
        }
        if !barrier && is_planted("stale-cache-fill") {
            return Ok(());
        }
        let keys = storage_keys(kept.iter().map(|&i| {
            let slot = slots[i as usize];
            (keys.vnode(slot), keys.key(slot))
        }));
        let mut values = new_batch(&self.schema, columns, slots.len())?;
        if kept.len() < slots.len() {
            values = take_rows(&values, &UInt32Array::from(kept))?;
        }
        self.table.write(keys, Some(weights.into()), values)
    }

    /// The columns of the slots' state rows.
    fn columns(&self, slots: &[Slot], groups: Vec<ArrayRef>) -> Result<Vec<ArrayRef>, ExecError> {
        let mut columns = groups;
        let rows = Int64Array::from_iter_values(slots.iter().map(|&s| self.rows[s as usize]));
        columns.push(std::sync::Arc::new(rows));
        for accumulator in &self.accumulators {
            let from = columns.len();
            let types: Vec<DataType> = (from..from + accumulator.width())
                .map(|c| self.schema.field(c).data_type().clone())
                .collect();
            columns.extend(accumulator.store(slots, &types)?);
        }
        Ok(columns)
    }

    /// Groups are of different sizes, which change with what they hold.
    pub fn is_variable(&self) -> bool {
        self.is_variable
    }

    fn holds_something(&self, slot: Slot) -> bool {
        !self.accumulators.iter().all(|a| a.is_blank(slot as usize))
    }
}

impl Entries for Groups {
    fn ensure(&mut self, capacity: usize) {
        self.rows.resize(capacity, 0);
        self.emitted.resize(capacity, false);
        self.written.resize(capacity, false);
        self.accumulators.iter_mut().for_each(|a| a.ensure(capacity));
    }

    fn give_back(&mut self) {
        (self.rows, self.emitted, self.written) = Default::default();
        self.accumulators.iter_mut().for_each(|a| a.ensure(0));
    }

    fn read(&self, _: usize, keys: BinaryArray) -> Lookup {
        self.table.multi_get(keys)
    }

    fn load(&mut self, _: usize, slots: &[Slot], found: &Found) -> Result<(), ExecError> {
        let mut is_present = vec![false; slots.len()];
        found.input.values().iter().for_each(|&i| is_present[i as usize] = true);
        for (&slot, _) in slots.iter().zip(is_present).filter(|(_, present)| !present) {
            self.absent(slot);
        }
        let present: Vec<Slot> = found.input.values().iter().map(|&i| slots[i as usize]).collect();
        let columns = found.values.columns();
        let mut at = self.width;
        let rows = columns.get(at).and_then(|c| c.as_primitive_opt::<Int64Type>());
        let rows = rows.ok_or_else(|| ExecError::internal("a group without its row count"))?;
        for (i, &slot) in present.iter().enumerate() {
            self.rows[slot as usize] = rows.value(i);
            self.emitted[slot as usize] = self.width == 0 || rows.value(i) > 0;
            self.written[slot as usize] = true;
        }
        at += 1;
        for accumulator in &mut self.accumulators {
            accumulator.load(&present, &columns[at..at + accumulator.width()])?;
            at += accumulator.width();
        }
        Ok(())
    }

    fn absent(&mut self, slot: Slot) {
        self.rows[slot as usize] = 0;
        self.emitted[slot as usize] = false;
        self.written[slot as usize] = false;
        self.accumulators.iter_mut().for_each(|a| a.reset(slot as usize));
        self.values.created(slot);
    }

    fn size(&self, slot: Slot) -> usize {
        if !self.is_variable {
            return self.slot_bytes;
        }
        let results: usize = self.accumulators.iter().map(|a| a.heap_bytes(slot as usize)).sum();
        self.slot_bytes + results + self.values.group_bytes(slot)
    }

    fn release(&mut self, slot: Slot) -> bool {
        self.values.forget(slot);
        if self.is_variable {
            // What a group holds beside its place is not accounted for when the group has left.
            self.accumulators.iter_mut().for_each(|a| a.reset(slot as usize));
        }
        self.written[slot as usize]
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::datatypes::{Field, Schema};
    use millrace_functions::aggregate_kind::AggFunc;
    use millrace_rpc::catalog::RowStorage;

    use super::*;
    use crate::operators::aggregate::ordered_entries::Collected;
    use crate::operators::tests::fake::FakeTable;

    #[test]
    fn a_group_that_leaves_holds_nothing_any_more() {
        let text = Field::new("text", DataType::Utf8, true);
        let schema = Schema::new(vec![Field::new("rows", DataType::Int64, false), text]);
        let table = FakeTable::new(Arc::new(schema), RowStorage::Keyed, None);
        let mut collected = Collected::new(AggFunc::StringAgg, false, &DataType::Utf8);
        collected.ensure(1);
        collected.set(0, Some("a text that is not short".into()));
        let accumulators = vec![Accumulator::Collected(collected)];
        let mut groups = Groups::new(Box::new(table), 0, accumulators, ValueTables::default());
        groups.ensure(1);
        assert_eq!(groups.size(0), groups.slot_bytes + 24);
        groups.release(0);
        assert_eq!(groups.size(0), groups.slot_bytes, "nobody counts it from now on");
    }
}
