//! On which compute process each job runs (docs/design.md §10).
//!
//! Jobs that write to tables run on one process, so that a transaction over several tables is one process's work: tables,
//! and sinks into them. Every other job is placed by itself, and reads its inputs through the bucket if they run
//! elsewhere. A process's load is the number of its jobs. Decisions are a pure function of the folded state.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use millrace_common::{JobId, RelationId};
use millrace_rpc::catalog::{Relation, RelationKind};
use millrace_rpc::log::PlaceJobs;

use crate::state::MetaState;

/// A view runs where its inputs do as long as that process has at most so many more jobs than the one with the fewest.
const NEARNESS: usize = 1;

/// Whether a job writes to tables: all that do run on one process.
pub fn writes_tables(relation: &Relation) -> bool {
    match relation.kind() {
        RelationKind::Table | RelationKind::Source => true,
        _ => relation.target != 0,
    }
}

/// The jobs of each process that is there.
struct Loads(BTreeMap<u64, usize>);

impl Loads {
    fn new(state: &MetaState, computes: &[u64]) -> Loads {
        let mut loads: BTreeMap<u64, usize> = computes.iter().map(|id| (*id, 0)).collect();
        for job in state.jobs.values() {
            if let Some(load) = loads.get_mut(&job.process) {
                *load += 1;
            }
        }
        Loads(loads)
    }

    /// The process with the fewest jobs, the older one of several.
    fn least(&self) -> Option<(u64, usize)> {
        let fewest = self.0.iter().min_by_key(|(id, load)| (**load, **id));
        fewest.map(|(id, load)| (*id, *load))
    }

    fn add(&mut self, process: u64, jobs: usize) {
        *self.0.entry(process).or_default() += jobs;
    }

    fn take_one(&mut self, process: u64) {
        if let Some(load) = self.0.get_mut(&process) {
            *load = load.saturating_sub(1);
        }
    }

    /// Where a job runs that reads these: there, if that process is not much busier than others. `on`: where a job runs.
    fn near(&self, on: impl Fn(JobId) -> u64, inputs: &[RelationId]) -> Option<u64> {
        let (_, least) = self.least()?;
        let inputs_on = |process: u64| inputs.iter().filter(|input| on(**input) == process).count();
        let candidates = self.0.iter().filter(|(_, load)| **load <= least + NEARNESS);
        // The older one of several.
        let best =
            candidates.max_by_key(|(id, load)| (inputs_on(**id), Reverse(**load), Reverse(**id)));
        best.map(|(id, _)| *id)
    }
}

/// The process of the jobs that write to tables, if one that is there has them.
fn process_of_tables(state: &MetaState, loads: &Loads) -> Option<u64> {
    let writers = state.jobs.iter().filter(|(id, _)| is_writer(state, **id));
    let placed = writers.map(|(_, job)| job.process).filter(|id| loads.0.contains_key(id));
    let mut by_process: BTreeMap<u64, usize> = BTreeMap::new();
    placed.for_each(|id| *by_process.entry(id).or_default() += 1);
    by_process.into_iter().max_by_key(|(_, jobs)| *jobs).map(|(id, _)| id)
}

/// Where a job runs; 0: nowhere, or there is no such job.
fn process_of(state: &MetaState, job: JobId) -> u64 {
    state.jobs.get(&job).map_or(0, |job| job.process)
}

fn is_writer(state: &MetaState, job: JobId) -> bool {
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
pub fn process_of_new(state: &MetaState, computes: &[u64], relation: &Relation) -> u64 {
    let loads = Loads::new(state, computes);
    let tables = || process_of_tables(state, &loads).or_else(|| loads.least().map(|(id, _)| id));
    let placed = match writes_tables(relation) {
        true => tables(),
        false => {
            let inputs = state.expand_views(&relation.depends_on);
            loads.near(|id| process_of(state, id), &inputs)
        }
    };
    placed.unwrap_or(0)
}

/// What is to be placed so that every job runs on a process that is there. With `even`, jobs are also taken from processes
/// that have at least two more than others.
pub fn plan(state: &MetaState, computes: &[u64], even: bool) -> Vec<PlaceJobs> {
    let mut loads = Loads::new(state, computes);
    let Some((least, _)) = loads.least() else { return Vec::new() };
    let tables = process_of_tables(state, &loads).unwrap_or(least);
    let mut placed: BTreeMap<JobId, u64> = BTreeMap::new();
    let mut movable: BTreeMap<u64, Vec<JobId>> = BTreeMap::new();
    for (id, job) in state.jobs.iter() {
        let is_writer = is_writer(state, *id);
        if is_writer && job.process != tables {
            loads.take_one(job.process);
            loads.add(tables, 1);
            placed.insert(*id, tables);
        } else if !is_writer && loads.0.contains_key(&job.process) {
            movable.entry(job.process).or_default().push(*id);
        }
    }
    // In the order of their creation: inputs before what reads them.
    for (id, job) in state.jobs.iter() {
        if is_writer(state, *id) || loads.0.contains_key(&job.process) {
            continue;
        }
        let on = |id: JobId| placed.get(&id).copied().unwrap_or_else(|| process_of(state, id));
        let Some(process) = loads.near(on, &job.inputs) else { continue };
        loads.add(process, 1);
        placed.insert(*id, process);
    }
    if even {
        make_even(&mut loads, &mut movable, &mut placed);
    }
    let mut by_process: BTreeMap<u64, Vec<u32>> = BTreeMap::new();
    placed.into_iter().for_each(|(id, process)| by_process.entry(process).or_default().push(id.0));
    let entry = |(incarnation, jobs)| PlaceJobs { incarnation, jobs };
    by_process.into_iter().map(entry).collect()
}

/// Takes jobs from the process that has the most, of those with jobs that may move, as long as that makes the loads more
/// even: the youngest first.
fn make_even(
    loads: &mut Loads,
    movable: &mut BTreeMap<u64, Vec<JobId>>,
    placed: &mut BTreeMap<JobId, u64>,
) {
    while let Some((fewest, least)) = loads.least() {
        let load = |process: u64| loads.0.get(&process).copied().unwrap_or(0);
        let busy = movable.iter_mut().filter(|(_, jobs)| !jobs.is_empty());
        let busiest = busy.max_by_key(|(process, _)| load(**process));
        let Some((&busiest, jobs)) = busiest.filter(|(process, _)| load(**process) >= least + 2)
        else {
            return;
        };
        let Some(job) = jobs.pop() else { return };
        loads.take_one(busiest);
        loads.add(fewest, 1);
        placed.insert(job, fewest);
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

    /// A log of processes and relations.
    #[derive(Default)]
    struct World(MetaState);

    impl World {
        fn apply(&mut self, entry: Entry) -> Option<RelationId> {
            let number = self.0.number + 1;
            let entries = vec![LogEntry { entry: Some(entry) }];
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
            let process = process_of_new(&self.0, computes, &relation);
            let entry = CreateRelation { relation, process, or_replace: false };
            self.apply(Entry::CreateRelation(entry)).unwrap()
        }

        fn place(&mut self, computes: &[u64], even: bool) -> usize {
            let entries = plan(&self.0, computes, even);
            let moved = entries.iter().map(|e| e.jobs.len()).sum();
            for entry in entries {
                self.apply(Entry::PlaceJobs(entry));
            }
            moved
        }

        fn on(&self, job: RelationId) -> u64 {
            self.0.jobs[&job].process
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
        world.apply(Entry::PlaceJobs(PlaceJobs { incarnation: b, jobs: vec![u.0, w.0] }));
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
    fn without_a_process_nothing_is_placed() {
        let mut world = World::default();
        let t = world.create(&[], table("t"));
        assert_eq!((world.on(t), world.place(&[], true)), (0, 0));
        let a = world.process(1);
        assert_eq!(world.place(&[a], true), 1);
        assert_eq!(world.on(t), a);
    }
}
