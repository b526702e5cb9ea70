//! What one client notices of the work of others.
//!
//! One connection changes a row of a small table and then reads a view over it, again and again: alone; while a view is
//! created over a large table; while a view with a join of many pairs is created; and while a heavy query reads the
//! large table. `update` is the time of the UPDATE, `read` that of the read, which waits until the view has
//! the change. Each load is started again as long as it is measured beside it. The ratios are to the same
//! percentile of alone.

use std::time::{Duration, Instant};

use futures::SinkExt;
use millrace::{Config, Overrides, Standalone};
use serde::Serialize;
use tokio_postgres::Client;

use crate::nexmark::{connect, execute, temporary};

/// Rows a COPY loads at once.
const LOAD_ROWS: u64 = 100_000;
/// Rows of the small table, and groups of its view.
const SMALL_ROWS: u64 = 1_000;
const SMALL_GROUPS: u64 = 10;
/// Changes before anything is measured.
const WARM_UP: u64 = 20;

#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    /// Rows of the large table
    #[arg(long, default_value_t = 5_000_000)]
    rows: u64,
    /// Rows of each side of the join; all have one key, so the pairs are the square
    #[arg(long, default_value_t = 10_000)]
    side: u64,
    /// Seconds measured alone, and beside each load
    #[arg(long, default_value_t = 15)]
    seconds: u64,
    /// A tenth of the rows, a ninth of the pairs, a third of the time
    #[arg(long)]
    quick: bool,
    /// Where the store lies; a temporary directory by default
    #[arg(long)]
    dir: Option<std::path::PathBuf>,
}

/// Of the changes, or of the reads, in milliseconds.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Times {
    pub p50_ms: f64,
    pub p99_ms: f64,
}

impl Times {
    pub fn of(mut times: Vec<f64>) -> Times {
        times.sort_by(f64::total_cmp);
        let at = |share: f64| {
            let last = times.len().saturating_sub(1) as f64;
            times.get((last * share).round() as usize).copied().unwrap_or_default()
        };
        Times { p50_ms: at(0.5), p99_ms: at(0.99) }
    }

    /// How much longer than these.
    pub fn over(self, alone: Times) -> Ratios {
        Ratios { p50: self.p50_ms / alone.p50_ms, p99: self.p99_ms / alone.p99_ms }
    }
}

/// Beside a load to alone.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Ratios {
    pub p50: f64,
    pub p99: f64,
}

#[derive(Clone, Debug, Serialize)]
struct Measured {
    beside: &'static str,
    samples: usize,
    /// How often the load came to its end meanwhile.
    loads: u64,
    update: Times,
    read: Times,
    update_ratio: Option<Ratios>,
    read_ratio: Option<Ratios>,
}

/// What goes on beside the changes.
struct Load {
    name: &'static str,
    run: String,
    /// Removes what `run` made.
    undo: Option<&'static str>,
}

fn loads() -> [Load; 3] {
    let view = |name, query: &str| Load {
        name,
        run: format!("CREATE MATERIALIZED VIEW load AS {query}"),
        undo: Some("DROP MATERIALIZED VIEW IF EXISTS load"),
    };
    [
        view("create", "SELECT k, count(*) AS n, sum(v) AS s, max(v) AS m FROM large GROUP BY k"),
        view(
            "join",
            "SELECT l.v % 100 AS g, count(*) AS n FROM sides l JOIN sides r ON l.k = r.k \
             WHERE l.v + r.v > 1 GROUP BY l.v % 100",
        ),
        Load {
            name: "select",
            run: "SELECT count(*) FROM (SELECT k, count(DISTINCT v) AS n, max(v) AS m FROM large GROUP BY k) x"
                .to_owned(),
            undo: None,
        },
    ]
}

pub async fn run(args: &Args) -> Result<(), String> {
    let mut args = args.clone();
    if args.quick {
        args.rows /= 10;
        args.side /= 3;
        args.seconds = args.seconds.div_ceil(3);
    }
    let temporary = temporary(args.dir.as_deref())?;
    let config = Config { memory_limit: 2 << 30, ..Config::embedded(temporary.path()) };
    let server =
        Standalone::start(config, Overrides::threads_apart()).await.map_err(|e| e.to_string())?;
    let client = connect(server.address.port()).await?;
    let outcome = drive(&args, &server, &client).await;
    drop(client);
    server.shutdown().await;
    outcome
}

async fn drive(args: &Args, server: &Standalone, client: &Client) -> Result<(), String> {
    prepare(args, client).await?;
    settle(server).await;
    for i in 0..WARM_UP {
        change(client, i).await?;
        read(client, i).await?;
    }
    println!(
        "{:8} {:>7} {:>6} {:>19} {:>19} {:>13} {:>13}",
        "beside",
        "samples",
        "loads",
        "update p50/p99 ms",
        "read p50/p99 ms",
        "update ratio",
        "read ratio"
    );
    let length = Duration::from_secs(args.seconds);
    let (update, reading) = sample(client, length).await?;
    let alone = Measured {
        beside: "nothing",
        samples: update.len(),
        loads: 0,
        update: Times::of(update),
        read: Times::of(reading),
        update_ratio: None,
        read_ratio: None,
    };
    print(&alone)?;
    for load in loads() {
        let other = connect(server.address.port()).await?;
        let measured = beside(&load, &alone, client, &other, length).await?;
        print(&measured)?;
        settle(server).await;
    }
    Ok(())
}

/// Measures while the load runs on another connection.
async fn beside(
    load: &Load,
    alone: &Measured,
    client: &Client,
    other: &Client,
    length: Duration,
) -> Result<Measured, String> {
    let until = Instant::now() + length;
    let work = async {
        let mut loads = 0;
        while Instant::now() < until {
            execute(other, &load.run).await?;
            loads += 1;
            if let Some(undo) = load.undo {
                execute(other, undo).await?;
            }
        }
        Ok::<u64, String>(loads)
    };
    let (loads, times) = futures::join!(work, sample(client, length));
    let (update, read) = times?;
    let (samples, update, read) = (update.len(), Times::of(update), Times::of(read));
    Ok(Measured {
        beside: load.name,
        samples,
        loads: loads?,
        update,
        read,
        update_ratio: Some(update.over(alone.update)),
        read_ratio: Some(read.over(alone.read)),
    })
}

/// Changes rows and reads the view for a while. The times of the changes, and of the reads.
pub async fn sample(client: &Client, length: Duration) -> Result<(Vec<f64>, Vec<f64>), String> {
    let until = Instant::now() + length;
    let (mut update, mut reading) = (Vec::new(), Vec::new());
    let mut i = 0;
    while Instant::now() < until {
        update.push(change(client, i).await?);
        reading.push(read(client, i).await?);
        i += 1;
    }
    Ok((update, reading))
}

/// Milliseconds of a statement.
async fn timed(client: &Client, sql: &str) -> Result<f64, String> {
    let at = Instant::now();
    execute(client, sql).await?;
    Ok(at.elapsed().as_secs_f64() * 1_000.0)
}

async fn change(client: &Client, i: u64) -> Result<f64, String> {
    let id = i * 7_919 % SMALL_ROWS;
    timed(client, &format!("UPDATE small SET v = v + 1 WHERE id = {id}")).await
}

async fn read(client: &Client, i: u64) -> Result<f64, String> {
    let group = i * 7_919 % SMALL_ROWS % SMALL_GROUPS;
    timed(client, &format!("SELECT n, s FROM small_groups WHERE g = {group}")).await
}

async fn prepare(args: &Args, client: &Client) -> Result<(), String> {
    for table in ["large", "sides"] {
        create(client, table).await?;
    }
    let groups = (args.rows / 20).max(1);
    load(client, "large", args.rows, |id| (id * 7 % groups, id * 31 % 1_000)).await?;
    load(client, "sides", args.side, |id| (1, id)).await?;
    prepare_small(client).await
}

/// The small table that [`sample`] changes, and the view over it that it reads.
pub async fn prepare_small(client: &Client) -> Result<(), String> {
    create(client, "small").await?;
    load(client, "small", SMALL_ROWS, |id| (id % SMALL_GROUPS, id)).await?;
    let view = "CREATE MATERIALIZED VIEW small_groups AS \
                SELECT k AS g, count(*) AS n, sum(v) AS s FROM small GROUP BY k";
    execute(client, view).await
}

async fn create(client: &Client, table: &str) -> Result<(), String> {
    let sql = format!("CREATE TABLE {table} (id BIGINT PRIMARY KEY, k BIGINT, v BIGINT)");
    execute(client, &sql).await
}

/// Fills a table: `row` gives `k` and `v`.
async fn load(
    client: &Client,
    table: &str,
    rows: u64,
    row: impl Fn(u64) -> (u64, u64),
) -> Result<(), String> {
    for from in (0..rows).step_by(LOAD_ROWS as usize) {
        let lines = (from..(from + LOAD_ROWS).min(rows)).map(|id| {
            let (k, v) = row(id);
            format!("{id}\t{k}\t{v}\n")
        });
        let text: String = lines.collect();
        let copy = format!("COPY {table} FROM STDIN");
        let sink = client.copy_in(&copy).await.map_err(|e| e.to_string())?;
        futures::pin_mut!(sink);
        sink.send(bytes::Bytes::from(text)).await.map_err(|e| e.to_string())?;
        sink.close().await.map_err(|e| e.to_string())?;
    }
    Ok(())
}

fn print(measured: &Measured) -> Result<(), String> {
    let times = |t: Times| format!("{:.2} / {:.2}", t.p50_ms, t.p99_ms);
    let ratios =
        |r: Option<Ratios>| r.map_or(String::new(), |r| format!("{:.2} / {:.2}", r.p50, r.p99));
    println!(
        "{:8} {:>7} {:>6} {:>19} {:>19} {:>13} {:>13}",
        measured.beside,
        measured.samples,
        measured.loads,
        times(measured.update),
        times(measured.read),
        ratios(measured.update_ratio),
        ratios(measured.read_ratio),
    );
    println!("{}", serde_json::to_string(measured).map_err(|e| e.to_string())?);
    Ok(())
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
