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

use arrow::array::{Array, BinaryArray, RecordBatch, UInt32Array};
use arrow::datatypes::SchemaRef;
use millrace_common::{DeltaChunk, Epoch, Generation, JobId, SqlError, SqlState, TableId, crash};
use millrace_rpc::catalog::{Relation, RowStorage};
use millrace_rpc::services::MetaService;
use millrace_rpc::version::{
    ColumnWatermark, CommitGroup, GroupMember, JobVersion, RunMeta, StatementId,
};
use millrace_storage::stage::{Repeated, Staging};
use millrace_storage::{Found, JobStore, MemRun, StorageError, TableWriter};
use parking_lot::Mutex;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use super::check::{Keyed, Writes};
use super::{
    DmlError, DmlKind, DmlOutcome, DmlStatement, InsertConflict, SinkMark, unknown_outcome,
};
use crate::error::ExecError;
use crate::hub::HubChunk;
use crate::input::watermark::{SplitWatermark, WatermarkExpr};
use crate::layout::RowLayout;
use crate::memory::{MemoryClass, MemoryGovernor, Reservation};

/// Name of the counter that holds the next hidden row id.
const ROW_ID_COUNTER: &str = "next_row_id";

/// Counters that say how far a sink's changes are in the table begin with this; the sink's id follows.
pub const SINK_COUNTER: &str = "sink.";

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
    load: Option<Vec<RunMeta>>,
    /// How far the table's connector is with these rows.
    fed: HashMap<String, u64>,
    /// Who feeds it waits for the end of these.
    concluded: Vec<oneshot::Sender<()>>,
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
    /// Of a table with a watermark: its only split.
    watermark: SplitWatermark,
    /// How far each sink's changes are in the table, those of open epochs included.
    marks: HashMap<String, u64>,
    /// A mark has moved in the open epoch.
    marked: bool,
}

/// A sealed epoch of a table, to be made durable.
#[derive(Debug)]
pub struct SealedEpoch {
    pub runs: Vec<MemRun>,
    pub statements: Vec<StatementId>,
    pub row_count: i64,
    pub changed: bool,
    pub counters: HashMap<String, u64>,
    pub watermark: Option<ColumnWatermark>,
    /// Staged runs of a load, which is then alone in the epoch.
    pub load: Option<Vec<RunMeta>>,
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
    store: Arc<JobStore>,
    table: TableId,
    name: String,
    /// A key the user declared, not hidden row ids.
    primary_key: bool,
    layout: RowLayout,
    /// With the time column's position.
    watermark: Option<(u32, WatermarkExpr)>,
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
            store: Arc::clone(store),
            table: TableId(relation.first_table_id),
            name: relation.name.clone(),
            primary_key: relation.primary_key,
            layout,
            watermark: relation
                .watermark
                .as_ref()
                .map(|w| w.column)
                .zip(WatermarkExpr::of(relation)?),
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
                watermark: SplitWatermark::load(&version.counters, 0, 0),
                marks: sink_marks(&version.counters),
                marked: false,
            }),
            ended: CancellationToken::new(),
            next_row_id: AtomicI64::new(i64::try_from(next).unwrap_or(i64::MAX)),
        })
    }

    pub fn schema(&self) -> &SchemaRef {
        &self.layout.schema
    }

    /// Position of the hidden row id that rows of a table without a key have.
    pub fn hidden_row_id(&self) -> Option<usize> {
        match self.layout.key.as_slice() {
            [at] if !self.primary_key => Some(*at),
            _ => None,
        }
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
    pub async fn apply(&self, mut statement: DmlStatement) -> Result<DmlOutcome, DmlError> {
        let (entered, fate, on_time) = {
            let _turn = self.turn.lock().await;
            self.wait_for_room().await?;
            let on_time = self.drop_late(&mut statement)?;
            let checked = self.check_until_ended(&statement).await?;
            let (entered, fate) = self.enter(&statement, checked, &on_time)?;
            (entered, fate, on_time)
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
                let kept = on_time.original(kept);
                Ok(DmlOutcome { epoch, rows_affected, kept, late: on_time.late })
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

    /// Takes late rows out of a statement, in the order of its rows.
    pub(super) fn drop_late(&self, statement: &mut DmlStatement) -> Result<OnTime, DmlError> {
        let Some((_, expr)) = &self.watermark else { return Ok(OnTime::default()) };
        let failed = |e: ExecError| DmlError::Sql(e.into_sql());
        let mut running = self.state.lock().watermark.running;
        let rows = statement.delta.num_rows();
        let (stays, late) = expr.advance(&statement.delta.batch, &mut running).map_err(failed)?;
        let Some(mask) = stays else { return Ok(OnTime { running, ..OnTime::default() }) };
        let kept: Vec<u32> = (0..rows as u32).filter(|i| mask.value(*i as usize)).collect();
        let kept = UInt32Array::from(kept);
        statement.delta = statement.delta.take(&kept).map_err(|e| failed(e.into()))?;
        Ok(OnTime { running, late, kept: Some(kept) })
    }

    /// Whether rows may be late: which ones are is decided in the order they come in.
    pub(super) fn has_watermark(&self) -> bool {
        self.watermark.is_some()
    }

    /// Adds rows of the table's connector to the open epoch, and `fed`, which is committed with them. What
    /// comes back completes when the epoch is concluded.
    pub async fn feed(
        &self,
        mut rows: DmlStatement,
        fed: HashMap<String, u64>,
    ) -> Result<oneshot::Receiver<()>, DmlError> {
        let _turn = self.turn.lock().await;
        self.wait_for_room().await?;
        let on_time = self.drop_late(&mut rows)?;
        let checked = match rows.delta.is_empty() {
            true => None,
            false => Some(self.check_until_ended(&rows).await??),
        };
        let (sender, receiver) = oneshot::channel();
        let mut state = self.state.lock();
        if state.stopped {
            return Err(DmlError::Conflict);
        }
        state.note(&on_time);
        state.open.fed.extend(fed);
        state.open.ids.push(rows.id);
        state.open.concluded.push(sender);
        if let Some(writes) = checked.filter(|w| !w.keys.is_empty()) {
            self.write(&mut state, writes);
        }
        drop(state);
        self.meta.request_cut(self.job);
        Ok(receiver)
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
        statement: &DmlStatement,
        checked: Result<Writes, DmlError>,
        on_time: &OnTime,
    ) -> Result<(Entered, Settled), DmlError> {
        let mut state = self.state.lock();
        if state.stopped {
            return Err(DmlError::Conflict);
        }
        if statement.mark.as_ref().is_some_and(|m| state.has(m)) {
            return Ok((Ok((0, None)), state.settled()));
        }
        if checked.is_ok() {
            state.note(on_time);
        }
        let writes = match checked {
            Ok(writes) if writes.keys.is_empty() => {
                return Ok((Ok((writes.rows_affected, writes.kept)), state.settled()));
            }
            Ok(writes) => writes,
            Err(e) => return Ok((Err(e), state.settled())),
        };
        let entered = (writes.rows_affected, writes.kept.clone());
        if let Some(mark) = &statement.mark {
            state.marks.insert(mark.counter.clone(), mark.sequence);
            state.marked = true;
        }
        let receiver = self.write_statement(&mut state, statement.id, writes);
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
        super::note_entered();
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
        let runs = state.writer.seal()?;
        let mut statements = std::mem::take(&mut state.open);
        statements.ties.clear();
        let fed = std::mem::take(&mut statements.fed);
        // Nothing in it: nothing to log.
        let mut counters = HashMap::new();
        let mut watermark = None;
        if statements.changed {
            counters.insert(ROW_ID_COUNTER.to_string(), self.next_row_id());
            state.watermark.store(0, 0, &mut counters);
            watermark = self.watermark.as_ref().map(|w| w.0).zip(state.watermark.running);
        }
        counters.extend(fed);
        if std::mem::take(&mut state.marked) {
            counters.extend(state.marks.iter().map(|(name, n)| (name.clone(), *n)));
        }
        let sealed = SealedEpoch {
            runs,
            statements: statements.ids.clone(),
            row_count: statements.row_count,
            changed: statements.changed,
            counters,
            watermark: watermark.map(|(column, value)| ColumnWatermark { column, value }),
            load: statements.load.take(),
            group,
        };
        state.in_flight.push_back((statements, false));
        Ok(sealed)
    }

    /// Waits until everything that has entered is committed. Under the turn nothing else enters.
    pub(super) async fn settle(&self) -> Result<(), DmlError> {
        loop {
            let settled = {
                let mut state = self.state.lock();
                if state.stopped {
                    return Err(DmlError::Conflict);
                }
                state.settled()
            };
            let Err(waiting) = settled else { return Ok(()) };
            self.meta.request_cut(self.job);
            let _ = waiting.await;
        }
    }

    /// A chunk with the table's keys.
    pub(super) fn keyed(&self, delta: DeltaChunk) -> Result<Keyed, ExecError> {
        Keyed::new(&self.layout, delta)
    }

    /// Begins to stage rows beside the table.
    pub(super) fn stage(&self, repeated: Repeated) -> Result<Staging, ExecError> {
        Ok(self.store.begin_staging(self.table, repeated)?)
    }

    /// Whether rows have a key that the user declared: others are new by themselves.
    pub(super) fn has_primary_key(&self) -> bool {
        self.primary_key
    }

    /// The rows that are at these keys now, by position among the keys.
    pub(super) async fn rows_at(&self, keys: BinaryArray) -> Result<Found, DmlError> {
        let lookup = self.state.lock().writer.multi_get(keys);
        tokio::select! {
            biased;
            found = lookup.wait() => found.map_err(|e| DmlError::Sql(e.into())),
            () = self.ended.cancelled() => Err(DmlError::Conflict),
        }
    }

    /// The error of a row whose key another row has.
    pub(super) fn duplicate(&self, values: &RecordBatch, row: usize) -> DmlError {
        let key = self.layout.describe_key(values, row);
        DmlError::UniqueViolation {
            constraint: format!("{}_pkey", self.name),
            detail: format!("Key {key} already exists."),
            row: 0,
        }
    }

    /// Checks the keys of staged rows against each other and the table, a batch at a time.
    pub(super) async fn check_staged(&self, staging: &Staging) -> Result<(), DmlError> {
        // Fresh row ids cannot exist.
        if !self.primary_key {
            return Ok(());
        }
        let failed = |e: StorageError| DmlError::Sql(e.into());
        let mut merged = staging.merged().map_err(failed)?;
        while let Some(batch) = merged.next().await.map_err(failed)? {
            let twice = batch.weights.as_ref().and_then(|w| w.values().iter().position(|w| *w > 1));
            let taken = match twice {
                Some(row) => Some(row),
                None => {
                    let found = self.rows_at(batch.keys.clone()).await?;
                    found.input.values().iter().min().map(|row| *row as usize)
                }
            };
            if let Some(row) = taken {
                return Err(self.duplicate(&batch.values, row));
            }
        }
        Ok(())
    }

    /// Whether the table still is as it was at an epoch.
    pub(super) fn check_unchanged_since(&self, epoch: Epoch) -> Result<(), DmlError> {
        match self.state.lock().committed <= epoch {
            true => Ok(()),
            false => Err(DmlError::Conflict),
        }
    }

    /// Puts staged runs into the open epoch, which is empty and stays theirs alone: the caller holds the
    /// turn until it is concluded.
    pub(super) fn enter_load(
        &self,
        id: StatementId,
        runs: Vec<RunMeta>,
        row_count: i64,
    ) -> Result<oneshot::Receiver<Fate>, DmlError> {
        let receiver = {
            let mut state = self.state.lock();
            if state.stopped {
                return Err(DmlError::Conflict);
            }
            let (sender, receiver) = oneshot::channel();
            let open = &mut state.open;
            open.waiters.push(sender);
            open.ids.push(id);
            open.row_count += row_count;
            open.changed = true;
            // Its readers read the runs.
            open.overflow = true;
            open.load = Some(runs);
            super::note_entered();
            receiver
        };
        self.meta.request_cut(self.job);
        Ok(receiver)
    }

    /// Waits for a load's fate. The turn is held until then, whatever becomes of the session.
    pub(super) async fn committed_with_turn(
        fate: oneshot::Receiver<Fate>,
        turn: tokio::sync::OwnedMutexGuard<()>,
    ) -> Result<Epoch, DmlError> {
        let (sender, receiver) = oneshot::channel();
        tokio::spawn(async move {
            let fate = fate.await.unwrap_or(Fate::Unknown);
            drop(turn);
            let _ = sender.send(fate);
        });
        match receiver.await.unwrap_or(Fate::Unknown) {
            Fate::Committed(epoch) => Ok(epoch),
            Fate::NotCommitted => Err(DmlError::Conflict),
            Fate::Refused(error) => Err(error.into()),
            Fate::Unknown => Err(unknown_outcome().into()),
        }
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

fn sink_marks(counters: &HashMap<String, u64>) -> HashMap<String, u64> {
    let marks = counters.iter().filter(|(name, _)| name.starts_with(SINK_COUNTER));
    marks.map(|(name, n)| (name.clone(), *n)).collect()
}

impl State {
    /// A statement enters: the watermark moves on.
    pub(super) fn note(&mut self, on_time: &OnTime) {
        self.watermark.running = self.watermark.running.max(on_time.running);
        self.watermark.late += on_time.late;
    }

    /// Whether a sink's change is in the table, or in an epoch on its way.
    fn has(&self, mark: &SinkMark) -> bool {
        self.marks.get(&mark.counter).is_some_and(|n| *n >= mark.sequence)
    }

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

/// What the watermark made of a statement's rows.
#[derive(Default)]
pub(super) struct OnTime {
    /// The table's watermark after it.
    running: Option<i64>,
    pub(super) late: u64,
    /// Positions of the rows that are not late; `None`: all.
    kept: Option<UInt32Array>,
}

impl OnTime {
    /// Positions in the statement as it came.
    fn original(&self, kept: Option<UInt32Array>) -> Option<UInt32Array> {
        match (&self.kept, kept) {
            (None, kept) => kept,
            (Some(own), None) => Some(own.clone()),
            (Some(own), Some(kept)) => {
                let at = |i: &u32| own.values().get(*i as usize).copied();
                Some(kept.values().iter().filter_map(at).collect::<Vec<u32>>().into())
            }
        }
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
