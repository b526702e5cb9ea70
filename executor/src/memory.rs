//! The memory governor: one account of the worker's memory, by class (docs/design.md §6).
//!
//! A reservation is a number, not an allocation: holders report what they hold. Nothing is refused
//! outright; holders of what can be shed ask [`MemoryGovernor::share`] for what they may keep, and
//! those that can wait ask [`MemoryGovernor::is_tight`] before they take in more. So a worker over its
//! limit first shrinks caches and then slows down. Counters only: no lock.
//!
//! Not everything is reported: decoding, encoding, queries and what the allocator keeps back are not.
//! So the process's resident memory is observed too, and what it holds beyond the limit and a margin
//! counts like memory in use.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};

use tokio::sync::Notify;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum MemoryClass {
    /// Decoded operator state that can be read again.
    Cache = 0,
    /// State written in open or unflushed epochs.
    Memtable = 1,
    /// Rows waiting for state.
    Parked = 2,
    /// Chunks under way between tasks.
    Channel = 3,
    /// Recent deltas kept for readers.
    Hub = 4,
    /// Statements not yet committed.
    Statement = 5,
}

/// Names of the classes, in order, for metrics.
pub const MEMORY_CLASSES: [&str; 6] =
    ["cache", "memtable", "parked", "channel", "hub", "statement"];

#[derive(Debug)]
pub struct MemoryGovernor {
    limit: usize,
    used: [AtomicI64; MEMORY_CLASSES.len()],
    /// State caches that exist; they share what is left evenly.
    caches: AtomicUsize,
    /// Resident bytes beyond the limit and its margin.
    excess: AtomicUsize,
    released: Notify,
}

impl MemoryGovernor {
    pub fn new(limit: usize) -> Arc<MemoryGovernor> {
        Arc::new(MemoryGovernor {
            limit,
            used: Default::default(),
            caches: AtomicUsize::new(0),
            excess: AtomicUsize::new(0),
            released: Notify::new(),
        })
    }

    pub fn limit(&self) -> usize {
        self.limit
    }

    /// Bytes held in all.
    pub fn used(&self) -> usize {
        self.used.iter().map(|u| u.load(Ordering::Relaxed)).sum::<i64>().max(0) as usize
    }

    pub fn used_by(&self, class: MemoryClass) -> usize {
        self.used[class as usize].load(Ordering::Relaxed).max(0) as usize
    }

    /// Bytes held, in the order of [`MEMORY_CLASSES`].
    pub fn by_class(&self) -> [usize; MEMORY_CLASSES.len()] {
        std::array::from_fn(|i| self.used[i].load(Ordering::Relaxed).max(0) as usize)
    }

    /// An account of `class` that gives back what it holds when dropped.
    pub fn account(self: &Arc<Self>, class: MemoryClass) -> Reservation {
        if class == MemoryClass::Cache {
            self.caches.fetch_add(1, Ordering::Relaxed);
        }
        Reservation { governor: Arc::clone(self), class, bytes: 0 }
    }

    /// Whether holders that can wait should: everything but caches fills three quarters.
    pub fn is_tight(&self) -> bool {
        self.pinned() > self.limit / 4 * 3
    }

    /// Takes note of what the process holds in all.
    pub fn observe(&self, resident: usize) {
        let excess = resident.saturating_sub(self.limit + self.limit / 4);
        self.excess.store(excess, Ordering::Relaxed);
    }

    /// What cannot be shed at once.
    fn pinned(&self) -> usize {
        let held = self.used().saturating_sub(self.used_by(MemoryClass::Cache));
        held + self.excess.load(Ordering::Relaxed)
    }

    /// What one cache may hold now, at most `wanted`: an even share of what others leave, never
    /// less than a small floor.
    pub fn share(&self, wanted: usize) -> usize {
        const FLOOR: usize = 256 << 10;
        let caches = self.caches.load(Ordering::Relaxed).max(1);
        let left = (self.limit / 10 * 9).saturating_sub(self.pinned());
        (left / caches).clamp(FLOOR.min(wanted), wanted)
    }

    /// Waits until memory is not tight, at most `at_most`: back-pressure must slow a producer down,
    /// never stop it, since what it waits for may be behind it.
    pub async fn wait_for_room(&self, at_most: std::time::Duration) {
        if !self.is_tight() {
            return;
        }
        let _ = tokio::time::timeout(at_most, self.released.notified()).await;
    }

    fn add(&self, class: MemoryClass, delta: i64) {
        self.used[class as usize].fetch_add(delta, Ordering::Relaxed);
        if delta < 0 {
            self.released.notify_waiters();
        }
    }
}

/// One holder's account.
#[derive(Debug)]
pub struct Reservation {
    governor: Arc<MemoryGovernor>,
    class: MemoryClass,
    bytes: usize,
}

impl Reservation {
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The holder now holds `bytes`.
    pub fn set(&mut self, bytes: usize) {
        if bytes != self.bytes {
            self.governor.add(self.class, bytes as i64 - self.bytes as i64);
            self.bytes = bytes;
        }
    }

    pub fn grow(&mut self, bytes: usize) {
        self.set(self.bytes + bytes);
    }

    pub fn shrink(&mut self, bytes: usize) {
        self.set(self.bytes.saturating_sub(bytes));
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.set(0);
        if self.class == MemoryClass::Cache {
            self.governor.caches.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// Resident bytes of this process; `None` where the system does not tell.
pub fn resident_bytes() -> Option<usize> {
    const PAGE: usize = 4096;
    let statm = std::fs::read_to_string("/proc/self/statm").ok()?;
    Some(statm.split_ascii_whitespace().nth(1)?.parse::<usize>().ok()? * PAGE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_process_holds_beyond_the_limit_is_taken_from_the_caches() {
        let governor = MemoryGovernor::new(100 << 20);
        let _cache = governor.account(MemoryClass::Cache);
        governor.observe(120 << 20);
        assert_eq!(governor.share(usize::MAX) >> 20, 90);
        governor.observe(165 << 20);
        assert_eq!(governor.share(usize::MAX) >> 20, 50);
        assert!(!governor.is_tight());
        governor.observe(205 << 20);
        assert!(governor.is_tight());
        governor.observe(0);
        assert!(!governor.is_tight());
    }

    #[test]
    fn dropped_accounts_give_back_and_caches_share_what_is_left() {
        let governor = MemoryGovernor::new(100 << 20);
        let mut memtable = governor.account(MemoryClass::Memtable);
        let _a = governor.account(MemoryClass::Cache);
        let _b = governor.account(MemoryClass::Cache);
        memtable.grow(50 << 20);
        assert_eq!(governor.used_by(MemoryClass::Memtable), 50 << 20);
        assert_eq!(governor.share(usize::MAX) >> 20, 20);
        assert!(!governor.is_tight());
        memtable.set(80 << 20);
        assert!(governor.is_tight());
        drop(memtable);
        assert_eq!(governor.used(), 0);
    }
}
