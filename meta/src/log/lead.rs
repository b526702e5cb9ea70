//! Whether this process still leads, before a read is answered.
//!
//! A writer learns from its own appends that another process has taken over; one that appends nothing would
//! answer reads from what it knew for ever. So a read is answered only if an append or a probe that *began* less
//! than [`LEADER_LEASE`] ago showed us at the head of the log. Otherwise one probe (the next record: is there one?)
//! serves all reads that wait. An idle server makes none.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use millrace_common::EnvHandle;
use millrace_common::fault_injection::is_planted;
use millrace_rpc::log::{LogRecord, decode_frame};
use millrace_storage::object::{PutProgress, PutWatch};
use parking_lot::RwLock;
use tokio::sync::{Mutex, mpsc, oneshot};
use tracing::warn;

use super::store::{LogStore, crc};
use super::writer::{RETRY_MAX, RETRY_MIN};
use crate::error::MetaError;
use crate::state::MetaState;

/// For how long a proof counts, on a clock that also runs while the machine is suspended.
pub const LEADER_LEASE: Duration = Duration::from_secs(2);

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

/// A probe, while it is under way.
struct Probe<'a>(&'a Lead);

impl Drop for Probe<'_> {
    fn drop(&mut self) {
        *self.0.probe_began.lock() = None;
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
    /// Since when the probe under way has been, on the same clock as appends; one is at a time.
    probe_began: parking_lot::Mutex<Option<Duration>>,
    probing: Mutex<()>,
    checks: mpsc::Sender<Check>,
}

/// What is at the next number.
enum Next {
    /// Nothing that is not ours.
    Free,
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
            probe_began: parking_lot::Mutex::default(),
            probing: Mutex::default(),
            checks,
        };
        (Arc::new(lead), asked)
    }

    /// Something that began then has shown us at the head.
    pub fn proven(&self, began: Duration) {
        self.proven.fetch_max(began.as_nanos() as u64, Ordering::AcqRel);
    }

    /// The append of record `number` begins: it is under way until the answer is dropped.
    pub fn begin_append(&self, number: u64) -> Append<'_> {
        let watch = PutWatch::default();
        let began = self.env.since_boot();
        *self.appending.lock() = Some(Appending { number, began, watch: watch.clone() });
        Append { lead: self, watch }
    }

    /// The append under way, if one is.
    pub fn append_wait(&self) -> Option<AppendWait> {
        let appending = self.appending.lock();
        let Appending { number, began, watch } = appending.as_ref()?;
        let waiting = self.env.since_boot().saturating_sub(*began);
        Some(AppendWait { number: *number, waiting, progress: watch.progress() })
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

    /// For how long the store has answered neither the append under way nor the probe under way, whichever began first;
    /// zero: neither is, or the store asks for fewer requests, which it would of another leader as well.
    pub fn store_wait(&self) -> Duration {
        let append = self.append_wait();
        if append.as_ref().is_some_and(|append| append.progress.held) {
            return Duration::ZERO;
        }
        let probe =
            self.probe_began.lock().map(|began| self.env.since_boot().saturating_sub(began));
        let append = append.map(|append| append.waiting);
        append.max(probe).unwrap_or_default()
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
        let _one = self.probing.lock().await;
        *self.probe_began.lock() = Some(self.env.since_boot());
        let _probe = Probe(self);
        let mut pause = RETRY_MIN;
        while self.age() >= LEADER_LEASE {
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
            if let Next::Free = self.next().await? {
                self.proven(began);
                return Ok(());
            }
        }
        let (answer, verdict) = oneshot::channel();
        self.checks.send(answer).await.map_err(|_| MetaError::Closed)?;
        verdict.await.unwrap_or(Err(MetaError::Closed))
    }

    /// Looks behind the last record we know, and behind one of ours that is under way.
    async fn next(&self) -> Result<Next, MetaError> {
        let mut number = self.state.read().number + 1;
        while let Some(bytes) = self.store.read(number).await? {
            let ours = decode_frame::<LogRecord>(&bytes, crc).is_ok_and(|r| r.leader == self.nonce);
            if !ours {
                return Ok(Next::Foreign);
            }
            number += 1;
        }
        Ok(Next::Free)
    }
}
