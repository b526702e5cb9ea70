//! Kafka, end to end on the real binary against mock brokers: every format comes in, every format goes out,
//! and each message counts exactly once, whatever dies.
#![cfg(feature = "kafka")]

mod broker;
mod sink;
mod source;

use std::path::Path;
use std::time::{Duration, Instant};

use millrace_sqllogictest::{Server, ServerOptions, suite};
use tokio_postgres::Client;

fn start(dir: &Path) -> Server {
    let binary = Path::new(env!("CARGO_BIN_EXE_millrace"));
    Server::start(binary, ServerOptions::small(dir)).expect("the server starts")
}

async fn execute(client: &Client, sql: &str) {
    client.batch_execute(sql).await.unwrap_or_else(|e| panic!("{sql}: {e:?}"));
}

/// Until every sink has published what was written before.
async fn flush(client: &Client) {
    suite::flush(client).await.unwrap_or_else(|e| panic!("{e}"));
}

/// Sorted rows, cells joined by `|`.
async fn answer(client: &Client, sql: &str) -> Vec<String> {
    let rows = suite::rows(client, sql).await.unwrap_or_else(|e| panic!("{e}"));
    let mut rows: Vec<String> = rows.iter().map(|r| r.join("|")).collect();
    rows.sort();
    rows
}

/// Waits until a query's answer is this.
async fn eventually(client: &Client, sql: &str, expected: &[&str]) {
    eventually_if(client, sql, |rows| rows == expected, &format!("{expected:?}")).await;
}

async fn eventually_if(client: &Client, sql: &str, is: impl Fn(&[String]) -> bool, what: &str) {
    let deadline = Instant::now() + Duration::from_secs(180);
    loop {
        let rows = answer(client, sql).await;
        if is(&rows) {
            return;
        }
        if Instant::now() > deadline {
            let sources = answer(client, "SHOW SOURCES").await;
            let jobs = answer(client, "SHOW JOBS").await;
            panic!("{sql}\n  is {rows:?}\n  not {what}\n  {sources:?}\n  {jobs:?}");
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
