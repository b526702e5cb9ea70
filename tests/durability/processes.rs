//! A server is a process of the log: a restart is another one, and what it writes for nothing goes while it lives.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::{SinkExt, TryStreamExt};
use millrace::Tuning;
use millrace_meta::Meta;
use object_store::ObjectStore;
use object_store::memory::InMemory;
use object_store::path::Path;
use tokio_postgres::Client;

use super::{Node, PATIENCE, one, run};

const TUNING: Tuning = Tuning {
    inline_bytes: Some(64),
    gc_interval: Some(Duration::from_millis(50)),
    ..Tuning::DEFAULT
};

async fn number(client: &Client, what: &str) -> u64 {
    let sql = format!("SELECT {what} FROM millrace_catalog.processes");
    one(client, &sql).await.parse().expect("a number")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restarted_server_is_another_process_and_the_only_one() {
    let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    let mut last = 0;
    for round in 0..3 {
        let node = Node::start(&store, TUNING).await;
        let client = node.connect().await;
        assert_eq!(number(&client, "count(*)").await, 1, "the one before is fenced");
        let incarnation = number(&client, "incarnation").await;
        assert!(incarnation > last, "{incarnation} after {last}");
        last = incarnation;
        let roles = one(&client, "SELECT roles FROM millrace_catalog.processes").await;
        assert_eq!(roles, "{meta,frontend,compute,compactor}");
        let applied = number(&client, "applied_record").await;
        run(&client, &format!("CREATE TABLE t{round} (k int)")).await;
        run(&client, &format!("INSERT INTO t{round} VALUES (1)")).await;
        let deadline = Instant::now() + PATIENCE;
        while number(&client, "applied_record").await < applied + 2 {
            assert!(Instant::now() < deadline, "no record is applied");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

/// What `ALTER … SET PARALLELISM` has answered holds after a crash, and no row is lost on the way.
#[tokio::test(flavor = "multi_thread")]
async fn the_number_of_tasks_outlasts_a_crash() {
    const VIEW: &str = "SELECT k % 7 AS g, sum(v) AS v FROM t GROUP BY k % 7";
    let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    let node = Node::start(&store, TUNING).await;
    let client = node.connect().await;
    run(&client, "CREATE TABLE t (k int PRIMARY KEY, v bigint)").await;
    run(&client, &format!("CREATE MATERIALIZED VIEW s AS {VIEW}")).await;
    // 1 + … + 100.
    run(&client, "INSERT INTO t SELECT x, x FROM generate_series(1, 100) AS s(x)").await;
    drop((client, node));
    for (round, tasks) in [(1, 5), (2, 1), (3, 3)] {
        let node = Node::start(&store, TUNING).await;
        let client = node.connect().await;
        run(&client, &format!("ALTER TABLE t SET PARALLELISM {tasks}")).await;
        run(&client, &format!("ALTER MATERIALIZED VIEW s SET PARALLELISM {tasks}")).await;
        drop((client, node));
        let node = Node::start(&store, TUNING).await;
        let client = node.connect().await;
        let told = "SELECT string_agg(name || ' ' || parallelism, ', ' ORDER BY name) \
                    FROM millrace_catalog.jobs";
        assert_eq!(one(&client, told).await, format!("s {tasks}, t {tasks}"));
        run(&client, "UPDATE t SET v = v + 1").await;
        let sum = one(&client, "SELECT sum(v) FROM s").await;
        assert_eq!(sum, (5_050 + 100 * round).to_string());
    }
}

/// Objects in the bucket that no version names.
async fn unnamed(meta: &Meta, store: &Arc<dyn ObjectStore>) -> BTreeSet<String> {
    let objects: Vec<_> =
        store.list(Some(&Path::from("data"))).try_collect().await.expect("the store lists");
    let mut names: BTreeSet<String> = objects.into_iter().map(|o| o.location.to_string()).collect();
    for job in meta.job_statuses() {
        let runs = job.version.runs.iter().map(|run| &run.object);
        for named in runs.chain(job.version.tail.iter().map(|slice| &slice.object)) {
            names.remove(named);
        }
    }
    names
}

/// Too many rows to be kept in memory, and a bad one at the end.
async fn failing_copy(client: &Client) {
    let sink = client.copy_in("COPY t FROM STDIN").await.expect("COPY begins");
    futures::pin_mut!(sink);
    let filler = "c".repeat(1_000);
    let rows: String = (0..1_000).map(|k| format!("{k}\t{filler}\n")).collect();
    for _ in 0..24 {
        sink.send(bytes::Bytes::from(rows.clone())).await.expect("data");
    }
    sink.send(bytes::Bytes::from_static(b"no number\tx\n")).await.expect("data");
    sink.finish().await.expect_err("the last row is bad");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_load_that_fails_leaves_nothing_in_the_bucket_of_a_living_server() {
    let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    let node = Node::start(&store, TUNING).await;
    let client = node.connect().await;
    run(&client, "CREATE TABLE t (k int, v varchar)").await;
    run(&client, "INSERT INTO t SELECT x, md5(x::text) FROM generate_series(1, 1000) s(x)").await;
    let before = super::object_bytes(&store).await;
    let watched = Arc::clone(&store);
    let mut most = 0;
    {
        let copy = failing_copy(&client);
        futures::pin_mut!(copy);
        loop {
            let pause = tokio::time::sleep(Duration::from_millis(2));
            tokio::select! {
                () = &mut copy => break,
                () = pause => most = super::object_bytes(&watched).await.max(most),
            }
        }
    }
    assert!(most > before, "rows were staged in the bucket");
    let meta = &node.server().meta;
    let deadline = Instant::now() + PATIENCE;
    loop {
        let left = unnamed(meta, &store).await;
        if left.is_empty() {
            break;
        }
        assert!(Instant::now() < deadline, "{left:?} are there for nothing");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(one(&client, "SELECT count(*) FROM t").await, "1000");
}
