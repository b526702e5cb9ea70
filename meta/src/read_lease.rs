//! For how long a process may take it that others keep what it reads (docs/design.md §9).
//!
//! What a process reads is kept for it while the leader hears of it. One that nobody has answered for a while may have been
//! fenced: then nothing is kept any more, and nobody needs to tell it. That is no harm to what it reads, because names of
//! objects are never given again; but it is to stop by itself. It asks the log, which is there without any leader: only a
//! record can fence it. Where none does, nothing that it reads is deleted, and it reads on.
//!
//! A process that has not registered yet has no pins, as one that was fenced and has not noticed. It reads no wrong bytes
//! either, and may find something gone that it was about to read. It looks at the log's head as often as one that nobody
//! answers, so that what it reads next is not older than that.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use millrace_common::{EnvHandle, SqlError, SqlState};
use tokio::sync::Mutex;
use tokio::time::timeout;
use tracing::{info, warn};

use crate::follower::LogFollower;
use crate::members::PROCESS_LEASE;

/// For how long a heartbeat that was answered counts, from before it was sent: less than the leader waits, by a fifth for
/// clocks that run differently.
const LEASE: Duration = PROCESS_LEASE.saturating_sub(Duration::from_millis(1_200));
/// For how long it counts that the log had not fenced the process. Whoever asks once a second lets no read wait.
const CHECKED_FOR: Duration = Duration::from_secs(2);

/// Why a process may read no longer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LeaseError {
    #[error("process {incarnation} has been fenced")]
    Fenced { incarnation: u64 },
    /// It may have been fenced, or not.
    #[error(
        "no leader has answered this process for {} ms, and it cannot read in the log whether it has been fenced: {cause}",
        silence.as_millis()
    )]
    Unknown { silence: Duration, cause: String },
}

impl From<LeaseError> for SqlError {
    fn from(error: LeaseError) -> SqlError {
        let hint = match error {
            LeaseError::Fenced { .. } => {
                "Run the statement again at another frontend, or at this one when it has been started again."
            }
            LeaseError::Unknown { .. } => {
                "Run the statement again when a leader or the object store answers."
            }
        };
        SqlError::new(SqlState::CANNOT_CONNECT_NOW, error.to_string()).with_hint(hint)
    }
}

/// See the module. Times are in nanoseconds since boot, a clock that also runs while the machine is suspended.
#[derive(Debug)]
pub struct ReadLease {
    log: Arc<LogFollower>,
    env: EnvHandle,
    /// None before the process has registered.
    incarnation: OnceLock<u64>,
    /// When the latest heartbeat began that was answered; before the first, when the process began.
    answered: AtomicU64,
    /// When the latest look at the log began that did not find the process fenced.
    checked: AtomicU64,
    /// Whether the log of the process says that the lease has run out.
    is_told: AtomicBool,
    /// One asks the log for all who wait.
    checking: Mutex<()>,
}

impl ReadLease {
    /// `registered`: when the registration began that was answered with this incarnation, since boot.
    pub fn new(
        log: Arc<LogFollower>,
        env: EnvHandle,
        incarnation: u64,
        registered: Duration,
    ) -> ReadLease {
        let lease = ReadLease::unregistered(log, env);
        lease.register(incarnation, registered);
        lease
    }

    /// Of a process that will register.
    pub fn unregistered(log: Arc<LogFollower>, env: EnvHandle) -> ReadLease {
        let answered = AtomicU64::new(env.since_boot().as_nanos() as u64);
        let (checked, is_told) = (AtomicU64::default(), AtomicBool::default());
        let (incarnation, checking) = (OnceLock::new(), Mutex::default());
        ReadLease { log, env, incarnation, answered, checked, is_told, checking }
    }

    /// The process has been given its incarnation; `began`: when the registration began, since boot. Once only.
    pub fn register(&self, incarnation: u64, began: Duration) {
        self.answered.store(began.as_nanos() as u64, Ordering::Release);
        let _ = self.incarnation.set(incarnation);
    }

    pub fn is_registered(&self) -> bool {
        self.incarnation.get().is_some()
    }

    /// Whether a leader has heard of the process not long ago: it would not have fenced it yet.
    pub fn is_answered(&self) -> bool {
        self.is_registered() && self.silence() < LEASE
    }

    /// The leader has answered a heartbeat that began then, since boot.
    pub fn renew(&self, began: Duration) {
        self.answered.fetch_max(began.as_nanos() as u64, Ordering::AcqRel);
        if self.is_told.swap(false, Ordering::AcqRel) {
            info!("a leader answers again");
        }
    }

    /// Whether what the process reads is kept for it. Free while the leader answers; else the log is asked, if that
    /// was not done just now, and waited for so long.
    pub async fn check(&self, patience: Duration) -> Result<(), LeaseError> {
        if self.is_current() {
            return Ok(());
        }
        match timeout(patience, self.ask_log()).await {
            Ok(checked) => checked,
            Err(_) => Err(self.unknown(format!("no answer within {} ms", patience.as_millis()))),
        }
    }

    async fn ask_log(&self) -> Result<(), LeaseError> {
        let _one = self.checking.lock().await;
        if self.is_current() {
            return Ok(());
        }
        let is_first = self.is_registered() && !self.is_told.swap(true, Ordering::AcqRel);
        if is_first {
            let silence_ms = self.silence().as_millis() as u64;
            warn!(silence_ms, "no leader answers: the log is asked whether this process is fenced");
        }
        let began = self.env.since_boot();
        self.log.catch_up().await.map_err(|error| self.unknown(error.to_string()))?;
        if let Some(incarnation) = self.incarnation.get().copied()
            && self.log.read(|state| state.processes.is_fenced(incarnation))
        {
            return Err(LeaseError::Fenced { incarnation });
        }
        if is_first {
            info!("the log has not fenced this process: it reads on");
        }
        self.checked.fetch_max(began.as_nanos() as u64, Ordering::AcqRel);
        Ok(())
    }

    fn is_current(&self) -> bool {
        self.is_answered() || self.since(&self.checked) < CHECKED_FOR
    }

    /// For how long no leader has answered.
    fn silence(&self) -> Duration {
        self.since(&self.answered)
    }

    fn since(&self, moment: &AtomicU64) -> Duration {
        let moment = Duration::from_nanos(moment.load(Ordering::Acquire));
        self.env.since_boot().saturating_sub(moment)
    }

    fn unknown(&self, cause: String) -> LeaseError {
        LeaseError::Unknown { silence: self.silence(), cause }
    }
}
