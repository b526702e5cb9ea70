//! The first rows of every group by an order (docs/design.md §3, §7).
//!
//! Stored: `group | order | identity → row`, every row of the group, so that a prefix scan with a
//! limit reads the first ones; ties are broken by the identity's bytes. In memory a group has a prefix of its
//! rows in order: enough for the window and some more. A row beyond the prefix is written without
//! looking. When retractions leave too few rows, the prefix is read again at the barrier, one batched
//! scan for all such groups.
//!
//! Over append-only input a row that has left the window never comes back: only the
//! window is kept, in memory and in the store, and a row that sorts behind a full window is dropped on arrival.
//!
//! Emission is at the barrier, old window → new window, differences only (with ranks, rows whose rank changed). Invariant:
//! what was shown at the last barrier is the window of the stored rows.

mod group;

use arrow::array::{ArrayRef, BinaryBuilder, Int64Array, UInt32Array};
use arrow::datatypes::SchemaRef;
use futures::FutureExt;
use futures::future::BoxFuture;
use millrace_common::DeltaChunk;
use millrace_common::access::RetentionBy;
use millrace_common::delta::take_rows;
use millrace_common::fault_injection::is_planted;
use millrace_storage::{Found, MemRun};

use self::group::{Group, Shown, Window};
use super::ordered::{Change, Changes, Ranked, RowKeys, RowOrder};
use super::{Env, Limits};
use crate::error::ExecError;
use crate::operator::{Operator, Output};
use crate::state::arena::{RowRef, new_batch};
use crate::state::cache::Probe;
use crate::state::fetch::wait;
use crate::state::gate::Ready;
use crate::state::keys::{KeyReader, append_storage_key, storage_keys};
use crate::state::{Fetches, KeyBytes, KeyGate, KeyTable, RowArena, Slot, StateTable};

/// Rows remembered beyond twice the window.
const SLACK: usize = 16;
/// See the module.
pub struct TopNOperator {
    reader: KeyReader,
    rows: RowOrder,
    window: Window,
    append_only: bool,
    /// The stored rows are exactly those shown: what to write follows from old and new window.
    stores_window: bool,
    emit_rank: bool,
    table: Box<dyn StateTable>,
    schema: SchemaRef,
    keys: KeyTable,
    groups: Vec<Group>,
    arena: RowArena,
    pending: Changes,
    gate: KeyGate,
    fetches: Fetches<Vec<Slot>>,
    stamp: u64,
    limits: Limits,
    env: Env,
    group_columns: Vec<usize>,
    /// Of a column of the group, by position in it: groups below are never asked for again.
    closed: Option<(usize, i64)>,
    /// Groups below have left the cache.
    swept: i64,
}

impl TopNOperator {
    pub fn new(
        node: &millrace_graph::Node,
        top: &millrace_graph::TopN,
        input: &SchemaRef,
        env: Env,
        tables: &mut dyn FnMut(usize) -> Result<Box<dyn StateTable>, ExecError>,
    ) -> Result<TopNOperator, ExecError> {
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
        Ok(TopNOperator {
            reader: KeyReader::new(input, &top.group, &top.vnode)?,
            stores_window: rows.keyed && append_only && offset == 0,
            rows,
            window,
            append_only,
            emit_rank: top.emit_rank,
            schema: super::nullable(&node.schema),
            keys: KeyTable::new(env.options.eviction, table.is_empty()),
            table,
            groups: Vec::new(),
            arena: RowArena::new(super::nullable(input)),
            pending: Changes::new(),
            gate: KeyGate::new(),
            fetches: Fetches::default(),
            stamp: 0,
            limits: Limits::new(&env),
            env,
            group_columns: top.group.clone(),
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
            let group = std::mem::take(&mut self.groups[slot as usize]);
            group.rows.iter().for_each(|r| self.arena.release(r.at));
            self.keys.remove(slot);
        }
        Ok(())
    }

    /// Rows to read for a window, and to keep after trimming.
    fn prefix_rows(&self) -> Option<usize> {
        let end = usize::try_from(self.window.end?).ok()?;
        Some(end.saturating_mul(2).saturating_add(SLACK))
    }

    /// Takes in rows of resident groups.
    fn run(&mut self, chunk: &DeltaChunk, slots: &[Slot]) -> Result<(), ExecError> {
        let keys = self.rows.keys(&chunk.batch)?;
        let rows: Vec<u32> = if self.append_only {
            let wanted = (0..slots.len()).filter(|&i| self.may_enter(slots[i], &keys, i));
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
        // One reference a row for now, handed over to the row's entry in `pending`.
        let id = self.arena.insert(batch, rows.len());
        let mut scratch = Vec::with_capacity(64);
        for (place, &row) in rows.iter().enumerate() {
            let slot = slots[row as usize];
            let weight = chunk.weight(row as usize);
            let order = keys.write(row as usize, &mut scratch);
            let at = RowRef { chunk: id, row: place as u32 };
            self.touch(slot);
            self.apply(slot, Ranked { key: KeyBytes::new(&scratch), order, at, weight })?;
            // Large groups are measured at the barrier.
            if self.groups[slot as usize].rows.len() <= 4 * SLACK {
                self.resize(slot);
            }
        }
        Ok(())
    }

    /// Whether a row of append-only input can be in its group's window.
    fn may_enter(&self, slot: Slot, keys: &RowKeys, row: usize) -> bool {
        let group = &self.groups[slot as usize];
        match group.cut(&self.window) {
            Some(0) => false,
            Some(cut) => {
                let last = &group.rows[cut - 1];
                keys.cmp_order(row, &last.key[..last.order as usize]).is_le()
            }
            None => true,
        }
    }

    /// The group changes in this epoch: remembers what it showed.
    fn touch(&mut self, slot: Slot) {
        self.keys.mark_dirty(slot);
        let group = &mut self.groups[slot as usize];
        if group.old.is_none() {
            let shown = group.shown(&self.window);
            for row in &shown {
                self.arena.retain(row.at);
            }
            group.old = Some(shown);
        }
    }

    /// A row's change, for the group's prefix and for the store.
    fn apply(&mut self, slot: Slot, row: Ranked) -> Result<(), ExecError> {
        if self.append_only && row.weight < 0 {
            return Err(ExecError::internal("an append-only top-N got a retraction"));
        }
        let group = &mut self.groups[slot as usize];
        match group.rows.binary_search_by(|r| r.key.cmp(&row.key)) {
            Ok(at) => {
                group.rows[at].weight += row.weight;
                if group.rows[at].weight == 0 {
                    let gone = group.rows.remove(at);
                    self.arena.release(gone.at);
                }
            }
            Err(at) if at < group.rows.len() || group.complete => {
                self.arena.retain(row.at);
                group.rows.insert(at, row.clone());
            }
            Err(_) => {}
        }
        self.note(slot, row);
        self.trim(slot);
        Ok(())
    }

    /// Adds to what will be written; takes over the reference to `at`.
    fn note(&mut self, slot: Slot, row: Ranked) {
        let Ranked { key, order, at, weight } = row;
        if self.stores_window {
            self.arena.release(at);
            return;
        }
        match self.pending.entry((slot, key)) {
            std::collections::hash_map::Entry::Occupied(mut entry) => {
                entry.get_mut().weight += weight;
                self.arena.release(at);
            }
            std::collections::hash_map::Entry::Vacant(entry) => {
                entry.insert(Change { weight, order, at });
            }
        }
    }

    /// Forgets rows that are not needed; of append-only input, for good.
    fn trim(&mut self, slot: Slot) {
        let group = &mut self.groups[slot as usize];
        let keep = if self.append_only {
            group.cut(&self.window).unwrap_or(usize::MAX)
        } else {
            match (self.window.end, group.rows.len()) {
                (Some(end), len)
                    if len > (end as usize).saturating_mul(4).saturating_add(4 * SLACK) =>
                {
                    let cut = group.cut(&self.window).unwrap_or(len);
                    cut.saturating_mul(2).saturating_add(SLACK)
                }
                _ => usize::MAX,
            }
        };
        if group.rows.len() <= keep {
            return;
        }
        let dropped = group.rows.split_off(keep);
        if self.append_only {
            for row in dropped {
                self.note(slot, Ranked { weight: -row.weight, ..row });
            }
        } else {
            group.complete = false;
            for row in dropped {
                self.arena.release(row.at);
            }
        }
    }

    fn resize(&mut self, slot: Slot) {
        let group = &self.groups[slot as usize];
        let keys: usize = group.rows.iter().map(|r| r.key.heap_size()).sum();
        let row = size_of::<Ranked>() + self.arena.row_bytes();
        self.keys.set_size(slot, size_of::<Group>() + group.rows.len() * row + keys);
    }

    /// Writes what entered and what left the windows since they were last shown.
    fn write_windows(&mut self) -> Result<(), ExecError> {
        let mut keys = BinaryBuilder::new();
        let (mut rows, mut weights) = (Vec::new(), Vec::new());
        let mut scratch = Vec::with_capacity(64);
        for &slot in self.keys.dirty() {
            let group = &self.groups[slot as usize];
            let mut old = group.old.iter().flatten().peekable();
            let mut new = group.rows.iter().peekable();
            loop {
                let order = match (old.peek(), new.peek()) {
                    (None, None) => break,
                    (Some(_), None) => std::cmp::Ordering::Less,
                    (None, Some(_)) => std::cmp::Ordering::Greater,
                    (Some(o), Some(n)) => o.key.cmp(&n.key),
                };
                let gone = if order.is_le() { old.next() } else { None };
                let come = if order.is_ge() { new.next() } else { None };
                let (key, at, weight) = match (gone, come) {
                    (Some(o), None) => (&o.key, o.at, 0),
                    (None, Some(n)) => (&n.key, n.at, 1),
                    _ => continue,
                };
                let parts: [&[u8]; 2] = [self.keys.key(slot), key];
                append_storage_key(&mut keys, &mut scratch, self.keys.vnode(slot), &parts);
                rows.push(at);
                weights.push(weight);
            }
        }
        if !rows.is_empty() {
            let batch = self.arena.batch(&rows)?;
            self.table.write(keys.finish(), Some(weights.into()), batch)?;
        }
        Ok(())
    }

    /// Writes the epoch's net changes.
    fn write(&mut self) -> Result<(), ExecError> {
        if self.stores_window {
            return self.write_windows();
        }
        let mut changes: Vec<((Slot, KeyBytes), Change)> = self.pending.drain().collect();
        changes.sort_unstable_by(|a, b| a.0.cmp(&b.0));
        self.rows.write(&changes, &self.keys, &self.arena, self.table.as_mut())?;
        for (_, change) in changes {
            self.arena.release(change.at);
        }
        Ok(())
    }

    /// Reads the prefixes of groups; the whole groups when there is no limit.
    fn scan(&self, slots: &[Slot], limit: Option<usize>) -> millrace_storage::Lookup {
        let prefixes = storage_keys(slots.iter().map(|&s| (self.keys.vnode(s), self.keys.key(s))));
        self.table.multi_scan(prefixes, limit)
    }

    /// Groups' rows as read; replaces what was remembered.
    fn arrived(
        &mut self,
        slots: &[Slot],
        found: &Found,
        limit: Option<usize>,
    ) -> Result<(), ExecError> {
        for &slot in slots {
            for row in std::mem::take(&mut self.groups[slot as usize].rows) {
                self.arena.release(row.at);
            }
        }
        let mut counts = vec![0usize; slots.len()];
        if !found.is_empty() {
            let keys = self.rows.keys(&found.values)?;
            let chunk = self.arena.insert(found.values.clone(), found.len());
            let mut scratch = Vec::with_capacity(64);
            for (row, &input) in found.input.values().iter().enumerate() {
                counts[input as usize] += 1;
                let order = keys.write(row, &mut scratch);
                let at = RowRef { chunk, row: row as u32 };
                let weight = found.weights.value(row);
                let group = &mut self.groups[slots[input as usize] as usize];
                group.rows.push(Ranked { key: KeyBytes::new(&scratch), order, at, weight });
            }
        }
        for (&slot, count) in slots.iter().zip(counts) {
            self.groups[slot as usize].complete =
                self.append_only || limit.is_none_or(|l| count < l);
            self.keys.set_resident(slot);
            self.resize(slot);
        }
        Ok(())
    }

    fn absent(&mut self, slot: Slot) {
        self.groups[slot as usize] = Group { complete: true, ..Group::default() };
        self.keys.set_resident(slot);
        self.resize(slot);
    }

    fn fetch_limit(&self) -> Option<usize> {
        if self.append_only { None } else { self.prefix_rows() }
    }

    fn admit(&mut self, chunk: DeltaChunk, slots: Vec<Slot>) -> Result<(), ExecError> {
        let mut missing = Vec::new();
        for &slot in &slots {
            if !self.keys.is_resident(slot) && !self.keys.is_fetching(slot) {
                if self.keys.is_complete() {
                    self.absent(slot);
                } else {
                    self.keys.set_fetching(slot);
                    missing.push(slot);
                }
            }
        }
        if !missing.is_empty() {
            self.env.metrics.cache_misses.add(missing.len() as u64);
            let lookup = self.scan(&missing, self.fetch_limit());
            match self.fetches.submit(missing, lookup)? {
                Some((slots, found)) => self.arrived(&slots, &found, self.fetch_limit())?,
                None => self.env.metrics.fetch_rounds.add(1),
            }
        }
        let (mut run, mut run_slots, mut park, mut park_slots) = (vec![], vec![], vec![], vec![]);
        for (row, &slot) in slots.iter().enumerate() {
            let resident = self.keys.is_resident(slot);
            let (rows, row_slots) =
                if resident { (&mut run, &mut run_slots) } else { (&mut park, &mut park_slots) };
            rows.push(row as u32);
            row_slots.push(slot);
        }
        if park.is_empty() {
            return self.run(&chunk, &slots);
        }
        self.env.metrics.parked_rows.add(park.len() as u64);
        self.gate.park(0, &chunk, &park, &park_slots);
        if run.is_empty() {
            return Ok(());
        }
        self.run(&chunk.take(&UInt32Array::from(run))?, &run_slots)
    }

    async fn complete_fetches(&mut self, out: &mut Output) -> Result<(), ExecError> {
        let done = self.fetches.completed().await?;
        let mut slots = Vec::new();
        for (asked, found) in done {
            self.arrived(&asked, &found, self.fetch_limit())?;
            slots.extend(asked);
        }
        for Ready { chunk, slots, .. } in self.gate.take(slots)? {
            self.run(&chunk, &slots)?;
        }
        self.make_room(out)
    }

    /// Makes every dirty group's window known, reading in rounds over all of them together.
    async fn refill(&mut self) -> Result<(), ExecError> {
        let mut limit = self.prefix_rows();
        loop {
            let short: Vec<Slot> = self
                .keys
                .dirty()
                .iter()
                .copied()
                .filter(|&s| !self.groups[s as usize].is_sufficient(&self.window))
                .collect();
            if short.is_empty() {
                return Ok(());
            }
            let found = wait(self.scan(&short, limit)).await?;
            self.arrived(&short, &found, limit)?;
            // Peers of one rank can be many: the next round reads more.
            limit = limit.map(|l| l.saturating_mul(8));
        }
    }

    /// Emits what changed in the windows of all dirty groups.
    fn emit(&mut self, barrier: bool, out: &mut Output) -> Result<(), ExecError> {
        let mut diff = Diff::default();
        for slot in self.keys.take_dirty() {
            let group = &mut self.groups[slot as usize];
            if barrier && group.rows.iter().any(|r| r.weight < 0) {
                return Err(ExecError::internal("a group has more retractions than rows"));
            }
            let old = group.old.take().unwrap_or_default();
            let mut new = group.shown(&self.window);
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
            self.resize(slot);
        }
        self.emit_rows(&mut diff, out)
    }

    fn emit_rows(&mut self, diff: &mut Diff, out: &mut Output) -> Result<(), ExecError> {
        let Diff { rows, weights, ranks, release } = std::mem::take(diff);
        if !rows.is_empty() {
            let mut columns: Vec<ArrayRef> = self.arena.batch(&rows)?.columns().to_vec();
            if self.emit_rank {
                columns.push(std::sync::Arc::new(Int64Array::from(ranks)));
            }
            let batch = new_batch(&self.schema, columns, rows.len())?;
            let weights = weights.iter().any(|&w| w != 1).then(|| Int64Array::from(weights));
            super::emit_sliced(DeltaChunk::new(batch, weights), self.env.options.chunk_rows, out);
        }
        release.into_iter().for_each(|at| self.arena.release(at));
        Ok(())
    }

    /// Keeps within the cache's budget; early emission only where no read is needed for it.
    fn make_room(&mut self, out: &mut Output) -> Result<(), ExecError> {
        let held = self.held();
        let budget = self.limits.cache_budget(&self.env, held);
        if !self.limits.is_over(held, budget) {
            return Ok(());
        }
        let certain = self.keys.dirty().iter().all(|&s| {
            let group = &self.groups[s as usize];
            group.is_sufficient(&self.window) && group.rows.iter().all(|r| r.weight > 0)
        });
        if self.append_only && certain {
            self.write()?;
            self.emit(false, out)?;
        }
        let target = self.keys.bytes() as f64 * (budget - budget / 8) as f64 / held as f64;
        let (groups, arena) = (&mut self.groups, &mut self.arena);
        self.keys.evict(target as usize, |slot| {
            let group = std::mem::take(&mut groups[slot as usize]);
            let any = !group.rows.is_empty() || !group.complete;
            group.rows.iter().for_each(|r| arena.release(r.at));
            any
        });
        self.compact()?;
        let held = self.held();
        self.limits.evicted(held, budget);
        Ok(())
    }

    fn held(&self) -> usize {
        self.keys.bytes().max(self.arena.bytes()) + self.pending.capacity() * 64
    }

    /// Rewrites the rows in memory densely; only when nothing else refers to them.
    fn compact(&mut self) -> Result<(), ExecError> {
        let only_groups = self.pending.is_empty() && self.keys.dirty().is_empty();
        if only_groups && self.arena.wants_compaction() {
            let rows = self.groups.iter_mut().flat_map(|g| g.rows.iter_mut());
            let mut refs: Vec<&mut RowRef> = rows.map(|r| &mut r.at).collect();
            self.arena.compact(&mut refs)?;
        }
        Ok(())
    }
}

impl Operator for TopNOperator {
    fn push(&mut self, _: usize, chunk: DeltaChunk, out: &mut Output) -> Result<(), ExecError> {
        if chunk.is_empty() {
            return Ok(());
        }
        self.stamp += 1;
        let keys = self.reader.read(&chunk.batch)?;
        let mut slots = Vec::with_capacity(chunk.num_rows());
        let probe = self.keys.probe(&keys, None, self.stamp, &mut slots);
        if self.groups.len() < self.keys.capacity() {
            self.groups.resize(self.keys.capacity().next_power_of_two(), Group::default());
        }
        if probe == Probe::AllResident {
            self.env.metrics.cache_hits.add(slots.len() as u64);
            self.run(&chunk, &slots)?;
        } else {
            self.admit(chunk, slots)?;
        }
        self.make_room(out)
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

    /// The table's values are whole rows.
    fn retain(&mut self, _: usize, by: RetentionBy, bound: i64) {
        if let RetentionBy::Value(column) = by
            && let Some(at) = self.group_columns.iter().position(|g| *g == column)
        {
            self.closed = Some((at, bound));
        }
    }

    fn barrier<'a>(&'a mut self, out: &'a mut Output) -> BoxFuture<'a, Result<(), ExecError>> {
        async move {
            debug_assert!(self.gate.is_empty() && self.fetches.is_empty());
            self.write()?;
            self.refill().await?;
            self.emit(true, out)?;
            self.sweep()?;
            self.compact()?;
            self.limits.unpinned();
            self.make_room(out)
        }
        .boxed()
    }

    fn seal(&mut self, sealed: &mut Vec<MemRun>) -> Result<(), ExecError> {
        sealed.extend(self.table.seal()?);
        Ok(())
    }

    fn memory_size(&self) -> usize {
        self.held() + self.gate.bytes()
    }
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
