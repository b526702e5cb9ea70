//! The compaction worker (docs/design.md §9): stateless, takes one task at a time from meta and
//! answers with the edit that swaps runs. Nothing it writes counts until that edit is committed, so a
//! task may be lost, repeated or done twice.
//!
//! A task has all that it needs to know of the job. Inside a process that has the job open the schemas of its tables are
//! taken from there; elsewhere the task describes them ([`Describe`]), and the log is not needed. What it replaces is
//! then what the log names, which every process applies in its order.

// Tests may take what clippy.toml keeps from the engine.
#![cfg_attr(test, allow(clippy::disallowed_methods, clippy::disallowed_types))]

mod handed_over;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use millrace_common::collections::HashMap;
use millrace_common::{JobId, SqlError, TableId};
use millrace_rpc::log::MoveParts;
use millrace_rpc::services::{CompactionTask, CompactorService, LivePart, PartKind};
use millrace_rpc::version::VersionEdit;
use millrace_storage::{StateStore, StorageError, TableDesc, compaction, segment_copy};
use tokio::sync::Semaphore;

pub use handed_over::HandedOver;

/// Compactions at the same time: enough to keep the store busy without starving queries of cores.
const DEFAULT_PARALLELISM: usize = 2;
/// Longest wait for runs that the log names and the open job does not have yet.
const INPUTS_WAIT: Duration = Duration::from_secs(10);

/// What can go wrong with a task, beyond storage.
#[derive(Debug, thiserror::Error)]
pub enum CompactorError {
    #[error("compaction task {task} has no inputs")]
    NoInputs { task: u64 },
    #[error("compaction task {task} mixes runs of several state tables")]
    MixedTables { task: u64 },
    #[error("state table {table} of compaction task {task} is not known here")]
    UnknownTable { task: u64, table: TableId },
    #[error("the inputs of compaction task {task} have not come to the open job")]
    InputsMissing { task: u64 },
    #[error("runs that are to be moved have not come to the open job {job}")]
    PartsMissing { job: JobId },
    #[error("the state table of a compaction task cannot be described: {0}")]
    Description(SqlError),
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

/// Describes the state table of a task by the task alone; `None`: its job has no such table.
pub type Describe = fn(&CompactionTask) -> Result<Option<TableDesc>, SqlError>;

/// Does compactions, a few at a time.
pub struct Compactor {
    store: Arc<StateStore>,
    slots: Semaphore,
    /// `None`: jobs are open here.
    describe: Option<Describe>,
}

impl Compactor {
    pub fn new(store: Arc<StateStore>) -> Compactor {
        Compactor::with_parallelism(store, DEFAULT_PARALLELISM)
    }

    pub fn with_parallelism(store: Arc<StateStore>, parallelism: usize) -> Compactor {
        Compactor { store, slots: Semaphore::new(parallelism.max(1)), describe: None }
    }

    /// One in a process that runs no jobs.
    pub fn elsewhere(store: Arc<StateStore>, describe: Describe) -> Compactor {
        Compactor { describe: Some(describe), ..Compactor::new(store) }
    }

    async fn run(&self, task: CompactionTask) -> Result<VersionEdit, CompactorError> {
        let desc = self.table(&task)?;
        if self.describe.is_none() {
            self.wait_for_inputs(&task).await?;
        }
        let _slot = self.slots.acquire().await.map_err(|_| CompactorError::ShuttingDown)?;
        let CompactionTask { inputs, table, target_level, horizon, bottom, .. } = &task;
        let edit = compaction::compact(
            &self.store,
            &desc,
            table.bound,
            inputs,
            *target_level,
            *horizon,
            *bottom,
        )
        .await?;
        tracing::debug!(
            task = task.task_id,
            job = %task.relation.label(),
            table = %desc.id,
            inputs = inputs.len(),
            outputs = edit.add_runs.len(),
            "compacted"
        );
        Ok(edit)
    }

    /// A commit's runs are in the log before the job has published them. A compaction of them that took
    /// effect in between would replace nothing, and the published runs would stay beside what it made:
    /// rows counted twice, and deleted rows back again.
    async fn wait_for_inputs(&self, task: &CompactionTask) -> Result<(), CompactorError> {
        let inputs: Vec<u64> = task.inputs.iter().map(|r| r.run_id).collect();
        let there = self.store.wait_for_runs(task.job, &inputs);
        match tokio::time::timeout(INPUTS_WAIT, there).await {
            Ok(true) => Ok(()),
            Ok(false) | Err(_) => Err(CompactorError::InputsMissing { task: task.task_id }),
        }
    }

    async fn copy(&self, parts: Vec<LivePart>) -> Result<MoveParts, CompactorError> {
        let mut runs: HashMap<JobId, Vec<u64>> = HashMap::default();
        for part in &parts {
            if let PartKind::Run { run_id, .. } = part.kind {
                runs.entry(part.job).or_default().push(run_id);
            }
        }
        // As for a compaction: a job that took in runs after it was told that they have moved would go on reading them,
        // and keep them, where they were. One that is not open will read the log.
        for (job, runs) in runs {
            if self.describe.is_some() {
                break;
            }
            let there = self.store.wait_for_runs(job, &runs);
            if tokio::time::timeout(INPUTS_WAIT, there).await.is_err() {
                return Err(CompactorError::PartsMissing { job });
            }
        }
        let _slot = self.slots.acquire().await.map_err(|_| CompactorError::ShuttingDown)?;
        Ok(segment_copy::copy_parts(&self.store, parts).await?)
    }

    /// The one table that all inputs belong to.
    fn table(&self, task: &CompactionTask) -> Result<Arc<TableDesc>, CompactorError> {
        let first = task.inputs.first().ok_or(CompactorError::NoInputs { task: task.task_id })?;
        if task.inputs.iter().any(|r| r.table_id != first.table_id) {
            return Err(CompactorError::MixedTables { task: task.task_id });
        }
        let table = TableId(first.table_id);
        let desc = match self.describe {
            None => self.store.job(task.job).and_then(|job| job.table(table)),
            Some(describe) => describe(task).map_err(CompactorError::Description)?.map(Arc::new),
        };
        desc.ok_or(CompactorError::UnknownTable { task: task.task_id, table })
    }
}

#[async_trait]
impl CompactorService for Compactor {
    async fn compact(&self, task: CompactionTask) -> Result<VersionEdit, SqlError> {
        Ok(self.run(task).await?)
    }

    async fn copy_parts(&self, parts: Vec<LivePart>) -> Result<MoveParts, SqlError> {
        Ok(self.copy(parts).await?)
    }
}

#[cfg(test)]
mod tests {
    use arrow::array::{BinaryArray, RecordBatch, RecordBatchOptions};
    use arrow::datatypes::{Schema, SchemaRef};
    use futures::TryStreamExt;
    use millrace_common::access::AccessClass;
    use millrace_common::{Epoch, JobId, RelationId};
    use millrace_rpc::catalog::Relation;
    use millrace_rpc::services::MergedTable;
    use millrace_rpc::version::{JobVersion, RunMeta};
    use millrace_storage::{JobStore, Persisted, RowStorage, ScanOptions, Snapshot, StoreOptions};
    use object_store::memory::InMemory;
    use object_store::path::Path;
    use object_store::{ObjectStore, ObjectStoreExt};

    use super::*;

    const JOB: JobId = RelationId(20000);
    const TABLE: TableId = TableId(3);

    async fn open() -> (Arc<StateStore>, Arc<JobStore>) {
        let options = StoreOptions::new(Arc::new(InMemory::new()), 1);
        open_with(options, RowStorage::Keyed).await
    }

    /// One whose every commit is written as runs.
    async fn open_direct() -> (Arc<StateStore>, Arc<JobStore>) {
        let options =
            StoreOptions { direct_run_bytes: 0, ..StoreOptions::new(Arc::new(InMemory::new()), 1) };
        open_with(options, RowStorage::Multiset).await
    }

    async fn open_with(
        options: StoreOptions,
        storage: RowStorage,
    ) -> (Arc<StateStore>, Arc<JobStore>) {
        let store = StateStore::open(options).await.unwrap();
        let desc = TableDesc {
            id: TABLE,
            name: "rows".into(),
            value_schema: SchemaRef::new(Schema::empty()),
            storage,
            class: AccessClass::PointUpdate,
            relation: true,
            retention: None,
        };
        let job = store.open_job(JOB, vec![desc], &JobVersion::default()).await.unwrap();
        (store, job)
    }

    /// One commit that writes some keys: durable, not published.
    async fn persisted(job: &Arc<JobStore>, number: u64, keys: &[&str]) -> Persisted {
        let options = RecordBatchOptions::new().with_row_count(Some(keys.len()));
        let no_columns = SchemaRef::new(Schema::empty());
        let values = RecordBatch::try_new_with_options(no_columns, vec![], &options).unwrap();
        let mut writer = job.writer(TABLE).unwrap();
        writer.write(BinaryArray::from_iter_values(keys), None, values);
        let runs = writer.seal().unwrap();
        job.persist(number, runs).await.unwrap()
    }

    /// One flushed commit that writes some keys.
    async fn flushed(job: &Arc<JobStore>, epoch: u64, keys: &[&str]) -> Vec<RunMeta> {
        job.publish(Epoch(epoch), persisted(job, epoch, keys).await);
        let edit = job.flush().await.unwrap();
        job.apply_edit(&edit);
        edit.add_runs
    }

    fn task(inputs: Vec<RunMeta>) -> CompactionTask {
        CompactionTask {
            task_id: 1,
            job: JOB,
            relation: Relation::default(),
            inputs,
            table: MergedTable::default(),
            target_level: 1,
            horizon: Epoch::ZERO,
            bottom: true,
        }
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

    /// The runs of a commit as the log has them, which names them first.
    fn logged(persisted: &Persisted, epoch: u64) -> Vec<RunMeta> {
        let mut runs = persisted.edit.clone().unwrap().add_runs;
        runs.iter_mut().for_each(|r| (r.min_epoch, r.max_epoch) = (epoch, epoch));
        runs
    }

    #[tokio::test(start_paused = true)]
    async fn runs_that_are_in_the_log_and_not_published_are_waited_for() {
        let (store, job) = open_direct().await;
        let first = persisted(&job, 1, &["aaa", "bbb"]).await;
        let mut inputs = logged(&first, 1);
        job.publish(Epoch(1), first);
        let second = persisted(&job, 2, &["bbb", "ccc"]).await;
        inputs.extend(logged(&second, 2));
        let compactor = Compactor::new(Arc::clone(&store));
        let mut compacting = compactor.compact(task(inputs));
        let early = tokio::time::timeout(INPUTS_WAIT / 2, &mut compacting).await;
        assert!(early.is_err(), "it would replace runs that are not here yet");
        job.publish(Epoch(2), second);
        job.apply_edit(&compacting.await.unwrap());

        let scan = job.snapshot(Epoch(2)).unwrap().scan(TABLE, ScanOptions::default());
        let batches: Vec<_> = scan.try_collect().await.unwrap();
        let weights = batches.iter().flat_map(|b| b.weights.values().to_vec());
        assert_eq!(weights.collect::<Vec<_>>(), [1, 2, 1]);
        assert_eq!(job.stats().tables[0].disk_runs, 1);
    }

    #[tokio::test(start_paused = true)]
    async fn runs_that_never_come_are_given_up() {
        let (store, job) = open_direct().await;
        let inputs = logged(&persisted(&job, 1, &["aaa"]).await, 1);
        assert!(Compactor::new(store).compact(task(inputs)).await.is_err());
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

    /// Where a job's runs lie, as the log has it.
    fn parts_of(runs: &[RunMeta]) -> Vec<LivePart> {
        let part = |r: &RunMeta| LivePart {
            job: JOB,
            object: r.object.clone(),
            offset: r.offset,
            length: r.length,
            kind: PartKind::Run { run_id: r.run_id, meta_length: r.meta_length },
        };
        runs.iter().map(part).collect()
    }

    async fn rows(snapshot: &Snapshot) -> usize {
        let scan = snapshot.scan(TABLE, ScanOptions::default());
        let batches: Vec<_> = scan.try_collect().await.unwrap();
        batches.iter().map(|b| b.values.num_rows()).sum()
    }

    #[tokio::test]
    async fn runs_that_move_are_read_where_they_are_and_were() {
        let objects: Arc<InMemory> = Arc::default();
        let options = StoreOptions::new(Arc::clone(&objects) as Arc<dyn ObjectStore>, 1);
        let (store, job) = open_with(options, RowStorage::Keyed).await;
        let mut runs = flushed(&job, 1, &["aaa", "bbb"]).await;
        runs.extend(flushed(&job, 2, &["bbb", "ccc"]).await);
        let before = job.snapshot(Epoch(2)).unwrap();
        let moved = Compactor::new(Arc::clone(&store)).copy_parts(parts_of(&runs)).await.unwrap();
        assert_eq!(moved.parts.len(), 2);
        job.move_parts(&moved.object, &moved.parts);

        for run in &job.snapshot(Epoch(2)).unwrap().runs(TABLE) {
            assert_eq!(run.object, moved.object);
        }
        let old = runs[0].object.clone();
        assert!(store.holds_object(&old), "a reader is there");
        assert_eq!(rows(&before).await, 3);
        drop(before);
        for object in [&runs[0].object, &runs[1].object] {
            assert!(!store.holds_object(object));
            objects.delete(&Path::from(object.as_str())).await.unwrap();
        }
        let reopened = StateStore::open(StoreOptions::new(objects, 2)).await.unwrap();
        let version = JobVersion {
            epoch: 2,
            runs: job.snapshot(Epoch(2)).unwrap().runs(TABLE),
            ..JobVersion::default()
        };
        let tables = vec![job.table(TABLE).unwrap().as_ref().clone()];
        let job = reopened.open_job(JOB, tables, &version).await.unwrap();
        assert_eq!(rows(&job.snapshot(Epoch(2)).unwrap()).await, 3);
    }

    #[tokio::test]
    async fn damaged_bytes_are_not_copied() {
        for (block_bytes, partition_bytes) in [(None, None), (Some(64), Some(150))] {
            let objects: Arc<InMemory> = Arc::default();
            let store = Arc::clone(&objects) as Arc<dyn ObjectStore>;
            let options = StoreOptions::new(store, 1);
            let options = StoreOptions { block_bytes, partition_bytes, ..options };
            let (store, job) = open_with(options, RowStorage::Keyed).await;
            let keys: Vec<String> = (0..60).map(|n| format!("{n:03}")).collect();
            let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
            let runs = flushed(&job, 1, &keys).await;
            let path = Path::from(runs[0].object.as_str());
            let whole = objects.get(&path).await.unwrap().bytes().await.unwrap();
            let compactor = Compactor::new(store);
            // Blocks, partitions of the index, the index.
            for at in (5..whole.len() - 4).step_by(whole.len() / 40) {
                let mut damaged = whole.to_vec();
                damaged[at] ^= 1;
                objects.put(&path, damaged.into()).await.unwrap();
                assert!(compactor.copy_parts(parts_of(&runs)).await.is_err(), "byte {at}");
            }
            objects.put(&path, whole.into()).await.unwrap();
            compactor.copy_parts(parts_of(&runs)).await.unwrap();
        }
    }

    async fn found(job: &Arc<JobStore>, key: &str) -> usize {
        let keys = BinaryArray::from_iter_values([key]);
        job.snapshot(Epoch::MAX).unwrap().multi_get(TABLE, keys).await.unwrap().len()
    }

    #[tokio::test]
    async fn blocks_that_were_hot_are_in_memory_before_the_new_runs_are_used() {
        let options = StoreOptions {
            // A few keys a block.
            block_bytes: Some(64),
            ..StoreOptions::new(Arc::new(InMemory::new()), 1)
        };
        let (store, job) = open_with(options, RowStorage::Keyed).await;
        let keys: Vec<String> = (0..1_000).map(|i| format!("{i:06}")).collect();
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        let mut inputs = flushed(&job, 1, &keys).await;
        inputs.extend(flushed(&job, 2, &keys[..500]).await);
        let cache = store.cache();
        cache.clear_memory();
        for hot in ["000100", "000700"] {
            assert_eq!(found(&job, hot).await, 1);
        }
        let held = cache.stats().memory_bytes;
        let task = CompactionTask { horizon: Epoch::MAX, ..task(inputs) };
        let edit = Compactor::new(Arc::clone(&store)).compact(task).await.unwrap();
        let after = cache.stats().memory_bytes;
        assert!(
            after > held && after <= held * 4,
            "{held} and {after} bytes: not only what was hot"
        );
        job.apply_edit(&edit);
        let misses = cache.stats().misses;
        for hot in ["000100", "000700"] {
            assert_eq!(found(&job, hot).await, 1);
        }
        assert_eq!(cache.stats().misses, misses, "they are in memory");
        assert_eq!(found(&job, "000400").await, 1);
        assert!(cache.stats().misses > misses, "others are not");
    }

    /// Flushes of ten keys each over a thousand, with what a scheduler does in between; bytes that compactions have
    /// written, and how many of them there were.
    async fn churn(lookups: usize) -> (u64, usize, usize) {
        let (store, job) = open().await;
        let compactor = Compactor::new(Arc::clone(&store));
        let keys: Vec<String> = (0..20_000).map(|i| format!("{i:09}")).collect();
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        let mut runs = flushed(&job, 1, &keys).await;
        let (mut written, mut merges) = (0, 0);
        for epoch in 2..40u64 {
            let ends: Vec<&str> = keys.iter().step_by(2_500).copied().collect();
            runs.extend(flushed(&job, epoch, &ends).await);
            for n in 0..lookups {
                assert_eq!(found(&job, keys[n * 100]).await, 1);
            }
            let reads = |table| job.reads_since_merge(TableId(table));
            let class = |_| AccessClass::PointUpdate;
            while let Some(picked) =
                compaction::pick(&runs, &[], class, reads, |_| false, |_| false)
            {
                let task = CompactionTask {
                    target_level: picked.target_level,
                    bottom: picked.bottom,
                    horizon: Epoch::MAX,
                    ..task(picked.inputs)
                };
                let edit = compactor.compact(task).await.unwrap();
                job.apply_edit(&edit);
                runs.retain(|r| !edit.remove_runs.contains(&r.run_id));
                runs.extend(edit.add_runs.clone());
                written += edit.add_runs.iter().map(|r| r.length).sum::<u64>();
                merges += usize::from(picked.target_level > 0);
            }
        }
        (written, merges, runs.len())
    }

    #[tokio::test]
    async fn a_table_that_nobody_looks_up_is_not_rewritten() {
        let (unread, unread_merges, unread_runs) = churn(0).await;
        let (read, read_merges, _) = churn(100).await;
        println!("unread: {unread} bytes, {unread_merges} merges; read: {read}, {read_merges}");
        assert!(unread * 2 <= read, "{unread} bytes against {read}");
        assert!(unread_merges < read_merges);
        assert!(unread_runs <= 32, "{unread_runs} runs");
    }

    #[tokio::test(start_paused = true)]
    async fn a_writer_that_compaction_does_not_keep_up_with_is_slowed_and_not_stopped() {
        let options = StoreOptions {
            direct_run_bytes: 0,
            overlap_limit: 3,
            ..StoreOptions::new(Arc::new(InMemory::new()), 1)
        };
        let (store, job) = open_with(options, RowStorage::Keyed).await;
        let mut inputs = Vec::new();
        for epoch in 1..=200u64 {
            let began = tokio::time::Instant::now();
            let persisted = persisted(&job, epoch, &["aaa", "bbb"]).await;
            let waited = began.elapsed();
            assert!(waited <= Duration::from_secs(1), "commit {epoch} waited {waited:?}");
            assert_eq!(waited > Duration::ZERO, epoch > 4, "commit {epoch}");
            inputs.extend(logged(&persisted, epoch));
            job.publish(Epoch(epoch), persisted);
        }
        assert_eq!(store.delayed_commits().commits, 196);
        let overlap = job.delayed_by().unwrap();
        assert_eq!((overlap.table, overlap.runs), (TABLE, 200));

        // What waits goes on when runs have been merged.
        let began = tokio::time::Instant::now();
        let mut waiting = Box::pin(persisted(&job, 201, &["aaa"]));
        let early = tokio::time::timeout(Duration::from_millis(500), &mut waiting).await;
        assert!(early.is_err(), "it waits for a second");
        let edit = Compactor::new(store).compact(task(inputs)).await.unwrap();
        job.apply_edit(&edit);
        waiting.await;
        assert!(began.elapsed() < Duration::from_secs(1));
        assert_eq!(job.delayed_by(), None);
    }
}
