//! INSERT, UPDATE, DELETE, TRUNCATE: a statement is a query whose rows become a net delta.
//!
//! Every statement is evaluated at one epoch, the newest committed, to full rows: −1 the old, +1 the
//! new. The table's sequencer takes the delta only if the old rows are still what they were, else it
//! reports a conflict and the statement is evaluated again ([`MAX_ATTEMPTS`], then 40001). So
//! concurrent `SET x = x + 1` lose nothing without locks (docs/design.md §4, "Statements"). What it has read
//! besides goes with the delta, and must not have changed either ([`crate::session::reads`]).

pub mod assign;
pub mod attempts;
pub mod conflict;
pub mod describe;
pub mod insert;
pub mod insert_select;
mod repeats;
pub mod rewrite;
pub mod rows;
pub mod spool;
pub mod update;
pub mod with;
mod with_order;

use arrow::array::{RecordBatch, UInt32Array};
use futures::StreamExt;
use millrace_common::{DeltaChunk, RelationId, SqlError, SqlState};
use millrace_executor::dml::DmlKind;
use millrace_planner::bind::misplaced_calls;
use millrace_rpc::catalog::{Relation, RelationKind};
use sqlparser::ast::{Query, SelectItem, Statement as Sql};

use crate::cluster::{BatchStream, DmlResult};
use crate::query::SessionCatalog;
use crate::session::Session;
use crate::session::reads::Written;
use crate::wire::Field;

/// Evaluations of one statement before it is given up for a conflict.
pub const MAX_ATTEMPTS: usize = 32;

/// What a statement did.
pub struct Done {
    pub tag: String,
    pub returning: Option<Returned>,
}

/// What RETURNING gives: columns, and rows that have been computed.
pub type Returned = (Vec<Field>, BatchStream);

/// One evaluation of a statement.
pub struct Evaluated {
    pub delta: DeltaChunk,
    pub kind: DmlKind,
    /// Rows for the command tag; `None`: what the sequencer counts.
    pub rows: Option<u64>,
    /// Rows for RETURNING.
    pub output: RecordBatch,
    /// ON CONFLICT has been resolved against the rows that were there.
    pub resolves_conflicts: bool,
}

pub async fn execute(session: &Session, statement: &Sql) -> Result<Done, SqlError> {
    check_calls(statement)?;
    match statement {
        Sql::Insert(insert) => insert::execute(session, insert).await,
        Sql::Update(update) => update::execute_update(session, update).await,
        Sql::Delete(delete) => update::execute_delete(session, delete).await,
        other => Err(SqlError::unsupported(format!("the statement {other}"))),
    }
}

/// An error for aggregates and their like where a statement has none.
fn check_calls(statement: &Sql) -> Result<(), SqlError> {
    match misplaced_calls::in_change(statement) {
        Some(found) => Err(found.error),
        None => Ok(()),
    }
}

/// Sends a delta to the table; `None`: evaluate again.
pub async fn apply(
    session: &Session,
    table: &Relation,
    evaluated: &Evaluated,
) -> Result<Option<u64>, SqlError> {
    // A statement that changes nothing takes its place where it has read.
    if evaluated.delta.is_empty() && (session.stages_writes() || !session.reads_are_torn()) {
        return Ok(Some(evaluated.rows.unwrap_or(0)));
    }
    if session.stages_writes() {
        let staged = session.stage(table, evaluated).await?;
        if staged.is_some() && session.in_parts() {
            note_unchanged(session, table, &evaluated.delta)?;
        }
        return Ok(staged.map(|rows| evaluated.rows.unwrap_or(rows)));
    }
    let written = Written {
        table: table.id,
        delta: &evaluated.delta,
        new_keys: evaluated.resolves_conflicts,
    };
    let Some(read) = session.read_set(&[written])? else { return Ok(None) };
    let id = session.shared.next_statement().await?;
    let (relation, delta) = (RelationId(table.id), evaluated.delta.clone());
    let (cluster, entered) = (session.cluster(), session.step.entered());
    let result = if read.is_empty() {
        cluster.apply_dml(relation, id, delta, evaluated.kind, entered).await?
    } else {
        let mut changes = vec![(relation, delta, evaluated.kind)];
        changes.retain(|(_, delta, _)| !delta.is_empty());
        cluster.apply_transaction(id, changes, read, entered).await?
    };
    Ok(match result {
        DmlResult::Applied { rows, late, .. } => {
            session.note_late(late);
            // Late rows are not among those that a statement counts itself.
            Some(if late > 0 { rows } else { evaluated.rows.unwrap_or(rows) })
        }
        DmlResult::Conflict => None,
    })
}

/// A row that an UPDATE leaves as it was is changed all the same: other parts of the statement leave it alone.
fn note_unchanged(session: &Session, table: &Relation, delta: &DeltaChunk) -> Result<(), SqlError> {
    let removed = (0..delta.num_rows()).filter(|row| delta.weight(*row) < 0);
    let removed: Vec<u32> = removed.map(|row| row as u32).collect();
    if !removed.is_empty() {
        let old = rows::take(&delta.batch, &UInt32Array::from(removed))?;
        session.note_changed(table.id, &rows::storage_keys(table, &old)?);
    }
    Ok(())
}

pub fn too_many_conflicts() -> SqlError {
    SqlError::new(
        SqlState::SERIALIZATION_FAILURE,
        "could not serialize access due to concurrent update",
    )
    .with_hint("The transaction might succeed if retried.")
}

/// 54001 for what has to be held in memory and is too much.
pub fn too_large(limit: usize) -> SqlError {
    SqlError::new(
        SqlState::STATEMENT_TOO_COMPLEX,
        format!("the statement's rows exceed {} MB", limit >> 20),
    )
    .with_hint("Change fewer rows at a time.")
}

/// Only tables take DML.
pub fn check_table(relation: &Relation, verb: &str) -> Result<(), SqlError> {
    let kind = match RelationKind::try_from(relation.kind) {
        Ok(RelationKind::Table) => return Ok(()),
        Ok(RelationKind::MaterializedView) => "materialized view",
        Ok(RelationKind::View) => "view",
        Ok(RelationKind::Source) => "source",
        Ok(RelationKind::Index) => "index",
        _ => "relation",
    };
    Err(SqlError::new(
        SqlState::WRONG_OBJECT_TYPE,
        format!("cannot {verb} {kind} \"{}\"", relation.name),
    ))
}

/// Evaluates RETURNING over the rows a statement touched.
pub async fn returning(
    session: &Session,
    table: &Relation,
    alias: &str,
    items: Option<&[SelectItem]>,
    rows: RecordBatch,
) -> Result<Option<Returned>, SqlError> {
    let Some(items) = items else { return Ok(None) };
    let (fields, batches) = returned(session, table, alias, items, rows).await?;
    Ok(Some((fields, futures::stream::iter(batches.into_iter().map(Ok)).boxed())))
}

async fn returned(
    session: &Session,
    table: &Relation,
    alias: &str,
    items: &[SelectItem],
    rows: RecordBatch,
) -> Result<(Vec<Field>, Vec<RecordBatch>), SqlError> {
    let (view, query) = returning_query(session, table, alias, items, rows)?;
    session.collect(&view, &query).await
}

/// RETURNING as a query over the rows; the queries in it read the table as it was before the statement.
fn returning_query(
    session: &Session,
    table: &Relation,
    alias: &str,
    items: &[SelectItem],
    rows: RecordBatch,
) -> Result<(SessionCatalog, Query), SqlError> {
    let name = rows::in_hand(table.id, "returned");
    let mut query = rewrite::empty_query()?;
    let select = rewrite::select_of(&mut query)?;
    select.projection = items.to_vec();
    select.from = vec![rewrite::aliased(&name, alias)];
    let mut view = session.catalog_view();
    view.add_temporary(rows::renamed(table, &name), rows::mem_table(rows)?);
    Ok((view, query))
}
