//! Which keys of a table were written lately: what a lookup has found before its statement's turn is still so for all
//! others.
//!
//! Writes are numbered. A lookup begins at the number of the last write before it; a key that has no later write is as
//! the lookup saw it. Keys are kept by their hash, while there are lookups that they may be newer than, and up to a
//! bound: of what is no longer known, every key counts as written.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use arrow::array::{Array, BinaryArray};
use millrace_common::collections::HashMap;
use millrace_common::hash::hash_bytes;
use parking_lot::Mutex;

/// Keys kept for lookups under way, of one table: some 3 MB.
const MAX_KEYS: usize = 1 << 16;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct RecentWrites {
    /// Of the last write.
    number: u64,
    /// Which keys were written up to this write is not known.
    forgotten: u64,
    /// Of each key, by its hash, its last write.
    last: HashMap<u64, u64>,
    /// The same in the order of writes, with those that were followed by another of their key.
    order: VecDeque<(u64, u64)>,
    /// How many lookups have begun at each write and have not ended.
    lookups: BTreeMap<u64, usize>,
}

impl RecentWrites {
    /// Keys are written.
    pub fn note(&mut self, keys: &BinaryArray) {
        if self.lookups.is_empty() || keys.len() > MAX_KEYS {
            return self.note_all();
        }
        self.number += 1;
        for key in keys.iter().flatten() {
            let hash = hash_bytes(key);
            self.last.insert(hash, self.number);
            self.order.push_back((self.number, hash));
        }
        while self.order.len() > MAX_KEYS {
            self.forgotten = self.forgotten.max(self.drop_oldest());
        }
    }

    /// Any key may have been written.
    pub fn note_all(&mut self) {
        self.number += 1;
        self.forgotten = self.number;
        (self.last, self.order) = Default::default();
    }

    fn drop_oldest(&mut self) -> u64 {
        let Some((number, hash)) = self.order.pop_front() else { return 0 };
        if self.last.get(&hash) == Some(&number) {
            self.last.remove(&hash);
        }
        number
    }

    /// Positions of the keys that were written after this write, ascending.
    fn written_since(&self, number: u64, keys: &BinaryArray) -> Vec<u32> {
        let all = 0..keys.len() as u32;
        if number == self.number {
            return Vec::new();
        }
        if number < self.forgotten {
            return all.collect();
        }
        let later = |key: &u32| {
            let last = self.last.get(&hash_bytes(keys.value(*key as usize)));
            last.is_some_and(|last| *last > number)
        };
        all.filter(later).collect()
    }

    fn end(&mut self, number: u64) {
        if let Some(lookups) = self.lookups.get_mut(&number) {
            *lookups -= 1;
            if *lookups == 0 {
                self.lookups.remove(&number);
            }
        }
        let Some(oldest) = self.lookups.keys().next().copied() else {
            self.forgotten = self.number;
            (self.last, self.order) = Default::default();
            return;
        };
        while self.order.front().is_some_and(|(number, _)| *number <= oldest) {
            self.drop_oldest();
        }
    }
}

/// A lookup's place among the writes of its table. What is written later is kept while this lives.
#[derive(Debug)]
pub(in crate::dml) struct LookupPlace {
    number: u64,
    writes: Arc<Mutex<RecentWrites>>,
}

impl LookupPlace {
    /// Of a lookup that begins now: nothing may be written meanwhile.
    pub(super) fn begin(writes: &Arc<Mutex<RecentWrites>>) -> LookupPlace {
        let mut recent = writes.lock();
        let number = recent.number;
        *recent.lookups.entry(number).or_default() += 1;
        LookupPlace { number, writes: Arc::clone(writes) }
    }

    /// Whether nothing was written since.
    pub fn is_newest(&self) -> bool {
        self.writes.lock().number == self.number
    }

    /// Positions of the keys that were written since, ascending.
    pub fn written_since(&self, keys: &BinaryArray) -> Vec<u32> {
        self.writes.lock().written_since(self.number, keys)
    }
}

impl Drop for LookupPlace {
    fn drop(&mut self) {
        self.writes.lock().end(self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(of: impl IntoIterator<Item = u32>) -> BinaryArray {
        BinaryArray::from_iter_values(of.into_iter().map(u32::to_be_bytes))
    }

    #[test]
    fn a_lookup_is_told_the_keys_written_after_it_and_no_others() {
        let writes = Arc::new(Mutex::new(RecentWrites::default()));
        writes.lock().note(&keys([1, 2]));
        let first = LookupPlace::begin(&writes);
        writes.lock().note(&keys([2, 3]));
        let second = LookupPlace::begin(&writes);
        writes.lock().note(&keys([3, 4]));
        let asked = keys(0..6);
        assert_eq!(first.written_since(&asked), [2, 3, 4]);
        assert_eq!(second.written_since(&asked), [3, 4]);
        drop(first);
        assert_eq!(second.written_since(&asked), [3, 4]);
        assert_eq!(writes.lock().order.len(), 2, "what no lookup asks for is gone");
        writes.lock().note_all();
        assert_eq!(second.written_since(&asked), [0, 1, 2, 3, 4, 5]);
        let third = LookupPlace::begin(&writes);
        assert!(third.written_since(&asked).is_empty());
        drop((second, third));
        let recent = writes.lock();
        assert!(recent.last.is_empty() && recent.order.is_empty() && recent.lookups.is_empty());
    }

    #[test]
    fn what_is_not_kept_counts_as_written() {
        let writes = Arc::new(Mutex::new(RecentWrites::default()));
        let old = LookupPlace::begin(&writes);
        let half = MAX_KEYS as u32 / 2;
        writes.lock().note(&keys(0..half));
        let new = LookupPlace::begin(&writes);
        writes.lock().note(&keys(half..2 * half));
        assert_eq!(old.written_since(&keys([5, u32::MAX])), [0]);
        writes.lock().note(&keys([7]));
        assert_eq!(old.written_since(&keys([5, u32::MAX])), [0, 1]);
        assert_eq!(new.written_since(&keys([5, half, 7, u32::MAX])), [1, 2]);
        assert!(writes.lock().order.len() <= MAX_KEYS);
        writes.lock().note(&keys(0..2 * half + 1));
        assert_eq!(new.written_since(&keys([u32::MAX])), [0], "one that is too large is not kept");
    }
}
