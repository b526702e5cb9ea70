//! A long life of small jobs: what their commits leave in the log, its snapshots and the bucket is bounded, and an
//! idle server makes no requests.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::TryStreamExt;
use millrace::Tuning;
use millrace_storage::sim::{Profile, SimStore};
use object_store::ObjectStore;
use object_store::memory::InMemory;
use object_store::path::Path;
use tokio_postgres::Client;

use super::{Node, PATIENCE, one, run};

const TABLES: usize = 2;
/// Over each table.
const VIEWS: usize = 2;
const FLUSH_COMMITS: usize = 100;

const TUNING: Tuning = Tuning {
    flush_commits: Some(FLUSH_COMMITS),
    snapshot_records: Some(256),
    gc_interval: Some(Duration::from_millis(100)),
    ..Tuning::DEFAULT
};

/// Tables of one row a writer, and views of a few groups over them.
async fn create(client: &Client) {
    for t in 0..TABLES {
        let table = format!("t{t}");
        run(client, &format!("CREATE TABLE {table} (k int PRIMARY KEY, v bigint)")).await;
        run(client, &format!("INSERT INTO {table} SELECT x, 0 FROM generate_series(0, 9) AS s(x)"))
            .await;
        for v in 0..VIEWS {
            let view = format!("CREATE MATERIALIZED VIEW v{t}_{v} AS");
            let groups = v + 2;
            run(
                client,
                &format!("{view} SELECT k % {groups} AS g, sum(v) AS s FROM {table} GROUP BY k % {groups}"),
            )
            .await;
        }
    }
}

/// What the jobs have left behind.
#[derive(Clone, Copy, Debug)]
struct Left {
    commits: u64,
    /// Of the job that has most.
    slices: usize,
    runs: usize,
    snapshot_bytes: usize,
    objects: usize,
}

async fn left(node: &Node, store: &Arc<dyn ObjectStore>) -> Left {
    let meta = &node.server().meta;
    let jobs = meta.job_statuses();
    let objects: Vec<_> =
        store.list(Some(&Path::from("data"))).try_collect().await.expect("the store lists");
    Left {
        commits: jobs.iter().map(|j| j.counters.commits).sum(),
        slices: jobs.iter().map(|j| j.version.tail.len()).max().unwrap_or(0),
        runs: jobs.iter().map(|j| j.version.runs.len()).max().unwrap_or(0),
        snapshot_bytes: meta.snapshot_bytes(),
        objects: objects.len(),
    }
}

/// Updates one row of a table, again and again, until the jobs have made so many commits.
async fn write(node: &Node, writer: usize, commits: u64) -> u64 {
    let client = node.connect().await;
    let sql = format!("UPDATE t{} SET v = v + 1 WHERE k = {writer}", writer % TABLES);
    let statement = client.prepare(&sql).await.expect("the statement is prepared");
    let mut updates = 0;
    loop {
        for _ in 0..16 {
            client.execute(&statement, &[]).await.expect("the update succeeds");
        }
        updates += 16;
        let jobs = node.server().meta.job_statuses();
        if jobs.iter().map(|j| j.counters.commits).sum::<u64>() >= commits {
            return updates;
        }
    }
}

/// Flushes, compactions and the collection of garbage catch up with what was written.
async fn settled(node: &Node, store: &Arc<dyn ObjectStore>, client: &Client) -> Left {
    let deadline = Instant::now() + PATIENCE;
    loop {
        // Garbage is looked for after something has happened.
        run(client, "UPDATE t0 SET v = v WHERE k = 0").await;
        run(client, "UPDATE t0 SET v = v + 0 WHERE k = 9").await;
        let left = left(node, store).await;
        if left.slices <= FLUSH_COMMITS && left.runs <= 40 && left.objects <= 60 {
            return left;
        }
        assert!(Instant::now() < deadline, "it stays: {left:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn small_commits_for_ever_leave_a_bounded_log_and_bucket() {
    let all = u64::from(millrace_common::random_tests::cases(4_000, 20_000));
    let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    let node = Node::start_at(&store, TUNING, Duration::from_millis(1)).await;
    let client = node.connect().await;
    create(&client).await;
    let (mut updates, mut seen) = (0, Vec::new());
    for commits in [all / 2, all] {
        let writers = (0..4).map(|writer| write(&node, writer, commits));
        updates += futures::future::join_all(writers).await.into_iter().sum::<u64>();
        seen.push(settled(&node, &store, &client).await);
    }
    println!("{updates} updates: {seen:?}");
    let [half, end] = [seen[0], seen[1]];
    assert!(end.commits >= all && end.commits > half.commits);
    // A slice and its reference are about a kilobyte; timelines and statements are bounded too.
    let jobs = TABLES * (1 + VIEWS);
    let bound = jobs * (FLUSH_COMMITS * 2 + 20) * 1024 + (256 << 10);
    assert!(end.snapshot_bytes <= bound, "{} bytes in the snapshot", end.snapshot_bytes);
    drop((client, node));

    let node = Node::start_at(&store, TUNING, Duration::from_millis(1)).await;
    let client = node.connect().await;
    for t in 0..TABLES {
        for v in 0..VIEWS {
            let view = one(&client, &format!("SELECT sum(s) FROM v{t}_{v}")).await;
            assert_eq!(view, one(&client, &format!("SELECT sum(v) FROM t{t}")).await);
        }
    }
    let total = "SELECT (SELECT sum(v) FROM t0) + (SELECT sum(v) FROM t1)";
    assert_eq!(one(&client, total).await, updates.to_string());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_job_is_flushed_once_and_then_makes_no_requests() {
    let slow = SimStore::new(Arc::new(InMemory::new()), Profile::INSTANT, 1);
    let store: Arc<dyn ObjectStore> = Arc::new(slow.clone());
    let age = Duration::from_millis(300);
    // The sweep for what earlier processes have left would be seen.
    let hour = Some(Duration::from_secs(3_600));
    let tuning = Tuning { flush_age: Some(age), gc_interval: hour, ..Tuning::default() };
    let node = Node::start(&store, tuning).await;
    let client = node.connect().await;
    create(&client).await;
    run(&client, "UPDATE t1 SET v = 1").await;
    run(&client, "FLUSH").await;
    let deadline = Instant::now() + PATIENCE;
    while node.server().meta.job_statuses().iter().any(|j| !j.version.tail.is_empty()) {
        assert!(Instant::now() < deadline, "the tails stay");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    // What follows from the flushes comes to its end; then it is the silence that is looked at.
    let mut seen = slow.stats().requests();
    loop {
        tokio::time::sleep(age * 4).await;
        let now = slow.stats().requests();
        if now == seen {
            break;
        }
        assert!(Instant::now() < deadline, "an idle server makes requests: {seen}, then {now}");
        seen = now;
    }
    assert_eq!(one(&client, "SELECT sum(s) FROM v1_0").await, "10");
}
