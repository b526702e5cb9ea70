//! The memory of statements that are parsed and planned.
//!
//! Text becomes words, words expressions, expressions plans, each of them many times as large as what it is made from. What
//! that comes to is counted where it is allocated: parsing and planning are computed on one thread at a time, so that what
//! the thread allocates meanwhile is the statement's. It is asked for from the queries' memory when planning asks whether its
//! statement goes on ([`Held::error`]), and kept until the statement has ended and its rows have been read.

use std::future::Future;
use std::sync::Arc;

use datafusion::execution::memory_pool::MemoryReservation;
use millrace_common::{SqlError, heap};
use millrace_functions::error::sql_error_from_datafusion;
use parking_lot::Mutex;

use super::QueryEngine;

/// Statements that hold less are not counted.
const SMALL: usize = 512 << 10;
/// What is asked for at a time.
const STEP: usize = 1 << 20;

/// What a statement holds of the queries' memory besides its rows.
pub struct Held {
    reservation: Mutex<MemoryReservation>,
    account: Mutex<Account>,
}

/// What is counted of a statement's work.
#[derive(Default)]
struct Account {
    /// Bytes at the end of what has been done so far.
    kept: isize,
    /// While a part of the work is done: the bytes of its thread at which it would hold nothing.
    nothing: Option<isize>,
}

impl Held {
    pub fn new(engine: &QueryEngine) -> Arc<Held> {
        let reservation = Mutex::new(engine.reservation("the plan of a statement"));
        Arc::new(Held { reservation, account: Mutex::default() })
    }

    /// The memory of a statement's parameters, which are about to be read; `None`: they are small.
    pub fn of_values(engine: &QueryEngine, bytes: usize) -> Result<Option<Held>, SqlError> {
        if bytes < SMALL {
            return Ok(None);
        }
        let reservation = engine.reservation("the parameters of a statement");
        let held = Held { reservation: Mutex::new(reservation), account: Mutex::default() };
        held.hold(bytes).map(|()| Some(held))
    }

    /// Does a part of the statement's work, which may be within another part of it.
    pub fn during<T>(&self, work: impl FnOnce() -> T) -> T {
        {
            let mut account = self.account.lock();
            if account.nothing.is_some() {
                drop(account);
                return work();
            }
            account.nothing = Some(heap::thread_bytes() - account.kept);
        }
        let _part = Part(self);
        work()
    }

    /// Plans a query of the statement. What an earlier one of its queries was planned to is gone.
    pub fn binding<T>(&self, work: impl FnOnce() -> T) -> T {
        {
            let mut account = self.account.lock();
            if account.nothing.is_none() {
                account.kept = 0;
            }
        }
        self.during(work)
    }

    /// Goes on planning what [`Held::binding`] has begun.
    pub fn planning<T>(self: &Arc<Held>, work: impl Future<Output = T>) -> impl Future<Output = T> {
        let held = Arc::clone(self);
        // On the heap, so that dropping the future drops the work.
        let mut work = Box::pin(work);
        std::future::poll_fn(move |context| held.during(|| work.as_mut().poll(context)))
    }

    /// The error of the statement if there is no memory for what is being done. It is asked for on the thread that does it.
    pub fn error(&self) -> Option<SqlError> {
        let nothing = self.account.lock().nothing?;
        let bytes = usize::try_from(heap::thread_bytes() - nothing).unwrap_or(0);
        let enough = self.reservation.lock().size() >= bytes || bytes < SMALL;
        if enough { None } else { self.hold(bytes).err() }
    }

    fn hold(&self, bytes: usize) -> Result<(), SqlError> {
        let wanted = if bytes < SMALL { 0 } else { bytes.next_multiple_of(STEP) };
        let reservation = self.reservation.lock();
        reservation.try_resize(wanted).map_err(sql_error_from_datafusion)
    }
}

/// A part of a statement's work: ended also by a panic.
struct Part<'a>(&'a Held);

impl Drop for Part<'_> {
    fn drop(&mut self) {
        let kept = {
            let mut account = self.0.account.lock();
            let Some(nothing) = account.nothing.take() else { return };
            account.kept = (heap::thread_bytes() - nothing).max(0);
            account.kept
        };
        // What there is no memory for has been told before, or is told when the statement goes on.
        let _ = self.0.hold(kept.unsigned_abs());
    }
}
