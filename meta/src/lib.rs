//! Meta: the catalog, the log, the epoch clock, and a driver for every job (docs/design.md §4, §10).
//!
//! Everything durable is in the object store. Metadata is a log of numbered records created with
//! conditional puts ([`log`]); the state is a pure fold over it ([`state`], [`fold`]); nothing else is
//! written, and an idle cluster makes no request. Frontiers and exact intervals are derived from the
//! state ([`exactness`]). Each job has a driver of its own ([`driver`]), so that no job waits for another;
//! what they share is the [`log::LogWriter`], which never waits for a job.
//!
//! ```text
//! drivers, coordinators, DDL ──entries──▶ LogWriter ──one record, one PUT──▶ object store
//!        ▲                                   │ fold
//!        └──────────── verdicts ◀────────────┴──▶ state ──▶ catalog, frontiers, waiting reads
//! ```

// Tests may take what clippy.toml keeps from the engine.
#![cfg_attr(test, allow(clippy::disallowed_methods, clippy::disallowed_types))]

pub mod advisory;
mod apply_lease;
pub mod backlog;
pub mod backup;

pub mod catalog;
pub mod claim;
pub mod clock;
pub mod cluster;
mod collection;
mod commit_volume;
mod compact;
mod compaction_board;
mod compaction_queue;
mod compactors;
mod computes;
mod control;
pub mod definitions;
pub mod dependencies;
mod detach;
mod doubted;
mod driver;
pub mod endings;
mod epoch_waiters;
pub mod error;
pub mod exactness;
pub mod feed;
mod first_record;
pub mod fold;
pub mod follower;
mod gc;
mod groups;
mod horizons;
mod idle_splits;
mod in_flight;
pub mod invariants;
mod job;
mod job_loads;
pub mod job_reports;
pub mod jobs;
pub mod log;
mod lookups;
mod members;
pub mod meta;
pub mod objects;
mod operator;
pub mod options;
mod placement;
pub mod processes;
mod read;
pub mod read_lease;
mod rebalance;
mod relation_changes;
pub mod report;
pub mod schedule;
pub mod segments;
mod sessions;
pub mod settings;
mod shared;
mod source;
pub mod state;
pub mod status;
mod store_waits;
mod stream;
#[cfg(test)]
mod tests;
pub mod timeline;

pub use catalog::Catalog;
pub use cluster::Connect;
pub use error::{MetaError, is_skewed};
pub use follower::{FollowError, LogFollower};
pub use gc::GcOptions;
pub use meta::{CreateOptions, Meta, UsageOf, is_overtaken};
pub use options::{MayClaim, MetaOptions};
pub use read_lease::{LeaseError, ReadLease};
pub use segments::{RewriteOptions, RewriteStats};
pub use status::{JobState, JobStatus};
