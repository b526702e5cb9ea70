//! The demo over a connection to a server or cluster that runs. Its sources and views are in a schema of their own.

use std::str::FromStr;
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::Mutex;
use tokio_postgres::config::Host;
use tokio_postgres::{Client, Config, NoTls, Row};

use super::{LEAVES, Place, Reading, view_names};

/// Where the demo's sources and views are.
const SCHEMA: &str = "millrace_demo";
const CONNECT: Duration = Duration::from_secs(10);
/// Between attempts after a connection was lost.
const PAUSE: Duration = Duration::from_millis(500);
/// How long the server may take to drop the schema when the demo ends.
const CLEANUP: Duration = Duration::from_secs(60);

/// A server or cluster, by its address.
pub struct Remote {
    config: Config,
    session: Mutex<Client>,
}

/// The addresses, without what else may stand beside them: a password.
fn place(config: &Config) -> String {
    let hosts = config.get_hosts().iter().map(|host| match host {
        Host::Tcp(name) => name.clone(),
        #[cfg(unix)]
        Host::Unix(path) => path.display().to_string(),
    });
    let port = |at: usize| config.get_ports().get(at).or(config.get_ports().first());
    let place = |(at, host)| format!("{host}:{}", port(at).copied().unwrap_or(5432));
    hosts.enumerate().map(place).collect::<Vec<_>>().join(", ")
}

/// Where to connect: `HOST:PORT`, or what psql takes.
fn parse(text: &str) -> Result<Config, String> {
    let mut config = match text.contains("://") || text.contains('=') {
        true => Config::from_str(text),
        false => Config::from_str(&format!("postgres://{text}")),
    }
    .map_err(|e| {
        format!("the address of --connect is neither HOST:PORT nor what psql takes: {}", told(&e))
    })?;
    if config.get_user().is_none() {
        config.user("root");
    }
    if config.get_dbname().is_none() {
        config.dbname("dev");
    }
    if config.get_password().is_none()
        && let Ok(password) = std::env::var("PGPASSWORD")
    {
        config.password(password);
    }
    config.connect_timeout(CONNECT);
    config.application_name("millrace demo");
    Ok(config)
}

/// An error with its cause, which alone says what is wrong.
fn told(error: &tokio_postgres::Error) -> String {
    if let Some(db) = error.as_db_error() {
        return format!("{} (SQLSTATE {})", db.message(), db.code().code());
    }
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(inner) = cause {
        text += &format!(": {inner}");
        cause = inner.source();
    }
    text
}

async fn session(config: &Config) -> Result<Client, tokio_postgres::Error> {
    let (client, connection) = config.connect(NoTls).await?;
    // It ends with the client, whose calls have its errors.
    tokio::spawn(connection);
    client.batch_execute(&format!("SET search_path = {SCHEMA}")).await?;
    Ok(client)
}

impl Remote {
    /// Connects, and makes the schema.
    pub async fn connect(address: &str) -> Result<Remote, String> {
        let config = parse(address)?;
        let session = session(&config)
            .await
            .map_err(|e| format!("cannot connect to {}: {}", place(&config), told(&e)))?;
        let remote = Remote { config, session: Mutex::new(session) };
        remote.run(&format!("CREATE SCHEMA {SCHEMA}")).await.map_err(|reason| {
            format!(
                "cannot make the schema \"{SCHEMA}\" for the demo: {reason}. If an earlier demo has left it: \
                 DROP SCHEMA {SCHEMA} CASCADE"
            )
        })?;
        Ok(remote)
    }

    /// Drops what the demo has made.
    pub async fn clean_up(&self) -> Result<(), String> {
        let sql = format!("DROP SCHEMA IF EXISTS {SCHEMA} CASCADE");
        let dropped = tokio::time::timeout(CLEANUP, async {
            // The frontend may have been lost since: another one does as well.
            match self.run(&sql).await {
                Ok(()) => Ok(()),
                Err(_) => {
                    self.reconnect().await?;
                    self.run(&sql).await
                }
            }
        });
        let reason = match dropped.await {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(reason)) => reason,
            Err(_) => format!("no answer within {} s", CLEANUP.as_secs()),
        };
        Err(format!("the schema \"{SCHEMA}\" is left behind: {reason}. To drop it: {sql}"))
    }

    async fn reconnect(&self) -> Result<(), String> {
        tokio::time::sleep(PAUSE).await;
        let session = session(&self.config).await.map_err(|e| told(&e))?;
        *self.session.lock().await = session;
        Ok(())
    }

    async fn query(&self, sql: &str) -> Result<Vec<Row>, String> {
        self.session.lock().await.query(sql, &[]).await.map_err(|e| told(&e))
    }
}

fn count(row: &Row, column: usize) -> u64 {
    let value: Option<i64> = row.get(column);
    value.and_then(|n| u64::try_from(n).ok()).unwrap_or(0)
}

#[async_trait]
impl Place for Remote {
    async fn run(&self, sql: &str) -> Result<(), String> {
        self.session.lock().await.batch_execute(sql).await.map_err(|e| told(&e))
    }

    async fn readings(&self) -> Result<Vec<Reading>, String> {
        if self.session.lock().await.is_closed() {
            self.reconnect().await?;
        }
        let jobs = format!(
            "SELECT name::text, state, lag_ms, \"rows\", state_bytes FROM millrace_catalog.jobs \
             WHERE schema_name = '{SCHEMA}'"
        );
        let leaves = LEAVES.map(|leaf| format!("'{leaf}'")).join(", ");
        let operators = format!(
            "SELECT relation_name::text, \
                    sum(CASE WHEN operator IN ({leaves}) THEN rows_out ELSE 0 END)::bigint, \
                    sum(cache_hits)::bigint, sum(cache_hits + cache_misses)::bigint \
             FROM millrace_catalog.operators WHERE schema_name = '{SCHEMA}' GROUP BY relation_name"
        );
        let (jobs, operators) = (self.query(&jobs).await?, self.query(&operators).await?);
        let of = |rows: &[Row], name: &str| {
            rows.iter().position(|row| row.get::<_, Option<&str>>(0) == Some(name))
        };
        let reading = |name: &str| {
            let mut reading = Reading::default();
            if let Some(row) = of(&jobs, name).map(|at| &jobs[at]) {
                reading.state = row.get::<_, Option<String>>(1).unwrap_or_default();
                let lag: Option<i64> = row.get(2);
                reading.lag_ms = lag.and_then(|ms| u64::try_from(ms).ok());
                (reading.rows, reading.state_bytes) = (count(row, 3), count(row, 4));
            }
            if let Some(row) = of(&operators, name).map(|at| &operators[at]) {
                reading.rows_read = count(row, 1);
                (reading.hits, reading.lookups) = (count(row, 2), count(row, 3));
            }
            reading
        };
        Ok(view_names().map(reading).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_alone_is_enough() {
        let config = parse("db.example:4566").unwrap();
        assert_eq!((config.get_user(), config.get_dbname()), (Some("root"), Some("dev")));
        assert_eq!(config.get_ports(), [4566]);
        let config = parse("postgres://me:secret@[::1]:7/other").unwrap();
        assert_eq!((config.get_user(), config.get_dbname()), (Some("me"), Some("other")));
        assert_eq!(config.get_password(), Some(&b"secret"[..]));
        let config = parse("host=h port=9 user=u").unwrap();
        assert_eq!((config.get_user(), config.get_dbname()), (Some("u"), Some("dev")));
        // It names the mistake, and not the address: that may hold a password.
        let error = parse("me:secret@db:no-port").unwrap_err();
        assert!(error.contains("HOST:PORT") && error.contains("port"), "{error}");
        assert!(!error.contains("secret"), "{error}");
    }
}
