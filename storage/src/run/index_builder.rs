//! Collects the index of a run while it is built, and writes it.

use std::ops::Range;

use millrace_common::Epoch;

use crate::block::Entries;
use crate::run::index::PartitionStart;
use crate::run::{FOOTER_BYTES, INDEX_FIXED, MAGIC};

#[derive(Debug, Default)]
pub(super) struct IndexBuilder {
    lengths: Vec<u32>,
    rows: Vec<u32>,
    crcs: Vec<u32>,
    epochs: Vec<(Epoch, Epoch)>,
    key_offsets: Vec<u32>,
    keys: Vec<u8>,
}

impl IndexBuilder {
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    pub fn add(&mut self, entries: &Entries, length: usize, crc: u32) {
        let epochs = entries.epochs.bounds().unwrap_or_default();
        let keys = [0, entries.len() - 1].map(|row| entries.keys.value(row));
        self.add_entry(length as u32, entries.len() as u32, crc, epochs, keys);
    }

    /// Adds an entry; `keys`: the first and the last one.
    pub fn add_entry(
        &mut self,
        length: u32,
        rows: u32,
        crc: u32,
        epochs: (Epoch, Epoch),
        keys: [&[u8]; 2],
    ) {
        self.lengths.push(length);
        self.rows.push(rows);
        self.crcs.push(crc);
        self.epochs.push(epochs);
        for key in keys {
            self.key_offsets.push(self.keys.len() as u32);
            self.keys.extend_from_slice(key);
        }
    }

    pub fn epoch_bounds(&self, blocks: Range<usize>) -> (Epoch, Epoch) {
        let min = self.epochs[blocks.clone()].iter().map(|e| e.0).min().unwrap_or_default();
        let max = self.epochs[blocks].iter().map(|e| e.1).max().unwrap_or_default();
        (min, max)
    }

    pub fn rows_of(&self, blocks: Range<usize>) -> u64 {
        self.rows[blocks].iter().map(|&rows| u64::from(rows)).sum()
    }

    /// Bytes of the blocks themselves.
    pub fn length_of(&self, blocks: Range<usize>) -> u64 {
        self.lengths[blocks].iter().map(|&length| u64::from(length)).sum()
    }

    /// Where the keys of a block begin; of the one after the last, where they end.
    fn keys_at(&self, block: usize) -> usize {
        self.key_offsets.get(2 * block).map_or(self.keys.len(), |&at| at as usize)
    }

    pub fn first_key(&self, block: usize) -> &[u8] {
        let end = self.key_offsets[2 * block + 1] as usize;
        &self.keys[self.keys_at(block)..end]
    }

    pub fn last_key(&self, block: usize) -> &[u8] {
        let start = self.key_offsets[2 * block + 1] as usize;
        &self.keys[start..self.keys_at(block + 1)]
    }

    /// What [`IndexBuilder::write`] writes of a block, besides what all blocks share.
    pub fn stored_bytes(&self, block: usize) -> usize {
        INDEX_FIXED + 2 * 4 + self.keys_at(block + 1) - self.keys_at(block)
    }

    fn write(&self, blocks: Range<usize>, out: &mut Vec<u8>) {
        for column in [&self.lengths, &self.rows, &self.crcs] {
            out.extend(column[blocks.clone()].iter().flat_map(|v| v.to_le_bytes()));
        }
        let epochs = &self.epochs[blocks.clone()];
        out.extend(epochs.iter().flat_map(|e| e.0.0.to_le_bytes()));
        out.extend(epochs.iter().flat_map(|e| e.1.0.to_le_bytes()));
        let keys = self.keys_at(blocks.start)..self.keys_at(blocks.end);
        let base = keys.start as u32;
        let offsets = &self.key_offsets[2 * blocks.start..2 * blocks.end];
        out.extend(offsets.iter().flat_map(|v| (v - base).to_le_bytes()));
        out.extend_from_slice(&(keys.len() as u32).to_le_bytes());
        out.extend_from_slice(&self.keys[keys]);
    }

    /// Writes filter, index and footer of some of the blocks.
    pub fn write_meta_part(&self, blocks: Range<usize>, part: MetaPart<'_>, out: &mut Vec<u8>) {
        let start = out.len();
        out.extend_from_slice(part.filter);
        let index_at = out.len();
        self.write(blocks.clone(), out);
        for start in part.partitions {
            out.extend_from_slice(&start.block.to_le_bytes());
            out.extend_from_slice(&start.offset.to_le_bytes());
        }
        out.extend(part.prefix_lengths.iter().flat_map(|l| l.to_le_bytes()));

        let mut footer = [0u8; FOOTER_BYTES];
        footer[4..8].copy_from_slice(&MAGIC.to_le_bytes());
        footer[8..10].copy_from_slice(&part.version.to_le_bytes());
        footer[10..12].copy_from_slice(&part.flags.to_le_bytes());
        footer[12..16].copy_from_slice(&(part.filter.len() as u32).to_le_bytes());
        footer[16..20].copy_from_slice(&((out.len() - index_at) as u32).to_le_bytes());
        footer[20..24].copy_from_slice(&(blocks.len() as u32).to_le_bytes());
        footer[24..32].copy_from_slice(&self.rows_of(blocks.clone()).to_le_bytes());
        footer[32..40].copy_from_slice(&self.length_of(blocks).to_le_bytes());
        let mut crc = crc32fast::Hasher::new();
        crc.update(&out[start..]);
        crc.update(&footer[4..]);
        footer[0..4].copy_from_slice(&crc.finalize().to_le_bytes());
        out.extend_from_slice(&footer);
    }
}

/// What a meta part has besides the index of its blocks.
#[derive(Clone, Copy, Default)]
pub(super) struct MetaPart<'a> {
    pub filter: &'a [u8],
    pub prefix_lengths: &'a [u16],
    /// Of a top index.
    pub partitions: &'a [PartitionStart],
    pub version: u16,
    pub flags: u16,
}
