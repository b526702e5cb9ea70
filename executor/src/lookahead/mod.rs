//! Lookahead: keys announced before the rows that need their state (docs/design.md §8).
//!
//! A walker evaluates the subplan of a [`millrace_graph::lookahead::Lookahead`] over rows that are not readable yet,
//! and gives the keys to the tasks that own them. A hint may be early, late, wrong, repeated or lost: it changes no
//! result.

pub mod operator;
pub mod presence;
pub mod random_hints;
pub mod read_ahead;
mod route;
pub mod stream_ahead;
#[cfg(test)]
mod tests;
pub mod uncommitted;
pub mod walker;
pub mod wiring;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::state::keys::ChunkKeys;

/// Keys whose state an operator of a task will need.
pub struct Hint {
    /// The operator's node in the task's fragment.
    pub node: usize,
    pub port: usize,
    /// Distinct; of vnodes that the task owns.
    pub keys: ChunkKeys,
    /// The latest event time of each key's rows (microseconds); empty: the rows bring none.
    pub times: Vec<i64>,
    pub due: Due,
}

/// The epoch that brings the rows of a hint: not known before it is committed.
#[derive(Clone, Debug, Default)]
pub struct Due(Arc<AtomicU64>);

impl Due {
    /// At an epoch that is known.
    pub fn at(epoch: u64) -> Due {
        Due(Arc::new(AtomicU64::new(epoch)))
    }

    /// The rows are committed at this epoch; 1: they never will be.
    pub fn resolve(&self, epoch: u64) {
        self.0.store(epoch, Ordering::Relaxed);
    }

    /// The barrier of this epoch has brought the rows, if any come.
    pub fn has_passed(&self, epoch: u64) -> bool {
        let due = self.0.load(Ordering::Relaxed);
        due != 0 && due <= epoch
    }
}
