//! The reading half of the cache: from requests to answers, over memory, disk tier and store.
//!
//! Blocks, partitions of indexes, and what opens a run are read in the same way: each is a [`Unit`].

use std::collections::BTreeMap;
use std::hash::Hash;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use foyer::Cache;
use futures::future::try_join_all;
use futures::stream::{FuturesUnordered, StreamExt};
use millrace_common::task;
use object_store::path::Path;
use tracing::Instrument;

use super::attempts::RangeRead;
use super::flights::{Flights, Joined, Promise, Wait};
use super::scheduler::Urgency;
use super::stats::Counters;
use super::{
    BlockCache, BlockKey, BlockRequest, PartitionRequest, Piece, PlannedRead, ReadOptions,
    block_key, opening_key, partition_key, plan,
};
use crate::block::Block;
use crate::error::Result;
use crate::run::{RunIndex, RunReader};

/// What is read and kept as a whole.
pub(super) trait Unit: Send + Sync + 'static {
    type Value: Send + Sync + 'static;

    fn run(&self) -> &Arc<RunReader>;

    fn key(&self) -> BlockKey;

    /// Where it lies in the run's object.
    fn range(&self) -> Range<u64>;

    /// Takes it from where no read is needed, if it is there.
    fn at_hand(&self, _: &BlockCache) -> Option<Arc<Self::Value>> {
        None
    }

    /// Checks and decodes it. What it is made of must not keep other bytes alive.
    fn decode(&self, bytes: &Bytes) -> Result<Self::Value>;

    /// Where decoded ones are kept.
    fn memory(cache: &BlockCache) -> &Cache<BlockKey, Arc<Self::Value>>;

    fn flights(cache: &BlockCache) -> &Flights<BlockKey, Arc<Self::Value>>;

    /// Counts what memory has, what is read, and what others read already.
    fn count(counters: &Counters, hits: usize, misses: usize, joined: usize);

    /// Whether the disk tier may have it.
    const ON_DISK: bool;
}

impl Unit for BlockRequest {
    type Value = Block;
    const ON_DISK: bool = true;

    fn run(&self) -> &Arc<RunReader> {
        &self.run
    }

    fn key(&self) -> BlockKey {
        block_key(&self.run, &self.index, self.block)
    }

    fn range(&self) -> Range<u64> {
        self.run.block_range(&self.index, self.block)
    }

    fn decode(&self, bytes: &Bytes) -> Result<Block> {
        self.run.decode_block(&self.index, self.block, bytes)
    }

    fn memory(cache: &BlockCache) -> &Cache<BlockKey, Arc<Block>> {
        &cache.memory
    }

    fn flights(cache: &BlockCache) -> &Flights<BlockKey, Arc<Block>> {
        &cache.block_flights
    }

    fn count(counters: &Counters, hits: usize, misses: usize, joined: usize) {
        Counters::add(&counters.hits, hits);
        Counters::add(&counters.misses, misses);
        Counters::add(&counters.joined, joined);
    }
}

impl Unit for PartitionRequest {
    type Value = RunIndex;
    const ON_DISK: bool = true;

    fn run(&self) -> &Arc<RunReader> {
        &self.run
    }

    fn key(&self) -> BlockKey {
        partition_key(&self.run, &self.top, self.partition)
    }

    fn range(&self) -> Range<u64> {
        self.run.partition_range(&self.top, self.partition)
    }

    fn decode(&self, bytes: &Bytes) -> Result<RunIndex> {
        self.run.parse_partition(&self.top, self.partition, &Bytes::copy_from_slice(bytes))
    }

    fn memory(cache: &BlockCache) -> &Cache<BlockKey, Arc<RunIndex>> {
        &cache.indexes
    }

    fn flights(cache: &BlockCache) -> &Flights<BlockKey, Arc<RunIndex>> {
        &cache.index_flights
    }

    fn count(counters: &Counters, hits: usize, misses: usize, _: usize) {
        Counters::add(&counters.index_hits, hits);
        Counters::add(&counters.index_misses, misses);
    }
}

/// What opens a run: its index with its filter, or its top index.
pub(super) struct Opening(pub Arc<RunReader>);

impl Unit for Opening {
    type Value = RunIndex;
    const ON_DISK: bool = false;

    fn run(&self) -> &Arc<RunReader> {
        &self.0
    }

    fn key(&self) -> BlockKey {
        opening_key(&self.0)
    }

    fn range(&self) -> Range<u64> {
        self.0.meta_range()
    }

    fn at_hand(&self, cache: &BlockCache) -> Option<Arc<RunIndex>> {
        cache.take_described(&self.0)
    }

    fn decode(&self, bytes: &Bytes) -> Result<RunIndex> {
        self.0.parse_index(&Bytes::copy_from_slice(bytes))
    }

    fn memory(cache: &BlockCache) -> &Cache<BlockKey, Arc<RunIndex>> {
        &cache.indexes
    }

    fn flights(cache: &BlockCache) -> &Flights<BlockKey, Arc<RunIndex>> {
        &cache.index_flights
    }

    fn count(counters: &Counters, hits: usize, misses: usize, joined: usize) {
        PartitionRequest::count(counters, hits, misses, joined);
    }
}

/// What was asked of the cache.
pub(crate) enum Answer<V: Clone> {
    Here(V),
    Wait(Wait<V>),
}

impl<V: Clone> Answer<V> {
    pub async fn get(self) -> Result<V> {
        match self {
            Answer::Here(value) => Ok(value),
            Answer::Wait(wait) => wait.get().await,
        }
    }

    /// All answers, in order.
    pub async fn all(answers: Vec<Answer<V>>) -> Result<Vec<V>> {
        try_join_all(answers.into_iter().map(Answer::get)).await
    }
}

/// A unit that this caller must read.
struct Lead<U: Unit> {
    unit: U,
    key: BlockKey,
    promise: Promise<BlockKey, Arc<U::Value>>,
}

impl BlockCache {
    /// Answers from memory, joins reads under way, and begins the others as one round.
    pub(super) fn begin<U: Unit>(
        self: &Arc<Self>,
        units: Vec<U>,
        options: ReadOptions,
    ) -> Vec<Answer<Arc<U::Value>>> {
        let look = |key: &BlockKey| U::memory(self).get(key).map(|e| Arc::clone(e.value()));
        let mut answers = Vec::with_capacity(units.len());
        let mut leads: Vec<Lead<U>> = Vec::new();
        let mut joined = 0;
        for unit in units {
            let key = unit.key();
            if let Some(value) = look(&key).or_else(|| unit.at_hand(self)) {
                answers.push(Answer::Here(value));
                continue;
            }
            answers.push(match U::flights(self).join(&key, options.priority, || look(&key)) {
                Joined::Here(value) => Answer::Here(value),
                Joined::Follow(wait, less_urgent) => {
                    joined += 1;
                    if let Some(urgency) = less_urgent {
                        self.scheduler.raise(&urgency, options.priority, options.deadline);
                    }
                    Answer::Wait(wait)
                }
                Joined::Lead(promise, wait) => {
                    leads.push(Lead { unit, key, promise });
                    Answer::Wait(wait)
                }
            });
        }
        let hits = answers.len() - leads.len() - joined;
        U::count(&self.counters, hits, leads.len(), joined);
        self.start_reads(leads, options);
        answers
    }

    fn start_reads<U: Unit>(self: &Arc<Self>, leads: Vec<Lead<U>>, options: ReadOptions) {
        if leads.is_empty() {
            return;
        }
        if let Some(bytes) = &options.bytes {
            let all =
                leads.iter().map(|lead| lead.unit.range()).map(|range| range.end - range.start);
            bytes.fetch_add(all.sum(), Ordering::Relaxed);
        }
        let (on_disk, remote): (Vec<Lead<U>>, Vec<Lead<U>>) = match self.disk.get() {
            Some(disk) if U::ON_DISK => leads.into_iter().partition(|l| disk.may_contain(&l.key)),
            _ => (Vec::new(), leads),
        };
        self.read_remotely(remote, options.clone());
        if !on_disk.is_empty() {
            let cache = Arc::clone(self);
            self.spawn(async move { cache.read_from_disk(on_disk, options).await });
        }
    }

    /// What is logged of the work is logged with the request that has caused it.
    fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        let work = work.in_current_span();
        match &self.options.runtime {
            Some(runtime) => drop(task::spawn_on(runtime, "read blocks", work)),
            None => drop(task::spawn("read blocks", work)),
        }
    }

    /// Answers what the disk tier has; the rest goes to the store.
    async fn read_from_disk<U: Unit>(self: Arc<Self>, leads: Vec<Lead<U>>, options: ReadOptions) {
        let mut reads: FuturesUnordered<_> =
            leads.into_iter().map(|lead| self.read_one_from_disk(lead)).collect();
        let mut missing = Vec::new();
        while let Some((lead, value)) = reads.next().await {
            match value {
                Some(value) => {
                    Counters::add(&self.counters.disk_hits, 1);
                    self.answer(lead, Ok(value), options.fill_cache);
                }
                None => missing.push(lead),
            }
        }
        self.read_remotely(missing, options);
    }

    async fn read_one_from_disk<U: Unit>(&self, lead: Lead<U>) -> (Lead<U>, Option<Arc<U::Value>>) {
        let Some(disk) = self.disk.get() else { return (lead, None) };
        let Some(bytes) = disk.get(&lead.key).await else { return (lead, None) };
        match lead.unit.decode(&bytes) {
            Ok(decoded) => (lead, Some(Arc::new(decoded))),
            Err(e) => {
                tracing::warn!(error = %e, "a damaged entry of the disk cache is read from the store instead");
                Counters::add(&self.counters.disk_damaged, 1);
                disk.remove(&lead.key);
                (lead, None)
            }
        }
    }

    /// Plans ranged reads and starts them, each a task of its own (they decode in parallel).
    fn read_remotely<U: Unit>(self: &Arc<Self>, leads: Vec<Lead<U>>, options: ReadOptions) {
        let Some(first) = leads.first() else { return };
        Counters::add(&self.counters.rounds, 1);
        let owner = self.owner_of(first.unit.run());
        let ranges = leads.iter().map(|l| (l.unit.run().path(), l.unit.range()));
        let planned = self.plan_reads(ranges).assign(leads);
        if let Some(requests) = &options.requests {
            requests.fetch_add(planned.len() as u64, Ordering::Relaxed);
        }
        let keep = options.fill_cache;
        for (path, read, mut members) in planned {
            let urgency = Urgency::new(options.priority, options.deadline);
            for joined in members.iter().filter_map(|l| l.promise.attach(&urgency)) {
                self.scheduler.raise(&urgency, joined, None);
            }
            let cache = Arc::clone(self);
            self.spawn(async move {
                let range = RangeRead { path: &path, range: read.range.clone(), urgency, owner };
                let wanted = || wanted(members.iter_mut().map(|l| &mut l.promise));
                let bytes = cache.read_range(&range, wanted).await;
                let Some(bytes) = bytes.transpose() else { return };
                for (piece, lead) in read.pieces.iter().zip(members) {
                    let value = match &bytes {
                        Ok(bytes) => cache.take(&lead, &bytes.slice(read.within(piece)), keep),
                        Err(e) => Err(e.clone()),
                    };
                    cache.answer(lead, value, keep);
                }
            });
        }
    }

    /// Decodes what was read from the store and passes its bytes to the disk tier.
    fn take<U: Unit>(&self, lead: &Lead<U>, bytes: &Bytes, keep: bool) -> Result<Arc<U::Value>> {
        let decoded = lead.unit.decode(bytes)?;
        if keep
            && U::ON_DISK
            && let Some(disk) = self.disk.get()
        {
            disk.offer_read(lead.key, bytes, self.options.env.now());
        }
        Ok(Arc::new(decoded))
    }

    fn answer<U: Unit>(&self, lead: Lead<U>, value: Result<Arc<U::Value>>, keep: bool) {
        if keep && let Ok(value) = &value {
            U::memory(self).insert(lead.key, Arc::clone(value));
        }
        lead.promise.answer(value);
    }

    fn plan_reads<'a>(&self, ranges: impl Iterator<Item = (&'a Path, Range<u64>)>) -> ReadPlan {
        let mut objects: BTreeMap<&Path, Vec<Piece>> = BTreeMap::new();
        for (tag, (path, range)) in ranges.enumerate() {
            objects.entry(path).or_default().push(Piece { range, tag });
        }
        let reads = objects.into_iter().flat_map(|(path, pieces)| {
            plan(pieces, self.options.join_gap, self.options.max_read_bytes)
                .into_iter()
                .map(|read| (path.clone(), read))
        });
        ReadPlan { reads: reads.collect() }
    }
}

/// Whether somebody waits for one of these; all are asked, so that those nobody waits for end.
fn wanted<'a, K, V>(promises: impl Iterator<Item = &'a mut Promise<K, V>>) -> bool
where
    K: Hash + Eq + Clone + 'a,
    V: Clone + 'a,
{
    promises.map(|promise| usize::from(promise.is_wanted())).sum::<usize>() > 0
}

struct ReadPlan {
    reads: Vec<(Path, PlannedRead)>,
}

impl ReadPlan {
    /// Gives each planned read the leads of its pieces, in the pieces' order.
    fn assign<L>(self, leads: Vec<L>) -> Vec<(Path, PlannedRead, Vec<L>)> {
        let mut leads: Vec<Option<L>> = leads.into_iter().map(Some).collect();
        self.reads
            .into_iter()
            .map(|(path, read)| {
                let members = read.pieces.iter().filter_map(|p| leads[p.tag].take()).collect();
                (path, read, members)
            })
            .collect()
    }
}
