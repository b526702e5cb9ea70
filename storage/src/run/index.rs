//! The index and filter of a run, as kept in memory: where its blocks are and what they can hold.
//!
//! The index of a large run has two levels: a top index, whose entries are partitions, and the index and filter of
//! each partition, whose entries are blocks. Both have the same form, and are searched in the same way.

use std::ops::{Bound, Range};

use arrow::array::{Array, BinaryArray};
use bytes::Bytes;
use millrace_common::Epoch;

use crate::filter::{KeyFilter, filter_hash};
use crate::run::{
    FLAG_FILTER, FLAG_TOP, FOOTER_BYTES, INDEX_FIXED, MAGIC, START_BYTES, VERSION, VERSION_TOP,
};

/// The index of a run, of one of its partitions, or the top index of a run that has partitions. Small (about 0.5 % of
/// the run plus the filter) and kept apart from blocks, because every read of the run needs it.
///
/// Its entries are blocks, which are numbered through the run; those of a top index are partitions, and all that is
/// said of blocks holds for them.
#[derive(Debug)]
pub struct RunIndex {
    /// The number of the first block.
    first: u32,
    /// Block `first + i` is `offsets[i]..offsets[i + 1]` of the run; a partition, of all partitions.
    offsets: Vec<u64>,
    rows: Vec<u32>,
    crcs: Vec<u32>,
    epochs: Vec<(Epoch, Epoch)>,
    /// Key `k` is `keys[key_offsets[k]..key_offsets[k + 1]]`; first and last key of each block in turn.
    key_offsets: Vec<u32>,
    keys: Bytes,
    filter: Option<KeyFilter>,
    /// Lengths of prefixes that the filter knows.
    prefix_lengths: Vec<u16>,
    total_rows: u64,
    /// Of a top index.
    partitions: Option<Vec<PartitionStart>>,
}

/// Where the blocks of a partition begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PartitionStart {
    /// The number of the first one.
    pub block: u32,
    /// In the run.
    pub offset: u64,
}

impl RunIndex {
    /// Parses the meta part of a run. `assigned` stands for epochs unknown when the run was written.
    pub fn parse(meta: &Bytes, assigned: Epoch) -> Result<RunIndex, &'static str> {
        let footer_at = meta.len().checked_sub(FOOTER_BYTES).ok_or("shorter than a run footer")?;
        let footer = &meta[footer_at..];
        if u32_at(footer, 4) != MAGIC {
            return Err("not a run");
        }
        let flags = u16_at(footer, 10);
        let is_top = flags & FLAG_TOP != 0;
        if u16_at(footer, 8) != if is_top { VERSION_TOP } else { VERSION } {
            return Err("unknown run version");
        }
        let mut crc = crc32fast::Hasher::new();
        crc.update(&meta[..footer_at]);
        crc.update(&footer[4..]);
        if crc.finalize() != u32_at(footer, 0) {
            return Err("checksum mismatch in the index");
        }
        let filter_len = u32_at(footer, 12) as usize;
        let index_len = u32_at(footer, 16) as usize;
        let blocks = u32_at(footer, 20) as usize;
        if filter_len + index_len != footer_at {
            return Err("lengths do not agree");
        }
        let filter = match flags & FLAG_FILTER {
            0 => None,
            _ => Some(KeyFilter::new(meta.slice(..filter_len)).ok_or("damaged filter")?),
        };
        let index = meta.slice(filter_len..footer_at);
        let mut run = RunIndex::parse_blocks(&index, blocks, is_top, assigned)?;
        if run.offsets[blocks] != u64_at(footer, 32) {
            return Err("block lengths do not agree");
        }
        run.filter = filter;
        run.total_rows = u64_at(footer, 24);
        Ok(run)
    }

    /// Parses the index of a partition whose blocks begin at `start`.
    pub(crate) fn parse_partition(
        bytes: &Bytes,
        start: PartitionStart,
        assigned: Epoch,
    ) -> Result<RunIndex, &'static str> {
        let mut index = RunIndex::parse(bytes, assigned)?;
        if index.partitions.is_some() {
            return Err("a top index stands for a partition");
        }
        index.first = start.block;
        index.offsets.iter_mut().for_each(|offset| *offset += start.offset);
        Ok(index)
    }

    fn parse_blocks(
        index: &Bytes,
        blocks: usize,
        is_top: bool,
        assigned: Epoch,
    ) -> Result<RunIndex, &'static str> {
        let keys_at = blocks * INDEX_FIXED + (2 * blocks + 1) * 4;
        if index.len() < keys_at {
            return Err("index too short");
        }
        let u32s = |at: usize| index[at..at + blocks * 4].chunks_exact(4).map(|c| u32_at(c, 0));
        let u64s = |at: usize| index[at..at + blocks * 8].chunks_exact(8).map(|c| u64_at(c, 0));
        let mut offsets = Vec::with_capacity(blocks + 1);
        offsets.push(0);
        let mut end = 0u64;
        offsets.extend(u32s(0).map(|len| {
            end += u64::from(len);
            end
        }));
        let known = |e: u64| if e == 0 { assigned } else { Epoch(e) };
        let epochs =
            u64s(blocks * 12).zip(u64s(blocks * 20)).map(|(a, b)| (known(a), known(b))).collect();
        let key_offsets: Vec<u32> =
            index[blocks * INDEX_FIXED..keys_at].chunks_exact(4).map(|c| u32_at(c, 0)).collect();
        let keys_len = key_offsets.last().map_or(0, |&end| end as usize);
        let ordered = key_offsets.windows(2).all(|w| w[0] <= w[1]);
        if !ordered || keys_len > index.len() - keys_at {
            return Err("damaged key offsets");
        }
        let keys = index.slice(keys_at..keys_at + keys_len);
        let starts_len = if is_top { blocks * START_BYTES } else { 0 };
        let rest = &index[keys_at + keys_len..];
        let (starts, lengths) = rest.split_at_checked(starts_len).ok_or("index too short")?;
        let start = |c: &[u8]| PartitionStart { block: u32_at(c, 0), offset: u64_at(c, 4) };
        let lengths = lengths.chunks_exact(2);
        let prefix_lengths = lengths.map(|l| u16::from_le_bytes([l[0], l[1]])).collect();
        Ok(RunIndex {
            first: 0,
            offsets,
            rows: u32s(blocks * 4).collect(),
            crcs: u32s(blocks * 8).collect(),
            epochs,
            key_offsets,
            keys,
            filter: None,
            prefix_lengths,
            total_rows: 0,
            partitions: is_top.then(|| starts.chunks_exact(START_BYTES).map(start).collect()),
        })
    }

    pub fn blocks(&self) -> u32 {
        self.rows.len() as u32
    }

    /// Numbers of its blocks.
    pub fn block_numbers(&self) -> Range<u32> {
        self.first..self.first + self.blocks()
    }

    /// Whether its entries are partitions, whose own indexes have the blocks.
    pub fn is_top(&self) -> bool {
        self.partitions.is_some()
    }

    /// Where the blocks of a partition begin; `None`: there is no such partition.
    pub(crate) fn partition_start(&self, partition: u32) -> Option<PartitionStart> {
        self.partitions.as_ref()?.get(partition as usize).copied()
    }

    /// Bytes of all blocks.
    pub(crate) fn block_bytes(&self) -> u64 {
        self.offsets.last().map_or(0, |end| end - self.offsets[0])
    }

    pub fn rows(&self) -> u64 {
        self.total_rows
    }

    fn at(&self, block: u32) -> usize {
        (block - self.first) as usize
    }

    pub fn block_rows(&self, block: u32) -> u32 {
        self.rows[self.at(block)]
    }

    /// Smallest and largest epoch in a block.
    pub fn block_epochs(&self, block: u32) -> (Epoch, Epoch) {
        self.epochs[self.at(block)]
    }

    /// Bytes of a block, relative to the run's start.
    pub fn block_range(&self, block: u32) -> Range<u64> {
        let at = self.at(block);
        self.offsets[at]..self.offsets[at + 1]
    }

    pub fn block_crc(&self, block: u32) -> u32 {
        self.crcs[self.at(block)]
    }

    pub fn first_key(&self, block: u32) -> &[u8] {
        self.key(2 * self.at(block))
    }

    pub fn last_key(&self, block: u32) -> &[u8] {
        self.key(2 * self.at(block) + 1)
    }

    fn key(&self, i: usize) -> &[u8] {
        &self.keys[self.key_offsets[i] as usize..self.key_offsets[i + 1] as usize]
    }

    pub fn has_filter(&self) -> bool {
        self.filter.is_some()
    }

    /// Lengths of prefixes that can be asked of the filter.
    pub fn prefix_lengths(&self) -> &[u16] {
        &self.prefix_lengths
    }

    /// Heap bytes, for the index cache's budget.
    pub fn memory_size(&self) -> usize {
        self.rows.len() * (INDEX_FIXED + 4 + 8)
            + self.key_offsets.len() * 4
            + self.keys.len()
            + self.filter.as_ref().map_or(0, KeyFilter::memory_size)
            + self.partitions.as_ref().map_or(0, |p| p.len() * size_of::<PartitionStart>())
            + 256
    }

    /// False: certainly no entry has this key. Without a filter: always true.
    #[inline]
    pub fn may_contain_key(&self, hash: u64) -> bool {
        self.filter.as_ref().is_none_or(|f| f.may_contain(hash))
    }

    /// Whether the filter knows prefixes of this length.
    #[inline]
    fn knows_prefixes_of(&self, length: usize) -> bool {
        self.filter.is_some() && self.prefix_lengths.iter().any(|&l| usize::from(l) == length)
    }

    /// For each key that may be in the run, the blocks that may hold it: (position in `keys`, block).
    /// `hashes` are [`filter_hash`]es of the keys, when the caller has them already (many runs share them).
    pub fn locate_keys(&self, keys: &BinaryArray, hashes: Option<&[u64]>) -> Vec<(u32, u32)> {
        let mut found = Vec::new();
        let mut cursor = Cursor { block: self.first };
        for i in 0..keys.len() {
            let key = keys.value(i);
            if self.has_filter() && !self.may_contain_key(hash_of(hashes, i, key)) {
                continue;
            }
            let mut block = self.first_block_reaching(key, &mut cursor);
            while block < self.end() && self.first_key(block) <= key {
                found.push((i as u32, block));
                block += 1;
            }
        }
        found
    }

    /// For each prefix, the blocks that may hold keys that start with it. Of prefixes whose length the
    /// filter knows, those that are not there cost nothing.
    pub fn locate_prefixes(&self, prefixes: &BinaryArray) -> Vec<(u32, u32)> {
        let mut found = Vec::new();
        let mut cursor = Cursor { block: self.first };
        for i in 0..prefixes.len() {
            let prefix = prefixes.value(i);
            if self.knows_prefixes_of(prefix.len()) && !self.may_contain_key(filter_hash(prefix)) {
                continue;
            }
            let mut block = self.first_block_reaching(prefix, &mut cursor);
            while block < self.end() && !is_past(self.first_key(block), prefix) {
                found.push((i as u32, block));
                block += 1;
            }
        }
        found
    }

    /// The blocks that may hold keys between the bounds.
    pub fn locate_range(&self, lower: Bound<&[u8]>, upper: Bound<&[u8]>) -> Range<u32> {
        let start = match lower {
            Bound::Unbounded => self.first,
            Bound::Included(k) => self.partition(self.first, |b| self.last_key(b) < k),
            Bound::Excluded(k) => self.partition(self.first, |b| self.last_key(b) <= k),
        };
        let end = match upper {
            Bound::Unbounded => self.end(),
            Bound::Included(k) => self.partition(start, |b| self.first_key(b) <= k),
            Bound::Excluded(k) => self.partition(start, |b| self.first_key(b) < k),
        };
        start..end.max(start)
    }

    fn end(&self) -> u32 {
        self.first + self.blocks()
    }

    /// The first block whose last key is not below `key`. Ascending keys start where the last ended.
    fn first_block_reaching(&self, key: &[u8], cursor: &mut Cursor) -> u32 {
        let from = cursor.block;
        let is_behind = from > self.first && self.last_key(from - 1) >= key;
        let start = if is_behind { self.first } else { from };
        let block = if start < self.end() && self.last_key(start) >= key {
            start
        } else {
            self.partition(start, |b| self.last_key(b) < key)
        };
        // One further back: the same block may hold the next key.
        cursor.block = block;
        block
    }

    /// The first block from `from` on for which `below` is false; `below` must be monotone.
    fn partition(&self, from: u32, below: impl Fn(u32) -> bool) -> u32 {
        let (mut low, mut high) = (from, self.end());
        while low < high {
            let mid = low + (high - low) / 2;
            if below(mid) {
                low = mid + 1;
            } else {
                high = mid;
            }
        }
        low
    }
}

/// Where the last search of an ascending series ended.
struct Cursor {
    block: u32,
}

#[inline]
fn hash_of(hashes: Option<&[u64]>, i: usize, bytes: &[u8]) -> u64 {
    hashes.map_or_else(|| filter_hash(bytes), |h| h[i])
}

/// Whether every key from `key` on is above all keys that start with `prefix`.
#[inline]
fn is_past(key: &[u8], prefix: &[u8]) -> bool {
    key > prefix && !key.starts_with(prefix)
}

#[inline]
pub(super) fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

#[inline]
pub(super) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

#[inline]
fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}
