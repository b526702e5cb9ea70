//! Meta as a worker of another process knows it: what the log says is answered from the log that the worker follows
//! itself, everything else is asked of the leader.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures::future::join_all;
use millrace_common::task::spawn;
use millrace_common::{Epoch, Generation, JobId, RelationId, SqlError, SqlState};
use millrace_executor::Worker;
use millrace_executor::input::relations::Elsewhere;
use millrace_meta::LogFollower;
use millrace_meta::endings::MayEnd;
use millrace_rpc::call_error::CallError;
use millrace_rpc::catalog::Relation;
use millrace_rpc::control::MetaControl;
use millrace_rpc::log::SplitMarkAt;
use millrace_rpc::remote::RemoteMeta;
use millrace_rpc::request::carried;
use millrace_rpc::services::{
    ComputeService, Cut, JobToStart, MetaService, RunningJob, SourceParts, StartJob,
};
use millrace_rpc::source_poll::{PollSource, Polled};
use millrace_rpc::stream::{Acknowledged, StreamError, StreamMessage};
use millrace_rpc::version::{ColumnWatermark, JobCommit, PublishHandle, VersionEdit};
use tokio::sync::watch;
use tokio::time::Instant;
use tracing::warn;

use super::elsewhere::FollowedInputs;

/// How long a worker waits for a record that the leader has told it of.
const RECORD_PATIENCE: Duration = Duration::from_secs(20);
/// How often a message that nobody waits for is sent again.
const ATTEMPTS: u32 = 20;
/// Between two of them.
const PAUSE: Duration = Duration::from_millis(250);

/// The worker's service, behind the log that it follows: before a call that names a record is served, the record is
/// folded here.
pub struct Following {
    pub follower: Arc<LogFollower>,
    pub worker: Arc<Worker>,
    pub inputs: Arc<FollowedInputs>,
}

impl Following {
    async fn reach(&self, record: u64) -> Result<(), SqlError> {
        let reached = self.follower.wait_for(record, Instant::now() + RECORD_PATIENCE).await;
        reached.map_err(SqlError::from)
    }
}

#[async_trait]
impl ComputeService for Following {
    async fn start_job(&self, start: StartJob) -> Result<(), SqlError> {
        self.reach(start.record).await?;
        if self.inputs.generation_here(start.job) != Some(start.generation) {
            return Err(not_here(&start));
        }
        self.worker.start_job(start).await
    }

    async fn adopt_job(
        &self,
        job: JobId,
        generation: Generation,
        record: u64,
        after: u64,
    ) -> Result<Option<RunningJob>, SqlError> {
        self.reach(record).await?;
        self.worker.adopt_job(job, generation, record, after).await
    }

    async fn cut(
        &self,
        job: JobId,
        generation: Generation,
        cut: Cut,
    ) -> Result<JobCommit, SqlError> {
        self.reach(cut.record).await?;
        let worker = Arc::clone(&self.worker);
        to_its_end("cut a job", async move { worker.cut(job, generation, cut).await }).await
    }

    async fn apply_records(&self, message: StreamMessage) -> Result<Acknowledged, StreamError> {
        let taken = self.follower.take(&message.records).await;
        taken.map_err(|e| StreamError::Failed(SqlError::from(e)))?;
        let may_end = MayEnd::of(message.records.iter().map(|r| &*r.record));
        let applied = self.worker.apply_records(message).await;
        // Commits of what has ended were concluded first.
        let ended = self.inputs.ended(&self.worker, &may_end);
        if !ended.is_empty() {
            let worker = Arc::clone(&self.worker);
            spawn("end generations", async move {
                // All at once: one whose tasks take long keeps no other one running.
                join_all(ended.into_iter().map(|ended| ended.end(&worker))).await;
            });
        }
        applied
    }

    async fn applied_since(&self, known: Acknowledged) -> Acknowledged {
        self.worker.applied_since(known).await
    }

    async fn prepare_edit(&self, job: JobId, generation: Generation, edit: VersionEdit) {
        self.worker.prepare_edit(job, generation, edit).await;
    }

    async fn abort_epoch(&self, job: JobId, generation: Generation, error: SqlError) {
        self.worker.abort_epoch(job, generation, error).await;
    }

    async fn publish(
        &self,
        job: JobId,
        generation: Generation,
        handles: Vec<PublishHandle>,
    ) -> Result<(), SqlError> {
        let worker = Arc::clone(&self.worker);
        let publish = async move { worker.publish(job, generation, handles).await };
        to_its_end("publish a sink's change", publish).await
    }

    async fn stop_job(&self, job: JobId, generation: Generation) {
        self.worker.stop_job(job, generation).await;
    }

    async fn poll_source(&self, poll: PollSource) -> Result<Polled, SqlError> {
        self.reach(poll.record).await.map_err(|mut error| {
            // Nothing is wrong with the source: another process may be asked.
            error.state = SqlState::CANNOT_CONNECT_NOW;
            error
        })?;
        self.worker.poll_source(poll).await
    }
}

/// The log that is followed here has placed the job on another process, or has another generation of it.
fn not_here(start: &StartJob) -> SqlError {
    let StartJob { job, generation, .. } = start;
    SqlError::new(
        SqlState::OBJECT_NOT_IN_PREREQUISITE_STATE,
        format!("the log does not have generation {generation} of job {job} run on this process"),
    )
}

/// Does what ends only with the job, whatever becomes of the leader that has asked for it: the next one goes on with what
/// it has made.
async fn to_its_end<T: Send + 'static>(
    name: &'static str,
    work: impl Future<Output = Result<T, SqlError>> + Send + 'static,
) -> Result<T, SqlError> {
    let ended = spawn(name, carried(work)).await;
    ended.unwrap_or_else(|error| Err(SqlError::internal(format!("{name}: {error}"))))
}

/// See the module.
pub struct Upstream {
    pub follower: Arc<LogFollower>,
    pub meta: Arc<RemoteMeta>,
}

impl Upstream {
    /// Sends a message that nobody waits for, several times if there is no answer.
    fn tell<F>(
        &self,
        what: &'static str,
        send: impl Fn(Arc<RemoteMeta>) -> F + Send + Sync + 'static,
    ) where
        F: Future<Output = Result<(), CallError>> + Send,
    {
        let meta = Arc::clone(&self.meta);
        let told = async move {
            for _ in 0..ATTEMPTS {
                match send(Arc::clone(&meta)).await {
                    Ok(()) => return,
                    Err(e) if e.is_retryable() => tokio::time::sleep(PAUSE).await,
                    Err(error) => {
                        warn!(%error, "{what} was refused");
                        return;
                    }
                }
            }
            warn!("{what} has not been answered");
        };
        spawn("tell meta", carried(told));
    }
}

#[async_trait]
impl MetaService for Upstream {
    fn source_ahead(&self, source: RelationId, splits: &[(u32, u64)]) -> Vec<Option<u64>> {
        self.follower.source_ahead(source, splits)
    }

    fn request_cut(&self, job: JobId) {
        self.tell("a request for a commit", move |meta| async move { meta.request_cut(job).await });
    }

    fn request_compaction(&self, job: JobId) {
        self.tell("a request for a compaction", move |meta| async move {
            meta.request_compaction(job).await
        });
    }

    async fn commit_edit(
        &self,
        job: JobId,
        generation: Generation,
        edit: VersionEdit,
    ) -> Result<bool, SqlError> {
        Ok(self.meta.commit_edit(job, generation, edit).await?)
    }

    fn report_failure(&self, job: JobId, generation: Generation, error: SqlError) {
        self.tell("the failure of a job", move |meta| {
            let error = error.clone();
            async move { meta.report_failure(job, generation, error).await }
        });
    }

    fn source_offsets(&self, source: RelationId, epoch: Epoch) -> Vec<(u32, u64)> {
        self.follower.source_offsets(source, epoch)
    }

    fn is_fenced(&self, incarnation: u64) -> bool {
        self.follower.is_fenced(incarnation)
    }

    fn is_behind(&self, job: JobId) -> bool {
        self.follower.is_behind(job)
    }

    fn source_marks(&self, source: RelationId, epoch: Epoch) -> Vec<SplitMarkAt> {
        self.follower.source_marks(source, epoch)
    }

    fn watermarks(&self, relation: RelationId, epoch: Epoch) -> Vec<ColumnWatermark> {
        self.follower.watermarks(relation, epoch)
    }

    fn row_count(&self, relation: RelationId) -> Option<u64> {
        self.follower.row_count(relation)
    }

    fn source_parts(&self, source: RelationId) -> SourceParts {
        self.follower.source_parts(source)
    }

    fn job_to_start(&self, job: JobId) -> Option<JobToStart> {
        self.follower.job_to_start(job)
    }

    fn relation(&self, relation: RelationId) -> Option<Arc<Relation>> {
        self.follower.relation(relation)
    }

    fn option(&self, relation: RelationId, name: &str) -> Option<String> {
        self.follower.option(relation, name)
    }

    fn changes(&self, relation: RelationId) -> Option<watch::Receiver<u64>> {
        Some(self.follower.changes(relation))
    }

    fn graph(&self, relation: RelationId) -> Option<Bytes> {
        self.follower.graph(relation)
    }
}
