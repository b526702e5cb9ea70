//! [`OperatorService`] over gRPC.

use std::sync::{Arc, OnceLock};

use async_trait::async_trait;
use millrace_common::{JobId, RelationId};
use tonic::{Request, Response, Status};

use super::admission::Admission;
use super::peer::{Peer, Transport};
use crate::call_error::CallError;
use crate::operator::{
    BackupList, BackupOverview, ClusterOverview, CollectionReport, JobVersions, OperatorService,
    PlacedJobs,
};
use crate::proto::operator_client::OperatorClient;
use crate::proto::operator_server::{Operator, OperatorServer};
use crate::proto::{BackupRequest, CollectionRequest, DrainRequest, Empty, MoveJobRequest};
use crate::rows::MAX_MESSAGE_BYTES;
use crate::version::StatementId;

/// Where a process puts what it serves an operator as the leader, once it leads.
pub type OperatorSlot = OnceLock<Arc<dyn OperatorService>>;

/// Served while this process leads.
pub(super) fn server(
    slot: Arc<OperatorSlot>,
    admission: &Arc<Admission>,
) -> OperatorServer<Served> {
    OperatorServer::new(Served { slot, admission: Arc::clone(admission) })
        .max_encoding_message_size(MAX_MESSAGE_BYTES)
}

pub(super) struct Served {
    slot: Arc<OperatorSlot>,
    admission: Arc<Admission>,
}

impl Served {
    /// What answers, if this process leads. Asked after the call was admitted: its caller may have told of a higher term.
    fn leader(&self) -> Result<&Arc<dyn OperatorService>, Status> {
        let leader = self.slot.get().filter(|_| self.admission.leads());
        leader.ok_or_else(|| self.admission.not_leader().into_status())
    }
}

fn answer<T>(done: Result<T, CallError>) -> Result<Response<T>, Status> {
    done.map(Response::new).map_err(CallError::into_status)
}

#[async_trait]
impl Operator for Served {
    async fn overview(&self, request: Request<Empty>) -> Result<Response<ClusterOverview>, Status> {
        self.admission.admit(&request)?;
        answer(self.leader()?.overview().await)
    }

    async fn move_job(
        &self,
        request: Request<MoveJobRequest>,
    ) -> Result<Response<PlacedJobs>, Status> {
        self.admission.admit(&request)?;
        let MoveJobRequest { job, worker, id } = request.into_inner();
        answer(self.leader()?.move_job(RelationId(job), worker, id).await)
    }

    async fn drain(&self, request: Request<DrainRequest>) -> Result<Response<PlacedJobs>, Status> {
        self.admission.admit(&request)?;
        let DrainRequest { worker, undo, id } = request.into_inner();
        answer(self.leader()?.drain(worker, undo, id).await)
    }

    async fn versions(&self, request: Request<Empty>) -> Result<Response<JobVersions>, Status> {
        self.admission.admit(&request)?;
        answer(self.leader()?.versions().await)
    }

    async fn collection(
        &self,
        request: Request<CollectionRequest>,
    ) -> Result<Response<CollectionReport>, Status> {
        self.admission.admit(&request)?;
        answer(self.leader()?.collection(request.into_inner().run).await)
    }

    async fn create_backup(
        &self,
        request: Request<BackupRequest>,
    ) -> Result<Response<BackupOverview>, Status> {
        self.admission.admit(&request)?;
        let BackupRequest { name, id } = request.into_inner();
        answer(self.leader()?.create_backup(name, id).await)
    }

    async fn backups(&self, request: Request<Empty>) -> Result<Response<BackupList>, Status> {
        self.admission.admit(&request)?;
        answer(self.leader()?.backups().await)
    }

    async fn release_backup(
        &self,
        request: Request<BackupRequest>,
    ) -> Result<Response<BackupOverview>, Status> {
        self.admission.admit(&request)?;
        let BackupRequest { name, id } = request.into_inner();
        answer(self.leader()?.release_backup(name, id).await)
    }
}

/// The leader, in another process.
#[derive(Clone)]
pub struct RemoteOperator {
    peer: Peer,
}

fn client(transport: Transport) -> OperatorClient<Transport> {
    OperatorClient::new(transport).max_decoding_message_size(MAX_MESSAGE_BYTES)
}

impl RemoteOperator {
    pub fn new(peer: Peer) -> RemoteOperator {
        RemoteOperator { peer }
    }
}

#[async_trait]
impl OperatorService for RemoteOperator {
    async fn overview(&self) -> Result<ClusterOverview, CallError> {
        let send = |t, r| async move { client(t).overview(r).await };
        self.peer.ask(Empty {}, send).await
    }

    async fn move_job(
        &self,
        job: JobId,
        worker: u64,
        id: Option<StatementId>,
    ) -> Result<PlacedJobs, CallError> {
        let send = |t, r| async move { client(t).move_job(r).await };
        self.peer.wait(MoveJobRequest { job: job.0, worker, id }, send).await
    }

    async fn drain(
        &self,
        worker: u64,
        undo: bool,
        id: Option<StatementId>,
    ) -> Result<PlacedJobs, CallError> {
        let send = |t, r| async move { client(t).drain(r).await };
        self.peer.wait(DrainRequest { worker, undo, id }, send).await
    }

    async fn versions(&self) -> Result<JobVersions, CallError> {
        let send = |t, r| async move { client(t).versions(r).await };
        self.peer.ask(Empty {}, send).await
    }

    async fn collection(&self, run: bool) -> Result<CollectionReport, CallError> {
        let send = |t, r| async move { client(t).collection(r).await };
        self.peer.wait(CollectionRequest { run }, send).await
    }

    async fn create_backup(
        &self,
        name: String,
        id: Option<StatementId>,
    ) -> Result<BackupOverview, CallError> {
        let send = |t, r| async move { client(t).create_backup(r).await };
        self.peer.wait(BackupRequest { name, id }, send).await
    }

    async fn backups(&self) -> Result<BackupList, CallError> {
        let send = |t, r| async move { client(t).backups(r).await };
        self.peer.ask(Empty {}, send).await
    }

    async fn release_backup(
        &self,
        name: String,
        id: Option<StatementId>,
    ) -> Result<BackupOverview, CallError> {
        let send = |t, r| async move { client(t).release_backup(r).await };
        self.peer.wait(BackupRequest { name, id }, send).await
    }
}
