//! Topics in.

use std::time::{Duration, Instant};

use crate::broker::Broker;
use crate::{answer, eventually, eventually_if, execute, start};

fn from(broker: &Broker, topic: &str, more: &str) -> String {
    format!(
        "WITH (connector = 'kafka', topic = '{topic}', properties.bootstrap.servers = '{}', \
         discovery_interval = '100ms'{more})",
        broker.servers()
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn every_format_and_fact_of_a_message_arrives() {
    let topics = ["plain", "csv", "bytes", "upsert", "upsert_csv", "changes"];
    let broker = Broker::new(&topics.map(|t| (t, 2)));
    send_every_format(&broker);
    broker.flush();
    let dir = tempfile::tempdir().unwrap();
    let server = start(dir.path());
    let client = server.connect().await.unwrap();
    execute(
        &client,
        &format!(
            "CREATE SOURCE plain (id bigint, name text, price numeric(8,2), twice AS price * 2) INCLUDE key INCLUDE partition \
             INCLUDE offset AS at INCLUDE timestamp {} FORMAT PLAIN ENCODE JSON;
             CREATE SOURCE csv (id int, name text, note text) {} FORMAT PLAIN ENCODE CSV;
             CREATE SOURCE bytes (value bytea) {} FORMAT PLAIN ENCODE BYTES;
             CREATE TABLE upserted (id int PRIMARY KEY, name text NOT NULL) {} FORMAT UPSERT ENCODE JSON;
             CREATE TABLE upserted_csv (id int PRIMARY KEY, name text) {} FORMAT UPSERT ENCODE CSV;
             CREATE TABLE changed (id int PRIMARY KEY, name text) {} FORMAT DEBEZIUM ENCODE JSON;
             CREATE MATERIALIZED VIEW v AS SELECT id, name, price, twice, convert_from(_key, 'UTF8') AS k, _partition, at, _timestamp FROM plain;
             CREATE MATERIALIZED VIEW lines AS SELECT id, name, note IS NULL AS empty FROM csv;
             CREATE MATERIALIZED VIEW raw AS SELECT convert_from(value, 'UTF8') AS text FROM bytes;
             CREATE MATERIALIZED VIEW of_changes AS SELECT count(*) AS n, max(name) AS last FROM changed;",
            from(&broker, "plain", ""),
            from(&broker, "csv", ""),
            from(&broker, "bytes", ""),
            from(&broker, "upsert", ""),
            from(&broker, "upsert_csv", ""),
            from(&broker, "changes", ""),
        ),
    )
    .await;
    let at = "2023-11-14 22:13:20.123+00";
    let expected = [
        format!("1|n1|1.50|3.00|k1|0|0|{at}"),
        format!("2|n2|2.50|5.00|k2|1|0|{at}"),
        format!("3|n3|3.50|7.00|k3|0|1|{at}"),
    ];
    eventually(&client, "SELECT * FROM v", &expected.each_ref().map(String::as_str)).await;
    eventually(&client, "SELECT * FROM lines", &["1|a,1|t", "2|a,2|t", "3|a,3|t"]).await;
    eventually(&client, "SELECT * FROM raw", &["raw 1", "raw 2", "raw 3"]).await;
    eventually(&client, "SELECT * FROM upserted", &["1|c"]).await;
    eventually(&client, "SELECT * FROM upserted_csv", &["8|eight"]).await;
    eventually(&client, "SELECT * FROM changed", &["1|z", "3|c"]).await;
    eventually(&client, "SELECT * FROM of_changes", &["2|z"]).await;
    // The message that is no JSON was skipped, and is told with its place.
    eventually_if(
        &client,
        "SELECT * FROM millrace_catalog.errors",
        |rows| {
            rows.iter().any(|r| r.contains("topic plain, partition 0") && r.contains("offset 2"))
        },
        "an error that names partition and offset",
    )
    .await;
}

fn send_every_format(broker: &Broker) {
    for (partition, id) in [(0, 1), (1, 2), (0, 3)] {
        let value = format!("{{\"id\":{id},\"name\":\"n{id}\",\"price\":{id}.50}}");
        broker.send("plain", partition, Some(&format!("k{id}")), Some(&value));
        broker.send("csv", partition, None, Some(&format!("{id},\"a,{id}\",")));
        broker.send("bytes", partition, None, Some(&format!("raw {id}")));
    }
    broker.send("plain", 0, None, Some("no json"));
    broker.send("upsert", 0, Some("{\"id\":1}"), Some("{\"id\":1,\"name\":\"a\"}"));
    broker.send("upsert", 1, Some("{\"id\":2}"), Some("{\"id\":2,\"name\":\"b\"}"));
    broker.send("upsert", 0, Some("{\"id\":1}"), Some("{\"id\":1,\"name\":\"c\"}"));
    broker.send("upsert", 1, Some("{\"id\":2}"), None);
    broker.send("upsert_csv", 0, Some("7"), Some("7,seven"));
    broker.send("upsert_csv", 0, Some("8"), Some("8,eight"));
    broker.send("upsert_csv", 0, Some("7"), None);
    let row = |id: i32, name: &str| format!("{{\"id\":{id},\"name\":\"{name}\"}}");
    for (before, after) in [
        ("null".to_owned(), row(1, "a")),
        ("null".to_owned(), row(2, "b")),
        (row(1, "a"), row(1, "z")),
        (row(2, "b"), "null".to_owned()),
        ("null".to_owned(), row(3, "c")),
    ] {
        let change =
            format!("{{\"payload\":{{\"before\":{before},\"after\":{after},\"op\":\"x\"}}}}");
        broker.send("changes", 0, None, Some(&change));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_topic_is_read_from_where_it_is_told_and_its_lag_is_shown() {
    let broker = Broker::new(&[("t", 1)]);
    for id in 0..2_000 {
        broker.send("t", 0, None, Some(&format!("{id}")));
    }
    broker.flush();
    let dir = tempfile::tempdir().unwrap();
    let server = start(dir.path());
    let client = server.connect().await.unwrap();
    let latest = from(&broker, "t", ", scan.startup.mode = 'latest'");
    let slow = from(&broker, "t", ", rate_limit = 10");
    let all = from(&broker, "t", "");
    execute(
        &client,
        &format!(
            "CREATE SOURCE latest (id int) {latest} FORMAT PLAIN ENCODE CSV;
             CREATE SOURCE slow (id int) {slow} FORMAT PLAIN ENCODE CSV;
             CREATE SOURCE every (id int) {all} FORMAT PLAIN ENCODE CSV;
             CREATE MATERIALIZED VIEW of_latest AS SELECT count(*) AS n, min(id) AS first FROM latest;
             CREATE MATERIALIZED VIEW of_slow AS SELECT count(*) AS n FROM slow;
             CREATE MATERIALIZED VIEW of_every AS SELECT count(*) AS n, sum(id) AS s FROM every;"
        ),
    )
    .await;
    // First of all: what is slow is less and less behind.
    eventually_if(
        &client,
        "SELECT lag FROM millrace_catalog.source_splits WHERE source_name = 'slow'",
        |rows| rows.first().is_some_and(|r| r.parse().is_ok_and(|lag: u64| lag > 1_000)),
        "behind",
    )
    .await;
    eventually(&client, "SELECT * FROM of_every", &["2000|1999000"]).await;
    // The partition that begins at its end is known before something comes after it.
    let split = "SELECT start_offset, available_offset FROM millrace_catalog.source_splits WHERE source_name = 'latest'";
    eventually(&client, split, &["2000|2000"]).await;
    for id in 2_000..2_005 {
        broker.send("t", 0, None, Some(&format!("{id}")));
    }
    broker.flush();
    eventually(&client, "SELECT * FROM of_latest", &["5|2000"]).await;
    execute(&client, "ALTER SOURCE slow SET (rate_limit = 0)").await;
    eventually(&client, "SELECT * FROM of_slow", &["2005"]).await;
    eventually(
        &client,
        "SELECT lag FROM millrace_catalog.source_splits WHERE source_name = 'slow'",
        &["0"],
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn brokers_that_go_away_are_told_and_come_back() {
    let mut broker = Broker::new(&[("t", 1)]);
    let send = |broker: &Broker, from: i32| {
        (from..from + 10).for_each(|id| broker.send("t", 0, None, Some(&id.to_string())));
        broker.flush();
    };
    send(&broker, 0);
    let dir = tempfile::tempdir().unwrap();
    let server = start(dir.path());
    let client = server.connect().await.unwrap();
    let all = from(&broker, "t", ", properties.socket.timeout.ms = 1000");
    execute(
        &client,
        &format!(
            "CREATE SOURCE s (id int) {all} FORMAT PLAIN ENCODE CSV;
             CREATE MATERIALIZED VIEW v AS SELECT count(*) AS n, sum(id) AS s FROM s;
             CREATE TABLE other (k int PRIMARY KEY);
             CREATE MATERIALIZED VIEW of_other AS SELECT count(*) AS n FROM other;"
        ),
    )
    .await;
    eventually(&client, "SELECT * FROM v", &["10|45"]).await;
    broker.down();
    eventually_if(
        &client,
        "SHOW SOURCES",
        |rows| rows.iter().any(|r| r.contains("failing") && r.contains("topic t")),
        "a failing source with its reason",
    )
    .await;
    // Nobody else notices, and what was read stays readable.
    execute(&client, "INSERT INTO other VALUES (1), (2)").await;
    assert_eq!(answer(&client, "SELECT * FROM of_other").await, ["2"]);
    assert_eq!(answer(&client, "SELECT * FROM v").await, ["10|45"]);
    broker.up();
    send(&broker, 10);
    eventually(&client, "SELECT * FROM v", &["20|190"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_count_exactly_once_whatever_is_killed() {
    const PARTITIONS: i32 = 3;
    const A_ROUND: u64 = 3_000;
    const ROUNDS: u64 = 6;
    let broker = Broker::new(&[("t", PARTITIONS), ("u", PARTITIONS)]);
    let dir = tempfile::tempdir().unwrap();
    let mut server = start(dir.path());
    {
        let client = server.connect().await.unwrap();
        let (t, u) = (from(&broker, "t", ""), from(&broker, "u", ""));
        execute(
            &client,
            &format!(
                "CREATE SOURCE t (id bigint, k int) {t} FORMAT PLAIN ENCODE JSON;
                 CREATE TABLE u (k int PRIMARY KEY, v bigint) {u} FORMAT UPSERT ENCODE JSON;
                 CREATE TABLE kept (id bigint, k int) {t} FORMAT PLAIN ENCODE JSON;
                 CREATE MATERIALIZED VIEW by_k AS SELECT k, count(*) AS n, sum(id) AS s FROM t GROUP BY k;
                 CREATE MATERIALIZED VIEW of_u AS SELECT count(*) AS n, sum(v) AS s FROM u;"
            ),
        )
        .await;
    }
    let mut newest = std::collections::BTreeMap::new();
    for round in 0..ROUNDS {
        for id in round * A_ROUND..(round + 1) * A_ROUND {
            let partition = (id % PARTITIONS as u64) as i32;
            let value = format!("{{\"id\":{id},\"k\":{}}}", id % 10);
            broker.send("t", partition, None, Some(&value));
            // A key stays in its partition; every seventh message deletes.
            let key = id * 7 % 60;
            let place = (key % PARTITIONS as u64) as i32;
            let value = (id % 7 != 0).then(|| format!("{{\"k\":{key},\"v\":{id}}}"));
            broker.send("u", place, Some(&format!("{{\"k\":{key}}}")), value.as_deref());
            match value {
                Some(_) => drop(newest.insert(key, id)),
                None => drop(newest.remove(&key)),
            }
        }
        broker.flush();
        // The moment is the point: it is not synchronisation.
        tokio::time::sleep(Duration::from_millis(60 + 130 * round)).await;
        server.restart(None).expect("the server starts after a kill");
    }
    let client = server.connect().await.unwrap();
    let all = A_ROUND * ROUNDS;
    let groups: Vec<String> = (0..10u64)
        .map(|k| format!("{k}|{}|{}", all / 10, (k..all).step_by(10).sum::<u64>()))
        .collect();
    let groups: Vec<&str> = groups.iter().map(String::as_str).collect();
    eventually(&client, "SELECT * FROM by_k", &groups).await;
    let kept = format!("{all}|{all}|{}", all * (all - 1) / 2);
    let sql = "SELECT count(*), count(DISTINCT id), sum(id) FROM kept";
    eventually(&client, sql, &[&kept]).await;
    let upserted = format!("{}|{}", newest.len(), newest.values().sum::<u64>());
    eventually(&client, "SELECT * FROM of_u", &[&upserted]).await;
    let rows: Vec<String> = newest.iter().map(|(k, v)| format!("{k}|{v}")).collect();
    let mut expected: Vec<&str> = rows.iter().map(String::as_str).collect();
    expected.sort_unstable();
    eventually(&client, "SELECT * FROM u", &expected).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_cannot_be_read_stops_its_reader_until_told_otherwise() {
    let broker = Broker::new(&[("t", 1)]);
    for value in ["1", "no number", "3"] {
        broker.send("t", 0, None, Some(value));
    }
    broker.flush();
    let dir = tempfile::tempdir().unwrap();
    let mut server = start(dir.path());
    let client = server.connect().await.unwrap();
    let strict = from(&broker, "t", ", on_error = 'fail'");
    execute(
        &client,
        &format!(
            "CREATE SOURCE s (id int) {strict} FORMAT PLAIN ENCODE CSV;
             CREATE TABLE kept (id int) {strict} FORMAT PLAIN ENCODE CSV;
             SET background_ddl = on;
             CREATE MATERIALIZED VIEW v AS SELECT count(*) AS n, sum(id) AS s FROM s;"
        ),
    )
    .await;
    eventually_if(
        &client,
        "SHOW JOBS",
        |rows| rows.iter().any(|r| r.contains("offset 1") && r.contains("failed")),
        "a job that stopped at the message",
    )
    .await;
    execute(
        &client,
        "ALTER SOURCE s SET (on_error = 'skip'); ALTER TABLE kept SET (on_error = 'skip');",
    )
    .await;
    let going = |rows: &[String]| !rows.iter().any(|r| r.contains("failed"));
    eventually_if(&client, "SHOW JOBS", going, "no failed job").await;
    // An attempt that had begun before it was told otherwise fails once more.
    let deadline = Instant::now() + Duration::from_secs(180);
    while let Err(e) = client.batch_execute("WAIT").await {
        assert!(Instant::now() < deadline, "{e:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    eventually(&client, "SELECT * FROM v", &["2|4"]).await;
    eventually(&client, "SELECT * FROM kept", &["1", "3"]).await;
    let told = "SELECT DISTINCT count, message FROM millrace_catalog.errors WHERE place = 'topic t, partition 0' AND name = 'v'";
    let is_told = |rows: &[String]| rows.len() == 1 && rows[0].starts_with("1|offset 1: ");
    eventually_if(&client, told, is_told, "one message that was skipped").await;
    let before = answer(&client, told).await;
    // What was told outlives the process.
    server.restart(None).expect("the server starts after a kill");
    let client = server.connect().await.unwrap();
    eventually_if(&client, told, |rows| rows == before, &format!("{before:?}")).await;
    eventually(&client, "SELECT * FROM v", &["2|4"]).await;
}
