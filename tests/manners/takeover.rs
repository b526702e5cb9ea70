//! Two servers on one object store: the one that was stopped meanwhile answers no read from what it knew.

use std::path::Path;
use std::process::Command;

use millrace_sqllogictest::{Server, ServerOptions};

/// On a store that it shares with others.
fn start(dir: &Path, name: &str) -> Server {
    let store = format!("--object-store=file://{}", dir.join("store").display());
    let options = ServerOptions {
        data_dir: dir.join(name),
        args: vec![store, "--http=off".to_owned()],
        ..Default::default()
    };
    Server::start(Path::new(env!("CARGO_BIN_EXE_millrace")), options).expect("the server starts")
}

fn signal(server: &Server, name: &str) {
    let sent = Command::new("kill").args([name, &server.pid().to_string()]).status();
    assert!(sent.is_ok_and(|s| s.success()), "kill {name}");
}

#[tokio::test]
async fn a_stopped_server_that_was_deposed_answers_no_stale_read() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let mut first = start(dir.path(), "first");
    let client = first.connect().await.expect("a connection");
    let setup = "CREATE TABLE t (v int); INSERT INTO t VALUES (1);
        CREATE MATERIALIZED VIEW s AS SELECT sum(v) AS s FROM t";
    client.batch_execute(setup).await.expect("a view");
    client.query_one("SELECT s FROM s", &[]).await.expect("a row");
    signal(&first, "-STOP");

    let second = start(dir.path(), "second");
    let other = second.connect().await.expect("a connection");
    other.batch_execute("INSERT INTO t VALUES (2)").await.expect("a row");
    // What the first server proved last counts for two seconds.
    tokio::time::sleep(std::time::Duration::from_secs(2)).await;

    signal(&first, "-CONT");
    for sql in ["SELECT sum(v) FROM t", "SELECT s FROM s"] {
        let answer = client.query_one(sql, &[]).await;
        assert!(answer.is_err(), "{sql} was answered by a server that no longer leads");
    }
    let ended = std::time::Instant::now();
    while !first.has_exited() {
        assert!(ended.elapsed().as_secs() < 60, "it goes on:\n{}", first.log());
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    assert!(first.log().contains("taken over"), "{}", first.log());
    let sum = other.query_one("SELECT s FROM s", &[]).await.expect("a row");
    assert_eq!(sum.get::<_, i64>(0), 3);
}
