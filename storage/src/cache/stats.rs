//! Counters of the block cache.

use std::sync::atomic::{AtomicU64, Ordering};

use super::disk::DiskStats;

#[derive(Debug, Default)]
pub(super) struct Counters {
    pub hits: AtomicU64,
    pub misses: AtomicU64,
    pub joined: AtomicU64,
    pub disk_hits: AtomicU64,
    pub disk_damaged: AtomicU64,
    pub index_hits: AtomicU64,
    pub index_misses: AtomicU64,
    pub gets: AtomicU64,
    pub bytes: AtomicU64,
    pub rounds: AtomicU64,
}

impl Counters {
    pub fn add(counter: &AtomicU64, n: usize) {
        if n > 0 {
            counter.fetch_add(n as u64, Ordering::Relaxed);
        }
    }

    pub fn snapshot(&self) -> CacheStats {
        let get = |c: &AtomicU64| c.load(Ordering::Relaxed);
        CacheStats {
            hits: get(&self.hits),
            misses: get(&self.misses),
            joined: get(&self.joined),
            disk_hits: get(&self.disk_hits),
            disk_damaged: get(&self.disk_damaged),
            index_hits: get(&self.index_hits),
            index_misses: get(&self.index_misses),
            gets: get(&self.gets),
            bytes: get(&self.bytes),
            rounds: get(&self.rounds),
            memory_bytes: 0,
            index_bytes: 0,
            memory_limit: 0,
            index_limit: 0,
            disk: DiskStats::default(),
        }
    }
}

/// What the cache has done since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheStats {
    /// Blocks found decoded in memory.
    pub hits: u64,
    /// Blocks that had to be read from disk or store.
    pub misses: u64,
    /// Blocks that another read was already bringing.
    pub joined: u64,
    /// Misses that the disk tier answered.
    pub disk_hits: u64,
    /// Disk entries that failed their checksum and were read from the store.
    pub disk_damaged: u64,
    pub index_hits: u64,
    pub index_misses: u64,
    /// Ranged reads of the store.
    pub gets: u64,
    /// Bytes they returned.
    pub bytes: u64,
    /// Fetches that had to wait for the store: dependent rounds of their callers.
    pub rounds: u64,
    pub memory_bytes: u64,
    pub index_bytes: u64,
    /// What the memory of blocks, and that of indexes, may have at most.
    pub memory_limit: u64,
    pub index_limit: u64,
    /// What was offered to the disk tier.
    pub disk: DiskStats,
}
