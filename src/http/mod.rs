//! The HTTP port of a process with sessions, a standalone server or a frontend of a cluster: the web console at `/`, its
//! JSON endpoints under `/api/`, `/metrics` for Prometheus and `/health`.
//!
//! Where the server asks for passwords, or others than this machine can reach it, everything under `/api/` but the
//! login itself is for those who have logged in ([`login`]), and statements run as that user. Elsewhere everybody on this
//! machine is trusted, as over the PostgreSQL protocol, but no proxy that sends on what others ask for; a frontend with
//! `--auth trust` that others can reach over that protocol believes everybody, there as here; one that they cannot
//! reach asks them here for a login. Either way only the console's own page changes something: a page of another site
//! can neither read nor write here. Every request must name this server in its Host header (DNS rebinding), and every
//! POST wants JSON, a header that a foreign page may not send without being asked first, and an Origin that is ours.
//! `/health` and `/metrics` (names of relations and numbers) are for everybody.

mod api;
mod connections;
mod login;
pub(crate) mod metrics;
mod runs;

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::{ConnectInfo, DefaultBodyLimit, Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use millrace_executor::worker::Worker;
use millrace_frontend::console::logins::Logins;
use millrace_frontend::console::runs::Runs;
use millrace_frontend::server::Shared;
use millrace_storage::StateStore;
use millrace_storage::object::Metered;
use serde_json::json;
use tokio::net::TcpListener;
use tokio::sync::Mutex;
use tokio_util::sync::CancellationToken;

pub use connections::{Limits, serve as serve_router};
pub use metrics::resident;

/// The page; everything it needs is in it.
const PAGE: &str = include_str!("console.html");
/// Bytes of a request's body.
const MAX_BODY: usize = 1 << 20;
/// Where passwords are sent to.
const LOGIN: &str = "/api/login";

/// Why the process does not do what it is there for; `None`: it does.
pub type Health = Box<dyn Fn() -> Option<String> + Send + Sync>;
/// What the process tells Prometheus.
pub type MetricsText = Box<dyn Fn() -> String + Send + Sync>;

/// What the pages are made of.
pub struct Sources {
    pub frontend: Arc<Shared>,
    /// Of a process that runs jobs.
    pub worker: Option<Arc<Worker>>,
    pub store: Arc<StateStore>,
    pub requests: Option<Arc<Metered>>,
    pub health: Health,
    pub metrics: MetricsText,
    /// A process of a cluster: `/health` and `/metrics` answer under any name, as those of its other processes do.
    pub is_clustered: bool,
    /// Bytes.
    pub memory_limit: usize,
    pub started: Instant,
    /// The name the port was asked to listen on, which a Host header may carry.
    pub host: String,
    /// Of the port itself: names the cookie, as cookies do not tell ports apart.
    pub port: u16,
    /// Who is logged in; `None`: nobody has to.
    pub logins: Option<Logins>,
    /// Where nobody has to log in, statements are run for everybody, not only for this machine.
    pub trusts_everybody: bool,
    /// What the console's users have started.
    pub runs: Runs,
    /// When the leader was last asked how jobs and processes are.
    pub refreshed: Mutex<Option<Instant>>,
}

/// Pages that ask within this time of each other are shown the same.
const FRESH: Duration = Duration::from_millis(500);

impl Sources {
    /// Has the cluster tell how jobs and processes are. Where the leader does not answer it is shown as the log has it.
    async fn refresh(&self) {
        let mut refreshed = self.refreshed.lock().await;
        if refreshed.is_some_and(|at| at.elapsed() < FRESH) {
            return;
        }
        if let Err(error) = self.frontend.cluster.show_reports().await {
            tracing::debug!(%error, "the console shows how jobs were before");
        }
        *refreshed = Some(Instant::now());
    }
}

type Shown = State<Arc<Sources>>;

/// Serves the port until `shutdown`.
pub async fn serve(
    listener: TcpListener,
    sources: Arc<Sources>,
    limits: Limits,
    shutdown: CancellationToken,
) {
    let inside = Router::new()
        .route("/api/state", get(api::state))
        .route("/api/graph/{id}", get(api::graph))
        .route("/api/sql", post(runs::start))
        .route("/api/run/{id}", get(runs::look))
        .route("/api/run/{id}/cancel", post(runs::cancel))
        .route("/api/logout", post(login::leave))
        .route_layer(middleware::from_fn_with_state(Arc::clone(&sources), login::demand));
    let router = Router::new()
        .route("/", get(page))
        .route("/health", get(health))
        .route("/metrics", get(show_metrics))
        .route(LOGIN, post(login::enter))
        .merge(inside)
        .fallback(|| async { (StatusCode::NOT_FOUND, "not found\n") })
        .layer(DefaultBodyLimit::max(MAX_BODY))
        .layer(middleware::from_fn_with_state(Arc::clone(&sources), guard))
        .with_state(sources);
    connections::serve(listener, router, limits, shutdown).await;
}

/// Refuses requests under a foreign name, and adds what a browser should know of every answer.
async fn guard(State(sources): Shown, request: Request<Body>, next: Next) -> Response {
    let trusting = sources.logins.is_none();
    // Everybody may see these.
    let open = matches!(request.uri().path(), "/health" | "/metrics");
    let any_name = open && sources.is_clustered;
    let is_named = |host| host_allowed(host, &sources.host, trusting);
    if !any_name && !host_of(request.headers()).is_some_and(is_named) {
        let text = "this server is not known under that name\n";
        return (StatusCode::MISDIRECTED_REQUEST, text).into_response();
    }
    if trusting && !open && is_forwarded(request.headers()) {
        let text = "behind a proxy this server must ask for passwords: --require-password, \
                    and of a frontend no --auth trust\n";
        return (StatusCode::FORBIDDEN, text).into_response();
    }
    let mut response = next.run(request).await;
    let headers = response.headers_mut();
    for (name, value) in [
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::X_FRAME_OPTIONS, "DENY"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CACHE_CONTROL, "no-store"),
        (
            header::CONTENT_SECURITY_POLICY,
            "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; \
             connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; \
             frame-ancestors 'none'",
        ),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    response
}

fn host_of(headers: &HeaderMap) -> Option<&str> {
    headers.get(header::HOST)?.to_str().ok()
}

/// An address, this machine's name for itself, or the name the port was given: what DNS of somebody
/// else's cannot turn into us. Where nobody has to log in, only an address that this machine alone can mean.
fn host_allowed(host: &str, own: &str, trusting: bool) -> bool {
    let name = without_port(host);
    let address = name.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
    name.eq_ignore_ascii_case("localhost")
        || name.eq_ignore_ascii_case(own)
        || address.is_ok_and(|a| !trusting || a.to_canonical().is_loopback())
}

/// Whether a proxy says that it sends on what somebody else has asked for.
fn is_forwarded(headers: &HeaderMap) -> bool {
    headers.keys().map(|name| name.as_str()).any(|name| {
        matches!(name, "forwarded" | "via" | "x-real-ip") || name.starts_with("x-forwarded-")
    })
}

pub(crate) fn without_port(host: &str) -> &str {
    match host.rsplit_once(':') {
        // The colons of a bare IPv6 address are inside its brackets.
        Some((name, port)) if port.bytes().all(|b| b.is_ascii_digit()) && !name.ends_with(':') => {
            name
        }
        _ => host,
    }
}

/// An answer that says what is wrong.
fn refusal(status: StatusCode, why: &str) -> Response {
    (status, Json(json!({"error": {"message": why}}))).into_response()
}

/// Whether a request that changes something comes from the console's own page; else why not.
fn from_own_page(headers: &HeaderMap) -> Result<(), &'static str> {
    let text = |name: &str| headers.get(name).and_then(|v| v.to_str().ok());
    let json = text("content-type").is_some_and(|t| t.starts_with("application/json"));
    if !json || text("x-millrace-console") != Some("1") {
        return Err("only the console is served here");
    }
    if matches!(text("sec-fetch-site"), Some(site) if site != "same-origin" && site != "none") {
        return Err("not from this page");
    }
    match (text("origin"), host_of(headers)) {
        (None, _) => Ok(()),
        (Some(origin), Some(host)) if origin == format!("http://{host}") => Ok(()),
        (Some(origin), Some(host)) if origin == format!("https://{host}") => Ok(()),
        _ => Err("not from this page"),
    }
}

/// Whether statements may be run for this request; else the answer.
fn may_run(sources: &Sources, headers: &HeaderMap, peer: SocketAddr) -> Result<(), Box<Response>> {
    let refused = |why| Box::new(refusal(StatusCode::FORBIDDEN, why));
    // Who has logged in may come from anywhere.
    let is_trusted = sources.trusts_everybody || peer.ip().to_canonical().is_loopback();
    if sources.logins.is_none() && !is_trusted {
        return Err(refused("statements are run for this machine only; use psql"));
    }
    from_own_page(headers).map_err(refused)
}

async fn page() -> impl IntoResponse {
    ([(header::CONTENT_TYPE, "text/html; charset=utf-8")], PAGE)
}

/// 200 while jobs are being served; which ones fail is in the metrics.
async fn health(State(sources): Shown) -> Response {
    describe_health((sources.health)())
}

/// The answer of a process that serves, or does not for this reason.
pub fn describe_health(reason: Option<String>) -> Response {
    match reason {
        None => "ok\n".into_response(),
        Some(reason) => (StatusCode::SERVICE_UNAVAILABLE, reason + "\n").into_response(),
    }
}

async fn show_metrics(State(sources): Shown) -> impl IntoResponse {
    let text = (sources.metrics)();
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text)
}

/// The address a request came from.
type Peer = ConnectInfo<SocketAddr>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn foreign_names_are_refused() {
        for host in
            ["localhost:5691", "127.0.0.1:5691", "[::1]:5691", "10.1.2.3", "Db.Example:5691"]
        {
            assert!(host_allowed(host, "db.example", false), "{host}");
        }
        for host in ["evil.example", "localhost.evil.example:5691", "127.0.0.1.evil.example", ""] {
            assert!(!host_allowed(host, "127.0.0.1", false), "{host}");
        }
    }

    #[test]
    fn who_trusts_this_machine_trusts_no_proxy() {
        for host in ["localhost:5691", "127.0.0.1:5691", "[::1]:5691", "127.0.0.2", "db.example"] {
            assert!(host_allowed(host, "db.example", true), "{host}");
        }
        for host in ["10.1.2.3:5691", "[2001:db8::1]:5691", "0.0.0.0", "evil.example"] {
            assert!(!host_allowed(host, "db.example", true), "{host}");
        }
        for name in ["forwarded", "X-Forwarded-For", "x-forwarded-proto", "Via", "X-Real-IP"] {
            assert!(is_forwarded(&headers(&[(name, "10.1.2.3")])), "{name}");
        }
        assert!(!is_forwarded(&headers(&[("host", "localhost:5691"), ("origin", "null")])));
    }

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        pairs.iter().map(|(n, v)| (n.parse().unwrap(), HeaderValue::from_static(v))).collect()
    }

    #[test]
    fn only_the_page_itself_changes_something() {
        let own = [
            ("host", "localhost:5691"),
            ("content-type", "application/json"),
            ("x-millrace-console", "1"),
            ("origin", "http://localhost:5691"),
        ];
        assert!(from_own_page(&headers(&own)).is_ok());
        for (i, wrong) in [(1, "text/plain"), (2, "0"), (3, "http://evil.example"), (3, "null")] {
            let mut other = own;
            other[i].1 = wrong;
            assert!(from_own_page(&headers(&other)).is_err(), "{other:?}");
        }
        for site in ["cross-site", "same-site"] {
            let mut foreign = own.to_vec();
            foreign.push(("sec-fetch-site", site));
            assert!(from_own_page(&headers(&foreign)).is_err(), "{site}");
        }
    }
}
