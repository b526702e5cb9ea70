//! Processes in the log: what is given to them, what fencing one means, and what they give up.

use millrace_common::{Epoch, RelationId};
use millrace_rpc::log::{
    CreateRelation, DeleteObjects, EditVersion, Entry, FenceProcess, GiveUp, PlaceJobs,
    RegisterProcess,
};
use millrace_rpc::version::{JobCommit, RunMeta, SliceRef, VersionEdit};

use super::fold::{step, through_bytes};
use super::table;
use crate::error::VoidReason;
use crate::fold::Verdict;
use crate::state::MetaState;

fn register(nonce: u64) -> Entry {
    Entry::RegisterProcess(RegisterProcess { nonce, roles: vec![3], address: "a:1".into() })
}

fn fence(incarnation: u64) -> Entry {
    Entry::FenceProcess(FenceProcess { incarnations: vec![incarnation] })
}

fn create(name: &str, process: u64) -> Entry {
    Entry::CreateRelation(CreateRelation { relation: table(name), or_replace: false, process })
}

fn give_up(incarnation: u64, name: &str) -> Entry {
    Entry::GiveUp(GiveUp { incarnation, names: vec![name.to_owned()] })
}

fn delete(name: &str) -> Entry {
    Entry::DeleteObjects(DeleteObjects { names: vec![name.to_owned()] })
}

/// The next commit of a job, which names an object.
fn commit(state: &MetaState, job: RelationId, object: &str) -> JobCommit {
    let version = &state.jobs[&job].version;
    JobCommit {
        job: job.0,
        generation: version.generation,
        number: version.commits + 1,
        slices: vec![SliceRef {
            object: object.to_owned(),
            length: 1,
            sequence: version.commits + 1,
            ..SliceRef::default()
        }],
        changed: true,
        ..JobCommit::default()
    }
}

fn only(verdicts: Vec<Verdict>) -> Result<(), VoidReason> {
    assert_eq!(verdicts.len(), 1);
    verdicts.into_iter().next().unwrap().map(drop)
}

/// Processes 1 and 2, and a table that runs on 1.
fn two_processes() -> (MetaState, RelationId) {
    let mut state = MetaState::default();
    assert!(step(&mut state, vec![register(11), register(12)]).iter().all(Result::is_ok));
    assert_eq!(state.processes.live().keys().copied().collect::<Vec<_>>(), [1, 2]);
    let verdicts = step(&mut state, vec![create("t", 1)]);
    let id = verdicts[0].clone().unwrap().relation.unwrap();
    (state, id)
}

#[test]
fn a_registration_that_comes_twice_is_one() {
    let (mut state, _) = two_processes();
    assert_eq!(only(step(&mut state, vec![register(11)])), Ok(()));
    assert_eq!((state.processes.by_nonce(11), state.processes.last()), (Some(1), 2));
    let mut state = through_bytes(&state);
    assert_eq!(only(step(&mut state, vec![register(12)])), Ok(()));
    assert_eq!((state.processes.by_nonce(12), state.processes.last()), (Some(2), 2));
    // A late copy of it does not bring a fenced process back.
    assert_eq!(only(step(&mut state, vec![fence(1)])), Ok(()));
    let mut state = through_bytes(&state);
    assert_eq!(only(step(&mut state, vec![register(11)])), Err(VoidReason::FencedProcess));
    assert_eq!(only(step(&mut state, vec![register(13)])), Ok(()));
    assert_eq!(state.processes.by_nonce(13), Some(3), "no incarnation is given twice");
}

#[test]
fn what_a_fenced_process_still_sends_is_void() {
    let (mut state, table) = two_processes();
    let late = commit(&state, table, "data/1/7.seg");
    let generation = late.generation;
    assert_eq!(only(step(&mut state, vec![fence(1)])), Ok(()));
    assert_eq!(state.jobs[&table].version.generation, generation + 1);
    assert_eq!(state.jobs[&table].process, 0, "it runs nowhere");
    let verdict = only(step(&mut state, vec![Entry::Commit(late.clone())]));
    assert_eq!(verdict, Err(VoidReason::OtherGeneration));
    // Nor may another bring in what it has uploaded: that may be deleted at any time.
    let named = JobCommit { generation: generation + 1, ..late };
    let verdict = only(step(&mut state, vec![Entry::Commit(named)]));
    assert_eq!(verdict, Err(VoidReason::FencedProcess));
    let run = RunMeta {
        run_id: 1 << 32,
        table_id: state.relations[&table].first_table_id,
        object: "data/1/8.seg".into(),
        ..RunMeta::default()
    };
    let edit = VersionEdit { add_runs: vec![run], ..VersionEdit::default() };
    let edit = EditVersion { job: table.0, generation: 0, edit, horizon: 0 };
    let verdict = only(step(&mut state, vec![Entry::EditVersion(edit)]));
    assert_eq!(verdict, Err(VoidReason::FencedProcess));
    for entry in [
        Entry::PlaceJobs(PlaceJobs { incarnation: 1, ..PlaceJobs::default() }),
        give_up(1, "data/1/9.seg"),
    ] {
        assert_eq!(only(step(&mut state, vec![entry])), Err(VoidReason::FencedProcess));
    }
    assert_eq!(only(step(&mut state, vec![fence(7)])), Err(VoidReason::UnknownProcess(7)));
}

#[test]
fn a_job_that_is_placed_elsewhere_has_another_generation() {
    let (mut state, table) = two_processes();
    let generation = state.jobs[&table].version.generation;
    let place = |incarnation| {
        let jobs = vec![table.0];
        vec![Entry::PlaceJobs(PlaceJobs { incarnation, jobs, ..PlaceJobs::default() })]
    };
    step(&mut state, place(1));
    assert_eq!(state.jobs[&table].version.generation, generation, "it is there already");
    step(&mut state, place(2));
    assert_eq!(state.jobs[&table].version.generation, generation + 1);
    step(&mut state, vec![fence(1)]);
    assert_eq!(state.jobs[&table].version.generation, generation + 1, "it is not on this one");
    assert_eq!(through_bytes(&state).jobs[&table].process, 2);
    step(&mut state, vec![create("u", 1)]);
    let created = state.jobs.values().last().unwrap();
    assert_eq!(created.process, 0, "what is created on a fenced process runs nowhere");
}

#[test]
fn what_an_operator_has_placed_is_known_until_it_is_placed_otherwise() {
    let (mut state, table) = two_processes();
    let place = |incarnation, by_operator| {
        let jobs = vec![table.0];
        vec![Entry::PlaceJobs(PlaceJobs { incarnation, jobs, by_operator })]
    };
    let placed = |state: &MetaState| (state.jobs[&table].process, state.jobs[&table].by_operator);
    assert_eq!(placed(&state), (1, false));
    let generation = state.jobs[&table].version.generation;
    step(&mut state, place(1, true));
    let mut state = through_bytes(&state);
    assert_eq!(placed(&state), (1, true));
    step(&mut state, place(1, false));
    assert_eq!(placed(&state), (1, false));
    assert_eq!(state.jobs[&table].version.generation, generation, "it has run there all the time");
    step(&mut state, place(2, true));
    step(&mut state, vec![fence(2)]);
    assert_eq!(placed(&state), (0, false));
}

#[test]
fn only_what_nobody_may_name_is_deleted() {
    let (mut state, table) = two_processes();
    let unused = delete("data/1/5.seg");
    let verdict = only(step(&mut state, vec![unused.clone()]));
    assert_eq!(verdict, Err(VoidReason::ObjectInUse), "it may still be on its way");
    let named = Entry::Commit(commit(&state, table, "data/1/6.seg"));
    assert_eq!(only(step(&mut state, vec![named])), Ok(()));
    for name in ["data/1/5.seg", "data/1/6.seg"] {
        assert_eq!(only(step(&mut state, vec![give_up(1, name)])), Ok(()));
    }
    assert_eq!(state.objects.garbage_before(Epoch::MAX), ["data/1/5.seg"]);
    let foreign = only(step(&mut state, vec![give_up(2, "data/1/7.seg")]));
    assert_eq!(foreign, Err(VoidReason::Malformed));
    let verdict = only(step(&mut state, vec![delete("data/1/6.seg")]));
    assert_eq!(verdict, Err(VoidReason::ObjectInUse));
    // A commit that was on its way all the same takes it back, unless it is deleted first.
    let mut taken = state.clone();
    let late = Entry::Commit(commit(&state, table, "data/1/5.seg"));
    assert_eq!(only(step(&mut taken, vec![late.clone()])), Ok(()));
    assert_eq!(only(step(&mut taken, vec![unused.clone()])), Err(VoidReason::ObjectInUse));
    assert_eq!(only(step(&mut state, vec![unused])), Ok(()));
    let mut state = through_bytes(&state);
    assert_eq!(only(step(&mut state, vec![late])), Err(VoidReason::DeletedObject));
    assert_eq!(only(step(&mut state, vec![give_up(1, "data/1/5.seg")])), Ok(()));
    assert!(!state.objects.has_garbage(), "it is gone");
    // What a fenced process has left needs nobody to give it up, and no memory of its names.
    assert_eq!(only(step(&mut state, vec![fence(1)])), Ok(()));
    assert!(state.objects.deleted_snapshot().is_empty());
    assert_eq!(only(step(&mut state, vec![delete("data/1/7.seg")])), Ok(()));
    assert_eq!(only(step(&mut state, vec![delete("data/1/6.seg")])), Err(VoidReason::ObjectInUse));
}

/// Earlier releases took the leader's term for the incarnation.
#[test]
fn a_log_without_processes_goes_on() {
    let mut state = MetaState { term: 5, leader: 7, ..MetaState::default() };
    let verdicts = step(&mut state, vec![create("t", 0)]);
    let table = verdicts[0].clone().unwrap().relation.unwrap();
    let old = Entry::Commit(commit(&state, table, "data/4/1.seg"));
    assert_eq!(only(step(&mut state, vec![old])), Ok(()));
    assert_eq!(only(step(&mut state, vec![delete("data/4/2.seg")])), Ok(()));
    assert_eq!(only(step(&mut state, vec![delete("data/5/2.seg")])), Err(VoidReason::ObjectInUse));
    let mut state = through_bytes(&state);
    assert_eq!((state.processes.last(), state.processes.live().len()), (0, 0));
    // The next leader.
    state.term = 6;
    let generation = state.jobs[&table].version.generation;
    let incarnation = state.processes.next(state.term);
    let place = Entry::PlaceJobs(PlaceJobs { incarnation, ..PlaceJobs::default() });
    assert!(step(&mut state, vec![register(1), place]).iter().all(Result::is_ok));
    assert_eq!(state.processes.by_nonce(1), Some(6), "no object has had this name");
    assert_eq!(state.jobs[&table].version.generation, generation + 1);
    assert_eq!(only(step(&mut state, vec![delete("data/5/2.seg")])), Ok(()));
    let kept = delete("data/4/1.seg");
    assert_eq!(only(step(&mut state, vec![kept])), Err(VoidReason::ObjectInUse));
}
