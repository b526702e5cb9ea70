//! Whose large epoch goes on while memory is tight.
//!
//! Much of what an epoch takes in is held until its barrier. Jobs that work on large epochs at the same time need the
//! sum of that, and are done no sooner for it. So while memory is tight one job takes in more, and the others wait
//! with theirs, until its epoch ends.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use millrace_common::{EnvHandle, JobId};
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::MemoryGovernor;

/// How long others wait while the job that precedes does nothing: its store may not answer, or its epoch has no end yet.
const PATIENCE: Duration = Duration::from_secs(2);
/// Until who waits looks whether memory is still tight.
const LOOK: Duration = Duration::from_millis(100);

#[derive(Debug, Default)]
pub(super) struct Precedence {
    state: Mutex<State>,
    /// Steps of tasks of the job that precedes.
    steps: AtomicU64,
    ended: Notify,
}

#[derive(Debug, Default)]
struct State {
    job: Option<JobId>,
    /// Of the job, that have not ended their epochs.
    tasks: usize,
    /// Rises when another job precedes: what an earlier one gives back has no effect.
    term: u64,
}

/// What who waits has seen last of the job that precedes: its steps, and since when there were so many.
#[derive(Debug, Default)]
pub struct Waiting(Option<(u64, Instant)>);

/// A task's part of its job's precedence, until it is dropped.
#[derive(Debug)]
pub struct Precedes {
    governor: Arc<MemoryGovernor>,
    term: u64,
}

impl MemoryGovernor {
    /// Completes when a large epoch of this job may take in more: its job precedes, with the guard that is returned, or
    /// memory is not tight. `waiting` is kept by who gives the wait up to come again.
    pub async fn precede(
        self: &Arc<Self>,
        job: JobId,
        clock: &EnvHandle,
        waiting: &mut Waiting,
    ) -> Option<Precedes> {
        while self.is_tight() {
            // Before the look, so that no end is missed.
            let ended = self.precedence.ended.notified();
            let steps = self.precedence.steps.load(Ordering::Relaxed);
            let (_, since) = match waiting.0 {
                Some(last) if last.0 == steps => last,
                _ => *waiting.0.insert((steps, clock.now())),
            };
            let goes_on = clock.elapsed(since) < PATIENCE;
            if let Some(term) = self.precedence.enter(job, !goes_on) {
                waiting.0 = None;
                return Some(Precedes { governor: Arc::clone(self), term });
            }
            let _ = tokio::time::timeout(LOOK, ended).await;
        }
        waiting.0 = None;
        None
    }
}

impl Precedence {
    /// The term in which the job precedes; `None`: another one does.
    fn enter(&self, job: JobId, instead: bool) -> Option<u64> {
        let mut state = self.state.lock();
        match state.job {
            Some(first) if first == job => state.tasks += 1,
            Some(_) if !instead => return None,
            _ => {
                self.steps.fetch_add(1, Ordering::Relaxed);
                *state = State { job: Some(job), tasks: 1, term: state.term + 1 };
            }
        }
        Some(state.term)
    }

    fn leave(&self, term: u64) {
        let mut state = self.state.lock();
        if state.term != term {
            return;
        }
        state.tasks = state.tasks.saturating_sub(1);
        if state.tasks == 0 {
            state.job = None;
            self.ended.notify_waiters();
        }
    }
}

impl Precedes {
    /// The task goes on.
    pub fn step(&self) {
        self.governor.precedence.steps.fetch_add(1, Ordering::Relaxed);
    }
}

impl Drop for Precedes {
    fn drop(&mut self) {
        self.governor.precedence.leave(self.term);
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;
    use millrace_common::RelationId;

    use super::*;
    use crate::memory::{MemoryClass, Reservation};

    const A: JobId = RelationId(1);
    const B: JobId = RelationId(2);

    fn tight() -> (Arc<MemoryGovernor>, Reservation) {
        let governor = MemoryGovernor::new(100 << 20);
        let mut held = governor.account(MemoryClass::Memtable);
        held.set(80 << 20);
        assert!(governor.is_tight());
        (governor, held)
    }

    async fn precede(governor: &Arc<MemoryGovernor>, job: JobId) -> Option<Precedes> {
        governor.precede(job, &EnvHandle::default(), &mut Waiting::default()).await
    }

    #[tokio::test(start_paused = true)]
    async fn one_job_precedes_with_all_its_tasks_until_all_have_ended_their_epochs() {
        let (governor, _held) = tight();
        let first = precede(&governor, A).await;
        let second = precede(&governor, A).await;
        assert!(first.is_some() && second.is_some());
        let mut other = Box::pin(precede(&governor, B));
        assert!(other.as_mut().now_or_never().is_none());
        drop(first);
        assert!(other.as_mut().now_or_never().is_none());
        drop(second);
        assert!(other.now_or_never().flatten().is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn nobody_waits_once_there_is_room() {
        let (governor, mut held) = tight();
        let _first = precede(&governor, A).await;
        let waiting = precede(&governor, B);
        let freed = async {
            tokio::time::sleep(Duration::from_millis(300)).await;
            held.set(0);
        };
        let (guard, ()) = tokio::join!(waiting, freed);
        assert!(guard.is_none(), "it goes on beside the other");
    }

    /// One that works is waited for as long as that takes, one that does nothing only for a moment; what that gives back
    /// later is not the other's.
    #[tokio::test(start_paused = true)]
    async fn a_job_that_does_nothing_precedes_no_longer() {
        let (governor, _held) = tight();
        let first = precede(&governor, A).await.unwrap();
        let (clock, mut waiting) = (EnvHandle::default(), Waiting::default());
        // It gives the wait up many times meanwhile.
        let mut look = async |time| {
            let wait = governor.precede(B, &clock, &mut waiting);
            tokio::time::timeout(time, wait).await.ok().flatten()
        };
        for _ in 0..100 {
            assert!(look(PATIENCE / 5).await.is_none());
            first.step();
        }
        let mut second = None;
        for _ in 0..100 {
            second = second.or(look(PATIENCE / 40).await);
        }
        assert!(second.is_some());
        drop(first);
        assert!(precede(&governor, A).now_or_never().is_none(), "the other one precedes now");
        drop(second);
        assert!(precede(&governor, A).now_or_never().flatten().is_some());
    }
}
