//! When a relation's content is known, and constant: the raw material of exactness (docs/design.md §4).
//!
//! A timeline is an ascending list of disjoint segments `[lo, hi]`. Throughout a segment the relation's
//! committed content is exact (equal to its query over its inputs at that epoch) and does not change.
//! The last segment is open: where it ends follows from the log's head (a root) or from the inputs (a
//! derived relation), so an idle relation advances without any record.
//!
//! The list is bounded. The newest segments are all there; of older ones only those that contain a point of a grid
//! that gets coarser ([`THINNED`]). What is dropped is merely unknown: every answer drawn from a shorter list is more
//! careful, never wrong.
//!
//! A segment also says how many bytes of change the relation had been given when it began. The count only rises, so
//! between two segments it holds whatever was dropped between them: jobs that are behind cut their steps by it.

use std::collections::VecDeque;
use std::sync::Arc;

use millrace_common::Epoch;
use millrace_rpc::log::TimelineSnapshot;

/// The grid of the cuts of late jobs, coarsest first, in milliseconds.
pub const GRIDS_MS: [u64; 2] = [10_000, 1_000];
/// The newest segments, kept as they are: at four commits a second, four minutes.
const RECENT: usize = 1_024;
/// Before them, per grid in milliseconds, so many segments that have a point of it: two minutes, an hour, twelve
/// hours.
const THINNED: [(u64, usize); 3] = [(1_000, 128), (10_000, 360), (100_000, 432)];
/// Segments of a full timeline.
const MOST: usize = RECENT + THINNED[0].1 + THINNED[1].1 + THINNED[2].1;

/// Inclusive bounds. Of the last segment of a timeline, which is open, `hi` is its anchor: the newest
/// commit that left the content as it was. From there on the inputs tell how far it reaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    pub lo: Epoch,
    pub hi: Epoch,
    /// Bytes of change through `lo`, since the timeline began.
    through: u64,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Timeline {
    /// Shared with copies of the state that are on their way into a snapshot.
    segments: Arc<VecDeque<Segment>>,
    last_change: Epoch,
    /// From here on bytes of change are counted.
    measured_since: Epoch,
}

impl Timeline {
    /// Known since `lo`.
    pub fn since(lo: Epoch) -> Timeline {
        Timeline {
            segments: Arc::new(VecDeque::from([Segment { lo, hi: lo, through: 0 }])),
            last_change: Epoch::ZERO,
            measured_since: lo,
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

    /// Ends the open segment at `hi` and begins another at `lo` (`hi < lo`), where the content changes by so many
    /// bytes. Without a change (`None`) and without a gap the open segment just continues, anchored at `lo`.
    pub fn advance(&mut self, hi: Epoch, lo: Epoch, change: Option<u64>) {
        debug_assert!(hi < lo);
        if change.is_some() {
            self.last_change = lo;
        }
        let segments = Arc::make_mut(&mut self.segments);
        let through = segments.back().map_or(0, |s| s.through) + change.unwrap_or(0);
        match segments.back_mut() {
            // Created by the very record that changes it.
            Some(open) if open.lo >= lo => {
                open.through = through;
                return;
            }
            Some(open) if change.is_none() && hi >= lo.prev() => {
                open.hi = lo;
                return;
            }
            Some(open) => open.hi = hi.max(open.hi),
            None => self.measured_since = lo,
        }
        segments.push_back(Segment { lo, hi: lo, through });
        thin_out(segments);
    }

    /// Bytes of change through `epoch`, since the timeline began. Between two segments, where others may have been
    /// dropped, as if the change had come evenly. `None`: not counted so far back.
    pub fn volume_through(&self, epoch: Epoch) -> Option<u64> {
        if epoch < self.measured_since {
            return None;
        }
        let after = self.segments.partition_point(|s| s.lo <= epoch);
        let before = after.checked_sub(1).and_then(|at| self.segments.get(at));
        // All before may have been dropped.
        let (since, through) = match before.filter(|s| s.lo >= self.measured_since) {
            Some(segment) => (segment.hi, segment.through),
            None => (self.measured_since, 0),
        };
        let Some(next) = self.segments.get(after).filter(|_| epoch > since) else {
            return Some(through);
        };
        let (part, whole) = (epoch.0 - since.0, next.lo.0 - since.0);
        let between = u128::from(next.through - through) * u128::from(part);
        Some(through + (between / u128::from(whole)) as u64)
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
        TimelineSnapshot {
            steps: steps_of(self.segments.iter().flat_map(|s| [s.lo.0, s.hi.0])),
            volumes: steps_of(self.segments.iter().map(|s| s.through)),
            measured_since: self.measured_since.0,
            last_change: self.last_change.0,
            bounds: Vec::new(),
        }
    }

    pub fn from_snapshot(snapshot: &TimelineSnapshot) -> Timeline {
        let bounds = match snapshot.steps.is_empty() {
            // As earlier releases stored them.
            true => snapshot.bounds.clone(),
            false => sums_of(&snapshot.steps),
        };
        let mut volumes = sums_of(&snapshot.volumes).into_iter();
        let mut segments: VecDeque<Segment> = bounds
            .chunks(2)
            .map(|c| Segment {
                lo: Epoch(c[0]),
                hi: Epoch(*c.get(1).unwrap_or(&c[0])),
                through: volumes.next().unwrap_or(0),
            })
            .collect();
        let surplus = segments.len().saturating_sub(MOST);
        segments.drain(..surplus);
        // From a release that did not count: what comes from now on is counted.
        let unmeasured = segments.back().filter(|_| snapshot.volumes.is_empty()).map(|s| s.lo);
        Timeline {
            segments: Arc::new(segments),
            last_change: Epoch(snapshot.last_change),
            measured_since: unmeasured.unwrap_or(Epoch(snapshot.measured_since)),
        }
    }

    /// Segments are disjoint and ascend, and so do their volumes.
    pub fn check(&self) -> Result<(), String> {
        let mut previous: Option<Segment> = None;
        for (i, s) in self.segments.iter().enumerate() {
            let open = i + 1 == self.segments.len();
            let follows = |p: Segment| p.hi < s.lo && p.through <= s.through;
            if !open && s.hi < s.lo || previous.is_some_and(|p| !follows(p)) {
                return Err(format!("segment {s:?} after {previous:?}"));
            }
            previous = Some(*s);
        }
        Ok(())
    }
}

/// Numbers that hardly differ as short ones: each as its distance from the one before, the first from 0.
fn steps_of(numbers: impl Iterator<Item = u64>) -> Vec<u64> {
    let mut before = 0;
    numbers.map(|n| n.wrapping_sub(std::mem::replace(&mut before, n))).collect()
}

fn sums_of(steps: &[u64]) -> Vec<u64> {
    let mut at = 0u64;
    let add = |step: &u64| {
        at = at.wrapping_add(*step);
        at
    };
    steps.iter().map(add).collect()
}

/// Keeps the list bounded after one segment was added: the one that has left the recent ones stays if it has a point
/// of the finest grid, the one that has left those, if it has a point of the next, and so on.
fn thin_out(segments: &mut VecDeque<Segment>) {
    let mut newer = RECENT;
    for (grid_ms, kept) in THINNED {
        let Some(at) = segments.len().checked_sub(newer + 1) else { return };
        if segments.get(at).is_some_and(|s| !s.has_point_of(grid_ms)) {
            segments.remove(at);
            return;
        }
        newer += kept;
    }
    if segments.len() > newer {
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
        let bounds =
            |t: &Timeline, at| t.segment_at(Epoch(at)).map(|(s, open)| (s.lo.0, s.hi.0, open));
        t.advance(Epoch(19), Epoch(20), None);
        assert_eq!(bounds(&t, 20), Some((10, 20, true)));
        t.advance(Epoch(24), Epoch(30), None);
        assert_eq!(bounds(&t, 29), Some((10, 24, false)));
        t.advance(Epoch(39), Epoch(40), Some(1));
        assert_eq!((t.last_change(), t.anchor()), (Epoch(40), Some(Epoch(40))));
        assert_eq!(t.segment_at(Epoch(9)), None);
        t.check().unwrap();
    }

    #[test]
    fn a_snapshot_is_the_same_timeline() {
        let mut t = Timeline::since(Epoch(1));
        for e in 2..20 {
            t.advance(Epoch(e * 10 - 5), Epoch(e * 10), (e % 3 == 0).then_some(e * 100));
        }
        assert_eq!(Timeline::from_snapshot(&t.to_snapshot()).to_snapshot(), t.to_snapshot());
    }

    /// A change of 1,000 bytes every 20 ms for so many seconds.
    fn busy(seconds: u64) -> Timeline {
        let mut t = Timeline::since(Epoch::from_millis(0));
        for at in 1..seconds * 50 {
            let lo = Epoch::from_millis(at * 20 + 1);
            t.advance(lo.prev(), lo, Some(1_000));
        }
        t
    }

    #[test]
    fn long_histories_are_thinned_out_onto_the_grid() {
        let seconds = 50_000;
        let t = busy(seconds);
        t.check().unwrap();
        assert_eq!(t.segments.len(), MOST);
        let exact =
            |epoch: Epoch| t.segment_at(epoch).is_some_and(|(s, open)| open || epoch <= s.hi);
        // Twenty seconds of everything, two minutes of seconds, an hour of tens of seconds, then of hundreds.
        assert!((1..20_000).step_by(7).all(|ms| exact(Epoch::from_millis(seconds * 1_000 - ms))));
        assert!((20..140).all(|s| exact(Epoch::from_millis((seconds - s) * 1_000))));
        assert!((2..360).all(|tens| exact(Epoch::from_millis((seconds - tens * 10) * 1_000))));
        assert!(!exact(Epoch::from_millis((seconds - 60) * 1_000 + 500)));
        assert!(!exact(Epoch::from_millis((seconds - 605) * 1_000)));
        assert!(
            (40..450).all(|hundreds| exact(Epoch::from_millis((seconds - hundreds * 100) * 1_000)))
        );
        assert!(!exact(Epoch::from_millis((seconds - 5_010) * 1_000)));
        assert!(!exact(Epoch::from_millis((seconds - 49_000) * 1_000)));
    }

    /// The bytes between two epochs are those of the changes between them, to a change or two, whatever was dropped
    /// and also after a restart.
    #[test]
    fn volumes_survive_thinning_and_snapshots() {
        let t = busy(10_000);
        let restored = Timeline::from_snapshot(&t.to_snapshot());
        for timeline in [&t, &restored] {
            let through = |ms: u64| timeline.volume_through(Epoch::from_millis(ms)).unwrap();
            for (from, to) in [(9_999_000, 9_999_500), (9_900_350, 9_950_950), (12_345, 9_876_543)]
            {
                let expected = (to - from) / 20 * 1_000;
                let told = through(to) - through(from);
                assert!(told.abs_diff(expected) <= 2_000, "{from} to {to}: {told} of {expected}");
            }
        }
        assert_eq!(restored, t);
    }

    #[test]
    fn volumes_that_an_earlier_release_did_not_store_are_unknown() {
        let mut t = busy(10);
        let mut stored = t.to_snapshot();
        stored.volumes.clear();
        t = Timeline::from_snapshot(&stored);
        let newest = t.last_change();
        assert_eq!(t.volume_through(Epoch::from_millis(5_000)), None);
        assert_eq!(t.volume_through(newest), Some(0));
        t.advance(newest, newest.next(0), Some(70));
        let t = Timeline::from_snapshot(&t.to_snapshot());
        assert_eq!(t.volume_through(newest.next(0)), Some(70));
        assert_eq!(t.volume_through(Epoch::from_millis(5_000)), None);
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
        let bytes = busy(50_000).to_snapshot().encoded_len();
        assert!(bytes <= 24 << 10, "{bytes} bytes");
    }

    #[test]
    fn bounds_that_an_earlier_release_stored_are_read() {
        let t = busy(3);
        let bounds = t.segments.iter().flat_map(|s| [s.lo.0, s.hi.0]).collect();
        let last_change = t.last_change.0;
        let stored = TimelineSnapshot { bounds, last_change, ..TimelineSnapshot::default() };
        let read = Timeline::from_snapshot(&stored);
        assert_eq!(read.to_snapshot().steps, t.to_snapshot().steps);
        assert_eq!(read.last_change(), t.last_change());
        assert_eq!(Timeline::from_snapshot(&t.to_snapshot()), t);
    }
}
