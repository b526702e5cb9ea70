//! Entries below a table's bound count for no limit of a lookup: fewer than the limit are all there are.

use std::sync::Arc;

use arrow::array::{Array, AsArray, BinaryArray, RecordBatch, TimestampMicrosecondArray};
use arrow::datatypes::{DataType, Field, Schema, SchemaRef, TimeUnit, TimestampMicrosecondType};
use millrace_common::access::{AccessClass, RetentionBy};
use millrace_common::{Epoch, JobId, RelationId, TableId};
use millrace_rpc::version::JobVersion;
use millrace_storage::{
    Found, JobStore, RowStorage, StateStore, StoreOptions, TableDesc, TableWriter,
};
use object_store::memory::InMemory;

const JOB: JobId = RelationId(20_000);
const TABLE: TableId = TableId(1);
const BOUND: i64 = 100;
const GROUPS: u8 = 3;
const ROWS: u8 = 6;

fn desc() -> TableDesc {
    let time = DataType::Timestamp(TimeUnit::Microsecond, None);
    TableDesc {
        id: TABLE,
        name: "times".into(),
        value_schema: Arc::new(Schema::new(vec![Field::new("time", time, true)])),
        storage: RowStorage::Append,
        class: AccessClass::RangeRead,
        relation: false,
        retention: Some(RetentionBy::Value(0)),
    }
}

fn prefix(group: u8) -> Vec<u8> {
    vec![0, 0, group]
}

fn key(group: u8, row: u8) -> Vec<u8> {
    [prefix(group), vec![row]].concat()
}

/// The first rows of a group are old, one of the others has no time; of the last group all are kept.
fn time(group: u8, row: u8) -> Option<i64> {
    match row {
        0 | 1 if group + 1 < GROUPS => Some(BOUND - 1),
        3 => None,
        _ => Some(BOUND + i64::from(row)),
    }
}

async fn open(memory: &Arc<InMemory>, incarnation: u64, version: &JobVersion) -> Arc<JobStore> {
    let options = StoreOptions::new(Arc::clone(memory) as _, incarnation);
    let store = StateStore::open(options).await.unwrap();
    store.open_job(JOB, vec![desc()], version).await.unwrap()
}

fn write(writer: &mut TableWriter) {
    let rows: Vec<(u8, u8)> =
        (0..GROUPS).flat_map(|group| (0..ROWS).map(move |row| (group, row))).collect();
    let keys = BinaryArray::from_iter_values(rows.iter().map(|&(group, row)| key(group, row)));
    let times: TimestampMicrosecondArray =
        rows.iter().map(|&(group, row)| time(group, row)).collect();
    let schema: SchemaRef = desc().value_schema;
    writer.write(keys, None, RecordBatch::try_new(schema, vec![Arc::new(times)]).unwrap());
}

/// The groups and rows that were found, whose times are theirs.
fn found(found: &Found) -> Vec<(u32, u8)> {
    let times = found.values.column(0).as_primitive::<TimestampMicrosecondType>();
    let row = |i: usize| {
        let (group, row) = (found.input.value(i), found.keys.value(i)[3]);
        assert_eq!(times.is_valid(i).then(|| times.value(i)), time(group as u8, row));
        (group, row)
    };
    (0..found.len()).map(row).collect()
}

async fn check(writer: &TableWriter) {
    let prefixes = BinaryArray::from_iter_values((0..GROUPS).map(prefix));
    let ends = BinaryArray::from_iter_values((0..GROUPS).map(|group| prefix(group + 1)));
    let kept =
        |group: u8| (0..ROWS).filter(move |&row| time(group, row).is_none_or(|t| t >= BOUND));
    for limit in [None, Some(1), Some(3), Some(4), Some(5)] {
        let rows = |group: u8| kept(group).take(limit.unwrap_or(usize::MAX));
        let expected: Vec<(u32, u8)> =
            (0..GROUPS).flat_map(|group| rows(group).map(move |row| (group.into(), row))).collect();
        let scan = writer.multi_scan(prefixes.clone(), limit).wait().await.unwrap();
        assert_eq!(found(&scan), expected, "prefixes, limit {limit:?}");
        let range = writer.multi_range(prefixes.clone(), ends.clone(), limit).wait().await.unwrap();
        assert_eq!(found(&range), expected, "ranges, limit {limit:?}");
    }
    let keys = BinaryArray::from_iter_values((0..ROWS).map(|row| key(0, row)));
    let got = writer.multi_get(keys).wait().await.unwrap();
    assert_eq!(got.input.values().to_vec(), kept(0).map(u32::from).collect::<Vec<u32>>());
}

#[tokio::test]
async fn what_retention_has_dropped_counts_for_no_limit() {
    let memory = Arc::new(InMemory::new());
    let job = open(&memory, 1, &JobVersion::default()).await;
    job.set_bounds(&[(TABLE, BOUND)]);
    let mut writer = job.writer(TABLE).unwrap();
    write(&mut writer);
    check(&writer).await;
    let persisted = job.persist(1, writer.seal().unwrap()).await.unwrap();
    job.publish(Epoch(1), persisted);
    check(&writer).await;
}

/// Rows that lay in the store before the bound rose, of which nothing is in memory.
#[tokio::test]
async fn what_retention_has_dropped_counts_for_no_limit_in_the_store() {
    let memory = Arc::new(InMemory::new());
    let job = open(&memory, 1, &JobVersion::default()).await;
    let mut writer = job.writer(TABLE).unwrap();
    write(&mut writer);
    let persisted = job.persist(1, writer.seal().unwrap()).await.unwrap();
    job.publish(Epoch(1), persisted);
    let edit = job.flush().await.unwrap();
    let version = JobVersion { runs: edit.add_runs, ..JobVersion::default() };
    assert!(!version.runs.is_empty());
    let job = open(&memory, 2, &version).await;
    job.set_bounds(&[(TABLE, BOUND)]);
    let writer = job.writer(TABLE).unwrap();
    assert!(!writer.memory_complete(), "nothing would be read");
    check(&writer).await;
}
