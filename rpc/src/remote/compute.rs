//! [`ComputeService`] over gRPC.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use millrace_common::{Epoch, Generation, JobId, RelationId, SqlError};
use prost::Message;
use tonic::{Request, Response, Status};

use super::admission::Admission;
use super::convert::{job_generation, required};
use super::peer::{Peer, Transport};
use crate::call_error::{CallError, error_from_proto, error_to_proto};
use crate::proto::compute_client::ComputeClient;
use crate::proto::compute_server::{Compute, ComputeServer};
use crate::proto::{self, Empty};
use crate::rows::MAX_MESSAGE_BYTES;
use crate::services::{ComputeService, Cut, RunningJob, StartJob};
use crate::source_poll::{PollSource, Polled};
use crate::stream::{Acknowledged, StreamError, StreamMessage};
use crate::version::{JobCommit, PublishHandle, VersionEdit};

/// How long a call is repeated that has no answer to fail with; then the job's generation fences what it was to stop.
const REPEAT_FOR: usize = 10;
/// Between two attempts.
const PAUSE: Duration = Duration::from_millis(200);
/// Bytes of records that go into one message, if it is not one record.
const RECORDS_BYTES: usize = 8 << 20;

pub(super) fn server(
    inner: Arc<dyn ComputeService>,
    admission: &Arc<Admission>,
) -> ComputeServer<Served> {
    ComputeServer::new(Served { inner, admission: Arc::clone(admission) })
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES)
}

pub(super) struct Served {
    inner: Arc<dyn ComputeService>,
    admission: Arc<Admission>,
}

fn refused(e: SqlError) -> Status {
    CallError::Sql(e).into_status()
}

#[async_trait]
impl Compute for Served {
    async fn start_job(
        &self,
        request: Request<proto::StartJobRequest>,
    ) -> Result<Response<Empty>, Status> {
        self.admission.admit(&request)?;
        let start = StartJob::from(request.into_inner());
        self.inner.start_job(start).await.map_err(refused)?;
        Ok(Response::new(Empty {}))
    }

    async fn adopt_job(
        &self,
        request: Request<proto::AdoptJobRequest>,
    ) -> Result<Response<proto::AdoptJobAnswer>, Status> {
        self.admission.admit(&request)?;
        let proto::AdoptJobRequest { job, generation, record, after } = request.into_inner();
        let (job, generation) = (RelationId(job), Generation(generation));
        let running = self.inner.adopt_job(job, generation, record, after).await;
        let running = running.map_err(refused)?.map(proto::RunningJob::from);
        Ok(Response::new(proto::AdoptJobAnswer { running }))
    }

    async fn cut(
        &self,
        request: Request<proto::CutRequest>,
    ) -> Result<Response<JobCommit>, Status> {
        self.admission.admit(&request)?;
        let proto::CutRequest { job, generation, epoch, number, record } = request.into_inner();
        let cut = Cut { epoch: Epoch(epoch), number, record };
        let commit = self.inner.cut(RelationId(job), Generation(generation), cut).await;
        commit.map(Response::new).map_err(refused)
    }

    async fn apply_records(
        &self,
        request: Request<proto::StreamMessage>,
    ) -> Result<Response<proto::Acknowledged>, Status> {
        self.admission.admit(&request)?;
        let message = StreamMessage::try_from(request.into_inner());
        let message = message.map_err(CallError::into_status)?;
        match self.inner.apply_records(message).await {
            Ok(at) => Ok(Response::new(at.into())),
            Err(StreamError::Gap { next }) => Err(CallError::Gap { next }.into_status()),
            Err(StreamError::Failed(e)) => Err(refused(e)),
        }
    }

    async fn applied_since(
        &self,
        request: Request<proto::Acknowledged>,
    ) -> Result<Response<proto::Acknowledged>, Status> {
        self.admission.admit(&request)?;
        let at = self.inner.applied_since(request.into_inner().into()).await;
        Ok(Response::new(at.into()))
    }

    async fn prepare_edit(
        &self,
        request: Request<proto::PrepareEditRequest>,
    ) -> Result<Response<Empty>, Status> {
        self.admission.admit(&request)?;
        let proto::PrepareEditRequest { job, generation, edit } = request.into_inner();
        let edit = required(edit, "edit").map_err(CallError::into_status)?;
        self.inner.prepare_edit(RelationId(job), Generation(generation), edit).await;
        Ok(Response::new(Empty {}))
    }

    async fn abort_epoch(
        &self,
        request: Request<proto::AbortEpochRequest>,
    ) -> Result<Response<Empty>, Status> {
        self.admission.admit(&request)?;
        let proto::AbortEpochRequest { job, generation, error } = request.into_inner();
        let error = required(error, "error").map_err(CallError::into_status)?;
        let error = error_from_proto(error);
        self.inner.abort_epoch(RelationId(job), Generation(generation), error).await;
        Ok(Response::new(Empty {}))
    }

    async fn publish(
        &self,
        request: Request<proto::PublishRequest>,
    ) -> Result<Response<Empty>, Status> {
        self.admission.admit(&request)?;
        let proto::PublishRequest { job, generation, handles } = request.into_inner();
        let published = self.inner.publish(RelationId(job), Generation(generation), handles);
        published.await.map_err(refused)?;
        Ok(Response::new(Empty {}))
    }

    async fn stop_job(
        &self,
        request: Request<proto::JobGeneration>,
    ) -> Result<Response<Empty>, Status> {
        self.admission.admit(&request)?;
        let proto::JobGeneration { job, generation } = request.into_inner();
        self.inner.stop_job(RelationId(job), Generation(generation)).await;
        Ok(Response::new(Empty {}))
    }

    async fn poll_source(
        &self,
        request: Request<proto::PollSourceRequest>,
    ) -> Result<Response<proto::PollSourceAnswer>, Status> {
        self.admission.admit(&request)?;
        let polled = self.inner.poll_source(request.into_inner().into()).await;
        polled.map(|polled| Response::new(polled.into())).map_err(refused)
    }
}

/// A compute process.
#[derive(Clone)]
pub struct RemoteCompute {
    peer: Peer,
}

fn client(transport: Transport) -> ComputeClient<Transport> {
    ComputeClient::new(transport)
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES)
}

impl RemoteCompute {
    pub fn new(peer: Peer) -> RemoteCompute {
        RemoteCompute { peer }
    }

    async fn send_records(&self, message: StreamMessage) -> Result<Acknowledged, CallError> {
        let message = proto::StreamMessage::from(message);
        let mut answer = None;
        for part in parts(message) {
            let sent = self.peer.ask(part, |t, r| async move { client(t).apply_records(r).await });
            answer = Some(sent.await?);
        }
        // There is always one part.
        Ok(answer.unwrap_or_default().into())
    }

    /// Repeats a call while it has no answer.
    async fn insist<F>(&self, what: &str, call: impl Fn() -> F)
    where
        F: Future<Output = Result<Empty, CallError>>,
    {
        for _ in 0..REPEAT_FOR {
            match call().await {
                Ok(Empty {}) => return,
                Err(e) if e.is_retryable() => tokio::time::sleep(PAUSE).await,
                Err(e) => {
                    let peer = self.peer.address();
                    tracing::warn!(%peer, error = %e, "{what} was refused");
                    return;
                }
            }
        }
        tracing::warn!(peer = %self.peer.address(), "{what} has not been answered");
    }
}

/// A message in parts of bounded size, in order; the last has the horizons.
fn parts(message: proto::StreamMessage) -> Vec<proto::StreamMessage> {
    let mut parts = vec![proto::StreamMessage::default()];
    let mut bytes = 0;
    for record in message.records {
        let more = record.encoded_len();
        if bytes > 0 && bytes + more > RECORDS_BYTES {
            parts.push(proto::StreamMessage::default());
            bytes = 0;
        }
        bytes += more;
        if let Some(part) = parts.last_mut() {
            part.records.push(record);
        }
    }
    if let Some(part) = parts.last_mut() {
        part.horizons = message.horizons;
    }
    parts
}

#[async_trait]
impl ComputeService for RemoteCompute {
    async fn start_job(&self, start: StartJob) -> Result<(), SqlError> {
        let request = proto::StartJobRequest::from(start);
        let started =
            self.peer.wait(request, |t, r| async move { client(t).start_job(r).await }).await;
        Ok(started.map(drop)?)
    }

    async fn adopt_job(
        &self,
        job: JobId,
        generation: Generation,
        record: u64,
        after: u64,
    ) -> Result<Option<RunningJob>, SqlError> {
        let (job, generation) = (job.0, generation.0);
        let request = proto::AdoptJobRequest { job, generation, record, after };
        let answer = self.peer.wait(request, |t, r| async move { client(t).adopt_job(r).await });
        Ok(answer.await?.running.map(RunningJob::from))
    }

    async fn cut(
        &self,
        job: JobId,
        generation: Generation,
        cut: Cut,
    ) -> Result<JobCommit, SqlError> {
        let Cut { epoch: Epoch(epoch), number, record } = cut;
        let (job, generation) = (job.0, generation.0);
        let request = proto::CutRequest { job, generation, epoch, number, record };
        Ok(self.peer.wait(request, |t, r| async move { client(t).cut(r).await }).await?)
    }

    async fn apply_records(&self, message: StreamMessage) -> Result<Acknowledged, StreamError> {
        self.send_records(message).await.map_err(|e| match e {
            CallError::Gap { next } => StreamError::Gap { next },
            e => StreamError::Failed(e.into()),
        })
    }

    async fn applied_since(&self, known: Acknowledged) -> Acknowledged {
        loop {
            let request = proto::Acknowledged::from(known.clone());
            let answer =
                self.peer.wait(request, |t, r| async move { client(t).applied_since(r).await });
            match answer.await {
                Ok(at) => return at.into(),
                // Nothing is known of it: whoever waits gives up by itself.
                Err(_) => tokio::time::sleep(PAUSE).await,
            }
        }
    }

    async fn prepare_edit(&self, job: JobId, generation: Generation, edit: VersionEdit) {
        let (job, generation) = (job.0, generation.0);
        let request = proto::PrepareEditRequest { job, generation, edit: Some(edit) };
        let prepared =
            self.peer.ask(request, |t, r| async move { client(t).prepare_edit(r).await });
        if let Err(error) = prepared.await {
            let peer = self.peer.address();
            tracing::debug!(%peer, %error, "new runs were not prepared for");
        }
    }

    async fn abort_epoch(&self, job: JobId, generation: Generation, error: SqlError) {
        let (job, generation) = (job.0, generation.0);
        let error = Some(error_to_proto(&error));
        let request = proto::AbortEpochRequest { job, generation, error };
        self.insist("the end of an epoch", || {
            let send = |t, r| async move { client(t).abort_epoch(r).await };
            self.peer.ask(request.clone(), send)
        })
        .await;
    }

    async fn publish(
        &self,
        job: JobId,
        generation: Generation,
        handles: Vec<PublishHandle>,
    ) -> Result<(), SqlError> {
        let request = proto::PublishRequest { job: job.0, generation: generation.0, handles };
        let published = self.peer.wait(request, |t, r| async move { client(t).publish(r).await });
        Ok(published.await.map(drop)?)
    }

    async fn stop_job(&self, job: JobId, generation: Generation) {
        let request = job_generation(job, generation);
        self.insist("the stop of a job", || {
            self.peer.wait(request, |t, r| async move { client(t).stop_job(r).await })
        })
        .await;
    }

    async fn poll_source(&self, poll: PollSource) -> Result<Polled, SqlError> {
        let request = proto::PollSourceRequest::from(poll);
        let answer = self.peer.wait(request, |t, r| async move { client(t).poll_source(r).await });
        Ok(Polled::try_from(answer.await?)?)
    }
}
