//! Scans of disk runs: sources of a merge that read ahead, within a budget that all scans share.

use std::ops::Bound;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use futures::StreamExt;
use futures::TryStreamExt;
use futures::stream::BoxStream;
use millrace_common::TableId;

use super::{DECODED, rank_of};
use crate::block::Entries;
use crate::cache::{BlockCache, BlockRequest, PartitionRequest, Priority, ReadOptions};
use crate::error::{Result, StorageError};
use crate::merge::{Input, Mode, Source};
use crate::run::{PrefixLengths, RunIndex, RunReader};
use crate::snapshot::{KeyRange, cut_range};
use crate::state_store::Shared;

/// Encoded bytes that one step of a scan reads of a run, at most.
const SCAN_WINDOW_BYTES: u64 = 1 << 20;
/// With less than this a step, reading ahead makes reads small and gains nothing.
const MIN_WINDOW_BYTES: u64 = 64 << 10;
/// Steps that a scan reads ahead.
const SCAN_AHEAD: usize = 2;
/// Partitions of an index that a scan reads at once, and how many times that it reads ahead.
const PARTITIONS_A_STEP: usize = 16;
const INDEX_AHEAD: usize = 2;
/// Scans of runs up to this size may leave their blocks in the cache.
const SMALL_RUN_BYTES: u64 = 4 << 20;

/// Runs as sources of one merge, within a share of the budget that all scans have together. Where it
/// does not suffice to read all runs at once, those that do not overlap are read one after the other.
pub(crate) fn scan_all(
    shared: &Arc<Shared>,
    runs: impl IntoIterator<Item = Arc<RunReader>>,
    mode: Mode,
    range: &KeyRange,
    projection: Option<&[usize]>,
    priority: Priority,
) -> Vec<Source> {
    let runs: Vec<Arc<RunReader>> = runs.into_iter().filter(|r| overlaps(r, range)).collect();
    if runs.is_empty() {
        return Vec::new();
    }
    let lease = Arc::new(ScanLease::new(shared));
    let budget = lease.bytes / DECODED;
    let most = SCAN_WINDOW_BYTES * (SCAN_AHEAD as u64 + 1);
    let wanted: u64 = runs.iter().map(|r| r.meta().length.min(most)).sum();
    let chains = match wanted <= budget {
        true => runs.into_iter().map(|r| vec![r]).collect(),
        false => disjoint_chains(runs),
    };
    let share = budget / chains.len() as u64;
    let ahead = if share / (SCAN_AHEAD as u64 + 1) < MIN_WINDOW_BYTES { 1 } else { SCAN_AHEAD };
    let window = (share / (ahead as u64 + 1)).min(SCAN_WINDOW_BYTES);
    let source = |run: Arc<RunReader>| {
        let fill_cache =
            !matches!(mode, Mode::Compact { .. }) && run.meta().length <= SMALL_RUN_BYTES;
        let options = ReadOptions::of(priority, fill_cache);
        let rank = rank_of(run.meta());
        let scan = Scan {
            cache: Arc::clone(&shared.cache),
            prefixes: shared.prefixes(TableId(run.meta().table_id)),
            run,
            range: range.clone(),
            projection: projection.map(<[usize]>::to_vec),
            mode,
            options,
            window,
            ahead,
            _lease: Arc::clone(&lease),
        };
        Source::new(rank, Input::Stream(scan.into_stream()))
    };
    let chain = |runs: Vec<Arc<RunReader>>| {
        let mut sources = runs.into_iter().map(source);
        let first = sources.next()?;
        Some(Source { then: sources.collect(), ..first })
    };
    chains.into_iter().filter_map(chain).collect()
}

/// As few lists as possible of runs that ascend without overlapping.
fn disjoint_chains(mut runs: Vec<Arc<RunReader>>) -> Vec<Vec<Arc<RunReader>>> {
    runs.sort_by(|a, b| a.meta().min_key.cmp(&b.meta().min_key));
    let mut chains: Vec<Vec<Arc<RunReader>>> = Vec::new();
    for run in runs {
        let ends_below = |chain: &&mut Vec<Arc<RunReader>>| {
            chain.last().is_some_and(|last| last.meta().max_key < run.meta().min_key)
        };
        match chains.iter_mut().find(ends_below) {
            Some(chain) => chain.push(run),
            None => chains.push(vec![run]),
        }
    }
    chains
}

/// A scan's part of the memory that all scans may fill with blocks read ahead. The first takes what it
/// wants of it, later ones an even share: so the sum grows with the logarithm of their number only.
struct ScanLease {
    shared: Arc<Shared>,
    /// Decoded bytes.
    bytes: u64,
}

impl ScanLease {
    fn new(shared: &Arc<Shared>) -> ScanLease {
        let others = shared.scans.fetch_add(1, Ordering::Relaxed);
        let bytes = shared.options.scan_bytes as u64 / (others as u64 + 1);
        ScanLease { shared: Arc::clone(shared), bytes }
    }
}

impl Drop for ScanLease {
    fn drop(&mut self) {
        self.shared.scans.fetch_sub(1, Ordering::Relaxed);
    }
}

fn overlaps(run: &RunReader, range: &KeyRange) -> bool {
    let meta = run.meta();
    let reaches = match &range.0 {
        Bound::Unbounded => true,
        Bound::Included(k) => meta.max_key[..] >= k[..],
        Bound::Excluded(k) => meta.max_key[..] > k[..],
    };
    reaches
        && match &range.1 {
            Bound::Unbounded => true,
            Bound::Included(k) => meta.min_key[..] <= k[..],
            Bound::Excluded(k) => meta.min_key[..] < k[..],
        }
}

/// What has the indexes of some of a run's blocks.
enum IndexStep {
    Whole(Arc<RunIndex>),
    Partitions(Vec<PartitionRequest>),
}

struct Scan {
    cache: Arc<BlockCache>,
    prefixes: Arc<PrefixLengths>,
    run: Arc<RunReader>,
    range: KeyRange,
    projection: Option<Vec<usize>>,
    mode: Mode,
    options: ReadOptions,
    /// Encoded bytes of a step, at least one block.
    window: u64,
    /// Steps read ahead.
    ahead: usize,
    _lease: Arc<ScanLease>,
}

impl Scan {
    fn into_stream(self) -> BoxStream<'static, Result<Entries>> {
        let ahead = self.ahead;
        let scan = Arc::new(self);
        let (opening, locating) = (Arc::clone(&scan), Arc::clone(&scan));
        let each = |all| futures::stream::iter(Vec::into_iter(all).map(Ok::<_, StorageError>));
        let steps = futures::stream::once(async move { opening.open().await });
        let steps = steps.map_ok(each).try_flatten();
        let indexes = steps.map(move |step| {
            let scan = Arc::clone(&locating);
            async move { scan.windows(step?).await }
        });
        let each = |all| futures::stream::iter(Vec::into_iter(all).map(Ok::<_, StorageError>));
        let windows = indexes.buffered(INDEX_AHEAD).map_ok(each).try_flatten();
        let blocks = windows.map(move |window| {
            let scan = Arc::clone(&scan);
            async move { scan.read(window?).await }
        });
        let batches = blocks.buffered(ahead);
        batches.map_ok(|b| futures::stream::iter(b.into_iter().map(Ok))).try_flatten().boxed()
    }

    /// What has the indexes of the blocks to read.
    async fn open(&self) -> Result<Vec<IndexStep>> {
        let runs = [Arc::clone(&self.run)];
        let Some(opened) = self.cache.indexes(&runs, self.options.priority).await?.pop() else {
            return Ok(Vec::new());
        };
        if matches!(self.mode, Mode::Compact { .. }) {
            // What filters of the inputs can answer, the output's shall answer too.
            opened.prefix_lengths().iter().for_each(|&l| self.prefixes.note_length(l.into()));
        }
        if !opened.is_top() {
            return Ok(vec![IndexStep::Whole(opened)]);
        }
        let partitions: Vec<u32> = self.located(&opened).collect();
        let request = |&partition: &u32| PartitionRequest {
            run: Arc::clone(&self.run),
            top: Arc::clone(&opened),
            partition,
        };
        let steps = partitions.chunks(PARTITIONS_A_STEP);
        Ok(steps.map(|s| IndexStep::Partitions(s.iter().map(request).collect())).collect())
    }

    /// The blocks, or partitions, that the scan wants.
    fn located<'a>(&self, index: &'a RunIndex) -> impl Iterator<Item = u32> + use<'a> {
        let mode = self.mode;
        let bound = |b: &Bound<Vec<u8>>| b.clone();
        let (lower, upper) = (bound(&self.range.0), bound(&self.range.1));
        let located = index
            .locate_range(lower.as_ref().map(Vec::as_slice), upper.as_ref().map(Vec::as_slice));
        located.filter(move |&block| {
            let (min, max) = index.block_epochs(block);
            mode.wants(min, max)
        })
    }

    /// The blocks to read, in groups.
    async fn windows(&self, step: IndexStep) -> Result<Vec<Vec<BlockRequest>>> {
        let indexes = match step {
            IndexStep::Whole(index) => vec![index],
            IndexStep::Partitions(requests) => {
                self.cache.partitions(requests, self.options.clone()).await?
            }
        };
        let mut windows: Vec<Vec<BlockRequest>> = Vec::new();
        let mut bytes = self.window;
        let blocks = indexes.iter().flat_map(|i| self.located(i).map(move |block| (i, block)));
        for (index, block) in blocks {
            if bytes >= self.window {
                windows.push(Vec::new());
                bytes = 0;
            }
            let at = index.block_range(block);
            bytes += at.end - at.start;
            let request =
                BlockRequest { run: Arc::clone(&self.run), index: Arc::clone(index), block };
            if let Some(window) = windows.last_mut() {
                window.push(request);
            }
        }
        Ok(windows)
    }

    async fn read(&self, window: Vec<BlockRequest>) -> Result<Vec<Entries>> {
        let blocks = self.cache.fetch(window, self.options.clone()).await?;
        let cut = blocks.iter().map(|block| {
            let entries = cut_range(&block.entries, &self.range);
            match &self.projection {
                None => Ok(entries),
                Some(columns) => Ok(entries.project(columns)?),
            }
        });
        cut.collect()
    }
}
