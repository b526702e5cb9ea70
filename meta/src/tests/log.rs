//! What the store does to an append, and two leaders on one bucket.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use millrace_common::{EnvHandle, SqlError, SqlState};
use millrace_rpc::call_error::LEADS_NO_LONGER;
use millrace_rpc::log::{CreateSchema, Entry, LogRecord, SetSetting};
use parking_lot::RwLock;

use super::TestEnv;
use super::store::{Fault, TestStore};
use crate::error::MetaError;
use crate::fold::Verdict;
use crate::log::{LEADER_LEASE, LogStore, LogWriter, Observer, SnapshotPolicy, WriterOptions};
use crate::state::MetaState;

struct Nobody;

impl Observer for Nobody {
    fn folded(&self, _: &Arc<LogRecord>, _: &[Verdict]) {}
}

struct Leader {
    log: LogWriter,
    state: Arc<RwLock<MetaState>>,
}

async fn lead(store: &Arc<TestStore>, seed: u64) -> Leader {
    lead_with(store, seed, SnapshotPolicy::default()).await
}

async fn lead_with(store: &Arc<TestStore>, seed: u64, policy: SnapshotPolicy) -> Leader {
    let log_store = LogStore::new(Arc::clone(store) as _);
    let opened = log_store.open().await.unwrap();
    let state = Arc::new(RwLock::new(MetaState::default()));
    let options = WriterOptions {
        env: EnvHandle::new(TestEnv::new(seed)),
        policy,
        log_retention: Arc::new(|| Duration::from_secs(86_400)),
        object_retention: Arc::new(|| Duration::from_secs(600)),
        observer: Arc::new(Nobody),
        clock: Arc::default(),
    };
    let (log, _) =
        LogWriter::lead(log_store, opened, Arc::clone(&state), &|_, _| Some(Vec::new()), options)
            .await
            .unwrap();
    Leader { log, state }
}

fn set(name: &str, value: &str) -> Entry {
    Entry::SetSetting(SetSetting { name: name.to_owned(), value: Some(value.to_owned()) })
}

/// What a fresh reader of the bucket finds.
async fn reread(store: &Arc<TestStore>) -> MetaState {
    LogStore::new(Arc::clone(store) as _).open().await.unwrap().state
}

#[tokio::test(start_paused = true)]
async fn every_fault_of_a_put_is_resolved_and_nothing_is_lost_or_doubled() {
    use Fault::*;
    let store = TestStore::new();
    let leader = lead(&store, 1).await;
    let faults = [ExistsAfterSuccess, LostAnswer, NotDone, HangAfterSuccess, NotDone, LostAnswer];
    for (i, fault) in faults.into_iter().enumerate() {
        store.inject(fault);
        let verdict = leader.log.append(set(&format!("s{i}"), "1")).await.unwrap();
        assert!(verdict.is_ok(), "{fault:?}");
    }
    assert_eq!(store.faults_left(), 0);
    let found = reread(&store).await;
    assert_eq!(found.settings.len(), faults.len());
    assert_eq!(found.number, 1 + faults.len() as u64);
    assert_eq!(found.epoch, leader.state.read().epoch);
}

#[tokio::test(start_paused = true)]
async fn what_waits_shares_a_record() {
    let store = TestStore::new();
    let leader = lead(&store, 1).await;
    let before = leader.state.read().number;
    let names: Vec<String> = (0..100).map(|i| format!("s{i}")).collect();
    let appends = names.iter().map(|n| leader.log.append(set(n, "1")));
    let verdicts = futures::future::join_all(appends).await;
    assert!(verdicts.iter().all(|v| matches!(v, Ok(Ok(_)))));
    assert!(leader.state.read().number - before <= 3, "a hundred entries took many records");
}

#[tokio::test(start_paused = true)]
async fn a_second_leader_fences_the_first() {
    let store = TestStore::new();
    let first = lead(&store, 1).await;
    first.log.append(set("a", "1")).await.unwrap().unwrap();
    let second = lead(&store, 2).await;
    let refused = first.log.append(set("b", "1")).await.unwrap_err();
    assert!(matches!(refused, MetaError::Deposed { .. }), "{refused}");
    assert!(matches!(first.log.append(set("c", "1")).await, Err(MetaError::Deposed { .. })));
    assert!(matches!(first.log.deposed().await, MetaError::Deposed { .. }));
    second.log.append(set("d", "1")).await.unwrap().unwrap();
    let names: Vec<String> = reread(&store).await.settings.into_keys().collect();
    assert_eq!(names, ["a", "d"]);
}

/// What a reader is told. A store that does not answer is waited for.
async fn proof(leader: &Leader) -> Result<(), MetaError> {
    leader.log.prove_lead(|_| ()).await
}

#[tokio::test(start_paused = true)]
async fn a_deposed_leader_that_writes_nothing_learns_it_before_a_read() {
    let store = TestStore::new();
    let first = lead(&store, 1).await;
    first.log.append(set("a", "1")).await.unwrap().unwrap();
    let second = lead(&store, 2).await;
    second.log.append(set("a", "2")).await.unwrap().unwrap();
    tokio::time::advance(LEADER_LEASE).await;
    let refused = proof(&first).await.unwrap_err();
    assert!(matches!(refused, MetaError::Deposed { .. }), "{refused}");
    assert!(matches!(first.log.deposed().await, MetaError::Deposed { .. }));
    // Not for as long as the last proof counts either.
    assert!(matches!(proof(&first).await, Err(MetaError::Deposed { .. })));
    proof(&second).await.unwrap();
}

/// The records that deposed it may be covered by a snapshot and deleted when it wakes.
#[tokio::test(start_paused = true)]
async fn a_leader_that_slept_for_long_is_not_misled_by_an_empty_next_number() {
    let store = TestStore::new();
    let first = lead(&store, 1).await;
    let second = lead(&store, 2).await;
    second.log.append(set("a", "2")).await.unwrap().unwrap();
    let log_store = LogStore::new(Arc::clone(&store) as _);
    let state = second.state.read().clone();
    log_store.put_snapshot(&state).await.unwrap();
    let records = log_store.list_records_after(0).await.unwrap();
    let records = records.into_iter().map(|(_, m)| m.location);
    assert!(log_store.delete(records.collect()).await.is_empty());
    tokio::time::advance(Duration::from_secs(86_400)).await;
    assert!(matches!(proof(&first).await, Err(MetaError::Deposed { .. })));
    // Its successor is not: the snapshot is of its own head.
    proof(&second).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn one_probe_serves_all_that_wait_and_an_append_is_one() {
    let store = TestStore::new();
    let leader = lead(&store, 1).await;
    let asked = async |many: usize| {
        let before = store.requests();
        futures::future::try_join_all((0..many).map(|_| proof(&leader))).await.unwrap();
        store.requests() - before
    };
    assert_eq!(asked(3).await, 0);
    tokio::time::advance(LEADER_LEASE).await;
    assert_eq!(asked(100).await, 1);
    assert_eq!(asked(100).await, 0);
    tokio::time::advance(LEADER_LEASE).await;
    leader.log.append(set("a", "1")).await.unwrap().unwrap();
    assert_eq!(asked(1).await, 0);
    // An append whose outcome is not known yet is our own record at the next number.
    tokio::time::advance(LEADER_LEASE).await;
    store.inject(Fault::HangAfterSuccess);
    let entry = set("b", "1");
    let append = leader.log.append(entry);
    let (appended, proven) = futures::join!(append, proof(&leader));
    assert!(appended.is_ok() && proven.is_ok());
}

/// Leaders take over from each other while all of them append: what was acknowledged is there, exactly
/// once, and in an order that every reader agrees on.
#[tokio::test(start_paused = true)]
async fn racing_leaders_lose_nothing_they_acknowledged() {
    for seed in 0..8 {
        let store = TestStore::new();
        let mut tasks = Vec::new();
        for l in 0..4u64 {
            let store = Arc::clone(&store);
            tasks.push(tokio::spawn(async move {
                tokio::time::sleep(Duration::from_millis(l * (seed % 3))).await;
                let leader = lead(&store, seed * 100 + l).await;
                let mut acknowledged = Vec::new();
                for i in 0..20 {
                    if (seed + i + l) % 7 == 0 {
                        store.inject(Fault::LostAnswer);
                    }
                    let name = format!("{l}-{i}");
                    match leader.log.append(set(&name, "1")).await {
                        Ok(Ok(applied)) => acknowledged.push((name, applied.epoch)),
                        Ok(Err(void)) => panic!("{void}"),
                        Err(_) => break,
                    }
                    tokio::task::yield_now().await;
                }
                acknowledged
            }));
        }
        let mut acknowledged = BTreeMap::new();
        for task in tasks {
            acknowledged.extend(task.await.unwrap());
        }
        let found = reread(&store).await;
        for name in acknowledged.keys() {
            assert!(
                found.settings.contains_key(name),
                "seed {seed}: {name} was acknowledged and is gone"
            );
        }
        let mut epochs: Vec<_> = acknowledged.values().collect();
        epochs.sort();
        assert!(epochs.len() >= 20, "the last leader finishes");
    }
}

#[tokio::test(start_paused = true)]
async fn snapshots_cover_the_log_and_opening_reads_little() {
    let store = TestStore::new();
    let policy = SnapshotPolicy { min_records: 8, size_divisor: 1_000, max_records: 16 };
    let leader = lead_with(&store, 1, policy).await;
    for i in 0..50 {
        leader.log.append(set(&format!("s{}", i % 5), &i.to_string())).await.unwrap().unwrap();
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let (before, listed) = (store.requests(), store.listed());
    let found = LogStore::new(Arc::clone(&store) as _).open().await.unwrap();
    assert!(found.tail_records <= 16, "{} records after the snapshot", found.tail_records);
    // Two lists, the snapshot, and the next records, whether they are there or not.
    assert_eq!(store.requests() - before, 3 + 256);
    let snapshots = LogStore::new(Arc::clone(&store) as _).list_snapshots().await.unwrap().len();
    let listed = store.listed() - listed - snapshots as u64;
    assert_eq!(listed, snapshots as u64 + found.tail_records, "covered records are not listed");
    assert_eq!(found.state.to_snapshot(), leader.state.read().to_snapshot());
}

/// More records than are read before it is known how many there are.
#[tokio::test(start_paused = true)]
async fn a_long_log_without_a_snapshot_is_read_whole_and_a_hole_in_it_is_noticed() {
    let store = TestStore::new();
    let policy = SnapshotPolicy { min_records: 1_000, ..SnapshotPolicy::default() };
    let leader = lead_with(&store, 1, policy).await;
    for i in 0..600 {
        leader.log.append(set("s", &i.to_string())).await.unwrap().unwrap();
    }
    let found = reread(&store).await;
    assert_eq!((found.number, found.settings["s"].as_str()), (601, "599"));
    let log_store = LogStore::new(Arc::clone(&store) as _);
    for hole in [450, 30] {
        assert!(log_store.delete(vec![LogStore::record_path(hole)]).await.is_empty());
        let error = log_store.open().await.unwrap_err();
        assert!(matches!(error, MetaError::Gap { number } if number == hole), "{error}");
    }
}

#[tokio::test(start_paused = true)]
async fn an_append_after_a_long_silence_counts_only_at_the_head() {
    let store = TestStore::new();
    let first = lead(&store, 1).await;
    tokio::time::advance(Duration::from_secs(40_000)).await;
    first.log.append(set("a", "1")).await.unwrap().unwrap();
    // Another leader comes, and the log's retention deletes the number that the first would use.
    let policy = SnapshotPolicy { min_records: 1, size_divisor: 1_000, max_records: 1 };
    let second = lead_with(&store, 2, policy).await;
    for i in 0..3 {
        second.log.append(set("b", &i.to_string())).await.unwrap().unwrap();
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    let log_store = LogStore::new(Arc::clone(&store) as _);
    let next =
        log_store.list_records_after(0).await.unwrap().into_iter().find(|(n, _)| *n == 3).unwrap();
    log_store.delete(vec![next.1.location]).await;
    tokio::time::advance(Duration::from_secs(40_000)).await;
    let late = first.log.append(set("c", "1")).await;
    assert!(matches!(late, Err(MetaError::Unconfirmed { .. })), "{late:?}");
}

/// After a long silence a record that counts cannot be told from one that does not.
#[tokio::test(start_paused = true)]
async fn what_was_written_before_another_leader_is_not_told_as_without_effect() {
    let store = TestStore::new();
    let first = lead(&store, 1).await;
    tokio::time::advance(Duration::from_secs(40_000)).await;
    store.inject(Fault::HangAfterSuccess);
    let succeed = async {
        tokio::time::sleep(Duration::from_secs(1)).await;
        lead(&store, 2).await
    };
    let (late, _second) = tokio::join!(first.log.append(set("a", "1")), succeed);
    let told = SqlError::from(late.unwrap_err());
    assert_eq!(told.state, SqlState::ADMIN_SHUTDOWN);
    assert_ne!(told.routine, Some(LEADS_NO_LONGER), "{told:?}");
    assert!(reread(&store).await.settings.contains_key("a"));
    assert!(matches!(first.log.append(set("b", "1")).await, Err(MetaError::Deposed { .. })));
}

#[tokio::test(start_paused = true)]
async fn a_damaged_record_is_named_and_never_folded() {
    use object_store::{ObjectStore, ObjectStoreExt, PutPayload, path::Path};
    let store = TestStore::new();
    lead(&store, 1).await;
    let dynamic: Arc<dyn ObjectStore> = Arc::clone(&store) as _;
    let path = Path::from(format!("meta/log/{:020}", 2));
    dynamic.put(&path, PutPayload::from_static(b"\0\0\0\x01 this is not a record")).await.unwrap();
    let error = LogStore::new(dynamic).open().await.unwrap_err();
    assert!(error.to_string().contains(path.as_ref()), "{error}");
}

/// Keeps what it is told.
#[derive(Default)]
struct Kept(parking_lot::Mutex<Vec<(Arc<LogRecord>, Vec<Verdict>)>>);

impl Observer for Kept {
    fn folded(&self, record: &Arc<LogRecord>, verdicts: &[Verdict]) {
        self.0.lock().push((Arc::clone(record), verdicts.to_vec()));
    }
}

#[tokio::test(start_paused = true)]
async fn records_read_back_have_the_verdicts_that_they_had() {
    let store = TestStore::new();
    let log_store = LogStore::new(Arc::clone(&store) as _);
    let kept = Arc::new(Kept::default());
    let options = WriterOptions {
        env: EnvHandle::new(TestEnv::new(1)),
        policy: SnapshotPolicy { min_records: 8, size_divisor: 1_000, max_records: 8 },
        log_retention: Arc::new(|| Duration::from_secs(86_400)),
        object_retention: Arc::new(|| Duration::from_secs(600)),
        observer: Arc::clone(&kept) as _,
        clock: Arc::default(),
    };
    let opened = log_store.open().await.unwrap();
    let lead = LogWriter::lead(
        log_store.clone(),
        opened,
        Arc::default(),
        &|_, _| Some(Vec::new()),
        options,
    );
    let (log, _) = lead.await.unwrap();
    for i in 0..20 {
        let created = Entry::CreateSchema(CreateSchema { name: format!("s{}", i / 2) });
        let is_new = log.append(created).await.unwrap().is_ok();
        assert_eq!(is_new, i % 2 == 0, "the second is void");
    }
    // The snapshots have been taken.
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert!(!log_store.list_snapshots().await.unwrap().is_empty());
    let all = kept.0.lock().clone();
    for (at, (record, _)) in all.iter().enumerate() {
        let read = log_store.replay(record.number, 7).await.unwrap();
        let expected = &all[at..all.len().min(at + 7)];
        let read: Vec<_> = read.into_iter().map(|r| (Arc::new(r.record), r.verdicts)).collect();
        assert_eq!(read, expected);
    }
    let next = all.len() as u64 + 1;
    assert!(log_store.replay(next, 7).await.unwrap().is_empty());
    assert!(matches!(log_store.replay(next + 1, 7).await, Err(MetaError::Gap { .. })));
}
