//! The equivalence harness (docs/design.md §14): for generated queries and generated DML histories, at
//! every epoch, a view equals its own query run in batch.
//!
//! A case is a schema, ten views and a history; in some a table is a source of files, or views have sinks. It runs in one of several modes (plain, tiny caches,
//! random store latency, crash and recovery, concurrent sessions, restarts without caches); each check is one statement that reads the
//! view and its query at the same epoch. PostgreSQL judges the batch side at the end of each case.
//!
//! `MILLRACE_LONG_TESTS=1` runs the long form of every test here. `MILLRACE_EQUIVALENCE_CASES` (histories of ten views)
//! and `MILLRACE_EQUIVALENCE_SEED` (first seed) set the cases or replay one; `MILLRACE_EQUIVALENCE_MODE` runs all cases in
//! one mode. The roles of every third node call each other through bytes; `MILLRACE_EQUIVALENCE_LOOPBACK=direct|encode` has
//! those of all.

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
use millrace::Loopback;
use millrace_common::random_tests;

/// Histories of the short and of the long form.
const CASES: [u32; 2] = [30, 300];
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

/// The number of cases: what the variable says, or that of the form that runs.
fn number_of_cases(variable: &str, [short, long]: [u32; 2]) -> u64 {
    env_number(variable, u64::from(random_tests::cases(short, long)))
}

fn env_number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|v| v.parse().ok()).unwrap_or(default)
}

/// Planted bugs are global to the process, so the tests of this binary run one after another.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs a case for each of the seeds that once found a bug, and of as many others as the variable or the form says, each in
/// the mode of its turn.
fn each_case(
    variable: &str,
    forms: [u32; 2],
    found: &[u64],
    modes: &[Mode],
    run: impl AsyncFn(Mode, u64) -> Result<(), String> + Sync,
) {
    let _alone = alone();
    let cases = number_of_cases(variable, forms);
    let first = env_number("MILLRACE_EQUIVALENCE_SEED", 1);
    let seeds: Vec<u64> = found.iter().copied().chain(first..first + cases).collect();
    let failures = Mutex::new(Vec::new());
    on_two_threads(&seeds, |&seed| {
        let mode = modes[seed as usize % modes.len()];
        let started = Instant::now();
        let runtime = tokio::runtime::Runtime::new().expect("a runtime");
        let result = runtime.block_on(run(mode, seed));
        let (name, way) = (mode.name(), way_of(seed));
        println!("seed {seed} ({name}, {way}): {} ms", started.elapsed().as_millis());
        if let Err(e) = result {
            let mut failures = failures.lock().unwrap_or_else(PoisonError::into_inner);
            failures.push(format!("seed {seed}, {mode:?}, {way}: {e}"));
        }
    });
    let failures = failures.into_inner().unwrap_or_else(PoisonError::into_inner);
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// How the roles of a case's node call each other.
fn way_of(seed: u64) -> &'static str {
    match node::loopback_of(seed) {
        Loopback::Direct => "by reference",
        Loopback::Encode => "through bytes",
    }
}

/// Runs cases two at a time, each a node of its own.
fn on_two_threads<T: Sync>(cases: &[T], run: impl Fn(&T) + Sync) {
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while let Some(case) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
                    run(case);
                }
            });
        }
    });
}

#[test]
fn views_equal_their_queries() {
    let _alone = alone();
    let first = env_number("MILLRACE_EQUIVALENCE_SEED", 1);
    let cases = number_of_cases("MILLRACE_EQUIVALENCE_CASES", CASES);
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
        let unsettled = outcome.coverage.never_settled();
        assert!(unsettled.is_empty(), "these settled nothing early: {unsettled:?}");
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

fn run_all(plan: &[(u64, Mode)]) -> Outcome {
    let outcome = Mutex::new(Outcome::default());
    on_two_threads(plan, |&(seed, mode)| {
        let started = Instant::now();
        let result = Case::generate(seed, mode, VIEWS_A_CASE).run(None);
        let took = started.elapsed().as_millis();
        let (name, way) = (mode.name(), way_of(seed));
        let mut outcome = outcome.lock().unwrap_or_else(PoisonError::into_inner);
        match result {
            Ok(report) => {
                println!("seed {seed} ({name}, {way}): {took} ms");
                outcome.pairs += report.views;
                outcome.coverage.add(mode, &report);
            }
            Err(failure) => {
                let line = format!("seed {seed} ({name}, {way}): {failure}");
                println!("FAILED {line}");
                outcome.failures.push(line);
            }
        }
    });
    outcome.into_inner().unwrap_or_else(PoisonError::into_inner)
}
