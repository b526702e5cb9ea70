//! When puts, lists, deletes and appends to the log start, once the store has asked for fewer requests.
//!
//! Stores refuse requests that write or list above a rate of their own, which is not the one of reads (these have a
//! scheduler, `cache/scheduler`). So after such an answer the requests of a second are limited ([`super::limiter`]), until
//! the store has not complained for a while. Without a limit nothing waits. Appends come first, because every commit
//! waits for them and there is one at a time; then puts, lists and deletes, with a small share for those that are not
//! first.
//!
//! Nobody else starts what waits: each request that waits looks after the time of the next one.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use millrace_common::EnvHandle;
use parking_lot::Mutex;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep_until};

use super::Failure;
use super::limiter::{Limiter, ReadLimits, Start};

/// What a request is for, the most urgent first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum RequestClass {
    /// Creates what must not exist yet: a record of the log.
    Append,
    Put,
    List,
    Delete,
}

impl RequestClass {
    pub const ALL: [RequestClass; 4] =
        [RequestClass::Append, RequestClass::Put, RequestClass::List, RequestClass::Delete];

    pub fn name(self) -> &'static str {
        match self {
            RequestClass::Append => "append",
            RequestClass::Put => "put",
            RequestClass::List => "list",
            RequestClass::Delete => "delete",
        }
    }
}

/// Requests of a class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Wait at this moment because the store has asked for fewer.
    pub waiting: usize,
    /// Are under way at this moment.
    pub in_flight: usize,
    /// Answered since the store was opened.
    pub served: u64,
    /// Have failed and are being tried again.
    pub retrying: usize,
}

/// How requests other than reads are held back.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PaceStats {
    /// In the order of [`RequestClass::ALL`].
    pub classes: [Held; RequestClass::ALL.len()],
    /// Requests that may start in a second; `None`: any number.
    pub rate: Option<f64>,
    /// Answers of the store that it wants fewer requests.
    pub slow_downs: u64,
}

/// One of this many starts is given to a class that is not the first.
const SHARE: u64 = 8;
/// From these the rate is estimated that the store can take. How many requests are in flight is their senders' matter.
const ESTIMATE: ReadLimits = ReadLimits { least: 16, start: 128, most: 1_024 };

#[derive(Debug)]
struct State {
    limiter: Limiter,
    waiting: [VecDeque<oneshot::Sender<()>>; RequestClass::ALL.len()],
    started: u64,
}

impl State {
    /// The next request that waits. One whose sender went away has closed its channel.
    fn take(&mut self) -> Option<oneshot::Sender<()>> {
        for queue in &mut self.waiting {
            queue.retain(|granted| !granted.is_closed());
        }
        self.started += 1;
        let filled = |queue: &&mut VecDeque<_>| !queue.is_empty();
        // Not the appends: every commit waits for them.
        let append = !self.waiting[RequestClass::Append as usize].is_empty();
        let queues = self.waiting.iter_mut();
        let next = match !append && self.started.is_multiple_of(SHARE) {
            true => queues.rev().find(filled),
            false => queues.into_iter().find(filled),
        };
        next.and_then(VecDeque::pop_front)
    }

    fn count(&self, class: RequestClass) -> usize {
        self.waiting[class as usize].iter().filter(|granted| !granted.is_closed()).count()
    }

    fn waits(&self) -> bool {
        self.waiting.iter().any(|queue| !queue.is_empty())
    }
}

#[derive(Debug)]
pub(super) struct Pace {
    state: Mutex<State>,
    retrying: [AtomicUsize; RequestClass::ALL.len()],
    in_flight: [AtomicUsize; RequestClass::ALL.len()],
    served: [AtomicU64; RequestClass::ALL.len()],
    slow_downs: AtomicU64,
    env: EnvHandle,
}

impl Pace {
    pub fn new(env: EnvHandle) -> Arc<Pace> {
        let limiter = Limiter::new(ESTIMATE, env.now());
        let state = State { limiter, waiting: Default::default(), started: 0 };
        Arc::new(Pace {
            state: Mutex::new(state),
            retrying: Default::default(),
            in_flight: Default::default(),
            served: Default::default(),
            slow_downs: AtomicU64::new(0),
            env,
        })
    }

    /// Returns when the request may start.
    pub async fn turn(&self, class: RequestClass) {
        let mut turn = {
            let mut state = self.state.lock();
            if state.limiter.rate().is_none() && !state.waits() {
                return;
            }
            let (granted, turn) = oneshot::channel();
            state.waiting[class as usize].push_back(granted);
            turn
        };
        loop {
            let Some(then) = self.start_some() else { return };
            // In a fixed order, so that a seed repeats a run.
            tokio::select! {
                biased;
                // The sender is in the queue until it grants.
                _ = &mut turn => return,
                () = sleep_until(then) => {}
            }
        }
    }

    /// Lets those start that may. When the next one may; `None`: nobody waits any longer.
    fn start_some(&self) -> Option<Instant> {
        let mut state = self.state.lock();
        while state.waits() {
            let now = self.env.now();
            match state.limiter.may_start(0, now) {
                Start::At(then) => return Some(then),
                // Nothing is in flight for it.
                Start::Later => return Some(now + Duration::from_millis(1)),
                Start::Now => {
                    if state.take().is_some_and(|granted| granted.send(()).is_ok()) {
                        state.limiter.started();
                    }
                }
            }
        }
        None
    }

    /// Counts a request as one that is under way, until the answer is dropped.
    pub fn begin(self: &Arc<Self>, class: RequestClass) -> UnderWay {
        self.in_flight[class as usize].fetch_add(1, Ordering::Relaxed);
        UnderWay { pace: Arc::clone(self), class }
    }

    /// The store has answered.
    pub fn answered(&self, class: RequestClass, took: Duration, bytes: u64) {
        self.served[class as usize].fetch_add(1, Ordering::Relaxed);
        let mut state = self.state.lock();
        let saturated = state.waits();
        state.limiter.answered(took, bytes, saturated, self.env.now());
    }

    pub fn failed(&self, failure: Failure) {
        match failure {
            Failure::SlowDown => {
                self.slow_downs.fetch_add(1, Ordering::Relaxed);
                self.state.lock().limiter.slow_down(self.env.now());
            }
            Failure::Timeout => self.state.lock().limiter.timed_out(self.env.now()),
            Failure::Unavailable | Failure::Unknown | Failure::Final => {}
        }
    }

    /// Counts a request as one that is tried again, until the answer is dropped.
    pub fn again(self: &Arc<Self>, class: RequestClass) -> Again {
        self.retrying[class as usize].fetch_add(1, Ordering::Relaxed);
        Again { pace: Arc::clone(self), class }
    }

    pub fn stats(&self) -> PaceStats {
        let state = self.state.lock();
        let held = |class: RequestClass| Held {
            waiting: state.count(class),
            in_flight: self.in_flight[class as usize].load(Ordering::Relaxed),
            served: self.served[class as usize].load(Ordering::Relaxed),
            retrying: self.retrying[class as usize].load(Ordering::Relaxed),
        };
        PaceStats {
            classes: RequestClass::ALL.map(held),
            rate: state.limiter.rate(),
            slow_downs: self.slow_downs.load(Ordering::Relaxed),
        }
    }
}

/// A request that is under way.
#[derive(Debug)]
pub(super) struct UnderWay {
    pace: Arc<Pace>,
    class: RequestClass,
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.pace.in_flight[self.class as usize].fetch_sub(1, Ordering::Relaxed);
    }
}

/// A request that is tried again.
#[derive(Debug)]
pub(super) struct Again {
    pace: Arc<Pace>,
    class: RequestClass,
}

impl Drop for Again {
    fn drop(&mut self) {
        self.pace.retrying[self.class as usize].fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::Pin;

    use futures::poll;

    use super::*;

    type Waiting<'a> = Pin<Box<dyn Future<Output = ()> + 'a>>;

    /// One whose rate is limited to the least: ten requests a second.
    async fn limited() -> Arc<Pace> {
        let pace = Pace::new(EnvHandle::default());
        for _ in 0..60 {
            tokio::time::advance(Duration::from_secs(2)).await;
            pace.failed(Failure::SlowDown);
        }
        assert_eq!(pace.stats().rate, Some(10.0));
        pace
    }

    async fn queue(pace: &Pace, class: RequestClass) -> Waiting<'_> {
        let mut turn: Waiting = Box::pin(pace.turn(class));
        assert!(poll!(turn.as_mut()).is_pending());
        turn
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_waits_for_a_store_that_does_not_complain() {
        let pace = Pace::new(EnvHandle::default());
        let before = pace.env.now();
        for _ in 0..10_000 {
            pace.turn(RequestClass::Delete).await;
        }
        assert_eq!(pace.env.elapsed(before), Duration::ZERO);
        pace.failed(Failure::Timeout);
        assert_eq!(pace.stats().rate, None, "a time-out says nothing about the rate");
    }

    #[tokio::test(start_paused = true)]
    async fn an_append_goes_before_all_that_waits_and_nothing_waits_for_ever() {
        let pace = limited().await;
        let mut puts = Vec::new();
        for _ in 0..100 {
            puts.push(queue(&pace, RequestClass::Put).await);
        }
        let mut delete = queue(&pace, RequestClass::Delete).await;
        let mut append = queue(&pace, RequestClass::Append).await;
        assert_eq!(pace.stats().classes.map(|c| c.waiting), [1, 100, 0, 1]);
        append.as_mut().await;
        assert_eq!(pace.stats().classes.map(|c| c.waiting), [0, 100, 0, 1]);
        delete.as_mut().await;
        let left = pace.stats().classes[RequestClass::Put as usize].waiting;
        assert!((100 - SHARE as usize..100).contains(&left), "{left} puts still wait");
    }

    #[tokio::test(start_paused = true)]
    async fn who_goes_away_takes_no_turn() {
        let pace = limited().await;
        let gone = queue(&pace, RequestClass::Append).await;
        let mut put = queue(&pace, RequestClass::Put).await;
        drop(gone);
        assert_eq!(pace.stats().classes.map(|c| c.waiting), [0, 1, 0, 0]);
        put.as_mut().await;
        assert_eq!(pace.stats().classes, [Held::default(); 4]);
    }

    #[tokio::test(start_paused = true)]
    async fn the_rate_recovers_by_itself() {
        let pace = limited().await;
        tokio::time::sleep(Duration::from_secs(60)).await;
        pace.turn(RequestClass::Put).await;
        assert_eq!(pace.stats().rate, None);
        assert_eq!(pace.stats().slow_downs, 60);
    }
}
