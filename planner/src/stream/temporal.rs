//! Temporal filters: `WHERE ts > now() - interval '1 hour'` in a view.
//!
//! `now()` is the wall-clock time of the view's epoch. A condition `x > now() + c`, or with `>=`, holds
//! until the time reaches `x - c`: its rows pass an operator that retracts them then
//! ([`millrace_graph::BufferMode::UpperBound`]). `x < now() + c`, or with `<=`, holds from that time
//! on: its rows wait in one that lets them pass then ([`millrace_graph::BufferMode::LowerBound`]).
//! `now()` anywhere else is refused.

use std::sync::Arc;

use arrow::datatypes::{DataType, IntervalMonthDayNano, TimeUnit};
use datafusion::common::tree_node::TreeNodeRecursion;
use datafusion::common::{DFSchema, ScalarValue};
use datafusion::logical_expr::expr::ScalarFunction;
use datafusion::logical_expr::utils::{conjunction, split_conjunction};
use datafusion::logical_expr::{BinaryExpr, Cast, Expr, ExprSchemable, Operator, TryCast, lit};
use millrace_functions::error::sql_error_from_datafusion;
use millrace_functions::tree::Walk;
use millrace_functions::window_fn::window_end;

use crate::stream::compile::compile;
use crate::stream::convert::{Extended, Result, in_view};
use crate::stream::plan::Stream;

const DAY_US: i64 = 86_400_000_000;

/// The rows for which the predicate holds, for as long as it does.
pub(super) fn filter(input: Stream, predicate: &Expr, schema: &DFSchema) -> Result<Stream> {
    let (conditions, plain): (Vec<&Expr>, Vec<&Expr>) =
        split_conjunction(predicate).into_iter().partition(|e| reads_clock(e));
    let mut stream = input;
    if let Some(plain) = conjunction(plain.into_iter().cloned()) {
        stream = stream.filter(compile(&plain, schema)?);
    }
    for condition in conditions {
        stream = timed(stream, condition, schema)?;
    }
    Ok(stream)
}

/// Whether an expression contains `now()`.
pub fn reads_clock(e: &Expr) -> bool {
    let mut found = false;
    // The closure does not fail.
    let _ = e.walk(|e| {
        found |= is_now(e);
        Ok(if found { TreeNodeRecursion::Stop } else { TreeNodeRecursion::Continue })
    });
    found
}

fn is_now(e: &Expr) -> bool {
    matches!(e, Expr::ScalarFunction(f) if f.func.name() == "now")
}

fn timed(input: Stream, condition: &Expr, schema: &DFSchema) -> Result<Stream> {
    let Some(Timed { instant, shift, holds }) = timed_condition(condition) else {
        return Err(in_view("this condition on now()").with_hint(
            "Compare a timestamp with now() plus or minus an interval of days or less, by <, <=, > or >=.",
        ));
    };
    let instant = microseconds(instant, schema)?;
    let more = i64::from(holds.inclusive == (holds.kind == Kind::Until));
    let Some(us) = shift.checked_neg().and_then(|shift| shift.checked_add(more)) else {
        return Err(in_view("an interval of this length"));
    };
    let turn = window_end().call(vec![instant, lit(us)]);
    let width = input.width();
    let mut extended = Extended::new(input);
    let column = extended.add(compile(&turn, schema)?);
    let extended = extended.finish()?;
    let stream = match holds.kind {
        Kind::Until => extended.expire(column),
        Kind::From => extended.appear(column),
    };
    let all: Vec<usize> = (0..width).collect();
    Ok(if stream.width() > width { stream.select(&all) } else { stream })
}

/// `instant > now() + shift`, and its like.
struct Timed<'a> {
    instant: &'a Expr,
    /// Microseconds.
    shift: i64,
    holds: Holds,
}

/// On which side of `instant - shift` a condition holds.
#[derive(Clone, Copy)]
struct Holds {
    kind: Kind,
    /// Where both are equal too.
    inclusive: bool,
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Until,
    From,
}

fn timed_condition(condition: &Expr) -> Option<Timed<'_>> {
    let Expr::BinaryExpr(BinaryExpr { left, op, right }) = condition else { return None };
    let (with_clock, op, other) = match (reads_clock(left), reads_clock(right)) {
        (false, true) => (right, *op, left),
        (true, false) => (left, op.swap()?, right),
        _ => return None,
    };
    // other op with_clock
    let (instant, shift, op) = match clock_shift(with_clock) {
        Some(shift) => (other.as_ref(), shift, op),
        None => {
            // i > now() - x is x > now() - i.
            let (clock, instant) = difference(with_clock)?;
            if reads_clock(instant) {
                return None;
            }
            (instant, clock_shift(clock)?.checked_sub(length(other)?)?, op)
        }
    };
    let (kind, inclusive) = match op {
        Operator::Gt => (Kind::Until, false),
        Operator::GtEq => (Kind::Until, true),
        Operator::Lt => (Kind::From, false),
        Operator::LtEq => (Kind::From, true),
        _ => return None,
    };
    Some(Timed { instant, shift, holds: Holds { kind, inclusive } })
}

/// The sides of a subtraction whose length is compared.
fn difference(e: &Expr) -> Option<(&Expr, &Expr)> {
    let Expr::ScalarFunction(f) = e else { return None };
    match (f.func.name(), f.args.as_slice()) {
        ("interval_span", [e]) => difference(e),
        ("pg_sub", [a, b]) => Some((a, b)),
        _ => None,
    }
}

/// The length of a constant interval: microseconds.
fn length(e: &Expr) -> Option<i64> {
    match e {
        Expr::Literal(ScalarValue::Decimal128(Some(us), _, 0), _) => i64::try_from(*us).ok(),
        Expr::Literal(ScalarValue::IntervalMonthDayNano(Some(i)), _) => constant(*i),
        Expr::ScalarFunction(f) if f.func.name() == "interval_span" => length(f.args.first()?),
        _ => None,
    }
}

/// What is added to `now()`.
fn clock_shift(e: &Expr) -> Option<i64> {
    match e {
        e if is_now(e) => Some(0),
        Expr::Alias(a) => clock_shift(&a.expr),
        Expr::Cast(Cast { expr, field }) if is_timestamp(field.data_type()) => clock_shift(expr),
        Expr::TryCast(TryCast { expr, field }) if is_timestamp(field.data_type()) => {
            clock_shift(expr)
        }
        Expr::ScalarFunction(f) => match (f.func.name(), f.args.as_slice()) {
            ("pg_add", [a, b]) => shifted(a, b, 1),
            ("pg_sub", [a, b]) => shifted(a, b, -1),
            (name, [a]) if name.starts_with("cast_to_timestamp") => clock_shift(a),
            _ => None,
        },
        Expr::BinaryExpr(BinaryExpr { left, op: Operator::Plus, right }) => shifted(left, right, 1),
        Expr::BinaryExpr(BinaryExpr { left, op: Operator::Minus, right }) => {
            shifted(left, right, -1)
        }
        _ => None,
    }
}

fn shifted(a: &Expr, b: &Expr, sign: i64) -> Option<i64> {
    let (clock, by) = match (a, b) {
        (clock, Expr::Literal(by, _)) => (clock, by),
        (Expr::Literal(by, _), clock) if sign == 1 => (clock, by),
        _ => return None,
    };
    let ScalarValue::IntervalMonthDayNano(Some(i)) = by else { return None };
    clock_shift(clock)?.checked_add(constant(*i)?.checked_mul(sign)?)
}

/// Microseconds of an interval without months. With them a condition could hold again after it did not: a month before
/// March 28 at 11:00 is later than a month before March 29 at 0:00.
fn constant(i: IntervalMonthDayNano) -> Option<i64> {
    if i.months != 0 {
        return None;
    }
    i64::from(i.days).checked_mul(DAY_US)?.checked_add(i.nanoseconds / 1_000)
}

fn is_timestamp(t: &DataType) -> bool {
    matches!(t, DataType::Timestamp(_, _))
}

/// A timestamp as the column it is, or cast to microseconds.
fn microseconds(e: &Expr, schema: &DFSchema) -> Result<Expr> {
    let micros = |t: &DataType| matches!(t, DataType::Timestamp(TimeUnit::Microsecond, _));
    let typed = e.get_type(schema).map_err(sql_error_from_datafusion)?;
    if micros(&typed) {
        return Ok(e.clone());
    }
    let inner = match e {
        Expr::Cast(Cast { expr, .. }) | Expr::TryCast(TryCast { expr, .. }) => Some(expr.as_ref()),
        Expr::ScalarFunction(ScalarFunction { func, args })
            if func.name().starts_with("cast_to_timestamp") =>
        {
            args.first()
        }
        _ => None,
    };
    match inner {
        Some(inner)
            if inner.get_type(schema).is_ok_and(|t| micros(&t) || t == DataType::Date32) =>
        {
            microseconds(inner, schema)
        }
        _ if is_timestamp(&typed) || typed == DataType::Date32 => {
            let zone: Option<Arc<str>> = None;
            let to = DataType::Timestamp(TimeUnit::Microsecond, zone);
            e.clone().cast_to(&to, schema).map_err(sql_error_from_datafusion)
        }
        _ => Err(in_view(format!("a comparison of {typed} with now()"))),
    }
}
