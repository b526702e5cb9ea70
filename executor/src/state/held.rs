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
    /// What could not be settled when that was last tried: not tried again below twice as much.
    kept: usize,
    /// Entries that left the cache for it then, which may have to be read again: the same, unless it must be.
    left: usize,
}

impl HeldUntilBarrier {
    pub fn new(env: &Env) -> HeldUntilBarrier {
        HeldUntilBarrier {
            account: env.governor.account(MemoryClass::Held),
            bytes: 0,
            pinned: 0,
            kept: 0,
            left: 0,
        }
    }

    /// It holds so many bytes of changes now, and so many of entries that should leave its cache.
    pub fn set(&mut self, changes: usize, pinned: usize) {
        self.account.set(changes);
        self.bytes = changes + pinned;
        self.pinned = pinned;
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether to settle: it holds more than one operator may, or a large part of too much that all hold together.
    pub fn is_over(&self, env: &Env) -> bool {
        let bytes = self.bytes;
        let is_due = bytes > 2 * self.left
            && (bytes > env.options.group_change_bytes || env.governor.is_too_much_held(bytes));
        bytes > 2 * self.kept && (is_due || env.governor.must_settle(bytes))
    }

    /// What could be settled is: so much stays until the barrier.
    pub fn settled(&mut self, changes: usize, pinned: usize) {
        self.left = self.pinned;
        self.set(changes, pinned);
        self.kept = self.bytes;
    }

    /// The barrier has passed: nothing is held.
    pub fn clear(&mut self) {
        self.set(0, 0);
        self.kept = 0;
        self.left = 0;
    }
}
