//! The HTTP port: the web console at `/`, its JSON endpoints under `/api/`, `/metrics` for Prometheus and
//! `/health`.
//!
//! Whoever can reach the port sees definitions and numbers; statements are run only for this machine,
//! and only for the console's own page. A page of another site can neither read nor write here: every
//! request must name this server in its Host header (DNS rebinding), and `/api/sql` wants JSON, a header
//! that a foreign page may not send without being asked first, and an Origin that is ours.

mod api;
mod metrics;

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Instant;

use axum::Router;
use axum::body::Body;
use axum::extract::{ConnectInfo, DefaultBodyLimit, Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use millrace_executor::worker::Worker;
use millrace_frontend::server::Shared;
use millrace_storage::StateStore;
use millrace_storage::object::Metered;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

/// The page; everything it needs is in it.
const PAGE: &str = include_str!("console.html");
/// Bytes of a request's body.
const MAX_BODY: usize = 1 << 20;

/// What the pages are made of.
pub struct Sources {
    pub frontend: Arc<Shared>,
    pub worker: Arc<Worker>,
    pub store: Arc<StateStore>,
    pub requests: Option<Arc<Metered>>,
    /// Bytes.
    pub memory_limit: usize,
    pub started: Instant,
    /// The name the port was asked to listen on, which a Host header may carry.
    pub host: String,
}

type Shown = State<Arc<Sources>>;

/// Serves the port until `shutdown`.
pub async fn serve(
    listener: TcpListener,
    sources: Arc<Sources>,
    shutdown: CancellationToken,
) -> std::io::Result<()> {
    let router = Router::new()
        .route("/", get(page))
        .route("/health", get(health))
        .route("/metrics", get(show_metrics))
        .route("/api/state", get(api::state))
        .route("/api/graph/{id}", get(api::graph))
        .route("/api/sql", post(api::sql))
        .fallback(|| async { (StatusCode::NOT_FOUND, "not found\n") })
        .layer(DefaultBodyLimit::max(MAX_BODY))
        .layer(middleware::from_fn_with_state(Arc::clone(&sources), guard))
        .with_state(sources)
        .into_make_service_with_connect_info::<SocketAddr>();
    // Open connections (a console that polls) do not hold the server back.
    tokio::select! {
        result = axum::serve(listener, router) => result,
        () = shutdown.cancelled() => Ok(()),
    }
}

/// Refuses requests under a foreign name, and adds what a browser should know of every answer.
async fn guard(State(sources): Shown, request: Request<Body>, next: Next) -> Response {
    if !host_of(request.headers()).is_some_and(|h| host_allowed(h, &sources.host)) {
        let text = "this server is not known under that name\n";
        return (StatusCode::MISDIRECTED_REQUEST, text).into_response();
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
/// else's cannot turn into us.
fn host_allowed(host: &str, own: &str) -> bool {
    let name = without_port(host);
    name.eq_ignore_ascii_case("localhost")
        || name.eq_ignore_ascii_case(own)
        || name.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>().is_ok()
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

/// Whether a statement may be run for this request; else why not.
fn may_run(headers: &HeaderMap, peer: SocketAddr) -> Result<(), (StatusCode, &'static str)> {
    if !peer.ip().is_loopback() {
        return Err((StatusCode::FORBIDDEN, "statements are run for this machine only; use psql"));
    }
    let text = |name: &str| headers.get(name).and_then(|v| v.to_str().ok());
    let json = text("content-type").is_some_and(|t| t.starts_with("application/json"));
    if !json || text("x-millrace-console") != Some("1") {
        return Err((StatusCode::FORBIDDEN, "only the console runs statements here"));
    }
    if matches!(text("sec-fetch-site"), Some(site) if site != "same-origin" && site != "none") {
        return Err((StatusCode::FORBIDDEN, "not from this page"));
    }
    match (text("origin"), host_of(headers)) {
        (None, _) => Ok(()),
        (Some(origin), Some(host)) if origin == format!("http://{host}") => Ok(()),
        (Some(origin), Some(host)) if origin == format!("https://{host}") => Ok(()),
        _ => Err((StatusCode::FORBIDDEN, "not from this page")),
    }
}

async fn page() -> impl IntoResponse {
    ([(header::CONTENT_TYPE, "text/html; charset=utf-8")], PAGE)
}

/// 200 while jobs are being served; which ones fail is in the metrics.
async fn health() -> &'static str {
    "ok\n"
}

async fn show_metrics(State(sources): Shown) -> impl IntoResponse {
    let text = metrics::text(&sources);
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
            assert!(host_allowed(host, "db.example"), "{host}");
        }
        for host in ["evil.example", "localhost.evil.example:5691", "127.0.0.1.evil.example", ""] {
            assert!(!host_allowed(host, "127.0.0.1"), "{host}");
        }
    }

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        pairs.iter().map(|(n, v)| (n.parse().unwrap(), HeaderValue::from_static(v))).collect()
    }

    #[test]
    fn only_the_page_itself_runs_statements() {
        let here: SocketAddr = "127.0.0.1:40000".parse().unwrap();
        let own = [
            ("host", "localhost:5691"),
            ("content-type", "application/json"),
            ("x-millrace-console", "1"),
            ("origin", "http://localhost:5691"),
        ];
        assert!(may_run(&headers(&own), here).is_ok());
        assert!(may_run(&headers(&own), "10.0.0.9:40000".parse().unwrap()).is_err());
        for (i, wrong) in [(1, "text/plain"), (2, "0"), (3, "http://evil.example"), (3, "null")] {
            let mut other = own;
            other[i].1 = wrong;
            assert!(may_run(&headers(&other), here).is_err(), "{other:?}");
        }
        let mut cross = own.to_vec();
        cross.push(("sec-fetch-site", "cross-site"));
        assert!(may_run(&headers(&cross), here).is_err());
    }
}
