//! Lookahead through SQL: keys of statements are read before their rows come, and nothing else changes.

use std::sync::Arc;
use std::time::Duration;

use millrace_sqllogictest::suite;
use millrace_storage::sim::{Profile, SimStore};
use tokio_postgres::Client;

use crate::isolation::settle;
use crate::node::{Node, NodeOptions, one, run};

/// Every answer takes as long as any other.
const STEADY: Profile =
    Profile { p50: Duration::from_millis(5), p99: Duration::from_millis(5), ..Profile::INSTANT };

/// Keys of the view's operators, by how they were met.
async fn keys(client: &Client, view: &str, column: &str) -> u64 {
    let sql = format!(
        "SELECT coalesce(sum({column}), 0) FROM millrace_catalog.lookahead \
         WHERE relation_name = '{view}'"
    );
    one(client, &sql).await.parse().expect("a number")
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_of_statements_are_read_ahead_by_the_views_that_want_it() {
    let store = SimStore::in_memory(STEADY, 5);
    let options = NodeOptions {
        flush_bytes: 64 << 10,
        block_bytes: Some(1 << 10),
        ..NodeOptions::new(Arc::new(store.clone()))
    };
    let query = "SELECT o.id, i.name FROM orders o JOIN items i ON o.item = i.id";
    let node = Node::start(&options).await;
    let client = node
        .run(
            "CREATE TABLE orders (id int PRIMARY KEY, item int);
             CREATE TABLE items (id int PRIMARY KEY, name text);
             INSERT INTO items SELECT g, 'item ' || g FROM generate_series(1, 20000) AS t(g)",
        )
        .await;
    run(&client, &format!("CREATE MATERIALIZED VIEW named AS {query}")).await;
    run(&client, "SET lookahead = 'off'").await;
    run(&client, &format!("CREATE MATERIALIZED VIEW plain AS {query}")).await;
    run(&client, "FLUSH").await;
    settle(&store).await;
    drop(client);
    drop(node);

    // The items are cold now: each order needs one of them.
    let node = Node::start(&options).await;
    let client = node.connect().await;
    for n in 0..40 {
        let keys =
            format!("SELECT {n} * 10 + g, ({n} * 10 + g) * 47 FROM generate_series(1, 10) AS t(g)");
        run(&client, &format!("INSERT INTO orders {keys}")).await;
        assert_eq!(one(&client, "SELECT count(*) FROM named").await, ((n + 1) * 10).to_string());
    }
    for view in ["named", "plain"] {
        let rows = |from: &str| format!("SELECT * FROM ({from}) AS t ORDER BY 1");
        let expected = suite::rows(&client, &rows(query)).await.expect("rows");
        let found = suite::rows(&client, &rows(&format!("SELECT * FROM {view}"))).await;
        assert_eq!(found.expect("rows"), expected, "{view}");
    }
    let used = keys(&client, "named", "in_time + late").await;
    assert!(used > 0, "keys were read ahead, and their rows came");
    assert_eq!(keys(&client, "plain", "hinted").await, 0);
    assert!(keys(&client, "plain", "demand").await > 0);
    let places = "SELECT DISTINCT place FROM millrace_catalog.lookahead \
                  WHERE relation_name = 'named' AND active";
    assert_eq!(one(&client, places).await, "entry");
}
