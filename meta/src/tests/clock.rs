//! A process whose clock is wrong does not lead, says so, and leads when it is right.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use millrace_common::{Env, EnvHandle, SqlError, SqlState, SystemEnv};
use object_store::ObjectStore;
use object_store::memory::InMemory;

use super::fake::{Fake, NoCompactor};
use super::table;
use crate::error::is_skewed;
use crate::log::LogStore;
use crate::meta::{CreateOptions, Meta};
use crate::options::MetaOptions;

/// The machine's clock, as the store has it, set forward by so many milliseconds.
#[derive(Default)]
pub struct SetForward(pub AtomicI64);

impl Env for SetForward {
    fn now_ms(&self) -> u64 {
        SystemEnv.now_ms().saturating_add_signed(self.0.load(Ordering::Relaxed))
    }

    fn since_boot(&self) -> Duration {
        SystemEnv.since_boot()
    }

    fn random(&self) -> u64 {
        SystemEnv.random()
    }
}

fn options(store: &Arc<InMemory>, clock: &Arc<SetForward>) -> MetaOptions {
    MetaOptions {
        env: EnvHandle::from(Arc::clone(clock) as Arc<dyn Env>),
        max_clock_skew: Some(Duration::from_secs(2)),
        ..MetaOptions::new(Arc::clone(store) as Arc<dyn ObjectStore>)
    }
}

async fn until(what: &str, is_so: impl Fn() -> bool) {
    for _ in 0..600 {
        if is_so() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    panic!("{what}");
}

#[tokio::test]
async fn no_lead_is_taken_with_a_wrong_clock() {
    let (store, clock) = (Arc::new(InMemory::new()), Arc::<SetForward>::default());
    for (ms, way) in [(9_000, "ahead of"), (-9_000, "behind")] {
        clock.0.store(ms, Ordering::Relaxed);
        let error = Meta::open(options(&store, &clock)).await.map(drop).unwrap_err();
        assert!(is_skewed(&error), "{error:?}");
        assert!(error.message.contains(way), "{}", error.message);
        let log = LogStore::new(Arc::clone(&store) as _);
        assert_eq!(log.open().await.unwrap().state.number, 0, "nothing was written");
    }
    // Within what is allowed.
    clock.0.store(1_500, Ordering::Relaxed);
    assert!(Meta::open(options(&store, &clock)).await.is_ok());
    // Whoever does not ask takes the clock as it is.
    clock.0.store(9_000, Ordering::Relaxed);
    let unchecked = MetaOptions { max_clock_skew: None, ..options(&store, &clock) };
    assert!(Meta::open(unchecked).await.is_ok());
}

#[tokio::test]
async fn a_leader_whose_clock_was_set_refuses_until_it_is_right() {
    let (store, clock) = (Arc::new(InMemory::new()), Arc::<SetForward>::default());
    let meta = Meta::open(options(&store, &clock)).await.unwrap();
    let fake = Arc::<Fake>::default();
    fake.attach(&meta);
    meta.start(Arc::clone(&fake) as _, Arc::new(NoCompactor)).await.unwrap();
    let created = CreateOptions { table_count: 1, ..CreateOptions::default() };
    let t = meta.create_relation(table("t"), created).await.unwrap();
    meta.read_epoch(&[t], None, true).await.unwrap();

    clock.0.store(-60_000, Ordering::Relaxed);
    until("it does not notice", || meta.clock_skew().is_some()).await;
    let record = meta.record();
    let refused = |outcome: Result<(), SqlError>| {
        let error = outcome.expect_err("it does not lead");
        assert_eq!(error.state, SqlState::SYSTEM_ERROR, "{error:?}");
        assert!(error.message.contains("behind that of the object store"), "{}", error.message);
        assert!(error.hint.is_some());
    };
    refused(meta.create_schema("s", false).await);
    refused(meta.read_epoch(&[t], None, true).await.map(drop));
    assert_eq!(meta.record(), record, "nothing was written");
    let any = meta.read_epoch(&[t], None, false).await;
    assert!(any.is_ok(), "what is committed is readable: {any:?}");

    clock.0.store(0, Ordering::Relaxed);
    until("it does not come back", || meta.clock_skew().is_none()).await;
    meta.create_schema("s", false).await.unwrap();
    meta.read_epoch(&[t], None, true).await.unwrap();
}
