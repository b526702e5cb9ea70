//! The services between processes, over gRPC: for each an adapter that serves an implementation, and one that is an
//! implementation and calls another process.
//!
//! - [`Admission`] decides which calls a process takes: protocol version, store, term and incarnations are in every call's
//!   metadata, and a caller that is behind, or works on another store, is told so.
//! - [`Server`] listens with the services that a process has; [`Peer`] is the way to another process. With [`Tls`], both
//!   sides prove who they are.
//! - [`RemoteCompute`], [`RemoteCompactor`], [`RemoteMeta`], [`RemoteOperator`], [`RemoteDml`] and [`RemoteReads`] call.
//!
//! A call that is dropped by its caller is dropped by its server. Calls that answer at once have a deadline; those that
//! may last (a cut, a compaction) end when the connection is silent for too long.

mod admission;
mod compactor;
mod compute;
mod convert;
mod dml;
mod meta;
mod metrics;
mod observe;
mod operator;
mod peer;
mod read;
mod server;
mod tls;

pub use admission::{Admission, Caller};
pub use compactor::RemoteCompactor;
pub use compute::RemoteCompute;
pub use dml::RemoteDml;
pub use meta::{LeaderSlot, RemoteMeta};
pub use metrics::write_call_metrics;
pub use operator::{OperatorSlot, RemoteOperator};
pub use peer::{CallLimits, Handshake, Identity, Peer};
pub use read::RemoteReads;
pub use server::Server;
pub use tls::{Pem, Tls, TlsError};
