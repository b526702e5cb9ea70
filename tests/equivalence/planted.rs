//! The harness must notice each planted bug; otherwise it proves nothing.

use std::ops::Range;

use millrace_common::fault_injection::BUGS;
use millrace_common::random_tests;

use crate::case::{Case, Mode};

/// Seeds tried for a bug before it counts as missed.
const SEEDS: Range<u64> = 10_000..10_300;

/// Seeds that noticed a bug when they were last looked for. The short form tries them first; the long form looks for
/// others, from the first.
const KNOWN: &[(&str, u64)] = &[
    ("minmax-never-retracts", 10_089),
    ("null-keys-match", 10_004),
    ("rows-under-one-key", 10_004),
];

#[test]
fn catches_every_planted_bug() {
    let _alone = crate::alone();
    let missed: Vec<&str> =
        BUGS.iter().map(|(name, _)| *name).filter(|name| chosen(name) && !caught(name)).collect();
    assert!(missed.is_empty(), "planted bugs that the harness did not notice: {missed:?}");
    let unknown = KNOWN.iter().filter(|(known, _)| !BUGS.iter().any(|(name, _)| name == known));
    assert_eq!(unknown.count(), 0, "a seed of a planted bug that there is not");
}

/// `MILLRACE_PLANTED`: only this one.
fn chosen(name: &str) -> bool {
    std::env::var("MILLRACE_PLANTED").map_or(true, |wanted| wanted == name)
}

fn caught(bug: &'static str) -> bool {
    let known = KNOWN.iter().filter(|(name, _)| *name == bug && !random_tests::is_long());
    for seed in known.map(|(_, seed)| *seed).chain(SEEDS) {
        let mode = match bug {
            "lost-parked-row" | "stale-cache-fill" | "topn-no-refill" | "early-part-lost"
            | "set-aside-lost" => [Mode::TinyCaches, Mode::SlowStore][seed as usize % 2],
            "rows-under-one-key" => Mode::Restart,
            "tail-not-replayed" | "changes-skip-epoch" => Mode::Crash,
            _ => Mode::Plain,
        };
        if let Err(difference) = Case::generate(seed, mode, 10).run(Some(bug)) {
            println!("{bug}: caught by seed {seed} ({})", difference.lines().next().unwrap_or(""));
            return true;
        }
    }
    false
}
