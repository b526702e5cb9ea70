//! The state table an operator works on: storage's [`TableWriter`], behind a trait so that tests can
//! delay, reorder and count its reads.

use arrow::array::{BinaryArray, Int64Array, RecordBatch};
use arrow::datatypes::SchemaRef;
use millrace_storage::{Lookup, MemRun, TableWriter};

use crate::error::ExecError;

/// What operators need of a state table. All reads are batched; a read sees everything written
/// before it was asked for, of the open epoch too.
pub trait StateTable: Send {
    /// Adds entries to the open epoch. No I/O.
    fn write(
        &mut self,
        keys: BinaryArray,
        weights: Option<Int64Array>,
        values: RecordBatch,
    ) -> Result<(), ExecError>;
    /// The entries of whole keys.
    fn multi_get(&self, keys: BinaryArray) -> Lookup;
    /// The first `limit` entries under each prefix, in key order.
    fn multi_scan(&self, prefixes: BinaryArray, limit: Option<usize>) -> Lookup;
    /// The first `limit` entries of each range start ≤ key < end, in key order. Ranges ascend.
    fn multi_range(&self, starts: BinaryArray, ends: BinaryArray, limit: Option<usize>) -> Lookup;
    /// What the epoch wrote; a large one in several parts, oldest first.
    fn seal(&mut self) -> Result<Vec<MemRun>, ExecError>;
    /// Columns of a value.
    fn value_schema(&self) -> SchemaRef;
    /// Nothing was ever written: a cache that sees every write from now on knows all there is.
    fn is_empty(&self) -> bool;
    /// From when on entries are kept (microseconds), as committed; `None`: all are.
    fn bound(&self) -> Option<i64> {
        None
    }
}

impl StateTable for TableWriter {
    fn write(
        &mut self,
        keys: BinaryArray,
        weights: Option<Int64Array>,
        values: RecordBatch,
    ) -> Result<(), ExecError> {
        TableWriter::write(self, keys, weights, values);
        Ok(())
    }

    fn multi_get(&self, keys: BinaryArray) -> Lookup {
        TableWriter::multi_get(self, keys)
    }

    fn multi_scan(&self, prefixes: BinaryArray, limit: Option<usize>) -> Lookup {
        TableWriter::multi_scan(self, prefixes, limit)
    }

    fn multi_range(&self, starts: BinaryArray, ends: BinaryArray, limit: Option<usize>) -> Lookup {
        TableWriter::multi_range(self, starts, ends, limit)
    }

    fn seal(&mut self) -> Result<Vec<MemRun>, ExecError> {
        Ok(TableWriter::seal(self)?)
    }

    fn value_schema(&self) -> SchemaRef {
        SchemaRef::clone(&self.desc().value_schema)
    }

    /// Asked once, when an operator is built; only a table without disk runs is looked into.
    fn is_empty(&self) -> bool {
        TableWriter::is_empty(self)
    }

    fn bound(&self) -> Option<i64> {
        TableWriter::bound(self)
    }
}
