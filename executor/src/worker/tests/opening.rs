//! A job is opened from what the log has of it when its opening has begun, whatever was ordered before: nothing that the
//! log says of it is lost or applied twice.

use futures::FutureExt;
use millrace_rpc::stream::Acknowledged;
use millrace_rpc::version::RunMeta;

use super::*;

/// A table with rows, and the flush of these, which is not logged.
async fn flushed() -> (Cluster, JobId, VersionEdit) {
    let (c, t) = Cluster::with_table(ExecOptions::default()).await;
    c.insert(t, (0..100).map(|i| (i, i))).await;
    let edit = c.store.job(t).unwrap().flush().await.unwrap();
    assert_eq!(edit.add_runs.len(), 1);
    (c, t, edit)
}

/// What replaces the run of a flush by one that is merged.
fn merged(flush: &VersionEdit) -> VersionEdit {
    let run = &flush.add_runs[0];
    VersionEdit {
        add_runs: vec![RunMeta { run_id: run.run_id + 1_000, level: 1, ..run.clone() }],
        remove_runs: vec![run.run_id],
        ..VersionEdit::default()
    }
}

impl Cluster {
    fn disk_runs(&self, job: JobId) -> usize {
        self.store.job(job).unwrap().stats().tables[0].disk_runs
    }

    /// The stream brings the worker the newest records.
    async fn told(&self) -> Acknowledged {
        self.worker.apply_records(self.meta.next_message()).await.unwrap()
    }

    fn acknowledged(&self) -> Acknowledged {
        self.worker.shared.stream.acknowledged()
    }
}

#[tokio::test]
async fn a_version_that_moves_on_after_the_order_is_opened_as_it_is_then() {
    let (c, t, edit) = flushed().await;
    let order = c.meta.order(t);
    c.meta.fold_edit(t, edit.clone());
    c.worker.start_job(order).await.unwrap();
    assert_eq!(c.worker.shared.stream.opened(t), Some(order.record + 1));
    assert_eq!(c.disk_runs(t), 1);
    c.meta.fold_edit(t, merged(&edit));
    let at = c.told().await;
    assert_eq!(at, Acknowledged { received: order.record + 2, behind: Vec::new() });
    assert_eq!((c.disk_runs(t), c.rows(t).await.len()), (1, 100));
    c.insert(t, [(100, 100)]).await;
    assert_eq!(c.rows(t).await.len(), 101);
}

#[tokio::test]
async fn records_that_come_before_and_after_a_version_is_read_count_once() {
    let (c, t, edit) = flushed().await;
    let (shared, order) = (&c.worker.shared, c.meta.order(t));
    shared.remove(t, |_| true).await;
    let opening = shared.begin_opening(t, order.record).await.unwrap();
    c.meta.fold_edit(t, edit.clone());
    let first = order.record + 1;
    // Which version is read is not known yet.
    assert_eq!(c.told().await, Acknowledged { received: first, behind: vec![(t, first)] });
    let logged = shared.logged(t, order.generation).unwrap();
    assert_eq!(logged.record, first);
    opening.set_as_of(logged.record);
    assert_eq!(c.acknowledged(), Acknowledged { received: first, behind: Vec::new() });
    c.meta.fold_edit(t, merged(&edit));
    let behind = vec![(t, first + 1)];
    assert_eq!(c.told().await, Acknowledged { received: first + 1, behind });
    let commits = logged.version.commits;
    let job = start::start(shared, logged, 1).await.unwrap();
    job.cuts.begin_after(commits);
    assert!(opening.add(job).is_ok());
    assert_eq!(c.disk_runs(t), 1);
    let at = c.acknowledged();
    drop(opening);
    let settled = c.worker.applied_since(at).await;
    assert_eq!(settled, Acknowledged { received: first + 1, behind: Vec::new() });
    let merged = [merged(&edit).add_runs[0].run_id];
    assert_eq!(c.store.wait_for_runs(t, &merged).now_or_never(), Some(true));
    assert_eq!((c.disk_runs(t), c.rows(t).await.len()), (1, 100));
    c.insert(t, [(100, 100)]).await;
    assert_eq!(c.rows(t).await.len(), 101);
}

#[tokio::test]
async fn what_waits_for_an_opening_that_reads_nothing_is_applied_to_what_is_there() {
    let (c, t, edit) = flushed().await;
    let opening = c.worker.shared.begin_opening(t, c.meta.order(t).record).await.unwrap();
    c.meta.fold_edit(t, edit);
    let at = c.told().await;
    assert_eq!((at.behind.len(), c.disk_runs(t)), (1, 0));
    drop(opening);
    assert_eq!(c.worker.applied_since(at).await.behind, []);
    assert_eq!((c.disk_runs(t), c.rows(t).await.len()), (1, 100));
}

/// The process has neither a record nor a job before.
#[tokio::test]
async fn a_job_lacks_no_record_because_another_one_is_opened_as_of_a_later_one() {
    let c = Cluster::new(ExecOptions::default()).await;
    let table = |id| {
        let version = JobVersion::default();
        c.register(logged(relation(id, RelationKind::Table), version, Vec::new(), 1), None)
    };
    let (a, b) = (table(1), table(2));
    let shared = &c.worker.shared;
    c.meta.fold_edit(a, VersionEdit::default());
    let first = shared.begin_opening(a, 1).await.unwrap();
    first.set_as_of(1);
    c.meta.fold_edit(a, VersionEdit::default());
    let second = shared.begin_opening(b, 2).await.unwrap();
    second.set_as_of(2);
    drop(second);
    let at = Acknowledged { received: 2, behind: vec![(a, 2)] };
    assert_eq!(c.told().await, at);
    drop(first);
    assert_eq!(c.worker.applied_since(at).await.behind, []);
}

#[tokio::test]
async fn an_order_that_the_log_does_not_bear_out_ends_nothing() {
    let (c, t) = Cluster::with_table(ExecOptions::default()).await;
    let order = c.meta.order(t);
    let other = |generation| StartJob { generation: Generation(generation), ..order };
    let own = order.generation.0;
    let unknown = StartJob { job: RelationId(99), ..order };
    for refused in [other(own - 1), other(own + 1), unknown] {
        let error = c.worker.start_job(refused).await.unwrap_err();
        assert!(error.message.contains("is not running in this generation"), "{error}");
        assert_eq!(c.worker.running(t), Some(order.generation));
    }
    c.insert(t, [(1, 1)]).await;
    assert_eq!(c.rows(t).await, [(1, 1, 1)]);
}

/// Asked for before anything is ended, when the opening has begun, and when the job has been added: whoever ends what the
/// log has ended does not find a job that is being opened.
#[tokio::test]
async fn a_generation_that_ends_while_it_is_opened_does_not_run() {
    for answers in [1, 2] {
        let (c, t) = Cluster::with_table(ExecOptions::default()).await;
        c.insert(t, [(1, 1)]).await;
        *c.meta.ends_after.lock() = answers;
        assert!(c.worker.start_job(c.meta.order(t)).await.is_err());
        assert_eq!(c.worker.running(t), None, "after {answers} answers");
        c.start(t).await.unwrap();
        c.insert(t, [(2, 2)]).await;
        assert_eq!(c.rows(t).await, [(1, 1, 1), (2, 2, 1)]);
    }
}

#[tokio::test]
async fn a_generation_that_the_log_has_ended_ends_and_its_rows_stay_readable() {
    let (c, t) = Cluster::with_table(ExecOptions::default()).await;
    c.insert(t, [(1, 1)]).await;
    let own = c.worker.running(t).unwrap();
    c.worker.end_before(t, own).await;
    assert_eq!(c.worker.running(t), Some(own), "it is the one that the log has");
    c.worker.end_before(t, Generation(own.0 + 1)).await;
    assert_eq!((c.worker.running(t), c.worker.running_jobs()), (None, vec![]));
    assert_eq!(c.rows(t).await, [(1, 1, 1)]);
    c.start(t).await.unwrap();
    c.worker.end_before(t, Generation(own.0 + 1)).await;
    assert_eq!(c.worker.running_jobs(), [(t, Generation(own.0 + 1))]);
    c.insert(t, [(2, 2)]).await;
    assert_eq!(c.rows(t).await, [(1, 1, 1), (2, 2, 1)]);
}

/// A process ends by itself what the log has ended, and the leader stops it, too, before it has the next generation started.
#[tokio::test]
async fn who_stops_a_job_waits_for_tasks_that_another_call_ends() {
    let (c, t) = Cluster::with_table(ExecOptions::default()).await;
    let v = c.view(2, t, copy_of(t), 2).await;
    c.catch_up(v).await;
    let own = c.worker.running(v).unwrap();
    // All runs on one thread: no task ends before this one waits.
    let mut ends = Box::pin(c.worker.end_before(v, Generation(own.0 + 1)));
    assert!(ends.as_mut().now_or_never().is_none());
    assert_eq!(c.worker.running(v), None);
    assert!(c.worker.stop_job(v, own).now_or_never().is_none(), "its tasks are there");
    // Whoever has begun to end it may give up.
    drop(ends);
    c.worker.stop_job(v, own).await;
    assert_eq!(c.worker.stop_job(v, own).now_or_never(), Some(()));
    c.start(v).await.unwrap();
    c.insert(t, [(1, 1)]).await;
    c.follow(v, t).await;
    assert_eq!(c.rows(v).await, [(1, 1, 1)]);
}
