//! Waiting for epochs: reads, FLUSH, and the end of a backfill (docs/design.md §4, reads).
//!
//! A fresh read needs an epoch at which all its relations are exact and that misses nothing acknowledged
//! before it began. What was acknowledged is at most the newest change of the roots behind it: at any
//! later epoch up to the head the content is the same. Where that epoch is not reached yet, the drivers of
//! all views in between are asked for it; views that must meet are asked for that very epoch.

use std::collections::BTreeSet;
use std::time::Duration;

use millrace_common::{Epoch, Generation, RelationId, SqlError, SqlState};
use millrace_rpc::call_error::LEADS_NO_LONGER;
use parking_lot::Mutex;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::epoch_waiters::WaitGuard;
use crate::shared::Shared;
use crate::state::MetaState;
use crate::status::JobState;

/// FLUSH gives up after this many read timeouts.
const FLUSH_TIMEOUTS: u32 = 30;

/// What a wait is after.
struct Goal {
    relations: Vec<RelationId>,
    /// The jobs on the way, inputs first.
    path: Vec<RelationId>,
    target: Epoch,
    aligned: bool,
}

impl Goal {
    fn new(state: &MetaState, relations: &[RelationId]) -> Goal {
        let closure = state.closure(relations);
        let target = state.newest_root_change(&closure);
        let is_derived = |id: &RelationId| !state.inputs(*id).is_empty();
        let combined = |ids: &[RelationId]| ids.iter().filter(|i| is_derived(i)).count() > 1;
        let path: Vec<RelationId> =
            closure.into_iter().filter(|id| state.jobs.contains_key(id)).collect();
        let aligned = combined(relations) || path.iter().any(|id| combined(state.inputs(*id)));
        Goal { relations: relations.to_vec(), path, target, aligned }
    }
}

/// See `Meta::read_epoch`.
pub async fn read_epoch(
    shared: &Shared,
    relations: &[RelationId],
    timeout: Option<Duration>,
    fresh: bool,
) -> Result<Epoch, SqlError> {
    let timeout = timeout.unwrap_or(shared.settings().read_wait_timeout);
    if fresh {
        prove_lead(shared, timeout).await?;
    }
    let goal = {
        let state = shared.state.read();
        if let Some(missing) = relations.iter().find(|id| !state.relations.contains_key(id)) {
            return Err(undefined(*missing));
        }
        let goal = Goal::new(&state, relations);
        let floor = if fresh { goal.target } else { Epoch::ZERO };
        match state.readable_common(relations, Epoch::MAX) {
            Some(epoch) if epoch >= floor => return Ok(epoch),
            _ => goal,
        }
    };
    let reached = |state: &MetaState| {
        let epoch = state.readable_common(&goal.relations, Epoch::MAX)?;
        (epoch >= goal.target).then_some(epoch)
    };
    let watched = goal.path.iter().chain(&goal.relations).copied().collect();
    let _asked = ask(shared, &goal);
    wait(shared, &goal, watched, shared.env.now() + timeout, timeout, reached).await
}

/// What was acknowledged before includes what another server has that leads now: the read is refused then.
pub async fn prove_lead(shared: &Shared, timeout: Duration) -> Result<(), SqlError> {
    let trouble = Mutex::new(None);
    let proof = shared.log()?.prove_lead(|error| *trouble.lock() = Some(error));
    let proof = tokio::time::timeout(timeout, proof).await;
    match proof {
        Ok(proven) => Ok(proven?),
        Err(_) => {
            let message =
                "cannot tell whether this server still leads: the object store did not answer";
            let error = SqlError::new(
                SqlState::IO_ERROR,
                format!("{message} within {} ms", timeout.as_millis()),
            )
            .with_hint(
                "Check the object store. SET read_freshness = 'any' reads without asking it.",
            );
            Err(match trouble.lock().take() {
                Some(reason) => error.with_detail(reason.to_string()),
                None => error,
            })
        }
    }
}

/// See `Meta::flush`. Jobs that fail, are paused or are being created do not count.
pub async fn flush(shared: &Shared) -> Result<(), SqlError> {
    prove_lead(shared, shared.settings().read_wait_timeout).await?;
    let goal = {
        let state = shared.state.read();
        let running: Vec<RelationId> =
            state.jobs.keys().copied().filter(|id| is_fed(shared, &state, *id)).collect();
        Goal { aligned: true, ..Goal::new(&state, &running) }
    };
    let timeout = shared.settings().read_wait_timeout.saturating_mul(FLUSH_TIMEOUTS);
    let deadline = shared.env.now() + timeout;
    let _asked = ask(shared, &goal);
    // One after the other: each wait is woken only by what its own job waits for.
    for id in &goal.relations {
        let done = |state: &MetaState| {
            let behind = state.jobs.contains_key(id)
                && is_fed(shared, state, *id)
                && state.readable_frontier(*id).is_none_or(|f| f < goal.target);
            (!behind).then_some(())
        };
        let path = shared.path_to(*id);
        let own = Goal { relations: Vec::new(), path: path.clone(), ..goal };
        wait(shared, &own, path.into_iter().collect(), deadline, timeout, done).await?;
    }
    Ok(())
}

/// Whether the job and every job behind it run, or are about to. Whether a sink is paused the catalog says: its
/// driver may not have noticed yet, neither that it is nor that it is no longer.
fn is_fed(shared: &Shared, state: &MetaState, id: RelationId) -> bool {
    if state.is_paused_sink(id) {
        return false;
    }
    let runs = |id: &RelationId| {
        !state.jobs.contains_key(id)
            || shared.job(*id).is_some_and(|h| match h.state() {
                JobState::Running | JobState::Starting | JobState::Paused => true,
                // What the driver has not said yet the log may know.
                JobState::Creating { .. } => state.is_caught_up(*id),
                _ => false,
            })
    };
    state.closure(&[id]).iter().all(runs)
}

/// Has the drivers on the way work towards the goal, for as long as the guard lives.
fn ask<'a>(shared: &'a Shared, goal: &Goal) -> WaitGuard<'a> {
    let asked = shared.waits.register(goal.path.clone(), goal.target, goal.aligned);
    shared.wake(goal.path.iter().copied());
    asked
}

/// Waits until `reached`, which is looked at again when something about the watched relations has changed.
/// `timeout`: how long that is in all, for the error at the deadline.
async fn wait<T>(
    shared: &Shared,
    goal: &Goal,
    watched: BTreeSet<RelationId>,
    deadline: Instant,
    timeout: Duration,
    reached: impl Fn(&MetaState) -> Option<T>,
) -> Result<T, SqlError> {
    let mut changes = shared.changes.watch(watched);
    loop {
        changes.mark_seen();
        {
            let state = shared.state.read();
            if let Some(result) = reached(&state) {
                return Ok(result);
            }
            if let Some(error) = hopeless(shared, &state, goal) {
                return Err(error);
            }
        }
        // In a fixed order, so that a seed repeats a run. Changes may follow each other without end; the others end it.
        tokio::select! {
            biased;
            () = shared.shutdown.cancelled() => return Err(shutting_down()),
            () = tokio::time::sleep_until(deadline) => {
                // What was reached at the last moment is reached.
                let result = reached(&shared.state.read());
                return result.ok_or_else(|| too_late(shared, goal, timeout));
            }
            () = changes.changed() => {}
        }
    }
}

/// Why no waiting will help: a relation is gone, not created yet, or its job has failed.
fn hopeless(shared: &Shared, state: &MetaState, goal: &Goal) -> Option<SqlError> {
    if let Some(gone) = goal.relations.iter().find(|id| !state.relations.contains_key(id)) {
        return Some(undefined(*gone));
    }
    if goal.relations.is_empty() {
        return None;
    }
    let behind = |id: &&RelationId| state.readable_frontier(**id).is_none_or(|f| f < goal.target);
    for id in goal.path.iter().filter(behind) {
        let name = name_of(state, *id);
        if let Some(error) = given_up(shared, state, *id) {
            return Some(error);
        }
        match shared.job(*id).map(|h| h.state()) {
            // Its process is gone: it goes on as soon as another is there.
            Some(JobState::Failed { code, .. }) if is_cut_off(code) => {}
            Some(JobState::Failed { code, reason, .. }) => {
                let message = format!("relation \"{name}\" is not up to date: its job has failed");
                return Some(failed(code, message).with_detail(reason).with_hint(
                    "See SHOW JOBS. SET read_freshness = 'any' reads its last consistent content.",
                ));
            }
            // The driver's state lags behind the version: a finished backfill is only not published yet.
            Some(JobState::Creating { .. } | JobState::WaitingForInputs { .. })
                if is_filling(state, *id) =>
            {
                return Some(being_created(shared, &name, *id));
            }
            Some(JobState::Starting) if state.readable_frontier(*id).is_none() => {
                return Some(being_created(shared, &name, *id));
            }
            _ => {}
        }
    }
    None
}

/// Whether a job has failed because the process that it ran on does not answer, or has been replaced.
pub(crate) fn is_cut_off(code: SqlState) -> bool {
    matches!(code, SqlState::CONNECTION_FAILURE | SqlState::CANNOT_CONNECT_NOW)
}

/// See [`MetaState::given_up`].
pub(crate) fn given_up(shared: &Shared, state: &MetaState, id: RelationId) -> Option<SqlError> {
    state.given_up(id, || progress(shared, id))
}

/// Why a first scan or rebuild does not begin: something that the job reads is detached.
fn waits_in_vain(shared: &Shared, state: &MetaState, id: RelationId) -> Option<SqlError> {
    let job = state.jobs.get(&id)?;
    let waits = job.version.backfill.as_ref().is_some_and(|b| b.snapshot_epoch == 0);
    let input = state.detached_behind(&job.inputs).filter(|_| waits)?;
    given_up(shared, state, input)
}

fn is_filling(state: &MetaState, id: RelationId) -> bool {
    state.jobs.get(&id).is_some_and(|j| j.version.backfill.is_some())
}

fn being_created(shared: &Shared, name: &str, id: RelationId) -> SqlError {
    not_ready(format!("relation \"{name}\" is still being created"))
        .with_detail(progress(shared, id))
        .with_hint("Wait for it with WAIT, or watch it in SHOW JOBS.")
}

/// How far a first scan is, in a sentence.
fn progress(shared: &Shared, id: RelationId) -> String {
    shared.job(id).map(|h| h.state()).map_or_else(String::new, |s| match s {
        JobState::Creating { rows_read, rows_total: 0 }
        | JobState::Rebuilding { rows_read, rows_total: 0 } => {
            format!("{rows_read} rows have been read so far.")
        }
        JobState::Creating { rows_read, rows_total }
        | JobState::Rebuilding { rows_read, rows_total } => {
            format!("{rows_read} of about {rows_total} rows have been read.")
        }
        JobState::WaitingForInputs { .. } => {
            "It waits for an input that is being created.".to_owned()
        }
        JobState::Failed { reason, .. } => format!("Its job has failed: {reason}"),
        _ => "Its job is starting.".to_owned(),
    })
}

/// Names the first laggard in dependency order: it holds the others back.
fn too_late(shared: &Shared, goal: &Goal, timeout: Duration) -> SqlError {
    let state = shared.state.read();
    let behind = |id: &&RelationId| state.readable_frontier(**id).is_none_or(|f| f < goal.target);
    let laggard = goal.path.iter().find(behind).or(goal.path.first());
    let (name, what, age) = match laggard {
        Some(id) => {
            let job = shared.job(*id).map_or("stopped", |h| h.state().name());
            (name_of(&state, *id), job, oldest_missing(shared, &state, *id))
        }
        None => ("?".to_owned(), "unknown", None),
    };
    let missing = age
        .map(|ms| format!(" The oldest change that it does not have yet is {ms} ms old."))
        .unwrap_or_default();
    SqlError::new(
        SqlState::QUERY_CANCELED,
        format!("relation \"{name}\" did not catch up within {} ms", timeout.as_millis()),
    )
    .with_detail(format!("Its job is {what}.{missing}"))
    .with_hint("Raise read_wait_timeout, or SET read_freshness = 'any' to read older content.")
}

/// For how many milliseconds the oldest change of the roots behind a relation is known that the relation does not have.
/// Epochs tell: the distance of the relation's own epoch from that change would not, because it follows the clock
/// for as long as nothing changes. Of a relation so far behind that the roots' timelines no longer reach back to it it is
/// an upper bound. `None`: it is behind for another reason.
pub(crate) fn oldest_missing(shared: &Shared, state: &MetaState, id: RelationId) -> Option<u64> {
    let frontier = state.readable_frontier(id)?;
    let closure = state.closure(&[id]);
    let roots = closure.iter().filter(|id| state.inputs(**id).is_empty());
    let oldest = roots.filter_map(|root| state.oldest_change(*root, frontier)).min()?;
    Some(shared.env.now_ms().saturating_sub(oldest.millis()))
}

/// See `Meta::wait_created`.
pub async fn wait_created(
    shared: &Shared,
    id: RelationId,
    cancel: &CancellationToken,
) -> Result<(), SqlError> {
    let mut changes = shared.changes.watch([id]);
    loop {
        changes.mark_seen();
        {
            let state = shared.state.read();
            let Some(relation) = state.relations.get(&id) else { return Err(undefined(id)) };
            let Some(job) = state.jobs.get(&id) else { return Ok(()) };
            // A rebuild is waited for like a first scan.
            let rebuilds = job.version.is_rebuilding();
            let given_up = given_up(shared, &state, id).filter(|_| !rebuilds);
            if let Some(error) = given_up.or_else(|| waits_in_vain(shared, &state, id)) {
                return Err(error);
            }
            match shared.job(id).map(|h| h.state()) {
                Some(
                    JobState::Failed { code, reason, .. } | JobState::Stalled { code, reason, .. },
                ) => {
                    return Err(failed(
                        code,
                        format!("creating \"{}\" failed: {reason}", relation.name),
                    ));
                }
                // There is no end to wait for. What has been written goes on when it is resumed.
                _ if state.is_paused_sink(id) => return Ok(()),
                Some(JobState::Starting) | None => {}
                // Committed is not enough: its worker publishes it after that.
                Some(_)
                    if job.version.backfill.is_none() && state.readable_frontier(id).is_some() =>
                {
                    return Ok(());
                }
                Some(_) => {}
            }
        }
        // In a fixed order, so that a seed repeats a run. Changes may follow each other without end; the others end it.
        tokio::select! {
            biased;
            () = shared.shutdown.cancelled() => return Err(shutting_down()),
            () = cancel.cancelled() => {
                return Err(SqlError::new(
                    SqlState::QUERY_CANCELED,
                    "canceling statement due to user request",
                ));
            }
            () = changes.changed() => {}
        }
    }
}

/// What ends every wait when the server stops.
pub fn shutting_down() -> SqlError {
    SqlError::new(SqlState::ADMIN_SHUTDOWN, "the server is shutting down")
        .with_routine(LEADS_NO_LONGER)
}

/// See `Meta::wait_rebuilt`.
pub async fn wait_rebuilt(
    shared: &Shared,
    id: RelationId,
    cancel: &CancellationToken,
) -> Result<(), SqlError> {
    let mut changes = shared.changes.watch([id]);
    loop {
        changes.mark_seen();
        {
            let state = shared.state.read();
            let Some(job) = state.jobs.get(&id) else { return Err(undefined(id)) };
            if job.version.detached.is_some() {
                return Err(given_up(shared, &state, id).unwrap_or_else(|| undefined(id)));
            }
            if let Some(error) = waits_in_vain(shared, &state, id) {
                return Err(error);
            }
            // What the generations before failed with is no news.
            let own = Generation(job.version.generation);
            let begun = shared.job(id).filter(|handle| handle.generation() == Some(own));
            let filled = job.version.backfill.is_none() && state.readable_frontier(id).is_some();
            if filled || state.is_paused_sink(id) {
                return Ok(());
            }
            if let Some(
                JobState::Failed { code, reason, .. } | JobState::Stalled { code, reason, .. },
            ) = begun.map(|h| h.state())
            {
                let message = format!("rebuilding \"{}\" failed: {reason}", name_of(&state, id));
                return Err(failed(code, message).with_hint("It is tried again. See SHOW JOBS."));
            }
        }
        // In a fixed order, so that a seed repeats a run. Changes may follow each other without end; the others end it.
        tokio::select! {
            biased;
            () = shared.shutdown.cancelled() => return Err(shutting_down()),
            () = cancel.cancelled() => {
                return Err(SqlError::new(
                    SqlState::QUERY_CANCELED,
                    "canceling statement due to user request",
                ));
            }
            () = changes.changed() => {}
        }
    }
}

pub(crate) fn not_ready(message: String) -> SqlError {
    SqlError::new(SqlState::OBJECT_NOT_IN_PREREQUISITE_STATE, message)
}

/// Damaged or lost storage keeps its own code; to a reader any other cause is a job that does not run.
fn failed(code: SqlState, message: String) -> SqlError {
    const OWN: [SqlState; 5] = [
        SqlState::DATA_CORRUPTED,
        SqlState::SYSTEM_ERROR,
        SqlState::DISK_FULL,
        SqlState::IO_ERROR,
        SqlState::NOT_NULL_VIOLATION,
    ];
    match OWN.contains(&code) {
        true => SqlError::new(code, message),
        false => not_ready(message),
    }
}

fn undefined(id: RelationId) -> SqlError {
    SqlError::new(SqlState::UNDEFINED_TABLE, format!("relation with id {id} does not exist"))
}

fn name_of(state: &MetaState, id: RelationId) -> String {
    state.relations.get(&id).map_or_else(|| id.to_string(), |r| r.name.clone())
}
