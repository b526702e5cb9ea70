//! What waits for a follower of uncommitted rows ([`super::uncommitted`]): so many rows and bytes at most. Its owners may
//! have let go of the rows meanwhile, so it counts as memory.

use std::sync::Arc;

use millrace_common::DeltaChunk;
use parking_lot::Mutex;

use crate::memory::{MemoryClass, MemoryGovernor, Reservation};
use crate::state::arena::batch_bytes;

/// Rows at most; more go alone.
pub const MAX_ROWS: usize = 256 * 1024;
/// Bytes at most.
pub const MAX_BYTES: usize = 16 << 20;

/// See the module.
#[derive(Debug, Default)]
pub struct Backlog(Mutex<Waiting>);

#[derive(Debug, Default)]
struct Waiting {
    rows: usize,
    bytes: usize,
    memory: Option<(Arc<MemoryGovernor>, Reservation)>,
}

impl Waiting {
    fn set(&mut self, rows: usize, bytes: usize) {
        (self.rows, self.bytes) = (rows, bytes);
        if let Some((_, account)) = &mut self.memory {
            account.set(bytes);
        }
    }
}

impl Backlog {
    /// Counts as memory from now on, and takes nothing while that is tight.
    pub fn account(&self, governor: &Arc<MemoryGovernor>) {
        let mut waiting = self.0.lock();
        waiting.memory = Some((Arc::clone(governor), governor.account(MemoryClass::Channel)));
        let (rows, bytes) = (waiting.rows, waiting.bytes);
        waiting.set(rows, bytes);
    }

    /// Whether there is room for these, which wait then.
    pub fn add(&self, chunks: &[DeltaChunk]) -> bool {
        let (rows, bytes) = size(chunks);
        let mut waiting = self.0.lock();
        let is_room = waiting.rows == 0 || waiting.rows + rows <= MAX_ROWS;
        let is_tight = waiting.memory.as_ref().is_some_and(|(governor, _)| governor.is_tight());
        if !is_room || is_tight || waiting.bytes + bytes > MAX_BYTES {
            return false;
        }
        let (rows, bytes) = (waiting.rows + rows, waiting.bytes + bytes);
        waiting.set(rows, bytes);
        true
    }

    /// These do not wait any more.
    pub fn remove(&self, chunks: &[DeltaChunk]) {
        let (rows, bytes) = size(chunks);
        let mut waiting = self.0.lock();
        let (rows, bytes) =
            (waiting.rows.saturating_sub(rows), waiting.bytes.saturating_sub(bytes));
        waiting.set(rows, bytes);
    }
}

/// Rows and bytes of chunks.
fn size(chunks: &[DeltaChunk]) -> (usize, usize) {
    let rows = chunks.iter().map(DeltaChunk::num_rows).sum();
    (rows, chunks.iter().map(|chunk| batch_bytes(&chunk.batch)).sum())
}

#[cfg(test)]
mod tests {
    use arrow::array::{ArrayRef, RecordBatch, StringArray};

    use super::*;

    fn text(bytes: usize) -> Vec<DeltaChunk> {
        let column: ArrayRef = Arc::new(StringArray::from(vec!["x".repeat(bytes)]));
        vec![DeltaChunk::inserts(RecordBatch::try_from_iter([("a", column)]).unwrap())]
    }

    #[test]
    fn what_waits_is_bounded_in_bytes_and_counts_as_memory() {
        let governor = MemoryGovernor::new(1 << 30);
        let backlog = Backlog::default();
        assert!(backlog.add(&text(1_000)));
        backlog.account(&governor);
        assert!((1_000..2_000).contains(&governor.used_by(MemoryClass::Channel)));
        assert!(!backlog.add(&text(MAX_BYTES)), "whatever waits");
        assert!(backlog.add(&text(MAX_BYTES / 2)) && !backlog.add(&text(MAX_BYTES / 2)));
        for bytes in [1_000, MAX_BYTES / 2] {
            backlog.remove(&text(bytes));
        }
        assert_eq!(governor.used(), 0);
        assert!(backlog.add(&text(MAX_BYTES / 2)), "there is room again");
        drop(backlog);
        assert_eq!(governor.used(), 0);
    }

    #[test]
    fn nothing_waits_while_memory_is_tight() {
        let governor = MemoryGovernor::new(1 << 20);
        let backlog = Backlog::default();
        backlog.account(&governor);
        let mut pinned = governor.account(MemoryClass::Statement);
        pinned.set(1 << 20);
        assert!(!backlog.add(&text(1)));
        drop(pinned);
        assert!(backlog.add(&text(1)));
    }
}
