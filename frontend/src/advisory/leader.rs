//! Advisory locks that the leader has for the sessions of all frontends.
//!
//! The leader knows who holds which lock and who waits; this process counts how often each of its sessions has taken a
//! lock that it holds there, and gives it back when that is 0. What a session asks the leader for goes one after the
//! other, by a task that lives as long as the session: nothing is given back after it was taken anew, and whoever stops
//! waiting has nothing when that task has told the leader so.
//!
//! Locks are lost with their leader. A session that has held some is told once: by the error of its next statement, or
//! of its commit. One that holds none and waits for a lock goes on to wait at the next leader.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use millrace_common::task::spawn;
use millrace_common::{SqlError, SqlState};
use millrace_meta::advisory::{
    self, Key, Listed, Mode, Scope, SessionId, TransactionHolds, session_ended,
};
use millrace_rpc::call_error::CallError;
use millrace_rpc::control::{
    AdvisoryLock, GiveBackLocksRequest, MetaControl, SessionId as ProtoSessionId, TakeLockAnswer,
    TakeLockRequest,
};
use parking_lot::Mutex;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::LockRequest;
use crate::incarnation::Incarnation;

/// Between attempts to tell a leader that does not answer.
const PAUSE: Duration = Duration::from_millis(500);

/// For how long a lock is asked for while no leader answers. A change of leader takes a few seconds.
const PATIENCE: Duration = Duration::from_secs(15);
/// A call that has lasted for longer has had its leader meanwhile: nobody waits so long for one that does not answer.
const SILENCE: Duration = Duration::from_secs(8);

/// How long a look at locks waits for the leader.
const LIST_WAIT: Duration = Duration::from_secs(2);

/// The leader as far as it has advisory locks.
pub struct LockLeader {
    pub meta: Arc<dyn MetaControl>,
    /// The term of the newest leader that is known here.
    pub term: Box<dyn Fn() -> u64 + Send + Sync>,
}

/// How often a session has taken a lock that it holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Counts {
    session: u64,
    transaction: u64,
}

impl Counts {
    fn of(&mut self, scope: Scope) -> &mut u64 {
        match scope {
            Scope::Session => &mut self.session,
            Scope::Transaction => &mut self.transaction,
        }
    }

    fn is_zero(self) -> bool {
        self == Counts::default()
    }
}

/// What a session holds.
#[derive(Default)]
struct Held {
    counts: BTreeMap<(Key, Mode), Counts>,
    /// Of the leader that has them.
    term: u64,
    /// To the session's task; made when it first takes a lock.
    orders: Option<UnboundedSender<Order>>,
}

/// What a session's task is to ask the leader for.
enum Order {
    Take { request: LockRequest, waits: bool, reply: oneshot::Sender<Result<bool, SqlError>> },
    GiveBack(Vec<AdvisoryLock>),
}

struct Inner {
    process: Incarnation,
    leader: LockLeader,
    /// The sessions that there are, by process id.
    sessions: Mutex<HashMap<i32, Held>>,
    /// As the leader has told last.
    listed: Mutex<Vec<Listed>>,
}

/// See the module.
pub(super) struct LeaderLocks(Arc<Inner>);

impl LeaderLocks {
    pub(super) fn new(process: Incarnation, leader: LockLeader) -> LeaderLocks {
        let (sessions, listed) = (Mutex::default(), Mutex::default());
        LeaderLocks(Arc::new(Inner { process, leader, sessions, listed }))
    }

    pub(super) fn enter(&self, pid: i32) {
        self.0.sessions.lock().insert(pid, Held::default());
    }

    pub(super) async fn take(&self, request: &LockRequest, waits: bool) -> Result<bool, SqlError> {
        // The leader gives locks to processes that it knows, and takes them back with these.
        self.0.process.given().await?;
        let answer = {
            let mut sessions = self.0.sessions.lock();
            let held = sessions.get_mut(&request.pid).ok_or_else(session_ended)?;
            held.check(&self.0.leader)?;
            if let Some(counts) = held.counts.get_mut(&(request.key, request.mode)) {
                *counts.of(request.scope) += 1;
                return Ok(true);
            }
            let (reply, answer) = oneshot::channel();
            let orders = held.orders.get_or_insert_with(|| self.begin(request.pid));
            let order = Order::Take { request: *request, waits, reply };
            orders.send(order).map_err(|_| session_ended())?;
            answer
        };
        answer.await.map_err(|_| session_ended())?
    }

    /// Starts the task of a session.
    fn begin(&self, pid: i32) -> UnboundedSender<Order> {
        let (orders, received) = unbounded_channel();
        let session = ProtoSessionId { process: self.0.process.get(), pid };
        let task = SessionTask { inner: Arc::clone(&self.0), session, number: 0 };
        spawn("advisory locks", task.run(received));
        orders
    }

    /// Gives back what `change` takes off a session's counts; whether anything was.
    fn give_back(
        &self,
        pid: i32,
        mut change: impl FnMut(&(Key, Mode), &mut Counts) -> bool,
    ) -> bool {
        let mut sessions = self.0.sessions.lock();
        let Some(held) = sessions.get_mut(&pid) else { return false };
        let mut changed = false;
        for (lock, counts) in &mut held.counts {
            changed |= change(lock, counts);
        }
        let free = held.counts.extract_if(.., |_, counts| counts.is_zero());
        let free: Vec<_> = free.map(|((key, mode), _)| advisory::to_proto(key, mode)).collect();
        if let Some(orders) = held.orders.as_ref().filter(|_| !free.is_empty()) {
            // It ends after the session only.
            let _ = orders.send(Order::GiveBack(free));
        }
        changed
    }

    pub(super) fn release(&self, request: &LockRequest) -> bool {
        self.give_back(request.pid, |lock, counts| {
            let count = counts.of(request.scope);
            let has = *lock == (request.key, request.mode) && *count > 0;
            *count -= u64::from(has);
            has
        })
    }

    pub(super) fn release_session(&self, pid: i32) {
        self.give_back(pid, |_, counts| std::mem::take(&mut counts.session) > 0);
    }

    pub(super) fn release_transaction(&self, pid: i32) {
        self.give_back(pid, |_, counts| std::mem::take(&mut counts.transaction) > 0);
    }

    pub(super) fn release_all(&self, pid: i32) {
        // Its task tells the leader when it has no more orders.
        self.0.sessions.lock().remove(&pid);
    }

    pub(super) fn transaction_holds(&self, pid: i32) -> TransactionHolds {
        let sessions = self.0.sessions.lock();
        let counts = sessions.get(&pid).into_iter().flat_map(|held| &held.counts);
        let held = counts.map(|(lock, counts)| (*lock, counts.transaction));
        held.filter(|(_, count)| *count > 0).collect()
    }

    pub(super) fn back_to(&self, pid: i32, then: &TransactionHolds) {
        self.give_back(pid, |lock, counts| {
            let kept = then.get(lock).copied().unwrap_or(0).min(counts.transaction);
            std::mem::replace(&mut counts.transaction, kept) > kept
        });
    }

    pub(super) fn check(&self, pid: i32) -> Result<(), SqlError> {
        self.0.check(pid)
    }

    pub(super) async fn refresh(&self) -> Result<(), SqlError> {
        self.0.listed.lock().clear();
        let told = tokio::time::timeout(LIST_WAIT, self.0.leader.meta.locks()).await;
        let locks = match told {
            Ok(locks) => locks.map_err(SqlError::from)?,
            Err(_) => {
                let message = "the leader does not tell who has advisory locks";
                return Err(SqlError::new(SqlState::CANNOT_CONNECT_NOW, message));
            }
        };
        let mut listed = Vec::with_capacity(locks.len());
        for lock in locks {
            let (key, mode) = advisory::from_proto(&lock.lock.unwrap_or_default())?;
            let ProtoSessionId { process, pid } = lock.session.unwrap_or_default();
            let holder = SessionId { process, pid };
            listed.push(Listed { key, holder, mode, granted: lock.granted });
        }
        *self.0.listed.lock() = listed;
        Ok(())
    }

    pub(super) fn list(&self) -> Vec<Listed> {
        self.0.listed.lock().clone()
    }

    /// Those that hold what a session waits for, or stand in line before it.
    pub(super) fn blocking(&self, pid: i32) -> Vec<i32> {
        blocking(&self.0.listed.lock(), pid)
    }
}

fn blocking(listed: &[Listed], pid: i32) -> Vec<i32> {
    let Some(at) = listed.iter().position(|l| l.holder.pid == pid && !l.granted) else {
        return Vec::new();
    };
    let own = &listed[at];
    let is_shared = |l: &Listed| l.mode == Mode::Shared && own.mode == Mode::Shared;
    // Who holds a lock is listed before who waits for it, and these in their order.
    let before = listed[..at].iter().filter(|l| l.key == own.key && l.holder != own.holder);
    let mut all: Vec<i32> = before.filter(|l| !is_shared(l)).map(|l| l.holder.pid).collect();
    all.sort_unstable();
    all.dedup();
    all
}

impl Held {
    /// An error, once, if another leader is known by now than the one that had these locks.
    fn check(&mut self, leader: &LockLeader) -> Result<(), SqlError> {
        if self.counts.is_empty() || (leader.term)() <= self.term {
            return Ok(());
        }
        self.counts.clear();
        Err(lost())
    }
}

/// What becomes of a lock that a leader has given.
#[derive(Debug)]
enum Noted {
    Held,
    /// The session wants it no more, for this reason.
    Unwanted(SqlError),
    /// That leader has been succeeded, by this term at the latest: others may be given the lock.
    Past {
        term: u64,
    },
}

/// Whether nobody leads there: the leader is to be asked again, or another one.
fn is_gone(error: &CallError) -> bool {
    let is_past = matches!(error, CallError::StaleTerm { .. } | CallError::StaleIncarnation { .. });
    is_past || error.is_retryable()
}

/// Asks the leader for what one session wants, one after the other.
struct SessionTask {
    inner: Arc<Inner>,
    session: ProtoSessionId,
    /// Of the last request.
    number: u64,
}

impl SessionTask {
    async fn run(mut self, mut orders: UnboundedReceiver<Order>) {
        while let Some(order) = orders.recv().await {
            match order {
                Order::Take { request, waits, reply } => self.take(request, waits, reply).await,
                Order::GiveBack(locks) => self.give_back(locks, false).await,
            }
        }
        self.give_back(Vec::new(), true).await;
    }

    async fn take(
        &mut self,
        request: LockRequest,
        waits: bool,
        mut reply: oneshot::Sender<Result<bool, SqlError>>,
    ) {
        let lock = advisory::to_proto(request.key, request.mode);
        let (result, is_unwanted) = tokio::select! {
            biased;
            asked = self.ask(&request, lock, waits) => asked,
            // The statement has been cancelled.
            () = reply.closed() => (Ok(false), true),
        };
        let is_taken = matches!(result, Ok(true));
        let is_told = reply.send(result).is_ok();
        if is_unwanted || (is_taken && !is_told && self.inner.forget(&request)) {
            self.give_back(vec![lock], false).await;
        }
    }

    /// Whether the leader has given the session the lock, and whether it may have one that the session does not want. Where
    /// a leader is lost meanwhile, the next one is asked.
    async fn ask(
        &mut self,
        request: &LockRequest,
        lock: AdvisoryLock,
        waits: bool,
    ) -> (Result<bool, SqlError>, bool) {
        let mut deadline = Instant::now() + PATIENCE;
        loop {
            self.number += 1;
            let began = Instant::now();
            let answer = self.inner.leader.meta.take_lock(TakeLockRequest {
                session: Some(self.session),
                lock: Some(lock),
                waits,
                number: self.number,
            });
            let error = match answer.await {
                Ok(TakeLockAnswer { taken: false, .. }) => return (Ok(false), false),
                Ok(TakeLockAnswer { taken: true, term }) => match self.inner.note(request, term) {
                    Noted::Held => return (Ok(true), false),
                    Noted::Unwanted(error) => return (Err(error), true),
                    Noted::Past { term } => CallError::StaleTerm { term },
                },
                Err(CallError::Sql(error)) => return (Err(error), false),
                Err(error) => error,
            };
            if began.elapsed() > SILENCE {
                deadline = Instant::now() + PATIENCE;
            }
            if !is_gone(&error) || Instant::now() + PAUSE >= deadline {
                // It may have taken it all the same.
                return (Err(error.into()), true);
            }
            tokio::time::sleep(PAUSE).await;
            if let Err(lost) = self.inner.check(request.pid) {
                return (Err(lost), true);
            }
        }
    }

    /// Returns when the leader knows it, or has no locks of this process.
    async fn give_back(&mut self, locks: Vec<AdvisoryLock>, ended: bool) {
        self.number += 1;
        let (session, number) = (Some(self.session), self.number);
        let request = GiveBackLocksRequest { session, number, locks, ended };
        loop {
            match self.inner.leader.meta.give_back_locks(request.clone()).await {
                Err(error) if is_gone(&error) => tokio::time::sleep(PAUSE).await,
                Ok(()) | Err(_) => return,
            }
        }
    }
}

impl Inner {
    /// See [`Held::check`].
    fn check(&self, pid: i32) -> Result<(), SqlError> {
        match self.sessions.lock().get_mut(&pid) {
            Some(held) => held.check(&self.leader),
            None => Ok(()),
        }
    }

    /// A session has a lock at the leader of this term.
    fn note(&self, request: &LockRequest, term: u64) -> Noted {
        let known = (self.leader.term)();
        let mut sessions = self.sessions.lock();
        let Some(held) = sessions.get_mut(&request.pid) else {
            return Noted::Unwanted(session_ended());
        };
        if !held.counts.is_empty() && held.term != term.max(known) {
            held.counts.clear();
            return Noted::Unwanted(lost());
        }
        if term < known {
            return Noted::Past { term: known };
        }
        held.term = term;
        *held.counts.entry((request.key, request.mode)).or_default().of(request.scope) += 1;
        Noted::Held
    }

    /// A session does not want what it has just got; whether it does not hold the lock any more.
    fn forget(&self, request: &LockRequest) -> bool {
        let mut sessions = self.sessions.lock();
        let Some(held) = sessions.get_mut(&request.pid) else { return true };
        let lock = (request.key, request.mode);
        let Some(counts) = held.counts.get_mut(&lock) else { return true };
        let count = counts.of(request.scope);
        *count = count.saturating_sub(1);
        let is_free = counts.is_zero();
        if is_free {
            held.counts.remove(&lock);
        }
        is_free
    }
}

fn lost() -> SqlError {
    let message = "the advisory locks of this session are lost: another leader has taken over";
    SqlError::new(SqlState("55000"), message)
        .with_detail("Other sessions may have taken the same locks since.")
        .with_hint("Take them again before you go on with what they protect.")
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use millrace_rpc::remote::{CallLimits, Peer, RemoteMeta};

    use super::*;

    /// The leader that answers may have been deposed while it slept.
    #[tokio::test]
    async fn a_lock_of_a_leader_that_has_been_succeeded_is_not_held() {
        // Nobody listens at that port.
        let peer = Peer::new("127.0.0.1:1", Arc::default(), CallLimits::default()).unwrap();
        let known = Arc::new(AtomicU64::new(3));
        let term = Arc::clone(&known);
        let leader = LockLeader {
            meta: Arc::new(RemoteMeta::new(peer)),
            term: Box::new(move || term.load(Ordering::Relaxed)),
        };
        let locks = LeaderLocks::new(1.into(), leader);
        locks.enter(7);
        let (mode, scope) = (Mode::Exclusive, Scope::Session);
        let request = LockRequest { pid: 7, key: Key::One(1), mode, scope };
        assert!(matches!(locks.0.note(&request, 2), Noted::Past { term: 3 }));
        assert!(locks.check(7).is_ok(), "it has held nothing");
        // The log may be behind the leader that answers.
        assert!(matches!(locks.0.note(&request, 4), Noted::Held));
        known.store(5, Ordering::Relaxed);
        let other = LockRequest { key: Key::One(2), ..request };
        assert!(matches!(locks.0.note(&other, 4), Noted::Unwanted(_)), "both are lost");
        assert!(locks.check(7).is_ok(), "that is told once");
        assert!(matches!(locks.0.note(&other, 5), Noted::Held));
    }

    #[test]
    fn who_waits_is_blocked_by_holders_and_by_those_before_it() {
        let lock = |pid, n, mode, granted| {
            let (key, holder) = (Key::One(n), SessionId { process: 1, pid });
            Listed { key, holder, mode, granted }
        };
        let listed = [
            lock(1, 7, Mode::Shared, true),
            lock(2, 7, Mode::Shared, true),
            lock(3, 7, Mode::Exclusive, false),
            lock(4, 7, Mode::Shared, false),
            lock(5, 7, Mode::Exclusive, false),
            lock(6, 8, Mode::Exclusive, true),
        ];
        assert_eq!(blocking(&listed, 3), [1, 2]);
        assert_eq!(blocking(&listed, 4), [3], "those that share the lock are in nobody's way");
        assert_eq!(blocking(&listed, 5), [1, 2, 3, 4]);
        assert_eq!(blocking(&listed, 6), [0i32; 0]);
    }
}
