//! Whatever the parser accepts is used or refused.
//!
//! sqlparser reads clauses of many systems, and what nobody looks at would be dropped in silence: an UPDATE with a LIMIT
//! would change every row. So each struct that a statement is made of is taken apart here once, right after parsing, field
//! by field and without `..`: a field that is `_` is used further on, or changes no result, and every other one is refused.
//! A field that a later sqlparser adds does not compile until it is decided which of these it is.

mod changes;
mod definitions;
mod expressions;
mod functions;
mod queries;
mod statements;
mod tables;

use std::ops::ControlFlow;

use millrace_common::{SqlError, SqlState};
use sqlparser::ast::*;
use sqlparser::tokenizer::Location;

use super::Source;
use crate::ast::{self, ExplainTarget};
use crate::parser::walk;

/// A clause that is not taken.
pub struct Refused {
    error: SqlError,
    /// Where what follows the clause's first word stands; line 0: not known.
    at: Location,
    /// The clause's first word, of what PostgreSQL's grammar does not have.
    word: Option<&'static str>,
}

impl Refused {
    /// The error with its place.
    pub fn placed(self, source: &Source<'_>) -> SqlError {
        let Refused { error, at, word } = self;
        if at.line == 0 {
            return error;
        }
        let before = source.sql.get(..source.byte(at)).unwrap_or_default();
        let begins = word.and_then(|word| {
            let from = before.len().checked_sub(word.len())?;
            let is = |at: &usize| {
                before.get(*at..at + word.len()).is_some_and(|w| w.eq_ignore_ascii_case(word))
            };
            (0..=from).rev().find(is)
        });
        let position = match begins {
            Some(byte) => before.get(..byte).unwrap_or_default().chars().count(),
            None => source.chars_before(at),
        };
        error.with_position(position as u32 + 1)
    }
}

type Checked = Result<(), Box<Refused>>;

const NOWHERE: Location = Location { line: 0, column: 0 };

/// What PostgreSQL's grammar does not have either.
fn syntax(present: bool, word: &'static str, at: Location) -> Checked {
    if !present {
        return Ok(());
    }
    let message = format!("syntax error at or near \"{word}\"");
    let error = SqlError::new(SqlState::SYNTAX_ERROR, message);
    Err(Box::new(Refused { error, at, word: Some(word) }))
}

/// What is not built.
fn unsupported(present: bool, feature: &str, at: Location) -> Checked {
    match present {
        true => Err(Box::new(Refused { error: SqlError::unsupported(feature), at, word: None })),
        false => Ok(()),
    }
}

/// Where an expression begins, if there is one.
fn start<'a>(e: impl IntoIterator<Item = &'a Expr>) -> Location {
    e.into_iter().next().map_or(NOWHERE, |e| e.span().start)
}

/// Checks all clauses of a statement.
pub fn check(statement: &ast::Statement) -> Checked {
    match statement {
        ast::Statement::Sql(sql) => visit(sql.as_ref()),
        ast::Statement::CreateTable(table) | ast::Statement::CreateSource(table) => {
            definitions::table(table)
        }
        ast::Statement::CreateView(view) => visit(&view.query.query),
        ast::Statement::CreateIndex(index) => {
            index.columns.iter().try_for_each(|(e, _, _)| visit(e))
        }
        ast::Statement::CreateSink(sink) => visit(&sink.query.query),
        ast::Statement::Subscribe(subscribe) => visit(&subscribe.query.query),
        ast::Statement::Explain(explain) => match &explain.target {
            ExplainTarget::Statement(statement) => check(statement),
            ExplainTarget::Job(_) => Ok(()),
        },
        // Of names, numbers and options.
        ast::Statement::CreateSubscription(_)
        | ast::Statement::DeclareSubscriptionCursor(_)
        | ast::Statement::FetchWait { .. }
        | ast::Statement::Move { .. }
        | ast::Statement::CreateSchema { .. }
        | ast::Statement::Drop(_)
        | ast::Statement::AlterRelation { .. }
        | ast::Statement::User(_)
        | ast::Statement::AlterSystem { .. }
        | ast::Statement::Truncate { .. }
        | ast::Statement::Show(_)
        | ast::Statement::Describe { .. }
        | ast::Statement::Flush
        | ast::Statement::Wait
        | ast::Statement::CancelJobs(_) => Ok(()),
    }
}

fn visit<T: Visit>(node: &T) -> Checked {
    match walk::visit(node, &mut Clauses) {
        ControlFlow::Break(refused) => Err(refused),
        ControlFlow::Continue(()) => Ok(()),
    }
}

/// Looks at every node of a tree; what has no hook of its own is looked at by the one that holds it.
struct Clauses;

type Flow = ControlFlow<Box<Refused>>;

fn flow(checked: Checked) -> Flow {
    match checked {
        Ok(()) => ControlFlow::Continue(()),
        Err(refused) => ControlFlow::Break(refused),
    }
}

impl Visitor for Clauses {
    type Break = Box<Refused>;

    fn pre_visit_statement(&mut self, statement: &Statement) -> Flow {
        flow(statements::check(statement))
    }

    fn pre_visit_query(&mut self, query: &Query) -> Flow {
        flow(queries::query(query))
    }

    fn pre_visit_select(&mut self, select: &Select) -> Flow {
        flow(queries::select(select))
    }

    fn pre_visit_table_factor(&mut self, factor: &TableFactor) -> Flow {
        flow(tables::factor(factor))
    }

    fn pre_visit_expr(&mut self, e: &Expr) -> Flow {
        flow(expressions::check(e))
    }
}

#[cfg(test)]
mod tests;
