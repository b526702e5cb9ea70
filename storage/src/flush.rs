//! Memory runs become level-0 runs: at a flush, or straight away when a commit is large.

use std::sync::Arc;

use millrace_rpc::version::VersionEdit;

use crate::error::{Result, StorageError};
use crate::job_store::{JobStore, Persisted};
use crate::memrun::MemRun;
use crate::version::Version;

pub(crate) async fn persist_as_runs(_store: &Arc<JobStore>, _runs: Vec<MemRun>, _sequence: u64) -> Result<Persisted> {
    Err(StorageError::internal("runs cannot be written yet"))
}

pub(crate) async fn flush(_store: &Arc<JobStore>, _version: &Version) -> Result<VersionEdit> {
    Err(StorageError::internal("runs cannot be written yet"))
}
