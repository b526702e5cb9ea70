//! The advisory locks of a frontend's sessions: in a table of its own where it is the only frontend, else in the
//! leader's, which all frontends share ([`leader`]).

mod leader;

use std::time::Duration;

use millrace_common::{SqlError, SqlState};
use millrace_meta::advisory::{
    AdvisoryLocks, Key, Listed, Mode, Request, Scope, SessionId, TransactionHolds,
};

use self::leader::LeaderLocks;
pub use self::leader::LockLeader;
use crate::incarnation::Incarnation;

/// A function that takes a lock: in which mode, for how long, and whether it waits.
pub fn takes(function: &str) -> Option<(Mode, Scope, bool)> {
    Some(match function {
        "pg_advisory_lock" => (Mode::Exclusive, Scope::Session, true),
        "pg_advisory_lock_shared" => (Mode::Shared, Scope::Session, true),
        "pg_advisory_xact_lock" => (Mode::Exclusive, Scope::Transaction, true),
        "pg_advisory_xact_lock_shared" => (Mode::Shared, Scope::Transaction, true),
        "pg_try_advisory_lock" => (Mode::Exclusive, Scope::Session, false),
        "pg_try_advisory_lock_shared" => (Mode::Shared, Scope::Session, false),
        "pg_try_advisory_xact_lock" => (Mode::Exclusive, Scope::Transaction, false),
        "pg_try_advisory_xact_lock_shared" => (Mode::Shared, Scope::Transaction, false),
        _ => return None,
    })
}

/// Which lock a session of this frontend wants, or gives back.
#[derive(Clone, Copy, Debug)]
pub struct LockRequest {
    pub pid: i32,
    pub key: Key,
    pub mode: Mode,
    pub scope: Scope,
}

/// See the module.
pub struct SessionLocks {
    /// The incarnation of this frontend.
    process: Incarnation,
    /// Of a frontend that is the only one.
    table: AdvisoryLocks,
    leader: Option<LeaderLocks>,
}

impl SessionLocks {
    pub fn new(process: Incarnation, leader: Option<LockLeader>) -> SessionLocks {
        let leader = leader.map(|leader| LeaderLocks::new(process.clone(), leader));
        SessionLocks { process, table: AdvisoryLocks::default(), leader }
    }

    fn session(&self, pid: i32) -> SessionId {
        SessionId { process: self.process.get(), pid }
    }

    fn request(&self, request: &LockRequest) -> Request {
        let LockRequest { pid, key, mode, scope } = *request;
        Request { holder: self.session(pid), key, mode, scope, number: 0 }
    }

    /// A session begins, which may take locks from now on.
    pub fn enter(&self, pid: i32) {
        match &self.leader {
            Some(leader) => leader.enter(pid),
            None => self.table.enter(self.session(pid)),
        }
    }

    /// Waits for the lock, at most `limit`. Dropping the future gives up.
    pub async fn acquire(
        &self,
        request: &LockRequest,
        limit: Option<Duration>,
    ) -> Result<(), SqlError> {
        let acquired = async {
            match &self.leader {
                Some(leader) => leader.take(request, true).await.map(drop),
                None => self.table.acquire(&self.request(request)).await,
            }
        };
        let Some(limit) = limit else { return acquired.await };
        let in_time = tokio::time::timeout(limit, acquired).await;
        in_time.unwrap_or_else(|_| {
            let message = "canceling statement due to lock timeout";
            Err(SqlError::new(SqlState::LOCK_NOT_AVAILABLE, message))
        })
    }

    /// Takes the lock if nobody is in the way.
    pub async fn try_acquire(&self, request: &LockRequest) -> Result<bool, SqlError> {
        match &self.leader {
            Some(leader) => leader.take(request, false).await,
            None => self.table.try_acquire(&self.request(request)),
        }
    }

    /// The same within a query, whose threads must not wait for the leader: an error where it has the locks.
    pub fn try_acquire_now(&self, request: &LockRequest) -> Result<bool, SqlError> {
        match &self.leader {
            None => self.table.try_acquire(&self.request(request)),
            Some(_) => Err(SqlError::unsupported(
                "taking an advisory lock within a query in a cluster",
            )
            .with_hint(
                "SELECT pg_advisory_lock(key) or pg_try_advisory_lock(key) by itself takes it.",
            )),
        }
    }

    /// Gives a lock back once, of what was taken for the request's scope; whether there was that.
    pub fn release(&self, request: &LockRequest) -> bool {
        match &self.leader {
            Some(leader) => leader.release(request),
            None => self.table.release(&self.request(request)),
        }
    }

    /// Gives back what the session holds beyond its transaction.
    pub fn release_session(&self, pid: i32) {
        match &self.leader {
            Some(leader) => leader.release_session(pid),
            None => self.table.release_session(self.session(pid)),
        }
    }

    /// The session's transaction has ended.
    pub fn release_transaction(&self, pid: i32) {
        match &self.leader {
            Some(leader) => leader.release_transaction(pid),
            None => self.table.release_transaction(self.session(pid)),
        }
    }

    /// The session has ended: it takes nothing any more.
    pub fn release_all(&self, pid: i32) {
        match &self.leader {
            Some(leader) => leader.release_all(pid),
            None => self.table.release_all(self.session(pid)),
        }
    }

    /// What the session's transaction holds now.
    pub fn transaction_holds(&self, pid: i32) -> TransactionHolds {
        match &self.leader {
            Some(leader) => leader.transaction_holds(pid),
            None => self.table.transaction_holds(self.session(pid)),
        }
    }

    /// The session's transaction goes back to what it held then.
    pub fn back_to(&self, pid: i32, then: &TransactionHolds) {
        match &self.leader {
            Some(leader) => leader.back_to(pid, then),
            None => self.table.back_to(self.session(pid), then),
        }
    }

    /// An error, once, if the session has held locks that were lost with their leader.
    pub fn check(&self, pid: i32) -> Result<(), SqlError> {
        self.leader.as_ref().map_or(Ok(()), |leader| leader.check(pid))
    }

    /// Asks the leader, if it has the locks, what `list` and `blocking` tell.
    pub async fn refresh(&self) -> Result<(), SqlError> {
        match &self.leader {
            Some(leader) => leader.refresh().await,
            None => Ok(()),
        }
    }

    /// The sessions that one waits for.
    pub fn blocking(&self, pid: i32) -> Vec<i32> {
        let blocking = match &self.leader {
            Some(leader) => return leader.blocking(pid),
            None => self.table.blocking(self.session(pid)),
        };
        blocking.iter().map(|session| session.pid).collect()
    }

    /// All that is held and waited for, by sessions of all frontends.
    pub fn list(&self) -> Vec<Listed> {
        match &self.leader {
            Some(leader) => leader.list(),
            None => self.table.list(),
        }
    }
}
