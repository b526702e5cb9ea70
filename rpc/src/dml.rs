//! Statements on tables, as a frontend sends them to the process that a table runs on.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use async_trait::async_trait;
use millrace_common::{DeltaChunk, Epoch, RelationId};
use prost::bytes::Bytes;
use tokio::sync::Notify;

use crate::call_error::CallError;
use crate::version::StatementId;

/// Tells who waits for a statement that its rows have entered an open epoch: from then on it may be committed, whoever
/// still waits for it. Clones are one flag. Invariant: once set it stays set.
#[derive(Clone, Debug, Default)]
pub struct EntryFlag(Arc<Entry>);

#[derive(Debug, Default)]
struct Entry {
    is_set: AtomicBool,
    set: Notify,
}

impl EntryFlag {
    /// The rows have entered.
    pub fn set(&self) {
        self.0.is_set.store(true, Ordering::Release);
        self.0.set.notify_waiters();
    }

    /// Whether the statement may be committed by now.
    pub fn is_set(&self) -> bool {
        self.0.is_set.load(Ordering::Acquire)
    }

    /// Completes when it is set.
    pub async fn wait(&self) {
        let mut set = std::pin::pin!(self.0.set.notified());
        // Before the flag is looked at: what is set in between is not missed.
        set.as_mut().enable();
        if !self.is_set() {
            set.await;
        }
    }
}

/// What an INSERT does with a key that exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InsertConflict {
    /// PostgreSQL's error 23505.
    Error,
    /// ON CONFLICT DO NOTHING: the row is left out.
    Nothing,
    /// The new row takes the old one's place.
    Overwrite,
}

/// What the rows of a statement are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DmlKind {
    /// New rows only.
    Insert { on_conflict: InsertConflict },
    /// UPDATE and DELETE: old rows with −1 as they were read, new rows with +1. A new row whose key
    /// another row has is a unique violation.
    Change,
    /// Rows of a connector, in their order: of several of one key the last counts. A row with −1 deletes
    /// what has its key, if anything has; only its key columns matter.
    Feed { on_conflict: InsertConflict },
    /// INSERT … ON CONFLICT DO UPDATE: as `Change`, but a new row whose key has come to exist since
    /// is a conflict: evaluated again it becomes an update.
    Upsert,
    /// What a sink brings: the new row of a key takes the place of whatever row has it, and a key whose old
    /// row goes is deleted if it is there.
    Replicate,
}

/// What a load's rows are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadKind {
    /// New rows.
    Insert { on_conflict: InsertConflict },
    /// New rows in place of those with the same key (+1), and rows to delete (−1), each key once, as the
    /// table was at this epoch. A table that has changed since is a conflict.
    Replace { read_at: Epoch },
    /// Rows to delete as they were at this epoch (−1) and rows that are then new (+1), which may have the keys of
    /// the deleted ones. A table that has changed since is a conflict.
    Change { read_at: Epoch, on_repeat: OnRepeat },
}

impl LoadKind {
    /// The epoch that the rows it replaces were read at.
    pub fn read_at(self) -> Option<Epoch> {
        match self {
            LoadKind::Insert { .. } => None,
            LoadKind::Replace { read_at } | LoadKind::Change { read_at, .. } => Some(read_at),
        }
    }
}

/// What it means that two of a statement's new rows have one key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnRepeat {
    /// A duplicate key: UPDATE of keys.
    Duplicate,
    /// ON CONFLICT DO UPDATE would change a row twice: 21000.
    SecondTime,
}

/// Which rows of a table were read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReadRows {
    All,
    /// Those at these storage keys, and that others of these keys are not there.
    Keys(Vec<Bytes>),
    /// Those that a predicate over the table's columns lets through, in the stored form of expressions.
    Where(Bytes),
}

/// One read of a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TableRead {
    pub table: RelationId,
    pub epoch: Epoch,
    pub rows: ReadRows,
}

/// All that a statement's evaluation has read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReadSet {
    pub reads: Vec<TableRead>,
    /// [`HeldLocks::id`] of the locks that the statement holds; the statement releases them.
    pub locks: Option<u64>,
}

/// Locks of tables: other statements of them wait until this is dropped, or the process that holds it is gone.
pub struct HeldLocks {
    /// Names them to the process that the tables run on.
    pub id: u64,
    /// What keeps them.
    pub guard: Box<dyn Any + Send>,
}

/// A change of one table by a transaction.
#[derive(Clone, Debug)]
pub struct TableChange {
    pub table: RelationId,
    pub kind: DmlKind,
    pub delta: DeltaChunk,
}

/// What came of a statement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DmlAnswer {
    Applied {
        /// Visible from this epoch on.
        epoch: Epoch,
        rows: u64,
        /// Rows older than the table's watermark: left out.
        late: u64,
    },
    /// The rows it was evaluated on have changed: evaluate it again.
    Conflict,
}

/// Served by a compute process, called by frontends. [`CallError::Unreachable`] of a statement leaves its outcome
/// unknown: it is looked up by the statement's id.
#[async_trait]
pub trait DmlService: Send + Sync {
    /// Commits a statement's rows; `entered` is set when they may be committed.
    async fn apply_dml(
        &self,
        table: RelationId,
        id: StatementId,
        delta: DeltaChunk,
        kind: DmlKind,
        entered: &EntryFlag,
    ) -> Result<DmlAnswer, CallError>;

    /// Net changes of several tables at one epoch, or none of them; a conflict if what was read has changed.
    async fn apply_transaction(
        &self,
        id: StatementId,
        changes: Vec<TableChange>,
        read: ReadSet,
        entered: &EntryFlag,
    ) -> Result<DmlAnswer, CallError>;

    /// A statement whose rows come in pieces; nothing is visible before it is finished.
    async fn begin_load(
        &self,
        table: RelationId,
        id: StatementId,
        kind: LoadKind,
    ) -> Result<Box<dyn LoadService>, CallError>;

    /// Makes other statements of these tables wait, and waits for those that are under way. `None`: a table has been
    /// started again meanwhile.
    async fn lock_tables(&self, tables: &[RelationId]) -> Result<Option<HeldLocks>, CallError>;

    /// The first of `n` new row ids.
    async fn allocate_row_ids(&self, table: RelationId, n: u64) -> Result<u64, CallError>;

    /// Nobody waits for the answer to a statement any more, which writes to these tables: it ends, unless its rows have
    /// entered, and is refused if it comes later. Returns when nothing of it is under way, whether the log has it or never
    /// will; false: the tables run on another process, and that holds as soon as the log says so. It may be repeated.
    async fn abandon(&self, tables: &[RelationId], id: StatementId) -> Result<bool, CallError>;
}

/// A load under way. Dropped, it has no effect.
#[async_trait]
pub trait LoadService: Send {
    /// Adds rows: full rows of the table, hidden columns included. Returns whether rows have gone to the store.
    async fn append(&mut self, rows: DeltaChunk) -> Result<bool, CallError>;
    /// The epoch that the rows which are replaced were read at.
    async fn read_at(&mut self, epoch: Epoch) -> Result<(), CallError>;
    /// What the rows were computed from: if it has changed by the time they enter, that is a conflict.
    async fn rest_on(&mut self, read: ReadSet) -> Result<(), CallError>;
    /// Checks and commits all rows as one statement. `entered` is set when they have entered the table.
    async fn finish(self: Box<Self>, entered: &EntryFlag) -> Result<DmlAnswer, CallError>;
}
