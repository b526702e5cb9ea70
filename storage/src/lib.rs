//! The state store: a shared-storage LSM over an object store (docs/design.md §9).
//!
//! From the bottom: [`object`] opens and wraps object stores ([`sim`] is a slow and faulty one for
//! tests); [`block`]s of sorted entries make up [`run`]s with an index and a [`filter`]; [`segment`]s
//! are the objects that hold runs; [`cache`] keeps blocks in memory and on local disk.
//!
//! On top of these: a task writes through a [`writer`] (open memtable, sealed into a [`memrun`] at a
//! barrier); a [`job_store`] makes sealed runs durable (tail [`mod@tail`], or runs), publishes them,
//! flushes and reads them as of an epoch ([`snapshot`], [`changes`]); [`merge`] is the one place where
//! entries of a key meet; [`compaction`] plans and does the rewriting of runs.
//!
//! Storage knows tables, keys, epochs and columns, and nothing of SQL.

// Tests may take what clippy.toml keeps from the engine.
#![cfg_attr(test, allow(clippy::disallowed_methods, clippy::disallowed_types))]

pub mod block;
pub mod cache;
mod changes;
mod committed;
pub mod compaction;
mod disk;
pub mod entry;
pub mod error;
pub mod filter;
mod flush;
pub mod follower;
pub mod given_up;
pub mod hot_fetch;
mod hot_keys;
pub mod job_store;
mod lookup;
mod memory_compaction;
pub mod memrun;
mod memtable;
pub mod merge;
pub mod object;
mod pins;
pub mod put_waits;
pub mod read_counts;
mod reading;
pub mod recovery_reads;
pub mod run;
mod run_writer;
pub mod segment;
pub mod segment_copy;
#[allow(
    clippy::disallowed_methods,
    reason = "it stands for a store outside, and its delays follow the clock of sleeps"
)]
pub mod sim;
mod slice;
pub mod snapshot;
mod spill;
pub mod stage;
pub mod state_store;
pub mod table;
mod tail;
pub mod tail_limits;
mod ttl_filter;
mod version;
pub mod write_delay;
pub mod writer;

pub use entry::Found;
pub use error::StorageError;
pub use follower::{FollowedJob, FollowedVersion, Pinned, VersionFollower};
pub use job_store::{JobStats, JobStore, Persisted, TableStats};
pub use memrun::MemRun;
pub use reading::{Lookup, Part, ReadClass, Reading};
pub use snapshot::{KeyRange, ScanBatch, ScanOptions, Snapshot};
pub use state_store::{StateStore, StoreOptions};
pub use table::{RowStorage, TableDesc};
pub use tail_limits::TailLimits;
pub use writer::TableWriter;
