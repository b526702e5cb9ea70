//! Workloads beside the bank of `transfers.rs`, whose outcomes can be checked.

pub mod records;
pub mod streams;
pub mod targets;
pub mod views;
