//! How old an answer is: from a statement sent until its row can be read, is streamed to a subscriber, and is
//! in a sink's file, behind chains of views.
//!
//! One connection inserts a row, waits a moment, inserts the next. `read` is the time until a strict read of
//! the last view of the chain has answered with the row; `stream` until SUBSCRIBE delivers it, with nobody
//! reading; `sink` until the file that holds it is in place. All from the moment the INSERT is sent.

use std::path::Path;
use std::time::{Duration, Instant};

use futures::StreamExt;
use millrace::{Config, Overrides, Standalone};
use serde::Serialize;
use tokio_postgres::Client;

use crate::nexmark::{connect, execute, temporary};

/// Rows before anything is measured.
const WARM_UP: u64 = 5;
/// A row that is not there by then is an error.
const LIMIT: Duration = Duration::from_secs(30);

#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    /// Views in a chain
    #[arg(long, value_delimiter = ',', default_values_t = [1, 2, 4])]
    views: Vec<u32>,
    /// Rows measured for each number
    #[arg(long, default_value_t = 60)]
    rows: u64,
    /// Milliseconds between a row's arrival and the next row
    #[arg(long, default_value_t = 300)]
    pause_ms: u64,
    /// Milliseconds between the barriers of data nobody waits for
    #[arg(long, default_value_t = 250)]
    barrier_ms: u64,
}

/// Of one way to see a row, in milliseconds.
#[derive(Clone, Debug, Serialize)]
struct Freshness {
    views: u32,
    way: &'static str,
    p50_ms: f64,
    p99_ms: f64,
}

pub async fn run(args: &Args) -> Result<(), String> {
    println!("{:>5} {:7} {:>8} {:>8}", "views", "way", "p50_ms", "p99_ms");
    for &views in &args.views {
        for measured in chain(args, views).await? {
            println!(
                "{:>5} {:7} {:>8.1} {:>8.1}",
                measured.views, measured.way, measured.p50_ms, measured.p99_ms
            );
            println!("{}", serde_json::to_string(&measured).map_err(|e| e.to_string())?);
        }
    }
    Ok(())
}

async fn chain(args: &Args, views: u32) -> Result<Vec<Freshness>, String> {
    let temporary = temporary(None)?;
    let files = temporary.path().join("files");
    let config = Config {
        memory_limit: 1 << 30,
        barrier_interval: Duration::from_millis(args.barrier_ms),
        ..Config::embedded(temporary.path())
    };
    let server =
        Standalone::start(config, Overrides::threads_apart()).await.map_err(|e| e.to_string())?;
    let client = connect(server.address.port()).await?;
    execute(&client, "CREATE TABLE v0 (id BIGINT PRIMARY KEY, x BIGINT)").await?;
    for v in 1..=views {
        let sql = format!("CREATE MATERIALIZED VIEW v{v} AS SELECT id, x + 1 AS x FROM v{}", v - 1);
        execute(&client, &sql).await?;
    }
    let ways = [
        ("read", read(args, &client, views).await?),
        ("stream", stream(args, &server, &client, views).await?),
        ("sink", sink(args, &client, views, &files).await?),
    ];
    drop(client);
    server.shutdown().await;
    let percentiles = |(way, mut times): (&'static str, Vec<f64>)| {
        times.sort_by(f64::total_cmp);
        let at = |share: f64| times[((times.len() - 1) as f64 * share).round() as usize];
        Freshness { views, way, p50_ms: at(0.5), p99_ms: at(0.99) }
    };
    Ok(ways.into_iter().map(percentiles).collect())
}

async fn insert(client: &Client, id: u64) -> Result<Instant, String> {
    let begun = Instant::now();
    execute(client, &format!("INSERT INTO v0 VALUES ({id}, 0)")).await?;
    Ok(begun)
}

/// Times of all rows but the first few.
struct Times(Vec<f64>);

impl Times {
    fn add(&mut self, n: u64, begun: Instant) {
        if n >= WARM_UP {
            self.0.push(begun.elapsed().as_secs_f64() * 1_000.0);
        }
    }
}

async fn read(args: &Args, client: &Client, views: u32) -> Result<Vec<f64>, String> {
    let mut times = Times(Vec::new());
    for n in 0..args.rows + WARM_UP {
        let begun = insert(client, n).await?;
        let sql = format!("SELECT x FROM v{views} WHERE id = {n}");
        let rows = client.simple_query(&sql).await.map_err(|e| e.to_string())?;
        let found = rows.iter().any(|m| matches!(m, tokio_postgres::SimpleQueryMessage::Row(_)));
        if !found {
            return Err(format!("row {n} was not there for a strict read"));
        }
        times.add(n, begun);
        tokio::time::sleep(Duration::from_millis(args.pause_ms)).await;
    }
    Ok(times.0)
}

async fn stream(
    args: &Args,
    server: &Standalone,
    client: &Client,
    views: u32,
) -> Result<Vec<f64>, String> {
    let reader = connect(server.address.port()).await?;
    let sql = format!("SUBSCRIBE TO v{views} WITH (snapshot = false)");
    let rows = reader.copy_out(&sql).await.map_err(|e| e.to_string())?;
    futures::pin_mut!(rows);
    let mut times = Times(Vec::new());
    for n in 0..args.rows + WARM_UP {
        let begun = insert(client, 1_000_000 + n).await?;
        let next = tokio::time::timeout(LIMIT, rows.next()).await;
        match next {
            Ok(Some(Ok(_))) => times.add(n, begun),
            Ok(Some(Err(e))) => return Err(e.to_string()),
            Ok(None) | Err(_) => return Err(format!("row {n} was not streamed")),
        }
        tokio::time::sleep(Duration::from_millis(args.pause_ms)).await;
    }
    // It would wait for more.
    reader.cancel_token().cancel_query(tokio_postgres::NoTls).await.map_err(|e| e.to_string())?;
    Ok(times.0)
}

async fn sink(args: &Args, client: &Client, views: u32, files: &Path) -> Result<Vec<f64>, String> {
    let sql = format!(
        "CREATE SINK files FROM v{views} WITH (connector = 'fs', path = '{}', snapshot = false) \
         FORMAT UPSERT ENCODE JSON",
        files.display()
    );
    execute(client, &sql).await?;
    let count = || {
        let entries = std::fs::read_dir(files).into_iter().flatten().flatten();
        entries.filter(|e| e.path().extension().is_some_and(|e| e == "json")).count()
    };
    let mut times = Times(Vec::new());
    for n in 0..args.rows + WARM_UP {
        let before = count();
        let begun = insert(client, 2_000_000 + n).await?;
        while count() == before {
            if begun.elapsed() > LIMIT {
                return Err(format!("row {n} did not reach the sink"));
            }
            // Half a millisecond of error at most; the file system tells nobody.
            tokio::time::sleep(Duration::from_micros(500)).await;
        }
        times.add(n, begun);
        tokio::time::sleep(Duration::from_millis(args.pause_ms)).await;
    }
    Ok(times.0)
}
