//! Disk runs as sources of reads.
//!
//! A lookup asks key ranges first (in memory, from the version), then indexes and filters, then blocks.
//! If all of these are in memory it is answered at once; else it makes at most two dependent rounds,
//! one for all indexes that are missing and one for all blocks, whatever the number of keys and runs.

use std::ops::Bound;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use arrow::array::{Array, AsArray, BinaryArray, UInt32Array};
use arrow::compute;
use futures::StreamExt;
use futures::TryStreamExt;
use futures::stream::BoxStream;
use millrace_common::{Epoch, TableId};

use crate::block::{Block, Entries};
use crate::cache::{BlockCache, BlockRequest, Priority, ReadOptions};
use crate::error::{Result, StorageError};
use crate::lookup::{Sorted, sorted_order};
use crate::merge::{Input, Mode, Source};
use crate::run::{PrefixLengths, RunIndex, RunReader};
use crate::snapshot::{KeyRange, cut_range};
use crate::state_store::Shared;
use crate::version::TableVersion;
use crate::writer::Question;

/// Encoded bytes that one step of a scan reads of a run, at most.
const SCAN_WINDOW_BYTES: u64 = 1 << 20;
/// With less than this a step, reading ahead makes reads small and gains nothing.
const MIN_WINDOW_BYTES: u64 = 64 << 10;
/// Steps that a scan reads ahead.
const SCAN_AHEAD: usize = 2;
/// What decoded blocks take against encoded ones, roughly.
const DECODED: u64 = 4;
/// Scans of runs up to this size may leave their blocks in the cache.
const SMALL_RUN_BYTES: u64 = 4 << 20;

/// What disk runs add to a lookup.
pub(crate) enum Probe {
    /// These blocks, which were in memory; none where no run can hold the keys.
    Ready(Vec<Sorted>),
    Fetch(Fetch),
}

/// The part of a question that a run may answer.
struct Target {
    run: Arc<RunReader>,
    strings: BinaryArray,
    asks: Asks,
}

/// What the strings of a question are.
#[derive(Clone, Debug)]
enum Asks {
    Keys,
    Prefixes,
    /// Starts; these are the ends.
    Ranges(BinaryArray),
}

/// A lookup that needs I/O.
pub(crate) struct Fetch {
    cache: Arc<BlockCache>,
    targets: Vec<Target>,
    as_of: Epoch,
}

impl Fetch {
    pub async fn run(self) -> Result<Vec<Sorted>> {
        let runs: Vec<Arc<RunReader>> = self.targets.iter().map(|t| Arc::clone(&t.run)).collect();
        let indexes = self.cache.indexes(&runs, Priority::Demand).await?;
        let mut requests = Vec::new();
        let mut counts = Vec::with_capacity(runs.len());
        for (target, index) in self.targets.iter().zip(&indexes) {
            let blocks = target.blocks(index, self.as_of);
            counts.push(blocks.len());
            requests.extend(blocks.into_iter().map(|block| BlockRequest {
                run: Arc::clone(&target.run),
                index: Arc::clone(index),
                block,
            }));
        }
        let mut blocks = self.cache.fetch(requests, ReadOptions::DEMAND).await?.into_iter();
        let take = |(target, n): (&Target, usize)| target.sorted(blocks.by_ref().take(n));
        Ok(self.targets.iter().zip(counts).map(take).collect())
    }
}

impl Target {
    /// The part of sorted questions that lies between the run's keys.
    fn of(run: &Arc<RunReader>, sorted: &BinaryArray, asks: &Asks) -> Option<Target> {
        let meta = run.meta();
        if let Asks::Ranges(ends) = asks {
            let start = partition(ends, |e| e <= &meta.min_key[..]);
            let end = partition(sorted, |s| s <= &meta.max_key[..]);
            return (start < end).then(|| Target {
                run: Arc::clone(run),
                strings: sorted.slice(start, end - start),
                asks: Asks::Ranges(ends.slice(start, end - start)),
            });
        }
        let prefixes = matches!(asks, Asks::Prefixes);
        // A prefix of the smallest key is below it and still matches; none is shorter than `shortest`.
        let shortest = (0..sorted.len()).map(|i| sorted.value(i).len()).min().unwrap_or(0);
        let first = match prefixes {
            true => &meta.min_key[..shortest.min(meta.min_key.len())],
            false => &meta.min_key[..],
        };
        let start = partition(sorted, |s| s < first);
        let end = partition(sorted, |s| s <= &meta.max_key[..]);
        (start < end).then(|| Target {
            run: Arc::clone(run),
            strings: sorted.slice(start, end - start),
            asks: asks.clone(),
        })
    }

    /// The blocks that may answer, ascending.
    fn blocks(&self, index: &RunIndex, as_of: Epoch) -> Vec<u32> {
        let second = |located: Vec<(u32, u32)>| located.into_iter().map(|(_, b)| b).collect();
        let mut blocks: Vec<u32> = match &self.asks {
            Asks::Prefixes => second(index.locate_prefixes(&self.strings)),
            Asks::Keys => second(index.locate_keys(&self.strings, None)),
            Asks::Ranges(ends) => (0..self.strings.len())
                .flat_map(|i| {
                    let start = Bound::Included(self.strings.value(i));
                    index.locate_range(start, Bound::Excluded(ends.value(i)))
                })
                .collect(),
        };
        blocks.sort_unstable();
        blocks.dedup();
        blocks.retain(|&b| index.block_epochs(b).0 <= as_of);
        blocks
    }

    fn sorted(&self, blocks: impl Iterator<Item = Arc<Block>>) -> Sorted {
        Sorted {
            batches: blocks.map(|b| b.entries.clone()).collect(),
            private: false,
            rank: self.run.meta().sequence,
        }
    }
}

/// The first position where `below` is false.
fn partition(sorted: &BinaryArray, below: impl Fn(&[u8]) -> bool) -> usize {
    let (mut low, mut high) = (0, sorted.len());
    while low < high {
        let mid = low + (high - low) / 2;
        if below(sorted.value(mid)) { low = mid + 1 } else { high = mid }
    }
    low
}

/// Finds out, without I/O, what disk runs have to say.
pub(crate) fn probe(
    shared: &Shared,
    table: &TableVersion,
    as_of: Epoch,
    question: &Question,
) -> Result<Probe> {
    if let Question::Prefixes(asked, _) = question {
        shared.prefixes(table.desc.id).note(asked);
    }
    let visible = table.disk.iter().filter(|r| Epoch(r.meta().min_epoch) <= as_of);
    let mut visible = visible.peekable();
    if visible.peek().is_none() || question.strings().is_empty() {
        return Ok(Probe::Ready(Vec::new()));
    }
    let (sorted, asks) = match question {
        Question::Keys(keys) => (sorted_strings(keys)?, Asks::Keys),
        Question::Prefixes(prefixes, _) => (sorted_strings(prefixes)?, Asks::Prefixes),
        // In order as they are.
        Question::Ranges { starts, ends, .. } => (starts.clone(), Asks::Ranges(ends.clone())),
    };
    let targets: Vec<Target> = visible.filter_map(|run| Target::of(run, &sorted, &asks)).collect();
    match probe_memory(&shared.cache, &targets, as_of) {
        Some(found) => Ok(Probe::Ready(found)),
        None => Ok(Probe::Fetch(Fetch { cache: Arc::clone(&shared.cache), targets, as_of })),
    }
}

/// All blocks that matter, if all are decoded in memory.
fn probe_memory(cache: &BlockCache, targets: &[Target], as_of: Epoch) -> Option<Vec<Sorted>> {
    let indexes: Option<Vec<Arc<RunIndex>>> =
        targets.iter().map(|t| cache.try_index(&t.run)).collect();
    let one = |(target, index): (&Target, Arc<RunIndex>)| {
        let blocks: Option<Vec<Arc<Block>>> = target
            .blocks(&index, as_of)
            .into_iter()
            .map(|b| cache.try_get(&target.run, &index, b))
            .collect();
        Some(target.sorted(blocks?.into_iter()))
    };
    targets.iter().zip(indexes?).map(one).collect()
}

fn sorted_strings(strings: &BinaryArray) -> Result<BinaryArray> {
    let order = sorted_order(strings);
    if order.iter().enumerate().all(|(i, &o)| i == o as usize) {
        return Ok(strings.clone());
    }
    Ok(compute::take(strings, &UInt32Array::from(order), None)?.as_binary::<i32>().clone())
}

/// Runs as sources of one merge, within a share of the budget that all scans have together. Where it
/// does not suffice to read all runs at once, those that do not overlap are read one after the other.
pub(crate) fn scan_all(
    shared: &Arc<Shared>,
    runs: impl IntoIterator<Item = Arc<RunReader>>,
    mode: Mode,
    range: &KeyRange,
    projection: Option<&[usize]>,
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
        let rank = run.meta().sequence;
        let scan = Scan {
            cache: Arc::clone(&shared.cache),
            prefixes: shared.prefixes(TableId(run.meta().table_id)),
            run,
            range: range.clone(),
            projection: projection.map(<[usize]>::to_vec),
            mode,
            options: ReadOptions { fill_cache, ..ReadOptions::SCAN },
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
        let opening = Arc::clone(&scan);
        let windows = futures::stream::once(async move { opening.windows().await });
        let windows =
            windows.map_ok(|w| futures::stream::iter(w.into_iter().map(Ok::<_, StorageError>)));
        let blocks = windows.try_flatten().map(move |window| {
            let scan = Arc::clone(&scan);
            async move { scan.read(window?).await }
        });
        let batches = blocks.buffered(ahead);
        batches.map_ok(|b| futures::stream::iter(b.into_iter().map(Ok))).try_flatten().boxed()
    }

    /// The blocks to read, in groups.
    async fn windows(&self) -> Result<Vec<Vec<BlockRequest>>> {
        let runs = [Arc::clone(&self.run)];
        let Some(index) = self.cache.indexes(&runs, self.options.priority).await?.pop() else {
            return Ok(Vec::new());
        };
        if matches!(self.mode, Mode::Compact { .. }) {
            // What filters of the inputs can answer, the output's shall answer too.
            index.prefix_lengths().iter().for_each(|&l| self.prefixes.note_length(l.into()));
        }
        let bound = |b: &Bound<Vec<u8>>| b.clone();
        let (lower, upper) = (bound(&self.range.0), bound(&self.range.1));
        let located = index
            .locate_range(lower.as_ref().map(Vec::as_slice), upper.as_ref().map(Vec::as_slice));
        let mut windows: Vec<Vec<BlockRequest>> = Vec::new();
        let mut bytes = self.window;
        for block in located {
            let (min, max) = index.block_epochs(block);
            if !self.mode.wants(min, max) {
                continue;
            }
            if bytes >= self.window {
                windows.push(Vec::new());
                bytes = 0;
            }
            let at = index.block_range(block);
            bytes += at.end - at.start;
            let request =
                BlockRequest { run: Arc::clone(&self.run), index: Arc::clone(&index), block };
            if let Some(window) = windows.last_mut() {
                window.push(request);
            }
        }
        Ok(windows)
    }

    async fn read(&self, window: Vec<BlockRequest>) -> Result<Vec<Entries>> {
        let blocks = self.cache.fetch(window, self.options).await?;
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
