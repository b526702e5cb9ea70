//! The stream equals the public crate's, whatever columns, splits and batch sizes one reads it in.

use ::nexmark::EventGenerator;
use ::nexmark::config::NexmarkConfig;
use ::nexmark::event::Event;
use arrow::array::AsArray;
use arrow::datatypes::{Int64Type, TimestampMicrosecondType};
use millrace_rpc::catalog::{Column, OptionEntry};

use super::*;

const EVENTS: u64 = 1_000_000;

fn relation(kind: Kind, extra: &[(&str, &str)]) -> Relation {
    let mut options = vec![("connector", "nexmark"), ("table", kind.name())];
    options.extend_from_slice(extra);
    Relation {
        columns: kind
            .columns()
            .iter()
            .map(|(name, t)| Column {
                name: (*name).to_string(),
                sql_type: (*t).into(),
                nullable: true,
                default_sql: None,
                hidden: false,
                ..Column::default()
            })
            .collect(),
        options: options
            .iter()
            .map(|(n, v)| OptionEntry { name: (*n).to_string(), value: (*v).to_string() })
            .collect(),
        ..Relation::default()
    }
}

fn reference() -> impl Iterator<Item = Event> {
    EventGenerator::new(NexmarkConfig {
        base_time: BASE_TIME_MS,
        first_rate: 100_000,
        next_rate: 100_000,
        ..NexmarkConfig::default()
    })
    .take(EVENTS as usize)
}

async fn read_all(
    source: &NexmarkSource,
    split: u32,
    columns: &[usize],
    step: usize,
) -> Vec<RecordBatch> {
    let until = source.pace.available(split, 0, 0);
    let mut reader = source.reader(split, 0, columns).unwrap();
    let mut batches = Vec::new();
    while let Some((batch, _)) = reader.read(until, step).await.unwrap() {
        batches.push(batch);
    }
    batches
}

use arrow::record_batch::RecordBatch;

/// One column as strings and numbers, to compare with the reference's fields.
#[derive(Debug, PartialEq)]
enum Value {
    Int(i64),
    Text(String),
}

fn values(batches: &[RecordBatch], column: usize) -> Vec<Value> {
    let mut out = Vec::new();
    for b in batches {
        let a = b.column(column);
        match a.data_type() {
            DataType::Utf8 => {
                out.extend(a.as_string::<i32>().iter().map(|v| Value::Text(v.unwrap().into())));
            }
            DataType::Int64 => {
                out.extend(a.as_primitive::<Int64Type>().values().iter().map(|v| Value::Int(*v)));
            }
            _ => out.extend(
                a.as_primitive::<TimestampMicrosecondType>()
                    .values()
                    .iter()
                    .map(|v| Value::Int(*v)),
            ),
        }
    }
    out
}

fn fields(event: &Event) -> Vec<Value> {
    let int = |v: usize| Value::Int(v as i64);
    let time = |v: u64| Value::Int(v as i64 * 1_000);
    let text = |v: &str| Value::Text(v.to_string());
    match event {
        Event::Person(p) => vec![
            int(p.id),
            text(&p.name),
            text(&p.email_address),
            text(&p.credit_card),
            text(&p.city),
            text(&p.state),
            time(p.date_time),
            text(&p.extra),
        ],
        Event::Auction(a) => vec![
            int(a.id),
            text(&a.item_name),
            text(&a.description),
            int(a.initial_bid),
            int(a.reserve),
            time(a.date_time),
            time(a.expires),
            int(a.seller),
            int(a.category),
            text(&a.extra),
        ],
        Event::Bid(b) => vec![
            int(b.auction),
            int(b.bidder),
            int(b.price),
            text(&b.channel),
            text(&b.url),
            time(b.date_time),
            text(&b.extra),
        ],
    }
}

fn kind_of(event: &Event) -> Kind {
    match event {
        Event::Person(_) => Kind::Person,
        Event::Auction(_) => Kind::Auction,
        Event::Bid(_) => Kind::Bid,
    }
}

#[tokio::test]
async fn a_million_events_equal_the_crate_s_bit_for_bit() {
    for kind in [Kind::Person, Kind::Auction, Kind::Bid] {
        let source = NexmarkSource::new(&relation(kind, &[("event.num", "1000000")])).unwrap();
        let all: Vec<usize> = (0..=kind.columns().len()).collect();
        let batches = read_all(&source, 0, &all, 4_096).await;
        let columns: Vec<Vec<Value>> = all.iter().map(|&c| values(&batches, c)).collect();
        let mut row = 0;
        for (number, event) in reference().enumerate().filter(|(_, e)| kind_of(e) == kind) {
            for (c, expected) in fields(&event).into_iter().enumerate() {
                assert_eq!(columns[c][row], expected, "event {number}, column {c}");
            }
            assert_eq!(columns[kind.columns().len()][row], Value::Int(number as i64));
            row += 1;
        }
        assert_eq!(row, columns[0].len());
    }
}

#[tokio::test]
async fn any_subset_of_columns_has_the_same_values() {
    for kind in [Kind::Person, Kind::Auction, Kind::Bid] {
        let source = NexmarkSource::new(&relation(kind, &[("event.num", "20000")])).unwrap();
        let n = kind.columns().len();
        let all: Vec<usize> = (0..=n).collect();
        let full = read_all(&source, 0, &all, 1_000).await;
        for c in 0..=n {
            assert_eq!(values(&read_all(&source, 0, &[c], 777).await, 0), values(&full, c), "{c}");
        }
        let pair = read_all(&source, 0, &[n, 1, n], 500).await;
        assert_eq!(values(&pair, 0), values(&pair, 2));
        assert_eq!(values(&pair, 1), values(&full, 1));
    }
}

#[tokio::test]
async fn splits_partition_the_stream_and_resume_anywhere() {
    let options = [("event.num", "10001"), ("splits", "3")];
    let source = NexmarkSource::new(&relation(Kind::Bid, &options)).unwrap();
    let id = Kind::Bid.columns().len();
    let mut ids = Vec::new();
    let mut events = 0;
    for split in 0..source.pace.splits {
        events += source.pace.available(split, 0, 0);
        let batches = read_all(&source, split, &[id], 100).await;
        ids.extend(values(&batches, 0).into_iter().map(|v| match v {
            Value::Int(i) => i,
            Value::Text(t) => panic!("row id is text: {t}"),
        }));
        let mut reader = source.reader(split, 1_234, &[id]).unwrap();
        let (batch, next) = reader.read(1_300, 10_000).await.unwrap().unwrap();
        assert_eq!(next, 1_300);
        for v in batch.column(0).as_primitive::<Int64Type>().values() {
            assert!((1_234 * 3..1_300 * 3).contains(v) && *v % 3 == i64::from(split));
        }
    }
    assert_eq!(events, 10_001);
    ids.sort_unstable();
    let expected: Vec<i64> = (0..10_001).filter(|n| Kind::Bid.holds(*n as u64)).collect();
    assert_eq!(ids, expected);
}

#[test]
fn rate_paces_by_the_wall_clock() {
    let options = [("event.rate", "1000"), ("splits", "2"), ("event.num", "5000")];
    let source = NexmarkSource::new(&relation(Kind::Bid, &options)).unwrap();
    assert_eq!(source.pace.available(0, 10_000, 10_000), 0);
    assert_eq!(source.pace.available(0, 10_000, 12_000), 1_000);
    assert_eq!(source.pace.available(1, 10_000, 99_000), 2_500);
}

#[test]
fn bad_options_are_named() {
    let message = |extra: &[(&str, &str)]| {
        NexmarkSource::new(&relation(Kind::Bid, extra)).err().unwrap().into_parts().message
    };
    assert_eq!(message(&[("splits", "0")]), "invalid value for option \"splits\": \"0\"");
    assert_eq!(message(&[("event.nmu", "1")]), "unknown option \"event.nmu\"");
    let mut r = relation(Kind::Bid, &[]);
    r.options.retain(|o| o.name != "table");
    assert_eq!(NexmarkSource::new(&r).err().unwrap().message, "missing option \"table\"");
    let mut r = relation(Kind::Bid, &[]);
    r.columns[0].sql_type = SqlType::Text.into();
    assert!(NexmarkSource::new(&r).err().unwrap().message.contains("is bigint, not text"));
    r.columns[0].name = "auctoin".into();
    let e = NexmarkSource::new(&r).err().unwrap();
    assert_eq!(e.state, SqlState::UNDEFINED_COLUMN);
}
