//! What sessions of several frontends have to do with each other.

use std::time::Duration;

use tokio::net::TcpStream;
use tokio::time::Instant;
use tokio_postgres::{Client, NoTls};

use crate::one;
use crate::process::Cluster;

/// How long a test waits for what must come.
const LIMIT: Duration = Duration::from_secs(60);
/// A statement that does not end by itself, on the threads of queries.
const LONG: &str =
    "SELECT count(*) FROM generate_series(1, 10000000) a, generate_series(1, 10000000) b";

fn code(error: &tokio_postgres::Error) -> &str {
    error.code().map_or("", |code| code.code())
}

/// Returns when the session of this process id runs a statement.
async fn await_active(observer: &Client, pid: i32) {
    let sql =
        format!("SELECT count(*) FROM pg_stat_activity WHERE pid = {pid} AND state = 'active'");
    await_true(observer, &sql).await;
}

/// Returns when a count is not 0.
pub async fn await_true(observer: &Client, sql: &str) {
    let deadline = Instant::now() + LIMIT;
    while one::<i64>(observer, sql).await == 0 {
        assert!(Instant::now() < deadline, "{sql}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_statement_is_cancelled_through_another_frontend() {
    let dir = tempfile::tempdir().unwrap();
    let cluster = Cluster::start(dir.path()).await;
    let (session, observer) =
        (cluster.connect("frontend1").await, cluster.connect("frontend1").await);
    let other = cluster.connect("frontend2").await;
    let pid: i32 = one(&session, "SELECT pg_backend_pid()").await;
    assert!(pid > 0);
    // The other one may not have been told of the first yet.
    let told = "SELECT (count(*) = 2)::int::bigint FROM millrace_catalog.processes \
                WHERE roles = ARRAY['frontend']";
    await_true(&other, told).await;

    for statement in [LONG, "SELECT pg_sleep(600)"] {
        let running = session.simple_query(statement);
        let cancel = async {
            await_active(&observer, pid).await;
            let socket = TcpStream::connect(cluster.address("frontend2")).await.unwrap();
            session.cancel_token().cancel_query_raw(socket, NoTls).await.unwrap();
        };
        let (outcome, ()) = tokio::join!(running, cancel);
        let error = outcome.expect_err("the statement never ends by itself");
        assert_eq!(code(&error), "57014", "{error:?}");
    }

    let running = session.simple_query(LONG);
    let cancel = async {
        await_active(&observer, pid).await;
        assert!(one::<bool>(&other, &format!("SELECT pg_cancel_backend({pid})")).await);
    };
    let (outcome, ()) = tokio::join!(running, cancel);
    assert_eq!(code(&outcome.expect_err("it never ends by itself")), "57014");
    assert_eq!(one::<i32>(&session, "SELECT pg_backend_pid()").await, pid, "the session goes on");

    assert!(one::<bool>(&other, &format!("SELECT pg_terminate_backend({pid})")).await);
    let is_gone =
        format!("SELECT (count(*) = 0)::int::bigint FROM pg_stat_activity WHERE pid = {pid}");
    await_true(&observer, &is_gone).await;
    session.simple_query("SELECT 1").await.expect_err("the session was ended");
    assert!(!one::<bool>(&other, "SELECT pg_cancel_backend(2147483647)").await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancel_request_with_another_key_is_not_heeded() {
    let dir = tempfile::tempdir().unwrap();
    let cluster = Cluster::start(dir.path()).await;
    let (session, observer) =
        (cluster.connect("frontend1").await, cluster.connect("frontend1").await);
    let pid: i32 = one(&session, "SELECT pg_backend_pid()").await;
    let running = session.simple_query("SELECT pg_sleep(3)");
    let cancel = async {
        await_active(&observer, pid).await;
        for name in ["frontend1", "frontend2"] {
            forge_cancel(&cluster.address(name), pid).await;
        }
    };
    let (outcome, ()) = tokio::join!(running, cancel);
    outcome.expect("nobody who may has cancelled it");
}

/// Sends cancel requests with keys that nobody was given, and returns when they have been taken.
async fn forge_cancel(address: &str, pid: i32) {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let forwarded = |kind: u8| [&[kind][..], &[0; 7], &[1], &[0; 32]].concat();
    for key in [vec![0; 4], forwarded(2), forwarded(3)] {
        let length = (12 + key.len()) as i32;
        let numbers = [length, 80_877_102, pid].map(i32::to_be_bytes).concat();
        let mut socket = TcpStream::connect(address).await.unwrap();
        socket.write_all(&[numbers, key].concat()).await.unwrap();
        assert_eq!(socket.read(&mut [0; 8]).await.unwrap(), 0, "it is closed without a word");
    }
}
