//! The order of what a job has written (docs/design.md §9): by commit, and within a commit by part.

use std::fmt;

/// Low bits that number the parts of a commit.
const PART_BITS: u32 = 20;
/// Added to the numbers of commits, so that the counters of earlier releases, all below 2^44, sort before.
const COUNTERS: u64 = 1 << 24;
/// Sequences stay below 2^60: what ranks runs has bits left for their level.
const NUMBERS: u64 = (1 << (60 - PART_BITS)) - COUNTERS;

/// The place of a slice or run among all that its job has written: of two entries with equal key and epoch that of the
/// larger sequence was written later, whichever processes wrote them. What a flush or compaction writes has the largest
/// sequence of what it holds.
///
/// Earlier releases counted what a process persisted, without the commit's number; these counters come before all
/// numbered sequences. They need not be told from each other any further: nothing is written under them any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Sequence(u64);

/// A commit has too many parts, or no number that a sequence could hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("part {part} of commit {commit} cannot be numbered")]
pub struct SequenceError {
    pub commit: u64,
    pub part: u64,
}

impl Sequence {
    /// Of a part of a commit; commits are numbered from 1 on ([`JobCommit::number`](crate::version::JobCommit::number)),
    /// parts from 0 on in the order in which they were written.
    pub fn new(commit: u64, part: u64) -> Result<Sequence, SequenceError> {
        if commit == 0 || commit >= NUMBERS || part >= 1 << PART_BITS {
            return Err(SequenceError { commit, part });
        }
        Ok(Sequence((commit + COUNTERS) << PART_BITS | part))
    }

    /// As a slice or run holds it.
    pub fn stored(sequence: u64) -> Sequence {
        Sequence(sequence)
    }

    /// As a slice or run is to hold it.
    pub fn get(self) -> u64 {
        self.0
    }

    /// The largest that a part of the commit may have; of commit 0: that what is not numbered may have.
    pub fn last_of(commit: u64) -> Sequence {
        Sequence((commit.min(NUMBERS) + COUNTERS) << PART_BITS | ((1 << PART_BITS) - 1))
    }

    /// The number of the commit; 0: it is a counter of an earlier release.
    pub fn commit(self) -> u64 {
        (self.0 >> PART_BITS).saturating_sub(COUNTERS)
    }

    fn is_numbered(self) -> bool {
        self.0 >> PART_BITS > COUNTERS
    }
}

impl fmt::Display for Sequence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let part = self.0 & ((1 << PART_BITS) - 1);
        match self.is_numbered() {
            true => write!(f, "{}.{part}", self.commit()),
            false => write!(f, "{} (not numbered)", self.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequences_are_ordered_by_commit_and_part() {
        let of = |commit, part| Sequence::new(commit, part).unwrap();
        let ascending = [of(1, 0), of(1, 1), of(1, (1 << 20) - 1), of(2, 0), of(1 << 36, 5)];
        assert!(ascending.is_sorted_by(|a, b| a < b && a.get() < b.get()));
        assert_eq!(ascending.map(Sequence::commit), [1, 1, 1, 2, 1 << 36]);
        assert_eq!(Sequence::last_of(1), ascending[2]);
        assert_eq!(of(7, 3).to_string(), "7.3");
    }

    /// The layout is a stored format.
    #[test]
    fn golden_sequences() {
        assert_eq!(Sequence::new(1, 0).unwrap().get(), 0x1000_0010_0000);
        assert_eq!(Sequence::new(0xabc, 0xdef).unwrap().get(), 0x1000_abc0_0def);
    }

    #[test]
    fn what_cannot_be_numbered_is_an_error() {
        let last = (1 << 40) - (1 << 24) - 1;
        assert!(Sequence::new(last, (1 << 20) - 1).unwrap().get() < 1 << 60);
        for (commit, part) in [(0, 0), (1, 1 << 20), (last + 1, 0), (u64::MAX, u64::MAX)] {
            let error = Sequence::new(commit, part).unwrap_err();
            assert_eq!(error, SequenceError { commit, part });
        }
    }

    #[test]
    fn counters_of_earlier_releases_come_first() {
        // As many as a process could ever have counted.
        for counter in [0, 1, 5_000_000, 1 << 43] {
            let counter = Sequence::stored(counter);
            assert_eq!(counter.commit(), 0);
            assert!(counter < Sequence::new(1, 0).unwrap());
            assert!(counter <= Sequence::last_of(0));
        }
        assert!(Sequence::last_of(0) < Sequence::new(1, 0).unwrap());
    }
}
