//! How much of a core each job takes, by what its process tells with its heartbeats (docs/design.md §10).
//!
//! It is in memory only: a new leader knows it after a few heartbeats, and until then jobs count alike. What is known of a
//! job stays known when its process is lost or it is started again: just then it has to be placed.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use millrace_common::{JobId, RelationId};
use millrace_rpc::control::JobReport;
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::state::MetaState;

/// Over which time a load is taken: what comes and goes sooner moves nothing.
const WINDOW: Duration = Duration::from_secs(60);
/// Between two measures that are kept.
const STEP: Duration = Duration::from_secs(4);

/// What a process has told no longer ago than this is what it tells now.
const RECENT: Duration = STEP.saturating_mul(3);

/// Loads of jobs, in thousandths of a core.
pub type Loads = BTreeMap<JobId, u32>;

/// How long cores had worked for a job by some moment.
#[derive(Clone, Copy, Debug)]
struct Measure {
    at: Instant,
    worked_us: u64,
}

#[derive(Debug, Default)]
struct Measured {
    /// Who has told the measures.
    process: u64,
    /// Of the window, ascending.
    measures: VecDeque<Measure>,
    load: Option<u32>,
}

impl Measured {
    fn note(&mut self, process: u64, new: Measure) {
        let last = self.measures.back().copied();
        // A process counts from when it has opened the job.
        if self.process != process || last.is_some_and(|last| new.worked_us < last.worked_us) {
            self.measures.clear();
            self.process = process;
        } else if last.is_some_and(|last| new.at.saturating_duration_since(last.at) < STEP) {
            return;
        }
        self.measures.push_back(new);
        let is_past = |m: &Measure| new.at.saturating_duration_since(m.at) >= WINDOW;
        while self.measures.get(1).is_some_and(is_past) {
            self.measures.pop_front();
        }
        if let Some(first) = self.measures.front().filter(|first| first.at < new.at) {
            let took = new.at.saturating_duration_since(first.at).as_micros().max(1);
            let worked = u128::from(new.worked_us - first.worked_us);
            self.load = Some(u32::try_from(worked * 1_000 / took).unwrap_or(u32::MAX));
        }
    }
}

/// See the module.
#[derive(Debug, Default)]
pub struct LoadBoard(Mutex<BTreeMap<JobId, Measured>>);

impl LoadBoard {
    /// A process tells of its jobs.
    pub fn note(&self, process: u64, jobs: &[JobReport], now: Instant) {
        let mut measured = self.0.lock();
        for job in jobs {
            if let Some(worked_us) = job.worked_us {
                let of_job = measured.entry(RelationId(job.relation)).or_default();
                of_job.note(process, Measure { at: now, worked_us });
            }
        }
    }

    /// Of the jobs that there are, as far as it is known.
    pub fn loads(&self, state: &MetaState) -> Loads {
        let mut measured = self.0.lock();
        measured.retain(|id, _| state.jobs.contains_key(id));
        measured.iter().filter_map(|(id, m)| Some((*id, m.load?))).collect()
    }

    /// Of those jobs alone of which the process that they run on tells now.
    pub fn told(&self, state: &MetaState, now: Instant) -> Loads {
        let measured = self.0.lock();
        let load = |(id, m): (&JobId, &Measured)| {
            let last = m.measures.back()?;
            let is_own = state.jobs.get(id)?.process == m.process;
            let is_recent = now.saturating_duration_since(last.at) <= RECENT;
            Some((*id, m.load.filter(|_| is_own && is_recent)?))
        };
        measured.iter().filter_map(load).collect()
    }
}

/// What the jobs of a process take together; `None`: not known of any.
pub fn load_of(state: &MetaState, loads: &Loads, process: u64) -> Option<u32> {
    let own =
        loads.iter().filter(|(id, _)| state.jobs.get(id).is_some_and(|job| job.process == process));
    own.map(|(_, load)| *load).reduce(u32::saturating_add)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::JobRecord;
    use crate::timeline::Timeline;

    const JOB: RelationId = RelationId(7);

    fn state() -> MetaState {
        let mut state = MetaState::default();
        let job = JobRecord {
            version: Default::default(),
            timeline: Timeline::default(),
            inputs: Vec::new(),
            process: 3,
            by_operator: false,
            horizon: Default::default(),
            watermarks: Default::default(),
        };
        state.jobs.insert(JOB, job);
        state
    }

    /// A board that a process tells each second, from a moment on, how long it has worked by then: `rate` milliseconds
    /// more each time.
    struct Told(LoadBoard, Instant);

    impl Told {
        fn beat(&mut self, process: u64, seconds: u64, from_us: u64, rate: u64) {
            for second in 1..=seconds {
                self.1 += Duration::from_secs(1);
                let worked_us = Some(from_us + second * rate * 1_000);
                let job = JobReport { relation: JOB.0, worked_us, ..JobReport::default() };
                self.0.note(process, &[job], self.1);
            }
        }

        fn load(&self) -> Option<u32> {
            self.0.loads(&state()).get(&JOB).copied()
        }
    }

    #[test]
    fn a_load_is_the_share_of_a_core_over_the_last_minute() {
        let mut told = Told(LoadBoard::default(), Instant::now());
        told.beat(3, 1, 0, 500);
        assert_eq!(told.load(), None, "one measure is no time");
        told.beat(3, 9, 500_000, 500);
        assert_eq!(told.load(), Some(500));
        told.beat(3, 60, 5_000_000, 1_500);
        let load = told.load().unwrap();
        assert!((1_300..=1_500).contains(&load), "{load}");
        told.beat(3, 120, 95_000_000, 0);
        assert_eq!(told.load(), Some(0), "it is idle by now");
    }

    #[test]
    fn what_is_told_now_is_of_the_process_that_a_job_runs_on() {
        let mut told = Told(LoadBoard::default(), Instant::now());
        let of_now = |told: &Told, after: u64| {
            let now = told.1 + Duration::from_secs(after);
            told.0.told(&state(), now).get(&JOB).copied()
        };
        told.beat(3, 9, 0, 500);
        assert_eq!((of_now(&told, 0), of_now(&told, 5)), (Some(500), Some(500)));
        assert_eq!((of_now(&told, 60), told.load()), (None, Some(500)), "it tells nothing more");
        told.beat(4, 9, 0, 500);
        assert_eq!((of_now(&told, 0), told.load()), (None, Some(500)), "it runs elsewhere");
        assert!(told.0.told(&MetaState::default(), told.1).is_empty());
    }

    #[test]
    fn a_job_that_begins_anew_has_the_load_that_it_had() {
        let mut told = Told(LoadBoard::default(), Instant::now());
        told.beat(3, 30, 0, 800);
        assert_eq!(told.load(), Some(800));
        // On another process, which has counted for another reason before, then there again.
        told.beat(4, 1, 900_000_000, 800);
        assert_eq!(told.load(), Some(800));
        told.beat(4, 1, 0, 100);
        assert_eq!(told.load(), Some(800));
        told.beat(4, 10, 100_000, 100);
        assert_eq!(told.load(), Some(100));
        assert_eq!(load_of(&state(), &told.0.loads(&state()), 3), Some(100));
        assert_eq!(load_of(&state(), &told.0.loads(&state()), 4), None);
        assert!(told.0.loads(&MetaState::default()).is_empty(), "it was dropped");
    }
}
