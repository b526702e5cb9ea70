//! COMMIT of a transaction that wrote several tables: one epoch, one log record, all or nothing
//! (docs/design.md §4, "Statements").
//!
//! The transaction takes the turns of all its tables, in the order of their ids, so that two never wait
//! for each other in a circle; checks every part; and enters all of them in one synchronous step, in
//! which no epoch ends. From then on the open epochs of its tables are tied: whichever is sealed
//! first, all are, as a group, and meta commits a group's epochs by one entry of the log or not at
//! all. A failed check leaves nothing anywhere.

use std::collections::BTreeMap;
use std::sync::Arc;

use arrow::array::Array;
use millrace_common::{Epoch, JobId};
use millrace_rpc::version::StatementId;
use tokio::sync::oneshot;

use super::check::Writes;
use super::sequencer::{Fate, OnTime, Sequencer};
use super::{DmlError, DmlOutcome, DmlStatement, unknown_outcome};

/// One table's part.
pub struct Part {
    pub table: Arc<Sequencer>,
    pub statement: DmlStatement,
}

/// Commits all parts at one epoch; the tables are distinct.
pub async fn commit(id: StatementId, parts: Vec<Part>) -> Result<DmlOutcome, DmlError> {
    let mut parts: BTreeMap<JobId, Part> = parts.into_iter().map(|p| (p.table.job, p)).collect();
    let mut turns = Vec::with_capacity(parts.len());
    let mut checked = Vec::with_capacity(parts.len());
    for part in parts.values() {
        turns.push(Arc::clone(&part.table.turn).lock_owned().await);
        part.table.wait_for_room().await?;
    }
    let mut late = 0;
    for part in parts.values_mut() {
        let on_time = part.table.drop_late(&mut part.statement).await?;
        late += on_time.late;
        match part.table.check_until_ended(&part.statement).await? {
            Ok(writes) => checked.push((Arc::clone(&part.table), writes, on_time)),
            Err(error) => {
                // It may have failed by a row that is not committed yet.
                let settled = part.table.state.lock().settled();
                drop(turns);
                return match outcome(&part.table, settled).await {
                    Fate::Committed(_) => Err(error),
                    fate => refused(fate),
                };
            }
        }
    }
    let rows_affected = checked.iter().map(|(_, w, _)| w.rows_affected).sum();
    let waiting = enter(id, checked)?;
    drop(turns);
    for (table, _) in &waiting {
        table.meta.request_cut(table.job);
    }
    let mut epoch = Epoch::ZERO;
    let mut failed = None;
    for (_, fate) in waiting {
        match fate.await.unwrap_or(Fate::Unknown) {
            Fate::Committed(at) => epoch = epoch.max(at),
            // Of several answers the least certain one.
            Fate::Unknown => failed = Some(Fate::Unknown),
            fate => drop(failed.get_or_insert(fate)),
        }
    }
    match failed {
        None => Ok(DmlOutcome { epoch, rows_affected, kept: None, late }),
        // One part is committed, so all are.
        Some(_) if epoch > Epoch::ZERO => Ok(DmlOutcome { epoch, rows_affected, kept: None, late }),
        Some(fate) => refused(fate),
    }
}

type Waiting = Vec<(Arc<Sequencer>, oneshot::Receiver<Fate>)>;

/// All parts into their open epochs, or none.
fn enter(
    id: StatementId,
    mut checked: Vec<(Arc<Sequencer>, Writes, OnTime)>,
) -> Result<Waiting, DmlError> {
    checked.retain(|(_, writes, _)| !writes.keys.is_empty());
    let tables: Vec<Arc<Sequencer>> =
        checked.iter().map(|(table, _, _)| Arc::clone(table)).collect();
    let Some(first) = tables.first() else { return Ok(Vec::new()) };
    let _seals = first.hold_seals();
    let mut states: Vec<_> = tables.iter().map(|table| table.state.lock()).collect();
    if states.iter().any(|state| state.is_stopped()) {
        return Err(DmlError::Conflict);
    }
    let mut waiting = Vec::with_capacity(checked.len());
    for ((table, writes, on_time), state) in checked.into_iter().zip(&mut states) {
        state.note(&on_time);
        waiting.push((Arc::clone(&table), table.write_statement(state, id, writes)));
        if tables.len() > 1 {
            state.tie(&tables);
        }
    }
    Ok(waiting)
}

async fn outcome(table: &Sequencer, settled: super::sequencer::Settled) -> Fate {
    match settled {
        Ok(epoch) => Fate::Committed(epoch),
        Err(waiting) => {
            table.meta.request_cut(table.job);
            waiting.await.unwrap_or(Fate::Unknown)
        }
    }
}

fn refused(fate: Fate) -> Result<DmlOutcome, DmlError> {
    match fate {
        Fate::Refused(error) => Err(error.into()),
        Fate::Unknown => Err(unknown_outcome().into()),
        Fate::NotCommitted | Fate::Committed(_) => Err(DmlError::Conflict),
    }
}
