//! Runs: immutable sorted files of one state table (docs/design.md §2, §9), as byte ranges of segments.
//!
//! ```text
//! block*  meta part                          the meta part is read at once and opens the run
//! block*  meta part*  top                    of a large run: one meta part for some of its blocks each (a
//!                                            partition), which the top index finds; the top opens the run,
//!                                            and the run's description has a copy of one that is small
//! meta part, top:  filter  index  footer(40)
//!
//! index:  per block, column by column: length u32 · rows u32 · crc u32 · min epoch u64 · max epoch u64,
//!         then 2n+1 key offsets u32, then first and last key of each block, then, of a top, per partition:
//!         first block u32 · its offset in the run u64, then the lengths (u16) of prefixes that are in
//!         the filter; the blocks of a top are its partitions
//! footer:  0 u32 crc32 of the part without this field   16 u32 index bytes
//!          4 u32 magic 0x4E55524D ("MRUN")              20 u32 blocks
//!          8 u16 version: 1, of a top 2                 24 u64 rows
//!         10 u16 flags: 2 there is a filter, 4 a top    32 u64 bytes of all blocks
//!         12 u32 filter bytes
//! ```
//!
//! All integers are little-endian. Blocks lie back to back from the run's start, so their offsets are
//! sums of lengths; partitions lie back to back before the top. The checksum of every block is in the index
//! too, and that of every partition in the top: what was read from the wrong place, or from a cache of
//! another store, is as corrupt as a damaged one.
//!
//! The filter holds the hashes of all keys and, so that lookups by prefix can ask it too, of their
//! prefixes of a few lengths. Which lengths are asked for is learned from the lookups themselves (see
//! [`PrefixLengths`]): the store need not know what a key is made of, and encoded key columns have
//! few distinct lengths.

mod builder;
mod index;
mod index_builder;
mod prefixes;
mod reader;

pub use builder::{FinishedRun, RunBuilder, RunOptions};
pub use index::RunIndex;
pub use prefixes::PrefixLengths;
pub use reader::RunReader;

pub(crate) const FOOTER_BYTES: usize = 40;
pub(crate) const MAGIC: u32 = 0x4e55_524d;
pub(crate) const VERSION: u16 = 1;
/// Of a top index.
pub(crate) const VERSION_TOP: u16 = 2;
pub(crate) const FLAG_FILTER: u16 = 2;
pub(crate) const FLAG_TOP: u16 = 4;
/// Bytes that a top index has of a partition more than of a block.
pub(crate) const START_BYTES: usize = 4 + 8;
/// Bytes of a block's fixed fields in the index.
pub(crate) const INDEX_FIXED: usize = 4 + 4 + 4 + 8 + 8;

/// How a state table is used (docs/design.md §2); decides block size and filter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunKind {
    /// Point reads: small blocks.
    Point,
    /// Reads by prefix: the rows of a group lie together, and a group is rarely large. And relations with a
    /// key: a row is found by it without reading many others, and scans still read long stretches.
    Prefix,
    /// Range reads and relations that are only scanned: large blocks.
    Range,
}

impl RunKind {
    /// Uncompressed bytes that a block aims at.
    pub fn block_bytes(self) -> usize {
        match self {
            RunKind::Point => 16 << 10,
            RunKind::Prefix => 32 << 10,
            RunKind::Range => 128 << 10,
        }
    }
}

#[cfg(test)]
mod tests;
