//! Keyed state inside of an operator whose keyed state is another (docs/design.md §8): the values of an aggregate's groups.
//! Its keys are announced and read ahead as others are. Whether hints are wanted is decided for the operator as a whole.

use std::sync::Arc;

use millrace_common::Epoch;

use super::{Entries, KeyedState};
use crate::lookahead::operator::EpochReads;
use crate::lookahead::presence::Presence;
use crate::lookahead::slack::EpochNotes;
use crate::state::Slot;
use crate::state::limits::Limits;

/// What such state has seen of an epoch.
pub struct SeenInside {
    reads: EpochReads,
    /// How long its reads took. When its rows began is the operator's to tell.
    notes: EpochNotes,
}

impl<E: Entries> KeyedState<E> {
    /// The same, whose keys walkers tell from others by this port.
    pub fn hinted_at(mut self, port: usize) -> KeyedState<E> {
        self.keys.set_port(port);
        self
    }

    /// The same, where nothing stays in memory from epoch to epoch: without a share of the memory for caches.
    pub fn without_cache(self) -> KeyedState<E> {
        KeyedState { limits: Limits::without_cache(&self.env), ..self }
    }

    /// An epoch ends, all rows of which have run: as [`KeyedState::pass`] of state inside of an operator. The operator's
    /// keyed state is to be [told](KeyedState::note_inside) what comes of it before it is passed itself.
    pub fn pass_inside(&mut self, epoch: Epoch) -> SeenInside {
        self.pass_marks(epoch);
        let reads = std::mem::take(&mut self.epoch_reads);
        let EpochNotes { slowest, waited, .. } = std::mem::take(&mut self.notes);
        SeenInside { reads, notes: EpochNotes { slowest, waited, ..EpochNotes::default() } }
    }

    /// What state inside of the operator has seen of the epoch that ends.
    pub fn note_inside(&mut self, seen: &SeenInside) {
        self.note_others(&seen.notes, seen.reads);
    }

    /// Walkers see there what is in memory, as they do of the operator's keyed state; `None`: they do not look.
    pub fn share_presence(&mut self, presence: Option<&Arc<Presence>>) {
        self.keys.set_presence(presence.cloned());
    }

    /// Rows have come for entries that were not [probed](Self::probe), and ask for nothing yet.
    pub fn note_used(&mut self, slots: &[Slot]) {
        if !self.due.is_empty() {
            self.touch(0, slots);
        }
    }
}
