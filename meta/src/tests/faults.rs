//! Promises of the log on a store that misbehaves: nothing is lost or doubled, no leader gives up, and what waits is told.

use std::sync::Arc;
use std::time::Duration;

use millrace_common::EnvHandle;
use millrace_rpc::log::{Entry, SetSetting};
use millrace_storage::object::{MeterOptions, Metered};
use millrace_storage::sim::{Faults, Profile, RequestKind, SimStore};
use object_store::ObjectStore;
use parking_lot::RwLock;

use super::TestEnv;
use crate::fold::Verdict;
use crate::log::{LEADER_LEASE, LogStore, LogWriter, Observer, SnapshotPolicy, WriterOptions};
use crate::state::MetaState;

/// Nothing is answered.
const HANG: Faults = Faults {
    error: 0.0,
    lost_answer: 0.0,
    hang: 1.0,
    torn_write: 0.0,
    disk_full: 0.0,
    short_read: 0.0,
    damaged_read: 0.0,
    slow_down: 0.0,
    slow_down_above: 0,
    reset: 0.0,
    only: None,
};

struct Nobody;

impl Observer for Nobody {
    fn folded(&self, _: &Arc<millrace_rpc::log::LogRecord>, _: &[Verdict]) {}
}

async fn lead(store: &Arc<Metered>, seed: u64) -> LogWriter {
    let log_store = LogStore::new(Arc::clone(store) as Arc<dyn ObjectStore>);
    let opened = log_store.open().await.unwrap();
    let state = Arc::new(RwLock::new(MetaState::default()));
    let options = WriterOptions {
        env: EnvHandle::new(TestEnv::new(seed)),
        // Snapshots, lists and deletes of what they cover beside the appends.
        policy: SnapshotPolicy { min_records: 8, size_divisor: 1_000, max_records: 8 },
        log_retention: Arc::new(|| Duration::from_secs(86_400)),
        object_retention: Arc::new(|| Duration::from_secs(600)),
        observer: Arc::new(Nobody),
        clock: Arc::default(),
    };
    LogWriter::lead(log_store, opened, state, &|_, _| Some(Vec::new()), options).await.unwrap().0
}

fn set(i: usize) -> Entry {
    Entry::SetSetting(SetSetting { name: format!("s{i:03}"), value: Some("1".to_owned()) })
}

fn faults() -> [Faults; 6] {
    let none = Faults::default();
    [
        Faults { slow_down: 0.4, ..none },
        Faults { reset: 0.4, ..none },
        Faults { hang: 0.3, ..none },
        Faults { lost_answer: 0.4, ..none },
        Faults { slow_down_above: 20, ..none },
        Faults { slow_down: 0.1, reset: 0.1, hang: 0.1, lost_answer: 0.1, ..none },
    ]
}

/// As a server wraps its store.
fn wrapped(sim: &SimStore) -> Arc<Metered> {
    Metered::wrap(Arc::new(sim.clone()), MeterOptions::default())
}

#[tokio::test(start_paused = true)]
async fn appends_outlive_every_fault_that_passes() {
    const APPENDS: usize = 60;
    for (n, faults) in faults().into_iter().enumerate() {
        let sim = SimStore::in_memory(Profile::S3, n as u64 + 1);
        let store = wrapped(&sim);
        let leader = lead(&store, n as u64 + 1).await;
        sim.set_faults(faults);
        for i in 0..APPENDS {
            assert!(leader.append(set(i)).await.unwrap().is_ok(), "{faults:?}");
        }
        sim.set_faults(Faults::default());
        let stats = leader.append_stats();
        // A record whose answer was lost is read back and found: nothing need be sent again.
        let (struck, repeated) = (sim.stats().faults, stats.retries > 0);
        let met = match faults.lost_answer > 0.0 {
            true => struck > 0 && sim.stats().gets > 0,
            false => repeated || store.pace_stats().slow_downs > 0,
        };
        assert!(met, "{faults:?}: {stats:?}, {struck} faults");
        assert_eq!(stats.waiting, Duration::ZERO, "none is under way");
        let found = LogStore::new(Arc::clone(&store) as Arc<dyn ObjectStore>).open().await.unwrap();
        assert_eq!(found.state.settings.len(), APPENDS, "{faults:?}");
        assert_eq!(found.state.number, 1 + APPENDS as u64, "{faults:?}: none is there twice");
    }
}

#[tokio::test(start_paused = true)]
async fn an_append_waits_out_an_hour_and_says_so() {
    for outage in [
        Faults { slow_down: 1.0, ..Faults::default() },
        Faults { reset: 1.0, ..Faults::default() },
        Faults { hang: 1.0, ..Faults::default() },
    ] {
        let sim = SimStore::in_memory(Profile::S3, 1);
        let store = wrapped(&sim);
        let leader = lead(&store, 1).await;
        sim.set_faults(outage);
        let hour = Duration::from_secs(3_600);
        let well_again = async {
            tokio::time::sleep(hour).await;
            let stats = leader.append_stats();
            assert!(stats.waiting + Duration::from_secs(1) > hour, "{outage:?}: {stats:?}");
            assert!(stats.retries > 10, "{outage:?}: {stats:?}");
            let append = leader.append_wait().unwrap();
            assert_eq!((append.number, append.waiting), (2, stats.waiting));
            assert!(append.progress.failures > 10, "{outage:?}: {append:?}");
            assert!(append.progress.error.is_some(), "{outage:?}: {append:?}");
            let requests = sim.stats().requests();
            assert!(requests < 10_000, "{outage:?}: it has backed off, after {requests} requests");
            sim.set_faults(Faults::default());
        };
        let (appended, ()) = tokio::join!(leader.append(set(0)), well_again);
        assert!(appended.unwrap().is_ok());
        let began = tokio::time::Instant::now();
        assert!(leader.append(set(1)).await.unwrap().is_ok());
        assert!(began.elapsed() < Duration::from_secs(2), "{outage:?}: it has recovered");
        assert_eq!(leader.append_stats().waiting, Duration::ZERO);
        assert_eq!(leader.append_wait(), None);
    }
}

/// Others are told of it: one that the store answers leads better.
#[tokio::test(start_paused = true)]
async fn a_leader_knows_for_how_long_the_store_has_not_answered_it() {
    let wait = Duration::from_secs(5);
    let sim = SimStore::in_memory(Profile::S3, 1);
    let leader = lead(&wrapped(&sim), 1).await;
    tokio::time::sleep(LEADER_LEASE).await;
    assert_eq!(leader.store_wait(), Duration::ZERO, "it waits for nothing");

    sim.set_faults(HANG);
    let append = tokio::time::timeout(wait, leader.append(set(0)));
    let (append, told) = tokio::join!(append, told_after(&leader, wait / 2));
    assert!(append.is_err());
    // An append alone may be a large one: half a second later the store is asked something small.
    assert!(told >= Duration::from_millis(1_900) && told < wait / 2, "{told:?}");
    assert!(leader.store_wait() > told, "the record waits though nobody waits for it");
    sim.set_faults(Faults::default());
    assert!(leader.append(set(1)).await.unwrap().is_ok());
    assert!(leader.store_wait() < Duration::from_secs(1), "it answers again");
}

#[tokio::test(start_paused = true)]
async fn readers_that_give_up_do_not_hide_that_the_store_does_not_answer() {
    let sim = SimStore::in_memory(Profile::S3, 1);
    let leader = lead(&wrapped(&sim), 1).await;
    tokio::time::sleep(LEADER_LEASE).await;
    sim.set_faults(HANG);
    let patience = Duration::from_millis(300);
    for n in 1..=20 {
        assert!(tokio::time::timeout(patience, leader.prove_lead(|_| {})).await.is_err());
        assert!(leader.store_wait() >= patience * n, "since the first of them");
    }
    // It learns by itself that the store answers again, before another one would claim the lead.
    sim.set_faults(Faults::default());
    assert_eq!(told_after(&leader, Duration::from_millis(1_300)).await, Duration::ZERO);
    leader.prove_lead(|_| {}).await.unwrap();
}

/// One connection may hang while others are answered: from the next attempt on it counts again.
#[tokio::test(start_paused = true)]
async fn a_reader_that_goes_on_asking_does_not_hide_that_the_store_does_not_answer() {
    let sim = SimStore::in_memory(Profile::S3, 1);
    let leader = lead(&wrapped(&sim), 1).await;
    tokio::time::sleep(LEADER_LEASE).await;
    sim.set_faults(HANG);
    let proving = tokio::spawn({
        let leader = leader.clone();
        async move { leader.prove_lead(|_| {}).await }
    });
    assert!(told_after(&leader, Duration::from_millis(400)).await > Duration::ZERO);
    sim.set_faults(Faults::default());
    let told = told_after(&leader, Duration::from_millis(600)).await;
    assert_eq!(told, Duration::ZERO, "a question was answered");
    sim.set_faults(HANG);
    // The reader's first attempt ends after 10 s.
    assert!(told_after(&leader, Duration::from_secs(15)).await > Duration::from_secs(5));
    sim.set_faults(Faults::default());
    proving.await.unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn an_append_that_takes_long_while_the_store_answers_is_no_reason_for_another_leader() {
    let sim = SimStore::in_memory(Profile::S3, 1);
    let leader = lead(&wrapped(&sim), 1).await;
    sim.set_faults(Faults { only: Some(RequestKind::Put), ..HANG });
    let appending = tokio::spawn({
        let leader = leader.clone();
        async move { leader.append(set(0)).await }
    });
    for _ in 0..90 {
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert!(leader.store_wait() < Duration::from_secs(1), "a question was answered");
    }
    assert!(leader.append_wait().unwrap().waiting > Duration::from_secs(8));
    // Attempt after attempt is no slow record.
    tokio::time::sleep(Duration::from_secs(15)).await;
    assert!(leader.store_wait() > Duration::from_secs(20));
    sim.set_faults(Faults::default());
    assert!(appending.await.unwrap().unwrap().is_ok());
    assert!(leader.store_wait() < Duration::from_secs(1));
}

async fn told_after(leader: &LogWriter, time: Duration) -> Duration {
    tokio::time::sleep(time).await;
    leader.store_wait()
}
