//! What spelling out copies. `BETWEEN`, `IN (…)`, `CASE x WHEN` and their like compare one operand several
//! times, so each has copies of it; within one another they double at every level. A statement may have
//! copies up to a limit, so that a short text cannot become an expression that fills the memory.

use std::ops::ControlFlow;

use millrace_common::{SqlError, SqlState};
use sqlparser::ast::*;

/// Copied nodes of expressions that one statement may have.
const LIMIT: usize = 1 << 19;

/// Counts what a rewrite of `expr` is about to copy, on top of `before`.
pub(super) fn count(expr: &Expr, before: usize) -> Result<usize, SqlError> {
    let copied = match expr {
        Expr::Between { expr, .. } => size(expr.as_ref()),
        Expr::InList { expr, list, .. } => list.len().saturating_mul(size(expr.as_ref())),
        Expr::Case { operand: Some(operand), conditions, .. } => {
            conditions.len().saturating_mul(size(operand.as_ref()))
        }
        Expr::Like { any: true, expr, pattern, .. }
        | Expr::ILike { any: true, expr, pattern, .. }
        | Expr::AnyOp { left: expr, right: pattern, .. }
        | Expr::AllOp { left: expr, right: pattern, .. } => {
            size(expr.as_ref()).saturating_mul(size(pattern.as_ref()))
        }
        Expr::IsDistinctFrom(a, b) | Expr::IsNotDistinctFrom(a, b) => rows(a, b),
        Expr::BinaryOp { left, right, .. } => rows(left, right),
        _ => 0,
    };
    let all = before.saturating_add(copied);
    if all > LIMIT {
        let message = "statement is too complex: what its conditions compare is too large";
        return Err(SqlError::new(SqlState::STATEMENT_TOO_COMPLEX, message).with_hint(
            "BETWEEN, IN and CASE that compare the results of each other grow with every level. Compute the inner ones in a subquery.",
        ));
    }
    Ok(all)
}

/// Rows are compared column by column, each column twice where they are ordered.
fn rows(a: &Expr, b: &Expr) -> usize {
    match super::row_items(a).is_some() && super::row_items(b).is_some() {
        true => size(a).saturating_add(size(b)),
        false => 0,
    }
}

/// Expressions in an expression, itself among them; those of subqueries too. No more than are of interest.
fn size(expr: &Expr) -> usize {
    struct Count(usize);
    impl Visitor for Count {
        type Break = ();

        fn pre_visit_expr(&mut self, _: &Expr) -> ControlFlow<()> {
            self.0 += 1;
            match self.0 > LIMIT {
                true => ControlFlow::Break(()),
                false => ControlFlow::Continue(()),
            }
        }
    }
    let mut count = Count(0);
    let _ = expr.visit(&mut count);
    count.0
}
