//! Reads of few rows: from the memory of the process that a table runs on, and without it.

use std::time::Instant;

use tokio_postgres::Client;

use crate::console::request;
use crate::ctl::told;
use crate::process::Cluster;
use crate::sessions::LIMIT;
use crate::{execute, one};

/// How many reads of a frontend have gone this way by now, whatever the reason.
async fn reads(cluster: &Cluster, way: &str) -> u64 {
    let address = cluster.console("frontend1");
    let (status, metrics) = request(address, address, "GET /metrics", "", "").await;
    assert_eq!(status, 200, "{metrics}");
    let head = format!("millrace_table_reads_total{{way=\"{way}\",");
    let lines = metrics.lines().filter(|line| line.starts_with(&head));
    let counts: Vec<u64> =
        lines.map(|line| line.rsplit(' ').next().unwrap().parse().unwrap()).collect();
    assert!(!counts.is_empty(), "{metrics}");
    counts.iter().sum()
}

/// Reads a row by its key.
async fn read(client: &Client) {
    assert_eq!(one::<i64>(client, "SELECT v FROM t WHERE id = 3").await, 6);
}

/// Returns when a read was answered by the process of the table.
async fn await_answer(cluster: &Cluster, client: &Client) {
    let (before, deadline) = (reads(cluster, "owner").await, Instant::now() + LIMIT);
    while reads(cluster, "owner").await == before {
        assert!(Instant::now() < deadline, "the process of the table answers no read");
        read(client).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_read_is_answered_when_the_process_that_has_its_rows_is_killed() {
    let dir = tempfile::tempdir().unwrap();
    let names = ["meta", "compute1", "compute2", "frontend1"];
    let mut cluster = Cluster::start_with_consoles(dir.path(), &names).await;
    let client = cluster.connect("frontend1").await;
    execute(&client, "CREATE TABLE t (id bigint PRIMARY KEY, v bigint)").await;
    execute(&client, "INSERT INTO t SELECT i, i * 2 FROM generate_series(1, 1000) AS g(i)").await;
    told(&cluster.address("meta"), &["move", "public.t", &cluster.address("compute1")]);
    await_answer(&cluster, &client).await;

    cluster.process("compute1").kill();
    let before = reads(&cluster, "follower").await;
    read(&client).await;
    assert!(reads(&cluster, "follower").await > before, "from log and bucket");
    // Where the table has gone then.
    await_answer(&cluster, &client).await;

    execute(&client, "ALTER SYSTEM SET read_from_owner = 'off'").await;
    let before = reads(&cluster, "owner").await;
    read(&client).await;
    assert_eq!(reads(&cluster, "owner").await, before);
}
