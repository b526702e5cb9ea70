//! Runs that nobody looks keys up in are left as they are; the first burst of lookups has them merged.

use std::sync::Arc;
use std::time::{Duration, Instant};

use millrace::Tuning;
use millrace_common::RelationId;
use object_store::ObjectStore;
use object_store::memory::InMemory;

use super::{Node, PATIENCE, run};

/// Each commit is a run of its own.
const TUNING: Tuning = Tuning { direct_run_bytes: Some(0), ..Tuning::DEFAULT };
const ROWS: usize = 4_000;

/// How many runs the table has above level 1, and in it.
fn runs(node: &Node) -> (usize, usize) {
    let meta = &node.server().meta;
    let id = meta.catalog().by_name("public", "t").expect("it exists").id;
    let version = meta.version(RelationId(id)).expect("it has a version");
    let new = version.runs.iter().filter(|r| r.level == 0).count();
    (new, version.runs.len() - new)
}

async fn until(node: &Node, what: &str, reached: impl Fn((usize, usize)) -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !reached(runs(node)) {
        assert!(Instant::now() < deadline, "{what}: {:?} runs", runs(node));
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_first_burst_of_lookups_has_runs_merged() {
    let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    let node = Node::start(&store, TUNING).await;
    let client = node.connect().await;
    run(&client, "CREATE TABLE t (k int PRIMARY KEY, v varchar)").await;
    let fill = format!(
        "INSERT INTO t SELECT x, md5(x::text) || md5((-x)::text) FROM generate_series(1, {ROWS}) AS s(x)"
    );
    run(&client, &fill).await;
    // As many runs with the same first and last keys as are merged without being read, while there is nothing below.
    let touch = format!("UPDATE t SET v = v || 'x' WHERE k IN (1, 2, 3, 4, {ROWS})");
    while runs(&node).1 == 0 {
        run(&client, &touch).await;
        assert!(runs(&node).0 < 40, "{:?} runs were not merged", runs(&node));
    }
    // From now on what is new is small against what is below: it is left alone, or joined with what is as new.
    while runs(&node).0 < 5 {
        run(&client, &touch).await;
    }
    let (new, below) = runs(&node);
    assert!(below > 0, "{new} new runs, {below} below");

    // Keys that are there: their blocks are read, from the store.
    node.server().store.cache().clear_memory();
    let burst = format!(
        "INSERT INTO t SELECT x, '' FROM generate_series(100, {ROWS}, 10) AS s(x) ON CONFLICT DO NOTHING"
    );
    run(&client, &burst).await;
    until(&node, "the burst has them merged", |(new, _)| new < 4).await;
    let count = format!("SELECT count(*) FROM t WHERE v LIKE md5(k::text) || '%' AND k <= {ROWS}");
    assert_eq!(super::one(&client, &count).await, ROWS.to_string());
}
