//! `tests/run.py` runs these tests: what fails there fails the whole run and is named, and nothing is left out.

use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::json;

use super::read;

/// A source below the root, whether its crate has doc-tests, and the shell script that stands for its test binary.
type Binary<'a> = (&'a str, bool, &'a str);

/// Runs these instead of test binaries. `None`, outside of CI only: there is no Python.
fn run(binaries: &[Binary<'_>]) -> Option<Output> {
    let dir = tempfile::tempdir().expect("a temporary directory");
    unless_missing(command(dir.path(), binaries).output())
}

fn unless_missing<T>(python: std::io::Result<T>) -> Option<T> {
    let is_ci = std::env::var("CI").as_deref() == Ok("true");
    python.inspect_err(|error| assert!(!is_ci, "python3: {error}")).ok()
}

/// That runs these, from files in a directory that are named by their numbers.
fn command(dir: &Path, binaries: &[Binary<'_>]) -> Command {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut messages = String::new();
    for (number, (source, doctest, script)) in binaries.iter().enumerate() {
        let executable = dir.join(number.to_string());
        std::fs::write(&executable, script).expect("written");
        let package = match source.split_once('/') {
            Some((folder, _)) if !["src", "tests"].contains(&folder) => root.join(folder),
            _ => root.to_owned(),
        };
        let message = json!({
            "reason": "compiler-artifact",
            "manifest_path": package.join("Cargo.toml"),
            "target": {"src_path": root.join(source), "doctest": doctest},
            "profile": {"test": true},
            "executable": executable,
        });
        messages.push_str(&format!("{message}\n"));
    }
    messages.push_str("{\"reason\":\"build-finished\",\"success\":true}\n");
    let built = dir.join("built");
    std::fs::write(&built, messages).expect("written");
    let mut command = Command::new("python3");
    command.arg(root.join("tests/run.py")).arg(&built).arg("sh");
    command
}

#[test]
fn a_test_binary_that_fails_fails_the_run_and_is_named() {
    let binaries = [
        ("tests/docs/main.rs", false, "echo 'test first ... ok <0.1s>'"),
        ("storage/src/lib.rs", false, "echo 'test second ... FAILED <0.1s>'; exit 101"),
        ("tests/crash/main.rs", false, "echo 'test third began' >&2; kill -9 $$"),
        ("planner/tests/stream.rs", false, "echo 'test fourth ... ok <0.1s>'"),
    ];
    let Some(output) = run(&binaries) else { return };
    let said = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    for line in [
        "test first ... ok <0.1s>\n",
        "test fourth ... ok <0.1s>\n",
        "FAILED: storage/src (status 101)\n    second\n",
        "FAILED: tests/crash (status -9)\n    test third began\n",
    ] {
        assert!(said.contains(line), "{line:?} is missing:\n{said}");
    }
    assert_eq!(said.matches("FAILED: ").count(), 2, "{said}");
}

#[test]
fn a_run_that_is_ended_shows_what_was_printed_by_then() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let binaries = [
        ("storage/src/lib.rs", false, "echo 'test fifth ...'; : >\"$0.begun\"; exec sleep 600"),
        ("planner/tests/stream.rs", false, "echo 'test sixth ... ok <0.1s>'"),
    ];
    let mut command = command(dir.path(), &binaries);
    command.env("MILLRACE_TEST_BINARIES", "1").stdout(Stdio::piped());
    let Some(running) = unless_missing(command.spawn()) else { return };
    let deadline = Instant::now() + Duration::from_secs(60);
    while !dir.path().join("0.begun").exists() {
        assert!(Instant::now() < deadline, "the first one does not begin");
        std::thread::sleep(Duration::from_millis(20));
    }
    let ended = Command::new("kill").args(["-s", "TERM", &running.id().to_string()]).status();
    assert!(ended.is_ok_and(|status| status.success()), "the signal was not sent");
    let output = running.wait_with_output().expect("it ends");
    let said = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(143), "{said}");
    for part in ["storage/src, which was stopped after", "s\ntest fifth ...\n"] {
        assert!(said.contains(part), "{part:?} is missing:\n{said}");
    }
    assert!(said.contains("FAILED: not run: planner/tests/stream\nAll test binaries took 0 min"));
}

#[test]
fn a_test_binary_runs_in_the_directory_of_its_package() {
    let script = "pwd; echo $CARGO_MANIFEST_DIR";
    let binaries = [("storage/src/lib.rs", false, script), ("src/lib.rs", false, script)];
    let Some(output) = run(&binaries) else { return };
    assert!(output.status.success(), "{output:?}");
    let said = String::from_utf8_lossy(&output.stdout);
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).canonicalize().expect("it is there");
    for package in [root.join("storage"), root] {
        let package = package.display();
        assert!(said.contains(&format!("\n{package}\n{package}\n")), "{package}:\n{said}");
    }
}

#[test]
fn a_crate_with_doc_tests_is_refused() {
    let binaries = [("storage/src/lib.rs", true, "true")];
    let Some(output) = run(&binaries) else { return };
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && told.contains("doc-tests are not run"), "{output:?}");
}

#[test]
fn a_run_without_test_binaries_fails() {
    let Some(output) = run(&[]) else { return };
    assert_eq!(output.status.code(), Some(1), "{output:?}");
}

#[test]
fn test_binaries_that_nothing_may_slow_are_there() {
    let script = read("tests/run.py");
    let (_, list) = script.split_once("\nMEASURED = {\n").expect("the list is there");
    let (list, _) = list.split_once("\n}\n").expect("it ends");
    let names: Vec<&str> = list.lines().filter_map(|line| line.split('"').nth(1)).collect();
    assert!(names.contains(&"tests/cluster"), "{names:?}");
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for name in names {
        let sources = [".rs", "/main.rs", "/lib.rs"].map(|end| root.join(format!("{name}{end}")));
        assert!(sources.iter().any(|source| source.is_file()), "{name} is no test binary");
    }
}
