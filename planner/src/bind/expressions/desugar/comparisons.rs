//! Comparisons, of rows among them, which are spelled out column by column.

use millrace_common::{SqlError, SqlState};
use sqlparser::ast::*;

use super::calls::unnamed_arguments;
use super::ops::{Op, binary, call, negate_if, ours, take};
use crate::bind::spans::operator_spans;

/// What a comparison becomes; `None`: it stays as it is.
pub(super) fn rewrite(expr: &mut Expr) -> Result<Option<Expr>, SqlError> {
    Ok(Some(match expr {
        Expr::InSubquery { expr: e, subquery, .. } => {
            check_in_subquery(e, subquery)?;
            return Ok(None);
        }
        Expr::Between { expr: e, negated, low, high } => {
            let e = take(e);
            let lower = binary(e.clone(), BinaryOperator::GtEq, take(low));
            let upper = binary(e, BinaryOperator::LtEq, take(high));
            negate_if(*negated, binary(lower, BinaryOperator::And, upper))
        }
        // A row is not NULL if none of its fields is.
        Expr::IsNull(e) | Expr::IsNotNull(e) if let Some(row) = row_items(e) => {
            let negated = matches!(expr, Expr::IsNotNull(_));
            let one = |field| match negated {
                true => Expr::IsNotNull(Box::new(field)),
                false => Expr::IsNull(Box::new(field)),
            };
            let all = row.into_iter().map(one);
            all.reduce(|a, b| binary(a, BinaryOperator::And, b)).unwrap_or_else(no)
        }
        Expr::IsDistinctFrom(a, b) | Expr::IsNotDistinctFrom(a, b)
            if row_items(a).is_some() && row_items(b).is_some() =>
        {
            let (x, y) = (row_items(a).unwrap_or_default(), row_items(b).unwrap_or_default());
            check_widths(&x, &y)?;
            let differ = x.into_iter().zip(y).map(|(x, y)| ours(Op::Distinct, x, Box::new(y)));
            let any = differ.reduce(|x, y| binary(x, BinaryOperator::Or, y)).unwrap_or_else(no);
            negate_if(matches!(expr, Expr::IsNotDistinctFrom(_, _)), any)
        }
        Expr::IsDistinctFrom(a, b) => ours(Op::Distinct, take(a), Box::new(take(b))),
        Expr::IsNotDistinctFrom(a, b) => ours(Op::NotDistinct, take(a), Box::new(take(b))),
        Expr::InList { expr: e, list, negated } if row_items(e).is_some() => {
            let row = row_items(e).unwrap_or_default();
            let mut any: Option<Expr> = None;
            for item in list.iter() {
                let other = row_items(item).unwrap_or_else(|| vec![item.clone()]);
                let equal = compare_rows(&row, &BinaryOperator::Eq, &other)?;
                any = match (any, equal) {
                    (Some(a), Some(b)) => Some(binary(a, BinaryOperator::Or, b)),
                    (a, b) => a.or(b),
                };
            }
            negate_if(*negated, any.unwrap_or_else(no))
        }
        Expr::InList { expr: e, list, .. } => {
            let left = e.as_ref().clone();
            for item in list.iter_mut() {
                *item = ours(Op::Element, left.clone(), Box::new(take(item)));
            }
            return Ok(None);
        }
        Expr::BinaryOp { left, op, right } => match (row_items(left), row_items(right)) {
            (Some(a), Some(b)) => match compare_rows(&a, &operator_spans::split(op).0, &b)? {
                Some(new) => new,
                None => return Ok(None),
            },
            _ => return Ok(None),
        },
        _ => return Ok(None),
    }))
}

/// Only one value is looked for in the rows of a subquery, which have one column.
fn check_in_subquery(e: &Expr, subquery: &Query) -> Result<(), SqlError> {
    let width = match subquery.body.as_ref() {
        SetExpr::Select(s) => s.projection.len(),
        _ => 1,
    };
    if row_items(e).is_some() {
        return Err(SqlError::unsupported("a row IN a subquery outside of WHERE")
            .with_hint("In WHERE it may stand alone or under AND and OR."));
    }
    if width > 1 {
        let message = "subquery has too many columns";
        return Err(SqlError::new(SqlState::SYNTAX_ERROR, message));
    }
    Ok(())
}

fn no() -> Expr {
    Expr::value(Value::Boolean(false))
}

/// The columns of a row value.
pub(in crate::bind) fn row_items(e: &Expr) -> Option<Vec<Expr>> {
    match e {
        Expr::Tuple(items) if !items.is_empty() => Some(items.clone()),
        Expr::Nested(inner) => row_items(inner),
        Expr::Function(f) if f.name.to_string().eq_ignore_ascii_case("row") => unnamed_arguments(f),
        _ => None,
    }
}

fn check_widths(a: &[Expr], b: &[Expr]) -> Result<(), SqlError> {
    match a.len() == b.len() {
        true => Ok(()),
        false => Err(SqlError::new(
            SqlState::SYNTAX_ERROR,
            "unequal number of entries in row expressions",
        )),
    }
}

/// A comparison of row values, column by column from the left.
fn compare_rows(a: &[Expr], op: &BinaryOperator, b: &[Expr]) -> Result<Option<Expr>, SqlError> {
    use BinaryOperator as B;
    if *op == B::Overlaps {
        let (Ok(a), Ok(b)) = (<[Expr; 2]>::try_from(a.to_vec()), <[Expr; 2]>::try_from(b.to_vec()))
        else {
            let message = "wrong number of parameters on one side of OVERLAPS expression";
            return Err(SqlError::new(SqlState::SYNTAX_ERROR, message));
        };
        return Ok(Some(call("overlaps", a.into_iter().chain(b))));
    }
    let strict = match op {
        B::Eq | B::NotEq => op.clone(),
        B::Lt | B::LtEq => B::Lt,
        B::Gt | B::GtEq => B::Gt,
        _ => return Ok(None),
    };
    check_widths(a, b)?;
    let pairs: Vec<(Expr, Expr)> = a.iter().cloned().zip(b.iter().cloned()).collect();
    let all = |op: B, with: B| {
        let parts = pairs.iter().map(|(a, b)| binary(a.clone(), op.clone(), b.clone()));
        parts.reduce(|x, y| binary(x, with.clone(), y))
    };
    let new = match op {
        B::Eq => all(B::Eq, B::And),
        B::NotEq => all(B::NotEq, B::Or),
        _ => {
            // a1 < b1 OR (a1 = b1 AND (a2 < b2 OR …)); the last column decides about equality.
            let mut rest: Option<Expr> = None;
            for (a, b) in pairs.iter().rev() {
                rest = Some(match rest {
                    None => binary(a.clone(), op.clone(), b.clone()),
                    Some(rest) => {
                        let equal = binary(a.clone(), B::Eq, b.clone());
                        let less = binary(a.clone(), strict.clone(), b.clone());
                        let rest = binary(equal, B::And, Expr::Nested(Box::new(rest)));
                        binary(less, B::Or, Expr::Nested(Box::new(rest)))
                    }
                });
            }
            rest
        }
    };
    Ok(new.map(|e| Expr::Nested(Box::new(e))))
}
