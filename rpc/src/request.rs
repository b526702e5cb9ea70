//! Ids of requests: what one statement, or one step of the leader, causes in other processes can be found in their logs by
//! its id.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tracing::Instrument;

tokio::task_local! {
    static CURRENT: RequestId;
}

/// Bytes of an id, at most.
const MAX_LENGTH: usize = 64;

/// `incarnation-number` of the process where the request began.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestId(Arc<str>);

impl RequestId {
    /// The next of a process; 0 is one without an incarnation.
    pub fn next(incarnation: u64) -> RequestId {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        RequestId(format!("{incarnation}-{number}").into())
    }

    /// That of the request that the running task works for.
    pub fn current() -> Option<RequestId> {
        CURRENT.try_with(Clone::clone).ok()
    }

    /// One from another process. `None`: it is none that a process gives.
    pub(crate) fn parse(text: &str) -> Option<RequestId> {
        let is_id = text.len() <= MAX_LENGTH
            && text.split_once('-').is_some_and(|(incarnation, number)| {
                [incarnation, number].iter().all(|part| part.parse::<u64>().is_ok())
            });
        is_id.then(|| RequestId(text.into()))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Runs a future for this request. Tasks that it spawns are part of it only if their work is [`carried`].
    pub async fn scope<F: Future>(self, work: F) -> F::Output {
        CURRENT.scope(self, work).await
    }
}

/// Work for a task of its own that is still part of the request that the running task works for, in its logs and in the
/// calls that it makes.
pub fn carried<F: Future>(work: F) -> impl Future<Output = F::Output> {
    let (request, work) = (RequestId::current(), work.in_current_span());
    async move {
        match request {
            Some(request) => request.scope(work).await,
            None => work.await,
        }
    }
}

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_future_has_the_id_of_its_request_and_no_other() {
        assert_eq!(RequestId::current(), None);
        let id = RequestId::next(7);
        assert!(id.as_str().starts_with("7-"));
        let seen = id.clone().scope(async { RequestId::current() }).await;
        assert_eq!(seen, Some(id.clone()));
        assert_ne!(RequestId::next(7), id);
    }

    #[tokio::test]
    async fn a_task_has_the_request_that_its_work_is_carried_from() {
        let id = RequestId::next(7);
        let spawned = async {
            let own = tokio::spawn(async { RequestId::current() }).await.unwrap();
            let carried = tokio::spawn(carried(async { RequestId::current() })).await.unwrap();
            (own, carried)
        };
        assert_eq!(id.clone().scope(spawned).await, (None, Some(id)));
        assert_eq!(tokio::spawn(carried(async { RequestId::current() })).await.unwrap(), None);
    }

    #[test]
    fn what_is_no_id_is_not_taken_into_the_log() {
        assert_eq!(RequestId::parse("12-3").map(|id| id.to_string()).as_deref(), Some("12-3"));
        for text in ["", "12", "a-b", "1-2\n", "1-2-3", &"1".repeat(100)] {
            assert_eq!(RequestId::parse(text), None, "{text}");
        }
    }
}
