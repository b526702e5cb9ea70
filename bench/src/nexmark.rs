//! Nexmark queries end to end: generator, view or blackhole, commits to a durable local store.

use std::path::Path;
use std::time::Duration;

use clap::ValueEnum;
use futures::StreamExt;
use millrace::{Config, Overrides, Standalone};
use millrace_common::{DeltaChunk, Epoch, RelationId, TableId};
use millrace_executor::blackhole::{Digest, digest};
use millrace_executor::options::{Eviction, ExecOptions, StateAccess};
use millrace_meta::JobState;
use millrace_rpc::services::MetaService;
use millrace_storage::ScanOptions;
use tokio_postgres::{Client, NoTls};

use crate::report::NexmarkResult;
use crate::usage::{Mark, peak_rss_mb};

/// The texts of the queries, shared with the planner's tests.
macro_rules! queries {
    ($($name:literal),*) => {
        &[$(($name, include_str!(concat!("../../planner/tests/nexmark/", $name, ".sql")))),*]
    };
}

const QUERIES: &[(&str, &str)] =
    queries!("q0", "q1", "q2", "q3", "q4", "q5", "q7", "q8", "q9", "q18", "q19", "q20");

/// Pages are touched once before anything is measured: their first touch costs kernel time.
const WARM_BYTES: usize = 1 << 30;
const PAGE: usize = 4096;
/// A run that has not ended by then is stuck.
const LIMIT: Duration = Duration::from_secs(3_600);

#[derive(Clone, Copy, Debug, ValueEnum)]
enum SinkKind {
    View,
    Blackhole,
}

/// How operators read their state: the comparison modes of docs/design.md §14.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Access {
    Async,
    Sync,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum CachePolicy {
    Timestamp,
    Lru,
    Clock,
}

#[derive(clap::Args, Clone, Debug)]
#[command(args_override_self = true)]
pub struct Args {
    /// Queries to run, one after another, each in its own process; `all` for every one
    #[arg(long, value_delimiter = ',', default_value = "all")]
    query: Vec<String>,
    /// Events of the whole stream (persons, auctions and bids together)
    #[arg(long, default_value_t = 10_000_000)]
    events: u64,
    #[arg(long, value_enum, default_value = "view")]
    sink: SinkKind,
    /// Runs of each query; each prints its own line
    #[arg(long, default_value_t = 1)]
    runs: u32,
    #[arg(long, default_value_t = 2)]
    parallelism: usize,
    #[arg(long, default_value = "8GiB")]
    memory_limit: String,
    #[arg(long, value_enum, default_value = "async")]
    state_access: Access,
    #[arg(long, value_enum, default_value = "timestamp")]
    eviction: CachePolicy,
    /// Time between commits that nobody waits for
    #[arg(long, default_value = "1s")]
    barrier_interval: String,
    /// Rows of a table that already has its header
    #[arg(long, hide = true)]
    no_header: bool,
    /// Where the store lies; a temporary directory by default
    #[arg(long)]
    dir: Option<std::path::PathBuf>,
}

pub async fn run(args: &Args) -> Result<(), String> {
    // A child's own query is the last one named.
    let from = if args.no_header { args.query.len().saturating_sub(1) } else { 0 };
    let queries = chosen(&args.query[from..])?;
    if let ([(name, sql)], true) = (queries.as_slice(), args.runs <= 1 || args.no_header) {
        warm_memory();
        if !args.no_header {
            NexmarkResult::print_header();
        }
        let result = measure(args, name, sql).await?;
        result.print_row();
        result.print_json();
        return Ok(());
    }
    NexmarkResult::print_header();
    for (name, _) in queries {
        for _ in 0..args.runs.max(1) {
            run_alone(name)?;
        }
    }
    Ok(())
}

/// One run in a process of its own: no run pays for what another left behind. Of an argument given
/// twice the last counts.
fn run_alone(name: &str) -> Result<(), String> {
    let program = std::env::current_exe().map_err(|e| e.to_string())?;
    let status = std::process::Command::new(program)
        .args(std::env::args_os().skip(1))
        .args(["--query", name, "--runs", "1", "--no-header"])
        .status()
        .map_err(|e| format!("cannot start the run of {name}: {e}"))?;
    if status.success() { Ok(()) } else { Err(format!("the run of {name} failed")) }
}

fn chosen(names: &[String]) -> Result<Vec<(&'static str, &'static str)>, String> {
    if names.iter().any(|n| n == "all") {
        return Ok(QUERIES.to_vec());
    }
    names
        .iter()
        .map(|n| {
            let found = QUERIES.iter().find(|(name, _)| name == n);
            found.copied().ok_or_else(|| format!("there is no query {n}; try one of q0 … q20"))
        })
        .collect()
}

fn warm_memory() {
    let mut block = vec![0u8; WARM_BYTES];
    for page in block.chunks_mut(PAGE) {
        page[0] = 1;
    }
    std::hint::black_box(&block);
}

/// A folder for one run, removed after it.
pub fn temporary(inside: Option<&Path>) -> Result<tempfile::TempDir, String> {
    match inside {
        Some(dir) => tempfile::tempdir_in(dir),
        None => tempfile::tempdir(),
    }
    .map_err(|e| format!("cannot make a temporary directory: {e}"))
}

async fn measure(args: &Args, name: &str, sql: &str) -> Result<NexmarkResult, String> {
    let temporary = temporary(args.dir.as_deref())?;
    let memory_limit =
        millrace::config::size("--memory-limit", &args.memory_limit).map_err(|e| e.to_string())?;
    let barrier_interval = millrace::config::duration("--barrier-interval", &args.barrier_interval)
        .map_err(|e| e.to_string())?;
    let config = Config {
        memory_limit,
        barrier_interval,
        parallelism: args.parallelism,
        ..Config::embedded(temporary.path())
    };
    let overrides =
        Overrides { exec: Some(exec_options(args, memory_limit)), ..Overrides::threads_apart() };
    let server = Standalone::start(config, overrides).await.map_err(|e| e.to_string())?;
    let client = connect(server.address.port()).await?;
    let result = drive(args, name, sql, &server, &client).await;
    drop(client);
    server.shutdown().await;
    result
}

fn exec_options(args: &Args, memory_limit: usize) -> ExecOptions {
    ExecOptions {
        cache_bytes: memory_limit / 4,
        state_access: match args.state_access {
            Access::Async => StateAccess::Asynchronous,
            Access::Sync => StateAccess::Synchronous,
        },
        eviction: match args.eviction {
            CachePolicy::Timestamp => Eviction::Timestamp,
            CachePolicy::Lru => Eviction::Lru,
            CachePolicy::Clock => Eviction::Clock,
        },
        ..ExecOptions::default()
    }
}

pub async fn connect(port: u16) -> Result<Client, String> {
    let text = format!("host=127.0.0.1 port={port} user=root dbname=dev");
    let (client, connection) =
        tokio_postgres::connect(&text, NoTls).await.map_err(|e| e.to_string())?;
    tokio::spawn(connection);
    Ok(client)
}

pub async fn execute(client: &Client, sql: &str) -> Result<(), String> {
    client.batch_execute(sql).await.map_err(|e| match e.as_db_error() {
        Some(db) => format!("{} in: {sql}", db.message()),
        None => e.to_string(),
    })
}

fn sources(events: u64, splits: usize) -> [String; 3] {
    let with = |table: &str| {
        format!(
            "WITH (connector = 'nexmark', table = '{table}', event.num = {events}, event.rate = 0, \
             splits = {splits}, seed = 42)"
        )
    };
    [
        format!(
            "CREATE SOURCE bid (auction BIGINT, bidder BIGINT, price BIGINT, channel VARCHAR, url VARCHAR, \
             date_time TIMESTAMP, extra VARCHAR) {}",
            with("bid")
        ),
        format!(
            "CREATE SOURCE auction (id BIGINT, item_name VARCHAR, description VARCHAR, initial_bid BIGINT, \
             reserve BIGINT, date_time TIMESTAMP, expires TIMESTAMP, seller BIGINT, category BIGINT, \
             extra VARCHAR) {}",
            with("auction")
        ),
        format!(
            "CREATE SOURCE person (id BIGINT, name VARCHAR, email_address VARCHAR, credit_card VARCHAR, \
             city VARCHAR, state VARCHAR, date_time TIMESTAMP, extra VARCHAR) {}",
            with("person")
        ),
    ]
}

async fn drive(
    args: &Args,
    name: &str,
    sql: &str,
    server: &Standalone,
    client: &Client,
) -> Result<NexmarkResult, String> {
    for source in sources(args.events, args.parallelism) {
        execute(client, &source).await?;
    }
    let before = server.requests.as_ref().map(|r| r.stats());
    let mark = Mark::now();
    let (sink, with) = match args.sink {
        SinkKind::View => ("view", ""),
        SinkKind::Blackhole => ("blackhole", "WITH (sink = 'blackhole') "),
    };
    execute(client, &format!("CREATE MATERIALIZED VIEW out {with}AS {sql}")).await?;
    let view = server
        .meta
        .catalog()
        .by_name("public", "out")
        .map(|r| RelationId(r.id))
        .ok_or("the view is not in the catalog")?;
    wait_for_end(args, server, view).await?;
    let usage = mark.elapsed();
    let after = server.requests.as_ref().map(|r| r.stats());
    let status = server.meta.job_status(view).ok_or("the job is gone")?;
    let output = match args.sink {
        SinkKind::Blackhole => {
            server.worker.blackhole_result(view).ok_or("the blackhole has no result")?
        }
        SinkKind::View => digest_of_view(server, view).await?,
    };
    let requests = after.unwrap_or_default() - before.unwrap_or_default();
    Ok(NexmarkResult {
        query: name.to_string(),
        sink: sink.to_string(),
        events: args.events,
        wall_s: usage.wall.as_secs_f64(),
        cpu_s: usage.cpu_s(),
        user_s: usage.user.as_secs_f64(),
        system_s: usage.system.as_secs_f64(),
        events_per_s: args.events as f64 / usage.wall.as_secs_f64(),
        events_per_cpu_s: args.events as f64 / usage.cpu_s(),
        peak_rss_mb: peak_rss_mb(),
        store_puts: requests.puts,
        store_gets: requests.gets,
        store_bytes_written: requests.bytes_written,
        barrier_p50_ms: status.counters.barrier_p50.as_secs_f64() * 1_000.0,
        barrier_p99_ms: status.counters.barrier_p99.as_secs_f64() * 1_000.0,
        output_rows: output.rows,
        output_hash: format!("{:016x}", output.hash),
    })
}

/// Until the sources the view reads are fixed at their ends and the view has committed through that.
async fn wait_for_end(args: &Args, server: &Standalone, view: RelationId) -> Result<(), String> {
    let catalog = server.meta.catalog();
    let relation = catalog.relation(view).ok_or("the view is gone")?;
    let give_up = std::time::Instant::now() + LIMIT;
    while std::time::Instant::now() < give_up {
        if let Some(status) = server.meta.job_status(view)
            && let JobState::Failed { reason, .. } = status.state
        {
            return Err(format!("the view failed: {reason}"));
        }
        let fixed = |source: &u32| {
            let offsets = server.meta.source_offsets(RelationId(*source), Epoch::MAX);
            offsets.iter().map(|(_, offset)| offset).sum::<u64>() >= args.events
        };
        let ended = relation.depends_on.iter().all(fixed);
        // The head at this moment is past the record that fixed the sources' ends.
        let head = server.meta.head();
        let caught_up = ended && server.meta.frontier(view).is_some_and(|f| f >= head);
        if caught_up {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    Err("the run did not end within an hour".to_string())
}

/// The same digest a blackhole computes, over the stored rows.
pub async fn digest_of_view(server: &Standalone, view: RelationId) -> Result<Digest, String> {
    let catalog = server.meta.catalog();
    let relation = catalog.relation(view).ok_or("the view is gone")?;
    let epoch = server.meta.frontier(view).ok_or("the view has no frontier")?;
    let job = server.store.job(view).ok_or("the view has no state")?;
    let snapshot = job.snapshot(epoch).map_err(|e| e.to_string())?;
    let mut rows = snapshot.scan(TableId(relation.first_table_id), ScanOptions::default());
    let mut sum = Digest::default();
    while let Some(batch) = rows.next().await {
        let batch = batch.map_err(|e| e.to_string())?;
        let chunk = DeltaChunk::new(batch.values, Some(batch.weights));
        sum = sum.plus(digest(&chunk).map_err(|e| e.to_string())?);
    }
    Ok(sum)
}
