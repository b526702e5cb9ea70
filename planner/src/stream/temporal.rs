//! Temporal filters: `WHERE ts > now() - interval '1 hour'` in a view.
//!
//! `now()` is the wall-clock time of the view's epoch. A condition `x > now() + c`, or with `>=`, holds
//! until the time reaches `x - c`: its rows pass an operator that retracts them then
//! ([`crate::graph::Operator::Expire`]). Conditions that become true as time passes, and `now()` anywhere
//! else, are refused.

use std::sync::Arc;

use arrow::datatypes::{DataType, TimeUnit};
use datafusion::common::tree_node::{TreeNode, TreeNodeRecursion};
use datafusion::common::{DFSchema, ScalarValue};
use datafusion::logical_expr::expr::ScalarFunction;
use datafusion::logical_expr::utils::{conjunction, split_conjunction};
use datafusion::logical_expr::{BinaryExpr, Cast, Expr, ExprSchemable, Operator, TryCast, lit};

use crate::error::sql_error_from_datafusion;
use crate::functions::window_fn::window_end;
use crate::stream::convert::{Extended, Result, in_view};
use crate::stream::expr;
use crate::stream::plan::Stream;

const DAY_US: i64 = 86_400_000_000;

/// The rows for which the predicate holds, for as long as it does.
pub(super) fn filter(input: Stream, predicate: &Expr, schema: &DFSchema) -> Result<Stream> {
    let (timed, plain): (Vec<&Expr>, Vec<&Expr>) =
        split_conjunction(predicate).into_iter().partition(|e| reads_clock(e));
    let mut stream = input;
    if let Some(plain) = conjunction(plain.into_iter().cloned()) {
        stream = stream.filter(expr::compile(&plain, schema)?);
    }
    for condition in timed {
        stream = expire(stream, condition, schema)?;
    }
    Ok(stream)
}

/// Whether an expression contains `now()`.
pub fn reads_clock(e: &Expr) -> bool {
    let mut found = false;
    // The closure does not fail.
    let _ = e.apply(|e| {
        found |= is_now(e);
        Ok(if found { TreeNodeRecursion::Stop } else { TreeNodeRecursion::Continue })
    });
    found
}

fn is_now(e: &Expr) -> bool {
    matches!(e, Expr::ScalarFunction(f) if f.func.name() == "now")
}

fn expire(input: Stream, condition: &Expr, schema: &DFSchema) -> Result<Stream> {
    let Some((instant, shift)) = until(condition) else {
        return Err(in_view("this condition on now()").with_hint(
            "Conditions of the form timestamp > now() - interval are supported: rows that expire.",
        ));
    };
    let instant = microseconds(instant, schema)?;
    let expiry = window_end().call(vec![instant, lit(shift)]);
    let width = input.width();
    let mut extended = Extended::new(input);
    let column = extended.add(expr::compile(&expiry, schema)?);
    let stream = extended.finish()?.expire(column);
    let all: Vec<usize> = (0..width).collect();
    Ok(if stream.width() > width { stream.select(&all) } else { stream })
}

/// The instant x and what is added to it (microseconds) to give the time at which `condition` stops
/// holding.
fn until(condition: &Expr) -> Option<(&Expr, i64)> {
    let Expr::BinaryExpr(BinaryExpr { left, op, right }) = condition else { return None };
    let (instant, op, clock) = match (reads_clock(left), reads_clock(right)) {
        (false, true) => (left, *op, right),
        (true, false) => (right, op.swap()?, left),
        _ => return None,
    };
    let shift = clock_shift(clock)?.checked_neg()?;
    match op {
        Operator::Gt => Some((instant, shift)),
        // Equal still holds.
        Operator::GtEq => Some((instant, shift.checked_add(1)?)),
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
    if i.months != 0 {
        return None;
    }
    let us = i64::from(i.days).checked_mul(DAY_US)?.checked_add(i.nanoseconds / 1_000)?;
    clock_shift(clock)?.checked_add(us.checked_mul(sign)?)
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
