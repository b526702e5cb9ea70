//! `millrace-bench prefetch` at a size that shows nothing but that it works.

use std::process::{Command, Output};

use serde_json::Value;

/// What programs read of each mode's JSON line.
const FIELDS: [&str; 22] = [
    "query",
    "profile",
    "mode",
    "rate",
    "visible_p50_ms",
    "visible_p99_ms",
    "visible_p999_ms",
    "state_wait_p50_ms",
    "state_wait_p99_ms",
    "state_wait_p999_ms",
    "max_events_per_s",
    "cpu_s",
    "cpu_s_per_million",
    "cold_keys_per_epoch",
    "late_epochs",
    "rounds",
    "hint_bytes_ratio",
    "unused_hint_ratio",
    "store_gets",
    "dollars_per_million",
    "output_hash",
    "disk_tier",
];

fn bench(arguments: &[&str]) -> Output {
    let program = env!("CARGO_BIN_EXE_millrace-bench");
    Command::new(program).args(arguments).output().expect("the program starts")
}

#[test]
fn every_mode_has_a_line_and_all_have_one_result() {
    let small = ["--keys", "40000", "--rate", "100", "--seconds", "1"];
    let words = ["prefetch", "--quick", "--profile", "nvme", "--modes", "lookahead,fixed,bound"];
    let output = bench(&[&words[..], &small[..]].concat());
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{told}");
    let text = String::from_utf8_lossy(&output.stdout);
    let parsed = text.lines().filter_map(|l| serde_json::from_str::<Value>(l).ok());
    let lines: Vec<Value> = parsed.filter(|l| l.get("mode").is_some()).collect();
    let modes: Vec<&str> = lines.iter().filter_map(|l| l["mode"].as_str()).collect();
    for mode in ["lookahead", "entry", "root", "leaf", "fixed", "ram", "bound"] {
        assert!(modes.contains(&mode), "{mode} is not among {modes:?}");
    }
    for line in &lines {
        let missing: Vec<&&str> = FIELDS.iter().filter(|f| line.get(**f).is_none()).collect();
        assert!(missing.is_empty(), "{missing:?} of {line}");
        assert_eq!(line["output_hash"], lines[0]["output_hash"]);
        assert!(line["rows"].as_u64().is_some_and(|rows| rows > 0));
    }
    let find = |mode: &str| lines.iter().find(|l| l["mode"] == mode).expect("it is there");
    assert!(find("lookahead")["hinted"].as_u64().is_some_and(|hinted| hinted > 0));
    let wait = |mode: &str| find(mode)["state_wait_p50_ms"].as_f64().expect("a number");
    assert!(wait("bound") <= wait("async-timestamp"), "a bound of the run that it is taken from");
}

#[test]
fn a_bad_argument_ends_the_program_before_anything_is_built() {
    let output = bench(&["prefetch", "--query", "join2"]);
    assert_eq!(output.status.code(), Some(1));
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(told.contains("there is no query \"join2\""), "{told}");
}
