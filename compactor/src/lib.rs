//! The compaction worker (docs/design.md §9): stateless, takes one task at a time from meta and
//! answers with the edit that swaps runs. Nothing it writes counts until that edit is committed, so a
//! task may be lost, repeated or done twice.
//!
//! It runs inside a process that has the job open, and takes the tables' schemas from there.

use std::sync::Arc;

use async_trait::async_trait;
use millrace_common::{SqlError, TableId};
use millrace_rpc::services::{CompactionTask, CompactorService};
use millrace_rpc::version::VersionEdit;
use millrace_storage::{StateStore, StorageError, TableDesc, compaction};
use tokio::sync::Semaphore;

/// Compactions at the same time: enough to keep the store busy without starving queries of cores.
const DEFAULT_PARALLELISM: usize = 2;

/// What can go wrong with a task, beyond storage.
#[derive(Debug, thiserror::Error)]
pub enum CompactorError {
    #[error("compaction task {task} has no inputs")]
    NoInputs { task: u64 },
    #[error("compaction task {task} mixes runs of several state tables")]
    MixedTables { task: u64 },
    #[error("state table {table} of compaction task {task} is not open here")]
    UnknownTable { task: u64, table: TableId },
    #[error("the compactor is shutting down")]
    ShuttingDown,
    #[error(transparent)]
    Storage(#[from] StorageError),
}

impl From<CompactorError> for SqlError {
    fn from(e: CompactorError) -> SqlError {
        match e {
            CompactorError::Storage(e) => e.into(),
            other => SqlError::internal(other.to_string()),
        }
    }
}

/// Does compactions, a few at a time.
pub struct Compactor {
    store: Arc<StateStore>,
    slots: Semaphore,
}

impl Compactor {
    pub fn new(store: Arc<StateStore>) -> Compactor {
        Compactor::with_parallelism(store, DEFAULT_PARALLELISM)
    }

    pub fn with_parallelism(store: Arc<StateStore>, parallelism: usize) -> Compactor {
        Compactor { store, slots: Semaphore::new(parallelism.max(1)) }
    }

    async fn run(&self, task: CompactionTask) -> Result<VersionEdit, CompactorError> {
        let _slot = self.slots.acquire().await.map_err(|_| CompactorError::ShuttingDown)?;
        let desc = self.table(&task)?;
        let CompactionTask { inputs, target_level, horizon, bottom, .. } = &task;
        let edit =
            compaction::compact(&self.store, &desc, inputs, *target_level, *horizon, *bottom).await?;
        tracing::debug!(
            task = task.task_id,
            job = %task.job,
            table = %desc.id,
            inputs = inputs.len(),
            outputs = edit.add_runs.len(),
            "compacted"
        );
        Ok(edit)
    }

    /// The one table that all inputs belong to.
    fn table(&self, task: &CompactionTask) -> Result<Arc<TableDesc>, CompactorError> {
        let first = task.inputs.first().ok_or(CompactorError::NoInputs { task: task.task_id })?;
        if task.inputs.iter().any(|r| r.table_id != first.table_id) {
            return Err(CompactorError::MixedTables { task: task.task_id });
        }
        let table = TableId(first.table_id);
        let unknown = CompactorError::UnknownTable { task: task.task_id, table };
        self.store.job(task.job).and_then(|job| job.table(table)).ok_or(unknown)
    }
}

#[async_trait]
impl CompactorService for Compactor {
    async fn compact(&self, task: CompactionTask) -> Result<VersionEdit, SqlError> {
        Ok(self.run(task).await?)
    }
}
