//! Disk runs as sources of reads.
//!
//! A lookup asks key ranges first (in memory, from the version), then indexes and filters, then blocks.
//! If all of these are in memory it is answered at once; else it makes at most two dependent rounds,
//! one for all indexes that are missing and one for all blocks, whatever the number of keys and runs.

use std::ops::{Bound, Range};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use arrow::array::{Array, AsArray, BinaryArray, UInt32Array};
use arrow::compute;
use futures::StreamExt;
use futures::TryStreamExt;
use futures::stream::BoxStream;
use millrace_common::{Epoch, TableId};
use millrace_rpc::version::RunMeta;

use crate::block::{Block, Entries};
use crate::cache::{BlockCache, BlockRequest, Priority, ReadOptions};
use crate::error::{Result, StorageError};
use crate::lookup::{Lookups, Sorted, sorted_order};
use crate::merge::{Input, Mode, Source, rank};
use crate::reading::{Part, Reading};
use crate::run::{PrefixLengths, RunIndex, RunReader};
use crate::snapshot::{KeyRange, cut_range};
use crate::state_store::Shared;
use crate::version::TableVersion;
use crate::writer::{EarlyRun, LookupRequest};

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
    /// Position of the first of `strings` in the sorted question.
    first: usize,
    /// Its rank among what one writer holds, where no version names the run.
    early: Option<u64>,
    strings: BinaryArray,
    asks: KeyKind,
}

/// What the strings of a question are.
#[derive(Clone, Debug)]
enum KeyKind {
    Keys,
    Prefixes,
    /// Starts; these are the ends.
    Ranges(BinaryArray),
}

/// A lookup that needs I/O.
pub(crate) struct Fetch {
    shared: Arc<Shared>,
    asked: SortedKeys,
    targets: Vec<Target>,
    as_of: Epoch,
}

/// What one step of a lookup answers: a stretch of its sorted strings, and where their blocks are.
struct Step {
    strings: Range<usize>,
    /// By target, ascending.
    blocks: Vec<Vec<u32>>,
}

impl Fetch {
    /// Answers the question, with what is in memory too. One round for the indexes that are missing, and
    /// one for the blocks; where these would take more memory than a lookup may, several, each for a part of
    /// the strings, with one read ahead.
    pub fn answer(self, question: LookupRequest, lookups: Lookups) -> Reading {
        let fetch = Arc::new(self);
        let open = async move { fetch.open(question, lookups).await };
        Reading::new(futures::stream::once(open).try_flatten().boxed())
    }

    async fn open(
        self: Arc<Self>,
        question: LookupRequest,
        mut lookups: Lookups,
    ) -> Result<BoxStream<'static, Result<Part>>> {
        let runs: Vec<Arc<RunReader>> = self.targets.iter().map(|t| Arc::clone(&t.run)).collect();
        let indexes = Arc::new(self.shared.cache.indexes(&runs, Priority::Demand).await?);
        let mut steps = self.steps(&indexes);
        if steps.len() <= 1 {
            let blocks = steps.pop().map(|s| s.blocks).unwrap_or_default();
            lookups.sources.extend(self.read(&indexes, blocks).await?);
            let only = Part::whole(question.answer(&lookups)?, question.strings().len());
            return Ok(futures::stream::once(futures::future::ready(Ok(only))).boxed());
        }
        let memory = lookups.sources.len();
        let last = steps.len() - 1;
        let fetch = Arc::clone(&self);
        let reads = steps.into_iter().enumerate().map(move |(i, step)| {
            let (fetch, indexes) = (Arc::clone(&fetch), Arc::clone(&indexes));
            async move {
                let blocks = fetch.read(&indexes, step.blocks).await?;
                Ok::<_, StorageError>((i == last, step.strings, blocks))
            }
        });
        let parts = futures::stream::iter(reads).buffered(2).map(move |read| {
            let (is_last, strings, blocks) = read?;
            lookups.sources.extend(blocks);
            let found = self.asked.part(&question, strings.clone()).answer(&lookups);
            lookups.sources.truncate(memory);
            Ok(Part { asked: self.asked.positions(strings), found: found?, is_last })
        });
        Ok(parts.boxed())
    }

    /// Cuts the question such that the blocks of each part, decoded, stay within a lookup's memory.
    fn steps(&self, indexes: &[Arc<RunIndex>]) -> Vec<Step> {
        let most = self.shared.options.lookup_bytes as u64;
        let mut located: Vec<(usize, usize, u32, u64)> = Vec::new();
        for (t, (target, index)) in self.targets.iter().zip(indexes).enumerate() {
            located.extend(target.located(index, self.as_of).into_iter().map(|(string, block)| {
                let range = index.block_range(block);
                (string, t, block, (range.end - range.start) * DECODED)
            }));
        }
        located.sort_unstable();
        let none = || vec![Vec::new(); self.targets.len()];
        let (mut steps, mut blocks, mut bytes, mut from) = (Vec::new(), none(), 0, 0);
        for of_string in located.chunk_by(|a, b| a.0 == b.0) {
            let string = of_string[0].0;
            let is_new = |blocks: &Vec<Vec<u32>>, t: usize, b: u32| blocks[t].last() < Some(&b);
            let more: u64 =
                of_string.iter().filter(|l| is_new(&blocks, l.1, l.2)).map(|l| l.3).sum();
            if bytes > 0 && bytes + more > most {
                let full = std::mem::replace(&mut blocks, none());
                steps.push(Step { strings: from..string, blocks: full });
                (bytes, from) = (0, string);
            }
            for &(_, t, block, size) in of_string {
                if is_new(&blocks, t, block) {
                    blocks[t].push(block);
                    bytes += size;
                }
            }
        }
        steps.push(Step { strings: from..self.asked.len(), blocks });
        steps
    }

    /// The blocks of each target.
    async fn read(&self, indexes: &[Arc<RunIndex>], blocks: Vec<Vec<u32>>) -> Result<Vec<Sorted>> {
        let requests =
            self.targets.iter().zip(indexes).zip(&blocks).flat_map(|((t, i), blocks)| {
                let request =
                    |&block| BlockRequest { run: Arc::clone(&t.run), index: Arc::clone(i), block };
                blocks.iter().map(request)
            });
        let requests: Vec<BlockRequest> = requests.collect();
        let mut read = self.shared.cache.fetch(requests, ReadOptions::DEMAND).await?.into_iter();
        let take = |(t, of): (&Target, &Vec<u32>)| t.sorted(read.by_ref().take(of.len()));
        Ok(self.targets.iter().zip(&blocks).map(take).collect())
    }
}

/// The strings of a question in order, and which of them each one is.
struct SortedKeys {
    sorted: BinaryArray,
    /// Positions in the question; `None`: it was in order.
    order: Option<Vec<u32>>,
}

impl SortedKeys {
    fn new(question: &LookupRequest) -> Result<SortedKeys> {
        let strings = question.strings();
        if matches!(question, LookupRequest::Ranges { .. }) {
            return Ok(SortedKeys { sorted: strings.clone(), order: None });
        }
        let order = sorted_order(strings);
        if order.iter().enumerate().all(|(i, &o)| i == o as usize) {
            return Ok(SortedKeys { sorted: strings.clone(), order: None });
        }
        let indices = UInt32Array::from(order.clone());
        let sorted = compute::take(strings, &indices, None)?.as_binary::<i32>().clone();
        Ok(SortedKeys { sorted, order: Some(order) })
    }

    fn len(&self) -> usize {
        self.sorted.len()
    }

    /// The question of some of the sorted strings.
    fn part(&self, question: &LookupRequest, strings: Range<usize>) -> LookupRequest {
        let cut = |all: &BinaryArray| all.slice(strings.start, strings.len());
        match question {
            LookupRequest::Keys(_) => LookupRequest::Keys(cut(&self.sorted)),
            LookupRequest::Prefixes(_, limit) => LookupRequest::Prefixes(cut(&self.sorted), *limit),
            LookupRequest::Ranges { starts, ends, limit } => {
                LookupRequest::Ranges { starts: cut(starts), ends: cut(ends), limit: *limit }
            }
        }
    }

    /// Which strings of the question these sorted ones are.
    fn positions(&self, strings: Range<usize>) -> Vec<u32> {
        match &self.order {
            None => (strings.start as u32..strings.end as u32).collect(),
            Some(order) => order[strings].to_vec(),
        }
    }
}

impl Target {
    /// The part of sorted questions that lies between the run's keys.
    fn of(
        run: &Arc<RunReader>,
        early: Option<u64>,
        sorted: &BinaryArray,
        asks: &KeyKind,
    ) -> Option<Target> {
        let meta = run.meta();
        if let KeyKind::Ranges(ends) = asks {
            let start = partition(ends, |e| e <= &meta.min_key[..]);
            let end = partition(sorted, |s| s <= &meta.max_key[..]);
            return (start < end).then(|| Target {
                run: Arc::clone(run),
                early,
                first: start,
                strings: sorted.slice(start, end - start),
                asks: KeyKind::Ranges(ends.slice(start, end - start)),
            });
        }
        let prefixes = matches!(asks, KeyKind::Prefixes);
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
            early,
            first: start,
            strings: sorted.slice(start, end - start),
            asks: asks.clone(),
        })
    }

    /// The blocks that may answer: (position of a string in the sorted question, block).
    fn located(&self, index: &RunIndex, as_of: Epoch) -> Vec<(usize, u32)> {
        let located: Vec<(u32, u32)> = match &self.asks {
            KeyKind::Prefixes => index.locate_prefixes(&self.strings),
            KeyKind::Keys => index.locate_keys(&self.strings, None),
            KeyKind::Ranges(ends) => (0..self.strings.len())
                .flat_map(|i| {
                    let start = Bound::Included(self.strings.value(i));
                    let blocks = index.locate_range(start, Bound::Excluded(ends.value(i)));
                    blocks.map(move |block| (i as u32, block))
                })
                .collect(),
        };
        let visible = located.into_iter().filter(|&(_, b)| index.block_epochs(b).0 <= as_of);
        visible.map(|(string, block)| (self.first + string as usize, block)).collect()
    }

    /// The blocks that may answer, ascending.
    fn blocks(&self, index: &RunIndex, as_of: Epoch) -> Vec<u32> {
        let mut blocks: Vec<u32> = self.located(index, as_of).into_iter().map(|l| l.1).collect();
        blocks.sort_unstable();
        blocks.dedup();
        blocks
    }

    fn sorted(&self, blocks: impl Iterator<Item = Arc<Block>>) -> Sorted {
        Sorted {
            batches: blocks.map(|b| b.entries.clone()).collect(),
            private: self.early.is_some(),
            rank: self.early.unwrap_or_else(|| rank_of(self.run.meta())),
        }
    }
}

fn rank_of(run: &RunMeta) -> u64 {
    rank(run.level, run.sequence)
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
    shared: &Arc<Shared>,
    table: &TableVersion,
    early: &[EarlyRun],
    as_of: Epoch,
    question: &LookupRequest,
) -> Result<Probe> {
    if let LookupRequest::Prefixes(asked, _) = question {
        shared.prefixes(table.desc.id).note(asked);
    }
    let visible = table.disk.iter().filter(|r| Epoch(r.meta().min_epoch) <= as_of);
    let visible = visible.map(|run| (run, None));
    let mut visible = visible.chain(early.iter().map(|(run, rank)| (run, Some(*rank)))).peekable();
    if visible.peek().is_none() || question.strings().is_empty() {
        return Ok(Probe::Ready(Vec::new()));
    }
    let asks = match question {
        LookupRequest::Keys(_) => KeyKind::Keys,
        LookupRequest::Prefixes(..) => KeyKind::Prefixes,
        LookupRequest::Ranges { ends, .. } => KeyKind::Ranges(ends.clone()),
    };
    let asked = SortedKeys::new(question)?;
    let targets: Vec<Target> =
        visible.filter_map(|(run, early)| Target::of(run, early, &asked.sorted, &asks)).collect();
    match probe_memory(shared, &targets, as_of) {
        Some(found) => Ok(Probe::Ready(found)),
        None => Ok(Probe::Fetch(Fetch { shared: Arc::clone(shared), asked, targets, as_of })),
    }
}

/// All blocks that matter, if all are decoded in memory and not so many that the answer should come in parts.
fn probe_memory(shared: &Shared, targets: &[Target], as_of: Epoch) -> Option<Vec<Sorted>> {
    let cache: &BlockCache = &shared.cache;
    let mut bytes = 0;
    let indexes: Option<Vec<Arc<RunIndex>>> =
        targets.iter().map(|t| cache.try_index(&t.run)).collect();
    let one = |(target, index): (&Target, Arc<RunIndex>)| {
        let blocks: Option<Vec<Arc<Block>>> = target
            .blocks(&index, as_of)
            .into_iter()
            .map(|b| {
                let block = cache.try_get(&target.run, &index, b)?;
                bytes += block.memory;
                (bytes <= shared.options.lookup_bytes).then_some(block)
            })
            .collect();
        Some(target.sorted(blocks?.into_iter()))
    };
    targets.iter().zip(indexes?).map(one).collect()
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
        let options = match mode {
            Mode::Compact { .. } => ReadOptions::COMPACTION,
            _ => {
                let fill_cache = run.meta().length <= SMALL_RUN_BYTES;
                ReadOptions { fill_cache, ..ReadOptions::SCAN }
            }
        };
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
