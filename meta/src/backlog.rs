//! How much has changed in the inputs of a job since it last cut, in bytes, and how far a step of so many bytes reaches
//! (docs/design.md §4, barriers).
//!
//! Of tables and views the commits tell: what they added to the store, operators' state included, so rather too much
//! than too little. Of a source only its offsets are known before it is read.

use std::time::Duration;

use millrace_common::{Epoch, RelationId};

use crate::state::MetaState;

/// What one step of a job may take in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepLimit {
    /// Bytes of its inputs' changes.
    pub bytes: u64,
    /// What a row of a source counts for.
    pub source_row_bytes: u64,
}

impl StepLimit {
    /// No limit.
    pub const NONE: StepLimit = StepLimit { bytes: u64::MAX, source_row_bytes: 0 };
}

/// How wide a row of a source is whose offsets count bytes.
const ROW_OFFSETS: u64 = 128;

/// What lies before a job, between its last cut and an epoch that it can reach.
#[derive(Clone, Copy, Debug)]
pub struct Backlog {
    /// No input changes in between.
    pub quiet: Epoch,
    /// From there on.
    pub late: Duration,
    /// Bytes of change in its inputs. `None`: not known that far back.
    pub bytes: Option<u64>,
}

impl MetaState {
    /// What a job that has cut at `own` has before it up to `upto`.
    pub fn backlog(&self, id: RelationId, own: Epoch, upto: Epoch, limit: &StepLimit) -> Backlog {
        let inputs = self.inputs(id);
        let quiet = inputs.iter().map(|i| self.stable_until(*i, own)).min().unwrap_or(upto);
        let late = Duration::from_millis(upto.millis().saturating_sub(quiet.millis()));
        Backlog { quiet, late, bytes: self.volume_between(inputs, own, upto, limit) }
    }

    /// Whether inputs of a job have changes that it has not committed.
    pub fn is_behind(&self, id: RelationId) -> bool {
        let Some(job) = self.jobs.get(&id) else { return false };
        let committed = Epoch(job.version.epoch);
        self.inputs(id).iter().any(|input| self.last_change(*input) > committed)
    }

    /// Bytes of change of these relations after an epoch. `None`: not known that far back. Nothing of a source is kept.
    pub fn changed_bytes(&self, ids: &[RelationId], after: Epoch) -> Option<u64> {
        let limit = StepLimit { bytes: u64::MAX, source_row_bytes: 0 };
        self.volume_between(ids, after, self.epoch, &limit)
    }

    /// Bytes of change of these relations in `(from, to]`. `None`: not known that far back.
    fn volume_between(
        &self,
        ids: &[RelationId],
        from: Epoch,
        to: Epoch,
        limit: &StepLimit,
    ) -> Option<u64> {
        let volume = |id: &RelationId| {
            let before = self.volume_through(*id, from, limit)?;
            Some(self.volume_through(*id, to, limit)?.saturating_sub(before))
        };
        ids.iter().map(volume).try_fold(0u64, |sum, bytes| Some(sum.saturating_add(bytes?)))
    }

    /// See [`crate::timeline::Timeline::volume_through`].
    fn volume_through(&self, id: RelationId, at: Epoch, limit: &StepLimit) -> Option<u64> {
        if let Some(job) = self.jobs.get(&id) {
            return job.timeline.volume_through(at);
        }
        let Some(source) = self.sources.get(&id) else { return Some(0) };
        let taken = |split: u32, offset: u64| offset.saturating_sub(source.parts.start(split));
        let offsets: u64 = source.offsets_at(at).iter().map(|o| taken(o.split, o.offset)).sum();
        let per_row = if source.parts.files.is_empty() { 1 } else { ROW_OFFSETS };
        Some((offsets / per_row).saturating_mul(limit.source_row_bytes))
    }

    /// The last epoch in `[own, upto]` through which the inputs of the job, which has cut at `own`, change by no more
    /// than the limit; `upto` where that is not known.
    pub fn furthest_within(
        &self,
        id: RelationId,
        own: Epoch,
        upto: Epoch,
        limit: &StepLimit,
    ) -> Epoch {
        let inputs = self.inputs(id);
        let fits = |to: u64| {
            let bytes = self.volume_between(inputs, own, Epoch(to), limit);
            bytes.is_none_or(|bytes| bytes <= limit.bytes)
        };
        if fits(upto.0) {
            return upto;
        }
        let (mut within, mut beyond) = (own.0, upto.0);
        while beyond - within > 1 {
            let middle = within + (beyond - within) / 2;
            *(if fits(middle) { &mut within } else { &mut beyond }) = middle;
        }
        Epoch(within)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use millrace_rpc::log::{SourceSplit, SplitOffset};
    use millrace_rpc::services::SourceParts;

    use super::*;
    use crate::state::SourceRecord;
    use crate::timeline::Timeline;

    /// What a source's epochs hold follows from its offsets, from where its splits begin.
    #[test]
    fn the_volume_of_a_source_is_counted_in_rows() {
        let split = SourceSplit { split: 0, name: String::new(), start: 1_000 };
        let offsets = |offset| vec![SplitOffset { split: 0, offset }];
        let source = SourceRecord {
            history: [(Epoch(10), offsets(1_100)), (Epoch(20), offsets(1_150))].into(),
            timeline: Timeline::since(Epoch(1)),
            marks: Vec::new(),
            parts: SourceParts { splits: Arc::new(vec![split]), ..SourceParts::default() },
        };
        let id = RelationId(1);
        let mut state = MetaState::default();
        state.sources.insert(id, source);
        let limit = StepLimit { bytes: 1_000, source_row_bytes: 10 };
        let between = |from, to| state.volume_between(&[id], Epoch(from), Epoch(to), &limit);
        assert_eq!(between(5, 9), Some(0));
        assert_eq!(between(5, 10), Some(1_000));
        assert_eq!(between(10, 25), Some(500));
    }
}
