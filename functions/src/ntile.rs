//! `ntile`, with PostgreSQL's type and errors.

use std::sync::{Arc, LazyLock};

use arrow::array::{Array, ArrayRef, AsArray, Int32Array, new_null_array};
use arrow::compute::cast;
use arrow::datatypes::{DataType, Int64Type};
use datafusion::common::Result;
use datafusion::logical_expr::{PartitionEvaluator, Signature, Volatility, WindowUDF};
use millrace_common::{SqlError, SqlState};

use crate::error::external;
use crate::plain::PlainWindow;

/// `ntile(buckets)`: the number of the row's bucket, of as many as possible of one size.
pub fn ntile() -> Arc<WindowUDF> {
    static F: LazyLock<Arc<WindowUDF>> = LazyLock::new(|| {
        let types = vec![DataType::Int32, DataType::Int16, DataType::Int64];
        let signature = Signature::uniform(1, types, Volatility::Immutable);
        PlainWindow::udf("ntile", signature, |_| Ok(DataType::Int32), || Box::new(Buckets))
    });
    Arc::clone(&F)
}

#[derive(Debug)]
struct Buckets;

impl PartitionEvaluator for Buckets {
    fn evaluate_all(&mut self, values: &[ArrayRef], rows: usize) -> Result<ArrayRef> {
        let Some(counts) = values.first().filter(|c| !c.is_empty()) else {
            return Ok(new_null_array(&DataType::Int32, rows));
        };
        // The partition's first row says how many.
        let counts = cast(&counts.slice(0, 1), &DataType::Int64)?;
        let counts = counts.as_primitive::<Int64Type>();
        if counts.is_null(0) {
            return Ok(new_null_array(&DataType::Int32, rows));
        }
        if counts.value(0) <= 0 {
            return Err(external(SqlError::new(
                SqlState("22014"),
                "argument of ntile must be greater than zero",
            )));
        }
        Ok(Arc::new(numbers(rows as u64, counts.value(0) as u64)))
    }
}

/// The first `rows % buckets` buckets have a row more than the others.
fn numbers(rows: u64, buckets: u64) -> Int32Array {
    let (size, more) = (rows / buckets, rows % buckets);
    let large = more * (size + 1);
    let number = |row: u64| match row < large {
        true => row / (size + 1) + 1,
        false => more + (row - large) / size.max(1) + 1,
    };
    Int32Array::from_iter_values((0..rows).map(|row| number(row) as i32))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As PostgreSQL 15 has it.
    #[test]
    fn sizes_differ_by_one_at_most() {
        let of = |rows, buckets| numbers(rows, buckets).values().to_vec();
        assert_eq!(of(10, 4), [1, 1, 1, 2, 2, 2, 3, 3, 4, 4]);
        assert_eq!(of(3, 5), [1, 2, 3]);
        assert_eq!(of(4, 2), [1, 1, 2, 2]);
        assert_eq!(of(0, 3), Vec::<i32>::new());
    }
}
