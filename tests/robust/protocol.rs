//! The wire protocol under bad input: positions of errors as PostgreSQL gives them, messages that are
//! cut or forged, and panics that end one statement only.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;

use object_store::memory::InMemory;
use tokio_postgres::error::ErrorPosition;
use tokio_postgres::{Client, NoTls};

use crate::node::{Node, NodeOptions};

async fn node() -> Node {
    Node::start(&NodeOptions::new(Arc::new(InMemory::new()))).await
}

/// SQLSTATE and position of the error a statement fails with, as `state@position`.
fn error_of<T>(result: Result<T, tokio_postgres::Error>) -> String {
    let Err(e) = result else { return "no error".to_string() };
    let Some(db) = e.as_db_error() else { return e.to_string() };
    let position = match db.position() {
        Some(ErrorPosition::Original(at)) => at.to_string(),
        _ => "-".to_string(),
    };
    format!("{}@{position}", db.code().code())
}

async fn errors(client: &Client, sql: &str, extended: bool) -> String {
    match extended {
        true => match client.prepare(sql).await {
            Err(e) => error_of::<()>(Err(e)),
            Ok(statement) => error_of(client.query(&statement, &[]).await),
        },
        false => error_of(client.simple_query(sql).await),
    }
}

/// A statement that fails in RETURNING has not happened.
#[tokio::test(flavor = "multi_thread")]
async fn a_failing_returning_leaves_nothing() {
    let node = node().await;
    let client = node.run("CREATE TABLE r (id int PRIMARY KEY, n int)").await;
    for sql in [
        "INSERT INTO r VALUES (1, 0) RETURNING nope",
        "INSERT INTO r VALUES (1, 0) RETURNING 1 / n",
    ] {
        assert_ne!(errors(&client, sql, false).await, "no error");
    }
    client.batch_execute("INSERT INTO r VALUES (1, 0)").await.expect("nothing is there yet");
    assert_eq!(errors(&client, "DELETE FROM r RETURNING 1 / n", false).await, "22012@-");
    let rows = client.query("SELECT id FROM r", &[]).await.expect("rows");
    assert_eq!(rows.len(), 1);
}

/// A query that would never end gives way to its time limit, and a value nobody can hold is refused.
#[tokio::test(flavor = "multi_thread")]
async fn endless_queries_end() {
    let node = node().await;
    let client = node.run("SET statement_timeout = '500ms'").await;
    for sql in [
        "SELECT count(*) FROM generate_series(1, 1e9) a, generate_series(1, 1e9) b",
        "SELECT sum(a) FROM generate_series(1, 1000000000000) AS s(a)",
        "SELECT pg_sleep(60)",
    ] {
        let started = std::time::Instant::now();
        assert_eq!(errors(&client, sql, false).await, "57014@-", "{sql}");
        assert!(started.elapsed() < Duration::from_secs(20), "{sql}: {:?}", started.elapsed());
    }
    // A session without the limit, which counts for the SET that would lift it, too.
    let client = node.connect().await;
    let huge = errors(&client, "SELECT repeat('x', 2000000000)", false).await;
    assert!(huge.starts_with("54000") || huge.starts_with("53200"), "{huge}");
    let rows = client.query("SELECT a FROM generate_series(1, 1e9) AS s(a) LIMIT 3", &[]).await;
    assert_eq!(rows.expect("three rows").len(), 3);
}

const SCHEMA: &str = "CREATE TABLE t (id int PRIMARY KEY, v text, n int); \
                      CREATE TABLE u (id int PRIMARY KEY, v text); \
                      INSERT INTO t VALUES (7, 'seven', 7)";

/// Statements that are wrong in one place.
const WRONG: &[&str] = &[
    "SELECT * FROM WHERE x",
    "SELECT 1 +",
    "SELEC 1",
    "SELECT 'abc",
    "SELECT nope FROM t",
    "SELECT t.nope FROM t",
    "SELECT x.id FROM t",
    "SELECT * FROM nope",
    "SELECT nope(1)",
    "SELECT id FROM t JOIN u ON t.id = u.id",
    "SELECT id + true FROM t",
    "SELECT id FROM t WHERE id",
    "SELECT count(*) FROM t HAVING count(*)",
    "SELECT v, count(*) FROM t GROUP BY n",
    "SELECT 'abc'::int",
    "SELECT id FROM t WHERE id = 'abc'",
    "SELECT DATE '2024-13-01'",
    "SELECT 1::nope",
    "SELECT *\n  FROM t\n WHERE größe = 1",
    "SELECT 'größe', nope FROM t",
    "INSERT INTO nope VALUES (1)",
    "INSERT INTO t (id, nope) VALUES (1, 2)",
    "INSERT INTO t (id, id) VALUES (1, 2)",
    "INSERT INTO t (id, v) VALUES ('abc', 'x')",
    "INSERT INTO t (id, n) VALUES (1, true)",
    "INSERT INTO t (id, v) SELECT nope, v FROM u",
    "UPDATE t SET nope = 1",
    "UPDATE t SET n = true",
    "UPDATE t SET n = nope WHERE id = 1",
    "UPDATE t SET n = 1 WHERE id",
    "UPDATE nope SET n = 1",
    "DELETE FROM t WHERE nope = 1",
    "DELETE FROM t WHERE id",
    "DELETE FROM nope",
    "INSERT INTO t VALUES (1, 'a', 2) RETURNING nope",
];

#[tokio::test(flavor = "multi_thread")]
async fn errors_stand_where_postgresql_puts_them() {
    let Ok(postgres) = std::env::var("MILLRACE_TEST_POSTGRES") else {
        assert!(std::env::var("CI").as_deref() != Ok("true"), "PostgreSQL is missing in CI");
        return println!("skipped: PostgreSQL is missing");
    };
    let (judge, connection) = tokio_postgres::connect(&postgres, NoTls).await.expect("PostgreSQL");
    tokio::spawn(connection);
    judge
        .batch_execute(&format!(
            "DROP SCHEMA IF EXISTS wire_positions CASCADE; CREATE SCHEMA wire_positions; SET search_path = wire_positions; {SCHEMA}"
        ))
        .await
        .expect("a schema");
    let node = node().await;
    let ours = node.connect().await;
    for statement in SCHEMA.split("; ") {
        ours.batch_execute(statement).await.expect("a table");
    }
    let mut wrong = Vec::new();
    for sql in WRONG {
        // Alone, behind another statement of the same string, and prepared.
        let behind = format!("SELECT 'ä';\n {sql}");
        for (sql, extended) in [(*sql, false), (behind.as_str(), false), (*sql, true)] {
            let expected = errors(&judge, sql, extended).await;
            let got = errors(&ours, sql, extended).await;
            if expected != got {
                wrong.push(format!("{sql:?} (extended {extended}): {got}, PostgreSQL {expected}"));
            }
        }
    }
    judge.batch_execute("DROP SCHEMA wire_positions CASCADE").await.expect("dropped");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_panic_ends_one_statement() {
    let node = node().await;
    let client = node.connect().await;
    let other = node.connect().await;
    millrace_common::fault_injection::plant_panic(Some("the_planted_one"));
    let simple = errors(&client, "SELECT 1 AS the_planted_one", false).await;
    let extended = errors(&client, "SELECT 2 AS the_planted_one", true).await;
    millrace_common::fault_injection::plant_panic(None);
    assert_eq!((simple.as_str(), extended.as_str()), ("XX000@-", "XX000@-"));
    for client in [&client, &other] {
        let row = client.query_one("SELECT 1 AS one", &[]).await.expect("the session lives");
        assert_eq!(row.get::<_, i32>(0), 1);
    }
}

/// Says hello as `root` and returns when the server is ready.
pub fn raw(port: u16) -> TcpStream {
    let mut socket = TcpStream::connect(("127.0.0.1", port)).expect("a connection");
    socket.set_read_timeout(Some(Duration::from_secs(60))).expect("a timeout");
    let body = b"\0\x03\0\0user\0root\0database\0dev\0\0";
    let mut hello = ((body.len() + 4) as u32).to_be_bytes().to_vec();
    hello.extend_from_slice(body);
    socket.write_all(&hello).expect("sent");
    read_until(&mut socket, b"Z\0\0\0\x05I");
    socket
}

/// Reads until these bytes end what has come; what came until the server closed, if it did.
pub fn read_until(socket: &mut TcpStream, end: &[u8]) -> Vec<u8> {
    let mut all = Vec::new();
    let mut part = [0u8; 4096];
    while !all.ends_with(end) {
        match socket.read(&mut part) {
            Ok(n) if n > 0 => all.extend_from_slice(&part[..n]),
            _ => break,
        }
    }
    all
}

#[tokio::test(flavor = "multi_thread")]
async fn broken_messages_end_their_connection_only() {
    let node = node().await;
    let port = node.port;
    let broken: &[&[u8]] = &[
        b"Q\0\0\0\x06ab",
        b"Q\0\0\0\x06\xff\0",
        b"P\0\0\0\x08\0\0\xff\xff",
        b"B\0\0\0\x0e\0\0\0\0\0\x01\0\0\x7f\xff",
        b"B\0\0\0\x0c\0\0\0\0\0\0\xff\xff",
        b"E\0\0\0\x05\0",
        b"D\0\0\0\x06?\0",
        b"?\0\0\0\x04",
        b"Q\xff\xff\xff\xff",
        b"Q\0\0\0\0",
    ];
    tokio::task::spawn_blocking(move || {
        for bytes in broken {
            let mut socket = raw(port);
            socket.write_all(bytes).expect("sent");
            let answer = read_until(&mut socket, b"never");
            let text = String::from_utf8_lossy(&answer);
            assert!(text.contains("FATAL"), "{bytes:?}: {text:?}");
        }
        // Start-up packets: none of them may hang or kill anything.
        for bytes in [&b"\0\0\0\x03"[..], b"\0\0\0\x09\0\x02\0\0\0", b"\0\0\0\x0b\0\x03\0\0use"] {
            let mut socket = TcpStream::connect(("127.0.0.1", port)).expect("a connection");
            socket.write_all(bytes).expect("sent");
            let text = String::from_utf8_lossy(&read_until(&mut socket, b"never")).into_owned();
            assert!(text.contains("FATAL"), "{bytes:?}: {text:?}");
        }
    })
    .await
    .expect("no panic");
    let client = node.connect().await;
    client.simple_query("SELECT 1").await.expect("the server lives");
}
