//! Clients that have not proved who they are: what they may send, how long they may take, and how many of them
//! there may be before others get in all the same.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use millrace_sqllogictest::{Server, ServerOptions};
use tokio_postgres::NoTls;

/// Longer than anything here takes; a server that never answers fails the test instead of holding it up.
const LONG: Duration = Duration::from_secs(120);

pub fn start(dir: &Path, args: &[&str]) -> Server {
    start_binary(Path::new(env!("CARGO_BIN_EXE_millrace")), dir, args)
}

fn start_binary(binary: &Path, dir: &Path, args: &[&str]) -> Server {
    let args = args.iter().map(ToString::to_string).collect();
    let options = ServerOptions { data_dir: dir.join("data"), args, ..Default::default() };
    Server::start(binary, options).expect("the server starts")
}

/// A server that may open so many files.
fn start_limited(dir: &Path, files: usize, args: &[&str]) -> Server {
    let script = dir.join("limited");
    let binary = env!("CARGO_BIN_EXE_millrace");
    let text = format!("#!/bin/sh\nulimit -n {files}\nexec '{binary}' \"$@\"\n");
    std::fs::write(&script, text).expect("written");
    let mode = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(&script, mode).expect("executable");
    start_binary(&script, dir, args)
}

pub fn connect(port: u16) -> TcpStream {
    let socket = TcpStream::connect(("127.0.0.1", port)).expect("a connection");
    socket.set_read_timeout(Some(LONG)).expect("a timeout");
    socket
}

/// Whether the server closes the connection without another word.
fn is_closed(socket: &mut TcpStream) -> bool {
    match socket.read(&mut [0; 64]) {
        Ok(n) => n == 0,
        Err(e) => e.kind() == std::io::ErrorKind::ConnectionReset,
    }
}

/// A startup packet of this user.
pub fn startup(user: &str) -> Vec<u8> {
    let body = format!("\0\x03\0\0user\0{user}\0database\0dev\0\0");
    [&(body.len() as u32 + 4).to_be_bytes()[..], body.as_bytes()].concat()
}

/// The next message of the server: its kind and body.
pub fn message(socket: &mut TcpStream) -> (u8, Vec<u8>) {
    let mut head = [0; 5];
    socket.read_exact(&mut head).expect("a message");
    let length = u32::from_be_bytes([head[1], head[2], head[3], head[4]]) as usize;
    let mut body = vec![0; length - 4];
    socket.read_exact(&mut body).expect("its body");
    (head[0], body)
}

/// The SQLSTATE of an error message.
pub fn state(body: &[u8]) -> String {
    let fields = body.split(|&b| b == 0).map(String::from_utf8_lossy);
    fields.filter_map(|f| f.strip_prefix('C').map(str::to_owned)).next().unwrap_or_default()
}

/// A connection that has been asked for a password.
fn challenged(port: u16) -> TcpStream {
    let mut socket = connect(port);
    socket.write_all(&startup("root")).expect("sent");
    let (kind, body) = message(&mut socket);
    assert_eq!((kind, &body[..4]), (b'R', &10_u32.to_be_bytes()[..]), "SASL");
    socket
}

#[test]
fn a_password_message_has_a_limit() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let server = start(dir.path(), &["--require-password"]);
    for (length, expected) in [(65_537_u32, "08P01"), (0x3fff_fff0, "08P01"), (8_192, "28P01")] {
        let mut socket = challenged(server.port);
        let head = [&b"p"[..], &length.to_be_bytes()].concat();
        socket.write_all(&head).expect("sent");
        if expected == "28P01" {
            let mut body = b"SCRAM-SHA-256\0".to_vec();
            let data = length as usize - 4 - body.len() - 4;
            body.extend((data as u32).to_be_bytes());
            body.resize(length as usize - 4, b'x');
            socket.write_all(&body).expect("sent");
        }
        let (kind, body) = message(&mut socket);
        assert_eq!((kind, state(&body).as_str()), (b'E', expected), "{length} bytes");
        assert!(is_closed(&mut socket));
    }
}

#[test]
fn a_client_that_says_nothing_is_closed_at_every_step() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let args = ["--require-password", "--authentication-timeout", "2s"];
    let server = start(dir.path(), &args);
    let mut silent = connect(server.port);
    let mut halfway = connect(server.port);
    halfway.write_all(&startup("root")[..9]).expect("sent");
    for mut socket in [challenged(server.port), silent, halfway] {
        assert!(is_closed(&mut socket));
    }
    // The HTTP port: nothing, half a head, half a body.
    let http = server.http.expect("an HTTP port");
    silent = connect(http);
    assert!(is_closed(&mut silent));
    let mut head = connect(http);
    head.write_all(b"GET /health HTTP/1.1\r\nHost: localhost\r\n").expect("sent");
    let mut body = connect(http);
    let text = "POST /api/sql HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{";
    body.write_all(text.as_bytes()).expect("sent");
    for mut socket in [head, body] {
        let mut answer = String::new();
        // A reset is an end too.
        let _ = socket.read_to_string(&mut answer);
        assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 408"), "{answer}");
    }
}

#[tokio::test]
async fn a_burst_of_clients_gets_in() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let server = start(dir.path(), &["--max-pending-connections", "16"]);
    let clients = futures::future::join_all((0..80).map(|_| server.connect())).await;
    for client in clients {
        let client = client.expect("a login");
        client.query("SELECT 1", &[]).await.expect("an answer");
    }
}

/// Commits and logins go on while many times more connections than the server has descriptors wait for nothing.
#[tokio::test]
async fn silent_connections_keep_nobody_out() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let server = start_limited(dir.path(), 256, &[]);
    let within = server.connect().await.expect("a connection");
    within.batch_execute("CREATE TABLE t (id int)").await.expect("a table");
    let silent: Vec<TcpStream> = (0..400).map(|_| connect(server.port)).collect();
    let http = server.http.expect("an HTTP port");
    let waiting: Vec<TcpStream> = (0..400).map(|_| connect(http)).collect();

    for id in 1..=5 {
        let insert = format!("INSERT INTO t VALUES ({id})");
        let committed = tokio::time::timeout(LONG, within.batch_execute(&insert)).await;
        committed.expect("in time").expect("a commit");
        let client = tokio::time::timeout(LONG, server.connect()).await.expect("in time");
        let rows = client.expect("a login").query("SELECT id FROM t", &[]).await.expect("rows");
        assert_eq!(rows.len(), id);
    }
    let mut healthy = connect(http);
    let request = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
    healthy.write_all(request).expect("sent");
    let mut answer = String::new();
    healthy.read_to_string(&mut answer).expect("an answer");
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");

    // The oldest have given way to the last.
    for mut oldest in silent.into_iter().take(100).chain(waiting.into_iter().take(100)) {
        assert!(is_closed(&mut oldest));
    }
}

#[tokio::test]
async fn the_last_sessions_are_for_those_who_look_after_the_server() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let server = start(dir.path(), &["--max-connections", "12"]);
    let root = server.connect().await.expect("root");
    root.batch_execute("CREATE USER ann").await.expect("a user");
    let most = root.query_one("SHOW max_connections", &[]).await.expect("a row");
    assert_eq!(most.get::<_, &str>(0), "12");
    let enter = async |user: &str| {
        let config = format!("host=127.0.0.1 port={} user={user} dbname=dev", server.port);
        let (client, connection) = tokio_postgres::connect(&config, NoTls).await?;
        tokio::spawn(connection);
        Ok::<_, tokio_postgres::Error>(client)
    };
    let refused = |result: Result<_, tokio_postgres::Error>| {
        result.err().and_then(|e| Some(e.as_db_error()?.code().code() == "53300"))
    };
    let mut sessions = Vec::new();
    for _ in 0..8 {
        sessions.push(enter("ann").await.expect("there is room"));
    }
    assert_eq!(refused(enter("ann").await), Some(true), "three are reserved");
    for _ in 0..3 {
        sessions.push(enter("root").await.expect("for root"));
    }
    assert_eq!(refused(enter("root").await), Some(true), "there are twelve");
}

/// As many sessions as descriptors allow, not as many as were asked for.
#[test]
fn sessions_are_as_many_as_descriptors_allow() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let server = start_limited(dir.path(), 300, &["--max-connections", "5000"]);
    let log = server.log();
    assert!(log.contains("limit of open files") && log.contains("limit=300"), "{log}");
}
