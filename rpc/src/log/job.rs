//! What jobs commit, and the objects that it lies in.

use crate::version::{JobCommit, VersionEdit};

/// Epochs of several tables that hold parts of one transaction: all of them are valid and take effect,
/// or none does.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Transaction {
    #[prost(message, repeated, tag = "1")]
    pub commits: Vec<JobCommit>,
}

/// A flush or a compaction: other runs, same content.
#[derive(Clone, PartialEq, prost::Message)]
pub struct EditVersion {
    #[prost(uint32, tag = "1")]
    pub job: u32,
    /// 0: any (compactions are valid while their input runs are there).
    #[prost(uint64, tag = "2")]
    pub generation: u64,
    #[prost(message, required, tag = "3")]
    pub edit: VersionEdit,
    /// Versions below this epoch may be gone after the edit. 0: unchanged.
    #[prost(uint64, tag = "4")]
    pub horizon: u64,
}

/// Fences the running tasks of these jobs.
#[derive(Clone, PartialEq, prost::Message)]
pub struct RaiseGenerations {
    /// Empty: all jobs (a new leader).
    #[prost(uint32, repeated, tag = "1")]
    pub jobs: Vec<u32>,
}

/// These objects are about to be deleted and can never be referenced again.
#[derive(Clone, PartialEq, prost::Message)]
pub struct DeleteObjects {
    #[prost(string, repeated, tag = "1")]
    pub names: Vec<String>,
}

/// The inputs of a job created over unfinished inputs are ready: fix its snapshot epoch.
#[derive(Clone, PartialEq, prost::Message)]
pub struct StartBackfill {
    #[prost(uint32, tag = "1")]
    pub job: u32,
    #[prost(uint64, tag = "2")]
    pub generation: u64,
}

/// The job has left its inputs' changes unread for too long: they are kept for it no longer, and it ends until it is
/// rebuilt. What it had computed stays readable.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Detach {
    #[prost(uint32, tag = "1")]
    pub job: u32,
    /// Void if another one runs by now.
    #[prost(uint64, tag = "2")]
    pub generation: u64,
    /// For people.
    #[prost(string, tag = "3")]
    pub reason: String,
}

/// The job computes its result anew, from a snapshot of its inputs. A view or index keeps its content meanwhile and
/// changes, when it is done, by the difference; a sink begins with another snapshot.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub struct Rebuild {
    #[prost(uint32, tag = "1")]
    pub job: u32,
}

/// Runs, slices and staged changes lie in another object from now on, byte for byte: the objects that they lay in held
/// little else that is alive.
#[derive(Clone, PartialEq, prost::Message)]
pub struct MoveParts {
    /// Where they lie now.
    #[prost(string, tag = "1")]
    pub object: String,
    /// Parts that nothing names any more have no effect.
    #[prost(message, repeated, tag = "2")]
    pub parts: Vec<MovedPart>,
}

/// A byte range of an object, and where its copy begins in another one.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct MovedPart {
    /// The job whose version names it.
    #[prost(uint32, tag = "1")]
    pub job: u32,
    /// Where it lay.
    #[prost(string, tag = "2")]
    pub from_object: String,
    #[prost(uint64, tag = "3")]
    pub from_offset: u64,
    #[prost(uint64, tag = "4")]
    pub length: u64,
    /// Where it begins in the new object.
    #[prost(uint64, tag = "5")]
    pub offset: u64,
}

/// A sink's target has everything up to this sequence.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub struct Published {
    #[prost(uint32, tag = "1")]
    pub job: u32,
    #[prost(uint64, tag = "2")]
    pub generation: u64,
    #[prost(uint64, tag = "3")]
    pub sequence: u64,
}
