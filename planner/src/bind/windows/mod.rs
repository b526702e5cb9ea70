//! Window functions: named windows, frames and their bounds, peers and arguments.
//!
//! What DataFusion does not compute as PostgreSQL does becomes a call of ours over the whole partition.

pub(super) mod args;
pub(super) mod frame_bounds;
pub(super) mod frames;
pub mod named;
pub(super) mod peers;
