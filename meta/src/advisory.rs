//! Advisory locks (`pg_advisory_lock` and its family): numbers that sessions agree on.
//!
//! A lock is held by a session until it gives it back or ends, or by a transaction until that ends. Who waits stands
//! in line: nobody is passed by later ones, but for those that hold the lock already. A wait that would
//! close a circle is error 40P01 at once. The table's lock is held for look-ups only.
//!
//! A standalone server has one such table. In a cluster the leader has it, of the sessions of all frontends; each frontend
//! counts for itself how often its sessions have taken what they hold there.
//!
//! Invariants: only sessions that have entered and not ended hold locks or stand in line, so that what a query still
//! does when its session is gone takes nothing; a session waits for one lock at most; there are no more entries than
//! `MAX_ENTRIES`.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

use millrace_common::collections::HashMap;
use millrace_common::{SqlError, SqlState};
use millrace_rpc::control::AdvisoryLock;
use parking_lot::Mutex;
use tokio::sync::Notify;

/// Locks that are held, by whom and in which mode, and places in line, of all sessions together. About 10 MB.
const MAX_ENTRIES: usize = 1 << 16;

/// A session, of all frontends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionId {
    /// The incarnation of its frontend.
    pub process: u64,
    pub pid: i32,
}

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

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
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

/// Who wants which lock.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    pub holder: SessionId,
    pub key: Key,
    pub mode: Mode,
    pub scope: Scope,
    /// Of the session's requests that are sent to the leader: what was given back later makes it void.
    pub number: u64,
}

/// A lock as it is listed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listed {
    pub key: Key,
    pub holder: SessionId,
    pub mode: Mode,
    pub granted: bool,
}

/// What one session has of a lock: it gives back as often as it has taken.
#[derive(Debug)]
struct Hold {
    holder: SessionId,
    mode: Mode,
    session: u64,
    transaction: u64,
}

#[derive(Debug)]
struct Waiter {
    ticket: u64,
    holder: SessionId,
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
    fn blockers(&self, holder: SessionId, mode: Mode, ticket: Option<u64>) -> Vec<SessionId> {
        let own = |h: &&Hold| h.holder == holder;
        if self.holds.iter().filter(own).any(|h| h.mode == mode) {
            return Vec::new();
        }
        let others = self.holds.iter().filter(|h| h.holder != holder && h.mode.excludes(mode));
        let mut found: Vec<SessionId> = others.map(|h| h.holder).collect();
        // Those in line behind what this session holds would wait for it in vain.
        if !self.holds.iter().any(|h| h.holder == holder) {
            let earlier = |w: &&Waiter| {
                w.holder != holder
                    && w.mode.excludes(mode)
                    && ticket.is_none_or(|own| w.ticket < own)
            };
            found.extend(self.waiters.iter().filter(earlier).map(|w| w.holder));
        }
        found
    }

    fn hold(&mut self, request: &Request) {
        let known = |h: &&mut Hold| h.holder == request.holder && h.mode == request.mode;
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
                let Request { holder, mode, .. } = *request;
                self.holds.push(Hold { holder, mode, session, transaction });
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
    /// Requests with smaller numbers are void.
    void_below: u64,
}

/// What a transaction had of a session's locks at one of its points.
pub type TransactionHolds = HashMap<(Key, Mode), u64>;

#[derive(Debug, Default)]
struct Table {
    /// Those that are held or waited for.
    locks: BTreeMap<Key, Lock>,
    /// The sessions that there are.
    owners: HashMap<SessionId, Owner>,
    /// Holds and waiters of all locks.
    entries: usize,
    next_ticket: u64,
}

impl Table {
    /// Takes the lock, if nobody is in the way.
    fn take(&mut self, request: &Request, ticket: Option<u64>) -> Result<bool, SqlError> {
        let Request { holder, key, mode, number, .. } = *request;
        let owner = self.owners.get_mut(&holder).ok_or_else(session_ended)?;
        if number < owner.void_below {
            return Err(SqlError::internal("the session does not want the lock any more"));
        }
        let known = self.locks.get(&key);
        if known.is_some_and(|lock| !lock.blockers(holder, mode, ticket).is_empty()) {
            return Ok(false);
        }
        let own = |h: &Hold| h.holder == holder && h.mode == mode;
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
        let owner = self.owners.get_mut(&request.holder).ok_or_else(session_ended)?;
        if self.entries >= MAX_ENTRIES {
            return Err(too_many());
        }
        self.entries += 1;
        owner.waits = Some(request.key);
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        let waiter = Waiter { ticket, holder: request.holder, mode: request.mode };
        self.locks.entry(request.key).or_default().waiters.push(waiter);
        Ok(ticket)
    }

    /// Leaves a line.
    fn leave(&mut self, holder: SessionId, key: Key, ticket: u64) {
        if let Some(owner) = self.owners.get_mut(&holder) {
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
    fn give_back(
        &mut self,
        holder: SessionId,
        key: Key,
        mut change: impl FnMut(&mut Hold) -> bool,
    ) -> bool {
        let Some(lock) = self.locks.get_mut(&key) else { return false };
        let (before, mut changed) = (lock.holds.len(), false);
        lock.holds.retain_mut(|hold| {
            changed |= hold.holder == holder && change(hold);
            hold.session + hold.transaction > 0
        });
        self.entries -= before - lock.holds.len();
        let holds = lock.holds.iter().any(|h| h.holder == holder);
        if lock.holds.is_empty() && lock.waiters.is_empty() {
            self.locks.remove(&key);
        }
        if !holds && let Some(owner) = self.owners.get_mut(&holder) {
            owner.keys.remove(&key);
        }
        changed
    }

    /// What of all that one session holds is to be given back; whether anything was.
    fn give_all_back(
        &mut self,
        holder: SessionId,
        change: impl Fn(Key, &mut Hold) -> bool,
    ) -> bool {
        let keys: Vec<Key> =
            self.owners.get(&holder).into_iter().flat_map(|o| &o.keys).copied().collect();
        let mut changed = false;
        for key in keys {
            changed |= self.give_back(holder, key, |hold| change(key, hold));
        }
        changed
    }

    /// What a session waits for, and those it waits for there.
    fn waits(&self, holder: SessionId) -> Option<(Key, Mode, Vec<SessionId>)> {
        let key = self.owners.get(&holder)?.waits?;
        let lock = self.locks.get(&key)?;
        let waiter = lock.waiters.iter().find(|w| w.holder == holder)?;
        Some((key, waiter.mode, lock.blockers(holder, waiter.mode, Some(waiter.ticket))))
    }

    /// The circle that a session's wait has closed: who waits for what of whom.
    fn circle(&self, holder: SessionId) -> Option<Vec<(SessionId, Key, Mode, SessionId)>> {
        let mut reached: HashMap<SessionId, (SessionId, Key, Mode)> = HashMap::default();
        let mut todo = vec![holder];
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
        let mut at = holder;
        loop {
            let (waiting, key, mode) = *reached.get(&at)?;
            edges.push((waiting, key, mode, at));
            at = waiting;
            if at == holder {
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
    holder: SessionId,
    key: Key,
    ticket: u64,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.locks.table.lock().leave(self.holder, self.key, self.ticket);
        self.locks.changed.notify_waiters();
    }
}

impl AdvisoryLocks {
    /// A session begins, which may take locks from now on. One that is known keeps what it has.
    pub fn enter(&self, holder: SessionId) {
        self.table.lock().owners.entry(holder).or_default();
    }

    /// A session of another process does not hold these any more, and what it has asked for before `number` is void.
    pub fn release_before(&self, holder: SessionId, number: u64, held: &[(Key, Mode)]) {
        {
            let mut table = self.table.lock();
            let owner = table.owners.entry(holder).or_default();
            owner.void_below = owner.void_below.max(number);
            for (key, mode) in held {
                table.give_back(holder, *key, |hold| {
                    let is_it = hold.mode == *mode;
                    if is_it {
                        (hold.session, hold.transaction) = (0, 0);
                    }
                    is_it
                });
            }
        }
        // What it still waits for is void, too.
        self.changed.notify_waiters();
    }

    /// Whether a session of this process holds a lock.
    pub fn are_held_by(&self, process: u64) -> bool {
        let table = self.table.lock();
        table.owners.iter().any(|(session, of)| session.process == process && !of.keys.is_empty())
    }

    /// The process of a session is fenced, which has not been told of this lock: it does not hold that. What else it holds
    /// is freed with the other locks of the process.
    pub fn release_untold(&self, holder: SessionId, lock: Option<(Key, Mode)>) {
        {
            let mut table = self.table.lock();
            if let Some((key, mode)) = lock {
                table.give_back(holder, key, |hold| {
                    let is_it = hold.mode == mode;
                    if is_it {
                        (hold.session, hold.transaction) = (0, 0);
                    }
                    is_it
                });
            }
            // Of one that holds nothing more there may be nobody who forgets it.
            if table.owners.get(&holder).is_some_and(|owner| owner.keys.is_empty()) {
                table.owners.remove(&holder);
            }
        }
        self.changed.notify_waiters();
    }

    /// The sessions of a fenced process have ended, and nothing more of them can be committed.
    pub fn release_process(&self, process: u64) {
        let sessions: Vec<SessionId> = {
            let table = self.table.lock();
            table.owners.keys().filter(|s| s.process == process).copied().collect()
        };
        sessions.into_iter().for_each(|session| self.release_all(session));
    }

    /// Takes the lock if nobody is in the way.
    pub fn try_acquire(&self, request: &Request) -> Result<bool, SqlError> {
        self.table.lock().take(request, None)
    }

    /// Waits for the lock. Dropping the future gives up.
    pub async fn acquire(&self, request: &Request) -> Result<(), SqlError> {
        let (ticket, circle) = {
            let mut table = self.table.lock();
            if table.take(request, None)? {
                return Ok(());
            }
            (table.enqueue(request)?, table.circle(request.holder))
        };
        let _place = Place { locks: self, holder: request.holder, key: request.key, ticket };
        if let Some(circle) = circle {
            return Err(deadlock(&circle));
        }
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            // From here on no change is missed.
            changed.as_mut().enable();
            if self.table.lock().take(request, Some(ticket))? {
                return Ok(());
            }
            changed.await;
        }
    }

    /// Gives a lock back once, of what was taken for the request's scope; whether there was that.
    pub fn release(&self, request: &Request) -> bool {
        let Request { holder, key, mode, scope, .. } = *request;
        let released = self.table.lock().give_back(holder, key, |hold| {
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
    pub fn release_session(&self, holder: SessionId) {
        self.give_back(holder, |_, hold| std::mem::take(&mut hold.session) > 0);
    }

    /// The session's transaction has ended.
    pub fn release_transaction(&self, holder: SessionId) {
        self.give_back(holder, |_, hold| std::mem::take(&mut hold.transaction) > 0);
    }

    /// What the session's transaction holds now.
    pub fn transaction_holds(&self, holder: SessionId) -> TransactionHolds {
        let table = self.table.lock();
        let keys = table.owners.get(&holder).into_iter().flat_map(|owner| &owner.keys);
        let holds = keys.filter_map(|key| Some((*key, &table.locks.get(key)?.holds)));
        holds
            .flat_map(|(key, holds)| holds.iter().map(move |hold| (key, hold)))
            .filter(|(_, hold)| hold.holder == holder && hold.transaction > 0)
            .map(|(key, hold)| ((key, hold.mode), hold.transaction))
            .collect()
    }

    /// The session's transaction goes back to what it held then.
    pub fn back_to(&self, holder: SessionId, then: &TransactionHolds) {
        self.give_back(holder, |key, hold| {
            let kept = then.get(&(key, hold.mode)).copied().unwrap_or(0).min(hold.transaction);
            std::mem::replace(&mut hold.transaction, kept) > kept
        });
    }

    /// The session has ended: it takes nothing any more.
    pub fn release_all(&self, holder: SessionId) {
        {
            let mut table = self.table.lock();
            table.give_all_back(holder, |_, hold| {
                (hold.session, hold.transaction) = (0, 0);
                true
            });
            table.owners.remove(&holder);
        }
        // Its own wait, if there is one, ends too.
        self.changed.notify_waiters();
    }

    fn give_back(&self, holder: SessionId, change: impl Fn(Key, &mut Hold) -> bool) {
        let changed = self.table.lock().give_all_back(holder, change);
        if changed {
            self.changed.notify_waiters();
        }
    }

    /// The sessions that one waits for.
    pub fn blocking(&self, holder: SessionId) -> Vec<SessionId> {
        let mut all: Vec<SessionId> =
            self.table.lock().waits(holder).map(|(.., blockers)| blockers).unwrap_or_default();
        all.sort_unstable();
        all.dedup();
        all
    }

    /// All that is held and waited for.
    pub fn list(&self) -> Vec<Listed> {
        let table = self.table.lock();
        let of = |(key, lock): (&Key, &Lock)| {
            let key = *key;
            let held = lock.holds.iter().map(move |h| (h.holder, h.mode, true));
            let waiting = lock.waiters.iter().map(move |w| (w.holder, w.mode, false));
            held.chain(waiting)
                .map(|(holder, mode, granted)| Listed { key, holder, mode, granted })
                .collect::<Vec<_>>()
        };
        table.locks.iter().flat_map(of).collect()
    }
}

/// The session of a request is not there any more.
pub fn session_ended() -> SqlError {
    SqlError::new(SqlState::ADMIN_SHUTDOWN, "the session that asks for the lock has ended")
}

/// PostgreSQL's error for a lock table that is full.
fn too_many() -> SqlError {
    SqlError::new(SqlState::OUT_OF_MEMORY, "out of shared memory")
        .with_detail(format!("There are {MAX_ENTRIES} advisory locks of all sessions."))
        .with_hint("Give back locks that are no longer needed; pg_locks lists them.")
}

fn deadlock(circle: &[(SessionId, Key, Mode, SessionId)]) -> SqlError {
    let line = |(waiting, key, mode, blocker): &(SessionId, Key, Mode, SessionId)| {
        let (class, object, kind) = key.parts();
        format!(
            "Process {} waits for {} on advisory lock [{class},{object},{kind}]; blocked by process {}.",
            waiting.pid,
            mode.name(),
            blocker.pid
        )
    };
    let lines: Vec<String> = circle.iter().map(line).collect();
    SqlError::new(SqlState("40P01"), "deadlock detected").with_detail(lines.join("\n"))
}

/// A lock as processes name it to each other.
pub fn to_proto(key: Key, mode: Mode) -> AdvisoryLock {
    let (first, second) = match key {
        Key::One(n) => (n, None),
        Key::Two(a, b) => (i64::from(a), Some(b)),
    };
    AdvisoryLock { first, second, shared: mode == Mode::Shared }
}

/// As it is here. An error if the first of two numbers is too large.
pub fn from_proto(lock: &AdvisoryLock) -> Result<(Key, Mode), SqlError> {
    let key = match lock.second {
        None => Key::of(&[lock.first])?,
        Some(second) => Key::of(&[lock.first, i64::from(second)])?,
    };
    Ok((key, if lock.shared { Mode::Shared } else { Mode::Exclusive }))
}

#[cfg(test)]
mod tests;
