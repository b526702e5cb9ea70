//! The tail of a job that commits little and often is bounded in slices, and what a flush retires is gone for good
//! (docs/design.md §9, checkpoint).

#![allow(clippy::disallowed_methods, clippy::disallowed_types)]
#![allow(clippy::unwrap_used)] // a test fails where it does not find what it made

#[path = "common/numbers.rs"]
mod numbers;

use std::sync::Arc;
use std::time::Duration;

use arrow::array::{BinaryArray, Int64Array, RecordBatch};
use futures::TryStreamExt;
use millrace_common::access::AccessClass;
use millrace_common::{Epoch, RelationId};
use millrace_rpc::version::{JobVersion, SliceRef};
use millrace_storage::sim::{Profile, SimStore};
use millrace_storage::{JobStore, ScanOptions, StateStore, StoreOptions, TableWriter, TailLimits};
use object_store::memory::InMemory;
use parking_lot::Mutex;

use numbers::{TABLE, desc, schema};

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
    let persisted = job.persist(writer.seal().unwrap()).await.unwrap();
    committed.epoch += 1;
    let epoch = committed.epoch;
    committed.tail.extend(persisted.slices.iter().map(|s| SliceRef { epoch, ..s.clone() }));
    job.publish(Epoch(epoch), persisted);
}

/// The edit takes effect in the version and in the store.
fn take_edit(
    job: &JobStore,
    committed: &mut JobVersion,
    edit: &millrace_rpc::version::VersionEdit,
) {
    committed.tail.retain(|s| s.sequence > edit.flushed_sequence);
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
        let (persist, ended) = (job.persist(writer.seal().unwrap()), Arc::clone(&ended));
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
