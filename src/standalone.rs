//! All roles in one process.
//!
//! Start order: the store is opened and probed, meta reads the log and takes the lead (which fences an
//! earlier process and names this one's objects), then the state store, the worker, the drivers of all
//! jobs, and last the listener, so that a client that gets in finds everything there.

use std::collections::BTreeMap;
use std::fs::{File, TryLockError};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use millrace_common::access::AccessClass;
use millrace_common::collections;
use millrace_common::threads::lower_priority;
use millrace_common::{EnvHandle, JobId, SqlError, SqlState, TableId};
use millrace_compactor::Compactor;
use millrace_executor::options::ExecOptions;
use millrace_executor::worker::{Worker, WorkerOptions};
use millrace_frontend::auth::{OwnSecret, verifier_of};
use millrace_frontend::console::logins::Logins;
use millrace_frontend::console::runs::Runs;
use millrace_frontend::identification::StartingPort;
use millrace_frontend::server::Shared;
use millrace_frontend::{Frontend, FrontendConfig, FrontendError};
use millrace_meta::{GcOptions, Meta, MetaOptions, RewriteOptions, is_overtaken};
use millrace_rpc::log::UserChange;
use millrace_storage::cache::{CacheOptions, DiskCacheOptions, ReadLimits};
use millrace_storage::given_up::GivenUp;
use millrace_storage::object::{MeterOptions, Metered, Reserve, local_directory, open_with};
use millrace_storage::read_counts::TableReads;
use millrace_storage::recovery_reads::TailPrefetch;
use millrace_storage::{StateStore, StorageError, StoreOptions, TailLimits};
use object_store::ObjectStore;
use tokio::runtime::Handle;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use crate::candidate::Candidate;
use crate::config::{Access, Config};
use crate::descriptors::{self, Shares};
use crate::http;
use crate::leadership::{Leadership, outwait_predecessors};
use crate::listen::{bind, bind_http, is_local, limit_paths, load_tls};
use crate::loopback::{Joined, Roles};
use crate::runtimes::{BackgroundCompactor, Runtimes, Threads};
use crate::usage::UsageSource;

/// The user that is always there.
const ROOT: &str = "root";
/// Connections of the HTTP port at a time: consoles, and whoever collects metrics.
const HTTP_CONNECTIONS: usize = 128;
/// How long a request of the HTTP port may take to arrive, at most.
const HTTP_PATIENCE: Duration = Duration::from_secs(30);

/// Why a process did not start. Each reads as a sentence and says what to do.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("cannot create the data directory {}: {source}", path.display())]
    DataDir { path: PathBuf, source: std::io::Error },
    #[error(
        "the data directory {} is used by another process; stop it, or give another --data-dir",
        path.display()
    )]
    Locked { path: PathBuf },
    #[error("cannot lock the data directory {}: {source}", path.display())]
    Lock { path: PathBuf, source: std::io::Error },
    #[error("cannot open the object store: {}", described(&SqlError::from(.0.clone())))]
    Store(#[from] StorageError),
    #[error("cannot start: {}", described(.0))]
    Meta(#[from] SqlError),
    #[error(
        "cannot listen on {address}: {source}; is a server running there? give another --listen"
    )]
    Listen { address: String, source: std::io::Error },
    #[error("cannot listen on {address}: {source}; give another --http, or --http off")]
    ListenHttp { address: String, source: std::io::Error },
    #[error(
        "calls of other processes on {address} would be neither encrypted nor authenticated; give --rpc-tls-cert, \
         --rpc-tls-key and --rpc-tls-ca, or listen on 127.0.0.1, or give --insecure-rpc where nobody else can reach the \
         network"
    )]
    InsecureRpc { address: String },
    #[error(
        "{address} is all addresses of this machine, and none at which other processes reach this one; give --advertise \
         HOST:PORT, or one address of the machine as --listen"
    )]
    NotAdvertised { address: String },
    #[error(
        "cannot secure calls between processes: {reason}; check --rpc-tls-cert, --rpc-tls-key, --rpc-tls-ca and \
         --advertise"
    )]
    RpcTls { reason: String },
    #[error("cannot encrypt connections: {reason}; check --tls-cert and --tls-key")]
    Tls { reason: String },
    #[error("cannot use --allow-path {}: {source}; name directories that exist", path.display())]
    AllowPath { path: PathBuf, source: std::io::Error },
    #[error("cannot start threads: {0}")]
    Threads(std::io::Error),
    #[error("cannot start the frontend: {0}")]
    Frontend(#[from] FrontendError),
}

pub(crate) fn described(error: &SqlError) -> String {
    let extra = [&error.detail, &error.hint].into_iter().flatten();
    extra.fold(error.message.clone(), |text, part| format!("{text}. {part}"))
}

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
        limit_paths(&config.access, trusting)?;
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

/// Connections that may be open at a time, such that descriptors are left for everything else.
pub(crate) fn share_descriptors(config: &Config) -> Shares {
    let limit = descriptors::raise_limit();
    let cache = || DiskCacheOptions::new(config.data_dir.join("cache"), config.disk_cache).files();
    let files = if config.disk_cache > 0 { cache() } else { 0 };
    let wanted = Shares {
        sessions: config.access.max_connections,
        pending: config.access.max_pending,
        http: HTTP_CONNECTIONS,
    };
    let shares = Shares::of(wanted, limit, files);
    if shares == wanted {
        tracing::info!(limit, max_connections = shares.sessions, "open files");
    } else {
        tracing::warn!(
            limit,
            max_connections = shares.sessions,
            max_pending_connections = shares.pending,
            "the system's limit of open files (ulimit -n) leaves fewer connections than are set"
        );
    }
    shares
}

/// Reads the log, takes the lead and opens the state store.
async fn open_state(
    config: &Config,
    overrides: &Overrides,
    object_store: Arc<dyn ObjectStore>,
    background: &Option<Handle>,
    candidate: &Candidate,
) -> Result<(Arc<Meta>, Arc<StateStore>), StartError> {
    let late_store: Arc<OnceLock<Arc<StateStore>>> = Arc::default();
    let tail: Arc<OnceLock<Arc<TailPrefetch>>> = Arc::default();
    let given_up = Arc::<GivenUp>::default();
    let options = || MetaOptions {
        given_up: Arc::clone(&given_up),
        ..meta_options(config, overrides, Arc::clone(&object_store), &late_store, &tail)
    };
    let meta = loop {
        match take_lead(config, overrides, || candidate.options(options())).await {
            // Another one was first, and is asked now.
            Err(StartError::Meta(error)) if is_overtaken(&error) => {}
            taken => break taken?,
        }
    };
    let options = StoreOptions {
        prefetch: tail.get().cloned(),
        background: background.clone(),
        given_up,
        ..store_options(config, overrides, object_store, meta.incarnation())
    };
    let store = StateStore::open(options).await?;
    // Set once, here: nobody else holds the cell yet.
    let _ = late_store.set(Arc::clone(&store));
    Ok((meta, store))
}

pub(crate) fn worker_options(
    config: &Config,
    overrides: &Overrides,
    store: &Arc<StateStore>,
) -> WorkerOptions {
    WorkerOptions {
        exec: overrides.exec.clone().unwrap_or_else(|| exec_options(config)),
        memory_limit: config.memory_limit,
        ..WorkerOptions::new(Arc::clone(store))
    }
}

/// What the configuration says of it.
pub(crate) fn frontend_config(config: &Config, shares: Shares) -> FrontendConfig {
    FrontendConfig {
        query_memory: config.memory_limit / 4,
        require_password: config.access.require_password,
        max_connections: shares.sessions,
        max_pending: shares.pending,
        authentication_timeout: config.access.authentication_timeout,
        ..FrontendConfig::default()
    }
}

pub(crate) fn http_limits(config: &Config, shares: Shares) -> http::Limits {
    http::Limits {
        connections: shares.http,
        patience: config.access.authentication_timeout.min(HTTP_PATIENCE),
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

/// Takes the data directory for this process; the kernel releases it when the process ends.
pub(crate) fn lock(data_dir: &Path) -> Result<File, StartError> {
    let path = data_dir.to_path_buf();
    std::fs::create_dir_all(data_dir)
        .map_err(|source| StartError::DataDir { path: path.clone(), source })?;
    let file = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .open(data_dir.join("lock"))
        .map_err(|source| StartError::Lock { path: path.clone(), source })?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(StartError::Locked { path }),
        Err(TryLockError::Error(source)) => Err(StartError::Lock { path, source }),
    }
}

/// Opens the log and takes the lead. Where the store has no space left, some of what is kept aside for that is used.
pub(crate) async fn take_lead(
    config: &Config,
    overrides: &Overrides,
    options: impl Fn() -> MetaOptions,
) -> Result<Arc<Meta>, StartError> {
    let reserve = match overrides.object_store {
        Some(_) => None,
        None => Reserve::of(&config.object_store),
    };
    let mut full = false;
    let meta = loop {
        match Meta::open(options()).await {
            Err(error) if error.state == SqlState::DISK_FULL && release(&reserve).await => {
                full = true;
            }
            opened => break opened?,
        }
    };
    if full {
        tracing::warn!(
            store = config.object_store,
            "the object store has no space left: reads are served, and statements that write are refused until some \
             is freed"
        );
    } else if let Some(reserve) = reserve {
        // Nobody waits for it.
        tokio::task::spawn_blocking(move || {
            if let Err(error) = reserve.keep() {
                tracing::warn!(%error, "no space could be kept aside for a start on a full store");
            }
        });
    }
    Ok(meta)
}

/// Returns when this process, which has just taken the lead, may acknowledge what it does. `stopped` completes when its
/// predecessors are known to answer no read any more.
pub(crate) async fn begin_to_lead(config: &Config, meta: &Meta, stopped: impl Future<Output = ()>) {
    let data_dir = config.data_dir.clone();
    let own = tokio::task::spawn_blocking(move || Leadership::read(&data_dir)).await;
    let mut own = own.unwrap_or_default();
    outwait_predecessors(meta, &own, stopped).await;
    // Not before: if this process dies while it waits, the next one must wait, too.
    let nonce = meta.nonce();
    if let Err(error) = tokio::task::spawn_blocking(move || own.lead(nonce)).await {
        tracing::warn!(%error, "it could not be written down who leads");
    }
}

/// Whether some space was freed.
async fn release(reserve: &Option<Reserve>) -> bool {
    let Some(reserve) = reserve.clone() else { return false };
    let released = tokio::task::spawn_blocking(move || reserve.release()).await;
    matches!(released, Ok(Ok(true)))
}

pub(crate) type OpenedStore = (Arc<dyn ObjectStore>, Option<Arc<Metered>>);

pub(crate) fn open_store(
    config: &Config,
    overrides: &Overrides,
) -> Result<OpenedStore, StartError> {
    if let Some(given) = &overrides.object_store {
        return Ok((Arc::clone(given), None));
    }
    let meter = MeterOptions { env: overrides.env.clone(), ..MeterOptions::default() };
    let metered = open_with(&config.object_store, meter)?;
    Ok((Arc::clone(&metered) as Arc<dyn ObjectStore>, Some(metered)))
}

pub(crate) fn meta_options(
    config: &Config,
    overrides: &Overrides,
    store: Arc<dyn ObjectStore>,
    late_store: &Arc<OnceLock<Arc<StateStore>>>,
    tail: &Arc<OnceLock<Arc<TailPrefetch>>>,
) -> MetaOptions {
    let ms = |d: std::time::Duration| format!("{}ms", d.as_millis().max(1));
    let mut settings =
        BTreeMap::from([("barrier_interval".to_string(), ms(config.barrier_interval))]);
    let (classes, readers) = (Arc::clone(late_store), Arc::clone(late_store));
    let counts = Arc::clone(late_store);
    let (tail, object_store) = (Arc::clone(tail), Arc::clone(&store));
    let defaults = MetaOptions::new(store);
    let mut snapshots = defaults.snapshots;
    if let Some(records) = config.tuning.snapshot_records {
        snapshots.min_records = records;
        snapshots.max_records = snapshots.max_records.min(records.saturating_mul(8));
    }
    let mut gc = defaults.gc;
    // What is copied is in memory meanwhile.
    let mut rewrite = RewriteOptions {
        bytes: (config.memory_limit as u64 / 64).clamp(4 << 20, 64 << 20),
        ..defaults.rewrite
    };
    if let Some(period) = config.tuning.gc_interval {
        gc = GcOptions { period };
        rewrite.period = period * 6;
        let retention = (period * 6).max(std::time::Duration::from_millis(100));
        settings.insert("object_retention".to_string(), ms(retention));
    }
    MetaOptions {
        parallelism: config.parallelism,
        source_epoch_events: (config.memory_limit / event_memory(config.memory_limit)) as u64,
        step_bytes: config.tuning.step_bytes.unwrap_or((config.memory_limit / 16).max(4 << 20))
            as u64,
        settings,
        table_class: Arc::new(move |job: JobId, table: u32| {
            let table = classes.get().and_then(|s| s.job(job)?.table(TableId(table)));
            table.map_or(AccessClass::PointUpdate, |t| t.class)
        }),
        table_reads: Some(Arc::new(move |job: JobId, table: u32| {
            let job = counts.get().and_then(|s| s.job(job));
            job.map_or(TableReads::MANY, |j| j.reads_since_merge(TableId(table)))
        })),
        pinned: Arc::new(move |object| readers.get().is_some_and(|s| s.holds_object(object))),
        recovering: Some(Box::new(move |slices| {
            let _ = tail.set(Arc::new(TailPrefetch::start(&object_store, slices)));
        })),
        max_clock_skew: config.max_clock_skew,
        snapshots,
        gc,
        rewrite,
        env: overrides.env.clone(),
        ..defaults
    }
}

/// Memory limit for each row that an epoch takes in: it may be wide, written in several state tables,
/// and there in several stages of a commit. Under a small limit, where caches and buffers leave less of
/// it, more.
fn event_memory(limit: usize) -> usize {
    if limit < 1 << 30 { 24 << 10 } else { 8 << 10 }
}

/// Rows of a backfill's step, at least.
const MIN_STEP: usize = 4 << 10;

/// Threads that read a local directory, at most.
const LOCAL_READS: usize = 128;

/// Reads of the object store in flight. Each takes a thread (a local directory) or a connection, and so an open file.
fn read_limits(config: &Config) -> ReadLimits {
    let defaults = ReadLimits::default();
    let is_local = !matches!(local_directory(&config.object_store), Ok(None));
    let most = match is_local {
        true => LOCAL_READS,
        false => defaults.most.min((descriptors::raise_limit() / 8).max(2)),
    };
    let (least, most) = match (config.tuning.min_reads, config.tuning.max_reads) {
        (None, None) => (defaults.least.min(most), most),
        (Some(least), None) => (least, most.max(least)),
        (None, Some(most)) => (defaults.least.min(most), most),
        (Some(least), Some(most)) => (least.min(most), most),
    };
    ReadLimits { least, most, start: defaults.start.clamp(least, most) }
}

/// How the memory limit is dealt out: a quarter each for blocks, state caches and queries; the rest
/// for memory runs, channels and what the allocator keeps.
pub(crate) fn store_options(
    config: &Config,
    overrides: &Overrides,
    store: Arc<dyn ObjectStore>,
    incarnation: u64,
) -> StoreOptions {
    let limit = config.memory_limit;
    let disk = (config.disk_cache > 0).then(|| DiskCacheOptions {
        admission: config.tuning.disk_cache_admission.unwrap_or_default(),
        ..DiskCacheOptions::new(config.data_dir.join("cache"), config.disk_cache)
    });
    let defaults = StoreOptions::new(store, incarnation);
    StoreOptions {
        cache: CacheOptions {
            memory_bytes: limit / 4,
            index_bytes: limit / 16,
            disk,
            // Scans and compactions read ahead: all of it together stays a small part.
            max_read_bytes: (limit as u64 / 256).clamp(256 << 10, 4 << 20),
            scan_reads: (limit / (16 << 20)).clamp(4, 24),
            read_bytes: (limit as u64 / 16).clamp(16 << 20, 256 << 20),
            reads: read_limits(config),
            hedge_reads: config.tuning.hedge_reads.unwrap_or(true),
            ..CacheOptions::default()
        },
        flush_bytes: overrides
            .flush_bytes
            .or(config.tuning.flush_bytes)
            .unwrap_or((limit / 16).clamp(4 << 20, 64 << 20)),
        spill_bytes: overrides.spill_bytes.unwrap_or((limit / 8).clamp(8 << 20, 256 << 20)),
        direct_run_bytes: config.tuning.direct_run_bytes.unwrap_or(defaults.direct_run_bytes),
        tail: TailLimits {
            slices: config.tuning.flush_commits.unwrap_or(defaults.tail.slices),
            bytes: config.tuning.tail_bytes.unwrap_or((limit / 16).clamp(4 << 20, 64 << 20)) as u64,
            age: config.tuning.flush_age.unwrap_or(defaults.tail.age),
        },
        overlap_limit: overrides.overlap_limit.unwrap_or(defaults.overlap_limit),
        env: overrides.env.clone(),
        inline_bytes: config.tuning.inline_bytes.unwrap_or(defaults.inline_bytes),
        block_bytes: overrides.block_bytes,
        // A compaction holds a run or two until they are written.
        run_bytes: (limit / 64).clamp(4 << 20, defaults.run_bytes),
        lookup_bytes: overrides.lookup_bytes.unwrap_or(limit / 64),
        scan_bytes: (limit / 16).clamp(4 << 20, defaults.scan_bytes),
        ..defaults
    }
}

/// For tests of the binary: whether it has hints at random.
fn has_random_hints() -> bool {
    cfg!(debug_assertions) && std::env::var_os("MILLRACE_RANDOM_HINTS").is_some()
}

fn exec_options(config: &Config) -> ExecOptions {
    let limit = config.memory_limit;
    let defaults = ExecOptions::default();
    let options = ExecOptions {
        cache_bytes: limit / 16,
        backfill_rows: (limit / event_memory(limit)).clamp(MIN_STEP, defaults.backfill_rows),
        delta_bytes: (limit / 16).min(defaults.delta_bytes),
        group_change_bytes: (limit / 32).min(defaults.group_change_bytes),
        channel_bytes: (limit / 256).clamp(256 << 10, defaults.channel_bytes),
        changelog_bytes: (limit / 16).min(defaults.changelog_bytes),
        statement_bytes: (limit / 8).min(defaults.statement_bytes),
        load_bytes: config.tuning.direct_run_bytes.unwrap_or((limit / 16).clamp(8 << 20, 32 << 20)),
        ..defaults
    };
    if has_random_hints() { options.with_random_hints() } else { options }
}
