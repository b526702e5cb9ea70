//! Value tables: `group | value → count`, for DISTINCT calls and for MIN/MAX over rows that may be
//! retracted. Calls over the same (argument, filter, direction) share one.
//!
//! Storage is Multiset: an epoch's consolidated count changes are written blind. Values are encoded
//! ascending or (MAX) descending, so that the result is the first entry of the group's prefix.
//!
//! All reads happen at the barrier, in at most two batched rounds for all groups together: the old
//! counts of changed DISTINCT values (a value that appears or vanishes counts once), and a refill of the few smallest values
//! for groups whose remembered ones ran out. A group whose result cannot have got worse is not read:
//! without remembered values, only the retraction of the current result (or better) needs a refill.

use std::collections::BTreeMap;
use std::collections::HashMap;

use arrow::array::{
    Array, ArrayRef, AsArray, BinaryBuilder, Int64Array, RecordBatch, new_empty_array,
};
use arrow::compute::SortOptions;
use arrow::datatypes::{DataType, SchemaRef};
use millrace_common::keys::{KeyCodec, VNODE_BYTES};

use super::accumulator::{Accumulator, Rows};
use super::extreme::value_order;
use crate::error::ExecError;
use crate::error_sink::ErrorSink;
use crate::state::arena::new_batch;
use crate::state::fetch::wait;
use crate::state::keys::append_storage_key;
use crate::state::{KeyBytes, KeyTable, Slot, StateTable};

/// Values read in one refill; twice as many are remembered at most.
const REFILL: usize = 64;

/// The best values of a group with their counts, best first.
#[derive(Default)]
struct Best {
    entries: Vec<(KeyBytes, i64)>,
    /// There are no others.
    complete: bool,
}

/// See the module.
pub struct ValueTable {
    table: Box<dyn StateTable>,
    pub arg: usize,
    pub filter: Option<usize>,
    data_type: DataType,
    codec: KeyCodec,
    distinct: Vec<usize>,
    /// Calls that are MIN or MAX.
    extremes: Vec<usize>,
    /// Calls whose result is made of all values.
    collected: Vec<usize>,
    pending: HashMap<(Slot, KeyBytes), i64>,
    best: HashMap<Slot, Best>,
    schema: SchemaRef,
}

/// A consolidated change of one value's count.
struct Change {
    slot: Slot,
    value: KeyBytes,
    delta: i64,
}

impl ValueTable {
    pub fn new(
        table: Box<dyn StateTable>,
        arg: usize,
        filter: Option<usize>,
        data_type: &DataType,
        descending: bool,
        extremes: bool,
    ) -> Result<ValueTable, ExecError> {
        // Only the order of extremes is seen; the others' keys stay as they have always been.
        let options = match extremes {
            true => value_order(data_type, descending),
            false => SortOptions { descending, nulls_first: true },
        };
        Ok(ValueTable {
            schema: table.value_schema(),
            table,
            arg,
            filter,
            data_type: data_type.clone(),
            codec: KeyCodec::with_options([(data_type.clone(), options)])?,
            distinct: Vec::new(),
            extremes: Vec::new(),
            collected: Vec::new(),
            pending: HashMap::new(),
            best: HashMap::new(),
        })
    }

    pub fn add_distinct(&mut self, call: usize) {
        self.distinct.push(call);
    }

    pub fn add_extreme(&mut self, call: usize) {
        self.extremes.push(call);
    }

    pub fn add_collected(&mut self, call: usize) {
        self.collected.push(call);
    }

    pub fn table(&mut self) -> &mut dyn StateTable {
        self.table.as_mut()
    }

    pub fn is_empty(&self) -> bool {
        self.pending.is_empty()
    }

    /// Rows of the epoch: only remembered, consolidated.
    pub fn update(&mut self, rows: &Rows<'_>, arg: &ArrayRef) -> Result<(), ExecError> {
        let values = self.codec.rows(std::slice::from_ref(arg))?;
        rows.for_each(|i, s, w| {
            *self.pending.entry((s as Slot, KeyBytes::new(values.row(i).data()))).or_insert(0) += w;
        });
        Ok(())
    }

    /// A group that has no state yet: it has no values.
    pub fn created(&mut self, slot: Slot) {
        if !self.extremes.is_empty() {
            self.best.insert(slot, Best { entries: Vec::new(), complete: true });
        }
    }

    pub fn forget(&mut self, slot: Slot) {
        self.best.remove(&slot);
    }

    pub fn memory_size(&self) -> usize {
        let entry = size_of::<KeyBytes>() + 16;
        let best: usize = self.best.values().map(|b| 48 + b.entries.capacity() * entry).sum();
        self.pending.capacity() * (entry + 16) + best
    }

    /// Applies the epoch's changes: writes counts, feeds DISTINCT calls, sets MIN and MAX.
    pub async fn resolve(
        &mut self,
        keys: &KeyTable,
        accumulators: &mut [Accumulator],
        errors: &ErrorSink,
    ) -> Result<(), ExecError> {
        let mut changes: Vec<Change> = self
            .pending
            .drain()
            .filter(|(_, delta)| *delta != 0)
            .map(|((slot, value), delta)| Change { slot, value, delta })
            .collect();
        if changes.is_empty() {
            return Ok(());
        }
        changes.sort_unstable_by(|a, b| (a.slot, &a.value).cmp(&(b.slot, &b.value)));
        let values = self.decode(changes.iter().map(|c| &*c.value))?;
        if !self.distinct.is_empty() {
            self.resolve_distinct(keys, accumulators, &changes, &values).await?;
        }
        self.write(keys, &changes, values)?;
        if !self.extremes.is_empty() {
            self.resolve_extreme(keys, accumulators, &changes).await?;
        }
        if !self.collected.is_empty() {
            self.collect(keys, accumulators, &changes, errors).await?;
        }
        Ok(())
    }

    /// Makes the results of changed groups anew, from all their values in order. One that cannot be made
    /// is NULL and counted.
    async fn collect(
        &mut self,
        keys: &KeyTable,
        accumulators: &mut [Accumulator],
        changes: &[Change],
        errors: &ErrorSink,
    ) -> Result<(), ExecError> {
        let mut slots: Vec<Slot> = changes.iter().map(|c| c.slot).collect();
        slots.dedup();
        let mut prefixes = BinaryBuilder::new();
        let mut scratch = Vec::new();
        for &slot in &slots {
            let parts: [&[u8]; 1] = [keys.key(slot)];
            append_storage_key(&mut prefixes, &mut scratch, keys.vnode(slot), &parts);
        }
        let found = wait(self.table.multi_scan(prefixes.finish(), None)).await?;
        let values = found.values.column(0).as_binary::<i32>();
        let mut groups: Vec<Vec<usize>> = vec![Vec::new(); slots.len()];
        for (i, &input) in found.input.values().iter().enumerate() {
            groups[input as usize].push(i);
        }
        for &call in &self.collected {
            let Accumulator::Collected(collected) = &mut accumulators[call] else {
                return Err(ExecError::internal("a value table serves another call"));
            };
            for (&slot, rows) in slots.iter().zip(&groups) {
                let entries = rows.iter().map(|&i| (values.value(i), found.weights.value(i)));
                let result = collected.build(entries);
                let result = result.unwrap_or_else(|e| {
                    errors.report("Aggregate", &e, 1);
                    None
                });
                collected.set(slot as usize, result);
            }
        }
        Ok(())
    }

    fn decode<'a>(
        &self,
        values: impl ExactSizeIterator<Item = &'a [u8]>,
    ) -> Result<ArrayRef, ExecError> {
        if values.len() == 0 {
            return Ok(new_empty_array(&self.data_type));
        }
        let mut columns = self.codec.decode(values)?;
        columns.pop().ok_or_else(|| ExecError::internal("a value decodes to no column"))
    }

    fn storage_keys(&self, keys: &KeyTable, changes: &[Change]) -> arrow::array::BinaryArray {
        let mut out = BinaryBuilder::with_capacity(changes.len(), changes.len() * 24);
        let mut scratch = Vec::new();
        for c in changes {
            let parts: [&[u8]; 2] = [keys.key(c.slot), &c.value];
            append_storage_key(&mut out, &mut scratch, keys.vnode(c.slot), &parts);
        }
        out.finish()
    }

    fn write(
        &mut self,
        keys: &KeyTable,
        changes: &[Change],
        values: ArrayRef,
    ) -> Result<(), ExecError> {
        let storage_keys = self.storage_keys(keys, changes);
        let weights = Int64Array::from_iter_values(changes.iter().map(|c| c.delta));
        let values: RecordBatch = new_batch(&self.schema, vec![values], changes.len())?;
        self.table.write(storage_keys, Some(weights), values)
    }

    /// Values that appear count +1, values that vanish −1.
    async fn resolve_distinct(
        &mut self,
        keys: &KeyTable,
        accumulators: &mut [Accumulator],
        changes: &[Change],
        values: &ArrayRef,
    ) -> Result<(), ExecError> {
        let found = wait(self.table.multi_get(self.storage_keys(keys, changes))).await?;
        let mut old = vec![0i64; changes.len()];
        for (i, &input) in found.input.values().iter().enumerate() {
            old[input as usize] = found.weights.value(i);
        }
        let mut rows = Vec::new();
        let (mut slots, mut weights) = (Vec::new(), Vec::new());
        for (i, c) in changes.iter().enumerate() {
            let new = old[i] + c.delta;
            if new < 0 {
                return Err(ExecError::internal(
                    "a distinct value is retracted more often than it came",
                ));
            }
            let weight = i64::from(new > 0) - i64::from(old[i] > 0);
            if weight != 0 {
                rows.push(i as u32);
                slots.push(c.slot);
                weights.push(weight);
            }
        }
        let arg = arrow::compute::take(values, &arrow::array::UInt32Array::from(rows), None)?;
        for &call in &self.distinct {
            let rows = Rows { slots: &slots, weights: Some(&weights), mask: None };
            accumulators[call].update(&rows, Some(&arg))?;
        }
        Ok(())
    }

    async fn resolve_extreme(
        &mut self,
        keys: &KeyTable,
        accumulators: &mut [Accumulator],
        changes: &[Change],
    ) -> Result<(), ExecError> {
        let mut groups: Vec<(Slot, std::ops::Range<usize>)> = Vec::new();
        for (i, c) in changes.iter().enumerate() {
            match groups.last_mut() {
                Some((slot, range)) if *slot == c.slot => range.end = i + 1,
                _ => groups.push((c.slot, i..i + 1)),
            }
        }
        let slots: Vec<Slot> = groups.iter().map(|g| g.0).collect();
        let current = self.current(accumulators, &slots)?;
        let mut results: BTreeMap<Slot, Option<KeyBytes>> = BTreeMap::new();
        let mut refill: Vec<Slot> = Vec::new();
        for ((slot, range), current) in groups.into_iter().zip(current) {
            let changes = &changes[range];
            let known = match self.best.get_mut(&slot) {
                Some(best) => best.apply(changes)?,
                None => improve(current, changes),
            };
            match known {
                Some(result) => drop(results.insert(slot, result)),
                None => refill.push(slot),
            }
        }
        self.refill(keys, &refill, &mut results).await?;
        self.set(accumulators, &results)
    }

    /// The current result of slots, encoded.
    fn current(
        &self,
        accumulators: &[Accumulator],
        slots: &[Slot],
    ) -> Result<Vec<Option<KeyBytes>>, ExecError> {
        let Accumulator::Extreme(extreme) = &accumulators[self.extremes[0]] else {
            return Err(ExecError::internal("a value table serves another call"));
        };
        let array = extreme.result(slots)?;
        let rows = self.codec.rows(std::slice::from_ref(&array))?;
        Ok((0..slots.len())
            .map(|i| array.is_valid(i).then(|| KeyBytes::new(rows.row(i).data())))
            .collect())
    }

    async fn refill(
        &mut self,
        keys: &KeyTable,
        slots: &[Slot],
        results: &mut BTreeMap<Slot, Option<KeyBytes>>,
    ) -> Result<(), ExecError> {
        if slots.is_empty() {
            return Ok(());
        }
        let mut prefixes = BinaryBuilder::new();
        let mut scratch = Vec::new();
        let mut skip = Vec::with_capacity(slots.len());
        for &slot in slots {
            let parts: [&[u8]; 1] = [keys.key(slot)];
            append_storage_key(&mut prefixes, &mut scratch, keys.vnode(slot), &parts);
            skip.push(VNODE_BYTES + keys.key(slot).len());
        }
        let found = wait(self.table.multi_scan(prefixes.finish(), Some(REFILL))).await?;
        let mut best: Vec<Best> = slots.iter().map(|_| Best::default()).collect();
        for (i, &input) in found.input.values().iter().enumerate() {
            let value = KeyBytes::new(&found.keys.value(i)[skip[input as usize]..]);
            best[input as usize].entries.push((value, found.weights.value(i)));
        }
        for (&slot, mut best) in slots.iter().zip(best) {
            best.complete = best.entries.len() < REFILL;
            results.insert(slot, best.entries.first().map(|e| e.0.clone()));
            self.best.insert(slot, best);
        }
        Ok(())
    }

    fn set(
        &self,
        accumulators: &mut [Accumulator],
        results: &BTreeMap<Slot, Option<KeyBytes>>,
    ) -> Result<(), ExecError> {
        let some: Vec<(Slot, &[u8])> =
            results.iter().filter_map(|(s, v)| Some((*s, &**v.as_ref()?))).collect();
        let slots: Vec<Slot> = some.iter().map(|s| s.0).collect();
        let values = self.decode(some.iter().map(|s| s.1))?;
        for &call in &self.extremes {
            let accumulator = &mut accumulators[call];
            for (&slot, value) in results {
                if value.is_none() {
                    accumulator.reset(slot as usize);
                }
            }
            accumulator.load(&slots, std::slice::from_ref(&values))?;
        }
        Ok(())
    }
}

impl Best {
    /// Applies changes (in value order). The result, or `None` when it must be read.
    fn apply(&mut self, changes: &[Change]) -> Result<Option<Option<KeyBytes>>, ExecError> {
        for c in changes {
            match self.entries.binary_search_by(|e| e.0.cmp(&c.value)) {
                Ok(at) => {
                    self.entries[at].1 += c.delta;
                    match self.entries[at].1 {
                        n if n < 0 => return Err(negative()),
                        0 => drop(self.entries.remove(at)),
                        _ => {}
                    }
                }
                Err(at) if at < self.entries.len() || self.complete => {
                    if c.delta < 0 {
                        return Err(negative());
                    }
                    self.entries.insert(at, (c.value.clone(), c.delta));
                }
                // Beyond what is remembered: only the table knows.
                Err(_) => {}
            }
        }
        if self.entries.len() > 2 * REFILL {
            self.entries.truncate(REFILL);
            self.complete = false;
        }
        Ok(match self.entries.first() {
            Some(first) => Some(Some(first.0.clone())),
            None if self.complete => Some(None),
            None => None,
        })
    }
}

fn negative() -> ExecError {
    ExecError::internal("a value is retracted more often than it came")
}

/// The result from the current one alone, if no retraction can have made it worse.
fn improve(current: Option<KeyBytes>, changes: &[Change]) -> Option<Option<KeyBytes>> {
    let first_added = changes.iter().find(|c| c.delta > 0).map(|c| &c.value);
    let Some(current) = current else { return Some(first_added.cloned()) };
    if changes.iter().any(|c| c.delta < 0 && c.value <= current) {
        return None;
    }
    Some(Some(first_added.filter(|v| **v < current).cloned().unwrap_or(current)))
}
