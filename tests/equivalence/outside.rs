//! Rows from outside and results to outside: a table of a case may be a source of files, into which the
//! history's INSERTs are written, and views may have sinks, whose files must add up to the view.

use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;
use tokio_postgres::Client;

use crate::case::{Content, differences, execute, rows};
use crate::generate::Table;

/// How long the last files may take to be found and read.
const ARRIVAL: Duration = Duration::from_secs(180);

pub struct Outside {
    dir: TempDir,
    /// Files and rows written so far.
    files: usize,
    rows: usize,
}

impl Outside {
    pub fn new() -> Result<Outside, String> {
        let dir = tempfile::tempdir().map_err(|e| e.to_string())?;
        std::fs::create_dir(dir.path().join("in")).map_err(|e| e.to_string())?;
        Ok(Outside { dir, files: 0, rows: 0 })
    }

    /// The table as a source, and a view that keeps it moving.
    pub async fn create_source(&self, client: &Client, table: &Table) -> Result<(), String> {
        let columns = table.ddl();
        let from = columns.find('(').unwrap_or_default();
        let to = columns.rfind(')').map_or(columns.len(), |at| at + 1);
        let name = &table.name;
        execute(
            client,
            &format!(
                "CREATE SOURCE {name} {} WITH (connector = 'fs', path = '{}/in/*.csv', discovery_interval = '100ms') \
                 FORMAT PLAIN ENCODE CSV; CREATE MATERIALIZED VIEW moving AS SELECT count(*) AS n FROM {name}",
                &columns[from..to],
                self.dir.path().display()
            ),
        )
        .await
    }

    /// The rows of an INSERT as a file.
    pub fn write(&mut self, statement: &str) -> Result<(), String> {
        let (_, values) = statement.split_once(" VALUES (").ok_or("no INSERT")?;
        let mut text = String::new();
        for row in values.trim_end_matches(')').split("), (") {
            let fields: Vec<String> = row.split(", ").map(field).collect();
            text.push_str(&fields.join(","));
            text.push('\n');
            self.rows += 1;
        }
        let folder = self.dir.path().join("in");
        let name = format!("{:06}.csv", self.files);
        self.files += 1;
        let hidden = folder.join(format!(".{name}"));
        std::fs::write(&hidden, text).map_err(|e| e.to_string())?;
        std::fs::rename(hidden, folder.join(name)).map_err(|e| e.to_string())
    }

    /// Until all that was written has been read.
    pub async fn arrived(&self, client: &Client) -> Result<(), String> {
        let deadline = Instant::now() + ARRIVAL;
        loop {
            let n = rows(client, "SELECT n FROM moving").await?;
            let n = n.first().and_then(|r| r[0].clone()).unwrap_or_default();
            if n == self.rows.to_string() {
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(format!("{n} of {} rows have come from files", self.rows));
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// A sink of view `i`, every column as text.
    pub async fn create_sink(&self, client: &Client, i: usize) -> Result<(), String> {
        let path = self.sink_path(i);
        let columns = columns(client, i).await?;
        execute(
            client,
            &format!(
                "CREATE SINK k{i} AS SELECT {columns} FROM v{i} WITH (connector = 'fs', path = '{}') \
                 FORMAT DEBEZIUM ENCODE JSON",
                path.display()
            ),
        )
        .await
    }

    /// What the sink's files add up to is the view.
    pub async fn check_sink(&self, client: &Client, i: usize) -> Result<(), String> {
        let columns = columns(client, i).await?;
        let mut view = Content::new();
        for row in rows(client, &format!("SELECT {columns} FROM v{i}")).await? {
            *view.entry(row).or_default() += 1;
        }
        match differences(&self.told(i)?, &view) {
            None => Ok(()),
            Some([extra, missing]) => {
                Err(format!("the sink of v{i} has {extra:?}\n  the view has {missing:?}"))
            }
        }
    }

    fn sink_path(&self, i: usize) -> std::path::PathBuf {
        self.dir.path().join(format!("out{i}"))
    }

    fn told(&self, i: usize) -> Result<Content, String> {
        let mut names: Vec<_> = std::fs::read_dir(self.sink_path(i))
            .map_err(|e| e.to_string())?
            .filter_map(|entry| entry.ok().map(|e| e.path()))
            .filter(|path| path.extension().is_some_and(|e| e == "json"))
            .collect();
        names.sort();
        let mut content = Content::new();
        for name in names {
            let text = std::fs::read_to_string(&name).map_err(|e| e.to_string())?;
            for line in text.lines() {
                let change: Value =
                    serde_json::from_str(line).map_err(|e| format!("{e} in {line}"))?;
                for (side, by) in [("before", -1), ("after", 1)] {
                    if let Value::Object(row) = &change[side] {
                        let row = row.values().map(|v| v.as_str().map(str::to_owned)).collect();
                        *content.entry(row).or_default() += by;
                    }
                }
            }
        }
        content.retain(|_, n| *n != 0);
        Ok(content)
    }
}

/// The view's columns as text, under names whose order is theirs.
async fn columns(client: &Client, i: usize) -> Result<String, String> {
    let view = client.prepare(&format!("SELECT * FROM v{i}")).await.map_err(|e| e.to_string())?;
    let names = view.columns().iter().enumerate();
    let all: Vec<String> =
        names.map(|(at, c)| format!("\"{}\"::text AS c{at:03}", c.name())).collect();
    Ok(all.join(", "))
}

/// A literal as a field of CSV.
fn field(literal: &str) -> String {
    match literal.strip_prefix('\'').and_then(|l| l.strip_suffix('\'')) {
        Some(text) => format!("\"{text}\""),
        None if literal == "NULL" => String::new(),
        None => literal.to_owned(),
    }
}
