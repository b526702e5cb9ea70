//! Pairing the rows of a chunk with the other side's, in bounded steps.

use millrace_common::DeltaChunk;
use millrace_common::fault_injection::is_planted;

use super::super::emitter::Emitter;
use super::super::policy::MatchStatus;
use super::PairingCore;
use super::pairs::{Matched, PairColumns, Pairs};
use super::side::END;
use crate::error::ExecError;
use crate::operator::Output;
use crate::state::Slot;

/// Rows of one port that are in memory and yet to be paired.
pub struct Work {
    pub port: usize,
    pub chunk: DeltaChunk,
    pub slots: Vec<Slot>,
    /// Each row's own node, if it has a new one.
    pub nodes: Vec<u32>,
    row: usize,
    /// Next node of the other side for `row`; `END` with `started`: none left.
    cursor: u32,
    started: bool,
    /// Where matches are counted while a chunk is paired: of each row, the sum of the weights that it has met, in
    /// which nodes of equal rows may cancel.
    met: Vec<i64>,
}

impl Work {
    pub fn new(port: usize, chunk: DeltaChunk, slots: Vec<Slot>, nodes: Vec<u32>) -> Work {
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

impl PairingCore {
    /// Pairs the rows of one chunk; `false` when it stopped since no pairs were left to the step. Those that do not match
    /// count too: a condition may let hardly any through.
    pub(super) fn pair(
        &mut self,
        work: &mut Work,
        left: &mut usize,
        emitter: &Emitter,
        out: &mut Output,
    ) -> Result<bool, ExecError> {
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
                *left = left.saturating_sub(self.pairs.len());
                self.emit_pairs(work, emitter, out)?;
                if *left == 0 {
                    return Ok(false);
                }
            }
            if work.cursor == END {
                work.row += 1;
                work.started = false;
            }
        }
        *left = left.saturating_sub(self.pairs.len());
        self.emit_pairs(work, emitter, out)?;
        if rules.counts_while_paired[work.port] {
            let rows = work.unmatched()?;
            // Those that waited together may be more than a chunk.
            for from in (0..rows.num_rows()).step_by(chunk_rows) {
                let rows = rows.slice(from, chunk_rows.min(rows.num_rows() - from));
                let contribution = rules.contribution(MatchStatus::Unmatched);
                emitter.emit_alike(work.port, &rows, contribution, out)?;
            }
        }
        Ok(true)
    }

    /// Tests the pairs gathered, counts degrees and emits.
    fn emit_pairs(
        &mut self,
        work: &mut Work,
        emitter: &Emitter,
        out: &mut Output,
    ) -> Result<(), ExecError> {
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
            out.push(columns.output(emitter.output(), &matched)?);
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
}
