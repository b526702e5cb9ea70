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
//! A [`lookup`] leaves half of this out: left rows are paired and not kept, right rows are kept and not paired.
//!
//! What the kind of a join decides is its [`policy`]; an [`emitter`] puts rows out as the policy says.

mod clean;
mod early_flush;
mod emitter;
mod entries;
mod intake;
pub mod lookup;
mod match_status;
mod pairs;
mod policy;
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
use millrace_functions::expr::ExprRef;
use millrace_graph::JoinSide;
use millrace_storage::MemRun;

use self::clean::Cleaning;
use self::early_flush::FlushThresholds;
use self::emitter::{Emitter, OutputColumns};
use self::entries::{Entry, JoinEntries};
use self::pairs::{Condition, Matched, PairColumns, Pairs};
use self::policy::{MatchStatus, NullKeys, Policy, Rules};
use self::side::{END, Side};
use super::{BuildContext, Env, Tables};
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
    /// Where matches are counted while a chunk is paired: of each row, the sum of the weights that it has met, in
    /// which nodes of equal rows may cancel.
    met: Vec<i64>,
}

impl Work {
    fn new(port: usize, chunk: DeltaChunk, slots: Vec<Slot>, nodes: Vec<u32>) -> Work {
        Work { port, chunk, slots, nodes, row: 0, cursor: END, started: false, met: Vec::new() }
    }

    /// Counts what rows have met.
    fn count_met(&mut self, pairs: &Pairs, matched: &Matched) {
        self.met.resize(self.chunk.num_rows(), 0);
        let mut add = |i: usize| self.met[pairs.probe[i] as usize] += pairs.weights[i];
        match matched {
            Matched::All => (0..pairs.len()).for_each(&mut add),
            Matched::Some { matches, .. } => matches.set_indices().for_each(&mut add),
        }
    }

    /// The rows that have met nothing.
    fn unmatched(&mut self) -> Result<DeltaChunk, ExecError> {
        self.met.resize(self.chunk.num_rows(), 0);
        let rows = self.met.iter().map(|met| Some(*met == 0)).collect();
        Ok(self.chunk.filter(&rows)?)
    }
}

/// What a join is built from; left and right in this order.
struct Spec<'a> {
    sides: [&'a JoinSide; 2],
    inputs: [&'a SchemaRef; 2],
    /// Over left columns then right columns.
    residual: Option<&'a ExprRef>,
    /// NULL keys are equal to each other.
    null_equals_null: bool,
    /// The columns of the output, by position as the policy reads it.
    output: Vec<usize>,
    schema: &'a SchemaRef,
}

/// See the module.
pub struct HashJoin {
    state: KeyedState<JoinEntries>,
    emitter: Emitter,
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
    let inputs = [ctx.input(0)?, ctx.input(1)?];
    let spec = Spec {
        sides: [&p.left, &p.right],
        inputs: [&inputs[0], &inputs[1]],
        residual: p.residual.as_ref(),
        null_equals_null: p.null_equals_null,
        output: p.output.clone(),
        schema: &ctx.node.schema,
    };
    let made = HashJoin::new(policy::of(p, ctx.node.append_only), spec, ctx.env, ctx.tables)?;
    Ok(Box::new(made))
}

impl HashJoin {
    fn new(
        policy: Box<dyn Policy>,
        spec: Spec<'_>,
        env: Env,
        tables: Tables<'_>,
    ) -> Result<HashJoin, ExecError> {
        let rules = Rules::of(policy.as_ref(), spec.null_equals_null);
        let [left, right] = spec.inputs;
        let both =
            Schema::new(left.fields().iter().chain(right.fields()).cloned().collect::<Vec<_>>());
        let left_width = left.fields().len();
        let pairs = spec.sides[0].keys.iter().zip(&spec.sides[1].keys);
        let comparison = policy.key_comparison(pairs.map(|(&l, &r)| (l, left_width + r)).collect());
        // Keys that are compared pair by pair are not encoded.
        let encoded = comparison.is_none();
        let keys = spec.sides.map(|side| if encoded { side.keys.clone() } else { Vec::new() });
        let reader = |side: usize| {
            let vnode: &[usize] = if encoded { &spec.sides[side].vnode } else { &[] };
            KeyReader::new(spec.inputs[side], &keys[side], vnode)
        };
        let readers = vec![reader(0)?, reader(1)?];
        let mut side = |at: usize| {
            let (side, schema) = (spec.sides[at], spec.inputs[at]);
            let table = tables(side.state.table)?;
            let (preserved, append_only) = (rules.preserved[at], policy.is_append_only());
            Side::new(side, &keys[at], schema, table, preserved, append_only, &env)
        };
        let sides = [side(0)?, side(1)?];
        let is_empty = sides.iter().all(|s| s.table.is_empty());
        let entries = JoinEntries {
            rules,
            sides,
            condition: Condition::new(spec.residual, comparison, &both, &env)?,
            left_width,
            chunk_rows: env.options.chunk_rows.max(1),
            of: Vec::new(),
        };
        let schema = super::nullable(spec.schema);
        let output = OutputColumns { left_width, positions: spec.output, schema };
        Ok(HashJoin {
            state: KeyedState::new(entries, readers, is_empty, &env),
            emitter: Emitter::new(policy, output),
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
            cleaning: Cleaning::new(spec.sides),
        })
    }

    fn is_busy(&self) -> bool {
        self.work.is_some() || !self.inbox.is_empty()
    }

    /// Nothing is half done.
    fn is_idle(&self) -> bool {
        !self.is_busy() && self.state.is_settled()
    }

    /// Takes out rows with a NULL in their key where they match nothing.
    fn split_nulls(
        &mut self,
        port: usize,
        chunk: DeltaChunk,
        out: &mut Output,
    ) -> Result<DeltaChunk, ExecError> {
        let rules = &self.state.entries.rules;
        if rules.null_keys[port] == NullKeys::Paired || is_planted("null-keys-match") {
            return Ok(chunk);
        }
        let Some(valid) = self.state.reader(port).non_null(&chunk.batch) else { return Ok(chunk) };
        if rules.null_keys[port] == NullKeys::Emitted {
            let nulls = chunk.filter(&BooleanArray::new(!&valid, None))?;
            let contribution = rules.contribution(MatchStatus::Unmatched);
            self.emitter.emit_alike(port, &nulls, contribution, out)?;
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
        let rules = self.state.entries.rules;
        let needs_pairs = rules.emits_pairs || by_degree;
        while work.row < work.slots.len() {
            let slot = work.slots[work.row];
            let entry = &mut self.state.entries.of[slot as usize];
            if !work.started {
                work.started = true;
                work.cursor = if needs_pairs { entry.sides[other].head } else { END };
                if !by_degree && rules.preserved[other] && !entry.touched {
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
        if rules.counts_while_paired[work.port] {
            let rows = work.unmatched()?;
            if !rows.is_empty() {
                let contribution = rules.contribution(MatchStatus::Unmatched);
                self.emitter.emit_alike(work.port, &rows, contribution, out)?;
            }
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
        let rules = self.state.entries.rules;
        if rules.emits_pairs {
            out.push(columns.output(self.emitter.output(), &matched)?);
        }
        if rules.counts_while_paired[work.port] {
            work.count_met(&pairs, &matched);
        }
        if rules.is_any_preserved() {
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
        let preserved = self.state.entries.rules.preserved;
        for (bits, is_match) in
            std::iter::once((Some(matches), true)).chain(std::iter::once((unknown.as_ref(), false)))
        {
            let Some(bits) = bits else { continue };
            for i in bits.set_indices() {
                let row = pairs.probe[i] as usize;
                let own_weight = work.chunk.weight(row);
                if preserved[1 - port] {
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
                if preserved[port] && own != END {
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
            // What is only kept comes first: the rows that probe meet it.
            let probes = self.state.entries.rules.probes;
            ready.sort_by_key(|r| probes[r.port]);
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
