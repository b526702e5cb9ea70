//! Two servers on one object store: a second one is refused while the first answers, or takes over where it is told to;
//! one that was stopped meanwhile answers no read from what it knew.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use millrace_sqllogictest::{Server, ServerOptions};

/// On a store that it shares with others.
fn try_start(dir: &Path, name: &str, flags: &[&str]) -> Result<Server, String> {
    let store = format!("--object-store=file://{}", dir.join("store").display());
    let mut args = vec![store, "--http=off".to_owned()];
    args.extend(flags.iter().map(|flag| (*flag).to_owned()));
    let options = ServerOptions { data_dir: dir.join(name), args, ..Default::default() };
    Server::start(Path::new(env!("CARGO_BIN_EXE_millrace")), options)
}

fn start(dir: &Path, name: &str) -> Server {
    try_start(dir, name, &[]).expect("the server starts")
}

/// The error of a server that does not start.
fn refused(dir: &Path, name: &str) -> String {
    try_start(dir, name, &[]).map(drop).expect_err("it is refused")
}

/// Waits until a server has ended by itself.
async fn ended(server: &mut Server) {
    let began = Instant::now();
    while !server.has_exited() {
        assert!(began.elapsed() < Duration::from_secs(60), "it goes on:\n{}", server.log());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
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
    tokio::time::sleep(Duration::from_secs(2)).await;

    signal(&first, "-CONT");
    for sql in ["SELECT sum(v) FROM t", "SELECT s FROM s"] {
        let answer = client.query_one(sql, &[]).await;
        assert!(answer.is_err(), "{sql} was answered by a server that no longer leads");
    }
    ended(&mut first).await;
    assert!(first.log().contains("taken over"), "{}", first.log());
    let sum = other.query_one("SELECT s FROM s", &[]).await.expect("a row");
    assert_eq!(sum.get::<_, i64>(0), 3);
}

const SETUP: &str = "CREATE TABLE t (v int); INSERT INTO t VALUES (1);
    CREATE MATERIALIZED VIEW s AS SELECT sum(v) AS s, count(*) AS n FROM t";

async fn sum_and_count(server: &Server) -> (i64, i64) {
    let client = server.connect().await.expect("a connection");
    let row = client.query_one("SELECT s, n FROM s", &[]).await.expect("a row");
    (row.get(0), row.get(1))
}

#[tokio::test]
async fn a_second_server_is_refused_while_the_first_answers() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let mut first = start(dir.path(), "first");
    let client = first.connect().await.expect("a connection");
    client.batch_execute(SETUP).await.expect("a view");
    let log = refused(dir.path(), "second");
    let address = format!("the server at 127.0.0.1:{} uses this object store", first.port);
    assert!(log.contains(&address) && log.contains("--take-over"), "{log}");
    // The first one has not even noticed.
    client.batch_execute("INSERT INTO t VALUES (2)").await.expect("a row");
    assert_eq!(sum_and_count(&first).await, (3, 2));

    // Nobody answers any more: nobody has to be asked.
    first.kill();
    let second = start(dir.path(), "second");
    assert_eq!(sum_and_count(&second).await, (3, 2));
}

#[tokio::test]
async fn a_second_server_takes_over_where_it_is_told_to() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let mut first = start(dir.path(), "first");
    let client = first.connect().await.expect("a connection");
    client.batch_execute(SETUP).await.expect("a view");
    client.batch_execute("INSERT INTO t VALUES (2)").await.expect("a row");
    let second = try_start(dir.path(), "second", &["--take-over"]).expect("it takes over");
    // Although nobody asks the first one for anything.
    ended(&mut first).await;
    assert!(first.log().contains("has taken over this object store"), "{}", first.log());
    assert_eq!(sum_and_count(&second).await, (3, 2));
    let log = refused(dir.path(), "third");
    assert!(log.contains(&format!("127.0.0.1:{}", second.port)), "{log}");
}

/// Of two that start at the same moment on an empty store, one serves.
#[tokio::test(flavor = "multi_thread")]
async fn one_of_two_servers_that_start_together_is_refused() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let started = ["first", "second"].map(|name| {
        let dir = dir.path().to_owned();
        tokio::task::spawn_blocking(move || try_start(&dir, name, &[]))
    });
    let mut servers = Vec::new();
    for one in started {
        servers.push(one.await.expect("no panic"));
    }
    let (there, refused): (Vec<_>, Vec<_>) = servers.into_iter().partition(Result::is_ok);
    let refused: Vec<String> = refused.into_iter().filter_map(Result::err).collect();
    assert_eq!((there.len(), refused.len()), (1, 1), "{refused:?}");
    assert!(refused[0].contains("uses this object store"), "{refused:?}");
    for server in there.into_iter().flatten() {
        server.connect().await.expect("it serves").batch_execute(SETUP).await.expect("a view");
    }
}

/// A process of a cluster on the store, which ends by itself.
fn refused_role(dir: &Path, role: &str) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_millrace"))
        .args([role, "--listen=127.0.0.1:0", "--http=off", "--meta=127.0.0.1:9"])
        .arg(format!("--object-store=file://{}", dir.join("store").display()))
        .arg("--data-dir")
        .arg(dir.join(role))
        .output()
        .expect("the binary runs");
    assert!(!output.status.success(), "{role} has started");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[tokio::test]
async fn a_cluster_does_not_begin_while_a_server_answers() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let first = start(dir.path(), "first");
    let client = first.connect().await.expect("a connection");
    client.batch_execute(SETUP).await.expect("a view");
    let log = refused_role(dir.path(), "meta");
    let address = format!("the server at 127.0.0.1:{} uses this object store", first.port);
    assert!(log.contains(&address) && log.contains("Stop it first"), "{log}");
    client.batch_execute("INSERT INTO t VALUES (2)").await.expect("a row");
    assert_eq!(sum_and_count(&first).await, (3, 2));
}
