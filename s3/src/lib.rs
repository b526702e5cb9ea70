//! An S3 server over a directory, for tests and demos: what Millrace asks of a bucket, with latency and faults on request.
//!
//! Puts are synced to disk before they are answered, and exactly one of many creators of a key (`If-None-Match: *`) wins.
//! It has one pair of keys, no encryption, no versions, no access lists, and keeps no metadata of objects: it is no
//! place for data that matter.

mod answer;
mod directory;
mod list;
mod objects;
mod server;
mod service;
mod uploads;
mod walk;

pub use server::{HEALTH, Options, Server, StartError};
