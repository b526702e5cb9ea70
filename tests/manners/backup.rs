//! `millrace backup` and `restore`, while the server that owns the store is written to.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};

use millrace_sqllogictest::{Server, ServerOptions};
use tokio_postgres::Client;

const BINARY: &str = env!("CARGO_BIN_EXE_millrace");

/// Runs it to its end: whether it succeeded, and what it said.
fn millrace(args: &[&str]) -> (bool, String) {
    let output = Command::new(BINARY).args(args).output().expect("it runs");
    let text = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8_lossy(&text).into_owned())
}

fn url(path: &Path) -> String {
    format!("file://{}", path.display())
}

async fn one(client: &Client, sql: &str) -> i64 {
    client.query_one(sql, &[]).await.unwrap_or_else(|e| panic!("{sql}: {e:?}")).get(0)
}

/// Moves amounts between accounts and counts how often, until told to stop.
async fn transfer(client: Client, stop: Arc<AtomicBool>, done: Arc<AtomicI64>) {
    let mut n = 0;
    while !stop.load(Ordering::Relaxed) {
        let (from, to) = (n % 100, (n * 7 + 1) % 100);
        let sql = format!(
            "BEGIN; UPDATE account SET v = v - 1 WHERE id = {from};
             UPDATE account SET v = v + 1 WHERE id = {to};
             INSERT INTO transfer VALUES ({n}, repeat('x', 200)); COMMIT"
        );
        client.batch_execute(&sql).await.expect("a transfer");
        n += 1;
        done.store(n, Ordering::Release);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_made_under_load_is_one_version_and_can_be_started() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let at = |name: &str| dir.path().join(name);
    // Small thresholds: objects come and go, and are collected within a second.
    let server = Server::start(Path::new(BINARY), ServerOptions::small(&at("data")))
        .expect("the server starts");
    let client = server.connect().await.expect("a connection");
    let setup = "CREATE TABLE account (id int PRIMARY KEY, v bigint NOT NULL);
        CREATE TABLE transfer (n bigint PRIMARY KEY, filler text);
        INSERT INTO account SELECT x, 1000 FROM generate_series(0, 99) AS s(x);
        CREATE MATERIALIZED VIEW total AS SELECT sum(v)::bigint AS v, count(*) AS n FROM account;
        CREATE MATERIALIZED VIEW made AS SELECT count(*) AS n, max(n) AS last FROM transfer";
    client.batch_execute(setup).await.expect("a schema");
    let (stop, done) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicI64::new(0)));
    let other = server.connect().await.expect("a connection");
    let load = tokio::spawn(transfer(other, Arc::clone(&stop), Arc::clone(&done)));
    while done.load(Ordering::Acquire) < 50 {
        tokio::task::yield_now().await;
    }

    let (store, backup) = (url(&at("data/store")), url(&at("backup")));
    for round in 0..3 {
        let before = done.load(Ordering::Acquire);
        let target = format!("{backup}-{round}");
        let (copied, text) = millrace(&["backup", "--object-store", &store, "--to", &target]);
        assert!(copied, "{text}");
        assert!(text.contains("everything up to log record"), "{text}");
        let (again, text) = millrace(&["backup", "--object-store", &store, "--to", &target]);
        assert!(!again && text.contains("holds a database already"), "{text}");

        let place = at(&format!("restored-{round}"));
        let restored = url(&place.join("store"));
        let (made, text) = millrace(&["restore", "--from", &target, "--object-store", &restored]);
        assert!(made, "{text}");
        let options = ServerOptions { data_dir: place, ..Default::default() };
        let second = Server::start(Path::new(BINARY), options).expect("the copy starts");
        let copy = second.connect().await.expect("a connection");
        assert_eq!(one(&copy, "SELECT sum(v)::bigint FROM account").await, 100_000);
        assert_eq!(one(&copy, "SELECT v FROM total").await, 100_000);
        let rows = one(&copy, "SELECT count(*) FROM transfer").await;
        assert!(rows >= before, "{rows} of {before} acknowledged transfers");
        assert_eq!(one(&copy, "SELECT n FROM made").await, rows);
        assert_eq!(one(&copy, "SELECT max(n) + 1 FROM transfer").await, rows);
        // It goes on from there, without the original.
        copy.batch_execute("INSERT INTO transfer VALUES (-1, '')").await.expect("a row");
        assert_eq!(one(&copy, "SELECT n FROM made").await, rows + 1);
    }
    stop.store(true, Ordering::Relaxed);
    load.await.expect("no failed transfer");

    let (made, text) =
        millrace(&["restore", "--from", &url(&at("nothing")), "--object-store", &url(&at("x"))]);
    assert!(!made && text.contains("does not exist"), "{text}");
}
