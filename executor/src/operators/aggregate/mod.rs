//! Grouped aggregation (docs/design.md §3, §6, §7).
//!
//! A group is a slot of the key table; its row count and accumulators are columns indexed by slot. A
//! chunk of resident groups is one probe and one tight loop a call. Groups that are not resident are
//! fetched in one batched `multi_get`; their rows wait at the gate.
//!
//! The first time a group is touched in an epoch its old result is remembered, column-wise, parallel to the
//! list of dirty slots. At the barrier each dirty group's new result is compared with it, differences leave
//! as −old +new, and the group's state row is written. When the old values exceed their budget, or the cache
//! is full of dirty groups, the same happens early: every such step emits the net change since the one
//! before, so the sum is the same.
//!
//! Invariants: what has been emitted for a group is a function of the state row last written; a
//! dirty slot is not evicted; a group exists while its row count is positive (a global aggregate
//! always). DISTINCT calls and retractable MIN/MAX are read for when rows arrive and get their part at the
//! barrier, or before it when the epoch's changes are too many ([`value_tables`], [`Operator::settle`]).

mod accumulator;
mod best_values;
mod exact_aggregates;
mod extreme;
mod float_sum;
mod groups;
mod number;
mod ordered_entries;
mod value_counts;
mod value_tables;
mod values;

use std::pin::pin;
use std::sync::Arc;

use arrow::array::{
    Array, ArrayRef, AsArray, BooleanArray, Int64Array, RecordBatch, UInt32Array, new_empty_array,
};
use arrow::buffer::BooleanBuffer;
use arrow::compute;
use arrow::compute::kernels::cmp::distinct;
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use futures::FutureExt;
use futures::future::{BoxFuture, Either, select};
use millrace_common::access::RetentionBy;
use millrace_common::collections::HashSet;
use millrace_common::delta::take_rows;
use millrace_common::fault_injection::is_planted;
use millrace_common::keys::KeyCodec;
use millrace_common::{DeltaChunk, Epoch, SqlError, SqlState};
use millrace_storage::MemRun;

use self::accumulator::{Accumulator, Rows};
use self::groups::Groups;
use self::value_tables::ValueTables;
use super::{BuildContext, Built, Env};
use crate::error::ExecError;
use crate::lookahead::Hint;
use crate::operator::{Operator, Output};
use crate::state::arena::new_batch;
use crate::state::cache::Probe;
use crate::state::gate::Ready;
use crate::state::keyed::Request;
use crate::state::keys::KeyReader;
use crate::state::{Answers, HeldUntilBarrier, KeyedState, Slot};

/// See the module.
pub struct Aggregate {
    calls: Vec<millrace_graph::AggCall>,
    group_width: usize,
    output_schema: SchemaRef,
    /// The calls' results, and whether the group was there.
    old_schema: SchemaRef,
    state: KeyedState<Groups>,
    /// Old results of the dirty slots, in their order.
    old: Vec<RecordBatch>,
    old_bytes: usize,
    /// Changes of values, old results, and groups that they keep in memory.
    held: HeldUntilBarrier,
    /// A global aggregate has not yet made sure of its one row.
    global_due: bool,
    env: Env,
}

impl Aggregate {
    /// Builds the operator of a node. Fails where the graph does not fit it.
    pub fn build(aggregate: &millrace_graph::Aggregate, ctx: BuildContext<'_>) -> Built {
        let input = &ctx.input(0)?;
        let BuildContext { node, env, tables, .. } = ctx;
        let table = tables(aggregate.table)?;
        let accumulators = aggregate
            .calls
            .iter()
            .map(|call| Accumulator::new(call, input))
            .collect::<Result<Vec<_>, _>>()?;
        let values = ValueTables::new(aggregate, input, tables, &env)?;
        let width = aggregate.group.len();
        let reader = KeyReader::new(input, &aggregate.group, &aggregate.vnode)?;
        let is_empty = table.is_empty();
        let groups = Groups::new(table, width, accumulators, values);
        let mut state = KeyedState::new(groups, vec![reader], is_empty, &env);
        state.entries.values.share_presence(state.keys.presence());
        Ok(Box::new(Aggregate {
            group_width: width,
            output_schema: super::nullable(&node.schema),
            old_schema: old_schema(&aggregate.calls),
            calls: aggregate.calls.clone(),
            state,
            old: Vec::new(),
            old_bytes: 0,
            held: HeldUntilBarrier::new(&env),
            global_due: aggregate.group.is_empty(),
            env,
        }))
    }

    /// Adds rows of resident groups.
    fn run(&mut self, chunk: &DeltaChunk, slots: &[Slot]) -> Result<(), ExecError> {
        self.remember_old(slots)?;
        let groups = &mut self.state.entries;
        let rows = &mut groups.rows;
        let weights = chunk.weights.as_ref().map(|w| &w.values()[..]);
        match weights {
            None => slots.iter().for_each(|&s| rows[s as usize] += 1),
            Some(w) if self.calls.is_empty() && is_planted("distinct-ignores-weight") => {
                slots.iter().zip(w).for_each(|(&s, &w)| {
                    rows[s as usize] = if w < 0 { 0 } else { rows[s as usize] + w }
                })
            }
            Some(w) => slots.iter().zip(w).for_each(|(&s, &w)| rows[s as usize] += w),
        }
        for (call, accumulator) in self.calls.iter().zip(&mut groups.accumulators) {
            if call.distinct && call.state.is_some() {
                continue;
            }
            let rows = Rows { slots, weights, mask: mask(&chunk.batch, call.arg, call.filter) };
            accumulator.update(&rows, call.arg.map(|a| chunk.batch.column(a)))?;
        }
        groups.values.update(chunk, slots, &self.state.keys, &groups.accumulators)
    }

    /// Marks groups dirty and remembers the results of those that were not.
    fn remember_old(&mut self, slots: &[Slot]) -> Result<(), ExecError> {
        let before = self.state.keys.dirty().len();
        for &slot in slots {
            self.state.keys.mark_dirty(slot);
        }
        let fresh = &self.state.keys.dirty()[before..];
        if fresh.is_empty() {
            return Ok(());
        }
        let (mut columns, _) = self.results(fresh)?;
        let exists = fresh
            .iter()
            .map(|&s| Some(self.state.entries.emitted[s as usize]))
            .collect::<BooleanArray>();
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
        for (call, accumulator) in self.calls.iter().zip(&self.state.entries.accumulators) {
            let (column, n) = accumulator.result(slots, &call.output_type)?;
            overflows += n;
            columns.push(column);
        }
        Ok((columns, overflows))
    }

    /// Emits −old +new of every dirty group that does not wait and writes its state.
    fn flush(
        &mut self,
        barrier: bool,
        waiting: &HashSet<Slot>,
        out: &mut Output,
    ) -> Result<(), ExecError> {
        let places = (!waiting.is_empty()).then(|| {
            let dirty = self.state.keys.dirty().iter().zip(0u32..);
            let (kept, done): (Vec<_>, Vec<_>) = dirty.partition(|(s, _)| waiting.contains(s));
            let rows =
                |of: Vec<(&Slot, u32)>| UInt32Array::from_iter_values(of.iter().map(|p| p.1));
            (rows(kept), rows(done))
        });
        let dirty = self.state.keys.take_dirty_but(|slot| waiting.contains(&slot));
        if dirty.is_empty() {
            return Ok(());
        }
        let mut old = compute::concat_batches(&self.old_schema, &self.old)?;
        self.old.clear();
        self.old_bytes = 0;
        if let Some((kept, done)) = places {
            let kept = take_rows(&old, &kept)?;
            self.old_bytes = kept.get_array_memory_size();
            self.old.push(kept);
            old = take_rows(&old, &done)?;
        }
        let (new, overflows) = self.results(&dirty)?;
        if overflows > 0 {
            let e = SqlError::new(
                SqlState::NUMERIC_VALUE_OUT_OF_RANGE,
                "an aggregate's result is out of range",
            );
            self.env.errors.report("Aggregate", &e, overflows);
        }
        let existed = old.column(self.calls.len()).as_boolean().values().clone();
        let exists: BooleanBuffer = dirty
            .iter()
            .map(|&s| self.group_width == 0 || self.state.entries.rows[s as usize] > 0)
            .collect();
        let groups = self.group_columns(&dirty)?;
        self.emit(&groups, &old, &new, &existed, &exists, out)?;
        self.state.entries.write(&self.state.keys, &dirty, groups, &exists, barrier)?;
        if self.state.entries.is_variable() {
            dirty.into_iter().for_each(|slot| self.state.resize(slot));
        }
        Ok(())
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
        Ok(self.state.reader(0).codec().decode(slots.iter().map(|&s| self.state.keys.key(s)))?)
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

    /// Keeps the cache and the old values within their budgets.
    fn make_room(&mut self, out: &mut Output) -> Result<(), ExecError> {
        if self.old_bytes > self.env.options.group_change_bytes {
            self.flush_early(out)?;
        }
        if self.state.is_over() {
            self.flush_early(out)?;
            self.state.evict()?;
        }
        self.state.entries.values.make_room()?;
        let (changes, pinned) = self.held_bytes();
        self.held.set(changes, pinned);
        Ok(())
    }

    /// Bytes of changes that wait for the barrier, and of groups that stay for them. Without values of groups none
    /// need to: they are flushed early.
    fn held_bytes(&self) -> (usize, usize) {
        let values = &self.state.entries.values;
        let pinned = if values.is_empty() { 0 } else { self.state.pinned() };
        (values.pending_bytes() + self.old_bytes, pinned)
    }

    /// What of the epoch's changes can be told already: see [`Operator::settle`].
    async fn settle_changes(&mut self, out: &mut Output) -> Result<(), ExecError> {
        self.state.check_settled(self.state.entries.values.is_idle())?;
        let Groups { values, accumulators, .. } = &mut self.state.entries;
        let waiting = values.settle(&self.state.keys, accumulators, &self.env.errors).await?;
        self.flush(false, &waiting, out)?;
        self.state.unpin();
        self.make_room(out)?;
        let (changes, pinned) = self.held_bytes();
        self.held.settled(changes, pinned);
        Ok(())
    }

    /// A flush between barriers. Groups with unresolved values stay as they are until the barrier.
    fn flush_early(&mut self, out: &mut Output) -> Result<(), ExecError> {
        if self.state.entries.values.is_empty() {
            self.flush(false, &HashSet::default(), out)?;
        }
        Ok(())
    }

    /// Waits for a read, of groups or of their values: groups that have come, or nothing more to do.
    async fn next_answer(&mut self) -> Result<Option<Answers<Request>>, ExecError> {
        let (groups, Groups { values, .. }, keys) = self.state.parts();
        if values.is_idle() && !values.is_prefetching() {
            return Ok(Some(groups.completed().await?));
        }
        if groups.is_idle() {
            values.completed(keys).await?;
            return Ok(None);
        }
        match select(pin!(groups.completed()), pin!(values.completed(keys))).await {
            Either::Left((groups, _)) => Ok(Some(groups?)),
            Either::Right((taken, _)) => taken.map(|()| None),
        }
    }

    async fn complete_fetches(&mut self, out: &mut Output) -> Result<(), ExecError> {
        let Some(answers) = self.next_answer().await? else {
            return self.state.entries.values.make_room();
        };
        for Ready { chunk, slots, .. } in self.state.take_in(answers)? {
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
        let slot = self.state.slot(hash, 0, &[]);
        self.state.request(0, &[slot], |_| 1)?;
        // Nothing is parked at a barrier, and no room is made before the row is pinned: a cache too
        // small for it would let it go again, for ever.
        while self.state.keys.is_fetching(slot) {
            self.state.arrived().await?;
        }
        self.remember_old(&[slot])
    }
}

impl Operator for Aggregate {
    fn push(&mut self, _: usize, chunk: DeltaChunk, out: &mut Output) -> Result<(), ExecError> {
        if chunk.is_empty() {
            return Ok(());
        }
        let (slots, probe) = self.state.probe(0, &chunk)?;
        if probe != Probe::AllResident && !self.state.keys.is_complete() {
            let Groups { values, accumulators, .. } = &mut self.state.entries;
            values.ask_ahead(&chunk, &slots, &self.state.keys, accumulators)?;
        }
        if let Some(Ready { chunk, slots, .. }) = self.state.admit_slots(0, chunk, slots, probe)? {
            self.run(&chunk, &slots)?;
            self.state.recycle(slots);
        }
        self.make_room(out)
    }

    fn is_over(&self) -> bool {
        self.held.is_over(&self.env)
    }

    fn held(&self) -> usize {
        self.held.bytes()
    }

    fn settle<'a>(&'a mut self, out: &'a mut Output) -> BoxFuture<'a, Result<(), ExecError>> {
        self.settle_changes(out).boxed()
    }

    fn shed(&mut self, _: &mut Output) -> Result<(), ExecError> {
        self.state.shed()?;
        self.state.entries.values.shed()
    }

    fn is_full(&self) -> bool {
        self.state.is_full_beside(!self.state.entries.values.is_idle())
    }

    fn is_pending(&self) -> bool {
        self.state.is_fetching() || !self.state.entries.values.is_idle()
    }

    /// The first port is that of the groups, each other one of a value table's.
    fn hint(&mut self, port: usize, hint: &Hint) -> Result<(), ExecError> {
        if self.state.entries.values.hint(port, hint)? {
            Ok(())
        } else {
            self.state.hint(port, hint)
        }
    }

    fn is_prefetching(&self) -> bool {
        self.state.is_prefetching() || self.state.entries.values.is_prefetching()
    }

    fn progress<'a>(&'a mut self, out: &'a mut Output) -> BoxFuture<'a, Result<(), ExecError>> {
        self.complete_fetches(out).boxed()
    }

    /// A value of the aggregate's table begins with the group's columns.
    fn retain(&mut self, _: usize, by: RetentionBy, bound: i64) {
        if let RetentionBy::Value(at) = by {
            self.state.close(at, bound);
            self.state.entries.values.close(at, bound);
        }
    }

    fn watermark(&mut self, port: usize, columns: &[(usize, i64)]) {
        self.state.watermark(port, columns);
        self.state.entries.values.watermark(port, columns);
    }

    fn time(&mut self, epoch: Epoch) {
        let seen = self.state.entries.values.pass(epoch);
        seen.iter().for_each(|seen| self.state.note_inside(seen));
        self.state.pass(epoch);
        self.state.entries.values.share_presence(self.state.keys.presence());
    }

    fn barrier<'a>(&'a mut self, out: &'a mut Output) -> BoxFuture<'a, Result<(), ExecError>> {
        async move {
            self.state.check_settled(self.state.entries.values.is_idle())?;
            self.ensure_global().await?;
            let Groups { values, accumulators, .. } = &mut self.state.entries;
            values.resolve(&self.state.keys, accumulators, &self.env.errors).await?;
            self.flush(true, &HashSet::default(), out)?;
            self.held.clear();
            self.state.sweep()?;
            self.state.unpin();
            self.make_room(out)
        }
        .boxed()
    }

    fn seal(&mut self, sealed: &mut Vec<MemRun>) -> Result<(), ExecError> {
        sealed.extend(self.state.entries.table.seal()?);
        self.state.entries.values.seal(sealed)
    }

    fn memory_size(&self) -> usize {
        self.state.held()
            + self.old_bytes
            + self.state.parked_bytes()
            + self.state.entries.values.memory_size()
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
