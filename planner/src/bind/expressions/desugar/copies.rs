//! What spelling out copies. `BETWEEN`, `IN (…)`, `CASE x WHEN` and their like compare one operand several
//! times, so each has copies of it; so have subqueries in a SELECT list, named windows, positions and
//! FILTER. Within one another they double at every level. A statement may have copies up to a limit, so that
//! a short text cannot become an expression that fills the memory.

use std::ops::ControlFlow;

use crate::parser::walk;
use millrace_common::{SqlError, SqlState};
use sqlparser::ast::*;

/// Copied nodes of expressions that one statement may have.
const LIMIT: usize = 1 << 19;

/// Expressions that each one of a statement may become where nothing is within anything: those of VALUES with rows of
/// several kinds.
const SPELLED: usize = 16;

/// What a statement has copied so far.
#[derive(Debug, Default)]
pub struct Copies {
    copied: usize,
    /// Expressions met, those of copies too, and how many the statement had as it was written.
    met: usize,
    written: usize,
}

impl Copies {
    /// Of a statement that nothing has been copied in.
    pub fn of<T: Visit>(node: &T) -> Copies {
        Copies { written: size_up_to(node, usize::MAX), ..Copies::default() }
    }

    /// Counts an expression on the way from the outermost inwards: what is copied there stands within
    /// copies, which double at every level, and is met.
    pub fn meet(&mut self) -> Result<(), SqlError> {
        self.met += 1;
        check(self.met.saturating_sub(self.written.saturating_mul(SPELLED)))
    }

    /// Counts further copies of a node that there are about to be.
    pub fn again<T: Visit>(&mut self, node: &T, times: usize) -> Result<(), SqlError> {
        match times {
            0 => Ok(()),
            _ => self.add(times.saturating_mul(size(node))),
        }
    }

    /// Counts what the rewrite of an expression, after its parts, is about to copy.
    pub fn within(&mut self, expr: &Expr) -> Result<(), SqlError> {
        self.add(repeated(expr))
    }

    fn add(&mut self, nodes: usize) -> Result<(), SqlError> {
        self.copied = self.copied.saturating_add(nodes);
        check(self.copied)
    }
}

fn check(copied: usize) -> Result<(), SqlError> {
    if copied <= LIMIT {
        return Ok(());
    }
    let message = "statement is too complex: what its conditions compare is too large";
    Err(SqlError::new(SqlState::STATEMENT_TOO_COMPLEX, message).with_hint(
        "BETWEEN, IN and CASE that compare the results of each other, and positions and windows that stand for long expressions, grow with every level. Compute the inner ones in a subquery.",
    ))
}

fn repeated(expr: &Expr) -> usize {
    match expr {
        Expr::Between { expr, .. } => size(expr.as_ref()),
        Expr::InList { expr, list, .. } => list.len().saturating_mul(size(expr.as_ref())),
        Expr::Case { operand: Some(operand), conditions, .. } => {
            conditions.len().saturating_mul(size(operand.as_ref()))
        }
        Expr::Like { .. } | Expr::ILike { .. } | Expr::AnyOp { .. } | Expr::AllOp { .. } => {
            match super::patterns::compared(expr) {
                Some((operand, patterns)) => patterns.saturating_mul(size(operand)),
                None => 0,
            }
        }
        Expr::IsDistinctFrom(a, b) | Expr::IsNotDistinctFrom(a, b) => rows(a, b),
        Expr::BinaryOp { left, right, .. } => rows(left, right),
        // Distinct values are ordered by themselves.
        Expr::Function(f) => match &f.args {
            FunctionArguments::List(list) if list.duplicate_treatment.is_some() => {
                list.args.first().map_or(0, size)
            }
            _ => 0,
        },
        _ => 0,
    }
}

/// Rows are compared column by column, each column twice where they are ordered.
fn rows(a: &Expr, b: &Expr) -> usize {
    match super::row_items(a).is_some() && super::row_items(b).is_some() {
        true => size(a).saturating_add(size(b)),
        false => 0,
    }
}

/// Expressions in an expression, itself among them; those of subqueries too. No more than are of interest.
pub fn size<T: Visit>(node: &T) -> usize {
    size_up_to(node, LIMIT)
}

fn size_up_to<T: Visit>(node: &T, most: usize) -> usize {
    struct Count {
        found: usize,
        most: usize,
    }
    impl Visitor for Count {
        type Break = ();

        fn pre_visit_expr(&mut self, _: &Expr) -> ControlFlow<()> {
            self.found += 1;
            match self.found > self.most {
                true => ControlFlow::Break(()),
                false => ControlFlow::Continue(()),
            }
        }
    }
    let mut count = Count { found: 0, most };
    let _ = walk::visit(node, &mut count);
    count.found
}
