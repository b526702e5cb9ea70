//! Window functions that DataFusion does not compute as PostgreSQL does become calls of [`framed`]: over
//! frames by value and frames with rows left out, and `lag` and `lead` by a distance of each row's own.

use datafusion::arrow::compute::SortOptions;
use datafusion::arrow::datatypes::{DataType, TimeUnit, i256};
use datafusion::common::tree_node::Transformed;
use datafusion::common::{DFSchema, Result, ScalarValue};
use datafusion::logical_expr::expr::{FieldMetadata, NullTreatment, WindowFunction};
use datafusion::logical_expr::type_coercion::functions::fields_with_udf;
use datafusion::logical_expr::{
    Expr, ExprSchemable, LogicalPlan, SortExpr, WindowFrame, WindowFrameBound, WindowFrameUnits,
    WindowFunctionDefinition, lit,
};
use millrace_common::{SqlError, SqlState};
use millrace_functions::error::external;
use millrace_functions::frame::{Distance, Edge, Exclude, Frame, Units};
use millrace_functions::framed::{Framed, framed};
use millrace_functions::interval_text;
use millrace_functions::types::type_name;
use millrace_functions::window_fn::EXCLUDE;

use super::args;
use super::peers;
use crate::bind::ordering::by_keys::change_windows;
use crate::bind::rewrites::plan::{PlanRewrite, change_nodes};

const DAY_US: i128 = 86_400_000_000;

/// Makes calls of our own of windows that DataFusion computes otherwise.
pub const CALL_FRAMED: PlanRewrite = PlanRewrite::new("call framed", |plan, _| rewrite(plan));

/// Rewrites the windows of a plan.
fn rewrite(plan: LogicalPlan) -> std::result::Result<LogicalPlan, SqlError> {
    change_nodes(plan, |node| match node {
        LogicalPlan::Window(node) => change_windows(node, one),
        other => Ok(Transformed::no(other)),
    })
}

fn one(e: Expr, schema: &DFSchema) -> Result<Expr> {
    match e {
        Expr::WindowFunction(mut call) => {
            let exclude = take_exclusion(&mut call.params.partition_by)?;
            let frame = frame_of(&call, exclude, schema)?;
            peers::by_value(&mut call.params, schema)?;
            if let Some(frame) = frame {
                return wrapped(*call, frame, schema);
            }
            peers::by_groups(&mut call.params, schema)?;
            Ok(Expr::WindowFunction(call))
        }
        other => Ok(other),
    }
}

/// What the parser has marked among the expressions of PARTITION BY.
fn take_exclusion(partition_by: &mut Vec<Expr>) -> Result<Exclude> {
    let mut exclude = Exclude::Nothing;
    let mut unknown = false;
    partition_by.retain(|e| {
        let Expr::ScalarFunction(f) = e else { return true };
        if f.func.name() != EXCLUDE {
            return true;
        }
        exclude = match f.args.first() {
            Some(Expr::Literal(ScalarValue::Utf8(Some(what)), _)) => match what.as_str() {
                "current row" => Exclude::CurrentRow,
                "group" => Exclude::Group,
                _ => Exclude::Ties,
            },
            _ => {
                unknown = true;
                Exclude::Nothing
            }
        };
        false
    });
    match unknown {
        true => Err(external(SqlError::internal("a frame leaves out rows that are not named"))),
        false => Ok(exclude),
    }
}

/// The frame of a call that is to be computed by [`framed`].
fn frame_of(call: &WindowFunction, exclude: Exclude, schema: &DFSchema) -> Result<Option<Frame>> {
    let name = call.fun.name();
    let aggregate = matches!(call.fun, WindowFunctionDefinition::AggregateUDF(_));
    if !aggregate && ["lag", "lead"].contains(&name) {
        args::check_moved(call, schema)?;
        let whole = Frame {
            units: Units::Rows,
            start: Edge::Unbounded,
            end: Edge::Unbounded,
            exclude: Exclude::Nothing,
        };
        return Ok(args::own_distance(&call.params.args).then_some(whole));
    }
    // Others look at places only, whatever frame they are given.
    if !aggregate && !["first_value", "last_value", "nth_value"].contains(&name) {
        return Ok(None);
    }
    let WindowFrame { units, start_bound, end_bound, .. } = &call.params.window_frame;
    let given =
        |b: &WindowFrameBound| !b.is_unbounded() && !matches!(b, WindowFrameBound::CurrentRow);
    let by_value = *units == WindowFrameUnits::Range && (given(start_bound) || given(end_bound));
    let nth = name == "nth_value" && args::own_number(&call.params.args);
    if exclude == Exclude::Nothing && !by_value && !nth && !backwards(start_bound, end_bound) {
        return Ok(None);
    }
    let order = match call.params.order_by.first() {
        Some(by) if by_value => Some(by.expr.get_type(schema)?),
        _ => None,
    };
    let units = match units {
        WindowFrameUnits::Rows => Units::Rows,
        WindowFrameUnits::Range => Units::Range,
        WindowFrameUnits::Groups => Units::Groups,
    };
    let (start, end) = (edge(start_bound, order.as_ref())?, edge(end_bound, order.as_ref())?);
    Ok(Some(Frame { units, start, end, exclude }))
}

/// A frame in rows or groups that may end before it starts: it is empty.
fn backwards(start: &WindowFrameBound, end: &WindowFrameBound) -> bool {
    use WindowFrameBound as B;
    let count = |v: &ScalarValue| match v {
        ScalarValue::UInt64(n) => *n,
        _ => None,
    };
    match (start, end) {
        (B::Preceding(s), B::Preceding(e)) => count(s).zip(count(e)).is_some_and(|(s, e)| s < e),
        (B::Following(s), B::Following(e)) => count(s).zip(count(e)).is_some_and(|(s, e)| s > e),
        _ => false,
    }
}

/// `order`: the type of the order, for frames by value.
fn edge(bound: &WindowFrameBound, order: Option<&DataType>) -> Result<Edge> {
    let (ahead, offset) = match bound {
        bound if bound.is_unbounded() => return Ok(Edge::Unbounded),
        WindowFrameBound::CurrentRow => return Ok(Edge::Current),
        WindowFrameBound::Preceding(offset) => (false, offset),
        WindowFrameBound::Following(offset) => (true, offset),
    };
    let by = match (offset, order) {
        (ScalarValue::UInt64(Some(n)), _) => Distance::Whole(i128::from(*n)),
        (ScalarValue::Utf8(Some(text)), Some(order)) => distance(text, order).map_err(external)?,
        _ => return Err(external(SqlError::internal("a frame's offset that is not a constant"))),
    };
    Ok(Edge::At { ahead, by })
}

/// As PostgreSQL says it, for these types.
fn refused(types: String) -> SqlError {
    let message =
        format!("RANGE with offset PRECEDING/FOLLOWING is not supported for column type {types}");
    SqlError::new(SqlState::FEATURE_NOT_SUPPORTED, message)
}

fn negative() -> SqlError {
    SqlError::new(SqlState("22013"), "invalid preceding or following size in window function")
}

/// Ends an offset that is a string with a number in it: seconds of an interval, and a number where the order is one.
pub const UNTYPED: &str = " s";

/// An offset, as it is written: a number, or the text of an interval.
fn distance(text: &str, order: &DataType) -> std::result::Result<Distance, SqlError> {
    let text = text.trim();
    let text = match text.strip_suffix(UNTYPED) {
        Some(number) if order.is_numeric() && decimal(number).is_some() => number,
        _ => text,
    };
    let number = decimal(text);
    let offset = match number {
        Some((_, 0)) if text.parse::<i64>().is_ok_and(|n| i32::try_from(n).is_ok()) => "integer",
        Some((_, 0)) if text.parse::<i64>().is_ok() => "bigint",
        Some(_) => "numeric",
        None => "interval",
    };
    let mismatch = || {
        let column = type_name(&Some(order.clone()));
        refused(format!("{column} and offset type {offset}"))
            .with_hint("Cast the offset value to an appropriate type.")
    };
    match (order, number) {
        (DataType::Int16 | DataType::Int32 | DataType::Int64, Some(_)) => {
            match text.parse::<i64>() {
                Ok(n) if n < 0 => Err(negative()),
                Ok(n) => Ok(Distance::Whole(i128::from(n))),
                Err(_) => Err(mismatch()),
            }
        }
        (DataType::Decimal128(..) | DataType::Decimal256(..), Some((units, digits))) => {
            match units.is_negative() {
                true => Err(negative()),
                false => Ok(Distance::Numeric(units, digits)),
            }
        }
        (DataType::Float32 | DataType::Float64, Some(_)) => match text.parse::<f64>() {
            Ok(n) if n < 0.0 => Err(negative()),
            Ok(n) if n.is_finite() => Ok(Distance::Float(n.to_bits())),
            _ => Err(mismatch()),
        },
        (DataType::Date32, None)
        | (DataType::Timestamp(TimeUnit::Microsecond, _), None)
        | (DataType::Time64(TimeUnit::Microsecond), None) => {
            interval(text, matches!(order, DataType::Time64(_)))
        }
        (
            DataType::Int16
            | DataType::Int32
            | DataType::Int64
            | DataType::Decimal128(..)
            | DataType::Decimal256(..)
            | DataType::Float32
            | DataType::Float64
            | DataType::Date32
            | DataType::Timestamp(TimeUnit::Microsecond, _)
            | DataType::Time64(TimeUnit::Microsecond),
            _,
        ) => Err(mismatch()),
        (other, _) => Err(refused(type_name(&Some(other.clone())))),
    }
}

/// A number's units, and how many digits it has after the point.
fn decimal(text: &str) -> Option<(i256, i8)> {
    let (mantissa, exponent) = match text.split_once(['e', 'E']) {
        Some((mantissa, exponent)) => (mantissa, exponent.parse::<i32>().ok()?),
        None => (text, 0),
    };
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let digits = |s: &str| s.bytes().all(|b| b.is_ascii_digit());
    let unsigned = whole.strip_prefix('-').unwrap_or(whole);
    if unsigned.len() + fraction.len() == 0 || !digits(unsigned) || !digits(fraction) {
        return None;
    }
    let units = i256::from_string(&format!("{whole}{fraction}"))?;
    let scale = i64::try_from(fraction.len()).ok()? - i64::from(exponent);
    if scale >= 0 {
        let scale = i8::try_from(scale).ok().filter(|scale| *scale <= MOST_DIGITS)?;
        return Some((units, scale));
    }
    let ten = i256::from_i128(10).checked_pow(u32::try_from(-scale).ok()?)?;
    Some((units.checked_mul(ten)?, 0))
}

/// Digits after the point of which there is a power of ten.
const MOST_DIGITS: i8 = 76;

/// Of a time of day only the interval's time counts, as in PostgreSQL.
fn interval(text: &str, of_day: bool) -> std::result::Result<Distance, SqlError> {
    let (months, days, us) = interval_text::interval(text)?;
    let (months, days) = if of_day { (0, 0) } else { (months, days) };
    let length = (i128::from(months) * 30 + i128::from(days)) * DAY_US + i128::from(us);
    match months {
        _ if length < 0 => Err(negative()),
        0 => Ok(Distance::Whole(length)),
        _ => Ok(Distance::Calendar { months, days, us }),
    }
}

/// The call with its frame told in an argument.
fn wrapped(call: WindowFunction, frame: Frame, schema: &DFSchema) -> Result<Expr> {
    let field = Expr::from(call.clone()).to_field(schema)?.1;
    let WindowFunction { fun, mut params } = call;
    let ignore_nulls = params.null_treatment == Some(NullTreatment::IgnoreNulls);
    let function = fun.name().to_owned();
    if ignore_nulls && ["lag", "lead"].contains(&function.as_str()) {
        let message =
            format!("{function} with IGNORE NULLS and an offset or default that is not a constant");
        return Err(external(SqlError::unsupported(message)));
    }
    let own = coerced(&fun, std::mem::take(&mut params.args), schema)?;
    let measured = |e: Edge| frame.units == Units::Range && matches!(e, Edge::At { .. });
    let by_value = measured(frame.start) || measured(frame.end);
    // A constant orders nothing.
    let orders = |by: &&SortExpr| by_value || !matches!(by.expr, Expr::Literal(..));
    let order: Vec<&SortExpr> = params.order_by.iter().filter(orders).collect();
    let described = Framed {
        function,
        aggregate: matches!(fun, WindowFunctionDefinition::AggregateUDF(_)),
        distinct: params.distinct,
        ignore_nulls,
        filtered: params.filter.is_some(),
        frame,
        order: order
            .iter()
            .map(|by| SortOptions { descending: !by.asc, nulls_first: by.nulls_first })
            .collect(),
    };
    let sample = match field.is_nullable() {
        true => ScalarValue::try_from(field.data_type())?,
        false => ScalarValue::new_default(field.data_type())?,
    };
    let metadata = Some(FieldMetadata::from(field.as_ref())).filter(|m| !m.is_empty());
    let mut args = vec![lit(described.encode()), Expr::Literal(sample, metadata)];
    args.extend(order.into_iter().map(|by| by.expr.clone()));
    if let Some(filter) = params.filter.take() {
        args.push(filter.cast_to(&DataType::Boolean, schema)?);
    }
    args.extend(own);
    params.args = args;
    params.window_frame = WindowFrame::new(None);
    params.null_treatment = None;
    params.distinct = false;
    let fun = WindowFunctionDefinition::WindowUDF(framed());
    Ok(Expr::from(WindowFunction { fun, params }))
}

/// The arguments with the types that the function takes.
fn coerced(
    fun: &WindowFunctionDefinition,
    args: Vec<Expr>,
    schema: &DFSchema,
) -> Result<Vec<Expr>> {
    let name = fun.name();
    if ["lag", "lead"].contains(&name) {
        let value = args.first().map(|e| e.get_type(schema)).transpose()?;
        let typed = args.into_iter().enumerate().map(|(i, e)| match (i, &value) {
            (1, _) => e.cast_to(&DataType::Int64, schema),
            (2, Some(value)) => e.cast_to(value, schema),
            _ => Ok(e),
        });
        return typed.collect();
    }
    if args.is_empty() {
        return Ok(args);
    }
    let fields = args.iter().map(|e| Ok(e.to_field(schema)?.1)).collect::<Result<Vec<_>>>()?;
    let wanted = match fun {
        WindowFunctionDefinition::AggregateUDF(f) => fields_with_udf(&fields, f.as_ref())?,
        WindowFunctionDefinition::WindowUDF(f) => fields_with_udf(&fields, f.as_ref())?,
    };
    let typed = args.into_iter().zip(wanted).map(|(e, f)| e.cast_to(f.data_type(), schema));
    typed.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offsets_take_the_type_of_the_order() {
        let of = |text: &str, order: DataType| distance(text, &order);
        let whole = |text, order| match of(text, order) {
            Ok(Distance::Whole(n)) => n,
            other => panic!("{other:?}"),
        };
        assert_eq!(whole("5000000000", DataType::Int32), 5_000_000_000);
        assert_eq!(whole("1 day", DataType::Date32), 86_400_000_000);
        let time = DataType::Time64(TimeUnit::Microsecond);
        assert_eq!(whole("1 day 2 hours", time), 7_200_000_000);
        let numeric = Distance::Numeric(i256::from_i128(105), 2);
        assert_eq!(of("1.05", DataType::Decimal128(8, 1)).unwrap(), numeric);
        assert_eq!(of("10.5e-1", DataType::Decimal128(8, 1)).unwrap(), numeric);
        let ten = Distance::Numeric(i256::from_i128(10), 0);
        assert_eq!(of("1e1", DataType::Decimal128(8, 1)).unwrap(), ten);
        let month = Distance::Calendar { months: 1, days: 0, us: 0 };
        assert_eq!(of("1 month", DataType::Date32).unwrap(), month);
        assert_eq!(whole("2 s", DataType::Int32), 2);
        assert_eq!(whole("2 s", DataType::Date32), 2_000_000);
        let state = |text, order| of(text, order).unwrap_err().state.0;
        assert_eq!(state("1.5", DataType::Int32), "0A000");
        assert_eq!(state("1 day", DataType::Int32), "0A000");
        assert_eq!(state("1", DataType::Date32), "0A000");
        assert_eq!(state("1", DataType::Utf8), "0A000");
        assert_eq!(state("-1 day", DataType::Date32), "22013");
    }
}
