//! The elements of lists as rows. Linear: keeps no state and passes weights through.

use std::ops::Range;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, ListArray, UInt32Array};
use arrow::compute::take;
use arrow::datatypes::SchemaRef;
use millrace_common::DeltaChunk;

use super::{BuildContext, Built};
use crate::error::ExecError;
use crate::operator::{Operator, Output};
use crate::state::arena::new_batch;

/// Rows of one output chunk: a list may be of any length.
const CHUNK_ROWS: usize = 8192;

/// See [`millrace_graph::Unnest`].
pub struct Unnest {
    pub lists: Vec<usize>,
    pub keep_empty: bool,
    pub schema: SchemaRef,
}

/// Builds the operator of a node. Fails where the graph does not fit it.
pub fn build(p: &millrace_graph::Unnest, ctx: BuildContext<'_>) -> Built {
    let (lists, keep_empty, schema) = (p.lists.clone(), p.keep_empty, ctx.output());
    Ok(Box::new(Unnest { lists, keep_empty, schema }))
}

impl Operator for Unnest {
    fn push(&mut self, _: usize, chunk: DeltaChunk, out: &mut Output) -> Result<(), ExecError> {
        let lists = self.lists.iter().map(|&c| {
            let list = chunk.batch.column(c).as_list_opt::<i32>();
            list.ok_or_else(|| ExecError::internal("an unnest of what is no list"))
        });
        let lists = lists.collect::<Result<Vec<&ListArray>, _>>()?;
        let mut rows: Vec<u32> = Vec::new();
        // Of each row of the output, which element of the lists it is.
        let mut elements: Vec<usize> = Vec::new();
        for row in 0..chunk.num_rows() {
            let longest = lists.iter().map(|l| range(l, row).len()).max().unwrap_or(0);
            let count = if self.keep_empty { longest.max(1) } else { longest };
            for element in 0..count {
                rows.push(row as u32);
                elements.push(element);
                if rows.len() == CHUNK_ROWS {
                    self.emit(&chunk, &lists, &rows, &elements, out)?;
                    rows.clear();
                    elements.clear();
                }
            }
        }
        self.emit(&chunk, &lists, &rows, &elements, out)
    }
}

impl Unnest {
    fn emit(
        &self,
        chunk: &DeltaChunk,
        lists: &[&ListArray],
        rows: &[u32],
        elements: &[usize],
        out: &mut Output,
    ) -> Result<(), ExecError> {
        if rows.is_empty() {
            return Ok(());
        }
        let indices = UInt32Array::from(rows.to_vec());
        let mut columns = Vec::with_capacity(self.schema.fields().len());
        for (c, column) in chunk.batch.columns().iter().enumerate() {
            columns.push(match self.lists.iter().position(|l| *l == c) {
                Some(which) => items(lists[which], rows, elements)?,
                None => take(column, &indices, None)?,
            });
        }
        let batch = new_batch(&self.schema, columns, rows.len())?;
        let weights = chunk.weights.as_ref().map(|w| rows.iter().map(|&r| w.value(r as usize)));
        out.push(DeltaChunk::new(batch, weights.map(|w| w.collect::<Vec<i64>>().into())));
        Ok(())
    }
}

/// Where the elements of a row's list are among all; NULL has none.
fn range(list: &ListArray, row: usize) -> Range<usize> {
    if list.is_null(row) {
        return 0..0;
    }
    list.value_offsets()[row] as usize..list.value_offsets()[row + 1] as usize
}

fn items(list: &ListArray, rows: &[u32], elements: &[usize]) -> Result<ArrayRef, ExecError> {
    let at = rows
        .iter()
        .zip(elements)
        .map(|(&row, element)| range(list, row as usize).nth(*element).map(|at| at as u32));
    let at = UInt32Array::from_iter(at);
    Ok(take(&Arc::clone(list.values()), &at, None)?)
}

#[cfg(test)]
mod tests {
    use arrow::array::{Int32Array, RecordBatch};
    use arrow::datatypes::{DataType, Field, Int32Type, Schema};

    use super::*;

    /// Rows of (id, element, other element) with their weights.
    fn unnest(keep_empty: bool) -> Vec<(i32, Option<i32>, Option<i32>, i64)> {
        let first = ListArray::from_iter_primitive::<Int32Type, _, _>([
            Some(vec![Some(1), None]),
            None,
            Some(vec![]),
            Some(vec![Some(4)]),
        ]);
        let second = ListArray::from_iter_primitive::<Int32Type, _, _>([
            Some(vec![Some(7), Some(8), Some(9)]),
            None,
            Some(vec![]),
            None,
        ]);
        let list = first.data_type().clone();
        let fields = |t: &DataType| {
            let item = Field::new("b", t.clone(), true);
            let id = Field::new("id", DataType::Int32, true);
            Arc::new(Schema::new(vec![id, Field::new("a", t.clone(), true), item]))
        };
        let columns: Vec<ArrayRef> = vec![
            Arc::new(Int32Array::from(vec![10, 11, 12, 13])),
            Arc::new(first),
            Arc::new(second),
        ];
        let batch = RecordBatch::try_new(fields(&list), columns).unwrap();
        let chunk = DeltaChunk::new(batch, Some(vec![1, 2, -1, -3].into()));
        let schema = fields(&DataType::Int32);
        let mut operator = Unnest { lists: vec![1, 2], keep_empty, schema };
        let mut out = Output::default();
        operator.push(0, chunk, &mut out).unwrap();
        let mut rows = Vec::new();
        for chunk in out.take() {
            let column = |c: usize| chunk.batch.column(c).as_primitive::<Int32Type>().clone();
            let (id, a, b) = (column(0), column(1), column(2));
            let value = |c: &Int32Array, i: usize| (!c.is_null(i)).then(|| c.value(i));
            for i in 0..chunk.num_rows() {
                rows.push((id.value(i), value(&a, i), value(&b, i), chunk.weight(i)));
            }
        }
        rows
    }

    #[test]
    fn lists_are_read_side_by_side_and_weights_pass_through() {
        let some = [
            (10, Some(1), Some(7), 1),
            (10, None, Some(8), 1),
            (10, None, Some(9), 1),
            (13, Some(4), None, -3),
        ];
        assert_eq!(unnest(false), some);
        let kept = [some[0], some[1], some[2], (11, None, None, 2), (12, None, None, -1), some[3]];
        assert_eq!(unnest(true), kept);
    }
}
