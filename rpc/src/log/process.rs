//! Processes that take part, and the jobs placed on them.

/// A process takes part from now on. The fold gives it the next incarnation, which names its objects and runs; the
/// same nonce again has the same incarnation.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct RegisterProcess {
    /// Random, chosen by the process when it starts. Not 0.
    #[prost(fixed64, tag = "1")]
    pub nonce: u64,
    /// What it does.
    #[prost(enumeration = "ProcessRole", repeated, tag = "2")]
    pub roles: Vec<i32>,
    /// Where others reach it; empty: nobody does.
    #[prost(string, tag = "3")]
    pub address: String,
}

/// What a process does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub enum ProcessRole {
    Unspecified = 0,
    Meta = 1,
    Frontend = 2,
    Compute = 3,
    Compactor = 4,
}

/// These processes are taken for dead, for good: what they have uploaded and not committed can never be committed. The
/// generations of the jobs placed on them rise.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct FenceProcess {
    /// Those that are fenced already are left out; one that was never given makes the entry void.
    #[prost(uint64, repeated, tag = "1")]
    pub incarnations: Vec<u64>,
}

/// These jobs run on this process from now on. The generations of those that ran elsewhere rise.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct PlaceJobs {
    /// Void if it is fenced.
    #[prost(uint64, tag = "1")]
    pub incarnation: u64,
    /// Empty: all jobs.
    #[prost(uint32, repeated, tag = "2")]
    pub jobs: Vec<u32>,
    /// An operator has asked for it: no load moves them from there. Of jobs that run there already: so from now on, or not.
    #[prost(bool, tag = "3")]
    pub by_operator: bool,
}

/// A compute process is given no jobs from now on, and those that it has run elsewhere; or it takes jobs again.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub struct DrainProcess {
    /// Void if it is fenced.
    #[prost(uint64, tag = "1")]
    pub incarnation: u64,
    #[prost(bool, tag = "2")]
    pub undo: bool,
}

/// Objects that their process has written and will never bring into the log: unless something names them already,
/// they are garbage.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct GiveUp {
    /// Void if it is fenced: then everything that nothing names is garbage.
    #[prost(uint64, tag = "1")]
    pub incarnation: u64,
    /// All of this incarnation.
    #[prost(string, repeated, tag = "2")]
    pub names: Vec<String>,
}

/// A live process in a snapshot.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct ProcessSnapshot {
    #[prost(uint64, tag = "1")]
    pub incarnation: u64,
    #[prost(message, required, tag = "2")]
    pub registration: RegisterProcess,
    /// Of the record that registered it.
    #[prost(uint64, tag = "3")]
    pub epoch: u64,
    #[prost(uint64, tag = "4")]
    pub number: u64,
    /// It is given no jobs.
    #[prost(bool, tag = "5")]
    pub drained: bool,
}
