//! Statements that sqlparser reads: those that are run, by their parts.

use sqlparser::ast::*;

use super::{Checked, NOWHERE, changes, start, syntax, unsupported};

pub fn check(statement: &Statement) -> Checked {
    match statement {
        // A query, and what is within the others, is looked at by itself.
        Statement::Query(_) => Ok(()),
        Statement::Insert(insert) => changes::insert(insert),
        Statement::Update(update) => changes::update(update),
        Statement::Delete(delete) => changes::delete(delete),
        // Its options are read from its text.
        Statement::Copy {
            source: _,
            to: _,
            target: _,
            options: _,
            legacy_options: _,
            values: _,
        } => Ok(()),
        Statement::Set(set) => setting(set),
        Statement::Reset(ResetStatement {
            reset: Reset::ALL | Reset::ConfigurationParameter(_),
        }) => Ok(()),
        Statement::Discard { object_type: _ } => Ok(()),
        Statement::StartTransaction { .. }
        | Statement::Commit { .. }
        | Statement::Rollback { .. }
        | Statement::Savepoint { name: _ }
        | Statement::ReleaseSavepoint { name: _ } => transaction(statement),
        Statement::Declare { .. } | Statement::Fetch { .. } | Statement::Close { cursor: _ } => {
            cursor(statement)
        }
        Statement::Prepare { .. } | Statement::Execute { .. } | Statement::Deallocate { .. } => {
            prepared(statement)
        }
        // Statistics and space are looked after without being asked.
        Statement::Analyze(_) | Statement::Vacuum(_) | Statement::UNLISTEN { channel: _ } => Ok(()),
        // Everything else is refused by name where it is run.
        _ => Ok(()),
    }
}

fn setting(set: &Set) -> Checked {
    match set {
        Set::SingleAssignment { scope, hivevar, variable, values: _ } => {
            let at = variable.span().start;
            syntax(matches!(scope, Some(ContextModifier::Global)), "GLOBAL", at)?;
            syntax(*hivevar, "HIVEVAR", at)
        }
        Set::SetTimeZone { local: _, value: _ } => Ok(()),
        Set::SetNames { charset_name, collation_name } => {
            syntax(collation_name.is_some(), "COLLATE", charset_name.span.end)
        }
        Set::SetNamesDefault {} => Ok(()),
        Set::SetTransaction { modes: _, snapshot, session: _ } => {
            unsupported(snapshot.is_some(), "SET TRANSACTION SNAPSHOT", NOWHERE)
        }
        // Only to oneself, wherever it holds.
        Set::SetRole { context_modifier: _, role_name: _ } => Ok(()),
        Set::SetSessionAuthorization(SetSessionAuthorizationParam { scope: _, kind: _ }) => Ok(()),
        // Refused by name where it is run.
        Set::ParenthesizedAssignments { .. }
        | Set::MultipleAssignments { .. }
        | Set::SetSessionParam(_) => Ok(()),
    }
}

fn transaction(statement: &Statement) -> Checked {
    match statement {
        Statement::StartTransaction {
            modes: _,
            begin: _,
            // TRANSACTION and WORK mean nothing.
            transaction: _,
            modifier,
            statements,
            exception,
            has_end_keyword,
        } => {
            syntax(modifier.is_some(), "BEGIN", NOWHERE)?;
            syntax(!statements.is_empty() || exception.is_some(), "BEGIN", NOWHERE)?;
            syntax(*has_end_keyword, "END", NOWHERE)
        }
        Statement::Commit { chain: _, end: _, modifier } => {
            syntax(modifier.is_some(), "COMMIT", NOWHERE)
        }
        Statement::Rollback { chain, savepoint } => {
            let at = savepoint.as_ref().map_or(NOWHERE, |name| name.span.start);
            syntax(*chain && savepoint.is_some(), "AND", at)
        }
        _ => Ok(()),
    }
}

fn cursor(statement: &Statement) -> Checked {
    match statement {
        Statement::Declare { stmts } => stmts.iter().try_for_each(|declare| {
            let Declare {
                names,
                data_type,
                assignment,
                declare_type,
                binary: _,
                // No cursor sees changes made after it was opened.
                sensitive: _,
                scroll: _,
                hold: _,
                for_query: _,
            } = declare;
            let at = names.first().map_or(NOWHERE, |name| name.span.start);
            let cursor = matches!(declare_type, None | Some(DeclareType::Cursor));
            let plain = cursor && data_type.is_none() && assignment.is_none() && names.len() == 1;
            unsupported(!plain, "this form of DECLARE", at)
        }),
        Statement::Fetch { name, direction: _, position: _, into } => {
            syntax(into.is_some(), "INTO", name.span.end)
        }
        _ => Ok(()),
    }
}

fn prepared(statement: &Statement) -> Checked {
    match statement {
        Statement::Prepare { name: _, data_types: _, statement: _ } => Ok(()),
        Statement::Execute {
            name: _,
            parameters,
            has_parentheses: _,
            immediate,
            into,
            using,
            output,
            default,
        } => {
            let at = start(parameters);
            syntax(*immediate, "IMMEDIATE", at)?;
            syntax(!into.is_empty(), "INTO", at)?;
            syntax(!using.is_empty(), "USING", start(using.iter().map(|u| &u.expr)))?;
            syntax(*output, "OUTPUT", at)?;
            syntax(*default, "DEFAULT", at)
        }
        Statement::Deallocate { name: _, prepare: _ } => Ok(()),
        _ => Ok(()),
    }
}
