//! Random histories of a relation `(k, v, s, id)` and Z-sets to compare with.

use std::collections::BTreeMap;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, Int64Array, RecordBatch, StringArray};
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use arrow::util::display::array_value_to_string;
use millrace_common::DeltaChunk;
use rand::Rng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;

/// (key, value, text, id); the id is unique in Keyed histories.
pub type Row = (Option<i64>, Option<i64>, Option<i64>, i64);

/// A Z-set of rows or of printed rows.
pub type ZSet<T> = BTreeMap<T, i64>;

pub fn add<T: Ord>(set: &mut ZSet<T>, row: T, weight: i64) {
    use std::collections::btree_map::Entry;
    match set.entry(row) {
        Entry::Occupied(mut e) => {
            *e.get_mut() += weight;
            if *e.get() == 0 {
                e.remove();
            }
        }
        Entry::Vacant(e) => {
            if weight != 0 {
                e.insert(weight);
            }
        }
    }
}

pub fn schema() -> SchemaRef {
    Arc::new(Schema::new(vec![
        Field::new("k", DataType::Int64, true),
        Field::new("v", DataType::Int64, true),
        Field::new("s", DataType::Utf8, true),
        Field::new("id", DataType::Int64, true),
    ]))
}

pub fn text(s: Option<i64>) -> Option<String> {
    s.map(|s| format!("t{s}"))
}

pub fn chunk(rows: &[(Row, i64)]) -> DeltaChunk {
    let k: ArrayRef = Arc::new(Int64Array::from_iter(rows.iter().map(|r| r.0.0)));
    let v: ArrayRef = Arc::new(Int64Array::from_iter(rows.iter().map(|r| r.0.1)));
    let s: ArrayRef = Arc::new(StringArray::from_iter(rows.iter().map(|r| text(r.0.2))));
    let id: ArrayRef = Arc::new(Int64Array::from_iter_values(rows.iter().map(|r| r.0.3)));
    let batch = RecordBatch::try_new(schema(), vec![k, v, s, id]).unwrap();
    let weights = rows
        .iter()
        .any(|r| r.1 != 1)
        .then(|| Int64Array::from_iter_values(rows.iter().map(|r| r.1)));
    DeltaChunk::new(batch, weights)
}

/// Adds a chunk to a Z-set of printed rows.
pub fn accumulate(set: &mut ZSet<Vec<String>>, chunk: &DeltaChunk) {
    for row in 0..chunk.num_rows() {
        let cells = chunk.batch.columns().iter().map(|c| {
            if c.is_null(row) { "NULL".to_string() } else { array_value_to_string(c, row).unwrap() }
        });
        add(set, cells.collect(), chunk.weight(row));
    }
}

/// How a relation changes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    Append,
    /// Duplicates, weights of any size.
    Multiset,
    /// Unique by id.
    Keyed,
}

/// The content of a relation and the next random epoch of it.
pub struct History {
    pub kind: Kind,
    pub content: ZSet<Row>,
    next_id: i64,
    keys: i64,
}

impl History {
    pub fn new(kind: Kind, keys: i64) -> History {
        History { kind, content: ZSet::new(), next_id: 0, keys }
    }

    fn row(&mut self, rng: &mut StdRng) -> Row {
        let id = match self.kind {
            Kind::Multiset => rng.random_range(0..3),
            _ => {
                self.next_id += 1;
                self.next_id
            }
        };
        let maybe = |rng: &mut StdRng, n: i64| rng.random_bool(0.9).then(|| rng.random_range(0..n));
        (maybe(rng, self.keys), maybe(rng, 6), maybe(rng, 3), id)
    }

    /// One epoch's deltas, in any order.
    pub fn epoch(&mut self, rng: &mut StdRng) -> Vec<(Row, i64)> {
        let mut deltas = Vec::new();
        for _ in 0..rng.random_range(0..30) {
            let existing: Vec<Row> = self.content.keys().cloned().collect();
            let pick =
                (!existing.is_empty()).then(|| existing[rng.random_range(0..existing.len())]);
            match (self.kind, rng.random_range(0..4), pick) {
                (Kind::Append, _, _) | (_, 0 | 1, _) | (_, _, None) => {
                    let row = self.row(rng);
                    let weight =
                        if self.kind == Kind::Multiset { rng.random_range(1..4) } else { 1 };
                    deltas.push((row, weight));
                    add(&mut self.content, row, weight);
                }
                (_, 2, Some(row)) => {
                    let weight = rng.random_range(1..=self.content[&row]);
                    deltas.push((row, -weight));
                    add(&mut self.content, row, -weight);
                }
                (_, _, Some(row)) => {
                    deltas.push((row, -1));
                    add(&mut self.content, row, -1);
                    let mut new = self.row(rng);
                    if rng.random_bool(0.5) {
                        new.0 = row.0;
                    }
                    new.3 = row.3;
                    deltas.push((new, 1));
                    add(&mut self.content, new, 1);
                }
            }
        }
        deltas.shuffle(rng);
        deltas
    }
}
