//! Tables that say which state is in memory ([`crate::lookahead::presence`]): all together take a bounded part of the
//! limit, however many operators want one. Unlike caches they cannot shrink, so what does not fit is refused.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::{MemoryClass, MemoryGovernor, Reservation};

/// All tables together may take this part of the limit,
const TABLES_PART: usize = 32;
/// and one this part of what is left of that: they become smaller before one is refused.
const TABLE_PART: usize = 8;

/// Of one table, until it is dropped.
#[derive(Debug)]
pub struct TableRoom {
    account: Reservation,
}

impl TableRoom {
    pub fn bytes(&self) -> usize {
        self.account.bytes()
    }
}

impl Drop for TableRoom {
    fn drop(&mut self) {
        self.account.governor.tables.fetch_sub(self.account.bytes, Ordering::Relaxed);
    }
}

impl MemoryGovernor {
    /// Room for a table of `most` bytes, or of half as many, a quarter and so on, but not of fewer than `least`. `None`:
    /// memory is tight, or others have too much.
    pub fn table_room(self: &Arc<Self>, most: usize, least: usize) -> Option<TableRoom> {
        if self.is_tight() {
            return None;
        }
        let fitting = |used: usize| {
            let left = (self.limit / TABLES_PART).saturating_sub(used);
            let mut sizes = std::iter::successors(Some(most), |bytes| Some(bytes / 2))
                .take_while(|bytes| *bytes >= least.max(1));
            sizes.find(|bytes| *bytes <= left / TABLE_PART)
        };
        let taken = self.tables.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| {
            fitting(used).map(|bytes| used + bytes)
        });
        let bytes = fitting(taken.ok()?)?;
        let mut account = self.account(MemoryClass::Cache);
        account.set(bytes);
        Some(TableRoom { account })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KB: usize = 1 << 10;

    #[test]
    fn tables_become_smaller_and_then_are_refused() {
        let governor = MemoryGovernor::new(16 << 20);
        let more = || governor.table_room(256 * KB, 4 * KB);
        let tables: Vec<TableRoom> = std::iter::from_fn(more).collect();
        let sizes: Vec<usize> = tables.iter().map(|table| table.bytes() / KB).collect();
        assert_eq!((sizes[0], sizes[sizes.len() - 1]), (64, 4));
        assert!(sizes.is_sorted_by(|a, b| a >= b) && sizes.len() > 20, "{sizes:?}");
        assert!(governor.used() <= 512 * KB && governor.used() > 450 * KB);
        drop(tables);
        assert_eq!(governor.used(), 0);
        assert_eq!(more().map(|table| table.bytes()), Some(64 * KB), "there is room again");
    }

    #[test]
    fn there_is_no_room_for_a_table_while_memory_is_tight() {
        let governor = MemoryGovernor::new(1 << 30);
        let mut pinned = governor.account(MemoryClass::Statement);
        pinned.set(1 << 30);
        assert!(governor.table_room(256 * KB, 4 * KB).is_none());
        drop(pinned);
        assert!(governor.table_room(256 * KB, 4 * KB).is_some());
    }
}
