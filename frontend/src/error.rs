//! The crate's own errors: those that end a server or a connection. What a statement can fail with
//! is a [`SqlError`].

use millrace_common::SqlError;

#[derive(Debug, thiserror::Error)]
pub enum FrontendError {
    #[error("cannot start the query runtime: {0}")]
    Runtime(#[source] std::io::Error),
    #[error("{0}")]
    Sql(#[from] SqlError),
    #[error(transparent)]
    Io(#[from] std::io::Error),
}
