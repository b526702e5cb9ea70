//! What a hint sends: the columns of keys of every type, in few bytes.

use arrow::array::{
    BinaryArray, BooleanArray, Date32Array, Decimal128Array, Float64Array, Int16Array, Int32Array,
    StringArray, TimestampMicrosecondArray,
};
use millrace_common::Vnode;

use super::*;
use crate::exchange::owned_vnodes;
use crate::state::keys::{ChunkKeys, KeyReader};

const ROWS: usize = 1_000;

/// A column of each type that keys have: [`ROWS`] values, some of them NULL, many of them twice.
fn columns() -> Vec<ArrayRef> {
    let numbers = |i: usize| (i % 7 != 3).then_some((i * 31 % 601) as i64 - 300);
    let all = || (0..ROWS).map(numbers);
    let decimals = Decimal128Array::from_iter(all().map(|n| n.map(|n| i128::from(n) << 70)));
    let floats = all().map(|n| n.map(|n| if n < -290 { f64::NAN } else { n as f64 / 8.0 }));
    vec![
        Arc::new(BooleanArray::from_iter(all().map(|n| n.map(|n| n > 0)))),
        Arc::new(Int16Array::from_iter(all().map(|n| n.map(|n| n as i16)))),
        Arc::new(Int32Array::from_iter(all().map(|n| n.map(|n| n as i32)))),
        Arc::new(Int64Array::from_iter(all().map(|n| n.map(|n| n << 40)))),
        Arc::new(decimals.with_precision_and_scale(38, 4).unwrap()),
        Arc::new(Float64Array::from_iter(floats)),
        Arc::new(StringArray::from_iter(all().map(|n| n.map(|n| "ab".repeat(n.max(0) as usize))))),
        Arc::new(BinaryArray::from_iter(all().map(|n| n.map(|n| n.to_le_bytes())))),
        Arc::new(Date32Array::from_iter(all().map(|n| n.map(|n| n as i32)))),
        Arc::new(TimestampMicrosecondArray::from_iter(all().map(|n| n.map(|n| n * 1_000_001)))),
    ]
}

/// Rows of these columns, and a lookahead of the key that they are; one of these decides the task, or all.
fn by_columns(columns: Vec<ArrayRef>, vnode: Vec<usize>) -> (RecordBatch, Lookahead) {
    let field = |(i, c): (usize, &ArrayRef)| Field::new(i.to_string(), c.data_type().clone(), true);
    let fields: Vec<Field> = columns.iter().enumerate().map(field).collect();
    let schema = Arc::new(Schema::new(fields));
    let key = (0..columns.len()).collect();
    let rows = RecordBatch::try_new(Arc::clone(&schema), columns).unwrap();
    let input = Arc::clone(&schema);
    (rows, Lookahead { input, schema, key, vnode, time: None, ..by_key() })
}

/// Encoded keys with hashes and vnodes.
fn all_of(keys: &ChunkKeys) -> Vec<(Vec<u8>, u64, Vnode)> {
    let key = |row| (keys.key(row).to_vec(), keys.hashes[row], keys.vnode(row));
    (0..keys.hashes.len()).map(key).collect()
}

/// Which keys an exchange brings to which task.
async fn keys_dispatched(
    rows: &RecordBatch,
    by: &[usize],
    reader: &KeyReader,
    tasks: usize,
) -> Vec<HashSet<(Vec<u8>, u64, Vnode)>> {
    let governor = MemoryGovernor::new(1 << 30);
    let (senders, mut receivers): (Vec<_>, Vec<_>) =
        (0..tasks).map(|_| local_channel(1 << 24, &governor)).unzip();
    let mut dispatcher = Dispatcher::new(by.to_vec(), senders, &ExecOptions::default());
    dispatcher.push(DeltaChunk::inserts(rows.clone())).unwrap();
    let end = Barrier { prev: Epoch(0), epoch: Epoch(1), backfill: false, stage: 0, swap: false };
    dispatcher.barrier(&Arc::new(end), &Arc::default()).await.unwrap();
    let mut all = Vec::new();
    for receiver in &mut receivers {
        let mut keys = HashSet::default();
        while let Some(Message::Chunk(chunk)) =
            std::future::poll_fn(|cx| receiver.poll_recv(cx)).await
        {
            keys.extend(all_of(&reader.read(&chunk.batch).unwrap()));
        }
        all.push(keys);
    }
    all
}

/// Hints of the rows bring each task the keys that its rows have, each once.
async fn keys_meet_their_rows((rows, lookahead): (RecordBatch, Lookahead)) {
    let Lookahead { schema, key, vnode, .. } = &lookahead;
    let reader = KeyReader::new(schema, key, vnode).unwrap();
    for tasks in [1, 2, 7] {
        let (mut ends, mut route) = Tasks::new(&lookahead, tasks, ROOM);
        ends.miss();
        route.look(rows.clone(), &Due::default()).unwrap();
        let expected = keys_dispatched(&rows, vnode, &reader, tasks).await;
        for (task, (hints, expected)) in ends.hints.iter_mut().zip(expected).enumerate() {
            let mut told = Vec::new();
            while let Some(hint) = next(hints) {
                told.extend(all_of(&reader.read_columns(&hint.columns).unwrap()));
            }
            assert!(told.iter().all(|key| owned_vnodes(task, tasks).contains(&key.2)));
            let count = told.len();
            let told = HashSet::from_iter(told);
            assert_eq!(told.len(), count, "a key is told once");
            assert!(told == expected, "{schema:?}: task {task} of {tasks}");
        }
    }
}

#[tokio::test]
async fn keys_of_every_type_meet_their_rows() {
    let columns = columns();
    for column in &columns {
        keys_meet_their_rows(by_columns(vec![Arc::clone(column)], vec![0])).await;
    }
    let other: ArrayRef = Arc::new(Int64Array::from_iter_values((0..ROWS as i64).map(|i| i % 5)));
    for column in &columns {
        let both = || vec![Arc::clone(column), Arc::clone(&other)];
        for vnode in [vec![0, 1], vec![0], vec![1]] {
            keys_meet_their_rows(by_columns(both(), vnode)).await;
        }
    }
    keys_meet_their_rows(by_columns(columns, vec![3, 6])).await;
}

/// Bytes of hints of all rows, by key that was sent.
async fn bytes_by_key(rows: RecordBatch, lookahead: &Lookahead) -> f64 {
    let (mut ends, mut route) = Tasks::new(lookahead, 2, ROOM);
    ends.miss();
    route.look(rows, &Due::default()).unwrap();
    let mut keys = 0;
    for hints in &mut ends.hints {
        while let Some(hint) = next(hints) {
            keys += hint.count();
        }
    }
    ends.metrics.lookahead.hint_bytes.get() as f64 / keys as f64
}

/// The first rows of so many that hints do not refer to their columns.
fn of_many(columns: impl Fn(i64) -> Vec<ArrayRef>) -> Vec<ArrayRef> {
    columns(100_000).iter().map(|column| column.slice(0, 2_000)).collect()
}

fn ints(count: i64) -> ArrayRef {
    Arc::new(Int64Array::from_iter_values(0..count))
}

fn texts(count: i64) -> ArrayRef {
    Arc::new(StringArray::from_iter_values((0..count).map(|i| format!("key {i:06}"))))
}

#[tokio::test]
async fn a_key_that_is_copied_is_sent_in_little_more_than_its_value() {
    let both = |count| vec![ints(count), texts(count)];
    let without_time = [
        (of_many(|count| vec![ints(count)]), 8.0),
        (of_many(|count| vec![texts(count)]), 14.0),
        (of_many(both), 22.0),
    ];
    for (columns, expected) in without_time {
        let (rows, lookahead) = by_columns(columns, vec![0]);
        // Texts of a hint have one offset more than there are.
        let more = bytes_by_key(rows, &lookahead).await - expected;
        assert!((0.0..0.1).contains(&more), "{expected} and {more} bytes");
    }
    let all: Vec<_> = (0..100_000).map(|i| (i, i * 1_234_567, 0)).collect();
    let some = rows(&all).slice(0, 2_000);
    let bytes = bytes_by_key(some.clone(), &by_key()).await;
    assert!((9.0..=9.1).contains(&bytes), "{bytes} bytes with the times");
    // The time is of the key: rows of a window.
    let of_key = Lookahead { key: vec![0, 1], vnode: vec![0], time: Some(1), ..by_key() };
    assert_eq!(bytes_by_key(some, &of_key).await, 16.0);
}

#[tokio::test]
async fn keys_that_rows_have_are_sent_in_some_bits() {
    for columns in [vec![ints(2_000)], vec![ints(2_000), texts(2_000)]] {
        let (rows, lookahead) = by_columns(columns, vec![0]);
        let bytes = bytes_by_key(rows, &lookahead).await;
        assert!((0.2..0.4).contains(&bytes), "{bytes} bytes: a bit for each row and task");
    }
    let all: Vec<_> = (0..2_000).map(|i| (i, i * 1_234_567, 0)).collect();
    let bytes = bytes_by_key(rows(&all), &by_key()).await;
    assert!((1.2..1.4).contains(&bytes), "{bytes} bytes with the times");
}

/// What an expression computes only to tell keys is no less than a copy of them.
#[tokio::test]
async fn keys_that_are_computed_are_counted() {
    let column = |at: usize| -> ExprRef { Arc::new(Column::new(schema().field(at).name(), at)) };
    let sum: ExprRef = Arc::new(BinaryExpr::new(column(0), Compare::Plus, column(0)));
    let project = Op::Project(Project { exprs: vec![column(0), column(1), sum] });
    let all: Vec<_> = (0..2_000).map(|i| (i, 0, 0)).collect();
    for (key, expected) in [(0, 0.2..0.4), (2, 8.2..8.4)] {
        let steps = vec![step(project.clone())];
        let lookahead =
            Lookahead { steps, key: vec![key], vnode: vec![key], time: None, ..by_key() };
        let bytes = bytes_by_key(rows(&all), &lookahead).await;
        assert!(expected.contains(&bytes), "{bytes} bytes for column {key}");
    }
}

#[tokio::test]
async fn a_slice_is_sent_and_not_its_parent() {
    let texts = (0..10_000).map(|i| format!("{i:010}"));
    let (rows, lookahead) =
        by_columns(vec![Arc::new(StringArray::from_iter_values(texts))], vec![0]);
    let bytes = bytes_by_key(rows.slice(9_000, 10), &lookahead).await;
    assert!((14.0..16.0).contains(&bytes), "{bytes} bytes");
}

/// What is carried is copied, and not a second time if the key has it.
#[tokio::test]
async fn carried_columns_of_the_key_are_sent_once() {
    let all: Vec<_> = (0..500).map(|i| (i, 0, i)).collect();
    for (carried, expected) in [(vec![0], 8.0), (vec![0, 2], 16.0)] {
        let lookahead = Lookahead { carried, time: None, ..by_key() };
        let (ends, route) = Tasks::new(&lookahead, 1, ROOM);
        let chain = crate::lookahead::chain::chain_to(ends.operators.clone());
        let (mut ends, mut route) = (ends, route.with_chain(Some(chain)));
        ends.miss();
        route.look(rows(&all), &Due::default()).unwrap();
        let bytes = ends.metrics.lookahead.hint_bytes.get() as f64 / all.len() as f64;
        assert_eq!(bytes, expected);
    }
}
