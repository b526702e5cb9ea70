//! Window functions over frames that DataFusion does not have: by values exact to PostgreSQL, with rows left out
//! (EXCLUDE), and `lag` and `lead` by a distance that each row has of its own.
//!
//! `#framed(call, sample, order…, [filter], arguments…)`: the call is described by a text ([`Framed`]), because a
//! function is told nothing of its frame or of its row's peers. The sample is a literal of the result's type, NULL if
//! the result may be. the planner's `bind::windows::frames` makes these calls.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use arrow::array::{
    Array, ArrayRef, AsArray, BooleanArray, Int64Array, UInt64Array, new_empty_array,
    new_null_array,
};
use arrow::compute::{SortOptions, cast, filter, interleave, take};
use arrow::datatypes::{DataType, Field, FieldRef, Int64Type, Schema, i256};
use datafusion::common::{Result, ScalarValue};
use datafusion::logical_expr::function::{
    ExpressionArgs, PartitionEvaluatorArgs, WindowUDFFieldArgs,
};
use datafusion::logical_expr::{
    Accumulator, PartitionEvaluator, Signature, Volatility, WindowUDF, WindowUDFImpl,
};
use datafusion::physical_expr::aggregate::{AggregateExprBuilder, AggregateFunctionExpr};
use datafusion::physical_expr::expressions::Column;
use millrace_common::{SqlError, SqlState};

use super::functions;
use crate::error::external;
use crate::expr::{ExprRef, as_literal};
use crate::frame::{Distance, Edge, Exclude, Frame, Places, Units};
use crate::window_call::WindowCall;

/// The name of [`framed`]; not one that SQL text can contain unquoted.
pub const FRAMED: &str = "#framed";

/// Literals in front of the columns.
const HEAD: usize = 2;

pub fn framed() -> Arc<WindowUDF> {
    static F: OnceLock<Arc<WindowUDF>> = OnceLock::new();
    Arc::clone(F.get_or_init(|| {
        let signature = Signature::variadic_any(Volatility::Immutable);
        Arc::new(WindowUDF::from(Function { signature }))
    }))
}

/// What is called, over which frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Framed {
    pub function: String,
    pub aggregate: bool,
    pub distinct: bool,
    pub ignore_nulls: bool,
    pub filtered: bool,
    pub frame: Frame,
    /// Of each column of the order.
    pub order: Vec<SortOptions>,
}

impl Framed {
    /// What a call of [`framed`] stands for.
    pub fn of(call: &WindowCall) -> Option<Framed> {
        if call.function != FRAMED {
            return None;
        }
        described(&call.args)
    }

    /// The arguments of the function itself, and the filter's column, of a call of [`framed`].
    pub fn arguments<'a, T>(&self, args: &'a [T]) -> (Option<&'a T>, &'a [T]) {
        let columns = args.get(HEAD + self.order.len()..).unwrap_or_default();
        match (self.filtered, columns.split_first()) {
            (true, Some((filter, rest))) => (Some(filter), rest),
            _ => (None, columns),
        }
    }

    pub fn encode(&self) -> String {
        let flag = |set: bool, letter: char| if set { letter } else { '-' };
        let flags: String = [
            flag(self.aggregate, 'a'),
            flag(self.distinct, 'd'),
            flag(self.ignore_nulls, 'i'),
            flag(self.filtered, 'f'),
        ]
        .iter()
        .collect();
        let order: String = self
            .order
            .iter()
            .flat_map(|o| [flag(o.descending, 'd'), flag(o.nulls_first, 'f')])
            .collect();
        let Frame { units, start, end, exclude } = self.frame;
        let units = match units {
            Units::Rows => "rows",
            Units::Range => "range",
            Units::Groups => "groups",
        };
        let exclude = match exclude {
            Exclude::Nothing => "no others",
            Exclude::CurrentRow => "current row",
            Exclude::Group => "group",
            Exclude::Ties => "ties",
        };
        let (start, end) = (encode_edge(start), encode_edge(end));
        format!("{}|{flags}|{units}|{start}|{end}|{exclude}|{order}", self.function)
    }

    pub fn decode(text: &str) -> Option<Framed> {
        let parts: Vec<&str> = text.split('|').collect();
        let [function, flags, units, start, end, exclude, order] = parts[..] else { return None };
        let units = match units {
            "rows" => Units::Rows,
            "range" => Units::Range,
            "groups" => Units::Groups,
            _ => return None,
        };
        let exclude = match exclude {
            "no others" => Exclude::Nothing,
            "current row" => Exclude::CurrentRow,
            "group" => Exclude::Group,
            "ties" => Exclude::Ties,
            _ => return None,
        };
        let order: Vec<char> = order.chars().collect();
        let options = order
            .chunks_exact(2)
            .map(|o| SortOptions { descending: o[0] == 'd', nulls_first: o[1] == 'f' });
        Some(Framed {
            function: function.to_owned(),
            aggregate: flags.contains('a'),
            distinct: flags.contains('d'),
            ignore_nulls: flags.contains('i'),
            filtered: flags.contains('f'),
            frame: Frame { units, start: decode_edge(start)?, end: decode_edge(end)?, exclude },
            order: options.collect(),
        })
    }
}

fn encode_edge(edge: Edge) -> String {
    let (ahead, by) = match edge {
        Edge::Unbounded => return "unbounded".into(),
        Edge::Current => return "current".into(),
        Edge::At { ahead, by } => (ahead, by),
    };
    let direction = if ahead { "following" } else { "preceding" };
    let by = match by {
        Distance::Whole(n) => format!("whole {n}"),
        Distance::Numeric(n, digits) => format!("numeric {n} {digits}"),
        Distance::Float(bits) => format!("float {bits}"),
        Distance::Calendar { months, days, us } => format!("calendar {months} {days} {us}"),
    };
    format!("{direction} {by}")
}

fn decode_edge(text: &str) -> Option<Edge> {
    let words: Vec<&str> = text.split(' ').collect();
    let (direction, by) = match words[..] {
        ["unbounded"] => return Some(Edge::Unbounded),
        ["current"] => return Some(Edge::Current),
        [direction, "whole", n] => (direction, Distance::Whole(n.parse().ok()?)),
        [direction, "numeric", n, digits] => {
            (direction, Distance::Numeric(i256::from_string(n)?, digits.parse().ok()?))
        }
        [direction, "float", bits] => (direction, Distance::Float(bits.parse().ok()?)),
        [direction, "calendar", months, days, us] => {
            let (months, days) = (months.parse().ok()?, days.parse().ok()?);
            (direction, Distance::Calendar { months, days, us: us.parse().ok()? })
        }
        _ => return None,
    };
    Some(Edge::At { ahead: direction == "following", by })
}

fn described(args: &[ExprRef]) -> Option<Framed> {
    match as_literal(args.first()?)? {
        ScalarValue::Utf8(Some(text)) => Framed::decode(text),
        _ => None,
    }
}

fn misuse() -> datafusion::error::DataFusionError {
    external(SqlError::internal("a call over a frame that is not described"))
}

#[derive(Debug, PartialEq, Eq, Hash)]
struct Function {
    signature: Signature,
}

impl WindowUDFImpl for Function {
    fn name(&self) -> &str {
        FRAMED
    }

    fn signature(&self) -> &Signature {
        &self.signature
    }

    /// What is computed for every row: not the description.
    fn expressions(&self, args: ExpressionArgs) -> Vec<ExprRef> {
        args.input_exprs().get(HEAD..).unwrap_or_default().to_vec()
    }

    fn partition_evaluator(
        &self,
        args: PartitionEvaluatorArgs,
    ) -> Result<Box<dyn PartitionEvaluator>> {
        let call = described(args.input_exprs()).ok_or_else(misuse)?;
        let result = args.input_fields().get(1).ok_or_else(misuse)?.data_type().clone();
        let aggregate = match call.aggregate {
            true => Some(aggregate(&call, args.input_exprs(), args.input_fields())?),
            false => None,
        };
        Ok(Box::new(Evaluator { call, result, aggregate }))
    }

    fn field(&self, args: WindowUDFFieldArgs) -> Result<FieldRef> {
        let sample = args.get_input_field(1).ok_or_else(misuse)?;
        Ok(Arc::new(Field::clone(&sample).with_name(args.name())))
    }
}

/// The aggregate itself. Its literals stay, because some aggregates want them; the rest are columns of what
/// it is given.
fn aggregate(
    call: &Framed,
    exprs: &[ExprRef],
    fields: &[FieldRef],
) -> Result<AggregateFunctionExpr> {
    let (_, exprs) = call.arguments(exprs);
    let (_, fields) = call.arguments(fields);
    let function = functions().aggregate(&call.function).ok_or_else(misuse)?;
    let named = fields.iter().enumerate().map(|(i, f)| Field::clone(f).with_name(i.to_string()));
    let schema = Arc::new(Schema::new(named.collect::<Vec<_>>()));
    let args = exprs.iter().enumerate().map(|(i, e)| -> ExprRef {
        match as_literal(e) {
            Some(_) => Arc::clone(e),
            None => Arc::new(Column::new(&i.to_string(), i)),
        }
    });
    AggregateExprBuilder::new(function, args.collect())
        .schema(schema)
        .alias(call.function.clone())
        .with_ignore_nulls(call.ignore_nulls)
        .with_distinct(call.distinct)
        .build()
}

#[derive(Debug)]
struct Evaluator {
    call: Framed,
    result: DataType,
    aggregate: Option<AggregateFunctionExpr>,
}

impl PartitionEvaluator for Evaluator {
    fn evaluate_all(&mut self, values: &[ArrayRef], rows: usize) -> Result<ArrayRef> {
        if rows == 0 {
            return Ok(new_empty_array(&self.result));
        }
        let (order, rest) = values.split_at_checked(self.call.order.len()).ok_or_else(misuse)?;
        let (filter, args) = match (self.call.filtered, rest.split_first()) {
            (true, Some((filter, args))) => (filter.as_boolean_opt(), args),
            _ => (None, rest),
        };
        let places = || Places::new(&self.call.frame, order, &self.call.order, rows);
        let found = match (&self.aggregate, self.call.function.as_str()) {
            (Some(aggregate), _) => self.aggregates(aggregate, args, filter, &places()?)?,
            (None, "lag") => moved(args, rows, -1)?,
            (None, "lead") => moved(args, rows, 1)?,
            (None, _) => self.picks(args, &places()?)?,
        };
        match *found.data_type() == self.result {
            true => Ok(found),
            false => Ok(cast(&found, &self.result)?),
        }
    }
}

impl Evaluator {
    fn aggregates(
        &self,
        aggregate: &AggregateFunctionExpr,
        args: &[ArrayRef],
        filter: Option<&BooleanArray>,
        places: &Places,
    ) -> Result<ArrayRef> {
        let rows = Rows { args, filter };
        let values = match self.call.frame.exclude {
            Exclude::Nothing => self.moving(aggregate, &rows, places)?,
            _ => self.afresh(aggregate, &rows, places)?,
        };
        ScalarValue::iter_to_array(values)
    }

    /// Frames whose both ends move forward only: rows come in and go out.
    fn moving(
        &self,
        aggregate: &AggregateFunctionExpr,
        rows: &Rows<'_>,
        places: &Places,
    ) -> Result<Vec<ScalarValue>> {
        let mut accumulator = match self.call.frame.start {
            Edge::Unbounded => aggregate.create_accumulator()?,
            _ => aggregate.create_sliding_accumulator()?,
        };
        let mut values: Vec<ScalarValue> = Vec::with_capacity(places.frames.len());
        let mut last = 0..0;
        for frame in &places.frames {
            if let Some(value) = values.last().filter(|_| *frame == last).cloned() {
                values.push(value);
                continue;
            }
            if frame.end > last.end {
                accumulator.update_batch(&rows.slice(last.end..frame.end)?)?;
            }
            if frame.start > last.start {
                accumulator.retract_batch(&rows.slice(last.start..frame.start)?)?;
            }
            last = frame.clone();
            values.push(match frame.is_empty() {
                true => aggregate.default_value(&self.result)?,
                false => accumulator.evaluate()?,
            });
        }
        Ok(values)
    }

    /// Frames with holes, which each have an accumulator of their own, as they do in PostgreSQL.
    fn afresh(
        &self,
        aggregate: &AggregateFunctionExpr,
        rows: &Rows<'_>,
        places: &Places,
    ) -> Result<Vec<ScalarValue>> {
        let mut values: Vec<ScalarValue> = Vec::with_capacity(places.frames.len());
        let mut last = None;
        for row in 0..places.frames.len() {
            let pieces = places.pieces(row).map(|p| if p.is_empty() { 0..0 } else { p });
            let same = last.as_ref() == Some(&pieces);
            if let Some(value) = values.last().filter(|_| same).cloned() {
                values.push(value);
                continue;
            }
            let mut accumulator: Option<Box<dyn Accumulator>> = None;
            for piece in pieces.iter().filter(|p| !p.is_empty()) {
                let accumulator = match &mut accumulator {
                    Some(a) => a,
                    None => accumulator.insert(aggregate.create_accumulator()?),
                };
                accumulator.update_batch(&rows.slice(piece.clone())?)?;
            }
            values.push(match accumulator {
                Some(mut accumulator) => accumulator.evaluate()?,
                None => aggregate.default_value(&self.result)?,
            });
            last = Some(pieces);
        }
        Ok(values)
    }

    /// `first_value`, `last_value` and `nth_value`.
    fn picks(&self, args: &[ArrayRef], places: &Places) -> Result<ArrayRef> {
        let value = args.first().ok_or_else(misuse)?;
        let numbers = match (self.call.function.as_str(), args.get(1)) {
            ("nth_value", Some(n)) => Some(cast(n, &DataType::Int64)?),
            _ => None,
        };
        let numbers = numbers.as_ref().map(|n| n.as_primitive::<Int64Type>());
        let counts = |row: &usize| !self.call.ignore_nulls || value.is_valid(*row);
        let mut picked = Vec::with_capacity(places.frames.len());
        for row in 0..places.frames.len() {
            let mut rows = places.pieces(row).into_iter().flatten().filter(counts);
            picked.push(match (self.call.function.as_str(), numbers) {
                ("first_value", _) => rows.next(),
                ("last_value", _) => {
                    places.pieces(row).into_iter().rev().flat_map(Iterator::rev).find(counts)
                }
                (_, Some(n)) if self.call.ignore_nulls => nth(n, row)?.and_then(|n| rows.nth(n)),
                (_, Some(n)) => nth(n, row)?.and_then(|n| nth_place(places.pieces(row), n)),
                _ => return Err(misuse()),
            });
        }
        let picked: UInt64Array = picked.into_iter().map(|p| p.map(|p| p as u64)).collect();
        Ok(take(value, &picked, None)?)
    }
}

/// How many rows of the frame come before the one that a row asks for.
fn nth(numbers: &Int64Array, row: usize) -> Result<Option<usize>> {
    if numbers.is_null(row) {
        return Ok(None);
    }
    match usize::try_from(numbers.value(row)) {
        Ok(n) if n > 0 => Ok(Some(n - 1)),
        _ => Err(external(SqlError::new(
            SqlState("22016"),
            "argument of nth_value must be greater than zero",
        ))),
    }
}

/// The row that so many others of a frame come before, without a look at each of them.
fn nth_place(pieces: [Range<usize>; 3], mut before: usize) -> Option<usize> {
    for piece in pieces {
        match before.checked_sub(piece.len()) {
            None => return Some(piece.start + before),
            Some(left) => before = left,
        }
    }
    None
}

/// The arguments of an aggregate.
struct Rows<'a> {
    args: &'a [ArrayRef],
    filter: Option<&'a BooleanArray>,
}

impl Rows<'_> {
    /// Of the rows in a range that the filter lets through.
    fn slice(&self, range: Range<usize>) -> Result<Vec<ArrayRef>> {
        let mask = self.filter.map(|f| f.slice(range.start, range.len()));
        let one = |arg: &ArrayRef| -> Result<ArrayRef> {
            let part = arg.slice(range.start, range.len());
            match &mask {
                Some(mask) => Ok(filter(&part, mask)?),
                None => Ok(part),
            }
        };
        self.args.iter().map(one).collect()
    }
}

/// `lag` with sign −1 and `lead`: the value so many rows away, or the row's own default where there is no such row.
fn moved(args: &[ArrayRef], rows: usize, sign: i64) -> Result<ArrayRef> {
    let value = args.first().ok_or_else(misuse)?;
    let distances: ArrayRef = match args.get(1) {
        Some(n) => cast(n, &DataType::Int64)?,
        None => Arc::new(Int64Array::from(vec![1i64; rows])),
    };
    let distances = distances.as_primitive::<Int64Type>();
    let none = new_null_array(value.data_type(), 1);
    let default = match args.get(2) {
        Some(default) => cast(default, value.data_type())?,
        None => new_null_array(value.data_type(), rows),
    };
    let pick = |row: usize| {
        if distances.is_null(row) {
            return (2, 0);
        }
        let to = distances.value(row).checked_mul(sign).and_then(|n| n.checked_add(row as i64));
        match to.and_then(|to| usize::try_from(to).ok()).filter(|to| *to < rows) {
            Some(to) => (0, to),
            None => (1, row),
        }
    };
    let picks: Vec<(usize, usize)> = (0..rows).map(pick).collect();
    let from: [&dyn Array; 3] = [value.as_ref(), default.as_ref(), none.as_ref()];
    Ok(interleave(&from, &picks)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_description_is_read_back() {
        let at = |ahead, by| Edge::At { ahead, by };
        let edges = [
            (Edge::Unbounded, Edge::Current),
            (at(false, Distance::Whole(3)), at(true, Distance::Float(1.5f64.to_bits()))),
            (
                at(false, Distance::Calendar { months: 1, days: -2, us: 3 }),
                at(true, Distance::Numeric(i256::from_i128(150), 2)),
            ),
        ];
        for (i, (start, end)) in edges.into_iter().enumerate() {
            let framed = Framed {
                function: "sum".into(),
                aggregate: true,
                distinct: i == 0,
                ignore_nulls: i == 1,
                filtered: i == 2,
                frame: Frame { units: Units::Range, start, end, exclude: Exclude::Ties },
                order: vec![SortOptions { descending: true, nulls_first: false }; i],
            };
            assert_eq!(Framed::decode(&framed.encode()), Some(framed));
        }
        assert_eq!(Framed::decode("sum|a|rows"), None);
    }

    #[test]
    fn rows_are_counted_across_what_is_left_out() {
        let place = |n| nth_place([1..3, 4..4, 6..8], n);
        assert_eq!([0, 1, 2, 3, 4].map(place), [Some(1), Some(2), Some(6), Some(7), None]);
    }

    #[test]
    fn each_row_has_its_own_distance() {
        let column = |values: Vec<Option<i64>>| -> ArrayRef { Arc::new(Int64Array::from(values)) };
        let value = column(vec![Some(10), Some(20), Some(30)]);
        let by = column(vec![Some(-1), None, Some(i64::MAX)]);
        let default = column(vec![Some(1), Some(2), Some(3)]);
        let found = moved(&[value, by, default], 3, -1).unwrap();
        assert_eq!(
            found.as_primitive::<Int64Type>().iter().collect::<Vec<_>>(),
            [Some(20), None, Some(3)]
        );
    }
}
