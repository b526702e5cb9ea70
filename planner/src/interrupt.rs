//! The end of a statement while it is planned: whoever plans on behalf of a client says how it can be told that the
//! statement has been cancelled or has run out of time, and planning asks at every step.
//!
//! Planning is one long computation on one thread, in which a good part of the steps are DataFusion's: so it is the thread
//! that knows what is asked, not an argument of every function.

use std::cell::RefCell;
use std::sync::Arc;

use millrace_common::SqlError;

thread_local! {
    static CURRENT: RefCell<Option<Interrupt>> = const { RefCell::new(None) };
}

/// Tells whether a statement has ended, and how. Once it has it stays so.
#[derive(Clone)]
pub struct Interrupt(Arc<dyn Fn() -> Option<SqlError> + Send + Sync>);

impl Interrupt {
    pub fn new(ended: impl Fn() -> Option<SqlError> + Send + Sync + 'static) -> Interrupt {
        Interrupt(Arc::new(ended))
    }

    /// Runs what plans for the statement.
    pub fn during<T>(&self, work: impl FnOnce() -> T) -> T {
        let _before = Before(CURRENT.replace(Some(self.clone())));
        work()
    }
}

/// What was asked before, put back also after a panic.
struct Before(Option<Interrupt>);

impl Drop for Before {
    fn drop(&mut self) {
        CURRENT.set(self.0.take());
    }
}

/// The error of a statement that has ended, if the one that is planned has.
pub fn check() -> Result<(), SqlError> {
    let current = CURRENT.with_borrow(Clone::clone);
    match current.and_then(|interrupt| (interrupt.0)()) {
        Some(e) => Err(e),
        None => Ok(()),
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
}
