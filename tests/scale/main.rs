//! State larger than memory: a join view whose state is larger than the memory limit is built, updated
//! and stays exact, and the process never holds more than one and a half times the limit.
//!
//! A debug build's code alone, mapped from its file, is as large as the small limit that a quick run needs;
//! these pages are the kernel's to drop. So a debug build is held to a narrower bound without them.
//!
//! The default is small enough for every run. `MILLRACE_SCALE_EVENTS` and `MILLRACE_SCALE_LIMIT_MB` make
//! it larger: 5,000,000 events are about 2 GB of state, meant for a release build and 256 MB.

use std::path::Path;
use std::time::{Duration, Instant};

use millrace_sqllogictest::{Server, ServerOptions};
use tokio_postgres::Client;

/// How long the view may take to follow its sources.
const LIMIT: Duration = Duration::from_secs(3_600);

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|v| v.parse().ok()).unwrap_or(default)
}

fn definitions(events: u64) -> String {
    let source = |table: &str| {
        format!("WITH (connector = 'nexmark', table = '{table}', event.num = {events})")
    };
    format!(
        "CREATE SOURCE bid (auction BIGINT, bidder BIGINT, price BIGINT, channel VARCHAR, url VARCHAR, \
             date_time TIMESTAMP, extra VARCHAR) {}; \
         CREATE SOURCE auction (id BIGINT, item_name VARCHAR, description VARCHAR, initial_bid BIGINT, \
             reserve BIGINT, date_time TIMESTAMP, expires TIMESTAMP, seller BIGINT, category BIGINT, \
             extra VARCHAR) {}; \
         CREATE TABLE watch (id BIGINT PRIMARY KEY, note VARCHAR); \
         CREATE MATERIALIZED VIEW joined AS {JOIN}",
        source("bid"),
        source("auction"),
    )
}

const JOIN: &str = "SELECT b.auction, b.bidder, b.price, b.channel, b.url, b.extra AS bid_extra, \
    a.item_name, a.description, a.seller, a.extra AS auction_extra, w.note \
    FROM bid b JOIN auction a ON b.auction = a.id LEFT JOIN watch w ON b.auction = w.id";

/// Numbers that differ when rows do.
fn fingerprint(from: &str) -> String {
    format!(
        "SELECT count(*)::text, sum(price)::text, sum(bidder)::text, sum(length(url))::text, \
         sum(seller)::text, sum(length(bid_extra))::text, sum(length(auction_extra))::text, \
         count(note)::text FROM {from}"
    )
}

async fn one_row(client: &Client, sql: &str) -> Vec<String> {
    let row = client.query_one(sql, &[]).await.expect("the query runs");
    (0..row.len()).map(|i| row.get::<_, Option<String>>(i).unwrap_or_default()).collect()
}

async fn number(client: &Client, sql: &str) -> i64 {
    client.query_one(sql, &[]).await.expect("the query runs").get(0)
}

/// Waits until both sources have given all their events. A read that follows sees the view of all of them.
async fn follow(client: &Client, events: u64) {
    // Of 50 events one is a person, three are auctions and 46 are bids.
    let bids = (events / 50 * 46) as i64;
    let begun = Instant::now();
    for (source, all) in [("bid", bids), ("auction", (events / 50 * 3) as i64)] {
        while number(client, &format!("SELECT count(*) FROM {source}")).await < all {
            assert!(begun.elapsed() < LIMIT, "the view does not follow its source {source}");
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    }
    // A few bids are on auctions beyond the last event.
    let joined = number(client, "SELECT count(*) FROM joined").await;
    assert!(joined > bids / 100 * 98, "{joined} of {bids} bids found their auctions");
}

fn status_mb(pid: u32, field: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("the server runs");
    let line = status.lines().find(|l| l.starts_with(field)).expect("the kernel tells");
    line.split_ascii_whitespace().nth(1).and_then(|n| n.parse::<u64>().ok()).expect("a number")
        >> 10
}

#[tokio::test(flavor = "multi_thread")]
#[cfg_attr(not(feature = "jemalloc"), ignore = "the bound holds with the feature jemalloc only")]
async fn a_join_larger_than_memory_stays_exact_and_within_its_limit() {
    let events = setting("MILLRACE_SCALE_EVENTS", 60_000);
    let limit = setting("MILLRACE_SCALE_LIMIT_MB", 160);
    let dir = tempfile::tempdir().expect("a temporary directory");
    let options = ServerOptions {
        data_dir: dir.path().to_path_buf(),
        args: vec![format!("--memory-limit={limit}MiB")],
        ..ServerOptions::default()
    };
    let server = Server::start(Path::new(env!("CARGO_BIN_EXE_millrace")), options)
        .expect("the server starts");
    let code = if cfg!(debug_assertions) { status_mb(server.pid(), "RssFile") } else { 0 };
    let client = server.connect().await.expect("a connection");
    client.batch_execute("SET read_wait_timeout = '600s'").await.expect("a setting");
    let begun = Instant::now();
    client.batch_execute(&definitions(events)).await.expect("sources and view are created");
    follow(&client, events).await;
    let built = begun.elapsed();
    let peak_built = status_mb(server.pid(), "VmHWM");

    // Updates reach rows that have long left memory.
    let auctions = "SELECT id, 'note ' || id FROM auction WHERE id % 97 = 0";
    client
        .batch_execute(&format!("INSERT INTO watch {auctions}"))
        .await
        .expect("rows are inserted");
    client
        .batch_execute("UPDATE watch SET note = note || '!' WHERE id % 2 = 0")
        .await
        .expect("an update");
    client.batch_execute("DELETE FROM watch WHERE id % 5 = 0").await.expect("a delete");
    let view = one_row(&client, &fingerprint("joined")).await;
    let updated = begun.elapsed();
    let peak = status_mb(server.pid(), "VmHWM");
    println!(
        "{events} events, limit {limit} MB: built in {built:.1?} (peak {peak_built} MB), updated by {updated:.1?} \
         (peak {peak} MB); {view:?}"
    );
    let batch = one_row(&client, &fingerprint(&format!("({JOIN}) AS q"))).await;
    assert_eq!(view, batch, "the view is not what its query gives");
    match code {
        0 => assert!(peak * 2 <= limit * 3, "peak of {peak} MB is beyond 1.5 × {limit} MB"),
        _ => assert!(
            (peak - code) * 4 <= limit * 5,
            "peak of {peak} MB, {code} MB of it code, is beyond 1.25 × {limit} MB"
        ),
    }
}
