//! What a process has merged or copied for the leader, and the log may never name.

use std::sync::Arc;

use async_trait::async_trait;
use millrace_common::task::spawn;
use millrace_common::{EnvHandle, SqlError};
use millrace_compactor::HandedOver;
use millrace_meta::LogFollower;
use millrace_meta::state::MetaState;
use millrace_rpc::log::MoveParts;
use millrace_rpc::services::{CompactionTask, CompactorService, LivePart};
use millrace_rpc::version::VersionEdit;
use millrace_storage::given_up::GivenUp;
use tokio_util::task::AbortOnDropHandle;

use crate::runtimes::BackgroundCompactor;

/// Does compactions, and remembers what it hands over.
pub struct Recorded {
    pub inner: BackgroundCompactor,
    pub handed_over: Arc<HandedOver>,
    pub env: EnvHandle,
}

#[async_trait]
impl CompactorService for Recorded {
    async fn compact(&self, task: CompactionTask) -> Result<VersionEdit, SqlError> {
        let edit = self.inner.compact(task).await?;
        let objects = edit.add_runs.iter().map(|run| run.object.clone());
        self.handed_over.add(objects.collect(), self.env.now());
        Ok(edit)
    }

    async fn copy_parts(&self, parts: Vec<LivePart>) -> Result<MoveParts, SqlError> {
        let moved = self.inner.copy_parts(parts).await?;
        self.handed_over.add(vec![moved.object.clone()], self.env.now());
        Ok(moved)
    }
}

/// Gives up results that have not come into the log, until this is dropped.
pub fn give_up_lost(
    handed_over: Arc<HandedOver>,
    follower: Arc<LogFollower>,
    given_up: Arc<GivenUp>,
    env: EnvHandle,
) -> AbortOnDropHandle<()> {
    let give_up = async move {
        let unknown = |names: Vec<String>| {
            let follower = Arc::clone(&follower);
            async move {
                follower.catch_up().await?;
                let is_known = |state: &MetaState, name: &str| {
                    state.objects.is_referenced(name)
                        || state.objects.is_garbage(name)
                        || state.objects.is_deleted(name)
                };
                let unknown = |name: &String| !follower.read(|state| is_known(state, name));
                Ok(names.into_iter().filter(unknown).collect())
            }
        };
        handed_over.give_up_lost(&env, &given_up, unknown).await;
    };
    AbortOnDropHandle::new(spawn("give up lost results", give_up))
}
