//! The content of a job's inputs: of one whose job runs in this process its store and its latest changes in memory, of
//! any other what the log and the bucket say (docs/design.md §10).
//!
//! Which it is, is asked whenever an epoch is read: jobs move. The log that this process follows has by then the record
//! as of which the epoch was cut, so what it says to run here has applied every commit up to that epoch here.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures::stream::BoxStream;
use millrace_common::{DeltaChunk, Epoch, Generation, RelationId, SqlError, TableId, Vnode};
use millrace_storage::error::Result;
use millrace_storage::{FollowedJob, JobStore, Snapshot, StateStore};
use tokio::time::Instant;

use crate::changelog_cache::{ChangelogCache, EpochDelta};
use crate::error::ExecError;

/// While an input's job restarts its store is away for a moment: how often to look again.
const POLL: Duration = Duration::from_millis(20);
/// After which the reader fails, to say why it does not move.
const PATIENCE: Duration = Duration::from_secs(30);

/// What other processes commit, as this one follows it.
#[async_trait]
pub trait Elsewhere: Send + Sync {
    /// The generation of the relation's job if the log has placed it on this process.
    fn generation_here(&self, relation: RelationId) -> Option<Generation>;

    /// Whether the log has placed the relation's job on another process.
    fn is_placed_elsewhere(&self, relation: RelationId) -> bool;

    /// The newest committed version of the relation's job that the log has here.
    async fn follow(&self, relation: RelationId)
    -> std::result::Result<Arc<FollowedJob>, SqlError>;

    /// Heap bytes of what is followed.
    fn memory_bytes(&self) -> usize;
}

/// What is committed of a relation.
pub enum Content {
    Here(Arc<JobStore>),
    Followed(Arc<FollowedJob>),
}

impl Content {
    pub fn snapshot(&self, epoch: Epoch) -> Result<Snapshot> {
        match self {
            Content::Here(store) => store.snapshot(epoch),
            Content::Followed(job) => job.snapshot(epoch),
        }
    }

    /// The net change of a table in (from, to] under some vnodes.
    pub fn changes(
        &self,
        table: TableId,
        from: Epoch,
        to: Epoch,
        vnodes: Range<Vnode>,
    ) -> BoxStream<'static, Result<DeltaChunk>> {
        match self {
            Content::Here(store) => store.changes(table, from, to, vnodes),
            Content::Followed(job) => job.changes(table, from, to, vnodes),
        }
    }
}

/// See the module.
#[derive(Clone)]
pub struct Relations {
    pub store: Arc<StateStore>,
    pub changelogs: Arc<ChangelogCache>,
    /// `None`: all jobs run here.
    pub elsewhere: Option<Arc<dyn Elsewhere>>,
}

impl Relations {
    /// The store of a job that runs here and has all that the log says of it.
    fn here(&self, relation: RelationId) -> Option<Arc<JobStore>> {
        let store = self.store.job(relation)?;
        let is_current = match &self.elsewhere {
            None => true,
            // One of an earlier generation may lack what was committed elsewhere since.
            Some(elsewhere) => elsewhere.generation_here(relation) == Some(store.generation()),
        };
        is_current.then_some(store)
    }

    /// The changes in `(from, to]` where they are in memory.
    pub fn recent(
        &self,
        relation: RelationId,
        from: Epoch,
        to: Epoch,
    ) -> Option<Vec<Arc<EpochDelta>>> {
        if self.elsewhere.is_some() {
            self.here(relation)?;
        }
        self.changelogs.get(relation, from, to)
    }

    /// What is committed of the relation; waits while its job restarts. `since`: when the wait began.
    pub async fn content(
        &self,
        relation: RelationId,
        since: &mut Option<Instant>,
    ) -> std::result::Result<Content, ExecError> {
        loop {
            if let Some(store) = self.here(relation) {
                return Ok(Content::Here(store));
            }
            if let Some(elsewhere) = &self.elsewhere {
                return Ok(Content::Followed(elsewhere.follow(relation).await?));
            }
            let clock = self.store.env();
            let began = *since.get_or_insert_with(|| clock.now());
            if clock.elapsed(began) > PATIENCE {
                let message = format!("input relation {relation} is not running");
                return Err(ExecError::Unavailable(message));
            }
            tokio::time::sleep(POLL).await;
        }
    }
}
