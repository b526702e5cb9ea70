//! What holds of keyed state between two calls (see the module above).

use super::{Entries, KeyedState, Missing};

/// A check looks at every entry. It is due when this many times as many rows have come since the last.
const ROWS_PER_ENTRY: usize = 4;
/// Rows that are always let pass between two checks.
const MIN_ROWS: usize = 256;

impl<E: Entries> KeyedState<E> {
    /// The first broken invariant, in words: the cache's and the gate's own; a row is parked only while its key is being
    /// fetched; an entry is being fetched exactly while answers for it are outstanding, and read ahead while it waits for that; and
    /// it is due while it has a mark.
    pub fn check_invariants(&self) -> Result<(), String> {
        self.keys.check_invariants()?;
        self.gate.check_invariants()?;
        if let Some(slot) = self.gate.slots().find(|&slot| !self.keys.is_fetching(slot)) {
            return Err(format!("rows are parked for slot {slot}, which nothing fetches"));
        }
        for slot in self.keys.slots() {
            let outstanding = self.outstanding.get(slot as usize).copied().unwrap_or(0);
            if self.keys.is_fetching(slot) != (outstanding > 0) {
                return Err(format!("slot {slot} waits for {outstanding} answers"));
            }
            if outstanding > 0 && !self.is_fetching() {
                return Err(format!("slot {slot} waits for an answer, and no read is under way"));
            }
            let is_ahead = self.reads.ahead.of(slot) != Missing::default();
            if self.keys.is_prefetching(slot) != is_ahead {
                return Err(format!("slot {slot} is read ahead: {is_ahead}"));
            }
            if self.keys.is_due(slot) != self.due.has(slot) {
                return Err(format!("slot {slot} is due: {}", self.due.has(slot)));
            }
        }
        Ok(())
    }

    /// In debug builds, [`KeyedState::check_invariants`] once in a while: `rows` more have been worked on.
    ///
    /// # Panics
    ///
    /// Where an invariant is broken.
    pub(super) fn debug_check(&mut self, rows: usize) {
        if !cfg!(debug_assertions) {
            return;
        }
        self.unchecked += rows;
        if self.unchecked >= MIN_ROWS + ROWS_PER_ENTRY * self.keys.capacity() {
            self.unchecked = 0;
            if let Err(broken) = self.check_invariants() {
                debug_assert!(false, "keyed state: {broken}");
            }
        }
    }
}
