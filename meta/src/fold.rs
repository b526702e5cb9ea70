//! The fold: state × record → state, and a verdict for every entry (docs/design.md §10).
//!
//! It reads nothing but its arguments: no clock, no randomness, no I/O. Every entry is validated on its
//! own, before it changes anything; a void entry changes nothing and the rest stand. A record of an
//! older term moves only the position in the log.

mod backup;
mod catalog;
mod detach;
mod job;
mod moved;
mod process;

pub(crate) use catalog::add_dependants;
pub(crate) use job::position;
pub(crate) use process::fence as fence_processes;
use std::sync::Arc;

use millrace_common::{Epoch, RelationId};
use millrace_rpc::log::{
    DeleteObjects, Entry, LogEntry, LogRecord, SetSetting, SetUser, SourceAdvance, SourceFile,
    SourceSplit, SplitMarkAt, SplitOffset, UserChange,
};
use millrace_rpc::store_id::StoreId;
use millrace_rpc::version::StatementId;

use crate::error::VoidReason;
use crate::objects;
use crate::state::{MetaState, SourceRecord};

/// What became of an entry.
pub type Verdict = Result<Applied, VoidReason>;

/// An entry took effect at the record's epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Applied {
    /// The record's epoch; of a job's commit, the epoch committed.
    pub epoch: Epoch,
    /// The record's number.
    pub record: u64,
    /// What was created, replaced or found.
    pub relation: Option<RelationId>,
}

/// Positions of a source kept at least, for `AS OF` reads; more while a reader needs them.
const SOURCE_HISTORY: usize = 8_192;

/// Folds a record whose bytes have the checksum `crc`. The caller has checked that it is the next one.
pub fn apply(state: &mut MetaState, record: &LogRecord, crc: u32) -> Vec<Verdict> {
    state.number = record.number;
    state.crc = crc;
    let stale = record.term < state.term
        || (record.term == state.term && record.leader != state.leader)
        || record.epoch <= state.epoch.0;
    if stale {
        return record.entries.iter().map(|_| Err(VoidReason::OldTerm)).collect();
    }
    if record.term > state.term {
        state.term = record.term;
        state.leader = record.leader;
        process::forget_deleted(state);
    }
    state.epoch = Epoch(record.epoch);
    // One that a build without ids has left out of a snapshot is given anew: the last one counts.
    state.store_id = StoreId::from_bytes(&record.store_id).or(state.store_id);
    let mut created = Vec::new();
    let verdicts = record.entries.iter().map(|entry| take_in(state, entry, &mut created)).collect();
    // Last, so that what the record's commits made exact counts.
    for id in created {
        job::fix_snapshot_epoch(state, id);
    }
    backup::fill(state);
    #[cfg(debug_assertions)]
    if let Err(broken) = crate::invariants::check_after(state) {
        debug_assert!(false, "after record {}: {broken}", record.number);
    }
    verdicts
}

/// An entry; what became of a definition, or a change by an operator, is kept under the id by which it was asked for.
fn take_in(state: &mut MetaState, entry: &LogEntry, created: &mut Vec<RelationId>) -> Verdict {
    let LogEntry { statement, entry } = entry;
    let entry = entry.as_ref().ok_or(VoidReason::Malformed)?;
    let applied = apply_entry(state, entry, *statement, created)?;
    if let Some(id) = statement {
        state.definitions.insert(*id, &applied);
    }
    Ok(applied)
}

fn apply_entry(
    state: &mut MetaState,
    entry: &Entry,
    statement: Option<StatementId>,
    created: &mut Vec<RelationId>,
) -> Verdict {
    match entry {
        Entry::CreateRelation(e) => catalog::create_relation(state, e, created),
        Entry::DropRelations(e) => catalog::drop_relations(state, e),
        Entry::CreateSchema(e) => catalog::create_schema(state, e),
        Entry::DropSchema(e) => catalog::drop_schema(state, e),
        Entry::Commit(e) => job::commit(state, e),
        Entry::Transaction(e) => job::transaction(state, e),
        Entry::EditVersion(e) => job::edit_version(state, e),
        Entry::RaiseGenerations(e) => job::raise_generations(state, e),
        Entry::StartBackfill(e) => job::start_backfill(state, e),
        Entry::SourceAdvance(e) => advance_source(state, e),
        Entry::SetSetting(e) => Ok(set_setting(state, e)),
        Entry::DeleteObjects(e) => delete_objects(state, e),
        Entry::Tick(_) => Ok(applied(state)),
        Entry::AlterRelation(e) => catalog::alter_relation(state, e),
        Entry::SetUser(e) => set_user(state, e),
        Entry::Published(e) => job::published(state, e),
        Entry::Detach(e) => detach::detach(state, e),
        Entry::Rebuild(e) => detach::rebuild(state, e),
        Entry::MoveParts(e) => moved::move_parts(state, e),
        Entry::RegisterProcess(e) => process::register(state, e),
        Entry::FenceProcess(e) => process::fence(state, e),
        Entry::PlaceJobs(e) => process::place(state, e),
        Entry::GiveUp(e) => process::give_up(state, e),
        Entry::DrainProcess(e) => process::drain(state, e),
        Entry::CreateBackup(e) => backup::create(state, e, statement),
        Entry::ReleaseBackup(e) => backup::release(state, e),
    }
}

/// Applied at the record's epoch.
fn applied(state: &MetaState) -> Applied {
    Applied { epoch: state.epoch, record: state.number, relation: None }
}

fn set_setting(state: &mut MetaState, entry: &SetSetting) -> Applied {
    match &entry.value {
        Some(value) => drop(state.settings.insert(entry.name.clone(), value.clone())),
        None => drop(state.settings.remove(&entry.name)),
    }
    state.catalog_version = state.number;
    applied(state)
}

fn set_user(state: &mut MetaState, entry: &SetUser) -> Verdict {
    let (name, exists) = (&entry.name, state.users.contains_key(&entry.name));
    match UserChange::try_from(entry.change) {
        Ok(UserChange::Create) if exists => return Err(VoidReason::DuplicateUser(name.clone())),
        Ok(UserChange::Create | UserChange::Alter) => {
            state.users.insert(name.clone(), entry.verifier.clone());
        }
        Ok(UserChange::Drop) if !exists => return Err(VoidReason::UnknownUser(name.clone())),
        Ok(UserChange::Drop) => {
            state.users.remove(name);
        }
        Ok(UserChange::Unspecified) | Err(_) => return Err(VoidReason::Malformed),
    }
    state.catalog_version = state.number;
    Ok(applied(state))
}

/// Several advances of one source in one record would share an epoch: the later one wins it.
fn advance_source(state: &mut MetaState, entry: &SourceAdvance) -> Verdict {
    let id = RelationId(entry.source);
    let epoch = state.epoch;
    // A table's connector has no reader but the table, which knows where it is.
    let fed = state.jobs.contains_key(&id);
    let kept = if fed { 1 } else { SOURCE_HISTORY };
    let source = state.sources.get_mut(&id).ok_or(VoidReason::UnknownRelation(entry.source))?;
    let mut next = source.newest().to_vec();
    let mut moved = add_parts(source, entry)?;
    for new in &entry.offsets {
        match next.iter_mut().find(|o| o.split == new.split) {
            Some(old) if new.offset < old.offset => return Err(VoidReason::OffsetsGoBack),
            Some(old) => {
                moved |= new.offset > old.offset;
                old.offset = new.offset;
            }
            None => {
                moved = true;
                next.push(*new);
            }
        }
    }
    if !moved && entry.marks.is_empty() {
        return Err(VoidReason::OffsetsGoBack);
    }
    for mark in &entry.marks {
        let before = source.newest().iter().find(|o| o.split == mark.split);
        let offset = before.map_or_else(|| source.parts.start(mark.split), |o| o.offset);
        source.marks.push(SplitMarkAt { epoch: epoch.0, mark: *mark, offset });
    }
    if source.history.back().is_some_and(|(e, _)| *e == epoch) {
        source.history.pop_back();
    } else {
        // What it brings is counted in offsets, by the history.
        source.timeline.advance(epoch.prev(), epoch, Some(0));
    }
    source.history.push_back((epoch, next));
    let full = source.history.len() > kept;
    if !fed {
        state.content_moved(id);
    }
    if full {
        trim_history(state, id, kept, fed);
    }
    Ok(applied(state))
}

/// Forgets positions beyond `kept` that no reader needs.
fn trim_history(state: &mut MetaState, id: RelationId, kept: usize, fed: bool) {
    let needed = if fed { Epoch::MAX } else { job::oldest_reader(state, id) };
    let Some(source) = state.sources.get_mut(&id) else { return };
    while source.history.len() > kept
        && source.history.get(1).is_some_and(|(second, _)| *second <= needed)
    {
        source.history.pop_front();
    }
}

/// Takes in discovered splits and files; says whether there are any. Void without a change when one is
/// known already.
fn add_parts(source: &mut SourceRecord, entry: &SourceAdvance) -> Result<bool, VoidReason> {
    let parts = &source.parts;
    let known_split = |s: &SourceSplit| parts.splits.iter().any(|k| k.split == s.split);
    if entry.splits.iter().any(known_split) {
        return Err(VoidReason::OffsetsGoBack);
    }
    let backwards = |new: &SplitOffset| {
        source.newest().iter().any(|o| o.split == new.split && o.offset > new.offset)
    };
    if entry.offsets.iter().any(backwards) {
        return Err(VoidReason::OffsetsGoBack);
    }
    if !entry.splits.is_empty() {
        Arc::make_mut(&mut source.parts.splits).extend(entry.splits.iter().cloned());
    }
    if !entry.files.is_empty() {
        let files = Arc::make_mut(&mut source.parts.files);
        for file in &entry.files {
            let last = files.iter().rfind(|f| f.split == file.split);
            let start = last.map_or(0, |f| f.start + f.length);
            files.push(SourceFile { start, ..file.clone() });
        }
    }
    Ok(!entry.splits.is_empty() || !entry.files.is_empty())
}

/// Only what nothing names, no backup either: garbage, or an object of a fenced process.
fn delete_objects(state: &mut MetaState, entry: &DeleteObjects) -> Verdict {
    let deletable = |name: &String| {
        !state.objects.is_referenced(name)
            && !state.backups.hold(name)
            && (state.objects.is_garbage(name)
                || objects::parse(name)
                    .is_some_and(|(writer, _)| state.processes.has_ended(writer, state.term)))
    };
    if !entry.names.iter().all(deletable) {
        return Err(VoidReason::ObjectInUse);
    }
    for name in &entry.names {
        state.objects.mark_deleted(name);
    }
    process::forget_deleted(state);
    Ok(applied(state))
}
