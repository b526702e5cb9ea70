//! Why a process does not start.

use std::path::PathBuf;

use millrace_common::SqlError;
use millrace_frontend::FrontendError;
use millrace_storage::StorageError;

/// Why a process did not start. Each reads as a sentence and says what to do.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("cannot create the data directory {}: {source}", path.display())]
    DataDir { path: PathBuf, source: std::io::Error },
    #[error(
        "the data directory {} is used by another process; stop it, or give another --data-dir",
        path.display()
    )]
    Locked { path: PathBuf },
    #[error("cannot lock the data directory {}: {source}", path.display())]
    Lock { path: PathBuf, source: std::io::Error },
    #[error("cannot open the object store: {}", described(&SqlError::from(.0.clone())))]
    Store(#[from] StorageError),
    #[error("cannot start: {}", described(.0))]
    Meta(#[from] SqlError),
    #[error(
        "cannot listen on {address}: {source}; is a server running there? give another --listen"
    )]
    Listen { address: String, source: std::io::Error },
    #[error("cannot listen on {address}: {source}; give another --http, or --http off")]
    ListenHttp { address: String, source: std::io::Error },
    #[error(
        "calls of other processes on {address} would be neither encrypted nor authenticated; give --rpc-tls-cert, \
         --rpc-tls-key and --rpc-tls-ca, or listen on 127.0.0.1, or give --insecure-rpc where nobody else can reach the \
         network"
    )]
    InsecureRpc { address: String },
    #[error(
        "{address} is all addresses of this machine, and none at which other processes reach this one; give --advertise \
         HOST:PORT, or one address of the machine as --listen"
    )]
    NotAdvertised { address: String },
    #[error(
        "cannot secure calls between processes: {reason}; check --rpc-tls-cert, --rpc-tls-key, --rpc-tls-ca and \
         --advertise"
    )]
    RpcTls { reason: String },
    #[error("cannot encrypt connections: {reason}; check --tls-cert and --tls-key")]
    Tls { reason: String },
    #[error("cannot use --allow-path {}: {source}; name directories that exist", path.display())]
    AllowPath { path: PathBuf, source: std::io::Error },
    #[error("cannot start threads: {0}")]
    Threads(std::io::Error),
    #[error("cannot start the frontend: {0}")]
    Frontend(#[from] FrontendError),
    /// It was told to end before it had started.
    #[error("stopped while it started")]
    Stopped,
}

pub(crate) fn described(error: &SqlError) -> String {
    let extra = [&error.detail, &error.hint].into_iter().flatten();
    extra.fold(error.message.clone(), |text, part| format!("{text}. {part}"))
}
