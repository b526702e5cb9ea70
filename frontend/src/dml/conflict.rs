//! INSERT … ON CONFLICT: what becomes of rows whose keys exist.

use arrow::array::{ArrayRef, BooleanArray, RecordBatch, UInt32Array};
use arrow::compute::cast;
use arrow::datatypes::DataType;
use millrace_common::{DeltaChunk, SqlError, SqlState};
use millrace_executor::dml::second_time;
use millrace_executor::dml::{DmlKind, InsertConflict};
use millrace_rpc::catalog::{OnConflict as TableConflict, Relation};
use sqlparser::ast::{
    BinaryOperator, ConflictTarget, DoUpdate, Expr, Insert, OnConflict, OnConflictAction, OnInsert,
    Query,
};

use super::assign::{assign, check, check_fields};
use super::insert::{assigned_value, assignment_position, column_position, set_twice};
use super::repeats::Repeats;
use super::{Evaluated, rewrite, rows};
use crate::ddl::generated;
use crate::query::SessionCatalog;
use crate::query::catalog_view::fold;
use crate::session::{Session, params};

/// The name of the row that is not inserted.
const EXCLUDED: &str = "excluded";

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
            let name = name.0.last().and_then(|p| p.as_ident()).map(fold).unwrap_or_default();
            if !table.primary_key || name != table.primary_key_name() {
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
            let on_conflict = match TableConflict::try_from(table.on_conflict) {
                Ok(TableConflict::Overwrite) => InsertConflict::Overwrite,
                Ok(TableConflict::Ignore) => InsertConflict::Nothing,
                _ => InsertConflict::Error,
            };
            let kind = DmlKind::Insert { on_conflict };
            let rows = (on_conflict != InsertConflict::Nothing).then_some(count);
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
                kind: DmlKind::Insert { on_conflict: InsertConflict::Error },
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

/// The same where several of `new` may have the same key: each is given its row.
async fn rows_met(
    session: &Session,
    table: &Relation,
    new: &RecordBatch,
    repeats: &Repeats,
) -> Result<(UInt32Array, RecordBatch), SqlError> {
    if !repeats.any() {
        return existing_rows(session, table, new).await;
    }
    let (found, old) = existing_rows(session, table, &rows::take(new, &repeats.firsts())?).await?;
    let (partners, met) = repeats.spread(&found);
    Ok((partners, rows::take(&old, &met)?))
}

/// ON CONFLICT DO UPDATE: rows without a partner are inserted, the others updated by the SET list.
pub async fn upsert(
    session: &Session,
    table: &Relation,
    alias: &str,
    new: RecordBatch,
    update: &DoUpdate,
) -> Result<Evaluated, SqlError> {
    let repeats = Repeats::of(table, &new)?;
    // Without WHERE the second of two rows meets what the first has done, whatever was there.
    if repeats.any() && update.selection.is_none() {
        return Err(second_time());
    }
    let (partners, old) = rows_met(session, table, &new, &repeats).await?;
    let written = match session.in_parts() {
        true => session.written_by_parts(table.id, &rows::storage_keys(table, &old)?),
        false => None,
    };
    if written.is_some_and(|w| w.contains(&true)) {
        return Err(second_time());
    }
    let mut fresh = vec![true; new.num_rows()];
    partners.values().iter().for_each(|i| fresh[*i as usize] = false);
    repeats.check((0..).zip(&fresh).filter(|(_, fresh)| **fresh).map(|(row, _)| row))?;
    let inserted = rows::filter(&new, &BooleanArray::from(fresh))?;
    let schema = new.schema();
    let old = rows::batch(&schema, old.columns().to_vec(), old.num_rows())?;
    let columns = columns_set(table, alias, update)?;
    let (old, updated) = if old.num_rows() == 0 {
        // What is wrong with the list is told also where nothing comes of it.
        if columns.is_none() {
            check_update(session, table, alias, update, &[])?;
        }
        (old.clone(), old)
    } else {
        let excluded = rows::take(&new, &partners)?;
        let (which, old, updated) = match columns {
            Some(columns) => set_columns(session, table, old, &excluded, &columns).await?,
            None => set_over_conflicts(session, table, alias, old, excluded, update).await?,
        };
        repeats.check(which.values().iter().map(|pair| partners.value(*pair as usize)))?;
        (old, updated)
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

/// `SET … WHERE …` as a query over pairs of existing and excluded rows, whose numbers come first.
struct SetQuery {
    view: SessionCatalog,
    query: Query,
    /// Columns set, in the order of the values.
    positions: Vec<usize>,
}

fn set_query(
    session: &Session,
    table: &Relation,
    alias: &str,
    (old, excluded): (&RecordBatch, &RecordBatch),
    update: &DoUpdate,
) -> Result<SetQuery, SqlError> {
    let numbers = UInt32Array::from_iter_values(0..old.num_rows() as u32);
    let met = (rows::in_hand(table.id, "met"), rows::in_hand(table.id, "excluded"));
    let (relation, pairs) = rows::with_row_number(table, &met.0, old, numbers.clone())?;
    let (excluded_relation, excluded) = rows::with_row_number(table, &met.1, excluded, numbers)?;
    let mut query = rewrite::empty_query()?;
    let select = rewrite::select_of(&mut query)?;
    select.projection = vec![rewrite::item(rewrite::column(alias, rows::ROW_NUMBER), "n")];
    let mut positions = Vec::new();
    for (i, assignment) in update.assignments.iter().enumerate() {
        let position = assignment_position(table, &assignment.target)?;
        if positions.contains(&position) {
            return Err(set_twice(table, position));
        }
        let value = assigned_value(table, position, &assignment.value)?;
        select.projection.push(rewrite::item(value, &format!("v{i}")));
        positions.push(position);
    }
    // The queries within the list read the table, also where they call it as it is called here.
    select.from = vec![rewrite::aliased(&met.0, alias), rewrite::aliased(&met.1, EXCLUDED)];
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
    Ok(SetQuery { view, query, positions })
}

/// A column that is set to a column of either row.
struct ColumnSet {
    to: usize,
    from: usize,
    of_excluded: bool,
}

/// What a list sets that sets columns to columns, which is checked here: it need not be bound. `None`: it does more.
fn columns_set(
    table: &Relation,
    alias: &str,
    update: &DoUpdate,
) -> Result<Option<Vec<ColumnSet>>, SqlError> {
    if update.selection.is_some() || alias == EXCLUDED {
        return Ok(None);
    }
    let mut set: Vec<ColumnSet> = Vec::new();
    for assignment in &update.assignments {
        let Expr::CompoundIdentifier(parts) = &assignment.value else { return Ok(None) };
        let [of, name] = parts.as_slice() else { return Ok(None) };
        let (of, name) = (fold(of), fold(name));
        let Some(from) = table.columns.iter().position(|c| c.name == name && !c.hidden) else {
            return Ok(None);
        };
        let to = assignment_position(table, &assignment.target)?;
        if set.iter().any(|s| s.to == to) {
            return Err(set_twice(table, to));
        }
        let column = &table.columns[to];
        if (of != EXCLUDED && of != alias) || column.generated_sql.is_some() {
            return Ok(None);
        }
        check(table.columns[from].sql_type()?, &column.name, column.sql_type()?)?;
        set.push(ColumnSet { to, from, of_excluded: of == EXCLUDED });
    }
    Ok(Some(set))
}

/// What a list of [`columns_set`] makes of pairs of existing and excluded rows: all of them update.
async fn set_columns(
    session: &Session,
    table: &Relation,
    old: RecordBatch,
    excluded: &RecordBatch,
    set: &[ColumnSet],
) -> Result<(UInt32Array, RecordBatch, RecordBatch), SqlError> {
    let values = set.iter().map(|s| {
        let of = if s.of_excluded { excluded } else { &old };
        (s.to, of.column(s.from).clone())
    });
    let updated = updated(session, table, &old, values.collect()).await?;
    Ok((UInt32Array::from_iter_values(0..old.num_rows() as u32), old, updated))
}

/// Rows with other values in some columns, and what follows from them.
async fn updated(
    session: &Session,
    table: &Relation,
    old: &RecordBatch,
    values: Vec<(usize, ArrayRef)>,
) -> Result<RecordBatch, SqlError> {
    let mut columns = old.columns().to_vec();
    for (position, value) in values {
        let column = &table.columns[position];
        columns[position] = assign(&value, &column.name, column.sql_type()?)?;
    }
    rows::round_seconds(table, &mut columns)?;
    generated::fill(session, table, &mut columns, old.num_rows()).await?;
    rows::round_seconds(table, &mut columns)?;
    rows::check_not_null(table, &columns)?;
    rows::batch(&old.schema(), columns, old.num_rows())
}

/// Binds `SET … WHERE …` without rows; the types of its parameters. Without parameters the types of its values must
/// be those of their columns.
pub fn check_update(
    session: &Session,
    table: &Relation,
    alias: &str,
    update: &DoUpdate,
    types: &[Option<DataType>],
) -> Result<Vec<DataType>, SqlError> {
    let none = RecordBatch::new_empty(rows::nullable(table.arrow_schema()?.as_ref()));
    let SetQuery { view, query, positions } =
        set_query(session, table, alias, (&none, &none), update)?;
    let (bound, fields) = session.bind(&view, &query, types)?;
    if params::count(update) == 0 {
        check_fields(&fields[1..], table, &positions)?;
    }
    Ok(bound.param_types)
}

/// Evaluates `SET … WHERE …` over pairs of existing and excluded rows; returns which pairs update, their old rows and
/// their new rows.
async fn set_over_conflicts(
    session: &Session,
    table: &Relation,
    alias: &str,
    old: RecordBatch,
    excluded: RecordBatch,
    update: &DoUpdate,
) -> Result<(UInt32Array, RecordBatch, RecordBatch), SqlError> {
    let SetQuery { view, query, positions } =
        set_query(session, table, alias, (&old, &excluded), update)?;
    let (fields, batches) = session.collect(&view, &query).await?;
    check_fields(&fields[1..], table, &positions)?;
    let Some(first) = batches.first() else {
        return Ok((UInt32Array::from(Vec::<u32>::new()), old.slice(0, 0), old.slice(0, 0)));
    };
    let result =
        arrow::compute::concat_batches(&first.schema(), &batches).map_err(rows::arrow_error)?;
    let which = cast(result.column(0), &DataType::UInt32).map_err(rows::arrow_error)?;
    let which: &UInt32Array = arrow::array::AsArray::as_primitive(&which);
    let which = which.clone();
    let old = rows::take(&old, &which)?;
    let values = positions.iter().enumerate();
    let values = values.map(|(i, position)| (*position, result.column(i + 1).clone())).collect();
    let updated = updated(session, table, &old, values).await?;
    Ok((which, old, updated))
}
