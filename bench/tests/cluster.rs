//! `millrace-bench recovery` and `compaction-isolation` at sizes that show nothing but that they work.

use std::process::{Command, Output};

use serde_json::Value;

fn bench(arguments: &[&str]) -> Output {
    let program = env!("CARGO_BIN_EXE_millrace-bench");
    Command::new(program).args(arguments).output().expect("the program starts")
}

/// The JSON lines of a run that went well which have this field.
fn lines(output: &Output, field: &str) -> Vec<Value> {
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{told}");
    let text = String::from_utf8_lossy(&output.stdout);
    let parsed = text.lines().filter_map(|l| serde_json::from_str::<Value>(l).ok());
    parsed.filter(|l| l.get(field).is_some()).collect()
}

fn number(line: &Value, field: &str) -> f64 {
    line[field].as_f64().unwrap_or_else(|| panic!("no number {field} in {line}"))
}

#[test]
fn a_view_whose_process_is_lost_gives_out_its_row_without_reading_its_state() {
    let words = ["recovery", "--sizes", "0.004,0.008", "--runs", "1", "--profile", "s3-express"];
    let output = bench(&[&words[..], &["--steady"]].concat());
    let all = lines(&output, "mode");
    let modes: Vec<&str> = all.iter().filter_map(|l| l["mode"].as_str()).collect();
    assert_eq!(modes, ["recovery", "download", "recovery", "download"]);
    for pair in all.chunks(2) {
        let (recovery, download) = (&pair[0], &pair[1]);
        assert_eq!(number(download, "mb_read"), number(download, "state_mb"), "all of it");
        assert!(number(recovery, "rounds") >= 1.0, "its state is cold: {recovery}");
        let (row, visible) = (number(recovery, "row_ms"), number(recovery, "visible_ms"));
        assert!(0.0 < row && row <= visible, "{recovery}");
        assert!(number(recovery, "mb_read") < number(download, "mb_read"), "{recovery}");
    }
    let bars: Vec<Value> = lines(&output, "bar");
    assert_eq!(bars.len(), 7, "three of each size, and one of both: {bars:?}");
}

#[test]
fn who_merges_is_who_should() {
    let words = ["compaction-isolation", "--groups", "2000", "--rate", "4000", "--runs", "1"];
    let small = ["--flush-size", "64KB", "--seconds", "4"];
    let output = bench(&[&words[..], &small[..]].concat());
    let all = lines(&output, "mode");
    let modes: Vec<&str> = all.iter().filter_map(|l| l["mode"].as_str()).collect();
    assert_eq!(modes, ["none", "compactor", "compute"]);
    for line in &all {
        assert!(number(line, "samples") > 0.0 && line["update"]["p99_ms"].is_number(), "{line}");
        assert_eq!(line["update_ratio"].is_null(), line["mode"] == "none", "{line}");
    }
    assert_eq!(lines(&output, "bar").len(), 2);
}

#[test]
fn a_bad_argument_ends_the_program_before_anything_is_built() {
    for (words, message) in [
        (&["recovery", "--sizes", "1,0.5"][..], "in ascending order"),
        (&["recovery", "--profile", "tape"], "no profile \"tape\""),
        (&["compaction-isolation", "--flush-size", "much"], "--flush-size"),
    ] {
        let output = bench(words);
        assert_eq!(output.status.code(), Some(1), "{words:?}");
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(told.contains(message), "{told}");
    }
}
