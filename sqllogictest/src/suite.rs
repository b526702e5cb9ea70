//! Runs `*.slt` files over the wire. After each file every materialized view that it left is
//! compared, as a multiset of rows, with its own query run in batch; then all is dropped.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use sqllogictest::{AsyncDB, DBOutput, DefaultColumnType, Runner};
use tokio_postgres::{Client, SimpleQueryMessage};

use crate::server::connect;

/// A connection as the sqllogictest crate wants it: text results by the simple protocol.
pub struct Connection {
    client: Client,
    /// Set for PostgreSQL, which judges the files: its views are plain views.
    judge: bool,
}

/// A server error with its SQLSTATE, so that `statement error` patterns can name it.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct QueryError(String);

impl From<tokio_postgres::Error> for QueryError {
    fn from(e: tokio_postgres::Error) -> QueryError {
        QueryError(match e.as_db_error() {
            Some(db) => format!("{}: {} ({})", db.severity(), db.message(), db.code().code()),
            None => e.to_string(),
        })
    }
}

#[async_trait]
impl AsyncDB for Connection {
    type Error = QueryError;
    type ColumnType = DefaultColumnType;

    async fn run(&mut self, sql: &str) -> Result<DBOutput<DefaultColumnType>, QueryError> {
        let rewritten = if self.judge { for_postgres(sql) } else { sql.to_string() };
        let messages = self.client.simple_query(&rewritten).await?;
        let mut rows = Vec::new();
        let mut columns = None;
        let mut affected = 0;
        for message in messages {
            match message {
                SimpleQueryMessage::RowDescription(d) => columns = Some(d.len()),
                SimpleQueryMessage::Row(row) => {
                    columns = Some(row.len());
                    rows.push((0..row.len()).map(|i| cell(row.get(i))).collect());
                }
                SimpleQueryMessage::CommandComplete(n) => affected = n,
                _ => {}
            }
        }
        Ok(match columns {
            Some(n) => DBOutput::Rows { types: vec![DefaultColumnType::Any; n], rows },
            None => DBOutput::StatementComplete(affected),
        })
    }

    async fn shutdown(&mut self) {}

    fn engine_name(&self) -> &str {
        "millrace"
    }
}

fn cell(value: Option<&str>) -> String {
    match value {
        None => "NULL".to_string(),
        Some("") => "(empty)".to_string(),
        Some(text) => text.to_string(),
    }
}

/// All suites below a folder, in name order.
pub fn files(folder: &Path) -> std::io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            found.extend(files(&path)?);
        } else if path.extension().is_some_and(|e| e == "slt") {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

/// Runs one file; an error says which record failed and how.
pub async fn run_file(port: u16, path: &Path) -> Result<usize, String> {
    let mut runner = Runner::new(|| async {
        connect(port)
            .await
            .map(|client| Connection { client, judge: false })
            .map_err(QueryError::from)
    });
    let outcome = runner.run_file_async(path).await.map_err(|e| e.display(false).to_string());
    runner.shutdown_async().await;
    let client = connect(port).await.map_err(|e| e.to_string())?;
    let checked = match outcome {
        Ok(()) => check_views(&client).await.map_err(|e| format!("{}: {e}", path.display())),
        Err(e) => Err(e),
    };
    clean(&client).await.map_err(|e| format!("{}: cannot clean up: {e}", path.display()))?;
    checked
}

/// What PostgreSQL runs in place of a streaming statement: a plain view is always up to date.
fn for_postgres(sql: &str) -> String {
    sql.replace("MATERIALIZED VIEW", "VIEW")
        .replace(" APPEND ONLY", "")
        .replace("FLUSH", "SELECT 1 WHERE false")
}

/// Runs one file on PostgreSQL (`address` as tokio-postgres takes it) in a schema of its own: the
/// file's expectations are PostgreSQL's answers.
pub async fn judge_file(address: &str, path: &Path) -> Result<(), String> {
    let schema = format!("judge_{}", path.file_stem().and_then(|s| s.to_str()).unwrap_or("x"));
    let prepare = format!(
        "DROP SCHEMA IF EXISTS {schema} CASCADE; CREATE SCHEMA {schema}; SET search_path = {schema}; SET timezone = 'UTC'"
    );
    let mut runner = Runner::new(|| async {
        let (client, connection) = tokio_postgres::connect(address, tokio_postgres::NoTls)
            .await
            .map_err(QueryError::from)?;
        tokio::spawn(connection);
        client.batch_execute(&prepare).await.map_err(QueryError::from)?;
        Ok(Connection { client, judge: true })
    });
    let outcome = runner.run_file_async(path).await.map_err(|e| e.display(false).to_string());
    runner.shutdown_async().await;
    outcome
}

/// Compares every materialized view with its query; returns how many there were.
pub async fn check_views(client: &Client) -> Result<usize, String> {
    let views = rows(client, "SELECT schemaname, matviewname, definition FROM pg_matviews").await?;
    for view in &views {
        let [schema, name, query] = view.as_slice() else {
            return Err("pg_matviews has other columns than expected".to_string());
        };
        let query = query.trim().trim_end_matches(';');
        client
            .batch_execute("SET expression_errors = 'null'")
            .await
            .map_err(|e| QueryError::from(e).to_string())?;
        let mut stored = rows(client, &format!("SELECT * FROM \"{schema}\".\"{name}\"")).await?;
        let mut batch = rows(client, query).await?;
        stored.sort();
        batch.sort();
        if stored != batch {
            let missing: Vec<_> = batch.iter().filter(|r| !stored.contains(r)).take(5).collect();
            let extra: Vec<_> = stored.iter().filter(|r| !batch.contains(r)).take(5).collect();
            return Err(format!(
                "view {name} differs from its query ({} rows stored, {} in batch)\n  missing: \
                 {missing:?}\n  extra: {extra:?}\n  query: {query}",
                stored.len(),
                batch.len()
            ));
        }
    }
    Ok(views.len())
}

/// All rows of a query as text.
pub async fn rows(client: &Client, sql: &str) -> Result<Vec<Vec<String>>, String> {
    let messages =
        client.simple_query(sql).await.map_err(|e| format!("{} in: {sql}", QueryError::from(e)))?;
    Ok(messages
        .iter()
        .filter_map(|m| match m {
            SimpleQueryMessage::Row(r) => Some((0..r.len()).map(|i| cell(r.get(i))).collect()),
            _ => None,
        })
        .collect())
}

/// How long sinks may take to get over what stalls them.
const OVER: Duration = Duration::from_secs(120);

/// FLUSH, with all sinks. FLUSH does not wait for a sink whose target refuses something just now, because a session of
/// the process that was killed still holds a lock, say, or because it took too long to answer; this does.
pub async fn flush(client: &Client) -> Result<(), String> {
    let deadline = Instant::now() + OVER;
    loop {
        let before = stalled(client).await?;
        client
            .batch_execute("FLUSH")
            .await
            .map_err(|e| format!("{} in: FLUSH", QueryError::from(e)))?;
        let after = stalled(client).await?;
        if before.is_empty() && after.is_empty() {
            return Ok(());
        }
        if Instant::now() > deadline {
            return Err(format!("sinks do not go on: {before:?}, {after:?}"));
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Sinks that FLUSH passes over.
async fn stalled(client: &Client) -> Result<Vec<Vec<String>>, String> {
    let mut sinks = rows(client, "SHOW SINKS").await?;
    sinks.retain(|s| s.get(2).is_some_and(|state| state == "stalled" || state == "failed"));
    Ok(sinks)
}

/// Drops every relation and schema that a file left behind.
async fn clean(client: &Client) -> Result<(), String> {
    const RELATIONS: &str = "SELECT n.nspname, c.relname, c.relkind FROM pg_catalog.pg_class c \
        JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace \
        WHERE n.nspname NOT IN ('pg_catalog', 'information_schema', 'millrace_catalog') \
        AND c.relkind IN ('r', 'v', 'm', 'f')";
    for (list, word) in [("SHOW SUBSCRIPTIONS", "SUBSCRIPTION"), ("SHOW SINKS", "SINK")] {
        for found in rows(client, list).await? {
            let Some(name) = found.first() else { continue };
            let sql = format!("DROP {word} IF EXISTS \"{name}\"");
            client.batch_execute(&sql).await.map_err(|e| e.to_string())?;
        }
    }
    for relation in rows(client, RELATIONS).await? {
        let [schema, name, kind] = relation.as_slice() else { continue };
        let word = match kind.as_str() {
            "r" => "TABLE",
            "v" => "VIEW",
            "m" => "MATERIALIZED VIEW",
            _ => "SOURCE",
        };
        // A cascade may have taken it already.
        let drop = format!("DROP {word} IF EXISTS \"{schema}\".\"{name}\" CASCADE");
        client.batch_execute(&drop).await.map_err(|e| QueryError::from(e).to_string())?;
    }
    Ok(())
}
