//! Entries that take a job from its inputs' changes and give it a new beginning (docs/design.md §4, "Retention").
//!
//! A detached job keeps what it had computed and nothing else: the state of its operators is worthless without the
//! changes that it has missed. A rebuild gives it new state tables. What it computes is collected beside the content
//! that the relation has; the commit that ends the backfill replaces that content by the difference, so what reads the
//! relation goes on.

use std::sync::Arc;

use millrace_common::{Epoch, RelationId};
use millrace_rpc::catalog::RelationKind;
use millrace_rpc::log::{Detach, Rebuild};
use millrace_rpc::version::{ARRIVALS, BackfillState, Detached, JobVersion, PublishHandle};

use super::{Verdict, applied};
use crate::error::VoidReason;
use crate::objects::Objects;
use crate::state::{MetaState, is_derived};
use crate::timeline::Timeline;

pub fn detach(state: &mut MetaState, entry: &Detach) -> Verdict {
    let id = RelationId(entry.job);
    let job = state.jobs.get(&id).ok_or(VoidReason::UnknownRelation(entry.job))?;
    if job.version.generation != entry.generation {
        return Err(VoidReason::OtherGeneration);
    }
    if !state.relations.get(&id).is_some_and(|r| is_derived(r)) || job.version.detached.is_some() {
        return Err(VoidReason::Malformed);
    }
    let detached = Detached { epoch: state.epoch.0, reason: entry.reason.clone() };
    begin_anew(state, id, |version| {
        version.detached = Some(detached);
        version.content_epoch = 0;
    });
    Ok(applied(state))
}

pub fn rebuild(state: &mut MetaState, entry: &Rebuild) -> Verdict {
    let id = RelationId(entry.job);
    let relation = state.relations.get(&id).ok_or(VoidReason::UnknownRelation(entry.job))?;
    if !is_derived(relation) {
        return Err(VoidReason::Malformed);
    }
    let tables = relation.table_count;
    if let Some(input) = state.detached_behind(state.inputs(id)) {
        let name = |id| state.relations.get(&id).map_or_else(String::new, |r| r.name.clone());
        return Err(VoidReason::InputDetached(name(id), name(input)));
    }
    let first = state.next_table_id;
    state.next_table_id += tables;
    begin_anew(state, id, |version| {
        version.detached = None;
        version.rebuilt_tables = first;
        version.backfill = Some(BackfillState::default());
    });
    Ok(applied(state))
}

/// Ends the job's generation and gives up all of its state but the relation's content, as of the last epoch through
/// which that is known to be exact.
fn begin_anew(state: &mut MetaState, id: RelationId, change: impl FnOnce(&mut JobVersion)) {
    let head = state.epoch;
    let content = content_until(state, id);
    let Some(relation) = state.relations.get(&id) else { return };
    let (rows, is_sink) = (relation.first_table_id, relation.kind() == RelationKind::Sink);
    let Some(job) = state.jobs.get_mut(&id) else { return };
    let version = Arc::make_mut(&mut job.version);
    version.generation += 1;
    // Rows that are added to an append-only relation go behind those it has.
    version.counters.retain(|name, _| name.starts_with(ARRIVALS));
    version.due = 0;
    version.backfill = None;
    match content.filter(|_| !is_sink) {
        Some(until) => {
            if job.timeline.anchor().is_some_and(|anchor| anchor < until) {
                job.timeline.advance(until.prev(), until, None);
            }
            version.epoch = until.0;
            // Versions below the horizon may be gone; the content is the same there.
            version.content_epoch = until.max(job.horizon.min(head.prev())).0;
            drop_runs(version, &mut state.objects, head, |table| table != rows);
        }
        // A first scan that did not come to its end, or a sink, which has no rows.
        None => {
            job.timeline = Timeline::default();
            version.epoch = 0;
            version.row_count = 0;
            version.content_epoch = 0;
            version.backfill = Some(BackfillState::default());
            drop_runs(version, &mut state.objects, head, |_| true);
            // Parts of a snapshot that did not come to its end were published to nobody, and never will be.
            let (held, published) =
                std::mem::take(&mut version.publish).into_iter().partition(|handle| handle.held);
            version.publish = published;
            let held: Vec<PublishHandle> = held;
            for part in held.iter().flat_map(|handle| &handle.parts) {
                state.objects.remove(&part.object, part.length, head);
            }
            for slice in std::mem::take(&mut version.tail) {
                state.objects.remove(&slice.object, slice.length, head);
            }
        }
    }
    change(version);
    state.content_moved(id);
}

/// The last epoch before this record's through which the relation's content is known; `None`: it has none.
fn content_until(state: &MetaState, id: RelationId) -> Option<Epoch> {
    let anchor = state.jobs.get(&id)?.timeline.anchor()?;
    Some(state.dependencies.known_until(id).min(state.epoch.prev()).max(anchor))
}

/// Takes the runs of some state tables out of the version.
pub fn drop_runs(
    version: &mut JobVersion,
    objects: &mut Objects,
    head: Epoch,
    gone: impl Fn(u32) -> bool,
) {
    version.runs.retain(|run| {
        let gone = gone(run.table_id);
        if gone {
            objects.remove(&run.object, run.length, head);
        }
        !gone
    });
}

impl MetaState {
    /// Whether the job no longer follows its inputs.
    pub fn is_detached(&self, id: RelationId) -> bool {
        self.jobs.get(&id).is_some_and(|job| job.version.detached.is_some())
    }

    /// Whether one of these, or what they are derived from, is being rebuilt: its old content is no snapshot to begin at.
    pub fn is_rebuilding_behind(&self, ids: &[RelationId]) -> bool {
        let rebuilds =
            |id: &RelationId| self.jobs.get(id).is_some_and(|j| j.version.is_rebuilding());
        self.closure(ids).iter().any(rebuilds)
    }

    /// A detached relation among these and all they are derived from: the first one, inputs first.
    pub fn detached_behind(&self, ids: &[RelationId]) -> Option<RelationId> {
        self.closure(ids).into_iter().find(|id| self.is_detached(*id))
    }
}
