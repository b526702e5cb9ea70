//! The block cache: the only way blocks are read (docs/design.md §7, §9).
//!
//! - Two tiers: decoded blocks in memory, encoded blocks on local disk. Indexes and filters have a
//!   budget of their own, because every read needs them; those of a large run are read and kept by partition.
//! - A fetch takes any number of blocks of any number of runs and makes one dependent round of it:
//!   misses are joined to reads already under way, the rest become as few ranged reads an object as
//!   the planner can make, all in parallel.
//! - Memory hits need no future ([`BlockCache::try_get`]).
//! - Scans and compactions pass `fill_cache: false` and leave no trace.
//! - The scheduler decides when reads start: by class, in turns of the relations, as many as the store takes. A read
//!   that fails because of the store is tried again for as long as somebody waits for it.
//! - Nothing damaged is served: every block is checked against its own checksum and the index's. A
//!   damaged disk entry is dropped and read from the store again; a damaged object is an error.
//!
//! Reads run as tasks of their own: a caller that goes away does not cut off those who joined it.

mod admission;
mod attempts;
mod disk;
mod flights;
mod plan;
mod read;
mod scheduler;
mod stats;

use std::ops::Range;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use foyer::{Cache, CacheBuilder, LruConfig, S3FifoConfig};
use millrace_common::collections::HashMap;
use millrace_common::task::spawn_on;
use millrace_common::{EnvHandle, JobId, TableId};
use object_store::ObjectStore;
use object_store::path::Path;
use parking_lot::RwLock;
use tokio::runtime::Handle;
use tokio::time::Instant;

use crate::block::Block;
use crate::error::{Result, StorageError};
use crate::run::{RunIndex, RunReader};

pub use crate::object::limiter::ReadLimits;
pub use admission::AdmissionPolicy;
pub use attempts::AttemptOptions;
pub use disk::{DiskCacheOptions, DiskStats};
pub use plan::{Piece, PlannedRead, plan};
pub(crate) use read::Answer;
pub use scheduler::{ClassStats, ReadStats, Retrying};
pub use stats::CacheStats;

use attempts::RangeRead;
use disk::DiskTier;
use flights::Flights;
use read::Opening;
use scheduler::queues::Owner;
use scheduler::{ReadScheduler, Urgency};
use stats::Counters;

/// Bookkeeping bytes a cached block costs beside its content.
const BLOCK_OVERHEAD: usize = 512;
/// Below this the disk tier would drop most of what a burst of reads brings.
const MIN_DISK_BUFFER_BYTES: usize = 16 << 20;
/// Smallest share of the memory tier a shard may have: several blocks must fit.
const MIN_SHARD_BYTES: usize = 4 << 20;

#[derive(Clone, Debug)]
pub struct CacheOptions {
    /// Decoded blocks.
    pub memory_bytes: usize,
    /// Indexes and filters.
    pub index_bytes: usize,
    pub disk: Option<DiskCacheOptions>,
    /// Unwanted bytes between two blocks that are cheaper to read than a second request.
    pub join_gap: u64,
    /// Largest joined read.
    pub max_read_bytes: u64,
    /// Reads in flight, all together.
    pub reads: ReadLimits,
    /// Of these, what scans may take, and what compactions may take, at most.
    pub scan_reads: usize,
    /// Bytes that all reads in flight bring, at most.
    pub read_bytes: u64,
    /// Whether a slow demand read is asked for a second time.
    pub hedge_reads: bool,
    /// Time-outs and pauses of requests.
    pub attempts: AttemptOptions,
    /// Where reads run; `None`: the caller's runtime.
    pub runtime: Option<Handle>,
    /// Clocks and random numbers.
    pub env: EnvHandle,
}

impl Default for CacheOptions {
    fn default() -> CacheOptions {
        CacheOptions {
            memory_bytes: 256 << 20,
            index_bytes: 64 << 20,
            disk: None,
            join_gap: 128 << 10,
            max_read_bytes: 4 << 20,
            reads: ReadLimits::default(),
            scan_reads: 24,
            read_bytes: 256 << 20,
            hedge_reads: true,
            attempts: AttemptOptions::default(),
            runtime: None,
            env: EnvHandle::default(),
        }
    }
}

/// Names the content of a block, or of a part of an index. The checksum is part of the name: see [`disk`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct BlockKey {
    run: u64,
    block: u32,
    crc: u32,
}

/// Numbers of partitions have it, those of blocks do not come near it.
const PARTITION: u32 = 1 << 31;
/// Stands for what opens a run, of which no checksum is known before it is read: it is kept in memory only.
const OPENING: u32 = u32::MAX;

fn block_key(run: &RunReader, index: &RunIndex, block: u32) -> BlockKey {
    BlockKey { run: run.meta().run_id, block, crc: index.block_crc(block) }
}

fn partition_key(run: &RunReader, top: &RunIndex, partition: u32) -> BlockKey {
    BlockKey { block: partition | PARTITION, ..block_key(run, top, partition) }
}

fn opening_key(run: &RunReader) -> BlockKey {
    BlockKey { run: run.meta().run_id, block: OPENING, crc: 0 }
}

/// Who is waiting for a read. The smallest is the most urgent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Priority {
    /// A row, a statement.
    #[default]
    Demand,
    /// An operator that must have all of an epoch's rows done before the epoch ends.
    Barrier,
    /// Rows that were written to the store before their commit, and are read again to be committed.
    Flush,
    /// Nobody yet: what is expected to be asked for.
    Prefetch,
    /// A scan.
    Scan,
    /// Runs that are rewritten.
    Compaction,
}

impl Priority {
    /// Highest first.
    pub const ALL: [Priority; 6] = [
        Priority::Demand,
        Priority::Barrier,
        Priority::Flush,
        Priority::Prefetch,
        Priority::Scan,
        Priority::Compaction,
    ];

    /// In one word.
    pub fn name(self) -> &'static str {
        match self {
            Priority::Demand => "demand",
            Priority::Barrier => "barrier",
            Priority::Flush => "flush",
            Priority::Prefetch => "prefetch",
            Priority::Scan => "scan",
            Priority::Compaction => "compaction",
        }
    }
}

#[derive(Clone, Debug)]
pub struct ReadOptions {
    pub priority: Priority,
    /// When the answer is needed, where nobody waits for it before. Of reads of the class of barriers.
    pub deadline: Option<Instant>,
    /// Keep what was read.
    pub fill_cache: bool,
    /// Counts the requests to the store that are made for the reader: not those that others have made already.
    pub requests: Option<Arc<AtomicU64>>,
    /// Counts the bytes that are not in memory and are read for the reader, from the local disk too.
    pub bytes: Option<Arc<AtomicU64>>,
}

impl ReadOptions {
    pub const DEMAND: ReadOptions = ReadOptions::keeping(Priority::Demand);
    pub const PREFETCH: ReadOptions = ReadOptions::keeping(Priority::Prefetch);
    pub const SCAN: ReadOptions = ReadOptions::of(Priority::Scan, false);
    pub const COMPACTION: ReadOptions = ReadOptions::of(Priority::Compaction, false);

    pub const fn of(priority: Priority, fill_cache: bool) -> ReadOptions {
        ReadOptions { priority, deadline: None, fill_cache, requests: None, bytes: None }
    }

    /// Of this class, and what was read is kept.
    pub const fn keeping(priority: Priority) -> ReadOptions {
        ReadOptions::of(priority, true)
    }
}

/// A block to fetch.
#[derive(Clone, Debug)]
pub struct BlockRequest {
    pub run: Arc<RunReader>,
    pub index: Arc<RunIndex>,
    pub block: u32,
}

/// A partition of a large run's index to fetch.
#[derive(Clone, Debug)]
pub struct PartitionRequest {
    pub run: Arc<RunReader>,
    pub top: Arc<RunIndex>,
    pub partition: u32,
}

pub struct BlockCache {
    store: Arc<dyn ObjectStore>,
    options: CacheOptions,
    memory: Cache<BlockKey, Arc<Block>>,
    indexes: Cache<BlockKey, Arc<RunIndex>>,
    disk: OnceLock<DiskTier>,
    block_flights: Flights<BlockKey, Arc<Block>>,
    index_flights: Flights<BlockKey, Arc<RunIndex>>,
    scheduler: Arc<ReadScheduler>,
    /// The jobs that keep state tables.
    owners: RwLock<HashMap<TableId, JobId>>,
    counters: Counters,
}

impl BlockCache {
    /// Returns at once; a disk tier joins when it has recovered its directory.
    pub fn open(store: Arc<dyn ObjectStore>, options: CacheOptions) -> Arc<BlockCache> {
        let shards = (options.memory_bytes / MIN_SHARD_BYTES).clamp(1, 32);
        let memory = CacheBuilder::new(options.memory_bytes.max(1))
            .with_name("millrace-memory-blocks")
            .with_shards(shards)
            .with_eviction_config(S3FifoConfig::default())
            .with_weighter(|_: &BlockKey, block: &Arc<Block>| BLOCK_OVERHEAD + block.memory)
            .build();
        let indexes = CacheBuilder::new(options.index_bytes.max(1))
            .with_name("millrace-indexes")
            .with_shards((options.index_bytes / MIN_SHARD_BYTES).clamp(1, 8))
            .with_eviction_config(LruConfig::default())
            .with_weighter(|_: &BlockKey, index: &Arc<RunIndex>| index.memory_size())
            .build();
        let cache = Arc::new(BlockCache {
            store,
            memory,
            indexes,
            disk: OnceLock::new(),
            block_flights: Flights::new(),
            index_flights: Flights::new(),
            scheduler: ReadScheduler::new(&options),
            owners: RwLock::default(),
            counters: Counters::default(),
            options,
        });
        cache.open_disk();
        cache
    }

    /// Opens the disk tier in the background. A cache that cannot be opened is reported, not fatal.
    fn open_disk(self: &Arc<Self>) {
        let Some(mut options) = self.options.disk.clone() else { return };
        // Blocks on their way to disk are memory too.
        let share = (self.options.memory_bytes / 2).max(MIN_DISK_BUFFER_BYTES);
        options.buffer_bytes = options.buffer_bytes.min(share);
        let Some(runtime) = self.options.runtime.clone().or_else(|| Handle::try_current().ok())
        else {
            tracing::warn!("no runtime to open the disk cache on; going on without it");
            return;
        };
        let cache = Arc::downgrade(self);
        spawn_on(&runtime, "open the disk cache", async move {
            match DiskTier::open(&options).await {
                Ok(tier) => {
                    if let Some(cache) = cache.upgrade() {
                        let _ = cache.disk.set(tier);
                    }
                }
                Err(e) => tracing::warn!(error = %e, "going on without a disk cache"),
            }
        });
    }

    /// Whether the disk tier is open.
    pub fn has_disk(&self) -> bool {
        self.disk.get().is_some()
    }

    /// What opens the run, its index or its top index, if no read is needed for it.
    pub fn try_index(&self, run: &RunReader) -> Option<Arc<RunIndex>> {
        self.try_index_part(&opening_key(run)).or_else(|| self.take_described(run))
    }

    /// What opens the run, where its description has it.
    fn take_described(&self, run: &RunReader) -> Option<Arc<RunIndex>> {
        let index = Arc::new(run.described_index()?);
        self.indexes.insert(opening_key(run), Arc::clone(&index));
        Some(index)
    }

    /// A partition of the run's index, if it is in memory.
    pub fn try_partition(
        &self,
        run: &RunReader,
        top: &RunIndex,
        partition: u32,
    ) -> Option<Arc<RunIndex>> {
        self.try_index_part(&partition_key(run, top, partition))
    }

    fn try_index_part(&self, key: &BlockKey) -> Option<Arc<RunIndex>> {
        let entry = self.indexes.get(key)?;
        Counters::add(&self.counters.index_hits, 1);
        Some(Arc::clone(entry.value()))
    }

    /// What opens the runs, in order, with at most one round of reads.
    pub async fn indexes(
        self: &Arc<Self>,
        runs: &[Arc<RunReader>],
        priority: Priority,
    ) -> Result<Vec<Arc<RunIndex>>> {
        Answer::all(self.begin_open(runs.to_vec(), ReadOptions::keeping(priority))).await
    }

    /// Partitions of indexes, in order, with at most one round of reads.
    pub async fn partitions(
        self: &Arc<Self>,
        requests: Vec<PartitionRequest>,
        options: ReadOptions,
    ) -> Result<Vec<Arc<RunIndex>>> {
        Answer::all(self.begin_partitions(requests, options)).await
    }

    /// Begins to read what opens these runs.
    pub(crate) fn begin_open(
        self: &Arc<Self>,
        runs: Vec<Arc<RunReader>>,
        options: ReadOptions,
    ) -> Vec<Answer<Arc<RunIndex>>> {
        self.begin(runs.into_iter().map(Opening).collect(), options)
    }

    /// Begins to read partitions of indexes.
    pub(crate) fn begin_partitions(
        self: &Arc<Self>,
        requests: Vec<PartitionRequest>,
        options: ReadOptions,
    ) -> Vec<Answer<Arc<RunIndex>>> {
        self.begin(requests, options)
    }

    /// The block, if it is decoded in memory. Takes no future and does no I/O.
    #[inline]
    pub fn try_get(&self, run: &RunReader, index: &RunIndex, block: u32) -> Option<Arc<Block>> {
        let entry = self.memory.get(&block_key(run, index, block))?;
        Counters::add(&self.counters.hits, 1);
        Some(Arc::clone(entry.value()))
    }

    /// The blocks, in the order asked, with one dependent round at most. Duplicates are fine.
    pub async fn fetch(
        self: &Arc<Self>,
        requests: Vec<BlockRequest>,
        options: ReadOptions,
    ) -> Result<Vec<Arc<Block>>> {
        Answer::all(self.begin_fetch(requests, options)).await
    }

    /// Begins to read the blocks, as one round. The reads go on without the caller as long as one of their answers is
    /// kept; what the answers say does not depend on the order in which they are waited for.
    pub(crate) fn begin_fetch(
        self: &Arc<Self>,
        requests: Vec<BlockRequest>,
        options: ReadOptions,
    ) -> Vec<Answer<Arc<Block>>> {
        self.begin(requests, options)
    }

    /// Takes in a run that was just built, so that its first readers find it: the index in memory, the
    /// blocks on disk, and those of which `in_memory` says so decoded in memory too.
    pub fn admit_run(
        &self,
        run: &RunReader,
        index: Arc<RunIndex>,
        bytes: &Bytes,
        mut in_memory: impl FnMut(&RunIndex, u32) -> bool,
    ) -> Result<()> {
        self.admit_index(run, &index, bytes)?;
        for block in index.block_numbers() {
            let range = index.block_range(block);
            let encoded = bytes.slice(range.start as usize..range.end as usize);
            let key = block_key(run, &index, block);
            if in_memory(&index, block) {
                self.memory.insert(key, Arc::new(run.decode_block(&index, block, &encoded)?));
            }
            if let Some(disk) = self.disk.get() {
                disk.offer_built(key, &encoded);
            }
        }
        Ok(())
    }

    /// The parts of the run's index that are in memory, with the numbers of their blocks that are decoded in memory. Asking
    /// does not make them look used.
    pub(crate) fn blocks_in_memory(&self, run: &RunReader) -> Vec<(Arc<RunIndex>, Vec<u32>)> {
        let get = |key: BlockKey| self.indexes.get(&key).map(|entry| Arc::clone(entry.value()));
        let described = || run.described_index().map(Arc::new);
        let Some(opened) = get(opening_key(run)).or_else(described) else { return Vec::new() };
        let parts: Vec<Arc<RunIndex>> = match opened.is_top() {
            false => vec![opened],
            true => {
                let partitions = opened.block_numbers();
                partitions.filter_map(|p| get(partition_key(run, &opened, p))).collect()
            }
        };
        let resident = |index: Arc<RunIndex>| {
            let in_memory = |block: &u32| self.memory.contains(&block_key(run, &index, *block));
            let blocks = index.block_numbers().filter(in_memory).collect();
            (index, blocks)
        };
        parts.into_iter().map(resident).collect()
    }

    /// Takes in the index of a run that was just built: as its readers read it, with epochs.
    fn admit_index(&self, run: &RunReader, built: &Arc<RunIndex>, bytes: &Bytes) -> Result<()> {
        if !run.has_partitions(bytes) && !run.needs_epochs(built) {
            self.indexes.insert(opening_key(run), Arc::clone(built));
            return Ok(());
        }
        let meta_at = bytes.len() - run.meta().meta_length as usize;
        let opened = run.parse_index(&Bytes::copy_from_slice(&bytes[meta_at..]))?;
        let offset = run.meta().offset;
        for partition in opened.block_numbers().filter(|_| opened.is_top()) {
            let range = run.partition_range(&opened, partition);
            let range = (range.start - offset) as usize..(range.end - offset) as usize;
            let own = Bytes::copy_from_slice(&bytes[range]);
            let key = partition_key(run, &opened, partition);
            let index = run.parse_partition(&opened, partition, &own)?;
            if let Some(disk) = self.disk.get() {
                disk.offer_built(key, &own);
            }
            self.indexes.insert(key, Arc::new(index));
        }
        self.indexes.insert(opening_key(run), Arc::new(opened));
        Ok(())
    }

    /// Forgets a run that a compaction has replaced, as far as its index is known without a read.
    pub fn forget_run(&self, run: &RunReader) {
        let opened = self.indexes.remove(&opening_key(run)).map(|entry| Arc::clone(entry.value()));
        let described = || run.described_index().map(Arc::new);
        let Some(opened) = opened.or_else(described) else { return };
        if !opened.is_top() {
            return self.forget_blocks(run, &opened);
        }
        for partition in opened.block_numbers() {
            let key = partition_key(run, &opened, partition);
            if let Some(entry) = self.indexes.remove(&key) {
                self.forget_blocks(run, entry.value());
            }
            if let Some(disk) = self.disk.get() {
                disk.remove(&key);
            }
        }
    }

    fn forget_blocks(&self, run: &RunReader, index: &RunIndex) {
        for block in index.block_numbers() {
            let key = block_key(run, index, block);
            self.memory.remove(&key);
            if let Some(disk) = self.disk.get() {
                disk.remove(&key);
            }
        }
    }

    /// Says whose state tables these are: reads of a job's tables take turns with those of other jobs.
    pub fn set_owner(&self, job: JobId, tables: impl IntoIterator<Item = TableId>) {
        self.owners.write().extend(tables.into_iter().map(|table| (table, job)));
    }

    /// Forgets whose state tables a job's were.
    pub fn forget_owner(&self, job: JobId) {
        self.owners.write().retain(|_, owner| *owner != job);
    }

    fn owner_of(&self, run: &RunReader) -> Owner {
        let table = TableId(run.meta().table_id);
        match self.owners.read().get(&table) {
            Some(job) => Owner::from(job.0),
            // No job has such a number.
            None => Owner::from(table.0) | (1 << 32),
        }
    }

    /// A byte range of an object that is not kept: scheduled and tried again as reads of blocks are.
    pub async fn read_uncached(
        &self,
        object: &str,
        range: Range<u64>,
        priority: Priority,
    ) -> Result<Bytes> {
        let path = &Path::from(object);
        let read = RangeRead { path, range, urgency: Urgency::new(priority, None), owner: 0 };
        let bytes = self.read_range(&read, || true).await?;
        bytes.ok_or_else(|| StorageError::internal("a read that was wanted was given up"))
    }

    /// Reads of the store at this moment.
    pub fn read_stats(&self) -> ReadStats {
        self.scheduler.stats()
    }

    /// Reads of a job's state that have failed and are being tried again.
    pub fn retrying(&self, job: JobId) -> Option<Retrying> {
        self.scheduler.retrying(Owner::from(job.0))
    }

    pub fn stats(&self) -> CacheStats {
        let mut stats = self.counters.snapshot();
        stats.memory_bytes = self.memory.usage() as u64;
        stats.index_bytes = self.indexes.usage() as u64;
        stats.memory_limit = self.memory.capacity() as u64;
        stats.index_limit = self.indexes.capacity() as u64;
        stats.disk = self.disk.get().map(DiskTier::stats).unwrap_or_default();
        stats
    }

    /// The memory tier's budget, as opened.
    pub fn memory_budget(&self) -> usize {
        self.options.memory_bytes
    }

    /// Gives the memory tier another budget; what exceeds it goes at once. For a memory governor.
    pub fn set_memory_bytes(&self, bytes: usize) -> Result<()> {
        self.memory
            .resize(bytes.max(1))
            .map_err(|e| StorageError::Cache(format!("cannot resize the memory tier: {e}")))
    }

    /// Drops clean memory; for a memory governor under pressure and for tests.
    pub fn clear_memory(&self) {
        self.memory.clear();
    }

    /// Waits until what is on its way to disk is there. Call before the process ends.
    pub async fn close(&self) -> Result<()> {
        match self.disk.get() {
            Some(disk) => disk.close().await,
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod faults;
#[cfg(test)]
mod tests;
