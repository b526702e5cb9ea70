//! The views: of every family of operators, some for as long as the run and some that come and go; and what compares
//! them with their queries.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio_postgres::{Client, Error};

use crate::client::{Tally, describe, rows};
use crate::generate::{self, Table};
use crate::rng::Rng;

/// How long a comparison that depends on the clock, or a job's recovery, may take.
const PATIENCE: Duration = Duration::from_secs(180);
/// Views that come and go, at a time.
const FLEETING: usize = 7;

pub const SCHEMA: &[&str] = &[
    "CREATE MATERIALIZED VIEW wide_groups AS SELECT g, count(*) AS n, sum(r) AS s, min(r) AS lo, max(r) AS hi, \
        count(DISTINCT r % 50) AS d FROM wide GROUP BY g",
    "CREATE MATERIALIZED VIEW group_sizes AS SELECT n, count(*) AS c, max(g) AS last FROM wide_groups GROUP BY n",
    "CREATE MATERIALIZED VIEW wide_named AS SELECT w.id, w.r, w.pad, d.name FROM wide w LEFT JOIN dim d ON d.g = w.g",
    "CREATE MATERIALIZED VIEW top AS SELECT id, r FROM wide ORDER BY r DESC, id LIMIT 20",
    "CREATE MATERIALIZED VIEW top_of_group AS SELECT id, g, r FROM (SELECT id, g, r, row_number() OVER \
        (PARTITION BY g ORDER BY r DESC, id) AS n FROM wide) q WHERE n <= 2",
    "CREATE MATERIALIZED VIEW steps AS SELECT id, r - lag(r) OVER (PARTITION BY g ORDER BY id) AS step FROM wide WHERE r % 4 = 0",
    "CREATE MATERIALIZED VIEW kinds AS SELECT DISTINCT g, r % 10 AS k FROM wide",
    "CREATE MATERIALIZED VIEW unused AS SELECT g, name FROM dim WHERE g NOT IN (SELECT g FROM wide WHERE r > 500)",
    "CREATE MATERIALIZED VIEW used AS SELECT g FROM dim d WHERE EXISTS (SELECT 1 FROM wide w WHERE w.g = d.g AND w.r < 10)",
    "CREATE MATERIALIZED VIEW both_ways AS SELECT g FROM dim UNION SELECT r FROM wide WHERE r < 60",
    "CREATE MATERIALIZED VIEW recent AS SELECT id, at FROM tick WHERE at > now() - INTERVAL '1 second'",
    "CREATE INDEX wide_by_g ON wide (g)",
    "CREATE TABLE groups_copied (g int PRIMARY KEY, n bigint, s bigint, lo int, hi int, d bigint)",
    "CREATE SINK groups_out INTO groups_copied FROM wide_groups WITH (commit_interval = '200ms')",
];

/// A view and its query, as the catalog has them.
pub async fn all(client: &Client) -> Result<Vec<(String, String)>, Error> {
    let found = rows(client, "SELECT matviewname, definition FROM pg_matviews").await?;
    let text = |v: &Option<String>| v.clone().unwrap_or_default();
    let query = |v: &Option<String>| text(v).trim().trim_end_matches(';').to_string();
    Ok(found.iter().map(|r| (text(&r[0]), query(&r[1]))).collect())
}

/// Creates and drops views and indexes.
pub struct Maker {
    next: AtomicU64,
    tables: Vec<Table>,
}

impl Maker {
    pub fn new(tables: Vec<Table>) -> Maker {
        Maker { next: AtomicU64::new(0), tables }
    }

    pub async fn work(&self, client: &Client, tally: &Tally, mut rng: Rng, until: Instant) {
        let rest = |rng: &mut Rng| Duration::from_millis(rng.between(50, 500) as u64);
        while Instant::now() < until && !client.is_closed() {
            let views = all(client).await;
            tally.fate("the list of views", &views);
            let fleeting: Vec<String> = views
                .unwrap_or_default()
                .into_iter()
                .map(|(name, _)| name)
                .filter(|name| name.starts_with("fleeting"))
                .collect();
            let n = self.next.fetch_add(1, Ordering::Relaxed);
            let sql = if fleeting.len() >= FLEETING || (!fleeting.is_empty() && rng.chance(30)) {
                let name = &fleeting[rng.below(fleeting.len())];
                format!("DROP MATERIALIZED VIEW IF EXISTS {name}")
            } else if rng.chance(20) {
                tally.execute(client, "DROP INDEX IF EXISTS wide_by_r").await;
                "CREATE INDEX wide_by_r ON wide (r)".to_string()
            } else {
                let query = match rng.chance(30) {
                    true => generate::further_query(&mut rng, &self.tables),
                    false => generate::query(&mut rng, &self.tables),
                };
                format!("CREATE MATERIALIZED VIEW fleeting{n} AS {}", query.sql)
            };
            tally.execute(client, &sql).await;
            tokio::time::sleep(rest(&mut rng)).await;
        }
    }
}

/// Compares views with their queries while others write.
pub async fn audit(client: &Client, tally: &Tally, mut rng: Rng, until: Instant) {
    while Instant::now() < until && !client.is_closed() {
        let views = all(client).await;
        tally.fate("the list of views", &views);
        let Ok(views) = views else { continue };
        let Some((name, query)) = views.get(rng.below(views.len().max(1))) else { continue };
        if is_timed(query) {
            continue;
        }
        let compared = compare(client, name, query).await;
        if tally.fate(&format!("the comparison of {name}"), &compared) == crate::client::Fate::Done
        {
            tally.count("views compared under load");
        }
        if let Ok(Some(difference)) = compared {
            tally.is_wrong(difference);
        }
    }
}

/// Its rows go and come by the clock.
fn is_timed(query: &str) -> bool {
    query.contains("now()")
}

/// A view and its query in one statement, hence at one epoch: how they differ, if they do.
async fn compare(client: &Client, name: &str, query: &str) -> Result<Option<String>, Error> {
    client.batch_execute("SET expression_errors = 'null'").await?;
    let sql = format!(
        "SELECT 0 AS side__, x.* FROM {name} AS x UNION ALL SELECT 1 AS side__, y.* FROM ({query}) AS y"
    );
    let mut weights: BTreeMap<Vec<Option<String>>, i64> = BTreeMap::new();
    for row in rows(client, &sql).await? {
        let weight = if row[0].as_deref() == Some("0") { 1 } else { -1 };
        *weights.entry(row[1..].to_vec()).or_default() += weight;
    }
    weights.retain(|_, weight| *weight != 0);
    let some: Vec<_> = weights.iter().take(6).collect();
    let differ = format!("{name} = {query}\n  rows of the view (+) and the query (-): {some:?}");
    Ok((!weights.is_empty()).then_some(differ))
}

/// Every view is its query, and what must be empty is.
pub async fn check_all(client: &Client) -> Result<usize, String> {
    let failed = |e| describe(&e);
    let views = all(client).await.map_err(failed)?;
    for (name, query) in &views {
        let begun = Instant::now();
        while let Some(difference) = compare(client, name, query)
            .await
            .map_err(|e| format!("{} in the comparison of {name} = {query}", describe(&e)))?
        {
            if !is_timed(query) || begun.elapsed() > PATIENCE {
                return Err(difference);
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    for name in ["torn", "torn_batch"] {
        let found = rows(client, &format!("SELECT * FROM {name}")).await.map_err(failed)?;
        if !found.is_empty() {
            return Err(format!("{name} has {found:?}"));
        }
    }
    Ok(views.len())
}

/// Until every job runs: faults may have stopped some, and what was being created goes on being created.
pub async fn all_run(client: &Client) -> Result<(), String> {
    let begun = Instant::now();
    loop {
        let jobs = rows(client, "SHOW JOBS").await.map_err(|e| describe(&e))?;
        let waiting: Vec<_> = jobs.iter().filter(|j| j[3].as_deref() != Some("running")).collect();
        if waiting.is_empty() {
            return Ok(());
        }
        if begun.elapsed() > PATIENCE {
            return Err(format!("after {PATIENCE:?} these jobs do not run: {waiting:?}"));
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// What a sink brings to a table is what it reads.
pub async fn check_sink(client: &Client) -> Result<(), String> {
    millrace_sqllogictest::suite::flush(client).await?;
    let sql = "SELECT * FROM groups_copied EXCEPT ALL SELECT * FROM wide_groups \
        UNION ALL (SELECT * FROM wide_groups EXCEPT ALL SELECT * FROM groups_copied)";
    let different = rows(client, sql).await.map_err(|e| describe(&e))?;
    match different.is_empty() {
        true => Ok(()),
        false => Err(format!("groups_copied is not wide_groups: {different:?}")),
    }
}
