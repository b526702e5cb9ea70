//! What hints take of memory at most, beside the state that they bring (docs/design.md §8): for comparisons with the same
//! memory in every mode.

use super::chain::{LIST_BYTES, LIST_PAIRS, QUEUE};
use super::presence::PLACES;
use super::sketch::SketchOptions;
use crate::state::Slot;
use crate::state::keyed::{MAX_KEYS_AHEAD, TABLES};

/// Of one operator in one task: the table of keys in memory, the sketch of frequent ones, the hints that wait for the task
/// (its edge has so many bytes of credit), and the places of keys that are collected and being read.
pub fn operator_bytes(sketch: SketchOptions, credits: usize) -> usize {
    let presence = PLACES * size_of::<u32>();
    let ahead = MAX_KEYS_AHEAD * size_of::<(Slot, [u64; TABLES])>();
    presence + sketch.rows * sketch.counters + credits + ahead
}

/// Of one job whose lookaheads are chained: pairs that wait for its walker, of so many bytes each.
pub fn chain_bytes(pair_bytes: usize) -> usize {
    QUEUE * LIST_BYTES.min(LIST_PAIRS * pair_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_pairs_are_bounded_by_the_bytes_of_a_list() {
        assert_eq!(chain_bytes(8), 64 * 1024 * 8);
        assert_eq!(chain_bytes(1 << 20), 64 * (256 << 10));
    }
}
