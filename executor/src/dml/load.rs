//! A statement that comes in pieces (COPY, INSERT … SELECT, and large UPDATEs and DELETEs): invisible
//! until it is finished, and all or nothing (docs/design.md §4, "Statements").
//!
//! Small loads are kept in memory and enter as any statement does. Beyond a threshold rows are sorted
//! and written as runs that no version names; memory stays bounded by the threshold, whatever comes.
//! At the end keys are checked against each other and against the table, in batches, and the runs are
//! linked into the table's version by one commit. Dropping the handle deletes them.

use std::sync::Arc;

use arrow::array::Array;
use millrace_common::{DeltaChunk, Epoch, JobId, SqlError, SqlState, crash};
use millrace_rpc::version::StatementId;
use millrace_storage::stage::Staging;

use super::{DmlError, DmlKind, DmlOutcome, DmlStatement, InsertConflict, Sequencer};
use crate::error::ExecError;
use crate::memory::{MemoryClass, Reservation};
use crate::worker::TableSource;

/// Times a load is entered again because its table's job was restarted.
const MAX_ATTEMPTS: usize = 8;

/// What a load's rows are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadKind {
    /// New rows.
    Insert { on_conflict: InsertConflict },
    /// New rows in place of those with the same key (+1), and rows to delete (−1), each key once, as the
    /// table was at this epoch. A table that has changed since is a conflict.
    Replace { read_at: Epoch },
}

/// Bounds of a load.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LoadLimits {
    /// Bytes kept in memory before rows are written as runs.
    pub spill_bytes: usize,
    /// Bytes that loads which must stay in memory may hold.
    pub memory_bytes: usize,
}

/// A load under way.
pub struct Load {
    tables: TableSource,
    job: JobId,
    table: Arc<Sequencer>,
    id: StatementId,
    kind: LoadKind,
    chunks: Vec<DeltaChunk>,
    staging: Option<Staging>,
    rows: u64,
    row_count: i64,
    account: Reservation,
    limits: LoadLimits,
    /// Other statements of the table wait for this one.
    turn: Option<tokio::sync::OwnedMutexGuard<()>>,
}

impl Load {
    pub(crate) async fn begin(
        tables: TableSource,
        job: JobId,
        id: StatementId,
        kind: LoadKind,
        limits: LoadLimits,
    ) -> Result<Load, DmlError> {
        let table = tables.table(job).await?;
        let account = tables.governor().account(MemoryClass::Statement);
        Ok(Load {
            tables,
            job,
            table,
            id,
            kind,
            chunks: Vec::new(),
            staging: None,
            rows: 0,
            row_count: 0,
            account,
            limits,
            turn: None,
        })
    }

    /// Makes other statements of the table wait until this load is over: what it reads from now on is
    /// what it replaces.
    pub async fn lock_table(&mut self) -> Result<(), DmlError> {
        let turn = Arc::clone(&self.table.turn).lock_owned().await;
        self.table.settle().await?;
        self.turn = Some(turn);
        Ok(())
    }

    /// The epoch that the rows of a `Replace` were read at.
    pub fn read_at(&mut self, epoch: Epoch) {
        self.kind = LoadKind::Replace { read_at: epoch };
    }

    /// Whether rows have gone to the store: the load can no longer be turned into a plain statement.
    pub fn has_spilled(&self) -> bool {
        self.staging.is_some()
    }

    /// Adds rows: full rows of the table, hidden columns included.
    pub async fn append(&mut self, chunk: DeltaChunk) -> Result<(), DmlError> {
        if chunk.is_empty() {
            return Ok(());
        }
        self.rows += chunk.num_rows() as u64;
        if self.staging.is_some() {
            return self.stage(chunk).await;
        }
        self.account.grow(chunk.memory_size());
        self.chunks.push(chunk);
        let replaces = matches!(self.kind, LoadKind::Replace { .. });
        if self.account.bytes() <= self.limits.spill_bytes && !replaces {
            return Ok(());
        }
        if !self.may_spill() {
            return self.check_memory();
        }
        self.staging = Some(self.table.stage().map_err(failed)?);
        for chunk in std::mem::take(&mut self.chunks) {
            self.stage(chunk).await?;
        }
        Ok(())
    }

    /// Rows that replace or give way to others by the order they came in are decided in memory.
    fn may_spill(&self) -> bool {
        if self.table.has_watermark() {
            return false;
        }
        match self.kind {
            LoadKind::Insert { on_conflict } => on_conflict == InsertConflict::Error,
            LoadKind::Replace { .. } => true,
        }
    }

    fn check_memory(&self) -> Result<(), DmlError> {
        if self.account.bytes() <= self.limits.memory_bytes {
            return Ok(());
        }
        let message = format!("the statement's rows exceed {} MB", self.limits.memory_bytes >> 20);
        Err(SqlError::new(SqlState::STATEMENT_TOO_COMPLEX, message)
            .with_hint("Load the data in several smaller statements.")
            .into())
    }

    async fn stage(&mut self, chunk: DeltaChunk) -> Result<(), DmlError> {
        let keyed = self.table.keyed(chunk).map_err(failed)?;
        let Some(staging) = &mut self.staging else { return Ok(()) };
        let weights = &keyed.delta.weights;
        let removed = weights.as_ref().map_or(0, |w| w.values().iter().filter(|w| **w < 0).count());
        self.row_count += match self.kind {
            LoadKind::Insert { .. } => keyed.keys.len() as i64,
            LoadKind::Replace { .. } => -(removed as i64),
        };
        staging.write(keyed.keys, keyed.delta.weights, keyed.delta.batch);
        self.account.set(staging.memory_size());
        if staging.memory_size() > self.limits.spill_bytes {
            staging.spill().await.map_err(|e| failed(e.into()))?;
            self.account.set(0);
        }
        Ok(())
    }

    /// Checks and commits all rows as one statement.
    pub async fn finish(mut self) -> Result<DmlOutcome, DmlError> {
        let Some(mut staging) = self.staging.take() else { return self.finish_in_memory().await };
        staging.spill().await.map_err(|e| failed(e.into()))?;
        self.account.set(0);
        crash::point("load-before-link");
        for _ in 0..MAX_ATTEMPTS {
            match self.enter(&mut staging).await {
                // A restarted job: the rows are where they were.
                Err(DmlError::Conflict) if matches!(self.kind, LoadKind::Insert { .. }) => {
                    self.table = self.tables.table(self.job).await?;
                }
                other => return other,
            }
        }
        Err(DmlError::Conflict)
    }

    async fn finish_in_memory(mut self) -> Result<DmlOutcome, DmlError> {
        let LoadKind::Insert { on_conflict } = self.kind else {
            return Err(SqlError::internal("a small load that replaces rows").into());
        };
        let chunks = std::mem::take(&mut self.chunks);
        let delta = DeltaChunk::concat(self.table.schema(), &chunks)
            .map_err(|e| DmlError::Sql(SqlError::internal(e.to_string())))?;
        drop(chunks);
        let kind = DmlKind::Insert { on_conflict };
        for _ in 0..MAX_ATTEMPTS {
            let statement = DmlStatement { id: self.id, delta: delta.clone(), kind, mark: None };
            match self.table.apply(statement).await {
                Err(DmlError::Conflict) => self.table = self.tables.table(self.job).await?,
                other => return other,
            }
        }
        Err(DmlError::Conflict)
    }

    /// Links the staged rows, alone in their epoch.
    async fn enter(&mut self, staging: &mut Staging) -> Result<DmlOutcome, DmlError> {
        let turn = match self.turn.take() {
            Some(turn) => turn,
            None => {
                let turn = Arc::clone(&self.table.turn).lock_owned().await;
                self.table.settle().await?;
                turn
            }
        };
        match self.kind {
            LoadKind::Insert { .. } => self.table.check_staged(staging).await?,
            LoadKind::Replace { read_at } => self.table.check_unchanged_since(read_at)?,
        }
        let fate = self.table.enter_load(self.id, staging.keep(), self.row_count)?;
        let epoch = Sequencer::committed_with_turn(fate, turn).await?;
        Ok(DmlOutcome { epoch, rows_affected: self.rows, kept: None, late: 0 })
    }

    /// Forgets all rows. The same as dropping it.
    pub fn abort(self) {}
}

fn failed(e: ExecError) -> DmlError {
    DmlError::Sql(e.into_sql())
}
