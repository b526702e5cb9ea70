//! What a table promises to its statements.

use std::sync::Arc;

use millrace_common::{SqlError, SqlState};

use super::*;
use crate::dml::{EntryFlag, Load, LoadKind, OnRepeat, ReadSet};

/// Loads go to the table in parts.
fn small_loads() -> ExecOptions {
    ExecOptions { load_bytes: 64, ..ExecOptions::default() }
}

impl Cluster {
    /// `CREATE TABLE (v BIGINT)`: its first column are row ids.
    async fn table_without_key(&self, id: u32) -> JobId {
        let mut relation = relation(id, RelationKind::Table);
        relation.key = vec![0];
        relation.distribution = vec![0];
        let version = JobVersion { epoch: self.meta.next_epoch().0, ..JobVersion::default() };
        let id = self.register(logged(relation, version, Vec::new(), 1), None);
        self.start(id).await.unwrap();
        id
    }
}

const CHANGE: DmlKind = DmlKind::Change;
const NEW_ROWS: LoadKind = LoadKind::Insert { on_conflict: InsertConflict::Error };

fn insert(on_conflict: InsertConflict) -> DmlKind {
    DmlKind::Insert { on_conflict }
}

#[tokio::test]
async fn an_acknowledged_insert_is_visible_and_survives_a_restart() {
    let (c, t) = Cluster::with_table(ExecOptions::default()).await;
    let done = c.dml(t, &[(1, 10, 1), (2, 20, 1)], INSERT).await.unwrap();
    assert_eq!(done.rows_affected, 2);
    assert_eq!(c.rows(t).await, [(1, 10, 1), (2, 20, 1)]);
    assert_eq!(c.version(t).row_count, 2);
    c.start(t).await.unwrap();
    assert_eq!(c.rows(t).await, [(1, 10, 1), (2, 20, 1)]);
    let duplicate = c.dml(t, &[(2, 9, 1)], INSERT).await;
    assert!(matches!(duplicate, Err(DmlError::UniqueViolation { .. })));
}

#[tokio::test]
async fn a_duplicate_key_is_named_and_nothing_of_its_statement_stays() {
    let (c, t) = Cluster::with_table(ExecOptions::default()).await;
    c.insert(t, [(1, 10)]).await;
    for rows in [[(5, 0, 1), (1, 0, 1)], [(1, 0, 1), (5, 0, 1)]] {
        let error = SqlError::from(c.dml(t, &rows, INSERT).await.unwrap_err());
        assert_eq!(error.state, SqlState::UNIQUE_VIOLATION);
        assert_eq!(error.message, "duplicate key value violates unique constraint \"r1_pkey\"");
        assert_eq!(error.detail.as_deref(), Some("Key (id)=(1) already exists."));
    }
    let twice = c.dml(t, &[(7, 1, 1), (7, 2, 1)], INSERT).await;
    assert!(matches!(twice, Err(DmlError::UniqueViolation { row: Some(1), .. })));
    assert_eq!(c.rows(t).await, [(1, 10, 1)]);
}

#[tokio::test]
async fn on_conflict_keeps_or_overwrites() {
    let (c, t) = Cluster::with_table(ExecOptions::default()).await;
    c.insert(t, [(1, 10), (2, 20)]).await;
    let rows = [(2, 99, 1), (3, 30, 1), (3, 31, 1)];
    let done = c.dml(t, &rows, insert(InsertConflict::Nothing)).await.unwrap();
    assert_eq!(done.rows_affected, 1);
    assert_eq!(done.kept.unwrap().values().to_vec(), [1]);
    assert_eq!(c.rows(t).await, [(1, 10, 1), (2, 20, 1), (3, 30, 1)]);
    c.dml(t, &rows, insert(InsertConflict::Overwrite)).await.unwrap();
    assert_eq!(c.rows(t).await, [(1, 10, 1), (2, 99, 1), (3, 31, 1)]);
    assert_eq!(c.version(t).row_count, 3);
}

#[tokio::test]
async fn updates_may_swap_keys_and_must_have_seen_the_rows_they_change() {
    let (c, t) = Cluster::with_table(ExecOptions::default()).await;
    c.insert(t, [(1, 10), (2, 20), (3, 30)]).await;
    // UPDATE SET id = id + 1
    let shift = [(1, 10, -1), (2, 10, 1), (2, 20, -1), (3, 20, 1), (3, 30, -1), (4, 30, 1)];
    assert_eq!(c.dml(t, &shift, CHANGE).await.unwrap().rows_affected, 3);
    assert_eq!(c.rows(t).await, [(2, 10, 1), (3, 20, 1), (4, 30, 1)]);
    let stale = c.dml(t, &[(2, 11, -1), (2, 12, 1)], CHANGE).await;
    assert!(matches!(stale, Err(DmlError::Conflict)));
    let gone = c.dml(t, &[(1, 10, -1)], CHANGE).await;
    assert!(matches!(gone, Err(DmlError::Conflict)));
    let taken = [(2, 10, -1), (3, 10, 1)];
    assert!(matches!(c.dml(t, &taken, CHANGE).await, Err(DmlError::UniqueViolation { .. })));
    // The row that the key goes to is not among those the statement saw: seeing it would not help.
    let upsert = c.dml(t, &taken, DmlKind::Upsert).await;
    assert!(matches!(upsert, Err(DmlError::UniqueViolation { .. })));
    c.dml(t, &[(2, 10, -1), (4, 30, -1)], CHANGE).await.unwrap();
    assert_eq!(c.rows(t).await, [(3, 20, 1)]);
    assert_eq!(c.version(t).row_count, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_counters_lose_nothing() {
    let c = Arc::new(Cluster::new(ExecOptions::default()).await);
    let t = c.table(1).await;
    c.insert(t, [(1, 0)]).await;
    let session = |c: Arc<Cluster>| async move {
        for _ in 0..20 {
            loop {
                let old = c.rows(t).await[0].1;
                match c.dml(t, &[(1, old, -1), (1, old + 1, 1)], CHANGE).await {
                    Ok(_) => break,
                    Err(DmlError::Conflict) => {}
                    Err(e) => panic!("{e}"),
                }
            }
        }
    };
    let sessions: Vec<_> = (0..4).map(|_| tokio::spawn(session(Arc::clone(&c)))).collect();
    for s in sessions {
        s.await.unwrap();
    }
    assert_eq!(c.rows(t).await, [(1, 80, 1)]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_concurrent_inserts_of_a_key_one_wins() {
    let c = Arc::new(Cluster::new(ExecOptions::default()).await);
    let t = c.table(1).await;
    let tries = (0..16).map(|i| {
        let c = Arc::clone(&c);
        tokio::spawn(async move { c.dml(t, &[(i / 4, i, 1)], INSERT).await.is_ok() })
    });
    let won = futures::future::join_all(tries).await;
    assert_eq!(won.into_iter().filter(|w| *w.as_ref().unwrap()).count(), 4);
    assert_eq!(c.rows(t).await.len(), 4);
}

#[tokio::test]
async fn a_load_shows_nothing_before_it_is_finished() {
    let (c, t) = Cluster::with_table(ExecOptions::default()).await;
    let id = |number| StatementId { frontend: 2, number };
    let mut load = c.worker.begin_load(t, id(1), NEW_ROWS).await.unwrap();
    load.append(delta(&[(1, 1, 1)])).await.unwrap();
    load.append(delta(&[(2, 2, 1)])).await.unwrap();
    c.insert(t, [(3, 3)]).await;
    assert_eq!(c.rows(t).await.len(), 1);
    assert_eq!(load.finish(&EntryFlag::default()).await.unwrap().rows_affected, 2);
    assert_eq!(c.rows(t).await.len(), 3);
    let mut aborted = c.worker.begin_load(t, id(2), NEW_ROWS).await.unwrap();
    aborted.append(delta(&[(9, 9, 1)])).await.unwrap();
    aborted.abort();
    assert_eq!(c.rows(t).await.len(), 3);
}

#[tokio::test]
async fn a_load_beyond_its_memory_is_staged_checked_and_linked() {
    let (c, t) = Cluster::with_table(small_loads()).await;
    c.insert(t, [(50, 0)]).await;
    let id = |number| StatementId { frontend: 2, number };
    let rows = |from: i64| (from..from + 10).map(|i| (i, i, 1)).collect::<Vec<_>>();
    let mut load = c.worker.begin_load(t, id(1), NEW_ROWS).await.unwrap();
    for from in [20, 0, 10] {
        load.append(delta(&rows(from))).await.unwrap();
    }
    assert!(load.has_spilled());
    assert_eq!(c.rows(t).await.len(), 1);
    assert_eq!(load.finish(&EntryFlag::default()).await.unwrap().rows_affected, 30);
    assert_eq!((c.rows(t).await.len(), c.version(t).row_count), (31, 31));
    c.start(t).await.unwrap();
    assert_eq!(c.rows(t).await.len(), 31);
    // A key twice in the load, and a key that the table has.
    for second in [100, 50] {
        let mut load = c.worker.begin_load(t, id(second as u64), NEW_ROWS).await.unwrap();
        load.append(delta(&rows(100))).await.unwrap();
        load.append(delta(&[(second, 0, 1)])).await.unwrap();
        let failed = load.finish(&EntryFlag::default()).await;
        let detail = format!("Key (id)=({second}) already exists.");
        assert!(
            matches!(&failed, Err(DmlError::UniqueViolation { detail: d, .. }) if *d == detail),
            "{failed:?}"
        );
    }
    assert_eq!(c.rows(t).await.len(), 31);
    // A key twice among rows that come together: it is told at once, and which of the load's rows it is.
    let mut load = c.worker.begin_load(t, id(101), NEW_ROWS).await.unwrap();
    load.append(delta(&rows(100))).await.unwrap();
    assert!(load.has_spilled());
    let twice = load.append(delta(&[(200, 0, 1), (201, 0, 1), (200, 1, 1)])).await;
    let at = rows(100).len() + 2;
    assert!(
        matches!(&twice, Err(DmlError::UniqueViolation { row: Some(row), .. }) if *row == at),
        "{twice:?}"
    );
    drop(load);
    assert_eq!(c.rows(t).await.len(), 31);
    c.insert(t, [(100, 0)]).await;
}

#[tokio::test]
async fn a_load_that_replaces_rows_needs_the_table_as_it_was_read() {
    let (c, t) = Cluster::with_table(small_loads()).await;
    let id = |number| StatementId { frontend: 2, number };
    let done = c.dml(t, &[(1, 1, 1), (2, 2, 1), (3, 3, 1)], INSERT).await.unwrap();
    let stale = LoadKind::Replace { read_at: done.epoch };
    c.insert(t, [(4, 4)]).await;
    let mut load = c.worker.begin_load(t, id(1), stale).await.unwrap();
    load.append(delta(&[(1, 1, -1)])).await.unwrap();
    assert!(matches!(load.finish(&EntryFlag::default()).await, Err(DmlError::Conflict)));
    let mut load = c.worker.begin_load(t, id(2), stale).await.unwrap();
    let locks = Some(c.worker.lock_tables(&[t]).await.unwrap());
    load.rest_on(ReadSet { locks, ..ReadSet::default() });
    load.read_at(Epoch(c.version(t).epoch));
    load.append(delta(&[(1, 1, -1), (2, 20, 1)])).await.unwrap();
    assert_eq!(load.finish(&EntryFlag::default()).await.unwrap().rows_affected, 2);
    assert_eq!(c.rows(t).await, [(2, 20, 1), (3, 3, 1), (4, 4, 1)]);
    assert_eq!(c.version(t).row_count, 3);
    c.insert(t, [(1, 5)]).await;
}

#[tokio::test]
async fn a_load_that_moves_rows_gives_each_key_one_row() {
    let (c, t) = Cluster::with_table(small_loads()).await;
    let id = |number| StatementId { frontend: 2, number };
    c.dml(t, &[(1, 1, 1), (2, 2, 1), (3, 3, 1), (9, 9, 1)], INSERT).await.unwrap();
    let change = |on_repeat| LoadKind::Change { read_at: Epoch(c.version(t).epoch), on_repeat };
    let begin = |number, on_repeat| c.worker.begin_load(t, id(number), change(on_repeat));
    // 1 → 2, 2 → 3, 3 → 4; 5 is new.
    let mut load = begin(1, OnRepeat::Duplicate).await.unwrap();
    load.append(delta(&[(3, 3, -1), (4, 3, 1)])).await.unwrap();
    load.append(delta(&[(1, 1, -1), (2, 1, 1), (2, 2, -1), (3, 2, 1)])).await.unwrap();
    load.append(delta(&[(5, 5, 1)])).await.unwrap();
    load.finish(&EntryFlag::default()).await.unwrap();
    let rows = [(2, 1, 1), (3, 2, 1), (4, 3, 1), (5, 5, 1), (9, 9, 1)];
    assert_eq!(c.rows(t).await, rows);
    assert_eq!(c.version(t).row_count, 5);
    // Onto a row that stays, and two onto one key.
    let mut load = begin(2, OnRepeat::Duplicate).await.unwrap();
    load.append(delta(&[(2, 1, -1), (9, 1, 1)])).await.unwrap();
    assert!(matches!(
        load.finish(&EntryFlag::default()).await,
        Err(DmlError::UniqueViolation { .. })
    ));
    for (number, on_repeat, state) in
        [(3, OnRepeat::Duplicate, "23505"), (4, OnRepeat::SecondTime, "21000")]
    {
        let mut load = begin(number, on_repeat).await.unwrap();
        load.append(delta(&[(2, 1, -1), (7, 1, 1)])).await.unwrap();
        load.append(delta(&[(3, 2, -1), (7, 2, 1)])).await.unwrap();
        let e = SqlError::from(load.finish(&EntryFlag::default()).await.unwrap_err());
        assert_eq!(e.state.0, state);
    }
    assert_eq!(c.rows(t).await, rows);
}

#[tokio::test]
async fn a_load_that_meets_keys_overwrites_or_gives_way() {
    for (on_conflict, expected, affected) in [
        (InsertConflict::Overwrite, [(1, 11, 1), (2, 22, 1), (3, 33, 1)], 6),
        (InsertConflict::Nothing, [(1, 1, 1), (2, 20, 1), (3, 30, 1)], 2),
    ] {
        let (c, t) = Cluster::with_table(small_loads()).await;
        c.insert(t, [(1, 1)]).await;
        let id = StatementId { frontend: 2, number: 1 };
        let kind = LoadKind::Insert { on_conflict };
        let mut load = c.worker.begin_load(t, id, kind).await.unwrap();
        load.append(delta(&[(2, 20, 1), (1, 10, 1)])).await.unwrap();
        load.append(delta(&[(3, 30, 1), (2, 22, 1)])).await.unwrap();
        load.append(delta(&[(1, 11, 1), (3, 33, 1)])).await.unwrap();
        assert!(load.has_spilled());
        let done = load.finish(&EntryFlag::default()).await.unwrap();
        assert_eq!(c.rows(t).await, expected);
        assert_eq!(c.version(t).row_count, 3);
        assert_eq!(done.rows_affected, affected);
    }
}

#[tokio::test]
async fn row_ids_of_committed_rows_are_never_given_again() {
    let (c, t) = Cluster::with_table(ExecOptions::default()).await;
    let first = c.worker.allocate_row_ids(t, 10).await.unwrap();
    assert_eq!(c.worker.allocate_row_ids(t, 1).await.unwrap(), first + 10);
    c.insert(t, [(first, 0)]).await;
    c.start(t).await.unwrap();
    assert!(c.worker.allocate_row_ids(t, 1).await.unwrap() > first + 10);
}

/// Rows that were given ids before a restart of their table, and enter after it beside others.
#[tokio::test]
async fn row_ids_that_were_given_before_a_restart_are_not_given_again() {
    let c = Cluster::new(small_loads()).await;
    let t = c.table_without_key(1).await;
    let v = c.view(2, t, copy_of(t), 1).await;
    c.catch_up(v).await;
    let given = c.worker.allocate_row_ids(t, 10).await.unwrap();
    let rows: Vec<Row> = (given..given + 10).map(|id| (id, 1, 1)).collect();
    let id = StatementId { frontend: 2, number: 1 };
    let mut load = c.worker.begin_load(t, id, NEW_ROWS).await.unwrap();
    load.append(delta(&rows)).await.unwrap();
    assert!(load.has_spilled());
    c.start(t).await.unwrap();
    c.start(v).await.unwrap();
    let next = c.worker.allocate_row_ids(t, 10).await.unwrap();
    c.insert(t, (next..next + 10).map(|id| (id, 2))).await;
    assert_eq!(load.finish(&EntryFlag::default()).await.unwrap().rows_affected, 10);
    c.follow(v, t).await;
    let rows = c.rows(t).await;
    assert_eq!((rows.len(), c.version(t).row_count), (20, 20));
    assert_eq!(c.rows(v).await, rows);
}

/// Until a cut that a statement has asked for waits for the turn, which the test holds.
async fn cut_waits(c: &Cluster, job: JobId) {
    let waits = async {
        // The job's own, the holder's and that of the cut.
        while Arc::strong_count(&c.meta.jobs.lock()[&job].turn) < 3 {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    };
    let limit = std::time::Duration::from_secs(60);
    tokio::time::timeout(limit, waits).await.expect("the statement asks for a cut");
}

#[tokio::test]
async fn statements_of_a_table_that_stops_are_told() {
    let c = Arc::new(Cluster::with(ExecOptions::default(), |s| s.inline_bytes = 0).await);
    let t = c.table(1).await;
    c.insert(t, [(1, 1)]).await;
    // Sealed and handed over, never concluded: nobody knows.
    let waiting = {
        let c = Arc::clone(&c);
        // The cut that the statement asks for waits for this turn.
        let turn = Arc::clone(&c.meta.jobs.lock()[&t].turn);
        let held = turn.lock_owned().await;
        let statement = tokio::spawn({
            let c = Arc::clone(&c);
            async move { c.dml(t, &[(2, 2, 1)], INSERT).await }
        });
        cut_waits(&c, t).await;
        c.meta.cut_only(t, Generation(1), Epoch::ZERO).await.unwrap();
        (statement, held)
    };
    c.worker.stop_job(t, Generation(1)).await;
    let Err(DmlError::Sql(error)) = waiting.0.await.unwrap() else { panic!("not unknown") };
    assert_eq!(error.state, SqlState::TRANSACTION_RESOLUTION_UNKNOWN);
    // Never sealed: certainly not committed, to be evaluated again.
    c.start(t).await.unwrap();
    let turn = Arc::clone(&c.meta.jobs.lock()[&t].turn);
    let _held = turn.lock_owned().await;
    let statement = tokio::spawn({
        let c = Arc::clone(&c);
        async move { c.dml(t, &[(3, 3, 1)], INSERT).await }
    });
    cut_waits(&c, t).await;
    c.worker.stop_job(t, Generation(2)).await;
    assert!(matches!(statement.await.unwrap(), Err(DmlError::Conflict)));
}

/// What its sessions have locked is given to others: neither what it sends later may be committed, nor what waits here.
#[tokio::test]
async fn statements_of_a_fenced_frontend_enter_no_table() {
    let options = ExecOptions { load_bytes: 4 << 10, ..ExecOptions::default() };
    let (c, t) = Cluster::with_table(options).await;
    c.insert(t, [(1, 1)]).await;
    let id = |number| StatementId { frontend: 2, number };
    let mut loads = Vec::new();
    for (number, keys) in [(1, 10..12), (2, 100..1_000)] {
        let mut load = c.worker.begin_load(t, id(number), NEW_ROWS).await.unwrap();
        let rows: Vec<Row> = keys.map(|key| (key, 0, 1)).collect();
        load.append(delta(&rows)).await.unwrap();
        loads.push(load);
    }
    assert_eq!(loads.iter().map(Load::has_spilled).collect::<Vec<_>>(), [false, true]);
    // It waits for its turn when the frontend is fenced.
    let turn = c.worker.lock_tables(&[t]).await.unwrap();
    let entered = EntryFlag::default();
    let statement = DmlStatement {
        id: id(3),
        delta: delta(&[(3, 3, 1)]),
        kind: INSERT,
        mark: None,
        entered: entered.clone(),
        announced: None,
    };
    let mut waiting = Box::pin(c.worker.apply_dml(t, statement));
    assert!(futures::poll!(&mut waiting).is_pending());
    *c.meta.fenced.lock() = Some(2);
    drop(turn);

    let parts = vec![(t, delta(&[(4, 4, 1)]), INSERT)];
    let block = c.worker.apply_transaction(id(4), parts, ReadSet::default(), &entered);
    let mut outcomes = vec![waiting.await, block.await];
    for load in loads {
        outcomes.push(load.finish(&entered).await);
    }
    for outcome in outcomes {
        match outcome {
            Err(DmlError::Sql(error)) => assert_eq!(error.state, SqlState::ADMIN_SHUTDOWN),
            other => panic!("{other:?}"),
        }
    }
    assert!(!entered.is_set(), "nothing of them may be committed");
    c.insert(t, [(5, 5)]).await;
    assert_eq!(c.rows(t).await, [(1, 1, 1), (5, 5, 1)]);
}
