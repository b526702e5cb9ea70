//! The end of epochs: sealed, handed over, and committed or lost.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use millrace_common::{Epoch, Generation, JobId, SqlError, SqlState, crash};
use millrace_graph::lookahead::Place;
use millrace_rpc::version::{ColumnWatermark, CommitGroup, GroupMember, RunMeta, StatementId};
use millrace_storage::MemRun;
use parking_lot::MutexGuard;

use super::state::{State, Statements};
use super::{ROW_ID_COUNTER, Sequencer, StatementOutcome};
use crate::changelog_cache::HubChunk;
use crate::error::ExecError;

/// A sealed epoch of a table, to be made durable.
#[derive(Debug)]
pub struct SealedEpoch {
    pub runs: Vec<MemRun>,
    pub statements: Vec<StatementId>,
    pub row_count: i64,
    pub changed: bool,
    pub counters: BTreeMap<String, u64>,
    pub watermark: Option<ColumnWatermark>,
    /// Staged runs of a load, which is then alone in the epoch.
    pub load: Option<Vec<RunMeta>>,
    /// The epochs of other tables that this one is committed with.
    pub group: Option<CommitGroup>,
}

impl Sequencer {
    /// The next epoch to commit: the open one is ended, unless another table's seal has ended one
    /// already. It stays in flight until it is concluded.
    pub fn seal(&self) -> Result<SealedEpoch, ExecError> {
        let mut state = self.state.lock();
        if let Some(sealed) = state.ahead.pop_front() {
            return Ok(self.sealed_ahead(state, sealed));
        }
        // A transaction ties the open epochs of all its tables in one step: this one is no other table's business.
        if state.open.ties.is_empty() {
            return self.seal_open(&mut state, None);
        }
        // Locked before any table's state.
        drop(state);
        let mut groups = self.ties.groups.lock();
        let mut state = self.state.lock();
        match state.ahead.pop_front() {
            // Another member was faster.
            Some(sealed) => Ok(self.sealed_ahead(state, sealed)),
            None if state.open.ties.is_empty() => self.seal_open(&mut state, None),
            None => self.seal_group(state, &mut groups),
        }
    }

    /// An epoch that another table's seal has ended.
    fn sealed_ahead(&self, state: MutexGuard<'_, State>, sealed: SealedEpoch) -> SealedEpoch {
        let more = !state.ahead.is_empty() || !state.open.ids.is_empty();
        drop(state);
        if more {
            // One request may have stood for both.
            self.meta.request_cut(self.job);
        }
        sealed
    }

    /// Ends the open epoch together with those that it is tied to.
    fn seal_group(
        &self,
        mut state: MutexGuard<'_, State>,
        groups: &mut u64,
    ) -> Result<SealedEpoch, ExecError> {
        let mut others = std::mem::take(&mut state.open.ties);
        others.remove(&self.job);
        let others = tied(self.job, others)?;
        *groups += 1;
        let member = |job: JobId, generation: Generation| GroupMember {
            job: job.0,
            generation: generation.0,
        };
        let mut members = vec![member(self.job, self.generation)];
        members.extend(others.iter().map(|o| member(o.job, o.generation)));
        let group = CommitGroup { id: *groups, members };
        let sealed = self.seal_open(&mut state, Some(group.clone()))?;
        drop(state);
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
        let mut counters = BTreeMap::new();
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
        statements.announced.sealed();
        self.announce_sealed(&mut statements);
        state.in_flight.push_back((statements, false));
        Ok(sealed)
    }

    /// Tells those that look ahead of an epoch's change, unless it is too large to be told.
    fn announce_sealed(&self, statements: &mut Statements) {
        if !statements.changed || statements.overflow {
            return;
        }
        let rows = || statements.delta.iter().map(|chunk| chunk.chunk().clone()).collect();
        let uncommitted = self.changelogs.uncommitted();
        if let Some(announced) = uncommitted.announce(self.job, Place::Root, None, rows) {
            statements.announced.join(announced);
        }
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
        if statements.is_load {
            // Its rows are visible only now: a lookup that began since it entered has not seen them.
            self.recent.lock().note_all();
        }
        if statements.changed {
            let delta = std::mem::take(&mut statements.delta);
            // Under the lock: who asks what has changed finds it here or there.
            before_acknowledging((!statements.overflow).then_some(delta));
        }
        std::mem::take(&mut statements.announced).committed(epoch);
        drop(state);
        self.batch.concluded();
        crash::point("dml-before-acknowledge");
        statements.conclude(StatementOutcome::Committed(epoch));
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
        self.batch.concluded();
        self.ended.cancel();
        for (statements, handed_over) in in_flight {
            statements.conclude(if handed_over {
                StatementOutcome::Unknown
            } else {
                not_committed(reason)
            });
        }
        open.conclude(not_committed(reason));
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

/// What became of statements that a failed job leaves uncommitted: a store that has no space, refuses
/// or does not answer would do the same to the next attempt; anything else is worth one.
fn not_committed(reason: Option<&SqlError>) -> StatementOutcome {
    const TOLD: [SqlState; 4] = [
        SqlState::DISK_FULL,
        SqlState::SYSTEM_ERROR,
        SqlState::IO_ERROR,
        SqlState::INSUFFICIENT_PRIVILEGE,
    ];
    match reason {
        Some(error) if TOLD.contains(&error.state) => StatementOutcome::Refused(error.clone()),
        _ => StatementOutcome::NotCommitted,
    }
}
