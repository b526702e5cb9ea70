//! The suite and a kill test over an S3-compatible server (`MILLRACE_TEST_S3`: its address).

use std::path::Path;
use std::time::Duration;

use millrace_sqllogictest::{Server, ServerOptions, bucket, suite};

use crate::ledger::Ledger;

/// Files that together use every kind of state; the whole suite runs on a local store.
const FILES: usize = 6;
const KILLS: u64 = 3;

fn options(endpoint: &str, bucket: &str, data_dir: &Path) -> ServerOptions {
    // The store may have been there for an earlier run.
    let bucket = &format!("{bucket}-{}", std::process::id());
    bucket::create(endpoint, bucket);
    let args = [
        "--object-store",
        &format!("s3://{bucket}/some/prefix"),
        "--memory-limit",
        "64MB",
        "--disk-cache",
        "64MB",
    ];
    ServerOptions {
        data_dir: data_dir.to_path_buf(),
        args: args.iter().map(|a| (*a).to_string()).collect(),
        env: bucket::environment(endpoint),
    }
}

fn start(options: ServerOptions) -> Server {
    Server::start(Path::new(env!("CARGO_BIN_EXE_millrace")), options).expect("the server starts")
}

#[tokio::test(flavor = "multi_thread")]
async fn suites_pass_over_s3() {
    let Some(endpoint) = bucket::endpoint() else { return };
    let dir = tempfile::tempdir().expect("a temporary directory");
    let server = start(options(&endpoint, "suites", dir.path()));
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("sqllogictest/suites/views");
    let files = suite::files(&folder).expect("the suite is part of the repository");
    let step = (files.len() / FILES).max(1);
    let mut failures = Vec::new();
    for path in files.iter().step_by(step) {
        if let Err(e) = suite::run_file(server.port, path).await {
            failures.push(e);
        }
    }
    assert!(failures.is_empty(), "{}\n\nserver log:\n{}", failures.join("\n\n"), server.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_under_load_over_s3() {
    let Some(endpoint) = bucket::endpoint() else { return };
    let dir = tempfile::tempdir().expect("a temporary directory");
    let mut server = start(options(&endpoint, "kills", dir.path()));
    let mut ledger = Ledger::create(&server).await.expect("tables and views are created");
    for round in 0..KILLS {
        let pause = Duration::from_millis(700 + 433 * round);
        tokio::join!(ledger.run(&server, pause + Duration::from_millis(50)), async {
            // The moment is the point: it is not synchronisation.
            tokio::time::sleep(pause).await;
            let pid = server.pid().to_string();
            let status = std::process::Command::new("kill").args(["-9", &pid]).status();
            assert!(status.is_ok_and(|s| s.success()), "kill -9 {pid}");
        });
        server.restart(None).expect("the server starts after a kill");
        ledger
            .verify(&server)
            .await
            .unwrap_or_else(|e| panic!("round {round}: {e}\n{}", server.log()));
    }
    // A new machine: nothing but the bucket is left.
    let fresh = tempfile::tempdir().expect("a temporary directory");
    server.kill();
    let _ = std::fs::remove_dir_all(dir.path().join("cache"));
    drop(fresh);
    server.restart(None).expect("the server starts without its cache");
    ledger
        .verify(&server)
        .await
        .unwrap_or_else(|e| panic!("without the cache: {e}\n{}", server.log()));
}
