//! Which jobs read which relations, and what follows from it. The fold keeps it up to date, so that a commit costs
//! what it changes, not a walk over all jobs (docs/design.md §10).
//!
//! All of it follows from the catalog, the jobs' inputs and their timelines. So it is no part of a stored snapshot, and
//! [`Dependencies::of`] computes it anew. Inputs are fixed when a job is created and have smaller ids than the job.

use std::collections::BTreeSet;

use millrace_common::collections::HashMap;
use millrace_common::{Epoch, RelationId};
use millrace_rpc::catalog::Relation;

use crate::state::MetaState;

/// See the module.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Dependencies {
    /// Per relation the jobs that read it directly.
    readers: HashMap<RelationId, BTreeSet<RelationId>>,
    /// Per relation those that name it in their definition, or feed it.
    named_by: HashMap<RelationId, BTreeSet<RelationId>>,
    /// Per relation how many jobs read several derived relations and have this one among those or behind them.
    combinations: HashMap<RelationId, usize>,
    /// Per relation the last epoch through which the content of its open segment is known, where that does not reach
    /// the head by itself.
    known_until: HashMap<RelationId, Epoch>,
}

impl Dependencies {
    /// Those of a state, whatever it has kept.
    pub fn of(state: &MetaState) -> Dependencies {
        let mut all = Dependencies::default();
        for (id, job) in state.jobs.iter() {
            all.add_job(*id, &job.inputs, &combined(state, &job.inputs));
        }
        for relation in state.relations.values() {
            all.add_relation(relation);
        }
        // Inputs first: their bounds decide.
        for id in state.jobs.keys() {
            let until = known_until(state, &all, *id);
            all.set_known_until(*id, until);
        }
        all
    }

    /// The jobs that read the relation directly, ascending.
    pub fn readers(&self, id: RelationId) -> impl Iterator<Item = RelationId> {
        self.readers.get(&id).into_iter().flatten().copied()
    }

    /// The relations that name it in their definition, and sinks that feed it.
    pub fn named_by(&self, id: RelationId) -> impl Iterator<Item = RelationId> {
        self.named_by.get(&id).into_iter().flatten().copied()
    }

    /// Those that cannot be without it: they name it, feed it, or read it through plain views.
    pub fn dependants(&self, id: RelationId) -> impl Iterator<Item = RelationId> {
        self.named_by(id).chain(self.readers(id))
    }

    /// Whether some job reads several derived relations of which this is one, or comes from one.
    pub fn feeds_combination(&self, id: RelationId) -> bool {
        self.combinations.contains_key(&id)
    }

    /// The last epoch through which the relation keeps the content of its open segment; `MAX`: up to the head.
    pub fn known_until(&self, id: RelationId) -> Epoch {
        self.known_until.get(&id).copied().unwrap_or(Epoch::MAX)
    }

    /// Returns whether it is another than before.
    fn set_known_until(&mut self, id: RelationId, until: Epoch) -> bool {
        let before = match until == Epoch::MAX {
            true => self.known_until.remove(&id),
            false => self.known_until.insert(id, until),
        };
        before.unwrap_or(Epoch::MAX) != until
    }

    fn add_job(&mut self, id: RelationId, inputs: &[RelationId], combined: &[RelationId]) {
        for input in inputs {
            self.readers.entry(*input).or_default().insert(id);
        }
        for relation in combined {
            *self.combinations.entry(*relation).or_default() += 1;
        }
    }

    fn remove_job(&mut self, id: RelationId, inputs: &[RelationId], combined: &[RelationId]) {
        for input in inputs {
            remove_from(&mut self.readers, *input, id);
        }
        for relation in combined {
            if let Some(count) = self.combinations.get_mut(relation) {
                *count -= 1;
                if *count == 0 {
                    self.combinations.remove(relation);
                }
            }
        }
        self.known_until.remove(&id);
    }

    /// The definition counts from now on.
    pub(crate) fn add_relation(&mut self, relation: &Relation) {
        for named in named(relation) {
            self.named_by.entry(named).or_default().insert(RelationId(relation.id));
        }
    }

    /// The definition counts no longer.
    pub(crate) fn remove_relation(&mut self, relation: &Relation) {
        for named in named(relation) {
            remove_from(&mut self.named_by, named, RelationId(relation.id));
        }
    }
}

fn remove_from(
    map: &mut HashMap<RelationId, BTreeSet<RelationId>>,
    key: RelationId,
    id: RelationId,
) {
    if let Some(set) = map.get_mut(&key) {
        set.remove(&id);
        if set.is_empty() {
            map.remove(&key);
        }
    }
}

/// What a relation's definition names, with the table that it feeds.
pub(crate) fn named(relation: &Relation) -> impl Iterator<Item = RelationId> {
    let target = Some(relation.target).filter(|t| *t != 0);
    relation.depends_on.iter().copied().chain(target).map(RelationId)
}

/// The relations that must meet for a job with these inputs; none where it reads at most one derived relation.
fn combined(state: &MetaState, inputs: &[RelationId]) -> Vec<RelationId> {
    let derived = inputs.iter().filter(|i| !state.inputs(**i).is_empty()).count();
    if derived >= 2 { state.closure(inputs) } else { Vec::new() }
}

/// See [`Dependencies::known_until`]. Reads that of the inputs.
fn known_until(state: &MetaState, dependencies: &Dependencies, id: RelationId) -> Epoch {
    let Some(job) = state.jobs.get(&id) else { return Epoch::MAX };
    let Some(anchor) = job.timeline.anchor() else { return Epoch::MAX };
    // Its content does not follow its inputs any more, or not yet.
    if job.version.detached.is_some() || job.version.is_rebuilding() {
        return anchor;
    }
    let stable = |input: &RelationId| match state.segment_at(*input, anchor) {
        Some((_, true)) => dependencies.known_until(*input).max(anchor),
        Some((segment, false)) => segment.hi.max(anchor),
        None => anchor,
    };
    let inputs = job.inputs.iter().map(stable).min().unwrap_or(Epoch::MAX);
    // Rows that expire change the content by themselves.
    let due = state.due(id).map_or(Epoch::MAX, Epoch::prev);
    inputs.min(due).max(anchor)
}

impl MetaState {
    /// Computes the dependencies anew: after the parts they follow from were replaced.
    pub fn rebuild_dependencies(&mut self) {
        self.dependencies = Dependencies::of(self);
    }

    /// The relation, and its job if it has one, are in the state now.
    pub(crate) fn relation_added(&mut self, id: RelationId) {
        if let Some(job) = self.jobs.get(&id) {
            let combined = combined(self, &job.inputs);
            self.dependencies.add_job(id, &job.inputs, &combined);
        }
        if let Some(relation) = self.relations.get(&id) {
            self.dependencies.add_relation(relation);
        }
    }

    /// The relation and its job are about to go. Everything it reads is still there.
    pub(crate) fn relation_leaves(&mut self, id: RelationId) {
        if let Some(job) = self.jobs.get(&id) {
            let combined = combined(self, &job.inputs);
            self.dependencies.remove_job(id, &job.inputs, &combined);
        }
        if let Some(relation) = self.relations.get(&id) {
            self.dependencies.remove_relation(relation);
        }
    }

    /// The relation's timeline, or the epoch at which it changes by itself, is another than before. Looks at the
    /// jobs that are derived from it, each once, and only as far as it matters to them.
    pub(crate) fn content_moved(&mut self, id: RelationId) {
        // Ids ascend from inputs to readers: a job's turn comes after all its inputs'.
        let mut todo = BTreeSet::from([id]);
        while let Some(next) = todo.pop_first() {
            let before = self.dependencies.known_until(next);
            let until = known_until(self, &self.dependencies, next);
            if until > before && next != id {
                // Nothing will be published of it: its readers learn it from here.
                self.moved.insert(next);
            }
            if self.dependencies.set_known_until(next, until) || next == id {
                todo.extend(self.dependencies.readers(next));
            }
        }
    }

    /// The kept dependencies are those that follow from the state.
    pub fn check_dependencies(&self) -> Result<(), String> {
        let expected = Dependencies::of(self);
        if expected == self.dependencies {
            return Ok(());
        }
        let differ = |id: &&RelationId| {
            expected.known_until(**id) != self.dependencies.known_until(**id)
                || !expected.dependants(**id).eq(self.dependencies.dependants(**id))
        };
        let first = self.relations.keys().find(differ).map(|id| id.to_string());
        Err(format!("dependencies differ from the jobs, first of {}", first.unwrap_or_default()))
    }
}
