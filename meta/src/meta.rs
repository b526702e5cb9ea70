//! The handle everybody holds.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use millrace_common::{Epoch, Generation, JobId, RelationId, SqlError};
use millrace_rpc::catalog::Relation;
use millrace_rpc::services::{CompactorService, ComputeService, MetaService};
use millrace_rpc::version::{StatementId, VersionEdit};
use object_store::ObjectStore;
use prost::bytes::Bytes;
use tokio_util::sync::CancellationToken;

use crate::catalog::Catalog;
use crate::env::{Env, SystemEnv};
use crate::settings::Settings;
use crate::status::JobStatus;

/// How to open the log.
pub struct MetaOptions {
    pub store: Arc<dyn ObjectStore>,
    pub env: Arc<dyn Env>,
    /// Parallel tasks of a job's fragments.
    pub parallelism: usize,
    /// Settings of the command line, below those set by SQL.
    pub settings: BTreeMap<String, String>,
}

impl MetaOptions {
    pub fn new(store: Arc<dyn ObjectStore>) -> MetaOptions {
        MetaOptions { store, env: Arc::new(SystemEnv), parallelism: 2, settings: BTreeMap::new() }
    }
}

/// Clauses of a CREATE.
#[derive(Clone, Copy, Debug, Default)]
pub struct CreateOptions {
    /// State tables of the job; table 0 is the relation's rows. At least 1 where there is a job.
    pub table_count: u32,
    pub or_replace: bool,
    pub if_not_exists: bool,
}

pub struct Meta {}

fn missing() -> SqlError {
    SqlError::unsupported("this build of meta")
}

impl Meta {
    /// Probes the store, reads the log and takes the lead.
    pub async fn open(options: MetaOptions) -> Result<Arc<Meta>, SqlError> {
        let _ = options;
        Err(missing())
    }

    /// Names this process's objects: `data/<incarnation>/…`.
    pub fn incarnation(&self) -> u64 {
        0
    }

    /// Starts a driver for every job. Returns when the tables' tasks run (or failed to start).
    pub async fn start(
        self: &Arc<Self>,
        compute: Arc<dyn ComputeService>,
        compactor: Arc<dyn CompactorService>,
    ) -> Result<(), SqlError> {
        let _ = (compute, compactor);
        Err(missing())
    }

    /// Stops all drivers; nothing durable needs it.
    pub async fn shutdown(&self) {}

    /// The catalog after the newest record.
    pub fn catalog(&self) -> Arc<Catalog> {
        Arc::default()
    }

    pub fn settings(&self) -> Settings {
        Settings::resolve(&BTreeMap::new(), &BTreeMap::new())
    }

    /// Durable when it returns; the job starts by itself (a table's is running when this returns).
    /// `relation.id`, `first_table_id`, `table_count` and `created_epoch` are filled in here.
    pub async fn create_relation(
        &self,
        relation: Relation,
        options: CreateOptions,
    ) -> Result<RelationId, SqlError> {
        let _ = (relation, options);
        Err(missing())
    }

    /// All or none; error 2BP01 when something outside the list depends on one inside
    /// (see `Catalog::cascade`). Never waits for a barrier.
    pub async fn drop_relations(&self, ids: &[RelationId]) -> Result<(), SqlError> {
        let _ = ids;
        Err(missing())
    }

    pub async fn create_schema(&self, name: &str, if_not_exists: bool) -> Result<(), SqlError> {
        let _ = (name, if_not_exists);
        Err(missing())
    }

    pub async fn drop_schema(&self, name: &str, cascade: bool) -> Result<(), SqlError> {
        let _ = (name, cascade);
        Err(missing())
    }

    /// A cluster-wide setting; `None` resets it.
    pub async fn set_setting(&self, name: &str, value: Option<&str>) -> Result<(), SqlError> {
        let _ = (name, value);
        Err(missing())
    }

    /// Returns when the relation has caught up for the first time, or with the error that its job
    /// failed with, or 57014 when `cancel` fires (the caller drops the relation then).
    pub async fn wait_created(
        &self,
        id: RelationId,
        cancel: &CancellationToken,
    ) -> Result<(), SqlError> {
        let _ = (id, cancel);
        Err(missing())
    }

    /// The newest epoch at which all these relations (no plain views) are exact and, if `fresh`, that
    /// is not older than anything acknowledged before the call. `timeout`: default
    /// `read_wait_timeout`. Dropping the future cancels.
    pub async fn read_epoch(
        &self,
        relations: &[RelationId],
        timeout: Option<Duration>,
        fresh: bool,
    ) -> Result<Epoch, SqlError> {
        let _ = (relations, timeout, fresh);
        Err(missing())
    }

    /// Returns when every running job has committed everything acknowledged before the call.
    pub async fn flush(&self) -> Result<(), SqlError> {
        Err(missing())
    }

    pub fn job_statuses(&self) -> Vec<JobStatus> {
        Vec::new()
    }

    pub fn job_status(&self, id: RelationId) -> Option<JobStatus> {
        let _ = id;
        None
    }

    /// The newest epoch at which the relation is exact; `None`: none yet, or no such relation.
    pub fn frontier(&self, id: RelationId) -> Option<Epoch> {
        let _ = id;
        None
    }

    /// The log's head: the newest durable epoch.
    pub fn head(&self) -> Epoch {
        Epoch::ZERO
    }

    /// The epoch a statement was committed at, if it is among the newest that were.
    pub fn statement_epoch(&self, id: StatementId) -> Option<Epoch> {
        let _ = id;
        None
    }

    /// Completes when another server has taken over this store: nothing is acknowledged any more.
    pub async fn deposed(&self) -> SqlError {
        missing()
    }
}

#[async_trait::async_trait]
impl MetaService for Meta {
    fn request_cut(&self, job: JobId) {
        let _ = job;
    }

    async fn commit_edit(
        &self,
        job: JobId,
        generation: Generation,
        edit: VersionEdit,
    ) -> Result<bool, SqlError> {
        let _ = (job, generation, edit);
        Err(missing())
    }

    fn report_failure(&self, job: JobId, generation: Generation, error: SqlError) {
        let _ = (job, generation, error);
    }

    fn source_offsets(&self, source: RelationId, epoch: Epoch) -> Vec<(u32, u64)> {
        let _ = (source, epoch);
        Vec::new()
    }

    fn graph(&self, relation: RelationId) -> Option<Bytes> {
        let _ = relation;
        None
    }
}
