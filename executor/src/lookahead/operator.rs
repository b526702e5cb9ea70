//! What an operator of a task and the walkers share: whether hints are wanted, and which keys need none.
//!
//! Hints are wanted once rows have waited for reads, and as long as they would wait without hints: an epoch with
//! reads of the store, made for rows or ahead of them in time, keeps them on for [`KEPT_EPOCHS`]. They are off for a
//! while when most of what was read ahead met no row.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use tokio::sync::Notify;

use super::presence::Presence;
use crate::memory::{MemoryClass, MemoryGovernor, Reservation};

/// Epochs without reads after which hints are no longer wanted.
const KEPT_EPOCHS: u32 = 64;
/// Epochs for which hints are off when they were in vain; doubled each time, up to a limit.
const PENALTY_EPOCHS: u32 = 256;
const MAX_PENALTY: u32 = 1 << 14;
/// Keys read ahead in vain that are not yet worth a decision.
const FEW_UNUSED: f64 = 64.0;
/// What is left after an epoch of what was counted before it.
const DECAY: f64 = 63.0 / 64.0;

/// See the module. One for each operator with keyed state in each task.
#[derive(Debug, Default)]
pub struct OperatorLookahead {
    /// There is a walker that would send hints; without one, none are ever wanted.
    followed: bool,
    active: AtomicBool,
    presence: Mutex<Option<Arc<Presence>>>,
    changed: Arc<Notify>,
}

impl OperatorLookahead {
    /// `changed` is told whenever hints begin to be wanted, or are no longer.
    pub fn new(changed: &Arc<Notify>) -> Arc<OperatorLookahead> {
        let changed = Arc::clone(changed);
        Arc::new(OperatorLookahead { followed: true, changed, ..OperatorLookahead::default() })
    }

    /// Hints are wanted. Cheap: asked by walkers for every chunk.
    pub fn is_active(&self) -> bool {
        self.active.load(Ordering::Relaxed)
    }

    /// The keys that are in memory, while hints are wanted.
    pub fn presence(&self) -> Option<Arc<Presence>> {
        self.presence.lock().clone()
    }

    /// Told when [`OperatorLookahead::is_active`] changes.
    pub fn changed(&self) -> &Arc<Notify> {
        &self.changed
    }

    fn set(&self, presence: Option<Arc<Presence>>) {
        let active = presence.is_some();
        *self.presence.lock() = presence;
        self.active.store(active, Ordering::Relaxed);
        self.changed.notify_waiters();
    }
}

/// What an epoch has shown of an operator's reads, in keys.
#[derive(Clone, Copy, Debug, Default)]
pub struct EpochReads {
    /// Read when their rows had come.
    pub missed: u64,
    /// Read ahead, and used.
    pub used: u64,
    /// Read ahead in vain.
    pub unused: u64,
}

/// Decides at barriers whether hints are wanted; of one operator in one task.
pub struct Activation {
    shared: Arc<OperatorLookahead>,
    /// Of the presence table.
    account: Reservation,
    /// Epochs for which hints are still wanted, and for which they are not whatever is read.
    left: u32,
    off: u32,
    penalty: u32,
    used: f64,
    unused: f64,
}

impl Activation {
    pub fn new(shared: &Arc<OperatorLookahead>, governor: &Arc<MemoryGovernor>) -> Activation {
        Activation {
            shared: Arc::clone(shared),
            account: governor.account(MemoryClass::Cache),
            left: 0,
            off: 0,
            penalty: PENALTY_EPOCHS,
            used: 0.0,
            unused: 0.0,
        }
    }

    pub fn is_active(&self) -> bool {
        self.left > 0
    }

    /// An epoch has ended. `Some`: the keys in memory are to be noted there from now on, or nowhere.
    pub fn epoch(&mut self, reads: EpochReads) -> Option<Option<Arc<Presence>>> {
        self.used = self.used * DECAY + reads.used as f64;
        self.unused = self.unused * DECAY + reads.unused as f64;
        if !self.shared.followed {
            return None;
        }
        let was_active = self.is_active();
        self.off = self.off.saturating_sub(1);
        self.left = match reads.missed + reads.used {
            0 => self.left.saturating_sub(1),
            _ if self.off > 0 => 0,
            _ => KEPT_EPOCHS,
        };
        if self.unused > FEW_UNUSED.max(self.used) {
            (self.left, self.off) = (0, self.penalty);
            self.penalty = (self.penalty * 2).min(MAX_PENALTY);
            (self.used, self.unused) = (0.0, 0.0);
        } else if self.used > FEW_UNUSED.max(4.0 * self.unused) {
            self.penalty = PENALTY_EPOCHS;
        }
        if self.is_active() == was_active {
            return None;
        }
        let presence = self.is_active().then(|| Arc::new(Presence::default()));
        self.account.set(presence.as_ref().map_or(0, |p| p.bytes()));
        self.shared.set(presence.clone());
        Some(presence)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn activation() -> (Arc<OperatorLookahead>, Arc<MemoryGovernor>, Activation) {
        let shared = OperatorLookahead::new(&Arc::default());
        let governor = MemoryGovernor::new(1 << 30);
        let activation = Activation::new(&shared, &governor);
        (shared, governor, activation)
    }

    #[test]
    fn hints_are_wanted_while_there_are_reads() {
        let (shared, governor, mut activation) = activation();
        for _ in 0..1_000 {
            activation.epoch(EpochReads::default());
        }
        assert!(!shared.is_active() && shared.presence().is_none());
        assert_eq!(governor.used(), 0);
        activation.epoch(EpochReads { missed: 1, ..EpochReads::default() });
        assert!(shared.is_active() && shared.presence().is_some() && governor.used() > 0);
        // What is read ahead is not missed, and would be without hints.
        for _ in 0..1_000 {
            activation.epoch(EpochReads { used: 1, ..EpochReads::default() });
        }
        assert!(shared.is_active());
        for _ in 0..KEPT_EPOCHS {
            activation.epoch(EpochReads::default());
        }
        assert!(!shared.is_active() && shared.presence().is_none());
        assert_eq!(governor.used(), 0);
    }

    #[test]
    fn hints_in_vain_end_for_a_while() {
        let (shared, _, mut activation) = activation();
        let in_vain = EpochReads { missed: 1, used: 1, unused: 10 };
        let epochs = (0..100).take_while(|_| {
            activation.epoch(in_vain);
            shared.is_active()
        });
        let active = epochs.count();
        assert!((2..20).contains(&active), "{active} epochs");
        for _ in 1..PENALTY_EPOCHS {
            activation.epoch(EpochReads { missed: 5, ..EpochReads::default() });
            assert!(!shared.is_active());
        }
        activation.epoch(EpochReads { missed: 5, ..EpochReads::default() });
        assert!(shared.is_active());
    }
}
