//! A put that hangs or fails is named at the job that waits for it, holds back no other, and nothing is lost by it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use millrace::Tuning;
use millrace_sqllogictest::suite;
use millrace_storage::object::{MeterOptions, Metered};
use millrace_storage::sim::{Faults, Profile, RequestKind, SimStore};
use object_store::ObjectStore;

use crate::node::{Node, NodeOptions, one, run};

/// What a job waits for: how many rows make it such a commit, and how it is named.
const PUTS: [(u64, &str); 3] = [(1, "record "), (6_000, ".seg (tail)"), (60_000, ".seg (runs)")];

fn options(store: &SimStore, request_timeout: Duration) -> NodeOptions {
    let meter = MeterOptions {
        request_timeout,
        backoff: Duration::from_millis(5),
        max_backoff: Duration::from_millis(50),
        ..MeterOptions::default()
    };
    let store = Metered::wrap(Arc::new(store.clone()), meter);
    let tuning = Tuning { direct_run_bytes: Some(1 << 20), ..Tuning::DEFAULT };
    NodeOptions { tuning, ..NodeOptions::new(store as Arc<dyn ObjectStore>) }
}

/// Waits until SHOW JOBS gives a reason with all of these words, and returns the state with it.
async fn wait_for_reason(node: &Node, job: &str, words: &[&str]) -> (String, String) {
    let until = Instant::now() + Duration::from_secs(120);
    loop {
        let (state, reason) = node.job(job).await.expect("the job is listed");
        assert_ne!(state, "failed", "{reason}");
        if words.iter().all(|word| reason.contains(word)) {
            return (state, reason);
        }
        assert!(Instant::now() < until, "{job} is {state}: {reason}, not {words:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

async fn has_not_restarted(node: &Node, job: &str) {
    let client = node.connect().await;
    let restarts = format!("EXPLAIN ANALYZE MATERIALIZED VIEW {job}");
    let plan = suite::rows(&client, &restarts).await.expect("a plan");
    assert!(plan.iter().any(|l| l[0].contains("restarts: 0")), "{plan:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_put_that_is_tried_again_is_named_at_the_job_that_waits_for_it() {
    let sim = SimStore::in_memory(Profile::INSTANT, 7);
    let options = options(&sim, Duration::from_millis(300));
    let node = Node::start(&options).await;
    let client = node
        .run(
            "CREATE TABLE a (g int, v int);
             CREATE MATERIALIZED VIEW v AS SELECT g % 10 AS m, sum(v) AS s FROM a GROUP BY g % 10",
        )
        .await;
    let mut rows = 0;
    for (count, named) in PUTS {
        sim.set_faults(Faults { hang: 1.0, only: Some(RequestKind::Put), ..Faults::default() });
        let insert = format!("INSERT INTO a SELECT g, 1 FROM generate_series(1, {count}) AS t(g)");
        let inserted = run(&client, &insert);
        let watch = async {
            let words = [named, "is tried again", "no answer within"];
            let (_, reason) = wait_for_reason(&node, "a", &words).await;
            // Nothing waits in the view.
            let (_, other) = node.job("v").await.expect("the view is listed");
            assert!(!other.contains("is tried again"), "{other}, and the table: {reason}");
            sim.set_faults(Faults::default());
        };
        tokio::join!(inserted, watch);
        rows += count;
        assert_eq!(one(&client, "SELECT sum(s) FROM v").await, rows.to_string());
        let (state, reason) = node.job("a").await.expect("the table is listed");
        assert_eq!((state.as_str(), reason.as_str()), ("running", "NULL"), "it is told no longer");
    }
    has_not_restarted(&node, "v").await;
    drop((client, node));

    // Another process finds what was acknowledged.
    let node = Node::start(&options).await;
    let client = node.connect().await;
    assert_eq!(one(&client, "SELECT sum(s) FROM v").await, rows.to_string());
}

/// One that has not failed yet is told after a while, and those of other jobs pass it.
#[tokio::test(flavor = "multi_thread")]
async fn a_put_that_hangs_is_named_and_commits_of_other_jobs_pass_it() {
    let sim = SimStore::in_memory(Profile::INSTANT, 7);
    // Longer than all of this takes: the put is answered when the test says so.
    let node = Node::start(&options(&sim, Duration::from_secs(3_600))).await;
    let client = node
        .run(
            "CREATE TABLE a (g int);
             CREATE TABLE b (g int)",
        )
        .await;
    sim.set_faults(Faults { hang: 1.0, only: Some(RequestKind::Put), ..Faults::default() });
    let hung = run(&client, "INSERT INTO a SELECT g FROM generate_series(1, 6000) AS t(g)");
    let watch = async {
        // Its put has begun when it is told of.
        wait_for_reason(&node, "a", &["(tail)"]).await;
        sim.set_faults(Faults::default());
        let (state, reason) = wait_for_reason(&node, "a", &[".seg (tail)", "no answer"]).await;
        assert_eq!(state, "stalled", "{reason}");
        // Of the same size, to the same lane of the tail.
        let other = node.connect().await;
        let insert = "INSERT INTO b SELECT g FROM generate_series(1, 6000) AS t(g)";
        run(&other, insert).await;
        assert_eq!(one(&other, "SELECT count(*) FROM b").await, "6000");
        let (state, _) = node.job("a").await.expect("the table is listed");
        assert_eq!(state, "stalled", "its put still hangs");
        sim.answer_hung();
    };
    tokio::join!(hung, watch);
    assert_eq!(one(&client, "SELECT count(*) FROM a").await, "6000");
}
