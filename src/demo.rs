//! `millrace demo`: a paced Nexmark source and five views over it, and what they do, second by second; in a server of its
//! own, or over a connection to one that runs ([`remote`]).

pub mod remote;

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use async_trait::async_trait;
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

/// Where the demo runs.
#[async_trait]
pub trait Place: Send + Sync {
    /// Runs statements; an error is for people.
    async fn run(&self, sql: &str) -> Result<(), String>;
    /// How the views are, in the order of [`view_names`].
    async fn readings(&self) -> Result<Vec<Reading>, String>;
}

/// A view at one moment.
#[derive(Clone, Debug, Default)]
pub struct Reading {
    pub state: String,
    pub lag_ms: Option<u64>,
    pub rows: u64,
    pub state_bytes: u64,
    /// Rows that have entered its dataflow.
    pub rows_read: u64,
    /// Reads of keyed state, and those of them that a cache has answered.
    pub lookups: u64,
    pub hits: u64,
}

/// Names of the views, in the order in which they are shown.
fn view_names() -> impl Iterator<Item = &'static str> {
    VIEWS.iter().map(|(name, _, _)| *name)
}

#[async_trait]
impl Place for Standalone {
    async fn run(&self, sql: &str) -> Result<(), String> {
        let (_, error) = console::run(&self.shared, "demo".to_owned(), sql).await;
        error.map_or(Ok(()), |e| Err(format!("{} (SQLSTATE {})", e.message, e.state.0)))
    }

    async fn readings(&self) -> Result<Vec<Reading>, String> {
        let (catalog, jobs) = (self.shared.cluster.catalog(), self.shared.cluster.jobs());
        let find = |name: &str| -> JobRow {
            let id = catalog.get("public", name).map(|r| r.id);
            jobs.iter().find(|j| Some(j.relation) == id).cloned().unwrap_or_default()
        };
        Ok(view_names().map(|name| Reading::from(&find(name))).collect())
    }
}

impl From<&JobRow> for Reading {
    fn from(job: &JobRow) -> Reading {
        let (hits, lookups) = job.cache();
        let leaves = job.operators.iter().filter(|o| LEAVES.contains(&o.name.as_str()));
        Reading {
            state: job.state.clone(),
            lag_ms: job.lag_ms,
            rows: job.rows.max(0) as u64,
            state_bytes: job.state_bytes(),
            rows_read: leaves.map(|o| o.rows_out).sum(),
            lookups,
            hits,
        }
    }
}

/// Operators by which rows enter a dataflow.
const LEAVES: [&str; 2] = ["Source", "Subscribe"];

/// Creates the sources and views.
pub async fn create(place: &dyn Place, rate: u64) -> Result<(), String> {
    place.run(&SOURCES.replace("{rate}", &rate.to_string())).await?;
    for (name, _, query) in VIEWS {
        place.run(&format!("CREATE MATERIALIZED VIEW {name} AS {query}")).await?;
    }
    Ok(())
}

/// One view at one moment, and what it did since the moment before.
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

/// What the views did between two samples.
struct Sampler<'a> {
    place: &'a dyn Place,
    before: Vec<Reading>,
    at: Instant,
}

impl Sampler<'_> {
    fn new(place: &dyn Place) -> Sampler<'_> {
        Sampler { place, before: vec![Reading::default(); VIEWS.len()], at: Instant::now() }
    }

    async fn sample(&mut self) -> Result<Vec<Line>, String> {
        let readings = self.place.readings().await?;
        let seconds = self.at.elapsed().as_secs_f64().max(0.001);
        self.at = Instant::now();
        let views = VIEWS.iter().zip(&self.before).zip(&readings);
        let lines = views.map(|(((name, what, _), before), now)| {
            let since = |f: fn(&Reading) -> u64| f(now).saturating_sub(f(before));
            Line {
                name,
                what,
                rate: (since(|r| r.rows_read) as f64 / seconds).round() as u64,
                rows: now.rows,
                fresh: match (now.state.as_str(), now.lag_ms) {
                    ("running", Some(lag)) => display::millis(lag),
                    (state, _) => state.to_owned(),
                },
                state: now.state_bytes,
                hits: display::ratio((since(|r| r.hits), since(|r| r.lookups))),
            }
        });
        let lines = lines.collect();
        self.before = readings;
        Ok(lines)
    }
}

/// Shows the views every second until `stop` completes: a table that is redrawn in a terminal, else one
/// line a second.
pub async fn show(place: &dyn Place, stop: impl Future<Output = ()>) {
    let mut sampler = Sampler::new(place);
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
        let elapsed = started.elapsed();
        let text = match sampler.sample().await {
            Ok(lines) if terminal => table(&lines, elapsed),
            Ok(lines) => single(&lines, elapsed),
            Err(reason) => format!("{:>4.0} s | {reason}", elapsed.as_secs_f64()),
        };
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
