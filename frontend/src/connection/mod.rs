//! One connection: start-up, simple and extended protocol, COPY.
//!
//! A small task of its own reads and decodes messages, so that a client that goes away is noticed
//! while its statement runs. The connection's task does everything else. Whatever is awaited for a
//! statement is awaited under [`guarded`]: cancel request, `statement_timeout` and a
//! client that is gone end it; dropping a statement's future is its cancellation. Planning, which awaits nothing,
//! asks for them itself ([`Ending`]). A message whose handling panics is an error of that message and leaves the connection.
//!
//! Source: PostgreSQL 15 documentation, 55.2 (message flow).

mod copy;
mod extended;
mod live;
mod pipeline;
mod reading;
mod request;
mod rows;
mod simple;
mod start;

use std::collections::VecDeque;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::{Duration, Instant};

use datafusion::execution::memory_pool::MemoryReservation;
use futures::FutureExt;
use millrace_common::{SqlError, SqlState};
use millrace_functions::interrupt::Interrupt;
use millrace_planner::ParsedStatement;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::query::planning::Held;
use crate::server::IDLE;
use crate::session::{Block, Session, Step, busy, canceled, timed_out};
use crate::wire::{Backend, FrontendMessage, TransactionStatus};
use reading::{Message, Unread};

pub(crate) use request::as_own_request;
pub use start::run;

/// Bytes gathered before they are sent.
const SEND_BYTES: usize = 64 << 10;
/// How long a connection that ends waits for a client that does not read.
const UNREAD: Duration = Duration::from_secs(3);
/// The two halves of a socket, plain or under TLS.
type Reader = Box<dyn AsyncRead + Send + Unpin>;
type Writer = Box<dyn AsyncWrite + Send + Unpin>;

struct Connection {
    session: Session,
    out: Backend,
    write: Writer,
    messages: mpsc::Receiver<Message>,
    /// Messages that have been looked at and not handled.
    ahead: VecDeque<Message>,
    /// What the message that is being handled takes from the memory of queries.
    memory: Option<MemoryReservation>,
    /// The client closed its side.
    gone: CancellationToken,
    /// The server ends.
    stop: CancellationToken,
    /// The client has been told that it is its turn, and has sent nothing since.
    waiting: bool,
    /// An extended message failed: the rest up to Sync is ignored.
    skip_to_sync: bool,
    /// The statement under way is the last of a query string.
    ends_string: bool,
    /// The statement under way has been committed, and has not been answered to its end.
    is_committed: bool,
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
    async fn serve(&mut self) -> std::io::Result<()> {
        self.flush().await?;
        loop {
            let stop = self.stop.clone();
            let idle = elapsed(self.idle_limit());
            let message = tokio::select! {
                biased;
                () = stop.cancelled() => {
                    self.out.error("FATAL", &terminated());
                    return self.flush().await;
                }
                message = self.receive() => message,
                () = idle => {
                    self.out.error("FATAL", &idle_too_long());
                    return self.flush().await;
                }
            };
            self.waiting = false;
            match message {
                None | Some(Ok(FrontendMessage::Terminate(_))) => return Ok(()),
                Some(Err(Unread::Protocol(e))) => {
                    self.out.error("FATAL", &start::protocol_violation(&e));
                    return self.flush().await;
                }
                Some(Err(Unread::TooLarge { kind, error })) => self.refuse(kind, &error).await?,
                Some(Ok(message)) => self.dispatch(message).await?,
            }
        }
    }

    /// How long the client may leave its transaction as it is.
    fn idle_limit(&self) -> Option<Duration> {
        let limit = || self.session.settings.millis("idle_in_transaction_session_timeout");
        (self.waiting && self.session.in_block()).then(limit)?.map(Duration::from_millis)
    }

    /// Tells the client that it is its turn.
    async fn ready(&mut self) -> std::io::Result<()> {
        self.waiting = true;
        self.out.ready_for_query(self.session.status());
        self.flush().await
    }

    async fn dispatch(&mut self, message: FrontendMessage) -> std::io::Result<()> {
        if let FrontendMessage::Sync(_) = message {
            return self.sync().await;
        }
        if let FrontendMessage::Query(query) = message {
            self.skip_to_sync = false;
            return self.simple_query(&query.query).await;
        }
        if self.skip_to_sync {
            return Ok(());
        }
        let work = AssertUnwindSafe(self.extended(message)).catch_unwind().await;
        match work.unwrap_or_else(|_| Err(panicked().into())) {
            Ok(()) => Ok(()),
            Err(Failure::Io(e)) => Err(e),
            Err(Failure::Sql(e)) => {
                self.skip_to_sync = true;
                self.fail(&e);
                self.flush().await
            }
        }
    }

    /// Answers a message that there was no memory for.
    async fn refuse(&mut self, kind: u8, e: &SqlError) -> std::io::Result<()> {
        match kind {
            b'Q' => {
                self.skip_to_sync = false;
                self.fail(e);
                self.ready().await
            }
            // Data of a COPY that has ended.
            b'd' => Ok(()),
            _ if self.skip_to_sync => Ok(()),
            _ => {
                self.skip_to_sync = true;
                self.fail(e);
                self.flush().await
            }
        }
    }

    fn fail(&mut self, e: &SqlError) {
        self.ends_string = false;
        self.session.last_of_many = false;
        self.flush_notices();
        if std::mem::take(&mut self.is_committed) {
            self.out.error("ERROR", &after_commit(e));
        } else if self.stop.is_cancelled() && e.state == SqlState::QUERY_CANCELED {
            // A statement that was cut off because its connection ends says so.
            self.out.error("ERROR", &terminated());
        } else {
            self.out.error("ERROR", e);
        }
        self.session.end_fetch(false);
        self.session.fail_block();
        self.session.end_string();
        self.end_statement();
    }

    fn begin_statement(&mut self, text: &str) {
        self.is_committed = false;
        self.session.cancel = self.session.shared.begin_statement(self.session.pid, text);
    }

    /// Parses a string as a statement that can be cancelled, whose memory is counted as long as what comes with it lives.
    fn parse_string(&mut self, sql: &str) -> Result<(Vec<ParsedStatement>, Arc<Held>), SqlError> {
        self.begin_statement(sql);
        let parsed = self.counted(|_| crate::statements::parse(sql));
        self.end_statement();
        parsed
    }

    /// Does work that awaits nothing as a step of the statement under way; its memory is counted as long as what comes
    /// with its result lives.
    fn counted<T>(
        &mut self,
        work: impl FnOnce(&Session) -> Result<T, SqlError>,
    ) -> Result<(T, Arc<Held>), SqlError> {
        let step = self.session.begin_step();
        let held = self.session.plan_memory();
        let ending = Ending::new(&self.gone, &self.session.cancel, self.timeout(), &step);
        let work = || busy(|| work(&self.session));
        let result = Interrupt::new(move || ending.error()).during(|| held.during(work));
        step.free();
        Ok((result?, held))
    }

    fn end_statement(&mut self) {
        let application = self.session.settings.get("application_name").unwrap_or_default();
        let resting = match self.session.status() {
            TransactionStatus::Idle if !self.session.in_transaction() => IDLE,
            TransactionStatus::Idle | TransactionStatus::Transaction => "idle in transaction",
            TransactionStatus::Error => "idle in transaction (aborted)",
        };
        self.session.shared.end_statement(self.session.pid, application, resting);
    }

    fn timeout(&self) -> Option<Duration> {
        self.session.settings.millis("statement_timeout").map(Duration::from_millis)
    }

    /// After a step has ended well. No error takes back rows that it has committed; an implicit block has written no others,
    /// and ends with them.
    fn note_commit(&mut self, step: &Step) {
        if step.entered().is_set() {
            self.is_committed = true;
            self.session.end_implicit();
        }
    }

    /// The command tag. The last statement of a string is complete when all of them are committed.
    async fn conclude(&mut self, tag: &str) -> Result<(), Failure> {
        self.commit_string().await?;
        self.complete(tag);
        Ok(())
    }

    /// After the last statement of a string commits all of them.
    async fn commit_string(&mut self) -> Result<(), SqlError> {
        if !self.ends_string {
            return Ok(());
        }
        // Nothing else waits for a commit here: whoever cancels by now comes too late.
        if matches!(self.session.block, Block::Implicit) {
            let (cancel, timeout) = (self.session.cancel.clone(), self.timeout());
            let step = self.session.begin_step();
            guarded(&self.gone, &cancel, timeout, &step, self.session.commit_implicit()).await?;
        }
        self.flush_notices();
        self.session.end_string();
        Ok(())
    }

    /// The command tag, after what SET changed.
    fn complete(&mut self, tag: &str) {
        for name in std::mem::take(&mut self.session.changed) {
            if let Ok(value) = self.session.settings.get(name) {
                self.out.parameter_status(name, value);
            }
        }
        self.out.command_complete(tag);
        self.note_answer();
    }

    /// The client is sent all that the statement under way gives now.
    fn note_answer(&mut self) {
        self.session.end_fetch(true);
        self.is_committed = false;
    }

    fn flush_notices(&mut self) {
        for (severity, notice) in std::mem::take(&mut self.session.notices) {
            if self.session.is_told(severity) {
                self.out.notice(severity, &notice);
            }
        }
    }

    async fn flush(&mut self) -> std::io::Result<()> {
        let Connection { write, out, stop, .. } = self;
        tokio::select! {
            biased;
            sent = send(write, out) => sent,
            // What the session holds is free then, whether or not its client reads.
            () = ended_for(stop, UNREAD) => Err(std::io::ErrorKind::TimedOut.into()),
        }
    }
}

/// Sends what has been gathered. Cancel-safe: what has been written is off the buffer.
async fn send(write: &mut Writer, out: &mut Backend) -> std::io::Result<()> {
    write.write_all_buf(&mut out.buf).await?;
    // Under TLS a write only fills the record; on a plain socket this does nothing.
    write.flush().await
}

/// Returns when a connection was told to end, and has had so much time.
async fn ended_for(stop: &CancellationToken, time: Duration) {
    stop.cancelled().await;
    tokio::time::sleep(time).await;
}

/// What ends a statement, for whoever works on it without awaiting anything.
struct Ending {
    gone: CancellationToken,
    cancel: CancellationToken,
    deadline: Option<Instant>,
    step: Arc<Step>,
}

impl Ending {
    fn new(
        gone: &CancellationToken,
        cancel: &CancellationToken,
        timeout: Option<Duration>,
        step: &Arc<Step>,
    ) -> Ending {
        let (gone, cancel, step) = (gone.clone(), cancel.clone(), Arc::clone(step));
        // What is too far off to be told never comes.
        let deadline = timeout.and_then(|t| Instant::now().checked_add(t));
        Ending { gone, cancel, deadline, step }
    }

    /// The error of the statement, if it has ended.
    fn error(&self) -> Option<SqlError> {
        if self.cancel.is_cancelled() || self.gone.is_cancelled() {
            return Some(canceled());
        }
        let late = self.deadline.filter(|d| Instant::now() >= *d).map(|_| timed_out());
        late.or_else(|| self.step.memory_error())
    }

    /// Work whose planning ends with the statement, unless its rows have entered the log.
    fn during<T>(self, work: impl Future<Output = T>) -> impl Future<Output = T> {
        let interrupt = Interrupt::new(move || match self.step.entered().is_set() {
            true => None,
            false => self.error(),
        });
        // On the heap, so that dropping the future drops the work.
        let mut work = Box::pin(work);
        std::future::poll_fn(move |context| interrupt.during(|| work.as_mut().poll(context)))
    }
}

/// Awaits under the statement's cancellation, its timeout and the client's presence. A panic, which may
/// come from a library, is an error of the statement and leaves the connection. Once the statement's rows are on
/// their way into the log, or a definition is, nobody can say that it has not taken place: it ends as one of
/// unknown outcome. `step` is the step that `work` does; work that runs nothing of a statement has one of its
/// own ([`awaited`]).
pub(crate) async fn guarded<T>(
    gone: &CancellationToken,
    cancel: &CancellationToken,
    timeout: Option<Duration>,
    step: &Arc<Step>,
    work: impl Future<Output = Result<T, SqlError>>,
) -> Result<T, SqlError> {
    let expired = elapsed(timeout);
    let ending = Ending::new(gone, cancel, timeout, step);
    let work = ending.during(AssertUnwindSafe(work).catch_unwind());
    let ended = tokio::select! {
        biased;
        () = cancel.cancelled() => canceled(),
        () = gone.cancelled() => canceled(),
        result = work => {
            step.end().await;
            return match result {
                Ok(Err(e)) if step.may_have_part() => Err(halfway(&e)),
                Ok(result) => result,
                Err(_) if step.may_be_done() => Err(uncertain(&panicked())),
                Err(_) => Err(panicked()),
            };
        }
        () = expired => timed_out(),
    };
    // The statement has been dropped. What that undoes is undone when the client hears of it.
    step.end().await;
    Err(if step.may_be_done() { uncertain(&ended) } else { ended })
}

/// [`guarded`] for work that runs nothing of a statement: it reads rows that are computed elsewhere, or waits for the
/// client.
async fn awaited<T>(
    gone: &CancellationToken,
    cancel: &CancellationToken,
    timeout: Option<Duration>,
    work: impl Future<Output = Result<T, SqlError>>,
) -> Result<T, SqlError> {
    guarded(gone, cancel, timeout, &Arc::default(), work).await
}

/// What a client is told that does not wait for its commit.
fn uncertain(ended: &SqlError) -> SqlError {
    SqlError::new(SqlState::TRANSACTION_RESOLUTION_UNKNOWN, ended.message.clone())
        .with_detail("The statement was being committed: it may or may not have taken place.")
}

/// What a client is told of a statement that has failed when a part of it was done.
fn halfway(e: &SqlError) -> SqlError {
    SqlError::new(SqlState::TRANSACTION_RESOLUTION_UNKNOWN, e.message.clone())
        .with_detail("A part of what the statement does may have taken place, and stays.")
}

/// What a client is told where a statement has been committed, and its answer has failed.
pub(crate) fn after_commit(e: &SqlError) -> SqlError {
    SqlError::new(SqlState::TRANSACTION_RESOLUTION_UNKNOWN, e.message.clone())
        .with_detail("The statement has been committed. Not all of its answer has been sent.")
}

/// Returns after this time; never where there is no limit.
async fn elapsed(limit: Option<Duration>) {
    match limit {
        Some(limit) => tokio::time::sleep(limit).await,
        None => std::future::pending().await,
    }
}

/// What a client is told that has left its transaction open for too long.
fn idle_too_long() -> SqlError {
    let message = "terminating connection due to idle-in-transaction timeout";
    SqlError::new(SqlState("25P03"), message)
}

/// What a client is told whose connection ends by our will.
fn terminated() -> SqlError {
    let message = "terminating connection due to administrator command";
    SqlError::new(SqlState::ADMIN_SHUTDOWN, message)
}

/// What a client is told of a panic.
pub(crate) fn panicked() -> SqlError {
    SqlError::internal("the statement panicked")
        .with_detail("Only this statement is affected. The server's log says where.")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The SQLSTATE that a client is told, if it is told an error.
    async fn told(
        step: &Arc<Step>,
        cancelled: bool,
        work: impl Future<Output = Result<(), SqlError>>,
    ) -> Option<SqlState> {
        let cancel = CancellationToken::new();
        if cancelled {
            cancel.cancel();
        }
        let ended = guarded(&CancellationToken::new(), &cancel, None, step, work).await;
        ended.err().map(|e| e.state)
    }

    #[tokio::test]
    async fn an_error_says_that_nothing_was_done_only_where_that_is_so() {
        let conflict = || async { Err(SqlError::new(SqlState::SERIALIZATION_FAILURE, "again")) };
        let nothing = Arc::<Step>::default();
        assert_eq!(told(&nothing, true, conflict()).await, Some(SqlState::QUERY_CANCELED));
        assert_eq!(told(&nothing, false, conflict()).await, Some(SqlState::SERIALIZATION_FAILURE));

        let unknown = Some(SqlState::TRANSACTION_RESOLUTION_UNKNOWN);
        let entered = Arc::<Step>::default();
        entered.entered().set();
        assert_eq!(told(&entered, true, conflict()).await, unknown);
        // It has come to its end, which tells.
        assert_eq!(told(&entered, false, conflict()).await, Some(SqlState::SERIALIZATION_FAILURE));

        let partly = Arc::<Step>::default();
        partly.note_part();
        assert_eq!(told(&partly, true, conflict()).await, unknown);
        assert_eq!(told(&partly, false, conflict()).await, unknown);
        assert_eq!(told(&partly, false, async { Ok(()) }).await, None);
    }

    #[tokio::test]
    async fn what_cannot_be_undone_may_be_there() {
        let step = Arc::<Step>::default();
        step.carry_out_undo(async { true }).await;
        assert!(!step.may_be_done());
        step.carry_out_undo(async { false }).await;
        assert!(step.may_be_done() && step.may_have_part());
    }
}
