//! The sequencer of one table: statements enter one after the other, are checked against everything
//! before them, and are acknowledged when their epoch is committed (docs/design.md §4).
//!
//! It owns the only writer of the table's rows. A lookup through that writer sees committed rows, the
//! epochs being committed and the open one, so a check needs no overlay of its own. One statement at
//! a time holds the turn, from its lookup until its rows are in the open epoch; that last step is
//! synchronous, so a statement whose session goes away is in wholly or not at all. While an epoch is
//! being committed further statements go into the next.
//!
//! A failed check answers only when what it was checked against is committed: nobody is told of a row
//! that later turns out never to have been.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Weak};

use arrow::array::{Array, UInt32Array};
use arrow::datatypes::SchemaRef;
use millrace_common::{Epoch, Generation, JobId, SqlError, SqlState, TableId, crash};
use millrace_rpc::catalog::{Relation, RowStorage};
use millrace_rpc::services::MetaService;
use millrace_rpc::version::{CommitGroup, GroupMember, JobVersion, StatementId};
use millrace_storage::{Found, JobStore, MemRun, TableWriter};
use parking_lot::Mutex;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use super::check::{Keyed, Writes};
use super::{DmlError, DmlKind, DmlOutcome, DmlStatement, InsertConflict, unknown_outcome};
use crate::error::ExecError;
use crate::hub::HubChunk;
use crate::layout::RowLayout;
use crate::memory::{MemoryClass, MemoryGovernor, Reservation};

/// Name of the counter that holds the next hidden row id.
const ROW_ID_COUNTER: &str = "next_row_id";

/// What became of an epoch.
#[derive(Clone, Debug)]
pub(super) enum Fate {
    Committed(Epoch),
    /// Provably not in the log.
    NotCommitted,
    /// The same, for a reason that evaluating the statement again would meet again.
    Refused(SqlError),
    Unknown,
}

type Waiter = oneshot::Sender<Fate>;

/// What a statement did: rows affected, and which of its rows took effect.
type Entered = Result<(u64, Option<UInt32Array>), DmlError>;

/// The epoch at which everything so far is committed, or where to wait for it.
pub(super) type Settled = Result<Epoch, oneshot::Receiver<Fate>>;

/// Statements of one epoch.
#[derive(Default)]
struct Statements {
    ids: Vec<StatementId>,
    waiters: Vec<Waiter>,
    delta: Vec<HubChunk>,
    delta_bytes: usize,
    /// The change is too large for the ring: `delta` is empty.
    overflow: bool,
    row_count: i64,
    changed: bool,
    account: Option<Reservation>,
    /// Tables that hold other parts of transactions in this epoch: they end theirs together with it.
    ties: BTreeMap<JobId, Weak<Sequencer>>,
}

impl Statements {
    fn conclude(self, fate: Fate) {
        for waiter in self.waiters {
            // A session that went away does not wait.
            let _ = waiter.send(fate.clone());
        }
    }
}

pub(super) struct State {
    writer: TableWriter,
    open: Statements,
    /// Sealed epochs, oldest first, and whether the commit may have reached the log.
    in_flight: VecDeque<(Statements, bool)>,
    /// Those of them that another table's seal made, and no cut has taken yet.
    ahead: VecDeque<SealedEpoch>,
    committed: Epoch,
    stopped: bool,
}

/// A sealed epoch of a table, to be made durable.
#[derive(Debug)]
pub struct SealedEpoch {
    pub run: Option<MemRun>,
    pub statements: Vec<StatementId>,
    pub row_count: i64,
    pub changed: bool,
    pub counters: HashMap<String, u64>,
    /// The epochs of other tables that this one is committed with.
    pub group: Option<CommitGroup>,
}

/// What all sequencers of a worker share: held while an epoch ends and while a transaction enters its
/// tables, so that no epoch ends with a part of one.
#[derive(Debug, Default)]
pub struct Ties {
    groups: Mutex<u64>,
}

pub struct Sequencer {
    pub(super) job: JobId,
    generation: Generation,
    ties: Arc<Ties>,
    name: String,
    /// A key the user declared, not hidden row ids.
    primary_key: bool,
    layout: RowLayout,
    pub(super) meta: Arc<dyn MetaService>,
    governor: Arc<MemoryGovernor>,
    /// Bytes of statements an open epoch may hold before further ones wait.
    limit: usize,
    /// Bytes of change kept for the ring.
    delta_limit: usize,
    /// Held by one statement at a time; fair.
    pub(super) turn: Arc<tokio::sync::Mutex<()>>,
    pub(super) state: Mutex<State>,
    /// Fired by `stop`.
    ended: CancellationToken,
    next_row_id: AtomicI64,
}

/// Bounds of a sequencer.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub statement_bytes: usize,
    pub delta_bytes: usize,
}

impl Sequencer {
    pub fn new(
        relation: &Relation,
        store: &Arc<JobStore>,
        version: &JobVersion,
        meta: Arc<dyn MetaService>,
        governor: Arc<MemoryGovernor>,
        ties: Arc<Ties>,
        limits: Limits,
    ) -> Result<Sequencer, ExecError> {
        let layout = RowLayout::of_relation(relation)?;
        if layout.storage != RowStorage::Keyed {
            return Err(ExecError::internal("a table whose rows have no key"));
        }
        let writer = store.writer(TableId(relation.first_table_id))?;
        let next = version.counters.get(ROW_ID_COUNTER).copied().unwrap_or(1);
        Ok(Sequencer {
            job: millrace_common::RelationId(relation.id),
            generation: Generation(version.generation),
            ties,
            name: relation.name.clone(),
            primary_key: relation.primary_key,
            layout,
            meta,
            governor,
            limit: limits.statement_bytes,
            delta_limit: limits.delta_bytes,
            turn: Arc::default(),
            state: Mutex::new(State {
                writer,
                open: Statements::default(),
                in_flight: VecDeque::new(),
                ahead: VecDeque::new(),
                committed: Epoch(version.epoch),
                stopped: false,
            }),
            ended: CancellationToken::new(),
            next_row_id: AtomicI64::new(i64::try_from(next).unwrap_or(i64::MAX)),
        })
    }

    pub fn schema(&self) -> &SchemaRef {
        &self.layout.schema
    }

    /// `n` row ids that no committed row has. Ids of rows that are committed are below the counter
    /// that is committed with them.
    pub fn allocate_row_ids(&self, n: u64) -> i64 {
        self.next_row_id.fetch_add(n as i64, Ordering::Relaxed)
    }

    fn next_row_id(&self) -> u64 {
        u64::try_from(self.next_row_id.load(Ordering::Relaxed)).unwrap_or(0)
    }

    /// Checks a statement, adds it to the open epoch and waits until that is committed.
    pub async fn apply(&self, statement: DmlStatement) -> Result<DmlOutcome, DmlError> {
        let (entered, fate) = {
            let _turn = self.turn.lock().await;
            self.wait_for_room().await?;
            let checked = self.check_until_ended(&statement).await?;
            self.enter(statement.id, checked)?
        };
        let epoch = match fate {
            Ok(committed) => Fate::Committed(committed),
            Err(waiting) => {
                self.meta.request_cut(self.job);
                waiting.await.unwrap_or(Fate::Unknown)
            }
        };
        match (entered, epoch) {
            (Ok((rows_affected, kept)), Fate::Committed(epoch)) => {
                Ok(DmlOutcome { epoch, rows_affected, kept })
            }
            (Ok(_), Fate::Unknown) => Err(unknown_outcome().into()),
            (_, Fate::Refused(error)) => Err(error.into()),
            (_, Fate::NotCommitted) => Err(DmlError::Conflict),
            (Err(e), _) => Err(e),
        }
    }

    /// The outcome of a check. `Err`: the table has ended; that interrupts a lookup that hangs, and
    /// nothing has been written.
    pub(super) async fn check_until_ended(
        &self,
        statement: &DmlStatement,
    ) -> Result<Result<Writes, DmlError>, DmlError> {
        tokio::select! {
            biased;
            checked = self.check(statement) => Ok(checked),
            () = self.ended.cancelled() => Err(DmlError::Conflict),
        }
    }

    /// Looks the statement's keys up and checks it. Nothing has changed when it is dropped.
    async fn check(&self, statement: &DmlStatement) -> Result<Writes, DmlError> {
        let failed = |e: ExecError| DmlError::Sql(e.into_sql());
        let keyed = Keyed::new(&self.layout, statement.delta.clone()).map_err(failed)?;
        // A fresh row id cannot exist.
        let fresh = !self.primary_key
            && statement.kind == DmlKind::Insert { on_conflict: InsertConflict::Error };
        let found = if fresh {
            Found::empty(&self.layout.schema)
        } else {
            let keys = keyed.distinct().map_err(failed)?;
            let lookup = self.state.lock().writer.multi_get(keys);
            lookup.wait().await.map_err(|e| failed(e.into()))?
        };
        keyed.check(&self.layout, &self.name, statement.kind, &found)
    }

    /// Puts what passed into the open epoch. In any case says what to wait for: `Ok`: nothing.
    fn enter(
        &self,
        id: StatementId,
        checked: Result<Writes, DmlError>,
    ) -> Result<(Entered, Settled), DmlError> {
        let mut state = self.state.lock();
        if state.stopped {
            return Err(DmlError::Conflict);
        }
        let writes = match checked {
            Ok(writes) if writes.keys.is_empty() => {
                return Ok((Ok((writes.rows_affected, writes.kept)), state.settled()));
            }
            Ok(writes) => writes,
            Err(e) => return Ok((Err(e), state.settled())),
        };
        let entered = (writes.rows_affected, writes.kept.clone());
        let receiver = self.write_statement(&mut state, id, writes);
        Ok((Ok(entered), Err(receiver)))
    }

    pub(super) fn write_statement(
        &self,
        state: &mut State,
        id: StatementId,
        writes: Writes,
    ) -> oneshot::Receiver<Fate> {
        let (sender, receiver) = oneshot::channel();
        state.open.waiters.push(sender);
        state.open.ids.push(id);
        self.write(state, writes);
        receiver
    }

    fn write(&self, state: &mut State, writes: Writes) {
        state.writer.write(writes.keys, writes.weights, writes.rows);
        let open = &mut state.open;
        open.row_count += writes.row_count;
        if let Some(chunk) = HubChunk::new(writes.delta, writes.vnodes) {
            open.changed = true;
            open.delta_bytes += chunk.memory_size();
            open.overflow |= open.delta_bytes > self.delta_limit;
            open.delta.push(chunk);
        }
        if open.overflow {
            open.delta.clear();
        }
        let account =
            open.account.get_or_insert_with(|| self.governor.account(MemoryClass::Statement));
        account.set(open.delta_bytes);
    }

    /// Waits while the open epoch is full.
    pub(super) async fn wait_for_room(&self) -> Result<(), DmlError> {
        loop {
            let waiting = {
                let mut state = self.state.lock();
                if state.stopped {
                    return Err(DmlError::Conflict);
                }
                if state.open.delta_bytes <= self.limit {
                    return Ok(());
                }
                state.settled()
            };
            if let Err(waiting) = waiting {
                self.meta.request_cut(self.job);
                // However it ended, there is room now, or the table has stopped.
                let _ = waiting.await;
            }
        }
    }

    /// The next epoch to commit: the open one is ended, unless another table's seal has ended one
    /// already. It stays in flight until it is concluded.
    pub fn seal(&self) -> Result<SealedEpoch, ExecError> {
        let mut groups = self.ties.groups.lock();
        let mut state = self.state.lock();
        if let Some(sealed) = state.ahead.pop_front() {
            let more = !state.ahead.is_empty() || !state.open.ids.is_empty();
            drop(state);
            if more {
                // One request may have stood for both.
                self.meta.request_cut(self.job);
            }
            return Ok(sealed);
        }
        if state.open.ties.is_empty() {
            return self.seal_open(&mut state, None);
        }
        let mut others = std::mem::take(&mut state.open.ties);
        others.remove(&self.job);
        let own = state;
        let others = tied(self.job, others)?;
        *groups += 1;
        let member = |job: JobId, generation: Generation| GroupMember {
            job: job.0,
            generation: generation.0,
        };
        let mut members = vec![member(self.job, self.generation)];
        members.extend(others.iter().map(|o| member(o.job, o.generation)));
        let group = CommitGroup { id: *groups, members };
        let mut own = own;
        let sealed = self.seal_open(&mut own, Some(group.clone()))?;
        drop(own);
        for other in &others {
            let mut state = other.state.lock();
            if state.stopped {
                return Err(failed_member());
            }
            let part = other.seal_open(&mut state, Some(group.clone()))?;
            state.ahead.push_back(part);
            drop(state);
            other.meta.request_cut(other.job);
        }
        Ok(sealed)
    }

    fn seal_open(
        &self,
        state: &mut State,
        group: Option<CommitGroup>,
    ) -> Result<SealedEpoch, ExecError> {
        let run = state.writer.seal()?;
        let mut statements = std::mem::take(&mut state.open);
        statements.ties.clear();
        // Nothing in it: nothing to log.
        let counters = match statements.changed {
            true => HashMap::from([(ROW_ID_COUNTER.to_string(), self.next_row_id())]),
            false => HashMap::new(),
        };
        let sealed = SealedEpoch {
            run,
            statements: statements.ids.clone(),
            row_count: statements.row_count,
            changed: statements.changed,
            counters,
            group,
        };
        state.in_flight.push_back((statements, false));
        Ok(sealed)
    }

    /// Lets no epoch of this worker end; for a transaction that enters several tables.
    pub(super) fn hold_seals(&self) -> parking_lot::MutexGuard<'_, u64> {
        self.ties.groups.lock()
    }

    /// From now on the oldest sealed epoch that was not handed over may be in the log.
    pub fn handed_over(&self) {
        let mut state = self.state.lock();
        if let Some((_, handed_over)) = state.in_flight.iter_mut().find(|(_, over)| !over) {
            *handed_over = true;
        }
    }

    /// The oldest sealed epoch is committed, and published. `before_acknowledging` gets its change.
    pub fn committed(
        &self,
        epoch: Epoch,
        before_acknowledging: impl FnOnce(Option<Vec<HubChunk>>),
    ) {
        let mut state = self.state.lock();
        state.committed = state.committed.max(epoch);
        let Some((mut statements, _)) = state.in_flight.pop_front() else { return };
        drop(state);
        if statements.changed {
            let delta = std::mem::take(&mut statements.delta);
            before_acknowledging((!statements.overflow).then_some(delta));
        }
        crash::point("dml-before-acknowledge");
        statements.conclude(Fate::Committed(epoch));
    }

    /// The oldest sealed epoch is void in the log. Later ones are built on it.
    pub fn void(&self, reason: Option<&SqlError>) {
        let voided: Vec<_> = self.state.lock().in_flight.drain(..).collect();
        for (statements, _) in voided {
            statements.conclude(not_committed(reason));
        }
        self.stop(reason);
    }

    /// The table's job has ended, perhaps for a reason worth telling: nothing is accepted any more, and
    /// everyone waiting is told.
    pub fn stop(&self, reason: Option<&SqlError>) {
        let (open, in_flight) = {
            let mut state = self.state.lock();
            state.stopped = true;
            state.ahead.clear();
            (std::mem::take(&mut state.open), std::mem::take(&mut state.in_flight))
        };
        self.ended.cancel();
        for (statements, handed_over) in in_flight {
            statements.conclude(if handed_over { Fate::Unknown } else { not_committed(reason) });
        }
        open.conclude(not_committed(reason));
    }

    pub fn is_stopped(&self) -> bool {
        self.state.lock().stopped
    }
}

/// All tables that the ties lead to, whose epochs must end together; none of them has stopped.
fn tied(
    from: JobId,
    ties: BTreeMap<JobId, Weak<Sequencer>>,
) -> Result<Vec<Arc<Sequencer>>, ExecError> {
    let mut found: BTreeMap<JobId, Arc<Sequencer>> = BTreeMap::new();
    let mut todo: Vec<(JobId, Weak<Sequencer>)> = ties.into_iter().collect();
    while let Some((job, table)) = todo.pop() {
        if job == from || found.contains_key(&job) {
            continue;
        }
        let table = table.upgrade().ok_or_else(failed_member)?;
        {
            let state = table.state.lock();
            if state.stopped {
                return Err(failed_member());
            }
            todo.extend(state.open.ties.iter().map(|(job, table)| (*job, Weak::clone(table))));
        }
        found.insert(job, table);
    }
    Ok(found.into_values().collect())
}

/// A part of a transaction is lost, so the others must not be committed.
fn failed_member() -> ExecError {
    SqlError::new(
        SqlState::SERIALIZATION_FAILURE,
        "another table of the same transaction has failed",
    )
    .into()
}

impl State {
    pub(super) fn is_stopped(&self) -> bool {
        self.stopped
    }

    /// The open epoch ends together with these tables'.
    pub(super) fn tie(&mut self, tables: &[Arc<Sequencer>]) {
        self.open.ties.extend(tables.iter().map(|t| (t.job, Arc::downgrade(t))));
    }

    /// When everything written so far is committed: `Ok` if it is.
    pub(super) fn settled(&mut self) -> Settled {
        let statements = if !self.open.ids.is_empty() {
            &mut self.open
        } else if let Some((last, _)) = self.in_flight.back_mut() {
            last
        } else {
            return Ok(self.committed);
        };
        let (sender, receiver) = oneshot::channel();
        statements.waiters.push(sender);
        Err(receiver)
    }
}

/// What became of statements that a failed job leaves uncommitted: a store that has no space, refuses
/// or does not answer would do the same to the next attempt; anything else is worth one.
fn not_committed(reason: Option<&SqlError>) -> Fate {
    const TOLD: [SqlState; 3] =
        [SqlState::DISK_FULL, SqlState::IO_ERROR, SqlState::INSUFFICIENT_PRIVILEGE];
    match reason {
        Some(error) if TOLD.contains(&error.state) => Fate::Refused(error.clone()),
        _ => Fate::NotCommitted,
    }
}

impl Drop for Sequencer {
    fn drop(&mut self) {
        self.stop(None);
    }
}
