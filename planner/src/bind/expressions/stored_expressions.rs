//! Expressions that a definition keeps, to make a value of for each row: defaults and generated columns.
//!
//! They are over one row or none, so sets of rows, aggregates, window functions and subqueries have no place in them.

use std::ops::ControlFlow;

use millrace_common::{SqlError, SqlState};
use sqlparser::ast::{ColumnOption, Expr, Query, Spanned, Visitor};
use sqlparser::tokenizer::Location;

use crate::ast::TableDefinition;
use crate::bind::names::fold;
use crate::bind::relations::table_functions;
use crate::bind::spans::misplaced_calls::{self, Misplaced};
use crate::parser::walk;

/// What an expression is kept for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kept {
    Default,
    Generated,
}

impl Kept {
    /// PostgreSQL's word for one.
    fn noun(self) -> &'static str {
        match self {
            Kept::Default => "DEFAULT expression",
            Kept::Generated => "column generation expression",
        }
    }
}

/// Refuses what has no place in such an expression.
pub fn check(expr: &Expr, kept: Kept) -> Result<(), SqlError> {
    match first(expr, kept) {
        Some(found) => Err(found.error),
        None => Ok(()),
    }
}

/// Where a definition has what an error of this message is about.
pub(in crate::bind) fn place(message: &str, def: &TableDefinition) -> Option<Location> {
    let options = def.columns.iter().flat_map(|column| &column.options);
    let mut found = options.filter_map(|option| match &option.option {
        ColumnOption::Default(e) => first(e, Kept::Default),
        ColumnOption::Generated { generation_expr: Some(e), .. } => first(e, Kept::Generated),
        _ => None,
    });
    found.find(|found| found.error.message == message).map(|found| found.at)
}

fn first(expr: &Expr, kept: Kept) -> Option<Misplaced> {
    walk::visit(expr, &mut First { kept }).break_value().map(|found| *found)
}

struct First {
    kept: Kept,
}

impl Visitor for First {
    type Break = Box<Misplaced>;

    fn pre_visit_query(&mut self, query: &Query) -> ControlFlow<Box<Misplaced>> {
        let message = format!("cannot use subquery in {}", self.kept.noun());
        let error = SqlError::new(SqlState::FEATURE_NOT_SUPPORTED, message);
        ControlFlow::Break(Box::new(Misplaced { error, at: query.span().start }))
    }

    /// After its arguments: what is wrong in them is told first.
    fn post_visit_expr(&mut self, e: &Expr) -> ControlFlow<Box<Misplaced>> {
        let Expr::Function(f) = e else { return ControlFlow::Continue(()) };
        let among = format!("{}s", self.kept.noun());
        if let Some(found) = misplaced_calls::in_clause(f, &among) {
            return ControlFlow::Break(Box::new(found));
        }
        let name = f.name.0.last().and_then(|p| p.as_ident()).map(fold).unwrap_or_default();
        if !table_functions::returns_set(&name) {
            return ControlFlow::Continue(());
        }
        let message = format!("set-returning functions are not allowed in {among}");
        let error = SqlError::new(SqlState::FEATURE_NOT_SUPPORTED, message);
        ControlFlow::Break(Box::new(Misplaced { error, at: misplaced_calls::start(f) }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(text: &str, kept: Kept) -> (String, String) {
        let expr = crate::parser::parse_expr(text).unwrap();
        let e = check(&expr, kept).unwrap_err();
        (e.state.0.to_owned(), e.into_parts().message)
    }

    #[test]
    fn what_is_not_of_one_row_is_named() {
        let rest = "are not allowed in column generation expressions";
        for (text, state, what) in [
            ("a + generate_series(1, a)", "0A000", "set-returning functions"),
            ("unnest(ARRAY[a])", "0A000", "set-returning functions"),
            ("sum(sum(a))", "42803", "aggregate functions"),
            ("generate_series(1, max(a))", "42803", "aggregate functions"),
            ("row_number() OVER ()", "42P20", "window functions"),
        ] {
            let (told, message) = refused(text, Kept::Generated);
            assert_eq!((told.as_str(), message), (state, format!("{what} {rest}")), "{text}");
        }
        for text in ["(SELECT 1)", "a IN (SELECT 1)", "EXISTS (SELECT 1)", "sum((SELECT 1))"] {
            let (state, message) = refused(text, Kept::Default);
            assert_eq!(state, "0A000", "{text}");
            assert_eq!(message, "cannot use subquery in DEFAULT expression", "{text}");
        }
        let fine = crate::parser::parse_expr("coalesce(upper(a), 'x' || now())").unwrap();
        assert!(check(&fine, Kept::Default).is_ok());
    }
}
