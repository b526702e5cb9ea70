//! What holds of every state, as a function: called after every record in debug builds and by the
//! property tests.

use millrace_common::RelationId;
use millrace_common::collections::HashSet;
use millrace_rpc::sequence::Sequence;
use millrace_rpc::version::JobVersion;

use crate::state::{MetaState, has_job, is_derived};

/// Jobs from which on a debug build does not check the whole state after every record.
const MANY_JOBS: usize = 128;
/// It checks every so many records then.
const RECORDS: u64 = 64;

/// As `check`, after a record: of a state with many jobs only now and then, because a check looks at all of them.
pub fn check_after(state: &MetaState) -> Result<(), String> {
    if state.jobs.len() > MANY_JOBS && !state.number.is_multiple_of(RECORDS) {
        return Ok(());
    }
    #[cfg(test)]
    if crate::tests::simulation::is_under_way() {
        // It checks each record of its bucket once, not at each process.
        return Ok(());
    }
    #[cfg(test)]
    return crate::jobs::visits::uncounted(|| check(state));
    #[cfg(not(test))]
    check(state)
}

/// The first broken invariant, in words.
pub fn check(state: &MetaState) -> Result<(), String> {
    check_catalog(state)?;
    check_processes(state)?;
    for (id, job) in state.jobs.iter() {
        let Some(relation) = state.relations.get(id).filter(|r| has_job(r)) else {
            return Err(format!("job {id} has no relation"));
        };
        let tables = relation.first_table_id..relation.first_table_id + relation.table_count;
        if tables.end > state.next_table_id || tables.is_empty() {
            return Err(format!("state tables {tables:?} of {id} were never handed out"));
        }
        let version = &job.version;
        let rebuilt = version.rebuilt_tables..version.rebuilt_tables + relation.table_count;
        let ours = |table: &u32| match version.rebuilt_tables {
            0 => tables.contains(table),
            _ => *table == tables.start || rebuilt.contains(table),
        };
        if let Some(run) = version.runs.iter().find(|r| !ours(&r.table_id)) {
            return Err(format!("run {} of {id} is of table {}", run.run_id, run.table_id));
        }
        if !is_derived(relation) && (!job.inputs.is_empty() || job.version.backfill.is_some()) {
            return Err(format!("root {id} has inputs"));
        }
        if job.version.epoch > state.epoch.0 {
            return Err(format!("job {id} is ahead of the log"));
        }
        job.timeline.check().map_err(|e| format!("timeline of {id}: {e}"))?;
        check_sequences(version).map_err(|e| format!("job {id}: {e}"))?;
        if version.backfill.is_some() && job.timeline.anchor().is_some() && !version.is_rebuilding()
        {
            return Err(format!("job {id} is readable before its backfill is done"));
        }
    }
    for (id, source) in &state.sources {
        source.timeline.check().map_err(|e| format!("timeline of {id}: {e}"))?;
        let history = source.history.iter().zip(source.history.iter().skip(1));
        if history.into_iter().any(|(a, b)| a.0 >= b.0) {
            return Err(format!("history of source {id} does not ascend"));
        }
    }
    state.check_dependencies()?;
    let objects = &state.objects;
    state.backups.check(|object| objects.is_referenced(object) || objects.is_garbage(object))?;
    objects.check(state.jobs.values().map(|j| j.version.as_ref()))
}

/// All that a job has written is ordered by commit and part, and of commits that it has.
fn check_sequences(version: &JobVersion) -> Result<(), String> {
    let tail = version.tail.iter().map(|s| Sequence::stored(s.sequence));
    if let Some((a, b)) = tail.clone().zip(tail.clone().skip(1)).find(|(a, b)| a >= b) {
        return Err(format!("slice {b} comes after slice {a}"));
    }
    let runs = version.runs.iter().map(|r| Sequence::stored(r.sequence));
    match tail.chain(runs).max() {
        Some(newest) if newest.commit() > version.commits => {
            Err(format!("{newest} is there after {} commits", version.commits))
        }
        _ => Ok(()),
    }
}

/// Jobs run on live processes, and deleted names are remembered of what may still be named.
fn check_processes(state: &MetaState) -> Result<(), String> {
    let processes = &state.processes;
    processes.check()?;
    let mut jobs = state.jobs.iter().filter(|(_, job)| job.process != 0);
    if let Some((id, job)) = jobs.find(|(_, job)| !processes.is_live(job.process)) {
        return Err(format!("job {id} is placed on process {}, which is fenced", job.process));
    }
    let mut deleted = state.objects.deleted_incarnations();
    match deleted.find(|incarnation| processes.has_ended(*incarnation, state.term)) {
        Some(incarnation) => Err(format!("deleted names of {incarnation} are remembered in vain")),
        None => Ok(()),
    }
}

fn check_catalog(state: &MetaState) -> Result<(), String> {
    let mut names = HashSet::default();
    for (id, relation) in &state.relations {
        if relation.id != id.0 || relation.id >= state.next_relation_id {
            return Err(format!("relation {id} is filed under another id"));
        }
        if !names.insert((&relation.schema, &relation.name)) {
            return Err(format!("two relations are called \"{}\"", relation.name));
        }
        if !state.schemas.contains(&relation.schema) {
            return Err(format!("relation {id} is in no schema"));
        }
        if has_job(relation) != state.jobs.contains_key(id) {
            return Err(format!("relation {id} has lost its job"));
        }
        let target = Some(relation.target).filter(|t| *t != 0);
        let named = relation.depends_on.iter().copied().chain(target).map(RelationId);
        let read = state.inputs(*id).iter().copied();
        if let Some(dep) = named.chain(read).find(|d| !state.relations.contains_key(d)) {
            return Err(format!("relation {id} depends on {dep}, which is gone"));
        }
    }
    Ok(())
}
