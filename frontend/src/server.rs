//! Accepts connections and routes cancel requests.

use std::collections::{HashMap, VecDeque};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use millrace_common::{SqlError, SqlState};
use millrace_rpc::version::StatementId;
use parking_lot::Mutex;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::advisory::SessionLocks;
use crate::cluster::Cluster;
use crate::connection;
use crate::connection_limit::ConnectionLimit;
use crate::error::FrontendError;
use crate::identification::{Accepted, Identification};
use crate::incarnation::Incarnation;
use crate::other_frontends::process_id;
use crate::other_sessions::OtherSessions;
use crate::query::QueryEngine;
use crate::secrets;

/// How long statements may go on when the server ends.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long clients then have to be told why theirs were cut off.
const TELLING: Duration = Duration::from_secs(1);

#[derive(Clone, Debug)]
pub struct FrontendConfig {
    pub database: String,
    pub users: Vec<String>,
    /// Sessions at a time; the last few are for `users`.
    pub max_connections: usize,
    /// Connections at a time whose clients have not said yet who they are.
    pub max_pending: usize,
    /// How long a client may take to say and prove who it is.
    pub authentication_timeout: Duration,
    /// Cores that queries use.
    pub query_cores: usize,
    /// Called on each thread that runs queries.
    pub start_query_thread: fn(),
    /// Memory that batch queries may use together.
    pub query_memory: usize,
    /// Names this frontend's statements and sessions; unique among incarnations.
    pub incarnation: Incarnation,
    /// Encrypts connections of clients that ask for it.
    pub tls: Option<crate::auth::Tls>,
    /// Makes up what clients see of users that have no password, and proves to other frontends that this is one.
    pub own_secret: crate::auth::OwnSecret,
    /// Asks for a password on loopback too. Clients of other machines always need one.
    pub require_password: bool,
    /// Asks nobody for a password, wherever they connect from.
    pub trust_everybody: bool,
    /// What others are told who ask which server this is.
    pub identification: Arc<Identification>,
}

impl Default for FrontendConfig {
    fn default() -> FrontendConfig {
        FrontendConfig {
            database: "dev".to_owned(),
            users: vec!["root".to_owned(), "postgres".to_owned()],
            max_connections: 1000,
            max_pending: 200,
            authentication_timeout: Duration::from_secs(60),
            query_cores: std::thread::available_parallelism().map_or(2, usize::from),
            start_query_thread: || {},
            query_memory: 1 << 30,
            incarnation: Incarnation::default(),
            tls: None,
            own_secret: crate::auth::OwnSecret::default(),
            require_password: false,
            trust_everybody: false,
            identification: Arc::default(),
        }
    }
}

/// Sessions that are kept for those who look after the server.
const RESERVED: usize = 3;

impl FrontendConfig {
    pub(crate) fn reserved(&self) -> usize {
        RESERVED.min(self.max_connections / 4)
    }
}

/// A connection as others see it. Times are microseconds since 1970.
#[derive(Clone, Debug, Default)]
pub struct Activity {
    pub pid: i32,
    pub user: String,
    pub database: String,
    pub application: String,
    pub query: String,
    pub active: bool,
    /// What it is when it is not active: `idle` or one of its kinds.
    pub resting: &'static str,
    /// The client's address, and the one it has connected to.
    pub address: String,
    pub server_address: String,
    pub started: i64,
    pub transaction_started: Option<i64>,
    pub query_started: Option<i64>,
    pub changed: i64,
}

/// A session that waits for its client and has no transaction open.
pub const IDLE: &str = "idle";

struct Registered {
    secret: i32,
    cancel: CancellationToken,
    /// Ends the connection, if there is one.
    stop: Option<CancellationToken>,
    activity: Activity,
}

/// Bytes of a program's name that others see, as in PostgreSQL.
const NAME: usize = 63;

/// The start of a program's name.
pub(crate) fn shown_name(text: &str) -> &str {
    let ends = text.char_indices().map(|(at, c)| at + c.len_utf8());
    let end = ends.take_while(|end| *end <= NAME).last().unwrap_or(0);
    &text[..end]
}

/// Characters of a statement that others see.
const SHOWN: usize = 1024;

/// The start of a statement, without its secrets. What is cut off within one ends with its mask.
fn shown_start(text: &str) -> String {
    let end = text.char_indices().nth(SHOWN).map_or(text.len(), |(i, _)| i);
    secrets::masked(&text[..end])
}

/// Microseconds since 1970.
fn now() -> i64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(now.as_micros()).unwrap_or(i64::MAX)
}

/// What all sessions share.
pub struct Shared {
    pub cluster: Arc<dyn Cluster>,
    pub engine: QueryEngine,
    pub config: FrontendConfig,
    /// Locks that sessions agree on.
    pub locks: SessionLocks,
    /// Sessions of other frontends.
    pub other_sessions: OtherSessions,
    /// When the server began, in microseconds since 1970.
    pub started: i64,
    connections: Mutex<HashMap<i32, Registered>>,
    next_session: AtomicU32,
    next_statement: AtomicU64,
}

impl Shared {
    /// The id of a statement that changes rows. Waits until the frontend has registered, because nobody else may ever name
    /// a statement so; an error (57P03) says that it has not.
    pub async fn next_statement(&self) -> Result<StatementId, SqlError> {
        let frontend = self.config.incarnation.given().await?;
        Ok(StatementId { frontend, number: self.next_number() })
    }

    /// A number that no other statement of this frontend has.
    pub(crate) fn next_number(&self) -> u64 {
        self.next_statement.fetch_add(1, Ordering::Relaxed)
    }

    /// Whether there is anybody yet who could come in: in a log that no meta process has begun there are no users, and
    /// nothing that hides which there are.
    pub(crate) fn check_begun(&self) -> Result<(), SqlError> {
        if self.config.incarnation.is_given() || self.config.own_secret.is_known() {
            return Ok(());
        }
        let message = "no meta process has begun to lead on this object store";
        Err(SqlError::new(SqlState::CANNOT_CONNECT_NOW, message)
            .with_hint("Start a meta process; this frontend goes on by itself when one leads."))
    }

    /// Whether somebody of that name may come in at all.
    pub fn has_user(&self, name: &str) -> bool {
        self.config.users.iter().any(|u| u == name) || self.cluster.users().contains_key(name)
    }

    /// A place in the registry: process id and secret.
    pub(crate) fn register(&self, activity: Activity) -> Result<(i32, i32), SqlError> {
        let mut connections = self.connections.lock();
        let free = self.config.max_connections.saturating_sub(connections.len());
        if free == 0 {
            let message = "sorry, too many clients already";
            return Err(SqlError::new(SqlState::TOO_MANY_CONNECTIONS, message));
        }
        if free <= self.config.reserved() && !self.config.users.contains(&activity.user) {
            let users = self.config.users.join(" and ");
            let message = format!("remaining connection slots are reserved for {users}");
            return Err(SqlError::new(SqlState::TOO_MANY_CONNECTIONS, message));
        }
        let next = || {
            let number = self.next_session.fetch_add(1, Ordering::Relaxed);
            process_id(number, self.config.incarnation.get())
        };
        // There are more numbers than sessions at a time. Of 0 nothing can be asked.
        let pid = loop {
            let pid = next();
            if pid != 0 && !connections.contains_key(&pid) {
                break pid;
            }
        };
        let secret = rand::random();
        let now = now();
        let activity = Activity { pid, started: now, changed: now, resting: IDLE, ..activity };
        let cancel = CancellationToken::new();
        self.locks.enter(pid);
        connections.insert(pid, Registered { secret, cancel, stop: None, activity });
        Ok((pid, secret))
    }

    /// A session has ended; what it held of the server is free.
    pub(crate) fn unregister(&self, pid: i32) {
        self.connections.lock().remove(&pid);
        self.locks.release_all(pid);
    }

    /// Whether a process id is that of a session of this frontend.
    pub(crate) fn has_session(&self, pid: i32) -> bool {
        self.connections.lock().contains_key(&pid)
    }

    /// The token that ends a connection: when the server does, or by pg_terminate_backend.
    pub(crate) fn stop_token(&self, pid: i32, server: &CancellationToken) -> CancellationToken {
        let stop = server.child_token();
        if let Some(c) = self.connections.lock().get_mut(&pid) {
            c.stop = Some(stop.clone());
        }
        stop
    }

    /// A statement begins: the token that a cancel request will fire.
    pub(crate) fn begin_statement(&self, pid: i32, text: &str) -> CancellationToken {
        let token = CancellationToken::new();
        let shown = shown_start(text);
        if let Some(c) = self.connections.lock().get_mut(&pid) {
            c.cancel = token.clone();
            // Who was told to end before the statement began had nothing to cancel.
            if c.stop.as_ref().is_some_and(CancellationToken::is_cancelled) {
                token.cancel();
            }
            let now = now();
            let activity = &mut c.activity;
            activity.active = true;
            activity.query = shown;
            activity.query_started = Some(now);
            activity.transaction_started.get_or_insert(now);
            activity.changed = now;
        }
        token
    }

    /// What has begun goes on: the token that a cancel request will fire.
    pub(crate) fn resume_statement(&self, pid: i32) -> CancellationToken {
        let token = CancellationToken::new();
        if let Some(c) = self.connections.lock().get_mut(&pid) {
            c.cancel = token.clone();
            if c.stop.as_ref().is_some_and(CancellationToken::is_cancelled) {
                token.cancel();
            }
            c.activity.active = true;
            c.activity.changed = now();
        }
        token
    }

    /// A statement has ended; `resting`: what the session is until the next one.
    pub(crate) fn end_statement(&self, pid: i32, application: &str, resting: &'static str) {
        if let Some(c) = self.connections.lock().get_mut(&pid) {
            let activity = &mut c.activity;
            activity.active = false;
            activity.resting = resting;
            activity.application = shown_name(application).to_owned();
            if resting == IDLE {
                activity.transaction_started = None;
            }
            activity.changed = now();
        }
    }

    /// Serves a cancel request of an own session; a wrong secret is ignored without a word, as the protocol wants.
    pub(crate) fn cancel(&self, pid: i32, secret: i32) {
        let connections = self.connections.lock();
        if let Some(c) = connections.get(&pid).filter(|c| c.secret == secret && c.activity.active) {
            c.cancel.cancel();
        }
    }

    /// pg_cancel_backend of an own session: whether there is such a session. One that does nothing has nothing to cancel.
    pub(crate) fn cancel_pid(&self, pid: i32) -> bool {
        let connections = self.connections.lock();
        let found = connections.get(&pid);
        if let Some(c) = found.filter(|c| c.activity.active) {
            c.cancel.cancel();
        }
        found.is_some()
    }

    /// pg_terminate_backend of an own session: whether there is such a session. Its statement ends, and then its connection.
    pub(crate) fn terminate_pid(&self, pid: i32) -> bool {
        let connections = self.connections.lock();
        let Some(c) = connections.get(&pid) else { return false };
        if let Some(stop) = &c.stop {
            stop.cancel();
        }
        c.cancel.cancel();
        true
    }

    /// The statements of all sessions end.
    fn cancel_all(&self) {
        self.connections.lock().values().for_each(|c| c.cancel.cancel());
    }

    /// The sessions of this frontend, by process id.
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
        let engine =
            QueryEngine::new(config.query_cores, config.query_memory, config.start_query_thread)?;
        let leader = cluster.lock_leader();
        let meta = leader.as_ref().map(|leader| Arc::clone(&leader.meta));
        let other_sessions = OtherSessions::new(config.incarnation.clone(), meta);
        let locks = SessionLocks::new(config.incarnation.clone(), leader);
        // Process ids do not tell the frontend before it has registered: those of two are to differ all the same.
        let first_session = if config.incarnation.is_given() { 1 } else { rand::random() };
        Ok(Frontend {
            shared: Arc::new(Shared {
                cluster,
                engine,
                config,
                locks,
                other_sessions,
                started: now(),
                connections: Mutex::new(HashMap::new()),
                next_session: AtomicU32::new(first_session),
                next_statement: AtomicU64::new(1),
            }),
        })
    }

    /// What the connections share; the console's statements run on it too.
    pub fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Serves connections until `shutdown`, those first that wait; sessions then end with 57P01, each when its statement has
    /// ended. Statements that have not ended within 2 s are cancelled.
    pub async fn serve(
        &self,
        listener: TcpListener,
        waiting: VecDeque<Accepted>,
        shutdown: CancellationToken,
    ) -> Result<(), FrontendError> {
        let sessions = tokio_util::sync::CancellationToken::new();
        let mut tasks = tokio::task::JoinSet::new();
        let connection_limit = ConnectionLimit::new(self.shared.config.max_pending);
        let failure = "cannot accept connections";
        for (socket, address) in waiting {
            let pending_connection = connection_limit.enter(address.ip()).await;
            let (shared, stop) = (self.shared.clone(), sessions.clone());
            tasks.spawn(connection::run(shared, socket, address, pending_connection, stop));
        }
        while let Some((socket, address, pending_connection)) =
            connection_limit.accept(&listener, &mut tasks, &shutdown, failure).await
        {
            let (shared, stop) = (self.shared.clone(), sessions.clone());
            tasks.spawn(connection::run(shared, socket, address, pending_connection, stop));
        }
        sessions.cancel();
        let mut drain = pin!(async { while tasks.join_next().await.is_some() {} });
        if tokio::time::timeout(PATIENCE, &mut drain).await.is_err() {
            self.shared.cancel_all();
            let _ = tokio::time::timeout(TELLING, drain).await;
        }
        Ok(())
    }
}
