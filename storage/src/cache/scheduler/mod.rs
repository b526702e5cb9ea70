//! When reads of the store start: all reads of the process pass here.
//!
//! [`queues`] decides whose turn it is, [`limiter`](crate::object::limiter) how many may be in flight and start in a second, [`hedging`]
//! when a slow read is asked for a second time. This module connects them with tasks: a read waits for a
//! [`Permit`], reports with it how the request ended, and returns it by dropping it.

pub(super) mod hedging;
pub(super) mod queues;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use millrace_common::collections::HashMap;
use millrace_common::{EnvHandle, task};
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::{Notify, oneshot};
use tokio::time::{Instant, sleep_until};

use super::{CacheOptions, Priority};
use crate::error::{Result, StorageError};
use crate::object::Failure;
use crate::object::limiter::{Limiter, Start};
use hedging::Hedging;
use queues::{Bounds, Owner, Place, Queues, Slot};

/// A read that was raised is slow after this part of what others may take.
const RAISED: u32 = 2;
/// Timers that are this close are one.
const TIMER_TICK: Duration = Duration::from_millis(1);

#[derive(Debug)]
struct State {
    queues: Queues<oneshot::Sender<Permit>>,
    limiter: Limiter,
    hedging: Hedging,
    /// When reads that wait for the rate are looked at again.
    timer: Option<Instant>,
    /// Reads that are being tried again, by owner.
    retrying: HashMap<Owner, Retrying>,
    last_error: Option<String>,
    /// By class.
    served: [u64; Priority::ALL.len()],
}

/// Reads of one owner that have failed and are being tried again.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Retrying {
    pub reads: usize,
    /// What the store answered last.
    pub error: String,
}

#[derive(Debug, Default)]
struct Counters {
    slow_downs: AtomicU64,
    timeouts: AtomicU64,
    retries: AtomicU64,
    raised: AtomicU64,
    hedges_sent: AtomicU64,
    hedges_won: AtomicU64,
}

/// Reads of a class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClassStats {
    /// At this moment.
    pub queued: usize,
    pub in_flight: usize,
    /// Answered since the cache was opened, in the class that each was started in.
    pub served: u64,
}

/// Reads of the store: those of this moment, and what has happened since the cache was opened.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ReadStats {
    /// In the order of [`Priority::ALL`].
    pub classes: [ClassStats; Priority::ALL.len()],
    /// Reads that may be in flight.
    pub limit: usize,
    /// Reads that may start in a second; `None`: any number.
    pub rate: Option<f64>,
    /// Answers of the store that it wants fewer requests.
    pub slow_downs: u64,
    /// Requests that were given up because no answer came.
    pub timeouts: u64,
    /// Requests that were sent again after a failure.
    pub retries: u64,
    /// Reads that changed to a higher class while they waited, because somebody of that class joined them.
    pub raised: u64,
    /// Second requests for slow reads, and how many of them answered first.
    pub hedges_sent: u64,
    pub hedges_won: u64,
    /// Reads that have failed and are being tried again.
    pub retrying: usize,
    /// Why, of the last one that failed; kept until all are answered.
    pub last_error: Option<String>,
}

#[derive(Debug)]
pub(super) struct ReadScheduler {
    state: Mutex<State>,
    counters: Counters,
    env: EnvHandle,
    runtime: Option<Handle>,
    hedge: bool,
}

/// How urgent a read is: as urgent as the most urgent who waits for it.
#[derive(Debug)]
pub(super) struct Urgency {
    /// Locked after the scheduler's state, where both are.
    state: Mutex<UrgencyState>,
    /// Told when it rises.
    raised: Notify,
}

#[derive(Debug)]
struct UrgencyState {
    priority: Priority,
    /// When the answer is needed, as far as that is known.
    deadline: Option<Instant>,
    /// Where the read has been queued last; it may have left the queue.
    place: Option<(Slot, Place)>,
}

impl Urgency {
    pub fn new(priority: Priority, deadline: Option<Instant>) -> Arc<Urgency> {
        let state = Mutex::new(UrgencyState { priority, deadline, place: None });
        Arc::new(Urgency { state, raised: Notify::new() })
    }

    pub fn priority(&self) -> Priority {
        self.state.lock().priority
    }

    fn deadline(&self) -> Option<Instant> {
        self.state.lock().deadline
    }

    /// Waits until it has risen, since the last call if there was one. Of the read's own task.
    pub async fn raised(&self) {
        self.raised.notified().await;
    }
}

/// The right to have one read in flight.
#[derive(Debug)]
pub(super) struct Permit {
    scheduler: Option<Arc<ReadScheduler>>,
    slot: Slot,
}

impl Permit {
    pub fn slot(&self) -> Slot {
        self.slot
    }

    /// Nobody waits for the read any longer: the store is not asked.
    pub fn unused(self) {
        if let Some(scheduler) = &self.scheduler {
            scheduler.state.lock().limiter.not_needed();
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        if let Some(scheduler) = self.scheduler.take() {
            scheduler.state.lock().queues.finish(self.slot);
            scheduler.start_reads();
        }
    }
}

impl ReadScheduler {
    pub fn new(options: &CacheOptions) -> Arc<ReadScheduler> {
        let bounds = Bounds { bytes: options.read_bytes, scans: options.scan_reads };
        let state = State {
            queues: Queues::new(bounds),
            limiter: Limiter::new(options.reads, options.env.now()),
            hedging: Hedging::default(),
            timer: None,
            retrying: HashMap::default(),
            last_error: None,
            served: Default::default(),
        };
        Arc::new(ReadScheduler {
            state: Mutex::new(state),
            counters: Counters::default(),
            env: options.env.clone(),
            runtime: options.runtime.clone(),
            hedge: options.hedge_reads,
        })
    }

    /// Waits for the read's turn.
    pub async fn acquire(
        self: &Arc<Self>,
        urgency: &Urgency,
        owner: Owner,
        bytes: u64,
    ) -> Result<Permit> {
        let (granted, permit) = oneshot::channel();
        {
            let mut state = self.state.lock();
            let mut urgency = urgency.state.lock();
            let slot = Slot { priority: urgency.priority, owner, bytes };
            urgency.place = Some((slot, state.queues.push(slot, granted)));
        }
        self.start_reads();
        permit.await.map_err(|_| StorageError::internal("the read scheduler is gone"))
    }

    /// Somebody waits for the read who is more urgent than it, and needs it at that time if there is one: if it is queued,
    /// it changes its class.
    pub fn raise(
        self: &Arc<Self>,
        urgency: &Urgency,
        priority: Priority,
        deadline: Option<Instant>,
    ) {
        if urgency.priority() <= priority {
            return;
        }
        {
            let mut state = self.state.lock();
            let raised = &urgency.raised;
            let mut urgency = urgency.state.lock();
            urgency.priority = urgency.priority.min(priority);
            urgency.deadline = deadline;
            raised.notify_one();
            let Some((from, place)) = urgency.place else { return };
            let slot = Slot { priority: urgency.priority, ..from };
            urgency.place = state.queues.raise(from, place, slot.priority).map(|p| (slot, p));
            if urgency.place.is_none() {
                return;
            }
        }
        self.counters.raised.fetch_add(1, Ordering::Relaxed);
        self.start_reads();
    }

    /// A second request for a read that has one in flight; `None`: it would be one too many.
    pub fn try_hedge(self: &Arc<Self>, slot: Slot) -> Option<Permit> {
        let mut state = self.state.lock();
        let State { queues, limiter, hedging, .. } = &mut *state;
        let may_start = limiter.may_start(queues.in_flight(), self.env.now()) == Start::Now;
        // A store that asks for fewer requests gets no second ones.
        if !may_start || limiter.rate().is_some() || !hedging.spend() {
            return None;
        }
        queues.start(slot);
        limiter.started();
        self.counters.hedges_sent.fetch_add(1, Ordering::Relaxed);
        Some(Permit { scheduler: Some(Arc::clone(self)), slot })
    }

    /// How long a read that has begun then, and is this urgent by now, may take before it is asked for a second time;
    /// `None`: as long as it takes. One that has begun before anybody waited for it was given time already: it is slow
    /// earlier. One with a deadline is not slow before that, unless a second request is likely to help.
    pub fn hedge_delay(&self, slot: Slot, urgency: &Urgency, began: Instant) -> Option<Duration> {
        let priority = urgency.priority();
        if !self.hedge || priority > Priority::Barrier {
            return None;
        }
        let state = self.state.lock();
        let delay = state.hedging.delay(slot.bytes)?;
        let delay = if priority < slot.priority { delay / RAISED } else { delay };
        let Some(deadline) = urgency.deadline().filter(|_| priority == Priority::Barrier) else {
            return Some(delay);
        };
        let most = deadline.saturating_duration_since(began);
        Some(state.hedging.worth(slot.bytes, most).unwrap_or(most.max(delay)))
    }

    pub fn hedge_won(&self) {
        self.counters.hedges_won.fetch_add(1, Ordering::Relaxed);
    }

    /// Gives free slots to reads that wait.
    fn start_reads(self: &Arc<Self>) {
        loop {
            let next = {
                let mut state = self.state.lock();
                let State { queues, limiter, timer, .. } = &mut *state;
                if queues.queued() == 0 {
                    return;
                }
                match limiter.may_start(queues.in_flight(), self.env.now()) {
                    Start::Later => return,
                    Start::At(then) => {
                        if timer.is_none_or(|armed| then + TIMER_TICK < armed) {
                            *timer = Some(then);
                            self.look_again_at(then);
                        }
                        return;
                    }
                    Start::Now => {
                        let is_paced = limiter.rate().is_some();
                        queues.take(limiter.limit(), is_paced).inspect(|_| limiter.started())
                    }
                }
            };
            let Some((slot, granted)) = next else { return };
            let permit = Permit { scheduler: Some(Arc::clone(self)), slot };
            if let Err(mut unwanted) = granted.send(permit) {
                // Its reader went away. Dropping the permit here would call this function again.
                unwanted.scheduler = None;
                let mut state = self.state.lock();
                state.queues.finish(slot);
                state.limiter.not_needed();
            }
        }
    }

    fn look_again_at(self: &Arc<Self>, then: Instant) {
        let Some(runtime) = self.runtime.clone().or_else(|| Handle::try_current().ok()) else {
            return;
        };
        let scheduler = Arc::downgrade(self);
        task::spawn_on(&runtime, "start reads", async move {
            sleep_until(then).await;
            if let Some(scheduler) = scheduler.upgrade() {
                scheduler.state.lock().timer.take_if(|armed| *armed <= then);
                scheduler.start_reads();
            }
        });
    }

    /// A request was answered; `priority`: how urgent its read is by now.
    pub fn answered(&self, slot: Slot, priority: Priority, took: Duration) {
        let mut state = self.state.lock();
        state.served[slot.priority as usize] += 1;
        let State { queues, limiter, hedging, .. } = &mut *state;
        let saturated = queues.is_saturated(limiter.limit());
        limiter.answered(took, slot.bytes, saturated, self.env.now());
        if priority <= Priority::Barrier {
            hedging.answered(took, slot.bytes);
        }
    }

    /// A request failed.
    pub fn failed(&self, failure: Failure) {
        let now = self.env.now();
        match failure {
            Failure::SlowDown => {
                self.counters.slow_downs.fetch_add(1, Ordering::Relaxed);
                self.state.lock().limiter.slow_down(now);
            }
            Failure::Timeout => {
                self.counters.timeouts.fetch_add(1, Ordering::Relaxed);
                self.state.lock().limiter.timed_out(now);
            }
            Failure::Unavailable | Failure::Unknown | Failure::Final => {}
        }
    }

    /// Counts a read as one that is tried again, until the answer is dropped.
    pub fn retry(self: &Arc<Self>, owner: Owner, error: String) -> RetryMark {
        self.counters.retries.fetch_add(1, Ordering::Relaxed);
        let mut state = self.state.lock();
        state.last_error = Some(error.clone());
        let retrying = state.retrying.entry(owner).or_default();
        retrying.reads += 1;
        retrying.error = error;
        RetryMark { scheduler: Arc::clone(self), owner }
    }

    /// Reads of an owner that are being tried again.
    pub fn retrying(&self, owner: Owner) -> Option<Retrying> {
        self.state.lock().retrying.get(&owner).cloned()
    }

    pub fn stats(&self) -> ReadStats {
        let state = self.state.lock();
        let get = |c: &AtomicU64| c.load(Ordering::Relaxed);
        let class = |p: Priority| {
            let (queued, in_flight) = state.queues.counts(p);
            ClassStats { queued, in_flight, served: state.served[p as usize] }
        };
        ReadStats {
            classes: Priority::ALL.map(class),
            limit: state.limiter.limit(),
            rate: state.limiter.rate(),
            slow_downs: get(&self.counters.slow_downs),
            timeouts: get(&self.counters.timeouts),
            retries: get(&self.counters.retries),
            raised: get(&self.counters.raised),
            hedges_sent: get(&self.counters.hedges_sent),
            hedges_won: get(&self.counters.hedges_won),
            retrying: state.retrying.values().map(|r| r.reads).sum(),
            last_error: state.last_error.clone(),
        }
    }
}

/// A read that is being tried again.
#[derive(Debug)]
pub(super) struct RetryMark {
    scheduler: Arc<ReadScheduler>,
    owner: Owner,
}

impl Drop for RetryMark {
    fn drop(&mut self) {
        let mut state = self.scheduler.state.lock();
        let State { retrying, last_error, .. } = &mut *state;
        if let Some(of_owner) = retrying.get_mut(&self.owner) {
            of_owner.reads -= 1;
            if of_owner.reads == 0 {
                retrying.remove(&self.owner);
            }
        }
        if retrying.is_empty() {
            *last_error = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::poll;

    use super::super::ReadLimits;
    use super::*;

    fn scheduler(reads: usize) -> Arc<ReadScheduler> {
        let options = CacheOptions { reads: ReadLimits::fixed(reads), ..CacheOptions::default() };
        ReadScheduler::new(&options)
    }

    async fn demand(scheduler: &Arc<ReadScheduler>, owner: Owner) -> Permit {
        scheduler.acquire(&Urgency::new(Priority::Demand, None), owner, 1).await.unwrap()
    }

    /// Requests that wait, and that are under way.
    fn busy(class: &ClassStats) -> (usize, usize) {
        (class.queued, class.in_flight)
    }

    #[tokio::test(start_paused = true)]
    async fn a_job_with_many_reads_does_not_delay_another() {
        let scheduler = scheduler(8);
        let mut cold: Vec<_> = (0..2_000).map(|_| Box::pin(demand(&scheduler, 1))).collect();
        let mut permits = Vec::new();
        for read in &mut cold {
            if let std::task::Poll::Ready(permit) = poll!(read.as_mut()) {
                permits.push(permit);
            }
        }
        assert_eq!(permits.len(), 7, "one slot is kept for others");
        let permit = demand(&scheduler, 2).await;
        assert_eq!(
            scheduler.stats().classes[0],
            ClassStats { queued: 1_993, in_flight: 8, served: 0 }
        );
        drop(permit);
        drop(cold);
        drop(permits);
        // Reads whose readers went away take no slots.
        demand(&scheduler, 3).await;
        assert_eq!(busy(&scheduler.stats().classes[0]), (0, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn reads_that_wait_for_the_rate_are_started_in_time() {
        let scheduler = scheduler(8);
        scheduler.failed(Failure::SlowDown);
        let before = scheduler.env.now();
        for _ in 0..20 {
            demand(&scheduler, 1).await;
        }
        let took = scheduler.env.elapsed(before).as_secs_f64();
        // 8 in flight at 30 ms, of which seven tenths are left: 187 a second.
        assert!((0.08..0.12).contains(&took), "20 reads: {took} s");
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_tried_again_is_told_until_it_is_answered() {
        let scheduler = scheduler(8);
        let first = scheduler.retry(7, "busy".to_string());
        let second = scheduler.retry(7, "gone".to_string());
        assert_eq!(scheduler.retrying(7), Some(Retrying { reads: 2, error: "gone".to_string() }));
        drop(first);
        assert_eq!(scheduler.stats().retrying, 1);
        drop(second);
        assert_eq!(scheduler.retrying(7), None);
        let stats = scheduler.stats();
        assert_eq!((stats.retrying, stats.retries, stats.last_error), (0, 2, None));
    }

    #[tokio::test(start_paused = true)]
    async fn a_read_that_waits_is_raised_by_who_joins_it() {
        let scheduler = scheduler(2);
        let first = demand(&scheduler, 1).await;
        // A class always has its share.
        let held = scheduler.acquire(&Urgency::new(Priority::Prefetch, None), 2, 1).await.unwrap();
        let urgencies: Vec<_> = (0..3).map(|_| Urgency::new(Priority::Prefetch, None)).collect();
        let mut reads: Vec<_> =
            urgencies.iter().map(|u| Box::pin(scheduler.acquire(u, 3, 1))).collect();
        let mut later = Box::pin(demand(&scheduler, 4));
        for read in &mut reads {
            assert!(poll!(read.as_mut()).is_pending());
        }
        scheduler.raise(&urgencies[1], Priority::Compaction, None);
        assert_eq!(urgencies[1].priority(), Priority::Prefetch, "nothing makes a read less urgent");
        scheduler.raise(&urgencies[1], Priority::Demand, None);
        assert!(poll!(later.as_mut()).is_pending());
        drop(first);
        let raised = match poll!(reads[1].as_mut()) {
            std::task::Poll::Ready(permit) => permit.unwrap(),
            std::task::Poll::Pending => panic!("it was the first of its new class"),
        };
        assert_eq!(raised.slot().priority, Priority::Demand);
        assert!(poll!(reads[0].as_mut()).is_pending());
        assert_eq!(scheduler.stats().raised, 1);
        // Once it is under way there is nothing to change.
        scheduler.raise(&urgencies[1], Priority::Demand, None);
        let stats = scheduler.stats();
        let of = |p: Priority| stats.classes[p as usize];
        assert_eq!(busy(&of(Priority::Prefetch)), (2, 1));
        assert_eq!(busy(&of(Priority::Demand)), (1, 1));
        drop((held, raised));
    }
}
