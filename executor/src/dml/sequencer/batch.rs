//! When the open epoch ends while the one before is on its way into the log.
//!
//! One commit of a table goes into a record, so a small epoch gains nothing from being sealed early: the statements that
//! come meanwhile are better logged together with it. A large one has an upload of its own before its record, which
//! then overlaps the record of the epoch before.

use tokio::sync::Notify;

use super::Sequencer;
use super::state::State;

/// An epoch is large if its change takes so many times in memory what a record holds itself: the number of uploads is
/// bounded by the bytes written.
pub const EARLY_SEAL_INLINES: usize = 16;

/// Tells when an epoch has grown large or one has been concluded.
pub(super) struct BatchSignals {
    large: usize,
    changed: Notify,
}

impl BatchSignals {
    /// `large`: bytes of change in memory.
    pub(super) fn new(large: usize) -> BatchSignals {
        BatchSignals { large, changed: Notify::new() }
    }

    /// The open epoch holds so many bytes of change.
    pub(super) fn grown(&self, bytes: usize) {
        if bytes >= self.large {
            self.changed.notify_one();
        }
    }

    /// An epoch has been concluded, or the table has stopped.
    pub(super) fn concluded(&self) {
        self.changed.notify_one();
    }
}

impl Sequencer {
    /// Waits until the open epoch may end: nothing is on its way, or it is large enough for an upload of its own.
    pub async fn await_batch(&self) {
        loop {
            let changed = self.batch.changed.notified();
            if self.may_seal(&self.state.lock()) {
                return;
            }
            changed.await;
        }
    }

    fn may_seal(&self, state: &State) -> bool {
        let has_sealed = !state.ahead.is_empty();
        state.stopped
            || state.in_flight.is_empty()
            || has_sealed
            || state.open.delta_bytes >= self.batch.large
    }
}
