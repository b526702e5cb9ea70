//! A statement that runs, on all threads that run it: whether anybody still waits for it, and what memory it holds.
//!
//! The pool of queries counts what DataFusion's operators say they hold. What they do not speak of (results of functions,
//! rows of windows, what is copied on the way) is counted where it is allocated: while a task of a statement is polled, its
//! thread's allocations are the statement's. The count is rough, since rows are freed where they are not allocated; so
//! it ends a statement only when the process as a whole is over its limit.

use std::any::Any;
use std::cell::RefCell;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicIsize, Ordering};
use std::time::{Duration, Instant};

use datafusion::common::runtime::{JoinSetTracer, set_join_set_tracer};
use datafusion::error::{DataFusionError, Result};
use futures::future::{BoxFuture, Either};
use millrace_common::fair_shares::Share;
use millrace_common::resident::Resident;
use millrace_common::{SqlError, SqlState, heap};
use millrace_functions::error::QUERY_MEMORY;
use millrace_functions::error::sql_error_from_datafusion;
use millrace_functions::interrupt::Interrupt;

/// Of the process's memory, queries have one such part.
const QUERY_PART: usize = 4;

/// See the module.
#[derive(Debug, Default)]
pub struct Execution {
    /// Nobody waits for its rows any more.
    ended: AtomicBool,
    /// Bytes it has allocated and not freed, as of the last polls of its tasks.
    held: AtomicIsize,
    /// What queries may have together; 0: not bounded.
    memory: usize,
    /// Of the threads for queries: all its tasks together have one.
    share: Option<Arc<Share>>,
}

thread_local! {
    /// Known by the thread, not by arguments, since DataFusion's code is between: it starts tasks and computes conditions of
    /// joins without passing on what they belong to, and allocations are counted by thread. Only [`here`] reaches it.
    static HERE: RefCell<Option<Here>> = const { RefCell::new(None) };
}

/// What runs on a thread.
struct Here {
    execution: Arc<Execution>,
    /// The thread's bytes when it began.
    before: isize,
    /// When the other tasks of the thread were last looked after.
    since: Instant,
}

fn here<T>(look: impl FnOnce(&mut Option<Here>) -> T) -> T {
    HERE.with_borrow_mut(look)
}

impl Execution {
    /// `memory`: what queries may have together. `share`: the statement's, of the threads for queries; `None`: its tasks
    /// run when they wake up.
    pub fn new(memory: usize, share: Option<Arc<Share>>) -> Arc<Execution> {
        Arc::new(Execution { memory, share, ..Execution::default() })
    }

    pub fn end(&self) {
        self.ended.store(true, Ordering::Relaxed);
    }

    pub fn check(&self) -> Result<()> {
        self.error().map_or(Ok(()), |e| Err(DataFusionError::External(Box::new(e))))
    }

    /// Bytes that it no longer holds, since others do.
    pub fn give_away(&self, bytes: usize) {
        self.hold(-isize::try_from(bytes).unwrap_or(isize::MAX));
    }

    fn hold(&self, more: isize) {
        let held = |held: isize| Some(held.saturating_add(more).max(0));
        let _ = self.held.fetch_update(Ordering::Relaxed, Ordering::Relaxed, held);
    }

    /// Why it ends, if it does.
    fn error(&self) -> Option<SqlError> {
        if self.ended.load(Ordering::Relaxed) {
            // Only the statement's own tasks see it: its client has been told why it ended.
            let message = "canceling statement due to user request";
            return Some(SqlError::new(SqlState::QUERY_CANCELED, message));
        }
        let process = self.memory.saturating_mul(QUERY_PART);
        if process == 0 || heap::live_bytes()? <= process {
            return None;
        }
        // Rare enough to look at what there is before a statement is ended.
        if let Some(resident) = Resident::now() {
            heap::correct(resident.anonymous);
        }
        let live = heap::live_bytes().filter(|live| *live > process)?;
        // Over the limit ends what holds more than queries may have, far over it also what holds a good part of that.
        let most = if live <= process / 2 * 3 { self.memory * 2 } else { self.memory / 2 };
        let held = self.held.load(Ordering::Relaxed).saturating_add(held_here(self));
        let held = usize::try_from(held).unwrap_or(0);
        (held > most).then(|| {
            let (megabytes, held) = (self.memory >> 20, held >> 20);
            let text = format!("{QUERY_MEMORY}{megabytes} MB: it holds {held} MB in all");
            sql_error_from_datafusion(DataFusionError::ResourcesExhausted(text))
        })
    }

    /// Runs a part of the statement on this thread.
    fn during<T>(self: &Arc<Execution>, work: impl FnOnce() -> T) -> T {
        let (before, since) = (heap::thread_bytes(), Instant::now());
        let part = Here { execution: Arc::clone(self), before, since };
        let _part = Part { outer: here(|here| here.replace(part)) };
        let execution = Arc::clone(self);
        Interrupt::new(move || execution.error()).during(work)
    }
}

/// Bytes that a statement has come to hold on this thread since it began here.
fn held_here(execution: &Execution) -> isize {
    here(|here| match here {
        Some(here) if std::ptr::eq(here.execution.as_ref(), execution) => {
            heap::thread_bytes() - here.before
        }
        _ => 0,
    })
}

/// What is looked up within a long computation: an error if the statement that runs on this thread has ended, else whether
/// the thread's other tasks have waited so long for it that they are to be looked after now.
pub fn has_held_thread(long: Duration) -> Result<bool> {
    let Some(execution) = current() else { return Ok(false) };
    execution.check()?;
    Ok(here(|here| {
        let Some(here) = here else { return false };
        let held = here.since.elapsed() >= long;
        if held {
            here.since = Instant::now();
        }
        held
    }))
}

/// A part of a statement under way: ended also by a panic.
struct Part {
    /// What runs on the thread after it.
    outer: Option<Here>,
}

impl Drop for Part {
    fn drop(&mut self) {
        let outer = self.outer.take();
        if let Some(part) = here(|here| std::mem::replace(here, outer)) {
            part.execution.hold(heap::thread_bytes() - part.before);
        }
    }
}

/// A task of a statement, which runs in the statement's turns.
pub fn task<T>(
    execution: Arc<Execution>,
    work: impl Future<Output = T>,
) -> impl Future<Output = T> {
    let share = execution.share.clone();
    // On the heap, so that dropping the future drops the work.
    let mut work = Box::pin(work);
    let work =
        std::future::poll_fn(move |context| execution.during(|| work.as_mut().poll(context)));
    match share {
        Some(share) => Either::Left(share.run(work)),
        None => Either::Right(work),
    }
}

/// What DataFusion starts on behalf of a statement belongs to it.
struct Spawned;

fn current() -> Option<Arc<Execution>> {
    here(|here| here.as_ref().map(|here| Arc::clone(&here.execution)))
}

impl JoinSetTracer for Spawned {
    fn trace_future(
        &self,
        work: BoxFuture<'static, Box<dyn Any + Send>>,
    ) -> BoxFuture<'static, Box<dyn Any + Send>> {
        match current() {
            Some(execution) => Box::pin(task(execution, work)),
            None => work,
        }
    }

    fn trace_block(
        &self,
        work: Box<dyn FnOnce() -> Box<dyn Any + Send> + Send>,
    ) -> Box<dyn FnOnce() -> Box<dyn Any + Send> + Send> {
        match current() {
            Some(execution) => Box::new(move || execution.during(work)),
            None => work,
        }
    }
}

/// Has DataFusion tell what it starts. The second of two engines in a process finds it done.
pub fn follow_spawned() {
    let _ = set_join_set_tracer(&Spawned);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_part_looks_after_other_tasks_once_in_a_while() {
        let hour = Duration::from_secs(3600);
        assert!(!has_held_thread(Duration::ZERO).unwrap(), "nothing runs here");
        let execution = Execution::new(1 << 20, None);
        execution.during(|| {
            assert!(!has_held_thread(hour).unwrap());
            std::thread::sleep(Duration::from_millis(30));
            assert!(has_held_thread(Duration::from_millis(30)).unwrap());
            assert!(!has_held_thread(hour).unwrap());
            execution.end();
            assert!(has_held_thread(hour).is_err());
        });
    }

    #[test]
    fn a_statement_that_has_ended_is_told_wherever_it_runs() {
        let execution = Execution::new(1 << 20, None);
        let asked = || millrace_functions::interrupt::check().map_err(|e| e.state);
        execution.during(|| {
            assert_eq!(asked(), Ok(()));
            let inner = current().map(|e| {
                std::thread::spawn(move || {
                    e.end();
                    e.during(asked)
                })
            });
            let inner = inner.map(|thread| thread.join().unwrap());
            assert_eq!(inner, Some(Err(SqlState::QUERY_CANCELED)));
            assert_eq!(asked(), Err(SqlState::QUERY_CANCELED));
        });
        assert_eq!(asked(), Ok(()));
        assert!(current().is_none());
    }
}
