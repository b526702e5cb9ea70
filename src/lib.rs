//! The process: configuration, and the roles wired together (docs/design.md §6, §13).
//!
//! [`standalone`] runs all roles in one process, joined ([`Loopback`]) by direct calls through the same traits that
//! a cluster serves over the network.

mod candidate;
pub mod config;
pub mod copy;
pub mod ctl;
pub mod demo;
mod descriptors;
pub mod health;
pub mod http;
mod leadership;
mod listen;
pub mod logging;
mod loopback;
mod machine;
mod port;
mod predecessor;
pub mod roles;
pub mod runtimes;
pub mod standalone;
mod usage;

pub use config::{Access, Config, ConfigError, Http, LogFormat, Options, Password, Tuning};
pub use loopback::Loopback;
pub use standalone::{Overrides, Standalone, StartError};
