//! Lookups for rows that the table's connector has read and that have not entered yet (docs/design.md §8).
//!
//! Their answers are dropped: what was read stays in the block cache, where the statement's own lookup finds it, or joins
//! what is still being read. So what a statement is checked against is the same. Nothing is looked up ahead until a lookup
//! has had to wait, nor when many in a row have found everything in memory.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use millrace_common::DeltaChunk;
use millrace_storage::Lookup;
use millrace_storage::cache::Priority;

use super::Sequencer;
use crate::error::ExecError;

/// Lookups ahead in a row that read nothing, after which there are none.
const READ_NOTHING: u64 = 64;
/// One that takes longer is given up, so that it holds no version.
const GIVEN_UP: Duration = Duration::from_secs(2);

/// See the module.
#[derive(Debug, Default)]
pub(super) struct LookupsAhead {
    /// So many more, if all of them find everything in memory.
    left: AtomicU64,
    /// Lookups of statements that had to wait for reads.
    waited: AtomicU64,
}

impl LookupsAhead {
    /// A statement's lookup waits for reads.
    pub fn note_wait(&self) {
        self.waited.fetch_add(1, Ordering::Relaxed);
        self.left.store(READ_NOTHING, Ordering::Relaxed);
    }

    /// A lookup ahead was made.
    fn note_made(&self, reads: bool) {
        match reads {
            true => self.left.store(READ_NOTHING, Ordering::Relaxed),
            // Who looks ahead of a table is one task; what a statement stores meanwhile may be lost, and it will wait again.
            false => {
                let left = self.left.load(Ordering::Relaxed);
                self.left.store(left.saturating_sub(1), Ordering::Relaxed);
            }
        }
    }
}

impl Sequencer {
    /// Whether it is worth while to look up keys ahead of their rows.
    pub fn looks_up_ahead(&self) -> bool {
        self.primary_key && self.lookups_ahead.left.load(Ordering::Relaxed) > 0
    }

    /// Looks up what is at the keys of rows that have not entered: the read that this takes, for which nobody waits.
    /// `None`: everything is in memory. Fails if the rows do not have the table's columns.
    pub fn look_up_ahead(
        &self,
        rows: DeltaChunk,
    ) -> Result<Option<BoxFuture<'static, ()>>, ExecError> {
        let keys = self.keyed(rows)?.distinct()?;
        let lookup = {
            let state = self.state.lock();
            if state.stopped {
                return Ok(None);
            }
            state.writer.multi_get(keys).of_class(Priority::Prefetch)
        };
        self.lookups_ahead.note_made(lookup.is_pending());
        let Lookup::Pending(mut reading) = lookup else { return Ok(None) };
        let read = async move {
            // Part by part, so that never all of it is held.
            while reading.next().await.is_ok_and(|part| !part.is_last) {}
        };
        // What fails is met again by who waits for it.
        Ok(Some(tokio::time::timeout(GIVEN_UP, read).map(|_| ()).boxed()))
    }

    /// Lookups of statements that had to wait for reads.
    #[cfg(test)]
    pub fn lookups_that_waited(&self) -> u64 {
        self.lookups_ahead.waited.load(Ordering::Relaxed)
    }
}
