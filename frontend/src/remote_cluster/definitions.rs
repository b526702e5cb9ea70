//! Definitions, which the leader makes.
//!
//! Each has an id, which is in the log with it. One whose leader was lost meanwhile is asked for again with its id: whoever
//! leads then answers what was made, or makes it. So nothing is made twice, and its outcome is known as soon as a leader
//! answers.

use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use millrace_common::{EnvHandle, RelationId, SqlError, SqlState};
use millrace_rpc::call_error::CallError;
use millrace_rpc::control::{DefineAnswer, DefineRequest, Definition};
use millrace_rpc::version::StatementId;
use tokio::time::Instant;

use super::RemoteCluster;
use super::leader::{PAUSE, is_gone};

/// How long a definition whose leader was lost waits for one that knows.
const LEADER_WAIT: Duration = Duration::from_secs(15);

impl RemoteCluster {
    /// Makes a definition, which can be seen here when this returns. What was created or replaced. Error 08007: the leader
    /// was lost, and none that knows the outcome has answered in time.
    pub(super) async fn define(&self, change: Definition) -> Result<Option<RelationId>, SqlError> {
        let id = StatementId { frontend: self.env.random(), number: self.env.random() };
        let since = self.log.head().0;
        let request = DefineRequest { id: Some(id), since, change: Some(change) };
        let call = |request: DefineRequest| {
            let meta = Arc::clone(&self.meta);
            async move { meta.define(request).await }
        };
        let DefineAnswer { relation, record } = outcome(&self.env, &request, call).boxed().await?;
        self.see(record).await;
        Ok(relation.map(RelationId))
    }
}

/// Asks the leader, and while the outcome is open whoever leads then.
async fn outcome<F>(
    env: &EnvHandle,
    request: &DefineRequest,
    call: impl Fn(DefineRequest) -> F + Send,
) -> Result<DefineAnswer, SqlError>
where
    F: Future<Output = Result<DefineAnswer, CallError>> + Send,
{
    // While an attempt may have had its effect: until when the outcome is asked for.
    let mut until: Option<Instant> = None;
    loop {
        let began = env.now();
        let error = match call(request.clone()).await {
            Ok(answer) => return Ok(answer),
            Err(error) => error,
        };
        let is_open = is_open(&error);
        // One that has waited for long has had its leader until now.
        let is_late = until.is_none() || env.elapsed(began) > LEADER_WAIT;
        match until {
            _ if is_open && is_late => until = Some(env.now() + LEADER_WAIT),
            Some(_) if is_open || is_gone(&error) => {}
            Some(_) if !has_looked(&error) => return Err(unknown(&error)),
            _ => return Err(error.into()),
        }
        if until.is_some_and(|until| env.now() + PAUSE >= until) {
            return Err(unknown(&error));
        }
        tokio::time::sleep(PAUSE).await;
    }
}

/// Whether the definition may have been made, or may still be: there was no answer, or the leader has ended.
fn is_open(error: &CallError) -> bool {
    match error {
        CallError::Unreachable { .. } => true,
        CallError::Sql(error) => error.state == SqlState::ADMIN_SHUTDOWN,
        _ => false,
    }
}

/// Whether a leader has looked whether it was made before, and has not made it. One that was refused otherwise, or before it
/// came to its turn, may have been made by an earlier attempt, or may still be.
fn has_looked(error: &CallError) -> bool {
    matches!(error, CallError::Sql(error) if error.state != SqlState::CANNOT_CONNECT_NOW)
}

/// No leader that knows has answered.
fn unknown(error: &CallError) -> SqlError {
    let message = format!("the leader was lost, and none has told the outcome: {error}");
    SqlError::new(SqlState::TRANSACTION_RESOLUTION_UNKNOWN, message)
        .with_detail("The statement may or may not have taken effect.")
}

#[cfg(test)]
mod tests {
    use millrace_rpc::log::CreateSchema;
    use parking_lot::Mutex;

    use super::*;

    const MADE: DefineAnswer = DefineAnswer { relation: Some(7), record: 300 };

    fn unreachable() -> CallError {
        CallError::Unreachable { peer: "m:1".to_owned(), cause: "it was killed".to_owned() }
    }

    fn no_leader() -> CallError {
        CallError::NotLeader { leader: String::new(), term: 0 }
    }

    fn refused(state: SqlState) -> CallError {
        SqlError::new(state, "it is refused").into()
    }

    /// What comes of a definition whose attempts end so; the last answer is given again and again.
    async fn comes_of(
        mut answers: Vec<Result<DefineAnswer, CallError>>,
    ) -> (Result<DefineAnswer, SqlState>, usize) {
        let id = Some(StatementId { frontend: 1, number: 2 });
        let change = Some(Definition::CreateSchema(CreateSchema { name: "s".to_owned() }));
        let request = DefineRequest { id, since: 3, change };
        answers.reverse();
        let (answers, asked) = (Mutex::new(answers), Mutex::new(Vec::new()));
        let call = |request: DefineRequest| {
            asked.lock().push(request);
            let mut answers = answers.lock();
            let last = answers.last().cloned().expect("there is an answer");
            if answers.len() > 1 {
                answers.pop();
            }
            std::future::ready(last)
        };
        let env = EnvHandle::default();
        let came = outcome(&env, &request, call).await.map_err(|error| error.state);
        let asked = asked.into_inner();
        assert!(asked.iter().all(|other| *other == request), "it is the same request each time");
        (came, asked.len())
    }

    #[tokio::test(start_paused = true)]
    async fn the_next_leader_tells_the_outcome() {
        assert_eq!(comes_of(vec![Ok(MADE)]).await, (Ok(MADE), 1));
        let lost = vec![Err(unreachable()), Err(no_leader()), Err(no_leader()), Ok(MADE)];
        assert_eq!(comes_of(lost).await, (Ok(MADE), 4));
        let ended = vec![Err(refused(SqlState::ADMIN_SHUTDOWN)), Err(unreachable()), Ok(MADE)];
        assert_eq!(comes_of(ended).await, (Ok(MADE), 3));
        let failed = vec![Err(unreachable()), Err(refused(SqlState::DUPLICATE_SCHEMA))];
        assert_eq!(comes_of(failed).await, (Err(SqlState::DUPLICATE_SCHEMA), 2));
    }

    #[tokio::test(start_paused = true)]
    async fn the_outcome_is_unknown_only_where_nobody_tells_it() {
        let unknown = Err(SqlState::TRANSACTION_RESOLUTION_UNKNOWN);
        for nobody in [unreachable(), no_leader()] {
            let (came, asked) = comes_of(vec![Err(unreachable()), Err(nobody)]).await;
            assert_eq!(came, unknown);
            // Once at first, and every 100 ms of 15 s.
            assert!((140..=151).contains(&asked), "asked {asked} times");
        }
        let not_looked = [
            refused(SqlState::CANNOT_CONNECT_NOW),
            CallError::Fenced { incarnation: 7 },
            CallError::OtherStore { peer: "m:1".to_owned(), ours: None, theirs: None, leads: true },
            CallError::Protocol { ours: 1, theirs: 2, build: "next".to_owned() },
            CallError::Malformed("no message".to_owned()),
            CallError::TooLarge("no message".to_owned()),
        ];
        for refusal in not_looked {
            let answers = vec![Err(unreachable()), Err(refusal.clone())];
            let (came, asked) = comes_of(answers).await;
            assert_eq!(came, unknown, "{refusal:?}");
            assert_eq!(asked, 2, "{refusal:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_has_had_no_effect_is_an_error_at_once() {
        let no_effect = Err(SqlState::CANNOT_CONNECT_NOW);
        assert_eq!(comes_of(vec![Err(no_leader()), Ok(MADE)]).await, (no_effect, 1));
        let early = vec![Err(refused(SqlState::CANNOT_CONNECT_NOW)), Ok(MADE)];
        assert_eq!(comes_of(early).await, (no_effect, 1));
        let fenced = vec![Err(CallError::Fenced { incarnation: 7 }), Ok(MADE)];
        assert_eq!(comes_of(fenced).await, (Err(SqlState::ADMIN_SHUTDOWN), 1));
    }
}
