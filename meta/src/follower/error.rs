//! Why a log cannot be followed, and what the caller can do.

use millrace_common::{SqlError, SqlState};

use crate::error::MetaError;

/// Why a record was not folded. The state is the one before it.
#[derive(Clone, Debug, thiserror::Error)]
pub enum FollowError {
    /// The hash of its predecessor is another one. It is of another log, or the one here is.
    #[error("log record {number} does not follow the record before it")]
    Foreign { number: u64 },
    #[error(transparent)]
    Log(#[from] MetaError),
    /// It was waited for and did not come. It may come yet.
    #[error("log record {record} was not found in time; the newest is {at}")]
    Late {
        record: u64,
        at: u64,
        /// What the store said last.
        trouble: Option<String>,
    },
}

impl FollowError {
    /// Whether trying again later may succeed.
    pub fn is_transient(&self) -> bool {
        matches!(self, FollowError::Log(MetaError::Store(_)) | FollowError::Late { .. })
    }
}

impl From<FollowError> for SqlError {
    fn from(error: FollowError) -> SqlError {
        let message = error.to_string();
        match error {
            FollowError::Log(error) => error.into(),
            FollowError::Foreign { .. } => SqlError::new(SqlState::DATA_CORRUPTED, message)
                .with_hint(
                    "Check that all processes use the same bucket, and that it was not replaced.",
                ),
            FollowError::Late { trouble, .. } => {
                let error = SqlError::new(SqlState::QUERY_CANCELED, message);
                match trouble {
                    Some(trouble) => {
                        error.with_detail(format!("The object store said: {trouble}."))
                    }
                    None => error,
                }
            }
        }
    }
}
