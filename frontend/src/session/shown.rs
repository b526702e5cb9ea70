//! What a statement shows that others know better than this frontend: how jobs and processes are, who has advisory locks,
//! which sessions there are, and what other frontends have defined. They are asked before the statement is planned, because
//! system tables are made while its names are looked up.
//!
//! What a statement shows is told by the words of its text, and of the plain views that it names. Words within literals
//! count, too: that something is asked for in vain does no harm.

use std::borrow::Cow;
use std::ops::ControlFlow;
use std::sync::Arc;

use millrace_common::{SqlError, SqlState};
use millrace_planner::ast::Show;
use millrace_planner::parser::walk;
use millrace_planner::{ParsedStatement, Statement};
use millrace_rpc::catalog::Relation;
use sqlparser::ast::{CopySource, ObjectName, SetExpr, Statement as Sql, Visitor};

use super::Session;
use crate::catalog::mentions::{contains, mentions_catalogs};
use crate::catalog::objects::system_table;
use crate::query::SessionCatalog;

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
/// What tells of definitions, beside tables of `pg_catalog`, which need no schema.
const DEFINITIONS: [&str; 3] = ["millrace_catalog.relations", "information_schema", "regclass"];
/// Tables of `pg_catalog` that do not. Programs ask for them again and again.
const NO_DEFINITIONS: [&str; 5] =
    ["pg_stat_activity", "pg_locks", "pg_settings", "pg_prepared_statements", "pg_cursors"];

/// How jobs are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reports {
    /// Where the leader does not answer, that is shown.
    Shown,
    /// What would be 0 without the leader is not known.
    Known,
}

/// What a statement shows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Asked {
    reports: Option<Reports>,
    processes: bool,
    locks: bool,
    sessions: bool,
    /// What there is, and is called how.
    definitions: bool,
}

impl Session {
    /// Before a statement is planned: asks those who know it for what the statement shows.
    pub(super) async fn refresh_shown(&self, parsed: &ParsedStatement) -> Result<(), SqlError> {
        let asked = asked(parsed, &self.catalog_views(&parsed.statement));
        if asked.locks {
            self.shared.locks.refresh().await?;
        }
        if asked.sessions {
            self.refresh_sessions(asked.locks).await;
        }
        if asked.processes {
            self.cluster().refresh_processes().await;
        }
        let reports = async {
            match asked.reports {
                Some(Reports::Shown) => self.cluster().show_reports().await,
                Some(Reports::Known) => self.cluster().refresh_reports().await,
                None => Ok(()),
            }
        };
        // In a block with one snapshot what others have defined since counts for nothing.
        if !asked.definitions || !self.reads_fresh()? || self.has_chosen_epoch() {
            return reports.await;
        }
        let (reports, ()) = tokio::join!(reports, self.cluster().newest_definitions());
        reports
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

    /// The plain views that a statement reads, those below others included, whose queries name system tables.
    fn catalog_views(&self, statement: &Statement) -> Vec<Arc<Relation>> {
        let catalog = self.cluster().catalog();
        // The names of what is not read, such as the rows of an INSERT, are not looked for.
        if !catalog.has_catalog_views() || text_read(statement, "").is_none() {
            return Vec::new();
        }
        let path = self.search_path();
        let names = names_read(statement);
        let named = names.iter().filter_map(|(schema, name)| match schema {
            Some(schema) => catalog.get(schema, name),
            None => path.iter().find_map(|schema| catalog.get(schema, name)),
        });
        catalog.catalog_views(named.map(|relation| relation.id))
    }
}

/// What a statement shows. `views`: the plain views that it reads and whose queries name system tables.
fn asked(parsed: &ParsedStatement, views: &[Arc<Relation>]) -> Asked {
    let shown = |is_shown: bool| is_shown.then_some(Reports::Shown);
    match &parsed.statement {
        Statement::Show(show) => Asked {
            reports: shown(matches!(show, Show::Jobs | Show::Sinks(_) | Show::Sources(_))),
            definitions: names_objects(show),
            ..Asked::default()
        },
        Statement::Describe { .. } => Asked { definitions: true, ..Asked::default() },
        Statement::Explain(explain) => {
            Asked { reports: shown(explain.analyze), ..Asked::default() }
        }
        statement => match text_read(statement, &parsed.text) {
            Some(text) => asked_by(text, statement, views),
            None => Asked::default(),
        },
    }
}

/// Whether it lists objects, or shows one.
fn names_objects(show: &Show) -> bool {
    match show {
        Show::Tables(_)
        | Show::Sources(_)
        | Show::Views(_)
        | Show::MaterializedViews(_)
        | Show::Indexes(_)
        | Show::Sinks(_)
        | Show::Subscriptions(_)
        | Show::Schemas
        | Show::Columns(_)
        | Show::Create(..) => true,
        Show::SubscriptionCursors
        | Show::Databases
        | Show::Jobs
        | Show::AllSettings
        | Show::Setting(_) => false,
    }
}

/// The same of a statement that reads, by its words.
fn asked_by(text: &str, statement: &Statement, views: &[Arc<Relation>]) -> Asked {
    let texts = [text].into_iter().chain(views.iter().map(|view| view.query.as_str()));
    let texts: Vec<Cow<str>> = texts.filter(|t| mentions_catalogs(t)).map(unquoted).collect();
    if texts.is_empty() {
        return Asked::default();
    }
    let names = |word: &str| texts.iter().any(|text| contains(text, word));
    let processes = PROCESSES.into_iter().any(names);
    let names_table = |table: &str| match processes {
        // It has a column of that name, and is there without a leader.
        true => names(&format!("millrace_catalog.{table}")),
        false => names(table),
    };
    let sizes = names(SIZES);
    let reports = names("millrace_catalog") && REPORTS.into_iter().any(names_table);
    Asked {
        reports: match (sizes, reports) {
            (true, _) => Some(Reports::Known),
            (false, true) => Some(Reports::Shown),
            (false, false) => None,
        },
        processes,
        locks: LOCKS.into_iter().any(names),
        sessions: names(SESSIONS),
        definitions: DEFINITIONS.into_iter().any(names)
            || views.iter().any(|view| contains(&view.query, "pg_"))
            || names_read(statement).iter().any(tells_definitions),
    }
}

/// What a statement reads, as text; `None`: nothing. The rows of an INSERT may be many, and are not read.
fn text_read<'a>(statement: &'a Statement, text: &'a str) -> Option<&'a str> {
    let is_read = match statement {
        Statement::Sql(sql) => match sql.as_ref() {
            Sql::Query(_) | Sql::Declare { .. } | Sql::Update(_) | Sql::Delete(_) => true,
            Sql::Copy { to, .. } => *to,
            Sql::Insert(insert) => {
                let source = insert.source.as_ref();
                source.is_some_and(|query| !matches!(query.body.as_ref(), SetExpr::Values(_)))
            }
            _ => false,
        },
        Statement::CreateTable(table) => return table.query.as_ref().map(|query| &*query.text),
        _ => false,
    };
    is_read.then_some(text)
}

/// Schema, if it is written, and name of what a statement reads.
type Name = (Option<String>, String);

/// Names of what a statement reads, those of queries in its WITH included.
fn names_read(statement: &Statement) -> Vec<Name> {
    let mut names = Names::default();
    match statement {
        Statement::Sql(sql) => {
            if let Sql::Copy { source: CopySource::Table { table_name, .. }, to: true, .. } =
                sql.as_ref()
            {
                names.add(table_name);
            }
            let _ = walk::visit(sql.as_ref(), &mut names);
        }
        Statement::CreateTable(table) => {
            if let Some(query) = &table.query {
                let _ = walk::visit(query.query.as_ref(), &mut names);
            }
        }
        _ => {}
    }
    names.0
}

/// Whether it is that of a table of `pg_catalog` that tells of definitions.
fn tells_definitions((schema, name): &Name) -> bool {
    let is_listed = || !NO_DEFINITIONS.contains(&name.as_str());
    match schema.as_deref() {
        None | Some("pg_catalog") => system_table("pg_catalog", name).is_some() && is_listed(),
        Some(_) => false,
    }
}

/// Collects the names that stand for rows.
#[derive(Default)]
struct Names(Vec<Name>);

impl Names {
    fn add(&mut self, name: &ObjectName) {
        // One that is none is refused when it is looked up.
        self.0.extend(SessionCatalog::split_name(name).ok());
    }
}

impl Visitor for Names {
    type Break = ();

    fn pre_visit_relation(&mut self, name: &ObjectName) -> ControlFlow<()> {
        self.add(name);
        ControlFlow::Continue(())
    }
}

/// A text without the quotes of its names.
fn unquoted(text: &str) -> Cow<'_, str> {
    match text.contains('"') {
        true => Cow::Owned(text.replace('"', "")),
        false => Cow::Borrowed(text),
    }
}

#[cfg(test)]
mod tests {
    use millrace_rpc::catalog::RelationKind;

    use super::*;

    fn asked_of(sql: &str, views: &[Arc<Relation>]) -> Asked {
        let parsed = crate::statements::parse(sql).unwrap();
        let [statement] = parsed.as_slice() else { panic!("one statement: {sql}") };
        asked(statement, views)
    }

    fn asks(sql: &str) -> bool {
        asked_of(sql, &[]).reports.is_some()
    }

    #[test]
    fn statements_that_look_at_jobs_are_known() {
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

    #[test]
    fn whatever_reads_them_looks_at_jobs() {
        for sql in [
            "COPY millrace_catalog.jobs TO STDOUT",
            "COPY (SELECT state FROM millrace_catalog.jobs) TO STDOUT",
            "INSERT INTO t SELECT name FROM millrace_catalog.jobs",
            "DELETE FROM t WHERE name NOT IN (SELECT name FROM millrace_catalog.jobs)",
            "UPDATE t SET n = (SELECT count(*) FROM millrace_catalog.tasks)",
            "CREATE TABLE t AS SELECT name FROM millrace_catalog.jobs",
            "DECLARE c CURSOR FOR SELECT name FROM millrace_catalog.jobs",
            "SELECT * FROM \"millrace_catalog\".\"jobs\"",
            "SELECT * FROM millrace_catalog.workers, \"millrace_catalog\".\"caches\"",
        ] {
            assert!(asks(sql), "{sql}");
        }
        assert!(!asks("COPY t FROM STDIN") && !asks("CREATE TABLE jobs (id bigint)"));
        let workers = asked_of("SELECT load FROM \"millrace_catalog\".\"workers\"", &[]);
        assert!(workers.processes && workers.reports.is_none());
    }

    #[test]
    fn a_view_shows_what_its_query_names() {
        let view = |query: &str| {
            let (query, kind) = (query.to_owned(), RelationKind::View as i32);
            vec![Arc::new(Relation { query, kind, ..Relation::default() })]
        };
        let shown = |query: &str| asked_of("SELECT * FROM v", &view(query));
        let jobs = shown("SELECT name FROM millrace_catalog.jobs");
        assert_eq!(jobs.reports, Some(Reports::Shown));
        assert!(!jobs.definitions && !jobs.processes);
        assert!(shown("SELECT relname FROM pg_class").definitions);
        assert!(shown("SELECT load FROM millrace_catalog.workers").processes);
        assert!(shown("SELECT * FROM pg_locks").locks);
        assert!(shown("SELECT * FROM pg_stat_activity").sessions);
        assert_eq!(shown("SELECT pg_table_size('t')").reports, Some(Reports::Known));
    }

    #[test]
    fn statements_that_look_at_definitions_are_known() {
        let looks = |sql: &str| asked_of(sql, &[]).definitions;
        for sql in [
            "SELECT relname FROM pg_class",
            "SELECT relname FROM pg_catalog.pg_class",
            "SELECT count(*) FROM information_schema.tables",
            "COPY pg_tables TO STDOUT",
            "SELECT name FROM \"millrace_catalog\".relations",
            "SELECT to_regclass('t')",
            "SELECT 't'::regclass",
            "SHOW TABLES",
            "SHOW CREATE VIEW v",
            "DESCRIBE t",
        ] {
            assert!(looks(sql), "{sql}");
        }
        for sql in [
            "SELECT 1",
            "SELECT * FROM t",
            "SELECT pg_backend_pid()",
            "SELECT pg_advisory_lock(1)",
            "SELECT 'pg_class'",
            "SELECT pid FROM pg_stat_activity",
            "SELECT name FROM millrace_catalog.jobs",
            "SHOW JOBS",
            "SHOW read_freshness",
            "INSERT INTO t VALUES ('pg_class')",
        ] {
            assert!(!looks(sql), "{sql}");
        }
    }
}
