//! Count-min sketch: about how often a key has come lately, in a fixed size (docs/design.md §8).
//!
//! Keys that come often are in memory anyway: hints of them would only take the room of others in the channels that
//! lead to other tasks. A count is never too low, but for what ageing has taken from it, and for a counter that is at
//! its end. It may be too high, where all counters of a key are shared: such a key is read when its row comes.

use std::fmt;
use std::sync::Arc;

use crate::memory::{MemoryClass, MemoryGovernor, Reservation};

/// See the module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SketchOptions {
    pub rows: usize,
    /// Counters of a row.
    pub counters: usize,
    /// Keys that have come more often than this are frequent; 255: none is.
    pub threshold: u8,
    /// Records after which all counts are halved.
    pub halve_after: u32,
}

/// Bytes of counters at most: each lookahead has a sketch in each task.
const MAX_BYTES: usize = 4 << 20;
/// With this threshold no key is frequent.
const NONE_FREQUENT: u8 = u8::MAX;

/// Why a sketch with these options would be of no use; each tells what to change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SketchMisfit {
    /// No count reaches the threshold, however often a key comes.
    Unreachable {
        highest: u8,
    },
    /// All counters are shared by so many records that every key looks frequent.
    AllFrequent {
        counters: u64,
    },
    TooLarge,
}

impl fmt::Display for SketchMisfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SketchMisfit::Unreachable { .. } => {
                "no key can reach lookahead_sketch_threshold, since counts are halved before"
            }
            SketchMisfit::AllFrequent { .. } => {
                "every key exceeds lookahead_sketch_threshold, since too many share a counter"
            }
            SketchMisfit::TooLarge => {
                "lookahead_sketch_rows times lookahead_sketch_counters is too large"
            }
        })
    }
}

impl SketchMisfit {
    pub fn hint(&self) -> String {
        match self {
            SketchMisfit::Unreachable { highest } => format!(
                "Counts reach {highest}: choose a lower lookahead_sketch_threshold or a higher lookahead_sketch_halve_after; \
                 with the threshold {NONE_FREQUENT} all keys are hinted."
            ),
            SketchMisfit::AllFrequent { counters } => format!(
                "Choose at least {counters} for lookahead_sketch_counters, a lower lookahead_sketch_halve_after, or the \
                 threshold {NONE_FREQUENT}, with which all keys are hinted."
            ),
            SketchMisfit::TooLarge => {
                format!("A sketch may have {MAX_BYTES} counters, of one byte each.")
            }
        }
    }
}

impl SketchOptions {
    /// Whether the options fit together.
    pub fn check(&self) -> Result<(), SketchMisfit> {
        if self.rows.saturating_mul(self.counters) > MAX_BYTES {
            return Err(SketchMisfit::TooLarge);
        }
        if self.threshold == NONE_FREQUENT {
            return Ok(());
        }
        let highest = self.highest();
        if highest <= self.threshold {
            return Err(SketchMisfit::Unreachable { highest });
        }
        // With halving, a row of counters holds the records of two periods at most. If keys are all different, each
        // counter has its share of them.
        let records = 2 * u64::from(self.halve_after);
        if records / self.counters.max(1) as u64 > u64::from(self.threshold) {
            let counters = records / (u64::from(self.threshold) + 1) + 1;
            return Err(SketchMisfit::AllFrequent { counters });
        }
        Ok(())
    }

    /// The highest count of a key that every record has.
    fn highest(&self) -> u8 {
        let mut count = 0;
        // Each period adds half of what the one before has added.
        for _ in 0..u64::BITS {
            count = (count / 2 + u64::from(self.halve_after)).min(u64::from(u8::MAX));
        }
        count as u8
    }
}

impl Default for SketchOptions {
    fn default() -> SketchOptions {
        SketchOptions { rows: 4, counters: 10_000, threshold: 100, halve_after: 1_000 }
    }
}

/// See the module.
pub struct Sketch {
    options: SketchOptions,
    /// Row after row.
    counts: Box<[u8]>,
    /// Records since counts were halved.
    records: u32,
    _account: Reservation,
}

impl Sketch {
    pub fn new(options: SketchOptions, governor: &Arc<MemoryGovernor>) -> Sketch {
        let (rows, counters) = (options.rows.max(1), options.counters.max(1));
        let counts = vec![0; rows * counters].into_boxed_slice();
        let mut account = governor.account(MemoryClass::Cache);
        account.set(counts.len());
        let options = SketchOptions { rows, counters, ..options };
        Sketch { options, counts, records: 0, _account: account }
    }

    /// Counts a record of a key, by its hash; whether the key is frequent.
    pub fn note(&mut self, hash: u64) -> bool {
        if self.records >= self.options.halve_after {
            self.counts.iter_mut().for_each(|count| *count >>= 1);
            self.records = 0;
        }
        self.records += 1;
        let mut least = u8::MAX;
        for at in places(&self.options, hash) {
            let count = &mut self.counts[at];
            *count = count.saturating_add(1);
            least = least.min(*count);
        }
        least > self.options.threshold
    }

    /// About how often a key has come.
    pub fn count(&self, hash: u64) -> u8 {
        places(&self.options, hash).map(|at| self.counts[at]).min().unwrap_or(0)
    }
}

/// The counters of a key, one in each row. Two halves of the hash make as many hashes as are needed.
fn places(options: &SketchOptions, hash: u64) -> impl Iterator<Item = usize> + use<> {
    let (first, step) = (hash & 0xffff_ffff, hash >> 32 | 1);
    let counters = options.counters;
    (0..options.rows).map(move |row| {
        let of_row = first.wrapping_add(step.wrapping_mul(row as u64));
        row * counters + (of_row % counters as u64) as usize
    })
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use millrace_common::hash::hash_bytes;

    use super::*;

    fn sketch(options: SketchOptions) -> Sketch {
        Sketch::new(options, &MemoryGovernor::new(1 << 30))
    }

    #[test]
    fn options_that_do_not_fit_together_are_refused() {
        let own = SketchOptions::default();
        assert_eq!(own.check(), Ok(()));
        let halved = |halve_after, threshold| SketchOptions { halve_after, threshold, ..own };
        for halve_after in [1, 2, 7, 30, 100, 127, 128, 1_000] {
            // What the check says is what a key comes to that every record has.
            let mut sketch = sketch(halved(halve_after, u8::MAX));
            let highest = (0..20 * halve_after).map(|_| {
                sketch.note(hash(1));
                sketch.count(hash(1))
            });
            let highest = highest.max().unwrap();
            let unreachable = Err(SketchMisfit::Unreachable { highest });
            if highest < u8::MAX {
                assert_eq!(halved(halve_after, highest).check(), unreachable, "{halve_after}");
            }
            assert_eq!(halved(halve_after, highest - 1).check(), Ok(()), "{halve_after}");
            assert_eq!(halved(halve_after, u8::MAX).check(), Ok(()), "none is frequent, as told");
        }
        let few = |counters| SketchOptions { counters, ..halved(100_000, 100) };
        let Err(SketchMisfit::AllFrequent { counters }) = few(1_000).check() else {
            panic!("keys that are all different exceed the threshold");
        };
        assert!(
            few(counters as usize).check().is_ok() && few(counters as usize - 1).check().is_err()
        );
        let large = SketchOptions { rows: 16, counters: 1_000_000, ..own };
        assert_eq!(large.check(), Err(SketchMisfit::TooLarge));
    }

    /// A hash for each number.
    fn hash(key: u64) -> u64 {
        hash_bytes(&key.to_le_bytes())
    }

    #[test]
    fn a_count_is_never_below_how_often_a_key_has_come() {
        // Few counters, so that keys share them.
        let options = SketchOptions { counters: 50, halve_after: u32::MAX, ..Default::default() };
        let mut sketch = sketch(options);
        let mut counts: HashMap<u64, u32> = HashMap::new();
        for i in 0..5_000_u64 {
            let key = i * i % 97 % (i % 13 + 1);
            sketch.note(hash(key));
            *counts.entry(key).or_default() += 1;
            for (key, count) in &counts {
                let known = u32::from(sketch.count(hash(*key)));
                assert!(known >= (*count).min(255), "{key}: {known} of {count}");
            }
        }
        assert!(counts.values().any(|count| *count > 255));
    }

    #[test]
    fn a_counter_stays_at_its_end() {
        let options = SketchOptions { threshold: 254, halve_after: u32::MAX, ..Default::default() };
        let mut sketch = sketch(options);
        let frequent = (0..1_000).filter(|_| sketch.note(hash(1))).count();
        assert_eq!((sketch.count(hash(1)), frequent), (255, 746));
        assert_eq!(sketch.count(hash(2)), 0);
    }

    #[test]
    fn a_key_is_frequent_above_the_threshold_and_only_while_it_comes() {
        let mut sketch = sketch(SketchOptions::default());
        let notes: Vec<bool> = (0..200).map(|_| sketch.note(hash(7))).collect();
        assert_eq!(notes.iter().position(|frequent| *frequent), Some(100));
        // Each thousand records halves its count.
        let mut counts = Vec::new();
        for key in 0..4_000 {
            sketch.note(hash(1_000 + key));
            counts.push(sketch.count(hash(7)));
        }
        assert!(counts.is_sorted_by(|a, b| a >= b));
        let last = *counts.last().unwrap();
        assert!((12..=16).contains(&last), "{last} of 200 after four times");
        assert!(!sketch.note(hash(7)));
    }

    #[test]
    fn its_memory_is_counted_and_given_back() {
        let governor = MemoryGovernor::new(1 << 30);
        let sketch = Sketch::new(SketchOptions::default(), &governor);
        assert_eq!(governor.used(), 40_000);
        drop(sketch);
        assert_eq!(governor.used(), 0);
    }
}
