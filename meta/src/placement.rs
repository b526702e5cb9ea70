//! On which compute process each job runs (docs/design.md §10).
//!
//! Jobs that write to tables run on one process, so that a transaction over several tables is one process's work: tables,
//! and sinks into them. Every other job is placed by itself, and reads its inputs through the bucket if they run
//! elsewhere. A process's load is the number of its jobs. Decisions are a pure function of the folded state.

use std::collections::BTreeMap;

use millrace_common::{JobId, RelationId};
use millrace_rpc::catalog::{Relation, RelationKind};
use millrace_rpc::log::PlaceJobs;

use crate::state::MetaState;

/// A view runs where its inputs do as long as that process has at most so many more jobs than the one with the fewest.
const NEARNESS: usize = 1;

/// Whether a job writes to tables: all that do run on one process.
fn writes_tables(relation: &Relation) -> bool {
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

    fn most(&self) -> Option<(u64, usize)> {
        self.0.iter().max_by_key(|(_, load)| **load).map(|(id, load)| (*id, *load))
    }

    fn add(&mut self, process: u64, jobs: usize) {
        *self.0.entry(process).or_default() += jobs;
    }

    fn take_one(&mut self, process: u64) {
        if let Some(load) = self.0.get_mut(&process) {
            *load = load.saturating_sub(1);
        }
    }

    /// Where a job runs that reads these: there, if that process is not much busier than others.
    fn near(&self, state: &MetaState, inputs: &[RelationId]) -> Option<u64> {
        let (fewest, least) = self.least()?;
        let inputs_on = |process: u64| {
            let runs_there =
                |id: &&RelationId| state.jobs.get(id).is_some_and(|job| job.process == process);
            inputs.iter().filter(runs_there).count()
        };
        let candidates = self.0.iter().filter(|(_, load)| **load <= least + NEARNESS);
        let best = candidates
            .max_by_key(|(id, load)| (inputs_on(**id), std::cmp::Reverse(**load), **id == fewest));
        best.map(|(id, _)| *id)
    }
}

/// The process of the jobs that write to tables, if one that is there has them.
fn of_tables(state: &MetaState, loads: &Loads) -> Option<u64> {
    let writers = state.jobs.iter().filter(|(id, _)| is_writer(state, **id));
    let placed = writers.map(|(_, job)| job.process).filter(|id| loads.0.contains_key(id));
    let mut by_process: BTreeMap<u64, usize> = BTreeMap::new();
    placed.for_each(|id| *by_process.entry(id).or_default() += 1);
    by_process.into_iter().max_by_key(|(_, jobs)| *jobs).map(|(id, _)| id)
}

fn is_writer(state: &MetaState, job: JobId) -> bool {
    state.relations.get(&job).is_some_and(|relation| writes_tables(relation))
}

/// The process that a new relation's job runs on; 0: there is none.
pub fn of_new(state: &MetaState, computes: &[u64], relation: &Relation) -> u64 {
    let loads = Loads::new(state, computes);
    let tables = || of_tables(state, &loads).or_else(|| loads.least().map(|(id, _)| id));
    let placed = match writes_tables(relation) {
        true => tables(),
        false => {
            let inputs = state.expand_views(&relation.depends_on);
            loads.near(state, &inputs)
        }
    };
    placed.unwrap_or(0)
}

/// What is to be placed so that every job runs on a process that is there. With `even`, jobs are also taken from processes
/// that have at least two more than others.
pub fn plan(state: &MetaState, computes: &[u64], even: bool) -> Vec<PlaceJobs> {
    let mut loads = Loads::new(state, computes);
    let mut placed: BTreeMap<u64, Vec<u32>> = BTreeMap::new();
    let Some((least, _)) = loads.least() else { return Vec::new() };
    let tables = of_tables(state, &loads).unwrap_or(least);
    let mut movable: BTreeMap<u64, Vec<JobId>> = BTreeMap::new();
    for (id, job) in state.jobs.iter() {
        let is_writer = is_writer(state, *id);
        let is_there = loads.0.contains_key(&job.process);
        if is_writer && job.process != tables {
            loads.take_one(job.process);
            loads.add(tables, 1);
            placed.entry(tables).or_default().push(id.0);
        } else if !is_writer && is_there {
            movable.entry(job.process).or_default().push(*id);
        }
    }
    for (id, job) in state.jobs.iter() {
        if is_writer(state, *id) || loads.0.contains_key(&job.process) {
            continue;
        }
        let Some(process) = loads.near(state, &job.inputs) else { continue };
        loads.add(process, 1);
        placed.entry(process).or_default().push(id.0);
    }
    if even {
        make_even(&mut loads, &mut movable, &mut placed);
    }
    let entry = |(incarnation, jobs)| PlaceJobs { incarnation, jobs };
    placed.into_iter().map(entry).collect()
}

/// Takes jobs from the process that has the most, the youngest first, as long as that makes the loads more even.
fn make_even(
    loads: &mut Loads,
    movable: &mut BTreeMap<u64, Vec<JobId>>,
    placed: &mut BTreeMap<u64, Vec<u32>>,
) {
    while let (Some((fewest, least)), Some((busiest, most))) = (loads.least(), loads.most()) {
        let job = match most >= least + 2 {
            true => movable.get_mut(&busiest).and_then(Vec::pop),
            false => None,
        };
        let Some(job) = job else { return };
        loads.take_one(busiest);
        loads.add(fewest, 1);
        placed.entry(fewest).or_default().push(job.0);
    }
}

#[cfg(test)]
mod tests {
    use millrace_common::Epoch;
    use millrace_rpc::log::{CreateRelation, Entry, LogEntry, LogRecord, RegisterProcess};

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
            let process = of_new(&self.0, computes, &relation);
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
    fn without_a_process_nothing_is_placed() {
        let mut world = World::default();
        let t = world.create(&[], table("t"));
        assert_eq!((world.on(t), world.place(&[], true)), (0, 0));
        let a = world.process(1);
        assert_eq!(world.place(&[a], true), 1);
        assert_eq!(world.on(t), a);
    }
}
