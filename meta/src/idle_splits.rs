//! Splits that have nothing to say (docs/design.md §4, "Watermarks").
//!
//! A source's watermark is the least of its splits'. A split that has had no rows for `idle_timeout`
//! leaves that minimum by a mark in the log, and enters it again with its next rows. Then the mark
//! carries a floor: the source's watermark before, as a reader has computed it, below which the split's
//! further rows are late. All of it being in the log, every reader decides alike.

use std::time::Duration;

use millrace_common::collections::HashMap;
use millrace_common::{Epoch, RelationId};
use millrace_rpc::catalog::{Relation, RelationKind};
use millrace_rpc::log::{SplitMark, SplitOffset};
use tokio::time::Instant;

use crate::state::MetaState;

/// Follows the splits of one source that has a watermark.
pub struct IdleSplits {
    timeout: Option<Duration>,
    /// When each split moved last, as far as this process knows.
    moved: HashMap<u32, Instant>,
}

/// What becomes of an advance.
pub struct Admitted {
    pub offsets: Vec<SplitOffset>,
    pub marks: Vec<SplitMark>,
    /// A split must wait until a reader has told the source's watermark.
    pub held_back: bool,
}

impl IdleSplits {
    /// `None`: the source has no watermark.
    pub fn of(relation: &Relation) -> Option<IdleSplits> {
        // A table's watermark is its own: its sequencer is the one split.
        relation.watermark.as_ref().filter(|_| relation.kind() == RelationKind::Source)?;
        // Checked when the source was made.
        let timeout = millrace_connector::options::idle_timeout(relation).unwrap_or(None);
        Some(IdleSplits { timeout, moved: HashMap::default() })
    }

    /// The marks that an advance to these offsets needs. A split that enters the minimum (it was idle, or
    /// is new in a source that has moved before) is taken only once its floor is known.
    pub fn admit(
        &mut self,
        state: &MetaState,
        id: RelationId,
        offsets: Vec<SplitOffset>,
        now: Instant,
    ) -> Admitted {
        let mut out = Admitted { offsets: vec![], marks: vec![], held_back: false };
        let Some(source) = state.sources.get(&id) else { return out };
        for offset in offsets {
            let known = source.newest().iter().any(|o| o.split == offset.split);
            let enters = source.is_idle(offset.split) || (!known && !source.history.is_empty());
            if enters {
                let Some(floor) = watermark(state, id) else {
                    out.held_back = true;
                    continue;
                };
                out.marks.push(SplitMark { split: offset.split, idle: false, floor });
            }
            self.moved.insert(offset.split, now);
            out.offsets.push(offset);
        }
        out
    }

    /// The splits that have been silent for long enough and are not marked yet.
    pub fn silent(&mut self, state: &MetaState, id: RelationId, now: Instant) -> Vec<SplitMark> {
        let (Some(timeout), Some(source)) = (self.timeout, state.sources.get(&id)) else {
            return vec![];
        };
        let splits = source.newest().iter().map(|o| o.split);
        splits
            .filter(|s| !source.is_idle(*s))
            .filter(|s| *self.moved.entry(*s).or_insert(now) + timeout <= now)
            .map(|split| SplitMark { split, idle: true, floor: None })
            .collect()
    }

    /// How long until a split may become silent; `None`: never.
    pub fn next_check(&self, state: &MetaState, id: RelationId, now: Instant) -> Option<Duration> {
        let (timeout, source) = (self.timeout?, state.sources.get(&id)?);
        let active = self.moved.iter().filter(|(split, _)| !source.is_idle(**split));
        let next = active.map(|(_, at)| *at + timeout).min()?;
        Some(next.saturating_duration_since(now))
    }
}

/// The source's watermark at its newest epoch, if a reader has got there. `Some(None)`: there is none.
fn watermark(state: &MetaState, id: RelationId) -> Option<Option<i64>> {
    let newest = state.last_change(id);
    let there = state.readers(id).into_iter().find_map(|reader| {
        let version = &state.jobs.get(&reader)?.version;
        let caught_up = version.backfill.is_none() && Epoch(version.epoch) >= newest;
        caught_up.then_some(version)
    })?;
    Some(there.source_watermarks.iter().find(|w| w.source == id.0).map(|w| w.value))
}
