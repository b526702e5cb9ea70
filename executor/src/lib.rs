//! Executes jobs on a worker: tasks, exchange, operators, gated batches, caches, table sequencers
//! (docs/design.md §6, §7).
//!
//! The runtime half (tasks, channels, inputs, roots, statements) and the operators meet only in
//! [`operator`]. Nothing here knows SQL; nothing here decides when an epoch ends: meta does.

// Tests may take what clippy.toml keeps from the engine.
#![cfg_attr(test, allow(clippy::disallowed_methods, clippy::disallowed_types))]

pub mod blackhole;
pub mod changelog_cache;
pub mod consolidate;
pub mod dml;
pub mod error;
pub mod error_sink;
pub mod exchange;
pub mod input;
mod invariants;
pub mod layout;
pub mod lookahead;
pub mod materialize;
pub mod memory;
pub mod operator;
pub mod operators;
pub mod options;
pub mod publish;
pub mod rebuild;
mod sequence;
mod spilled_delta;
pub mod state;
pub mod stats;
pub mod task;
pub mod watermark;
pub mod worker;

pub use blackhole::{Digest, digest};
pub use dml::{DmlError, DmlKind, DmlOutcome, DmlStatement, InsertConflict, Load};
pub use error::ExecError;
pub use options::ExecOptions;
pub use worker::{Worker, WorkerOptions};
