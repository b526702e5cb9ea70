//! Batch queries: a bound plan over snapshots, run by DataFusion.
//!
//! A statement binds against one catalog snapshot and reads one epoch. Scans are bound before the
//! epoch is known (names decide which relations are asked for); they share a cell that is filled
//! between planning and execution. Plans run on the frontend's query runtime, never on the one that
//! serves connections; results cross over through a short channel, so a slow client holds back its
//! query and nothing else. Dropping the stream aborts the query; joins, which may go on for long without awaiting
//! anything, see to it themselves that they end and that others have their turn.

pub mod catalog_view;
pub mod engine;
pub mod index;
mod interruptible;
pub mod null_errors;
pub mod overlay;
mod pauses;
pub mod pool;
pub mod snapshot_table;

pub use catalog_view::SessionCatalog;
pub use engine::{ExpressionErrors, QueryEngine};
