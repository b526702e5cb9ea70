//! What is told of work under way: the progress of a creation, signs of life of a subscription, names in the log.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures::{StreamExt, TryStreamExt};
use millrace_common::{Env, EnvHandle};
use millrace_sqllogictest::suite;
use millrace_storage::sim::{Profile, SimStore};
use object_store::ObjectStore;
use object_store::memory::InMemory;
use tokio::sync::mpsc;
use tokio_postgres::{AsyncMessage, Client, NoTls};

use crate::clock::SetForward;
use crate::node::{Node, NodeOptions, one, run};

/// A connection and the messages of the notices that come over it.
async fn connect(port: u16) -> (Client, mpsc::UnboundedReceiver<String>) {
    let options = format!("host=127.0.0.1 port={port} user=root dbname=dev");
    let (client, mut connection) =
        tokio_postgres::connect(&options, NoTls).await.expect("a connection");
    let (sender, receiver) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        let mut messages = futures::stream::poll_fn(move |cx| connection.poll_message(cx));
        while let Some(Ok(message)) = messages.next().await {
            if let AsyncMessage::Notice(notice) = message {
                let _ = sender.send(notice.message().to_owned());
            }
        }
    });
    (client, receiver)
}

/// The next notice, which comes in a while.
async fn next(notices: &mut mpsc::UnboundedReceiver<String>) -> String {
    let notice = tokio::time::timeout(Duration::from_secs(120), notices.recv()).await;
    notice.expect("in time").expect("a notice")
}

/// A table of 20,000 rows whose reads hang.
async fn hung() -> (SimStore, Node) {
    let memory: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    let store = SimStore::new(memory, Profile::INSTANT, 7);
    let options =
        NodeOptions { flush_bytes: 256 << 10, ..NodeOptions::new(Arc::new(store.clone())) };
    let node = Node::start(&options).await;
    node.run(
        "CREATE TABLE a (g int, v int);
         INSERT INTO a SELECT g, g FROM generate_series(1, 20000) AS t(g)",
    )
    .await;
    node.settle(&store).await;
    drop(node);
    let node = Node::start(&options).await;
    store.hang_reads(Some("data/"));
    (store, node)
}

const CREATE: &str = "CREATE MATERIALIZED VIEW v AS SELECT g, sum(v) AS s FROM a GROUP BY g";

#[tokio::test(flavor = "multi_thread")]
async fn a_creation_tells_its_client_how_far_it_is() {
    let (store, node) = hung().await;
    let (client, mut notices) = connect(node.port).await;
    let watch = async {
        let first = next(&mut notices).await;
        assert!(first.starts_with("materialized view \"v\" is "), "{first}");
        assert!(first.contains("0 of about 20,000 rows read"), "{first}");
        // It has no content yet that could be behind.
        let told = "SELECT state, progress, lag_ms IS NULL, kind FROM millrace_catalog.jobs WHERE name = 'v'";
        let jobs = suite::rows(&node.connect().await, told).await.expect("the job is listed");
        assert!(["creating", "stalled"].contains(&jobs[0][0].as_str()), "{jobs:?}");
        assert_eq!(jobs[0][1..], ["0%", "t", "materialized view"]);
        let reason = node.wait_for_state("v", "stalled").await;
        assert!(reason.contains("object store"), "{reason}");
        store.release_reads();
    };
    let (created, ()) = tokio::join!(client.batch_execute(CREATE), watch);
    created.expect("it is created when its reads are answered");
    assert_eq!(one(&client, "SELECT count(*) FROM v").await, "20000");
}

#[tokio::test(flavor = "multi_thread")]
async fn notices_of_progress_can_be_switched_off() {
    let (store, node) = hung().await;
    let (client, mut notices) = connect(node.port).await;
    run(&client, "SET progress_notices = off").await;
    let watch = async {
        // By then another session would have been told.
        node.wait_for_state("v", "stalled").await;
        store.release_reads();
    };
    let (created, ()) = tokio::join!(client.batch_execute(CREATE), watch);
    created.expect("created");
    assert!(notices.try_recv().is_err(), "nothing was to be told");
    let drop = "DROP TABLE IF EXISTS none";
    run(&client, drop).await;
    assert!(next(&mut notices).await.contains("does not exist"));
    run(&client, "SET client_min_messages = warning").await;
    run(&client, drop).await;
    assert!(notices.try_recv().is_err(), "notices are below the level");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_view_that_waits_for_another_names_it() {
    let (store, node) = hung().await;
    let client = node.connect().await;
    run(&client, "SET background_ddl = on").await;
    run(&client, CREATE).await;
    run(&client, "CREATE MATERIALIZED VIEW w AS SELECT count(*) AS n FROM v").await;
    let reason = node.wait_for_state("w", "waiting").await;
    assert!(reason.contains("\"v\" is being created"), "{reason}");
    let waits = "SELECT waits_for FROM millrace_catalog.jobs WHERE name = 'w'";
    let waits = one(&client, waits).await;
    assert!(waits.starts_with("input v ("), "{waits}");
    store.release_reads();
    run(&client, "WAIT").await;
    assert_eq!(one(&client, "SELECT n FROM w").await, "20000");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_clock_that_was_set_back_is_told_of_views_that_follow_it() {
    const HOUR_MS: i64 = 3_600_000;
    let clock = Arc::new(SetForward::default());
    let options = NodeOptions {
        env: EnvHandle::from(Arc::clone(&clock) as Arc<dyn Env>),
        ..NodeOptions::new(Arc::new(InMemory::new()))
    };
    let node = Node::start(&options).await;
    let client = node
        .run(
            "CREATE TABLE t (at timestamptz);
             CREATE MATERIALIZED VIEW recent AS SELECT at FROM t WHERE at > now() - INTERVAL '10 minutes';
             CREATE MATERIALIZED VIEW every AS SELECT at FROM t",
        )
        .await;
    let insert = "INSERT INTO t VALUES (now())";
    let recent = "SELECT count(*) FROM recent";
    let told = "SELECT name FROM millrace_catalog.jobs WHERE reason LIKE '%clock%set back%'";
    run(&client, insert).await;
    assert_eq!(one(&client, recent).await, "1");
    assert!(suite::rows(&client, told).await.expect("jobs").is_empty());

    clock.0.store(HOUR_MS, Ordering::Relaxed);
    run(&client, insert).await;
    clock.0.store(0, Ordering::Relaxed);
    run(&client, insert).await;
    assert_eq!(one(&client, recent).await, "0", "an hour ahead, all rows are old");
    let jobs = suite::rows(&client, told).await.expect("jobs");
    assert_eq!(jobs, [["recent"]], "views that do not read the clock are right");

    // The clock gets there. Rows that come then are as old as they say.
    clock.0.store(HOUR_MS + 60_000, Ordering::Relaxed);
    run(&client, "INSERT INTO t VALUES (now() + INTERVAL '1 hour')").await;
    assert_eq!(one(&client, recent).await, "1");
    assert!(suite::rows(&client, told).await.expect("jobs").is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_subscription_shows_that_it_lives_while_nothing_happens() {
    let node = Node::start(&NodeOptions::new(Arc::new(InMemory::new()))).await;
    let client = node.run("CREATE TABLE t (k int PRIMARY KEY); INSERT INTO t VALUES (1)").await;
    let lines = client
        .copy_out("COPY (SUBSCRIBE TO t WITH (progress = true)) TO STDOUT")
        .await
        .expect("it is followed");
    let mut lines = std::pin::pin!(lines);
    let mut epochs = Vec::new();
    while epochs.len() < 4 {
        let line = tokio::time::timeout(Duration::from_secs(60), lines.try_next()).await;
        let line = line.expect("in time").expect("a line").expect("no end");
        let text = String::from_utf8_lossy(&line).into_owned();
        let cells: Vec<&str> = text.trim_end().split('\t').collect();
        if cells[1] == "progress" {
            epochs.push(cells[0].parse::<u64>().expect("an epoch"));
        }
    }
    assert!(epochs.is_sorted(), "{epochs:?}");
}
