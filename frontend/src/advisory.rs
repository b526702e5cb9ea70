//! Advisory locks (`pg_advisory_lock` and its family): numbers that sessions of this process agree on.
//!
//! A lock is held by a session until it gives it back or ends, or by a transaction until that ends. Who waits stands
//! in line: nobody is passed by later ones, but for those that hold the lock already. A wait that would
//! close a circle is error 40P01 at once. The table's lock is held for look-ups only.
//!
//! Invariants: only sessions that have entered and not ended hold locks or stand in line, so that what a query still
//! does when its session is gone takes nothing; a session waits for one lock at most; there are no more entries than
//! `MAX_ENTRIES`.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use millrace_common::{SqlError, SqlState};
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;

/// Locks that are held, by whom and in which mode, and places in line, of all sessions together. About 10 MB.
const MAX_ENTRIES: usize = 1 << 16;

/// What is locked: one number, or two. The two kinds have nothing to do with each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Key {
    One(i64),
    Two(i32, i32),
}

impl Key {
    /// The key of a function's arguments.
    pub fn of(numbers: &[i64]) -> Result<Key, SqlError> {
        let small = |n: i64| {
            i32::try_from(n).map_err(|_| {
                SqlError::new(SqlState::NUMERIC_VALUE_OUT_OF_RANGE, "integer out of range")
            })
        };
        match numbers {
            [n] => Ok(Key::One(*n)),
            [a, b] => Ok(Key::Two(small(*a)?, small(*b)?)),
            _ => Err(SqlError::new(
                SqlState::UNDEFINED_FUNCTION,
                "advisory locks are named by one number or two",
            )),
        }
    }

    /// As `pg_locks` shows it: `classid`, `objid`, `objsubid`.
    pub fn parts(self) -> (u32, u32, i64) {
        match self {
            Key::One(n) => ((n >> 32) as u32, n as u32, 1),
            Key::Two(a, b) => (a as u32, b as u32, 2),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mode {
    Exclusive,
    Shared,
}

impl Mode {
    /// As messages and `pg_locks` say it.
    pub fn name(self) -> &'static str {
        match self {
            Mode::Exclusive => "ExclusiveLock",
            Mode::Shared => "ShareLock",
        }
    }

    fn excludes(self, other: Mode) -> bool {
        self == Mode::Exclusive || other == Mode::Exclusive
    }
}

/// How long a lock is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    Session,
    Transaction,
}

/// What a function that waits for its lock asks for.
pub fn waits(function: &str) -> Option<(Mode, Scope)> {
    Some(match function {
        "pg_advisory_lock" => (Mode::Exclusive, Scope::Session),
        "pg_advisory_lock_shared" => (Mode::Shared, Scope::Session),
        "pg_advisory_xact_lock" => (Mode::Exclusive, Scope::Transaction),
        "pg_advisory_xact_lock_shared" => (Mode::Shared, Scope::Transaction),
        _ => return None,
    })
}

/// Who wants which lock.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    pub pid: i32,
    pub key: Key,
    pub mode: Mode,
    pub scope: Scope,
}

/// A lock as it is listed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listed {
    pub key: Key,
    pub pid: i32,
    pub mode: Mode,
    pub granted: bool,
}

/// What one session has of a lock: it gives back as often as it has taken.
#[derive(Debug)]
struct Hold {
    pid: i32,
    mode: Mode,
    session: u64,
    transaction: u64,
}

#[derive(Debug)]
struct Waiter {
    ticket: u64,
    pid: i32,
    mode: Mode,
}

#[derive(Debug, Default)]
struct Lock {
    holds: Vec<Hold>,
    /// In the order of their tickets.
    waiters: Vec<Waiter>,
}

impl Lock {
    /// Those that keep a session from having this lock now; `ticket`: its place in line, if it has one.
    fn blockers(&self, pid: i32, mode: Mode, ticket: Option<u64>) -> Vec<i32> {
        let own = |h: &&Hold| h.pid == pid;
        if self.holds.iter().filter(own).any(|h| h.mode == mode) {
            return Vec::new();
        }
        let others = self.holds.iter().filter(|h| h.pid != pid && h.mode.excludes(mode));
        let mut found: Vec<i32> = others.map(|h| h.pid).collect();
        // Those in line behind what this session holds would wait for it in vain.
        if !self.holds.iter().any(|h| h.pid == pid) {
            let earlier = |w: &&Waiter| {
                w.pid != pid && w.mode.excludes(mode) && ticket.is_none_or(|own| w.ticket < own)
            };
            found.extend(self.waiters.iter().filter(earlier).map(|w| w.pid));
        }
        found
    }

    fn hold(&mut self, request: &Request) {
        let known = |h: &&mut Hold| h.pid == request.pid && h.mode == request.mode;
        let (session, transaction) = match request.scope {
            Scope::Session => (1, 0),
            Scope::Transaction => (0, 1),
        };
        match self.holds.iter_mut().find(known) {
            Some(hold) => {
                hold.session += session;
                hold.transaction += transaction;
            }
            None => {
                let Request { pid, mode, .. } = *request;
                self.holds.push(Hold { pid, mode, session, transaction });
            }
        }
    }
}

/// What a session has to do with locks.
#[derive(Debug, Default)]
struct Owner {
    /// Those it holds something of.
    keys: BTreeSet<Key>,
    /// The one it waits for.
    waits: Option<Key>,
}

/// What a transaction had of a session's locks at one of its points.
pub type TransactionHolds = HashMap<(Key, Mode), u64>;

#[derive(Debug, Default)]
struct Table {
    /// Those that are held or waited for.
    locks: BTreeMap<Key, Lock>,
    /// The sessions that there are.
    owners: HashMap<i32, Owner>,
    /// Holds and waiters of all locks.
    entries: usize,
    next_ticket: u64,
}

impl Table {
    /// Takes the lock, if nobody is in the way.
    fn take(&mut self, request: &Request, ticket: Option<u64>) -> Result<bool, SqlError> {
        let Request { pid, key, mode, .. } = *request;
        let owner = self.owners.get_mut(&pid).ok_or_else(session_ended)?;
        let known = self.locks.get(&key);
        if known.is_some_and(|lock| !lock.blockers(pid, mode, ticket).is_empty()) {
            return Ok(false);
        }
        let own = |h: &Hold| h.pid == pid && h.mode == mode;
        let held = known.is_some_and(|lock| lock.holds.iter().any(own));
        if !held {
            // Who stands in line has an entry already, which it is about to leave.
            if ticket.is_none() && self.entries >= MAX_ENTRIES {
                return Err(too_many());
            }
            self.entries += 1;
        }
        owner.keys.insert(key);
        self.locks.entry(key).or_default().hold(request);
        Ok(true)
    }

    fn enqueue(&mut self, request: &Request) -> Result<u64, SqlError> {
        let owner = self.owners.get_mut(&request.pid).ok_or_else(session_ended)?;
        if self.entries >= MAX_ENTRIES {
            return Err(too_many());
        }
        self.entries += 1;
        owner.waits = Some(request.key);
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        let waiter = Waiter { ticket, pid: request.pid, mode: request.mode };
        self.locks.entry(request.key).or_default().waiters.push(waiter);
        Ok(ticket)
    }

    /// Leaves a line.
    fn leave(&mut self, pid: i32, key: Key, ticket: u64) {
        if let Some(owner) = self.owners.get_mut(&pid) {
            owner.waits = None;
        }
        let Some(lock) = self.locks.get_mut(&key) else { return };
        let before = lock.waiters.len();
        lock.waiters.retain(|w| w.ticket != ticket);
        self.entries -= before - lock.waiters.len();
        if lock.holds.is_empty() && lock.waiters.is_empty() {
            self.locks.remove(&key);
        }
    }

    /// What of one session's hold of a lock is to be given back; whether anything was.
    fn give_back(&mut self, pid: i32, key: Key, mut change: impl FnMut(&mut Hold) -> bool) -> bool {
        let Some(lock) = self.locks.get_mut(&key) else { return false };
        let (before, mut changed) = (lock.holds.len(), false);
        lock.holds.retain_mut(|hold| {
            changed |= hold.pid == pid && change(hold);
            hold.session + hold.transaction > 0
        });
        self.entries -= before - lock.holds.len();
        let holds = lock.holds.iter().any(|h| h.pid == pid);
        if lock.holds.is_empty() && lock.waiters.is_empty() {
            self.locks.remove(&key);
        }
        if !holds && let Some(owner) = self.owners.get_mut(&pid) {
            owner.keys.remove(&key);
        }
        changed
    }

    /// What of all that one session holds is to be given back; whether anything was.
    fn give_all_back(&mut self, pid: i32, change: impl Fn(Key, &mut Hold) -> bool) -> bool {
        let keys: Vec<Key> =
            self.owners.get(&pid).into_iter().flat_map(|o| &o.keys).copied().collect();
        let mut changed = false;
        for key in keys {
            changed |= self.give_back(pid, key, |hold| change(key, hold));
        }
        changed
    }

    /// What a session waits for, and those it waits for there.
    fn waits(&self, pid: i32) -> Option<(Key, Mode, Vec<i32>)> {
        let key = self.owners.get(&pid)?.waits?;
        let lock = self.locks.get(&key)?;
        let waiter = lock.waiters.iter().find(|w| w.pid == pid)?;
        Some((key, waiter.mode, lock.blockers(pid, waiter.mode, Some(waiter.ticket))))
    }

    /// The circle that a session's wait has closed: who waits for what of whom.
    fn circle(&self, pid: i32) -> Option<Vec<(i32, Key, Mode, i32)>> {
        let mut reached: HashMap<i32, (i32, Key, Mode)> = HashMap::new();
        let mut todo = vec![pid];
        while let Some(waiting) = todo.pop() {
            let Some((key, mode, blockers)) = self.waits(waiting) else { continue };
            for blocker in blockers {
                if let Entry::Vacant(new) = reached.entry(blocker) {
                    new.insert((waiting, key, mode));
                    todo.push(blocker);
                }
            }
        }
        let mut edges = Vec::new();
        let mut at = pid;
        loop {
            let (waiting, key, mode) = *reached.get(&at)?;
            edges.push((waiting, key, mode, at));
            at = waiting;
            if at == pid {
                edges.reverse();
                return Some(edges);
            }
        }
    }
}

/// All advisory locks of the process.
#[derive(Debug, Default)]
pub struct AdvisoryLocks {
    table: Mutex<Table>,
    /// Something was given back, or somebody has left a line.
    changed: Notify,
}

/// A place in a line; dropping it leaves the line.
struct Place<'a> {
    locks: &'a AdvisoryLocks,
    pid: i32,
    key: Key,
    ticket: u64,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.locks.table.lock().leave(self.pid, self.key, self.ticket);
        self.locks.changed.notify_waiters();
    }
}

impl AdvisoryLocks {
    /// A session begins, which may take locks from now on.
    pub fn enter(&self, pid: i32) {
        self.table.lock().owners.insert(pid, Owner::default());
    }

    /// Takes the lock if nobody is in the way.
    pub fn try_acquire(&self, request: &Request) -> Result<bool, SqlError> {
        self.table.lock().take(request, None)
    }

    /// Waits for the lock, at most `limit`. Dropping the future gives up.
    pub async fn acquire(
        &self,
        request: &Request,
        limit: Option<Duration>,
    ) -> Result<(), SqlError> {
        let (ticket, circle) = {
            let mut table = self.table.lock();
            if table.take(request, None)? {
                return Ok(());
            }
            (table.enqueue(request)?, table.circle(request.pid))
        };
        let _place = Place { locks: self, pid: request.pid, key: request.key, ticket };
        if let Some(circle) = circle {
            return Err(deadlock(&circle));
        }
        let deadline = limit.map(|l| Instant::now() + l);
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            // From here on no change is missed.
            changed.as_mut().enable();
            if self.table.lock().take(request, Some(ticket))? {
                return Ok(());
            }
            match deadline {
                None => changed.await,
                Some(deadline) => {
                    if tokio::time::timeout_at(deadline, changed).await.is_err() {
                        return Err(SqlError::new(
                            SqlState::LOCK_NOT_AVAILABLE,
                            "canceling statement due to lock timeout",
                        ));
                    }
                }
            }
        }
    }

    /// Gives a lock back once, of what was taken for the request's scope; whether there was that.
    pub fn release(&self, request: &Request) -> bool {
        let Request { pid, key, mode, scope } = *request;
        let released = self.table.lock().give_back(pid, key, |hold| {
            let count = match scope {
                Scope::Session => &mut hold.session,
                Scope::Transaction => &mut hold.transaction,
            };
            let has = hold.mode == mode && *count > 0;
            *count -= u64::from(has);
            has
        });
        if released {
            self.changed.notify_waiters();
        }
        released
    }

    /// Gives back what the session holds beyond its transaction.
    pub fn release_session(&self, pid: i32) {
        self.give_back(pid, |_, hold| std::mem::take(&mut hold.session) > 0);
    }

    /// The session's transaction has ended.
    pub fn release_transaction(&self, pid: i32) {
        self.give_back(pid, |_, hold| std::mem::take(&mut hold.transaction) > 0);
    }

    /// What the session's transaction holds now.
    pub fn transaction_holds(&self, pid: i32) -> TransactionHolds {
        let table = self.table.lock();
        let keys = table.owners.get(&pid).into_iter().flat_map(|owner| &owner.keys);
        let holds = keys.filter_map(|key| Some((*key, &table.locks.get(key)?.holds)));
        holds
            .flat_map(|(key, holds)| holds.iter().map(move |hold| (key, hold)))
            .filter(|(_, hold)| hold.pid == pid && hold.transaction > 0)
            .map(|(key, hold)| ((key, hold.mode), hold.transaction))
            .collect()
    }

    /// The session's transaction goes back to what it held then.
    pub fn back_to(&self, pid: i32, then: &TransactionHolds) {
        self.give_back(pid, |key, hold| {
            let kept = then.get(&(key, hold.mode)).copied().unwrap_or(0).min(hold.transaction);
            std::mem::replace(&mut hold.transaction, kept) > kept
        });
    }

    /// The session has ended: it takes nothing any more.
    pub fn release_all(&self, pid: i32) {
        {
            let mut table = self.table.lock();
            table.give_all_back(pid, |_, hold| {
                (hold.session, hold.transaction) = (0, 0);
                true
            });
            table.owners.remove(&pid);
        }
        // Its own wait, if there is one, ends too.
        self.changed.notify_waiters();
    }

    fn give_back(&self, pid: i32, change: impl Fn(Key, &mut Hold) -> bool) {
        let changed = self.table.lock().give_all_back(pid, change);
        if changed {
            self.changed.notify_waiters();
        }
    }

    /// The sessions that one waits for.
    pub fn blocking(&self, pid: i32) -> Vec<i32> {
        let mut all: Vec<i32> =
            self.table.lock().waits(pid).map(|(.., blockers)| blockers).unwrap_or_default();
        all.sort_unstable();
        all.dedup();
        all
    }

    /// All that is held and waited for.
    pub fn list(&self) -> Vec<Listed> {
        let table = self.table.lock();
        let of = |(key, lock): (&Key, &Lock)| {
            let key = *key;
            let held = lock.holds.iter().map(move |h| (h.pid, h.mode, true));
            let waiting = lock.waiters.iter().map(move |w| (w.pid, w.mode, false));
            held.chain(waiting)
                .map(|(pid, mode, granted)| Listed { key, pid, mode, granted })
                .collect::<Vec<_>>()
        };
        table.locks.iter().flat_map(of).collect()
    }
}

fn session_ended() -> SqlError {
    SqlError::new(SqlState::ADMIN_SHUTDOWN, "the session that asks for the lock has ended")
}

/// PostgreSQL's error for a lock table that is full.
fn too_many() -> SqlError {
    SqlError::new(SqlState::OUT_OF_MEMORY, "out of shared memory")
        .with_detail(format!("There are {MAX_ENTRIES} advisory locks of all sessions."))
        .with_hint("Give back locks that are no longer needed; pg_locks lists them.")
}

fn deadlock(circle: &[(i32, Key, Mode, i32)]) -> SqlError {
    let line = |(waiting, key, mode, blocker): &(i32, Key, Mode, i32)| {
        let (class, object, kind) = key.parts();
        format!(
            "Process {waiting} waits for {} on advisory lock [{class},{object},{kind}]; blocked by process {blocker}.",
            mode.name()
        )
    };
    let lines: Vec<String> = circle.iter().map(line).collect();
    SqlError::new(SqlState("40P01"), "deadlock detected").with_detail(lines.join("\n"))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    fn request(pid: i32, key: i64, mode: Mode) -> Request {
        Request { pid, key: Key::One(key), mode, scope: Scope::Session }
    }

    /// Locks of sessions 1, 2 and 3.
    fn locks() -> AdvisoryLocks {
        let locks = AdvisoryLocks::default();
        (1..=3).for_each(|pid| locks.enter(pid));
        locks
    }

    impl AdvisoryLocks {
        fn takes(&self, request: &Request) -> bool {
            self.try_acquire(request).unwrap()
        }
    }

    #[test]
    fn a_lock_is_given_back_as_often_as_it_was_taken() {
        let locks = locks();
        let own = request(1, 7, Mode::Exclusive);
        assert!(locks.takes(&own) && locks.takes(&own));
        assert!(!locks.takes(&request(2, 7, Mode::Shared)));
        assert!(locks.release(&own));
        assert!(!locks.takes(&request(2, 7, Mode::Shared)));
        assert!(locks.release(&own) && !locks.release(&own));
        assert!(locks.takes(&request(2, 7, Mode::Shared)));
        assert!(locks.takes(&request(3, 7, Mode::Shared)));
        assert!(!locks.release(&request(3, 7, Mode::Exclusive)));
        locks.release_all(2);
        locks.release_session(3);
        assert!(locks.list().is_empty());
        assert_eq!(locks.table.lock().entries, 0);
    }

    #[test]
    fn a_transactions_locks_end_with_it() {
        let locks = locks();
        let key = Key::Two(1, -1);
        let own = Request { pid: 1, key, mode: Mode::Exclusive, scope: Scope::Transaction };
        let session = Request { scope: Scope::Session, ..own };
        assert!(locks.takes(&own) && !locks.release(&session));
        assert_eq!(locks.list(), [Listed { key, pid: 1, mode: own.mode, granted: true }]);
        assert!(locks.takes(&session));
        locks.release_transaction(1);
        assert!(!locks.takes(&Request { pid: 2, ..own }));
        locks.release_session(1);
        assert!(locks.takes(&Request { pid: 2, ..own }));
    }

    #[test]
    fn a_transaction_goes_back_to_a_savepoint() {
        let locks = locks();
        let of = |key| Request { scope: Scope::Transaction, ..request(1, key, Mode::Exclusive) };
        assert!(locks.takes(&of(1)));
        let then = locks.transaction_holds(1);
        assert!(locks.takes(&of(1)) && locks.takes(&of(2)));
        assert!(locks.takes(&request(1, 3, Mode::Shared)));
        locks.back_to(1, &then);
        assert!(!locks.takes(&request(2, 1, Mode::Shared)));
        assert!(locks.takes(&request(2, 2, Mode::Exclusive)));
        assert!(!locks.takes(&request(2, 3, Mode::Exclusive)));
        assert_eq!(locks.transaction_holds(1), then);
        assert!(locks.release(&of(1)) && !locks.release(&of(1)));
    }

    #[test]
    fn who_has_ended_takes_nothing() {
        let locks = locks();
        locks.release_all(1);
        let late = locks.try_acquire(&request(1, 7, Mode::Exclusive)).unwrap_err();
        assert_eq!(late.state.0, "57P01");
        assert!(locks.list().is_empty());
    }

    #[test]
    fn there_is_an_end_of_locks() {
        let locks = locks();
        let all = MAX_ENTRIES as i64;
        (0..all).for_each(|key| assert!(locks.takes(&request(1, key, Mode::Exclusive))));
        let e = locks.try_acquire(&request(2, all, Mode::Exclusive)).unwrap_err();
        assert_eq!((e.state.0, e.message.as_str()), ("53200", "out of shared memory"));
        // What is held already takes no more room.
        assert!(locks.takes(&request(1, 0, Mode::Exclusive)));
        assert!(locks.release(&request(1, 1, Mode::Exclusive)));
        assert!(locks.takes(&request(2, all, Mode::Exclusive)));
        locks.release_all(1);
        assert_eq!(locks.table.lock().entries, 1);
    }

    #[tokio::test(start_paused = true)]
    async fn waits_end_in_order_or_with_an_error() {
        let locks = Arc::new(locks());
        assert!(locks.takes(&request(1, 7, Mode::Exclusive)));
        let limit = Some(Duration::from_secs(1));
        let late = locks.acquire(&request(2, 7, Mode::Exclusive), limit).await.unwrap_err();
        assert_eq!(late.state.0, "55P03");
        let waiting = {
            let locks = Arc::clone(&locks);
            tokio::spawn(async move {
                locks.acquire(&request(2, 7, Mode::Exclusive), None).await?;
                locks.release_all(2);
                Ok::<(), SqlError>(())
            })
        };
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!(locks.blocking(2), [1]);
        // Who comes later does not pass who waits.
        locks.release_all(1);
        assert!(!locks.takes(&request(3, 7, Mode::Shared)));
        waiting.await.unwrap().unwrap();
        assert!(locks.takes(&request(3, 7, Mode::Shared)));
        assert_eq!(locks.table.lock().entries, 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_wait_ends_with_its_session() {
        let locks = Arc::new(locks());
        assert!(locks.takes(&request(1, 7, Mode::Exclusive)));
        let waiting = {
            let locks = Arc::clone(&locks);
            tokio::spawn(async move { locks.acquire(&request(2, 7, Mode::Exclusive), None).await })
        };
        tokio::time::sleep(Duration::from_secs(1)).await;
        locks.release_all(2);
        assert_eq!(waiting.await.unwrap().unwrap_err().state.0, "57P01");
        assert_eq!(locks.list().len(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_circle_is_found() {
        let locks = Arc::new(locks());
        assert!(locks.takes(&request(1, 1, Mode::Exclusive)));
        assert!(locks.takes(&request(2, 2, Mode::Exclusive)));
        let waiting = {
            let locks = Arc::clone(&locks);
            tokio::spawn(async move { locks.acquire(&request(1, 2, Mode::Exclusive), None).await })
        };
        tokio::time::sleep(Duration::from_secs(1)).await;
        let e = locks.acquire(&request(2, 1, Mode::Shared), None).await.unwrap_err();
        assert_eq!(e.state.0, "40P01");
        locks.release_all(2);
        waiting.await.unwrap().unwrap();
    }
}
