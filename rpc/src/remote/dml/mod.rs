//! [`DmlService`](crate::dml::DmlService) over gRPC.

mod client;
mod convert;
mod serve;

pub use client::RemoteDml;
pub(super) use serve::server;
