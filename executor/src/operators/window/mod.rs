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
//!
//! An epoch whose changes, or the groups that they keep in memory, are too much is settled in parts: the same
//! happens before the barrier, for those changes that leave of each row what may be stored. A change that does
//! not (within an epoch the new row of a key may overtake the old one) waits, and with it its group.

mod affected;
mod asof_lookup;
mod closing;
mod evaluate;
mod groups;
mod rows;
mod sessions;
mod values;

use std::iter::Peekable;
use std::vec::IntoIter;

use arrow::array::{Array, ArrayRef, Int64Array};
use arrow::compute::interleave;
use arrow::datatypes::{Field, Schema, SchemaRef};
use futures::FutureExt;
use futures::future::BoxFuture;
use millrace_common::access::RetentionBy;
use millrace_common::collections::HashSet;
use millrace_common::identity::RowCodec;
use millrace_common::{DeltaChunk, Epoch};
use millrace_functions::window_call::Reach;
use millrace_storage::{Found, MemRun};

use self::affected::{Interval, affected};
use self::closing::Closing;
use self::evaluate::{Calls, Results};
use self::groups::Groups;
use self::values::Span;
use super::ordered::{Change, Listed, Ranked, RowOrder};
use super::{BuildContext, Built, Env};
use crate::error::ExecError;
use crate::lookahead::Hint;
use crate::operator::{Operator, Output};
use crate::state::arena::{RowRef, new_batch};
use crate::state::keys::KeyReader;
use crate::state::{HeldUntilBarrier, KeyBytes, KeyedState, Slot};

/// See the module.
pub struct WindowOperator {
    state: KeyedState<Groups>,
    calls: Calls,
    reaches: Vec<Reach>,
    spans: Vec<Span>,
    /// Tells results apart; absent where a result's type has no key.
    results: Option<RowCodec>,
    schema: SchemaRef,
    env: Env,
    closing: Option<Closing>,
    group_columns: Vec<usize>,
    /// Changes, and groups that they keep in memory.
    held: HeldUntilBarrier,
    /// Written changes that are being settled: what follows from them is still to be emitted.
    settling: Peekable<IntoIter<Listed>>,
}

/// Chunks of output after which settling goes on only when they have been passed on.
const STEP_CHUNKS: usize = 4;

impl WindowOperator {
    /// Builds the operator of a node. Fails where the graph does not fit it.
    pub fn build(window: &millrace_graph::Window, ctx: BuildContext<'_>) -> Built {
        let input = super::nullable(ctx.input(0)?.as_ref());
        let BuildContext { node, env, tables, .. } = ctx;
        let table = tables(window.state.table)?;
        let (group, order, key) = (&window.group, &window.order, &window.state.unique_key);
        let errors = std::sync::Arc::clone(&env.errors);
        let calls = Calls::new(&window.calls, order, &input, errors)?;
        let closing = match &window.state.closing {
            Some(c) => Some(Closing::new(c, window, &env, tables(c.table)?)?),
            None => None,
        };
        let reader = KeyReader::new(&input, group, &window.vnode)?;
        let order = RowOrder::new(group, order, window.state.storage, key, false, &input)?;
        let is_empty = table.is_empty();
        let groups = Groups::new(table, order, input);
        Ok(Box::new(WindowOperator {
            state: KeyedState::new(groups, vec![reader], is_empty, &env),
            reaches: calls.reaches(),
            spans: calls.spans(),
            calls,
            results: results_codec(&window.calls),
            schema: super::nullable(&node.schema),
            held: HeldUntilBarrier::new(&env),
            env,
            closing,
            group_columns: group.clone(),
            settling: Vec::new().into_iter().peekable(),
        }))
    }

    /// Notes the rows of a chunk.
    fn note(&mut self, chunk: &DeltaChunk, slots: &[Slot]) -> Result<(), ExecError> {
        let groups = &mut self.state.entries;
        let keys = groups.order.keys(&chunk.batch)?;
        let id = groups.arena.insert(chunk.batch.clone(), chunk.num_rows());
        let mut scratch = Vec::with_capacity(64);
        for (row, &slot) in slots.iter().enumerate() {
            self.state.keys.mark_dirty(slot);
            let order = keys.write(row, &mut scratch);
            let at = RowRef { chunk: id, row: row as u32 };
            let change = Change { weight: chunk.weight(row), order, at };
            if let Some(same) = groups.pending.add((slot, KeyBytes::new(&scratch)), change) {
                groups.arena.release(same);
            }
        }
        Ok(())
    }

    /// Changes, in order: written, and what follows from them emitted.
    fn emit_deltas(&mut self, changes: Vec<Listed>, out: &mut Output) -> Result<(), ExecError> {
        self.state.entries.write(&changes, &self.state.keys)?;
        let mut rest = changes.into_iter().peekable();
        while self.emit_group(&mut rest, out)? {}
        Ok(())
    }

    /// What follows from the next group's changes; `false`: there is none.
    fn emit_group(
        &mut self,
        rest: &mut Peekable<IntoIter<Listed>>,
        out: &mut Output,
    ) -> Result<bool, ExecError> {
        let Some(slot) = rest.peek().map(|c| c.0.0) else { return Ok(false) };
        let mut group = Vec::new();
        while let Some(((_, key), change)) = rest.next_if(|c| c.0.0 == slot) {
            if change.weight == 0 {
                self.state.entries.arena.release(change.at);
            } else {
                group.push((key, change));
            }
        }
        if !group.is_empty() {
            self.settle_group(slot, group, out)?;
            self.state.resize(slot);
        }
        Ok(true)
    }

    /// What of the epoch's changes can be told already, in steps: see [`Operator::settle`].
    fn settle_changes(&mut self, out: &mut Output) -> Result<(), ExecError> {
        let mut rest = std::mem::replace(&mut self.settling, Vec::new().into_iter().peekable());
        if rest.peek().is_none() {
            let changes = self.state.entries.pending.take();
            let settled = self.state.entries.settled(changes);
            self.state.entries.write(&settled, &self.state.keys)?;
            rest = settled.into_iter().peekable();
        }
        let step = STEP_CHUNKS * self.env.options.chunk_rows;
        while out.rows() < step && self.emit_group(&mut rest, out)? {}
        if rest.peek().is_some() {
            self.settling = rest;
            return Ok(());
        }
        // Until the next time it would hold the room that all of them took.
        drop(rest);
        let KeyedState { keys, entries: groups, .. } = &mut self.state;
        let waiting: HashSet<Slot> = groups.pending.iter().map(|((slot, _), _)| *slot).collect();
        keys.take_dirty_but(|slot| waiting.contains(&slot));
        // Before the groups may leave.
        if let Some(closing) = &mut self.closing {
            closing.write(&self.state.keys, self.state.reader(0))?;
        }
        self.state.compact()?;
        self.state.unpin();
        self.make_room()?;
        self.held.settled(self.change_bytes(), self.state.pinned());
        Ok(())
    }

    /// Bytes of changes, with their rows.
    fn change_bytes(&self) -> usize {
        let groups = &self.state.entries;
        groups.pending.bytes(&groups.arena)
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
        let intervals = affected(&self.state.entries.of[at], &changed, &self.reaches, &self.spans);
        let before = self.results_in(at, &intervals)?;
        let mut released = Vec::new();
        for (key, Change { weight, order, at: row }) in changes {
            released.extend(self.state.entries.of[at].add(Ranked {
                key,
                order,
                at: row,
                weight,
            })?);
        }
        let after = self.results_in(at, &intervals)?;
        for (old, new) in before.iter().zip(&after) {
            self.emit(old, new, out)?;
        }
        released.into_iter().for_each(|row| self.state.entries.arena.release(row));
        if let Some(closing) = &mut self.closing {
            let orders = orders.iter().map(Vec::as_slice);
            closing.note(slot, &self.state.entries.of[at], &intervals, orders);
        }
        Ok(())
    }

    /// Lets go of the rows of sessions and ASOF joins that no later change can reach, in memory and in the store.
    async fn close(&mut self) -> Result<(), ExecError> {
        let Some(closing) = &mut self.closing else { return Ok(()) };
        closing.write(&self.state.keys, self.state.reader(0))?;
        let Some(due) = closing.due().await? else { return Ok(()) };
        let mut slots = self.state.probe_keys(&due);
        slots.sort_unstable();
        slots.dedup();
        self.state.request(0, &slots, |_| 1)?;
        while self.state.is_fetching() {
            self.state.arrived().await?;
        }
        let groups = &mut self.state.entries;
        let (mut gone, mut looked_at) = (Vec::new(), Vec::new());
        for slot in slots {
            let Some(closing) = &self.closing else { break };
            let group = &mut groups.of[slot as usize];
            for row in closing.closed(group) {
                group.add(Ranked { weight: -row.weight, ..row.clone() })?;
                let change = Change { weight: -row.weight, order: row.order, at: row.at };
                gone.push(((slot, row.key), change));
            }
            looked_at.push(slot);
        }
        groups.write(&gone, &self.state.keys)?;
        gone.into_iter().for_each(|(_, change)| groups.arena.release(change.at));
        for slot in looked_at {
            if self.state.entries.of[slot as usize].len() > 0 {
                self.state.resize(slot);
            } else {
                self.state.remove(slot);
            }
        }
        Ok(())
    }

    /// Has the groups read ahead that times name which the watermark is about to come to, unless memory is tight.
    fn announce(&mut self, found: impl IntoIterator<Item = Found>) -> Result<(), ExecError> {
        if self.env.governor.is_tight() {
            return Ok(());
        }
        for found in found {
            let hints = self.closing.as_mut().map(|closing| closing.hints(&found));
            hints.into_iter().flatten().try_for_each(|hint| self.state.hint(0, &hint))?;
        }
        Ok(())
    }

    /// Waits for the next answer, and takes it in; times that were read ahead.
    async fn next_read(&mut self) -> Result<Vec<Found>, ExecError> {
        let has_own = self.state.is_fetching() || self.state.is_prefetching();
        let WindowOperator { state, closing, .. } = self;
        match closing.as_mut().filter(|closing| closing.is_reading()) {
            None => state.arrived().await.map(|_| Vec::new()),
            Some(closing) if !has_own => Ok(closing.ahead().progress().await),
            Some(closing) => tokio::select! {
                biased;
                arrived = state.arrived() => arrived.map(|_| Vec::new()),
                found = closing.ahead().progress() => Ok(found),
            },
        }
    }

    /// The entries of every interval and their results.
    fn results_in(&self, group: usize, intervals: &[Interval]) -> Result<Vec<Shown>, ExecError> {
        let rows = &self.state.entries.of[group];
        let one = |interval: &Interval| -> Result<Shown, ExecError> {
            let start = rows.partition_point(|r| r.key[..] < interval.low[..]);
            let end = match &interval.high {
                Some(high) => rows.partition_point(|r| r.key[..] <= high[..]),
                None => rows.len(),
            };
            let entries = rows.range(start..end).map(|r| (r.key.clone(), r.weight)).collect();
            let results = self.calls.evaluate(rows, start..end, &self.state.entries.arena)?;
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
        let mut columns: Vec<ArrayRef> =
            self.state.entries.arena.batch(&diff.rows)?.columns().to_vec();
        for (a, b) in old.results.columns.iter().zip(&new.results.columns) {
            let both: [&dyn Array; 2] = [a.as_ref(), b.as_ref()];
            columns.push(interleave(&both, &diff.picks)?);
        }
        let batch = new_batch(&self.schema, columns, diff.rows.len())?;
        let chunk = DeltaChunk::new(batch, Some(Int64Array::from(diff.weights)));
        super::emit_sliced(chunk, self.env.options.chunk_rows.max(1), out);
        Ok(())
    }

    /// Keeps within the cache's budget: groups that have not changed go.
    fn make_room(&mut self) -> Result<(), ExecError> {
        if self.state.is_over() { self.state.evict() } else { Ok(()) }
    }
}

impl Operator for WindowOperator {
    fn push(&mut self, _: usize, chunk: DeltaChunk, _: &mut Output) -> Result<(), ExecError> {
        if chunk.is_empty() {
            return Ok(());
        }
        let (slots, _) = self.state.probe(0, &chunk)?;
        self.note(&chunk, &slots)?;
        self.state.request(0, &slots, |row| chunk.weight(row))?;
        self.state.recycle(slots);
        self.make_room()?;
        self.held.set(self.change_bytes(), self.state.pinned());
        Ok(())
    }

    fn is_over(&self) -> bool {
        self.held.is_over(&self.env)
    }

    fn held(&self) -> usize {
        self.held.bytes()
    }

    fn is_settling(&self) -> bool {
        self.settling.size_hint().0 > 0
    }

    fn settle<'a>(&'a mut self, out: &'a mut Output) -> BoxFuture<'a, Result<(), ExecError>> {
        async move {
            self.state.check_settled(true)?;
            self.settle_changes(out)
        }
        .boxed()
    }

    fn shed(&mut self, _: &mut Output) -> Result<(), ExecError> {
        self.state.shed()
    }

    fn is_full(&self) -> bool {
        self.state.is_full()
    }

    fn is_pending(&self) -> bool {
        self.state.is_fetching()
    }

    fn hint(&mut self, port: usize, hint: &Hint) -> Result<(), ExecError> {
        self.state.hint(port, hint)
    }

    fn foresight(&self) -> Option<u32> {
        self.closing.as_ref()?.foresight()
    }

    fn expect(&mut self, _: usize, columns: &[(usize, i64)]) -> Result<(), ExecError> {
        let found = self.closing.as_mut().and_then(|closing| closing.expect(columns));
        self.announce(found)
    }

    fn give_up_expected(&mut self) {
        if let Some(closing) = &mut self.closing {
            closing.ahead().give_up();
        }
    }

    fn is_prefetching(&self) -> bool {
        self.state.is_prefetching() || self.closing.as_ref().is_some_and(Closing::is_reading)
    }

    fn progress<'a>(&'a mut self, _: &'a mut Output) -> BoxFuture<'a, Result<(), ExecError>> {
        async move {
            let found = self.next_read().await?;
            self.announce(found)
        }
        .boxed()
    }

    /// The table's values are whole rows.
    fn retain(&mut self, _: usize, by: RetentionBy, bound: i64) {
        if let RetentionBy::Value(column) = by
            && let Some(at) = self.group_columns.iter().position(|g| *g == column)
        {
            self.state.close(at, bound);
        }
    }

    fn watermark(&mut self, port: usize, columns: &[(usize, i64)]) {
        self.state.watermark(port, columns);
        if let Some(closing) = &mut self.closing {
            closing.raise(columns);
        }
    }

    fn time(&mut self, epoch: Epoch) {
        self.state.pass(epoch);
    }

    fn barrier<'a>(&'a mut self, out: &'a mut Output) -> BoxFuture<'a, Result<(), ExecError>> {
        async move {
            self.state.check_settled(true)?;
            let changes = self.state.entries.pending.take();
            self.emit_deltas(changes, out)?;
            self.state.keys.take_dirty();
            self.held.clear();
            self.close().await?;
            self.state.sweep()?;
            self.state.compact()?;
            self.state.unpin();
            self.make_room()
        }
        .boxed()
    }

    fn seal(&mut self, sealed: &mut Vec<MemRun>) -> Result<(), ExecError> {
        sealed.extend(self.state.entries.table.seal()?);
        if let Some(closing) = &mut self.closing {
            sealed.extend(closing.seal()?);
        }
        Ok(())
    }

    fn memory_size(&self) -> usize {
        let groups = &self.state.entries;
        self.state.held() + groups.pending.bytes(&groups.arena)
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
