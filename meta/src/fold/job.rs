//! Entries that change a job's version: commits, run edits, generations, the start of a backfill.

use std::collections::BTreeSet;
use std::sync::Arc;

use millrace_common::fault_injection::is_planted;
use millrace_common::{Epoch, RelationId};
use millrace_rpc::log::{EditVersion, Published, RaiseGenerations, StartBackfill, Transaction};
use millrace_rpc::sequence::Sequence;
use millrace_rpc::version::{
    BackfillState, Flushed, JobCommit, JobVersion, PublishHandle, RunMeta, VersionEdit,
};
use millrace_rpc::vnode_set;

use super::detach::drop_runs;
use super::process::check_named;
use super::{Applied, Verdict, applied};
use crate::commit_volume::bytes_of;
use crate::error::VoidReason;
use crate::objects::Objects;
use crate::state::{JobRecord, MetaState, is_derived, skips_snapshot};
use crate::timeline::Timeline;

/// Watermarks of a job over time that are kept at least.
const WATERMARKS_KEPT: usize = 1_024;

/// The epoch of its inputs that a job stands at; `MAX`: it needs no change of theirs, because it has no snapshot yet or
/// is detached.
pub fn position(job: &JobRecord) -> Epoch {
    if job.version.detached.is_some() {
        return Epoch::MAX;
    }
    match &job.version.backfill {
        Some(b) if b.snapshot_epoch > 0 => Epoch(b.snapshot_epoch),
        Some(_) => Epoch::MAX,
        None => Epoch(job.version.epoch),
    }
}

pub fn commit(state: &mut MetaState, entry: &JobCommit) -> Verdict {
    let epoch = check_commit(state, entry)?;
    take_commit(state, entry, epoch)
}

/// All tables of a transaction, or none: nothing is taken before everything is checked.
pub fn transaction(state: &mut MetaState, entry: &Transaction) -> Verdict {
    let mut jobs = BTreeSet::new();
    for commit in &entry.commits {
        let root = state.relations.get(&RelationId(commit.job)).is_some_and(|r| !is_derived(r));
        if !root || !jobs.insert(commit.job) {
            return Err(VoidReason::Malformed);
        }
        check_commit(state, commit)?;
    }
    for commit in &entry.commits {
        take_commit(state, commit, state.epoch)?;
    }
    Ok(applied(state))
}

/// The epoch that a commit is of, if it is valid.
fn check_commit(state: &MetaState, entry: &JobCommit) -> Result<Epoch, VoidReason> {
    let id = RelationId(entry.job);
    let head = state.epoch;
    let job = state.jobs.get(&id).ok_or(VoidReason::UnknownRelation(entry.job))?;
    let version = &job.version;
    if version.generation != entry.generation && !is_planted("late-commit-taken") {
        return Err(VoidReason::OtherGeneration);
    }
    let follows = match entry.number {
        0 => entry.prev_epoch == version.epoch,
        number => number == version.commits + 1,
    };
    if !follows {
        let taken = (1..=version.commits).contains(&entry.number);
        return Err(if taken { VoidReason::TakenBefore } else { VoidReason::OtherPredecessor });
    }
    let root = state.relations.get(&id).is_some_and(|r| !is_derived(r));
    if root && entry.epoch != 0 {
        return Err(VoidReason::BadEpoch);
    }
    let epoch = if root { head } else { Epoch(entry.epoch) };
    check_epoch(version, epoch, head, root)?;
    check_references(state, version, entry)?;
    check_sequences(version, entry)?;
    Ok(epoch)
}

/// What a commit adds is of its number, and its slices are in order. Earlier releases wrote counters, which come before
/// all numbers.
fn check_sequences(version: &JobVersion, entry: &JobCommit) -> Result<(), VoidReason> {
    let fits = |sequence: u64| match Sequence::stored(sequence).commit() {
        0 => true,
        commit => commit == entry.number,
    };
    let runs = entry.edit.iter().flat_map(|e| &e.add_runs).map(|r| r.sequence);
    let slices = entry.slices.iter().map(|s| s.sequence);
    let newest = version.tail.last().map(|s| s.sequence);
    let numbered = newest.is_some_and(|s| Sequence::stored(s).commit() > 0);
    let in_order = !numbered || newest.into_iter().chain(slices.clone()).is_sorted_by(|a, b| a < b);
    let sets = entry.slices.iter().all(|s| vnode_set::is_valid(&s.vnodes));
    match in_order && sets && runs.chain(slices).all(fits) {
        true => Ok(()),
        false => Err(VoidReason::Malformed),
    }
}

/// Puts a checked commit into the state.
fn take_commit(state: &mut MetaState, entry: &JobCommit, epoch: Epoch) -> Verdict {
    let id = RelationId(entry.job);
    let head = state.epoch;
    let root = state.relations.get(&id).is_some_and(|r| !is_derived(r));
    let job = state.jobs.get(&id).ok_or(VoidReason::UnknownRelation(entry.job))?;
    // What the inputs did after the previous commit ends the exact segment that began with it.
    let anchor = job.timeline.anchor();
    let was_exact_until = anchor.map(|anchor| match root {
        true => epoch.prev(),
        // Between the content before and the rebuilt one nothing is known.
        false if job.version.is_rebuilding() => anchor,
        false => {
            let due = state.due(id).map_or(Epoch::MAX, Epoch::prev);
            stable_inputs(state, &job.inputs, anchor).min(due).min(epoch.prev())
        }
    });

    note_watermarks(state, entry, epoch);
    let Some(job) = state.jobs.get_mut(&id) else {
        return Err(VoidReason::UnknownRelation(entry.job));
    };
    let version = Arc::make_mut(&mut job.version);
    let finished = absorb(version, entry, epoch, &mut state.objects, head);
    if finished && version.is_rebuilding() {
        end_rebuild(version, epoch, &mut state.objects, head);
    }
    if finished {
        let bytes = bytes_of(entry);
        match was_exact_until {
            Some(hi) => job.timeline.advance(hi, epoch, entry.changed.then_some(bytes)),
            // The backfill's result: content from its snapshot epoch on.
            None => job.timeline.advance(epoch.prev(), epoch, Some(bytes)),
        }
    }
    state.content_moved(id);
    let record = state.number;
    state.unpublished.entry(id).or_default().push_back((record, epoch));
    for statement in &entry.statements {
        state.statements.insert(*statement, epoch);
    }
    Ok(Applied { epoch, relation: Some(id), ..applied(state) })
}

/// The oldest epoch that a reader of the relation stands at; `MAX` without readers.
pub fn oldest_reader(state: &MetaState, id: RelationId) -> Epoch {
    let readers = state.dependencies.readers(id).filter_map(|reader| state.jobs.get(&reader));
    readers.map(position).min().unwrap_or(Epoch::MAX)
}

/// Watermarks only rise. What no reader needs is kept for a while, for reads as of an epoch.
fn note_watermarks(state: &mut MetaState, entry: &JobCommit, epoch: Epoch) {
    let id = RelationId(entry.job);
    if entry.watermarks.is_empty() || !add_watermarks(state, entry, epoch) {
        return;
    }
    let kept = state.jobs.get(&id).map_or(0, |job| job.watermarks.len());
    if kept <= WATERMARKS_KEPT {
        return;
    }
    let needed = oldest_reader(state, id);
    let Some(job) = state.jobs.get_mut(&id) else { return };
    while job.watermarks.len() > WATERMARKS_KEPT
        && job.watermarks.get(1).is_some_and(|(second, _)| *second <= needed)
    {
        job.watermarks.pop_front();
    }
}

/// Whether any has risen.
fn add_watermarks(state: &mut MetaState, entry: &JobCommit, epoch: Epoch) -> bool {
    let Some(job) = state.jobs.get_mut(&RelationId(entry.job)) else { return false };
    let mut next = job.watermarks.back().map_or(Vec::new(), |(_, columns)| columns.clone());
    let mut moved = false;
    for new in &entry.watermarks {
        match next.iter_mut().find(|w| w.column == new.column) {
            Some(old) => {
                moved |= new.value > old.value;
                old.value = old.value.max(new.value);
            }
            None => {
                moved = true;
                next.push(*new);
            }
        }
    }
    if moved {
        if job.watermarks.back().is_some_and(|(e, _)| *e >= epoch) {
            job.watermarks.pop_back();
        }
        job.watermarks.push_back((epoch, next));
    }
    moved
}

fn stable_inputs(state: &MetaState, inputs: &[RelationId], at: Epoch) -> Epoch {
    inputs.iter().map(|i| state.stable_until(*i, at)).min().unwrap_or(state.epoch)
}

fn check_epoch(
    version: &JobVersion,
    epoch: Epoch,
    head: Epoch,
    root: bool,
) -> Result<(), VoidReason> {
    let fits = match &version.backfill {
        Some(b) => b.snapshot_epoch > 0 && epoch.0 == b.snapshot_epoch,
        // A derived job ends at an epoch that is over: before this record's.
        None => epoch.0 > version.epoch && (root || epoch < head),
    };
    if fits { Ok(()) } else { Err(VoidReason::BadEpoch) }
}

/// New objects must not have been deleted and come from a live process; replaced runs must be there.
fn check_references(
    state: &MetaState,
    version: &JobVersion,
    entry: &JobCommit,
) -> Result<(), VoidReason> {
    let staged = entry.publish.iter().flat_map(|p| &p.parts);
    entry.slices.iter().chain(staged).try_for_each(|s| check_named(state, &s.object))?;
    entry.edit.as_ref().map_or(Ok(()), |edit| check_edit(state, version, edit))
}

fn check_edit(
    state: &MetaState,
    version: &JobVersion,
    edit: &VersionEdit,
) -> Result<(), VoidReason> {
    edit.add_runs.iter().try_for_each(|r| check_named(state, &r.object))?;
    let known = |id: &u64| version.runs.iter().any(|r| r.run_id == *id);
    if !edit.remove_runs.iter().all(known) || edit.add_runs.iter().any(|r| known(&r.run_id)) {
        return Err(VoidReason::UnknownRun);
    }
    let flushed = edit.flushed.as_ref();
    let mut sets = edit.add_runs.iter().map(|r| &r.vnodes).chain(flushed.map(|f| &f.vnodes));
    let to_come = |f: &Flushed| f.commit > version.commits;
    if !sets.all(|set| vnode_set::is_valid(set)) || flushed.is_some_and(to_come) {
        return Err(VoidReason::Malformed);
    }
    Ok(())
}

/// What an edit adds is as new as the newest of what it holds: flushed slices and replaced runs.
fn check_order(version: &JobVersion, edit: &VersionEdit) -> Result<(), VoidReason> {
    let replaced = version.runs.iter().filter(|r| edit.remove_runs.contains(&r.run_id));
    let newest = replaced.map(|r| r.sequence).max().unwrap_or(0).max(edit.flushed_to());
    let numbered = |r: &&RunMeta| Sequence::stored(r.sequence).commit() > 0;
    match edit.add_runs.iter().filter(numbered).all(|r| r.sequence <= newest) {
        true => Ok(()),
        false => Err(VoidReason::Malformed),
    }
}

/// Puts a valid commit into the version. Returns whether the version is one of full content: not in
/// the middle of a backfill.
fn absorb(
    version: &mut JobVersion,
    entry: &JobCommit,
    epoch: Epoch,
    objects: &mut Objects,
    head: Epoch,
) -> bool {
    for slice in &entry.slices {
        let mut slice = slice.clone();
        if slice.epoch == 0 {
            slice.epoch = epoch.0;
        }
        objects.add(&slice.object, slice.length);
        version.tail.push(slice);
    }
    if let Some(edit) = &entry.edit {
        absorb_edit(version, edit, epoch, objects, head);
    }
    forget_published(version, entry.published, objects, head);
    if let Some(handle) = &entry.publish {
        handle.parts.iter().for_each(|part| objects.add(&part.object, part.length));
        version.publish.push(PublishHandle { epoch: epoch.0, ..handle.clone() });
    }
    version.epoch = epoch.0;
    version.commits += 1;
    version.row_count += entry.row_count_delta;
    version.counters.extend(entry.counters.iter().map(|(k, v)| (k.clone(), *v)));
    for new in &entry.watermarks {
        match version.watermarks.iter_mut().find(|w| w.column == new.column) {
            Some(old) => old.value = old.value.max(new.value),
            None => version.watermarks.push(*new),
        }
    }
    version.source_watermarks.clone_from(&entry.source_watermarks);
    version.due = entry.due;
    if let Some(before) = version.backfill.take() {
        version.backfill = backfill_after(&before, entry.backfill.as_ref());
    }
    version.backfill.is_none()
}

/// The commit has brought the difference between the content before and the rebuilt one. The table in which that was
/// collected has served; so has the generation that wrote it.
fn end_rebuild(version: &mut JobVersion, epoch: Epoch, objects: &mut Objects, head: Epoch) {
    version.swapped_from = std::mem::take(&mut version.content_epoch);
    version.swapped_at = epoch.0;
    version.generation += 1;
    let collected = version.rebuilt_tables;
    drop_runs(version, objects, head, |table| table == collected);
}

/// The target has everything up to `sequence`: what was staged for it is garbage.
fn forget_published(version: &mut JobVersion, sequence: u64, objects: &mut Objects, head: Epoch) {
    if sequence <= version.published {
        return;
    }
    version.published = sequence;
    version.publish.retain(|handle| {
        let done = handle.sequence <= sequence;
        if done {
            handle.parts.iter().for_each(|part| objects.remove(&part.object, part.length, head));
        }
        !done
    });
}

pub fn published(state: &mut MetaState, entry: &Published) -> Verdict {
    let id = RelationId(entry.job);
    let head = state.epoch;
    let job = state.jobs.get_mut(&id).ok_or(VoidReason::UnknownRelation(entry.job))?;
    if job.version.generation != entry.generation {
        return Err(VoidReason::OtherGeneration);
    }
    let version = Arc::make_mut(&mut job.version);
    forget_published(version, entry.sequence, &mut state.objects, head);
    Ok(applied(state))
}

/// A commit that brings no positions, or only finished ones, ends the backfill.
fn backfill_after(before: &BackfillState, after: Option<&BackfillState>) -> Option<BackfillState> {
    let after = after?;
    let scanned = !after.positions.is_empty() && after.positions.iter().all(|p| p.done);
    let done = scanned && !after.swap;
    (!done).then(|| BackfillState { snapshot_epoch: before.snapshot_epoch, ..after.clone() })
}

fn absorb_edit(
    version: &mut JobVersion,
    edit: &VersionEdit,
    epoch: Epoch,
    objects: &mut Objects,
    head: Epoch,
) {
    // Additions first: an object that both loses and gains a reference never becomes garbage.
    for run in &edit.add_runs {
        let mut run = run.clone();
        if run.min_epoch == 0 && run.max_epoch == 0 {
            run.min_epoch = epoch.0;
            run.max_epoch = epoch.0;
        }
        objects.add(&run.object, run.length);
        version.runs.push(run);
    }
    version.runs.retain(|run| {
        let gone = edit.remove_runs.contains(&run.run_id);
        if gone {
            objects.remove(&run.object, run.length, head);
        }
        !gone
    });
    if edit.flushed_to() > 0 {
        version.tail.retain(|slice| {
            let gone = edit.retires(slice);
            if gone {
                objects.remove(&slice.object, slice.length, head);
            }
            !gone
        });
    }
}

pub fn edit_version(state: &mut MetaState, entry: &EditVersion) -> Verdict {
    let id = RelationId(entry.job);
    let head = state.epoch;
    let job = state.jobs.get(&id).ok_or(VoidReason::UnknownRelation(entry.job))?;
    if entry.generation != 0 && entry.generation != job.version.generation {
        return Err(VoidReason::OtherGeneration);
    }
    check_edit(state, &job.version, &entry.edit)?;
    check_order(&job.version, &entry.edit)?;
    let Some(job) = state.jobs.get_mut(&id) else {
        return Err(VoidReason::UnknownRelation(entry.job));
    };
    let version = Arc::make_mut(&mut job.version);
    let epoch = Epoch(version.epoch);
    absorb_edit(version, &entry.edit, epoch, &mut state.objects, head);
    job.horizon = job.horizon.max(Epoch(entry.horizon));
    Ok(applied(state))
}

pub fn raise_generations(state: &mut MetaState, entry: &RaiseGenerations) -> Verdict {
    if let Some(missing) = entry.jobs.iter().find(|j| !state.jobs.contains_key(&RelationId(**j))) {
        return Err(VoidReason::UnknownRelation(*missing));
    }
    if entry.jobs.is_empty() {
        for (_, job) in state.jobs.iter_mut() {
            Arc::make_mut(&mut job.version).generation += 1;
        }
    }
    let named: BTreeSet<u32> = entry.jobs.iter().copied().collect();
    for id in named {
        if let Some(job) = state.jobs.get_mut(&RelationId(id)) {
            Arc::make_mut(&mut job.version).generation += 1;
        }
    }
    Ok(applied(state))
}

pub fn start_backfill(state: &mut MetaState, entry: &StartBackfill) -> Verdict {
    let id = RelationId(entry.job);
    let job = state.jobs.get(&id).ok_or(VoidReason::UnknownRelation(entry.job))?;
    if job.version.generation != entry.generation {
        return Err(VoidReason::OtherGeneration);
    }
    if job.version.backfill.as_ref().is_none_or(|b| b.snapshot_epoch != 0) {
        return Err(VoidReason::BadEpoch);
    }
    if !fix_snapshot_epoch(state, id) {
        return Err(VoidReason::InputsNotReady);
    }
    Ok(applied(state))
}

/// One epoch for all inputs, the newest at which all are exact; `false`: there is none yet. The epoch
/// is before this record's, so whatever else the record commits does not matter.
pub fn fix_snapshot_epoch(state: &mut MetaState, id: RelationId) -> bool {
    let Some(job) = state.jobs.get(&id) else { return false };
    let waits = job.version.backfill.as_ref().is_some_and(|b| b.snapshot_epoch == 0);
    if !waits || job.version.detached.is_some() {
        return false;
    }
    let Some(epoch) = state.exact_common(&job.inputs, state.epoch.prev()) else { return false };
    if epoch.0 <= job.version.content_epoch
        || state.detached_behind(&job.inputs).is_some()
        || state.is_rebuilding_behind(&job.inputs)
    {
        return false;
    }
    let starts_with_changes = state.relations.get(&id).is_some_and(|r| skips_snapshot(r));
    let Some(job) = state.jobs.get_mut(&id) else { return false };
    let version = Arc::make_mut(&mut job.version);
    if starts_with_changes {
        version.backfill = None;
        version.epoch = epoch.0;
        job.timeline = Timeline::since(epoch);
        state.content_moved(id);
    } else if let Some(backfill) = &mut version.backfill {
        backfill.snapshot_epoch = epoch.0;
    }
    true
}
