//! Gated batches and the timestamp-aware cache (docs/design.md §7): what every operator with keyed
//! state is built from.
//!
//! - [`keys`]: a chunk's keys, hashed and encoded once, and small owned key bytes;
//! - [`cache`]: key → slot, residency, age, completeness; what a slot holds is the operator's;
//! - [`stamps`]: when a row uses its key's entry: event time, or order of arrival;
//! - [`eviction_queue`]: entries in the order in which they are evicted;
//! - [`gate`]: rows waiting for their key's state, first in first out by key;
//! - [`fetch`]: batched reads under way;
//! - [`prefetch`]: those made ahead of rows;
//! - [`prefixes_ahead`]: those of entries that an operator keeps in no cache;
//! - `prefetch_budget`: how many of those in a second;
//! - [`range_ahead`]: ranges that a watermark is about to pass, read before it has;
//! - `due`: entries that rows are expected for;
//! - [`keyed`]: these together, generic over what an entry holds: what operators use;
//! - `held`: what is held until the barrier, and when that is too much;
//! - [`arena`]: rows kept column-wise and referred to by (chunk, row);
//! - [`delayed`]: a table whose reads all complete later, for tests;
//! - [`table`]: the state table behind it all, as a trait, so that tests choose when reads complete.
//!
//! Together: `probe` gives every row of a chunk its slot in one pass. Rows of resident slots run at
//! once; a chunk of only such rows allocates no future. The others are parked by reference and their
//! missing keys join one batched read; when it completes, all rows it frees run as one batch.
//!
//! Invariants (checked in tests): a slot with parked rows is `FETCHING`; a `FETCHING` slot belongs to
//! exactly one read under way for rows; at a barrier nothing is parked and nothing is under way; admitted rows
//! = run rows + parked rows.

pub mod arena;
pub mod cache;
pub mod collected;
pub mod delayed;
mod due;
pub mod eviction_queue;
pub mod fetch;
pub mod gate;
mod held;
pub mod keyed;
pub mod keys;
mod limits;
pub mod prefetch;
mod prefetch_budget;
pub mod prefixes_ahead;
pub mod range_ahead;
pub mod stamps;
pub mod table;

pub use arena::RowArena;
pub use cache::{KeyTable, Slot};
pub use delayed::Delayed;
pub use fetch::{Answers, Divide, Fetches, Reads};
pub use gate::KeyGate;
pub use held::HeldUntilBarrier;
pub use keyed::{Entries, KeyedState};
pub use keys::KeyBytes;
#[cfg(test)]
pub use limits::NOTHING_CACHED;
pub use prefixes_ahead::PrefixesAhead;
pub use range_ahead::RangeAhead;
pub use stamps::Stamps;
pub use table::StateTable;
