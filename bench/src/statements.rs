//! Keyed statements a second of many sessions on one table whose keys are cold, over a simulated store with the
//! latencies of a kind of store.
//!
//! The table is loaded once, without latencies, and is at least eight times what block caches may hold. Each measurement
//! starts a server of its own on it; its sessions then run statements of one row each, one after the other, with keys in
//! no order, each key once. `insert` adds keys that are not there, which filters tell mostly; `update` reads its row;
//! `upsert` (`ON CONFLICT DO UPDATE`) finds its key and updates it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use futures::future::try_join_all;
use millrace::{Config, Overrides, Standalone};
use millrace_common::RelationId;
use millrace_storage::sim::{Profile, SimStore};
use object_store::ObjectStore;
use object_store::memory::InMemory;
use serde::Serialize;
use tokio_postgres::Client;

use crate::cold::settle;
use crate::nexmark::{connect, execute, temporary};
use crate::usage::Mark;

/// How much larger the table is than the cache, at least.
const STATE_TO_CACHE: u64 = 8;
/// Rows of a statement of the load.
const LOAD_ROWS: u64 = 100_000;
/// Bytes of committed rows in memory beyond which they are written.
const FLUSH_BYTES: usize = 4 << 20;
/// Between two keys: a prime, so that all keys have had their turn before one comes again.
const STRIDE: u64 = 2_654_435_761;

#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    /// How the store behaves: nvme, dfs, s3-express or s3
    #[arg(long, default_value = "s3")]
    profile: String,
    /// Sessions that run statements at the same time
    #[arg(long, value_delimiter = ',', default_values_t = [64, 256])]
    sessions: Vec<u64>,
    /// insert, update or upsert
    #[arg(long, value_delimiter = ',', default_values_t = ["insert".to_owned(), "update".to_owned(), "upsert".to_owned()])]
    kinds: Vec<String>,
    /// Rows of the table
    #[arg(long, default_value_t = 1_000_000)]
    keys: u64,
    /// Statements of each measurement
    #[arg(long, default_value_t = 20_000)]
    statements: u64,
    /// A tenth of the keys and of the statements
    #[arg(long)]
    quick: bool,
}

/// One measurement. Names are those of the JSON line.
#[derive(Clone, Debug, Serialize)]
struct Cost {
    kind: String,
    profile: String,
    sessions: u64,
    statements: u64,
    table_mb: f64,
    cache_mb: f64,
    wall_s: f64,
    cpu_s: f64,
    statements_per_s: f64,
    p50_ms: f64,
    p99_ms: f64,
    gets_per_statement: f64,
    puts_per_statement: f64,
}

fn sql(kind: &str) -> Result<&'static str, String> {
    Ok(match kind {
        "insert" => "INSERT INTO accounts VALUES ($1, 0, 'new')",
        "update" => "UPDATE accounts SET v = v + 1 WHERE id = $1",
        "upsert" => {
            "INSERT INTO accounts VALUES ($1, 0, 'new') ON CONFLICT (id) DO UPDATE SET v = excluded.v"
        }
        other => return Err(format!("no kind \"{other}\"")),
    })
}

pub async fn run(args: &Args) -> Result<(), String> {
    let profile = Profile::by_name(&args.profile)
        .ok_or_else(|| format!("no profile \"{}\"", args.profile))?;
    let (keys, statements) = match args.quick {
        true => (args.keys / 10, args.statements / 10),
        false => (args.keys, args.statements),
    };
    let measurements = (args.kinds.len() * args.sessions.len()) as u64;
    if statements == 0 || keys < measurements * statements {
        return Err(format!("{measurements} measurements need {statements} keys each"));
    }
    let memory: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    let table = load(&memory, keys).await?;
    println!(
        "{:7} {:10} {:>8} {:>10} {:>8} {:>8} {:>8} {:>7} {:>9} {:>9} {:>9} {:>8} {:>8}",
        "kind",
        "profile",
        "sessions",
        "statements",
        "table_mb",
        "cache_mb",
        "wall_s",
        "cpu_s",
        "per_s",
        "p50_ms",
        "p99_ms",
        "gets",
        "puts"
    );
    let mut first = 0;
    for kind in &args.kinds {
        for &sessions in &args.sessions {
            let sim = SimStore::new(Arc::clone(&memory), profile, 1).on_system_clock();
            // Other keys each time: what one has changed may be in memory for the next.
            let work = Work { kind, sessions, keys, range: first..first + statements };
            first += statements;
            print(&measure(args, &work, &sim, table).await?)?;
        }
    }
    Ok(())
}

/// What is measured: statements of a kind on the keys of a range, in no order.
struct Work<'a> {
    kind: &'a str,
    sessions: u64,
    keys: u64,
    range: std::ops::Range<u64>,
}

impl Work<'_> {
    /// The table has even keys.
    fn key(&self, n: u64) -> i64 {
        let key = (u128::from(n) * u128::from(STRIDE) % u128::from(self.keys)) as i64;
        2 * key + i64::from(self.kind == "insert")
    }
}

fn print(cost: &Cost) -> Result<(), String> {
    println!(
        "{:7} {:10} {:>8} {:>10} {:>8.1} {:>8.2} {:>8.2} {:>7.2} {:>9.0} {:>9.1} {:>9.1} {:>8.2} {:>8.3}",
        cost.kind,
        cost.profile,
        cost.sessions,
        cost.statements,
        cost.table_mb,
        cost.cache_mb,
        cost.wall_s,
        cost.cpu_s,
        cost.statements_per_s,
        cost.p50_ms,
        cost.p99_ms,
        cost.gets_per_statement,
        cost.puts_per_statement
    );
    println!("{}", serde_json::to_string(cost).map_err(|e| e.to_string())?);
    Ok(())
}

async fn start(dir: &std::path::Path, store: &SimStore) -> Result<(Standalone, Client), String> {
    let config = Config { memory_limit: 512 << 20, parallelism: 1, ..Config::embedded(dir) };
    let overrides = Overrides {
        object_store: Some(Arc::new(store.clone())),
        flush_bytes: Some(FLUSH_BYTES),
        ..Overrides::default()
    };
    let server = Standalone::start(config, overrides).await.map_err(|e| e.to_string())?;
    let client = connect(server.address.port()).await?;
    Ok((server, client))
}

/// The table with all its rows; its bytes in the store.
async fn load(memory: &Arc<dyn ObjectStore>, keys: u64) -> Result<u64, String> {
    let temporary = temporary(None)?;
    let sim = SimStore::new(Arc::clone(memory), Profile::INSTANT, 1);
    let (server, client) = start(temporary.path(), &sim).await?;
    execute(&client, "CREATE TABLE accounts (id BIGINT PRIMARY KEY, v BIGINT, pad VARCHAR)")
        .await?;
    for from in (0..keys).step_by(LOAD_ROWS as usize) {
        let to = (from + LOAD_ROWS).min(keys) - 1;
        // Text that compresses to half, as hexadecimal digits do.
        let rows = "INSERT INTO accounts SELECT 2 * x, x, md5(x::text) || md5((x + 1)::text)";
        execute(&client, &format!("{rows} FROM generate_series({from}, {to}) AS s(x)")).await?;
    }
    execute(&client, "FLUSH").await?;
    settle(&sim).await?;
    let relation = server.meta.catalog().by_name("public", "accounts").map(|r| RelationId(r.id));
    let relation = relation.ok_or("the table is not in the catalog")?;
    let status = server.meta.job_status(relation).ok_or("the job is gone")?;
    let bytes = status.version.runs.iter().map(|r| r.length).sum();
    drop(client);
    server.shutdown().await;
    match bytes {
        0 => Err("the table is not in the store: more keys".to_owned()),
        bytes => Ok(bytes),
    }
}

async fn measure(args: &Args, work: &Work<'_>, sim: &SimStore, table: u64) -> Result<Cost, String> {
    let temporary = temporary(None)?;
    let (server, client) = start(temporary.path(), sim).await?;
    let cache = (table / STATE_TO_CACHE) as usize;
    // Opens the runs.
    execute(&client, "SELECT v FROM accounts WHERE id = 0").await?;
    settle(sim).await?;
    server.store.cache().set_memory_bytes(cache).map_err(|e| e.to_string())?;
    let port = server.address.port();
    let sessions = try_join_all((0..work.sessions).map(|_| connect(port))).await?;
    sim.reset_stats();
    let mark = Mark::now();
    let next = AtomicU64::new(work.range.start);
    let times = try_join_all(sessions.iter().map(|session| drive(session, work, &next))).await?;
    let (usage, stats) = (mark.elapsed(), sim.stats());
    drop((client, sessions));
    server.shutdown().await;
    let mut times: Vec<f64> = times.into_iter().flatten().collect();
    times.sort_by(f64::total_cmp);
    let at = |share: f64| {
        let last = times.len().saturating_sub(1) as f64;
        times.get((last * share).round() as usize).copied().unwrap_or_default()
    };
    let statements = times.len() as u64;
    let (wall_s, each) = (usage.wall.as_secs_f64(), statements.max(1) as f64);
    Ok(Cost {
        kind: work.kind.to_owned(),
        profile: args.profile.clone(),
        sessions: work.sessions,
        statements,
        table_mb: table as f64 / 1e6,
        cache_mb: cache as f64 / 1e6,
        wall_s,
        cpu_s: usage.cpu_s(),
        statements_per_s: statements as f64 / wall_s.max(1e-9),
        p50_ms: at(0.5),
        p99_ms: at(0.99),
        gets_per_statement: stats.gets as f64 / each,
        puts_per_statement: stats.puts as f64 / each,
    })
}

fn told(error: &tokio_postgres::Error) -> String {
    error.as_db_error().map_or_else(|| error.to_string(), |db| db.to_string())
}

/// Statements of one session until all are taken; the milliseconds of each.
async fn drive(client: &Client, work: &Work<'_>, next: &AtomicU64) -> Result<Vec<f64>, String> {
    let statement = client.prepare(sql(work.kind)?).await.map_err(|e| e.to_string())?;
    let mut times = Vec::new();
    loop {
        let n = next.fetch_add(1, Ordering::Relaxed);
        if n >= work.range.end {
            return Ok(times);
        }
        let begun = Instant::now();
        let changed = client.execute(&statement, &[&work.key(n)]).await;
        match changed.map_err(|e| told(&e))? {
            1 => times.push(begun.elapsed().as_secs_f64() * 1_000.0),
            other => return Err(format!("{other} rows for key {}", work.key(n))),
        }
    }
}
