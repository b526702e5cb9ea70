//! The id of a store: which record gives it, and for how long it stays.

use std::sync::Arc;

use millrace_common::EnvHandle;
use millrace_rpc::log::{LogRecord, encode_frame};
use millrace_rpc::store_id::{StoreId, bytes_of};
use object_store::ObjectStoreExt;

use super::TestEnv;
use super::fold::record;
use super::store::TestStore;
use crate::fold::apply;
use crate::follower::LogFollower;
use crate::log::{LogStore, crc, decode_record};
use crate::meta::Meta;
use crate::options::MetaOptions;
use crate::state::MetaState;

async fn lead(store: &Arc<TestStore>, seed: u64) -> Arc<Meta> {
    let env = EnvHandle::new(TestEnv::new(seed));
    let options = MetaOptions { env, ..MetaOptions::new(Arc::clone(store) as _) };
    Meta::open(options).await.unwrap()
}

/// The id that a record gives.
async fn given(store: &Arc<TestStore>, number: u64) -> Option<StoreId> {
    let bytes = LogStore::new(Arc::clone(store) as _).read(number).await.unwrap().unwrap();
    StoreId::from_bytes(&decode_record(number, &bytes).unwrap().store_id)
}

#[tokio::test(start_paused = true)]
async fn the_first_record_gives_a_store_its_id_and_no_other_does() {
    let store = TestStore::new();
    let first = lead(&store, 1).await;
    let id = first.store_id();
    assert!(id.is_some());
    assert_eq!(given(&store, 1).await, id);
    first.set_setting("barrier_interval", Some("2s")).await.unwrap();
    let second = lead(&store, 2).await;
    assert_eq!(second.store_id(), id);
    for number in 2..=second.record() {
        assert_eq!(given(&store, number).await, None, "record {number}");
    }
    assert_ne!(lead(&TestStore::new(), 3).await.store_id(), id, "of another store");
}

#[tokio::test(start_paused = true)]
async fn a_log_without_an_id_is_given_one_once_by_the_next_leader() {
    let store = TestStore::new();
    // As builds wrote it that know of no ids.
    let old = LogRecord { number: 1, term: 1, leader: 9, epoch: 300, ..LogRecord::default() };
    let bytes = encode_frame(&old, crc);
    store.put(&LogStore::record_path(1), bytes.into()).await.unwrap();
    let follower = LogFollower::open(Arc::clone(&store) as _, EnvHandle::default()).await.unwrap();
    assert_eq!(follower.store_id(), None);

    let first = lead(&store, 1).await;
    let id = first.store_id();
    assert!(id.is_some());
    assert_eq!((first.term(), given(&store, 2).await), (2, id));
    follower.catch_up().await.unwrap();
    assert_eq!(follower.store_id(), id);
    let second = lead(&store, 2).await;
    assert_eq!((second.term(), second.store_id()), (3, id));
    assert_eq!(given(&store, 3).await, None);
}

#[test]
fn an_id_stays_until_a_leader_gives_another_one() {
    let mut state = MetaState::default();
    let give = |state: &mut MetaState, id: Option<StoreId>, term: u64| {
        let record = LogRecord { term, store_id: bytes_of(id), ..record(state, Vec::new()) };
        apply(state, &record, 1);
        state.store_id
    };
    let (one, other) = (Some(StoreId::new(1, 2)), Some(StoreId::new(3, 4)));
    assert_eq!(give(&mut state, one, 2), one);
    assert_eq!(give(&mut state, None, 2), one);
    assert_eq!(give(&mut state, other, 1), one, "its writer leads no longer");
    assert_eq!(state.for_snapshot().store_id, one);
    assert_eq!(MetaState::from_snapshot(state.to_snapshot()).store_id, one);
    // After a snapshot of a build that knows of none, a leader gives another one; who has read on from before the
    // snapshot comes to the same.
    assert_eq!(give(&mut state, other, 3), other);
}
