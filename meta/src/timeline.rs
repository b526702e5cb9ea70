//! When a relation's content is known, and constant: the raw material of exactness (docs/design.md §4).
//!
//! A timeline is an ascending list of disjoint segments `[lo, hi]`. Throughout a segment the relation's
//! committed content is exact (equal to its query over its inputs at that epoch) and does not change.
//! The last segment is open: where it ends follows from the log's head (a root) or from the inputs (a
//! derived relation), so an idle relation advances without any record.
//!
//! The list is bounded. The newest segments are all there; of older ones only those that contain a point of the
//! grid on which late jobs meet ([`GRIDS_MS`]): first of each second, then of each ten seconds. What is dropped is
//! merely unknown: every answer drawn from a shorter list is more careful, never wrong.

use std::collections::VecDeque;
use std::sync::Arc;

use millrace_common::Epoch;
use millrace_rpc::log::TimelineSnapshot;

/// The grid of the cuts of late jobs, coarsest first, in milliseconds.
pub const GRIDS_MS: [u64; 2] = [10_000, 1_000];
/// The newest segments, kept as they are: at four commits a second, four minutes.
const RECENT: usize = 1_024;
/// Before them, segments with a point of the fine grid: two minutes.
const FINE: usize = 128;
/// Before those, segments with a point of the coarse grid: an hour.
const COARSE: usize = 360;

/// Inclusive bounds. Of the last segment of a timeline, which is open, `hi` is its anchor: the newest
/// commit that left the content as it was. From there on the inputs tell how far it reaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    pub lo: Epoch,
    pub hi: Epoch,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Timeline {
    /// Shared with copies of the state that are on their way into a snapshot.
    segments: Arc<VecDeque<Segment>>,
    last_change: Epoch,
}

impl Timeline {
    /// Known since `lo`.
    pub fn since(lo: Epoch) -> Timeline {
        Timeline {
            segments: Arc::new(VecDeque::from([Segment { lo, hi: lo }])),
            last_change: Epoch::ZERO,
        }
    }

    /// Epoch of the newest change; `ZERO`: none.
    pub fn last_change(&self) -> Epoch {
        self.last_change
    }

    /// The newest commit in the open segment; `None`: nothing is known yet.
    pub fn anchor(&self) -> Option<Epoch> {
        self.segments.back().map(|s| s.hi)
    }

    /// Ends the open segment at `hi` and begins another at `lo` (`hi < lo`). Without a change and
    /// without a gap the open segment just continues, anchored at `lo`.
    pub fn advance(&mut self, hi: Epoch, lo: Epoch, changed: bool) {
        debug_assert!(hi < lo);
        if changed {
            self.last_change = lo;
        }
        let segments = Arc::make_mut(&mut self.segments);
        match segments.back_mut() {
            // Created by the very record that changes it.
            Some(open) if open.lo >= lo => return,
            Some(open) if !changed && hi >= lo.prev() => {
                open.hi = lo;
                return;
            }
            Some(open) => open.hi = hi.max(open.hi),
            None => {}
        }
        segments.push_back(Segment { lo, hi: lo });
        thin_out(segments);
    }

    /// The newest segment that begins at or before `epoch`, and whether it is the open one.
    pub fn segment_at(&self, epoch: Epoch) -> Option<(Segment, bool)> {
        let after = self.segments.partition_point(|s| s.lo <= epoch);
        let at = after.checked_sub(1)?;
        Some((*self.segments.get(at)?, after == self.segments.len()))
    }

    /// Where the first segment that begins after `epoch` begins.
    pub fn next_after(&self, epoch: Epoch) -> Option<Epoch> {
        let at = self.segments.partition_point(|s| s.lo <= epoch);
        self.segments.get(at).map(|s| s.lo)
    }

    /// The same, or `epoch` itself where segments that followed it may have been dropped: never later than what came
    /// first.
    pub fn oldest_after(&self, epoch: Epoch) -> Option<Epoch> {
        let next = self.next_after(epoch)?;
        // Where fewer are kept, none has been dropped.
        let complete_since = match self.segments.len().checked_sub(RECENT) {
            Some(at) => self.segments.get(at),
            None => self.segments.front(),
        };
        Some(if complete_since.is_some_and(|s| s.lo <= epoch) { next } else { epoch })
    }

    pub fn to_snapshot(&self) -> TimelineSnapshot {
        let mut before = 0;
        let step = |bound: u64| bound.wrapping_sub(std::mem::replace(&mut before, bound));
        let steps = self.segments.iter().flat_map(|s| [s.lo.0, s.hi.0]).map(step).collect();
        TimelineSnapshot { steps, last_change: self.last_change.0, ..TimelineSnapshot::default() }
    }

    pub fn from_snapshot(snapshot: &TimelineSnapshot) -> Timeline {
        let mut at = 0u64;
        let add = |step: &u64| {
            at = at.wrapping_add(*step);
            at
        };
        let bounds: Vec<u64> = match snapshot.steps.is_empty() {
            // As earlier releases stored them.
            true => snapshot.bounds.clone(),
            false => snapshot.steps.iter().map(add).collect(),
        };
        let segment =
            |c: &[u64]| Segment { lo: Epoch(c[0]), hi: Epoch(*c.get(1).unwrap_or(&c[0])) };
        let mut segments: VecDeque<Segment> = bounds.chunks(2).map(segment).collect();
        let surplus = segments.len().saturating_sub(RECENT + FINE + COARSE);
        segments.drain(..surplus);
        Timeline { segments: Arc::new(segments), last_change: Epoch(snapshot.last_change) }
    }

    /// Segments are disjoint and ascend.
    pub fn check(&self) -> Result<(), String> {
        let mut previous: Option<Segment> = None;
        for (i, s) in self.segments.iter().enumerate() {
            let open = i + 1 == self.segments.len();
            if !open && s.hi < s.lo || previous.is_some_and(|p| p.hi >= s.lo) {
                return Err(format!("segment {s:?} after {previous:?}"));
            }
            previous = Some(*s);
        }
        Ok(())
    }
}

/// Keeps the list bounded after one segment was added: the one that has left the recent ones stays if it has a point
/// of the fine grid, and the one that has left those, if it has a point of the coarse grid.
fn thin_out(segments: &mut VecDeque<Segment>) {
    let [coarse, fine] = GRIDS_MS;
    for (newer, grid_ms) in [(RECENT, fine), (RECENT + FINE, coarse)] {
        let Some(at) = segments.len().checked_sub(newer + 1) else { return };
        if segments.get(at).is_some_and(|s| !s.has_point_of(grid_ms)) {
            segments.remove(at);
            return;
        }
    }
    if segments.len() > RECENT + FINE + COARSE {
        segments.pop_front();
    }
}

impl Segment {
    /// Whether an epoch in it is the first of its step of the grid.
    fn has_point_of(self, grid_ms: u64) -> bool {
        let point = Epoch::from_millis(self.hi.millis() / grid_ms * grid_ms);
        self.lo <= point && point <= self.hi
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_split_and_idle_commits_merge() {
        let mut t = Timeline::since(Epoch(10));
        t.advance(Epoch(19), Epoch(20), false);
        assert_eq!(t.segment_at(Epoch(20)), Some((Segment { lo: Epoch(10), hi: Epoch(20) }, true)));
        t.advance(Epoch(24), Epoch(30), false);
        assert_eq!(
            t.segment_at(Epoch(29)),
            Some((Segment { lo: Epoch(10), hi: Epoch(24) }, false))
        );
        t.advance(Epoch(39), Epoch(40), true);
        assert_eq!((t.last_change(), t.anchor()), (Epoch(40), Some(Epoch(40))));
        assert_eq!(t.segment_at(Epoch(9)), None);
        t.check().unwrap();
    }

    #[test]
    fn a_snapshot_is_the_same_timeline() {
        let mut t = Timeline::since(Epoch(1));
        for e in 2..20 {
            t.advance(Epoch(e * 10 - 5), Epoch(e * 10), e % 3 == 0);
        }
        assert_eq!(Timeline::from_snapshot(&t.to_snapshot()).to_snapshot(), t.to_snapshot());
    }

    /// A change every 20 ms for so many seconds.
    fn busy(seconds: u64) -> Timeline {
        let mut t = Timeline::since(Epoch::from_millis(0));
        for at in 1..seconds * 50 {
            let lo = Epoch::from_millis(at * 20 + 1);
            t.advance(lo.prev(), lo, true);
        }
        t
    }

    #[test]
    fn long_histories_are_thinned_out_onto_the_grid() {
        let seconds = 7_200;
        let t = busy(seconds);
        t.check().unwrap();
        assert_eq!(t.segments.len(), RECENT + FINE + COARSE);
        let exact =
            |epoch: Epoch| t.segment_at(epoch).is_some_and(|(s, open)| open || epoch <= s.hi);
        // Twenty seconds of everything, two minutes of seconds, an hour of tens of seconds.
        assert!((1..20_000).step_by(7).all(|ms| exact(Epoch::from_millis(seconds * 1_000 - ms))));
        assert!((20..140).all(|s| exact(Epoch::from_millis((seconds - s) * 1_000))));
        assert!((2..360).all(|tens| exact(Epoch::from_millis((seconds - tens * 10) * 1_000))));
        assert!(!exact(Epoch::from_millis((seconds - 60) * 1_000 + 500)));
        assert!(!exact(Epoch::from_millis((seconds - 605) * 1_000)));
        assert!(!exact(Epoch::from_millis((seconds - 5_000) * 1_000)));
    }

    #[test]
    fn the_first_change_after_an_epoch_is_never_told_too_late() {
        let t = busy(7_200);
        let newest = Epoch::from_millis(7_199_980 + 1);
        assert_eq!(t.oldest_after(newest), None);
        let recent = Epoch::from_millis(7_199_000);
        assert_eq!(t.oldest_after(recent), Some(Epoch::from_millis(7_199_001)));
        // Changes that followed may have been dropped, whether a segment is known there or none.
        for ms in [7_100_000, 7_000_000, 1] {
            let old = Epoch::from_millis(ms);
            assert_eq!(t.oldest_after(old), Some(old), "{ms}");
        }
        let short = busy(2);
        assert_eq!(short.oldest_after(Epoch(5)), Some(Epoch::from_millis(21)));
    }

    #[test]
    fn a_full_timeline_is_small_in_a_snapshot() {
        use prost::Message;
        let bytes = busy(7_200).to_snapshot().encoded_len();
        assert!(bytes <= 16 << 10, "{bytes} bytes");
    }

    #[test]
    fn bounds_that_an_earlier_release_stored_are_read() {
        let t = busy(3);
        let bounds = t.segments.iter().flat_map(|s| [s.lo.0, s.hi.0]).collect();
        let last_change = t.last_change.0;
        let stored = TimelineSnapshot { bounds, last_change, ..TimelineSnapshot::default() };
        assert_eq!(Timeline::from_snapshot(&stored), t);
        assert_eq!(Timeline::from_snapshot(&t.to_snapshot()), t);
    }
}
