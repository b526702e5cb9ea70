//! INSERT: rows from VALUES or a query, defaults, ON CONFLICT, RETURNING.
//!
//! VALUES of plain literals, which is what clients send in bulk, are read straight into columns by
//! the text input functions; everything else is planned as a query.

use std::sync::Arc;

use arrow::array::{Array, ArrayRef, BooleanArray, Int64Array, RecordBatch, UInt32Array};
use arrow::compute::cast;
use arrow::datatypes::DataType;
use futures::StreamExt;
use millrace_common::{DeltaChunk, RelationId, SqlError, SqlState, SqlType};
use millrace_executor::dml::{InsertConflict, LoadKind};
use millrace_rpc::catalog::{OnConflict as TableConflict, Relation};
use sqlparser::ast::{
    AssignmentTarget, ConflictTarget, DoUpdate, Expr, Ident, Insert, OnConflict, OnConflictAction,
    OnInsert, Query, SetExpr, TableObject,
};

use super::rewrite::{self, is_default, literal, literal_fits, type_unknown};
use super::{
    Done, Evaluated, MAX_ATTEMPTS, apply, check_table, returning, rows, too_many_conflicts,
};
use crate::cluster::DmlKind;
use crate::ddl::generated;
use crate::dml::assign::assign;
use crate::encoding::ColumnBuilder;
use crate::query::catalog_view::{SessionCatalog, fold};
use crate::session::Session;

/// What to do with a row whose key exists.
enum Conflict<'a> {
    /// As the table was declared: error, overwrite or ignore.
    Declared,
    Nothing,
    Update(&'a DoUpdate),
}

pub fn table_of(view: &SessionCatalog, insert: &Insert) -> Result<Arc<Relation>, SqlError> {
    let TableObject::TableName(name) = &insert.table else {
        return Err(SqlError::unsupported("INSERT into something else than a table"));
    };
    let table = view.resolve(name)?;
    check_table(&table, "insert into")?;
    Ok(table)
}

pub async fn execute(session: &Session, insert: &Insert) -> Result<Done, SqlError> {
    let view = session.catalog_view();
    let table = table_of(&view, insert)?;
    let targets = target_columns(
        &table,
        &insert.columns.iter().map(last_ident).collect::<Result<Vec<_>, _>>()?,
    )?;
    let conflict = conflict_of(&table, insert)?;
    let alias = insert.table_alias.as_ref().map_or_else(|| table.name.clone(), |a| fold(&a.alias));
    if let Some(query) = streamed(session, &table, insert, &conflict) {
        return load_query(session, &view, &table, &targets, query, !insert.columns.is_empty())
            .await;
    }
    for _ in 0..MAX_ATTEMPTS {
        let named = !insert.columns.is_empty();
        let rows = full_rows(session, &table, insert.source.as_deref(), &targets, named).await?;
        let evaluated = resolve_conflicts(session, &table, &alias, rows, &conflict).await?;
        // Before anything is applied: a RETURNING that fails leaves nothing behind.
        let items = insert.returning.as_deref();
        let returning = returning(session, &table, &alias, items, evaluated.output.clone()).await?;
        let applied = match apply(session, &table, &evaluated).await {
            // The key was inserted after the statement looked: look again.
            Err(e)
                if e.state == SqlState::UNIQUE_VIOLATION
                    && !matches!(conflict, Conflict::Declared) =>
            {
                None
            }
            other => other?,
        };
        if let Some(count) = applied {
            return Ok(Done { tag: format!("INSERT 0 {count}"), returning });
        }
    }
    Err(too_many_conflicts())
}

/// The query of an INSERT … SELECT whose rows only have to be new: it may be of any size.
fn streamed<'a>(
    session: &Session,
    table: &Relation,
    insert: &'a Insert,
    conflict: &Conflict<'_>,
) -> Option<&'a Query> {
    let query = insert.source.as_deref()?;
    let plain = matches!(conflict, Conflict::Declared)
        && load_conflict(table) == InsertConflict::Error
        && insert.returning.is_none()
        && !session.stages_writes();
    (plain && !matches!(query.body.as_ref(), SetExpr::Values(_))).then_some(query)
}

/// What a table does with rows whose key exists.
pub fn load_conflict(table: &Relation) -> InsertConflict {
    match TableConflict::try_from(table.on_conflict) {
        Ok(TableConflict::Overwrite) => InsertConflict::Overwrite,
        Ok(TableConflict::Ignore) => InsertConflict::Nothing,
        _ => InsertConflict::Error,
    }
}

async fn load_query(
    session: &Session,
    view: &SessionCatalog,
    table: &Relation,
    targets: &[usize],
    query: &Query,
    named: bool,
) -> Result<Done, SqlError> {
    let (fields, mut stream) = session.stream(view, query).await?;
    check_width(fields.len(), targets.len(), named)?;
    let kind = LoadKind::Insert { on_conflict: InsertConflict::Error };
    let id = session.shared.next_statement();
    let mut load = session.cluster().begin_load(RelationId(table.id), id, kind).await?;
    while let Some(batch) = stream.next().await {
        let batch = batch?;
        let columns = batch
            .columns()
            .iter()
            .zip(targets)
            .map(|(array, target)| {
                let column = &table.columns[*target];
                assign(array, &column.name, column.sql_type()?)
            })
            .collect::<Result<Vec<_>, SqlError>>()?;
        let rows = complete_rows(session, table, targets, columns, batch.num_rows()).await?;
        load.append(DeltaChunk::inserts(rows)).await?;
    }
    let count = load.finish().await?.rows_affected;
    Ok(Done { tag: format!("INSERT 0 {count}"), returning: None })
}

fn last_ident(name: &sqlparser::ast::ObjectName) -> Result<Ident, SqlError> {
    name.0
        .last()
        .and_then(|p| p.as_ident().cloned())
        .ok_or_else(|| SqlError::new(SqlState::SYNTAX_ERROR, format!("invalid column name {name}")))
}

/// Positions of the named columns; without names all that are shown.
pub fn target_columns(table: &Relation, names: &[Ident]) -> Result<Vec<usize>, SqlError> {
    if names.is_empty() {
        let given = |i: &usize| {
            let column = &table.columns[*i];
            !column.hidden && column.generated_sql.is_none()
        };
        return Ok((0..table.columns.len()).filter(given).collect());
    }
    let mut targets = Vec::with_capacity(names.len());
    for ident in names {
        let name = fold(ident);
        let position = column_position(table, &name)?;
        generated::refuse_value(&table.columns[position], true)?;
        if targets.contains(&position) {
            return Err(SqlError::new(
                SqlState::DUPLICATE_COLUMN,
                format!("column \"{name}\" specified more than once"),
            ));
        }
        targets.push(position);
    }
    Ok(targets)
}

pub fn column_position(table: &Relation, name: &str) -> Result<usize, SqlError> {
    table.columns.iter().position(|c| c.name == name && !c.hidden).ok_or_else(|| {
        SqlError::new(
            SqlState::UNDEFINED_COLUMN,
            format!("column \"{name}\" of relation \"{}\" does not exist", table.name),
        )
    })
}

fn conflict_of<'a>(table: &Relation, insert: &'a Insert) -> Result<Conflict<'a>, SqlError> {
    let Some(on) = &insert.on else { return Ok(Conflict::Declared) };
    let OnInsert::OnConflict(OnConflict { conflict_target, action }) = on else {
        return Err(SqlError::unsupported("ON DUPLICATE KEY UPDATE")
            .with_hint("Use ON CONFLICT … DO UPDATE."));
    };
    match conflict_target {
        Some(ConflictTarget::Columns(columns)) => {
            let mut named: Vec<u32> = columns
                .iter()
                .map(|c| column_position(table, &fold(c)).map(|p| p as u32))
                .collect::<Result<_, _>>()?;
            let mut key = table.key.clone();
            named.sort_unstable();
            key.sort_unstable();
            if !table.primary_key || named != key {
                return Err(SqlError::new(
                    SqlState("42P10"),
                    "there is no unique or exclusion constraint matching the ON CONFLICT specification",
                ));
            }
        }
        Some(ConflictTarget::OnConstraint(name)) => {
            if !table.primary_key
                || name.to_string().to_lowercase() != format!("{}_pkey", table.name)
            {
                return Err(SqlError::new(
                    SqlState::UNDEFINED_OBJECT,
                    format!("constraint \"{name}\" for table \"{}\" does not exist", table.name),
                ));
            }
        }
        None if matches!(action, OnConflictAction::DoUpdate(_)) => {
            return Err(SqlError::new(
                SqlState::SYNTAX_ERROR,
                "ON CONFLICT DO UPDATE requires inference specification or constraint name",
            )
            .with_hint("For example, ON CONFLICT (column_name)."));
        }
        None => {}
    }
    Ok(match action {
        OnConflictAction::DoNothing => Conflict::Nothing,
        OnConflictAction::DoUpdate(update) => Conflict::Update(update),
    })
}

/// Evaluates the source to rows of all of the table's columns, defaults and row ids included.
async fn full_rows(
    session: &Session,
    table: &Relation,
    source: Option<&Query>,
    targets: &[usize],
    named: bool,
) -> Result<RecordBatch, SqlError> {
    let (given, count) = match source {
        None => (Vec::new(), 1),
        Some(query) => source_rows(session, table, query, targets, named).await?,
    };
    complete_rows(session, table, targets, given, count).await
}

/// Adds defaults and row ids to given columns, and checks NOT NULL.
pub async fn complete_rows(
    session: &Session,
    table: &Relation,
    targets: &[usize],
    given: Vec<ArrayRef>,
    count: usize,
) -> Result<RecordBatch, SqlError> {
    let schema = rows::nullable(table.arrow_schema()?.as_ref());
    let mut columns: Vec<Option<ArrayRef>> = vec![None; table.columns.len()];
    for (target, array) in targets.iter().zip(given) {
        columns[*target] = Some(array);
    }
    for (i, column) in table.columns.iter().enumerate() {
        if columns[i].is_some() {
            continue;
        }
        let array = if column.hidden {
            let first =
                session.cluster().allocate_row_ids(RelationId(table.id), count as u64).await?
                    as i64;
            Arc::new(Int64Array::from_iter_values(first..first + count as i64)) as ArrayRef
        } else if let Some(default) = &column.default_sql {
            default_values(session, table, i, default, count).await?
        } else {
            arrow::array::new_null_array(schema.field(i).data_type(), count)
        };
        columns[i] = Some(array);
    }
    let mut columns: Vec<ArrayRef> = columns.into_iter().flatten().collect();
    generated::fill(session, table, &mut columns, count).await?;
    rows::check_not_null(table, &columns)?;
    rows::batch(&schema, columns, count)
}

/// `count` values of a DEFAULT expression, evaluated a row each.
async fn default_values(
    session: &Session,
    table: &Relation,
    column: usize,
    default: &str,
    count: usize,
) -> Result<ArrayRef, SqlError> {
    let to = table.columns[column].sql_type()?;
    let expr = type_unknown(rewrite::parse_expr(default)?, to)?;
    if literal_fits(&expr, to)
        && let Some(text) = literal(&expr)
    {
        let mut builder = ColumnBuilder::new(to, count);
        for _ in 0..count {
            match &text {
                Some(text) => builder.append_text(text)?,
                None => builder.append_null(),
            }
        }
        return Ok(builder.finish());
    }
    let query = rewrite::parse_query(&format!("SELECT {expr} FROM generate_series(1, {count})"))?;
    let (_, batches) = session.collect(&session.catalog_view(), &query).await?;
    let parts: Vec<&dyn Array> = batches.iter().map(|b| b.column(0).as_ref()).collect();
    let all = arrow::compute::concat(&parts).map_err(rows::arrow_error)?;
    assign(&all, &table.columns[column].name, to)
}

/// The source's columns, cast to their targets, and its number of rows.
async fn source_rows(
    session: &Session,
    table: &Relation,
    query: &Query,
    targets: &[usize],
    named: bool,
) -> Result<(Vec<ArrayRef>, usize), SqlError> {
    let query = match query.body.as_ref() {
        SetExpr::Values(values) if query.order_by.is_none() && query.limit_clause.is_none() => {
            if values.rows.windows(2).any(|pair| pair[0].len() != pair[1].len()) {
                return Err(SqlError::new(
                    SqlState::SYNTAX_ERROR,
                    "VALUES lists must all be the same length",
                ));
            }
            for row in &values.rows {
                check_width(row.len(), targets.len(), named)?;
            }
            if let Some(done) = literal_rows(table, values, targets)? {
                return Ok(done);
            }
            typed_values(table, query, targets)?
        }
        _ => query.clone(),
    };
    let (fields, batches) = session.collect(&session.catalog_view(), &query).await?;
    check_width(fields.len(), targets.len(), named)?;
    let count = batches.iter().map(RecordBatch::num_rows).sum();
    let mut columns = Vec::with_capacity(targets.len());
    for (i, target) in targets.iter().enumerate().take(fields.len()) {
        let column = &table.columns[*target];
        let parts: Vec<&dyn Array> = batches.iter().map(|b| b.column(i).as_ref()).collect();
        let all = if parts.is_empty() {
            arrow::array::new_empty_array(&column.sql_type()?.to_arrow())
        } else {
            arrow::compute::concat(&parts).map_err(rows::arrow_error)?
        };
        columns.push(assign(&all, &column.name, column.sql_type()?)?);
    }
    Ok((columns, count))
}

/// Fewer values than columns leave the rest to their defaults, unless the columns are named.
fn check_width(values: usize, targets: usize, named: bool) -> Result<(), SqlError> {
    if named && values < targets {
        return Err(SqlError::new(
            SqlState::SYNTAX_ERROR,
            "INSERT has more target columns than expressions",
        ));
    }
    if values > targets {
        return Err(SqlError::new(
            SqlState::SYNTAX_ERROR,
            "INSERT has more expressions than target columns",
        ));
    }
    Ok(())
}

/// VALUES of literals only, read by the types' input functions; `None`: something else is in them.
fn literal_rows(
    table: &Relation,
    values: &sqlparser::ast::Values,
    targets: &[usize],
) -> Result<Option<(Vec<ArrayRef>, usize)>, SqlError> {
    let width = values.rows.first().map_or(0, |r| r.len());
    let types = targets
        .iter()
        .take(width)
        .map(|t| table.columns[*t].sql_type())
        .collect::<Result<Vec<_>, _>>()?;
    let plain = |row: &[Expr]| {
        row.len() == width && row.iter().zip(&types).all(|(e, t)| literal_fits(e, *t))
    };
    if !values.rows.iter().all(|row| plain(row)) {
        return Ok(None);
    }
    let mut builders: Vec<ColumnBuilder> =
        types.iter().map(|t| ColumnBuilder::new(*t, values.rows.len())).collect();
    for row in &values.rows {
        for ((builder, expr), to) in builders.iter_mut().zip(row.iter()).zip(&types) {
            match literal(expr).flatten() {
                Some(text) => builder.append_text(&text).map_err(|e| number_range(e, expr, *to))?,
                None => builder.append_null(),
            }
        }
    }
    Ok(Some((builders.iter_mut().map(ColumnBuilder::finish).collect(), values.rows.len())))
}

/// A number that does not fit is a failed cast of a number, not text that is no number.
fn number_range(e: SqlError, expr: &Expr, to: SqlType) -> SqlError {
    let number = match expr {
        Expr::UnaryOp { expr, .. } => expr.as_ref(),
        e => e,
    };
    match number {
        Expr::Value(v) if matches!(v.value, sqlparser::ast::Value::Number(_, _)) => {}
        _ => return e,
    }
    match e.state == SqlState::NUMERIC_VALUE_OUT_OF_RANGE && e.message.starts_with("value ") {
        true => SqlError::new(SqlState::NUMERIC_VALUE_OUT_OF_RANGE, format!("{to} out of range")),
        false => e,
    }
}

/// VALUES with DEFAULT replaced and literals of unknown type given their column's.
fn typed_values(table: &Relation, query: &Query, targets: &[usize]) -> Result<Query, SqlError> {
    let mut query = query.clone();
    let SetExpr::Values(values) = query.body.as_mut() else { return Ok(query) };
    for row in &mut values.rows {
        for (expr, target) in row.iter_mut().zip(targets) {
            let column = &table.columns[*target];
            let value = if is_default(expr) {
                rewrite::parse_expr(column.default_sql.as_deref().unwrap_or("NULL"))?
            } else {
                expr.clone()
            };
            *expr = type_unknown(value, column.sql_type()?)?;
        }
    }
    Ok(query)
}

/// Parameter types a VALUES list says: `$n` alone in a column has the column's type.
pub fn infer_parameters(
    table: &Relation,
    insert: &Insert,
    types: &mut Vec<Option<DataType>>,
) -> Result<(), SqlError> {
    let names = insert.columns.iter().map(last_ident).collect::<Result<Vec<_>, _>>()?;
    let targets = target_columns(table, &names)?;
    let Some(SetExpr::Values(values)) = insert.source.as_ref().map(|q| q.body.as_ref()) else {
        return Ok(());
    };
    for row in &values.rows {
        for (expr, target) in row.iter().zip(&targets) {
            crate::session::params::note_type(
                expr,
                table.columns[*target].sql_type()?.to_arrow(),
                types,
            );
        }
    }
    Ok(())
}

async fn resolve_conflicts(
    session: &Session,
    table: &Relation,
    alias: &str,
    new: RecordBatch,
    conflict: &Conflict<'_>,
) -> Result<Evaluated, SqlError> {
    let count = new.num_rows() as u64;
    match conflict {
        Conflict::Declared => {
            let kind = match TableConflict::try_from(table.on_conflict) {
                Ok(TableConflict::Overwrite) => DmlKind::InsertOrOverwrite,
                Ok(TableConflict::Ignore) => DmlKind::InsertOrIgnore,
                _ => DmlKind::Insert,
            };
            let rows = (kind != DmlKind::InsertOrIgnore).then_some(count);
            Ok(Evaluated {
                delta: DeltaChunk::inserts(new.clone()),
                kind,
                rows,
                output: new,
                resolves_conflicts: false,
            })
        }
        Conflict::Nothing => {
            let new = rows::take(&new, &rows::first_of_each_key(table, &new)?)?;
            let existing = existing_rows(session, table, &new).await?.0;
            let mut fresh = vec![true; new.num_rows()];
            existing.values().iter().for_each(|i| fresh[*i as usize] = false);
            let new = rows::filter(&new, &BooleanArray::from(fresh))?;
            let rows = Some(new.num_rows() as u64);
            Ok(Evaluated {
                delta: DeltaChunk::inserts(new.clone()),
                kind: DmlKind::Insert,
                rows,
                output: new,
                resolves_conflicts: true,
            })
        }
        Conflict::Update(update) => upsert(session, table, alias, new, update).await,
    }
}

/// Rows of the table that have the keys of `new`: positions in `new`, ascending, and the rows.
async fn existing_rows(
    session: &Session,
    table: &Relation,
    new: &RecordBatch,
) -> Result<(UInt32Array, RecordBatch), SqlError> {
    session.rows_at(table, rows::storage_keys(table, new)?).await
}

/// ON CONFLICT DO UPDATE: rows without a partner are inserted, the others updated by the SET list.
async fn upsert(
    session: &Session,
    table: &Relation,
    alias: &str,
    new: RecordBatch,
    update: &DoUpdate,
) -> Result<Evaluated, SqlError> {
    if rows::first_of_each_key(table, &new)?.len() != new.num_rows() {
        return Err(SqlError::new(
            SqlState("21000"),
            "ON CONFLICT DO UPDATE command cannot affect row a second time",
        )
        .with_hint("Ensure that no rows proposed for insertion within the same command have duplicate constrained values."));
    }
    let (partners, old) = existing_rows(session, table, &new).await?;
    let mut fresh = vec![true; new.num_rows()];
    partners.values().iter().for_each(|i| fresh[*i as usize] = false);
    let inserted = rows::filter(&new, &BooleanArray::from(fresh))?;
    let schema = new.schema();
    let old = rows::batch(&schema, old.columns().to_vec(), old.num_rows())?;
    let (old, updated) = if old.num_rows() == 0 {
        (old.clone(), old)
    } else {
        let excluded = rows::take(&new, &partners)?;
        set_over_conflicts(session, table, alias, old, excluded, update).await?
    };
    let output = rows::concat(&schema, &[inserted.clone(), updated.clone()])?;
    let delta = DeltaChunk::concat(
        &schema,
        &[
            DeltaChunk::inserts(old).negate(),
            DeltaChunk::inserts(updated),
            DeltaChunk::inserts(inserted),
        ],
    )
    .map_err(rows::arrow_error)?;
    let rows = Some(output.num_rows() as u64);
    Ok(Evaluated { delta, kind: DmlKind::Upsert, rows, output, resolves_conflicts: true })
}

/// Evaluates `SET … WHERE …` over pairs of existing and excluded rows; returns the pairs' old rows
/// that are updated, and their new rows.
async fn set_over_conflicts(
    session: &Session,
    table: &Relation,
    alias: &str,
    old: RecordBatch,
    excluded: RecordBatch,
    update: &DoUpdate,
) -> Result<(RecordBatch, RecordBatch), SqlError> {
    let numbers = UInt32Array::from_iter_values(0..old.num_rows() as u32);
    let (relation, pairs) = rows::with_row_number(table, alias, &old, numbers.clone())?;
    let (excluded_relation, excluded) =
        rows::with_row_number(table, "excluded", &excluded, numbers)?;
    let mut query = rewrite::empty_query()?;
    let select = rewrite::select_of(&mut query)?;
    select.projection = vec![rewrite::item(rewrite::column(alias, rows::ROW_NUMBER), "n")];
    let mut positions = Vec::new();
    for (i, assignment) in update.assignments.iter().enumerate() {
        let position = assignment_position(table, &assignment.target)?;
        let value = assigned_value(table, position, &assignment.value)?;
        select.projection.push(rewrite::item(value, &format!("v{i}")));
        positions.push(position);
    }
    select.from = vec![rewrite::table_ref(None, alias), rewrite::table_ref(None, "excluded")];
    let join = format!("{}.{n} = excluded.{n}", rewrite::quote_ident(alias), n = rows::ROW_NUMBER);
    let join = match &update.selection {
        Some(filter) => format!("{join} AND ({filter})"),
        None => join,
    };
    select.selection = Some(rewrite::parse_expr(&join)?);
    let mut view = session.catalog_view();
    view.add_temporary(relation, rows::mem_table(pairs)?);
    view.add_temporary(excluded_relation, rows::mem_table(excluded)?);
    let (_, batches) = session.collect(&view, &query).await?;
    let Some(first) = batches.first() else { return Ok((old.slice(0, 0), old.slice(0, 0))) };
    let result =
        arrow::compute::concat_batches(&first.schema(), &batches).map_err(rows::arrow_error)?;
    let which = cast(result.column(0), &DataType::UInt32).map_err(rows::arrow_error)?;
    let which: &UInt32Array = arrow::array::AsArray::as_primitive(&which);
    let old = rows::take(&old, which)?;
    let mut columns = old.columns().to_vec();
    for (i, position) in positions.iter().enumerate() {
        let column = &table.columns[*position];
        columns[*position] = assign(result.column(i + 1), &column.name, column.sql_type()?)?;
    }
    generated::fill(session, table, &mut columns, old.num_rows()).await?;
    rows::check_not_null(table, &columns)?;
    let updated = rows::batch(&old.schema(), columns, old.num_rows())?;
    Ok((old, updated))
}

/// The column a SET item names.
pub fn assignment_position(table: &Relation, target: &AssignmentTarget) -> Result<usize, SqlError> {
    match target {
        AssignmentTarget::ColumnName(name) => column_position(table, &fold(&last_ident(name)?)),
        AssignmentTarget::Tuple(_) => {
            Err(SqlError::unsupported("SET of several columns from a row")
                .with_hint("Set each column by its own expression."))
        }
    }
}

/// The expression of a SET item, DEFAULT replaced and a bare literal typed.
pub fn assigned_value(table: &Relation, position: usize, value: &Expr) -> Result<Expr, SqlError> {
    let column = &table.columns[position];
    generated::refuse_value(column, false)?;
    let value = if is_default(value) {
        rewrite::parse_expr(column.default_sql.as_deref().unwrap_or("NULL"))?
    } else {
        value.clone()
    };
    type_unknown(value, column.sql_type()?)
}
