//! `millrace compute`: a process that jobs run on.

use std::fs::File;
use std::net::SocketAddr;
use std::sync::Arc;

use millrace_common::collections;
use millrace_compactor::{Compactor, HandedOver};
use millrace_executor::Worker;
use millrace_executor::input::relations::Elsewhere;
use millrace_executor::worker::WorkerOptions;
use millrace_rpc::control::Heartbeat;
use millrace_rpc::dml::DmlService;
use millrace_rpc::log::ProcessRole;
use millrace_rpc::read::ReadService;
use millrace_rpc::remote::Server;
use millrace_rpc::services::{CompactorService, ComputeService, MetaService};
use millrace_storage::{StateStore, VersionFollower};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use super::beat::{Beat, Told};
use super::elsewhere::FollowedInputs;
use super::lookups::Lookups;
use super::metrics::{Metrics, MetricsPort};
use super::options::RoleConfig;
use super::registered::Registered;
use super::reports::worker_reports;
use super::results::{Recorded, give_up_lost};
use super::store_watch::StoreWatch;
use super::upstream::{Following, Upstream};
use super::{Ending, Serving};
use crate::http;
use crate::http::metrics::Exposition;
use crate::runtimes::{BackgroundCompactor, Runtimes};
use crate::standalone::{Overrides, StartError, worker_options};
use crate::usage::UsageSource;

/// A running compute process.
pub struct ComputeProcess {
    pub address: SocketAddr,
    pub worker: Arc<Worker>,
    store: Arc<StateStore>,
    ending: Ending,
    serving: Serving,
    beat: Beat,
    runtimes: Option<Runtimes>,
    _lost_results: AbortOnDropHandle<()>,
    _port: MetricsPort,
    _lock: File,
}

impl ComputeProcess {
    /// Registers with the leader, for which it waits as long as it takes, and serves.
    pub async fn start(
        config: RoleConfig,
        overrides: Overrides,
    ) -> Result<ComputeProcess, StartError> {
        ComputeProcess::start_until(config, overrides, &CancellationToken::new()).await
    }

    /// The same; [`StartError::Stopped`], and nothing of it stays registered, when `stop` is cancelled meanwhile.
    pub async fn start_until(
        config: RoleConfig,
        overrides: Overrides,
        stop: &CancellationToken,
    ) -> Result<ComputeProcess, StartError> {
        collections::seed(overrides.env.random());
        let (role, env) = (ProcessRole::Compute, &overrides.env);
        let started = Registered::start(&config, &overrides, role, Runtimes::start, stop).await?;
        let Registered { ground, runtimes, background, follower, port, link, given_up, store } =
            started;
        let inputs = Arc::new(FollowedInputs {
            follower: Arc::clone(&follower),
            versions: Arc::new(VersionFollower::new(&store)),
            incarnation: link.incarnation,
        });
        let worker = Worker::new(WorkerOptions {
            runtime: runtimes.as_ref().and_then(Runtimes::tasks),
            elsewhere: Some(Arc::clone(&inputs) as Arc<dyn Elsewhere>),
            ..worker_options(&config.process, &overrides, &store)
        });
        let upstream = Upstream { follower: Arc::clone(&follower), meta: Arc::clone(&link.meta) };
        worker.set_meta(Arc::new(upstream) as Arc<dyn MetaService>);
        let compactor = Compactor::new(Arc::clone(&store));
        let handed_over = Arc::<HandedOver>::default();
        let compactor = Recorded {
            inner: BackgroundCompactor { compactor: Arc::new(compactor), runtime: background },
            handed_over: Arc::clone(&handed_over),
            env: env.clone(),
        };
        let lost_results =
            give_up_lost(handed_over, Arc::clone(&follower), Arc::clone(&given_up), env.clone());
        let following = Following {
            follower: Arc::clone(&follower),
            worker: Arc::clone(&worker),
            inputs: Arc::clone(&inputs),
        };
        let server = Server::new(Arc::clone(&link.admission))
            .compute(Arc::new(following) as Arc<dyn ComputeService>)
            .compactor(Arc::new(compactor) as Arc<dyn CompactorService>)
            .dml(Arc::clone(&worker) as Arc<dyn DmlService>)
            .reads(Arc::clone(&worker) as Arc<dyn ReadService>);
        let serving = Serving::start(&link.admission, server, ground.listener);
        let ending = Ending::default();
        let lookups = Lookups {
            store: Some(Arc::clone(&store)),
            versions: Some(Arc::clone(&inputs.versions)),
            ..Lookups::default()
        };
        let watch = StoreWatch::start(ground.requests.clone(), &follower);
        let told = told(Arc::clone(&worker), Arc::clone(&store), inputs, watch);
        let usage = UsageSource {
            store: Some(Arc::clone(&store)),
            worker: Some(Arc::clone(&worker)),
            requests: ground.requests.clone(),
        };
        let beat = Beat::start(&link, given_up, told, lookups, usage, ending.clone());
        let metrics = Metrics::new("compute", link.incarnation).with(
            "millrace_log_record",
            "gauge",
            "The last record of the log that is known here.",
            move || follower.number(),
        );
        let metrics = metrics.with_store(ground.requests, Some(Arc::clone(&store)));
        let (of_memory, of_delays) = (Arc::clone(&worker), Arc::clone(&store));
        let metrics = metrics.with_text(move |text| {
            let mut out = Exposition::new(text);
            http::metrics::memory(&mut out, of_memory.governor());
            http::metrics::delays(&mut out, &of_delays);
        });
        port.show(metrics);
        Ok(ComputeProcess {
            address: ground.address,
            worker,
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

/// How far the process is, what it reads of jobs that run elsewhere, how its own are, and whether the object store answers
/// it. The record stream tells how far it is, too, but not what it reads.
fn told(
    worker: Arc<Worker>,
    store: Arc<StateStore>,
    inputs: Arc<FollowedInputs>,
    watch: StoreWatch,
) -> Told {
    Box::new(move |_| {
        let followed = inputs.follower.number();
        let applied = worker.applied().map_or(followed, |applied| applied.min(followed));
        // Asked later than `applied`: what is dropped after that is not deleted before the next heartbeat.
        let (reads_from, mut pinned) = inputs.pinned();
        pinned.extend(inputs.dropped_of(store.held_objects()));
        Heartbeat {
            applied,
            reads_from: reads_from.map(|epoch| epoch.0),
            pinned,
            jobs: worker_reports(&worker, &store, &inputs.follower),
            store_wait_ms: watch.wait().as_millis() as u64,
            ..Heartbeat::default()
        }
    })
}
