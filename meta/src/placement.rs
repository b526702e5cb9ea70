//! On which compute process each job runs (docs/design.md §10).
//!
//! Jobs that write to tables run on one process, so that a transaction over several tables is one process's work: tables,
//! and sinks into them. Every other job is placed by itself, and reads its inputs through the bucket if they run
//! elsewhere. A process's weight is what its jobs take of cores, and a little for each of them ([`PRESENCE`]): where no
//! loads are known, processes are compared by the number of their jobs. Decisions are a pure function of the folded state
//! and of the loads.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use millrace_common::{JobId, RelationId};
use millrace_rpc::catalog::{Relation, RelationKind};
use millrace_rpc::log::PlaceJobs;

use crate::job_loads::Loads;
use crate::state::{JobRecord, MetaState};

/// What a job weighs beside its load, in thousandths of a core. Differences below it are none: a view runs where its inputs
/// do as long as that process weighs at most so much more than the one that weighs least, and no job moves for less.
const PRESENCE: u64 = 100;

/// Whether a job writes to tables: all that do run on one process.
pub fn writes_tables(relation: &Relation) -> bool {
    match relation.kind() {
        RelationKind::Table | RelationKind::Source => true,
        _ => relation.target != 0,
    }
}

/// What the jobs of each process that is there weigh.
struct Weights<'a> {
    of_processes: BTreeMap<u64, u64>,
    loads: &'a Loads,
}

impl Weights<'_> {
    fn new<'a>(state: &MetaState, loads: &'a Loads, computes: &[u64]) -> Weights<'a> {
        let of_processes = computes.iter().map(|id| (*id, 0)).collect();
        let mut weights = Weights { of_processes, loads };
        for (id, job) in state.jobs.iter() {
            if weights.has(job.process) {
                weights.add(job.process, *id);
            }
        }
        weights
    }

    fn has(&self, process: u64) -> bool {
        self.of_processes.contains_key(&process)
    }

    fn of_job(&self, job: JobId) -> u64 {
        PRESENCE + self.loads.get(&job).map_or(0, |load| u64::from(*load))
    }

    fn of(&self, process: u64) -> u64 {
        self.of_processes.get(&process).copied().unwrap_or(0)
    }

    /// The process that weighs least, the older one of several.
    fn least(&self) -> Option<(u64, u64)> {
        let least = self.of_processes.iter().min_by_key(|(id, weight)| (**weight, **id));
        least.map(|(id, weight)| (*id, *weight))
    }

    fn add(&mut self, process: u64, job: JobId) {
        *self.of_processes.entry(process).or_default() += self.of_job(job);
    }

    fn take(&mut self, process: u64, job: JobId) {
        let taken = self.of_job(job);
        if let Some(weight) = self.of_processes.get_mut(&process) {
            *weight = weight.saturating_sub(taken);
        }
    }

    /// Where a job runs that reads these: there, if that process is not much busier than others. `on`: where a job runs.
    fn near(&self, on: impl Fn(JobId) -> u64, inputs: &[RelationId]) -> Option<u64> {
        let (_, least) = self.least()?;
        let inputs_on = |process: u64| inputs.iter().filter(|input| on(**input) == process).count();
        let candidates = self.of_processes.iter().filter(|(_, own)| **own <= least + PRESENCE);
        // The older one of several.
        let best =
            candidates.max_by_key(|(id, own)| (inputs_on(**id), Reverse(**own), Reverse(**id)));
        best.map(|(id, _)| *id)
    }
}

/// The process of the jobs that write to tables, if one that is there has them.
fn process_of_tables(state: &MetaState, weights: &Weights<'_>) -> Option<u64> {
    let writers = state.jobs.iter().filter(|(id, _)| is_writer(state, **id));
    let placed = writers.map(|(_, job)| job.process).filter(|id| weights.has(*id));
    let mut by_process: BTreeMap<u64, usize> = BTreeMap::new();
    placed.for_each(|id| *by_process.entry(id).or_default() += 1);
    by_process.into_iter().max_by_key(|(_, jobs)| *jobs).map(|(id, _)| id)
}

/// Where a job runs; 0: nowhere, or there is no such job.
fn process_of(state: &MetaState, job: JobId) -> u64 {
    state.jobs.get(&job).map_or(0, |job| job.process)
}

/// Whether this is a job that writes to tables.
pub fn is_writer(state: &MetaState, job: JobId) -> bool {
    state.relations.get(&job).is_some_and(|relation| writes_tables(relation))
}

/// Of the processes that are there, those that jobs may be placed on. One that is drained is the last resort: jobs run
/// there if there is no other.
pub fn takers(state: &MetaState, computes: &[u64]) -> Vec<u64> {
    let takes = |id: &u64| !state.processes.is_drained(*id);
    match computes.iter().any(takes) {
        true => computes.iter().copied().filter(takes).collect(),
        false => computes.to_vec(),
    }
}

/// A job, and those that run where it does because they write to tables as well. `None`: there is no such job.
pub fn group_of(state: &MetaState, job: JobId) -> Option<Vec<JobId>> {
    state.jobs.get(&job)?;
    let writers = || state.jobs.keys().copied().filter(|id| is_writer(state, *id)).collect();
    Some(if is_writer(state, job) { writers() } else { vec![job] })
}

/// The process that a new relation's job runs on; 0: there is none.
pub fn process_of_new(
    state: &MetaState,
    loads: &Loads,
    computes: &[u64],
    relation: &Relation,
) -> u64 {
    let weights = Weights::new(state, loads, computes);
    let least = || weights.least().map(|(id, _)| id);
    let tables = || process_of_tables(state, &weights).or_else(least);
    let placed = match writes_tables(relation) {
        true => tables(),
        false => {
            let inputs = state.expand_views(&relation.depends_on);
            weights.near(|id| process_of(state, id), &inputs)
        }
    };
    placed.unwrap_or(0)
}

/// What is to be placed so that every job runs on a process that is there. With `even`, jobs are also taken from processes
/// that weigh more than others, but for those that an operator has placed there. A plan that is carried out leaves nothing
/// to the next one with the same loads.
pub fn plan(state: &MetaState, loads: &Loads, computes: &[u64], even: bool) -> Vec<PlaceJobs> {
    let mut weights = Weights::new(state, loads, computes);
    let Some((least, _)) = weights.least() else { return Vec::new() };
    let tables = process_of_tables(state, &weights).unwrap_or(least);
    let mut placed: BTreeMap<JobId, u64> = BTreeMap::new();
    for (id, job) in state.jobs.iter() {
        if is_writer(state, *id) && job.process != tables {
            weights.take(job.process, *id);
            weights.add(tables, *id);
            placed.insert(*id, tables);
        }
    }
    // In the order of their creation: inputs before what reads them.
    for (id, job) in state.jobs.iter() {
        if is_writer(state, *id) || weights.has(job.process) {
            continue;
        }
        let on = |id: JobId| placed.get(&id).copied().unwrap_or_else(|| process_of(state, id));
        let Some(process) = weights.near(on, &job.inputs) else { continue };
        weights.add(process, *id);
        placed.insert(*id, process);
    }
    if even {
        make_even(state, &mut weights, &mut placed);
    }
    let mut by_process: BTreeMap<u64, Vec<u32>> = BTreeMap::new();
    placed.retain(|id, process| process_of(state, *id) != *process);
    placed.into_iter().for_each(|(id, process)| by_process.entry(process).or_default().push(id.0));
    let entry = |(incarnation, jobs)| PlaceJobs { incarnation, jobs, by_operator: false };
    by_process.into_iter().map(entry).collect()
}

/// Has jobs go to the process that weighs least, as long as that makes the weights more even: first the one that does most
/// for it, of equal ones one of the process that weighs most, and of its jobs the youngest. Each step makes the sum of the
/// squares of all weights smaller, so this ends.
fn make_even(state: &MetaState, weights: &mut Weights<'_>, placed: &mut BTreeMap<JobId, u64>) {
    let may_move = |(id, job): &(&JobId, &JobRecord)| {
        let stays = job.by_operator && weights.has(job.process);
        !stays && !is_writer(state, **id)
    };
    let movable: Vec<JobId> = state.jobs.iter().filter(may_move).map(|(id, _)| *id).collect();
    while let Some((lightest, least)) = weights.least() {
        let on = |id: JobId| placed.get(&id).copied().unwrap_or_else(|| process_of(state, id));
        let steps = movable.iter().filter_map(|id| {
            let (own, from) = (weights.of_job(*id), weights.of(on(*id)));
            // By how much the heavier of the two processes then weighs less than now.
            let gain = from.checked_sub(least + own)?.min(own);
            (gain >= PRESENCE).then_some((gain, from, *id))
        });
        let Some((_, _, job)) = steps.max() else { return };
        weights.take(on(job), job);
        weights.add(lightest, job);
        placed.insert(job, lightest);
    }
}

#[cfg(test)]
mod tests {
    use millrace_common::Epoch;
    use millrace_rpc::log::{
        CreateRelation, DrainProcess, Entry, LogEntry, LogRecord, RegisterProcess,
    };

    use super::*;
    use crate::fold::apply;
    use crate::tests::{table, view};

    /// A log of processes and relations, and loads of jobs.
    #[derive(Default)]
    struct World(MetaState, Loads);

    impl World {
        fn apply(&mut self, entry: Entry) -> Option<RelationId> {
            let number = self.0.number + 1;
            let entries = vec![LogEntry::from(entry)];
            let epoch = Epoch(self.0.epoch.0 + 1).0;
            let record = LogRecord { number, epoch, entries, ..LogRecord::default() };
            let verdicts = apply(&mut self.0, &record, 0);
            verdicts[0].as_ref().unwrap().relation
        }

        fn process(&mut self, nonce: u64) -> u64 {
            let process = RegisterProcess { nonce, ..RegisterProcess::default() };
            self.apply(Entry::RegisterProcess(process));
            self.0.processes.by_nonce(nonce).unwrap()
        }

        fn create(&mut self, computes: &[u64], relation: Relation) -> RelationId {
            let process = process_of_new(&self.0, &self.1, computes, &relation);
            let entry = CreateRelation { relation, process, or_replace: false };
            self.apply(Entry::CreateRelation(entry)).unwrap()
        }

        fn place(&mut self, computes: &[u64], even: bool) -> usize {
            let entries = plan(&self.0, &self.1, computes, even);
            let moved = entries.iter().map(|e| e.jobs.len()).sum();
            for entry in entries {
                self.apply(Entry::PlaceJobs(entry));
            }
            moved
        }

        fn on(&self, job: RelationId) -> u64 {
            self.0.jobs[&job].process
        }

        /// Thousandths of a core.
        fn takes(&mut self, job: RelationId, load: u32) {
            self.1.insert(job, load);
        }

        /// What the jobs of a process take.
        fn taken(&self, process: u64) -> u32 {
            let own = self.1.iter().filter(|(id, _)| self.on(**id) == process);
            own.map(|(_, load)| load).sum()
        }

        fn load(&self, process: u64) -> usize {
            self.0.jobs.values().filter(|job| job.process == process).count()
        }
    }

    #[test]
    fn tables_stay_together_and_views_go_where_there_is_room() {
        let mut world = World::default();
        let a = world.process(1);
        let tables: Vec<_> =
            ["t", "u", "w"].map(|name| world.create(&[a], table(name))).into_iter().collect();
        let views: Vec<_> =
            (0..7).map(|i| world.create(&[a], view(&format!("v{i}"), &[tables[0]]))).collect();
        assert_eq!(world.load(a), 10);
        let b = world.process(2);
        assert_eq!(world.place(&[a, b], false), 0, "all run somewhere");
        assert_eq!(world.place(&[a, b], true), 5);
        assert!(tables.iter().all(|t| world.on(*t) == a), "they are one group");
        assert_eq!((world.load(a), world.load(b)), (5, 5));
        assert_eq!(world.place(&[a, b], true), 0, "it is even");
        // A new table goes to the others, a new view to where there are fewer jobs, or else to its input.
        let x = world.create(&[a, b], table("x"));
        assert_eq!(world.on(x), a);
        let near = world.create(&[a, b], view("near", &[x]));
        assert_eq!(world.on(near), a, "one job more is no reason to be far from its input");
        let far = world.create(&[a, b], view("far", &[x]));
        assert_eq!(world.on(far), b);
        // What ran on a lost process runs elsewhere, and what did not is left alone.
        let c = world.process(3);
        let before: Vec<_> = views.iter().filter(|v| world.on(**v) == b).copied().collect();
        world.place(&[b, c], false);
        assert!(before.iter().all(|v| world.on(*v) == b));
        let group = world.on(tables[0]);
        assert!(group == b || group == c);
        assert!(tables.iter().chain([&x]).all(|t| world.on(*t) == group));
        assert!(world.load(b).abs_diff(world.load(c)) <= 2, "{} {}", world.load(b), world.load(c));
        assert_eq!(world.load(a), 0);
    }

    #[test]
    fn a_new_process_gets_jobs_though_the_busiest_has_none_that_may_move() {
        let mut world = World::default();
        let (a, b) = (world.process(1), world.process(2));
        let tables: Vec<_> = (0..10).map(|i| world.create(&[a], table(&format!("t{i}")))).collect();
        for i in 0..6 {
            world.create(&[b], view(&format!("v{i}"), &tables[..1]));
        }
        assert_eq!((world.load(a), world.load(b)), (10, 6));
        let c = world.process(3);
        world.place(&[a, b, c], true);
        assert_eq!((world.load(a), world.load(b), world.load(c)), (10, 3, 3));
    }

    /// By their number the jobs would be even as they are.
    #[test]
    fn a_process_that_joins_takes_over_load_and_not_a_number_of_jobs() {
        let mut world = World::default();
        let a = world.process(1);
        let t = world.create(&[a], table("t"));
        let views: Vec<_> =
            (0..5).map(|i| world.create(&[a], view(&format!("v{i}"), &[t]))).collect();
        for (view, load) in views.iter().zip([1_600, 900, 20, 10, 0]) {
            world.takes(*view, load);
        }
        world.takes(t, 300);
        let b = world.process(2);
        world.place(&[a, b], true);
        assert_eq!(world.on(views[0]), b, "the heaviest goes, and nothing else");
        assert_eq!((world.load(a), world.load(b)), (5, 1));
        assert_eq!((world.taken(a), world.taken(b)), (1_230, 1_600));
        assert_eq!(world.place(&[a, b], true), 0, "it is as even as it gets");
        // Another one takes over what evens the loads most.
        let c = world.process(3);
        world.place(&[a, b, c], true);
        assert_eq!(world.on(views[1]), c);
        assert_eq!(world.on(t), a, "tables stay");
    }

    #[test]
    fn what_comes_new_or_is_lost_goes_where_there_is_least_load() {
        let mut world = World::default();
        let (a, b, c) = (world.process(1), world.process(2), world.process(3));
        let t = world.create(&[a], table("t"));
        let heavy = world.create(&[b], view("heavy", &[t]));
        let light: Vec<_> =
            (0..4).map(|i| world.create(&[c], view(&format!("l{i}"), &[t]))).collect();
        world.takes(heavy, 2_500);
        world.takes(t, 700);
        for view in &light {
            world.takes(*view, 30);
        }
        // By their number c has the most jobs.
        let new = world.create(&[a, b, c], view("new", &[heavy]));
        assert_eq!(world.on(new), c, "its input is where there is no room");
        // The table is lost, and goes where it takes least away from others.
        world.place(&[b, c], false);
        assert_eq!(world.on(t), c);
        // So do the views, all of whose inputs are there.
        world.place(&[a, b], false);
        assert!(light.iter().chain([&new, &t]).all(|job| world.on(*job) == a));
        assert_eq!(world.on(heavy), b, "what runs stays");
    }

    /// Loads are measured, and measures differ: what is nearly even stays as it is.
    #[test]
    fn small_differences_move_nothing() {
        let mut world = World::default();
        let (a, b) = (world.process(1), world.process(2));
        let t = world.create(&[a], table("t"));
        let on_a: Vec<_> =
            (0..3).map(|i| world.create(&[a], view(&format!("a{i}"), &[t]))).collect();
        let on_b: Vec<_> =
            (0..4).map(|i| world.create(&[b], view(&format!("b{i}"), &[t]))).collect();
        for (loads, expected) in
            [([500, 480], 0), ([450, 500], 0), ([500, 430], 0), ([900, 100], 1)]
        {
            for (views, load) in [(&on_a, loads[0]), (&on_b, loads[1])] {
                views.iter().for_each(|view| world.takes(*view, load));
            }
            assert_eq!(world.place(&[a, b], true), expected, "{loads:?}");
            assert_eq!(world.place(&[a, b], true), 0, "{loads:?}: it goes on");
        }
    }

    /// The same state and loads are the same plan, carried out or not: it is a fixed point.
    #[test]
    fn a_plan_that_is_carried_out_leaves_nothing_to_do() {
        let mut numbers = 1u64;
        let mut next = |below: u64| {
            numbers = numbers.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (numbers >> 33) % below
        };
        for _ in 0..200 {
            let mut world = World::default();
            let ids: Vec<u64> = (1..=2 + next(4)).map(|nonce| world.process(nonce)).collect();
            let t = world.create(&ids[..1], table("t"));
            for i in 0..next(30) {
                let v = world.create(&ids[..1 + next(2) as usize], view(&format!("v{i}"), &[t]));
                world.takes(v, next(2_000) as u32);
            }
            let again = plan(&world.0, &world.1, &ids, true);
            assert_eq!(plan(&world.0, &world.1, &ids, true), again);
            world.place(&ids, true);
            assert_eq!(world.place(&ids, true), 0);
            // No job that may move would even the loads further.
            let weights = Weights::new(&world.0, &world.1, &ids);
            let (_, least) = weights.least().unwrap();
            for (id, job) in world.0.jobs.iter().filter(|(id, _)| **id != t) {
                let (own, from) = (weights.of_job(*id), weights.of(job.process));
                assert!(from < least + own + PRESENCE, "{id} of {from} would fit {least}");
            }
        }
    }

    #[test]
    fn what_is_placed_together_is_near() {
        let mut world = World::default();
        let (a, b, c) = (world.process(1), world.process(2), world.process(3));
        let t = world.create(&[a], table("t"));
        let v = world.create(&[a], view("v", &[t]));
        // Both are lost with it, and go to one other process.
        world.place(&[b, c], false);
        assert_eq!(world.on(v), world.on(t));
        assert!([b, c].contains(&world.on(t)));
    }

    #[test]
    fn tables_that_came_to_two_processes_are_brought_together() {
        let mut world = World::default();
        let (a, b) = (world.process(1), world.process(2));
        let (t, u) = (world.create(&[a], table("t")), world.create(&[b], table("u")));
        let w = world.create(&[b], table("w"));
        let jobs = vec![u.0, w.0];
        world.apply(Entry::PlaceJobs(PlaceJobs { incarnation: b, jobs, by_operator: false }));
        world.place(&[a, b], false);
        assert!(world.on(t) == world.on(u) && world.on(u) == world.on(w));
        assert_eq!(world.place(&[a, b], false), 0);
    }

    #[test]
    fn a_drained_process_has_jobs_only_where_there_is_no_other() {
        let mut world = World::default();
        let (a, b, c) = (world.process(1), world.process(2), world.process(3));
        let t = world.create(&[a], table("t"));
        let v = world.create(&[a], view("v", &[t]));
        world.apply(Entry::DrainProcess(DrainProcess { incarnation: a, undo: false }));
        let takers = takers(&world.0, &[a, b, c]);
        assert_eq!(takers, [b, c]);
        world.place(&takers, false);
        assert!(world.on(t) != a && world.on(v) == world.on(t));
        assert_eq!(super::takers(&world.0, &[a]), [a], "nobody else is there");
        assert_eq!(group_of(&world.0, v), Some(vec![v]));
        let u = world.create(&takers, table("u"));
        assert_eq!(group_of(&world.0, u), Some(vec![t, u]));
        assert_eq!(group_of(&world.0, RelationId(999)), None);
        world.apply(Entry::DrainProcess(DrainProcess { incarnation: a, undo: true }));
        assert_eq!(super::takers(&world.0, &[a, b, c]), [a, b, c]);
    }

    #[test]
    fn what_an_operator_has_placed_stays_when_a_process_joins() {
        let mut world = World::default();
        let a = world.process(1);
        let t = world.create(&[a], table("t"));
        let views: Vec<_> =
            (0..4).map(|i| world.create(&[a], view(&format!("v{i}"), &[t]))).collect();
        // The youngest would be the first to go.
        let jobs = vec![views[3].0];
        world.apply(Entry::PlaceJobs(PlaceJobs { incarnation: a, jobs, by_operator: true }));
        let b = world.process(2);
        world.place(&[a, b], true);
        assert_eq!([1, 2, 3].map(|i| world.on(views[i])), [b, b, a]);
        world.place(&[b], false);
        assert_eq!(world.on(views[3]), b, "its process is lost");
        let c = world.process(3);
        world.place(&[b, c], true);
        assert_eq!(world.on(views[3]), c, "nobody has placed it there by hand");
    }

    #[test]
    fn without_a_process_nothing_is_placed() {
        let mut world = World::default();
        let t = world.create(&[], table("t"));
        assert_eq!((world.on(t), world.place(&[], true)), (0, 0));
        let a = world.process(1);
        assert_eq!(world.place(&[a], true), 1);
        assert_eq!(world.on(t), a);
    }
}
