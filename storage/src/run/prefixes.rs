//! Which prefix lengths lookups ask for: learned, so that filters can answer for them.

use std::sync::atomic::{AtomicU64, Ordering};

use arrow::array::{Array, BinaryArray};

/// Longer prefixes are answered without a filter.
const MAX_LENGTH: usize = 255;
/// Lengths that one run's filter serves, at most: each costs a hash a key.
const MAX_LENGTHS: usize = 6;
/// A vnode alone is in every run: asking a filter for it is useless.
const MIN_LENGTH: usize = millrace_common::keys::VNODE_BYTES + 1;

/// The lengths that have been asked of one state table. Shared by its readers and writers.
#[derive(Debug, Default)]
pub struct PrefixLengths {
    seen: [AtomicU64; (MAX_LENGTH + 1) / 64],
}

impl PrefixLengths {
    /// Notes what a lookup asks for. Costs a load a prefix once its length is known.
    pub fn note(&self, prefixes: &BinaryArray) {
        let mut last = usize::MAX;
        for i in 0..prefixes.len() {
            let length = prefixes.value_length(i) as usize;
            if length != last {
                self.note_length(length);
                last = length;
            }
        }
    }

    pub fn note_length(&self, length: usize) {
        if (MIN_LENGTH..=MAX_LENGTH).contains(&length) {
            let (word, bit) = (&self.seen[length / 64], 1 << (length % 64));
            if word.load(Ordering::Relaxed) & bit == 0 {
                word.fetch_or(bit, Ordering::Relaxed);
            }
        }
    }

    /// The lengths that a new run's filter should serve: the shortest, ascending.
    pub fn lengths(&self) -> Vec<u16> {
        (MIN_LENGTH..=MAX_LENGTH)
            .filter(|l| self.seen[l / 64].load(Ordering::Relaxed) & (1 << (l % 64)) != 0)
            .take(MAX_LENGTHS)
            .map(|l| l as u16)
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_learned_and_bounded() {
        let lengths = PrefixLengths::default();
        assert!(lengths.lengths().is_empty());
        let asked: Vec<Vec<u8>> =
            [0, 2, 11, 11, 3, 255, 256, 4000].iter().map(|&n| vec![1; n]).collect();
        lengths.note(&BinaryArray::from_iter_values(&asked));
        assert_eq!(lengths.lengths(), [3, 11, 255]);
        (20..200).for_each(|n| lengths.note_length(n));
        assert_eq!(lengths.lengths().len(), MAX_LENGTHS);
    }
}
