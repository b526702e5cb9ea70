//! What one changed row costs, over a large and over a small input.
//!
//! The price of a change must follow the change, not the data behind it (docs/design.md §1): both
//! sizes take the same store rounds and about the same time and bytes. One connection updates one row of
//! a table and reads the view that aggregates it, again and again; the read waits for the change.

use std::time::{Duration, Instant};

use futures::SinkExt;
use millrace::{Config, Overrides, Standalone};
use serde::Serialize;
use tokio_postgres::Client;

use crate::nexmark::{connect, execute};

/// Rows a COPY loads at once.
const LOAD_ROWS: u64 = 100_000;
/// Changes before anything is measured.
const WARM_UP: u64 = 5;

#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    /// Rows of the large table
    #[arg(long, default_value_t = 5_000_000)]
    large: u64,
    /// Rows of the small table
    #[arg(long, default_value_t = 50_000)]
    small: u64,
    /// Changes measured at each size
    #[arg(long, default_value_t = 40)]
    changes: u64,
    /// Where the stores lie; temporary directories by default
    #[arg(long)]
    dir: Option<std::path::PathBuf>,
}

/// Costs of one change at one size; medians, and per-change means of what the store saw.
#[derive(Clone, Debug, Serialize)]
struct Cost {
    rows: u64,
    load_s: f64,
    median_ms: f64,
    p90_ms: f64,
    store_requests: f64,
    store_bytes: f64,
}

#[derive(Clone, Debug, Serialize)]
struct Comparison {
    small: Cost,
    large: Cost,
    /// Large over small.
    time_ratio: f64,
    requests_ratio: f64,
    bytes_ratio: f64,
}

pub async fn run(args: &Args) -> Result<(), String> {
    let small = measure(args, args.small).await?;
    let large = measure(args, args.large).await?;
    let ratio = |l: f64, s: f64| if s > 0.0 { l / s } else { f64::from(l > 0.0) + 1.0 };
    let comparison = Comparison {
        time_ratio: ratio(large.median_ms, small.median_ms),
        requests_ratio: ratio(large.store_requests, small.store_requests),
        bytes_ratio: ratio(large.store_bytes, small.store_bytes),
        small,
        large,
    };
    let line = serde_json::to_string(&comparison).map_err(|e| e.to_string())?;
    println!("{line}");
    Ok(())
}

async fn measure(args: &Args, rows: u64) -> Result<Cost, String> {
    let temporary = match &args.dir {
        Some(dir) => tempfile::tempdir_in(dir),
        None => tempfile::tempdir(),
    }
    .map_err(|e| format!("cannot make a temporary directory: {e}"))?;
    let config = Config {
        listen: "127.0.0.1:0".to_string(),
        http: millrace::Http::Off,
        access: millrace::Access::default(),
        data_dir: temporary.path().to_path_buf(),
        object_store: format!("file://{}", temporary.path().join("store").display()),
        memory_limit: 4 << 30,
        disk_cache: 0,
        barrier_interval: Duration::from_secs(1),
        parallelism: 2,
        tuning: millrace::Tuning::default(),
    };
    let server =
        Standalone::start(config, Overrides::default()).await.map_err(|e| e.to_string())?;
    let client = connect(server.address.port()).await?;
    let cost = drive(args, rows, &server, &client).await;
    drop(client);
    server.shutdown().await;
    cost
}

async fn drive(
    args: &Args,
    rows: u64,
    server: &Standalone,
    client: &Client,
) -> Result<Cost, String> {
    let started = Instant::now();
    execute(client, "CREATE TABLE items (id BIGINT PRIMARY KEY, grp BIGINT, amount BIGINT)")
        .await?;
    for from in (0..rows).step_by(LOAD_ROWS as usize) {
        load(client, from, (from + LOAD_ROWS).min(rows)).await?;
    }
    let groups = (rows / 100).max(1);
    let view = "CREATE MATERIALIZED VIEW totals AS \
                SELECT grp, count(*) AS n, sum(amount) AS total FROM items GROUP BY grp";
    execute(client, view).await?;
    let load_s = started.elapsed().as_secs_f64();
    // Flushes and compactions of the load end before anything is measured.
    settle(server).await;
    for i in 0..WARM_UP {
        change(client, i * 7_919 % rows, groups).await?;
    }
    let before = server.requests.as_ref().map(|r| r.stats()).unwrap_or_default();
    let mut times = Vec::with_capacity(args.changes as usize);
    for i in 0..args.changes {
        let at = Instant::now();
        change(client, i * 104_729 % rows, groups).await?;
        times.push(at.elapsed().as_secs_f64() * 1_000.0);
    }
    let seen = server.requests.as_ref().map(|r| r.stats()).unwrap_or_default() - before;
    times.sort_by(f64::total_cmp);
    let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize];
    let each = args.changes.max(1) as f64;
    Ok(Cost {
        rows,
        load_s,
        median_ms: at(0.5),
        p90_ms: at(0.9),
        store_requests: seen.requests() as f64 / each,
        store_bytes: (seen.bytes_read + seen.bytes_written) as f64 / each,
    })
}

async fn load(client: &Client, from: u64, to: u64) -> Result<(), String> {
    let mut text = String::new();
    for id in from..to {
        text.push_str(&format!("{id}\t{}\t{}\n", id / 100, id % 1_000));
    }
    let sink = client.copy_in("COPY items FROM STDIN").await.map_err(|e| e.to_string())?;
    futures::pin_mut!(sink);
    sink.send(bytes::Bytes::from(text)).await.map_err(|e| e.to_string())?;
    sink.close().await.map_err(|e| e.to_string())
}

/// One row changes, and the view's row that depends on it is read back.
async fn change(client: &Client, id: u64, groups: u64) -> Result<(), String> {
    execute(client, &format!("UPDATE items SET amount = amount + 1 WHERE id = {id}")).await?;
    let group = (id / 100).min(groups);
    execute(client, &format!("SELECT total FROM totals WHERE grp = {group}")).await
}

/// Until the store has been quiet for a second, for a minute at most.
async fn settle(server: &Standalone) {
    let Some(requests) = &server.requests else { return };
    let mut last = requests.stats();
    for _ in 0..60 {
        tokio::time::sleep(Duration::from_secs(1)).await;
        let now = requests.stats();
        if now.requests() - last.requests() <= 2 {
            return;
        }
        last = now;
    }
}
