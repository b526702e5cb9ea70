//! What a commit, a CREATE and a DROP cost, and what an idle server costs, while there are many jobs.
//!
//! A commit must cost what it changes (docs/design.md §1): one row goes into a table that one view reads, while other
//! views stand beside it on other tables (`apart`), or while all views read that table (`together`). With `apart` the
//! times must not grow with the number of views. `insert` ends when the INSERT is acknowledged, `read` when a strict
//! read of the view has the row.

use std::time::{Duration, Instant};

use millrace::{Config, Overrides, Standalone};
use serde::Serialize;
use tokio_postgres::Client;

use crate::nexmark::{connect, execute, temporary};
use crate::usage::{Mark, rss_mb};

/// Views on each of the other tables.
const VIEWS_PER_TABLE: u32 = 10;
/// Statements before anything is measured.
const WARM_UP: u64 = 5;
/// How long the server may take to come to rest.
const SETTLE_LIMIT: Duration = Duration::from_secs(120);

#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    /// Numbers of views
    #[arg(long, value_delimiter = ',', default_values_t = [5, 100, 1_000])]
    views: Vec<u32>,
    /// One-row commits measured for each number
    #[arg(long, default_value_t = 200)]
    commits: u64,
    /// Views created and dropped for each number
    #[arg(long, default_value_t = 20)]
    creations: u64,
    /// Seconds that an idle server is watched
    #[arg(long, default_value_t = 20)]
    idle_s: u64,
    /// `apart`: the other views read other tables. `together`: all views read one table
    #[arg(long, value_delimiter = ',', default_values_t = ["apart".to_owned(), "together".to_owned()])]
    variants: Vec<String>,
}

/// In milliseconds.
#[derive(Clone, Copy, Debug, Serialize)]
struct Times {
    p50_ms: f64,
    p99_ms: f64,
}

impl Times {
    fn of(mut times: Vec<f64>) -> Times {
        times.sort_by(f64::total_cmp);
        let at = |share: f64| {
            let last = times.len().saturating_sub(1) as f64;
            times.get((last * share).round() as usize).copied().unwrap_or_default()
        };
        Times { p50_ms: at(0.5), p99_ms: at(0.99) }
    }
}

#[derive(Clone, Debug, Serialize)]
struct Cost {
    variant: &'static str,
    views: u32,
    insert: Times,
    read: Times,
    create: Times,
    drop: Times,
    rss_mb: f64,
    /// Processor time of an idle server, in per cent of one core.
    idle_cpu_percent: f64,
    idle_requests: u64,
}

pub async fn run(args: &Args) -> Result<(), String> {
    println!(
        "{:8} {:>6} {:>15} {:>15} {:>15} {:>15} {:>7} {:>7} {:>8}",
        "",
        "views",
        "insert p50/p99",
        "read p50/p99",
        "create p50/p99",
        "drop p50/p99",
        "rss_mb",
        "idle_%",
        "requests"
    );
    for variant in &args.variants {
        let together = match variant.as_str() {
            "apart" => false,
            "together" => true,
            other => return Err(format!("no variant \"{other}\"")),
        };
        for &views in &args.views {
            let cost = measure(args, views, together).await?;
            let pair = |t: Times| format!("{:.1}/{:.1}", t.p50_ms, t.p99_ms);
            println!(
                "{:8} {:>6} {:>15} {:>15} {:>15} {:>15} {:>7.0} {:>7.2} {:>8}",
                cost.variant,
                cost.views,
                pair(cost.insert),
                pair(cost.read),
                pair(cost.create),
                pair(cost.drop),
                cost.rss_mb,
                cost.idle_cpu_percent,
                cost.idle_requests
            );
            println!("{}", serde_json::to_string(&cost).map_err(|e| e.to_string())?);
        }
    }
    Ok(())
}

async fn measure(args: &Args, views: u32, together: bool) -> Result<Cost, String> {
    let temporary = temporary(None)?;
    let config = Config { memory_limit: 2 << 30, ..Config::embedded(temporary.path()) };
    let server =
        Standalone::start(config, Overrides::threads_apart()).await.map_err(|e| e.to_string())?;
    let client = connect(server.address.port()).await?;
    let cost = drive(args, views, together, &server, &client).await;
    drop(client);
    server.shutdown().await;
    cost
}

async fn drive(
    args: &Args,
    views: u32,
    together: bool,
    server: &Standalone,
    client: &Client,
) -> Result<Cost, String> {
    build(client, views, together).await?;
    settle(server).await?;
    let (insert, read) = commits(args, client).await?;
    let (create, drop) = creations(args, client).await?;
    settle(server).await?;
    let before = requests(server);
    let mark = Mark::now();
    tokio::time::sleep(Duration::from_secs(args.idle_s)).await;
    let used = mark.elapsed();
    Ok(Cost {
        variant: if together { "together" } else { "apart" },
        views,
        insert,
        read,
        create,
        drop,
        rss_mb: rss_mb(),
        idle_cpu_percent: used.cpu_s() / used.wall.as_secs_f64().max(1e-9) * 100.0,
        idle_requests: requests(server) - before,
    })
}

/// The table `hot` with its view `v0`, and the other views.
async fn build(client: &Client, views: u32, together: bool) -> Result<(), String> {
    execute(client, "CREATE TABLE hot (id BIGINT PRIMARY KEY, grp BIGINT, x BIGINT)").await?;
    execute(client, &view("v0", "hot")).await?;
    for v in 1..views {
        let other = format!("t{}", v / VIEWS_PER_TABLE);
        let table = if together { "hot" } else { &other };
        if !together && (v == 1 || v % VIEWS_PER_TABLE == 0) {
            let columns = "(id BIGINT PRIMARY KEY, grp BIGINT, x BIGINT)";
            execute(client, &format!("CREATE TABLE {table} {columns}")).await?;
        }
        execute(client, &view(&format!("v{v}"), table)).await?;
    }
    Ok(())
}

fn view(name: &str, table: &str) -> String {
    format!(
        "CREATE MATERIALIZED VIEW {name} AS SELECT grp, count(*) AS n, sum(x) AS total FROM {table} GROUP BY grp"
    )
}

/// Times until an INSERT is acknowledged, and from then until a strict read of the view has answered with its row.
async fn commits(args: &Args, client: &Client) -> Result<(Times, Times), String> {
    let (mut inserts, mut reads) = (Vec::new(), Vec::new());
    for n in 0..args.commits + WARM_UP {
        let begun = Instant::now();
        execute(client, &format!("INSERT INTO hot VALUES ({n}, {n}, 1)")).await?;
        let inserted = begun.elapsed();
        let sql = format!("SELECT total FROM v0 WHERE grp = {n}");
        let rows = client.simple_query(&sql).await.map_err(|e| e.to_string())?;
        let found = rows.iter().any(|m| matches!(m, tokio_postgres::SimpleQueryMessage::Row(_)));
        if !found {
            return Err(format!("row {n} was not there for a strict read"));
        }
        if n >= WARM_UP {
            inserts.push(ms(inserted));
            reads.push(ms(begun.elapsed()));
        }
    }
    Ok((Times::of(inserts), Times::of(reads)))
}

async fn creations(args: &Args, client: &Client) -> Result<(Times, Times), String> {
    let (mut creates, mut drops) = (Vec::new(), Vec::new());
    for n in 0..args.creations + WARM_UP {
        let begun = Instant::now();
        execute(client, &view("one_more", "hot")).await?;
        let created = begun.elapsed();
        let begun = Instant::now();
        execute(client, "DROP MATERIALIZED VIEW one_more").await?;
        if n >= WARM_UP {
            creates.push(ms(created));
            drops.push(ms(begun.elapsed()));
        }
    }
    Ok((Times::of(creates), Times::of(drops)))
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1_000.0
}

fn requests(server: &Standalone) -> u64 {
    server.requests.as_ref().map(|r| r.stats().requests()).unwrap_or_default()
}

/// Until the store has had no request for longer than the garbage collector's period.
async fn settle(server: &Standalone) -> Result<(), String> {
    const QUIET: Duration = Duration::from_secs(12);
    let begun = Instant::now();
    let (mut last, mut since) = (requests(server), Instant::now());
    while since.elapsed() < QUIET {
        if begun.elapsed() > SETTLE_LIMIT {
            return Err("the server does not come to rest".to_owned());
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
        let now = requests(server);
        if now != last {
            (last, since) = (now, Instant::now());
        }
    }
    Ok(())
}
