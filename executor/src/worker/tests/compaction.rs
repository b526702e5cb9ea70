//! Compactions where no job is open: by what the task says alone.

use std::ops::Range;

use arrow::array::{BinaryArray, TimestampMicrosecondArray};
use arrow::datatypes::{TimeUnit, TimestampMicrosecondType};
use millrace_common::access::RetentionBy;
use millrace_compactor::Compactor;
use millrace_graph::{Retention, WatermarkTerm};
use millrace_rpc::loopback::Encoded;
use millrace_rpc::services::{CompactionTask, CompactorService, MergedTable};
use millrace_rpc::version::RunMeta;
use millrace_storage::JobStore;
use object_store::ObjectStore;
use object_store::memory::InMemory;
use object_store::path::Path;

use super::*;
use crate::worker::describe_table;

const VIEW: JobId = RelationId(2);
/// The second of the view's graph, which is cleaned.
const TABLE: TableId = TableId(21);
const BOUND: i64 = 100;
const CLEANED: MergedTable = MergedTable { position: Some(1), bound: Some(BOUND) };

fn view() -> Relation {
    let mut graph = copy_of(RelationId(1));
    let time = DataType::Timestamp(TimeUnit::Microsecond, None);
    let terms = vec![WatermarkTerm { relation: RelationId(1), column: 1, steps: vec![] }];
    graph.tables.push(StateTable {
        name: "times".to_string(),
        class: AccessClass::RangeRead,
        value_schema: Arc::new(Schema::new(vec![Field::new("time", time, true)])),
        storage: RowStorage::Multiset,
        relation: false,
        retention: Some(Retention { by: RetentionBy::Value(0), terms }),
    });
    let graph = encode_graph(&graph).unwrap();
    Relation { graph, table_count: 2, ..relation(VIEW.0, RelationKind::MaterializedView) }
}

fn task(relation: Relation, inputs: Vec<RunMeta>, table: MergedTable) -> CompactionTask {
    CompactionTask {
        task_id: 1,
        job: RelationId(relation.id),
        relation,
        inputs,
        table,
        target_level: 1,
        horizon: Epoch::ZERO,
        bottom: true,
    }
}

fn run_of(table: TableId) -> Vec<RunMeta> {
    vec![RunMeta { table_id: table.0, ..RunMeta::default() }]
}

async fn open(store: &Arc<StateStore>, version: &JobVersion) -> Arc<JobStore> {
    let desc = describe_table(&task(view(), run_of(TABLE), CLEANED)).unwrap().unwrap();
    store.open_job(VIEW, vec![desc], version).await.unwrap()
}

/// One flushed commit of rows with these times.
async fn flushed(job: &Arc<JobStore>, number: u64, times: Range<i64>) -> Vec<RunMeta> {
    let key = |time: i64| [&[0_u8, 0][..], &time.to_be_bytes()[..]].concat();
    let keys = BinaryArray::from_iter_values(times.clone().map(key));
    let column: ArrayRef = Arc::new(TimestampMicrosecondArray::from_iter_values(times));
    let schema = Arc::clone(&job.table(TABLE).unwrap().value_schema);
    let mut writer = job.writer(TABLE).unwrap();
    writer.write(keys, None, RecordBatch::try_new(schema, vec![column]).unwrap());
    let persisted = job.persist(number, writer.seal().unwrap()).await.unwrap();
    job.publish(Epoch(number), persisted);
    let edit = job.flush().await.unwrap();
    job.apply_edit(&edit);
    edit.add_runs
}

#[tokio::test]
async fn a_task_is_done_where_there_is_no_log_and_no_job_is_open() {
    let memory = Arc::new(InMemory::new());
    let opened = async |incarnation| {
        StateStore::open(StoreOptions::new(Arc::clone(&memory) as _, incarnation)).await.unwrap()
    };
    let own = opened(1).await;
    let job = open(&own, &JobVersion::default()).await;
    let mut inputs = flushed(&job, 1, 0..BOUND + 10).await;
    inputs.extend(flushed(&job, 2, BOUND + 10..BOUND + 20).await);
    let replaced: Vec<u64> = inputs.iter().map(|run| run.run_id).collect();
    let log: Vec<_> = memory.list(Some(&Path::from("meta"))).try_collect().await.unwrap();
    assert!(log.is_empty(), "{log:?}");

    let elsewhere = opened(2).await;
    let compactor = Compactor::elsewhere(Arc::clone(&elsewhere), describe_table);
    // As the task comes to another process.
    let compactor = Encoded::compactor(Arc::new(compactor));
    let edit = compactor.compact(task(view(), inputs, CLEANED)).await.unwrap();
    assert_eq!(edit.remove_runs, replaced);
    let added = edit.add_runs.iter().map(|run| (run.table_id, run.level, run.rows));
    assert_eq!(added.collect::<Vec<_>>(), [(TABLE.0, 1, 20)], "what is too old has left");

    let version = JobVersion { epoch: 2, runs: edit.add_runs, ..JobVersion::default() };
    let job = open(&elsewhere, &version).await;
    let scan = job.snapshot(Epoch(2)).unwrap().scan(TABLE, ScanOptions::default());
    let batches: Vec<_> = scan.try_collect().await.unwrap();
    let times = batches.iter().flat_map(|batch| {
        batch.values.column(0).as_primitive::<TimestampMicrosecondType>().values().to_vec()
    });
    assert_eq!(times.collect::<Vec<_>>(), (BOUND..BOUND + 20).collect::<Vec<_>>());
}

#[test]
fn a_task_describes_the_table_that_it_names_and_no_other() {
    let described = |relation: &Relation, table, position| {
        let table = task(relation.clone(), run_of(table), MergedTable { position, bound: None });
        let desc = describe_table(&table).unwrap()?;
        Some((desc.id, desc.name, desc.relation, desc.retention))
    };
    let view = view();
    let rows = |id| Some((TableId(id), "rows".to_string(), true, None));
    let times = |id| Some((TableId(id), "times".to_string(), false, Some(RetentionBy::Value(0))));
    assert_eq!(described(&view, TableId(20), Some(0)), rows(20));
    assert_eq!(described(&view, TABLE, Some(1)), times(21));
    // After a rebuild.
    assert_eq!(described(&view, TableId(71), Some(1)), times(71));
    assert_eq!(described(&view, TableId(22), Some(2)), None);

    let table = relation(1, RelationKind::Table);
    assert_eq!(described(&table, TableId(10), None), rows(10));
    // A graph that cannot be read leaves a job that is detached its rows.
    let damaged = Relation { graph: Bytes::from_static(b"graph"), ..view };
    assert_eq!(described(&damaged, TableId(20), None), rows(20));
    assert_eq!(described(&damaged, TABLE, None), None);
    assert!(describe_table(&task(damaged, run_of(TABLE), CLEANED)).is_err());
}
