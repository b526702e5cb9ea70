//! Relations, schemas, users and settings.

use crate::catalog::{OptionEntry, Relation};

/// What [`SetUser`] does to the user of that name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum UserChange {
    Unspecified = 0,
    /// Void if it exists.
    Create = 1,
    /// Created if it does not exist: a built-in user has no entry before its first change.
    Alter = 2,
    /// Void if it does not exist.
    Drop = 3,
}

/// Creates, changes or removes a user.
#[derive(Clone, PartialEq, prost::Message)]
pub struct SetUser {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(enumeration = "UserChange", tag = "2")]
    pub change: i32,
    /// SCRAM-SHA-256 verifier in PostgreSQL's form; none: the user has no password.
    #[prost(string, optional, tag = "3")]
    pub verifier: Option<String>,
}

/// A user in a snapshot.
#[derive(Clone, PartialEq, prost::Message)]
pub struct UserSnapshot {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(string, optional, tag = "2")]
    pub verifier: Option<String>,
}

/// The fold assigns `relation.id`, `first_table_id` and `created_epoch`, and fixes the snapshot
/// epoch of a derived relation's backfill when its inputs have one.
#[derive(Clone, PartialEq, prost::Message)]
pub struct CreateRelation {
    #[prost(message, required, tag = "1")]
    pub relation: Relation,
    /// A plain view of this name is replaced in place and keeps its id.
    #[prost(bool, tag = "2")]
    pub or_replace: bool,
    /// The incarnation of the process that a job of the relation runs on. 0, or fenced: on none yet.
    #[prost(uint64, tag = "3")]
    pub process: u64,
}

/// All or none: void if a relation outside the list depends on one inside.
#[derive(Clone, PartialEq, prost::Message)]
pub struct DropRelations {
    #[prost(uint32, repeated, tag = "1")]
    pub ids: Vec<u32>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct CreateSchema {
    #[prost(string, tag = "1")]
    pub name: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct DropSchema {
    #[prost(string, tag = "1")]
    pub name: String,
    /// With everything in it and all that depends on that.
    #[prost(bool, tag = "2")]
    pub cascade: bool,
}

/// Changes options of a relation, pauses and resumes a source, or changes how many tasks its job has.
#[derive(Clone, PartialEq, prost::Message)]
pub struct AlterRelation {
    #[prost(uint32, tag = "1")]
    pub id: u32,
    /// Replace the options of these names.
    #[prost(message, repeated, tag = "2")]
    pub options: Vec<OptionEntry>,
    #[prost(bool, optional, tag = "3")]
    pub paused: Option<bool>,
    /// Tasks of each fragment of its job, which begins another generation; 0: as many as the server has by default.
    #[prost(uint32, optional, tag = "4")]
    pub parallelism: Option<u32>,
}

/// An empty value resets to the default.
#[derive(Clone, PartialEq, prost::Message)]
pub struct SetSetting {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(string, optional, tag = "2")]
    pub value: Option<String>,
}
