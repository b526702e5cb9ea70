//! PostgreSQL's frontend/backend protocol, version 3: messages to and from bytes.
//!
//! Purpose: the message formats are the library's (`pgwire::messages`); this module puts a frame around
//! its decoder and a send buffer behind its encoder. The session loop is our own
//! ([`crate::connection`]): portals suspend between any two rows and a running statement can be
//! cancelled between any two batches.
//!
//! Invariants: decoding never panics and never allocates more than a message's own length, which is
//! bounded by [`MAX_MESSAGE`]; a malformed message is a [`ProtocolError`], which ends the connection.
//! The library's decoder trusts lengths and counts inside a message and replaces bytes that are not
//! UTF-8, so a message's [`shape`] is checked before the library sees it.
//!
//! Source: PostgreSQL 15 documentation, chapter 55.

pub mod backend;
pub mod frontend;
mod shape;

pub use backend::{Backend, Field, Told, TransactionStatus, format_of};
pub use frontend::{decode_message, decode_password, decode_startup, incoming, sasl_initial};
pub use pgwire::messages::PgWireFrontendMessage as FrontendMessage;

/// The longest message taken from a client: PostgreSQL's own limit.
pub const MAX_MESSAGE: usize = 0x3fff_ffff - 1;
/// The longest message of a client that is proving who it is: about PostgreSQL's limit.
pub const MAX_PASSWORD: usize = 64 << 10;
/// The longest startup packet, as in PostgreSQL.
pub const MAX_STARTUP: usize = 10_000;

/// A client broke the protocol; the connection ends.
#[derive(Debug, thiserror::Error)]
pub enum ProtocolError {
    #[error("invalid frontend message type {0}")]
    UnknownMessage(u8),
    #[error("invalid length of a protocol message")]
    Length,
    #[error("invalid message format")]
    Shape,
    #[error("invalid byte sequence for encoding \"UTF8\"")]
    Encoding,
    #[error("unsupported frontend protocol {0}.{1}: server supports 3.0")]
    Version(u16, u16),
    #[error("{0}")]
    Library(#[from] pgwire::error::PgWireError),
}
