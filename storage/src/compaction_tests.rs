use std::collections::BTreeSet;

use super::*;
use crate::read_counts::READ_BURST;

fn run(run_id: u64, level: u32, sequence: u64, keys: (&str, &str), length: u64) -> RunMeta {
    RunMeta {
        run_id,
        table_id: 1,
        level,
        sequence,
        length,
        min_key: keys.0.as_bytes().to_vec().into(),
        max_key: keys.1.as_bytes().to_vec().into(),
        ..RunMeta::default()
    }
}

fn ids(pick: &Pick) -> Vec<u64> {
    pick.inputs.iter().map(|r| r.run_id).collect()
}

fn levelled(runs: &[RunMeta]) -> Option<Pick> {
    pick(runs, &[], |_| AccessClass::PointUpdate, |_| TableReads::MANY, |_| false, |_| false)
}

#[test]
fn disjoint_runs_are_no_reason_to_do_anything() {
    let names = ["a", "b", "c", "d", "e", "f", "g", "h"];
    let runs: Vec<_> =
        names.iter().enumerate().map(|(i, k)| run(i as u64, 0, i as u64, (k, k), 100)).collect();
    assert_eq!(overlap(&runs), 1);
    assert_eq!(levelled(&runs), None);
}

/// Keys that ascend, and a flush after every few of them.
#[test]
fn many_small_runs_are_joined_however_little_they_overlap() {
    let key = |i: u64| format!("{i:04}");
    let level0 = |i: u64, length| run(i, 0, i, (&key(i), &key(i)), length);
    let small: Vec<_> = (100..116).map(|i| level0(i, 100)).collect();
    assert_eq!(levelled(&small[1..]), None, "too few");
    let large: Vec<_> = (100..116).map(|i| level0(i, SMALL_RUN_BYTES)).collect();
    assert_eq!(levelled(&large), None, "they are not small");
    let task = levelled(&small).unwrap();
    assert_eq!((task.inputs.len(), task.target_level, task.bottom), (16, 1, true));
    // What was joined before goes along until it is large; what lies apart and is large does not.
    let mut runs = small.clone();
    runs.push(run(1, 1, 9, (&key(50), &key(60)), 500));
    runs.push(run(2, 1, 8, (&key(10), &key(49)), SMALL_RUN_BYTES));
    assert_eq!(levelled(&runs).unwrap().inputs.len(), 17);
    assert!(levelled(&runs).unwrap().inputs.iter().all(|r| r.run_id != 2));
    // Much is rewritten for more of them only.
    runs.push(run(3, 1, 9, (&key(61), &key(200)), SMALL_RUN_BYTES));
    assert_eq!(levelled(&runs), None);
    runs.extend((116..132).map(|i| level0(i, 100)));
    assert_eq!(levelled(&runs).unwrap().inputs.len(), 32 + 2);
}

#[test]
fn touching_ends_overlap() {
    assert_eq!(overlap(&[run(1, 0, 1, ("a", "c"), 1), run(2, 0, 2, ("c", "d"), 1)]), 2);
}

#[test]
fn overlapping_runs_go_to_level_one_with_what_they_touch() {
    let mut runs: Vec<_> = (1..=4).map(|i| run(i, 0, 10 + i, ("c", "f"), 100)).collect();
    runs.push(run(5, 1, 3, ("a", "b"), 100));
    runs.push(run(6, 1, 3, ("e", "k"), 100));
    let task = levelled(&runs).unwrap();
    assert_eq!(ids(&task), vec![1, 2, 3, 4, 6]);
    assert_eq!(task.target_level, 1);
    assert!(task.bottom);
    runs.push(run(7, 2, 1, ("f", "g"), 100));
    assert!(!levelled(&runs).unwrap().bottom, "level 2 may hold older entries");
    assert_eq!(
        pick(
            &runs,
            &[],
            |_| AccessClass::PointUpdate,
            |_| TableReads::MANY,
            |_| false,
            |id| id == 3
        ),
        None,
        "an input is busy"
    );
    let slice = SliceRef { sequence: 12, ..SliceRef::default() };
    let held_back = pick(
        &runs,
        &[slice],
        |_| AccessClass::PointUpdate,
        |_| TableReads::MANY,
        |_| false,
        |_| false,
    );
    assert_eq!(held_back, None, "a slice of the tail lies between the inputs");
}

#[test]
fn few_small_runs_wait_before_much_is_rewritten_for_them() {
    let with = |n: u64| {
        let mut runs: Vec<_> = (1..=n).map(|i| run(i, 0, 10 + i, ("c", "f"), 100)).collect();
        runs.push(run(99, 1, 3, ("a", "k"), 10_000));
        levelled(&runs)
    };
    assert_eq!(with(L0_OVERLAP_LIMIT as u64 - 1), None);
    assert_eq!(
        with(L0_OVERLAP_LIMIT as u64).map(|task| task.inputs.len()),
        Some(L0_OVERLAP_LIMIT + 1)
    );
}

#[test]
fn a_level_that_outgrew_its_size_moves_the_cheapest_run_down() {
    let big = LEVEL1_BYTES / 2 + 1;
    let runs = [
        run(1, 1, 9, ("a", "b"), big),
        run(2, 1, 9, ("c", "d"), big),
        run(3, 2, 4, ("a", "b"), big),
    ];
    let task = levelled(&runs).unwrap();
    assert_eq!((ids(&task), task.target_level), (vec![2], 2));
}

#[test]
fn append_runs_are_joined_by_size_and_left_alone_when_large() {
    let class = |_| AccessClass::Append;
    let mut runs: Vec<_> = (1..=8).map(|i| run(i, 0, i, ("a", "z"), 1 << 20)).collect();
    runs.push(run(9, 1, 0, ("a", "z"), TIER_DONE_BYTES));
    let task = pick(&runs, &[], class, |_| TableReads::MANY, |_| false, |_| false).unwrap();
    assert_eq!(ids(&task), (1..=8).collect::<Vec<_>>());
    assert_eq!(pick(&runs[2..], &[], class, |_| TableReads::MANY, |_| false, |_| false), None);
}

#[test]
fn disjoint_runs_of_a_cleaned_table_are_merged_for_what_has_left() {
    let names = ["a", "b", "c", "d", "e", "f", "g", "h"];
    let level0 = |(i, k): (usize, &&str)| run(i as u64, 0, 10 + i as u64, (k, k), 100);
    let mut runs: Vec<_> = names.iter().enumerate().map(level0).collect();
    runs.push(run(20, 1, 3, ("x", "z"), 300));
    let class = |_| AccessClass::PointUpdate;
    let task = pick(&runs, &[], class, |_| TableReads::MANY, |_| true, |_| false).unwrap();
    assert_eq!(task.inputs.len(), 9, "a small level 1 goes along");
    assert!(task.bottom);
    runs[8].length = 1 << 20;
    assert_eq!(
        pick(&runs, &[], class, |_| TableReads::MANY, |_| true, |_| false).unwrap().inputs.len(),
        8
    );
    assert_eq!(
        pick(&runs[1..], &[], class, |_| TableReads::MANY, |_| true, |_| false),
        None,
        "too few"
    );
}

fn with_reads(runs: &[RunMeta], keys: u64, cold: u64) -> Option<Pick> {
    let reads = |_| TableReads { keys, cold };
    pick(runs, &[], |_| AccessClass::PointUpdate, reads, |_| false, |_| false)
}

/// Six small runs over a large level 1.
fn updated() -> Vec<RunMeta> {
    let mut runs: Vec<_> = (1..=6).map(|i| run(i, 0, 10 + i, ("c", "f"), 100 << 10)).collect();
    runs.push(run(99, 1, 3, ("a", "k"), 10 << 20));
    runs
}

#[test]
fn what_nobody_reads_is_not_rewritten_until_a_burst_comes() {
    let mut runs = updated();
    runs.extend((7..=12).map(|i| run(i, 0, 10 + i, ("c", "f"), 100 << 10)));
    let joined = with_reads(&runs, READ_BURST - 1, 0).unwrap();
    assert_eq!((joined.target_level, joined.inputs.len()), (0, 12), "level 1 stays as it is");
    assert!(!joined.bottom);
    let merged = with_reads(&runs, READ_BURST, 0).unwrap();
    assert_eq!((merged.target_level, merged.inputs.len()), (1, 13));
    assert!(merged.score > joined.score);
}

#[test]
fn reads_that_cost_as_much_as_a_merge_bring_it_about() {
    let all: u64 = updated().iter().map(|r| r.length).sum();
    let enough = all.div_ceil(6 * COLD_READ_BYTES);
    assert_eq!(with_reads(&updated(), READ_BURST, enough - 1), None);
    assert_eq!(with_reads(&updated(), enough, enough).unwrap().target_level, 1);
    assert_eq!(with_reads(&updated(), u64::MAX, 0), None, "memory has answered them");
}

#[test]
fn what_nobody_reads_is_merged_for_its_space_and_for_who_may_come() {
    let mut runs = updated();
    runs[6].length = bytes(&runs[..6].iter().collect::<Vec<_>>()) * 2 + 1;
    assert_eq!(with_reads(&runs, 0, 0), None, "six runs are few");
    runs[6].length -= 1;
    assert_eq!(with_reads(&runs, 0, 0).unwrap().target_level, 1, "half of it may be dead");
    // Large runs are not joined with each other.
    let deep = |n: u64| {
        let mut runs: Vec<_> =
            (1..=n).map(|i| run(i, 0, 10 + i, ("c", "f"), TIER_DONE_BYTES)).collect();
        runs.push(run(99, MAX_LEVEL, 3, ("a", "k"), 1 << 40));
        with_reads(&runs, 0, 0).map(|task| task.target_level)
    };
    assert_eq!(deep(UNREAD_OVERLAP as u64 - 1), None);
    assert_eq!(deep(UNREAD_OVERLAP as u64), Some(1));
}

/// Does what is picked, as if nothing were dead, with runs of at most `cut` bytes. Returns the bytes that were written.
fn settle(
    runs: &mut Vec<RunMeta>,
    next_id: &mut u64,
    cut: u64,
    pick: impl Fn(&[RunMeta]) -> Option<Pick>,
) -> u64 {
    let mut written = 0;
    let mut steps = 0;
    while let Some(task) = pick(runs) {
        steps += 1;
        assert!(steps < 100, "it is rewritten for ever: {task:?}");
        runs.retain(|r| task.inputs.iter().all(|i| i.run_id != r.run_id));
        let all: u64 = task.inputs.iter().map(|r| r.length).sum();
        let sequence = task.inputs.iter().map(|r| r.sequence).max().unwrap();
        for part in 0..all.div_ceil(cut) {
            *next_id += 1;
            let keys = (format!("{part:06}"), format!("{part:06}x"));
            let length = cut.min(all - part * cut);
            runs.push(run(*next_id, task.target_level, sequence, (&keys.0, &keys.1), length));
        }
        written += all;
    }
    written
}

/// Runs of a memory limit that allows small ones only: what one merge has written is one run to the next.
#[test]
fn joined_runs_are_not_joined_with_each_other_again() {
    let class = |_| AccessClass::Append;
    let append =
        |runs: &[RunMeta]| pick(runs, &[], class, |_| TableReads::MANY, |_| false, |_| false);
    let unread = |runs: &[RunMeta]| with_reads(runs, 0, 0);
    let picks: [&dyn Fn(&[RunMeta]) -> Option<Pick>; 2] = [&append, &unread];
    // Below the unread table lies much.
    let below = vec![run(0, MAX_LEVEL, 0, ("000000", "999999"), 1 << 40)];
    for (pick, mut runs) in picks.into_iter().zip([vec![], below]) {
        let (mut next_id, mut written) = (1, 0);
        for flush in 1..=200u64 {
            next_id += 1;
            // Sizes change, so that neighbours are not always of one class.
            let length = if flush % 2 == 0 { 5 << 20 } else { 500 << 10 };
            runs.push(run(next_id, 0, flush, ("000000", "999999"), length));
            written += settle(&mut runs, &mut next_id, 4 << 20, pick);
            let sequences: BTreeSet<u64> = runs.iter().map(|r| r.sequence).collect();
            assert!(sequences.len() <= 3 * MAX_INPUT_RUNS, "{} at flush {flush}", sequences.len());
        }
        let flushed = 100 * ((5 << 20) + (500 << 10));
        assert!(written <= 8 * flushed, "{written} bytes were written for {flushed}");
    }
}
