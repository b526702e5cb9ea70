//! Promises of writes to a store that misbehaves: what is said to be durable is, whole; what fails and may pass is
//! repeated, and counted; no writer is told of it.

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
use millrace_rpc::version::JobVersion;
use millrace_storage::compaction::compact;
use millrace_storage::object::{MeterOptions, Metered};
use millrace_storage::sim::{Faults, Profile, RequestKind, SimStore};
use millrace_storage::{JobStore, ScanOptions, StateStore, StoreOptions, TableWriter};

use numbers::{TABLE, desc, schema};

/// Rows of a commit: more than a log record takes.
const ROWS: i64 = 4_000;
const COMMITS: u64 = 4;

/// What a store may do to a put that the same put repeated outlives.
fn faults() -> Vec<Faults> {
    let put = Faults { only: Some(RequestKind::Put), ..Faults::default() };
    vec![
        Faults { slow_down: 0.4, ..put },
        Faults { reset: 0.4, ..put },
        Faults { hang: 0.3, ..put },
        Faults { lost_answer: 0.4, ..put },
        Faults { torn_write: 0.3, ..put },
        Faults { slow_down: 0.2, reset: 0.2, hang: 0.2, lost_answer: 0.2, ..put },
    ]
}

/// With real clocks, because runs are written on blocking threads.
fn impatient() -> MeterOptions {
    MeterOptions {
        request_timeout: Duration::from_millis(200),
        backoff: Duration::from_millis(1),
        max_backoff: Duration::from_millis(5),
        ..MeterOptions::default()
    }
}

fn write(writer: &mut TableWriter, commit: u64) {
    // Every commit writes every other row of the one before anew.
    let numbers = (0..ROWS).map(|i| (i + commit as i64 * ROWS / 2, commit as i64));
    let (keys, values): (Vec<i64>, Vec<i64>) = numbers.unzip();
    let keys = keys.iter().map(|k| [&[0, 0][..], &k.to_be_bytes()].concat());
    let values = Arc::new(Int64Array::from(values));
    let values = RecordBatch::try_new(schema(), vec![values]).unwrap();
    writer.write(BinaryArray::from_iter_values(keys), None, values);
}

/// All numbers of the table, in the order of their keys.
async fn content(job: &Arc<JobStore>) -> Vec<i64> {
    let scan = job.snapshot(Epoch::MAX).unwrap().scan(TABLE, ScanOptions::default());
    let batches: Vec<_> = scan.try_collect().await.unwrap();
    let column = |b: &RecordBatch| {
        let column = b.column(0).as_any().downcast_ref::<Int64Array>().unwrap();
        column.values().to_vec()
    };
    batches.iter().flat_map(|b| column(&b.values)).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn puts_of_every_kind_outlive_every_fault_that_passes() {
    // A key has the number of the last commit that wrote it: each the first half of its rows, the last one all.
    let half = (ROWS / 2) as usize;
    let mut expected: Vec<i64> = (0..COMMITS as i64).flat_map(|c| vec![c; half]).collect();
    expected.extend(vec![COMMITS as i64 - 1; half]);
    for (n, faults) in faults().into_iter().enumerate() {
        let sim = SimStore::in_memory(Profile::INSTANT, n as u64 + 1);
        let metered = Metered::wrap(Arc::new(sim.clone()), impatient());
        let options = |incarnation| StoreOptions::new(Arc::clone(&metered) as _, incarnation);
        let store = StateStore::open(options(1)).await.unwrap();
        let tables = vec![desc(AccessClass::PointUpdate)];
        let id = RelationId(20000);
        let job = store.open_job(id, tables.clone(), &JobVersion::default()).await.unwrap();
        let mut writer = job.writer(TABLE).unwrap();
        let mut version = JobVersion::default();
        sim.set_faults(faults);
        for commit in 0..COMMITS {
            write(&mut writer, commit);
            let persisted = job.persist(commit + 1, writer.seal().unwrap()).await.unwrap();
            assert!(persisted.slices.iter().all(|s| !s.object.is_empty()), "a put of the tail");
            job.publish(Epoch(commit + 1), persisted);
            let edit = job.flush().await.unwrap();
            job.apply_edit(&edit);
            version.runs.extend(edit.add_runs);
        }
        let desc = &tables[0];
        let edit = compact(&store, desc, None, &version.runs, 1, Epoch::MAX, true).await.unwrap();
        sim.set_faults(Faults::default());
        let stats = metered.stats();
        assert!(stats.retries > 0, "{faults:?}: {stats:?}");
        assert_eq!(stats.errors, 0, "{faults:?}: {stats:?}");
        // On a busy machine others may be late, too.
        assert!(stats.timeouts > 0 || faults.hang == 0.0, "{faults:?}: {stats:?}");

        // Another process finds the same before and after the compaction.
        let before = version.clone();
        version.runs = edit.add_runs;
        for version in [before, version] {
            let store = StateStore::open(options(2)).await.unwrap();
            let job = store.open_job(id, tables.clone(), &version).await.unwrap();
            assert_eq!(content(&job).await, expected, "{faults:?}");
        }
    }
}
