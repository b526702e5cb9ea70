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
async fn uuids_are_of_version_4_and_one_for_each_number() {
    let random = source(&[("u", SqlType::Uuid)], &[]).unwrap();
    let all = rows(&random, 0, 0, 500, 100).await;
    let first = |r: &String| r.split('|').next().unwrap_or_default().to_owned();
    let distinct: std::collections::HashSet<String> = all.iter().map(first).collect();
    assert_eq!(distinct.len(), 500);
    assert!(distinct.iter().all(|u| u.len() == 32 && &u[12..13] == "4"), "{distinct:?}");
    let few = source(&[("u", SqlType::Uuid)], &[("fields.u.max", "2")]).unwrap();
    let few: std::collections::HashSet<String> =
        rows(&few, 0, 0, 500, 100).await.iter().map(first).collect();
    assert_eq!(few.len(), 3);
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
    let bad = |option: (&str, &str)| source(ALL, &[option]).err().unwrap().into_parts().message;
    assert!(bad(("fields.nothing.kind", "random")).contains("column \"nothing\""));
    assert!(bad(("fields.id.colour", "red")).contains("unknown option \"fields.id.colour\""));
    assert!(bad(("fields.id.kind", "magic")).contains("fields.id.kind"));
    assert!(bad(("fields.id.max", "-1")).contains("fields.id.max"));
    assert!(bad(("fields.key.length", "21")).contains("fields.key.length"));
    assert!(bad(("colour", "red")).contains("unknown option \"colour\""));
    assert!(source(&[("b", SqlType::Bytea)], &[]).is_err());
}

#[test]
fn values_must_fit_their_columns() {
    let refused = |t: SqlType, options: &[(&str, &str)]| {
        source(&[("c", t)], options).err().map(|e| e.into_parts().message).unwrap_or_default()
    };
    let small = SqlType::SmallInt;
    let sequence = ("fields.c.kind", "sequence");
    let told = refused(small, &[("fields.c.max", "100000")]);
    assert!(told.contains("fields.c.max") && told.contains("\"c\" of type smallint"), "{told}");
    assert!(refused(small, &[("fields.c.min", "-32769")]).contains("fields.c.min"));
    assert!(refused(small, &[sequence, ("fields.c.end", "32768")]).contains("fields.c.end"));
    let run = [sequence, ("fields.c.start", "32760"), ("rows", "20")];
    assert!(refused(small, &run).contains("reach 32779"));
    assert_eq!(refused(small, &[sequence, ("fields.c.start", "32760"), ("rows", "8")]), "");
    assert_eq!(refused(small, &[sequence]), "");
    let down = [sequence, ("fields.c.step", "-1000"), ("rows", "34")];
    assert!(refused(small, &down).contains("reach -33000"));
    let zipf = [("fields.c.kind", "zipf"), ("fields.c.keys", "40000")];
    assert!(refused(small, &zipf).contains("fields.c.keys"));
    let decimal = SqlType::Numeric(Some((3, 2)));
    assert!(refused(decimal, &[("fields.c.max", "10")]).contains("fields.c.max"));
    assert_eq!(refused(decimal, &[("fields.c.max", "9.99")]), "");
    assert_eq!(refused(decimal, &[]), "");
}

#[tokio::test]
async fn decimals_are_never_null_for_want_of_digits() {
    // 20 digits before the point: more than a float tells apart.
    let of = |max: &str| source(&[("c", SqlType::Numeric(None))], &[("fields.c.max", max)]);
    let all = rows(&of("9.9e19").unwrap(), 0, 0, 1_000, 500).await;
    assert!(all.iter().all(|r| r.find('|').is_some_and(|digits| digits > 0)));
    assert!(all.iter().any(|r| r.find('.') == Some(20)), "{:?}", &all[..10]);
    for max in ["1e20", "1e30"] {
        let told = of(max).err().map(|e| e.into_parts().message).unwrap_or_default();
        assert!(told.contains("fields.c.max") && told.contains("type numeric"), "{told}");
    }
    let whole = SqlType::Numeric(Some((38, 0)));
    let most = format!("{:e}", 1e38f64.next_down());
    let (least, kind) = (format!("-{most}"), ("fields.c.kind", "random"));
    let options = [kind, ("fields.c.max", most.as_str()), ("fields.c.min", least.as_str())];
    let all = rows(&source(&[("c", whole)], &options).unwrap(), 0, 0, 1_000, 500).await;
    assert!(all.iter().all(|r| !r.starts_with('|')));
}

#[tokio::test]
async fn texts_are_no_longer_than_their_column() {
    let of = |options: &[(&str, &str)]| source(&[("c", SqlType::Varchar(Some(3)))], options);
    let lengths = |all: Vec<String>| all.iter().map(|r| r.find('|')).collect::<Vec<_>>();
    let short = of(&[]).unwrap();
    assert_eq!(lengths(rows(&short, 0, 0, 2, 2).await), [Some(3), Some(3)]);
    let prefix = ("fields.c.prefix", "ab");
    // Unless options say more, so many numbers as there is room for.
    let numbered = of(&[prefix]).unwrap();
    assert!(lengths(rows(&numbered, 0, 0, 99, 99).await).iter().all(|n| *n == Some(3)));
    let told = |options: &[(&str, &str)]| {
        of(options).err().map(|e| e.into_parts().message).unwrap_or_default()
    };
    assert!(told(&[("fields.c.prefix", "abc")]).contains("fields.c.prefix"));
    assert!(told(&[prefix, ("fields.c.max", "10")]).contains("fields.c.max"));
    assert!(told(&[prefix, ("fields.c.min", "-1")]).contains("fields.c.min"));
    let sequence = ("fields.c.kind", "sequence");
    assert!(told(&[sequence, ("rows", "1001")]).contains("reach 1000"));
    assert_eq!(told(&[sequence, ("rows", "1000")]), "");
    assert!(told(&[sequence, ("fields.c.end", "1000")]).contains("fields.c.end"));
    assert_eq!(told(&[sequence, ("fields.c.start", "-99"), ("fields.c.end", "999")]), "");
    let zipf = ("fields.c.kind", "zipf");
    assert!(told(&[zipf, prefix]).contains("fields.c.keys"));
    assert_eq!(told(&[zipf, prefix, ("fields.c.keys", "10")]), "");
    // Characters count, not bytes.
    assert_eq!(told(&[sequence, ("fields.c.prefix", "éé"), ("fields.c.end", "9")]), "");
}

#[tokio::test]
async fn an_endless_sequence_that_runs_out_of_its_type_says_so() {
    let options = [("fields.c.kind", "sequence"), ("fields.c.start", "32760")];
    let small = source(&[("c", SqlType::SmallInt)], &options).unwrap();
    let at = ReadFrom { split: 0, offset: 0, position: None, parts: Default::default() };
    let mut reader = small.open(at, &[0]).unwrap();
    assert!(reader.read(8, 8).await.is_ok());
    let error = reader.read(16, 8).await.err().unwrap().to_string();
    assert!(error.contains("fields.c.kind") && error.contains("smallint"), "{error}");
    let options = [("fields.c.kind", "sequence"), ("fields.c.prefix", "n")];
    let short = source(&[("c", SqlType::Varchar(Some(3)))], &options).unwrap();
    let at = ReadFrom { split: 0, offset: 95, position: None, parts: Default::default() };
    let mut reader = short.open(at, &[0]).unwrap();
    assert!(reader.read(100, 8).await.is_ok());
    let error = reader.read(101, 8).await.err().unwrap().to_string();
    assert!(error.contains("fields.c.kind") && error.contains("(3)"), "{error}");
}

#[tokio::test]
async fn long_texts_come_in_small_batches() {
    let options = [("fields.a.length", "1000000"), ("rows", "100")];
    let source = source(&[("a", SqlType::Text)], &options).unwrap();
    let at = ReadFrom { split: 0, offset: 0, position: None, parts: Default::default() };
    let mut reader = source.open(at, &[0]).unwrap();
    let (mut rows, mut most) = (0, 0);
    while let Some((batch, end)) = reader.read(100, 4096).await.unwrap() {
        rows += batch.num_rows();
        most = most.max(batch.num_rows());
        assert_eq!(end, rows as u64);
    }
    assert_eq!((rows, most), (100, 8));
}
