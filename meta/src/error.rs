//! What can go wrong with the log, and what a void entry tells its sender.

use millrace_common::{SqlError, SqlState};
use millrace_rpc::call_error::LEADS_NO_LONGER;
use millrace_rpc::log::{FORMAT_VERSION, FrameError};

use crate::backup::named::MOST_BACKUPS;
use crate::clock::ClockSkew;

/// Why the log cannot be used (any more).
#[derive(Clone, Debug, thiserror::Error)]
pub enum MetaError {
    /// Another process leads this store now. Nothing more is acknowledged here.
    #[error("another server (term {term}) has taken over this object store")]
    Deposed { term: u64 },
    /// The same, and the entry's record was written: who leads now knows whether it counts.
    #[error(
        "another server (term {term}) has taken over this object store, and may have what was written last"
    )]
    Unconfirmed { term: u64 },
    /// The log has gone on since this process decided to lead: it does not.
    #[error("another record came before this process could lead")]
    Overtaken,
    /// The store cannot keep our promises.
    #[error("{0}")]
    Unsuitable(String),
    #[error("object store: {0}")]
    Store(String),
    /// The store has no space; the entry is not in the log and never will be.
    #[error("{0}")]
    Full(String),
    #[error("\"{object}\" is damaged: {error}")]
    Corrupt { object: String, error: FrameError },
    /// A newer build has written to the log, and says that this one must not open it.
    #[error(
        "a newer build of Millrace has written to this object store: \"{object}\" needs log format {needed}, and this \
         build ({}) reads log formats up to {FORMAT_VERSION}",
        env!("CARGO_PKG_VERSION")
    )]
    Newer { object: String, needed: u32 },
    /// Records are missing between the snapshot and the head.
    #[error("log record {number} is missing")]
    Gap { number: u64 },
    /// Nothing has happened; the process leads again when its clock is right.
    #[error("{0}: it does not lead")]
    Skewed(ClockSkew),
    #[error("the server is shutting down")]
    Closed,
}

impl MetaError {
    /// Whether an entry was refused that a later attempt may bring into the log: it is not there, and the log goes on.
    pub fn is_refusal(&self) -> bool {
        matches!(self, MetaError::Full(_) | MetaError::Skewed(_))
    }
}

/// Whether something was refused because the clock of this process is wrong.
pub fn is_skewed(error: &SqlError) -> bool {
    error.state == SqlState::SYSTEM_ERROR
}

impl From<object_store::Error> for MetaError {
    fn from(e: object_store::Error) -> MetaError {
        MetaError::Store(e.to_string())
    }
}

impl From<MetaError> for SqlError {
    fn from(e: MetaError) -> SqlError {
        let state = match &e {
            MetaError::Deposed { .. } | MetaError::Unconfirmed { .. } | MetaError::Closed => {
                SqlState::ADMIN_SHUTDOWN
            }
            MetaError::Overtaken => SqlState::SERIALIZATION_FAILURE,
            MetaError::Unsuitable(_) | MetaError::Newer { .. } => SqlState::FEATURE_NOT_SUPPORTED,
            MetaError::Store(_) => SqlState::IO_ERROR,
            MetaError::Skewed(_) => SqlState::SYSTEM_ERROR,
            MetaError::Full(_) => SqlState::DISK_FULL,
            MetaError::Corrupt { .. } | MetaError::Gap { .. } => SqlState::DATA_CORRUPTED,
        };
        let error = SqlError::new(state, e.to_string());
        match e {
            MetaError::Deposed { .. } => error.with_routine(LEADS_NO_LONGER).with_hint("Connect to the server that leads now, or stop it and restart this one."),
            MetaError::Unsuitable(_) => error.with_hint("Use a store that honours If-None-Match on PUT, such as Amazon S3 or a local directory."),
            MetaError::Newer { .. } => error.with_hint("Start a build that reads this format. This one has changed nothing."),
            MetaError::Skewed(_) => error.with_hint("Set the clock, for example by NTP; it is looked at again every few seconds."),
            MetaError::Full(_) => error.with_hint("Free some space; nothing acknowledged was lost."),
            _ => error,
        }
    }
}

/// Why the fold rejected an entry.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum VoidReason {
    /// The record itself is not of the leading term.
    #[error("the record belongs to an older leader")]
    OldTerm,
    #[error("relation {0} does not exist")]
    UnknownRelation(u32),
    #[error("another generation of the job runs")]
    OtherGeneration,
    #[error("the job's last epoch is another one")]
    OtherPredecessor,
    /// It was sent twice.
    #[error("the job's commit of that number is in the log already")]
    TakenBefore,
    #[error("the epoch is not one the job can commit")]
    BadEpoch,
    #[error("an object it refers to has been deleted")]
    DeletedObject,
    #[error("a run or slice it replaces is not part of the version")]
    UnknownRun,
    #[error("an object is still in use")]
    ObjectInUse,
    #[error("source offsets do not advance")]
    OffsetsGoBack,
    #[error("relation \"{0}\" already exists")]
    DuplicateRelation(String),
    #[error("\"{0}\" is not a view")]
    NotAView(String),
    #[error("view \"{0}\" would read itself")]
    Cycle(String),
    #[error("schema \"{0}\" does not exist")]
    UnknownSchema(String),
    #[error("schema \"{0}\" already exists")]
    DuplicateSchema(String),
    #[error("role \"{0}\" already exists")]
    DuplicateUser(String),
    #[error("role \"{0}\" does not exist")]
    UnknownUser(String),
    #[error("cannot drop {0} because other objects depend on it")]
    DependentsExist(String),
    #[error("cannot replace view \"{0}\" because \"{1}\" was computed from it")]
    ViewIsRead(String, String),
    #[error("cannot rebuild \"{0}\" because \"{1}\", which it reads, is detached")]
    InputDetached(String, String),
    #[error("the inputs of the job have no common version yet")]
    InputsNotReady,
    #[error("another table of the same transaction has failed")]
    PartLost,
    #[error("the process that it comes from, or names, is fenced")]
    FencedProcess,
    #[error("no process has had incarnation {0}")]
    UnknownProcess(u64),
    #[error("there is a backup \"{0}\" already")]
    DuplicateBackup(String),
    #[error("there is no backup \"{0}\"")]
    UnknownBackup(String),
    #[error("there are {MOST_BACKUPS} backups, and no more are kept")]
    TooManyBackups,
    #[error("the entry is empty or of an unknown kind")]
    Malformed,
}

impl From<VoidReason> for SqlError {
    fn from(reason: VoidReason) -> SqlError {
        let state = match &reason {
            VoidReason::UnknownRelation(_) => SqlState::UNDEFINED_TABLE,
            VoidReason::DuplicateRelation(_) => SqlState::DUPLICATE_TABLE,
            VoidReason::NotAView(_) => SqlState::WRONG_OBJECT_TYPE,
            VoidReason::Cycle(_) => SqlState::INVALID_OBJECT_DEFINITION,
            VoidReason::UnknownSchema(_) => SqlState::INVALID_SCHEMA_NAME,
            VoidReason::DuplicateSchema(_) => SqlState::DUPLICATE_SCHEMA,
            VoidReason::DuplicateUser(_) | VoidReason::DuplicateBackup(_) => {
                SqlState::DUPLICATE_OBJECT
            }
            VoidReason::UnknownUser(_) | VoidReason::UnknownBackup(_) => SqlState::UNDEFINED_OBJECT,
            VoidReason::TooManyBackups => SqlState::OBJECT_NOT_IN_PREREQUISITE_STATE,
            VoidReason::DependentsExist(_) | VoidReason::ViewIsRead(_, _) => {
                SqlState::DEPENDENT_OBJECTS_STILL_EXIST
            }
            VoidReason::OldTerm => SqlState::ADMIN_SHUTDOWN,
            VoidReason::InputsNotReady | VoidReason::InputDetached(..) => {
                SqlState::OBJECT_NOT_IN_PREREQUISITE_STATE
            }
            _ => SqlState::INTERNAL_ERROR,
        };
        let hint = match &reason {
            VoidReason::DependentsExist(_) => {
                Some("Use DROP ... CASCADE to drop the dependent objects too.")
            }
            VoidReason::ViewIsRead(_, _) => Some(
                "Drop what was computed from it first, or give the new definition another name.",
            ),
            VoidReason::InputDetached(..) => Some("Rebuild that one first."),
            VoidReason::DuplicateBackup(_) => Some("Choose another name, or release that one."),
            VoidReason::UnknownBackup(_) => {
                Some("millrace ctl backup list shows those that there are.")
            }
            VoidReason::TooManyBackups => Some("Release some of them."),
            VoidReason::NotAView(_) => Some("Drop it first, or choose another name."),
            _ => None,
        };
        let error = SqlError::new(state, reason.to_string());
        match hint {
            Some(hint) => error.with_hint(hint),
            None => error,
        }
    }
}
