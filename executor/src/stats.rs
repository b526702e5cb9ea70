//! Counters of a running job, for EXPLAIN ANALYZE, SHOW JOBS and metrics. Relaxed atomics, updated
//! once a chunk, never once a row.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::Duration;

use millrace_common::{EnvHandle, Epoch};
use millrace_storage::object::GET_DOLLARS_PER_MILLION;
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::lookahead::operator::OperatorLookahead;
use crate::lookahead::slack::{EpochNotes, OperatorEpochs, ReadTimes, Side, SideSlack, SpotSlack};

/// A number that any task may add to.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    pub fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    /// For gauges summed over instances: replaces what an instance last reported.
    pub fn replace(&self, last: &mut u64, now: u64) {
        self.0.fetch_add(now.wrapping_sub(*last), Ordering::Relaxed);
        *last = now;
    }

    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// One operator of the graph, over all its parallel instances.
#[derive(Debug, Default)]
pub struct OperatorMetrics {
    pub fragment: usize,
    pub node: usize,
    pub name: String,
    /// Kept by the runtime.
    pub rows_in: Counter,
    pub rows_out: Counter,
    /// Kept by the runtime from `Operator::memory_size`.
    pub state_bytes: Counter,
    /// Kept by the operators.
    pub cache_hits: Counter,
    pub cache_misses: Counter,
    pub parked_rows: Counter,
    /// Batched reads of state that had to wait.
    pub fetch_rounds: Counter,
    /// How often it settled before the barrier what it would have held. Kept by the runtime.
    pub settled_early: Counter,
    pub lookahead: LookaheadMetrics,
}

/// What became of the keys that were announced to an operator.
#[derive(Debug, Default)]
pub struct LookaheadMetrics {
    /// Keys of hints that it has taken in.
    pub hinted: Counter,
    /// Bytes that were made for hints to it: see [`crate::lookahead::edge::SentHint::bytes`], and what was computed to tell
    /// their keys.
    pub hint_bytes: Counter,
    /// In memory already: not hinted, or hinted and nothing to read.
    pub resident: Counter,
    /// Read ahead.
    pub prefetched: Counter,
    /// Read ahead, and used by rows that came after the answer.
    pub in_time: Counter,
    /// Rows came while they were being read.
    pub late: Counter,
    /// Read ahead, and nothing was there.
    pub absent: Counter,
    /// Read ahead, and their epoch brought no row.
    pub unused: Counter,
    /// Not read: beyond a limit, or no longer needed.
    pub dropped: Counter,
    /// Answers, by key, that came too late or were overtaken by a write.
    pub stale: Counter,
    /// Keys of rows that had to wait for the store.
    pub missed: Counter,
    /// Requests to the store that were made for rows, and ahead of them.
    pub demand_requests: Arc<AtomicU64>,
    pub ahead_requests: Arc<AtomicU64>,
    pub epochs: OperatorEpochs,
    /// Of ranges that are read ahead of a watermark.
    pub closes: Closes,
    /// Set once if walkers announce keys to it.
    pub walked: OnceLock<Walked>,
}

/// Whether ranges of an operator's state are read ahead of a watermark.
#[derive(Debug, Default)]
pub struct Closes {
    is_followed: AtomicBool,
    /// Instances that read ahead now.
    active: Counter,
}

impl Closes {
    /// An instance would read ahead.
    pub fn follow(&self) {
        self.is_followed.store(true, Ordering::Relaxed);
    }

    fn is_followed(&self) -> bool {
        self.is_followed.load(Ordering::Relaxed)
    }

    /// Whether an instance reads ahead now; `last`: what it last told.
    pub fn set_active(&self, last: &mut u64, is_active: bool) {
        self.active.replace(last, u64::from(is_active));
    }
}

/// Where an operator's keys are announced, and what its instances share with the walkers.
#[derive(Debug)]
pub struct Walked {
    pub sides: Vec<Arc<Side>>,
    pub tasks: Vec<Arc<OperatorLookahead>>,
}

impl LookaheadMetrics {
    /// Some instance wants hints, or one of an operator whose keys come out of rows that this one finds.
    fn is_active(&self) -> bool {
        self.walked.get().is_some_and(|w| {
            w.tasks.iter().any(|t| t.is_active()) || w.sides.iter().any(|s| s.is_chain_wanted())
        })
    }

    /// An instance has passed an epoch. Kept while hints are wanted; of an operator that no walker follows, once its rows
    /// have waited for reads.
    pub fn pass(&self, epoch: Epoch, notes: &EpochNotes, is_followed: bool) {
        let is_measured = match is_followed {
            true => notes.missed > 0 || self.is_active(),
            false => notes.has_rows() && self.missed.get() > 0,
        };
        if is_measured {
            let sides = self.walked.get().map_or(&[][..], |w| w.sides.as_slice());
            let has_changed = self.epochs.pass(epoch.0, notes, sides);
            // Walkers look again at who wants hints; all tasks of a job share what tells them.
            if has_changed && let Some(task) = self.walked.get().and_then(|w| w.tasks.first()) {
                task.changed().notify_waiters();
            }
        }
    }

    /// How much lead hints have, how long reads take, and what they cost.
    pub fn measures(&self) -> LookaheadMeasures {
        let sides = self.walked.get().map_or(&[][..], |w| w.sides.as_slice());
        LookaheadMeasures {
            sides: sides.iter().map(|side| side.read()).collect(),
            reads: self.epochs.read(),
            demand_requests: self.demand_requests.load(Ordering::Relaxed),
            ahead_requests: self.ahead_requests.load(Ordering::Relaxed),
            by_watermark: self.closes.is_followed(),
        }
    }

    pub fn read(&self) -> LookaheadStats {
        let walked = self.walked.get();
        let active = walked.map_or(0, |w| w.tasks.iter().filter(|t| t.is_active()).count());
        LookaheadStats {
            active: active + self.closes.active.get() as usize,
            hinted: self.hinted.get(),
            hint_bytes: self.hint_bytes.get(),
            resident: self.resident.get(),
            prefetched: self.prefetched.get(),
            in_time: self.in_time.get(),
            late: self.late.get(),
            absent: self.absent.get(),
            unused: self.unused.get(),
            dropped: self.dropped.get(),
            stale: self.stale.get(),
            missed: self.missed.get(),
        }
    }
}

/// What [`LookaheadMetrics`] read at some moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LookaheadStats {
    /// Tasks in which it wants hints now.
    pub active: usize,
    pub hinted: u64,
    /// Of hints that were sent, whether or not they were taken in.
    pub hint_bytes: u64,
    pub resident: u64,
    pub prefetched: u64,
    pub in_time: u64,
    pub late: u64,
    pub absent: u64,
    pub unused: u64,
    pub dropped: u64,
    pub stale: u64,
    pub missed: u64,
}

/// See [`LookaheadMetrics::measures`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LookaheadMeasures {
    /// Its inputs whose keys are announced.
    pub sides: Vec<SideSlack>,
    pub reads: ReadTimes,
    /// Requests to the store for rows, and ahead of them.
    pub demand_requests: u64,
    pub ahead_requests: u64,
    /// Ranges of its state are read ahead of a watermark.
    pub by_watermark: bool,
}

/// The place of ranges that are announced by a watermark.
const WATERMARK: &str = "watermark";

impl LookaheadMeasures {
    /// Dollars for the requests that a million rows cause, at the list price of S3 Standard; `rows` came in so far.
    pub fn dollars_per_million_rows(&self, rows: u64) -> Option<f64> {
        let requests = self.demand_requests + self.ahead_requests;
        (rows > 0).then(|| requests as f64 * GET_DOLLARS_PER_MILLION / rows as f64)
    }

    /// Where rows are looked at, each place once.
    pub fn places(&self) -> Vec<&'static str> {
        self.with_watermark(names(self.sides.iter().filter_map(SideSlack::in_use)))
    }

    /// Where they could be.
    pub fn candidates(&self) -> Vec<&'static str> {
        self.with_watermark(names(self.sides.iter().flat_map(|side| &side.spots)))
    }

    fn with_watermark(&self, mut places: Vec<&'static str>) -> Vec<&'static str> {
        places.extend(self.by_watermark.then_some(WATERMARK));
        places
    }

    /// Why steps of chains are not announced, each reason once.
    pub fn not_announced(&self) -> Vec<&'static str> {
        let mut reasons: Vec<&'static str> =
            self.sides.iter().filter_map(|side| side.standing.reason()).collect();
        reasons.sort_unstable();
        reasons.dedup();
        reasons
    }

    /// Of the input with the least lead: 1st, 50th and 99th percentile over epochs, microseconds.
    pub fn slack(&self) -> [Option<i64>; 3] {
        let of_sides = self.sides.iter().filter_map(|side| Some(side.in_use()?.quantiles));
        of_sides.filter(|q| q[0].is_some()).min().unwrap_or_default()
    }
}

fn names<'a>(of: impl Iterator<Item = &'a SpotSlack>) -> Vec<&'static str> {
    let mut names = Vec::new();
    for name in of.map(|spot| spot.spot.name()) {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names
}

impl OperatorMetrics {
    pub fn new(fragment: usize, node: usize, name: impl Into<String>) -> Arc<OperatorMetrics> {
        Arc::new(OperatorMetrics {
            fragment,
            node,
            name: name.into(),
            ..OperatorMetrics::default()
        })
    }

    pub fn read(&self) -> OperatorStats {
        OperatorStats {
            fragment: self.fragment,
            node: self.node,
            name: self.name.clone(),
            rows_in: self.rows_in.get(),
            rows_out: self.rows_out.get(),
            state_bytes: self.state_bytes.get(),
            cache_hits: self.cache_hits.get(),
            cache_misses: self.cache_misses.get(),
            parked_rows: self.parked_rows.get(),
            fetch_rounds: self.fetch_rounds.get(),
            settled_early: self.settled_early.get(),
            lookahead: self.lookahead.read(),
            measures: self.lookahead.measures(),
        }
    }
}

/// One operator of a running job, all its tasks together: what [`OperatorMetrics`] read at some moment.
#[derive(Clone, Debug, Default)]
pub struct OperatorStats {
    /// Its place in the job graph.
    pub fragment: usize,
    pub node: usize,
    pub name: String,
    pub rows_in: u64,
    pub rows_out: u64,
    /// Bytes of its state in caches.
    pub state_bytes: u64,
    pub cache_hits: u64,
    pub cache_misses: u64,
    /// Rows that wait for state now.
    pub parked_rows: u64,
    /// Dependent rounds of reads that went below its caches.
    pub fetch_rounds: u64,
    /// How often it settled before the barrier what it would have held until then.
    pub settled_early: u64,
    /// What became of the keys that were announced to it.
    pub lookahead: LookaheadStats,
    /// How much lead they had, and what reads cost.
    pub measures: LookaheadMeasures,
}

/// How long cores have worked for a job since it was opened: the time in which its tasks, or a table's statements, were
/// being polled.
#[derive(Debug)]
pub struct WorkTime {
    clock: EnvHandle,
    nanos: Counter,
}

impl WorkTime {
    fn new(clock: EnvHandle) -> WorkTime {
        WorkTime { clock, nanos: Counter::default() }
    }

    pub fn total(&self) -> Duration {
        Duration::from_nanos(self.nanos.get())
    }

    /// Work that is counted.
    pub async fn count<F: Future>(&self, work: F) -> F::Output {
        let mut work = pin!(work);
        poll_fn(|context| self.poll(work.as_mut(), context)).await
    }

    fn poll<F: Future>(&self, work: Pin<&mut F>, context: &mut Context<'_>) -> Poll<F::Output> {
        let began = self.clock.now();
        let polled = work.poll(context);
        self.nanos.add(self.clock.elapsed(began).as_nanos() as u64);
        polled
    }
}

/// How far a job's tasks are, while they are at an epoch. Shared by all of them.
#[derive(Debug)]
pub struct Progress {
    /// Rows that the first scans have read, and have to read in all as far as that is known.
    pub scanned: Counter,
    pub to_scan: Counter,
    pub epochs: EpochLog,
    pub work: Arc<WorkTime>,
    clock: EnvHandle,
    began: Instant,
    /// When rows last moved: milliseconds from `began`.
    moved: AtomicU64,
    /// Tasks that compute at this moment.
    computing: AtomicUsize,
}

impl Progress {
    pub fn new(clock: EnvHandle) -> Progress {
        Progress {
            scanned: Counter::default(),
            to_scan: Counter::default(),
            epochs: EpochLog::new(clock.clone()),
            work: Arc::new(WorkTime::new(clock.clone())),
            began: clock.now(),
            clock,
            moved: AtomicU64::new(0),
            computing: AtomicUsize::new(0),
        }
    }

    /// A task has taken a step.
    pub fn note_step(&self) {
        let since = self.clock.elapsed(self.began);
        self.moved.store(since.as_millis() as u64, Ordering::Relaxed);
    }

    /// For how long no task has done anything but wait.
    pub fn idle(&self) -> Duration {
        if self.computing.load(Ordering::Relaxed) > 0 {
            return Duration::ZERO;
        }
        let moved = Duration::from_millis(self.moved.load(Ordering::Relaxed));
        self.clock.elapsed(self.began).saturating_sub(moved)
    }

    /// A task's work, which must not unwind. While it is being polled, the task computes.
    pub fn watch<F: Future>(self: Arc<Self>, work: F) -> impl Future<Output = F::Output> {
        let mut work = Box::pin(work);
        poll_fn(move |context| {
            self.computing.fetch_add(1, Ordering::Relaxed);
            let polled = self.work.poll(work.as_mut(), context);
            self.computing.fetch_sub(1, Ordering::Relaxed);
            polled
        })
    }
}

/// When an epoch of a job reached its stages.
#[derive(Clone, Copy, Debug)]
pub struct EpochTimes {
    pub epoch: Epoch,
    /// All tasks have processed it; `None` for a table, whose statements are processed as they come.
    pub sealed: Option<Instant>,
    /// It can be read.
    pub committed: Option<Instant>,
}

/// The newest epochs of a job, oldest first.
#[derive(Debug)]
pub struct EpochLog {
    clock: EnvHandle,
    newest: Mutex<VecDeque<EpochTimes>>,
}

impl EpochLog {
    const KEPT: usize = 256;

    fn new(clock: EnvHandle) -> EpochLog {
        EpochLog { clock, newest: Mutex::default() }
    }

    pub fn note_sealed(&self, epoch: Epoch) {
        let sealed = Some(self.clock.now());
        self.push(&mut self.newest.lock(), EpochTimes { epoch, sealed, committed: None });
    }

    pub fn note_committed(&self, epoch: Epoch) {
        let committed = Some(self.clock.now());
        let mut newest = self.newest.lock();
        match newest.iter_mut().rev().find(|e| e.epoch == epoch) {
            Some(known) => known.committed = committed,
            None => self.push(&mut newest, EpochTimes { epoch, sealed: None, committed }),
        }
    }

    fn push(&self, newest: &mut VecDeque<EpochTimes>, times: EpochTimes) {
        if newest.len() == Self::KEPT {
            newest.pop_front();
        }
        newest.push_back(times);
    }

    pub fn read(&self) -> Vec<EpochTimes> {
        self.newest.lock().iter().copied().collect()
    }
}

/// What is counted of a running job.
#[derive(Debug)]
pub struct JobMetrics {
    pub operators: Vec<Arc<OperatorMetrics>>,
    /// How many tasks each fragment has.
    pub fragment_tasks: Vec<usize>,
    pub progress: Arc<Progress>,
}

impl JobMetrics {
    /// Of a job without operators, with so many tasks.
    pub fn plain(fragment_tasks: Vec<usize>, progress: Arc<Progress>) -> JobMetrics {
        JobMetrics { operators: Vec::new(), fragment_tasks, progress }
    }
}

/// Barriers of a job, newest last.
#[derive(Debug, Default)]
pub struct BarrierLog {
    micros: Mutex<std::collections::VecDeque<u64>>,
}

impl BarrierLog {
    const KEPT: usize = 1_024;

    pub fn record(&self, duration: Duration) {
        let mut micros = self.micros.lock();
        if micros.len() == Self::KEPT {
            micros.pop_front();
        }
        micros.push_back(duration.as_micros() as u64);
    }

    pub fn micros(&self) -> Vec<u64> {
        self.micros.lock().iter().copied().collect()
    }
}

/// A running job as EXPLAIN ANALYZE shows it.
#[derive(Clone, Debug, Default)]
pub struct JobStats {
    /// How many tasks each fragment has.
    pub fragment_tasks: Vec<usize>,
    pub operators: Vec<OperatorStats>,
    /// From the cut's request until its delta was durable, of the last barriers.
    pub barrier_micros: Vec<u64>,
    pub epochs: u64,
    pub expression_errors: u64,
    /// See [`Progress`].
    pub scanned: u64,
    pub to_scan: u64,
    /// For how long nothing of it has moved: no rows, and no upload of what it writes.
    pub idle: Duration,
    /// See [`WorkTime`].
    pub worked: Duration,
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    #[test]
    fn the_times_of_the_newest_epochs_are_kept() {
        let log = EpochLog::new(EnvHandle::default());
        for epoch in 1..=EpochLog::KEPT as u64 + 2 {
            log.note_sealed(Epoch(epoch));
        }
        log.note_committed(Epoch(1));
        log.note_committed(Epoch(4));
        let read = log.read();
        assert_eq!(read.len(), EpochLog::KEPT);
        let at = |epoch: u64| read.iter().find(|e| e.epoch == Epoch(epoch));
        assert!(at(3).is_none(), "the oldest make place");
        assert!(at(4).is_some_and(|e| e.sealed <= e.committed && e.committed.is_some()));
        assert!(at(5).is_some_and(|e| e.committed.is_none()));
    }

    #[tokio::test(start_paused = true)]
    async fn only_the_time_of_polls_is_work() {
        let progress = Arc::new(Progress::new(EnvHandle::default()));
        let work = async {
            tokio::time::sleep(Duration::from_secs(5)).await;
            // As if it had computed: the paused clock goes on while it is being polled.
            let _ = tokio::time::advance(Duration::from_secs(2)).now_or_never();
        };
        progress.work.count(work).await;
        assert_eq!(progress.work.total(), Duration::from_secs(2));
        let waiting = tokio::time::sleep(Duration::from_secs(5));
        Arc::clone(&progress).watch(waiting).await;
        assert_eq!(progress.work.total(), Duration::from_secs(2));
    }

    #[tokio::test]
    async fn a_task_that_computes_is_not_idle() {
        let progress = Arc::new(Progress {
            began: Instant::now() - Duration::from_secs(60),
            ..Progress::new(EnvHandle::default())
        });
        assert!(progress.idle() >= Duration::from_secs(60));
        let of_task = Arc::clone(&progress);
        let while_polled = Arc::clone(&progress).watch(async move { of_task.idle() }).await;
        assert_eq!(while_polled, Duration::ZERO);
        assert!(progress.idle() >= Duration::from_secs(60), "it only waits again");
        progress.note_step();
        assert!(progress.idle() < Duration::from_secs(60));
    }
}
