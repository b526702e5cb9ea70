//! Relations are Z-sets: a [`DeltaChunk`] is a change to one (docs/design.md §3).

use std::sync::Arc;

use arrow::array::{
    Array, ArrayRef, BooleanArray, Int64Array, RecordBatch, RecordBatchOptions, UInt32Array,
};
use arrow::compute;
use arrow::datatypes::SchemaRef;
use arrow::error::ArrowError;

/// Rows with integer weights: +1 inserts a row, −1 deletes one, any other integer is that many
/// times. `weights: None` means +1 for every row.
///
/// There are no paired update records: an update is a −1 row and a +1 row, in any order. Within an
/// epoch deltas commute.
#[derive(Clone, Debug)]
pub struct DeltaChunk {
    pub batch: RecordBatch,
    /// Never null; as long as `batch`.
    pub weights: Option<Int64Array>,
}

impl DeltaChunk {
    /// A chunk of plain insertions.
    pub fn inserts(batch: RecordBatch) -> DeltaChunk {
        DeltaChunk { batch, weights: None }
    }

    pub fn new(batch: RecordBatch, weights: Option<Int64Array>) -> DeltaChunk {
        debug_assert!(
            weights.as_ref().is_none_or(|w| w.len() == batch.num_rows() && w.null_count() == 0)
        );
        DeltaChunk { batch, weights }
    }

    pub fn empty(schema: SchemaRef) -> DeltaChunk {
        DeltaChunk::inserts(RecordBatch::new_empty(schema))
    }

    pub fn num_rows(&self) -> usize {
        self.batch.num_rows()
    }

    pub fn is_empty(&self) -> bool {
        self.batch.num_rows() == 0
    }

    pub fn schema(&self) -> SchemaRef {
        self.batch.schema()
    }

    /// The weight of row `i`.
    pub fn weight(&self, i: usize) -> i64 {
        self.weights.as_ref().map_or(1, |w| w.value(i))
    }

    /// The weights as an array, made where they are implied.
    pub fn weights_array(&self) -> Int64Array {
        self.weights.clone().unwrap_or_else(|| Int64Array::from_value(1, self.num_rows()))
    }

    /// The rows where `mask` is true (NULL counts as false), with their weights.
    pub fn filter(&self, mask: &BooleanArray) -> Result<DeltaChunk, ArrowError> {
        let batch = compute::filter_record_batch(&self.batch, mask)?;
        let weights = match &self.weights {
            None => None,
            Some(w) => Some(as_int64(compute::filter(w, mask)?)),
        };
        Ok(DeltaChunk { batch, weights })
    }

    /// The rows at `indices`, in that order, with their weights.
    pub fn take(&self, indices: &UInt32Array) -> Result<DeltaChunk, ArrowError> {
        let batch = take_rows(&self.batch, indices)?;
        let weights = match &self.weights {
            None => None,
            Some(w) => Some(as_int64(compute::take(w, indices, None)?)),
        };
        Ok(DeltaChunk { batch, weights })
    }

    /// A zero-copy window of `len` rows from `offset`.
    pub fn slice(&self, offset: usize, len: usize) -> DeltaChunk {
        DeltaChunk {
            batch: self.batch.slice(offset, len),
            weights: self.weights.as_ref().map(|w| w.slice(offset, len)),
        }
    }

    /// The same rows with every weight negated.
    pub fn negate(&self) -> DeltaChunk {
        let negated: Int64Array = match &self.weights {
            None => Int64Array::from_value(-1, self.num_rows()),
            Some(w) => w.values().iter().map(|v| -v).collect::<Vec<_>>().into(),
        };
        DeltaChunk { batch: self.batch.clone(), weights: Some(negated) }
    }

    /// All chunks as one. An empty list gives an empty chunk of `schema`.
    pub fn concat(schema: &SchemaRef, chunks: &[DeltaChunk]) -> Result<DeltaChunk, ArrowError> {
        if let [only] = chunks {
            return Ok(only.clone());
        }
        let batch = compute::concat_batches(schema, chunks.iter().map(|c| &c.batch))?;
        let weights = if chunks.iter().all(|c| c.weights.is_none()) {
            None
        } else {
            let mut all = Vec::with_capacity(batch.num_rows());
            for chunk in chunks {
                match &chunk.weights {
                    None => all.resize(all.len() + chunk.num_rows(), 1),
                    Some(w) => all.extend_from_slice(w.values()),
                }
            }
            Some(Int64Array::from(all))
        };
        Ok(DeltaChunk { batch, weights })
    }

    /// The same weights over other columns (a projection).
    pub fn with_columns(
        &self,
        schema: SchemaRef,
        columns: Vec<ArrayRef>,
    ) -> Result<DeltaChunk, ArrowError> {
        let options = RecordBatchOptions::new().with_row_count(Some(self.num_rows()));
        Ok(DeltaChunk {
            batch: RecordBatch::try_new_with_options(schema, columns, &options)?,
            weights: self.weights.clone(),
        })
    }

    /// Approximate heap bytes, for credits and budgets: all that it keeps from being freed. A slice counts the whole of
    /// the buffers that it is a part of.
    pub fn memory_size(&self) -> usize {
        self.batch.get_array_memory_size() + self.weights.as_ref().map_or(0, |w| w.len() * 8)
    }
}

/// The rows at `indices`, in that order; also of a batch without columns, which is nothing but a number of rows.
pub fn take_rows(batch: &RecordBatch, indices: &UInt32Array) -> Result<RecordBatch, ArrowError> {
    let columns = batch.columns().iter().map(|c| compute::take(c, indices, None));
    let options = RecordBatchOptions::new().with_row_count(Some(indices.len()));
    RecordBatch::try_new_with_options(batch.schema(), columns.collect::<Result<_, _>>()?, &options)
}

fn as_int64(array: ArrayRef) -> Int64Array {
    array
        .as_any()
        .downcast_ref::<Int64Array>()
        .expect("filter and take keep the type of a weights column")
        .clone()
}

/// A schema-sharing helper: the `Arc` of a batch's schema.
pub fn schema_of(batch: &RecordBatch) -> SchemaRef {
    Arc::clone(batch.schema_ref())
}

/// A batch of these columns; `rows` matters where there are none. Fails where they do not fit the schema.
pub fn new_batch(
    schema: &SchemaRef,
    columns: Vec<ArrayRef>,
    rows: usize,
) -> Result<RecordBatch, ArrowError> {
    let options = RecordBatchOptions::new().with_row_count(Some(rows));
    RecordBatch::try_new_with_options(SchemaRef::clone(schema), columns, &options)
}
