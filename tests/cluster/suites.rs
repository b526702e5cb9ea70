//! Conformance suites through a frontend of a cluster: what a session sees does not depend on where jobs run.
//!
//! `MILLRACE_SLT=word` runs the files whose path contains the word; without it, a part of them that says most about the
//! way to the other processes.

use std::path::Path;

use millrace_sqllogictest::suite;

use crate::process::Cluster;

/// Words in the paths of the files that are run.
const PART: &[&str] = &[
    "own/event_time",
    "own/streaming",
    "own/session",
    "own/cursors",
    "own/parallelism",
    "own/ttl",
    "sql/ddl",
    "sql/dml",
    "sql/transaction",
];

#[tokio::test(flavor = "multi_thread")]
async fn suites_pass_through_a_frontend() {
    let dir = tempfile::tempdir().unwrap();
    let cluster = Cluster::start(dir.path()).await;
    let address = cluster.address("frontend1");
    let port = address.rsplit_once(':').and_then(|(_, port)| port.parse().ok()).expect("a port");
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("sqllogictest/suites");
    let given = std::env::var("MILLRACE_SLT").ok();
    let is_wanted = |path: &str| match &given {
        Some(word) => path.contains(word.as_str()),
        None => PART.iter().any(|word| path.contains(word)),
    };
    let mut failures = Vec::new();
    let mut files = suite::files(&folder).expect("the suite is part of the repository");
    files.retain(|path| is_wanted(&path.to_string_lossy()));
    assert!(!files.is_empty());
    for path in &files {
        if let Err(error) = suite::run_file(port, path).await {
            failures.push(error);
        }
    }
    assert!(
        failures.is_empty(),
        "{} of {}:\n{}",
        failures.len(),
        files.len(),
        failures.join("\n\n")
    );
}
