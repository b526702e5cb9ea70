//! INSERT, UPDATE and DELETE.

use millrace_common::{SqlError, SqlState};
use sqlparser::ast::*;
use sqlparser::tokenizer::Location;

use super::{Checked, NOWHERE, Refused, queries, start, syntax, tables, unsupported};

pub fn insert(insert: &Insert) -> Checked {
    let Insert {
        insert_token,
        optimizer_hints: _,
        or,
        ignore,
        into,
        table,
        table_alias,
        columns: _,
        overwrite,
        source: _,
        assignments,
        partitioned,
        after_columns,
        has_table_keyword,
        on,
        returning,
        output,
        replace_into,
        priority,
        insert_alias,
        settings,
        format_clause,
        multi_table_insert_type,
        multi_table_into_clauses,
        multi_table_when_clauses,
        multi_table_else_clause,
    } = insert;
    let at = insert_token.0.span.end;
    match table {
        // Anything but a table is refused by name.
        TableObject::TableName(_) | TableObject::TableFunction(_) | TableObject::TableQuery(_) => {}
    }
    if let Some(TableAliasWithoutColumns { explicit: _, alias: _ }) = table_alias {}
    syntax(or.is_some(), "OR", at)?;
    syntax(*ignore, "IGNORE", at)?;
    syntax(!*into, "INSERT", at)?;
    syntax(*overwrite, "OVERWRITE", at)?;
    syntax(!assignments.is_empty(), "SET", start(assignments.first().map(|a| &a.value)))?;
    syntax(partitioned.is_some(), "PARTITION", start(partitioned.iter().flatten()))?;
    syntax(!after_columns.is_empty(), "(", after_columns.first().map_or(at, |c| c.span.start))?;
    syntax(*has_table_keyword, "TABLE", at)?;
    output_clause(output.as_ref())?;
    syntax(*replace_into, "REPLACE", at)?;
    syntax(priority.is_some(), "INSERT", at)?;
    syntax(insert_alias.is_some(), "AS", at)?;
    syntax(settings.is_some(), "SETTINGS", at)?;
    syntax(format_clause.is_some(), "FORMAT", at)?;
    let several = multi_table_insert_type.is_some()
        || !multi_table_into_clauses.is_empty()
        || !multi_table_when_clauses.is_empty()
        || multi_table_else_clause.is_some();
    unsupported(several, "INSERT into several tables", at)?;
    on.as_ref().map_or(Ok(()), on_insert)?;
    queries::items(returning.as_deref().unwrap_or_default())
}

fn on_insert(on: &OnInsert) -> Checked {
    match on {
        // Refused where it is run, which knows what to say instead.
        OnInsert::DuplicateKeyUpdate(_) => Ok(()),
        OnInsert::OnConflict(OnConflict { conflict_target, action }) => {
            match conflict_target {
                None | Some(ConflictTarget::Columns(_) | ConflictTarget::OnConstraint(_)) => {}
            }
            match action {
                OnConflictAction::DoNothing => Ok(()),
                OnConflictAction::DoUpdate(DoUpdate { assignments, selection: _ }) => {
                    set(assignments)
                }
            }
        }
        _ => syntax(true, "ON", NOWHERE),
    }
}

pub fn update(update: &Update) -> Checked {
    let Update {
        update_token,
        optimizer_hints: _,
        table,
        assignments,
        from,
        selection: _,
        returning,
        output,
        or,
        order_by,
        limit,
    } = update;
    tables::changed(table)?;
    set(assignments)?;
    match from {
        None => {}
        Some(UpdateTableFromKind::AfterSet(from)) => from.iter().try_for_each(tables::joined)?,
        Some(UpdateTableFromKind::BeforeSet(from)) => {
            syntax(true, "FROM", from.first().map_or(NOWHERE, |t| t.relation.span().start))?
        }
    }
    syntax(or.is_some(), "OR", update_token.0.span.end)?;
    output_clause(output.as_ref())?;
    chosen(order_by, limit.as_ref(), "updated")?;
    queries::items(returning.as_deref().unwrap_or_default())
}

/// Of the rows that the condition finds, all are changed: there is no order and no limit, as in PostgreSQL.
fn chosen(order_by: &[OrderByExpr], limit: Option<&Expr>, done: &str) -> Checked {
    let hint = format!(
        "All rows that the condition finds are {done}; choose some by their key: WHERE key IN (SELECT key FROM … ORDER BY … LIMIT …)."
    );
    let refuse = |word: &'static str, at: Location| {
        let message = format!("syntax error at or near \"{word}\"");
        let error = SqlError::new(SqlState::SYNTAX_ERROR, message).with_hint(hint.as_str());
        Err(Box::new(Refused { error, at, word: Some(word) }))
    };
    match (order_by.first(), limit) {
        (Some(by), _) => refuse("ORDER", by.expr.span().start),
        (None, Some(limit)) => refuse("LIMIT", limit.span().start),
        (None, None) => Ok(()),
    }
}

fn set(assignments: &[Assignment]) -> Checked {
    for assignment in assignments {
        let Assignment { target, value: _ } = assignment;
        match target {
            AssignmentTarget::ColumnName(_) | AssignmentTarget::Tuple(_) => {}
        }
    }
    Ok(())
}

pub fn delete(delete: &Delete) -> Checked {
    let Delete {
        delete_token,
        optimizer_hints: _,
        tables: named,
        from,
        using,
        selection: _,
        returning,
        output,
        order_by,
        limit,
    } = delete;
    let at = delete_token.0.span.end;
    syntax(!named.is_empty(), "DELETE", at)?;
    match from {
        FromTable::WithFromKeyword(tables) => tables.iter().try_for_each(tables::changed)?,
        FromTable::WithoutKeyword(_) => syntax(true, "DELETE", at)?,
    }
    using.iter().flatten().try_for_each(tables::joined)?;
    output_clause(output.as_ref())?;
    chosen(order_by, limit.as_ref(), "deleted")?;
    queries::items(returning.as_deref().unwrap_or_default())
}

fn output_clause(output: Option<&OutputClause>) -> Checked {
    match output {
        None => Ok(()),
        Some(OutputClause::Output { output_token, .. }) => {
            syntax(true, "OUTPUT", output_token.0.span.end)
        }
        Some(OutputClause::Returning { returning_token, .. }) => {
            syntax(true, "RETURNING", returning_token.0.span.end)
        }
    }
}
