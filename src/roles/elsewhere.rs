//! What other processes commit, as a compute process reads it: the log that it follows, and the bucket.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use millrace_common::{Epoch, Generation, RelationId, SqlError, SqlState};
use millrace_executor::ExecError;
use millrace_executor::input::relations::Elsewhere;
use millrace_executor::worker::rows_table;
use millrace_meta::LogFollower;
use millrace_rpc::catalog::Relation;
use millrace_storage::{FollowedJob, FollowedVersion, StorageError, VersionFollower};

/// What nobody has read for so long is closed.
const IDLE: Duration = Duration::from_secs(60);
/// How often to look for a version whose objects still exist.
const ATTEMPTS: usize = 100;
const PAUSE: Duration = Duration::from_millis(50);

/// See the module.
pub struct FollowedInputs {
    pub follower: Arc<LogFollower>,
    pub versions: Arc<VersionFollower>,
    /// Of this process.
    pub incarnation: u64,
}

impl FollowedInputs {
    /// The version of the relation's job that the log has here.
    fn newest(&self, id: RelationId) -> Result<(Arc<Relation>, FollowedVersion), SqlError> {
        let found = self.follower.read(|state| {
            let (relation, job) = (state.relations.get(&id)?, state.jobs.get(&id)?);
            let (version, horizon) = (Arc::clone(&job.version), job.horizon);
            let at = FollowedVersion { record: state.number, version, horizon };
            Some((Arc::clone(relation), at))
        });
        found.ok_or_else(|| {
            SqlError::new(SqlState::UNDEFINED_TABLE, format!("input relation {id} was dropped"))
        })
    }

    /// What is read here now, and nothing of what nobody reads any more.
    pub fn pinned(&self) -> (Option<Epoch>, Vec<String>) {
        self.versions.close_idle(IDLE);
        let pinned = self.versions.pinned();
        (pinned.epoch, pinned.objects.into_iter().collect())
    }

    /// Of these objects, those that the log does not name any more: only a scan under way reads them.
    pub fn dropped_of(&self, mut objects: Vec<String>) -> Vec<String> {
        self.follower.read(|state| objects.retain(|name| !state.objects.is_referenced(name)));
        objects
    }
}

#[async_trait]
impl Elsewhere for FollowedInputs {
    fn generation_here(&self, relation: RelationId) -> Option<Generation> {
        self.follower.read(|state| {
            let job = state.jobs.get(&relation).filter(|job| job.process == self.incarnation)?;
            Some(Generation(job.version.generation))
        })
    }

    fn is_placed_elsewhere(&self, relation: RelationId) -> bool {
        self.follower.read(|state| {
            let process = state.jobs.get(&relation).map_or(0, |job| job.process);
            process != 0 && process != self.incarnation
        })
    }

    /// An object that is gone belongs to a version in whose place there is a newer one.
    async fn follow(&self, relation: RelationId) -> Result<Arc<FollowedJob>, SqlError> {
        let mut attempt = 0;
        loop {
            let (described, at) = self.newest(relation)?;
            let rows = rows_table(&described).map_err(ExecError::into_sql)?;
            match self.versions.advance(relation, at, || vec![rows]).await {
                Err(StorageError::Superseded { .. }) if attempt < ATTEMPTS => {
                    attempt += 1;
                    self.follower.catch_up().await?;
                    tokio::time::sleep(PAUSE).await;
                }
                followed => return Ok(followed?),
            }
        }
    }

    fn memory_bytes(&self) -> usize {
        self.versions.memory_bytes()
    }
}
