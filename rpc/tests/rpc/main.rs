//! The messages between roles, and the services that carry them.

#![allow(clippy::unwrap_used)] // a test fails where it does not find what it made

mod failures;
mod fake;
mod filled;
mod golden;
mod golden_file;
mod messages;
mod operator;
mod round_trips;
mod tls;
