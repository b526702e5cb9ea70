//! INSERT … SELECT of any number of rows: as they come into the table's load, or all at once if they are few.

use arrow::array::RecordBatch;
use futures::StreamExt;
use millrace_common::{DeltaChunk, Epoch, RelationId, SqlError};
use millrace_executor::dml::{DmlError, InsertConflict, LoadKind, OnRepeat};
use millrace_rpc::catalog::Relation;
use sqlparser::ast::{DoUpdate, Insert, Query, SetExpr};

use super::Done;
use super::assign::{assign, check_fields};
use super::attempts::Attempts;
use super::conflict::{Conflict, upsert};
use super::insert::{
    check_width, complete_rows, load_conflict, refuse_generated, source_rows, typed_select,
};
use super::spool::Spool;
use super::update::finish;
use crate::cluster::{BatchStream, Load, ReadSet};
use crate::query::SessionCatalog;
use crate::session::Session;

/// What an INSERT … SELECT that may be of any size does with keys that exist. `None`: the statement is evaluated as a
/// whole.
pub fn streamed(
    session: &Session,
    table: &Relation,
    insert: &Insert,
    conflict: &Conflict<'_>,
) -> Option<InsertConflict> {
    if is_values(insert.source.as_deref()?) || session.stages_writes() {
        return None;
    }
    let on_conflict = match conflict {
        Conflict::Declared => load_conflict(table),
        Conflict::Nothing if table.primary_key => InsertConflict::Nothing,
        Conflict::Nothing => InsertConflict::Error,
        Conflict::Update(_) => return None,
    };
    // Which rows RETURNING has is known beforehand only if all of them enter.
    (insert.returning.is_none() || on_conflict == InsertConflict::Error).then_some(on_conflict)
}

pub fn is_values(query: &Query) -> bool {
    matches!(query.body.as_ref(), SetExpr::Values(_))
}

/// Where the rows of an INSERT … SELECT go.
pub struct Into<'a> {
    pub table: &'a Relation,
    pub alias: &'a str,
    pub targets: &'a [usize],
    pub insert: &'a Insert,
}

impl Into<'_> {
    /// The statement's rows as they come, of all of the table's columns.
    async fn rows(&self, session: &Session, view: &SessionCatalog) -> Result<FullRows, SqlError> {
        let Some(query) = self.insert.source.as_deref() else {
            return Err(SqlError::internal("an INSERT without rows"));
        };
        let query = typed_select(self.table, query, self.targets)?;
        let (fields, stream) = session.stream(view, &query).await?;
        check_width(fields.len(), self.targets.len(), !self.insert.columns.is_empty())?;
        check_fields(&fields, self.table, self.targets)?;
        refuse_generated(self.table, &self.targets[..fields.len().min(self.targets.len())])?;
        Ok(FullRows { stream })
    }

    async fn begin(&self, session: &Session, kind: LoadKind) -> Result<Load, SqlError> {
        let id = session.shared.next_statement().await?;
        session.cluster().begin_load(RelationId(self.table.id), id, kind).await
    }

    pub async fn load(
        &self,
        session: &Session,
        on_conflict: InsertConflict,
    ) -> Result<Done, SqlError> {
        let mut attempts = Attempts::of(session, Some(self.table.id));
        loop {
            attempts.next(session).await?;
            if let Some(done) = self.try_load(session, on_conflict, &mut attempts).await? {
                return Ok(done);
            }
        }
    }

    /// `None`: what it has read has changed meanwhile.
    async fn try_load(
        &self,
        session: &Session,
        on_conflict: InsertConflict,
        attempts: &mut Attempts,
    ) -> Result<Option<Done>, SqlError> {
        let mut rows = self.rows(session, &session.catalog_view()).await?;
        let mut load = self.begin(session, LoadKind::Insert { on_conflict }).await?;
        let items = self.insert.returning.as_deref();
        let mut returned = items.map(|items| Spool::new(self.table, self.alias, items));
        let mut count = 0;
        while let Some(batch) = rows.next(session, self).await? {
            count += batch.num_rows();
            if let Some(spool) = &mut returned {
                spool.add(session, batch.clone()).await?;
            }
            load.append(DeltaChunk::inserts(batch)).await?;
        }
        let returning = match returned {
            Some(spool) => Some(spool.finish(session).await?),
            None => None,
        };
        if load.has_spilled() {
            // It is long: evaluated again it has the tables to itself.
            attempts.take_turn();
        }
        let mut read = session.read_set(&[])?;
        if count == 0 {
            // It changes nothing, and takes its place where it has read. Its locks, if it has any, end here: the load
            // would wait for them.
            read = Some(ReadSet::default());
        }
        match finish(session, load, read).await {
            Ok(done) => {
                session.note_late(done.late);
                let tag = format!("INSERT 0 {}", done.rows_affected);
                Ok(Some(Done { tag, returning }))
            }
            Err(DmlError::Conflict) => Ok(None),
            Err(e) => Err(e.into()),
        }
    }

    /// All rows, of all of the table's columns, defaults and row ids included. `None`: they take more bytes than
    /// `limit`.
    pub async fn full_rows(
        &self,
        session: &Session,
        limit: usize,
    ) -> Result<Option<RecordBatch>, SqlError> {
        let (given, count) = match self.insert.source.as_deref() {
            None => (Vec::new(), 1),
            Some(query) => {
                let targets = (self.targets, !self.insert.columns.is_empty());
                match source_rows(session, self.table, query, targets, limit).await? {
                    Some(rows) => rows,
                    None => return Ok(None),
                }
            }
        };
        complete_rows(session, self.table, self.targets, given, count).await.map(Some)
    }

    /// ON CONFLICT DO UPDATE of many rows, some at a time, all as the table was when the first were read.
    pub async fn load_upserts(
        &self,
        session: &Session,
        update: &DoUpdate,
    ) -> Result<Done, SqlError> {
        let mut attempts = Attempts::of(session, Some(self.table.id));
        loop {
            attempts.next(session).await?;
            let kind = LoadKind::Change { read_at: Epoch::ZERO, on_repeat: OnRepeat::SecondTime };
            let mut load = self.begin(session, kind).await?;
            let first = session.read_epoch(&[RelationId(self.table.id)]).await?;
            let view = session.catalog_view();
            let mut rows = self.rows(session, &view).await?;
            load.read_at(first);
            let mut count = 0;
            while let Some(batch) = rows.next(session, self).await? {
                let evaluated = upsert(session, self.table, self.alias, batch, update).await?;
                count += evaluated.rows.unwrap_or(0);
                load.append(evaluated.delta).await?;
            }
            if count == 0 {
                return Ok(Done { tag: "INSERT 0 0".to_owned(), returning: None });
            }
            let read = session.read_set_beside(self.table.id)?;
            match finish(session, load, read).await {
                Ok(_) => return Ok(Done { tag: format!("INSERT 0 {count}"), returning: None }),
                Err(DmlError::Conflict) => attempts.take_turn(),
                Err(e) => return Err(e.into()),
            }
        }
    }
}

/// Rows of this many bytes are held.
pub const HELD_BYTES: usize = 8 << 20;

/// Rows of an INSERT … SELECT.
struct FullRows {
    stream: BatchStream,
}

impl FullRows {
    async fn next(
        &mut self,
        session: &Session,
        into: &Into<'_>,
    ) -> Result<Option<RecordBatch>, SqlError> {
        let Some(batch) = self.stream.next().await else { return Ok(None) };
        let batch = batch?;
        let columns = batch.columns().iter().zip(into.targets).map(|(array, target)| {
            let column = &into.table.columns[*target];
            assign(array, &column.name, column.sql_type()?)
        });
        let columns = columns.collect::<Result<Vec<_>, SqlError>>()?;
        complete_rows(session, into.table, into.targets, columns, batch.num_rows()).await.map(Some)
    }
}
