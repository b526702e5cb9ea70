//! Several compactors, of which one stalls.

use std::time::{Duration, Instant};

use tokio_postgres::Client;

use crate::one;
use crate::process::{Cluster, stop};
use crate::sessions::{LIMIT, await_true};

const NAMES: [&str; 5] = ["meta", "compute", "compactor1", "compactor2", "frontend1"];

/// For how long one is stopped at a time: a task of one that says nothing is taken back after less than half of it.
const STOPPED: Duration = Duration::from_secs(9);

/// What the process of this name was given when it registered last, which is more than `before`. They register in any order.
async fn incarnation_of(name: &str, before: i64, cluster: &Cluster, client: &Client) -> i64 {
    let of_it = format!(
        "FROM millrace_catalog.processes WHERE address = '{}' AND incarnation > {before}",
        cluster.address(name)
    );
    await_true(client, &format!("SELECT (count(*) > 0)::int::bigint {of_it}")).await;
    one(client, &format!("SELECT max(incarnation)::bigint {of_it}")).await
}

/// A table that is written all the time, so that there are runs to be merged.
struct Writer {
    client: Client,
    rows: i64,
}

impl Writer {
    async fn write(&mut self) {
        let sql = format!(
            "INSERT INTO t SELECT {} + i, repeat('x', 100) FROM generate_series(0, 199) AS g(i)",
            self.rows
        );
        self.client.batch_execute(&sql).await.unwrap();
        self.rows += 200;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_of_a_stopped_compactor_is_given_to_the_other() {
    let dir = tempfile::tempdir().unwrap();
    let mut cluster = Cluster::start_with(dir.path(), &NAMES).await;
    let client = cluster.connect("frontend1").await;
    client.batch_execute("CREATE TABLE t (id bigint PRIMARY KEY, v text)").await.unwrap();
    let mut writer = Writer { client, rows: 0 };
    let mut stopped = incarnation_of("compactor1", 0, &cluster, &writer.client).await;
    let other = incarnation_of("compactor2", 0, &cluster, &writer.client).await;
    let deadline = Instant::now() + LIMIT * 2;
    // It may be given nothing while it is stopped.
    loop {
        assert!(Instant::now() < deadline, "none of its tasks was taken back");
        cluster.process("compactor1").signal("STOP");
        let taken_back = format!("process={stopped}");
        let is_taken_back = |log: String| {
            let mut lines = log.lines().filter(|l| l.contains("a compaction is taken back"));
            lines.any(|line| line.contains(&taken_back))
        };
        let since = Instant::now();
        let mut is_done = false;
        while !is_done && since.elapsed() < STOPPED {
            writer.write().await;
            is_done = is_taken_back(cluster.process("meta").log());
        }
        if is_done {
            println!("taken back after {:?}", since.elapsed());
            break;
        }
        // It has been fenced.
        cluster.process("compactor1").kill();
        cluster.begin("compactor1");
        stopped = incarnation_of("compactor1", stopped, &cluster, &writer.client).await;
    }
    let before = cluster.objects_of(other as u64);
    let deadline = Instant::now() + LIMIT;
    while cluster.objects_of(other as u64) == before {
        assert!(Instant::now() < deadline, "{}", cluster.process("compactor2").log());
        writer.write().await;
    }
    // What it still does of the task changes nothing.
    cluster.process("compactor1").signal("CONT");
    let Writer { client, rows } = writer;
    let none = "SELECT (count(*) = 0)::int::bigint FROM millrace_catalog.compactions WHERE state = 'running'";
    await_true(&client, none).await;
    assert_eq!(one::<i64>(&client, "SELECT count(*) FROM t").await, rows);
    assert_eq!(one::<i64>(&client, "SELECT count(DISTINCT id) FROM t").await, rows);
}

/// How long it is stopped until it has a task, at most. Not so long that it is taken for lost.
const GIVEN: Duration = Duration::from_secs(2);
/// Less than half of a lease.
const GIVEN_BACK: Duration = Duration::from_secs(25);

/// Whether the leader has fenced a process of which it had heard nothing.
fn was_lost(leader: &str, process: i64) -> bool {
    let of_it = format!("[{process}]");
    leader.lines().any(|line| line.contains("for too long") && line.contains(&of_it))
}

/// SIGTERM while it has a task.
#[tokio::test(flavor = "multi_thread")]
async fn a_compactor_that_ends_leaves_and_its_task_is_another_one_s() {
    let dir = tempfile::tempdir().unwrap();
    let mut cluster = Cluster::start_with(dir.path(), &NAMES).await;
    let client = cluster.connect("frontend1").await;
    client.batch_execute("CREATE TABLE t (id bigint PRIMARY KEY, v text)").await.unwrap();
    let mut writer = Writer { client, rows: 0 };
    let mut ending = incarnation_of("compactor1", 0, &cluster, &writer.client).await;
    let other = incarnation_of("compactor2", 0, &cluster, &writer.client).await;
    let deadline = Instant::now() + LIMIT * 2;
    let ended = loop {
        assert!(Instant::now() < deadline, "it has never had a task");
        stop(cluster.process("compactor1").id());
        let running = format!(
            "SELECT count(*) FROM millrace_catalog.compactions \
             WHERE state = 'running' AND worker = {ending}"
        );
        let (stopped, mut has_task) = (Instant::now(), false);
        while !has_task && stopped.elapsed() < GIVEN {
            writer.write().await;
            has_task = one::<i64>(&writer.client, &running).await > 0;
        }
        let process = cluster.process("compactor1");
        process.signal("TERM");
        process.signal("CONT");
        process.await_end(LIMIT);
        let ended = Instant::now();
        let leader = cluster.process("meta").log();
        if has_task && !was_lost(&leader, ending) {
            break ended;
        }
        cluster.begin("compactor1");
        ending = incarnation_of("compactor1", ending, &cluster, &writer.client).await;
    };
    let log = cluster.process("compactor1").log();
    assert!(log.contains("stopping") && !log.contains("this one ends"), "{log}");
    let running = "compactions WHERE state = 'running' AND worker";
    for what in [running, "processes WHERE incarnation"] {
        let none =
            format!("SELECT (count(*) = 0)::int::bigint FROM millrace_catalog.{what} = {ending}");
        await_true(&writer.client, &none).await;
    }
    assert!(ended.elapsed() < GIVEN_BACK, "{:?}", ended.elapsed());
    assert!(!was_lost(&cluster.process("meta").log(), ending), "it has left by itself");

    let before = cluster.objects_of(other as u64);
    let deadline = Instant::now() + LIMIT;
    while cluster.objects_of(other as u64) == before {
        assert!(Instant::now() < deadline, "{}", cluster.process("compactor2").log());
        writer.write().await;
    }
    let Writer { client, rows } = writer;
    assert_eq!(one::<i64>(&client, "SELECT count(DISTINCT id) FROM t").await, rows);
}
