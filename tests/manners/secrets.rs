//! Passwords and keys of one session do not show in others, and a login does not tell which users exist.

use std::io::{Read, Write};
use std::net::TcpStream;

use tokio_postgres::{Client, SimpleQueryMessage};

use super::flood::{connect, message, start, startup, state};

/// All values of a query.
async fn values(client: &Client, sql: &str) -> String {
    let rows = client.simple_query(sql).await.unwrap_or_else(|e| panic!("{sql}: {e:?}"));
    let mut text = String::new();
    for row in &rows {
        if let SimpleQueryMessage::Row(row) = row {
            let cells = (0..row.len()).filter_map(|i| row.get(i));
            cells.for_each(|c| text.extend([c, "\n"]));
        }
    }
    text
}

/// Statements of which others must not see the secret, `hunter…`; some fail, which changes nothing.
const SECRET: [&str; 5] = [
    "CREATE USER ann PASSWORD 'hunter1'",
    "ALTER USERS ann PASSWORD 'hunter2'",
    "CREATE SOURCE files (a int) WITH (connector = 'fs', path = 's3://none/at/all', s3.region = 'x', \
     s3.access_key_id = 'known', s3.secret_access_key = 'hunter3', s3.endpoint = 'http://127.0.0.1:1') \
     FORMAT PLAIN ENCODE JSON",
    "CREATE SINK out FROM t WITH (connector = 'postgres', table = 't', \
     url = 'postgresql://ann:hunter4@127.0.0.1:1/d?connect_timeout=1')",
    "CREATE SINK out FROM t WITH (connector = 'postgres', password = hunter5",
];

#[tokio::test]
async fn secrets_of_statements_are_not_shown() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let server = start(dir.path(), &[]);
    let watching = server.connect().await.expect("a connection");
    watching.batch_execute("CREATE TABLE t (id int PRIMARY KEY)").await.expect("a table");
    for (i, sql) in SECRET.into_iter().enumerate() {
        // Each stays as its session's last statement. Prepared ones are shown before they are parsed.
        let client = server.connect().await.expect("a connection");
        let made = client.execute(sql, &[]).await;
        assert!(![0, 2].contains(&i) || made.is_ok(), "{sql}: {made:?}");
        for look in [
            "SELECT * FROM pg_stat_activity",
            "SELECT * FROM millrace_catalog.relations",
            "SELECT * FROM millrace_catalog.sources",
            "SELECT * FROM pg_foreign_table",
            "SHOW JOBS",
            "SHOW SOURCES",
        ] {
            let text = values(&watching, look).await;
            assert!(!text.contains("hunter"), "{look} after {sql}:\n{text}");
        }
        let text = values(&watching, "SELECT query FROM pg_stat_activity").await;
        assert!(text.contains("***"), "{sql}: {text}");
    }
    let shown = values(&watching, "SHOW CREATE SOURCE files").await;
    assert!(shown.contains("s3.secret_access_key = '***'"), "{shown}");
    assert!(shown.contains("s3.access_key_id = 'known'"), "{shown}");
    let mut http = connect(server.http.expect("an HTTP port"));
    let request = b"GET /api/state HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
    http.write_all(request).expect("sent");
    let mut answer = String::new();
    http.read_to_string(&mut answer).expect("an answer");
    assert!(answer.contains("s3.secret_access_key") && !answer.contains("hunter"), "{answer}");
    assert!(!server.log().contains("hunter"), "{}", server.log());
}

/// The salt that this user is told, and the error at the end.
fn attempt(port: u16, user: &str) -> (String, String) {
    let mut socket = connect(port);
    let send = |socket: &mut TcpStream, body: &[u8]| {
        let length = (body.len() as u32 + 4).to_be_bytes();
        socket.write_all(&[&b"p"[..], &length, body].concat()).expect("sent");
    };
    socket.write_all(&startup(user)).expect("sent");
    assert_eq!(message(&mut socket).0, b'R');
    let first = b"n,,n=,r=nonce";
    let length = (first.len() as u32).to_be_bytes();
    send(&mut socket, &[&b"SCRAM-SHA-256\0"[..], &length, first].concat());
    let (_, challenge) = message(&mut socket);
    let challenge = String::from_utf8_lossy(&challenge[4..]).into_owned();
    let nonce = challenge.split(',').next().expect("a nonce").to_owned();
    // A proof of the right length.
    send(&mut socket, format!("c=biws,{nonce},p={}=", "A".repeat(43)).as_bytes());
    let (kind, error) = message(&mut socket);
    assert_eq!((kind, state(&error).as_str()), (b'E', "28P01"), "{user}");
    let salted = challenge.split_once(',').expect("a salt").1.to_owned();
    (salted, String::from_utf8_lossy(&error).replace(user, "?"))
}

#[test]
fn a_login_does_not_tell_whether_there_is_a_user() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let mut server = start(dir.path(), &["--require-password"]);
    let eve = attempt(server.port, "eve");
    assert_eq!(attempt(server.port, "eve"), eve, "as for a user who exists");
    let root = attempt(server.port, "root");
    assert_eq!(root.1, eve.1, "an unknown user, and one without a password");
    assert_ne!(root.0, eve.0);
    assert!(eve.0.starts_with("s=") && eve.0.ends_with(",i=4096"), "{eve:?}");
    assert_eq!(root.0.len(), eve.0.len());
    server.restart(None).expect("it starts again");
    assert_eq!(attempt(server.port, "eve"), eve, "the log keeps what it is made of");
}
