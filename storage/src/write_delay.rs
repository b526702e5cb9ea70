//! Commits of a job are delayed while compaction is behind it: while a read of one key may have to ask more runs of a
//! state table than is bearable (docs/design.md §9).
//!
//! The number of all runs does not matter, and other jobs are not delayed. A delay is short, and ends early when runs
//! have been merged: a job is slowed, and never stopped.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use millrace_common::TableId;
use millrace_common::access::AccessClass;

use crate::compaction::overlap;
use crate::job_store::JobStore;
use crate::version::{TableVersion, Version};

/// A commit waits so long for each run above the limit, and at most so long.
const DELAY_PER_RUN: Duration = Duration::from_millis(20);
const LONGEST_DELAY: Duration = Duration::from_secs(1);

/// A state table of which more runs may hold one key than the limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Overlap {
    pub table: TableId,
    pub name: String,
    /// Runs that may hold one key.
    pub runs: usize,
}

/// What all jobs have waited for.
#[derive(Debug, Default)]
pub(crate) struct DelayCounters {
    commits: AtomicU64,
    micros: AtomicU64,
}

/// [`DelayCounters`], read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DelayStats {
    /// Commits that were delayed.
    pub commits: u64,
    /// How long, all together.
    pub waited: Duration,
}

impl DelayCounters {
    pub fn read(&self) -> DelayStats {
        DelayStats {
            commits: self.commits.load(Ordering::Relaxed),
            waited: Duration::from_micros(self.micros.load(Ordering::Relaxed)),
        }
    }
}

/// The table with most runs that may hold one key. What arrives in order has runs that hardly overlap, although their
/// first and last keys do: it does not count.
pub(crate) fn deepest(version: &Version) -> Option<Overlap> {
    let counted = version.tables().filter(|t| t.desc.class != AccessClass::Append);
    let (runs, table) = counted.map(|t| (depth(t), t)).max_by_key(|(runs, _)| *runs)?;
    Some(Overlap { table: table.desc.id, name: table.desc.name.clone(), runs })
}

fn depth(table: &TableVersion) -> usize {
    overlap(table.disk.iter().map(|run| run.meta()))
}

/// How long a commit waits while so many runs may hold one key.
fn delay(runs: usize, limit: usize) -> Duration {
    let above = u32::try_from(runs.saturating_sub(limit)).unwrap_or(u32::MAX);
    DELAY_PER_RUN.saturating_mul(above).min(LONGEST_DELAY)
}

/// Waits before a commit of the job, if compaction is behind it.
pub(crate) async fn wait(store: &JobStore) {
    let limit = store.shared.options.overlap_limit;
    let delay = delay(store.overlap(), limit);
    if delay.is_zero() {
        return;
    }
    let began = store.env().now();
    let merged = async {
        loop {
            let changed = store.shared.changed.notified();
            if store.overlap() <= limit {
                return;
            }
            changed.await;
        }
    };
    // Whether it ended by itself makes no difference.
    let _ = tokio::time::timeout(delay, merged).await;
    let counters = &store.shared.delays;
    counters.commits.fetch_add(1, Ordering::Relaxed);
    let waited = store.env().elapsed(began).as_micros();
    counters.micros.fetch_add(u64::try_from(waited).unwrap_or(u64::MAX), Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_commit_is_delayed_by_overlap_and_never_for_long() {
        assert_eq!(delay(64, 64), Duration::ZERO);
        assert_eq!(delay(65, 64), DELAY_PER_RUN);
        assert_eq!(delay(70, 64), DELAY_PER_RUN * 6);
        assert_eq!(delay(usize::MAX, 64), LONGEST_DELAY);
    }
}
