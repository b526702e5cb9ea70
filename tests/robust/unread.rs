//! Clients that do not read what they are sent, and are cancelled or ended meanwhile.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use object_store::memory::InMemory;
use tokio_postgres::Client;

use crate::node::{Node, NodeOptions, one};
use crate::pipeline::{READY, answers, query, run};
use crate::protocol::{raw, read_until};

/// So many rows with such a column are more than sockets hold that nobody reads from.
const ROWS: usize = 30_000;
const WIDE: &str = "repeat('x', 1000)";
/// How long a test waits for what must come.
const LIMIT: Duration = Duration::from_secs(60);

/// A server where these statements have been run, a session by messages with its process id, and one beside it.
async fn opened(sql: &str) -> (Node, TcpStream, String, Client) {
    let node = Node::start(&NodeOptions::new(Arc::new(InMemory::new()))).await;
    let client = node.run(sql).await;
    let mut socket = raw(node.port);
    let told = run(&mut socket, &[query("SELECT pg_backend_pid()")]);
    let pid = told[0].trim_start_matches("row ").to_owned();
    (node, socket, pid, client)
}

/// Returns when the answer to a query string has begun, with its beginning.
fn begin(socket: &mut TcpStream, sql: &str) -> Vec<u8> {
    socket.write_all(&query(sql)).expect("sent");
    let mut beginning = vec![0; 5];
    socket.read_exact(&mut beginning).expect("it is answered");
    beginning
}

/// The end of an answer that has begun, after its rows.
fn end(socket: &mut TcpStream, beginning: Vec<u8>) -> Vec<String> {
    let mut all = answers(&[beginning, read_until(socket, READY)].concat());
    all.retain(|answer| !answer.starts_with("row "));
    all
}

async fn cancel(client: &Client, pid: &str) {
    client.batch_execute(&format!("SELECT pg_cancel_backend({pid})")).await.expect("it is told");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_committed_is_not_said_to_be_cancelled() {
    let (_node, mut socket, pid, client) = opened("CREATE TABLE t (n int)").await;
    let rows = format!("SELECT g FROM generate_series(1, {ROWS}) AS s(g)");
    for (round, before) in ["", "SELECT 1; "].into_iter().enumerate() {
        let insert = format!("{before}INSERT INTO t {rows} RETURNING {WIDE}");
        let beginning = begin(&mut socket, &insert);
        cancel(&client, &pid).await;
        let answered = end(&mut socket, beginning);
        let told = ["error 08007".to_owned(), "ready I".to_owned()];
        assert!(answered.ends_with(&told), "{answered:?}");
        let count = one(&client, "SELECT count(*) FROM t").await;
        assert_eq!(count, ((round + 1) * ROWS).to_string());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_ends_whose_client_reads_nothing() {
    let (_node, mut socket, pid, client) = opened("SELECT 1").await;
    run(&mut socket, &[query("SELECT pg_advisory_lock(7)")]);
    begin(&mut socket, &format!("SELECT {WIDE} FROM generate_series(1, {ROWS})"));
    client.batch_execute(&format!("SELECT pg_terminate_backend({pid})")).await.expect("it is told");
    let began = Instant::now();
    while one(&client, "SELECT pg_try_advisory_lock(7)").await != "t" {
        assert!(began.elapsed() < LIMIT, "what it holds is not free");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancelled_fetch_loses_no_change() {
    let schema = format!(
        "CREATE TABLE t (n int, v text);
         INSERT INTO t SELECT g, {WIDE} FROM generate_series(1, {ROWS}) AS s(g);
         CREATE SUBSCRIPTION changes FROM t WITH (retention = '1 day')"
    );
    let (_node, mut socket, pid, client) = opened(&schema).await;
    let declare = query("DECLARE c SUBSCRIPTION CURSOR FOR changes FULL");
    assert_eq!(run(&mut socket, &[declare]), ["DECLARE CURSOR", "ready I"]);
    let beginning = begin(&mut socket, "FETCH ALL FROM c");
    cancel(&client, &pid).await;
    assert_eq!(end(&mut socket, beginning), ["error 57014", "ready I"]);
    for all in [ROWS, 0] {
        let moved = [format!("MOVE {all}"), "ready I".to_owned()];
        assert_eq!(run(&mut socket, &[query("MOVE ALL FROM c")]), moved);
    }
}
