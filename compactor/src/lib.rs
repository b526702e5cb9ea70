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
        let bound = self.store.job(task.job).and_then(|job| job.bound(desc.id));
        let CompactionTask { inputs, target_level, horizon, bottom, .. } = &task;
        let edit = compaction::compact(
            &self.store,
            &desc,
            bound,
            inputs,
            *target_level,
            *horizon,
            *bottom,
        )
        .await?;
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

#[cfg(test)]
mod tests {
    use arrow::array::{BinaryArray, RecordBatch, RecordBatchOptions};
    use arrow::datatypes::{Schema, SchemaRef};
    use futures::TryStreamExt;
    use millrace_common::{Epoch, JobId, RelationId};
    use millrace_rpc::catalog::Relation;
    use millrace_rpc::version::{JobVersion, RunMeta};
    use millrace_storage::{JobStore, RowStorage, ScanOptions, StateClass, StoreOptions};
    use object_store::memory::InMemory;

    use super::*;

    const JOB: JobId = RelationId(20000);
    const TABLE: TableId = TableId(3);

    async fn open() -> (Arc<StateStore>, Arc<JobStore>) {
        let store =
            StateStore::open(StoreOptions::new(Arc::new(InMemory::new()), 1)).await.unwrap();
        let desc = TableDesc {
            id: TABLE,
            name: "rows".into(),
            value_schema: SchemaRef::new(Schema::empty()),
            storage: RowStorage::Keyed,
            class: StateClass::PointUpdate,
            relation: true,
            retention: None,
        };
        let job = store.open_job(JOB, vec![desc], &JobVersion::default()).await.unwrap();
        (store, job)
    }

    /// One flushed commit that writes some keys.
    async fn flushed(job: &Arc<JobStore>, epoch: u64, keys: &[&str]) -> Vec<RunMeta> {
        let options = RecordBatchOptions::new().with_row_count(Some(keys.len()));
        let no_columns = SchemaRef::new(Schema::empty());
        let values = RecordBatch::try_new_with_options(no_columns, vec![], &options).unwrap();
        let mut writer = job.writer(TABLE).unwrap();
        writer.write(BinaryArray::from_iter_values(keys), None, values);
        let runs = writer.seal().unwrap();
        job.publish(Epoch(epoch), job.persist(runs).await.unwrap());
        let edit = job.flush().await.unwrap();
        job.apply_edit(&edit);
        edit.add_runs
    }

    fn task(inputs: Vec<RunMeta>) -> CompactionTask {
        let relation = Relation::default();
        let (horizon, bottom) = (Epoch::ZERO, true);
        CompactionTask { task_id: 1, job: JOB, relation, inputs, target_level: 1, horizon, bottom }
    }

    #[tokio::test]
    async fn runs_are_swapped_and_rows_stay() {
        let (store, job) = open().await;
        let mut inputs = flushed(&job, 1, &["aaa", "bbb"]).await;
        inputs.extend(flushed(&job, 2, &["bbb", "ccc"]).await);
        let edit = Compactor::new(Arc::clone(&store)).compact(task(inputs.clone())).await.unwrap();
        assert_eq!(edit.remove_runs, inputs.iter().map(|r| r.run_id).collect::<Vec<_>>());
        assert_eq!(edit.add_runs.len(), 1);
        assert_eq!(
            (edit.add_runs[0].level, edit.add_runs[0].rows),
            (1, 4),
            "both versions of bbb stay"
        );

        job.apply_edit(&edit);
        let scan = job.snapshot(Epoch(2)).unwrap().scan(TABLE, ScanOptions::default());
        let batches: Vec<_> = scan.try_collect().await.unwrap();
        assert_eq!(batches.iter().map(|b| b.values.num_rows()).sum::<usize>(), 3);
    }

    #[tokio::test]
    async fn a_task_that_makes_no_sense_is_refused() {
        let (store, job) = open().await;
        let compactor = Compactor::new(Arc::clone(&store));
        assert!(compactor.compact(task(vec![])).await.is_err());
        let runs = flushed(&job, 1, &["aaa"]).await;
        store.close_job(JOB);
        assert!(compactor.compact(task(runs)).await.is_err());
    }
}
