//! Several compactors, of which one stalls.

use std::time::{Duration, Instant};

use tokio_postgres::Client;

use crate::one;
use crate::process::Cluster;
use crate::sessions::{LIMIT, await_true};

const NAMES: [&str; 5] = ["meta", "compute", "compactor1", "compactor2", "frontend1"];

/// For how long one is stopped at a time: a task of one that says nothing is taken back after less than half of it.
const STOPPED: Duration = Duration::from_secs(9);
const COMPACTORS: &str = "SELECT array_agg(incarnation::bigint ORDER BY incarnation)
    FROM millrace_catalog.processes WHERE roles = ARRAY['compactor']";

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
    let mut ids: Vec<i64> = one(&writer.client, COMPACTORS).await;
    let other = ids.pop().unwrap();
    assert_eq!(ids.len(), 1);
    let deadline = Instant::now() + LIMIT * 2;
    // It may be given nothing while it is stopped.
    loop {
        assert!(Instant::now() < deadline, "none of its tasks was taken back");
        cluster.process("compactor1").signal("STOP");
        let taken_back = format!("process={}", ids[0]);
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
        ids = one(&writer.client, COMPACTORS).await;
        ids.retain(|id| *id != other);
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
