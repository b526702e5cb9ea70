//! Statements to the processes that tables run on.
//!
//! A process that refuses a call has done nothing: the log is followed further, which says where the table is now. What
//! changes nothing is asked again as well when there is no answer. A statement is not: whether it was committed the log
//! tells by its id ([`outcomes`]). One that was not is sent again, or is one on a table that is not there: the session
//! plans it again.

mod outcomes;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use millrace_common::{DeltaChunk, Epoch, RelationId, SqlError, SqlState};
use millrace_executor::dml::{DmlError, DmlKind, DmlOutcome, EntryFlag, LoadKind, Read, ReadRows};
use millrace_meta::LogFollower;
use millrace_meta::cluster::COMPUTE_WAIT;
use millrace_meta::state::MetaState;
use millrace_rpc::call_error::CallError;
pub use millrace_rpc::dml::HeldLocks;
use millrace_rpc::dml::{self, DmlAnswer, DmlService, LoadService, TableChange};
use millrace_rpc::read::ReadService;
use millrace_rpc::version::StatementId;
use parking_lot::Mutex;
use tokio::time::{Instant, timeout_at};

use self::outcomes::{Outcome, Outcomes};
use super::RemoteCluster;
use crate::cluster::{DmlResult, Locks, ReadSet};

/// Between two attempts.
const PAUSE: Duration = Duration::from_millis(50);
/// A statement that is sent again has another id, because its process refuses that of the call before: the number is so
/// much higher. Statements of a frontend are numbered from 1 on.
const NEXT_ATTEMPT: u64 = 1 << 48;

/// The process that a table, or the job of another relation, runs on.
#[derive(Clone)]
pub struct TableProcess {
    pub incarnation: u64,
    pub dml: Arc<dyn DmlService>,
    pub reads: Arc<dyn ReadService>,
}

/// Where tables, and other relations with jobs, are.
pub trait TableRoutes: Send + Sync {
    /// The process that a table runs on, as far as is known here. An error while it runs nowhere. Does not wait.
    fn process_of(&self, table: RelationId) -> Result<TableProcess, SqlError>;
}

impl RemoteCluster {
    /// The process of a table, once there is one. An error 42P01 if the log says that the table is gone.
    async fn route(&self, table: RelationId, deadline: Instant) -> Result<TableProcess, SqlError> {
        loop {
            let known = self.log.number();
            if self.log.read(|state| is_dropped(state, table)) {
                return Err(dropped());
            }
            let error = match self.routes.process_of(table) {
                Ok(process) => return Ok(process),
                Err(error) => error,
            };
            if timeout_at(deadline, self.log.changed_since(known)).await.is_err() {
                return Err(error);
            }
        }
    }

    /// After a call that had no effect: looks where the table is now, or fails when that has taken too long.
    async fn look_again(&self, error: CallError, deadline: Instant) -> Result<(), SqlError> {
        if self.env.now() + PAUSE >= deadline {
            return Err(error.into());
        }
        tokio::time::sleep(PAUSE).await;
        // Where the store does not answer, the stream may tell all the same.
        let _ = timeout_at(deadline, self.log.catch_up()).await;
        Ok(())
    }

    /// What the process of a table answers to something that may be asked again, or for nothing; an error 42P01 once the
    /// log says that the table is gone, which the process would wait for.
    async fn unless_dropped<T>(
        &self,
        table: RelationId,
        call: impl Future<Output = Result<T, CallError>>,
    ) -> Result<Result<T, CallError>, SqlError> {
        tokio::select! {
            biased;
            answer = call => Ok(answer),
            () = said(&self.log, |state| is_dropped(state, table)) => Err(dropped()),
        }
    }

    /// After a process has answered with an error: one 42P01 in its place if it has no such table because that is gone.
    async fn check_there(
        &self,
        table: RelationId,
        error: &CallError,
        deadline: Instant,
    ) -> Result<(), SqlError> {
        if !matches!(error, CallError::Sql(e) if e.state == SqlState::CANNOT_CONNECT_NOW) {
            return Ok(());
        }
        // Where the store does not answer, the stream may tell all the same.
        let _ = timeout_at(deadline, self.log.catch_up()).await;
        match self.log.read(|state| is_dropped(state, table)) {
            true => Err(dropped()),
            false => Ok(()),
        }
    }

    /// Asks the process of a table something that may be asked again.
    pub(super) async fn at_table<T, F>(
        &self,
        table: RelationId,
        call: impl Fn(Arc<dyn DmlService>) -> F + Send,
    ) -> Result<T, SqlError>
    where
        F: Future<Output = Result<T, CallError>> + Send,
        T: Send,
    {
        let deadline = self.env.now() + COMPUTE_WAIT;
        loop {
            let process = self.route(table, deadline).await?;
            match self.unless_dropped(table, call(process.dml)).await? {
                Ok(answer) => return Ok(answer),
                Err(error) if is_refused(&error) || error.is_retryable() => {
                    self.look_again(error, deadline).await?;
                }
                Err(error) => {
                    self.check_there(table, &error, deadline).await?;
                    return Err(error.into());
                }
            }
        }
    }

    /// Sends a statement to the process of a table. What came of it.
    async fn send<F>(
        &self,
        Sent { table, written, mut id, rows }: Sent,
        entered: &EntryFlag,
        call: impl Fn(Arc<dyn DmlService>, StatementId) -> F + Send,
    ) -> Result<DmlAnswer, SqlError>
    where
        F: Future<Output = Result<DmlAnswer, CallError>> + Send,
    {
        let mut deadline = self.env.now() + COMPUTE_WAIT;
        loop {
            let process = self.route(table, deadline).await?;
            let outcomes = self.outcomes(&process, table, &written);
            let sent = answered(entered, call(process.dml, id));
            let answer = tokio::select! {
                biased;
                answer = sent => answer,
                () = said(&outcomes.log, |state| outcomes.is_over(state)) => Err(outcomes.lost()),
            };
            let error = match answer {
                Ok(answer) => return Ok(answer),
                Err(error) => error,
            };
            if is_refused(&error) {
                self.look_again(error, deadline).await?;
                continue;
            }
            self.check_there(table, &error, deadline).await?;
            match outcomes.find(error, id, rows, entered).await? {
                Outcome::Answered(answer) => return Ok(answer),
                // There is nobody who could commit it: it begins anew.
                Outcome::NotCommitted => deadline = self.env.now() + COMPUTE_WAIT,
            }
            id.number = id.number.wrapping_add(NEXT_ATTEMPT);
        }
    }

    /// Of statements that are sent to this process from now on, by a table, and write to these.
    fn outcomes(
        &self,
        process: &TableProcess,
        table: RelationId,
        written: &[RelationId],
    ) -> Outcomes {
        let (log, meta) = (Arc::clone(&self.log), Arc::clone(&self.meta));
        Outcomes {
            since: log.head(),
            log,
            meta,
            env: self.env.clone(),
            table,
            incarnation: process.incarnation,
            process: Arc::clone(&process.dml),
            written: written.to_vec(),
        }
    }

    pub(super) async fn send_dml(
        &self,
        table: RelationId,
        id: StatementId,
        delta: DeltaChunk,
        kind: DmlKind,
        entered: &EntryFlag,
    ) -> Result<DmlResult, SqlError> {
        let sent = Sent { table, written: vec![table], id, rows: rows_of(&delta) };
        let call = |process: Arc<dyn DmlService>, id: StatementId| {
            let delta = delta.clone();
            async move { process.apply_dml(table, id, delta, kind, entered).await }
        };
        Ok(result_of(self.send(sent, entered, call).await?))
    }

    pub(super) async fn send_transaction(
        &self,
        id: StatementId,
        changes: Vec<(RelationId, DeltaChunk, DmlKind)>,
        read: ReadSet,
        entered: &EntryFlag,
    ) -> Result<DmlResult, SqlError> {
        let Ok((read, _locks)) = read_to_send(read) else { return Ok(DmlResult::Conflict) };
        let written: Vec<RelationId> = changes.iter().map(|(table, ..)| *table).collect();
        let mut all = written.iter().copied().chain(read.reads.iter().map(|r| r.table));
        let Some(table) = all.next() else {
            return Err(SqlError::internal("a transaction of no table"));
        };
        let rows = changes.iter().map(|(_, delta, _)| rows_of(delta)).sum();
        let change = |(table, delta, kind)| TableChange { table, kind, delta };
        let changes: Vec<TableChange> = changes.into_iter().map(change).collect();
        let call = |process: Arc<dyn DmlService>, id: StatementId| {
            let (changes, read) = (changes.clone(), read.clone());
            async move { process.apply_transaction(id, changes, read, entered).await }
        };
        Ok(result_of(self.send(Sent { table, written, id, rows }, entered, call).await?))
    }

    pub(super) async fn send_load(
        &self,
        table: RelationId,
        id: StatementId,
        kind: LoadKind,
    ) -> Result<RemoteLoad, SqlError> {
        let deadline = self.env.now() + COMPUTE_WAIT;
        loop {
            let process = self.route(table, deadline).await?;
            let begun = process.dml.begin_load(table, id, kind);
            match self.unless_dropped(table, begun).await? {
                Ok(load) => {
                    let outcomes = self.outcomes(&process, table, &[table]);
                    return Ok(RemoteLoad::new(load, outcomes, id));
                }
                Err(error) if is_refused(&error) || error.is_retryable() => {
                    self.look_again(error, deadline).await?;
                }
                Err(error) => {
                    self.check_there(table, &error, deadline).await?;
                    return Err(error.into());
                }
            }
        }
    }

    pub(super) async fn send_locks(
        &self,
        tables: &[RelationId],
    ) -> Result<Option<HeldLocks>, SqlError> {
        let Some(first) = tables.first() else {
            return Err(SqlError::internal("locks of no table"));
        };
        let call = |process: Arc<dyn DmlService>| async move { process.lock_tables(tables).await };
        self.at_table(*first, call).await
    }
}

fn is_dropped(state: &MetaState, table: RelationId) -> bool {
    !state.relations.contains_key(&table)
}

/// The session looks whether the table's name stands for another one.
fn dropped() -> SqlError {
    let message = "the table has been dropped since the statement was planned";
    SqlError::new(SqlState::UNDEFINED_TABLE, message)
}

/// Completes when the log says so.
async fn said(log: &LogFollower, so: impl Fn(&MetaState) -> bool) {
    loop {
        let known = log.number();
        if log.read(&so) {
            return;
        }
        log.changed_since(known).await;
    }
}

/// A call that sends a statement.
struct SentCall<'a> {
    entered: &'a EntryFlag,
    is_answered: bool,
}

impl Drop for SentCall<'_> {
    fn drop(&mut self) {
        if !self.is_answered {
            self.entered.set();
        }
    }
}

/// Awaits a call that sends a statement. That its rows have entered is told by a message, which may be on its way, or lost,
/// when the call is dropped: whoever drops it counts it as entered.
async fn answered<T>(
    entered: &EntryFlag,
    call: impl Future<Output = Result<T, CallError>>,
) -> Result<T, CallError> {
    let mut sent = SentCall { entered, is_answered: false };
    let answer = call.await;
    sent.is_answered = true;
    answer
}

/// Whether the process has done nothing, because another one is meant.
fn is_refused(error: &CallError) -> bool {
    matches!(
        error,
        CallError::StaleIncarnation { .. }
            | CallError::StaleTerm { .. }
            | CallError::NotConnected { .. }
    )
}

/// About how many rows a statement changes, where nobody has counted them: of an update its old and new rows are one.
fn rows_of(delta: &DeltaChunk) -> u64 {
    let rows = delta.num_rows();
    let Some(weights) = &delta.weights else { return rows as u64 };
    let old = weights.values().iter().filter(|w| **w < 0).count();
    old.max(rows - old) as u64
}

fn result_of(answer: DmlAnswer) -> DmlResult {
    match answer {
        DmlAnswer::Applied { epoch, rows, late } => DmlResult::Applied { epoch, rows, late },
        DmlAnswer::Conflict => DmlResult::Conflict,
    }
}

/// What a statement has read, as it is sent, and the locks, which are held until it has ended. An error: the locks are of
/// tables in this process.
fn read_to_send(set: ReadSet) -> Result<(dml::ReadSet, Option<HeldLocks>), DmlError> {
    let locks = match set.locks {
        None => None,
        Some(Locks::Elsewhere(locks)) => Some(locks),
        Some(Locks::Here(_)) => return Err(DmlError::Conflict),
    };
    let read = |read: Read| dml::TableRead {
        table: read.table,
        epoch: read.epoch,
        rows: match read.rows {
            ReadRows::Keys(keys) => {
                let mut keys: Vec<Bytes> = keys.iter().map(|k| Bytes::from(k.clone())).collect();
                keys.sort_unstable();
                dml::ReadRows::Keys(keys)
            }
            // A compiled filter cannot be sent: any row that changes may be one that it lets through.
            ReadRows::All | ReadRows::Where(_) => dml::ReadRows::All,
        },
    };
    let reads = set.reads.into_iter().map(read).collect();
    Ok((dml::ReadSet { reads, locks: locks.as_ref().map(|l| l.id) }, locks))
}

/// A statement that is sent.
struct Sent {
    /// It goes to the process of this one.
    table: RelationId,
    written: Vec<RelationId>,
    id: StatementId,
    /// About how many it changes.
    rows: u64,
}

/// A load into a table of another process. Dropped, it has no effect.
pub struct RemoteLoad {
    /// The lock only makes it shareable; it is never waited for.
    open: Mutex<OpenLoad>,
    outcomes: Outcomes,
    id: StatementId,
    /// Rows that were sent.
    rows: u64,
    has_spilled: bool,
}

struct OpenLoad {
    load: Box<dyn LoadService>,
    /// What is to be told before the next rows.
    read_at: Option<Epoch>,
    rests_on: Option<dml::ReadSet>,
    /// Held until it has ended.
    locks: Option<HeldLocks>,
}

impl RemoteLoad {
    fn new(load: Box<dyn LoadService>, outcomes: Outcomes, id: StatementId) -> RemoteLoad {
        let open = OpenLoad { load, read_at: None, rests_on: None, locks: None };
        RemoteLoad { open: Mutex::new(open), outcomes, id, rows: 0, has_spilled: false }
    }

    pub(crate) fn read_at(&mut self, epoch: Epoch) {
        self.open.get_mut().read_at = Some(epoch);
    }

    pub(crate) fn rest_on(&mut self, read: ReadSet) -> Result<(), DmlError> {
        let (read, locks) = read_to_send(read)?;
        let open = self.open.get_mut();
        (open.rests_on, open.locks) = (Some(read), locks);
        Ok(())
    }

    pub(crate) fn has_spilled(&self) -> bool {
        self.has_spilled
    }

    pub(crate) async fn append(&mut self, rows: DeltaChunk) -> Result<(), DmlError> {
        if rows.is_empty() {
            return Ok(());
        }
        self.rows += rows_of(&rows);
        let open = self.open.get_mut();
        open.tell().await?;
        // Without an answer the load is gone, and with it all that was sent.
        self.has_spilled = open.load.append(rows).await.map_err(SqlError::from)?;
        Ok(())
    }

    pub(crate) async fn finish(self, entered: &EntryFlag) -> Result<DmlOutcome, DmlError> {
        let RemoteLoad { open, outcomes, id, rows, .. } = self;
        let mut open = open.into_inner();
        open.tell().await?;
        let OpenLoad { load, locks, .. } = open;
        let answer = match answered(entered, load.finish(entered)).await {
            Ok(answer) => answer,
            Err(error) => match outcomes.find(error, id, rows, entered).await? {
                Outcome::Answered(answer) => answer,
                // Its rows are gone with the process, or the call.
                Outcome::NotCommitted => DmlAnswer::Conflict,
            },
        };
        drop(locks);
        match answer {
            DmlAnswer::Applied { epoch, rows, late } => {
                Ok(DmlOutcome { epoch, rows_affected: rows, kept: None, late })
            }
            DmlAnswer::Conflict => Err(DmlError::Conflict),
        }
    }
}

impl OpenLoad {
    async fn tell(&mut self) -> Result<(), DmlError> {
        if let Some(epoch) = self.read_at.take() {
            self.load.read_at(epoch).await.map_err(SqlError::from)?;
        }
        if let Some(read) = self.rests_on.take() {
            self.load.rest_on(read).await.map_err(SqlError::from)?;
        }
        Ok(())
    }
}
