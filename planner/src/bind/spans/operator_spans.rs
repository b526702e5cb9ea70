//! Where an operator stands in the text, carried through planning so that an error can say which of several it means.
//!
//! The AST has no places of operators, but of operands: what is noted is where the left one ends, in a custom operator
//! that [`crate::bind::expressions::operators`] takes apart again.

use std::collections::HashMap;
use std::sync::OnceLock;

use datafusion::error::DataFusionError;
use millrace_common::SqlState;
use millrace_functions::error::{external, sql_error_from_datafusion};
use sqlparser::ast::{BinaryOperator, Expr, Spanned};

use crate::bind::rewrites::ast::AstRewrite;

const MARK: &str = "#after:";

/// Line and column, counted from 1.
pub type Place = (u64, u64);

/// The operators that are resolved by the types of their operands, by their symbols.
fn operators() -> &'static HashMap<String, BinaryOperator> {
    use BinaryOperator as B;
    static ALL: OnceLock<HashMap<String, BinaryOperator>> = OnceLock::new();
    ALL.get_or_init(|| {
        let all = [
            B::Plus,
            B::Minus,
            B::Multiply,
            B::Divide,
            B::Modulo,
            B::Eq,
            B::NotEq,
            B::Lt,
            B::LtEq,
            B::Gt,
            B::GtEq,
            B::StringConcat,
            B::Arrow,
            B::LongArrow,
            B::HashArrow,
            B::HashLongArrow,
            B::AtArrow,
            B::ArrowAt,
            B::PGOverlap,
        ];
        all.into_iter().map(|op| (op.to_string(), op)).collect()
    })
}

/// Notes where operators stand.
pub const NOTE_OPERATORS: AstRewrite = AstRewrite {
    name: "note operators",
    expr: |expr, _| {
        if let Expr::BinaryOp { left, op, .. } = expr {
            note(op, left);
        }
        Ok(())
    },
    ..AstRewrite::NONE
};

/// Notes where an operator stands: after its left operand.
fn note(op: &mut BinaryOperator, left: &Expr) {
    let symbol = op.to_string();
    let end = left.span().end;
    if end.line > 0 && operators().contains_key(&symbol) {
        *op = BinaryOperator::Custom(format!("{MARK}{}:{}:{symbol}", end.line, end.column));
    }
}

/// An operator, and after what it stands.
pub fn split(op: &BinaryOperator) -> (BinaryOperator, Option<Place>) {
    let noted = || {
        let BinaryOperator::Custom(text) = op else { return None };
        let (line, rest) = text.strip_prefix(MARK)?.split_once(':')?;
        let (column, symbol) = rest.split_once(':')?;
        let place = (line.parse().ok()?, column.parse().ok()?);
        Some((operators().get(symbol)?.clone(), Some(place)))
    };
    noted().unwrap_or_else(|| (op.clone(), None))
}

/// A message without what is noted in the operators that it shows.
pub fn without_marks(message: &str) -> String {
    let mut shown = String::with_capacity(message.len());
    let mut rest = message;
    while let Some((before, after)) = rest.split_once(MARK) {
        shown.push_str(before);
        // The line and the column.
        rest = after.splitn(3, ':').nth(2).unwrap_or(after);
    }
    shown.push_str(rest);
    shown
}

/// An error about an operator, with the place after which it stands.
pub fn placed(e: DataFusionError, after: Option<Place>) -> DataFusionError {
    let mut e = sql_error_from_datafusion(e);
    if e.state == SqlState::UNDEFINED_FUNCTION && e.message.starts_with("operator ") {
        e.after = e.after.or(after);
    }
    external(e)
}
