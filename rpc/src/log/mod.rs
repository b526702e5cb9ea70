//! The meta log's durable formats (docs/design.md §10): numbered records and the snapshots that
//! cover them.
//!
//! A record is one object `meta/log/<n:020>`, created with a conditional put: an 8-byte header
//! (the oldest format whose builds may open the log, CRC-32 of the rest), then a [`LogRecord`]. A snapshot `meta/snapshot/<n:020>`
//! has the same header, then a [`Snapshot`]: the fold of all records up to and including `n`.

mod backup;
mod definition;
mod frame;
mod job;
mod process;
mod snapshot;
mod source;
#[cfg(test)]
mod tests;

pub use self::backup::{BackupSnapshot, CreateBackup, ReleaseBackup};
pub use self::definition::{
    AlterRelation, CreateRelation, CreateSchema, DropRelations, DropSchema, SetSetting, SetUser,
    UserChange, UserSnapshot,
};
pub use self::frame::{FORMAT_VERSION, FrameError, OLDEST_READER, decode_frame, encode_frame};
pub use self::job::{
    DeleteObjects, Detach, EditVersion, MoveParts, MovedPart, Published, RaiseGenerations, Rebuild,
    StartBackfill, Transaction,
};
pub use self::process::{
    DrainProcess, FenceProcess, GiveUp, PlaceJobs, ProcessRole, ProcessSnapshot, RegisterProcess,
};
pub use self::snapshot::{
    CommittedDefinition, CommittedStatement, CounterRange, JobSnapshot, Snapshot, TimelineSnapshot,
    WatermarksAt,
};
pub use self::source::{
    SourceAdvance, SourceFile, SourcePosition, SourceSnapshot, SourceSplit, SplitMark, SplitMarkAt,
    SplitOffset,
};
use crate::version::{JobCommit, StatementId};

/// One atomic step of the whole cluster's metadata.
#[derive(Clone, PartialEq, prost::Message)]
pub struct LogRecord {
    #[prost(uint64, tag = "1")]
    pub number: u64,
    /// Raised by every new leader; the fold ignores records of older terms.
    #[prost(uint64, tag = "2")]
    pub term: u64,
    /// Random, chosen by the leader when it starts: tells its own record from another's.
    #[prost(fixed64, tag = "3")]
    pub leader: u64,
    /// CRC-32 of the predecessor's bytes; 0 before the first.
    #[prost(fixed32, tag = "4")]
    pub prev_crc: u32,
    /// Assigned at the append; larger than all before it. The change epoch of every root in it.
    #[prost(uint64, tag = "5")]
    pub epoch: u64,
    #[prost(message, repeated, tag = "6")]
    pub entries: Vec<LogEntry>,
    /// Gives the store its [`StoreId`](crate::store_id::StoreId). Empty: it stays as it is.
    #[prost(bytes = "bytes", tag = "7")]
    pub store_id: prost::bytes::Bytes,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct LogEntry {
    /// Of a definition, or a change by an operator, that was asked for by this id: it is not taken in a second time. `None`:
    /// of anything else. A build that does not know it folds the rest alike, and by its protocol version nobody asks it for
    /// a definition by an id.
    #[prost(message, optional, tag = "100")]
    pub statement: Option<StatementId>,
    #[prost(
        oneof = "Entry",
        tags = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 20, 30, 40, 50, 60, 70, 71, 72, 73, 74, 80, 81"
    )]
    pub entry: Option<Entry>,
}

impl From<Entry> for LogEntry {
    fn from(entry: Entry) -> LogEntry {
        LogEntry { statement: None, entry: Some(entry) }
    }
}

/// What a record can say. Each is validated on its own; an invalid one is void and changes nothing.
#[derive(Clone, PartialEq, prost::Oneof)]
pub enum Entry {
    #[prost(message, tag = "1")]
    CreateRelation(CreateRelation),
    #[prost(message, tag = "2")]
    DropRelations(DropRelations),
    #[prost(message, tag = "3")]
    CreateSchema(CreateSchema),
    #[prost(message, tag = "4")]
    DropSchema(DropSchema),
    #[prost(message, tag = "5")]
    Commit(JobCommit),
    #[prost(message, tag = "6")]
    EditVersion(EditVersion),
    #[prost(message, tag = "7")]
    RaiseGenerations(RaiseGenerations),
    #[prost(message, tag = "8")]
    SourceAdvance(SourceAdvance),
    #[prost(message, tag = "9")]
    SetSetting(SetSetting),
    #[prost(message, tag = "10")]
    DeleteObjects(DeleteObjects),
    #[prost(message, tag = "11")]
    StartBackfill(StartBackfill),
    #[prost(message, tag = "12")]
    Transaction(Transaction),
    #[prost(message, tag = "13")]
    Detach(Detach),
    #[prost(message, tag = "14")]
    Rebuild(Rebuild),
    #[prost(message, tag = "20")]
    SetUser(SetUser),
    #[prost(message, tag = "30")]
    Published(Published),
    #[prost(message, tag = "40")]
    AlterRelation(AlterRelation),
    #[prost(message, tag = "50")]
    Tick(Tick),
    #[prost(message, tag = "60")]
    MoveParts(MoveParts),
    #[prost(message, tag = "70")]
    RegisterProcess(RegisterProcess),
    #[prost(message, tag = "71")]
    FenceProcess(FenceProcess),
    #[prost(message, tag = "72")]
    PlaceJobs(PlaceJobs),
    #[prost(message, tag = "73")]
    GiveUp(GiveUp),
    #[prost(message, tag = "74")]
    DrainProcess(DrainProcess),
    #[prost(message, tag = "80")]
    CreateBackup(CreateBackup),
    #[prost(message, tag = "81")]
    ReleaseBackup(ReleaseBackup),
}

/// Moves the head, so that epochs follow the clock where some relation's content does.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub struct Tick {}
