//! Subscripts: elements and slices of arrays, parts of documents. Which of them is meant, the type of the value tells.

use millrace_common::{SqlError, SqlState};
use sqlparser::ast::*;

use super::ops::{ITEM, Op, SLICE, null, ours, resolved, string, take};

/// What a value with subscripts becomes; `None`: it has none.
pub(super) fn rewrite(
    root: &mut Expr,
    chain: &mut Vec<AccessExpr>,
) -> Result<Option<Expr>, SqlError> {
    let subscript = |a: &AccessExpr| matches!(a, AccessExpr::Subscript(_));
    let Some(first) = chain.iter().position(subscript) else { return Ok(None) };
    if !chain[first..].iter().all(subscript) {
        return Ok(None);
    }
    let Some(value) = subscripted(root, &chain[..first]) else { return Ok(None) };
    let mut subscripts = chain.drain(first..).filter_map(|access| match access {
        AccessExpr::Subscript(subscript) => Some(subscript),
        AccessExpr::Dot(_) => None,
    });
    let mut args = vec![value];
    while let Some(subscript) = subscripts.next() {
        match subscript {
            Subscript::Index { index } => args.push(index),
            Subscript::Slice { lower_bound, upper_bound, stride: None } if args.len() == 1 => {
                if subscripts.next().is_some() {
                    return Err(dimensions());
                }
                args.push(lower_bound.unwrap_or_else(|| number("1")));
                args.push(upper_bound.unwrap_or_else(|| number("2147483647")));
                return Ok(Some(resolved(SLICE, args)));
            }
            Subscript::Slice { stride: None, .. } => return Err(dimensions()),
            Subscript::Slice { stride: Some(_), .. } => {
                let message = "syntax error at or near \":\"";
                return Err(SqlError::new(SqlState::SYNTAX_ERROR, message));
            }
        }
    }
    Ok(Some(resolved(ITEM, args)))
}

/// The value whose subscripts they are: a column's name may have begun the chain.
fn subscripted(root: &mut Expr, names: &[AccessExpr]) -> Option<Expr> {
    if names.is_empty() {
        return Some(take(root));
    }
    let mut parts = match root {
        Expr::Identifier(name) => vec![name.clone()],
        Expr::CompoundIdentifier(parts) => parts.clone(),
        _ => return None,
    };
    for name in names {
        match name {
            AccessExpr::Dot(Expr::Identifier(name)) => parts.push(name.clone()),
            _ => return None,
        }
    }
    Some(Expr::CompoundIdentifier(parts))
}

fn number(text: &str) -> Expr {
    ours(Op::Number, string(text), null())
}

fn dimensions() -> SqlError {
    SqlError::unsupported("slices of arrays of more than one dimension")
}
