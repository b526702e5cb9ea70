//! What sessions read of the committed state, and wait for: epochs, frontiers, changes and versions of jobs.

use std::sync::Arc;
use std::time::Duration;

use millrace_common::{Epoch, JobId, RelationId, SqlError};
use millrace_rpc::version::{JobVersion, StatementId};
use tokio_util::sync::CancellationToken;

use super::Meta;
use crate::feed::{self, Follow};
use crate::read;

impl Meta {
    /// Returns when the relation has caught up for the first time, or with the error that its job
    /// failed with, or 57014 when `cancel` fires, or 57P03 where no compute process is there for it (the caller drops the
    /// relation then). A sink that is paused is not waited for.
    pub async fn wait_created(
        &self,
        id: RelationId,
        cancel: &CancellationToken,
    ) -> Result<(), SqlError> {
        self.with_computes(read::wait_created(&self.shared, id, cancel)).await
    }

    /// The newest epoch at which all these relations (no plain views) are exact and, if `fresh`, that
    /// misses nothing acknowledged before the call. `timeout`: default `read_wait_timeout`. Dropping the
    /// future cancels.
    pub async fn read_epoch(
        &self,
        relations: &[RelationId],
        timeout: Option<Duration>,
        fresh: bool,
    ) -> Result<Epoch, SqlError> {
        let read = read::read_epoch(&self.shared, relations, timeout, fresh).await;
        read.map_err(|error| self.for_want_of_compute(error))
    }

    /// Whether all these relations are exact, and published, at an epoch.
    pub fn exact_at(&self, relations: &[RelationId], epoch: Epoch) -> bool {
        self.shared.state.read().exact_at(relations, epoch)
    }

    /// Returns when every running job has committed everything acknowledged before the call. In a cluster an error once
    /// there have been no compute processes for too long.
    pub async fn flush(&self) -> Result<(), SqlError> {
        self.with_computes(read::flush(&self.shared)).await
    }

    /// Returns when a rebuild is done, or with the error that its job failed with: then it goes on all the same. 57014
    /// when `cancel` fires.
    pub async fn wait_rebuilt(
        &self,
        id: RelationId,
        cancel: &CancellationToken,
    ) -> Result<(), SqlError> {
        self.with_computes(read::wait_rebuilt(&self.shared, id, cancel)).await
    }

    /// The tables that a relation's rows follow from; a table's is itself.
    pub fn tables_behind(&self, id: RelationId) -> Vec<RelationId> {
        self.shared.state.read().tables_behind(id)
    }

    /// What a job reads directly.
    pub fn inputs(&self, job: JobId) -> Vec<RelationId> {
        self.shared.state.read().inputs(job).to_vec()
    }

    /// The newest epoch at which the relation is exact; `None`: none yet, or no such relation.
    pub fn frontier(&self, id: RelationId) -> Option<Epoch> {
        self.shared.state.read().readable_frontier(id)
    }

    /// What comes after `seen` of a relation's changes; `None`: nothing yet.
    pub fn follow_now(&self, id: RelationId, seen: Epoch) -> Option<Follow> {
        self.shared.state.read().follow(id, seen)
    }

    /// Waits for it. With `progress`, also returns when nothing has changed for that long.
    pub async fn follow(
        &self,
        id: RelationId,
        seen: Epoch,
        progress: Option<Duration>,
    ) -> Result<Follow, SqlError> {
        feed::follow(&self.shared, id, seen, progress).await
    }

    /// The log's head: the newest durable epoch.
    pub fn head(&self) -> Epoch {
        self.shared.head()
    }

    /// The epoch a statement was committed at, if it is among the newest that were.
    pub fn statement_epoch(&self, id: StatementId) -> Option<Epoch> {
        self.shared.state.read().statements.get(id)
    }

    /// The committed version of a job, for EXPLAIN ANALYZE and tests.
    pub fn version(&self, id: JobId) -> Option<Arc<JobVersion>> {
        self.shared.state.read().jobs.get(&id).map(|j| Arc::clone(&j.version))
    }

    #[cfg(test)]
    pub(crate) fn horizon_for_tests(&self, id: JobId) -> Epoch {
        self.shared.job(id).map(|handle| handle.horizon()).unwrap_or_default()
    }

    /// Returns once it is known that nobody else had taken the lead two seconds ago, or with the error that somebody has.
    pub async fn prove_lead(&self) -> Result<(), SqlError> {
        read::prove_lead(&self.shared, self.shared.settings().read_wait_timeout).await
    }
}
