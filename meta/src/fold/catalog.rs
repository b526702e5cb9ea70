//! Catalog entries: what may be created, replaced and dropped.

use std::collections::BTreeSet;
use std::sync::Arc;

use millrace_common::{Epoch, RelationId};
use millrace_rpc::catalog::{Relation, RelationKind};
use millrace_rpc::log::{AlterRelation, CreateRelation, CreateSchema, DropRelations, DropSchema};
use millrace_rpc::version::{BackfillState, JobVersion};

use super::{Applied, Verdict, applied};
use crate::error::VoidReason;
use crate::objects::references_of;
use crate::state::{DEFAULT_SCHEMA, JobRecord, MetaState, SourceRecord, has_job, is_derived};
use crate::timeline::Timeline;

pub fn create_relation(
    state: &mut MetaState,
    entry: &CreateRelation,
    created: &mut Vec<RelationId>,
) -> Verdict {
    let mut relation = entry.relation.clone();
    if !state.schemas.contains(&relation.schema) {
        return Err(VoidReason::UnknownSchema(relation.schema));
    }
    let mut named = relation.depends_on.iter().copied().chain(target(&relation));
    if let Some(missing) = named.find(|d| !state.relations.contains_key(&RelationId(*d))) {
        return Err(VoidReason::UnknownRelation(missing));
    }
    if target(&relation).is_some_and(|t| feeds(state, RelationId(t), &relation.depends_on)) {
        return Err(VoidReason::Cycle(relation.name));
    }
    if let Some(existing) = state.relation_named(&relation.schema, &relation.name).cloned() {
        return replace_view(state, relation, &existing, entry.or_replace);
    }
    let id = RelationId(state.next_relation_id);
    relation.id = id.0;
    relation.created_epoch = state.epoch.0;
    if has_job(&relation) {
        relation.table_count = relation.table_count.max(1);
        relation.first_table_id = state.next_table_id;
        state.next_table_id += relation.table_count;
        let process = Some(entry.process).filter(|p| state.processes.is_live(*p));
        let job = JobRecord { process: process.unwrap_or(0), ..new_job(state, &relation) };
        state.jobs.insert(id, job);
        created.push(id);
    } else {
        relation.table_count = 0;
        relation.first_table_id = 0;
    }
    if relation.kind() == RelationKind::Source || relation.has_connector() {
        let source = SourceRecord {
            history: Default::default(),
            timeline: Timeline::since(state.epoch),
            parts: Default::default(),
            marks: Vec::new(),
        };
        state.sources.insert(id, source);
    }
    state.next_relation_id += 1;
    state.relations.insert(id, Arc::new(relation));
    state.relation_added(id);
    state.catalog_version = state.number;
    Ok(Applied { relation: Some(id), ..applied(state) })
}

/// The table that a sink feeds.
fn target(relation: &Relation) -> Option<u32> {
    Some(relation.target).filter(|t| *t != 0)
}

/// Whether the content of any of `readers` follows from the table's, also by way of other sinks.
fn feeds(state: &MetaState, table: RelationId, readers: &[u32]) -> bool {
    let mut seen = BTreeSet::new();
    let mut todo: Vec<RelationId> = readers.iter().copied().map(RelationId).collect();
    while let Some(id) = todo.pop() {
        if id == table {
            return true;
        }
        if !seen.insert(id) {
            continue;
        }
        let named = state.relations.get(&id).map_or(&[][..], |r| &r.depends_on);
        todo.extend(named.iter().copied().map(RelationId));
        todo.extend_from_slice(state.inputs(id));
        let sinks = state.relations.iter().filter(|(_, r)| r.target == id.0);
        todo.extend(sinks.map(|(sink, _)| *sink));
    }
    false
}

/// A table begins empty and exact. A derived relation has no content until its backfill is done.
fn new_job(state: &MetaState, relation: &Relation) -> JobRecord {
    let mut version = JobVersion { generation: 1, ..JobVersion::default() };
    let mut inputs = Vec::new();
    let mut timeline = Timeline::default();
    if is_derived(relation) {
        version.backfill = Some(BackfillState::default());
        inputs = state.expand_views(&relation.depends_on);
    } else {
        timeline = Timeline::since(state.epoch);
    }
    JobRecord {
        version: Arc::new(version),
        timeline,
        inputs,
        process: 0,
        by_operator: false,
        horizon: Epoch::ZERO,
        watermarks: Default::default(),
    }
}

/// CREATE OR REPLACE VIEW: same id, so what reads it by name goes on.
fn replace_view(
    state: &mut MetaState,
    mut relation: Relation,
    existing: &Relation,
    or_replace: bool,
) -> Verdict {
    if !or_replace {
        return Err(VoidReason::DuplicateRelation(relation.name));
    }
    if existing.kind() != RelationKind::View || relation.kind() != RelationKind::View {
        return Err(VoidReason::NotAView(relation.name));
    }
    let id = RelationId(existing.id);
    if reaches(state, &relation.depends_on, id) {
        return Err(VoidReason::Cycle(relation.name));
    }
    if relation.query != existing.query
        && let Some(reader) = stored_reader(state, id)
    {
        return Err(VoidReason::ViewIsRead(relation.name, reader));
    }
    relation.id = existing.id;
    relation.created_epoch = existing.created_epoch;
    relation.first_table_id = 0;
    relation.table_count = 0;
    state.dependencies.remove_relation(existing);
    state.dependencies.add_relation(&relation);
    state.relations.insert(id, Arc::new(relation));
    state.catalog_version = state.number;
    Ok(Applied { relation: Some(id), ..applied(state) })
}

/// A relation whose rows were computed from the view's definition, by itself or through other views: with
/// another definition they would no longer be what its query says.
fn stored_reader(state: &MetaState, view: RelationId) -> Option<String> {
    let mut readers = state.relations.values().filter(|r| has_job(r));
    readers.find(|r| reaches(state, &r.depends_on, view)).map(|r| r.name.clone())
}

/// Whether `target` is among `from` or what they depend on.
fn reaches(state: &MetaState, from: &[u32], target: RelationId) -> bool {
    let mut seen = BTreeSet::new();
    let mut todo: Vec<RelationId> = from.iter().copied().map(RelationId).collect();
    while let Some(id) = todo.pop() {
        if id == target {
            return true;
        }
        if seen.insert(id)
            && let Some(relation) = state.relations.get(&id)
        {
            todo.extend(relation.depends_on.iter().copied().map(RelationId));
        }
    }
    false
}

pub fn drop_relations(state: &mut MetaState, entry: &DropRelations) -> Verdict {
    let ids: BTreeSet<RelationId> = entry.ids.iter().copied().map(RelationId).collect();
    if let Some(missing) = ids.iter().find(|id| !state.relations.contains_key(id)) {
        return Err(VoidReason::UnknownRelation(missing.0));
    }
    let dependants = ids.iter().flat_map(|id| state.dependencies.dependants(*id).map(|d| (d, *id)));
    if let Some((_, needed)) = dependants.filter(|(dependant, _)| !ids.contains(dependant)).min() {
        let name =
            state.relations.get(&needed).map_or_else(String::new, |r| format!("\"{}\"", r.name));
        return Err(VoidReason::DependentsExist(name));
    }
    remove(state, &ids);
    Ok(applied(state))
}

fn remove(state: &mut MetaState, ids: &BTreeSet<RelationId>) {
    // Readers before what they read.
    for id in ids.iter().rev() {
        state.relation_leaves(*id);
        state.relations.remove(id);
        state.sources.remove(id);
        state.unpublished.remove(id);
        if let Some(job) = state.jobs.remove(id) {
            for (name, bytes) in references_of(&job.version) {
                state.objects.remove(name, bytes, state.epoch);
            }
        }
    }
    state.catalog_version = state.number;
}

pub fn alter_relation(state: &mut MetaState, entry: &AlterRelation) -> Verdict {
    let id = RelationId(entry.id);
    let relation = state.relations.get_mut(&id).ok_or(VoidReason::UnknownRelation(entry.id))?;
    let relation = Arc::make_mut(relation);
    for option in &entry.options {
        match relation.options.iter_mut().find(|o| o.name == option.name) {
            Some(known) => known.value.clone_from(&option.value),
            None => relation.options.push(option.clone()),
        }
    }
    relation.options.sort_by(|a, b| a.name.cmp(&b.name));
    if let Some(paused) = entry.paused {
        relation.paused = paused;
    }
    if let Some(parallelism) = entry.parallelism
        && relation.parallelism != parallelism
    {
        relation.parallelism = parallelism;
        // What the tasks before have not committed is void.
        if let Some(job) = state.jobs.get_mut(&id) {
            Arc::make_mut(&mut job.version).generation += 1;
        }
    }
    state.catalog_version = state.number;
    Ok(applied(state))
}

pub fn create_schema(state: &mut MetaState, entry: &CreateSchema) -> Verdict {
    if !state.schemas.insert(entry.name.clone()) {
        return Err(VoidReason::DuplicateSchema(entry.name.clone()));
    }
    state.catalog_version = state.number;
    Ok(applied(state))
}

pub fn drop_schema(state: &mut MetaState, entry: &DropSchema) -> Verdict {
    if !state.schemas.contains(&entry.name) {
        return Err(VoidReason::UnknownSchema(entry.name.clone()));
    }
    let mut ids: BTreeSet<RelationId> =
        state.relations.iter().filter(|(_, r)| r.schema == entry.name).map(|(id, _)| *id).collect();
    if !ids.is_empty() {
        if !entry.cascade {
            return Err(VoidReason::DependentsExist(format!("schema \"{}\"", entry.name)));
        }
        add_dependants(state, &mut ids);
        remove(state, &ids);
    }
    // The default schema stays, empty.
    if entry.name != DEFAULT_SCHEMA {
        state.schemas.remove(&entry.name);
    }
    state.catalog_version = state.number;
    Ok(applied(state))
}

/// Adds what cannot be without these.
pub(crate) fn add_dependants(state: &MetaState, ids: &mut BTreeSet<RelationId>) {
    let mut todo: Vec<RelationId> = ids.iter().copied().collect();
    while let Some(id) = todo.pop() {
        todo.extend(state.dependencies.dependants(id).filter(|d| ids.insert(*d)));
    }
}
