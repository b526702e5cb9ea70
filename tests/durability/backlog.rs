//! A job that was away works off what it has missed in steps of bounded bytes, each of them committed, also across a
//! crash in the middle, and ends where it would have ended without the pause.

use std::sync::Arc;
use std::time::{Duration, Instant};

use millrace::Tuning;
use millrace_common::RelationId;
use object_store::ObjectStore;
use object_store::memory::InMemory;
use tokio_postgres::Client;

use super::{Node, PATIENCE, one, run};

const STEP: usize = 32 << 10;
const COMMITS: usize = 96;
const ROWS: usize = 8;
/// Hexadecimal digits without a pattern: they take their length also where rows are compressed.
const DIGITS: usize = 512;
/// What is committed while the job is away, at least; a step takes in no more than its limit.
const STEPS: u64 = (COMMITS * ROWS * DIGITS / STEP) as u64;

const TUNING: Tuning = Tuning {
    flush_bytes: Some(64 << 10),
    step_bytes: Some(STEP),
    snapshot_records: Some(32),
    gc_interval: Some(Duration::from_millis(100)),
    ..Tuning::DEFAULT
};

/// All commits so far of the sink.
fn commits(node: &Node, sink: RelationId) -> u64 {
    node.server().meta.job_status(sink).expect("the sink is there").version.commits
}

async fn create(client: &Client) -> RelationId {
    run(
        client,
        "CREATE TABLE t (k int PRIMARY KEY, n int, v text);
         CREATE TABLE copy (k int PRIMARY KEY, n int, v text);
         INSERT INTO t SELECT x, 0, '' FROM generate_series(0, 255) AS s(x);
         CREATE SINK away INTO copy FROM t;
         CREATE MATERIALIZED VIEW of_t AS SELECT k % 7 AS g, sum(n) AS n, max(v) AS top FROM t GROUP BY 1;
         CREATE MATERIALIZED VIEW of_copy AS SELECT k % 7 AS g, sum(n) AS n, max(v) AS top FROM copy GROUP BY 1;
         FLUSH",
    )
    .await;
    let id = one(client, "SELECT id FROM millrace_catalog.jobs WHERE name = 'away'").await;
    RelationId(id.parse().expect("a number"))
}

/// Commits of known size: some rows of the table, spread over its keys, get new values.
async fn write(client: &Client) {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut word = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        format!("{state:016x}")
    };
    for commit in 0..COMMITS {
        let row = |i: usize, v: String| format!("({}, '{v}')", (commit * 37 + i * 32) % 256);
        let values: Vec<String> =
            (0..ROWS).map(|i| row(i, (0..DIGITS / 16).map(|_| word()).collect())).collect();
        let set = "UPDATE t SET n = n + 1, v = new.v FROM";
        let values = values.join(", ");
        run(client, &format!("{set} (VALUES {values}) AS new (k, v) WHERE t.k = new.k")).await;
    }
}

/// Neither has a row that the other has not.
async fn same(client: &Client, one_side: &str, other: &str) {
    for (a, b) in [(one_side, other), (other, one_side)] {
        let missing = one(
            client,
            &format!("SELECT count(*) FROM (SELECT * FROM {a} EXCEPT SELECT * FROM {b}) AS d"),
        )
        .await;
        assert_eq!(missing, "0", "rows of {a} that {b} has not");
    }
}

async fn catches_up(crashes: bool) {
    let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    let mut node = Node::start(&store, TUNING).await;
    let mut client = node.connect().await;
    let sink = create(&client).await;
    run(&client, "ALTER SINK away PAUSE").await;
    write(&client).await;
    run(&client, "FLUSH").await;
    let before = commits(&node, sink);
    if crashes {
        // What the job reads now is no longer in the memory of the process that wrote it.
        drop((client, node));
        node = Node::start(&store, TUNING).await;
        client = node.connect().await;
    }
    run(&client, "ALTER SINK away RESUME").await;
    if crashes {
        let deadline = Instant::now() + PATIENCE;
        while commits(&node, sink) < before + STEPS / 3 {
            assert!(Instant::now() < deadline, "it does not get on");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        drop((client, node));
        node = Node::start(&store, TUNING).await;
        client = node.connect().await;
    }
    run(&client, "FLUSH").await;
    let steps = commits(&node, sink) - before;
    println!("{steps} steps, at least {STEPS} expected");
    assert!(steps >= STEPS, "{steps} steps");
    same(&client, "t", "copy").await;
    same(&client, "of_t", "of_copy").await;
    let updates = one(&client, "SELECT sum(n) FROM copy").await;
    assert_eq!(updates, (COMMITS * ROWS).to_string());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_was_away_catches_up_in_steps() {
    catches_up(false).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crash_while_a_job_catches_up_loses_nothing() {
    catches_up(true).await;
}
