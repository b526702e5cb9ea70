//! Shares of the cores: several holders (jobs, queries) run futures on the threads of one runtime, and each holder gets
//! about the same time, however many futures it has.
//!
//! A runtime by itself serves futures in the order in which they wake up, so a job with sixteen busy tasks would get
//! sixteen shares. Here a future is polled only with a permit. There are as many permits as the runtime has threads;
//! a poll returns its permit when it ends. While permits are short they go to the holder that has run for the
//! least time (start-time fair queueing), and within a holder to the future that waits longest. A holder
//! that was idle begins where the others are: it gets the next permit, but has saved up nothing. One permit is always
//! kept from a single holder, so that the polls of one holder, however long, do not hold up all others.
//!
//! A permit is held only while a future is polled, and by one that has been woken to be polled: futures that
//! wait for one another cannot block each other here.

use std::collections::{BTreeSet, VecDeque};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use crate::collections::{HashMap, HashSet};
use crate::env::EnvHandle;

/// What a poll costs at least, so that turns are shared out even where the clock does not move.
const MIN_COST: Duration = Duration::from_micros(1);

/// Threads that a runtime with shares has for a number of cores, and permits: one more than the cores, for the permit
/// that a single holder cannot get.
pub fn threads_for(cores: usize) -> usize {
    cores.max(1) + 1
}

/// The permits of one runtime.
pub struct FairShares {
    state: Mutex<State>,
    clock: EnvHandle,
}

#[derive(Default)]
struct State {
    /// Permits that nobody has.
    free: usize,
    /// Permits that one holder may have at a time.
    most: usize,
    /// The most that any holder had run for when it got a permit, in nanoseconds: since those who have run least come
    /// first, nobody who waits lies far behind it.
    time: u64,
    holders: HashMap<u64, Holder>,
    /// Holders with a future that waits and with a permit less than they may have, by the time they have run for. While
    /// there is one, no permit is free.
    ready: BTreeSet<(u64, u64)>,
    /// Tickets of futures that have been given a permit and not been polled since.
    granted: HashSet<u64>,
    next: u64,
}

#[derive(Default)]
struct Holder {
    /// Nanoseconds; at least what `State::time` was when it became busy.
    used: u64,
    /// Permits that its futures have.
    running: usize,
    waiting: VecDeque<Waiting>,
}

struct Waiting {
    ticket: u64,
    waker: Waker,
}

impl Holder {
    fn is_idle(&self) -> bool {
        self.running == 0 && self.waiting.is_empty()
    }
}

impl FairShares {
    /// For a runtime with this many threads.
    pub fn new(permits: usize, clock: EnvHandle) -> Arc<FairShares> {
        let free = permits.max(1);
        let state = State { free, most: (free - 1).max(1), ..State::default() };
        Arc::new(FairShares { state: Mutex::new(state), clock })
    }

    /// A new holder, which has run for nothing.
    pub fn holder(self: &Arc<FairShares>) -> Arc<Share> {
        let mut state = self.state.lock();
        let id = state.next_id();
        state.holders.insert(id, Holder::default());
        Arc::new(Share { shares: Arc::clone(self), id })
    }
}

impl State {
    fn next_id(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// A future of a holder wants to be polled. True: it may, and `leave` follows. False: it has a ticket, and its waker is
    /// called when it may.
    fn enter(&mut self, id: u64, ticket: &mut Option<u64>, waker: &Waker) -> bool {
        if let Some(known) = *ticket {
            return self.enter_again(id, known, ticket, waker);
        }
        let (time, most) = (self.time, self.most);
        let Some(holder) = self.holders.get_mut(&id) else { return true };
        if holder.is_idle() {
            holder.used = holder.used.max(time);
        }
        if self.free > 0 && holder.waiting.is_empty() && holder.running < most {
            holder.running += 1;
            self.time = time.max(holder.used);
            self.free -= 1;
            return true;
        }
        self.next += 1;
        *ticket = Some(self.next);
        holder.waiting.push_back(Waiting { ticket: self.next, waker: waker.clone() });
        if holder.running < most {
            self.ready.insert((holder.used, id));
        }
        false
    }

    fn enter_again(
        &mut self,
        id: u64,
        known: u64,
        ticket: &mut Option<u64>,
        waker: &Waker,
    ) -> bool {
        if self.granted.remove(&known) {
            *ticket = None;
            return true;
        }
        let waiting = self.holders.get_mut(&id).map(|h| h.waiting.iter_mut());
        if let Some(own) = waiting.into_iter().flatten().find(|w| w.ticket == known) {
            own.waker.clone_from(waker);
        }
        false
    }

    /// A poll has ended; the permit goes on to whoever is woken.
    fn leave(&mut self, id: u64, cost: Duration) -> Option<Waker> {
        let cost = cost.as_nanos().min(u128::from(u64::MAX / 2)) as u64;
        self.free += 1;
        let most = self.most;
        let Some(holder) = self.holders.get_mut(&id) else { return self.grant() };
        self.ready.remove(&(holder.used, id));
        holder.used = holder.used.saturating_add(cost);
        holder.running = holder.running.saturating_sub(1);
        if !holder.waiting.is_empty() && holder.running < most {
            self.ready.insert((holder.used, id));
        }
        self.grant()
    }

    /// Gives a free permit to the future whose turn it is. One permit was returned: one is given, at most.
    fn grant(&mut self) -> Option<Waker> {
        if self.free == 0 {
            return None;
        }
        let (_, id) = self.ready.pop_first()?;
        let holder = self.holders.get_mut(&id)?;
        let next = holder.waiting.pop_front()?;
        holder.running += 1;
        self.time = self.time.max(holder.used);
        self.free -= 1;
        self.granted.insert(next.ticket);
        if !holder.waiting.is_empty() && holder.running < self.most {
            self.ready.insert((holder.used, id));
        }
        Some(next.waker)
    }

    /// A future that has a ticket is gone.
    fn abandon(&mut self, id: u64, ticket: u64) -> Option<Waker> {
        if self.granted.remove(&ticket) {
            return self.leave(id, Duration::ZERO);
        }
        let holder = self.holders.get_mut(&id)?;
        holder.waiting.retain(|w| w.ticket != ticket);
        if holder.waiting.is_empty() {
            self.ready.remove(&(holder.used, id));
        }
        None
    }
}

/// What one holder has of the cores: its futures run by it.
pub struct Share {
    shares: Arc<FairShares>,
    id: u64,
}

impl std::fmt::Debug for Share {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Share").field("id", &self.id).finish_non_exhaustive()
    }
}

impl Share {
    /// A future that is polled in the holder's turns.
    pub fn run<F: Future>(self: &Arc<Share>, work: F) -> Fair<F> {
        Fair { work: Box::pin(work), share: Arc::clone(self), ticket: None }
    }
}

impl Drop for Share {
    /// Its futures are gone: each holds it.
    fn drop(&mut self) {
        self.shares.state.lock().holders.remove(&self.id);
    }
}

/// See [`Share::run`].
pub struct Fair<F> {
    // Dropped first: what it frees is the holder's.
    work: Pin<Box<F>>,
    share: Arc<Share>,
    /// It waits for a permit, or has been given one and was not polled since.
    ticket: Option<u64>,
}

/// A poll under way. Returns the permit, also where the poll panics.
struct Turn<'a> {
    share: &'a Share,
    began: Instant,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let shares = &self.share.shares;
        let cost = shares.clock.elapsed(self.began).max(MIN_COST);
        let next = shares.state.lock().leave(self.share.id, cost);
        if let Some(waker) = next {
            waker.wake();
        }
    }
}

impl<F: Future> Future for Fair<F> {
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        let this = self.get_mut();
        let shares = &this.share.shares;
        if !shares.state.lock().enter(this.share.id, &mut this.ticket, context.waker()) {
            return Poll::Pending;
        }
        let _turn = Turn { share: &this.share, began: shares.clock.now() };
        this.work.as_mut().poll(context)
    }
}

impl<F> Drop for Fair<F> {
    fn drop(&mut self) {
        let Some(ticket) = self.ticket.take() else { return };
        let next = self.share.shares.state.lock().abandon(self.share.id, ticket);
        if let Some(waker) = next {
            waker.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;
    use crate::env::Env;

    /// A clock that only the tests' work moves.
    #[derive(Clone)]
    struct Ticks {
        start: Instant,
        nanos: Arc<AtomicU64>,
    }

    impl Env for Ticks {
        fn now_ms(&self) -> u64 {
            0
        }

        fn since_boot(&self) -> Duration {
            Duration::ZERO
        }

        fn random(&self) -> u64 {
            0
        }

        fn now(&self) -> Instant {
            self.start + Duration::from_nanos(self.nanos.load(Ordering::Relaxed))
        }
    }

    /// Holders on one thread: who is polled, in order. One thread polls one future at a time, so that permits would never be
    /// short; they are since one is handed out before anybody waits, and from then on passed from poll to poll.
    struct Bench {
        shares: Arc<FairShares>,
        ticks: Ticks,
        polled: Arc<Mutex<Vec<&'static str>>>,
    }

    impl Bench {
        fn new(permits: usize) -> Bench {
            let ticks = Ticks { start: Instant::now(), nanos: Arc::default() };
            let shares = FairShares::new(permits, EnvHandle::new(ticks.clone()));
            Bench { shares, ticks, polled: Arc::default() }
        }

        /// Starts futures of a new holder that are busy for ever, `cost` a poll.
        fn busy(&self, name: &'static str, futures: usize, cost: Duration) -> Arc<Share> {
            let share = self.shares.holder();
            for _ in 0..futures {
                let (polled, nanos) = (Arc::clone(&self.polled), Arc::clone(&self.ticks.nanos));
                crate::task::spawn(
                    "busy",
                    share.run(std::future::poll_fn(move |context| {
                        polled.lock().push(name);
                        nanos.fetch_add(cost.as_nanos() as u64, Ordering::Relaxed);
                        context.waker().wake_by_ref();
                        Poll::<()>::Pending
                    })),
                );
            }
            share
        }

        /// Has all futures wait for the only permit before the first gets it.
        async fn begin(&self) {
            let first = self.shares.holder();
            assert!(enter(&self.shares, first.id, &mut None));
            for _ in 0..100 {
                tokio::task::yield_now().await;
            }
            assert!(self.polled.lock().is_empty());
            let next = self.shares.state.lock().leave(first.id, Duration::ZERO);
            next.expect("a future waits").wake();
        }

        /// The next polls, in order.
        async fn polls(&self, count: usize) -> Vec<&'static str> {
            self.polled.lock().clear();
            while self.polled.lock().len() < count {
                tokio::task::yield_now().await;
            }
            let mut polled = self.polled.lock();
            polled.truncate(count);
            polled.clone()
        }
    }

    fn count(polls: &[&'static str], name: &str) -> usize {
        polls.iter().filter(|n| **n == name).count()
    }

    const STEP: Duration = Duration::from_millis(1);

    #[tokio::test]
    async fn a_holder_of_many_futures_gets_one_share() {
        let bench = Bench::new(1);
        let _many = bench.busy("many", 16, STEP);
        // Of two one always waits while the other is polled.
        let _two = bench.busy("two", 2, STEP);
        bench.begin().await;
        let polls = bench.polls(400).await;
        assert!(count(&polls, "two").abs_diff(200) <= 2, "{}", count(&polls, "two"));
    }

    #[tokio::test]
    async fn what_is_shared_is_time_not_turns() {
        let bench = Bench::new(1);
        let _long = bench.busy("long", 4, STEP * 4);
        let _short = bench.busy("short", 4, STEP);
        bench.begin().await;
        let polls = bench.polls(500).await;
        assert!(count(&polls, "long").abs_diff(100) <= 2, "{}", count(&polls, "long"));
    }

    #[tokio::test]
    async fn a_newcomer_is_next_and_has_saved_up_nothing() {
        let bench = Bench::new(1);
        let _old = bench.busy("old", 8, STEP);
        bench.begin().await;
        bench.polls(300).await;
        let _new = bench.busy("new", 8, STEP);
        let polls = bench.polls(101).await;
        let first = polls.iter().position(|n| *n == "new");
        assert!(first.is_some_and(|at| at <= 3), "before the old ones' next turns: {first:?}");
        let after = &polls[first.unwrap()..];
        assert!(count(after, "new").abs_diff(after.len() / 2) <= 2, "{after:?}");
    }

    #[tokio::test]
    async fn three_holders_share_alike() {
        let bench = Bench::new(1);
        let _a = bench.busy("a", 1, STEP);
        let _b = bench.busy("b", 5, STEP);
        let _c = bench.busy("c", 25, STEP);
        bench.begin().await;
        let polls = bench.polls(3_000).await;
        for name in ["a", "b", "c"] {
            assert!(count(&polls, name).abs_diff(1_000) <= 10, "{name}: {}", count(&polls, name));
        }
    }

    /// Permits by hand.
    fn enter(shares: &FairShares, id: u64, ticket: &mut Option<u64>) -> bool {
        shares.state.lock().enter(id, ticket, Waker::noop())
    }

    #[test]
    fn one_permit_is_kept_from_a_single_holder() {
        let bench = Bench::new(3);
        let (a, b) = (bench.shares.holder(), bench.shares.holder());
        let mut tickets = [None; 4];
        assert!(enter(&bench.shares, a.id, &mut tickets[0]));
        assert!(enter(&bench.shares, a.id, &mut tickets[1]));
        assert!(!enter(&bench.shares, a.id, &mut tickets[2]), "the third is for others");
        assert!(enter(&bench.shares, b.id, &mut tickets[3]));
        let mut state = bench.shares.state.lock();
        assert!(state.leave(b.id, STEP).is_none(), "not for the first holder either");
        assert!(state.leave(a.id, STEP).is_some());
    }

    #[test]
    fn futures_that_are_dropped_leave_their_permits() {
        let bench = Bench::new(1);
        let (a, b, c) = (bench.shares.holder(), bench.shares.holder(), bench.shares.holder());
        let mut context = Context::from_waker(Waker::noop());
        let mut tickets = [None; 2];
        assert!(enter(&bench.shares, a.id, &mut tickets[0]));
        let mut granted = Box::pin(b.run(std::future::ready(())));
        let mut waiting = Box::pin(b.run(std::future::ready(())));
        let mut last = Box::pin(c.run(std::future::ready(())));
        for future in [&mut granted, &mut waiting, &mut last] {
            assert!(future.as_mut().poll(&mut context).is_pending());
        }
        bench.shares.state.lock().leave(a.id, STEP);
        drop(waiting);
        assert!(last.as_mut().poll(&mut context).is_pending(), "another is to be polled first");
        drop(granted);
        assert!(last.as_mut().poll(&mut context).is_ready());
        assert!(enter(&bench.shares, a.id, &mut tickets[1]), "the permit is free again");
        let state = bench.shares.state.lock();
        assert_eq!((state.free, state.granted.len(), state.ready.len()), (0, 0, 0));
    }

    #[test]
    fn a_panic_returns_the_permit() {
        let bench = Bench::new(1);
        let share = bench.shares.holder();
        let mut bad = Box::pin(share.run(std::future::poll_fn(|_| -> Poll<()> { panic!("bad") })));
        let poll = std::panic::AssertUnwindSafe(|| {
            let _ = bad.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        });
        assert!(std::panic::catch_unwind(poll).is_err());
        assert!(enter(&bench.shares, share.id, &mut None));
    }
}
