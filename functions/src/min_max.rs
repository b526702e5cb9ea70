//! `min` and `max` as PostgreSQL has them. Of floats, NaN is the greatest value: DataFusion's, of groups, compare
//! with `<`, so that their results would depend on the order of rows; its accumulators of single groups do not. Of
//! intervals, the longest is the greatest, not the one of the most months. Of arrays, a NULL element is
//! greater than all others. There are none of booleans and documents.

use std::sync::Arc;

use arrow::array::{Array, ArrayRef, StringArray};
use arrow::compute::SortOptions;
use arrow::datatypes::{DataType, FieldRef};
use datafusion::common::{Result, ScalarValue};
use datafusion::logical_expr::function::{AccumulatorArgs, StateFieldsArgs};
use datafusion::logical_expr::utils::AggregateOrderSensitivity;
use datafusion::logical_expr::{
    Accumulator, AggregateUDF, AggregateUDFImpl, GroupsAccumulator, ReversedUDAF, SetMonotonicity,
    Signature, StatisticsArgs,
};
use millrace_common::keys::KeyCodec;
use millrace_common::{SqlError, SqlType};

use super::aggregates::{malformed_state, undefined_aggregate};
use super::byte_order::by_value;
use super::cast::{convert, to_text};
use super::ordered_entries::{Nulls, entries, order_keys, value_of};
use crate::error::external;

/// DataFusion's `min` or `max`, safe for every type; other functions as they are.
pub fn exact_extreme(udf: Arc<AggregateUDF>) -> Arc<AggregateUDF> {
    match udf.name() {
        "min" | "max" => Arc::new(AggregateUDF::from(Extreme { inner: udf })),
        _ => udf,
    }
}

#[derive(Debug, PartialEq, Eq, Hash)]
struct Extreme {
    inner: Arc<AggregateUDF>,
}

impl AggregateUDFImpl for Extreme {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn signature(&self) -> &Signature {
        self.inner.signature()
    }

    fn return_type(&self, args: &[DataType]) -> Result<DataType> {
        self.inner.return_type(args)
    }

    fn coerce_types(&self, args: &[DataType]) -> Result<Vec<DataType>> {
        match args {
            [t @ DataType::List(_)] if by_value(t) => {
                let message = format!("{} of arrays of intervals or documents", self.name());
                Err(external(SqlError::unsupported(message)))
            }
            [t] if *t != DataType::Boolean && *t != SqlType::Jsonb.to_arrow() => {
                self.inner.coerce_types(args)
            }
            _ => Err(external(undefined_aggregate(self.name(), args))),
        }
    }

    fn accumulator(&self, args: AccumulatorArgs) -> Result<Box<dyn Accumulator>> {
        match Order::of(args.return_field.data_type())? {
            Some(order) => {
                let output = args.return_field.data_type().clone();
                Ok(Box::new(Best { max: self.name() == "max", order, output, best: None }))
            }
            None => self.inner.accumulator(args),
        }
    }

    fn state_fields(&self, args: StateFieldsArgs) -> Result<Vec<FieldRef>> {
        self.inner.state_fields(args)
    }

    fn groups_accumulator_supported(&self, args: AccumulatorArgs) -> bool {
        let t = args.return_field.data_type();
        let ours = t.is_floating() || t.is_nested() || matches!(t, DataType::Interval(_));
        !ours && self.inner.groups_accumulator_supported(args)
    }

    fn create_groups_accumulator(
        &self,
        args: AccumulatorArgs,
    ) -> Result<Box<dyn GroupsAccumulator>> {
        self.inner.create_groups_accumulator(args)
    }

    fn create_sliding_accumulator(&self, args: AccumulatorArgs) -> Result<Box<dyn Accumulator>> {
        match Order::of(args.return_field.data_type())? {
            Some(_) => self.accumulator(args),
            None => self.inner.create_sliding_accumulator(args),
        }
    }

    fn is_descending(&self) -> Option<bool> {
        self.inner.is_descending()
    }

    fn order_sensitivity(&self) -> AggregateOrderSensitivity {
        self.inner.order_sensitivity()
    }

    fn reverse_expr(&self) -> ReversedUDAF {
        ReversedUDAF::Identical
    }

    fn value_from_stats(&self, args: &StatisticsArgs) -> Option<ScalarValue> {
        self.inner.value_from_stats(args)
    }

    /// By the order that DataFusion would sort by.
    fn set_monotonicity(&self, data_type: &DataType) -> SetMonotonicity {
        match data_type {
            DataType::Interval(_) | DataType::List(_) => SetMonotonicity::NotMonotonic,
            _ => self.inner.inner().set_monotonicity(data_type),
        }
    }
}

/// Values whose order DataFusion does not know, as bytes in that order.
#[derive(Debug)]
enum Order {
    /// As views keep them ([`entries`]): of two of one length the same one is taken here and there.
    Intervals,
    Arrays(KeyCodec),
}

/// The order of arrays is that of their elements, of which NULL is the greatest.
pub const ARRAY_ORDER: SortOptions = SortOptions { descending: false, nulls_first: false };

impl Order {
    fn of(t: &DataType) -> Result<Option<Order>> {
        Ok(match t {
            DataType::Interval(_) => Some(Order::Intervals),
            DataType::List(_) => {
                Some(Order::Arrays(KeyCodec::with_options([(t.clone(), ARRAY_ORDER)])?))
            }
            _ => None,
        })
    }

    /// The least or greatest of a column.
    fn best(&self, column: &ArrayRef, max: bool) -> Result<Option<Box<[u8]>>> {
        let better = |a: &[u8], b: &[u8]| if max { a > b } else { a < b };
        let mut best: Option<Box<[u8]>> = None;
        let mut see = |bytes: &[u8]| {
            if best.as_ref().is_none_or(|b| better(bytes, b)) {
                best = Some(bytes.into());
            }
        };
        match self {
            Order::Intervals => {
                let text = to_text(column).map_err(external)?;
                let keys = order_keys(std::slice::from_ref(column)).map_err(external)?;
                let all = entries(Nulls::Skipped, &text, None, &keys, [ARRAY_ORDER].into_iter());
                all.map_err(external)?.iter().flatten().for_each(see);
            }
            Order::Arrays(codec) => {
                let rows = codec.rows(std::slice::from_ref(column))?;
                let valid = (0..column.len()).filter(|&i| column.is_valid(i));
                valid.for_each(|i| see(rows.row(i).data()));
            }
        }
        Ok(best)
    }

    fn value(&self, bytes: &[u8]) -> Result<ScalarValue> {
        let bad = malformed_state;
        let column = match self {
            Order::Intervals => {
                let text = value_of(bytes).ok_or_else(bad)?;
                let text: ArrayRef = Arc::new(StringArray::from(vec![text]));
                convert(&text, SqlType::Interval).map_err(external)?
            }
            Order::Arrays(codec) => codec.decode([bytes])?.pop().ok_or_else(bad)?,
        };
        ScalarValue::try_from_array(&column, 0)
    }
}

/// The least or greatest value so far.
#[derive(Debug)]
struct Best {
    max: bool,
    order: Order,
    output: DataType,
    best: Option<Box<[u8]>>,
}

impl Accumulator for Best {
    fn update_batch(&mut self, values: &[ArrayRef]) -> Result<()> {
        for column in values.iter().take(1) {
            let Some(new) = self.order.best(column, self.max)? else { continue };
            let better = |old: &[u8]| if self.max { *new > *old } else { *new < *old };
            if self.best.as_deref().is_none_or(better) {
                self.best = Some(new);
            }
        }
        Ok(())
    }

    fn evaluate(&mut self) -> Result<ScalarValue> {
        match &self.best {
            Some(best) => self.order.value(best),
            None => ScalarValue::try_from(&self.output),
        }
    }

    fn size(&self) -> usize {
        size_of::<Best>() + self.best.as_ref().map_or(0, |b| b.len())
    }

    fn state(&mut self) -> Result<Vec<ScalarValue>> {
        Ok(vec![self.evaluate()?])
    }

    fn merge_batch(&mut self, states: &[ArrayRef]) -> Result<()> {
        self.update_batch(states)
    }
}

#[cfg(test)]
mod tests {
    use arrow::array::{IntervalMonthDayNanoArray, ListArray};
    use arrow::datatypes::{Int32Type, IntervalMonthDayNano};

    use super::*;

    fn of(column: ArrayRef, max: bool) -> ScalarValue {
        let output = column.data_type().clone();
        let order = Order::of(&output).unwrap().unwrap();
        let mut best = Best { max, order, output, best: None };
        best.update_batch(&[column]).unwrap();
        best.evaluate().unwrap()
    }

    #[test]
    fn intervals_by_length() {
        let hour = 3_600_000_000_000;
        let all = [(0, 1, 0), (0, 0, 25 * hour), (0, 0, 23 * hour)];
        let all = all.map(|(m, d, n)| IntervalMonthDayNano::new(m, d, n));
        let column: ArrayRef = Arc::new(IntervalMonthDayNanoArray::from(all.to_vec()));
        let one = |at: usize| ScalarValue::IntervalMonthDayNano(Some(all[at]));
        assert_eq!(of(Arc::clone(&column), true), one(1));
        assert_eq!(of(column, false), one(2));
    }

    #[test]
    fn a_null_element_is_greater_than_others() {
        let lists = ListArray::from_iter_primitive::<Int32Type, _, _>([
            Some(vec![Some(1), Some(9)]),
            Some(vec![Some(1), None]),
            None,
            Some(vec![Some(1)]),
        ]);
        let column: ArrayRef = Arc::new(lists);
        let one = |at: usize| ScalarValue::try_from_array(&column, at).unwrap();
        assert_eq!(of(Arc::clone(&column), true), one(1));
        assert_eq!(of(Arc::clone(&column), false), one(3));
    }
}
