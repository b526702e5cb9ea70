//! Whether a process stays within its memory limit while whole tables change under many views that hold much until the
//! barrier: the most that is resident, and how long it takes until every view has the change.

use std::time::Instant;

use millrace::{Config, Overrides, Standalone};
use serde::Serialize;

use crate::allocator;
use crate::nexmark::{connect, execute, temporary};
use crate::usage::{Mark, peak_rss_mb};

/// Views by name, as queries of the table `{t}`. Each kind holds rows in its own way.
const VIEWS: [(&str, &str); 6] = [
    ("extremes", "SELECT g, min(v) AS lo, max(v) AS hi FROM {t} GROUP BY g"),
    ("distincts", "SELECT g, count(DISTINCT v) AS n FROM {t} GROUP BY g"),
    ("lists", "SELECT g, string_agg(s, ',' ORDER BY v) AS l FROM {t} GROUP BY g"),
    (
        "firsts",
        "SELECT id, v, r FROM (SELECT id, v, row_number() OVER (PARTITION BY g ORDER BY v DESC, id) AS r FROM {t}) x \
         WHERE r <= 2",
    ),
    (
        "moving",
        "SELECT id, sum(v) OVER (PARTITION BY g ORDER BY id ROWS 3 PRECEDING) AS w FROM {t}",
    ),
    ("once", "SELECT DISTINCT g, v FROM {t}"),
];

#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    #[arg(long, default_value = "1GB")]
    memory_limit: String,
    /// Tables, all of which change at once
    #[arg(long, default_value_t = 10)]
    tables: usize,
    /// Views over each table; there are six kinds
    #[arg(long, default_value_t = 30)]
    views: usize,
    /// Rows of each table
    #[arg(long, default_value_t = 20_000)]
    rows: usize,
    /// Where the store lies; a temporary directory by default
    #[arg(long)]
    dir: Option<std::path::PathBuf>,
}

/// Names are those of the JSON line.
#[derive(Clone, Debug, Serialize)]
struct Memory {
    views: usize,
    rows: usize,
    limit_mb: f64,
    /// Seconds until every view has all rows, and all changed rows.
    insert_s: f64,
    update_s: f64,
    cpu_s: f64,
    peak_rss_mb: f64,
    /// Of the limit; the goal is at most 1.3.
    ratio: f64,
}

pub async fn run(args: &Args) -> Result<(), String> {
    let temporary = temporary(args.dir.as_deref())?;
    let memory_limit =
        millrace::config::size("--memory-limit", &args.memory_limit).map_err(|e| e.to_string())?;
    let config = Config { memory_limit, ..Config::embedded(temporary.path()) };
    allocator::tune(memory_limit);
    let server =
        Standalone::start(config, Overrides::threads_apart()).await.map_err(|e| e.to_string())?;
    let port = server.address.port();
    let views = create(args, port).await?;
    let begun = Mark::now();
    let insert = |t: &str| {
        format!(
            "INSERT INTO {t} SELECT i, i % {}, i * 7 % 10007, repeat('x', 40) || i FROM generate_series(1, {}) i",
            (args.rows / 10).max(1),
            args.rows
        )
    };
    let insert_s = change(args, port, &views, insert).await?;
    let update = |t: &str| format!("UPDATE {t} SET v = v + 1, s = s || 'y'");
    let update_s = change(args, port, &views, update).await?;
    // In the kernel's megabytes, as what is resident.
    let limit_mb = memory_limit as f64 / f64::from(1 << 20);
    let memory = Memory {
        views: views.len(),
        rows: args.tables * args.rows,
        limit_mb,
        insert_s,
        update_s,
        cpu_s: begun.elapsed().cpu_s(),
        peak_rss_mb: peak_rss_mb(),
        ratio: peak_rss_mb() / limit_mb,
    };
    println!(
        "{} views of {} rows: {insert_s:.1} s until they had them, {update_s:.1} s until all had changed; {:.0} MB resident \
         at most, {:.2} times the limit",
        memory.views, memory.rows, memory.peak_rss_mb, memory.ratio
    );
    println!("{}", serde_json::to_string(&memory).map_err(|e| e.to_string())?);
    server.shutdown().await;
    Ok(())
}

async fn create(args: &Args, port: u16) -> Result<Vec<String>, String> {
    let client = connect(port).await?;
    let mut views = Vec::new();
    for t in 0..args.tables {
        let table = format!("CREATE TABLE t{t} (id INT PRIMARY KEY, g INT, v INT, s TEXT)");
        execute(&client, &table).await?;
        for v in 0..args.views {
            let (kind, query) = VIEWS[v % VIEWS.len()];
            let query = query.replace("{t}", &format!("t{t}"));
            let name = format!("{kind}_{t}_{v}");
            execute(&client, &format!("CREATE MATERIALIZED VIEW {name} AS {query}")).await?;
            views.push(name);
        }
    }
    Ok(views)
}

/// Changes all tables at once. Seconds until each view could be read with the change.
async fn change(
    args: &Args,
    port: u16,
    views: &[String],
    statement: impl Fn(&str) -> String,
) -> Result<f64, String> {
    let began = Instant::now();
    let statements = (0..args.tables).map(|t| {
        let sql = statement(&format!("t{t}"));
        async move { execute(&connect(port).await?, &sql).await }
    });
    futures::future::try_join_all(statements).await?;
    let client = connect(port).await?;
    execute(&client, "SET read_wait_timeout = '1h'").await?;
    for view in views {
        execute(&client, &format!("SELECT count(*) FROM {view}")).await?;
    }
    Ok(began.elapsed().as_secs_f64())
}
