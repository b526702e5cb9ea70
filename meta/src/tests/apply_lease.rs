//! Processes that tell of themselves and apply no records: what is dropped is kept for them only so long.

use std::sync::Arc;
use std::time::Duration;

use millrace_rpc::control::{Heartbeat, MetaControl};
use millrace_rpc::log::ProcessRole;
use millrace_storage::sim::{Profile, SimStore};
use tokio_util::task::AbortOnDropHandle;

use super::cluster::{process, registered};
use super::store_waits::{is_live, leader};
use crate::apply_lease::APPLY_LEASE;
use crate::gc::GcOptions;
use crate::meta::Meta;

/// From now on this process tells each second how far it has applied the log, whose last record it is given.
fn applies(
    meta: &Arc<Meta>,
    incarnation: u64,
    applied: impl Fn(u64) -> u64 + Send + 'static,
) -> AbortOnDropHandle<()> {
    let meta = Arc::clone(meta);
    AbortOnDropHandle::new(tokio::spawn(async move {
        loop {
            let applied = applied(meta.record());
            let beat = Heartbeat { incarnation, applied, ..Heartbeat::default() };
            if meta.beat(beat).await.is_err() {
                break;
            }
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    }))
}

/// A leader of two frontends, and an object that is garbage.
struct Test {
    meta: Arc<Meta>,
    frontends: [u64; 2],
    garbage: String,
}

impl Test {
    async fn new() -> Test {
        let meta = leader(&SimStore::in_memory(Profile::INSTANT, 1)).await;
        meta.set_setting("object_retention", Some("1s")).await.unwrap();
        let first = registered(&meta, process(1, ProcessRole::Frontend, "f:1")).await;
        let second = registered(&meta, process(2, ProcessRole::Frontend, "g:1")).await;
        let garbage = format!("data/{second}/1.seg");
        let given_up = vec![garbage.clone()];
        let beat = Heartbeat { incarnation: second, given_up, ..Heartbeat::default() };
        meta.beat(beat).await.unwrap();
        Test { meta, frontends: [first, second], garbage }
    }

    fn are_live(&self) -> [bool; 2] {
        self.frontends.map(|incarnation| is_live(&self.meta, incarnation))
    }

    fn is_collected(&self) -> bool {
        let state = self.meta.state_for_tests();
        assert_ne!(
            state.objects.is_garbage(&self.garbage),
            state.objects.is_deleted(&self.garbage)
        );
        state.objects.is_deleted(&self.garbage)
    }
}

#[tokio::test(start_paused = true)]
async fn collection_waits_no_longer_than_the_lease_for_a_process_that_applies_nothing() {
    let test = Test::new().await;
    let [first, second] = test.frontends;
    let _beats = [applies(&test.meta, first, |_| 0), applies(&test.meta, second, |last| last)];
    tokio::time::sleep(APPLY_LEASE - Duration::from_secs(1)).await;
    assert_eq!((test.are_live(), test.is_collected()), ([true, true], false));
    // The lease begins with the first round of the collection.
    tokio::time::sleep(GcOptions::default().period * 3).await;
    assert_eq!(test.are_live(), [false, true]);
    tokio::time::sleep(GcOptions::default().period * 3).await;
    assert!(test.is_collected());
}

#[tokio::test(start_paused = true)]
async fn nobody_is_fenced_where_all_apply_what_they_get() {
    // Nothing at all, and everything.
    for gets in [0, u64::MAX] {
        let test = Test::new().await;
        let _beats = test.frontends.map(|id| applies(&test.meta, id, move |last| last.min(gets)));
        tokio::time::sleep(APPLY_LEASE * 3).await;
        assert_eq!(test.are_live(), [true, true], "{gets}");
        assert_eq!(test.is_collected(), gets > 0, "{gets}");
    }
}

/// Without anything to collect nobody waits for it.
#[tokio::test(start_paused = true)]
async fn a_process_that_nothing_is_kept_for_may_lag() {
    let meta = leader(&SimStore::in_memory(Profile::INSTANT, 1)).await;
    let first = registered(&meta, process(1, ProcessRole::Frontend, "f:1")).await;
    let second = registered(&meta, process(2, ProcessRole::Frontend, "g:1")).await;
    let _beats = [applies(&meta, first, |_| 0), applies(&meta, second, |last| last)];
    tokio::time::sleep(APPLY_LEASE * 3).await;
    assert_eq!([first, second].map(|id| is_live(&meta, id)), [true, true]);
}
