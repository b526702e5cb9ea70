//! The symmetric hash join (docs/design.md §3, §7).
//!
//! A slot of the key table is a join key; it has a list of rows for each side. A row is put into its
//! own side and paired with the other side's rows in one step, and a key's gate is one for both
//! sides, so every pair is produced by exactly one of its rows. Pairs leave in bounded steps: a chunk that explodes is
//! put aside with a cursor and continued by `progress`, before anything newer.
//!
//! Pairs are the bilinear part. What outer, semi, anti and mark joins add is a function of one row of
//! a *preserved* side and whether it has matches: NULL-padded where there are none, the row itself
//! where there are (semi) or are none (anti), the row with its mark. Invariant: `MatchState::emitted` (and
//! `emitted_as`) is exactly what this function has contributed for the row so far; at the barrier every row
//! whose weight, or whose matches, have changed is settled: old out, new in, only if different. Whether a row has
//! matches is its key's total weight on the other side, or with a residual the row's own *degree*, the
//! weight of matching rows. Totals and degrees are sums, so order and weights do not matter. Neither
//! is stored: they follow from both sides' rows when a key is loaded.
//!
//! NULL keys match nothing (unless they are equal by declaration) and are never stored. A null-aware join (NOT IN)
//! has all rows in one slot and compares keys in three-valued logic: exact, for the modest sizes it is
//! used with; its fragment is a singleton.
//!
//! A [`lookup`] is the same machine with half of it left out: left rows are paired and not kept, right rows
//! are kept and not paired.

mod clean;
mod early_flush;
mod intake;
pub mod lookup;
mod match_status;
mod pairs;
mod side;

use std::collections::{HashMap, VecDeque};

use arrow::array::{BooleanArray, UInt32Array};
use arrow::datatypes::{Schema, SchemaRef};
use futures::FutureExt;
use futures::future::BoxFuture;
use millrace_common::DeltaChunk;
use millrace_common::access::RetentionBy;
use millrace_common::fault_injection::is_planted;
use millrace_graph::JoinKind;
use millrace_storage::{Found, MemRun};

use self::clean::Cleaning;
use self::early_flush::FlushThresholds;
use self::pairs::{Condition, Matched, PairColumns, Pairs};
use self::side::{END, List, Side};
use super::{Env, Limits};
use crate::error::ExecError;
use crate::operator::{Operator, Output};
use crate::state::arena::RowRef;
use crate::state::gate::Ready;
use crate::state::keys::{KeyReader, storage_keys};
use crate::state::{Divide, Fetches, KeyGate, KeyTable, Slot, StateTable};

/// Full chunks one step emits before the rest is put aside.
const STEP_CHUNKS: usize = 8;

/// State of a join key.
#[derive(Clone, Copy, Default)]
struct Entry {
    sides: [List; 2],
    /// Reads under way.
    outstanding: u8,
    /// Whether rows of a preserved side were last emitted as having matches (no residual).
    matched: [bool; 2],
    /// In the list of keys to settle.
    touched: bool,
}

/// Rows of one port that are in memory and yet to be paired.
struct Work {
    port: usize,
    chunk: DeltaChunk,
    slots: Vec<Slot>,
    /// Each row's own node, if it has a new one.
    nodes: Vec<u32>,
    row: usize,
    /// Next node of the other side for `row`; `END` with `started`: none left.
    cursor: u32,
    started: bool,
    /// Of a lookup: how many rows each row has met, the sum of their weights. Nodes of equal rows may cancel.
    met: Vec<i64>,
}

impl Work {
    fn new(port: usize, chunk: DeltaChunk, slots: Vec<Slot>, nodes: Vec<u32>) -> Work {
        Work { port, chunk, slots, nodes, row: 0, cursor: END, started: false, met: Vec::new() }
    }
}

/// A read of one side's rows for these keys.
struct Request {
    side: usize,
    slots: Vec<Slot>,
}

impl Divide for Request {
    fn divide(&self, asked: &[u32]) -> Request {
        let slots = asked.iter().map(|&i| self.slots[i as usize]).collect();
        Request { side: self.side, slots }
    }
}

/// See the module.
pub struct HashJoin {
    kind: JoinKind,
    null_equals_null: bool,
    null_aware: bool,
    readers: [KeyReader; 2],
    sides: [Side; 2],
    preserved: [bool; 2],
    emits_pairs: bool,
    condition: Option<Condition>,
    output: Vec<usize>,
    schema: SchemaRef,
    left_width: usize,
    keys: KeyTable,
    entries: Vec<Entry>,
    gate: KeyGate,
    fetches: Fetches<Request>,
    /// Reads of stored rows, by side: an early flush is under way.
    relieving: Fetches<usize>,
    early_flush: FlushThresholds,
    /// The chunk being paired; while there is one nothing else is taken in.
    work: Option<Work>,
    /// Chunks that wait for it, with their rows' slots, in order.
    inbox: VecDeque<(usize, DeltaChunk, Vec<Slot>)>,
    pairs: Pairs,
    /// Keys whose match state may have changed.
    touched_keys: Vec<Slot>,
    /// Rows of preserved sides to settle.
    touched_rows: [Vec<u32>; 2],
    stamp: u64,
    limits: Limits,
    env: Env,
    cleaning: Cleaning,
    /// See [`lookup`].
    is_lookup: bool,
}

impl HashJoin {
    /// `append_only`: nothing that it emits is ever retracted.
    pub fn new(
        schema: &SchemaRef,
        append_only: bool,
        join: &millrace_graph::Join,
        left: &SchemaRef,
        right: &SchemaRef,
        env: Env,
        tables: &mut dyn FnMut(usize) -> Result<Box<dyn StateTable>, ExecError>,
    ) -> Result<HashJoin, ExecError> {
        let preserved = preserved(join.kind);
        let both =
            Schema::new(left.fields().iter().chain(right.fields()).cloned().collect::<Vec<_>>());
        let left_width = left.fields().len();
        let pairs = join.left.keys.iter().zip(&join.right.keys);
        let null_keys = if join.null_aware {
            pairs.map(|(&l, &r)| (l, left_width + r)).collect()
        } else {
            Vec::new()
        };
        let keys = [&join.left, &join.right]
            .map(|side| if join.null_aware { Vec::new() } else { side.keys.clone() });
        let reader = |side: &millrace_graph::JoinSide, keys: &[usize], schema: &SchemaRef| {
            KeyReader::new(schema, keys, if join.null_aware { &[] } else { &side.vnode })
        };
        let append_only = append_only && join.kind == JoinKind::Inner;
        let sides = [
            Side::new(
                &join.left,
                &keys[0],
                left,
                tables(join.left.state.table)?,
                preserved[0],
                append_only,
                &env,
            )?,
            Side::new(
                &join.right,
                &keys[1],
                right,
                tables(join.right.state.table)?,
                preserved[1],
                append_only,
                &env,
            )?,
        ];
        let complete = sides.iter().all(|s| s.table.is_empty());
        Ok(HashJoin {
            kind: join.kind,
            null_equals_null: join.null_equals_null,
            null_aware: join.null_aware,
            readers: [reader(&join.left, &keys[0], left)?, reader(&join.right, &keys[1], right)?],
            sides,
            preserved,
            emits_pairs: matches!(
                join.kind,
                JoinKind::Inner | JoinKind::LeftOuter | JoinKind::RightOuter | JoinKind::FullOuter
            ),
            condition: Condition::new(join.residual.as_ref(), null_keys, &both, &env)?,
            output: join.output.clone(),
            schema: super::nullable(schema),
            left_width,
            keys: KeyTable::new(env.options.eviction, complete),
            entries: Vec::new(),
            gate: KeyGate::new(),
            fetches: Fetches::default(),
            relieving: Fetches::default(),
            early_flush: FlushThresholds::new(
                env.options.group_change_bytes,
                env.options.cache_bytes,
            ),
            work: None,
            inbox: VecDeque::new(),
            pairs: Pairs::default(),
            touched_keys: Vec::new(),
            touched_rows: [Vec::new(), Vec::new()],
            stamp: 0,
            limits: Limits::new(&env),
            env,
            cleaning: Cleaning::new(join),
            is_lookup: false,
        })
    }

    fn is_busy(&self) -> bool {
        self.work.is_some() || !self.inbox.is_empty()
    }

    /// Nothing is half done.
    fn is_idle(&self) -> bool {
        !self.is_busy() && self.gate.is_empty() && self.fetches.is_empty()
    }

    /// No row has a match state: its own state is not needed to know what it adds.
    fn is_inner(&self) -> bool {
        self.kind == JoinKind::Inner || self.is_lookup
    }

    /// Takes out rows with a NULL in their key: they match nothing.
    fn split_nulls(
        &mut self,
        port: usize,
        chunk: DeltaChunk,
        out: &mut Output,
    ) -> Result<DeltaChunk, ExecError> {
        if self.null_equals_null || self.null_aware || is_planted("null-keys-match") {
            return Ok(chunk);
        }
        let Some(valid) = self.readers[port].non_null(&chunk.batch) else { return Ok(chunk) };
        let pads = self.is_lookup && port == 0 && self.kind == JoinKind::LeftOuter;
        if (self.preserved[port] || pads)
            && self.kind != JoinKind::LeftSemi
            && self.kind != JoinKind::RightSemi
        {
            let nulls = chunk.filter(&BooleanArray::new(!&valid, None))?;
            self.emit_unmatched(port, &nulls, out)?;
        }
        Ok(chunk.filter(&BooleanArray::new(valid, None))?)
    }

    /// Continues what was put aside, then takes in what waits, one chunk after the other: a row must
    /// not enter its side while another's pairs are half made.
    fn drain(&mut self, out: &mut Output) -> Result<(), ExecError> {
        let limit = out.rows() + STEP_CHUNKS * self.env.options.chunk_rows.max(1);
        loop {
            if let Some(mut work) = self.work.take()
                && !self.pair(&mut work, limit, out)?
            {
                self.work = Some(work);
                return Ok(());
            }
            // What is asked of the stored rows must not change meanwhile.
            if !self.relieving.is_empty() {
                return Ok(());
            }
            match self.inbox.pop_front() {
                Some((port, chunk, slots)) => self.admit(port, chunk, slots)?,
                None => return self.make_room(),
            }
        }
    }

    /// Sorts a chunk's rows into those that can run and those that wait; asks for what is missing.
    fn admit(&mut self, port: usize, chunk: DeltaChunk, slots: Vec<Slot>) -> Result<(), ExecError> {
        let mut missing: [Vec<Slot>; 2] = Default::default();
        for (row, &slot) in slots.iter().enumerate() {
            if self.entries[slot as usize].outstanding == 0 {
                self.need(port, chunk.weight(row), slot, &mut missing);
            }
        }
        self.fetch(missing)?;
        let (mut run, mut run_slots, mut park, mut park_slots) = (vec![], vec![], vec![], vec![]);
        for (row, &slot) in slots.iter().enumerate() {
            if self.entries[slot as usize].outstanding == 0 {
                run.push(row as u32);
                run_slots.push(slot);
            } else {
                park.push(row as u32);
                park_slots.push(slot);
            }
        }
        if park.is_empty() {
            self.env.metrics.cache_hits.add(slots.len() as u64);
            self.start(port, chunk, slots)?;
        } else {
            self.env.metrics.parked_rows.add(park.len() as u64);
            self.gate.park(port, &chunk, &park, &park_slots);
            if !run.is_empty() {
                self.start(port, chunk.take(&UInt32Array::from(run))?, run_slots)?;
            }
        }
        Ok(())
    }

    /// Which sides of a key a row needs that are not loaded.
    fn need(&mut self, port: usize, weight: i64, slot: Slot, missing: &mut [Vec<Slot>; 2]) {
        let entry = &mut self.entries[slot as usize];
        if self.keys.is_complete() {
            entry.sides[0].loaded = true;
            entry.sides[1].loaded = true;
            return;
        }
        let own = match self.is_lookup {
            true => port == 1 && !self.sides[1].may_write_blind(weight),
            false => self.kind != JoinKind::Inner || !self.sides[port].may_write_blind(weight),
        };
        let other = !(self.is_lookup && port == 1);
        for side in [port, 1 - port] {
            if (if side == port { own } else { other }) && !entry.sides[side].loaded {
                missing[side].push(slot);
                entry.outstanding += 1;
            }
        }
        if entry.outstanding > 0 {
            self.keys.set_fetching(slot);
        }
    }

    /// Asks for both sides' missing keys, in one round.
    fn fetch(&mut self, missing: [Vec<Slot>; 2]) -> Result<(), ExecError> {
        let mut ready = Vec::new();
        for (side, slots) in missing.into_iter().enumerate() {
            if slots.is_empty() {
                continue;
            }
            self.env.metrics.cache_misses.add(slots.len() as u64);
            let prefixes =
                storage_keys(slots.iter().map(|&s| (self.keys.vnode(s), self.keys.key(s))));
            let lookup = self.sides[side].read(prefixes);
            match self.fetches.submit_divided(Request { side, slots }, lookup)? {
                Some(answer) => ready.push(answer),
                None => self.env.metrics.fetch_rounds.add(1),
            }
        }
        self.arrived(ready)?;
        Ok(())
    }

    /// Takes in rows read; the keys that have all they asked for.
    fn arrived(&mut self, answers: Vec<(Request, Found)>) -> Result<Vec<Slot>, ExecError> {
        let mut complete = Vec::new();
        for (request, found) in answers {
            let side = &mut self.sides[request.side];
            for &slot in &request.slots {
                self.entries[slot as usize].sides[request.side].loaded = true;
            }
            if !found.is_empty() {
                let hashes = side.hashes(&DeltaChunk::inserts(found.values.clone()))?;
                let chunk = side.arena.insert(found.values.clone(), found.len());
                for (row, &input) in found.input.values().iter().enumerate() {
                    let slot = request.slots[input as usize];
                    let list = &mut self.entries[slot as usize].sides[request.side];
                    let at = RowRef { chunk, row: row as u32 };
                    side.link(list, slot, at, found.weights.value(row), hashes[row]);
                }
            }
            for slot in request.slots {
                let entry = &mut self.entries[slot as usize];
                entry.outstanding -= 1;
                if entry.outstanding == 0 {
                    self.keys.set_resident(slot);
                    complete.push(slot);
                }
            }
        }
        if !self.is_inner() {
            self.restore_marks(&complete)?;
        }
        for &slot in &complete {
            self.resize(slot);
        }
        Ok(complete)
    }

    fn resize(&mut self, slot: Slot) {
        let entry = &self.entries[slot as usize];
        let bytes: usize =
            (0..2).map(|s| entry.sides[s].len as usize * self.sides[s].row_bytes()).sum();
        self.keys.set_size(slot, bytes + size_of::<Entry>());
    }

    /// Pairs the rows of one chunk; `false` when it stopped at the limit.
    fn pair(&mut self, work: &mut Work, limit: usize, out: &mut Output) -> Result<bool, ExecError> {
        let other = 1 - work.port;
        let chunk_rows = self.env.options.chunk_rows.max(1);
        let by_degree = self.condition.is_some();
        let needs_pairs = self.emits_pairs || by_degree;
        while work.row < work.slots.len() {
            let slot = work.slots[work.row];
            let entry = &mut self.entries[slot as usize];
            if !work.started {
                work.started = true;
                work.cursor = if needs_pairs { entry.sides[other].head } else { END };
                if !by_degree && self.preserved[other] && !entry.touched {
                    entry.touched = true;
                    self.touched_keys.push(slot);
                    self.keys.mark_dirty(slot);
                }
            }
            let weight = work.chunk.weight(work.row);
            while work.cursor != END && self.pairs.len() < chunk_rows {
                let node = &self.sides[other].nodes[work.cursor as usize];
                if node.weight != 0 {
                    let times = 1 + i64::from(work.port == 1 && is_planted("count-pair-twice"));
                    self.pairs.push(
                        work.row as u32,
                        node.at,
                        work.cursor,
                        weight * node.weight * times,
                    );
                }
                work.cursor = node.next;
            }
            if self.pairs.len() >= chunk_rows {
                self.emit_pairs(work, out)?;
                if out.rows() >= limit && work.cursor != END {
                    return Ok(false);
                }
            }
            if work.cursor == END {
                work.row += 1;
                work.started = false;
            }
        }
        self.emit_pairs(work, out)?;
        if self.is_lookup {
            self.pad(work, out)?;
        }
        Ok(true)
    }

    /// Tests the pairs gathered, counts degrees and emits.
    fn emit_pairs(&mut self, work: &mut Work, out: &mut Output) -> Result<(), ExecError> {
        if self.pairs.len() == 0 {
            return Ok(());
        }
        let mut pairs = std::mem::take(&mut self.pairs);
        let other = 1 - work.port;
        let columns = PairColumns::new(
            work.port,
            &work.chunk.batch,
            &self.sides[other],
            &pairs,
            self.left_width,
        );
        let matched = columns.test(self.condition.as_ref())?;
        if self.emits_pairs {
            out.push(columns.output(&self.output, &self.schema, &matched)?);
        }
        if self.is_lookup {
            work.note_met(&pairs, &matched);
        } else {
            self.count_degrees(work, &pairs, &matched);
        }
        pairs.clear();
        self.pairs = pairs;
        Ok(())
    }

    /// Adds matching pairs to the degrees of rows of preserved sides.
    fn count_degrees(&mut self, work: &Work, pairs: &Pairs, matched: &Matched) {
        let Matched::Some { matches, unknown } = matched else { return };
        let port = work.port;
        for (bits, is_match) in
            std::iter::once((Some(matches), true)).chain(std::iter::once((unknown.as_ref(), false)))
        {
            let Some(bits) = bits else { continue };
            for i in bits.set_indices() {
                let row = pairs.probe[i] as usize;
                let own_weight = work.chunk.weight(row);
                if self.preserved[1 - port] {
                    let node = pairs.nodes[i];
                    add_degree(&mut self.sides[1 - port], node, own_weight, is_match);
                    touch_row(&mut self.sides[1 - port], &mut self.touched_rows[1 - port], node);
                    self.keys.mark_dirty(work.slots[row]);
                }
                let own = work.nodes[row];
                if self.preserved[port] && own != END {
                    add_degree(&mut self.sides[port], own, pairs.weights[i] / own_weight, is_match);
                }
            }
        }
    }

    fn make_room(&mut self) -> Result<(), ExecError> {
        let held = self.cached_bytes();
        let budget = self.limits.cache_budget(&self.env, held);
        if !self.limits.is_over(held, budget) {
            return Ok(());
        }
        // Bytes by key do not count waste in chunks: scale the target by what is really held.
        let target = self.keys.bytes() as f64 * (budget - budget / 8) as f64 / held as f64;
        let (sides, entries) = (&mut self.sides, &mut self.entries);
        self.keys.evict(target as usize, |slot| {
            let entry = &mut entries[slot as usize];
            let mut any = false;
            for (side, list) in sides.iter_mut().zip(&mut entry.sides) {
                any |= !list.loaded || list.len > 0;
                while list.head != END {
                    let head = list.head;
                    side.unlink(list, head);
                }
            }
            *entry = Entry::default();
            any
        });
        for side in &mut self.sides {
            side.compact()?;
        }
        let held = self.cached_bytes();
        self.limits.evicted(held, budget);
        Ok(())
    }

    fn cached_bytes(&self) -> usize {
        self.keys.bytes().max(self.sides.iter().map(Side::memory_size).sum())
    }

    async fn advance(&mut self, out: &mut Output) -> Result<(), ExecError> {
        if !self.relieving.is_empty() {
            self.go_on_with_relief().await?;
            return self.drain(out);
        }
        if !self.is_busy() && self.wants_relief() {
            self.begin_relief(out)?;
            return self.drain(out);
        }
        if self.work.is_none() && self.inbox.is_empty() {
            let done = self.fetches.completed().await?;
            let slots = self.arrived(done)?;
            // A later row of a key may still need a side that the first one did not.
            let mut ready = self.gate.take(slots)?;
            if self.is_lookup {
                // What is looked up comes first.
                ready.sort_by_key(|r| std::cmp::Reverse(r.port));
            }
            self.inbox
                .extend(ready.into_iter().map(|Ready { port, chunk, slots }| (port, chunk, slots)));
        }
        self.drain(out)
    }
}

impl Operator for HashJoin {
    fn push(&mut self, port: usize, chunk: DeltaChunk, out: &mut Output) -> Result<(), ExecError> {
        let mut chunk = self.split_nulls(port, chunk, out)?;
        if port == 0 && is_planted("drop-retraction") {
            let kept = (0..chunk.num_rows()).map(|row| Some(chunk.weight(row) > 0));
            chunk = chunk.filter(&kept.collect())?;
        }
        if chunk.is_empty() {
            return Ok(());
        }
        self.stamp += 1;
        let keys = self.readers[port].read(&chunk.batch)?;
        let mut slots = Vec::with_capacity(chunk.num_rows());
        self.keys.probe(&keys, None, self.stamp, &mut slots);
        if self.entries.len() < self.keys.capacity() {
            self.entries.resize(self.keys.capacity().next_power_of_two(), Entry::default());
        }
        for &slot in &slots {
            if !self.keys.is_resident(slot) {
                self.keys.set_resident(slot);
            }
        }
        self.inbox.push_back((port, chunk, slots));
        self.drain(out)
    }

    fn is_full(&self) -> bool {
        self.is_busy()
            || !self.relieving.is_empty()
            || self.wants_relief()
            || self.limits.is_full(&self.env, &self.gate, self.fetches.is_empty())
    }

    fn is_pending(&self) -> bool {
        self.is_busy()
            || !self.fetches.is_empty()
            || !self.relieving.is_empty()
            || self.wants_relief()
    }

    fn progress<'a>(&'a mut self, out: &'a mut Output) -> BoxFuture<'a, Result<(), ExecError>> {
        self.advance(out).boxed()
    }

    fn retain(&mut self, table: usize, by: RetentionBy, bound: i64) {
        self.cleaning.raise(table, by, bound);
    }

    fn barrier<'a>(&'a mut self, out: &'a mut Output) -> BoxFuture<'a, Result<(), ExecError>> {
        async move {
            debug_assert!(self.is_idle() && self.relieving.is_empty());
            self.update_match_status(out)?;
            for side in &mut self.sides {
                side.flush()?;
                side.compact()?;
            }
            self.keys.take_dirty();
            self.clean()?;
            self.limits.unpinned();
            self.reset_relief();
            self.make_room()
        }
        .boxed()
    }

    fn seal(&mut self, sealed: &mut Vec<MemRun>) -> Result<(), ExecError> {
        for side in &mut self.sides {
            sealed.extend(side.table.seal()?);
        }
        Ok(())
    }

    fn counters(&self, out: &mut HashMap<String, u64>) {
        out.extend(self.sides.iter().filter_map(Side::counter));
    }

    fn memory_size(&self) -> usize {
        self.cached_bytes() + self.gate.bytes() + self.entries.capacity() * size_of::<Entry>()
    }
}

/// Sides whose rows appear in the output by themselves.
fn preserved(kind: JoinKind) -> [bool; 2] {
    match kind {
        JoinKind::Inner => [false, false],
        JoinKind::LeftOuter | JoinKind::LeftSemi | JoinKind::LeftAnti | JoinKind::LeftMark => {
            [true, false]
        }
        JoinKind::RightOuter | JoinKind::RightSemi | JoinKind::RightAnti => [false, true],
        JoinKind::FullOuter => [true, true],
    }
}

fn add_degree(side: &mut Side, node: u32, weight: i64, is_match: bool) {
    let mark = &mut side.match_states[node as usize];
    if is_match { mark.degree += weight } else { mark.unknown += weight }
}

fn touch_row(side: &mut Side, touched: &mut Vec<u32>, node: u32) {
    let mark = &mut side.match_states[node as usize];
    if !mark.touched {
        mark.touched = true;
        touched.push(node);
    }
}
