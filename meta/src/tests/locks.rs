//! When the advisory locks of a fenced frontend are given to others: when nothing more of its sessions can be committed.

use std::sync::Arc;
use std::time::Duration;

use millrace_common::RelationId;
use millrace_rpc::control::{Heartbeat, MetaControl};
use millrace_rpc::log::ProcessRole;
use tokio::time::{Instant, timeout};
use tokio_util::task::AbortOnDropHandle;

use super::cluster::{beats, leader_of, process, registered, take_lock};
use super::fake::{Behaviour, Cluster};
use super::store::TestStore;
use super::table;

const CUT: Duration = Duration::from_secs(2);
/// What ends by itself has ended by then.
const LIMIT: Duration = Duration::from_secs(120);

/// A frontend has lock 1, and a cut of what it has written to a table is under way.
struct Test {
    cluster: Cluster,
    table: RelationId,
    compute: u64,
    holder: u64,
    other: u64,
    began: Instant,
    _running: Vec<AbortOnDropHandle<()>>,
}

impl Test {
    /// `behaviour`: of the table, from that cut on.
    async fn new(behaviour: Behaviour) -> Test {
        let (cluster, _) = leader_of(&TestStore::new(), Arc::default()).await;
        let meta = Arc::clone(&cluster.meta);
        let compute = registered(&meta, process(1, ProcessRole::Compute, "a:1")).await;
        let holder = registered(&meta, process(2, ProcessRole::Frontend, "f:1")).await;
        let other = registered(&meta, process(3, ProcessRole::Frontend, "g:1")).await;
        let table = cluster.created(table("t")).await;
        assert!(take_lock(&meta, holder, 1).await.unwrap().taken);
        cluster.fake.behave(table, behaviour);
        let fake = Arc::clone(&cluster.fake);
        let inserting = tokio::spawn(async move { drop(fake.insert(table).await) });
        let inserting = AbortOnDropHandle::new(inserting);
        let began = Instant::now();
        tokio::time::sleep(CUT / 4).await;
        let _running = vec![inserting, beats(&meta, compute), beats(&meta, other)];
        Test { cluster, table, compute, holder, other, began, _running }
    }

    async fn leaves(&self, incarnation: u64) {
        let heartbeat = Heartbeat { incarnation, leaving: true, ..Heartbeat::default() };
        self.cluster.meta.beat(heartbeat).await.unwrap();
    }

    /// Whether the other frontend has the lock within this time. One that has not does not wait on.
    async fn is_given_within(&self, limit: Duration) -> bool {
        let given = timeout(limit, take_lock(&self.cluster.meta, self.other, 1)).await;
        given.is_ok_and(|given| given.unwrap().taken)
    }
}

/// The cut that is under way may lack what enters meanwhile, the next one does not: its process has the fence by then.
#[tokio::test(start_paused = true)]
async fn locks_of_a_fenced_frontend_wait_for_what_its_sessions_have_written() {
    let test = Test::new(Behaviour { cut_takes: CUT, ..Behaviour::default() }).await;
    test.leaves(test.holder).await;
    assert!(test.is_given_within(LIMIT).await);
    let waited = test.began.elapsed();
    assert!(waited >= CUT * 2 && waited < CUT * 3, "{waited:?}");
}

#[tokio::test(start_paused = true)]
async fn a_process_that_is_lost_too_keeps_no_locks_of_a_fenced_frontend() {
    let test = Test::new(Behaviour { hang: true, ..Behaviour::default() }).await;
    test.leaves(test.holder).await;
    assert!(!test.is_given_within(CUT).await, "what has been written may be committed");
    test.leaves(test.compute).await;
    assert!(test.is_given_within(LIMIT).await);
}

/// Each of its generations ends with the first cut, and with it what had entered.
#[tokio::test(start_paused = true)]
async fn a_table_that_fails_keeps_no_locks_of_a_fenced_frontend() {
    let fail_cut = Some("planted".to_owned());
    let test = Test::new(Behaviour { cut_takes: CUT, fail_cut, ..Behaviour::default() }).await;
    test.leaves(test.holder).await;
    assert!(!test.is_given_within(CUT / 4).await, "what has been written may be committed");
    assert!(test.is_given_within(LIMIT).await);
}

#[tokio::test(start_paused = true)]
async fn no_cut_is_made_for_a_fenced_frontend_without_locks() {
    let test = Test::new(Behaviour::default()).await;
    let cuts = || test.cluster.fake.cuts_of(test.table).len();
    let before = cuts();
    test.leaves(test.other).await;
    tokio::time::sleep(CUT).await;
    assert_eq!(cuts(), before);
}
