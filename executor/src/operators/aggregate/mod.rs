//! Grouped aggregation (docs/design.md §3, §6, §7).
//!
//! A group is a slot of the key table; its row count and accumulators are columns indexed by slot. A
//! chunk of resident groups is one probe and one tight loop a call. Groups that are not resident are
//! fetched in one batched `multi_get`; their rows wait at the gate.
//!
//! The first time a group is touched in an epoch its old result is remembered, column-wise, parallel to the list of dirty
//! slots. At the barrier each dirty group's new result is compared with it, differences leave
//! as −old +new, and the group's state row is written. When the old values exceed their budget, or
//! the cache is full of dirty groups, the same happens early: every such step emits the net change
//! since the one before, so the sum is the same.
//!
//! Invariants: what has been emitted for a group is a function of the state row last written; a
//! dirty slot is not evicted; a group exists while its row count is positive (a global aggregate
//! always). DISTINCT calls and retractable MIN/MAX get their part at the barrier ([`values`]), so
//! early emission does not show it yet: it is emitted with the barrier.

mod accumulator;
mod exact_aggregates;
mod extreme;
mod float_sum;
mod number;
mod ordered_entries;
mod values;

use std::sync::Arc;

use arrow::array::{
    Array, ArrayRef, AsArray, BooleanArray, Int64Array, RecordBatch, UInt32Array, new_empty_array,
};
use arrow::buffer::BooleanBuffer;
use arrow::compute;
use arrow::compute::kernels::cmp::distinct;
use arrow::datatypes::{DataType, Field, Int64Type, Schema, SchemaRef};
use futures::FutureExt;
use futures::future::BoxFuture;
use millrace_common::access::RetentionBy;
use millrace_common::delta::take_rows;
use millrace_common::fault_injection::is_planted;
use millrace_common::keys::KeyCodec;
use millrace_common::{DeltaChunk, SqlError, SqlState};
use millrace_functions::aggregate_kind::AggFunc;
use millrace_storage::{Found, MemRun};

use self::accumulator::{Accumulator, Rows};
use self::values::ValueTable;
use super::{Env, Limits};
use crate::error::ExecError;
use crate::operator::{Operator, Output};
use crate::state::arena::new_batch;
use crate::state::cache::Probe;
use crate::state::gate::Ready;
use crate::state::keys::{KeyReader, storage_keys};
use crate::state::{Fetches, KeyGate, KeyTable, Slot, StateTable};

/// See the module.
pub struct Aggregate {
    calls: Vec<millrace_graph::AggCall>,
    reader: KeyReader,
    group_width: usize,
    table: Box<dyn StateTable>,
    state_schema: SchemaRef,
    output_schema: SchemaRef,
    /// The calls' results, and whether the group was there.
    old_schema: SchemaRef,
    keys: KeyTable,
    /// Input rows of each group.
    rows: Vec<i64>,
    /// Whether its row has been emitted.
    emitted: Vec<bool>,
    /// Whether the state table has a row of it.
    written: Vec<bool>,
    accumulators: Vec<Accumulator>,
    values: Vec<ValueTable>,
    /// Old results of the dirty slots, in their order.
    old: Vec<RecordBatch>,
    old_bytes: usize,
    gate: KeyGate,
    fetches: Fetches<Vec<Slot>>,
    /// A global aggregate has not yet made sure of its one row.
    global_due: bool,
    stamp: u64,
    slot_bytes: usize,
    limits: Limits,
    env: Env,
    scratch: Vec<Slot>,
    /// Of a group column, by position in the group: groups below are never asked for again.
    closed: Option<(usize, i64)>,
    /// Groups below have left the cache.
    swept: i64,
}

impl Aggregate {
    pub fn new(
        node: &millrace_graph::Node,
        aggregate: &millrace_graph::Aggregate,
        input: &SchemaRef,
        env: Env,
        tables: &mut dyn FnMut(usize) -> Result<Box<dyn StateTable>, ExecError>,
    ) -> Result<Aggregate, ExecError> {
        let table = tables(aggregate.table)?;
        let accumulators = aggregate
            .calls
            .iter()
            .map(|call| Accumulator::new(call, input))
            .collect::<Result<Vec<_>, _>>()?;
        let slot_bytes = 9 + accumulators.iter().map(Accumulator::slot_bytes).sum::<usize>();
        let keys = KeyTable::new(env.options.eviction, table.is_empty());
        Ok(Aggregate {
            reader: KeyReader::new(input, &aggregate.group, &aggregate.vnode)?,
            group_width: aggregate.group.len(),
            state_schema: table.value_schema(),
            output_schema: super::nullable(&node.schema),
            old_schema: old_schema(&aggregate.calls),
            values: value_tables(&aggregate.calls, input, tables)?,
            calls: aggregate.calls.clone(),
            table,
            keys,
            rows: Vec::new(),
            emitted: Vec::new(),
            written: Vec::new(),
            accumulators,
            old: Vec::new(),
            old_bytes: 0,
            gate: KeyGate::new(),
            fetches: Fetches::default(),
            global_due: aggregate.group.is_empty(),
            stamp: 0,
            slot_bytes,
            limits: Limits::new(&env),
            env,
            scratch: Vec::new(),
            closed: None,
            swept: i64::MIN,
        })
    }

    /// Lets go of groups that no later change can reach.
    fn sweep(&mut self) -> Result<(), ExecError> {
        let Some((at, bound)) = self.closed.filter(|(_, bound)| *bound > self.swept) else {
            return Ok(());
        };
        self.swept = bound;
        for slot in super::closed_keys(&self.keys, self.reader.codec(), at, bound)? {
            self.values.iter_mut().for_each(|v| v.forget(slot));
            self.keys.remove(slot);
        }
        Ok(())
    }

    /// Adds rows of resident groups.
    fn run(&mut self, chunk: &DeltaChunk, slots: &[Slot]) -> Result<(), ExecError> {
        self.remember_old(slots)?;
        let weights = chunk.weights.as_ref().map(|w| &w.values()[..]);
        match weights {
            None => slots.iter().for_each(|&s| self.rows[s as usize] += 1),
            Some(w) if self.calls.is_empty() && is_planted("distinct-ignores-weight") => {
                slots.iter().zip(w).for_each(|(&s, &w)| {
                    self.rows[s as usize] = if w < 0 { 0 } else { self.rows[s as usize] + w }
                })
            }
            Some(w) => slots.iter().zip(w).for_each(|(&s, &w)| self.rows[s as usize] += w),
        }
        for (call, accumulator) in self.calls.iter().zip(&mut self.accumulators) {
            if call.distinct && call.state.is_some() {
                continue;
            }
            let rows = Rows { slots, weights, mask: mask(&chunk.batch, call.arg, call.filter) };
            accumulator.update(&rows, call.arg.map(|a| chunk.batch.column(a)))?;
        }
        for table in &mut self.values {
            let rows =
                Rows { slots, weights, mask: mask(&chunk.batch, Some(table.arg), table.filter) };
            table.update(&rows, chunk.batch.column(table.arg))?;
        }
        Ok(())
    }

    /// Marks groups dirty and remembers the results of those that were not.
    fn remember_old(&mut self, slots: &[Slot]) -> Result<(), ExecError> {
        let before = self.keys.dirty().len();
        for &slot in slots {
            self.keys.mark_dirty(slot);
        }
        let fresh = &self.keys.dirty()[before..];
        if fresh.is_empty() {
            return Ok(());
        }
        let (mut columns, _) = self.results(fresh)?;
        let exists =
            fresh.iter().map(|&s| Some(self.emitted[s as usize])).collect::<BooleanArray>();
        columns.push(Arc::new(exists));
        let batch = new_batch(&self.old_schema, columns, fresh.len())?;
        self.old_bytes += batch.get_array_memory_size();
        self.old.push(batch);
        Ok(())
    }

    /// Every call's value for the slots, and how many of them overflowed.
    fn results(&self, slots: &[Slot]) -> Result<(Vec<ArrayRef>, u64), ExecError> {
        let mut overflows = 0;
        let mut columns = Vec::with_capacity(self.calls.len() + 1);
        for (call, accumulator) in self.calls.iter().zip(&self.accumulators) {
            let (column, n) = accumulator.result(slots, &call.output_type)?;
            overflows += n;
            columns.push(column);
        }
        Ok((columns, overflows))
    }

    /// Emits −old +new of every dirty group and writes its state.
    fn flush(&mut self, barrier: bool, out: &mut Output) -> Result<(), ExecError> {
        let dirty = self.keys.take_dirty();
        if dirty.is_empty() {
            return Ok(());
        }
        let old = compute::concat_batches(&self.old_schema, &self.old)?;
        self.old.clear();
        self.old_bytes = 0;
        let (new, overflows) = self.results(&dirty)?;
        if overflows > 0 {
            let e = SqlError::new(
                SqlState::NUMERIC_VALUE_OUT_OF_RANGE,
                "an aggregate's result is out of range",
            );
            self.env.errors.report("Aggregate", &e, overflows);
        }
        let existed = old.column(self.calls.len()).as_boolean().values().clone();
        let exists: BooleanBuffer =
            dirty.iter().map(|&s| self.group_width == 0 || self.rows[s as usize] > 0).collect();
        let groups = self.group_columns(&dirty)?;
        self.emit(&groups, &old, &new, &existed, &exists, out)?;
        self.write(&dirty, groups, &exists, barrier)
    }

    /// The group columns, decoded from the slots' keys.
    fn group_columns(&self, slots: &[Slot]) -> Result<Vec<ArrayRef>, ExecError> {
        if self.group_width == 0 {
            return Ok(Vec::new());
        }
        if slots.is_empty() {
            let fields = &self.output_schema.fields()[..self.group_width];
            return Ok(fields.iter().map(|f| new_empty_array(f.data_type())).collect());
        }
        Ok(self.reader.codec().decode(slots.iter().map(|&s| self.keys.key(s)))?)
    }

    fn emit(
        &self,
        groups: &[ArrayRef],
        old: &RecordBatch,
        new: &[ArrayRef],
        existed: &BooleanBuffer,
        exists: &BooleanBuffer,
        out: &mut Output,
    ) -> Result<(), ExecError> {
        let mut changed = existed ^ exists;
        for (old, new) in old.columns().iter().zip(new) {
            changed = &changed | &differ(old, new)?;
        }
        let picks = |mask: BooleanBuffer| {
            UInt32Array::from_iter_values(mask.set_indices().map(|i| i as u32))
        };
        let minus = picks(&changed & existed);
        let plus = picks(&changed & exists);
        let rows = minus.len() + plus.len();
        if rows == 0 {
            return Ok(());
        }
        let mut columns = Vec::with_capacity(self.output_schema.fields().len());
        for group in groups {
            columns.push(joined(group, &minus, group, &plus)?);
        }
        for (old, new) in old.columns().iter().zip(new) {
            columns.push(joined(old, &minus, new, &plus)?);
        }
        let weights = (!minus.is_empty()).then(|| {
            let signs = (0..rows).map(|i| if i < minus.len() { -1 } else { 1 });
            Int64Array::from_iter_values(signs)
        });
        let chunk = DeltaChunk::new(new_batch(&self.output_schema, columns, rows)?, weights);
        super::emit_sliced(chunk, self.env.options.chunk_rows, out);
        Ok(())
    }

    /// State rows of the slots: put where the group exists, deleted where it no longer does.
    fn write(
        &mut self,
        slots: &[Slot],
        groups: Vec<ArrayRef>,
        exists: &BooleanBuffer,
        barrier: bool,
    ) -> Result<(), ExecError> {
        let mut columns = groups;
        columns.push(Arc::new(Int64Array::from_iter_values(
            slots.iter().map(|&s| self.rows[s as usize]),
        )));
        for accumulator in &self.accumulators {
            let from = columns.len();
            let types: Vec<DataType> = (from..from + accumulator.width())
                .map(|c| self.state_schema.field(c).data_type().clone())
                .collect();
            columns.extend(accumulator.store(slots, &types)?);
        }
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
            (self.keys.vnode(slot), self.keys.key(slot))
        }));
        let mut values = new_batch(&self.state_schema, columns, slots.len())?;
        if kept.len() < slots.len() {
            values = take_rows(&values, &UInt32Array::from(kept))?;
        }
        self.table.write(keys, Some(weights.into()), values)
    }

    fn holds_something(&self, slot: Slot) -> bool {
        !self.accumulators.iter().all(|a| a.is_blank(slot as usize))
    }

    /// Makes room in the columns for slots just made.
    fn ensure(&mut self) {
        let capacity = self.keys.capacity();
        if self.rows.len() < capacity {
            let capacity = capacity.next_power_of_two();
            self.rows.resize(capacity, 0);
            self.emitted.resize(capacity, false);
            self.written.resize(capacity, false);
            self.accumulators.iter_mut().for_each(|a| a.ensure(capacity));
        }
    }

    /// A slot whose group has no state: empty.
    fn absent(&mut self, slot: Slot) {
        self.rows[slot as usize] = 0;
        self.emitted[slot as usize] = false;
        self.written[slot as usize] = false;
        self.accumulators.iter_mut().for_each(|a| a.reset(slot as usize));
        self.values.iter_mut().for_each(|v| v.created(slot));
        self.resident(slot);
    }

    fn resident(&mut self, slot: Slot) {
        self.keys.set_resident(slot);
        self.keys.set_size(slot, self.slot_bytes);
    }

    /// Asks for the state of slots that are neither resident nor being fetched.
    fn fetch(&mut self, missing: Vec<Slot>) -> Result<(), ExecError> {
        if missing.is_empty() {
            return Ok(());
        }
        self.env.metrics.cache_misses.add(missing.len() as u64);
        missing.iter().for_each(|&s| self.keys.set_fetching(s));
        let keys = storage_keys(missing.iter().map(|&s| (self.keys.vnode(s), self.keys.key(s))));
        let lookup = self.table.multi_get(keys);
        match self.fetches.submit(missing, lookup)? {
            Some((slots, found)) => self.arrived(&slots, &found),
            None => {
                self.env.metrics.fetch_rounds.add(1);
                Ok(())
            }
        }
    }

    /// The state of `slots` is here.
    fn arrived(&mut self, slots: &[Slot], found: &Found) -> Result<(), ExecError> {
        let present: Vec<Slot> = found.input.values().iter().map(|&i| slots[i as usize]).collect();
        let columns = found.values.columns();
        let mut at = self.group_width;
        if let Some(rows) = columns.get(at) {
            let rows = rows.as_primitive::<Int64Type>();
            for (i, &slot) in present.iter().enumerate() {
                self.rows[slot as usize] = rows.value(i);
                self.emitted[slot as usize] = self.group_width == 0 || rows.value(i) > 0;
                self.written[slot as usize] = true;
                self.resident(slot);
            }
        }
        at += 1;
        for accumulator in &mut self.accumulators {
            accumulator.load(&present, &columns[at..at + accumulator.width()])?;
            at += accumulator.width();
        }
        for &slot in slots {
            if !self.keys.is_resident(slot) {
                self.absent(slot);
            }
        }
        Ok(())
    }

    /// Makes every slot of a chunk resident, or parks its rows; runs what can run.
    fn admit(
        &mut self,
        chunk: DeltaChunk,
        slots: Vec<Slot>,
        out: &mut Output,
    ) -> Result<(), ExecError> {
        let mut missing = Vec::new();
        for &slot in &slots {
            if !self.keys.is_resident(slot) && !self.keys.is_fetching(slot) {
                if self.keys.is_complete() {
                    self.absent(slot);
                } else {
                    missing.push(slot);
                    self.keys.set_fetching(slot);
                }
            }
        }
        self.fetch(missing)?;
        let (mut run, mut run_slots, mut park, mut park_slots) = (vec![], vec![], vec![], vec![]);
        for (row, &slot) in slots.iter().enumerate() {
            let resident = self.keys.is_resident(slot);
            let (rows, row_slots) =
                if resident { (&mut run, &mut run_slots) } else { (&mut park, &mut park_slots) };
            rows.push(row as u32);
            row_slots.push(slot);
        }
        if park.is_empty() {
            self.run(&chunk, &slots)?;
        } else {
            self.env.metrics.parked_rows.add(park.len() as u64);
            self.gate.park(0, &chunk, &park, &park_slots);
            if !run.is_empty() {
                self.run(&chunk.take(&UInt32Array::from(run))?, &run_slots)?;
            }
        }
        self.make_room(out)
    }

    /// Keeps the cache and the old values within their budgets.
    fn make_room(&mut self, out: &mut Output) -> Result<(), ExecError> {
        if self.old_bytes > self.env.options.group_change_bytes {
            self.flush_early(out)?;
        }
        let budget = self.limits.cache_budget(&self.env, self.keys.bytes());
        if !self.limits.is_over(self.keys.bytes(), budget) {
            return Ok(());
        }
        self.flush_early(out)?;
        let (values, written) = (&mut self.values, &self.written);
        self.keys.evict(budget - budget / 8, |slot| {
            values.iter_mut().for_each(|v| v.forget(slot));
            written[slot as usize]
        });
        self.limits.evicted(self.keys.bytes(), budget);
        Ok(())
    }

    /// A flush between barriers. Groups with unresolved values stay as they are until the barrier.
    fn flush_early(&mut self, out: &mut Output) -> Result<(), ExecError> {
        if self.values.iter().all(ValueTable::is_empty) {
            self.flush(false, out)?;
        }
        Ok(())
    }

    async fn complete_fetches(&mut self, out: &mut Output) -> Result<(), ExecError> {
        let done = self.fetches.completed().await?;
        let mut slots = Vec::new();
        for (asked, found) in done {
            self.arrived(&asked, &found)?;
            slots.extend(asked);
        }
        for Ready { chunk, slots, .. } in self.gate.take(slots)? {
            self.run(&chunk, &slots)?;
        }
        self.make_room(out)
    }

    /// The one row of a global aggregate exists from the first epoch on.
    async fn ensure_global(&mut self) -> Result<(), ExecError> {
        if !std::mem::take(&mut self.global_due) {
            return Ok(());
        }
        let hash = millrace_common::hash::hash_columns(&[], 1)?[0];
        let slot = self.keys.find_or_insert(hash, 0, &[], self.stamp);
        self.ensure();
        if !self.keys.is_resident(slot) {
            if self.keys.is_complete() {
                self.absent(slot);
            } else {
                self.fetch(vec![slot])?;
                // Nothing is parked at a barrier, and no room is made before the row is pinned: a cache too
                // small for it would let it go again, for ever.
                while !self.keys.is_resident(slot) {
                    for (asked, found) in self.fetches.completed().await? {
                        self.arrived(&asked, &found)?;
                    }
                }
            }
        }
        self.remember_old(&[slot])
    }
}

impl Operator for Aggregate {
    fn push(&mut self, _: usize, chunk: DeltaChunk, out: &mut Output) -> Result<(), ExecError> {
        if chunk.is_empty() {
            return Ok(());
        }
        self.stamp += 1;
        let keys = self.reader.read(&chunk.batch)?;
        let mut slots = std::mem::take(&mut self.scratch);
        let probe = self.keys.probe(&keys, None, self.stamp, &mut slots);
        self.ensure();
        if probe == Probe::AllResident {
            self.env.metrics.cache_hits.add(slots.len() as u64);
            self.run(&chunk, &slots)?;
            self.scratch = slots;
            self.make_room(out)
        } else {
            self.admit(chunk, slots, out)
        }
    }

    fn is_full(&self) -> bool {
        self.limits.is_full(&self.env, &self.gate, self.fetches.is_empty())
    }

    fn is_pending(&self) -> bool {
        !self.fetches.is_empty()
    }

    fn progress<'a>(&'a mut self, out: &'a mut Output) -> BoxFuture<'a, Result<(), ExecError>> {
        self.complete_fetches(out).boxed()
    }

    /// A value of the aggregate's table begins with the group's columns.
    fn retain(&mut self, _: usize, by: RetentionBy, bound: i64) {
        if let RetentionBy::Value(at) = by {
            self.closed = Some((at, bound));
        }
    }

    fn barrier<'a>(&'a mut self, out: &'a mut Output) -> BoxFuture<'a, Result<(), ExecError>> {
        async move {
            debug_assert!(self.gate.is_empty() && self.fetches.is_empty());
            self.ensure_global().await?;
            for table in &mut self.values {
                table.resolve(&self.keys, &mut self.accumulators, &self.env.errors).await?;
            }
            self.flush(true, out)?;
            self.sweep()?;
            self.limits.unpinned();
            self.make_room(out)
        }
        .boxed()
    }

    fn seal(&mut self, sealed: &mut Vec<MemRun>) -> Result<(), ExecError> {
        sealed.extend(self.table.seal()?);
        for values in &mut self.values {
            sealed.extend(values.table().seal()?);
        }
        Ok(())
    }

    fn memory_size(&self) -> usize {
        self.keys.bytes()
            + self.old_bytes
            + self.gate.bytes()
            + self.values.iter().map(ValueTable::memory_size).sum::<usize>()
    }
}

/// Where two columns differ, NULLs being equal.
pub(super) fn differ(old: &ArrayRef, new: &ArrayRef) -> Result<BooleanBuffer, ExecError> {
    if !old.data_type().is_nested() {
        return Ok(distinct(old, new)?.values().clone());
    }
    let codec = KeyCodec::new([old.data_type().clone()])?;
    let (old, new) =
        (codec.rows(std::slice::from_ref(old))?, codec.rows(std::slice::from_ref(new))?);
    Ok(old.iter().zip(new.iter()).map(|(old, new)| old != new).collect())
}

fn old_schema(calls: &[millrace_graph::AggCall]) -> SchemaRef {
    let results = calls.iter().map(|c| Field::new("", c.output_type.clone(), true));
    let fields: Vec<Field> =
        results.chain([Field::new("exists", DataType::Boolean, true)]).collect();
    SchemaRef::new(Schema::new(fields))
}

/// One value table for each that the calls name.
fn value_tables(
    calls: &[millrace_graph::AggCall],
    input: &SchemaRef,
    tables: &mut dyn FnMut(usize) -> Result<Box<dyn StateTable>, ExecError>,
) -> Result<Vec<ValueTable>, ExecError> {
    let mut values: Vec<(usize, ValueTable)> = Vec::new();
    for (i, call) in calls.iter().enumerate() {
        let Some(millrace_graph::ValueTable { table: local, descending }) = call.state else {
            continue;
        };
        let arg =
            call.arg.ok_or_else(|| ExecError::internal("a DISTINCT call without an argument"))?;
        let at = match values.iter().position(|v| v.0 == local) {
            Some(at) => at,
            None => {
                let t = input.field(arg).data_type();
                let extremes = calls.iter().any(|c| {
                    let extreme = matches!(c.func, AggFunc::Min | AggFunc::Max);
                    extreme && c.state.is_some_and(|v| v.table == local)
                });
                let table = tables(local)?;
                let made = ValueTable::new(table, arg, call.filter, t, descending, extremes)?;
                values.push((local, made));
                values.len() - 1
            }
        };
        match call.func {
            AggFunc::Min | AggFunc::Max => values[at].1.add_extreme(i),
            func if func.is_collected() => values[at].1.add_collected(i),
            _ => values[at].1.add_distinct(i),
        }
    }
    Ok(values.into_iter().map(|v| v.1).collect())
}

/// Which rows count for a call: argument not NULL, filter true. `None`: all.
fn mask(batch: &RecordBatch, arg: Option<usize>, filter: Option<usize>) -> Option<BooleanBuffer> {
    let valid = arg
        .and_then(|a| batch.column(a).logical_nulls())
        .filter(|n| n.null_count() > 0)
        .map(|n| n.inner().clone());
    let filtered = filter.map(|f| {
        let f = batch.column(f).as_boolean();
        match f.nulls() {
            Some(nulls) => f.values() & nulls.inner(),
            None => f.values().clone(),
        }
    });
    match (valid, filtered) {
        (Some(v), Some(f)) => Some(&v & &f),
        (v, f) => v.or(f),
    }
}

/// Rows `minus` of one array, then rows `plus` of the other.
fn joined(
    old: &ArrayRef,
    minus: &UInt32Array,
    new: &ArrayRef,
    plus: &UInt32Array,
) -> Result<ArrayRef, ExecError> {
    let plus = compute::take(new, plus, None)?;
    if minus.is_empty() {
        return Ok(plus);
    }
    let minus = compute::take(old, minus, None)?;
    Ok(compute::concat(&[minus.as_ref(), plus.as_ref()])?)
}
