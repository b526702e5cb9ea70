//! An epoch larger than its memory: it is written while it is open, reads as one, is committed as one, and
//! leaves nothing behind when it is not (docs/design.md §9, "Large epochs").

use std::sync::Arc;
use std::time::Duration;

use arrow::array::{AsArray, BinaryArray, Int64Array, RecordBatch};
use arrow::datatypes::Int64Type;
use futures::TryStreamExt;
use millrace_common::access::AccessClass;
use millrace_common::{Epoch, JobId, RelationId};
use millrace_rpc::version::JobVersion;
use millrace_storage::sim::{Profile, SimStore};
use millrace_storage::{JobStore, ScanOptions, StateStore, StoreOptions, TableWriter};
use object_store::ObjectStore;

use crate::numbers::{TABLE, desc, schema};

const JOB: JobId = RelationId(20_000);
const SPILL_BYTES: usize = 256 << 10;
const CHUNK: u64 = 1_000;
/// Entries of the epoch: each of half as many keys is written twice.
const ENTRIES: u64 = 200_000;

async fn open(store: &Arc<SimStore>, incarnation: u64, version: &JobVersion) -> Arc<JobStore> {
    let options = StoreOptions {
        spill_bytes: SPILL_BYTES,
        ..StoreOptions::new(Arc::clone(store) as _, incarnation)
    };
    let store = StateStore::open(options).await.unwrap();
    store.open_job(JOB, vec![desc(AccessClass::PointUpdate)], version).await.unwrap()
}

fn key(i: u64) -> Vec<u8> {
    [&[0, (i % 256) as u8][..], &i.to_be_bytes()].concat()
}

/// Writes 0.. and then, once more, the same keys with values one higher, waiting for room as a task does.
async fn write_all(job: &Arc<JobStore>, writer: &mut TableWriter) -> usize {
    let mut most = 0;
    for at in (0..ENTRIES).step_by(CHUNK as usize) {
        let keys = ENTRIES / 2;
        let written = (at..at + CHUNK).map(|i| i % keys);
        let values = (at..at + CHUNK).map(|i| (i % keys + i / keys) as i64);
        let values: Vec<arrow::array::ArrayRef> =
            vec![Arc::new(Int64Array::from_iter_values(values))];
        let batch = RecordBatch::try_new(schema(), values).unwrap();
        writer.write(BinaryArray::from_iter_values(written.map(key)), None, batch);
        job.wait_for_spills().await;
        most = most.max(job.memory_size());
    }
    most
}

async fn sum(job: &Arc<JobStore>) -> (usize, i64) {
    let snapshot = job.snapshot(Epoch::MAX).unwrap();
    let batches: Vec<_> = snapshot.scan(TABLE, ScanOptions::default()).try_collect().await.unwrap();
    let column = |b: &RecordBatch| b.column(0).as_primitive::<Int64Type>().clone();
    let values = batches.iter().flat_map(|b| column(&b.values).values().to_vec());
    (batches.iter().map(|b| b.values.num_rows()).sum(), values.sum())
}

/// Of values 1..=n.
fn expected() -> (usize, i64) {
    let n = ENTRIES as i64 / 2;
    (n as usize, n * (n + 1) / 2)
}

#[tokio::test]
async fn an_epoch_larger_than_its_memory_is_one_epoch() {
    let sim = Arc::new(SimStore::in_memory(Profile::INSTANT, 5));
    let job = open(&sim, 1, &JobVersion::default()).await;
    let mut writer = job.writer(TABLE).unwrap();
    let most = write_all(&job, &mut writer).await;
    // About 28 bytes an entry would be 5.6 MB: open, and on the way.
    assert!(most < SPILL_BYTES * 3, "{most} bytes were held");

    // The writer sees the newest of each key; nobody else sees anything.
    let asked: Vec<u64> = (0..ENTRIES / 2).step_by(997).collect();
    let keys = BinaryArray::from_iter_values(asked.iter().map(|&i| key(i)));
    let found = writer.multi_get(keys).wait().await.unwrap();
    let values = found.values.column(0).as_primitive::<Int64Type>();
    let newest: Vec<i64> = asked.iter().map(|&i| i as i64 + 1).collect();
    let read: Vec<i64> = {
        let mut by_input: Vec<(u32, i64)> =
            found.input.values().iter().copied().zip(values.values().iter().copied()).collect();
        by_input.sort_unstable();
        by_input.into_iter().map(|(_, v)| v).collect()
    };
    assert_eq!(read, newest);
    assert_eq!(sum(&job).await, (0, 0));

    let runs = writer.seal().unwrap();
    assert!(runs.len() > 4, "{} parts", runs.len());
    let persisted = job.persist(1, runs).await.unwrap();
    let mut edit = persisted.edit.clone().unwrap();
    job.publish(Epoch(7), persisted);
    assert_eq!(sum(&job).await, expected());

    // As the log would hand it to a restarted process.
    edit.add_runs.iter_mut().for_each(|r| (r.min_epoch, r.max_epoch) = (7, 7));
    let version = JobVersion { epoch: 7, runs: edit.add_runs, ..JobVersion::default() };
    let again = open(&sim, 2, &version).await;
    assert_eq!(sum(&again).await, expected());
}

#[tokio::test]
async fn an_epoch_that_is_given_up_leaves_nothing_behind() {
    let sim = Arc::new(SimStore::in_memory(Profile::INSTANT, 5));
    let job = open(&sim, 1, &JobVersion::default()).await;
    let mut writer = job.writer(TABLE).unwrap();
    write_all(&job, &mut writer).await;
    drop(writer.seal().unwrap());
    drop(writer);
    // What is still being written is deleted when it has been.
    let gone = async {
        while !sim.list(None).try_collect::<Vec<_>>().await.unwrap().is_empty() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let gone = tokio::time::timeout(Duration::from_secs(120), gone).await;
    gone.expect("objects of an epoch that never was are still there");
}
