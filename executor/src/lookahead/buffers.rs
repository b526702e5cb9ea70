//! What hints take of memory at most, beside the state that they bring (docs/design.md §8): for comparisons with the same
//! memory in every mode.

use super::HINT_KEYS;
use super::chain::{LIST_BYTES, LIST_PAIRS, QUEUE};
use super::presence::PLACES;
use super::sketch::SketchOptions;
use super::wiring::TASK_HINTS;
use crate::state::Slot;
use crate::state::keyed::{MAX_KEYS_AHEAD, TABLES};

/// Of an event time beside its key, and of the latest one of a hint.
const STEP_BYTES: usize = 1;
const LATEST_BYTES: usize = 9;

/// Of one operator in one task, whose keys take so many bytes each: the table of keys in memory, the sketch of frequent
/// ones, the hints that wait for the task, and the places of keys that are collected and being read.
pub fn operator_bytes(key_bytes: usize, sketch: SketchOptions) -> usize {
    let presence = PLACES * size_of::<u32>();
    let hint = HINT_KEYS * (key_bytes + STEP_BYTES) + LATEST_BYTES;
    let ahead = MAX_KEYS_AHEAD * size_of::<(Slot, [u64; TABLES])>();
    presence + sketch.rows * sketch.counters + TASK_HINTS * hint + ahead
}

/// Of one job whose lookaheads are chained: pairs that wait for its walker, of so many bytes each.
pub fn chain_bytes(pair_bytes: usize) -> usize {
    QUEUE * LIST_BYTES.min(LIST_PAIRS * pair_bytes)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::array::Int64Array;

    use super::super::{Due, Hint, HintTimes};
    use super::*;

    #[test]
    fn hints_that_wait_for_a_task_are_within_the_bound() {
        let count = HINT_KEYS as i64;
        let times: Vec<i64> = (0..count).map(|i| i * 1_000_000).collect();
        let hint = Hint {
            node: 0,
            port: 0,
            columns: vec![Arc::new(Int64Array::from_iter_values(0..count))],
            times: HintTimes::of(&times),
            due: Due::default(),
            carried: None,
        };
        assert!(hint.is_whole());
        let sketch = SketchOptions { rows: 0, ..SketchOptions::default() };
        let beside = operator_bytes(8, sketch) - TASK_HINTS * hint.bytes();
        let others = PLACES * size_of::<u32>() + MAX_KEYS_AHEAD * size_of::<(Slot, [u64; 2])>();
        assert_eq!(beside, others, "nothing is left for the hints, and nothing is missing");
    }

    #[test]
    fn long_pairs_are_bounded_by_the_bytes_of_a_list() {
        assert_eq!(chain_bytes(8), 64 * 1024 * 8);
        assert_eq!(chain_bytes(1 << 20), 64 * (256 << 10));
    }
}
