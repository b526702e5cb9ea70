//! The HTTP port of a frontend of a cluster: the web console, beside `/health` and `/metrics`.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use millrace_frontend::console::logins::Logins;
use millrace_frontend::console::runs::Runs;
use millrace_frontend::server::Shared;
use millrace_storage::StateStore;
use millrace_storage::object::Metered;
use tokio::net::TcpListener;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::metrics::Metrics;
use super::options::{Auth, RoleConfig};
use crate::http::{self, Limits, Sources};
use crate::listen::is_local;

/// What the page shows of the process itself. All else it is told by the log and the leader.
pub struct Console {
    pub shared: Arc<Shared>,
    pub store: Arc<StateStore>,
    pub requests: Option<Arc<Metered>>,
    pub metrics: Metrics,
}

/// Whether a frontend that listens on these addresses believes whoever reaches them.
pub fn is_trusting(config: &RoleConfig, addresses: &[Option<SocketAddr>]) -> bool {
    let asks = config.process.access.require_password || !is_local(addresses);
    config.auth == Auth::Trust || !asks
}

impl Console {
    /// Serves the port until what comes back is dropped. `is_trusting`: nobody has to log in.
    pub fn serve(
        self,
        listener: TcpListener,
        config: &RoleConfig,
        limits: Limits,
        is_trusting: bool,
    ) -> DropGuard {
        let stop = CancellationToken::new();
        let Console { shared, store, requests, metrics } = self;
        let metrics = Arc::new(metrics);
        let health = Arc::clone(&metrics);
        let address = config.process.http.address().unwrap_or_default();
        let sources = Sources {
            worker: None,
            store,
            requests,
            health: Box::new(move || health.health()),
            metrics: Box::new(move || metrics.text()),
            is_clustered: true,
            memory_limit: config.process.memory_limit,
            started: Instant::now(),
            host: http::without_port(address).to_owned(),
            port: listener.local_addr().map_or(0, |a| a.port()),
            logins: (!is_trusting).then(Logins::default),
            trusts_everybody: config.auth == Auth::Trust,
            runs: Runs::new(Arc::clone(&shared), stop.clone()),
            refreshed: Default::default(),
            frontend: shared,
        };
        tokio::spawn(http::serve(listener, Arc::new(sources), limits, stop.clone()));
        stop.drop_guard()
    }
}
