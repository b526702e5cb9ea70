//! How much lead hints have, and how long reads take, by epoch (docs/design.md §8).
//!
//! Places note when they saw rows that an epoch brings; the instances of the operator note when its rows came and how
//! long its slowest read took. What they say is put together when all instances have passed the epoch. Nothing is noted
//! while no hints are wanted, and what is kept is of the last [`EPOCHS`] epochs.

#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use millrace_graph::lookahead::{Place, Subject};
use parking_lot::Mutex;
use tokio::time::Instant;

use super::Due;
use super::chain::{Chain, Walk};
use super::choice::{Candidate, MIN_EPOCHS, choose, quantile, sorted};
use super::trial::{Standing, StepEpoch, Trial};

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
    /// The longest that rows have waited for an answer of the store.
    pub waited: Option<Duration>,
    /// Keys for which rows have waited.
    pub missed: u64,
    /// Keys that were read ahead, and used or not; of the used ones those whose rows came while they were being read.
    pub used: u64,
    pub late: u64,
    pub unused: u64,
}

impl EpochNotes {
    pub fn has_rows(&self) -> bool {
        self.began.iter().any(Option::is_some)
    }

    pub fn note_read(&mut self, took: Duration) {
        self.slowest = self.slowest.max(Some(took));
    }

    /// Rows have waited for a read.
    pub fn note_wait(&mut self, took: Duration) {
        self.note_read(took);
        self.waited = self.waited.max(Some(took));
    }

    pub fn join(&mut self, other: &EpochNotes) {
        for (own, other) in self.began.iter_mut().zip(other.began) {
            *own = [*own, other].into_iter().flatten().min();
        }
        self.slowest = self.slowest.max(other.slowest);
        self.waited = self.waited.max(other.waited);
        self.missed += other.missed;
        self.used += other.used;
        self.late += other.late;
        self.unused += other.unused;
    }

    fn slowest_micros(&self) -> i64 {
        self.slowest.map_or(0, |took| took.as_micros() as i64)
    }

    fn of_step(&self) -> StepEpoch {
        StepEpoch {
            in_time: self.used.saturating_sub(self.late),
            late: self.late,
            missed: self.missed,
            waited: self.waited.map_or(0, |took| took.as_micros() as i64),
        }
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

    /// An instance has passed an epoch. Tells `sides` of those that all have passed. Whether a step of a chain is
    /// announced from now on, or no longer.
    pub fn pass(&self, epoch: u64, notes: &EpochNotes, sides: &[Arc<Side>]) -> bool {
        let mut epochs = self.epochs.lock();
        let mut has_changed = false;
        for (epoch, notes) in epochs.add(epoch, notes, self.instances.load(Ordering::Relaxed)) {
            let after = std::mem::replace(&mut epochs.last, epoch);
            if notes.has_rows() {
                push(&mut epochs.recent, (notes.slowest_micros(), notes.missed > 0));
            }
            for side in sides {
                has_changed |= side.pass(after, epoch, &notes);
            }
        }
        has_changed
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
    /// It is a step of a chain that is not announced now: see [`Trial`].
    is_left_out: AtomicBool,
    times: Mutex<Times>,
}

#[derive(Debug, Default)]
struct Times {
    of_spots: Vec<SpotTimes>,
    /// That were put together.
    epochs: u64,
    /// Of a step of a chain.
    trial: Option<Trial>,
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
        let times = Mutex::new(Times { of_spots, ..Times::default() });
        let [chosen, earliest, used] = Default::default();
        let (changes, chains, is_left_out) = Default::default();
        let subject = None;
        Side { port, subject, spots, chosen, earliest, used, changes, chains, is_left_out, times }
    }

    /// All its keys are chained: it is a step of a chain, which is left out where it hides nothing.
    pub fn chained(self) -> Side {
        self.times.lock().trial = Some(Trial::default());
        self
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

    /// It is a step of a chain whose keys are not announced now, nor are those that would be chained to them.
    pub fn is_left_out(&self) -> bool {
        self.is_left_out.load(Ordering::Relaxed)
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

    /// All instances have passed an epoch; the one before it was `after`. Whether it is announced from now on as a step of
    /// a chain, or no longer.
    fn pass(&self, after: u64, epoch: u64, notes: &EpochNotes) -> bool {
        let mut times = self.times.lock();
        let began = notes.began.get(self.port).copied().flatten();
        let spots = times.of_spots.iter_mut();
        let seen: Vec<_> = spots.map(|spot| (spot.last_of(after, epoch), spot)).collect();
        // Of a step that is left out only places inside the job see rows, which says nothing against the others.
        let is_left_out = self.is_left_out() && self.looks_ahead_of_job();
        // Where no place has seen its rows, nobody was looking, or they are not of this side.
        let is_seen = !is_left_out && seen.iter().any(|(last, _)| last.is_some());
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
        // While rows are looked at inside the job no keys are chained.
        let is_step = began.is_some() && self.looks_ahead_of_job();
        let Some(trial) = times.trial.as_mut().filter(|_| is_step) else { return false };
        let has_changed = trial.epoch(notes.of_step());
        self.is_left_out.store(trial.standing() != Standing::Announced, Ordering::Relaxed);
        has_changed
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
        // Rows inside the job are announced whatever becomes of chained keys.
        let trial = times.trial.as_ref().filter(|_| self.looks_ahead_of_job());
        let standing = trial.map(Trial::standing).unwrap_or_default();
        let (port, subject, active) = (self.port, self.subject, self.in_use());
        SideSlack { port, subject, active, spots, standing }
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
    /// Of a step of a chain, whether it is announced.
    pub standing: Standing,
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
