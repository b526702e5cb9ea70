//! Killed while what is alive in sparse segments moves. A workload made for it: one flush writes the state of both sides of
//! a join into a segment; one side is rewritten again and again, so that its part of the segment dies, the other side
//! stays.

use std::collections::HashMap;
use std::path::Path;
use std::time::{Duration, Instant};

use millrace_common::crash::POINTS;
use millrace_sqllogictest::{Server, ServerOptions, suite};
use tokio_postgres::Client;

/// The points that this test reaches; the other one leaves them out.
pub fn is_of_segments(point: &str) -> bool {
    point.starts_with("segments-")
}

/// How long a case may take to reach its point.
const LIMIT: Duration = Duration::from_secs(180);
/// The rare side fits into memory until the busy side comes.
const TUNING: &[&str] = &[
    "--memory-limit=64MB",
    "--flush-size=16KB",
    "--inline-size=256",
    "--snapshot-records=16",
    "--gc-interval=50ms",
    "--parallelism=2",
];
const BUSY: usize = 1_000;
const RARE: usize = 20;

fn options(dir: &Path, env: HashMap<String, String>) -> ServerOptions {
    ServerOptions {
        data_dir: dir.to_path_buf(),
        args: TUNING.iter().map(|a| (*a).to_string()).collect(),
        env,
    }
}

fn start(dir: &Path, env: HashMap<String, String>) -> Server {
    let binary = Path::new(env!("CARGO_BIN_EXE_millrace"));
    Server::start(binary, options(dir, env)).expect("the server starts")
}

async fn create(client: &Client) {
    let sql = format!(
        "CREATE TABLE busy (k int PRIMARY KEY, round int, v varchar);
         CREATE TABLE rare (k int PRIMARY KEY, w varchar);
         CREATE MATERIALIZED VIEW joined AS SELECT b.k, b.round, b.v, r.w FROM busy b JOIN rare r ON b.k % {RARE} = r.k;
         INSERT INTO rare SELECT x, md5(x::text) FROM generate_series(0, {RARE} - 1) AS s(x);
         INSERT INTO busy SELECT x, 0, md5(x::text) FROM generate_series(1, {BUSY}) AS s(x)"
    );
    for statement in sql.split(';') {
        client.batch_execute(statement).await.unwrap_or_else(|e| panic!("{statement}: {e:?}"));
    }
}

/// Rewrites the busy side until the server is gone. Returns the last round that was acknowledged.
async fn rewrite(client: &Client, first: usize, until: Instant) -> usize {
    let mut done = first;
    while Instant::now() < until {
        let next = done + 1;
        let update = format!("UPDATE busy SET round = {next}, v = md5(k::text || '{next}')");
        if client.batch_execute(&update).await.is_err() {
            break;
        }
        done = next;
    }
    done
}

/// All rows are of one round, the last acknowledged or the one whose fate is not known. Returns it.
async fn verify(client: &Client, acknowledged: usize) -> usize {
    let sql = "SELECT min(round), max(round), count(*) FROM busy \
               WHERE v = md5(k::text || CASE WHEN round = 0 THEN '' ELSE round::text END)";
    let found = suite::rows(client, sql).await.expect("the table is readable").remove(0);
    let round: usize = found[0].parse().expect("a number");
    assert_eq!(
        found[1..],
        [round.to_string(), BUSY.to_string()],
        "round {acknowledged}: {found:?}"
    );
    assert!((acknowledged..=acknowledged + 1).contains(&round), "{round}, not {acknowledged}");
    let rare = "SELECT count(*) FROM rare WHERE w = md5(k::text)";
    assert_eq!(suite::rows(client, rare).await.expect("readable")[0][0], RARE.to_string());
    assert_eq!(suite::check_views(client).await.expect("the view is its query"), 1);
    round
}

async fn case(point: &'static str) {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let armed = HashMap::from([("MILLRACE_CRASH_POINT".to_string(), format!("{point}:1"))]);
    let mut server = start(dir.path(), armed);
    let client = server.connect().await.expect("a connection");
    create(&client).await;
    let acknowledged = rewrite(&client, 0, Instant::now() + LIMIT).await;
    server.kill();
    let said = format!("crash point {point}");
    assert!(server.log().contains(&said), "{point} was not reached in {acknowledged} rounds");

    // What has moved, or has not, is read and goes on changing; and it moves again.
    let mut server = start(dir.path(), HashMap::new());
    let client = server.connect().await.expect("a connection");
    let round = verify(&client, acknowledged).await;
    let round = rewrite(&client, round, Instant::now() + Duration::from_secs(3)).await;
    verify(&client, round).await;
    server.kill();
    let server = start(dir.path(), HashMap::new());
    let client = server.connect().await.expect("a connection");
    verify(&client, round).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn killed_while_what_is_alive_in_sparse_segments_moves() {
    let points: Vec<&str> = POINTS.iter().copied().filter(|p| is_of_segments(p)).collect();
    assert_eq!(points.len(), 3);
    for point in points {
        case(point).await;
    }
}
