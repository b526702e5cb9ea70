//! How a compute process or a compactor begins. Whatever may fail because of this machine comes before the registration:
//! the leader makes use of a process from then on, and has to move jobs again if it ends.

use std::sync::Arc;

use millrace_common::SqlError;
use millrace_meta::LogFollower;
use millrace_rpc::log::ProcessRole;
use millrace_storage::given_up::GivenUp;
use millrace_storage::{StateStore, StoreOptions};
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;

use super::Ground;
use super::link::Link;
use super::metrics::MetricsPort;
use super::options::RoleConfig;
use crate::runtimes::{Runtimes, Threads};
use crate::standalone::{Overrides, StartError, store_options};

/// What a process has that has not registered yet.
struct Prepared {
    ground: Ground,
    runtimes: Option<Runtimes>,
    follower: Arc<LogFollower>,
    port: MetricsPort,
}

impl Prepared {
    async fn new(
        config: &RoleConfig,
        overrides: &Overrides,
        threads: fn(usize) -> Result<Runtimes, StartError>,
    ) -> Result<Prepared, StartError> {
        let ground = Ground::prepare(config, overrides).await?;
        let port = MetricsPort::open(&config.process).await?;
        let apart = overrides.threads == Threads::Apart;
        let runtimes = apart.then(|| threads(config.process.memory_limit)).transpose()?;
        let follower = LogFollower::open(Arc::clone(&ground.object_store), overrides.env.clone());
        let follower = Arc::new(follower.await.map_err(SqlError::from)?);
        tracing::info!(record = follower.number(), "the log is read");
        Ok(Prepared { ground, runtimes, follower, port })
    }
}

/// What a process has that has registered, before it serves anything.
pub struct Registered {
    pub ground: Ground,
    pub runtimes: Option<Runtimes>,
    /// Where what computes much runs; `None`: on the caller's runtime.
    pub background: Option<Handle>,
    pub follower: Arc<LogFollower>,
    /// Listens already.
    pub port: MetricsPort,
    pub link: Link,
    pub given_up: Arc<GivenUp>,
    pub store: Arc<StateStore>,
}

impl Registered {
    /// Waits for a leader as long as it takes. `threads`: starts those of its own. [`StartError::Stopped`] when `stop` is
    /// cancelled. The leader does not count on a process that has failed: it leaves.
    pub async fn start(
        config: &RoleConfig,
        overrides: &Overrides,
        role: ProcessRole,
        threads: fn(usize) -> Result<Runtimes, StartError>,
        stop: &CancellationToken,
    ) -> Result<Registered, StartError> {
        let prepared = stop.run_until_cancelled(Prepared::new(config, overrides, threads)).await;
        let Prepared { ground, runtimes, follower, port } =
            prepared.ok_or(StartError::Stopped)??;
        let (metas, advertised) = (&config.metas, &ground.advertised);
        let link = Link::register(metas, role, advertised, &follower, &overrides.env, stop).await?;
        let background = runtimes.as_ref().and_then(Runtimes::background);
        let given_up = Arc::<GivenUp>::default();
        let object_store = Arc::clone(&ground.object_store);
        let options = StoreOptions {
            background: background.clone(),
            given_up: Arc::clone(&given_up),
            ..store_options(&config.process, overrides, object_store, link.incarnation)
        };
        match StateStore::open(options).await {
            Ok(store) => Ok(Registered {
                ground,
                runtimes,
                background,
                follower,
                port,
                link,
                given_up,
                store,
            }),
            Err(error) => {
                link.leave().await;
                Err(error.into())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::path::Path;
    use std::time::Duration;

    use object_store::memory::InMemory;

    use super::super::{Auth, Role};
    use super::*;
    use crate::config::{Config, Http};
    use crate::health;

    const LIMIT: Duration = Duration::from_secs(30);

    /// Starts where nobody leads, with this HTTP port.
    async fn start(dir: &Path, http: &str, stop: &CancellationToken) -> Result<(), StartError> {
        let config = RoleConfig {
            role: Role::Compute,
            process: Config { http: Http::At(http.to_owned()), ..Config::embedded(dir) },
            metas: vec!["127.0.0.1:1".to_owned()],
            insecure_rpc: false,
            rpc_tls: None,
            auth: Auth::default(),
        };
        let object_store = Some(Arc::new(InMemory::new()) as Arc<dyn object_store::ObjectStore>);
        let overrides = Overrides { object_store, ..Overrides::default() };
        let role = ProcessRole::Compute;
        Registered::start(&config, &overrides, role, Runtimes::start, stop).await.map(drop)
    }

    #[tokio::test]
    async fn a_port_that_is_taken_is_an_error_before_a_leader_is_looked_for() {
        let dir = tempfile::tempdir().unwrap();
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let http = taken.local_addr().unwrap().to_string();
        let stop = CancellationToken::new();
        let started = tokio::time::timeout(LIMIT, start(dir.path(), &http, &stop)).await;
        let started = started.expect("it waits for nobody");
        assert!(matches!(started, Err(StartError::ListenHttp { .. })), "{started:?}");
    }

    #[tokio::test]
    async fn who_waits_for_a_leader_says_so_and_can_be_stopped() {
        let dir = tempfile::tempdir().unwrap();
        let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
        let (stop, http) = (CancellationToken::new(), free.clone());
        let told = async {
            loop {
                let address = free.clone();
                let check = tokio::task::spawn_blocking(move || health::check(&address));
                match check.await.unwrap() {
                    Err(why) if why.contains("not registered yet") => return stop.cancel(),
                    _ => tokio::time::sleep(Duration::from_millis(20)).await,
                }
            }
        };
        let started = async { tokio::join!(start(dir.path(), &http, &stop), told).0 };
        let started = tokio::time::timeout(LIMIT, started).await.unwrap();
        assert!(matches!(started, Err(StartError::Stopped)), "{started:?}");
    }
}
