//! INSERT: rows from VALUES or a query, defaults, ON CONFLICT, RETURNING.
//!
//! VALUES of plain literals, which is what clients send in bulk, are read straight into columns by
//! the text input functions; everything else is planned as a query.

use std::sync::Arc;

use arrow::array::{Array, ArrayRef, Int64Array, RecordBatch};
use arrow::datatypes::DataType;
use futures::StreamExt;
use millrace_common::{RelationId, SqlError, SqlState, SqlType};
use millrace_executor::dml::InsertConflict;
use millrace_functions::interrupt;
use millrace_planner::bind::desugar::assigned;
use millrace_planner::parser::{folded, with_changes_rows};
use millrace_rpc::catalog::{OnConflict as TableConflict, Relation};
use sqlparser::ast::{
    AssignmentTarget, Expr, Ident, Insert, Query, SelectItem, SetExpr, TableObject,
};

use super::attempts::Attempts;
use super::conflict::{Conflict, conflict_of, resolve_conflicts};
use super::insert_select::{HELD_BYTES, Into, is_values, streamed};
use super::rewrite::{
    self, Literal, cast_literal, cell_literal, is_default, literal, type_unknown,
};
use super::{Done, apply, check_table, returning, rows};
use crate::ddl::generated;
use crate::dml::assign::{assign, check_fields};
use crate::encoding::ColumnBuilder;
use crate::query::catalog_view::{SessionCatalog, fold};
use crate::session::Session;

pub fn table_of(view: &SessionCatalog, insert: &Insert) -> Result<Arc<Relation>, SqlError> {
    let TableObject::TableName(name) = &insert.table else {
        return Err(SqlError::unsupported("INSERT into something else than a table"));
    };
    let table = view.resolve(name)?;
    check_table(&table, "insert into")?;
    // The WITH of the statement itself stands before INSERT.
    match insert.source.as_deref().is_some_and(with_changes_rows) {
        true => Err(super::with::not_at_top()),
        false => Ok(table),
    }
}

/// The name that the table's columns go by.
pub fn alias_of(table: &Relation, insert: &Insert) -> String {
    insert.table_alias.as_ref().map_or_else(|| table.name.clone(), |a| fold(&a.alias))
}

/// Positions of the columns that the source's values are for.
pub fn targets_of(table: &Relation, insert: &Insert) -> Result<Vec<usize>, SqlError> {
    // Generated columns have their places among the others: there may be DEFAULT for them.
    if insert.columns.is_empty() {
        return Ok((0..table.columns.len()).filter(|i| !table.columns[*i].hidden).collect());
    }
    let names = insert.columns.iter().map(last_ident).collect::<Result<Vec<_>, _>>()?;
    named_columns(table, &names)
}

pub async fn execute(session: &Session, insert: &Insert) -> Result<Done, SqlError> {
    let view = session.catalog_view();
    let table = table_of(&view, insert)?;
    let targets = targets_of(&table, insert)?;
    let conflict = conflict_of(&table, insert)?;
    if matches!(conflict, Conflict::Update(_)) {
        super::update::only_grows(&table, "ON CONFLICT DO UPDATE")?;
    }
    let alias = alias_of(&table, insert);
    let into = Into { table: &table, alias: &alias, targets: &targets, insert };
    if let Some(on_conflict) = streamed(session, &table, insert, &conflict) {
        return into.load(session, on_conflict).await;
    }
    let may_load = matches!(conflict, Conflict::Update(_))
        && insert.returning.is_none()
        && insert.source.as_deref().is_some_and(|q| !is_values(q))
        && !session.stages_writes();
    let limit = if may_load { HELD_BYTES } else { session.shared.config.query_memory };
    let mut attempts = Attempts::of(session, Some(table.id));
    loop {
        attempts.next(session).await?;
        let rows = match (into.full_rows(session, limit).await?, &conflict) {
            (Some(rows), _) => rows,
            (None, Conflict::Update(update)) if may_load => {
                drop(attempts);
                return into.load_upserts(session, update).await;
            }
            (None, _) => return Err(super::too_large(limit)),
        };
        let evaluated = resolve_conflicts(session, &table, &alias, rows, &conflict).await?;
        // Before anything is applied: a RETURNING that fails leaves nothing behind.
        let items = insert.returning.as_deref();
        let returning = returning(session, &table, &alias, items, evaluated.output.clone()).await?;
        let applied = match apply(session, &table, &evaluated).await {
            // The key was inserted after the statement looked: look again.
            Err(e)
                if e.state == SqlState::UNIQUE_VIOLATION
                    && matches!(conflict, Conflict::Nothing) =>
            {
                None
            }
            other => other?,
        };
        if let Some(count) = applied {
            return Ok(Done { tag: format!("INSERT 0 {count}"), returning });
        }
    }
}

/// What a table does with rows whose key exists.
pub fn load_conflict(table: &Relation) -> InsertConflict {
    match TableConflict::try_from(table.on_conflict) {
        Ok(TableConflict::Overwrite) => InsertConflict::Overwrite,
        Ok(TableConflict::Ignore) => InsertConflict::Nothing,
        _ => InsertConflict::Error,
    }
}

fn last_ident(name: &sqlparser::ast::ObjectName) -> Result<Ident, SqlError> {
    name.0
        .last()
        .and_then(|p| p.as_ident().cloned())
        .ok_or_else(|| SqlError::new(SqlState::SYNTAX_ERROR, format!("invalid column name {name}")))
}

/// Positions of the named columns, without names of all that are shown; of columns that can be given a value.
pub fn target_columns(table: &Relation, names: &[Ident]) -> Result<Vec<usize>, SqlError> {
    if names.is_empty() {
        let given = |i: &usize| {
            let column = &table.columns[*i];
            !column.hidden && column.generated_sql.is_none()
        };
        return Ok((0..table.columns.len()).filter(given).collect());
    }
    let targets = named_columns(table, names)?;
    refuse_generated(table, &targets)?;
    Ok(targets)
}

/// PostgreSQL's error for values that are given for generated columns.
pub(super) fn refuse_generated(table: &Relation, given: &[usize]) -> Result<(), SqlError> {
    given.iter().try_for_each(|at| generated::refuse_value(&table.columns[*at], true))
}

fn named_columns(table: &Relation, names: &[Ident]) -> Result<Vec<usize>, SqlError> {
    let mut targets = Vec::with_capacity(names.len());
    for ident in names {
        let name = fold(ident);
        let position = column_position(table, &name)?;
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

/// Adds defaults and row ids to given columns, and checks NOT NULL.
pub async fn complete_rows(
    session: &Session,
    table: &Relation,
    targets: &[usize],
    given: Vec<ArrayRef>,
    count: usize,
) -> Result<RecordBatch, SqlError> {
    let columns = complete_columns(session, table, targets, given, count).await?;
    rows::check_not_null(table, &columns)?;
    rows::batch(&rows::nullable(table.arrow_schema()?.as_ref()), columns, count)
}

/// Adds defaults and row ids to given columns; NOT NULL is left to the caller.
pub async fn complete_columns(
    session: &Session,
    table: &Relation,
    targets: &[usize],
    given: Vec<ArrayRef>,
    count: usize,
) -> Result<Vec<ArrayRef>, SqlError> {
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
    rows::round_seconds(table, &mut columns)?;
    generated::fill(session, table, &mut columns, count).await?;
    rows::round_seconds(table, &mut columns)?;
    Ok(columns)
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
    let expr = session.fit_value(rewrite::parse_expr(default)?, to)?;
    let expr = type_unknown(expr, to)?;
    if let Some(literal) = literal(&expr, to) {
        let mut builder = ColumnBuilder::new(to, count);
        for _ in 0..count {
            match literal.text() {
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

/// The source's columns, cast to their targets, and its number of rows. `None`: they take more bytes than `limit`.
pub(super) async fn source_rows(
    session: &Session,
    table: &Relation,
    query: &Query,
    (targets, named): (&[usize], bool),
    limit: usize,
) -> Result<Option<(Vec<ArrayRef>, usize)>, SqlError> {
    let written;
    let query = match query.body.as_ref() {
        SetExpr::Values(values) if let Some(rows) = folded::rows(values) => {
            check_width(rows.width, targets.len(), named)?;
            if let Some(columns) = folded_rows(table, &rows, targets)? {
                return Ok(Some((columns, rows.count)));
            }
            written = with_rows(query)?;
            &written
        }
        _ => query,
    };
    let (query, of_rows) = match query.body.as_ref() {
        SetExpr::Values(values) if !chosen(query) => {
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
                return Ok(Some(done));
            }
            (typed_values(table, query, targets)?, true)
        }
        _ => (typed_select(table, query, targets)?, false),
    };
    let (fields, mut stream) = session.stream(&session.catalog_view(), &query).await?;
    check_width(fields.len(), targets.len(), named)?;
    check_fields(&fields, table, targets)?;
    if !of_rows {
        refuse_generated(table, &targets[..fields.len().min(targets.len())])?;
    }
    let (mut batches, mut bytes) = (Vec::new(), 0);
    while let Some(batch) = stream.next().await {
        let batch = batch?;
        bytes += batch.get_array_memory_size();
        if bytes > limit {
            return Ok(None);
        }
        batches.push(batch);
    }
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
    Ok(Some((columns, count)))
}

/// Whether clauses behind VALUES order or limit its rows, which makes it a query like any other.
fn chosen(query: &Query) -> bool {
    query.order_by.is_some() || query.limit_clause.is_some() || query.fetch.is_some()
}

/// Fewer values than columns leave the rest to their defaults, unless the columns are named.
pub(super) fn check_width(values: usize, targets: usize, named: bool) -> Result<(), SqlError> {
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

/// A query with the rows that have been kept as text.
fn with_rows(query: &Query) -> Result<Query, SqlError> {
    let mut query = query.clone();
    if let SetExpr::Values(values) = query.body.as_mut() {
        folded::unfold_values(values)?;
    }
    Ok(query)
}

/// The types of the columns that rows of so many values are for; `None`: not all of them are read from literals.
fn read_types(
    table: &Relation,
    targets: &[usize],
    width: usize,
) -> Result<Option<Vec<SqlType>>, SqlError> {
    let columns = targets.iter().take(width).map(|t| &table.columns[*t]);
    if columns.clone().any(|c| c.generated_sql.is_some()) {
        return Ok(None);
    }
    columns.map(|c| c.sql_type()).collect::<Result<Vec<_>, _>>().map(Some)
}

/// Rows that are kept as text, read by the types' input functions; `None`: not all are literals of their columns.
fn folded_rows(
    table: &Relation,
    rows: &folded::Rows<'_>,
    targets: &[usize],
) -> Result<Option<Vec<ArrayRef>>, SqlError> {
    let Some(types) = read_types(table, targets, rows.width)? else { return Ok(None) };
    let mut builders: Vec<ColumnBuilder> =
        types.iter().map(|t| ColumnBuilder::new(*t, rows.count)).collect();
    for (i, cell) in rows.cells().enumerate() {
        interrupt::step(CELL_BYTES)?;
        let (builder, to) = (&mut builders[i % rows.width], types[i % rows.width]);
        let Some(literal) = cell_literal(cell, to) else { return Ok(None) };
        read_into(builder, &literal, to)?;
    }
    Ok(Some(builders.iter_mut().map(ColumnBuilder::finish).collect()))
}

/// What a value of a row takes, about.
const CELL_BYTES: usize = 64;

fn read_into(
    builder: &mut ColumnBuilder,
    literal: &Literal<'_>,
    to: SqlType,
) -> Result<(), SqlError> {
    match literal.text() {
        Some(text) => builder.append_text(text).map_err(|e| number_range(e, literal, to)),
        None => {
            builder.append_null();
            Ok(())
        }
    }
}

/// VALUES of literals and parameters' values only, read by the types' input functions; `None`: something else is in them,
/// or a cast that fails, which says so as a cast does.
fn literal_rows(
    table: &Relation,
    values: &sqlparser::ast::Values,
    targets: &[usize],
) -> Result<Option<(Vec<ArrayRef>, usize)>, SqlError> {
    let width = values.rows.first().map_or(0, |r| r.len());
    let Some(types) = read_types(table, targets, width)? else { return Ok(None) };
    let mut builders: Vec<ColumnBuilder> =
        types.iter().map(|t| ColumnBuilder::new(*t, values.rows.len())).collect();
    let mut literals = Vec::with_capacity(width);
    let value = |e, to| match literal(e, to) {
        Some(literal) => Some((literal, false)),
        None => cast_literal(e, to).map(|literal| (literal, true)),
    };
    for row in &values.rows {
        literals.clear();
        literals.extend(row.iter().zip(&types).map_while(|(e, to)| value(e, *to)));
        if row.len() != width || literals.len() != width {
            return Ok(None);
        }
        for ((builder, (literal, is_cast)), to) in builders.iter_mut().zip(&literals).zip(&types) {
            match read_into(builder, literal, *to) {
                Err(_) if *is_cast => return Ok(None),
                read => read?,
            }
        }
    }
    Ok(Some((builders.iter_mut().map(ColumnBuilder::finish).collect(), values.rows.len())))
}

/// A number that does not fit is a failed cast of a number, not text that is no number.
fn number_range(e: SqlError, literal: &Literal<'_>, to: SqlType) -> SqlError {
    if !matches!(literal, Literal::Number(_)) {
        return e;
    }
    match e.state == SqlState::NUMERIC_VALUE_OUT_OF_RANGE && e.message.starts_with("value ") {
        true => SqlError::new(SqlState::NUMERIC_VALUE_OUT_OF_RANGE, format!("{to} out of range")),
        false => e,
    }
}

/// VALUES with DEFAULT replaced, and every value assigned to its column by itself: the rows need not agree on types.
/// For a generated column there is nothing but DEFAULT, here NULL: it is computed when the others are known.
pub(super) fn typed_values(
    table: &Relation,
    query: &Query,
    targets: &[usize],
) -> Result<Query, SqlError> {
    let mut query = with_rows(query)?;
    let SetExpr::Values(values) = query.body.as_mut() else { return Ok(query) };
    for row in &mut values.rows {
        for (expr, target) in row.iter_mut().zip(targets) {
            let column = &table.columns[*target];
            let value = if is_default(expr) {
                rewrite::parse_expr(column.default_sql.as_deref().unwrap_or("NULL"))?
            } else {
                generated::refuse_value(column, true)?;
                expr.clone()
            };
            *expr = assigned(value, &column.name, column.sql_type()?);
        }
    }
    Ok(query)
}

/// A SELECT whose literals of unknown type have their column's.
pub(super) fn typed_select(
    table: &Relation,
    query: &Query,
    targets: &[usize],
) -> Result<Query, SqlError> {
    let mut query = query.clone();
    let SetExpr::Select(select) = query.body.as_mut() else { return Ok(query) };
    for (item, target) in select.projection.iter_mut().zip(targets) {
        let (SelectItem::UnnamedExpr(e) | SelectItem::ExprWithAlias { expr: e, .. }) = item else {
            break; // What follows a `*` has no known place.
        };
        *e = type_unknown(rewrite::taken(e), table.columns[*target].sql_type()?)?;
    }
    Ok(query)
}

/// Parameter types a VALUES list says: `$n` alone in a column has the column's type.
pub fn infer_parameters(
    table: &Relation,
    insert: &Insert,
    types: &mut Vec<Option<DataType>>,
) -> Result<(), SqlError> {
    let targets = targets_of(table, insert)?;
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

/// 42601 for a column that two SET items name.
pub fn set_twice(table: &Relation, position: usize) -> SqlError {
    let name = &table.columns[position].name;
    SqlError::new(SqlState::SYNTAX_ERROR, format!("multiple assignments to same column \"{name}\""))
}

/// The expression of a SET item, DEFAULT replaced and a bare literal typed.
pub fn assigned_value(table: &Relation, position: usize, value: &Expr) -> Result<Expr, SqlError> {
    let column = &table.columns[position];
    let value = if is_default(value) {
        rewrite::parse_expr(column.default_sql.as_deref().unwrap_or("NULL"))?
    } else {
        generated::refuse_value(column, false)?;
        value.clone()
    };
    type_unknown(value, column.sql_type()?)
}
