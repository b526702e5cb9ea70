//! Advisory locks within a query. Taken by a statement of their own they may be waited for, for a process of its own too
//! ([`crate::session::advisory`]).

use millrace_common::{SqlError, SqlState};
use millrace_meta::advisory::{Key, Mode, Scope};

use super::{Entry, int};
use crate::advisory::LockRequest;
use crate::catalog::SystemTables;
use crate::catalog::rows::Cell;

pub(super) const FUNCTIONS: &[Entry] = &[
    ("pg_advisory_lock", 't', |t, a| lock(t, a, Mode::Exclusive, Scope::Session)),
    ("pg_advisory_lock_shared", 't', |t, a| lock(t, a, Mode::Shared, Scope::Session)),
    ("pg_advisory_xact_lock", 't', |t, a| lock(t, a, Mode::Exclusive, Scope::Transaction)),
    ("pg_advisory_xact_lock_shared", 't', |t, a| lock(t, a, Mode::Shared, Scope::Transaction)),
    ("pg_try_advisory_lock", 'b', |t, a| try_lock(t, a, Mode::Exclusive, Scope::Session)),
    ("pg_try_advisory_lock_shared", 'b', |t, a| try_lock(t, a, Mode::Shared, Scope::Session)),
    ("pg_try_advisory_xact_lock", 'b', |t, a| try_lock(t, a, Mode::Exclusive, Scope::Transaction)),
    ("pg_try_advisory_xact_lock_shared", 'b', |t, a| {
        try_lock(t, a, Mode::Shared, Scope::Transaction)
    }),
    ("pg_advisory_unlock", 'b', |t, a| unlock(t, a, Mode::Exclusive)),
    ("pg_advisory_unlock_shared", 'b', |t, a| unlock(t, a, Mode::Shared)),
    ("pg_advisory_unlock_all", 't', |t, _| {
        t.shared.locks.release_session(t.pid);
        Ok("".into())
    }),
];

/// The lock that the arguments name; `None`: one of them is NULL, and nothing is done.
fn key(args: &[Cell]) -> Result<Option<Key>, SqlError> {
    let numbers: Vec<Option<i64>> =
        (0..args.len()).map(|i| int(args, i)).collect::<Result<_, SqlError>>()?;
    let numbers: Option<Vec<i64>> = numbers.into_iter().collect();
    numbers.map(|n| Key::of(&n)).transpose()
}

fn take(t: &SystemTables, key: Key, mode: Mode, scope: Scope) -> Result<bool, SqlError> {
    let request = LockRequest { pid: t.pid, key, mode, scope };
    let taken = t.shared.locks.try_acquire_now(&request)?;
    // Outside a block the transaction is this statement.
    if taken && scope == Scope::Transaction && !t.in_transaction {
        t.shared.locks.release(&request);
    }
    Ok(taken)
}

fn try_lock(t: &SystemTables, args: &[Cell], mode: Mode, scope: Scope) -> Result<Cell, SqlError> {
    Ok(key(args)?.map(|key| take(t, key, mode, scope)).transpose()?.into())
}

/// Within a query nobody waits: a thread that all sessions share would.
fn lock(t: &SystemTables, args: &[Cell], mode: Mode, scope: Scope) -> Result<Cell, SqlError> {
    match key(args)?.map(|key| take(t, key, mode, scope)).transpose()? {
        None => Ok(Cell::Null),
        Some(true) => Ok("".into()),
        Some(false) => Err(SqlError::new(
            SqlState::LOCK_NOT_AVAILABLE,
            "could not obtain the advisory lock within a query",
        )
        .with_hint("SELECT pg_advisory_lock(key) by itself waits for it.")),
    }
}

fn unlock(t: &SystemTables, args: &[Cell], mode: Mode) -> Result<Cell, SqlError> {
    let request = |key| LockRequest { pid: t.pid, key, mode, scope: Scope::Session };
    Ok(key(args)?.map(|key| t.shared.locks.release(&request(key))).into())
}
