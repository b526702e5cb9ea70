//! How much of the commits may stay in the tail before it is flushed (docs/design.md §9).
//!
//! A slice costs wherever it is: it is part of the folded log, of each of its snapshots and of every recovery, and
//! it keeps the segment that it lies in. A job whose state stays small would never be flushed for the sake of
//! memory; so the tail is bounded by itself: in slices and age of a job, and in bytes of a job and of the process.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::Instant;

/// When the tail is flushed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TailLimits {
    /// Slices of one job.
    pub slices: usize,
    /// Bytes of the slices of all jobs of the process. One job may hold a quarter of them.
    pub bytes: u64,
    /// Age of a job's oldest slice; after a restart it counts from there. An idle job is flushed once.
    pub age: Duration,
}

impl Default for TailLimits {
    fn default() -> TailLimits {
        TailLimits { slices: 500, bytes: 64 << 20, age: Duration::from_secs(3_600) }
    }
}

impl TailLimits {
    /// Whether a job with this tail is to be flushed.
    pub fn exceeded_by(&self, tail: TailSize, now: Instant) -> bool {
        let old = |since: Instant| now.saturating_duration_since(since) >= self.age;
        tail.slices >= self.slices.max(1)
            || tail.bytes > self.bytes / 4
            || tail.oldest.is_some_and(old)
    }
}

/// What the slices of a job are, that no flush has retired.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TailSize {
    pub slices: usize,
    /// Stored bytes, in the log and in segments.
    pub bytes: u64,
    /// When the oldest slice was published here.
    pub oldest: Option<Instant>,
}

struct Held {
    sequence: u64,
    bytes: u64,
    since: Instant,
}

/// The published slices of a job, in the order of their commits.
#[derive(Default)]
pub(crate) struct JobTail {
    slices: VecDeque<Held>,
    bytes: u64,
}

impl JobTail {
    pub fn add(&mut self, sequence: u64, bytes: u64, since: Instant) {
        self.slices.push_back(Held { sequence, bytes, since });
        self.bytes += bytes;
    }

    /// The slices of commits up to `sequence` are in runs.
    pub fn retire(&mut self, sequence: u64) {
        while let Some(oldest) = self.slices.front()
            && oldest.sequence <= sequence
        {
            self.bytes -= oldest.bytes;
            self.slices.pop_front();
        }
    }

    pub fn size(&self) -> TailSize {
        TailSize {
            slices: self.slices.len(),
            bytes: self.bytes,
            oldest: self.slices.front().map(|s| s.since),
        }
    }
}

/// Which of these tails to flush so that all together fit into `limit` bytes, with a quarter to spare: the largest
/// ones, and of equal ones the oldest. Empty while they fit.
pub fn largest_tails(tails: &[TailSize], limit: u64) -> Vec<usize> {
    let mut held: u64 = tails.iter().map(|t| t.bytes).sum();
    if held <= limit {
        return Vec::new();
    }
    let mut order: Vec<usize> = (0..tails.len()).filter(|i| tails[*i].bytes > 0).collect();
    order.sort_by_key(|i| (std::cmp::Reverse(tails[*i].bytes), tails[*i].oldest));
    let mut chosen = Vec::new();
    for i in order {
        if held <= limit / 4 * 3 {
            break;
        }
        held -= tails[i].bytes;
        chosen.push(i);
    }
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: TailLimits = TailLimits { slices: 3, bytes: 400, age: Duration::from_secs(60) };

    #[test]
    fn a_tail_is_flushed_for_its_slices_its_bytes_or_its_age() {
        let now = Instant::now();
        let mut tail = JobTail::default();
        let exceeded = |tail: &JobTail, seconds| {
            LIMITS.exceeded_by(tail.size(), now + Duration::from_secs(seconds))
        };
        assert!(!exceeded(&tail, 1_000), "an empty tail is never flushed");
        tail.add(1, 10, now);
        tail.add(2, 10, now + Duration::from_secs(30));
        assert!(!exceeded(&tail, 59));
        assert!(exceeded(&tail, 60));
        tail.add(3, 10, now + Duration::from_secs(31));
        assert!(exceeded(&tail, 31), "three slices");
        tail.retire(2);
        let left = TailSize { slices: 1, bytes: 10, oldest: Some(now + Duration::from_secs(31)) };
        assert_eq!(tail.size(), left);
        assert!(!exceeded(&tail, 60), "the oldest slice is another one now");
        tail.add(4, 91, now);
        assert!(exceeded(&tail, 31), "more than a quarter of the process's bytes");
        tail.retire(4);
        assert_eq!(tail.size(), TailSize::default());
    }

    #[test]
    fn the_largest_tails_go_first_and_of_equal_ones_the_oldest() {
        let now = Instant::now();
        let tail = |bytes: u64, age: u64| {
            let oldest = (bytes > 0).then(|| now + Duration::from_secs(100 - age));
            TailSize { slices: 1, bytes, oldest }
        };
        let tails = [tail(100, 1), tail(0, 0), tail(300, 1), tail(100, 9), tail(20, 50)];
        assert_eq!(largest_tails(&tails, 520), Vec::<usize>::new());
        assert_eq!(largest_tails(&tails, 400), [2]);
        assert_eq!(largest_tails(&tails, 200), [2, 3]);
        assert_eq!(largest_tails(&tails, 0), [2, 3, 0, 4]);
    }
}
