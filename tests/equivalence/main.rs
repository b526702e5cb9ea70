//! The equivalence harness (docs/design.md §14): for generated queries and generated DML histories, at
//! every epoch, a view equals its own query run in batch.
//!
//! A case is a schema, ten views and a history. It runs in one of several modes (plain, tiny caches,
//! random store latency, crash and recovery, concurrent sessions); each check is one statement that reads the
//! view and its query at the same epoch. PostgreSQL judges the batch side at the end of each case.
//!
//! `MILLRACE_EQUIVALENCE_CASES` (histories of ten views; default 50) and `MILLRACE_EQUIVALENCE_SEED`
//! (first seed) lengthen or replay a run.

mod case;
mod generate;
mod node;
mod planted;
mod postgres;
mod rng;

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use case::{Case, Mode};

const DEFAULT_CASES: u64 = 50;
const VIEWS_A_CASE: usize = 10;

fn env_number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|v| v.parse().ok()).unwrap_or(default)
}

/// Planted bugs are global to the process, so the tests of this binary run one after another.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

#[test]
fn views_equal_their_queries() {
    let _alone = alone();
    let first = env_number("MILLRACE_EQUIVALENCE_SEED", 1);
    let cases = env_number("MILLRACE_EQUIVALENCE_CASES", DEFAULT_CASES);
    let mut coverage: BTreeMap<(&'static str, &'static str), usize> = BTreeMap::new();
    let mut pairs = 0;
    for seed in first..first + cases {
        let mode = Mode::ALL[seed as usize % Mode::ALL.len()];
        let case = Case::generate(seed, mode, VIEWS_A_CASE);
        match case.run(None) {
            Ok(report) => {
                pairs += report.views;
                for tag in report.tags {
                    *coverage.entry((tag, mode.name())).or_default() += 1;
                }
            }
            Err(failure) => panic!("seed {seed}, mode {}: {failure}", mode.name()),
        }
    }
    print_coverage(&coverage);
    println!("{pairs} (query, history) pairs, seeds {first}..{}", first + cases);
}

/// Operator × state path: how many views of each kind ran in each mode.
fn print_coverage(coverage: &BTreeMap<(&'static str, &'static str), usize>) {
    let mut tags: Vec<_> = coverage.keys().map(|k| k.0).collect();
    tags.dedup();
    print!("{:24}", "");
    for mode in Mode::ALL {
        print!("{:>14}", mode.name());
    }
    println!();
    for tag in tags {
        print!("{tag:24}");
        for mode in Mode::ALL {
            print!("{:>14}", coverage.get(&(tag, mode.name())).copied().unwrap_or(0));
        }
        println!();
    }
}
