//! `millrace frontend`: sessions of clients. It reads what is committed from log and bucket, sends definitions to the
//! leader and rows to the process that their table runs on.
//!
//! Where nobody leads when it starts it takes sessions all the same, and registers when somebody does: reads with
//! `read_freshness = 'any'` need log and bucket alone, and what needs the leader waits for it, as it does when a leader
//! is lost later.

use std::fs::File;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures::{FutureExt, StreamExt};
use millrace_common::collections::{self, HashMap};
use millrace_common::threads::lower_priority;
use millrace_common::{RelationId, SqlError, SqlState};
use millrace_frontend::auth::OwnSecret;
use millrace_frontend::other_sessions::tell_sessions;
use millrace_frontend::remote_cluster::{RemoteCluster, RemoteOptions, TableProcess, TableRoutes};
use millrace_frontend::server::Shared;
use millrace_frontend::{Frontend, FrontendConfig, FrontendError, Incarnation};
use millrace_meta::{LogFollower, ReadLease};
use millrace_rpc::control::{Heartbeat, MetaControl};
use millrace_rpc::dml::DmlService;
use millrace_rpc::log::ProcessRole;
use millrace_rpc::read::ReadService;
use millrace_rpc::remote::{CallLimits, Identity, Peer, RemoteDml, RemoteMeta, RemoteReads};
use millrace_storage::given_up::GivenUp;
use millrace_storage::{StateStore, VersionFollower};
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::task::JoinHandle;
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::AbortOnDropHandle;
use tracing::warn;

use super::beat::{Beat, LEAVING, Told};
use super::console::{Console, Trust};
use super::link::{Joining, Link};
use super::lookups::Lookups;
use super::metrics::{Metrics, NOT_REGISTERED};
use super::options::{Auth, RoleConfig};
use super::reach::TableReach;
use super::{Ending, Ground};
use crate::http;
use crate::http::metrics::Exposition;
use crate::listen::{bind_http, load_tls};
use crate::runtimes::Threads;
use crate::standalone::{
    Overrides, StartError, frontend_config, http_limits, share_descriptors, store_options,
};
use crate::usage::UsageSource;

/// How long the start waits for the registration. Then sessions are taken without.
const REGISTRATION: Duration = Duration::from_secs(2);
/// A store that is only read from needs no name for what it writes.
const WRITES_NOTHING: u64 = 0;
/// Before the record stream, or the log, is asked for again.
const PAUSE: Duration = Duration::from_millis(500);
/// Jobs that nobody has read for so long are closed.
const IDLE: Duration = Duration::from_secs(60);
/// A setting of the log that SQL neither shows nor sets.
const AUTHENTICATION_SECRET: &str = "#authentication_secret";

/// A running frontend.
pub struct FrontendProcess {
    /// For psql and drivers.
    pub address: SocketAddr,
    /// Of the console, where there is one.
    pub http: Option<SocketAddr>,
    ending: Ending,
    serving: JoinHandle<Result<(), FrontendError>>,
    shutdown: CancellationToken,
    store: Arc<StateStore>,
    beat: Arc<Mutex<Option<Beat>>>,
    _following: [AbortOnDropHandle<()>; 4],
    /// Registers the process, where nobody led when it started.
    registering: Option<AbortOnDropHandle<()>>,
    /// Ends that.
    stop: CancellationToken,
    /// Serves the HTTP port until it is dropped.
    _console: Option<DropGuard>,
    _lock: File,
}

impl FrontendProcess {
    /// Registers with the leader, if there is one soon, and takes sessions.
    pub async fn start(
        config: RoleConfig,
        overrides: Overrides,
    ) -> Result<FrontendProcess, StartError> {
        FrontendProcess::start_until(config, overrides, &CancellationToken::new()).await
    }

    /// The same; [`StartError::Stopped`], and nothing of it stays registered, when `stop` is cancelled meanwhile.
    pub async fn start_until(
        config: RoleConfig,
        overrides: Overrides,
        stop: &CancellationToken,
    ) -> Result<FrontendProcess, StartError> {
        let stop = stop.child_token();
        collections::seed(overrides.env.random());
        let process = &config.process;
        let shares = share_descriptors(process);
        let ground = Ground::prepare(&config, &overrides).await?;
        let http_listener = bind_http(&process.http).await?;
        let http = http_listener.as_ref().and_then(|l| l.local_addr().ok());
        let trust = Trust::new(&config, ground.address, http);
        let tls = load_tls(&process.access)?;
        let log = LogFollower::open(Arc::clone(&ground.object_store), overrides.env.clone());
        let log = stop.run_until_cancelled(log).await.ok_or(StartError::Stopped)?;
        let log = Arc::new(log.map_err(SqlError::from)?);
        tracing::info!(record = log.number(), "the log is read");
        let joining = Joining::new(
            &config.metas,
            ProcessRole::Frontend,
            &ground.advertised,
            &log,
            &overrides.env,
        )?;
        let (identity, meta) = (Arc::clone(&joining.identity), Arc::clone(&joining.meta));
        let lease = Arc::clone(&joining.lease);
        let object_store = Arc::clone(&ground.object_store);
        let options = store_options(process, &overrides, object_store, WRITES_NOTHING);
        let given_up = Arc::clone(&options.given_up);
        let store = StateStore::open(options).await?;
        let versions = Arc::new(VersionFollower::new(&store));
        let mut registering = joining.register(stop.clone()).boxed();
        let registered = tokio::time::timeout(REGISTRATION, &mut registering).await;
        let link = registered.ok().transpose()?;
        let records = spawned(follow(Arc::clone(&log), Arc::clone(&meta)));
        let closing = spawned(close_idle(Arc::clone(&versions)));
        let reach = TableReach::new(Arc::clone(&log), Arc::clone(&lease), Arc::clone(&identity));
        let reach = Arc::new(reach);
        let reaching = spawned(Arc::clone(&reach).watch());
        let cluster = RemoteCluster::new(RemoteOptions {
            log: Arc::clone(&log),
            versions: Arc::clone(&versions),
            meta: Arc::clone(&meta) as Arc<dyn MetaControl>,
            routes: Arc::new(Routes::new(Arc::clone(&log), identity)),
            env: overrides.env.clone(),
            settings: Default::default(),
            lease: Some(Arc::clone(&lease)),
        });
        let ways = cluster.read_ways();
        let apart = overrides.threads == Threads::Apart;
        let own_secret = OwnSecret::default();
        let incarnation = match &link {
            Some(link) => Incarnation::from(link.incarnation),
            None => Incarnation::awaited(),
        };
        learn_secret(&log, &own_secret);
        let settings = FrontendConfig {
            incarnation: incarnation.clone(),
            tls,
            trust_everybody: config.auth == Auth::Trust,
            own_secret: own_secret.clone(),
            start_query_thread: if apart { lower_priority } else { || {} },
            ..frontend_config(process, shares)
        };
        let frontend = match (Frontend::new(Arc::new(cluster), settings), &link) {
            (Ok(frontend), _) => frontend,
            (Err(error), None) => return Err(error.into()),
            (Err(error), Some(link)) => {
                link.leave().await;
                return Err(error.into());
            }
        };
        let shutdown = CancellationToken::new();
        let (end, listener) = (shutdown.clone(), ground.listener);
        let shared = Arc::clone(frontend.shared());
        let telling = spawned(tell_own_sessions(Arc::clone(&shared), meta));
        let following = [records, closing, reaching, telling];
        let ending = Ending::default();
        let usage = UsageSource {
            store: Some(Arc::clone(&store)),
            requests: ground.requests.clone(),
            ..UsageSource::default()
        };
        let beat = Arc::<Mutex<Option<Beat>>>::default();
        let registration = Registration {
            log: Arc::clone(&log),
            versions,
            given_up,
            usage,
            ending: ending.clone(),
            stop: stop.clone(),
            own_secret,
            incarnation: incarnation.clone(),
            beat: Arc::clone(&beat),
        };
        let registering = match link {
            Some(link) => {
                registration.complete(&link).await?;
                None
            }
            None => {
                warn!("not registered yet: sessions read what is committed, all else waits");
                Some(spawned(registration.run(registering)))
            }
        };
        let serving =
            tokio::spawn(async move { frontend.serve(listener, Default::default(), end).await });
        let metrics = metrics_of(&incarnation, lease, reach).with(
            "millrace_log_record",
            "gauge",
            "The last record of the log that is known here.",
            move || log.number(),
        );
        let metrics = metrics.with_store(ground.requests.clone(), Some(Arc::clone(&store)));
        let sessions = Arc::clone(&shared);
        let metrics = metrics.with_text(move |text| {
            let mut out = Exposition::new(text);
            http::metrics::sessions(&mut out, &sessions.activity(), &sessions.engine);
            http::metrics::read_ways(&mut out, &ways);
        });
        let requests = ground.requests;
        let console = Console { shared, store: Arc::clone(&store), requests, metrics };
        let limits = http_limits(process, shares);
        if let Some(address) = http {
            tracing::info!(%address, "the console is served");
        }
        let console = http_listener.map(|listener| console.serve(listener, &config, limits, trust));
        Ok(FrontendProcess {
            address: ground.address,
            ending,
            serving,
            shutdown,
            store,
            beat,
            http,
            _following: following,
            registering,
            stop,
            _console: console,
            _lock: ground.lock,
        })
    }

    /// Completes when the process has been fenced, or has met a leader of another protocol version.
    pub async fn ended(&self) -> String {
        self.ending.ended().await
    }

    pub async fn shutdown(mut self) {
        self.shutdown.cancel();
        if let Ok(Err(error)) = (&mut self.serving).await {
            warn!(%error, "the frontend ended with an error");
        }
        // It registers no more, or leaves.
        self.stop.cancel();
        if let Some(registering) = self.registering.take() {
            let _ = tokio::time::timeout(LEAVING * 2, registering).await;
        }
        let beat = self.beat.lock().take();
        if let Some(beat) = beat {
            beat.leave().await;
        }
        if let Err(error) = self.store.close().await {
            warn!(%error, "the cache was not closed cleanly");
        }
    }
}

/// What a frontend does when it has registered.
struct Registration {
    log: Arc<LogFollower>,
    versions: Arc<VersionFollower>,
    given_up: Arc<GivenUp>,
    usage: UsageSource,
    ending: Ending,
    /// The process ends.
    stop: CancellationToken,
    own_secret: OwnSecret,
    incarnation: Incarnation,
    beat: Arc<Mutex<Option<Beat>>>,
}

impl Registration {
    /// Waits until it has.
    async fn run(self, registering: impl Future<Output = Result<Link, StartError>>) {
        let link = match registering.await {
            Ok(link) => link,
            Err(StartError::Stopped) => return,
            Err(error) => return self.ending.end(error.to_string()),
        };
        let incarnation = self.begin(&link);
        let catch_up = async {
            while let Err(error) = self.log.catch_up().await {
                warn!(%error, "the log cannot be read, trying again");
                tokio::time::sleep(PAUSE).await;
            }
        };
        if self.stop.run_until_cancelled(catch_up).await.is_some() {
            self.end(incarnation);
        }
    }

    /// The same of a process that has registered already. If it cannot read the log then, it leaves.
    async fn complete(self, link: &Link) -> Result<(), StartError> {
        let incarnation = self.begin(link);
        let read = self.stop.run_until_cancelled(self.log.catch_up()).await;
        let error = match read {
            Some(Ok(_)) => {
                self.end(incarnation);
                return Ok(());
            }
            Some(Err(error)) => SqlError::from(error).into(),
            None => StartError::Stopped,
        };
        let beat = self.beat.lock().take();
        if let Some(beat) = beat {
            beat.leave().await;
        }
        Err(error)
    }

    /// The leader hears of the process from now on. The incarnation that it has given.
    fn begin(&self, link: &Link) -> u64 {
        let versions = Arc::clone(&self.versions);
        let lookups = Lookups { versions: Some(versions), ..Lookups::default() };
        let told = told(&self.log, &self.versions);
        let (given_up, usage) = (Arc::clone(&self.given_up), self.usage.clone());
        let beat = Beat::start(link, given_up, told, lookups, usage, self.ending.clone());
        *self.beat.lock() = Some(beat);
        link.incarnation
    }

    /// The log has been read since: the leader has made the secret by now. What waits for the registration goes on.
    fn end(self, incarnation: u64) {
        learn_secret(&self.log, &self.own_secret);
        self.incarnation.give(incarnation);
    }
}

/// It is in the log once somebody has led.
fn learn_secret(log: &LogFollower, own: &OwnSecret) {
    if let Some(secret) = log.read(|state| state.settings.get(AUTHENTICATION_SECRET).cloned()) {
        own.learn(secret);
    }
}

/// Of a frontend that is well when it has registered and has read the log since, and is not cut off from tables.
fn metrics_of(incarnation: &Incarnation, lease: Arc<ReadLease>, reach: Arc<TableReach>) -> Metrics {
    let (own, given) = (incarnation.clone(), incarnation.clone());
    Metrics::of("frontend", move || own.get()).with_health(move || {
        if given.is_given() {
            return reach.trouble();
        }
        let why = match lease.is_registered() {
            false => NOT_REGISTERED,
            true => {
                "registered, and the log has not been read since: the object store may not answer"
            }
        };
        Some(why.to_owned())
    })
}

fn spawned(work: impl Future<Output = ()> + Send + 'static) -> AbortOnDropHandle<()> {
    AbortOnDropHandle::new(tokio::spawn(work))
}

/// Takes the leader's record stream, and reads from the bucket what it does not bring.
pub(crate) async fn follow(log: Arc<LogFollower>, meta: Arc<RemoteMeta>) {
    let mut is_told = false;
    loop {
        let leader = meta.peer().address();
        match meta.follow(log.number() + 1).await {
            Ok(mut messages) => {
                is_told = false;
                // What came before the stream begins.
                if let Err(error) = log.catch_up().await {
                    warn!(%error, "the log cannot be read, trying again");
                }
                loop {
                    let message = tokio::select! {
                        biased;
                        message = messages.next() => message,
                        // Another process leads.
                        () = meta.peer().redirected_from(&leader) => None,
                    };
                    let Some(Ok(message)) = message else { break };
                    if let Err(error) = log.take(&message.records).await {
                        warn!(%error, "records cannot be folded, trying again");
                        break;
                    }
                }
            }
            Err(error) if !is_told => {
                warn!(%error, "the record stream does not come");
                is_told = true;
            }
            Err(_) => {}
        }
        // Whoever leads next may have begun already.
        if let Err(error) = log.catch_up().await {
            warn!(%error, "the log cannot be read, trying again");
        }
        tokio::time::sleep(PAUSE).await;
    }
}

/// Tells whoever leads the sessions of this frontend.
async fn tell_own_sessions(shared: Arc<Shared>, meta: Arc<RemoteMeta>) {
    loop {
        let leader = meta.peer().address();
        tokio::select! {
            biased;
            () = tell_sessions(Arc::clone(&shared)) => return,
            // Another process leads. The one that has not answered asks for nothing any more.
            () = meta.peer().redirected_from(&leader) => {}
        }
    }
}

pub(crate) async fn close_idle(versions: Arc<VersionFollower>) {
    loop {
        tokio::time::sleep(IDLE / 4).await;
        versions.close_idle(IDLE);
    }
}

/// What is read here now, which the leader keeps.
fn told(log: &Arc<LogFollower>, versions: &Arc<VersionFollower>) -> Told {
    let (log, versions) = (Arc::clone(log), Arc::clone(versions));
    Box::new(move |_| {
        let applied = log.number();
        // Asked later than `applied`: what is dropped after that is not deleted before the next heartbeat.
        let pinned = versions.pinned();
        Heartbeat {
            applied,
            reads_from: pinned.epoch.map(|epoch| epoch.0),
            pinned: pinned.objects.into_iter().collect(),
            ..Heartbeat::default()
        }
    })
}

/// Jobs run where the log has placed them.
struct Routes {
    log: Arc<LogFollower>,
    identity: Arc<Identity>,
    /// Drives the connections: not that of the queries, of which some are the first to ask for a process.
    runtime: Handle,
    /// By incarnation.
    known: Mutex<HashMap<u64, TableProcess>>,
}

impl Routes {
    /// Must be called on the runtime that answers clients.
    fn new(log: Arc<LogFollower>, identity: Arc<Identity>) -> Routes {
        Routes { log, identity, runtime: Handle::current(), known: Mutex::default() }
    }
}

impl TableRoutes for Routes {
    fn process_of(&self, table: RelationId) -> Result<TableProcess, SqlError> {
        let placed = self.log.read(|state| {
            let incarnation = state.jobs.get(&table)?.process;
            let process = state.processes.live().get(&incarnation)?;
            Some((incarnation, process.registration.address.clone()))
        });
        let Some((incarnation, address)) = placed else {
            let message = "the table runs on no process at present";
            return Err(SqlError::new(SqlState::CANNOT_CONNECT_NOW, message)
                .with_hint("Start a compute process, or wait until the table has one again."));
        };
        let mut known = self.known.lock();
        if let Some(process) = known.get(&incarnation) {
            return Ok(process.clone());
        }
        let _on = self.runtime.enter();
        let peer = Peer::new(&address, Arc::clone(&self.identity), CallLimits::default())?;
        let peer = peer.of_incarnation(incarnation);
        let dml = Arc::new(RemoteDml::new(peer.clone())) as Arc<dyn DmlService>;
        let reads = Arc::new(RemoteReads::new(peer)) as Arc<dyn ReadService>;
        let process = TableProcess { incarnation, dml, reads };
        // Others are gone for good.
        known.retain(|id, _| self.log.read(|state| state.processes.is_live(*id)));
        known.insert(incarnation, process.clone());
        Ok(process)
    }
}
