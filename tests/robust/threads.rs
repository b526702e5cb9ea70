//! A server keeps what may be busy for long on threads of lower priority, and answers the same for it.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use futures::SinkExt;
use millrace_sqllogictest::{Server, suite};
use tokio_postgres::Client;

use crate::started;

/// Rows of the table: several parts of a scan, and commits that are not encoded on the threads of sessions.
const ROWS: i64 = 150_000;

/// The nice values of the server's threads, by name.
fn priorities(server: &Server) -> BTreeMap<String, Vec<i64>> {
    let mut found: BTreeMap<String, Vec<i64>> = BTreeMap::new();
    let tasks = std::fs::read_dir(format!("/proc/{}/task", server.pid())).expect("it runs");
    for task in tasks.flatten() {
        let read = |file| std::fs::read_to_string(task.path().join(file));
        // A thread may be gone by now.
        let (Ok(name), Ok(stat)) = (read("comm"), read("stat")) else { continue };
        // After the name in brackets come fields from the third on; the nice value is the nineteenth (proc(5)).
        let mut fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
        if let Some(nice) = fields.nth(16).and_then(|n| n.parse().ok()) {
            found.entry(name.trim().to_owned()).or_default().push(nice);
        }
    }
    found
}

async fn fill(client: &Client) {
    client.batch_execute("CREATE TABLE t (id BIGINT PRIMARY KEY, v BIGINT)").await.unwrap();
    let text: String = (0..ROWS).map(|id| format!("{id}\t{}\n", id % 10)).collect();
    let copy = client.copy_in("COPY t FROM STDIN").await.unwrap();
    futures::pin_mut!(copy);
    copy.send(bytes::Bytes::from(text)).await.unwrap();
    copy.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn work_has_threads_of_lower_priority_and_the_same_results() {
    let (server, _dir) = started(&[]);
    let client = server.connect().await.unwrap();
    fill(&client).await;
    let view =
        "CREATE MATERIALIZED VIEW g AS SELECT v, count(*) AS n, sum(id) AS s FROM t GROUP BY v";
    client.batch_execute(view).await.unwrap();
    let rows = suite::rows(&client, "SELECT v, n, s FROM g ORDER BY v").await.unwrap();
    // Of the ids 0 to 149,999 each tenth, from v on.
    let each = ROWS / 10;
    let expected: Vec<Vec<String>> = (0..10)
        .map(|v| vec![v, each, each * v + 10 * (each * (each - 1) / 2)])
        .map(|row| row.iter().map(i64::to_string).collect())
        .collect();
    assert_eq!(rows, expected);
    let whole = suite::rows(&client, "SELECT id FROM t").await.unwrap();
    assert_eq!(whole.len() as i64, ROWS);
    let first = suite::rows(&client, "SELECT id FROM t LIMIT 7").await.unwrap();
    assert_eq!(first, whole[..7], "parts come in the order of one scan");
    // A thread that has just begun may have its name and not yet its priority.
    let until = Instant::now() + Duration::from_secs(60);
    loop {
        let of = priorities(&server);
        let base = of["millrace"].iter().copied().min().unwrap();
        let lower = (base + 5).min(19);
        let is_lower = |name: &str| of.get(name).is_some_and(|n| n.iter().all(|n| *n == lower));
        if ["millrace-task", "millrace-merge", "millrace-query"].into_iter().all(is_lower) {
            break;
        }
        assert!(Instant::now() < until, "{of:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
