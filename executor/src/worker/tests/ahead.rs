//! Rows that are committed and that a job has not come to: their keys are announced while the rows before them are
//! processed, in a first scan, after a restart, and where a job is behind.

use std::time::Duration;

use millrace_graph::Source;

use super::lookahead::{cold, counted, counts};
use super::*;
use crate::memory::MemoryClass;
use crate::options::LookaheadMode;

/// Small parts of everything that is read, and few rows at a time wait for state.
fn in_parts(lookahead: LookaheadMode) -> ExecOptions {
    ExecOptions { backfill_rows: 200, chunk_rows: 50, parked_rows: 40, ..cold(lookahead) }
}

/// A table with rows, and a view over it with none of its state in memory, which lacks `behind` epochs of the table.
async fn restarted(exec: ExecOptions, parallelism: usize, behind: i64) -> (Cluster, JobId, JobId) {
    let (c, t) = Cluster::with_table(exec).await;
    c.insert(t, (0..300).map(|i| (i, i % 100))).await;
    let v = c.view(2, t, counted(t), parallelism).await;
    c.catch_up(v).await;
    for epoch in 1..=behind {
        c.insert(t, (0..30).map(|i| (epoch * 1_000 + i, (epoch * 30 + i) % 100))).await;
    }
    c.start_again(v).await;
    (c, t, v)
}

impl Cluster {
    /// All that belongs to the job runs before it is told of an epoch.
    async fn start_again(&self, view: JobId) {
        self.start(view).await.unwrap();
        for _ in 0..50 {
            tokio::task::yield_now().await;
        }
    }
}

/// [`counted`], over a source.
fn counted_of_source(source: JobId) -> JobGraph {
    let mut graph = counted(source);
    let columns = vec![0, 1];
    graph.fragments[0].nodes[0].op = Op::Source(Source { relation: source, columns });
    graph
}

/// A view over a source with none of its state in memory, which lacks `behind` epochs of it, of 30 rows each after 300;
/// with the newest epoch.
async fn restarted_over_a_source(
    exec: ExecOptions,
    parallelism: usize,
    behind: u64,
) -> (Cluster, JobId, Epoch) {
    let c = Cluster::new(exec).await;
    let source = c.source(1).await;
    let first = c.version(source).epoch;
    let v = c.view(2, source, counted_of_source(source), parallelism).await;
    c.catch_up(v).await;
    for epoch in 0..=behind {
        c.end_at(Epoch(first + 1 + epoch), 300 + epoch * 30);
    }
    c.meta.cut(v, Epoch(first + 1)).await.unwrap();
    c.start_again(v).await;
    (c, v, Epoch(first + 1 + behind))
}

/// The planner's place for rows of a source that are read ahead is the entry.
#[tokio::test]
async fn keys_of_a_source_are_announced_before_their_epoch() {
    for parallelism in [1, 2] {
        for lookahead in [LookaheadMode::Auto, LookaheadMode::Entry, LookaheadMode::Off] {
            let c = Cluster::new(cold(lookahead)).await;
            let source = c.source(1).await;
            let first = c.version(source).epoch;
            c.end_at(Epoch(first + 1), 30);
            let v = c.view(2, source, counted_of_source(source), parallelism).await;
            c.catch_up(v).await;
            for epoch in 1..=20 {
                // The next epoch is planned when one is cut.
                c.end_at(Epoch(first + epoch + 1), (epoch + 1) * 30);
                c.meta.cut(v, Epoch(first + epoch)).await.unwrap();
                let values = c.rows(v).await;
                assert_eq!(values.len(), epoch as usize * 30);
                assert!(values.iter().all(|row| (row.1, row.2) == (1, 1)), "each is there once");
            }
            let told = c.lookahead(v);
            assert!(told.missed > 0, "{told:?}");
            let is_on = lookahead != LookaheadMode::Off;
            assert_eq!((told.hinted > 0, told.prefetched > 0), (is_on, is_on), "{told:?}");
        }
    }
}

#[tokio::test]
async fn keys_of_the_next_step_of_a_first_scan_are_announced() {
    for parallelism in [1, 2] {
        for lookahead in [LookaheadMode::Auto, LookaheadMode::Off] {
            let exec = ExecOptions { backfill_rows: 2_000, ..in_parts(lookahead) };
            let (c, t) = Cluster::with_table(exec).await;
            c.insert(t, (0..30_000).map(|i| (i, i % 1_000))).await;
            let v = c.view(2, t, counted(t), parallelism).await;
            assert!(c.catch_up(v).await > 5, "in steps");
            assert_eq!(c.rows(v).await, counts(&c.rows(t).await));
            let told = c.lookahead(v);
            assert!(told.missed > 0, "{told:?}");
            assert_eq!(told.hinted > 0, lookahead == LookaheadMode::Auto, "{told:?}");
            assert_eq!(told.prefetched > 0, lookahead == LookaheadMode::Auto, "{told:?}");
        }
    }
}

#[tokio::test]
async fn keys_of_the_backlog_are_announced_after_a_restart() {
    for parallelism in [1, 2] {
        let (c, t, v) = restarted(in_parts(LookaheadMode::Auto), parallelism, 20).await;
        c.follow(v, t).await;
        assert_eq!(c.rows(v).await, counts(&c.rows(t).await));
        let told = c.lookahead(v);
        assert!(told.hinted > 0, "in the first epoch: {told:?}");
        let (c, t, v) = restarted(in_parts(LookaheadMode::Auto), parallelism, 0).await;
        c.follow(v, t).await;
        assert_eq!((c.lookahead(v).hinted, c.lookahead(v).active), (0, 0), "there is none");
    }
}

/// There is one epoch: all that is announced is of rows that come with it.
#[tokio::test]
async fn keys_of_a_backlog_in_a_source_are_announced_after_a_restart() {
    for parallelism in [1, 2] {
        for lookahead in [LookaheadMode::Auto, LookaheadMode::Off] {
            let exec = ExecOptions {
                source_rows: 50,
                prefetch_window: Duration::ZERO,
                ..in_parts(lookahead)
            };
            let (c, v, last) = restarted_over_a_source(exec, parallelism, 20).await;
            c.meta.cut(v, last).await.unwrap();
            let values = c.rows(v).await;
            assert_eq!(values.len(), 900);
            assert!(values.iter().all(|row| (row.1, row.2) == (1, 1)), "each is there once");
            let told = c.lookahead(v);
            let is_on = lookahead == LookaheadMode::Auto;
            assert_eq!((told.hinted > 0, told.prefetched > 0), (is_on, is_on), "{told:?}");
        }
        let exec = in_parts(LookaheadMode::Auto);
        let (c, v, _) = restarted_over_a_source(exec, parallelism, 0).await;
        assert_eq!((c.lookahead(v).hinted, c.lookahead(v).active), (0, 0), "there is none");
    }
}

/// A sink that is paused when its job starts takes nothing until it is resumed: neither its backlog nor what comes
/// meanwhile is read and held for it, and no keys of it are announced.
#[tokio::test(start_paused = true)]
async fn nothing_is_read_ahead_of_a_job_that_starts_paused() {
    for is_paused in [false, true] {
        let exec = ExecOptions { source_rows: 50, ..in_parts(LookaheadMode::Auto) };
        let (c, v, last) = restarted_over_a_source(exec, 2, 20).await;
        c.meta.changes.set(watch::Sender::new(0)).unwrap();
        c.meta.jobs.lock().get_mut(&v).unwrap().start.relation.paused = is_paused;
        c.start_again(v).await;
        let next = Epoch(last.0 + 1);
        c.end_at(next, 930);
        c.meta.changes.get().unwrap().send_modify(|n| *n += 1);
        // The clock, which is paused, goes on when nothing else does.
        tokio::time::sleep(Duration::from_secs(1)).await;
        let held = c.worker.governor().used_by(MemoryClass::Ahead);
        assert_eq!(held == 0, is_paused, "{held} bytes are held");
        let told = c.lookahead(v);
        if is_paused {
            assert_eq!((told.hinted, told.prefetched), (0, 0), "{told:?}");
        }
        // It is resumed, and lacks nothing.
        c.meta.cut(v, next).await.unwrap();
        let values = c.rows(v).await;
        assert_eq!(values.len(), 930);
        assert!(values.iter().all(|row| (row.1, row.2) == (1, 1)), "each is there once");
    }
}

#[tokio::test]
async fn keys_of_a_change_that_comes_from_the_store_are_announced_in_parts() {
    let exec = ExecOptions { changelog_bytes: 1, ..in_parts(LookaheadMode::Auto) };
    let (c, t, v) = restarted(exec, 2, 0).await;
    c.insert(t, (1_000..31_000).map(|i| (i, i % 500))).await;
    c.start_again(v).await;
    c.follow(v, t).await;
    assert_eq!(c.rows(v).await, counts(&c.rows(t).await));
    let told = c.lookahead(v);
    assert!(told.hinted > 0, "{told:?}");
}

#[tokio::test]
async fn keys_of_the_epochs_that_a_job_lacks_are_announced_while_it_takes_the_first() {
    let (c, t, v) = restarted(in_parts(LookaheadMode::Auto), 2, 0).await;
    let mut epochs = Vec::new();
    for epoch in 1..=5 {
        c.insert(t, (0..30).map(|i| (epoch * 1_000 + i, (epoch * 30 + i) % 100))).await;
        epochs.push(Epoch(c.version(t).epoch));
    }
    c.start_again(v).await;
    // One statement each: what is announced is of later epochs.
    c.meta.cut(v, epochs[0]).await.unwrap();
    let first = c.lookahead(v);
    assert!(first.hinted > 0, "{first:?}");
    for epoch in &epochs[1..] {
        c.meta.cut(v, *epoch).await.unwrap();
    }
    assert_eq!(c.rows(v).await, counts(&c.rows(t).await));
}
