//! Rows kept column-wise in the chunks they came in, and referred to by (chunk, row): a row in state
//! costs no allocation and output is built by `interleave` (docs/design.md §6).
//!
//! A chunk lives while a row of it does. Chunks that are mostly dead, or tiny, waste memory: the
//! owner rewrites its live rows densely when [`RowArena::wants_compaction`] says so, which it does at
//! most once per doubling of the waste, so the cost is amortised.

use arrow::array::{Array, ArrayRef, AsArray, RecordBatch, UInt32Array};
use arrow::compute;
use arrow::datatypes::{DataType, SchemaRef};
use millrace_common::delta::take_rows;

use crate::error::ExecError;

/// A row: its chunk and its place in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RowRef {
    pub chunk: u32,
    pub row: u32,
}

/// Batches, and rows as (batch, row).
pub type Located<'a> = (Vec<&'a RecordBatch>, Vec<(usize, usize)>);

struct Chunk {
    batch: RecordBatch,
    live: u32,
    bytes: usize,
}

/// See the module.
pub struct RowArena {
    schema: SchemaRef,
    chunks: Vec<Option<Chunk>>,
    free: Vec<u32>,
    held: usize,
    bytes: usize,
    live_rows: usize,
    held_rows: usize,
}

/// Bytes that a window may keep in memory beside its own rows.
const WINDOW_WASTE: usize = 1 << 20;

/// Rows of a chunk made by compaction.
const DENSE_ROWS: usize = 8_192;

impl RowArena {
    pub fn new(schema: SchemaRef) -> RowArena {
        RowArena {
            schema,
            chunks: Vec::new(),
            free: Vec::new(),
            held: 0,
            bytes: 0,
            live_rows: 0,
            held_rows: 0,
        }
    }

    pub fn schema(&self) -> &SchemaRef {
        &self.schema
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Average bytes of a row: what a reference to one is charged with.
    pub fn row_bytes(&self) -> usize {
        self.bytes / self.held_rows.max(1)
    }

    /// Keeps a chunk of which `live` rows are referred to. A small window of something large is copied: it would keep
    /// all of that in memory.
    pub fn insert(&mut self, batch: RecordBatch, live: usize) -> u32 {
        let mut bytes = batch_bytes(&batch);
        let mut batch = batch;
        if batch.get_array_memory_size() > 4 * bytes + WINDOW_WASTE
            && let Ok(own) = copied(&batch)
        {
            bytes = batch_bytes(&own);
            batch = own;
        }
        self.bytes += bytes;
        self.live_rows += live;
        self.held_rows += batch.num_rows();
        self.held += 1;
        let chunk = Some(Chunk { batch, live: live as u32, bytes });
        match self.free.pop() {
            Some(id) => {
                self.chunks[id as usize] = chunk;
                id
            }
            None => {
                self.chunks.push(chunk);
                (self.chunks.len() - 1) as u32
            }
        }
    }

    /// One more reference to a row of the chunk.
    pub fn retain(&mut self, row: RowRef) {
        if let Some(chunk) = &mut self.chunks[row.chunk as usize] {
            chunk.live += 1;
            self.live_rows += 1;
        }
    }

    /// A row is no longer referred to.
    pub fn release(&mut self, row: RowRef) {
        let place = &mut self.chunks[row.chunk as usize];
        let Some(chunk) = place else { return };
        chunk.live -= 1;
        self.live_rows -= 1;
        if chunk.live == 0 {
            self.bytes -= chunk.bytes;
            self.held_rows -= chunk.batch.num_rows();
            self.held -= 1;
            *place = None;
            self.free.push(row.chunk);
        }
    }

    /// The given columns of rows, in order.
    pub fn gather(&self, rows: &[RowRef], columns: &[usize]) -> Result<Vec<ArrayRef>, ExecError> {
        let (batches, picks) = self.locate(rows)?;
        columns.iter().map(|&c| gather_column(&batches, &picks, c)).collect()
    }

    /// Leaves of rows, and of what goes with each, those whose columns together take no more bytes than these: what is
    /// too large for the rest is left out.
    pub fn keep_fitting<T>(
        &self,
        rows: &mut Vec<RowRef>,
        beside: &mut Vec<T>,
        columns: &[usize],
        mut bytes: usize,
    ) {
        let fits = |row: &RowRef| {
            let chunk = self.chunks.get(row.chunk as usize).and_then(Option::as_ref);
            let value = |&c: &usize| {
                chunk.map_or(0, |chunk| value_bytes(chunk.batch.column(c), row.row as usize))
            };
            let own: usize = columns.iter().map(value).sum();
            let rest = bytes.checked_sub(own);
            bytes = rest.unwrap_or(bytes);
            rest.is_some()
        };
        let fits: Vec<bool> = rows.iter().map(fits).collect();
        let mut of_rows = fits.iter();
        rows.retain(|_| of_rows.next() == Some(&true));
        let mut of_beside = fits.iter();
        beside.retain(|_| of_beside.next() == Some(&true));
    }

    /// Whole rows, in order.
    pub fn batch(&self, rows: &[RowRef]) -> Result<RecordBatch, ExecError> {
        let (batches, picks) = self.locate(rows)?;
        gather_batch(&self.schema, &batches, &picks)
    }

    /// The chunks that `rows` lie in, and every row's place in that list.
    pub fn locate(&self, rows: &[RowRef]) -> Result<Located<'_>, ExecError> {
        let mut place = vec![u32::MAX; self.chunks.len()];
        let mut batches = Vec::new();
        let mut picks = Vec::with_capacity(rows.len());
        for r in rows {
            let at = &mut place[r.chunk as usize];
            if *at == u32::MAX {
                let chunk = self.chunks[r.chunk as usize]
                    .as_ref()
                    .ok_or_else(|| ExecError::internal("a row in state refers to a freed chunk"))?;
                *at = batches.len() as u32;
                batches.push(&chunk.batch);
            }
            picks.push((*at as usize, r.row as usize));
        }
        Ok((batches, picks))
    }

    /// Whether most of what is held is dead or scattered over tiny chunks.
    pub fn wants_compaction(&self) -> bool {
        let sparse = self.held_rows > 4 * DENSE_ROWS && self.live_rows * 2 < self.held_rows;
        let scattered = self.held > 1_024 && self.held > self.live_rows / 64;
        sparse || scattered
    }

    /// Rewrites `rows`, which must be all live references, each once; they are updated in place.
    pub fn compact(&mut self, rows: &mut [&mut RowRef]) -> Result<(), ExecError> {
        let mut dense = RowArena::new(SchemaRef::clone(&self.schema));
        for group in rows.chunks_mut(DENSE_ROWS) {
            let refs: Vec<RowRef> = group.iter().map(|r| **r).collect();
            let chunk = dense.insert(self.batch(&refs)?, refs.len());
            for (row, r) in group.iter_mut().enumerate() {
                **r = RowRef { chunk, row: row as u32 };
            }
        }
        *self = dense;
        Ok(())
    }
}

/// The same rows in buffers of their own.
fn copied(batch: &RecordBatch) -> Result<RecordBatch, arrow::error::ArrowError> {
    let all = UInt32Array::from_iter_values(0..batch.num_rows() as u32);
    take_rows(batch, &all)
}

/// Bytes of the rows of a batch (of its window, if it is one).
pub fn batch_bytes(batch: &RecordBatch) -> usize {
    batch.columns().iter().map(column_bytes).sum()
}

/// Bytes of a column (of its window, if it is one).
pub fn column_bytes(column: &ArrayRef) -> usize {
    let bytes = column.to_data().get_slice_memory_size();
    bytes.unwrap_or_else(|_| column.get_array_memory_size())
}

/// Bytes of one value of a column.
fn value_bytes(column: &ArrayRef, row: usize) -> usize {
    match column.data_type() {
        DataType::Boolean => 1,
        DataType::Utf8 => size_of::<i32>() + column.as_string::<i32>().value(row).len(),
        DataType::Binary => size_of::<i32>() + column.as_binary::<i32>().value(row).len(),
        other => other.primitive_width().unwrap_or_else(|| column_bytes(&column.slice(row, 1))),
    }
}

/// A column of rows picked from several batches.
pub fn gather_column(
    batches: &[&RecordBatch],
    picks: &[(usize, usize)],
    column: usize,
) -> Result<ArrayRef, ExecError> {
    if let [only] = batches {
        let rows = UInt32Array::from_iter_values(picks.iter().map(|p| p.1 as u32));
        return Ok(compute::take(only.column(column), &rows, None)?);
    }
    let arrays: Vec<&dyn arrow::array::Array> =
        batches.iter().map(|b| b.column(column).as_ref()).collect();
    Ok(compute::interleave(&arrays, picks)?)
}

/// Rows picked from several batches of one schema.
pub fn gather_batch(
    schema: &SchemaRef,
    batches: &[&RecordBatch],
    picks: &[(usize, usize)],
) -> Result<RecordBatch, ExecError> {
    let columns = if picks.is_empty() {
        schema.fields().iter().map(|f| arrow::array::new_empty_array(f.data_type())).collect()
    } else {
        (0..schema.fields().len())
            .map(|c| gather_column(batches, picks, c))
            .collect::<Result<Vec<_>, ExecError>>()?
    };
    new_batch(schema, columns, picks.len())
}

/// A batch of these columns; `rows` matters where there are none. Nullability is not checked: an
/// expression that failed gives NULL in any column of a view.
pub fn new_batch(
    schema: &SchemaRef,
    columns: Vec<ArrayRef>,
    rows: usize,
) -> Result<RecordBatch, ExecError> {
    Ok(millrace_common::delta::new_batch(schema, columns, rows)?)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::array::{Int64Array, StringArray};
    use arrow::datatypes::{Field, Schema};

    use super::*;

    #[test]
    fn rows_too_large_for_the_rest_are_left_out() {
        let fields = [("n", DataType::Int64), ("text", DataType::Utf8)];
        let fields = fields.map(|(name, of)| Field::new(name, of, true));
        let schema: SchemaRef = Arc::new(Schema::new(fields.to_vec()));
        let mut arena = RowArena::new(Arc::clone(&schema));
        let mut insert = |lengths: &[usize]| {
            let n: ArrayRef = Arc::new(Int64Array::from_iter_values(0..lengths.len() as i64));
            let text = lengths.iter().map(|&bytes| "x".repeat(bytes));
            let text: ArrayRef = Arc::new(StringArray::from_iter_values(text));
            let batch = RecordBatch::try_new(Arc::clone(&schema), vec![n, text]).unwrap();
            let chunk = arena.insert(batch, lengths.len());
            (0..lengths.len() as u32).map(|row| RowRef { chunk, row }).collect::<Vec<RowRef>>()
        };
        let all = [insert(&[10, 1_000, 10]), insert(&[500, 400])].concat();
        let fitting = |columns: &[usize], bytes| {
            let (mut rows, mut of) = (all.clone(), vec![0, 1, 2, 3, 4]);
            arena.keep_fitting(&mut rows, &mut of, columns, bytes);
            assert_eq!(rows, of.iter().map(|&at: &usize| all[at]).collect::<Vec<_>>());
            of
        };
        assert_eq!(fitting(&[0, 1], 600), [0, 2, 3]);
        assert_eq!(fitting(&[0, 1], 500), [0, 2, 4]);
        assert_eq!(fitting(&[0, 1], 1 << 20), [0, 1, 2, 3, 4]);
        assert_eq!(fitting(&[0], 32), [0, 1, 2, 3], "only columns that are wanted count");
    }
}
