//! A lookup whose blocks do not fit its memory answers in parts. Its strings are read in key order, whatever
//! the order of the question: a part is of some of them, neither the first ones nor in their order.

use std::collections::BTreeSet;
use std::sync::Arc;

use arrow::array::{Array, AsArray, BinaryArray, Int64Array, RecordBatch};
use arrow::datatypes::Int64Type;
use millrace_common::access::AccessClass;
use millrace_common::{Epoch, JobId, RelationId};
use millrace_rpc::version::JobVersion;
use millrace_storage::{JobStore, Lookup, Part, StateStore, StoreOptions};
use object_store::memory::InMemory;

use crate::numbers::{TABLE, desc, schema};

const JOB: JobId = RelationId(20_000);
const GROUPS: u16 = 500;
const ROWS: u8 = 4;

fn prefix(group: u16) -> Vec<u8> {
    [&[0, 0][..], &group.to_be_bytes()].concat()
}

fn key(group: u16, row: u8) -> Vec<u8> {
    [prefix(group), vec![row]].concat()
}

fn value(group: u16, row: u8) -> i64 {
    i64::from(group) * 10 + i64::from(row)
}

async fn open(memory: &Arc<InMemory>, incarnation: u64, version: &JobVersion) -> Arc<JobStore> {
    let options = StoreOptions {
        block_bytes: Some(160),
        lookup_bytes: 1_500,
        ..StoreOptions::new(Arc::clone(memory) as _, incarnation)
    };
    let store = StateStore::open(options).await.unwrap();
    store.open_job(JOB, vec![desc(AccessClass::RangeRead)], version).await.unwrap()
}

/// A table in the store, of which nothing is in memory.
async fn cold() -> Arc<JobStore> {
    let memory = Arc::new(InMemory::new());
    let job = open(&memory, 1, &JobVersion::default()).await;
    let mut writer = job.writer(TABLE).unwrap();
    let rows = || (0..GROUPS).flat_map(|g| (0..ROWS).map(move |r| (g, r)));
    let keys = BinaryArray::from_iter_values(rows().map(|(g, r)| key(g, r)).collect::<Vec<_>>());
    let n = Int64Array::from_iter_values(rows().map(|(g, r)| value(g, r)).collect::<Vec<_>>());
    writer.write(keys, None, RecordBatch::try_new(schema(), vec![Arc::new(n)]).unwrap());
    let persisted = job.persist(1, writer.seal().unwrap()).await.unwrap();
    job.publish(Epoch(1), persisted);
    let edit = job.flush().await.unwrap();
    job.apply_edit(&edit);
    let version = JobVersion { runs: edit.add_runs, ..JobVersion::default() };
    assert!(!version.runs.is_empty());
    open(&memory, 2, &version).await
}

/// Every group once, in no order.
fn shuffled() -> impl Iterator<Item = u16> {
    (0..u32::from(GROUPS)).map(|i| (i * 137 % u32::from(GROUPS)) as u16)
}

async fn parts(lookup: Lookup) -> Vec<Part> {
    let Lookup::Pending(mut reading) = lookup else { panic!("more than a lookup may hold") };
    let mut parts = Vec::new();
    loop {
        let part = reading.next().await.unwrap();
        let is_last = part.is_last;
        parts.push(part);
        if is_last {
            return parts;
        }
    }
}

/// Each string is in one part, with all that `expected` says of it and nothing else.
fn check(asked: &BinaryArray, parts: &[Part], expected: impl Fn(&[u8]) -> Vec<i64>) {
    assert!(parts.len() > 2, "{} parts", parts.len());
    assert!(parts.iter().any(|p| !p.asked.is_sorted()), "the question was in order");
    let mut seen = BTreeSet::new();
    for part in parts {
        let found = &part.found;
        assert!(found.input.values().is_sorted());
        let n = found.values.column(0).as_primitive::<Int64Type>();
        for (i, &position) in part.asked.iter().enumerate() {
            assert!(seen.insert(position), "string {position} is in two parts");
            let own = (0..found.len()).filter(|&row| found.input.value(row) as usize == i);
            let own: Vec<i64> = own.map(|row| n.value(row)).collect();
            assert_eq!(own, expected(asked.value(position as usize)), "string {position}");
        }
        let strings = part.asked.len();
        assert!(found.input.values().iter().all(|&i| (i as usize) < strings));
    }
    assert_eq!(seen.len(), asked.len());
}

#[tokio::test]
async fn parts_of_an_unsorted_question_say_which_strings_they_answer() {
    let job = cold().await;
    let writer = job.writer(TABLE).unwrap();
    // Every tenth is not there.
    let row = |g: u16| if g.is_multiple_of(10) { ROWS } else { (g % u16::from(ROWS)) as u8 };
    let keys =
        BinaryArray::from_iter_values(shuffled().map(|g| key(g, row(g))).collect::<Vec<_>>());
    let group = |s: &[u8]| u16::from_be_bytes([s[2], s[3]]);
    let of_key = |s: &[u8]| match s[4] {
        ROWS => Vec::new(),
        row => vec![value(group(s), row)],
    };
    check(&keys, &parts(writer.multi_get(keys.clone())).await, of_key);
    let prefixes = BinaryArray::from_iter_values(shuffled().map(prefix).collect::<Vec<_>>());
    for limit in [None, Some(2)] {
        let of_prefix = |s: &[u8]| {
            let rows = 0..limit.unwrap_or(usize::from(ROWS)) as u8;
            rows.map(|row| value(group(s), row)).collect::<Vec<_>>()
        };
        let lookup = writer.multi_scan(prefixes.clone(), limit);
        check(&prefixes, &parts(lookup).await, of_prefix);
        // Put together they are in the order of the question.
        let whole = writer.multi_scan(prefixes.clone(), limit).wait().await.unwrap();
        assert!(whole.input.values().is_sorted());
        let n = whole.values.column(0).as_primitive::<Int64Type>().values().to_vec();
        let all = (0..prefixes.len()).flat_map(|i| of_prefix(prefixes.value(i)));
        assert_eq!(n, all.collect::<Vec<_>>());
    }
}
