//! Reading ahead changes nothing but the time: rows, counters, late counts, watermarks and committed places are the same
//! with it and without, whatever is planned and comes out otherwise, through first scans, kills, errors (also where what a
//! bad row does is altered), backlogs, pauses of the source, new files and splits, floors and idle marks.

mod job;
mod outside;
mod story;

use std::collections::BTreeMap;

use millrace_common::fault_injection::{READ_AHEAD_BUGS, plant};
use millrace_common::{SqlState, random_tests};
use millrace_graph::lookahead::Place;
use millrace_rpc::log::{SplitMark, SplitMarkAt};

use self::job::{Leaf, Shown, tell};
use self::outside::{Outside, row_schema};
use self::story::{Story, plain};
use super::*;
use crate::lookahead::Due;
use crate::lookahead::keys_ahead::KeysAhead;
use crate::lookahead::uncommitted::{Following, Uncommitted};
use crate::memory::MemoryClass;
use crate::operators::tests::model::PLANTED;

const SPLITS: u32 = 3;
/// It may be found later than the others.
const LAST: u32 = SPLITS - 1;
const SOURCE: RelationId = RelationId(9);
/// Rows of a file.
const FILE: u64 = 40;

#[tokio::test(start_paused = true)]
async fn a_leaf_that_stands_still_holds_nothing_and_misses_nothing_when_it_goes_on() {
    let outside = Outside::new(&plain());
    let mut leaf = Leaf::start(&outside, &BTreeMap::new(), true, None);
    let mut rows = Vec::new();
    for epoch in 1..4 {
        outside.fix(epoch, false);
        rows.push(leaf.epoch(epoch, usize::MAX).await.unwrap());
        tokio::time::sleep(std::time::Duration::from_secs(1)).await;
        assert!(leaf.governor.used_by(MemoryClass::Ahead) > 0, "epoch {epoch}");
        tokio::time::sleep(std::time::Duration::from_secs(60)).await;
        assert_eq!(leaf.governor.used_by(MemoryClass::Ahead), 0, "epoch {epoch}");
    }
    let expected: Vec<_> =
        tell(&plain(), false).await.into_iter().map(|s| s.rows).take(3).collect();
    assert_eq!(rows, expected);
}

#[test]
fn bad_rows_that_are_held_count() {
    let bad = |n: u64| BadRow {
        place: "split 0".to_owned(),
        error: SqlError::new(SqlState::INVALID_TEXT_REPRESENTATION, format!("row {n} is bad")),
    };
    let batch = |count| RawBatch {
        rows: RecordBatch::new_empty(row_schema()),
        weights: None,
        after: 1,
        position: None,
        bad_rows: (0..count).map(bad).collect(),
        announced: None,
        keys: KeysAhead::default(),
    };
    let (none, many) = (batch(0).memory_size(), batch(8_192).memory_size());
    assert!(none > 0, "no batch is for nothing");
    assert!(many >= 8_192 * size_of::<BadRow>(), "{many} bytes");
}

/// The first story that is told otherwise by a job that reads ahead.
async fn difference(seeds: u32) -> Option<u64> {
    for seed in 0..u64::from(seeds) {
        let story = Story::random(seed);
        // Without reading ahead no bug of it can be.
        let (expected, got) = (tell(&story, false).await, tell(&story, true).await);
        if expected != got {
            return Some(seed);
        }
    }
    None
}

fn run<T>(test: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(test)
}

#[test]
fn reading_ahead_changes_no_row_no_counter_and_no_place() {
    let _unplanted = PLANTED.read();
    assert_eq!(run(difference(random_tests::cases(200, 5_000))), None);
    let whole: Vec<Shown> = run(tell(&Story::random(0), true));
    let last = &whole.last().unwrap().counters;
    let counted = |name: &str| last.iter().any(|(n, v)| n.starts_with(name) && *v > 0);
    assert!(counted("errors.total") && counted("late.") && counted("position."), "{last:?}");
}

/// Whatever is to change nothing happens in some story, and shows.
#[test]
fn stories_have_scans_new_splits_and_idle_ones() {
    let _unplanted = PLANTED.read();
    let stories: Vec<Story> = (0..50).map(Story::random).collect();
    assert!(stories.iter().any(|story| story.paused.contains(&true)));
    let is_backlog =
        |s: &Story| s.kills.iter().zip(&s.lags).any(|(kill, lag)| kill.is_some() && *lag > 0);
    assert!(stories.iter().any(is_backlog));
    let is_found_later = |s: &&Story| s.found > s.scan.unwrap_or(0) + 1;
    let (scans, others): (Vec<&Story>, Vec<&Story>) =
        stories.iter().partition(|story| story.scan.is_some());
    for of in [&scans, &others] {
        assert!(of.iter().any(is_found_later));
        assert!(of.iter().any(|story| story.marks.iter().any(|at| at.mark.idle)));
    }
    let mut steps = 0;
    let mut all_marks = Vec::new();
    for story in &stories {
        let shown = run(tell(story, true));
        let epochs = story.epochs.len() - 1 - story.scan.unwrap_or(0);
        steps = steps.max(shown.len() - epochs);
        all_marks.extend(shown.into_iter().map(|shown| shown.marks));
    }
    assert!(steps > 3, "no first scan has more than {steps} steps");
    let has_value = |marks: &WatermarkSet| marks.iter().any(|(_, value)| value.is_some());
    assert!(all_marks.iter().any(has_value));
}

#[test]
fn every_planted_bug_of_reading_ahead_is_noticed() {
    let _alone = PLANTED.write();
    for (bug, _) in READ_AHEAD_BUGS {
        plant(Some(bug));
        let found = run(difference(200));
        plant(None);
        assert!(found.is_some(), "{bug} was not noticed");
    }
}

/// What has been announced, and when it is due.
fn take_announced(following: &mut Following) -> Vec<(Vec<i64>, Due)> {
    let mut all = Vec::new();
    while let Some(Some(next)) = futures::FutureExt::now_or_never(following.next()) {
        assert_eq!(next.place, Place::Entry);
        let mut numbers: Vec<i64> = Vec::new();
        for rows in &next.rows {
            assert_eq!(rows.batch.num_columns(), 1, "as the leaf hands them out");
            numbers.extend(rows.batch.column(0).as_primitive::<Int64Type>().values());
        }
        all.push((numbers, next.due));
    }
    all
}

/// All that is read ahead has been.
async fn settle() {
    for _ in 0..500 {
        tokio::task::yield_now().await;
    }
}

/// Those that are `wanted`, in order.
fn numbers(told: &[(Vec<i64>, Due)], wanted: impl Fn(i64) -> bool) -> Vec<i64> {
    let mut all: Vec<i64> = told.iter().flat_map(|(rows, _)| rows.iter().copied()).collect();
    all.retain(|n| wanted(*n));
    all.sort_unstable();
    all
}

/// [`rows`] that are not bad.
fn good(splits: &[i64], from: i64, to: i64) -> Vec<i64> {
    rows(splits, from, to).into_iter().filter(|n| n % 1_000 % 7 != 3).collect()
}

#[tokio::test]
async fn rows_of_the_next_epoch_are_announced_before_it_and_are_due_with_it() {
    let outside = Outside::new(&plain());
    let uncommitted = Arc::new(Uncommitted::default());
    let mut following = uncommitted.follow(SOURCE, vec![Place::Entry]);
    let mut leaf = Leaf::start(&outside, &BTreeMap::new(), true, Some(Arc::clone(&uncommitted)));
    outside.fix(1, false);
    assert_eq!(leaf.epoch(1, usize::MAX).await.unwrap().len(), 9);
    // Epoch 2 is only planned; nobody has asked for its rows.
    settle().await;
    let mut told = take_announced(&mut following);
    told.retain(|(rows, _)| rows.iter().any(|n| n % 1_000 >= 5));
    let expected = rows(&[0, 1, 2], 5, 10);
    assert_eq!(
        numbers(&told, |_| true),
        expected,
        "late rows, too: which are late is not known yet"
    );
    assert!(leaf.governor.used_by(MemoryClass::Ahead) > 0);
    assert_eq!(leaf.errors.total(), 3, "bad rows of the first epoch");
    assert!(!told.iter().any(|(_, due)| due.has_passed(u64::MAX)), "not handed out");
    outside.fix(2, false);
    leaf.epoch(2, usize::MAX).await.unwrap();
    assert!(told.iter().all(|(_, due)| due.has_passed(2) && !due.has_passed(1)));
}

#[tokio::test]
async fn a_backlog_is_announced_before_the_first_epoch_after_a_restart() {
    let outside = Outside::new(&plain());
    outside.fix(3, false);
    let uncommitted = Arc::new(Uncommitted::default());
    let mut following = uncommitted.follow(SOURCE, vec![Place::Entry]);
    let (none, since) = (BTreeMap::new(), Epoch(1));
    let mut leaf = Leaf::resume(&outside, &none, since, None, true, Some(uncommitted));
    settle().await;
    let told = take_announced(&mut following);
    assert_eq!(numbers(&told, |_| true), good(&[0, 1, 2], 5, 20), "epoch 4 is planned");
    assert!(leaf.governor.used_by(MemoryClass::Ahead) > 0);
    assert_eq!(leaf.errors.total(), 0, "bad rows count when they are handed out");
    assert!(!told.iter().any(|(_, due)| due.has_passed(u64::MAX)), "not handed out");
    let mut alone = Leaf::resume(&outside, &none, since, None, false, None);
    for epoch in [2, 3] {
        let rows = leaf.epoch(epoch, usize::MAX).await.unwrap();
        assert_eq!(Some(rows), alone.epoch(epoch, usize::MAX).await);
    }
    assert_eq!(leaf.errors.total(), alone.errors.total());
    for (rows, due) in told {
        assert_eq!(due.has_passed(3), rows.iter().all(|n| n % 1_000 < 15), "{rows:?}");
    }
}

#[tokio::test]
async fn rows_of_a_split_that_is_found_are_announced_before_its_first_epoch() {
    let story = Story { found: 2, ..plain() };
    let outside = Outside::new(&story);
    let uncommitted = Arc::new(Uncommitted::default());
    let mut following = uncommitted.follow(SOURCE, vec![Place::Entry]);
    let mut leaf = Leaf::start(&outside, &BTreeMap::new(), true, Some(uncommitted));
    outside.fix(1, false);
    leaf.epoch(1, usize::MAX).await.unwrap();
    outside.fix(2, false);
    settle().await;
    let told = take_announced(&mut following);
    let last = i64::from(LAST);
    assert_eq!(numbers(&told, |n| n / 1_000 == last), good(&[last], 0, 15), "epoch 3 is planned");
    let rows = leaf.epoch(2, usize::MAX).await;
    assert_eq!(rows, tell(&story, false).await.into_iter().map(|s| s.rows).nth(1));
}

/// A leaf that has come to a split itself lends its reader after the first rows, and not after the last of the epoch.
#[tokio::test]
async fn rows_of_the_first_epoch_are_announced_while_those_before_them_are_processed() {
    let epochs = vec![[0; SPLITS as usize], [30; SPLITS as usize]];
    let outside = Outside::new(&Story { epochs, ..plain() });
    let uncommitted = Arc::new(Uncommitted::default());
    let mut following = uncommitted.follow(SOURCE, vec![Place::Entry]);
    let mut leaf = Leaf::start(&outside, &BTreeMap::new(), true, Some(uncommitted));
    outside.fix(1, false);
    let first = leaf.epoch(1, 1).await.unwrap();
    assert!(!first.is_empty() && first.iter().all(|n| *n < 4), "{first:?}");
    settle().await;
    let told = take_announced(&mut following);
    assert_eq!(numbers(&told, |n| n < 1_000), good(&[0], 4, 30));
}

/// Where the log's epochs end in a cut of several is nothing to its batches; behind the cut it is.
#[tokio::test]
async fn a_cut_of_many_epochs_of_the_source_is_read_ahead_in_whole_batches() {
    let outside = Outside::new(&plain());
    outside.fix(6, false);
    let uncommitted = Arc::new(Uncommitted::default());
    let mut following = uncommitted.follow(SOURCE, vec![Place::Entry]);
    let mut leaf = Leaf::start(&outside, &BTreeMap::new(), true, Some(uncommitted));
    let (prev, epoch) = (Epoch(0), Epoch(6));
    let cut = Barrier { prev, epoch, backfill: false, stage: 0, swap: false };
    let first = leaf.read(&cut, 1).await.unwrap();
    assert!(!first.is_empty() && first.iter().all(|n| *n < 4), "{first:?}");
    settle().await;
    let told = take_announced(&mut following).into_iter().map(|(rows, _)| rows);
    let of_first: Vec<Vec<i64>> = told.filter(|rows| rows.iter().any(|n| *n < 1_000)).collect();
    // Epoch 7 is planned.
    let batches = [4, 8, 12, 16, 20, 24, 28, 30, 34, 35];
    let expected: Vec<_> = batches.windows(2).map(|ends| good(&[0], ends[0], ends[1])).collect();
    assert_eq!(of_first, expected);
}

/// What is read ahead goes across none, or it would be of no use, and the split be opened again.
#[tokio::test]
async fn a_first_scan_is_read_ahead_from_floor_to_floor() {
    let mark = |split| SplitMark { split, idle: false, floor: Some(0) };
    let at = |split, n: u64| SplitMarkAt { epoch: 1, mark: mark(split), offset: n * 3 };
    let marks = (0..SPLITS).flat_map(|split| (1..20).map(move |n| at(split, n))).collect();
    let epochs = vec![[0; SPLITS as usize], [60; SPLITS as usize]];
    let outside = Outside::new(&Story { epochs, marks, scan: Some(1), ..plain() });
    outside.fix(1, false);
    let epoch = Epoch(1);
    let step = Barrier { prev: epoch, epoch, backfill: true, stage: 0, swap: false };
    let none = BTreeMap::new();
    let scan = BackfillState { snapshot_epoch: 1, ..BackfillState::default() };
    let mut shown = Vec::new();
    for is_ahead in [false, true] {
        outside.opened.lock().clear();
        let mut leaf = Leaf::resume(&outside, &none, Epoch::ZERO, Some(&scan), is_ahead, None);
        let (mut rows, mut is_held) = (Vec::new(), false);
        for _ in 0..10 {
            rows.push(leaf.read(&step, usize::MAX).await.unwrap());
            settle().await;
            is_held |= leaf.governor.used_by(MemoryClass::Ahead) > 0;
        }
        assert_eq!(is_held, is_ahead);
        let mut opened = outside.opened.lock().clone();
        opened.sort_unstable();
        assert_eq!(opened, [0, 1, 2]);
        shown.push(rows);
    }
    assert_eq!(shown[0], shown[1]);
    assert!(shown[0].last().is_some_and(|rows| rows.contains(&58)), "{shown:?}");
}

/// Once all splits stand at the end of what is planned, a change of the source is one question, whatever their number;
/// and without a change there is none.
#[tokio::test(start_paused = true)]
async fn meta_is_asked_once_for_all_splits_when_something_has_changed() {
    let outside = Outside::new(&plain());
    let mut leaf = Leaf::start(&outside, &BTreeMap::new(), true, None);
    outside.fix(1, false);
    leaf.epoch(1, usize::MAX).await.unwrap();
    // The clock goes on when nothing else does: what is planned has been read. It is not given back yet.
    let a_moment = std::time::Duration::from_millis(10);
    tokio::time::sleep(a_moment).await;
    outside.asked.lock().clear();
    tokio::time::sleep(a_moment).await;
    assert_eq!(*outside.asked.lock(), Vec::<Vec<u32>>::new());
    outside.fix(2, false);
    tokio::time::sleep(a_moment).await;
    assert!(leaf.governor.used_by(MemoryClass::Ahead) > 0);
    let mut first = outside.asked.lock()[0].clone();
    first.sort_unstable();
    assert_eq!(first, [0, 1, 2]);
}

#[tokio::test]
async fn nothing_is_read_beyond_what_is_planned_and_nothing_stays() {
    let outside = Outside::new(&plain());
    let uncommitted = Arc::new(Uncommitted::default());
    let mut following = uncommitted.follow(SOURCE, vec![Place::Entry]);
    let mut leaf = Leaf::start(&outside, &BTreeMap::new(), true, Some(Arc::clone(&uncommitted)));
    outside.fix(1, false);
    leaf.epoch(1, usize::MAX).await.unwrap();
    settle().await;
    let told = take_announced(&mut following);
    let last = told.iter().flat_map(|(rows, _)| rows).map(|n| n % 1_000).max();
    assert_eq!(last, Some(9), "epoch 3 is not planned");
    let governor = Arc::clone(&leaf.governor);
    let beside = leaf.beside.take().unwrap();
    drop(leaf);
    beside.await.unwrap();
    assert_eq!(governor.used_by(MemoryClass::Ahead), 0);
}
