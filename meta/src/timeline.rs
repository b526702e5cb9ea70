//! When a relation's content is known, and constant: the raw material of exactness (docs/design.md §4).
//!
//! A timeline is an ascending list of disjoint segments `[lo, hi]`. Throughout a segment the relation's
//! committed content is exact (equal to its query over its inputs at that epoch) and does not change.
//! The last segment is open: where it ends follows from the log's head (a root) or from the inputs (a
//! derived relation), so an idle relation advances without any record.
//!
//! The list is bounded. What is trimmed is merely unknown: every answer drawn from a shorter list is
//! more careful, never wrong.

use std::collections::VecDeque;

use millrace_common::Epoch;
use millrace_rpc::log::TimelineSnapshot;

/// Segments kept: at four commits a second, half an hour.
const KEPT: usize = 8_192;

/// Inclusive bounds. Of the last segment of a timeline, which is open, `hi` is its anchor: the newest
/// commit that left the content as it was. From there on the inputs tell how far it reaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    pub lo: Epoch,
    pub hi: Epoch,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Timeline {
    segments: VecDeque<Segment>,
    last_change: Epoch,
}

impl Timeline {
    /// Known since `lo`.
    pub fn since(lo: Epoch) -> Timeline {
        Timeline { segments: VecDeque::from([Segment { lo, hi: lo }]), last_change: Epoch::ZERO }
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
        match self.segments.back_mut() {
            // Created by the very record that changes it.
            Some(open) if open.lo >= lo => return,
            Some(open) if !changed && hi >= lo.prev() => {
                open.hi = lo;
                return;
            }
            Some(open) => open.hi = hi.max(open.hi),
            None => {}
        }
        self.segments.push_back(Segment { lo, hi: lo });
        if self.segments.len() > KEPT {
            self.segments.pop_front();
        }
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

    /// The same, or `epoch` itself where segments that followed it have been trimmed: never later than what came first.
    pub fn oldest_after(&self, epoch: Epoch) -> Option<Epoch> {
        let next = self.next_after(epoch)?;
        Some(if self.segment_at(epoch).is_some() { next } else { epoch })
    }

    pub fn to_snapshot(&self) -> TimelineSnapshot {
        let bounds = self.segments.iter().flat_map(|s| [s.lo.0, s.hi.0]).collect();
        TimelineSnapshot { bounds, last_change: self.last_change.0 }
    }

    pub fn from_snapshot(snapshot: &TimelineSnapshot) -> Timeline {
        let segment =
            |c: &[u64]| Segment { lo: Epoch(c[0]), hi: Epoch(*c.get(1).unwrap_or(&c[0])) };
        Timeline {
            segments: snapshot.bounds.chunks(2).map(segment).collect(),
            last_change: Epoch(snapshot.last_change),
        }
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

    #[test]
    fn long_histories_are_trimmed_from_the_old_end() {
        let mut t = Timeline::since(Epoch(1));
        for e in 2..(KEPT as u64 + 100) {
            t.advance(Epoch(e - 1), Epoch(e), true);
        }
        assert_eq!(t.segments.len(), KEPT);
        assert_eq!(t.segment_at(Epoch(1)), None);
        // The first change after it is no longer known: it is older than the oldest that is.
        assert_eq!(t.oldest_after(Epoch(1)), Some(Epoch(1)));
        assert_eq!(t.oldest_after(Epoch(5_000)), Some(Epoch(5_001)));
        assert_eq!(t.oldest_after(Epoch(KEPT as u64 + 99)), None);
    }
}
