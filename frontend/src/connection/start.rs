//! From an accepted socket to a session: TLS and version negotiation, who wants in, the greeting.

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use bytes::BytesMut;
use millrace_common::settings::SETTINGS;
use millrace_common::{SqlError, SqlState};
use pgwire::messages::SslNegotiationMetaMessage as Negotiation;
use pgwire::messages::cancel::CancelRequest;
use pgwire::messages::response::{GssEncResponse, SslResponse};
use pgwire::messages::startup::{Authentication, PasswordMessageFamily, Startup};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::reading::{READ_AHEAD, read_messages};
use super::{Connection, Reader, Writer};
use crate::auth;
use crate::connection_limit::PendingConnection;
use crate::identification;
use crate::server::{Activity, Shared, shown_name};
use crate::session::Session;
use crate::wire::{
    Backend, FrontendMessage, ProtocolError, decode_password, decode_startup, sasl_initial,
};

type Parameters = BTreeMap<String, String>;

/// Runs a connection to its end.
pub async fn run(
    shared: Arc<Shared>,
    socket: TcpStream,
    address: SocketAddr,
    pending_connection: PendingConnection,
    stop: CancellationToken,
) {
    let _ = socket.set_nodelay(true);
    if let Err(e) = serve(shared, socket, address, pending_connection, stop).await {
        tracing::debug!(%address, error = %e, "connection ended");
    }
}

/// A connection on which the client has said what it wants.
struct Opening {
    read: Reader,
    write: Writer,
    buffer: BytesMut,
    startup: Startup,
    encrypted: bool,
}

impl Opening {
    /// The next message of a client that is proving who it is.
    async fn password_message(
        &mut self,
    ) -> std::io::Result<Result<PasswordMessageFamily, SqlError>> {
        loop {
            match decode_password(&mut self.buffer) {
                Ok(Some(FrontendMessage::PasswordMessageFamily(m))) => return Ok(Ok(m)),
                Ok(Some(_)) => {
                    let message = "expected SASL response, got another message";
                    return Ok(Err(SqlError::new(SqlState::PROTOCOL_VIOLATION, message)));
                }
                Err(e) => return Ok(Err(protocol_violation(&e))),
                Ok(None) => {
                    if self.read.read_buf(&mut self.buffer).await? == 0 {
                        return Err(std::io::ErrorKind::UnexpectedEof.into());
                    }
                }
            }
        }
    }

    async fn send(&mut self, message: Authentication) -> std::io::Result<()> {
        let mut out = Backend::default();
        out.authentication(&message);
        self.write.write_all(&out.buf).await?;
        self.write.flush().await
    }
}

/// Asks for a password where one is needed. The outer error is the connection's, the inner one the
/// client's to see.
async fn authenticate(
    shared: &Shared,
    opening: &mut Opening,
    address: SocketAddr,
) -> std::io::Result<Result<(), SqlError>> {
    let config = &shared.config;
    let is_believed = config.trust_everybody || is_on_this_machine(address);
    let needs_none = is_believed && !config.require_password;
    let Some(user) = opening.startup.parameters.get("user").cloned() else {
        // The session is refused with the right words.
        return Ok(Ok(()));
    };
    // Another frontend may have created or changed the user. Where a password is asked for, all wait alike: how long tells
    // nobody who is known.
    if !needs_none || !shared.has_user(&user) {
        shared.cluster.newest_definitions().await;
    }
    if needs_none {
        return Ok(Ok(()));
    }
    let tls = shared.config.tls.as_ref().filter(|_| opening.encrypted);
    let (scram, mechanisms) = auth::scram(tls);
    let verifier = shared.cluster.users().remove(&user).flatten();
    let refused = || Ok(Err(auth::wrong_password(&user)));
    opening.send(Authentication::SASL(mechanisms.clone())).await?;
    let first = match opening.password_message().await? {
        Ok(first) => first,
        Err(e) => return Ok(Err(e)),
    };
    let Ok((mechanism, data)) = sasl_initial(&first) else { return refused() };
    if !mechanisms.contains(&mechanism) {
        return refused();
    }
    let own = &shared.config.own_secret;
    let secret = auth::challenge_of(&user, verifier.as_deref(), own);
    // The library parses what a stranger sent: whatever it does with it ends here.
    let begin = AssertUnwindSafe(|| scram.on_client_first_message_with_secret(&data, secret));
    let Ok(Ok((text, waiting))) = catch_unwind(begin) else { return refused() };
    opening.send(Authentication::SASLContinue(text.into())).await?;
    let last = match opening.password_message().await? {
        Ok(last) => last,
        Err(e) => return Ok(Err(e)),
    };
    let Ok(last) = last.into_sasl_response() else { return refused() };
    let finish = AssertUnwindSafe(|| waiting.on_client_final_message(&last.data));
    match catch_unwind(finish) {
        Ok(Ok(text)) if verifier.is_some() => {
            opening.send(Authentication::SASLFinal(text.into())).await?;
            Ok(Ok(()))
        }
        _ => refused(),
    }
}

/// Whether a client is on this machine, also one of IPv4 at a port of IPv6.
fn is_on_this_machine(address: SocketAddr) -> bool {
    address.ip().to_canonical().is_loopback()
}

/// A client that has a session.
struct Entered {
    opening: Opening,
    session: Session,
    secret: i32,
}

/// From a socket to a session; `None`: the connection is over. Once there is a session, nothing is awaited.
async fn enter(
    shared: &Arc<Shared>,
    socket: TcpStream,
    address: SocketAddr,
) -> std::io::Result<Option<Entered>> {
    let local = socket.local_addr().ok();
    let Some(mut opening) = open(shared, socket).await? else { return Ok(None) };
    let authenticated = match shared.check_begun() {
        Ok(()) => authenticate(shared, &mut opening, address).await?,
        Err(error) => Err(error),
    };
    let opened = authenticated
        .and_then(|()| open_session(shared, &opening.startup.parameters, address, local));
    match opened {
        Ok((session, secret)) => Ok(Some(Entered { opening, session, secret })),
        Err(e) => {
            let mut out = Backend::default();
            out.error("FATAL", &e);
            opening.write.write_all(&out.buf).await?;
            opening.write.shutdown().await?;
            Ok(None)
        }
    }
}

async fn serve(
    shared: Arc<Shared>,
    socket: TcpStream,
    address: SocketAddr,
    pending_connection: PendingConnection,
    stop: CancellationToken,
) -> std::io::Result<()> {
    let entered = tokio::select! {
        biased;
        () = pending_connection.lost() => return Err(std::io::Error::other("others wait to come in")),
        () = tokio::time::sleep(shared.config.authentication_timeout) => {
            return Err(std::io::ErrorKind::TimedOut.into());
        }
        entered = enter(&shared, socket, address) => entered?,
    };
    drop(pending_connection);
    let Some(Entered { opening, session, secret }) = entered else { return Ok(()) };
    let Opening { read, write, buffer, startup, .. } = opening;
    let out = Backend::default();
    let pid = session.pid;
    let stop = shared.stop_token(pid, &stop);
    let gone = CancellationToken::new();
    let (sender, messages) = mpsc::channel(READ_AHEAD);
    let reader =
        tokio::spawn(read_messages(read, buffer, Arc::clone(&shared), sender, gone.clone()));
    let mut connection = Connection {
        session,
        out,
        write,
        messages,
        ahead: VecDeque::new(),
        memory: None,
        gone,
        stop,
        waiting: false,
        skip_to_sync: false,
        ends_string: false,
        is_committed: false,
    };
    connection.greet(secret, startup);
    let result = connection.serve().await;
    shared.unregister(pid);
    reader.abort();
    result
}

/// Answers negotiation requests until the startup packet; `None`: the connection is over.
async fn open(shared: &Shared, mut socket: TcpStream) -> std::io::Result<Option<Opening>> {
    let mut buffer = BytesMut::with_capacity(4096);
    match negotiate(shared, &mut socket, &mut buffer, true).await? {
        Negotiated::Over => Ok(None),
        Negotiated::Clear(startup) => {
            let (read, write) = socket.into_split();
            let (read, write) = (Box::new(read), Box::new(write));
            Ok(Some(Opening { read, write, buffer, startup, encrypted: false }))
        }
        Negotiated::Tls(acceptor) => {
            let mut socket = acceptor.accept(socket).await?;
            match negotiate(shared, &mut socket, &mut buffer, false).await? {
                Negotiated::Clear(startup) => {
                    let (read, write) = tokio::io::split(socket);
                    let (read, write) = (Box::new(read), Box::new(write));
                    Ok(Some(Opening { read, write, buffer, startup, encrypted: true }))
                }
                Negotiated::Over | Negotiated::Tls(_) => Ok(None),
            }
        }
    }
}

enum Negotiated {
    /// Nothing more to do: a cancel request, a client gone or one that was refused.
    Over,
    /// The startup packet came.
    Clear(Startup),
    /// The client wants TLS now, and has been told yes.
    Tls(tokio_rustls::TlsAcceptor),
}

async fn negotiate<S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin>(
    shared: &Shared,
    socket: &mut S,
    buffer: &mut BytesMut,
    may_encrypt: bool,
) -> std::io::Result<Negotiated> {
    let mut out = Backend::default();
    loop {
        if let identification::Opening::Question(asked) = identification::opening(buffer) {
            if let Some(answer) = shared.config.identification.answer(&asked) {
                socket.write_all(&answer).await?;
            }
            return Ok(Negotiated::Over);
        }
        match decode_startup(buffer) {
            Ok(None) => {
                if socket.read_buf(buffer).await? == 0 {
                    return Ok(Negotiated::Over);
                }
            }
            Ok(Some(FrontendMessage::SslNegotiation(Negotiation::PostgresSsl(_)))) => {
                let tls = shared.config.tls.clone().filter(|_| may_encrypt);
                // What came in the clear behind the request could be anybody's (CVE-2021-23214).
                if tls.is_some() && !buffer.is_empty() {
                    return Ok(Negotiated::Over);
                }
                out.put(if tls.is_some() { &SslResponse::Accept } else { &SslResponse::Refuse });
                socket.write_all_buf(&mut out.buf).await?;
                if let Some(config) = tls {
                    return Ok(Negotiated::Tls(config.config.into()));
                }
            }
            Ok(Some(FrontendMessage::SslNegotiation(_))) => {
                out.put(&GssEncResponse::Refuse);
                socket.write_all_buf(&mut out.buf).await?;
            }
            Ok(Some(FrontendMessage::CancelRequest(CancelRequest { pid, secret_key, .. }))) => {
                shared.serve_cancel(pid, &secret_key).await;
                return Ok(Negotiated::Over);
            }
            Ok(Some(FrontendMessage::Startup(startup))) => return Ok(Negotiated::Clear(startup)),
            Ok(Some(_)) => return Ok(Negotiated::Over),
            Err(e) => {
                out.error("FATAL", &protocol_violation(&e));
                socket.write_all_buf(&mut out.buf).await?;
                return Ok(Negotiated::Over);
            }
        }
    }
}

pub(super) fn protocol_violation(e: &ProtocolError) -> SqlError {
    let state = match e {
        ProtocolError::Version(..) => SqlState::FEATURE_NOT_SUPPORTED,
        ProtocolError::Encoding => SqlState("22021"),
        _ => SqlState::PROTOCOL_VIOLATION,
    };
    SqlError::new(state, e.to_string())
}

/// Checks who wants in, and where to.
fn open_session(
    shared: &Arc<Shared>,
    parameters: &Parameters,
    address: SocketAddr,
    local: Option<SocketAddr>,
) -> Result<(Session, i32), SqlError> {
    let get = |name: &str| parameters.get(name).cloned();
    let user = get("user").ok_or_else(|| {
        SqlError::new(
            SqlState::INVALID_AUTHORIZATION,
            "no PostgreSQL user name specified in startup packet",
        )
    })?;
    if !shared.has_user(&user) {
        return Err(SqlError::new(
            SqlState::INVALID_AUTHORIZATION,
            format!("role \"{user}\" does not exist"),
        )
        .with_hint(format!("Connect as one of: {}.", shared.config.users.join(", "))));
    }
    let database = get("database").filter(|d| !d.is_empty()).unwrap_or_else(|| user.clone());
    if database != shared.config.database {
        return Err(SqlError::new(
            SqlState::INVALID_CATALOG_NAME,
            format!("database \"{database}\" does not exist"),
        )
        .with_hint(format!("Connect to database \"{}\".", shared.config.database)));
    }
    let activity = Activity {
        user: user.clone(),
        database: database.clone(),
        application: shown_name(&get("application_name").unwrap_or_default()).to_owned(),
        address: address.to_string(),
        server_address: local.map(|l| l.to_string()).unwrap_or_default(),
        ..Activity::default()
    };
    let (pid, secret) = shared.register(activity)?;
    Ok((Session::new(shared.clone(), pid, user, database), secret))
}

impl Connection {
    fn greet(&mut self, secret: i32, startup: Startup) {
        let Startup { protocol_number_minor: minor, parameters, .. } = startup;
        let unknown: Vec<String> =
            parameters.keys().filter(|n| n.starts_with("_pq_.")).cloned().collect();
        if minor > 0 || !unknown.is_empty() {
            self.out.negotiate_version(unknown);
        }
        self.session.settings.preset("session_authorization", &self.session.user.clone());
        for (name, value) in &parameters {
            let result = match name.as_str() {
                "user" | "database" | "replication" => Ok(()),
                "options" => self.startup_options(value),
                n if n.starts_with("_pq_.") => Ok(()),
                _ => self.session.settings.set_base(name, value).map(|_| ()),
            };
            // A client cannot connect at all if its zone or style is refused: say so and go on.
            if let Err(e) = result {
                self.session.notices.push(("WARNING", e));
            }
        }
        self.out.authentication(&Authentication::Ok);
        for setting in SETTINGS.iter().filter(|s| s.report) {
            self.out.parameter_status(setting.name, self.session.settings.value(setting));
        }
        self.out.backend_key_data(self.session.pid, secret);
        self.flush_notices();
        self.out.ready_for_query(self.session.status());
    }

    /// `-c name=value` and `--name=value` of the startup packet's options.
    fn startup_options(&mut self, options: &str) -> Result<(), SqlError> {
        let mut words = options.split_whitespace();
        while let Some(word) = words.next() {
            let assignment = match word {
                "-c" => words.next(),
                w => w.strip_prefix("--").or_else(|| w.strip_prefix("-c")),
            };
            if let Some((name, value)) = assignment.and_then(|a| a.split_once('=')) {
                self.session.settings.set_base(&name.replace('-', "_"), value)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_of_this_machine_are_known_by_either_protocol() {
        let is_own = |address: &str| is_on_this_machine(address.parse().unwrap());
        for own in ["127.0.0.1:1", "[::1]:1", "[::ffff:127.0.0.1]:1"] {
            assert!(is_own(own), "{own}");
        }
        for other in ["10.0.0.1:1", "[2001:db8::1]:1", "[::ffff:10.0.0.1]:1"] {
            assert!(!is_own(other), "{other}");
        }
    }
}
