//! Promises of blocks and runs: what was pushed comes back; every damaged byte is noticed; located
//! blocks are exactly those that can answer.

use std::ops::Bound;
use std::sync::Arc;

use arrow::array::*;
use arrow::datatypes::*;
use bytes::Bytes;
use millrace_common::Epoch;
use proptest::prelude::*;

use super::*;
use crate::block::{BlockCodec, BlockEncoder, Entries, Epochs};
use crate::error::StorageError;

/// One column of every type that SQL values are stored as.
fn schema() -> Schema {
    let t = |name: &str, data_type: DataType| Field::new(name, data_type, false);
    Schema::new(vec![
        t("bool", DataType::Boolean),
        t("i16", DataType::Int16),
        t("i32", DataType::Int32),
        t("i64", DataType::Int64),
        t("f32", DataType::Float32),
        t("f64", DataType::Float64),
        t("dec", DataType::Decimal128(38, 10)),
        t("dec256", DataType::Decimal256(76, 20)),
        t("text", DataType::Utf8),
        t("bytea", DataType::Binary),
        t("date", DataType::Date32),
        t("time", DataType::Time64(TimeUnit::Microsecond)),
        t("ts", DataType::Timestamp(TimeUnit::Microsecond, None)),
        t("tstz", DataType::Timestamp(TimeUnit::Microsecond, Some("+00:00".into()))),
        t("interval", DataType::Interval(IntervalUnit::MonthDayNano)),
        t("list", DataType::List(Arc::new(Field::new("item", DataType::Int32, true)))),
    ])
}

/// One generated row: key, epoch, weight, and a seed for the values (`None`: all null).
type Row = (Vec<u8>, u64, i64, Option<i64>);

fn values(rows: &[Row]) -> RecordBatch {
    let seeds: Vec<Option<i64>> = rows.iter().map(|r| r.3).collect();
    macro_rules! column {
        ($array:ty, $f:expr) => {{
            let f = $f;
            Arc::new(seeds.iter().map(|s| s.map(|s| f(s))).collect::<$array>()) as ArrayRef
        }};
    }
    let text = |s: i64| "é".repeat((s.unsigned_abs() % 7) as usize) + &s.to_string();
    let mut list = ListBuilder::new(Int32Builder::new());
    for s in &seeds {
        match s {
            None => list.append(false),
            Some(s) => {
                list.values().append_slice(&[*s as i32, 1]);
                list.append(true);
            }
        }
    }
    let columns: Vec<ArrayRef> = vec![
        column!(BooleanArray, |s: i64| s % 2 == 0),
        column!(Int16Array, |s: i64| s as i16),
        column!(Int32Array, |s: i64| s as i32),
        column!(Int64Array, |s: i64| s),
        column!(Float32Array, |s: i64| s as f32),
        column!(Float64Array, |s: i64| s as f64 / 3.0),
        Arc::new(
            column!(Decimal128Array, i128::from)
                .as_primitive::<Decimal128Type>()
                .clone()
                .with_precision_and_scale(38, 10)
                .unwrap(),
        ),
        Arc::new(
            column!(Decimal256Array, |s: i64| arrow::datatypes::i256::from(s))
                .as_primitive::<Decimal256Type>()
                .clone()
                .with_precision_and_scale(76, 20)
                .unwrap(),
        ),
        column!(StringArray, text),
        Arc::new(
            seeds.iter().map(|s| s.map(|s| s.to_le_bytes().to_vec())).collect::<BinaryArray>(),
        ),
        column!(Date32Array, |s: i64| s as i32),
        column!(Time64MicrosecondArray, |s: i64| s.rem_euclid(86_400_000_000)),
        column!(TimestampMicrosecondArray, |s: i64| s),
        Arc::new(
            column!(TimestampMicrosecondArray, |s: i64| s)
                .as_primitive::<TimestampMicrosecondType>()
                .clone()
                .with_timezone("+00:00"),
        ),
        column!(IntervalMonthDayNanoArray, |s: i64| IntervalMonthDayNano::new(s as i32, 3, s)),
        Arc::new(list.finish()),
    ];
    RecordBatch::try_new(crate::block::stored_schema(&schema()), columns).unwrap()
}

fn entries(rows: &[Row], uniform: Option<u64>, unit: bool) -> Entries {
    Entries {
        keys: BinaryArray::from_iter_values(rows.iter().map(|r| &r.0)),
        epochs: match uniform {
            Some(e) => Epochs::Uniform(Epoch(e)),
            None => Epochs::Each(rows.iter().map(|r| r.1).collect::<Vec<_>>().into()),
        },
        weights: (!unit).then(|| rows.iter().map(|r| r.2).collect::<Vec<_>>().into()),
        values: values(rows),
    }
}

fn arb_rows(max: usize) -> impl Strategy<Value = Vec<Row>> {
    let key = prop::collection::vec(any::<u8>(), 0..12);
    let row = (key, 1u64..1_000, -3i64..4, prop::option::weighted(0.8, any::<i64>()));
    prop::collection::vec(row, 1..max).prop_map(|mut rows| {
        rows.sort_by(|a, b| (&a.0, a.1).cmp(&(&b.0, b.1)));
        rows
    })
}

fn assert_same(got: &Entries, want: &Entries) {
    assert_eq!(got.keys, want.keys);
    assert_eq!(got.values, want.values);
    for i in 0..want.len() {
        assert_eq!(got.weight(i), want.weight(i));
        assert_eq!(got.epochs.at(i), want.epochs.at(i));
    }
}

/// A run in an object called "o", at offset 0.
fn build(parts: &[Entries], options: RunOptions) -> (FinishedRun, RunReader) {
    let codec = Arc::new(BlockCodec::new(&schema()));
    let mut builder = RunBuilder::new(Arc::clone(&codec), options);
    for part in parts {
        builder.push(part).unwrap();
    }
    let mut run = builder.finish().unwrap();
    run.meta.object = "o".to_string();
    let reader = RunReader::new(run.meta.clone(), codec);
    (run, reader)
}

fn small_blocks(bytes: usize) -> RunOptions {
    RunOptions { block_bytes: bytes, ..RunOptions::new(RunKind::Point) }
}

fn slice(run: &FinishedRun, range: std::ops::Range<u64>) -> Bytes {
    run.bytes.slice(range.start as usize..range.end as usize)
}

/// The indexes that have blocks, as readers open them.
fn open(run: &FinishedRun, reader: &RunReader) -> Vec<RunIndex> {
    let opened = reader.parse_index(&slice(run, reader.meta_range())).unwrap();
    if !opened.is_top() {
        return vec![opened];
    }
    let partition = |p| {
        let bytes = slice(run, reader.partition_range(&opened, p));
        reader.parse_partition(&opened, p, &bytes).unwrap()
    };
    opened.block_numbers().map(partition).collect()
}

fn read_all(run: &FinishedRun, reader: &RunReader) -> Vec<Entries> {
    let indexes = open(run, reader);
    let blocks = indexes.iter().flat_map(|index| index.block_numbers().map(move |b| (index, b)));
    blocks
        .map(|(index, b)| {
            let bytes = slice(run, reader.block_range(index, b));
            reader.decode_block(index, b, &bytes).unwrap().entries
        })
        .collect()
}

/// In so many partitions as a few blocks need.
fn in_partitions(options: RunOptions) -> RunOptions {
    RunOptions { partition_bytes: 200, ..options }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn a_block_comes_back(rows in arb_rows(60), uniform in prop::option::of(1u64..9), unit: bool, offset in 0usize..5) {
        let codec = BlockCodec::new(&schema());
        let all = entries(&rows, uniform, unit);
        // Windows of larger arrays are what a builder sees.
        let offset = offset.min(all.len() - 1);
        let want = all.slice(offset, all.len() - offset);
        let mut out = vec![0xaa; 3];
        let (length, crc) = codec.encode(&want, &mut BlockEncoder::default(), &mut out).unwrap();
        prop_assert_eq!(length, out.len() - 3);
        let got = codec.decode(&out[3..], Some(crc), Epoch::ZERO, "o", 0).unwrap();
        assert_same(&got.entries, &want);
    }

    #[test]
    fn a_run_comes_back(rows in arb_rows(300), cuts in prop::collection::vec(0usize..300, 0..6), block in 64usize..20_000, partition in 1usize..2_000) {
        let all = entries(&rows, None, false);
        let mut cuts: Vec<usize> = cuts.into_iter().map(|c| c.min(rows.len())).collect();
        cuts.extend([0, rows.len()]);
        cuts.sort_unstable();
        let parts: Vec<Entries> = cuts.windows(2).map(|w| all.slice(w[0], w[1] - w[0])).collect();
        let options = RunOptions { partition_bytes: partition, ..small_blocks(block) };
        let (run, reader) = build(&parts, options);
        let got = super::builder::concat(read_all(&run, &reader)).unwrap().unwrap();
        assert_same(&got, &all);
        prop_assert_eq!(&run.meta.min_key[..], &rows[0].0[..]);
        prop_assert_eq!(&run.meta.max_key[..], &rows[rows.len() - 1].0[..]);
        prop_assert_eq!(run.meta.min_epoch, rows.iter().map(|r| r.1).min().unwrap());
        prop_assert_eq!(run.meta.max_epoch, rows.iter().map(|r| r.1).max().unwrap());
        prop_assert_eq!(run.meta.tombstones as usize, rows.iter().filter(|r| r.2 <= 0).count());
    }

    #[test]
    fn located_blocks_hold_all_that_matches(rows in arb_rows(200), asked in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..3), 1..20), sorted: bool, partition in 1usize..2_000) {
        let all = entries(&rows, Some(1), true);
        let options = small_blocks(300).with_prefix_lengths(vec![1, 2]);
        let (run, reader) = build(&[all], RunOptions { partition_bytes: partition, ..options });
        let indexes = open(&run, &reader);
        let opened = reader.parse_index(&slice(&run, reader.meta_range())).unwrap();
        let blocks = read_all(&run, &reader);
        let mut asked = asked;
        asked.extend(rows.iter().step_by(5).map(|r| r.0.clone()));
        if sorted {
            asked.sort();
        }
        let holds = |b: &Entries, f: &dyn Fn(&[u8]) -> bool| b.keys.iter().flatten().any(f);

        let keys = BinaryArray::from_iter_values(&asked);
        let found: Vec<_> = indexes.iter().flat_map(|i| i.locate_keys(&keys, None)).collect();
        for (i, key) in asked.iter().enumerate() {
            for (b, block) in blocks.iter().enumerate() {
                if holds(block, &|k| k == &key[..]) {
                    prop_assert!(found.contains(&(i as u32, b as u32)));
                }
            }
        }
        let found: Vec<_> = indexes.iter().flat_map(|i| i.locate_prefixes(&keys)).collect();
        if opened.is_top() {
            // The top index leads to every partition that has an answer.
            let (keys, prefixes) = (opened.locate_keys(&keys, None), opened.locate_prefixes(&keys));
            for (p, index) in indexes.iter().enumerate() {
                let with = |found: &[(u32, u32)], string| found.contains(&(string, p as u32));
                for (string, key) in asked.iter().enumerate() {
                    let one = BinaryArray::from_vec(vec![key]);
                    let string = string as u32;
                    prop_assert!(index.locate_keys(&one, None).is_empty() || with(&keys, string));
                    prop_assert!(index.locate_prefixes(&one).is_empty() || with(&prefixes, string));
                }
            }
        }
        for (i, prefix) in asked.iter().enumerate() {
            for (b, block) in blocks.iter().enumerate() {
                if holds(block, &|k| k.starts_with(prefix)) {
                    prop_assert!(found.contains(&(i as u32, b as u32)));
                }
            }
        }
        for pair in asked.windows(2) {
            let bounds = (Bound::Excluded(&pair[0][..]), Bound::Included(&pair[1][..]));
            let range: Vec<u32> =
                indexes.iter().flat_map(|i| i.locate_range(bounds.0, bounds.1)).collect();
            for (b, block) in blocks.iter().enumerate() {
                if holds(block, &|k| k > &pair[0][..] && k <= &pair[1][..]) {
                    prop_assert!(range.contains(&(b as u32)));
                }
            }
        }
    }
}

#[test]
fn absent_prefixes_of_a_known_length_cost_no_block() {
    // Two rows for each even group.
    let key = |i: u32| [&(i / 2 * 2).to_be_bytes()[..], &[i as u8 % 2]].concat();
    let rows: Vec<Row> = (0..2_000).map(|i| (key(i), 5, 1, Some(i64::from(i)))).collect();
    let options = RunOptions { partition_bytes: 1 << 20, ..small_blocks(2_000) };
    let (run, _) = build(&[entries(&rows, Some(5), true)], options.with_prefix_lengths(vec![4, 5]));
    assert_eq!(run.index.prefix_lengths(), [4, 5]);
    let groups = |odd: u32| {
        BinaryArray::from_iter_values((0..1_000u32).map(|i| (i * 2 + odd).to_be_bytes()))
    };
    assert!(run.index.locate_prefixes(&groups(0)).len() >= 1_000);
    let lies = run.index.locate_prefixes(&groups(1)).len();
    assert!(lies < 30, "{lies} of 1000 absent prefixes would be read");
    let unknown =
        BinaryArray::from_iter_values((0..1_000u32).map(|i| i.to_be_bytes()[..3].to_vec()));
    assert!(run.index.locate_prefixes(&unknown).len() >= 1_000);
}

fn numbered(n: usize) -> Vec<Row> {
    (0..n).map(|i| ((i as u32).to_be_bytes().to_vec(), 5, 1, Some(i as i64))).collect()
}

#[test]
fn every_damaged_byte_is_noticed_and_named() {
    for options in [small_blocks(2_000), in_partitions(small_blocks(1_000))] {
        damage_every_byte(options);
    }
}

fn damage_every_byte(options: RunOptions) {
    let (run, reader) = build(&[entries(&numbered(40), Some(5), true)], options);
    assert!(run.index.blocks() > 1);
    let meta = reader.meta_range();
    let opened = reader.parse_index(&slice(&run, meta.clone())).unwrap();
    let partitions = opened.block_numbers().filter(|_| opened.is_top());
    let partitions: Vec<_> = partitions.map(|p| (p, reader.partition_range(&opened, p))).collect();
    for at in 0..run.bytes.len() {
        let mut damaged = run.bytes.to_vec();
        damaged[at] ^= 0x10;
        let damaged = Bytes::from(damaged);
        let error = if (at as u64) >= meta.start {
            reader.parse_index(&damaged.slice(meta.start as usize..)).map(|_| ()).unwrap_err()
        } else if let Some((p, range)) = partitions.iter().find(|p| p.1.contains(&(at as u64))) {
            let bytes = damaged.slice(range.start as usize..range.end as usize);
            reader.parse_partition(&opened, *p, &bytes).map(|_| ()).unwrap_err()
        } else {
            let mut errors = (0..run.index.blocks()).filter_map(|b| {
                let r = reader.block_range(&run.index, b);
                reader.decode_block(&run.index, b, &damaged[r.start as usize..r.end as usize]).err()
            });
            errors.next().unwrap_or_else(|| panic!("damage at byte {at} went unnoticed"))
        };
        assert!(matches!(&error, StorageError::Corrupt { object, .. } if object == "o"), "{error}");
    }
}

#[test]
fn cut_off_data_is_an_error() {
    let (run, reader) = build(&[entries(&numbered(10), Some(5), true)], small_blocks(100_000));
    let meta = reader.meta_range();
    for keep in 0..meta.end - meta.start {
        let start = meta.start as usize;
        assert!(reader.parse_index(&run.bytes.slice(start..start + keep as usize)).is_err());
    }
    let block = reader.block_range(&run.index, 0);
    for keep in 0..block.end {
        assert!(reader.decode_block(&run.index, 0, &run.bytes[..keep as usize]).is_err());
    }
}

#[test]
fn another_valid_block_is_not_taken_for_this_one() {
    let (run, reader) = build(&[entries(&numbered(40), Some(5), true)], small_blocks(2_000));
    let other = reader.block_range(&run.index, 1);
    assert!(
        reader
            .decode_block(&run.index, 0, &run.bytes[other.start as usize..other.end as usize])
            .is_err()
    );
}

#[test]
fn epochs_assigned_later_come_from_the_description() {
    let (run, reader) = build(&[entries(&numbered(10), Some(0), true)], small_blocks(500));
    assert_eq!((run.meta.min_epoch, run.meta.max_epoch), (0, 0));
    let mut meta = reader.meta().clone();
    (meta.min_epoch, meta.max_epoch) = (77, 77);
    let later = RunReader::new(meta, Arc::clone(reader.codec()));
    assert!(read_all(&run, &later).iter().all(|e| e.epochs.at(0) == Epoch(77)));
    let range = later.meta_range();
    let index = later.parse_index(&run.bytes.slice(range.start as usize..)).unwrap();
    assert_eq!(index.block_epochs(0), (Epoch(77), Epoch(77)));
}

#[test]
fn large_rows_get_blocks_of_their_own() {
    let mut rows = numbered(64);
    rows[30].0 = [rows[30].0.clone(), vec![7; 100_000]].concat();
    let (run, _) = build(&[entries(&rows, Some(1), true)], small_blocks(4_096));
    let large = (0..run.index.blocks()).find(|&b| run.index.last_key(b).len() > 100_000).unwrap();
    assert!(run.index.block_rows(large) <= 2);
}

#[test]
fn keys_below_earlier_ones_are_refused() {
    let mut builder = RunBuilder::new(Arc::new(BlockCodec::new(&schema())), small_blocks(1_000));
    let rows = numbered(10);
    builder.push(&entries(&rows[5..], Some(1), true)).unwrap();
    assert!(builder.push(&entries(&rows[..5], Some(1), true)).is_err());
}

#[test]
fn an_empty_run_has_no_blocks() {
    let (run, reader) = build(&[], small_blocks(1_000));
    assert_eq!(read_all(&run, &reader).len(), 0);
    assert!(run.index.locate_keys(&BinaryArray::from_vec(vec![b"x"]), None).is_empty());
}

#[test]
fn columns_are_not_needed() {
    let codec = Arc::new(BlockCodec::new(&Schema::empty()));
    let options = arrow::array::RecordBatchOptions::new().with_row_count(Some(2));
    let values =
        RecordBatch::try_new_with_options(Arc::new(Schema::empty()), vec![], &options).unwrap();
    let keys = BinaryArray::from_vec(vec![b"a", b"b"]);
    let all = Entries { keys, epochs: Epochs::Uniform(Epoch(1)), weights: None, values };
    let mut builder = RunBuilder::new(Arc::clone(&codec), small_blocks(16));
    builder.push(&all.slice(0, 1)).unwrap();
    builder.push(&all.slice(1, 1)).unwrap();
    let run = builder.finish().unwrap();
    let reader = RunReader::new(run.meta.clone(), codec);
    let rows: usize = read_all(&run, &reader).iter().map(|e| e.values.num_rows()).sum();
    assert_eq!(rows, 2);
}

/// So many rows of one number.
fn build_numbers(rows: u32, mut options: RunOptions) -> (FinishedRun, RunReader) {
    options.compress = false;
    let codec =
        Arc::new(BlockCodec::new(&Schema::new(vec![Field::new("v", DataType::Int64, true)])));
    let numbers: ArrayRef = Arc::new(Int64Array::from_iter_values(0..i64::from(rows)));
    let values = RecordBatch::try_new(codec.value_schema().clone(), vec![numbers]).unwrap();
    let keys = BinaryArray::from_iter_values((0..rows).map(|i| i.to_be_bytes()));
    let mut builder = RunBuilder::new(Arc::clone(&codec), options);
    builder
        .push(&Entries { keys, epochs: Epochs::Uniform(Epoch(9)), weights: None, values })
        .unwrap();
    let mut run = builder.finish().unwrap();
    run.meta.object = "o".to_string();
    let reader = RunReader::new(run.meta.clone(), codec);
    (run, reader)
}

/// A large run costs a top index, one partition and one block for a key, none of which grows with the run.
#[test]
fn the_index_of_a_large_run_has_two_levels() {
    let one_level = build_numbers(20_000, small_blocks(1_000)).0;
    let options = RunOptions { partition_bytes: 4 << 10, ..small_blocks(1_000) };
    let (run, reader) = build_numbers(20_000, options);
    let whole = one_level.meta.meta_length;
    assert!(whole > 40 << 10, "{whole}");
    let opened = reader.parse_index(&slice(&run, reader.meta_range())).unwrap();
    assert!(opened.is_top() && !opened.has_filter());
    assert_eq!((opened.rows(), run.meta.rows), (20_000, 20_000));
    assert!(run.meta.meta_length < whole / 10, "{}", run.meta.meta_length);
    let lengths: Vec<u64> = opened
        .block_numbers()
        .map(|p| {
            let range = reader.partition_range(&opened, p);
            range.end - range.start
        })
        .collect();
    assert!(
        lengths.len() > 8 && lengths.iter().all(|l| (2 << 10..6 << 10).contains(l)),
        "{lengths:?}"
    );
    // The partitions' blocks are the run's, in order, and their memory is what they say.
    let indexes = open(&run, &reader);
    let numbers: Vec<u32> = indexes.iter().flat_map(RunIndex::block_numbers).collect();
    assert!(numbers.into_iter().eq(run.index.block_numbers()));
    for index in &indexes {
        for block in index.block_numbers() {
            assert_eq!(index.block_range(block), run.index.block_range(block));
            assert_eq!(index.block_crc(block), run.index.block_crc(block));
        }
    }
}

/// The format on disk. A failure here means that old data would not be readable: give the new format
/// a new version and keep reading the old one.
#[test]
fn the_bytes_of_a_run_are_pinned() {
    let schema = Schema::new(vec![Field::new("v", DataType::Int64, true)]);
    let codec = Arc::new(BlockCodec::new(&schema));
    let values = RecordBatch::try_new(
        codec.value_schema().clone(),
        vec![Arc::new(Int64Array::from(vec![Some(1), None])) as ArrayRef],
    )
    .unwrap();
    let entries = Entries {
        keys: BinaryArray::from_vec(vec![b"a", b"b"]),
        epochs: Epochs::Uniform(Epoch(9)),
        weights: Some(vec![1, -1].into()),
        values,
    };
    let mut options = small_blocks(1_000);
    options.compress = false;
    let mut builder = RunBuilder::new(codec, options);
    builder.push(&entries).unwrap();
    let run = builder.finish().unwrap();
    let pinned = include_str!("testdata/run_v1.hex").trim_end();
    let hex: String = run.bytes.iter().map(|b| format!("{b:02x}")).collect();
    assert_eq!(hex, pinned);
}

/// The same for the top index of a run whose index has two levels, field by field: six partitions of one block each,
/// with keys of four bytes.
#[test]
fn the_bytes_of_a_run_with_partitions_are_pinned() {
    const INDEX: usize = 6 * 28 + 13 * 4 + 12 * 4 + 6 * 12 + 2;
    let options = RunOptions { partition_bytes: 60, ..small_blocks(100) };
    let (run, reader) = build_numbers(40, options.with_prefix_lengths(vec![3]));
    let top = slice(&run, reader.meta_range());
    assert_eq!(top.len(), INDEX + 40);
    let u32_at = |at: usize| u32::from_le_bytes(top[at..at + 4].try_into().unwrap());
    let u64_at = |at: usize| u64::from_le_bytes(top[at..at + 8].try_into().unwrap());
    let opened = reader.parse_index(&top).unwrap();
    let mut partition_bytes = 0;
    for p in 0..6 {
        let part = slice(&run, reader.partition_range(&opened, p as u32));
        partition_bytes += part.len();
        assert_eq!(part[part.len() - 36..][..8], *b"MRUN\x01\0\x02\0");
        assert_eq!(u32_at(p * 4), part.len() as u32);
        assert_eq!(u32_at(24 + p * 4), [7, 7, 7, 7, 7, 5][p]);
        assert_eq!(u32_at(48 + p * 4), crc32fast::hash(&part));
        assert_eq!((u64_at(72 + p * 8), u64_at(120 + p * 8)), (9, 9));
        assert_eq!((u32_at(168 + p * 8), u32_at(172 + p * 8)), (p as u32 * 8, p as u32 * 8 + 4));
        assert_eq!(top[220 + p * 8..][..4], (p as u32 * 7).to_be_bytes());
        assert_eq!(top[224 + p * 8..][..4], (p as u32 * 7 + 6).min(39).to_be_bytes());
        let start = run.index.block_range(p as u32).start;
        assert_eq!((u32_at(268 + p * 12), u64_at(272 + p * 12)), (p as u32, start));
    }
    assert_eq!((u32_at(216), top[340..342].to_vec()), (48, vec![3, 0]));
    let footer = &top[INDEX..];
    assert_eq!(footer[4..12], *b"MRUN\x02\0\x04\0");
    assert_eq!((u32_at(INDEX + 12), u32_at(INDEX + 16), u32_at(INDEX + 20)), (0, INDEX as u32, 6));
    assert_eq!((u64_at(INDEX + 24), u64_at(INDEX + 32)), (40, partition_bytes as u64));
}

/// Version 1 stays readable, whatever we write today.
#[test]
fn a_run_of_version_1_is_read() {
    let hex = include_str!("testdata/run_v1.hex").trim_end();
    let bytes: Vec<u8> = (0..hex.len())
        .step_by(2)
        .map(|i| u8::from_str_radix(&hex[i..i + 2], 16).unwrap())
        .collect();
    let meta = millrace_rpc::version::RunMeta {
        object: "o".to_string(),
        length: 482,
        meta_length: 114,
        rows: 2,
        ..Default::default()
    };
    let codec =
        Arc::new(BlockCodec::new(&Schema::new(vec![Field::new("v", DataType::Int64, true)])));
    let reader = RunReader::new(meta, codec);
    let bytes = Bytes::from(bytes);
    let index = reader.parse_index(&bytes.slice(reader.meta_range().start as usize..)).unwrap();
    assert!(
        index.has_filter()
            && index.locate_keys(&BinaryArray::from_vec(vec![b"b"]), None) == [(0, 0)]
    );
    let block = reader.block_range(&index, 0);
    let entries = reader.decode_block(&index, 0, &bytes[..block.end as usize]).unwrap().entries;
    assert_eq!(entries.keys, BinaryArray::from_vec(vec![b"a", b"b"]));
    assert_eq!((entries.weight(0), entries.weight(1), entries.epochs.at(1)), (1, -1, Epoch(9)));
    assert_eq!(
        entries.values.column(0).as_primitive::<Int64Type>(),
        &Int64Array::from(vec![Some(1), None])
    );
}
