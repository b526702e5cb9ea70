//! When a read is slow enough for a second request, and whether there is one to spend.
//!
//! A read is slow when it has taken longer than 95 % of the recent ones of its size. One that has a deadline is asked for a
//! second time before it as soon as that is likely enough to help: the first request would be late, and the second in
//! time. Every read that may get a second request earns a twentieth of one: so there are at most 5 % more requests, also
//! when all reads are slow.

use std::time::Duration;

/// Sizes up to which reads take about as long as each other.
const SIZES: [u64; 3] = [64 << 10, 512 << 10, u64::MAX];
/// Latencies kept of each size.
const KEPT: usize = 256;
/// Fewer latencies tell nothing.
const ENOUGH: usize = 32;
/// Reads after which the percentile is computed anew.
const EVERY: usize = 32;
/// A read that takes less is not slow.
const FLOOR: Duration = Duration::from_millis(10);
const PERCENTILE: usize = 95;
/// What a read earns, and what may be saved up.
const EARNED: f64 = 0.05;
const SAVED: f64 = 20.0;
/// How likely a second request must be to help.
const WORTH: f64 = 0.25;
/// Of the known latencies every so many is considered as a time for a second request.
const STEP: usize = 8;

#[derive(Debug, Default)]
pub(super) struct Hedging {
    sizes: [Recent; SIZES.len()],
    tokens: f64,
}

impl Hedging {
    /// Notes a read that was answered and that somebody waited for, at its end at least.
    pub fn answered(&mut self, took: Duration, bytes: u64) {
        self.sizes[size_of(bytes)].add(took);
        self.tokens = (self.tokens + EARNED).min(SAVED);
    }

    /// After what time a read is slow; `None`: too few reads of its size are known.
    pub fn delay(&self, bytes: u64) -> Option<Duration> {
        let known = &self.sizes[size_of(bytes)].sorted;
        known.get(known.len() * PERCENTILE / 100).map(|slow| (*slow).max(FLOOR))
    }

    /// When a second request is worth its price, for a read that is late if it takes longer than `most`; `None`: not
    /// before that. From its begin.
    pub fn worth(&self, bytes: u64, most: Duration) -> Option<Duration> {
        let known = &self.sizes[size_of(bytes)].sorted;
        let slower = |than: Duration| known.len() - known.partition_point(|took| *took <= than);
        // One more, slower than all that is known: what takes longer than these is late whatever it is.
        let late = slower(most) + 1;
        let helps = |after: &Duration| {
            let is_late = late as f64 / (slower(*after) + 1) as f64;
            let in_time = known.len() - slower(most.saturating_sub(*after));
            is_late * in_time as f64 / known.len().max(1) as f64
        };
        let times = known.iter().step_by(STEP).chain(known.last());
        let times = std::iter::once(&Duration::ZERO).chain(times).copied();
        let found = times.take_while(|after| *after < most).find(|after| helps(after) >= WORTH);
        found.map(|after| after.max(FLOOR)).filter(|after| *after < most)
    }

    /// Spends a second request; false: there is none to spend.
    pub fn spend(&mut self) -> bool {
        let may = self.tokens >= 1.0;
        if may {
            self.tokens -= 1.0;
        }
        may
    }
}

fn size_of(bytes: u64) -> usize {
    SIZES.iter().position(|&most| bytes <= most).unwrap_or(SIZES.len() - 1)
}

/// The newest latencies of a size.
#[derive(Debug, Default)]
struct Recent {
    ring: Vec<Duration>,
    next: usize,
    /// As of a moment ago; empty: too few are known.
    sorted: Vec<Duration>,
}

impl Recent {
    fn add(&mut self, took: Duration) {
        if self.ring.len() < KEPT {
            self.ring.push(took);
        } else {
            self.ring[self.next % KEPT] = took;
        }
        self.next += 1;
        if self.ring.len() >= ENOUGH && self.next.is_multiple_of(EVERY) {
            self.sorted.clone_from(&self.ring);
            self.sorted.sort_unstable();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn slow_is_what_few_reads_of_a_size_exceed() {
        let mut hedging = Hedging::default();
        (0..31).for_each(|_| hedging.answered(30 * MS, 100));
        assert_eq!(hedging.delay(100), None, "too few are known");
        for n in 0..600u32 {
            let took = if n % 50 == 0 { 900 * MS } else { 30 * MS };
            hedging.answered(took, 16 << 10);
            hedging.answered(5 * took, 4 << 20);
        }
        assert_eq!(hedging.delay(100), Some(30 * MS), "2 % are slower");
        assert_eq!(hedging.delay(1 << 20), Some(150 * MS));
        assert_eq!(hedging.delay(100 << 10), None, "nothing is known of this size");
    }

    #[test]
    fn a_fast_store_has_no_slow_reads() {
        let mut hedging = Hedging::default();
        (0..64).for_each(|_| hedging.answered(MS / 10, 100));
        assert_eq!(hedging.delay(100), Some(FLOOR));
    }

    /// Of 256 reads one in 16 takes 300 ms, the others 20.
    fn with_a_tail() -> Hedging {
        let mut hedging = Hedging::default();
        (0..256).for_each(|i| hedging.answered(if i % 16 == 0 { 300 * MS } else { 20 * MS }, 100));
        hedging
    }

    #[test]
    fn before_a_deadline_a_second_request_must_be_likely_to_help() {
        let hedging = with_a_tail();
        // What has not come after 20 ms is late, and another request is most likely not.
        assert_eq!(hedging.worth(100, 200 * MS), Some(20 * MS));
        assert_eq!(hedging.worth(100, 30 * MS), None, "the second would be late, too");
        assert_eq!(hedging.worth(100, Duration::ZERO), None);
        assert_eq!(Hedging::default().worth(100, 200 * MS), None, "nothing is known");
        // Each takes a millisecond more than the one before: half are late after 128, and half of the second ones are not.
        let mut even = Hedging::default();
        (0..256).for_each(|i| even.answered(i * MS, 100));
        assert_eq!(even.worth(100, 128 * MS), Some(FLOOR));
        assert_eq!(even.worth(100, 20 * MS), None);
        assert_eq!(even.worth(100, 240 * MS), None, "few are late, and what is takes long again");
    }

    #[test]
    fn what_takes_longer_than_all_that_is_known_is_asked_for_again_long_before_its_deadline() {
        assert_eq!(with_a_tail().worth(100, 10_000 * MS), Some(300 * MS));
    }

    #[test]
    fn at_most_a_twentieth_of_the_reads_is_asked_twice() {
        let mut hedging = Hedging::default();
        assert!(!hedging.spend(), "nothing has been earned");
        let mut spent = 0;
        for _ in 0..10_000 {
            hedging.answered(30 * MS, 100);
            while hedging.spend() {
                spent += 1;
            }
        }
        assert!((490..=500).contains(&spent), "{spent}");
        (0..10_000).for_each(|_| hedging.answered(30 * MS, 100));
        let saved = (0..100).filter(|_| hedging.spend()).count();
        assert!(saved <= SAVED as usize, "{saved}");
    }
}
