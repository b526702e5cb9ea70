//! Statements on the tables of this worker, as frontends of other processes send them.
//!
//! Locks that a frontend holds are kept here and named by a number: they go with the call that holds them, or into the
//! statement that names them.
//!
//! A frontend that has lost the connection abandons its statement: that ends here, and what has entered of it is waited
//! for, so that the log tells what became of it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use async_trait::async_trait;
use millrace_common::collections::HashMap;
use millrace_common::{DeltaChunk, Epoch, RelationId, SqlError};
use millrace_rpc::call_error::CallError;
use millrace_rpc::dml::{
    self, DmlAnswer, DmlKind, DmlService, EntryFlag, HeldLocks, LoadKind, LoadService, TableChange,
};
use millrace_rpc::version::StatementId;
use parking_lot::Mutex;

use super::Worker;
use super::calls::StatementCalls;
use crate::dml::{DmlError, DmlOutcome, DmlStatement, Load, Read, ReadRows, ReadSet, TableLocks};

/// Locks of tables that frontends hold, by the number that they know them by.
#[derive(Default)]
pub(super) struct LocksOfFrontends {
    next: AtomicU64,
    held: Mutex<HashMap<u64, TableLocks>>,
}

impl LocksOfFrontends {
    fn keep(self: &Arc<Self>, locks: TableLocks) -> HeldLocks {
        // 0 stands for none.
        let id = self.next.fetch_add(1, Ordering::Relaxed) + 1;
        self.held.lock().insert(id, locks);
        HeldLocks { id, guard: Box::new(Guard { locks: Arc::clone(self), id }) }
    }

    /// Those that a statement brings. `None`: they are gone, with the connection that has held them.
    fn take(&self, id: u64) -> Option<TableLocks> {
        self.held.lock().remove(&id)
    }

    /// What a frontend's evaluation has read. `None`: the locks that it counts on are gone.
    fn read_set(&self, read: dml::ReadSet) -> Option<ReadSet> {
        let locks = match read.locks {
            None => None,
            Some(id) => Some(self.take(id)?),
        };
        let read_of = |read: dml::TableRead| {
            let rows = match read.rows {
                dml::ReadRows::Keys(keys) => {
                    ReadRows::Keys(Arc::new(keys.iter().map(|key| key.to_vec()).collect()))
                }
                // A predicate is not computed here: more counts as read than was.
                dml::ReadRows::All | dml::ReadRows::Where(_) => ReadRows::All,
            };
            Read { table: read.table, epoch: read.epoch, rows }
        };
        Some(ReadSet { reads: read.reads.into_iter().map(read_of).collect(), locks })
    }
}

/// Whoever holds it keeps the locks of a frontend, unless a statement has taken them.
struct Guard {
    locks: Arc<LocksOfFrontends>,
    id: u64,
}

impl Drop for Guard {
    fn drop(&mut self) {
        let released = self.locks.take(self.id);
        drop(released);
    }
}

/// What came of a statement. A conflict is an answer; an error of the statement is one of the call.
fn answered(outcome: Result<DmlOutcome, DmlError>) -> Result<DmlAnswer, CallError> {
    match outcome {
        Ok(DmlOutcome { epoch, rows_affected: rows, late, .. }) => {
            Ok(DmlAnswer::Applied { epoch, rows, late })
        }
        Err(DmlError::Conflict) => Ok(DmlAnswer::Conflict),
        Err(e) => Err(SqlError::from(e).into()),
    }
}

#[async_trait]
impl DmlService for Worker {
    async fn apply_dml(
        &self,
        table: RelationId,
        id: StatementId,
        delta: DeltaChunk,
        kind: DmlKind,
        entered: &EntryFlag,
    ) -> Result<DmlAnswer, CallError> {
        let entered = entered.clone();
        let statement = DmlStatement { id, delta, kind, mark: None, entered, announced: None };
        let work = async { answered(Worker::apply_dml(self, table, statement).await) };
        self.shared.calls_of_frontends.run(id, work).await
    }

    async fn apply_transaction(
        &self,
        id: StatementId,
        changes: Vec<TableChange>,
        read: dml::ReadSet,
        entered: &EntryFlag,
    ) -> Result<DmlAnswer, CallError> {
        let work = async {
            let read = self.shared.locks_of_frontends.read_set(read);
            let Some(read) = read else { return Ok(DmlAnswer::Conflict) };
            let parts = changes.into_iter().map(|c| (c.table, c.delta, c.kind)).collect();
            answered(Worker::apply_transaction(self, id, parts, read, entered).await)
        };
        self.shared.calls_of_frontends.run(id, work).await
    }

    async fn begin_load(
        &self,
        table: RelationId,
        id: StatementId,
        kind: LoadKind,
    ) -> Result<Box<dyn LoadService>, CallError> {
        let load = Worker::begin_load(self, table, id, kind).await.map_err(SqlError::from)?;
        let locks = Arc::clone(&self.shared.locks_of_frontends);
        let calls = Arc::clone(&self.shared.calls_of_frontends);
        Ok(Box::new(ServedLoad { id, load, locks, calls, is_stale: false }))
    }

    async fn lock_tables(&self, tables: &[RelationId]) -> Result<Option<HeldLocks>, CallError> {
        match Worker::lock_tables(self, tables).await {
            Ok(locks) => Ok(Some(self.shared.locks_of_frontends.keep(locks))),
            Err(DmlError::Conflict) => Ok(None),
            Err(e) => Err(SqlError::from(e).into()),
        }
    }

    async fn allocate_row_ids(&self, table: RelationId, n: u64) -> Result<u64, CallError> {
        let first = Worker::allocate_row_ids(self, table, n).await?;
        u64::try_from(first).map_err(|_| SqlError::internal("a row id that is below zero").into())
    }

    async fn abandon(&self, tables: &[RelationId], id: StatementId) -> Result<bool, CallError> {
        self.shared.calls_of_frontends.abandon(id).await?;
        for table in tables {
            if !self.shared.settle(*table).await? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// A load of a frontend.
struct ServedLoad {
    id: StatementId,
    load: Load,
    locks: Arc<LocksOfFrontends>,
    calls: Arc<StatementCalls>,
    /// The locks that it was to rest on are gone.
    is_stale: bool,
}

#[async_trait]
impl LoadService for ServedLoad {
    async fn append(&mut self, rows: DeltaChunk) -> Result<bool, CallError> {
        self.load.append(rows).await.map_err(SqlError::from)?;
        Ok(self.load.has_spilled())
    }

    async fn read_at(&mut self, epoch: Epoch) -> Result<(), CallError> {
        self.load.read_at(epoch);
        Ok(())
    }

    async fn rest_on(&mut self, read: dml::ReadSet) -> Result<(), CallError> {
        match self.locks.read_set(read) {
            Some(read) => self.load.rest_on(read),
            None => self.is_stale = true,
        }
        Ok(())
    }

    async fn finish(self: Box<Self>, entered: &EntryFlag) -> Result<DmlAnswer, CallError> {
        let ServedLoad { id, load, calls, is_stale, .. } = *self;
        let work = async {
            match is_stale {
                true => Ok(DmlAnswer::Conflict),
                false => answered(load.finish(entered).await),
            }
        };
        calls.run(id, work).await
    }
}
