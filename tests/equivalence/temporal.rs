//! Temporal filters: a view whose condition reads the clock equals its query, while rows come, change and go, time
//! passes and the server dies.
//!
//! A view's `now()` is its epoch's time and a query's that of the statement, a moment later: near an instant at which a row
//! leaves or appears they may differ for that moment. So each comparison is made until it holds, and a row that left
//! too late, or never, or came back, keeps it from holding.

use std::time::{Duration, Instant};

use tokio_postgres::Client;

use crate::case::{Mode, execute};
use crate::idle::compare;
use crate::node::{Node, NodeOptions};
use crate::rng::Rng;

/// Cases that once found a bug; they always run.
const SEEDS: &[u64] = &[
    // A row that had left before a restart was taken back once more when it was deleted after it.
    14,
];

const STEPS: usize = 10;
const PATIENCE: Duration = Duration::from_secs(120);

const QUERIES: [(&str, &str); 6] = [
    ("kept", "SELECT id, k, at FROM t WHERE at > now() - INTERVAL '2 seconds'"),
    ("begun", "SELECT id, k, at FROM t WHERE at <= now()"),
    (
        "between_them",
        "SELECT id, at FROM t WHERE at BETWEEN now() - INTERVAL '3 seconds' AND now() - INTERVAL '1 second'",
    ),
    (
        "aged",
        "SELECT k, count(*) AS n, min(at) AS first FROM t WHERE now() - at < INTERVAL '2 seconds' GROUP BY k",
    ),
    (
        "past",
        "SELECT k, count(*) AS n, max(at) AS last FROM t WHERE now() > at + INTERVAL '1 second' GROUP BY k",
    ),
    (
        "ahead",
        "SELECT a.id, b.id AS other FROM t a JOIN t b ON a.k = b.k WHERE a.at < now() AND b.at >= now()",
    ),
];

async fn check(client: &Client) -> Result<(), String> {
    for (name, query) in QUERIES {
        let begun = Instant::now();
        while let Err(e) = compare(client, &format!("SELECT * FROM {name}"), query).await {
            if begun.elapsed() > PATIENCE {
                return Err(e);
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    Ok(())
}

async fn run(mode: Mode, seed: u64) -> Result<(), String> {
    let mut rng = Rng::new(seed);
    let mut node = Node::start(NodeOptions::for_mode(mode, seed)).await?;
    let mut client = node.connect().await?;
    execute(&client, "CREATE TABLE t (id int PRIMARY KEY, k int, at timestamptz)").await?;
    for (name, query) in QUERIES {
        execute(&client, &format!("CREATE MATERIALIZED VIEW {name} AS {query}")).await?;
    }
    let mut id = 0;
    for step in 0..STEPS {
        for _ in 0..1 + rng.below(4) {
            let moment = |rng: &mut Rng| match rng.below(10) {
                0 => "NULL".to_owned(),
                n => format!("date_trunc('second', now()) + INTERVAL '{} seconds'", n as i64 - 5),
            };
            let (k, at) = (rng.below(3), moment(&mut rng));
            let some = rng.below(id + 1);
            let change = match rng.below(4) {
                0 => format!("UPDATE t SET at = {at} WHERE id = {some}"),
                1 => format!("DELETE FROM t WHERE id = {some}"),
                _ => {
                    id += 1;
                    format!("INSERT INTO t VALUES ({id}, {k}, {at})")
                }
            };
            execute(&client, &change).await?;
        }
        check(&client).await.map_err(|e| format!("step {step}: {e}"))?;
        if mode.restarts_after(step, &mut rng, 40) {
            node = node.crash_and_restart().await?;
            client = node.connect().await?;
            check(&client).await.map_err(|e| format!("step {step}, restarted: {e}"))?;
        }
    }
    node.stop().await;
    Ok(())
}

#[test]
fn temporal_filters_follow_the_clock() {
    let modes = [Mode::Plain, Mode::TinyCaches, Mode::Crash, Mode::Restart];
    crate::each_case("MILLRACE_TEMPORAL_CASES", [4, 16], SEEDS, &modes, run);
}
