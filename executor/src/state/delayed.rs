//! A state table whose every read completes later, and not in the order it was asked: what a slow store
//! does to an operator, without one. Small tests never leave memory, so without this they would never
//! park a row (docs/design.md §14, random completion orders).

use std::sync::atomic::{AtomicU64, Ordering};

use arrow::array::{BinaryArray, Int64Array, RecordBatch};
use arrow::datatypes::SchemaRef;
use millrace_storage::{Lookup, MemRun};

use super::StateTable;
use crate::error::ExecError;

/// A read waits for fewer turns of the scheduler than this.
const MAX_TURNS: u64 = 7;

pub struct Delayed<T> {
    inner: T,
    reads: AtomicU64,
}

impl<T: StateTable> Delayed<T> {
    pub fn new(inner: T) -> Delayed<T> {
        Delayed { inner, reads: AtomicU64::new(0) }
    }

    fn delay(&self, lookup: Lookup) -> Lookup {
        // Fibonacci hashing of a counter: an irregular but repeatable sequence.
        let n = self.reads.fetch_add(1, Ordering::Relaxed) + 1;
        let turns = (n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) % MAX_TURNS + 1;
        Lookup::Pending(Box::pin(async move {
            for _ in 0..turns {
                tokio::task::yield_now().await;
            }
            match lookup {
                Lookup::Ready(found) => Ok(found),
                Lookup::Pending(read) => read.await,
            }
        }))
    }
}

impl<T: StateTable> StateTable for Delayed<T> {
    fn write(
        &mut self,
        keys: BinaryArray,
        weights: Option<Int64Array>,
        values: RecordBatch,
    ) -> Result<(), ExecError> {
        self.inner.write(keys, weights, values)
    }

    fn multi_get(&self, keys: BinaryArray) -> Lookup {
        self.delay(self.inner.multi_get(keys))
    }

    fn multi_scan(&self, prefixes: BinaryArray, limit: Option<usize>) -> Lookup {
        self.delay(self.inner.multi_scan(prefixes, limit))
    }

    fn multi_range(&self, starts: BinaryArray, ends: BinaryArray, limit: Option<usize>) -> Lookup {
        self.delay(self.inner.multi_range(starts, ends, limit))
    }

    fn seal(&mut self) -> Result<Vec<MemRun>, ExecError> {
        self.inner.seal()
    }

    fn value_schema(&self) -> SchemaRef {
        self.inner.value_schema()
    }

    fn is_empty(&self) -> bool {
        false
    }

    fn bound(&self) -> Option<i64> {
        self.inner.bound()
    }
}
