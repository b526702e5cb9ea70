//! Which candidates are asked, from hand-made and from random epochs and ranks.

use proptest::prelude::*;

use super::*;

fn at(epoch: u64, rank: u64) -> Recency {
    (Epoch(epoch), rank)
}

/// A block of the run of this number, with entries of these epochs.
fn block(string: u32, target: u32, epochs: (u64, u64), rank: u64) -> Candidate {
    let (oldest, newest) = (at(epochs.0, rank), at(epochs.1, rank));
    Candidate { string, target, block: Some(0), oldest, newest }
}

/// The runs that a string asks, in order of being asked.
fn targets(candidates: &[Candidate]) -> Vec<u32> {
    candidates.iter().map(|c| c.target).collect()
}

/// Four flushed runs, the newest first in the list of targets, each of epochs of its own.
fn flushed() -> Plan {
    let runs = (0..4u32).map(|t| {
        let newest = 40 - u64::from(t) * 10;
        block(0, t, (newest - 9, newest), newest)
    });
    Plan::of(runs.rev().collect(), 1)
}

#[test]
fn of_runs_with_epochs_of_their_own_the_newest_is_asked_alone() {
    let plan = flushed();
    let candidates = plan.candidates(0);
    assert_eq!(targets(candidates), [0, 1, 2, 3]);
    assert_eq!(to_ask(candidates, None, false), 1);
    assert_eq!(to_ask(candidates, None, true), 4);
    // The filter was wrong: the next one is asked, then all.
    assert_eq!(to_ask(&candidates[1..], None, false), 1);
    assert_eq!(to_ask(&candidates[2..], None, true), 2);
    // It was right: nothing is left to ask, whatever was found, also a delete.
    assert_eq!(to_ask(&candidates[1..], Some(at(31, 40)), true), 0);
}

#[test]
fn what_memory_has_is_final_only_above_all_that_is_on_disk() {
    let plan = flushed();
    let candidates = plan.candidates(0);
    assert_eq!(to_ask(candidates, Some(at(41, 1)), false), 0);
    assert_eq!(to_ask(candidates, Some(at(40, 50)), false), 0);
    assert_eq!(to_ask(candidates, Some(at(40, 39)), false), 1, "of one epoch the rank decides");
    assert_eq!(to_ask(candidates, Some(at(25, 50)), true), 2);
}

#[test]
fn runs_whose_epochs_overlap_are_asked_together() {
    // A run of level 1 that was merged from old and new entries, above one of level 2.
    let overlapping =
        vec![block(0, 0, (5, 20), 2), block(0, 1, (1, 15), 1), block(0, 2, (1, 4), 0)];
    let plan = Plan::of(overlapping, 1);
    let candidates = plan.candidates(0);
    assert_eq!(to_ask(candidates, None, false), 2);
    // The entry was one of the older of the upper run: the lower one must still be known.
    assert_eq!(to_ask(&candidates[1..], Some(at(9, 2)), false), 1);
    assert_eq!(to_ask(&candidates[1..], Some(at(16, 2)), false), 0);
    assert_eq!(to_ask(&candidates[2..], Some(at(4, 2)), false), 0);
}

#[test]
fn all_are_asked_at_once_where_that_reads_few_blocks_more() {
    let place = |string, target, block, newest: u64| Candidate {
        block: Some(block),
        ..self::block(string, target, (newest, newest), newest)
    };
    // Eight keys in eight blocks of the newer run. Of some the older run's filter says yes, too.
    let with = |wrong: u32| {
        let newest = (0..8).map(|s| place(s, 0, s, 9));
        Plan::of(newest.chain((0..wrong).map(|s| place(s, 1, s, 4))).collect(), 8)
    };
    for (wrong, at_once) in [(0, true), (2, true), (3, false), (8, false)] {
        assert_eq!(with(wrong).is_nearly_all_newest(0..8, |_| None, 0), at_once, "{wrong}");
    }
    // What was found already makes the older run irrelevant.
    assert!(with(8).is_nearly_all_newest(0..8, |_| Some(at(5, 0)), 0));
    // Who has read seven indexes for it may ask seven blocks more.
    for (wrong, at_once) in [(7, true), (8, false)] {
        assert_eq!(with(wrong).is_nearly_all_newest(0..8, |_| None, 7), at_once, "{wrong}");
    }
}

/// Sources of one key: what is in each (epochs), beyond which its bounds are widened.
fn sources() -> impl Strategy<Value = Vec<(Vec<u64>, u64, u64)>> {
    let source = (prop::collection::vec(1u64..30, 0..4), 0u64..6, 0u64..6);
    prop::collection::vec(source, 0..7)
}

proptest! {
    /// Whatever the bounds are, as long as they are true, asking in rounds finds the newest entry that the lookup
    /// sees, within three rounds.
    #[test]
    fn what_is_found_in_rounds_is_the_newest(sources in sources(), as_of in 1u64..30) {
        let visible = |epochs: &[u64], rank: u64| {
            epochs.iter().filter(|e| **e <= as_of).map(|e| at(*e, rank)).max()
        };
        let newest = sources.iter().zip(0..).filter_map(|((e, ..), rank)| visible(e, rank)).max();
        // An empty source is one whose filter is wrong.
        let candidates = sources.iter().zip(0u32..).map(|((epochs, below, above), t)| {
            let min = epochs.iter().min().copied().unwrap_or(10);
            let max = epochs.iter().max().copied().unwrap_or(10);
            block(0, t, (min.saturating_sub(*below), (max + above).min(as_of)), u64::from(t))
        });
        let seen = candidates.filter(|c| c.oldest.0 <= Epoch(as_of));
        let plan = Plan::of(seen.collect(), 1);
        let candidates = plan.candidates(0);
        let (mut found, mut asked, mut rounds) = (None, 0, 0);
        loop {
            let next = to_ask(&candidates[asked..], found, rounds >= 2);
            if next == 0 {
                break;
            }
            for c in &candidates[asked..asked + next] {
                let (epochs, ..) = &sources[c.target as usize];
                found = found.max(visible(epochs, u64::from(c.target)));
            }
            asked += next;
            rounds += 1;
        }
        prop_assert_eq!(found, newest);
        prop_assert!(rounds <= 3);
    }
}
