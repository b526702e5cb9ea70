//! Commits of a job that are on their way into the log while its tasks process the next epoch.

use std::collections::VecDeque;
use std::future::pending;

use futures::StreamExt;
use futures::future::BoxFuture;
use futures::stream::FuturesOrdered;
use tokio::sync::oneshot;

use crate::schedule::Position;

/// So many commits of a job wait for the log at the most: one that is being written and one that comes into the next
/// record. As the log has one write under way, a job has no more entries a second than the log has records.
const LIMIT: usize = 2;

/// The commits of one generation, oldest first. All are awaited together; they are concluded in order.
pub struct InFlight<'a, E> {
    commits: FuturesOrdered<BoxFuture<'a, Result<(), E>>>,
    positions: VecDeque<Position>,
    /// Completes when the newest is concluded.
    newest: Option<oneshot::Receiver<()>>,
    /// Of the last commit that was cut.
    number: u64,
}

/// A commit's place in the order in which commits are concluded.
#[derive(Default)]
pub struct Turn {
    before: Option<oneshot::Receiver<()>>,
    own: Option<oneshot::Sender<()>>,
}

impl Turn {
    /// Completes when all commits before are concluded; never, if one of them fails.
    pub async fn begin(&mut self) {
        if let Some(before) = self.before.take()
            && before.await.is_err()
        {
            pending().await
        }
    }

    /// The next one may begin.
    pub fn end(&mut self) {
        // It may not have come.
        self.own.take().map(|own| own.send(()));
    }
}

impl<'a, E> InFlight<'a, E> {
    /// Of a job that has so many commits, none of which is in flight.
    pub fn new(commits: u64) -> InFlight<'a, E> {
        let (positions, newest) = (VecDeque::new(), None);
        InFlight { commits: FuturesOrdered::new(), positions, newest, number: commits }
    }

    /// What the next cut's commit is numbered.
    pub fn next_number(&self) -> u64 {
        self.number + 1
    }

    /// The commit of that number will be logged; one that is not leaves its number to the next.
    pub fn take_number(&mut self) {
        self.number += 1;
    }

    pub fn is_empty(&self) -> bool {
        self.positions.is_empty()
    }

    /// Where the newest was cut.
    pub fn newest(&self) -> Option<Position> {
        self.positions.back().copied()
    }

    /// Whether another epoch may be cut.
    pub fn has_room(&self) -> bool {
        self.positions.len() < LIMIT
    }

    /// Adds the commit of a cut at `position`.
    pub fn push(
        &mut self,
        position: Position,
        commit: impl FnOnce(Turn) -> BoxFuture<'a, Result<(), E>>,
    ) {
        let (own, concluded) = oneshot::channel();
        let before = self.newest.replace(concluded);
        self.positions.push_back(position);
        self.commits.push_back(commit(Turn { before, own: Some(own) }));
    }

    /// Awaits `step` while the commits go on. Fails as soon as one of them does.
    pub async fn during<T>(&mut self, step: impl Future<Output = T>) -> Result<T, E> {
        tokio::pin!(step);
        loop {
            tokio::select! {
                biased;
                Some(concluded) = self.commits.next(), if !self.commits.is_empty() => {
                    self.positions.pop_front();
                    concluded?;
                }
                done = &mut step => return Ok(done),
            }
        }
    }

    /// Waits until none is left.
    pub async fn drain(&mut self) -> Result<(), E> {
        while let Some(concluded) = self.commits.next().await {
            self.positions.pop_front();
            concluded?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use futures::FutureExt;
    use millrace_common::Epoch;

    use super::*;

    fn at(epoch: u64) -> Position {
        Position { epoch: Epoch(epoch), backfill: None, due: None }
    }

    type Answer = oneshot::Receiver<Result<(), &'static str>>;

    /// A commit whose verdict the test gives; it notes when it is concluded.
    fn push<'a>(
        in_flight: &mut InFlight<'a, &'static str>,
        epoch: u64,
        verdict: Answer,
        concluded: &'a parking_lot::Mutex<Vec<u64>>,
    ) {
        in_flight.push(at(epoch), |mut turn| {
            Box::pin(async move {
                let verdict = verdict.await.map_err(|_| "no verdict")?;
                turn.begin().await;
                verdict?;
                concluded.lock().push(epoch);
                turn.end();
                Ok(())
            })
        });
    }

    #[test]
    fn commits_are_concluded_in_order_whatever_is_answered_first() {
        let concluded = parking_lot::Mutex::default();
        let mut in_flight = InFlight::new(0);
        let ((first, a), (second, b)) = (oneshot::channel(), oneshot::channel());
        push(&mut in_flight, 1, a, &concluded);
        assert!(in_flight.has_room());
        push(&mut in_flight, 2, b, &concluded);
        assert!(!in_flight.has_room());
        assert_eq!(in_flight.newest(), Some(at(2)));
        second.send(Ok(())).unwrap();
        let steps = RefCell::new(0);
        let step = async { *steps.borrow_mut() += 1 };
        assert_eq!(in_flight.during(step).now_or_never(), Some(Ok(())));
        assert_eq!(*steps.borrow(), 1, "the step does not wait");
        assert!(concluded.lock().is_empty());
        first.send(Ok(())).unwrap();
        assert_eq!(in_flight.drain().now_or_never(), Some(Ok(())));
        assert_eq!(*concluded.lock(), [1, 2]);
        assert!(in_flight.is_empty());
    }

    #[test]
    fn nothing_is_concluded_behind_a_commit_that_fails() {
        let concluded = parking_lot::Mutex::default();
        let mut in_flight = InFlight::new(0);
        let ((first, a), (second, b)) = (oneshot::channel(), oneshot::channel());
        push(&mut in_flight, 1, a, &concluded);
        push(&mut in_flight, 2, b, &concluded);
        second.send(Ok(())).unwrap();
        first.send(Err("void")).unwrap();
        assert_eq!(in_flight.during(pending::<()>()).now_or_never(), Some(Err("void")));
        drop(in_flight);
        assert!(concluded.lock().is_empty());
    }
}
