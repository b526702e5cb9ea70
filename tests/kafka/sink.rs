//! Topics out.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::broker::{Broker, Received};
use crate::{answer, eventually, eventually_if, execute, flush, start};

fn to(broker: &Broker, topic: &str, more: &str) -> String {
    format!(
        "WITH (connector = 'kafka', topic = '{topic}', properties.bootstrap.servers = '{}'{more})",
        broker.servers()
    )
}

/// What a reader of committed messages has. The mock brokers show transactions that were aborted, too: a
/// publication that was begun again has its first messages twice, equal to the last byte. A sink that
/// published what it had committed would show all of them twice, its progress included.
fn committed(all: &[Received], partitions: i32) -> Vec<Received> {
    let mut seen: BTreeMap<(u64, u64), Received> = BTreeMap::new();
    let mut out: Vec<Received> = Vec::new();
    for partition in 0..partitions {
        for message in all.iter().filter(|m| m.partition == partition) {
            let place = message.place.expect("a sink's message says its place");
            match seen.get(&place) {
                Some(before) => assert_eq!(before, message, "published again with other content"),
                None => {
                    seen.insert(place, message.clone());
                    out.push(message.clone());
                }
            }
        }
    }
    // Of one key all messages lie in one partition, in the order of places.
    for pair in out.windows(2).filter(|p| p[0].partition == p[1].partition) {
        assert!(pair[0].place < pair[1].place, "out of order: {pair:?}");
    }
    out
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|e| panic!("{text}: {e}"))
}

fn row(value: &Value, columns: &[&str]) -> String {
    let cell = |c: &&str| match &value[*c] {
        Value::Null => "NULL".to_owned(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    columns.iter().map(cell).collect::<Vec<_>>().join("|")
}

/// FORMAT UPSERT: the last value of every key.
fn upserted(messages: &[Received], columns: &[&str]) -> Vec<String> {
    let mut content = BTreeMap::new();
    for m in messages {
        let key = m.key.clone().expect("an upsert has a key");
        match &m.value {
            None => drop(content.remove(&key)),
            Some(value) => drop(content.insert(key, row(&json(value), columns))),
        }
    }
    let mut rows: Vec<String> = content.into_values().collect();
    rows.sort();
    rows
}

/// FORMAT DEBEZIUM: every change; its old row must be there.
fn replayed(messages: &[Received], columns: &[&str]) -> Vec<String> {
    let mut content: BTreeMap<String, i64> = BTreeMap::new();
    for m in messages {
        let change = json(m.value.as_ref().expect("a change has a value"));
        for (side, by) in [("before", -1), ("after", 1)] {
            if !change[side].is_null() {
                *content.entry(row(&change[side], columns)).or_default() += by;
            }
        }
    }
    content.retain(|_, n| *n != 0);
    assert!(content.values().all(|n| *n == 1), "{content:?}");
    content.into_keys().collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn every_format_goes_out_and_comes_back() {
    let broker = Broker::new(&[("plain", 2), ("csv", 1), ("upsert", 3), ("changes", 2)]);
    let dir = tempfile::tempdir().unwrap();
    let server = start(dir.path());
    let client = server.connect().await.unwrap();
    create_every_format(&client, &broker).await;
    execute(&client, "INSERT INTO log VALUES (3, 'th;ree'); UPDATE t SET name = 'z' WHERE id = 2; DELETE FROM t WHERE id = 3").await;
    flush(&client).await;
    check_every_format(&broker);
    // What went out comes in again.
    execute(
        &client,
        &format!(
            "CREATE TABLE back (id int PRIMARY KEY, name text, price numeric(8,2), at timestamp) {} FORMAT UPSERT ENCODE JSON;
             CREATE TABLE names_back (name text PRIMARY KEY, n bigint) {} FORMAT DEBEZIUM ENCODE JSON;",
            to(&broker, "upsert", ", discovery_interval = '100ms'"),
            to(&broker, "changes", ", discovery_interval = '100ms'"),
        ),
    )
    .await;
    eventually(
        &client,
        "SELECT * FROM back",
        &["1|a\"b|1.25|2024-01-02 03:04:05", "2|z|NULL|NULL"],
    )
    .await;
    eventually(&client, "SELECT * FROM names_back", &["a\"b|1", "z|1"]).await;
    for (sql, state) in refused_sinks(&broker) {
        let error = client.batch_execute(&sql).await.expect_err(&sql);
        let code = error.as_db_error().map(|e| e.code().code().to_owned());
        assert_eq!(code.as_deref(), Some(state), "{sql}: {error:?}");
    }
}

async fn create_every_format(client: &tokio_postgres::Client, broker: &Broker) {
    execute(
        client,
        "CREATE TABLE t (id int PRIMARY KEY, name text, price numeric(8,2), at timestamp);
         CREATE TABLE log (n int, what text) APPEND ONLY;
         INSERT INTO t VALUES (1, 'a\"b', 1.25, '2024-01-02 03:04:05'), (2, NULL, NULL, NULL), (3, 'c', 3, NULL);
         INSERT INTO log VALUES (1, 'one'), (2, 'two');
         CREATE MATERIALIZED VIEW names AS SELECT coalesce(name, '-') AS name, count(*) AS n FROM t GROUP BY 1;",
    )
    .await;
    execute(
        client,
        &format!(
            "CREATE SINK plain FROM log {} FORMAT PLAIN ENCODE JSON;
             CREATE SINK csv FROM log {} FORMAT PLAIN ENCODE CSV;
             CREATE SINK upsert FROM t {} FORMAT UPSERT ENCODE JSON;
             CREATE SINK changes FROM names {} FORMAT DEBEZIUM ENCODE JSON;",
            to(broker, "plain", ""),
            to(broker, "csv", ", delimiter = ';'"),
            to(broker, "upsert", ""),
            to(broker, "changes", ""),
        ),
    )
    .await;
}

/// The topics hold what the tables and views did when all was published.
fn check_every_format(broker: &Broker) {
    let plain = committed(&broker.content("plain", 2), 2);
    let mut values: Vec<String> = plain.iter().filter_map(|m| m.value.clone()).collect();
    values.sort();
    assert_eq!(
        values,
        [
            "{\"n\":1,\"what\":\"one\"}",
            "{\"n\":2,\"what\":\"two\"}",
            "{\"n\":3,\"what\":\"th;ree\"}"
        ]
    );
    assert!(plain.iter().all(|m| m.key.is_none()));
    let csv = committed(&broker.content("csv", 1), 1);
    let mut lines: Vec<String> = csv.iter().filter_map(|m| m.value.clone()).collect();
    lines.sort();
    assert_eq!(lines, ["1;one", "2;two", "3;\"th;ree\""]);
    let upsert = committed(&broker.content("upsert", 3), 3);
    let columns = ["id", "name", "price", "at"];
    assert_eq!(upserted(&upsert, &columns), ["1|a\"b|1.25|2024-01-02T03:04:05", "2|z|NULL|NULL"]);
    assert!(upsert.iter().any(|m| m.value.is_none() && m.key.as_deref() == Some("{\"id\":3}")));
    let changes = committed(&broker.content("changes", 2), 2);
    assert_eq!(replayed(&changes, &["name", "n"]), ["a\"b|1", "z|1"]);
    assert!(changes.iter().all(|m| m.key.as_ref().is_some_and(|k| json(k)["name"].is_string())));
}

/// Statements that do not make a sink, and the code of their errors.
fn refused_sinks(broker: &Broker) -> [(String, &'static str); 5] {
    [
        (
            format!("CREATE SINK s FROM t {} FORMAT PLAIN ENCODE JSON", to(broker, "plain", "")),
            "42P17",
        ),
        (
            format!("CREATE SINK s FROM t {} FORMAT UPSERT ENCODE CSV", to(broker, "plain", "")),
            "0A000",
        ),
        (
            format!("CREATE SINK s FROM t {} FORMAT UPSERT ENCODE AVRO", to(broker, "plain", "")),
            "0A000",
        ),
        (
            format!(
                "CREATE SINK s FROM t {} FORMAT UPSERT ENCODE JSON",
                to(broker, "plain", ", properties.transactional.id = 'x'")
            ),
            "22023",
        ),
        ("CREATE SINK s FROM t WITH (connector = 'kafka', topic = 'x') FORMAT UPSERT ENCODE JSON".to_owned(), "22023"),
    ]
}

const TABLES: &str = "
    CREATE TABLE orders (id int PRIMARY KEY, city text, amount bigint);
    CREATE TABLE events (n int PRIMARY KEY, what text) APPEND ONLY;
    CREATE MATERIALIZED VIEW cities AS
        SELECT coalesce(city, '?') AS city, count(*) AS orders, sum(amount) AS amount FROM orders GROUP BY 1;";

fn sinks(broker: &Broker) -> String {
    format!(
        "CREATE SINK orders_out FROM orders {} FORMAT UPSERT ENCODE JSON;
         CREATE SINK cities_out FROM cities {} FORMAT DEBEZIUM ENCODE JSON;
         CREATE SINK events_out FROM events {} FORMAT PLAIN ENCODE CSV;",
        to(broker, "orders", ""),
        to(broker, "cities", ""),
        to(broker, "events", "")
    )
}

/// Every topic holds what its sink's query says.
async fn check(client: &tokio_postgres::Client, broker: &Broker, when: &str) {
    flush(client).await;
    let orders = committed(&broker.content("orders", 3), 3);
    let expected = answer(client, "SELECT id, city, amount FROM orders").await;
    assert_eq!(upserted(&orders, &["id", "city", "amount"]), expected, "{when}: upserts");
    let cities = committed(&broker.content("cities", 2), 2);
    let expected = answer(client, "SELECT city, orders, amount FROM cities").await;
    assert_eq!(replayed(&cities, &["city", "orders", "amount"]), expected, "{when}: changes");
    let events = committed(&broker.content("events", 1), 1);
    let mut lines: Vec<String> = events.iter().filter_map(|m| m.value.clone()).collect();
    lines.sort();
    let expected = answer(client, "SELECT n || ',' || what FROM events").await;
    assert_eq!(lines, expected, "{when}: appended lines");
}

/// Statement `n` of a workload.
fn statement(n: u64) -> String {
    let (id, city, amount) = (n * 13 % 60, n * 5 % 7, n * 37 % 1_000);
    match n % 5 {
        0 => format!("DELETE FROM orders WHERE id % 10 = {}", n % 10),
        1 => format!("UPDATE orders SET amount = amount + {amount} WHERE city = 'c{city}'"),
        2 => format!(
            "INSERT INTO events SELECT g, 'e' || g FROM generate_series({}, {}) AS t(g) ON CONFLICT DO NOTHING",
            n * 20,
            n * 20 + 30
        ),
        _ => format!(
            "INSERT INTO orders VALUES ({id}, 'c{city}', {amount}), ({}, NULL, {amount}) \
             ON CONFLICT (id) DO UPDATE SET city = excluded.city, amount = excluded.amount",
            id + 100
        ),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn topics_hold_their_query_exactly_once_whatever_is_killed() {
    let broker = Broker::new(&[("orders", 3), ("cities", 2), ("events", 1)]);
    let dir = tempfile::tempdir().unwrap();
    let mut server = start(dir.path());
    let mut next = 0;
    {
        let client = server.connect().await.unwrap();
        execute(&client, TABLES).await;
        for _ in 0..20 {
            execute(&client, &statement(next)).await;
            next += 1;
        }
        execute(&client, &sinks(&broker)).await;
        check(&client, &broker, "after the snapshot").await;
    }
    for round in 0..6u64 {
        let pause = Duration::from_millis(60 + 90 * round);
        let begun = Instant::now();
        let client = server.connect().await.unwrap();
        while begun.elapsed() < pause {
            execute(&client, &statement(next)).await;
            next += 1;
        }
        server.restart(None).expect("the server starts after a kill");
        let client = server.connect().await.unwrap();
        check(&client, &broker, &format!("round {round}")).await;
    }
}

/// The process dies when the brokers have a publication and the log does not know it yet: it is not
/// published again.
#[tokio::test(flavor = "multi_thread")]
async fn a_publication_that_is_committed_is_not_repeated() {
    let broker = Broker::new(&[("t", 1)]);
    let dir = tempfile::tempdir().unwrap();
    let mut server = start(dir.path());
    {
        let client = server.connect().await.unwrap();
        let sink = to(&broker, "t", "");
        execute(
            &client,
            &format!(
                "CREATE TABLE t (k int PRIMARY KEY); INSERT INTO t VALUES (1);
                 CREATE SINK s FROM t {sink} FORMAT UPSERT ENCODE JSON;"
            ),
        )
        .await;
        flush(&client).await;
    }
    for (round, point) in
        ["sink-after-publish", "sink-before-mark", "sink-before-publish"].iter().enumerate()
    {
        let crash = HashMap::from([("MILLRACE_CRASH_POINT".to_owned(), format!("{point}:1"))]);
        let insert = format!("INSERT INTO t VALUES ({}) ON CONFLICT DO NOTHING", round + 2);
        // What is left of the round before may bring it to the point while it starts.
        if server.restart(Some(crash)).is_ok() {
            // The process ends at the point; whether the statement is answered before is chance.
            if let Ok(client) = server.connect().await {
                let _ = client.batch_execute(&insert).await;
            }
            let deadline = Instant::now() + Duration::from_secs(120);
            while !server.has_exited() {
                assert!(Instant::now() < deadline, "{point} is not reached");
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
        server.restart(Some(HashMap::new())).expect("the server starts");
        let client = server.connect().await.unwrap();
        execute(&client, &insert).await;
        flush(&client).await;
        // Each key once: nothing that was aborted, nothing that was repeated.
        let all = broker.content("t", 1);
        let keys: Vec<String> = all.iter().filter_map(|m| m.key.clone()).collect();
        let expected: Vec<String> = (1..=round + 2).map(|k| format!("{{\"k\":{k}}}")).collect();
        assert_eq!(keys, expected, "after {point}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn brokers_that_are_away_stall_their_sink_alone() {
    let mut broker = Broker::new(&[("t", 1)]);
    let dir = tempfile::tempdir().unwrap();
    let server = start(dir.path());
    let client = server.connect().await.unwrap();
    let sink = to(&broker, "t", ", properties.message.timeout.ms = 2000");
    execute(
        &client,
        &format!(
            "CREATE TABLE t (k int PRIMARY KEY); INSERT INTO t VALUES (1);
             CREATE SINK s FROM t {sink} FORMAT UPSERT ENCODE JSON;
             CREATE MATERIALIZED VIEW n AS SELECT count(*) AS n FROM t;"
        ),
    )
    .await;
    broker.down();
    execute(&client, "INSERT INTO t VALUES (2)").await;
    assert_eq!(answer(&client, "SELECT * FROM n").await, ["2"]);
    eventually_if(
        &client,
        "SHOW SINKS",
        |rows| rows.iter().any(|r| r.contains("stalled") && r.contains("topic t")),
        "a stalled sink with its reason",
    )
    .await;
    execute(&client, "INSERT INTO t VALUES (3)").await;
    broker.up();
    eventually_if(
        &client,
        "SHOW SINKS",
        |rows| rows.iter().any(|r| r.contains("running")),
        "a running sink",
    )
    .await;
    flush(&client).await;
    let keys = upserted(&committed(&broker.content("t", 1), 1), &["k"]);
    assert_eq!(keys, ["1", "2", "3"]);
}
