//! Lookup joins: a view of rows that met a table as it was when they came. A view like that does not equal its
//! query; it equals what its query gave for each row at the statement that brought the row.
//!
//! One statement at a time, each seen by the views before the next, so that every epoch is one statement. After
//! a statement, rows of the left side that are new or have changed meet the table as it is now; the others
//! keep what they met.

use std::collections::BTreeMap;

use tokio_postgres::Client;

use crate::case::{Mode, Row, differing, execute, rows};
use crate::coverage::Reads;
use crate::node::{Node, NodeOptions};
use crate::rng::Rng;

/// Left sides: rows that only come, and rows that change. `id` is unique in both.
const LEFTS: [&str; 2] = ["stream", "changing"];

/// Join kind, condition, and what is looked up.
const JOINS: [(&str, &str, &str); 5] = [
    ("JOIN", "x.k = y.id", "side"),
    ("LEFT JOIN", "x.k = y.id", "side"),
    ("JOIN", "x.k = y.g", "side"),
    ("LEFT JOIN", "x.k = y.g AND x.v < y.w", "side"),
    ("LEFT JOIN", "x.k = y.g", "wide"),
];

struct View {
    name: String,
    left: &'static str,
    join: (&'static str, &'static str, &'static str),
    /// By the left row's id: the row as it was, and what it met.
    met: BTreeMap<String, (Row, Vec<Row>)>,
}

impl View {
    fn query(&self, version: &str) -> String {
        let (kind, condition, side) = self.join;
        format!(
            "SELECT x.id, x.k, x.v, y.id AS other, y.w FROM {} x {kind} {side}{version} AS y ON {condition}",
            self.left
        )
    }

    /// Takes in the left side as it is now.
    async fn follow(&mut self, client: &Client) -> Result<(), String> {
        let sql = format!("SELECT id, k, v FROM {}", self.left);
        let now: BTreeMap<String, Row> =
            rows(client, &sql).await?.into_iter().map(|r| (id(&r), r)).collect();
        self.met.retain(|id, (row, _)| now.get(id) == Some(row));
        let mut current: BTreeMap<String, Vec<Row>> = BTreeMap::new();
        for row in rows(client, &self.query("")).await? {
            current.entry(id(&row)).or_default().push(row);
        }
        for (id, row) in now {
            let met = current.remove(&id).unwrap_or_default();
            self.met.entry(id).or_insert((row, met));
        }
        Ok(())
    }

    /// After each statement, so that the view has it in an epoch of its own.
    async fn check(&mut self, client: &Client) -> Result<(), String> {
        self.follow(client).await?;
        let mut have = rows(client, &format!("SELECT * FROM {}", self.name)).await?;
        let mut want: Vec<Row> = self.met.values().flat_map(|(_, met)| met.clone()).collect();
        match differing(&mut have, &mut want) {
            None => Ok(()),
            Some([extra, missing]) => {
                Err(format!("{} = {}\n  + {extra:?}\n  - {missing:?}", self.name, self.query("")))
            }
        }
    }
}

fn id(row: &Row) -> String {
    row.first().cloned().flatten().unwrap_or_default()
}

fn value(rng: &mut Rng) -> String {
    if rng.chance(10) { "NULL".into() } else { rng.below(6).to_string() }
}

fn statement(rng: &mut Rng, next: &mut usize) -> String {
    let mut fresh = |rng: &mut Rng| {
        *next += 1;
        format!("({}, {}, {})", *next, value(rng), value(rng))
    };
    match rng.below(9) {
        0 | 1 => {
            let rows: Vec<String> = (0..1 + rng.below(5)).map(|_| fresh(rng)).collect();
            format!("INSERT INTO stream VALUES {}", rows.join(", "))
        }
        2 | 3 => {
            let rows: Vec<String> = (0..1 + rng.below(5)).map(|_| fresh(rng)).collect();
            format!("INSERT INTO changing VALUES {}", rows.join(", "))
        }
        4 => format!("UPDATE changing SET v = {} WHERE k = {}", value(rng), rng.below(6)),
        5 => format!("DELETE FROM changing WHERE v = {}", rng.below(6)),
        6 => format!("UPDATE side SET w = w + 1 WHERE g = {}", rng.below(6)),
        7 => format!("DELETE FROM side WHERE id = {}", rng.below(8)),
        _ => format!(
            "INSERT INTO side VALUES ({}, {}, {}) ON CONFLICT DO NOTHING",
            rng.below(8),
            value(rng),
            value(rng)
        ),
    }
}

async fn run(mode: Mode, seed: u64) -> Result<(), String> {
    let mut rng = Rng::new(seed);
    let mut reads = Reads::default();
    let mut node = Node::start(NodeOptions::for_mode(mode, seed)).await?;
    let mut client = node.connect().await?;
    for ddl in [
        "CREATE TABLE stream (id int, k int, v int) APPEND ONLY",
        "CREATE TABLE changing (id int PRIMARY KEY, k int, v int)",
        "CREATE TABLE side (id int PRIMARY KEY, g int, w int)",
        "CREATE MATERIALIZED VIEW wide AS SELECT id, g, w FROM side UNION ALL SELECT id + 100, g, w FROM side",
    ] {
        execute(&client, ddl).await?;
    }
    let mut views: Vec<View> = Vec::new();
    let mut next = 0;
    for step in 0..24 {
        let text = statement(&mut rng, &mut next);
        execute(&client, &text).await?;
        for view in &mut views {
            view.check(&client).await.map_err(|e| format!("step {step}, {text}: {e}"))?;
        }
        // Half of the views read what is there already: they meet the table as it is then.
        if step == 0 || step == 10 {
            for left in LEFTS {
                for join in JOINS {
                    let name = format!("v{}", views.len());
                    let mut view = View { name, left, join, met: BTreeMap::new() };
                    let query = view.query(" FOR SYSTEM_TIME AS OF PROCTIME()");
                    execute(&client, &format!("CREATE MATERIALIZED VIEW {} AS {query}", view.name))
                        .await?;
                    view.follow(&client).await?;
                    views.push(view);
                }
            }
        }
        if mode.restarts_after(step, &mut rng, 15) {
            node.add_reads(&mut reads, &mut Reads::default());
            node = node.crash_and_restart().await?;
            client = node.connect().await?;
        }
    }
    if mode == Mode::Restart && reads.get("lookup").is_none_or(|n| *n == 0) {
        return Err("no lookup read its state back".into());
    }
    node.stop().await;
    Ok(())
}

#[test]
fn looked_up_rows_stay_as_they_were_met() {
    let modes = [
        Mode::Plain,
        Mode::TinyCaches,
        Mode::Crash,
        Mode::SlowStore,
        Mode::Synchronous,
        Mode::Restart,
    ];
    crate::each_case("MILLRACE_LOOKUP_CASES", [6, 24], &[], &modes, run);
}
