//! What can go wrong while a source is read.

use millrace_common::{SqlError, SqlState};

/// A failure of a source or sink; the job that met it retries with back-off.
#[derive(Debug, thiserror::Error)]
pub enum ConnectorError {
    #[error("source produced columns that do not fit its schema")]
    Arrow(#[from] arrow::error::ArrowError),
    #[error("source has no split {0}")]
    NoSuchSplit(u32),
    #[error("source has no column at position {0}")]
    NoSuchColumn(usize),
}

impl From<ConnectorError> for SqlError {
    fn from(e: ConnectorError) -> SqlError {
        let message = match &e {
            ConnectorError::Arrow(cause) => format!("{e}: {cause}"),
            _ => e.to_string(),
        };
        SqlError::new(SqlState::INTERNAL_ERROR, message)
    }
}
