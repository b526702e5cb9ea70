//! `millrace-bench prefetch` and `adapt` at a size that shows nothing but that they work.

use std::path::{Path, PathBuf};
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

/// The JSON lines of a run that succeeds.
fn lines_of(arguments: &[&str]) -> Vec<Value> {
    let output = bench(arguments);
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{told}");
    let text = String::from_utf8_lossy(&output.stdout);
    text.lines().filter_map(|l| serde_json::from_str(l).ok()).collect()
}

/// The text of the only SVG file of a directory whose name has this in it.
fn drawn(directory: &Path, part: &str) -> String {
    let files = std::fs::read_dir(directory).expect("the directory is there");
    let paths = files.map(|file| file.expect("a file").path());
    let found: Vec<PathBuf> = paths.filter(|path| path.to_string_lossy().contains(part)).collect();
    assert_eq!(found.len(), 1, "{part}: {found:?}");
    std::fs::read_to_string(&found[0]).expect("it is text")
}

#[test]
fn every_mode_has_a_line_and_all_have_one_result_of_the_same_rows() {
    let small = ["--keys", "40000", "--rate", "100", "--seconds", "1"];
    let words =
        ["prefetch", "--quick", "--profile", "nvme", "--modes", "lookahead,fixed,bound,ram-hints"];
    let mut lines = lines_of(&[&words[..], &small[..]].concat());
    lines.retain(|line| line.get("mode").is_some());
    let modes: Vec<&str> = lines.iter().filter_map(|l| l["mode"].as_str()).collect();
    for mode in
        ["lookahead", "entry", "root", "leaf", "fixed", "ram", "bound", "ram-hot", "ram-hints"]
    {
        assert!(modes.contains(&mode), "{mode} is not among {modes:?}");
    }
    assert!(!modes.contains(&"join:input"), "a single join has no place inside the view");
    for line in &lines {
        let missing: Vec<&&str> = FIELDS.iter().filter(|f| line.get(**f).is_none()).collect();
        assert!(missing.is_empty(), "{missing:?} of {line}");
        let same = lines.iter().find(|l| l["load"] == line["load"]).expect("at least itself");
        assert_eq!(line["output_hash"], same["output_hash"]);
        assert!(line["rows"].as_u64().is_some_and(|rows| rows > 0));
    }
    let find = |mode: &str| lines.iter().find(|l| l["mode"] == mode).expect("it is there");
    assert!(find("lookahead")["hinted"].as_u64().is_some_and(|hinted| hinted > 0));
    let hot = find("ram-hints");
    assert_eq!((&hot["load"], &hot["hinted"]), (&Value::from("hot"), &Value::from(0)));
    assert!(hot["cpu_ratio"].as_f64().is_some_and(|ratio| ratio > 0.0));
    let wait = |mode: &str| find(mode)["state_wait_p50_ms"].as_f64().expect("a number");
    assert!(wait("bound") <= wait("async-timestamp"), "a bound of the run that it is taken from");
}

#[test]
fn a_place_inside_a_view_is_a_fixed_one_where_the_plan_has_it() {
    let small = ["--keys", "20000", "--rate", "100", "--seconds", "1"];
    let words =
        ["prefetch", "--quick", "--query", "join3", "--profile", "nvme", "--modes", "fixed"];
    let mut lines = lines_of(&[&words[..], &small[..]].concat());
    lines.retain(|line| line.get("mode").is_some());
    let modes: Vec<&str> = lines.iter().filter_map(|l| l["mode"].as_str()).collect();
    assert_eq!(modes, ["entry", "root", "leaf", "join:input", "fixed"], "there is no aggregate");
    let find = |mode: &str| lines.iter().find(|l| l["mode"] == mode).expect("it is there");
    assert!(find("join:input")["hinted"].as_u64().is_some_and(|hinted| hinted > 0));
    let best = find("fixed")["candidate"].as_str().expect("a name");
    assert!(modes[..4].contains(&best), "{best}");
}

#[test]
fn each_setting_of_a_sweep_over_a_disk_tier_has_a_chart_and_one_result() {
    let charts = tempfile::tempdir().expect("a temporary directory");
    let directory = charts.path().to_str().expect("a path that is text");
    let small = ["--keys", "10000", "--rate", "100", "--seconds", "1", "--svg", directory];
    let words = ["prefetch", "--quick", "--profile", "nvme", "--modes", "sync-lru,lookahead"];
    let swept = ["--disk-tier", "on", "--sweep", "cache", "--sweep-values", "2,4"];
    let mut lines = lines_of(&[&words[..], &swept, &small].concat());
    lines.retain(|line| line.get("mode").is_some());
    assert_eq!(lines.len(), 2 * 2, "{lines:?}");
    for share in [2.0, 4.0] {
        let is_of = |line: &&Value| line["state_to_cache"] == share;
        let own: Vec<&Value> = lines.iter().filter(is_of).collect();
        let modes: Vec<&str> = own.iter().filter_map(|l| l["mode"].as_str()).collect();
        assert_eq!(modes, ["sync-lru", "lookahead"]);
        assert_eq!(own[0]["output_hash"], own[1]["output_hash"]);
        let chart = drawn(charts.path(), &format!("prefetch-join1-nvme+disk-skew0-cache{share}-"));
        assert!(modes.iter().all(|mode| chart.contains(mode)), "{chart}");
    }
    assert!(lines.iter().all(|line| line["disk_tier"] == true));
    assert!(lines[1]["hints_mb"].as_f64() > Some(0.0) && lines[0]["hints_mb"] == 0.0);
}

#[test]
fn a_time_line_has_every_second_a_chart_and_an_outcome() {
    let charts = tempfile::tempdir().expect("a temporary directory");
    let directory = charts.path().to_str().expect("a path that is text");
    let words = ["adapt", "--phase", "2", "--keys", "10000", "--rate", "100", "--svg", directory];
    let lines = lines_of(&[&words[..], &["--profile", "dfs", "--faster", "nvme"]].concat());
    let seconds: Vec<&Value> = lines.iter().filter(|l| l.get("second").is_some()).collect();
    let phases: Vec<u64> = seconds.iter().filter_map(|s| s["phase"].as_u64()).collect();
    assert_eq!(phases, [1, 1, 2, 2, 3, 3]);
    assert!(seconds.iter().all(|s| s["rows"].as_u64().is_some_and(|rows| rows > 0)));
    let verdicts: Vec<&Value> = lines.iter().filter(|l| l.get("check").is_some()).collect();
    let outcome = lines.last().expect("there are lines");
    let missed = verdicts.iter().filter(|v| v["met"] == false).map(|v| v["check"].clone());
    assert_eq!((verdicts.len(), &outcome["checks"]), (4, &Value::from(4)));
    assert_eq!(outcome["missed"], missed.collect::<Value>(), "told, and no error");
    assert!(drawn(charts.path(), "adapt-lookahead-dfs").contains("keys change"));
}

#[test]
fn a_bad_argument_ends_the_program_before_anything_is_built() {
    let output = bench(&["prefetch", "--query", "join2"]);
    assert_eq!(output.status.code(), Some(1));
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(told.contains("there is no query \"join2\""), "{told}");
}
