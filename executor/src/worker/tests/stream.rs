//! The record stream: whatever it loses, repeats or delays, the jobs are as if it had not.

use std::panic::AssertUnwindSafe;
use std::time::Duration;

use futures::FutureExt;
use millrace_common::fault_injection::{STREAM_BUGS, plant};
use millrace_rpc::stream::Acknowledged;
use millrace_rpc::version::RunMeta;

use super::*;

const ROUNDS: i64 = 6;
const SEEDS: u64 = 12;
/// Of the paused clock.
const LIMIT: Duration = Duration::from_secs(60);

async fn flush(c: &Cluster, table: JobId) {
    let edit = c.store.job(table).unwrap().flush().await.unwrap();
    Meta(Arc::clone(&c.meta)).commit_edit(table, Generation(1), edit).await.unwrap();
}

/// The rows of a table and a view of it after statements, flushes and restarts.
async fn workload(faults: Option<u64>) -> [Vec<Row>; 2] {
    let (c, t) = Cluster::with_table(ExecOptions::default()).await;
    *c.meta.faults.lock() = faults;
    let v = c.view(2, t, copy_of(t), 1).await;
    c.catch_up(v).await;
    for round in 0..ROUNDS {
        let first = round * 10;
        c.insert(t, (first..first + 10).map(|i| (i, i))).await;
        let change = [(first, first, -1), (first, -1, 1), (first + 1, first + 1, -1)];
        c.dml(t, &change, DmlKind::Change).await.unwrap();
        c.follow(v, t).await;
        flush(&c, if round % 2 == 0 { t } else { v }).await;
        if round == ROUNDS / 2 {
            c.start(t).await.unwrap();
            c.start(v).await.unwrap();
        }
    }
    let before = [c.rows(t).await, c.rows(v).await];
    // What a restart finds is what was there.
    c.start(t).await.unwrap();
    c.start(v).await.unwrap();
    assert_eq!([c.rows(t).await, c.rows(v).await], before);
    assert!(c.meta.failures.lock().is_empty());
    before
}

/// `None`: it has failed, or has not ended.
async fn outcome(faults: Option<u64>) -> Option<[Vec<Row>; 2]> {
    let run = AssertUnwindSafe(workload(faults)).catch_unwind();
    tokio::time::timeout(LIMIT, run).await.ok()?.ok()
}

/// One test: a planted bug is planted for all of the process.
#[tokio::test(start_paused = true)]
async fn a_stream_that_loses_and_repeats_records_changes_nothing() {
    let expected = workload(None).await;
    assert_eq!(expected[0].len() as i64, ROUNDS * 9);
    for seed in 0..SEEDS {
        assert_eq!(workload(Some(seed)).await, expected, "seed {seed}");
    }
    for (bug, what) in STREAM_BUGS {
        plant(Some(bug));
        let mut caught = false;
        for seed in 0..SEEDS {
            caught = caught || outcome(Some(seed)).await.as_ref() != Some(&expected);
        }
        plant(None);
        assert!(caught, "{bug} ({what}) is not noticed");
    }
}

#[tokio::test]
async fn an_edit_that_a_job_was_opened_with_is_not_applied_again() {
    let (c, t) = Cluster::with_table(ExecOptions::default()).await;
    c.insert(t, (0..100).map(|i| (i, i))).await;
    let edit = c.store.job(t).unwrap().flush().await.unwrap();
    assert_eq!(edit.add_runs.len(), 1);
    // In the log, and on its way to the worker while the job is started again.
    c.meta.fold_edit(t, edit);
    c.start(t).await.unwrap();
    c.meta.send().await;
    assert_eq!(c.rows(t).await.len(), 100);
    assert_eq!(c.store.job(t).unwrap().stats().tables[0].disk_runs, 1);
    c.insert(t, [(100, 100)]).await;
    assert_eq!(c.rows(t).await.len(), 101);
}

#[tokio::test]
async fn a_flush_that_comes_again_does_not_bring_back_what_was_merged() {
    let (c, t) = Cluster::with_table(ExecOptions::default()).await;
    c.insert(t, (0..100).map(|i| (i, i))).await;
    let disk_runs = || c.store.job(t).unwrap().stats().tables[0].disk_runs;
    let edit = c.store.job(t).unwrap().flush().await.unwrap();
    let [run] = &edit.add_runs[..] else { panic!("one run: {edit:?}") };
    let merged = RunMeta { run_id: run.run_id + 1_000, level: 1, ..run.clone() };
    let compaction = VersionEdit {
        add_runs: vec![merged],
        remove_runs: vec![run.run_id],
        ..VersionEdit::default()
    };
    c.meta.fold_edit(t, edit);
    let flushed = c.meta.next_message();
    c.worker.apply_records(flushed.clone()).await.unwrap();
    c.meta.fold_edit(t, compaction);
    let at = c.worker.apply_records(c.meta.next_message()).await.unwrap();
    assert_eq!(disk_runs(), 1);
    assert_eq!(c.worker.apply_records(flushed).await.unwrap(), at);
    assert_eq!(disk_runs(), 1);
    assert_eq!(c.rows(t).await.len(), 100);
}

#[tokio::test]
async fn records_about_a_job_that_is_being_opened_wait_until_it_is() {
    let (c, t) = Cluster::with_table(ExecOptions::default()).await;
    c.insert(t, (0..100).map(|i| (i, i))).await;
    let record = c.meta.log.lock().len() as u64;
    let opening = c.worker.shared.begin_opening(t, record).await.unwrap();
    opening.set_as_of(record);
    let edit = c.store.job(t).unwrap().flush().await.unwrap();
    c.meta.fold_edit(t, edit);
    let message = c.meta.next_message();
    let at = c.worker.apply_records(message).await.unwrap();
    assert_eq!(at, Acknowledged { received: record + 1, behind: vec![(t, record + 1)] });
    assert_eq!(at.applied(), record, "the version that it is opened from has no more");
    assert_eq!(c.store.job(t).unwrap().stats().tables[0].disk_runs, 0);
    drop(opening);
    let settled = c.worker.applied_since(at).await;
    assert_eq!(settled, Acknowledged { received: record + 1, behind: Vec::new() });
    assert_eq!(c.store.job(t).unwrap().stats().tables[0].disk_runs, 1);
    assert_eq!(c.rows(t).await.len(), 100);
}

/// Calls of two leaders, from the same version: the first gives up while the second opens the job.
#[tokio::test]
async fn a_call_that_gives_up_does_not_end_the_opening_of_another() {
    let (c, t) = Cluster::with_table(ExecOptions::default()).await;
    c.insert(t, (0..100).map(|i| (i, i))).await;
    let record = c.meta.log.lock().len() as u64;
    let shared = &c.worker.shared;
    let first = shared.begin_opening(t, record).await.unwrap();
    first.set_as_of(record);
    let second = shared.begin_opening(t, record).await.unwrap();
    second.set_as_of(record);
    assert!(!first.is_current() && second.is_current());
    let edit = c.store.job(t).unwrap().flush().await.unwrap();
    c.meta.fold_edit(t, edit);
    let at = c.worker.apply_records(c.meta.next_message()).await.unwrap();
    drop(first);
    assert!(second.is_current());
    assert_eq!(shared.stream.acknowledged(), at, "it is still being opened");
    assert_eq!(c.store.job(t).unwrap().stats().tables[0].disk_runs, 0);
    drop(second);
    let settled = c.worker.applied_since(at).await;
    assert_eq!(settled, Acknowledged { received: record + 1, behind: Vec::new() });
    assert_eq!(c.store.job(t).unwrap().stats().tables[0].disk_runs, 1);
}

#[tokio::test]
async fn what_a_call_has_started_is_not_added_when_another_opens_the_job() {
    let (c, t) = Cluster::with_table(ExecOptions::default()).await;
    c.insert(t, (0..100).map(|i| (i, i))).await;
    let (shared, order) = (&c.worker.shared, c.meta.order(t));
    let logged = || shared.logged(t, order.generation).unwrap();
    shared.remove(t, |_| true).await;
    let first = shared.begin_opening(t, order.record).await.unwrap();
    first.set_as_of(order.record);
    let job = start::start(shared, logged(), 1).await.unwrap();
    let second = shared.begin_opening(t, order.record).await.unwrap();
    second.set_as_of(order.record);
    let Err(job) = first.add(job) else { panic!("it was overtaken") };
    job.stop().await;
    assert!(shared.job(t).is_none());
    let job = start::start(shared, logged(), 1).await.unwrap();
    assert!(second.add(job).is_ok());
    assert!(shared.job(t).is_some_and(|job| !job.is_stopped()));
}

/// What the version has that a job is opened from need not be applied to it, whatever is sent late.
#[tokio::test]
async fn what_is_acknowledged_while_a_job_is_opened_is_not_taken_back() {
    let (c, t) = Cluster::with_table(ExecOptions::default()).await;
    c.insert(t, (0..100).map(|i| (i, i))).await;
    let edit = c.store.job(t).unwrap().flush().await.unwrap();
    c.meta.fold_edit(t, edit);
    let record = c.meta.log.lock().len() as u64;
    let opening = c.worker.shared.begin_opening(t, record).await.unwrap();
    opening.set_as_of(record);
    let at = c.worker.apply_records(c.meta.next_message()).await.unwrap();
    assert_eq!(at, Acknowledged { received: record, behind: Vec::new() });
    drop(opening);
    assert_eq!(c.worker.shared.stream.acknowledged(), at);
    assert_eq!(c.worker.applied(), Some(record));
}

#[tokio::test]
async fn a_busy_table_holds_up_no_other() {
    let c = Cluster::new(ExecOptions::default()).await;
    let tables = [c.table(1).await, c.table(2).await];
    let mut turns = Vec::new();
    for t in tables {
        let turn = Arc::clone(&c.meta.jobs.lock()[&t].turn);
        turns.push(turn.lock_owned().await);
    }
    let row = [(1, 1, 1)];
    let mut statements = tables.map(|t| Box::pin(c.dml(t, &row, INSERT)));
    for statement in &mut statements {
        for _ in 0..1_000 {
            assert!(
                statement.as_mut().now_or_never().is_none(),
                "answered before it was committed"
            );
            tokio::task::yield_now().await;
        }
    }
    for t in tables {
        let commit = c.meta.cut_only(t, Generation(1), Epoch::ZERO).await.unwrap();
        c.meta.fold(t, &commit);
    }
    let [busy, idle] = &mut statements;
    let job = c.worker.shared.job(tables[0]).unwrap();
    let crate::worker::job::Kind::Table(table) = &job.kind else { panic!("a table") };
    let large_statement = table.sequencer.keep_busy();
    let at = c.worker.apply_records(c.meta.next_message()).await.unwrap();
    let last = c.meta.log.lock().len() as u64;
    assert_eq!(at, Acknowledged { received: last, behind: vec![(tables[0], last - 1)] });
    assert_eq!(at.applied(), last - 2);
    assert_eq!(idle.await.unwrap().rows_affected, 1);
    assert!(busy.as_mut().now_or_never().is_none());
    drop(large_statement);
    assert_eq!(busy.await.unwrap().rows_affected, 1);
    let settled = c.worker.applied_since(at).await;
    assert_eq!(settled, Acknowledged { received: last, behind: Vec::new() });
}
