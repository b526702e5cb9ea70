//! Messages and services that are generated from proto/*.proto; their documentation is there.

#![allow(missing_docs, clippy::all, clippy::pedantic)]

include!(concat!(env!("OUT_DIR"), "/millrace.rpc.rs"));
