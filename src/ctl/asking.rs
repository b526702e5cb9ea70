//! Questions that outlast their leader: what was lost with it is asked again, of whoever leads then.
//!
//! Only what may be asked again is asked so: it changes nothing, or has an id by which it is done once
//! (`OperatorService` in millrace-rpc).

use std::time::Duration;

use millrace_common::SqlState;
use millrace_rpc::call_error::CallError;
use tokio::time::Instant;

/// How long somebody is waited for who leads: longer than another process takes to begin.
pub const LEADER_WAIT: Duration = Duration::from_secs(15);
/// Between two attempts.
pub const PAUSE: Duration = Duration::from_millis(300);

/// What has come of a question.
#[derive(Debug, PartialEq)]
pub struct Answered<T> {
    pub answer: T,
    /// It was asked again: an attempt without an answer may have done what this one has found done.
    pub is_repeat: bool,
}

/// Why there is no answer.
#[derive(Debug)]
pub enum Failure {
    /// What was asked for has not been done.
    Refused(CallError),
    /// It may have been done, and nobody who knows has told so.
    Unknown(CallError),
}

impl From<Failure> for CallError {
    fn from(failure: Failure) -> CallError {
        let (Failure::Refused(error) | Failure::Unknown(error)) = failure;
        error
    }
}

/// Calls the leader, and again where it was lost, until somebody who leads has answered or nobody has for
/// [`LEADER_WAIT`]. `look`: looks for the leader, so that the next call goes there.
pub async fn outlasting<T, C, L>(
    call: impl Fn() -> C,
    look: impl Fn() -> L,
) -> Result<Answered<T>, Failure>
where
    C: Future<Output = Result<T, CallError>>,
    L: Future<Output = ()>,
{
    // An attempt may have done it.
    let mut is_open = false;
    let mut until: Option<Instant> = None;
    loop {
        let began = Instant::now();
        let error = match call().await {
            Ok(answer) => return Ok(Answered { answer, is_repeat: is_open }),
            Err(error) => error,
        };
        let was_open = is_open;
        is_open |= may_be_done(&error);
        if !is_lost(&error) {
            let is_unknown = may_be_done(&error) || (was_open && !has_looked(&error));
            return Err(if is_unknown { Failure::Unknown(error) } else { Failure::Refused(error) });
        }
        // An attempt that has waited for long has had its leader until now.
        let now = Instant::now();
        let waits = until.filter(|_| now.duration_since(began) <= LEADER_WAIT);
        let deadline = waits.unwrap_or(now + LEADER_WAIT);
        if now + PAUSE >= deadline {
            return Err(if is_open { Failure::Unknown(error) } else { Failure::Refused(error) });
        }
        until = Some(deadline);
        tokio::time::sleep(PAUSE).await;
        look().await;
    }
}

/// Whether there is nobody who leads where it was asked: it is to be asked again, or somebody else is.
fn is_lost(error: &CallError) -> bool {
    match error {
        CallError::Unreachable { .. }
        | CallError::NotConnected { .. }
        | CallError::NotLeader { .. }
        | CallError::StaleTerm { .. }
        | CallError::StaleIncarnation { .. } => true,
        CallError::Sql(error) => error.state == SqlState::ADMIN_SHUTDOWN,
        _ => false,
    }
}

/// Whether an attempt that has ended so may have done it, or may still do it.
fn may_be_done(error: &CallError) -> bool {
    const OPEN: [SqlState; 2] =
        [SqlState::ADMIN_SHUTDOWN, SqlState::TRANSACTION_RESOLUTION_UNKNOWN];
    match error {
        CallError::Unreachable { .. } => true,
        CallError::Sql(error) => OPEN.contains(&error.state),
        _ => false,
    }
}

/// Whether who has refused an attempt has looked for what an earlier one may have done, and has found nothing.
fn has_looked(error: &CallError) -> bool {
    matches!(error, CallError::Sql(error) if error.state != SqlState::CANNOT_CONNECT_NOW)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use millrace_common::SqlError;
    use parking_lot::Mutex;

    use super::*;

    fn unreachable() -> CallError {
        CallError::Unreachable { peer: "m:1".to_owned(), cause: "it was killed".to_owned() }
    }

    fn not_connected() -> CallError {
        CallError::NotConnected { peer: "m:1".to_owned(), cause: "nobody listens".to_owned() }
    }

    fn not_leader() -> CallError {
        CallError::NotLeader { leader: "m:2".to_owned(), term: 7 }
    }

    fn refused(state: SqlState) -> CallError {
        SqlError::new(state, "it is refused").into()
    }

    /// What comes of a question whose attempts end so; the last answer is given again and again. And how often it was
    /// asked: somebody is looked for before each attempt but the first.
    async fn comes_of(
        mut answers: Vec<Result<u32, CallError>>,
    ) -> (Result<Answered<u32>, Failure>, usize) {
        answers.reverse();
        let (answers, asked) = (Mutex::new(answers), AtomicUsize::new(0));
        let looks = AtomicUsize::new(0);
        let call = || {
            asked.fetch_add(1, Ordering::Relaxed);
            let mut answers = answers.lock();
            let next = answers.last().cloned().expect("there is an answer");
            if answers.len() > 1 {
                answers.pop();
            }
            std::future::ready(next)
        };
        let look = || {
            looks.fetch_add(1, Ordering::Relaxed);
            std::future::ready(())
        };
        let came = outlasting(call, look).await;
        let asked = asked.into_inner();
        assert_eq!(looks.into_inner() + 1, asked);
        (came, asked)
    }

    #[tokio::test(start_paused = true)]
    async fn who_leads_next_is_asked_again() {
        for (attempts, is_repeat) in [
            (vec![], false),
            // These have had no effect.
            (vec![not_leader(), not_connected(), not_leader()], false),
            (vec![CallError::StaleTerm { term: 7 }], false),
            // These may have.
            (vec![unreachable(), not_connected(), not_leader()], true),
            (vec![not_leader(), unreachable()], true),
            (vec![refused(SqlState::ADMIN_SHUTDOWN)], true),
        ] {
            let asked = attempts.len() + 1;
            let answers = attempts.iter().cloned().map(Err).chain([Ok(3)]).collect();
            let (came, times) = comes_of(answers).await;
            let expected = Answered { answer: 3, is_repeat };
            assert_eq!((came.ok(), times), (Some(expected), asked), "{attempts:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn it_is_given_up_when_nobody_has_led_for_long() {
        for (first, is_known) in [(not_leader(), true), (unreachable(), false)] {
            let began = Instant::now();
            let (came, asked) = comes_of(vec![Err(first.clone()), Err(not_connected())]).await;
            assert_eq!(matches!(came, Err(Failure::Refused(_))), is_known, "{first:?}: {came:?}");
            assert!((40..=51).contains(&asked), "asked {asked} times");
            let took = began.elapsed();
            assert!(took < LEADER_WAIT + PAUSE && took + PAUSE * 2 > LEADER_WAIT, "{took:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_refusal_tells_the_outcome_if_who_refuses_has_looked() {
        let exists = || Err(refused(SqlState::DUPLICATE_OBJECT));
        let protocol = || Err(CallError::Protocol { ours: 1, theirs: 2, build: "next".to_owned() });
        for (answers, is_known) in [
            (vec![exists()], true),
            (vec![protocol()], true),
            (vec![Err(unreachable()), exists()], true),
            (vec![Err(unreachable()), protocol()], false),
            (vec![Err(unreachable()), Err(refused(SqlState::CANNOT_CONNECT_NOW))], false),
            (vec![Err(refused(SqlState::TRANSACTION_RESOLUTION_UNKNOWN))], false),
        ] {
            let count = answers.len();
            let (came, asked) = comes_of(answers.clone()).await;
            assert_eq!(asked, count, "it is not asked again: {answers:?}");
            let is_refused = matches!(came, Err(Failure::Refused(_)));
            assert!(came.is_err() && is_refused == is_known, "{answers:?}: {came:?}");
        }
    }

    /// It has waited there for longer than somebody is looked for.
    #[tokio::test(start_paused = true)]
    async fn a_leader_that_was_there_for_long_is_looked_for_anew() {
        let asked = AtomicUsize::new(0);
        let call = || async {
            match asked.fetch_add(1, Ordering::Relaxed) {
                0 => Err(not_connected()),
                1 => {
                    tokio::time::sleep(LEADER_WAIT * 2).await;
                    Err(unreachable())
                }
                _ => Ok(3),
            }
        };
        let came = outlasting(call, || std::future::ready(())).await;
        assert_eq!(came.ok(), Some(Answered { answer: 3, is_repeat: true }));
    }
}
