//! Lookahead: keys announced before the rows that need their state (docs/design.md §8).
//!
//! A walker evaluates the subplan of a [`millrace_graph::lookahead::Lookahead`] over rows that are not readable yet,
//! and gives the keys to the tasks that own them. A hint may be early, late, wrong, repeated or lost: it changes no
//! result.

mod backlog;
pub mod buffers;
pub mod chain;
pub mod choice;
mod commit_times;
pub mod edge;
pub mod edges;
pub mod keys_ahead;
pub mod leaf;
pub mod operator;
pub mod outlook;
pub mod presence;
pub mod random_hints;
pub mod read_ahead;
mod route;
pub mod sent_keys;
pub mod sides;
pub mod sketch;
pub mod slack;
pub mod stream_ahead;
#[cfg(test)]
mod tests;
mod times;
pub mod trial;
pub mod uncommitted;
pub mod walker;
pub mod wiring;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::Context;

use arrow::array::{Array, ArrayRef};
use futures::task::AtomicWaker;
use millrace_graph::lookahead::Lookahead;
use millrace_storage::cache::Priority;
use millrace_storage::{Lookup, ReadClass};
use parking_lot::Mutex;
pub use times::HintTimes;
use tokio::time::Instant;

/// Keys of one hint at most.
pub const HINT_KEYS: usize = 256;

/// Stands for the first input where a hint is of rows of it that are deleted, and of what they had met.
pub const DELETED_PORT: usize = 2;

/// The input that hints of a lookahead name, or [`DELETED_PORT`].
pub fn hint_port(lookahead: &Lookahead) -> usize {
    if lookahead.deleted { DELETED_PORT } else { lookahead.port }
}

/// Keys whose state an operator of a task will need: their columns, as rows have them. The task that they reach encodes
/// and hashes them. On their way they are a [`edge::SentHint`].
pub struct Hint {
    /// The operator's node in the task's fragment.
    pub node: usize,
    /// See [`hint_port`].
    pub port: usize,
    /// Those of the operator's access key, in its order. Of vnodes that the task owns.
    pub columns: Vec<ArrayRef>,
    /// The latest event time of each key's rows.
    pub times: HintTimes,
    pub due: Due,
    /// For what is chained to it. The same key may then come several times.
    pub carried: Option<Arc<chain::Carried>>,
}

impl Hint {
    /// How many keys it has.
    pub fn count(&self) -> usize {
        self.columns.first().map_or(0, |column| column.len())
    }

    /// It has some keys, no more than a hint may have, and as many of everything.
    pub fn is_whole(&self) -> bool {
        let count = self.count();
        let carried = self.carried.iter().flat_map(|carried| &carried.columns);
        let is_even = self.columns.iter().chain(carried).all(|column| column.len() == count);
        is_even && (1..=HINT_KEYS).contains(&count)
    }
}

/// The epoch that brings the rows of a hint: not known before it is committed.
#[derive(Clone, Debug, Default)]
pub struct Due(Arc<DueEpoch>);

#[derive(Debug, Default)]
struct DueEpoch {
    /// 0: not known.
    number: AtomicU64,
    /// The rows are on their way to the operator already.
    is_near: bool,
    open: Mutex<OpenEpoch>,
}

#[derive(Debug)]
enum OpenEpoch {
    /// What waits for the epoch to be sealed.
    Open(UntilSealed),
    /// When its rows can come at the earliest, as far as that can be told.
    Sealed(Option<Instant>),
}

#[derive(Debug, Default)]
struct UntilSealed {
    /// Reads made for its rows, which become more urgent then.
    reads: Vec<ReadClass>,
    /// Of keys that are to be read then at the latest.
    notices: Vec<Arc<SealNotice>>,
}

impl Default for OpenEpoch {
    fn default() -> OpenEpoch {
        OpenEpoch::Open(UntilSealed::default())
    }
}

/// Tells a task that one of several epochs has been sealed.
#[derive(Debug, Default)]
pub struct SealNotice {
    is_told: AtomicBool,
    waker: AtomicWaker,
}

impl SealNotice {
    fn tell(&self) {
        self.is_told.store(true, Ordering::Release);
        self.waker.wake();
    }

    /// Whether it was told; if not, the task is woken when it is.
    pub fn poll(&self, cx: &Context<'_>) -> bool {
        self.waker.register(cx.waker());
        self.is_told.load(Ordering::Acquire)
    }
}

impl Due {
    /// At an epoch that is known.
    pub fn at(epoch: u64) -> Due {
        let due = Due::default();
        due.resolve(epoch);
        due
    }

    /// Of rows that are on their way to the operator already.
    pub fn near() -> Due {
        Due(Arc::new(DueEpoch { is_near: true, ..DueEpoch::default() }))
    }

    /// The same rows' epoch.
    pub fn is_same(&self, other: &Due) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// The rows are committed at this epoch; 1: they never will be.
    pub fn resolve(&self, epoch: u64) {
        self.0.number.store(epoch, Ordering::Relaxed);
    }

    /// The epoch is on its way into the log: what is read for its rows is needed as soon as it is there, which can be at
    /// that time, if anybody knows.
    pub fn seal(&self, there_at: Option<Instant>) {
        let waiting = {
            let mut open = self.0.open.lock();
            match std::mem::replace(&mut *open, OpenEpoch::Sealed(there_at)) {
                OpenEpoch::Open(waiting) => waiting,
                sealed => {
                    // The first time stays.
                    *open = sealed;
                    return;
                }
            }
        };
        waiting.reads.iter().for_each(|read| read.raise(Priority::Barrier, there_at));
        waiting.notices.iter().for_each(|notice| notice.tell());
    }

    /// See [`Due::seal`].
    #[cfg(test)]
    fn there_at(&self) -> Option<Instant> {
        match &*self.0.open.lock() {
            OpenEpoch::Open(_) => None,
            OpenEpoch::Sealed(there_at) => *there_at,
        }
    }

    /// Tells when the rows are near: when the epoch is sealed.
    pub fn tell_when_near(&self, notice: &Arc<SealNotice>) {
        match &mut *self.0.open.lock() {
            OpenEpoch::Open(waiting) if !self.0.is_near => {
                // Those that nobody waits for any more are let go of.
                waiting.notices.retain(|known| Arc::strong_count(known) > 1);
                waiting.notices.push(Arc::clone(notice));
            }
            _ => notice.tell(),
        }
    }

    /// A lookup for rows of these epochs, of the class that it has: of the reads at barriers once one of them is sealed.
    pub fn of_class(dues: &[Due], lookup: Lookup) -> Lookup {
        let lookup = lookup.of_class(Priority::Prefetch);
        if let Lookup::Pending(reading) = &lookup {
            let class = reading.class();
            dues.iter().for_each(|due| due.raise_when_sealed(&class));
        }
        lookup
    }

    fn raise_when_sealed(&self, read: &ReadClass) {
        match &mut *self.0.open.lock() {
            OpenEpoch::Open(waiting) => waiting.reads.push(read.clone()),
            OpenEpoch::Sealed(there_at) => read.raise(Priority::Barrier, *there_at),
        }
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
