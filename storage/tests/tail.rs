//! The tail of a job that commits little and often is bounded in slices, and what a flush retires is gone for good
//! (docs/design.md §9, checkpoint).

#![allow(clippy::disallowed_methods, clippy::disallowed_types)]
#![allow(clippy::unwrap_used)] // a test fails where it does not find what it made

#[path = "common/numbers.rs"]
mod numbers;

use std::sync::Arc;
use std::time::Duration;

use arrow::array::{BinaryArray, Int64Array, RecordBatch};
use millrace_common::access::AccessClass;
use millrace_common::{Epoch, RelationId};
use millrace_rpc::version::{JobVersion, SliceRef};
use millrace_storage::{JobStore, StateStore, StoreOptions, TableWriter, TailLimits};
use object_store::memory::InMemory;

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

/// Commits one entry of one key and takes it into the version, as the log would.
async fn commit(
    job: &Arc<JobStore>,
    writer: &mut TableWriter,
    committed: &mut JobVersion,
    weight: i64,
) {
    let key = BinaryArray::from_iter_values([[0u8, 0, 7]]);
    let n = Int64Array::from_iter_values([committed.epoch as i64]);
    let values = RecordBatch::try_new(schema(), vec![Arc::new(n)]).unwrap();
    writer.write(key, Some(Int64Array::from_iter_values([weight])), values);
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
