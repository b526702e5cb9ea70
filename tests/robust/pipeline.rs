//! Statements of the extended protocol before one Sync are one transaction, as in PostgreSQL, of which the expected
//! answers are. And a session that leaves its transaction open for too long is ended.

use std::io::Write;
use std::net::TcpStream;
use std::sync::Arc;

use object_store::memory::InMemory;
use tokio_postgres::Client;

use crate::node::{Node, NodeOptions};
use crate::protocol::{raw, read_until};

/// A message of the client.
fn message(kind: u8, body: &[u8]) -> Vec<u8> {
    let mut all = vec![kind];
    all.extend_from_slice(&((body.len() + 4) as u32).to_be_bytes());
    all.extend_from_slice(body);
    all
}

/// A statement without parameters, by Parse, Bind and Execute.
fn statement(sql: &str) -> Vec<u8> {
    let parse = [b"\0", sql.as_bytes(), b"\0\0\0"].concat();
    [message(b'P', &parse), message(b'B', &[0; 8]), message(b'E', &[0; 5])].concat()
}

/// A query string.
pub fn query(sql: &str) -> Vec<u8> {
    message(b'Q', &[sql.as_bytes(), b"\0"].concat())
}

const SYNC: &[u8] = b"S\0\0\0\x04";
const FLUSH: &[u8] = b"H\0\0\0\x04";
pub const READY: &[u8] = b"Z\0\0\0\x05I";

/// What has been answered: tags, values of rows, states of errors.
pub fn answers(mut bytes: &[u8]) -> Vec<String> {
    let mut all = Vec::new();
    while let [kind, a, b, c, d, rest @ ..] = bytes {
        let length = u32::from_be_bytes([*a, *b, *c, *d]) as usize - 4;
        let (body, after) = rest.split_at(length);
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim_end_matches('\0').to_owned();
        match kind {
            b'C' => all.push(text(body)),
            b'D' => all.push(format!("row {}", text(&body[6..]))),
            b'E' => {
                let state = body.split(|c| *c == 0).find(|field| field.starts_with(b"C"));
                all.push(format!("error {}", text(&state.expect("a state")[1..])));
            }
            b'Z' => all.push(format!("ready {}", text(body))),
            b'G' => all.push("copy".to_owned()),
            _ => {}
        }
        bytes = after;
    }
    all
}

/// Sends these and reads until the session is ready and has no transaction.
pub fn run(socket: &mut TcpStream, messages: &[Vec<u8>]) -> Vec<String> {
    socket.write_all(&messages.concat()).expect("sent");
    answers(&read_until(socket, READY))
}

/// Statements and a Sync.
fn pipeline(socket: &mut TcpStream, statements: &[&str]) -> Vec<String> {
    let mut messages: Vec<Vec<u8>> = statements.iter().map(|sql| statement(sql)).collect();
    messages.push(SYNC.to_vec());
    run(socket, &messages)
}

/// The numbers in the table, as another session sees them.
async fn numbers(client: &Client) -> Vec<i32> {
    let rows = client.query("SELECT n FROM t ORDER BY n", &[]).await.expect("rows");
    rows.iter().map(|row| row.get(0)).collect()
}

/// A server with a table, a session by messages, and one to look from.
async fn opened() -> (Node, TcpStream, Client) {
    let node = Node::start(&NodeOptions::new(Arc::new(InMemory::new()))).await;
    let client = node.run("CREATE TABLE t (n int PRIMARY KEY, v int)").await;
    let socket = raw(node.port);
    (node, socket, client)
}

#[tokio::test(flavor = "multi_thread")]
async fn all_of_a_pipeline_is_committed_or_nothing() {
    let (_node, mut socket, client) = opened().await;
    let insert = |n: i32| format!("INSERT INTO t VALUES ({n}, 0)");
    let (one, two, three) = (insert(1), insert(2), insert(3));
    let done = pipeline(&mut socket, &[&one, &two, "SELECT 1 / 0", &three]);
    assert_eq!(done, ["INSERT 0 1", "INSERT 0 1", "error 22012", "ready I"]);
    assert!(numbers(&client).await.is_empty());
    // What cannot even be parsed, too; and a key that is there twice.
    let done = pipeline(&mut socket, &[&one, "SELEC 1", &two]);
    assert_eq!(done, ["INSERT 0 1", "error 42601", "ready I"]);
    let done = pipeline(&mut socket, &[&one, &two, &one]);
    assert_eq!(done, ["INSERT 0 1", "INSERT 0 1", "error 23505", "ready I"]);
    assert!(numbers(&client).await.is_empty());
    let sum = "SELECT sum(n) FROM t";
    let change = "UPDATE t SET n = n + 10 WHERE n = 1 RETURNING n";
    let done = pipeline(&mut socket, &[&one, &two, sum, change, sum]);
    let expected = [
        "INSERT 0 1",
        "INSERT 0 1",
        "row 3",
        "SELECT 1",
        "row 11",
        "UPDATE 1",
        "row 13",
        "SELECT 1",
    ];
    assert_eq!(done, [&expected[..], &["ready I"]].concat());
    assert_eq!(numbers(&client).await, [2, 11]);
}

#[tokio::test(flavor = "multi_thread")]
async fn others_see_a_pipeline_when_it_is_committed() {
    let (_node, mut socket, client) = opened().await;
    let first = [statement("INSERT INTO t VALUES (1, 0)"), FLUSH.to_vec()].concat();
    socket.write_all(&first).expect("sent");
    read_until(&mut socket, b"INSERT 0 1\0");
    assert!(numbers(&client).await.is_empty());
    assert_eq!(pipeline(&mut socket, &["INSERT INTO t VALUES (2, 0)"]), ["INSERT 0 1", "ready I"]);
    assert_eq!(numbers(&client).await, [1, 2]);
    // A query string ends it like Sync.
    let answered = run(
        &mut socket,
        &[statement("INSERT INTO t VALUES (3, 0)"), query("SELECT count(*) FROM t")],
    );
    assert_eq!(answered, ["INSERT 0 1", "row 3", "SELECT 1", "ready I"]);
    assert_eq!(numbers(&client).await, [1, 2, 3]);
    // Whoever goes without Sync has not committed.
    socket.write_all(&[statement("DELETE FROM t"), FLUSH.to_vec()].concat()).expect("sent");
    read_until(&mut socket, b"DELETE 3\0");
    drop(socket);
    assert_eq!(numbers(&client).await, [1, 2, 3]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pipeline_that_meets_another_change_is_told_at_its_end() {
    let (_node, mut socket, client) = opened().await;
    client.batch_execute("INSERT INTO t VALUES (1, 0), (2, 0)").await.expect("rows");
    let add = "UPDATE t SET v = v + 1 WHERE n = 1";
    let first = [statement("INSERT INTO t VALUES (3, 0)"), statement(add), FLUSH.to_vec()];
    socket.write_all(&first.concat()).expect("sent");
    read_until(&mut socket, b"UPDATE 1\0");
    client.batch_execute("UPDATE t SET v = 10 WHERE n = 1").await.expect("another change");
    assert_eq!(run(&mut socket, &[SYNC.to_vec()]), ["error 40001", "ready I"]);
    assert_eq!(numbers(&client).await, [1, 2]);
    assert_eq!(pipeline(&mut socket, &[add]), ["UPDATE 1", "ready I"]);
    let row = client.query_one("SELECT v FROM t WHERE n = 1", &[]).await.expect("a row");
    assert_eq!(row.get::<_, i32>(0), 11);
    // Where Sync stands behind the last statement that one is told, in place of its tag.
    let first = [statement(add), FLUSH.to_vec()].concat();
    socket.write_all(&first).expect("sent");
    read_until(&mut socket, b"UPDATE 1\0");
    client.batch_execute("UPDATE t SET v = 20 WHERE n = 1").await.expect("another change");
    let done = pipeline(&mut socket, &["SELECT 1", "INSERT INTO t VALUES (3, 0)"]);
    assert_eq!(done, ["row 1", "SELECT 1", "error 40001", "ready I"]);
    assert_eq!(numbers(&client).await, [1, 2]);
}

#[tokio::test(flavor = "multi_thread")]
async fn blocks_and_definitions_in_a_pipeline() {
    let (_node, mut socket, client) = opened().await;
    let insert = |n: i32| format!("INSERT INTO t VALUES ({n}, 0)");
    // BEGIN takes up what has come before it.
    let done = pipeline(&mut socket, &[&insert(1), "BEGIN", &insert(2), "ROLLBACK", &insert(3)]);
    let expected = ["INSERT 0 1", "BEGIN", "INSERT 0 1", "ROLLBACK", "INSERT 0 1", "ready I"];
    assert_eq!(done, expected);
    assert_eq!(numbers(&client).await, [3]);
    let done = pipeline(&mut socket, &["BEGIN", &insert(4), "COMMIT", &insert(5), "SELECT 1 / 0"]);
    assert_eq!(done.last().map(String::as_str), Some("ready I"));
    assert_eq!(numbers(&client).await, [3, 4]);
    // A definition commits what has come before it, as in a query string.
    let make = "CREATE TABLE made (a int)";
    let done = pipeline(&mut socket, &[&insert(6), make, &insert(7), "SELECT 1 / 0"]);
    let expected = ["INSERT 0 1", "CREATE TABLE", "INSERT 0 1", "error 22012", "ready I"];
    assert_eq!(done, expected);
    assert_eq!(numbers(&client).await, [3, 4, 6]);
    // What may not be in a transaction may be first.
    let done = pipeline(&mut socket, &["DISCARD ALL", &insert(8), "DISCARD ALL"]);
    assert_eq!(done, ["DISCARD ALL", "INSERT 0 1", "error 25001", "ready I"]);
    assert_eq!(numbers(&client).await, [3, 4, 6]);
}

#[tokio::test(flavor = "multi_thread")]
async fn settings_and_the_time_are_those_of_the_pipeline() {
    let (_node, mut socket, _) = opened().await;
    let shown = "SELECT current_setting('work_mem')";
    let done = pipeline(&mut socket, &["SET work_mem = '7MB'", shown, "SELECT 1 / 0"]);
    assert_eq!(done, ["SET", "row 7MB", "SELECT 1", "error 22012", "ready I"]);
    let done = pipeline(&mut socket, &["SET LOCAL work_mem = '8MB'", shown, shown]);
    assert_eq!(done, ["SET", "row 8MB", "SELECT 1", "row 8MB", "SELECT 1", "ready I"]);
    assert_eq!(pipeline(&mut socket, &[shown]), ["row 4MB", "SELECT 1", "ready I"]);
    let now = "SELECT now(), current_timestamp = now() AND transaction_timestamp() = now()";
    let done = pipeline(&mut socket, &[now, "SELECT pg_sleep(0.01)", now]);
    assert_eq!(done[0], done[4]);
    let moves = "SELECT statement_timestamp() > now(), clock_timestamp() > statement_timestamp()";
    let done = pipeline(&mut socket, &["SELECT pg_sleep(0.01)", moves]);
    assert!(done[2].contains("t\0\0\0\x01t"), "{done:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn copied_rows_belong_to_their_pipeline() {
    let (_node, mut socket, client) = opened().await;
    let begin = [statement("INSERT INTO t VALUES (1, 0)"), statement("COPY t FROM STDIN")].concat();
    let data = [message(b'd', b"2\t0\n3\t0\n"), message(b'c', b"")].concat();
    for (last, expected) in [
        ("SELECT 1 / 0", vec!["copy", "COPY 2", "error 22012", "ready I"]),
        ("SELECT 1", vec!["copy", "COPY 2", "row 1", "SELECT 1", "ready I"]),
    ] {
        socket.write_all(&begin).expect("sent");
        let rest = [data.clone(), statement(last), SYNC.to_vec()].concat();
        socket.write_all(&rest).expect("sent");
        let answered = answers(&read_until(&mut socket, READY));
        assert_eq!(answered[1..], expected);
    }
    assert_eq!(numbers(&client).await, [1, 2, 3]);
    // Also where they come first; by themselves they may be of any size.
    let data = |lines: &[u8]| [message(b'd', lines), message(b'c', b"")].concat();
    for (last, expected, kept) in [
        (Some("SELECT 1 / 0"), vec!["copy", "COPY 1", "error 22012", "ready I"], 3),
        (Some("SELECT 1"), vec!["copy", "COPY 1", "row 1", "SELECT 1", "ready I"], 4),
        (None, vec!["copy", "COPY 1", "ready I"], 5),
    ] {
        let line = format!("{kept}0\t0\n");
        let rest = last.map(statement).unwrap_or_default();
        let copy = [statement("COPY t FROM STDIN"), data(line.as_bytes()), rest, SYNC.to_vec()];
        assert_eq!(run(&mut socket, &copy), expected);
        assert_eq!(numbers(&client).await.len(), kept);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_last_copy_of_a_pipeline_is_answered_when_all_is_committed() {
    let (_node, mut socket, client) = opened().await;
    client.batch_execute("INSERT INTO t VALUES (1, 0)").await.expect("a row");
    let add = statement("UPDATE t SET v = v + 1 WHERE n = 1");
    let copy = [
        statement("COPY t FROM STDIN"),
        message(b'd', b"2\t0\n"),
        message(b'c', b""),
        SYNC.to_vec(),
    ];
    socket.write_all(&[&add[..], FLUSH].concat()).expect("sent");
    read_until(&mut socket, b"UPDATE 1\0");
    client.batch_execute("UPDATE t SET v = 10 WHERE n = 1").await.expect("another change");
    assert_eq!(run(&mut socket, &copy), ["copy", "error 40001", "ready I"]);
    assert_eq!(numbers(&client).await, [1]);
    socket.write_all(&[&add[..], FLUSH].concat()).expect("sent");
    read_until(&mut socket, b"UPDATE 1\0");
    assert_eq!(run(&mut socket, &copy), ["copy", "COPY 1", "ready I"]);
    assert_eq!(numbers(&client).await, [1, 2]);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_ways_of_a_transaction_are_those_of_the_pipeline() {
    let (_node, mut socket, client) = opened().await;
    // A block that cannot begin is none.
    let insert = "INSERT INTO t VALUES (1, 0)";
    let done = pipeline(&mut socket, &[insert, "BEGIN ISOLATION LEVEL REPEATABLE READ", "COMMIT"]);
    assert_eq!(done, ["INSERT 0 1", "error 25001", "ready I"]);
    assert!(numbers(&client).await.is_empty());
    // Without a block SET TRANSACTION is for the statements before Sync.
    let read_only = "SET TRANSACTION READ ONLY";
    assert_eq!(pipeline(&mut socket, &[read_only, insert]), ["SET", "error 25006", "ready I"]);
    let shown = "SHOW transaction_read_only";
    assert_eq!(pipeline(&mut socket, &[read_only]), ["SET", "ready I"]);
    assert_eq!(
        pipeline(&mut socket, &[shown, insert]),
        ["row off", "SHOW", "INSERT 0 1", "ready I"]
    );
    assert_eq!(numbers(&client).await, [1]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_that_is_left_open_is_ended() {
    let (_node, mut socket, client) = opened().await;
    let limit = "SET idle_in_transaction_session_timeout = '300ms'";
    assert_eq!(run(&mut socket, &[query(limit)]), ["SET", "ready I"]);
    // Time in which a statement runs does not count, nor does time without a transaction.
    assert_eq!(run(&mut socket, &[query("SELECT pg_sleep(0.5)")]), ["row ", "SELECT 1", "ready I"]);
    let block = "BEGIN; INSERT INTO t VALUES (1, 0); SELECT pg_sleep(0.5)";
    socket.write_all(&query(block)).expect("sent");
    let answered = answers(&read_until(&mut socket, b"never"));
    let expected = ["BEGIN", "INSERT 0 1", "row ", "SELECT 1", "ready T", "error 25P03"];
    assert_eq!(answered, expected);
    assert!(numbers(&client).await.is_empty());
}
