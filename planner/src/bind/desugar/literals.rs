//! Values as they are written: numbers and their signs, strings, casts, intervals, arrays.

use millrace_common::{SqlError, SqlType};
use sqlparser::ast::*;

use super::ops::{Op, binary, call, cast, null, number_text, ours, string, take};
use crate::bind::table_functions::reads_columns;
use crate::bind::types::sql_type;

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
        Expr::UnaryOp { op: UnaryOperator::Plus, expr: e } => take(e),
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
        Expr::UnaryOp { op: UnaryOperator::PGAbs, expr: e } => call("abs", [take(e)]),
        Expr::UnaryOp { op: UnaryOperator::BitwiseNot, expr: e } => {
            let ones = ours(Op::Number, string("-1"), null());
            Expr::Nested(Box::new(binary(take(e), BinaryOperator::PGBitwiseXor, ones)))
        }
        Expr::Array(array) if array.elem.iter().any(|e| matches!(e, Expr::Array(_))) => {
            return Err(SqlError::unsupported("an array of more than one dimension"));
        }
        // An array as such is planned without sight of outer queries.
        Expr::Array(array) if array.elem.iter().any(reads_columns) => {
            call("make_array", std::mem::take(&mut array.elem))
        }
        _ => return Ok(None),
    }))
}

fn digits_of(n: u64) -> Expr {
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

/// The text of an interval literal, its unit after the number.
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
    Ok(match (&i.leading_field, text.trim().parse::<f64>()) {
        (Some(unit), Ok(_)) => format!("{text} {}", unit.to_string().to_lowercase()),
        _ => text,
    })
}
