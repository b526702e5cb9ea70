//! Lookahead through SQL: keys of statements are read before their rows come, and nothing else changes.

use std::sync::Arc;
use std::time::Duration;

use futures::SinkExt;
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

/// Views, and what is set in the session that creates each.
const VIEWS: [(&str, &str); 2] = [("named", ""), ("plain", "SET lookahead = 'off'")];

/// Over a store from which blocks of state are read one by one.
fn options(store: &SimStore) -> NodeOptions {
    NodeOptions {
        flush_bytes: 64 << 10,
        block_bytes: Some(1 << 10),
        // Hints are dropped while memory is tight.
        memory_limit: 2 << 30,
        ..NodeOptions::new(Arc::new(store.clone()))
    }
}

/// A node that has nothing of this schema in memory, with these views of a query.
async fn cold(store: &SimStore, schema: &str, query: &str, views: &[(&str, &str)]) -> Node {
    let options = options(store);
    let node = Node::start(&options).await;
    node.run(schema).await;
    for (view, settings) in views {
        let session = node.run(settings).await;
        run(&session, &format!("CREATE MATERIALIZED VIEW {view} AS {query}")).await;
    }
    node.run("FLUSH").await;
    node.settle(store).await;
    drop(node);
    Node::start(&options).await
}

/// A node whose items are cold, with these views of [`QUERY`].
async fn cold_items(store: &SimStore, views: &[(&str, &str)]) -> Node {
    let schema = "CREATE TABLE orders (id int PRIMARY KEY, item int);
         CREATE TABLE items (id int PRIMARY KEY, name text);
         INSERT INTO items SELECT g, 'item ' || g FROM generate_series(1, 20000) AS t(g)";
    cold(store, schema, QUERY, views).await
}

/// The order `id` and nine more, each of another item.
fn orders(id: i64) -> String {
    format!(
        "INSERT INTO orders SELECT {id} + g, ({id} + g) * 47 FROM generate_series(1, 10) AS t(g)"
    )
}

/// That the views are what their query says.
async fn check_views(client: &Client, query: &str, views: &[(&str, &str)]) {
    let rows = |from: &str| format!("SELECT * FROM ({from}) AS t ORDER BY 1");
    let expected = suite::rows(client, &rows(query)).await.expect("rows");
    for (view, _) in views {
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
    let node = cold_items(&store, &VIEWS).await;
    let client = node.connect().await;
    for n in 0..40 {
        run(&client, &orders(n * 10)).await;
        assert_eq!(one(&client, "SELECT count(*) FROM named").await, ((n + 1) * 10).to_string());
    }
    check_views(&client, QUERY, &VIEWS).await;
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
    let node = cold_items(&store, &VIEWS).await;
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
        check_views(&client, QUERY, &VIEWS).await;
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
    let options = options(&store);
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
    check_views(&client, query, &VIEWS[..1]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_of_rows_that_are_copied_are_read_ahead() {
    let store = SimStore::in_memory(STEADY, 8);
    let node = cold_items(&store, &VIEWS).await;
    let client = node.connect().await;
    for n in 0..40 {
        let sink = client.copy_in("COPY orders FROM STDIN").await.expect("COPY begins");
        futures::pin_mut!(sink);
        let line = |id: i64| format!("{id}\t{}\n", id * 47);
        let lines: String = (1..=10).map(|g| line(n * 10 + g)).collect();
        sink.send(bytes::Bytes::from(lines)).await.expect("data");
        assert_eq!(sink.finish().await.expect("COPY ends"), 10);
        assert_eq!(one(&client, "SELECT count(*) FROM named").await, ((n + 1) * 10).to_string());
    }
    check_views(&client, QUERY, &VIEWS).await;
    assert!(keys(&client, "named", "hinted").await > 0);
    let used = keys(&client, "named", "in_time + late").await;
    assert!(used > 0, "keys were read ahead, and their rows came");
    assert_eq!(keys(&client, "plain", "hinted").await, 0);
}

/// Each setting of how a job runs that could change what its view says, or has an effect that is counted.
const SETTINGS: [(&str, &str); 6] = [
    ("sync_lru", "SET state_access = 'sync'; SET state_cache_policy = 'lru'"),
    ("by_clock", "SET state_cache_policy = 'clock'"),
    ("few_requests", "SET lookahead_requests = 1"),
    ("no_requests", "SET lookahead_requests = 0"),
    ("no_bytes", "SET lookahead_bytes = 0"),
    ("no_value", "SET lookahead_value = 0"),
];

#[tokio::test(flavor = "multi_thread")]
async fn views_run_as_the_session_that_created_them_says_and_have_the_same_rows() {
    let store = SimStore::in_memory(STEADY, 9);
    let node = cold_items(&store, &SETTINGS).await;
    let client = node.connect().await;
    // So many orders have items of their own. A machine that is busy needs more of them.
    for n in 0..40 {
        run(&client, &orders(n * 10)).await;
        for (view, _) in SETTINGS {
            let count = one(&client, &format!("SELECT count(*) FROM {view}")).await;
            assert_eq!(count, ((n + 1) * 10).to_string(), "{view}");
        }
        let mut hinted = 0;
        for (view, _) in SETTINGS {
            hinted += usize::from(keys(&client, view, "hinted").await > 0);
        }
        let has_dropped = keys(&client, "few_requests", "dropped").await > 0;
        let has_read = keys(&client, "by_clock", "prefetched").await > 0;
        if hinted == SETTINGS.len() && has_dropped && has_read {
            break;
        }
    }
    check_views(&client, QUERY, &SETTINGS).await;
    for (view, settings) in SETTINGS {
        assert!(keys(&client, view, "hinted").await > 0, "{settings}");
        assert!(keys(&client, view, "demand").await > 0, "{settings}");
    }
    assert!(keys(&client, "few_requests", "dropped").await > 0, "there is no room for all");
    for view in ["no_requests", "no_bytes"] {
        assert_eq!(keys(&client, view, "prefetched").await, 0, "{view}");
        assert!(keys(&client, view, "dropped").await > 0, "{view}");
    }
    assert!(keys(&client, "by_clock", "prefetched").await > 0, "others read ahead");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_that_an_aggregate_computes_is_announced_inside_the_view() {
    let store = SimStore::in_memory(STEADY, 10);
    let schema = "CREATE TABLE sales (id int PRIMARY KEY, item int, v int);
         CREATE TABLE makers (item int PRIMARY KEY, name text);
         CREATE TABLE labels (n bigint PRIMARY KEY, label text);
         INSERT INTO makers SELECT g, 'maker ' || g FROM generate_series(1, 20000) AS t(g);
         INSERT INTO labels SELECT g, 'label ' || g FROM generate_series(1, 20000) AS t(g)";
    let query = "SELECT c.item, m.name, l.label \
                 FROM (SELECT item, sum(v) AS n FROM sales GROUP BY item) c \
                 JOIN makers m ON c.item = m.item JOIN labels l ON c.n = l.n";
    let views = [("inside", "SET lookahead = 'input'")];
    let node = cold(&store, schema, query, &views).await;
    let client = node.connect().await;
    let create = format!("EXPLAIN CREATE MATERIALIZED VIEW other AS {query}");
    let explained = suite::rows(&client, &create).await.expect("an explanation");
    let is_inside = |row: &Vec<String>| {
        row[0].contains("from Aggregate") && row[0].contains("at input of Join")
    };
    assert!(explained.iter().any(is_inside), "{explained:?}");
    let mut hinted = 0;
    // Each sale is of another item, whose sum has another label.
    for n in 0..40 {
        if hinted > 0 {
            break;
        }
        let sales = format!(
            "INSERT INTO sales SELECT {n} * 10 + g, ({n} * 10 + g) * 47, ({n} * 10 + g) * 43 \
             FROM generate_series(1, 10) AS t(g)"
        );
        run(&client, &sales).await;
        assert_eq!(one(&client, "SELECT count(*) FROM inside").await, ((n + 1) * 10).to_string());
        hinted = keys(&client, "inside", "hinted").await;
    }
    assert!(hinted > 0, "the sums are announced to the join that needs their labels");
    let places = "SELECT DISTINCT place FROM millrace_catalog.lookahead \
                  WHERE relation_name = 'inside' AND hinted > 0";
    assert_eq!(one(&client, places).await, "input");
    check_views(&client, query, &views).await;
}
