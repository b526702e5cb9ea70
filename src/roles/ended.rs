//! What the log ends of what runs on a compute process, which ends it by itself: jobs that are dropped or placed elsewhere,
//! and generations before the one that a job has. Whoever leads stops them, too, to know that they are gone; nothing
//! depends on it.

use std::collections::BTreeMap;

use millrace_common::{Generation, JobId};
use millrace_executor::Worker;
use millrace_meta::endings::MayEnd;
use millrace_meta::state::MetaState;
use tracing::info;

use super::elsewhere::FollowedInputs;

/// What has become of a job that is open here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// It is gone or runs elsewhere: nothing is kept of the generations before this one.
    Left(JobId, Generation),
    /// It stays here, in this generation: those before it end.
    Raised(JobId, Generation),
}

impl Ended {
    /// Returns when its tasks are gone. A generation that was started meanwhile runs on: it is a later one.
    pub async fn end(self, worker: &Worker) {
        match self {
            Ended::Left(job, before) => {
                info!(%job, "the job does not run here any more");
                worker.leave(job, before).await;
            }
            Ended::Raised(job, generation) => {
                info!(%job, generation = generation.0, "the log has begun another generation");
                worker.end_before(job, generation).await;
            }
        }
    }
}

impl FollowedInputs {
    /// Of the jobs that may have ended, those that the log has ended and that are not ended here.
    pub fn ended(&self, worker: &Worker, may_end: &MayEnd) -> Vec<Ended> {
        let here = open_here(worker, may_end);
        if here.is_empty() {
            return Vec::new();
        }
        self.follower.read(|state| {
            let ended =
                |(id, running): (JobId, Option<Generation>)| self.end_of(state, id, running);
            here.into_iter().filter_map(ended).collect()
        })
    }

    fn end_of(&self, state: &MetaState, id: JobId, running: Option<Generation>) -> Option<Ended> {
        let Some(job) = state.jobs.get(&id) else {
            return Some(Ended::Left(id, Generation(u64::MAX)));
        };
        let generation = Generation(job.version.generation);
        if job.process != 0 && job.process != self.incarnation {
            return Some(Ended::Left(id, generation));
        }
        let has_ended = running.is_some_and(|running| running < generation);
        has_ended.then_some(Ended::Raised(id, generation))
    }
}

/// The jobs that may have ended, and the generation of each that runs here. Of all jobs also those that have stopped and
/// whose state is open.
fn open_here(worker: &Worker, may_end: &MayEnd) -> BTreeMap<JobId, Option<Generation>> {
    if !may_end.any {
        let running = |job: &JobId| Some((*job, Some(worker.running(*job)?)));
        return may_end.jobs.iter().filter_map(running).collect();
    }
    let open = worker.open_jobs().into_iter().map(|(job, _)| (job, None));
    let running = worker.running_jobs().into_iter().map(|(job, running)| (job, Some(running)));
    open.chain(running).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use futures::StreamExt;
    use millrace_common::{EnvHandle, SqlType};
    use millrace_executor::input::relations::Elsewhere;
    use millrace_executor::worker::WorkerOptions;
    use millrace_meta::{CreateOptions, LogFollower, Meta, MetaOptions};
    use millrace_rpc::catalog::{Column, Relation, RelationKind};
    use millrace_rpc::control::{MetaControl, RecordStream};
    use millrace_rpc::log::AlterRelation;
    use millrace_rpc::loopback::Encoded;
    use millrace_rpc::services::{ComputeService, MetaService, StartJob};
    use millrace_rpc::stream::StreamMessage;
    use millrace_storage::{StateStore, StoreOptions, VersionFollower};
    use object_store::ObjectStore;
    use object_store::memory::InMemory;

    use super::super::upstream::{Following, Upstream};
    use super::*;

    const LIMIT: Duration = Duration::from_secs(30);

    /// A compute process, and a leader that calls it only where the test says so.
    struct Process {
        meta: Arc<Meta>,
        records: RecordStream,
        following: Following,
        worker: Arc<Worker>,
        table: JobId,
    }

    impl Process {
        /// With a table, which the log has placed on it, or on the process before it.
        async fn with_table(is_here: bool) -> Process {
            let bucket: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
            let meta = Meta::open(MetaOptions::new(Arc::clone(&bucket))).await.unwrap();
            let records = MetaControl::follow(&*meta, 0).await.unwrap();
            let incarnation = meta.incarnation() + u64::from(!is_here);
            let log = LogFollower::open(Arc::clone(&bucket), EnvHandle::default()).await.unwrap();
            let (log, options) = (Arc::new(log), StoreOptions::new(bucket, incarnation));
            let store = StateStore::open(options).await.unwrap();
            let versions = Arc::new(VersionFollower::new(&store));
            let inputs = FollowedInputs { follower: Arc::clone(&log), versions, incarnation };
            let inputs = Arc::new(inputs);
            let worker = Worker::new(WorkerOptions {
                elsewhere: Some(Arc::clone(&inputs) as Arc<dyn Elsewhere>),
                ..WorkerOptions::new(store)
            });
            let leader = Arc::new(Encoded::meta(Arc::clone(&meta) as Arc<dyn MetaControl>));
            let upstream = Upstream { follower: Arc::clone(&log), meta: leader };
            worker.set_meta(Arc::new(upstream) as Arc<dyn MetaService>);
            let following = Following { follower: log, worker: Arc::clone(&worker), inputs };
            let options = CreateOptions { table_count: 1, ..CreateOptions::default() };
            let table = meta.create_relation(table(), options).await.unwrap();
            let mut process = Process { meta, records, following, worker, table };
            process.told().await;
            process
        }

        /// The leader sends what the log has that was not sent.
        async fn told(&mut self) -> StreamMessage {
            let message = self.records.next().await.unwrap().unwrap();
            self.following.apply_records(message.clone()).await.unwrap();
            message
        }

        async fn start(&self, generation: u64) -> bool {
            let (job, generation) = (self.table, Generation(generation));
            let order = StartJob { job, generation, record: self.meta.record(), parallelism: 1 };
            self.following.start_job(order).await.is_ok()
        }

        fn running(&self) -> Option<u64> {
            self.worker.running(self.table).map(|generation| generation.0)
        }

        async fn ends(&self) {
            let ended = async {
                while self.running().is_some() {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            };
            tokio::time::timeout(LIMIT, ended).await.expect("it runs on");
        }
    }

    /// `CREATE TABLE t (id BIGINT PRIMARY KEY)`
    fn table() -> Relation {
        let id =
            Column { name: "id".to_owned(), sql_type: SqlType::BigInt.into(), ..Column::default() };
        Relation {
            schema: "public".to_owned(),
            name: "t".to_owned(),
            kind: RelationKind::Table as i32,
            columns: vec![id],
            key: vec![0],
            distribution: vec![0],
            primary_key: true,
            ..Relation::default()
        }
    }

    #[tokio::test]
    async fn a_generation_that_the_log_ends_ends_without_a_call() {
        let mut process = Process::with_table(true).await;
        assert!(process.start(1).await);
        assert_eq!(process.running(), Some(1));
        let id = process.table.0;
        let change = AlterRelation { id, parallelism: Some(3), ..AlterRelation::default() };
        process.meta.alter_relation(change).await.unwrap();
        let message = process.told().await;
        process.ends().await;
        assert!(process.worker.store().job(process.table).is_some(), "its rows stay readable");
        assert!(!process.start(1).await, "the log has another generation");
        assert!(process.start(2).await);
        // The same again ends nothing that was started since.
        process.following.apply_records(message).await.unwrap();
        assert_eq!(process.running(), Some(2));
    }

    #[tokio::test]
    async fn a_job_that_is_dropped_ends_without_a_call_and_nothing_is_kept_of_it() {
        let mut process = Process::with_table(true).await;
        assert!(process.start(1).await);
        process.meta.drop_relations(&[process.table]).await.unwrap();
        process.told().await;
        process.ends().await;
        let closed = async {
            while process.worker.store().job(process.table).is_some() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(LIMIT, closed).await.expect("its state is open");
        assert!(!process.start(1).await, "there is no such job");
    }

    #[tokio::test]
    async fn a_job_is_not_started_where_the_log_has_not_placed_it() {
        let process = Process::with_table(false).await;
        assert!(!process.start(1).await);
        assert_eq!(process.running(), None);
    }

    /// Of all jobs, and of those that a record names; what has stopped is not ended twice.
    #[tokio::test]
    async fn only_what_runs_in_a_generation_that_is_over_is_ended() {
        let process = Process::with_table(true).await;
        let ended = |may_end: &MayEnd| process.following.inputs.ended(&process.worker, may_end);
        let any = MayEnd { any: true, ..MayEnd::default() };
        let named = MayEnd { jobs: [process.table].into(), ..MayEnd::default() };
        assert!(process.start(1).await);
        assert_eq!([ended(&any), ended(&named)], [vec![], vec![]]);
        let id = process.table.0;
        let change = AlterRelation { id, parallelism: Some(3), ..AlterRelation::default() };
        process.meta.alter_relation(change).await.unwrap();
        process.following.follower.catch_up().await.unwrap();
        let raised = vec![Ended::Raised(process.table, Generation(2))];
        assert_eq!([ended(&any), ended(&named)], [raised.clone(), raised]);
        assert_eq!(ended(&MayEnd::default()), []);
        process.worker.stop_job(process.table, Generation(1)).await;
        assert_eq!([ended(&any), ended(&named)], [vec![], vec![]]);
        process.meta.drop_relations(&[process.table]).await.unwrap();
        process.following.follower.catch_up().await.unwrap();
        let left = Ended::Left(process.table, Generation(u64::MAX));
        assert_eq!(ended(&any), [left], "its state is open");
    }
}
