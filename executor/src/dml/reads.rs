//! What the evaluation of a statement has read besides the rows that it writes, and the check that all of that is
//! still so when the statement enters (docs/design.md §4, "Statements").
//!
//! A read names a table, the epoch it was read at, and which rows decided: all, those of some keys, or those that a
//! filter lets through. It holds while no such row has been inserted, changed or deleted since that epoch: in what is
//! committed, in epochs on their way, and in the open one.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use arrow::array::RecordBatch;
use millrace_common::collections::HashSet;
use millrace_common::{Epoch, JobId};
use tokio::sync::OwnedMutexGuard;

use super::{DmlError, Sequencer};
use crate::changelog_cache::HubChunk;

/// Whether any of a table's rows may be among those that were read.
pub type Filter = Arc<dyn Fn(&RecordBatch) -> bool + Send + Sync>;

/// Which rows of a table a read has looked at.
#[derive(Clone)]
pub enum ReadRows {
    All,
    /// Those at these storage keys, and that others of these keys are not there.
    Keys(Arc<HashSet<Vec<u8>>>),
    Where(Filter),
}

impl fmt::Debug for ReadRows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ReadRows::All => "all",
            ReadRows::Keys(_) => "keys",
            ReadRows::Where(_) => "where",
        })
    }
}

/// One read of a table.
#[derive(Clone, Debug)]
pub struct Read {
    pub table: JobId,
    pub epoch: Epoch,
    pub rows: ReadRows,
}

/// All that a statement's evaluation has read, and the tables that have waited for it since before.
#[derive(Default)]
pub struct ReadSet {
    pub reads: Vec<Read>,
    pub locks: Option<TableLocks>,
}

impl ReadSet {
    /// Whether there is nothing to check, nor anybody who waits.
    pub fn is_empty(&self) -> bool {
        self.reads.is_empty() && self.locks.is_none()
    }
}

/// A read with its table.
pub(crate) struct TableRead {
    pub table: Arc<Sequencer>,
    pub epoch: Epoch,
    pub rows: ReadRows,
}

impl TableRead {
    pub(super) fn holds(&self) -> bool {
        !self.table.changed_since(self.epoch, &self.rows)
    }
}

/// The turns of tables: their other statements wait until this is dropped.
pub struct TableLocks(BTreeMap<JobId, (Arc<Sequencer>, OwnedMutexGuard<()>)>);

impl TableLocks {
    /// Takes the turns in the order of the tables' ids, as everybody does, so that nobody waits in a circle.
    pub(super) async fn take(tables: BTreeMap<JobId, Arc<Sequencer>>) -> TableLocks {
        let mut held = BTreeMap::new();
        for (job, table) in tables {
            let turn = Arc::clone(&table.turn).lock_owned().await;
            held.insert(job, (table, turn));
        }
        TableLocks(held)
    }

    /// The same, and waits until all that has entered these tables is committed: what is read from now on stays so.
    pub(crate) async fn settled(
        tables: BTreeMap<JobId, Arc<Sequencer>>,
    ) -> Result<TableLocks, DmlError> {
        let locks = TableLocks::take(tables).await;
        for (table, _) in locks.0.values() {
            table.wait_until_quiescent().await?;
        }
        Ok(locks)
    }

    /// With the turns of these tables too. Those that are not held are taken only if nobody has them: to wait for
    /// them here might be to wait in a circle.
    pub(super) fn with(
        mut self,
        tables: &BTreeMap<JobId, Arc<Sequencer>>,
    ) -> Result<TableLocks, DmlError> {
        for (job, table) in tables {
            match self.0.get(job) {
                Some((held, _)) if Arc::ptr_eq(held, table) => {}
                // Its job was started again.
                Some(_) => return Err(DmlError::Conflict),
                None => {
                    let turn = Arc::clone(&table.turn).try_lock_owned();
                    let turn = turn.map_err(|_| DmlError::Conflict)?;
                    self.0.insert(*job, (Arc::clone(table), turn));
                }
            }
        }
        Ok(self)
    }
}

impl Sequencer {
    /// Whether rows that a read has looked at have changed since its epoch. Says so too where that is not known any
    /// more. The caller holds the turn, so that nothing enters meanwhile.
    pub(super) fn changed_since(&self, epoch: Epoch, rows: &ReadRows) -> bool {
        let Some((committed, pending)) = self.pending() else { return true };
        let recent = match committed <= epoch {
            true => Vec::new(),
            false => match self.recent(epoch, committed) {
                Some(recent) => recent,
                None => return true,
            },
        };
        let mut chunks = recent.iter().flat_map(|delta| &delta.chunks).chain(&pending);
        chunks.any(|chunk| self.touches(rows, chunk))
    }

    fn touches(&self, rows: &ReadRows, chunk: &HubChunk) -> bool {
        match rows {
            ReadRows::All => true,
            ReadRows::Where(filter) => filter(chunk.rows()),
            ReadRows::Keys(read) => match self.keys_of(chunk) {
                Ok(keys) => keys.iter().flatten().any(|key| read.contains(key)),
                Err(_) => true,
            },
        }
    }
}
