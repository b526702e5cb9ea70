//! [`ReadService`] over gRPC.

use std::sync::Arc;

use async_trait::async_trait;
use millrace_common::{Epoch, Generation, RelationId, TableId};
use tonic::{Request, Response, Status};

use super::admission::Admission;
use super::convert::required;
use super::peer::{Peer, Transport};
use crate::call_error::CallError;
use crate::proto::read_client::ReadClient;
use crate::proto::read_rows_request::Wanted;
use crate::proto::read_server::{Read, ReadServer};
use crate::proto::{self, Empty};
use crate::read::{
    FoundRows, KeyRange, ReadAnswer, ReadRefusal, ReadRequest, ReadService, WantedRows,
};
use crate::rows::{self, MAX_MESSAGE_BYTES};

pub(super) fn server(
    inner: Arc<dyn ReadService>,
    admission: &Arc<Admission>,
) -> ReadServer<Served> {
    ReadServer::new(Served { inner, admission: Arc::clone(admission) })
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES)
}

pub(super) struct Served {
    inner: Arc<dyn ReadService>,
    admission: Arc<Admission>,
}

#[async_trait]
impl Read for Served {
    async fn rows(
        &self,
        request: Request<proto::ReadRowsRequest>,
    ) -> Result<Response<proto::ReadRowsAnswer>, Status> {
        self.admission.admit(&request)?;
        let request = request_from_proto(request.into_inner()).map_err(CallError::into_status)?;
        let answer = self.inner.read(request).await.and_then(answer_to_proto);
        answer.map(Response::new).map_err(CallError::into_status)
    }
}

/// The compute process that a job runs on.
#[derive(Clone)]
pub struct RemoteReads {
    peer: Peer,
}

impl RemoteReads {
    pub fn new(peer: Peer) -> RemoteReads {
        RemoteReads { peer }
    }
}

fn client(transport: Transport) -> ReadClient<Transport> {
    ReadClient::new(transport)
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES)
}

#[async_trait]
impl ReadService for RemoteReads {
    async fn read(&self, request: ReadRequest) -> Result<ReadAnswer, CallError> {
        let request = request_to_proto(request);
        let answer = self.peer.ask(request, |t, r| async move { client(t).rows(r).await });
        answer_from_proto(answer.await?)
    }

    async fn connect(&self) -> Result<(), CallError> {
        self.peer.handshake().await.map(drop)
    }
}

fn request_to_proto(request: ReadRequest) -> proto::ReadRowsRequest {
    let ReadRequest { job, generation, commits, epoch, table, columns, rows, limit, max_bytes } =
        request;
    let range = |r: KeyRange| proto::KeyRange { from: r.from, until: r.until };
    let wanted = match rows {
        WantedRows::Keys(keys) => Wanted::Keys(proto::StorageKeys { keys }),
        WantedRows::Ranges(ranges) => {
            Wanted::Ranges(proto::KeyRanges { ranges: ranges.into_iter().map(range).collect() })
        }
        WantedRows::Any => Wanted::Any(Empty {}),
    };
    proto::ReadRowsRequest {
        job: job.0,
        generation: generation.0,
        commits,
        epoch: epoch.0,
        table: table.0,
        columns,
        wanted: Some(wanted),
        limit,
        max_bytes,
    }
}

fn request_from_proto(request: proto::ReadRowsRequest) -> Result<ReadRequest, CallError> {
    let proto::ReadRowsRequest { job, generation, commits, epoch, table, columns, .. } = request;
    let range = |r: proto::KeyRange| KeyRange { from: r.from, until: r.until };
    let rows = match required(request.wanted, "wanted")? {
        Wanted::Keys(keys) => WantedRows::Keys(keys.keys),
        Wanted::Ranges(ranges) => {
            WantedRows::Ranges(ranges.ranges.into_iter().map(range).collect())
        }
        Wanted::Any(Empty {}) => WantedRows::Any,
    };
    Ok(ReadRequest {
        job: RelationId(job),
        generation: Generation(generation),
        commits,
        epoch: Epoch(epoch),
        table: TableId(table),
        columns,
        rows,
        limit: request.limit,
        max_bytes: request.max_bytes,
    })
}

fn answer_to_proto(answer: ReadAnswer) -> Result<proto::ReadRowsAnswer, CallError> {
    let FoundRows { positions, chunks } = match answer {
        ReadAnswer::Rows(found) => found,
        ReadAnswer::Refused(why) => {
            let refused = Some(refusal_to_proto(why) as i32);
            return Ok(proto::ReadRowsAnswer { refused, ..proto::ReadRowsAnswer::default() });
        }
    };
    let mut pieces = Vec::with_capacity(chunks.len());
    for chunk in &chunks {
        pieces.extend(rows::pieces(chunk)?);
    }
    Ok(proto::ReadRowsAnswer { rows: pieces, positions, refused: None })
}

fn answer_from_proto(answer: proto::ReadRowsAnswer) -> Result<ReadAnswer, CallError> {
    let proto::ReadRowsAnswer { rows: pieces, positions, refused } = answer;
    if let Some(why) = refused {
        return Ok(ReadAnswer::Refused(refusal_from_proto(why)?));
    }
    let chunks = pieces.iter().map(rows::decode).collect::<Result<_, CallError>>()?;
    Ok(ReadAnswer::Rows(FoundRows { positions, chunks }))
}

fn refusal_to_proto(why: ReadRefusal) -> proto::ReadRefusal {
    match why {
        ReadRefusal::NotOpen => proto::ReadRefusal::NotOpen,
        ReadRefusal::NotYet => proto::ReadRefusal::NotYet,
        ReadRefusal::TooOld => proto::ReadRefusal::TooOld,
        ReadRefusal::TooLarge => proto::ReadRefusal::TooLarge,
        ReadRefusal::Busy => proto::ReadRefusal::Busy,
    }
}

fn refusal_from_proto(why: i32) -> Result<ReadRefusal, CallError> {
    match proto::ReadRefusal::try_from(why) {
        Ok(proto::ReadRefusal::NotOpen) => Ok(ReadRefusal::NotOpen),
        Ok(proto::ReadRefusal::NotYet) => Ok(ReadRefusal::NotYet),
        Ok(proto::ReadRefusal::TooOld) => Ok(ReadRefusal::TooOld),
        Ok(proto::ReadRefusal::TooLarge) => Ok(ReadRefusal::TooLarge),
        Ok(proto::ReadRefusal::Busy) => Ok(ReadRefusal::Busy),
        Ok(proto::ReadRefusal::Unspecified) | Err(_) => Err(CallError::missing("refused")),
    }
}
