//! What the end-to-end tests share: a server as a child process that can be killed and started
//! again ([`Server`]), and the runner of the conformance suite ([`suite`]).
//!
//! Tests speak to the server only through its own door, the PostgreSQL wire protocol.

pub mod bucket;
pub mod server;
pub mod suite;
pub mod target;

pub use server::{Server, ServerOptions};
