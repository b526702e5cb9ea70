//! How far each process has come with the log's records (docs/design.md §9, garbage collection).
//!
//! A process acknowledges one number: the last record that it has applied, after which it uses nothing that this
//! record or an earlier one has dropped. In memory only: a new leader knows of each process what its registration
//! says, and is told the rest.

use std::collections::BTreeMap;

use parking_lot::Mutex;
use tokio::sync::Notify;

/// The last record that each live process has applied.
#[derive(Debug, Default)]
pub struct AppliedRecords {
    /// By incarnation.
    last: Mutex<BTreeMap<u64, u64>>,
    /// Told of every acknowledgement.
    pub changed: Notify,
}

impl AppliedRecords {
    /// A process is live: it reads the log from this record on. One that is known keeps what it has acknowledged.
    pub fn register(&self, incarnation: u64, number: u64) {
        self.last.lock().entry(incarnation).or_insert(number);
    }

    /// Nobody waits for a process that is fenced.
    pub fn fence(&self, incarnation: u64) {
        if self.last.lock().remove(&incarnation).is_some() {
            self.changed.notify_one();
        }
    }

    /// A process has applied all records up to `number`; a smaller one than before changes nothing. Returns whether
    /// the process is live: what a fenced one says does not count.
    pub fn acknowledge(&self, incarnation: u64, number: u64) -> bool {
        let mut last = self.last.lock();
        let Some(known) = last.get_mut(&incarnation) else { return false };
        let more = number > *known;
        *known = number.max(*known);
        drop(last);
        if more {
            self.changed.notify_one();
        }
        true
    }

    /// The last record that a live process has applied.
    pub fn last_applied(&self, incarnation: u64) -> Option<u64> {
        self.last.lock().get(&incarnation).copied()
    }

    /// Whether every live process has applied this record and all before it.
    pub fn all_applied(&self, number: u64) -> bool {
        self.last.lock().values().all(|applied| *applied >= number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_applied_by_all_when_the_slowest_live_process_has() {
        let applied = AppliedRecords::default();
        assert!(applied.all_applied(9), "nobody is there");
        applied.register(1, 4);
        applied.register(2, 6);
        assert!(applied.all_applied(4) && !applied.all_applied(5));
        assert!(applied.acknowledge(1, 8));
        assert!(applied.all_applied(6) && !applied.all_applied(7));
        assert!(applied.acknowledge(1, 3));
        applied.register(1, 4);
        assert_eq!(applied.last_applied(1), Some(8), "it does not go back");
        applied.fence(2);
        assert!(
            applied.all_applied(8) && !applied.all_applied(9),
            "nobody waits for who is fenced"
        );
        assert!(!applied.acknowledge(2, 9));
        assert_eq!(applied.last_applied(2), None);
    }
}
