//! Who takes part, as the log says, and how far each process has come with the log's records (docs/design.md §9, §10).
//!
//! A process registers in the log and is given an *incarnation*: a number that is never given again and names all that
//! the process writes. Once it is fenced, for good, nothing that it has written and not committed can be committed.
//!
//! A process acknowledges one number: the last record that it has applied, after which it uses nothing that this
//! record or an earlier one has dropped. That is known in memory only: a new leader knows of each process what its
//! registration says, and is told the rest.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use millrace_common::Epoch;
use millrace_rpc::log::{ProcessSnapshot, RegisterProcess};
use parking_lot::Mutex;
use tokio::sync::Notify;

/// Nonces of fenced processes that are remembered, so that no late copy of their registration is taken for a new one.
const FENCED_NONCES: usize = 256;

/// A process that is not fenced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    pub registration: RegisterProcess,
    /// Of the record that registered it.
    pub epoch: Epoch,
    pub number: u64,
    /// It is given no jobs.
    pub drained: bool,
}

/// A live process and how far it has come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessStatus {
    pub incarnation: u64,
    pub process: Process,
    /// The last record that it has applied.
    pub applied: u64,
    /// How long ago it has told the leader of itself; `None`: it is the leader, or has not.
    pub heartbeat: Option<Duration>,
    /// How many jobs run on it.
    pub jobs: usize,
    /// Thousandths of a core that these take; `None`: not known of any.
    pub load: Option<u32>,
}

/// Part of the folded state.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Processes {
    /// The newest incarnation; 0: none was given. Earlier releases took the leader's term for it.
    last: u64,
    live: BTreeMap<u64, Process>,
    /// The newest ones, oldest first.
    fenced_nonces: VecDeque<u64>,
}

impl Processes {
    /// The incarnation that the next registration is given: above all that have been given, and all terms before this
    /// one, which earlier releases took for incarnations.
    pub fn next(&self, term: u64) -> u64 {
        (self.last + 1).max(term)
    }

    /// The newest incarnation that was given; 0: none.
    pub fn last(&self) -> u64 {
        self.last
    }

    /// Those that are not fenced, by incarnation.
    pub fn live(&self) -> &BTreeMap<u64, Process> {
        &self.live
    }

    pub fn is_live(&self, incarnation: u64) -> bool {
        self.live.contains_key(&incarnation)
    }

    /// The incarnation of the live process that has registered with this nonce.
    pub fn by_nonce(&self, nonce: u64) -> Option<u64> {
        self.live.iter().find(|(_, p)| p.registration.nonce == nonce).map(|(id, _)| *id)
    }

    /// Whether a process with this nonce was fenced, not long ago.
    pub fn is_fenced_nonce(&self, nonce: u64) -> bool {
        self.fenced_nonces.contains(&nonce)
    }

    /// Whether nothing of this incarnation can come into the log any more.
    pub fn is_fenced(&self, incarnation: u64) -> bool {
        incarnation <= self.last && !self.is_live(incarnation)
    }

    /// As `is_fenced`, also of a log of an earlier release, where each term fences the ones before.
    pub fn has_ended(&self, incarnation: u64, term: u64) -> bool {
        if self.last == 0 { incarnation < term } else { self.is_fenced(incarnation) }
    }

    /// How many incarnations are fenced; it never falls.
    pub fn fenced(&self) -> u64 {
        self.last - self.live.len() as u64
    }

    pub(crate) fn register(&mut self, incarnation: u64, process: Process) {
        self.last = incarnation;
        self.live.insert(incarnation, process);
    }

    /// Whether it is live.
    pub(crate) fn drain(&mut self, incarnation: u64, drained: bool) -> bool {
        let process = self.live.get_mut(&incarnation);
        process.map(|process| process.drained = drained).is_some()
    }

    /// Whether a live process is given no jobs.
    pub fn is_drained(&self, incarnation: u64) -> bool {
        self.live.get(&incarnation).is_some_and(|process| process.drained)
    }

    /// Whether it was live.
    pub(crate) fn fence(&mut self, incarnation: u64) -> bool {
        let Some(process) = self.live.remove(&incarnation) else { return false };
        if self.fenced_nonces.len() == FENCED_NONCES {
            self.fenced_nonces.pop_front();
        }
        self.fenced_nonces.push_back(process.registration.nonce);
        true
    }

    pub(crate) fn from_snapshot(
        last: u64,
        live: Vec<ProcessSnapshot>,
        fenced_nonces: Vec<u64>,
    ) -> Processes {
        let process = |p: ProcessSnapshot| {
            let ProcessSnapshot { incarnation, registration, epoch, number, drained } = p;
            (incarnation, Process { registration, epoch: Epoch(epoch), number, drained })
        };
        let live = live.into_iter().map(process).collect();
        Processes { last, live, fenced_nonces: fenced_nonces.into() }
    }

    pub(crate) fn live_snapshot(&self) -> Vec<ProcessSnapshot> {
        let process = |(incarnation, p): (&u64, &Process)| ProcessSnapshot {
            incarnation: *incarnation,
            registration: p.registration.clone(),
            epoch: p.epoch.0,
            number: p.number,
            drained: p.drained,
        };
        self.live.iter().map(process).collect()
    }

    pub(crate) fn fenced_nonces(&self) -> impl Iterator<Item = u64> {
        self.fenced_nonces.iter().copied()
    }

    /// Every incarnation was given, and no nonce is there twice.
    pub(crate) fn check(&self) -> Result<(), String> {
        if let Some(id) = self.live.keys().find(|id| **id == 0 || **id > self.last) {
            return Err(format!("incarnation {id} of a process was never given"));
        }
        let mut nonces: Vec<u64> = self.live.values().map(|p| p.registration.nonce).collect();
        nonces.extend(&self.fenced_nonces);
        nonces.sort_unstable();
        match nonces.windows(2).find(|pair| pair[0] == pair[1]) {
            Some(pair) => Err(format!("two processes have registered with nonce {}", pair[0])),
            None => Ok(()),
        }
    }
}

/// How far a live process is.
#[derive(Clone, Copy, Debug)]
struct Position {
    /// The last record that it has applied.
    applied: u64,
    /// The last one that the record stream has brought it; jobs that are busy may not have taken it yet.
    received: u64,
}

/// The last record that each live process has applied.
#[derive(Debug, Default)]
pub struct AppliedRecords {
    /// By incarnation.
    last: Mutex<BTreeMap<u64, Position>>,
    /// Somebody waits until all have applied this record.
    asked: AtomicU64,
    /// Told of every acknowledgement.
    pub changed: Notify,
}

impl AppliedRecords {
    /// Takes over who is live: a process reads the log from the record on that registered it, and nobody waits for one
    /// that is fenced. One that is known keeps what it has acknowledged.
    pub fn sync(&self, processes: &Processes) {
        let mut last = self.last.lock();
        let before = last.len();
        last.retain(|incarnation, _| processes.is_live(*incarnation));
        let fenced = last.len() < before;
        for (incarnation, process) in processes.live() {
            let number = process.number;
            last.entry(*incarnation).or_insert(Position { applied: number, received: number });
        }
        drop(last);
        if fenced {
            self.changed.notify_one();
        }
    }

    /// A process has applied all records up to `number`; a smaller one than before changes nothing. Returns whether
    /// the process is live: what a fenced one says does not count.
    pub fn acknowledge(&self, incarnation: u64, number: u64) -> bool {
        let mut last = self.last.lock();
        let Some(known) = last.get_mut(&incarnation) else { return false };
        let more = number > known.applied;
        known.applied = number.max(known.applied);
        drop(last);
        if more {
            self.changed.notify_one();
        }
        true
    }

    /// The last record that a live process has applied.
    pub fn last_applied(&self, incarnation: u64) -> Option<u64> {
        self.last.lock().get(&incarnation).map(|position| position.applied)
    }

    /// The record stream has brought a process all records up to `number`.
    pub fn note_received(&self, incarnation: u64, number: u64) {
        if let Some(known) = self.last.lock().get_mut(&incarnation) {
            known.received = number.max(known.received);
        }
    }

    /// The last record that has come to a live process, though its jobs may not have taken it yet.
    pub fn reached(&self, incarnation: u64) -> Option<u64> {
        let last = self.last.lock();
        last.get(&incarnation).map(|position| position.applied.max(position.received))
    }

    /// Somebody waits until all have applied this record: a process that does not get there is fenced (`apply_lease`).
    pub fn ask(&self, number: u64) {
        self.asked.fetch_max(number, Ordering::AcqRel);
    }

    /// The last record that somebody has waited for.
    pub fn asked(&self) -> u64 {
        self.asked.load(Ordering::Acquire)
    }

    /// Whether every live process has applied this record and all before it.
    pub fn all_applied(&self, number: u64) -> bool {
        self.last.lock().values().all(|position| position.applied >= number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_applied_by_all_when_the_slowest_live_process_has() {
        let applied = AppliedRecords::default();
        assert!(applied.all_applied(9), "nobody is there");
        let mut processes = Processes::default();
        for (incarnation, number) in [(1, 4), (2, 6)] {
            let registration = RegisterProcess { nonce: incarnation, ..Default::default() };
            let (epoch, drained) = (Epoch(number), false);
            let process = Process { registration, epoch, number, drained };
            processes.register(incarnation, process);
        }
        applied.sync(&processes);
        assert!(applied.all_applied(4) && !applied.all_applied(5));
        assert!(applied.acknowledge(1, 8));
        assert!(applied.all_applied(6) && !applied.all_applied(7));
        assert!(applied.acknowledge(1, 3));
        applied.sync(&processes);
        assert_eq!(applied.last_applied(1), Some(8), "it does not go back");
        assert!(processes.fence(2) && !processes.fence(2));
        applied.sync(&processes);
        assert!(
            applied.all_applied(8) && !applied.all_applied(9),
            "nobody waits for who is fenced"
        );
        assert!(!applied.acknowledge(2, 9));
        assert_eq!(applied.last_applied(2), None);
    }

    #[test]
    fn a_record_that_a_busy_job_has_not_taken_has_come_and_is_not_applied() {
        let applied = AppliedRecords::default();
        let mut processes = Processes::default();
        let (epoch, number, drained) = (Epoch(4), 4, false);
        let registration = RegisterProcess { nonce: 1, ..Default::default() };
        processes.register(1, Process { registration, epoch, number, drained });
        applied.sync(&processes);
        applied.note_received(1, 9);
        applied.note_received(1, 8);
        assert_eq!((applied.reached(1), applied.last_applied(1)), (Some(9), Some(4)));
        assert!(!applied.all_applied(5));
        assert!(applied.acknowledge(1, 11));
        assert_eq!(applied.reached(1), Some(11));
        applied.note_received(2, 9);
        assert_eq!(applied.reached(2), None);
    }
}
