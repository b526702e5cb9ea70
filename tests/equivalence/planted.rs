//! The harness must notice each planted bug; otherwise it proves nothing.

use millrace_common::fault_injection::BUGS;

use crate::case::{Case, Mode};

/// Seeds tried for a bug before it counts as missed.
const SEEDS: u64 = 300;

#[test]
fn catches_every_planted_bug() {
    let _alone = crate::alone();
    let missed: Vec<&str> =
        BUGS.iter().map(|(name, _)| *name).filter(|name| chosen(name) && !caught(name)).collect();
    assert!(missed.is_empty(), "planted bugs that the harness did not notice: {missed:?}");
}

/// `MILLRACE_PLANTED`: only this one.
fn chosen(name: &str) -> bool {
    std::env::var("MILLRACE_PLANTED").map_or(true, |wanted| wanted == name)
}

fn caught(bug: &'static str) -> bool {
    for seed in 0..SEEDS {
        let mode = match bug {
            "lost-parked-row" | "stale-cache-fill" | "topn-no-refill" | "early-part-lost"
            | "set-aside-lost" => [Mode::TinyCaches, Mode::SlowStore][seed as usize % 2],
            "rows-under-one-key" => Mode::Restart,
            "tail-not-replayed" | "changes-skip-epoch" => Mode::Crash,
            _ => Mode::Plain,
        };
        if let Err(difference) = Case::generate(10_000 + seed, mode, 10).run(Some(bug)) {
            println!(
                "{bug}: caught by seed {} ({})",
                10_000 + seed,
                difference.lines().next().unwrap_or("")
            );
            return true;
        }
    }
    false
}
