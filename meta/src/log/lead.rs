//! Whether this process still leads, before a read is answered.
//!
//! A writer learns from its own appends that another process has taken over; one that appends nothing would
//! answer reads from what it knew for ever. So a read is answered only if an append or a probe that *began* less
//! than [`LEADER_LEASE`] ago showed us at the head of the log. Otherwise one probe (the next record: is there one?)
//! serves all reads that wait. An idle server makes none. A probe that finds our own record, whose append is under way, proves
//! nothing before the record is folded: others may know already what it holds.
//!
//! Whether the store answers this process at all is known from the same requests ([`Lead::store_wait`]). An append may take
//! long because its record is large or the store is slow: that alone is no reason to look for another leader. So the store
//! is asked something small when an append has been under way for a while, and where readers have given up a probe that it
//! has not answered ([`Lead::watch_store`]).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use millrace_common::EnvHandle;
use millrace_common::fault_injection::is_planted;
use millrace_rpc::log::{LogRecord, decode_frame};
use millrace_storage::object::{PutProgress, PutWatch};
use parking_lot::RwLock;
use tokio::sync::{Mutex, Notify, mpsc, oneshot, watch};
use tracing::warn;

use super::store::{LogStore, crc};
use super::writer::{RETRY_MAX, RETRY_MIN};
use crate::error::MetaError;
use crate::state::MetaState;

/// For how long a proof counts, on a clock that also runs while the machine is suspended.
pub const LEADER_LEASE: Duration = Duration::from_secs(2);
/// After so long, on any clock, a proof no longer counts that began before: clocks do not run alike.
pub const LEASE_OUTWAITED: Duration =
    Duration::from_millis(LEADER_LEASE.as_millis() as u64 * 5 / 4);
/// After so long an append, or a probe that was not answered, has the store asked.
const ASK_AFTER: Duration = Duration::from_millis(500);
/// The store is asked again after so long while it answers nothing: a new request may get through where an earlier one does
/// not. When an outage for all is over the leader is to know it before a standby that reads the log again claims the lead,
/// 2 s later.
const ASK_AGAIN: Duration = Duration::from_secs(1);
/// An append that takes so long, several attempts, will not succeed here, whatever else the store answers.
const STUCK: Duration = Duration::from_secs(20);

/// How the store takes appends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AppendStats {
    /// For how long the append under way has been; zero: none is.
    pub waiting: Duration,
    /// Attempts beyond the first.
    pub retries: u64,
}

/// The append under way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AppendWait {
    /// Of its record.
    pub number: u64,
    pub waiting: Duration,
    pub progress: PutProgress,
}

/// An append, while it is under way.
pub struct Append<'a> {
    lead: &'a Lead,
    /// Is told what becomes of its attempts.
    pub watch: PutWatch,
}

impl Append<'_> {
    /// It is tried again, for this reason.
    pub fn note_failure(&self, reason: &str) {
        self.watch.note_failure(reason.to_owned());
    }
}

impl Drop for Append<'_> {
    fn drop(&mut self) {
        *self.lead.appending.lock() = None;
    }
}

struct Appending {
    number: u64,
    /// On the clock of [`Env::since_boot`](millrace_common::Env::since_boot).
    began: Duration,
    watch: PutWatch,
}

/// Asks the writer whether it still leads, where the next record alone does not tell.
pub type Check = oneshot::Sender<Result<(), MetaError>>;

/// How long the log keeps records that a snapshot covers; it may change.
pub type Retention = Arc<dyn Fn() -> Duration + Send + Sync>;

/// What the writer and readers share of the proof.
pub struct Lead {
    pub store: LogStore,
    pub state: Arc<RwLock<MetaState>>,
    pub env: EnvHandle,
    /// Of this process, in its records.
    pub nonce: u64,
    pub retention: Retention,
    /// When the latest proof began, in nanoseconds since boot.
    proven: AtomicU64,
    /// The append under way.
    appending: parking_lot::Mutex<Option<Appending>>,
    /// Attempts to append beyond the first.
    retries: AtomicU64,
    /// Number of the last record of ours that a probe has found in the log before its append had an answer.
    found: watch::Sender<u64>,
    /// When the first began of the probes that the store has not answered, on the same clock as appends; also where who has
    /// asked waits no longer.
    asked: parking_lot::Mutex<Option<Duration>>,
    /// Told when an append or a probe begins.
    begun: Notify,
    probing: Mutex<()>,
    checks: mpsc::Sender<Check>,
}

/// What is at the next number.
enum Next {
    Free,
    /// The record that we append is there, and its append has not been answered.
    Ours,
    Foreign,
}

impl Lead {
    /// And where the writer is asked.
    pub fn new(
        store: LogStore,
        state: Arc<RwLock<MetaState>>,
        env: EnvHandle,
        nonce: u64,
        retention: Retention,
    ) -> (Arc<Lead>, mpsc::Receiver<Check>) {
        let (checks, asked) = mpsc::channel(1);
        let lead = Lead {
            store,
            state,
            env,
            nonce,
            retention,
            proven: AtomicU64::default(),
            appending: parking_lot::Mutex::default(),
            retries: AtomicU64::default(),
            found: watch::Sender::default(),
            asked: parking_lot::Mutex::default(),
            begun: Notify::new(),
            probing: Mutex::default(),
            checks,
        };
        (Arc::new(lead), asked)
    }

    /// Something that began then has shown us at the head: the store has answered.
    pub fn proven(&self, began: Duration) {
        self.proven.fetch_max(began.as_nanos() as u64, Ordering::AcqRel);
        *self.asked.lock() = None;
    }

    /// The append of record `number` begins: it is under way until the answer is dropped.
    pub fn begin_append(&self, number: u64) -> Append<'_> {
        let watch = PutWatch::default();
        let began = self.env.since_boot();
        *self.appending.lock() = Some(Appending { number, began, watch: watch.clone() });
        self.begun.notify_one();
        Append { lead: self, watch }
    }

    /// The append under way, if one is.
    pub fn append_wait(&self) -> Option<AppendWait> {
        let appending = self.appending.lock();
        let Appending { number, began, watch } = appending.as_ref()?;
        let waiting = self.env.since_boot().saturating_sub(*began);
        Some(AppendWait { number: *number, waiting, progress: watch.progress() })
    }

    /// Completes when a probe has found this record, which is ours, in the log.
    pub async fn found(&self, number: u64) {
        // The sender is in `self`: there is no error.
        let _ = self.found.subscribe().wait_for(|found| *found >= number).await;
    }

    /// The append under way is tried again.
    pub fn count_retry(&self) {
        self.retries.fetch_add(1, Ordering::Relaxed);
    }

    pub fn append_stats(&self) -> AppendStats {
        AppendStats {
            waiting: self.append_wait().map_or(Duration::ZERO, |append| append.waiting),
            retries: self.retries.load(Ordering::Relaxed),
        }
    }

    /// For how long the store has answered nothing that it was asked, from the first probe that it has not answered, or has
    /// not taken the append under way, where that is too long whatever it answers. Zero: it answers, was asked nothing, or
    /// asks for fewer requests, which it would of another leader as well.
    pub fn store_wait(&self) -> Duration {
        let append = self.append_wait();
        if append.as_ref().is_some_and(|append| append.progress.held) {
            return Duration::ZERO;
        }
        let stuck = append.map(|append| append.waiting).filter(|waiting| *waiting >= STUCK);
        self.asked_for().max(stuck).unwrap_or_default()
    }

    /// Since the first probe began that is not answered; `None`: all are.
    fn asked_for(&self) -> Option<Duration> {
        let first = *self.asked.lock();
        first.map(|first| self.env.since_boot().saturating_sub(first))
    }

    /// A probe begins, after which the store is asked if it is not answered soon.
    fn begin_probe(&self) {
        self.note_asked();
        self.begun.notify_one();
    }

    /// The store is asked something small now.
    fn note_asked(&self) {
        let now = self.env.since_boot();
        self.asked.lock().get_or_insert(now);
    }

    /// Asks the store where an append or a probe takes long, until it answers. Returns when the writer has ended.
    pub async fn watch_store(self: Arc<Lead>) {
        tokio::select! {
            biased;
            () = self.checks.closed() => {}
            () = self.ask_when_due() => {}
        }
    }

    async fn ask_when_due(&self) {
        loop {
            self.begun.notified().await;
            while let Some(mut pause) = self.asks_in() {
                if pause.is_zero() {
                    self.ask_store().await;
                    pause = ASK_AGAIN;
                }
                tokio::time::sleep(pause).await;
            }
        }
    }

    /// When the store is to be asked; `None`: nothing is under way, and all probes were answered.
    fn asks_in(&self) -> Option<Duration> {
        let append = self.append_wait().map(|append| append.waiting);
        Some(ASK_AFTER.saturating_sub(append.max(self.asked_for())?))
    }

    /// Returns when the store has answered.
    async fn ask_store(&self) {
        let record = self.state.read().number;
        let mut asked = FuturesUnordered::new();
        loop {
            self.note_asked();
            asked.push(self.store.answers(record));
            let answered = async {
                while let Some(answers) = asked.next().await {
                    if answers {
                        return;
                    }
                }
                std::future::pending().await
            };
            if tokio::time::timeout(ASK_AGAIN, answered).await.is_ok() {
                *self.asked.lock() = None;
                return;
            }
        }
    }

    /// Since the latest proof began.
    pub fn age(&self) -> Duration {
        let proven = Duration::from_nanos(self.proven.load(Ordering::Acquire));
        self.env.since_boot().saturating_sub(proven)
    }

    /// After so long a silence a record at our next number may have come, been covered by a snapshot and been
    /// deleted: that there is none proves nothing (docs/design.md §10, late appends).
    pub fn is_silent(&self) -> bool {
        self.age() > (self.retention)() / 4
    }

    /// Returns when it is proven, or why not. While the store does not answer it goes on asking; `trouble` is told
    /// why, for the error of a caller that gives up.
    pub async fn prove(&self, trouble: impl Fn(MetaError)) -> Result<(), MetaError> {
        if self.age() < LEADER_LEASE || is_planted("stale-lead-read") {
            return Ok(());
        }
        // Not taken back where the reader gives up: the store has not answered it.
        self.begin_probe();
        let _one = self.probing.lock().await;
        let mut pause = RETRY_MIN;
        while self.age() >= LEADER_LEASE {
            // A question may have been answered since the last attempt began.
            self.begin_probe();
            match self.probe().await {
                Err(error @ MetaError::Store(_)) => {
                    warn!(%error, "cannot tell whether this server still leads, trying again");
                    trouble(error);
                }
                done => return done,
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(RETRY_MAX);
        }
        Ok(())
    }

    async fn probe(&self) -> Result<(), MetaError> {
        if !self.is_silent() {
            let began = self.env.since_boot();
            let number = self.state.read().number + 1;
            let next = match self.next(number).await? {
                // Planted: as if nobody else could read the log.
                Next::Ours if is_planted("acknowledged-unsettled") => Next::Free,
                next => next,
            };
            match next {
                Next::Free => {
                    self.proven(began);
                    return Ok(());
                }
                // Others may have seen what it holds. Its append need not wait for an answer.
                Next::Ours => drop(self.found.send_replace(number)),
                Next::Foreign => {}
            }
        }
        let (answer, verdict) = oneshot::channel();
        self.checks.send(answer).await.map_err(|_| MetaError::Closed)?;
        verdict.await.unwrap_or(Err(MetaError::Closed))
    }

    /// Looks behind the last record that we know.
    async fn next(&self, number: u64) -> Result<Next, MetaError> {
        let Some(bytes) = self.store.read(number).await? else { return Ok(Next::Free) };
        let ours = decode_frame::<LogRecord>(&bytes, crc).is_ok_and(|r| r.leader == self.nonce);
        Ok(if ours { Next::Ours } else { Next::Foreign })
    }
}
