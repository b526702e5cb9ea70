//! The process: configuration, and the roles wired together (docs/design.md §6, §13).
//!
//! [`standalone`] runs all roles in one process, joined by direct calls through the same traits that
//! a cluster serves over the network.

pub mod config;
pub mod demo;
pub mod http;
pub mod standalone;

pub use config::{Access, Config, ConfigError, Http, Options, Tuning};
pub use standalone::{Overrides, Standalone, StartError};
