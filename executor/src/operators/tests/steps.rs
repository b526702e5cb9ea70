//! An operator gives the task back after a bounded number of pairs, however many one chunk makes.

use std::sync::Arc;

use arrow::datatypes::{Field, Schema};
use datafusion::logical_expr::Operator as BinaryOp;
use datafusion::physical_expr::expressions::{BinaryExpr, Column};
use millrace_graph::{Join, JoinKind, JoinSide, Node, Operator as Op, SideState};
use millrace_rpc::catalog::RowStorage;

use super::fake::FakeTable;
use super::history::{Row, chunk, schema};
use super::stateful::Subject;
use crate::operator::Output;
use crate::operators::join::STEP_CHUNKS;
use crate::options::ExecOptions;

/// Rows of a chunk in these tests.
const CHUNK: usize = 64;
/// Rows of each side; all have the same key.
const SIDE: usize = 400;

/// Joins on the first column; with a condition, `l.v < r.v`.
fn join(conditional: bool) -> Subject {
    let side = |table: usize| JoinSide {
        keys: vec![0],
        vnode: vec![0],
        state: SideState {
            table,
            storage: RowStorage::Append,
            unique_key: vec![],
            unique_per_key: false,
        },
    };
    let column = |name, c| Arc::new(Column::new(name, c));
    let condition = BinaryExpr::new(column("v", 1), BinaryOp::Lt, column("v", 5));
    let one = schema();
    let fields: Vec<Field> =
        one.fields().iter().chain(one.fields()).map(|f| f.as_ref().clone()).collect();
    Subject {
        node: Node {
            op: Op::Join(Join {
                kind: JoinKind::Inner,
                left: side(0),
                right: side(1),
                residual: conditional.then(|| Arc::new(condition) as _),
                null_aware: false,
                null_equals_null: false,
                output: (0..fields.len()).collect(),
            }),
            inputs: vec![0, 1],
            schema: Arc::new(Schema::new(fields)),
            append_only: true,
            marks: vec![],
        },
        inputs: vec![schema(), schema()],
        tables: (0..2).map(|_| FakeTable::new(schema(), RowStorage::Append, None)).collect(),
        options: ExecOptions { chunk_rows: CHUNK, ..ExecOptions::default() },
        event_time: vec![],
    }
}

/// Joins rows that all have one key. The rows that each step puts out.
fn steps(conditional: bool) -> Vec<usize> {
    let mut op = join(conditional).build();
    let rows = |v: i64| -> Vec<(Row, i64)> {
        (0..SIDE as i64).map(|id| ((Some(1), Some(v), None, id), 1)).collect()
    };
    let mut out = Output::default();
    op.push(0, chunk(&rows(1)), &mut out).unwrap();
    while op.is_pending() {
        futures::executor::block_on(op.progress(&mut out)).unwrap();
    }
    assert!(out.is_empty(), "nothing to pair with");
    let mut steps = Vec::new();
    op.push(1, chunk(&rows(0)), &mut out).unwrap();
    loop {
        steps.push(out.take().iter().map(|c| c.num_rows()).sum());
        if !op.is_pending() {
            return steps;
        }
        assert!(op.is_full() || steps.len() == 1, "no input between two steps");
        futures::executor::block_on(op.progress(&mut out)).unwrap();
    }
}

/// Pairs of a step, at most.
const STEP: usize = STEP_CHUNKS * CHUNK;

#[test]
fn a_join_of_many_pairs_goes_in_steps() {
    let steps = steps(false);
    assert!(steps.iter().all(|rows| *rows <= STEP), "{steps:?}");
    assert_eq!(steps.iter().sum::<usize>(), SIDE * SIDE);
}

#[test]
fn pairs_that_do_not_match_count_as_well() {
    let steps = steps(true);
    assert_eq!(steps.iter().sum::<usize>(), 0, "no left value is less than a right one");
    assert!(steps.len() >= SIDE * SIDE / STEP, "{} steps", steps.len());
}
