//! What a client is told whose statement waits because a process of the cluster is missing.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use millrace_common::{SqlError, SqlState};
use millrace_planner::parser::with_changes_rows;
use millrace_planner::{ParsedStatement, Statement};
use sqlparser::ast::Statement as Sql;

use super::{LiveNotices, Session};
use crate::cluster::Cluster;

/// How often a statement that takes long looks whether a process is missing. One that is done before says nothing.
const EVERY: Duration = Duration::from_secs(2);

/// Whom a statement tells, and where it looks.
pub struct Observer {
    live: Arc<LiveNotices>,
    cluster: Arc<dyn Cluster>,
}

impl Session {
    /// Of a statement that may need another process than this one; `None`: it does not, or its client wants no notices.
    pub fn observer(&self, parsed: &ParsedStatement) -> Option<Observer> {
        let is_told = needs_others(&parsed.statement) && self.is_told("NOTICE");
        is_told
            .then(|| Observer { live: Arc::clone(&self.live), cluster: Arc::clone(self.cluster()) })
    }
}

/// Whether it is more than a query, whose wait has a limit of its own.
fn needs_others(statement: &Statement) -> bool {
    match statement {
        Statement::Sql(sql) => match sql.as_ref() {
            Sql::Query(query) => with_changes_rows(query),
            Sql::Insert(_)
            | Sql::Update(_)
            | Sql::Delete(_)
            | Sql::Copy { .. }
            | Sql::Commit { .. }
            | Sql::Execute { .. } => true,
            _ => false,
        },
        Statement::Show(_) | Statement::Explain(_) | Statement::FetchWait { .. } => false,
        _ => true,
    }
}

/// Awaits a statement. If it takes long while a process is missing, its client is told so, once.
pub async fn observed<T>(observer: Option<Observer>, work: impl Future<Output = T>) -> T {
    let mut work = pin!(work);
    let Some(Observer { live, cluster }) = observer else { return work.await };
    loop {
        if let Ok(done) = tokio::time::timeout(EVERY, &mut work).await {
            return done;
        }
        if let Some(missing) = cluster.missing_process() {
            live.tell(SqlError::new(SqlState::SUCCESS, missing));
            return work.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn needs(sql: &str) -> bool {
        needs_others(&crate::statements::parse(sql).unwrap()[0].statement)
    }

    #[test]
    fn statements_that_wait_for_jobs_say_what_is_missing() {
        for sql in [
            "INSERT INTO t VALUES (1)",
            "WITH x AS (DELETE FROM t RETURNING *) SELECT * FROM x",
            "COMMIT",
            "CREATE TABLE t (id bigint)",
            "CREATE MATERIALIZED VIEW v AS SELECT 1 AS x",
            "TRUNCATE t",
            "FLUSH",
        ] {
            assert!(needs(sql), "{sql}");
        }
        for sql in ["SELECT 1", "SHOW JOBS", "SHOW ALL", "EXPLAIN SELECT 1", "BEGIN"] {
            assert!(!needs(sql), "{sql}");
        }
    }
}
