//! Announced keys are collected and read together; what is collected is not asked for when its row comes first.

// The lock keeps planted bugs of other tests away while a test runs, each on a runtime of its own.
#![allow(clippy::await_holding_lock)]

use std::time::Duration;

use millrace_common::Epoch;
use millrace_rpc::catalog::RowStorage;

use super::fake::FakeTable;
use super::keyed::{Counter, counts_batch, rows};
use super::model::PLANTED;
use crate::lookahead::Due;
use crate::options::ExecOptions;
use crate::state::collected::MAX_KEYS;
use crate::stats::LookaheadStats;

const MS: Duration = Duration::from_millis(1);

/// Collects for one millisecond, over a table whose reads complete when the test says so.
struct Run {
    table: FakeTable,
    counter: Counter,
    due: Due,
}

impl Run {
    fn new() -> Run {
        let table = FakeTable::held(counts_batch(Vec::new()).schema(), RowStorage::Keyed);
        let counter = Counter::collecting(&table, ExecOptions::default());
        Run { table, counter, due: Due::default() }
    }

    fn hint(&mut self, key: i64) {
        self.counter.hint_due(&[key], &self.due);
        self.counter.turn();
    }

    /// The row of a key comes, and is run.
    fn row(&mut self, key: i64) {
        self.counter.push(rows([(key, key)].into_iter()));
        while self.table.answer_one(false, false) {
            self.counter.turn();
        }
    }

    async fn after(&mut self, time: Duration) {
        tokio::time::advance(time).await;
        self.counter.turn();
    }

    /// Lets a read ahead complete.
    fn answer(&mut self) {
        assert!(self.table.answer_one(true, false), "nothing is read ahead");
        self.counter.turn();
        self.counter.state.check_invariants().unwrap();
    }

    fn rounds(&self) -> usize {
        *self.table.rounds.lock()
    }

    fn counted(&self) -> LookaheadStats {
        self.counter.metrics.lookahead.read()
    }
}

#[tokio::test(start_paused = true)]
async fn keys_of_many_hints_are_read_together_after_a_while() {
    let _unplanted = PLANTED.read();
    let mut run = Run::new();
    (0..50).for_each(|key| run.hint(key));
    assert_eq!(run.rounds(), 0);
    assert!(run.counter.state.is_prefetching() && run.counter.state.is_settled());
    // Nobody but the clock wakes it.
    let asked = tokio::time::timeout(10 * MS, run.counter.state.completed());
    asked.await.expect("it is woken").unwrap();
    assert_eq!(run.rounds(), 1);
    run.answer();
    (0..50).for_each(|key| run.row(key));
    assert_eq!((run.counter.ran.len(), run.counted().in_time, run.rounds()), (50, 50, 1));
}

#[tokio::test(start_paused = true)]
async fn keys_wait_for_a_read_that_is_under_way_and_for_no_seal() {
    let _unplanted = PLANTED.read();
    let mut run = Run::new();
    run.hint(1);
    run.after(MS).await;
    tokio::time::advance(5 * MS).await;
    run.answer();
    // The next read is expected to take as long.
    run.hint(2);
    run.after(MS).await;
    assert_eq!(run.rounds(), 2);
    run.hint(3);
    run.after(2 * MS).await;
    run.hint(4);
    assert_eq!(run.rounds(), 2, "a read is under way");
    run.answer();
    assert_eq!(run.rounds(), 3);
    run.hint(5);
    assert_eq!(run.rounds(), 3);
    run.due.seal(None);
    run.counter.turn();
    assert_eq!(run.rounds(), 4, "the rows are near");
    run.hint(6);
    assert_eq!(run.rounds(), 5);
}

#[tokio::test(start_paused = true)]
async fn the_seal_of_an_epoch_wakes_the_task() {
    let _unplanted = PLANTED.read();
    let mut run = Run::new();
    run.hint(1);
    run.after(MS).await;
    run.hint(2);
    let due = run.due.clone();
    let seal = async {
        tokio::task::yield_now().await;
        due.seal(None);
    };
    let asked = tokio::time::timeout(MS / 2, run.counter.state.completed());
    let (asked, ()) = tokio::join!(asked, seal);
    asked.expect("it is woken").unwrap();
    assert_eq!(run.rounds(), 2);
}

#[tokio::test(start_paused = true)]
async fn as_many_keys_as_are_read_together_wait_for_nothing() {
    let _unplanted = PLANTED.read();
    let mut run = Run::new();
    let keys: Vec<i64> = (0..MAX_KEYS as i64).collect();
    run.counter.hint_due(&keys[1..], &run.due);
    assert_eq!(run.rounds(), 0);
    run.counter.hint_due(&keys[..1], &run.due);
    assert_eq!(run.rounds(), 1);
}

/// A row asks for itself. What it has announced fetches nothing.
#[tokio::test(start_paused = true)]
async fn what_comes_before_its_key_is_asked_for_is_read_once() {
    let _unplanted = PLANTED.read();
    let mut run = Run::new();
    run.hint(1);
    run.row(1);
    run.after(MS).await;
    run.hint(1);
    run.after(MS).await;
    assert_eq!((run.rounds(), run.counter.ran.len()), (1, 1));
    let LookaheadStats { prefetched, dropped, late, missed, .. } = run.counted();
    assert_eq!((prefetched, dropped, late, missed), (0, 1, 0, 1));
}

/// An entry leaves while its key is to be asked for, and another key gets its slot: each key is asked for once.
#[tokio::test(start_paused = true)]
async fn a_slot_that_is_collected_twice_is_read_once() {
    let _unplanted = PLANTED.read();
    let mut run = Run::new();
    run.hint(1);
    let slots: Vec<_> = run.counter.state.keys.slots().collect();
    slots.into_iter().for_each(|slot| run.counter.state.remove(slot));
    run.hint(2);
    run.hint(1);
    run.after(MS).await;
    assert_eq!((run.rounds(), run.counted().prefetched), (1, 2));
    run.answer();
    run.row(1);
    run.row(2);
    assert_eq!((run.rounds(), run.counted().in_time), (1, 2));
}

#[tokio::test(start_paused = true)]
async fn keys_of_an_epoch_that_has_passed_are_not_asked_for() {
    let _unplanted = PLANTED.read();
    let mut run = Run::new();
    run.hint(1);
    run.due.resolve(5);
    run.counter.state.pass(Epoch(5));
    run.counter.state.check_invariants().unwrap();
    run.after(MS).await;
    assert_eq!(run.rounds(), 0);
    let LookaheadStats { prefetched, dropped, unused, .. } = run.counted();
    assert_eq!((prefetched, dropped, unused), (0, 1, 0));
}

#[tokio::test(start_paused = true)]
async fn keys_that_are_closed_meanwhile_are_not_asked_for() {
    let _unplanted = PLANTED.read();
    let mut run = Run::new();
    run.hint(3);
    run.counter.state.close(0, 5);
    run.after(MS).await;
    assert_eq!((run.rounds(), run.counted().dropped), (0, 1));
    run.counter.state.check_invariants().unwrap();
}
