//! The tail of a job that commits little and often is bounded in slices, and what a flush retires is gone for good
//! (docs/design.md §9, checkpoint).

use std::sync::Arc;
use std::time::Duration;

use arrow::array::{BinaryArray, Int64Array, RecordBatch};
use futures::TryStreamExt;
use millrace_common::access::AccessClass;
use millrace_common::{Epoch, RelationId};
use millrace_rpc::version::{Flushed, JobVersion, SliceRef};
use millrace_storage::sim::{Profile, SimStore};
use millrace_storage::{JobStore, ScanOptions, StateStore, StoreOptions, TableWriter, TailLimits};
use object_store::memory::InMemory;
use parking_lot::Mutex;

use crate::numbers::{TABLE, desc, schema};

const LIMITS: TailLimits =
    TailLimits { slices: 20, bytes: 64 << 20, age: Duration::from_secs(3_600) };

async fn open(store: &Arc<InMemory>, incarnation: u64) -> Arc<StateStore> {
    let options = StoreOptions::new(Arc::clone(store) as _, incarnation);
    StateStore::open(StoreOptions { tail: LIMITS, ..options }).await.unwrap()
}

async fn open_job(store: &StateStore, version: &JobVersion) -> Arc<JobStore> {
    let tables = vec![desc(AccessClass::PointUpdate)];
    store.open_job(RelationId(20_000), tables, version).await.unwrap()
}

/// Writes one entry of the one key.
fn write(writer: &mut TableWriter, n: i64, weight: i64) {
    let key = BinaryArray::from_iter_values([[0u8, 0, 7]]);
    let n = Int64Array::from_iter_values([n]);
    let values = RecordBatch::try_new(schema(), vec![Arc::new(n)]).unwrap();
    writer.write(key, Some(Int64Array::from_iter_values([weight])), values);
}

/// The numbers in the table.
async fn content(job: &Arc<JobStore>) -> Vec<i64> {
    let scan = job.snapshot(Epoch::MAX).unwrap().scan(TABLE, ScanOptions::default());
    let batches: Vec<_> = scan.try_collect().await.unwrap();
    let numbers = batches.iter().flat_map(|batch| {
        let column = batch.values.column(0).as_any().downcast_ref::<Int64Array>().unwrap();
        column.values().to_vec()
    });
    numbers.collect()
}

/// Commits one entry of one key and takes it into the version, as the log would.
async fn commit(
    job: &Arc<JobStore>,
    writer: &mut TableWriter,
    committed: &mut JobVersion,
    weight: i64,
) {
    write(writer, committed.epoch as i64, weight);
    committed.epoch += 1;
    let epoch = committed.epoch;
    let persisted = job.persist(epoch, writer.seal().unwrap()).await.unwrap();
    committed.tail.extend(persisted.slices.iter().map(|s| SliceRef { epoch, ..s.clone() }));
    job.publish(Epoch(epoch), persisted);
}

/// The edit takes effect in the version and in the store.
fn take_edit(
    job: &JobStore,
    committed: &mut JobVersion,
    edit: &millrace_rpc::version::VersionEdit,
) {
    committed.tail.retain(|s| !edit.retires(s));
    committed.runs.extend(edit.add_runs.iter().cloned());
    job.apply_edit(edit);
}

#[tokio::test]
async fn a_job_of_one_row_is_flushed_by_the_number_of_its_commits() {
    let memory = Arc::new(InMemory::new());
    let store = open(&memory, 1).await;
    let mut committed = JobVersion::default();
    let mut job = open_job(&store, &committed).await;
    let mut writer = job.writer(TABLE).unwrap();
    let (mut flushes, mut most) = (0, 0);
    for commits in 1..=200 {
        commit(&job, &mut writer, &mut committed, 1).await;
        most = most.max(committed.tail.len());
        assert_eq!(job.tail_size().slices, committed.tail.len());
        if commits == 130 {
            // What a restart finds counts on.
            let store = open(&memory, 2).await;
            job = open_job(&store, &committed).await;
            writer = job.writer(TABLE).unwrap();
            assert_eq!(job.tail_size().slices, committed.tail.len());
        }
        if job.needs_flush() {
            let edit = job.flush().await.unwrap();
            assert!(!job.needs_flush(), "one is on its way to the log");
            take_edit(&job, &mut committed, &edit);
            flushes += 1;
        }
    }
    assert_eq!((flushes, most), (10, LIMITS.slices));
    assert_eq!((committed.tail.len(), job.tail_size().bytes), (0, 0));
}

/// Rows that came and went leave slices, and nothing to write.
#[tokio::test]
async fn slices_that_have_cancelled_out_are_retired_without_a_run() {
    let memory = Arc::new(InMemory::new());
    let store = open(&memory, 1).await;
    let mut committed = JobVersion::default();
    let job = open_job(&store, &committed).await;
    let mut writer = job.writer(TABLE).unwrap();
    for pair in 0..LIMITS.slices / 2 {
        commit(&job, &mut writer, &mut committed, 1).await;
        assert!(!job.needs_flush(), "after {pair} pairs");
        commit(&job, &mut writer, &mut committed, 0).await;
    }
    assert!(job.needs_flush());
    let edit = job.flush().await.unwrap();
    take_edit(&job, &mut committed, &edit);
    assert_eq!((committed.tail.len(), job.tail_size().slices), (0, 0));
    assert!(!job.needs_flush());
    assert_eq!(job.flush().await.unwrap(), Default::default(), "there is nothing more to flush");
}

/// Earlier releases counted what a process persisted, also before commits were numbered: that comes before all that is
/// numbered, in its own order, and is retired by a flush. All of it is of one epoch here, as in a backfill.
#[tokio::test]
async fn counters_of_earlier_releases_come_before_numbered_commits() {
    let memory = Arc::new(InMemory::new());
    let store = open(&memory, 1).await;
    let mut old = JobVersion::default();
    let job = open_job(&store, &old).await;
    let mut writer = job.writer(TABLE).unwrap();
    commit(&job, &mut writer, &mut old, 1).await;
    let edit = job.flush().await.unwrap();
    take_edit(&job, &mut old, &edit);
    for _ in 0..2 {
        commit(&job, &mut writer, &mut old, 1).await;
    }
    // Counted far beyond the commits.
    old.runs[0].sequence = 5_000_000;
    for (slice, counter) in old.tail.iter_mut().zip(5_000_001..) {
        (slice.epoch, slice.sequence) = (1, counter);
    }
    (old.epoch, old.commits) = (1, 0);

    let unchanged = open_job(&*open(&memory, 2).await, &old).await;
    assert_eq!(content(&unchanged).await, [2]);
    let edit = unchanged.flush().await.unwrap();
    assert_eq!(edit.flushed, Some(Flushed { writer: 2, ..Flushed::default() }));
    let mut flushed = old.clone();
    take_edit(&unchanged, &mut flushed, &edit);
    assert_eq!((flushed.tail.len(), unchanged.tail_size().slices), (0, 0));
    let mut one_more = old;
    for (incarnation, version) in [(3, &mut flushed), (4, &mut one_more)] {
        let job = open_job(&*open(&memory, incarnation).await, version).await;
        assert_eq!(content(&job).await, [2]);
        let mut writer = job.writer(TABLE).unwrap();
        write(&mut writer, 3, 1);
        let persisted = job.persist(1, writer.seal().unwrap()).await.unwrap();
        version.tail.extend(persisted.slices.iter().map(|s| SliceRef { epoch: 1, ..s.clone() }));
        version.commits = 1;
        job.publish(Epoch(1), persisted);
        assert_eq!(content(&job).await, [3]);
        let job = open_job(&*open(&memory, incarnation).await, version).await;
        assert_eq!(content(&job).await, [3]);
        let edit = job.flush().await.unwrap();
        assert_eq!(edit.flushed.as_ref().map(|f| f.commit), Some(1));
        take_edit(&job, version, &edit);
        assert_eq!((version.tail.len(), job.tail_size().slices), (0, 0));
        let job = open_job(&*open(&memory, incarnation).await, version).await;
        assert_eq!(content(&job).await, [3]);
    }
}

/// Their puts end in any order; what counts is the order of the commits.
#[tokio::test(start_paused = true)]
async fn commits_whose_slices_become_durable_in_another_order_are_read_in_theirs() {
    const COMMITS: usize = 40;
    let memory = Arc::new(InMemory::new());
    let profile = Profile {
        p50: Duration::from_millis(20),
        p99: Duration::from_millis(500),
        ..Profile::INSTANT
    };
    let sim = SimStore::new(Arc::clone(&memory) as _, profile, 3);
    let options = StoreOptions { inline_bytes: 0, ..StoreOptions::new(Arc::new(sim), 1) };
    let store = StateStore::open(options).await.unwrap();
    let mut committed = JobVersion::default();
    let job = open_job(&store, &committed).await;
    let mut writer = job.writer(TABLE).unwrap();
    let ended = Arc::new(Mutex::new(Vec::new()));
    let mut persisting = Vec::new();
    for n in 0..COMMITS {
        write(&mut writer, n as i64, 1);
        let persist = job.persist(n as u64 + 1, writer.seal().unwrap());
        let ended = Arc::clone(&ended);
        persisting.push(tokio::spawn(async move {
            let persisted = persist.await.unwrap();
            ended.lock().push(n);
            persisted
        }));
        tokio::time::sleep(Duration::from_millis(30)).await;
    }
    let mut sequences = Vec::new();
    for (n, persisted) in persisting.into_iter().enumerate() {
        let persisted = persisted.await.unwrap();
        let epoch = n as u64 + 1;
        sequences.extend(persisted.slices.iter().map(|s| s.sequence));
        committed.tail.extend(persisted.slices.iter().map(|s| SliceRef { epoch, ..s.clone() }));
        committed.epoch = epoch;
        job.publish(Epoch(epoch), persisted);
        assert_eq!(content(&job).await, [n as i64]);
    }
    assert!(!ended.lock().is_sorted(), "another order than that of the commits");
    assert!(sequences.len() == COMMITS && sequences.is_sorted());
    let reopened = open(&memory, 2).await;
    let reopened = open_job(&reopened, &committed).await;
    assert_eq!(content(&reopened).await, [COMMITS as i64 - 1]);
}
