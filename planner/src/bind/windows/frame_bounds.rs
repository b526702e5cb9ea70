//! Frames that no window has: bounds in the wrong order or without the order that they are measured along, and offsets
//! that are NULL or below zero. Offsets are constants, and become plain numbers and texts here, before a statement is
//! planned.

use std::ops::ControlFlow;
use std::sync::Arc;

use WindowFrameBound::{CurrentRow, Following, Preceding};
use datafusion::arrow::datatypes::{Decimal128Type, Decimal256Type, DecimalType, i256};
use datafusion::common::{DFSchema, ScalarValue};
use datafusion::logical_expr::{ExprSchemable, TableSource};
use millrace_common::{SqlError, SqlState, SqlType};
use millrace_functions::cast::assignable;
use millrace_functions::error::sql_error_from_datafusion;
use millrace_functions::types::type_name;
use millrace_rpc::catalog::Relation;
use sqlparser::ast::*;
use sqlparser::tokenizer::Location;

use super::frames::UNTYPED;
use crate::bind::Binder;
use crate::bind::SessionInfo;
use crate::bind::expressions::clause_expressions::any_own;
use crate::bind::expressions::desugar::interval_text;
use crate::bind::ordering::limits;
use crate::bind::relations::series::evaluated;
use crate::bind::rewrites::ast::AstRewrite;
use crate::bind::spans::misplaced_calls;
use crate::catalog::CatalogView;
use crate::parser::walk;

/// Checks the frames of windows, and makes plain offsets of theirs.
pub const CHECK_FRAMES: AstRewrite = AstRewrite {
    name: "check frames",
    expr: |expr, cx| match expr {
        Expr::Function(function) => plain_bounds(function, cx.session),
        _ => Ok(()),
    },
    ..AstRewrite::NONE
};

/// Frames with plain offsets: `ROWS 1 + 1 PRECEDING`, `RANGE INTERVAL '1 hour' PRECEDING`, which takes the
/// type of the order.
fn plain_bounds(function: &mut Function, session: &SessionInfo) -> Result<(), SqlError> {
    let Some(WindowType::WindowSpec(spec)) = &mut function.over else { return Ok(()) };
    let Some(frame) = &mut spec.window_frame else { return Ok(()) };
    check(frame, spec.order_by.len())?;
    let bounds = [("starting", Some(&mut frame.start_bound)), ("ending", frame.end_bound.as_mut())];
    for (which, bound) in bounds {
        if let Some(Preceding(Some(e)) | Following(Some(e))) = bound
            && let Some(text) = plain(e, &frame.units, which, session)?
        {
            **e = Expr::value(Value::Number(text, false));
        }
    }
    Ok(())
}

/// An error where a frame is none. `orders`: how many expressions its window is ordered by.
fn check(frame: &WindowFrame, orders: usize) -> Result<(), SqlError> {
    check_bounds(&frame.start_bound, frame.end_bound.as_ref())?;
    let bounds = [Some(&frame.start_bound), frame.end_bound.as_ref()];
    let mut offsets = bounds.into_iter().flatten().filter_map(offset);
    match frame.units {
        WindowFrameUnits::Groups if orders == 0 => {
            Err(refused("GROUPS mode requires an ORDER BY clause"))
        }
        WindowFrameUnits::Range if orders != 1 && offsets.next().is_some() => {
            let message =
                "RANGE with offset PRECEDING/FOLLOWING requires exactly one ORDER BY column";
            Err(refused(message))
        }
        _ => Ok(()),
    }
}

/// How a bound's offset is written out. `which`: what messages call the bound. `None`: it stays as it is.
fn plain(
    e: &Expr,
    units: &WindowFrameUnits,
    which: &str,
    session: &SessionInfo,
) -> Result<Option<String>, SqlError> {
    check_constant(e, units)?;
    if let Expr::Value(v) = e
        && let Value::Number(n, _) = &v.value
        && (matches!(units, WindowFrameUnits::Range) || n.parse::<i64>().is_ok())
    {
        return Ok(None);
    }
    let value = match (units, e) {
        (WindowFrameUnits::Range, e) => match (interval_of(e)?, string_of(e)) {
            // The offset's text, whatever it is; that of an interval does not look like a number.
            (Some(text), _) if text.trim().parse::<f64>().is_ok() => {
                return Ok(Some(format!("{text} seconds")));
            }
            (Some(text), _) => return Ok(Some(text)),
            (None, Some(text)) if text.trim().parse::<f64>().is_ok_and(f64::is_finite) => {
                return Ok(Some(format!("{}{UNTYPED}", text.trim())));
            }
            (None, Some(text)) => return Ok(Some(text.to_owned())),
            (None, None) => value(e, None, session)?,
        },
        (_, e) => value(e, Some(units), session)?,
    };
    let below = match units {
        WindowFrameUnits::Range => {
            "invalid preceding or following size in window function".to_owned()
        }
        _ => format!("frame {which} offset must not be negative"),
    };
    let below = || SqlError::new(SqlState("22013"), below.clone());
    if value.is_null() {
        let message = format!("frame {which} offset must not be null");
        return Err(SqlError::new(SqlState("22004"), message));
    }
    text_of(&value, below).map(Some)
}

/// The text of an offset's value.
fn text_of(value: &ScalarValue, below: impl Fn() -> SqlError) -> Result<String, SqlError> {
    let (text, negative) = match value {
        ScalarValue::Int16(Some(n)) => (n.to_string(), *n < 0),
        ScalarValue::Int32(Some(n)) => (n.to_string(), *n < 0),
        ScalarValue::Int64(Some(n)) => (n.to_string(), *n < 0),
        ScalarValue::Float32(Some(n)) => (format!("{n:e}"), *n < 0.0),
        ScalarValue::Float64(Some(n)) => (format!("{n:e}"), *n < 0.0),
        ScalarValue::Decimal128(Some(n), precision, scale) => {
            (Decimal128Type::format_decimal(*n, *precision, *scale), *n < 0)
        }
        ScalarValue::Decimal256(Some(n), precision, scale) => {
            (Decimal256Type::format_decimal(*n, *precision, *scale), *n < i256::ZERO)
        }
        ScalarValue::Utf8(Some(text)) => (text.clone(), false),
        // Of intervals those along their order know what is below zero.
        ScalarValue::IntervalMonthDayNano(Some(i)) => {
            let us = i.nanoseconds / 1_000;
            (format!("{} months {} days {us} us", i.months, i.days), false)
        }
        other => {
            let t = type_name(&Some(other.data_type()));
            return Err(SqlError::unsupported(format!("a frame's offset of type {t}")));
        }
    };
    if negative { Err(below()) } else { Ok(text) }
}

/// The value of a constant expression. `counted`: it is a number of rows or groups.
fn value(
    e: &Expr,
    counted: Option<&WindowFrameUnits>,
    session: &SessionInfo,
) -> Result<ScalarValue, SqlError> {
    let schema = DFSchema::empty();
    let binder = Binder::new(&Nothing, session.clone());
    let mut bound = binder.expr(e, &schema, None)?;
    if let Some(units) = counted {
        let t = bound.get_type(&schema).map_err(sql_error_from_datafusion)?;
        let unknown = t.is_null() || string_of(e).is_some();
        if !unknown && !assignable(&t, SqlType::BigInt) {
            let (units, t) = (name(units), type_name(&Some(t)));
            let message = format!("argument of {units} must be type bigint, not type {t}");
            return Err(SqlError::new(SqlState::DATATYPE_MISMATCH, message));
        }
        bound = binder.expr(e, &schema, Some(SqlType::BigInt))?;
    }
    if bound.is_volatile() {
        return Err(not_constant());
    }
    evaluated(&bound).map_err(sql_error_from_datafusion)
}

/// A catalog without relations: offsets have none.
struct Nothing;

impl CatalogView for Nothing {
    fn relation(&self, _: Option<&str>, _: &str) -> Option<Arc<Relation>> {
        None
    }

    fn table_source(&self, _: &Arc<Relation>) -> Result<Arc<dyn TableSource>, SqlError> {
        Err(SqlError::internal("a relation in a frame's offset"))
    }

    fn names(&self) -> Vec<String> {
        Vec::new()
    }
}

fn not_constant() -> SqlError {
    SqlError::unsupported("a frame's offset that is not a constant")
}

fn name(units: &WindowFrameUnits) -> &'static str {
    match units {
        WindowFrameUnits::Rows => "ROWS",
        WindowFrameUnits::Range => "RANGE",
        WindowFrameUnits::Groups => "GROUPS",
    }
}

fn check_constant(e: &Expr, units: &WindowFrameUnits) -> Result<(), SqlError> {
    limits::check(e, name(units))?;
    let mut call = None;
    any_own(e, |e| {
        if let Expr::Function(f) = e {
            call = misplaced_calls::in_clause(f, &format!("window {}", name(units)));
        }
        call.is_some()
    });
    if let Some(call) = call {
        return Err(call.error);
    }
    let parameter =
        |e: &Expr| matches!(e, Expr::Value(v) if matches!(v.value, Value::Placeholder(_)));
    if any_own(e, parameter) {
        return Err(SqlError::unsupported("a parameter as a frame's offset")
            .with_hint("Write the number into the statement."));
    }
    let query = |e: &Expr| {
        matches!(e, Expr::Subquery(_) | Expr::Exists { .. } | Expr::InSubquery { .. })
            || matches!(e, Expr::Function(f) if matches!(f.args, FunctionArguments::Subquery(_)))
    };
    if any_own(e, query) { Err(not_constant()) } else { Ok(()) }
}

/// A string of no type.
fn string_of(e: &Expr) -> Option<&str> {
    match e {
        Expr::Nested(inner) => string_of(inner),
        Expr::Value(v) => match &v.value {
            Value::SingleQuotedString(text) => Some(text),
            _ => None,
        },
        _ => None,
    }
}

/// The text of an interval, as a literal or a cast of one.
fn interval_of(e: &Expr) -> Result<Option<String>, SqlError> {
    let is_interval = |t: &DataType| matches!(t, DataType::Interval { .. });
    Ok(match e {
        Expr::Nested(inner) => interval_of(inner)?,
        Expr::Interval(i) => Some(interval_text(i)?),
        Expr::TypedString(t) if is_interval(&t.data_type) => t.value.clone().into_string(),
        Expr::Cast { expr, data_type, .. } if is_interval(data_type) => match expr.as_ref() {
            Expr::Value(v) => v.clone().into_string(),
            _ => None,
        },
        _ => None,
    })
}

/// Looks at the frames of a statement.
struct Frames<F>(F);

impl<F: FnMut(&WindowFrame)> Visitor for Frames<F> {
    type Break = ();

    fn pre_visit_expr(&mut self, e: &Expr) -> ControlFlow<()> {
        if let Expr::Function(Function { over: Some(WindowType::WindowSpec(spec)), .. }) = e {
            spec.window_frame.iter().for_each(&mut self.0);
        }
        ControlFlow::Continue(())
    }

    fn pre_visit_select(&mut self, select: &Select) -> ControlFlow<()> {
        for window in &select.named_window {
            if let NamedWindowExpr::WindowSpec(spec) = &window.1 {
                spec.window_frame.iter().for_each(&mut self.0);
            }
        }
        ControlFlow::Continue(())
    }
}

fn offsets(frame: &WindowFrame) -> impl Iterator<Item = &Expr> {
    [Some(&frame.start_bound), frame.end_bound.as_ref()].into_iter().flatten().filter_map(offset)
}

/// The column that an offset names.
pub fn variable_in(sql: &Statement, message: &str) -> Option<Location> {
    let mut found = None;
    let mut look = Frames(|frame: &WindowFrame| {
        if found.is_some() || !message.starts_with(&format!("argument of {} ", name(&frame.units)))
        {
            return;
        }
        let mut variable = |e: &Expr| {
            let is_one = matches!(e, Expr::Identifier(_) | Expr::CompoundIdentifier(_));
            if is_one {
                found = Some(e.span().start);
            }
            is_one
        };
        let _ = offsets(frame).any(|e| any_own(e, &mut variable));
    });
    let _ = walk::visit(sql, &mut look);
    found
}

/// The only offset of a frame by value; of an interval that begins with its word there is no place.
pub fn only_offset_in(sql: &Statement) -> Option<Location> {
    let mut places = Vec::new();
    let mut look = Frames(|frame: &WindowFrame| {
        if matches!(frame.units, WindowFrameUnits::Range) {
            let begins = |e: &Expr| match e {
                Expr::Interval(_) | Expr::TypedString(_) => None,
                e => Some(e.span().start),
            };
            places.extend(offsets(frame).map(begins));
        }
    });
    let _ = walk::visit(sql, &mut look);
    match places.as_slice() {
        [only] => *only,
        _ => None,
    }
}

/// Without an end a frame ends with the current row.
fn check_bounds(start: &WindowFrameBound, end: Option<&WindowFrameBound>) -> Result<(), SqlError> {
    let message = match (start, end) {
        (Following(None), _) => "frame start cannot be UNBOUNDED FOLLOWING",
        (_, Some(Preceding(None))) => "frame end cannot be UNBOUNDED PRECEDING",
        (CurrentRow, Some(Preceding(_))) => {
            "frame starting from current row cannot have preceding rows"
        }
        (Following(_), Some(Preceding(_) | CurrentRow)) => {
            "frame starting from following row cannot have preceding rows"
        }
        (Following(_), None) => "frame starting from following row cannot end with current row",
        _ => return Ok(()),
    };
    Err(refused(message))
}

fn refused(message: &str) -> SqlError {
    SqlError::new(SqlState("42P20"), message)
}

fn offset(bound: &WindowFrameBound) -> Option<&Expr> {
    match bound {
        Preceding(e) | Following(e) => e.as_deref(),
        CurrentRow => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bind::rewrites::testing::{assert_rewritten, rewritten};

    #[test]
    fn offsets_become_plain_numbers() {
        let sql = "SELECT sum(a) OVER (ORDER BY a ROWS 1 + 1 PRECEDING) FROM t";
        let expected = "SELECT sum(a) OVER (ORDER BY a ROWS 2 PRECEDING) FROM t";
        assert_rewritten(CHECK_FRAMES, &[(sql, expected)]);
    }

    #[test]
    fn frames_that_no_window_has_are_refused() {
        let state = |frame: &str| {
            let sql = format!("SELECT sum(a) OVER (ORDER BY a {frame}) FROM t");
            rewritten(CHECK_FRAMES, &sql).unwrap_err().state
        };
        assert_eq!(state("ROWS BETWEEN CURRENT ROW AND 1 PRECEDING"), SqlState("42P20"));
        assert_eq!(state("ROWS -1 PRECEDING"), SqlState("22013"));
        assert_eq!(state("ROWS NULL PRECEDING"), SqlState("22004"));
    }
}
