//! The side of the frontends.

use async_trait::async_trait;
use futures::channel::mpsc;
use futures::{SinkExt, stream};
use millrace_common::{DeltaChunk, Epoch, RelationId};
use tonic::Streaming;

use super::super::peer::{Peer, Transport};
use super::convert::{answer_from_proto, kind_to_proto, load_kind_to_proto, read_to_proto};
use crate::call_error::CallError;
use crate::dml::{
    DmlAnswer, DmlKind, DmlService, EntryFlag, HeldLocks, LoadKind, LoadService, ReadSet,
    TableChange,
};
use crate::proto::dml_client::DmlClient;
use crate::proto::{self, Empty, load_event, load_part, lock_event};
use crate::rows::{self, MAX_MESSAGE_BYTES};
use crate::version::StatementId;

/// Parts of a load that are on their way without an answer.
const PARTS_UNDER_WAY: usize = 4;

/// The compute process that tables run on.
#[derive(Clone)]
pub struct RemoteDml {
    peer: Peer,
}

fn client(transport: Transport) -> DmlClient<Transport> {
    DmlClient::new(transport)
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES)
}

impl RemoteDml {
    pub fn new(peer: Peer) -> RemoteDml {
        RemoteDml { peer }
    }

    /// Waits for a statement's outcome.
    async fn outcome(
        &self,
        mut events: Streaming<proto::DmlEvent>,
        entered: &EntryFlag,
    ) -> Result<DmlAnswer, CallError> {
        loop {
            let event = events.message().await.map_err(|status| self.peer.failed(&status))?;
            match answer_from_proto(event.ok_or_else(|| self.cut_short())?)? {
                Some(answer) => return Ok(answer),
                None => entered.set(),
            }
        }
    }

    /// The answer has ended before the outcome.
    fn cut_short(&self) -> CallError {
        cut_short(&self.peer)
    }
}

fn cut_short(peer: &Peer) -> CallError {
    let peer = peer.address().to_string();
    CallError::Unreachable { peer, cause: "the answer has ended early".into() }
}

#[async_trait]
impl DmlService for RemoteDml {
    async fn apply_dml(
        &self,
        table: RelationId,
        id: StatementId,
        delta: DeltaChunk,
        kind: DmlKind,
        entered: &EntryFlag,
    ) -> Result<DmlAnswer, CallError> {
        let (table, kind) = (table.0, kind_to_proto(kind));
        let mut statement = Some(proto::DmlStatement { table, id: Some(id), kind });
        let pieces = rows::pieces(&delta)?.into_iter();
        let parts = pieces
            .map(move |rows| proto::DmlPart { statement: statement.take(), rows: Some(rows) });
        let send = |t, r| async move { client(t).apply_dml(r).await };
        let events = self.peer.wait(stream::iter(parts), send).await?;
        self.outcome(events, entered).await
    }

    async fn apply_transaction(
        &self,
        id: StatementId,
        changes: Vec<TableChange>,
        read: ReadSet,
        entered: &EntryFlag,
    ) -> Result<DmlAnswer, CallError> {
        let begin = proto::TransactionBegin { id: Some(id), read: Some(read_to_proto(read)) };
        let mut parts = vec![proto::TransactionPart { begin: Some(begin), change: None }];
        for (at, change) in changes.into_iter().enumerate() {
            for rows in rows::pieces(&change.delta)? {
                let change = proto::TableChange {
                    change: at as u32,
                    table: change.table.0,
                    kind: kind_to_proto(change.kind),
                    rows: Some(rows),
                };
                parts.push(proto::TransactionPart { begin: None, change: Some(change) });
            }
        }
        let send = |t, r| async move { client(t).apply_transaction(r).await };
        let events = self.peer.wait(stream::iter(parts), send).await?;
        self.outcome(events, entered).await
    }

    async fn begin_load(
        &self,
        table: RelationId,
        id: StatementId,
        kind: LoadKind,
    ) -> Result<Box<dyn LoadService>, CallError> {
        let (mut parts, receiver) = mpsc::channel(PARTS_UNDER_WAY);
        let kind = Some(load_kind_to_proto(kind));
        let begin = proto::LoadBegin { table: table.0, id: Some(id), kind };
        let begin = load_part::Part::Begin(begin);
        // There is room: nothing has been sent.
        let _ = parts.try_send(proto::LoadPart { part: Some(begin) });
        let send = |t, r| async move { client(t).load(r).await };
        let events = self.peer.wait_once(receiver, send).await?;
        let mut load = RemoteLoad { peer: self.peer.clone(), parts, events };
        match load.next().await? {
            load_event::Event::Begun(_) => Ok(Box::new(load)),
            _ => Err(CallError::missing("begun")),
        }
    }

    async fn lock_tables(&self, tables: &[RelationId]) -> Result<Option<HeldLocks>, CallError> {
        let request = proto::LockTablesRequest { tables: tables.iter().map(|t| t.0).collect() };
        let send = |t, r| async move { client(t).lock_tables(r).await };
        let mut events = self.peer.wait(request, send).await?;
        let event = events.message().await.map_err(|status| self.peer.failed(&status))?;
        match event.ok_or_else(|| self.cut_short())?.event {
            Some(lock_event::Event::Locked(id)) => {
                // Dropping the answer tells the other side.
                Ok(Some(HeldLocks { id, guard: Box::new(events) }))
            }
            Some(lock_event::Event::Conflict(_)) => Ok(None),
            None => Err(CallError::missing("event")),
        }
    }

    async fn allocate_row_ids(&self, table: RelationId, n: u64) -> Result<u64, CallError> {
        let request = proto::AllocateRowIdsRequest { table: table.0, count: n };
        let send = |t, r| async move { client(t).allocate_row_ids(r).await };
        Ok(self.peer.wait(request, send).await?.first)
    }

    async fn abandon(&self, tables: &[RelationId], id: StatementId) -> Result<bool, CallError> {
        let tables = tables.iter().map(|t| t.0).collect();
        let request = proto::AbandonRequest { id: Some(id), tables };
        let send = |t, r| async move { client(t).abandon(r).await };
        Ok(self.peer.wait(request, send).await?.is_over)
    }
}

/// A load on the side of the frontend.
struct RemoteLoad {
    peer: Peer,
    parts: mpsc::Sender<proto::LoadPart>,
    events: Streaming<proto::LoadEvent>,
}

impl RemoteLoad {
    async fn send(&mut self, part: load_part::Part) -> Result<(), CallError> {
        let sent = self.parts.send(proto::LoadPart { part: Some(part) }).await;
        match sent {
            Ok(()) => Ok(()),
            // The other side has ended the load: its answer says why.
            Err(_) => Err(self.next().await.err().unwrap_or_else(|| cut_short(&self.peer))),
        }
    }

    async fn next(&mut self) -> Result<load_event::Event, CallError> {
        let event = self.events.message().await.map_err(|status| self.peer.failed(&status))?;
        let event = event.ok_or_else(|| cut_short(&self.peer))?;
        event.event.ok_or_else(|| CallError::missing("event"))
    }
}

#[async_trait]
impl LoadService for RemoteLoad {
    async fn append(&mut self, rows: DeltaChunk) -> Result<bool, CallError> {
        let mut spilled = false;
        for piece in rows::pieces(&rows)? {
            self.send(load_part::Part::Rows(piece)).await?;
            match self.next().await? {
                load_event::Event::Appended(appended) => spilled = appended.spilled,
                _ => return Err(CallError::missing("appended")),
            }
        }
        Ok(spilled)
    }

    async fn read_at(&mut self, epoch: Epoch) -> Result<(), CallError> {
        self.send(load_part::Part::ReadAt(epoch.0)).await
    }

    async fn rest_on(&mut self, read: ReadSet) -> Result<(), CallError> {
        self.send(load_part::Part::RestOn(read_to_proto(read))).await
    }

    async fn finish(mut self: Box<Self>, entered: &EntryFlag) -> Result<DmlAnswer, CallError> {
        self.send(load_part::Part::Finish(Empty {})).await?;
        loop {
            let load_event::Event::Statement(event) = self.next().await? else {
                return Err(CallError::missing("statement"));
            };
            match answer_from_proto(event)? {
                Some(answer) => return Ok(answer),
                None => entered.set(),
            }
        }
    }
}
