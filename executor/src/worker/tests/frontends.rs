//! What frontends of other processes read here: what is committed at an epoch, or nothing. And what becomes of statements
//! that they have abandoned.

use std::sync::atomic::{AtomicBool, Ordering};

use futures::FutureExt;
use futures::future::BoxFuture;
use millrace_rpc::call_error::CallError;
use millrace_rpc::dml::{DmlAnswer, DmlService};
use millrace_rpc::read::{
    FoundRows, KeyRange, MOST_KEY_BYTES, MOST_KEYS, MOST_RANGES, ReadAnswer, ReadRefusal,
    ReadRequest, ReadService, WantedRows,
};
use millrace_storage::FollowedJob;

use super::*;
use crate::layout::RowLayout;

/// All jobs run here, until the log places them elsewhere.
struct Placed {
    meta: Arc<FakeMeta>,
    is_elsewhere: Arc<AtomicBool>,
}

#[async_trait]
impl Elsewhere for Placed {
    fn generation_here(&self, relation: RelationId) -> Option<Generation> {
        let is_here = !self.is_elsewhere.load(Ordering::Relaxed);
        let jobs = self.meta.jobs.lock();
        jobs.get(&relation).filter(|_| is_here).map(|job| job.start.generation)
    }

    fn is_placed_elsewhere(&self, _: RelationId) -> bool {
        self.is_elsewhere.load(Ordering::Relaxed)
    }

    async fn follow(&self, _: RelationId) -> Result<Arc<FollowedJob>, SqlError> {
        Err(SqlError::internal("no job reads another"))
    }

    fn memory_bytes(&self) -> usize {
        0
    }
}

/// With a table of a cluster, and what places it elsewhere.
async fn served() -> (Cluster, JobId, Arc<AtomicBool>) {
    let is_elsewhere = Arc::<AtomicBool>::default();
    let of = Arc::clone(&is_elsewhere);
    let placed = |meta: &Arc<FakeMeta>| {
        let meta = Arc::clone(meta);
        Some(Arc::new(Placed { meta, is_elsewhere: of }) as Arc<dyn Elsewhere>)
    };
    let c = Cluster::led(Profile::INSTANT, ExecOptions::default(), |_| {}, placed).await;
    let t = c.table(1).await;
    (c, t, is_elsewhere)
}

/// Of what the log has by now.
fn request(c: &Cluster, job: JobId, rows: WantedRows) -> ReadRequest {
    let version = c.version(job);
    ReadRequest {
        job,
        generation: c.meta.jobs.lock()[&job].start.generation,
        commits: version.commits,
        epoch: Epoch(version.epoch),
        table: TableId(job.0 * 10),
        columns: vec![0, 1],
        rows,
        limit: None,
        max_bytes: 1 << 20,
    }
}

async fn found(c: &Cluster, request: ReadRequest) -> FoundRows {
    match c.worker.read(request).await.unwrap() {
        ReadAnswer::Rows(found) => found,
        ReadAnswer::Refused(why) => panic!("{why:?}"),
    }
}

async fn refused(c: &Cluster, request: ReadRequest) -> ReadRefusal {
    match c.worker.read(request).await.unwrap() {
        ReadAnswer::Rows(found) => panic!("{found:?}"),
        ReadAnswer::Refused(why) => why,
    }
}

/// All rows, by their keys.
fn rows_of(found: &FoundRows) -> Vec<Row> {
    let mut rows: Vec<Row> = found.chunks.iter().flat_map(listed).collect();
    rows.sort_unstable();
    rows
}

fn keys(ids: &[i64]) -> WantedRows {
    let relation =
        Relation { key: vec![0], distribution: vec![0], ..relation(1, RelationKind::Table) };
    let layout = RowLayout::of_relation(&relation).unwrap();
    let rows: Vec<Row> = ids.iter().map(|id| (*id, 0, 1)).collect();
    let batch = delta(&rows).batch;
    let keys = layout.keys(&batch, &layout.vnodes(&batch).unwrap()).unwrap();
    WantedRows::Keys(keys.iter().flatten().map(Bytes::copy_from_slice).collect())
}

fn range(from: &[u8], until: &[u8]) -> KeyRange {
    KeyRange { from: Bytes::copy_from_slice(from), until: Bytes::copy_from_slice(until) }
}

#[tokio::test]
async fn what_is_committed_is_read_as_of_an_epoch_and_from_memory() {
    let (c, t, _) = served().await;
    c.insert(t, [(1, 10), (2, 20), (3, 30)]).await;
    let then = Epoch(c.version(t).epoch);
    c.dml(t, &[(1, 10, -1), (1, 11, 1), (3, 30, -1)], DmlKind::Change).await.unwrap();
    let gets = c.sim.stats().gets;
    let (old, new) = ([(1, 10, 1), (2, 20, 1), (3, 30, 1)], [(1, 11, 1), (2, 20, 1)]);
    let ranges = || WantedRows::Ranges(vec![range(&[], &[0, 0x80]), range(&[0, 0x80], &[1])]);
    for wanted in [WantedRows::Any, ranges()] {
        let now = request(&c, t, wanted);
        assert_eq!(rows_of(&found(&c, now.clone()).await), new);
        assert_eq!(rows_of(&found(&c, ReadRequest { epoch: then, ..now }).await), old);
    }
    let by_key = request(&c, t, keys(&[3, 1, 7, 2]));
    let told = found(&c, by_key.clone()).await;
    assert_eq!((told.positions.as_slice(), rows_of(&told).as_slice()), (&[1, 3][..], &new[..]));
    let told = found(&c, ReadRequest { epoch: then, ..by_key.clone() }).await;
    assert_eq!((told.positions.as_slice(), rows_of(&told).as_slice()), (&[0, 1, 3][..], &old[..]));
    let values = found(&c, ReadRequest { columns: vec![1], ..by_key }).await;
    let batch = &values.chunks[0].batch;
    assert_eq!(batch.num_columns(), 1);
    assert_eq!(batch.column(0).as_primitive::<Int64Type>().values().to_vec(), [11, 20]);
    assert_eq!(c.sim.stats().gets, gets, "the rows were in memory");
}

#[tokio::test]
async fn a_read_ends_when_it_has_as_many_rows_as_it_wants() {
    let (c, t, _) = served().await;
    c.insert(t, (0..500).map(|id| (id, id))).await;
    let few = ReadRequest { limit: Some(10), ..request(&c, t, WantedRows::Any) };
    let rows = rows_of(&found(&c, few).await).len();
    assert!((10..20).contains(&rows), "{rows}");
    let none = request(&c, t, WantedRows::Ranges(vec![range(&[0xff, 0xff], &[0xff; 3])]));
    assert!(rows_of(&found(&c, none).await).is_empty());
}

#[tokio::test]
async fn what_may_be_something_else_is_refused() {
    let (c, t, is_elsewhere) = served().await;
    c.insert(t, [(1, 10)]).await;
    let then = Epoch(c.version(t).epoch);
    c.insert(t, [(2, 20)]).await;
    let now = request(&c, t, WantedRows::Any);
    assert_eq!(rows_of(&found(&c, now.clone()).await), [(1, 10, 1), (2, 20, 1)]);

    let generation = Generation(now.generation.0 + 1);
    let later = ReadRequest { generation, ..now.clone() };
    assert_eq!(refused(&c, later).await, ReadRefusal::NotOpen);
    let more = ReadRequest { commits: now.commits + 1, ..now.clone() };
    assert_eq!(refused(&c, more).await, ReadRefusal::NotYet);
    let small = ReadRequest { max_bytes: 8, ..now.clone() };
    assert_eq!(refused(&c, small).await, ReadRefusal::TooLarge);
    let small = ReadRequest { max_bytes: 8, ..request(&c, t, keys(&[1, 2])) };
    assert_eq!(refused(&c, small).await, ReadRefusal::TooLarge);
    c.store.job(t).unwrap().set_horizon(now.epoch);
    assert_eq!(refused(&c, ReadRequest { epoch: then, ..now.clone() }).await, ReadRefusal::TooOld);
    assert_eq!(rows_of(&found(&c, now.clone()).await).len(), 2);

    is_elsewhere.store(true, Ordering::Relaxed);
    assert_eq!(refused(&c, now.clone()).await, ReadRefusal::NotOpen, "the job has moved");
    is_elsewhere.store(false, Ordering::Relaxed);
    assert_eq!(rows_of(&found(&c, now.clone()).await).len(), 2);
    c.worker.stop_job(t, now.generation).await;
    assert_eq!(refused(&c, now).await, ReadRefusal::NotOpen, "the job has stopped");
}

#[tokio::test]
async fn a_started_job_has_what_was_committed_before() {
    let (c, t, _) = served().await;
    c.insert(t, [(1, 10)]).await;
    let before = request(&c, t, WantedRows::Any);
    c.start(t).await.unwrap();
    assert_eq!(refused(&c, before).await, ReadRefusal::NotOpen);
    let now = request(&c, t, WantedRows::Any);
    assert_eq!(rows_of(&found(&c, now).await), [(1, 10, 1)]);
}

#[tokio::test]
async fn more_keys_and_ranges_than_one_request_may_have_are_refused() {
    let (c, t, _) = served().await;
    c.insert(t, [(1, 10)]).await;
    let key = |bytes: usize| Bytes::from(vec![0xff; bytes]);
    let nothing = |bytes: usize| KeyRange { from: key(bytes), until: key(bytes) };
    let half = MOST_KEY_BYTES / 2;
    let most = [
        WantedRows::Keys(vec![key(9); MOST_KEYS]),
        WantedRows::Keys(vec![key(half); 2]),
        WantedRows::Ranges(vec![nothing(9); MOST_RANGES]),
        WantedRows::Ranges(vec![nothing(half)]),
    ];
    for rows in most {
        assert!(rows_of(&found(&c, request(&c, t, rows)).await).is_empty());
    }
    let more = [
        WantedRows::Keys(vec![key(9); MOST_KEYS + 1]),
        WantedRows::Keys(vec![key(half), key(half + 1)]),
        WantedRows::Ranges(vec![nothing(9); MOST_RANGES + 1]),
        WantedRows::Ranges(vec![nothing(half), nothing(1)]),
    ];
    for rows in more {
        assert_eq!(refused(&c, request(&c, t, rows)).await, ReadRefusal::TooLarge);
    }
}

#[tokio::test]
async fn what_no_table_of_the_relation_has_is_an_error() {
    let (c, t, _) = served().await;
    c.insert(t, [(1, 10), (2, 20)]).await;
    for rows in [WantedRows::Any, keys(&[1]), WantedRows::Ranges(vec![range(&[], &[0xff])])] {
        let good = request(&c, t, rows);
        let table = TableId(good.table.0 + 1);
        for bad in [
            ReadRequest { columns: vec![0, 2], ..good.clone() },
            ReadRequest { columns: vec![u32::MAX], ..good.clone() },
            ReadRequest { columns: vec![0, 1, 0], ..good.clone() },
            ReadRequest { table, ..good.clone() },
        ] {
            let answer = c.worker.read(bad.clone()).await;
            assert!(matches!(answer, Err(CallError::Malformed(_))), "{bad:?}: {answer:?}");
        }
        assert!(!rows_of(&found(&c, good).await).is_empty(), "others are answered");
    }
    // Keys that no row can have, and a range that ends before it begins.
    let strange = WantedRows::Keys(vec![Bytes::new(), Bytes::from_static(&[0xff])]);
    assert!(found(&c, request(&c, t, strange)).await.positions.is_empty());
    let turned = WantedRows::Ranges(vec![range(&[0xff], &[])]);
    assert!(rows_of(&found(&c, request(&c, t, turned)).await).is_empty());
}

const STATEMENT: StatementId = StatementId { frontend: 7, number: 1 };

fn dml(c: &Cluster) -> &dyn DmlService {
    &*c.worker
}

type Called<'a> = BoxFuture<'a, Result<DmlAnswer, CallError>>;

/// A frontend's statement that inserts (1, 10).
fn called<'a>(c: &'a Cluster, table: JobId, entered: &'a EntryFlag) -> Called<'a> {
    dml(c).apply_dml(table, STATEMENT, delta(&[(1, 10, 1)]), INSERT, entered)
}

/// Until its rows may be committed. The table's epochs end only when the answer is dropped.
async fn has_entered<'a>(
    c: &'a Cluster,
    table: JobId,
    entered: &'a EntryFlag,
) -> (Called<'a>, impl Drop) {
    let turn = Arc::clone(&c.meta.jobs.lock()[&table].turn);
    let turn = turn.lock_owned().await;
    let mut statement = called(c, table, entered);
    tokio::select! {
        biased;
        answer = &mut statement => panic!("it is answered before: {answer:?}"),
        () = entered.wait() => {}
    }
    (statement, turn)
}

/// Polls a call, which waits for something.
async fn waits<T>(call: &mut BoxFuture<'_, T>) {
    for _ in 0..1_000 {
        assert!(call.now_or_never().is_none(), "there is nothing that it waits for");
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn an_abandoned_statement_that_has_not_entered_ends_and_is_refused_later() {
    let (c, t, _) = served().await;
    let entered = EntryFlag::default();
    let locks = c.worker.lock_tables(&[t]).await.unwrap();
    let mut statement = called(&c, t, &entered);
    waits(&mut statement).await;
    let tables = [t];
    let (ended, is_over) = tokio::join!(statement, dml(&c).abandon(&tables, STATEMENT));
    assert!(ended.is_err() && is_over.unwrap());
    drop(locks);
    // And a call of it that comes only now.
    assert!(called(&c, t, &entered).await.is_err());
    c.insert(t, [(2, 20)]).await;
    assert_eq!(c.rows(t).await, [(2, 20, 1)]);
    assert!(!entered.is_set());
}

#[tokio::test]
async fn an_abandoned_statement_that_has_entered_is_waited_for() {
    let (c, t, _) = served().await;
    let entered = EntryFlag::default();
    let (statement, turn) = has_entered(&c, t, &entered).await;
    let tables = [t];
    let mut abandon = dml(&c).abandon(&tables, STATEMENT);
    assert!((&mut abandon).now_or_never().is_none());
    assert!(statement.await.is_err());
    waits(&mut abandon).await;
    drop(turn);
    assert!(abandon.await.unwrap());
    assert_eq!(c.rows(t).await, [(1, 10, 1)]);
}

/// A leader that takes the commit after all has it before the next generation runs.
#[tokio::test]
async fn what_may_still_be_committed_is_over_when_the_table_runs_again() {
    let (c, t, is_elsewhere) = served().await;
    let entered = EntryFlag::default();
    let (statement, _turn) = has_entered(&c, t, &entered).await;
    let generation = c.meta.jobs.lock()[&t].start.generation;
    c.meta.cut_only(t, generation, Epoch::ZERO).await.unwrap();
    c.worker.stop_job(t, generation).await;
    let unknown = SqlError::from(statement.await.unwrap_err());
    assert_eq!(unknown.state.0, "08007");
    let tables = [t];
    let mut abandon = dml(&c).abandon(&tables, STATEMENT);
    waits(&mut abandon).await;
    c.start(t).await.unwrap();
    assert!(abandon.await.unwrap());
    assert!(c.rows(t).await.is_empty());

    let generation = c.meta.jobs.lock()[&t].start.generation;
    c.worker.stop_job(t, generation).await;
    is_elsewhere.store(true, Ordering::Relaxed);
    assert!(!dml(&c).abandon(&[t], STATEMENT).await.unwrap(), "the log tells");
}
