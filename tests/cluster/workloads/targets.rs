//! Sinks into files, a bucket, a table and PostgreSQL: each target has what its sink's input has, every change once and in
//! order.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use millrace_sqllogictest::target::Target;
use serde_json::Value;
use tokio_postgres::Client;

use crate::process::Cluster;
use crate::{assert_equal, execute};

/// How long targets may lack what is committed: a sink whose target did not answer waits up to 30 s.
const LIMIT: Duration = Duration::from_secs(90);
/// Where the bucket's files are.
const PREFIX: &str = "exported";
const LISTS: &str = "SELECT id, items FROM lists";

pub struct Targets {
    directory: PathBuf,
    /// `None` where no server was given.
    postgres: Option<Target>,
}

impl Targets {
    /// Sinks from the tables of the bank and of `records.rs`.
    pub async fn create(client: &Client, directory: &Path) -> Targets {
        let lists = "CREATE TABLE lists (id bigint PRIMARY KEY, items text)";
        let (directory, postgres) = (directory.to_owned(), Target::create("cluster", lists).await);
        let mut sinks = vec![
            format!(
                "CREATE SINK counter_changes FROM counters \
                 WITH (connector = 'fs', path = '{}') FORMAT DEBEZIUM ENCODE JSON",
                directory.display()
            ),
            format!(
                "CREATE SINK transfer_lines AS SELECT n FROM transfers \
                 WITH (connector = 'fs', path = '{}', force_append_only = true) \
                 FORMAT PLAIN ENCODE CSV",
                Cluster::store(PREFIX)
            ),
            "CREATE TABLE copied_clicks (id bigint PRIMARY KEY, who bigint, at timestamp)"
                .to_owned(),
            "CREATE SINK click_copies INTO copied_clicks FROM clicks".to_owned(),
        ];
        if let Some(postgres) = &postgres {
            sinks.push(format!(
                "CREATE SINK list_copies FROM lists WITH (connector = 'postgres', url = '{}', \
                 schema = '{}', table = 'lists', type = 'upsert')",
                postgres.url, postgres.schema
            ));
        }
        for sql in sinks {
            execute(client, &sql).await;
        }
        Targets { directory, postgres }
    }

    /// While nobody writes.
    pub async fn check(self, cluster: &Cluster, client: &Client) {
        let deadline = Instant::now() + LIMIT;
        while let Err(reason) = flushed(client).await {
            assert!(Instant::now() < deadline, "targets lack changes: {reason}");
        }
        let counters = client.query("SELECT id, n FROM counters", &[]).await.expect("a read");
        let counters: BTreeMap<i64, i64> =
            counters.iter().map(|row| (row.get(0), row.get(1))).collect();
        assert_eq!(replayed(&lines(&self.directory)), counters);

        let transfers = client.query("SELECT n FROM transfers ORDER BY n", &[]).await;
        let transfers: Vec<i64> = transfers.expect("a read").iter().map(|row| row.get(0)).collect();
        let mut written: Vec<i64> = Vec::new();
        for path in cluster.objects_below(PREFIX).keys() {
            let text = std::fs::read_to_string(path).expect("an object");
            written.extend(text.lines().map(|line| line.parse::<i64>().expect("a number")));
        }
        written.sort_unstable();
        assert_eq!(written, transfers, "what the bucket has of transfers");

        assert_equal(client, "SELECT * FROM copied_clicks", "SELECT * FROM clicks").await;
        if let Some(postgres) = self.postgres {
            let content = async |client: &Client| {
                let rows = client.query(LISTS, &[]).await.expect("a read");
                let rows = rows.iter().map(|row| (row.get(0), row.get(1)));
                rows.collect::<BTreeMap<i64, String>>()
            };
            assert_eq!(content(&postgres.client).await, content(client).await, "PostgreSQL");
            postgres.drop().await;
        }
    }
}

/// Waits until targets have all that is committed. Those of sinks that are stalled are not waited for, which is an error.
pub async fn flushed(client: &Client) -> Result<(), String> {
    execute(client, "FLUSH").await;
    let sql = "SELECT concat_ws(': ', name, state, reason) FROM millrace_catalog.jobs \
               WHERE state <> 'running' ORDER BY name";
    let others = client.query(sql, &[]).await.expect("a read");
    let others: Vec<String> = others.iter().map(|row| row.get(0)).collect();
    if others.is_empty() {
        // What was stalled at the beginning may not be by now.
        execute(client, "FLUSH").await;
        return Ok(());
    }
    tokio::time::sleep(Duration::from_millis(100)).await;
    Err(others.join(", "))
}

/// The lines of all files that are complete, in the order of their names.
pub fn lines(directory: &Path) -> Vec<String> {
    let files = std::fs::read_dir(directory).expect("the directory of a sink");
    let mut files: Vec<PathBuf> = files.map(|file| file.expect("an entry").path()).collect();
    files.retain(|path| path.extension().is_some_and(|e| e != "tmp"));
    files.sort();
    let text = |path| std::fs::read_to_string(path).expect("a file of a sink");
    files
        .iter()
        .flat_map(|path| text(path).lines().map(str::to_owned).collect::<Vec<_>>())
        .collect()
}

/// What counters are after all changes, each of which must find the counter as it was before.
fn replayed(lines: &[String]) -> BTreeMap<i64, i64> {
    let mut counters = BTreeMap::new();
    for line in lines {
        let change: Value = serde_json::from_str(line).expect("a line of JSON");
        let counter = |row: &Value| Some((row["id"].as_i64()?, row["n"].as_i64()?));
        let (before, after) = (counter(&change["before"]), counter(&change["after"]));
        let (id, n) = after.expect("no counter is deleted");
        assert_eq!(counters.insert(id, n), before.map(|(_, n)| n), "not in order: {line}");
    }
    counters
}
