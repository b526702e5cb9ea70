//! Membership filters of runs: a split-block Bloom filter over 64-bit key hashes.
//!
//! Each hash picks one 32-byte block and sets one bit in each of its eight words, so a probe touches
//! half a cache line. At [`BITS_PER_KEY`] about one absent key in 200 passes. Built in one pass
//! without sorting or deduplicating hashes; the bytes are our own format (little-endian words), so
//! no library's internals are on disk. The technique is that of Putze, Sanders and Singler
//! ("Cache-, Hash- and Space-Efficient Bloom Filters").

use bytes::Bytes;
use millrace_common::hash::hash_bytes;

pub const BITS_PER_KEY: usize = 12;
const BLOCK_BYTES: usize = 32;
const WORDS: usize = 8;
/// Odd multipliers that take eight independent bit positions out of one 32-bit hash.
const SALTS: [u32; WORDS] = [
    0x47b6_137b,
    0x4497_4d91,
    0x8824_ad5b,
    0xa2b7_289d,
    0x7054_95c7,
    0x2df1_424b,
    0x9efc_4947,
    0x5c6b_fb31,
];

/// The hash that filters are built from and probed with, for whole keys and prefixes alike.
#[inline]
pub fn filter_hash(bytes: &[u8]) -> u64 {
    hash_bytes(bytes)
}

#[inline]
fn block_of(hash: u64, blocks: usize) -> usize {
    (((hash >> 32) * blocks as u64) >> 32) as usize
}

#[inline]
fn bits(hash: u64) -> [u32; WORDS] {
    let low = hash as u32;
    SALTS.map(|salt| 1u32 << (low.wrapping_mul(salt) >> 27))
}

/// The filter's bytes for `hashes` (duplicates are fine). Empty for no hashes.
pub fn build(hashes: &[u64]) -> Vec<u8> {
    let blocks = (hashes.len() * BITS_PER_KEY).div_ceil(BLOCK_BYTES * 8);
    let mut words = vec![0u32; blocks * WORDS];
    for &hash in hashes {
        let at = block_of(hash, blocks) * WORDS;
        for (word, bit) in words[at..at + WORDS].iter_mut().zip(bits(hash)) {
            *word |= bit;
        }
    }
    words.iter().flat_map(|w| w.to_le_bytes()).collect()
}

/// A filter as read from a run.
#[derive(Clone, Debug)]
pub struct KeyFilter {
    bytes: Bytes,
}

impl KeyFilter {
    /// `None` when the length cannot be a filter's.
    pub fn new(bytes: Bytes) -> Option<KeyFilter> {
        bytes.len().is_multiple_of(BLOCK_BYTES).then_some(KeyFilter { bytes })
    }

    /// False: certainly no entry with this hash.
    #[inline]
    pub fn may_contain(&self, hash: u64) -> bool {
        let blocks = self.bytes.len() / BLOCK_BYTES;
        if blocks == 0 {
            return false;
        }
        let at = block_of(hash, blocks) * BLOCK_BYTES;
        let block = &self.bytes[at..at + BLOCK_BYTES];
        block.chunks_exact(4).zip(bits(hash)).all(|(word, bit)| {
            let word = u32::from_le_bytes([word[0], word[1], word[2], word[3]]);
            word & bit != 0
        })
    }

    pub fn memory_size(&self) -> usize {
        self.bytes.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn never_misses_and_rarely_lies() {
        let hash = |i: u64| filter_hash(&i.to_be_bytes());
        let inside: Vec<u64> = (0..20_000).map(hash).collect();
        let filter = KeyFilter::new(build(&inside).into()).unwrap();
        assert!(inside.iter().all(|&h| filter.may_contain(h)));
        let lies = (20_000..60_000).filter(|&i| filter.may_contain(hash(i))).count();
        assert!(lies < 400, "{lies} of 40000 absent keys passed");
    }

    #[test]
    fn an_empty_filter_contains_nothing() {
        assert!(!KeyFilter::new(Bytes::new()).unwrap().may_contain(1));
        assert!(KeyFilter::new(Bytes::from_static(&[0; 31])).is_none());
    }

    #[test]
    fn bytes_are_pinned() {
        let bytes = build(&[filter_hash(b"a"), filter_hash(b"b")]);
        assert_eq!(bytes.len(), 32);
        assert_eq!(crc32fast::hash(&bytes), 2_377_854_860);
    }
}
