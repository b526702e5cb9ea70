//! Tables whose rows have a number and a text.

use std::sync::Arc;

use arrow::array::{Array, AsArray, RecordBatch};
use arrow::datatypes::{DataType, Field, Int64Type, Schema, SchemaRef};
use millrace_common::access::AccessClass;
use millrace_common::{TableId, random_tests};
use millrace_storage::{Found, RowStorage, TableDesc};
use proptest::prelude::*;

pub type Key = Vec<u8>;
pub type Row = (Option<i64>, String);
/// Which key was asked for, the key of the row that was found, its weight, and the row.
pub type FoundRow = (u32, Key, i64, Row);

pub fn schema(nullable: bool) -> SchemaRef {
    Arc::new(Schema::new(vec![
        Field::new("n", DataType::Int64, nullable),
        Field::new("s", DataType::Utf8, true),
    ]))
}

/// A table; `relation`: not only its newest version is read.
pub fn desc(id: u32, storage: RowStorage, class: AccessClass, relation: bool) -> TableDesc {
    TableDesc {
        id: TableId(id),
        name: format!("t{id}"),
        value_schema: schema(false),
        storage,
        class,
        relation,
        retention: None,
    }
}

pub fn row_at(batch: &RecordBatch, i: usize) -> Row {
    let n = batch.column(0).as_primitive::<Int64Type>();
    let s = batch.column(1).as_string::<i32>();
    (n.is_valid(i).then(|| n.value(i)), s.value(i).to_string())
}

pub fn found_rows(found: &Found) -> Vec<FoundRow> {
    (0..found.len())
        .map(|i| {
            let key = found.keys.value(i).to_vec();
            (found.input.value(i), key, found.weights.value(i), row_at(&found.values, i))
        })
        .collect()
}

/// So many cases, ten times as many with `MILLRACE_LONG_TESTS=1`; `PROPTEST_CASES` says how many.
pub fn config(cases: u32) -> ProptestConfig {
    let given = std::env::var_os("PROPTEST_CASES").is_some();
    let cases = random_tests::cases(cases, 10 * cases);
    if given { ProptestConfig::default() } else { ProptestConfig::with_cases(cases) }
}
