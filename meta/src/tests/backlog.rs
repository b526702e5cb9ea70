//! A job that is behind goes forward in steps of bounded bytes, each at an epoch at which all its inputs are exact,
//! and meets other jobs on the grid.

use std::sync::Arc;
use std::time::Duration;

use millrace_common::{Epoch, RelationId};
use millrace_rpc::catalog::{Relation, RelationKind};
use millrace_rpc::version::JobVersion;

use crate::backlog::StepLimit;
use crate::schedule::{Pace, Position, Step, Wants, next_step};
use crate::state::{JobRecord, MetaState};
use crate::timeline::Timeline;

const T: RelationId = RelationId(1);
const MINUTE_MS: u64 = 60_000;

fn ms(at: u64) -> Epoch {
    Epoch::from_millis(at)
}

/// A relation with these changes: how far the content before stays exact, from when on it is another, bytes.
fn add(
    state: &mut MetaState,
    id: RelationId,
    inputs: &[RelationId],
    changes: impl IntoIterator<Item = (Epoch, Epoch, u64)>,
) {
    let mut timeline = Timeline::since(Epoch(1));
    for (hi, lo, bytes) in changes {
        timeline.advance(hi, lo, Some(bytes));
    }
    let epoch = timeline.anchor().map_or(0, |e| e.0);
    let job = JobRecord {
        version: Arc::new(JobVersion { epoch, ..JobVersion::default() }),
        timeline,
        inputs: inputs.to_vec(),
        process: 0,
        by_operator: false,
        horizon: Epoch::ZERO,
        watermarks: Default::default(),
    };
    state.jobs.insert(id, job);
    let kind = if inputs.is_empty() { RelationKind::Table } else { RelationKind::MaterializedView };
    let relation = Relation { id: id.0, kind: kind as i32, ..Relation::default() };
    state.relations.insert(id, Arc::new(relation));
    state.rebuild_dependencies();
}

/// A table that has changed by so many bytes every 20 ms, up to the head.
fn busy_table(until_ms: u64, bytes: impl Fn(u64) -> u64) -> MetaState {
    let mut state = MetaState { epoch: ms(until_ms + 1), ..MetaState::default() };
    let changes = (1..=until_ms / 20).map(|n| (ms(n * 20).prev(), ms(n * 20), bytes(n)));
    add(&mut state, T, &[], changes);
    state
}

/// A view that has cut at these epochs, and was exact until its table changed.
fn view_at(state: &mut MetaState, id: RelationId, cuts: impl Iterator<Item = Epoch>, bytes: u64) {
    let mut previous = Epoch(1);
    let changes: Vec<_> = cuts
        .map(|cut| {
            let hi = state.stable_until(T, previous).min(cut.prev());
            previous = cut;
            (hi, cut, bytes)
        })
        .collect();
    add(state, id, &[T], changes);
}

fn pace(bytes: u64) -> Pace {
    let step = StepLimit { bytes, source_row_bytes: 1 };
    Pace { interval: Duration::from_millis(250), step }
}

/// Where a job at `own` cuts until nothing is left.
fn cuts(state: &MetaState, id: RelationId, own: Epoch, wants: &Wants, pace: &Pace) -> Vec<Epoch> {
    let mut at = own;
    let mut cuts = Vec::new();
    loop {
        let position = Position { epoch: at, backfill: None, due: None };
        match next_step(state, id, Some(position), wants, Duration::MAX, pace) {
            Step::Cut(next) => {
                assert!(next > at, "from {at} to {next}");
                let inputs = state.inputs(id);
                assert_eq!(state.readable_common(inputs, next), Some(next), "not exact");
                cuts.push(next);
                at = next;
            }
            _ => return cuts,
        }
        assert!(cuts.len() < 100_000, "no end");
    }
}

/// The bytes of each step, as estimated.
fn volumes(state: &MetaState, id: RelationId, own: Epoch, cuts: &[Epoch], pace: &Pace) -> Vec<u64> {
    let from = [own].into_iter().chain(cuts.iter().copied());
    let volume = |(a, b): (Epoch, &Epoch)| state.backlog(id, a, *b, &pace.step).bytes.unwrap();
    from.zip(cuts).map(volume).collect()
}

#[test]
fn a_job_is_behind_while_an_input_has_changes_that_it_lacks() {
    let mut state = busy_table(1_000, |_| 100);
    let head = state.epoch;
    let (behind, level) = (RelationId(2), RelationId(3));
    add(&mut state, behind, &[T], [(Epoch(5), Epoch(6), 1)]);
    add(&mut state, level, &[T], [(Epoch(5), head, 1)]);
    let all = [behind, level, T, RelationId(9)];
    assert_eq!(all.map(|id| state.is_behind(id)), [true, false, false, false]);
}

/// Whether nobody waits for it, or somebody for any or for just this epoch: no step is too large, and all is reached.
#[test]
fn a_backlog_is_taken_in_steps_of_bounded_bytes() {
    let mut state = busy_table(MINUTE_MS, |_| 100);
    let v = RelationId(2);
    add(&mut state, v, &[T], [(Epoch(5), Epoch(6), 1)]);
    let (pace, head) = (pace(1_050), state.epoch);
    let nobody = Wants::default();
    let reach = Wants { reach: vec![head], ..Wants::default() };
    let aligned = Wants { aligned: vec![ms(31_337), head], ..Wants::default() };
    for wants in [&nobody, &reach, &aligned] {
        let cuts = cuts(&state, v, Epoch(6), wants, &pace);
        let volumes = volumes(&state, v, Epoch(6), &cuts, &pace);
        assert!(volumes.iter().all(|bytes| (1..=1_050).contains(bytes)), "{volumes:?}");
        assert!((300..=450).contains(&cuts.len()), "{} steps", cuts.len());
        assert_eq!(cuts.last(), Some(&head));
        for exact in &wants.aligned {
            assert!(cuts.contains(exact), "never at {exact}");
        }
    }
    // It does not wait between steps, but before the last, which has nothing behind it.
    let step = |own| {
        let position = Position { epoch: own, backfill: None, due: None };
        next_step(&state, v, Some(position), &nobody, Duration::ZERO, &pace)
    };
    assert!(matches!(step(ms(30_000)), Step::Cut(_)));
    assert_eq!(step(ms(MINUTE_MS - 100)), Step::WaitFor(pace.interval));
}

#[test]
fn one_commit_is_never_divided_and_taken_alone() {
    let mut state = busy_table(1_000, |n| if n == 25 { 5_000 } else { 100 });
    let v = RelationId(2);
    add(&mut state, v, &[T], [(Epoch(5), Epoch(6), 1)]);
    let pace = pace(350);
    let cuts = cuts(&state, v, Epoch(6), &Wants::default(), &pace);
    let volumes = volumes(&state, v, Epoch(6), &cuts, &pace);
    assert_eq!(volumes.iter().filter(|bytes| **bytes > 350).collect::<Vec<_>>(), [&5_000]);
    assert!(cuts.contains(&ms(500)));
}

/// Views of different speed that are read together: each stops at every tenth second, however small its steps are.
#[test]
fn late_views_that_are_read_together_meet_on_the_grid() {
    let mut state = busy_table(MINUTE_MS, |n| n % 7 * 50);
    let (a, b, join) = (RelationId(2), RelationId(3), RelationId(4));
    for (id, from) in [(a, ms(10)), (b, ms(9_990))] {
        view_at(&mut state, id, [from].into_iter(), 1);
    }
    add(&mut state, join, &[a, b], [(Epoch(5), Epoch(6), 1)]);
    let wants = Wants::default();
    let of_a = cuts(&state, a, ms(10), &wants, &pace(700));
    let of_b = cuts(&state, b, ms(9_990), &wants, &pace(3_300));
    for at in (1..6).map(|tens| ms(tens * 10_000)) {
        assert!(of_a.contains(&at) && of_b.contains(&at), "they do not meet at {at}");
    }
    // The job that reads both gets along, step by step, where both are exact.
    view_at(&mut state, a, of_a.iter().copied(), 400);
    view_at(&mut state, b, of_b.iter().copied(), 900);
    add(&mut state, join, &[a, b], [(Epoch(5), Epoch(6), 1)]);
    let together = cuts(&state, join, Epoch(6), &wants, &pace(5_000));
    assert!(together.len() >= 6, "{} steps", together.len());
    assert_eq!(together.last().copied(), state.exact_common(&[a, b], state.epoch));
}

/// The timelines of the inputs have dropped most of what happened: what is left is gone through, and a table's bytes
/// are still bounded.
#[test]
fn a_job_that_was_away_for_hours_catches_up_in_steps() {
    let hours = 3 * 60 * MINUTE_MS;
    let mut state = busy_table(hours, |_| 1_000);
    let (v, w, u) = (RelationId(2), RelationId(3), RelationId(4));
    let grid = (1..=hours / 1_000).map(|s| ms(s * 1_000));
    view_at(&mut state, v, grid, 10_000);
    add(&mut state, w, &[v], [(Epoch(5), Epoch(6), 1)]);
    add(&mut state, u, &[T], [(Epoch(5), Epoch(6), 1)]);
    let pace = pace(110_000);
    let of_table = cuts(&state, u, ms(70_000), &Wants::default(), &pace);
    let volumes = volumes(&state, u, ms(70_000), &of_table, &pace);
    assert!(volumes.iter().all(|bytes| *bytes <= 110_000), "{}", volumes.iter().max().unwrap());
    // Fifty changes a second, at most a hundred and ten a step; the grid costs some.
    let least = hours as usize / 2_200 - 40;
    assert!((least..least * 2).contains(&of_table.len()), "{} steps", of_table.len());
    let of_view = cuts(&state, w, ms(70_000), &Wants::default(), &pace);
    assert!(of_view.len() > 400, "{} steps", of_view.len());
    assert_eq!(of_view.last(), Some(&ms(hours)));
}

/// A timeline of a release that did not count bytes: steps of ten seconds, as that release took them.
#[test]
fn where_bytes_are_unknown_a_step_is_bounded_in_time() {
    let mut state = busy_table(MINUTE_MS, |_| 100);
    let v = RelationId(2);
    add(&mut state, v, &[T], [(Epoch(5), Epoch(6), 1)]);
    let table = state.jobs.get_mut(&T).unwrap();
    let mut stored = table.timeline.to_snapshot();
    stored.volumes.clear();
    table.timeline = Timeline::from_snapshot(&stored);
    let aligned = Wants { aligned: vec![state.epoch], ..Wants::default() };
    for wants in [Wants::default(), aligned] {
        let cuts = cuts(&state, v, Epoch(6), &wants, &pace(1));
        assert!((1..6).all(|n| cuts.contains(&ms(n * 10_000))), "{cuts:?}");
        assert!(cuts.len() <= 7, "{} steps", cuts.len());
    }
}
