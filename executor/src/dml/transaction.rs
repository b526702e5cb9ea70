//! Statements that enter several tables, or that rest on what they have read: COMMIT of a transaction, and single
//! statements that are not told by the rows they write alone. One epoch, one log record, all or nothing
//! (docs/design.md §4, "Statements").
//!
//! It looks up the keys of its parts; takes the turns of all its tables, those that it has only read too, in the order
//! of their ids, so that two never wait for each other in a circle; brings what it has found up to date; checks what it
//! has read, and every part; and enters all of them in one synchronous step, in which no epoch ends. From then on the open epochs of its tables are tied: whichever is sealed
//! first, all are, as a group, and meta commits a group's epochs by one entry of the log or not at
//! all. A table that was only read is tied too: what enters it later is not seen before this is. A failed check leaves
//! nothing anywhere.

use std::collections::BTreeMap;
use std::sync::Arc;

use arrow::array::Array;
use futures::future::try_join_all;
use millrace_common::{Epoch, JobId};
use millrace_rpc::version::StatementId;
use tokio::sync::oneshot;

use super::check::Writes;
use super::reads::{TableLocks, TableRead};
use super::sequencer::{FREE_LOOKUPS, KeyRows, OnTime, Sequencer, StatementOutcome};
use super::{DmlError, DmlOutcome, DmlStatement, EntryFlag, unknown_outcome};

/// One table's part.
pub struct Part {
    pub table: Arc<Sequencer>,
    pub statement: DmlStatement,
}

/// What it has read, and the turns that it has already.
#[derive(Default)]
pub(crate) struct Premises {
    pub reads: Vec<TableRead>,
    pub locks: Option<TableLocks>,
}

type Tables = BTreeMap<JobId, Arc<Sequencer>>;

/// A part with the rows at its keys.
struct KeyedPart {
    table: Arc<Sequencer>,
    statement: DmlStatement,
    rows: KeyRows,
}

/// A part that has passed.
struct Checked {
    table: Arc<Sequencer>,
    entered: EntryFlag,
    writes: Writes,
    on_time: OnTime,
}

/// Commits all parts at one epoch; their tables are distinct. Without parts it only checks what was read.
pub(crate) async fn commit(
    id: StatementId,
    parts: Vec<Part>,
    premises: Premises,
) -> Result<DmlOutcome, DmlError> {
    let Premises { reads, locks } = premises;
    let parts: BTreeMap<JobId, Part> = parts.into_iter().map(|p| (p.table.job, p)).collect();
    let mut tables: Tables = parts.values().map(|p| (p.table.job, Arc::clone(&p.table))).collect();
    tables.extend(reads.iter().map(|read| (read.table.job, Arc::clone(&read.table))));
    let mut keyed: Vec<KeyedPart> = Vec::with_capacity(parts.len());
    for Part { table, statement } in parts.into_values() {
        let rows = table.key_rows(&statement)?;
        keyed.push(KeyedPart { table, statement, rows });
    }
    let turns = turns_with(&mut keyed, locks, &tables).await?;
    if let Some(stale) = reads.iter().find(|read| !read.holds()) {
        // It is read again when what has changed is committed: before, it would read the same.
        let settled = stale.table.state.lock().settled();
        drop((keyed, turns));
        return match outcome(&stale.table, settled).await {
            StatementOutcome::Refused(error) => Err(error.into()),
            _ => Err(DmlError::Conflict),
        };
    }
    let (mut checked, mut late) = (Vec::with_capacity(keyed.len()), 0);
    for KeyedPart { table, statement, mut rows } in keyed {
        let on_time = table.drop_late(statement.kind, &mut rows)?;
        late += on_time.late;
        match rows.check(&table, statement.kind) {
            Ok(writes) => {
                checked.push(Checked { table, entered: statement.entered, writes, on_time });
            }
            Err(error) => {
                // It may have failed by a row that is not committed yet.
                let settled = table.state.lock().settled();
                drop(turns);
                return match outcome(&table, settled).await {
                    StatementOutcome::Committed(_) => Err(error),
                    fate => Err(refusal(fate)),
                };
            }
        }
    }
    let rows_affected = checked.iter().map(|part| part.writes.rows_affected).sum();
    let waiting = enter(id, checked, &tables)?;
    drop(turns);
    let epoch = committed(waiting).await?;
    Ok(DmlOutcome { epoch, rows_affected, kept: None, late })
}

/// The turns of all tables, with the rows at the parts' keys as they are in them. They are looked up before, unless some
/// of the turns are held already.
async fn turns_with(
    parts: &mut [KeyedPart],
    locks: Option<TableLocks>,
    tables: &Tables,
) -> Result<TableLocks, DmlError> {
    if let Some(locks) = locks {
        let turns = locks.with(tables)?;
        wait_for_room(parts).await?;
        look_up(parts).await?;
        return Ok(turns);
    }
    for _ in 0..FREE_LOOKUPS {
        look_up(parts).await?;
        let turns = TableLocks::take(tables.clone()).await;
        wait_for_room(parts).await?;
        let mut all = true;
        for part in parts.iter_mut() {
            all &= part.table.bring_up_to_date(&mut part.rows)?;
        }
        if all {
            return Ok(turns);
        }
    }
    let turns = TableLocks::take(tables.clone()).await;
    wait_for_room(parts).await?;
    look_up(parts).await?;
    Ok(turns)
}

async fn wait_for_room(parts: &[KeyedPart]) -> Result<(), DmlError> {
    for part in parts {
        part.table.wait_for_room().await?;
    }
    Ok(())
}

async fn look_up(parts: &mut [KeyedPart]) -> Result<(), DmlError> {
    let lookups = parts.iter_mut().map(|part| part.table.look_up(&mut part.rows));
    try_join_all(lookups).await.map(drop)
}

type Waiting = Vec<(Arc<Sequencer>, oneshot::Receiver<StatementOutcome>)>;

/// The epoch at which everything that was entered is committed.
async fn committed(waiting: Waiting) -> Result<Epoch, DmlError> {
    for (table, _) in &waiting {
        table.meta.request_cut(table.job);
    }
    let mut epoch = Epoch::ZERO;
    let mut failed = None;
    for (_, fate) in waiting {
        match fate.await.unwrap_or(StatementOutcome::Unknown) {
            StatementOutcome::Committed(at) => epoch = epoch.max(at),
            // Of several answers the least certain one.
            StatementOutcome::Unknown => failed = Some(StatementOutcome::Unknown),
            fate => drop(failed.get_or_insert(fate)),
        }
    }
    match failed {
        None => Ok(epoch),
        // One part is committed, so all are.
        Some(_) if epoch > Epoch::ZERO => Ok(epoch),
        Some(fate) => Err(refusal(fate)),
    }
}

/// All parts into their open epochs, or none. In any case says what to wait for.
fn enter(id: StatementId, checked: Vec<Checked>, tables: &Tables) -> Result<Waiting, DmlError> {
    let any_writes = checked.iter().any(|part| !part.writes.keys.is_empty());
    let list: Vec<Arc<Sequencer>> = tables.values().cloned().collect();
    let Some(first) = list.first() else { return Ok(Vec::new()) };
    let _seals = first.hold_seals();
    let mut states: Vec<_> = list.iter().map(|table| table.state.lock()).collect();
    if states.iter().any(|state| state.is_stopped()) {
        return Err(DmlError::Conflict);
    }
    first.check_frontend(id)?;
    let mut waiting = Vec::with_capacity(checked.len());
    for Checked { table, entered, writes, on_time } in checked {
        let Some(at) = list.iter().position(|t| t.job == table.job) else { continue };
        let state = &mut states[at];
        state.note(&on_time);
        if !writes.keys.is_empty() {
            let waits = table.write_statement(state, id, &entered, writes);
            waiting.push((table, waits));
        } else if let Err(receiver) = state.settled() {
            // That there is nothing to do may follow from what is not committed yet.
            waiting.push((table, receiver));
        }
    }
    if any_writes && list.len() > 1 {
        states.iter_mut().for_each(|state| state.tie(&list));
    }
    Ok(waiting)
}

async fn outcome(table: &Sequencer, settled: super::sequencer::Settled) -> StatementOutcome {
    match settled {
        Ok(epoch) => StatementOutcome::Committed(epoch),
        Err(waiting) => {
            table.meta.request_cut(table.job);
            waiting.await.unwrap_or(StatementOutcome::Unknown)
        }
    }
}

fn refusal(fate: StatementOutcome) -> DmlError {
    match fate {
        StatementOutcome::Refused(error) => error.into(),
        StatementOutcome::Unknown => unknown_outcome().into(),
        StatementOutcome::NotCommitted | StatementOutcome::Committed(_) => DmlError::Conflict,
    }
}
