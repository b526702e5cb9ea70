//! [`CompactorService`] over gRPC.

use std::sync::Arc;

use async_trait::async_trait;
use millrace_common::SqlError;
use tonic::{Request, Response, Status};

use super::admission::Admission;
use super::peer::{Peer, Transport};
use crate::call_error::CallError;
use crate::log::MoveParts;
use crate::proto;
use crate::proto::compactor_client::CompactorClient;
use crate::proto::compactor_server::{Compactor, CompactorServer};
use crate::rows::MAX_MESSAGE_BYTES;
use crate::services::{CompactionTask, CompactorService, LivePart};
use crate::version::VersionEdit;

pub(super) fn server(
    inner: Arc<dyn CompactorService>,
    admission: &Arc<Admission>,
) -> CompactorServer<Served> {
    CompactorServer::new(Served { inner, admission: Arc::clone(admission) })
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES)
}

pub(super) struct Served {
    inner: Arc<dyn CompactorService>,
    admission: Arc<Admission>,
}

#[async_trait]
impl Compactor for Served {
    async fn compact(
        &self,
        request: Request<proto::CompactionTask>,
    ) -> Result<Response<VersionEdit>, Status> {
        self.admission.admit(&request)?;
        let task =
            CompactionTask::try_from(request.into_inner()).map_err(CallError::into_status)?;
        let edit = self.inner.compact(task).await;
        edit.map(Response::new).map_err(|e| CallError::Sql(e).into_status())
    }

    async fn copy_parts(
        &self,
        request: Request<proto::CopyPartsRequest>,
    ) -> Result<Response<MoveParts>, Status> {
        self.admission.admit(&request)?;
        let parts = request.into_inner().parts.into_iter().map(LivePart::try_from);
        let parts = parts.collect::<Result<_, _>>().map_err(CallError::into_status)?;
        let moved = self.inner.copy_parts(parts).await;
        moved.map(Response::new).map_err(|e| CallError::Sql(e).into_status())
    }
}

/// A compactor.
#[derive(Clone)]
pub struct RemoteCompactor {
    peer: Peer,
}

fn client(transport: Transport) -> CompactorClient<Transport> {
    CompactorClient::new(transport)
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES)
}

impl RemoteCompactor {
    pub fn new(peer: Peer) -> RemoteCompactor {
        RemoteCompactor { peer }
    }
}

#[async_trait]
impl CompactorService for RemoteCompactor {
    async fn compact(&self, task: CompactionTask) -> Result<VersionEdit, SqlError> {
        let request = proto::CompactionTask::from(task);
        Ok(self.peer.wait(request, |t, r| async move { client(t).compact(r).await }).await?)
    }

    async fn copy_parts(&self, parts: Vec<LivePart>) -> Result<MoveParts, SqlError> {
        let parts = parts.into_iter().map(proto::LivePart::from).collect();
        let request = proto::CopyPartsRequest { parts };
        Ok(self.peer.wait(request, |t, r| async move { client(t).copy_parts(r).await }).await?)
    }
}
