//! Histories: random statements over small tables, and rows by the hundred in a wide one whose state does not fit
//! into caches.

use std::sync::Mutex;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Instant;

use tokio_postgres::Client;

use crate::client::{Fate, Tally};
use crate::generate::Table;
use crate::history::{self, Action, History, Written};
use crate::locked;
use crate::rng::Rng;

/// Ids of the wide table.
const WIDE: i64 = 4_000;
/// Rows that tables without a key keep.
const KEPT: i64 = 60;

/// The tables of the random histories: with a key, without one, and with one of two columns.
pub fn tables() -> Vec<Table> {
    let table = |name: &str, keyed, composite| Table {
        name: name.to_string(),
        keyed,
        composite,
        append_only: false,
    };
    vec![table("t0", true, false), table("t1", false, false), table("t2", true, true)]
}

/// What all writers of random statements share.
pub struct Histories {
    history: Mutex<History<'static>>,
    /// Statements so far.
    written: AtomicI64,
}

impl Histories {
    pub fn new(seed: u64) -> Histories {
        // As long as the process: there is one.
        let tables: &'static [Table] = tables().leak();
        let history = History::new(tables, Rng::new(seed ^ 0x0dd));
        Histories { history: Mutex::new(history), written: AtomicI64::new(0) }
    }

    pub async fn write(&self, client: &Client, tally: &Tally, mut rng: Rng, until: Instant) {
        while Instant::now() < until && !client.is_closed() {
            let statements: Vec<Written> = {
                let mut history = locked(&self.history);
                (0..4).map(|_| history.statement(&mut rng)).collect()
            };
            for action in history::actions(&mut rng, statements, None) {
                perform(client, tally, &action).await;
            }
            if self.written.fetch_add(1, Ordering::Relaxed) % 3 == 0 {
                for table in ["t1", "t2"] {
                    let sql = format!(
                        "DELETE FROM {table} WHERE o < (SELECT max(o) - {KEPT} FROM {table})"
                    );
                    tally.execute(client, &sql).await;
                }
            }
        }
    }
}

/// One step of a history, tried once.
async fn perform(client: &Client, tally: &Tally, action: &Action) -> Fate {
    match action {
        Action::Statement(written) => tally.execute(client, &written.sql).await,
        Action::Copy(copied) => tally.copy(client, &copied.table, copied.lines.clone()).await,
        Action::Block { actions, savepoint, commit } => {
            let fate = block(client, tally, actions, *savepoint, *commit).await;
            if fate != Fate::Done {
                tally.roll_back(client).await;
            }
            fate
        }
    }
}

async fn block(
    client: &Client,
    tally: &Tally,
    actions: &[Action],
    savepoint: Option<usize>,
    commit: bool,
) -> Fate {
    let mut fate = tally.execute(client, "BEGIN").await;
    for (i, action) in actions.iter().enumerate() {
        if let Some(at) = savepoint {
            if i == at && fate == Fate::Done {
                fate = tally.execute(client, "SAVEPOINT s").await;
            }
            if i == at + (actions.len() - at) / 2 && fate == Fate::Done {
                fate = tally.execute(client, "ROLLBACK TO SAVEPOINT s").await;
            }
        }
        if fate != Fate::Done {
            return fate;
        }
        fate = Box::pin(perform(client, tally, action)).await;
    }
    match fate {
        Fate::Done => tally.execute(client, if commit { "COMMIT" } else { "ROLLBACK" }).await,
        other => other,
    }
}

pub const WIDE_SCHEMA: &[&str] = &[
    "CREATE TABLE wide (id bigint PRIMARY KEY, g int, r int, pad text)",
    "CREATE TABLE dim (g int PRIMARY KEY, name text)",
    "CREATE TABLE tick (id int PRIMARY KEY, at timestamptz)",
    "INSERT INTO dim SELECT x, 'name ' || x FROM generate_series(0, 39) AS s(x)",
    "INSERT INTO wide SELECT x, x % 37, (x * 7919) % 1000, repeat('pad ', 30) FROM generate_series(1, 2000) AS s(x)",
];

/// Writes many rows at a time.
pub async fn write_wide(client: &Client, tally: &Tally, mut rng: Rng, until: Instant) {
    let tick = AtomicI64::new(0);
    while Instant::now() < until && !client.is_closed() {
        let from = rng.between(0, WIDE);
        let to = from + rng.between(1, 400);
        match rng.below(8) {
            0 => {
                let line = |id: i64| {
                    let pad = "x".repeat(40 + (id % 100) as usize);
                    format!("{id}\t{}\t{}\t{pad}\n", id % 37, (id * 7919 + from) % 1000)
                };
                // Keys that are there refuse all of it: they go first.
                let delete = format!("DELETE FROM wide WHERE id >= {from} AND id < {to}");
                if tally.execute(client, &delete).await == Fate::Done {
                    tally.copy(client, "wide", (from..to).map(line).collect()).await;
                }
            }
            1 => {
                let sql = format!(
                    "INSERT INTO wide SELECT x, x % 37, {}, 'again' FROM generate_series({from}, {to}) AS s(x) \
                     ON CONFLICT (id) DO UPDATE SET r = wide.r + 1, g = excluded.g",
                    rng.between(0, 999)
                );
                tally.execute(client, &sql).await;
            }
            2 => {
                let sql = format!("DELETE FROM wide WHERE id > {from} AND id < {to} AND g % 2 = 0");
                tally.execute(client, &sql).await;
            }
            3 => {
                let (g, k) = (rng.between(0, 36), rng.between(0, 39));
                let sql = format!("UPDATE dim SET name = 'new {g}' WHERE g = {k}");
                tally.execute(client, &sql).await;
            }
            4 => {
                let sql = match rng.chance(50) {
                    true => format!("DELETE FROM dim WHERE g = {}", rng.between(30, 39)),
                    false => format!(
                        "INSERT INTO dim VALUES ({}, 'back') ON CONFLICT DO NOTHING",
                        rng.between(30, 39)
                    ),
                };
                tally.execute(client, &sql).await;
            }
            5 => {
                let id = tick.fetch_add(1, Ordering::Relaxed) % 50;
                let sql = format!(
                    "INSERT INTO tick VALUES ({id}, now() + INTERVAL '{} seconds') ON CONFLICT (id) DO UPDATE SET at = excluded.at",
                    rng.between(-3, 3)
                );
                tally.execute(client, &sql).await;
            }
            _ => {
                let sql = format!("UPDATE wide SET r = r + 1 WHERE id > {from} AND id < {to}");
                tally.execute(client, &sql).await;
            }
        }
    }
}
