//! Never one key at a time: a chunk of 4,000 distinct cold keys costs a handful of dependent store rounds.

use std::sync::Arc;

use millrace_storage::sim::{Profile, SimStore};

use crate::isolation::settle;
use crate::node::{Node, NodeOptions, one, run};

/// Commit of the table (data, log) and of the view (data, log), and index, filter and blocks of each of
/// at most two state tables, once for reading and once for the view's own rows.
const BOUND: u64 = 12;

/// Loads, starts again so that all caches are cold and the state is in runs, and counts what one
/// statement and the read of its effect take.
async fn rounds_of(load: &str, statement: &str, read: &str, expected: &str) -> u64 {
    let store = SimStore::in_memory(Profile::INSTANT, 3);
    let options = NodeOptions {
        flush_bytes: 64 << 10,
        block_bytes: Some(4 << 10),
        ..NodeOptions::new(Arc::new(store.clone()))
    };
    let node = Node::start(&options).await;
    let client = node.run(load).await;
    one(&client, read).await;
    settle(&store).await;
    drop(client);
    drop(node);
    let node = Node::start(&options).await;
    let client = node.connect().await;
    settle(&store).await;
    store.reset_stats();
    let (rows, rounds) = store
        .count_rounds(async {
            run(&client, statement).await;
            one(&client, read).await
        })
        .await;
    assert_eq!(rows, expected);
    let stats = store.stats();
    println!("{rounds} dependent rounds, {} gets, {} puts", stats.gets, stats.puts);
    assert!(stats.gets > 0, "the state was cold");
    rounds
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cold_aggregate_chunk_costs_a_handful_of_rounds() {
    let rounds = rounds_of(
        "CREATE TABLE t (k int, v bigint);
         CREATE MATERIALIZED VIEW g AS SELECT k, count(*) AS n, sum(v) AS s FROM t GROUP BY k;
         INSERT INTO t SELECT x, x FROM generate_series(1, 20000) AS s(x)",
        "INSERT INTO t SELECT x * 5, 1 FROM generate_series(1, 4000) AS s(x)",
        // One row: the answer is found by its key, so the read itself adds next to nothing.
        "SELECT n FROM g WHERE k = 5",
        "2",
    )
    .await;
    assert!(rounds <= BOUND, "{rounds} rounds");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cold_join_chunk_costs_a_handful_of_rounds() {
    let rounds = rounds_of(
        "CREATE TABLE l (k int, v bigint);
         CREATE TABLE r (k int, w varchar);
         CREATE MATERIALIZED VIEW j AS SELECT l.k, l.v, r.w FROM l JOIN r ON l.k = r.k;
         CREATE MATERIALIZED VIEW n AS SELECT count(*) AS n FROM j;
         INSERT INTO r SELECT x, 'row ' || x FROM generate_series(1, 20000) AS s(x)",
        "INSERT INTO l SELECT x * 5, x FROM generate_series(1, 4000) AS s(x)",
        "SELECT n FROM n",
        "4000",
    )
    .await;
    assert!(rounds <= BOUND, "{rounds} rounds");
}

/// What changes of one row each cost over a table of some size: dependent rounds and requests, and bytes
/// read and written.
#[derive(Clone, Copy, Debug)]
struct Cost {
    rounds: u64,
    requests: u64,
    bytes: u64,
}

/// Ten cold changes of one row under an aggregate over `rows` rows, each with the read of its effect.
async fn changes_of_one_row(rows: u64) -> Cost {
    let store = SimStore::in_memory(Profile::INSTANT, 3);
    let options = NodeOptions {
        flush_bytes: 16 << 10,
        block_bytes: Some(2 << 10),
        ..NodeOptions::new(Arc::new(store.clone()))
    };
    let node = Node::start(&options).await;
    let load = format!(
        "CREATE TABLE t (id int PRIMARY KEY, k int, v bigint);
         INSERT INTO t SELECT x, x / 20, 7 FROM generate_series(0, {rows} - 1) AS s(x);
         CREATE MATERIALIZED VIEW g AS SELECT k, count(*) AS n, sum(v) AS s FROM t GROUP BY k"
    );
    let client = node.run(&load).await;
    one(&client, "SELECT count(*) FROM g").await;
    // Flushes and merges of the load end before anything is counted.
    settle(&store).await;
    let change = |i: u64| {
        let id = i * 7_919 % rows;
        let update = format!("UPDATE t SET v = v + 1 WHERE id = {id}");
        (update, format!("SELECT s FROM g WHERE k = {}", id / 20))
    };
    let mut cost = Cost { rounds: 0, requests: 0, bytes: 0 };
    for i in 0..12 {
        let (update, read) = change(i);
        node.forget_blocks();
        let before = store.stats();
        let (sum, rounds) = store
            .count_rounds(async {
                run(&client, &update).await;
                one(&client, &read).await
            })
            .await;
        assert_eq!(sum, "141", "twenty sevens and one");
        let after = store.stats();
        // The first ones learn which prefixes are asked for and open the runs.
        if i >= 2 {
            cost.rounds += rounds;
            cost.requests += after.requests() - before.requests();
            cost.bytes +=
                after.bytes_read + after.bytes_written - before.bytes_read - before.bytes_written;
        }
        settle(&store).await;
    }
    cost
}

/// The price of a change follows the change, not the data behind it (docs/design.md §1).
#[tokio::test(flavor = "multi_thread")]
async fn a_change_of_one_row_costs_no_more_over_a_hundred_times_the_rows() {
    let small = changes_of_one_row(2_000).await;
    let large = changes_of_one_row(200_000).await;
    println!("ten cold changes over 2,000 rows: {small:?}; over 200,000 rows: {large:?}");
    assert!(large.rounds <= 2 * small.rounds, "{small:?}, {large:?}");
    assert!(large.requests <= 2 * small.requests, "{small:?}, {large:?}");
    assert!(large.bytes <= 2 * small.bytes, "{small:?}, {large:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_small_commit_costs_at_most_two_rounds_and_idleness_none() {
    let store = SimStore::in_memory(Profile::INSTANT, 3);
    let node = Node::start(&NodeOptions::new(Arc::new(store.clone()))).await;
    let client = node.run("CREATE TABLE t (k int PRIMARY KEY, v int)").await;
    settle(&store).await;
    for (rows, bound) in [(1, 1), (3000, 2)] {
        let statement = format!(
            "INSERT INTO t SELECT {rows} * 10000 + x, x FROM generate_series(1, {rows}) AS s(x)"
        );
        let ((), rounds) = store.count_rounds(run(&client, &statement)).await;
        assert!(rounds <= bound, "{rows} rows: {rounds} rounds");
    }
    // `settle` fails when the server goes on making requests.
    settle(&store).await;
}
