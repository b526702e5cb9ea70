//! The pairing core of a join: the rows of two sides, and which of them match.
//!
//! A slot of the key table is a join key; it has a list of rows for each side ([`entries`], [`side`]). A row is put
//! into its own side ([`intake`]) and paired with the other side's rows ([`work`]) in one step, and a key's gate is
//! one for both sides, so every pair is produced by exactly one of its rows. Pairs are tested and leave in bounded
//! steps ([`pairs`]): a chunk that explodes is put aside with a cursor and continued by `advance`, before anything
//! newer.
//!
//! On preserved sides matches are counted, and what was emitted for a row is kept in step with them
//! ([`match_status`]). Which rows these are, and what is emitted for which status, is the policy's: the core reads it
//! from [`Rules`] and hands rows to the [`Emitter`].
//!
//! [`early_flush`] writes and unpins before the barrier where an epoch is large; [`clean`] drops rows that no later
//! row can meet.

mod clean;
mod early_flush;
mod entries;
mod intake;
mod match_status;
mod pairs;
mod side;
mod work;

use std::collections::{BTreeMap, VecDeque};

use arrow::buffer::BooleanBuffer;
use arrow::datatypes::{Schema, SchemaRef};
use millrace_common::access::RetentionBy;
use millrace_common::{DeltaChunk, Epoch};
use millrace_functions::expr::ExprRef;
use millrace_graph::JoinSide;
use millrace_storage::MemRun;

use self::clean::Cleaning;
use self::early_flush::FlushThresholds;
use self::entries::{Entry, JoinEntries};
#[cfg(test)]
pub(in crate::operators) use self::intake::MAX_NOTES;
use self::pairs::{Condition, Pairs};
use self::side::Side;
use self::work::Work;
use super::Tables;
use super::emitter::Emitter;
use super::policy::{Policy, Rules};
use crate::error::ExecError;
use crate::lookahead::Hint;
use crate::lookahead::operator::EpochReads;
use crate::lookahead::slack::EpochNotes;
use crate::operator::Output;
use crate::operators::Env;
use crate::state::gate::Ready;
use crate::state::keys::KeyReader;
use crate::state::{Fetches, KeyedState, Slot};

/// Full chunks of pairs that one step tests before the rest is put aside: about as many as a time slice allows, with
/// what the operators above do with them.
pub(in crate::operators) const STEP_CHUNKS: usize = 2;

/// What a join is built from; left and right in this order.
pub struct JoinSpec<'a> {
    pub sides: [&'a JoinSide; 2],
    pub inputs: [&'a SchemaRef; 2],
    /// Over left columns then right columns.
    pub residual: Option<&'a ExprRef>,
    /// NULL keys are equal to each other.
    pub null_equals_null: bool,
    /// The columns of the output, by position as the policy reads it.
    pub output: Vec<usize>,
    pub schema: &'a SchemaRef,
}

impl JoinSpec<'_> {
    /// Number of columns of the left side.
    pub fn left_width(&self) -> usize {
        self.inputs[0].fields().len()
    }
}

/// See the module.
pub struct PairingCore {
    state: KeyedState<JoinEntries>,
    /// Reads of stored rows, by side: an early flush is under way.
    stored_reads: Fetches<usize>,
    flush_thresholds: FlushThresholds,
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

impl PairingCore {
    pub fn new(
        policy: &dyn Policy,
        spec: &JoinSpec<'_>,
        env: Env,
        tables: Tables<'_>,
    ) -> Result<PairingCore, ExecError> {
        let rules = Rules::of(policy, spec.null_equals_null);
        let fields = spec.inputs.iter().flat_map(|input| input.fields()).cloned();
        let both = Schema::new(fields.collect::<Vec<_>>());
        let left_width = spec.left_width();
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
            bounds: [None, None],
        };
        Ok(PairingCore {
            state: KeyedState::new(entries, readers, is_empty, &env),
            stored_reads: Fetches::default(),
            flush_thresholds: FlushThresholds::new(
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

    /// What the policy has answered.
    pub fn rules(&self) -> &Rules {
        &self.state.entries.rules
    }

    /// The rows of a chunk that have no NULL in their key; `None`: all of them.
    pub fn non_null(&self, port: usize, chunk: &DeltaChunk) -> Option<BooleanBuffer> {
        self.state.reader(port).non_null(&chunk.batch)
    }

    /// A chunk arrived. Rows whose NULL keys match nothing are not in it.
    pub fn take_in(
        &mut self,
        port: usize,
        chunk: DeltaChunk,
        emitter: &Emitter,
        out: &mut Output,
    ) -> Result<(), ExecError> {
        let (slots, _) = self.state.probe(port, &chunk)?;
        self.inbox.push_back((port, chunk, slots));
        self.drain(emitter, out)
    }

    fn is_busy(&self) -> bool {
        self.work.is_some() || !self.inbox.is_empty()
    }

    /// Nothing is half done.
    fn is_idle(&self) -> bool {
        !self.is_busy() && self.state.is_settled()
    }

    /// See [`crate::operator::Operator::is_full`].
    pub fn is_full(&self) -> bool {
        self.is_busy()
            || !self.stored_reads.is_empty()
            || self.wants_early_flush()
            || self.state.is_full()
    }

    /// See [`crate::operator::Operator::is_pending`].
    pub fn is_pending(&self) -> bool {
        self.is_busy()
            || self.state.is_fetching()
            || !self.stored_reads.is_empty()
            || self.wants_early_flush()
    }

    /// Continues what was put aside, then takes in what waits, one chunk after the other: a row must
    /// not enter its side while another's pairs are half made.
    fn drain(&mut self, emitter: &Emitter, out: &mut Output) -> Result<(), ExecError> {
        let mut left = STEP_CHUNKS * self.env.options.chunk_rows.max(1);
        loop {
            if let Some(mut work) = self.work.take()
                && !self.pair(&mut work, &mut left, emitter, out)?
            {
                self.work = Some(work);
                return Ok(());
            }
            // What is asked of the stored rows must not change meanwhile.
            if !self.stored_reads.is_empty() || left == 0 && !self.inbox.is_empty() {
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

    pub fn shed(&mut self) -> Result<(), ExecError> {
        // Rows that wait have their slots already.
        if self.is_busy() { Ok(()) } else { self.state.shed() }
    }

    fn make_room(&mut self) -> Result<(), ExecError> {
        if self.state.is_over() { self.state.evict() } else { Ok(()) }
    }

    /// Continues what is half done, or waits for what is read. Cancel-safe.
    pub async fn advance(&mut self, emitter: &Emitter, out: &mut Output) -> Result<(), ExecError> {
        if !self.stored_reads.is_empty() {
            self.continue_early_flush().await?;
            return self.drain(emitter, out);
        }
        if !self.is_busy() && self.wants_early_flush() {
            self.begin_early_flush(emitter, out)?;
            return self.drain(emitter, out);
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
        self.drain(emitter, out)
    }

    /// See [`crate::operator::Operator::hint`].
    pub fn hint(&mut self, port: usize, hint: &Hint) -> Result<(), ExecError> {
        self.state.hint(port, hint)
    }

    /// See [`crate::operator::Operator::is_prefetching`].
    pub fn is_prefetching(&self) -> bool {
        self.state.is_prefetching()
    }

    /// The watermarks of an input have moved.
    pub fn watermark(&mut self, port: usize, columns: &[(usize, i64)]) {
        self.state.watermark(port, columns);
    }

    /// Rows and reads of the epoch of other state of the operator, which share its wish for hints.
    pub fn note_others(&mut self, notes: &EpochNotes, reads: EpochReads) {
        self.state.note_others(notes, reads);
    }

    /// The epoch that ends.
    pub fn pass(&mut self, epoch: Epoch) {
        self.state.pass(epoch);
    }

    /// Raises the bound below which rows of a table are dropped.
    pub fn retain(&mut self, table: usize, by: RetentionBy, bound: i64) {
        self.cleaning.raise(table, by, bound);
        self.state.entries.bounds = self.cleaning.bounds;
        for (port, of_side) in self.cleaning.bounds.into_iter().enumerate() {
            // A bound of another column says nothing of a row's event time.
            let time = self.env.event_time.get(port).copied().flatten();
            if let Some((_, bound)) = of_side.filter(|(column, _)| Some(*column) == time) {
                self.state.raise_floor(port, bound);
            }
        }
    }

    /// The barrier: emits what rows contribute by themselves as it is now, and writes what was held back.
    pub fn end_epoch(&mut self, emitter: &Emitter, out: &mut Output) -> Result<(), ExecError> {
        self.state.check_settled(self.is_idle() && self.stored_reads.is_empty())?;
        self.update_match_status(emitter, out)?;
        for side in &mut self.state.entries.sides {
            side.flush()?;
            side.compact()?;
        }
        self.state.keys.take_dirty();
        self.clean()?;
        self.state.unpin();
        self.reset_flush_thresholds();
        self.make_room()
    }

    /// The runs that the epoch has written.
    pub fn seal(&mut self, sealed: &mut Vec<MemRun>) -> Result<(), ExecError> {
        for side in &mut self.state.entries.sides {
            sealed.extend(side.table.seal()?);
        }
        Ok(())
    }

    pub fn counters(&self, out: &mut BTreeMap<String, u64>) {
        out.extend(self.state.entries.sides.iter().filter_map(Side::counter));
    }

    pub fn memory_size(&self) -> usize {
        self.state.held()
            + self.state.parked_bytes()
            + self.state.entries.of.capacity() * size_of::<Entry>()
    }
}
