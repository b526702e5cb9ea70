//! The memory governor: one account of the worker's memory, by class (docs/design.md §6).
//!
//! A reservation is a number, not an allocation: holders report what they hold. Nothing is refused
//! outright; caches ask [`Cache::share`] for what they may keep, and those that can wait ask
//! [`MemoryGovernor::is_tight`] before they take in more. So a worker over its limit first shrinks caches
//! and then slows down. Counters only: the list of caches is behind a lock that only their making and
//! [`MemoryGovernor::rebalance`] take.
//!
//! A cache may take a part of what is free, whatever the others hold. When nothing is free all shrink; who
//! was not used for a while goes first, and of the others the largest. An idle cache does not ask, so its
//! task is woken to let go.
//!
//! Not everything is reported: decoding, encoding, queries and rows between two holders are not. So
//! what is in use is taken from the allocator, which counts every byte
//! ([`millrace_common::heap`]), and reports only say how much of it could be shed. What the process
//! holds beyond that (memory freed and kept, mapped files, stacks) is observed a few times a second and
//! taken off what the heap may use.

use std::sync::atomic::{AtomicI64, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use millrace_common::heap;
use parking_lot::Mutex;
use tokio::sync::{Notify, Semaphore, SemaphorePermit};

mod caches;
mod precedence;
mod tables;

pub use self::caches::Cache;
use self::caches::{CacheState, targets};
pub use self::precedence::Place;
use self::precedence::Precedence;
pub use self::tables::TableRoom;

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
    Changelog = 4,
    /// Statements not yet committed.
    Statement = 5,
    /// Decoded blocks, indexes and filters that can be read again.
    Blocks = 6,
    /// Changes of an open epoch, and state that they keep in memory, until the barrier.
    Held = 7,
    /// Rows of sources that are read before their epochs begin.
    Ahead = 8,
    /// Changes of open epochs that views have not written yet.
    Change = 9,
}

/// Names of the classes, in order, for metrics.
pub const MEMORY_CLASSES: [&str; 10] = [
    "cache",
    "memtable",
    "parked",
    "channel",
    "changelog",
    "statement",
    "blocks",
    "held",
    "ahead",
    "change",
];

#[derive(Debug)]
pub struct MemoryGovernor {
    limit: usize,
    used: [AtomicI64; MEMORY_CLASSES.len()],
    /// State caches that exist.
    caches: Mutex<Vec<Weak<CacheState>>>,
    /// Rounds of [`MemoryGovernor::rebalance`]: by them caches tell how long they have been idle.
    round: AtomicU64,
    /// What the heap may use, so that the process stays within its limit and a margin.
    heap: AtomicUsize,
    /// The allocator's count, or in its absence what was resident when last observed; 0: unknown.
    resident: AtomicUsize,
    /// The most in use that was observed.
    peak: AtomicUsize,
    released: Notify,
    /// For what takes much memory for a short time: see [`MemoryGovernor::turn`]. In units of [`TURN_UNIT`].
    turns: Semaphore,
    /// Turns that have ended.
    turns_ended: AtomicU64,
    /// Bytes of all tables: see [`MemoryGovernor::table_room`].
    tables: AtomicUsize,
    precedence: Precedence,
}

/// Who works with less than this part of the limit needs no turn.
const SMALL_PART: usize = 256;
/// All turns under way together may need this part of the limit.
const TURNS_PART: usize = 6;
/// What a turn needs of memory, by what it settles: rows are gathered, looked up, encoded, written and put out.
const TURN_FACTOR: usize = 4;
const TURN_UNIT: usize = 1 << 10;
/// How long a turn is waited for while none ends: a store that does not answer one job must not stop the others.
const TURN_PATIENCE: Duration = Duration::from_secs(2);

/// How long input waits, at most, while memory is tight.
const TIGHT_PAUSE: Duration = Duration::from_millis(10);

/// What all operators together may hold until their barriers before those with much of it settle it: this part
/// of the limit.
const HELD_PART: usize = 8;
/// What all views together may have of changes that are not written before those with much of it set it aside.
const CHANGE_PART: usize = 16;
/// What is a large part of that.
const LARGE_PART: usize = 16;

impl MemoryGovernor {
    pub fn new(limit: usize) -> Arc<MemoryGovernor> {
        Arc::new(MemoryGovernor {
            limit,
            used: Default::default(),
            caches: Mutex::default(),
            round: AtomicU64::new(0),
            heap: AtomicUsize::new(limit / 10 * 9),
            resident: AtomicUsize::new(0),
            peak: AtomicUsize::new(0),
            released: Notify::new(),
            turns: Semaphore::new((limit / TURNS_PART / TURN_UNIT).max(1)),
            turns_ended: AtomicU64::new(0),
            tables: AtomicUsize::new(0),
            precedence: Precedence::default(),
        })
    }

    pub fn limit(&self) -> usize {
        self.limit
    }

    /// Bytes reported in all.
    pub fn used(&self) -> usize {
        self.used.iter().map(|u| u.load(Ordering::Relaxed)).sum::<i64>().max(0) as usize
    }

    pub fn used_by(&self, class: MemoryClass) -> usize {
        self.used[class as usize].load(Ordering::Relaxed).max(0) as usize
    }

    /// Bytes reported, in the order of [`MEMORY_CLASSES`].
    pub fn by_class(&self) -> [usize; MEMORY_CLASSES.len()] {
        std::array::from_fn(|i| self.used[i].load(Ordering::Relaxed).max(0) as usize)
    }

    /// An account of `class` that gives back what it holds when dropped.
    pub fn account(self: &Arc<Self>, class: MemoryClass) -> Reservation {
        Reservation { governor: Arc::clone(self), class, bytes: 0 }
    }

    /// A state cache. `wake` is told when it is to ask for its share though nobody uses it.
    pub fn cache(self: &Arc<Self>, wake: &Arc<Notify>) -> Cache {
        let (cache, state) = Cache::new(self, wake);
        self.caches.lock().push(state);
        cache
    }

    /// Whether holders that can wait should: what cannot be shed fills three quarters.
    pub fn is_tight(&self) -> bool {
        self.pinned() > self.heap_limit() / 4 * 3
    }

    /// Whether more is in use than may be, what can be shed aside.
    fn is_over(&self) -> bool {
        self.pinned() > self.heap_limit()
    }

    /// Whether so many bytes that one operator holds until its barrier are a large part of too much that all
    /// hold.
    pub fn is_too_much_held(&self, bytes: usize) -> bool {
        let most = self.limit / HELD_PART;
        self.used_by(MemoryClass::Held) > most && bytes > most / LARGE_PART
    }

    /// The same where it must be settled whatever that costs: all hold far too much, or memory is tight.
    pub fn must_settle(&self, bytes: usize) -> bool {
        let most = self.limit / HELD_PART;
        let is_far_too_much = self.used_by(MemoryClass::Held) > most / 2 * 3;
        bytes > most / LARGE_PART && (is_far_too_much || self.is_tight())
    }

    /// Whether so many bytes of a view's change are a large part of too much that all views have not written.
    pub fn is_too_much_unwritten(&self, bytes: usize) -> bool {
        let most = self.limit / CHANGE_PART;
        self.used_by(MemoryClass::Change) > most && bytes > most / LARGE_PART
    }

    /// What settles or writes an epoch's changes needs for a moment a multiple of what they take. So who does it with
    /// `bytes` of changes waits for a turn, which ends when it is dropped, unless three quarters of what the heap may use
    /// can be had: those under way together need a bounded part of the limit. Whoever has one must not wait for other
    /// tasks.
    pub async fn turn(&self, bytes: usize) -> Option<Turn<'_>> {
        if bytes < self.limit / SMALL_PART || self.pinned() <= self.heap_limit() / 4 {
            return None;
        }
        let all = self.limit / TURNS_PART / TURN_UNIT;
        let units = (bytes.saturating_mul(TURN_FACTOR) / TURN_UNIT).clamp(1, all.max(1)) as u32;
        // One wait all along: its place among those who wait is kept.
        let mut wait = std::pin::pin!(self.turns.acquire_many(units));
        loop {
            let ended = self.turns_ended.load(Ordering::Relaxed);
            match tokio::time::timeout(TURN_PATIENCE, wait.as_mut()).await {
                Ok(permit) => {
                    return permit.ok().map(|permit| Turn { governor: self, _permit: permit });
                }
                Err(_) if self.turns_ended.load(Ordering::Relaxed) != ended => {}
                Err(_) => return None,
            }
        }
    }

    /// Takes note of what the process holds in all (`resident`) and of what the allocator has given out,
    /// where it counts.
    pub fn observe(&self, resident: usize, live: Option<usize>) {
        self.peak.fetch_max(live.unwrap_or(resident), Ordering::Relaxed);
        let Some(live) = live else {
            // The margin is for what the allocator keeps.
            self.resident.store(resident.saturating_sub(self.limit / 4), Ordering::Relaxed);
            return;
        };
        self.resident.store(0, Ordering::Relaxed);
        let beyond = resident.saturating_sub(live);
        let most = self.limit / 10 * 9;
        let heap = (self.limit / 20 * 22).saturating_sub(beyond).clamp(self.limit / 5 * 2, most);
        self.heap.store(heap, Ordering::Relaxed);
    }

    /// What the heap may use now.
    pub fn heap_limit(&self) -> usize {
        self.heap.load(Ordering::Relaxed)
    }

    /// Bytes in use, reported or not.
    pub fn in_use(&self) -> usize {
        let observed = match heap::live_bytes() {
            Some(live) if cfg!(not(test)) => live,
            _ => self.resident.load(Ordering::Relaxed),
        };
        observed.max(self.used())
    }

    /// The most bytes in use that were observed.
    pub fn peak(&self) -> usize {
        self.peak.load(Ordering::Relaxed)
    }

    /// What cannot be shed at once.
    fn pinned(&self) -> usize {
        let shed = self.used_by(MemoryClass::Cache) + self.used_by(MemoryClass::Blocks);
        self.in_use().saturating_sub(shed)
    }

    /// What is left for caches of all kinds.
    fn room(&self) -> usize {
        self.heap_limit().saturating_sub(self.pinned())
    }

    /// What is left for state caches.
    fn cache_room(&self) -> usize {
        self.room().saturating_sub(self.used_by(MemoryClass::Blocks))
    }

    /// What the cache of decoded blocks may hold now, at most `wanted`: half of what caches may.
    pub fn block_share(&self, wanted: usize) -> usize {
        (self.room() / 2).clamp(wanted / 8, wanted)
    }

    /// Says how much each state cache may keep, where all together hold too much: see the module. Called
    /// several times a second.
    pub fn rebalance(&self) {
        let round = self.round.fetch_add(1, Ordering::Relaxed) + 1;
        let mut caches = self.caches.lock();
        caches.retain(|cache| cache.strong_count() > 0);
        let live: Vec<Arc<CacheState>> = caches.iter().filter_map(Weak::upgrade).collect();
        drop(caches);
        let held: Vec<(usize, bool)> =
            live.iter().map(|cache| (cache.bytes(), cache.is_idle(round))).collect();
        for (cache, target) in live.iter().zip(targets(&held, self.cache_room())) {
            cache.set_target(target);
        }
    }

    /// Waits while memory is tight, for a moment. Back-pressure must slow a producer down, never stop it, since what it
    /// waits for may be behind it.
    pub async fn wait_for_room(&self) {
        if self.is_tight() {
            let _ = tokio::time::timeout(TIGHT_PAUSE, self.released.notified()).await;
        }
    }

    /// Waits while more is in use than may be, as long as that at most.
    pub async fn wait_within_limit(&self, patience: Duration) {
        let within = async {
            while self.is_over() {
                // Not all that is in use is reported, so its release is not told either.
                let _ = tokio::time::timeout(TIGHT_PAUSE, self.released.notified()).await;
            }
        };
        if !patience.is_zero() {
            let _ = tokio::time::timeout(patience, within).await;
        }
    }

    fn add(&self, class: MemoryClass, delta: i64) {
        self.used[class as usize].fetch_add(delta, Ordering::Relaxed);
        if delta < 0 {
            self.released.notify_waiters();
        }
    }
}

/// A turn: see [`MemoryGovernor::turn`].
#[derive(Debug)]
pub struct Turn<'a> {
    governor: &'a MemoryGovernor,
    _permit: SemaphorePermit<'a>,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.governor.turns_ended.fetch_add(1, Ordering::Relaxed);
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

    /// Another holder's of the same class, which holds nothing yet.
    pub fn another(&self) -> Reservation {
        self.governor.account(self.class)
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
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_process_holds_beyond_its_heap_is_taken_off_what_the_heap_may_use() {
        let governor = MemoryGovernor::new(100 << 20);
        governor.observe(60 << 20, Some(50 << 20));
        assert_eq!(governor.cache_room() >> 20, 90);
        // Of 110 MB in all, 65 are not heap.
        governor.observe(85 << 20, Some(20 << 20));
        assert_eq!(governor.cache_room() >> 20, 45);
        // However much that is, the heap keeps a part.
        governor.observe(300 << 20, Some(20 << 20));
        assert_eq!(governor.cache_room() >> 20, 40);
    }

    #[test]
    fn without_a_count_what_is_resident_is_what_is_in_use() {
        let governor = MemoryGovernor::new(100 << 20);
        let mut blocks = governor.account(MemoryClass::Blocks);
        blocks.set(20 << 20);
        governor.observe(105 << 20, None);
        // 80 less a quarter of the limit, of which 20 can be shed.
        assert_eq!(governor.block_share(100 << 20) >> 20, 15);
        assert!(!governor.is_tight());
        governor.observe(135 << 20, None);
        assert!(governor.is_tight());
        governor.observe(0, None);
        assert!(!governor.is_tight());
    }

    #[test]
    fn dropped_accounts_give_back_what_they_hold() {
        let governor = MemoryGovernor::new(100 << 20);
        let mut memtable = governor.account(MemoryClass::Memtable);
        memtable.grow(50 << 20);
        assert_eq!(governor.used_by(MemoryClass::Memtable), 50 << 20);
        assert_eq!(governor.cache_room() >> 20, 40);
        assert!(!governor.is_tight());
        memtable.set(80 << 20);
        assert!(governor.is_tight());
        drop(memtable);
        assert_eq!(governor.used(), 0);
    }

    /// One operator with much settles while all hold too much; one with little does not.
    #[test]
    fn who_holds_a_large_part_of_too_much_is_told() {
        let governor = MemoryGovernor::new(128 << 20);
        let mut large = governor.account(MemoryClass::Held);
        let mut small = governor.account(MemoryClass::Held);
        large.set(14 << 20);
        small.set(1 << 19);
        assert!(!governor.is_too_much_held(large.bytes()));
        large.set(17 << 20);
        assert!(governor.is_too_much_held(large.bytes()));
        assert!(!governor.is_too_much_held(small.bytes()));
    }

    /// Where all hold far too much, or memory is tight, also who gives up entries for it settles.
    #[test]
    fn far_too_much_must_be_settled() {
        let governor = MemoryGovernor::new(128 << 20);
        let mut held = governor.account(MemoryClass::Held);
        held.set(20 << 20);
        assert!(governor.is_too_much_held(2 << 20) && !governor.must_settle(2 << 20));
        held.set(25 << 20);
        assert!(governor.must_settle(2 << 20));
        assert!(!governor.must_settle(1 << 19), "little is left alone");
        held.set(0);
        let mut others = governor.account(MemoryClass::Memtable);
        others.set(100 << 20);
        assert!(governor.is_tight() && governor.must_settle(2 << 20));
    }

    #[test]
    fn views_with_much_that_is_not_written_are_told_when_all_have_too_much() {
        let governor = MemoryGovernor::new(128 << 20);
        let mut changes: Vec<_> = (0..9).map(|_| governor.account(MemoryClass::Change)).collect();
        changes[..8].iter_mut().for_each(|change| change.set(1 << 20));
        assert!(!governor.is_too_much_unwritten(1 << 20));
        changes[8].set(1 << 10);
        assert!(governor.is_too_much_unwritten(1 << 20));
        assert!(!governor.is_too_much_unwritten(1 << 10));
    }

    /// Turns that need more than their part together follow each other, however long one lasts while others end.
    #[tokio::test(start_paused = true)]
    async fn turns_need_a_bounded_part_of_the_limit_together() {
        use futures::FutureExt;
        let governor = MemoryGovernor::new(96 << 20);
        let large = 4 << 20;
        assert!(governor.turn(large).await.is_none(), "there is room");
        let mut others = governor.account(MemoryClass::Memtable);
        others.set(40 << 20);
        assert!(governor.turn(governor.limit() / SMALL_PART - 1).await.is_none());
        let first = governor.turn(large).await;
        assert!(first.is_some());
        let mut second = Box::pin(governor.turn(large));
        assert!(second.as_mut().now_or_never().is_none());
        drop(first);
        let second = second.await;
        assert!(second.is_some());
        // Nothing ends: after a while it goes without.
        let began = tokio::time::Instant::now();
        assert!(governor.turn(large).await.is_none());
        assert!(began.elapsed() >= TURN_PATIENCE);
        drop(second);
        assert!(governor.turn(large).await.is_some());
    }

    /// While memory is tight input waits for a moment; while more is in use than may be, longer, but not for ever.
    #[tokio::test(start_paused = true)]
    async fn input_waits_for_a_moment_or_until_what_is_in_use_is_within_the_limit() {
        const PATIENCE: Duration = Duration::from_millis(500);
        let governor = MemoryGovernor::new(100 << 20);
        let waited = async || {
            let began = tokio::time::Instant::now();
            governor.wait_for_room().await;
            let for_room = began.elapsed();
            governor.wait_within_limit(PATIENCE).await;
            (for_room, began.elapsed() - for_room)
        };
        assert_eq!(waited().await, (Duration::ZERO, Duration::ZERO));
        let mut others = governor.account(MemoryClass::Memtable);
        others.set(80 << 20);
        let (for_room, within) = waited().await;
        assert!(!for_room.is_zero() && for_room <= TIGHT_PAUSE * 2 && within.is_zero());
        others.set(95 << 20);
        let (for_room, within) = waited().await;
        assert!(for_room <= TIGHT_PAUSE * 2 && within >= PATIENCE && within <= PATIENCE * 2);
    }
}
