//! Loads: rows that are staged beside the table, checked against it, and entered as runs; and what others have
//! changed lately.

use std::sync::Arc;

use arrow::array::{Array, BinaryArray, RecordBatch};
use millrace_common::task::spawn;
use millrace_common::{DeltaChunk, Epoch};
use millrace_rpc::version::{RunMeta, StatementId};
use millrace_storage::stage::{Repeated, Staging};
use millrace_storage::{Found, StorageError};
use tokio::sync::oneshot;

use super::recent::LookupPlace;
use super::{Sequencer, StatementOutcome};
use crate::changelog_cache::{EpochDelta, HubChunk};
use crate::dml::check::Keyed;
use crate::dml::{DmlError, EntryFlag, TableLocks, unknown_outcome};
use crate::error::ExecError;
use crate::materialize::take_binary;

impl Sequencer {
    /// A chunk with the table's keys.
    pub(in crate::dml) fn keyed(&self, delta: DeltaChunk) -> Result<Keyed, ExecError> {
        Keyed::new(&self.layout, delta)
    }

    /// Begins to stage rows beside the table.
    pub(in crate::dml) fn stage(&self, repeated: Repeated) -> Result<Staging, ExecError> {
        Ok(self.store.begin_staging(self.table, repeated)?)
    }

    /// The rows that are at these keys now, by position among the keys.
    pub(in crate::dml) async fn rows_at(&self, keys: BinaryArray) -> Result<Found, DmlError> {
        let lookup = self.state.lock().writer.multi_get(keys);
        self.until_ended(lookup).await
    }

    /// The error of a row whose key another row has; `of`: which of the statement's rows it is, if that is known.
    pub(in crate::dml) fn duplicate(
        &self,
        values: &RecordBatch,
        row: usize,
        of: Option<usize>,
    ) -> DmlError {
        let key = self.layout.describe_key(values, row);
        DmlError::UniqueViolation {
            constraint: Box::new(self.primary_key_object.clone()),
            detail: format!("Key {key} already exists."),
            row: of,
        }
    }

    /// Checks the keys of staged rows before the turn, so that others do not wait for it. `None`: one of them is taken,
    /// perhaps by a row that is not committed; that is for the turn to tell.
    pub(in crate::dml) async fn check_before(
        &self,
        staging: &Staging,
    ) -> Result<Option<LookupPlace>, DmlError> {
        let place = LookupPlace::begin(&self.recent);
        match self.check_staged(staging, None).await {
            Ok(()) => Ok(Some(place)),
            Err(DmlError::UniqueViolation { .. }) => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Checks the keys of staged rows against each other and the table, a batch at a time; against the table only those
    /// that were written since a check before it.
    pub(in crate::dml) async fn check_staged(
        &self,
        staging: &Staging,
        checked: Option<&LookupPlace>,
    ) -> Result<(), DmlError> {
        // Fresh row ids cannot exist.
        if !self.primary_key || checked.is_some_and(LookupPlace::is_newest) {
            return Ok(());
        }
        let failed = |e: StorageError| DmlError::Sql(e.into());
        let mut merged = staging.merged().map_err(failed)?;
        while let Some(batch) = merged.next().await.map_err(failed)? {
            let twice = batch.weights.as_ref().and_then(|w| w.values().iter().position(|w| *w > 1));
            let asked = match checked {
                None => (0..batch.len() as u32).collect(),
                Some(checked) => checked.written_since(&batch.keys),
            };
            let taken = match twice {
                Some(row) => Some(row),
                None => self.first_taken(&batch.keys, asked).await?,
            };
            if let Some(row) = taken {
                return Err(self.duplicate(&batch.values, row, None));
            }
        }
        Ok(())
    }

    /// The first of these keys, by position, that a row has.
    async fn first_taken(
        &self,
        keys: &BinaryArray,
        asked: Vec<u32>,
    ) -> Result<Option<usize>, DmlError> {
        if asked.is_empty() {
            return Ok(None);
        }
        let some = match asked.len() == keys.len() {
            true => keys.clone(),
            false => {
                take_binary(keys, &asked.clone().into()).map_err(|e| DmlError::Sql(e.into_sql()))?
            }
        };
        let found = self.rows_at(some).await?;
        Ok(found.input.values().iter().min().map(|at| asked[*at as usize] as usize))
    }

    /// What has entered and is not committed, after the epoch that is. `None`: some of it is too large to be kept.
    pub(in crate::dml) fn pending(&self) -> Option<(Epoch, Vec<HubChunk>)> {
        let state = self.state.lock();
        let epochs = state.in_flight.iter().map(|(statements, _)| statements).chain([&state.open]);
        let mut chunks = Vec::new();
        for statements in epochs {
            if statements.overflow {
                return None;
            }
            chunks.extend(statements.delta.iter().cloned());
        }
        Some((state.committed, chunks))
    }

    /// What was committed in `(from, to]`. `None`: not all of it is kept.
    pub(in crate::dml) fn recent(&self, from: Epoch, to: Epoch) -> Option<Vec<Arc<EpochDelta>>> {
        self.changelogs.get(self.job, from, to)
    }

    /// The storage keys of changed rows.
    pub(in crate::dml) fn keys_of(&self, chunk: &HubChunk) -> Result<BinaryArray, ExecError> {
        self.layout.keys(chunk.rows(), chunk.vnodes())
    }

    /// Puts staged runs into the open epoch, which is empty and stays theirs alone: the caller holds the
    /// turn until it is concluded. `flag` is set when they are in.
    pub(in crate::dml) fn enter_load(
        &self,
        id: StatementId,
        runs: Vec<RunMeta>,
        row_count: i64,
        flag: &EntryFlag,
    ) -> Result<oneshot::Receiver<StatementOutcome>, DmlError> {
        let receiver = {
            let mut state = self.state.lock();
            if state.stopped {
                return Err(DmlError::Conflict);
            }
            self.check_frontend(id)?;
            let (sender, receiver) = oneshot::channel();
            self.recent.lock().note_all();
            let open = &mut state.open;
            open.waiters.push(sender);
            open.ids.push(id);
            open.row_count += row_count;
            open.changed = true;
            // Its readers read the runs.
            open.overflow = true;
            open.load = Some(runs);
            open.is_load = true;
            flag.set();
            receiver
        };
        self.meta.request_cut(self.job);
        Ok(receiver)
    }

    /// Waits for a load's fate. The turns are held until then, whatever becomes of the session.
    pub(in crate::dml) async fn committed_with_turns(
        fate: oneshot::Receiver<StatementOutcome>,
        turns: TableLocks,
    ) -> Result<Epoch, DmlError> {
        let (sender, receiver) = oneshot::channel();
        spawn("await a load", async move {
            let fate = fate.await.unwrap_or(StatementOutcome::Unknown);
            drop(turns);
            let _ = sender.send(fate);
        });
        match receiver.await.unwrap_or(StatementOutcome::Unknown) {
            StatementOutcome::Committed(epoch) => Ok(epoch),
            StatementOutcome::NotCommitted => Err(DmlError::Conflict),
            StatementOutcome::Refused(error) => Err(error.into()),
            StatementOutcome::Unknown => Err(unknown_outcome().into()),
        }
    }
}
