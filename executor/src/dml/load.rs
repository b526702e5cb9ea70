//! A statement that comes in pieces (COPY): invisible until it is finished, and all or nothing.
//!
//! Pieces are kept in memory, accounted for and bounded; dropping the handle forgets them.

use std::sync::Arc;

use millrace_common::{DeltaChunk, SqlError, SqlState};
use millrace_rpc::version::StatementId;

use super::{DmlError, DmlKind, DmlOutcome, DmlStatement, InsertConflict, Sequencer};
use crate::memory::{MemoryClass, MemoryGovernor, Reservation};

/// A load under way.
pub struct Load {
    table: Arc<Sequencer>,
    id: StatementId,
    on_conflict: InsertConflict,
    chunks: Vec<DeltaChunk>,
    account: Reservation,
    limit: usize,
}

impl Load {
    pub(crate) fn new(
        table: Arc<Sequencer>,
        id: StatementId,
        on_conflict: InsertConflict,
        governor: &Arc<MemoryGovernor>,
        limit: usize,
    ) -> Load {
        let account = governor.account(MemoryClass::Statement);
        Load { table, id, on_conflict, chunks: Vec::new(), account, limit }
    }

    /// Adds rows: full rows of the table, hidden columns included.
    pub fn append(&mut self, chunk: DeltaChunk) -> Result<(), DmlError> {
        self.account.grow(chunk.memory_size());
        if self.account.bytes() > self.limit {
            let message = format!("the statement's rows exceed {} MB", self.limit >> 20);
            return Err(SqlError::new(SqlState::STATEMENT_TOO_COMPLEX, message)
                .with_hint("Load the data in several smaller statements.")
                .into());
        }
        if !chunk.is_empty() {
            self.chunks.push(chunk);
        }
        Ok(())
    }

    /// Checks and commits all rows as one statement.
    pub async fn finish(mut self) -> Result<DmlOutcome, DmlError> {
        let chunks = std::mem::take(&mut self.chunks);
        let delta = DeltaChunk::concat(self.table.schema(), &chunks)
            .map_err(|e| DmlError::Sql(SqlError::internal(e.to_string())))?;
        drop(chunks);
        let kind = DmlKind::Insert { on_conflict: self.on_conflict };
        self.table.apply(DmlStatement { id: self.id, delta, kind }).await
    }

    /// Forgets all rows. The same as dropping it.
    pub fn abort(self) {}
}
