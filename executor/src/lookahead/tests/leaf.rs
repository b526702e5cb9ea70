//! Rows at a leaf: hints of keys that are not frequent, due at the next barrier.

use super::*;
use crate::lookahead::leaf::{Frequent, LeafHints};
use crate::lookahead::sketch::SketchOptions;

fn change(all: &[(i64, i64, i64)]) -> DeltaChunk {
    DeltaChunk::inserts(rows(all))
}

/// The leaf at node 3 with a route.
fn leaf(route: Route, options: SketchOptions, governor: &Arc<MemoryGovernor>) -> LeafHints {
    let mut leaf = LeafHints::default();
    leaf.add(3, Frequent::new(route, Place::Leaf, options, governor));
    leaf
}

#[tokio::test]
async fn rows_at_a_leaf_are_due_at_its_next_barrier() {
    let (mut ends, route) = Tasks::new(&by_key(), 1, ROOM);
    ends.miss();
    let mut leaf = leaf(route, SketchOptions::default(), &MemoryGovernor::new(1 << 30));
    leaf.look(Place::Leaf, 2, &change(&[(1, 0, 0)]));
    assert!(next(&mut ends.hints[0]).is_none(), "rows of another node");
    let mut dues = Vec::new();
    for epoch in [40, 50] {
        leaf.look(Place::Leaf, 3, &change(&[(1, 0, 0)]));
        let due = next(&mut ends.hints[0]).unwrap().due;
        assert!(!due.has_passed(u64::MAX), "its epoch is open");
        leaf.barrier(Epoch(epoch));
        dues.push(due);
    }
    assert!(dues[0].has_passed(40) && !dues[0].has_passed(39));
    assert!(dues[1].has_passed(50) && !dues[1].has_passed(49));
}

#[tokio::test]
async fn frequent_keys_are_not_hinted_and_a_sketch_is_kept_while_hints_are_wanted() {
    let (mut ends, route) = Tasks::new(&by_key(), 1, ROOM);
    let governor = MemoryGovernor::new(1 << 30);
    let mut leaf = leaf(route, SketchOptions { threshold: 3, ..Default::default() }, &governor);
    leaf.look(Place::Leaf, 3, &change(&[(7, 0, 0)]));
    assert!(ends.told()[0].is_empty());
    assert_eq!(governor.used(), 0, "nobody wants hints");
    ends.miss();
    for i in 0..10 {
        leaf.look(Place::Leaf, 3, &change(&[(7, 0, 0), (100 + i, 0, 0)]));
        let told: HashSet<i64> = ends.told().remove(0).into_keys().collect();
        let expected = if i < 3 { vec![7, 100 + i] } else { vec![100 + i] };
        assert_eq!(told, HashSet::from_iter(expected));
        leaf.barrier(Epoch(10 + i as u64));
    }
    assert_eq!(governor.used(), 40_000);
    assert_eq!(ends.metrics.lookahead.resident.get(), 7);
    ends.rest();
    leaf.look(Place::Leaf, 3, &change(&[(7, 0, 0)]));
    assert_eq!(governor.used(), 0);
}

#[tokio::test]
async fn hints_at_a_leaf_wait_for_no_room() {
    let (mut ends, route) = Tasks::new(&by_key(), 1, 1_000);
    ends.miss();
    let mut leaf = leaf(route, SketchOptions::default(), &MemoryGovernor::new(1 << 30));
    for key in 0..50 {
        // It returns though nobody takes hints.
        leaf.look(Place::Leaf, 3, &change(&[(key, 0, 0)]));
    }
    let told = ends.told()[0].len();
    assert!((1..10).contains(&told), "{told} hints in a thousand bytes");
    assert_eq!(ends.metrics.lookahead.dropped.get(), 50 - told as u64);
}

#[tokio::test]
async fn rows_that_an_operator_puts_out_are_looked_at_while_their_place_is_in_use() {
    let (mut ends, route) = Tasks::new(&by_key(), 1, ROOM);
    ends.miss();
    let spot = |place| Spot { is_own: true, place };
    let side = Arc::new(Side::new(1, vec![spot(Place::Entry), spot(Place::Input)]));
    let route = route.at(Arc::clone(&side), true);
    let governor = MemoryGovernor::new(1 << 30);
    let mut hints = LeafHints::default();
    hints.add(3, Frequent::new(route, Place::Input, SketchOptions::default(), &governor));
    hints.look(Place::Input, 3, &change(&[(1, 0, 0)]));
    assert!(ends.told()[0].is_empty(), "only noted");
    assert!(side.looks_ahead_of_job());
    assert!(side.leave(), "there is the other");
    assert!(!side.looks_ahead_of_job(), "keys that are chained are not announced");
    hints.look(Place::Input, 3, &change(&[(2, 0, 0)]));
    let early = next(&mut ends.hints[0]).unwrap();
    assert_eq!(early.due.epoch(), None, "its epoch is open");
    // Rows that are put out at the barrier are of the epoch that ends.
    hints.begin_barrier(Epoch(40));
    hints.look(Place::Input, 3, &change(&[(3, 0, 0)]));
    let late = next(&mut ends.hints[0]).unwrap();
    hints.barrier(Epoch(40));
    assert_eq!([&early, &late].map(|hint| hint.due.epoch()), [Some(40); 2]);
    hints.look(Place::Input, 3, &change(&[(4, 0, 0)]));
    assert_eq!(next(&mut ends.hints[0]).unwrap().due.epoch(), None, "of the next");
    // Measured wherever rows were seen, against the epoch's first row.
    let epochs = OperatorEpochs::default();
    epochs.join();
    let began = [None, Some(EnvHandle::default().now()), None];
    epochs.pass(40, &EpochNotes { began, ..EpochNotes::default() }, &[Arc::clone(&side)]);
    assert_eq!(side.read().spots.iter().map(|s| s.epochs).collect::<Vec<_>>(), [0, 1]);
}
