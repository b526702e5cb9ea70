//! Which job moves to another process because loads have changed (docs/design.md §10). Where those run that are new, or
//! whose process is gone, [`crate::placement`] says.
//!
//! A look compares what the jobs of each process take. Moving one job is *worth it* at a look if its process takes clearly
//! more than the other one and what then runs beside it takes clearly less than what does now ([`Move::is_worth_it`]). A
//! move that was worth it at [`LOOKS`] looks in a row is to be made, the best one of several; then it takes as many looks
//! until the next. A load is an average over a minute, so what comes and goes sooner moves nothing.
//!
//! No job goes to and fro:
//!
//! - With loads that stay as they are each move makes the sum of the squares of what the processes take smaller: by
//!   2 w (d - w), for a job that takes w and processes that differ by d, where w ≥ 100, d ≥ 500 and d - w ≥ d / 4. That is
//!   80,000 at least, so moves come to an end; then no single one is worth it.
//! - A job moves to where the others take at least d / 4 ≥ 125 less than those beside it. It would move back when the others
//!   there take so much more, after these have changed by twice that, and have stayed so for all looks.
//! - Whatever loads do, a job that was moved stays for [`REST`] looks.
//!
//! What looks have seen is in memory only, and a new leader begins with none: it may move a job sooner again, once.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use millrace_common::JobId;

use crate::job_loads::Loads;
use crate::placement::is_writer;
use crate::state::{JobRecord, MetaState};

/// At so many looks in a row a move has to be worth it.
const LOOKS: u32 = 5;
/// For so many looks a job stays where it was moved.
const REST: u64 = 40;
/// What the busier process takes more than the other one, in thousandths of a core, at least.
const DIFFERENCE: u64 = 500;
/// What a job takes that is moved, at least.
const LEAST: u64 = 100;

/// A job that is to run on another process, and what these take, in thousandths of a core.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    pub job: JobId,
    pub from: u64,
    pub to: u64,
    pub load: u64,
    pub from_load: u64,
    pub to_load: u64,
}

impl Move {
    fn difference(&self) -> u64 {
        self.from_load.saturating_sub(self.to_load)
    }

    /// What the jobs beside it take more where it runs than where it would.
    fn difference_of_others(&self) -> u64 {
        self.difference().saturating_sub(self.load)
    }

    /// The process takes clearly more than the other one: half as much again, too. And what it has beside the job takes
    /// clearly more than the other one does, so that the two do not just change places.
    fn is_worth_it(&self) -> bool {
        let is_clear = self.difference() >= DIFFERENCE && self.from_load * 2 >= self.to_load * 3;
        is_clear && self.load >= LEAST && self.difference_of_others() * 4 >= self.difference()
    }

    /// By how much the busier of the two takes less afterwards.
    fn relief(&self) -> u64 {
        self.load.min(self.difference_of_others())
    }

    pub fn is_same(&self, other: &Move) -> bool {
        (self.job, self.from, self.to) == (other.job, other.from, other.to)
    }
}

/// What is looked at.
pub struct Look<'a> {
    pub state: &'a MetaState,
    /// Of jobs whose processes tell it now.
    pub loads: &'a Loads,
    /// The processes that jobs may be placed on.
    pub takers: &'a [u64],
    /// Whether a job does what it is there for.
    pub is_running: &'a dyn Fn(JobId) -> bool,
}

impl Look<'_> {
    /// All moves that are worth it.
    pub fn moves(&self) -> Vec<Move> {
        let (mut moves, processes) = (Vec::new(), self.processes());
        for (id, job) in self.state.jobs.iter() {
            let (load, from) = (self.load(*id), job.process);
            let Some(from_load) = processes.get(&from).copied() else { continue };
            if load < LEAST || !self.may_move(*id, job) {
                continue;
            }
            let to = |(to, to_load): (&u64, &u64)| Move {
                job: *id,
                from,
                to: *to,
                load,
                from_load,
                to_load: *to_load,
            };
            moves.extend(processes.iter().map(to).filter(Move::is_worth_it));
        }
        moves
    }

    fn load(&self, job: JobId) -> u64 {
        self.loads.get(&job).map_or(0, |load| u64::from(*load))
    }

    /// What the jobs of each process take. Without those on which a first scan is under way: what it takes is over with it,
    /// so they neither give nor take jobs.
    fn processes(&self) -> BTreeMap<u64, u64> {
        let mut loads: BTreeMap<u64, u64> = self.takers.iter().map(|id| (*id, 0)).collect();
        for (id, job) in self.state.jobs.iter() {
            if let Some(sum) = loads.get_mut(&job.process) {
                *sum += self.load(*id);
            }
        }
        let scans = |job: &&JobRecord| {
            job.version.backfill.as_ref().is_some_and(|backfill| backfill.snapshot_epoch != 0)
        };
        for job in self.state.jobs.values().filter(scans) {
            loads.remove(&job.process);
        }
        loads
    }

    /// Jobs that write to tables stay together, where they are: to move all of them would have every statement wait.
    fn may_move(&self, id: JobId, job: &JobRecord) -> bool {
        let stays = job.by_operator || job.version.backfill.is_some() || is_writer(self.state, id);
        !stays && (self.is_running)(id)
    }
}

/// See the module.
#[derive(Debug, Default)]
pub struct Rebalancer {
    /// How many looks there were.
    looks: u64,
    /// What the last one has seen: the processes that take jobs, and where each job runs.
    takers: Vec<u64>,
    placed: BTreeMap<JobId, u64>,
    /// At how many looks in a row each move, of a job to a process, was worth it.
    worth: BTreeMap<(JobId, u64), u32>,
    /// At which look each job was moved last.
    moved: BTreeMap<JobId, u64>,
}

impl Rebalancer {
    /// Looks once more. The move that is to be made now, if there is one.
    pub fn look(&mut self, look: &Look<'_>) -> Option<Move> {
        self.looks += 1;
        if self.has_changed(look) {
            self.worth.clear();
        }
        let now = self.looks;
        self.moved.retain(|id, at| look.state.jobs.contains_key(id) && now < *at + REST);
        let before = std::mem::take(&mut self.worth);
        let mut due = Vec::new();
        for found in look.moves().into_iter().filter(|m| !self.moved.contains_key(&m.job)) {
            let key = (found.job, found.to);
            let looks = before.get(&key).map_or(1, |looks| looks + 1);
            self.worth.insert(key, looks);
            if looks >= LOOKS {
                due.push(found);
            }
        }
        let rank = |m: &Move| (m.relief(), m.from_load, Reverse(m.to_load), m.job);
        let best = due.into_iter().max_by_key(rank)?;
        self.forget();
        Some(best)
    }

    /// What looks have seen until now says nothing of what comes.
    pub fn forget(&mut self) {
        self.worth.clear();
    }

    /// The move of this job was made.
    pub fn note_moved(&mut self, job: JobId) {
        self.moved.insert(job, self.looks);
    }

    /// Whether processes have come or gone since the last look, or jobs run elsewhere.
    fn has_changed(&mut self, look: &Look<'_>) -> bool {
        let takers = std::mem::replace(&mut self.takers, look.takers.to_vec());
        let placed = look.state.jobs.iter().map(|(id, job)| (*id, job.process)).collect();
        let before = std::mem::replace(&mut self.placed, placed);
        let is_elsewhere =
            |(id, now): (&JobId, &u64)| before.get(id).is_some_and(|process| process != now);
        takers != self.takers || self.placed.iter().any(is_elsewhere)
    }
}

#[cfg(test)]
mod tests;
