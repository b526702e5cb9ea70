//! [`MetaControl`] over gRPC.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use futures::StreamExt;
use futures::stream::BoxStream;
use millrace_common::{Epoch, Generation, JobId, RelationId, SqlError, SqlState};
use tonic::{Request, Response, Status};

use super::admission::Admission;
use super::convert::required;
use super::peer::{Peer, Transport};
use crate::call_error::{CallError, error_from_proto, error_to_proto};
use crate::control::{
    DefineAnswer, DefineRequest, GiveBackLocksRequest, Heartbeat, JobReports, ListedLock,
    MetaControl, ReadEpoch, RecordStream, SessionsAnswer, SessionsTold, SessionsWanted,
    TakeLockAnswer, TakeLockRequest,
};
use crate::log::RegisterProcess;
use crate::proto::meta_client::MetaClient;
use crate::proto::meta_server::{Meta, MetaServer};
use crate::proto::{self, Empty, JobRequest};
use crate::rows::MAX_MESSAGE_BYTES;
use crate::stream::StreamMessage;
use crate::version::VersionEdit;

/// What a call with a timeout of its own may take beyond it.
const GRACE: Duration = Duration::from_secs(2);

/// A leader that the object store has not answered for so long may be succeeded by one that it answers.
const LOG_PATIENCE: Duration = Duration::from_secs(2);

/// Where a process puts what it serves as the leader, once it leads.
pub type LeaderSlot = OnceLock<Arc<dyn MetaControl>>;

/// Served whether this process leads or not.
pub(super) fn server(
    inner: Arc<dyn MetaControl>,
    admission: &Arc<Admission>,
) -> MetaServer<Served> {
    served(Served {
        slot: Arc::new(LeaderSlot::from(inner)),
        always: true,
        admission: Arc::clone(admission),
    })
}

/// Served while this process leads.
pub(super) fn leader(slot: Arc<LeaderSlot>, admission: &Arc<Admission>) -> MetaServer<Served> {
    served(Served { slot, always: false, admission: Arc::clone(admission) })
}

fn served(served: Served) -> MetaServer<Served> {
    MetaServer::new(served)
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES)
}

pub(super) struct Served {
    slot: Arc<LeaderSlot>,
    /// Whether or not the process leads.
    always: bool,
    admission: Arc<Admission>,
}

impl Served {
    /// What answers, if this process leads. Asked after the call was admitted: its caller may have told of a higher term.
    fn leader(&self) -> Result<&Arc<dyn MetaControl>, Status> {
        let leader = self.slot.get().filter(|_| self.always || self.admission.leads());
        leader.ok_or_else(|| self.admission.not_leader().into_status())
    }
}

fn empty(done: Result<(), CallError>) -> Result<Response<Empty>, Status> {
    done.map(|()| Response::new(Empty {})).map_err(CallError::into_status)
}

/// The caller was fenced while what it defines was being made: that may be on its way into the log.
fn cut_off(incarnation: u64) -> CallError {
    let message = format!("process {incarnation} was fenced while its definition was being made");
    let error = SqlError::new(SqlState::TRANSACTION_RESOLUTION_UNKNOWN, message);
    error.with_detail("The statement may or may not have taken effect.").into()
}

#[async_trait]
impl Meta for Served {
    async fn register_process(
        &self,
        request: Request<RegisterProcess>,
    ) -> Result<Response<proto::Registered>, Status> {
        self.admission.admit_newcomer(&request)?;
        let registered = self.leader()?.register_process(request.into_inner()).await;
        let incarnation = registered.map_err(CallError::into_status)?;
        Ok(Response::new(proto::Registered { incarnation }))
    }

    async fn beat(
        &self,
        request: Request<Heartbeat>,
    ) -> Result<Response<proto::HeartbeatAnswer>, Status> {
        self.admission.admit(&request)?;
        let record =
            self.leader()?.beat(request.into_inner()).await.map_err(CallError::into_status)?;
        let log_wait_ms = self.admission.log_wait().as_millis() as u64;
        Ok(Response::new(proto::HeartbeatAnswer { record, log_wait_ms }))
    }

    type FollowStream = BoxStream<'static, Result<proto::StreamMessage, Status>>;

    async fn follow(
        &self,
        request: Request<proto::FollowRequest>,
    ) -> Result<Response<Self::FollowStream>, Status> {
        self.admission.admit(&request)?;
        let records = self.leader()?.follow(request.into_inner().from).await;
        let records = records
            .map_err(CallError::into_status)?
            .map(|message| message.map(proto::StreamMessage::from).map_err(CallError::into_status));
        let stopping = self.admission.stopping();
        Ok(Response::new(records.take_until(stopping.cancelled_owned()).boxed()))
    }

    async fn request_cut(&self, request: Request<JobRequest>) -> Result<Response<Empty>, Status> {
        self.admission.admit(&request)?;
        empty(self.leader()?.request_cut(RelationId(request.get_ref().job)).await)
    }

    async fn request_compaction(
        &self,
        request: Request<JobRequest>,
    ) -> Result<Response<Empty>, Status> {
        self.admission.admit(&request)?;
        empty(self.leader()?.request_compaction(RelationId(request.get_ref().job)).await)
    }

    async fn commit_edit(
        &self,
        request: Request<proto::CommitEditRequest>,
    ) -> Result<Response<proto::CommitEditAnswer>, Status> {
        self.admission.admit(&request)?;
        let proto::CommitEditRequest { job, generation, edit } = request.into_inner();
        let edit = required(edit, "edit").map_err(CallError::into_status)?;
        let edited =
            self.leader()?.commit_edit(RelationId(job), Generation(generation), edit).await;
        let applied = edited.map_err(CallError::into_status)?;
        Ok(Response::new(proto::CommitEditAnswer { applied }))
    }

    async fn report_failure(
        &self,
        request: Request<proto::ReportFailureRequest>,
    ) -> Result<Response<Empty>, Status> {
        self.admission.admit(&request)?;
        let proto::ReportFailureRequest { job, generation, error } = request.into_inner();
        let error = required(error, "error").map_err(CallError::into_status)?;
        let (job, generation) = (RelationId(job), Generation(generation));
        empty(self.leader()?.report_failure(job, generation, error_from_proto(error)).await)
    }

    async fn define(
        &self,
        request: Request<DefineRequest>,
    ) -> Result<Response<DefineAnswer>, Status> {
        let incarnation = self.admission.admit(&request)?.incarnation;
        let leader = self.leader()?;
        // It may wait for long before it has an effect: what its caller's sessions have locked is others' by then.
        let work = leader.define(request.into_inner());
        let defined = self.admission.until_fenced(incarnation, work).await;
        let defined = defined.unwrap_or_else(|| Err(cut_off(incarnation)));
        defined.map(Response::new).map_err(CallError::into_status)
    }

    async fn wait_created(&self, request: Request<JobRequest>) -> Result<Response<Empty>, Status> {
        self.admission.admit(&request)?;
        empty(self.leader()?.wait_created(RelationId(request.get_ref().job)).await)
    }

    async fn wait_rebuilt(&self, request: Request<JobRequest>) -> Result<Response<Empty>, Status> {
        self.admission.admit(&request)?;
        empty(self.leader()?.wait_rebuilt(RelationId(request.get_ref().job)).await)
    }

    async fn read_epoch(
        &self,
        request: Request<proto::ReadEpochRequest>,
    ) -> Result<Response<proto::ReadEpochAnswer>, Status> {
        self.admission.admit(&request)?;
        let proto::ReadEpochRequest { relations, timeout_ms, fresh } = request.into_inner();
        let ids: Vec<RelationId> = relations.into_iter().map(RelationId).collect();
        let timeout = Some(Duration::from_millis(timeout_ms)).filter(|t| !t.is_zero());
        let read = self.leader()?.read_epoch(&ids, timeout, fresh).await;
        let ReadEpoch { epoch: Epoch(epoch), record, catalog_version } =
            read.map_err(CallError::into_status)?;
        Ok(Response::new(proto::ReadEpochAnswer { epoch, record, catalog_version }))
    }

    async fn flush(&self, request: Request<Empty>) -> Result<Response<Empty>, Status> {
        self.admission.admit(&request)?;
        empty(self.leader()?.flush().await)
    }

    async fn jobs(&self, request: Request<Empty>) -> Result<Response<JobReports>, Status> {
        self.admission.admit(&request)?;
        self.leader()?.jobs().await.map(Response::new).map_err(CallError::into_status)
    }

    async fn take_lock(
        &self,
        request: Request<TakeLockRequest>,
    ) -> Result<Response<TakeLockAnswer>, Status> {
        self.admission.admit(&request)?;
        let taken = self.leader()?.take_lock(request.into_inner()).await;
        taken.map(Response::new).map_err(CallError::into_status)
    }

    async fn give_back_locks(
        &self,
        request: Request<GiveBackLocksRequest>,
    ) -> Result<Response<Empty>, Status> {
        self.admission.admit(&request)?;
        empty(self.leader()?.give_back_locks(request.into_inner()).await)
    }

    async fn locks(&self, request: Request<Empty>) -> Result<Response<proto::ListedLocks>, Status> {
        self.admission.admit(&request)?;
        let locks = self.leader()?.locks().await.map_err(CallError::into_status)?;
        Ok(Response::new(proto::ListedLocks { locks }))
    }

    async fn tell_sessions(
        &self,
        request: Request<SessionsTold>,
    ) -> Result<Response<SessionsWanted>, Status> {
        self.admission.admit(&request)?;
        let wanted = self.leader()?.tell_sessions(request.into_inner()).await;
        wanted.map(Response::new).map_err(CallError::into_status)
    }

    async fn sessions(
        &self,
        request: Request<proto::SessionsRequest>,
    ) -> Result<Response<SessionsAnswer>, Status> {
        self.admission.admit(&request)?;
        let sessions = self.leader()?.sessions(request.into_inner().process).await;
        sessions.map(Response::new).map_err(CallError::into_status)
    }
}

/// The leader, in another process.
#[derive(Clone)]
pub struct RemoteMeta {
    peer: Peer,
}

fn client(transport: Transport) -> MetaClient<Transport> {
    MetaClient::new(transport)
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES)
}

impl RemoteMeta {
    pub fn new(peer: Peer) -> RemoteMeta {
        RemoteMeta { peer }
    }

    /// The way to the leader.
    pub fn peer(&self) -> &Peer {
        &self.peer
    }
}

#[async_trait]
impl MetaControl for RemoteMeta {
    async fn register_process(&self, process: RegisterProcess) -> Result<u64, CallError> {
        let send = |t, r| async move { client(t).register_process(r).await };
        Ok(self.peer.ask(process, send).await?.incarnation)
    }

    async fn beat(&self, heartbeat: Heartbeat) -> Result<u64, CallError> {
        let send = |t, r| async move { client(t).beat(r).await };
        let proto::HeartbeatAnswer { record, log_wait_ms } = self.peer.ask(heartbeat, send).await?;
        if Duration::from_millis(log_wait_ms) >= LOG_PATIENCE {
            // Another process may lead by now, of which the one that has answered does not know.
            self.peer.doubt();
        }
        Ok(record)
    }

    async fn follow(&self, from: u64) -> Result<RecordStream, CallError> {
        let request = proto::FollowRequest { from };
        let send = |t, r| async move { client(t).follow(r).await };
        let messages = self.peer.wait(request, send).await?;
        let peer = self.peer.clone();
        let read = move |message: Result<proto::StreamMessage, Status>| {
            StreamMessage::try_from(message.map_err(|status| peer.failed(&status))?)
        };
        Ok(messages.map(read).boxed())
    }

    async fn request_cut(&self, job: JobId) -> Result<(), CallError> {
        let send = |t, r| async move { client(t).request_cut(r).await };
        self.peer.ask(JobRequest { job: job.0 }, send).await.map(drop)
    }

    async fn request_compaction(&self, job: JobId) -> Result<(), CallError> {
        let send = |t, r| async move { client(t).request_compaction(r).await };
        self.peer.ask(JobRequest { job: job.0 }, send).await.map(drop)
    }

    async fn commit_edit(
        &self,
        job: JobId,
        generation: Generation,
        edit: VersionEdit,
    ) -> Result<bool, CallError> {
        let (job, generation) = (job.0, generation.0);
        let request = proto::CommitEditRequest { job, generation, edit: Some(edit) };
        let send = |t, r| async move { client(t).commit_edit(r).await };
        Ok(self.peer.wait(request, send).await?.applied)
    }

    async fn report_failure(
        &self,
        job: JobId,
        generation: Generation,
        error: SqlError,
    ) -> Result<(), CallError> {
        let (job, generation) = (job.0, generation.0);
        let error = Some(error_to_proto(&error));
        let request = proto::ReportFailureRequest { job, generation, error };
        let send = |t, r| async move { client(t).report_failure(r).await };
        self.peer.ask(request, send).await.map(drop)
    }

    async fn define(&self, request: DefineRequest) -> Result<DefineAnswer, CallError> {
        let send = |t, r| async move { client(t).define(r).await };
        self.peer.wait(request, send).await
    }

    async fn wait_created(&self, id: RelationId) -> Result<(), CallError> {
        let send = |t, r| async move { client(t).wait_created(r).await };
        self.peer.wait(JobRequest { job: id.0 }, send).await.map(drop)
    }

    async fn wait_rebuilt(&self, id: RelationId) -> Result<(), CallError> {
        let send = |t, r| async move { client(t).wait_rebuilt(r).await };
        self.peer.wait(JobRequest { job: id.0 }, send).await.map(drop)
    }

    async fn read_epoch(
        &self,
        ids: &[RelationId],
        timeout: Option<Duration>,
        fresh: bool,
    ) -> Result<ReadEpoch, CallError> {
        let relations = ids.iter().map(|id| id.0).collect();
        // No timeout is sent as 0: less than a millisecond is one.
        let timeout_ms = timeout.map_or(0, |t| (t.as_millis() as u64).max(1));
        let request = proto::ReadEpochRequest { relations, timeout_ms, fresh };
        let send = |t, r| async move { client(t).read_epoch(r).await };
        let read = match timeout {
            Some(timeout) => self.peer.ask_within(timeout + GRACE, request, send).await?,
            None => self.peer.wait(request, send).await?,
        };
        let proto::ReadEpochAnswer { epoch, record, catalog_version } = read;
        Ok(ReadEpoch { epoch: Epoch(epoch), record, catalog_version })
    }

    async fn flush(&self) -> Result<(), CallError> {
        let send = |t, r| async move { client(t).flush(r).await };
        self.peer.wait(Empty {}, send).await.map(drop)
    }

    async fn jobs(&self) -> Result<JobReports, CallError> {
        let send = |t, r| async move { client(t).jobs(r).await };
        self.peer.ask(Empty {}, send).await
    }

    async fn take_lock(&self, request: TakeLockRequest) -> Result<TakeLockAnswer, CallError> {
        let send = |t, r| async move { client(t).take_lock(r).await };
        self.peer.wait(request, send).await
    }

    async fn give_back_locks(&self, request: GiveBackLocksRequest) -> Result<(), CallError> {
        let send = |t, r| async move { client(t).give_back_locks(r).await };
        self.peer.ask(request, send).await.map(drop)
    }

    async fn locks(&self) -> Result<Vec<ListedLock>, CallError> {
        let send = |t, r| async move { client(t).locks(r).await };
        Ok(self.peer.ask(Empty {}, send).await?.locks)
    }

    async fn tell_sessions(&self, told: SessionsTold) -> Result<SessionsWanted, CallError> {
        let send = |t, r| async move { client(t).tell_sessions(r).await };
        self.peer.wait(told, send).await
    }

    async fn sessions(&self, process: u64) -> Result<SessionsAnswer, CallError> {
        let send = |t, r| async move { client(t).sessions(r).await };
        self.peer.ask(proto::SessionsRequest { process }, send).await
    }
}
