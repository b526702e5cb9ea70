//! Correlated subqueries: random ones, as views, as their queries and in PostgreSQL, before and after changes.

mod queries;

use tokio_postgres::Client;

use crate::case::{Mode, execute, rows};
use crate::node::{Node, NodeOptions};
use crate::postgres::{self, Judge};
use crate::rng::Rng;
use queries::{Generator, TABLES};

const QUERIES: usize = 12;
const STATEMENTS: usize = 6;

fn value(rng: &mut Rng) -> String {
    if rng.chance(15) { "NULL".into() } else { rng.below(4).to_string() }
}

fn insert(rng: &mut Rng, table: &str, count: usize) -> String {
    let row = |rng: &mut Rng| format!("({}, {}, {})", value(rng), value(rng), value(rng));
    let rows: Vec<String> = (0..count).map(|_| row(rng)).collect();
    format!("INSERT INTO {table} VALUES {}", rows.join(", "))
}

fn statement(rng: &mut Rng) -> String {
    let (table, columns) = TABLES[rng.below(TABLES.len())];
    let [one, two] = [columns[rng.below(3)], columns[rng.below(3)]];
    match rng.below(3) {
        0 => insert(rng, table, 2),
        1 => format!("UPDATE {table} SET {one} = {} WHERE {two} = {}", value(rng), rng.below(4)),
        _ => format!("DELETE FROM {table} WHERE {one} = {} AND {two} > 1", rng.below(4)),
    }
}

async fn sorted(client: &Client, sql: &str) -> Result<Vec<Vec<Option<String>>>, String> {
    let mut rows = rows(client, sql).await?;
    rows.iter_mut().flatten().for_each(postgres::normalise);
    rows.sort();
    Ok(rows)
}

async fn check(
    client: &Client,
    judge: Option<&Judge>,
    views: &[(String, String)],
) -> Result<(), String> {
    for (view, query) in views {
        let failed = |what: &str, e: String| format!("{what} of {query}: {e}");
        let batch = sorted(client, query).await.map_err(|e| failed("query", e))?;
        let all = format!("SELECT * FROM {view}");
        let kept = sorted(client, &all).await.map_err(|e| failed("view", e))?;
        if kept != batch {
            return Err(format!("view ≠ query: {query}\n  view {kept:?}\n  query {batch:?}"));
        }
        let Some(judge) = judge else { continue };
        let theirs = sorted(&judge.client, query).await.map_err(|e| failed("PostgreSQL", e))?;
        if theirs != batch {
            return Err(format!("{query}\n  PostgreSQL {theirs:?}\n  query {batch:?}"));
        }
    }
    Ok(())
}

async fn run(mode: Mode, seed: u64) -> Result<(), String> {
    let mut rng = Rng::new(seed);
    let node = Node::start(NodeOptions::for_mode(mode, seed)).await?;
    let client = node.connect().await?;
    let judge = Judge::connect().await?;
    let mut ddl: Vec<String> = TABLES
        .iter()
        .map(|(t, c)| format!("CREATE TABLE {t} ({} int)", c.join(" int, ")))
        .collect();
    ddl.extend(TABLES.iter().map(|(table, _)| insert(&mut rng, table, 6)));
    for sql in &ddl {
        execute(&client, sql).await?;
        if let Some(judge) = &judge {
            judge.execute(sql).await?;
        }
    }
    let mut views = Vec::new();
    for i in 0..QUERIES {
        let query = Generator::new(&mut rng).query();
        let created = execute(&client, &format!("CREATE MATERIALIZED VIEW v{i} AS {query}")).await;
        match created {
            Ok(()) => views.push((format!("v{i}"), query)),
            // What cannot be maintained says so.
            Err(e) if e.contains("is not supported") => {}
            Err(e) => return Err(format!("{query}: {e}")),
        }
    }
    check(&client, judge.as_ref(), &views).await?;
    for _ in 0..STATEMENTS {
        let sql = statement(&mut rng);
        execute(&client, &sql).await?;
        if let Some(judge) = &judge {
            judge.execute(&sql).await?;
        }
    }
    check(&client, judge.as_ref(), &views).await?;
    node.stop().await;
    Ok(())
}

#[test]
fn correlated_subqueries_equal_postgresql() {
    crate::each_case(
        "MILLRACE_CORRELATED_CASES",
        [12, 120],
        &[],
        &[Mode::Plain, Mode::TinyCaches],
        run,
    );
}
