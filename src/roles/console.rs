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

/// Whom a frontend believes without a password.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trust {
    /// Nobody has to log in to the console.
    pub console: bool,
    /// There statements are run for everybody who reaches the port, not only for this machine.
    pub everybody: bool,
}

impl Trust {
    /// Of a frontend with these listeners. Who cannot reach `sql` is not believed at `http` either.
    pub fn new(config: &RoleConfig, sql: SocketAddr, http: Option<SocketAddr>) -> Trust {
        Trust::of(config.auth, config.process.access.require_password, sql, http)
    }

    fn of(auth: Auth, asks: bool, sql: SocketAddr, http: Option<SocketAddr>) -> Trust {
        let sql_is_local = is_local(&[Some(sql)]);
        let http_is_local = is_local(&[http]);
        match auth {
            Auth::Trust => {
                Trust { console: http_is_local || !sql_is_local, everybody: !sql_is_local }
            }
            Auth::Password => {
                Trust { console: !asks && sql_is_local && http_is_local, everybody: false }
            }
        }
    }
}

impl Console {
    /// Serves the port until what comes back is dropped.
    pub fn serve(
        self,
        listener: TcpListener,
        config: &RoleConfig,
        limits: Limits,
        trust: Trust,
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
            logins: (!trust.console).then(Logins::default),
            trusts_everybody: trust.everybody,
            runs: Runs::new(Arc::clone(&shared), stop.clone()),
            refreshed: Default::default(),
            frontend: shared,
        };
        tokio::spawn(http::serve(listener, Arc::new(sources), limits, stop.clone()));
        stop.drop_guard()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trust(auth: Auth, asks: bool, sql: &str, http: Option<&str>) -> Trust {
        let address = |text: &str| -> SocketAddr { text.parse().unwrap() };
        Trust::of(auth, asks, address(sql), http.map(address))
    }

    #[test]
    fn who_cannot_reach_sessions_runs_no_statements_in_the_console_without_a_login() {
        let (local, all) = ("127.0.0.1:4566", "0.0.0.0:4566");
        let (local_http, all_http) = (Some("[::1]:9090"), Some("0.0.0.0:9090"));
        let hidden = trust(Auth::Trust, false, local, all_http);
        assert_eq!(hidden, Trust { console: false, everybody: false });
        let hidden = trust(Auth::Password, false, local, all_http);
        assert_eq!(hidden, Trust { console: false, everybody: false });

        let everybody = Trust { console: true, everybody: true };
        for http in [local_http, all_http, None] {
            assert_eq!(trust(Auth::Trust, false, all, http), everybody);
        }
        let this_machine = Trust { console: true, everybody: false };
        for auth in [Auth::Trust, Auth::Password] {
            assert_eq!(trust(auth, false, local, local_http), this_machine);
        }
        let nobody = Trust { console: false, everybody: false };
        assert_eq!(trust(Auth::Password, true, local, local_http), nobody);
        assert_eq!(trust(Auth::Password, false, all, local_http), nobody);
    }
}
