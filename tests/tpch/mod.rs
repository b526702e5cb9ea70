//! All 22 TPC-H queries as materialized views over tables that are inserted into, updated and deleted
//! from: after every round of changes each view holds what PostgreSQL answers on the same rows.
//!
//! `MILLRACE_TPCH_SCALE` is the benchmark's scale factor (default 0.0005; 0.01 takes minutes),
//! `MILLRACE_TPCH_ROUNDS` the number of rounds, `MILLRACE_TPCH_SEED` the seed.

mod generate;
#[path = "../equivalence/rng.rs"]
mod rng;

use std::path::Path;

use millrace_sqllogictest::server::{Server, ServerOptions};
use tokio_postgres::{Client, NoTls, SimpleQueryMessage};

use self::generate::{Generator, Sizes};

const SCHEMA: &str = include_str!("schema.sql");

fn setting(name: &str, default: f64) -> f64 {
    std::env::var(name).ok().and_then(|v| v.parse().ok()).unwrap_or(default)
}

fn queries() -> Vec<(usize, String)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/tpch/queries");
    let text = |q: usize| std::fs::read_to_string(folder.join(format!("q{q}.sql")));
    (1..=22).map(|q| (q, text(q).expect("the query's text").trim().to_owned())).collect()
}

/// A session in a schema of its own; `None` where no PostgreSQL was given, which in CI is an error.
async fn judge() -> Option<Client> {
    let Ok(address) = std::env::var("MILLRACE_TEST_POSTGRES") else {
        assert!(std::env::var("CI").is_err(), "MILLRACE_TEST_POSTGRES is not set");
        return None;
    };
    let (client, connection) = tokio_postgres::connect(&address, NoTls).await.expect("PostgreSQL");
    tokio::spawn(connection);
    let schema = format!("tpch_{}", std::process::id());
    let sql = format!(
        "DROP SCHEMA IF EXISTS {schema} CASCADE; CREATE SCHEMA {schema}; SET search_path = {schema}"
    );
    client.batch_execute(&sql).await.expect("a schema");
    Some(client)
}

type Rows = Vec<Vec<Option<String>>>;

async fn rows(client: &Client, sql: &str) -> Result<Rows, String> {
    let messages = client.simple_query(sql).await.map_err(|e| format!("{e:?} in {sql}"))?;
    let mut rows: Rows = messages
        .iter()
        .filter_map(|m| match m {
            SimpleQueryMessage::Row(r) => {
                Some((0..r.len()).map(|i| r.get(i).map(number)).collect())
            }
            _ => None,
        })
        .collect();
    rows.sort();
    Ok(rows)
}

/// Quotients and averages carry a different number of digits: all are cut at ten.
fn number(text: &str) -> String {
    match text.split_once('.') {
        Some((whole, fraction))
            if whole.parse::<i64>().is_ok() && fraction.parse::<u128>().is_ok() =>
        {
            let fraction = fraction[..fraction.len().min(10)].trim_end_matches('0');
            format!("{whole}.{fraction}")
        }
        _ => text.to_owned(),
    }
}

async fn execute(clients: &[&Client], sql: &str) {
    for client in clients {
        let head: String = sql.chars().take(120).collect();
        client.batch_execute(sql).await.unwrap_or_else(|e| panic!("{head}: {e:?}"));
    }
}

#[test]
fn every_query_is_a_view_that_equals_postgresql() {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    runtime.block_on(run());
}

async fn run() {
    let Some(postgres) = judge().await else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let options = ServerOptions { data_dir: folder.path().join("data"), ..Default::default() };
    let server =
        Server::start(Path::new(env!("CARGO_BIN_EXE_millrace")), options).expect("a server");
    let millrace = server.connect().await.expect("a session");
    let both = [&postgres, &millrace];
    let seed = setting("MILLRACE_TPCH_SEED", 7.0) as u64;
    println!("seed {seed}");
    let mut generator = Generator::new(seed, Sizes::of(setting("MILLRACE_TPCH_SCALE", 0.0005)));

    execute(&both, SCHEMA).await;
    // The odd queries' views see everything from the start, the others are filled from full tables.
    let queries = queries();
    for (q, sql) in queries.iter().filter(|(q, _)| q % 2 == 1) {
        create(&millrace, *q, sql).await;
    }
    for sql in generator.load() {
        execute(&both, &sql).await;
    }
    for (q, sql) in queries.iter().filter(|(q, _)| q % 2 == 0) {
        create(&millrace, *q, sql).await;
    }
    // Of these alone: others use the same database meanwhile.
    let tables = "region, nation, supplier, part, partsupp, customer, orders, lineitem";
    execute(&[&postgres], &format!("ANALYZE {tables}")).await;
    let mut found = vec![0; queries.len() + 1];
    compare(&postgres, &millrace, &queries, "the load", &mut found).await;
    for round in 0..setting("MILLRACE_TPCH_ROUNDS", 3.0) as usize {
        for sql in generator.changes(round) {
            execute(&both, &sql).await;
        }
        compare(&postgres, &millrace, &queries, &format!("round {round}"), &mut found).await;
    }
    let empty: Vec<usize> = (1..=22).filter(|&q| found[q] == 0).collect();
    assert!(empty.is_empty(), "queries that never had a row: {empty:?}");
    let schema = format!("DROP SCHEMA tpch_{} CASCADE", std::process::id());
    execute(&[&postgres], &schema).await;
}

async fn create(client: &Client, q: usize, sql: &str) {
    let sql = format!("CREATE MATERIALIZED VIEW q{q} AS {sql}");
    client.batch_execute(&sql).await.unwrap_or_else(|e| panic!("q{q}: {e:?}"));
}

async fn compare(
    postgres: &Client,
    millrace: &Client,
    queries: &[(usize, String)],
    when: &str,
    found: &mut [usize],
) {
    let mut failures = Vec::new();
    for (q, sql) in queries {
        let expected = rows(postgres, sql).await.expect("PostgreSQL's answer");
        found[*q] += expected.len();
        for (what, sql) in [("view", format!("SELECT * FROM q{q}")), ("batch", sql.clone())] {
            match rows(millrace, &sql).await {
                Ok(actual) if actual == expected => {}
                Ok(actual) => {
                    let extra: Vec<_> =
                        actual.iter().filter(|r| !expected.contains(r)).take(3).collect();
                    let missing: Vec<_> =
                        expected.iter().filter(|r| !actual.contains(r)).take(3).collect();
                    failures.push(format!("q{q} {what}: has {extra:?}\n  lacks {missing:?}"));
                }
                Err(e) => failures.push(format!("q{q} {what}: {e}")),
            }
        }
    }
    assert!(failures.is_empty(), "after {when}:\n{}", failures.join("\n"));
}
