//! LIKE, SIMILAR TO, and comparisons with ANY or ALL of an array.

use millrace_common::SqlError;
use sqlparser::ast::*;

use super::ops::{ANY, array_elements, binary, call, negate_if, resolved, string, take};
use crate::bind::subqueries::predicates::opposite;

/// What such a predicate becomes; `None`: it stays as it is.
pub(super) fn rewrite(expr: &mut Expr) -> Result<Option<Expr>, SqlError> {
    Ok(Some(match expr {
        Expr::SimilarTo { negated, expr: e, pattern, escape_char } => {
            let args = [take(e), take(pattern)].into_iter();
            let escape = escape_char.take().map(Expr::Value);
            negate_if(*negated, call("similar_to", args.chain(escape)))
        }
        Expr::AnyOp { left, compare_op, right, .. }
            if !matches!(&**right, Expr::Subquery(_)) && opposite(compare_op).is_some() =>
        {
            resolved(ANY, [take(left), take(right), string(compare_op.to_string())])
        }
        // Not all of them: the opposite holds for one.
        Expr::AllOp { left, compare_op, right }
            if !matches!(&**right, Expr::Subquery(_))
                && let Some(op) = opposite(compare_op) =>
        {
            negate_if(true, resolved(ANY, [take(left), take(right), string(op.to_string())]))
        }
        Expr::Like { negated, any, expr: e, pattern, escape_char: None }
            if let Some((each, patterns)) = quantified(*any, pattern) =>
        {
            quantified_like(take(e), each, patterns, *negated, false)?
        }
        Expr::ILike { negated, any, expr: e, pattern, escape_char: None }
            if let Some((each, patterns)) = quantified(*any, pattern) =>
        {
            quantified_like(take(e), each, patterns, *negated, true)?
        }
        Expr::AnyOp { left, compare_op, right, .. }
            if let Some((not, any_case)) = like_operator(compare_op) =>
        {
            quantified_like(take(left), false, take(right), not, any_case)?
        }
        Expr::AllOp { left, compare_op, right }
            if let Some((not, any_case)) = like_operator(compare_op) =>
        {
            quantified_like(take(left), true, take(right), not, any_case)?
        }
        Expr::Like { negated, any: false, expr: e, pattern, escape_char: Some(c) } => {
            let args = [take(e), take(pattern), Expr::Value(c.clone())];
            negate_if(*negated, call("like_escape", args))
        }
        Expr::ILike { negated, any: false, expr: e, pattern, escape_char: Some(c) } => {
            let args = [take(e), take(pattern), Expr::Value(c.clone())];
            negate_if(*negated, call("ilike_escape", args))
        }
        _ => return Ok(None),
    }))
}

/// The operand of a LIKE that is spelled out pattern by pattern, and the number of patterns.
pub(super) fn compared(expr: &Expr) -> Option<(&Expr, usize)> {
    let (operand, patterns) = match expr {
        Expr::Like { any, expr, pattern, escape_char: None, .. }
        | Expr::ILike { any, expr, pattern, escape_char: None, .. } => {
            (expr, quantified(*any, pattern)?.1)
        }
        Expr::AnyOp { left, compare_op, right, .. } | Expr::AllOp { left, compare_op, right } => {
            like_operator(compare_op)?;
            (left, right.as_ref().clone())
        }
        _ => return None,
    };
    let patterns = match patterns {
        Expr::Nested(inner) => *inner,
        other => other,
    };
    Some((operand.as_ref(), array_elements(&patterns)?.len()))
}

/// What LIKE ANY or LIKE ALL compares with, and whether it is ALL. The parser takes ALL and SOME for calls.
fn quantified(any: bool, pattern: &Expr) -> Option<(bool, Expr)> {
    if any {
        return Some((false, pattern.clone()));
    }
    let Expr::Function(f) = pattern else { return None };
    let each = match f.name.to_string().to_ascii_lowercase().as_str() {
        "all" => true,
        "some" => false,
        _ => return None,
    };
    match &f.args {
        FunctionArguments::Subquery(q) => Some((each, Expr::Subquery(q.clone()))),
        FunctionArguments::List(list) => match list.args.as_slice() {
            [FunctionArg::Unnamed(FunctionArgExpr::Expr(e))] => Some((each, e.clone())),
            _ => None,
        },
        FunctionArguments::None => None,
    }
}

/// Whether LIKE's operator negates, and whether it ignores case.
fn like_operator(op: &BinaryOperator) -> Option<(bool, bool)> {
    Some(match op {
        BinaryOperator::PGLikeMatch => (false, false),
        BinaryOperator::PGILikeMatch => (false, true),
        BinaryOperator::PGNotLikeMatch => (true, false),
        BinaryOperator::PGNotILikeMatch => (true, true),
        _ => return None,
    })
}

/// `e [NOT] [I]LIKE ANY | ALL (patterns)`: of an array that is spelled out, pattern by pattern.
fn quantified_like(
    e: Expr,
    each: bool,
    patterns: Expr,
    negated: bool,
    any_case: bool,
) -> Result<Expr, SqlError> {
    let patterns = match patterns {
        Expr::Nested(inner) => *inner,
        other => other,
    };
    if let Some(elements) = array_elements(&patterns) {
        let parts = elements.into_iter().map(|p| {
            let (expr, pattern) = (Box::new(e.clone()), Box::new(p));
            match any_case {
                true => Expr::ILike { negated, any: false, expr, pattern, escape_char: None },
                false => Expr::Like { negated, any: false, expr, pattern, escape_char: None },
            }
        });
        let with = if each { BinaryOperator::And } else { BinaryOperator::Or };
        let all = parts.reduce(|a, b| binary(a, with.clone(), b));
        let none = Expr::value(Value::Boolean(each));
        return Ok(Expr::Nested(Box::new(all.unwrap_or(none))));
    }
    match patterns {
        Expr::Subquery(_) => Err(SqlError::unsupported("LIKE ANY or ALL of a subquery")
            .with_hint("Use EXISTS with a condition, or an array.")),
        patterns => {
            // Not like any of them: like all of them, negated.
            let name = match (each != negated, any_case) {
                (false, false) => "like_any",
                (false, true) => "ilike_any",
                (true, false) => "like_all",
                (true, true) => "ilike_all",
            };
            Ok(negate_if(negated, call(name, [e, patterns])))
        }
    }
}
