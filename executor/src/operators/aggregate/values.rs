//! A value table: `group | value → count`, for DISTINCT calls and for MIN/MAX over rows that may be
//! retracted. Calls over the same (argument, filter, direction) share one.
//!
//! Storage is Multiset: an epoch's consolidated count changes are written blind, at the barrier. Values are
//! encoded ascending or (MAX) descending, so that the result is the first entry of the group's prefix.
//!
//! Three things are read, in batches for all groups together ([`super::value_tables`] sends them):
//!
//! - the old counts of changed DISTINCT values (a value that appears or vanishes counts once) that are not in
//!   memory, when their rows arrive, or ahead of these when hints announce them ([`ahead`]);
//! - the few best values of groups from which a retraction may have taken the result, when it arrives, and
//!   again at the barrier where the remembered ones have run out. A group whose result cannot have got worse
//!   is not read: without remembered values, only the retraction of the current result (or better) counts;
//! - all values of changed groups, for results that are made of all, at the barrier.

mod ahead;
mod settle;
mod whole;

use std::collections::BTreeMap;

use arrow::array::{
    Array, ArrayRef, BinaryArray, Int64Array, RecordBatch, UInt32Array, new_empty_array,
};
use arrow::buffer::BooleanBuffer;
use arrow::compute::{self, SortOptions};
use arrow::datatypes::{DataType, SchemaRef};
use millrace_common::collections::{HashMap, HashSet};
use millrace_common::hash::hash_more;
use millrace_common::keys::{KeyCodec, VNODE_BYTES};
use millrace_graph::{AggCall, Aggregate};
use millrace_storage::Found;

use self::whole::FIRST_GROUPS;
use super::accumulator::{Accumulator, Rows};
use super::best_values::{Best, REFILL, improve};
use super::extreme::value_order;
use super::value_counts::{ValueCounts, dirty_bytes};
use super::value_tables::Question;
use crate::error::ExecError;
use crate::error_sink::ErrorSink;
use crate::operators::Env;
use crate::state::arena::new_batch;
use crate::state::keys::{KeyReader, storage_keys};
use crate::state::{KeyBytes, KeyTable, KeyedState, Slot, StateTable};

/// Places of entries that are kept for the next epoch though no entry is.
const KEPT_PLACES: usize = 2_048;

/// See the module.
pub struct ValueTable {
    /// Entries by group and value. Without DISTINCT calls they hold the epoch's changes only.
    state: KeyedState<ValueCounts>,
    /// Of the key that is looked up.
    scratch: Vec<u8>,
    pub arg: usize,
    filter: Option<usize>,
    data_type: DataType,
    codec: KeyCodec,
    distinct: Vec<usize>,
    /// Calls that are MIN or MAX.
    extremes: Vec<usize>,
    /// Calls whose result is made of all values.
    collected: Vec<usize>,
    /// Entries whose counts are to be asked for next.
    unasked: Vec<Slot>,
    /// Of the keys of counts that are being read.
    asked_bytes: usize,
    best: HashMap<Slot, Best>,
    /// Groups whose best values have been asked for in this epoch.
    asked: HashSet<Slot>,
    /// Retracted values of groups without remembered ones.
    suspects: Vec<(Slot, KeyBytes)>,
    /// All values of some groups, as read at the barrier.
    all: Option<(Vec<Slot>, Found)>,
    schema: SchemaRef,
}

/// What is asked of a value table beside counts.
pub enum Request {
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
    /// Where its count is.
    count: Slot,
}

/// The changes of a barrier, between what is asked for them and what follows.
pub struct Resolving {
    changes: Vec<Change>,
    values: ArrayRef,
    /// Results of extremes as far as they are known.
    results: BTreeMap<Slot, Option<KeyBytes>>,
    /// Groups of extremes that are being read.
    refilled: Vec<Slot>,
    /// Groups whose values are all to be read, after those that are being read.
    unread: Vec<Slot>,
}

impl ValueTable {
    /// That of a call of an aggregate. `port`: by which its values are announced, if they are counted; `extremes`: whether
    /// such calls share the table.
    pub fn new(
        table: Box<dyn StateTable>,
        (aggregate, call): (&Aggregate, &AggCall),
        (port, extremes): (Option<usize>, bool),
        input: &SchemaRef,
        env: &Env,
    ) -> Result<ValueTable, ExecError> {
        let arg =
            call.arg.ok_or_else(|| ExecError::internal("a DISTINCT call without an argument"))?;
        let data_type = input.field(arg).data_type().clone();
        let descending = call.state.is_some_and(|state| state.descending);
        // Only the order of extremes is seen; the others' keys stay as they have always been.
        let options = match extremes {
            true => value_order(&data_type, descending),
            false => SortOptions { descending, nulls_first: true },
        };
        let is_empty = table.is_empty();
        let schema = table.value_schema();
        let counts = ValueCounts::new(table);
        let state = match port {
            Some(port) => {
                let Aggregate { group, vnode, .. } = aggregate;
                let reader = KeyReader::with_last(input, group, vnode, (arg, options))?;
                KeyedState::inner(counts, vec![reader], is_empty, env).hinted_at(port)
            }
            None => KeyedState::inner(counts, Vec::new(), is_empty, env).without_cache(),
        };
        Ok(ValueTable {
            schema,
            state,
            scratch: Vec::new(),
            arg,
            filter: call.filter,
            codec: KeyCodec::with_options([(data_type.clone(), options)])?,
            data_type,
            distinct: Vec::new(),
            extremes: Vec::new(),
            collected: Vec::new(),
            unasked: Vec::new(),
            asked_bytes: 0,
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
        self.state.entries.table.as_mut()
    }

    /// No change of the epoch is waiting for the barrier.
    pub fn is_empty(&self) -> bool {
        self.state.keys.dirty().is_empty()
    }

    /// Counts are being read.
    pub fn is_fetching(&self) -> bool {
        self.state.is_fetching()
    }

    /// Reads of counts under way, and the bytes of the keys they ask for.
    pub fn reads(&self) -> (usize, usize) {
        (self.state.reads(), if self.is_fetching() { self.asked_bytes } else { 0 })
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
        keys: &KeyTable,
        ask: bool,
    ) -> Result<(), ExecError> {
        let values = self.codec.rows(std::slice::from_ref(arg))?;
        // As of the key's columns.
        let mut hashes: Vec<u64> = rows.slots.iter().map(|&slot| keys.hash(slot)).collect();
        hash_more(&mut hashes, arg)?;
        let mut used = Vec::with_capacity(rows.slots.len());
        let counts = ask && !self.distinct.is_empty();
        let suspects = ask && !self.extremes.is_empty();
        rows.for_each(|i, s, w| {
            let (group, row) = (s as Slot, values.row(i));
            let value = row.data();
            if suspects && w < 0 && !self.best.contains_key(&group) && !self.asked.contains(&group)
            {
                self.suspects.push((group, KeyBytes::new(value)));
            }
            let slot = self.entry(keys, group, hashes[i], value);
            used.push(slot);
            if self.state.keys.mark_dirty(slot) {
                self.state.entries.groups[slot as usize] = group;
                if counts {
                    self.unasked.push(slot);
                }
            }
            self.state.entries.deltas[slot as usize] += w;
        });
        self.state.note_used(&used);
        Ok(())
    }

    /// The entry of a value, used when its group is. Its key and the hash are those that a reader of both columns has.
    fn entry(&mut self, keys: &KeyTable, group: Slot, hash: u64, value: &[u8]) -> Slot {
        self.scratch.clear();
        self.scratch.extend_from_slice(keys.key(group));
        self.scratch.extend_from_slice(value);
        self.state.slot_used_at(hash, keys.vnode(group), &self.scratch, keys.stamp(group))
    }

    /// Asks for what the rows so far need.
    pub fn questions(
        &mut self,
        keys: &KeyTable,
        accumulators: &[Accumulator],
    ) -> Result<Vec<Question>, ExecError> {
        let unasked = std::mem::take(&mut self.unasked);
        self.ask_counts(&unasked)?;
        let mut questions = Vec::new();
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

    /// Asks for the counts of entries that are not in memory.
    fn ask_counts(&mut self, slots: &[Slot]) -> Result<(), ExecError> {
        if !self.is_fetching() {
            self.asked_bytes = 0;
        }
        let keys = &self.state.keys;
        let missing = slots.iter().filter(|&&slot| !keys.is_resident(slot));
        self.asked_bytes += missing.map(|&slot| VNODE_BYTES + keys.key(slot).len()).sum::<usize>();
        self.state.request(0, slots, |_| 1)
    }

    /// Waits for counts and takes them in. Cancel-safe; while some are being read.
    pub async fn counts_arrived(&mut self) -> Result<(), ExecError> {
        for slot in self.state.arrived().await? {
            let bytes = VNODE_BYTES + self.state.keys.key(slot).len();
            self.asked_bytes = self.asked_bytes.saturating_sub(bytes);
        }
        Ok(())
    }

    fn ask_best(&self, keys: &KeyTable, slots: Vec<Slot>) -> Option<Question> {
        if slots.is_empty() {
            return None;
        }
        let prefixes = prefixes(keys, &slots);
        let bytes = prefixes.value_data().len();
        let lookup = self.state.entries.table.multi_scan(prefixes, Some(REFILL));
        Some(Question { request: Request::Best(slots), lookup, bytes })
    }

    /// Takes in an answer.
    pub fn arrived(&mut self, keys: &KeyTable, request: Request, found: Found) {
        match request {
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

    /// Of what is remembered of a group's best values.
    pub fn best_bytes(&self, slot: Slot) -> usize {
        self.best.get(&slot).map_or(0, Best::bytes)
    }

    /// Of the epoch's changes, roughly.
    pub fn pending_bytes(&self) -> usize {
        dirty_bytes(&self.state.keys)
    }

    pub fn memory_size(&self) -> usize {
        self.state.keys.bytes()
    }

    /// Keeps the counts within the budget of caches.
    pub fn make_room(&mut self) -> Result<(), ExecError> {
        if self.counts_distinct() && self.state.is_over() {
            self.state.evict()?;
        }
        Ok(())
    }

    /// The same where no rows have used them.
    pub fn shed(&mut self) -> Result<(), ExecError> {
        if self.counts_distinct() { self.state.shed() } else { Ok(()) }
    }

    /// Begins to apply the epoch's changes: writes them, and asks for what is not known yet. A read sees what was
    /// written before it was asked for: old counts are asked for first, and the rest after the write.
    ///
    /// `waiting`: entries whose changes stay, see [`ValueTable::waiting`].
    pub fn begin(
        &mut self,
        keys: &KeyTable,
        accumulators: &[Accumulator],
        waiting: &HashSet<Slot>,
    ) -> Result<(Resolving, Vec<Question>), ExecError> {
        self.suspects.clear();
        self.unasked.clear();
        let mut changes = self.changes(keys);
        changes.retain(|change| !waiting.contains(&change.count));
        changes.sort_unstable_by(|a, b| (a.slot, &a.value).cmp(&(b.slot, &b.value)));
        let values = self.decode(changes.iter().map(|c| &*c.value))?;
        let mut resolving = Resolving {
            changes,
            values,
            results: BTreeMap::new(),
            refilled: vec![],
            unread: vec![],
        };
        if resolving.changes.is_empty() {
            return Ok((resolving, Vec::new()));
        }
        let mut questions = Vec::new();
        if !self.distinct.is_empty() {
            let counts: Vec<Slot> = resolving.changes.iter().map(|c| c.count).collect();
            self.ask_counts(&counts)?;
        }
        self.write(&resolving)?;
        let mut slots: Vec<Slot> = resolving.changes.iter().map(|c| c.slot).collect();
        slots.dedup();
        if !self.extremes.is_empty() {
            self.improve(accumulators, &slots, &mut resolving)?;
            questions.extend(self.ask_best(keys, resolving.refilled.clone()));
        }
        if !self.collected.is_empty() {
            resolving.unread = slots.split_off(FIRST_GROUPS.min(slots.len()));
            let prefixes = prefixes(keys, &slots);
            let bytes = prefixes.value_data().len();
            let lookup = self.state.entries.table.multi_scan(prefixes, None);
            questions.push(Question { request: Request::All(slots), lookup, bytes });
        }
        Ok((resolving, questions))
    }

    /// The epoch's changes.
    fn changes(&self, keys: &KeyTable) -> Vec<Change> {
        let ValueCounts { deltas, groups, .. } = &self.state.entries;
        let change = |&count: &Slot| {
            let (slot, delta) = (groups[count as usize], deltas[count as usize]);
            (delta != 0).then(|| {
                let value = &self.state.keys.key(count)[keys.key(slot).len()..];
                Change { slot, value: KeyBytes::new(value), delta, count }
            })
        };
        self.state.keys.dirty().iter().filter_map(change).collect()
    }

    /// Feeds DISTINCT calls, sets MIN and MAX, makes collected results: all that was asked for is here.
    pub async fn finish(
        &mut self,
        mut resolving: Resolving,
        keys: &KeyTable,
        accumulators: &mut [Accumulator],
        errors: &ErrorSink,
        waiting: &HashSet<Slot>,
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
        self.collect_all(&resolving.unread, keys, accumulators, errors).await?;
        self.asked.clear();
        self.settle_changes(waiting);
        self.state.unpin();
        if !self.counts_distinct() && self.state.keys.capacity() > KEPT_PLACES {
            self.state.shed()?;
        }
        self.make_room()
    }

    /// The epoch's changes have been applied: what is known of counts stays.
    fn settle_changes(&mut self, waiting: &HashSet<Slot>) {
        for slot in self.state.keys.take_dirty_but(|slot| waiting.contains(&slot)) {
            self.state.entries.deltas[slot as usize] = 0;
            // Its count was not needed, or it came and went.
            if !self.state.keys.is_resident(slot) {
                self.state.remove(slot);
            }
        }
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

    fn write(&mut self, resolving: &Resolving) -> Result<(), ExecError> {
        let changes = &resolving.changes;
        let entries = &self.state.keys;
        let storage_keys =
            storage_keys(changes.iter().map(|c| (entries.vnode(c.count), entries.key(c.count))));
        let weights = Int64Array::from_iter_values(changes.iter().map(|c| c.delta));
        let columns = vec![ArrayRef::clone(&resolving.values)];
        let values: RecordBatch = new_batch(&self.schema, columns, changes.len())?;
        self.state.entries.table.write(storage_keys, Some(weights), values)
    }

    /// Values that appear count +1, values that vanish −1.
    fn count_distinct(
        &mut self,
        accumulators: &mut [Accumulator],
        resolving: &Resolving,
    ) -> Result<(), ExecError> {
        let mut rows = Vec::new();
        let (mut slots, mut weights) = (Vec::new(), Vec::new());
        for (i, c) in resolving.changes.iter().enumerate() {
            if !self.state.keys.is_resident(c.count) {
                return Err(ExecError::internal("a value's count was not read"));
            }
            let count = &mut self.state.entries.counts[c.count as usize];
            let old = *count;
            let new = old + c.delta;
            *count = new;
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

/// Where the values of groups lie.
fn prefixes(keys: &KeyTable, slots: &[Slot]) -> BinaryArray {
    storage_keys(slots.iter().map(|&s| (keys.vnode(s), keys.key(s))))
}
