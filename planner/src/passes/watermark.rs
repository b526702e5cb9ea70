//! Watermarks as a derived property: which columns of a stream have one, and how it follows from the
//! watermarks of the relations that are read (docs/design.md §4, §5).
//!
//! A [`DerivedWatermark`] promises that after an epoch no change, insertion or retraction, has a smaller value
//! in the column than the mark's value at that epoch. The value is a function of the relations'
//! watermarks at the epoch alone, so every task computes it for itself once it knows these.

use arrow::datatypes::{DataType, Schema, TimeUnit};
use datafusion::common::ScalarValue;
use datafusion::logical_expr::Operator as BinaryOp;
use datafusion::physical_expr::ScalarFunctionExpr;
use datafusion::physical_expr::expressions::BinaryExpr;
use millrace_functions::expr;
use millrace_functions::expr::ExprRef;
use millrace_graph::{DerivedWatermark, MarkStep, WatermarkTerm, dispatch_operator};

use crate::stream::operators::OperatorRules;
use crate::stream::plan::{Op, Stream};

const DAY_US: i64 = 86_400_000_000;

/// The marks of a subtree's output.
pub fn marks(stream: &Stream) -> Vec<DerivedWatermark> {
    let inputs: Vec<Vec<DerivedWatermark>> = stream.inputs.iter().map(marks).collect();
    let widths: Vec<usize> = stream.inputs.iter().map(Stream::width).collect();
    timed(derive(&stream.op, &inputs, &widths), &stream.schema)
}

/// The marks of columns that hold microseconds, as marks do.
pub fn timed(mut marks: Vec<DerivedWatermark>, schema: &Schema) -> Vec<DerivedWatermark> {
    marks.retain(|m| {
        let typed = schema.fields().get(m.column).map(|f| f.data_type());
        matches!(typed, Some(DataType::Timestamp(TimeUnit::Microsecond, _)))
    });
    marks
}

/// The marks of an operator over inputs with these marks and numbers of columns.
pub fn derive(
    op: &Op,
    inputs: &[Vec<DerivedWatermark>],
    widths: &[usize],
) -> Vec<DerivedWatermark> {
    dispatch_operator!(op, p => p.watermarks(inputs, widths))
}

/// The marks of an input.
pub fn port(inputs: &[Vec<DerivedWatermark>], n: usize) -> &[DerivedWatermark] {
    inputs.get(n).map_or(&[][..], Vec::as_slice)
}

/// The terms of a column's mark.
pub fn of(marks: &[DerivedWatermark], column: usize) -> Option<&[WatermarkTerm]> {
    marks.iter().find(|m| m.column == column).map(|m| m.terms.as_slice())
}

/// The terms after more steps.
pub fn then(terms: &[WatermarkTerm], steps: &[MarkStep]) -> Vec<WatermarkTerm> {
    let mut terms = terms.to_vec();
    terms.iter_mut().for_each(|t| t.steps.extend_from_slice(steps));
    terms
}

/// Input columns in output order.
pub fn pick(input: &[DerivedWatermark], columns: &[usize]) -> Vec<DerivedWatermark> {
    let one = |(i, &c): (usize, &usize)| {
        Some(DerivedWatermark { column: i, terms: of(input, c)?.to_vec() })
    };
    columns.iter().enumerate().filter_map(one).collect()
}

/// `a ≥ b + c` for every conjunct of that form: (a, b, c in microseconds).
pub fn at_least(e: &ExprRef) -> Vec<(usize, usize, i64)> {
    let Some(b) = e.downcast_ref::<BinaryExpr>() else { return vec![] };
    if *b.op() == BinaryOp::And {
        return [at_least(b.left()), at_least(b.right())].concat();
    }
    let (Some(l), Some(r)) = (shifted(b.left()), shifted(b.right())) else { return vec![] };
    // l.0 + l.1 op r.0 + r.1
    let left_over = (l.0, r.0, r.1.saturating_sub(l.1));
    let right_over = (r.0, l.0, l.1.saturating_sub(r.1));
    match b.op() {
        BinaryOp::Gt | BinaryOp::GtEq => vec![left_over],
        BinaryOp::Lt | BinaryOp::LtEq => vec![right_over],
        BinaryOp::Eq => vec![left_over, right_over],
        _ => vec![],
    }
}

/// A column plus a constant.
fn shifted(e: &ExprRef) -> Option<(usize, i64)> {
    let (column, steps) = monotone(e)?;
    let mut sum = 0i64;
    for step in steps {
        match step {
            MarkStep::Add(us) => sum = sum.checked_add(us)?,
            MarkStep::Bin { .. } => return None,
        }
    }
    Some((column, sum))
}

/// The column, and what happens to it, of an expression that never decreases when the column grows.
pub fn monotone(e: &ExprRef) -> Option<(usize, Vec<MarkStep>)> {
    if let Some(c) = expr::as_column(e) {
        return Some((c, vec![]));
    }
    if let Some((inner, to)) = expr::as_cast(e) {
        // A cast of a timestamp to a timestamp with or without time zone: UTC.
        let (column, steps) = monotone(inner)?;
        let micros = matches!(to, DataType::Timestamp(TimeUnit::Microsecond, _));
        return micros.then_some((column, steps));
    }
    if let Some(b) = e.downcast_ref::<BinaryExpr>() {
        return match b.op() {
            BinaryOp::Plus => added(b.left(), b.right(), 1),
            BinaryOp::Minus => added(b.left(), b.right(), -1),
            _ => None,
        };
    }
    let call = e.downcast_ref::<ScalarFunctionExpr>()?;
    let step = match (call.fun().name(), call.args()) {
        ("pg_add", [a, b]) => return added(a, b, 1),
        ("pg_sub", [a, b]) => return added(a, b, -1),
        ("tumble_start", [_, size, offset]) => {
            MarkStep::Bin { size: integer(size)?, offset: integer(offset)? }
        }
        ("window_end", [_, size]) => MarkStep::Add(integer(size)?),
        ("date_trunc", [unit, x]) => {
            let (column, mut steps) = monotone(x)?;
            steps.push(MarkStep::Bin { size: unit_us(expr::as_literal(unit)?)?, offset: 0 });
            return Some((column, steps));
        }
        // Its result has the type of its argument.
        ("date_bin", [size, x, rest @ ..]) => {
            let offset = match rest {
                [] => 0,
                [origin] => instant(expr::as_literal(origin)?)?,
                _ => return None,
            };
            let (column, mut steps) = monotone(x)?;
            steps.push(MarkStep::Bin { size: interval_us(expr::as_literal(size)?)?, offset });
            return Some((column, steps));
        }
        _ => return None,
    };
    let (column, mut steps) = monotone(call.args().first()?)?;
    if matches!(step, MarkStep::Bin { size, .. } if size <= 0) {
        return None;
    }
    steps.push(step);
    Some((column, steps))
}

fn added(a: &ExprRef, b: &ExprRef, sign: i64) -> Option<(usize, Vec<MarkStep>)> {
    let (x, by) = match (expr::as_literal(a), expr::as_literal(b)) {
        (None, Some(by)) => (a, by),
        (Some(by), None) if sign == 1 => (b, by),
        _ => return None,
    };
    let us = interval_us(by)?;
    let (column, mut steps) = monotone(x)?;
    steps.push(MarkStep::Add(us.checked_mul(sign)?));
    Some((column, steps))
}

fn integer(e: &ExprRef) -> Option<i64> {
    match expr::as_literal(e)? {
        ScalarValue::Int64(v) => *v,
        _ => None,
    }
}

/// Months have no fixed length.
fn interval_us(v: &ScalarValue) -> Option<i64> {
    match v {
        ScalarValue::IntervalMonthDayNano(Some(i)) if i.months == 0 => {
            i64::from(i.days).checked_mul(DAY_US)?.checked_add(i.nanoseconds / 1_000)
        }
        _ => None,
    }
}

fn instant(v: &ScalarValue) -> Option<i64> {
    match v {
        ScalarValue::TimestampMicrosecond(v, _) => *v,
        _ => None,
    }
}

fn unit_us(v: &ScalarValue) -> Option<i64> {
    let unit = match v {
        ScalarValue::Utf8(Some(s)) | ScalarValue::Utf8View(Some(s)) => s.to_lowercase(),
        _ => return None,
    };
    Some(match unit.as_str() {
        "microsecond" | "microseconds" => 1,
        "millisecond" | "milliseconds" => 1_000,
        "second" => 1_000_000,
        "minute" => 60_000_000,
        "hour" => 3_600_000_000,
        "day" => DAY_US,
        _ => return None,
    })
}

/// The first marked column of a stream's output that users see: what EMIT ON WINDOW CLOSE waits for.
pub fn closing_column(stream: &Stream, visible: usize) -> Option<usize> {
    let mut columns: Vec<usize> = marks(stream).iter().map(|m| m.column).collect();
    columns.sort_unstable();
    columns.into_iter().find(|&c| c < visible)
}

#[cfg(test)]
mod tests {
    use millrace_common::RelationId;

    use super::*;

    #[test]
    fn steps_follow_the_calendar() {
        let term =
            |steps: Vec<MarkStep>| WatermarkTerm { relation: RelationId(1), column: 0, steps };
        let at = |steps, v| term(steps).apply(v);
        assert_eq!(at(vec![MarkStep::Bin { size: 10, offset: 0 }], 25), 20);
        assert_eq!(at(vec![MarkStep::Bin { size: 10, offset: 3 }], 25), 23);
        assert_eq!(at(vec![MarkStep::Bin { size: 10, offset: 0 }], -1), -10);
        assert_eq!(at(vec![MarkStep::Bin { size: 10, offset: 0 }, MarkStep::Add(10)], 25), 30);
        assert_eq!(at(vec![MarkStep::Add(i64::MAX)], 25), i64::MAX);
    }
}
