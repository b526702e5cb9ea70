//! A table of a PostgreSQL server, exactly once.
//!
//! A publication is one transaction there: the rows, and the sequence in the row of this sink in
//! `millrace_sink`, a small table beside the target. The row is locked first, so two processes that publish the
//! same change (one of them fenced, not knowing it) do so one after the other, and the second finds it done.
//!
//! Values travel as arrays of text, cast to the target's types by the server as an assignment would.

use std::time::Duration;

use async_trait::async_trait;
use bytes::BytesMut;
use millrace_common::{SqlError, SqlState};
use millrace_rpc::catalog::Relation;
use tokio::sync::Mutex;
use tokio_postgres::types::ToSql;
use tokio_postgres::{Client, Config, NoTls, Transaction};

use super::{Change, Definition, Publication, Rows, SinkTarget, SinkType, known, required};
use crate::error::ConnectorError;
use crate::options::invalid;

const OPTIONS: &[&str] =
    &["url", "host", "port", "user", "password", "database", "schema", "table"];
/// Rows of one statement.
const BATCH_ROWS: usize = 4_096;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// For one statement; a server that does not answer is asked again later.
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(120);

/// A lock that somebody else holds there is a reason to tell, and a session whose process is gone must not hold one
/// for long: its successor waits for this sink's row of progress.
const SESSION: &str = "SET lock_timeout = '20s'; SET idle_in_transaction_session_timeout = '60s'";
const KEEPALIVE: Duration = Duration::from_secs(15);

type Result<T, E = ConnectorError> = std::result::Result<T, E>;

pub struct PostgresTarget {
    config: Config,
    schema: String,
    table: String,
    definition: Definition,
    /// Opened when first needed, and anew after a failure.
    session: Mutex<Option<Session>>,
}

struct Session {
    client: Client,
    statements: Statements,
}

/// What the target's row of progress says of a change.
#[derive(Debug, PartialEq, Eq)]
enum Standing {
    /// The change comes next.
    Due,
    /// The target has it already.
    Done,
    /// The target had changes that it no longer has.
    Lost,
}

impl Standing {
    /// `had`: what the row says; `None`: there is none.
    fn of(had: Option<i64>, change: &Publication) -> Standing {
        match had {
            Some(had) if had >= number(change.sequence) => Standing::Done,
            Some(had) if had >= number(change.known) => Standing::Due,
            _ => Standing::Lost,
        }
    }
}

/// SQL for the target's columns and types.
#[derive(Debug)]
struct Statements {
    insert: String,
    delete: String,
    /// The same for keys with NULLs in them, which no index finds.
    delete_nulls: String,
}

impl PostgresTarget {
    pub fn new(relation: &Relation) -> std::result::Result<PostgresTarget, SqlError> {
        known(relation, OPTIONS)?;
        if relation.option("encode").is_some() {
            return Err(invalid("a postgres sink has no ENCODE").with_hint(
                "Say type = 'append-only' or type = 'upsert' in the WITH clause instead.",
            ));
        }
        let definition = Definition::of(relation)?;
        match definition.kind {
            SinkType::Changelog => {
                return Err(SqlError::unsupported("FORMAT DEBEZIUM of a postgres sink")
                    .with_hint("Use type = 'append-only' or type = 'upsert'."));
            }
            SinkType::Upsert if definition.key.is_empty() => {
                return Err(invalid("an upsert sink needs a key"));
            }
            _ => {}
        }
        let table = required(relation, "table", "'orders'")?;
        let (schema, table) = match (relation.option("schema"), table.split_once('.')) {
            (Some(schema), _) => (schema.to_owned(), table.to_owned()),
            (None, Some((schema, table))) => (schema.to_owned(), table.to_owned()),
            (None, None) => ("public".to_owned(), table.to_owned()),
        };
        let session = Mutex::new(None);
        Ok(PostgresTarget { config: config(relation)?, schema, table, definition, session })
    }

    async fn connect(&self) -> Result<Session> {
        let failed = |e: tokio_postgres::Error| failed("connecting to PostgreSQL", &e);
        let connecting = tokio::time::timeout(CONNECT_TIMEOUT * 2, self.config.connect(NoTls));
        let (mut client, connection) = match connecting.await {
            Ok(connected) => connected.map_err(failed)?,
            Err(_) => return Err(silent("connecting")),
        };
        tokio::spawn(async move {
            // Its end is seen by whoever uses the client.
            if let Err(error) = connection.await {
                tracing::debug!(%error, "a sink's connection ended");
            }
        });
        answer(client.batch_execute(SESSION), "setting up the session").await?;
        let statements = self.prepare_target(&mut client).await?;
        Ok(Session { client, statements })
    }

    /// Looks at the target's table and makes the one of sinks' progress.
    async fn prepare_target(&self, client: &mut Client) -> Result<Statements> {
        let place = format!("{}.{}", ident(&self.schema), ident(&self.table));
        let rows = answer(
            client.query(
                "SELECT attname::text, format_type(atttypid, -1) FROM pg_attribute \
                 WHERE attrelid = to_regclass($1::text) AND attnum > 0 AND NOT attisdropped",
                &[&place],
            ),
            "looking at the target's columns",
        )
        .await?;
        if rows.is_empty() {
            return Err(ConnectorError::Target(format!("the target table {place} does not exist")));
        }
        let types: Vec<(String, String)> = rows.iter().map(|r| (r.get(0), r.get(1))).collect();
        let statements = Statements::new(&place, &self.definition, &types)?;
        let progress = self.progress();
        let made = format!(
            "CREATE TABLE IF NOT EXISTS {progress} (sink text PRIMARY KEY, name text NOT NULL, \
             sequence bigint NOT NULL, epoch bigint NOT NULL, published timestamptz NOT NULL DEFAULT now())"
        );
        let exists = answer(
            client.query_one("SELECT to_regclass($1::text) IS NOT NULL", &[&progress]),
            "looking for the table of sinks",
        )
        .await?;
        if !exists.get::<_, bool>(0) {
            answer(client.batch_execute(&made), "creating the table of sinks").await?;
        }
        Ok(statements)
    }

    /// Makes this sink's row of progress, in the transaction of its first change: a sink that never publishes
    /// one leaves nothing. Never later: a row that is gone then is not to begin anew.
    async fn register(&self, transaction: &Transaction<'_>) -> Result<()> {
        let row = format!(
            "INSERT INTO {} (sink, name, sequence, epoch) VALUES ($1, $2, 0, 0) \
             ON CONFLICT (sink) DO NOTHING",
            self.progress()
        );
        answer(
            transaction.execute(&row, &[&self.definition.id, &self.definition.name]),
            "registering the sink",
        )
        .await
        .map(drop)
    }

    fn progress(&self) -> String {
        format!("{}.millrace_sink", ident(&self.schema))
    }

    async fn apply(&self, session: &mut Session, change: &Publication) -> Result<()> {
        let Session { client, statements } = session;
        let transaction = answer(client.transaction(), "beginning a transaction").await?;
        if change.known == 0 {
            self.register(&transaction).await?;
        }
        let progress = self.progress();
        let lock = format!("SELECT sequence FROM {progress} WHERE sink = $1 FOR UPDATE");
        let row = answer(
            transaction.query_opt(&lock, &[&self.definition.id]),
            "reading the sink's progress",
        )
        .await?;
        let had: Option<i64> = row.map(|row| row.get(0));
        match Standing::of(had, change) {
            Standing::Due => {}
            Standing::Done => return answer(transaction.rollback(), "ending a transaction").await,
            Standing::Lost => return Err(self.lost(had, change.known)),
        }
        for chunk in &change.chunks {
            self.write(&transaction, statements, &Rows::new(chunk)?).await?;
        }
        let done = format!(
            "UPDATE {progress} SET sequence = $2, epoch = $3, published = now() WHERE sink = $1"
        );
        let (sequence, epoch) = (number(change.sequence), number(change.epoch.0));
        answer(
            transaction.execute(&done, &[&self.definition.id, &sequence, &epoch]),
            "noting the sink's progress",
        )
        .await?;
        answer(transaction.commit(), "committing").await
    }

    /// The target was restored from an older state, or somebody has removed the sink's row there: going on would leave out
    /// what came in between.
    fn lost(&self, had: Option<i64>, known: u64) -> ConnectorError {
        let (progress, id) = (self.progress(), &self.definition.id);
        let now = match had {
            Some(had) => format!("its row in {progress} is at change {had}"),
            None => format!("its row in {progress} is gone"),
        };
        let message =
            format!("the target has lost changes of this sink: it had change {known}, and {now}");
        let quoted = |text: &str| format!("'{}'", text.replace('\'', "''"));
        let (sink, name) = (quoted(id), quoted(&self.definition.name));
        let error = SqlError::new(SqlState::OBJECT_NOT_IN_PREREQUISITE_STATE, message);
        ConnectorError::Sql(error.with_hint(format!(
            "Drop the sink, empty the table and create the sink anew. If the table does have that change, say so there: \
             INSERT INTO {progress} (sink, name, sequence, epoch) VALUES ({sink}, {name}, {known}, 0) \
             ON CONFLICT (sink) DO UPDATE SET sequence = EXCLUDED.sequence; the sink then goes on by itself."
        )))
    }

    /// Deletions first: a key may move from one row to another.
    async fn write(
        &self,
        transaction: &Transaction<'_>,
        statements: &Statements,
        rows: &Rows<'_>,
    ) -> Result<()> {
        let (mut deleted, mut inserted, mut nulls) = (Vec::new(), Vec::new(), Vec::new());
        let upsert = self.definition.kind == SinkType::Upsert;
        let null_key = |row: usize| {
            upsert && self.definition.key.iter().any(|&k| rows.columns[k].is_null(row))
        };
        for change in rows.changes(&self.definition.key)? {
            let (Change::Insert(row) | Change::Delete(row) | Change::Update { new: row, .. }) =
                change;
            if null_key(row) {
                // To a unique index two NULLs differ: the old row does not give way by itself.
                nulls.push(row);
                if matches!(change, Change::Delete(_)) {
                    continue;
                }
            }
            match change {
                Change::Insert(row) | Change::Update { new: row, .. } => inserted.push(row),
                Change::Delete(row) if upsert => deleted.push(row),
                Change::Delete(_) => {}
            }
        }
        for (sql, positions) in [(&statements.delete, &deleted), (&statements.delete_nulls, &nulls)]
        {
            for batch in positions.chunks(BATCH_ROWS) {
                let columns = texts(rows, batch, &self.definition.key)?;
                execute(transaction, sql, &columns).await?;
            }
        }
        let all: Vec<usize> = (0..self.definition.columns.len()).collect();
        for batch in inserted.chunks(BATCH_ROWS) {
            let columns = texts(rows, batch, &all)?;
            execute(transaction, &statements.insert, &columns).await?;
        }
        Ok(())
    }
}

#[async_trait]
impl SinkTarget for PostgresTarget {
    async fn check(&self) -> Result<()> {
        let mut session = self.connect().await?;
        // Only tried: the creation may still fail.
        let transaction = answer(session.client.transaction(), "beginning a transaction").await?;
        self.register(&transaction).await?;
        answer(transaction.rollback(), "ending a transaction").await?;
        *self.session.lock().await = Some(session);
        Ok(())
    }

    async fn publish(&self, change: &Publication) -> Result<()> {
        let mut kept = self.session.lock().await;
        // Taken: a publication that is cut off leaves no session in the middle of a transaction.
        let mut session = match kept.take().filter(|s| !s.client.is_closed()) {
            Some(session) => session,
            None => self.connect().await?,
        };
        self.apply(&mut session, change).await?;
        *kept = Some(session);
        Ok(())
    }
}

impl Statements {
    fn new(place: &str, of: &Definition, types: &[(String, String)]) -> Result<Statements> {
        let type_of = |name: &str| {
            let found = types.iter().find(|(n, _)| n == name).map(|(_, t)| t.as_str());
            found.ok_or_else(|| {
                ConnectorError::Target(format!("the target table {place} has no column \"{name}\""))
            })
        };
        let names: Vec<String> = of.columns.iter().map(|c| ident(&c.name)).collect();
        let mut values = Vec::new();
        for column in &of.columns {
            values.push(format!("u.{}::{}", ident(&column.name), type_of(&column.name)?));
        }
        let unnest = |names: &[String]| {
            let arrays: Vec<String> = (1..=names.len()).map(|i| format!("${i}::text[]")).collect();
            format!("unnest({}) AS u({})", arrays.join(", "), names.join(", "))
        };
        let mut insert = format!(
            "INSERT INTO {place} ({}) SELECT {} FROM {}",
            names.join(", "),
            values.join(", "),
            unnest(&names)
        );
        let key: Vec<String> = of.key.iter().map(|k| names[*k].clone()).collect();
        if of.kind == SinkType::Upsert {
            let rest: Vec<String> = names
                .iter()
                .filter(|n| !key.contains(n))
                .map(|n| format!("{n} = EXCLUDED.{n}"))
                .collect();
            let action = match rest.is_empty() {
                true => "NOTHING".to_owned(),
                false => format!("UPDATE SET {}", rest.join(", ")),
            };
            insert.push_str(&format!(" ON CONFLICT ({}) DO {action}", key.join(", ")));
        }
        let mut same = Vec::new();
        for (k, name) in of.key.iter().zip(&key) {
            let value = format!("u.{name}::{}", type_of(&of.columns[*k].name)?);
            same.push((format!("t.{name}"), value));
        }
        let delete = |operator: &str| {
            let equal: Vec<String> =
                same.iter().map(|(t, u)| format!("{t} {operator} {u}")).collect();
            let from = unnest(&key);
            format!("DELETE FROM {place} AS t USING {from} WHERE {}", equal.join(" AND "))
        };
        let (delete, delete_nulls) = (delete("="), delete("IS NOT DISTINCT FROM"));
        Ok(Statements { insert, delete, delete_nulls })
    }
}

/// The values of some rows, column by column.
fn texts(
    rows: &Rows<'_>,
    positions: &[usize],
    columns: &[usize],
) -> Result<Vec<Vec<Option<String>>>> {
    let mut buffer = BytesMut::new();
    let mut out = Vec::with_capacity(columns.len());
    for &column in columns {
        let mut values = Vec::with_capacity(positions.len());
        for &row in positions {
            values.push(rows.text(row, column, &mut buffer)?.map(str::to_owned));
        }
        out.push(values);
    }
    Ok(out)
}

async fn execute(
    transaction: &Transaction<'_>,
    sql: &str,
    columns: &[Vec<Option<String>>],
) -> Result<()> {
    let params: Vec<&(dyn ToSql + Sync)> =
        columns.iter().map(|c| c as &(dyn ToSql + Sync)).collect();
    answer(transaction.execute(sql, &params), "writing rows").await.map(drop)
}

/// Waits for the server, but not for ever.
async fn answer<T>(
    asked: impl Future<Output = std::result::Result<T, tokio_postgres::Error>>,
    doing: &str,
) -> Result<T> {
    match tokio::time::timeout(STATEMENT_TIMEOUT, asked).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(e)) => Err(failed(doing, &e)),
        Err(_) => Err(silent(doing)),
    }
}

fn failed(doing: &str, error: &tokio_postgres::Error) -> ConnectorError {
    match error.as_db_error() {
        Some(db) => {
            let detail = db.detail().map_or(String::new(), |d| format!(" ({d})"));
            let code = db.code().code();
            ConnectorError::Target(format!(
                "the target refuses, {doing}: {}{detail} [SQLSTATE {code}]",
                db.message()
            ))
        }
        None => ConnectorError::target(doing, error),
    }
}

fn silent(doing: &str) -> ConnectorError {
    ConnectorError::Target(format!("the target does not answer, {doing}"))
}

/// PostgreSQL has no unsigned numbers; ours never reach the sign.
fn number(n: u64) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}

fn ident(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

fn config(relation: &Relation) -> std::result::Result<Config, SqlError> {
    let mut config = match relation.option("url") {
        Some(url) => url.parse::<Config>().map_err(|e| {
            invalid(format!("invalid option \"url\": {e}"))
                .with_hint("Give it as 'host=… user=… dbname=…' or 'postgresql://user@host/db'.")
        })?,
        None => Config::new(),
    };
    if let Some(host) = relation.option("host") {
        config.host(host);
    }
    if let Some(port) = relation.option("port") {
        let port = port.parse().map_err(|_| {
            invalid(format!("invalid value for option \"port\": \"{port}\""))
                .with_hint("Give a number.")
        })?;
        config.port(port);
    }
    if let Some(user) = relation.option("user") {
        config.user(user);
    }
    if let Some(password) = relation.option("password") {
        config.password(password);
    }
    if let Some(database) = relation.option("database") {
        config.dbname(database);
    }
    if config.get_hosts().is_empty() {
        required(relation, "host", "'127.0.0.1'")?;
    }
    config.connect_timeout(CONNECT_TIMEOUT).application_name("millrace sink");
    config.keepalives_idle(KEEPALIVE).keepalives_interval(KEEPALIVE).keepalives_retries(3);
    Ok(config)
}

#[cfg(test)]
mod tests {
    use millrace_common::SqlType;

    use super::super::SinkColumn;
    use super::*;

    #[test]
    fn a_target_that_has_gone_back_is_not_written() {
        let epoch = millrace_common::Epoch::ZERO;
        let of = |had, sequence, known| {
            Standing::of(had, &Publication { sequence, known, epoch, chunks: Vec::new() })
        };
        // The first change, its row just made; the next ones; one that the log did not know of.
        assert_eq!(of(Some(0), 1, 0), Standing::Due);
        assert_eq!(of(Some(4), 5, 4), Standing::Due);
        assert_eq!(of(Some(5), 5, 4), Standing::Done);
        assert_eq!(of(Some(4), 6, 3), Standing::Due);
        // Another process was faster.
        assert_eq!(of(Some(9), 5, 4), Standing::Done);
        assert_eq!(of(None, 5, 4), Standing::Lost);
        assert_eq!(of(Some(0), 5, 4), Standing::Lost);
        assert_eq!(of(Some(3), 5, 4), Standing::Lost);
    }

    #[test]
    fn statements_cast_to_the_targets_types_and_quote_names() {
        let column = |name: &str| SinkColumn { name: name.into(), sql_type: SqlType::Int };
        let of = Definition {
            id: "1".into(),
            name: "s".into(),
            kind: SinkType::Upsert,
            columns: vec![column("a"), column("b\"c")],
            key: vec![0],
        };
        let types = [("b\"c".to_owned(), "numeric".to_owned()), ("a".into(), "integer".into())];
        let s = Statements::new("\"p\".\"t\"", &of, &types).unwrap();
        assert_eq!(
            s.insert,
            "INSERT INTO \"p\".\"t\" (\"a\", \"b\"\"c\") SELECT u.\"a\"::integer, u.\"b\"\"c\"::numeric \
             FROM unnest($1::text[], $2::text[]) AS u(\"a\", \"b\"\"c\") \
             ON CONFLICT (\"a\") DO UPDATE SET \"b\"\"c\" = EXCLUDED.\"b\"\"c\""
        );
        assert_eq!(
            s.delete,
            "DELETE FROM \"p\".\"t\" AS t USING unnest($1::text[]) AS u(\"a\") \
             WHERE t.\"a\" = u.\"a\"::integer"
        );
        assert!(Statements::new("t", &of, &types[..1]).is_err());
    }
}
