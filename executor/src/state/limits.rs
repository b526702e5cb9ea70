//! How much one operator may hold in memory, and when it stops pulling input.

use super::KeyGate;
use crate::memory::{MemoryClass, Reservation};
use crate::operators::Env;
use crate::options::StateAccess;

/// Budgets of one operator with state.
pub struct Limits {
    /// `None`: nothing stays in memory, so that there is no share for it.
    cache: Option<Reservation>,
    /// Eviction could not reach its target: the rest is pinned. Not tried again below this.
    retry_at: usize,
}

impl Limits {
    pub fn new(env: &Env) -> Limits {
        Limits { cache: Some(env.governor.account(MemoryClass::Cache)), retry_at: 0 }
    }

    /// Of an operator that keeps nothing from epoch to epoch.
    pub fn without_cache() -> Limits {
        Limits { cache: None, retry_at: 0 }
    }

    /// What the cache may hold, told what it holds.
    pub fn cache_budget(&mut self, env: &Env, held: usize) -> usize {
        let Some(cache) = &mut self.cache else { return 0 };
        cache.set(held);
        env.governor.share(env.options.cache_bytes)
    }

    /// Whether to evict now.
    pub fn is_over(&self, held: usize, budget: usize) -> bool {
        held > budget.max(self.retry_at)
    }

    /// What eviction has left.
    pub fn evicted(&mut self, held: usize, budget: usize) {
        if let Some(cache) = &mut self.cache {
            cache.set(held);
        }
        self.retry_at = if held > budget { held + budget / 8 } else { 0 };
    }

    /// Nothing is pinned any more.
    pub fn unpinned(&mut self) {
        self.retry_at = 0;
    }

    /// Bytes that the last eviction had to leave; 0: all there is can be evicted.
    pub fn pinned(&self) -> usize {
        self.retry_at
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
