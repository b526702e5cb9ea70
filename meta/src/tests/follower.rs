//! A log follower has the leader's state, whatever becomes of the stream: from log and bucket alone.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use millrace_common::{EnvHandle, RelationId, SqlError, SqlState};
use millrace_rpc::catalog::{OptionEntry, RelationKind};
use millrace_rpc::log::{
    AlterRelation, CreateRelation, Entry, LogRecord, SetSetting, SourceAdvance, SplitOffset,
    encode_frame,
};
use millrace_rpc::stream::AppliedRecord;
use millrace_storage::object::PutWatch;
use parking_lot::RwLock;
use proptest::prelude::*;
use prost::bytes::Bytes;
use tokio::time::Instant;

use super::fold::{canonical, history, record, run, step};
use super::store::{Fault, TestStore};
use super::{TestEnv, relation, table};
use crate::error::MetaError;
use crate::fold::Verdict;
use crate::follower::{FollowError, LogFollower};
use crate::log::{LogStore, LogWriter, Observer, SnapshotPolicy, WriterOptions, crc};
use crate::state::{FIRST_RELATION_ID, MetaState};

/// Longer than any wait here takes.
const SOON: Duration = Duration::from_secs(300);

fn paused<T>(test: impl Future<Output = T>) -> T {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_all().start_paused(true).build().unwrap();
    runtime.block_on(async { tokio::time::timeout(4 * SOON, test).await.unwrap() })
}

struct Bucket {
    store: Arc<TestStore>,
    log: LogStore,
}

impl Bucket {
    fn new() -> Bucket {
        let store = TestStore::new();
        Bucket { log: LogStore::new(Arc::clone(&store) as _), store }
    }

    async fn put_bytes(&self, number: u64, bytes: &Bytes) {
        self.log.create(number, bytes, &PutWatch::default()).await;
    }

    async fn put(&self, record: &LogRecord) {
        self.put_bytes(record.number, &encode_frame(record, crc)).await;
    }

    async fn follow(&self) -> LogFollower {
        let env = EnvHandle::new(TestEnv::new(1));
        LogFollower::open(Arc::clone(&self.store) as _, env).await.unwrap()
    }

    /// Writes the snapshot of a state, and deletes the records that it covers.
    async fn cover(&self, state: &MetaState) {
        self.log.put_snapshot(state).await.unwrap();
        let covered = (1..=state.number).map(LogStore::record_path).collect();
        assert_eq!(self.log.delete(covered).await, []);
    }
}

/// As the stream brings it; what the fold made of its entries does not matter to a follower.
fn sent(record: &LogRecord) -> AppliedRecord {
    AppliedRecord { record: Arc::new(record.clone()), outcomes: Arc::from([]) }
}

/// The follower's state in the form in which states are compared.
fn seen(follower: &LogFollower) -> MetaState {
    follower.read(canonical)
}

/// What becomes of a record of the stream.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fate {
    Sent,
    Lost,
    Twice,
    /// It comes with a later one, and after it.
    Late,
}

fn fate() -> impl Strategy<Value = Fate> {
    prop_oneof![
        3 => Just(Fate::Sent),
        2 => Just(Fate::Lost),
        1 => Just(Fate::Twice),
        2 => Just(Fate::Late),
    ]
}

/// Hands a record to the follower, or does not.
async fn send(follower: &LogFollower, record: &LogRecord, fate: Fate, late: &mut Vec<LogRecord>) {
    match fate {
        Fate::Lost => {}
        Fate::Late => late.push(record.clone()),
        Fate::Sent | Fate::Twice => {
            let times = if fate == Fate::Twice { 2 } else { 1 };
            let mut message = vec![sent(record); times];
            message.extend(late.drain(..).rev().map(|r| sent(&r)));
            follower.take(&message).await.unwrap();
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// After each record that is waited for, the state is the leader's; a record never takes it back.
    #[test]
    fn a_follower_has_the_leaders_state_after_each_record(
        history in history(),
        fates in prop::collection::vec((fate(), any::<bool>()), 40),
    ) {
        let (records, states) = run(&history);
        paused(async {
            let bucket = Bucket::new();
            let follower = bucket.follow().await;
            let mut late = Vec::new();
            for ((record, state), (fate, is_awaited)) in records.iter().zip(&states[1..]).zip(fates) {
                bucket.put(record).await;
                let before = follower.number();
                send(&follower, record, fate, &mut late).await;
                prop_assert!(follower.number() >= before);
                if matches!(fate, Fate::Sent | Fate::Twice) {
                    prop_assert_eq!(follower.number(), record.number);
                }
                if is_awaited {
                    follower.wait_for(record.number, Instant::now() + SOON).await.unwrap();
                    prop_assert_eq!(seen(&follower), canonical(state));
                }
            }
            prop_assert_eq!(follower.catch_up().await.unwrap(), records.len() as u64);
            prop_assert_eq!(seen(&follower), canonical(states.last().unwrap()));
            Ok(())
        })?;
    }

    /// Records that a snapshot covers are deleted under a follower: it goes on from the snapshot, with or without
    /// the stream.
    #[test]
    fn a_follower_goes_on_from_a_snapshot_when_records_are_deleted(
        history in history(),
        at in any::<prop::sample::Index>(),
        cut in any::<prop::sample::Index>(),
        is_sent in any::<bool>(),
    ) {
        let (records, states) = run(&history);
        let (at, cut) = (at.index(states.len()), cut.index(states.len()));
        paused(async {
            let bucket = Bucket::new();
            for record in &records[..at] {
                bucket.put(record).await;
            }
            let follower = bucket.follow().await;
            prop_assert_eq!(seen(&follower), canonical(&states[at]));
            for record in &records[at..] {
                bucket.put(record).await;
            }
            bucket.cover(&states[cut]).await;
            let last = records.len() as u64;
            match (is_sent, records.last()) {
                (true, Some(record)) => drop(follower.take(&[sent(record)]).await.unwrap()),
                _ => follower.wait_for(last, Instant::now() + SOON).await.unwrap(),
            }
            prop_assert_eq!(seen(&follower), canonical(states.last().unwrap()));
            Ok(())
        })?;
    }
}

fn setting(value: u64) -> Entry {
    let value = Some((value * 1_000).to_string());
    Entry::SetSetting(SetSetting { name: "barrier_interval".to_owned(), value })
}

/// The record of a change, and the state after it.
fn next(state: &mut MetaState, entries: Vec<Entry>) -> LogRecord {
    let record = record(state, entries.clone());
    step(state, entries);
    record
}

#[tokio::test(start_paused = true)]
async fn a_damaged_or_foreign_record_is_an_error_and_changes_nothing() {
    let bucket = Bucket::new();
    let mut state = MetaState::default();
    let first = next(&mut state, vec![setting(1)]);
    bucket.put(&first).await;
    let follower = bucket.follow().await;
    let before = seen(&follower);
    let second = next(&mut state, vec![setting(2)]);

    let foreign = LogRecord { prev_crc: second.prev_crc ^ 1, ..second.clone() };
    let error = follower.take(&[sent(&foreign)]).await.unwrap_err();
    assert!(matches!(error, FollowError::Foreign { number: 2 }), "{error}");
    assert_eq!(SqlError::from(error).state, SqlState::DATA_CORRUPTED);

    let mut damaged = encode_frame(&second, crc).to_vec();
    *damaged.last_mut().unwrap() ^= 1;
    bucket.put_bytes(2, &damaged.into()).await;
    for _ in 0..2 {
        let error = follower.catch_up().await.unwrap_err();
        assert!(matches!(error, FollowError::Log(MetaError::Corrupt { .. })), "{error}");
    }
    let error = follower.wait_for(2, Instant::now() + SOON).await.unwrap_err();
    assert!(matches!(error, FollowError::Log(MetaError::Corrupt { .. })), "{error}");
    assert_eq!(seen(&follower), before);

    // The stream has it whole.
    assert_eq!(follower.take(&[sent(&second)]).await.unwrap(), 2);
    assert_eq!(seen(&follower), canonical(&state));
}

#[tokio::test(start_paused = true)]
async fn a_record_of_another_number_is_no_record() {
    let bucket = Bucket::new();
    let mut state = MetaState::default();
    let first = next(&mut state, vec![setting(1)]);
    let follower = bucket.follow().await;
    bucket.put_bytes(1, &encode_frame(&LogRecord { number: 7, ..first }, crc)).await;
    let error = follower.catch_up().await.unwrap_err();
    assert!(matches!(error, FollowError::Foreign { number: 1 }), "{error}");
}

#[tokio::test(start_paused = true)]
async fn a_wait_ends_with_its_record_or_with_its_deadline() {
    let bucket = Bucket::new();
    let mut state = MetaState::default();
    let records: Vec<LogRecord> = (1..=3).map(|n| next(&mut state, vec![setting(n)])).collect();
    bucket.put(&records[0]).await;
    let follower = bucket.follow().await;

    // It is not there, then it is in the bucket, then the stream brings another.
    let began = Instant::now();
    let error = follower.wait_for(2, began + Duration::from_secs(5)).await.unwrap_err();
    assert!(matches!(error, FollowError::Late { record: 2, at: 1, .. }), "{error}");
    assert!(error.is_transient() && began.elapsed() == Duration::from_secs(5));
    bucket.put(&records[1]).await;
    follower.wait_for(2, Instant::now() + SOON).await.unwrap();
    let waits = follower.wait_for(3, Instant::now() + SOON);
    let message = [sent(&records[2])];
    let (waited, taken) = tokio::join!(waits, follower.take(&message));
    waited.unwrap();
    assert_eq!(taken.unwrap(), 3);

    // What is here already is not looked for, and a follower that is told nothing asks nothing.
    let requests = bucket.store.requests();
    follower.wait_for(3, Instant::now()).await.unwrap();
    assert!(follower.changed_since(3).now_or_never().is_none());
    assert_eq!(follower.changed_since(2).await, 3);
    tokio::time::advance(SOON).await;
    assert_eq!(bucket.store.requests(), requests);
}

#[tokio::test(start_paused = true)]
async fn a_follower_never_writes_and_asks_once_for_those_who_wait() {
    let bucket = Bucket::new();
    let mut state = MetaState::default();
    let follower = bucket.follow().await;
    for n in 1..=100 {
        bucket.put(&next(&mut state, vec![setting(n)])).await;
    }
    let names = bucket.log.list("").await.unwrap().len();
    let requests = bucket.store.requests();
    let waits = (0..50).map(|_| follower.wait_for(100, Instant::now() + SOON));
    futures::future::try_join_all(waits).await.unwrap();
    // The records, and fewer than one look at what is not there for each step of reading ahead.
    let asked = bucket.store.requests() - requests;
    assert!(asked < 200, "{asked} requests");
    assert_eq!(bucket.log.list("").await.unwrap().len(), names);
    assert_eq!(seen(&follower), canonical(&state));
}

#[tokio::test(start_paused = true)]
async fn a_relation_is_told_of_what_concerns_it_and_its_questions_are_answered() {
    let bucket = Bucket::new();
    let follower = bucket.follow().await;
    let mut state = MetaState::default();
    let create = |relation| {
        Entry::CreateRelation(CreateRelation { relation, or_replace: false, process: 0 })
    };
    let source = RelationId(FIRST_RELATION_ID);
    let other = RelationId(FIRST_RELATION_ID + 1);
    let mut of_source = follower.changes(source);
    let mut of_other = follower.changes(other);
    let created = vec![create(relation("s", RelationKind::Source, &[])), create(table("t"))];
    follower.take(&[sent(&next(&mut state, created))]).await.unwrap();
    assert!(of_source.has_changed().unwrap() && of_other.has_changed().unwrap());
    of_source.mark_unchanged();
    of_other.mark_unchanged();

    let offsets = vec![SplitOffset { split: 0, offset: 9 }];
    let advance = SourceAdvance { source: source.0, offsets, ..SourceAdvance::default() };
    let advanced = next(&mut state, vec![Entry::SourceAdvance(advance)]);
    follower.take(&[sent(&advanced)]).await.unwrap();
    assert!(of_source.has_changed().unwrap() && !of_other.has_changed().unwrap());
    assert_eq!(follower.source_offsets(source, follower.head()), [(0, 9)]);
    assert_eq!(follower.source_offsets(source, follower.head().prev()), []);
    of_source.mark_unchanged();

    let options = vec![OptionEntry { name: "rate".to_owned(), value: "7".to_owned() }];
    let altered = AlterRelation { id: other.0, options, ..AlterRelation::default() };
    let altered = next(&mut state, vec![Entry::AlterRelation(altered)]);
    assert_eq!(follower.option(other, "rate"), None);
    follower.take(&[sent(&altered)]).await.unwrap();
    assert!(of_other.has_changed().unwrap() && !of_source.has_changed().unwrap());
    assert_eq!(follower.option(other, "rate").as_deref(), Some("7"));
    assert_eq!(follower.row_count(other), Some(0));
    assert_eq!(follower.row_count(source), None);
}

/// Hands nothing on: the followers read the bucket.
struct Nobody;

impl Observer for Nobody {
    fn folded(&self, _: &Arc<LogRecord>, _: &[Verdict]) {}
}

/// A leader that writes snapshots often, and whose store loses answers; what the newest covers is deleted.
#[tokio::test(start_paused = true)]
async fn a_sleeping_follower_finds_the_head_where_covered_records_are_gone() {
    let bucket = Bucket::new();
    let follower = bucket.follow().await;
    let state = Arc::new(RwLock::new(MetaState::default()));
    let options = WriterOptions {
        env: EnvHandle::new(TestEnv::new(2)),
        policy: SnapshotPolicy { min_records: 1, size_divisor: 1_000, max_records: 2 },
        log_retention: Arc::new(|| Duration::ZERO),
        object_retention: Arc::new(|| Duration::ZERO),
        observer: Arc::new(Nobody),
        clock: Arc::default(),
    };
    let opened = bucket.log.open().await.unwrap();
    let lead = LogWriter::lead(
        bucket.log.clone(),
        opened,
        Arc::clone(&state),
        &|_, _| Some(Vec::new()),
        options,
    );
    let (log, _) = lead.await.unwrap();
    for n in 1..=40 {
        if n % 7 == 0 {
            bucket.store.inject(Fault::LostAnswer);
        }
        log.append(setting(n)).await.unwrap().unwrap();
        // The snapshot is written beside.
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
    }
    let covered = bucket.log.list_snapshots().await.unwrap().iter().map(|(n, _)| *n).max().unwrap();
    let paths = (1..=covered).map(LogStore::record_path).collect();
    assert_eq!(bucket.log.delete(paths).await, []);
    let head = state.read().number;
    follower.wait_for(head, Instant::now() + SOON).await.unwrap();
    assert_eq!(seen(&follower), canonical(&state.read()));
}
