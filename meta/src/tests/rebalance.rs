//! Jobs that the leader moves because loads have changed, by what processes tell with their heartbeats.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use millrace_common::RelationId;
use millrace_rpc::control::{Heartbeat, JobReport, MetaControl};
use millrace_rpc::log::ProcessRole;
use millrace_rpc::operator::OperatorService;

use super::cluster::{leader_of, placed, process, registered};
use super::fake::Cluster;
use super::operators::next;
use super::store::TestStore;
use super::{table, view};

/// Nothing moves within so many seconds after loads have changed: five looks 10 s apart are needed.
const TOO_SOON: u32 = 40;
/// By then something has.
const SOON: u32 = 75;

/// A leader of two processes, and what their jobs take.
struct Test {
    cluster: Cluster,
    processes: [u64; 2],
    /// A table and two views on the first process, and between these one on the second.
    jobs: [RelationId; 4],
    /// Thousandths of a core.
    loads: BTreeMap<RelationId, u64>,
    seconds: u64,
}

impl Test {
    async fn start() -> Test {
        let (cluster, _) = leader_of(&TestStore::new(), Arc::default()).await;
        let meta = Arc::clone(&cluster.meta);
        let first = registered(&meta, process(1, ProcessRole::Compute, "a:1")).await;
        let t = cluster.created(table("t")).await;
        let v = cluster.created(view("v", &[t])).await;
        let w = cluster.created(view("w", &[t])).await;
        let second = registered(&meta, process(2, ProcessRole::Compute, "b:1")).await;
        let x = cluster.created(view("x", &[t])).await;
        meta.set_setting("rebalance_interval", Some("10s")).await.unwrap();
        let loads = [(t, 50), (v, 900), (w, 0), (x, 800)].into();
        let jobs = [t, v, w, x];
        let test = Test { cluster, processes: [first, second], jobs, loads, seconds: 0 };
        assert_eq!(test.on(), [first, first, second, first]);
        test
    }

    /// Where the jobs run.
    fn on(&self) -> [u64; 4] {
        self.jobs.map(|job| placed(&self.cluster.meta, job).0)
    }

    /// Both processes tell of their jobs once a second.
    async fn beat_for(&mut self, seconds: u32) {
        for _ in 0..seconds {
            tokio::time::sleep(Duration::from_secs(1)).await;
            self.seconds += 1;
            for incarnation in self.processes {
                let here = self.jobs.iter().zip(self.on()).filter(|(_, on)| *on == incarnation);
                let report = |(job, _): (&RelationId, u64)| {
                    let worked_us = Some(self.loads[job] * 1_000 * self.seconds);
                    JobReport { relation: job.0, worked_us, ..JobReport::default() }
                };
                let (jobs, applied) = (here.map(report).collect(), self.cluster.meta.record());
                let heartbeat = Heartbeat { incarnation, applied, jobs, ..Heartbeat::default() };
                self.cluster.meta.beat(heartbeat).await.unwrap();
            }
        }
    }

    async fn operator_moves(&self, job: RelationId, to: u64) {
        self.cluster.meta.move_job(job, to, None).await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn one_of_two_heavy_jobs_moves_when_their_loads_have_lasted() {
    let mut test = Test::start().await;
    let [first, second] = test.processes;
    test.beat_for(TOO_SOON).await;
    assert_eq!(test.on(), [first, first, second, first]);
    let generation = placed(&test.cluster.meta, test.jobs[1]).1;
    test.beat_for(SOON - TOO_SOON).await;
    // With the table's load beside them, this one relieves the process most.
    assert_eq!(test.on(), [first, second, second, first]);
    assert!(placed(&test.cluster.meta, test.jobs[1]).1 > generation);
    test.beat_for(10 * SOON).await;
    assert_eq!(test.on(), [first, second, second, first], "it is even enough");
    assert_eq!(test.cluster.meta.rebalanced_jobs(), 1);
    let [t, v, _, x] = test.jobs;
    test.cluster.insert(t).await;
    assert_eq!(test.cluster.read(&[t, v, x]).await, [1, 1, 1]);
}

#[tokio::test(start_paused = true)]
async fn what_an_operator_has_placed_stays_and_so_do_all_where_that_is_set() {
    let mut test = Test::start().await;
    let ([first, second], [_, v, _, x]) = (test.processes, test.jobs);
    let before = [first, first, second, first];
    test.beat_for(1).await;
    test.operator_moves(v, first).await;
    test.operator_moves(x, first).await;
    test.beat_for(2 * SOON).await;
    assert_eq!(test.on(), before, "an operator has placed both");
    test.cluster.meta.set_setting("rebalance_interval", Some("0")).await.unwrap();
    test.operator_moves(v, 0).await;
    test.operator_moves(x, 0).await;
    test.beat_for(2 * SOON).await;
    assert_eq!(test.on(), before, "nothing is looked at");
    test.cluster.meta.set_setting("rebalance_interval", Some("10s")).await.unwrap();
    test.beat_for(TOO_SOON).await;
    assert_eq!(test.on(), before);
    test.beat_for(SOON - TOO_SOON).await;
    assert_eq!(test.on(), [first, second, second, first]);
}

/// What one has seen is lost with it, and nothing else.
#[tokio::test(start_paused = true)]
async fn another_leader_looks_anew() {
    let mut test = Test::start().await;
    let [first, second] = test.processes;
    test.beat_for(TOO_SOON).await;
    test.cluster = next(test.cluster).await;
    test.beat_for(TOO_SOON).await;
    assert_eq!(test.on(), [first, first, second, first]);
    test.beat_for(SOON - TOO_SOON).await;
    assert_eq!(test.on(), [first, second, second, first]);
}
