//! Where stands what does not fit: lists of other lengths, an operand of another type, an order that is not that of
//! DISTINCT ON.
//!
//! A message says what is wrong but not where. What it means is looked for in the statement as it was parsed, and has a
//! place if there is only one such thing.

use std::ops::ControlFlow;

use millrace_common::SqlError;
use sqlparser::ast::*;
use sqlparser::tokenizer::Location;

use super::misplaced_calls::{first_item, width};
use crate::bind::aggregates::distinct_on;
use crate::bind::ordering::order::unnested;
use crate::bind::windows::frame_bounds;
use crate::parser::walk;

pub fn place(e: &SqlError, sql: &Statement) -> Option<Location> {
    let message = e.message.as_str();
    match sql {
        Statement::Insert(insert) if message.starts_with("INSERT has more expressions ") => {
            surplus(insert)
        }
        Statement::Insert(insert) if message.starts_with("INSERT has more target columns ") => {
            let width = width(&insert.source.as_ref()?.body)?;
            Some(insert.columns.get(width)?.span().start)
        }
        _ if message.starts_with("SELECT DISTINCT ON expressions must match ") => {
            distinct_on::unmatched_in(sql)
        }
        _ if message.starts_with("DISTINCT ON position ") => distinct_on::absent_in(e, sql),
        _ if message.starts_with("argument of ")
            && message.ends_with(" must not contain variables") =>
        {
            frame_bounds::variable_in(sql, message)
        }
        _ if message.starts_with("RANGE with offset PRECEDING/FOLLOWING is not supported ") => {
            frame_bounds::only_offset_in(sql)
        }
        _ if message.ends_with(" query must have the same number of columns") => {
            first_item(only_second_query(sql)?)
        }
        _ if message.ends_with(" cannot be matched") && message.contains(" types ") => {
            let second = only_second_query(sql)?;
            // Of several columns it may be any.
            first_item(second).filter(|_| width(second) == Some(1))
        }
        _ if message.starts_with("argument of NOT ") => only_negated(sql),
        _ => None,
    }
}

/// The first expression of an INSERT's source that has no column.
fn surplus(insert: &Insert) -> Option<Location> {
    let columns = insert.columns.len();
    if columns == 0 {
        return None;
    }
    match insert.source.as_ref()?.body.as_ref() {
        SetExpr::Values(values) => {
            let surplus = values.rows.iter().find_map(|row| row.content.get(columns));
            Some(surplus?.span().start)
        }
        // A `*` before it may stand for more than one.
        SetExpr::Select(select) => match select.projection.as_slice() {
            [only] => Some(only.span().start),
            items => {
                width(&insert.source.as_ref()?.body)?;
                Some(items.get(columns)?.span().start)
            }
        },
        _ => None,
    }
}

/// The right side of a statement's only set operation.
fn only_second_query(sql: &Statement) -> Option<&SetExpr> {
    let body = match sql {
        Statement::Query(query) => &query.body,
        Statement::Insert(insert) => &insert.source.as_ref()?.body,
        _ => return None,
    };
    let SetExpr::SetOperation { left, right, .. } = body.as_ref() else { return None };
    let plain = |side: &SetExpr| matches!(side, SetExpr::Select(_) | SetExpr::Values(_));
    (plain(left) && plain(right) && operations(sql) == 1).then_some(right.as_ref())
}

/// How many queries of a statement are set operations.
fn operations(sql: &Statement) -> usize {
    struct Count(usize);
    impl Visitor for Count {
        type Break = ();

        fn pre_visit_query(&mut self, query: &Query) -> ControlFlow<()> {
            self.0 += usize::from(matches!(query.body.as_ref(), SetExpr::SetOperation { .. }));
            ControlFlow::Continue(())
        }
    }
    let mut count = Count(0);
    let _ = walk::visit(sql, &mut count);
    count.0
}

/// The only operand of a NOT that is not boolean by its form.
fn only_negated(sql: &Statement) -> Option<Location> {
    let mut found = Vec::new();
    let _ = walk::expressions(sql, |e| {
        if let Expr::UnaryOp { op: UnaryOperator::Not, expr } = e
            && !is_boolean(unnested(expr))
        {
            found.push(expr.span().start);
        }
        ControlFlow::<()>::Continue(())
    });
    match found.as_slice() {
        [only] => Some(*only),
        _ => None,
    }
}

fn is_boolean(e: &Expr) -> bool {
    use BinaryOperator as B;
    match e {
        Expr::BinaryOp { op, .. } => {
            matches!(op, B::And | B::Or | B::Eq | B::NotEq | B::Lt | B::LtEq | B::Gt | B::GtEq)
        }
        Expr::UnaryOp { op: UnaryOperator::Not, .. } => true,
        Expr::Value(v) => matches!(v.value, Value::Boolean(_)),
        Expr::IsNull(_)
        | Expr::IsNotNull(_)
        | Expr::IsTrue(_)
        | Expr::IsNotTrue(_)
        | Expr::IsFalse(_)
        | Expr::IsNotFalse(_)
        | Expr::IsDistinctFrom(..)
        | Expr::IsNotDistinctFrom(..)
        | Expr::Exists { .. }
        | Expr::InList { .. }
        | Expr::InSubquery { .. }
        | Expr::Between { .. }
        | Expr::Like { .. }
        | Expr::ILike { .. }
        | Expr::AnyOp { .. }
        | Expr::AllOp { .. } => true,
        _ => false,
    }
}
