//! The reading half of the cache: from leads (reads we must make) to answers.

use std::collections::BTreeMap;
use std::hash::Hash;
use std::sync::Arc;

use bytes::Bytes;
use futures::stream::{FuturesUnordered, StreamExt};
use millrace_common::task;
use object_store::path::Path;

use super::attempts::RangeRead;
use super::flights::Promise;
use super::scheduler::queues::Owner;
use super::{
    BlockCache, BlockKey, BlockRequest, Counters, Piece, PlannedRead, Priority, ReadOptions, plan,
};
use crate::block::Block;
use crate::error::Result;
use crate::run::{RunIndex, RunReader};

/// A block that this caller must read.
pub(super) struct Lead {
    pub request: BlockRequest,
    pub key: BlockKey,
    pub promise: Promise<BlockKey, Arc<Block>>,
}

/// An index that this caller must read.
pub(super) struct IndexLead {
    pub run: Arc<RunReader>,
    pub promise: Promise<u64, Arc<RunIndex>>,
}

impl BlockCache {
    pub(super) fn start_block_reads(self: &Arc<Self>, leads: Vec<Lead>, options: ReadOptions) {
        if leads.is_empty() {
            return;
        }
        let (on_disk, remote): (Vec<Lead>, Vec<Lead>) = match self.disk.get() {
            Some(disk) => leads.into_iter().partition(|l| disk.may_contain(&l.key)),
            None => (Vec::new(), leads),
        };
        if !remote.is_empty() {
            Counters::add(&self.counters.rounds, 1);
            self.read_blocks_remotely(remote, options);
        }
        if !on_disk.is_empty() {
            let cache = Arc::clone(self);
            self.spawn(async move { cache.read_blocks_from_disk(on_disk, options).await });
        }
    }

    fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        match &self.options.runtime {
            Some(runtime) => drop(task::spawn_on(runtime, "read blocks", work)),
            None => drop(task::spawn("read blocks", work)),
        }
    }

    /// Answers what the disk tier has; the rest goes to the store.
    async fn read_blocks_from_disk(self: Arc<Self>, leads: Vec<Lead>, options: ReadOptions) {
        let mut reads: FuturesUnordered<_> =
            leads.into_iter().map(|lead| self.read_block_from_disk(lead)).collect();
        let mut missing = Vec::new();
        while let Some((lead, block)) = reads.next().await {
            match block {
                Some(block) => {
                    Counters::add(&self.counters.disk_hits, 1);
                    self.answer(lead, Ok(block), options);
                }
                None => missing.push(lead),
            }
        }
        if !missing.is_empty() {
            Counters::add(&self.counters.rounds, 1);
            self.read_blocks_remotely(missing, options);
        }
    }

    async fn read_block_from_disk(&self, lead: Lead) -> (Lead, Option<Arc<Block>>) {
        let Some(disk) = self.disk.get() else { return (lead, None) };
        let Some(bytes) = disk.get(&lead.key).await else { return (lead, None) };
        let BlockRequest { run, index, block } = &lead.request;
        match run.decode_block(index, *block, &bytes) {
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
    fn read_blocks_remotely(self: &Arc<Self>, leads: Vec<Lead>, options: ReadOptions) {
        let ranges = leads.iter().map(|l| {
            let BlockRequest { run, index, block } = &l.request;
            (run.path(), run.block_range(index, *block))
        });
        let owner = leads.first().map_or(0, |l| self.owner_of(&l.request.run));
        for (path, read, mut members) in self.plan_reads(ranges).assign(leads) {
            let cache = Arc::clone(self);
            self.spawn(async move {
                let wanted = || wanted(members.iter_mut().map(|l| &mut l.promise));
                let bytes = cache.read(&path, &read, options.priority, owner, wanted).await;
                let Some(bytes) = bytes.transpose() else { return };
                for (piece, lead) in read.pieces.iter().zip(members) {
                    let block = match &bytes {
                        Ok(bytes) => {
                            cache.take_block(&lead, &bytes.slice(read.within(piece)), options)
                        }
                        Err(e) => Err(e.clone()),
                    };
                    cache.answer(lead, block, options);
                }
            });
        }
    }

    /// Decodes a block read from the store and passes its bytes to the disk tier.
    fn take_block(&self, lead: &Lead, bytes: &Bytes, options: ReadOptions) -> Result<Arc<Block>> {
        let BlockRequest { run, index, block } = &lead.request;
        let decoded = run.decode_block(index, *block, bytes)?;
        if options.fill_cache
            && let Some(disk) = self.disk.get()
        {
            disk.insert(lead.key, Bytes::copy_from_slice(bytes));
        }
        Ok(Arc::new(decoded))
    }

    fn answer(&self, lead: Lead, block: Result<Arc<Block>>, options: ReadOptions) {
        if options.fill_cache
            && let Ok(block) = &block
        {
            self.memory.insert(lead.key, Arc::clone(block));
        }
        lead.promise.answer(block);
    }

    pub(super) fn start_index_reads(self: &Arc<Self>, leads: Vec<IndexLead>, priority: Priority) {
        if leads.is_empty() {
            return;
        }
        Counters::add(&self.counters.rounds, 1);
        let ranges = leads.iter().map(|l| (l.run.path(), l.run.meta_range()));
        let owner = leads.first().map_or(0, |l| self.owner_of(&l.run));
        for (path, read, mut members) in self.plan_reads(ranges).assign(leads) {
            let cache = Arc::clone(self);
            self.spawn(async move {
                let wanted = || wanted(members.iter_mut().map(|l| &mut l.promise));
                let bytes = cache.read(&path, &read, priority, owner, wanted).await;
                let Some(bytes) = bytes.transpose() else { return };
                for (piece, lead) in read.pieces.iter().zip(members) {
                    let index = match &bytes {
                        // Copied: filter and keys are windows that outlive the read.
                        Ok(bytes) => lead
                            .run
                            .parse_index(&Bytes::copy_from_slice(&bytes[read.within(piece)])),
                        Err(e) => Err(e.clone()),
                    };
                    let index = index.map(Arc::new);
                    if let Ok(index) = &index {
                        cache.indexes.insert(lead.run.meta().run_id, Arc::clone(index));
                    }
                    lead.promise.answer(index);
                }
            });
        }
    }

    fn plan_reads<'a>(
        &self,
        ranges: impl Iterator<Item = (&'a Path, std::ops::Range<u64>)>,
    ) -> ReadPlan {
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

    /// One ranged read, when the scheduler lets it start; `None`: nobody waits for it any longer.
    async fn read(
        &self,
        path: &Path,
        read: &PlannedRead,
        priority: Priority,
        owner: Owner,
        is_wanted: impl FnMut() -> bool,
    ) -> Result<Option<Bytes>> {
        let range = RangeRead { path, range: read.range.clone(), priority, owner };
        self.read_range(&range, is_wanted).await
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
