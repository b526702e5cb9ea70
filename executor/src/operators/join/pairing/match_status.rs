//! Match counts of rows of preserved sides, and bringing what was emitted for these rows up to date. What a row
//! contributes with which status is the policy's.

use arrow::array::Int64Array;
use millrace_common::fault_injection::is_planted;

use super::super::emitter::Emitter;
use super::super::policy::MatchStatus;
use super::PairingCore;
use super::entries::JoinEntries;
use super::pairs::{Matched, PairColumns, Pairs};
use super::side::{END, MatchState, Side};
use super::work::Work;
use crate::error::ExecError;
use crate::operator::Output;
use crate::state::Slot;
use crate::state::arena::RowRef;

/// Rows of one side on their way out.
#[derive(Default)]
struct Emission {
    rows: Vec<RowRef>,
    weights: Vec<i64>,
    marks: Vec<Option<bool>>,
}

impl Emission {
    fn push(&mut self, row: RowRef, weight: i64, mark: Option<bool>) {
        if weight != 0 {
            self.rows.push(row);
            self.weights.push(weight);
            self.marks.push(mark);
        }
    }
}

impl PairingCore {
    /// Adds matching pairs to the degrees of rows of preserved sides.
    pub(super) fn count_degrees(&mut self, work: &Work, pairs: &Pairs, matched: &Matched) {
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

    /// Emits old → new for everything touched since the last time.
    pub(super) fn update_match_status(
        &mut self,
        emitter: &Emitter,
        out: &mut Output,
    ) -> Result<(), ExecError> {
        let mut emissions: [Emission; 2] = Default::default();
        for slot in std::mem::take(&mut self.touched_keys) {
            self.state.entries.of[slot as usize].touched = false;
            for (side, emission) in emissions.iter_mut().enumerate() {
                let matched = self.state.entries.of[slot as usize].sides[1 - side].total > 0;
                if self.state.entries.rules.preserved[side]
                    && self.state.entries.of[slot as usize].matched[side] != matched
                {
                    self.state.entries.of[slot as usize].matched[side] = matched;
                    let mut node = self.state.entries.of[slot as usize].sides[side].head;
                    while node != END {
                        self.settle_row(side, node, emission);
                        node = self.state.entries.sides[side].nodes[node as usize].next;
                        self.emit_large(side, emission, emitter, out)?;
                    }
                }
            }
        }
        for (side, emission) in emissions.iter_mut().enumerate() {
            let mut gone = Vec::new();
            for node in std::mem::take(&mut self.touched_rows[side]) {
                self.state.entries.sides[side].match_states[node as usize].touched = false;
                self.settle_row(side, node, emission);
                if self.state.entries.sides[side].nodes[node as usize].weight == 0 {
                    gone.push(node);
                }
                self.emit_large(side, emission, emitter, out)?;
            }
            self.emit_rows(side, emission, emitter, out)?;
            for node in gone {
                let slot = self.state.entries.sides[side].nodes[node as usize].slot;
                self.state.entries.sides[side]
                    .unlink(&mut self.state.entries.of[slot as usize].sides[side], node);
                self.state.resize(slot);
            }
        }
        Ok(())
    }

    fn settle_row(&mut self, side: usize, node: u32, emission: &mut Emission) {
        let (weight, as_mark) = self.state.entries.wanted(side, node);
        let at = self.state.entries.sides[side].nodes[node as usize].at;
        if weight == 0
            && self.state.entries.rules.emits_pairs
            && self.state.entries.sides[side].nodes[node as usize].weight > 0
            && is_planted("outer-null-row-stays")
        {
            return;
        }
        let mark = &mut self.state.entries.sides[side].match_states[node as usize];
        if mark.emitted_as == as_mark {
            emission.push(at, weight - mark.emitted, as_mark);
        } else {
            emission.push(at, -mark.emitted, mark.emitted_as);
            emission.push(at, weight, as_mark);
        }
        mark.emitted = weight;
        mark.emitted_as = as_mark;
    }

    fn emit_large(
        &self,
        side: usize,
        emission: &mut Emission,
        emitter: &Emitter,
        out: &mut Output,
    ) -> Result<(), ExecError> {
        // A row may add two: its old mark out, its new one in.
        if emission.rows.len() + 1 >= self.env.options.chunk_rows {
            self.emit_rows(side, emission, emitter, out)?;
        }
        Ok(())
    }

    fn emit_rows(
        &self,
        side: usize,
        emission: &mut Emission,
        emitter: &Emitter,
        out: &mut Output,
    ) -> Result<(), ExecError> {
        if emission.rows.is_empty() {
            return Ok(());
        }
        let Emission { rows, weights, marks } = std::mem::take(emission);
        let batch = self.state.entries.sides[side].arena.batch(&rows)?;
        let weights = weights.iter().any(|&w| w != 1).then(|| Int64Array::from(weights));
        emitter.emit_rows(side, batch.columns(), marks, weights, out)
    }
}

impl JoinEntries {
    /// The contribution of a row as things are: its weight in the output, and its mark.
    fn wanted(&self, side: usize, node: u32) -> (i64, Option<bool>) {
        let row = &self.sides[side].nodes[node as usize];
        let mark = &self.sides[side].match_states[node as usize];
        let matched = match self.condition {
            Some(_) => mark.degree > 0,
            None => self.of[row.slot as usize].sides[1 - side].total > 0,
        };
        let status = match (matched, mark.unknown > 0) {
            (true, _) => MatchStatus::Matched,
            (false, true) => MatchStatus::Unknown,
            (false, false) => MatchStatus::Unmatched,
        };
        let contribution = self.rules.contribution(status);
        (if contribution.is_emitted { row.weight } else { 0 }, contribution.mark)
    }

    /// Keys just loaded: what their rows had contributed when they were last written.
    pub(super) fn restore_marks(&mut self, slots: &[Slot]) -> Result<(), ExecError> {
        if self.condition.is_some() {
            for &slot in slots {
                self.restore_degrees(slot)?;
            }
        }
        for &slot in slots {
            for side in 0..2 {
                if !self.rules.preserved[side] {
                    continue;
                }
                let entry = &mut self.of[slot as usize];
                entry.matched[side] = entry.sides[1 - side].total > 0;
                let mut node = entry.sides[side].head;
                while node != END {
                    let (emitted, emitted_as) = self.wanted(side, node);
                    let mark = &mut self.sides[side].match_states[node as usize];
                    *mark = MatchState { emitted, emitted_as, ..*mark };
                    node = self.sides[side].nodes[node as usize].next;
                }
            }
        }
        Ok(())
    }

    /// Degrees of a key's rows from all of its pairs.
    fn restore_degrees(&mut self, slot: Slot) -> Result<(), ExecError> {
        let [left, right] = self.of[slot as usize].sides;
        if left.len == 0 || right.len == 0 {
            return Ok(());
        }
        let (mut rows, mut left_nodes) = (Vec::new(), Vec::new());
        let mut node = left.head;
        while node != END {
            rows.push(self.sides[0].nodes[node as usize].at);
            left_nodes.push(node);
            node = self.sides[0].nodes[node as usize].next;
        }
        let batch = self.sides[0].arena.batch(&rows)?;
        let mut pairs = Pairs::default();
        for (row, _) in left_nodes.iter().enumerate() {
            let mut node = right.head;
            while node != END {
                let n = &self.sides[1].nodes[node as usize];
                pairs.push(row as u32, n.at, node, 1);
                node = n.next;
                if pairs.len() >= self.chunk_rows {
                    self.add_pairs(&batch, &left_nodes, &mut pairs)?;
                }
            }
        }
        self.add_pairs(&batch, &left_nodes, &mut pairs)
    }

    fn add_pairs(
        &mut self,
        batch: &arrow::array::RecordBatch,
        left_nodes: &[u32],
        pairs: &mut Pairs,
    ) -> Result<(), ExecError> {
        if pairs.len() == 0 {
            return Ok(());
        }
        let columns = PairColumns::new(0, batch, &self.sides[1], pairs, self.left_width);
        if let Matched::Some { matches, unknown } = columns.test(self.condition.as_ref())? {
            for (bits, is_match) in [(Some(matches), true), (unknown, false)] {
                for i in bits.iter().flat_map(|b| b.set_indices()) {
                    let (l, r) = (left_nodes[pairs.probe[i] as usize], pairs.nodes[i]);
                    let (lw, rw) = (
                        self.sides[0].nodes[l as usize].weight,
                        self.sides[1].nodes[r as usize].weight,
                    );
                    if self.rules.preserved[0] {
                        add_degree(&mut self.sides[0], l, rw, is_match);
                    }
                    if self.rules.preserved[1] {
                        add_degree(&mut self.sides[1], r, lw, is_match);
                    }
                }
            }
        }
        pairs.clear();
        Ok(())
    }
}

/// Adds to the weight of a row's matches, or of rows of which it is unknown.
fn add_degree(side: &mut Side, node: u32, weight: i64, is_match: bool) {
    let mark = &mut side.match_states[node as usize];
    if is_match { mark.degree += weight } else { mark.unknown += weight }
}

/// Puts a row on the list of those to settle.
pub fn touch_row(side: &mut Side, touched: &mut Vec<u32>, node: u32) {
    let mark = &mut side.match_states[node as usize];
    if !mark.touched {
        mark.touched = true;
        touched.push(node);
    }
}
