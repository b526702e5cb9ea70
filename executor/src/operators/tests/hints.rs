//! Hints: what they announce is read ahead, is kept until its rows have come, and never changes a result.

use std::sync::Arc;
use std::time::Duration;

use arrow::array::{ArrayRef, Int64Array, RecordBatch, StringArray};
use futures::FutureExt;
use millrace_common::access::RetentionBy;
use millrace_common::keys::columns_at;
use millrace_common::{DeltaChunk, Epoch};
use millrace_graph::JoinKind;
use millrace_rpc::catalog::RowStorage;
use millrace_storage::cache::Priority;

use super::fake::FakeTable;
use super::history::{chunk, schema};
use super::keyed::{Counter, EVENT_TIME, counts_batch, rows, stored};
use super::model::{PLANTED, join};
use super::stateful::Subject;
use crate::lookahead::{Due, Hint, HintTimes};
use crate::operator::{Operator, Output};
use crate::operators::join::MAX_NOTES;
use crate::options::ExecOptions;
use crate::state::NOTHING_CACHED;
use crate::state::keyed::{MAX_BYTES, MAX_ROWS};
use crate::stats::LookaheadStats;

/// A table whose reads complete when the test says so; keys `0..keys` have had as many rows as they say.
fn held(keys: i64) -> FakeTable {
    let table = FakeTable::held(counts_batch(Vec::new()).schema(), RowStorage::Keyed);
    let mut counter = Counter::new(&table, ExecOptions::default());
    counter.push(rows((0..keys).flat_map(|key| (0..key).map(move |id| (key, id)))));
    while table.answer_one(false, false) {
        counter.progress();
    }
    counter.write();
    *table.rounds.lock() = 0;
    table
}

fn counter(table: &FakeTable) -> Counter {
    Counter::new(table, ExecOptions::default())
}

impl Counter {
    fn counted(&self) -> LookaheadStats {
        self.metrics.lookahead.read()
    }

    /// Takes in a read ahead of rows.
    fn answer(&mut self, table: &FakeTable) {
        assert!(table.answer_one(true, false), "nothing is read ahead");
        self.progress();
    }

    /// Takes in a read that rows wait for.
    fn answer_demand(&mut self, table: &FakeTable) {
        assert!(table.answer_one(false, false), "nothing is waited for");
        self.progress();
    }

    fn finish(&mut self, table: &FakeTable) {
        while self.state.is_fetching() {
            self.answer_demand(table);
        }
        assert!(self.state.is_settled());
        self.state.check_invariants().unwrap();
        self.write();
    }

    fn next_epoch(&mut self, epoch: u64) {
        self.state.check_settled(true).unwrap();
        self.state.pass(Epoch(epoch));
        self.state.check_invariants().unwrap();
    }
}

fn one(key: i64) -> millrace_common::DeltaChunk {
    rows([(key, 100 + key)].into_iter())
}

#[test]
fn what_was_hinted_is_in_memory_when_its_row_comes() {
    let _unplanted = PLANTED.read();
    let table = held(5);
    let mut counter = counter(&table);
    counter.hint(&[1, 2, 1], 1);
    assert!(counter.state.is_prefetching() && !counter.state.is_fetching());
    assert!(counter.state.is_settled() && !counter.state.is_full());
    counter.answer(&table);
    assert!(!counter.state.is_prefetching());
    counter.push(rows([(1, 0), (2, 1), (1, 2)].into_iter()));
    assert_eq!(counter.ran, [0, 1, 2]);
    counter.hint(&[1, 2, 9], 2);
    counter.answer(&table);
    counter.push(one(9));
    counter.finish(&table);
    assert_eq!(*table.rounds.lock(), 2);
    assert_eq!(counter.metrics.parked_rows.get(), 0);
    let expected = LookaheadStats {
        hinted: 6,
        resident: 2,
        prefetched: 3,
        in_time: 3,
        absent: 1,
        ..LookaheadStats::default()
    };
    assert_eq!(counter.counted(), expected);
    assert_eq!(stored_now(&table), [(1, 3), (2, 3), (3, 3), (4, 4), (9, 1)]);
}

/// What is stored, by a reader of its own.
fn stored_now(table: &FakeTable) -> Vec<(i64, i64)> {
    stored(&table.answered(), 20).into_iter().collect()
}

#[test]
fn a_row_that_meets_a_read_ahead_waits_and_runs() {
    let _unplanted = PLANTED.read();
    for first in [true, false] {
        let table = held(5);
        let mut counter = counter(&table);
        counter.hint(&[1, 2], 1);
        counter.push(one(1));
        assert!(counter.ran.is_empty() && counter.state.is_fetching());
        counter.hint(&[1], 1);
        // Whichever answer is the first: the row runs with its own, and the other one changes nothing of it.
        if first {
            counter.answer(&table);
            assert!(counter.ran.is_empty());
        }
        counter.answer_demand(&table);
        assert_eq!(counter.ran, [101]);
        if !first {
            counter.answer(&table);
        }
        counter.push(one(2));
        assert_eq!(counter.ran, [101, 102]);
        counter.finish(&table);
        let LookaheadStats { in_time, late, stale, missed, .. } = counter.counted();
        assert_eq!((in_time, late, stale, missed), (1, 1, 1, 1));
        assert_eq!(stored_now(&table)[..2], [(1, 2), (2, 3)]);
    }
}

#[test]
fn a_thousand_hints_of_a_key_make_one_read() {
    let _unplanted = PLANTED.read();
    let table = held(5);
    let mut counter = counter(&table);
    for n in 0..1_000 {
        counter.hint(&[3, 3], n);
    }
    assert_eq!((*table.rounds.lock(), table.waiting()), (1, 1));
    counter.answer(&table);
    (0..1_000).for_each(|n| counter.hint(&[3], n));
    assert_eq!((*table.rounds.lock(), counter.counted().prefetched), (1, 1));
}

#[test]
fn keys_of_which_nothing_is_needed_leave_no_entry() {
    let _unplanted = PLANTED.read();
    let table = held(5);
    let mut counter = counter(&table);
    counter.state.entries.is_free = true;
    counter.hint(&[1, 2, 3], 1);
    assert_eq!((counter.state.keys.len(), counter.counted().resident), (0, 3));
}

#[test]
fn barriers_do_not_wait_for_what_is_read_ahead() {
    let _unplanted = PLANTED.read();
    let table = held(5);
    let mut counter = counter(&table);
    counter.hint(&[1, 2], 1);
    for epoch in 2..5 {
        counter.next_epoch(epoch);
    }
    counter.answer(&table);
    counter.push(one(1));
    assert_eq!(counter.ran, [101], "the read has gone on");
    counter.finish(&table);
    assert_eq!(stored_now(&table)[0], (1, 2));
}

#[test]
fn a_key_whose_rows_do_not_come_is_unused_after_its_epoch() {
    let _unplanted = PLANTED.read();
    let table = held(5);
    let mut counter = counter(&table);
    let due = Due::default();
    counter.hint_due(&[1, 2], &due);
    counter.hint_due(&[3], &Due::at(7));
    counter.answer(&table);
    counter.answer(&table);
    counter.push(one(2));
    counter.write();
    for epoch in 2..7 {
        counter.next_epoch(epoch);
    }
    assert_eq!(counter.counted().unused, 0, "not known, or still to come");
    due.resolve(6);
    counter.next_epoch(7);
    assert_eq!((counter.counted().in_time, counter.counted().unused), (1, 2));
    counter.push(one(1));
    assert_eq!(counter.counted().in_time, 1, "nobody expected it any more");
}

#[test]
fn what_is_read_for_a_sealed_epoch_has_the_class_of_barriers() {
    let _unplanted = PLANTED.read();
    let table = held(5);
    let mut counter = counter(&table);
    let (sealed, open) = (Due::at(7), Due::at(8));
    sealed.seal(None);
    counter.hint_due(&[1], &sealed);
    counter.hint_due(&[2], &open);
    assert_eq!(table.classes(), [Priority::Barrier, Priority::Prefetch]);
    // Reads under way change their class with their epoch.
    open.seal(None);
    assert_eq!(table.classes(), [Priority::Barrier; 2]);
    assert!(!counter.state.is_fetching(), "barriers do not wait for them all the same");
    counter.next_epoch(6);
    while table.answer_one(false, false) {
        counter.progress();
    }
    counter.push(rows([(1, 0), (2, 1)].into_iter()));
    assert_eq!((counter.ran.len(), counter.counted().in_time), (2, 2));
}

#[test]
fn late_hints_fetch_nothing() {
    let _unplanted = PLANTED.read();
    let table = held(5);
    let mut counter = counter(&table);
    counter.next_epoch(5);
    let (never, due) = (Due::default(), Due::default());
    never.resolve(1);
    // Their epoch has ended, or will never be.
    for late in [Due::at(4), Due::at(5), never] {
        counter.hint_due(&[1], &late);
    }
    assert_eq!((table.waiting(), counter.counted().dropped), (0, 3));
    assert_eq!(counter.state.keys.len(), 0, "nothing is kept for them");
    counter.hint_due(&[1], &due);
    counter.hint_due(&[2], &Due::at(6));
    assert_eq!((table.waiting(), counter.counted().dropped), (2, 3));
}

#[test]
fn hints_of_times_before_the_watermark_fetch_nothing() {
    let _unplanted = PLANTED.read();
    let table = held(5);
    let mut counter = counter(&table);
    // Of another column, and of an input that there is not.
    counter.state.watermark(0, &[(EVENT_TIME + 1, 70)]);
    counter.state.watermark(1, &[(EVENT_TIME, 70)]);
    counter.state.watermark(0, &[(EVENT_TIME, 50)]);
    counter.state.watermark(0, &[(EVENT_TIME, 40)]);
    counter.hint(&[1, 2], 49);
    assert_eq!((table.waiting(), counter.counted().dropped), (0, 2));
    counter.hint(&[1], 50);
    counter.hint(&[2], i64::MIN);
    assert_eq!(table.waiting(), 2, "one is of the watermark, one has no time");
}

#[test]
fn entries_that_rows_are_expected_for_leave_last() {
    let _unplanted = PLANTED.read();
    due_entries_leave_last();
}

pub(super) fn due_entries_leave_last() {
    let table = held(0);
    let options = ExecOptions { cache_bytes: 4_000, ..ExecOptions::default() };
    let mut counter = Counter::new(&table, options);
    counter.push(one(5));
    counter.answer_demand(&table);
    counter.hint_due(&[5], &Due::at(1_000));
    counter.hint_due(&[1], &Due::at(1_000));
    counter.hint_due(&[2], &Due::at(2));
    counter.answer(&table);
    counter.answer(&table);
    counter.next_epoch(2);
    for key in 10..200 {
        counter.push(one(key));
        counter.answer_demand(&table);
        counter.make_room();
    }
    assert!(counter.is_resident(1) && counter.is_resident(5) && !counter.is_resident(2));
    // Its row has come: it goes like the others.
    for key in 200..400 {
        counter.push(one(key));
        counter.answer_demand(&table);
        counter.make_room();
    }
    assert!(!counter.is_resident(1) && !counter.is_resident(5));
}

#[test]
fn entries_read_in_vain_leave_before_older_ones() {
    let _unplanted = PLANTED.read();
    let table = held(0);
    let options = ExecOptions { cache_bytes: 10_000, ..ExecOptions::default() };
    let mut counter = Counter::new(&table, options);
    // The first one has the stamp of what leaves at once.
    for key in 0..6 {
        counter.push(one(key));
        counter.answer_demand(&table);
    }
    counter.hint_due(&(100..112).collect::<Vec<_>>(), &Due::at(2));
    while table.answer_one(true, false) {
        counter.progress();
    }
    counter.next_epoch(2);
    assert_eq!(counter.counted().unused, 12);
    let mut key = 200;
    while !counter.state.is_over() {
        counter.push(one(key));
        counter.answer_demand(&table);
        key += 1;
        assert!(key < 1_000, "the cache is never full");
    }
    counter.make_room();
    let mut of = |keys: std::ops::Range<i64>| keys.filter(|key| counter.is_resident(*key)).count();
    let (used, in_vain) = (of(1..6), of(100..112));
    println!("{used} of 5 that were used, {in_vain} of 12 that were not");
    assert!(in_vain < 12, "something has left");
    assert!(in_vain == 0 || used == 5, "{in_vain} of no use are here, and {used} of 5 others");
}

#[test]
fn what_is_due_holds_half_of_the_cache() {
    let _unplanted = PLANTED.read();
    let table = held(0);
    let options = ExecOptions { cache_bytes: 10_000, ..ExecOptions::default() };
    let mut counter = Counter::new(&table, options);
    for key in 0..200 {
        counter.hint(&[key], 1);
    }
    while table.answer_one(true, false) {
        counter.progress();
    }
    let LookaheadStats { prefetched, dropped, .. } = counter.counted();
    assert!((20..60).contains(&prefetched) && prefetched + dropped == 200, "{prefetched}");
    assert!(counter.state.held() <= 10_000);
    // The marks of those that came too early for their rows go, and there is room again.
    (0..300).for_each(|epoch| counter.next_epoch(2 + epoch));
    counter.hint(&[1_000], 1);
    assert_eq!(counter.counted().prefetched, prefetched + 1);
}

#[test]
fn a_read_ahead_that_fails_is_forgotten() {
    let _unplanted = PLANTED.read();
    let table = held(5);
    let mut counter = counter(&table);
    counter.hint(&[1, 2], 1);
    counter.push(one(2));
    assert!(table.fail_one());
    counter.progress();
    assert!(!counter.state.is_prefetching() && counter.state.is_fetching());
    counter.push(one(1));
    assert!(counter.ran.is_empty(), "nothing is known of the key");
    counter.finish(&table);
    assert_eq!(stored_now(&table)[..2], [(1, 2), (2, 3)]);
    assert_eq!(counter.counted().dropped, 1);
}

/// An entry that was given up leaves with others; the slot's next key never gets the old one's answer.
#[test]
fn an_answer_reaches_no_other_key() {
    let _unplanted = PLANTED.read();
    let table = held(9);
    let mut counter = counter(&table);
    counter.hint(&[1], 1);
    counter.push(one(1));
    counter.answer_demand(&table);
    counter.write();
    NOTHING_CACHED.set(true);
    counter.make_room();
    NOTHING_CACHED.set(false);
    assert_eq!(counter.state.keys.len(), 0);
    counter.push(one(2));
    counter.answer(&table);
    assert_eq!(counter.ran, [101], "the answer was another key's");
    counter.finish(&table);
    assert_eq!(stored_now(&table)[..2], [(1, 2), (2, 3)]);
}

#[test]
fn keys_closed_while_they_are_read_are_dropped() {
    let _unplanted = PLANTED.read();
    let table = held(9);
    let mut counter = counter(&table);
    counter.hint(&[3, 6], 1);
    counter.state.close(0, 5);
    counter.state.sweep().unwrap();
    counter.hint(&[4, 7], 1);
    counter.answer(&table);
    counter.answer(&table);
    assert!(!counter.state.is_prefetching());
    let resident = [3, 4, 6, 7].map(|key| counter.is_resident(key));
    assert_eq!(resident, [false, false, true, true]);
    counter.state.check_invariants().unwrap();
}

#[test]
fn a_read_ahead_is_given_up_after_a_while() {
    let _unplanted = PLANTED.read();
    let mut paused = tokio::runtime::Builder::new_current_thread();
    let paused = paused.enable_time().start_paused(true).build().unwrap();
    paused.block_on(async {
        let table = held(5);
        let mut counter = counter(&table);
        counter.hint(&[1], 1);
        counter.push(one(2));
        tokio::time::advance(Duration::from_millis(1_900)).await;
        counter.next_epoch_unsettled(2);
        assert_eq!(table.waiting(), 2);
        tokio::time::advance(Duration::from_millis(200)).await;
        counter.next_epoch_unsettled(3);
        assert!(table.answer_one(false, false));
        counter.progress();
        assert_eq!(table.waiting(), 0, "the read ahead holds nothing any more");
        assert!(!counter.state.is_prefetching());
        counter.push(one(1));
        counter.finish(&table);
        assert_eq!(stored_now(&table)[..2], [(1, 2), (2, 3)]);
    });
}

impl Counter {
    fn next_epoch_unsettled(&mut self, epoch: u64) {
        self.state.pass(Epoch(epoch));
    }
}

/// Walkers learn that hints are wanted, and of which keys.
#[test]
fn waiting_rows_switch_hints_on_and_what_is_resident_is_told() {
    let _unplanted = PLANTED.read();
    let table = held(5);
    let mut counter = counter(&table);
    let shared = counter.lookahead.clone();
    counter.next_epoch(2);
    assert!(!shared.is_active());
    counter.push(one(1));
    counter.finish(&table);
    counter.next_epoch(3);
    let presence = shared.presence().unwrap();
    assert!(shared.is_active());
    let mut hash = |key: i64| counter.state.reader(0).read(&one(key).batch).unwrap().hashes[0];
    let [one, two] = [1, 2].map(&mut hash);
    assert!(!presence.may_be_resident(one), "it has come before there was the table");
    counter.hint(&[1, 2], 1);
    assert!(presence.may_be_resident(one) && !presence.may_be_resident(two));
    counter.answer(&table);
    assert!(presence.may_be_resident(two));
    let slot = counter.state.keys.slots().find(|&s| counter.state.keys.hash(s) == two).unwrap();
    counter.state.remove(slot);
    assert!(!presence.may_be_resident(two));
    for epoch in 4..100 {
        counter.next_epoch(epoch);
    }
    assert!(!shared.is_active(), "nothing has been read for long");
}

/// [`announced_rows`] with these ids.
fn announced(subject: &Subject, ids: std::ops::Range<i64>) -> Box<dyn Operator> {
    let row = |id| ((Some(1), Some(id), None, id), 1);
    announced_rows(subject, chunk(&ids.map(row).collect::<Vec<_>>()))
}

/// Rows of the key 1 on the left, stored; then an operator that knows of none, to which the key is announced for rows
/// on the right.
fn announced_rows(subject: &Subject, rows: DeltaChunk) -> Box<dyn Operator> {
    let mut op = subject.build();
    op.push(0, rows, &mut Output::default()).unwrap();
    while op.is_pending() {
        go_on(subject, op.as_mut(), false);
    }
    op.barrier(&mut Output::default()).now_or_never().unwrap().unwrap();
    let mut op = subject.restart(Some(op.as_ref()));
    let row = chunk(&[((Some(1), None, None, 0), 1)]).batch;
    let (columns, times, due) = (columns_at(&row, &[0]), HintTimes::None, Due::default());
    op.hint(1, &Hint { node: 0, port: 1, columns, times, due, carried: None }).unwrap();
    *subject.tables[0].rounds.lock() = 0;
    op
}

/// A read completes; the rows that come of it.
fn go_on(subject: &Subject, op: &mut dyn Operator, ahead: bool) -> usize {
    let mut out = Output::default();
    assert!(subject.tables.iter().any(|table| table.answer_one(ahead, false)));
    op.progress(&mut out).now_or_never().unwrap().unwrap();
    out.rows()
}

#[test]
fn a_key_with_many_rows_is_not_kept_by_a_hint() {
    let _unplanted = PLANTED.read();
    for (rows, rounds) in [(MAX_ROWS, 1), (MAX_ROWS - 1, 0)] {
        let subject = join(JoinKind::Inner, RowStorage::Append).subject;
        let mut op = announced(&subject, 0..rows as i64);
        go_on(&subject, op.as_mut(), true);
        let mut out = Output::default();
        op.push(1, chunk(&[((Some(1), None, None, 0), 1)]), &mut out).unwrap();
        let mut pairs = out.rows();
        assert_eq!(*subject.tables[0].rounds.lock(), rounds, "{rows} rows");
        while op.is_pending() {
            pairs += match subject.tables[0].waiting() {
                0 => {
                    let mut out = Output::default();
                    op.progress(&mut out).now_or_never().unwrap().unwrap();
                    out.rows()
                }
                _ => go_on(&subject, op.as_mut(), false),
            };
        }
        assert_eq!(pairs, rows);
    }
}

/// Rows of the key that is announced are written while its rows are read: pairs of one more row on the right, and the
/// reads of the left side that it has waited for.
fn written_while_read_ahead(rows: i64) -> (usize, usize) {
    let subject = join(JoinKind::Inner, RowStorage::Multiset).subject;
    let mut op = announced(&subject, 0..10);
    let row = |id: i64| ((Some(1), Some(id), None, id), 1);
    // The first row has to know the right side; the others run at once.
    op.push(0, chunk(&[row(100)]), &mut Output::default()).unwrap();
    assert_eq!(go_on(&subject, op.as_mut(), false), 0);
    for id in 1..rows {
        op.push(0, chunk(&[row(100 + id)]), &mut Output::default()).unwrap();
        assert!(!op.is_pending());
    }
    op.barrier(&mut Output::default()).now_or_never().unwrap().unwrap();
    *subject.tables[0].rounds.lock() = 0;
    let mut pairs = go_on(&subject, op.as_mut(), true);
    let mut out = Output::default();
    op.push(1, chunk(&[row(0)]), &mut out).unwrap();
    pairs += out.rows();
    while op.is_pending() {
        pairs += go_on(&subject, op.as_mut(), false);
    }
    let rounds = *subject.tables[0].rounds.lock();
    (pairs, rounds)
}

#[test]
fn rows_written_while_their_key_is_read_are_noted_beside_it() {
    let _unplanted = PLANTED.read();
    let most = i64::from(MAX_NOTES);
    for (rows, reads) in [(1, 0), (most, 0), (most + 1, 1)] {
        let found = written_while_read_ahead(rows);
        assert_eq!(found, (10 + rows as usize, reads), "{rows} rows");
    }
}

#[test]
fn a_key_with_large_rows_is_not_kept_by_a_hint() {
    let _unplanted = PLANTED.read();
    for (bytes, reads) in [(MAX_BYTES / 2, 1), (MAX_BYTES / 4, 0)] {
        let subject = join(JoinKind::Inner, RowStorage::Append).subject;
        let texts = StringArray::from(vec!["x".repeat(bytes); 2]);
        let one = |n: i64| Arc::new(Int64Array::from(vec![n; 2])) as ArrayRef;
        let columns = vec![one(1), one(2), Arc::new(texts), one(3)];
        let rows = RecordBatch::try_new(schema(), columns).unwrap();
        let mut op = announced_rows(&subject, DeltaChunk::inserts(rows));
        go_on(&subject, op.as_mut(), true);
        op.push(1, chunk(&[((Some(1), None, None, 0), 1)]), &mut Output::default()).unwrap();
        assert_eq!(*subject.tables[0].rounds.lock(), reads, "{bytes} bytes a row");
    }
}

#[test]
fn rows_below_a_bound_that_has_risen_are_not_taken_in() {
    let _unplanted = PLANTED.read();
    bounds_hold_for_what_was_read_before();
}

pub(super) fn bounds_hold_for_what_was_read_before() {
    let subject = join(JoinKind::Inner, RowStorage::Append).subject;
    let mut op = announced(&subject, 0..10);
    op.retain(0, RetentionBy::Value(3), 7);
    go_on(&subject, op.as_mut(), true);
    let mut out = Output::default();
    op.push(1, chunk(&[((Some(1), None, None, 0), 1)]), &mut out).unwrap();
    assert_eq!((out.rows(), op.is_pending()), (3, false));
}
