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
    /// What the epoch wrote.
    fn seal(&mut self) -> Result<Option<MemRun>, ExecError>;
    /// Columns of a value.
    fn value_schema(&self) -> SchemaRef;
    /// Nothing was ever written: a cache that sees every write from now on knows all there is.
    fn is_empty(&self) -> bool;
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

    fn seal(&mut self) -> Result<Option<MemRun>, ExecError> {
        Ok(TableWriter::seal(self)?)
    }

    fn value_schema(&self) -> SchemaRef {
        SchemaRef::clone(&self.desc().value_schema)
    }

    /// Asked once, when an operator is built; only a table without disk runs is looked into.
    fn is_empty(&self) -> bool {
        let everything = BinaryArray::from_iter_values([b""]);
        self.memory_complete()
            && matches!(self.multi_scan(everything, Some(1)), Lookup::Ready(found) if found.is_empty())
    }
}
