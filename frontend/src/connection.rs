//! One connection: start-up, simple and extended protocol, COPY.
//!
//! A small task of its own reads and decodes messages, so that a client that goes away is noticed
//! while its statement runs. The connection's task does everything else. Whatever is awaited for a
//! statement is awaited under [`Connection::guarded`]: cancel request, `statement_timeout` and a
//! client that is gone end it; dropping a statement's future is its cancellation.
//!
//! Source: PostgreSQL 15 documentation, 55.2 (message flow).

use std::future::Future;
use std::net::SocketAddr;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use bytes::BytesMut;
use futures::{FutureExt, StreamExt};
use millrace_common::settings::SETTINGS;
use millrace_common::{SqlError, SqlState};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::copy::{self, CopyIn, CopyOut};
use crate::encoding::put_rows;
use crate::server::{Activity, Shared};
use crate::session::cursor::columns_of;
use crate::session::execute::no_statement;
use crate::session::prepare::{PortalState, Running};
use crate::session::{Outcome, Portal, RowSet, Session, canceled, timed_out};
use crate::wire::frontend::Bind;
use crate::wire::{
    Backend, FrontendMessage, ProtocolError, Startup, decode_message, decode_startup,
};

/// Bytes gathered before they are sent.
const SEND_BYTES: usize = 64 << 10;
/// Messages decoded ahead of the session.
const READ_AHEAD: usize = 32;
/// A client that does not say who it is has this long.
const STARTUP_TIMEOUT: Duration = Duration::from_secs(60);

type Message = Result<FrontendMessage, ProtocolError>;

/// Runs a connection to its end.
pub async fn run(
    shared: Arc<Shared>,
    socket: TcpStream,
    address: SocketAddr,
    stop: CancellationToken,
) {
    let _ = socket.set_nodelay(true);
    if let Err(e) = serve(shared, socket, address, stop).await {
        tracing::debug!(%address, error = %e, "connection ended");
    }
}

async fn serve(
    shared: Arc<Shared>,
    socket: TcpStream,
    address: SocketAddr,
    stop: CancellationToken,
) -> std::io::Result<()> {
    let (mut read, mut write) = socket.into_split();
    let mut buffer = BytesMut::with_capacity(4096);
    let startup = start(&shared, &mut read, &mut write, &mut buffer);
    let Ok(startup) = tokio::time::timeout(STARTUP_TIMEOUT, startup).await else { return Ok(()) };
    let Some((minor, parameters)) = startup? else { return Ok(()) };
    let mut out = Backend::default();
    let session = match open_session(&shared, &parameters, address) {
        Ok(opened) => opened,
        Err(e) => {
            out.error("FATAL", &e);
            return write.write_all(&out.buf).await;
        }
    };
    let (session, secret) = session;
    let pid = session.pid;
    let gone = CancellationToken::new();
    let (sender, messages) = mpsc::channel(READ_AHEAD);
    let reader = tokio::spawn(read_messages(read, buffer, sender, gone.clone()));
    let mut connection = Connection {
        session,
        out,
        write,
        messages,
        gone,
        stop,
        skip_to_sync: false,
        ends_string: false,
    };
    connection.greet(secret, minor, &parameters);
    let result = connection.serve().await;
    shared.unregister(pid);
    reader.abort();
    result
}

type Parameters = Vec<(String, String)>;

/// Answers negotiation requests until the startup packet; `None`: the connection is over.
async fn start(
    shared: &Shared,
    read: &mut OwnedReadHalf,
    write: &mut OwnedWriteHalf,
    buffer: &mut BytesMut,
) -> std::io::Result<Option<(u16, Parameters)>> {
    loop {
        match decode_startup(buffer) {
            Ok(None) => {
                if read.read_buf(buffer).await? == 0 {
                    return Ok(None);
                }
            }
            // No TLS and no GSS: the client may go on in the clear.
            Ok(Some(Startup::Ssl | Startup::GssEnc)) => write.write_all(b"N").await?,
            Ok(Some(Startup::Cancel { pid, secret })) => {
                shared.cancel(pid, secret);
                return Ok(None);
            }
            Ok(Some(Startup::Parameters { minor, parameters })) => {
                return Ok(Some((minor, parameters)));
            }
            Err(e) => {
                let mut out = Backend::default();
                out.error("FATAL", &protocol_violation(&e));
                write.write_all(&out.buf).await?;
                return Ok(None);
            }
        }
    }
}

fn protocol_violation(e: &ProtocolError) -> SqlError {
    let state = match e {
        ProtocolError::Version(..) => SqlState::FEATURE_NOT_SUPPORTED,
        _ => SqlState::PROTOCOL_VIOLATION,
    };
    SqlError::new(state, e.to_string())
}

/// Checks who wants in, and where to.
fn open_session(
    shared: &Arc<Shared>,
    parameters: &Parameters,
    address: SocketAddr,
) -> Result<(Session, i32), SqlError> {
    let get = |name: &str| parameters.iter().find(|(n, _)| n == name).map(|(_, v)| v.clone());
    let user = get("user").ok_or_else(|| {
        SqlError::new(
            SqlState::INVALID_AUTHORIZATION,
            "no PostgreSQL user name specified in startup packet",
        )
    })?;
    if !address.ip().is_loopback() {
        return Err(SqlError::new(
            SqlState::INVALID_AUTHORIZATION,
            format!("no entry for host \"{}\", user \"{user}\"", address.ip()),
        )
        .with_hint("Connections without a password are accepted from this machine only."));
    }
    if !shared.config.users.contains(&user) {
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
        pid: 0,
        user: user.clone(),
        database: database.clone(),
        application: get("application_name").unwrap_or_default(),
        query: String::new(),
        active: false,
        address: address.to_string(),
    };
    let (pid, secret) = shared.register(activity).ok_or_else(|| {
        SqlError::new(SqlState::TOO_MANY_CONNECTIONS, "sorry, too many clients already")
    })?;
    Ok((Session::new(shared.clone(), pid, user, database), secret))
}

async fn read_messages(
    mut read: OwnedReadHalf,
    mut buffer: BytesMut,
    sender: mpsc::Sender<Message>,
    gone: CancellationToken,
) {
    let _gone = gone.drop_guard();
    loop {
        match decode_message(&mut buffer) {
            Ok(None) => match read.read_buf(&mut buffer).await {
                Ok(n) if n > 0 => {}
                _ => return,
            },
            Ok(Some(message)) => {
                if sender.send(Ok(message)).await.is_err() {
                    return;
                }
            }
            Err(e) => {
                let _ = sender.send(Err(e)).await;
                return;
            }
        }
    }
}

struct Connection {
    session: Session,
    out: Backend,
    write: OwnedWriteHalf,
    messages: mpsc::Receiver<Message>,
    /// The client closed its side.
    gone: CancellationToken,
    /// The server ends.
    stop: CancellationToken,
    /// An extended message failed: the rest up to Sync is ignored.
    skip_to_sync: bool,
    /// The statement under way is the last of a query string.
    ends_string: bool,
}

/// A statement's failure: reported to the client, or the connection is broken.
enum Failure {
    Sql(SqlError),
    Io(std::io::Error),
}

impl From<SqlError> for Failure {
    fn from(e: SqlError) -> Failure {
        Failure::Sql(e)
    }
}

impl From<std::io::Error> for Failure {
    fn from(e: std::io::Error) -> Failure {
        Failure::Io(e)
    }
}

impl Connection {
    fn greet(&mut self, secret: i32, minor: u16, parameters: &Parameters) {
        let unknown: Vec<String> =
            parameters.iter().map(|p| p.0.clone()).filter(|n| n.starts_with("_pq_.")).collect();
        if minor > 0 || !unknown.is_empty() {
            self.out.negotiate_version(&unknown);
        }
        self.session.settings.preset("session_authorization", &self.session.user.clone());
        for (name, value) in parameters {
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
        self.out.authentication_ok();
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

    async fn serve(&mut self) -> std::io::Result<()> {
        self.flush().await?;
        loop {
            let message = tokio::select! {
                biased;
                () = self.stop.cancelled() => {
                    let e = SqlError::new(SqlState::ADMIN_SHUTDOWN, "terminating connection due to administrator command");
                    self.out.error("FATAL", &e);
                    return self.flush().await;
                }
                message = self.messages.recv() => message,
            };
            match message {
                None | Some(Ok(FrontendMessage::Terminate)) => return Ok(()),
                Some(Err(e)) => {
                    self.out.error("FATAL", &protocol_violation(&e));
                    return self.flush().await;
                }
                Some(Ok(message)) => self.dispatch(message).await?,
            }
        }
    }

    async fn dispatch(&mut self, message: FrontendMessage) -> std::io::Result<()> {
        if matches!(message, FrontendMessage::Sync) {
            self.skip_to_sync = false;
            // Without a block every Sync ends the implicit transaction and its portals.
            if !self.session.in_block() {
                self.session.portals.retain(|_, p| p.hold);
            }
            self.out.ready_for_query(self.session.status());
            return self.flush().await;
        }
        if let FrontendMessage::Query(text) = message {
            self.skip_to_sync = false;
            return self.simple_query(&text).await;
        }
        if self.skip_to_sync {
            return Ok(());
        }
        match self.extended(message).await {
            Ok(()) => Ok(()),
            Err(Failure::Io(e)) => Err(e),
            Err(Failure::Sql(e)) => {
                self.skip_to_sync = true;
                self.fail(&e);
                self.flush().await
            }
        }
    }

    fn fail(&mut self, e: &SqlError) {
        self.flush_notices();
        self.out.error("ERROR", e);
        self.session.fail_block();
    }

    async fn simple_query(&mut self, text: &str) -> std::io::Result<()> {
        match self.run_string(text).await {
            Ok(()) => {}
            Err(Failure::Io(e)) => return Err(e),
            Err(Failure::Sql(e)) => self.fail(&e),
        }
        self.out.ready_for_query(self.session.status());
        self.flush().await
    }

    async fn run_string(&mut self, text: &str) -> Result<(), Failure> {
        let statements = crate::statements::parse(text)?;
        if statements.is_empty() {
            self.out.empty_query();
        }
        for (i, parsed) in statements.iter().enumerate() {
            self.begin_statement(&parsed.text);
            if statements.len() > 1 {
                self.session.begin_implicit();
            }
            self.ends_string = i + 1 == statements.len();
            let result = self.run_statement(parsed).await;
            self.ends_string = false;
            self.end_statement();
            result?;
        }
        Ok(())
    }

    /// The command tag. The last statement of a string is complete when all of them are committed.
    async fn conclude(&mut self, tag: &str) -> Result<(), Failure> {
        if self.ends_string {
            let (cancel, timeout) = (self.session.cancel.clone(), self.timeout());
            guarded(&self.gone, &cancel, timeout, self.session.commit_implicit()).await?;
        }
        self.complete(tag);
        Ok(())
    }

    async fn run_statement(
        &mut self,
        parsed: &millrace_planner::ParsedStatement,
    ) -> Result<(), Failure> {
        let outcome = guarded(
            &self.gone,
            &self.session.cancel.clone(),
            self.timeout(),
            self.session.execute(parsed, &[]),
        )
        .await?;
        self.flush_notices();
        match outcome {
            Outcome::Empty => self.out.empty_query(),
            Outcome::Command(tag) => self.conclude(&tag).await?,
            Outcome::Rows(rows) => {
                self.out.row_description(&rows.fields, &[]);
                let mut running = Running { rows, current: None, sent: 0 };
                self.send_rows(&mut running, &[], usize::MAX).await?;
                let tag = running.rows.tag.replace("{n}", &running.sent.to_string());
                self.conclude(&tag).await?;
            }
            Outcome::CopyIn(copy) => self.copy_in(*copy).await?,
            Outcome::CopyOut(copy) => self.copy_out(*copy).await?,
        }
        Ok(())
    }

    fn begin_statement(&mut self, text: &str) {
        self.session.cancel = self.session.shared.begin_statement(self.session.pid, text);
    }

    fn end_statement(&mut self) {
        let application = self.session.settings.get("application_name").unwrap_or_default();
        self.session.shared.end_statement(self.session.pid, application);
    }

    fn timeout(&self) -> Option<Duration> {
        self.session.settings.millis("statement_timeout").map(Duration::from_millis)
    }

    /// The command tag, after what SET changed.
    fn complete(&mut self, tag: &str) {
        for name in std::mem::take(&mut self.session.changed) {
            if let Ok(value) = self.session.settings.get(name) {
                self.out.parameter_status(name, value);
            }
        }
        self.out.command_complete(tag);
    }

    fn flush_notices(&mut self) {
        for (severity, notice) in std::mem::take(&mut self.session.notices) {
            self.out.notice(severity, &notice);
        }
    }

    async fn flush(&mut self) -> std::io::Result<()> {
        self.write.write_all_buf(&mut self.out.buf).await
    }

    async fn extended(&mut self, message: FrontendMessage) -> Result<(), Failure> {
        match message {
            FrontendMessage::Parse { name, sql, types } => self.parse(name, &sql, &types)?,
            FrontendMessage::Bind(bind) => self.bind(bind)?,
            FrontendMessage::Describe { portal, name } => self.describe(portal, &name)?,
            FrontendMessage::Execute { portal, max_rows } => {
                self.execute(&portal, max_rows).await?
            }
            FrontendMessage::Close { portal, name } => {
                if portal {
                    self.session.portals.remove(&name);
                } else {
                    self.session.prepared.remove(&name);
                }
                self.out.close_complete();
            }
            FrontendMessage::Flush => self.flush().await?,
            // What is left of a COPY that failed, and passwords nobody asked for.
            _ => {}
        }
        if self.out.buf.len() >= SEND_BYTES {
            self.flush().await?;
        }
        Ok(())
    }

    fn parse(&mut self, name: String, sql: &str, types: &[u32]) -> Result<(), SqlError> {
        if !name.is_empty() && self.session.prepared.contains_key(&name) {
            return Err(SqlError::new(
                SqlState("42P05"),
                format!("prepared statement \"{name}\" already exists"),
            ));
        }
        if matches!(self.session.block, crate::session::Block::Failed { .. }) {
            let ends = sql.trim_start().get(..4).map(str::to_ascii_uppercase);
            if !matches!(ends.as_deref(), Some("ROLL" | "COMM" | "ABOR" | "END" | "END;")) {
                return Err(crate::session::transaction::aborted());
            }
        }
        let prepared = self.session.prepare(sql, types)?;
        self.session.prepared.insert(name, Arc::new(prepared));
        self.out.parse_complete();
        Ok(())
    }

    fn bind(&mut self, bind: Bind) -> Result<(), SqlError> {
        let prepared = self
            .session
            .prepared
            .get(&bind.statement)
            .cloned()
            .ok_or_else(|| no_statement(&bind.statement))?;
        if !bind.portal.is_empty() && self.session.portals.contains_key(&bind.portal) {
            return Err(SqlError::new(
                SqlState("42P03"),
                format!("portal \"{}\" already exists", bind.portal),
            ));
        }
        let values = Session::bind_values(&prepared, &bind.formats, &bind.params)?;
        let portal = Portal {
            prepared,
            values,
            formats: bind.result_formats,
            state: PortalState::Ready,
            hold: false,
        };
        self.session.portals.insert(bind.portal, portal);
        self.out.bind_complete();
        Ok(())
    }

    fn describe(&mut self, portal: bool, name: &str) -> Result<(), SqlError> {
        let (fields, formats) = if portal {
            let portal = self.session.portals.get(name).ok_or_else(|| no_portal(name))?;
            (portal.prepared.fields.clone(), portal.formats.clone())
        } else {
            let prepared = self.session.prepared.get(name).ok_or_else(|| no_statement(name))?;
            self.out.parameter_description(&prepared.param_oids);
            (prepared.fields.clone(), vec![])
        };
        match fields {
            Some(fields) => self.out.row_description(&fields, &formats),
            None => self.out.no_data(),
        }
        Ok(())
    }

    async fn execute(&mut self, name: &str, max_rows: usize) -> Result<(), Failure> {
        let mut portal = self.session.portals.remove(name).ok_or_else(|| no_portal(name))?;
        let text = portal.prepared.statement.as_ref().map_or(String::new(), |s| s.text.clone());
        self.begin_statement(&text);
        let result = self.execute_portal(&mut portal, max_rows).await;
        self.end_statement();
        self.session.portals.insert(name.to_owned(), portal);
        result
    }

    async fn execute_portal(
        &mut self,
        portal: &mut Portal,
        max_rows: usize,
    ) -> Result<(), Failure> {
        if matches!(portal.state, PortalState::Ready) {
            let Some(parsed) = portal.prepared.statement.clone() else {
                self.out.empty_query();
                return Ok(());
            };
            portal.state = PortalState::Done;
            let (cancel, timeout) = (self.session.cancel.clone(), self.timeout());
            let outcome = guarded(
                &self.gone,
                &cancel,
                timeout,
                self.session.execute(&parsed, &portal.values),
            )
            .await?;
            self.flush_notices();
            match outcome {
                Outcome::Empty => self.out.empty_query(),
                Outcome::Command(tag) => self.complete(&tag),
                Outcome::CopyIn(copy) => self.copy_in(*copy).await?,
                Outcome::CopyOut(copy) => self.copy_out(*copy).await?,
                Outcome::Rows(rows) => {
                    portal.state =
                        PortalState::Running(Box::new(parking_lot::Mutex::new(Running {
                            rows,
                            current: None,
                            sent: 0,
                        })));
                }
            }
            if matches!(portal.state, PortalState::Done) {
                return Ok(());
            }
        }
        let PortalState::Running(running) = &mut portal.state else {
            self.complete("SELECT 0");
            return Ok(());
        };
        let running = running.get_mut();
        let limit = if max_rows == 0 { usize::MAX } else { max_rows };
        let before = running.sent;
        if self.send_rows(running, &portal.formats, limit).await? {
            let sent = running.sent - before;
            let tag = running.rows.tag.replace("{n}", &sent.to_string());
            portal.state = PortalState::Done;
            self.complete(&tag);
        } else {
            self.out.portal_suspended();
        }
        Ok(())
    }

    /// Sends at most `limit` rows; whether that was all there are.
    async fn send_rows(
        &mut self,
        running: &mut Running,
        formats: &[i16],
        limit: usize,
    ) -> Result<bool, Failure> {
        let (cancel, timeout) = (self.session.cancel.clone(), self.timeout());
        let deadline = timeout.map(|t| tokio::time::Instant::now() + t);
        let mut left = limit;
        loop {
            while let Some((columns, at, rows)) = &mut running.current {
                let n = (*rows - *at).min(left).min(1024);
                put_rows(columns, formats, *at..*at + n, &mut self.out)?;
                *at += n;
                left -= n;
                running.sent += n as u64;
                if at == rows {
                    running.current = None;
                }
                if self.out.buf.len() >= SEND_BYTES {
                    let rest =
                        deadline.map(|d| d.saturating_duration_since(tokio::time::Instant::now()));
                    let (write, buf) = (&mut self.write, &mut self.out.buf);
                    let send = async { Ok(write.write_all_buf(buf).await) };
                    guarded(&self.gone, &cancel, rest, send).await??;
                }
                if left == 0 {
                    return Ok(false);
                }
            }
            let rest = deadline.map(|d| d.saturating_duration_since(tokio::time::Instant::now()));
            let next = async { running.rows.stream.next().await.transpose() };
            match guarded(&self.gone, &cancel, rest, next).await? {
                None => return Ok(true),
                Some(batch) if batch.num_rows() == 0 => {}
                Some(batch) => {
                    let columns = columns_of(&batch, &running.rows.fields)?;
                    running.current = Some((columns, 0, batch.num_rows()));
                }
            }
        }
    }

    /// Takes COPY data until the client is done with it.
    async fn copy_in(&mut self, mut copy: CopyIn) -> Result<(), Failure> {
        self.out.copy_in_response(copy.reader.columns());
        self.flush().await?;
        let (cancel, timeout, gone) =
            (self.session.cancel.clone(), self.timeout(), self.gone.clone());
        loop {
            let next = async { Ok(self.messages.recv().await) };
            match guarded(&CancellationToken::new(), &cancel, timeout, next).await? {
                Some(Ok(FrontendMessage::CopyData(data))) => copy.push(&data)?,
                Some(Ok(FrontendMessage::CopyDone)) => break,
                Some(Ok(FrontendMessage::CopyFail(reason))) => {
                    let e = SqlError::new(
                        SqlState::QUERY_CANCELED,
                        format!("COPY from stdin failed: {reason}"),
                    );
                    return Err(e.into());
                }
                Some(Ok(FrontendMessage::Flush | FrontendMessage::Sync)) => {}
                Some(Ok(_)) => {
                    return Err(SqlError::new(
                        SqlState::PROTOCOL_VIOLATION,
                        "unexpected message type during COPY from stdin",
                    )
                    .into());
                }
                Some(Err(e)) => return Err(protocol_violation(&e).into()),
                None => return Err(Failure::Io(std::io::ErrorKind::UnexpectedEof.into())),
            }
        }
        let tag = guarded(&gone, &cancel, timeout, copy.finish(&self.session)).await?;
        self.conclude(&tag).await
    }

    async fn copy_out(&mut self, copy: CopyOut) -> Result<(), Failure> {
        let CopyOut { rows: RowSet { fields, mut stream, .. }, format } = copy;
        let (cancel, timeout) = (self.session.cancel.clone(), self.timeout());
        self.out.copy_out_response(fields.len());
        let (mut line, mut text) = (BytesMut::new(), BytesMut::new());
        if format.header {
            copy::writer::header(&fields, &format, &mut line);
            self.out.copy_data(&line);
        }
        let mut count = 0u64;
        loop {
            let next = async { stream.next().await.transpose() };
            let Some(batch) = guarded(&self.gone, &cancel, timeout, next).await? else { break };
            let columns = columns_of(&batch, &fields)?;
            for row in 0..batch.num_rows() {
                line.clear();
                copy::writer::row(&columns, row, &format, &mut text, &mut line)?;
                self.out.copy_data(&line);
                if self.out.buf.len() >= SEND_BYTES {
                    let (write, buf) = (&mut self.write, &mut self.out.buf);
                    let send = async { Ok(write.write_all_buf(buf).await) };
                    guarded(&self.gone, &cancel, timeout, send).await??;
                }
            }
            count += batch.num_rows() as u64;
        }
        self.out.copy_done();
        self.conclude(&format!("COPY {count}")).await
    }
}

fn no_portal(name: &str) -> SqlError {
    SqlError::new(SqlState::INVALID_CURSOR_NAME, format!("portal \"{name}\" does not exist"))
}

/// Awaits under the statement's cancellation, its timeout and the client's presence. A panic, which may
/// come from a library, is an error of the statement and leaves the connection.
async fn guarded<T>(
    gone: &CancellationToken,
    cancel: &CancellationToken,
    timeout: Option<Duration>,
    work: impl Future<Output = Result<T, SqlError>>,
) -> Result<T, SqlError> {
    let expired = async {
        match timeout {
            Some(t) => tokio::time::sleep(t).await,
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        biased;
        () = cancel.cancelled() => Err(canceled()),
        () = gone.cancelled() => Err(canceled()),
        result = AssertUnwindSafe(work).catch_unwind() => result.unwrap_or_else(|_| {
            Err(SqlError::internal("the statement panicked")
                .with_detail("Only this statement is affected. The server's log says where."))
        }),
        () = expired => Err(timed_out()),
    }
}
