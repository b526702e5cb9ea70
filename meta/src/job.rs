//! What the rest of meta knows of a running job: the handle between a driver and everybody else.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use millrace_common::{Env, Epoch, Generation, JobId, SqlError};
use parking_lot::Mutex;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::commit_volume::Written;
use crate::status::{JobCounters, JobState, Latencies};

/// The last cut that a job's tasks finished; its speed paces the sources.
#[derive(Clone, Copy, Debug)]
pub struct Sealed {
    pub from: Epoch,
    pub to: Epoch,
    pub took: Duration,
}

/// Shared by the driver (which alone acts) and those who ask.
pub struct JobHandle {
    pub id: JobId,
    /// Wakes the driver; holds one permit, so no wake-up is lost.
    pub notify: Notify,
    /// Ends the pause after a failure.
    pub retry: Notify,
    /// Fired by a drop or shutdown: the driver stops at once.
    pub cancel: CancellationToken,
    /// Set by `request_cut`, taken by the driver when it cuts.
    cut_requested: Mutex<bool>,
    failure: watch::Sender<Option<(Generation, SqlError)>>,
    state: Mutex<JobState>,
    /// Why it last failed, until it commits again.
    unrecovered: Mutex<Option<String>>,
    /// Whether the first start has succeeded or failed.
    attempted: watch::Sender<bool>,
    sealed: Mutex<Option<Sealed>>,
    /// Since when the tasks have been at the cut that is under way.
    cutting: Mutex<Option<Instant>>,
    /// The generation last started; what a stop must name.
    generation: Mutex<Option<Generation>>,
    /// The generation whose state is open in the worker.
    started: Mutex<Option<Generation>>,
    /// The last record about the job that the worker has applied.
    applied: watch::Sender<u64>,
    /// Of a table: see [`JobHandle::note_settled`].
    settled: watch::Sender<u64>,
    /// The newest horizon that was given out: what is written from then on may hold no versions below.
    horizon: AtomicU64,
    /// Of a sink: the last sequence that this process has seen its target take.
    published: AtomicU64,
    /// Since when its commits on their way into the log have been.
    logging: Mutex<Vec<Instant>>,
    latencies: Latencies,
    written: Mutex<Written>,
    commits: AtomicU64,
    restarts: AtomicU64,
}

impl JobHandle {
    pub fn new(id: JobId, cancel: CancellationToken) -> JobHandle {
        JobHandle {
            id,
            notify: Notify::new(),
            retry: Notify::new(),
            cancel,
            cut_requested: Mutex::new(false),
            failure: watch::Sender::new(None),
            state: Mutex::new(JobState::Starting),
            unrecovered: Mutex::default(),
            attempted: watch::Sender::new(false),
            sealed: Mutex::new(None),
            cutting: Mutex::new(None),
            generation: Mutex::new(None),
            started: Mutex::new(None),
            applied: watch::Sender::new(0),
            settled: watch::Sender::new(0),
            horizon: AtomicU64::new(0),
            published: AtomicU64::new(0),
            logging: Mutex::default(),
            latencies: Latencies::default(),
            written: Mutex::default(),
            commits: AtomicU64::new(0),
            restarts: AtomicU64::new(0),
        }
    }

    pub fn request_cut(&self) {
        *self.cut_requested.lock() = true;
        self.notify.notify_one();
    }

    pub fn is_cut_requested(&self) -> bool {
        *self.cut_requested.lock()
    }

    /// The cut that starts now serves everybody who asked so far.
    pub fn take_cut_request(&self) {
        *self.cut_requested.lock() = false;
    }

    pub fn report_failure(&self, generation: Generation, error: SqlError) {
        self.failure.send_if_modified(|last| {
            let is_news = last.as_ref().is_none_or(|(known, _)| *known < generation);
            if is_news {
                *last = Some((generation, error));
            }
            is_news
        });
    }

    /// Completes when this generation's tasks, or those of a later one, have reported a failure: generations may follow
    /// each other before anybody looks.
    pub async fn failed(&self, generation: Generation) -> SqlError {
        let mut failure = self.failure.subscribe();
        let reported =
            failure.wait_for(|f| f.as_ref().is_some_and(|(g, _)| *g >= generation)).await;
        match reported.as_deref() {
            Ok(Some((_, error))) => error.clone(),
            _ => SqlError::internal("the job's handle is gone"),
        }
    }

    pub fn state(&self) -> JobState {
        self.state.lock().clone()
    }

    /// Returns whether it is another state than before.
    pub fn set_state(&self, state: JobState) -> bool {
        if let JobState::Failed { reason, .. } = &state {
            *self.unrecovered.lock() = Some(reason.clone());
        }
        let mut current = self.state.lock();
        let changed = *current != state;
        *current = state;
        changed
    }

    /// Why it last failed, if it has committed nothing since: a job that is being started again is no better for that.
    pub fn unrecovered(&self) -> Option<String> {
        self.unrecovered.lock().clone()
    }

    pub fn set_attempted(&self) {
        self.attempted.send_replace(true);
    }

    /// Waits for the first start to succeed or fail, at most `limit`. Whether it has.
    pub async fn wait_attempted(&self, limit: Duration) -> bool {
        let mut attempted = self.attempted.subscribe();
        let waited = tokio::time::timeout(limit, attempted.wait_for(|a| *a)).await;
        matches!(waited, Ok(Ok(_)))
    }

    pub fn sealed(&self) -> Option<Sealed> {
        *self.sealed.lock()
    }

    pub fn set_sealed(&self, sealed: Option<Sealed>) {
        *self.sealed.lock() = sealed;
    }

    /// How long the cut under way has taken so far.
    pub fn cutting_for(&self, env: &dyn Env) -> Option<Duration> {
        self.cutting.lock().map(|since| env.elapsed(since))
    }

    pub fn set_cutting(&self, since: Option<Instant>) {
        *self.cutting.lock() = since;
    }

    /// A commit is on its way into the log until the answer is dropped.
    pub fn begin_logging(&self, now: Instant) -> impl Drop + Send + '_ {
        struct Logging<'a>(&'a JobHandle, Instant);
        impl Drop for Logging<'_> {
            fn drop(&mut self) {
                let mut logging = self.0.logging.lock();
                if let Some(own) = logging.iter().position(|began| *began == self.1) {
                    logging.remove(own);
                }
            }
        }
        self.logging.lock().push(now);
        Logging(self, now)
    }

    /// How long the oldest commit on its way into the log has been.
    pub fn logging_for(&self, env: &dyn Env) -> Option<Duration> {
        self.logging.lock().iter().min().map(|began| env.elapsed(*began))
    }

    pub fn generation(&self) -> Option<Generation> {
        *self.generation.lock()
    }

    pub fn set_generation(&self, generation: Generation) {
        *self.generation.lock() = Some(generation);
    }

    /// The generation that the worker has opened. Runs of another are not compacted: the worker might
    /// open the version from before the compaction and then be told only of what follows.
    pub fn started(&self) -> Option<Generation> {
        *self.started.lock()
    }

    pub fn set_started(&self, generation: Generation) {
        *self.started.lock() = Some(generation);
    }

    /// The worker is about to end what it runs, or to begin: what it is told of may not take effect.
    pub fn set_stopped(&self) {
        *self.started.lock() = None;
    }

    pub fn set_applied(&self, record: u64) {
        self.applied.send_if_modified(|applied| {
            let more = record > *applied;
            *applied = record.max(*applied);
            more
        });
    }

    pub async fn wait_applied(&self, record: u64) {
        let mut applied = self.applied.subscribe();
        // The sender is in `self`.
        let _ = applied.wait_for(|applied| *applied >= record).await;
    }

    /// What has entered the table before its process knew this record of the log is in the log, or never will be. A smaller
    /// number than before changes nothing.
    pub fn note_settled(&self, record: u64) {
        self.settled.send_if_modified(|settled| {
            let more = record > *settled;
            *settled = record.max(*settled);
            more
        });
    }

    /// Completes when that is so for this record.
    pub async fn wait_settled(&self, record: u64) {
        let mut settled = self.settled.subscribe();
        // The sender is in `self`.
        let _ = settled.wait_for(|settled| *settled >= record).await;
    }

    pub fn horizon(&self) -> Epoch {
        Epoch(self.horizon.load(Ordering::Acquire))
    }

    /// Called before the worker is told, or a compaction begins.
    pub fn raise_horizon(&self, horizon: Epoch) {
        self.horizon.fetch_max(horizon.0, Ordering::AcqRel);
    }

    pub fn published(&self) -> u64 {
        self.published.load(Ordering::Relaxed)
    }

    pub fn set_published(&self, sequence: u64) {
        self.published.fetch_max(sequence, Ordering::Relaxed);
    }

    /// `bytes` were committed at `epoch`.
    pub fn note_written(&self, epoch: Epoch, bytes: u64) {
        self.written.lock().add(epoch, bytes);
    }

    /// See [`Written::since`].
    pub fn written_since(&self, bytes: u64) -> Epoch {
        self.written.lock().since(bytes)
    }

    pub fn committed(&self, latency: Duration) {
        self.commits.fetch_add(1, Ordering::Relaxed);
        *self.unrecovered.lock() = None;
        self.latencies.record(latency);
    }

    pub fn restarted(&self) {
        self.restarts.fetch_add(1, Ordering::Relaxed);
    }

    pub fn counters(&self) -> JobCounters {
        JobCounters {
            commits: self.commits.load(Ordering::Relaxed),
            restarts: self.restarts.load(Ordering::Relaxed),
            barrier_p50: self.latencies.percentile(50),
            barrier_p99: self.latencies.percentile(99),
        }
    }
}
