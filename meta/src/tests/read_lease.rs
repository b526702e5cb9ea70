//! A process that no leader answers asks the log whether what it reads is kept for it.

use std::sync::Arc;
use std::time::Duration;

use millrace_common::{EnvHandle, SqlError, SqlState};
use millrace_rpc::log::{Entry, FenceProcess, LogRecord, RegisterProcess, encode_frame};
use millrace_storage::object::PutWatch;

use super::TestEnv;
use super::fold::record;
use super::store::TestStore;
use crate::fold::apply;
use crate::follower::LogFollower;
use crate::log::{LogStore, crc};
use crate::members::PROCESS_LEASE;
use crate::read_lease::{LeaseError, ReadLease};
use crate::state::MetaState;

const PATIENCE: Duration = Duration::from_secs(10);

struct Log {
    store: Arc<TestStore>,
    state: MetaState,
}

impl Log {
    async fn append(&mut self, entry: Entry) {
        let record: LogRecord = record(&self.state, vec![entry]);
        let bytes = encode_frame(&record, crc);
        let log = LogStore::new(Arc::clone(&self.store) as _);
        log.create(record.number, &bytes, &PutWatch::default()).await;
        apply(&mut self.state, &record, crc(&bytes));
    }

    async fn register(&mut self, nonce: u64) -> u64 {
        let registered = RegisterProcess { nonce, ..RegisterProcess::default() };
        self.append(Entry::RegisterProcess(registered)).await;
        self.state.processes.by_nonce(nonce).unwrap()
    }

    async fn fence(&mut self, incarnation: u64) {
        let incarnations = vec![incarnation];
        self.append(Entry::FenceProcess(FenceProcess { incarnations })).await;
    }
}

/// Two processes, and the lease of the first, which follows the log by itself.
async fn begin() -> (Log, ReadLease, [u64; 2], EnvHandle) {
    let mut log = Log { store: TestStore::new(), state: MetaState::default() };
    let processes = [log.register(1).await, log.register(2).await];
    let env = EnvHandle::new(TestEnv::new(1));
    let follower = LogFollower::open(Arc::clone(&log.store) as _, env.clone()).await.unwrap();
    let lease = ReadLease::new(Arc::new(follower), env.clone(), processes[0], env.since_boot());
    (log, lease, processes, env)
}

#[tokio::test(start_paused = true)]
async fn who_is_answered_asks_nobody() {
    let (log, lease, _, env) = begin().await;
    let requests = log.store.requests();
    for _ in 0..20 {
        tokio::time::sleep(PROCESS_LEASE / 2).await;
        lease.check(PATIENCE).await.unwrap();
        lease.renew(env.since_boot());
    }
    assert_eq!(log.store.requests(), requests);
}

#[tokio::test(start_paused = true)]
async fn without_a_leader_it_reads_on_until_the_log_fences_it() {
    let (mut log, lease, [own, other], _) = begin().await;
    log.fence(other).await;
    // As long as it takes: nobody leads, so nobody deletes.
    for _ in 0..20 {
        tokio::time::sleep(PROCESS_LEASE).await;
        lease.check(PATIENCE).await.unwrap();
    }
    log.fence(own).await;
    tokio::time::sleep(PROCESS_LEASE).await;
    let error = lease.check(PATIENCE).await.unwrap_err();
    assert_eq!(error, LeaseError::Fenced { incarnation: own });
    assert_eq!(SqlError::from(error).state, SqlState::CANNOT_CONNECT_NOW);
}

/// It ends before the leader takes the process for lost, and counts from before the heartbeat that was answered last.
#[tokio::test(start_paused = true)]
async fn a_lease_ends_before_that_of_the_leader() {
    let (mut log, lease, [own, _], env) = begin().await;
    let began = env.since_boot();
    // Its answer takes long.
    tokio::time::sleep(PROCESS_LEASE / 2).await;
    lease.renew(began);
    lease.check(PATIENCE).await.unwrap();
    log.fence(own).await;
    tokio::time::sleep(PROCESS_LEASE / 2 - Duration::from_millis(1)).await;
    assert!(lease.check(PATIENCE).await.is_err(), "the leader may have fenced it by now");
}

#[tokio::test(start_paused = true)]
async fn an_answer_of_the_log_counts_for_a_while() {
    let (log, lease, _, _) = begin().await;
    tokio::time::sleep(PROCESS_LEASE).await;
    lease.check(PATIENCE).await.unwrap();
    let asked = log.store.requests();
    for _ in 0..100 {
        lease.check(PATIENCE).await.unwrap();
    }
    assert_eq!(log.store.requests(), asked);
}

/// Nobody has given it an incarnation that the log could fence: it reads what is committed, as it is now.
#[tokio::test(start_paused = true)]
async fn who_has_not_registered_reads_at_the_head_of_the_log() {
    let mut log = Log { store: TestStore::new(), state: MetaState::default() };
    let other = log.register(1).await;
    let env = EnvHandle::new(TestEnv::new(1));
    let follower = LogFollower::open(Arc::clone(&log.store) as _, env.clone()).await.unwrap();
    let follower = Arc::new(follower);
    // Later than a lease that nobody has given could end.
    tokio::time::sleep(PROCESS_LEASE).await;
    let lease = ReadLease::unregistered(Arc::clone(&follower), env.clone());
    assert!(!lease.is_registered());
    log.fence(other).await;
    lease.check(PATIENCE).await.unwrap();
    assert_eq!(follower.number(), log.state.number, "it has looked");

    let began = env.since_boot();
    let own = log.register(2).await;
    lease.register(own, began);
    assert!(lease.is_registered());
    let asked = log.store.requests();
    lease.check(PATIENCE).await.unwrap();
    assert_eq!(log.store.requests(), asked, "the leader has just answered");
    log.fence(own).await;
    tokio::time::sleep(PROCESS_LEASE).await;
    assert_eq!(lease.check(PATIENCE).await, Err(LeaseError::Fenced { incarnation: own }));
}
