//! The side of the tables.

use std::sync::Arc;

use async_trait::async_trait;
use futures::future::BoxFuture;
use futures::stream::{self, BoxStream, StreamExt};
use millrace_common::{DeltaChunk, Epoch, RelationId};
use tonic::{Request, Response, Status, Streaming};

use super::super::admission::Admission;
use super::super::convert::required;
use super::convert::{answer_to_proto, kind_from_proto, load_kind_from_proto, read_from_proto};
use crate::call_error::CallError;
use crate::dml::{DmlAnswer, DmlKind, DmlService, EntryFlag, LoadService, TableChange};
use crate::proto::dml_server::{Dml, DmlServer};
use crate::proto::{self, Empty, dml_event, load_event, load_part, lock_event};
use crate::rows::{self, MAX_MESSAGE_BYTES};

pub(in crate::remote) fn server(
    inner: Arc<dyn DmlService>,
    admission: &Arc<Admission>,
) -> DmlServer<Served> {
    DmlServer::new(Served { inner, admission: Arc::clone(admission) })
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES)
}

pub(in crate::remote) struct Served {
    inner: Arc<dyn DmlService>,
    admission: Arc<Admission>,
}

/// Bytes of rows that a statement may bring at once, in all its messages: larger ones come as loads, whose memory is
/// bounded.
const MAX_STATEMENT_BYTES: usize = 1 << 30;

type Outcome = Result<DmlAnswer, CallError>;
type Events<T> = BoxStream<'static, Result<T, Status>>;

#[async_trait]
impl Dml for Served {
    type ApplyDmlStream = Events<proto::DmlEvent>;
    type ApplyTransactionStream = Events<proto::DmlEvent>;
    type LoadStream = Events<proto::LoadEvent>;
    type LockTablesStream = Events<proto::LockEvent>;

    async fn apply_dml(
        &self,
        request: Request<Streaming<proto::DmlPart>>,
    ) -> Result<Response<Self::ApplyDmlStream>, Status> {
        self.admission.admit(&request)?;
        let (statement, delta) = receive_statement(request.into_inner()).await?;
        let proto::DmlStatement { table, id, kind } = statement;
        let id = required(id, "id").map_err(CallError::into_status)?;
        let kind = kind_from_proto(kind).map_err(CallError::into_status)?;
        let (inner, entered) = (Arc::clone(&self.inner), EntryFlag::default());
        let flag = entered.clone();
        let work = async move { inner.apply_dml(RelationId(table), id, delta, kind, &flag).await };
        Ok(Response::new(events(entered, Box::pin(work))))
    }

    async fn apply_transaction(
        &self,
        request: Request<Streaming<proto::TransactionPart>>,
    ) -> Result<Response<Self::ApplyTransactionStream>, Status> {
        self.admission.admit(&request)?;
        let (begin, changes) = receive_transaction(request.into_inner()).await?;
        let id = required(begin.id, "id").map_err(CallError::into_status)?;
        let read = begin.read.unwrap_or_default();
        let read = read_from_proto(read).map_err(CallError::into_status)?;
        let (inner, entered) = (Arc::clone(&self.inner), EntryFlag::default());
        let flag = entered.clone();
        let work = async move { inner.apply_transaction(id, changes, read, &flag).await };
        Ok(Response::new(events(entered, Box::pin(work))))
    }

    async fn load(
        &self,
        request: Request<Streaming<proto::LoadPart>>,
    ) -> Result<Response<Self::LoadStream>, Status> {
        self.admission.admit(&request)?;
        let mut parts = Box::new(request.into_inner());
        let first = parts.message().await?.and_then(|p| p.part);
        let Some(load_part::Part::Begin(begin)) = first else {
            return Err(CallError::missing("begin").into_status());
        };
        let id = required(begin.id, "id").map_err(CallError::into_status)?;
        let kind = load_kind_from_proto(begin.kind).map_err(CallError::into_status)?;
        let load = self.inner.begin_load(RelationId(begin.table), id, kind).await;
        let load = load.map_err(CallError::into_status)?;
        let begun = load_event(load_event::Event::Begun(Empty {}));
        let rest = stream::unfold(Loading::Open { load, parts }, next_of_load);
        Ok(Response::new(stream::iter([Ok(begun)]).chain(rest).boxed()))
    }

    async fn lock_tables(
        &self,
        request: Request<proto::LockTablesRequest>,
    ) -> Result<Response<Self::LockTablesStream>, Status> {
        self.admission.admit(&request)?;
        let tables: Vec<_> = request.into_inner().tables.into_iter().map(RelationId).collect();
        let locks = self.inner.lock_tables(&tables).await.map_err(CallError::into_status)?;
        let event = |event| Ok(proto::LockEvent { event: Some(event) });
        let Some(locks) = locks else {
            let conflict = event(lock_event::Event::Conflict(Empty {}));
            return Ok(Response::new(stream::iter([conflict]).boxed()));
        };
        let locked = event(lock_event::Event::Locked(locks.id));
        // They are held until the stream is dropped: by whoever called, or because its connection is gone.
        let held = stream::unfold(locks, |locks| async move {
            std::future::pending::<()>().await;
            drop(locks);
            None
        });
        let stopping = self.admission.stopping();
        let events = stream::iter([locked]).chain(held);
        Ok(Response::new(events.take_until(stopping.cancelled_owned()).boxed()))
    }

    async fn allocate_row_ids(
        &self,
        request: Request<proto::AllocateRowIdsRequest>,
    ) -> Result<Response<proto::AllocateRowIdsAnswer>, Status> {
        self.admission.admit(&request)?;
        let proto::AllocateRowIdsRequest { table, count } = request.into_inner();
        let first = self.inner.allocate_row_ids(RelationId(table), count).await;
        let first = first.map_err(CallError::into_status)?;
        Ok(Response::new(proto::AllocateRowIdsAnswer { first }))
    }

    async fn abandon(
        &self,
        request: Request<proto::AbandonRequest>,
    ) -> Result<Response<proto::AbandonAnswer>, Status> {
        self.admission.admit(&request)?;
        let proto::AbandonRequest { id, tables } = request.into_inner();
        let id = required(id, "id").map_err(CallError::into_status)?;
        let tables: Vec<_> = tables.into_iter().map(RelationId).collect();
        let is_over = self.inner.abandon(&tables, id).await.map_err(CallError::into_status)?;
        Ok(Response::new(proto::AbandonAnswer { is_over }))
    }
}

async fn receive_statement(
    mut parts: Streaming<proto::DmlPart>,
) -> Result<(proto::DmlStatement, DeltaChunk), Status> {
    let mut statement = None;
    let mut chunks = Vec::new();
    let mut bytes = 0;
    while let Some(part) = parts.message().await? {
        statement = statement.or(part.statement);
        let rows = required(part.rows, "rows").and_then(|rows| take_rows(&rows, &mut bytes));
        chunks.push(rows.map_err(CallError::into_status)?);
    }
    let statement = required(statement, "statement").map_err(CallError::into_status)?;
    Ok((statement, rows::join(chunks).map_err(CallError::into_status)?))
}

/// The rows of one message; `bytes` counts those of the statement.
fn take_rows(rows: &proto::Rows, bytes: &mut usize) -> Result<DeltaChunk, CallError> {
    *bytes += rows.batch.len();
    if *bytes > MAX_STATEMENT_BYTES {
        let limit = MAX_STATEMENT_BYTES >> 20;
        return Err(CallError::TooLarge(format!("the rows of a statement exceed {limit} MB")));
    }
    rows::decode(rows)
}

async fn receive_transaction(
    mut parts: Streaming<proto::TransactionPart>,
) -> Result<(proto::TransactionBegin, Vec<TableChange>), Status> {
    let mut begin = None;
    let mut pieces = Vec::new();
    let mut bytes = 0;
    while let Some(part) = parts.message().await? {
        begin = begin.or(part.begin);
        if let Some(change) = part.change {
            add_change(change, &mut pieces, &mut bytes).map_err(CallError::into_status)?;
        }
    }
    let join = |(table, kind, chunks)| Ok(TableChange { table, kind, delta: rows::join(chunks)? });
    let changes = pieces.into_iter().map(join).collect::<Result<_, CallError>>();
    let begin = required(begin, "begin").map_err(CallError::into_status)?;
    Ok((begin, changes.map_err(CallError::into_status)?))
}

fn add_change(
    change: proto::TableChange,
    to: &mut Vec<(RelationId, DmlKind, Vec<DeltaChunk>)>,
    bytes: &mut usize,
) -> Result<(), CallError> {
    let rows = take_rows(&required(change.rows, "rows")?, bytes)?;
    let (at, table) = (change.change as usize, RelationId(change.table));
    if at == to.len() {
        to.push((table, kind_from_proto(change.kind)?, vec![rows]));
        return Ok(());
    }
    let is_last = at + 1 == to.len();
    match to.last_mut() {
        Some((of, _, chunks)) if is_last && *of == table => chunks.push(rows),
        _ => return Err(CallError::Malformed("changes of a transaction are out of order".into())),
    }
    Ok(())
}

/// What becomes of a statement: that its rows have entered, and its outcome. The work goes on as far as the stream is
/// read, and ends with it.
fn events(entered: EntryFlag, work: BoxFuture<'static, Outcome>) -> Events<proto::DmlEvent> {
    enum Waiting {
        Entry(BoxFuture<'static, Outcome>, EntryFlag),
        Outcome(BoxFuture<'static, Outcome>),
        Ended,
    }
    async fn next(waiting: Waiting) -> Option<(Result<proto::DmlEvent, Status>, Waiting)> {
        let (mut work, entered) = match waiting {
            Waiting::Entry(work, entered) => (work, entered),
            Waiting::Outcome(work) => return Some((told(work.await), Waiting::Ended)),
            Waiting::Ended => return None,
        };
        let outcome = tokio::select! {
            biased;
            () = entered.wait() => None,
            outcome = &mut work => Some(outcome),
        };
        let event = Ok(proto::DmlEvent { event: Some(dml_event::Event::Entered(Empty {})) });
        match outcome {
            None => Some((event, Waiting::Outcome(work))),
            // The rows have entered since they were looked at.
            Some(outcome) if entered.is_set() => {
                Some((event, Waiting::Outcome(Box::pin(std::future::ready(outcome)))))
            }
            Some(outcome) => Some((told(outcome), Waiting::Ended)),
        }
    }
    fn told(outcome: Outcome) -> Result<proto::DmlEvent, Status> {
        outcome.map(answer_to_proto).map_err(CallError::into_status)
    }
    stream::unfold(Waiting::Entry(work, entered), next).boxed()
}

/// A load on the side of its table.
enum Loading {
    Open { load: Box<dyn LoadService>, parts: Box<Streaming<proto::LoadPart>> },
    Finishing(Events<proto::DmlEvent>),
    Ended,
}

fn load_event(event: load_event::Event) -> proto::LoadEvent {
    proto::LoadEvent { event: Some(event) }
}

async fn next_of_load(state: Loading) -> Option<(Result<proto::LoadEvent, Status>, Loading)> {
    match state {
        Loading::Ended => None,
        Loading::Finishing(events) => next_outcome(events).await,
        Loading::Open { mut load, mut parts } => loop {
            let part = match parts.message().await {
                Ok(Some(part)) => part.part,
                // Given up.
                Ok(None) => return None,
                Err(status) => return Some((Err(status), Loading::Ended)),
            };
            if let Some(load_part::Part::Finish(_)) = part {
                let entered = EntryFlag::default();
                let flag = entered.clone();
                let work = async move { load.finish(&flag).await };
                return next_outcome(events(entered, Box::pin(work))).await;
            }
            match take_part(&mut load, part).await {
                Ok(None) => {}
                Ok(Some(event)) => {
                    return Some((Ok(load_event(event)), Loading::Open { load, parts }));
                }
                Err(e) => return Some((Err(e.into_status()), Loading::Ended)),
            }
        },
    }
}

async fn next_outcome(
    mut events: Events<proto::DmlEvent>,
) -> Option<(Result<proto::LoadEvent, Status>, Loading)> {
    let event = events.next().await?.map(|e| load_event(load_event::Event::Statement(e)));
    Some((event, Loading::Finishing(events)))
}

async fn take_part(
    load: &mut Box<dyn LoadService>,
    part: Option<load_part::Part>,
) -> Result<Option<load_event::Event>, CallError> {
    match required(part, "part")? {
        load_part::Part::Rows(rows) => {
            let spilled = load.append(rows::decode(&rows)?).await?;
            Ok(Some(load_event::Event::Appended(proto::LoadAppended { spilled })))
        }
        load_part::Part::ReadAt(epoch) => load.read_at(Epoch(epoch)).await.map(|()| None),
        load_part::Part::RestOn(read) => load.rest_on(read_from_proto(read)?).await.map(|()| None),
        load_part::Part::Begin(_) | load_part::Part::Finish(_) => {
            Err(CallError::Malformed("a load that begins twice".into()))
        }
    }
}
