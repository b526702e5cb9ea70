//! The roles of one process call each other by reference, unless they are told to go through bytes; either way a server
//! does the same.

use millrace_sqllogictest::suite;

use crate::memory::metric;
use crate::started;

/// Arrow batches that a server has encoded by the end of a workload with every kind of statement that carries rows, and what
/// is there then.
async fn batches(loopback: &str) -> (u64, Vec<Vec<String>>) {
    let (server, _dir) = started(&["--loopback", loopback]);
    let client = server.connect().await.expect("the server answers");
    let statements = [
        "CREATE TABLE t (id int PRIMARY KEY, v int, s text)",
        "CREATE TABLE copied (id int PRIMARY KEY, v int, s text)",
        "CREATE MATERIALIZED VIEW sums AS SELECT v, count(*) AS n, max(s) AS s FROM t GROUP BY v",
        "CREATE SINK copy INTO copied FROM t",
        "INSERT INTO t SELECT g, g % 7, md5(g::text) FROM generate_series(1, 5000) AS x(g)",
        "UPDATE t SET v = v + 1 WHERE id % 3 = 0",
        "BEGIN; DELETE FROM t WHERE id = 1; INSERT INTO t VALUES (1, NULL, NULL); COMMIT",
        "INSERT INTO t VALUES (2, 5, 'two') ON CONFLICT (id) DO UPDATE SET s = 'again'",
        "FLUSH",
    ];
    for sql in statements {
        client.batch_execute(sql).await.unwrap_or_else(|e| panic!("{loopback}: {sql}: {e:?}"));
    }
    let query = "SELECT v, n, s FROM sums ORDER BY v";
    let mut rows = suite::rows(&client, query).await.expect("the view is readable");
    let query = "SELECT count(*), sum(id), sum(v), max(s) FROM copied";
    rows.extend(suite::rows(&client, query).await.expect("the table is readable"));
    (metric(&server, "millrace_encoded_batches_total").await, rows)
}

#[tokio::test(flavor = "multi_thread")]
async fn no_batch_is_encoded_within_a_process_unless_it_is_told_to() {
    let (direct, rows) = batches("direct").await;
    let (encoded, same) = batches("encode").await;
    assert_eq!(direct, 0, "rows go by reference");
    assert!(encoded >= 4, "{encoded} batches of four statements");
    assert_eq!(rows, same);
    assert_eq!(rows.len(), 10);
}
