//! Slack and the place in use, epoch by epoch.

use super::super::chain::chain_to;
use super::super::operator::{Activation, EpochReads, OperatorLookahead};
use super::super::trial::{COMPARED, LEFT_OVER, OFF_EPOCHS};
use super::*;
use crate::memory::MemoryGovernor;

const ENTRY: Spot = Spot { is_own: true, place: Place::Entry };
const ROOT: Spot = Spot { is_own: true, place: Place::Root };
const MS: Duration = Duration::from_millis(1);

fn began(at: Instant) -> EpochNotes {
    EpochNotes { began: [Some(at), None, None], ..EpochNotes::default() }
}

fn sides() -> (OperatorEpochs, Vec<Arc<Side>>) {
    let epochs = OperatorEpochs::default();
    epochs.join();
    (epochs, vec![Arc::new(Side::new(0, vec![ENTRY, ROOT]))])
}

#[test]
fn slack_is_from_the_last_hint_of_an_epoch_to_its_first_row() {
    let (epochs, sides) = sides();
    epochs.join();
    let now = Instant::now();
    sides[0].note(ENTRY, &Due::at(10), now);
    sides[0].note(ENTRY, &Due::at(12), now + 2 * MS);
    sides[0].note(ENTRY, &Due::at(1), now + 30 * MS);
    sides[0].note(ENTRY, &Due::at(13), now + 40 * MS);
    sides[0].note(ROOT, &Due::at(12), now + 9 * MS);
    let slowest = EpochNotes { slowest: Some(3 * MS), missed: 1, ..began(now + 8 * MS) };
    epochs.pass(12, &slowest, &sides);
    assert_eq!(epochs.read().epochs, 0, "one instance has not passed it");
    epochs.pass(12, &began(now + 7 * MS), &sides);
    let slack = sides[0].read();
    let of = |at: usize| (slack.spots[at].epochs, slack.spots[at].quantiles[0]);
    assert_eq!((of(0), of(1)), ((1, Some(5_000)), (1, Some(-2_000))));
    let read = epochs.read();
    assert_eq!((read.epochs, read.without_demand), (1, Some(0.0)));
    assert_eq!(read.slowest, [Some(3_000); 3]);
}

#[test]
fn an_epoch_that_an_instance_does_not_tell_of_ends_with_the_next() {
    let (epochs, sides) = sides();
    epochs.join();
    let now = Instant::now();
    epochs.pass(10, &began(now), &sides);
    epochs.pass(11, &began(now), &sides);
    assert_eq!(epochs.read().epochs, 0);
    epochs.pass(11, &began(now), &sides);
    assert_eq!(epochs.read().epochs, 2);
    for epoch in 12..100 {
        epochs.pass(epoch, &began(now), &sides);
    }
    assert_eq!(epochs.epochs.lock().open.len(), OPEN_EPOCHS, "no more are kept");
    assert_eq!(epochs.read().without_demand, Some(1.0));
}

/// Epochs from `from` on: hints at the entry have 20 ms of lead, at the root 6 ms; reads take this long.
fn run(epochs: &OperatorEpochs, sides: &[Arc<Side>], range: std::ops::Range<u64>, read: u32) {
    for epoch in range {
        let now = Instant::now();
        sides[0].note(ENTRY, &Due::at(epoch), now);
        sides[0].note(ROOT, &Due::at(epoch), now + 14 * MS);
        let slowest = Some(read * MS);
        epochs.pass(epoch, &EpochNotes { slowest, ..began(now + 20 * MS) }, sides);
    }
}

#[test]
fn the_place_in_use_follows_the_time_of_reads() {
    let (epochs, sides) = sides();
    assert_eq!(sides[0].active(), Some(ENTRY));
    run(&epochs, &sides, 2..2 + MIN_EPOCHS as u64, 3);
    assert_eq!(sides[0].active(), Some(ROOT), "six are enough for three");
    run(&epochs, &sides, 1_000..1_000 + EPOCHS as u64, 10);
    assert_eq!((sides[0].active(), sides[0].changes()), (Some(ENTRY), 2));
    let seen = sides[0].times.lock().of_spots.iter().map(|s| s.seen.len()).sum::<usize>();
    assert_eq!(seen, 0, "what has passed is forgotten");
}

#[test]
fn a_place_that_sees_no_rows_is_passed_over_until_it_does() {
    let (epochs, sides) = sides();
    let elsewhere = |range: std::ops::Range<u64>| {
        for epoch in range {
            let now = Instant::now();
            sides[0].note(ROOT, &Due::at(epoch), now);
            let slowest = Some(10 * MS);
            epochs.pass(epoch, &EpochNotes { slowest, ..began(now + 6 * MS) }, &sides);
        }
    };
    let many = MIN_EPOCHS as u64;
    elsewhere(2..1 + many);
    assert_eq!(sides[0].active(), Some(ENTRY), "little is known yet");
    elsewhere(1 + many..2 + many);
    assert_eq!(sides[0].active(), Some(ROOT));
    assert!(!sides[0].leave(), "the other one sees nothing");
    run(&epochs, &sides, 1_000..999 + many, 10);
    assert_eq!(sides[0].active(), Some(ROOT), "little is known of it");
    run(&epochs, &sides, 2_000..2_000 + CHOICE_EPOCHS, 10);
    assert_eq!(sides[0].active(), Some(ENTRY), "it has more lead");
}

#[test]
fn a_place_in_vain_is_left_while_there_is_another() {
    let (epochs, sides) = sides();
    run(&epochs, &sides, 2..2 + MIN_EPOCHS as u64, 10);
    assert_eq!(sides[0].active(), Some(ENTRY));
    assert!(sides[0].leave());
    assert_eq!(sides[0].active(), Some(ROOT));
    assert!(!sides[0].leave(), "both would be");
    assert_eq!(sides[0].active(), Some(ROOT));
    run(&epochs, &sides, 1_000..1_000 + BARRED_EPOCHS + CHOICE_EPOCHS, 10);
    assert_eq!(sides[0].active(), Some(ENTRY), "it gets another chance");
}

#[test]
fn a_chain_uses_the_earliest_place_and_pays_for_it() {
    let (epochs, sides) = sides();
    let next = OperatorLookahead::new(&Arc::default());
    let mut wish = Activation::new(&next, &MemoryGovernor::new(1 << 30), 1.0);
    sides[0].set_chains(vec![chain_to(vec![next])]);
    run(&epochs, &sides, 2..2 + MIN_EPOCHS as u64, 3);
    assert_eq!((sides[0].active(), sides[0].changes()), (Some(ROOT), 1), "nothing is chained");
    wish.epoch(EpochReads { missed: 1, ..EpochReads::default() });
    assert_eq!((sides[0].active(), sides[0].changes()), (Some(ENTRY), 2));
    assert_eq!(sides[0].read().in_use().map(|s| s.spot), Some(ENTRY));
    let now = Instant::now();
    epochs.pass(500, &EpochNotes { used: 5, unused: 7, ..began(now) }, &sides);
    let unused = |at: usize| sides[0].times.lock().of_spots[at].unused;
    assert_eq!((unused(0), unused(1)), (7.0, 0.0));
    assert!(sides[0].leave(), "in vain at the entry");
    assert_eq!(sides[0].active(), Some(ROOT), "the earliest that is left");
    run(&epochs, &sides, 1_000..1_000 + BARRED_EPOCHS + CHOICE_EPOCHS, 3);
    assert_eq!(sides[0].active(), Some(ENTRY));
    while wish.is_active() {
        wish.epoch(EpochReads::default());
    }
    assert_eq!(sides[0].active(), Some(ROOT), "as chosen");
}

#[test]
fn a_step_of_a_chain_that_hides_nothing_is_left_out_for_a_while() {
    let epochs = OperatorEpochs::default();
    epochs.join();
    let sides = vec![Arc::new(Side::new(0, vec![ENTRY]).chained())];
    let mut epoch = 1;
    let mut pass = |notes: &EpochNotes| {
        epoch += 1;
        epochs.pass(epoch, notes, &sides)
    };
    let standing = || (sides[0].read().standing, sides[0].is_left_out());
    // Most rows wait as long as without hints.
    let without = EpochNotes { missed: 9, waited: Some(100 * MS), ..began(Instant::now()) };
    let late = EpochNotes { used: 8, late: 6, ..without };
    // Rows of another input tell nothing of this one.
    let of_other = EpochNotes { began: [None, Some(Instant::now()), None], ..late };
    (0..MIN_EPOCHS * 2).for_each(|_| assert!(!pass(&of_other)));
    assert_eq!((0..MIN_EPOCHS).filter(|_| pass(&late)).count(), 1, "it is told once");
    assert_eq!(standing(), (Standing::Compared, true));
    let compared = LEFT_OVER as usize + COMPARED;
    assert_eq!((0..compared).filter(|_| pass(&without)).count(), 1);
    assert_eq!(standing(), (Standing::TooLate, true));
    assert_eq!((0..OFF_EPOCHS).filter(|_| pass(&without)).count(), 1);
    assert_eq!(standing(), (Standing::Announced, false), "it gets another chance");
}

/// Rows inside the job are seen all the time. Of those before it nothing is noted while the step is left out.
#[test]
fn a_step_that_is_left_out_keeps_its_place() {
    const INSIDE: Spot = Spot { is_own: true, place: Place::Input };
    let epochs = OperatorEpochs::default();
    epochs.join();
    let sides = vec![Arc::new(Side::new(0, vec![ENTRY, INSIDE]).chained())];
    let mut epoch = 1;
    let mut pass = |used: u64| {
        epoch += 1;
        let now = Instant::now();
        // Both come after their rows.
        let seen = [(ENTRY, used > 0), (INSIDE, true)];
        for (spot, _) in seen.into_iter().filter(|(_, is_seen)| *is_seen) {
            sides[0].note(spot, &Due::at(epoch), now + 5 * MS);
        }
        let waited = Some(100 * MS);
        let (late, missed) = (used, 9);
        let notes = EpochNotes { used, late, missed, waited, slowest: waited, ..began(now) };
        epochs.pass(epoch, &notes, &sides);
    };
    (0..MIN_EPOCHS).for_each(|_| pass(8));
    assert_eq!(sides[0].read().standing, Standing::Compared);
    let compared = LEFT_OVER as usize + COMPARED;
    (0..compared + 2 * MIN_EPOCHS).for_each(|_| pass(0));
    assert_eq!(sides[0].read().standing, Standing::TooLate);
    assert_eq!(sides[0].active(), Some(ENTRY));
    // Where too much is read in vain for another input, all inputs take other places.
    assert!(sides[0].leave());
    assert_eq!((sides[0].active(), sides[0].read().standing), (Some(INSIDE), Standing::Announced));
}

#[test]
fn only_steps_of_chains_are_left_out() {
    let (epochs, sides) = sides();
    let waited = Some(100 * MS);
    let late = EpochNotes { used: 8, late: 8, missed: 9, waited, ..began(Instant::now()) };
    (2..2 + 4 * MIN_EPOCHS as u64).for_each(|epoch| assert!(!epochs.pass(epoch, &late, &sides)));
    assert_eq!(sides[0].read().standing, Standing::Announced);
}

#[test]
fn what_a_place_has_seen_is_bounded() {
    let (_, sides) = sides();
    for _ in 0..SEEN + 10 {
        sides[0].note(ENTRY, &Due::default(), Instant::now());
    }
    let one = Due::default();
    (0..10).for_each(|_| sides[0].note(ROOT, &one, Instant::now()));
    let times = sides[0].times.lock();
    assert_eq!([0, 1].map(|at| times.of_spots[at].seen.len()), [SEEN, 1]);
}
