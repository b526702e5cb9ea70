//! Blocks: the unit of reading, caching and checksumming (docs/design.md §9).
//!
//! In memory a block is [`Entries`]: sorted keys, their epochs, weights and value columns. Epochs and
//! weights that are all alike are not stored a row. On disk:
//!
//! ```text
//!  0 u32 crc32 of everything after this field     16 u32 rows
//!  4 u16 magic 0x4D42 ("BM")                      20 u64 epoch of every row (flag 1)
//!  6 u8  version (1)                              28 u32 bytes of the record batch message
//!  7 u8  flags: 1 uniform epoch, 2 weights +1,    32 payload: the message padded to 16, the buffers
//!        4 lz4
//!  8 u32 stored payload bytes   12 u32 payload bytes before compression
//! ```
//!
//! Payload: an Arrow IPC record batch without its schema (the reader knows it), columns `__key`,
//! `[__epoch]`, `[__weight]`, values. It is compressed as one piece, so that small blocks of many
//! columns compress well; decoding is zero-copy from the decompressed buffer.

use std::sync::Arc;

use arrow::array::{
    Array, ArrayRef, AsArray, BinaryArray, Int64Array, RecordBatch, RecordBatchOptions, UInt64Array,
};
use arrow::buffer::{Buffer, MutableBuffer};
use arrow::datatypes::{DataType, Field, Int64Type, Schema, SchemaRef, UInt64Type};
use arrow_ipc::MetadataVersion;
use arrow_ipc::reader::RecordBatchDecoder;
use arrow_ipc::writer::{DictionaryTracker, IpcDataGenerator, IpcWriteContext, IpcWriteOptions};
use millrace_common::Epoch;

use crate::error::{Result, StorageError};

pub const KEY_COLUMN: &str = "__key";
pub const EPOCH_COLUMN: &str = "__epoch";
pub const WEIGHT_COLUMN: &str = "__weight";

pub const HEADER_BYTES: usize = 32;
const MAGIC: u16 = 0x4d42;
const VERSION: u8 = 1;
const FLAG_UNIFORM_EPOCH: u8 = 1;
const FLAG_UNIT_WEIGHTS: u8 = 2;
const FLAG_LZ4: u8 = 4;
/// Buffers inside the payload start at multiples of this: the widest native type (128-bit decimals)
/// needs it, and more would be padding, which small blocks of many columns have much of.
const ALIGNMENT: usize = 16;
/// No block is anywhere near this; a header that says more is damaged.
const MAX_PAYLOAD_BYTES: usize = 1 << 30;

/// The epochs of a batch's rows.
#[derive(Clone, Debug)]
pub enum Epochs {
    /// One for all. `Epoch::ZERO`: not assigned yet (a root's commit); readers take the run's.
    Uniform(Epoch),
    /// One a row; never null.
    Each(UInt64Array),
}

impl Epochs {
    #[inline]
    pub fn at(&self, row: usize) -> Epoch {
        match self {
            Epochs::Uniform(e) => *e,
            Epochs::Each(a) => Epoch(a.value(row)),
        }
    }

    /// Smallest and largest; `None` for no rows.
    pub fn bounds(&self) -> Option<(Epoch, Epoch)> {
        match self {
            Epochs::Uniform(e) => Some((*e, *e)),
            Epochs::Each(a) => {
                let min = a.values().iter().copied().min()?;
                let max = a.values().iter().copied().max()?;
                Some((Epoch(min), Epoch(max)))
            }
        }
    }

    pub fn slice(&self, offset: usize, len: usize) -> Epochs {
        match self {
            Epochs::Uniform(e) => Epochs::Uniform(*e),
            Epochs::Each(a) => Epochs::Each(a.slice(offset, len)),
        }
    }
}

/// Entries of one state table in key order.
#[derive(Clone, Debug)]
pub struct Entries {
    /// Never null, ascending; equal keys in the order that the merge defines.
    pub keys: BinaryArray,
    pub epochs: Epochs,
    /// `None`: all +1. Never null.
    pub weights: Option<Int64Array>,
    /// As many rows as keys; fields are nullable, whatever the table's schema says (tombstones).
    pub values: RecordBatch,
}

impl Entries {
    pub fn len(&self) -> usize {
        self.keys.len()
    }

    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    #[inline]
    pub fn weight(&self, row: usize) -> i64 {
        self.weights.as_ref().map_or(1, |w| w.value(row))
    }

    /// A zero-copy window.
    pub fn slice(&self, offset: usize, len: usize) -> Entries {
        Entries {
            keys: self.keys.slice(offset, len),
            epochs: self.epochs.slice(offset, len),
            weights: self.weights.as_ref().map(|w| w.slice(offset, len)),
            values: self.values.slice(offset, len),
        }
    }

    /// Heap bytes that the arrays keep alive.
    pub fn memory_size(&self) -> usize {
        self.values.get_array_memory_size()
            + self.keys.get_array_memory_size()
            + self.weights.as_ref().map_or(0, |w| w.get_array_memory_size())
            + match &self.epochs {
                Epochs::Uniform(_) => 0,
                Epochs::Each(a) => a.get_array_memory_size(),
            }
    }

    /// Keys ascend, nothing is null, lengths agree. For debug builds and tests.
    pub fn is_well_formed(&self) -> bool {
        let n = self.len();
        self.values.num_rows() == n
            && self.keys.null_count() == 0
            && self.weights.as_ref().is_none_or(|w| w.len() == n && w.null_count() == 0)
            && match &self.epochs {
                Epochs::Uniform(_) => true,
                Epochs::Each(a) => a.len() == n && a.null_count() == 0,
            }
            && (1..n).all(|i| self.keys.value(i - 1) <= self.keys.value(i))
    }
}

/// A decoded block, as the cache holds it.
#[derive(Debug)]
pub struct Block {
    pub entries: Entries,
    /// Bytes of its decompressed buffer.
    pub memory: usize,
}

/// The value schema as it is stored: every field nullable, no metadata.
pub fn stored_schema(value_schema: &Schema) -> SchemaRef {
    let fields: Vec<Field> = value_schema
        .fields()
        .iter()
        .map(|f| Field::new(f.name(), f.data_type().clone(), true))
        .collect();
    Arc::new(Schema::new(fields))
}

/// Encodes and decodes blocks of one value schema.
#[derive(Clone, Debug)]
pub struct BlockCodec {
    values: SchemaRef,
    /// By [has epochs][has weights].
    physical: [SchemaRef; 4],
}

impl BlockCodec {
    pub fn new(value_schema: &Schema) -> BlockCodec {
        let values = stored_schema(value_schema);
        let physical = [0, 1, 2, 3].map(|i| physical_schema(&values, i & 2 != 0, i & 1 != 0));
        BlockCodec { values, physical }
    }

    /// The schema of decoded values: every field nullable.
    pub fn value_schema(&self) -> &SchemaRef {
        &self.values
    }

    fn physical(&self, epochs: bool, weights: bool) -> &SchemaRef {
        &self.physical[usize::from(epochs) * 2 + usize::from(weights)]
    }

    /// Appends the encoded block to `out`; returns its length and checksum.
    pub fn encode(
        &self,
        entries: &Entries,
        encoder: &mut BlockEncoder,
        out: &mut Vec<u8>,
    ) -> Result<(usize, u32)> {
        debug_assert!(entries.is_well_formed());
        let epochs = compact_epochs(&entries.epochs);
        let weights = entries.weights.as_ref().filter(|w| w.values().iter().any(|&w| w != 1));
        let batch = self.physical_batch(entries, &epochs, weights)?;
        let message_len = encoder.encode_payload(&batch)?;

        let start = out.len();
        out.resize(start + HEADER_BYTES, 0);
        let lz4 = encoder.append_payload(out)?;
        let stored = out.len() - start - HEADER_BYTES;
        let mut flags = 0;
        let mut epoch = 0;
        if let Epochs::Uniform(e) = epochs {
            flags |= FLAG_UNIFORM_EPOCH;
            epoch = e.0;
        }
        if weights.is_none() {
            flags |= FLAG_UNIT_WEIGHTS;
        }
        if lz4 {
            flags |= FLAG_LZ4;
        }
        let header = &mut out[start..start + HEADER_BYTES];
        header[4..6].copy_from_slice(&MAGIC.to_le_bytes());
        header[6] = VERSION;
        header[7] = flags;
        header[8..12].copy_from_slice(&(stored as u32).to_le_bytes());
        header[12..16].copy_from_slice(&(encoder.payload.len() as u32).to_le_bytes());
        header[16..20].copy_from_slice(&(entries.len() as u32).to_le_bytes());
        header[20..28].copy_from_slice(&epoch.to_le_bytes());
        header[28..32].copy_from_slice(&(message_len as u32).to_le_bytes());
        let crc = crc32fast::hash(&out[start + 4..]);
        out[start..start + 4].copy_from_slice(&crc.to_le_bytes());
        Ok((out.len() - start, crc))
    }

    fn physical_batch(
        &self,
        entries: &Entries,
        epochs: &Epochs,
        weights: Option<&Int64Array>,
    ) -> Result<RecordBatch> {
        let mut columns: Vec<ArrayRef> = Vec::with_capacity(3 + self.values.fields().len());
        columns.push(Arc::new(entries.keys.clone()));
        if let Epochs::Each(a) = epochs {
            columns.push(Arc::new(a.clone()));
        }
        if let Some(w) = weights {
            columns.push(Arc::new(w.clone()));
        }
        columns.extend(entries.values.columns().iter().cloned());
        let schema = self.physical(matches!(epochs, Epochs::Each(_)), weights.is_some());
        Ok(RecordBatch::try_new(Arc::clone(schema), columns)?)
    }

    /// Decodes a whole block. `object` and `offset` name it in errors; `expected` is the checksum the
    /// index has for it; `assigned` replaces an epoch that was not known when the block was written.
    pub fn decode(
        &self,
        bytes: &[u8],
        expected: Option<u32>,
        assigned: Epoch,
        object: &str,
        offset: u64,
    ) -> Result<Block> {
        let corrupt = |reason: &str| StorageError::corrupt(object, offset, reason);
        let header = Header::parse(bytes).map_err(corrupt)?;
        if expected.is_some_and(|crc| crc != header.crc) {
            return Err(corrupt("checksum differs from the index"));
        }
        if crc32fast::hash(&bytes[4..HEADER_BYTES + header.stored]) != header.crc {
            return Err(corrupt("checksum mismatch"));
        }
        let payload = &bytes[HEADER_BYTES..HEADER_BYTES + header.stored];
        let buffer = header.decompress(payload).map_err(corrupt)?;
        let memory = buffer.len();
        let batch = self
            .decode_batch(&header, buffer)
            .map_err(|e| corrupt(&format!("undecodable record batch ({e})")))?;
        let entries = self.split(&header, batch, assigned).map_err(corrupt)?;
        Ok(Block { entries, memory })
    }

    fn decode_batch(
        &self,
        header: &Header,
        buffer: Buffer,
    ) -> std::result::Result<RecordBatch, String> {
        let body_at = header.message.next_multiple_of(ALIGNMENT);
        if body_at > buffer.len() {
            return Err("message longer than the payload".to_string());
        }
        let message =
            arrow_ipc::root_as_message(&buffer[..header.message]).map_err(|e| e.to_string())?;
        let batch = message.header_as_record_batch().ok_or("not a record batch")?;
        let schema = Arc::clone(self.physical(
            header.flags & FLAG_UNIFORM_EPOCH == 0,
            header.flags & FLAG_UNIT_WEIGHTS == 0,
        ));
        let body = buffer.slice(body_at);
        #[expect(
            clippy::disallowed_types,
            reason = "the decoder takes this type; the map stays empty"
        )]
        let none = std::collections::HashMap::new();
        RecordBatchDecoder::try_new(&body, batch, schema, &none, &MetadataVersion::V5)
            .and_then(RecordBatchDecoder::read_record_batch)
            .map_err(|e| e.to_string())
    }

    fn split(
        &self,
        header: &Header,
        batch: RecordBatch,
        assigned: Epoch,
    ) -> std::result::Result<Entries, &'static str> {
        let rows = batch.num_rows();
        if rows != header.rows {
            return Err("row count differs from the header");
        }
        let columns = batch.columns();
        let keys = columns[0].as_binary::<i32>().clone();
        let mut next = 1;
        let epochs = if header.flags & FLAG_UNIFORM_EPOCH != 0 {
            Epochs::Uniform(if header.epoch == Epoch::ZERO { assigned } else { header.epoch })
        } else {
            next += 1;
            Epochs::Each(columns[next - 1].as_primitive::<UInt64Type>().clone())
        };
        let weights = (header.flags & FLAG_UNIT_WEIGHTS == 0).then(|| {
            next += 1;
            columns[next - 1].as_primitive::<Int64Type>().clone()
        });
        let options = RecordBatchOptions::new().with_row_count(Some(rows));
        let values = RecordBatch::try_new_with_options(
            Arc::clone(&self.values),
            columns[next..].to_vec(),
            &options,
        )
        .map_err(|_| "columns do not fit the schema")?;
        Ok(Entries { keys, epochs, weights, values })
    }
}

fn physical_schema(values: &Schema, epochs: bool, weights: bool) -> SchemaRef {
    let mut fields = vec![Arc::new(Field::new(KEY_COLUMN, DataType::Binary, false))];
    if epochs {
        fields.push(Arc::new(Field::new(EPOCH_COLUMN, DataType::UInt64, false)));
    }
    if weights {
        fields.push(Arc::new(Field::new(WEIGHT_COLUMN, DataType::Int64, false)));
    }
    fields.extend(values.fields().iter().cloned());
    Arc::new(Schema::new(fields))
}

fn compact_epochs(epochs: &Epochs) -> Epochs {
    if let Epochs::Each(a) = epochs
        && let Some((min, max)) = epochs.bounds()
        && min == max
        // Zero means "not assigned yet" when uniform, so real zeros stay a column.
        && min != Epoch::ZERO
        && !a.is_empty()
    {
        return Epochs::Uniform(min);
    }
    epochs.clone()
}

/// Scratch space that successive blocks share.
pub struct BlockEncoder {
    generator: IpcDataGenerator,
    options: IpcWriteOptions,
    context: IpcWriteContext,
    tracker: DictionaryTracker,
    payload: Vec<u8>,
    compress: bool,
}

impl Default for BlockEncoder {
    fn default() -> BlockEncoder {
        BlockEncoder::new(true)
    }
}

impl BlockEncoder {
    pub fn new(compress: bool) -> BlockEncoder {
        let options = IpcWriteOptions::try_new(ALIGNMENT, false, MetadataVersion::V5)
            .expect("16 is one of the alignments that the format allows");
        BlockEncoder {
            generator: IpcDataGenerator::default(),
            options,
            context: IpcWriteContext::default(),
            tracker: DictionaryTracker::new(false),
            payload: Vec::new(),
            compress,
        }
    }

    /// Fills `payload`; returns the message's length.
    fn encode_payload(&mut self, batch: &RecordBatch) -> Result<usize> {
        let (_, data) =
            self.generator.encode(batch, &mut self.tracker, &self.options, &mut self.context)?;
        self.payload.clear();
        self.payload.extend_from_slice(&data.ipc_message);
        self.payload.resize(data.ipc_message.len().next_multiple_of(ALIGNMENT), 0);
        self.payload.extend_from_slice(&data.arrow_data);
        if self.payload.len() > MAX_PAYLOAD_BYTES {
            return Err(StorageError::internal(format!(
                "a block of {} bytes is too large",
                self.payload.len()
            )));
        }
        Ok(data.ipc_message.len())
    }

    /// Appends the payload, compressed when that saves at least an eighth. Returns whether it did.
    fn append_payload(&self, out: &mut Vec<u8>) -> Result<bool> {
        let start = out.len();
        if self.compress {
            out.resize(start + lz4_flex::block::get_maximum_output_size(self.payload.len()), 0);
            let stored = lz4_flex::block::compress_into(&self.payload, &mut out[start..])
                .map_err(|e| StorageError::internal(format!("lz4: {e}")))?;
            if stored <= self.payload.len() / 8 * 7 {
                out.truncate(start + stored);
                return Ok(true);
            }
            out.truncate(start);
        }
        out.extend_from_slice(&self.payload);
        Ok(false)
    }
}

struct Header {
    crc: u32,
    flags: u8,
    stored: usize,
    raw: usize,
    rows: usize,
    epoch: Epoch,
    message: usize,
}

impl Header {
    fn parse(bytes: &[u8]) -> std::result::Result<Header, &'static str> {
        if bytes.len() < HEADER_BYTES {
            return Err("shorter than a block header");
        }
        let u32_at = |at: usize| {
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        if bytes[4..6] != MAGIC.to_le_bytes() {
            return Err("not a block");
        }
        if bytes[6] != VERSION {
            return Err("unknown block version");
        }
        let header = Header {
            crc: u32_at(0),
            flags: bytes[7],
            stored: u32_at(8) as usize,
            raw: u32_at(12) as usize,
            rows: u32_at(16) as usize,
            epoch: Epoch(u64::from(u32_at(20)) | u64::from(u32_at(24)) << 32),
            message: u32_at(28) as usize,
        };
        if header.stored != bytes.len() - HEADER_BYTES
            || header.raw > MAX_PAYLOAD_BYTES
            || header.message > header.raw
        {
            return Err("lengths do not agree");
        }
        Ok(header)
    }

    fn decompress(&self, payload: &[u8]) -> std::result::Result<Buffer, &'static str> {
        let mut buffer = MutableBuffer::from_len_zeroed(self.raw);
        if self.flags & FLAG_LZ4 == 0 {
            if payload.len() != self.raw {
                return Err("lengths do not agree");
            }
            buffer.copy_from_slice(payload);
        } else {
            let n = lz4_flex::block::decompress_into(payload, &mut buffer)
                .map_err(|_| "lz4 stream is damaged")?;
            if n != self.raw {
                return Err("lengths do not agree");
            }
        }
        Ok(buffer.into())
    }
}
