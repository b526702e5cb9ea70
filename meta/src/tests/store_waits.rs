//! Compute processes that the object store does not answer: their jobs go to another one only where it can do better.

use std::sync::Arc;
use std::time::Duration;

use millrace_common::EnvHandle;
use millrace_rpc::control::{Heartbeat, MetaControl};
use millrace_rpc::log::ProcessRole;
use millrace_storage::object::{MeterOptions, Metered};
use millrace_storage::sim::{Faults, Profile, SimStore};
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use super::TestEnv;
use super::cluster::{Connections, process, registered};
use crate::meta::Meta;
use crate::options::MetaOptions;

/// A leader of processes that run no jobs, on a store as a server wraps it.
pub async fn leader(sim: &SimStore) -> Arc<Meta> {
    let store = Metered::wrap(Arc::new(sim.clone()), MeterOptions::default());
    let options = MetaOptions {
        env: EnvHandle::new(TestEnv::new(1)),
        alone: false,
        roles: vec![ProcessRole::Meta],
        address: "m:1".into(),
        ..MetaOptions::new(store as _)
    };
    let meta = Meta::open(options).await.unwrap();
    let connect = Connections { worker: Arc::default(), fenced: Arc::default() };
    meta.start_cluster(Arc::new(connect)).await.unwrap();
    meta
}

/// From now on this process tells each second for how long the object store has not answered it.
fn tells(
    meta: &Arc<Meta>,
    incarnation: u64,
    wait: impl Fn() -> Duration + Send + 'static,
) -> AbortOnDropHandle<()> {
    let meta = Arc::clone(meta);
    AbortOnDropHandle::new(tokio::spawn(async move {
        loop {
            let store_wait_ms = wait().as_millis() as u64;
            let beat = Heartbeat { incarnation, store_wait_ms, ..Heartbeat::default() };
            if meta.beat(beat).await.is_err() {
                break;
            }
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    }))
}

pub fn is_live(meta: &Meta, incarnation: u64) -> bool {
    meta.state_for_tests().processes.is_live(incarnation)
}

/// It would go on to wait for what it cannot have.
#[tokio::test(start_paused = true)]
async fn a_process_that_the_store_does_not_answer_is_fenced_where_it_answers_another() {
    let cases = [([13_000, 0], false), ([11_000, 0], true), ([13_000, 4_000], true)];
    for (store_waits, stays) in cases {
        let meta = leader(&SimStore::in_memory(Profile::INSTANT, 1)).await;
        let first = registered(&meta, process(1, ProcessRole::Compute, "a:1")).await;
        let second = registered(&meta, process(2, ProcessRole::Compute, "b:1")).await;
        // What another role says is no reason to move jobs to it.
        let frontend = registered(&meta, process(3, ProcessRole::Frontend, "f:1")).await;
        let _beats = [(first, store_waits[0]), (second, store_waits[1]), (frontend, 0)].map(
            |(incarnation, wait)| tells(&meta, incarnation, move || Duration::from_millis(wait)),
        );
        tokio::time::sleep(Duration::from_secs(15)).await;
        assert_eq!(
            (is_live(&meta, first), is_live(&meta, second)),
            (stays, true),
            "{store_waits:?}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn a_process_that_alone_is_not_answered_from_now_on_is_fenced_within_8_s() {
    let meta = leader(&SimStore::in_memory(Profile::INSTANT, 1)).await;
    let first = registered(&meta, process(1, ProcessRole::Compute, "a:1")).await;
    let second = registered(&meta, process(2, ProcessRole::Compute, "b:1")).await;
    let began = Instant::now();
    let _beats =
        [tells(&meta, first, move || began.elapsed()), tells(&meta, second, || Duration::ZERO)];
    tokio::time::sleep(Duration::from_millis(4_900)).await;
    assert!(is_live(&meta, first), "it may be slow");
    tokio::time::sleep(Duration::from_millis(3_100)).await;
    assert_eq!((is_live(&meta, first), is_live(&meta, second)), (false, true));
}

/// The leader learns at once that the store answers again, who has work at the same time or later, and who has none has
/// not noticed anything. The first case is that of a leader which alone is not answered.
#[tokio::test(start_paused = true)]
async fn an_outage_of_the_store_for_all_fences_nobody() {
    let cases = [20, 5, 8].map(Duration::from_secs).into_iter();
    let cases = cases.flat_map(|outage| [0, 6].map(|late| (outage, Duration::from_secs(late))));
    for (outage, learns_after) in cases {
        let sim = SimStore::in_memory(Profile::INSTANT, 1);
        let meta = leader(&sim).await;
        let busy = registered(&meta, process(1, ProcessRole::Compute, "a:1")).await;
        let idle = registered(&meta, process(2, ProcessRole::Compute, "b:1")).await;
        sim.set_faults(Faults { hang: 1.0, ..Faults::default() });
        let began = Instant::now();
        let wait = move || match began.elapsed() {
            waits if waits < outage + learns_after => waits,
            _ => Duration::ZERO,
        };
        let _beats = [tells(&meta, busy, wait), tells(&meta, idle, || Duration::ZERO)];
        tokio::time::sleep(outage).await;
        sim.set_faults(Faults::default());
        tokio::time::sleep(Duration::from_secs(40)).await;
        let live = (is_live(&meta, busy), is_live(&meta, idle));
        assert_eq!(live, (true, true), "{outage:?}, {learns_after:?}");
    }
}
