//! What a statement rests on that others may have changed: where it is kept by another process, it is asked for.

use std::sync::Arc;

use millrace_common::{SqlError, SqlState};
use millrace_planner::ast::Show;
use millrace_planner::parser::with_changes_rows;
use millrace_planner::{ParsedStatement, Statement};
use sqlparser::ast::Statement as Sql;

use super::Session;
use super::planned::is_outdated;
use crate::cluster::CatalogSnapshot;

/// What tells of advisory locks.
const LOCKS: [&str; 2] = ["pg_locks", "pg_blocking_pids"];
/// It tells of sessions, and of locks that they wait for where that is known.
const SESSIONS: &str = "pg_stat_activity";
/// Tables of `millrace_catalog` that tell how jobs are.
const REPORTS: [&str; 10] = [
    "jobs",
    "watermarks",
    "state_tables",
    "lookahead",
    "operators",
    "source",
    "tasks",
    "compactions",
    "caches",
    "requests",
];
/// How the names of functions end that tell how large something is.
const SIZES: &str = "_size(";
/// Names of the one that tells how processes are, also while there is no leader.
const PROCESSES: [&str; 2] = ["millrace_catalog.processes", "millrace_catalog.workers"];

impl Session {
    /// Before a statement that asks how jobs are, or who has advisory locks.
    pub(super) async fn refresh_reports_for(
        &self,
        parsed: &ParsedStatement,
    ) -> Result<(), SqlError> {
        if is_read(parsed) {
            let names = |word: &str| contains(&parsed.text, word);
            let of_locks = LOCKS.into_iter().any(names);
            if of_locks {
                self.shared.locks.refresh().await?;
            }
            if names(SESSIONS) {
                self.refresh_sessions(of_locks).await;
            }
            if PROCESSES.into_iter().any(names) {
                self.cluster().refresh_processes().await;
            }
        }
        match asks_for_reports(parsed) {
            // What would be 0 without the leader is not known.
            true if is_read(parsed) && contains(&parsed.text, SIZES) => {
                self.cluster().refresh_reports().await
            }
            true => self.cluster().show_reports().await,
            false => Ok(()),
        }
    }

    /// Before a statement that lists sessions. `has_locks`: who waits for locks is known. What cannot be found out is
    /// left out, which the client is told of sessions.
    async fn refresh_sessions(&self, has_locks: bool) {
        let locks = async {
            if !has_locks {
                let _ = self.shared.locks.refresh().await;
            }
        };
        let ((), missing) = tokio::join!(locks, self.shared.other_sessions.refresh());
        for missing in missing.into_iter().filter(|_| self.is_told("NOTICE")) {
            self.live.tell(SqlError::new(SqlState::SUCCESS, missing));
        }
    }

    /// Whether a statement that has failed is to be begun anew; `planned`: the catalog from before it was planned.
    pub(super) async fn plans_again(
        &self,
        error: &SqlError,
        planned: &Arc<CatalogSnapshot>,
    ) -> bool {
        is_outdated(error) || self.learns_more(error, planned).await
    }

    /// Whether something that was not known in this catalog, was and is gone, or was of another kind or type, may be known
    /// now, so that it is of use to try again.
    pub(crate) async fn learns_more(
        &self,
        error: &SqlError,
        planned: &Arc<CatalogSnapshot>,
    ) -> bool {
        let of_definitions = [
            SqlState::UNDEFINED_TABLE,
            SqlState::UNDEFINED_COLUMN,
            SqlState::UNDEFINED_OBJECT,
            SqlState::INVALID_SCHEMA_NAME,
            SqlState::AMBIGUOUS_COLUMN,
            SqlState::UNDEFINED_FUNCTION,
            SqlState::DATATYPE_MISMATCH,
            SqlState::WRONG_OBJECT_TYPE,
        ];
        of_definitions.contains(&error.state) && self.knows_more(planned).await
    }

    /// Whether the catalog is another one than this, now that the newest was looked for.
    pub(super) async fn knows_more(&self, planned: &Arc<CatalogSnapshot>) -> bool {
        // Also where the catalog has gone on by itself: it may go on still. If it cannot be looked for, what is known is as true
        // as can be known.
        let _ = self.cluster().refresh_catalog().await;
        !Arc::ptr_eq(planned, &self.cluster().catalog())
    }
}

fn is_read(parsed: &ParsedStatement) -> bool {
    matches!(&parsed.statement, Statement::Sql(sql)
        if matches!(sql.as_ref(), Sql::Query(_) | Sql::Declare { .. }))
}

fn asks_for_reports(parsed: &ParsedStatement) -> bool {
    match &parsed.statement {
        Statement::Show(show) => {
            matches!(show, Show::Jobs | Show::Sinks(_) | Show::Sources(_))
        }
        Statement::Explain(explain) => explain.analyze,
        Statement::Sql(_) if is_read(parsed) => {
            let names = |word: &str| contains(&parsed.text, word);
            let names_table = |table: &str| match PROCESSES.into_iter().any(names) {
                // It has a column of that name, and is there without a leader.
                true => names(&format!("millrace_catalog.{table}")),
                false => names(table),
            };
            names("millrace_catalog") && REPORTS.into_iter().any(names_table) || names(SIZES)
        }
        _ => false,
    }
}

/// Whether a text has a word, in whatever case.
fn contains(text: &str, word: &str) -> bool {
    text.as_bytes().windows(word.len()).any(|part| part.eq_ignore_ascii_case(word.as_bytes()))
}

/// Whether a query has parts that change rows.
pub(super) fn changes_in_with(statement: &Statement) -> bool {
    matches!(statement, Statement::Sql(sql)
        if matches!(sql.as_ref(), Sql::Query(query) if with_changes_rows(query)))
}

/// Whether a statement that names something unknown has done nothing by the time that this shows.
pub(super) fn can_be_tried_again(statement: &Statement) -> bool {
    match statement {
        Statement::Sql(sql) => match sql.as_ref() {
            // Its parts run one after the other.
            Sql::Query(query) => !with_changes_rows(query),
            Sql::Insert(_)
            | Sql::Update(_)
            | Sql::Delete(_)
            | Sql::Copy { .. }
            | Sql::Declare { .. }
            | Sql::Prepare { .. } => true,
            // What it executes is tried again by itself, if it can be.
            _ => false,
        },
        Statement::Show(Show::Setting(_) | Show::AllSettings) => false,
        Statement::Show(_)
        | Statement::Describe { .. }
        | Statement::Explain(_)
        | Statement::DeclareSubscriptionCursor(_)
        | Statement::Subscribe(_) => true,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statements_that_look_at_jobs_are_known() {
        let asks = |sql: &str| crate::statements::parse(sql).unwrap().iter().all(asks_for_reports);
        assert!(asks("SHOW JOBS") && asks("select state from Millrace_Catalog.JOBS"));
        for table in ["tasks", "compactions", "caches", "requests"] {
            assert!(asks(&format!("SELECT * FROM millrace_catalog.{table}")), "{table}");
        }
        assert!(asks("SELECT pg_relation_size('t')"));
        assert!(!asks("SELECT * FROM millrace_catalog.relations") && !asks("SELECT * FROM jobs"));
        assert!(!asks("SELECT jobs FROM millrace_catalog.processes"));
        assert!(!asks("SELECT jobs FROM millrace_catalog.workers"));
        assert!(asks("SELECT * FROM millrace_catalog.processes, millrace_catalog.jobs"));
        assert!(!asks("SHOW TABLES") && !asks("INSERT INTO t VALUES ('millrace_catalog.jobs')"));
    }
}
