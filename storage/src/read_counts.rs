//! How often the runs of a state table are read: what decides whether it pays to merge them (docs/design.md §9).
//!
//! Counted once a lookup request or scan, not a key, and never reset: a merge notes how far the counters have come.

use std::sync::atomic::{AtomicU64, Ordering};

/// Keys looked up since the last merge from which on a table counts as read.
pub const READ_BURST: u64 = 64;
/// A scan asks all runs for all of their keys, once: it counts as so many keys.
pub(crate) const SCAN_KEYS: u64 = 16;

/// Reads of a table's runs since they were last merged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TableReads {
    /// Keys, prefixes and ranges that were looked up.
    pub keys: u64,
    /// Of these, those that waited for blocks of the disk tier or the store.
    pub cold: u64,
}

impl TableReads {
    /// Of a table about which nothing is known.
    pub const MANY: TableReads = TableReads { keys: u64::MAX, cold: 0 };

    /// Whether merging its runs is of use to somebody.
    pub fn are_many(self) -> bool {
        self.keys >= READ_BURST
    }
}

/// Whether a table whose lookups since the last merge have come from one number to another has been looked up often
/// enough to think about the next merge: at the first burst, and whenever they have doubled.
pub fn is_burst(before: u64, after: u64) -> bool {
    after >= READ_BURST && (before < READ_BURST || before.ilog2() < after.ilog2())
}

/// The reads of one table's runs. Shared by all versions of the table.
#[derive(Debug, Default)]
pub(crate) struct ReadCounts {
    keys: AtomicU64,
    cold: AtomicU64,
    keys_at_merge: AtomicU64,
    cold_at_merge: AtomicU64,
    /// What others have been told of.
    keys_told: AtomicU64,
    cold_told: AtomicU64,
}

impl ReadCounts {
    /// Notes a lookup of so many keys. Whether there have become enough of them since the last merge to think about the
    /// next ([`is_burst`]).
    pub fn note(&self, keys: u64, cold: bool) -> bool {
        if cold {
            self.cold.fetch_add(keys, Ordering::Relaxed);
        }
        let before = self.keys.fetch_add(keys, Ordering::Relaxed);
        let before = before.saturating_sub(self.keys_at_merge.load(Ordering::Relaxed));
        is_burst(before, before + keys)
    }

    /// Runs of the table have been merged.
    pub fn merged(&self) {
        self.keys_at_merge.store(self.keys.load(Ordering::Relaxed), Ordering::Relaxed);
        self.cold_at_merge.store(self.cold.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    /// The reads since this was called last; `None`: there were none. For one caller.
    pub fn take_new(&self) -> Option<TableReads> {
        let new = |counter: &AtomicU64, told: &AtomicU64| {
            let now = counter.load(Ordering::Relaxed);
            now.saturating_sub(told.swap(now, Ordering::Relaxed))
        };
        // A lookup counts as cold before it counts: it is told with its keys, or before them.
        let reads = TableReads {
            keys: new(&self.keys, &self.keys_told),
            cold: new(&self.cold, &self.cold_told),
        };
        (reads != TableReads::default()).then_some(reads)
    }

    pub fn since_merge(&self) -> TableReads {
        let since = |counter: &AtomicU64, at_merge: &AtomicU64| {
            counter.load(Ordering::Relaxed).saturating_sub(at_merge.load(Ordering::Relaxed))
        };
        TableReads {
            keys: since(&self.keys, &self.keys_at_merge),
            cold: since(&self.cold, &self.cold_at_merge),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_burst_is_told_and_then_each_doubling() {
        let counts = ReadCounts::default();
        let told = |n: u64| (0..n).filter(|_| counts.note(1, false)).count();
        assert_eq!(told(READ_BURST - 1), 0);
        assert!(!counts.since_merge().are_many());
        assert_eq!(told(1), 1);
        assert_eq!(told(READ_BURST * 3), 2, "at 128 and 256");
        assert!(counts.note(1_000, true), "many at once");
        let keys = READ_BURST * 4 + 1_000;
        assert_eq!(counts.since_merge(), TableReads { keys, cold: 1_000 });
        counts.merged();
        assert_eq!(counts.since_merge(), TableReads::default());
        assert_eq!(told(READ_BURST), 1, "the next burst");
    }

    #[test]
    fn others_are_told_of_each_read_once() {
        let counts = ReadCounts::default();
        assert_eq!(counts.take_new(), None);
        counts.note(3, true);
        counts.note(4, false);
        counts.merged();
        assert_eq!(counts.take_new(), Some(TableReads { keys: 7, cold: 3 }));
        assert_eq!(counts.take_new(), None);
        counts.note(1, false);
        assert_eq!(counts.take_new(), Some(TableReads { keys: 1, cold: 0 }));
    }
}
