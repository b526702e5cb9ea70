//! Statements on their way into tables that are in this process, or in another one.

use millrace_common::{DeltaChunk, Epoch};
use millrace_executor::dml::{self, DmlError, DmlOutcome, EntryFlag, Read, TableLocks};

use crate::remote_cluster::{HeldLocks, RemoteLoad};

/// Tables whose other statements wait until this is dropped.
pub enum Locks {
    Here(TableLocks),
    Elsewhere(HeldLocks),
}

/// All that a statement's evaluation has read, and the tables that have waited for it since before.
#[derive(Default)]
pub struct ReadSet {
    pub reads: Vec<Read>,
    pub locks: Option<Locks>,
}

impl ReadSet {
    /// Whether there is nothing to check, nor anybody who waits.
    pub fn is_empty(&self) -> bool {
        self.reads.is_empty() && self.locks.is_none()
    }

    /// As the worker of this process takes it. `None`: its locks are of tables elsewhere.
    pub(crate) fn into_local(self) -> Option<dml::ReadSet> {
        let locks = match self.locks {
            None => None,
            Some(Locks::Here(locks)) => Some(locks),
            Some(Locks::Elsewhere(_)) => return None,
        };
        Some(dml::ReadSet { reads: self.reads, locks })
    }
}

/// A load under way. Dropped, it has no effect.
pub enum Load {
    Here(Box<dml::Load>),
    Elsewhere(Box<RemoteLoad>),
}

impl Load {
    /// What the rows were computed from: if it has changed by the time they enter, that is a conflict.
    pub fn rest_on(&mut self, read: ReadSet) -> Result<(), DmlError> {
        match self {
            Load::Here(load) => load.rest_on(read.into_local().ok_or(DmlError::Conflict)?),
            Load::Elsewhere(load) => load.rest_on(read)?,
        }
        Ok(())
    }

    /// The epoch that the rows which are replaced were read at.
    pub fn read_at(&mut self, epoch: Epoch) {
        match self {
            Load::Here(load) => load.read_at(epoch),
            Load::Elsewhere(load) => load.read_at(epoch),
        }
    }

    /// Whether rows have gone to the store: the load can no longer be turned into a plain statement.
    pub fn has_spilled(&self) -> bool {
        match self {
            Load::Here(load) => load.has_spilled(),
            Load::Elsewhere(load) => load.has_spilled(),
        }
    }

    /// Adds rows: full rows of the table, hidden columns included.
    pub async fn append(&mut self, rows: DeltaChunk) -> Result<(), DmlError> {
        match self {
            Load::Here(load) => load.append(rows).await,
            Load::Elsewhere(load) => load.append(rows).await,
        }
    }

    /// Checks and commits all rows as one statement. `entered` is set when they have entered the table.
    pub async fn finish(self, entered: &EntryFlag) -> Result<DmlOutcome, DmlError> {
        match self {
            Load::Here(load) => load.finish(entered).await,
            Load::Elsewhere(load) => load.finish(entered).await,
        }
    }
}
