//! When a job cuts, and where: a pure decision over the state (docs/design.md §4, barriers).
//!
//! A waiter cuts at once, and so does a full epoch of a source; otherwise data nobody waits for is cut `barrier_interval`
//! after the last cut.
//! Waiters that need several views at one epoch name that epoch, and the views cut exactly there.
//! A late job, and one whose readers combine several views, cuts on the grid. A job that has more before it than one
//! step may take in goes forward in several, each of them committed, however it is waited for.

use std::time::Duration;

use millrace_common::{Epoch, RelationId};
use millrace_rpc::catalog::RelationKind;
use millrace_rpc::version::{BackfillState, JobCommit, JobVersion};

use crate::backlog::{Backlog, StepLimit};
use crate::exactness::{LONGEST_STEP, coarsest_grid_point};
use crate::state::{JobRecord, MetaState, is_derived};

/// What others want of a job now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wants {
    /// Somebody asked for the open epoch to end (DML of a table).
    pub cut: bool,
    /// Somebody waits for its next change, and for each after that.
    pub followed: bool,
    /// Epochs at which the relation must be exact, ascending: several views are read there together.
    pub aligned: Vec<Epoch>,
    /// Epochs that the relation must reach; any later one does.
    pub reach: Vec<Epoch>,
    /// A source that it reads has fixed as much as it works off in an epoch.
    pub input_is_full: bool,
}

/// Where a job's last cut was: of the newest commit in flight, or of its version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position {
    pub epoch: Epoch,
    /// The snapshot epoch of a backfill that goes on (`ZERO`: not fixed yet).
    pub backfill: Option<Epoch>,
    /// When the content changes by itself.
    pub due: Option<Epoch>,
}

impl Position {
    fn new(epoch: u64, backfill: Option<&BackfillState>, due: u64) -> Position {
        let backfill = backfill.map(|b| Epoch(b.snapshot_epoch));
        Position { epoch: Epoch(epoch), backfill, due: (due > 0).then_some(Epoch(due)) }
    }

    pub fn of_version(version: &JobVersion) -> Position {
        Position::new(version.epoch, version.backfill.as_ref(), version.due)
    }

    pub fn of_commit(commit: &JobCommit) -> Position {
        Position::new(commit.epoch, commit.backfill.as_ref(), commit.due)
    }
}

/// How often a job cuts, and how much it takes in at a time.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// How long data that nobody waits for may stay uncut.
    pub interval: Duration,
    pub step: StepLimit,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Nothing to do until something changes.
    Wait,
    /// The same, or until this time has passed.
    WaitFor(Duration),
    /// End the epoch here (`ZERO`: the log assigns it).
    Cut(Epoch),
    /// The snapshot epoch can be fixed now.
    StartBackfill,
    /// An input has no content yet.
    AwaitInputs,
}

/// The next step of a job whose last cut began `since_cut` ago, at `cut`; `None`: it is committed.
pub fn next_step(
    state: &MetaState,
    id: RelationId,
    cut: Option<Position>,
    wants: &Wants,
    since_cut: Duration,
    pace: &Pace,
) -> Step {
    let Some(job) = state.jobs.get(&id) else { return Step::Wait };
    if job.version.detached.is_some() {
        return Step::Wait;
    }
    let position = cut.unwrap_or_else(|| Position::of_version(&job.version));
    if !state.relations.get(&id).is_some_and(|r| is_derived(r)) {
        return if wants.cut { Step::Cut(Epoch::ZERO) } else { Step::Wait };
    }
    if let Some(snapshot) = position.backfill {
        return match snapshot {
            Epoch::ZERO if can_begin(state, job) => Step::StartBackfill,
            Epoch::ZERO => Step::AwaitInputs,
            epoch if is_readable(state, &job.inputs, epoch) => Step::Cut(epoch),
            _ => Step::Wait,
        };
    }
    let own = position.epoch;
    let unmet =
        |target: &&Epoch| **target > own && state.exact_at_most(id, **target) != Some(**target);
    // An epoch that the inputs have skipped cannot be met any more, only passed.
    let inputs_at = state.exact_common(&job.inputs, Epoch::MAX);
    let possible = |target: &&Epoch| {
        inputs_at.is_none_or(|at| at < **target)
            || state.exact_common(&job.inputs, **target) == Some(**target)
    };
    let aligned = wants.aligned.iter().find(|t| unmet(t) && possible(t)).copied();
    let limit = aligned.unwrap_or(Epoch::MAX);
    let Some(newest) = state.readable_common(&job.inputs, limit) else { return Step::Wait };
    let due = position.due.is_some_and(|due| due <= newest);
    if newest <= own || !(due || state.inputs_changed(id, own, newest)) {
        return Step::Wait;
    }
    let backlog = state.backlog(id, own, newest, &pace.step);
    // Too much for one step, as far as that is known.
    let over = match backlog.bytes {
        Some(bytes) => bytes > pace.step.bytes,
        None => backlog.late >= LONGEST_STEP,
    };
    if aligned == Some(newest) && !over {
        return Step::Cut(newest);
    }
    let targets = wants.reach.iter().chain(&wants.aligned);
    let asked = wants.cut || wants.followed || targets.into_iter().any(|t| unmet(&t));
    // Who is behind does not wait between steps.
    let behind = over
        || backlog.late >= LONGEST_STEP.max(pace.interval)
        || wants.input_is_full && may_hurry(state, id);
    if !asked && !behind && since_cut < pace.interval {
        return Step::WaitFor(pace.interval - since_cut);
    }
    let goal = choose(state, id, newest, &backlog, pace.interval);
    Step::Cut(within_step(state, id, own, goal, &backlog, pace))
}

/// Whether the inputs have a snapshot for the job: of a rebuild, one after the content that it replaces.
fn can_begin(state: &MetaState, job: &JobRecord) -> bool {
    let common = state.readable_common(&job.inputs, Epoch::MAX);
    common.is_some_and(|epoch| epoch.0 > job.version.content_epoch)
        && state.detached_behind(&job.inputs).is_none()
        && !state.is_rebuilding_behind(&job.inputs)
}

/// Whether a job cuts when its source has filled an epoch: the source waits for its readers, so they would stand idle
/// for the rest of the interval. Sinks keep the interval that they were given, and views that others combine meet
/// on the grid.
fn may_hurry(state: &MetaState, id: RelationId) -> bool {
    let is_sink = state.relations.get(&id).is_some_and(|r| r.kind() == RelationKind::Sink);
    !is_sink && !state.dependencies.feeds_combination(id)
}

/// The epoch to cut at by time and the grid alone, in `(quiet, newest]`.
fn choose(
    state: &MetaState,
    id: RelationId,
    newest: Epoch,
    backlog: &Backlog,
    interval: Duration,
) -> Epoch {
    let inputs = state.inputs(id);
    // Nothing happened up to here: the grid matters only from here on.
    let quiet = backlog.quiet;
    let combined = state.dependencies.feeds_combination(id);
    if backlog.late < Duration::from_secs(1) && !combined {
        return newest;
    }
    // Nobody reads a sink, so that its bytes alone bound what it takes in with one of its longer intervals.
    let is_sink = state.relations.get(&id).is_some_and(|r| r.kind() == RelationKind::Sink);
    let longest = if is_sink { LONGEST_STEP.max(interval) } else { LONGEST_STEP };
    let step_end = Epoch::from_millis(quiet.millis() + longest.as_millis() as u64);
    let upto = newest.min(step_end.max(quiet.next(0)));
    let on_grid = coarsest_grid_point(quiet, upto, combined.then_some(interval));
    on_grid
        .filter(|e| state.readable_common(inputs, *e) == Some(*e))
        .or_else(|| state.readable_common(inputs, upto).filter(|e| *e > quiet))
        // The inputs' timelines have dropped all epochs up to there.
        .unwrap_or_else(|| nearest(state, inputs, quiet, newest))
}

/// `goal`, or an epoch before it where the job would take in too much otherwise. A point of the grid before the goal is
/// never passed, so jobs that meet on the grid still do. One commit of an input cannot be divided: if the nearest epoch
/// is too far already, that one.
fn within_step(
    state: &MetaState,
    id: RelationId,
    own: Epoch,
    goal: Epoch,
    backlog: &Backlog,
    pace: &Pace,
) -> Epoch {
    let furthest = state.furthest_within(id, own, goal, &pace.step);
    if furthest >= goal {
        return goal;
    }
    let inputs = state.inputs(id);
    let Some(exact) = state.readable_common(inputs, furthest).filter(|e| *e > backlog.quiet) else {
        return nearest(state, inputs, backlog.quiet, goal);
    };
    let finest = state.dependencies.feeds_combination(id).then_some(pace.interval);
    let on_grid = coarsest_grid_point(backlog.quiet, exact, finest);
    on_grid.filter(|e| state.readable_common(inputs, *e) == Some(*e)).unwrap_or(exact)
}

/// The oldest epoch after `quiet` at which all inputs are exact; `limit` is one.
fn nearest(state: &MetaState, inputs: &[RelationId], quiet: Epoch, limit: Epoch) -> Epoch {
    state.next_exact_common(inputs, quiet).map_or(limit, |e| e.min(limit))
}

/// Whether the inputs' snapshots at this epoch are there. That they are exact was settled when it was
/// chosen.
fn is_readable(state: &MetaState, inputs: &[RelationId], epoch: Epoch) -> bool {
    inputs.iter().all(|i| state.oldest_unpublished(*i).is_none_or(|e| e > epoch))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use millrace_rpc::catalog::Relation;
    use millrace_rpc::version::JobVersion;

    use super::*;
    use crate::timeline::Timeline;

    fn add(
        state: &mut MetaState,
        id: u32,
        kind: RelationKind,
        inputs: &[u32],
        changes: &[(u64, u64)],
    ) {
        let mut timeline = Timeline::since(Epoch(1));
        for (hi, lo) in changes {
            timeline.advance(Epoch(*hi), Epoch(*lo), Some(1));
        }
        let epoch = changes.last().map_or(1, |c| c.1);
        let version = JobVersion { epoch, ..JobVersion::default() };
        let inputs = inputs.iter().copied().map(RelationId).collect();
        let version = Arc::new(version);
        let job = JobRecord {
            version,
            timeline,
            inputs,
            process: 0,
            by_operator: false,
            horizon: Epoch::ZERO,
            watermarks: Default::default(),
        };
        state.jobs.insert(RelationId(id), job);
        let relation = Relation { id, kind: kind as i32, ..Relation::default() };
        state.relations.insert(RelationId(id), Arc::new(relation));
        state.rebuild_dependencies();
    }

    /// A view that has cut past an epoch will never be exact there: what reads it goes on.
    #[test]
    fn an_epoch_that_an_input_has_skipped_is_passed() {
        let mut state = MetaState { epoch: Epoch(40), ..MetaState::default() };
        add(&mut state, 1, RelationKind::Table, &[], &[(9, 10), (19, 20), (29, 30)]);
        add(&mut state, 2, RelationKind::MaterializedView, &[1], &[(9, 10), (19, 30)]);
        add(&mut state, 3, RelationKind::Sink, &[2], &[(9, 10)]);
        let wants = Wants { aligned: vec![Epoch(20)], ..Wants::default() };
        let step = |state: &MetaState, wants: &Wants| {
            let pace = Pace { interval: Duration::from_secs(1), step: StepLimit::NONE };
            next_step(state, RelationId(3), None, wants, Duration::ZERO, &pace)
        };
        assert_eq!(step(&state, &wants), Step::Cut(Epoch(40)));
        // Where the view has not come that far yet, it is waited for.
        let mut behind = MetaState { epoch: Epoch(40), ..MetaState::default() };
        add(&mut behind, 1, RelationKind::Table, &[], &[(9, 10), (19, 20), (29, 30)]);
        add(&mut behind, 2, RelationKind::MaterializedView, &[1], &[(9, 10)]);
        add(&mut behind, 3, RelationKind::Sink, &[2], &[(9, 10)]);
        assert_eq!(step(&behind, &wants), Step::Wait);
    }

    /// A source goes no further than its readers, so with full epochs they would stand idle until the interval is over.
    #[test]
    fn a_full_epoch_of_a_source_is_cut_at_once() {
        let mut state = MetaState { epoch: Epoch(20), ..MetaState::default() };
        add(&mut state, 1, RelationKind::Table, &[], &[(9, 10), (19, 20)]);
        add(&mut state, 2, RelationKind::MaterializedView, &[1], &[(9, 10)]);
        add(&mut state, 3, RelationKind::Sink, &[1], &[(9, 10)]);
        let pace = Pace { interval: Duration::from_secs(1), step: StepLimit::NONE };
        let step = |id, full| {
            let wants = Wants { input_is_full: full, ..Wants::default() };
            next_step(&state, RelationId(id), None, &wants, Duration::ZERO, &pace)
        };
        assert_eq!(step(2, true), Step::Cut(Epoch(20)));
        assert_eq!(step(2, false), Step::WaitFor(pace.interval));
        assert_eq!(step(3, true), Step::WaitFor(pace.interval), "a sink keeps its interval");
    }

    /// Its table changes every second. What a sink has missed by more than its interval comes in steps of about the
    /// interval's length, so that the sink gets ahead of it; a view's are of ten seconds, where late jobs meet.
    #[test]
    fn a_late_sink_takes_in_an_interval_at_a_time() {
        const MINUTE: u64 = 60_000;
        let at = |ms: u64| Epoch::from_millis(ms).0;
        let changes: Vec<(u64, u64)> =
            (1..=600).map(|s| (at(MINUTE + s * 1_000) - 1, at(MINUTE + s * 1_000))).collect();
        let newest = Epoch::from_millis(11 * MINUTE);
        let mut state = MetaState { epoch: newest, ..MetaState::default() };
        add(&mut state, 1, RelationKind::Table, &[], &changes);
        add(&mut state, 2, RelationKind::Sink, &[1], &[(at(MINUTE) - 1, at(MINUTE))]);
        add(&mut state, 3, RelationKind::MaterializedView, &[1], &[(at(MINUTE) - 1, at(MINUTE))]);
        let pace = Pace { interval: Duration::from_millis(MINUTE), step: StepLimit::NONE };
        let lag = |id| {
            let step =
                next_step(&state, RelationId(id), None, &Wants::default(), pace.interval, &pace);
            let Step::Cut(epoch) = step else { panic!("{step:?}") };
            epoch.millis() - MINUTE
        };
        let (sink, view) = (lag(2), lag(3));
        assert!((MINUTE / 2..=MINUTE + 1_000).contains(&sink), "{sink} ms");
        assert!((1..=11_000).contains(&view), "{view} ms");
    }
}
