//! The memory of statements that are parsed and planned.
//!
//! Text becomes words, words expressions, expressions plans, each of them many times as large as what it is made from. What
//! that comes to is counted where it is allocated: parsing and planning are computed on one thread at a time, so that what
//! the thread allocates meanwhile is the statement's. It is asked for from the queries' memory when planning asks whether its
//! statement goes on ([`error`]), and kept until the statement has ended and its rows have been read.

use std::cell::RefCell;
use std::future::Future;
use std::sync::atomic::{AtomicIsize, Ordering};
use std::sync::{Arc, OnceLock};

use datafusion::execution::memory_pool::MemoryReservation;
use millrace_common::{SqlError, heap};
use millrace_functions::error::sql_error_from_datafusion;
use parking_lot::Mutex;

use super::QueryEngine;

/// Statements that hold less are not counted.
const SMALL: usize = 512 << 10;
/// What is asked for at a time.
const STEP: usize = 1 << 20;

tokio::task_local! {
    /// What the statement under way holds.
    pub static HELD: OnceLock<Arc<Held>>;
}

thread_local! {
    /// Whose work the thread does, and the bytes of the thread at which it would hold nothing.
    static HERE: RefCell<Option<(Arc<Held>, isize)>> = const { RefCell::new(None) };
}

/// What a statement holds of the queries' memory besides its rows.
pub struct Held {
    reservation: Mutex<MemoryReservation>,
    /// Bytes at the end of what has been done so far.
    kept: AtomicIsize,
}

impl Held {
    pub fn new(engine: &QueryEngine) -> Arc<Held> {
        let reservation = Mutex::new(engine.reservation("the plan of a statement"));
        Arc::new(Held { reservation, kept: AtomicIsize::new(0) })
    }

    /// The memory of a statement's parameters, which are about to be read; `None`: they are small.
    pub fn of_values(engine: &QueryEngine, bytes: usize) -> Result<Option<Held>, SqlError> {
        if bytes < SMALL {
            return Ok(None);
        }
        let reservation = engine.reservation("the parameters of a statement");
        let held = Held { reservation: Mutex::new(reservation), kept: AtomicIsize::new(0) };
        held.hold(bytes).map(|()| Some(held))
    }

    /// Does a part of the statement's work.
    pub fn during<T>(self: &Arc<Held>, work: impl FnOnce() -> T) -> T {
        let inside = HERE.with_borrow(Option::is_some);
        if inside {
            return work();
        }
        let nothing = heap::thread_bytes() - self.kept.load(Ordering::Relaxed);
        HERE.set(Some((Arc::clone(self), nothing)));
        let _part = Part;
        work()
    }

    fn hold(&self, bytes: usize) -> Result<(), SqlError> {
        let wanted = if bytes < SMALL { 0 } else { bytes.next_multiple_of(STEP) };
        let reservation = self.reservation.lock();
        reservation.try_resize(wanted).map_err(sql_error_from_datafusion)
    }
}

/// A part of a statement's work: ended also by a panic.
struct Part;

impl Drop for Part {
    fn drop(&mut self) {
        if let Some((held, nothing)) = HERE.take() {
            let kept = (heap::thread_bytes() - nothing).max(0);
            held.kept.store(kept, Ordering::Relaxed);
            // What there is no memory for has been told before, or is told when the statement goes on.
            let _ = held.hold(kept.unsigned_abs());
        }
    }
}

/// The error of the statement that this thread works on, if there is no memory for it.
pub fn error() -> Option<SqlError> {
    let here = HERE.with_borrow(|here| {
        here.as_ref().map(|(held, nothing)| (Arc::clone(held), heap::thread_bytes() - nothing))
    });
    let (held, bytes) = here?;
    let bytes = usize::try_from(bytes).unwrap_or(0);
    let enough = held.reservation.lock().size() >= bytes || bytes < SMALL;
    if enough { None } else { held.hold(bytes).err() }
}

/// What the statement under way holds.
pub fn held(engine: &QueryEngine) -> Arc<Held> {
    let held = HELD.try_with(|held| Arc::clone(held.get_or_init(|| Held::new(engine))));
    held.unwrap_or_else(|_| Held::new(engine))
}

/// Plans a query of the statement under way. What an earlier one of its queries was planned to is gone.
pub fn binding<T>(engine: &QueryEngine, work: impl FnOnce() -> T) -> T {
    let held = held(engine);
    let inside = HERE.with_borrow(Option::is_some);
    if !inside {
        held.kept.store(0, Ordering::Relaxed);
    }
    held.during(work)
}

/// Goes on planning what [`binding`] has begun.
pub fn planning<T>(engine: &QueryEngine, work: impl Future<Output = T>) -> impl Future<Output = T> {
    let held = held(engine);
    // On the heap, so that dropping the future drops the work.
    let mut work = Box::pin(work);
    std::future::poll_fn(move |context| held.during(|| work.as_mut().poll(context)))
}
