//! The index and filter of a run, as kept in memory: where its blocks are and what they can hold.

use std::ops::{Bound, Range};

use arrow::array::{Array, BinaryArray};
use bytes::Bytes;
use millrace_common::Epoch;

use crate::block::Entries;
use crate::filter::{KeyFilter, filter_hash};
use crate::run::{FLAG_FILTER, FOOTER_BYTES, INDEX_FIXED, MAGIC, VERSION};

/// An opened run. Small (about 0.5 % of the run plus the filter) and kept apart from blocks, because
/// every read of the run needs it.
#[derive(Debug)]
pub struct RunIndex {
    /// Block `i` is `offsets[i]..offsets[i + 1]` of the run.
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
}

impl RunIndex {
    /// Parses the meta part of a run. `assigned` stands for epochs unknown when the run was written.
    pub fn parse(meta: &Bytes, assigned: Epoch) -> Result<RunIndex, &'static str> {
        let footer_at = meta.len().checked_sub(FOOTER_BYTES).ok_or("shorter than a run footer")?;
        let footer = &meta[footer_at..];
        if u32_at(footer, 4) != MAGIC {
            return Err("not a run");
        }
        if footer[8..10] != VERSION.to_le_bytes() {
            return Err("unknown run version");
        }
        let mut crc = crc32fast::Hasher::new();
        crc.update(&meta[..footer_at]);
        crc.update(&footer[4..]);
        if crc.finalize() != u32_at(footer, 0) {
            return Err("checksum mismatch in the index");
        }
        let flags = u16::from_le_bytes([footer[10], footer[11]]);
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
        let mut run = RunIndex::parse_blocks(&index, blocks, assigned)?;
        if run.offsets[blocks] != u64_at(footer, 32) {
            return Err("block lengths do not agree");
        }
        run.filter = filter;
        run.total_rows = u64_at(footer, 24);
        Ok(run)
    }

    fn parse_blocks(
        index: &Bytes,
        blocks: usize,
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
        let lengths = index[keys_at + keys_len..].chunks_exact(2);
        let prefix_lengths = lengths.map(|l| u16::from_le_bytes([l[0], l[1]])).collect();
        Ok(RunIndex {
            offsets,
            rows: u32s(blocks * 4).collect(),
            crcs: u32s(blocks * 8).collect(),
            epochs,
            key_offsets,
            keys,
            filter: None,
            prefix_lengths,
            total_rows: 0,
        })
    }

    pub fn blocks(&self) -> u32 {
        self.rows.len() as u32
    }

    pub fn rows(&self) -> u64 {
        self.total_rows
    }

    pub fn block_rows(&self, block: u32) -> u32 {
        self.rows[block as usize]
    }

    /// Smallest and largest epoch in a block.
    pub fn block_epochs(&self, block: u32) -> (Epoch, Epoch) {
        self.epochs[block as usize]
    }

    /// Bytes of a block, relative to the run's start.
    pub fn block_range(&self, block: u32) -> Range<u64> {
        self.offsets[block as usize]..self.offsets[block as usize + 1]
    }

    pub fn block_crc(&self, block: u32) -> u32 {
        self.crcs[block as usize]
    }

    pub fn first_key(&self, block: u32) -> &[u8] {
        self.key(2 * block as usize)
    }

    pub fn last_key(&self, block: u32) -> &[u8] {
        self.key(2 * block as usize + 1)
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
        let mut cursor = Cursor::default();
        for i in 0..keys.len() {
            let key = keys.value(i);
            if self.has_filter() && !self.may_contain_key(hash_of(hashes, i, key)) {
                continue;
            }
            let mut block = self.first_block_reaching(key, &mut cursor);
            while block < self.blocks() && self.first_key(block) <= key {
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
        let mut cursor = Cursor::default();
        for i in 0..prefixes.len() {
            let prefix = prefixes.value(i);
            if self.knows_prefixes_of(prefix.len()) && !self.may_contain_key(filter_hash(prefix)) {
                continue;
            }
            let mut block = self.first_block_reaching(prefix, &mut cursor);
            while block < self.blocks() && !is_past(self.first_key(block), prefix) {
                found.push((i as u32, block));
                block += 1;
            }
        }
        found
    }

    /// The blocks that may hold keys between the bounds.
    pub fn locate_range(&self, lower: Bound<&[u8]>, upper: Bound<&[u8]>) -> Range<u32> {
        let start = match lower {
            Bound::Unbounded => 0,
            Bound::Included(k) => self.partition(0, |b| self.last_key(b) < k),
            Bound::Excluded(k) => self.partition(0, |b| self.last_key(b) <= k),
        };
        let end = match upper {
            Bound::Unbounded => self.blocks(),
            Bound::Included(k) => self.partition(start, |b| self.first_key(b) <= k),
            Bound::Excluded(k) => self.partition(start, |b| self.first_key(b) < k),
        };
        start..end.max(start)
    }

    /// The first block whose last key is not below `key`. Ascending keys start where the last ended.
    fn first_block_reaching(&self, key: &[u8], cursor: &mut Cursor) -> u32 {
        let from = cursor.block;
        let start = if from > 0 && self.last_key(from - 1) >= key { 0 } else { from };
        let block = if start < self.blocks() && self.last_key(start) >= key {
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
        let (mut low, mut high) = (from, self.blocks());
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
#[derive(Default)]
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
fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

#[inline]
fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}

/// Collects the index while a run is built.
#[derive(Debug, Default)]
pub(crate) struct IndexBuilder {
    lengths: Vec<u32>,
    rows: Vec<u32>,
    crcs: Vec<u32>,
    epochs: Vec<(Epoch, Epoch)>,
    key_offsets: Vec<u32>,
    keys: Vec<u8>,
}

impl IndexBuilder {
    pub(crate) fn len(&self) -> usize {
        self.rows.len()
    }

    pub(crate) fn add(&mut self, entries: &Entries, length: usize, crc: u32) {
        self.lengths.push(length as u32);
        self.rows.push(entries.len() as u32);
        self.crcs.push(crc);
        self.epochs.push(entries.epochs.bounds().unwrap_or_default());
        for row in [0, entries.len() - 1] {
            self.key_offsets.push(self.keys.len() as u32);
            self.keys.extend_from_slice(entries.keys.value(row));
        }
    }

    pub(crate) fn epoch_bounds(&self) -> (Epoch, Epoch) {
        let min = self.epochs.iter().map(|e| e.0).min().unwrap_or_default();
        let max = self.epochs.iter().map(|e| e.1).max().unwrap_or_default();
        (min, max)
    }

    pub(crate) fn write(&self, prefix_lengths: &[u16], out: &mut Vec<u8>) {
        for column in [&self.lengths, &self.rows, &self.crcs] {
            out.extend(column.iter().flat_map(|v| v.to_le_bytes()));
        }
        out.extend(self.epochs.iter().flat_map(|e| e.0.0.to_le_bytes()));
        out.extend(self.epochs.iter().flat_map(|e| e.1.0.to_le_bytes()));
        out.extend(self.key_offsets.iter().flat_map(|v| v.to_le_bytes()));
        out.extend_from_slice(&(self.keys.len() as u32).to_le_bytes());
        out.extend_from_slice(&self.keys);
        out.extend(prefix_lengths.iter().flat_map(|l| l.to_le_bytes()));
    }
}
