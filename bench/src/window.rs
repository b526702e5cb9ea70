//! What one changed row costs under window functions, over groups of growing size.
//!
//! `lag` and a `ROWS` frame reach a few rows, so a change in the middle of a group of a million rows
//! costs what it costs in one of a thousand. One connection updates a row and reads it back through
//! the view; the read waits for the change.

use std::time::Instant;

use millrace::{Config, Overrides, Standalone};
use serde::Serialize;
use tokio_postgres::Client;

use crate::nexmark::{connect, execute, temporary};

/// Rows one INSERT makes.
const LOAD_ROWS: u64 = 50_000;
/// Changes before anything is measured.
const WARM_UP: u64 = 5;

#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    /// Rows of the one group
    #[arg(long, value_delimiter = ',', default_values_t = [1_000, 10_000, 100_000, 1_000_000])]
    rows: Vec<u64>,
    /// Changes measured at each size
    #[arg(long, default_value_t = 40)]
    changes: u64,
}

/// Milliseconds from the statement until the view shows it.
#[derive(Clone, Debug, Serialize)]
struct Cost {
    rows: u64,
    median_ms: f64,
    p90_ms: f64,
}

pub async fn run(args: &Args) -> Result<(), String> {
    println!("{:>10} {:>12} {:>12}", "rows", "median ms", "p90 ms");
    for &rows in &args.rows {
        let cost = measure(args, rows).await?;
        println!("{:>10} {:>12.2} {:>12.2}", cost.rows, cost.median_ms, cost.p90_ms);
        println!("{}", serde_json::to_string(&cost).map_err(|e| e.to_string())?);
    }
    Ok(())
}

async fn measure(args: &Args, rows: u64) -> Result<Cost, String> {
    let folder = temporary(None)?;
    let config = Config { memory_limit: 4 << 30, ..Config::embedded(folder.path()) };
    let server =
        Standalone::start(config, Overrides::threads_apart()).await.map_err(|e| e.to_string())?;
    let client = connect(server.address.port()).await?;
    let cost = drive(args, rows, &client).await;
    drop(client);
    server.shutdown().await;
    cost
}

async fn drive(args: &Args, rows: u64, client: &Client) -> Result<Cost, String> {
    execute(client, "CREATE TABLE readings (id BIGINT PRIMARY KEY, v BIGINT)").await?;
    for from in (0..rows).step_by(LOAD_ROWS as usize) {
        let to = (from + LOAD_ROWS).min(rows) - 1;
        let load = format!(
            "INSERT INTO readings SELECT g, g % 97 FROM generate_series({from}::bigint, {to}) AS t(g)"
        );
        execute(client, &load).await?;
    }
    let view = "CREATE MATERIALIZED VIEW near AS SELECT id, v - lag(v) OVER w AS more, \
                sum(v) OVER (w ROWS 3 PRECEDING) AS four FROM readings WINDOW w AS (ORDER BY id)";
    execute(client, view).await?;
    let mut times = Vec::with_capacity(args.changes as usize);
    for i in 0..WARM_UP + args.changes {
        let id = i * 104_729 % rows;
        let at = Instant::now();
        execute(client, &format!("UPDATE readings SET v = v + 1 WHERE id = {id}")).await?;
        execute(client, &format!("SELECT four FROM near WHERE id = {id}")).await?;
        if i >= WARM_UP {
            times.push(at.elapsed().as_secs_f64() * 1_000.0);
        }
    }
    times.sort_by(f64::total_cmp);
    let at = |share: f64| times[((times.len().max(1) - 1) as f64 * share) as usize];
    Ok(Cost { rows, median_ms: at(0.5), p90_ms: at(0.9) })
}
