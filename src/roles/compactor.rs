//! `millrace compactor`: a process that merges runs and nothing else. It keeps nothing, and may be killed at any time.
//!
//! What it needs to know of a job is in the task. It reads the log when it starts, to know its store and the meta
//! processes; for whether it is fenced, while no leader answers; and, a while after a result, for whether that was taken.

use std::fs::File;
use std::net::SocketAddr;
use std::sync::Arc;

use millrace_common::SqlError;
use millrace_compactor::{Compactor, HandedOver};
use millrace_executor::worker::describe_table;
use millrace_meta::LogFollower;
use millrace_rpc::control::Heartbeat;
use millrace_rpc::log::ProcessRole;
use millrace_rpc::remote::Server;
use millrace_rpc::services::CompactorService;
use millrace_storage::given_up::GivenUp;
use millrace_storage::{StateStore, StoreOptions};
use tokio_util::task::AbortOnDropHandle;

use super::beat::Beat;
use super::link::Link;
use super::lookups::Lookups;
use super::metrics::{Metrics, MetricsPort};
use super::options::RoleConfig;
use super::results::{Recorded, give_up_lost};
use super::{Ending, Ground, Serving};
use crate::runtimes::{BackgroundCompactor, Runtimes, Threads};
use crate::standalone::{Overrides, StartError, store_options};
use crate::usage::UsageSource;

/// A running compactor.
pub struct CompactorProcess {
    pub address: SocketAddr,
    store: Arc<StateStore>,
    ending: Ending,
    serving: Serving,
    beat: Beat,
    runtimes: Option<Runtimes>,
    _lost_results: AbortOnDropHandle<()>,
    _port: MetricsPort,
    _lock: File,
}

impl CompactorProcess {
    pub async fn start(
        config: RoleConfig,
        overrides: Overrides,
    ) -> Result<CompactorProcess, StartError> {
        let ground = Ground::prepare(&config, &overrides).await?;
        let apart = overrides.threads == Threads::Apart;
        let runtimes =
            apart.then(|| Runtimes::of_compactor(config.process.memory_limit)).transpose()?;
        let background = runtimes.as_ref().and_then(Runtimes::background);
        let follower = LogFollower::open(Arc::clone(&ground.object_store), overrides.env.clone());
        let follower = Arc::new(follower.await.map_err(SqlError::from)?);
        tracing::info!(record = follower.number(), "the log is read");
        let advertised = &ground.advertised;
        let role = ProcessRole::Compactor;
        let env = &overrides.env;
        let link = Link::register(&config.metas, role, advertised, &follower, env).await?;
        let given_up = Arc::<GivenUp>::default();
        let object_store = Arc::clone(&ground.object_store);
        let store = StateStore::open(StoreOptions {
            background: background.clone(),
            given_up: Arc::clone(&given_up),
            ..store_options(&config.process, &overrides, object_store, link.incarnation)
        })
        .await?;
        let handed_over = Arc::<HandedOver>::default();
        let compactor = Compactor::elsewhere(Arc::clone(&store), describe_table);
        let compactor = Recorded {
            inner: BackgroundCompactor { compactor: Arc::new(compactor), runtime: background },
            handed_over: Arc::clone(&handed_over),
            env: env.clone(),
        };
        let server = Server::new(Arc::clone(&link.admission));
        let server = server.compactor(Arc::new(compactor) as Arc<dyn CompactorService>);
        let serving = Serving::start(&link.admission, server, ground.listener);
        let ending = Ending::default();
        // What a task reads stays until the task is done: the leader starts no other on it.
        let told = Box::new(|applied| Heartbeat { applied, ..Heartbeat::default() });
        let usage = UsageSource {
            store: Some(Arc::clone(&store)),
            requests: ground.requests.clone(),
            ..UsageSource::default()
        };
        let lost_results = give_up_lost(handed_over, follower, Arc::clone(&given_up), env.clone());
        let beat = Beat::start(&link, given_up, told, Lookups::default(), usage, ending.clone());
        let metrics = Metrics::new("compactor", link.incarnation);
        let metrics = metrics.with_store(ground.requests, Some(Arc::clone(&store)));
        let port = MetricsPort::open(&config.process, metrics);
        Ok(CompactorProcess {
            address: ground.address,
            store,
            ending,
            serving,
            beat,
            runtimes,
            _lost_results: lost_results,
            _port: port.await?,
            _lock: ground.lock,
        })
    }

    /// Completes when the process has been fenced.
    pub async fn ended(&self) -> String {
        self.ending.ended().await
    }

    pub async fn shutdown(self) {
        self.beat.leave().await;
        self.serving.end().await;
        if let Err(error) = self.store.close().await {
            tracing::warn!(%error, "the cache was not closed cleanly");
        }
        if let Some(runtimes) = self.runtimes {
            runtimes.leave();
        }
    }
}
