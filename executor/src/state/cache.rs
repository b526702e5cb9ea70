//! The timestamp-aware cache: key → slot, one per state table (or pair of tables with one key) and
//! task, above the store (docs/design.md §7).
//!
//! It owns keys, residency, age and sizes; what a slot holds (accumulators, rows) lies in columns of
//! the operator, indexed by slot. Three policies say which entry goes first:
//!
//! - *Timestamp*: the one whose latest use lies furthest back in time, that is in event time where rows bring
//!   it ([`Stamps`](super::stamps::Stamps)). A late row does not make an entry older, and one that is
//!   needed at a later time may be stamped with it in advance: a stamp never goes back.
//! - *LRU*: the one whose latest use lies furthest back in the order of arrival.
//! - *Clock*: the next around the ring that has not been used since the hand passed it.
//!
//! An entry's place in the [`EvictionQueue`] may be before its stamp: renewing an entry is one store to the
//! stamp, and its place is corrected when it comes to the front, so hits cost nothing.
//!
//! A slot may be evicted when it is resident and not pinned (no parked rows, nothing unwritten).
//! Operators write what is dirty before they ask for victims. "Absent" is an ordinary resident entry
//! with nothing in it. While `complete`, every key that exists is here, so a new key is known to be
//! absent without a read; evicting an entry that holds something ends that.

use hashbrown::HashTable;
use millrace_common::Vnode;

use super::eviction_queue::EvictionQueue;
use super::keys::{ChunkKeys, KeyBytes};
use super::stamps::ChunkStamps;
use crate::options::Eviction;

mod invariants;

/// Index of an entry; reused after eviction.
pub type Slot = u32;

/// The slot's content is known.
const RESIDENT: u8 = 1;
/// A read of it is under way; its rows are parked.
const FETCHING: u8 = 2;
/// Not to be evicted: changed in this epoch and not written.
const DIRTY: u8 = 4;
/// Touched since Clock's hand passed.
const REFERENCED: u8 = 8;
const LIVE: u8 = 16;
/// Is in the queue, at its place in `places`; maybe since before the slot was used again.
const QUEUED: u8 = 32;

/// Bytes an entry costs beside its key and content.
const ENTRY_BYTES: usize = 88;

/// The queue may have this many outdated entries beside two for each slot before it is made anew.
const OUTDATED: usize = 1_024;

/// See the module.
pub struct KeyTable {
    table: HashTable<Slot>,
    hashes: Vec<u64>,
    vnodes: Vec<Vnode>,
    keys: Vec<KeyBytes>,
    flags: Vec<u8>,
    /// When each was last used; of Clock: when the hand last passed it. Never lowered.
    stamps: Vec<u64>,
    /// Where each lies in the queue. Other entries of it in the queue are outdated.
    places: Vec<u64>,
    sizes: Vec<u32>,
    free: Vec<Slot>,
    queue: EvictionQueue,
    policy: Eviction,
    /// Clock's place at the end of the ring.
    hand: u64,
    bytes: usize,
    complete: bool,
    dirty: Vec<Slot>,
}

/// What a probe found about a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Probe {
    /// Every row's slot is resident.
    AllResident,
    /// Some are being fetched or unknown.
    Mixed,
}

impl KeyTable {
    /// `complete`: the table behind it is empty.
    pub fn new(policy: Eviction, complete: bool) -> KeyTable {
        KeyTable {
            table: HashTable::new(),
            hashes: Vec::new(),
            vnodes: Vec::new(),
            keys: Vec::new(),
            flags: Vec::new(),
            stamps: Vec::new(),
            places: Vec::new(),
            sizes: Vec::new(),
            free: Vec::new(),
            queue: EvictionQueue::default(),
            policy,
            hand: 0,
            bytes: 0,
            complete,
            dirty: Vec::new(),
        }
    }

    /// One past the largest slot: how long the operator's columns must be.
    pub fn capacity(&self) -> usize {
        self.keys.len()
    }

    pub fn len(&self) -> usize {
        self.table.len()
    }

    pub fn is_empty(&self) -> bool {
        self.table.is_empty()
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    pub fn is_complete(&self) -> bool {
        self.complete
    }

    pub fn key(&self, slot: Slot) -> &[u8] {
        &self.keys[slot as usize]
    }

    pub fn vnode(&self, slot: Slot) -> Vnode {
        self.vnodes[slot as usize]
    }

    /// When the slot was last used.
    pub fn stamp(&self, slot: Slot) -> u64 {
        self.stamps[slot as usize]
    }

    #[inline]
    pub fn is_resident(&self, slot: Slot) -> bool {
        self.flags[slot as usize] & RESIDENT != 0
    }

    #[inline]
    pub fn is_fetching(&self, slot: Slot) -> bool {
        self.flags[slot as usize] & FETCHING != 0
    }

    /// All live slots.
    pub fn slots(&self) -> impl Iterator<Item = Slot> + '_ {
        self.table.iter().copied()
    }

    /// The slot of every row (of those in `rows`, if given), made where the key is new; `out` is
    /// parallel to the rows asked for. All are renewed by the rows' stamps.
    pub fn probe(
        &mut self,
        keys: &ChunkKeys,
        rows: Option<&[u32]>,
        stamps: &ChunkStamps,
        out: &mut Vec<Slot>,
    ) -> Probe {
        match self.policy {
            Eviction::Timestamp => self.probe_at(keys, rows, |row| stamps.time(row), out),
            Eviction::Lru => self.probe_at(keys, rows, |row| stamps.arrival(row), out),
            Eviction::Clock => self.probe_at(keys, rows, |_| 0, out),
        }
    }

    #[inline]
    fn probe_at(
        &mut self,
        keys: &ChunkKeys,
        rows: Option<&[u32]>,
        stamp: impl Fn(usize) -> u64,
        out: &mut Vec<Slot>,
    ) -> Probe {
        out.clear();
        let mut all = RESIDENT;
        let mut one = |this: &mut KeyTable, row: usize| {
            let (hash, vnode, key) = (keys.hashes[row], keys.vnode(row), keys.key(row));
            let slot = this.find_or_insert(hash, vnode, key, stamp(row));
            all &= this.flags[slot as usize];
            out.push(slot);
        };
        match rows {
            None => (0..keys.hashes.len()).for_each(|row| one(self, row)),
            Some(rows) => rows.iter().for_each(|&row| one(self, row as usize)),
        }
        if all & RESIDENT != 0 { Probe::AllResident } else { Probe::Mixed }
    }

    /// The slot of a key, made if new (then neither resident nor being fetched). `stamp`: 0 renews
    /// nothing.
    #[inline]
    pub fn find_or_insert(&mut self, hash: u64, vnode: Vnode, key: &[u8], stamp: u64) -> Slot {
        let found = self
            .table
            .find(hash, |&s| self.hashes[s as usize] == hash && &*self.keys[s as usize] == key);
        if let Some(&slot) = found {
            let renewed = &mut self.stamps[slot as usize];
            if self.policy != Eviction::Clock {
                *renewed = stamp.max(*renewed);
            }
            self.flags[slot as usize] |= REFERENCED;
            return slot;
        }
        self.insert(hash, vnode, key, stamp)
    }

    #[cold]
    fn insert(&mut self, hash: u64, vnode: Vnode, key: &[u8], stamp: u64) -> Slot {
        let key = KeyBytes::new(key);
        self.bytes += ENTRY_BYTES + key.heap_size();
        let stamp = if self.policy == Eviction::Clock { self.pass_hand() } else { stamp };
        let slot = match self.free.pop() {
            Some(slot) => {
                let s = slot as usize;
                self.hashes[s] = hash;
                self.vnodes[s] = vnode;
                self.keys[s] = key;
                self.flags[s] = LIVE | REFERENCED | (self.flags[s] & QUEUED);
                self.stamps[s] = stamp;
                self.sizes[s] = 0;
                slot
            }
            None => {
                self.hashes.push(hash);
                self.vnodes.push(vnode);
                self.keys.push(key);
                self.flags.push(LIVE | REFERENCED);
                self.stamps.push(stamp);
                self.places.push(stamp);
                self.sizes.push(0);
                (self.keys.len() - 1) as Slot
            }
        };
        let hashes = &self.hashes;
        self.table.insert_unique(hash, slot, |&s| hashes[s as usize]);
        self.enqueue(slot);
        slot
    }

    fn pass_hand(&mut self) -> u64 {
        self.hand += 1;
        self.hand
    }

    /// Puts a slot into the queue at its stamp, unless it lies there or before.
    fn enqueue(&mut self, slot: Slot) {
        let s = slot as usize;
        if self.flags[s] & QUEUED != 0 && self.places[s] <= self.stamps[s] {
            return;
        }
        self.flags[s] |= QUEUED;
        self.places[s] = self.stamps[s];
        self.queue.push(self.places[s], slot);
        if self.queue.len() > 2 * self.keys.len() + OUTDATED {
            self.requeue();
        }
    }

    /// Makes the queue anew, without outdated entries.
    fn requeue(&mut self) {
        let mut queue = EvictionQueue::default();
        for slot in 0..self.keys.len() {
            if self.flags[slot] & LIVE != 0 {
                self.flags[slot] |= QUEUED;
                self.places[slot] = self.stamps[slot];
                queue.push(self.stamps[slot], slot as Slot);
            } else {
                self.flags[slot] &= !QUEUED;
            }
        }
        self.queue = queue;
    }

    pub fn set_resident(&mut self, slot: Slot) {
        let flags = &mut self.flags[slot as usize];
        *flags = (*flags | RESIDENT) & !FETCHING;
    }

    pub fn set_fetching(&mut self, slot: Slot) {
        self.flags[slot as usize] |= FETCHING;
    }

    /// Marks a slot as changed in this epoch; `true` the first time. Dirty slots are listed in order.
    #[inline]
    pub fn mark_dirty(&mut self, slot: Slot) -> bool {
        let flags = &mut self.flags[slot as usize];
        let first = *flags & DIRTY == 0;
        if first {
            *flags |= DIRTY;
            self.dirty.push(slot);
        }
        first
    }

    pub fn is_dirty(&self, slot: Slot) -> bool {
        self.flags[slot as usize] & DIRTY != 0
    }

    /// The dirty slots, in the order they became dirty.
    pub fn dirty(&self) -> &[Slot] {
        &self.dirty
    }

    /// Everything is written.
    pub fn take_dirty(&mut self) -> Vec<Slot> {
        let dirty = std::mem::take(&mut self.dirty);
        for &slot in &dirty {
            self.flags[slot as usize] &= !DIRTY;
        }
        dirty
    }

    /// Everything is written but what belongs to slots for which `stays` holds: they stay dirty.
    pub fn take_dirty_but(&mut self, stays: impl Fn(Slot) -> bool) -> Vec<Slot> {
        let (kept, written) = self.take_dirty().into_iter().partition(|&slot| stays(slot));
        for &slot in &kept {
            self.flags[slot as usize] |= DIRTY;
        }
        self.dirty = kept;
        written
    }

    /// The content of a slot now takes `bytes`.
    #[inline]
    pub fn set_size(&mut self, slot: Slot, bytes: usize) {
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        let size = std::mem::replace(&mut self.sizes[slot as usize], bytes);
        self.bytes = self.bytes - size as usize + bytes as usize;
    }

    #[inline]
    pub fn grow(&mut self, slot: Slot, bytes: isize) {
        let now = (self.sizes[slot as usize] as isize + bytes).max(0) as usize;
        self.set_size(slot, now);
    }

    /// Removes entries in the policy's order until at most `target` bytes are left or nothing can go.
    /// `release` frees the operator's content and says whether there was any.
    pub fn evict(&mut self, target: usize, mut release: impl FnMut(Slot) -> bool) -> usize {
        let mut evicted = 0;
        let mut pinned = Vec::new();
        // Every entry may be seen twice: once where it was, once where it belongs.
        let mut left = self.queue.len() * 2;
        while self.bytes > target && left > 0 {
            let Some((place, slot)) = self.queue.pop() else { break };
            left -= 1;
            let s = slot as usize;
            let flags = self.flags[s];
            if flags & QUEUED == 0 || self.places[s] != place {
                continue;
            }
            self.flags[s] &= !QUEUED;
            if flags & LIVE == 0 {
                continue;
            }
            if self.renews(slot, place) {
                self.enqueue(slot);
            } else if flags & RESIDENT == 0 || flags & (FETCHING | DIRTY) != 0 {
                pinned.push(slot);
            } else {
                if release(slot) {
                    self.complete = false;
                }
                self.remove(slot);
                evicted += 1;
            }
        }
        for slot in pinned {
            self.enqueue(slot);
        }
        evicted
    }

    /// Whether an entry that came to the front of the queue at `place` belongs further back, as its stamp
    /// then says.
    fn renews(&mut self, slot: Slot, place: u64) -> bool {
        let s = slot as usize;
        if self.policy == Eviction::Clock && self.flags[s] & REFERENCED != 0 {
            self.flags[s] &= !REFERENCED;
            self.stamps[s] = self.pass_hand();
        }
        self.stamps[s] > place
    }

    /// Drops an entry whose content the operator has freed.
    pub fn remove(&mut self, slot: Slot) {
        let s = slot as usize;
        if let Ok(entry) = self.table.find_entry(self.hashes[s], |&o| o == slot) {
            entry.remove();
        }
        self.bytes -= ENTRY_BYTES + self.keys[s].heap_size() + self.sizes[s] as usize;
        self.keys[s] = KeyBytes::new(&[]);
        self.flags[s] &= QUEUED;
        self.sizes[s] = 0;
        self.free.push(slot);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::array::{Int64Array, RecordBatch, TimestampMicrosecondArray};
    use arrow::datatypes::{DataType, Field, Schema, TimeUnit};
    use millrace_common::DeltaChunk;
    use millrace_common::collections::HashMap;

    use super::*;
    use crate::state::Stamps;
    use crate::state::keys::KeyReader;

    const POLICIES: [Eviction; 3] = [Eviction::Timestamp, Eviction::Lru, Eviction::Clock];
    const HOUR_US: i64 = 3_600_000_000;

    /// A cache of numbers whose rows bring their event time at port 0 and none at port 1.
    struct Numbers {
        reader: KeyReader,
        stamps: Stamps,
        table: KeyTable,
        names: HashMap<Slot, i64>,
    }

    impl Numbers {
        fn new(policy: Eviction) -> Numbers {
            let schema = Numbers::chunk(&[]).batch.schema();
            Numbers {
                reader: KeyReader::new(&schema, &[0], &[]).unwrap(),
                stamps: Stamps::new(&[Some(1), None]),
                table: KeyTable::new(policy, false),
                names: HashMap::default(),
            }
        }

        /// Rows of (key, time).
        fn chunk(rows: &[(i64, i64)]) -> DeltaChunk {
            let schema = Schema::new(vec![
                Field::new("key", DataType::Int64, false),
                Field::new("at", DataType::Timestamp(TimeUnit::Microsecond, None), false),
            ]);
            let keys = Int64Array::from_iter_values(rows.iter().map(|r| r.0));
            let times = TimestampMicrosecondArray::from_iter_values(rows.iter().map(|r| r.1));
            let columns: Vec<arrow::array::ArrayRef> = vec![Arc::new(keys), Arc::new(times)];
            DeltaChunk::inserts(RecordBatch::try_new(Arc::new(schema), columns).unwrap())
        }

        fn come(&mut self, port: usize, rows: &[(i64, i64)]) {
            let chunk = Numbers::chunk(rows);
            let keys = self.reader.read(&chunk.batch).unwrap();
            let stamps = self.stamps.of(port, &chunk);
            let mut slots = Vec::new();
            self.table.probe(&keys, None, &stamps, &mut slots);
            for (&slot, row) in slots.iter().zip(rows) {
                self.table.set_resident(slot);
                self.names.insert(slot, row.0);
            }
        }

        /// Evicts one entry.
        fn victim(&mut self) -> Option<i64> {
            let mut gone = None;
            self.table.evict(self.table.bytes().saturating_sub(1), |slot| {
                gone = Some(self.names[&slot]);
                true
            });
            gone
        }

        fn victims(&mut self) -> Vec<i64> {
            std::iter::from_fn(|| self.victim()).collect()
        }
    }

    #[test]
    fn each_policy_evicts_another_entry() {
        let victims = POLICIES.map(|policy| {
            let mut cache = Numbers::new(policy);
            cache.come(0, &[(1, 3 * HOUR_US), (2, HOUR_US), (3, 2 * HOUR_US)]);
            cache.come(0, &[(3, 2 * HOUR_US), (2, HOUR_US), (1, 3 * HOUR_US)]);
            cache.victims()
        });
        // The earliest; the one not used for longest; the next around the ring, all having been used.
        assert_eq!(victims, [vec![2, 3, 1], vec![3, 2, 1], vec![1, 2, 3]]);
    }

    #[test]
    fn clock_spares_what_was_used_since_the_hand_passed() {
        let mut cache = Numbers::new(Eviction::Clock);
        cache.come(0, &[(1, 0), (2, 0), (3, 0), (4, 0)]);
        // All are new: the hand goes once around.
        assert_eq!(cache.victim(), Some(1));
        cache.come(0, &[(2, 0), (4, 0)]);
        assert_eq!(cache.victim(), Some(3));
        // 2 has had its second chance, 4 and 5 still have theirs.
        cache.come(0, &[(5, 0)]);
        assert_eq!(cache.victims(), [2, 4, 5]);
    }

    #[test]
    fn a_stamp_never_goes_back() {
        let mut cache = Numbers::new(Eviction::Timestamp);
        cache.come(0, &[(1, 10 * HOUR_US), (2, 20 * HOUR_US)]);
        // A late row of 2, and a row of another input, which happens now: at hour 20.
        cache.come(0, &[(2, HOUR_US), (3, 15 * HOUR_US)]);
        cache.come(1, &[(1, 0)]);
        assert_eq!(cache.victims(), [3, 2, 1]);
    }

    #[test]
    fn times_far_apart_keep_their_order() {
        let mut cache = Numbers::new(Eviction::Timestamp);
        let day = 24 * HOUR_US;
        cache.come(
            0,
            &[(1, 400 * day), (2, 2), (3, 400 * day + 1), (4, -3 * day), (5, 1), (6, 9_000 * day)],
        );
        assert_eq!(cache.victim(), Some(4));
        // Before everything else, after an eviction.
        cache.come(0, &[(7, -9 * day)]);
        assert_eq!(cache.victims(), [7, 5, 2, 1, 3, 6]);
    }

    #[test]
    fn a_slot_used_again_has_the_age_of_its_new_key() {
        for (again, expected) in [(HOUR_US, [3, 2]), (9 * HOUR_US, [2, 3])] {
            let mut cache = Numbers::new(Eviction::Timestamp);
            cache.come(0, &[(1, 5 * HOUR_US), (2, 7 * HOUR_US)]);
            let slot = *cache.names.iter().find(|(_, name)| **name == 1).unwrap().0;
            cache.table.remove(slot);
            cache.come(0, &[(3, again)]);
            assert_eq!(cache.names[&slot], 3);
            assert_eq!(cache.victims(), expected);
        }
    }

    #[test]
    fn slots_used_again_leave_a_bounded_queue() {
        for policy in POLICIES {
            let mut cache = Numbers::new(policy);
            cache.come(0, &[(-1, HOUR_US)]);
            for key in 0..10_000 {
                // Ever earlier: each lies before what is left of the slot's last key.
                cache.come(0, &[(key, -key)]);
                let slot = *cache.names.iter().find(|(_, name)| **name == key).unwrap().0;
                cache.table.remove(slot);
                assert!(cache.table.queue.len() <= OUTDATED + 2 * cache.table.capacity());
            }
            assert_eq!(cache.victims(), [-1], "{policy:?}");
        }
    }

    #[test]
    fn what_is_dirty_or_being_fetched_stays_in_its_place() {
        for policy in POLICIES {
            let mut cache = Numbers::new(policy);
            cache.come(0, &[(1, HOUR_US), (2, 2 * HOUR_US), (3, 3 * HOUR_US)]);
            let slot = *cache.names.iter().find(|(_, name)| **name == 1).unwrap().0;
            cache.table.mark_dirty(slot);
            assert_eq!(cache.victims(), [2, 3], "{policy:?}");
            cache.table.take_dirty();
            assert_eq!(cache.victims(), [1], "{policy:?}");
        }
    }
}
