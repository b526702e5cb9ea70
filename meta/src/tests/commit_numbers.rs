//! The fold takes a job's commits by their numbers, and keeps what they add in the order of their sequences.

use bytes::Bytes;
use millrace_rpc::log::{EditVersion, Entry};
use millrace_rpc::sequence::Sequence;
use millrace_rpc::version::{Flushed, JobCommit, RunMeta, VersionEdit};

use super::fold::{commit, flushed, object, sequence, step, table_and_view};
use crate::error::VoidReason;

#[test]
fn a_commit_that_is_sent_twice_is_taken_once() {
    let (mut state, t, _) = table_and_view();
    let one = commit(&state, t, 0, true, 1, true);
    let verdicts = step(&mut state, vec![Entry::Commit(one.clone()), Entry::Commit(one.clone())]);
    assert!(verdicts[0].is_ok());
    assert_eq!(verdicts[1], Err(VoidReason::TakenBefore));
    let before = state.jobs[&t].clone();
    let two = commit(&state, t, 0, true, 2, true);
    assert!(step(&mut state, vec![Entry::Commit(two)])[0].is_ok());
    let after = state.jobs[&t].clone();
    assert_eq!(step(&mut state, vec![Entry::Commit(one)]), [Err(VoidReason::TakenBefore)]);
    assert_eq!(state.jobs[&t], after);
    assert_eq!(after.version.row_count, before.version.row_count + 1);
    let numbers: Vec<u64> =
        after.version.tail.iter().map(|s| Sequence::stored(s.sequence).commit()).collect();
    assert_eq!(numbers, [1, 2]);
}

/// A part of another commit would be read before or after what it was written after or before.
#[test]
fn a_commit_adds_nothing_under_another_number() {
    let (mut state, t, _) = table_and_view();
    let first = commit(&state, t, 0, true, 1, true);
    assert!(step(&mut state, vec![Entry::Commit(first)])[0].is_ok());
    let good = commit(&state, t, 0, true, 2, true);
    let mut wrong = good.clone();
    wrong.slices[0].sequence = sequence(1);
    let mut twice = good.clone();
    twice.slices.push(twice.slices[0].clone());
    let run = RunMeta {
        run_id: 1,
        table_id: state.relations[&t].first_table_id,
        object: object(3),
        sequence: sequence(3),
        ..RunMeta::default()
    };
    let early = VersionEdit { add_runs: vec![run.clone()], ..VersionEdit::default() };
    let early = JobCommit { edit: Some(early), ..good.clone() };
    for bad in [wrong, twice, early] {
        assert_eq!(step(&mut state, vec![Entry::Commit(bad)]), [Err(VoidReason::Malformed)]);
    }
    // A flush of a commit to come, and one with a run that is newer than what it holds.
    let sequences = [(2, 1), (1, 2)];
    for (commit, newest) in sequences {
        let add = RunMeta { sequence: sequence(newest), ..run.clone() };
        let edit = VersionEdit {
            add_runs: vec![add],
            flushed: Some(flushed(commit)),
            ..VersionEdit::default()
        };
        let edit = Entry::EditVersion(EditVersion { job: t.0, edit, ..EditVersion::default() });
        assert_eq!(step(&mut state, vec![edit]), [Err(VoidReason::Malformed)]);
    }
    assert!(step(&mut state, vec![Entry::Commit(good)])[0].is_ok());
}

/// A flush retires what it holds: the commits up to its own, of its vnodes. One of an earlier release named a counter.
#[test]
fn a_flush_retires_what_it_covers() {
    let (mut state, t, _) = table_and_view();
    let half = |byte: std::ops::Range<usize>| {
        let set: Vec<u8> = (0..32).map(|at| if byte.contains(&at) { 255 } else { 0 }).collect();
        Bytes::from(set)
    };
    let (low, high) = (half(0..16), half(16..32));
    let places = [(5, low.clone()), (6, high.clone())];
    for (counter, vnodes) in places {
        let mut old = commit(&state, t, 0, true, 1, true);
        old.slices[0].sequence = counter;
        old.slices[0].vnodes = vnodes;
        assert!(step(&mut state, vec![Entry::Commit(old)])[0].is_ok());
    }
    for vnodes in [low.clone(), high, Bytes::new()] {
        let mut new = commit(&state, t, 0, true, 1, true);
        new.slices[0].vnodes = vnodes;
        assert!(step(&mut state, vec![Entry::Commit(new)])[0].is_ok());
    }
    let mut flush = |generation, edit| {
        let entry = EditVersion { job: t.0, generation, edit, horizon: 0 };
        let verdict = step(&mut state, vec![Entry::EditVersion(entry)]).remove(0);
        let tail = &state.jobs[&t].version.tail;
        let left = tail.iter().map(|s| Sequence::stored(s.sequence).to_string());
        (verdict.map(|_| ()), left.collect::<Vec<_>>())
    };
    let all = ["5 (not numbered)", "6 (not numbered)", "3.0", "4.0", "5.0"].map(str::to_owned);
    let of = |commit, vnodes| VersionEdit {
        flushed: Some(Flushed { vnodes, ..flushed(commit) }),
        ..VersionEdit::default()
    };
    let everything = of(5, Bytes::new());
    assert_eq!(flush(9, everything.clone()), (Err(VoidReason::OtherGeneration), all.to_vec()));
    let no_set = of(5, Bytes::from_static(&[1]));
    assert_eq!(flush(0, no_set), (Err(VoidReason::Malformed), all.to_vec()));
    let counter = VersionEdit { flushed_sequence: 5, ..VersionEdit::default() };
    assert_eq!(flush(0, counter), (Ok(()), all[1..].to_vec()));
    assert_eq!(flush(0, of(5, low)).1, [&*all[1], &*all[3], &*all[4]]);
    assert_eq!(flush(0, of(4, Bytes::new())).1, [&*all[4]]);
    assert_eq!(flush(0, everything).1, [""; 0]);
}
