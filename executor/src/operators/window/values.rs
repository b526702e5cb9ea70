//! Frames by the order's value: whom a change reaches, and on whom a result depends.
//!
//! Both are found by comparing as the frames themselves do, never by moving a value back: a sum of floats is rounded,
//! and what is out of the type's range has no value to come back from. Edges move forward with the order, so two
//! binary searches do.

use std::ops::Range;

use arrow::compute::SortOptions;
use arrow::datatypes::{DataType, SchemaRef, i256};
use millrace_functions::frame::{Axis, Edge, Frame, Value};
use millrace_functions::window_call::Reach;

use super::affected::{Changed, Interval};
use super::rows::Rows;
use crate::error::ExecError;
use crate::operators::ordered::Ranked;

/// The values of the order's only column, read from order bytes (see `KeyCodec`).
#[derive(Clone, Copy, Debug)]
pub struct Measure {
    axis: Axis,
    /// Of an encoded value.
    width: usize,
    form: Form,
}

#[derive(Clone, Copy, Debug)]
enum Form {
    Whole,
    Numeric,
    Float,
}

/// A frame by value, and what it is measured by.
#[derive(Clone, Copy, Debug)]
pub struct Span {
    pub measure: Measure,
    pub frame: Frame,
}

impl Span {
    /// Of the calls whose reach is by value.
    pub fn of(
        reach: &Reach,
        order: &[(usize, SortOptions)],
        input: &SchemaRef,
    ) -> Result<Option<Span>, ExecError> {
        let Reach::Values { frame } = *reach else { return Ok(None) };
        let Some(&(column, options)) = order.first() else {
            return Err(ExecError::internal("a frame by value without an order"));
        };
        let measure = Measure::new(input.field(column).data_type(), options, &frame);
        match measure {
            Some(measure) => Ok(Some(Span { measure, frame })),
            None => Err(ExecError::internal("a frame by value over an order that has none")),
        }
    }

    /// Appends the rows that changes reach; changed rows themselves too, which may be none of these.
    pub fn touched(&self, rows: &Rows, changes: Changed<'_>, found: &mut Vec<Interval>) {
        let Span { measure, frame } = self;
        for (key, order, _) in changes {
            found.push(Interval { low: key.to_vec(), high: Some(key.to_vec()) });
            let changed = measure.value(&key[..*order]);
            // The end of a row's frame is at or behind the change; its start is at or before it.
            let ends_before = |r: &Ranked| {
                measure.edge(r, frame.end).is_some_and(|e| measure.is_less(e, changed))
            };
            let starts_by = |r: &Ranked| {
                measure.edge(r, frame.start).is_none_or(|s| !measure.is_less(changed, s))
            };
            let low = rows.partition_point(ends_before);
            let high = rows.partition_point(starts_by);
            let (first, last) = (rows.get(low), high.checked_sub(1).and_then(|h| rows.get(h)));
            if let (Some(first), Some(last), true) = (first, last, low < high) {
                found.push(Interval { low: first.key.to_vec(), high: Some(last.key.to_vec()) });
            }
        }
    }

    /// The range with the rows that the results of its entries depend on.
    pub fn around(&self, rows: &Rows, range: Range<usize>) -> (usize, usize) {
        let Span { measure, frame } = self;
        let last = range.end.checked_sub(1).and_then(|last| rows.get(last));
        let (Some(first), Some(last), false) = (rows.get(range.start), last, range.is_empty())
        else {
            return (range.start, range.end);
        };
        let start = measure.edge(first, frame.start).map_or(0, |edge| {
            rows.partition_point(|r| measure.is_less(measure.value(r.order_bytes()), edge))
        });
        let end = measure.edge(last, frame.end).map_or(rows.len(), |edge| {
            rows.partition_point(|r| !measure.is_less(edge, measure.value(r.order_bytes())))
        });
        (start.min(range.start), end.max(range.end))
    }
}

impl Measure {
    fn new(column: &DataType, options: SortOptions, frame: &Frame) -> Option<Measure> {
        let form = match column {
            DataType::Decimal128(..) | DataType::Decimal256(..) => Form::Numeric,
            DataType::Float32 | DataType::Float64 => Form::Float,
            _ => Form::Whole,
        };
        let axis = Axis::new(column, options, frame)?;
        Some(Measure { axis, width: column.primitive_width()?, form })
    }

    /// The value that order bytes hold; `None`: NULL.
    fn value(&self, order: &[u8]) -> Option<Value> {
        let (marker, rest) = order.split_first()?;
        let encoded = rest.get(..self.width).filter(|_| *marker == 1)?;
        // Descending bytes are turned; the sign's bit always is.
        let turn: u8 = if self.axis.descending() { 0xff } else { 0 };
        let mut bytes = encoded.iter().enumerate().map(|(i, b)| match i {
            0 => b ^ turn ^ 0x80,
            _ => b ^ turn,
        });
        let first = bytes.next()?;
        let fill: u8 = if first & 0x80 == 0 { 0 } else { 0xff };
        let mut wide = [fill; 32];
        wide[32 - self.width] = first;
        for (place, byte) in wide[33 - self.width..].iter_mut().zip(bytes) {
            *place = byte;
        }
        let number = i256::from_be_bytes(wide);
        Some(match self.form {
            // No narrower type is beyond it.
            Form::Whole => self.axis.whole(number.as_i128()),
            Form::Numeric => self.axis.numeric(number),
            Form::Float => Value::Float(self.float(number.as_i128() as i64)),
        })
    }

    /// Of negative floats all other bits are turned too.
    fn float(&self, bits: i64) -> f64 {
        if self.width == 4 {
            let bits = bits as i32;
            return f64::from(f32::from_bits((bits ^ (((bits >> 31) as u32) >> 1) as i32) as u32));
        }
        f64::from_bits((bits ^ (((bits >> 63) as u64) >> 1) as i64) as u64)
    }

    /// Where an edge of a row's frame is; `None`: there is none on that side.
    fn edge(&self, row: &Ranked, edge: Edge) -> Option<Option<Value>> {
        match edge {
            Edge::Unbounded => None,
            edge => Some(self.axis.at(self.value(row.order_bytes()), edge)),
        }
    }

    fn is_less(&self, a: Option<Value>, b: Option<Value>) -> bool {
        self.axis.compare(a, b).is_lt()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::array::{
        ArrayRef, Date32Array, Decimal128Array, Float32Array, Float64Array, Int32Array,
    };
    use millrace_common::keys::KeyCodec;
    use millrace_functions::frame::{Distance, Exclude, Units};

    use super::*;
    use crate::state::KeyBytes;
    use crate::state::arena::RowRef;

    fn frame(by: Distance) -> Frame {
        let start = Edge::At { ahead: false, by };
        Frame { units: Units::Range, start, end: Edge::Current, exclude: Exclude::Nothing }
    }

    fn encoded(column: &ArrayRef, options: SortOptions) -> Vec<Vec<u8>> {
        let codec = KeyCodec::with_options([(column.data_type().clone(), options)]).unwrap();
        let rows = codec.rows(&[Arc::clone(column)]).unwrap();
        (0..column.len()).map(|i| rows.row(i).data().to_vec()).collect()
    }

    #[test]
    fn values_are_read_from_their_keys() {
        let options = |descending, nulls_first| SortOptions { descending, nulls_first };
        let read = |column: ArrayRef, by, options| -> Vec<Option<Value>> {
            let measure = Measure::new(column.data_type(), options, &frame(by)).unwrap();
            encoded(&column, options).iter().map(|k| measure.value(k)).collect()
        };
        for options in [options(false, true), options(true, false)] {
            let whole = Distance::Whole(1);
            let ints = Int32Array::from(vec![Some(i32::MIN), Some(-1), None, Some(7)]);
            let found = read(Arc::new(ints), whole, options);
            let number = |n: i128| Some(Value::Whole(n));
            assert_eq!(found, [number(i128::from(i32::MIN)), number(-1), None, number(7)]);
            let found = read(Arc::new(Date32Array::from(vec![-1])), whole, options);
            assert_eq!(found, [number(-86_400_000_000)]);
            let floats = Float64Array::from(vec![-1.5, 0.25, f64::INFINITY]);
            let found = read(Arc::new(floats), Distance::Float(0), options);
            let float = |n| Some(Value::Float(n));
            assert_eq!(found, [float(-1.5), float(0.25), float(f64::INFINITY)]);
            let found = read(Arc::new(Float32Array::from(vec![-2.5])), Distance::Float(0), options);
            assert_eq!(found, [float(-2.5)]);
            let tenths = Decimal128Array::from(vec![-15]).with_precision_and_scale(4, 1).unwrap();
            let by = Distance::Numeric(i256::from_i128(5), 2);
            let found = read(Arc::new(tenths), by, options);
            assert_eq!(found, [Some(Value::Numeric(i256::from_i128(-150)))]);
        }
    }

    fn ranked(key: &[u8]) -> Ranked {
        let at = RowRef { chunk: 0, row: 0 };
        Ranked { key: KeyBytes::new(key), order: key.len() as u32, at, weight: 1 }
    }

    #[test]
    fn a_change_reaches_the_rows_whose_frames_hold_it() {
        let options = SortOptions { descending: false, nulls_first: false };
        let values: Vec<Option<i32>> = (0..100).map(|n| Some(n * 10)).chain([None]).collect();
        let column: ArrayRef = Arc::new(Int32Array::from(values));
        let keys = encoded(&column, options);
        let rows = Rows::from_sorted(keys.iter().map(|k| ranked(k)).collect());
        let by = Distance::Whole(20);
        let ahead = Frame { end: Edge::At { ahead: true, by }, ..frame(by) };
        let measure = Measure::new(column.data_type(), options, &ahead).unwrap();
        let reached = |frame: Frame, value: Option<i32>| {
            let key = &encoded(&(Arc::new(Int32Array::from(vec![value])) as ArrayRef), options)[0];
            let (key, order) = (KeyBytes::new(key), key.len());
            let mut found = Vec::new();
            Span { measure, frame }.touched(&rows, &[(&key, order, 1)], &mut found);
            let place = |k: &[u8]| keys.iter().position(|known| known == k);
            found.get(1).map(|i| (place(&i.low), i.high.as_deref().map(place)))
        };
        let places = |low, high| Some((Some(low), Some(Some(high))));
        assert_eq!(reached(ahead, Some(505)), places(49, 52));
        assert_eq!(reached(frame(by), Some(500)), places(50, 52));
        assert_eq!(reached(ahead, Some(i32::MAX)), None);
        assert_eq!(reached(ahead, None), places(100, 100));
        let open = Frame { start: Edge::Unbounded, ..frame(by) };
        assert_eq!(reached(open, Some(980)), places(98, 100));
        let span = Span { measure, frame: ahead };
        assert_eq!(span.around(&rows, 50..51), (48, 53));
        assert_eq!(span.around(&rows, 100..101), (100, 101));
    }
}
