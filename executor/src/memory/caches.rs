//! State caches as the governor sees them: what each holds, and what it may keep.

use std::cmp::Reverse;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use tokio::sync::Notify;

use super::{MemoryClass, MemoryGovernor, Reservation};

/// What a cache may hold until it is told to keep less.
const FLOOR: usize = 256 << 10;
/// What a cache may keep though all hold too much: an idle one that has no more is left alone.
const IDLE_FLOOR: usize = 16 << 10;
const USED_FLOOR: usize = 64 << 10;
/// A cache that has not asked for its share for so many rounds is idle: some two seconds.
const IDLE_ROUNDS: u64 = 20;
/// A cache grows by this part of what is free, so that many that grow at once do not take more than there is.
const GROWTH_PART: usize = 4;
/// No bound but what is free.
const UNBOUNDED: usize = usize::MAX;

/// What a cache and the governor share.
#[derive(Debug)]
pub(super) struct CacheState {
    bytes: AtomicUsize,
    /// What it may keep.
    target: AtomicUsize,
    /// The round in which it last asked.
    asked: AtomicU64,
    wake: Arc<Notify>,
}

impl CacheState {
    pub fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }

    pub fn is_idle(&self, round: u64) -> bool {
        round.saturating_sub(self.asked.load(Ordering::Relaxed)) > IDLE_ROUNDS
    }

    /// Tells it how much it may keep.
    pub fn set_target(&self, target: usize) {
        self.target.store(target, Ordering::Relaxed);
        if self.bytes() > target {
            self.wake.notify_one();
        }
    }
}

/// The account of one state cache, which can be shed.
#[derive(Debug)]
pub struct Cache {
    account: Reservation,
    state: Arc<CacheState>,
}

impl Cache {
    pub(super) fn new(
        governor: &Arc<MemoryGovernor>,
        wake: &Arc<Notify>,
    ) -> (Cache, Weak<CacheState>) {
        let state = Arc::new(CacheState {
            bytes: AtomicUsize::new(0),
            target: AtomicUsize::new(UNBOUNDED),
            asked: AtomicU64::new(governor.round.load(Ordering::Relaxed)),
            wake: Arc::clone(wake),
        });
        let shared = Arc::downgrade(&state);
        (Cache { account: governor.account(MemoryClass::Cache), state }, shared)
    }

    /// The cache now holds `bytes` that it could let go.
    pub fn set(&mut self, bytes: usize) {
        self.account.set(bytes);
        self.state.bytes.store(bytes, Ordering::Relaxed);
    }

    /// What the cache may hold now, at most `wanted`. `used`: rows have used it, so that it is not idle.
    pub fn share(&self, wanted: usize, used: bool) -> usize {
        let governor = &self.account.governor;
        if used {
            let round = governor.round.load(Ordering::Relaxed);
            if self.state.is_idle(round) {
                // What it was told was for as long as nobody used it.
                self.state.target.store(UNBOUNDED, Ordering::Relaxed);
            }
            self.state.asked.store(round, Ordering::Relaxed);
        }
        let (room, all) = (governor.cache_room(), governor.used_by(MemoryClass::Cache));
        let held = self.account.bytes();
        let most = match room.checked_sub(all) {
            Some(free) => held.saturating_add(free / GROWTH_PART),
            // All shrink alike until it is said who shrinks more.
            None => (held as f64 * (room as f64 / all as f64)) as usize,
        };
        most.max(FLOOR).min(self.state.target.load(Ordering::Relaxed)).min(wanted)
    }
}

/// What caches that hold so much, idle or not, may keep of `room`. Idle ones keep all or nothing, the largest nothing first:
/// a cache that is empty gives back what it takes beside its entries, too.
pub(super) fn targets(held: &[(usize, bool)], room: usize) -> Vec<usize> {
    let all: usize = held.iter().map(|(bytes, _)| bytes).sum();
    if all <= room {
        return vec![UNBOUNDED; held.len()];
    }
    let used: Vec<usize> = held.iter().filter(|h| !h.1).map(|h| h.0).collect();
    let mut idle: Vec<usize> = (0..held.len()).filter(|&at| held[at].1).collect();
    idle.sort_by_key(|&at| Reverse(held[at].0));
    let mut kept: usize = idle.iter().map(|&at| held[at].0).sum();
    let idle_room = room.saturating_sub(used.iter().sum());
    let mut targets = vec![UNBOUNDED; held.len()];
    for at in idle {
        if kept <= idle_room || held[at].0 <= IDLE_FLOOR {
            break;
        }
        targets[at] = 0;
        kept -= held[at].0;
    }
    let used_level = level(used, room.saturating_sub(kept)).max(USED_FLOOR);
    for (target, _) in targets.iter_mut().zip(held).filter(|(_, h)| !h.1) {
        *target = used_level;
    }
    targets
}

/// The most that each may keep so that all keep no more than `room`: the largest shrink to one size.
fn level(mut sizes: Vec<usize>, room: usize) -> usize {
    sizes.sort_unstable();
    let (mut left, mut count) = (room, sizes.len());
    for size in sizes {
        if size > left / count {
            return left / count;
        }
        left -= size;
        count -= 1;
    }
    UNBOUNDED
}

#[cfg(test)]
mod tests {
    use super::*;

    const MB: usize = 1 << 20;

    #[test]
    fn idle_caches_shrink_first_and_of_the_others_the_largest() {
        let held = [(10 * MB, false), (40 * MB, false), (30 * MB, true)];
        assert_eq!(targets(&held, 80 * MB), [UNBOUNDED; 3]);
        assert_eq!(targets(&held, 60 * MB), [UNBOUNDED, UNBOUNDED, 0]);
        let tight = targets(&held, 30 * MB);
        assert_eq!(tight, [20 * MB, 20 * MB, 0]);
    }

    /// The largest idle caches give back all that they hold, and only as many as must.
    #[test]
    fn idle_caches_keep_all_or_nothing() {
        let held = [(10 * MB, true), (30 * MB, true), (20 * MB, true), (IDLE_FLOOR, true)];
        assert_eq!(targets(&held, 31 * MB), [UNBOUNDED, 0, UNBOUNDED, UNBOUNDED]);
        assert_eq!(targets(&held, 11 * MB), [UNBOUNDED, 0, 0, UNBOUNDED]);
        assert_eq!(targets(&held, 0), [0, 0, 0, UNBOUNDED]);
    }

    /// A cache that was told to let go of all is not held to that once rows use it again.
    #[test]
    fn an_idle_cache_that_is_used_again_may_fill() {
        let governor = MemoryGovernor::new(100 * MB);
        let mut idle = governor.cache(&Arc::new(Notify::new()));
        idle.set(80 * MB);
        let mut others = governor.account(MemoryClass::Memtable);
        others.set(80 * MB);
        (0..IDLE_ROUNDS + 2).for_each(|_| governor.rebalance());
        assert_eq!(idle.share(64 * MB, false), 0);
        idle.set(0);
        assert!(idle.share(64 * MB, true) >= FLOOR);
    }

    /// However many there are, those in use may take what the idle ones have given back.
    #[test]
    fn a_cache_takes_of_what_is_free_and_an_idle_one_is_woken_to_give_back() {
        let governor = MemoryGovernor::new(100 * MB);
        let wake = Arc::new(Notify::new());
        let mut idle: Vec<Cache> = (0..100).map(|_| governor.cache(&wake)).collect();
        let mut used = governor.cache(&Arc::new(Notify::new()));
        assert_eq!(used.share(64 * MB, true), 90 * MB / GROWTH_PART);
        idle.iter_mut().for_each(|cache| cache.set(MB));
        assert_eq!(used.share(64 * MB, true), FLOOR);
        let is_woken = || futures::FutureExt::now_or_never(wake.notified()).is_some();
        governor.rebalance();
        assert!(is_woken());
        (0..IDLE_ROUNDS).for_each(|_| governor.rebalance());
        used.set(60 * MB);
        used.share(64 * MB, true);
        governor.rebalance();
        assert!(is_woken());
        let emptied = idle.iter().filter(|cache| cache.share(64 * MB, false) == 0);
        assert_eq!(emptied.count(), 70);
        idle.iter_mut().for_each(|cache| cache.set(IDLE_FLOOR));
        governor.rebalance();
        assert!(used.share(64 * MB, true) > 60 * MB);
    }
}
