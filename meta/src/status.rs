//! What SHOW JOBS shows: a job's state and its numbers.

use std::sync::Arc;
use std::time::Duration;

use millrace_common::{Epoch, Generation, RelationId, SqlState};
use millrace_rpc::version::JobVersion;
use parking_lot::Mutex;

/// Where a job is in its life.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JobState {
    /// Its tasks are being built (first start, restart).
    Starting,
    /// Waiting for an input that is itself being created.
    WaitingForInputs {
        inputs: Vec<RelationId>,
    },
    /// Scanning the snapshots of its inputs. `rows_total` 0: not known.
    Creating {
        rows_read: u64,
        rows_total: u64,
    },
    /// The same, to compute anew what the relation has already.
    Rebuilding {
        rows_read: u64,
        rows_total: u64,
    },
    Running,
    /// It no longer follows its inputs, until it is rebuilt.
    Detached {
        reason: String,
    },
    /// A sink that waits to be resumed.
    Paused,
    /// A sink whose target does not take what is committed; tried again at `retry_at_ms`. Its tasks are
    /// well, and wait.
    Stalled {
        code: SqlState,
        reason: String,
        retry_at_ms: u64,
    },
    /// Its tasks stopped with an error; another generation starts at `retry_at_ms`.
    Failed {
        code: SqlState,
        reason: String,
        retry_at_ms: u64,
    },
}

impl JobState {
    /// One word, for the column `state`.
    pub fn name(&self) -> &'static str {
        match self {
            JobState::Starting => "starting",
            JobState::WaitingForInputs { .. } => "waiting",
            JobState::Creating { .. } => "creating",
            JobState::Rebuilding { .. } => "rebuilding",
            JobState::Running => "running",
            JobState::Detached { .. } => "detached",
            JobState::Paused => "paused",
            JobState::Stalled { .. } => "stalled",
            JobState::Failed { .. } => "failed",
        }
    }

    /// `Some(0..=100)` while creating, when the total is known.
    pub fn progress_percent(&self) -> Option<u8> {
        match self {
            JobState::Creating { rows_read, rows_total }
            | JobState::Rebuilding { rows_read, rows_total }
                if *rows_total > 0 =>
            {
                Some((u128::from(*rows_read) * 100 / u128::from(*rows_total)).min(100) as u8)
            }
            _ => None,
        }
    }
}

/// An epoch that takes longer is shown as a stall; nothing else comes of it.
pub const STALL_AFTER: Duration = Duration::from_secs(5);

/// A row of SHOW JOBS.
#[derive(Clone, Debug)]
pub struct JobStatus {
    pub relation: RelationId,
    pub state: JobState,
    pub generation: Generation,
    /// Last committed epoch.
    pub epoch: Epoch,
    /// Newest epoch at which the relation is exact; `None` while it is being created.
    pub frontier: Option<Epoch>,
    /// For how many milliseconds it has lacked the oldest change of its inputs that it does not have; 0: it has all.
    pub lag_ms: u64,
    pub row_count: i64,
    pub version: Arc<JobVersion>,
    /// For how long its tasks have been at one epoch, once that is suspiciously long.
    pub stalled: Option<Duration>,
    /// For how long the oldest of its commits that are on their way into the log has been.
    pub logging: Option<Duration>,
    pub counters: JobCounters,
    /// Of a sink: the last change its target has, and how many are staged beyond it.
    pub published: u64,
    pub staged: usize,
    /// By how much epochs, and with them `now()` of views, are ahead of the clock after it was set back.
    pub ahead: Option<Duration>,
}

impl JobStatus {
    /// Whether it is to compute anew what its relation has, and has not come to the end of that: by the log, whatever
    /// its driver is about. It may wait for its inputs, start, or have failed.
    pub fn is_being_rebuilt(&self) -> bool {
        self.version.is_rebuilding() && self.version.detached.is_none()
    }
}

/// How far epochs may be ahead of the clock by themselves: many within a millisecond are, a little.
const CLOCK_SLACK: Duration = Duration::from_secs(2);

/// By how much the newest epoch is ahead of the clock (milliseconds since 1970), where that tells that the clock was
/// set back.
pub fn ahead_of_clock(newest: Epoch, now_ms: u64) -> Option<Duration> {
    let ahead = Duration::from_millis(newest.millis().saturating_sub(now_ms));
    (ahead > CLOCK_SLACK).then_some(ahead)
}

/// Numbers of one job since the process started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct JobCounters {
    pub commits: u64,
    pub restarts: u64,
    /// Time from asking for a cut to its commit.
    pub barrier_p50: Duration,
    pub barrier_p99: Duration,
}

/// The newest commit latencies of a job.
#[derive(Debug, Default)]
pub struct Latencies {
    ring: Mutex<(Vec<Duration>, usize)>,
}

/// Enough for a stable 99th percentile, 16 KB a job.
const KEPT: usize = 1_024;

impl Latencies {
    pub fn record(&self, latency: Duration) {
        let mut guard = self.ring.lock();
        let (ring, next) = &mut *guard;
        if ring.len() < KEPT {
            ring.push(latency);
        } else {
            ring[*next] = latency;
        }
        *next = (*next + 1) % KEPT;
    }

    /// The value below which `percent` of the newest latencies lie; zero without any.
    pub fn percentile(&self, percent: usize) -> Duration {
        let mut all = self.ring.lock().0.clone();
        if all.is_empty() {
            return Duration::ZERO;
        }
        let at = (all.len() * percent / 100).min(all.len() - 1);
        *all.select_nth_unstable(at).1
    }
}
