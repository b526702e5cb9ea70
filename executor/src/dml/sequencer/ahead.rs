//! Lookups for rows that the table's connector has read and that have not entered yet (docs/design.md §8).
//!
//! Their answers are dropped: what was read stays in the block cache, where the statement's own lookup finds it, or joins
//! what is still being read. So what a statement is checked against is the same. Nothing is looked up ahead until a lookup
//! has asked the store, nor when many in a row have asked it nothing.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use millrace_common::DeltaChunk;
use millrace_storage::Lookup;
use millrace_storage::cache::Priority;

use super::Sequencer;
use crate::error::ExecError;

/// Lookups ahead in a row that asked the store nothing, after which there are none.
const WARM: u64 = 64;
/// One that takes longer is given up, so that it holds no version.
const GIVEN_UP: Duration = Duration::from_secs(2);

/// See the module.
#[derive(Debug, Default)]
pub(super) struct LookupsAhead {
    /// So many more, if all of them find everything here.
    left: AtomicU64,
    /// Lookups of statements that asked the store.
    cold: AtomicU64,
}

impl LookupsAhead {
    /// A statement's lookup has made so many requests to the store.
    pub fn note_lookup(&self, requests: u64) {
        if requests > 0 {
            self.cold.fetch_add(1, Ordering::Relaxed);
            self.left.store(WARM, Ordering::Relaxed);
        }
    }

    /// A lookup ahead has made so many. If a statement's is noted meanwhile it may be lost; the next one is not.
    fn note_ahead(&self, requests: u64) {
        let left = match requests {
            0 => self.left.load(Ordering::Relaxed).saturating_sub(1),
            _ => WARM,
        };
        self.left.store(left, Ordering::Relaxed);
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
        let requests: Arc<AtomicU64> = Arc::default();
        let lookup = {
            let state = self.state.lock();
            if state.stopped {
                return Ok(None);
            }
            state.writer.multi_get(keys)
        };
        let lookup = lookup.of_class(Priority::Prefetch).counted(&requests);
        let Lookup::Pending(mut reading) = lookup else {
            self.lookups_ahead.note_ahead(0);
            return Ok(None);
        };
        let read = async move {
            // Part by part, so that never all of it is held. What fails is met again by who waits for it.
            while reading.next().await.is_ok_and(|part| !part.is_last) {}
        };
        let ahead = Arc::clone(&self.lookups_ahead);
        let read = tokio::time::timeout(GIVEN_UP, read);
        Ok(Some(read.map(move |_| ahead.note_ahead(requests.load(Ordering::Relaxed))).boxed()))
    }

    /// Lookups of statements that asked the store.
    #[cfg(test)]
    pub fn cold_lookups(&self) -> u64 {
        self.lookups_ahead.cold.load(Ordering::Relaxed)
    }
}
