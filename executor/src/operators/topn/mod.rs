//! The first rows of every group by an order (docs/design.md §3, §7).
//!
//! Stored: `group | order | identity → row`, every row of the group, so that a prefix scan with a
//! limit reads the first ones; ties are broken by the identity's bytes. In memory a group has a prefix of its
//! rows in order: enough for the window and some more. A row beyond the prefix is written without
//! looking. When retractions leave too few rows, the prefix is read again at once, in one batched scan for
//! all such groups of a chunk, and the epoch's changes are applied to the answer; where that was too
//! little, at the barrier.
//!
//! Over append-only input a row that has left the window never comes back: only the
//! window is kept, in memory and in the store, and a row that sorts behind a full window is dropped on arrival.
//!
//! An epoch whose changes are too large is settled in parts ([`settle`]): written and shown before the barrier.
//!
//! Emission is at the barrier, old window → new window, differences only (with ranks, rows whose rank
//! changed). Invariant: what was shown at the last barrier is the window of the stored rows.

mod group;
mod groups;
mod settle;

use arrow::array::{ArrayRef, Int64Array, UInt32Array};
use arrow::datatypes::SchemaRef;
use futures::FutureExt;
use futures::future::BoxFuture;
use millrace_common::access::RetentionBy;
use millrace_common::delta::take_rows;
use millrace_common::fault_injection::is_planted;
use millrace_common::{DeltaChunk, Epoch};
use millrace_storage::{Found, MemRun};

use self::group::{Shown, Window};
use self::groups::Groups;
use super::ordered::{Ranked, RowOrder};
use super::{BuildContext, Built, Env};
use crate::error::ExecError;
use crate::lookahead::Hint;
use crate::operator::{Operator, Output};
use crate::options::StateAccess;
use crate::state::arena::{RowRef, new_batch};
use crate::state::fetch::wait;
use crate::state::gate::Ready;
use crate::state::keys::{KeyReader, storage_keys};
use crate::state::{Entries, Fetches, HeldUntilBarrier, KeyBytes, KeyedState, Slot};

/// Rows remembered beyond twice the window.
const SLACK: usize = 16;

/// See the module.
pub struct TopNOperator {
    state: KeyedState<Groups>,
    /// Prefixes being read again.
    refills: Fetches<Refill>,
    emit_rank: bool,
    schema: SchemaRef,
    group_columns: Vec<usize>,
    /// Changes, and groups that they keep in memory.
    held: HeldUntilBarrier,
    env: Env,
}

impl TopNOperator {
    /// Builds the operator of a node. Fails where the graph does not fit it.
    pub fn build(top: &millrace_graph::TopN, ctx: BuildContext<'_>) -> Built {
        let input = &ctx.input(0)?;
        let BuildContext { node, env, tables, .. } = ctx;
        let table = tables(top.state.table)?;
        let append_only = top.state.append_only_input;
        let rows = RowOrder::new(
            &top.group,
            &top.order,
            top.state.storage,
            &top.state.unique_key,
            append_only,
            input,
        )?;
        let offset = i64::try_from(top.offset).unwrap_or(i64::MAX);
        let window = Window {
            offset,
            end: top.limit.map(|l| offset.saturating_add(i64::try_from(l).unwrap_or(i64::MAX))),
            rank: top.rank,
            emit_rank: top.emit_rank,
        };
        let reader = KeyReader::new(input, &top.group, &top.vnode)?;
        let is_empty = table.is_empty();
        let groups = Groups::new(table, rows, window, append_only, input);
        Ok(Box::new(TopNOperator {
            state: KeyedState::new(groups, vec![reader], is_empty, &env),
            refills: Fetches::default(),
            emit_rank: top.emit_rank,
            schema: super::nullable(&node.schema),
            group_columns: top.group.clone(),
            held: HeldUntilBarrier::new(&env),
            env,
        }))
    }

    /// Takes in rows of resident groups.
    fn run(&mut self, chunk: &DeltaChunk, slots: &[Slot]) -> Result<(), ExecError> {
        let groups = &mut self.state.entries;
        let keys = groups.order.keys(&chunk.batch)?;
        let rows: Vec<u32> = if groups.append_only {
            let wanted = (0..slots.len()).filter(|&i| groups.may_enter(slots[i], &keys, i));
            wanted.map(|i| i as u32).collect()
        } else {
            (0..slots.len() as u32).collect()
        };
        if rows.is_empty() {
            return Ok(());
        }
        let batch = if rows.len() == slots.len() {
            chunk.batch.clone()
        } else {
            take_rows(&chunk.batch, &UInt32Array::from(rows.clone()))?
        };
        // One reference a row for now, handed over to the row's entry in what is pending.
        let id = groups.arena.insert(batch, rows.len());
        let mut scratch = Vec::with_capacity(64);
        let mut short = Vec::new();
        for (place, &row) in rows.iter().enumerate() {
            let slot = slots[row as usize];
            let weight = chunk.weight(row as usize);
            let order = keys.write(row as usize, &mut scratch);
            let at = RowRef { chunk: id, row: place as u32 };
            self.state.keys.mark_dirty(slot);
            groups.touch(slot);
            groups.apply(slot, Ranked { key: KeyBytes::new(&scratch), order, at, weight })?;
            if weight < 0 && !groups.of[slot as usize].complete {
                short.push(slot);
            }
            // Large groups are measured at the barrier.
            if groups.of[slot as usize].rows.len() <= 4 * SLACK {
                self.state.keys.set_size(slot, groups.size(slot));
            }
        }
        self.read_again(short)
    }

    /// Asks for the prefixes of groups that retractions have left with too few rows.
    fn read_again(&mut self, mut slots: Vec<Slot>) -> Result<(), ExecError> {
        let groups = &mut self.state.entries;
        slots.retain(|&slot| groups.begins_refill(slot));
        if slots.is_empty() {
            return Ok(());
        }
        let limit = groups.refill_limit(&slots);
        let keys = &self.state.keys;
        let prefixes = storage_keys(slots.iter().map(|&s| (keys.vnode(s), keys.key(s))));
        let lookup = groups.table.multi_scan(prefixes, limit);
        match self.refills.submit(Refill { slots, limit }, lookup)? {
            Some(answer) => self.refilled(vec![answer]),
            None => {
                self.env.metrics.fetch_rounds.add(1);
                Ok(())
            }
        }
    }

    fn refilled(&mut self, answers: Vec<(Refill, Found)>) -> Result<(), ExecError> {
        for (Refill { slots, limit }, found) in answers {
            self.state.entries.load_and_change(&slots, &found, limit)?;
            slots.iter().for_each(|&slot| self.state.resize(slot));
            // Retractions that came meanwhile can have taken all that was read.
            let groups = &self.state.entries;
            let more = slots.into_iter().filter(|&slot| groups.refill_limit(&[slot]) > limit);
            let more = more.collect();
            self.read_again(more)?;
        }
        Ok(())
    }

    async fn complete_fetches(&mut self, out: &mut Output) -> Result<(), ExecError> {
        tokio::select! {
            biased;
            ready = self.state.completed(), if self.state.is_fetching() || self.state.is_prefetching() => {
                for Ready { chunk, slots, .. } in ready? {
                    self.run(&chunk, &slots)?;
                }
            }
            answers = self.refills.completed(), if !self.refills.is_empty() => {
                self.refilled(answers?)?;
            }
            else => {}
        }
        self.make_room(out)
    }

    /// Makes every dirty group's window known: what was read again on arrival can be too little.
    /// Reads in rounds over all such groups together.
    async fn refill(&mut self) -> Result<(), ExecError> {
        let mut limit = self.state.entries.prefix_rows();
        loop {
            let KeyedState { keys, entries: groups, .. } = &mut self.state;
            let short = |s: &Slot| !groups.is_sufficient(*s);
            let short: Vec<Slot> = keys.dirty().iter().copied().filter(short).collect();
            if short.is_empty() {
                return Ok(());
            }
            let prefixes = storage_keys(short.iter().map(|&s| (keys.vnode(s), keys.key(s))));
            let found = wait(groups.table.multi_scan(prefixes, limit)).await?;
            groups.load_prefixes(&short, &found, limit)?;
            groups.apply_pending(&short);
            short.iter().for_each(|&slot| self.state.resize(slot));
            // Peers of one rank can be many: the next round reads more.
            limit = limit.map(|l| l.saturating_mul(8));
        }
    }

    /// Emits what changed in the windows of all dirty groups.
    fn emit(&mut self, barrier: bool, out: &mut Output) -> Result<(), ExecError> {
        let mut diff = Diff::default();
        let waiting = self.state.entries.waiting();
        for slot in self.state.keys.take_dirty_but(|slot| waiting.contains(&slot)) {
            let groups = &mut self.state.entries;
            let group = &mut groups.of[slot as usize];
            if barrier && group.rows.iter().any(|r| r.weight < 0) {
                return Err(ExecError::internal("a group has more retractions than rows"));
            }
            (group.retracted, group.is_short) = (0, false);
            let old = group.old.take().unwrap_or_default();
            let mut new = group.shown(&groups.window);
            if old.iter().any(|o| !new.iter().any(|n| n.key == o.key))
                && is_planted("topn-no-refill")
            {
                new.retain(|n| old.iter().any(|o| o.key == n.key));
            }
            diff.add(&old, &new);
            if diff.rows.len() >= self.env.options.chunk_rows.max(1) {
                self.emit_rows(&mut diff, out)?;
            }
            // Released once emitted: the arena may hold the only copy.
            diff.release.extend(old.into_iter().map(|s| s.at));
            self.state.resize(slot);
        }
        self.emit_rows(&mut diff, out)
    }

    fn emit_rows(&mut self, diff: &mut Diff, out: &mut Output) -> Result<(), ExecError> {
        let Diff { rows, weights, ranks, release } = std::mem::take(diff);
        if !rows.is_empty() {
            let mut columns: Vec<ArrayRef> =
                self.state.entries.arena.batch(&rows)?.columns().to_vec();
            if self.emit_rank {
                columns.push(std::sync::Arc::new(Int64Array::from(ranks)));
            }
            let batch = new_batch(&self.schema, columns, rows.len())?;
            let weights = weights.iter().any(|&w| w != 1).then(|| Int64Array::from(weights));
            super::emit_sliced(DeltaChunk::new(batch, weights), self.env.options.chunk_rows, out);
        }
        release.into_iter().for_each(|at| self.state.entries.arena.release(at));
        Ok(())
    }

    /// Keeps within the cache's budget; early emission only where no read is needed for it.
    fn make_room(&mut self, out: &mut Output) -> Result<(), ExecError> {
        if !self.state.is_over() {
            return Ok(());
        }
        let groups = &self.state.entries;
        if groups.append_only && self.state.keys.dirty().iter().all(|&s| groups.is_certain(s)) {
            self.state.entries.write(&self.state.keys)?;
            self.emit(false, out)?;
        }
        self.state.evict()
    }

    /// Bytes of changes, with their rows.
    fn change_bytes(&self) -> usize {
        self.state.entries.pending_bytes()
    }
}

impl Operator for TopNOperator {
    fn push(&mut self, _: usize, chunk: DeltaChunk, out: &mut Output) -> Result<(), ExecError> {
        if chunk.is_empty() {
            return Ok(());
        }
        if let Some(Ready { chunk, slots, .. }) = self.state.admit(0, chunk)? {
            self.run(&chunk, &slots)?;
            self.state.recycle(slots);
        }
        self.make_room(out)?;
        self.held.set(self.change_bytes(), self.state.pinned());
        Ok(())
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
        self.state.shed()
    }

    fn is_full(&self) -> bool {
        let waits = self.env.options.state_access == StateAccess::Synchronous;
        self.state.is_full() || (waits && !self.refills.is_empty())
    }

    fn is_pending(&self) -> bool {
        self.state.is_fetching() || !self.refills.is_empty()
    }

    fn hint(&mut self, port: usize, hint: &Hint) -> Result<(), ExecError> {
        self.state.hint(port, hint)
    }

    fn is_prefetching(&self) -> bool {
        self.state.is_prefetching()
    }

    fn progress<'a>(&'a mut self, out: &'a mut Output) -> BoxFuture<'a, Result<(), ExecError>> {
        self.complete_fetches(out).boxed()
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
    }

    fn time(&mut self, epoch: Epoch) {
        self.state.pass(epoch);
    }

    fn barrier<'a>(&'a mut self, out: &'a mut Output) -> BoxFuture<'a, Result<(), ExecError>> {
        async move {
            self.state.check_settled(self.refills.is_empty())?;
            self.read_old().await?;
            self.state.entries.write(&self.state.keys)?;
            self.refill().await?;
            self.emit(true, out)?;
            self.held.clear();
            self.state.sweep()?;
            self.state.compact()?;
            self.state.unpin();
            self.make_room(out)
        }
        .boxed()
    }

    fn seal(&mut self, sealed: &mut Vec<MemRun>) -> Result<(), ExecError> {
        sealed.extend(self.state.entries.table.seal()?);
        Ok(())
    }

    fn memory_size(&self) -> usize {
        self.state.held() + self.state.entries.pending_bytes() + self.state.parked_bytes()
    }
}

/// Groups whose prefixes are read again, and how many rows of each at most.
struct Refill {
    slots: Vec<Slot>,
    limit: Option<usize>,
}

/// Rows on their way out.
#[derive(Default)]
struct Diff {
    rows: Vec<RowRef>,
    weights: Vec<i64>,
    ranks: Vec<i64>,
    release: Vec<RowRef>,
}

impl Diff {
    /// old → new of one group; both are in order.
    fn add(&mut self, old: &[Shown], new: &[Shown]) {
        let (mut o, mut n) = (old.iter().peekable(), new.iter().peekable());
        loop {
            let order = match (o.peek(), n.peek()) {
                (None, None) => return,
                (Some(_), None) => std::cmp::Ordering::Less,
                (None, Some(_)) => std::cmp::Ordering::Greater,
                (Some(a), Some(b)) => (&a.key, a.rank).cmp(&(&b.key, b.rank)),
            };
            let (mut weight, mut row) = (0, None);
            if order.is_le()
                && let Some(a) = o.next()
            {
                weight -= a.weight;
                row = Some(a);
            }
            if order.is_ge()
                && let Some(b) = n.next()
            {
                weight += b.weight;
                row = Some(b);
            }
            if let Some(row) = row.filter(|_| weight != 0) {
                self.rows.push(row.at);
                self.weights.push(weight);
                self.ranks.push(row.rank);
            }
        }
    }
}
