//! Accepts connections and routes cancel requests.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

use millrace_rpc::version::StatementId;
use parking_lot::Mutex;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::cluster::Cluster;
use crate::connection;
use crate::error::FrontendError;
use crate::query::QueryEngine;

#[derive(Clone, Debug)]
pub struct FrontendConfig {
    pub database: String,
    pub users: Vec<String>,
    pub max_connections: usize,
    /// Threads of the query runtime.
    pub query_threads: usize,
    /// Memory that batch queries may use together.
    pub query_memory: usize,
    /// Names this frontend's statements; unique among incarnations.
    pub incarnation: u64,
    /// Encrypts connections of clients that ask for it.
    pub tls: Option<crate::auth::Tls>,
    /// Asks for a password on loopback too. Clients of other machines always need one.
    pub require_password: bool,
}

impl Default for FrontendConfig {
    fn default() -> FrontendConfig {
        FrontendConfig {
            database: "dev".to_owned(),
            users: vec!["root".to_owned(), "postgres".to_owned()],
            max_connections: 1000,
            query_threads: std::thread::available_parallelism().map_or(2, usize::from),
            query_memory: 1 << 30,
            incarnation: 0,
            tls: None,
            require_password: false,
        }
    }
}

/// A connection as others see it.
#[derive(Clone, Debug)]
pub struct Activity {
    pub pid: i32,
    pub user: String,
    pub database: String,
    pub application: String,
    pub query: String,
    pub active: bool,
    pub address: String,
}

struct Registered {
    secret: i32,
    cancel: CancellationToken,
    activity: Activity,
}

/// What all sessions share.
pub struct Shared {
    pub cluster: Arc<dyn Cluster>,
    pub engine: QueryEngine,
    pub config: FrontendConfig,
    connections: Mutex<HashMap<i32, Registered>>,
    next_pid: AtomicI32,
    next_statement: AtomicU64,
}

impl Shared {
    pub fn next_statement(&self) -> StatementId {
        StatementId {
            frontend: self.config.incarnation,
            number: self.next_statement.fetch_add(1, Ordering::Relaxed),
        }
    }

    /// Whether somebody of that name may come in at all.
    pub fn has_user(&self, name: &str) -> bool {
        self.config.users.iter().any(|u| u == name) || self.cluster.users().contains_key(name)
    }

    /// A place in the registry: process id and secret; `None` when there are too many.
    pub(crate) fn register(&self, activity: Activity) -> Option<(i32, i32)> {
        let mut connections = self.connections.lock();
        if connections.len() >= self.config.max_connections {
            return None;
        }
        let pid = self.next_pid.fetch_add(1, Ordering::Relaxed);
        let secret = rand::random();
        let activity = Activity { pid, ..activity };
        connections.insert(pid, Registered { secret, cancel: CancellationToken::new(), activity });
        Some((pid, secret))
    }

    pub(crate) fn unregister(&self, pid: i32) {
        self.connections.lock().remove(&pid);
    }

    /// A statement begins: the token that a cancel request will fire.
    pub(crate) fn begin_statement(&self, pid: i32, text: &str) -> CancellationToken {
        let token = CancellationToken::new();
        if let Some(c) = self.connections.lock().get_mut(&pid) {
            c.cancel = token.clone();
            c.activity.active = true;
            c.activity.query = text.chars().take(1024).collect();
        }
        token
    }

    pub(crate) fn end_statement(&self, pid: i32, application: &str) {
        if let Some(c) = self.connections.lock().get_mut(&pid) {
            c.activity.active = false;
            c.activity.application = application.to_owned();
        }
    }

    /// Serves a cancel request; a wrong secret is ignored without a word, as the protocol wants.
    pub(crate) fn cancel(&self, pid: i32, secret: i32) {
        let connections = self.connections.lock();
        if let Some(c) = connections.get(&pid).filter(|c| c.secret == secret && c.activity.active) {
            c.cancel.cancel();
        }
    }

    /// pg_cancel_backend: whether there was a statement to cancel.
    pub(crate) fn cancel_pid(&self, pid: i64) -> bool {
        let connections = self.connections.lock();
        let found = i32::try_from(pid).ok().and_then(|pid| connections.get(&pid));
        let active = found.filter(|c| c.activity.active);
        if let Some(c) = active {
            c.cancel.cancel();
        }
        active.is_some()
    }

    pub fn activity(&self) -> Vec<Activity> {
        let mut all: Vec<_> =
            self.connections.lock().values().map(|c| c.activity.clone()).collect();
        all.sort_by_key(|a| a.pid);
        all
    }
}

/// The frontend role.
pub struct Frontend {
    shared: Arc<Shared>,
}

impl Frontend {
    pub fn new(
        cluster: Arc<dyn Cluster>,
        config: FrontendConfig,
    ) -> Result<Frontend, FrontendError> {
        let engine = QueryEngine::new(config.query_threads, config.query_memory)?;
        Ok(Frontend {
            shared: Arc::new(Shared {
                cluster,
                engine,
                config,
                connections: Mutex::new(HashMap::new()),
                next_pid: AtomicI32::new(1000),
                next_statement: AtomicU64::new(1),
            }),
        })
    }

    /// What the connections share; the console's statements run on it too.
    pub fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Serves connections until `shutdown`; sessions then end with 57P01.
    pub async fn serve(
        &self,
        listener: TcpListener,
        shutdown: CancellationToken,
    ) -> Result<(), FrontendError> {
        let sessions = tokio_util::sync::CancellationToken::new();
        let mut tasks = tokio::task::JoinSet::new();
        loop {
            let accepted = tokio::select! {
                () = shutdown.cancelled() => break,
                Some(_) = tasks.join_next() => continue,
                accepted = listener.accept() => accepted,
            };
            match accepted {
                Ok((socket, address)) => {
                    let (shared, stop) = (self.shared.clone(), sessions.clone());
                    tasks.spawn(connection::run(shared, socket, address, stop));
                }
                Err(e) => {
                    // Out of descriptors, say: others close in time.
                    tracing::warn!(error = %e, "cannot accept a connection");
                    tokio::time::sleep(std::time::Duration::from_millis(50)).await;
                }
            }
        }
        sessions.cancel();
        let drain = async { while tasks.join_next().await.is_some() {} };
        let _ = tokio::time::timeout(std::time::Duration::from_secs(2), drain).await;
        Ok(())
    }
}
