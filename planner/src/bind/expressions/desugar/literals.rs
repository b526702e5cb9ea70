//! Values as they are written: numbers and their signs, strings, casts, intervals, arrays.

use millrace_common::encoding::interval_text::{self, Field, Span};
use millrace_common::{SqlError, SqlState, SqlType};
use millrace_functions::text::{push_interval_text, timestamptz_text};
use sqlparser::ast::*;

use super::ops::{ARRAY, Op, call, cast, null, number_text, ours, resolved, string, take};
use crate::bind::SessionInfo;
use crate::bind::expressions::types::sql_type;

/// What a value, or one with a sign, becomes; `None`: it stays as it is.
pub(super) fn rewrite(expr: &mut Expr) -> Result<Option<Expr>, SqlError> {
    Ok(Some(match expr {
        Expr::Value(v) => match &v.value {
            Value::Number(n, _) => ours(Op::Number, string(n.replace('_', "")), null()),
            Value::Placeholder(_) => {
                let p = take(expr);
                ours(Op::Parameter, Expr::value(Value::Null), Box::new(p))
            }
            Value::EscapedStringLiteral(s) | Value::UnicodeStringLiteral(s) => string(s.clone()),
            Value::DollarQuotedString(s) => string(s.value.clone()),
            _ => return Ok(None),
        },
        Expr::UnaryOp { op: UnaryOperator::Minus, expr: e } => match number_text(e) {
            Some(text) if !text.starts_with('-') => {
                ours(Op::Number, string(format!("-{text}")), null())
            }
            _ => ours(Op::Negate, take(e), null()),
        },
        Expr::UnaryOp { op: UnaryOperator::Plus, expr: e } => match number_text(e) {
            Some(_) => take(e),
            None => ours(Op::Plus, take(e), null()),
        },
        Expr::UnaryOp { op: UnaryOperator::Not, expr: e } if is_string(e) => {
            **e = cast(take(e), SqlType::Boolean);
            return Ok(None);
        }
        Expr::Cast { kind: CastKind::Cast | CastKind::DoubleColon, expr: e, data_type, .. } => {
            cast_to(take(e), data_type)?
        }
        Expr::TypedString(t) => {
            let text = t.value.clone().into_string().unwrap_or_default();
            cast_to(string(text), &t.data_type)?
        }
        Expr::Interval(i) => {
            let value = cast(string(interval_text(i)?), SqlType::Interval);
            match i.fractional_seconds_precision.or(i.leading_precision) {
                Some(digits) => call("round_seconds", [value, digits_of(digits)]),
                None => value,
            }
        }
        Expr::UnaryOp { op: UnaryOperator::PGSquareRoot, expr: e } => call("sqrt", [take(e)]),
        Expr::UnaryOp { op: UnaryOperator::PGCubeRoot, expr: e } => call("cbrt", [take(e)]),
        Expr::UnaryOp { op: UnaryOperator::PGAbs, expr: e } => ours(Op::Absolute, take(e), null()),
        Expr::UnaryOp { op: UnaryOperator::BitwiseNot, expr: e } => {
            ours(Op::Complement, take(e), null())
        }
        Expr::Array(array) if array.elem.iter().any(|e| matches!(e, Expr::Array(_))) => {
            return Err(SqlError::unsupported("an array of more than one dimension"));
        }
        Expr::Array(array) if !array.elem.is_empty() => {
            resolved(ARRAY, std::mem::take(&mut array.elem))
        }
        _ => return Ok(None),
    }))
}

/// A string whose type is not known yet.
fn is_string(e: &Expr) -> bool {
    match e {
        Expr::Nested(inner) => is_string(inner),
        Expr::Value(v) => matches!(v.value, Value::SingleQuotedString(_)),
        _ => false,
    }
}

pub(super) fn digits_of(n: u64) -> Expr {
    ours(Op::Number, string(n.min(6).to_string()), null())
}

/// A cast to a type as written: a precision of seconds rounds.
fn cast_to(e: Expr, t: &DataType) -> Result<Expr, SqlError> {
    let value = cast(e, sql_type(t)?);
    Ok(match t {
        DataType::Timestamp(Some(n), _)
        | DataType::Time(Some(n), _)
        | DataType::Interval { precision: Some(n), .. }
            if *n < 6 =>
        {
            call("round_seconds", [value, digits_of(*n)])
        }
        _ => value,
    })
}

const DAY_US: i64 = 86_400_000_000;

/// `timestamp 'today'` and its like, which mean the time of the statement; `None`: it is something else.
pub(super) fn moment(expr: &Expr, session: &SessionInfo) -> Result<Option<Expr>, SqlError> {
    let (value, t) = match expr {
        Expr::TypedString(typed) => (&typed.value, &typed.data_type),
        Expr::Cast { expr, data_type, .. } => match expr.as_ref() {
            Expr::Value(value) => (value, data_type),
            _ => return Ok(None),
        },
        _ => return Ok(None),
    };
    let Value::SingleQuotedString(text) = &value.value else { return Ok(None) };
    let word = text.trim().to_ascii_lowercase();
    let zone = session.zones.zone;
    let now = zone.map_or(session.now_us, |zone| zone.local(session.now_us));
    let today = now - now.rem_euclid(DAY_US);
    let us = match word.as_str() {
        "now" => now,
        "today" => today,
        "tomorrow" => today + DAY_US,
        "yesterday" => today - DAY_US,
        "infinity" | "-infinity" => 0,
        _ => return Ok(None),
    };
    match sql_type(t)? {
        SqlType::Date | SqlType::Timestamp | SqlType::Timestamptz => {}
        SqlType::Time if word == "now" => {}
        _ => return Ok(None),
    }
    if word.ends_with("infinity") {
        return Err(SqlError::unsupported("infinity of dates and times"));
    }
    if session.for_view {
        return Err(SqlError::unsupported(format!("'{word}' in a materialized view")));
    }
    let moment = match (zone, sql_type(t)?) {
        (None, _) => cast(string(timestamptz_text(us)), SqlType::Timestamptz),
        (Some(_), SqlType::Timestamptz) if word == "now" => {
            cast(string(timestamptz_text(session.now_us)), SqlType::Timestamptz)
        }
        (Some(zone), SqlType::Timestamptz) => {
            cast(string(timestamptz_text(zone.instant(us))), SqlType::Timestamptz)
        }
        // The text is of the local time, and its offset is dropped.
        (Some(_), _) => cast(string(timestamptz_text(us)), SqlType::Timestamp),
    };
    cast_to(moment, t).map(Some)
}

/// The text of an interval literal. With fields, what they make of it is written out.
pub(in crate::bind) fn interval_text(i: &Interval) -> Result<String, SqlError> {
    let text = match i.value.as_ref() {
        Expr::Value(v) => match &v.value {
            Value::SingleQuotedString(s) => s.clone(),
            Value::Number(n, _) => n.clone(),
            _ => return Err(SqlError::unsupported("an interval of an expression")),
        },
        e => match number_text(e) {
            Some(n) => n.to_owned(),
            None => return Err(SqlError::unsupported("an interval of an expression")),
        },
    };
    let Some(first) = &i.leading_field else { return Ok(text) };
    if let Some(span) = span(first, i.last_field.as_ref()) {
        if i.leading_precision.is_some() && *first != DateTimeField::Second {
            return Err(misplaced("("));
        }
        let read = interval_text::interval_of(&text, span)?;
        let mut shown = String::new();
        push_interval_text(&mut shown, read.months, read.days, read.us);
        return Ok(shown);
    }
    if let Some(last) = &i.last_field {
        return Err(misplaced(&last.to_string()));
    }
    // A unit that PostgreSQL has in the text only, such as weeks.
    Ok(match text.trim().parse::<f64>() {
        Ok(_) => format!("{text} {}", first.to_string().to_lowercase()),
        Err(_) => return Err(misplaced(&first.to_string())),
    })
}

fn misplaced(word: &str) -> SqlError {
    SqlError::new(SqlState::SYNTAX_ERROR, format!("syntax error at or near \"{word}\""))
}

/// The fields of an interval, if PostgreSQL has such ones.
fn span(first: &DateTimeField, last: Option<&DateTimeField>) -> Option<Span> {
    let field = |f: &DateTimeField| {
        Some(match f {
            DateTimeField::Year | DateTimeField::Years => Field::Year,
            DateTimeField::Month | DateTimeField::Months => Field::Month,
            DateTimeField::Day | DateTimeField::Days => Field::Day,
            DateTimeField::Hour | DateTimeField::Hours => Field::Hour,
            DateTimeField::Minute | DateTimeField::Minutes => Field::Minute,
            DateTimeField::Second | DateTimeField::Seconds => Field::Second,
            _ => return None,
        })
    };
    let first = field(first)?;
    let Some(last) = last else { return Some((first, first)) };
    let last = field(last)?;
    let good = match first {
        Field::Year => last == Field::Month,
        Field::Month => false,
        first => last > first,
    };
    good.then_some((first, last))
}
