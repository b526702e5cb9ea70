//! Which keys of runs that are being rewritten have their blocks in memory: those blocks of the new runs go there too,
//! so that what was hot before a compaction is hot after it.

use std::sync::Arc;

use crate::cache::BlockCache;
use crate::run::{RunIndex, RunReader};

/// Key ranges, and how many bytes of blocks may be admitted for them.
#[derive(Debug, Default)]
pub(crate) struct HotKeys {
    /// First and last key, both included; ascending and disjoint.
    ranges: Vec<(Vec<u8>, Vec<u8>)>,
    /// Encoded bytes: twice those of the replaced blocks, which leave memory with the old runs.
    room: u64,
}

impl HotKeys {
    /// Of runs as they are in memory now. Runs whose index is not in memory have no hot blocks.
    pub fn of<'a>(cache: &BlockCache, runs: impl Iterator<Item = &'a Arc<RunReader>>) -> HotKeys {
        let mut hot = HotKeys::default();
        let mut ranges = Vec::new();
        for run in runs {
            for (index, blocks) in cache.blocks_in_memory(run) {
                for block in blocks {
                    let range = index.block_range(block);
                    // The new blocks begin and end elsewhere: about two take the place of one.
                    hot.room += 2 * (range.end - range.start);
                    ranges.push((index.first_key(block).to_vec(), index.last_key(block).to_vec()));
                }
            }
        }
        hot.ranges = joined(ranges);
        hot
    }

    /// Admits no more than so many encoded bytes.
    pub fn at_most(mut self, bytes: u64) -> HotKeys {
        self.room = self.room.min(bytes);
        self
    }

    /// Whether nothing is hot.
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Whether a block of a new run is to be in memory. Takes its room.
    pub fn admit(&mut self, index: &RunIndex, block: u32) -> bool {
        let range = index.block_range(block);
        let bytes = range.end - range.start;
        if bytes > self.room || !self.touches(index.first_key(block), index.last_key(block)) {
            return false;
        }
        self.room -= bytes;
        true
    }

    /// Whether a key from `first` to `last` may be hot.
    pub fn touches(&self, first: &[u8], last: &[u8]) -> bool {
        let at = self.ranges.partition_point(|(_, end)| end.as_slice() < first);
        self.ranges.get(at).is_some_and(|(start, _)| start.as_slice() <= last)
    }
}

/// The same keys as few ranges.
fn joined(mut ranges: Vec<(Vec<u8>, Vec<u8>)>) -> Vec<(Vec<u8>, Vec<u8>)> {
    ranges.sort_unstable();
    let mut joined: Vec<(Vec<u8>, Vec<u8>)> = Vec::new();
    for (first, last) in ranges {
        match joined.last_mut() {
            Some((_, end)) if first <= *end => {
                if last > *end {
                    *end = last;
                }
            }
            _ => joined.push((first, last)),
        }
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hot(ranges: &[(&str, &str)]) -> HotKeys {
        let owned = |(a, b): &(&str, &str)| (a.as_bytes().to_vec(), b.as_bytes().to_vec());
        HotKeys { ranges: joined(ranges.iter().map(owned).collect()), room: 100 }
    }

    #[test]
    fn keys_between_hot_ranges_are_not_hot() {
        let hot = hot(&[("m", "p"), ("b", "d"), ("c", "f")]);
        assert_eq!(hot.ranges.len(), 2);
        let touches = |a: &str, b: &str| hot.touches(a.as_bytes(), b.as_bytes());
        assert!(touches("a", "b") && touches("e", "g") && touches("a", "z") && touches("n", "o"));
        assert!(!touches("a", "az") && !touches("g", "l") && !touches("q", "z"));
    }
}
