//! What a client is told whose statement waits because a process of the cluster is missing.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use millrace_common::{SqlError, SqlState};
use millrace_planner::ast::AlterAction;
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
    /// Of a statement that may wait for a compute process; `None`: it does not, or its client wants no notices.
    pub fn observer(&self, parsed: &ParsedStatement) -> Option<Observer> {
        let is_told = waits_for_compute(&parsed.statement) && self.is_told("NOTICE");
        is_told
            .then(|| Observer { live: Arc::clone(&self.live), cluster: Arc::clone(self.cluster()) })
    }
}

/// Whether it writes, has something computed or waits until that is done. A query's wait has a limit of its own.
fn waits_for_compute(statement: &Statement) -> bool {
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
        Statement::CreateView(view) => view.materialized,
        Statement::AlterRelation { action, .. } => {
            matches!(action, AlterAction::Rebuild | AlterAction::SetParallelism(_))
        }
        Statement::CreateTable(_)
        | Statement::CreateIndex(_)
        | Statement::CreateSink(_)
        | Statement::Subscribe(_)
        | Statement::Truncate { .. }
        | Statement::Flush
        | Statement::Wait => true,
        _ => false,
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
        waits_for_compute(&crate::statements::parse(sql).unwrap()[0].statement)
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
            "ALTER MATERIALIZED VIEW v REBUILD",
            "FLUSH",
        ] {
            assert!(needs(sql), "{sql}");
        }
        for sql in [
            "SELECT 1",
            "SHOW JOBS",
            "SHOW ALL",
            "EXPLAIN SELECT 1",
            "BEGIN",
            "CREATE VIEW v AS SELECT 1 AS x",
            "DROP TABLE t",
            "ALTER USER root PASSWORD 'x'",
        ] {
            assert!(!needs(sql), "{sql}");
        }
    }
}
