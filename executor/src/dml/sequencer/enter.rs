//! How statements enter the open epoch: checked and written in their turn.

use std::collections::BTreeMap;

use arrow::array::{Array, UInt32Array};
use millrace_common::SqlError;
use millrace_rpc::call_error::CallError;
use millrace_rpc::version::StatementId;
use tokio::sync::oneshot;

use super::lookup::KeyRows;
use super::state::State;
use super::{OnTime, Sequencer, Settled, StatementOutcome};
use crate::changelog_cache::HubChunk;
use crate::dml::check::Writes;
use crate::dml::{
    DmlError, DmlKind, DmlOutcome, DmlStatement, EntryFlag, InsertConflict, unknown_outcome,
};
use crate::error::ExecError;
use crate::lookahead::keys_ahead::KeysAhead;
use crate::memory::MemoryClass;

/// What a statement did: rows affected, and which of its rows took effect.
type Entered = Result<(u64, Option<UInt32Array>), DmlError>;

impl Sequencer {
    /// Checks a statement, adds it to the open epoch and waits until that is committed.
    pub async fn apply(&self, statement: DmlStatement) -> Result<DmlOutcome, DmlError> {
        let mut rows = self.key_rows(&statement)?;
        let (entered, fate, on_time) = {
            let _turn = self.turn_with(&mut rows).await?;
            let on_time = self.drop_late(statement.kind, &mut rows)?;
            let checked = rows.check(self, statement.kind);
            let (entered, fate) = self.enter(&statement, checked, &on_time)?;
            (entered, fate, on_time)
        };
        let epoch = match fate {
            Ok(committed) => StatementOutcome::Committed(committed),
            Err(waiting) => {
                self.meta.request_cut(self.job);
                waiting.await.unwrap_or(StatementOutcome::Unknown)
            }
        };
        match (entered, epoch) {
            (Ok((rows_affected, kept)), StatementOutcome::Committed(epoch)) => {
                let kept = on_time.original(kept);
                Ok(DmlOutcome { epoch, rows_affected, kept, late: on_time.late })
            }
            (Ok(_), StatementOutcome::Unknown) => Err(unknown_outcome().into()),
            (_, StatementOutcome::Refused(error)) => Err(error.into()),
            (_, StatementOutcome::NotCommitted) => Err(DmlError::Conflict),
            (Err(e), _) => Err(on_time.original_error(e)),
        }
    }

    /// Takes late rows out of a statement, in the order of its rows. A row that gives way to another of its key is no
    /// row of the table, so it moves no watermark. In the turn, with the rows at its keys.
    pub(in crate::dml) fn drop_late(
        &self,
        kind: DmlKind,
        rows: &mut KeyRows,
    ) -> Result<OnTime, DmlError> {
        let Some((_, expr)) = &self.watermark else { return Ok(OnTime::default()) };
        let failed = |e: ExecError| DmlError::Sql(e.into_sql());
        let mut claims = self.gives_way(kind, rows).then(|| rows.claims());
        let enters = |row| claims.as_mut().is_none_or(|claims| claims.claim(row));
        let mut running = self.state.lock().watermark.running;
        let batch = &rows.keyed().delta.batch;
        let (stays, late) = expr.advance_by(batch, &mut running, enters).map_err(failed)?;
        let Some(mask) = stays else { return Ok(OnTime { running, ..OnTime::default() }) };
        let kept = 0..rows.num_rows() as u32;
        let kept: Vec<u32> = kept.filter(|i| mask.value(*i as usize)).collect();
        let kept = UInt32Array::from(kept);
        rows.keep(&kept).map_err(failed)?;
        Ok(OnTime { running, late, kept: Some(kept) })
    }

    /// Whether the rows of a statement give way to others of their keys.
    fn gives_way(&self, kind: DmlKind, rows: &KeyRows) -> bool {
        let gives_way = match kind {
            DmlKind::Insert { on_conflict } => on_conflict == InsertConflict::Nothing,
            DmlKind::Feed { on_conflict } => on_conflict != InsertConflict::Overwrite,
            _ => false,
        };
        gives_way && self.primary_key && rows.keyed().delta.weights.is_none()
    }

    /// Adds rows of the table's connector to the open epoch, and `fed`, which is committed with them. `keys`: theirs, as
    /// far as they were looked up ahead. What comes back completes when the epoch is concluded.
    pub async fn feed(
        &self,
        statement: DmlStatement,
        keys: KeysAhead,
        fed: BTreeMap<String, u64>,
    ) -> Result<oneshot::Receiver<()>, DmlError> {
        let mut rows = self.key_rows(&statement)?.of_connector(keys);
        let count = rows.num_rows() as u64;
        let _turn = self.turn_with(&mut rows).await?;
        let on_time = self.drop_late(statement.kind, &mut rows)?;
        let checked = match rows.num_rows() {
            0 => None,
            _ => Some(rows.check(self, statement.kind)?),
        };
        let (sender, receiver) = oneshot::channel();
        let mut state = self.state.lock();
        if state.stopped {
            return Err(DmlError::Conflict);
        }
        state.note(&on_time);
        state.open.fed.extend(fed);
        state.open.ids.push(statement.id);
        state.open.concluded.push(sender);
        let affected = checked.as_ref().map_or(0, |writes| writes.rows_affected);
        if let Some(writes) = checked.filter(|w| !w.keys.is_empty()) {
            self.write(&mut state, writes);
        }
        drop(state);
        self.lookups_ahead.note_rows(count, affected);
        self.meta.request_cut(self.job);
        Ok(receiver)
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
        self.check_frontend(statement.id)?;
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
        let receiver = self.write_statement(&mut state, statement.id, &statement.entered, writes);
        Ok((Ok(entered), Err(receiver)))
    }

    /// An error for a statement of a frontend that the log has fenced: advisory locks of its sessions are given to others
    /// once what had entered before is in the log. Asked while the state is locked, so that no epoch ends between this and
    /// the entry: a cut that was decided later than the fence has all that was let through. Numbers of sinks, which are in
    /// the place of incarnations, are above all of these.
    pub(in crate::dml) fn check_frontend(&self, id: StatementId) -> Result<(), DmlError> {
        let incarnation = id.frontend;
        match self.meta.is_fenced(incarnation) {
            true => Err(SqlError::from(CallError::Fenced { incarnation }).into()),
            false => Ok(()),
        }
    }

    pub(in crate::dml) fn write_statement(
        &self,
        state: &mut State,
        id: StatementId,
        flag: &EntryFlag,
        writes: Writes,
    ) -> oneshot::Receiver<StatementOutcome> {
        let (sender, receiver) = oneshot::channel();
        state.open.waiters.push(sender);
        state.open.ids.push(id);
        self.write(state, writes);
        flag.set();
        receiver
    }

    fn write(&self, state: &mut State, writes: Writes) {
        self.recent.lock().note(&writes.keys);
        let are_new = writes.are_new();
        if let Some(announced) = writes.announced {
            state.open.announced.join(announced);
        }
        match are_new {
            true => state.writer.write_new(writes.keys, writes.rows),
            false => state.writer.write(writes.keys, writes.weights, writes.rows),
        }
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
        self.batch.grown(open.delta_bytes);
    }

    /// Waits while the open epoch is full.
    pub(in crate::dml) async fn wait_for_room(&self) -> Result<(), DmlError> {
        self.wait_for_commits(|state| state.open.delta_bytes <= self.limit).await
    }

    /// Waits until everything that has entered is committed. Under the turn nothing else enters.
    pub(in crate::dml) async fn wait_until_quiescent(&self) -> Result<(), DmlError> {
        self.wait_for_commits(|_| false).await
    }

    /// Waits until everything that has entered by now is committed. False: the table has stopped.
    pub async fn settle(&self) -> bool {
        let settled = {
            let mut state = self.state.lock();
            if state.stopped {
                return false;
            }
            state.settled()
        };
        let Err(waiting) = settled else { return true };
        self.meta.request_cut(self.job);
        matches!(waiting.await, Ok(StatementOutcome::Committed(_)))
    }

    /// Asks for cuts and waits until enough is committed, or all of it.
    async fn wait_for_commits(&self, enough: impl Fn(&State) -> bool) -> Result<(), DmlError> {
        loop {
            let settled = {
                let mut state = self.state.lock();
                if state.stopped {
                    return Err(DmlError::Conflict);
                }
                if enough(&state) {
                    return Ok(());
                }
                state.settled()
            };
            let Err(waiting) = settled else { return Ok(()) };
            self.meta.request_cut(self.job);
            // However it ended, more is committed now, or the table has stopped.
            let _ = waiting.await;
        }
    }
}
