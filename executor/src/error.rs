//! What can go wrong in a job. Everything here fails that job and no other; a failed expression on a
//! row is not here (see [`crate::error_sink`]).

use arrow::error::ArrowError;
use datafusion::error::DataFusionError;
use millrace_common::{SqlError, SqlState};
use millrace_connector::ConnectorError;
use millrace_storage::StorageError;

#[derive(Debug, thiserror::Error)]
pub enum ExecError {
    #[error(transparent)]
    Storage(#[from] StorageError),
    #[error(transparent)]
    Connector(#[from] ConnectorError),
    #[error("arrow: {0}")]
    Arrow(#[from] ArrowError),
    #[error("expression: {0}")]
    Expression(#[from] DataFusionError),
    #[error(transparent)]
    Sql(#[from] SqlError),
    /// Something it depends on is not there (now).
    #[error("{0}")]
    Unavailable(String),
    /// A promise of ours does not hold: a bug.
    #[error("internal error: {0}")]
    Internal(String),
    /// A task panicked: a bug.
    #[error("a task panicked: {0}")]
    Panic(String),
    /// The job is being stopped.
    #[error("the job was stopped")]
    Stopped,
}

impl ExecError {
    pub fn internal(message: impl Into<String>) -> ExecError {
        ExecError::Internal(message.into())
    }

    /// As a session or SHOW JOBS prints it.
    pub fn into_sql(self) -> SqlError {
        match self {
            ExecError::Sql(e) => e,
            ExecError::Storage(e) => e.into(),
            ExecError::Connector(e) => e.into(),
            ExecError::Unavailable(message) => {
                SqlError::new(SqlState::OBJECT_NOT_IN_PREREQUISITE_STATE, message)
            }
            ExecError::Stopped => SqlError::new(SqlState::ADMIN_SHUTDOWN, "the job was stopped"),
            other => SqlError::internal(other.to_string()),
        }
    }
}

impl From<ExecError> for SqlError {
    fn from(e: ExecError) -> SqlError {
        e.into_sql()
    }
}
