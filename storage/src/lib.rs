//! The state store: a shared-storage LSM over an object store (docs/design.md §9).
//!
//! From the bottom: [`object`] opens and wraps object stores ([`sim`] is a slow and faulty one for
//! tests); [`block`]s of sorted entries make up [`run`]s with an index and a [`filter`]; [`segment`]s
//! are the objects that hold runs; [`cache`] keeps blocks in memory and on local disk.
//!
//! Storage knows tables, keys, epochs and columns, and nothing of SQL.

pub mod block;
pub mod error;
pub mod filter;
pub mod run;
pub mod segment;

pub use error::StorageError;
