//! What rows cost whose state is in no cache: an aggregate and a join whose state is at least eight times what block
//! and state caches may hold, over a simulated store with the latencies of a kind of store.
//!
//! The state is loaded once, without latencies. Each mode of state access then starts a server of its own on it and
//! inserts rows with keys in no order; time is taken until the view has all of them. Both modes run in one process, so
//! their rates can be compared with each other. In the mode `sync` a row waits for its state before the next
//! is looked at, as in an engine that works a record at a time; `async` is how the server runs. `rounds` is the longest
//! chain of dependent requests, commits included.

use std::sync::Arc;
use std::time::{Duration, Instant};

use millrace::{Config, Overrides, Standalone};
use millrace_common::RelationId;
use millrace_executor::options::{ExecOptions, StateAccess};
use millrace_storage::object::GET_DOLLARS_PER_MILLION;
use millrace_storage::sim::{Profile, SimStats, SimStore};
use object_store::ObjectStore;
use object_store::memory::InMemory;
use serde::Serialize;
use tokio_postgres::Client;

use crate::nexmark::{connect, execute, temporary};
use crate::usage::Mark;
use crate::warm::{self, Cold};

/// How much larger the state is than the caches, at least.
const STATE_TO_CACHE: u64 = 8;
/// Rows of a statement of the load, and of one that is measured.
const LOAD_ROWS: u64 = 100_000;
const STATEMENT_ROWS: u64 = 4_096;
/// How many times fewer rows the mode that waits for each gets.
const SYNC_SHARE: u64 = 32;
/// Bytes of committed rows in memory beyond which they are written: little, so that the state is in the store.
const FLUSH_BYTES: usize = 512 << 10;
/// How long the server may take to come to rest.
const SETTLE_LIMIT: Duration = Duration::from_secs(120);

#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    /// How the store behaves: nvme, dfs, s3-express or s3
    #[arg(long, default_value = "s3")]
    profile: String,
    /// Keys of each view's state
    #[arg(long, default_value_t = 1_500_000)]
    keys: u64,
    /// Rows inserted under each view and mode
    #[arg(long, default_value_t = 65_536)]
    rows: u64,
    /// A twentieth of the keys and an eighth of the rows
    #[arg(long)]
    quick: bool,
    /// Instead of that, what so many views whose state is in memory notice of the aggregate
    #[arg(long, default_value_t = 0)]
    warm: usize,
    /// Seconds that warm views are measured alone, and beside the aggregate
    #[arg(long, default_value_t = 20)]
    seconds: u64,
}

/// One view in one mode. Names are those of the JSON line.
#[derive(Clone, Debug, Serialize)]
struct Cost {
    view: &'static str,
    state_access: &'static str,
    profile: String,
    rows: u64,
    state_mb: f64,
    cache_mb: f64,
    wall_s: f64,
    cpu_s: f64,
    rows_per_s: f64,
    rounds: u64,
    gets: u64,
    mb_read: f64,
    dollars_per_million_rows: f64,
}

/// A view, what it reads, and how one row of it is asked for.
struct Subject {
    view: &'static str,
    insert: &'static str,
    read: &'static str,
}

const SUBJECTS: [Subject; 2] = [
    Subject {
        view: "totals",
        insert: "INSERT INTO facts SELECT {key}, x, x FROM generate_series({from}, {to}) AS s(x)",
        read: "SELECT n FROM totals WHERE k = 0",
    },
    Subject {
        view: "matched",
        insert: "INSERT INTO orders SELECT {key}, x FROM generate_series({from}, {to}) AS s(x)",
        read: "SELECT n FROM matched",
    },
];

const CREATE: &str = "CREATE TABLE facts (k BIGINT, v BIGINT, w BIGINT);
    CREATE TABLE items (k BIGINT, a VARCHAR, b VARCHAR);
    CREATE TABLE orders (k BIGINT, v BIGINT);
    CREATE MATERIALIZED VIEW totals AS
        SELECT k, count(*) AS n, sum(v) AS v, sum(w) AS w, sum(v * w) AS p FROM facts GROUP BY k;
    CREATE MATERIALIZED VIEW matched AS
        SELECT count(*) AS n, sum(length(i.a || i.b)) AS l FROM orders o JOIN items i ON o.k = i.k";

pub async fn run(args: &Args) -> Result<(), String> {
    let profile = Profile::by_name(&args.profile)
        .ok_or_else(|| format!("no profile \"{}\"", args.profile))?;
    let (keys, rows) = match args.quick {
        true => (args.keys / 20, args.rows / 8),
        false => (args.keys, args.rows),
    };
    if keys == 0 || rows == 0 {
        return Err("there must be keys and rows".to_owned());
    }
    let memory: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    let state = load(&memory, keys).await?;
    if args.warm > 0 {
        let bytes = state.first().copied().unwrap_or_default();
        let sim = SimStore::new(Arc::clone(&memory), profile, 1).on_system_clock();
        return beside_warm(args, &sim, bytes, keys).await;
    }
    println!(
        "{:8} {:5} {:10} {:>8} {:>8} {:>8} {:>8} {:>7} {:>9} {:>7} {:>8} {:>8} {:>9}",
        "view",
        "mode",
        "profile",
        "rows",
        "state_mb",
        "cache_mb",
        "wall_s",
        "cpu_s",
        "rows/s",
        "rounds",
        "gets",
        "mb_read",
        "$/million"
    );
    for (subject, bytes) in SUBJECTS.iter().zip(state) {
        if bytes == 0 {
            return Err(format!("the state of {} is not in the store: more keys", subject.view));
        }
        // Other keys in each mode: what one has changed may still be in memory for the next.
        let modes = [
            (StateAccess::Asynchronous, 0..rows),
            (StateAccess::Synchronous, rows..rows + rows.div_ceil(SYNC_SHARE)),
        ];
        for (access, range) in modes {
            let sim = SimStore::new(Arc::clone(&memory), profile, 1).on_system_clock();
            let cost = measure(args, subject, access, &sim, bytes, (keys, range)).await?;
            print(&cost)?;
        }
    }
    Ok(())
}

/// The aggregate with cold keys beside views whose state is in memory.
async fn beside_warm(args: &Args, sim: &SimStore, state: u64, keys: u64) -> Result<(), String> {
    let temporary = temporary(None)?;
    let cache = (state / STATE_TO_CACHE) as usize;
    let exec = ExecOptions { cache_bytes: cache / 2, ..ExecOptions::default() };
    let (server, client) = start(temporary.path(), sim, Some(exec)).await?;
    let subject = &SUBJECTS[0];
    execute(&client, subject.read).await?;
    settle(sim).await?;
    server.store.cache().set_memory_bytes(cache / 2).map_err(|e| e.to_string())?;
    let cold = Cold { keys, insert: subject.insert };
    let length = Duration::from_secs(args.seconds);
    let port = server.address.port();
    let outcome = warm::measure(port, &args.profile, args.warm, length, &cold).await;
    drop(client);
    server.shutdown().await;
    outcome
}

fn print(cost: &Cost) -> Result<(), String> {
    println!(
        "{:8} {:5} {:10} {:>8} {:>8.1} {:>8.2} {:>8.2} {:>7.2} {:>9.0} {:>7} {:>8} {:>8.1} {:>9.3}",
        cost.view,
        cost.state_access,
        cost.profile,
        cost.rows,
        cost.state_mb,
        cost.cache_mb,
        cost.wall_s,
        cost.cpu_s,
        cost.rows_per_s,
        cost.rounds,
        cost.gets,
        cost.mb_read,
        cost.dollars_per_million_rows
    );
    println!("{}", serde_json::to_string(cost).map_err(|e| e.to_string())?);
    Ok(())
}

async fn start(
    dir: &std::path::Path,
    store: &SimStore,
    exec: Option<ExecOptions>,
) -> Result<(Standalone, Client), String> {
    let config = Config { memory_limit: 256 << 20, parallelism: 1, ..Config::embedded(dir) };
    let overrides = Overrides {
        object_store: Some(Arc::new(store.clone())),
        exec,
        flush_bytes: Some(FLUSH_BYTES),
        ..Overrides::threads_apart()
    };
    let server = Standalone::start(config, overrides).await.map_err(|e| e.to_string())?;
    let client = connect(server.address.port()).await?;
    // Where rows wait for each other, a statement's take minutes; and a busy machine loads slowly.
    execute(&client, "SET read_wait_timeout = '1h'").await?;
    Ok((server, client))
}

/// Tables and views with all keys. Bytes in the store of each view's state.
async fn load(memory: &Arc<dyn ObjectStore>, keys: u64) -> Result<Vec<u64>, String> {
    let temporary = temporary(None)?;
    let sim = SimStore::new(Arc::clone(memory), Profile::INSTANT, 1);
    let (server, client) = start(temporary.path(), &sim, None).await?;
    execute(&client, CREATE).await?;
    for from in (0..keys).step_by(LOAD_ROWS as usize) {
        let to = (from + LOAD_ROWS).min(keys) - 1;
        let rows = format!("FROM generate_series({from}, {to}) AS s(x)");
        let facts = "INSERT INTO facts SELECT x, x::bigint * 2654435761 % 1000000007, x::bigint * 48271 % 2147483647";
        execute(&client, &format!("{facts} {rows}")).await?;
        // Text that compresses to half, as hexadecimal digits do.
        let items = "INSERT INTO items SELECT x, md5(x::text), md5((x + 1)::text)";
        execute(&client, &format!("{items} {rows}")).await?;
    }
    for subject in &SUBJECTS {
        execute(&client, subject.read).await?;
    }
    settle(&sim).await?;
    let bytes = SUBJECTS.iter().map(|subject| state_bytes(&server, subject.view)).collect();
    drop(client);
    server.shutdown().await;
    bytes
}

/// Bytes of a view's runs in the store.
pub fn state_bytes(server: &Standalone, view: &str) -> Result<u64, String> {
    let relation = server.meta.catalog().by_name("public", view).map(|r| RelationId(r.id));
    let relation = relation.ok_or("the view is not in the catalog")?;
    let status = server.meta.job_status(relation).ok_or("the job is gone")?;
    Ok(status.version.runs.iter().map(|r| r.length).sum())
}

async fn measure(
    args: &Args,
    subject: &Subject,
    access: StateAccess,
    sim: &SimStore,
    state: u64,
    (keys, range): (u64, std::ops::Range<u64>),
) -> Result<Cost, String> {
    let rows = range.end - range.start;
    let temporary = temporary(None)?;
    // One half for decoded blocks, the other for entries of keys. A join has one cache, an aggregate another.
    let cache = (state / STATE_TO_CACHE) as usize;
    let ExecOptions { chunk_rows, .. } = ExecOptions::default();
    let exec = ExecOptions {
        cache_bytes: cache / 2,
        state_access: access,
        chunk_rows: if access == StateAccess::Synchronous { 1 } else { chunk_rows },
        ..ExecOptions::default()
    };
    let (server, client) = start(temporary.path(), sim, Some(exec)).await?;
    execute(&client, subject.read).await?;
    settle(sim).await?;
    server.store.cache().set_memory_bytes(cache / 2).map_err(|e| e.to_string())?;
    sim.reset_stats();
    let mark = Mark::now();
    for from in range.clone().step_by(STATEMENT_ROWS as usize) {
        let to = (from + STATEMENT_ROWS).min(range.end) - 1;
        // Keys in no order.
        let insert = subject.insert.replace("{key}", &format!("x::bigint * 2654435761 % {keys}"));
        let insert = insert.replace("{from}", &from.to_string()).replace("{to}", &to.to_string());
        execute(&client, &insert).await?;
    }
    execute(&client, subject.read).await?;
    let (usage, stats) = (mark.elapsed(), sim.stats());
    drop(client);
    server.shutdown().await;
    let wall_s = usage.wall.as_secs_f64();
    let SimStats { rounds, gets, bytes_read, .. } = stats;
    Ok(Cost {
        view: subject.view,
        state_access: match access {
            StateAccess::Asynchronous => "async",
            StateAccess::Synchronous => "sync",
        },
        profile: args.profile.clone(),
        rows,
        state_mb: state as f64 / 1e6,
        cache_mb: cache as f64 / 1e6,
        wall_s,
        cpu_s: usage.cpu_s(),
        rows_per_s: rows as f64 / wall_s.max(1e-9),
        rounds,
        gets,
        mb_read: bytes_read as f64 / 1e6,
        dollars_per_million_rows: gets as f64 * GET_DOLLARS_PER_MILLION / rows as f64,
    })
}

/// Until the store has had no request for longer than the garbage collector's period.
pub async fn settle(sim: &SimStore) -> Result<(), String> {
    settle_for(sim, Duration::from_secs(12)).await
}

/// Until the store has had no request for so long.
pub async fn settle_for(sim: &SimStore, quiet: Duration) -> Result<(), String> {
    let begun = Instant::now();
    let (mut last, mut since) = (sim.stats().requests(), Instant::now());
    while since.elapsed() < quiet {
        if begun.elapsed() > SETTLE_LIMIT {
            return Err("the server does not come to rest".to_owned());
        }
        tokio::time::sleep(Duration::from_millis(250)).await;
        let now = sim.stats().requests();
        if now != last {
            (last, since) = (now, Instant::now());
        }
    }
    Ok(())
}
