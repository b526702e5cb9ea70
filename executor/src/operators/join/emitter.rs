//! How rows leave a join: the columns of its output, and rows of one side that are emitted by themselves, as the
//! policy says.

use std::sync::Arc;

use arrow::array::{ArrayRef, BooleanArray, Int64Array, new_null_array};
use arrow::datatypes::{FieldRef, SchemaRef};
use millrace_common::DeltaChunk;

use super::policy::{Contribution, Policy};
use crate::error::ExecError;
use crate::operator::Output;
use crate::state::arena::new_batch;

/// The columns of a join's output.
pub struct OutputColumns {
    /// Number of columns of the left side.
    pub left_width: usize,
    /// What each column is, by position in left columns then right columns (or as the policy reads it).
    pub positions: Vec<usize>,
    pub schema: SchemaRef,
}

/// Rows of one side that are emitted without the other.
pub struct OwnRows<'a> {
    pub side: usize,
    /// The side's columns.
    pub columns: &'a [ArrayRef],
    /// Each row's mark; NULLs but in a mark join.
    pub marks: ArrayRef,
    pub count: usize,
}

/// Output columns of rows of one side: the other side's are NULL.
pub fn padded(rows: &OwnRows<'_>, output: &OutputColumns) -> Vec<ArrayRef> {
    let column = |(&c, field): (&usize, &FieldRef)| {
        let (of, c) = match c.checked_sub(output.left_width) {
            None => (0, c),
            Some(c) => (1, c),
        };
        if of == rows.side {
            Arc::clone(&rows.columns[c])
        } else {
            new_null_array(field.data_type(), rows.count)
        }
    };
    output.positions.iter().zip(output.schema.fields()).map(column).collect()
}

/// See the module.
pub struct Emitter {
    policy: Box<dyn Policy>,
    output: OutputColumns,
}

impl Emitter {
    pub fn new(policy: Box<dyn Policy>, output: OutputColumns) -> Emitter {
        Emitter { policy, output }
    }

    pub fn output(&self) -> &OutputColumns {
        &self.output
    }

    /// Emits rows of a side by themselves.
    pub fn emit_rows(
        &self,
        side: usize,
        columns: &[ArrayRef],
        marks: Vec<Option<bool>>,
        weights: Option<Int64Array>,
        out: &mut Output,
    ) -> Result<(), ExecError> {
        let count = marks.len();
        let marks = Arc::new(BooleanArray::from(marks));
        let rows = OwnRows { side, columns, marks, count };
        let columns = self.policy.columns(&rows, &self.output);
        out.push(DeltaChunk::new(new_batch(&self.output.schema, columns, count)?, weights));
        Ok(())
    }

    /// Emits a chunk of rows of a side that all contribute the same.
    pub fn emit_alike(
        &self,
        side: usize,
        chunk: &DeltaChunk,
        contribution: Contribution,
        out: &mut Output,
    ) -> Result<(), ExecError> {
        let marks = vec![contribution.mark; chunk.num_rows()];
        self.emit_rows(side, chunk.batch.columns(), marks, chunk.weights.clone(), out)
    }
}
