//! Backups: states of the log whose objects stay until they are released.

use crate::version::StatementId;

/// All that versions name when this record has been folded stays until the backup is released.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct CreateBackup {
    /// Void if it is empty, or if a backup has it.
    #[prost(string, tag = "1")]
    pub name: String,
}

/// Nothing is kept for this backup any more.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct ReleaseBackup {
    /// Void if no backup has it.
    #[prost(string, tag = "1")]
    pub name: String,
}

/// A backup that is not released, in a snapshot.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct BackupSnapshot {
    #[prost(string, tag = "1")]
    pub name: String,
    /// Of the record that made it: the last one that it contains.
    #[prost(uint64, tag = "2")]
    pub number: u64,
    #[prost(uint64, tag = "3")]
    pub epoch: u64,
    /// All that it names, ascending.
    #[prost(string, repeated, tag = "4")]
    pub objects: Vec<String>,
    /// Bytes of them that it names.
    #[prost(uint64, tag = "5")]
    pub bytes: u64,
    /// By which it was asked for; `None`: by none. A build that does not know it leaves it out, and does not find the backup
    /// by its id then.
    #[prost(message, optional, tag = "6")]
    pub statement: Option<StatementId>,
}
