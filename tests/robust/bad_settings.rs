//! Flags, environment and config file with values that cannot be: an error at the start that says which, and where it is
//! from.

use std::fs;

use crate::bad_input::fails_to_start;

#[test]
fn bad_flags_and_files_are_said() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let data = dir.path().display().to_string();
    let with = |more: &[&str]| {
        let mut args = vec!["standalone", "--listen", "127.0.0.1:0", "--data-dir", &data];
        args.extend(more);
        fails_to_start(&args, &[])
    };
    let said = with(&["--memory-limit", "lots"]);
    assert!(said.contains("--memory-limit") && said.contains("lots"), "{said}");
    let said = with(&["--barrier-interval=-5s"]);
    assert!(said.contains("--barrier-interval"), "{said}");
    assert!(
        with(&["--memori-limit", "1GB"]).contains("--memory-limit"),
        "a similar flag is suggested"
    );
    let said = with(&["--object-store", "ftp://somewhere/else"]);
    assert!(said.contains("ftp") && said.contains("s3://"), "{said}");
    let said = with(&["--config", "/does/not/exist.toml"]);
    assert!(said.contains("/does/not/exist.toml"), "{said}");
    let file = dir.path().join("millrace.toml");
    fs::write(&file, "memory-limt = \"1GB\"\n").expect("written");
    let said = with(&["--config", &file.display().to_string()]);
    assert!(said.contains("memory-limt") && said.contains("millrace.toml"), "{said}");
    let said =
        fails_to_start(&["standalone", "--data-dir", &data], &[("MILLRACE_PARALLELISM", "many")]);
    assert!(said.contains("many"), "{said}");
    let said = with(&["--listen", "nowhere"]);
    assert!(said.contains("listen"), "{said}");
}

/// Each way to give a value: the error names it, and which values there are.
#[test]
fn values_out_of_range_are_said() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let data = dir.path().display().to_string();
    let file = dir.path().join("millrace.toml");
    let path = file.display().to_string();
    let begin = ["standalone", "--listen", "127.0.0.1:0", "--data-dir", data.as_str()];
    let with = |more: &[&str]| fails_to_start(&[begin.as_slice(), more].concat(), &[]);
    for (flag, value, expected) in [
        ("--barrier-interval", "2h", "1ms to 1h"),
        ("--barrier-interval", "0", "1ms to 1h"),
        ("--gc-interval", "0", "10ms to 5d"),
        ("--gc-interval", "6d", "10ms to 5d"),
        ("--authentication-timeout", "0", "100ms to 1d"),
        ("--max-clock-skew", "0", "10ms to 365d"),
        ("--memory-limit", "1MB", "at least 64MB"),
        ("--disk-cache", "8", "0, or at least 64MB"),
        ("--step-size", "0", "at least 1 byte"),
    ] {
        let key = flag.trim_start_matches("--");
        fs::write(&file, format!("{key} = \"{value}\"\n")).expect("written");
        let variable = format!("MILLRACE_{}", key.replace('-', "_").to_uppercase());
        for (said, origin) in [
            (with(&[&format!("{flag}={value}")]), "the command line"),
            (fails_to_start(&begin, &[(variable.as_str(), value)]), variable.as_str()),
            (with(&["--config", &path]), path.as_str()),
        ] {
            let refused = format!("invalid value for {flag}: \"{value}\" (expected {expected})");
            let whole = format!("{refused}; {flag} comes from ");
            assert!(said.contains(&whole) && said.contains(origin), "{said}");
        }
    }
    for number in ["flush-commits = 0", "snapshot-records = 0", "snapshot-records = 5000"] {
        fs::write(&file, number).expect("written");
        let said = with(&["--config", &path]);
        let (key, _) = number.split_once(' ').expect("a key");
        assert!(said.contains(&format!("invalid value for --{key}: ")), "{said}");
    }
    fs::write(&file, "root-password = \"\"\n").expect("written");
    let said = with(&["--config", &path]);
    assert!(said.contains("root-password") && said.contains("not empty"), "{said}");
}

#[test]
fn settings_that_do_not_go_together_are_said() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let data = dir.path().display().to_string();
    let file = dir.path().join("millrace.toml");
    let path = file.display().to_string();
    let pem = dir.path().join("any.pem").display().to_string();
    let begin = ["standalone", "--listen", "127.0.0.1:0", "--data-dir", data.as_str()];
    let with = |more: &[&str]| fails_to_start(&[begin.as_slice(), more].concat(), &[]);
    for (given, missing) in [("--tls-cert", "--tls-key"), ("--tls-key", "--tls-cert")] {
        let key = given.trim_start_matches("--");
        fs::write(&file, format!("{key} = \"{pem}\"\n")).expect("written");
        for (said, origin) in [
            (with(&[given, &pem]), "the command line"),
            (with(&["--config", &path]), path.as_str()),
        ] {
            let half = format!("{missing} is missing, and {given} is given");
            assert!(said.contains(&half) && said.contains(origin), "{said}");
        }
    }
    let said = with(&["--min-reads", "100", "--max-reads", "50"]);
    assert!(said.contains("--min-reads and --max-reads contradict each other"), "{said}");
    assert!(said.contains("100 is more than 50"), "{said}");
}
