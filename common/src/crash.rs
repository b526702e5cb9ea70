//! Named crash points (docs/design.md §14): before and after each durable step the process can be
//! made to die as by `kill -9`, so that a test can prove that nothing acknowledged is lost there.
//!
//! `MILLRACE_CRASH_POINT=name` aborts the process at the first pass, `name:n` at the n-th. Without
//! the variable a point costs one relaxed load.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// The registry. A point that code names but this list does not is a bug (checked in debug builds);
/// a point of this list that no run reaches fails the crash test.
pub const POINTS: &[&str] = &[
    // Taking the lead: the record of the new term.
    "meta-before-lead",
    "meta-after-lead",
    // A record of the log.
    "meta-before-append",
    "meta-after-append",
    // A snapshot of the folded log.
    "meta-before-snapshot",
    "meta-after-snapshot",
    // Older snapshots that it supersedes are deleted.
    "meta-after-superseded",
    // The record of a transaction over several tables.
    "meta-before-transaction",
    "meta-after-transaction",
    // A commit, between the log and the worker.
    "meta-before-conclude",
    "meta-after-conclude",
    // Deletion of garbage: planned, logged, done.
    "gc-before-log",
    "gc-after-log",
    "gc-after-delete",
    // Live data of sparse segments: copied, logged, told to the worker.
    "segments-before-log",
    "segments-after-log",
    "segments-after-move",
    // A compaction: written, logged, told to the worker.
    "compaction-before-commit",
    "compaction-after-commit",
    "compaction-after-apply",
    // A job that is detached, or rebuilt: logged; the difference made.
    "detach-before-log",
    "detach-after-log",
    "rebuild-before-log",
    "rebuild-after-log",
    "rebuild-before-swap",
    // A flush of memory runs: written, logged, applied.
    "flush-before-commit",
    "flush-after-commit",
    "flush-after-apply",
    // Objects: a tail segment, a segment of runs.
    "storage-before-tail-put",
    "storage-after-tail-put",
    "storage-before-run-put",
    "storage-after-run-put",
    // A load: all rows staged, none linked.
    "load-before-link",
    // An epoch in the worker: sealed, durable, committed, visible, acknowledged.
    "executor-before-persist",
    "executor-after-persist",
    "executor-before-publish",
    "executor-after-publish",
    "dml-before-acknowledge",
    // A sink: its change staged, brought to the target, and that logged.
    "sink-before-stage",
    "sink-after-stage",
    "sink-before-publish",
    "sink-after-publish",
    "sink-before-mark",
];

struct Armed {
    name: String,
    left: AtomicU64,
}

static ARMED: LazyLock<Option<Armed>> = LazyLock::new(|| {
    let text = std::env::var("MILLRACE_CRASH_POINT").ok()?;
    let (name, count) = match text.split_once(':') {
        Some((name, n)) => (name.to_string(), n.parse().unwrap_or(1)),
        None => (text, 1),
    };
    Some(Armed { name, left: AtomicU64::new(count) })
});

/// Passes a crash point: says so on standard error and ends the process at once if it is the armed one.
pub fn point(name: &'static str) {
    debug_assert!(POINTS.contains(&name), "crash point {name} is not in the registry");
    if let Some(armed) = &*ARMED
        && armed.name == name
        && armed.left.fetch_sub(1, Ordering::Relaxed) == 1
    {
        eprintln!("crash point {name}");
        std::process::abort();
    }
}
