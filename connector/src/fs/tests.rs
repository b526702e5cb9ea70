//! A split is the same rows whatever it is read in, from any offset on.

use std::io::Write;
use std::path::Path;

use arrow::array::AsArray;
use arrow::datatypes::Int64Type;
use flate2::Compression as Level;
use flate2::write::GzEncoder;
use millrace_common::SqlType;
use millrace_rpc::catalog::{Column, Format, OptionEntry};
use millrace_rpc::services::SourceParts;

use super::*;
use crate::{BadRow, Position};

fn relation(
    path: &str,
    encode: &str,
    columns: &[(&str, SqlType)],
    more: &[(&str, &str)],
) -> Relation {
    let column = |name: &str, t: SqlType| Column {
        name: name.to_owned(),
        sql_type: t.into(),
        nullable: true,
        ..Column::default()
    };
    let mut all: Vec<Column> = columns.iter().map(|(n, t)| column(n, *t)).collect();
    all.push(Column { hidden: true, ..column(crate::ROW_ID, SqlType::BigInt) });
    let fixed = [("connector", "fs"), ("path", path)];
    let options = fixed.iter().chain(more);
    Relation {
        columns: all,
        options: options
            .map(|(n, v)| OptionEntry { name: (*n).to_owned(), value: (*v).to_owned() })
            .collect(),
        format: Some(Format { format: "PLAIN".into(), encode: encode.into() }),
        ..Relation::default()
    }
}

/// Far longer than files are left alone before they are taken.
const PATIENCE: Duration = Duration::from_secs(120);

/// The log's part: offsets go where what was polled ends.
async fn discovered(source: &FsSource, mut known: Known) -> Known {
    let begun = std::time::Instant::now();
    loop {
        let polled = source.poll(&known).await.unwrap();
        let files = Arc::make_mut(&mut known.parts.files);
        for file in polled.files {
            let last = files.iter().rfind(|f| f.split == file.split);
            let start = last.map_or(0, |f| f.start + f.length);
            files.push(millrace_rpc::log::SourceFile { start, ..file });
        }
        // Files are taken when they have been left alone for a second.
        if source.settling.lock().is_empty() || begun.elapsed() > PATIENCE {
            known.offsets = polled.available;
            return known;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[derive(Debug, Default, PartialEq)]
struct Read {
    texts: Vec<String>,
    bad: Vec<String>,
}

/// Reads a split in epochs that end at `cuts`; `fresh`: by a new reader each, as after a restart.
async fn read(
    source: &FsSource,
    parts: &SourceParts,
    cuts: &[u64],
    fresh: bool,
    positions: bool,
) -> Result<Read, ConnectorError> {
    let columns: Vec<usize> = (0..source.columns.len()).collect();
    let mut out = Read::default();
    let (mut offset, mut position): (u64, Option<Position>) = (0, None);
    let open = |offset, position| {
        let at = ReadFrom { split: 0, offset, position, parts: parts.clone() };
        source.open(at, &columns)
    };
    let mut reader = open(0, None)?;
    for &until in cuts {
        if fresh {
            reader = open(offset, position.filter(|_| positions))?;
        }
        while let Some((batch, after)) = reader.read(until, 3).await? {
            assert!(after > offset && after <= until);
            offset = after;
            let ids = batch.column(batch.num_columns() - 1).as_primitive::<Int64Type>();
            for row in 0..batch.num_rows() {
                let values: Vec<String> = (0..batch.num_columns() - 1)
                    .map(|c| {
                        arrow::util::display::array_value_to_string(batch.column(c), row).unwrap()
                    })
                    .collect();
                out.texts.push(format!("{}:{}", ids.value(row), values.join("|")));
            }
        }
        position = reader.position();
        out.bad.extend(
            reader.take_bad_rows().into_iter().map(|b: BadRow| b.error.into_parts().message),
        );
    }
    Ok(out)
}

/// Every way of cutting and resuming gives what one pass gives.
async fn check_every_cut(source: &FsSource, parts: &SourceParts, end: u64) -> Read {
    let whole = read(source, parts, &[end], false, true).await.unwrap();
    for cut in 0..=end {
        for (fresh, positions) in [(false, true), (true, true), (true, false)] {
            let cuts: Vec<u64> =
                [cut, (cut + 7).min(end), end].into_iter().filter(|c| *c > 0).collect();
            let parted = read(source, parts, &cuts, fresh, positions).await.unwrap();
            assert_eq!(parted, whole, "cut at {cut}, fresh {fresh}, positions {positions}");
        }
    }
    whole
}

fn gzip(path: &Path, text: &str) {
    let mut out = GzEncoder::new(std::fs::File::create(path).unwrap(), Level::fast());
    out.write_all(text.as_bytes()).unwrap();
    out.finish().unwrap();
}

const COLUMNS: &[(&str, SqlType)] = &[("a", SqlType::Int), ("b", SqlType::Text)];

#[tokio::test]
async fn csv_files_are_one_stream_of_rows_however_they_are_cut() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    std::fs::write(at("1.csv"), "\u{feff}b,a,extra\r\nx,1,\r\n\"y\ny\",2,\nz,zwei,\n,4,\"q\"\"q\"")
        .unwrap();
    std::fs::write(at("2.csv"), "").unwrap();
    gzip(&at("3.csv.gz"), "a,b\n5,five\n\n6,six\n7\n");
    std::fs::write(at("4.csv"), "a,c\n8,wrong header\n9,again\n").unwrap();
    std::fs::write(at("5.csv"), "a,b\n10,ten\n").unwrap();
    std::fs::write(at(".hidden.csv"), "a,b\n99,no\n").unwrap();
    std::fs::write(at("other.txt"), "no").unwrap();
    let pattern = format!("{}/*.csv*", dir.path().display());
    let relation = relation(&pattern, "CSV", COLUMNS, &[("header", "true")]);
    let source = FsSource::new(&relation).unwrap();
    let known = discovered(&source, Known::default()).await;
    assert_eq!(known.parts.files.len(), 5);
    let end = known.offset(0);
    let whole = read(&source, &known.parts, &[end], false, true).await.unwrap();
    let rows: Vec<&str> = whole.texts.iter().map(|t| t.split_once(':').unwrap().1).collect();
    assert_eq!(rows, ["1|x", "2|y\ny", "4|", "5|five", "6|six", "10|ten"]);
    assert_eq!(
        whole.bad[0],
        "line 5: column \"a\": invalid input syntax for type integer: \"zwei\""
    );
    assert_eq!(whole.bad[1], "line 5: missing data for column \"b\"");
    assert!(whole.bad[2].contains("the header has no column \"b\""), "{:?}", whole.bad);
    // Row ids ascend and are unique.
    let ids: Vec<i64> =
        whole.texts.iter().map(|t| t.split_once(':').unwrap().0.parse().unwrap()).collect();
    assert!(ids.windows(2).all(|w| w[0] < w[1]));
    // Without the file with the other header, whose one error comes again with every reader.
    std::fs::remove_file(at("4.csv")).unwrap();
    let source = FsSource::new(&relation).unwrap();
    let known = discovered(&source, Known::default()).await;
    check_every_cut(&source, &known.parts, known.offset(0)).await;
}

#[tokio::test]
async fn json_lines_are_one_stream_of_rows_however_they_are_cut() {
    let dir = tempfile::tempdir().unwrap();
    let text = "{\"a\": 1, \"b\": \"x\"}\n\n{\"b\": {\"n\": [1]}}\n{\"a\": \"three\"}\nnot json\n{\"a\": 5}";
    std::fs::write(dir.path().join("1.jsonl"), text).unwrap();
    gzip(&dir.path().join("2.jsonl.gz"), "{\"a\":6}\n{\"a\":null,\"b\":\"seven\"}\n");
    let path = dir.path().display().to_string();
    let source = FsSource::new(&relation(&path, "JSON", COLUMNS, &[])).unwrap();
    let known = discovered(&source, Known::default()).await;
    let whole = check_every_cut(&source, &known.parts, known.offset(0)).await;
    let rows: Vec<&str> = whole.texts.iter().map(|t| t.split_once(':').unwrap().1).collect();
    assert_eq!(rows, ["1|x", "|{\"n\": [1]}", "5|", "6|", "|seven"]);
    assert_eq!(whole.bad.len(), 2);
    assert!(whole.bad[0].starts_with("line 4: column \"a\""), "{:?}", whole.bad);
    assert!(whole.bad[1].starts_with("line 5: invalid JSON"), "{:?}", whole.bad);
    let fails = relation(&path, "JSON", COLUMNS, &[("on_error", "fail")]);
    let fails = FsSource::new(&fails).unwrap();
    let error = read(&fails, &known.parts, &[known.offset(0)], false, true).await.unwrap_err();
    let error = SqlError::from(error).into_parts().message;
    assert!(error.contains("1.jsonl: line 4"), "{error}");
}

#[tokio::test]
async fn a_string_for_jsonb_is_a_json_string() {
    let dir = tempfile::tempdir().unwrap();
    let text = r#"{"a":1,"b":"5"}
{"a":2,"b":"true"}
{"a":3,"b":"hello"}
{"a":4,"b":{"k":"5"}}
{"a":5,"b":5}
{"a":6,"b":null}
"#;
    std::fs::write(dir.path().join("1.jsonl"), text).unwrap();
    let path = dir.path().display().to_string();
    let columns = [("a", SqlType::Int), ("b", SqlType::Jsonb)];
    let source = FsSource::new(&relation(&path, "JSON", &columns, &[])).unwrap();
    let known = discovered(&source, Known::default()).await;
    let whole = read(&source, &known.parts, &[known.offset(0)], false, true).await.unwrap();
    let rows: Vec<&str> = whole.texts.iter().map(|t| t.split_once(':').unwrap().1).collect();
    assert_eq!(rows, ["1|\"5\"", "2|\"true\"", "3|\"hello\"", "4|{\"k\": \"5\"}", "5|5", "6|"]);
    assert_eq!(whole.bad, [""; 0]);
}

#[tokio::test]
async fn readers_of_other_columns_leave_out_the_same_rows() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("x.csv"), "1,a\nbad,b\n3,c\n").unwrap();
    let path = dir.path().display().to_string();
    let source = FsSource::new(&relation(&path, "CSV", COLUMNS, &[])).unwrap();
    let known = discovered(&source, Known::default()).await;
    for columns in [vec![0, 1], vec![1], vec![2], vec![]] {
        let at = ReadFrom { split: 0, offset: 0, position: None, parts: known.parts.clone() };
        let mut reader = source.open(at, &columns).unwrap();
        let (batch, _) = reader.read(known.offset(0), 10).await.unwrap().unwrap();
        assert_eq!((batch.num_rows(), batch.num_columns()), (2, columns.len()));
        assert_eq!(reader.take_bad_rows().len(), 1);
    }
}

#[tokio::test]
async fn new_files_are_found_and_changed_ones_are_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("sub");
    let source =
        FsSource::new(&relation(&path.display().to_string(), "JSON", COLUMNS, &[("splits", "2")]))
            .unwrap();
    let missing =
        SqlError::from(source.poll(&Known::default()).await.unwrap_err()).into_parts().message;
    assert!(missing.contains("sub") && missing.ends_with("it does not exist"), "{missing}");
    std::fs::create_dir(&path).unwrap();
    let known = discovered(&source, Known::default()).await;
    assert!(known.parts.files.is_empty());
    let written = std::time::Instant::now();
    std::fs::write(path.join("a"), "{\"a\":1}\n").unwrap();
    // It was just written, and may not be complete, unless the machine stood still meanwhile.
    let taken = source.poll(&known).await.unwrap().files;
    assert!(taken.is_empty() || written.elapsed() > Duration::from_millis(900));
    let known = discovered(&source, known).await;
    std::fs::write(path.join("b"), "{\"a\":2}\n").unwrap();
    std::fs::write(path.join("c"), "{\"a\":3}\n").unwrap();
    let known = discovered(&source, known).await;
    let split_of: Vec<u32> = known.parts.files.iter().map(|f| f.split).collect();
    assert_eq!(split_of, [0, 1, 0]);
    assert_eq!((known.offset(0), known.offset(1)), (16, 8));
    assert!(source.poll(&known).await.unwrap().files.is_empty());
    std::fs::write(path.join("b"), "{\"a\":2222}\n").unwrap();
    std::fs::write(path.join("d"), "{\"a\":4}\n").unwrap();
    let begun = std::time::Instant::now();
    let (changed, known) = loop {
        assert!(begun.elapsed() < PATIENCE, "the new file is not found");
        let polled = source.poll(&known).await.unwrap();
        let changed = polled.trouble.clone().expect("a file has changed");
        if !polled.files.is_empty() {
            assert_eq!(polled.files[0].path.rsplit('/').next(), Some("d"), "the others go on");
            break (changed, known);
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    let expected = format!("file {}/b has changed since", path.display());
    assert!(changed.message.starts_with(&expected), "{}", changed.message);
    let at = ReadFrom { split: 1, offset: 0, position: None, parts: known.parts.clone() };
    let error = source.open(at, &[0]).unwrap().read(8, 10).await.unwrap_err();
    assert!(matches!(error, ConnectorError::Changed { .. }), "{error}");
    assert!(error.to_string().starts_with(&expected), "{error}");
    std::fs::remove_file(path.join("b")).unwrap();
    let polled = source.poll(&known).await.unwrap();
    assert!(polled.trouble.is_none(), "a file that is gone is missed by who reads it");
}

#[tokio::test]
async fn a_damaged_gzip_file_is_named_before_anybody_depends_on_it() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("x.json.gz");
    gzip(&file, &"{\"a\":1}\n".repeat(10_000));
    let mut bytes = std::fs::read(&file).unwrap();
    bytes.truncate(bytes.len() / 2);
    std::fs::write(&file, bytes).unwrap();
    let path = dir.path().display().to_string();
    let source = FsSource::new(&relation(&path, "JSON", COLUMNS, &[])).unwrap();
    std::fs::write(dir.path().join("y.json"), "{\"a\":1}\n").unwrap();
    let begun = std::time::Instant::now();
    let (error, files) = loop {
        assert!(begun.elapsed() < PATIENCE, "the damage is not found");
        let polled = source.poll(&Known::default()).await.unwrap();
        match polled.trouble {
            None => tokio::time::sleep(Duration::from_millis(50)).await,
            Some(e) => break (e.into_parts().message, polled.files),
        }
    };
    assert_eq!(files.len(), 1, "the other file goes on");
    assert!(error.contains("x.json.gz") && error.contains("gzip"), "{error}");
}

#[test]
fn options_are_checked() {
    let bad = |path: &str, encode: &str, more: &[(&str, &str)]| {
        FsSource::new(&relation(path, encode, COLUMNS, more)).err().unwrap().into_parts().message
    };
    assert!(bad("relative/x", "CSV", &[]).contains("not an absolute path"));
    assert!(bad("ftp://x/y", "CSV", &[]).contains("neither a path nor an s3:// URL"));
    assert!(bad("/x", "PARQUET", &[]).contains("ENCODE PARQUET"));
    assert!(bad("/x", "CSV", &[("delimiter", "ab")]).contains("single one-byte"));
    assert!(bad("/x", "CSV", &[("on_error", "panic")]).contains("on_error"));
    assert!(bad("/x", "CSV", &[("colour", "red")]).contains("unknown option \"colour\""));
    assert!(bad("/x", "CSV", &[("splits", "0")]).contains("splits"));
}
