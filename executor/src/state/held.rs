//! What an operator holds until the barrier (docs/design.md §6): an account of it, and when it is too much.

use crate::memory::{MemoryClass, Reservation};
use crate::operators::Env;

/// See the module. Of one instance of an operator.
pub struct HeldUntilBarrier {
    /// Of changes. What of the cache is pinned has an account there.
    account: Reservation,
    bytes: usize,
    /// Of them, of entries.
    pinned: usize,
    /// What could not be settled when that was last tried, or the entries that left the cache for it, which may have to
    /// be read again: not tried again below twice as much.
    kept: usize,
}

impl HeldUntilBarrier {
    pub fn new(env: &Env) -> HeldUntilBarrier {
        HeldUntilBarrier {
            account: env.governor.account(MemoryClass::Held),
            bytes: 0,
            pinned: 0,
            kept: 0,
        }
    }

    /// It holds so many bytes of changes now, and so many of entries that should leave its cache.
    pub fn set(&mut self, changes: usize, pinned: usize) {
        self.account.set(changes);
        self.bytes = changes + pinned;
        self.pinned = pinned;
    }

    /// Whether to settle: it holds more than one operator may, or a large part of too much that all hold together.
    pub fn is_over(&self, env: &Env) -> bool {
        let bytes = self.bytes;
        bytes > 2 * self.kept
            && (bytes > env.options.group_change_bytes || env.governor.is_large_part_held(bytes))
    }

    /// What could be settled is: so much stays until the barrier.
    pub fn settled(&mut self, changes: usize, pinned: usize) {
        let left = self.pinned;
        self.set(changes, pinned);
        self.kept = self.bytes.max(left);
    }

    /// The barrier has passed: nothing is held.
    pub fn clear(&mut self) {
        self.set(0, 0);
        self.kept = 0;
    }
}
