//! Entries as columns: the one in-memory form of state. Memtables, memory runs and decoded blocks all
//! hand out [`Entries`]; every reader and merge works on them.
//!
//! Order inside a sorted source: key bytes, then epoch, both ascending. `(key, epoch)` is unique in a
//! source. An entry is a put (`Keyed`, weight > 0), a delete (`Keyed`, weight ≤ 0; its values mean
//! nothing), a weight that adds up (`Multiset`) or an arrival (`Append`).

use std::cmp::Ordering;

use arrow::array::{
    Array, ArrayRef, AsArray, BinaryArray, Int64Array, RecordBatch, UInt32Array, new_empty_array,
};
use arrow::compute;
use arrow::datatypes::{DataType, Int64Type, SchemaRef, UInt32Type};
use arrow::error::ArrowError;
use millrace_common::Epoch;
pub(crate) use millrace_common::delta::new_batch as rebuild;
use millrace_common::delta::take_rows;

use crate::block::Entries;

impl Entries {
    /// The same entries with only these value columns.
    pub fn project(&self, columns: &[usize]) -> Result<Entries, ArrowError> {
        Ok(Entries { values: project(&self.values, columns)?, ..self.clone() })
    }

    /// Heap bytes that the entries' own content takes (shared buffers count only by the slice).
    pub fn content_bytes(&self) -> usize {
        let columns: usize = self.values.columns().iter().map(array_bytes).sum();
        binary_bytes(&self.keys) + self.len() * 16 + columns
    }

    /// The position of the first entry whose key is not below `key`, at or after `from`.
    pub fn lower_bound(&self, key: &[u8], from: usize) -> usize {
        gallop(&self.keys, from, |k| k < key)
    }

    /// The position of the first entry whose key is above `key`, at or after `from`.
    pub fn upper_bound(&self, key: &[u8], from: usize) -> usize {
        gallop(&self.keys, from, |k| k <= key)
    }

    /// The epoch of the newest entry of a key up to an epoch.
    pub fn newest(&self, key: &[u8], as_of: Epoch) -> Option<Epoch> {
        let end = self.upper_bound(key, 0);
        let of_key = (0..end).rev().take_while(|&row| self.keys.value(row) == key);
        of_key.map(|row| self.epochs.at(row)).find(|&epoch| epoch <= as_of)
    }

    /// The weights as an array, made where they are implied.
    pub fn weights_array(&self) -> Int64Array {
        self.weights.clone().unwrap_or_else(|| Int64Array::from_value(1, self.len()))
    }
}

/// First position from `from` on where `below` is false; `below` is true on a prefix. Doubling steps
/// first, so that walking sorted questions over sorted keys costs by distance, not by size.
fn gallop(keys: &BinaryArray, from: usize, below: impl Fn(&[u8]) -> bool) -> usize {
    let len = keys.len();
    let mut low = from;
    let mut step = 1;
    while low + step <= len && below(keys.value(low + step - 1)) {
        low += step;
        step *= 2;
    }
    let mut high = (low + step).min(len);
    while low < high {
        let mid = low + (high - low) / 2;
        if below(keys.value(mid)) { low = mid + 1 } else { high = mid }
    }
    low
}

fn binary_bytes(keys: &BinaryArray) -> usize {
    let offsets = keys.value_offsets();
    let bytes = offsets.last().zip(offsets.first()).map_or(0, |(b, a)| (b - a) as usize);
    bytes + keys.len() * 4
}

fn array_bytes(array: &ArrayRef) -> usize {
    array.to_data().get_slice_memory_size().unwrap_or_else(|_| array.get_array_memory_size())
}

/// What a lookup found: sorted by (input, key), consolidated, weights > 0.
#[derive(Clone, Debug)]
pub struct Found {
    /// Index of the key or prefix that was asked for.
    pub input: UInt32Array,
    pub keys: BinaryArray,
    pub weights: Int64Array,
    pub values: RecordBatch,
}

impl Found {
    pub fn empty(schema: &SchemaRef) -> Found {
        Found {
            input: UInt32Array::from(Vec::<u32>::new()),
            keys: BinaryArray::from(Vec::<&[u8]>::new()),
            weights: Int64Array::from(Vec::<i64>::new()),
            values: RecordBatch::new_empty(SchemaRef::clone(schema)),
        }
    }

    pub fn len(&self) -> usize {
        self.input.len()
    }

    pub fn is_empty(&self) -> bool {
        self.input.is_empty()
    }

    /// All rows of parts of one lookup, with these inputs.
    pub(crate) fn concat(inputs: Vec<u32>, mut parts: Vec<Found>) -> Result<Found, ArrowError> {
        let input = UInt32Array::from(inputs);
        if parts.len() == 1 {
            let only = parts.remove(0);
            return Ok(Found { input, ..only });
        }
        let Some(schema) = parts.first().map(|p| p.values.schema()) else {
            return Err(ArrowError::ComputeError("a lookup has no parts".to_string()));
        };
        let keys: Vec<&dyn Array> = parts.iter().map(|p| &p.keys as &dyn Array).collect();
        let weights: Vec<&dyn Array> = parts.iter().map(|p| &p.weights as &dyn Array).collect();
        Ok(Found {
            input,
            keys: compute::concat(&keys)?.as_binary::<i32>().clone(),
            weights: compute::concat(&weights)?.as_primitive::<Int64Type>().clone(),
            values: compute::concat_batches(&schema, parts.iter().map(|p| &p.values))?,
        })
    }

    /// In the order of inputs; rows of one input stay in their order.
    pub(crate) fn by_input(self) -> Result<Found, ArrowError> {
        let mut order: Vec<u32> = (0..self.len() as u32).collect();
        order.sort_by_key(|&row| self.input.value(row as usize));
        let order = UInt32Array::from(order);
        Ok(Found {
            input: compute::take(&self.input, &order, None)?.as_primitive::<UInt32Type>().clone(),
            keys: compute::take(&self.keys, &order, None)?.as_binary::<i32>().clone(),
            weights: compute::take(&self.weights, &order, None)?
                .as_primitive::<Int64Type>()
                .clone(),
            values: take_rows(&self.values, &order)?,
        })
    }
}

/// Columns of a batch, also when none remain.
pub(crate) fn project(batch: &RecordBatch, columns: &[usize]) -> Result<RecordBatch, ArrowError> {
    let schema = SchemaRef::new(batch.schema_ref().project(columns)?);
    let arrays = columns.iter().map(|&c| ArrayRef::clone(batch.column(c))).collect();
    rebuild(&schema, arrays, batch.num_rows())
}

/// Rows picked out of several batches of one table, as (batch, row). Contiguous rows of one batch
/// cost nothing, rows of one batch a `take`, others an `interleave`.
pub(crate) struct Gather<'a> {
    picks: &'a [(usize, usize)],
    shape: Shape,
}

enum Shape {
    Empty,
    Slice { batch: usize, offset: usize },
    Take { batch: usize, rows: UInt32Array },
    Interleave,
}

impl<'a> Gather<'a> {
    pub fn new(picks: &'a [(usize, usize)]) -> Gather<'a> {
        let Some(&(batch, offset)) = picks.first() else {
            return Gather { picks, shape: Shape::Empty };
        };
        let shape = if picks.iter().any(|p| p.0 != batch) {
            Shape::Interleave
        } else if picks.iter().enumerate().all(|(i, p)| p.1 == offset + i) {
            Shape::Slice { batch, offset }
        } else {
            let rows = picks.iter().map(|p| p.1 as u32).collect::<Vec<_>>().into();
            Shape::Take { batch, rows }
        };
        Gather { picks, shape }
    }

    pub fn array(
        &self,
        data_type: &DataType,
        column: impl Fn(usize) -> ArrayRef,
        batches: usize,
    ) -> Result<ArrayRef, ArrowError> {
        Ok(match &self.shape {
            Shape::Empty => new_empty_array(data_type),
            Shape::Slice { batch, offset } => column(*batch).slice(*offset, self.picks.len()),
            Shape::Take { batch, rows } => compute::take(&column(*batch), rows, None)?,
            Shape::Interleave => {
                let arrays: Vec<ArrayRef> = (0..batches).map(column).collect();
                let refs: Vec<&dyn Array> = arrays.iter().map(|a| a.as_ref()).collect();
                compute::interleave(&refs, self.picks)?
            }
        })
    }

    pub fn keys(&self, batches: &[Entries]) -> Result<BinaryArray, ArrowError> {
        let column = |b: usize| -> ArrayRef { std::sync::Arc::new(batches[b].keys.clone()) };
        Ok(self.array(&DataType::Binary, column, batches.len())?.as_binary::<i32>().clone())
    }

    pub fn values(
        &self,
        schema: &SchemaRef,
        batches: &[Entries],
    ) -> Result<RecordBatch, ArrowError> {
        let columns = (0..schema.fields().len())
            .map(|c| {
                let column = |b: usize| ArrayRef::clone(batches[b].values.column(c));
                self.array(schema.field(c).data_type(), column, batches.len())
            })
            .collect::<Result<Vec<_>, _>>()?;
        rebuild(schema, columns, self.picks.len())
    }
}

/// Keys with their order settled by their first 16 bytes where those differ: vnode, null flag and a
/// whole 64-bit column fit, so most comparisons touch no key bytes.
pub(crate) fn key_head(key: &[u8]) -> u128 {
    let mut head = [0u8; 16];
    let n = key.len().min(16);
    head[..n].copy_from_slice(&key[..n]);
    u128::from_be_bytes(head)
}

/// Compares keys whose heads are equal.
pub(crate) fn compare_rest(a: &[u8], b: &[u8]) -> Ordering {
    if a.len() > 16 && b.len() > 16 { a[16..].cmp(&b[16..]) } else { a.cmp(b) }
}
