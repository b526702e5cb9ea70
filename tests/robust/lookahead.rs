//! Lookahead through SQL: keys of statements are read before their rows come, and nothing else changes.

use std::sync::Arc;
use std::time::Duration;

use millrace_sqllogictest::suite;
use millrace_storage::sim::{Profile, SimStore};
use tokio_postgres::Client;

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

/// Each order needs one item.
const QUERY: &str = "SELECT o.id, i.name FROM orders o JOIN items i ON o.item = i.id";

/// A node whose items are cold, with the view `named` of [`QUERY`], and `plain` without lookahead.
async fn cold_items(store: &SimStore) -> Node {
    let options = NodeOptions {
        flush_bytes: 64 << 10,
        block_bytes: Some(1 << 10),
        // Hints are dropped while memory is tight.
        memory_limit: 2 << 30,
        ..NodeOptions::new(Arc::new(store.clone()))
    };
    let node = Node::start(&options).await;
    let client = node
        .run(
            "CREATE TABLE orders (id int PRIMARY KEY, item int);
             CREATE TABLE items (id int PRIMARY KEY, name text);
             INSERT INTO items SELECT g, 'item ' || g FROM generate_series(1, 20000) AS t(g)",
        )
        .await;
    run(&client, &format!("CREATE MATERIALIZED VIEW named AS {QUERY}")).await;
    run(&client, "SET lookahead = 'off'").await;
    run(&client, &format!("CREATE MATERIALIZED VIEW plain AS {QUERY}")).await;
    run(&client, "FLUSH").await;
    node.settle(store).await;
    drop(client);
    drop(node);
    Node::start(&options).await
}

/// The order `id` and nine more, each of another item.
fn orders(id: i64) -> String {
    format!(
        "INSERT INTO orders SELECT {id} + g, ({id} + g) * 47 FROM generate_series(1, 10) AS t(g)"
    )
}

/// That the views are what their query says.
async fn check_views(client: &Client) {
    let rows = |from: &str| format!("SELECT * FROM ({from}) AS t ORDER BY 1");
    let expected = suite::rows(client, &rows(QUERY)).await.expect("rows");
    for view in ["named", "plain"] {
        let found = suite::rows(client, &rows(&format!("SELECT * FROM {view}"))).await;
        assert_eq!(found.expect("rows"), expected, "{view}");
    }
}

/// Waits until more keys than before have been hinted to the operators of `named`.
async fn until_hinted(client: &Client, before: u64) {
    let hinted = async {
        while keys(client, "named", "hinted").await <= before {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), hinted).await.expect("keys are hinted");
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_of_statements_are_read_ahead_by_the_views_that_want_it() {
    let store = SimStore::in_memory(STEADY, 5);
    let node = cold_items(&store).await;
    let client = node.connect().await;
    for n in 0..40 {
        run(&client, &orders(n * 10)).await;
        assert_eq!(one(&client, "SELECT count(*) FROM named").await, ((n + 1) * 10).to_string());
    }
    check_views(&client).await;
    let used = keys(&client, "named", "in_time + late").await;
    assert!(used > 0, "keys were read ahead, and their rows came");
    assert_eq!(keys(&client, "plain", "hinted").await, 0);
    assert!(keys(&client, "plain", "demand").await > 0);
    measured(&client).await;
    let places = "SELECT DISTINCT place FROM millrace_catalog.lookahead \
                  WHERE relation_name = 'named' AND active";
    assert_eq!(one(&client, places).await, "entry");
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_of_a_transaction_are_read_ahead_before_it_commits_and_change_nothing_if_it_does_not()
{
    let store = SimStore::in_memory(STEADY, 6);
    let node = cold_items(&store).await;
    let client = node.connect().await;
    // Until hints are wanted.
    for n in 0..10 {
        run(&client, &orders(n * 10)).await;
        one(&client, "SELECT count(*) FROM named").await;
    }
    let writer = node.connect().await;
    for (n, end) in ["ROLLBACK", "COMMIT", "ROLLBACK TO s; COMMIT"].into_iter().enumerate() {
        let before = keys(&client, "named", "hinted").await;
        let count = one(&client, "SELECT count(*) FROM named").await;
        run(&writer, "BEGIN; SAVEPOINT s").await;
        run(&writer, &orders(100 + n as i64 * 10)).await;
        until_hinted(&client, before).await;
        assert_eq!(one(&client, "SELECT count(*) FROM named").await, count);
        run(&writer, end).await;
        check_views(&client).await;
    }
    assert_eq!(one(&client, "SELECT count(*) FROM named").await, "110");
}

/// What the engine has measured of both views' epochs, reads and requests.
async fn measured(client: &Client) {
    let of = |view: &str, what: &str| {
        format!(
            "SELECT {what} FROM millrace_catalog.lookahead \
             WHERE relation_name = '{view}' AND operator = 'Join' AND demand > 0"
        )
    };
    for view in ["named", "plain"] {
        let share = "epochs > 0 AND epochs_without_demand >= 0 AND epochs_without_demand <= 1";
        assert_eq!(one(client, &of(view, share)).await, "t", "{view}");
        let ordered =
            "read_p50_ms > 0 AND read_p50_ms <= read_p90_ms AND read_p90_ms <= read_p99_ms";
        assert_eq!(one(client, &of(view, ordered)).await, "t", "{view}");
        assert_eq!(one(client, &of(view, "dollars_per_million_rows > 0")).await, "t", "{view}");
        assert_eq!(one(client, &of(view, "requests_demand > 0")).await, "t", "{view}");
    }
    let slack = "slack_p1_ms <= slack_p50_ms AND slack_p50_ms <= slack_p99_ms AND slack_p99_ms > 0";
    assert_eq!(one(client, &of("named", slack)).await, "t");
    assert_eq!(one(client, &of("named", "requests_ahead > 0")).await, "t");
    assert_eq!(one(client, &of("named", "places")).await, "entry, root, leaf");
    let nothing = "slack_p1_ms IS NULL AND requests_ahead = 0 AND place IS NULL";
    assert_eq!(one(client, &of("plain", nothing)).await, "t", "hints are off");
    let explained = client.simple_query("EXPLAIN ANALYZE MATERIALIZED VIEW named").await;
    let explained = format!("{:?}", explained.expect("an explanation"));
    let of_orders = "from orders at entry: slack (p1, p50, p99) of entry (in use)";
    for part in ["keys hinted", of_orders, "S3 Standard"] {
        assert!(explained.contains(part), "{part}: {explained}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_that_comes_out_of_a_row_is_read_ahead_behind_it() {
    let store = SimStore::in_memory(STEADY, 7);
    let options = NodeOptions {
        flush_bytes: 64 << 10,
        block_bytes: Some(1 << 10),
        // Hints are dropped while memory is tight.
        memory_limit: 2 << 30,
        ..NodeOptions::new(Arc::new(store.clone()))
    };
    let query = "SELECT o.id, m.name FROM orders o JOIN items i ON o.item = i.id \
                 JOIN makers m ON i.maker = m.id";
    let node = Node::start(&options).await;
    let client = node
        .run(
            "CREATE TABLE orders (id int PRIMARY KEY, item int);
             CREATE TABLE items (id int PRIMARY KEY, maker int);
             CREATE TABLE makers (id int PRIMARY KEY, name text);
             INSERT INTO items SELECT g, 20001 - g FROM generate_series(1, 20000) AS t(g);
             INSERT INTO makers SELECT g, 'maker ' || g FROM generate_series(1, 20000) AS t(g)",
        )
        .await;
    let create = format!("CREATE MATERIALIZED VIEW named AS {query}");
    let explained = client.simple_query(&format!("EXPLAIN {create}")).await;
    let explained = format!("{:?}", explained.expect("an explanation"));
    assert!(explained.contains("from orders at entry, root, leaf, input of"), "{explained}");
    assert!(explained.contains("chained to Join left"), "{explained}");
    assert!(explained.contains("at depth 2"), "{explained}");
    run(&client, &create).await;
    run(&client, "FLUSH").await;
    node.settle(&store).await;
    drop(client);
    drop(node);

    let node = Node::start(&options).await;
    let client = node.connect().await;
    let writer = node.connect().await;
    // The least of both joins.
    let of_joins = |column: &str| {
        format!(
            "SELECT min({column}) FROM millrace_catalog.lookahead \
             WHERE relation_name = 'named' AND operator = 'Join'"
        )
    };
    let mut in_time = 0;
    // So many orders have items of their own. A machine that is busy needs more of them.
    for n in 0..40 {
        if n >= 10 && in_time > 0 {
            break;
        }
        let is_wanted = one(&client, &of_joins("active::int")).await == "1";
        let before = keys(&client, "named", "prefetched").await;
        run(&writer, "BEGIN").await;
        run(&writer, &orders(n * 10)).await;
        if is_wanted {
            // Of both: ten items, then ten makers.
            let read_ahead = async {
                while keys(&client, "named", "prefetched").await < before + 20 {
                    tokio::task::yield_now().await;
                }
            };
            // If the walker does not follow yet, they are not.
            let _ = tokio::time::timeout(Duration::from_secs(5), read_ahead).await;
        }
        run(&writer, "COMMIT").await;
        assert_eq!(one(&client, "SELECT count(*) FROM named").await, ((n + 1) * 10).to_string());
        in_time = one(&client, &of_joins("in_time")).await.parse().expect("a number");
    }
    assert!(in_time > 0, "items and makers were there when their rows came");
    let rows = |from: &str| format!("SELECT * FROM ({from}) AS t ORDER BY 1");
    let expected = suite::rows(&client, &rows(query)).await.expect("rows");
    let found = suite::rows(&client, &rows("SELECT * FROM named")).await;
    assert_eq!(found.expect("rows"), expected);
}
