//! `array_agg(DISTINCT x ORDER BY x)` of values whose order is not that of their bytes: DataFusion collects
//! them, here they are sorted. Level ones, which are written otherwise, are in the order of their texts, as
//! in views.

use std::sync::Arc;

use arrow::array::{Array, ArrayRef, ListArray, UInt32Array};
use arrow::buffer::OffsetBuffer;
use arrow::compute::{SortOptions, take};
use arrow::datatypes::Field;
use datafusion::common::{Result, ScalarValue};
use datafusion::logical_expr::function::AccumulatorArgs;
use datafusion::logical_expr::{Accumulator, AggregateUDF};
use millrace_common::SqlError;
use millrace_common::keys::KeyCodec;

use super::byte_order::{by_value, comparable};
use super::cast::to_text;
use crate::error::external;

/// The accumulator of such a call; `None`: it is another.
pub fn accumulator(
    inner: &AggregateUDF,
    args: &AccumulatorArgs,
) -> Result<Option<Box<dyn Accumulator>>> {
    let concerned = inner.name() == "array_agg"
        && args.is_distinct
        && args.expr_fields.first().is_some_and(|f| by_value(f.data_type()));
    let Some(order) = args.order_bys.first().filter(|_| concerned) else { return Ok(None) };
    // The planner may have asked for the opposite order, from the end.
    let options = if args.is_reversed { !order.options } else { order.options };
    let asked = AccumulatorArgs { order_bys: &[], is_reversed: false, ..args.clone() };
    Ok(Some(Box::new(Sorted { values: inner.accumulator(asked)?, options })))
}

#[derive(Debug)]
struct Sorted {
    values: Box<dyn Accumulator>,
    options: SortOptions,
}

impl Sorted {
    fn sort(&self, values: &ArrayRef) -> std::result::Result<ArrayRef, SqlError> {
        let internal = |e: arrow::error::ArrowError| SqlError::internal(e.to_string());
        let mut keys = comparable(std::slice::from_ref(values))?;
        keys.push(to_text(values)?);
        let options = [self.options, SortOptions::default()];
        let fields = keys.iter().map(|k| k.data_type().clone()).zip(options);
        let rows = KeyCodec::with_options(fields).map_err(internal)?;
        let rows = rows.rows(&keys).map_err(internal)?;
        let mut places: Vec<u32> = (0..values.len() as u32).collect();
        places.sort_by(|a, b| rows.row(*a as usize).cmp(&rows.row(*b as usize)));
        take(values, &UInt32Array::from(places), None).map_err(internal)
    }
}

impl Accumulator for Sorted {
    fn update_batch(&mut self, values: &[ArrayRef]) -> Result<()> {
        // What they are ordered by comes with them.
        self.values.update_batch(values.get(..1).unwrap_or_default())
    }

    fn evaluate(&mut self) -> Result<ScalarValue> {
        match self.values.evaluate()? {
            ScalarValue::List(list) if list.is_valid(0) => {
                let sorted = self.sort(&list.value(0)).map_err(external)?;
                let item = Arc::new(Field::new_list_field(list.value_type(), true));
                let ends = OffsetBuffer::from_lengths([sorted.len()]);
                Ok(ScalarValue::List(Arc::new(ListArray::try_new(item, ends, sorted, None)?)))
            }
            other => Ok(other),
        }
    }

    fn size(&self) -> usize {
        size_of::<Sorted>() + self.values.size()
    }

    fn state(&mut self) -> Result<Vec<ScalarValue>> {
        self.values.state()
    }

    fn merge_batch(&mut self, states: &[ArrayRef]) -> Result<()> {
        self.values.merge_batch(states)
    }
}

#[cfg(test)]
mod tests {
    use crate::testing::check_aggregates;

    #[test]
    fn intervals_are_in_the_order_of_their_lengths() {
        check_aggregates(&[
            (
                "distinct array_agg order by 1",
                "interval",
                "1 mon; 29 days; 31 days; 1 mon; NULL",
                "{\"29 days\",\"1 mon\",\"31 days\",NULL}",
            ),
            (
                "distinct array_agg order by 1 desc",
                "interval",
                "1 mon; 29 days; 31 days; 1 mon; NULL",
                "{NULL,\"31 days\",\"1 mon\",\"29 days\"}",
            ),
            (
                "distinct array_agg order by 1",
                "interval",
                "00:00; 1 day -24:00:01; -1 day",
                "{\"-1 days\",\"1 day -24:00:01\",00:00:00}",
            ),
            ("distinct array_agg order by 1", "interval", "", "NULL"),
            ("distinct array_agg order by 1", "interval", "NULL; NULL", "{NULL}"),
        ]);
    }

    #[test]
    fn level_intervals_are_in_the_order_of_their_texts() {
        // PostgreSQL takes them for one value and keeps that which comes first.
        check_aggregates(&[
            (
                "distinct array_agg order by 1",
                "interval",
                "30 days; 31 days; 1 mon",
                "{\"1 mon\",\"30 days\",\"31 days\"}",
            ),
            (
                "distinct array_agg order by 1 desc",
                "interval",
                "30 days; 31 days; 1 mon",
                "{\"31 days\",\"1 mon\",\"30 days\"}",
            ),
        ]);
    }

    #[test]
    fn documents_are_in_their_order() {
        check_aggregates(&[(
            "distinct array_agg order by 1",
            "jsonb",
            "10; {}; 2; \"b\"; [1]; null; 2; NULL",
            "{\"null\",\"\\\"b\\\"\",2,10,[1],\"{}\",NULL}",
        )]);
    }
}
