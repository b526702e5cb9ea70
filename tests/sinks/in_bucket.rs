//! Files in a bucket, out and in: what a sink writes to S3 is its query, and a source reads it back.

use std::collections::BTreeSet;
use std::path::Path;

use futures::StreamExt;
use millrace_sqllogictest::{Server, ServerOptions, bucket};
use object_store::aws::{AmazonS3, AmazonS3Builder};
use object_store::path::Path as Key;
use object_store::{ObjectStore, ObjectStoreExt};

use super::{Random, TABLES, execute, files, flush, sorted, statement};

fn store(endpoint: &str, bucket: &str) -> AmazonS3 {
    AmazonS3Builder::new()
        .with_endpoint(endpoint)
        .with_bucket_name(bucket)
        .with_access_key_id("x")
        .with_secret_access_key("x")
        .with_region("us-east-1")
        .with_allow_http(true)
        .build()
        .expect("a client of the bucket")
}

/// The objects below a prefix as files of a directory.
async fn download(store: &AmazonS3, prefix: &str, to: &Path) {
    let prefix = Key::from(prefix);
    let listed: Vec<_> = store.list(Some(&prefix)).collect().await;
    let mut seen = BTreeSet::new();
    for object in listed {
        let object = object.expect("the bucket is listed");
        let name = object.location.filename().expect("a name").to_owned();
        let content = store.get(&object.location).await.expect("an object");
        std::fs::write(to.join(&name), content.bytes().await.expect("its bytes")).expect("a file");
        assert!(seen.insert(name));
    }
}

async fn upload(store: &AmazonS3, key: &str, text: &str) {
    store.put(&Key::from(key), text.to_owned().into()).await.expect("an object is put");
}

async fn eventually(client: &tokio_postgres::Client, sql: &str, expected: &[Vec<String>]) {
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(180);
    loop {
        let rows = sorted(client, sql).await;
        if rows == expected {
            return;
        }
        assert!(std::time::Instant::now() < deadline, "{sql} is {rows:?}, not {expected:?}");
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn files_in_a_bucket_are_written_and_read_exactly_once() {
    let Some(endpoint) = bucket::endpoint() else { return };
    let name = format!("sinks-{}", std::process::id());
    bucket::create(&endpoint, &name);
    let store = store(&endpoint, &name);
    let dir = tempfile::tempdir().unwrap();
    let options =
        ServerOptions { env: bucket::environment(&endpoint), ..ServerOptions::small(dir.path()) };
    let mut server = Server::start(Path::new(env!("CARGO_BIN_EXE_millrace")), options)
        .expect("the server starts");
    let mut random = Random(3);
    upload(&store, "in/1.csv", "1,one\n2,\"two, or three\"\nbroken\n").await;
    {
        let client = server.connect().await.unwrap();
        execute(&client, TABLES).await;
        execute(
            &client,
            &format!(
                "CREATE SINK cities_out FROM cities WITH (connector = 'fs', path = 's3://{name}/cities') FORMAT UPSERT ENCODE JSON;
                 CREATE SINK orders_out FROM orders WITH (connector = 'fs', path = 's3://{name}/a/b/orders') FORMAT DEBEZIUM ENCODE JSON;
                 CREATE SINK events_out FROM events WITH (connector = 'fs', path = 's3://{name}/events/') FORMAT PLAIN ENCODE CSV;
                 CREATE SOURCE lines (n int, what text) WITH (connector = 'fs', path = 's3://{name}/in/*.csv', discovery_interval = '200ms')
                     FORMAT PLAIN ENCODE CSV;
                 CREATE MATERIALIZED VIEW read AS SELECT n, what FROM lines;
                 CREATE TABLE back (n int, what text) WITH (connector = 'fs', path = 's3://{name}/events/*', discovery_interval = '200ms')
                     FORMAT PLAIN ENCODE CSV;"
            ),
        )
        .await;
    }
    for round in 0..3 {
        let client = server.connect().await.unwrap();
        for _ in 0..8 {
            execute(&client, &statement(&mut random)).await;
        }
        upload(&store, &format!("in/{}.csv", round + 2), &format!("{},more\n", round + 10)).await;
        server.restart(None).expect("the server starts after a kill");
        let client = server.connect().await.unwrap();
        flush(&client).await;
        let copy = tempfile::tempdir().unwrap();
        let at = |part: &str| {
            let path = copy.path().join(part);
            std::fs::create_dir_all(&path).unwrap();
            path
        };
        let when = format!("round {round}");
        download(&store, "cities", &at("cities")).await;
        download(&store, "a/b/orders", &at("orders")).await;
        download(&store, "events", &at("events")).await;
        let cities = sorted(&client, "SELECT city, orders, amount FROM cities").await;
        let upserted = files::upserted(&at("cities"), &["city", "orders", "amount"]);
        assert_eq!(upserted, cities, "{when}: upserts");
        let orders = sorted(&client, "SELECT id, city, amount FROM orders").await;
        let replayed = files::replayed(&at("orders"), &["id", "city", "amount"], &when);
        assert_eq!(replayed, orders, "{when}: changes");
        let events = sorted(&client, "SELECT n, what FROM events").await;
        assert_eq!(files::csv_lines(&at("events")), events, "{when}: lines");
        // What went out comes in.
        eventually(&client, "SELECT n, what FROM back", &events).await;
        let mut read =
            vec![vec!["1".to_owned(), "one".to_owned()], vec!["2".into(), "two, or three".into()]];
        read.extend((0..=round).map(|r| vec![(r + 10).to_string(), "more".to_owned()]));
        read.sort();
        eventually(&client, "SELECT n, what FROM read", &read).await;
    }
}
