//! What a worker hands over to a leader that takes over.

use futures::FutureExt;
use millrace_storage::FollowedJob;

use super::*;

/// All jobs run here, and other processes lead.
struct Here(Arc<FakeMeta>);

#[async_trait]
impl Elsewhere for Here {
    fn generation_here(&self, relation: RelationId) -> Option<Generation> {
        self.0.jobs.lock().get(&relation).map(|job| job.start.generation)
    }

    fn is_placed_elsewhere(&self, _: RelationId) -> bool {
        false
    }

    async fn follow(&self, _: RelationId) -> Result<Arc<FollowedJob>, SqlError> {
        Err(SqlError::internal("all jobs run here"))
    }

    fn memory_bytes(&self) -> usize {
        0
    }
}

async fn led() -> (Cluster, JobId) {
    let here = |meta: &Arc<FakeMeta>| Some(Arc::new(Here(Arc::clone(meta))) as Arc<dyn Elsewhere>);
    let c = Cluster::led(Profile::INSTANT, ExecOptions::default(), |_| {}, here).await;
    let t = c.table(1).await;
    (c, t)
}

fn generation(c: &Cluster, job: JobId) -> Generation {
    c.meta.jobs.lock()[&job].start.generation
}

/// The number of the last cut, and what is sealed.
async fn handed_over(c: &Cluster, job: JobId, record: u64) -> (u64, Vec<JobCommit>) {
    let running = c.worker.adopt_job(job, generation(c, job), record, 0).await.unwrap();
    let running = running.expect("it runs");
    (running.number, running.sealed)
}

/// Polls a statement until it has entered, which it must before it is answered.
async fn entered<T>(statement: &mut (impl Future<Output = T> + Unpin)) {
    for _ in 0..1_000 {
        assert!(statement.now_or_never().is_none(), "answered before it was committed");
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn what_is_sealed_is_handed_over_until_the_log_has_it() {
    let (c, t) = led().await;
    // The table's epochs end only when the test says so.
    let turn = Arc::clone(&c.meta.jobs.lock()[&t].turn);
    let _turn = turn.lock_owned().await;
    assert_eq!(handed_over(&c, t, 0).await, (0, vec![]));
    let rows = [(1, 10, 1), (2, 20, 1)];
    let mut insert = Box::pin(c.dml(t, &rows, INSERT));
    entered(&mut insert).await;
    let sealed = c.meta.cut_only(t, generation(&c, t), Epoch::ZERO).await.unwrap();
    // The leader that asked for it is lost. Whoever is next may ask more than once.
    for _ in 0..2 {
        assert_eq!(handed_over(&c, t, 0).await, (1, vec![sealed.clone()]));
    }
    c.meta.fold(t, &sealed);
    c.meta.send().await;
    insert.await.unwrap();
    assert_eq!(handed_over(&c, t, 0).await, (1, vec![]));
    // An empty epoch is not logged.
    let empty = c.meta.cut_only(t, generation(&c, t), Epoch::ZERO).await.unwrap();
    assert!(empty.is_empty());
    assert_eq!(handed_over(&c, t, 0).await, (1, vec![]));
}

#[tokio::test]
async fn cuts_and_starts_of_an_earlier_leader_are_refused() {
    let (c, t) = led().await;
    let order = c.meta.order(t);
    let record = order.record + 1;
    handed_over(&c, t, record).await;
    let cut = |record| Cut { epoch: Epoch::ZERO, number: 1, record };
    let refused = c.worker.cut(t, order.generation, cut(record - 1)).await.unwrap_err();
    assert!(refused.message.contains("leads no longer"), "{refused}");
    assert!(c.worker.start_job(order).await.is_err());
    c.worker.cut(t, order.generation, cut(record)).await.unwrap();
    // The one that leads may do as it likes.
    c.worker.start_job(StartJob { record, ..order }).await.unwrap();
}

#[tokio::test]
async fn a_job_that_has_ended_or_is_another_generation_is_not_handed_over() {
    let (c, t) = led().await;
    let own = generation(&c, t);
    assert!(c.worker.adopt_job(t, Generation(own.0 + 1), 0, 0).await.unwrap().is_none());
    assert!(c.worker.adopt_job(RelationId(99), own, 0, 0).await.unwrap().is_none());
    c.worker.abort_epoch(t, own, SqlError::internal("planted")).await;
    assert!(c.worker.adopt_job(t, own, 0, 0).await.unwrap().is_none());
}
