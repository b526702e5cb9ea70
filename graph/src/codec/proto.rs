//! The messages of the stored job graph; those of operators stand with them in [`crate::operator`].
//!
//! Tags are the format and never change meaning; what is new gets a new tag. Positions are `u32`.
//! Enumerations start at 1 so that a missing value is noticed. Expressions ([`super::expr`]) are
//! messages of their own, as bytes; so are schemas, as Arrow IPC streams without batches.

use prost::bytes::Bytes;

use crate::operator::NodeMessage;

/// The envelope, the same in every version.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Stored {
    #[prost(uint32, tag = "1")]
    pub version: u32,
    /// `millrace_common::hash::hash_bytes` of `graph`.
    #[prost(fixed64, tag = "2")]
    pub checksum: u64,
    /// Version 1: a [`JobGraph`].
    #[prost(bytes = "bytes", tag = "3")]
    pub graph: Bytes,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct JobGraph {
    #[prost(message, repeated, tag = "1")]
    pub fragments: Vec<Fragment>,
    #[prost(message, repeated, tag = "2")]
    pub tables: Vec<StateTable>,
    #[prost(message, optional, tag = "3")]
    pub output: Option<RelationLayout>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct RelationLayout {
    #[prost(bytes = "bytes", tag = "1")]
    pub schema: Bytes,
    #[prost(uint32, tag = "2")]
    pub storage: u32,
    #[prost(uint32, repeated, tag = "3")]
    pub key: Vec<u32>,
    #[prost(uint32, repeated, tag = "4")]
    pub distribution: Vec<u32>,
    #[prost(bool, tag = "5")]
    pub append_only: bool,
    #[prost(message, repeated, tag = "20")]
    pub marks: Vec<DerivedWatermark>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct DerivedWatermark {
    #[prost(uint32, tag = "1")]
    pub column: u32,
    #[prost(message, repeated, tag = "2")]
    pub terms: Vec<WatermarkTerm>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct WatermarkTerm {
    #[prost(uint32, tag = "1")]
    pub relation: u32,
    #[prost(uint32, tag = "2")]
    pub column: u32,
    #[prost(message, repeated, tag = "3")]
    pub steps: Vec<MarkStep>,
}

/// With a size: a bin. Else an addition.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub struct MarkStep {
    #[prost(sint64, tag = "1")]
    pub add: i64,
    #[prost(int64, tag = "2")]
    pub size: i64,
    #[prost(sint64, tag = "3")]
    pub offset: i64,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct Retention {
    /// Absent: the first column of the key.
    #[prost(uint32, optional, tag = "1")]
    pub value: Option<u32>,
    #[prost(message, repeated, tag = "2")]
    pub terms: Vec<WatermarkTerm>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct StateTable {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(uint32, tag = "2")]
    pub class: u32,
    #[prost(bytes = "bytes", tag = "3")]
    pub value_schema: Bytes,
    #[prost(uint32, tag = "4")]
    pub storage: u32,
    #[prost(bool, tag = "5")]
    pub relation: bool,
    #[prost(message, optional, tag = "20")]
    pub retention: Option<Retention>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct Fragment {
    #[prost(message, repeated, tag = "1")]
    pub nodes: Vec<NodeMessage>,
    #[prost(bool, tag = "2")]
    pub singleton: bool,
    /// None: the fragment holds the root.
    #[prost(message, repeated, tag = "3")]
    pub outputs: Vec<Edge>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct Edge {
    #[prost(uint32, tag = "1")]
    pub to: u32,
    /// 1 rows.
    #[prost(uint32, tag = "2")]
    pub kind: u32,
    /// The node that it leaves.
    #[prost(uint32, tag = "3")]
    pub from: u32,
    /// Of rows.
    #[prost(uint32, repeated, tag = "4")]
    pub hash: Vec<u32>,
}

#[derive(Clone, Copy, PartialEq, prost::Message)]
pub struct Order {
    #[prost(uint32, tag = "1")]
    pub column: u32,
    #[prost(bool, tag = "2")]
    pub descending: bool,
    #[prost(bool, tag = "3")]
    pub nulls_first: bool,
}

/// Of what has no settings.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub struct Nothing {}
