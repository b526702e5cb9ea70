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
mod entries;
mod intake;
pub mod lookup;
mod match_status;
mod pairs;
mod retractions;
mod side;

use std::collections::{HashMap, VecDeque};

use arrow::array::BooleanArray;
use arrow::datatypes::{Schema, SchemaRef};
use futures::FutureExt;
use futures::future::BoxFuture;
use millrace_common::DeltaChunk;
use millrace_common::access::RetentionBy;
use millrace_common::fault_injection::is_planted;
use millrace_graph::JoinKind;
use millrace_storage::MemRun;

use self::clean::Cleaning;
use self::early_flush::FlushThresholds;
use self::entries::{Entry, JoinEntries};
use self::pairs::{Condition, Matched, PairColumns, Pairs};
use self::side::{END, Side};
use super::{BuildContext, Env};
use crate::error::ExecError;
use crate::operator::{Operator, Output};
use crate::state::gate::Ready;
use crate::state::keys::KeyReader;
use crate::state::{Fetches, KeyedState, Slot, StateTable};

/// Full chunks one step emits before the rest is put aside.
const STEP_CHUNKS: usize = 8;

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

/// See the module.
pub struct HashJoin {
    state: KeyedState<JoinEntries>,
    null_equals_null: bool,
    null_aware: bool,
    emits_pairs: bool,
    output: Vec<usize>,
    schema: SchemaRef,
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
    env: Env,
    cleaning: Cleaning,
}

/// Builds the operator of a node. Fails where the graph does not fit it.
pub fn build(
    p: &millrace_graph::Join,
    ctx: BuildContext<'_>,
) -> Result<Box<dyn Operator>, ExecError> {
    let (left, right, node) = (ctx.input(0)?, ctx.input(1)?, ctx.node);
    let (schema, append_only) = (&node.schema, node.append_only);
    let made = HashJoin::new(schema, append_only, p, &left, &right, ctx.env, ctx.tables)?;
    Ok(Box::new(made))
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
        let sides = both_sides(join, &keys, [left, right], append_only, &env, tables)?;
        let is_empty = sides.iter().all(|s| s.table.is_empty());
        let readers =
            vec![reader(&join.left, &keys[0], left)?, reader(&join.right, &keys[1], right)?];
        let entries = JoinEntries {
            kind: join.kind,
            sides,
            preserved,
            condition: Condition::new(join.residual.as_ref(), null_keys, &both, &env)?,
            left_width,
            chunk_rows: env.options.chunk_rows.max(1),
            is_lookup: false,
            of: Vec::new(),
        };
        Ok(HashJoin {
            state: KeyedState::new(entries, readers, is_empty, &env),
            null_equals_null: join.null_equals_null,
            null_aware: join.null_aware,
            emits_pairs: emits_pairs(join.kind),
            output: join.output.clone(),
            schema: super::nullable(schema),
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
            env,
            cleaning: Cleaning::new(join),
        })
    }

    fn is_busy(&self) -> bool {
        self.work.is_some() || !self.inbox.is_empty()
    }

    /// Nothing is half done.
    fn is_idle(&self) -> bool {
        !self.is_busy() && self.state.is_settled()
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
        let Some(valid) = self.state.reader(port).non_null(&chunk.batch) else { return Ok(chunk) };
        let pads = self.state.entries.is_lookup
            && port == 0
            && self.state.entries.kind == JoinKind::LeftOuter;
        if (self.state.entries.preserved[port] || pads)
            && self.state.entries.kind != JoinKind::LeftSemi
            && self.state.entries.kind != JoinKind::RightSemi
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
                Some((port, chunk, slots)) => {
                    if let Some(ready) = self.state.admit_probed(port, chunk, slots)? {
                        self.start(port, ready.chunk, ready.slots)?;
                    }
                }
                None => return self.make_room(),
            }
        }
    }

    /// Pairs the rows of one chunk; `false` when it stopped at the limit.
    fn pair(&mut self, work: &mut Work, limit: usize, out: &mut Output) -> Result<bool, ExecError> {
        let other = 1 - work.port;
        let chunk_rows = self.env.options.chunk_rows.max(1);
        let by_degree = self.state.entries.condition.is_some();
        let needs_pairs = self.emits_pairs || by_degree;
        while work.row < work.slots.len() {
            let slot = work.slots[work.row];
            let entry = &mut self.state.entries.of[slot as usize];
            if !work.started {
                work.started = true;
                work.cursor = if needs_pairs { entry.sides[other].head } else { END };
                if !by_degree && self.state.entries.preserved[other] && !entry.touched {
                    entry.touched = true;
                    self.touched_keys.push(slot);
                    self.state.keys.mark_dirty(slot);
                }
            }
            let weight = work.chunk.weight(work.row);
            while work.cursor != END && self.pairs.len() < chunk_rows {
                let node = &self.state.entries.sides[other].nodes[work.cursor as usize];
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
        if self.state.entries.is_lookup {
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
            &self.state.entries.sides[other],
            &pairs,
            self.state.entries.left_width,
        );
        let matched = columns.test(self.state.entries.condition.as_ref())?;
        if self.emits_pairs {
            out.push(columns.output(&self.output, &self.schema, &matched)?);
        }
        if self.state.entries.is_lookup {
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
                if self.state.entries.preserved[1 - port] {
                    let node = pairs.nodes[i];
                    add_degree(&mut self.state.entries.sides[1 - port], node, own_weight, is_match);
                    touch_row(
                        &mut self.state.entries.sides[1 - port],
                        &mut self.touched_rows[1 - port],
                        node,
                    );
                    self.state.keys.mark_dirty(work.slots[row]);
                }
                let own = work.nodes[row];
                if self.state.entries.preserved[port] && own != END {
                    add_degree(
                        &mut self.state.entries.sides[port],
                        own,
                        pairs.weights[i] / own_weight,
                        is_match,
                    );
                }
            }
        }
    }

    fn make_room(&mut self) -> Result<(), ExecError> {
        if self.state.is_over() { self.state.evict() } else { Ok(()) }
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
        if !self.is_busy() {
            // A later row of a key may still need a side that the first one did not.
            let mut ready = self.state.completed().await?;
            if self.state.entries.is_lookup {
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
        let (slots, _) = self.state.probe(port, &chunk)?;
        self.inbox.push_back((port, chunk, slots));
        self.drain(out)
    }

    fn is_full(&self) -> bool {
        self.is_busy() || !self.relieving.is_empty() || self.wants_relief() || self.state.is_full()
    }

    fn is_pending(&self) -> bool {
        self.is_busy()
            || self.state.is_fetching()
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
            self.state.check_settled(self.is_idle() && self.relieving.is_empty())?;
            self.update_match_status(out)?;
            for side in &mut self.state.entries.sides {
                side.flush()?;
                side.compact()?;
            }
            self.state.keys.take_dirty();
            self.clean()?;
            self.state.unpin();
            self.reset_relief();
            self.make_room()
        }
        .boxed()
    }

    fn seal(&mut self, sealed: &mut Vec<MemRun>) -> Result<(), ExecError> {
        for side in &mut self.state.entries.sides {
            sealed.extend(side.table.seal()?);
        }
        Ok(())
    }

    fn counters(&self, out: &mut HashMap<String, u64>) {
        out.extend(self.state.entries.sides.iter().filter_map(Side::counter));
    }

    fn memory_size(&self) -> usize {
        self.state.held()
            + self.state.parked_bytes()
            + self.state.entries.of.capacity() * size_of::<Entry>()
    }
}

/// Left and right; `keys` and `schemas` in this order.
fn both_sides(
    join: &millrace_graph::Join,
    keys: &[Vec<usize>; 2],
    schemas: [&SchemaRef; 2],
    append_only: bool,
    env: &Env,
    tables: &mut dyn FnMut(usize) -> Result<Box<dyn StateTable>, ExecError>,
) -> Result<[Side; 2], ExecError> {
    let preserved = preserved(join.kind);
    let mut side = |port: usize, side: &millrace_graph::JoinSide| {
        let table = tables(side.state.table)?;
        Side::new(side, &keys[port], schemas[port], table, preserved[port], append_only, env)
    };
    Ok([side(0, &join.left)?, side(1, &join.right)?])
}

/// Whether rows leave with what they match, and not alone.
fn emits_pairs(kind: JoinKind) -> bool {
    matches!(
        kind,
        JoinKind::Inner | JoinKind::LeftOuter | JoinKind::RightOuter | JoinKind::FullOuter
    )
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
