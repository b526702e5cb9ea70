//! How many requests of the store reads of state take, with lookahead and without.

use std::time::Duration;

use futures::future::join_all;

use super::lookahead::{counted, counts};
use super::*;
use crate::options::LookaheadMode;

/// Every answer takes as long as any other.
const STEADY: Profile =
    Profile { p50: Duration::from_millis(5), p99: Duration::from_millis(5), ..Profile::INSTANT };
/// Values of the table, and statements of each round.
const VALUES: i64 = 4_000;
const STATEMENTS: i64 = 64;
/// Rounds before hints are wanted everywhere, and those that are counted.
const FIRST: i64 = 4;
const ROUNDS: i64 = 12;

/// A table with values, and a view over it whose state is in runs. Its caches keep next to nothing.
async fn flushed(lookahead: LookaheadMode) -> (Cluster, JobId, JobId) {
    let exec = ExecOptions { cache_bytes: 64 << 10, lookahead, ..ExecOptions::default() };
    let c = Cluster::over(Profile::INSTANT, exec, |s| s.block_bytes = Some(4_096)).await;
    let t = c.table(1).await;
    c.insert(t, (0..VALUES).map(|i| (i, i))).await;
    let v = c.view(2, t, counted(t), 1).await;
    c.catch_up(v).await;
    let edit = c.store.job(v).unwrap().flush().await.unwrap();
    Meta(Arc::clone(&c.meta)).commit_edit(v, Generation(1), edit).await.unwrap();
    (c, t, v)
}

/// Requests for the state of a view over a table, by rows and ahead of them, whose caches keep next to nothing. Each
/// statement of a round begins a while after the one before.
async fn requests(lookahead: LookaheadMode, apart: Duration) -> (u64, u64) {
    let (c, t, v) = flushed(lookahead).await;
    c.sim.set_profile(STEADY);
    let mut before = (0, 0);
    for round in 0..FIRST + ROUNDS {
        // What is being cached of new runs.
        tokio::time::sleep(Duration::from_secs(1)).await;
        c.store.cache().clear_memory();
        if round == FIRST {
            before = c.requests(v);
        }
        // The statements of a round have entered, and their epoch is not ended: its cut waits.
        let turn = Arc::clone(&c.meta.jobs.lock()[&t].turn);
        let turn = turn.lock_owned().await;
        let statement = |i: i64| {
            let row = (VALUES + round * STATEMENTS + i, (round * 977 + i * 131) % VALUES, 1);
            let c = &c;
            async move {
                tokio::time::sleep(apart * i as u32).await;
                c.dml(t, &[row], INSERT).await.unwrap();
            }
        };
        let commit = async {
            tokio::time::sleep(apart * STATEMENTS as u32 + 4 * STEADY.p50).await;
            drop(turn);
        };
        tokio::join!(join_all((0..STATEMENTS).map(statement)), commit);
        c.follow(v, t).await;
        assert_eq!(c.rows(v).await, counts(&c.rows(t).await), "round {round}");
    }
    let after = c.requests(v);
    (after.0 - before.0, after.1 - before.1)
}

impl Cluster {
    /// For rows, and ahead of them.
    fn requests(&self, view: JobId) -> (u64, u64) {
        let measures = self.measures(view);
        (measures.demand_requests, measures.ahead_requests)
    }
}

#[tokio::test(start_paused = true)]
async fn hints_of_statements_at_a_time_take_as_many_requests_as_their_rows() {
    let (demand, none) = requests(LookaheadMode::Off, Duration::ZERO).await;
    assert!(demand >= ROUNDS as u64 && none == 0, "the state is cold: {demand}, {none}");
    for place in [LookaheadMode::Auto, LookaheadMode::Entry] {
        let (late, ahead) = requests(place, Duration::ZERO).await;
        println!("{place:?}: {ahead} requests ahead of rows, {late} for rows; without {demand}");
        assert!(ahead >= ROUNDS as u64, "{place:?}: hints are wanted");
        assert!(10 * (late + ahead) <= 13 * demand, "{place:?}: {late} + {ahead} for {demand}");
    }
}

/// As long as rows come one by one and their epoch is open, a read takes what has come during the one before.
#[tokio::test(start_paused = true)]
async fn hints_that_come_during_a_read_take_one_request() {
    let apart = Duration::from_micros(500);
    let (late, ahead) = requests(LookaheadMode::Entry, apart).await;
    let rows = (ROUNDS * STATEMENTS) as u64;
    println!("{ahead} requests ahead of {rows} rows, {late} for rows");
    assert!(ahead >= ROUNDS as u64 && late + ahead <= rows / 4, "{late} + {ahead} for {rows}");
}

/// A barrier waits for the slowest read of its epoch. What is to come meanwhile is read then, and not after it.
#[tokio::test(start_paused = true)]
async fn hints_are_taken_while_a_barrier_waits_for_a_read() {
    let wait = Duration::from_secs(1);
    let (c, t, v) = flushed(LookaheadMode::Entry).await;
    // So many that hardly all of them are in memory.
    let rows = |round: i64| -> Vec<Row> {
        (0..32).map(|i| (VALUES + round * 32 + i, (round * 977 + i * 131) % VALUES, 1)).collect()
    };
    for round in 0..FIRST {
        tokio::time::sleep(wait).await;
        c.store.cache().clear_memory();
        c.dml(t, &rows(round), INSERT).await.unwrap();
        c.follow(v, t).await;
    }
    tokio::time::sleep(wait).await;
    c.store.cache().clear_memory();
    c.sim.hang_reads(Some("data/"));
    c.dml(t, &rows(FIRST), INSERT).await.unwrap();
    let mut waiting = std::pin::pin!(c.follow(v, t));
    assert!(tokio::time::timeout(wait, &mut waiting).await.is_err(), "its row waits for a read");
    let before = c.lookahead(v);
    c.dml(t, &rows(FIRST + 1), INSERT).await.unwrap();
    assert!(tokio::time::timeout(wait, &mut waiting).await.is_err(), "it still waits");
    let after = c.lookahead(v);
    assert!(after.hinted > before.hinted, "{before:?} {after:?}");
    assert!(after.prefetched > before.prefetched, "{before:?} {after:?}");
    c.sim.release_reads();
    waiting.await;
    c.follow(v, t).await;
    assert_eq!(c.rows(v).await, counts(&c.rows(t).await));
}
