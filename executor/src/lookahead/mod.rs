//! Lookahead: keys announced before the rows that need their state (docs/design.md §8).
//!
//! A walker evaluates the subplan of a [`millrace_graph::lookahead::Lookahead`] over rows that are not readable yet,
//! and gives the keys to the tasks that own them. A hint may be early, late, wrong, repeated or lost: it changes no
//! result.

pub mod chain;
pub mod choice;
pub mod edges;
pub mod leaf;
pub mod operator;
pub mod presence;
pub mod random_hints;
pub mod read_ahead;
mod route;
pub mod sides;
pub mod sketch;
pub mod slack;
pub mod stream_ahead;
#[cfg(test)]
mod tests;
pub mod uncommitted;
pub mod walker;
pub mod wiring;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use millrace_storage::cache::Priority;
use millrace_storage::{Lookup, ReadClass};
use parking_lot::Mutex;

use crate::state::keys::ChunkKeys;

/// Keys whose state an operator of a task will need.
pub struct Hint {
    /// The operator's node in the task's fragment.
    pub node: usize,
    pub port: usize,
    /// Of vnodes that the task owns.
    pub keys: ChunkKeys,
    /// The latest event time of each key's rows (microseconds); empty: the rows bring none.
    pub times: Vec<i64>,
    pub due: Due,
    /// For what is chained to it. The same key may then come several times.
    pub carried: Option<Arc<chain::Carried>>,
}

impl Hint {
    /// Of the encoded keys, their hashes, vnodes and times, and of what is carried.
    pub fn bytes(&self) -> usize {
        let carried = self.carried.as_ref().map_or(0, |carried| carried.bytes());
        self.keys.bytes() + size_of_val(self.times.as_slice()) + carried
    }
}

/// The epoch that brings the rows of a hint: not known before it is committed.
#[derive(Clone, Debug, Default)]
pub struct Due(Arc<DueEpoch>);

#[derive(Debug, Default)]
struct DueEpoch {
    /// 0: not known.
    number: AtomicU64,
    reads: Mutex<OpenReads>,
}

/// Reads made for the rows of an epoch, which become more urgent when it is sealed; `None`: it is.
#[derive(Debug)]
struct OpenReads(Option<Vec<ReadClass>>);

impl Default for OpenReads {
    fn default() -> OpenReads {
        OpenReads(Some(Vec::new()))
    }
}

impl Due {
    /// At an epoch that is known.
    pub fn at(epoch: u64) -> Due {
        let due = Due::default();
        due.resolve(epoch);
        due
    }

    /// The same rows' epoch.
    fn is_same(&self, other: &Due) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// The rows are committed at this epoch; 1: they never will be.
    pub fn resolve(&self, epoch: u64) {
        self.0.number.store(epoch, Ordering::Relaxed);
    }

    /// The epoch is on its way into the log: what is read for its rows is needed as soon as it is there.
    pub fn seal(&self) {
        let reads = self.0.reads.lock().0.take();
        reads.iter().flatten().for_each(|read| read.raise(Priority::Barrier));
    }

    /// A lookup for its rows, of the class that it has: of the reads at barriers once the epoch is sealed.
    pub fn of_class(&self, lookup: Lookup) -> Lookup {
        let mut reads = self.0.reads.lock();
        let Some(open) = &mut reads.0 else { return lookup.of_class(Priority::Barrier) };
        let lookup = lookup.of_class(Priority::Prefetch);
        if let Lookup::Pending(reading) = &lookup {
            open.push(reading.class());
        }
        lookup
    }

    /// The epoch, once it is known; see [`Due::resolve`].
    pub fn epoch(&self) -> Option<u64> {
        Some(self.0.number.load(Ordering::Relaxed)).filter(|epoch| *epoch != 0)
    }

    /// The barrier of this epoch has brought the rows, if any come.
    pub fn has_passed(&self, epoch: u64) -> bool {
        self.epoch().is_some_and(|due| due <= epoch)
    }
}
