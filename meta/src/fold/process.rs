//! Entries about processes: who takes part, what runs where, and what was written for nothing.

use std::collections::BTreeSet;
use std::sync::Arc;

use millrace_common::RelationId;
use millrace_common::fault_injection::is_planted;
use millrace_rpc::log::{DrainProcess, FenceProcess, GiveUp, PlaceJobs, RegisterProcess};

use super::{Verdict, applied};
use crate::error::VoidReason;
use crate::objects;
use crate::processes::Process;
use crate::state::{JobRecord, MetaState};

/// The same nonce again changes nothing.
pub fn register(state: &mut MetaState, entry: &RegisterProcess) -> Verdict {
    if entry.nonce == 0 {
        return Err(VoidReason::Malformed);
    }
    if state.processes.is_fenced_nonce(entry.nonce) {
        return Err(VoidReason::FencedProcess);
    }
    if state.processes.by_nonce(entry.nonce).is_none() {
        let incarnation = state.processes.next(state.term);
        let (epoch, number) = (state.epoch, state.number);
        let registration = entry.clone();
        let process = Process { registration, epoch, number, drained: false };
        state.processes.register(incarnation, process);
        // With the first one, terms are no incarnations any more.
        forget_deleted(state);
    }
    Ok(applied(state))
}

/// What ran on these processes runs nowhere until it is placed.
pub fn fence(state: &mut MetaState, entry: &FenceProcess) -> Verdict {
    let was_given = |id: &u64| (1..=state.processes.last()).contains(id);
    if let Some(unknown) = entry.incarnations.iter().find(|id| !was_given(id)) {
        return Err(VoidReason::UnknownProcess(*unknown));
    }
    let ids = entry.incarnations.iter().copied();
    let fenced: BTreeSet<u64> = ids.filter(|id| state.processes.fence(*id)).collect();
    if fenced.is_empty() {
        return Ok(applied(state));
    }
    for (_, job) in state.jobs.iter_mut() {
        if fenced.contains(&job.process) {
            set_process(job, 0, false);
        }
    }
    forget_deleted(state);
    Ok(applied(state))
}

pub fn place(state: &mut MetaState, entry: &PlaceJobs) -> Verdict {
    if !state.processes.is_live(entry.incarnation) {
        return Err(VoidReason::FencedProcess);
    }
    if let Some(missing) = entry.jobs.iter().find(|j| !state.jobs.contains_key(&RelationId(**j))) {
        return Err(VoidReason::UnknownRelation(*missing));
    }
    if entry.jobs.is_empty() {
        for (_, job) in state.jobs.iter_mut() {
            set_process(job, entry.incarnation, entry.by_operator);
        }
    }
    for id in &entry.jobs {
        if let Some(job) = state.jobs.get_mut(&RelationId(*id)) {
            set_process(job, entry.incarnation, entry.by_operator);
        }
    }
    Ok(applied(state))
}

/// What the process before still does with the job is void.
fn set_process(job: &mut JobRecord, incarnation: u64, by_operator: bool) {
    job.by_operator = by_operator;
    if job.process != incarnation {
        job.process = incarnation;
        if !is_planted("two-owners") {
            Arc::make_mut(&mut job.version).generation += 1;
        }
    }
}

/// Its jobs stay where they are until they are placed elsewhere.
pub fn drain(state: &mut MetaState, entry: &DrainProcess) -> Verdict {
    match state.processes.drain(entry.incarnation, !entry.undo) {
        true => Ok(applied(state)),
        false => Err(VoidReason::FencedProcess),
    }
}

pub fn give_up(state: &mut MetaState, entry: &GiveUp) -> Verdict {
    if !state.processes.is_live(entry.incarnation) {
        return Err(VoidReason::FencedProcess);
    }
    let is_own =
        |name: &String| objects::parse(name).is_some_and(|(of, _)| of == entry.incarnation);
    if !entry.names.iter().all(is_own) {
        return Err(VoidReason::Malformed);
    }
    let epoch = state.epoch;
    entry.names.iter().for_each(|name| state.objects.discard(name, epoch));
    Ok(applied(state))
}

/// Whether an entry may name the object: it was not deleted, and its writer is live, unless something names it already.
pub fn check_named(state: &MetaState, name: &str) -> Result<(), VoidReason> {
    if state.objects.is_deleted(name) {
        return Err(VoidReason::DeletedObject);
    }
    let is_fenced = objects::parse(name).is_some_and(|(of, _)| state.processes.is_fenced(of));
    if is_fenced && !state.objects.is_referenced(name) {
        return Err(VoidReason::FencedProcess);
    }
    Ok(())
}

/// Nothing of a fenced process can be named any more: its deleted names need no memory.
pub fn forget_deleted(state: &mut MetaState) {
    let (processes, term) = (&state.processes, state.term);
    state.objects.forget_deleted(|incarnation| processes.has_ended(incarnation, term));
}
