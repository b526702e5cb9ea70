//! `kill -9` on the real binary, at random moments and at every crash point: nothing acknowledged is lost,
//! nothing is invented, statements are all or nothing, and every view equals its query afterwards. The roles of every third
//! server call each other through bytes, as in a cluster.

mod ledger;
mod sources;
mod sparse;

use std::collections::{BTreeSet, HashMap};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::StreamExt;
use ledger::Ledger;
use millrace_common::crash::POINTS;
use millrace_sqllogictest::{Server, ServerOptions, suite};

/// Cases that run at the same time.
const PARALLEL: usize = 2;
/// How long a case may take to pass its point for the first time, and that often.
const FIRST_LIMIT: Duration = Duration::from_secs(180);
const RUN_LIMIT: Duration = Duration::from_secs(20);
/// How long a stream may take to end.
const ARRIVAL: Duration = Duration::from_secs(180);
/// Small thresholds, so that a short run also flushes, compacts, collects garbage and writes snapshots.
const TUNING: &[&str] = &[
    "--memory-limit=64MB",
    "--flush-size=4KB",
    "--direct-run-size=32KB",
    "--inline-size=256",
    "--snapshot-records=16",
    "--gc-interval=100ms",
    "--parallelism=2",
];

fn start(dir: &Path, env: HashMap<String, String>) -> Server {
    let options = ServerOptions {
        data_dir: dir.to_path_buf(),
        args: TUNING.iter().map(|a| (*a).to_string()).collect(),
        env,
    };
    Server::start(Path::new(env!("CARGO_BIN_EXE_millrace")), options).expect("the server starts")
}

/// Has the roles of a server call each other through bytes.
fn through_bytes() -> HashMap<String, String> {
    HashMap::from([("MILLRACE_LOOPBACK".to_string(), "encode".to_string())])
}

/// Cases at the first pass of every second point run as they are, all others with hints at random.
fn armed(point: &str, pass: u32) -> HashMap<String, String> {
    let place = POINTS.iter().position(|p| *p == point).unwrap_or_default();
    let mut env = match pass > 1 || place % 2 == 1 {
        true => random_hints(),
        false => HashMap::new(),
    };
    env.insert("MILLRACE_CRASH_POINT".to_string(), format!("{point}:{pass}"));
    env
}

/// Caches that hold next to nothing, and hints at random, of which the server mishandles many. A build without debug
/// assertions knows of no such thing, and would pass these cases without them.
fn random_hints() -> HashMap<String, String> {
    if !cfg!(debug_assertions) {
        panic!(
            "only a build with debug assertions has hints at random: run this suite without --release"
        );
    }
    HashMap::from([("MILLRACE_RANDOM_HINTS".to_string(), "1".to_string())])
}

/// A data directory with some history, to be copied for every case.
struct Base {
    dir: tempfile::TempDir,
    ledger: Ledger,
}

async fn base() -> Base {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let mut server = start(dir.path(), HashMap::new());
    let mut ledger = Ledger::create(&server).await.expect("tables and views are created");
    ledger.run(&server, Duration::from_millis(500)).await;
    ledger.verify(&server).await.expect("without a crash");
    server.kill();
    Base { dir, ledger }
}

fn copy_of(from: &Path) -> tempfile::TempDir {
    let to = tempfile::tempdir().expect("a temporary directory");
    let copied =
        std::process::Command::new("cp").arg("-r").arg(from.join(".")).arg(to.path()).status();
    assert!(copied.is_ok_and(|s| s.success()), "the data directory is copied");
    to
}

/// Runs a copy of the base until it dies at a point, starts it again and compares. Whether it was reached. The roles of
/// every third server call each other through bytes, and those of every third that comes after a crash.
async fn case(base: &Base, number: usize, point: &'static str, pass: u32) -> bool {
    let loopback = |turn: usize| match (number + turn).is_multiple_of(3) {
        true => through_bytes(),
        false => HashMap::new(),
    };
    let mut env = armed(point, pass);
    env.extend(loopback(0));
    let dir = copy_of(base.dir.path());
    let mut ledger = base.ledger.clone();
    let options = ServerOptions {
        data_dir: dir.path().to_path_buf(),
        args: TUNING.iter().map(|a| (*a).to_string()).collect(),
        env,
    };
    let said = format!("crash point {point}");
    let reached = match Server::start(Path::new(env!("CARGO_BIN_EXE_millrace")), options) {
        Ok(mut server) => {
            ledger.run(&server, if pass == 1 { FIRST_LIMIT } else { RUN_LIMIT }).await;
            server.kill();
            server.log().contains(&said)
        }
        // The point may lie on the way up.
        Err(log) => {
            assert!(log.contains(&said), "before {point}:{pass}: {log}");
            true
        }
    };
    let server = start(dir.path(), loopback(1));
    ledger
        .verify(&server)
        .await
        .unwrap_or_else(|e| panic!("after {point}:{pass}: {e}\n{}", server.log()));
    reached
}

#[tokio::test(flavor = "multi_thread", worker_threads = 8)]
async fn killed_at_every_crash_point() {
    let base = Arc::new(base().await);
    // A start passes the points of taking the lead once, and one job is detached.
    let once = |point: &str| point.ends_with("-lead") || point.starts_with("detach-");
    let passes = |point: &str| if once(point) { vec![1] } else { vec![1, 7] };
    // Those take a workload of their own.
    let points: Vec<&str> = POINTS.iter().copied().filter(|p| !sparse::is_of_segments(p)).collect();
    let cases =
        points.clone().into_iter().flat_map(|p| passes(p).into_iter().map(move |pass| (p, pass)));
    let results: Vec<(&str, bool)> = futures::stream::iter(cases.enumerate())
        .map(|(number, (point, pass))| {
            let base = Arc::clone(&base);
            async move {
                let run = tokio::spawn(async move { case(&base, number, point, pass).await });
                (point, run.await.expect("the case holds"))
            }
        })
        .buffer_unordered(PARALLEL)
        .collect()
        .await;
    let reached: BTreeSet<&str> = results.iter().filter(|(_, hit)| *hit).map(|(p, _)| *p).collect();
    let never: Vec<_> = points.iter().filter(|p| !reached.contains(**p)).collect();
    println!(
        "{} of {} crash points reached, {} crashes",
        reached.len(),
        points.len(),
        results.len()
    );
    assert!(never.is_empty(), "crash points that no run reached: {never:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_at_random_under_load() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let mut server = start(dir.path(), random_hints());
    let mut ledger = Ledger::create(&server).await.expect("tables and views are created");
    for round in 0..6u64 {
        let pause = Duration::from_millis(120 + 233 * round);
        tokio::join!(ledger.run(&server, pause + Duration::from_millis(50)), async {
            tokio::time::sleep(pause).await;
            // The moment is the point: it is not synchronisation.
            kill(server.pid());
        });
        let mut env = random_hints();
        if round % 3 == 1 {
            env.extend(through_bytes());
        }
        server.restart(Some(env)).expect("the server starts after a kill");
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
    for (kills, env) in [(0, HashMap::new()), (4, through_bytes())] {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let mut server = start(dir.path(), env);
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
    let deadline = Instant::now() + ARRIVAL;
    while Instant::now() < deadline {
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
    panic!("the stream does not end");
}
