//! Before a compaction that another process has done replaces runs: those blocks of the new runs that hold keys of blocks
//! in memory are read into memory, so that what was hot before it is hot after it (docs/design.md §9).
//!
//! It is for speed only, so it is bounded in time, bytes and requests, its reads are of the class *prefetch*, and what
//! could not be read is read by who asks for it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use millrace_common::TableId;
use millrace_rpc::version::VersionEdit;

use crate::cache::{Answer, BlockCache, BlockRequest, PartitionRequest, ReadOptions};
use crate::error::Result;
use crate::hot_keys::HotKeys;
use crate::job_store::JobStore;
use crate::run::{RunIndex, RunReader};

/// For one compaction, at most.
const MOST_TIME: Duration = Duration::from_secs(2);
/// Encoded bytes of blocks, for one compaction; also at most this part of the cache's memory.
const MOST_BYTES: u64 = 64 << 20;
const MEMORY_PART: u64 = 8;
/// Requests to the store, for one compaction: no more are begun when there have been so many.
const MOST_REQUESTS: u64 = 256;
/// Encoded bytes of the blocks that are read at the same time.
const BATCH_BYTES: u64 = 8 << 20;

/// What was read ahead of the edits of compactions.
#[derive(Debug, Default)]
pub(crate) struct HotFetchCounters {
    fetches: AtomicU64,
    incomplete: AtomicU64,
    blocks: AtomicU64,
    bytes: AtomicU64,
    requests: AtomicU64,
    micros: AtomicU64,
}

/// [`HotFetchCounters`], read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HotFetchStats {
    /// Compactions of runs with blocks in memory.
    pub fetches: u64,
    /// Those whose hot blocks were not all read: there were too many, it took too long, or the store failed.
    pub incomplete: u64,
    /// Blocks of new runs that were put into memory.
    pub blocks: u64,
    /// Their encoded bytes.
    pub bytes: u64,
    /// Requests to the store, those for indexes included.
    pub requests: u64,
    /// How long it has taken, all together.
    pub took: Duration,
}

impl HotFetchCounters {
    pub fn read(&self) -> HotFetchStats {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        HotFetchStats {
            fetches: get(&self.fetches),
            incomplete: get(&self.incomplete),
            blocks: get(&self.blocks),
            bytes: get(&self.bytes),
            requests: get(&self.requests),
            took: Duration::from_micros(get(&self.micros)),
        }
    }
}

impl JobStore {
    /// Reads into memory what was hot in the runs that this edit of a compaction will replace. The edit is not applied.
    pub async fn fetch_hot(&self, edit: &VersionEdit) {
        let version = self.version();
        let replaced = version.runs(&edit.remove_runs);
        let cache = &self.shared.cache;
        let most = MOST_BYTES.min(cache.stats().memory_limit / MEMORY_PART);
        let hot = HotKeys::of(cache, replaced.iter()).at_most(most);
        if hot.is_empty() {
            return;
        }
        let readers = edit.add_runs.iter().filter(|run| hot.touches(&run.min_key, &run.max_key));
        let readers = readers.filter_map(|run| {
            let table = version.table(TableId(run.table_id)).ok()?;
            let (codec, pins) = (Arc::clone(&table.codec), &self.shared.pins);
            Some(Arc::new(RunReader::pinned(run.clone(), codec, pins)))
        });
        let readers = readers.collect();
        let counters = &self.shared.hot_fetches;
        let (began, requests) = (self.env().now(), Arc::<AtomicU64>::default());
        let options =
            ReadOptions { requests: Some(Arc::clone(&requests)), ..ReadOptions::PREFETCH };
        let fetch = Fetch { cache, counters, hot, options };
        let is_complete = match tokio::time::timeout(MOST_TIME, fetch.run(readers)).await {
            Ok(Ok(is_complete)) => is_complete,
            Ok(Err(error)) => {
                tracing::debug!(job = self.label(), %error, "hot blocks of new runs were not read");
                false
            }
            Err(_) => false,
        };
        counters.fetches.fetch_add(1, Ordering::Relaxed);
        counters.incomplete.fetch_add(u64::from(!is_complete), Ordering::Relaxed);
        counters.requests.fetch_add(requests.load(Ordering::Relaxed), Ordering::Relaxed);
        let took = self.env().elapsed(began).as_micros();
        counters.micros.fetch_add(u64::try_from(took).unwrap_or(u64::MAX), Ordering::Relaxed);
    }
}

struct Fetch<'a> {
    cache: &'a Arc<BlockCache>,
    counters: &'a HotFetchCounters,
    hot: HotKeys,
    options: ReadOptions,
}

/// A part of a run's index that is in memory now.
type Part = (Arc<RunReader>, Arc<RunIndex>);

impl Fetch<'_> {
    /// Whether all that is hot is in memory now.
    async fn run(mut self, runs: Vec<Arc<RunReader>>) -> Result<bool> {
        let parts = self.indexes(runs).await?;
        let mut is_complete = true;
        let mut batch = Vec::new();
        let mut bytes = 0;
        for (run, index) in parts {
            for block in index.block_numbers() {
                if !self.hot.touches(index.first_key(block), index.last_key(block)) {
                    continue;
                }
                if !self.hot.admit(&index, block) {
                    is_complete = false;
                    continue;
                }
                let range = index.block_range(block);
                bytes += range.end - range.start;
                batch.push(BlockRequest {
                    run: Arc::clone(&run),
                    index: Arc::clone(&index),
                    block,
                });
                if bytes >= BATCH_BYTES {
                    is_complete &= self.read(std::mem::take(&mut batch), bytes).await?;
                    bytes = 0;
                }
            }
        }
        is_complete &= self.read(batch, bytes).await?;
        Ok(is_complete)
    }

    /// Opens the runs; of large ones, the partitions that have hot keys.
    async fn indexes(&self, runs: Vec<Arc<RunReader>>) -> Result<Vec<Part>> {
        let opened = self.cache.begin_open(runs.clone(), self.options.clone());
        let opened = runs.into_iter().zip(Answer::all(opened).await?);
        let (tops, mut parts): (Vec<Part>, Vec<Part>) =
            opened.partition(|(_, index)| index.is_top());
        let mut wanted = Vec::new();
        for (run, top) in tops {
            let touched = |p: &u32| self.hot.touches(top.first_key(*p), top.last_key(*p));
            for partition in top.block_numbers().filter(touched) {
                let (run, top) = (Arc::clone(&run), Arc::clone(&top));
                wanted.push(PartitionRequest { run, top, partition });
            }
        }
        let runs: Vec<Arc<RunReader>> = wanted.iter().map(|w| Arc::clone(&w.run)).collect();
        let indexes = self.cache.partitions(wanted, self.options.clone()).await?;
        parts.extend(runs.into_iter().zip(indexes));
        Ok(parts)
    }

    /// Whether they were read.
    async fn read(&self, batch: Vec<BlockRequest>, bytes: u64) -> Result<bool> {
        let requests = self.options.requests.as_ref().map_or(0, |n| n.load(Ordering::Relaxed));
        if requests >= MOST_REQUESTS && !batch.is_empty() {
            return Ok(false);
        }
        let blocks = batch.len() as u64;
        self.cache.fetch(batch, self.options.clone()).await?;
        self.counters.blocks.fetch_add(blocks, Ordering::Relaxed);
        self.counters.bytes.fetch_add(bytes, Ordering::Relaxed);
        Ok(true)
    }
}
