//! What can go wrong below the state store, typed, with the cause kept and the object named.
//!
//! Errors are `Clone` (causes are shared): one failed read answers every reader that waited for it.
//! Each variant says what the caller can do: wait and retry (`Timeout`, `Io`), make room
//! (`DiskFull`), find out what happened (`OutcomeUnknown`), or stop reading this object (`Corrupt`).

use std::error::Error as StdError;
use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use arrow::error::ArrowError;
use millrace_common::{Epoch, SqlError, SqlState};
use millrace_rpc::sequence::SequenceError;

/// The shared cause of an error.
pub type Cause = Arc<dyn StdError + Send + Sync>;

pub type Result<T> = std::result::Result<T, StorageError>;

#[derive(Clone, Debug, thiserror::Error)]
pub enum StorageError {
    /// Bytes that are not what was written. Never retried as if they could get better, never read as rows.
    #[error("corrupt data in object \"{object}\" at offset {offset}: {reason}")]
    Corrupt { object: String, offset: u64, reason: String },
    #[error("object \"{object}\" does not exist")]
    NotFound { object: String },
    /// A create found the name taken.
    #[error("object \"{object}\" already exists")]
    AlreadyExists { object: String },
    /// A create that may or may not have happened: read the object to find out.
    #[error("it is not known whether object \"{object}\" was written: {cause}")]
    OutcomeUnknown { object: String, cause: Cause },
    #[error("no space left in the object store while writing \"{object}\"")]
    DiskFull { object: String, cause: Cause },
    #[error("object store did not answer {operation} of \"{object}\" within {after:?}")]
    Timeout { operation: &'static str, object: String, after: Duration },
    #[error("object store refused {operation} of \"{object}\": {cause}")]
    Denied { operation: &'static str, object: String, cause: Cause },
    #[error("could not {operation} object \"{object}\": {cause}")]
    Io { operation: &'static str, object: String, cause: Cause },
    /// The store cannot keep our promises.
    #[error("object store \"{store}\" cannot be used: {reason}")]
    Unsuitable { store: String, reason: String },
    /// A setting that makes no sense.
    #[error("invalid object store \"{url}\": {reason}")]
    InvalidUrl { url: String, reason: String },
    #[error("snapshot at epoch {epoch} is too old: versions are kept from epoch {horizon} on")]
    SnapshotTooOld { epoch: Epoch, horizon: Epoch },
    /// A follower was too slow: an object of the version that it reads has been deleted. There is a newer version.
    #[error("object \"{object}\" is gone: a newer version of the relation has taken its place")]
    Superseded { object: String },
    #[error("local block cache: {0}")]
    Cache(String),
    #[error(transparent)]
    Arrow(#[from] SharedArrowError),
    #[error(transparent)]
    Sequence(#[from] SequenceError),
    /// A broken invariant of ours.
    #[error("{0}")]
    Internal(String),
}

/// An [`ArrowError`] that can be cloned.
#[derive(Clone, Debug)]
pub struct SharedArrowError(pub Arc<ArrowError>);

impl fmt::Display for SharedArrowError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl StdError for SharedArrowError {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0.source()
    }
}

impl From<ArrowError> for StorageError {
    fn from(e: ArrowError) -> StorageError {
        StorageError::Arrow(SharedArrowError(Arc::new(e)))
    }
}

impl StorageError {
    pub fn internal(message: impl Into<String>) -> StorageError {
        StorageError::Internal(message.into())
    }

    pub fn corrupt(
        object: impl Into<String>,
        offset: u64,
        reason: impl fmt::Display,
    ) -> StorageError {
        StorageError::Corrupt { object: object.into(), offset, reason: reason.to_string() }
    }

    /// What an object store's error about one object means to us.
    pub fn from_store(
        operation: &'static str,
        object: impl Into<String>,
        error: object_store::Error,
    ) -> StorageError {
        let object = object.into();
        if let Some(t) = find::<TimedOut>(&error) {
            return StorageError::Timeout { operation, object, after: t.after };
        }
        if let Some(u) = find::<UnknownOutcome>(&error) {
            return StorageError::OutcomeUnknown { object, cause: Arc::clone(&u.cause) };
        }
        if is_disk_full(&error) {
            return StorageError::DiskFull { object, cause: Arc::new(error) };
        }
        use object_store::Error as E;
        match error {
            E::NotFound { .. } => StorageError::NotFound { object },
            E::AlreadyExists { .. } => StorageError::AlreadyExists { object },
            E::PermissionDenied { .. } | E::Unauthenticated { .. } => {
                StorageError::Denied { operation, object, cause: Arc::new(error) }
            }
            other => StorageError::Io { operation, object, cause: Arc::new(other) },
        }
    }

    /// Whether waiting and doing the same again may succeed.
    pub fn is_transient(&self) -> bool {
        matches!(
            self,
            StorageError::Timeout { .. } | StorageError::Io { .. } | StorageError::DiskFull { .. }
        )
    }

    /// The SQLSTATE a session reports.
    pub fn sql_state(&self) -> SqlState {
        match self {
            StorageError::Corrupt { .. } => SqlState::DATA_CORRUPTED,
            StorageError::DiskFull { .. } => SqlState::DISK_FULL,
            StorageError::NotFound { .. }
            | StorageError::AlreadyExists { .. }
            | StorageError::Timeout { .. }
            | StorageError::Io { .. }
            | StorageError::Cache(_) => SqlState::IO_ERROR,
            StorageError::Denied { .. } => SqlState::INSUFFICIENT_PRIVILEGE,
            StorageError::OutcomeUnknown { .. } => SqlState::TRANSACTION_RESOLUTION_UNKNOWN,
            StorageError::Unsuitable { .. } => SqlState::OBJECT_NOT_IN_PREREQUISITE_STATE,
            StorageError::InvalidUrl { .. } => SqlState::INVALID_PARAMETER_VALUE,
            StorageError::SnapshotTooOld { .. } => SqlState::SNAPSHOT_TOO_OLD,
            StorageError::Superseded { .. } => SqlState::SERIALIZATION_FAILURE,
            StorageError::Sequence(_) | StorageError::Arrow(_) | StorageError::Internal(_) => {
                SqlState::INTERNAL_ERROR
            }
        }
    }

    fn hint(&self) -> Option<&'static str> {
        Some(match self {
            StorageError::Corrupt { .. } => {
                "Nothing was read from the damaged object; restore it from a copy of the store."
            }
            StorageError::DiskFull { .. } => "Free some space; nothing acknowledged was lost.",
            StorageError::Timeout { .. } => {
                "Check that the object store is reachable and not overloaded."
            }
            StorageError::Denied { .. } => {
                "Check the credentials and permissions of the object store."
            }
            StorageError::Unsuitable { .. } => {
                "Use a local directory, Amazon S3, or a server that honours If-None-Match."
            }
            StorageError::InvalidUrl { .. } => "Use a path, file:///path or s3://bucket/prefix.",
            StorageError::Superseded { .. } => "Run the statement again.",
            _ => return None,
        })
    }
}

impl From<StorageError> for SqlError {
    fn from(e: StorageError) -> SqlError {
        if matches!(e, StorageError::Arrow(_) | StorageError::Internal(_)) {
            return SqlError::internal(e.to_string());
        }
        let sql = SqlError::new(e.sql_state(), e.to_string());
        match e.hint() {
            Some(hint) => sql.with_hint(hint),
            None => sql,
        }
    }
}

/// Travels inside [`object_store::Error::Generic`]: no answer in time.
#[derive(Debug, thiserror::Error)]
#[error("no answer within {after:?}")]
pub struct TimedOut {
    pub after: Duration,
}

/// Travels inside [`object_store::Error::Generic`]: a create without a definite answer.
#[derive(Debug, thiserror::Error)]
#[error("outcome unknown: {cause}")]
pub struct UnknownOutcome {
    pub cause: Cause,
}

/// The first cause of type `T` in an error's chain.
pub(crate) fn find<'a, T: StdError + 'static>(
    error: &'a (dyn StdError + 'static),
) -> Option<&'a T> {
    let mut at = Some(error);
    while let Some(e) = at {
        if let Some(found) = e.downcast_ref::<T>() {
            return Some(found);
        }
        at = e.source();
    }
    None
}

/// Whether a full device (or quota) is at the bottom of it.
pub(crate) fn is_disk_full(error: &(dyn StdError + 'static)) -> bool {
    find::<io::Error>(error).is_some_and(|e| {
        matches!(e.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn generic(source: impl StdError + Send + Sync + 'static) -> object_store::Error {
        object_store::Error::Generic { store: "test", source: Box::new(source) }
    }

    #[test]
    fn causes_decide_the_sqlstate() {
        let full = generic(io::Error::from_raw_os_error(28));
        let e = StorageError::from_store("write", "data/1/1.seg", full);
        assert_eq!(SqlError::from(e).state, SqlState::DISK_FULL);

        let late = generic(TimedOut { after: Duration::from_secs(5) });
        let e = StorageError::from_store("read", "data/1/1.seg", late);
        assert!(matches!(e, StorageError::Timeout { .. }));
        assert!(e.to_string().contains("data/1/1.seg"));

        let bad = SqlError::from(StorageError::corrupt("data/1/1.seg", 64, "checksum mismatch"));
        assert_eq!(bad.state, SqlState::DATA_CORRUPTED);
        assert!(bad.message.contains("data/1/1.seg") && bad.message.contains("64"));
    }
}
