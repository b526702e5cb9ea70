//! The fold's state, as snapshots hold it.

use super::backup::BackupSnapshot;
use super::definition::UserSnapshot;
use super::process::ProcessSnapshot;
use super::source::SourceSnapshot;
use crate::catalog::Relation;
use crate::version::{ColumnWatermark, JobVersion, StatementId};

/// The fold's whole state.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Snapshot {
    #[prost(uint64, tag = "1")]
    pub number: u64,
    /// CRC-32 of record `number`'s bytes.
    #[prost(fixed32, tag = "2")]
    pub crc: u32,
    #[prost(uint64, tag = "3")]
    pub term: u64,
    #[prost(fixed64, tag = "4")]
    pub leader: u64,
    #[prost(uint64, tag = "5")]
    pub epoch: u64,
    #[prost(uint32, tag = "6")]
    pub next_relation_id: u32,
    #[prost(uint32, tag = "7")]
    pub next_table_id: u32,
    #[prost(string, repeated, tag = "8")]
    pub schemas: Vec<String>,
    #[prost(message, repeated, tag = "9")]
    pub relations: Vec<Relation>,
    #[prost(message, repeated, tag = "10")]
    pub jobs: Vec<JobSnapshot>,
    #[prost(message, repeated, tag = "11")]
    pub sources: Vec<SourceSnapshot>,
    #[prost(btree_map = "string, string", tag = "12")]
    pub settings: std::collections::BTreeMap<String, String>,
    /// Objects no version names any more, with the epoch since when.
    #[prost(btree_map = "string, uint64", tag = "13")]
    pub garbage: std::collections::BTreeMap<String, u64>,
    /// Names of live processes whose deletion is logged.
    #[prost(message, repeated, tag = "14")]
    pub deleted: Vec<CounterRange>,
    /// The newest statements committed, oldest first.
    #[prost(message, repeated, tag = "15")]
    pub statements: Vec<CommittedStatement>,
    #[prost(message, repeated, tag = "30")]
    pub users: Vec<UserSnapshot>,
    /// The newest incarnation that was given; 0: none was, and terms named objects.
    #[prost(uint64, tag = "40")]
    pub last_incarnation: u64,
    /// Those that are not fenced.
    #[prost(message, repeated, tag = "41")]
    pub processes: Vec<ProcessSnapshot>,
    /// Nonces of the processes that were fenced last, oldest first.
    #[prost(fixed64, repeated, tag = "42")]
    pub fenced_nonces: Vec<u64>,
    /// Those that are not released, in the order of their records.
    #[prost(message, repeated, tag = "50")]
    pub backups: Vec<BackupSnapshot>,
    /// The store's id. Empty: no record has given it one.
    #[prost(bytes = "bytes", tag = "60")]
    pub store_id: prost::bytes::Bytes,
    /// The newest definitions and changes by operators, oldest first.
    #[prost(message, repeated, tag = "90")]
    pub definitions: Vec<CommittedDefinition>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct JobSnapshot {
    #[prost(uint32, tag = "1")]
    pub job: u32,
    #[prost(message, required, tag = "2")]
    pub version: JobVersion,
    #[prost(message, required, tag = "3")]
    pub timeline: TimelineSnapshot,
    #[prost(uint64, tag = "4")]
    pub horizon: u64,
    /// The relations it reads, as they were when it was created.
    #[prost(uint32, repeated, tag = "5")]
    pub inputs: Vec<u32>,
    /// The incarnation of the process that it runs on; 0: none.
    #[prost(uint64, tag = "6")]
    pub process: u64,
    /// An operator has had it placed there.
    #[prost(bool, tag = "7")]
    pub by_operator: bool,
    /// Its watermarks over time.
    #[prost(message, repeated, tag = "20")]
    pub watermarks: Vec<WatermarksAt>,
}

/// A relation's watermarks from an epoch on.
#[derive(Clone, PartialEq, prost::Message)]
pub struct WatermarksAt {
    #[prost(uint64, tag = "1")]
    pub epoch: u64,
    #[prost(message, repeated, tag = "2")]
    pub columns: Vec<ColumnWatermark>,
}

/// Segments of constant, exact content: `lo` and `hi` of each, inclusive, ascending. Of the last, which is open,
/// `hi` is the newest commit that left the content as it was.
#[derive(Clone, PartialEq, prost::Message)]
pub struct TimelineSnapshot {
    /// As earlier releases stored them; read where there are no `steps`, and not written.
    #[prost(uint64, repeated, tag = "1")]
    pub bounds: Vec<u64>,
    /// The bounds, each as its distance from the one before, the first from 0.
    #[prost(uint64, repeated, tag = "3")]
    pub steps: Vec<u64>,
    /// Epoch of the newest change; 0: never.
    #[prost(uint64, tag = "2")]
    pub last_change: u64,
    /// Per segment the bytes of change through its beginning, each as its distance from the one before, the first
    /// from 0. None: an earlier release stored the segments and did not count.
    #[prost(uint64, repeated, tag = "4")]
    pub volumes: Vec<u64>,
    /// From here on bytes are counted.
    #[prost(uint64, tag = "5")]
    pub measured_since: u64,
}

/// Object counters `from ..= to` of one incarnation.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub struct CounterRange {
    #[prost(uint64, tag = "1")]
    pub incarnation: u64,
    #[prost(uint64, tag = "2")]
    pub from: u64,
    #[prost(uint64, tag = "3")]
    pub to: u64,
}

#[derive(Clone, Copy, PartialEq, prost::Message)]
pub struct CommittedStatement {
    #[prost(message, required, tag = "1")]
    pub id: StatementId,
    #[prost(uint64, tag = "2")]
    pub epoch: u64,
}

/// A definition, or a change by an operator, in a snapshot: what it was answered with.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub struct CommittedDefinition {
    #[prost(message, required, tag = "1")]
    pub id: StatementId,
    #[prost(uint64, tag = "2")]
    pub epoch: u64,
    /// What was created or replaced.
    #[prost(uint32, optional, tag = "3")]
    pub relation: Option<u32>,
}
