//! A session's statements: what became of each.

use std::collections::BTreeMap;
use std::sync::Mutex;

use futures::SinkExt;
use tokio_postgres::{Client, Error, SimpleQueryMessage};

use crate::locked;

/// What became of a statement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    Done,
    /// The server says that it did not take place.
    Refused,
    /// It may have taken place, now or until the server is gone.
    Unknown,
}

/// Errors by SQLSTATE, and what must not be among them.
#[derive(Default)]
pub struct Tally {
    counts: Mutex<BTreeMap<String, u64>>,
    wrong: Mutex<Option<String>>,
}

/// States in which a statement may end while the store fails, the server dies and others write the same rows.
const EXPECTED: &[&str] = &[
    // Unknown outcomes; the server ends.
    "08007", "57P01", "57P02", "57P03", // Conflicts: of transactions, of keys.
    "40001", "23505", // The store: it fails, it is full.
    "58030", "53100",
    "53200", // A relation that is being created, or has failed; one that was dropped.
    "55000", "42P01", // Too late: of a read, of a cancelled statement.
    "57014", "57P05", "25P02", // Changes that are no longer kept.
    "72000",
];

impl Tally {
    pub fn count(&self, what: &str) {
        *locked(&self.counts).entry(what.to_string()).or_default() += 1;
    }

    pub fn counts(&self) -> BTreeMap<String, u64> {
        locked(&self.counts).clone()
    }

    /// The first thing that is wrong is the one that is reported.
    pub fn is_wrong(&self, what: String) {
        locked(&self.wrong).get_or_insert(what);
    }

    pub fn wrong(&self) -> Option<String> {
        locked(&self.wrong).clone()
    }

    /// Counts the outcome of `statement` and judges it.
    pub fn fate<T>(&self, statement: &str, outcome: &Result<T, Error>) -> Fate {
        let error = match outcome {
            Ok(_) => {
                self.count("done");
                return Fate::Done;
            }
            Err(e) => e,
        };
        let Some(db) = error.as_db_error() else {
            self.count("connection lost");
            return Fate::Unknown;
        };
        let code = db.code().code();
        self.count(code);
        if !EXPECTED.contains(&code) {
            let detail = db.detail().unwrap_or_default();
            self.is_wrong(format!("{} ({code}) {detail} in: {statement}", db.message()));
        }
        match code {
            "08007" | "57P01" | "57P02" | "57P03" => Fate::Unknown,
            _ => Fate::Refused,
        }
    }

    pub async fn execute(&self, client: &Client, sql: &str) -> Fate {
        self.fate(sql, &client.batch_execute(sql).await)
    }

    pub async fn copy(&self, client: &Client, table: &str, lines: String) -> Fate {
        let sql = format!("COPY {table} FROM STDIN");
        let copied = async {
            let sink = client.copy_in(&sql).await?;
            futures::pin_mut!(sink);
            for part in lines.as_bytes().chunks(8 << 10) {
                sink.send(bytes::Bytes::copy_from_slice(part)).await?;
            }
            sink.finish().await
        };
        let copied = copied.await;
        if let Ok(rows) = &copied
            && *rows != lines.lines().count() as u64
        {
            self.is_wrong(format!("{sql} of {} lines: {rows} rows", lines.lines().count()));
        }
        self.fate(&sql, &copied)
    }

    /// BEGIN, the steps, COMMIT. What fails before COMMIT did not take place, whatever became of the session.
    pub async fn block(&self, client: &Client, steps: &[String]) -> Fate {
        for sql in ["BEGIN".to_string()].iter().chain(steps) {
            let outcome = client.batch_execute(sql).await;
            if self.fate(sql, &outcome) != Fate::Done {
                self.roll_back(client).await;
                return Fate::Refused;
            }
        }
        let outcome = client.batch_execute("COMMIT").await;
        let fate = self.fate("COMMIT", &outcome);
        if fate != Fate::Done {
            self.roll_back(client).await;
        }
        fate
    }

    pub async fn roll_back(&self, client: &Client) {
        if !client.is_closed() {
            let _ = self.fate("ROLLBACK", &client.batch_execute("ROLLBACK").await);
        }
    }
}

/// All rows of a query, NULL as `None`.
pub async fn rows(client: &Client, sql: &str) -> Result<Vec<Vec<Option<String>>>, Error> {
    let messages = client.simple_query(sql).await?;
    Ok(messages
        .iter()
        .filter_map(|m| match m {
            SimpleQueryMessage::Row(r) => {
                Some((0..r.len()).map(|i| r.get(i).map(str::to_owned)).collect())
            }
            _ => None,
        })
        .collect())
}

/// The numbers of a query without NULL.
pub async fn numbers(client: &Client, sql: &str) -> Result<Vec<Vec<i64>>, Error> {
    let rows = rows(client, sql).await?;
    let number = |v: Option<String>| v.and_then(|v| v.parse().ok()).unwrap_or(i64::MIN);
    Ok(rows.into_iter().map(|r| r.into_iter().map(number).collect()).collect())
}

pub fn describe(error: &Error) -> String {
    match error.as_db_error() {
        Some(db) => format!("{} ({})", db.message(), db.code().code()),
        None => error.to_string(),
    }
}
