//! What sources have read, and how far.

use super::snapshot::TimelineSnapshot;

/// The source's content at the record's epoch ends at these offsets (exclusive).
#[derive(Clone, PartialEq, prost::Message)]
pub struct SourceAdvance {
    #[prost(uint32, tag = "1")]
    pub source: u32,
    #[prost(message, repeated, tag = "2")]
    pub offsets: Vec<SplitOffset>,
    /// Splits that leave or enter the minimum that is the source's watermark.
    #[prost(message, repeated, tag = "20")]
    pub marks: Vec<SplitMark>,
    /// Splits found since the last record.
    #[prost(message, repeated, tag = "10")]
    pub splits: Vec<SourceSplit>,
    /// Files found since the last record; each goes behind those its split has.
    #[prost(message, repeated, tag = "11")]
    pub files: Vec<SourceFile>,
}

/// A split becomes idle, or active (again).
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub struct SplitMark {
    #[prost(uint32, tag = "1")]
    pub split: u32,
    #[prost(bool, tag = "2")]
    pub idle: bool,
    /// Of a split that becomes active: the source's watermark before, in microseconds. Rows from here
    /// on that are older are late.
    #[prost(sint64, optional, tag = "3")]
    pub floor: Option<i64>,
}

/// A [`SplitMark`] as the fold keeps it.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub struct SplitMarkAt {
    #[prost(uint64, tag = "1")]
    pub epoch: u64,
    #[prost(message, required, tag = "2")]
    pub mark: SplitMark,
    /// The split's offset before: the floor holds for rows from here on.
    #[prost(uint64, tag = "3")]
    pub offset: u64,
}

/// A split that was discovered. One that is named by offsets only begins at 0.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct SourceSplit {
    #[prost(uint32, tag = "1")]
    pub split: u32,
    /// As the outside calls it.
    #[prost(string, tag = "2")]
    pub name: String,
    /// Offset of its first row.
    #[prost(uint64, tag = "3")]
    pub start: u64,
}

/// A file of a split. The split's offsets count through its files, in the order of their discovery.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct SourceFile {
    #[prost(uint32, tag = "1")]
    pub split: u32,
    /// As the connector opens it.
    #[prost(string, tag = "2")]
    pub path: String,
    /// Bytes in the store, and what the store says changes with the content.
    #[prost(uint64, tag = "3")]
    pub size: u64,
    #[prost(string, tag = "4")]
    pub version: String,
    /// Offsets it takes: its bytes, decompressed.
    #[prost(uint64, tag = "5")]
    pub length: u64,
    /// The split's offset at which it begins. Assigned by the fold.
    #[prost(uint64, tag = "6")]
    pub start: u64,
    /// When it was last written, in wall-clock milliseconds.
    #[prost(int64, tag = "7")]
    pub modified_ms: i64,
}

#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub struct SplitOffset {
    #[prost(uint32, tag = "1")]
    pub split: u32,
    #[prost(uint64, tag = "2")]
    pub offset: u64,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct SourceSnapshot {
    #[prost(uint32, tag = "1")]
    pub source: u32,
    #[prost(message, repeated, tag = "2")]
    pub history: Vec<SourcePosition>,
    #[prost(message, required, tag = "3")]
    pub timeline: TimelineSnapshot,
    #[prost(message, repeated, tag = "10")]
    pub splits: Vec<SourceSplit>,
    #[prost(message, repeated, tag = "11")]
    pub files: Vec<SourceFile>,
    /// In the order they were logged.
    #[prost(message, repeated, tag = "20")]
    pub marks: Vec<SplitMarkAt>,
}

/// A source's content from an epoch on.
#[derive(Clone, PartialEq, prost::Message)]
pub struct SourcePosition {
    #[prost(uint64, tag = "1")]
    pub epoch: u64,
    #[prost(message, repeated, tag = "2")]
    pub offsets: Vec<SplitOffset>,
}
