//! Frontiers and exactness, derived from the state alone (docs/design.md §4).
//!
//! A root is exact at every epoch up to the log's head. A derived relation that committed at epoch `c`
//! is exact from `c` for as long as every input is known to have kept the content it had at `c`; where
//! no input changes that reaches the head by itself. How far that is, the fold keeps per job
//! (`Dependencies::known_until`), so a question costs the same however many views lie behind one another. Two busy views have common exact epochs because a
//! job that skips epochs does so onto one grid ([`coarsest_grid_point`]).

use std::collections::BTreeSet;
use std::time::Duration;

use millrace_common::{Epoch, RelationId};

use crate::state::{MetaState, is_derived};
use crate::timeline::{GRIDS_MS, Segment, Timeline};

impl MetaState {
    fn timeline(&self, id: RelationId) -> Option<&Timeline> {
        match self.jobs.get(&id) {
            Some(job) => Some(&job.timeline),
            None => self.sources.get(&id).map(|s| &s.timeline),
        }
    }

    /// Epoch of the relation's newest change.
    pub fn last_change(&self, id: RelationId) -> Epoch {
        self.timeline(id).map_or(Epoch::ZERO, Timeline::last_change)
    }

    /// The first epoch after `seen` at which the relation is known to have changed.
    pub fn next_change(&self, id: RelationId, seen: Epoch) -> Option<Epoch> {
        self.timeline(id)?.next_after(seen)
    }

    /// An epoch no later than the relation's first change after `seen`, and just that as far as its timeline
    /// reaches back; `None`: it has not changed.
    pub fn oldest_change(&self, id: RelationId, seen: Epoch) -> Option<Epoch> {
        self.timeline(id)?.oldest_after(seen)
    }

    /// The newest segment of the relation's timeline that begins at or before `at`, and whether it is the open one.
    pub(crate) fn segment_at(&self, id: RelationId, at: Epoch) -> Option<(Segment, bool)> {
        self.timeline(id)?.segment_at(at)
    }

    /// The last epoch through which the relation is known to keep the content it has at `at`, given
    /// that it is exact there. At least `at`.
    pub fn stable_until(&self, id: RelationId, at: Epoch) -> Epoch {
        match self.segment_at(id, at) {
            Some((_, true)) => self.open_hi(id).max(at),
            Some((segment, false)) => segment.hi.max(at),
            None => at,
        }
    }

    /// Where the open segment ends now.
    fn open_hi(&self, id: RelationId) -> Epoch {
        self.dependencies.known_until(id).min(self.epoch)
    }

    /// The epoch at which the relation's content changes by itself next.
    pub fn due(&self, id: RelationId) -> Option<Epoch> {
        let due = self.jobs.get(&id)?.version.due;
        (due > 0).then_some(Epoch(due))
    }

    /// The newest epoch `≤ limit` at which the relation is exact; `None`: none is known.
    pub fn exact_at_most(&self, id: RelationId, limit: Epoch) -> Option<Epoch> {
        if self.is_exact_root_at(id, limit) {
            return Some(limit.min(self.epoch));
        }
        let (segment, open) = self.segment_at(id, limit)?;
        let hi = if open { self.open_hi(id) } else { segment.hi };
        Some(hi.min(limit))
    }

    /// Whether this is a root whose content at the epoch is known whatever its timeline has dropped: a table since its
    /// creation, as far as its versions are kept, a source as far back as its offsets are kept.
    fn is_exact_root_at(&self, id: RelationId, epoch: Epoch) -> bool {
        let Some(relation) = self.relations.get(&id) else { return false };
        if is_derived(relation) || epoch.0 < relation.created_epoch {
            return false;
        }
        match self.sources.get(&id) {
            Some(source) if !self.jobs.contains_key(&id) => {
                source.history.front().is_some_and(|(oldest, _)| *oldest <= epoch)
            }
            _ => self
                .jobs
                .get(&id)
                .is_some_and(|job| job.timeline.anchor().is_some() && epoch >= job.horizon),
        }
    }

    /// The newest epoch `≤ limit` and `≤` the head at which all of them are exact.
    pub fn exact_common(&self, ids: &[RelationId], limit: Epoch) -> Option<Epoch> {
        common(ids, limit.min(self.epoch), |id, at| self.exact_at_most(id, at))
    }

    /// The oldest epoch after `after` at which all of them are exact; `None`: there is none up to the head.
    pub fn next_exact_common(&self, ids: &[RelationId], after: Epoch) -> Option<Epoch> {
        let mut at = after.next(0);
        loop {
            if at > self.epoch {
                return None;
            }
            let mut settled = true;
            for id in ids {
                let exact = self.exact_at_least(*id, at)?;
                settled &= exact == at;
                at = exact;
            }
            if settled {
                return Some(at);
            }
        }
    }

    /// The oldest epoch `≥ limit` at which the relation is exact; `None`: none is known.
    fn exact_at_least(&self, id: RelationId, limit: Epoch) -> Option<Epoch> {
        match self.exact_at_most(id, limit) {
            Some(at) if at == limit => Some(limit),
            _ => self.timeline(id)?.next_after(limit),
        }
    }

    /// As `exact_at_most`, of what workers have published: a commit is readable only after its worker
    /// has been told of it. Not for the fold, which knows the log alone.
    pub fn readable_at_most(&self, id: RelationId, limit: Epoch) -> Option<Epoch> {
        let published = self.oldest_unpublished(id).map_or(Epoch::MAX, Epoch::prev);
        self.exact_at_most(id, limit.min(published))
    }

    /// The epoch of the oldest commit that the job's worker has perhaps not published.
    pub fn oldest_unpublished(&self, id: RelationId) -> Option<Epoch> {
        self.unpublished.get(&id)?.front().map(|(_, epoch)| *epoch)
    }

    /// As `exact_common`, of what workers have published.
    pub fn readable_common(&self, ids: &[RelationId], limit: Epoch) -> Option<Epoch> {
        common(ids, limit.min(self.epoch), |id, at| self.readable_at_most(id, at))
    }

    /// The newest epoch at which the relation can be read.
    pub fn readable_frontier(&self, id: RelationId) -> Option<Epoch> {
        self.readable_at_most(id, self.epoch)
    }

    /// The newest epoch at which the relation is exact.
    pub fn frontier(&self, id: RelationId) -> Option<Epoch> {
        self.exact_at_most(id, self.epoch)
    }

    /// `ids` and everything they are derived from, inputs first.
    pub fn closure(&self, ids: &[RelationId]) -> Vec<RelationId> {
        let mut seen = BTreeSet::new();
        let mut todo = ids.to_vec();
        while let Some(id) = todo.pop() {
            if seen.insert(id) {
                todo.extend_from_slice(self.inputs(id));
            }
        }
        // Inputs have smaller ids.
        seen.into_iter().collect()
    }

    /// The newest change of any root that `closure` contains: at this epoch and later, up to the
    /// head, nothing acknowledged is missing.
    pub fn newest_root_change(&self, closure: &[RelationId]) -> Epoch {
        let roots = closure.iter().filter(|id| self.inputs(**id).is_empty());
        roots.map(|id| self.last_change(*id)).max().unwrap_or(Epoch::ZERO)
    }

    /// Whether an input of the job has changed in `(own, at]`, or its own content does by itself.
    pub fn job_changed(&self, id: RelationId, own: Epoch, at: Epoch) -> bool {
        self.due(id).is_some_and(|due| due <= at) || self.inputs_changed(id, own, at)
    }

    /// Whether an input of the job changes in `(own, at]`.
    pub fn inputs_changed(&self, id: RelationId, own: Epoch, at: Epoch) -> bool {
        self.inputs(id).iter().any(|i| self.stable_until(*i, own) < at)
    }
}

/// Goes back from `at` until all agree. Every round that does not settle moves to an older segment of
/// some relation, so this ends.
fn common(
    ids: &[RelationId],
    mut at: Epoch,
    exact_at_most: impl Fn(RelationId, Epoch) -> Option<Epoch>,
) -> Option<Epoch> {
    loop {
        let mut settled = true;
        for id in ids {
            let exact = exact_at_most(*id, at)?;
            settled &= exact == at;
            at = exact;
        }
        if settled {
            return Some(at);
        }
    }
}

/// A late job goes forward in steps of at most this, so that it never skips a point of the coarsest
/// grid, and an epoch's work stays bounded.
pub const LONGEST_STEP: Duration = Duration::from_secs(10);

/// The newest point of the coarsest grid that has one in `(after, upto]`; the barrier interval may be a third, finest
/// grid. Whatever the speed of two
/// jobs, they meet at the coarse points.
pub fn coarsest_grid_point(after: Epoch, upto: Epoch, finest: Option<Duration>) -> Option<Epoch> {
    let finest = finest.map(|d| (d.as_millis() as u64).max(1));
    GRIDS_MS.into_iter().chain(finest).find_map(|step| {
        let point = Epoch::from_millis(upto.millis() / step * step);
        (point > after && point <= upto).then_some(point)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_grid_prefers_coarse_points() {
        let at = |s: u64, ms: u64| Epoch::from_millis(s * 1_000 + ms);
        let quarter = Some(Duration::from_millis(250));
        let point = |a, b| coarsest_grid_point(a, b, quarter);
        assert_eq!(point(at(100, 10), at(100, 700)), Some(at(100, 500)));
        assert_eq!(point(at(100, 10), at(102, 700)), Some(at(102, 0)));
        assert_eq!(point(at(108, 0), at(113, 700)), Some(at(110, 0)));
        assert_eq!(point(at(110, 0), at(113, 700)), Some(at(113, 0)));
        assert_eq!(point(at(100, 510), at(100, 700)), None);
    }
}
