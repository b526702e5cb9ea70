//! What the leader serves all other processes.

use std::time::Duration;

use async_trait::async_trait;
use futures::stream::BoxStream;
use millrace_common::{Epoch, Generation, JobId, RelationId, SqlError};

use crate::call_error::CallError;
use crate::log::RegisterProcess;
pub use crate::proto::define_request::Change as Definition;
pub use crate::proto::{
    AdvisoryLock, AvailableOffset, CacheUsage, CompactionReport, CompactionState,
    CreateRelationRequest, DefineAnswer, DefineRequest, GiveBackLocksRequest, Heartbeat, JobReport,
    JobReports, ListedLock, ListedSession, LookaheadPlace, LookaheadReport, LookaheadStanding,
    LookaheadSubject, OperatorReport, ProcessReport, ProcessUsage, Quantiles, RequestUsage,
    SessionId, SessionsAnswer, SessionsTold, SessionsWanted, SideReport, SourceReport, SpotReport,
    TableLookups, TableReport, TableRetention, TakeLockAnswer, TakeLockRequest,
};
use crate::stream::StreamMessage;
use crate::version::VersionEdit;

/// Messages of the record stream; it ends with an error.
pub type RecordStream = BoxStream<'static, Result<StreamMessage, CallError>>;

/// An epoch at which relations can be read, by who has applied the record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadEpoch {
    pub epoch: Epoch,
    pub record: u64,
    /// The catalog is that of this record, which is `record` or an earlier one; 0: a leader of an older build does not
    /// say.
    pub catalog_version: u64,
}

/// Served by the leader. A change is durable when it is answered; the number is that of a record up to which the log has
/// it.
#[async_trait]
pub trait MetaControl: Send + Sync {
    /// Registers a process in the log, and returns its incarnation. The same nonce again has the same one.
    async fn register_process(&self, process: RegisterProcess) -> Result<u64, CallError>;
    /// A process is there and tells how far it is; answered with the log's last record.
    async fn beat(&self, heartbeat: Heartbeat) -> Result<u64, CallError>;
    /// The record stream from a record on. [`CallError::Gap`]: the log begins at a later one.
    async fn follow(&self, from: u64) -> Result<RecordStream, CallError>;

    /// A waiter wants the job's open epoch to end now.
    async fn request_cut(&self, job: JobId) -> Result<(), CallError>;
    /// State tables of the job are read so often that merging their runs may have become of use.
    async fn request_compaction(&self, job: JobId) -> Result<(), CallError>;
    /// Commits a flush that a worker made; `false`: void (another generation).
    async fn commit_edit(
        &self,
        job: JobId,
        generation: Generation,
        edit: VersionEdit,
    ) -> Result<bool, CallError>;
    /// A task of the job failed on its own, between cuts.
    async fn report_failure(
        &self,
        job: JobId,
        generation: Generation,
        error: SqlError,
    ) -> Result<(), CallError>;

    /// Makes a definition: creates, changes or drops relations, schemas or users, or sets a setting. By the same id again
    /// it is answered alike, by whoever leads then, and not made a second time. What failed has had no effect and is
    /// tried again. An error 08007: it is so long ago that nobody knows.
    async fn define(&self, request: DefineRequest) -> Result<DefineAnswer, CallError>;

    /// Returns when the relation is readable, or has failed. Dropping the future cancels it.
    async fn wait_created(&self, id: RelationId) -> Result<(), CallError>;
    /// Returns when a rebuild is done, or has failed.
    async fn wait_rebuilt(&self, id: RelationId) -> Result<(), CallError>;
    /// One epoch at which all are exact; `fresh`: nothing acknowledged before is missing. No `timeout`: without end. Of no
    /// relations it is answered at once, with the head.
    async fn read_epoch(
        &self,
        ids: &[RelationId],
        timeout: Option<Duration>,
        fresh: bool,
    ) -> Result<ReadEpoch, CallError>;
    /// Returns when all that was acknowledged before is in every running job.
    async fn flush(&self) -> Result<(), CallError>;
    /// How jobs, sources and processes are.
    async fn jobs(&self) -> Result<JobReports, CallError>;

    /// Returns when a session has an advisory lock, or cannot have it now. Dropping the future gives up.
    async fn take_lock(&self, request: TakeLockRequest) -> Result<TakeLockAnswer, CallError>;
    /// A session does not hold these locks any more.
    async fn give_back_locks(&self, request: GiveBackLocksRequest) -> Result<(), CallError>;
    /// All advisory locks that are held and waited for.
    async fn locks(&self) -> Result<Vec<ListedLock>, CallError>;

    /// A frontend tells its sessions. Returns when they are asked for the next time.
    async fn tell_sessions(&self, told: SessionsTold) -> Result<SessionsWanted, CallError>;
    /// The sessions of all frontends but this one.
    async fn sessions(&self, process: u64) -> Result<SessionsAnswer, CallError>;
}
