//! What was hot before another process's compaction is hot after it, and what was not is not read.

use std::sync::Arc;
use std::time::Duration;

use arrow::array::{Array, BinaryArray, Int64Array, RecordBatch};
use millrace_common::access::AccessClass;
use millrace_common::{Epoch, JobId, RelationId};
use millrace_rpc::version::{JobVersion, VersionEdit};
use millrace_storage::hot_fetch::HotFetchStats;
use millrace_storage::sim::{Profile, SimStore};
use millrace_storage::{JobStore, StateStore, StoreOptions, compaction};

use crate::numbers::{TABLE, desc, schema};

const JOB: JobId = RelationId(20000);
const KEYS: u64 = 40_000;
const BLOCK: usize = 1 << 10;

fn keys(of: impl IntoIterator<Item = u64>) -> BinaryArray {
    let key = |i: u64| [&[0, 7][..], &i.to_be_bytes()].concat();
    BinaryArray::from_iter_values(of.into_iter().map(key))
}

/// Ten keys that lie in one place, and ten in another.
fn hot() -> BinaryArray {
    keys((5_000..5_010).chain(30_000..30_010))
}

struct Test {
    sim: Arc<SimStore>,
    /// The process that runs the job. It has read only what is hot.
    owner: Arc<StateStore>,
    job: Arc<JobStore>,
    version: JobVersion,
    /// Of a compaction that another process has done.
    edit: VersionEdit,
}

impl Test {
    /// `partition_bytes`: of the index.
    async fn new(partition_bytes: Option<usize>) -> Test {
        let sim = Arc::new(SimStore::in_memory(Profile::INSTANT, 1));
        let open = async |incarnation| {
            let mut options = StoreOptions::new(Arc::clone(&sim) as _, incarnation);
            options.block_bytes = Some(BLOCK);
            options.partition_bytes = partition_bytes;
            // Neighbours are read in requests of their own.
            options.cache.join_gap = 0;
            StateStore::open(options).await.unwrap()
        };
        let tables = || vec![desc(AccessClass::PointUpdate)];
        let writer = open(1).await;
        let job = writer.open_job(JOB, tables(), &JobVersion::default()).await.unwrap();
        let mut version = JobVersion::default();
        let mut table = job.writer(TABLE).unwrap();
        for commit in 1..=4u64 {
            let n = Int64Array::from_iter_values(0..KEYS as i64);
            let values = RecordBatch::try_new(schema(), vec![Arc::new(n)]).unwrap();
            table.write(keys(0..KEYS), None, values);
            let persisted = job.persist(commit, table.seal().unwrap()).await.unwrap();
            job.publish(Epoch(commit), persisted);
            let edit = job.flush().await.unwrap();
            job.apply_edit(&edit);
            version.runs.extend(edit.add_runs);
        }
        version.epoch = 4;
        let owner = open(2).await;
        let job = owner.open_job(JOB, tables(), &version).await.unwrap();
        let elsewhere = open(3).await;
        let table = desc(AccessClass::PointUpdate);
        let edit = compaction::compact(&elsewhere, &table, None, &version.runs, 1, Epoch(4), true);
        let edit = edit.await.unwrap();
        let test = Test { sim, owner, job, version, edit };
        test.gets(hot()).await;
        test
    }

    /// Requests that it takes to look these keys up.
    async fn gets(&self, keys: BinaryArray) -> u64 {
        let (before, asked) = (self.sim.stats().gets, keys.len());
        let found = self.job.writer(TABLE).unwrap().multi_get(keys).wait().await.unwrap();
        assert_eq!(found.len(), asked);
        self.sim.stats().gets - before
    }

    fn hot_fetches(&self) -> HotFetchStats {
        self.owner.hot_fetches()
    }
}

async fn hot_stays_hot(partition_bytes: Option<usize>) {
    let test = Test::new(partition_bytes).await;
    let before = test.sim.stats();
    test.job.fetch_hot(&test.edit).await;
    let cost = test.sim.stats();
    let (gets, bytes) = (cost.gets - before.gets, cost.bytes_read - before.bytes_read);
    let whole: u64 = test.edit.add_runs.iter().map(|run| run.length).sum();
    assert!(gets > 0 && bytes < whole, "{bytes} bytes of {whole} in {gets} requests");
    if partition_bytes.is_some() {
        assert!(bytes < whole / 4, "{bytes} bytes of {whole}: neither index is read whole");
    }
    let stats = test.hot_fetches();
    assert_eq!((stats.fetches, stats.incomplete, stats.requests), (1, 0, gets));
    assert!(stats.blocks >= 2 && stats.blocks < 20, "{stats:?}");
    assert!(stats.bytes <= bytes && stats.bytes < whole / 20, "{stats:?} of {whole} bytes");

    test.job.apply_edit(&test.edit);
    assert_eq!(test.gets(hot()).await, 0, "what was hot is in memory");
    assert!(test.gets(keys(20_000..20_001)).await > 0, "what was not has not been read");
}

#[tokio::test]
async fn keys_that_were_hot_are_read_without_a_request_after_a_compaction_elsewhere() {
    hot_stays_hot(None).await;
}

#[tokio::test]
async fn of_a_large_run_only_the_partitions_with_hot_keys_are_read() {
    hot_stays_hot(Some(2 << 10)).await;
}

/// The same without it: what the promise above is measured against.
#[tokio::test]
async fn without_it_the_first_reads_after_a_compaction_elsewhere_go_to_the_store() {
    let test = Test::new(None).await;
    test.job.apply_edit(&test.edit);
    assert!(test.gets(hot()).await > 0);
    assert_eq!(test.hot_fetches(), HotFetchStats::default());
}

#[tokio::test]
async fn where_nothing_is_in_memory_nothing_is_read() {
    let test = Test::new(None).await;
    test.owner.cache().clear_memory();
    let before = test.sim.stats().gets;
    test.job.fetch_hot(&test.edit).await;
    assert_eq!(test.sim.stats().gets, before);
    // Nor where the runs are not those of the job.
    let unknown = VersionEdit { remove_runs: vec![1], ..test.edit.clone() };
    test.job.fetch_hot(&unknown).await;
    assert_eq!((test.sim.stats().gets, test.hot_fetches()), (before, HotFetchStats::default()));
    assert!(!test.version.runs.is_empty());
}

#[tokio::test]
async fn a_store_that_does_not_answer_delays_a_compaction_for_two_seconds_at_most() {
    let test = Test::new(None).await;
    test.sim.hang_reads(None);
    tokio::time::pause();
    let began = tokio::time::Instant::now();
    test.job.fetch_hot(&test.edit).await;
    let took = began.elapsed();
    assert!(took >= Duration::from_secs(2) && took < Duration::from_millis(2_100), "{took:?}");
    let stats = test.hot_fetches();
    assert_eq!((stats.fetches, stats.incomplete, stats.blocks), (1, 1, 0));
    test.sim.release_reads();
    tokio::time::resume();
    test.job.apply_edit(&test.edit);
    assert!(test.gets(hot()).await > 0, "they are read by who asks for them");
}
