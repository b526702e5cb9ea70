//! Aggregates that end with their statement. A group's or a window's rows may be many, and what they come to large: an
//! accumulator asks whether the statement goes on as it takes rows in and after each result that it has made.

use arrow::array::{Array, ArrayRef};
use datafusion::common::{Result, ScalarValue};
use datafusion::logical_expr::Accumulator;

use crate::error::external;
use crate::interrupt;

/// Of a row that is taken in, and of a result of which nothing else is known.
const ROW_BYTES: usize = 64;

/// The accumulator, with questions.
pub fn interruptible(inner: Box<dyn Accumulator>) -> Box<dyn Accumulator> {
    Box::new(Asking { inner })
}

#[derive(Debug)]
struct Asking {
    inner: Box<dyn Accumulator>,
}

fn step(bytes: usize) -> Result<()> {
    interrupt::step(bytes).map_err(external)
}

fn rows(values: &[ArrayRef]) -> usize {
    values.first().map_or(0, |column| column.len()) * ROW_BYTES
}

/// Bytes of a value, as far as they are told without a walk through all of it.
fn value_bytes(value: &ScalarValue) -> usize {
    match value {
        ScalarValue::Utf8(Some(text)) | ScalarValue::LargeUtf8(Some(text)) => text.len(),
        ScalarValue::Binary(Some(bytes)) => bytes.len(),
        ScalarValue::List(list) => list.values().len() * size_of::<u64>(),
        _ => 0,
    }
}

impl Accumulator for Asking {
    fn update_batch(&mut self, values: &[ArrayRef]) -> Result<()> {
        step(rows(values))?;
        self.inner.update_batch(values)
    }

    fn merge_batch(&mut self, states: &[ArrayRef]) -> Result<()> {
        step(rows(states))?;
        self.inner.merge_batch(states)
    }

    fn retract_batch(&mut self, values: &[ArrayRef]) -> Result<()> {
        self.inner.retract_batch(values)
    }

    fn supports_retract_batch(&self) -> bool {
        self.inner.supports_retract_batch()
    }

    fn evaluate(&mut self) -> Result<ScalarValue> {
        let value = self.inner.evaluate()?;
        step(ROW_BYTES + value_bytes(&value))?;
        Ok(value)
    }

    fn state(&mut self) -> Result<Vec<ScalarValue>> {
        self.inner.state()
    }

    fn size(&self) -> usize {
        self.inner.size()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::array::Int64Array;
    use arrow::datatypes::DataType;
    use datafusion::common::ScalarValue;
    use millrace_common::{SqlError, SqlState};

    use super::*;
    use crate::interrupt::Interrupt;

    /// Counts rows; its result is a text of so many bytes.
    #[derive(Debug, Default)]
    struct Texts(usize);

    impl Accumulator for Texts {
        fn update_batch(&mut self, values: &[ArrayRef]) -> Result<()> {
            self.0 += values[0].len();
            Ok(())
        }

        fn merge_batch(&mut self, states: &[ArrayRef]) -> Result<()> {
            self.update_batch(states)
        }

        fn retract_batch(&mut self, values: &[ArrayRef]) -> Result<()> {
            self.0 -= values[0].len();
            Ok(())
        }

        fn supports_retract_batch(&self) -> bool {
            true
        }

        fn evaluate(&mut self) -> Result<ScalarValue> {
            Ok(ScalarValue::from("x".repeat(self.0)))
        }

        fn size(&self) -> usize {
            7
        }

        fn state(&mut self) -> Result<Vec<ScalarValue>> {
            Ok(vec![ScalarValue::from(self.0 as i64)])
        }
    }

    const MANY: usize = 1 << 17;

    fn rows(n: usize) -> [ArrayRef; 1] {
        [arrow::array::new_null_array(&DataType::Int64, n)]
    }

    fn ended<T>(work: impl FnOnce() -> Result<T>) -> bool {
        let interrupt = Interrupt::new(|| Some(SqlError::new(SqlState::QUERY_CANCELED, "ended")));
        match interrupt.during(work) {
            Ok(_) => false,
            Err(e) => {
                let state = crate::error::sql_error_from_datafusion(e).state;
                assert_eq!(state, SqlState::QUERY_CANCELED);
                true
            }
        }
    }

    #[test]
    fn results_are_those_of_the_aggregate() {
        let mut asking = interruptible(Box::new(Texts::default()));
        asking.update_batch(&rows(3)).unwrap();
        asking.merge_batch(&rows(2)).unwrap();
        asking.retract_batch(&rows(1)).unwrap();
        assert_eq!(asking.evaluate().unwrap(), ScalarValue::from("xxxx"));
        assert_eq!(asking.state().unwrap(), [ScalarValue::from(4i64)]);
        assert!(asking.supports_retract_batch());
        assert_eq!(asking.size(), 7);
    }

    #[test]
    fn many_rows_end_with_the_statement() {
        assert!(ended(|| interruptible(Box::new(Texts::default())).update_batch(&rows(MANY))));
        assert!(ended(|| interruptible(Box::new(Texts::default())).merge_batch(&rows(MANY))));
    }

    #[test]
    fn large_results_end_with_the_statement() {
        assert!(ended(|| interruptible(Box::new(Texts(MANY))).evaluate()));
    }

    #[test]
    fn sizes_of_values_are_about_their_bytes() {
        let list = ScalarValue::new_list_nullable(&[1i64.into(), 2i64.into()], &DataType::Int64);
        let cases = [
            (ScalarValue::from("größe"), 7),
            (ScalarValue::LargeUtf8(Some("[1]".into())), 3),
            (ScalarValue::Binary(Some(vec![0; 9])), 9),
            (ScalarValue::List(list), 16),
            (ScalarValue::from(5i64), 0),
            (ScalarValue::Utf8(None), 0),
        ];
        for (value, bytes) in cases {
            assert_eq!(value_bytes(&value), bytes, "{value:?}");
        }
        let column: ArrayRef = Arc::new(Int64Array::from(vec![1, 2]));
        assert_eq!(super::rows(&[column]), 2 * ROW_BYTES);
        assert_eq!(super::rows(&[]), 0);
    }
}
