//! Promises of the state store, as its users see it. `rounds` and `write_faults` are binaries of their own: they measure
//! with real clocks, so the random tests here do not run beside them.

#![allow(clippy::disallowed_methods, clippy::disallowed_types)]
#![allow(clippy::unwrap_used)] // a test fails where it does not find what it made

mod follower;
mod given_up;
mod hot_fetch;
mod large_epoch;
mod model;
mod newest_first;
#[path = "../common/numbers.rs"]
mod numbers;
#[path = "../common/pairs.rs"]
mod pairs;
mod parts;
mod retention;
mod same_epoch;
mod tail;
