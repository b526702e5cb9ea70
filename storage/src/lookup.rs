//! Batched reads by key and by prefix over sorted sources in memory: memtables, memory runs, and the
//! blocks that a lookup has fetched. The questions are sorted once and walked together with every
//! source; what is found is consolidated once and gathered once.

use std::cmp::Ordering;
use std::sync::Arc;

use arrow::array::{Array, BinaryArray, Int64Array, UInt32Array};
use arrow::datatypes::SchemaRef;
use millrace_common::Epoch;
use millrace_rpc::catalog::RowStorage;

use crate::block::Entries;
use crate::entry::{Found, Gather};
use crate::error::StorageError;
use crate::ttl_filter::Retain;

/// Sorted batches of one memtable, memory run or disk run (all of it, or the blocks that matter).
#[derive(Clone, Debug)]
pub(crate) struct Sorted {
    pub batches: Arc<[Entries]>,
    /// Not published yet: newer than every epoch.
    pub private: bool,
    pub rank: u64,
}

impl Sorted {
    fn epoch(&self, batch: usize, row: usize) -> Epoch {
        if self.private { Epoch::MAX } else { self.batches[batch].epochs.at(row) }
    }

    fn key(&self, at: (usize, usize)) -> &[u8] {
        self.batches[at.0].keys.value(at.1)
    }

    /// The first position, from batch `from` on, whose key is not below `key`.
    fn seek(&self, key: &[u8], from: (usize, usize)) -> Option<(usize, usize)> {
        let rest = &self.batches[from.0..];
        let skip = match rest.first() {
            None => return None,
            Some(b) if !ends_below(b, key) => 0,
            Some(_) => rest.partition_point(|b| ends_below(b, key)),
        };
        let at = from.0 + skip;
        let batch = self.batches.get(at)?;
        Some((at, batch.lower_bound(key, if skip == 0 { from.1 } else { 0 })))
    }

    fn next(&self, (batch, row): (usize, usize)) -> Option<(usize, usize)> {
        if row + 1 < self.batches[batch].len() {
            return Some((batch, row + 1));
        }
        let skip = self.batches[batch + 1..].iter().position(|b| !b.is_empty())?;
        Some((batch + 1 + skip, 0))
    }
}

/// Whether all of a batch is below a key.
fn ends_below(batch: &Entries, key: &[u8]) -> bool {
    batch.is_empty() || batch.keys.value(batch.len() - 1) < key
}

/// Decides between entries of a key: epoch, then rank. The larger was written later.
pub(crate) type Recency = (Epoch, u64);

/// An entry that was found.
#[derive(Clone, Copy, Debug)]
struct Hit {
    input: u32,
    source: u32,
    batch: u32,
    row: u32,
    weight: i64,
    epoch: Epoch,
    rank: u64,
}

/// Answers over a fixed set of sources.
#[derive(Clone)]
pub(crate) struct Lookups {
    pub storage: RowStorage,
    /// Of values, as the table declares it.
    pub schema: SchemaRef,
    pub as_of: Epoch,
    /// Of what exists, only what it keeps is found, and counts for limits. `None`: all.
    pub retain: Option<Retain>,
    pub sources: Vec<Sorted>,
}

impl Lookups {
    /// The current entry of every key.
    pub fn get(&self, keys: &BinaryArray) -> Result<Found, StorageError> {
        let order = sorted_order(keys);
        let mut hits = Vec::new();
        for source in 0..self.sources.len() {
            self.collect(source, keys, &order, &mut hits);
        }
        hits.sort_unstable_by_key(|h| (h.input, h.epoch, h.rank));
        let mut out = Picked::default();
        let mut rest = &hits[..];
        while let Some(first) = rest.first() {
            let n = rest.iter().take_while(|h| h.input == first.input).count();
            self.consolidate(&rest[..n], &mut out);
            rest = &rest[n..];
        }
        out.finish(self)
    }

    /// How recent the current entry of every key is, deletes included. Keys ascend.
    pub fn newest(&self, keys: &BinaryArray) -> Vec<Option<Recency>> {
        let order: Vec<u32> = (0..keys.len() as u32).collect();
        let mut hits = Vec::new();
        for source in 0..self.sources.len() {
            self.collect(source, keys, &order, &mut hits);
        }
        let mut newest = vec![None; keys.len()];
        for hit in hits {
            let known: &mut Option<Recency> = &mut newest[hit.input as usize];
            *known = (*known).max(Some((hit.epoch, hit.rank)));
        }
        newest
    }

    fn collect(&self, source: usize, keys: &BinaryArray, order: &[u32], hits: &mut Vec<Hit>) {
        let sorted = &self.sources[source];
        let mut at = (0, 0);
        for &input in order {
            let key = keys.value(input as usize);
            let Some(found) = sorted.seek(key, at) else { return };
            at = found;
            let mut entry = Some(found);
            while let Some(e) = entry.filter(|&e| sorted.key(e) == key) {
                hits.extend(self.hit(input, source, e));
                entry = sorted.next(e);
            }
        }
    }

    fn hit(&self, input: u32, source: usize, (batch, row): (usize, usize)) -> Option<Hit> {
        let sorted = &self.sources[source];
        let epoch = sorted.epoch(batch, row);
        (epoch <= self.as_of).then(|| Hit {
            input,
            source: source as u32,
            batch: batch as u32,
            row: row as u32,
            weight: sorted.batches[batch].weight(row),
            epoch,
            rank: sorted.rank,
        })
    }

    /// The entries that exist under each prefix, at most `limit` a prefix: fewer are all.
    pub fn scan(
        &self,
        prefixes: &BinaryArray,
        limit: Option<usize>,
    ) -> Result<Found, StorageError> {
        let mut out = Picked::default();
        for input in 0..prefixes.len() {
            let prefix = prefixes.value(input);
            self.scan_from(input as u32, prefix, |k| k.starts_with(prefix), limit, &mut out);
        }
        out.finish(self)
    }

    /// The entries that exist with start ≤ key < end, at most `limit` a range: fewer are all.
    pub fn ranges(
        &self,
        starts: &BinaryArray,
        ends: &BinaryArray,
        limit: Option<usize>,
    ) -> Result<Found, StorageError> {
        let mut out = Picked::default();
        for input in 0..starts.len() {
            let (start, end) = (starts.value(input), ends.value(input));
            self.scan_from(input as u32, start, |k| k < end, limit, &mut out);
        }
        out.finish(self)
    }

    /// The entries from `start` on for as long as they are `inside`.
    fn scan_from(
        &self,
        input: u32,
        start: &[u8],
        inside: impl Fn(&[u8]) -> bool,
        limit: Option<usize>,
        out: &mut Picked,
    ) {
        let inside = |source: usize, at: Option<(usize, usize)>| {
            at.filter(|&at| inside(self.sources[source].key(at)))
        };
        let mut cursors: Vec<(usize, (usize, usize))> = (0..self.sources.len())
            .filter_map(|s| Some((s, inside(s, self.sources[s].seek(start, (0, 0)))?)))
            .collect();
        let end = limit.map_or(usize::MAX, |l| out.picks.len().saturating_add(l));
        let mut group: Vec<Hit> = Vec::new();
        while out.picks.len() < end {
            let least = (0..cursors.len()).min_by(|&a, &b| self.compare(cursors[a], cursors[b]));
            let next = least.map(|c| cursors[c]);
            if let (Some(last), Some((source, at))) = (group.last(), next)
                && self.key_of(last) == self.sources[source].key(at)
            {
            } else {
                self.consolidate(&group, out);
                group.clear();
            }
            let (Some(c), Some((source, at))) = (least, next) else { break };
            group.extend(self.hit(input, source, at));
            match inside(source, self.sources[source].next(at)) {
                Some(at) => cursors[c].1 = at,
                None => {
                    cursors.swap_remove(c);
                }
            }
        }
    }

    /// Finds what the entries of one key, oldest first, come to.
    fn consolidate(&self, hits: &[Hit], out: &mut Picked) {
        let Some(last) = hits.last() else { return };
        let weight = match self.storage {
            RowStorage::Multiset => hits.iter().fold(0i64, |sum, h| sum.wrapping_add(h.weight)),
            RowStorage::Keyed | RowStorage::Append => last.weight,
        };
        let (source, batch, row) = (last.source as usize, last.batch as usize, last.row as usize);
        let is_kept = |retain: &Retain| retain.keeps(&self.sources[source].batches[batch], row);
        if weight > 0 && self.retain.as_ref().is_none_or(is_kept) {
            out.inputs.push(last.input);
            out.picks.push((source, batch, row));
            out.weights.push(weight);
        }
    }

    fn key_of(&self, hit: &Hit) -> &[u8] {
        self.sources[hit.source as usize].key((hit.batch as usize, hit.row as usize))
    }

    fn compare(&self, a: (usize, (usize, usize)), b: (usize, (usize, usize))) -> Ordering {
        let (x, y) = (&self.sources[a.0], &self.sources[b.0]);
        x.key(a.1)
            .cmp(y.key(b.1))
            .then_with(|| x.epoch(a.1.0, a.1.1).cmp(&y.epoch(b.1.0, b.1.1)))
            .then_with(|| x.rank.cmp(&y.rank))
    }
}

/// Rows of the answer.
#[derive(Default)]
struct Picked {
    inputs: Vec<u32>,
    picks: Vec<(usize, usize, usize)>,
    weights: Vec<i64>,
}

impl Picked {
    fn finish(self, lookups: &Lookups) -> Result<Found, StorageError> {
        // Only batches that answered something take part in the gather.
        let mut used: Vec<(usize, usize)> = self.picks.iter().map(|p| (p.0, p.1)).collect();
        used.sort_unstable();
        used.dedup();
        let picks: Vec<(usize, usize)> =
            self.picks.iter().map(|p| (used.partition_point(|u| *u < (p.0, p.1)), p.2)).collect();
        let batches: Vec<Entries> =
            used.iter().map(|&(s, b)| lookups.sources[s].batches[b].clone()).collect();
        let gather = Gather::new(&picks);
        Ok(Found {
            input: UInt32Array::from(self.inputs),
            keys: gather.keys(&batches)?,
            weights: Int64Array::from(self.weights),
            values: gather.values(&lookups.schema, &batches)?,
        })
    }
}

/// The positions of keys in key order.
pub(crate) fn sorted_order(keys: &BinaryArray) -> Vec<u32> {
    let mut order: Vec<u32> = (0..keys.len() as u32).collect();
    let key = |i: u32| keys.value(i as usize);
    if !order.windows(2).all(|w| key(w[0]) <= key(w[1])) {
        order.sort_unstable_by(|&a, &b| key(a).cmp(key(b)).then(a.cmp(&b)));
    }
    order
}
