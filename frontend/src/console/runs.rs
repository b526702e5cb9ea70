//! Strings of statements under way for the console.
//!
//! A run belongs to the user who started it, and goes on whether or not somebody waits for it: a page that was closed
//! finds it again. Its answers are kept until they are asked for, or for some minutes. A query that nobody has asked
//! about for as long is cancelled, as nobody would see its rows; what changes something is not.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::FutureExt;
use millrace_common::{SqlError, SqlState};
use millrace_planner::parser::with_changes_rows;
use millrace_planner::{ParsedStatement, Statement};
use parking_lot::Mutex;
use sqlparser::ast::{ObjectName, Statement as Sql};
use tokio_util::sync::CancellationToken;

use super::rows::{Limits, gather, kept_notices};
use super::{Answer, most_frequent};
use crate::connection::{after_commit, as_own_request, guarded, panicked};
use crate::query::catalog_view::fold;
use crate::secrets::masked;
use crate::server::{Activity, IDLE, Shared};
use crate::session::Session;

/// Runs that have not ended, of all users.
const MAX_RUNNING: usize = 16;
/// Of one user, so that others find a place.
const MAX_OF_USER: usize = 4;
/// Runs that have ended and whose answers nobody has asked for. Another one takes the place of the oldest, of the user
/// who has most.
const MAX_KEPT: usize = 8;
/// Statements of one run: each has an answer.
const MAX_STATEMENTS: usize = 10_000;
/// Characters of a run's text that others are told.
const SHOWN: usize = 1024;
/// How long answers are kept, and how long a query waits for somebody who wants its rows.
const PATIENCE: Duration = Duration::from_secs(10 * 60);
const APPLICATION: &str = "console";

/// One string of statements.
pub struct Run {
    pub id: String,
    pub user: String,
    sql: String,
    /// The start of its text, without secrets.
    pub shown: String,
    address: String,
    began: Instant,
    cancel: CancellationToken,
    ended: CancellationToken,
    progress: Mutex<Progress>,
}

struct Progress {
    answers: Vec<Answer>,
    /// Of the string; 0: it has not been read.
    statements: usize,
    current: Option<Current>,
    error: Option<SqlError>,
    /// When somebody last wanted to know, or it ended.
    asked: Instant,
}

/// The statement under way.
#[derive(Clone)]
struct Current {
    /// Without secrets.
    text: String,
    began: Instant,
    /// Schema, if it was named, and name of what it creates.
    creates: Option<(Option<String>, String)>,
    /// It changes nothing.
    reads: bool,
}

/// A run as somebody sees it who asks.
#[derive(Clone, Debug)]
pub struct Look {
    pub done: bool,
    pub statements: usize,
    /// Those after the ones that were seen.
    pub answers: Vec<Answer>,
    pub error: Option<SqlError>,
    pub elapsed: Duration,
    pub current: Option<Underway>,
}

/// The statement under way, as somebody sees it.
#[derive(Clone, Debug)]
pub struct Underway {
    pub text: String,
    pub elapsed: Duration,
    /// How far the creation of what it creates is.
    pub progress: Option<String>,
}

impl Run {
    pub(super) fn new(
        user: String,
        address: String,
        sql: String,
        cancel: CancellationToken,
    ) -> Run {
        let now = Instant::now();
        let progress =
            Progress { answers: Vec::new(), statements: 0, current: None, error: None, asked: now };
        Run {
            id: format!("{:032x}", rand::random::<u128>()),
            user,
            shown: masked(&sql).chars().take(SHOWN).collect(),
            sql,
            address,
            began: now,
            cancel,
            ended: CancellationToken::new(),
            progress: Mutex::new(progress),
        }
    }

    /// All that came of it.
    pub(super) fn take(self) -> (Vec<Answer>, Option<SqlError>) {
        let progress = self.progress.into_inner();
        (progress.answers, progress.error)
    }

    pub fn elapsed(&self) -> Duration {
        self.began.elapsed()
    }

    /// Returns when it has ended, and after this time at the latest.
    pub async fn wait(&self, limit: Duration) {
        // Either way it is looked at next.
        let _ = tokio::time::timeout(limit, self.ended.cancelled()).await;
    }

    /// Ends the statement under way, and with it the run.
    pub fn cancel(&self) {
        self.cancel.cancel();
    }

    fn begin(&self, parsed: &ParsedStatement) {
        self.progress.lock().current = Some(Current {
            text: masked(&parsed.text),
            began: Instant::now(),
            creates: created(&parsed.statement),
            reads: only_reads(&parsed.statement),
        });
    }

    fn is_unwanted(&self) -> bool {
        let progress = self.progress.lock();
        progress.current.as_ref().is_some_and(|c| c.reads) && progress.asked.elapsed() >= PATIENCE
    }

    fn look(&self, shared: &Shared, seen: usize) -> Look {
        let done = self.ended.is_cancelled();
        let mut progress = self.progress.lock();
        progress.asked = Instant::now();
        let answers = progress.answers.get(seen..).map(<[Answer]>::to_vec).unwrap_or_default();
        let (statements, error) = (progress.statements, progress.error.clone());
        let current = progress.current.clone();
        drop(progress);
        let current = current.map(|c| Underway {
            progress: c.creates.as_ref().and_then(|c| progress_of(shared, c)),
            elapsed: c.began.elapsed(),
            text: c.text,
        });
        Look { done, statements, answers, error, elapsed: self.elapsed(), current }
    }
}

/// What a statement creates that may take long.
fn created(statement: &Statement) -> Option<(Option<String>, String)> {
    let named = |name: &ObjectName| {
        let mut parts = name.0.iter().rev().filter_map(|p| p.as_ident().map(fold));
        let name = parts.next()?;
        Some((parts.next(), name))
    };
    match statement {
        Statement::CreateView(view) => named(&view.name),
        Statement::CreateTable(table) => named(&table.name),
        Statement::CreateSink(sink) => named(&sink.name),
        Statement::CreateIndex(index) => index.name.as_ref().map(|n| (None, fold(n))),
        _ => None,
    }
}

fn only_reads(statement: &Statement) -> bool {
    match statement {
        Statement::Sql(sql) => {
            matches!(sql.as_ref(), Sql::Query(query) if !with_changes_rows(query))
        }
        Statement::Subscribe(_) | Statement::FetchWait { .. } => true,
        _ => false,
    }
}

fn progress_of(shared: &Shared, creates: &(Option<String>, String)) -> Option<String> {
    let (schema, name) = creates;
    let catalog = shared.cluster.catalog();
    let is_it = |id: u32| {
        catalog.by_id(id).is_some_and(|r| {
            r.name == *name && schema.as_ref().is_none_or(|schema| r.schema == *schema)
        })
    };
    let mut jobs = shared.cluster.jobs().into_iter();
    jobs.find(|j| j.progress.is_some() && is_it(j.relation))?.progress
}

/// The runs of a server.
pub struct Runs {
    shared: Arc<Shared>,
    limits: Limits,
    all: Mutex<Vec<Arc<Run>>>,
    /// The server ends.
    stop: CancellationToken,
}

impl Runs {
    pub fn new(shared: Arc<Shared>, stop: CancellationToken) -> Runs {
        Runs { shared, limits: Limits::default(), all: Mutex::default(), stop }
    }

    /// Starts a string of statements.
    pub fn start(&self, user: String, address: String, sql: String) -> Result<Arc<Run>, SqlError> {
        let run = Arc::new(Run::new(user, address, sql, self.stop.child_token()));
        let mut all = self.all.lock();
        forget(&mut all);
        let under_way = |whose: Option<&str>| {
            let is_one = |r: &&Arc<Run>| whose.is_none_or(|user| r.user == user);
            all.iter().filter(|r| !r.ended.is_cancelled()).filter(is_one).count()
        };
        let who = if under_way(None) >= MAX_RUNNING {
            Some(("the console has", MAX_RUNNING))
        } else {
            (under_way(Some(&run.user)) >= MAX_OF_USER).then_some(("you have", MAX_OF_USER))
        };
        if let Some((who, count)) = who {
            let message = format!("{who} {count} runs under way already");
            return Err(SqlError::new(SqlState::TOO_MANY_CONNECTIONS, message)
                .with_hint("Cancel one, or wait for its end."));
        }
        all.push(Arc::clone(&run));
        drop(all);
        let (shared, started, limits) = (Arc::clone(&self.shared), Arc::clone(&run), self.limits);
        tokio::spawn(async move { execute(&shared, &started, limits).await });
        Ok(run)
    }

    /// A user's run. One that has been given its last answers is forgotten.
    pub fn find(&self, user: &str, id: &str) -> Option<Arc<Run>> {
        let all = self.all.lock();
        all.iter().find(|r| r.id == id && r.user == user).cloned()
    }

    /// A run as it is now. Answers of one that has ended are given once.
    pub fn look(&self, run: &Run, seen: usize) -> Look {
        let look = run.look(&self.shared, seen);
        if look.done {
            self.all.lock().retain(|r| r.id != run.id);
        }
        look
    }

    /// A user's runs that may be asked for, the oldest first.
    pub fn of_user(&self, user: &str) -> Vec<Arc<Run>> {
        let mut all = self.all.lock();
        forget(&mut all);
        all.iter().filter(|r| r.user == user).cloned().collect()
    }
}

/// Forgets answers that nobody wants.
fn forget(all: &mut Vec<Arc<Run>>) {
    all.retain(|r| !r.ended.is_cancelled() || r.progress.lock().asked.elapsed() < PATIENCE);
    loop {
        let ended = || all.iter().filter(|r| r.ended.is_cancelled());
        let most = most_frequent(ended().map(|r| r.user.as_str()));
        let Some(user) = most.filter(|_| ended().count() > MAX_KEPT) else { break };
        let goes = |r: &Arc<Run>| r.user == user && r.ended.is_cancelled();
        let Some(oldest) = all.iter().position(goes) else { break };
        all.remove(oldest);
    }
}

/// Runs all statements to their end, or to the first error.
pub(super) async fn execute(shared: &Arc<Shared>, run: &Run, limits: Limits) {
    // A run that panics ends as well.
    let work = AssertUnwindSafe(run_all(shared, run, limits)).catch_unwind();
    let error = tokio::select! {
        result = work => result.unwrap_or_else(|_| Err(panicked())).err(),
        never = watch(run) => match never {},
    };
    let mut progress = run.progress.lock();
    progress.error = error;
    progress.current = None;
    progress.asked = Instant::now();
    drop(progress);
    run.ended.cancel();
}

/// Cancels a query whose rows nobody wants.
async fn watch(run: &Run) -> std::convert::Infallible {
    loop {
        tokio::time::sleep(PATIENCE / 10).await;
        if run.is_unwanted() {
            run.cancel();
        }
    }
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

async fn run_all(shared: &Arc<Shared>, run: &Run, mut limits: Limits) -> Result<(), SqlError> {
    let database = shared.config.database.clone();
    let activity = Activity {
        user: run.user.clone(),
        database: database.clone(),
        application: APPLICATION.to_owned(),
        address: run.address.clone(),
        ..Activity::default()
    };
    let (pid, _) = shared.register(activity)?;
    let _registered = Registered { shared, pid };
    let mut session = Session::new(shared.clone(), pid, run.user.clone(), database);
    let statements = crate::statements::parse(&run.sql)?;
    if statements.len() > MAX_STATEMENTS {
        let message = format!("the console runs at most {MAX_STATEMENTS} statements at a time");
        return Err(SqlError::new(SqlState::STATEMENT_TOO_COMPLEX, message)
            .with_hint("Use psql, or run them in parts."));
    }
    run.progress.lock().statements = statements.len();
    for parsed in &statements {
        let incarnation = shared.config.incarnation.get();
        // Boxed: such a future is large, and each that wraps it would hold it on the stack.
        let statement = Box::pin(run_one(&mut session, run, parsed, &mut limits));
        let answer = as_own_request(incarnation, statement).await;
        session.shared.end_statement(pid, APPLICATION, IDLE);
        let mut progress = run.progress.lock();
        progress.current = None;
        progress.answers.push(answer?);
    }
    if session.in_block() && !session.writes.lock().marks().is_empty() {
        return Err(left_open());
    }
    Ok(())
}

/// The session ends with its run, and a block that is open then with the session.
fn left_open() -> SqlError {
    let message = "the statements end within a transaction block, whose changes are rolled back";
    SqlError::new(SqlState::ACTIVE_SQL_TRANSACTION, message)
        .with_hint("End the block with COMMIT or ROLLBACK in the same run.")
}

async fn run_one(
    session: &mut Session,
    run: &Run,
    parsed: &ParsedStatement,
    limits: &mut Limits,
) -> Result<Answer, SqlError> {
    run.begin(parsed);
    let began = Instant::now();
    session.arrive();
    session.cancel = session.shared.begin_statement(session.pid, &parsed.text);
    let cancel = session.cancel.clone();
    let timeout = session.settings.millis("statement_timeout").map(Duration::from_millis);
    let step = session.begin_step();
    let work = async {
        let outcome = session.execute(parsed, &[], None).await?;
        let is_committed = step.entered().is_set();
        let answer = gather(outcome, limits).await;
        answer.map_err(|e| if is_committed { after_commit(&e) } else { e })
    };
    let mut answer = guarded(&run.cancel, &cancel, timeout, &step, work).await?;
    answer.elapsed = began.elapsed();
    let notices = std::mem::take(&mut session.notices).into_iter();
    let notices = notices.map(|(severity, n)| format!("{severity}: {}", n.message));
    answer.notices = kept_notices(notices, limits);
    Ok(answer)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended(user: &str) -> Arc<Run> {
        let (user, cancel) = (user.to_owned(), CancellationToken::new());
        let run = Run::new(user, String::new(), "SELECT 1".to_owned(), cancel);
        run.ended.cancel();
        Arc::new(run)
    }

    #[test]
    fn who_has_most_answers_loses_them() {
        let mut all = vec![ended("ann")];
        all.extend((0..2 * MAX_KEPT).map(|_| ended("bob")));
        let (first, last) = (all[0].id.clone(), all[2 * MAX_KEPT].id.clone());
        forget(&mut all);
        assert_eq!(all.len(), MAX_KEPT);
        assert_eq!((&all[0].id, &all[MAX_KEPT - 1].id), (&first, &last));
    }

    #[test]
    fn a_run_is_told_of_without_its_secrets() {
        let sql = "ALTER USER root PASSWORD 'hush'".to_owned();
        let run = Run::new("root".to_owned(), String::new(), sql.clone(), CancellationToken::new());
        assert_eq!(run.shown, "ALTER USER root PASSWORD '***'");
        assert_eq!(run.sql, sql);
        // The end of what is shown may be within a secret.
        let long = format!("{} ALTER USER root PASSWORD 'hush'", " ".repeat(SHOWN - 30));
        let run = Run::new("root".to_owned(), String::new(), long, CancellationToken::new());
        assert!(!run.shown.contains("hu"), "{}", run.shown);
    }
}
