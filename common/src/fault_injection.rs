//! Planted bugs: faults that tests switch on to prove that the equivalence harness would notice
//! them (docs/design.md §14). Compiled to nothing in release builds.

use std::cell::Cell;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

/// All bugs that can be planted, with what they break.
pub const BUGS: &[(&str, &str)] = &[
    ("drop-retraction", "a join forgets every deletion on its left side"),
    ("count-pair-twice", "a join counts the pairs that its right side completes twice"),
    ("null-keys-match", "a join takes NULL keys to be equal"),
    ("lost-parked-row", "the last row parked behind a fetch is dropped"),
    (
        "stale-cache-fill",
        "an aggregate's evicted dirty group is refetched as it was before the epoch",
    ),
    ("minmax-never-retracts", "MIN and MAX keep a deleted extreme"),
    ("distinct-ignores-weight", "DISTINCT forgets a group with its first deletion"),
    ("topn-no-refill", "a top-N shows no successor for a row that leaves its window"),
    ("outer-null-row-stays", "an outer join keeps the NULL row after a match appears"),
    ("changes-skip-epoch", "a reader skips a relation's change when it falls back to the store"),
    ("tail-not-replayed", "recovery forgets the newest tail slice"),
    ("early-part-lost", "a commit forgets the first part of an epoch that was written early"),
    ("rows-under-one-key", "NOT IN stores rows as if its column told them apart"),
    ("set-aside-lost", "a piece of a keyed relation's change that is set aside is forgotten"),
    ("leaf-reads-uncommitted", "a leaf emits rows that are announced and not committed"),
];

/// Bugs in what is read ahead of rows. Only tests that send hints reach them: the operators' own.
pub const PREFETCH_BUGS: &[(&str, &str)] = &[
    (
        "stale-prefetch-kept",
        "an answer is taken in though the entry has changed since it was asked",
    ),
    ("hint-marks-resident", "a key that was announced counts as read"),
    ("prefetch-lost-at-barrier", "a key that is read ahead while a barrier passes has no state"),
    (
        "blind-write-during-prefetch-lost",
        "a row that is written while its key is read ahead is missing from the entry",
    ),
    ("read-before-raised-bound", "what was read before a bound was raised is taken in as it was"),
    ("due-entry-evicted-first", "entries that rows are expected for leave a cache before others"),
    (
        "evicted-dirty-entry-read",
        "an entry leaves with changes that are not written, and is read again",
    ),
];

/// Bugs in the rows of a source that are read ahead. Only tests whose source tells what is ahead reach them: those of
/// the executor's read-ahead.
pub const READ_AHEAD_BUGS: &[(&str, &str)] = &[
    (
        "bad-row-counted-twice",
        "a bad row counts when it is read ahead, and when its epoch takes it",
    ),
    ("position-of-the-reader", "the place that is committed is where the reader is"),
];

/// Bugs in how a worker takes in the record stream. Only tests whose stream loses and repeats records reach them.
pub const STREAM_BUGS: &[(&str, &str)] =
    &[("gap-overlooked", "records that were lost on the way are not asked for")];

/// Bugs in the protocol of a cluster. Only its simulation reaches them: that of `meta`, which plants them for its thread.
pub const CLUSTER_BUGS: &[(&str, &str)] = &[
    ("late-commit-taken", "the commit of a generation that is over is taken"),
    ("object-collected-early", "an object is collected that not all processes have dropped"),
    ("two-owners", "a job that is placed elsewhere keeps its generation"),
    ("acknowledged-unsettled", "a commit is acknowledged that its leader does not know of"),
    ("stale-lead-read", "a leader answers reads without a proof that it leads"),
    (
        "sequence-of-writer",
        "slices are numbered by what their writer has written, and not by their commit",
    ),
    ("adopted-without-parts", "a leader that takes a job over leaves what is sealed to nobody"),
    ("not-adopted", "a leader that takes over starts jobs that run"),
    ("scan-below-horizon", "a first scan reads an epoch whose versions may be dropped"),
];

static ANY: AtomicBool = AtomicBool::new(false);
static ACTIVE: Mutex<Option<&'static str>> = Mutex::new(None);

/// Switches one bug on, or all off.
pub fn plant(bug: Option<&'static str>) {
    if let Ok(mut active) = ACTIVE.lock() {
        *active = bug;
        ANY.store(bug.is_some(), Ordering::SeqCst);
    }
}

thread_local! {
    static HERE: Cell<Option<&'static str>> = const { Cell::new(None) };
}

/// Switches one bug on for what this thread does, or off. For tests that run on one thread, beside others.
pub fn plant_here(bug: Option<&'static str>) {
    HERE.set(bug);
}

/// Whether this bug is planted now. Always false in release builds.
#[inline]
pub fn is_planted(bug: &'static str) -> bool {
    cfg!(debug_assertions)
        && (HERE.get() == Some(bug) || ANY.load(Ordering::Relaxed) && active_is(bug))
}

#[cold]
fn active_is(bug: &'static str) -> bool {
    let lists = [BUGS, PREFETCH_BUGS, READ_AHEAD_BUGS, STREAM_BUGS, CLUSTER_BUGS];
    let listed = lists.iter().any(|list| list.iter().any(|(name, _)| *name == bug));
    debug_assert!(listed, "{bug} is not in a list");
    ACTIVE.lock().is_ok_and(|active| *active == Some(bug))
}

static PANIC: Mutex<Option<&'static str>> = Mutex::new(None);
static ANY_PANIC: AtomicBool = AtomicBool::new(false);

/// Makes statements that contain this text panic while they are parsed, or stops that: proves that a
/// panic ends one statement and not its connection or the server.
pub fn plant_panic(text: Option<&'static str>) {
    if let Ok(mut planted) = PANIC.lock() {
        *planted = text;
        ANY_PANIC.store(text.is_some(), Ordering::SeqCst);
    }
}

/// Panics if a panic is planted for this statement. Nothing in release builds.
#[inline]
pub fn panic_if_planted(sql: &str) {
    if cfg!(debug_assertions) && ANY_PANIC.load(Ordering::Relaxed) {
        let planted = PANIC.lock().ok().and_then(|p| *p);
        if planted.is_some_and(|text| sql.contains(text)) {
            panic!("a planted panic");
        }
    }
}
