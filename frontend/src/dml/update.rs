//! UPDATE, DELETE and TRUNCATE: the rows to change are what a query over the table finds.

use std::sync::Arc;

use arrow::array::{ArrayRef, RecordBatch};
use arrow::datatypes::DataType;
use futures::StreamExt;
use millrace_common::{DeltaChunk, Epoch, RelationId, SqlError, SqlState};
use millrace_executor::dml::{DmlError, Load, LoadKind};
use millrace_rpc::catalog::Relation;
use sqlparser::ast::{
    Delete, Expr, FromTable, Query, TableFactor, TableWithJoins, Update, UpdateTableFromKind,
};

use super::assign::assign;
use super::insert::{assigned_value, assignment_position};
use super::{
    Done, Evaluated, MAX_ATTEMPTS, apply, check_table, returning, rewrite, rows, too_many_conflicts,
};
use crate::cluster::DmlKind;
use crate::ddl::generated;
use crate::query::catalog_view::{SessionCatalog, fold};
use crate::session::Session;

/// A statement as a query: all columns of the rows it finds, then the values it sets.
pub struct Plan {
    pub table: Arc<Relation>,
    alias: String,
    pub query: Query,
    /// Columns set, in the order of the values.
    positions: Vec<usize>,
    /// The query finds every row once: nothing is joined to the table.
    alone: bool,
}

/// The table an UPDATE or DELETE names, and the name its columns go by.
fn target(
    view: &SessionCatalog,
    from: &TableWithJoins,
    verb: &str,
) -> Result<(Arc<Relation>, String), SqlError> {
    let TableFactor::Table { name, alias, .. } = &from.relation else {
        return Err(SqlError::unsupported(format!("{verb} of something else than a table")));
    };
    let table = view.resolve(name)?;
    check_table(&table, if verb == "DELETE" { "delete from" } else { "update" })?;
    if table.append_only {
        return Err(SqlError::unsupported(format!(
            "{verb} of append-only table \"{}\"",
            table.name
        ))
        .with_hint("Create the table without APPEND ONLY."));
    }
    let alias = alias.as_ref().map_or_else(|| table.name.clone(), |a| fold(&a.name));
    Ok((table, alias))
}

fn base_query(
    table: &Relation,
    alias: &str,
    from: Vec<TableWithJoins>,
    selection: Option<Expr>,
) -> Result<Query, SqlError> {
    let mut query = rewrite::empty_query()?;
    let select = rewrite::select_of(&mut query)?;
    select.projection = table
        .columns
        .iter()
        .enumerate()
        .map(|(i, c)| rewrite::item(rewrite::column(alias, &c.name), &format!("old{i}")))
        .collect();
    select.from = from;
    select.selection = selection;
    Ok(query)
}

pub fn plan_update(view: &SessionCatalog, update: &Update) -> Result<Plan, SqlError> {
    let (table, alias) = target(view, &update.table, "UPDATE")?;
    let mut from = vec![update.table.clone()];
    if let Some(UpdateTableFromKind::BeforeSet(tables) | UpdateTableFromKind::AfterSet(tables)) =
        &update.from
    {
        from.extend(tables.iter().cloned());
    }
    let alone = from.len() == 1 && from.iter().all(|f| f.joins.is_empty());
    let mut query = base_query(&table, &alias, from, update.selection.clone())?;
    let mut positions = Vec::new();
    let select = rewrite::select_of(&mut query)?;
    for (i, assignment) in update.assignments.iter().enumerate() {
        let position = assignment_position(&table, &assignment.target)?;
        if positions.contains(&position) {
            return Err(SqlError::new(
                millrace_common::SqlState::SYNTAX_ERROR,
                format!("multiple assignments to same column \"{}\"", table.columns[position].name),
            ));
        }
        let value = assigned_value(&table, position, &assignment.value)?;
        select.projection.push(rewrite::item(value, &format!("new{i}")));
        positions.push(position);
    }
    Ok(Plan { table, alias, query, positions, alone })
}

pub fn plan_delete(view: &SessionCatalog, delete: &Delete) -> Result<Plan, SqlError> {
    let (FromTable::WithFromKeyword(tables) | FromTable::WithoutKeyword(tables)) = &delete.from;
    let [table_ref] = tables.as_slice() else {
        return Err(SqlError::unsupported("DELETE from several tables"));
    };
    let (table, alias) = target(view, table_ref, "DELETE")?;
    let mut from = tables.clone();
    from.extend(delete.using.iter().flatten().cloned());
    let alone = from.len() == 1 && from.iter().all(|f| f.joins.is_empty());
    let query = base_query(&table, &alias, from, delete.selection.clone())?;
    Ok(Plan { table, alias, query, positions: Vec::new(), alone })
}

/// Types that `SET column = $n` says.
pub fn infer_parameters(
    table: &Relation,
    update: &Update,
    types: &mut Vec<Option<DataType>>,
) -> Result<(), SqlError> {
    for assignment in &update.assignments {
        let position = assignment_position(table, &assignment.target)?;
        let t = table.columns[position].sql_type()?.to_arrow();
        crate::session::params::note_type(&assignment.value, t, types);
    }
    Ok(())
}

pub async fn execute_update(session: &Session, update: &Update) -> Result<Done, SqlError> {
    let plan = plan_update(&session.catalog_view(), update)?;
    run(session, "UPDATE", &plan, update.returning.as_deref()).await
}

pub async fn execute_delete(session: &Session, delete: &Delete) -> Result<Done, SqlError> {
    let plan = plan_delete(&session.catalog_view(), delete)?;
    run(session, "DELETE", &plan, delete.returning.as_deref()).await
}

/// Removes all rows of a table.
pub async fn truncate(session: &Session, table: Arc<Relation>) -> Result<(), SqlError> {
    check_table(&table, "truncate")?;
    let alias = table.name.clone();
    let query =
        base_query(&table, &alias, vec![rewrite::table_ref(Some(&table.schema), &alias)], None)?;
    let plan = Plan { table, alias, query, positions: Vec::new(), alone: true };
    run(session, "TRUNCATE", &plan, None).await.map(|_| ())
}

async fn run(
    session: &Session,
    verb: &str,
    plan: &Plan,
    items: Option<&[sqlparser::ast::SelectItem]>,
) -> Result<Done, SqlError> {
    let mut locked = false;
    for _ in 0..MAX_ATTEMPTS {
        let evaluated = match found(session, plan, items.is_some(), locked).await? {
            Found::Here(batches) => evaluate(session, plan, &batches).await?,
            Found::Loaded(load) => match load.finish().await {
                Ok(done) => {
                    let tag = format!("{verb} {}", done.rows_affected);
                    return Ok(Done { tag, returning: None });
                }
                // Others write to the table all the time: they wait for the next attempt.
                Err(DmlError::Conflict) => {
                    locked = true;
                    continue;
                }
                Err(e) => return Err(e.into()),
            },
        };
        // Before anything is applied: a RETURNING that fails leaves nothing behind.
        let output = evaluated.output.clone();
        let returning = returning(session, &plan.table, &plan.alias, items, output).await?;
        if let Some(count) = apply(session, &plan.table, &evaluated).await? {
            return Ok(Done { tag: format!("{verb} {count}"), returning });
        }
    }
    Err(too_many_conflicts())
}

/// The rows a statement changes.
enum Found {
    /// Few enough to be held.
    Here(Vec<RecordBatch>),
    /// Too many: what becomes of them is on its way into the table.
    Loaded(Box<Load>),
}

/// Rows of this many bytes are held.
const HELD_BYTES: usize = 8 << 20;

async fn found(
    session: &Session,
    plan: &Plan,
    returning: bool,
    locked: bool,
) -> Result<Found, SqlError> {
    let key = &plan.table.key;
    let may_load = plan.alone
        && !returning
        && !session.stages_writes()
        && plan.positions.iter().all(|p| !key.contains(&(*p as u32)));
    let mut load = None;
    if locked {
        let mut first = begin_load(session, plan, Epoch::ZERO).await?;
        first.lock_table().await?;
        load = Some(first);
    }
    let view = session.catalog_view();
    let (_, mut stream) = session.stream(&view, &plan.query).await?;
    let epoch = view.epoch.get().copied().unwrap_or_default();
    if let Some(load) = &mut load {
        load.read_at(epoch);
    }
    let (mut held, mut bytes) = (Vec::new(), 0);
    while let Some(batch) = stream.next().await {
        let batch = batch?;
        if let Some(load) = &mut load {
            load.append(changed(session, plan, &batch).await?).await?;
            match load.has_spilled() {
                true => held.clear(),
                false => held.push(batch),
            }
            continue;
        }
        bytes += batch.get_array_memory_size();
        held.push(batch);
        if may_load && bytes > HELD_BYTES {
            let mut begun = begin_load(session, plan, epoch).await?;
            for batch in &held {
                begun.append(changed(session, plan, batch).await?).await?;
            }
            if begun.has_spilled() {
                held.clear();
            }
            load = Some(begun);
        } else if bytes > session.shared.config.query_memory {
            return Err(SqlError::new(
                SqlState::STATEMENT_TOO_COMPLEX,
                format!(
                    "the statement's rows exceed {} MB",
                    session.shared.config.query_memory >> 20
                ),
            )
            .with_hint("Change fewer rows at a time."));
        }
    }
    // A load that has not spilled holds no more than `held`, which goes the ordinary way.
    Ok(match load {
        Some(load) if load.has_spilled() => Found::Loaded(Box::new(load)),
        _ => Found::Here(held),
    })
}

async fn begin_load(session: &Session, plan: &Plan, epoch: Epoch) -> Result<Load, SqlError> {
    let id = session.shared.next_statement();
    let kind = LoadKind::Replace { read_at: epoch };
    session.cluster().begin_load(RelationId(plan.table.id), id, kind).await
}

/// What becomes of rows whose keys stay: deleted, or put in their own place.
async fn changed(
    session: &Session,
    plan: &Plan,
    all: &RecordBatch,
) -> Result<DeltaChunk, SqlError> {
    let width = plan.table.columns.len();
    let schema = rows::nullable(plan.table.arrow_schema()?.as_ref());
    let mut columns: Vec<ArrayRef> = all.columns()[..width].to_vec();
    if plan.positions.is_empty() {
        let old = rows::batch(&schema, columns, all.num_rows())?;
        return Ok(DeltaChunk::inserts(old).negate());
    }
    set_columns(session, plan, all, &mut columns).await?;
    Ok(DeltaChunk::inserts(rows::batch(&schema, columns, all.num_rows())?))
}

/// The values of SET into the columns of rows, and what follows from them.
async fn set_columns(
    session: &Session,
    plan: &Plan,
    all: &RecordBatch,
    columns: &mut [ArrayRef],
) -> Result<(), SqlError> {
    let width = plan.table.columns.len();
    for (i, position) in plan.positions.iter().enumerate() {
        let column = &plan.table.columns[*position];
        columns[*position] = assign(all.column(width + i), &column.name, column.sql_type()?)?;
    }
    generated::fill(session, &plan.table, columns, all.num_rows()).await?;
    rows::check_not_null(&plan.table, columns)
}

async fn evaluate(
    session: &Session,
    plan: &Plan,
    batches: &[RecordBatch],
) -> Result<Evaluated, SqlError> {
    let table = &plan.table;
    let width = table.columns.len();
    let schema = rows::nullable(table.arrow_schema()?.as_ref());
    let all = match batches.first() {
        None => RecordBatch::new_empty(schema.clone()),
        Some(first) => {
            arrow::compute::concat_batches(&first.schema(), batches).map_err(rows::arrow_error)?
        }
    };
    let old = rows::batch(&schema, all.columns()[..width].to_vec(), all.num_rows())?;
    // A row that several rows of FROM match is changed once, by the first.
    let once = rows::first_of_each_key(table, &old)?;
    let old = rows::take(&old, &once)?;
    let count = Some(old.num_rows() as u64);
    let removed = DeltaChunk::inserts(old.clone()).negate();
    if plan.positions.is_empty() {
        return Ok(Evaluated {
            delta: removed,
            kind: DmlKind::Change,
            rows: count,
            output: old,
            resolves_conflicts: false,
        });
    }
    let mut columns: Vec<ArrayRef> = old.columns().to_vec();
    if old.num_rows() > 0 {
        set_columns(session, plan, &rows::take(&all, &once)?, &mut columns).await?;
    }
    let new = rows::batch(&schema, columns, old.num_rows())?;
    let delta = DeltaChunk::concat(&schema, &[removed, DeltaChunk::inserts(new.clone())])
        .map_err(rows::arrow_error)?;
    Ok(Evaluated {
        delta,
        kind: DmlKind::Change,
        rows: count,
        output: new,
        resolves_conflicts: false,
    })
}
