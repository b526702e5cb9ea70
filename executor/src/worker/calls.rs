//! Calls of frontends in other processes for statements, by the statements' ids: which are under way here, and which
//! statements nobody waits for any more.
//!
//! A call may arrive when its frontend has lost the connection and has asked, by another one, what became of the
//! statement. So a statement that was abandoned is remembered, and refused.

use std::collections::VecDeque;
use std::time::Duration;

use millrace_common::collections::{HashMap, HashSet};
use millrace_common::{EnvHandle, SqlError, SqlState};
use millrace_rpc::call_error::CallError;
use millrace_rpc::version::StatementId;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// For how long an abandoned statement is remembered: no connection that has been lost brings anything after so long.
const REMEMBERED: Duration = Duration::from_secs(3_600);
/// How many are remembered. Beyond that none can be abandoned.
const MOST: usize = 1 << 16;

/// See the module.
pub(super) struct StatementCalls {
    calls: Mutex<Calls>,
    /// Told when one ends.
    ended: Notify,
    env: EnvHandle,
}

#[derive(Default)]
struct Calls {
    under_way: HashMap<StatementId, UnderWay>,
    abandoned: HashSet<StatementId>,
    /// The same, and since when, oldest first.
    order: VecDeque<(Instant, StatementId)>,
}

/// Calls for one statement.
#[derive(Default)]
struct UnderWay {
    calls: usize,
    abandoned: CancellationToken,
}

/// A call, until it is dropped.
struct Call<'a> {
    of: &'a StatementCalls,
    id: StatementId,
    abandoned: CancellationToken,
}

impl StatementCalls {
    pub fn new(env: EnvHandle) -> StatementCalls {
        StatementCalls { calls: Mutex::default(), ended: Notify::new(), env }
    }

    /// Does the work of a call, but no more of it once the statement is abandoned: then the answer is an error.
    pub async fn run<T>(
        &self,
        id: StatementId,
        work: impl Future<Output = Result<T, CallError>>,
    ) -> Result<T, CallError> {
        let call = self.begin(id)?;
        tokio::select! {
            biased;
            () = call.abandoned.cancelled() => Err(given_up().into()),
            answer = work => answer,
        }
    }

    fn begin(&self, id: StatementId) -> Result<Call<'_>, CallError> {
        let mut calls = self.calls.lock();
        if calls.abandoned.contains(&id) {
            return Err(given_up().into());
        }
        let under_way = calls.under_way.entry(id).or_default();
        under_way.calls += 1;
        Ok(Call { of: self, id, abandoned: under_way.abandoned.clone() })
    }

    /// Refuses calls for a statement from now on, and ends those that are under way. Returns when there are none. An
    /// error where too many are remembered: then nothing has happened.
    pub async fn abandon(&self, id: StatementId) -> Result<(), SqlError> {
        loop {
            let mut ended = std::pin::pin!(self.ended.notified());
            // Before they are looked at: what ends in between is not missed.
            ended.as_mut().enable();
            let under_way = {
                let mut calls = self.calls.lock();
                calls.remember(id, self.env.now())?;
                calls.under_way.get(&id).map(|calls| calls.abandoned.clone())
            };
            let Some(abandoned) = under_way else { return Ok(()) };
            abandoned.cancel();
            ended.await;
        }
    }
}

impl Calls {
    fn remember(&mut self, id: StatementId, now: Instant) -> Result<(), SqlError> {
        let is_past = |since| now.saturating_duration_since(since) > REMEMBERED;
        while let Some(&(since, oldest)) = self.order.front()
            && is_past(since)
        {
            self.abandoned.remove(&oldest);
            self.order.pop_front();
        }
        if self.abandoned.contains(&id) {
            return Ok(());
        }
        if self.order.len() >= MOST {
            let message = "too many statements have been abandoned within an hour";
            return Err(SqlError::new(SqlState::INSUFFICIENT_RESOURCES, message));
        }
        self.abandoned.insert(id);
        self.order.push_back((now, id));
        Ok(())
    }
}

impl Drop for Call<'_> {
    fn drop(&mut self) {
        let mut calls = self.of.calls.lock();
        if let Some(under_way) = calls.under_way.get_mut(&self.id) {
            under_way.calls -= 1;
            if under_way.calls == 0 {
                calls.under_way.remove(&self.id);
            }
        }
        drop(calls);
        self.of.ended.notify_waiters();
    }
}

/// Told to nobody who still waits.
fn given_up() -> SqlError {
    let message = "the statement was abandoned by the frontend that has sent it";
    SqlError::new(SqlState::SERIALIZATION_FAILURE, message)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    fn id(number: usize) -> StatementId {
        StatementId { frontend: 7, number: number as u64 }
    }

    fn calls() -> StatementCalls {
        StatementCalls::new(EnvHandle::default())
    }

    #[tokio::test]
    async fn the_work_of_an_abandoned_statement_is_gone_when_that_is_answered() {
        let (calls, work) = (calls(), Arc::new(()));
        let waits = |work: Arc<()>| async move {
            std::future::pending::<()>().await;
            drop(work);
            Ok::<(), CallError>(())
        };
        let abandon = async {
            calls.abandon(id(1)).await.unwrap();
            Arc::strong_count(&work)
        };
        let (first, second, holders) = tokio::join!(
            calls.run(id(1), waits(Arc::clone(&work))),
            calls.run(id(1), waits(Arc::clone(&work))),
            abandon
        );
        assert!(first.is_err() && second.is_err());
        assert_eq!(holders, 1);
    }

    #[tokio::test]
    async fn what_is_abandoned_is_refused_and_others_are_not() {
        let calls = calls();
        assert_eq!(calls.run(id(1), async { Ok(1) }).await.unwrap(), 1);
        for _ in 0..2 {
            calls.abandon(id(1)).await.unwrap();
            assert!(calls.run(id(1), async { Ok(1) }).await.is_err());
        }
        assert_eq!(calls.run(id(2), async { Ok(2) }).await.unwrap(), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_remembered_is_bounded_and_never_too_short() {
        let calls = calls();
        for number in 0..MOST {
            calls.abandon(id(number)).await.unwrap();
        }
        tokio::time::advance(REMEMBERED).await;
        calls.abandon(id(0)).await.unwrap();
        assert!(calls.abandon(id(MOST)).await.is_err());
        assert_eq!(calls.run(id(MOST), async { Ok(1) }).await.unwrap(), 1, "it was not abandoned");
        for number in [0, 1, MOST - 1] {
            assert!(calls.run(id(number), async { Ok(1) }).await.is_err());
        }
        tokio::time::advance(Duration::from_millis(1)).await;
        calls.abandon(id(MOST)).await.unwrap();
        assert!(calls.run(id(MOST), async { Ok(1) }).await.is_err());
        assert_eq!(calls.calls.lock().order.len(), 1, "the others are forgotten");
    }
}
