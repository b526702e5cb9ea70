//! Builds a run from entries in key order.

use std::ops::Range;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, BinaryArray, Int64Array, RecordBatch, UInt64Array};
use arrow::compute;
use bytes::Bytes;
use millrace_common::Epoch;
use millrace_rpc::version::RunMeta;

use crate::block::{BlockCodec, BlockEncoder, Entries, Epochs};
use crate::error::{Result, StorageError};
use crate::filter;
use crate::run::index::PartitionStart;
use crate::run::index_builder::{IndexBuilder, MetaPart};
use crate::run::{
    FLAG_FILTER, FLAG_TOP, FOOTER_BYTES, INDEX_FIXED, RunIndex, RunKind, START_BYTES, VERSION,
    VERSION_TOP,
};

/// Of the index and filter of a partition: enough that a request is not wasted on it, little enough that a read of one
/// key takes little memory.
const PARTITION_BYTES: usize = 64 << 10;
/// Index and filter of up to so many partitions' bytes are one unit where the description of the run has no room for a top
/// index: they cost one request, and a top index would cost another.
const WHOLE_PARTITIONS: usize = 4;
/// Of a top index that the description of its run has, at most: descriptions are in the log, and in memory of all processes.
const MAX_DESCRIBED_TOP: usize = 2 << 10;

#[derive(Clone, Debug)]
pub struct RunOptions {
    /// Uncompressed bytes a block aims at.
    pub block_bytes: usize,
    /// Filter on whole keys.
    pub filter: bool,
    /// Filter on prefixes of these lengths too.
    pub prefix_lengths: Vec<u16>,
    pub compress: bool,
    /// Bytes that a partition of index and filter aims at; no more than that is not cut.
    pub partition_bytes: usize,
}

impl RunOptions {
    /// Point tables get a filter, range tables none.
    pub fn new(kind: RunKind) -> RunOptions {
        RunOptions {
            block_bytes: kind.block_bytes(),
            filter: kind == RunKind::Point,
            prefix_lengths: Vec::new(),
            compress: true,
            partition_bytes: PARTITION_BYTES,
        }
    }

    pub fn with_filter(mut self, filter: bool) -> RunOptions {
        self.filter = filter;
        self
    }

    /// A filter that answers for prefixes of these lengths too; none: no change.
    pub fn with_prefix_lengths(mut self, lengths: Vec<u16>) -> RunOptions {
        self.filter |= !lengths.is_empty();
        self.prefix_lengths = lengths;
        self
    }
}

/// A built run: its bytes, its index (so that a writer need not read it back), and its description
/// with `run_id`, `table_id`, `object`, `offset`, `level` and `sequence` still to be set.
#[derive(Debug)]
pub struct FinishedRun {
    pub bytes: Bytes,
    pub meta: RunMeta,
    /// Of all blocks; where it is stored in partitions, without the filter.
    pub index: Arc<RunIndex>,
}

pub struct RunBuilder {
    codec: Arc<BlockCodec>,
    options: RunOptions,
    encoder: BlockEncoder,
    out: Vec<u8>,
    index: IndexBuilder,
    /// Of all keys and prefixes, for the filter, and how many there are up to the end of each block.
    hashes: Vec<u64>,
    hash_ends: Vec<usize>,
    /// The key that was hashed last.
    hashed: Option<Vec<u8>>,
    pending: Vec<Entries>,
    pending_bytes: usize,
    last_key: Vec<u8>,
    rows: u64,
    tombstones: u64,
    min_key: Option<Vec<u8>>,
}

impl RunBuilder {
    pub fn new(codec: Arc<BlockCodec>, options: RunOptions) -> RunBuilder {
        let encoder = BlockEncoder::new(options.compress);
        RunBuilder {
            codec,
            options,
            encoder,
            out: Vec::new(),
            index: IndexBuilder::default(),
            hashes: Vec::new(),
            hash_ends: Vec::new(),
            hashed: None,
            pending: Vec::new(),
            pending_bytes: 0,
            last_key: Vec::new(),
            rows: 0,
            tombstones: 0,
            min_key: None,
        }
    }

    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// Bytes of finished blocks plus an estimate of what is pending: when to cut a run.
    pub fn estimated_bytes(&self) -> usize {
        self.out.len() + self.pending_bytes / 2
    }

    /// Appends entries; keys must not be below those pushed before.
    pub fn push(&mut self, entries: &Entries) -> Result<()> {
        if entries.is_empty() {
            return Ok(());
        }
        debug_assert!(entries.is_well_formed());
        if self.min_key.is_some() && entries.keys.value(0) < self.last_key.as_slice() {
            return Err(StorageError::internal("keys of a run must ascend"));
        }
        if self.min_key.is_none() {
            self.min_key = Some(entries.keys.value(0).to_vec());
        }
        self.last_key.clear();
        self.last_key.extend_from_slice(entries.keys.value(entries.len() - 1));
        self.rows += entries.len() as u64;
        if let Some(w) = &entries.weights {
            self.tombstones += w.values().iter().filter(|&&w| w <= 0).count() as u64;
        }
        self.pending_bytes += slice_bytes(entries)?;
        self.pending.push(entries.clone());
        if self.pending_bytes >= self.options.block_bytes * 2 {
            self.cut_blocks(false)?;
        }
        Ok(())
    }

    fn add_hashes(&mut self, keys: &BinaryArray) {
        if !self.options.filter {
            return;
        }
        // Equal neighbours (versions of a key, rows of one join key) are hashed once.
        let hashed = self.hashed.take();
        let mut last: Option<&[u8]> = hashed.as_deref();
        let lengths = &self.options.prefix_lengths;
        for key in keys.iter().flatten() {
            if last == Some(key) {
                continue;
            }
            self.hashes.push(filter::filter_hash(key));
            for prefix in prefixes_of(key, lengths) {
                if !last.is_some_and(|l| l.len() > prefix.len() && l.starts_with(prefix)) {
                    self.hashes.push(filter::filter_hash(prefix));
                }
            }
            last = Some(key);
        }
        self.hashed = last.map(<[u8]>::to_vec);
    }

    /// Cuts pending entries into blocks; all of them, or leaving less than one block.
    fn cut_blocks(&mut self, all: bool) -> Result<()> {
        let mut parts = std::mem::take(&mut self.pending);
        let Some(mut last) = parts.pop() else { return Ok(()) };
        let mut last_bytes = slice_bytes(&last)?;
        if !parts.is_empty() {
            // Only as much of the last part is copied as completes a block with those before it.
            let wanted = self.options.block_bytes.saturating_sub(self.pending_bytes - last_bytes);
            let rows = (last.len() * wanted).div_ceil(last_bytes.max(1)).clamp(1, last.len());
            parts.push(last.slice(0, rows));
            last = last.slice(rows, last.len() - rows);
            last_bytes = slice_bytes(&last)?;
            if let Some(head) = concat(parts)? {
                self.write_block(&head)?;
            }
        }
        self.pending_bytes = 0;
        self.cut_slice(last, last_bytes, all)
    }

    /// Cuts one piece into blocks of equal row counts.
    fn cut_slice(&mut self, entries: Entries, bytes: usize, all: bool) -> Result<()> {
        let rows = entries.len();
        let blocks = (bytes / self.options.block_bytes).max(1);
        let per_block = rows.div_ceil(blocks);
        let mut at = 0;
        while at < rows && (all || rows - at >= per_block && bytes >= self.options.block_bytes) {
            let n = per_block.min(rows - at);
            self.write_block(&entries.slice(at, n))?;
            at += n;
        }
        if at < rows {
            let rest = entries.slice(at, rows - at);
            self.pending_bytes = slice_bytes(&rest)?;
            self.pending.push(rest);
        }
        Ok(())
    }

    /// One block, or several where rows are much larger than on average.
    fn write_block(&mut self, entries: &Entries) -> Result<()> {
        if entries.len() > 1 && slice_bytes(entries)? > self.options.block_bytes * 2 {
            let half = entries.len() / 2;
            self.write_block(&entries.slice(0, half))?;
            return self.write_block(&entries.slice(half, entries.len() - half));
        }
        let (length, crc) = self.codec.encode(entries, &mut self.encoder, &mut self.out)?;
        self.index.add(entries, length, crc);
        self.add_hashes(&entries.keys);
        self.hash_ends.push(self.hashes.len());
        Ok(())
    }

    /// The finished run. A run without entries is legal and has no blocks.
    pub fn finish(mut self) -> Result<FinishedRun> {
        self.cut_blocks(true)?;
        let data_len = self.out.len();
        let partitions = self.partitions();
        let meta_at = match partitions.len() {
            0 => {
                self.write_partition(0..self.index.len());
                data_len
            }
            _ => self.write_partitions(&partitions),
        };
        let bytes = Bytes::from(std::mem::take(&mut self.out));
        let blocks = 0..self.index.len();
        let (min_epoch, max_epoch) = self.index.epoch_bounds(blocks.clone());
        let meta = RunMeta {
            length: bytes.len() as u64,
            meta_length: (bytes.len() - meta_at) as u64,
            rows: self.rows,
            min_key: self.min_key.unwrap_or_default().into(),
            max_key: self.last_key.into(),
            min_epoch: min_epoch.0,
            max_epoch: max_epoch.0,
            tombstones: self.tombstones,
            top: match &bytes[meta_at..] {
                top if !partitions.is_empty() && top.len() <= MAX_DESCRIBED_TOP => {
                    Bytes::copy_from_slice(top)
                }
                _ => Bytes::new(),
            },
            ..RunMeta::default()
        };
        // A copy: the index outlives the blocks, and windows of the whole would keep them in memory.
        let own = match partitions.len() {
            0 => Bytes::copy_from_slice(&bytes[data_len..]),
            _ => {
                let mut all = Vec::new();
                let part = MetaPart { version: VERSION, ..MetaPart::default() };
                self.index.write_meta_part(blocks, part, &mut all);
                Bytes::from(all)
            }
        };
        let index = RunIndex::parse(&own, Epoch::ZERO).map_err(|e| {
            StorageError::internal(format!("a run just built cannot be opened: {e}"))
        })?;
        Ok(FinishedRun { bytes, meta, index: Arc::new(index) })
    }

    /// Hashes up to a block.
    fn hashes_before(&self, block: usize) -> usize {
        block.checked_sub(1).map_or(0, |last| self.hash_ends[last])
    }

    /// The blocks of each partition; none: all are one unit.
    fn partitions(&self) -> Vec<Range<usize>> {
        let hashes = |block| self.hash_ends[block] - self.hashes_before(block);
        let bytes =
            |block| self.index.stored_bytes(block) + hashes(block) * filter::BITS_PER_KEY / 8;
        let blocks = self.index.len();
        let total: usize = (0..blocks).map(bytes).sum();
        let aim = self.options.partition_bytes.max(1);
        if total <= aim {
            return Vec::new();
        }
        let even = total.div_ceil(total.div_ceil(aim));
        let (mut partitions, mut start, mut sum) = (Vec::new(), 0, 0);
        for block in 0..blocks {
            sum += bytes(block);
            if sum >= even || block + 1 == blocks {
                partitions.push(start..block + 1);
                (start, sum) = (block + 1, 0);
            }
        }
        let is_described = self.top_bytes(&partitions) <= MAX_DESCRIBED_TOP;
        if total <= aim * WHOLE_PARTITIONS && !is_described { Vec::new() } else { partitions }
    }

    /// What the top index of these partitions takes, about.
    fn top_bytes(&self, partitions: &[Range<usize>]) -> usize {
        let keys = |blocks: &Range<usize>| {
            self.index.first_key(blocks.start).len() + self.index.last_key(blocks.end - 1).len()
        };
        let each = INDEX_FIXED + 2 * 4 + START_BYTES;
        let entries: usize = partitions.iter().map(|blocks| each + keys(blocks)).sum();
        entries + FOOTER_BYTES + 4 + self.options.prefix_lengths.len() * 2
    }

    /// Writes filter, index and footer of some of the blocks.
    fn write_partition(&mut self, blocks: Range<usize>) {
        let mut part = MetaPart {
            version: VERSION,
            prefix_lengths: &self.options.prefix_lengths,
            ..MetaPart::default()
        };
        let mut built = Vec::new();
        if self.options.filter {
            part.flags |= FLAG_FILTER;
            let of_blocks = self.hashes_before(blocks.start)..self.hashes_before(blocks.end);
            let mut hashes = self.hashes[of_blocks].to_vec();
            if blocks.start > 0 && !blocks.is_empty() {
                // What the first key shares with the one before was not hashed again.
                let key = self.index.first_key(blocks.start);
                let prefixes = prefixes_of(key, &self.options.prefix_lengths);
                hashes.extend(std::iter::once(key).chain(prefixes).map(filter::filter_hash));
            }
            built = filter::build(&hashes);
        }
        part.filter = &built;
        self.index.write_meta_part(blocks, part, &mut self.out);
    }

    /// Writes all partitions and the top index; where that begins.
    fn write_partitions(&mut self, partitions: &[Range<usize>]) -> usize {
        let mut top = IndexBuilder::default();
        let mut starts = Vec::with_capacity(partitions.len());
        let mut offset = 0;
        for blocks in partitions {
            let at = self.out.len();
            self.write_partition(blocks.clone());
            let bytes = &self.out[at..];
            let rows = self.index.rows_of(blocks.clone()) as u32;
            let keys = [self.index.first_key(blocks.start), self.index.last_key(blocks.end - 1)];
            let epochs = self.index.epoch_bounds(blocks.clone());
            top.add_entry(bytes.len() as u32, rows, crc32fast::hash(bytes), epochs, keys);
            starts.push(PartitionStart { block: blocks.start as u32, offset });
            offset += self.index.length_of(blocks.clone());
        }
        let part = MetaPart {
            prefix_lengths: &self.options.prefix_lengths,
            partitions: &starts,
            version: VERSION_TOP,
            flags: FLAG_TOP,
            ..MetaPart::default()
        };
        let top_at = self.out.len();
        top.write_meta_part(0..starts.len(), part, &mut self.out);
        top_at
    }
}

/// The prefixes of a key of these lengths; a key is not its own prefix.
fn prefixes_of<'a>(key: &'a [u8], lengths: &'a [u16]) -> impl Iterator<Item = &'a [u8]> {
    lengths.iter().filter_map(|&l| key.get(..usize::from(l))).filter(|p| p.len() < key.len())
}

/// Bytes of the rows themselves, not of the buffers they are windows of.
fn slice_bytes(entries: &Entries) -> Result<usize> {
    let mut bytes = entries.keys.to_data().get_slice_memory_size()?;
    if let Epochs::Each(a) = &entries.epochs {
        bytes += a.len() * 8;
    }
    if let Some(w) = &entries.weights {
        bytes += w.len() * 8;
    }
    for column in entries.values.columns() {
        bytes += column.to_data().get_slice_memory_size()?;
    }
    Ok(bytes)
}

/// All as one; `None` for nothing. A single element is not copied.
pub(crate) fn concat(mut parts: Vec<Entries>) -> Result<Option<Entries>> {
    if parts.len() <= 1 {
        return Ok(parts.pop());
    }
    let keys: Vec<&dyn Array> = parts.iter().map(|p| &p.keys as &dyn Array).collect();
    let keys = downcast::<BinaryArray>(compute::concat(&keys)?)?;
    let schema = parts[0].values.schema();
    let values: RecordBatch = compute::concat_batches(&schema, parts.iter().map(|p| &p.values))?;
    let weights = parts.iter().any(|p| p.weights.is_some()).then(|| {
        let mut all: Vec<i64> = Vec::with_capacity(keys.len());
        for p in &parts {
            match &p.weights {
                Some(w) => all.extend_from_slice(w.values()),
                None => all.resize(all.len() + p.len(), 1),
            }
        }
        Int64Array::from(all)
    });
    let epochs = concat_epochs(&parts);
    Ok(Some(Entries { keys, epochs, weights, values }))
}

fn concat_epochs(parts: &[Entries]) -> Epochs {
    if let Epochs::Uniform(first) = parts[0].epochs
        && parts.iter().all(|p| matches!(p.epochs, Epochs::Uniform(e) if e == first))
    {
        return Epochs::Uniform(first);
    }
    let mut all: Vec<u64> = Vec::with_capacity(parts.iter().map(Entries::len).sum());
    for p in parts {
        match &p.epochs {
            Epochs::Uniform(e) => all.resize(all.len() + p.len(), e.0),
            Epochs::Each(a) => all.extend_from_slice(a.values()),
        }
    }
    Epochs::Each(UInt64Array::from(all))
}

fn downcast<T: Array + Clone + 'static>(array: ArrayRef) -> Result<T> {
    array
        .as_any()
        .downcast_ref::<T>()
        .cloned()
        .ok_or_else(|| StorageError::internal("concatenation changed a column's type"))
}
