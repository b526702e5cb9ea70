//! Results out, end to end on the real binary: every sink holds exactly what its query says, nothing twice and
//! nothing lost, whatever is killed when; a target that is down stalls its sink alone; subscriptions go on
//! where they were.

mod files;
mod in_bucket;

use std::collections::HashMap;
use std::path::Path;
use std::time::{Duration, Instant};

use futures::{Stream, StreamExt};
use millrace_sqllogictest::target::Target;
use millrace_sqllogictest::{Server, ServerOptions, suite};
use tokio_postgres::Client;

fn start(dir: &Path) -> Server {
    let binary = Path::new(env!("CARGO_BIN_EXE_millrace"));
    Server::start(binary, ServerOptions::small(dir)).expect("the server starts")
}

async fn execute(client: &Client, sql: &str) {
    client.batch_execute(sql).await.unwrap_or_else(|e| panic!("{sql}: {e:?}"));
}

async fn sorted(client: &Client, sql: &str) -> Vec<Vec<String>> {
    let mut rows = suite::rows(client, sql).await.unwrap_or_else(|e| panic!("{e}"));
    rows.sort();
    rows
}

/// A generator of a workload; equal seeds are equal workloads.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % n
    }
}

/// One random statement on `orders` and `events`.
fn statement(random: &mut Random) -> String {
    let id = random.below(60);
    let city = random.below(7);
    let amount = random.below(10_000);
    match random.below(5) {
        0 => format!("DELETE FROM orders WHERE id % 10 = {}", random.below(10)),
        1 => format!("UPDATE orders SET amount = amount + {amount} WHERE city = 'c{city}'"),
        2 => format!(
            "INSERT INTO events SELECT g, 'e' || g FROM generate_series({amount}, {}) AS t(g)",
            amount + random.below(40)
        ),
        _ => format!(
            "INSERT INTO orders VALUES ({id}, 'c{city}', {amount}), ({}, NULL, {amount}) \
             ON CONFLICT (id) DO UPDATE SET city = excluded.city, amount = excluded.amount",
            id + 100
        ),
    }
}

const TABLES: &str = "
    CREATE TABLE orders (id int PRIMARY KEY, city text, amount bigint);
    CREATE TABLE events (n int, what text) APPEND ONLY;
    CREATE TABLE copied (id int PRIMARY KEY, city text, amount bigint);
    CREATE MATERIALIZED VIEW cities AS
        SELECT city, count(*) AS orders, sum(amount) AS amount FROM orders GROUP BY city;";

fn sinks(files: &Path, target: &Target) -> String {
    let files = files.display();
    let postgres =
        format!("connector = 'postgres', url = '{}', schema = '{}'", target.url, target.schema);
    format!(
        "CREATE SINK cities_files FROM cities WITH (connector = 'fs', path = '{files}/cities') FORMAT UPSERT ENCODE JSON;
         CREATE SINK orders_log FROM orders WITH (connector = 'fs', path = '{files}/orders') FORMAT DEBEZIUM ENCODE JSON;
         CREATE SINK events_files FROM events WITH (connector = 'fs', path = '{files}/events') FORMAT PLAIN ENCODE CSV;
         CREATE SINK cities_pg AS SELECT city, count(*) AS orders, sum(amount) AS amount FROM orders GROUP BY city
             WITH ({postgres}, table = 'cities', type = 'upsert', primary_key = 'city');
         CREATE SINK orders_pg FROM orders WITH ({postgres}, table = 'orders', type = 'upsert');
         CREATE SINK events_pg FROM events WITH ({postgres}, table = 'events', type = 'append-only');
         CREATE SINK orders_copy INTO copied FROM orders;"
    )
}

const TARGET_TABLES: &str = "
    CREATE TABLE cities (city text UNIQUE, orders bigint, amount numeric);
    CREATE TABLE orders (id int PRIMARY KEY, city text, amount bigint);
    CREATE TABLE events (n int, what text);";

/// Until every sink has what was written before.
async fn flush(client: &Client) {
    suite::flush(client).await.unwrap_or_else(|e| panic!("{e}"));
}

/// Every sink's content is its query's.
async fn check(client: &Client, files: &Path, target: &Target, when: &str) {
    flush(client).await;
    let cities = sorted(client, "SELECT city, orders, amount FROM cities").await;
    let orders = sorted(client, "SELECT id, city, amount FROM orders").await;
    let events = sorted(client, "SELECT n, what FROM events").await;
    assert_eq!(sorted(client, "SELECT * FROM copied").await, orders, "{when}: the fed table");
    let upserted = files::upserted(&files.join("cities"), &["city", "orders", "amount"]);
    assert_eq!(upserted, cities, "{when}: upserts in files");
    let replayed = files::replayed(&files.join("orders"), &["id", "city", "amount"], when);
    assert_eq!(replayed, orders, "{when}: the changelog in files");
    assert_eq!(files::csv_lines(&files.join("events")), events, "{when}: appended lines in files");
    assert_eq!(
        target.rows("SELECT id, city, amount FROM orders").await,
        orders,
        "{when}: upserts in PostgreSQL"
    );
    assert_eq!(
        target.rows("SELECT n, what FROM events").await,
        events,
        "{when}: rows in PostgreSQL"
    );
    let grouped = target.rows("SELECT city, orders, amount FROM cities").await;
    assert_eq!(grouped, cities, "{when}: groups in PostgreSQL, one of them NULL");
}

#[tokio::test(flavor = "multi_thread")]
async fn sinks_hold_their_query_exactly_once_whatever_is_killed() {
    let Some(target) = Target::create("sinks_killed", TARGET_TABLES).await else { return };
    let (dir, files) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let mut server = start(dir.path());
    let mut random = Random(7);
    {
        let client = server.connect().await.unwrap();
        execute(&client, TABLES).await;
        for _ in 0..20 {
            execute(&client, &statement(&mut random)).await;
        }
        execute(&client, &sinks(files.path(), &target)).await;
        check(&client, files.path(), &target, "after the snapshot").await;
    }
    for round in 0..8u64 {
        let pause = Duration::from_millis(40 + 97 * round);
        let load = async {
            let Ok(client) = server.connect().await else { return };
            let until = Instant::now() + pause + Duration::from_millis(100);
            while Instant::now() < until
                && client.batch_execute(&statement(&mut random)).await.is_ok()
            {}
        };
        let pid = server.pid();
        tokio::join!(load, async move {
            // The moment is the point: it is not synchronisation.
            tokio::time::sleep(pause).await;
            let killed = std::process::Command::new("kill").args(["-9", &pid.to_string()]).status();
            assert!(killed.is_ok_and(|s| s.success()));
        });
        server.restart(None).expect("the server starts after a kill");
        let client = server.connect().await.unwrap();
        check(&client, files.path(), &target, &format!("round {round}")).await;
    }
    target.drop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sink_is_killed_in_the_middle_of_its_snapshot() {
    let Some(target) =
        Target::create("sinks_snapshot", "CREATE TABLE big (n int PRIMARY KEY, v text)").await
    else {
        return;
    };
    let (dir, files) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let mut server = start(dir.path());
    {
        let client = server.connect().await.unwrap();
        execute(&client, "CREATE TABLE big (n int PRIMARY KEY, v text)").await;
        execute(
            &client,
            "INSERT INTO big SELECT g, 'v' || g FROM generate_series(1, 40000) AS t(g)",
        )
        .await;
        execute(&client, "SET background_ddl = on").await;
        let sql = format!(
            "CREATE SINK files FROM big WITH (connector = 'fs', path = '{}', force_append_only = true) FORMAT PLAIN ENCODE CSV;
             CREATE SINK pg FROM big WITH (connector = 'postgres', url = '{}', schema = '{}', table = 'big', type = 'append-only', force_append_only = true);",
            files.path().display(), target.url, target.schema
        );
        execute(&client, &sql).await;
    }
    for pause in [30, 120, 300] {
        tokio::time::sleep(Duration::from_millis(pause)).await;
        server.restart(None).expect("the server starts after a kill");
    }
    let client = server.connect().await.unwrap();
    execute(&client, "WAIT").await;
    execute(&client, "INSERT INTO big VALUES (0, 'last')").await;
    flush(&client).await;
    let expected = sorted(&client, "SELECT n, v FROM big").await;
    assert_eq!(expected.len(), 40_001);
    let lines = files::csv_lines(files.path());
    assert!(lines == expected, "{} lines, {} rows", lines.len(), expected.len());
    assert!(target.rows("SELECT n, v FROM big").await == expected, "rows in PostgreSQL");
    target.drop().await;
}

/// State and reason of a sink.
async fn state(client: &Client, sink: &str) -> (String, String) {
    let rows = suite::rows(client, "SHOW SINKS").await.unwrap();
    let row = rows.iter().find(|r| r[0] == sink).expect("the sink is shown");
    (row[2].clone(), row[6].clone())
}

async fn until_state(client: &Client, sink: &str, wanted: &str) -> String {
    let deadline = Instant::now() + Duration::from_secs(120);
    loop {
        let (now, reason) = state(client, sink).await;
        if now == wanted {
            return reason;
        }
        assert!(Instant::now() < deadline, "{sink} is {now} ({reason}), not {wanted}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

async fn timed(client: &Client, sql: &str) -> Duration {
    let begun = Instant::now();
    execute(client, sql).await;
    begun.elapsed()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_target_that_is_away_or_refuses_stalls_its_sink_alone() {
    let tables = "CREATE TABLE t (k int PRIMARY KEY, v text); CREATE TABLE narrow (k int PRIMARY KEY, v varchar(3));";
    let Some(target) = Target::create("sinks_down", tables).await else { return };
    let (dir, files) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let server = start(dir.path());
    let client = server.connect().await.unwrap();
    execute(
        &client,
        "CREATE TABLE t (k int PRIMARY KEY, v text); INSERT INTO t VALUES (1, 'one');",
    )
    .await;
    let pg =
        format!("connector = 'postgres', url = '{}', schema = '{}'", target.url, target.schema);
    execute(
        &client,
        &format!(
            "CREATE SINK away FROM t WITH ({pg}, table = 't', type = 'upsert');
             CREATE SINK refusing FROM t WITH ({pg}, table = 'narrow', type = 'upsert');
             CREATE SINK files FROM t WITH (connector = 'fs', path = '{}') FORMAT UPSERT ENCODE JSON;",
            files.path().display()
        ),
    )
    .await;
    target.execute("ALTER TABLE t RENAME TO hidden").await;
    execute(&client, "INSERT INTO t VALUES (2, 'much too long')").await;
    let reason = until_state(&client, "away", "stalled").await;
    assert!(reason.contains("refuses") && reason.contains("42P01"), "{reason}");
    let reason = until_state(&client, "refusing", "stalled").await;
    assert!(reason.contains("value too long") && reason.contains("22001"), "{reason}");
    // The others go on.
    for k in 3..20 {
        execute(&client, &format!("INSERT INTO t VALUES ({k}, 'x')")).await;
    }
    execute(&client, "FLUSH").await;
    assert_eq!(files::upserted(files.path(), &["k", "v"]).len(), 19);
    // What was wrong is put right: they go on by themselves, with nothing lost or twice.
    target.execute("ALTER TABLE hidden RENAME TO t; ALTER TABLE narrow ALTER v TYPE text").await;
    until_state(&client, "away", "running").await;
    until_state(&client, "refusing", "running").await;
    flush(&client).await;
    let expected = sorted(&client, "SELECT k, v FROM t").await;
    assert_eq!(target.rows("SELECT k, v FROM t").await, expected);
    assert_eq!(target.rows("SELECT k, v FROM narrow").await, expected);
    // Dropping a stalled sink does not wait for its target.
    target.execute("DROP TABLE t").await;
    execute(&client, "DELETE FROM t WHERE k = 3").await;
    until_state(&client, "away", "stalled").await;
    let took = timed(&client, "DROP SINK away").await;
    let well = timed(&client, "DROP SINK files").await;
    // Longer only where everything takes long.
    assert!(
        took < Duration::from_secs(5).max(well * 10),
        "{took:?}, and {well:?} of one that is well"
    );
    target.drop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_null_for_a_column_that_takes_none_stalls_a_sink_with_its_row() {
    let dir = tempfile::tempdir().unwrap();
    let server = start(dir.path());
    let client = server.connect().await.unwrap();
    execute(
        &client,
        "CREATE TABLE t (k int PRIMARY KEY, v int); CREATE TABLE strict (k int PRIMARY KEY, v int NOT NULL);
         CREATE TABLE strict_rows (v int NOT NULL); INSERT INTO t VALUES (1, 1);
         CREATE SINK upserts INTO strict FROM t;
         CREATE SINK appends INTO strict_rows AS SELECT v FROM t WITH (force_append_only = true);
         INSERT INTO t VALUES (2, NULL);",
    )
    .await;
    for (sink, table, row) in
        [("upserts", "strict", "(2, null)"), ("appends", "strict_rows", "(null)")]
    {
        let reason = until_state(&client, sink, "stalled").await;
        let words = format!(
            "null value in column \"v\" of relation \"{table}\" violates not-null constraint"
        );
        assert!(reason.contains(&words) && reason.contains(row), "{reason}");
    }
    execute(
        &client,
        "DROP SINK upserts, appends; CREATE SINK filtered INTO strict AS SELECT * FROM t WHERE v IS NOT NULL",
    )
    .await;
    flush(&client).await;
    assert_eq!(sorted(&client, "SELECT k, v FROM strict").await.len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_subscription_goes_on_from_an_epoch_after_a_kill() {
    let dir = tempfile::tempdir().unwrap();
    let mut server = start(dir.path());
    let mut random = Random(11);
    // What the changes add up to, and the last epoch seen.
    let mut content: HashMap<Vec<String>, i64> = HashMap::new();
    let mut seen = String::new();
    {
        let client = server.connect().await.unwrap();
        execute(&client, TABLES).await;
        execute(&client, "CREATE SUBSCRIPTION s FROM cities WITH (retention = '1 hour')").await;
    }
    for round in 0..4 {
        let client = server.connect().await.unwrap();
        let start = if round == 0 { "FULL".to_owned() } else { format!("SINCE {seen}") };
        execute(&client, &format!("DECLARE c SUBSCRIPTION CURSOR FOR s {start}")).await;
        for _ in 0..12 {
            let sql = statement(&mut random);
            execute(&client, &sql).await;
            // Small portions: a change is read in several.
            let wanted = 1 + random.below(4);
            for row in suite::rows(&client, &format!("FETCH {wanted} FROM c")).await.unwrap() {
                apply(&mut content, &mut seen, &row);
            }
        }
        let last_epoch = seen.clone();
        loop {
            let rows = suite::rows(&client, "FETCH 1000 FROM c").await.unwrap();
            if rows.is_empty() {
                break;
            }
            rows.iter().for_each(|row| apply(&mut content, &mut seen, row));
        }
        assert!(seen >= last_epoch);
        let mut rows: Vec<Vec<String>> = Vec::new();
        for (row, weight) in &content {
            assert!((0..=1).contains(weight), "{row:?} has weight {weight}");
            rows.extend((*weight == 1).then(|| row.clone()));
        }
        rows.sort();
        assert_eq!(
            rows,
            sorted(&client, "SELECT city, orders, amount FROM cities").await,
            "round {round}"
        );
        server.restart(None).expect("the server starts after a kill");
    }
    let client = server.connect().await.unwrap();
    let error = client
        .batch_execute("DECLARE c SUBSCRIPTION CURSOR FOR s SINCE 9000000000000000000")
        .await
        .unwrap_err();
    assert_eq!(error.as_db_error().map(|e| e.code().code()), Some("22023"));
}

/// `_epoch, _op, _weight`, then the row.
fn apply(content: &mut HashMap<Vec<String>, i64>, seen: &mut String, row: &[String]) {
    assert!(row[0] >= *seen, "epochs ascend: {} after {seen}", row[0]);
    seen.clone_from(&row[0]);
    let weight: i64 = row[2].parse().unwrap();
    assert_eq!(row[1], if weight > 0 { "insert" } else { "delete" });
    *content.entry(row[3..].to_vec()).or_default() += weight;
}

/// The next item, which comes in a while: a subscription shows every few seconds that it lives.
async fn next<T>(stream: &mut (impl Stream<Item = T> + Unpin)) -> Option<T> {
    tokio::time::timeout(Duration::from_secs(120), stream.next()).await.expect("in time")
}

#[tokio::test(flavor = "multi_thread")]
async fn subscribe_streams_changes_and_its_view_ends_with_the_session() {
    let dir = tempfile::tempdir().unwrap();
    let mut server = start(dir.path());
    let client = server.connect().await.unwrap();
    execute(
        &client,
        "CREATE TABLE t (k int PRIMARY KEY, v int); INSERT INTO t VALUES (1, 10), (2, 20);",
    )
    .await;
    let jobs = "SHOW JOBS";
    let ephemeral =
        |rows: Vec<Vec<String>>| rows.iter().filter(|r| r[1].contains("_subscribe_")).count();
    {
        let reader = server.connect().await.unwrap();
        let sql = "COPY (SUBSCRIBE TO SELECT sum(v) AS s FROM t WITH (progress = true)) TO STDOUT";
        let stream = reader.copy_out(sql).await.unwrap();
        futures::pin_mut!(stream);
        let lines = |text: bytes::Bytes| {
            String::from_utf8(text.to_vec())
                .unwrap()
                .trim_end()
                .split('\t')
                .map(str::to_owned)
                .collect::<Vec<_>>()
        };
        let first = lines(next(&mut stream).await.unwrap().unwrap());
        assert_eq!(first[1..], ["insert", "1", "30"]);
        let mark = lines(next(&mut stream).await.unwrap().unwrap());
        assert_eq!((mark[0].clone(), mark[1].as_str()), (first[0].clone(), "progress"));
        assert_eq!(ephemeral(suite::rows(&client, jobs).await.unwrap()), 1);
        execute(&client, "UPDATE t SET v = 21 WHERE k = 2").await;
        let mut changes = Vec::new();
        while changes.len() < 2 {
            let line = lines(next(&mut stream).await.unwrap().unwrap());
            if line[1] != "progress" {
                changes.push(line[1..].to_vec());
            }
        }
        changes.sort();
        assert_eq!(changes, [["delete", "-1", "30"], ["insert", "1", "31"]]);
        reader.cancel_token().cancel_query(tokio_postgres::NoTls).await.unwrap();
        let ended = loop {
            match next(&mut stream).await {
                Some(Ok(_)) => {}
                Some(Err(e)) => break e,
                None => panic!("a cancelled SUBSCRIBE ends without an error"),
            }
        };
        assert_eq!(ended.as_db_error().map(|e| e.code().code()), Some("57014"));
    }
    // The reader is done: so is its view.
    let deadline = Instant::now() + Duration::from_secs(120);
    while ephemeral(suite::rows(&client, jobs).await.unwrap()) > 0 {
        assert!(Instant::now() < deadline, "the view of an ended SUBSCRIBE stays");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let reader = server.connect().await.unwrap();
    let stream = reader.copy_out("SUBSCRIBE TO SELECT count(*) FROM t").await.unwrap();
    futures::pin_mut!(stream);
    assert!(next(&mut stream).await.unwrap().is_ok());
    assert_eq!(ephemeral(suite::rows(&client, jobs).await.unwrap()), 1);
    server.restart(None).expect("the server starts after a kill");
    let client = server.connect().await.unwrap();
    let deadline = Instant::now() + Duration::from_secs(120);
    while ephemeral(suite::rows(&client, jobs).await.unwrap()) > 0 {
        assert!(Instant::now() < deadline, "the view of a SUBSCRIBE outlives its process");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_of_events_reaches_files_and_postgres_exactly_once() {
    let tables = "CREATE TABLE bids (auction bigint, bidder bigint, price bigint)";
    let Some(target) = Target::create("sinks_nexmark", tables).await else { return };
    let (dir, files) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let mut server = start(dir.path());
    {
        let client = server.connect().await.unwrap();
        let sql = format!(
            "CREATE SOURCE bid (auction BIGINT, bidder BIGINT, price BIGINT, channel VARCHAR, url VARCHAR, \
             date_time TIMESTAMP, extra VARCHAR) WITH (connector = 'nexmark', table = 'bid', event.num = 20000, \
             event.rate = 8000, splits = 2);
             CREATE MATERIALIZED VIEW dear AS SELECT auction, bidder, price FROM bid WHERE price > 1000;
             CREATE SINK files FROM dear WITH (connector = 'fs', path = '{}') FORMAT PLAIN ENCODE CSV;
             CREATE SINK pg FROM dear WITH (connector = 'postgres', url = '{}', schema = '{}', table = 'bids', commit_interval = '400ms');",
            files.path().display(), target.url, target.schema
        );
        execute(&client, &sql).await;
    }
    for _ in 0..4 {
        tokio::time::sleep(Duration::from_millis(450)).await;
        server.restart(None).expect("the server starts after a kill");
    }
    let client = server.connect().await.unwrap();
    let deadline = Instant::now() + Duration::from_secs(180);
    while suite::rows(&client, "SELECT count(*) FROM bid").await.unwrap()[0][0] != "18400" {
        assert!(Instant::now() < deadline, "the stream does not end");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    flush(&client).await;
    let expected = sorted(&client, "SELECT auction, bidder, price FROM dear").await;
    assert!(files::csv_lines(files.path()) == expected, "lines in files");
    assert!(target.rows("SELECT * FROM bids").await == expected, "rows in PostgreSQL");
    target.drop().await;
}

/// The snapshot is read in many steps; what a step alone would say of a group is told to nobody.
#[tokio::test(flavor = "multi_thread")]
async fn an_aggregate_is_told_when_its_snapshot_is_whole() {
    const ROWS: u64 = 120_000;
    let (dir, files) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let mut server = start(dir.path());
    {
        let client = server.connect().await.unwrap();
        let sql = format!(
            "CREATE TABLE big (n int PRIMARY KEY, k int);
             INSERT INTO big SELECT g, g % 7 FROM generate_series(1, {ROWS}) AS t(g);
             SET background_ddl = on;
             CREATE SINK groups AS SELECT k, count(*) AS n, max(n) AS top FROM big GROUP BY k
                 WITH (connector = 'fs', path = '{}', force_append_only = true) FORMAT PLAIN ENCODE CSV;",
            files.path().display()
        );
        execute(&client, &sql).await;
    }
    // In the middle of the snapshot, perhaps: what was held is not forgotten.
    tokio::time::sleep(Duration::from_millis(150)).await;
    server.restart(None).expect("the server starts after a kill");
    let client = server.connect().await.unwrap();
    execute(&client, "WAIT").await;
    flush(&client).await;
    let expected = sorted(&client, "SELECT k, count(*), max(n) FROM big GROUP BY k").await;
    assert_eq!(expected.len(), 7);
    assert_eq!(files::csv_lines(files.path()), expected);
}
