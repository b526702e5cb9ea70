//! What a long life of small jobs leaves behind: tiny views over tables that change at the full rate of commits.
//!
//! Everything that is measured must be as large at the end as at half, but for what time bounds rather than number:
//! versions of rows stay for `snapshot_retention`, objects for `object_retention`, and log records, which are
//! counted apart, for `log_retention`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::TryStreamExt;
use millrace::{Config, Overrides, Standalone};
use millrace_storage::sim::{Profile, SimStore};
use object_store::ObjectStore;
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use serde::Serialize;
use tokio_postgres::Client;

use crate::allocator;
use crate::nexmark::{connect, execute, temporary};
use crate::usage::rss_mb;

/// Rows of a table; every writer has one of its own.
const ROWS: usize = 64;
/// Updates of a writer between two looks at how many commits there are.
const UPDATES: usize = 32;
/// Objects go some time after the retention; in retentions.
const SETTLED_AFTER: u32 = 4;

#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    /// Commits of all jobs together
    #[arg(long, default_value_t = 1_000_000)]
    commits: u64,
    /// Views
    #[arg(long, default_value_t = 20)]
    views: usize,
    /// Tables that the views are spread over
    #[arg(long, default_value_t = 4)]
    tables: usize,
    /// Sessions that update rows
    #[arg(long, default_value_t = 8)]
    writers: usize,
    /// The store: a local directory, or one that answers as S3 does
    #[arg(long, default_value = "local")]
    profile: Store,
    /// How long data may stay uncommitted; less means more commits
    #[arg(long, default_value = "1ms")]
    barrier_interval: String,
    #[arg(long, default_value = "512MB")]
    memory_limit: String,
    /// How long versions of rows and objects without use stay; the server's defaults are longer than a short run
    #[arg(long)]
    retention: Option<String>,
    /// Where the store lies; a temporary directory by default
    #[arg(long)]
    dir: Option<std::path::PathBuf>,
}

#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
enum Store {
    Local,
    S3,
}

/// What is there after so many commits. Names are those of the JSON line.
#[derive(Clone, Debug, Serialize)]
struct Left {
    commits: u64,
    seconds: f64,
    commits_per_s: f64,
    /// Of all jobs.
    slices: usize,
    runs: usize,
    meta_snapshot_bytes: usize,
    /// Segments, and how much of them some version names.
    objects: usize,
    object_bytes: u64,
    live_bytes: u64,
    log_records: usize,
    log_bytes: u64,
    snapshots: usize,
    snapshot_bytes: u64,
    rss_mb: f64,
}

#[derive(Clone, Debug, Serialize)]
struct Life {
    views: usize,
    half: Left,
    end: Left,
    /// Some time after the last change, where a retention was given.
    settled: Option<Left>,
    restart_ms: f64,
}

pub async fn run(args: &Args) -> Result<(), String> {
    let temporary = temporary(args.dir.as_deref())?;
    let size = |text| millrace::config::size("--memory-limit", text).map_err(|e| e.to_string());
    let config = Config {
        memory_limit: size(&args.memory_limit)?,
        barrier_interval: millrace::config::duration("--barrier-interval", &args.barrier_interval)
            .map_err(|e| e.to_string())?,
        ..Config::embedded(temporary.path())
    };
    allocator::tune(config.memory_limit);
    let bucket = temporary.path().join("bucket");
    std::fs::create_dir_all(&bucket).map_err(|e| e.to_string())?;
    let bucket = LocalFileSystem::new_with_prefix(&bucket).map_err(|e| e.to_string())?;
    let bucket: Arc<dyn ObjectStore> = Arc::new(bucket);
    let overrides = || Overrides {
        object_store: (args.profile == Store::S3)
            .then(|| Arc::new(SimStore::new(Arc::clone(&bucket), Profile::S3, 1)) as _),
        ..Overrides::threads_apart()
    };
    let server = Standalone::start(config.clone(), overrides()).await.map_err(|e| e.to_string())?;
    let client = connect(server.address.port()).await?;
    create(args, &client).await?;
    let half = drive(args, &server, args.commits / 2).await?;
    print(&half);
    let end = drive(args, &server, args.commits).await?;
    print(&end);
    let settled = match &args.retention {
        Some(retention) => Some(settle(&server, retention, end.commits).await?),
        None => None,
    };
    drop(client);
    server.shutdown().await;
    let restart_ms = restart(args, config, overrides()).await?;
    println!("restart until every view is read: {restart_ms:.0} ms");
    let life = Life { views: args.views, half, end, settled, restart_ms };
    println!("{}", serde_json::to_string(&life).map_err(|e| e.to_string())?);
    Ok(())
}

async fn create(args: &Args, client: &Client) -> Result<(), String> {
    if let Some(retention) = &args.retention {
        for setting in ["snapshot_retention", "object_retention"] {
            execute(client, &format!("ALTER SYSTEM SET {setting} = '{retention}'")).await?;
        }
    }
    for t in 0..args.tables {
        let rows = format!("SELECT x, x % 8, 0 FROM generate_series(0, {}) AS s(x)", ROWS - 1);
        execute(client, &format!("CREATE TABLE t{t} (k INT PRIMARY KEY, g INT, v BIGINT)")).await?;
        execute(client, &format!("INSERT INTO t{t} {rows}")).await?;
    }
    for v in 0..args.views {
        let table = v % args.tables;
        let sql = format!(
            "CREATE MATERIALIZED VIEW v{v} AS SELECT g, count(*) AS n, sum(v) AS s, max(v) AS m FROM t{table} GROUP BY g"
        );
        execute(client, &sql).await?;
    }
    Ok(())
}

fn commits_of(server: &Standalone) -> u64 {
    server.meta.job_statuses().iter().map(|j| j.counters.commits).sum()
}

/// Changes rows until the jobs have made so many commits, and looks at what there is.
async fn drive(args: &Args, server: &Standalone, commits: u64) -> Result<Left, String> {
    let (began, before) = (Instant::now(), commits_of(server));
    let writers = (0..args.writers).map(|writer| write(args, server, writer, commits));
    futures::future::try_join_all(writers).await?;
    let (seconds, done) = (began.elapsed().as_secs_f64(), commits_of(server));
    let rss_mb = rss_mb();
    let left = look(server).await?;
    let commits_per_s = (done - before) as f64 / seconds.max(1e-9);
    Ok(Left { commits: done, seconds, commits_per_s, rss_mb, ..left })
}

async fn write(
    args: &Args,
    server: &Standalone,
    writer: usize,
    commits: u64,
) -> Result<(), String> {
    let client = connect(server.address.port()).await?;
    let (table, row) = (writer % args.tables, writer % ROWS);
    let sql = format!("UPDATE t{table} SET v = v + 1 WHERE k = {row}");
    let statement = client.prepare(&sql).await.map_err(|e| e.to_string())?;
    while commits_of(server) < commits {
        for _ in 0..UPDATES {
            client.execute(&statement, &[]).await.map_err(|e| e.to_string())?;
        }
    }
    Ok(())
}

/// What is left when nothing has changed for some times the retention.
async fn settle(server: &Standalone, retention: &str, commits: u64) -> Result<Left, String> {
    let began = Instant::now();
    let retention =
        millrace::config::duration("--retention", retention).map_err(|e| e.to_string())?;
    tokio::time::sleep(retention * SETTLED_AFTER).await;
    let (seconds, rss_mb) = (began.elapsed().as_secs_f64(), rss_mb());
    let left = Left { commits, seconds, rss_mb, ..look(server).await? };
    print(&left);
    Ok(left)
}

async fn look(server: &Standalone) -> Result<Left, String> {
    let store = server.store.object_store();
    let (objects, object_bytes) = listed(store, "data").await?;
    let (log_records, log_bytes) = listed(store, "meta/log").await?;
    let (snapshots, snapshot_bytes) = listed(store, "meta/snapshot").await?;
    let jobs = server.meta.job_statuses();
    let runs = jobs.iter().flat_map(|j| &j.version.runs);
    let slices = jobs.iter().flat_map(|j| &j.version.tail);
    let in_objects = slices.clone().filter(|s| !s.object.is_empty()).map(|s| s.length);
    Ok(Left {
        commits: 0,
        seconds: 0.0,
        commits_per_s: 0.0,
        slices: slices.count(),
        live_bytes: runs.clone().map(|r| r.length).chain(in_objects).sum(),
        runs: runs.count(),
        meta_snapshot_bytes: server.meta.snapshot_bytes(),
        objects,
        object_bytes,
        log_records,
        log_bytes,
        snapshots,
        snapshot_bytes,
        rss_mb: 0.0,
    })
}

/// Number and bytes of the objects below a prefix.
async fn listed(store: &Arc<dyn ObjectStore>, prefix: &str) -> Result<(usize, u64), String> {
    let count = |(n, bytes): (usize, u64), object: object_store::ObjectMeta| {
        futures::future::ready(Ok((n + 1, bytes + object.size)))
    };
    let listed = store.list(Some(&Path::from(prefix)));
    listed.try_fold((0, 0), count).await.map_err(|e| e.to_string())
}

/// Milliseconds from the start of another server until every view has been read, and is right.
async fn restart(args: &Args, config: Config, overrides: Overrides) -> Result<f64, String> {
    let began = Instant::now();
    let server = Standalone::start(config, overrides).await.map_err(|e| e.to_string())?;
    let client = connect(server.address.port()).await?;
    let mut took = Duration::ZERO;
    for v in 0..args.views {
        let of_view = one(&client, &format!("SELECT sum(s)::text FROM v{v}")).await?;
        took = began.elapsed();
        let table = v % args.tables;
        let of_table = one(&client, &format!("SELECT sum(v)::text FROM t{table}")).await?;
        if of_view != of_table {
            return Err(format!("v{v} has {of_view}, its table {of_table}"));
        }
    }
    drop(client);
    server.shutdown().await;
    Ok(took.as_secs_f64() * 1_000.0)
}

async fn one(client: &Client, sql: &str) -> Result<String, String> {
    let row = client.query_one(sql, &[]).await.map_err(|e| e.to_string())?;
    row.try_get(0).map_err(|e| e.to_string())
}

fn print(left: &Left) {
    println!(
        "{:>9} commits: {:.0}/s, meta snapshot {:.2} MB, {} slices, {} runs, {} objects with {:.1} MB of which {:.1} MB \
         live, log {} records with {:.1} MB, {} snapshots with {:.1} MB, {:.0} MB resident",
        left.commits,
        left.commits_per_s,
        left.meta_snapshot_bytes as f64 / 1e6,
        left.slices,
        left.runs,
        left.objects,
        left.object_bytes as f64 / 1e6,
        left.live_bytes as f64 / 1e6,
        left.log_records,
        left.log_bytes as f64 / 1e6,
        left.snapshots,
        left.snapshot_bytes as f64 / 1e6,
        left.rss_mb
    );
}
