//! The PostgreSQL side of Millrace: sessions, definitions, DML, COPY, batch queries, system catalogs.
//!
//! A connection is one task ([`connection`]) that owns its socket and its [`session::Session`]; it
//! speaks the protocol ([`wire`]), turns text into statements (the planner), and hands them to
//! [`ddl`], [`dml`], [`copy`] or [`query`]. Everything below is behind one trait, [`cluster::Cluster`].
//!
//! Trade-off: parameters become literals before planning, so a prepared statement is planned at each
//! execution; in return every plan sees its values and point reads need no second mechanism.

pub mod advisory;
pub mod auth;
pub mod catalog;
pub mod cluster;
pub mod connection;
pub mod connection_limit;
pub mod console;
pub mod copy;
pub mod ddl;
pub mod display;
pub mod dml;
pub mod encoding;
pub mod error;
mod fetch_direction;
pub mod identification;
pub mod incarnation;
pub mod local_cluster;
mod other_frontends;
pub mod other_sessions;
pub mod query;
pub mod remote_cluster;
pub mod secrets;
pub mod server;
pub mod session;
pub mod statements;
mod unsupported;
pub mod wire;
mod word_reader;

/// The stack of a thread that plans: plans are as deep as the longest chain that the parser takes. Address space only,
/// until it is needed.
pub const STACK_BYTES: usize = 32 << 20;

pub use error::FrontendError;
pub use incarnation::Incarnation;
pub use local_cluster::Direct;
pub use remote_cluster::{ReadWays, RemoteCluster, RemoteOptions, TableProcess, TableRoutes};
pub use server::{Frontend, FrontendConfig};
