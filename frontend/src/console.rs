//! Statements that do not come over the PostgreSQL protocol: the web console's SQL box.
//!
//! Each string runs in a session of its own, under a time limit and with a bound on the rows that are
//! kept; values come back as PostgreSQL prints them.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::BytesMut;
use futures::{FutureExt, StreamExt};
use millrace_common::{SqlError, SqlState};

use crate::server::{Activity, Shared};
use crate::session::cursor::columns_of;
use crate::session::{Outcome, Session, timed_out};

/// What one run may take.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub rows: usize,
    pub bytes: usize,
    pub time: Duration,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits { rows: 1000, bytes: 4 << 20, time: Duration::from_secs(30) }
    }
}

/// What came of one statement.
#[derive(Debug, Default)]
pub struct Answer {
    pub tag: String,
    /// Their names; empty: the statement returns no rows.
    pub columns: Vec<String>,
    pub rows: Vec<Vec<Option<String>>>,
    /// There are more rows than the limits allow.
    pub truncated: bool,
    pub notices: Vec<String>,
    pub elapsed: Duration,
}

/// Runs a string of statements. The answers of those before the first error come with it.
pub async fn run(
    shared: &Arc<Shared>,
    address: String,
    sql: &str,
    limits: Limits,
) -> (Vec<Answer>, Option<SqlError>) {
    let user = shared.config.users.first().cloned().unwrap_or_default();
    let database = shared.config.database.clone();
    let activity = Activity {
        user: user.clone(),
        database: database.clone(),
        application: "console".to_owned(),
        address,
        ..Activity::default()
    };
    let Some((pid, _)) = shared.register(activity) else {
        let e = SqlError::new(SqlState::TOO_MANY_CONNECTIONS, "sorry, too many clients already");
        return (vec![], Some(e));
    };
    let _registered = Registered { shared, pid };
    let mut session = Session::new(shared.clone(), pid, user, database);
    let mut answers = Vec::new();
    let work = AssertUnwindSafe(run_all(&mut session, sql, limits, &mut answers)).catch_unwind();
    let error = tokio::select! {
        result = work => match result {
            Ok(result) => result.err(),
            Err(_) => Some(SqlError::internal("the statement panicked")),
        },
        () = tokio::time::sleep(limits.time) => Some(timed_out()),
    };
    (answers, error)
}

/// A place in the registry of connections, given back however the run ends.
struct Registered<'a> {
    shared: &'a Arc<Shared>,
    pid: i32,
}

impl Drop for Registered<'_> {
    fn drop(&mut self) {
        self.shared.unregister(self.pid);
    }
}

async fn run_all(
    session: &mut Session,
    sql: &str,
    limits: Limits,
    answers: &mut Vec<Answer>,
) -> Result<(), SqlError> {
    let mut left = limits;
    for parsed in crate::statements::parse(sql)? {
        let started = Instant::now();
        session.cancel = session.shared.begin_statement(session.pid, &parsed.text);
        let cancel = session.cancel.clone();
        let mut answer = tokio::select! {
            () = cancel.cancelled() => return Err(crate::session::canceled()),
            answer = async {
                let outcome = session.execute(&parsed, &[]).await?;
                gather(outcome, &mut left).await
            } => answer?,
        };
        answer.elapsed = started.elapsed();
        answer.notices = std::mem::take(&mut session.notices)
            .into_iter()
            .map(|(severity, n)| format!("{severity}: {}", n.message))
            .collect();
        answers.push(answer);
    }
    Ok(())
}

/// The rows of an outcome as text, as far as the limits go.
async fn gather(outcome: Outcome, left: &mut Limits) -> Result<Answer, SqlError> {
    let mut rows = match outcome {
        Outcome::Empty => return Ok(Answer::default()),
        Outcome::Command(tag) => return Ok(Answer { tag, ..Answer::default() }),
        Outcome::Rows(rows) => rows,
        Outcome::CopyIn(_) | Outcome::CopyOut(_) => {
            return Err(SqlError::unsupported("COPY in the console").with_hint("Use psql."));
        }
    };
    let columns = rows.fields.iter().map(|f| f.name.clone()).collect();
    let mut answer = Answer { columns, ..Answer::default() };
    let mut text = BytesMut::new();
    while let Some(batch) = rows.stream.next().await {
        let batch = batch?;
        let values = columns_of(&batch, &rows.fields)?;
        for row in 0..batch.num_rows() {
            if left.rows == 0 || left.bytes == 0 {
                answer.truncated = true;
                break;
            }
            left.rows -= 1;
            let mut cells = Vec::with_capacity(values.len());
            for (i, column) in values.iter().enumerate() {
                if batch.column(i).is_null(row) {
                    cells.push(None);
                    continue;
                }
                text.clear();
                column.put_text(row, &mut text)?;
                left.bytes = left.bytes.saturating_sub(text.len());
                cells.push(Some(String::from_utf8_lossy(&text).into_owned()));
            }
            answer.rows.push(cells);
        }
        if answer.truncated {
            break;
        }
    }
    answer.tag = rows.tag.replace("{n}", &answer.rows.len().to_string());
    Ok(answer)
}
