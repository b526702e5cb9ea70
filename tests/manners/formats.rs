//! The object stores of other builds: one of an earlier build is opened and goes on, one of a newer build is refused by
//! every process, and nothing in it changes.
//!
//! `golden/store-format-<n>.zst` is a store that a build of log format n has written: each file with its name, its length
//! and its bytes. A format that becomes obsolete keeps its file; that of today's format is written by an early build of it. It
//! is made by `test --test manners -- --ignored make_golden_store`; `MILLRACE_GOLDEN_BINARY` names the binary.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use millrace_sqllogictest::{Server, ServerOptions};
use tokio_postgres::Client;

const BINARY: &str = env!("CARGO_BIN_EXE_millrace");
/// Of the log, at the head of each record and snapshot that this build writes.
const FORMAT: u32 = 2;
/// Of the stores that there are.
const GOLDEN: [u32; 2] = [1, 2];

/// Files by their path below a directory.
type Files = BTreeMap<String, Vec<u8>>;

fn files(dir: &Path) -> Files {
    fn add(dir: &Path, below: &Path, found: &mut Files) {
        for entry in std::fs::read_dir(below).expect("a directory").map(|e| e.expect("an entry")) {
            let path = entry.path();
            if path.is_dir() {
                add(dir, &path, found);
            } else {
                let name = path.strip_prefix(dir).expect("it is below").display().to_string();
                found.insert(name, std::fs::read(&path).expect("a file"));
            }
        }
    }
    let mut found = Files::new();
    add(dir, dir, &mut found);
    found
}

/// Space that a local store keeps aside; no object.
const RESERVE: &str = "reserve#0";

fn pack(files: &Files) -> Vec<u8> {
    let mut packed = Vec::new();
    for (name, bytes) in files {
        packed.extend((name.len() as u32).to_be_bytes());
        packed.extend(name.as_bytes());
        packed.extend((bytes.len() as u32).to_be_bytes());
        packed.extend(bytes);
    }
    zstd::encode_all(&packed[..], 19).expect("it is packed")
}

fn unpack(packed: &[u8], dir: &Path) {
    fn part<'a>(rest: &mut &'a [u8]) -> &'a [u8] {
        let (length, after) = rest.split_first_chunk::<4>().expect("a length");
        let (part, after) = after.split_at(u32::from_be_bytes(*length) as usize);
        *rest = after;
        part
    }
    let packed = zstd::decode_all(packed).expect("it was packed");
    let mut rest = &packed[..];
    while !rest.is_empty() {
        let name = String::from_utf8(part(&mut rest).to_vec()).expect("a name");
        let path = dir.join(name);
        std::fs::create_dir_all(path.parent().expect("it is in a directory")).expect("a directory");
        std::fs::write(path, part(&mut rest)).expect("a file");
    }
}

fn store_flag(store: &Path) -> String {
    format!("--object-store=file://{}", store.display())
}

/// A server on the store, and little that it keeps in memory.
fn start(binary: &Path, dir: &Path, store: &Path) -> Result<Server, String> {
    let mut options = ServerOptions::small(&dir.join("data"));
    options.args.extend([store_flag(store), "--http=off".to_owned()]);
    Server::start(binary, options)
}

const SETUP: &str = "
    CREATE USER reader PASSWORD 'a word';
    CREATE TABLE items (id int PRIMARY KEY, name text NOT NULL, price numeric(10,2), made timestamptz, tags text[], extra jsonb);
    CREATE TABLE orders (id bigint PRIMARY KEY, item int, n int, at timestamp);
    CREATE TABLE notes (word text);
    CREATE MATERIALIZED VIEW sold AS
      SELECT i.id, i.name, count(o.id) AS orders, coalesce(sum(o.n), 0) AS n FROM items i LEFT JOIN orders o ON o.item = i.id
      GROUP BY i.id, i.name;
    CREATE MATERIALIZED VIEW best AS SELECT id, n FROM sold ORDER BY n DESC, id LIMIT 3;
    CREATE MATERIALIZED VIEW hours AS
      SELECT window_start, count(*) AS orders FROM TUMBLE(orders, at, INTERVAL '1 hour') GROUP BY window_start;
    CREATE INDEX by_item ON orders (item);
    CREATE VIEW plain AS SELECT name, n FROM sold WHERE n > 10";

/// Commits after which all of this is there: in runs, in slices, in the log, and some of it deleted again.
async fn fill(client: &Client) {
    let run = async |sql: &str| {
        client.batch_execute(sql).await.unwrap_or_else(|e| panic!("{sql}: {e:?}"))
    };
    for statement in SETUP.split(';') {
        run(statement).await;
    }
    run("INSERT INTO items SELECT x, 'item ' || x, x + 0.25, TIMESTAMPTZ '2026-01-01 00:00:00Z' + x * INTERVAL '1 day',
         ARRAY['a', 'b' || x], ('{\"x\": ' || x || '}')::jsonb FROM generate_series(1, 20) AS s(x)").await;
    for round in 0..60 {
        run(&format!(
            "INSERT INTO orders SELECT {round} * 10 + x, ({round} + x) % 20 + 1, x,
             TIMESTAMP '2026-02-01 00:00:00' + {round} * INTERVAL '7 minutes' FROM generate_series(0, 9) AS s(x)"
        ))
        .await;
    }
    run("UPDATE items SET price = NULL, tags = NULL, extra = NULL WHERE id % 5 = 0").await;
    run("DELETE FROM orders WHERE id % 7 = 0").await;
    run("INSERT INTO notes VALUES ('one'), ('two'), ('two')").await;
    run("FLUSH").await;
    run("INSERT INTO notes VALUES ('three')").await;
}

/// Queries of the store, and what each says: computed by hand from the statements above.
const ANSWERS: [(&str, &str); 8] = [
    ("SELECT count(*)::text || ' ' || sum(n)::text FROM orders", "514 2315"),
    (
        "SELECT sum(orders)::text || ' ' || sum(n)::text || ' ' || count(*)::text FROM sold",
        "514 2315 20",
    ),
    (
        "SELECT count(*)::text || ' ' || sum(price)::text FROM items WHERE price IS NOT NULL",
        "16 164.00",
    ),
    (
        "SELECT (extra ->> 'x') || tags[2] || ' ' || (made AT TIME ZONE 'UTC')::text FROM items WHERE id = 7",
        "7b7 2026-01-08 00:00:00",
    ),
    ("SELECT string_agg(word, ' ' ORDER BY word) FROM notes", "one three two two"),
    ("SELECT count(*)::text || ' ' || sum(orders)::text FROM hours", "7 514"),
    ("SELECT count(*)::text FROM best", "3"),
    ("SELECT count(*)::text FROM plain", "20"),
];

/// What is computed from the tables, whatever they have.
const VIEWS: [(&str, &str); 3] = [
    (
        "SELECT id, name, orders, n FROM sold",
        "SELECT i.id, i.name, count(o.id), coalesce(sum(o.n), 0) FROM items i LEFT JOIN orders o ON o.item = i.id GROUP BY i.id, i.name",
    ),
    ("SELECT id, n FROM best", "SELECT id, n FROM sold ORDER BY n DESC, id LIMIT 3"),
    (
        "SELECT window_start, orders FROM hours",
        "SELECT date_trunc('hour', at), count(*) FROM orders GROUP BY 1",
    ),
];

async fn text(client: &Client, sql: &str) -> String {
    client.query_one(sql, &[]).await.unwrap_or_else(|e| panic!("{sql}: {e:?}")).get(0)
}

async fn check_views(client: &Client) {
    for (view, query) in VIEWS {
        for (from, without) in [(view, query), (query, view)] {
            let sql = format!("SELECT count(*)::text FROM (({from}) EXCEPT ALL ({without})) AS d");
            assert_eq!(text(client, &sql).await, "0", "{sql}");
        }
    }
}

fn golden_path(format: u32) -> PathBuf {
    let name = format!("tests/manners/golden/store-format-{format}.zst");
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
}

#[tokio::test]
#[ignore = "writes the golden file"]
async fn make_golden_store() {
    let binary = std::env::var_os("MILLRACE_GOLDEN_BINARY").unwrap_or_else(|| BINARY.into());
    let dir = tempfile::tempdir().expect("a temporary directory");
    let store = dir.path().join("store");
    let mut server = start(Path::new(&binary), dir.path(), &store).expect("the server starts");
    let client = server.connect().await.expect("a connection");
    fill(&client).await;
    for (sql, expected) in ANSWERS {
        assert_eq!(text(&client, sql).await, expected, "{sql}");
    }
    server.kill();
    let mut found = files(&store);
    found.remove(RESERVE);
    let path = golden_path(FORMAT);
    std::fs::create_dir_all(path.parent().expect("a directory")).expect("a directory");
    std::fs::write(path, pack(&found)).expect("it is written");
}

#[tokio::test]
async fn stores_of_earlier_builds_are_opened_and_go_on() {
    for format in GOLDEN {
        opens_and_goes_on(format).await;
    }
}

async fn opens_and_goes_on(format: u32) {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let store = dir.path().join("store");
    unpack(&std::fs::read(golden_path(format)).expect("the golden file"), &store);
    let kinds = files(&store);
    for kind in ["meta/log/", "meta/snapshot/", "data/"] {
        assert!(kinds.keys().any(|name| name.starts_with(kind)), "it has no {kind}");
    }
    let mut server = start(Path::new(BINARY), dir.path(), &store).expect("the server starts");
    let client = server.connect().await.expect("a connection");
    for (sql, expected) in ANSWERS {
        assert_eq!(text(&client, sql).await, expected, "{sql}");
    }
    check_views(&client).await;
    let more = "INSERT INTO orders VALUES (100000, 1, 1000, TIMESTAMP '2026-03-01 00:00:00');
        UPDATE items SET name = 'new' WHERE id = 2; DELETE FROM items WHERE id = 3; DELETE FROM orders WHERE id < 100";
    client.batch_execute(more).await.expect("changes");
    check_views(&client).await;
    let best = "SELECT id::text FROM best ORDER BY n DESC LIMIT 1";
    assert_eq!(text(&client, best).await, "1");
    let records = files(&store);
    let mut records = records.iter().filter(|(name, _)| name.starts_with("meta/log/"));
    let (name, bytes) = records.next_back().expect("there are records");
    assert_eq!(bytes[..4], FORMAT.to_be_bytes(), "{name} names the builds that may open it");
    // What was written to it now is read as well.
    server.restart(None).expect("it starts again");
    let client = server.connect().await.expect("a connection");
    assert_eq!(text(&client, best).await, "1");
    check_views(&client).await;
}

/// As a build of the next format would have written the newest record.
fn demand_newer_build(store: &Path) -> String {
    let mut records = files(store).into_iter().filter(|(name, _)| name.starts_with("meta/log/"));
    let (name, mut bytes) = records.next_back().expect("there are records");
    let needed = u32::from_be_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    assert!(needed <= FORMAT, "this build has not written it");
    bytes[..4].copy_from_slice(&(FORMAT + 1).to_be_bytes());
    std::fs::write(store.join(&name), bytes).expect("the record");
    name
}

#[tokio::test]
async fn a_store_of_a_newer_build_is_refused_by_every_process_and_unchanged() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let store = dir.path().join("store");
    unpack(&std::fs::read(golden_path(GOLDEN[0])).expect("the golden file"), &store);
    let head = demand_newer_build(&store);
    let before = files(&store);
    let cluster: &[&str] = &["--listen=127.0.0.1:0", "--http=off", "--meta=127.0.0.1:9"];
    let refuse = |role: &str, flags: &[&str]| {
        let mut command = Command::new(BINARY);
        command.arg(role).args(flags).arg(store_flag(&store));
        let output = command.output().expect("it runs");
        assert!(!output.status.success(), "{role} does not refuse it");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let needed = format!("\"{head}\" needs log format {}", FORMAT + 1);
        let known = format!("reads log formats up to {FORMAT}");
        assert!(said.contains(&needed) && said.contains(&known), "{role}: {said}");
        assert!(files(&store) == before, "{role} has changed the store");
    };
    for role in ["meta", "compute", "compactor", "frontend"] {
        let data_dir = format!("--data-dir={}", dir.path().join(role).display());
        refuse(role, &[cluster, &[&data_dir]].concat());
    }
    let data_dir = format!("--data-dir={}", dir.path().join("alone").display());
    refuse("standalone", &["--listen=127.0.0.1:0", "--http=off", &data_dir]);
    refuse("standalone", &["--listen=127.0.0.1:0", "--http=off", "--take-over", &data_dir]);
    let target = format!("--to=file://{}", dir.path().join("backup").display());
    refuse("backup", &[&target]);
}
