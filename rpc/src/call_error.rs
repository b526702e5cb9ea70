//! Why a call of another process has failed, and how that crosses the network.

use std::collections::BTreeSet;
use std::error::Error as _;
use std::sync::OnceLock;

use millrace_common::error::ErrorObject;
use millrace_common::{SqlError, SqlState};
use parking_lot::Mutex;
use prost::Message;
use tonic::{Code, Status};

use crate::proto::{self, refusal::Reason};
use crate::store_id::{StoreId, bytes_of};

/// Version of the services and their messages, those of the log included: a record is sent as a message, and who would
/// drop a field of it does not get the record's checksum. It rises with the log's format
/// ([`FORMAT_VERSION`](crate::log::FORMAT_VERSION)), too: what one process writes, others of its version read. Processes of
/// different versions refuse each other.
pub const PROTOCOL_VERSION: u32 = 8;
/// The build of this process, for people.
pub const BUILD: &str = env!("CARGO_PKG_VERSION");

/// The routine that errors of calls without an answer name; see [`is_unreachable`].
const UNREACHABLE: &str = "call_unreachable";
/// The routine that errors of a leader name that has lost the lead, or ends, before it had any effect.
pub const LEADS_NO_LONGER: &str = "leads_no_longer";
/// The routine of an error which says that the log has placed the table on another process: the call has had no effect.
pub const RUNS_ELSEWHERE: &str = "runs_elsewhere";
/// Different names from other processes that are kept for the life of this one.
const MAX_NAMES: usize = 1024;
/// Bytes of one text of an error that are sent.
const MAX_TEXT: usize = 16 << 10;

/// Why a call has failed.
#[derive(Clone, Debug, thiserror::Error)]
pub enum CallError {
    /// The other process has done the work, or tried to, and this is what came of it.
    #[error(transparent)]
    Sql(#[from] SqlError),
    /// There was no answer: the call may have had its effect, and may be repeated.
    #[error("{peer} does not answer: {cause}")]
    Unreachable { peer: String, cause: String },
    /// There was no connection: the call has had no effect.
    #[error("{peer} cannot be reached: {cause}")]
    NotConnected { peer: String, cause: String },
    /// The caller follows a leader that has been succeeded by the one of this term.
    #[error("the call belongs to a past term: the current one is {term}")]
    StaleTerm { term: u64 },
    /// The process that the call was meant for has been succeeded at its address by this one; 0: what the call is about
    /// runs on another process. It has had no effect.
    #[error("{}", succeeded(*incarnation))]
    StaleIncarnation { incarnation: u64 },
    /// The caller has been fenced: it must end.
    #[error("process {incarnation} has been fenced")]
    Fenced { incarnation: u64 },
    /// The process that was called does not lead: the call has had no effect. `leader`: where the one is that it knows of;
    /// empty: it knows of none.
    #[error("the meta process that was called does not lead{}", told(leader))]
    NotLeader { leader: String, term: u64 },
    /// The processes speak different versions.
    #[error(
        "protocol version {theirs} (build {build}) does not match protocol version {ours} (build {})",
        BUILD
    )]
    Protocol { ours: u32, theirs: u32, build: String },
    /// The processes work on different object stores. `None`: that one has read of none, because there is no log, or none
    /// that has an id.
    #[error("{}", works_elsewhere(peer, *ours, *theirs))]
    /// `leads`: whether that one leads a cluster there.
    OtherStore { peer: String, ours: Option<StoreId>, theirs: Option<StoreId>, leads: bool },
    /// The record stream goes on elsewhere.
    #[error("the record stream has a gap: record {next} is the next one")]
    Gap { next: u64 },
    /// Bytes that are no message, or a message that says nothing.
    #[error("a message between processes is malformed: {0}")]
    Malformed(String),
    /// The message is larger than one may be.
    #[error("a message between processes is too large: {0}")]
    TooLarge(String),
}

impl CallError {
    /// Whether the same call may succeed when it is repeated as it is.
    pub fn is_retryable(&self) -> bool {
        matches!(
            self,
            CallError::Unreachable { .. }
                | CallError::NotConnected { .. }
                | CallError::NotLeader { .. }
        )
    }

    /// A message without a field that it needs.
    pub(crate) fn missing(field: &str) -> CallError {
        CallError::Malformed(format!("the field {field} is missing"))
    }

    pub(crate) fn into_status(self) -> Status {
        let message = self.to_string();
        let (code, reason) = match self {
            CallError::Sql(e) if e.routine == Some(LEADS_NO_LONGER) => {
                let (leader, term) = (String::new(), 0);
                (Code::FailedPrecondition, Reason::NotLeader(proto::NotLeader { leader, term }))
            }
            CallError::Sql(e) if e.routine == Some(RUNS_ELSEWHERE) => (
                Code::FailedPrecondition,
                Reason::StaleIncarnation(proto::StaleIncarnation { incarnation: 0 }),
            ),
            CallError::Sql(e) => (Code::FailedPrecondition, Reason::Sql(error_to_proto(&e))),
            CallError::StaleTerm { term } => {
                (Code::FailedPrecondition, Reason::StaleTerm(proto::StaleTerm { term }))
            }
            CallError::StaleIncarnation { incarnation } => (
                Code::FailedPrecondition,
                Reason::StaleIncarnation(proto::StaleIncarnation { incarnation }),
            ),
            CallError::Fenced { incarnation } => {
                (Code::FailedPrecondition, Reason::Fenced(proto::Fenced { incarnation }))
            }
            CallError::NotLeader { leader, term } => (
                Code::FailedPrecondition,
                Reason::NotLeader(proto::NotLeader { leader: cut(&leader), term }),
            ),
            // The other side's view: our version is what it is told.
            CallError::Protocol { ours, .. } => (
                Code::FailedPrecondition,
                Reason::Protocol(proto::ProtocolMismatch { protocol: ours, build: BUILD.into() }),
            ),
            // As above: what is ours is theirs to the caller.
            CallError::OtherStore { ours, theirs, leads, .. } => (
                Code::FailedPrecondition,
                Reason::OtherStore(proto::OtherStore {
                    caller: bytes_of(theirs),
                    called: bytes_of(ours),
                    leads,
                }),
            ),
            CallError::Gap { next } => (Code::OutOfRange, Reason::Gap(proto::StreamGap { next })),
            CallError::Malformed(m) => return Status::invalid_argument(cut(&m)),
            CallError::TooLarge(m) => return Status::resource_exhausted(cut(&m)),
            CallError::Unreachable { .. } | CallError::NotConnected { .. } => {
                return Status::unavailable(cut(&message));
            }
        };
        let refusal = proto::Refusal { reason: Some(reason) };
        let first: String = message.chars().take(200).collect();
        Status::with_details(code, first, refusal.encode_to_vec().into())
    }

    pub(crate) fn from_status(peer: &str, status: &Status) -> CallError {
        if !status.details().is_empty() {
            return match proto::Refusal::decode(status.details()) {
                Ok(refusal) => refused(peer, refusal.reason),
                Err(e) => CallError::Malformed(e.to_string()),
            };
        }
        let told = status.message().to_owned();
        let unreachable = || {
            let cause = innermost(status).unwrap_or(told.clone());
            let peer = peer.to_owned();
            match was_connected(status) {
                true => CallError::Unreachable { peer, cause },
                false => CallError::NotConnected { peer, cause },
            }
        };
        match status.code() {
            _ if status.source().is_some() => unreachable(),
            Code::InvalidArgument | Code::Internal | Code::DataLoss => CallError::Malformed(told),
            Code::ResourceExhausted | Code::OutOfRange => CallError::TooLarge(told),
            Code::Unimplemented => CallError::Sql(
                SqlError::unsupported(format!("this call by {peer}")).with_detail(told.clone()),
            ),
            _ => unreachable(),
        }
    }
}

impl From<CallError> for SqlError {
    fn from(e: CallError) -> SqlError {
        let message = e.to_string();
        match e {
            CallError::Sql(e) => e,
            CallError::NotConnected { .. } => SqlError::new(SqlState::CANNOT_CONNECT_NOW, message)
                .with_routine(UNREACHABLE)
                .with_hint("The process is down or cut off; try again when it is back."),
            CallError::Unreachable { .. } => SqlError::new(SqlState::CONNECTION_FAILURE, message)
                .with_routine(UNREACHABLE)
                .with_hint("The process is down or cut off; the call may be repeated."),
            CallError::NotLeader { .. } => SqlError::new(SqlState::CANNOT_CONNECT_NOW, message)
                .with_hint("Another process takes the lead within seconds; try again then."),
            CallError::StaleTerm { .. }
            | CallError::StaleIncarnation { .. }
            | CallError::Gap { .. } => SqlError::new(SqlState::CANNOT_CONNECT_NOW, message),
            CallError::Fenced { .. } => SqlError::new(SqlState::ADMIN_SHUTDOWN, message),
            CallError::Protocol { .. } => SqlError::new(SqlState::PROTOCOL_VIOLATION, message)
                .with_hint("All processes of a cluster run the same build."),
            CallError::OtherStore { .. } => {
                SqlError::new(SqlState::OBJECT_NOT_IN_PREREQUISITE_STATE, message).with_hint(
                    "All processes of a cluster are given the same bucket and the same prefix.",
                )
            }
            CallError::Malformed(_) => SqlError::new(SqlState::PROTOCOL_VIOLATION, message),
            CallError::TooLarge(_) => SqlError::new(SqlState::STATEMENT_TOO_COMPLEX, message),
        }
    }
}

/// Whether an error says that a process did not answer: the call may have had its effect, and may be repeated.
pub fn is_unreachable(error: &SqlError) -> bool {
    error.routine == Some(UNREACHABLE)
}

fn succeeded(by: u64) -> String {
    match by {
        0 => "what was asked for runs on another process".to_owned(),
        by => format!("the process that was called has been succeeded by process {by}"),
    }
}

/// Which store is whose, and what to look at.
fn works_elsewhere(peer: &str, ours: Option<StoreId>, theirs: Option<StoreId>) -> String {
    let has = |id: Option<StoreId>| match id {
        Some(id) => format!("has store id {id}"),
        None => "holds no log, or one without a store id".to_owned(),
    };
    format!(
        "{peer} works on another object store: that of this process {}, that of {peer} {}; check --object-store of both",
        has(ours),
        has(theirs)
    )
}

/// What a refusal says of the leader.
fn told(leader: &str) -> String {
    match leader {
        "" => String::new(),
        leader => format!(": {leader} does, as far as it knows"),
    }
}

fn refused(peer: &str, reason: Option<Reason>) -> CallError {
    match reason {
        Some(Reason::Sql(e)) => CallError::Sql(error_from_proto(e)),
        Some(Reason::StaleTerm(s)) => CallError::StaleTerm { term: s.term },
        Some(Reason::StaleIncarnation(s)) => {
            CallError::StaleIncarnation { incarnation: s.incarnation }
        }
        Some(Reason::Fenced(f)) => CallError::Fenced { incarnation: f.incarnation },
        Some(Reason::Protocol(p)) => {
            CallError::Protocol { ours: PROTOCOL_VERSION, theirs: p.protocol, build: p.build }
        }
        Some(Reason::OtherStore(o)) => CallError::OtherStore {
            peer: peer.to_owned(),
            ours: StoreId::from_bytes(&o.caller),
            theirs: StoreId::from_bytes(&o.called),
            leads: o.leads,
        },
        Some(Reason::NotLeader(n)) => CallError::NotLeader { leader: n.leader, term: n.term },
        Some(Reason::Gap(g)) => CallError::Gap { next: g.next },
        None => CallError::missing("reason"),
    }
}

/// Whether the call may have gone out.
fn was_connected(status: &Status) -> bool {
    let mut next = status.source();
    while let Some(error) = next {
        if error.is::<tonic::ConnectError>() {
            return false;
        }
        next = error.source();
    }
    true
}

/// What the transport says in the end: the first lines of its errors only name its layers.
fn innermost(status: &Status) -> Option<String> {
    let mut error: &dyn std::error::Error = status.source()?;
    while let Some(source) = error.source() {
        error = source;
    }
    Some(error.to_string())
}

/// Texts travel in headers, whose size is limited.
fn cut(text: &str) -> String {
    text[..text.floor_char_boundary(MAX_TEXT)].to_owned()
}

/// An error as it is sent.
pub(crate) fn error_to_proto(e: &SqlError) -> proto::SqlError {
    let text = |text: &Option<String>| text.as_deref().map(cut);
    let object = e.object.as_ref().map(|o| proto::ErrorObject {
        schema: o.schema.clone(),
        table: o.table.clone(),
        column: o.column.clone(),
        constraint: o.constraint.clone(),
    });
    proto::SqlError {
        state: e.state.0.to_owned(),
        message: cut(&e.message),
        detail: text(&e.detail),
        hint: text(&e.hint),
        position: e.position,
        after_line: e.after.map(|(line, _)| line),
        after_column: e.after.map(|(_, column)| column),
        context: text(&e.context),
        object,
        routine: e.routine.map(str::to_owned),
        row: e.row,
    }
}

/// An error as it was sent.
pub(crate) fn error_from_proto(e: proto::SqlError) -> SqlError {
    let is_state = e.state.len() == 5 && e.state.bytes().all(|b| b.is_ascii_alphanumeric());
    let state = Some(&e.state).filter(|_| is_state).and_then(|state| interned(state));
    let mut error = SqlError::new(state.map_or(SqlState::INTERNAL_ERROR, SqlState), e.message);
    error.detail = e.detail;
    error.hint = e.hint;
    error.position = e.position;
    error.after = e.after_line.zip(e.after_column);
    error.context = e.context;
    error.row = e.row;
    error.object = e.object.map(|o| ErrorObject {
        schema: o.schema,
        table: o.table,
        column: o.column,
        constraint: o.constraint,
    });
    // Who sends it has answered: whom it could not reach is another process.
    let routine = e.routine.filter(|r| r.len() < 64 && r.as_str() != UNREACHABLE);
    error.routine = routine.and_then(|r| interned(&r));
    error
}

/// A name that lasts as long as the process. `None`: there are too many.
fn interned(name: &str) -> Option<&'static str> {
    static NAMES: OnceLock<Mutex<BTreeSet<&'static str>>> = OnceLock::new();
    let mut names = NAMES.get_or_init(Mutex::default).lock();
    if let Some(known) = names.get(name) {
        return Some(known);
    }
    if names.len() >= MAX_NAMES {
        return None;
    }
    let kept: &'static str = Box::leak(name.to_owned().into_boxed_str());
    names.insert(kept);
    Some(kept)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_that_tells_of_a_third_process_is_an_answer() {
        let (peer, cause) = ("b:1".to_owned(), "planted".to_owned());
        let unreached = SqlError::from(CallError::Unreachable { peer, cause });
        assert!(is_unreachable(&unreached));
        let relayed = error_from_proto(error_to_proto(&unreached));
        assert!(!is_unreachable(&relayed), "who says so was reached");
        assert_eq!((relayed.state, &relayed.message), (unreached.state, &unreached.message));
    }
}
