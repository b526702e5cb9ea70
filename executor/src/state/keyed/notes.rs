//! What keyed state notes of an epoch's rows and reads, for the choice of where hints come from (docs/design.md §8).

use millrace_common::Epoch;
use tokio::time::Instant;

use super::{Entries, KeyedState};
use crate::lookahead::operator::EpochReads;
use crate::lookahead::slack::EpochNotes;

impl<E: Entries> KeyedState<E> {
    /// Rows have come at an input.
    #[inline]
    pub(super) fn note_rows(&mut self, port: usize) {
        if let Some(began) = self.notes.began.get_mut(port).filter(|began| began.is_none()) {
            *began = Some(self.env.clock.now());
        }
    }

    /// A read of the store that was asked then is answered, at least in part.
    pub(super) fn note_read(&mut self, asked: Instant) {
        let took = self.env.clock.elapsed(asked);
        self.notes.note_read(took);
    }

    /// The same, of a read that rows have waited for.
    pub(super) fn note_wait(&mut self, asked: Instant) {
        let took = self.env.clock.elapsed(asked);
        self.notes.note_wait(took);
    }

    /// Rows and reads of the epoch of other state of the operator.
    pub fn note_others(&mut self, notes: &EpochNotes, reads: EpochReads) {
        self.notes.join(notes);
        self.epoch_reads.missed += reads.missed;
        self.epoch_reads.used += reads.used;
        self.epoch_reads.late += reads.late;
        self.epoch_reads.unused += reads.unused;
    }

    /// An epoch ends, with these reads.
    pub(super) fn end_notes(&mut self, epoch: Epoch, reads: EpochReads) {
        let EpochReads { missed, used, late, unused } = reads;
        let notes = EpochNotes { missed, used, late, unused, ..std::mem::take(&mut self.notes) };
        let is_followed = self.env.lookahead.is_followed();
        self.env.metrics.lookahead.pass(epoch, &notes, is_followed);
    }
}
