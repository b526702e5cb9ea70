//! Values depend on nothing but seed, column and row number.

use std::collections::HashMap;

use arrow::array::{Array, AsArray};
use arrow::datatypes::Int64Type;
use millrace_common::SqlType;
use millrace_rpc::catalog::{Column, OptionEntry};

use super::*;
use crate::datagen::field::Zipf;

fn source(
    columns: &[(&str, SqlType)],
    options: &[(&str, &str)],
) -> Result<DatagenSource, SqlError> {
    let column = |(name, t): &(&str, SqlType)| Column {
        name: (*name).to_owned(),
        sql_type: (*t).into(),
        nullable: true,
        ..Column::default()
    };
    let mut columns: Vec<Column> = columns.iter().map(column).collect();
    let id = Column { hidden: true, ..column(&(crate::ROW_ID, SqlType::BigInt)) };
    columns.push(id);
    let options = [("connector", "datagen")].iter().chain(options);
    DatagenSource::new(&Relation {
        columns,
        options: options
            .map(|(n, v)| OptionEntry { name: (*n).to_owned(), value: (*v).to_owned() })
            .collect(),
        ..Relation::default()
    })
}

async fn rows(
    source: &DatagenSource,
    split: u32,
    from: u64,
    until: u64,
    step: usize,
) -> Vec<String> {
    let columns: Vec<usize> = (0..source.columns.len()).collect();
    let at = ReadFrom { split, offset: from, position: None, parts: Default::default() };
    let mut reader = source.open(at, &columns).unwrap();
    let mut out = Vec::new();
    while let Some((batch, _)) = reader.read(until, step).await.unwrap() {
        for row in 0..batch.num_rows() {
            let cells = (0..batch.num_columns()).map(|c| {
                arrow::util::display::array_value_to_string(batch.column(c), row).unwrap()
            });
            out.push(cells.collect::<Vec<_>>().join("|"));
        }
    }
    out
}

const ALL: &[(&str, SqlType)] = &[
    ("id", SqlType::BigInt),
    ("small", SqlType::SmallInt),
    ("price", SqlType::Numeric(Some((10, 2)))),
    ("x", SqlType::Double),
    ("ok", SqlType::Boolean),
    ("name", SqlType::Text),
    ("key", SqlType::Varchar(Some(20))),
    ("at", SqlType::Timestamp),
    ("day", SqlType::Date),
];

const OPTIONS: &[(&str, &str)] = &[
    ("fields.id.kind", "sequence"),
    ("fields.id.start", "100"),
    ("fields.key.kind", "zipf"),
    ("fields.key.prefix", "user-"),
    ("fields.at.start", "2020-02-28 23:59:58"),
    ("fields.at.step", "500ms"),
    ("fields.name.nulls", "0.5"),
];

#[tokio::test]
async fn any_split_read_from_anywhere_in_any_step_is_the_same() {
    let whole = source(ALL, OPTIONS).unwrap();
    let all = rows(&whole, 0, 0, 3_000, 1_000).await;
    assert_eq!(rows(&whole, 0, 0, 3_000, 7).await, all);
    assert_eq!(rows(&whole, 0, 1_234, 3_000, 500).await, all[1_234..]);
    let split = source(ALL, &[OPTIONS, &[("splits", "3")]].concat()).unwrap();
    for i in 0..3 {
        let own: Vec<&String> = all.iter().skip(i).step_by(3).collect();
        assert_eq!(rows(&split, i as u32, 0, 1_000, 64).await.iter().collect::<Vec<_>>(), own);
    }
    let other = source(ALL, &[OPTIONS, &[("seed", "7")]].concat()).unwrap();
    assert_ne!(rows(&other, 0, 0, 10, 10).await, all[..10]);
    let first: Vec<&str> = all[1].split('|').collect();
    assert_eq!((first[0], first[7], first[9]), ("101", "2020-02-28T23:59:58.500", "1"));
    let nulls = all.iter().filter(|r| r.split('|').nth(5) == Some("")).count();
    assert!((1_300..1_700).contains(&nulls), "{nulls} nulls of 3000 at 0.5");
}

#[tokio::test]
async fn random_values_stay_in_range_and_sequences_begin_again() {
    let options = &[
        ("fields.a.min", "-3"),
        ("fields.a.max", "3"),
        ("fields.b.kind", "sequence"),
        ("fields.b.start", "1"),
        ("fields.b.end", "4"),
        ("rows", "700"),
    ];
    let source = source(&[("a", SqlType::Int), ("b", SqlType::BigInt)], options).unwrap();
    let polled = source.poll(&Known { now_ms: 1_000_000, ..Known::default() }).await.unwrap();
    assert_eq!((polled.available, polled.more), (vec![(0, 700)], crate::More::Never));
    let mut seen: HashMap<i64, usize> = HashMap::new();
    let at = ReadFrom { split: 0, offset: 0, position: None, parts: Default::default() };
    let mut reader = source.open(at, &[1, 0]).unwrap();
    let (batch, _) = reader.read(700, 700).await.unwrap().unwrap();
    let b = batch.column(0).as_primitive::<Int64Type>();
    assert!((0..700).all(|i| b.value(i) == 1 + i as i64 % 4));
    let a = arrow::compute::cast(batch.column(1), &arrow::datatypes::DataType::Int64).unwrap();
    a.as_primitive::<Int64Type>().values().iter().for_each(|v| *seen.entry(*v).or_default() += 1);
    assert_eq!(seen.len(), 7);
    assert!(seen.keys().all(|v| (-3..=3).contains(v)));
    assert_eq!(a.null_count(), 0);
}

#[test]
fn zipf_ranks_follow_the_law() {
    const DRAWS: u64 = 200_000;
    for skew in [0.5, 1.0, 1.5] {
        let zipf = Zipf::new(100, skew);
        let mut counts = [0u64; 100];
        for i in 0..DRAWS {
            counts[zipf.rank(field::mix(i)) as usize] += 1;
        }
        let total: f64 = (1..=100).map(|k| f64::from(k).powf(-skew)).sum();
        for k in [1usize, 2, 5, 20] {
            let expected = DRAWS as f64 * (k as f64).powf(-skew) / total;
            let got = counts[k - 1] as f64;
            assert!(
                (got - expected).abs() < 6.0 * expected.sqrt(),
                "rank {k} skew {skew}: {got} {expected}"
            );
        }
    }
}

#[test]
fn options_are_checked() {
    let bad = |option: (&str, &str)| source(ALL, &[option]).err().unwrap().message;
    assert!(bad(("fields.nothing.kind", "random")).contains("column \"nothing\""));
    assert!(bad(("fields.id.colour", "red")).contains("unknown option \"fields.id.colour\""));
    assert!(bad(("fields.id.kind", "magic")).contains("fields.id.kind"));
    assert!(bad(("fields.id.max", "-1")).contains("fields.id.max"));
    assert!(bad(("fields.key.length", "21")).contains("fields.key.length"));
    assert!(bad(("colour", "red")).contains("unknown option \"colour\""));
    assert!(source(&[("b", SqlType::Bytea)], &[]).is_err());
}
