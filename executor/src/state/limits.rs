//! How much one operator may hold in memory, and when it stops pulling input.

use super::KeyGate;
use crate::memory::{Cache, MemoryClass, Reservation};
use crate::operators::Env;
use crate::options::StateAccess;

#[cfg(test)]
thread_local! {
    /// A test has caches of this thread let go of all that they can.
    pub static NOTHING_CACHED: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// Budgets of one operator with state.
pub struct Limits {
    /// `None`: nothing stays in memory, so that there is no share for it.
    cache: Option<Cache>,
    /// Of entries that eviction had to leave until the barrier.
    pinned: Reservation,
    /// Eviction could not reach its target: the rest is pinned. Not tried again below this.
    retry_at: usize,
    /// Of the rows that wait for state.
    parked: Reservation,
}

impl Limits {
    pub fn new(env: &Env) -> Limits {
        Limits { cache: Some(env.governor.cache(&env.shed)), ..Limits::without_cache(env) }
    }

    /// Of an operator that keeps nothing from epoch to epoch.
    pub fn without_cache(env: &Env) -> Limits {
        Limits {
            cache: None,
            pinned: env.governor.account(MemoryClass::Held),
            retry_at: 0,
            parked: env.governor.account(MemoryClass::Parked),
        }
    }

    /// What the cache may hold, told what it holds. `used`: rows have used it.
    pub fn cache_budget(&mut self, env: &Env, held: usize, used: bool) -> usize {
        let Some(cache) = &mut self.cache else { return 0 };
        #[cfg(test)]
        if NOTHING_CACHED.get() {
            return 0;
        }
        cache.set(held.saturating_sub(self.pinned.bytes()));
        cache.share(env.options.cache_bytes, used)
    }

    /// Whether to evict now.
    pub fn is_over(&self, held: usize, budget: usize) -> bool {
        held > budget.max(self.retry_at)
    }

    /// What eviction has left.
    pub fn evicted(&mut self, held: usize, budget: usize) {
        let is_pinned = held > budget;
        self.pinned.set(if is_pinned && self.cache.is_some() { held } else { 0 });
        if let Some(cache) = &mut self.cache {
            cache.set(if is_pinned { 0 } else { held });
        }
        self.retry_at = if is_pinned { held + budget / 8 } else { 0 };
    }

    /// Nothing is pinned any more.
    pub fn unpinned(&mut self) {
        self.retry_at = 0;
        self.pinned.set(0);
    }

    /// Bytes that the last eviction had to leave; 0: all there is can be evicted.
    pub fn pinned(&self) -> usize {
        self.retry_at
    }

    /// So many bytes wait for state.
    pub fn set_parked(&mut self, bytes: usize) {
        self.parked.set(bytes);
    }

    /// Whether to stop pulling input. Parked rows go beyond the bound by at most one chunk.
    pub fn is_full(&self, env: &Env, gate: &KeyGate, idle: bool) -> bool {
        match env.options.state_access {
            StateAccess::Synchronous => !idle,
            StateAccess::Asynchronous => {
                gate.rows() >= env.options.parked_rows.max(1)
                    || (!gate.is_empty() && gate.bytes() >= env.options.parked_bytes)
            }
        }
    }
}
