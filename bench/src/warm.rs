//! What views whose state is in memory notice of one whose state is not: each of some sessions changes a row of a small
//! table of its own and reads a view over it, again and again; first alone, then while rows with cold keys come to the
//! aggregate of [`crate::cold`]. Both stretches are in one server.

use std::time::{Duration, Instant};

use serde::Serialize;
use tokio_postgres::Client;

use crate::isolation::{Ratios, Times};
use crate::nexmark::{connect, execute};

/// Rows of a warm table, and groups of its view.
const ROWS: u64 = 1_000;
const GROUPS: u64 = 10;
/// Changes of each session before anything is measured.
const WARM_UP: u64 = 5;
/// Rows of a statement with cold keys.
const COLD_ROWS: u64 = 4_096;

/// Names are those of the JSON line.
#[derive(Clone, Debug, Serialize)]
struct Beside {
    profile: String,
    warm_views: usize,
    samples_alone: usize,
    samples_beside: usize,
    cold_rows_per_s: f64,
    update_alone: Times,
    update: Times,
    update_ratio: Ratios,
    read_alone: Times,
    read: Times,
    read_ratio: Ratios,
}

/// A session, with its table and its view.
struct Warm {
    client: Client,
    number: usize,
    changes: u64,
}

/// Milliseconds of changes, and of reads.
type Samples = (Vec<f64>, Vec<f64>);

/// The number of keys, and statements that insert rows with cold ones: `{key}`, `{from}` and `{to}` are replaced.
pub struct Cold<'a> {
    pub keys: u64,
    pub insert: &'a str,
}

/// Measures with so many warm views, for so long alone and as long beside the cold one.
pub async fn measure(
    port: u16,
    profile: &str,
    views: usize,
    length: Duration,
    cold: &Cold<'_>,
) -> Result<(), String> {
    let mut sessions = Vec::with_capacity(views);
    for number in 0..views {
        sessions.push(Warm::prepare(port, number).await?);
    }
    for session in &mut sessions {
        for _ in 0..WARM_UP {
            session.change().await?;
            session.read().await?;
        }
    }
    let (updates, reads) = sample(&mut sessions, Instant::now() + length).await?;
    let samples_alone = updates.len();
    let (update_alone, read_alone) = (Times::of(updates), Times::of(reads));
    let until = Instant::now() + length;
    let inserting = insert(port, cold, until);
    let (rows, sampled) = futures::join!(inserting, sample(&mut sessions, until));
    let (updates, reads) = sampled?;
    let samples_beside = updates.len();
    let (update, read) = (Times::of(updates), Times::of(reads));
    let beside = Beside {
        profile: profile.to_owned(),
        warm_views: views,
        samples_alone,
        samples_beside,
        cold_rows_per_s: rows?,
        update_alone,
        update,
        update_ratio: update.over(update_alone),
        read_alone,
        read,
        read_ratio: read.over(read_alone),
    };
    println!(
        "{views} warm views, p50/p99 in ms: update {:.1}/{:.1} alone and {:.1}/{:.1} beside a cold one that takes {:.0} rows/s; \
         read {:.1}/{:.1} and {:.1}/{:.1}; 99th percentiles {:.2} and {:.2} times as long",
        update_alone.p50_ms,
        update_alone.p99_ms,
        update.p50_ms,
        update.p99_ms,
        beside.cold_rows_per_s,
        read_alone.p50_ms,
        read_alone.p99_ms,
        read.p50_ms,
        read.p99_ms,
        beside.update_ratio.p99,
        beside.read_ratio.p99
    );
    println!("{}", serde_json::to_string(&beside).map_err(|e| e.to_string())?);
    Ok(())
}

impl Warm {
    async fn prepare(port: u16, number: usize) -> Result<Warm, String> {
        let client = connect(port).await?;
        execute(&client, "SET read_wait_timeout = '10min'").await?;
        let sql = format!(
            "CREATE TABLE warm{number} (k INT PRIMARY KEY, v BIGINT);
             INSERT INTO warm{number} SELECT x, 0 FROM generate_series(0, {}) AS s(x);
             CREATE MATERIALIZED VIEW warm{number}_sums AS
                 SELECT k % {GROUPS} AS g, sum(v) AS v FROM warm{number} GROUP BY k % {GROUPS}",
            ROWS - 1
        );
        for statement in sql.split(';') {
            execute(&client, statement).await?;
        }
        Ok(Warm { client, number, changes: 0 })
    }

    async fn change(&mut self) -> Result<f64, String> {
        let (t, key) = (self.number, self.changes * 7 % ROWS);
        self.changes += 1;
        timed(&self.client, &format!("UPDATE warm{t} SET v = v + 1 WHERE k = {key}")).await
    }

    async fn read(&self) -> Result<f64, String> {
        let (t, group) = (self.number, self.changes % GROUPS);
        timed(&self.client, &format!("SELECT v FROM warm{t}_sums WHERE g = {group}")).await
    }

    async fn sample(&mut self, until: Instant) -> Result<Samples, String> {
        let (mut updates, mut reads) = Samples::default();
        while Instant::now() < until {
            updates.push(self.change().await?);
            reads.push(self.read().await?);
        }
        Ok((updates, reads))
    }
}

async fn timed(client: &Client, sql: &str) -> Result<f64, String> {
    let began = Instant::now();
    execute(client, sql).await?;
    Ok(began.elapsed().as_secs_f64() * 1_000.0)
}

async fn sample(sessions: &mut [Warm], until: Instant) -> Result<Samples, String> {
    let of_all = sessions.iter_mut().map(|session| session.sample(until));
    let mut all = Samples::default();
    for (updates, reads) in futures::future::try_join_all(of_all).await? {
        all.0.extend(updates);
        all.1.extend(reads);
    }
    Ok(all)
}

/// Rows a second that the cold view has taken.
async fn insert(port: u16, cold: &Cold<'_>, until: Instant) -> Result<f64, String> {
    let client = connect(port).await?;
    execute(&client, "SET read_wait_timeout = '10min'").await?;
    let (began, mut rows) = (Instant::now(), 0);
    while Instant::now() < until {
        let insert =
            cold.insert.replace("{key}", &format!("x::bigint * 2654435761 % {}", cold.keys));
        let insert = insert.replace("{from}", &rows.to_string());
        let insert = insert.replace("{to}", &(rows + COLD_ROWS - 1).to_string());
        execute(&client, &insert).await?;
        execute(&client, "SELECT n FROM totals WHERE k = 0").await?;
        rows += COLD_ROWS;
    }
    Ok(rows as f64 / began.elapsed().as_secs_f64())
}
