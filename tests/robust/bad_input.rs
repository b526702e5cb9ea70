//! Bad input, bad surroundings: each a clear error with its SQLSTATE, nothing lost, the server still up.

use std::collections::HashMap;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use futures::SinkExt;
use futures::stream::BoxStream;
use millrace_sqllogictest::{Server, ServerOptions};
use millrace_storage::object::{MeterOptions, Metered};
use millrace_storage::sim::{Faults, Profile, SimStore};
use object_store::memory::InMemory;
use object_store::path::Path as ObjectPath;
use object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    PutMode, PutMultipartOptions, PutOptions, PutPayload, PutResult,
};
use tempfile::TempDir;

use crate::node::{Node, NodeOptions};

const BINARY: &str = env!("CARGO_BIN_EXE_millrace");

fn start(dir: &Path, args: &[&str]) -> Server {
    let options = ServerOptions {
        data_dir: dir.to_path_buf(),
        args: args.iter().map(|a| (*a).to_string()).collect(),
        env: HashMap::new(),
    };
    Server::start(Path::new(BINARY), options).expect("the server starts")
}

fn server() -> (TempDir, Server) {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let server = start(dir.path(), &[]);
    (dir, server)
}

/// What psql prints for these statements, errors in full.
fn psql(port: u16, sql: &str) -> String {
    let output = Command::new("psql")
        .args(["-X", "-h", "127.0.0.1", "-p", &port.to_string(), "-U", "root", "-d", "dev"])
        .args(["-v", "VERBOSITY=verbose", "-At", "-c", sql])
        .output()
        .expect("psql is installed");
    text(&output)
}

/// What psql prints for a COPY FROM STDIN of this input.
fn copied(port: u16, sql: &str, input: &str) -> String {
    let mut child = Command::new("psql")
        .args(["-X", "-h", "127.0.0.1", "-p", &port.to_string(), "-U", "root", "-d", "dev"])
        .args(["-v", "VERBOSITY=verbose", "-c", sql])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("psql is installed");
    let mut stdin = child.stdin.take().expect("a pipe");
    stdin.write_all(input.as_bytes()).expect("psql reads");
    drop(stdin);
    text(&child.wait_with_output().expect("psql ends"))
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

/// The statement fails with this SQLSTATE and says all of `words`; afterwards the server answers.
#[track_caller]
fn refused(port: u16, sql: &str, state: &str, words: &[&str]) {
    let output = psql(port, sql);
    assert!(output.contains(&format!("ERROR:  {state}:")), "{sql}: not {state} but: {output}");
    for word in words {
        assert!(output.contains(word), "{sql}: \"{word}\" is not in: {output}");
    }
    assert_eq!(psql(port, "SELECT 1").trim(), "1", "after {sql}");
}

/// A start that fails: exit status and what it says.
pub fn fails_to_start(args: &[&str], env: &[(&str, &str)]) -> String {
    let output = Command::new(BINARY)
        .args(args)
        .envs(env.iter().copied())
        .output()
        .expect("the binary runs");
    assert!(!output.status.success(), "started with {args:?}");
    text(&output)
}

#[test]
fn malformed_sql_says_where() {
    let (_dir, server) = server();
    refused(
        server.port,
        "SELECT 1 FORM t",
        "42601",
        &["LINE 1: SELECT 1 FORM t", "                      ^"],
    );
    refused(server.port, "SELECT 1\nFROM t\nWHER x = 1", "42601", &["LINE 3: WHER x = 1"]);
    refused(server.port, "CREATE TABEL t (a int)", "42601", &["\"TABEL\""]);
    refused(server.port, "SELECT 'abc", "42601", &[]);
}

#[test]
fn unknown_names_come_with_a_suggestion() {
    let (_dir, server) = server();
    psql(server.port, "CREATE TABLE customers (id int, full_name varchar)");
    refused(
        server.port,
        "SELECT * FROM custmers",
        "42P01",
        &["\"custmers\" does not exist", "customers"],
    );
    refused(server.port, "SELECT ful_name FROM customers", "42703", &["\"ful_name\"", "full_name"]);
    refused(server.port, "SELECT upperr(full_name) FROM customers", "42883", &["upperr"]);
    refused(server.port, "INSERT INTO custmers VALUES (1)", "42P01", &["custmers"]);
    refused(server.port, "DROP TABLE custmers", "42P01", &["custmers"]);
    refused(server.port, "SET statement_timeut = 1", "42704", &["statement_timeut"]);
}

#[test]
fn type_errors_are_named() {
    let (_dir, server) = server();
    psql(server.port, "CREATE TABLE t (k int, name varchar, at timestamp)");
    refused(server.port, "SELECT name + 1 FROM t", "42883", &["operator does not exist"]);
    refused(
        server.port,
        "SELECT k = 'abc' FROM t",
        "22P02",
        &["invalid input syntax for type integer: \"abc\""],
    );
    refused(server.port, "INSERT INTO t VALUES ('x')", "22P02", &["integer"]);
    refused(server.port, "INSERT INTO t VALUES (1, 'a', '2024-13-45')", "22008", &["2024-13-45"]);
    refused(server.port, "SELECT 1 FROM t WHERE k", "42804", &["boolean"]);
}

#[test]
fn overflow_in_dml_changes_nothing() {
    let (_dir, server) = server();
    let port = server.port;
    psql(port, "CREATE TABLE t (k int PRIMARY KEY, v int, s smallint)");
    psql(port, "INSERT INTO t VALUES (1, 10, 1), (2, 2147483647, 1)");
    refused(port, "UPDATE t SET v = v + 1", "22003", &["integer out of range"]);
    refused(port, "INSERT INTO t VALUES (3, 99999999999, 1)", "22003", &[]);
    refused(port, "INSERT INTO t VALUES (3, 1, 40000)", "22003", &["smallint"]);
    refused(port, "UPDATE t SET v = v / 0", "22012", &["division by zero"]);
    assert_eq!(psql(port, "SELECT k, v, s FROM t ORDER BY k").trim(), "1|10|1\n2|2147483647|1");
}

#[test]
fn a_duplicate_key_is_named_and_nothing_is_inserted() {
    let (_dir, server) = server();
    let port = server.port;
    psql(port, "CREATE TABLE t (k int PRIMARY KEY, v int)");
    psql(port, "INSERT INTO t VALUES (1, 1)");
    refused(
        port,
        "INSERT INTO t VALUES (7, 7), (1, 2)",
        "23505",
        &["t_pkey", "Key (k)=(1) already exists"],
    );
    refused(port, "INSERT INTO t VALUES (8, 7), (8, 2)", "23505", &["Key (k)=(8)"]);
    refused(port, "INSERT INTO t VALUES (NULL, 2)", "23502", &["\"k\""]);
    assert_eq!(psql(port, "SELECT * FROM t").trim(), "1|1");
}

#[test]
fn a_line_of_copy_that_breaks_a_constraint_is_named() {
    let (_dir, server) = server();
    let port = server.port;
    psql(port, "CREATE TABLE c (id int PRIMARY KEY, n text NOT NULL, d int NOT NULL DEFAULT 7)");
    psql(port, "INSERT INTO c VALUES (9, 'there')");
    let fails = |columns: &str, input: &str, state: &str, message: &str, context: &str| {
        let context = format!("CONTEXT:  COPY c, line {context}\n");
        let copy = format!("COPY c {columns} FROM STDIN (FORMAT csv)");
        let output = copied(port, &copy, input);
        for word in [message, &format!("ERROR:  {state}:"), &context] {
            assert!(output.contains(word), "{input}: \"{word}\" is not in: {output}");
        }
        assert_eq!(psql(port, "SELECT id, n, d FROM c").trim(), "9|there|7", "after {input}");
    };
    let ids = "(id, n)";
    fails(ids, "1,a\n2,\n3,c\n", "23502", "null value in column \"n\"", "2: \"2,\"");
    // The first line counts, not the first column.
    fails(ids, "1,\n,b\n", "23502", "null value in column \"n\"", "1: \"1,\"");
    // A default is for columns that are not given.
    fails("", "1,a,3\n2,b,\n", "23502", "null value in column \"d\"", "2: \"2,b,\"");
    fails("(id)", "1\n2\n", "23502", "null value in column \"n\"", "1: \"1\"");
    // Lines of the file, also after a value that has several.
    fails(ids, "1,\"a\nb\"\n2,\n", "23502", "Failing row contains (2, null, 7).", "3: \"2,\"");
    fails(ids, "1,a\n2,b\n1,c\n", "23505", "Key (id)=(1) already exists.", "3");
    fails(ids, "1,a\n9,b\n3,c\n", "23505", "Key (id)=(9) already exists.", "2");
    // Far into the input, beyond the rows that go on together.
    let many: String = (100..60_000).map(|id| format!("{id},x\n")).collect();
    let late = format!("{many}60000,\n");
    fails(ids, &late, "23502", "null value in column \"n\"", "59901: \"60000,\"");
    fails(ids, &format!("{many}100,x\n"), "23505", "Key (id)=(100) already exists.", "59901");
    assert_eq!(copied(port, "COPY c (id, n) FROM STDIN (FORMAT csv)", "1,a\n").trim(), "COPY 1");
    assert_eq!(psql(port, "SELECT d FROM c WHERE id = 1").trim(), "7");
}

#[tokio::test]
async fn a_line_of_copy_in_a_block_is_named_too() {
    let (_dir, server) = server();
    let client = server.connect().await.expect("a connection");
    client.batch_execute("CREATE TABLE c (id int PRIMARY KEY, n text NOT NULL)").await.expect("c");
    for (input, place) in [("1\ta\n2\t\\N\n", "2: \"2\t\\N\""), ("1\ta\n2\tb\n1\tc\n", "3")] {
        client.batch_execute("BEGIN").await.expect("a block");
        let sink = client.copy_in("COPY c FROM STDIN").await.expect("COPY begins");
        futures::pin_mut!(sink);
        sink.send(bytes::Bytes::from(input)).await.expect("data");
        let e = sink.finish().await.expect_err(input);
        let context = e.as_db_error().and_then(|e| e.where_()).unwrap_or_default();
        assert_eq!(context, format!("COPY c, line {place}"), "{input}");
        client.batch_execute("ROLLBACK").await.expect("a rollback");
    }
}

#[test]
fn a_source_option_that_is_missing_or_unknown_is_named() {
    let (_dir, server) = server();
    let port = server.port;
    refused(port, "CREATE SOURCE s (auction bigint)", "22023", &["\"connector\""]);
    refused(
        port,
        "CREATE SOURCE s (auction bigint) WITH (connector = 'nexmark')",
        "22023",
        &["missing option", "table"],
    );
    refused(
        port,
        "CREATE SOURCE s (auction bigint) WITH (connector = 'kafkaa')",
        "22023",
        &["kafkaa", "nexmark"],
    );
    let unknown = "CREATE SOURCE s (auction bigint) WITH (connector = 'nexmark', table = 'bid', colour = 'red')";
    refused(port, unknown, "22023", &["unknown option \"colour\"", "event.num"]);
    let value = "CREATE SOURCE s (auction bigint) WITH (connector = 'nexmark', table = 'bid', event.num = 'many')";
    refused(port, value, "22023", &["event.num"]);
    assert_eq!(psql(port, "SHOW JOBS").trim(), "");
}

fn segments(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("readable") {
        let path = entry.expect("readable").path();
        if path.is_dir() {
            segments(&path, found);
        } else if path.extension().is_some_and(|e| e == "seg") {
            found.push(path);
        }
    }
}

#[test]
fn a_corrupt_block_is_named_and_other_tables_are_served() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let mut server = start(dir.path(), &["--memory-limit", "64MB"]);
    psql(server.port, "CREATE TABLE good (k int PRIMARY KEY)");
    psql(server.port, "CREATE TABLE bad (k int PRIMARY KEY, filler varchar)");
    psql(server.port, "INSERT INTO good VALUES (1), (2)");
    let loaded = psql(
        server.port,
        "INSERT INTO bad SELECT x, repeat('x', 300) || x FROM generate_series(1, 50000) AS s(x)",
    );
    assert_eq!(loaded.trim(), "INSERT 0 50000");
    server.kill();
    let mut files = Vec::new();
    segments(dir.path(), &mut files);
    assert!(!files.is_empty(), "the rows are in segments");
    for path in &files {
        let mut bytes = fs::read(path).expect("readable");
        let at = bytes.len() / 3;
        bytes[at] ^= 0x10;
        fs::write(path, bytes).expect("writable");
    }
    server.restart(None).expect("the server starts all the same");
    refused(server.port, "SELECT count(filler) FROM bad", "XX001", &["data/"]);
    assert_eq!(psql(server.port, "SELECT count(*) FROM good").trim(), "2");
    psql(server.port, "INSERT INTO good VALUES (3)");
    assert_eq!(psql(server.port, "SELECT count(*) FROM good").trim(), "3");
}

/// A small file system of its own, where this process may mount one.
struct SmallDisk(TempDir);

impl SmallDisk {
    fn mount() -> Option<SmallDisk> {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", "size=24m", "tmpfs"])
            .arg(dir.path())
            .output()
            .is_ok_and(|o| o.status.success());
        mounted.then_some(SmallDisk(dir))
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // The directory stays behind when it cannot be unmounted.
        let _ = Command::new("umount").arg("-l").arg(self.0.path()).output();
    }
}

#[test]
fn a_full_disk_refuses_writes_and_loses_nothing() {
    let Some(disk) = SmallDisk::mount() else {
        println!(
            "skipped: no file system can be mounted here; the store's own tests cover a full disk"
        );
        return;
    };
    let ballast = disk.0.path().join("ballast");
    fs::write(&ballast, vec![7u8; 12 << 20]).expect("room for the ballast");
    let mut server = start(&disk.0.path().join("data"), &["--memory-limit", "64MB"]);
    let port = server.port;
    psql(port, "CREATE TABLE t (k int PRIMARY KEY, filler varchar)");
    let mut rows = 0;
    let full = loop {
        // Text that does not compress.
        let sql = format!(
            "INSERT INTO t SELECT x, md5('a' || x) || md5('b' || x) || md5('c' || x) FROM generate_series({}, {}) AS s(x)",
            rows + 1,
            rows + 20_000
        );
        let output = psql(port, &sql);
        if !output.starts_with("INSERT") {
            break output;
        }
        rows += 20_000;
        assert!(rows < 2_000_000, "the disk does not get full");
    };
    assert!(full.contains("ERROR:  53100:"), "{full}");
    assert_eq!(psql(port, "SELECT count(*) FROM t").trim(), rows.to_string());
    // It also starts without space, says so, and answers reads.
    let rest = disk.0.path().join("rest");
    let mut file = fs::File::create(&rest).expect("a name takes no space");
    while std::io::Write::write_all(&mut file, &[7u8; 512]).is_ok() {}
    server.restart(None).expect("the server starts");
    let port = server.port;
    assert!(server.log().contains("no space left: reads are served"), "{}", server.log());
    assert_eq!(psql(port, "SELECT count(*) FROM t").trim(), rows.to_string());
    fs::remove_file(&rest).expect("removed");
    fs::remove_file(&ballast).expect("removed");
    let until = Instant::now() + Duration::from_secs(120);
    loop {
        let output = psql(port, "INSERT INTO t VALUES (-1, 'there is room again')");
        // A statement whose fate was not known may have been committed in the end.
        if output.starts_with("INSERT 0 1") || output.contains("23505") {
            break;
        }
        assert!(Instant::now() < until, "{output}");
        std::thread::sleep(Duration::from_millis(200));
    }
    assert_eq!(psql(port, "SELECT count(*) FROM t").trim(), (rows + 1).to_string());
}

#[test]
fn a_port_in_use_is_said() {
    let (_dir, server) = server();
    let other = tempfile::tempdir().expect("a temporary directory");
    let address = format!("127.0.0.1:{}", server.port);
    let data = other.path().display().to_string();
    let said = fails_to_start(&["standalone", "--listen", &address, "--data-dir", &data], &[]);
    assert!(said.contains(&address) && said.contains("--listen"), "{said}");
    assert_eq!(psql(server.port, "SELECT 1").trim(), "1");
}

#[test]
fn a_data_directory_in_use_is_said() {
    let (dir, server) = server();
    let data = dir.path().display().to_string();
    let said = fails_to_start(&["standalone", "--listen", "127.0.0.1:0", "--data-dir", &data], &[]);
    assert!(said.contains(&data) && said.contains("another process"), "{said}");
    psql(server.port, "CREATE TABLE t (k int)");
    assert_eq!(psql(server.port, "INSERT INTO t VALUES (1)").trim(), "INSERT 0 1");
}

/// psql against a node in this process, without blocking its runtime.
async fn psql_to(node: &Node, sql: &str) -> String {
    let (port, sql) = (node.port, sql.to_string());
    tokio::task::spawn_blocking(move || psql(port, &sql)).await.expect("no panic")
}

/// As a server wraps its store, with short time-outs.
fn metered(store: &SimStore) -> Arc<dyn ObjectStore> {
    let options = MeterOptions {
        request_timeout: Duration::from_millis(250),
        attempts: 2,
        ..MeterOptions::default()
    };
    Metered::wrap(Arc::new(store.clone()), options)
}

/// With the store in this condition a write fails or is told to be in doubt, everything else stays up,
/// and when the store is well again writes go on and all that was acknowledged is there.
async fn survives(faults: Faults) {
    let store = SimStore::in_memory(Profile::INSTANT, 5);
    let node = Node::start(&NodeOptions::new(metered(&store))).await;
    assert_eq!(psql_to(&node, "CREATE TABLE t (k int PRIMARY KEY)").await.trim(), "CREATE TABLE");
    assert_eq!(psql_to(&node, "INSERT INTO t VALUES (1)").await.trim(), "INSERT 0 1");
    store.set_faults(faults);
    let output = psql_to(&node, "SET statement_timeout = '3s'; INSERT INTO t VALUES (2)").await;
    let codes = ["57014", "58030", "08007", "40003", "57P03", "40001"];
    assert!(codes.iter().any(|c| output.contains(&format!("ERROR:  {c}:"))), "{output}");
    let read = "SELECT count(*) FROM t WHERE k = 1";
    let any = psql_to(&node, &format!("SET read_freshness = 'any'; {read}")).await;
    assert_eq!(any.lines().last(), Some("1"), "what is in memory is read");
    let fresh = psql_to(&node, &format!("SET read_wait_timeout = '1s'; {read}")).await;
    assert!(fresh.contains("ERROR:  58030:"), "another server may lead by now: {fresh}");
    store.set_faults(Faults::default());
    let until = Instant::now() + Duration::from_secs(120);
    loop {
        let output = psql_to(&node, "INSERT INTO t VALUES (3)").await;
        if output.starts_with("INSERT 0 1") || output.contains("23505") {
            break;
        }
        assert!(Instant::now() < until, "{output}");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    // Row 2 may have been committed in the end: its fate was not known.
    assert_eq!(psql_to(&node, "SELECT count(*) FROM t WHERE k IN (1, 3)").await.trim(), "2");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_hangs_is_survived() {
    survives(Faults { hang: 1.0, ..Faults::default() }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_refuses_is_survived() {
    survives(Faults { error: 1.0, ..Faults::default() }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_times_out_at_the_start_is_said() {
    let store = SimStore::in_memory(Profile::INSTANT, 5);
    store.set_faults(Faults { hang: 1.0, ..Faults::default() });
    let begun = Instant::now();
    let Err(error) = Node::try_start(&NodeOptions::new(metered(&store))).await else {
        panic!("a server started without a store");
    };
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
    assert!(
        error.to_string().contains("no answer") || error.to_string().contains("did not answer"),
        "{error}"
    );
}

/// A store that has forgotten what create-if-absent means.
#[derive(Debug)]
struct Careless(InMemory);

impl std::fmt::Display for Careless {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("careless store")
    }
}

#[async_trait]
impl ObjectStore for Careless {
    async fn put_opts(
        &self,
        location: &ObjectPath,
        payload: PutPayload,
        mut opts: PutOptions,
    ) -> object_store::Result<PutResult> {
        opts.mode = PutMode::Overwrite;
        self.0.put_opts(location, payload, opts).await
    }

    async fn put_multipart_opts(
        &self,
        location: &ObjectPath,
        opts: PutMultipartOptions,
    ) -> object_store::Result<Box<dyn MultipartUpload>> {
        self.0.put_multipart_opts(location, opts).await
    }

    async fn get_opts(
        &self,
        location: &ObjectPath,
        options: GetOptions,
    ) -> object_store::Result<GetResult> {
        self.0.get_opts(location, options).await
    }

    fn delete_stream(
        &self,
        locations: BoxStream<'static, object_store::Result<ObjectPath>>,
    ) -> BoxStream<'static, object_store::Result<ObjectPath>> {
        self.0.delete_stream(locations)
    }

    fn list(
        &self,
        prefix: Option<&ObjectPath>,
    ) -> BoxStream<'static, object_store::Result<ObjectMeta>> {
        self.0.list(prefix)
    }

    async fn list_with_delimiter(
        &self,
        prefix: Option<&ObjectPath>,
    ) -> object_store::Result<ListResult> {
        self.0.list_with_delimiter(prefix).await
    }

    async fn copy_opts(
        &self,
        from: &ObjectPath,
        to: &ObjectPath,
        options: CopyOptions,
    ) -> object_store::Result<()> {
        self.0.copy_opts(from, to, options).await
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_without_conditional_put_is_refused() {
    let store: Arc<dyn ObjectStore> = Arc::new(Careless(InMemory::new()));
    let Err(error) = Node::try_start(&NodeOptions::new(store)).await else {
        panic!("a server started on a store that cannot keep its promises");
    };
    let said = error.to_string();
    assert!(said.contains("conditional put") || said.contains("If-None-Match"), "{said}");
}
