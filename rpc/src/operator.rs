//! What the leader serves an operator: `millrace ctl`.

use async_trait::async_trait;
use millrace_common::JobId;

use crate::call_error::CallError;
pub use crate::proto::{
    BackupList, BackupOverview, ClusterOverview, CollectionHolder, CollectionReport, JobOverview,
    JobVersions, LevelOverview, PlacedJobs, VersionOverview, WorkerOverview,
};

/// Served by the leader. A change is in the log when it is answered.
#[async_trait]
pub trait OperatorService: Send + Sync {
    /// Who takes part, and what runs where.
    async fn overview(&self) -> Result<ClusterOverview, CallError>;
    /// Has a job run on the process of this incarnation; with a table, all that write to tables.
    async fn move_job(&self, job: JobId, worker: u64) -> Result<PlacedJobs, CallError>;
    /// Takes the jobs of a compute process away and gives it no others; `undo`: it takes jobs again.
    async fn drain(&self, worker: u64, undo: bool) -> Result<PlacedJobs, CallError>;
    /// What the newest version of each job consists of.
    async fn versions(&self) -> Result<JobVersions, CallError>;
    /// What garbage collection has before it, and who holds it back; with `run`, after it was run.
    async fn collection(&self, run: bool) -> Result<CollectionReport, CallError>;
    /// Keeps all that versions name now until it is released. An empty name: one by the leader's time.
    async fn create_backup(&self, name: String) -> Result<BackupOverview, CallError>;
    /// The backups that are not released.
    async fn backups(&self) -> Result<BackupList, CallError>;
    /// Keeps nothing for a backup any more; what it was.
    async fn release_backup(&self, name: String) -> Result<BackupOverview, CallError>;
}
