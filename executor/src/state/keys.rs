//! Keys of a chunk: hashed once, encoded once (docs/design.md §6), and owned key bytes.

use std::cmp::Ordering;
use std::fmt;
use std::ops::Deref;

use arrow::array::{Array, ArrayRef, BinaryArray, BinaryBuilder, RecordBatch};
use arrow::buffer::BooleanBuffer;
use arrow::compute::SortOptions;
use arrow::datatypes::{DataType, Schema};
use arrow_row::Rows;
use millrace_common::Vnode;
use millrace_common::hash::{hash_columns, vnodes};
use millrace_common::keys::{KeyCodec, VNODE_BYTES, columns_at};

use crate::error::ExecError;

/// Bytes kept without an allocation: two encoded 8-byte columns fit.
const INLINE: usize = 22;

/// Immutable key bytes; short ones live in place.
#[derive(Clone)]
pub enum KeyBytes {
    Inline { len: u8, data: [u8; INLINE] },
    Heap(Box<[u8]>),
}

impl KeyBytes {
    pub fn new(bytes: &[u8]) -> KeyBytes {
        if bytes.len() <= INLINE {
            let mut data = [0; INLINE];
            data[..bytes.len()].copy_from_slice(bytes);
            KeyBytes::Inline { len: bytes.len() as u8, data }
        } else {
            KeyBytes::Heap(bytes.into())
        }
    }

    /// Bytes outside of the value itself.
    pub fn heap_size(&self) -> usize {
        match self {
            KeyBytes::Inline { .. } => 0,
            KeyBytes::Heap(b) => b.len(),
        }
    }
}

impl Deref for KeyBytes {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        match self {
            KeyBytes::Inline { len, data } => &data[..usize::from(*len)],
            KeyBytes::Heap(b) => b,
        }
    }
}

impl std::borrow::Borrow<[u8]> for KeyBytes {
    fn borrow(&self) -> &[u8] {
        self
    }
}

impl PartialEq for KeyBytes {
    fn eq(&self, other: &KeyBytes) -> bool {
        **self == **other
    }
}

impl Eq for KeyBytes {}

impl PartialOrd for KeyBytes {
    fn partial_cmp(&self, other: &KeyBytes) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for KeyBytes {
    fn cmp(&self, other: &KeyBytes) -> Ordering {
        (**self).cmp(&**other)
    }
}

impl std::hash::Hash for KeyBytes {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        (**self).hash(state);
    }
}

impl fmt::Debug for KeyBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("0x")?;
        self.iter().try_for_each(|b| write!(f, "{b:02x}"))
    }
}

/// Encodes the keys of one input of an operator.
#[derive(Debug)]
pub struct KeyReader {
    columns: Vec<usize>,
    /// Columns whose hash is the vnode; none: vnode 0.
    vnode: Vec<usize>,
    /// Their positions among the key's columns; `None`: some are not among them.
    vnode_in_key: Option<Vec<usize>>,
    types: Vec<DataType>,
    codec: KeyCodec,
}

/// The keys of one chunk.
pub struct ChunkKeys {
    pub hashes: Vec<u64>,
    /// Of the vnode columns; empty: all in vnode 0.
    pub vnodes: Vec<Vnode>,
    pub rows: Rows,
    /// The key columns themselves.
    pub columns: Vec<ArrayRef>,
}

impl KeyReader {
    pub fn new(
        schema: &Schema,
        columns: &[usize],
        vnode: &[usize],
    ) -> Result<KeyReader, ExecError> {
        let types = columns.iter().map(|&c| schema.field(c).data_type().clone()).collect();
        let codec = KeyCodec::for_columns(schema, columns)?;
        Ok(KeyReader::of_types(columns, vnode, types, codec))
    }

    /// Of these columns, and behind them another one, which is encoded in this order.
    pub fn with_last(
        schema: &Schema,
        columns: &[usize],
        vnode: &[usize],
        (last, order): (usize, SortOptions),
    ) -> Result<KeyReader, ExecError> {
        let all = [columns, &[last]].concat();
        let types: Vec<DataType> =
            all.iter().map(|&c| schema.field(c).data_type().clone()).collect();
        let orders = columns.iter().map(|_| SortOptions::default()).chain([order]);
        let codec = KeyCodec::with_options(types.iter().cloned().zip(orders))?;
        Ok(KeyReader::of_types(&all, vnode, types, codec))
    }

    fn of_types(
        columns: &[usize],
        vnode: &[usize],
        types: Vec<DataType>,
        codec: KeyCodec,
    ) -> KeyReader {
        KeyReader {
            columns: columns.to_vec(),
            vnode: vnode.to_vec(),
            vnode_in_key: vnode.iter().map(|v| columns.iter().position(|c| c == v)).collect(),
            types,
            codec,
        }
    }

    pub fn codec(&self) -> &KeyCodec {
        &self.codec
    }

    /// Rows without a NULL in their key; `None`: all of them.
    pub fn non_null(&self, batch: &RecordBatch) -> Option<BooleanBuffer> {
        let mut valid: Option<BooleanBuffer> = None;
        for &column in &self.columns {
            let nulls = batch.column(column).logical_nulls().filter(|n| n.null_count() > 0);
            if let Some(nulls) = nulls {
                valid = Some(match valid {
                    None => nulls.inner().clone(),
                    Some(v) => &v & nulls.inner(),
                });
            }
        }
        valid
    }

    pub fn read(&self, batch: &RecordBatch) -> Result<ChunkKeys, ExecError> {
        let columns = columns_at(batch, &self.columns);
        let hashes = hash_columns(&columns, batch.num_rows())?;
        let vnodes = if self.vnode.is_empty() {
            Vec::new()
        } else if self.vnode == self.columns {
            vnodes(&hashes)
        } else {
            vnodes(&hash_columns(&columns_at(batch, &self.vnode), batch.num_rows())?)
        };
        // Without columns nobody asks for them.
        let rows = self.codec.rows(&columns)?;
        Ok(ChunkKeys { hashes, vnodes, rows, columns })
    }

    /// The keys that key columns of equal length make. `None`: they are none of these keys' columns, or the vnodes depend
    /// on more.
    pub fn read_columns(&self, columns: &[ArrayRef]) -> Option<ChunkKeys> {
        let is_of_type = |(c, t): (&ArrayRef, &DataType)| c.data_type().equals_datatype(t);
        if columns.len() != self.types.len() || !columns.iter().zip(&self.types).all(is_of_type) {
            return None;
        }
        let vnode_in_key = self.vnode_in_key.as_ref()?;
        let keys = columns.first()?.len();
        let hashes = hash_columns(columns, keys).ok()?;
        let vnodes = if vnode_in_key.is_empty() {
            Vec::new()
        } else if self.vnode == self.columns {
            vnodes(&hashes)
        } else {
            let own = vnode_in_key.iter().map(|&at| columns.get(at).cloned());
            vnodes(&hash_columns(&own.collect::<Option<Vec<_>>>()?, keys).ok()?)
        };
        let rows = self.codec.rows(columns).ok()?;
        Some(ChunkKeys { hashes, vnodes, rows, columns: columns.to_vec() })
    }
}

impl ChunkKeys {
    #[inline]
    pub fn vnode(&self, row: usize) -> Vnode {
        self.vnodes.get(row).copied().unwrap_or(0)
    }

    /// The encoded key of a row, without vnode.
    #[inline]
    pub fn key(&self, row: usize) -> &[u8] {
        if self.columns.is_empty() { &[] } else { self.rows.row(row).data() }
    }
}

/// Appends `vnode | parts…` as one storage key.
pub fn append_storage_key(
    out: &mut BinaryBuilder,
    scratch: &mut Vec<u8>,
    vnode: Vnode,
    parts: &[&[u8]],
) {
    scratch.clear();
    scratch.extend_from_slice(&vnode.to_be_bytes());
    for part in parts {
        scratch.extend_from_slice(part);
    }
    out.append_value(&scratch);
}

/// Storage keys (or prefixes) of keys given as (vnode, bytes).
pub fn storage_keys<'a>(keys: impl ExactSizeIterator<Item = (Vnode, &'a [u8])>) -> BinaryArray {
    let mut out = BinaryBuilder::with_capacity(keys.len(), keys.len() * (VNODE_BYTES + 16));
    let mut scratch = Vec::with_capacity(64);
    for (vnode, key) in keys {
        append_storage_key(&mut out, &mut scratch, vnode, &[key]);
    }
    out.finish()
}
