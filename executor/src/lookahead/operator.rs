//! What an operator of a task and the walkers share: whether hints are wanted, and which keys need none.
//!
//! Hints are wanted once rows have waited for reads, and as long as they would wait without hints: an epoch with
//! reads of the store, made for rows or ahead of them in time, keeps them on for [`KEPT_EPOCHS`]. When too much of what
//! was read ahead met no row, another place is taken to look at rows; if there is none, hints are off for a while. So
//! they are while there is no room in memory for the table of keys that need none.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use tokio::sync::Notify;

use super::choice::is_in_vain;
use super::presence::{LEAST_PLACES, PLACE_BYTES, PLACES, Presence};
use super::slack::{DECAY, Side};
use crate::memory::{MemoryGovernor, TableRoom};

/// Epochs without reads after which hints are no longer wanted.
const KEPT_EPOCHS: u32 = 64;
/// Epochs for which hints are off when they were in vain; doubled each time, up to a limit.
const PENALTY_EPOCHS: u32 = 256;
const MAX_PENALTY: u32 = 1 << 14;
/// Keys read ahead in vain that are not yet worth a decision.
const FEW_UNUSED: f64 = 64.0;
/// What a key counts as hidden whose row came while it was being read.
const HALF: f64 = 0.5;

/// See the module. One for each operator with keyed state in each task.
#[derive(Debug, Default)]
pub struct OperatorLookahead {
    /// There is a walker that would send hints; without one, none are ever wanted.
    followed: bool,
    active: AtomicBool,
    /// Rows wait for the job, which starts.
    is_behind: AtomicBool,
    presence: Mutex<Option<Arc<Presence>>>,
    changed: Arc<Notify>,
    /// Of the operator: where rows of its inputs are looked at.
    sides: Vec<Arc<Side>>,
}

impl OperatorLookahead {
    /// `changed` is told whenever hints begin to be wanted, or are no longer.
    pub fn new(changed: &Arc<Notify>) -> Arc<OperatorLookahead> {
        let changed = Arc::clone(changed);
        Arc::new(OperatorLookahead { followed: true, changed, ..OperatorLookahead::default() })
    }

    /// [`OperatorLookahead::new`], with these sides.
    pub fn of_sides(changed: &Arc<Notify>, sides: Vec<Arc<Side>>) -> Arc<OperatorLookahead> {
        let changed = Arc::clone(changed);
        Arc::new(OperatorLookahead {
            followed: true,
            changed,
            sides,
            ..OperatorLookahead::default()
        })
    }

    /// Before the operator is made: rows wait for its job already.
    pub fn set_behind(&self) {
        self.is_behind.store(true, Ordering::Relaxed);
    }

    /// There is a walker that would send hints.
    pub fn is_followed(&self) -> bool {
        self.followed
    }

    /// How often the places have changed where rows are looked at.
    fn changes(&self) -> u64 {
        self.sides.iter().map(|side| side.changes()).sum()
    }

    /// Hints were in vain: whether there are other places to look at rows, which are taken.
    fn leave(&self) -> bool {
        // Each side leaves its place, so no search that ends at the first.
        self.sides.iter().filter(|side| side.leave()).count() > 0
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
    /// Of these, those whose rows came while they were being read.
    pub late: u64,
    /// Read ahead in vain.
    pub unused: u64,
}

/// Decides at barriers whether hints are wanted; of one operator in one task.
pub struct Activation {
    shared: Arc<OperatorLookahead>,
    governor: Arc<MemoryGovernor>,
    /// Of the presence table.
    room: Option<TableRoom>,
    /// Epochs for which hints are still wanted, and for which they are not whatever is read.
    left: u32,
    off: u32,
    penalty: u32,
    /// Reads in vain that are worth one that was hidden from its row.
    value: f64,
    /// Reads of the last epochs that were hidden, and those in vain, ...
    hidden: f64,
    unused: f64,
    /// ... since the places last changed where rows are looked at.
    changes: u64,
}

impl Activation {
    /// `value`: reads in vain that are worth one that was hidden from its row.
    pub fn new(
        shared: &Arc<OperatorLookahead>,
        governor: &Arc<MemoryGovernor>,
        value: f64,
    ) -> Activation {
        Activation {
            shared: Arc::clone(shared),
            governor: Arc::clone(governor),
            room: None,
            left: 0,
            off: 0,
            penalty: PENALTY_EPOCHS,
            value,
            hidden: 0.0,
            unused: 0.0,
            changes: 0,
        }
    }

    pub fn is_active(&self) -> bool {
        self.left > 0
    }

    /// An epoch has ended. `Some`: the keys in memory are to be noted there from now on, or nowhere.
    pub fn epoch(&mut self, reads: EpochReads) -> Option<Option<Arc<Presence>>> {
        if !self.shared.followed {
            return None;
        }
        self.count(reads);
        let was_active = self.is_active();
        self.off = self.off.saturating_sub(1);
        self.left = match reads.missed + reads.used {
            0 => self.left.saturating_sub(1),
            _ if self.off > 0 => 0,
            _ => KEPT_EPOCHS,
        };
        let is_much = self.unused > FEW_UNUSED;
        if is_much && is_in_vain(self.unused, self.hidden, self.value) {
            if !self.shared.leave() {
                (self.left, self.off) = (0, self.penalty);
                self.penalty = (self.penalty * 2).min(MAX_PENALTY);
            }
            (self.hidden, self.unused) = (0.0, 0.0);
        } else if self.hidden > FEW_UNUSED
            && !is_in_vain(4.0 * self.unused, self.hidden, self.value)
        {
            self.penalty = PENALTY_EPOCHS;
        }
        (self.is_active() != was_active).then(|| self.switch())
    }

    /// The operator has state, and none of it is in memory yet: if rows wait for the job hints are wanted from the
    /// beginning. `Some` as of an epoch.
    pub fn begin(&mut self) -> Option<Option<Arc<Presence>>> {
        if !self.shared.followed || !self.shared.is_behind.load(Ordering::Relaxed) {
            return None;
        }
        self.left = KEPT_EPOCHS;
        Some(self.switch())
    }

    fn switch(&mut self) -> Option<Arc<Presence>> {
        self.room = None;
        let presence = if self.is_active() { self.table() } else { None };
        if presence.is_none() {
            // Of no room: the next epoch with reads asks again.
            self.left = 0;
        }
        if presence.is_some() || self.shared.is_active() {
            self.shared.set(presence.clone());
        }
        presence
    }

    /// A table as large as there is room for, if there is any.
    fn table(&mut self) -> Option<Arc<Presence>> {
        let (most, least) = (PLACES * PLACE_BYTES, LEAST_PLACES * PLACE_BYTES);
        let room = self.governor.table_room(most, least)?;
        let presence = Presence::with_places(room.bytes() / PLACE_BYTES);
        self.room = Some(room);
        Some(Arc::new(presence))
    }

    /// Another place has other hints: what was counted before says nothing of it.
    fn count(&mut self, reads: EpochReads) {
        let changes = self.shared.changes();
        if std::mem::replace(&mut self.changes, changes) != changes {
            (self.hidden, self.unused) = (0.0, 0.0);
        }
        let late = reads.late.min(reads.used) as f64;
        let hidden = reads.used as f64 - late * HALF;
        self.hidden = self.hidden * DECAY + hidden;
        self.unused = self.unused * DECAY + reads.unused as f64;
    }
}

#[cfg(test)]
mod tests {
    use millrace_graph::lookahead::Place;

    use super::super::slack::Spot;
    use super::*;
    use crate::memory::MemoryClass;

    fn activation() -> (Arc<OperatorLookahead>, Arc<MemoryGovernor>, Activation) {
        let shared = OperatorLookahead::new(&Arc::default());
        let governor = MemoryGovernor::new(1 << 30);
        let activation = Activation::new(&shared, &governor, VALUE);
        (shared, governor, activation)
    }

    const VALUE: f64 = 1.0 / 9.0;

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
    fn no_hints_are_wanted_while_memory_is_tight_and_some_are_later() {
        let (shared, governor, mut activation) = activation();
        let missed = EpochReads { missed: 1, ..EpochReads::default() };
        let mut pinned = governor.account(MemoryClass::Statement);
        pinned.set(1 << 30);
        // An operator that starts behind its input would want them at once.
        shared.set_behind();
        assert!(activation.begin().is_some_and(|presence| presence.is_none()));
        for _ in 0..3 {
            activation.epoch(missed);
            assert!(!shared.is_active() && !activation.is_active());
        }
        assert_eq!(governor.used_by(MemoryClass::Cache), 0);
        drop(pinned);
        assert!(activation.epoch(missed).flatten().is_some());
        assert!(shared.is_active());
    }

    #[test]
    fn tables_of_all_operators_take_a_small_part_of_the_limit() {
        let governor = MemoryGovernor::new(16 << 20);
        let mut active = 0;
        let many: Vec<Activation> = (0..500)
            .map(|_| {
                let shared = OperatorLookahead::new(&Arc::default());
                let mut activation = Activation::new(&shared, &governor, VALUE);
                activation.epoch(EpochReads { missed: 1, ..EpochReads::default() });
                let bytes = shared.presence().map_or(0, |presence| presence.bytes());
                assert_eq!(activation.room.as_ref().map_or(0, TableRoom::bytes), bytes);
                active += usize::from(shared.is_active());
                activation
            })
            .collect();
        assert!((20..100).contains(&active), "{active} of {}", many.len());
        assert!(governor.used() <= governor.limit() / 32);
    }

    #[test]
    fn hints_in_vain_end_for_a_while() {
        let (shared, _, mut activation) = activation();
        let in_vain = EpochReads { missed: 1, used: 1, unused: 10, late: 0 };
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

    #[test]
    fn a_tenth_in_vain_is_accepted_and_more_is_not() {
        for (used, late, unused, stays) in
            [(90, 0, 9, true), (90, 0, 11, false), (90, 30, 9, false)]
        {
            let (shared, _, mut activation) = activation();
            for _ in 0..200 {
                activation.epoch(EpochReads { missed: 1, used, late, unused });
            }
            assert_eq!(shared.is_active(), stays, "{unused} of {used}, {late} late");
        }
    }

    #[test]
    fn hints_in_vain_take_another_place_before_they_end() {
        let spot = |place| Spot { is_own: true, place };
        let side = Arc::new(Side::new(0, vec![spot(Place::Entry), spot(Place::Root)]));
        let shared = OperatorLookahead::of_sides(&Arc::default(), vec![Arc::clone(&side)]);
        let governor = MemoryGovernor::new(1 << 30);
        let mut tasks = [0, 1].map(|_| Activation::new(&shared, &governor, VALUE));
        let mut epochs = 0;
        while side.active() == Some(spot(Place::Entry)) {
            epochs += 1;
            assert!(epochs < 20);
            tasks[0].epoch(EpochReads { missed: 1, unused: 10, ..EpochReads::default() });
        }
        assert!(shared.is_active(), "at the other place");
        // The other task has counted as much in vain, at the place that is left.
        tasks[1].unused = 1_000.0;
        tasks[1].epoch(EpochReads { missed: 1, ..EpochReads::default() });
        assert_eq!((side.active(), tasks[1].is_active()), (Some(spot(Place::Root)), true));
        for _ in 0..20 {
            tasks[0].epoch(EpochReads { missed: 1, unused: 10, ..EpochReads::default() });
        }
        assert!(!tasks[0].is_active(), "there is no third");
    }
}
