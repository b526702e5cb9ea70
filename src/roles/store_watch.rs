//! Whether the object store answers a process that jobs run on. The leader is told: it may have them go on elsewhere.

use std::sync::Arc;
use std::time::Duration;

use millrace_meta::LogFollower;
use millrace_meta::log::LogStore;
use millrace_storage::object::Metered;
use object_store::ObjectStore;
use tokio_util::task::AbortOnDropHandle;

/// Between two looks at the requests of the process.
const LOOK: Duration = Duration::from_secs(1);
/// Where the store has answered nothing for so long it is asked something small: whoever has asked may have given up, or
/// ask for much.
const ASK_AFTER: Duration = Duration::from_secs(2);
/// How long the answer to that is waited for. The leader judges nobody before an outage for all is over for longer than this
/// and the rest of the way take (`store_waits` in millrace-meta).
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
    loop {
        tokio::time::sleep(LOOK).await;
        if requests.unanswered() >= ASK_AFTER {
            // The answer is noted where requests are counted.
            let _ = tokio::time::timeout(ANSWER, store.answers(log.number())).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use millrace_common::EnvHandle;
    use millrace_meta::{Meta, MetaOptions};
    use millrace_storage::object::MeterOptions;
    use millrace_storage::sim::{Faults, Profile, SimStore};
    use object_store::ObjectStoreExt;
    use object_store::path::Path;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_process_tells_for_how_long_the_store_has_not_answered_it() {
        let sim = SimStore::in_memory(Profile::INSTANT, 1);
        let requests = Metered::wrap(Arc::new(sim.clone()), MeterOptions::default());
        let store = Arc::clone(&requests) as Arc<dyn ObjectStore>;
        drop(Meta::open(MetaOptions::new(Arc::clone(&store))).await.unwrap());
        let log = LogFollower::open(store, EnvHandle::default()).await.unwrap();
        let watch = StoreWatch::start(Some(Arc::clone(&requests)), &Arc::new(log));
        // What has opened the log is done.
        tokio::time::sleep(LOOK).await;
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
}
