//! The messages of the stored job graph, format version 1.
//!
//! Tags are the format and never change meaning; what is new gets a new tag. Positions are `u32`.
//! Enumerations start at 1 so that a missing value is noticed. Expressions ([`super::expr`]) are
//! messages of their own, as bytes; so are schemas, as Arrow IPC streams without batches.

use prost::bytes::Bytes;

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
pub struct EventTimeBuffer {
    #[prost(uint32, tag = "1")]
    pub column: u32,
    #[prost(uint32, repeated, tag = "2")]
    pub vnode: Vec<u32>,
    #[prost(uint32, tag = "3")]
    pub table: u32,
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
    pub nodes: Vec<Node>,
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

/// Which edge an exchange takes.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub struct EdgeRef {
    #[prost(uint32, tag = "1")]
    pub fragment: u32,
    #[prost(uint32, tag = "2")]
    pub output: u32,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct Node {
    #[prost(uint32, repeated, tag = "1")]
    pub inputs: Vec<u32>,
    #[prost(bytes = "bytes", tag = "2")]
    pub schema: Bytes,
    #[prost(bool, tag = "3")]
    pub append_only: bool,
    #[prost(
        oneof = "Operator",
        tags = "10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 40, 41, 42, 43, 44, 50, 51, 52, 53, 54"
    )]
    pub op: Option<Operator>,
    #[prost(message, repeated, tag = "60")]
    pub marks: Vec<DerivedWatermark>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
pub enum Operator {
    #[prost(message, tag = "10")]
    Subscribe(Leaf),
    #[prost(message, tag = "11")]
    Source(Leaf),
    #[prost(message, tag = "12")]
    Exchange(EdgeRef),
    /// An Arrow IPC stream of one batch.
    #[prost(bytes, tag = "13")]
    Values(Vec<u8>),
    #[prost(message, tag = "14")]
    Filter(Expressions),
    #[prost(message, tag = "15")]
    Project(Expressions),
    #[prost(message, tag = "16")]
    Union(Nothing),
    #[prost(message, tag = "17")]
    Hop(Hop),
    #[prost(message, tag = "18")]
    Aggregate(Aggregate),
    #[prost(message, tag = "19")]
    Join(Join),
    #[prost(message, tag = "20")]
    TopN(TopN),
    #[prost(message, tag = "21")]
    Materialize(Nothing),
    #[prost(message, tag = "22")]
    Blackhole(Nothing),
    /// The column that says how often.
    #[prost(uint32, tag = "40")]
    Repeat(u32),
    #[prost(message, tag = "41")]
    Expand(Expand),
    #[prost(message, tag = "42")]
    Window(Window),
    #[prost(message, tag = "43")]
    Sink(Nothing),
    #[prost(message, tag = "44")]
    Unnest(Unnest),
    #[prost(message, tag = "50")]
    WindowClose(EventTimeBuffer),
    #[prost(message, tag = "51")]
    TemporalUpperBound(EventTimeBuffer),
    #[prost(message, tag = "52")]
    Lookup(Lookup),
    /// Microseconds.
    #[prost(int64, tag = "53")]
    Stamp(i64),
    #[prost(message, tag = "54")]
    TemporalLowerBound(EventTimeBuffer),
}

#[derive(Clone, Copy, PartialEq, prost::Message)]
pub struct Nothing {}

#[derive(Clone, PartialEq, prost::Message)]
pub struct Unnest {
    #[prost(uint32, repeated, tag = "1")]
    pub lists: Vec<u32>,
    #[prost(bool, tag = "2")]
    pub keep_empty: bool,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct Leaf {
    #[prost(uint32, tag = "1")]
    pub relation: u32,
    #[prost(uint32, repeated, tag = "2")]
    pub columns: Vec<u32>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct Expressions {
    #[prost(bytes = "bytes", repeated, tag = "1")]
    pub exprs: Vec<Bytes>,
}

#[derive(Clone, Copy, PartialEq, prost::Message)]
pub struct Hop {
    #[prost(uint32, tag = "1")]
    pub time_column: u32,
    #[prost(int64, tag = "2")]
    pub size_us: i64,
    #[prost(int64, tag = "3")]
    pub slide_us: i64,
    #[prost(int64, tag = "4")]
    pub offset_us: i64,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct Aggregate {
    #[prost(uint32, repeated, tag = "1")]
    pub group: Vec<u32>,
    #[prost(uint32, repeated, tag = "2")]
    pub vnode: Vec<u32>,
    #[prost(message, repeated, tag = "3")]
    pub calls: Vec<AggCall>,
    #[prost(uint32, tag = "4")]
    pub table: u32,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct AggCall {
    #[prost(uint32, tag = "1")]
    pub func: u32,
    #[prost(uint32, optional, tag = "2")]
    pub arg: Option<u32>,
    #[prost(bool, tag = "3")]
    pub distinct: bool,
    #[prost(uint32, optional, tag = "4")]
    pub filter: Option<u32>,
    /// A schema of one column, of the output's type.
    #[prost(bytes = "bytes", tag = "5")]
    pub output_type: Bytes,
    #[prost(uint32, optional, tag = "6")]
    pub value_table: Option<u32>,
    #[prost(bool, tag = "7")]
    pub value_descending: bool,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct JoinSide {
    #[prost(uint32, repeated, tag = "1")]
    pub keys: Vec<u32>,
    #[prost(uint32, repeated, tag = "2")]
    pub vnode: Vec<u32>,
    #[prost(uint32, tag = "3")]
    pub table: u32,
    #[prost(uint32, tag = "4")]
    pub storage: u32,
    #[prost(uint32, repeated, tag = "5")]
    pub unique_key: Vec<u32>,
    #[prost(bool, tag = "6")]
    pub unique_per_key: bool,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct Join {
    #[prost(uint32, tag = "1")]
    pub kind: u32,
    #[prost(message, optional, tag = "2")]
    pub left: Option<JoinSide>,
    #[prost(message, optional, tag = "3")]
    pub right: Option<JoinSide>,
    #[prost(bytes = "bytes", optional, tag = "4")]
    pub residual: Option<Bytes>,
    #[prost(bool, tag = "5")]
    pub null_aware: bool,
    #[prost(bool, tag = "6")]
    pub null_equals_null: bool,
    #[prost(uint32, repeated, tag = "7")]
    pub output: Vec<u32>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct Lookup {
    #[prost(bool, tag = "1")]
    pub outer: bool,
    #[prost(uint32, repeated, tag = "2")]
    pub left_keys: Vec<u32>,
    #[prost(uint32, repeated, tag = "3")]
    pub left_vnode: Vec<u32>,
    #[prost(message, optional, tag = "4")]
    pub right: Option<JoinSide>,
    #[prost(bytes = "bytes", optional, tag = "5")]
    pub residual: Option<Bytes>,
    #[prost(uint32, repeated, tag = "6")]
    pub output: Vec<u32>,
    #[prost(message, optional, tag = "7")]
    pub matches: Option<Matches>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct Matches {
    #[prost(uint32, tag = "1")]
    pub table: u32,
    #[prost(uint32, tag = "2")]
    pub identity: u32,
    #[prost(uint32, repeated, tag = "3")]
    pub unique_key: Vec<u32>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct TopN {
    #[prost(uint32, repeated, tag = "1")]
    pub group: Vec<u32>,
    #[prost(uint32, repeated, tag = "2")]
    pub vnode: Vec<u32>,
    #[prost(message, repeated, tag = "3")]
    pub order: Vec<Order>,
    #[prost(uint64, tag = "4")]
    pub offset: u64,
    #[prost(uint64, optional, tag = "5")]
    pub limit: Option<u64>,
    #[prost(uint32, tag = "6")]
    pub rank: u32,
    #[prost(bool, tag = "7")]
    pub emit_rank: bool,
    #[prost(uint32, tag = "8")]
    pub table: u32,
    #[prost(uint32, tag = "9")]
    pub storage: u32,
    #[prost(uint32, repeated, tag = "10")]
    pub unique_key: Vec<u32>,
    #[prost(bool, tag = "11")]
    pub append_only_input: bool,
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

#[derive(Clone, PartialEq, prost::Message)]
pub struct Expand {
    #[prost(uint32, repeated, tag = "1")]
    pub columns: Vec<u32>,
    #[prost(message, repeated, tag = "2")]
    pub sets: Vec<GroupingSet>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct GroupingSet {
    #[prost(bool, repeated, tag = "1")]
    pub keep: Vec<bool>,
    #[prost(int64, tag = "2")]
    pub id: i64,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct Window {
    #[prost(uint32, repeated, tag = "1")]
    pub group: Vec<u32>,
    #[prost(uint32, repeated, tag = "2")]
    pub vnode: Vec<u32>,
    #[prost(message, repeated, tag = "3")]
    pub order: Vec<Order>,
    #[prost(message, repeated, tag = "4")]
    pub calls: Vec<WindowCall>,
    #[prost(uint32, tag = "5")]
    pub table: u32,
    #[prost(uint32, tag = "6")]
    pub storage: u32,
    #[prost(uint32, repeated, tag = "7")]
    pub unique_key: Vec<u32>,
    #[prost(message, optional, tag = "8")]
    pub closing: Option<Closing>,
}

#[derive(Clone, Copy, PartialEq, prost::Message)]
pub struct Closing {
    #[prost(uint32, tag = "1")]
    pub column: u32,
    #[prost(int64, tag = "2")]
    pub gap: i64,
    #[prost(uint32, tag = "3")]
    pub table: u32,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct WindowCall {
    #[prost(string, tag = "1")]
    pub function: String,
    #[prost(bool, tag = "2")]
    pub aggregate: bool,
    #[prost(bytes = "bytes", repeated, tag = "3")]
    pub args: Vec<Bytes>,
    #[prost(bytes = "bytes", optional, tag = "4")]
    pub filter: Option<Bytes>,
    #[prost(bool, tag = "5")]
    pub distinct: bool,
    #[prost(bool, tag = "6")]
    pub ignore_nulls: bool,
    #[prost(uint32, tag = "7")]
    pub units: u32,
    #[prost(message, optional, tag = "8")]
    pub start: Option<Bound>,
    #[prost(message, optional, tag = "9")]
    pub end: Option<Bound>,
    /// A ranking function, for calls that are computed from places alone.
    #[prost(uint32, optional, tag = "10")]
    pub numbering: Option<u32>,
    /// A schema of one column, of the output's type.
    #[prost(bytes = "bytes", tag = "11")]
    pub output_type: Bytes,
    /// The function's.
    #[prost(uint32, tag = "12")]
    pub version: u32,
}

/// An end of a window frame.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Bound {
    /// 1 preceding, 2 current row, 3 following.
    #[prost(uint32, tag = "1")]
    pub kind: u32,
    /// A literal; NULL: unbounded. Absent for the current row.
    #[prost(bytes = "bytes", optional, tag = "2")]
    pub offset: Option<Bytes>,
}
