//! Builds a run from entries in key order.

use std::sync::Arc;

use arrow::array::{Array, ArrayRef, BinaryArray, Int64Array, RecordBatch, UInt64Array};
use arrow::compute;
use bytes::Bytes;
use millrace_common::Epoch;
use millrace_rpc::version::RunMeta;

use crate::block::{BlockCodec, BlockEncoder, Entries, Epochs};
use crate::error::{Result, StorageError};
use crate::filter;
use crate::run::index::IndexBuilder;
use crate::run::{FLAG_FILTER, FOOTER_BYTES, MAGIC, RunIndex, RunKind, VERSION};

#[derive(Clone, Debug)]
pub struct RunOptions {
    /// Uncompressed bytes a block aims at.
    pub block_bytes: usize,
    /// Filter on whole keys.
    pub filter: bool,
    /// Filter on prefixes of these lengths too.
    pub prefix_lengths: Vec<u16>,
    pub compress: bool,
}

impl RunOptions {
    /// Point tables get a filter, range tables none.
    pub fn new(kind: RunKind) -> RunOptions {
        RunOptions {
            block_bytes: kind.block_bytes(),
            filter: kind == RunKind::Point,
            prefix_lengths: Vec::new(),
            compress: true,
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
    pub index: Arc<RunIndex>,
}

pub struct RunBuilder {
    codec: Arc<BlockCodec>,
    options: RunOptions,
    encoder: BlockEncoder,
    out: Vec<u8>,
    index: IndexBuilder,
    hashes: Vec<u64>,
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
        self.add_hashes(&entries.keys);
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
        let mut last: Option<&[u8]> = None;
        let lengths = &self.options.prefix_lengths;
        for key in keys.iter().flatten() {
            if last == Some(key) {
                continue;
            }
            self.hashes.push(filter::filter_hash(key));
            for &length in lengths {
                let prefix = match key.get(..usize::from(length)) {
                    Some(prefix) if prefix.len() < key.len() => prefix,
                    // The key is its own prefix, or too short to have one.
                    _ => continue,
                };
                if !last.is_some_and(|l| l.len() > prefix.len() && l.starts_with(prefix)) {
                    self.hashes.push(filter::filter_hash(prefix));
                }
            }
            last = Some(key);
        }
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
        Ok(())
    }

    /// The finished run. A run without entries is legal and has no blocks.
    pub fn finish(mut self) -> Result<FinishedRun> {
        self.cut_blocks(true)?;
        let data_len = self.out.len();
        let mut flags = 0;
        if self.options.filter {
            flags |= FLAG_FILTER;
            self.out.extend_from_slice(&filter::build(&self.hashes));
        }
        let filter_len = self.out.len() - data_len;
        self.index.write(&self.options.prefix_lengths, &mut self.out);
        let index_len = self.out.len() - data_len - filter_len;

        let mut footer = [0u8; FOOTER_BYTES];
        footer[4..8].copy_from_slice(&MAGIC.to_le_bytes());
        footer[8..10].copy_from_slice(&VERSION.to_le_bytes());
        footer[10..12].copy_from_slice(&flags.to_le_bytes());
        footer[12..16].copy_from_slice(&(filter_len as u32).to_le_bytes());
        footer[16..20].copy_from_slice(&(index_len as u32).to_le_bytes());
        footer[20..24].copy_from_slice(&(self.index.len() as u32).to_le_bytes());
        footer[24..32].copy_from_slice(&self.rows.to_le_bytes());
        footer[32..40].copy_from_slice(&(data_len as u64).to_le_bytes());
        let mut crc = crc32fast::Hasher::new();
        crc.update(&self.out[data_len..]);
        crc.update(&footer[4..]);
        footer[0..4].copy_from_slice(&crc.finalize().to_le_bytes());
        self.out.extend_from_slice(&footer);

        let bytes = Bytes::from(self.out);
        let (min_epoch, max_epoch) = self.index.epoch_bounds();
        let meta = RunMeta {
            length: bytes.len() as u64,
            meta_length: (bytes.len() - data_len) as u64,
            rows: self.rows,
            min_key: self.min_key.unwrap_or_default().into(),
            max_key: self.last_key.into(),
            min_epoch: min_epoch.0,
            max_epoch: max_epoch.0,
            tombstones: self.tombstones,
            ..RunMeta::default()
        };
        // A copy: the index outlives the blocks, and windows of the whole would keep them in memory.
        let own = Bytes::copy_from_slice(&bytes[data_len..]);
        let index = RunIndex::parse(&own, Epoch::ZERO).map_err(|e| {
            StorageError::internal(format!("a run just built cannot be opened: {e}"))
        })?;
        Ok(FinishedRun { bytes, meta, index: Arc::new(index) })
    }
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
