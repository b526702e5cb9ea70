//! PostgreSQL's frontend/backend protocol, version 3: messages to and from bytes.
//!
//! Purpose: a session that owns its socket. Rows go from Arrow columns straight into the send
//! buffer, portals suspend between any two rows, and a running statement can be cancelled between
//! any two batches; a library's handler traits would put a buffered response between the two.
//!
//! Invariants: decoding never panics and never allocates more than a message's own length, which is
//! bounded by [`MAX_MESSAGE`]; a malformed message is a [`ProtocolError`], which ends the connection.
//!
//! Source: PostgreSQL 15 documentation, chapter 55.

pub mod backend;
pub mod frontend;

pub use backend::{Backend, Field, TransactionStatus};
pub use frontend::{FrontendMessage, Startup, decode_message, decode_startup};

/// The longest message taken from a client: PostgreSQL's own limit.
pub const MAX_MESSAGE: usize = 0x3fff_ffff;
/// The longest startup packet, as in PostgreSQL.
pub const MAX_STARTUP: usize = 10_000;

/// A client broke the protocol; the connection ends.
#[derive(Debug, thiserror::Error)]
pub enum ProtocolError {
    #[error("invalid frontend message type {0}")]
    UnknownMessage(u8),
    #[error("invalid length of a protocol message")]
    Length,
    #[error("insufficient data left in message")]
    Truncated,
    #[error("invalid string in message")]
    Text,
    #[error("unsupported frontend protocol {0}.{1}: server supports 3.0")]
    Version(u16, u16),
}
