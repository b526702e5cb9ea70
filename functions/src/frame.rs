//! Window frames as PostgreSQL has them: how far they reach, in rows, groups of peers or values of the order, and what
//! they leave out.
//!
//! Frames by value compare `value ± offset` with the values of other rows, a calendar's months included. Ends only
//! ever move forward from row to row, also where a calendar would have them go back. A sum out of its type's range is
//! beyond all values. Rows without a value are each other's only neighbours.

use std::cmp::Ordering;
use std::ops::Range;

use arrow::array::{Array, ArrayRef, AsArray};
use arrow::compute::{SortOptions, partition};
use arrow::datatypes::*;
use datafusion::common::Result;
use millrace_common::SqlError;
use millrace_common::keys::canonicalise;

use crate::datetime::shift;
use crate::error::external;

const DAY_US: i128 = 86_400_000_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Units {
    Rows,
    Range,
    Groups,
}

/// What a frame leaves out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exclude {
    Nothing,
    CurrentRow,
    Group,
    Ties,
}

/// How far away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Distance {
    /// Rows, groups, integers, or microseconds of dates and times.
    Whole(i128),
    /// A numeric: so many units, at so many digits after the point.
    Numeric(i256, i8),
    /// The bits of a double.
    Float(u64),
    /// An interval with months, whose length depends on where it begins.
    Calendar { months: i32, days: i32, us: i64 },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Edge {
    Unbounded,
    Current,
    At {
        /// Following; else preceding.
        ahead: bool,
        by: Distance,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame {
    pub units: Units,
    pub start: Edge,
    pub end: Edge,
    pub exclude: Exclude,
}

impl std::fmt::Display for Frame {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let units = match self.units {
            Units::Rows => "rows",
            Units::Range => "range",
            Units::Groups => "groups",
        };
        write!(f, "{units} between ")?;
        write_edge(f, self.start, "preceding")?;
        f.write_str(" and ")?;
        write_edge(f, self.end, "following")?;
        f.write_str(match self.exclude {
            Exclude::Nothing => "",
            Exclude::CurrentRow => " exclude current row",
            Exclude::Group => " exclude group",
            Exclude::Ties => " exclude ties",
        })
    }
}

/// As EXPLAIN shows it: what dates and times are apart in microseconds.
fn write_edge(f: &mut std::fmt::Formatter<'_>, edge: Edge, unbounded: &str) -> std::fmt::Result {
    let (ahead, by) = match edge {
        Edge::Unbounded => return write!(f, "unbounded {unbounded}"),
        Edge::Current => return f.write_str("current row"),
        Edge::At { ahead, by } => (ahead, by),
    };
    match by {
        Distance::Whole(n) => write!(f, "{n}")?,
        Distance::Numeric(n, 0) => write!(f, "{n}")?,
        Distance::Numeric(n, digits) => write!(f, "{n}e-{digits}")?,
        Distance::Float(bits) => write!(f, "{}", f64::from_bits(bits))?,
        Distance::Calendar { months, days, us } => {
            write!(f, "{months} months {days} days {us} microseconds")?;
        }
    }
    f.write_str(if ahead { " following" } else { " preceding" })
}

/// A value of the order.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Value {
    Whole(i128),
    Numeric(i256),
    Float(f64),
}

#[derive(Clone, Copy, Debug)]
enum Form {
    /// Times this.
    Whole(i128),
    /// Times this; digits after the point.
    Numeric(i256, i8),
    Float,
}

/// The column that a frame by value is measured along.
#[derive(Clone, Copy, Debug)]
pub struct Axis {
    options: SortOptions,
    form: Form,
}

impl Axis {
    /// `None`: values of this type have no distance.
    pub fn new(column: &DataType, options: SortOptions, frame: &Frame) -> Option<Axis> {
        let form = match column {
            DataType::Int16 | DataType::Int32 | DataType::Int64 => Form::Whole(1),
            DataType::Timestamp(TimeUnit::Microsecond, _)
            | DataType::Time64(TimeUnit::Microsecond) => Form::Whole(1),
            DataType::Date32 => Form::Whole(DAY_US),
            DataType::Float32 | DataType::Float64 => Form::Float,
            DataType::Decimal128(_, scale) | DataType::Decimal256(_, scale) => {
                let digits = [frame.start, frame.end].into_iter().filter_map(|e| match e {
                    Edge::At { by: Distance::Numeric(_, digits), .. } => Some(digits),
                    _ => None,
                });
                let digits = digits.chain([*scale]).max()?;
                Form::Numeric(power(digits.checked_sub(*scale)?)?, digits)
            }
            _ => return None,
        };
        Some(Axis { options, form })
    }

    pub fn descending(&self) -> bool {
        self.options.descending
    }

    /// An integer, or the days or microseconds of a date or time.
    pub fn whole(&self, value: i128) -> Value {
        match self.form {
            Form::Whole(factor) => Value::Whole(value.saturating_mul(factor)),
            _ => Value::Whole(value),
        }
    }

    /// The units of a numeric.
    pub fn numeric(&self, units: i256) -> Value {
        match self.form {
            Form::Numeric(factor, _) => Value::Numeric(times(units, factor)),
            _ => Value::Numeric(units),
        }
    }

    fn values(&self, column: &ArrayRef) -> Result<Vec<Option<Value>>> {
        macro_rules! each {
            ($t:ty, $f:expr) => {
                column.as_primitive::<$t>().iter().map(|v| v.map($f)).collect()
            };
        }
        Ok(match column.data_type() {
            DataType::Int16 => each!(Int16Type, |v| self.whole(i128::from(v))),
            DataType::Int32 => each!(Int32Type, |v| self.whole(i128::from(v))),
            DataType::Int64 => each!(Int64Type, |v| self.whole(i128::from(v))),
            DataType::Date32 => each!(Date32Type, |v| self.whole(i128::from(v))),
            DataType::Timestamp(TimeUnit::Microsecond, _) => {
                each!(TimestampMicrosecondType, |v| self.whole(i128::from(v)))
            }
            DataType::Time64(TimeUnit::Microsecond) => {
                each!(Time64MicrosecondType, |v| self.whole(i128::from(v)))
            }
            DataType::Float32 => each!(Float32Type, |v| Value::Float(f64::from(v))),
            DataType::Float64 => each!(Float64Type, Value::Float),
            DataType::Decimal128(..) => {
                each!(Decimal128Type, |v| self.numeric(i256::from_i128(v)))
            }
            DataType::Decimal256(..) => each!(Decimal256Type, |v| self.numeric(v)),
            other => {
                let message = format!("a frame by values of type {other}");
                return Err(external(SqlError::internal(message)));
            }
        })
    }

    /// In the order's direction.
    pub fn compare(&self, a: Option<Value>, b: Option<Value>) -> Ordering {
        let null = if self.options.nulls_first { Ordering::Less } else { Ordering::Greater };
        match (a, b) {
            (None, None) => Ordering::Equal,
            (None, Some(_)) => null,
            (Some(_), None) => null.reverse(),
            (Some(a), Some(b)) => {
                let order = ascending(a, b);
                if self.options.descending { order.reverse() } else { order }
            }
        }
    }

    /// Where the edge of a row's frame is; not of unbounded ones.
    pub fn at(&self, value: Option<Value>, edge: Edge) -> Option<Value> {
        let Edge::At { ahead, by } = edge else { return value };
        // In descending order what follows is smaller.
        let negative = ahead == self.options.descending;
        value.map(|v| self.moved(v, by, negative))
    }

    fn moved(&self, value: Value, by: Distance, negative: bool) -> Value {
        match (value, by) {
            (Value::Whole(v), Distance::Whole(d)) if negative => Value::Whole(v.saturating_sub(d)),
            (Value::Whole(v), Distance::Whole(d)) => Value::Whole(v.saturating_add(d)),
            (Value::Whole(us), Distance::Calendar { months, days, us: time }) => {
                let finite = i64::try_from(us).ok().filter(|t| !matches!(*t, i64::MIN | i64::MAX));
                // What is infinite stays so.
                let Some(t) = finite else { return value };
                let interval = IntervalMonthDayNano::new(months, days, time.saturating_mul(1000));
                let moved = shift(t, interval, negative).ok();
                let beyond = if negative { i128::MIN } else { i128::MAX };
                Value::Whole(moved.map_or(beyond, i128::from))
            }
            (Value::Numeric(v), Distance::Numeric(d, digits)) => {
                let d = match self.form {
                    Form::Numeric(_, all) => power(all.saturating_sub(digits)).map(|f| times(d, f)),
                    _ => None,
                };
                let d = d.unwrap_or(i256::MAX);
                let (sum, beyond) = match negative {
                    true => (v.checked_sub(d), i256::MIN),
                    false => (v.checked_add(d), i256::MAX),
                };
                Value::Numeric(sum.unwrap_or(beyond))
            }
            (Value::Float(v), Distance::Float(bits)) => {
                let d = f64::from_bits(bits);
                Value::Float(if negative { v - d } else { v + d })
            }
            (value, _) => value,
        }
    }
}

fn ascending(a: Value, b: Value) -> Ordering {
    match (a, b) {
        (Value::Whole(a), Value::Whole(b)) => a.cmp(&b),
        (Value::Numeric(a), Value::Numeric(b)) => a.cmp(&b),
        // NaN is itself, and above all others.
        (Value::Float(a), Value::Float(b)) => {
            a.partial_cmp(&b).unwrap_or_else(|| a.is_nan().cmp(&b.is_nan()))
        }
        _ => Ordering::Equal,
    }
}

fn power(digits: i8) -> Option<i256> {
    i256::from_i128(10).checked_pow(u32::try_from(digits).ok()?)
}

fn times(units: i256, factor: i256) -> i256 {
    let beyond = if units.is_negative() { i256::MIN } else { i256::MAX };
    units.checked_mul(factor).unwrap_or(beyond)
}

/// The frames of all rows of a partition.
pub struct Places {
    pub frames: Vec<Range<usize>>,
    /// Groups of rows that are level, and the one each row is in; empty where nothing asks for them.
    peers: Vec<Range<usize>>,
    group: Vec<usize>,
    exclude: Exclude,
}

impl Places {
    /// Of rows that lie in order of the columns `order`.
    pub fn new(
        frame: &Frame,
        order: &[ArrayRef],
        options: &[SortOptions],
        rows: usize,
    ) -> Result<Places> {
        let by_peers = matches!(frame.exclude, Exclude::Group | Exclude::Ties);
        let (peers, group) = match by_peers || frame.units != Units::Rows {
            true => peers(order, rows)?,
            false => (vec![], vec![]),
        };
        let mut places = Places { frames: vec![], peers, group, exclude: frame.exclude };
        let starts = places.edges(frame, true, order, options, rows)?;
        let ends = places.edges(frame, false, order, options, rows)?;
        // A frame that ends before it starts has no rows.
        places.frames = starts.into_iter().zip(ends).map(|(s, e)| s..e.max(s)).collect();
        Ok(places)
    }

    fn edges(
        &self,
        frame: &Frame,
        start: bool,
        order: &[ArrayRef],
        options: &[SortOptions],
        rows: usize,
    ) -> Result<Vec<usize>> {
        let edge = if start { frame.start } else { frame.end };
        Ok(match (frame.units, edge) {
            (_, Edge::Unbounded) => vec![if start { 0 } else { rows }; rows],
            (Units::Rows, edge) => (0..rows).map(|i| by_rows(edge, start, i, rows)).collect(),
            (Units::Range, Edge::At { .. }) => {
                let (Some(column), Some(options)) = (order.first(), options.first()) else {
                    return Err(external(SqlError::internal("a frame by value without an order")));
                };
                by_values(frame, edge, start, column, *options)?
            }
            (_, edge) => (0..rows).map(|i| self.by_groups(edge, start, i, rows)).collect(),
        })
    }

    fn by_groups(&self, edge: Edge, start: bool, row: usize, rows: usize) -> usize {
        let own = self.group[row];
        let (group, before) = match edge {
            Edge::At { ahead: true, by } => (own.saturating_add(count(by)), false),
            Edge::At { ahead: false, by } => (own.saturating_sub(count(by)), own < count(by)),
            _ => (own, false),
        };
        match (self.peers.get(group), start) {
            (Some(_), false) if before => 0,
            (Some(peers), true) => peers.start,
            (Some(peers), false) => peers.end,
            (None, _) => rows,
        }
    }

    /// The rows of a row's frame, in order; any of the ranges may be empty.
    pub fn pieces(&self, row: usize) -> [Range<usize>; 3] {
        let Range { start, end } = self.frames[row].clone();
        let hole = match self.exclude {
            Exclude::Nothing => end..end,
            Exclude::CurrentRow => row..row + 1,
            Exclude::Group | Exclude::Ties => self.peers[self.group[row]].clone(),
        };
        let (low, high) = (hole.start.clamp(start, end), hole.end.clamp(start, end));
        let own = match self.exclude == Exclude::Ties && (start..end).contains(&row) {
            true => row..row + 1,
            false => high..high,
        };
        [start..low, own, high..end]
    }
}

fn count(by: Distance) -> usize {
    match by {
        Distance::Whole(n) => usize::try_from(n).unwrap_or(usize::MAX),
        _ => 0,
    }
}

fn by_rows(edge: Edge, start: bool, row: usize, rows: usize) -> usize {
    // An end lies behind its row.
    let own = if start { row } else { row + 1 };
    match edge {
        Edge::At { ahead: true, by } => own.saturating_add(count(by)).min(rows),
        Edge::At { ahead: false, by } => own.saturating_sub(count(by)),
        _ => own,
    }
}

fn by_values(
    frame: &Frame,
    edge: Edge,
    start: bool,
    column: &ArrayRef,
    options: SortOptions,
) -> Result<Vec<usize>> {
    let Some(axis) = Axis::new(column.data_type(), options, frame) else {
        let message = format!("a frame by values of type {}", column.data_type());
        return Err(external(SqlError::internal(message)));
    };
    let values = axis.values(column)?;
    let mut at = 0;
    let edges = values.iter().map(|own| {
        let target = axis.at(*own, edge);
        let passed = |v: Option<Value>| match start {
            true => axis.compare(v, target).is_lt(),
            false => axis.compare(v, target).is_le(),
        };
        while values.get(at).is_some_and(|v| passed(*v)) {
            at += 1;
        }
        at
    });
    Ok(edges.collect())
}

/// Groups of rows that are level, and each row's. Without an order all are.
fn peers(order: &[ArrayRef], rows: usize) -> Result<(Vec<Range<usize>>, Vec<usize>)> {
    let columns: Vec<ArrayRef> = order.iter().map(canonicalise).collect();
    let peers: Vec<Range<usize>> = match columns.is_empty() {
        true => std::iter::once(0..rows).collect(),
        false => partition(&columns)?.ranges(),
    };
    let group = peers.iter().enumerate().flat_map(|(g, r)| std::iter::repeat_n(g, r.len()));
    let group = group.collect();
    Ok((peers, group))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::array::{Date32Array, Float64Array, Int32Array, TimestampMicrosecondArray};

    use super::*;

    fn at(ahead: bool, by: Distance) -> Edge {
        Edge::At { ahead, by }
    }

    fn frames(frame: Frame, column: ArrayRef, options: SortOptions) -> Vec<Range<usize>> {
        let rows = column.len();
        Places::new(&frame, &[column], &[options], rows).unwrap().frames
    }

    fn range(start: Edge, end: Edge) -> Frame {
        Frame { units: Units::Range, start, end, exclude: Exclude::Nothing }
    }

    /// At the ends of the type nothing is lost, and rows without a value stay among themselves.
    #[test]
    fn values_at_the_ends_of_their_type() {
        let near = |by| range(at(false, Distance::Whole(by)), at(true, Distance::Whole(by)));
        let ints = |values: Vec<Option<i32>>| -> ArrayRef { Arc::new(Int32Array::from(values)) };
        let last = SortOptions { descending: false, nulls_first: false };
        let column = ints(vec![Some(i32::MIN), Some(0), Some(i32::MAX), None, None]);
        assert_eq!(frames(near(5), column, last), [0..1, 1..2, 2..3, 3..5, 3..5]);
        let first = SortOptions { descending: true, nulls_first: true };
        let column = ints(vec![None, Some(i32::MAX), Some(i32::MAX - 5), Some(i32::MIN)]);
        assert_eq!(frames(near(5), column, first), [0..1, 1..3, 1..3, 3..4]);
        let column = ints(vec![None, Some(1), Some(2)]);
        let before = range(at(false, Distance::Whole(9)), at(false, Distance::Whole(1)));
        let first = SortOptions { descending: false, nulls_first: true };
        assert_eq!(frames(before, column, first), [0..1, 1..1, 1..2]);
    }

    #[test]
    fn floats_that_are_no_numbers() {
        let near = at(false, Distance::Float(1f64.to_bits()));
        let values = vec![f64::NEG_INFINITY, -0.0, 1.0, f64::INFINITY, f64::NAN];
        let found = frames(
            range(near, Edge::Current),
            Arc::new(Float64Array::from(values)),
            SortOptions { descending: false, nulls_first: false },
        );
        assert_eq!(found, [0..1, 1..2, 1..3, 3..4, 4..5]);
    }

    /// A month before the 29th, 30th and 31st of March is the 28th of February.
    #[test]
    fn months_of_the_calendar() {
        let day = |n: i64| n * 86_400_000_000;
        // 2023-02-27, -02-28, -03-01, -03-28, -03-31.
        let days = [19415, 19416, 19417, 19444, 19447].map(day);
        let month = at(false, Distance::Calendar { months: 1, days: 0, us: 0 });
        let column = Arc::new(TimestampMicrosecondArray::from(days.to_vec()));
        let found = frames(range(month, Edge::Current), column, SortOptions::default());
        assert_eq!(found, [0..1, 0..2, 0..3, 1..4, 1..5]);
    }

    /// In PostgreSQL an infinite date is no month away from any other.
    #[test]
    fn a_month_from_infinity() {
        let month = |ahead| at(ahead, Distance::Calendar { months: 1, days: 0, us: 0 });
        let column = Arc::new(Date32Array::from(vec![i32::MIN, 19_415, 19_416, i32::MAX]));
        let near = range(month(false), month(true));
        let found = frames(near, column, SortOptions::default());
        assert_eq!(found, [0..1, 1..3, 1..3, 3..4]);
    }

    #[test]
    fn what_is_left_out() {
        let column: ArrayRef = Arc::new(Int32Array::from(vec![1, 2, 2, 2, 3]));
        let pieces = |exclude| {
            let frame = Frame {
                units: Units::Rows,
                start: at(false, Distance::Whole(1)),
                end: at(true, Distance::Whole(2)),
                exclude,
            };
            let places =
                Places::new(&frame, &[Arc::clone(&column)], &[SortOptions::default()], 5).unwrap();
            places.pieces(2).into_iter().filter(|p| !p.is_empty()).collect::<Vec<_>>()
        };
        assert_eq!(pieces(Exclude::Nothing), vec![1..5]);
        assert_eq!(pieces(Exclude::CurrentRow), [1..2, 3..5]);
        assert_eq!(pieces(Exclude::Group), vec![4..5]);
        assert_eq!(pieces(Exclude::Ties), [2..3, 4..5]);
    }

    #[test]
    fn groups_before_the_first_and_after_the_last() {
        let column: ArrayRef = Arc::new(Int32Array::from(vec![1, 2, 2, 3]));
        let groups = |start, end| {
            let frame = Frame { units: Units::Groups, start, end, exclude: Exclude::Nothing };
            frames(frame, Arc::clone(&column), SortOptions::default())
        };
        let (back, ahead) = (at(false, Distance::Whole(1)), at(true, Distance::Whole(1)));
        assert_eq!(groups(back, ahead), [0..3, 0..4, 0..4, 1..4]);
        assert_eq!(groups(back, back), [0..0, 0..1, 0..1, 1..3]);
        assert_eq!(groups(ahead, ahead), [1..3, 3..4, 3..4, 4..4]);
    }
}
