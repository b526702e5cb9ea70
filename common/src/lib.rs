//! What every other crate of Millrace shares: identifiers, the epoch clock's type, Z-set deltas,
//! key encoding and hashing, SQL types, time and tasks, and errors that read as a sentence to a user.
//!
//! Nothing here knows about storage, planning or execution (docs/design.md §13).

pub mod access;
pub mod code_pages;
pub mod collections;
pub mod crash;
pub mod delta;
pub mod encoding;
pub mod env;
pub mod epoch;
pub mod error;
pub mod exact_sum;
pub mod fair_shares;
pub mod fault_injection;
pub mod hash;
pub mod heap;
pub mod identity;
pub mod ids;
pub mod json;
pub mod keys;
pub mod random_tests;
pub mod resident;
pub mod settings;
pub mod shared_map;
pub mod task;
pub mod threads;
pub mod types;
pub mod zone;

pub use delta::DeltaChunk;
pub use env::{Env, EnvHandle, SystemEnv};
pub use epoch::Epoch;
pub use error::{SqlError, SqlState};
pub use exact_sum::ExactSum;
pub use ids::{Generation, JobId, RelationId, RunId, TableId, VNODE_COUNT, Vnode, WorkerId};
pub use types::SqlType;
