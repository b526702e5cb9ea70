//! The fold is a pure function that validates every entry on its own.

use std::sync::Arc;

use millrace_common::{Epoch, RelationId};
use millrace_rpc::catalog::RelationKind;
use millrace_rpc::log::{
    CreateBackup, CreateRelation, DeleteObjects, DropRelations, EditVersion, Entry, FenceProcess,
    GiveUp, LogEntry, LogRecord, MoveParts, MovedPart, PlaceJobs, RaiseGenerations,
    RegisterProcess, ReleaseBackup, SetSetting, Snapshot, SourceAdvance, SplitOffset,
    StartBackfill, decode_frame, encode_frame,
};
use millrace_rpc::sequence::Sequence;
use millrace_rpc::version::{Flushed, JobCommit, PublishHandle, RunMeta, SliceRef, VersionEdit};
use proptest::prelude::*;

use super::{relation, table, view};
use crate::catalog::Catalog;
use crate::error::VoidReason;
use crate::fold::{Verdict, apply};
use crate::invariants;
use crate::log::crc;
use crate::state::{FIRST_RELATION_ID, MetaState};

/// A random entry, as numbers; what they mean depends on the state it meets.
#[derive(Clone, Debug)]
pub enum Op {
    Create {
        kind: u8,
        name: u8,
        dep: u8,
    },
    Drop {
        which: u8,
    },
    /// `off` ≠ 0 makes it invalid in one way or another.
    Commit {
        which: u8,
        off: u8,
        changed: bool,
        object: u8,
        finish: bool,
    },
    Edit {
        which: u8,
        object: u8,
    },
    Raise {
        which: u8,
    },
    Advance {
        which: u8,
        by: u8,
    },
    Setting {
        value: u8,
    },
    Delete {
        object: u8,
    },
    Move {
        which: u8,
        to: u8,
    },
    Register {
        nonce: u8,
    },
    Fence {
        incarnation: u8,
    },
    Place {
        incarnation: u8,
        which: u8,
    },
    GiveUp {
        incarnation: u8,
        object: u8,
    },
    Backup {
        name: u8,
    },
    Release {
        name: u8,
    },
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        3 => (0u8..5, 0u8..12, any::<u8>()).prop_map(|(kind, name, dep)| Op::Create { kind, name, dep }),
        1 => any::<u8>().prop_map(|which| Op::Drop { which }),
        10 => (any::<u8>(), prop_oneof![4 => Just(0u8), 1 => 1u8..4], any::<bool>(), any::<u8>(), any::<bool>())
            .prop_map(|(which, off, changed, object, finish)| Op::Commit { which, off, changed, object, finish }),
        2 => (any::<u8>(), any::<u8>()).prop_map(|(which, object)| Op::Edit { which, object }),
        1 => any::<u8>().prop_map(|which| Op::Raise { which }),
        2 => (any::<u8>(), 0u8..3).prop_map(|(which, by)| Op::Advance { which, by }),
        1 => any::<u8>().prop_map(|value| Op::Setting { value }),
        1 => any::<u8>().prop_map(|object| Op::Delete { object }),
        2 => (any::<u8>(), any::<u8>()).prop_map(|(which, to)| Op::Move { which, to }),
        1 => (0u8..5).prop_map(|nonce| Op::Register { nonce }),
        1 => (0u8..5).prop_map(|incarnation| Op::Fence { incarnation }),
        1 => (0u8..5, any::<u8>()).prop_map(|(incarnation, which)| Op::Place { incarnation, which }),
        1 => (0u8..5, any::<u8>()).prop_map(|(incarnation, object)| Op::GiveUp { incarnation, object }),
        1 => (0u8..3).prop_map(|name| Op::Backup { name }),
        1 => (0u8..3).prop_map(|name| Op::Release { name }),
    ]
}

pub fn history() -> impl Strategy<Value = Vec<Vec<Op>>> {
    prop::collection::vec(prop::collection::vec(op(), 1..5), 1..40)
}

pub fn object(n: u8) -> String {
    format!("data/{}/{n}.seg", 1 + n / 128)
}

fn nth<T: Copy>(items: impl Iterator<Item = T>, n: u8) -> Option<T> {
    let all: Vec<T> = items.collect();
    if all.is_empty() { None } else { Some(all[usize::from(n) % all.len()]) }
}

/// The entry that an op means in a state.
fn entry(state: &MetaState, op: &Op) -> Entry {
    let job = |which: u8| nth(state.jobs.keys().copied(), which).unwrap_or(RelationId(1));
    match op {
        Op::Create { kind, name, dep } => {
            let dep = nth(state.relations.keys().copied(), *dep);
            let deps: Vec<RelationId> = dep.into_iter().collect();
            let name = format!("r{name}");
            let relation = match kind {
                0 => table(&name),
                1 => relation(&name, RelationKind::Source, &[]),
                2 => relation(&name, RelationKind::View, &deps),
                _ => view(&name, &deps),
            };
            Entry::CreateRelation(CreateRelation { relation, or_replace: *kind == 2, process: 0 })
        }
        Op::Drop { which } => {
            let ids =
                nth(state.relations.keys().copied(), *which).map(|i| i.0).into_iter().collect();
            Entry::DropRelations(DropRelations { ids })
        }
        Op::Commit { which, off, changed, object: n, finish } => {
            Entry::Commit(commit(state, job(*which), *off, *changed, *n, *finish))
        }
        Op::Edit { which, object: n } => Entry::EditVersion(edit(state, job(*which), *n)),
        Op::Raise { which } => {
            Entry::RaiseGenerations(RaiseGenerations { jobs: vec![job(*which).0] })
        }
        Op::Advance { which, by } => {
            let source = nth(state.sources.keys().copied(), *which).unwrap_or(RelationId(1));
            let now =
                state.sources.get(&source).and_then(|s| s.newest().first()).map_or(0, |o| o.offset);
            let offsets =
                vec![SplitOffset { split: 0, offset: (now + u64::from(*by)).saturating_sub(1) }];
            Entry::SourceAdvance(SourceAdvance {
                source: source.0,
                offsets,
                ..SourceAdvance::default()
            })
        }
        Op::Setting { value } => Entry::SetSetting(SetSetting {
            name: "barrier_interval".to_owned(),
            value: (value % 3 > 0).then(|| value.to_string()),
        }),
        Op::Delete { object: n } => Entry::DeleteObjects(DeleteObjects { names: vec![object(*n)] }),
        Op::Move { which, to } => Entry::MoveParts(moved(state, job(*which), *to)),
        Op::Register { nonce } => {
            let nonce = u64::from(*nonce);
            Entry::RegisterProcess(RegisterProcess { nonce, ..RegisterProcess::default() })
        }
        Op::Fence { incarnation } => {
            Entry::FenceProcess(FenceProcess { incarnations: vec![u64::from(*incarnation)] })
        }
        Op::Place { incarnation, which } => {
            let jobs = vec![job(*which).0];
            let (incarnation, by_operator) = (u64::from(*incarnation), which % 2 == 1);
            Entry::PlaceJobs(PlaceJobs { incarnation, jobs, by_operator })
        }
        Op::GiveUp { incarnation, object: n } => {
            let incarnation = u64::from(*incarnation);
            Entry::GiveUp(GiveUp { incarnation, names: vec![object(*n)] })
        }
        Op::Backup { name } => Entry::CreateBackup(CreateBackup { name: format!("b{name}") }),
        Op::Release { name } => Entry::ReleaseBackup(ReleaseBackup { name: format!("b{name}") }),
    }
}

pub fn commit(
    state: &MetaState,
    id: RelationId,
    off: u8,
    changed: bool,
    n: u8,
    finish: bool,
) -> JobCommit {
    let Some(job) = state.jobs.get(&id) else {
        return JobCommit { job: id.0, ..JobCommit::default() };
    };
    let derived = state.relations[&id].kind() != RelationKind::Table;
    let version = &job.version;
    let epoch = match &version.backfill {
        Some(b) => b.snapshot_epoch,
        None if derived => state.exact_common(&job.inputs, state.epoch).map_or(1, |e| e.0),
        None => 0,
    };
    // A worker's content cannot change where no input did.
    let changed = changed
        && (!derived
            || version.backfill.is_some()
            || state.job_changed(id, Epoch(version.epoch), Epoch(epoch)));
    JobCommit {
        job: id.0,
        generation: version.generation + u64::from(off == 1),
        number: version.commits + 1 + u64::from(off == 2),
        epoch: epoch + if off == 3 { 1 << 40 } else { 0 },
        changed,
        slices: vec![SliceRef {
            object: object(n),
            length: 10 + u64::from(n),
            sequence: sequence(version.commits + 1),
            ..SliceRef::default()
        }],
        backfill: if finish { None } else { version.backfill.clone() },
        row_count_delta: 1,
        publish: n.is_multiple_of(3).then(|| PublishHandle {
            sequence: version.publish.last().map_or(version.published, |h| h.sequence) + 1,
            parts: vec![SliceRef { object: object(n.wrapping_add(1)), ..SliceRef::default() }],
            ..PublishHandle::default()
        }),
        published: match n % 4 {
            0 => version.publish.first().map_or(0, |h| h.sequence),
            _ => 0,
        },
        ..JobCommit::default()
    }
}

/// Of the only part of a commit.
pub fn sequence(commit: u64) -> u64 {
    Sequence::new(commit, 0).unwrap().get()
}

pub fn flushed(commit: u64) -> Flushed {
    Flushed { writer: 7, commit, ..Flushed::default() }
}

/// A flush of the whole tail, or a compaction of all runs.
fn edit(state: &MetaState, id: RelationId, n: u8) -> EditVersion {
    let Some(job) = state.jobs.get(&id) else {
        return EditVersion { job: id.0, ..EditVersion::default() };
    };
    let add = RunMeta {
        run_id: job.version.runs.iter().map(|r| r.run_id).max().unwrap_or(0) + 1,
        table_id: state.relations[&id].first_table_id,
        object: object(n),
        ..RunMeta::default()
    };
    let edit = VersionEdit {
        add_runs: vec![add],
        remove_runs: job.version.runs.iter().map(|r| r.run_id).collect(),
        flushed: n.is_multiple_of(2).then(|| flushed(job.version.commits)),
        ..VersionEdit::default()
    };
    EditVersion { job: id.0, generation: 0, edit, horizon: 0 }
}

/// All that a job's version names moves into one object, and something that it does not name.
fn moved(state: &MetaState, id: RelationId, to: u8) -> MoveParts {
    let nothing = MovedPart { from_object: object(to), ..MovedPart::default() };
    let version = state.jobs.get(&id).map(|job| Arc::clone(&job.version)).unwrap_or_default();
    let runs = version.runs.iter().map(|r| (&r.object, r.offset, r.length));
    let staged = version.publish.iter().flat_map(|h| &h.parts);
    let slices = version.tail.iter().chain(staged).map(|s| (&s.object, s.offset, s.length));
    let part = |(at, (object, offset, length)): (usize, (&String, u64, u64))| MovedPart {
        job: id.0,
        from_object: object.clone(),
        from_offset: offset,
        length,
        offset: at as u64 * 1_000,
    };
    let parts = runs.chain(slices).enumerate().map(part).chain([nothing]).collect();
    MoveParts { object: object(to), parts }
}

pub fn record(state: &MetaState, entries: Vec<Entry>) -> LogRecord {
    LogRecord {
        number: state.number + 1,
        term: state.term.max(1),
        leader: 7,
        prev_crc: state.crc,
        epoch: state.epoch.next(1_000_000 + state.number * 37).0,
        entries: entries.into_iter().map(LogEntry::from).collect(),
        ..LogRecord::default()
    }
}

pub fn step(state: &mut MetaState, entries: Vec<Entry>) -> Vec<Verdict> {
    let record = record(state, entries);
    let bytes = encode_frame(&record, crc);
    apply(state, &record, crc(&bytes))
}

/// All records of a history, and the state after each.
pub fn run(history: &[Vec<Op>]) -> (Vec<LogRecord>, Vec<MetaState>) {
    let mut state = MetaState::default();
    let mut records = Vec::new();
    let mut states = vec![state.clone()];
    for ops in history {
        let record = record(&state, ops.iter().map(|op| entry(&state, op)).collect());
        apply(&mut state, &record, crc(&encode_frame(&record, crc)));
        records.push(record);
        states.push(state.clone());
    }
    (records, states)
}

pub fn through_bytes(state: &MetaState) -> MetaState {
    let bytes = encode_frame(&state.to_snapshot(), crc);
    MetaState::from_snapshot(decode_frame::<Snapshot>(&bytes, crc).unwrap())
}

/// The same state, whatever its path there; a snapshot does not carry the record that has changed the catalog last.
pub fn canonical(state: &MetaState) -> MetaState {
    MetaState { catalog_version: 0, ..through_bytes(state) }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    /// A snapshot anywhere in between changes nothing.
    #[test]
    fn a_prefix_a_snapshot_and_the_rest_fold_to_the_same(history in history(), cut in any::<prop::sample::Index>()) {
        let (records, states) = run(&history);
        let at = cut.index(states.len());
        let mut state = through_bytes(&states[at]);
        for record in &records[at..] {
            apply(&mut state, record, crc(&encode_frame(record, crc)));
        }
        prop_assert_eq!(canonical(&state), canonical(states.last().unwrap()));
    }

    #[test]
    fn invariants_hold_after_every_record(history in history()) {
        for state in run(&history).1 {
            prop_assert_eq!(invariants::check(&state), Ok(()));
            prop_assert_eq!(invariants::check(&through_bytes(&state)), Ok(()));
        }
    }

    /// A void entry changes nothing: folding only the valid ones gives the same state.
    #[test]
    fn void_entries_change_nothing(history in history()) {
        let mut with = MetaState::default();
        let mut without = MetaState::default();
        for ops in &history {
            let all = record(&with, ops.iter().map(|op| entry(&with, op)).collect());
            let verdicts = apply(&mut with, &all, 1);
            let valid = all.entries.iter().zip(&verdicts).filter(|(_, v)| v.is_ok());
            let only = LogRecord { entries: valid.map(|(e, _)| e.clone()).collect(), ..all.clone() };
            let again = apply(&mut without, &only, 1);
            prop_assert!(again.iter().all(Result::is_ok));
            prop_assert_eq!(canonical(&with), canonical(&without));
        }
    }

    /// Frontiers never go back, and what was exact stays exact (until its history is trimmed).
    #[test]
    fn exactness_is_never_taken_back(history in history()) {
        let (_, states) = run(&history);
        for pair in states.windows(2) {
            for id in pair[0].jobs.keys().filter(|id| pair[1].jobs.contains_key(id)) {
                let Some(before) = pair[0].frontier(*id) else { continue };
                prop_assert_eq!(pair[1].exact_at_most(*id, before), Some(before));
            }
        }
    }

    /// What the fold keeps per job is what following all inputs back to the roots gives.
    #[test]
    fn kept_bounds_are_those_of_the_definition(history in history()) {
        for state in run(&history).1 {
            for id in state.relations.keys() {
                for at in [Epoch::ZERO, state.epoch.prev(), state.epoch] {
                    prop_assert_eq!(state.stable_until(*id, at), defined_until(&state, *id, at));
                }
            }
        }
    }

    /// A catalog made from the one before it is the one made from nothing.
    #[test]
    fn catalogs_follow_each_other(history in history()) {
        let mut catalog = Catalog::default();
        for state in run(&history).1 {
            catalog = catalog_after(&catalog, &state);
            let fresh = catalog_after(&Catalog::default(), &state);
            for id in (FIRST_RELATION_ID..state.next_relation_id).map(RelationId) {
                prop_assert_eq!(catalog.dependants(id), fresh.dependants(id));
            }
            for name in (0..12).map(|n| format!("r{n}")) {
                let id = |c: &Catalog| c.by_name("public", &name).map(|r| r.id);
                prop_assert_eq!(id(&catalog), id(&fresh));
            }
        }
    }

    /// A record of an older term, or of another leader of this term, moves only the position.
    #[test]
    fn older_terms_are_ignored(history in history(), ops in prop::collection::vec(op(), 1..4), other in any::<bool>()) {
        let (_, states) = run(&history);
        let mut state = states.last().unwrap().clone();
        let before = canonical(&state);
        let entries = ops.iter().map(|op| entry(&state, op)).collect();
        let mut stale = record(&state, entries);
        if other { stale.leader += 1 } else { stale.term -= 1 }
        let verdicts = apply(&mut state, &stale, 99);
        prop_assert!(verdicts.iter().all(|v| *v == Err(VoidReason::OldTerm)));
        let after = canonical(&state);
        prop_assert_eq!(MetaState { number: before.number, crc: before.crc, ..after }, before);
    }
}

fn catalog_after(previous: &Catalog, state: &MetaState) -> Catalog {
    let (relations, schemas) = (state.relations.clone(), state.schemas.clone());
    let inputs = |id| state.inputs(id).to_vec();
    Catalog::after(previous, 0, relations, schemas, Default::default(), Default::default(), inputs)
}

/// `MetaState::stable_until` by its definition: by way of all inputs, each time.
fn defined_until(state: &MetaState, id: RelationId, at: Epoch) -> Epoch {
    match state.segment_at(id, at) {
        None => at,
        Some((segment, false)) => segment.hi.max(at),
        Some((segment, true)) => {
            let inputs = state.inputs(id).iter().map(|i| defined_until(state, *i, segment.hi));
            let due = state.due(id).map_or(Epoch::MAX, Epoch::prev);
            inputs.min().unwrap_or(state.epoch).min(due).min(state.epoch).max(segment.hi).max(at)
        }
    }
}

/// Table, view over it; the view backfilled to the table's epoch.
pub fn table_and_view() -> (MetaState, RelationId, RelationId) {
    let mut state = MetaState::default();
    let (t, v) = (RelationId(FIRST_RELATION_ID), RelationId(FIRST_RELATION_ID + 1));
    let create =
        |r| Entry::CreateRelation(CreateRelation { relation: r, or_replace: false, process: 0 });
    assert!(step(&mut state, vec![create(table("t"))])[0].is_ok());
    assert!(step(&mut state, vec![create(view("v", &[t]))])[0].is_ok());
    let done = commit(&state, v, 0, true, 1, true);
    assert!(step(&mut state, vec![Entry::Commit(done)])[0].is_ok());
    (state, t, v)
}

/// Three slices in one object; two move, of which one has gone by then.
#[test]
fn parts_that_move_keep_their_place_in_the_version() {
    let (mut state, t, _) = table_and_view();
    for n in 1..=3u64 {
        let slice = SliceRef {
            object: object(1),
            offset: n * 100,
            length: 100,
            sequence: sequence(n),
            ..SliceRef::default()
        };
        let entry = JobCommit { slices: vec![slice], ..commit(&state, t, 0, true, 1, true) };
        assert!(step(&mut state, vec![Entry::Commit(entry)])[0].is_ok());
    }
    let part = |from_offset, offset| MovedPart {
        job: t.0,
        from_object: object(1),
        from_offset,
        length: 100,
        offset,
    };
    let moves =
        MoveParts { object: object(9), parts: vec![part(100, 0), part(200, 100), part(300, 200)] };
    let edit = VersionEdit { flushed: Some(flushed(1)), ..VersionEdit::default() };
    let flush = EditVersion { job: t.0, edit, ..EditVersion::default() };
    assert!(step(&mut state, vec![Entry::EditVersion(flush)])[0].is_ok());
    let before = Arc::clone(&state.jobs[&t].version);
    assert!(step(&mut state, vec![Entry::MoveParts(moves.clone())])[0].is_ok());
    let tail = &state.jobs[&t].version.tail;
    let places: Vec<_> =
        tail.iter().map(|s| (s.sequence, s.object.as_str(), s.offset, s.length)).collect();
    assert_eq!(
        places,
        [(sequence(2), "data/1/9.seg", 100, 100), (sequence(3), "data/1/9.seg", 200, 100)]
    );
    let epochs = |slices: &[SliceRef]| slices.iter().map(|s| s.epoch).collect::<Vec<_>>();
    assert_eq!(epochs(tail), epochs(&before.tail));
    assert_eq!(state.objects.live_bytes(&object(9)), 200);
    assert_eq!(state.jobs[&t].version.epoch, before.epoch);
    // A copy that comes too late is garbage at once; into a deleted object nothing moves.
    let late = MoveParts { object: object(8), ..moves.clone() };
    assert!(step(&mut state, vec![Entry::MoveParts(late)])[0].is_ok());
    assert!(state.objects.is_garbage(&object(8)));
    let delete = DeleteObjects { names: vec![object(8)] };
    assert!(step(&mut state, vec![Entry::DeleteObjects(delete)])[0].is_ok());
    let again = MoveParts { object: object(8), ..moves };
    assert_eq!(step(&mut state, vec![Entry::MoveParts(again)])[0], Err(VoidReason::DeletedObject));
}

#[test]
fn dependencies_that_do_not_follow_from_the_jobs_are_noticed() {
    let (mut state, t, v) = table_and_view();
    assert_eq!(state.readers(t), [v]);
    assert_eq!(invariants::check(&state), Ok(()));
    state.dependencies = Default::default();
    assert!(invariants::check(&state).unwrap_err().contains("dependencies"));
    state.rebuild_dependencies();
    assert_eq!(invariants::check(&state), Ok(()));
}

fn change(state: &mut MetaState, id: RelationId) -> Verdict {
    let commit = commit(state, id, 0, true, 2, true);
    step(state, vec![Entry::Commit(commit)]).remove(0)
}

#[test]
fn a_roots_commit_takes_the_records_epoch_everywhere() {
    let (mut state, t, _) = table_and_view();
    let mut commit = commit(&state, t, 0, true, 3, true);
    commit.edit = Some(edit(&state, t, 4).edit);
    let verdict = step(&mut state, vec![Entry::Commit(commit)]).remove(0).unwrap();
    let version = &state.jobs[&t].version;
    assert_eq!(verdict.epoch, state.epoch);
    assert_eq!(version.epoch, state.epoch.0);
    assert_eq!(version.tail[0].epoch, state.epoch.0);
    assert_eq!(
        (version.runs[0].min_epoch, version.runs[0].max_epoch),
        (state.epoch.0, state.epoch.0)
    );
}

#[test]
fn an_idle_view_follows_the_head_and_a_change_holds_it_until_it_commits() {
    let (mut state, t, v) = table_and_view();
    step(&mut state, vec![]);
    assert_eq!(state.frontier(v), Some(state.epoch));
    change(&mut state, t).unwrap();
    let changed_at = state.epoch;
    step(&mut state, vec![]);
    assert_eq!(state.frontier(v), Some(changed_at.prev()));
    assert_eq!(state.exact_common(&[t, v], state.epoch), Some(changed_at.prev()));
    change(&mut state, v).unwrap();
    assert_eq!(state.frontier(v), Some(state.epoch));
    assert_eq!(state.last_change(v), changed_at.max(state.last_change(v)));
}

#[test]
fn a_backfill_reads_all_inputs_at_one_epoch_before_its_record() {
    let (mut state, t, v) = table_and_view();
    let create = Entry::CreateRelation(CreateRelation {
        relation: view("w", &[t, v]),
        or_replace: false,
        process: 0,
    });
    let commit = commit(&state, t, 0, true, 5, true);
    let before = state.epoch;
    assert!(step(&mut state, vec![create, Entry::Commit(commit)]).iter().all(Result::is_ok));
    let w = &state.jobs[&RelationId(v.0 + 1)];
    let snapshot = w.version.backfill.as_ref().unwrap().snapshot_epoch;
    assert!(snapshot >= before.0 && snapshot < state.epoch.0);
    assert_eq!(state.frontier(RelationId(v.0 + 1)), None);
}

#[test]
fn a_view_over_an_unfinished_view_gets_its_snapshot_epoch_later() {
    let (mut state, t, v) = table_and_view();
    let create = |name: &str, deps: &[RelationId]| {
        Entry::CreateRelation(CreateRelation {
            relation: view(name, deps),
            or_replace: false,
            process: 0,
        })
    };
    let (a, b) = (RelationId(v.0 + 1), RelationId(v.0 + 2));
    step(&mut state, vec![create("a", &[t])]);
    step(&mut state, vec![create("b", &[a])]);
    let start = Entry::StartBackfill(StartBackfill { job: b.0, generation: 1 });
    assert_eq!(step(&mut state, vec![start.clone()]), [Err(VoidReason::InputsNotReady)]);
    change(&mut state, a).unwrap();
    assert!(step(&mut state, vec![start.clone()])[0].is_ok());
    assert_eq!(step(&mut state, vec![start]), [Err(VoidReason::BadEpoch)]);
}

#[test]
fn drops_are_all_or_none_and_respect_dependants() {
    let (mut state, t, v) = table_and_view();
    let drop = |ids: &[RelationId]| {
        Entry::DropRelations(DropRelations { ids: ids.iter().map(|i| i.0).collect() })
    };
    assert!(matches!(step(&mut state, vec![drop(&[t])])[0], Err(VoidReason::DependentsExist(_))));
    assert!(step(&mut state, vec![drop(&[t, v])])[0].is_ok());
    assert!(state.relations.is_empty() && state.jobs.is_empty());
    assert_eq!(state.objects.garbage_before(Epoch::MAX).len(), 1);
}

#[test]
fn a_deleted_name_can_never_be_referenced_again() {
    let (mut state, t, v) = table_and_view();
    step(&mut state, vec![Entry::DropRelations(DropRelations { ids: vec![v.0] })]);
    let delete = Entry::DeleteObjects(DeleteObjects { names: vec![object(1)] });
    assert!(step(&mut state, vec![delete])[0].is_ok());
    let late = commit(&state, t, 0, true, 1, true);
    assert_eq!(step(&mut state, vec![Entry::Commit(late)]), [Err(VoidReason::DeletedObject)]);
}

/// The steps of a backfill have one epoch: only their numbers tell that one is missing.
#[test]
fn a_void_commit_voids_those_cut_after_it() {
    let (mut state, t, v) = table_and_view();
    let create = Entry::CreateRelation(CreateRelation {
        relation: view("w", &[t]),
        or_replace: false,
        process: 0,
    });
    step(&mut state, vec![create, Entry::DropRelations(DropRelations { ids: vec![v.0] })]);
    let delete = Entry::DeleteObjects(DeleteObjects { names: vec![object(1)] });
    assert!(step(&mut state, vec![delete])[0].is_ok());
    let w = RelationId(v.0 + 1);
    let first = commit(&state, w, 0, true, 1, false);
    let second = JobCommit { number: first.number + 1, ..commit(&state, w, 0, true, 2, true) };
    assert_eq!(first.epoch, second.epoch);
    let before = state.jobs[&w].clone();
    let verdicts = step(&mut state, vec![Entry::Commit(first), Entry::Commit(second)]);
    assert_eq!(verdicts, [Err(VoidReason::DeletedObject), Err(VoidReason::OtherPredecessor)]);
    assert_eq!(state.jobs[&w], before);
}

/// Epochs in flight come into one record or into several: both are the same history.
#[test]
fn a_record_takes_several_commits_of_a_view_in_order() {
    let (mut state, t, v) = table_and_view();
    change(&mut state, t).unwrap();
    let first = Epoch(state.jobs[&t].version.epoch);
    change(&mut state, t).unwrap();
    let second = state.epoch;
    step(&mut state, vec![]);
    let number = state.jobs[&v].version.commits + 1;
    let at = |epoch: Epoch, number: u64| {
        let plain =
            JobCommit { slices: vec![], publish: None, ..commit(&state, v, 0, true, 2, true) };
        Entry::Commit(JobCommit { epoch: epoch.0, number, ..plain })
    };
    let both = vec![at(first, number), at(second, number + 1)];
    assert!(step(&mut state, both).iter().all(Result::is_ok));
    assert_eq!(state.exact_at_most(v, first), Some(first));
    assert_eq!(state.frontier(v), Some(state.epoch));
    assert_eq!(
        state.unpublished[&v].iter().rev().take(2).copied().collect::<Vec<_>>(),
        [(state.number, second), (state.number, first)]
    );
}

#[test]
fn a_view_cannot_be_replaced_by_one_that_reads_itself() {
    let mut state = MetaState::default();
    let ids = [0, 1, 2].map(|n| RelationId(FIRST_RELATION_ID + n));
    let create =
        |relation| Entry::CreateRelation(CreateRelation { relation, or_replace: true, process: 0 });
    let plain = |name: &str, deps: &[RelationId]| create(relation(name, RelationKind::View, deps));
    step(&mut state, vec![create(table("t"))]);
    step(&mut state, vec![plain("a", &[ids[0]])]);
    step(&mut state, vec![plain("b", &[ids[1]])]);
    assert!(matches!(step(&mut state, vec![plain("a", &[ids[2]])])[0], Err(VoidReason::Cycle(_))));
    assert!(step(&mut state, vec![plain("a", &[])])[0].is_ok());
    assert_eq!(state.relation_named("public", "a").unwrap().id, ids[1].0);
}

#[test]
fn a_view_that_rows_were_computed_from_keeps_its_definition() {
    let mut state = MetaState::default();
    let ids = [0, 1, 2].map(|n| RelationId(FIRST_RELATION_ID + n));
    let create =
        |relation| Entry::CreateRelation(CreateRelation { relation, or_replace: true, process: 0 });
    let plain = |name: &str, query: &str, dep: RelationId| {
        let query = query.to_owned();
        create(millrace_rpc::catalog::Relation {
            query,
            ..relation(name, RelationKind::View, &[dep])
        })
    };
    step(&mut state, vec![create(table("t"))]);
    step(&mut state, vec![plain("a", "one", ids[0])]);
    step(&mut state, vec![plain("b", "one", ids[1])]);
    assert!(step(&mut state, vec![plain("a", "two", ids[0])])[0].is_ok());
    step(&mut state, vec![create(view("m", &[ids[2]]))]);
    let replaced = |state: &mut _, name, query, dep| {
        step(state, vec![plain(name, query, dep)]).remove(0).map(|_| ())
    };
    let read = |name: &str| Err(VoidReason::ViewIsRead(name.into(), "m".into()));
    assert_eq!(replaced(&mut state, "a", "three", ids[0]), read("a"));
    assert_eq!(replaced(&mut state, "b", "three", ids[1]), read("b"));
    assert_eq!(replaced(&mut state, "a", "two", ids[0]), Ok(()));
}
