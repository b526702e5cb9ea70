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
