//! How much lead hints have, and how long reads take, by epoch (docs/design.md §8).
//!
//! Places note when they saw rows that an epoch brings; the instances of the operator note when its rows came and how
//! long its slowest read took. What they say is put together when all instances have passed the epoch. Nothing is noted
//! while no hints are wanted, and what is kept is of the last [`EPOCHS`] epochs.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use millrace_graph::lookahead::{Place, Subject};
use parking_lot::Mutex;
use tokio::time::Instant;

use super::Due;
use super::chain::{Chain, Walk};
use super::choice::{Candidate, MIN_EPOCHS, choose, quantile, sorted};

/// Epochs that are remembered.
pub const EPOCHS: usize = 256;
/// Inputs of an operator with keyed state.
pub const PORTS: usize = 2;
/// These, and the first one's rows that are deleted: see [`super::DELETED_PORT`].
pub const NOTED: usize = PORTS + 1;
/// Epochs that not all instances have passed, at most.
const OPEN_EPOCHS: usize = 8;
/// Rows seen at a place whose epoch is not told yet, at most.
const SEEN: usize = 4_096;
/// Epochs between two choices.
const CHOICE_EPOCHS: u64 = 16;
/// Epochs for which a place is not chosen that was left because hints were in vain.
const BARRED_EPOCHS: u64 = 1_024;
/// What is left after an epoch of what was counted before it.
pub const DECAY: f64 = 63.0 / 64.0;

/// What one instance of an operator saw of an epoch.
#[derive(Clone, Copy, Debug, Default)]
pub struct EpochNotes {
    /// When the first row came, by input as hints name it.
    pub began: [Option<Instant>; NOTED],
    /// The slowest read of the store that was answered in it, for rows or ahead of them.
    pub slowest: Option<Duration>,
    /// Keys for which rows have waited.
    pub missed: u64,
    /// Keys that were read ahead, and used or not.
    pub used: u64,
    pub unused: u64,
}

impl EpochNotes {
    pub fn has_rows(&self) -> bool {
        self.began.iter().any(Option::is_some)
    }

    pub fn note_read(&mut self, took: Duration) {
        self.slowest = self.slowest.max(Some(took));
    }

    pub fn join(&mut self, other: &EpochNotes) {
        for (own, other) in self.began.iter_mut().zip(other.began) {
            *own = [*own, other].into_iter().flatten().min();
        }
        self.slowest = self.slowest.max(other.slowest);
        self.missed += other.missed;
        self.used += other.used;
        self.unused += other.unused;
    }

    fn slowest_micros(&self) -> i64 {
        self.slowest.map_or(0, |took| took.as_micros() as i64)
    }
}

/// An epoch that some instances have passed.
#[derive(Debug)]
struct OpenEpoch {
    epoch: u64,
    instances: usize,
    notes: EpochNotes,
}

#[derive(Debug, Default)]
struct Epochs {
    open: VecDeque<OpenEpoch>,
    /// The newest that is put together.
    last: u64,
    /// Of those with rows: the slowest read (microseconds, 0: none), and whether a row has waited.
    recent: VecDeque<(i64, bool)>,
}

/// The epochs of one operator, of all its instances.
#[derive(Debug, Default)]
pub struct OperatorEpochs {
    instances: AtomicUsize,
    epochs: Mutex<Epochs>,
}

impl OperatorEpochs {
    /// One more instance passes epochs.
    pub fn join(&self) {
        self.instances.fetch_add(1, Ordering::Relaxed);
    }

    /// An instance has passed an epoch. Tells `sides` of those that all have passed.
    pub fn pass(&self, epoch: u64, notes: &EpochNotes, sides: &[Arc<Side>]) {
        let mut epochs = self.epochs.lock();
        for (epoch, notes) in epochs.add(epoch, notes, self.instances.load(Ordering::Relaxed)) {
            let after = std::mem::replace(&mut epochs.last, epoch);
            if notes.has_rows() {
                push(&mut epochs.recent, (notes.slowest_micros(), notes.missed > 0));
            }
            sides.iter().for_each(|side| side.pass(after, epoch, &notes));
        }
    }

    pub fn read(&self) -> ReadTimes {
        let epochs = self.epochs.lock();
        let count = epochs.recent.len();
        let met = epochs.recent.iter().filter(|(_, has_waited)| !has_waited).count();
        let reads = sorted(epochs.recent.iter().map(|e| e.0).filter(|read| *read > 0));
        ReadTimes {
            epochs: count,
            without_demand: (count > 0).then(|| met as f64 / count as f64),
            slowest: [0.5, 0.9, 0.99].map(|q| quantile(&reads, q)),
        }
    }
}

impl Epochs {
    /// Adds what an instance says of an epoch; those that are complete, oldest first.
    fn add(&mut self, epoch: u64, notes: &EpochNotes, instances: usize) -> Vec<(u64, EpochNotes)> {
        if epoch <= self.last {
            return Vec::new();
        }
        let at = self.open.partition_point(|open| open.epoch < epoch);
        match self.open.get_mut(at).filter(|open| open.epoch == epoch) {
            Some(open) => {
                open.instances += 1;
                open.notes.join(notes);
            }
            None => self.open.insert(at, OpenEpoch { epoch, instances: 1, notes: *notes }),
        }
        // An instance passes its epochs in order: who has passed a later one says nothing more of an earlier.
        let complete = self.open.iter().rposition(|open| open.instances >= instances);
        let complete = complete.map_or(0, |at| at + 1);
        let ended = complete.max(self.open.len().saturating_sub(OPEN_EPOCHS));
        self.open.drain(..ended).map(|open| (open.epoch, open.notes)).collect()
    }
}

fn push<T>(ring: &mut VecDeque<T>, item: T) {
    if ring.len() == EPOCHS {
        ring.pop_front();
    }
    ring.push_back(item);
}

/// How long the reads of an operator's epochs took.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ReadTimes {
    /// Epochs that this is about.
    pub epochs: usize,
    /// The share of epochs in which no row has waited.
    pub without_demand: Option<f64>,
    /// Median, 90th and 99th percentile over epochs of the slowest read, microseconds; of epochs with reads.
    pub slowest: [Option<i64>; 3],
}

/// A place for an input: rows of the relation that the job reads, or of one behind it, seen somewhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Spot {
    /// The relation is the one that the leaf reads.
    pub is_own: bool,
    pub place: Place,
}

impl Spot {
    pub fn name(self) -> &'static str {
        match (self.is_own, self.place) {
            (true, Place::Entry) => "entry",
            (true, Place::Root) => "root",
            (true, Place::Leaf) => "leaf",
            (false, Place::Entry) => "input entry",
            (false, Place::Root) => "input root",
            (false, Place::Leaf) => "input leaf",
            (_, Place::Input) => "input",
        }
    }
}

/// An input of an operator, as far as one leaf brings its rows: where they can be looked at, and where they are. Shared
/// by the walkers and the operator's instances.
#[derive(Debug)]
pub struct Side {
    pub port: usize,
    subject: Option<Subject>,
    /// The earliest first.
    spots: Vec<Spot>,
    /// The one that was chosen, and the earliest that sees rows and has not been left.
    chosen: AtomicUsize,
    earliest: AtomicUsize,
    /// The one that was in use when that was last asked, and how often another was.
    used: AtomicUsize,
    changes: AtomicU64,
    /// Of lookaheads by its rows.
    chains: OnceLock<Vec<Arc<Chain>>>,
    times: Mutex<Times>,
}

#[derive(Debug, Default)]
struct Times {
    of_spots: Vec<SpotTimes>,
    /// That were put together.
    epochs: u64,
}

/// What a place has seen.
#[derive(Debug)]
struct SpotTimes {
    /// Of epochs that are not put together yet: when rows were last looked at.
    seen: VecDeque<(Due, Instant)>,
    /// Of the last epochs: the slack and the slowest read, microseconds.
    epochs: VecDeque<(i64, i64)>,
    /// Keys read ahead while this place was in use, of the last epochs.
    used: f64,
    unused: f64,
    /// Not chosen before this many epochs.
    barred: u64,
    /// The last epochs, in a row, of whose rows it has seen none, and another place some.
    unseen: usize,
}

impl SpotTimes {
    fn new() -> SpotTimes {
        let (seen, epochs) = (VecDeque::new(), VecDeque::new());
        SpotTimes { seen, epochs, used: 0.0, unused: 0.0, barred: 0, unseen: 0 }
    }

    /// An epoch with rows has passed, the first of which came then. `last`: when the place has seen some of them.
    fn pass(&mut self, began: Instant, last: Option<Instant>, slowest: i64) {
        match last {
            Some(last) => {
                self.unseen = 0;
                push(&mut self.epochs, (micros_between(last, began), slowest));
            }
            None => self.unseen = self.unseen.saturating_add(1),
        }
    }

    /// Rows do not come by this place: those of a job in another process are not seen before they are committed.
    fn is_silent(&self) -> bool {
        self.unseen >= MIN_EPOCHS
    }

    /// It may be chosen.
    fn is_open(&self, epochs: u64) -> bool {
        epochs >= self.barred && !self.is_silent()
    }

    /// When rows of the epochs after `after` up to `epoch` were last looked at. Forgets them.
    fn last_of(&mut self, after: u64, epoch: u64) -> Option<Instant> {
        let mut last = None;
        self.seen.retain(|(due, at)| match due.epoch() {
            Some(due) if due <= epoch => {
                if due > after.max(1) {
                    last = last.max(Some(*at));
                }
                false
            }
            _ => true,
        });
        last
    }

    fn candidate(&self, epochs: u64) -> Candidate {
        Candidate {
            epochs: self.epochs.iter().copied().collect(),
            cost: if self.used > 0.0 { 1.0 + self.unused / self.used } else { 1.0 },
            is_barred: epochs < self.barred,
            is_silent: self.is_silent(),
        }
    }
}

impl Side {
    /// Looked at by one of these places, the earliest first: at the first, until more is known.
    pub fn new(port: usize, spots: Vec<Spot>) -> Side {
        let of_spots = spots.iter().map(|_| SpotTimes::new()).collect();
        let times = Mutex::new(Times { of_spots, epochs: 0 });
        let [chosen, earliest, used] = Default::default();
        let (changes, chains) = Default::default();
        Side { port, subject: None, spots, chosen, earliest, used, changes, chains, times }
    }

    /// What of the operator is looked ahead of, for those who read about it.
    pub fn about(self, subject: Subject) -> Side {
        Side { subject: Some(subject), ..self }
    }

    /// What is chained to lookaheads by its rows: as long as any of it is wanted the earliest place is used that has not
    /// been left, since a chain of reads needs the most lead.
    pub fn set_chains(&self, chains: Vec<Arc<Chain>>) {
        // Only who makes it sets it.
        let _ = self.chains.set(chains);
    }

    /// Some lookahead is wanted that is chained to one by its rows.
    pub fn is_chain_wanted(&self) -> bool {
        self.chains.get().into_iter().flatten().any(|chain| chain.is_wanted())
    }

    /// The place whose rows are looked at.
    pub fn active(&self) -> Option<Spot> {
        self.spots.get(self.in_use()).copied()
    }

    /// Rows are not looked at inside the job, behind its leaf.
    pub fn looks_ahead_of_job(&self) -> bool {
        self.looks_ahead_in(&mut Walk::default())
    }

    /// The same, as a part of a walk over chains.
    pub fn looks_ahead_in(&self, walk: &mut Walk) -> bool {
        self.spots.get(self.in_use_in(walk)).is_none_or(|spot| spot.place != Place::Input)
    }

    fn in_use(&self) -> usize {
        self.in_use_in(&mut Walk::default())
    }

    fn in_use_in(&self, walk: &mut Walk) -> usize {
        let [earliest, chosen] =
            [&self.earliest, &self.chosen].map(|at| at.load(Ordering::Relaxed));
        let mut chains = self.chains.get().into_iter().flatten();
        let is_chained = earliest != chosen && chains.any(|chain| chain.is_wanted_in(walk));
        let at = if is_chained { earliest } else { chosen };
        let is_other = self.used.load(Ordering::Relaxed) != at;
        if is_other && self.used.swap(at, Ordering::Relaxed) != at {
            self.changes.fetch_add(1, Ordering::Relaxed);
        }
        at
    }

    /// How often another place has been used.
    pub fn changes(&self) -> u64 {
        self.in_use();
        self.changes.load(Ordering::Relaxed)
    }

    /// Rows were seen at a place, and looked at if it is the active one.
    pub fn note(&self, spot: Spot, due: &Due, at: Instant) {
        let Some(index) = self.spots.iter().position(|s| *s == spot) else { return };
        let mut times = self.times.lock();
        let Some(of_spot) = times.of_spots.get_mut(index) else { return };
        if let Some((_, last)) = of_spot.seen.back_mut().filter(|(known, _)| known.is_same(due)) {
            *last = at.max(*last);
            return;
        }
        if of_spot.seen.len() == SEEN {
            of_spot.seen.pop_front();
        }
        of_spot.seen.push_back((due.clone(), at));
    }

    /// All instances have passed an epoch; the one before it was `after`.
    fn pass(&self, after: u64, epoch: u64, notes: &EpochNotes) {
        let mut times = self.times.lock();
        let began = notes.began.get(self.port).copied().flatten();
        let spots = times.of_spots.iter_mut();
        let seen: Vec<_> = spots.map(|spot| (spot.last_of(after, epoch), spot)).collect();
        // Where no place has seen its rows, nobody was looking, or they are not of this side.
        let is_seen = seen.iter().any(|(last, _)| last.is_some());
        if let Some(began) = began.filter(|_| is_seen) {
            for (last, spot) in seen {
                spot.pass(began, last, notes.slowest_micros());
            }
        }
        if let Some(of_spot) = times.of_spots.get_mut(self.in_use()) {
            of_spot.used = of_spot.used * DECAY + notes.used as f64;
            of_spot.unused = of_spot.unused * DECAY + notes.unused as f64;
        }
        times.epochs += 1;
        if times.epochs.is_multiple_of(CHOICE_EPOCHS) {
            self.choose(&times);
        }
    }

    /// Takes the best place; whether there is one.
    fn choose(&self, times: &Times) -> bool {
        let first =
            |is_taken: &dyn Fn(&SpotTimes) -> bool| times.of_spots.iter().position(is_taken);
        let open = first(&|spot| spot.is_open(times.epochs));
        let Some(earliest) = open.or_else(|| first(&|spot| times.epochs >= spot.barred)) else {
            return false;
        };
        self.earliest.store(earliest, Ordering::Relaxed);
        if self.spots.len() > 1 {
            let candidates: Vec<Candidate> =
                times.of_spots.iter().map(|s| s.candidate(times.epochs)).collect();
            let chosen = choose(&candidates, self.chosen.load(Ordering::Relaxed));
            self.chosen.store(chosen.unwrap_or(earliest), Ordering::Relaxed);
        }
        self.in_use();
        true
    }

    /// Leaves the place in use for a while, since too much was read ahead in vain. False, and nothing is changed: there is
    /// no other.
    pub fn leave(&self) -> bool {
        let mut times = self.times.lock();
        let in_use = self.in_use();
        let others = times.of_spots.iter().enumerate().filter(|(at, _)| *at != in_use);
        if !others.map(|(_, s)| s).any(|s| s.is_open(times.epochs)) {
            return false;
        }
        let until = times.epochs + BARRED_EPOCHS;
        if let Some(of_spot) = times.of_spots.get_mut(in_use) {
            of_spot.barred = until;
        }
        self.choose(&times)
    }

    /// By place, the earliest first: see [`SpotSlack`].
    pub fn read(&self) -> SideSlack {
        let times = self.times.lock();
        let slack = |(spot, of_spot): (&Spot, &SpotTimes)| {
            let slacks = sorted(of_spot.epochs.iter().map(|e| e.0));
            let quantiles = [0.01, 0.5, 0.99].map(|q| quantile(&slacks, q));
            SpotSlack { spot: *spot, epochs: slacks.len(), quantiles }
        };
        let spots = self.spots.iter().zip(&times.of_spots).map(slack).collect();
        SideSlack { port: self.port, subject: self.subject, active: self.in_use(), spots }
    }
}

/// What is known of an input's places.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SideSlack {
    pub port: usize,
    /// What it is about, if that is known: of one port there may be several.
    pub subject: Option<Subject>,
    /// The one in use.
    pub active: usize,
    pub spots: Vec<SpotSlack>,
}

impl SideSlack {
    pub fn in_use(&self) -> Option<&SpotSlack> {
        self.spots.get(self.active)
    }
}

/// How much lead hints of a place have, or would have.
#[derive(Clone, Debug, PartialEq)]
pub struct SpotSlack {
    pub spot: Spot,
    /// Epochs that this is about.
    pub epochs: usize,
    /// 1st, 50th and 99th percentile over epochs of the time from the last hint to the first row, microseconds.
    pub quantiles: [Option<i64>; 3],
}

fn micros_between(from: Instant, to: Instant) -> i64 {
    match to.checked_duration_since(from) {
        Some(slack) => slack.as_micros() as i64,
        None => -(from.duration_since(to).as_micros() as i64),
    }
}

#[cfg(test)]
mod tests {
    use super::super::chain::chain_to;
    use super::super::operator::{Activation, EpochReads, OperatorLookahead};
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
}
