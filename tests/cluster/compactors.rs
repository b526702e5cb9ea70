//! Several compactors, of which one stalls.

use std::time::{Duration, Instant};

use crate::one;
use crate::process::Cluster;
use crate::sessions::{LIMIT, await_true};

const NAMES: [&str; 5] = ["meta", "compute", "compactor1", "compactor2", "frontend1"];

/// Well below the time after which a task is tried again that has failed.
const TAKEN_BACK: Duration = Duration::from_secs(9);

#[tokio::test(flavor = "multi_thread")]
async fn a_task_of_a_stopped_compactor_is_given_to_the_other() {
    let dir = tempfile::tempdir().unwrap();
    let mut cluster = Cluster::start_with(dir.path(), &NAMES).await;
    let client = cluster.connect("frontend1").await;
    client.batch_execute("CREATE TABLE t (id bigint PRIMARY KEY, v text)").await.unwrap();
    let compactors = "SELECT array_agg(incarnation::bigint ORDER BY incarnation)
        FROM millrace_catalog.processes WHERE roles = ARRAY['compactor']";
    let ids: Vec<i64> = one(&client, compactors).await;
    let [stopped, other] = ids[..] else { panic!("two compactors: {ids:?}") };
    // One that has failed counts, too: its runs wait.
    let has_task =
        format!("SELECT count(*) FROM millrace_catalog.compactions WHERE worker = {stopped}");
    let mut rows = 0;
    let deadline = Instant::now() + LIMIT;
    // It is stopped while it is given tasks: until one is seen that it has.
    let since = 'all: loop {
        cluster.process("compactor1").signal("STOP");
        let since = Instant::now();
        while since.elapsed() < Duration::from_secs(2) {
            let sql = format!(
                "INSERT INTO t SELECT {rows} + i, repeat('x', 100) FROM generate_series(0, 199) AS g(i)"
            );
            client.batch_execute(&sql).await.unwrap();
            rows += 200;
            if one::<i64>(&client, &has_task).await > 0 {
                break 'all since;
            }
        }
        cluster.process("compactor1").signal("CONT");
        assert!(Instant::now() < deadline, "it was given no task");
        tokio::time::sleep(Duration::from_millis(100)).await;
    };
    let before = cluster.objects_of(other as u64);
    while one::<i64>(&client, &has_task).await > 0 {
        assert!(since.elapsed() < TAKEN_BACK, "{:?}", since.elapsed());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    println!("taken back after {:?}", since.elapsed());
    let deadline = Instant::now() + LIMIT;
    while cluster.objects_of(other as u64) == before {
        assert!(Instant::now() < deadline, "{}", cluster.process("compactor2").log());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    cluster.process("compactor1").signal("CONT");
    // What it still does of the task changes nothing.
    let none = "SELECT (count(*) = 0)::int::bigint FROM millrace_catalog.compactions WHERE state = 'running'";
    await_true(&client, none).await;
    assert_eq!(one::<i64>(&client, "SELECT count(*) FROM t").await, rows);
    assert_eq!(one::<i64>(&client, "SELECT count(DISTINCT id) FROM t").await, rows);
}
