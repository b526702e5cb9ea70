//! The memory that all queries share (docs/design.md §6).
//!
//! Whoever can go to disk has an even share of what is not taken by those who cannot. One of these is the
//! merge of what a sort has written, which takes as much as it gets: with one pot for all, the first merge
//! starves the next, and queries fail that need no more than a few batches each. So merges share a half. However many
//! there are, each may have what two batches take, for the first of them even where nothing is free: sorts that hold
//! it all go to disk when they ask for more.

use std::fmt;
use std::sync::Arc;

use datafusion::error::{DataFusionError, Result};
use datafusion::execution::memory_pool::{
    MemoryConsumer, MemoryLimit, MemoryPool, MemoryReservation,
};
use millrace_functions::error::QUERY_MEMORY;
use parking_lot::Mutex;

/// How DataFusion calls the consumer that merges what a sort has written.
const MERGE: &str = "ExternalSorterMerge";

/// What a sort keeps for its merge from its first batch on: little, since a query may have a hundred of them.
pub fn first_of_merge(bytes: usize) -> usize {
    (bytes / 128).max(64 << 10)
}

/// What a merge may have among however many: enough for two batches of what has been written.
fn least_of_merge(bytes: usize) -> usize {
    (bytes / 32).max(first_of_merge(bytes))
}

/// See the module.
#[derive(Debug)]
pub struct SharedPool {
    bytes: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Consumers that can go to disk.
    spillers: usize,
    /// Of sorts.
    merges: usize,
    /// Bytes of those that can go to disk.
    spillable: usize,
    /// Bytes of all others.
    pinned: usize,
    /// Of these, bytes of merges.
    merging: usize,
}

fn is_merge(consumer: &MemoryConsumer) -> bool {
    consumer.name().starts_with(MERGE)
}

impl State {
    /// What a consumer that holds `held` may have more.
    fn allowed(&self, consumer: &MemoryConsumer, held: usize, bytes: usize) -> usize {
        let free = bytes.saturating_sub(self.pinned + self.spillable);
        match consumer {
            c if c.can_spill() => {
                let share = bytes.saturating_sub(self.pinned) / self.spillers.max(1);
                share.saturating_sub(held)
            }
            c if is_merge(c) => {
                let least = least_of_merge(bytes);
                let share = (bytes / 2 / self.merges.max(1)).max(least).saturating_sub(held);
                let promised = (bytes / 8).max(least).saturating_sub(self.merging);
                share.min(free).max(least.saturating_sub(held).min(promised))
            }
            _ => free,
        }
    }

    fn count(&mut self, consumer: &MemoryConsumer, add: bool) {
        let count = match consumer {
            c if c.can_spill() => &mut self.spillers,
            c if is_merge(c) => &mut self.merges,
            _ => return,
        };
        *count = if add { *count + 1 } else { count.saturating_sub(1) };
    }

    fn add(&mut self, consumer: &MemoryConsumer, bytes: usize) {
        match consumer {
            c if c.can_spill() => self.spillable += bytes,
            c => {
                self.pinned += bytes;
                self.merging += if is_merge(c) { bytes } else { 0 };
            }
        }
    }

    fn remove(&mut self, consumer: &MemoryConsumer, bytes: usize) {
        match consumer {
            c if c.can_spill() => self.spillable = self.spillable.saturating_sub(bytes),
            c => {
                self.pinned = self.pinned.saturating_sub(bytes);
                let merging = if is_merge(c) { bytes } else { 0 };
                self.merging = self.merging.saturating_sub(merging);
            }
        }
    }
}

impl SharedPool {
    /// `bytes`: of all queries together.
    pub fn new(bytes: usize) -> Arc<SharedPool> {
        Arc::new(SharedPool { bytes, state: Mutex::default() })
    }
}

/// `64 MB`.
fn size(bytes: usize) -> String {
    match bytes >> 20 {
        0 => format!("{bytes} bytes"),
        megabytes => format!("{megabytes} MB"),
    }
}

impl fmt::Display for SharedPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the memory for queries ({} bytes)", self.bytes)
    }
}

impl MemoryPool for SharedPool {
    fn name(&self) -> &str {
        "shared"
    }

    fn register(&self, consumer: &MemoryConsumer) {
        self.state.lock().count(consumer, true);
    }

    fn unregister(&self, consumer: &MemoryConsumer) {
        self.state.lock().count(consumer, false);
    }

    fn grow(&self, reservation: &MemoryReservation, additional: usize) {
        self.state.lock().add(reservation.consumer(), additional);
    }

    fn shrink(&self, reservation: &MemoryReservation, shrink: usize) {
        self.state.lock().remove(reservation.consumer(), shrink);
    }

    fn try_grow(&self, reservation: &MemoryReservation, additional: usize) -> Result<()> {
        let mut state = self.state.lock();
        let consumer = reservation.consumer();
        let allowed = state.allowed(consumer, reservation.size(), self.bytes);
        if additional > allowed {
            return Err(DataFusionError::ResourcesExhausted(format!(
                "{QUERY_MEMORY}{}: {} has {} bytes and asks for {additional} more, of which it may have {allowed}",
                size(self.bytes),
                consumer.name(),
                reservation.size(),
            )));
        }
        state.add(consumer, additional);
        Ok(())
    }

    fn reserved(&self) -> usize {
        let state = self.state.lock();
        state.spillable + state.pinned
    }

    fn memory_limit(&self) -> MemoryLimit {
        MemoryLimit::Finite(self.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn consumer(name: &str, pool: &Arc<dyn MemoryPool>, can_spill: bool) -> MemoryReservation {
        MemoryConsumer::new(name).with_can_spill(can_spill).register(pool)
    }

    #[test]
    fn a_merge_leaves_room_for_the_next() {
        const KB: usize = 1 << 10;
        let pool: Arc<dyn MemoryPool> = SharedPool::new(1200 * KB);
        let sorts = ["ExternalSorter[0]", "ExternalSorter[1]"].map(|n| consumer(n, &pool, true));
        let merges =
            ["ExternalSorterMerge[0]", "ExternalSorterMerge[1]"].map(|n| consumer(n, &pool, false));
        merges.iter().for_each(|merge| merge.try_grow(100 * KB).unwrap());
        for sort in &sorts {
            sort.try_grow(500 * KB).unwrap();
            sort.try_grow(1).unwrap_err();
        }
        merges[0].try_grow(1).unwrap_err();
        sorts[0].free();
        merges[0].try_grow(201 * KB).unwrap_err();
        merges[0].try_grow(200 * KB).unwrap();
        merges[1].try_grow(200 * KB).unwrap();
        assert_eq!(pool.reserved(), 1100 * KB);
    }

    #[test]
    fn many_merges_have_their_first_bytes_and_room_for_two_batches() {
        let bytes = 64 << 20;
        let pool: Arc<dyn MemoryPool> = SharedPool::new(bytes);
        let sort = consumer("ExternalSorter[0]", &pool, true);
        let name = |i| format!("ExternalSorterMerge[{i}]");
        let merges: Vec<_> = (0..64).map(|i| consumer(&name(i), &pool, false)).collect();
        merges.iter().for_each(|merge| merge.try_grow(first_of_merge(bytes)).unwrap());
        sort.try_grow(bytes / 2).unwrap();
        merges[0].try_grow(1).unwrap_err();
        sort.free();
        merges[0].try_grow(least_of_merge(bytes) - first_of_merge(bytes)).unwrap();
        merges[0].try_grow(1).unwrap_err();
    }

    #[test]
    fn a_sort_that_holds_everything_does_not_keep_the_next_from_beginning() {
        let bytes = 64 << 20;
        let pool: Arc<dyn MemoryPool> = SharedPool::new(bytes);
        let first = consumer("ExternalSorter[0]", &pool, true);
        first.try_grow(bytes).unwrap();
        let merge = consumer("ExternalSorterMerge[0]", &pool, false);
        merge.try_grow(first_of_merge(bytes)).unwrap();
        merge.try_grow(least_of_merge(bytes)).unwrap_err();
        let next = consumer("ExternalSorter[1]", &pool, true);
        next.try_grow(bytes / 4).unwrap();
        first.try_grow(1).unwrap_err();
        drop(merge);
        assert_eq!(pool.reserved(), bytes + bytes / 4);
    }

    #[test]
    fn the_client_is_told_how_much_there_is() {
        let pool: Arc<dyn MemoryPool> = SharedPool::new(64 << 20);
        let table = consumer("HashJoinInput", &pool, false);
        let e = table.try_grow(65 << 20).unwrap_err();
        let e = millrace_functions::error::sql_error_from_datafusion(e.context("while joining"));
        assert_eq!(e.state, millrace_common::SqlState::OUT_OF_MEMORY);
        assert_eq!(e.message, "the query needs more memory than queries may have (64 MB)");
        let detail =
            "HashJoinInput has 0 bytes and asks for 68157440 more, of which it may have 67108864.";
        assert_eq!(e.detail.as_deref(), Some(detail));
    }

    #[test]
    fn others_have_what_is_free() {
        let pool: Arc<dyn MemoryPool> = SharedPool::new(1000);
        let table = consumer("HashJoinInput", &pool, false);
        table.try_grow(900).unwrap();
        let groups = consumer("GroupedHashAggregateStream[0]", &pool, true);
        groups.try_grow(100).unwrap();
        groups.try_grow(1).unwrap_err();
        drop(table);
        groups.try_grow(900).unwrap();
    }
}
