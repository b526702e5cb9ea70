//! Whether the object store answers a process that jobs run on, or that compacts. The leader is told: it may have these go on
//! elsewhere.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use millrace_meta::LogFollower;
use millrace_meta::log::LogStore;
use millrace_storage::object::Metered;
use object_store::ObjectStore;
use tokio_util::task::AbortOnDropHandle;

/// Between two looks at the requests of the process.
const LOOK: Duration = Duration::from_millis(500);
/// Where the store has answered nothing for so long it is asked something small at each look: whoever has asked may have
/// given up, or ask for much. The leader takes it that a process which is answered has waited for little longer
/// (`store_waits` in millrace-meta).
const ASK_AFTER: Duration = Duration::from_secs(1);
/// How long the answer to that is waited for. Meanwhile the store is asked anew: what was asked in an outage may never be
/// answered, and the leader is to know soon that it is over.
const ANSWER: Duration = Duration::from_secs(4);

/// See the module. A process that asks the store nothing does not ask it for this.
pub struct StoreWatch {
    /// `None`: the process has not opened the store itself.
    requests: Option<Arc<Metered>>,
    _asking: Option<AbortOnDropHandle<()>>,
}

impl StoreWatch {
    pub fn start(requests: Option<Arc<Metered>>, log: &Arc<LogFollower>) -> StoreWatch {
        let asking = requests.clone().map(|requests| tokio::spawn(ask(requests, Arc::clone(log))));
        StoreWatch { requests, _asking: asking.map(AbortOnDropHandle::new) }
    }

    /// For how long the store has answered nothing; zero: it does, or was asked nothing.
    pub fn wait(&self) -> Duration {
        self.requests.as_ref().map_or(Duration::ZERO, |requests| requests.unanswered())
    }
}

async fn ask(requests: Arc<Metered>, log: Arc<LogFollower>) {
    let store = LogStore::new(Arc::clone(&requests) as Arc<dyn ObjectStore>);
    let mut asked = FuturesUnordered::new();
    loop {
        if requests.unanswered() >= ASK_AFTER {
            asked.push(tokio::time::timeout(ANSWER, store.answers(log.number())));
        }
        let answered = async {
            // The answer is noted where requests are counted.
            while let Some(answer) = asked.next().await {
                if matches!(answer, Ok(true)) {
                    return;
                }
            }
            std::future::pending().await
        };
        if tokio::time::timeout(LOOK, answered).await.is_ok() {
            // What the others wait for is known.
            asked.clear();
            tokio::time::sleep(LOOK).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use millrace_common::{Env, EnvHandle, SqlError};
    use millrace_meta::{Connect, Meta, MetaOptions};
    use millrace_rpc::control::{Heartbeat, MetaControl};
    use millrace_rpc::log::{ProcessRole, RegisterProcess};
    use millrace_rpc::services::{CompactorService, ComputeService};
    use millrace_storage::object::MeterOptions;
    use millrace_storage::sim::{Faults, Profile, SimStore};
    use object_store::ObjectStoreExt;
    use object_store::memory::InMemory;
    use object_store::path::Path;
    use tokio::time::Instant;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);
    /// For how long a process may go alone without an answer of the store (docs/design.md §10), ...
    const CUT_OFF: Duration = Duration::from_secs(5);
    /// ... and when it is fenced at the latest: it asks the store, tells the leader and is looked at once a second each.
    const FENCED_BY: Duration = Duration::from_secs(9);

    #[tokio::test(start_paused = true)]
    async fn a_process_tells_for_how_long_the_store_has_not_answered_it() {
        let sim = SimStore::in_memory(Profile::INSTANT, 1);
        let requests = Metered::wrap(Arc::new(sim.clone()), MeterOptions::default());
        let store = Arc::clone(&requests) as Arc<dyn ObjectStore>;
        drop(Meta::open(MetaOptions::new(Arc::clone(&store))).await.unwrap());
        let log = LogFollower::open(store, EnvHandle::default()).await.unwrap();
        let watch = StoreWatch::start(Some(Arc::clone(&requests)), &Arc::new(log));
        // What has opened the log is done, also what was asked and not waited for.
        tokio::time::sleep(ASK_AFTER + LOOK * 2).await;
        let before = requests.stats();
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert_eq!(requests.stats(), before, "nobody asks it for this");
        assert_eq!(watch.wait(), Duration::ZERO);

        sim.set_faults(Faults { hang: 1.0, ..Faults::default() });
        let path = Path::from("nothing");
        let read = requests.head(&path);
        assert!(tokio::time::timeout(Duration::from_secs(3), read).await.is_err());
        tokio::time::sleep(Duration::from_secs(10)).await;
        assert!(watch.wait() >= Duration::from_secs(13), "though nobody waits any more");
        sim.set_faults(Faults::default());
        tokio::time::sleep(LOOK + ANSWER * 2).await;
        assert_eq!(watch.wait(), Duration::ZERO, "it learns of that by itself");
    }

    /// Clocks that go with tokio's, which is paused.
    struct PausedEnv(Instant);

    impl Env for PausedEnv {
        fn now_ms(&self) -> u64 {
            1_700_000_000_000 + self.0.elapsed().as_millis() as u64
        }

        fn since_boot(&self) -> Duration {
            self.0.elapsed()
        }

        fn random(&self) -> u64 {
            EnvHandle::default().random()
        }
    }

    /// No jobs run, so no process is called.
    struct NoCalls;

    impl Connect for NoCalls {
        fn compute(&self, _: &str, _: u64) -> Result<Arc<dyn ComputeService>, SqlError> {
            Err(SqlError::internal("no process is called"))
        }

        fn compactor(&self, _: &str, _: u64) -> Result<Arc<dyn CompactorService>, SqlError> {
            Err(SqlError::internal("no process is called"))
        }

        fn fenced(&self, _: u64) {}
    }

    /// The way of one process to the bucket.
    struct Way {
        sim: SimStore,
        requests: Arc<Metered>,
    }

    impl Way {
        fn to(bucket: &Arc<dyn ObjectStore>) -> Way {
            let sim = SimStore::new(Arc::clone(bucket), Profile::INSTANT, 1);
            let requests = Metered::wrap(Arc::new(sim.clone()), MeterOptions::default());
            Way { sim, requests }
        }

        fn store(&self) -> Arc<dyn ObjectStore> {
            Arc::clone(&self.requests) as Arc<dyn ObjectStore>
        }

        /// What is asked from now on is never answered, or is again.
        fn set_hangs(&self, hangs: bool) {
            let hang = if hangs { 1.0 } else { 0.0 };
            self.sim.set_faults(Faults { hang, ..Faults::default() });
        }
    }

    async fn leader(way: &Way) -> Arc<Meta> {
        let options = MetaOptions {
            env: EnvHandle::new(PausedEnv(Instant::now())),
            alone: false,
            roles: vec![ProcessRole::Meta],
            address: "m:1".to_owned(),
            ..MetaOptions::new(way.store())
        };
        let meta = Meta::open(options).await.unwrap();
        meta.start_cluster(Arc::new(NoCalls)).await.unwrap();
        meta
    }

    /// A compute process, as far as the object store and the leader notice.
    struct Compute {
        way: Way,
        incarnation: u64,
        _tells: AbortOnDropHandle<()>,
        /// `None`: it has no work.
        reads: Option<AbortOnDropHandle<()>>,
    }

    impl Compute {
        async fn start(meta: &Arc<Meta>, bucket: &Arc<dyn ObjectStore>, nonce: u64) -> Compute {
            let way = Way::to(bucket);
            let log = LogFollower::open(way.store(), EnvHandle::default()).await.unwrap();
            let watch = StoreWatch::start(Some(Arc::clone(&way.requests)), &Arc::new(log));
            let (roles, address) = (vec![ProcessRole::Compute as i32], format!("c{nonce}:1"));
            let process = RegisterProcess { nonce, roles, address };
            let incarnation = meta.register_process(process).await.unwrap();
            let tells = tokio::spawn(tells(Arc::clone(meta), incarnation, watch));
            let reads = tokio::spawn(reads(Arc::clone(&way.requests)));
            let [tells, reads] = [tells, reads].map(AbortOnDropHandle::new);
            Compute { way, incarnation, _tells: tells, reads: Some(reads) }
        }
    }

    /// Until the process is fenced.
    async fn tells(meta: Arc<Meta>, incarnation: u64, watch: StoreWatch) {
        loop {
            let store_wait_ms = watch.wait().as_millis() as u64;
            let heartbeat = Heartbeat { incarnation, store_wait_ms, ..Heartbeat::default() };
            if meta.beat(heartbeat).await.is_err() {
                return;
            }
            tokio::time::sleep(SECOND).await;
        }
    }

    /// Asks for something each second, and does not wait long for it.
    async fn reads(requests: Arc<Metered>) {
        let path = Path::from("nothing");
        loop {
            let _ = tokio::time::timeout(SECOND, requests.head(&path)).await;
            tokio::time::sleep(SECOND).await;
        }
    }

    /// When each of them is fenced, if that is within this time.
    async fn fenced(
        meta: &Meta,
        computes: &[Compute; 2],
        limit: Duration,
    ) -> [Option<Duration>; 2] {
        let began = Instant::now();
        let mut fenced = [None; 2];
        while began.elapsed() < limit {
            for (at, compute) in fenced.iter_mut().zip(computes) {
                let id = compute.incarnation;
                if at.is_none() && !meta.read_state(|state| state.processes.is_live(id)) {
                    *at = Some(began.elapsed());
                }
            }
            tokio::time::sleep(SECOND / 10).await;
        }
        fenced
    }

    /// The store hangs for the leader or not, and for each of two processes.
    #[tokio::test(start_paused = true)]
    async fn a_process_for_which_the_store_hangs_is_fenced_where_leader_and_another_are_answered() {
        let cases = [
            ([false, true, false], true),
            ([false, true, true], false),
            ([true, true, false], false),
            ([true, true, true], false),
        ];
        for (hang, is_fenced) in cases {
            let bucket: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
            let way = Way::to(&bucket);
            let meta = leader(&way).await;
            let first = Compute::start(&meta, &bucket, 1).await;
            let computes = [first, Compute::start(&meta, &bucket, 2).await];
            assert_eq!(fenced(&meta, &computes, 20 * SECOND).await, [None; 2], "all is well");
            let ways = [&way, &computes[0].way, &computes[1].way];
            ways.iter().zip(hang).for_each(|(way, hangs)| way.set_hangs(hangs));
            let told = fenced(&meta, &computes, 60 * SECOND).await;
            assert_eq!(told.map(|at| at.is_some()), [is_fenced, false], "{hang:?}: {told:?}");
            let in_time = |at: Duration| at > CUT_OFF && at < FENCED_BY;
            assert!(told[0].is_none_or(in_time), "{told:?}");
            // Who learns first that the store answers again is no reason to fence another one.
            ways.iter().for_each(|way| way.set_hangs(false));
            let told = fenced(&meta, &computes, 60 * SECOND).await;
            assert_eq!(told.map(|at| at.is_some()), [is_fenced, false], "{hang:?}: afterwards");
            meta.shutdown().await;
        }
    }

    /// Leader and processes notice at different times that it begins and ends, and who has no work does not notice it.
    #[tokio::test(start_paused = true)]
    async fn an_outage_for_all_fences_nobody_however_long_it_is() {
        let bucket: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let way = Way::to(&bucket);
        let meta = leader(&way).await;
        let first = Compute::start(&meta, &bucket, 1).await;
        let mut computes = [first, Compute::start(&meta, &bucket, 2).await];
        for has_work in [true, false] {
            if !has_work {
                computes[1].reads = None;
            }
            for outage_ms in (500..12_000).step_by(500) {
                let ways = [&way, &computes[0].way, &computes[1].way];
                ways.iter().for_each(|way| way.set_hangs(true));
                tokio::time::sleep(Duration::from_millis(outage_ms)).await;
                ways.iter().for_each(|way| way.set_hangs(false));
                // Not a number of whole seconds: the next one begins at another moment between two looks.
                let after = Duration::from_millis(25_300);
                let told = fenced(&meta, &computes, after).await;
                assert_eq!(told, [None; 2], "{outage_ms} ms, {has_work}");
            }
        }
        meta.shutdown().await;
    }
}
