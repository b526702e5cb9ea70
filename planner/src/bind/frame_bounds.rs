//! Frames that no window has: bounds in the wrong order or without the order that they are measured along, and offsets
//! that are NULL or below zero.

use millrace_common::{SqlError, SqlState};
use sqlparser::ast::*;

use WindowFrameBound::{CurrentRow, Following, Preceding};

use super::limits;

/// An error where a frame is none. `orders`: how many expressions its window is ordered by.
pub fn check(frame: &WindowFrame, orders: usize) -> Result<(), SqlError> {
    check_bounds(&frame.start_bound, frame.end_bound.as_ref())?;
    let bounds = [Some(&frame.start_bound), frame.end_bound.as_ref()];
    let offsets = bounds.map(|bound| bound.and_then(offset));
    match frame.units {
        WindowFrameUnits::Groups if orders == 0 => {
            return Err(refused("GROUPS mode requires an ORDER BY clause"));
        }
        WindowFrameUnits::Range if orders != 1 && offsets.iter().any(Option::is_some) => {
            let message =
                "RANGE with offset PRECEDING/FOLLOWING requires exactly one ORDER BY column";
            return Err(refused(message));
        }
        _ => {}
    }
    for (which, e) in ["starting", "ending"].into_iter().zip(offsets) {
        let Some(e) = e else { continue };
        if is_null(e) {
            let message = format!("frame {which} offset must not be null");
            return Err(SqlError::new(SqlState("22004"), message));
        }
        if is_negative(e) {
            let message = match frame.units {
                WindowFrameUnits::Range => {
                    "invalid preceding or following size in window function".to_owned()
                }
                _ => format!("frame {which} offset must not be negative"),
            };
            return Err(SqlError::new(SqlState("22013"), message));
        }
        check_constant(e, &frame.units)?;
    }
    Ok(())
}

fn check_constant(e: &Expr, units: &WindowFrameUnits) -> Result<(), SqlError> {
    let units = match units {
        WindowFrameUnits::Rows => "ROWS",
        WindowFrameUnits::Range => "RANGE",
        WindowFrameUnits::Groups => "GROUPS",
    };
    limits::check(e, units)?;
    match is_constant(e) {
        true => Ok(()),
        false => Err(SqlError::unsupported("a frame's offset that is not a constant")),
    }
}

fn is_constant(e: &Expr) -> bool {
    match e {
        Expr::Nested(e) | Expr::Cast { expr: e, .. } | Expr::UnaryOp { expr: e, .. } => {
            is_constant(e)
        }
        Expr::Value(v) => !matches!(v.value, Value::Placeholder(_)),
        Expr::Interval(_) | Expr::TypedString(_) => true,
        _ => false,
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

fn is_null(e: &Expr) -> bool {
    match e {
        Expr::Nested(inner) | Expr::Cast { expr: inner, .. } => is_null(inner),
        Expr::Value(v) => v.value == Value::Null,
        _ => false,
    }
}

/// Whether an offset is a number below zero.
fn is_negative(e: &Expr) -> bool {
    match e {
        Expr::Nested(inner) | Expr::Cast { expr: inner, .. } => is_negative(inner),
        Expr::UnaryOp { op: UnaryOperator::Minus, expr } => match expr.as_ref() {
            Expr::Value(v) => match &v.value {
                Value::Number(text, _) => text.parse::<f64>().is_ok_and(|n| n > 0.0),
                _ => false,
            },
            _ => false,
        },
        _ => false,
    }
}
