//! When an aggregate reads its value tables: each turn is a round trip to a store that answers all it was
//! asked before the turn.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker};

use arrow::datatypes::{DataType, Field, Schema};
use millrace_common::Epoch;
use millrace_common::hash::hash_columns;
use millrace_common::keys::columns_at;
use millrace_functions::aggregate_kind::AggFunc;
use millrace_graph::state::accumulator_schema;
use millrace_graph::{AggCall, Aggregate, Node, Operator as Op, ValueTable};
use millrace_rpc::catalog::RowStorage;

use super::fake::FakeTable;
use super::history::{Row, ZSet, accumulate, chunk, schema};
use super::model::PLANTED;
use super::stateful::Subject;
use crate::lookahead::operator::OperatorLookahead;
use crate::lookahead::presence::of_input;
use crate::lookahead::{Due, Hint, HintTimes};
use crate::operator::{Operator, Output};
use crate::options::ExecOptions;

/// Polls of a future that waits for no turn: reads that are ready are taken in over several.
const POLLS: usize = 16;

struct Turns {
    subject: Subject,
    op: Box<dyn Operator>,
    turn: Arc<AtomicUsize>,
    shown: ZSet<Vec<String>>,
}

impl Turns {
    /// Calls over the columns v, s and id, by k.
    fn new(funcs: &[(AggFunc, bool)]) -> Turns {
        let turn = Arc::new(AtomicUsize::new(0));
        let table = |schema| FakeTable::in_turns(schema, RowStorage::Multiset, Arc::clone(&turn));
        let (mut calls, mut values) = (Vec::new(), Vec::new());
        for (&(func, distinct), column) in funcs.iter().zip(1..) {
            let t = schema().field(column).data_type().clone();
            calls.push(AggCall {
                func,
                arg: Some(column),
                distinct,
                filter: None,
                output_type: if func == AggFunc::Count { DataType::Int64 } else { t },
                state: Some(ValueTable { table: column, descending: func == AggFunc::Max }),
            });
            values.push(table(Arc::new(Schema::new(vec![schema().field(column).clone()]))));
        }
        let state = accumulator_schema(&[0], &calls, &schema());
        let groups = FakeTable::in_turns(state, RowStorage::Keyed, Arc::clone(&turn));
        let results = calls.iter().map(|c| Field::new("", c.output_type.clone(), true));
        let output: Vec<Field> =
            std::iter::once(schema().field(0).clone()).chain(results).collect();
        let subject = Subject {
            node: Node {
                op: Op::Aggregate(Aggregate { vnode: vec![0], group: vec![0], calls, table: 0 }),
                inputs: vec![0],
                schema: Arc::new(Schema::new(output)),
                append_only: false,
                marks: vec![],
            },
            inputs: vec![schema()],
            tables: std::iter::once(groups).chain(values).collect(),
            options: ExecOptions::default(),
            event_time: vec![],
        };
        Turns { op: subject.build(), subject, turn, shown: ZSet::new() }
    }

    fn push(&mut self, rows: &[(Row, i64)]) {
        let mut out = Output::default();
        self.op.push(0, chunk(rows), &mut out).unwrap();
        assert!(out.is_empty());
    }

    /// Announces rows: their group, for port 0, or their values in the column with the port's number.
    fn announce(&mut self, port: usize, rows: &[Row]) {
        let rows: Vec<(Row, i64)> = rows.iter().map(|&row| (row, 1)).collect();
        let key = if port == 0 { vec![0] } else { vec![0, port] };
        let columns = columns_at(&chunk(&rows).batch, &key);
        let (times, due) = (HintTimes::None, Due::default());
        let hint = Hint { node: 0, port, columns, times, due, carried: None };
        self.op.hint(port, &hint).unwrap();
    }

    /// Until nothing is read ahead.
    fn read_ahead(&mut self) {
        while self.op.is_prefetching() {
            turns_of(self.op.progress(&mut Output::default()), &self.turn);
        }
    }

    /// Turns until nothing is under way.
    fn drain(&mut self) -> usize {
        let mut turns = 0;
        while self.op.is_pending() {
            turns += turns_of(self.op.progress(&mut Output::default()), &self.turn);
        }
        turns
    }

    /// Turns that the barrier takes.
    fn barrier(&mut self) -> usize {
        let mut out = Output::default();
        let turns = turns_of(self.op.barrier(&mut out), &self.turn);
        self.op.seal(&mut Vec::new()).unwrap();
        out.take().iter().for_each(|c| accumulate(&mut self.shown, c));
        turns
    }

    fn shows(&self, line: &[&str]) {
        let line: Vec<String> = line.iter().map(|s| s.to_string()).collect();
        assert_eq!(self.shown, ZSet::from([(line, 1)]));
    }

    /// How often each value table was read.
    fn reads(&self) -> Vec<usize> {
        self.subject.tables[1..].iter().map(|t| *t.rounds.lock()).collect()
    }
}

fn turns_of<T>(
    future: impl Future<Output = Result<T, crate::error::ExecError>>,
    turn: &AtomicUsize,
) -> usize {
    let mut future = pin!(future);
    let mut turns = 0;
    loop {
        for _ in 0..POLLS {
            if let Poll::Ready(done) = future.as_mut().poll(&mut Context::from_waker(Waker::noop()))
            {
                done.unwrap();
                return turns;
            }
        }
        turn.fetch_add(1, Ordering::Relaxed);
        turns += 1;
    }
}

fn row(n: i64) -> Row {
    (Some(1), Some(n), Some(n), n)
}

const COUNTS: [(AggFunc, bool); 3] = [(AggFunc::Count, true); 3];

#[test]
fn counts_of_distinct_values_are_read_once_and_before_the_barrier() {
    let mut case = Turns::new(&COUNTS);
    case.push(&[(row(1), 1), (row(2), 1)]);
    // The group is not in memory either: it and the values in one turn.
    assert_eq!(case.drain(), 1);
    assert_eq!(case.barrier(), 0);
    case.shows(&["1", "2", "2", "2"]);
    case.push(&[(row(2), -1), (row(3), 1)]);
    case.push(&[(row(2), 1), (row(3), 1), (row(1), 1)]);
    assert_eq!(case.drain(), 1);
    assert_eq!(case.barrier(), 0);
    case.shows(&["1", "3", "3", "3"]);
    // The value that was new was read; those of the epoch before are still in memory.
    assert_eq!(case.reads(), [2, 2, 2]);
    case.push(&[(row(1), -1)]);
    case.push(&[(row(1), -1)]);
    assert_eq!((case.drain(), case.barrier()), (0, 0));
    case.shows(&["1", "2", "2", "2"]);
    assert_eq!(case.reads(), [2, 2, 2]);
    // After a restart nothing is in memory.
    case.op = case.subject.restart(Some(case.op.as_ref()));
    case.push(&[(row(3), -2), (row(4), 1)]);
    assert_eq!((case.drain(), case.barrier()), (1, 0));
    case.shows(&["1", "2", "2", "2"]);
}

/// A cache that holds nothing reads every count again, and the result is the same.
#[test]
fn counts_that_were_evicted_are_read_again() {
    let mut case = Turns::new(&COUNTS);
    case.subject.options.cache_bytes = 0;
    case.op = case.subject.restart(None);
    for (weight, shown) in [(1, "1"), (1, "1"), (-1, "1")] {
        case.push(&[(row(1), weight)]);
        assert_eq!((case.drain(), case.barrier()), (1, 0));
        case.shows(&["1", shown, shown, shown]);
    }
    assert_eq!(case.reads(), [3, 3, 3]);
}

#[test]
fn what_remains_for_the_barrier_is_read_in_one_round() {
    let mut case = Turns::new(&COUNTS);
    case.push(&[(row(0), 1)]);
    assert_eq!((case.drain(), case.barrier()), (1, 0));
    // More chunks than reads may be under way; none completes meanwhile.
    (1..=70).for_each(|n| case.push(&[(row(n), 1)]));
    let early: usize = case.reads().iter().sum();
    assert!(early < 3 * 70, "{early}");
    assert_eq!(case.drain(), 1);
    assert_eq!(case.barrier(), 1);
    assert!(case.reads().iter().sum::<usize>() <= early + 3);
    case.shows(&["1", "71", "71", "71"]);
}

#[test]
fn a_retracted_extreme_is_replaced_without_a_read_at_the_barrier() {
    let mut case = Turns::new(&[(AggFunc::Min, false), (AggFunc::Max, false)]);
    case.push(&[(row(3), 1), (row(5), 1), (row(7), 1)]);
    assert_eq!((case.drain(), case.barrier()), (1, 0));
    case.shows(&["1", "3", "t7"]);
    case.op = case.subject.restart(Some(case.op.as_ref()));
    // Neither the least nor the greatest: only the group is read.
    case.push(&[(row(5), -1), (row(4), 1)]);
    assert_eq!((case.drain(), case.barrier(), case.reads()), (1, 0, vec![0, 0]));
    // Both: known when the row comes.
    case.push(&[(row(3), -1), (row(7), -1)]);
    assert_eq!((case.drain(), case.barrier(), case.reads()), (1, 0, vec![1, 1]));
    case.shows(&["1", "4", "t4"]);
}

#[test]
fn extremes_beyond_what_is_remembered_and_counts_share_a_round() {
    let mut case =
        Turns::new(&[(AggFunc::Min, false), (AggFunc::Max, false), (AggFunc::Count, true)]);
    let rows: Vec<(Row, i64)> = (100..400).map(|n| (row(n), 1)).collect();
    case.push(&rows);
    assert_eq!((case.drain(), case.barrier()), (1, 0));
    case.op = case.subject.restart(Some(case.op.as_ref()));
    // Of the values near both ends more go than one read finds.
    let gone: Vec<(Row, i64)> = (100..200).chain(300..400).map(|n| (row(n), -1)).collect();
    case.push(&gone);
    assert_eq!((case.drain(), case.barrier()), (2, 1));
    case.shows(&["1", "200", "t299", "100"]);
}

#[test]
fn counts_of_announced_values_are_there_when_their_rows_come() {
    let _unplanted = PLANTED.read();
    for is_announced in [false, true] {
        let mut case = Turns::new(&COUNTS);
        case.push(&[(row(1), 1), (row(2), 1)]);
        assert_eq!((case.drain(), case.barrier()), (1, 0));
        case.op = case.subject.restart(Some(case.op.as_ref()));
        if is_announced {
            (0..=3).for_each(|port| case.announce(port, &[row(1), row(3)]));
            assert!(case.op.is_prefetching() && !case.op.is_pending() && !case.op.is_full());
            assert_eq!(case.barrier(), 0, "a barrier does not wait for them");
            case.read_ahead();
        }
        case.push(&[(row(1), -1), (row(3), 1)]);
        assert_eq!(case.drain(), usize::from(!is_announced));
        assert_eq!(case.barrier(), 0);
        case.shows(&["1", "2", "2", "2"]);
        assert_eq!(case.reads(), [2, 2, 2]);
    }
}

#[test]
fn a_count_that_changes_while_it_is_read_ahead_is_not_taken_from_before() {
    let _unplanted = PLANTED.read();
    let mut case = Turns::new(&COUNTS);
    case.push(&[(row(1), 1)]);
    assert_eq!((case.drain(), case.barrier()), (1, 0));
    case.op = case.subject.restart(Some(case.op.as_ref()));
    (1..=3).for_each(|port| case.announce(port, &[row(1)]));
    case.push(&[(row(1), 1)]);
    assert_eq!((case.drain(), case.barrier()), (1, 0));
    case.read_ahead();
    case.shows(&["1", "1", "1", "1"]);
    // It has come twice.
    case.push(&[(row(1), -1)]);
    assert_eq!((case.drain(), case.barrier()), (0, 0));
    case.shows(&["1", "1", "1", "1"]);
    case.push(&[(row(1), -1)]);
    assert_eq!((case.drain(), case.barrier()), (0, 0));
    assert!(case.shown.is_empty());
}

#[test]
fn announced_values_that_are_null_or_of_no_table_read_nothing() {
    let _unplanted = PLANTED.read();
    let mut case = Turns::new(&COUNTS);
    let null: Row = (Some(1), None, None, 7);
    case.announce(1, &[null]);
    case.announce(2, &[null, null]);
    assert!(!case.op.is_prefetching());
    case.announce(1, &[null, row(4)]);
    case.read_ahead();
    assert_eq!(case.reads(), [1, 0, 0]);
    let mut extremes = Turns::new(&[(AggFunc::Min, false), (AggFunc::Max, false)]);
    (1..=2).for_each(|port| extremes.announce(port, &[row(4)]));
    assert!(!extremes.op.is_prefetching());
    assert_eq!(extremes.reads(), [0, 0]);
}

/// Walkers learn that hints are wanted, and which values need none.
#[test]
fn values_that_are_read_switch_hints_on_and_are_told() {
    let _unplanted = PLANTED.read();
    let mut case = Turns::new(&COUNTS);
    let walkers = OperatorLookahead::new(&Arc::default());
    case.op = case.subject.restart_before(None, &walkers);
    // Another value of a group in memory: only counts are read.
    for (n, epoch) in [(1, 2), (2, 3)] {
        case.push(&[(row(n), 1)]);
        assert_eq!((case.drain(), case.barrier()), (1, 0));
        case.op.time(Epoch(epoch));
        assert!(walkers.is_active());
    }
    let presence = walkers.presence().unwrap();
    let values = columns_at(&chunk(&[(row(2), 1)]).batch, &[0, 1]);
    let hash = hash_columns(&values, 1).unwrap()[0];
    assert!(presence.may_be_resident(of_input(hash, 1)));
    assert!(!presence.may_be_resident(of_input(hash, 0)), "it is no group");
    assert!(!presence.may_be_resident(of_input(hash, 2)), "nor a value of the next table");
}
