//! When a read is slow enough for a second request, and whether there is one to spend.
//!
//! A read is slow when it has taken longer than 95 % of the recent ones of its size. Every demand read earns a
//! twentieth of a second request: so there are at most 5 % more requests, also when all reads are slow.

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

#[derive(Debug, Default)]
pub(super) struct Hedging {
    sizes: [Recent; SIZES.len()],
    tokens: f64,
}

impl Hedging {
    /// Notes a demand read that was answered.
    pub fn answered(&mut self, took: Duration, bytes: u64) {
        self.sizes[size_of(bytes)].add(took);
        self.tokens = (self.tokens + EARNED).min(SAVED);
    }

    /// After what time a read is slow; `None`: too few reads of its size are known.
    pub fn delay(&self, bytes: u64) -> Option<Duration> {
        self.sizes[size_of(bytes)].slow.map(|slow| slow.max(FLOOR))
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
    slow: Option<Duration>,
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
            let mut all = self.ring.clone();
            let at = all.len() * PERCENTILE / 100;
            self.slow = Some(*all.select_nth_unstable(at).1);
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
