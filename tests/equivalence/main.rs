//! The equivalence harness (docs/design.md §14): for generated queries and generated DML histories, at
//! every epoch, a view equals its own query run in batch.
//!
//! A case is a schema, ten views and a history; in some a table is a source of files, or views have sinks. It runs in one of several modes (plain, tiny caches,
//! random store latency, crash and recovery, concurrent sessions, restarts without caches); each check is one statement that reads the
//! view and its query at the same epoch. PostgreSQL judges the batch side at the end of each case.
//!
//! `MILLRACE_EQUIVALENCE_CASES` (histories of ten views; default 50) and `MILLRACE_EQUIVALENCE_SEED`
//! (first seed) lengthen or replay a run; `MILLRACE_EQUIVALENCE_MODE` runs all cases in one mode.

mod bounded;
mod case;
mod correlated;
mod coverage;
mod event_time;
mod generate;
mod history;
mod idle;
mod lookup;
mod node;
mod outside;
mod planted;
mod postgres;
mod rng;
mod temporal;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use case::{Case, Mode};
use coverage::Coverage;

const DEFAULT_CASES: u64 = 50;
const VIEWS_A_CASE: usize = 10;

/// Cases that once found a bug; they always run.
const SEEDS: &[(u64, Mode)] = &[
    // A commit that left its view as it was stopped the view's frontier just below it.
    (6, Mode::Plain),
    // A global aggregate's row was evicted while it was awaited, and awaited again, for ever.
    (13, Mode::TinyCaches),
    // A reader that fell back to the store could not compare the old and the new row of a key with an array.
    (44, Mode::SlowStore),
];

fn env_number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|v| v.parse().ok()).unwrap_or(default)
}

/// Planted bugs are global to the process, so the tests of this binary run one after another.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs a case for each of the seeds that once found a bug, and of as many others as the variable says, each in the mode of
/// its turn.
fn each_case(
    variable: &str,
    default: u64,
    found: &[u64],
    modes: &[Mode],
    run: impl AsyncFn(Mode, u64) -> Result<(), String>,
) {
    let _alone = alone();
    let cases = env_number(variable, default);
    let first = env_number("MILLRACE_EQUIVALENCE_SEED", 1);
    for seed in found.iter().copied().chain(first..first + cases) {
        let mode = modes[seed as usize % modes.len()];
        let runtime = tokio::runtime::Runtime::new().expect("a runtime");
        if let Err(e) = runtime.block_on(run(mode, seed)) {
            panic!("seed {seed}, {mode:?}: {e}");
        }
    }
}

#[test]
fn views_equal_their_queries() {
    let _alone = alone();
    let first = env_number("MILLRACE_EQUIVALENCE_SEED", 1);
    let cases = env_number("MILLRACE_EQUIVALENCE_CASES", DEFAULT_CASES);
    let all = std::env::var("MILLRACE_EQUIVALENCE_SEED").is_err();
    let fixed = if all { SEEDS } else { &[] };
    let forced = forced_mode();
    let drawn = (first..first + cases).map(|s| (s, forced.unwrap_or_else(|| Mode::of_seed(s))));
    let restarts = (0..if all { restarts() } else { 0 }).map(|s| (s, Mode::Restart));
    let plan: Vec<(u64, Mode)> = fixed.iter().copied().chain(restarts).chain(drawn).collect();
    let outcome = run_all(&plan);
    outcome.coverage.print();
    println!(
        "{} (query, history) pairs, seeds {first}..{}, {} fixed seeds",
        outcome.pairs,
        first + cases,
        fixed.len()
    );
    assert!(
        outcome.failures.is_empty(),
        "{} of {} cases failed:\n{}",
        outcome.failures.len(),
        plan.len(),
        outcome.failures.join("\n")
    );
    if all {
        let missed = outcome.coverage.missed();
        assert!(missed.is_empty(), "no restart met these: {missed:?}");
    }
}

/// `MILLRACE_EQUIVALENCE_MODE`: the name of the mode that all cases run in.
fn forced_mode() -> Option<Mode> {
    let name = std::env::var("MILLRACE_EQUIVALENCE_MODE").ok()?;
    let mode = Mode::ALL.into_iter().find(|m| m.name() == name);
    Some(mode.unwrap_or_else(|| panic!("there is no mode {name}")))
}

/// Cases until every shape of view has been restarted.
fn restarts() -> u64 {
    generate::turns().div_ceil(VIEWS_A_CASE) as u64
}

#[derive(Default)]
struct Outcome {
    coverage: Coverage,
    pairs: usize,
    failures: Vec<String>,
}

/// Runs the cases on two threads; each is a node of its own.
fn run_all(plan: &[(u64, Mode)]) -> Outcome {
    let outcome = Mutex::new(Outcome::default());
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while let Some(&(seed, mode)) = plan.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let started = Instant::now();
                    let result = Case::generate(seed, mode, VIEWS_A_CASE).run(None);
                    let took = started.elapsed().as_millis();
                    let mut outcome = outcome.lock().unwrap_or_else(PoisonError::into_inner);
                    match result {
                        Ok(report) => {
                            println!("seed {seed} ({}): {took} ms", mode.name());
                            outcome.pairs += report.views;
                            outcome.coverage.add(mode, &report);
                        }
                        Err(failure) => {
                            let line = format!("seed {seed} ({}): {failure}", mode.name());
                            println!("FAILED {line}");
                            outcome.failures.push(line);
                        }
                    }
                }
            });
        }
    });
    outcome.into_inner().unwrap_or_else(PoisonError::into_inner)
}
