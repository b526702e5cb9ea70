//! `millrace compactor`: a process that merges runs and nothing else. It keeps nothing, and may be killed at any time.
//!
//! What it needs to know of a job is in the task. It reads the log when it starts, to know its store and the meta
//! processes; for whether it is fenced, while no leader answers; and, a while after a result, for whether that was taken.

use std::fs::File;
use std::net::SocketAddr;
use std::sync::Arc;

use millrace_compactor::{Compactor, HandedOver};
use millrace_executor::worker::describe_table;
use millrace_rpc::control::Heartbeat;
use millrace_rpc::log::ProcessRole;
use millrace_rpc::remote::Server;
use millrace_rpc::services::CompactorService;
use millrace_storage::StateStore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use super::beat::Beat;
use super::lookups::Lookups;
use super::metrics::{Metrics, MetricsPort};
use super::options::RoleConfig;
use super::registered::Registered;
use super::results::{Recorded, give_up_lost};
use super::store_watch::StoreWatch;
use super::{Ending, Serving};
use crate::runtimes::{BackgroundCompactor, Runtimes};
use crate::standalone::{Overrides, StartError};
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
    /// Registers with the leader, for which it waits as long as it takes, and serves.
    pub async fn start(
        config: RoleConfig,
        overrides: Overrides,
    ) -> Result<CompactorProcess, StartError> {
        CompactorProcess::start_until(config, overrides, &CancellationToken::new()).await
    }

    /// The same; [`StartError::Stopped`], and nothing of it stays registered, when `stop` is cancelled meanwhile.
    pub async fn start_until(
        config: RoleConfig,
        overrides: Overrides,
        stop: &CancellationToken,
    ) -> Result<CompactorProcess, StartError> {
        let (role, threads, env) = (ProcessRole::Compactor, Runtimes::of_compactor, &overrides.env);
        let started = Registered::start(&config, &overrides, role, threads, stop).await?;
        let Registered { ground, runtimes, background, follower, port, link, given_up, store } =
            started;
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
        let watch = StoreWatch::start(ground.requests.clone(), &follower);
        // What a task reads stays until the task is done: the leader starts no other on it.
        let told = Box::new(move |applied| Heartbeat {
            applied,
            store_wait_ms: watch.wait().as_millis() as u64,
            ..Heartbeat::default()
        });
        let usage = UsageSource {
            store: Some(Arc::clone(&store)),
            requests: ground.requests.clone(),
            ..UsageSource::default()
        };
        let lost_results = give_up_lost(handed_over, follower, Arc::clone(&given_up), env.clone());
        let beat = Beat::start(&link, given_up, told, Lookups::default(), usage, ending.clone());
        let metrics = Metrics::new("compactor", link.incarnation);
        let metrics = metrics.with_store(ground.requests, Some(Arc::clone(&store)));
        port.show(metrics);
        Ok(CompactorProcess {
            address: ground.address,
            store,
            ending,
            serving,
            beat,
            runtimes,
            _lost_results: lost_results,
            _port: port,
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
