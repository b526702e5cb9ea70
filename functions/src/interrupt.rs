//! The end of a statement while it is planned or runs: whoever computes on behalf of a client says how it can be told that
//! the statement has been cancelled, has run out of time or holds too much memory. Planning asks at every step, functions
//! ask within a row where a single value takes long.
//!
//! Both are long computations on a thread, in which a good part of the steps are DataFusion's, and sqlparser's: its rules
//! call ours and its expressions call functions without passing on whose statement it is. So it is the thread that knows
//! what is asked, not an argument of every function. Only [`here`] reaches it.

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use millrace_common::SqlError;

thread_local! {
    static HERE: Here = const { Here::nothing() };
}

/// What a thread computes.
struct Here {
    interrupt: RefCell<Option<Interrupt>>,
    /// What [`step`] may still be told of before it asks.
    unasked: Cell<usize>,
    folding: Cell<bool>,
}

impl Here {
    const fn nothing() -> Here {
        Here { interrupt: RefCell::new(None), unasked: Cell::new(0), folding: Cell::new(false) }
    }
}

#[inline]
fn here<T>(look: impl FnOnce(&Here) -> T) -> T {
    HERE.with(look)
}

/// Bytes that are handled without asking: some milliseconds even of slow work.
const UNASKED_BYTES: usize = 64 << 10;

/// Tells whether a statement has ended, and how. Once it has it stays so.
#[derive(Clone)]
pub struct Interrupt(Arc<dyn Fn() -> Option<SqlError> + Send + Sync>);

impl Interrupt {
    pub fn new(ended: impl Fn() -> Option<SqlError> + Send + Sync + 'static) -> Interrupt {
        Interrupt(Arc::new(ended))
    }

    /// Runs what plans for the statement.
    pub fn during<T>(&self, work: impl FnOnce() -> T) -> T {
        let _before = Before(here(|here| here.interrupt.replace(Some(self.clone()))));
        work()
    }
}

/// What was asked before, put back also after a panic.
struct Before(Option<Interrupt>);

impl Drop for Before {
    fn drop(&mut self) {
        let before = self.0.take();
        here(|here| drop(here.interrupt.replace(before)));
    }
}

/// The error of a statement that has ended, if the one that is planned has.
pub fn check() -> Result<(), SqlError> {
    let current = here(|here| here.interrupt.borrow().clone());
    match current.and_then(|interrupt| (interrupt.0)()) {
        Some(e) => Err(e),
        None => Ok(()),
    }
}

/// [`check`] once in a while, for loops whose turns are short. `bytes`: what a turn handles or makes, about.
#[inline]
pub fn step(bytes: usize) -> Result<(), SqlError> {
    let asks = here(|here| {
        let unasked = here.unasked.get();
        let asks = bytes >= unasked;
        here.unasked.set(if asks { UNASKED_BYTES } else { unasked - bytes });
        asks
    });
    if asks { check() } else { Ok(()) }
}

/// Runs what computes calls of constants in advance.
pub fn folding<T>(work: impl FnOnce() -> T) -> T {
    let _before = Folded(here(|here| here.folding.replace(true)));
    work()
}

/// Whether calls of constants are computed in advance: one that fails is left for the execution.
pub fn is_folding() -> bool {
    here(|here| here.folding.get())
}

struct Folded(bool);

impl Drop for Folded {
    fn drop(&mut self) {
        here(|here| here.folding.set(self.0));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use millrace_common::SqlState;

    use super::*;

    /// Ends at the given question.
    fn ends_at(question: usize) -> (Interrupt, Arc<AtomicUsize>) {
        let asked = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&asked);
        let interrupt = Interrupt::new(move || {
            let before = counted.fetch_add(1, Ordering::Relaxed);
            (before >= question).then(|| SqlError::new(SqlState::QUERY_CANCELED, "ended"))
        });
        (interrupt, asked)
    }

    #[test]
    fn only_what_runs_for_the_statement_ends_with_it() {
        let (outer, _) = ends_at(usize::MAX);
        let (inner, asked) = ends_at(1);
        outer.during(|| {
            inner.during(|| {
                assert!(check().is_ok());
                assert!(check().is_err());
                assert!(check().is_err());
            });
            assert!(check().is_ok());
        });
        assert!(check().is_ok());
        assert_eq!(asked.load(Ordering::Relaxed), 3);
    }
    #[test]
    fn steps_ask_by_what_they_handle() {
        let (interrupt, asked) = ends_at(usize::MAX);
        interrupt.during(|| {
            step(UNASKED_BYTES).unwrap();
            let before = asked.load(Ordering::Relaxed);
            (0..UNASKED_BYTES - 1).for_each(|_| step(1).unwrap());
            assert_eq!(asked.load(Ordering::Relaxed), before);
            step(1).unwrap();
            assert_eq!(asked.load(Ordering::Relaxed), before + 1);
        });
    }
}
