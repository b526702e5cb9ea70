//! What became of statements that were sent to a process, and not answered.
//!
//! The log tells by their ids; what it tells is told on when no read can miss it any more. Once the process is fenced, or
//! the table dropped, nothing can be committed any more that the log lacks. As long as the process may live, nobody can
//! say, unless it has answered that it does not know, and the log has placed the table elsewhere.
//!
//! So a process that is reached again is asked to abandon the statement: it refuses it from then on, and answers when
//! nothing of it is under way. If the log lacks it then, it was not committed and will not be.

use std::sync::Arc;
use std::time::Duration;

use millrace_common::{EnvHandle, Epoch, RelationId, SqlError, SqlState};
use millrace_executor::dml::EntryFlag;
use millrace_meta::LogFollower;
use millrace_meta::log::settled;
use millrace_meta::state::MetaState;
use millrace_rpc::call_error::CallError;
use millrace_rpc::control::MetaControl;
use millrace_rpc::dml::{DmlAnswer, DmlService};
use millrace_rpc::version::StatementId;
use tokio::time::timeout_at;

use super::{PAUSE, is_dropped};

/// For how long the commit of a statement is looked for whose process has not answered: longer than a lost process goes
/// on unfenced.
const OUTCOME_WAIT: Duration = Duration::from_secs(9);
/// The same where the process has answered that it does not know: what was handed over is soon in the log, or void.
const ANSWERED_WAIT: Duration = Duration::from_secs(3);

/// What became of a statement.
pub(super) enum Outcome {
    Answered(DmlAnswer),
    /// It was not committed, and will not be.
    NotCommitted,
}

/// Finds out what became of statements that were sent to a process.
pub(super) struct Outcomes {
    pub log: Arc<LogFollower>,
    /// Calls the leader.
    pub meta: Arc<dyn MetaControl>,
    pub env: EnvHandle,
    pub table: RelationId,
    pub incarnation: u64,
    pub process: Arc<dyn DmlService>,
    /// The tables that they write to.
    pub written: Vec<RelationId>,
    /// They are committed later than this.
    pub since: Epoch,
}

impl Outcomes {
    /// Whether nothing can be committed any more that the log does not have: the process is fenced, or the table is gone,
    /// whose id no other one gets.
    pub fn is_over(&self, state: &MetaState) -> bool {
        state.processes.is_fenced(self.incarnation) || is_dropped(state, self.table)
    }

    /// What becomes of a call then.
    pub fn lost(&self) -> CallError {
        let cause = match self.log.read(|state| is_dropped(state, self.table)) {
            true => "the table has been dropped",
            false => "it has been fenced",
        };
        let (peer, cause) = (format!("process {}", self.incarnation), cause.to_owned());
        CallError::Unreachable { peer, cause }
    }

    /// Whether what the process was doing with the table when it answered can no more be committed: that is over, or the
    /// log has placed the table on another process, and with it what is written to other tables.
    fn is_void(&self, state: &MetaState) -> bool {
        let process = state.jobs.get(&self.table).map_or(0, |job| job.process);
        let is_moved = process != 0 && process != self.incarnation;
        is_moved || self.is_over(state)
    }

    /// As `of`, and where the answer does not tell, the process is asked beside the log.
    pub async fn find(
        &self,
        error: CallError,
        id: StatementId,
        rows: u64,
        entered: &EntryFlag,
    ) -> Result<Outcome, SqlError> {
        tokio::select! {
            biased;
            outcome = self.of(error, id, rows, entered) => outcome,
            () = self.abandoned(id) => Ok(Outcome::NotCommitted),
        }
    }

    /// Completes when the process has abandoned a statement, and the log lacks it: it was not committed, and will not be.
    /// Never where that is not so, or nobody can say.
    async fn abandoned(&self, id: StatementId) {
        loop {
            let is_over = match self.process.abandon(&self.written, id).await {
                Ok(is_over) => Some(is_over),
                Err(CallError::Sql(e)) if e.state != SqlState::FEATURE_NOT_SUPPORTED => None,
                Err(error) if error.is_retryable() => None,
                // Another process is there, or one of an earlier build.
                Err(_) => return std::future::pending().await,
            };
            // What was committed before that answer is at the log's head.
            if let Some(is_over) = is_over
                && self.log.catch_up().await.is_ok()
            {
                let (is_there, is_void) = self.log.read(|state| {
                    let is_void = is_over || self.is_void(state);
                    let has_all = state.statements.has_all_after(self.since);
                    (state.statements.get(id).is_some(), is_void && has_all)
                });
                if is_there {
                    return std::future::pending().await;
                }
                if is_void {
                    return;
                }
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// What a failed call means. Without an answer, or if that does not know, the log is asked.
    async fn of(
        &self,
        error: CallError,
        id: StatementId,
        rows: u64,
        entered: &EntryFlag,
    ) -> Result<Outcome, SqlError> {
        let is_answer = !error.is_retryable();
        if is_answer && !is_unknown(&error) {
            return Err(error.into());
        }
        // Whoever stops waiting now is told that it may be committed.
        entered.set();
        let deadline = self.env.now() + if is_answer { ANSWERED_WAIT } else { OUTCOME_WAIT };
        loop {
            let known = self.log.number();
            // Where the store does not answer, the stream may tell all the same.
            let _ = timeout_at(deadline, self.log.catch_up()).await;
            if let Some(outcome) = self.known(id, rows, is_answer) {
                if let Outcome::Answered(_) = &outcome {
                    self.settle().await;
                }
                return Ok(outcome);
            }
            if self.env.now() >= deadline {
                return Err(if is_answer { error.into() } else { unknown_outcome(&error) });
            }
            let next = deadline.min(self.env.now() + 10 * PAUSE);
            let _ = timeout_at(next, self.log.changed_since(known)).await;
        }
    }

    /// Returns when reads that begin then see all that the log is known to have here.
    async fn settle(&self) {
        let ask = || async {
            let leader = self.meta.read_epoch(&[], Some(ANSWERED_WAIT), true).await;
            leader.ok().map(|leader| leader.record)
        };
        settled(&self.env, self.log.number(), ask).await;
    }

    /// What the log says of a statement; `None`: nothing yet. `is_answer`: the process has ended with it.
    fn known(&self, id: StatementId, rows: u64, is_answer: bool) -> Option<Outcome> {
        self.log.read(|state| match state.statements.get(id) {
            Some(epoch) => Some(Outcome::Answered(DmlAnswer::Applied { epoch, rows, late: 0 })),
            None => {
                // Without an answer it may still be waiting there, for a table that may come back.
                let is_void = match is_answer {
                    true => self.is_void(state),
                    false => self.is_over(state),
                };
                (is_void && state.statements.has_all_after(self.since))
                    .then_some(Outcome::NotCommitted)
            }
        })
    }
}

/// Whether the process does not know what became of a statement.
fn is_unknown(error: &CallError) -> bool {
    matches!(error, CallError::Sql(e) if e.state == SqlState::TRANSACTION_RESOLUTION_UNKNOWN)
}

/// Nobody can say whether the statement was committed.
fn unknown_outcome(error: &CallError) -> SqlError {
    SqlError::new(
        SqlState::TRANSACTION_RESOLUTION_UNKNOWN,
        format!(
            "the table's process did not answer while the statement was being committed: {error}"
        ),
    )
    .with_detail("The statement may or may not have been committed.")
}
