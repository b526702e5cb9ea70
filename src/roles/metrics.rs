//! The HTTP port of a process of a cluster: `/health`, and `/metrics` for Prometheus.

use std::fmt::Write;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use axum::Router;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use millrace_rpc::remote::write_call_metrics;
use millrace_storage::StateStore;
use millrace_storage::object::Metered;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::config::Config;
use crate::http::metrics::Exposition;
use crate::http::{self, Limits};
use crate::listen::bind_http;
use crate::standalone::StartError;

/// Why a process is not well that no leader has registered yet.
pub const NOT_REGISTERED: &str =
    "not registered yet: no meta process leads, or it cannot be reached";
/// Connections of the port at a time.
const CONNECTIONS: usize = 32;
/// How long a request may take to arrive, at most.
const PATIENCE: Duration = Duration::from_secs(30);

struct Family {
    name: &'static str,
    kind: &'static str,
    help: &'static str,
    value: Box<dyn Fn() -> u64 + Send + Sync>,
}

/// Writes metrics that describe themselves.
type Text = Box<dyn Fn(&mut String) + Send + Sync>;

/// What the port shows.
pub struct Metrics {
    role: &'static str,
    incarnation: Box<dyn Fn() -> u64 + Send + Sync>,
    families: Vec<Family>,
    texts: Vec<Text>,
    health: Health,
}

/// Why the process does not do what it is there for; `None`: it does.
type Health = Arc<dyn Fn() -> Option<String> + Send + Sync>;

impl Metrics {
    pub fn new(role: &'static str, incarnation: u64) -> Metrics {
        Metrics::of(role, move || incarnation)
    }

    /// Of a process that is given its incarnation later.
    pub fn of(
        role: &'static str,
        incarnation: impl Fn() -> u64 + Send + Sync + 'static,
    ) -> Metrics {
        let incarnation = Box::new(incarnation);
        let (families, texts, health) = (Vec::new(), Vec::new(), Arc::new(|| None) as Health);
        let metrics = Metrics { role, incarnation, families, texts, health };
        metrics.with(
            "millrace_memory_resident_bytes",
            "gauge",
            "Resident memory of the process.",
            http::resident,
        )
    }

    /// Adds a number that is read when it is asked for.
    pub fn with(
        mut self,
        name: &'static str,
        kind: &'static str,
        help: &'static str,
        value: impl Fn() -> u64 + Send + Sync + 'static,
    ) -> Metrics {
        self.families.push(Family { name, kind, help, value: Box::new(value) });
        self
    }

    /// Whoever asks whether the process is well is told this reason.
    pub fn with_health(self, why: impl Fn() -> Option<String> + Send + Sync + 'static) -> Metrics {
        Metrics { health: Arc::new(why), ..self }
    }

    /// Adds families that have labels, and write themselves in Prometheus' text format.
    pub fn with_text(mut self, write: impl Fn(&mut String) + Send + Sync + 'static) -> Metrics {
        self.texts.push(Box::new(write));
        self
    }

    /// Adds requests to the object store, and what a store of states has read and keeps.
    pub fn with_store(
        self,
        requests: Option<Arc<Metered>>,
        store: Option<Arc<StateStore>>,
    ) -> Metrics {
        self.with_text(move |text| {
            let mut out = Exposition::new(text);
            if let Some(metered) = &requests {
                http::metrics::requests(&mut out, metered);
            }
            if let Some(store) = &store {
                http::metrics::cache(&mut out, store);
            }
        })
    }

    /// Why the process does not do what it is there for.
    pub fn health(&self) -> Option<String> {
        (self.health)()
    }

    /// In Prometheus' text format.
    pub fn text(&self) -> String {
        let mut text = String::new();
        // Writing to a String does not fail.
        let _ = writeln!(
            text,
            "# HELP millrace_process_info What the process is.\n# TYPE millrace_process_info gauge\n\
             millrace_process_info{{role=\"{}\",incarnation=\"{}\",version=\"{}\"}} 1",
            self.role,
            (self.incarnation)(),
            env!("CARGO_PKG_VERSION"),
        );
        for Family { name, kind, help, value } in &self.families {
            let _ =
                writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}\n{name} {}", value());
        }
        for write in &self.texts {
            write(&mut text);
        }
        http::metrics::batches(&mut Exposition::new(&mut text));
        write_call_metrics(&mut text);
        text
    }
}

/// The port. Serves until it is dropped.
pub struct MetricsPort {
    shown: Arc<OnceLock<Metrics>>,
    _stop: DropGuard,
}

impl MetricsPort {
    /// Listens. An error if it cannot, and was asked to. Before there is something to be shown, the port answers that the
    /// process has not registered yet.
    pub async fn open(config: &Config) -> Result<MetricsPort, StartError> {
        let stop = CancellationToken::new();
        let shown = Arc::<OnceLock<Metrics>>::default();
        let port = MetricsPort { shown: Arc::clone(&shown), _stop: stop.clone().drop_guard() };
        let Some(listener) = bind_http(&config.http).await? else { return Ok(port) };
        let content = [(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")];
        let of_health = Arc::clone(&shown);
        let health = move || {
            let not_yet = || Some(NOT_REGISTERED.to_owned());
            let why = of_health.get().map_or_else(not_yet, Metrics::health);
            async move { http::describe_health(why) }
        };
        let show = move || {
            let shown = Arc::clone(&shown);
            async move {
                match shown.get() {
                    Some(metrics) => (content, metrics.text()).into_response(),
                    None => http::describe_health(Some(NOT_REGISTERED.to_owned())),
                }
            }
        };
        let router = Router::new()
            .route("/health", get(health))
            .route("/metrics", get(show))
            .fallback(|| async { (StatusCode::NOT_FOUND, "not found\n") });
        let limits = Limits { connections: CONNECTIONS, patience: PATIENCE };
        tokio::spawn(http::serve_router(listener, router, limits, stop));
        Ok(port)
    }

    /// From now on it shows these. Called once.
    pub fn show(&self, metrics: Metrics) {
        let _ = self.shown.set(metrics);
    }
}
