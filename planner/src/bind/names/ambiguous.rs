//! 42702 for names that mean several columns, where DataFusion would take one of them in silence: a column
//! that an item of FROM has twice, a merged column that another item has too, and, within a subquery, a name
//! that several items have and the query around has once.

use std::collections::HashSet;
use std::ops::Range;

use millrace_common::{SqlError, SqlState};
use sqlparser::ast::*;

use super::output_names::fold;
use super::scopes::{Column, Joined, Table};
use crate::bind::expressions::clause_expressions::any_own;
use crate::parser::joins;

/// Whether a SELECT has a subquery in FROM, or several items.
pub fn may_be(select: &Select) -> bool {
    let several = |from: &TableWithJoins| !from.joins.is_empty() || is_derived(&from.relation);
    select.from.len() > 1 || select.from.iter().any(several)
}

fn is_derived(factor: &TableFactor) -> bool {
    matches!(factor, TableFactor::Derived { .. } | TableFactor::NestedJoin { .. })
}

/// Whether an item of FROM is one of these names, as what WITH calls so.
pub fn reads_any(select: &Select, names: &[(String, Option<Vec<String>>)]) -> bool {
    let named = |factor: &TableFactor| match factor {
        TableFactor::Table { name, args: None, .. } => match name.0.as_slice() {
            [part] => part.as_ident().is_some_and(|name| {
                let name = fold(name);
                names.iter().any(|(cte, _)| *cte == name)
            }),
            _ => false,
        },
        _ => false,
    };
    select
        .from
        .iter()
        .any(|from| named(&from.relation) || from.joins.iter().any(|join| named(&join.relation)))
}

/// Refuses a SELECT that names a column by a name that means several of FROM.
pub fn check(select: &Select, from: &Joined) -> Result<(), SqlError> {
    let mut name = first_ambiguous(&select.projection, from)
        .or_else(|| first_ambiguous(&select.selection, from))
        .or_else(|| first_ambiguous(&select.having, from));
    for (on, tables) in conditions(select) {
        name = name.or_else(|| first_ambiguous(on, &among(from, &tables)));
    }
    match name {
        Some(name) => {
            let message = format!("column reference \"{name}\" is ambiguous");
            Err(SqlError::new(SqlState::AMBIGUOUS_COLUMN, message))
        }
        None => Ok(()),
    }
}

/// The first name in a clause that means several columns.
fn first_ambiguous(clause: &impl Visit, from: &Joined) -> Option<String> {
    let mut name = None;
    // Parts of `table.column[1]`, which are no names by themselves.
    let mut parts: HashSet<*const Expr> = HashSet::new();
    any_own(clause, |e: &Expr| {
        if let Expr::CompoundFieldAccess { root, access_chain } = e {
            let dotted = access_chain.iter().filter_map(|access| match access {
                AccessExpr::Dot(part) => Some(std::ptr::from_ref(part)),
                AccessExpr::Subscript(_) => None,
            });
            parts.extend(dotted.chain([std::ptr::from_ref(root.as_ref())]));
        }
        if !parts.contains(&std::ptr::from_ref(e)) {
            name = name.take().or_else(|| ambiguous(e, from));
        }
        name.is_some()
    });
    name
}

/// The conditions of joins, each with the places of the tables that it is about: those of its item of FROM up to it.
/// Joins in parentheses have conditions of their own.
fn conditions(select: &Select) -> Vec<(&Expr, Range<usize>)> {
    let mut conditions = Vec::new();
    let mut end = 0;
    for from in &select.from {
        let start = end;
        end += tables_of(&from.relation);
        for join in &from.joins {
            end += tables_of(&join.relation);
            if let Some(JoinConstraint::On(on)) = joins::constraint(&join.join_operator) {
                conditions.push((on, start..end));
            }
        }
    }
    conditions
}

/// How many tables an item of FROM has: those of a join in parentheses have their own names.
fn tables_of(factor: &TableFactor) -> usize {
    match factor {
        TableFactor::NestedJoin { table_with_joins, alias: None } => {
            let joins = table_with_joins.joins.iter().map(|join| tables_of(&join.relation));
            tables_of(&table_with_joins.relation) + joins.sum::<usize>()
        }
        _ => 1,
    }
}

/// Some of the tables, and what may be of them.
fn among(from: &Joined, tables: &Range<usize>) -> Joined {
    let of_them = |c: &&Column| c.table.is_none_or(|at| tables.contains(&at));
    let moved = |c: &Column| Column { table: c.table.map(|at| at - tables.start), ..c.clone() };
    Joined {
        tables: from.tables.get(tables.clone()).unwrap_or_default().to_vec(),
        columns: from.columns.iter().filter(of_them).map(moved).collect(),
    }
}

/// The name, if an expression is one of several columns.
fn ambiguous(e: &Expr, from: &Joined) -> Option<String> {
    match e {
        Expr::Identifier(name) => {
            let name = fold(name);
            let called = |c: &&Column| c.name == name;
            (from.columns.iter().filter(called).count() > 1).then_some(name)
        }
        Expr::CompoundIdentifier(parts) => match parts.as_slice() {
            [table, name] => repeated(table, name, from),
            _ => None,
        },
        Expr::CompoundFieldAccess { root, access_chain } => {
            match (root.as_ref(), access_chain.as_slice()) {
                (Expr::Identifier(table), [AccessExpr::Dot(Expr::Identifier(name)), ..]) => {
                    repeated(table, name, from)
                }
                (Expr::Identifier(_), [AccessExpr::Subscript(_), ..]) => ambiguous(root, from),
                _ => None,
            }
        }
        _ => None,
    }
}

/// The name of a column, if a table has several of it.
fn repeated(table: &Ident, name: &Ident, from: &Joined) -> Option<String> {
    let (table, name) = (fold(table), fold(name));
    let called = |t: &&Table| t.name.as_ref().is_some_and(|n| fold(n) == table);
    let table = from.tables.iter().find(called)?;
    (table.columns.iter().filter(|c| **c == name).count() > 1).then_some(name)
}
