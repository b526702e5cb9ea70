//! The messages of stored expressions.
//!
//! Tags and numbers are the format and never change meaning; what is new gets a new tag. An expression is
//! a list of nodes in postfix order: a node's operands are the expressions that lie before it. So no
//! message nests as deep as the expression that it stores, and a node has no operands of its own.

use std::collections::BTreeMap;

use crate::codec::proto::Nothing;

#[derive(Clone, PartialEq, prost::Message)]
pub struct Expression {
    #[prost(message, repeated, tag = "1")]
    pub nodes: Vec<Node>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct Node {
    #[prost(oneof = "Kind", tags = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13")]
    pub kind: Option<Kind>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
pub enum Kind {
    #[prost(message, tag = "1")]
    Column(Column),
    #[prost(message, tag = "2")]
    Literal(Literal),
    /// The operator's number. Operands: left, right.
    #[prost(uint32, tag = "3")]
    Binary(u32),
    #[prost(message, tag = "4")]
    Not(Nothing),
    #[prost(message, tag = "5")]
    IsNull(Nothing),
    #[prost(message, tag = "6")]
    IsNotNull(Nothing),
    #[prost(message, tag = "7")]
    Negative(Nothing),
    #[prost(message, tag = "8")]
    Case(Case),
    #[prost(message, tag = "9")]
    Cast(Cast),
    /// NULL where the cast fails.
    #[prost(message, tag = "10")]
    TryCast(Cast),
    #[prost(message, tag = "11")]
    Like(Like),
    #[prost(message, tag = "12")]
    InList(InList),
    #[prost(message, tag = "13")]
    Call(Call),
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct Column {
    #[prost(uint32, tag = "1")]
    pub position: u32,
    /// What `EXPLAIN` shows.
    #[prost(string, tag = "2")]
    pub name: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct Literal {
    #[prost(message, optional, tag = "1")]
    pub r#type: Option<Type>,
    #[prost(message, optional, tag = "2")]
    pub value: Option<Value>,
    #[prost(btree_map = "string, string", tag = "3")]
    pub metadata: BTreeMap<String, String>,
}

/// Operands: the compared value, if there is one; condition and result of each branch; the result of
/// ELSE, if there is one.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub struct Case {
    #[prost(bool, tag = "1")]
    pub compared: bool,
    #[prost(uint32, tag = "2")]
    pub branches: u32,
    #[prost(bool, tag = "3")]
    pub otherwise: bool,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct Cast {
    #[prost(message, optional, tag = "1")]
    pub target: Option<Field>,
    /// Nullability and metadata are the target's, not those of what is cast.
    #[prost(bool, tag = "2")]
    pub exact: bool,
    /// NULL where the cast fails.
    #[prost(bool, tag = "3")]
    pub safe: bool,
}

/// Operands: text, pattern.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub struct Like {
    #[prost(bool, tag = "1")]
    pub negated: bool,
    #[prost(bool, tag = "2")]
    pub case_insensitive: bool,
}

/// Operands: the value, then so many items.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub struct InList {
    #[prost(bool, tag = "1")]
    pub negated: bool,
    #[prost(uint32, tag = "2")]
    pub items: u32,
}

/// A call of a scalar function.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Call {
    #[prost(string, tag = "1")]
    pub function: String,
    #[prost(uint32, tag = "2")]
    pub version: u32,
    #[prost(uint32, tag = "3")]
    pub arguments: u32,
    #[prost(message, optional, tag = "4")]
    pub result: Option<Field>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct Field {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(message, optional, tag = "2")]
    pub r#type: Option<Type>,
    #[prost(bool, tag = "3")]
    pub nullable: bool,
    #[prost(btree_map = "string, string", tag = "4")]
    pub metadata: BTreeMap<String, String>,
}

/// An Arrow type. Which parameters count depends on the kind.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Type {
    #[prost(uint32, tag = "1")]
    pub kind: u32,
    /// Of a decimal.
    #[prost(uint32, tag = "2")]
    pub precision: u32,
    #[prost(sint32, tag = "3")]
    pub scale: i32,
    /// Bytes of a value.
    #[prost(uint32, tag = "4")]
    pub width: u32,
    /// Of a time, a timestamp, a duration or an interval.
    #[prost(uint32, tag = "5")]
    pub unit: u32,
    #[prost(string, optional, tag = "6")]
    pub zone: Option<String>,
    /// The one of a list's elements, or those of a struct.
    #[prost(message, repeated, tag = "7")]
    pub fields: Vec<Field>,
}

/// A value of a type that is known from elsewhere.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Value {
    #[prost(oneof = "ValueKind", tags = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10")]
    pub kind: Option<ValueKind>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
pub enum ValueKind {
    #[prost(message, tag = "1")]
    Null(Nothing),
    #[prost(bool, tag = "2")]
    Boolean(bool),
    /// Signed integers, dates, times, timestamps and durations, in their types' units.
    #[prost(sint64, tag = "3")]
    Integer(i64),
    #[prost(uint64, tag = "4")]
    Unsigned(u64),
    #[prost(float, tag = "5")]
    Float(f32),
    #[prost(double, tag = "6")]
    Double(f64),
    #[prost(string, tag = "7")]
    Text(String),
    /// Byte strings, and the unscaled integers of decimals, little-endian, 16 or 32 bytes.
    #[prost(bytes = "vec", tag = "8")]
    Bytes(Vec<u8>),
    #[prost(message, tag = "9")]
    Interval(Interval),
    /// A list's elements, or the values of a struct's fields.
    #[prost(message, tag = "10")]
    Values(Values),
}

#[derive(Clone, Copy, PartialEq, prost::Message)]
pub struct Interval {
    #[prost(sint32, tag = "1")]
    pub months: i32,
    #[prost(sint32, tag = "2")]
    pub days: i32,
    #[prost(sint64, tag = "3")]
    pub nanoseconds: i64,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct Values {
    #[prost(message, repeated, tag = "1")]
    pub values: Vec<Value>,
}
