//! Bugs planted in the protocol: each must be noticed within a few seeds, or the simulation proves nothing.

use millrace_common::fault_injection::CLUSTER_BUGS;

use super::run;

/// Seeds tried for a bug before it counts as missed.
const SEEDS: u64 = 60;

/// Tries seeds from the first on until a run with this bug breaks a promise in one of these words. Runs suffer more of the
/// harm that brings the bug out.
fn is_noticed(bug: &'static str, first: u64, words: &[&str]) {
    let (_, what) = CLUSTER_BUGS.iter().find(|(name, _)| *name == bug).unwrap();
    let mut others = Vec::new();
    let noticed = (first..first + SEEDS).find(|seed| {
        let Some(broken) = run(*seed, Some(bug)).broken else { return false };
        let is_it = words.iter().any(|text| broken.promise.contains(text));
        if !is_it {
            others.push((*seed, broken.promise));
        }
        is_it
    });
    assert!(noticed.is_some(), "{bug} ({what}) is not noticed; but {others:?}");
    println!("{bug}: noticed by seed {noticed:?}; others {others:?}");
}

#[test]
fn a_late_commit_that_is_taken_is_noticed() {
    is_noticed("late-commit-taken", 0, &["is committed twice", "is taken that process"]);
}

#[test]
fn an_object_that_is_collected_early_is_noticed() {
    is_noticed("object-collected-early", 0, &["is collected"]);
}

#[test]
fn a_job_with_two_owners_is_noticed() {
    is_noticed("two-owners", 0, &["has two owners", "is taken that process"]);
}

#[test]
fn a_read_of_a_leader_that_is_deposed_is_noticed() {
    is_noticed("stale-lead-read", 0, &["a fresh read misses"]);
}

#[test]
fn a_commit_that_is_acknowledged_before_leaders_have_it_is_noticed() {
    // One seed in some eighty: the first ones would only take time.
    is_noticed("acknowledged-unsettled", 30, &["a fresh read misses"]);
}

#[test]
fn slices_that_are_numbered_by_their_writer_are_noticed() {
    is_noticed("sequence-of-writer", 0, &["differs from its query"]);
}

#[test]
fn a_leader_that_loses_what_was_sealed_before_it_is_noticed() {
    is_noticed("adopted-without-parts", 0, &["only leaders were harmed"]);
}

#[test]
fn a_leader_that_starts_what_runs_is_noticed() {
    is_noticed("not-adopted", 0, &["only leaders were harmed"]);
}

#[test]
fn a_first_scan_of_what_may_be_dropped_is_noticed() {
    is_noticed("scan-below-horizon", 0, &["scans them at"]);
}
