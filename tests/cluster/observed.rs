//! What an operator sees of a cluster through SQL, and in the logs of its processes.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures::SinkExt;
use tokio_postgres::{Client, SimpleQueryMessage};

use crate::ctl::told;
use crate::one;
use crate::process::{Cluster, Process};
use crate::sessions::{LIMIT, await_true};

/// The first column of all rows, as text.
async fn lines(client: &Client, sql: &str) -> String {
    let answer = client.simple_query(sql).await.unwrap_or_else(|e| panic!("{sql}: {e:?}"));
    let line = |message: &SimpleQueryMessage| match message {
        SimpleQueryMessage::Row(row) => row.get(0).map(str::to_owned),
        _ => None,
    };
    answer.iter().filter_map(line).collect::<Vec<_>>().join("\n")
}

async fn run(client: &Client, sql: &str) {
    client.batch_execute(sql).await.unwrap_or_else(|e| panic!("{sql}: {e:?}"));
}

/// Until no state table of the relation has anything in memory.
async fn await_written(client: &Client, explain: &str) {
    let deadline = Instant::now() + LIMIT;
    let is_held = |line: &str| line.contains(" in memory, ") && !line.contains(": 0 B in memory, ");
    loop {
        let explained = lines(client, explain).await;
        if explained.contains(" in memory, ") && !explained.lines().any(is_held) {
            return;
        }
        assert!(Instant::now() < deadline, "{explained}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn lookahead_of_jobs_elsewhere_is_shown() {
    let dir = tempfile::tempdir().unwrap();
    let mut cluster = Cluster::start(dir.path()).await;
    let client = cluster.connect("frontend1").await;
    run(&client, "CREATE TABLE t (id bigint PRIMARY KEY, k bigint, v bigint)").await;
    run(&client, "SET lookahead = 'entry'").await;
    run(&client, "CREATE MATERIALIZED VIEW per_k AS SELECT k, sum(v) AS s FROM t GROUP BY k").await;
    let rows = "SELECT i, i % 1000, i FROM generate_series";
    run(&client, &format!("INSERT INTO t {rows}(1, 5000) AS g(i)")).await;
    run(&client, "FLUSH").await;
    let explain = "EXPLAIN ANALYZE MATERIALIZED VIEW per_k";
    await_written(&client, explain).await;
    // Another process has none of the groups in memory: its rows wait for the store.
    cluster.process("compute").kill();
    cluster.begin("compute");
    run(&client, &format!("INSERT INTO t {rows}(5001, 10000) AS g(i)")).await;
    assert_eq!(one::<i64>(&client, "SELECT count(*) FROM per_k").await, 1000);
    let of_view = "FROM millrace_catalog.lookahead WHERE relation_name = 'per_k'";
    await_true(&client, &format!("SELECT count(*) {of_view} AND demand > 0")).await;
    await_true(&client, &format!("SELECT count(*) {of_view} AND requests_demand > 0")).await;
    let places = format!("SELECT count(*) {of_view} AND places LIKE '%entry%'");
    await_true(&client, &places).await;
    let explained = lines(&client, explain).await;
    for part in ["lookahead: ", " waited for", "S3 Standard"] {
        assert!(explained.contains(part), "{part}: {explained}");
    }
}

const EXPLAIN_NAMED: &str = "EXPLAIN ANALYZE MATERIALIZED VIEW named";
/// Rows of the view that are not those of its query.
const NAMED_WRONG: &str = "SELECT count(*) FROM named AS v FULL JOIN \
    (SELECT o.id, i.name FROM orders AS o JOIN items AS i ON o.item = i.id) AS q \
    ON v.id = q.id AND v.name = q.name WHERE v.id IS NULL OR q.id IS NULL";
/// Keys of 512 bytes each that no compression makes much smaller: few have their block in common.
const ITEMS: &str = "CREATE TABLE items (id bigint PRIMARY KEY, name text);
    INSERT INTO items SELECT i, (SELECT string_agg(md5(concat(i, ':', n)), '') FROM generate_series(1, 16) AS p(n))
        FROM generate_series(0, 19999) AS g(i)";

#[tokio::test(flavor = "multi_thread")]
async fn a_job_whose_tables_are_elsewhere_looks_ahead_where_it_sees_rows() {
    let dir = tempfile::tempdir().unwrap();
    let names = ["meta", "compute1", "compute2", "frontend1"];
    let cluster = Cluster::start_with(dir.path(), &names).await;
    let client = cluster.connect("frontend1").await;
    run(&client, ITEMS).await;
    run(&client, "CREATE TABLE orders (id bigint PRIMARY KEY, item bigint)").await;
    let place = |job: &str, name: &str| {
        told(&cluster.address("meta"), &["move", job, &cluster.address(name)]);
    };
    place("public.items", "compute1");
    let view = "CREATE MATERIALIZED VIEW named AS \
                SELECT o.id, i.name FROM orders AS o JOIN items AS i ON o.item = i.id";
    run(&client, view).await;
    place("public.named", "compute1");
    await_written(&client, EXPLAIN_NAMED).await;
    // There its state has never been in memory.
    place("public.named", "compute2");
    let looks = "SELECT count(*) FROM millrace_catalog.lookahead \
                 WHERE relation_name = 'named' AND place LIKE '%leaf%' AND hinted > 0";
    let began = Instant::now();
    let mut rows = 0i64;
    while one::<i64>(&client, looks).await == 0 {
        // So many epochs have to pass that it takes long on a busy machine.
        assert!(began.elapsed() < LIMIT * 3, "{}", lines(&client, EXPLAIN_NAMED).await);
        // No two of them are neighbours.
        let row = format!("INSERT INTO orders VALUES ({rows}, {})", rows * 7919 % 20_000);
        run(&client, &row).await;
        rows += 1;
        assert_eq!(one::<i64>(&client, "SELECT count(*) FROM named").await, rows);
    }
    assert_eq!(one::<i64>(&client, NAMED_WRONG).await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn processes_tell_how_they_are() {
    let dir = tempfile::tempdir().unwrap();
    let mut cluster = Cluster::start(dir.path()).await;
    let client = cluster.connect("frontend2").await;
    run(&client, "CREATE TABLE t (id bigint PRIMARY KEY)").await;
    let of = |role: &str, what: &str| {
        format!(
            "SELECT count(*) FROM millrace_catalog.processes \
             WHERE roles = ARRAY['{role}'] AND {what}"
        )
    };
    for role in ["compute", "compactor", "frontend"] {
        let heard = "heartbeat_ms BETWEEN 0 AND 6000 AND applied_record > 0";
        await_true(&client, &of(role, heard)).await;
    }
    await_true(&client, &of("meta", "heartbeat_ms IS NULL AND applied_record > 0")).await;
    await_true(&client, &of("compute", "jobs = 1")).await;
    await_true(&client, &of("compactor", "jobs = 0 AND load IS NULL")).await;
    // The measure of a job that does nothing comes first.
    await_true(&client, &of("compute", "load >= 0")).await;
    run(&client, "INSERT INTO t SELECT i FROM generate_series(1, 100000) AS g(i)").await;
    await_true(&client, &of("compute", "load > 0")).await;
    await_true(&client, "SELECT count(*) FROM millrace_catalog.jobs WHERE load > 0").await;
    // Without a leader the log tells who takes part, and nobody how they are.
    cluster.process("meta").kill();
    await_true(&client, &of("compute", "jobs = 1 AND heartbeat_ms IS NULL AND load IS NULL")).await;
}

/// Each is a query whose answer must be 0.
const NEVER: [&str; 5] = [
    // All vnodes of a fragment have one task each.
    "SELECT count(*) FROM (SELECT sum(last_vnode - first_vnode + 1) AS vnodes FROM millrace_catalog.tasks
       GROUP BY relation_id, fragment) AS f WHERE vnodes <> 256",
    "SELECT count(*) FROM millrace_catalog.tasks AS t JOIN millrace_catalog.jobs AS j ON j.id = t.relation_id
       WHERE t.worker <> j.worker OR t.generation <> j.generation",
    "SELECT count(*) FROM millrace_catalog.caches WHERE bytes > limit_bytes OR limit_bytes = 0",
    "SELECT count(*) FROM millrace_catalog.caches AS c JOIN millrace_catalog.workers AS w ON w.incarnation = c.worker
       WHERE c.cache IN ('state', 'changelog') AND w.roles <> ARRAY['compute']",
    "SELECT count(*) FROM millrace_catalog.requests WHERE queued < 0 OR in_flight < 0 OR served < 0",
];

#[tokio::test(flavor = "multi_thread")]
async fn what_processes_are_busy_with_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let mut cluster = Cluster::start(dir.path()).await;
    let client = cluster.connect("frontend1").await;
    run(&client, "CREATE TABLE t (id bigint PRIMARY KEY, v text)").await;
    let view =
        "CREATE MATERIALIZED VIEW v AS SELECT id % 10 AS k, count(*) AS n FROM t GROUP BY id % 10";
    run(&client, view).await;
    // By now the process has told of both.
    let tasks =
        "SELECT count(*) FROM millrace_catalog.tasks WHERE state = 'running' AND relation_name =";
    await_true(&client, &format!("{tasks} 't'")).await;
    await_true(&client, &format!("{tasks} 'v' AND last_vnode = 127")).await;

    for (role, cache) in [
        ("compute", "state"),
        ("compute", "blocks"),
        ("compactor", "blocks"),
        ("frontend", "indexes"),
    ] {
        let of = format!(
            "SELECT count(*) FROM millrace_catalog.caches AS c JOIN millrace_catalog.workers AS w ON w.incarnation = c.worker
             WHERE w.roles = ARRAY['{role}'] AND c.cache = '{cache}'"
        );
        await_true(&client, &of).await;
    }
    let served = |role: &str, class: &str| {
        format!(
            "SELECT coalesce(max(served), 0) FROM millrace_catalog.requests AS r
             JOIN millrace_catalog.workers AS w ON w.incarnation = r.worker
             WHERE w.roles = ARRAY['{role}'] AND r.class = '{class}'"
        )
    };
    let before = one::<i64>(&client, &served("meta", "append")).await;
    let compute = one::<i64>(&client, &served("compute", "put")).await;
    for round in 0..20 {
        let rows = format!(
            "INSERT INTO t SELECT {round} * 200 + i, repeat('x', 100) FROM generate_series(0, 199) AS g(i)"
        );
        run(&client, &rows).await;
    }
    let appends = one::<i64>(&client, &served("meta", "append")).await - before;
    assert!(appends >= 20, "{appends} appends of 20 statements");
    let more = format!("SELECT (({}) > {compute})::int::bigint", served("compute", "put"));
    await_true(&client, &more).await;
    for sql in NEVER {
        assert_eq!(one::<i64>(&client, sql).await, 0, "{sql}");
    }

    // One that stands still has what it was given last, until it is fenced.
    let mut rows = 4_000;
    let deadline = Instant::now() + LIMIT;
    'all: loop {
        cluster.process("compactor").signal("STOP");
        let stopped = Instant::now();
        while stopped.elapsed() < Duration::from_secs(5) {
            let sql = format!(
                "INSERT INTO t SELECT {rows} + i, repeat('x', 100) FROM generate_series(0, 199) AS g(i)"
            );
            run(&client, &sql).await;
            rows += 200;
            let merges = "SELECT count(*) FROM millrace_catalog.compactions AS c
                JOIN millrace_catalog.workers AS w ON w.incarnation = c.worker
                WHERE state = 'running' AND w.roles = ARRAY['compactor'] AND runs > 1 AND bytes > 0
                  AND relation_name IN ('t', 'v')";
            if one::<i64>(&client, merges).await > 0 {
                break 'all;
            }
        }
        assert!(Instant::now() < deadline, "no merge was seen");
        cluster.process("compactor").kill();
        cluster.begin("compactor");
    }
    cluster.process("compactor").kill();
    cluster.begin("compactor");
    let none = "SELECT (count(*) = 0)::int::bigint FROM millrace_catalog.compactions WHERE state = 'running'";
    await_true(&client, none).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_wrong_with_a_source_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let cluster = Cluster::start(dir.path()).await;
    let client = cluster.connect("frontend1").await;
    let folder = dir.path().join("rows");
    std::fs::create_dir(&folder).unwrap();
    std::fs::write(folder.join("1.csv"), "1\n2\n").unwrap();
    let source = format!(
        "CREATE SOURCE s (v bigint) WITH (connector = 'fs', path = '{}/*.csv', \
         discovery_interval = '100ms') FORMAT PLAIN ENCODE CSV",
        folder.display()
    );
    run(&client, &source).await;
    run(&client, "CREATE MATERIALIZED VIEW n AS SELECT count(*) AS n FROM s").await;
    await_true(&client, "SELECT (n = 2)::int::bigint FROM n").await;
    let is_known = "SELECT count(*) FROM millrace_catalog.source_splits \
                    WHERE available_offset = current_offset AND lag = 0";
    await_true(&client, is_known).await;
    std::fs::remove_dir_all(&folder).unwrap();
    let fails = "SELECT count(*) FROM millrace_catalog.sources \
                 WHERE state = 'failing' AND reason IS NOT NULL";
    await_true(&client, fails).await;
    let of_view = "SELECT count(*) FROM millrace_catalog.jobs \
                   WHERE name = 'n' AND reason LIKE 'source \"s\": %'";
    await_true(&client, of_view).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_line_of_a_bad_row_of_copy_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let cluster = Cluster::start(dir.path()).await;
    let client = cluster.connect("frontend1").await;
    run(&client, "CREATE TABLE t (id bigint PRIMARY KEY, v text NOT NULL)").await;
    run(&client, "INSERT INTO t VALUES (7, 'there')").await;
    for (data, code, place) in [
        ("1\ta\n2\tb\n1\tc\n", "23505", "COPY t, line 3"),
        ("1\ta\n2\tb\n3\tc\n7\td\n", "23505", "COPY t, line 4"),
        ("1\ta\nx\tb\n", "22P02", "COPY t, line 2, column id: \"x\""),
        ("1\t\\N\n", "23502", "COPY t, line 1: \"1\t\\N\""),
    ] {
        let sink = client.copy_in("COPY t FROM STDIN").await.unwrap();
        futures::pin_mut!(sink);
        let sent = sink.send(Bytes::from_static(data.as_bytes())).await;
        let error = match sent {
            Ok(()) => sink.finish().await.expect_err("a row is bad"),
            Err(error) => error,
        };
        let error = error.as_db_error().expect("the server refuses it");
        assert_eq!((error.code().code(), error.where_()), (code, Some(place)), "{data:?}");
    }
    assert_eq!(one::<i64>(&client, "SELECT count(*) FROM t").await, 1);
}

/// Each line of a log is an object that says when, how severe and what.
fn check_json(log: &str, what: &str) {
    assert!(!log.is_empty(), "{what} has told nothing");
    for line in log.lines() {
        let entry: serde_json::Value =
            serde_json::from_str(line).unwrap_or_else(|e| panic!("{what}: {e}: {line}"));
        for field in ["timestamp", "level", "message"] {
            assert!(entry[field].is_string(), "{what}: {field}: {line}");
        }
    }
}

fn standalone(dir: &Path, memory: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_millrace"));
    command.args(["standalone", "--listen=127.0.0.1:0", "--http=off", "--memory-limit", memory]);
    command.arg("--data-dir").arg(dir);
    command
}

#[tokio::test(flavor = "multi_thread")]
async fn logs_are_json_where_that_is_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let mut cluster =
        Cluster::start_with_flags(dir.path(), &Cluster::NAMES, &["--log-format=json"]).await;
    run(&cluster.connect("frontend1").await, "CREATE TABLE t (id bigint)").await;
    for name in Cluster::NAMES {
        let process = cluster.process(name);
        process.signal("TERM");
        process.await_end(Duration::from_secs(60));
        check_json(&process.log(), name);
    }
    // What a process ends with is of its log, too.
    let mut command = standalone(&dir.path().join("alone"), "1");
    command.env("MILLRACE_LOG_FORMAT", "json");
    let mut refused = Process::spawn(command);
    refused.await_end(Duration::from_secs(60));
    check_json(&refused.log(), "standalone");
    let file = dir.path().join("millrace.toml");
    std::fs::write(&file, "log-format = \"json\"\n").unwrap();
    let mut command = standalone(&dir.path().join("alone"), "128MB");
    command.arg("--config").arg(&file);
    let mut alone = Process::spawn(command);
    while alone.log().is_empty() {
        assert!(!alone.has_ended(), "it has ended without a word");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    alone.signal("TERM");
    alone.await_end(Duration::from_secs(60));
    check_json(&alone.log(), "standalone");
}

/// The requests in whose spans of this name a process has logged something.
fn requests(log: &str, span: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for line in log.lines() {
        let entry: serde_json::Value =
            serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"));
        let spans = entry["spans"].as_array().into_iter().flatten();
        let named = spans.filter(|of| of["name"] == span);
        found.extend(named.filter_map(|of| of["request"].as_str().map(str::to_owned)));
    }
    found
}

#[tokio::test(flavor = "multi_thread")]
async fn a_statement_has_one_id_in_the_logs_of_all_processes() {
    let dir = tempfile::tempdir().unwrap();
    let (flags, log) = (&["--log-format=json"], "info,millrace_rpc=debug");
    let mut cluster = Cluster::start_with_log(dir.path(), &Cluster::NAMES, flags, log).await;
    let client = cluster.connect("frontend1").await;
    // The leader is called for the one, the process of the table for the other.
    run(&client, "CREATE TABLE t (id bigint PRIMARY KEY)").await;
    run(&client, "INSERT INTO t VALUES (1)").await;
    let deadline = Instant::now() + LIMIT;
    for called in ["meta", "compute"] {
        loop {
            let statements = requests(&cluster.process("frontend1").log(), "statement");
            let calls = requests(&cluster.process(called).log(), "call");
            if !statements.is_disjoint(&calls) {
                break;
            }
            assert!(Instant::now() < deadline, "{called}: {statements:?} {calls:?}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

/// The requests of the calls of this method that a process says to have made.
fn called(log: &str, method: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for line in log.lines() {
        let entry: serde_json::Value =
            serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"));
        if entry["message"] == "called" && entry["method"] == method {
            found.extend(entry["request"].as_str().map(str::to_owned));
        }
    }
    found
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_leader_does_by_itself_has_an_id_in_the_logs_of_those_who_do_it() {
    let dir = tempfile::tempdir().unwrap();
    let (flags, log) = (&["--log-format=json"], "info,millrace_rpc=debug");
    let mut cluster = Cluster::start_with_log(dir.path(), &Cluster::NAMES, flags, log).await;
    let client = cluster.connect("frontend1").await;
    run(&client, "CREATE TABLE t (id bigint PRIMARY KEY, v text)").await;
    let deadline = Instant::now() + LIMIT;
    let mut rows = 0;
    loop {
        let sql = format!(
            "INSERT INTO t SELECT {rows} + i, repeat('x', 100) FROM generate_series(0, 199) AS g(i)"
        );
        run(&client, &sql).await;
        rows += 200;
        let meta = cluster.process("meta").log();
        let cuts = called(&meta, "Compute/Cut");
        let taken = requests(&cluster.process("compute").log(), "call");
        let compactions = requests(&meta, "compaction");
        let merged = requests(&cluster.process("compactor").log(), "call");
        if !cuts.is_disjoint(&taken) && !compactions.is_disjoint(&merged) {
            return;
        }
        assert!(Instant::now() < deadline, "{cuts:?} {taken:?} {compactions:?} {merged:?}");
    }
}
