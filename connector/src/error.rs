//! What can go wrong while a source is read.

use millrace_common::{SqlError, SqlState};

/// A failure of a source or sink; who met it retries with back-off.
#[derive(Debug, thiserror::Error)]
pub enum ConnectorError {
    #[error("source produced columns that do not fit its schema")]
    Arrow(#[from] arrow::error::ArrowError),
    #[error("source has no split {0}")]
    NoSuchSplit(u32),
    #[error("source has no column at position {0}")]
    NoSuchColumn(usize),
    #[error("cannot read {place}: {reason}")]
    Io { place: String, reason: String },
    /// What was read before is no longer what it was.
    #[error("{place} has changed since it was first read")]
    Changed { place: String, detail: String },
    /// The content does not fit the relation, and the source is to stop at that.
    #[error("{place}: {}", error.message)]
    BadRow { place: String, error: Box<SqlError> },
    #[error("{0}")]
    Other(Box<SqlError>),
    /// The target of a sink is away or refuses.
    #[error("{0}")]
    Target(String),
    #[error(transparent)]
    Sql(#[from] SqlError),
}

impl ConnectorError {
    /// A failure of a sink's target, with all its causes.
    pub fn target(what: &str, error: &dyn std::error::Error) -> ConnectorError {
        let mut text = format!("{what}: {error}");
        let mut cause = error.source();
        while let Some(next) = cause {
            let next_text = next.to_string();
            if !text.contains(&next_text) {
                text.push_str(": ");
                text.push_str(&next_text);
            }
            cause = next.source();
        }
        ConnectorError::Target(text)
    }

    /// A file or directory that cannot be used.
    pub fn file(path: &std::path::Path, error: &std::io::Error) -> ConnectorError {
        ConnectorError::Target(format!("{}: {error}", path.display()))
    }

    pub fn io(place: impl Into<String>, reason: impl std::fmt::Display) -> ConnectorError {
        ConnectorError::Io { place: place.into(), reason: reason.to_string() }
    }
}

impl From<ConnectorError> for SqlError {
    fn from(e: ConnectorError) -> SqlError {
        let message = e.to_string();
        match e {
            ConnectorError::Sql(error) => error,
            ConnectorError::Target(message) => SqlError::new(SqlState("08000"), message),
            ConnectorError::Arrow(cause) => {
                SqlError::new(SqlState::INTERNAL_ERROR, format!("{message}: {cause}"))
            }
            ConnectorError::NoSuchSplit(_) | ConnectorError::NoSuchColumn(_) => {
                SqlError::new(SqlState::INTERNAL_ERROR, message)
            }
            ConnectorError::Io { .. } => {
                SqlError::new(SqlState::IO_ERROR, message).with_hint("It is tried again by itself.")
            }
            ConnectorError::Changed { detail, .. } => {
                SqlError::new(SqlState::DATA_CORRUPTED, message).with_detail(detail).with_hint(
                    "Files must not change once they are there; put new rows into new files.",
                )
            }
            ConnectorError::BadRow { mut error, .. } => {
                error.message = message;
                error.with_hint("Correct the row, or create the source with on_error = 'skip'.")
            }
            ConnectorError::Other(error) => *error,
        }
    }
}
