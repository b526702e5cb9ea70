//! What one changed row costs, over a large and over a small input.
//!
//! The price of a change must follow the change, not the data behind it (docs/design.md §1): both
//! sizes take the same store rounds and about the same time and bytes. One connection updates one row of
//! a table and reads the view that aggregates it, again and again; the read waits for the change.
//!
//! Like is compared with like. A small table is soon in memory as a whole and a large one is not, so
//! every key is changed twice: cold, with the block cache emptied before each change, and warm, when the blocks
//! that the change needs are there. Indexes of runs stay in memory in both, as they do in a server.

use std::time::{Duration, Instant};

use futures::SinkExt;
use millrace::{Config, Overrides, Standalone};
use serde::Serialize;
use tokio_postgres::Client;

use crate::nexmark::{connect, execute, temporary};

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

/// Costs of one change; medians, and per-change means of what the store saw.
#[derive(Clone, Debug, Serialize)]
struct Cost {
    median_ms: f64,
    p90_ms: f64,
    store_requests: f64,
    bytes_read: f64,
    bytes_written: f64,
}

/// Costs at one size.
#[derive(Clone, Debug, Serialize)]
struct Size {
    rows: u64,
    load_s: f64,
    cold: Cost,
    warm: Cost,
}

/// Large over small.
#[derive(Clone, Debug, Serialize)]
struct Ratios {
    time: f64,
    requests: f64,
    bytes: f64,
}

impl Ratios {
    fn of(small: &Cost, large: &Cost) -> Ratios {
        let ratio = |l: f64, s: f64| if s > 0.0 { l / s } else { f64::from(l > 0.0) + 1.0 };
        let bytes = |c: &Cost| c.bytes_read + c.bytes_written;
        Ratios {
            time: ratio(large.median_ms, small.median_ms),
            requests: ratio(large.store_requests, small.store_requests),
            bytes: ratio(bytes(large), bytes(small)),
        }
    }
}

#[derive(Clone, Debug, Serialize)]
struct Comparison {
    cold: Ratios,
    warm: Ratios,
    small: Size,
    large: Size,
}

pub async fn run(args: &Args) -> Result<(), String> {
    let small = measure(args, args.small).await?;
    let large = measure(args, args.large).await?;
    for (state, s, l) in [("cold", &small.cold, &large.cold), ("warm", &small.warm, &large.warm)] {
        for (rows, c) in [(small.rows, s), (large.rows, l)] {
            println!(
                "{state} {rows:>9} rows: median {:.2} ms, p90 {:.2} ms, {:.1} requests, {:.0} B read, {:.0} B written",
                c.median_ms, c.p90_ms, c.store_requests, c.bytes_read, c.bytes_written
            );
        }
    }
    let comparison = Comparison {
        cold: Ratios::of(&small.cold, &large.cold),
        warm: Ratios::of(&small.warm, &large.warm),
        small,
        large,
    };
    let line = serde_json::to_string(&comparison).map_err(|e| e.to_string())?;
    println!("{line}");
    Ok(())
}

async fn measure(args: &Args, rows: u64) -> Result<Size, String> {
    let temporary = temporary(args.dir.as_deref())?;
    let config = Config { memory_limit: 4 << 30, ..Config::embedded(temporary.path()) };
    let server =
        Standalone::start(config, Overrides::threads_apart()).await.map_err(|e| e.to_string())?;
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
) -> Result<Size, String> {
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
    let cold = series(args, rows, groups, server, client, true).await?;
    let warm = series(args, rows, groups, server, client, false).await?;
    Ok(Size { rows, load_s, cold, warm })
}

/// The same changes each time; `cold`: no block is in memory when one begins.
async fn series(
    args: &Args,
    rows: u64,
    groups: u64,
    server: &Standalone,
    client: &Client,
    cold: bool,
) -> Result<Cost, String> {
    let before = server.requests.as_ref().map(|r| r.stats()).unwrap_or_default();
    let mut times = Vec::with_capacity(args.changes as usize);
    for i in 0..args.changes {
        if cold {
            server.store.cache().clear_memory();
        }
        let at = Instant::now();
        change(client, i * 104_729 % rows, groups).await?;
        times.push(at.elapsed().as_secs_f64() * 1_000.0);
    }
    let seen = server.requests.as_ref().map(|r| r.stats()).unwrap_or_default() - before;
    times.sort_by(f64::total_cmp);
    let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize];
    let each = args.changes.max(1) as f64;
    Ok(Cost {
        median_ms: at(0.5),
        p90_ms: at(0.9),
        store_requests: seen.requests() as f64 / each,
        bytes_read: seen.bytes_read as f64 / each,
        bytes_written: seen.bytes_written as f64 / each,
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
