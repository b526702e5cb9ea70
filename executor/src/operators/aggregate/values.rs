//! A value table: `group | value → count`, for DISTINCT calls and for MIN/MAX over rows that may be
//! retracted. Calls over the same (argument, filter, direction) share one.
//!
//! Storage is Multiset: an epoch's consolidated count changes are written blind, at the barrier. Values are
//! encoded ascending or (MAX) descending, so that the result is the first entry of the group's prefix.
//!
//! Three things are read, in batches for all groups together ([`super::value_tables`] sends them):
//!
//! - the old counts of changed DISTINCT values (a value that appears or vanishes counts once), when their
//!   rows arrive;
//! - the few best values of groups from which a retraction may have taken the result, when it arrives, and
//!   again at the barrier where the remembered ones have run out. A group whose result cannot have got worse
//!   is not read: without remembered values, only the retraction of the current result (or better) counts;
//! - all values of changed groups, for results that are made of all, at the barrier.

use std::collections::BTreeMap;
use std::collections::hash_map::Entry;

use arrow::array::{
    Array, ArrayRef, AsArray, BinaryArray, BinaryBuilder, Int64Array, RecordBatch, UInt32Array,
    new_empty_array,
};
use arrow::buffer::BooleanBuffer;
use arrow::compute::{self, SortOptions};
use arrow::datatypes::{DataType, SchemaRef};
use millrace_common::collections::{HashMap, HashSet};
use millrace_common::keys::{KeyCodec, VNODE_BYTES};
use millrace_storage::Found;

use super::accumulator::{Accumulator, Rows};
use super::best_values::{Best, REFILL, improve};
use super::extreme::value_order;
use super::value_tables::Question;
use crate::error::ExecError;
use crate::error_sink::ErrorSink;
use crate::state::arena::new_batch;
use crate::state::keys::{append_storage_key, storage_keys};
use crate::state::{KeyBytes, KeyTable, Slot, StateTable};

/// See the module.
pub struct ValueTable {
    table: Box<dyn StateTable>,
    pub arg: usize,
    filter: Option<usize>,
    data_type: DataType,
    codec: KeyCodec,
    distinct: Vec<usize>,
    /// Calls that are MIN or MAX.
    extremes: Vec<usize>,
    /// Calls whose result is made of all values.
    collected: Vec<usize>,
    /// The epoch's changes by group and value: their numbers in `pending`.
    numbers: HashMap<(Slot, KeyBytes), u32>,
    pending: Vec<Pending>,
    /// Counts to ask for next.
    unasked: Unasked,
    best: HashMap<Slot, Best>,
    /// Groups whose best values have been asked for in this epoch.
    asked: HashSet<Slot>,
    /// Retracted values of groups without remembered ones.
    suspects: Vec<(Slot, KeyBytes)>,
    /// All values of some groups, as read at the barrier.
    all: Option<(Vec<Slot>, Found)>,
    schema: SchemaRef,
}

/// A change of a value's count.
#[derive(Clone, Copy)]
struct Pending {
    delta: i64,
    /// The count when the epoch began, once it has been read.
    old: Option<i64>,
}

#[derive(Default)]
struct Unasked {
    numbers: Vec<u32>,
    keys: BinaryBuilder,
    scratch: Vec<u8>,
}

/// What is asked of a value table.
pub enum Request {
    /// Counts, by the numbers of changes.
    Counts(Vec<u32>),
    /// The best values of groups.
    Best(Vec<Slot>),
    /// All values of groups.
    All(Vec<Slot>),
}

/// A consolidated change of one value's count.
pub struct Change {
    slot: Slot,
    pub value: KeyBytes,
    pub delta: i64,
    number: u32,
}

/// The changes of a barrier, between what is asked for them and what follows.
pub struct Resolving {
    changes: Vec<Change>,
    values: ArrayRef,
    /// Results of extremes as far as they are known.
    results: BTreeMap<Slot, Option<KeyBytes>>,
    /// Groups of extremes that are being read.
    refilled: Vec<Slot>,
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
            numbers: HashMap::default(),
            pending: Vec::new(),
            unasked: Unasked::default(),
            best: HashMap::default(),
            asked: HashSet::default(),
            suspects: Vec::new(),
            all: None,
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

    pub fn counts_distinct(&self) -> bool {
        !self.distinct.is_empty()
    }

    /// Which rows count.
    pub fn mask(&self, batch: &RecordBatch) -> Option<BooleanBuffer> {
        super::mask(batch, Some(self.arg), self.filter)
    }

    /// Rows of the epoch: only remembered, consolidated. `ask`: what has to be read for them is noted, for
    /// [`ValueTable::questions`].
    pub fn update(
        &mut self,
        rows: &Rows<'_>,
        arg: &ArrayRef,
        ask: Option<&KeyTable>,
    ) -> Result<(), ExecError> {
        let values = self.codec.rows(std::slice::from_ref(arg))?;
        let counts = ask.filter(|_| !self.distinct.is_empty());
        let suspects = ask.is_some() && !self.extremes.is_empty();
        rows.for_each(|i, s, w| {
            let (slot, value) = (s as Slot, KeyBytes::new(values.row(i).data()));
            if suspects && w < 0 && !self.best.contains_key(&slot) && !self.asked.contains(&slot) {
                self.suspects.push((slot, value.clone()));
            }
            match self.numbers.entry((slot, value)) {
                Entry::Occupied(number) => self.pending[*number.get() as usize].delta += w,
                Entry::Vacant(vacant) => {
                    let number = self.pending.len() as u32;
                    self.pending.push(Pending { delta: w, old: None });
                    if let Some(keys) = counts {
                        self.unasked.add(number, keys, slot, &vacant.key().1);
                    }
                    vacant.insert(number);
                }
            }
        });
        Ok(())
    }

    /// Asks for what the rows so far need.
    pub fn questions(
        &mut self,
        keys: &KeyTable,
        accumulators: &[Accumulator],
    ) -> Result<Vec<Question>, ExecError> {
        let mut questions: Vec<Question> = self.ask_counts().into_iter().collect();
        let suspects = std::mem::take(&mut self.suspects);
        if !suspects.is_empty() {
            let slots: Vec<Slot> = suspects.iter().map(|s| s.0).collect();
            let current = self.current(accumulators, &slots)?;
            let mut worse = Vec::new();
            for ((slot, value), current) in suspects.into_iter().zip(current) {
                if current.is_some_and(|current| value <= current) && self.asked.insert(slot) {
                    worse.push(slot);
                }
            }
            questions.extend(self.ask_best(keys, worse));
        }
        Ok(questions)
    }

    fn ask_counts(&mut self) -> Option<Question> {
        let Unasked { numbers, keys, .. } = &mut self.unasked;
        if numbers.is_empty() {
            return None;
        }
        let (numbers, keys) = (std::mem::take(numbers), keys.finish());
        let bytes = keys.value_data().len();
        Some(Question {
            request: Request::Counts(numbers),
            lookup: self.table.multi_get(keys),
            bytes,
        })
    }

    fn ask_best(&self, keys: &KeyTable, slots: Vec<Slot>) -> Option<Question> {
        if slots.is_empty() {
            return None;
        }
        let prefixes = prefixes(keys, &slots);
        let bytes = prefixes.value_data().len();
        let lookup = self.table.multi_scan(prefixes, Some(REFILL));
        Some(Question { request: Request::Best(slots), lookup, bytes })
    }

    /// Takes in an answer.
    pub fn arrived(&mut self, keys: &KeyTable, request: Request, found: Found) {
        match request {
            Request::Counts(numbers) => {
                for &number in &numbers {
                    self.pending[number as usize].old = Some(0);
                }
                for (i, &input) in found.input.values().iter().enumerate() {
                    let number = numbers[input as usize] as usize;
                    self.pending[number].old = Some(found.weights.value(i));
                }
            }
            Request::Best(slots) => {
                let mut best: Vec<Best> = slots.iter().map(|_| Best::default()).collect();
                for (i, &input) in found.input.values().iter().enumerate() {
                    let skip = VNODE_BYTES + keys.key(slots[input as usize]).len();
                    let value = KeyBytes::new(&found.keys.value(i)[skip..]);
                    best[input as usize].entries.push((value, found.weights.value(i)));
                }
                for (&slot, mut best) in slots.iter().zip(best) {
                    best.complete = best.entries.len() < REFILL;
                    self.best.insert(slot, best);
                }
            }
            Request::All(slots) => self.all = Some((slots, found)),
        }
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

    /// Of the epoch's changes, roughly.
    pub fn pending_bytes(&self) -> usize {
        self.numbers.capacity() * size_of::<((Slot, KeyBytes), u32)>()
            + self.pending.capacity() * size_of::<Pending>()
    }

    pub fn memory_size(&self) -> usize {
        let entry = size_of::<(KeyBytes, i64)>();
        let best: usize = self.best.values().map(|b| 48 + b.entries.capacity() * entry).sum();
        self.pending_bytes() + best
    }

    /// Begins to apply the epoch's changes: writes them, and asks for what is not known yet. A read sees what was
    /// written before it was asked for: old counts are asked for first, and the rest after the write.
    pub fn begin(
        &mut self,
        keys: &KeyTable,
        accumulators: &[Accumulator],
    ) -> Result<(Resolving, Vec<Question>), ExecError> {
        self.suspects.clear();
        let pending = &self.pending;
        let mut changes: Vec<Change> = self
            .numbers
            .drain()
            .map(|((slot, value), number)| Change {
                slot,
                value,
                delta: pending[number as usize].delta,
                number,
            })
            .filter(|change| change.delta != 0)
            .collect();
        changes.sort_unstable_by(|a, b| (a.slot, &a.value).cmp(&(b.slot, &b.value)));
        let values = self.decode(changes.iter().map(|c| &*c.value))?;
        let mut resolving =
            Resolving { changes, values, results: BTreeMap::new(), refilled: Vec::new() };
        if resolving.changes.is_empty() {
            return Ok((resolving, Vec::new()));
        }
        let mut questions = Vec::new();
        if !self.distinct.is_empty() {
            for c in &resolving.changes {
                if self.pending[c.number as usize].old.is_none() {
                    self.unasked.add(c.number, keys, c.slot, &c.value);
                }
            }
            questions.extend(self.ask_counts());
        }
        self.write(keys, &resolving)?;
        let mut slots: Vec<Slot> = resolving.changes.iter().map(|c| c.slot).collect();
        slots.dedup();
        if !self.extremes.is_empty() {
            self.improve(accumulators, &slots, &mut resolving)?;
            questions.extend(self.ask_best(keys, resolving.refilled.clone()));
        }
        if !self.collected.is_empty() {
            let prefixes = prefixes(keys, &slots);
            let bytes = prefixes.value_data().len();
            let lookup = self.table.multi_scan(prefixes, None);
            questions.push(Question { request: Request::All(slots), lookup, bytes });
        }
        Ok((resolving, questions))
    }

    /// Feeds DISTINCT calls, sets MIN and MAX, makes collected results: all that was asked for is here.
    pub fn finish(
        &mut self,
        mut resolving: Resolving,
        accumulators: &mut [Accumulator],
        errors: &ErrorSink,
    ) -> Result<(), ExecError> {
        if !self.distinct.is_empty() {
            self.count_distinct(accumulators, &resolving)?;
        }
        if !self.extremes.is_empty() {
            for slot in std::mem::take(&mut resolving.refilled) {
                let first = self.best.get(&slot).and_then(Best::first);
                resolving.results.insert(slot, first);
            }
            self.set(accumulators, &resolving.results)?;
        }
        if let Some((slots, found)) = self.all.take() {
            self.collect(accumulators, &slots, &found, errors)?;
        }
        self.pending.clear();
        self.asked.clear();
        Ok(())
    }

    /// Makes the results of changed groups anew, from all their values in order. One that cannot be made
    /// is NULL and counted.
    fn collect(
        &self,
        accumulators: &mut [Accumulator],
        slots: &[Slot],
        found: &Found,
        errors: &ErrorSink,
    ) -> Result<(), ExecError> {
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

    fn write(&mut self, keys: &KeyTable, resolving: &Resolving) -> Result<(), ExecError> {
        let changes = &resolving.changes;
        let mut storage_keys = BinaryBuilder::with_capacity(changes.len(), changes.len() * 24);
        let mut scratch = Vec::new();
        for c in changes {
            let parts: [&[u8]; 2] = [keys.key(c.slot), &c.value];
            append_storage_key(&mut storage_keys, &mut scratch, keys.vnode(c.slot), &parts);
        }
        let weights = Int64Array::from_iter_values(changes.iter().map(|c| c.delta));
        let columns = vec![ArrayRef::clone(&resolving.values)];
        let values: RecordBatch = new_batch(&self.schema, columns, changes.len())?;
        self.table.write(storage_keys.finish(), Some(weights), values)
    }

    /// Values that appear count +1, values that vanish −1.
    fn count_distinct(
        &self,
        accumulators: &mut [Accumulator],
        resolving: &Resolving,
    ) -> Result<(), ExecError> {
        let mut rows = Vec::new();
        let (mut slots, mut weights) = (Vec::new(), Vec::new());
        for (i, c) in resolving.changes.iter().enumerate() {
            let old = self.pending[c.number as usize].old;
            let old = old.ok_or_else(|| ExecError::internal("a value's count was not read"))?;
            let new = old + c.delta;
            if new < 0 {
                return Err(ExecError::internal(
                    "a distinct value is retracted more often than it came",
                ));
            }
            let weight = i64::from(new > 0) - i64::from(old > 0);
            if weight != 0 {
                rows.push(i as u32);
                slots.push(c.slot);
                weights.push(weight);
            }
        }
        let arg = compute::take(&resolving.values, &UInt32Array::from(rows), None)?;
        for &call in &self.distinct {
            let rows = Rows { slots: &slots, weights: Some(&weights), mask: None };
            accumulators[call].update(&rows, Some(&arg))?;
        }
        Ok(())
    }

    /// The results that follow from what is remembered, and the groups that must be read.
    fn improve(
        &mut self,
        accumulators: &[Accumulator],
        slots: &[Slot],
        resolving: &mut Resolving,
    ) -> Result<(), ExecError> {
        let current = self.current(accumulators, slots)?;
        let groups = resolving.changes.chunk_by(|a, b| a.slot == b.slot);
        for ((changes, &slot), current) in groups.zip(slots).zip(current) {
            let known = match self.best.get_mut(&slot) {
                Some(best) => best.apply(changes)?,
                None => improve(current, changes),
            };
            match known {
                Some(result) => drop(resolving.results.insert(slot, result)),
                None => resolving.refilled.push(slot),
            }
        }
        Ok(())
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

impl Unasked {
    fn add(&mut self, number: u32, keys: &KeyTable, slot: Slot, value: &[u8]) {
        let parts: [&[u8]; 2] = [keys.key(slot), value];
        append_storage_key(&mut self.keys, &mut self.scratch, keys.vnode(slot), &parts);
        self.numbers.push(number);
    }
}

/// Where the values of groups lie.
fn prefixes(keys: &KeyTable, slots: &[Slot]) -> BinaryArray {
    storage_keys(slots.iter().map(|&s| (keys.vnode(s), keys.key(s))))
}
