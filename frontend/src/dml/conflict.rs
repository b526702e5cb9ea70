//! INSERT … ON CONFLICT: what becomes of rows whose keys exist.

use arrow::array::{BooleanArray, RecordBatch, UInt32Array};
use arrow::compute::cast;
use arrow::datatypes::DataType;
use millrace_common::{DeltaChunk, SqlError, SqlState};
use millrace_executor::dml::second_time;
use millrace_rpc::catalog::{OnConflict as TableConflict, Relation};
use sqlparser::ast::{
    BinaryOperator, ConflictTarget, DoUpdate, Expr, Insert, OnConflict, OnConflictAction, OnInsert,
};

use super::assign::assign;
use super::insert::{assigned_value, assignment_position, column_position};
use super::{Evaluated, rewrite, rows};
use crate::cluster::DmlKind;
use crate::ddl::generated;
use crate::query::catalog_view::fold;
use crate::session::Session;

/// What to do with a row whose key exists.
pub enum Conflict<'a> {
    /// As the table was declared: error, overwrite or ignore.
    Declared,
    Nothing,
    Update(&'a DoUpdate),
}

pub fn conflict_of<'a>(table: &Relation, insert: &'a Insert) -> Result<Conflict<'a>, SqlError> {
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

pub async fn resolve_conflicts(
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
pub async fn upsert(
    session: &Session,
    table: &Relation,
    alias: &str,
    new: RecordBatch,
    update: &DoUpdate,
) -> Result<Evaluated, SqlError> {
    if rows::first_of_each_key(table, &new)?.len() != new.num_rows() {
        return Err(second_time());
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
    let join = rewrite::parse_expr(&join)?;
    select.selection = Some(match &update.selection {
        Some(filter) => Expr::BinaryOp {
            left: Box::new(join),
            op: BinaryOperator::And,
            right: Box::new(Expr::Nested(Box::new(filter.clone()))),
        },
        None => join,
    });
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
    rows::round_seconds(table, &mut columns)?;
    generated::fill(session, table, &mut columns, old.num_rows()).await?;
    rows::round_seconds(table, &mut columns)?;
    rows::check_not_null(table, &columns)?;
    let updated = rows::batch(&old.schema(), columns, old.num_rows())?;
    Ok((old, updated))
}
