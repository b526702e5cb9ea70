//! Jobs that are moved for their loads, and above all those that are not.

use std::sync::Arc;

use millrace_common::RelationId;
use millrace_rpc::catalog::{Relation, RelationKind};
use millrace_rpc::version::{BackfillState, JobVersion};

use super::*;

/// Jobs and their loads on processes that are there.
#[derive(Default)]
struct World {
    state: MetaState,
    loads: Loads,
    takers: Vec<u64>,
    /// Jobs that do not run.
    failed: Vec<JobId>,
    rebalancer: Rebalancer,
}

impl World {
    /// On so many processes, 1 and so on: the loads of the jobs of each.
    fn new(jobs: &[&[u32]]) -> World {
        let mut world = World::default();
        for (process, loads) in (1..).zip(jobs) {
            world.takers.push(process);
            for load in *loads {
                world.add(process, *load);
            }
        }
        world
    }

    fn add(&mut self, process: u64, load: u32) {
        let id = RelationId(self.state.jobs.len() as u32 + 1);
        let job = JobRecord {
            version: Arc::new(JobVersion::default()),
            timeline: Default::default(),
            inputs: Vec::new(),
            process,
            by_operator: false,
            horizon: Default::default(),
            watermarks: Default::default(),
        };
        self.state.jobs.insert(id, job);
        let kind = RelationKind::MaterializedView as i32;
        let relation = Relation { id: id.0, kind, ..Relation::default() };
        self.state.relations.insert(id, Arc::new(relation));
        self.loads.insert(id, load);
    }

    fn change(&mut self, job: u32, change: impl FnOnce(&mut JobRecord)) {
        change(self.state.jobs.get_mut(&RelationId(job)).unwrap());
    }

    fn set_load(&mut self, job: u32, load: u32) {
        self.loads.insert(RelationId(job), load);
    }

    /// Calls what is given with what a look sees.
    fn see<T>(&mut self, see: impl FnOnce(&mut Rebalancer, &Look<'_>) -> T) -> T {
        let failed = &self.failed;
        let is_running = |id: JobId| !failed.contains(&id);
        let (state, loads, takers) = (&self.state, &self.loads, &self.takers[..]);
        see(&mut self.rebalancer, &Look { state, loads, takers, is_running: &is_running })
    }

    /// Looks once, and makes the move.
    fn look(&mut self) -> Option<Move> {
        let found = self.see(|rebalancer, look| rebalancer.look(look))?;
        self.change(found.job.0, |job| job.process = found.to);
        self.rebalancer.note_moved(found.job);
        Some(found)
    }

    /// Looks so often; the jobs that were moved, and where to.
    fn looks(&mut self, times: u64) -> Vec<(u32, u64)> {
        (0..times).filter_map(|_| self.look()).map(|m| (m.job.0, m.to)).collect()
    }

    /// The sum of the squares of what the processes take.
    fn squares(&self, loads: &Loads) -> u64 {
        let of_process = |process: &u64| -> u64 {
            let jobs = self.state.jobs.iter().filter(|(_, job)| job.process == *process);
            jobs.map(|(id, _)| u64::from(loads[id])).sum()
        };
        self.takers.iter().map(|process| of_process(process).pow(2)).sum()
    }
}

/// A multiplicative generator.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.0 >> 33) % limit
    }

    /// Up to five processes with up to ten jobs each.
    fn world(&mut self) -> World {
        let most = self.below(2_000) + 1;
        let mut jobs = Vec::new();
        for _ in 0..2 + self.below(4) {
            let loads: Vec<u32> = (0..self.below(11)).map(|_| self.below(most) as u32).collect();
            jobs.push(loads);
        }
        let jobs: Vec<&[u32]> = jobs.iter().map(Vec::as_slice).collect();
        World::new(&jobs)
    }
}

/// By how much a move makes the sum of the squares smaller, at least: 2 w (d - w) is least for d = 500 and w = 100.
const LEAST_GAIN: u64 = 2 * LEAST * (DIFFERENCE - LEAST);
const IN_A_ROW: u64 = LOOKS as u64;
/// Where nothing was moved at so many looks, nothing will be, as long as loads stay.
const QUIET: u64 = REST + IN_A_ROW;

#[test]
fn a_job_that_has_become_heavy_is_left_by_another() {
    let mut world = World::new(&[&[400, 100], &[100]]);
    assert_eq!(world.looks(QUIET), []);
    world.set_load(2, 800);
    assert_eq!(world.looks(IN_A_ROW - 1), [], "it may be a burst");
    let (job, from, to) = (RelationId(1), 1, 2);
    let expected = Move { job, from, to, load: 400, from_load: 1_200, to_load: 100 };
    assert_eq!(world.look(), Some(expected));
    assert_eq!(world.looks(QUIET), [], "800 and 500 are even enough");
}

#[test]
fn two_heavy_jobs_part() {
    let mut world = World::new(&[&[900, 800], &[], &[40]]);
    // Either relieves the process of as much; the younger one goes, to the process that takes less.
    assert_eq!(world.looks(2 * QUIET), [(2, 2)]);
}

#[test]
fn one_job_after_the_other_moves_with_time_between() {
    let mut world = World::new(&[&[400; 8], &[]]);
    let moved: Vec<u64> = (0..60).filter(|_| world.look().is_some()).collect();
    assert_eq!(moved, [4, 9, 14, 19], "the first of them at the fifth look");
}

#[test]
fn who_would_only_change_places_with_another_stays() {
    let all: [[&[u32]; 2]; 4] = [
        // Alone, or with little beside it.
        [&[2_000], &[]],
        [&[2_000, 90], &[]],
        // The difference is small, for what the processes take, or at all.
        [&[2_000, 2_000, 600], &[2_000, 1_800]],
        [&[250, 240], &[]],
    ];
    for jobs in all {
        assert_eq!(World::new(&jobs).looks(QUIET), [], "{jobs:?}");
    }
}

#[test]
fn what_is_interrupted_begins_anew() {
    let heavy = || World::new(&[&[900, 800], &[]]);
    type Interrupt = fn(&mut World);
    let interruptions: [Interrupt; 4] = [
        // It was no lasting load.
        |world| {
            world.set_load(1, 10);
            world.look();
            world.set_load(1, 900);
        },
        // A job was moved, a process has come, or it was no time to look.
        |world| {
            world.add(2, 10);
            world.look();
            world.change(3, |job| job.process = 1);
        },
        |world| world.takers.push(3),
        |world| world.rebalancer.forget(),
    ];
    for (number, interrupt) in interruptions.into_iter().enumerate() {
        let mut world = heavy();
        assert_eq!(world.looks(IN_A_ROW - 2), [], "{number}");
        interrupt(&mut world);
        assert_eq!(world.looks(IN_A_ROW - 1), [], "{number}");
        assert_eq!(world.looks(1).len(), 1, "{number}");
    }
    // A job that is created is no reason to begin anew.
    let mut world = heavy();
    world.looks(IN_A_ROW - 1);
    world.add(1, 0);
    assert_eq!(world.looks(1).len(), 1);
}

#[test]
fn what_has_a_reason_to_stay_stays() {
    type Change = fn(&mut World);
    let changes: [(Change, &[(u32, u64)]); 4] = [
        (|world| world.change(2, |job| job.by_operator = true), &[(1, 2)]),
        (|world| world.failed = vec![RelationId(2)], &[(1, 2)]),
        (
            |world| {
                let kind = RelationKind::Table as i32;
                let table = Relation { id: 2, kind, ..Relation::default() };
                world.state.relations.insert(RelationId(2), Arc::new(table));
            },
            &[(1, 2)],
        ),
        // What it takes is not known: beside the other one there may be nothing.
        (
            |world| {
                world.loads.remove(&RelationId(2));
            },
            &[],
        ),
    ];
    for (number, (change, expected)) in changes.into_iter().enumerate() {
        let mut world = World::new(&[&[900, 800], &[]]);
        change(&mut world);
        assert_eq!(world.looks(QUIET), expected, "{number}");
    }
    let mut alone = World::new(&[&[900, 800]]);
    assert_eq!(alone.looks(QUIET), [], "there is no other process");
}

/// A job that waits for its first scan stays. Where one is under way, nothing moves from there, nor to there.
#[test]
fn first_scans_move_nothing() {
    for (job, snapshot_epoch, expected) in [(2, 0, &[(1, 2)][..]), (2, 7, &[]), (3, 7, &[])] {
        let mut world = World::new(&[&[900, 800], &[10]]);
        world.change(job, |job| {
            let backfill = Some(BackfillState { snapshot_epoch, ..BackfillState::default() });
            job.version = Arc::new(JobVersion { backfill, ..JobVersion::default() });
        });
        assert_eq!(world.looks(QUIET), expected, "{job}, {snapshot_epoch}");
    }
}

/// A job that was moved stays for a while, whatever loads do.
#[test]
fn a_job_that_was_moved_rests() {
    let mut world = World::new(&[&[900, 800], &[]]);
    assert_eq!(world.looks(IN_A_ROW), [(2, 2)]);
    // By now it would be better off where it was.
    world.add(2, 900);
    world.change(3, |job| job.by_operator = true);
    world.set_load(1, 100);
    assert_eq!(world.looks(REST - 1), []);
    assert_eq!(world.looks(IN_A_ROW), [(2, 1)]);
}

/// Each move makes the loads more even, so there are few; and when nothing moves any more, no single move is worth it.
#[test]
fn moves_come_to_an_end_with_any_loads() {
    let mut numbers = Numbers(1);
    let mut all = 0;
    for _ in 0..300 {
        let mut world = numbers.world();
        let first = world.squares(&world.loads);
        let (mut squares, mut moves, mut quiet) = (first, 0, 0);
        while quiet < QUIET {
            quiet += 1;
            if world.look().is_none() {
                continue;
            }
            let now = world.squares(&world.loads);
            assert!(now + LEAST_GAIN <= squares, "{now} after {squares}");
            (squares, moves, quiet) = (now, moves + 1, 0);
        }
        assert!(moves <= first / LEAST_GAIN);
        assert_eq!(world.see(|_, look| look.moves()), []);
        all += moves;
    }
    assert!(all > 300, "hardly anything was moved: {all}");
}

/// The same where what is measured differs from look to look: what a process takes, by less than an eighth of the least
/// difference.
#[test]
fn measures_that_differ_move_nothing_to_and_fro() {
    let mut numbers = Numbers(2);
    for _ in 0..100 {
        let mut world = numbers.world();
        let (loads, noise) = (world.loads.clone(), 60 / (world.loads.len() as u64).max(1));
        let mut squares = world.squares(&loads);
        for _ in 0..500 {
            for (id, load) in &loads {
                world.set_load(id.0, load + numbers.below(noise + 1) as u32);
            }
            if world.look().is_some() {
                let now = world.squares(&loads);
                assert!(now < squares, "{now} after {squares}");
                squares = now;
            }
        }
    }
}

/// Loads that change all the time, by any amount: no more moves than there is time for.
#[test]
fn loads_that_never_rest_move_no_job_often() {
    let mut numbers = Numbers(3);
    let mut world = World::new(&[&[0; 4], &[0; 4], &[0; 4]]);
    let mut moved: BTreeMap<u32, Vec<u64>> = BTreeMap::new();
    for look in 0..2_000u64 {
        if look.is_multiple_of(7) {
            let ids: Vec<u32> = world.loads.keys().map(|id| id.0).collect();
            for id in ids {
                world.set_load(id, numbers.below(2_000) as u32);
            }
        }
        if let Some(found) = world.look() {
            moved.entry(found.job.0).or_default().push(look);
        }
    }
    assert!(!moved.is_empty());
    let apart = |looks: &[u64], least| looks.windows(2).all(|pair| pair[1] - pair[0] >= least);
    assert!(moved.values().all(|looks| apart(looks, REST)), "{moved:?}");
    let mut all: Vec<u64> = moved.values().flatten().copied().collect();
    all.sort_unstable();
    assert!(apart(&all, IN_A_ROW), "{all:?}");
}
