//! A store that hangs delays a view and says so; it does not restart it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use millrace_sqllogictest::suite;
use millrace_storage::sim::{Profile, SimStore};

use crate::isolation::settle;
use crate::node::{Node, NodeOptions, one, run};

#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_hangs_delays_a_view_and_does_not_restart_it() {
    let store = SimStore::in_memory(Profile::INSTANT, 7);
    let options =
        NodeOptions { flush_bytes: 64 << 10, ..NodeOptions::new(Arc::new(store.clone())) };
    let node = Node::start(&options).await;
    node.run(
        "CREATE TABLE a (g int, v int);
         CREATE MATERIALIZED VIEW v AS SELECT g, sum(v) AS s FROM a GROUP BY g;
         INSERT INTO a SELECT g, g FROM generate_series(1, 20000) AS t(g);
         FLUSH",
    )
    .await;
    settle(&store).await;
    drop(node);

    // The state of the view is cold, and its reads get no answer.
    let node = Node::start(&options).await;
    store.hang_reads(Some("data/"));
    let client = node.run("INSERT INTO a SELECT g, 1 FROM generate_series(1, 3000) AS t(g)").await;
    let until = Instant::now() + Duration::from_secs(120);
    loop {
        let (state, reason) = node.job("v").await.expect("the view is listed");
        assert_ne!(state, "failed", "{reason}");
        if reason.contains("that are tried again") {
            assert!(reason.contains("no answer within"), "{reason}");
            break;
        }
        assert!(Instant::now() < until, "the view is {state}: {reason}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }

    store.release_reads();
    run(&client, "SET read_wait_timeout = '120s'").await;
    let sum = one(&client, "SELECT sum(s) FROM v").await;
    assert_eq!(sum, (20_000 * 20_001 / 2 + 3_000).to_string());
    let plan = suite::rows(&client, "EXPLAIN ANALYZE MATERIALIZED VIEW v").await.expect("a plan");
    assert!(plan.iter().any(|l| l[0].contains("restarts: 0")), "{plan:?}");
}
