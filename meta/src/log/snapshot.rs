//! When a snapshot is due, and what it makes superfluous.

use std::time::Duration;

use millrace_common::crash;
use object_store::path::Path;
use tracing::{debug, warn};

use super::store::LogStore;
use crate::error::MetaError;
use crate::state::MetaState;

/// A snapshot is written when its cost is small against what was logged since, and at the latest after
/// so many records that opening would become slow.
#[derive(Clone, Copy, Debug)]
pub struct SnapshotPolicy {
    /// Not before this many records …
    pub min_records: u64,
    /// … that hold at least this share of the last snapshot's bytes (as a divisor), …
    pub size_divisor: u64,
    /// … but always after this many.
    pub max_records: u64,
}

impl Default for SnapshotPolicy {
    fn default() -> SnapshotPolicy {
        SnapshotPolicy { min_records: 256, size_divisor: 2, max_records: 2_048 }
    }
}

impl SnapshotPolicy {
    pub fn is_due(&self, records: u64, bytes: u64, last_snapshot_bytes: u64) -> bool {
        records >= self.max_records
            || (records >= self.min_records
                && bytes >= last_snapshot_bytes / self.size_divisor.max(1))
    }
}

/// Snapshots kept besides the newest, against a damaged one.
const OLDER_SNAPSHOTS: usize = 1;

/// Writes a snapshot, then deletes what it covers and is older than `retention`. Returns its size.
pub async fn take(
    store: &LogStore,
    state: &MetaState,
    retention: Duration,
    now_ms: u64,
) -> Result<u64, MetaError> {
    crash::point("meta-before-snapshot");
    let size = store.put_snapshot(state).await?;
    crash::point("meta-after-snapshot");
    debug!(number = state.number, size, "snapshot written");
    let expired = expired(store, state.number, retention, now_ms).await?;
    let count = expired.len();
    let failed = store.delete(expired).await;
    if failed > 0 {
        warn!(
            count,
            failed, "covered log records could not be deleted; the next snapshot tries again"
        );
    }
    Ok(size)
}

/// Covered records and superseded snapshots older than `retention`. A snapshot stays while it is among
/// the newest; the records after the oldest one that stays, stay too.
async fn expired(
    store: &LogStore,
    number: u64,
    retention: Duration,
    now_ms: u64,
) -> Result<Vec<Path>, MetaError> {
    let (records, mut snapshots) =
        futures::try_join!(store.list_records(), store.list_snapshots())?;
    snapshots.retain(|(n, _)| *n <= number);
    snapshots.sort_unstable_by_key(|(n, _)| std::cmp::Reverse(*n));
    let limit_ms = now_ms.saturating_sub(retention.as_millis() as u64) as i64;
    let Some(base) = snapshots.get(OLDER_SNAPSHOTS).or(snapshots.first()).map(|(n, _)| *n) else {
        return Ok(Vec::new());
    };
    let old_snapshots = snapshots.into_iter().skip(OLDER_SNAPSHOTS + 1);
    let old_records = records.into_iter().filter(|(n, _)| *n <= base);
    Ok(old_snapshots
        .chain(old_records)
        .filter(|(_, meta)| meta.last_modified.timestamp_millis() < limit_ms)
        .map(|(_, meta)| meta.location)
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_large_state_is_not_written_for_small_changes() {
        let policy = SnapshotPolicy::default();
        assert!(!policy.is_due(255, u64::MAX, 0));
        assert!(policy.is_due(256, 10, 0));
        assert!(!policy.is_due(256, 10, 1_000_000));
        assert!(policy.is_due(256, 500_000, 1_000_000));
        assert!(policy.is_due(2_048, 10, 1_000_000));
    }
}
