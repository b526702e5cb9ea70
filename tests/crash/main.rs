//! `kill -9` on the real binary, at random moments and at every crash point: nothing acknowledged is lost,
//! nothing is invented, statements are all or nothing, and every view equals its query afterwards.

mod ledger;

use std::collections::HashMap;
use std::path::Path;
use std::time::Duration;

use ledger::Ledger;
use millrace_common::crash::POINTS;
use millrace_sqllogictest::{Server, ServerOptions, suite};

fn start(dir: &Path, env: HashMap<String, String>) -> Server {
    let options = ServerOptions {
        data_dir: dir.to_path_buf(),
        // Small thresholds, so that a short run also flushes, compacts and writes snapshots.
        args: vec!["--memory-limit".into(), "64MB".into()],
        env,
    };
    Server::start(Path::new(env!("CARGO_BIN_EXE_millrace")), options).expect("the server starts")
}

fn armed(point: &str, pass: u32) -> HashMap<String, String> {
    HashMap::from([("MILLRACE_CRASH_POINT".to_string(), format!("{point}:{pass}"))])
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_at_every_crash_point() {
    let mut reached = 0;
    let mut never = Vec::new();
    for point in POINTS {
        let mut hit = false;
        for pass in [1, 7] {
            let dir = tempfile::tempdir().expect("a temporary directory");
            let mut server = start(dir.path(), HashMap::new());
            let mut ledger = Ledger::create(&server).await.expect("tables and views are created");
            server.restart(Some(armed(point, pass))).unwrap_or_else(|e| {
                // The point may lie on the way up; what was acknowledged before must still be there.
                assert!(!e.is_empty());
            });
            if !server.has_exited() {
                ledger.run(&server, Duration::from_secs(4)).await;
            }
            hit |= server.has_exited();
            server.restart(Some(HashMap::new())).expect("the server starts after a crash");
            ledger.verify(&server).await.unwrap_or_else(|e| panic!("after {point}:{pass}: {e}"));
        }
        if hit {
            reached += 1;
        } else {
            never.push(*point);
        }
    }
    println!("{reached} of {} crash points reached", POINTS.len());
    assert!(never.is_empty(), "crash points that no run reached: {never:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_at_random_under_load() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let mut server = start(dir.path(), HashMap::new());
    let mut ledger = Ledger::create(&server).await.expect("tables and views are created");
    for round in 0..6u64 {
        let pause = Duration::from_millis(120 + 233 * round);
        tokio::join!(ledger.run(&server, pause + Duration::from_millis(50)), async {
            tokio::time::sleep(pause).await;
            // The moment is the point: it is not synchronisation.
            kill(server.pid());
        });
        server.restart(None).expect("the server starts after a kill");
        ledger.verify(&server).await.unwrap_or_else(|e| panic!("round {round}: {e}"));
    }
}

/// `kill -9` by process id, while the server is borrowed.
fn kill(pid: u32) {
    let status = std::process::Command::new("kill").args(["-9", &pid.to_string()]).status();
    assert!(status.is_ok_and(|s| s.success()), "kill -9 {pid}");
}

#[tokio::test(flavor = "multi_thread")]
async fn nexmark_killed_equals_nexmark_left_alone() {
    const SQL: &str = "CREATE SOURCE bid (auction BIGINT, bidder BIGINT, price BIGINT, channel VARCHAR, url VARCHAR, \
        date_time TIMESTAMP, extra VARCHAR) WITH (connector = 'nexmark', table = 'bid', event.num = 60000, \
        event.rate = 15000, splits = 2); \
        CREATE MATERIALIZED VIEW per_auction AS SELECT auction, count(*) AS n, sum(price) AS s, max(price) AS m \
        FROM bid GROUP BY auction; \
        CREATE MATERIALIZED VIEW best AS SELECT auction, bidder, price FROM (SELECT *, row_number() OVER \
        (PARTITION BY auction ORDER BY price DESC, date_time, bidder) AS rn FROM bid) b WHERE rn = 1";
    let mut answers = Vec::new();
    for kills in [0, 4] {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let mut server = start(dir.path(), HashMap::new());
        let client = server.connect().await.expect("a connection");
        client.batch_execute(SQL).await.expect("source and views are created");
        for _ in 0..kills {
            tokio::time::sleep(Duration::from_millis(700)).await;
            server.restart(None).expect("the server starts after a kill");
        }
        let client = server.connect().await.expect("a connection");
        answers.push(wait_for_all_bids(&client).await);
    }
    assert_eq!(answers[0], answers[1]);
}

/// Both views' rows once all 55,200 bids of 60,000 events are counted.
async fn wait_for_all_bids(client: &tokio_postgres::Client) -> [Vec<Vec<String>>; 2] {
    let counted = "SELECT coalesce(sum(n), 0) FROM per_auction";
    for _ in 0..600 {
        let n = suite::rows(client, counted).await.expect("the view is readable");
        if n[0][0] == "55200" {
            let mut out = Vec::new();
            for view in ["per_auction", "best"] {
                let sql = format!("SELECT * FROM {view}");
                let mut rows = suite::rows(client, &sql).await.expect("the view is readable");
                rows.sort();
                out.push(rows);
            }
            return out.try_into().expect("two views");
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    panic!("the stream did not end in a minute");
}
