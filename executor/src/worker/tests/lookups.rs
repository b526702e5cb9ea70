//! Statements look their keys up side by side, and are checked as if each had looked in its turn.

use std::time::Duration;

use tokio::task::JoinHandle;

use super::*;
use crate::dml::{EntryFlag, LoadKind, ReadSet};

/// Every answer takes as long as any other.
const STEADY: Profile =
    Profile { p50: Duration::from_millis(30), p99: Duration::from_millis(30), ..Profile::INSTANT };

const CHANGE: DmlKind = DmlKind::Change;
const NOTHING: DmlKind = DmlKind::Insert { on_conflict: InsertConflict::Nothing };
const OVERWRITE: DmlKind = DmlKind::Insert { on_conflict: InsertConflict::Overwrite };
const FEED: DmlKind = DmlKind::Feed { on_conflict: InsertConflict::Nothing };

/// On disk: a row, and a deletion that only a block tells of.
const COLD: i64 = 5;
const COLD_GONE: i64 = 10_000;
/// In memory: a row, and a deletion.
const WARM: i64 = 10_001;
const WARM_GONE: i64 = 10_002;

const BOTH: [How; 2] = [How::Statement, How::Transaction];

type Outcome = Result<(u64, Option<Vec<u32>>), String>;

fn outcome(result: Result<DmlOutcome, DmlError>) -> Outcome {
    match result {
        Ok(done) => Ok((done.rows_affected, done.kept.map(|kept| kept.values().to_vec()))),
        Err(DmlError::UniqueViolation { detail, row, .. }) => Err(format!("{detail} {row:?}")),
        Err(e) => Err(e.to_string()),
    }
}

/// A table whose rows are on disk, but for those of the two warm keys.
struct Cold {
    c: Arc<Cluster>,
    t: JobId,
    other: JobId,
}

impl Cold {
    async fn new() -> Cold {
        Cold::over(Profile::INSTANT, 20).await
    }

    async fn over(profile: Profile, rows: i64) -> Cold {
        let cluster = Cluster::over(profile, ExecOptions::default(), |s| s.block_bytes = Some(256));
        let c = Arc::new(cluster.await);
        let (t, other) = (c.table(1).await, c.table(2).await);
        c.insert(t, (0..rows).chain([COLD_GONE]).map(|id| (id, id))).await;
        let cold = Cold { c, t, other };
        cold.flush().await;
        cold.must(&[(COLD_GONE, COLD_GONE, -1)], CHANGE).await;
        cold.flush().await;
        cold.must(&[(WARM, 7, 1), (WARM_GONE, 7, 1)], INSERT).await;
        cold.must(&[(WARM_GONE, 7, -1)], CHANGE).await;
        cold.forget().await;
        cold
    }

    /// What is committed goes to disk.
    async fn flush(&self) {
        let store = self.c.store.job(self.t).unwrap();
        let edit = store.flush().await.unwrap();
        Meta(Arc::clone(&self.c.meta)).commit_edit(self.t, Generation(1), edit).await.unwrap();
    }

    /// Until nothing is cached that is on disk.
    async fn forget(&self) {
        // What is being cached of new runs.
        tokio::time::sleep(Duration::from_secs(1)).await;
        self.c.store.cache().clear_memory();
    }

    async fn must(&self, rows: &[Row], kind: DmlKind) {
        self.c.dml(self.t, rows, kind).await.unwrap();
    }

    /// Begins a statement whose lookup hangs.
    async fn hang(&self, rows: &[Row], kind: DmlKind, how: How) -> JoinHandle<Outcome> {
        self.c.sim.hang_reads(Some("data/"));
        let before = self.c.sim.stats().gets;
        let (c, t, other, rows) = (Arc::clone(&self.c), self.t, self.other, rows.to_vec());
        let statement = tokio::spawn(async move { run(&c, (t, other), &rows, kind, how).await });
        let reads = async {
            while self.c.sim.stats().gets == before {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), reads).await.expect("it reads the store");
        statement
    }

    /// The statement, ended.
    async fn release(&self, statement: JoinHandle<Outcome>) -> Outcome {
        self.c.sim.release_reads();
        let limit = Duration::from_secs(60);
        tokio::time::timeout(limit, statement).await.expect("it ends").unwrap()
    }

    async fn content(&self) -> (Vec<Row>, Vec<Row>, i64) {
        let (t, other) = (self.c.rows(self.t).await, self.c.rows(self.other).await);
        (t, other, self.c.version(self.t).row_count)
    }
}

#[derive(Clone, Copy, Debug)]
enum How {
    Statement,
    /// With a row of another table.
    Transaction,
}

async fn run(
    c: &Cluster,
    (t, other): (JobId, JobId),
    rows: &[Row],
    kind: DmlKind,
    how: How,
) -> Outcome {
    match how {
        How::Statement => outcome(c.dml(t, rows, kind).await),
        How::Transaction => {
            let id = StatementId { frontend: 3, number: rows.len() as u64 };
            let parts = vec![(t, delta(rows), kind), (other, delta(&[(1, 1, 1)]), OVERWRITE)];
            let entered = EntryFlag::default();
            let done = c.worker.apply_transaction(id, parts, ReadSet::default(), &entered).await;
            outcome(done)
        }
    }
}

/// Statements with a key that hangs and others that somebody else writes meanwhile.
fn slow() -> Vec<(DmlKind, Vec<Row>)> {
    vec![
        (INSERT, vec![(COLD_GONE, 1, 1), (WARM_GONE, 1, 1)]),
        (INSERT, vec![(COLD_GONE, 1, 1), (WARM, 1, 1)]),
        (NOTHING, vec![(WARM_GONE, 1, 1), (COLD_GONE, 1, 1), (WARM, 1, 1)]),
        (OVERWRITE, vec![(COLD_GONE, 1, 1), (WARM_GONE, 1, 1), (WARM, 2, 1)]),
        (CHANGE, vec![(COLD, COLD, -1), (COLD, 50, 1), (WARM, 7, -1), (WARM, 8, 1)]),
        (CHANGE, vec![(COLD, COLD, -1), (WARM_GONE, COLD, 1)]),
        (DmlKind::Upsert, vec![(COLD, COLD, -1), (COLD, 6, 1), (WARM_GONE, 1, 1)]),
        (FEED, vec![(COLD_GONE, 1, 1), (WARM, 0, -1), (WARM_GONE, 3, 1)]),
        (DmlKind::Replicate, vec![(COLD_GONE, 1, 1), (WARM, 9, 1), (WARM_GONE, 1, -1)]),
    ]
}

/// What others do meanwhile, statement after statement; one may fail.
fn quick() -> Vec<Vec<(DmlKind, Vec<Row>, How)>> {
    use How::{Statement, Transaction};
    let update = |from, to| (CHANGE, vec![(WARM, from, -1), (WARM, to, 1)], Statement);
    let insert = (INSERT, vec![(WARM_GONE, 3, 1)], Statement);
    let delete = (CHANGE, vec![(WARM, 7, -1)], Statement);
    vec![
        vec![],
        vec![insert.clone()],
        vec![delete],
        vec![update(7, 9)],
        vec![insert, (CHANGE, vec![(WARM_GONE, 3, -1)], Statement)],
        vec![update(7, 9), update(9, 7)],
        vec![(INSERT, vec![(WARM_GONE, 1, 1), (WARM, 1, 1)], Statement), update(6, 5)],
        vec![(INSERT, vec![(WARM_GONE, 3, 1)], Transaction)],
    ]
}

/// Whatever others have done since its keys were looked up, a statement does what it would have done after them.
#[tokio::test(start_paused = true)]
async fn a_statement_takes_effect_as_if_it_had_looked_after_the_others() {
    for (kind, rows) in slow() {
        for others in quick() {
            let hows = if others.len() == 1 { &BOTH[..] } else { &BOTH[..1] };
            for &how in hows {
                let (side_by_side, in_turn) = (Cold::new().await, Cold::new().await);
                let a = &side_by_side;
                let statement = a.hang(&rows, kind, how).await;
                for (kind, rows, how) in &others {
                    let first = run(&a.c, (a.t, a.other), rows, *kind, *how).await;
                    let b = &in_turn;
                    assert_eq!(first, run(&b.c, (b.t, b.other), rows, *kind, *how).await);
                }
                let result = a.release(statement).await;
                let b = &in_turn;
                let expected = run(&b.c, (b.t, b.other), &rows, kind, how).await;
                assert_eq!(result, expected, "{how:?} {kind:?} {rows:?} after {others:?}");
                assert_eq!(a.content().await, b.content().await, "{how:?} {kind:?} {others:?}");
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_key_that_hangs_delays_no_other_statement_and_leaves_nothing_when_dropped() {
    let cold = Cold::new().await;
    let before = cold.content().await.0;
    cold.forget().await;
    let rows = [(COLD_GONE, 1, 1), (WARM_GONE, 1, 1)];
    let statement = cold.hang(&rows, INSERT, How::Statement).await;
    let (c, tables) = (Arc::clone(&cold.c), (cold.t, cold.other));
    let block = async move { run(&c, tables, &rows, INSERT, How::Transaction).await };
    let hung = [statement, tokio::spawn(block)];
    cold.must(&[(WARM, 7, -1), (WARM, 8, 1)], CHANGE).await;
    cold.must(&[(WARM_GONE, 4, 1)], INSERT).await;
    for statement in hung {
        assert!(!statement.is_finished());
        statement.abort();
        assert!(statement.await.unwrap_err().is_cancelled());
    }
    cold.c.sim.release_reads();
    cold.must(&[(WARM_GONE, 4, -1)], CHANGE).await;
    cold.must(&[(WARM, 8, -1), (WARM, 7, 1)], CHANGE).await;
    let (rows, other, _) = cold.content().await;
    assert!(rows == before && other.is_empty(), "{rows:?} {other:?}");
}

#[tokio::test(start_paused = true)]
async fn a_table_that_stops_tells_a_statement_whose_key_hangs() {
    let cold = Cold::new().await;
    let hung = cold.hang(&[(COLD, 1, 1)], OVERWRITE, How::Statement).await;
    cold.c.worker.stop_job(cold.t, Generation(1)).await;
    let told = tokio::time::timeout(Duration::from_secs(20), hung).await.expect("it is told");
    assert_eq!(told.unwrap(), outcome(Err(DmlError::Conflict)));
}

/// What was written since a statement looked has gone to disk, and memory knows no more of it.
#[tokio::test(start_paused = true)]
async fn keys_that_have_left_memory_since_are_looked_up_again() {
    let cold = Cold::new().await;
    let statement =
        cold.hang(&[(COLD_GONE, 1, 1), (WARM_GONE, 1, 1)], INSERT, How::Statement).await;
    cold.must(&[(WARM_GONE, 4, 1)], INSERT).await;
    cold.flush().await;
    cold.forget().await;
    let told = cold.release(statement).await;
    assert_eq!(told, Err(format!("Key (id)=({WARM_GONE}) already exists. Some(1)")));
    assert!(!cold.content().await.0.iter().any(|row| row.0 == COLD_GONE));
}

/// A large statement checks its keys before its turn, too.
#[tokio::test(start_paused = true)]
async fn a_load_is_checked_against_what_enters_between_its_check_and_its_turn() {
    for (inserted, taken) in [(7, true), (8, false)] {
        let exec = ExecOptions { load_bytes: 64, ..ExecOptions::default() };
        let (c, t) = Cluster::with_table(exec).await;
        let c = Arc::new(c);
        // Statements wait for the turn in their order.
        let locks = c.worker.lock_tables(&[t]).await.unwrap();
        let first = tokio::spawn({
            let c = Arc::clone(&c);
            async move { outcome(c.dml(t, &[(inserted, 0, 1)], INSERT).await) }
        });
        tokio::time::sleep(Duration::from_secs(1)).await;
        let id = StatementId { frontend: 2, number: 1 };
        let kind = LoadKind::Insert { on_conflict: InsertConflict::Error };
        let mut load = c.worker.begin_load(t, id, kind).await.unwrap();
        let rows: Vec<Row> = (100..120).chain([7]).map(|key| (key, 1, 1)).collect();
        load.append(delta(&rows)).await.unwrap();
        assert!(load.has_spilled());
        let load = tokio::spawn(async move { outcome(load.finish(&EntryFlag::default()).await) });
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert!(!first.is_finished() && !load.is_finished());
        drop(locks);
        assert_eq!(first.await.unwrap(), Ok((1, None)));
        let expected = match taken {
            true => Err("Key (id)=(7) already exists. None".to_owned()),
            false => Ok((21, None)),
        };
        assert_eq!(load.await.unwrap(), expected);
        assert_eq!(c.rows(t).await.len(), if taken { 1 } else { 22 });
    }
}

/// The rows of a load are visible when it is committed, long after it has entered.
#[tokio::test(start_paused = true)]
async fn what_looks_up_while_a_load_is_committed_meets_its_rows() {
    let exec = ExecOptions { load_bytes: 64, ..ExecOptions::default() };
    let (c, t) = Cluster::with_table(exec).await;
    let c = Arc::new(c);
    let rows: Vec<Row> = (100..120).chain([7]).map(|key| (key, 1, 1)).collect();
    let load = |number| {
        let (c, rows) = (Arc::clone(&c), rows.clone());
        tokio::spawn(async move {
            let id = StatementId { frontend: 2, number };
            let kind = LoadKind::Insert { on_conflict: InsertConflict::Error };
            let mut load = c.worker.begin_load(t, id, kind).await.unwrap();
            load.append(delta(&rows)).await.unwrap();
            assert!(load.has_spilled());
            outcome(load.finish(&EntryFlag::default()).await)
        })
    };
    let turn = Arc::clone(&c.meta.jobs.lock()[&t].turn);
    let turn = turn.lock_owned().await;
    let first = load(1);
    // It has entered, and its epoch is not ended: the cut waits.
    tokio::time::sleep(Duration::from_secs(1)).await;
    let inserts = [INSERT, NOTHING].map(|kind| {
        let c = Arc::clone(&c);
        tokio::spawn(async move { outcome(c.dml(t, &[(7, 2, 1)], kind).await) })
    });
    let second = load(2);
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(!first.is_finished() && !second.is_finished());
    drop(turn);
    assert_eq!(first.await.unwrap(), Ok((21, None)));
    let [error, nothing] = inserts;
    assert_eq!(error.await.unwrap(), Err("Key (id)=(7) already exists. Some(0)".to_owned()));
    assert_eq!(nothing.await.unwrap(), Ok((0, Some(Vec::new()))));
    let second = second.await.unwrap().unwrap_err();
    assert!(second.contains("already exists"), "{second}");
    assert_eq!(c.rows(t).await.len(), 21);
}

/// A row that was never committed fails nobody.
#[tokio::test(start_paused = true)]
async fn a_duplicate_of_a_row_that_is_void_is_no_duplicate() {
    let cold = Cold::new().await;
    let turn = Arc::clone(&cold.c.meta.jobs.lock()[&cold.t].turn);
    let turn = turn.lock_owned().await;
    let slow = cold.hang(&[(COLD_GONE, 1, 1), (WARM_GONE, 1, 1)], INSERT, How::Statement).await;
    let first = tokio::spawn({
        let (c, t) = (Arc::clone(&cold.c), cold.t);
        async move { outcome(c.dml(t, &[(WARM_GONE, 4, 1)], INSERT).await) }
    });
    // It has entered, and its epoch is not ended: the cut waits.
    tokio::time::sleep(Duration::from_secs(1)).await;
    cold.c.sim.release_reads();
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(!slow.is_finished() && !first.is_finished());
    cold.c.worker.stop_job(cold.t, Generation(1)).await;
    let conflict = outcome(Err(DmlError::Conflict));
    assert_eq!((slow.await.unwrap(), first.await.unwrap()), (conflict.clone(), conflict));
    drop(turn);
}

/// All look at once: the store is asked in one round, whatever the number of statements.
#[tokio::test(start_paused = true)]
async fn cold_statements_of_many_sessions_take_one_round() {
    const ROWS: i64 = 4_000;
    let cold = Cold::over(Profile::INSTANT, ROWS).await;
    // Opens the runs.
    cold.must(&[(1, 0, 1)], OVERWRITE).await;
    cold.forget().await;
    cold.c.sim.set_profile(STEADY);
    let statements = (0..64).map(|i| (i * 61 + 2, -1, 1)).collect::<Vec<Row>>();
    cold.c.sim.reset_stats();
    let all = statements.iter().map(|row| cold.c.dml(cold.t, std::slice::from_ref(row), OVERWRITE));
    let (done, rounds) = cold.c.sim.count_rounds(futures::future::join_all(all)).await;
    assert!(done.iter().all(|done| done.as_ref().is_ok_and(|d| d.rows_affected == 1)));
    let stats = cold.c.sim.stats();
    println!("64 cold statements: {rounds} rounds, {} gets", stats.gets);
    assert!(stats.gets > 1, "the keys were cold");
    // Another where a run's filter was wrong, and those of the commit.
    assert!(rounds <= 4, "{rounds} rounds");
    assert!(stats.gets <= 2 * 64, "{} gets", stats.gets);
}

/// Sessions over few keys that are cold again and again.
#[tokio::test]
async fn counters_over_cold_keys_lose_nothing() {
    const KEYS: i64 = 4;
    const EACH: i64 = 12;
    let cold = Arc::new(Cold::over(Profile::DFS, 20).await);
    let session = |s: i64| {
        let cold = Arc::clone(&cold);
        async move {
            for n in 0..EACH {
                let key = (s + n) % KEYS;
                loop {
                    let rows = cold.c.rows(cold.t).await;
                    let old = rows.iter().find(|row| row.0 == key).unwrap().1;
                    match cold.c.dml(cold.t, &[(key, old, -1), (key, old + 1, 1)], CHANGE).await {
                        Ok(_) => break,
                        Err(DmlError::Conflict) => {}
                        Err(e) => panic!("{e}"),
                    }
                }
            }
        }
    };
    let sessions: Vec<_> = (0..6).map(|s| tokio::spawn(session(s))).collect();
    while !sessions.iter().all(JoinHandle::is_finished) {
        cold.flush().await;
        cold.c.store.cache().clear_memory();
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    for s in sessions {
        s.await.unwrap();
    }
    let sum: i64 = cold.c.rows(cold.t).await.iter().filter(|r| r.0 < KEYS).map(|r| r.1).sum();
    assert_eq!(sum, (0..KEYS).sum::<i64>() + 6 * EACH);
}
