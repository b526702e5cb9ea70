//! What holds of a cache after every call.

use millrace_common::collections::HashSet;

use super::{DIRTY, DUE, FETCHING, KeyTable, LIVE, PREFETCHING, QUEUED, RESIDENT, Slot};

impl KeyTable {
    /// The first broken invariant, in words: every slot is live or free; bytes are the sum of the live entries'; an
    /// entry that is pinned (dirty, being fetched) is live, so it was not evicted; the list of dirty entries names each
    /// once; and every live entry can be found by its key and is in the queue, not behind its stamp.
    pub fn check_invariants(&self) -> Result<(), String> {
        let (mut bytes, mut due_bytes) = (0, 0);
        let mut dirty = 0;
        for (s, flags) in self.flags.iter().enumerate() {
            if flags & LIVE == 0 {
                if flags & (RESIDENT | FETCHING | DIRTY | PREFETCHING | DUE) != 0 {
                    return Err(format!("slot {s} is free, with flags {flags:#b}"));
                }
                continue;
            }
            let slot = s as Slot;
            bytes += self.bytes_of(slot);
            due_bytes += if flags & DUE != 0 { self.bytes_of(slot) } else { 0 };
            dirty += usize::from(flags & DIRTY != 0);
            if self.table.find(self.hashes[s], |&o| o == slot).is_none() {
                return Err(format!("slot {s} is not found by its key"));
            }
        }
        if bytes != self.bytes {
            return Err(format!(
                "the entries have {bytes} bytes, {} are accounted for",
                self.bytes
            ));
        }
        if due_bytes != self.due_bytes {
            let accounted = self.due_bytes;
            return Err(format!("{due_bytes} bytes are due, {accounted} are accounted for"));
        }
        self.check_free()?;
        let listed: HashSet<Slot> = self.dirty.iter().copied().collect();
        let marked = listed.iter().filter(|&&s| self.is_dirty(s)).count();
        if [self.dirty.len(), listed.len(), marked] != [dirty; 3] {
            return Err(format!("{dirty} entries are dirty, {} are listed", self.dirty.len()));
        }
        self.check_queue()
    }

    fn check_free(&self) -> Result<(), String> {
        let free: HashSet<Slot> = self.free.iter().copied().collect();
        if let Some(slot) = free.iter().find(|&&s| self.flags[s as usize] & LIVE != 0) {
            return Err(format!("slot {slot} is free and live"));
        }
        let live = self.table.len();
        if free.len() != self.free.len() || free.len() + live != self.keys.len() {
            let slots = self.keys.len();
            return Err(format!("{live} live and {} free of {slots} slots", self.free.len()));
        }
        Ok(())
    }

    fn check_queue(&self) -> Result<(), String> {
        self.queue.check_invariants()?;
        let queued: HashSet<(u64, Slot)> = self.queue.iter().copied().collect();
        for slot in self.slots() {
            let s = slot as usize;
            let there = self.flags[s] & QUEUED != 0 && queued.contains(&(self.places[s], slot));
            if !there || self.places[s] > self.stamps[s] {
                return Err(format!("slot {slot} would not be considered for eviction in time"));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::Eviction;

    fn table() -> KeyTable {
        let mut table = KeyTable::new(Eviction::Timestamp, false);
        for (hash, key) in [(1, "a"), (2, "b"), (3, "a key that does not fit inline")] {
            let slot = table.find_or_insert(hash, 0, key.as_bytes(), hash * 100);
            table.set_resident(slot);
            table.set_size(slot, 50);
        }
        table.mark_dirty(1);
        let fourth = table.find_or_insert(4, 0, b"d", 1);
        table.set_fetching(fourth);
        table
    }

    #[test]
    fn entries_come_and_go() {
        let mut table = table();
        table.check_invariants().unwrap();
        assert_eq!(
            table.evict(0, &mut (), |_, _| 0, |_, _| true),
            2,
            "the dirty and the fetched one stay"
        );
        table.check_invariants().unwrap();
        table.take_dirty();
        table.find_or_insert(5, 0, b"e", 7);
        table.check_invariants().unwrap();
    }

    #[test]
    fn a_broken_cache_is_noticed() {
        let breaks: [(&str, fn(&mut KeyTable)); 6] = [
            ("accounted", |t| t.bytes -= 1),
            ("is free, with flags", |t| {
                t.remove(1);
                t.flags[1] |= DIRTY;
            }),
            ("listed", |t| t.dirty.clear()),
            ("free and live", |t| t.free.push(0)),
            ("not found", |t| t.hashes[0] = u64::MAX),
            ("considered", |t| t.places[2] = 1_000),
        ];
        for (says, damage) in breaks {
            let mut table = table();
            damage(&mut table);
            let broken = table.check_invariants().unwrap_err();
            assert!(broken.contains(says), "{broken}");
        }
    }
}
