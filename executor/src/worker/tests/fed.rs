//! Tables that a connector feeds: rows that are read before the log has them change nothing but the time. What is at their
//! keys is in memory when they enter, and keys of the views behind the table are announced.

use std::collections::BTreeMap;
use std::time::Duration;

use millrace_graph::lookahead::Place;
use millrace_rpc::catalog::OnConflict;
use millrace_rpc::version::feed_counter;

use super::lookahead::{cold, counted, counts};
use super::sources::numbers;
use super::*;
use crate::lookahead::keys_ahead::KeysAhead;
use crate::lookahead::read_ahead::{RawBatch, Told};
use crate::memory::MemoryClass;
use crate::options::LookaheadMode;
use crate::stats::{LookaheadStats, OperatorStats};
use crate::worker::feed::FeedAhead;

/// Rows of a record, and records.
const ROWS: u64 = 30;
const ROUNDS: u64 = 8;
/// Rows that are there before the connector brings others with their keys.
const OLD: i64 = 2_000;

/// A table that is fed with numbers, and what the log says of them.
struct Fed {
    c: Cluster,
    t: JobId,
}

impl Fed {
    async fn new(exec: ExecOptions) -> Fed {
        Fed::with(exec, |_| {}).await
    }

    async fn with(exec: ExecOptions, set: impl FnOnce(&mut Relation)) -> Fed {
        let c = Cluster::over(Profile::INSTANT, exec, |s| s.block_bytes = Some(256)).await;
        c.meta.changes.set(watch::Sender::new(0)).unwrap();
        let mut relation = relation(1, RelationKind::Table);
        (relation.key, relation.distribution) = (vec![0], vec![0]);
        relation.primary_key = true;
        relation.on_conflict = OnConflict::Overwrite as i32;
        relation.options = numbers();
        set(&mut relation);
        let version = JobVersion { epoch: c.meta.next_epoch().0, ..JobVersion::default() };
        let t = c.register(logged(relation, version, Vec::new(), 1), None);
        c.start(t).await.unwrap();
        c.insert(t, (0..OLD).map(|id| (id, -1))).await;
        Fed { c, t }
    }

    /// The rows are on disk, and nothing of them in memory.
    async fn forget(&self) {
        let store = self.c.store.job(self.t).unwrap();
        let edit = store.flush().await.unwrap();
        Meta(Arc::clone(&self.c.meta)).commit_edit(self.t, Generation(1), edit).await.unwrap();
        settle().await;
        self.c.store.cache().clear_memory();
    }

    fn tell(&self) {
        self.c.meta.changes.get().unwrap().send_modify(|n| *n += 1);
    }

    /// The next record is to fix so many rows: whatever reads ahead has done so afterwards.
    async fn plan(&self, rows: u64) {
        *self.c.meta.planned.lock() = vec![(0, rows)];
        self.tell();
        settle().await;
    }

    /// The record with so many rows is in the log: they are committed afterwards.
    async fn fix(&self, rows: u64) {
        self.c.end_at(Epoch(rows), rows);
        self.tell();
        let committed = async {
            while self.c.version(self.t).counters.get(&feed_counter(0)) != Some(&rows) {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        let limit = Duration::from_secs(20);
        tokio::time::timeout(limit, committed).await.expect("the rows are committed");
        settle().await;
    }

    fn read_ahead(&self) -> usize {
        self.c.worker.governor().used_by(MemoryClass::Ahead)
    }

    /// Lookups of the table's statements that asked the store.
    async fn cold_lookups(&self) -> u64 {
        self.c.worker.shared.table(self.t).await.unwrap().cold_lookups()
    }

    /// What is told of the table's connector.
    fn connector(&self) -> OperatorStats {
        let operators = self.c.worker.stats(self.t).unwrap().operators;
        let [connector]: [OperatorStats; 1] =
            operators.try_into().expect("a table has no other operator");
        connector
    }
}

/// The clock, which is paused, goes on when nothing else does.
async fn settle() {
    tokio::time::sleep(Duration::from_secs(1)).await;
}

fn reads_ahead(read_ahead: bool) -> ExecOptions {
    ExecOptions { read_ahead, ..ExecOptions::default() }
}

/// The table's rows when the connector has brought so many.
fn expected(fed: u64) -> Vec<Row> {
    (0..OLD).map(|id| (id, if id < fed as i64 { id } else { -1 }, 1)).collect()
}

/// After each record the rows and the counters of the table: how far the connector is, among them.
async fn shown(read_ahead: bool, planned: &[u64]) -> Vec<(Vec<Row>, BTreeMap<String, u64>)> {
    let fed = Fed::new(reads_ahead(read_ahead)).await;
    let mut shown = Vec::new();
    for (round, planned) in (1..).zip(planned) {
        fed.plan(*planned).await;
        // The first record finds no reader that is open.
        assert_eq!(fed.read_ahead() > 0, read_ahead && round > 1 && *planned > (round - 1) * ROWS);
        fed.fix(round * ROWS).await;
        shown.push((fed.c.rows(fed.t).await, fed.c.version(fed.t).counters));
    }
    assert!(fed.c.worker.feed_error(fed.t).is_none());
    shown
}

/// As planned, less, more, not at all.
#[tokio::test(start_paused = true)]
async fn rows_and_counters_of_a_fed_table_are_the_same_read_ahead_or_not() {
    let planned = [30, 60, 80, 130, 150, 150, 217, 240];
    assert_eq!(planned.len() as u64, ROUNDS);
    let with = shown(true, &planned).await;
    assert_eq!(with, shown(false, &planned).await);
    for (round, (rows, counters)) in (1..).zip(&with) {
        assert_eq!(*rows, expected(round * ROWS), "round {round}");
        assert_eq!(counters.get(&feed_counter(0)), Some(&(round * ROWS)));
    }
}

#[tokio::test(start_paused = true)]
async fn what_is_at_the_keys_of_rows_that_are_read_ahead_is_in_memory_when_they_enter() {
    for read_ahead in [true, false] {
        let fed = Fed::new(reads_ahead(read_ahead)).await;
        fed.forget().await;
        let before = fed.cold_lookups().await;
        for round in 1..=ROUNDS {
            fed.plan(round * ROWS).await;
            fed.fix(round * ROWS).await;
            assert_eq!(fed.c.rows(fed.t).await, expected(round * ROWS));
            fed.forget().await;
        }
        // The first lookup, for which nothing has been read ahead, shows that others will ask the store.
        let cold = if read_ahead { 1 } else { ROUNDS };
        assert_eq!(fed.cold_lookups().await - before, cold, "read ahead: {read_ahead}");
        // All other rows find what was read ahead.
        let ahead = if read_ahead { (ROUNDS - 1) * ROWS } else { 0 };
        let keys = LookaheadStats {
            active: usize::from(read_ahead),
            hinted: ahead,
            prefetched: ahead,
            in_time: ahead,
            missed: ROUNDS * ROWS - ahead,
            ..LookaheadStats::default()
        };
        let told = fed.connector();
        assert_eq!((told.lookahead, told.rows_in), (keys, ROUNDS * ROWS));
        let places: &[&str] = if read_ahead { &["entry"] } else { &[] };
        assert_eq!(told.measures.places(), places);
        let requests = [told.measures.ahead_requests, told.measures.demand_requests];
        assert_eq!(requests.map(|n| n > 0), [read_ahead, true]);
    }
}

/// A table whose rows are in memory pays nothing.
#[tokio::test(start_paused = true)]
async fn nothing_is_looked_up_ahead_while_no_lookup_asks_the_store() {
    let fed = Fed::new(reads_ahead(true)).await;
    for round in 1..=ROUNDS {
        fed.plan(round * ROWS).await;
        assert_eq!(fed.read_ahead() > 0, round > 1, "rows are read ahead all the same");
        fed.fix(round * ROWS).await;
    }
    let table = fed.c.worker.shared.table(fed.t).await.unwrap();
    assert_eq!((table.cold_lookups(), table.looks_up_ahead()), (0, false));
    // Every lookup ahead counts its keys, whatever becomes of it.
    assert_eq!(fed.connector().lookahead, LookaheadStats::default());
}

/// A deletion brings its key, and NULL where the table's rows have values.
#[tokio::test(start_paused = true)]
async fn deletions_that_bring_no_more_than_keys_are_announced_looked_up_ahead_and_enter() {
    let fed = Fed::with(reads_ahead(false), |table| table.columns[1].nullable = false).await;
    fed.forget().await;
    let table = fed.c.worker.shared.table(fed.t).await.unwrap();
    let relation = Meta(Arc::clone(&fed.c.meta)).relation(fed.t).unwrap();
    let ahead = FeedAhead::new(&relation, table).unwrap();
    // A row that is there goes, one that is not does not, and another comes.
    let ids: ArrayRef = Arc::new(Int64Array::from(vec![1, -1, OLD]));
    let values: ArrayRef = Arc::new(Int64Array::from(vec![None, None, Some(7)]));
    let rows = RecordBatch::try_new(schema(), vec![ids, values]).unwrap();
    let weights = Some(Int64Array::from(vec![-1, -1, 1]));
    let batch = RawBatch {
        rows: rows.clone(),
        weights: weights.clone(),
        after: 3,
        position: None,
        bad_rows: Vec::new(),
        announced: None,
        keys: KeysAhead::default(),
    };
    let followers = fed.c.worker.shared.changelogs.uncommitted();
    let mut following = followers.follow(fed.t, vec![Place::Entry]);
    assert!(ahead.announce(&batch).is_some());
    let announced = following.next().await.unwrap();
    let of_chunk = |chunk: &DeltaChunk| {
        (0..chunk.num_rows()).map(|row| chunk.weight(row)).collect::<Vec<i64>>()
    };
    assert_eq!(announced.rows.iter().map(of_chunk).collect::<Vec<_>>(), [[-1, -1, 1]]);
    let read = ahead.prefetch(rows.clone(), weights.clone(), KeysAhead::default());
    read.expect("it reads the store").await;
    let told = fed.connector().lookahead;
    assert_eq!((told.hinted, told.prefetched, told.absent), (3, 3, 2), "{told:?}");
    let statement = DmlStatement {
        id: StatementId { frontend: 2, number: 1 },
        delta: DeltaChunk::new(rows, weights),
        kind: DmlKind::Feed { on_conflict: InsertConflict::Overwrite },
        mark: None,
        entered: EntryFlag::default(),
        announced: None,
    };
    let done = fed.c.worker.apply_dml(fed.t, statement).await.unwrap();
    assert_eq!(done.rows_affected, 2);
    let left = (0..OLD).filter(|id| *id != 1).map(|id| (id, -1, 1));
    assert_eq!(fed.c.rows(fed.t).await, left.chain([(OLD, 7, 1)]).collect::<Vec<Row>>());
}

/// What was read ahead of rows that the log fixes otherwise is thrown away, and they are read again.
#[tokio::test(start_paused = true)]
async fn keys_that_are_looked_up_ahead_of_rows_that_are_read_again_are_in_vain() {
    let fed = Fed::new(reads_ahead(true)).await;
    fed.forget().await;
    fed.plan(ROWS).await;
    fed.fix(ROWS).await;
    fed.forget().await;
    fed.plan(3 * ROWS).await;
    let told = fed.connector().lookahead;
    assert_eq!((told.prefetched, told.in_time, told.unused), (2 * ROWS, 0, 0), "{told:?}");
    fed.fix(2 * ROWS).await;
    let told = fed.connector().lookahead;
    assert_eq!((told.in_time, told.unused), (0, 2 * ROWS), "{told:?}");
    assert_eq!(fed.c.rows(fed.t).await, expected(2 * ROWS));
}

#[tokio::test(start_paused = true)]
async fn keys_of_a_view_over_a_fed_table_are_announced_before_the_log_has_the_rows() {
    for read_ahead in [true, false] {
        let fed = Fed::new(ExecOptions { read_ahead, ..cold(LookaheadMode::Entry) }).await;
        let v = fed.c.view(2, fed.t, counted(fed.t), 2).await;
        fed.c.catch_up(v).await;
        let mut early = 0;
        for round in 1..=20 {
            let before = fed.c.lookahead(v).hinted;
            fed.plan(round * ROWS).await;
            early += u64::from(fed.c.lookahead(v).hinted > before);
            fed.fix(round * ROWS).await;
            fed.c.follow(v, fed.t).await;
            assert_eq!(fed.c.rows(v).await, counts(&fed.c.rows(fed.t).await), "round {round}");
        }
        let told = fed.c.lookahead(v);
        assert!(told.missed > 0 && told.hinted > 0, "{told:?}");
        assert_eq!(early > 0, read_ahead, "{told:?}");
    }
}
