//! Which state an operator lets go of: event time reaches its cache, and one that is idle can give back all that it holds.

use std::sync::Arc;

use arrow::array::{ArrayRef, Int64Array, RecordBatch, TimestampMicrosecondArray};
use arrow::datatypes::{DataType, Field, Schema, SchemaRef, TimeUnit};
use millrace_common::DeltaChunk;
use millrace_functions::aggregate_kind::AggFunc;
use millrace_graph::state::accumulator_schema;
use millrace_graph::{AggCall, Aggregate, JoinKind, Node, Operator as Op};
use millrace_rpc::catalog::RowStorage;

use super::fake::FakeTable;
use super::history;
use super::model::{PLANTED, join};
use super::stateful::Subject;
use crate::operator::{Operator, Output};
use crate::options::{Eviction, ExecOptions};
use crate::state::NOTHING_CACHED;

const HOUR_US: i64 = 3_600_000_000;

fn schema() -> SchemaRef {
    Arc::new(Schema::new(vec![
        Field::new("key", DataType::Int64, false),
        Field::new("at", DataType::Timestamp(TimeUnit::Microsecond, None), true),
    ]))
}

/// Counts rows by key.
fn subject(eviction: Eviction, cache_bytes: usize) -> Subject {
    let count = AggCall {
        func: AggFunc::Count,
        arg: None,
        distinct: false,
        filter: None,
        output_type: DataType::Int64,
        state: None,
    };
    let calls = vec![count];
    let state = accumulator_schema(&[0], &calls, &schema());
    let counted = Field::new("count", DataType::Int64, true);
    let output = Schema::new(vec![schema().field(0).clone(), counted]);
    let counts = Aggregate { vnode: vec![0], group: vec![0], calls, table: 0 };
    Subject {
        node: Node {
            op: Op::Aggregate(counts),
            inputs: vec![0],
            schema: Arc::new(output),
            append_only: false,
            marks: vec![],
        },
        inputs: vec![schema()],
        tables: vec![FakeTable::new(state, RowStorage::Keyed, None)],
        options: ExecOptions { eviction, cache_bytes, ..ExecOptions::default() },
        event_time: vec![Some(1)],
    }
}

fn push(op: &mut dyn Operator, rows: &[(i64, i64)]) {
    for &(key, at) in rows {
        let columns: Vec<ArrayRef> = vec![
            Arc::new(Int64Array::from(vec![key])),
            Arc::new(TimestampMicrosecondArray::from(vec![at])),
        ];
        let chunk = DeltaChunk::inserts(RecordBatch::try_new(schema(), columns).unwrap());
        op.push(0, chunk, &mut Output::default()).unwrap();
    }
}

/// An epoch of rows (key, time), a chunk each.
fn epoch(op: &mut dyn Operator, rows: &[(i64, i64)]) {
    push(op, rows);
    futures::executor::block_on(op.barrier(&mut Output::default())).unwrap();
}

#[test]
fn the_policy_and_event_time_choose_the_group_that_goes() {
    let mut one = subject(Eviction::Timestamp, 1 << 20).build();
    epoch(one.as_mut(), &[(0, 0)]);
    let entry = one.memory_size();
    for (eviction, victim) in [(Eviction::Timestamp, 2), (Eviction::Lru, 3), (Eviction::Clock, 1)] {
        // Three groups fit; with the fourth one goes.
        let subject = subject(eviction, entry * 7 / 2);
        let mut op = subject.build();
        epoch(op.as_mut(), &[(1, 3 * HOUR_US), (2, HOUR_US), (3, 2 * HOUR_US)]);
        epoch(op.as_mut(), &[(3, 2 * HOUR_US), (2, HOUR_US), (1, 3 * HOUR_US)]);
        epoch(op.as_mut(), &[(4, 4 * HOUR_US)]);
        let mut missing = Vec::new();
        // The victim last: what it displaces is not asked for any more.
        for key in [1, 2, 3, 4].into_iter().filter(|key| *key != victim).chain([victim]) {
            let before = *subject.tables[0].rounds.lock();
            push(op.as_mut(), &[(key, 5 * HOUR_US)]);
            if *subject.tables[0].rounds.lock() > before {
                missing.push(key);
            }
        }
        assert_eq!(missing, [victim], "{eviction:?}");
    }
}

/// Pushes a row of a key and lets the operator go on until nothing waits: how many rows came out.
fn rows_out(op: &mut dyn Operator, port: usize, key: i64, id: i64) -> usize {
    let mut out = Output::default();
    op.push(port, history::chunk(&[((Some(key), Some(id), None, id), 1)]), &mut out).unwrap();
    while op.is_pending() {
        futures::executor::block_on(op.progress(&mut out)).unwrap();
    }
    out.take().iter().map(DeltaChunk::num_rows).sum()
}

/// Not only entries leave: the places of entries and of rows do, too, of which a small job would otherwise keep more than
/// it has rows.
#[test]
fn an_idle_join_gives_back_all_that_it_holds() {
    let _unplanted = PLANTED.read();
    let table = || FakeTable::new(history::schema(), RowStorage::Keyed, None);
    let subject = Subject {
        tables: vec![table(), table()],
        ..join(JoinKind::LeftOuter, RowStorage::Keyed).subject
    };
    let mut op = subject.build();
    for key in 0..500 {
        rows_out(op.as_mut(), 0, key, key);
        rows_out(op.as_mut(), 1, key, key);
    }
    let end_epoch = |op: &mut dyn Operator| {
        futures::executor::block_on(op.barrier(&mut Output::default())).unwrap();
        op.seal(&mut Vec::new()).unwrap();
    };
    end_epoch(op.as_mut());
    assert!(op.memory_size() > 50_000);
    NOTHING_CACHED.set(true);
    op.shed(&mut Output::default()).unwrap();
    NOTHING_CACHED.set(false);
    assert_eq!(op.memory_size(), 0);
    assert_eq!(rows_out(op.as_mut(), 1, 7, 1_000), 1, "what it had is read again");
    end_epoch(op.as_mut());
    assert_eq!(rows_out(op.as_mut(), 0, 7, 1_001), 2);
}
