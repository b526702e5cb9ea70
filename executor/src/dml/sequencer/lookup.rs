//! The rows at a statement's keys: looked up before its turn, so that nobody waits for somebody else's reads of the
//! store, and brought up to date in it.
//!
//! In the turn nothing else is written: only keys that were written since they were looked up are asked again, and what
//! was written lately is in memory as a rule. Where it is not, the turn is given up and they are looked up as before. So
//! what a statement is checked against is the same as if it had been looked up in the turn. Nothing has changed when any
//! of this is dropped.

use arrow::array::{Array, ArrayRef, AsArray, BinaryArray, Int64Array, UInt32Array};
use arrow::compute;
use millrace_common::DeltaChunk;
use millrace_common::delta::take_rows;
use millrace_graph::lookahead::Place;
use millrace_storage::{Found, Lookup};
use tokio::sync::MutexGuard;

use super::Sequencer;
use super::ahead::LookupCounts;
use super::recent::LookupPlace;
use crate::dml::check::{KeyReservations, Keyed, Writes};
use crate::dml::{DmlError, DmlKind, DmlStatement, InsertConflict};
use crate::error::ExecError;
use crate::lookahead::keys_ahead::KeysAhead;
use crate::lookahead::uncommitted::Announced;
use crate::materialize::take_binary;

/// How often the keys of a statement are looked up outside its turn. They are read once more only if others have written
/// them meanwhile and it has left memory again, or more has been written than is remembered; the next time nobody may.
pub(in crate::dml) const FREE_LOOKUPS: usize = 4;

/// A statement's rows with what is at their keys.
pub(in crate::dml) struct KeyRows {
    keyed: Keyed,
    distinct: BinaryArray,
    /// At positions in `distinct`, in no order.
    found: Found,
    /// When that was; `None`: it was not looked up.
    place: Option<LookupPlace>,
    /// Nothing can be at its keys.
    fresh: bool,
    /// To those that look ahead.
    announced: Option<Announced>,
    /// Of rows of the table's connector: the keys, as far as they were looked up ahead.
    ahead: Option<KeysAhead>,
}

/// A lookup of some of a statement's keys.
struct Asked {
    /// Positions among the distinct keys, ascending.
    which: Vec<u32>,
    lookup: Lookup,
    place: LookupPlace,
}

impl KeyRows {
    /// The rows of the statement.
    pub fn num_rows(&self) -> usize {
        self.keyed.delta.num_rows()
    }

    pub fn keyed(&self) -> &Keyed {
        &self.keyed
    }

    /// Who gets each key, where rows give way to those that are there.
    pub fn claims(&self) -> KeyReservations {
        self.keyed.claims(&self.found)
    }

    /// They are rows of the table's connector.
    pub fn of_connector(self, keys: KeysAhead) -> KeyRows {
        KeyRows { ahead: Some(keys), ..self }
    }

    /// Leaves only these rows of the statement, which ascend.
    pub fn keep(&mut self, rows: &UInt32Array) -> Result<(), ExecError> {
        let (keyed, moved) = self.keyed.take(rows)?;
        let inputs = self.found.input.values().iter().enumerate();
        let (at, inputs): (Vec<u32>, Vec<u32>) =
            inputs.filter_map(|(at, key)| Some((at as u32, moved[*key as usize]?))).unzip();
        self.found = pick(&self.found, inputs, &at.into())?;
        self.distinct = keyed.distinct()?;
        self.keyed = keyed;
        Ok(())
    }

    /// The answer takes the place of what was found at its keys before.
    fn take_in(
        &mut self,
        which: Vec<u32>,
        found: Found,
        place: LookupPlace,
    ) -> Result<(), ExecError> {
        self.found = match which.len() == self.distinct.len() {
            true => found,
            false => replace(&self.found, &which, found)?,
        };
        self.place = Some(place);
        Ok(())
    }

    /// Checks the statement against what was found.
    pub fn check(self, table: &Sequencer, kind: DmlKind) -> Result<Writes, DmlError> {
        let key = &table.primary_key_object;
        let writes = self.keyed.check(&table.layout, key, kind, &self.found)?;
        Ok(Writes { announced: self.announced, ..writes })
    }
}

/// Some of the rows that were found, at these keys now.
fn pick(found: &Found, inputs: Vec<u32>, rows: &UInt32Array) -> Result<Found, ExecError> {
    let weights = rows.values().iter().map(|row| found.weights.value(*row as usize));
    Ok(Found {
        input: inputs.into(),
        keys: take_binary(&found.keys, rows)?,
        weights: Int64Array::from_iter_values(weights),
        values: take_rows(&found.values, rows)?,
    })
}

/// `old` with what was found anew at the keys `which`.
fn replace(old: &Found, which: &[u32], new: Found) -> Result<Found, ExecError> {
    let inputs = old.input.values().iter().enumerate();
    let kept = inputs.filter(|(_, key)| which.binary_search(key).is_err());
    let (at, mut inputs): (Vec<u32>, Vec<u32>) = kept.map(|(at, key)| (at as u32, *key)).unzip();
    inputs.extend(new.input.values().iter().map(|key| which[*key as usize]));
    let kept = pick(old, Vec::new(), &at.into())?;
    let joined = |a: &dyn Array, b: &dyn Array| -> Result<ArrayRef, ExecError> {
        Ok(compute::concat(&[a, b])?)
    };
    Ok(Found {
        input: inputs.into(),
        keys: joined(&kept.keys, &new.keys)?.as_binary::<i32>().clone(),
        weights: joined(&kept.weights, &new.weights)?.as_primitive().clone(),
        values: compute::concat_batches(&old.values.schema(), [&kept.values, &new.values])?,
    })
}

fn failed(e: ExecError) -> DmlError {
    DmlError::Sql(e.into_sql())
}

impl Sequencer {
    /// A statement's rows with their keys, which are not looked up yet. Those that look ahead are told of them.
    pub(in crate::dml) fn key_rows(&self, statement: &DmlStatement) -> Result<KeyRows, DmlError> {
        let keyed = Keyed::new(&self.layout, statement.delta.clone()).map_err(failed)?;
        // A row id that was given to a new row is no other row's, whatever has happened since.
        let fresh = !self.primary_key
            && statement.kind == DmlKind::Insert { on_conflict: InsertConflict::Error };
        let distinct = keyed.distinct().map_err(failed)?;
        let found = Found::empty(&self.layout.schema);
        let announced = statement.announced.clone();
        let announced = announced.or_else(|| self.announce(&keyed.delta));
        Ok(KeyRows { keyed, distinct, found, place: None, fresh, announced, ahead: None })
    }

    /// Tells those that look ahead of rows that have been received. `None`: there are none.
    pub(in crate::dml) fn announce(&self, rows: &DeltaChunk) -> Option<Announced> {
        self.announce_with(|| vec![rows.clone()])
    }

    /// The same of rows that are made only if there is somebody to be told.
    pub fn announce_with(&self, rows: impl FnOnce() -> Vec<DeltaChunk>) -> Option<Announced> {
        let uncommitted = self.changelogs.uncommitted();
        uncommitted.announce(self.job, Place::Entry, None, rows)
    }

    /// Takes the turn with the rows at a statement's keys as they are in it.
    pub(super) async fn turn_with(
        &self,
        rows: &mut KeyRows,
    ) -> Result<MutexGuard<'_, ()>, DmlError> {
        for _ in 0..FREE_LOOKUPS {
            self.look_up(rows).await?;
            let turn = self.turn.lock().await;
            self.wait_for_room().await?;
            if self.bring_up_to_date(rows)? {
                return Ok(turn);
            }
        }
        let turn = self.turn.lock().await;
        self.wait_for_room().await?;
        self.look_up(rows).await?;
        Ok(turn)
    }

    /// Looks up the keys that were written since they were looked up, or have never been. The table's end interrupts a
    /// lookup that hangs.
    pub(in crate::dml) async fn look_up(&self, rows: &mut KeyRows) -> Result<(), DmlError> {
        self.check_running()?;
        let Some(Asked { which, lookup, place }) = self.ask(rows).map_err(failed)? else {
            return Ok(());
        };
        let ahead = rows.ahead.as_ref().map(KeysAhead::come);
        let counts = LookupCounts::default();
        let is_pending = lookup.is_pending();
        let found = self.until_ended(counts.of(lookup)).await?;
        self.lookups_ahead.note_lookup(counts.requests());
        if let Some(ahead) = ahead {
            let keys = which.len() as u64;
            self.lookups_ahead.note_connector_lookup(ahead, keys, is_pending, &counts);
        }
        rows.take_in(which, found, place).map_err(failed)
    }

    /// The same in the turn, as far as memory answers at once: whether all of it is up to date.
    pub(in crate::dml) fn bring_up_to_date(&self, rows: &mut KeyRows) -> Result<bool, DmlError> {
        self.check_running()?;
        match self.ask(rows).map_err(failed)? {
            None => Ok(true),
            Some(Asked { which, lookup: Lookup::Ready(found), place }) => {
                rows.take_in(which, found, place).map_err(failed)?;
                Ok(true)
            }
            Some(Asked { lookup: Lookup::Pending(_), .. }) => Ok(false),
        }
    }

    /// What a table that has ended still holds in memory may be void.
    fn check_running(&self) -> Result<(), DmlError> {
        if self.state.lock().stopped { Err(DmlError::Conflict) } else { Ok(()) }
    }

    /// `None`: what was found is still so.
    fn ask(&self, rows: &KeyRows) -> Result<Option<Asked>, ExecError> {
        if rows.fresh || rows.distinct.is_empty() {
            return Ok(None);
        }
        // Held: nothing is written between the lookup and its place.
        let state = self.state.lock();
        let which: Vec<u32> = match &rows.place {
            None => (0..rows.distinct.len() as u32).collect(),
            Some(place) => place.written_since(&rows.distinct),
        };
        if which.is_empty() {
            return Ok(None);
        }
        let keys = match which.len() == rows.distinct.len() {
            true => rows.distinct.clone(),
            false => take_binary(&rows.distinct, &which.clone().into())?,
        };
        let place = LookupPlace::begin(&self.recent);
        let lookup = state.writer.multi_get(keys);
        Ok(Some(Asked { which, lookup, place }))
    }

    /// The answer to a lookup, or that the table has ended.
    pub(super) async fn until_ended(&self, lookup: Lookup) -> Result<Found, DmlError> {
        let found = tokio::select! {
            biased;
            found = lookup.wait() => found.map_err(|e| DmlError::Sql(e.into())),
            () = self.ended.cancelled() => Err(DmlError::Conflict),
        };
        match found {
            // What it would have read may be gone with the table's job.
            Err(_) if self.ended.is_cancelled() => Err(DmlError::Conflict),
            found => found,
        }
    }
}
