//! Who takes the lead, after whom, and what it is told of those before.

use std::sync::Arc;
use std::time::Duration;

use futures::{FutureExt, TryStreamExt};
use millrace_common::{EnvHandle, SqlError, SqlState};
use millrace_rpc::log::{FORMAT_VERSION, ProcessRole};
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};
use parking_lot::Mutex;

use super::TestEnv;
use super::store::TestStore;
use crate::follower::LogFollower;
use crate::log::LogStore;
use crate::meta::{Meta, is_overtaken};
use crate::options::MetaOptions;

fn options(store: &Arc<TestStore>, seed: u64) -> MetaOptions {
    MetaOptions {
        env: EnvHandle::new(TestEnv::new(seed)),
        ..MetaOptions::new(Arc::clone(store) as _)
    }
}

/// Of a process of a cluster.
fn meta_options(store: &Arc<TestStore>, seed: u64) -> MetaOptions {
    MetaOptions {
        alone: false,
        roles: vec![ProcessRole::Meta],
        address: format!("m:{seed}"),
        ..options(store, seed)
    }
}

async fn objects(store: &Arc<TestStore>) -> Vec<(String, Vec<u8>)> {
    let listed: Vec<_> = store.list(None).try_collect().await.unwrap();
    let mut found = Vec::new();
    for object in listed {
        let bytes = store.get(&object.location).await.unwrap().bytes().await.unwrap();
        found.push((object.location.to_string(), bytes.to_vec()));
    }
    found.sort();
    found
}

#[tokio::test(start_paused = true)]
async fn a_claim_is_made_only_after_the_record_that_it_was_decided_on() {
    let store = TestStore::new();
    let first = Meta::open(meta_options(&store, 1)).await.unwrap();
    let seen = first.record();
    first.set_setting("barrier_interval", Some("2s")).await.unwrap();
    let late = MetaOptions { only_after: Some(seen), ..meta_options(&store, 2) };
    let error = Meta::open(late).await.map(drop).unwrap_err();
    assert!(is_overtaken(&error), "{error:?}");
    assert_eq!(first.record(), seen + 1, "nothing was written");
    first.set_setting("barrier_interval", Some("3s")).await.unwrap();

    let timely = MetaOptions { only_after: Some(first.record()), ..meta_options(&store, 3) };
    let second = Meta::open(timely).await.unwrap();
    assert_eq!(second.term(), first.term() + 1);
    let error = first.set_setting("barrier_interval", Some("4s")).await.unwrap_err();
    assert_eq!(error.state, SqlState::ADMIN_SHUTDOWN, "{error:?}");
}

#[tokio::test(start_paused = true)]
async fn a_leader_is_told_of_those_that_have_not_resigned() {
    let store = TestStore::new();
    let first = Meta::open(meta_options(&store, 1)).await.unwrap();
    assert_eq!(first.predecessors(), [0; 0], "there was none");
    let second = Meta::open(meta_options(&store, 2)).await.unwrap();
    assert_eq!(second.predecessors(), [first.nonce()], "it may still answer reads");
    second.resign().await.unwrap();
    let third = Meta::open(meta_options(&store, 3)).await.unwrap();
    assert_eq!(third.predecessors(), [0; 0], "it has said that it answers none");
    let alone = Meta::open(MetaOptions { nonce: Some(7), ..options(&store, 4) }).await.unwrap();
    assert_eq!((alone.predecessors(), alone.nonce()), (&[third.nonce()][..], 7));
}

#[tokio::test(start_paused = true)]
async fn who_has_resigned_is_fenced_and_nobody_leads() {
    let store = TestStore::new();
    let first = Meta::open(meta_options(&store, 1)).await.unwrap();
    first.resign().await.unwrap();
    let follower = LogFollower::open(Arc::clone(&store) as _, EnvHandle::default()).await.unwrap();
    follower.read(|state| {
        assert!(state.processes.live().is_empty());
        assert!(state.processes.is_fenced(first.incarnation()));
        assert!(state.processes.is_fenced_nonce(first.nonce()), "a late copy brings it not back");
    });
}

#[tokio::test(start_paused = true)]
async fn who_may_not_claim_the_lead_changes_nothing() {
    let store = TestStore::new();
    let first = Meta::open(options(&store, 1)).await.unwrap();
    // The probe of the first one is deleted in the background.
    tokio::time::sleep(Duration::from_secs(1)).await;
    let before = objects(&store).await;
    let asked = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&asked);
    let refused = MetaOptions {
        may_claim: Some(Box::new(move |state| {
            *seen.lock() = state.processes.live().values().map(|p| p.registration.nonce).collect();
            async { Err(SqlError::new(SqlState::OBJECT_IN_USE, "it is there")) }.boxed()
        })),
        ..options(&store, 2)
    };
    let error = Meta::open(refused).await.map(drop).unwrap_err();
    assert_eq!(error.state, SqlState::OBJECT_IN_USE);
    assert_eq!(*asked.lock(), [first.nonce()]);
    assert!(objects(&store).await == before, "something was written");
    first.set_setting("barrier_interval", Some("2s")).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn nobody_claims_the_lead_from_one_that_it_has_not_asked() {
    let store = TestStore::new();
    let first = Meta::open(options(&store, 1)).await.unwrap();
    let other = Arc::clone(&store);
    // While the first one is being asked, another one takes over from it.
    let late = MetaOptions {
        may_claim: Some(Box::new(move |_| {
            async move {
                drop(Meta::open(options(&other, 2)).await?);
                Ok(())
            }
            .boxed()
        })),
        ..options(&store, 3)
    };
    let error = Meta::open(late).await.map(drop).unwrap_err();
    assert!(is_overtaken(&error), "{error:?}");
    // Records that change no leader do not matter.
    let third = Meta::open(options(&store, 4)).await.unwrap();
    let leading = Arc::clone(&third);
    let timely = MetaOptions {
        may_claim: Some(Box::new(move |_| {
            async move { leading.set_setting("barrier_interval", Some("2s")).await }.boxed()
        })),
        ..options(&store, 5)
    };
    assert_eq!(Meta::open(timely).await.unwrap().predecessors(), [third.nonce()]);
    drop(first);
}

/// The head of a log that a build of the future has written to.
async fn demand_newer_build(store: &Arc<TestStore>, path: &str) {
    let path = Path::from(path);
    let mut bytes = store.get(&path).await.unwrap().bytes().await.unwrap().to_vec();
    bytes[..4].copy_from_slice(&(FORMAT_VERSION + 1).to_be_bytes());
    store.put(&path, bytes.into()).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_log_of_a_newer_build_is_refused_and_stays_as_it_is() {
    let store = TestStore::new();
    let first = Meta::open(options(&store, 1)).await.unwrap();
    first.set_setting("barrier_interval", Some("2s")).await.unwrap();
    let head = LogStore::record_path(first.record()).to_string();
    drop(first);
    tokio::time::sleep(Duration::from_secs(1)).await;
    demand_newer_build(&store, &head).await;
    let before = objects(&store).await;
    let opened = Meta::open(options(&store, 2)).await.map(drop).unwrap_err();
    let followed = LogFollower::open(Arc::clone(&store) as _, EnvHandle::default()).await;
    for error in [opened, followed.map(drop).unwrap_err().into()] {
        assert_eq!(error.state, SqlState::FEATURE_NOT_SUPPORTED);
        let needed = format!("\"{head}\" needs log format {}", FORMAT_VERSION + 1);
        assert!(error.message.contains(&needed), "{}", error.message);
        let known = format!("reads log formats up to {FORMAT_VERSION}");
        assert!(error.message.contains(&known), "{}", error.message);
    }
    assert!(objects(&store).await == before, "something was written");
}
