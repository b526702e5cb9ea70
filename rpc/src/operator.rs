//! What the leader serves an operator: `millrace ctl`.

use async_trait::async_trait;
use millrace_common::JobId;

use crate::call_error::CallError;
pub use crate::proto::{
    BackupList, BackupOverview, ClusterOverview, CollectionHolder, CollectionReport, JobOverview,
    JobVersions, LevelOverview, PlacedJobs, VersionOverview, WorkerOverview,
};
use crate::version::StatementId;

/// Served by the leader. A change is in the log when it is answered.
///
/// With an `id` a change can be asked for again, of whoever leads then, when its answer was lost: the same id names the same
/// change, and it is made once. It is known by it as long as definitions are by theirs ([`MetaControl::define`]). What was
/// refused has had no effect and is tried again.
///
/// [`MetaControl::define`]: crate::control::MetaControl::define
#[async_trait]
pub trait OperatorService: Send + Sync {
    /// Who takes part, and what runs where.
    async fn overview(&self) -> Result<ClusterOverview, CallError>;
    /// Has a job run on the process of this incarnation; with a table, all that write to tables. No load moves them from
    /// there. 0: they stay where they are, until there is a reason to place them elsewhere. Jobs that an earlier call of the
    /// same id has moved are not told again.
    async fn move_job(
        &self,
        job: JobId,
        worker: u64,
        id: Option<StatementId>,
    ) -> Result<PlacedJobs, CallError>;
    /// Takes the jobs of a compute process away and gives it no others; `undo`: it takes jobs again. Jobs that an earlier
    /// call of the same id has moved are not told again.
    async fn drain(
        &self,
        worker: u64,
        undo: bool,
        id: Option<StatementId>,
    ) -> Result<PlacedJobs, CallError>;
    /// What the newest version of each job consists of.
    async fn versions(&self) -> Result<JobVersions, CallError>;
    /// What garbage collection has before it, and who holds it back; with `run`, after it was run.
    async fn collection(&self, run: bool) -> Result<CollectionReport, CallError>;
    /// Keeps all that versions name now until it is released. An empty name: one by the leader's time. By the same id again
    /// it is the backup that was made, whatever its name.
    async fn create_backup(
        &self,
        name: String,
        id: Option<StatementId>,
    ) -> Result<BackupOverview, CallError>;
    /// The backups that are not released.
    async fn backups(&self) -> Result<BackupList, CallError>;
    /// Keeps nothing for a backup any more; what it was. Of one that was released before by the same id only the name is
    /// known.
    async fn release_backup(
        &self,
        name: String,
        id: Option<StatementId>,
    ) -> Result<BackupOverview, CallError>;
}
