//! Inner joins whose keys are in memory by one side only: a row that adds is written without its own side, and reads
//! the other one. The store may answer a read at once, so that the rows that asked run in the same call.

use std::sync::Arc;

use futures::executor::block_on;
use millrace_common::hash::hash_columns;
use millrace_common::keys::columns_at;
use millrace_graph::JoinKind;
use millrace_rpc::catalog::RowStorage;

use super::fake::FakeTable;
use super::history::{Row, ZSet, accumulate, add, chunk, schema};
use super::model::{PLANTED, join, pairs};
use super::stateful::Subject;
use crate::lookahead::operator::OperatorLookahead;
use crate::lookahead::presence::of_input;
use crate::lookahead::{Due, Hint, HintTimes};
use crate::operator::{Operator, Output};

/// A join under way, and what it is of.
struct Run {
    subject: Subject,
    op: Box<dyn Operator>,
    rows: [ZSet<Row>; 2],
    actual: ZSet<Vec<String>>,
}

impl Run {
    /// One row is stored on each side, and nothing is in memory.
    fn new(tables: [FakeTable; 2]) -> Run {
        let mut subject = join(JoinKind::Inner, RowStorage::Multiset).subject;
        subject.tables = tables.iter().map(FakeTable::answered).collect();
        let op = subject.build();
        let mut run = Run { subject, op, rows: Default::default(), actual: ZSet::new() };
        run.push(0, &[(row(1), 1)]);
        run.push(1, &[(row(1), 1)]);
        run.barrier();
        run.subject.tables = tables.to_vec();
        run.op = run.subject.restart(Some(run.op.as_ref()));
        run
    }

    fn push(&mut self, port: usize, rows: &[(Row, i64)]) {
        rows.iter().for_each(|(row, weight)| add(&mut self.rows[port], *row, *weight));
        let mut out = Output::default();
        self.op.push(port, chunk(rows), &mut out).unwrap();
        self.take(out);
    }

    fn progress(&mut self) {
        let mut out = Output::default();
        block_on(self.op.progress(&mut out)).unwrap();
        self.take(out);
    }

    fn barrier(&mut self) {
        assert!(!self.op.is_pending());
        let mut out = Output::default();
        block_on(self.op.barrier(&mut out)).unwrap();
        self.op.seal(&mut Vec::new()).unwrap();
        self.take(out);
        assert_eq!(self.actual, pairs(&self.rows, false));
    }

    fn take(&mut self, mut out: Output) {
        out.take().iter().for_each(|chunk| accumulate(&mut self.actual, chunk));
    }
}

/// A row of the one key.
fn row(id: i64) -> Row {
    (Some(1), Some(id), None, id)
}

fn hint(port: usize) -> Hint {
    let columns = columns_at(&chunk(&[(row(0), 1)]).batch, &[0]);
    Hint { node: 0, port, columns, times: HintTimes::None, due: Due::at(9), carried: None }
}

fn at_once() -> FakeTable {
    FakeTable::new(schema(), RowStorage::Multiset, None)
}

/// The retraction overtakes its row and needs its own side, which the row before it did not: the store hides what is
/// negative, so that only memory knows of it.
#[test]
fn each_row_of_a_key_gets_the_sides_that_it_needs() {
    let mut run = Run::new([at_once(), at_once()]);
    run.push(0, &[(row(2), 1), (row(3), -1)]);
    run.push(1, &[(row(2), 1)]);
    run.push(0, &[(row(3), 1)]);
    run.barrier();
}

/// What is read ahead does not have the row that is written meanwhile: it is noted.
#[test]
fn a_row_that_is_answered_at_once_is_noted_beside_its_own_sides_prefetch() {
    let _unplanted = PLANTED.read();
    let left = FakeTable::held(schema(), RowStorage::Multiset);
    let mut run = Run::new([left.clone(), at_once()]);
    run.op.hint(1, &hint(1)).unwrap();
    run.push(0, &[(row(2), 1)]);
    assert!(left.answer_one(true, false), "nothing is read ahead");
    run.progress();
    run.push(1, &[(row(2), 1)]);
    while left.answer_one(false, false) {
        run.progress();
    }
    run.barrier();
}

/// A row of the left side is written blind, and has the right side read: rows of the right side still miss the left one.
#[test]
fn walkers_tell_of_a_key_for_the_side_that_is_not_in_memory() {
    let _unplanted = PLANTED.read();
    let mut run = Run::new([at_once(), at_once()]);
    let shared = OperatorLookahead::new(&Arc::default());
    shared.set_behind();
    run.op = run.subject.restart_before(Some(run.op.as_ref()), &shared);
    let presence = shared.presence().expect("rows wait for the job");
    let hash = hash_columns(&hint(1).columns, 1).unwrap()[0];
    let are_present = || [0, 1].map(|port| presence.may_be_resident(of_input(hash, port)));
    run.push(0, &[(row(2), 1)]);
    assert_eq!(are_present(), [true, false]);
    run.op.hint(1, &hint(1)).unwrap();
    assert_eq!(are_present(), [true, true]);
    run.push(1, &[(row(2), 1)]);
    run.barrier();
}
