//! `millrace demo`: a server with a paced Nexmark source and five views over it, and what they do,
//! second by second.

use std::io::{IsTerminal, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};

use millrace_frontend::cluster::JobRow;
use millrace_frontend::console;
use millrace_frontend::display;

use crate::standalone::Standalone;

/// What the demo shows; positions in [`VIEWS`] are the order of display.
const SOURCES: &str = "
    CREATE SOURCE auction (id BIGINT, item_name VARCHAR, initial_bid BIGINT, date_time TIMESTAMP,
        expires TIMESTAMP, seller BIGINT, category BIGINT)
      WITH (connector = 'nexmark', table = 'auction', event.rate = {rate});
    CREATE SOURCE bid (auction BIGINT, bidder BIGINT, price BIGINT, date_time TIMESTAMP)
      WITH (connector = 'nexmark', table = 'bid', event.rate = {rate});";

/// Name, what it is, its query.
const VIEWS: [(&str, &str, &str); 5] = [
    (
        "high_bids",
        "filter",
        "SELECT auction, bidder, price, date_time FROM bid WHERE price > 5000000",
    ),
    (
        "bids_on_auctions",
        "join",
        "SELECT b.auction, b.bidder, b.price, a.seller, a.item_name
           FROM bid b JOIN auction a ON b.auction = a.id WHERE a.category = 10",
    ),
    (
        "bids_per_window",
        "windowed aggregate",
        "SELECT window_start, count(*) AS bids, max(price) AS highest, avg(price) AS average
           FROM TUMBLE(bid, date_time, INTERVAL '1 second') GROUP BY window_start",
    ),
    (
        "best_bids",
        "top-N",
        "SELECT auction, bidder, price, rank FROM (
             SELECT auction, bidder, price,
                    row_number() OVER (PARTITION BY auction ORDER BY price DESC) AS rank FROM bid)
          WHERE rank <= 3",
    ),
    (
        "sellers",
        "view on a view",
        "SELECT seller, count(*) AS bids, max(price) AS highest
           FROM bids_on_auctions GROUP BY seller",
    ),
];

/// Creates the sources and views.
pub async fn create(server: &Standalone, rate: u64) -> Result<(), String> {
    run(server, &SOURCES.replace("{rate}", &rate.to_string())).await?;
    for (name, _, query) in VIEWS {
        run(server, &format!("CREATE MATERIALIZED VIEW {name} AS {query}")).await?;
    }
    Ok(())
}

async fn run(server: &Standalone, sql: &str) -> Result<(), String> {
    let (_, error) = console::run(&server.shared, "demo".to_owned(), sql).await;
    error.map_or(Ok(()), |e| Err(format!("{} (SQLSTATE {})", e.message, e.state.0)))
}

/// One view at one moment.
struct Line {
    name: &'static str,
    what: &'static str,
    /// Rows a second into the view's dataflow.
    rate: u64,
    rows: u64,
    fresh: String,
    state: u64,
    hits: String,
}

/// What the jobs did between two samples.
struct Sampler {
    server_jobs: Arc<dyn millrace_frontend::cluster::Cluster>,
    before: Vec<(u64, (u64, u64))>,
    at: Instant,
}

impl Sampler {
    fn new(server: &Standalone) -> Sampler {
        let server_jobs = Arc::clone(&server.shared.cluster);
        Sampler { server_jobs, before: vec![(0, (0, 0)); VIEWS.len()], at: Instant::now() }
    }

    fn sample(&mut self) -> Vec<Line> {
        let seconds = self.at.elapsed().as_secs_f64().max(0.001);
        self.at = Instant::now();
        let catalog = self.server_jobs.catalog();
        let jobs = self.server_jobs.jobs();
        let find = |name: &str| -> JobRow {
            let id = catalog.get("public", name).map(|r| r.id);
            jobs.iter().find(|j| Some(j.relation) == id).cloned().unwrap_or_default()
        };
        VIEWS
            .iter()
            .zip(&mut self.before)
            .map(|((name, what, _), before)| {
                let job = find(name);
                let (read, (hits, reads)) = (rows_read(&job), job.cache());
                let (was, (hits_then, reads_then)) = *before;
                *before = (read, (hits, reads));
                let recent = (hits.saturating_sub(hits_then), reads.saturating_sub(reads_then));
                Line {
                    name,
                    what,
                    rate: (read.saturating_sub(was) as f64 / seconds).round() as u64,
                    rows: job.rows.max(0) as u64,
                    fresh: match (job.state.as_str(), job.lag_ms) {
                        ("running", Some(lag)) => display::millis(lag),
                        (state, _) => state.to_owned(),
                    },
                    state: job.state_bytes(),
                    hits: display::ratio(recent),
                }
            })
            .collect()
    }
}

/// Rows that entered a job's dataflow.
fn rows_read(job: &JobRow) -> u64 {
    let leaf = |name: &str| matches!(name, "Source" | "Subscribe");
    job.operators.iter().filter(|o| leaf(&o.name)).map(|o| o.rows_out).sum()
}

/// Shows the views every second until `stop` completes: a table that is redrawn in a terminal, else one
/// line a second.
pub async fn show(server: &Standalone, stop: impl Future<Output = ()>) {
    let mut sampler = Sampler::new(server);
    let started = Instant::now();
    let terminal = std::io::stdout().is_terminal();
    let mut ticks = tokio::time::interval(Duration::from_secs(1));
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Skip);
    ticks.tick().await;
    tokio::pin!(stop);
    let mut drawn = 0;
    loop {
        tokio::select! {
            () = &mut stop => break,
            _ = ticks.tick() => {}
        }
        let lines = sampler.sample();
        let elapsed = started.elapsed();
        let text = if terminal { table(&lines, elapsed) } else { single(&lines, elapsed) };
        let mut out = std::io::stdout().lock();
        // Whoever reads may have gone; the demo goes on until it is stopped.
        if drawn > 0 && terminal {
            let _ = write!(out, "\x1b[{drawn}A\x1b[J");
        }
        let _ = writeln!(out, "{text}");
        let _ = out.flush();
        drawn = text.lines().count();
    }
}

fn table(lines: &[Line], elapsed: Duration) -> String {
    let mut text = format!(
        "{:<18} {:<20} {:>12} {:>12} {:>10} {:>11} {:>10}\n",
        "view", "", "rows/s in", "rows", "behind", "state", "cache hits"
    );
    for l in lines {
        text += &format!(
            "{:<18} {:<20} {:>12} {:>12} {:>10} {:>11} {:>10}\n",
            l.name,
            l.what,
            display::count(l.rate),
            display::count(l.rows),
            l.fresh,
            display::bytes(l.state),
            l.hits
        );
    }
    text + &format!("{} · Ctrl-C ends the demo", display::duration(elapsed))
}

fn single(lines: &[Line], elapsed: Duration) -> String {
    let views: Vec<String> = lines
        .iter()
        .map(|l| {
            format!(
                "{} {} rows/s, {} rows, {} behind, {}, {} hits",
                l.name,
                display::count(l.rate),
                display::count(l.rows),
                l.fresh,
                display::bytes(l.state),
                l.hits
            )
        })
        .collect();
    format!("{:>4.0} s | {}", elapsed.as_secs_f64(), views.join(" | "))
}
