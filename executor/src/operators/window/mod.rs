//! Window functions (docs/design.md §3, §7).
//!
//! Stored: `group | order | identity → row`, every row. In memory a group has all of its rows in order,
//! or none. A row that arrives is only noted: what it does follows at the barrier, and the group it
//! belongs to is read meanwhile if it is not in memory, all such groups of a chunk in one batch.
//!
//! At the barrier, group by group: the intervals of keys whose results the noted changes can affect
//! ([`affected`]), their results before, the changes themselves, their results after ([`evaluate`]), and
//! out go the differences. A change costs what it reaches, not what its group holds. Results are never
//! stored: they are a function of the rows. Invariant: what has been emitted is the function of the
//! rows as they were at the last barrier.

mod affected;
mod asof_lookup;
mod closing;
mod evaluate;
mod rows;
mod sessions;
mod values;

use arrow::array::{Array, ArrayRef, Int64Array};
use arrow::compute::interleave;
use arrow::datatypes::{Field, Schema, SchemaRef};
use futures::FutureExt;
use futures::future::BoxFuture;
use millrace_common::DeltaChunk;
use millrace_common::access::RetentionBy;
use millrace_common::identity::RowCodec;
use millrace_functions::window_call::Reach;
use millrace_storage::{Found, MemRun};

use self::affected::{Interval, affected};
use self::closing::Closing;
use self::evaluate::{Calls, Results};
use self::rows::Rows;
use self::values::Span;
use super::ordered::{Change, Changes, Ranked, RowOrder};
use super::{Env, Limits};
use crate::error::ExecError;
use crate::operator::{Operator, Output};
use crate::options::StateAccess;
use crate::state::arena::{RowRef, new_batch};
use crate::state::keys::{KeyReader, storage_keys};
use crate::state::{Fetches, KeyBytes, KeyTable, RowArena, Slot, StateTable};

/// See the module.
pub struct WindowOperator {
    reader: KeyReader,
    order: RowOrder,
    calls: Calls,
    reaches: Vec<Reach>,
    spans: Vec<Span>,
    /// Tells results apart; absent where a result's type has no key.
    results: Option<RowCodec>,
    table: Box<dyn StateTable>,
    schema: SchemaRef,
    keys: KeyTable,
    groups: Vec<Rows>,
    arena: RowArena,
    pending: Changes,
    fetches: Fetches<Vec<Slot>>,
    stamp: u64,
    limits: Limits,
    env: Env,
    closing: Option<Closing>,
    group_columns: Vec<usize>,
    /// Of a column of the group, by position in it: groups below are never asked for again.
    closed: Option<(usize, i64)>,
    /// Groups below have left the cache.
    swept: i64,
}

impl WindowOperator {
    pub fn new(
        node: &millrace_graph::Node,
        window: &millrace_graph::Window,
        input: &SchemaRef,
        env: Env,
        tables: &mut dyn FnMut(usize) -> Result<Box<dyn StateTable>, ExecError>,
    ) -> Result<WindowOperator, ExecError> {
        let table = tables(window.state.table)?;
        let (group, order, key) = (&window.group, &window.order, &window.state.unique_key);
        let input = super::nullable(input);
        let errors = std::sync::Arc::clone(&env.errors);
        let calls = Calls::new(&window.calls, order, &input, errors)?;
        let closing = match &window.state.closing {
            Some(c) => Some(Closing::new(c, window, &env, tables(c.table)?)?),
            None => None,
        };
        Ok(WindowOperator {
            reader: KeyReader::new(&input, group, &window.vnode)?,
            order: RowOrder::new(group, order, window.state.storage, key, false, &input)?,
            reaches: calls.reaches(),
            spans: calls.spans(),
            calls,
            results: results_codec(&window.calls),
            schema: super::nullable(&node.schema),
            keys: KeyTable::new(env.options.eviction, table.is_empty()),
            table,
            groups: Vec::new(),
            arena: RowArena::new(input),
            pending: Changes::new(),
            fetches: Fetches::default(),
            stamp: 0,
            limits: Limits::new(&env),
            env,
            closing,
            group_columns: group.clone(),
            closed: None,
            swept: i64::MIN,
        })
    }

    /// Reads groups that are not in memory, as they were when the epoch began.
    fn fetch(&mut self, slots: &[Slot]) -> Result<(), ExecError> {
        let mut missing = Vec::new();
        for &slot in slots {
            if self.keys.is_resident(slot) || self.keys.is_fetching(slot) {
                continue;
            }
            if self.keys.is_complete() {
                self.keys.set_resident(slot);
            } else {
                self.keys.set_fetching(slot);
                missing.push(slot);
            }
        }
        self.env.metrics.cache_hits.add((slots.len() - missing.len()) as u64);
        if missing.is_empty() {
            return Ok(());
        }
        self.env.metrics.cache_misses.add(missing.len() as u64);
        let keys = missing.iter().map(|&s| (self.keys.vnode(s), self.keys.key(s)));
        let lookup = self.table.multi_scan(storage_keys(keys), None);
        match self.fetches.submit(missing, lookup)? {
            Some((slots, found)) => self.arrived(&slots, &found),
            None => {
                self.env.metrics.fetch_rounds.add(1);
                Ok(())
            }
        }
    }

    fn arrived(&mut self, slots: &[Slot], found: &Found) -> Result<(), ExecError> {
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
            self.groups[slot as usize] = Rows::from_sorted(rows);
            self.keys.set_resident(slot);
            self.resize(slot);
        }
        Ok(())
    }

    fn resize(&mut self, slot: Slot) {
        let rows = &self.groups[slot as usize];
        self.keys.set_size(slot, rows.bytes() + rows.len() * self.arena.row_bytes());
    }

    /// Notes the rows of a chunk.
    fn note(&mut self, chunk: &DeltaChunk, slots: &[Slot]) -> Result<(), ExecError> {
        let keys = self.order.keys(&chunk.batch)?;
        let id = self.arena.insert(chunk.batch.clone(), chunk.num_rows());
        let mut scratch = Vec::with_capacity(64);
        for (row, &slot) in slots.iter().enumerate() {
            self.keys.mark_dirty(slot);
            let order = keys.write(row, &mut scratch);
            let at = RowRef { chunk: id, row: row as u32 };
            let weight = chunk.weight(row);
            match self.pending.entry((slot, KeyBytes::new(&scratch))) {
                std::collections::hash_map::Entry::Occupied(mut entry) => {
                    entry.get_mut().weight += weight;
                    self.arena.release(at);
                }
                std::collections::hash_map::Entry::Vacant(entry) => {
                    entry.insert(Change { weight, order, at });
                }
            }
        }
        Ok(())
    }

    /// The epoch's changes: written, and what follows from them emitted.
    fn emit_deltas(&mut self, out: &mut Output) -> Result<(), ExecError> {
        let mut changes: Vec<((Slot, KeyBytes), Change)> = self.pending.drain().collect();
        changes.sort_unstable_by(|a, b| a.0.cmp(&b.0));
        self.order.write(&changes, &self.keys, &self.arena, self.table.as_mut())?;
        let mut rest = changes.into_iter().peekable();
        while let Some(slot) = rest.peek().map(|c| c.0.0) {
            let mut group = Vec::new();
            while let Some(((_, key), change)) = rest.next_if(|c| c.0.0 == slot) {
                if change.weight == 0 {
                    self.arena.release(change.at);
                } else {
                    group.push((key, change));
                }
            }
            if !group.is_empty() {
                self.settle_group(slot, group, out)?;
                self.resize(slot);
            }
        }
        self.keys.take_dirty();
        Ok(())
    }

    fn settle_group(
        &mut self,
        slot: Slot,
        changes: Vec<(KeyBytes, Change)>,
        out: &mut Output,
    ) -> Result<(), ExecError> {
        let at = slot as usize;
        let changed: Vec<(&KeyBytes, usize, i64)> =
            changes.iter().map(|(k, c)| (k, c.order as usize, c.weight)).collect();
        let orders: Vec<Vec<u8>> = match self.closing {
            Some(_) => changed.iter().map(|(key, order, _)| key[..*order].to_vec()).collect(),
            None => Vec::new(),
        };
        let intervals = affected(&self.groups[at], &changed, &self.reaches, &self.spans);
        let before = self.results_in(at, &intervals)?;
        let mut released = Vec::new();
        for (key, Change { weight, order, at: row }) in changes {
            released.extend(self.groups[at].add(Ranked { key, order, at: row, weight })?);
        }
        let after = self.results_in(at, &intervals)?;
        for (old, new) in before.iter().zip(&after) {
            self.emit(old, new, out)?;
        }
        released.into_iter().for_each(|row| self.arena.release(row));
        if let Some(closing) = &mut self.closing {
            let orders = orders.iter().map(Vec::as_slice);
            closing.note(slot, &self.groups[at], &intervals, orders);
        }
        Ok(())
    }

    /// Lets go of the rows of sessions and ASOF joins that no later change can reach, in memory and in the store.
    async fn close(&mut self) -> Result<(), ExecError> {
        let Some(closing) = &mut self.closing else { return Ok(()) };
        closing.write(&self.keys, &self.reader)?;
        let Some(due) = closing.due().await? else { return Ok(()) };
        self.stamp += 1;
        let mut slots = Vec::new();
        self.keys.probe(&due, None, self.stamp, &mut slots);
        self.grow();
        slots.sort_unstable();
        slots.dedup();
        self.fetch(&slots)?;
        while !self.fetches.is_empty() {
            self.complete_fetches().await?;
        }
        let (mut gone, mut looked_at) = (Vec::new(), Vec::new());
        for slot in slots {
            let Some(closing) = &self.closing else { break };
            let group = &mut self.groups[slot as usize];
            for row in closing.closed(group) {
                group.add(Ranked { weight: -row.weight, ..row.clone() })?;
                let change = Change { weight: -row.weight, order: row.order, at: row.at };
                gone.push(((slot, row.key), change));
            }
            looked_at.push(slot);
        }
        self.order.write(&gone, &self.keys, &self.arena, self.table.as_mut())?;
        gone.into_iter().for_each(|(_, change)| self.arena.release(change.at));
        for slot in looked_at {
            if self.groups[slot as usize].len() > 0 {
                self.resize(slot);
            } else {
                self.keys.remove(slot);
            }
        }
        Ok(())
    }

    /// Lets go of groups that no later change can reach, as the store does.
    fn sweep(&mut self) -> Result<(), ExecError> {
        let Some((at, bound)) = self.closed.filter(|(_, bound)| *bound > self.swept) else {
            return Ok(());
        };
        self.swept = bound;
        for slot in super::closed_keys(&self.keys, self.reader.codec(), at, bound)? {
            let rows = std::mem::take(&mut self.groups[slot as usize]);
            rows.iter().for_each(|r| self.arena.release(r.at));
            self.keys.remove(slot);
        }
        Ok(())
    }

    /// As many groups as there are slots.
    fn grow(&mut self) {
        if self.groups.len() < self.keys.capacity() {
            self.groups.resize(self.keys.capacity().next_power_of_two(), Rows::default());
        }
    }

    /// The entries of every interval and their results.
    fn results_in(&self, group: usize, intervals: &[Interval]) -> Result<Vec<Shown>, ExecError> {
        let rows = &self.groups[group];
        let one = |interval: &Interval| -> Result<Shown, ExecError> {
            let start = rows.partition_point(|r| r.key[..] < interval.low[..]);
            let end = match &interval.high {
                Some(high) => rows.partition_point(|r| r.key[..] <= high[..]),
                None => rows.len(),
            };
            let entries = rows.range(start..end).map(|r| (r.key.clone(), r.weight)).collect();
            let results = self.calls.evaluate(rows, start..end, &self.arena)?;
            Ok(Shown { entries, results })
        };
        intervals.iter().map(one).collect()
    }

    /// Emits the differences between an interval's results before and after.
    fn emit(&self, old: &Shown, new: &Shown, out: &mut Output) -> Result<(), ExecError> {
        let encoded = match &self.results {
            Some(codec) => {
                let rows = |r: &Results| codec.rows(&r.columns, r.rows.len());
                Some((rows(&old.results)?, rows(&new.results)?))
            }
            None => None,
        };
        let same = |o: usize, n: usize| {
            encoded.as_ref().is_some_and(|(old, new)| old.row(o).data() == new.row(n).data())
        };
        let mut diff = Diff::default();
        let (mut o, mut n) = (old.entries.iter().peekable(), new.entries.iter().peekable());
        // Places of the next copies.
        let (mut at_old, mut at_new) = (0, 0);
        loop {
            let order = match (o.peek(), n.peek()) {
                (None, None) => break,
                (Some(_), None) => std::cmp::Ordering::Less,
                (None, Some(_)) => std::cmp::Ordering::Greater,
                (Some(a), Some(b)) => a.0.cmp(&b.0),
            };
            let gone = if order.is_le() { o.next().map_or(0, |e| e.1 as usize) } else { 0 };
            let come = if order.is_ge() { n.next().map_or(0, |e| e.1 as usize) } else { 0 };
            for copy in 0..gone.max(come) {
                let (has_old, has_new) = (copy < gone, copy < come);
                if has_old && has_new && same(at_old + copy, at_new + copy) {
                    continue;
                }
                if has_old {
                    diff.push(old.results.rows[at_old + copy], (0, at_old + copy), -1);
                }
                if has_new {
                    diff.push(new.results.rows[at_new + copy], (1, at_new + copy), 1);
                }
            }
            at_old += gone;
            at_new += come;
        }
        if diff.rows.is_empty() {
            return Ok(());
        }
        let mut columns: Vec<ArrayRef> = self.arena.batch(&diff.rows)?.columns().to_vec();
        for (a, b) in old.results.columns.iter().zip(&new.results.columns) {
            let both: [&dyn Array; 2] = [a.as_ref(), b.as_ref()];
            columns.push(interleave(&both, &diff.picks)?);
        }
        let batch = new_batch(&self.schema, columns, diff.rows.len())?;
        let chunk = DeltaChunk::new(batch, Some(Int64Array::from(diff.weights)));
        super::emit_sliced(chunk, self.env.options.chunk_rows.max(1), out);
        Ok(())
    }

    async fn complete_fetches(&mut self) -> Result<(), ExecError> {
        for (asked, found) in self.fetches.completed().await? {
            self.arrived(&asked, &found)?;
        }
        Ok(())
    }

    fn held(&self) -> usize {
        self.keys.bytes().max(self.arena.bytes()) + self.pending.capacity() * 64
    }

    /// Keeps within the cache's budget: groups that have not changed go.
    fn make_room(&mut self) -> Result<(), ExecError> {
        let held = self.held();
        let budget = self.limits.cache_budget(&self.env, held);
        if !self.limits.is_over(held, budget) {
            return Ok(());
        }
        let target = self.keys.bytes() as f64 * (budget - budget / 8) as f64 / held as f64;
        let (groups, arena) = (&mut self.groups, &mut self.arena);
        self.keys.evict(target as usize, |slot| {
            let rows = std::mem::take(&mut groups[slot as usize]);
            rows.iter().for_each(|r| arena.release(r.at));
            rows.len() > 0
        });
        self.compact()?;
        let held = self.held();
        self.limits.evicted(held, budget);
        Ok(())
    }

    /// Rewrites the rows in memory densely; only when nothing else refers to them.
    fn compact(&mut self) -> Result<(), ExecError> {
        if self.pending.is_empty() && self.arena.wants_compaction() {
            let mut refs: Vec<&mut RowRef> =
                self.groups.iter_mut().flat_map(Rows::refs_mut).collect();
            self.arena.compact(&mut refs)?;
        }
        Ok(())
    }
}

impl Operator for WindowOperator {
    fn push(&mut self, _: usize, chunk: DeltaChunk, _: &mut Output) -> Result<(), ExecError> {
        if chunk.is_empty() {
            return Ok(());
        }
        self.stamp += 1;
        let keys = self.reader.read(&chunk.batch)?;
        let mut slots = Vec::with_capacity(chunk.num_rows());
        self.keys.probe(&keys, None, self.stamp, &mut slots);
        self.grow();
        self.note(&chunk, &slots)?;
        self.fetch(&slots)?;
        self.make_room()
    }

    fn is_full(&self) -> bool {
        self.env.options.state_access == StateAccess::Synchronous && !self.fetches.is_empty()
    }

    fn is_pending(&self) -> bool {
        !self.fetches.is_empty()
    }

    fn progress<'a>(&'a mut self, _: &'a mut Output) -> BoxFuture<'a, Result<(), ExecError>> {
        self.complete_fetches().boxed()
    }

    /// The table's values are whole rows.
    fn retain(&mut self, _: usize, by: RetentionBy, bound: i64) {
        if let RetentionBy::Value(column) = by
            && let Some(at) = self.group_columns.iter().position(|g| *g == column)
        {
            self.closed = Some((at, bound));
        }
    }

    fn watermark(&mut self, _: usize, columns: &[(usize, i64)]) {
        if let Some(closing) = &mut self.closing {
            closing.raise(columns);
        }
    }

    fn barrier<'a>(&'a mut self, out: &'a mut Output) -> BoxFuture<'a, Result<(), ExecError>> {
        async move {
            debug_assert!(self.fetches.is_empty());
            self.emit_deltas(out)?;
            self.close().await?;
            self.sweep()?;
            self.compact()?;
            self.limits.unpinned();
            self.make_room()
        }
        .boxed()
    }

    fn seal(&mut self, sealed: &mut Vec<MemRun>) -> Result<(), ExecError> {
        sealed.extend(self.table.seal()?);
        if let Some(closing) = &mut self.closing {
            sealed.extend(closing.seal()?);
        }
        Ok(())
    }

    fn memory_size(&self) -> usize {
        self.held()
    }
}

/// `None`: a result's type has no key.
fn results_codec(calls: &[millrace_functions::window_call::WindowCall]) -> Option<RowCodec> {
    let fields = calls.iter().map(|c| Field::new("", c.output_type.clone(), true));
    RowCodec::whole(&Schema::new(fields.collect::<Vec<_>>())).ok()
}

/// An interval's entries, with their weights, and their results, copies one by one.
struct Shown {
    entries: Vec<(KeyBytes, i64)>,
    results: Results,
}

/// Rows on their way out.
#[derive(Default)]
struct Diff {
    rows: Vec<RowRef>,
    /// Where a row's results are: before or after, and their place.
    picks: Vec<(usize, usize)>,
    weights: Vec<i64>,
}

impl Diff {
    fn push(&mut self, row: RowRef, pick: (usize, usize), weight: i64) {
        self.rows.push(row);
        self.picks.push(pick);
        self.weights.push(weight);
    }
}
