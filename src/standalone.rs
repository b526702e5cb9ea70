//! All roles in one process.
//!
//! Start order: the store is opened and probed, meta reads the log and takes the lead (which fences an
//! earlier process and names this one's objects), then the state store, the worker, the drivers of all
//! jobs, and last the listener, so that a client that gets in finds everything there.

mod error;
mod opening;
mod options;

use std::fs::File;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use millrace_common::threads::lower_priority;
use millrace_common::{EnvHandle, SqlError, collections};
use millrace_compactor::Compactor;
use millrace_connector::paths::Limited;
use millrace_executor::options::ExecOptions;
use millrace_executor::worker::{Worker, WorkerOptions};
use millrace_frontend::auth::{OwnSecret, verifier_of};
use millrace_frontend::console::logins::Logins;
use millrace_frontend::console::runs::Runs;
use millrace_frontend::identification::StartingPort;
use millrace_frontend::server::Shared;
use millrace_frontend::{Frontend, FrontendConfig, FrontendError};
use millrace_meta::Meta;
use millrace_rpc::log::UserChange;
use millrace_storage::StateStore;
use millrace_storage::object::Metered;
use object_store::ObjectStore;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

pub use self::error::StartError;
pub(crate) use self::error::described;
use self::opening::open_state;
pub(crate) use self::opening::{OpenedStore, begin_to_lead, lock, open_store, take_lead};
pub(crate) use self::options::{
    frontend_config, http_limits, meta_options, share_descriptors, store_options, worker_options,
};
use crate::candidate::Candidate;
use crate::config::{Access, Config};
use crate::http;
use crate::listen::{bind, bind_http, is_local, limit_paths, load_tls};
use crate::loopback::{Joined, Roles};
use crate::runtimes::{BackgroundCompactor, Runtimes, Threads};
use crate::usage::UsageSource;

/// The user that is always there.
const ROOT: &str = "root";

/// What a test or benchmark changes about a process beyond its [`Config`].
#[derive(Clone, Default)]
pub struct Overrides {
    /// Instead of opening `config.object_store`.
    pub object_store: Option<Arc<dyn ObjectStore>>,
    pub exec: Option<ExecOptions>,
    /// Bytes of a block; tests make them tiny.
    pub block_bytes: Option<usize>,
    /// Committed memory runs of a job beyond which they are flushed.
    pub flush_bytes: Option<usize>,
    /// Rows of epochs under way beyond which they are written early.
    pub spill_bytes: Option<usize>,
    /// Decoded blocks that one lookup holds.
    pub lookup_bytes: Option<usize>,
    /// Runs of a state table that may hold one key, beyond which the job's commits are delayed.
    pub overlap_limit: Option<usize>,
    /// The clocks and random numbers of all roles.
    pub env: EnvHandle,
    pub threads: Threads,
}

impl Overrides {
    /// As a server process runs: its roles on threads of their own.
    pub fn threads_apart() -> Overrides {
        Overrides { threads: Threads::Apart, ..Overrides::default() }
    }
}

/// A running process. Dropping it stops it without ceremony, as a crash would.
pub struct Standalone {
    pub meta: Arc<Meta>,
    pub worker: Arc<Worker>,
    pub store: Arc<StateStore>,
    /// Request counters of the object store, where it was opened from the configuration.
    pub requests: Option<Arc<Metered>>,
    pub address: SocketAddr,
    /// Of the HTTP port, where there is one.
    pub http: Option<SocketAddr>,
    /// What sessions and the console share.
    pub shared: Arc<Shared>,
    serving: JoinHandle<Result<(), FrontendError>>,
    http_serving: Option<JoinHandle<()>>,
    shutdown: CancellationToken,
    /// What keeps sessions up to date, where the roles call each other through bytes.
    following: Vec<AbortOnDropHandle<()>>,
    runtimes: Option<Runtimes>,
    _lock: Option<File>,
}

impl Standalone {
    /// Starts all roles and listens.
    pub async fn start(config: Config, overrides: Overrides) -> Result<Standalone, StartError> {
        let began = Instant::now();
        // Where another server of this process has set it, its seed stays.
        collections::seed(overrides.env.random());
        let shares = share_descriptors(&config);
        let lock =
            if overrides.object_store.is_some() { None } else { Some(lock(&config.data_dir)?) };
        let (listener, address) = bind(&config.listen).await?;
        let tls = load_tls(&config.access)?;
        let http_listener = bind_http(&config.http).await?;
        let http = http_listener.as_ref().and_then(|l| l.local_addr().ok());
        let trusting = !config.access.require_password && is_local(&[Some(address), http]);
        limit_paths(&config.access, Limited::Server, trusting)?;
        let (object_store, requests) = open_store(&config, &overrides)?;
        let apart = overrides.threads == Threads::Apart;
        let runtimes = apart.then(|| Runtimes::start(config.memory_limit)).transpose()?;
        let background = runtimes.as_ref().and_then(Runtimes::background);
        let candidate = Candidate::new(&config, &overrides, address).await;
        let identification = Arc::clone(&candidate.identification);
        let port = StartingPort::open(listener, Arc::clone(&identification), shares.pending);
        let (meta, store) =
            open_state(&config, &overrides, Arc::clone(&object_store), &background, &candidate)
                .await?;
        // A store that a test has given is this process's own.
        if lock.is_some() {
            begin_to_lead(&config, &meta, std::future::pending()).await;
        }
        let shutdown = CancellationToken::new();
        candidate.lead(&meta, &shutdown);

        let worker = Worker::new(WorkerOptions {
            runtime: runtimes.as_ref().and_then(Runtimes::tasks),
            ..worker_options(&config, &overrides, &store)
        });
        let compactor = Arc::new(BackgroundCompactor {
            compactor: Arc::new(Compactor::new(Arc::clone(&store))),
            runtime: background,
        });
        let roles = Roles {
            meta: Arc::clone(&meta),
            store: Arc::clone(&store),
            worker: Arc::clone(&worker),
            compactor,
        };
        let joined = roles.join(config.loopback, &object_store, &overrides.env).await?;
        let Joined { cluster, following } = joined;
        set_root_password(&config.access, &meta).await?;
        let own_secret = own_secret(&meta, trusting).await;

        let usage = UsageSource {
            store: Some(Arc::clone(&store)),
            worker: Some(Arc::clone(&worker)),
            requests: requests.clone(),
        };
        meta.set_usage(Box::new(move || usage.read()));
        let settings = FrontendConfig {
            incarnation: meta.incarnation().into(),
            tls,
            own_secret,
            start_query_thread: if apart { lower_priority } else { || {} },
            identification,
            ..frontend_config(&config, shares)
        };
        let frontend = Frontend::new(cluster, settings)?;
        let shared = Arc::clone(frontend.shared());
        let stop = shutdown.clone();
        let started = Instant::now();
        let measured = http::metrics::Standalone {
            frontend: Arc::clone(&shared),
            worker: Arc::clone(&worker),
            store: Arc::clone(&store),
            meta: Arc::clone(&meta),
            requests: requests.clone(),
            memory_limit: config.memory_limit,
            started,
        };
        let leader = Arc::clone(&meta);
        let sources = http::Sources {
            frontend: Arc::clone(&shared),
            worker: Some(Arc::clone(&worker)),
            store: Arc::clone(&store),
            requests: requests.clone(),
            health: Box::new(move || leader.clock_skew().map(|skew| skew.to_string())),
            metrics: Box::new(move || http::metrics::text(&measured)),
            is_clustered: false,
            memory_limit: config.memory_limit,
            started,
            host: http::without_port(config.http.address().unwrap_or_default()).to_owned(),
            port: http.map_or(0, |a| a.port()),
            logins: (!trusting).then(Logins::default),
            trusts_everybody: false,
            runs: Runs::new(Arc::clone(&shared), stop.clone()),
            refreshed: Default::default(),
        };
        let limits = http_limits(&config, shares);
        let http_serving =
            http_listener.map(|l| tokio::spawn(http::serve(l, Arc::new(sources), limits, stop)));
        let stop = shutdown.clone();
        let failed = |source| StartError::Listen { address: address.to_string(), source };
        let (listener, waiting) = port.take().await.map_err(failed)?;
        let serving = tokio::spawn(async move { frontend.serve(listener, waiting, stop).await });
        tell_start(&config, &meta, began);
        Ok(Standalone {
            meta,
            worker,
            store,
            requests,
            address,
            http,
            shared,
            serving,
            http_serving,
            shutdown,
            following,
            runtimes,
            _lock: lock,
        })
    }

    /// Completes when this process may no longer lead: another has taken over the store.
    pub async fn deposed(&self) -> SqlError {
        self.meta.deposed().await
    }

    /// Ends sessions and jobs. Nothing durable needs it: a kill loses nothing either.
    pub async fn shutdown(mut self) {
        self.end().await;
        if let Some(runtimes) = self.runtimes.take() {
            runtimes.leave();
        }
    }

    /// As [`Standalone::shutdown`], and what is still under way on threads of its own ends: for a process that starts
    /// many servers one after another.
    pub async fn shutdown_with_threads(mut self) {
        self.end().await;
        drop(self.runtimes.take());
    }

    async fn end(&mut self) {
        self.shutdown.cancel();
        if let Ok(Err(e)) = (&mut self.serving).await {
            tracing::warn!(error = %e, "the frontend ended with an error");
        }
        if let Some(serving) = &mut self.http_serving
            && let Err(e) = serving.await
        {
            tracing::warn!(error = %e, "the HTTP port ended with an error");
        }
        self.following.clear();
        self.meta.shutdown().await;
        if let Err(e) = self.store.close().await {
            tracing::warn!(error = %e, "the cache was not closed cleanly");
        }
    }
}

impl Drop for Standalone {
    fn drop(&mut self) {
        self.shutdown.cancel();
        self.serving.abort();
        if let Some(serving) = &self.http_serving {
            serving.abort();
        }
    }
}

/// Gives the user root the password of the configuration. One that it has already stays: it may have been
/// changed since.
pub(crate) async fn set_root_password(access: &Access, meta: &Meta) -> Result<(), StartError> {
    let Some(password) = &access.root_password else { return Ok(()) };
    if meta.catalog().users().get(ROOT).is_some_and(Option::is_some) {
        return Ok(());
    }
    let verifier = verifier_of(&password.0)?;
    meta.set_user(ROOT, UserChange::Alter, Some(verifier)).await?;
    Ok(())
}

/// Where passwords are asked for, the secret that the log keeps.
pub(crate) async fn own_secret(meta: &Meta, trusting: bool) -> OwnSecret {
    if trusting {
        return OwnSecret::default();
    }
    let secret = meta.authentication_secret().await.unwrap_or_else(|(made, error)| {
        // A store without space, say. This start does with it.
        tracing::warn!(%error, "the secret that hides which users exist could not be kept");
        made
    });
    OwnSecret::new(secret)
}

/// What somebody who reads the log wants to know first.
pub(crate) fn tell_start(config: &Config, meta: &Meta, began: Instant) {
    tracing::info!(
        version = env!("CARGO_PKG_VERSION"),
        memory_limit_mib = config.memory_limit >> 20,
        parallelism = config.parallelism,
        relations = meta.catalog().relations().count(),
        store_id = crate::roles::store::shown(meta.store_id()),
        recovery_ms = began.elapsed().as_millis() as u64,
        "started"
    );
}
