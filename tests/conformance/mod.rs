//! The conformance suite over the wire, on the real binary; and PostgreSQL's word that what it expects is right.
//!
//! `MILLRACE_SLT=word` runs the files whose path contains the word.

use std::path::{Path, PathBuf};

use millrace_sqllogictest::{Server, ServerOptions, suite};

fn suites() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("sqllogictest/suites");
    let filter = std::env::var("MILLRACE_SLT").unwrap_or_default();
    let mut files = suite::files(&folder).expect("the suite is part of the repository");
    files.retain(|f| f.to_string_lossy().contains(&filter));
    assert!(!files.is_empty(), "no suite matches \"{filter}\"");
    files
}

async fn run_all(options: ServerOptions) {
    let server = Server::start(Path::new(env!("CARGO_BIN_EXE_millrace")), options)
        .expect("the server starts");
    let mut failures = Vec::new();
    let (mut files, mut views) = (0, 0);
    for path in suites() {
        match suite::run_file(server.port, &path).await {
            Ok(n) => {
                files += 1;
                views += n;
            }
            Err(e) => failures.push(e),
        }
    }
    println!("{files} files passed, {views} views compared with their queries in batch");
    assert!(failures.is_empty(), "{}\n\nserver log:\n{}", failures.join("\n\n"), server.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn suites_pass_on_a_local_store() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    run_all(ServerOptions { data_dir: dir.path().to_path_buf(), ..ServerOptions::default() }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn suites_agree_with_postgres() {
    let Ok(address) = std::env::var("MILLRACE_TEST_POSTGRES") else {
        assert!(
            !std::env::var("CI").is_ok_and(|v| v == "true"),
            "MILLRACE_TEST_POSTGRES is not set"
        );
        return;
    };
    let mut failures = Vec::new();
    for path in suites() {
        // Files in `own/` hold what PostgreSQL does not have or does differently, with the reason.
        if path.components().any(|c| c.as_os_str() == "own") {
            continue;
        }
        if let Err(e) = suite::judge_file(&address, &path).await {
            failures.push(e);
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n\n"));
}
