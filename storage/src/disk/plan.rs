//! Which blocks may answer the strings of a lookup, and in what order they are asked.
//!
//! Of the entries of a key, the one with the largest [`Recency`] that the lookup sees decides. The index of a run
//! bounds the recency of each of its blocks. So what was found is final as soon as no block that may hold the key and
//! was not looked at reaches its recency: no rule about levels or the order of flushes is needed.

use std::cmp::Reverse;
use std::ops::{Bound, Range};
use std::sync::Arc;

use arrow::array::{Array, AsArray, BinaryArray, UInt32Array};
use arrow::compute;
use millrace_common::Epoch;

use super::rank_of;
use crate::block::Block;
use crate::cache::BlockCache;
use crate::error::Result;
use crate::lookup::{Recency, Sorted, sorted_order};
use crate::run::{RunIndex, RunReader};
use crate::writer::LookupRequest;

/// The strings of a question in order, and which of them each one is.
pub(super) struct SortedKeys {
    pub sorted: BinaryArray,
    /// Positions in the question; `None`: it was in order.
    order: Option<Vec<u32>>,
}

impl SortedKeys {
    pub fn new(question: &LookupRequest) -> Result<SortedKeys> {
        let strings = question.strings();
        if matches!(question, LookupRequest::Ranges { .. }) {
            return Ok(SortedKeys { sorted: strings.clone(), order: None });
        }
        let order = sorted_order(strings);
        if order.iter().enumerate().all(|(i, &o)| i == o as usize) {
            return Ok(SortedKeys { sorted: strings.clone(), order: None });
        }
        Ok(SortedKeys { sorted: pick(strings, &order)?, order: Some(order) })
    }

    pub fn len(&self) -> usize {
        self.sorted.len()
    }

    /// The question of some of the sorted strings, which ascend.
    pub fn part(&self, question: &LookupRequest, strings: &[u32]) -> Result<LookupRequest> {
        let sorted = pick(&self.sorted, strings)?;
        Ok(match question {
            LookupRequest::Keys(_) => LookupRequest::Keys(sorted),
            LookupRequest::Prefixes(_, limit) => LookupRequest::Prefixes(sorted, *limit),
            LookupRequest::Ranges { ends, limit, .. } => {
                let ends = pick(ends, strings)?;
                LookupRequest::Ranges { starts: sorted, ends, limit: *limit }
            }
        })
    }

    /// Which strings of the question these sorted ones are.
    pub fn positions(&self, strings: &[u32]) -> Vec<u32> {
        match &self.order {
            None => strings.to_vec(),
            Some(order) => strings.iter().map(|&s| order[s as usize]).collect(),
        }
    }
}

/// The strings at these positions.
fn pick(strings: &BinaryArray, at: &[u32]) -> Result<BinaryArray> {
    if let Some(&first) = at.first()
        && at.iter().enumerate().all(|(i, &a)| a as usize == first as usize + i)
    {
        return Ok(strings.slice(first as usize, at.len()));
    }
    let at = UInt32Array::from(at.to_vec());
    Ok(compute::take(strings, &at, None)?.as_binary::<i32>().clone())
}

/// What the strings of a question are.
#[derive(Clone, Debug)]
enum KeyKind {
    Keys,
    Prefixes,
    /// Starts; these are the ends.
    Ranges(BinaryArray),
}

/// The part of a question that a run, or a partition of one, may answer.
pub(super) struct Target {
    pub run: Arc<RunReader>,
    /// The run's top index and one of its partitions; `None`: the run is not open, or has none.
    pub partition: Option<(Arc<RunIndex>, u32)>,
    /// Its rank among what one writer holds, where no version names the run.
    early: Option<u64>,
    /// Positions of `strings` among the sorted strings.
    positions: Vec<u32>,
    strings: BinaryArray,
    asks: KeyKind,
}

impl Target {
    /// The part of a question, whose strings `sorted` are, that lies between the run's keys.
    pub fn of(
        run: &Arc<RunReader>,
        early: Option<u64>,
        sorted: &BinaryArray,
        question: &LookupRequest,
    ) -> Option<Target> {
        let meta = run.meta();
        let end = partition(sorted, |s| s <= &meta.max_key[..]);
        let start = match question {
            LookupRequest::Ranges { ends, .. } => partition(ends, |e| e <= &meta.min_key[..]),
            LookupRequest::Keys(_) => partition(sorted, |s| s < &meta.min_key[..]),
            // A prefix of the smallest key is below it and still matches; none is shorter than `shortest`.
            LookupRequest::Prefixes(..) => {
                let shortest = (0..sorted.len()).map(|i| sorted.value(i).len()).min().unwrap_or(0);
                partition(sorted, |s| s < &meta.min_key[..shortest.min(meta.min_key.len())])
            }
        };
        let asks = |count: usize| match question {
            LookupRequest::Ranges { ends, .. } => KeyKind::Ranges(ends.slice(start, count)),
            LookupRequest::Keys(_) => KeyKind::Keys,
            LookupRequest::Prefixes(..) => KeyKind::Prefixes,
        };
        (start < end).then(|| Target {
            run: Arc::clone(run),
            partition: None,
            early,
            positions: (start as u32..end as u32).collect(),
            strings: sorted.slice(start, end - start),
            asks: asks(end - start),
        })
    }

    /// Without the strings of which something newer than all of the run was found already; `None`: these are all.
    pub fn not_older_than(self, found: &[Option<Recency>], as_of: Epoch) -> Result<Option<Target>> {
        let newest = self.recency(self.epochs().1.min(as_of));
        let stays = |&i: &u32| found[self.positions[i as usize] as usize] <= Some(newest);
        let stay: Vec<u32> = (0..self.positions.len() as u32).filter(stays).collect();
        if stay.is_empty() || stay.len() == self.positions.len() {
            return Ok((!stay.is_empty()).then_some(self));
        }
        self.part(&stay, self.partition.clone()).map(Some)
    }

    /// With some of the strings only, which ascend.
    fn part(&self, at: &[u32], partition: Option<(Arc<RunIndex>, u32)>) -> Result<Target> {
        let asks = match &self.asks {
            KeyKind::Ranges(ends) => KeyKind::Ranges(pick(ends, at)?),
            other => other.clone(),
        };
        Ok(Target {
            run: Arc::clone(&self.run),
            partition,
            early: self.early,
            positions: at.iter().map(|&i| self.positions[i as usize]).collect(),
            strings: pick(&self.strings, at)?,
            asks,
        })
    }

    /// The target with its index, or its parts with theirs where `opened` is a top index; `None`: not in memory.
    pub fn resolve(
        self,
        opened: Option<Arc<RunIndex>>,
        cache: &BlockCache,
        as_of: Epoch,
    ) -> Result<Vec<(Target, Option<Arc<RunIndex>>)>> {
        let Some(top) = opened.as_ref().filter(|index| index.is_top()) else {
            return Ok(vec![(self, opened)]);
        };
        let located = self.located(top, as_of).map(|(string, at)| (at, string as u32));
        let mut located: Vec<(u32, u32)> = located.collect();
        located.sort_unstable();
        let parts = located.chunk_by(|a, b| a.0 == b.0).map(|of_partition| {
            let partition = of_partition[0].0;
            let at: Vec<u32> = of_partition.iter().map(|l| l.1).collect();
            let index = cache.try_partition(&self.run, top, partition);
            Ok((self.part(&at, Some((Arc::clone(top), partition)))?, index))
        });
        parts.collect()
    }

    /// Smallest and largest epoch of its entries.
    fn epochs(&self) -> (Epoch, Epoch) {
        let meta = self.run.meta();
        match &self.partition {
            Some((top, partition)) => top.block_epochs(*partition),
            None => (Epoch(meta.min_epoch), Epoch(meta.max_epoch)),
        }
    }

    /// Whether both are of one run.
    pub fn shares_run(&self, other: &Target) -> bool {
        Arc::ptr_eq(&self.run, &other.run)
    }

    /// No version names the run.
    pub fn is_early(&self) -> bool {
        self.early.is_some()
    }

    /// The recency of an entry of this run. What no version names yet is newer than all that has an epoch.
    pub fn recency(&self, epoch: Epoch) -> Recency {
        match self.early {
            Some(rank) => (Epoch::MAX, rank),
            None => (epoch, rank_of(self.run.meta())),
        }
    }

    /// The blocks that may answer: (position in `strings`, block).
    fn located(&self, index: &RunIndex, as_of: Epoch) -> impl Iterator<Item = (usize, u32)> {
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
        let visible = located.into_iter().filter(move |&(_, b)| index.block_epochs(b).0 <= as_of);
        visible.map(|(string, block)| (string as usize, block))
    }

    /// The blocks that may answer, ascending.
    pub fn blocks(&self, index: &RunIndex, as_of: Epoch) -> Vec<u32> {
        let mut blocks: Vec<u32> = self.located(index, as_of).map(|l| l.1).collect();
        blocks.sort_unstable();
        blocks.dedup();
        blocks
    }

    /// Blocks of the run, in order, as a source of a lookup.
    pub fn sorted<'a>(&self, blocks: impl Iterator<Item = &'a Arc<Block>>) -> Sorted {
        Sorted {
            batches: blocks.map(|b| b.entries.clone()).collect(),
            private: self.early.is_some(),
            rank: self.recency(Epoch::ZERO).1,
        }
    }

    /// What may answer; without an index, something unknown for every string.
    fn candidates(
        &self,
        target: u32,
        index: Option<&RunIndex>,
        as_of: Epoch,
        out: &mut Vec<Candidate>,
    ) {
        let positions = &self.positions;
        let Some(index) = index else {
            let (oldest, newest) = self.epochs();
            let (oldest, newest) = (self.recency(oldest), self.recency(newest.min(as_of)));
            out.extend(positions.iter().map(|&string| Candidate {
                string,
                target,
                block: None,
                oldest,
                newest,
            }));
            return;
        };
        out.extend(self.located(index, as_of).map(|(string, block)| {
            let (oldest, newest) = index.block_epochs(block);
            Candidate {
                string: positions[string],
                target,
                block: Some(block),
                oldest: self.recency(oldest),
                newest: self.recency(newest.min(as_of)),
            }
        }));
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

/// A block of a target.
pub(super) type Place = (u32, u32);

/// A block that may hold entries of a string.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Candidate {
    pub string: u32,
    pub target: u32,
    /// `None`: the index is not in memory.
    pub block: Option<u32>,
    /// Of entries in the block, as far as the lookup sees them.
    pub oldest: Recency,
    pub newest: Recency,
}

impl Candidate {
    pub fn place(&self) -> Option<Place> {
        Some((self.target, self.block?))
    }
}

/// The candidates of all strings, those of a string newest first.
pub(super) struct Plan {
    candidates: Vec<Candidate>,
    /// Where those of each string begin, and the end.
    starts: Vec<u32>,
}

impl Plan {
    /// `strings`: how many there are.
    pub fn new(
        targets: &[Target],
        indexes: &[Option<Arc<RunIndex>>],
        strings: usize,
        as_of: Epoch,
    ) -> Plan {
        let mut candidates = Vec::new();
        for (t, (target, index)) in targets.iter().zip(indexes).enumerate() {
            target.candidates(t as u32, index.as_deref(), as_of, &mut candidates);
        }
        Plan::of(candidates, strings)
    }

    fn of(mut candidates: Vec<Candidate>, strings: usize) -> Plan {
        // Stable: what comes in order, of each target, is merged instead of sorted anew.
        candidates.sort_by_key(|c| (c.string, Reverse(c.newest), c.target, c.block));
        let mut starts = vec![0u32; strings + 1];
        candidates.iter().for_each(|c| starts[c.string as usize + 1] += 1);
        for i in 0..strings {
            starts[i + 1] += starts[i];
        }
        Plan { candidates, starts }
    }

    fn range(&self, string: u32) -> Range<usize> {
        let string = string as usize;
        self.starts[string] as usize..self.starts[string + 1] as usize
    }

    /// Newest first.
    pub fn candidates(&self, string: u32) -> &[Candidate] {
        &self.candidates[self.range(string)]
    }

    /// Whether asking all at once reads few blocks more than asking the newest of each string first: so many, or a few
    /// of a hundred. `found`: of each string, already.
    pub fn is_nearly_all_newest(
        &self,
        strings: impl Iterator<Item = u32>,
        found: impl Fn(u32) -> Option<Recency>,
        few: usize,
    ) -> bool {
        let (mut first, mut all) = (Vec::new(), Vec::new());
        for string in strings {
            let (candidates, found) = (self.candidates(string), found(string));
            let places = |n: usize| candidates[..n].iter().map(|c| (c.target, c.block));
            first.extend(places(to_ask(candidates, found, false)));
            all.extend(places(to_ask(candidates, found, true)));
        }
        let distinct = |places: &mut Vec<_>| {
            places.sort_unstable();
            places.dedup();
            places.len()
        };
        let (first, all) = (distinct(&mut first), distinct(&mut all));
        let more = all - first;
        more <= few || more * MORE_BLOCKS <= first
    }
}

/// One more block than this many is worth less than a dependent round.
const MORE_BLOCKS: usize = 4;

/// How many of the candidates not yet asked, newest first, to ask next, when `found` is the newest entry so far: none
/// when it is final. `all`: all that may hold a newer one; else the first, and those that may hold a newer entry than
/// any it has.
pub(super) fn to_ask(rest: &[Candidate], found: Option<Recency>, all: bool) -> usize {
    let relevant = rest.partition_point(|c| found <= Some(c.newest));
    match rest[..relevant].first() {
        Some(first) if !all => rest[..relevant].partition_point(|c| c.newest >= first.oldest),
        _ => relevant,
    }
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
