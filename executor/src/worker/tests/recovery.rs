//! What a job costs that goes on in another process: dependent rounds from its start there until its next row.

use std::time::Duration;

use millrace_storage::{FollowedJob, FollowedVersion, VersionFollower};

use super::lookahead::{counted, counts};
use super::*;
use crate::worker::rows_table;

/// Slow enough that parallel requests overlap, on a machine that is busy with other things too.
const STEADY: Profile = Profile {
    p50: Duration::from_millis(150),
    p99: Duration::from_millis(150),
    ..Profile::INSTANT
};
const FLUSHES: i64 = 6;
const ROWS: i64 = 2_000;

/// All jobs but one view run on another process.
struct AllButView {
    versions: VersionFollower,
    view: JobId,
    relation: Relation,
    version: Arc<JobVersion>,
}

#[async_trait]
impl Elsewhere for AllButView {
    fn generation_here(&self, _: RelationId) -> Option<Generation> {
        None
    }

    fn is_placed_elsewhere(&self, relation: RelationId) -> bool {
        relation != self.view
    }

    async fn follow(&self, relation: RelationId) -> Result<Arc<FollowedJob>, SqlError> {
        let version = Arc::clone(&self.version);
        let at = FollowedVersion { record: 1, version, horizon: Epoch::ZERO };
        let rows = rows_table(&self.relation).map_err(SqlError::from)?;
        Ok(self.versions.advance(relation, at, || vec![rows]).await?)
    }

    fn memory_bytes(&self) -> usize {
        self.versions.memory_bytes()
    }
}

/// Indexes in partitions, blocks of a few rows, and tails in objects of their own.
fn small(options: &mut StoreOptions) {
    (options.block_bytes, options.partition_bytes) = (Some(512), Some(1 << 10));
    options.inline_bytes = 0;
}

impl Cluster {
    async fn flush(&self, job: JobId) {
        let edit = self.store.job(job).unwrap().flush().await.unwrap();
        Meta(Arc::clone(&self.meta)).commit_edit(job, Generation(1), edit).await.unwrap();
    }

    /// Another process over the same store, which knows of the jobs what the log says of them.
    async fn beside(&self, view: JobId, table: JobId) -> Cluster {
        let mut options = StoreOptions::new(Arc::new(self.sim.clone()), 2);
        small(&mut options);
        // The commit itself is no matter here.
        options.inline_bytes = 16 << 10;
        let store = StateStore::open(options).await.unwrap();
        let meta = Arc::new(FakeMeta::default());
        for (id, job) in &*self.meta.jobs.lock() {
            let FakeJob { start, graph, number, .. } = job;
            let (start, graph, turn) = (start.clone(), graph.clone(), Arc::default());
            meta.jobs.lock().insert(*id, FakeJob { start, graph, turn, number: *number });
        }
        let of_table = meta.jobs.lock()[&table].start.clone();
        let elsewhere = AllButView {
            versions: VersionFollower::new(&store),
            view,
            relation: of_table.relation,
            version: Arc::new(of_table.version),
        };
        let mut options = WorkerOptions::new(Arc::clone(&store));
        options.elsewhere = Some(Arc::new(elsewhere));
        let worker = Worker::new(options);
        meta.worker.set(Arc::downgrade(&worker)).unwrap();
        worker.set_meta(Arc::new(Meta(Arc::clone(&meta))));
        Cluster { worker, meta, store, sim: self.sim.clone() }
    }
}

/// The tails of view and table, the indexes of runs, and blocks: each of them once. Of the table's runs none: the tail
/// says that the row's key is new.
#[tokio::test]
async fn a_view_that_moves_computes_its_next_row_after_three_rounds() {
    let c = Cluster::over(Profile::INSTANT, ExecOptions::default(), small).await;
    let t = c.table(1).await;
    let v = c.view(2, t, counted(t), 2).await;
    c.catch_up(v).await;
    for flush in 0..FLUSHES {
        c.insert(t, (0..ROWS).map(|v| (flush * ROWS + v, v))).await;
        c.follow(v, t).await;
        c.flush(v).await;
        c.flush(t).await;
    }
    // What is in the tail of the view, and what only the table has.
    c.insert(t, (0..10).map(|v| (FLUSHES * ROWS + v, v))).await;
    c.follow(v, t).await;
    c.insert(t, [(-1, 777)]).await;
    let version = c.version(v);
    let partitioned = version.runs.iter().filter(|run| !run.top.is_empty()).count();
    assert!(partitioned >= FLUSHES as usize, "{partitioned} runs have partitions");
    assert!(c.version(t).runs.len() >= FLUSHES as usize, "the new row's key could be in a run");
    let in_objects = |tail: &[millrace_rpc::version::SliceRef]| {
        !tail.is_empty() && tail.iter().all(|slice| !slice.object.is_empty())
    };
    assert!(in_objects(&version.tail) && in_objects(&c.version(t).tail));

    let other = c.beside(v, t).await;
    c.sim.set_profile(STEADY);
    let before = c.sim.stats();
    other.start(v).await.unwrap();
    other.follow(v, t).await;
    let cost = c.sim.stats();
    assert_eq!(cost.puts, before.puts);
    assert_eq!(cost.rounds - before.rounds, 3);
    c.sim.set_profile(Profile::INSTANT);
    assert_eq!(other.rows(v).await, counts(&c.rows(t).await));
}
