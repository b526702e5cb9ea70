//! UPDATE, DELETE and TRUNCATE: the rows to change are what a query over the table finds.

use std::sync::Arc;

use arrow::array::{ArrayRef, RecordBatch, UInt32Array};
use arrow::datatypes::DataType;
use futures::StreamExt;
use millrace_common::{DeltaChunk, Epoch, RelationId, SqlError};
use millrace_executor::dml::DmlKind;
use millrace_executor::dml::{DmlError, DmlOutcome, LoadKind, OnRepeat};
use millrace_rpc::catalog::Relation;
use sqlparser::ast::{
    Delete, Distinct, Expr, FromTable, ObjectName, Query, SelectItem, TableFactor, TableWithJoins,
    Update, UpdateTableFromKind,
};

use super::assign::{assign, check_fields};
use super::attempts::Attempts;
use super::insert::{assigned_value, assignment_position, set_twice};
use super::spool::Spool;
use super::{Done, Evaluated, apply, check_table, returning, rewrite, rows};
use crate::cluster::{BatchStream, Load, ReadSet};
use crate::ddl::generated;
use crate::query::catalog_view::{SessionCatalog, fold};
use crate::session::Session;

/// A statement as a query: all columns of the rows it finds, then the values it sets.
pub struct Plan {
    pub table: Arc<Relation>,
    pub alias: String,
    pub query: Query,
    /// Columns set, in the order of the values.
    positions: Vec<usize>,
    /// The query finds every row once: nothing is joined to the table.
    alone: bool,
}

impl Plan {
    /// Rows move to other keys.
    fn moves(&self) -> bool {
        // What is generated follows from whatever is set.
        let moved = |k: &u32| {
            let at = *k as usize;
            self.positions.contains(&at) || self.table.columns[at].generated_sql.is_some()
        };
        !self.positions.is_empty() && self.table.key.iter().any(moved)
    }

    /// The query with every row of the table once, whatever is joined to it.
    fn once(&self) -> Result<Query, SqlError> {
        let mut query = self.query.clone();
        if !self.alone {
            let key = self.table.key.iter().map(|k| &self.table.columns[*k as usize].name);
            let key = key.map(|name| rewrite::column(&self.alias, name)).collect();
            rewrite::select_of(&mut query)?.distinct = Some(Distinct::On(key));
        }
        Ok(query)
    }

    /// How the rows of a large statement get into the table.
    fn load_kind(&self, read_at: Epoch) -> LoadKind {
        match self.moves() {
            true => LoadKind::Change { read_at, on_repeat: OnRepeat::Duplicate },
            false => LoadKind::Replace { read_at },
        }
    }
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
    only_grows(&table, verb)?;
    let alias = alias.as_ref().map_or_else(|| table.name.clone(), |a| fold(&a.name));
    Ok((table, alias))
}

/// What reads an append-only table keeps no more than it needs for rows that come.
pub(super) fn only_grows(table: &Relation, verb: &str) -> Result<(), SqlError> {
    if !table.append_only {
        return Ok(());
    }
    let error = SqlError::unsupported(format!("{verb} of append-only table \"{}\"", table.name));
    Err(error.with_hint("Create the table without APPEND ONLY."))
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
    let mut from = Vec::new();
    if let Some(UpdateTableFromKind::BeforeSet(tables) | UpdateTableFromKind::AfterSet(tables)) =
        &update.from
    {
        from.extend(tables.iter().cloned());
    }
    // A join holds what comes first in memory, and the table may be larger than that.
    from.push(update.table.clone());
    let alone = from.len() == 1 && from.iter().all(|f| f.joins.is_empty());
    let mut query = base_query(&table, &alias, from, update.selection.clone())?;
    let mut positions = Vec::new();
    let select = rewrite::select_of(&mut query)?;
    for (i, assignment) in update.assignments.iter().enumerate() {
        let position = assignment_position(&table, &assignment.target)?;
        if positions.contains(&position) {
            return Err(set_twice(&table, position));
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
    let mut from: Vec<TableWithJoins> = delete.using.iter().flatten().cloned().collect();
    from.extend(tables.iter().cloned());
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

/// A table whose rows can be removed.
pub fn to_truncate(view: &SessionCatalog, name: &ObjectName) -> Result<Arc<Relation>, SqlError> {
    let table = view.resolve(name)?;
    check_table(&table, "truncate")?;
    only_grows(&table, "TRUNCATE")?;
    Ok(table)
}

/// Removes all rows of a table, see [`to_truncate`].
pub async fn truncate(session: &Session, table: Arc<Relation>) -> Result<(), SqlError> {
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
    items: Option<&[SelectItem]>,
) -> Result<Done, SqlError> {
    let mut attempts = Attempts::of(session, Some(plan.table.id));
    let mut large = false;
    loop {
        attempts.next(session).await?;
        if large {
            let mut loading = load(session, plan, items).await?;
            if loading.rows == 0 {
                large = false;
                continue;
            }
            let returning = match loading.returned.take() {
                Some(spool) => Some(spool.finish(session).await?),
                None => None,
            };
            let read = session.read_set_beside(plan.table.id)?;
            match finish(session, loading.load, read).await {
                Ok(_) => {
                    return Ok(Done { tag: format!("{verb} {}", loading.rows), returning });
                }
                Err(DmlError::Conflict) => {
                    // Others write to the table all the time: they wait in the second attempt.
                    attempts.take_turn();
                    continue;
                }
                Err(e) => return Err(e.into()),
            }
        }
        let Some(batches) = held(session, plan).await? else {
            large = true;
            continue;
        };
        let evaluated = evaluate(session, plan, &batches).await?;
        // Before anything is applied: a RETURNING that fails leaves nothing behind.
        let output = evaluated.output.clone();
        let returning = returning(session, &plan.table, &plan.alias, items, output).await?;
        if let Some(count) = apply(session, &plan.table, &evaluated).await? {
            return Ok(Done { tag: format!("{verb} {count}"), returning });
        }
    }
}

/// Has a load take effect, if what it was computed from is still so; without that it cannot be.
pub(super) async fn finish(
    session: &Session,
    mut load: Load,
    read: Option<ReadSet>,
) -> Result<DmlOutcome, DmlError> {
    load.rest_on(read.ok_or(DmlError::Conflict)?)?;
    load.finish(session.step.entered()).await
}

/// Rows of this many bytes are held.
const HELD_BYTES: usize = 8 << 20;

/// The rows that a statement changes; `None`: too many to be held.
async fn held(session: &Session, plan: &Plan) -> Result<Option<Vec<RecordBatch>>, SqlError> {
    let may_load = !session.stages_writes();
    let limit = if may_load { HELD_BYTES } else { session.shared.config.query_memory };
    let mut stream = stream(session, &session.catalog_view(), plan, &plan.query).await?;
    let (mut held, mut bytes) = (Vec::new(), 0);
    while let Some(batch) = stream.next().await {
        let batch = batch?;
        bytes += batch.get_array_memory_size();
        if bytes > limit {
            return if may_load { Ok(None) } else { Err(super::too_large(limit)) };
        }
        held.push(batch);
    }
    Ok(Some(held))
}

async fn stream(
    session: &Session,
    view: &SessionCatalog,
    plan: &Plan,
    query: &Query,
) -> Result<BatchStream, SqlError> {
    let (fields, stream) = session.stream(view, query).await?;
    check_fields(&fields[plan.table.columns.len()..], &plan.table, &plan.positions)?;
    Ok(stream)
}

/// A large statement on its way into the table.
struct Loading {
    load: Load,
    rows: u64,
    returned: Option<Spool>,
}

async fn load(
    session: &Session,
    plan: &Plan,
    items: Option<&[SelectItem]>,
) -> Result<Loading, SqlError> {
    let id = session.shared.next_statement().await?;
    let kind = plan.load_kind(Epoch::ZERO);
    let mut load = session.cluster().begin_load(RelationId(plan.table.id), id, kind).await?;
    let view = session.catalog_view();
    let mut stream = stream(session, &view, plan, &plan.once()?).await?;
    load.read_at(view.epoch.get().copied().unwrap_or_default());
    let mut returned = items.map(|items| Spool::new(&plan.table, &plan.alias, items));
    let mut rows = 0;
    while let Some(batch) = stream.next().await {
        let batch = batch?;
        rows += batch.num_rows() as u64;
        let (delta, output) = changed(session, plan, &batch).await?;
        if let Some(spool) = &mut returned {
            spool.add(session, output).await?;
        }
        load.append(delta).await?;
    }
    Ok(Loading { load, rows, returned })
}

/// What becomes of rows: deleted, put in their own place, or moved to other keys; and the rows for RETURNING.
async fn changed(
    session: &Session,
    plan: &Plan,
    all: &RecordBatch,
) -> Result<(DeltaChunk, RecordBatch), SqlError> {
    let width = plan.table.columns.len();
    let schema = rows::nullable(plan.table.arrow_schema()?.as_ref());
    let mut columns: Vec<ArrayRef> = all.columns()[..width].to_vec();
    let old = rows::batch(&schema, columns.clone(), all.num_rows())?;
    let removed = DeltaChunk::inserts(old.clone()).negate();
    if plan.positions.is_empty() {
        return Ok((removed, old));
    }
    set_columns(session, plan, all, &mut columns).await?;
    let new = rows::batch(&schema, columns, all.num_rows())?;
    let added = DeltaChunk::inserts(new.clone());
    let delta = match plan.moves() {
        true => DeltaChunk::concat(&schema, &[removed, added]).map_err(rows::arrow_error)?,
        false => added,
    };
    Ok((delta, new))
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
    rows::round_seconds(&plan.table, columns)?;
    generated::fill(session, &plan.table, columns, all.num_rows()).await?;
    rows::round_seconds(&plan.table, columns)?;
    rows::check_not_null(&plan.table, columns)
}

/// Of rows those that no other part of the statement has changed: each is changed once.
fn unwritten(
    session: &Session,
    table: &Relation,
    rows_found: &RecordBatch,
    which: UInt32Array,
) -> Result<UInt32Array, SqlError> {
    if !session.in_parts() {
        return Ok(which);
    }
    let keys = rows::storage_keys(table, &rows::take(rows_found, &which)?)?;
    let Some(written) = session.written_by_parts(table.id, &keys) else { return Ok(which) };
    let left = which.values().iter().zip(&written).filter(|(_, written)| !**written);
    Ok(UInt32Array::from_iter_values(left.map(|(row, _)| *row)))
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
    let once = unwritten(session, table, &old, once)?;
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
