//! When a snapshot is due, and what it makes superfluous.

use std::time::Duration;

use millrace_common::crash;
use millrace_common::task::spawn_blocking;
use object_store::path::Path;
use tracing::{debug, warn};

use super::store::{DELETE_PARALLEL, LogStore, encode_snapshot};
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
/// Covered records that are deleted together.
const STEP_RECORDS: u64 = 512;
/// Steps after one snapshot: more records than lie between two, so that deletion keeps up.
const STEPS: usize = 8;

/// For how long what a snapshot covers stays.
#[derive(Clone, Copy, Debug)]
pub struct Retained {
    /// Records.
    pub records: Duration,
    /// Superseded snapshots: who has listed one may still be about to read it.
    pub snapshots: Duration,
}

/// What became of a snapshot and of what it covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Taken {
    /// Bytes of the snapshot.
    pub size: u64,
    /// Records before this one are deleted. `None`: that is not known.
    pub oldest_record: Option<u64>,
}

/// Writes a snapshot, then deletes what it covers and is no longer to be kept, in bounded steps. `oldest_record`: as
/// the snapshot before has returned it.
pub async fn take(
    store: &LogStore,
    state: MetaState,
    retained: Retained,
    oldest_record: Option<u64>,
    now_ms: u64,
) -> Result<Taken, MetaError> {
    let number = state.number;
    // Encoding takes long where there is much of it: not on a thread that others wait for.
    let bytes = spawn_blocking("encode a snapshot", move || encode_snapshot(&state))
        .await
        .map_err(|e| MetaError::Store(format!("the snapshot was not encoded: {e}")))?;
    crash::point("meta-before-snapshot");
    let size = store.put_encoded_snapshot(number, bytes).await?;
    crash::point("meta-after-snapshot");
    debug!(number, size, "snapshot written");
    let oldest_record = expire(store, number, retained, oldest_record, now_ms)
        .await
        .inspect_err(|error| {
            warn!(%error, "covered log records were not deleted; the next snapshot tries again");
        })
        .unwrap_or(oldest_record);
    Ok(Taken { size, oldest_record })
}

/// Deletes superseded snapshots and covered records. A snapshot stays while it is among the newest; the records after
/// the oldest one that stays, stay too. Records are numbered in the order of time and are never listed: a day's worth
/// is many.
async fn expire(
    store: &LogStore,
    number: u64,
    retained: Retained,
    oldest_record: Option<u64>,
    now_ms: u64,
) -> Result<Option<u64>, MetaError> {
    let before = |age: Duration| now_ms.saturating_sub(age.as_millis() as u64) as i64;
    let mut snapshots = store.list_snapshots().await?;
    snapshots.retain(|(n, _)| *n <= number);
    snapshots.sort_unstable_by_key(|(n, _)| std::cmp::Reverse(*n));
    let Some(base) = snapshots.get(OLDER_SNAPSHOTS).or(snapshots.first()).map(|(n, _)| *n) else {
        return Ok(oldest_record);
    };
    let limit = before(retained.snapshots);
    let superseded = snapshots.into_iter().skip(OLDER_SNAPSHOTS + 1);
    let superseded = superseded.filter(|(_, m)| m.last_modified.timestamp_millis() < limit);
    let superseded: Vec<Path> = superseded.map(|(_, m)| m.location).collect();
    if !superseded.is_empty() {
        delete(store, superseded).await;
        crash::point("meta-after-superseded");
    }
    let mut oldest = match oldest_record {
        Some(known) => known,
        None => find_oldest(store, base).await?,
    };
    let limit = before(retained.records);
    for _ in 0..STEPS {
        let last = base.min(oldest + STEP_RECORDS - 1);
        // One that is gone already is old enough.
        let young = store.record_time(last).await?.is_some_and(|written| written >= limit);
        if last < oldest || young {
            break;
        }
        if delete(store, (oldest..=last).map(LogStore::record_path).collect()).await > 0 {
            // The next snapshot begins with them.
            break;
        }
        oldest = last + 1;
    }
    Ok(Some(oldest))
}

/// Returns how many could not be deleted.
async fn delete(store: &LogStore, paths: Vec<Path>) -> usize {
    let count = paths.len();
    let failed = store.delete(paths).await.len();
    if failed > 0 {
        warn!(count, failed, "covered objects of the log could not be deleted and stay");
    }
    failed
}

/// The oldest record up to `base`, or one a little older: a crash may have left some behind in the middle of the last
/// deletion. A search by halves: all records from the oldest on are there.
async fn find_oldest(store: &LogStore, base: u64) -> Result<u64, MetaError> {
    let (mut low, mut high) = (1, base.saturating_add(1));
    while low < high {
        let middle = low + (high - low) / 2;
        match store.record_time(middle).await? {
            Some(_) => high = middle,
            None => low = middle + 1,
        }
    }
    Ok(low.saturating_sub(2 * DELETE_PARALLEL as u64).max(1))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use object_store::memory::InMemory;
    use prost::bytes::Bytes;

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

    /// A store with so many records, and snapshots of some of them.
    async fn filled(records: u64, snapshots: &[u64]) -> LogStore {
        let store = LogStore::new(Arc::new(InMemory::new()));
        for n in 1..=records {
            store.create(n, &Bytes::from_static(b"record"), &Default::default()).await;
        }
        for number in snapshots {
            let state = MetaState { number: *number, ..MetaState::default() };
            store.put_snapshot(&state).await.unwrap();
        }
        store
    }

    async fn left(store: &LogStore) -> (Vec<u64>, Vec<u64>) {
        let numbers = |mut listed: Vec<(u64, _)>| {
            listed.sort_unstable_by_key(|(n, _)| *n);
            listed.into_iter().map(|(n, _): (u64, object_store::ObjectMeta)| n).collect()
        };
        let records = numbers(store.list_records_after(0).await.unwrap());
        (records, numbers(store.list_snapshots().await.unwrap()))
    }

    /// The store of these tests writes with the machine's clock.
    fn in_an_hour() -> u64 {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
        now.as_millis() as u64 + 3_600_000
    }

    const MINUTE: Duration = Duration::from_secs(60);
    const DAY: Duration = Duration::from_secs(86_400);

    #[tokio::test]
    async fn covered_records_go_in_bounded_steps_and_the_newest_snapshots_stay() {
        let most = STEP_RECORDS * STEPS as u64;
        let store = filled(most + 600, &[5, 9, most + 300, most + 500]).await;
        let retained = Retained { records: MINUTE, snapshots: MINUTE };
        let now = in_an_hour();
        let oldest = expire(&store, most + 500, retained, None, now).await.unwrap();
        let (records, snapshots) = left(&store).await;
        assert_eq!(snapshots, [most + 300, most + 500]);
        assert_eq!(records, (most + 1..=most + 600).collect::<Vec<_>>());
        assert_eq!(oldest, Some(most + 1));
        // The next one goes on where this one has stopped, and not beyond what both snapshots cover.
        for known in [oldest, None, Some(most + 301)] {
            let oldest = expire(&store, most + 500, retained, known, now).await.unwrap();
            assert!(oldest.is_some_and(|n| n <= most + 301), "{oldest:?}");
            assert_eq!(left(&store).await.0, (most + 301..=most + 600).collect::<Vec<_>>());
        }
    }

    #[tokio::test]
    async fn records_and_snapshots_stay_for_as_long_as_they_are_to_be_kept() {
        let store = filled(40, &[10, 20, 30]).await;
        let (all, now) = (left(&store).await, in_an_hour());
        let young = Retained { records: DAY, snapshots: DAY };
        assert_eq!(expire(&store, 30, young, None, now).await.unwrap(), Some(1));
        assert_eq!(left(&store).await, all);
        let snapshots_only = Retained { records: DAY, snapshots: MINUTE };
        expire(&store, 30, snapshots_only, Some(1), now).await.unwrap();
        assert_eq!(left(&store).await, (all.0, vec![20, 30]));
    }

    /// A crash in the middle of a deletion leaves holes.
    #[tokio::test]
    async fn what_a_crash_has_left_of_a_deletion_is_deleted_later() {
        let store = filled(2_000, &[1_990, 2_000]).await;
        let gone = (1..=400).chain([403, 405]).map(LogStore::record_path).collect();
        assert!(store.delete(gone).await.is_empty());
        let retained = Retained { records: MINUTE, snapshots: MINUTE };
        expire(&store, 2_000, retained, None, in_an_hour()).await.unwrap();
        assert_eq!(left(&store).await.0, (1_991..=2_000).collect::<Vec<_>>());
    }
}
