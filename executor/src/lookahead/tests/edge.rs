//! Hint edges: their credits, and what hints take of them.

use arrow::array::StringArray;

use super::*;
use crate::lookahead::edge::SentHint;
use crate::memory::MemoryClass;

/// All that waits for the first task, and the bytes and credits of each.
fn waiting(ends: &mut Tasks) -> Vec<SentHint> {
    std::iter::from_fn(|| ends.hints[0].try_recv()).collect()
}

#[tokio::test]
async fn hints_beyond_the_credits_are_dropped_and_credits_come_back() {
    let (mut ends, mut route) = Tasks::new(&by_key(), 1, SOME);
    ends.miss();
    let all: Vec<_> = (0..1_000).map(|i| (i, i, 0)).collect();
    route.look(rows(&all), &Due::default()).unwrap();
    let held = ends.governor.used_by(MemoryClass::Channel);
    let sent = waiting(&mut ends);
    let keys: usize = sent.iter().map(SentHint::count).sum();
    assert!((1..1_000).contains(&keys), "{keys} keys");
    assert_eq!(ends.metrics.lookahead.dropped.get(), 1_000 - keys as u64);
    let credit: usize = sent.iter().map(SentHint::credit).sum();
    assert!(credit <= SOME && credit > SOME / 2, "{credit} bytes");
    assert_eq!(held, credit, "what waits is accounted");
    assert_eq!(ends.governor.used_by(MemoryClass::Channel), 0, "and given back when it is taken");
    let bytes: usize = sent.iter().map(SentHint::bytes).sum();
    assert_eq!(ends.metrics.lookahead.hint_bytes.get(), bytes as u64, "of what was sent");
    // Of another epoch: there is as much room again.
    route.look(rows(&all), &Due::default()).unwrap();
    assert_eq!(waiting(&mut ends).iter().map(SentHint::count).sum::<usize>(), keys);
    // A task that has ended is no error, and nothing is kept for it.
    ends.hints.clear();
    route.look(rows(&all), &Due::default()).unwrap();
    assert_eq!(ends.governor.used_by(MemoryClass::Channel), 0);
}

#[tokio::test]
async fn hints_of_one_key_are_bounded_by_bytes() {
    let (mut ends, mut route) = Tasks::new(&by_key(), 1, 64 << 10);
    ends.miss();
    // One row of each statement.
    for key in 0..500 {
        route.look(rows(&[(key, 0, 0)]), &Due::default()).unwrap();
    }
    let sent = waiting(&mut ends).len();
    assert!((64..500).contains(&sent), "{sent} hints");
    assert_eq!(ends.metrics.lookahead.dropped.get(), 500 - sent as u64);
}

#[tokio::test]
async fn large_keys_are_sent_in_hints_of_few() {
    let texts = (0..40).map(|i| format!("{i}").repeat(2_000));
    let texts: ArrayRef = Arc::new(StringArray::from_iter_values(texts));
    let field = Field::new("key", DataType::Utf8, true);
    let schema = Arc::new(Schema::new(vec![field]));
    let lookahead = Lookahead {
        input: Arc::clone(&schema),
        schema: Arc::clone(&schema),
        time: None,
        ..by_key()
    };
    let batch = RecordBatch::try_new(schema, vec![texts]).unwrap();
    let (mut ends, mut route) = Tasks::new(&lookahead, 1, 32 << 10);
    ends.miss();
    let mut told = 0;
    let due = Due::default();
    while told < 40 {
        route.look(batch.clone(), &due).unwrap();
        let sent = waiting(&mut ends);
        assert!(!sent.is_empty() && sent.iter().all(|hint| hint.count() < 16));
        told += sent.iter().map(SentHint::count).sum::<usize>();
    }
}

/// The bar of hints' bytes: 9 % of the rows. Five keys of 8 bytes are in a row of 100 bytes.
#[tokio::test]
async fn hints_of_five_keys_take_less_than_a_tenth_of_their_rows() {
    let field = |i: usize| Field::new(format!("k{i}"), DataType::Int64, true);
    let schema = Arc::new(Schema::new((0..5).map(field).collect::<Vec<_>>()));
    let rows_from = |from: i64, count: i64| {
        let key = |i: i64| -> ArrayRef {
            Arc::new(Int64Array::from_iter_values((from..from + count).map(|x| x * 5 + i)))
        };
        RecordBatch::try_new(Arc::clone(&schema), (0..5).map(key).collect()).unwrap()
    };
    for (statement, tasks) in [(1, 2), (8, 2), (500, 2), (2_000, 4)] {
        let mut bytes = 0;
        for key in 0..5 {
            let (input, of_key) = (Arc::clone(&schema), Arc::clone(&schema));
            let (key, vnode) = (vec![key], vec![key]);
            let lookahead = Lookahead { input, schema: of_key, key, vnode, time: None, ..by_key() };
            let (mut ends, mut route) = Tasks::new(&lookahead, tasks, ROOM);
            ends.miss();
            for from in (0..2_000).step_by(statement) {
                route.look(rows_from(from, statement as i64), &Due::default()).unwrap();
            }
            let told: usize = ends.hints.iter_mut().flat_map(next).map(|hint| hint.count()).sum();
            assert!(told > 0);
            bytes += ends.metrics.lookahead.hint_bytes.get();
        }
        let share = bytes as f64 / (2_000.0 * 100.0);
        assert!(share <= 0.09, "{share} of the rows, {statement} rows a statement");
    }
}
