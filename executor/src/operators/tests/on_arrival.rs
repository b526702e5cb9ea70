//! What a retraction makes necessary is read when it arrives, not at the barrier.

use arrow::compute::SortOptions;
use futures::executor::block_on;
use millrace_functions::window_call::RankFunction;
use millrace_graph::{Node, Operator as Op, TopN, TopNState};
use millrace_rpc::catalog::RowStorage;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

use super::fake::FakeTable;
use super::history::{Row, ZSet, accumulate, add, chunk, schema};
use super::seeded;
use super::stateful::{Subject, naive_top_n, run_epoch};
use crate::operator::{Operator, Output};
use crate::options::ExecOptions;

const ROWS: i64 = 200;
/// Retracted, the first ones in order.
const GONE: i64 = 60;

fn top() -> TopN {
    TopN {
        group: vec![0],
        vnode: vec![0],
        order: vec![(1, SortOptions { descending: false, nulls_first: true })],
        offset: 0,
        limit: Some(3),
        rank: RankFunction::RowNumber,
        emit_rank: false,
        state: TopNState {
            table: 0,
            storage: RowStorage::Keyed,
            unique_key: vec![3],
            append_only_input: false,
        },
    }
}

fn subject(seed: u64) -> Subject {
    Subject {
        node: Node {
            op: Op::TopN(top()),
            inputs: vec![0],
            schema: schema(),
            append_only: false,
            marks: vec![],
        },
        inputs: vec![schema()],
        tables: vec![FakeTable::new(schema(), RowStorage::Keyed, Some(seed))],
        options: ExecOptions::default(),
        event_time: Vec::new(),
    }
}

fn row(id: i64) -> Row {
    (Some(id % 2), Some(id), None, id)
}

/// Pushes changes in chunks of any size; the reads they cause complete before the barrier.
async fn push(op: &mut dyn Operator, deltas: &[(Row, i64)], rng: &mut StdRng, out: &mut Output) {
    let mut rest = deltas;
    while !rest.is_empty() {
        let (now, later) = rest.split_at(rng.random_range(1..=rest.len().min(20)));
        op.push(0, chunk(now), out).unwrap();
        if op.is_pending() && rng.random_bool(0.3) {
            op.progress(out).await.unwrap();
        }
        rest = later;
    }
    while op.is_pending() {
        op.progress(out).await.unwrap();
    }
}

#[test]
fn a_top_n_that_loses_its_first_rows_reads_others_before_the_barrier() {
    for (seed, ref mut rng) in seeded(100, 1000) {
        let subject = subject(seed);
        let (mut actual, mut content) = (ZSet::new(), ZSet::new());
        let all: Vec<(Row, i64)> = (0..ROWS).map(|id| (row(id), 1)).collect();
        all.iter().for_each(|(row, weight)| add(&mut content, *row, *weight));
        let deltas = all.into_iter().map(|d| (0, d)).collect();
        let mut op = subject.build();
        block_on(run_epoch(op.as_mut(), deltas, rng, &mut actual, &subject));
        let mut op = subject.restart(Some(op.as_ref()));

        let mut deltas: Vec<(Row, i64)> = (0..GONE).map(|id| (row(id), -1)).collect();
        deltas.extend((0..10).map(|n| {
            let (id, value) = (ROWS + n, rng.random_range(0..ROWS));
            ((Some(id % 2), Some(value), None, id), 1)
        }));
        deltas.shuffle(rng);
        deltas.iter().for_each(|(row, weight)| add(&mut content, *row, *weight));
        let mut out = Output::default();
        block_on(push(op.as_mut(), &deltas, rng, &mut out));
        let rounds = *subject.tables[0].rounds.lock();
        block_on(op.barrier(&mut out)).unwrap();
        assert_eq!(*subject.tables[0].rounds.lock(), rounds, "seed {seed}: the barrier reads");
        out.take().iter().for_each(|chunk| accumulate(&mut actual, chunk));
        assert_eq!(actual, naive_top_n(&content, &top()), "seed {seed}");
    }
}

/// One statement that deletes most of a table: what is read for its view must not grow with each of its chunks.
#[test]
fn a_bulk_deletion_reads_a_bounded_number_of_rows() {
    const STORED: i64 = 20_000;
    const DELETED: i64 = 18_000;
    let subject = Subject { options: ExecOptions::default(), ..subject(1) };
    let mut rng = StdRng::seed_from_u64(1);
    let (mut actual, mut content) = (ZSet::new(), ZSet::new());
    let all: Vec<(Row, i64)> = (0..STORED).map(|id| (row(id), 1)).collect();
    all.iter().for_each(|(row, weight)| add(&mut content, *row, *weight));
    let mut op = subject.build();
    let mut out = Output::default();
    op.push(0, chunk(&all), &mut out).unwrap();
    block_on(push(op.as_mut(), &[], &mut rng, &mut out));
    block_on(op.barrier(&mut out)).unwrap();
    out.take().iter().for_each(|chunk| accumulate(&mut actual, chunk));
    let mut op = subject.restart(Some(op.as_ref()));

    let read = *subject.tables[0].rows_read.lock();
    let deleted: Vec<(Row, i64)> = (0..DELETED).map(|id| (row(id), -1)).collect();
    deleted.iter().for_each(|(row, weight)| add(&mut content, *row, *weight));
    for part in deleted.chunks(500) {
        block_on(push(op.as_mut(), part, &mut rng, &mut out));
    }
    block_on(op.barrier(&mut out)).unwrap();
    let read = *subject.tables[0].rows_read.lock() - read;
    assert!(read < 4 * DELETED as usize, "{read} rows were read");
    out.take().iter().for_each(|chunk| accumulate(&mut actual, chunk));
    assert_eq!(actual, naive_top_n(&content, &top()));
}
