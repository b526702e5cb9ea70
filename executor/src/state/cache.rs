//! The timestamp-aware cache: key → slot, one per state table (or pair of tables with one key) and
//! task, above the store (docs/design.md §7).
//!
//! It owns keys, residency, age and sizes; what a slot holds (accumulators, rows) lies in columns of
//! the operator, indexed by slot. Entries are evicted by timestamp, smallest first, through a
//! calendar queue: renewing an entry is one store to its stamp (its place in the queue is corrected
//! when it comes to the front), so hits cost nothing. The timestamp is the event time where a node has one, else the
//! arrival sequence. LRU and Clock are there to compare with.
//!
//! A slot may be evicted when it is resident and not pinned (no parked rows, nothing unwritten).
//! Operators write what is dirty before they ask for victims. "Absent" is an ordinary resident entry
//! with nothing in it. While `complete`, every key that exists is here, so a new key is known to be
//! absent without a read; evicting an entry that holds something ends that.

use std::collections::VecDeque;

use hashbrown::HashTable;
use millrace_common::Vnode;

use super::keys::{ChunkKeys, KeyBytes};
use crate::options::Eviction;

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
/// Has an entry, maybe an old one, in the queue.
const QUEUED: u8 = 32;

/// Bytes an entry costs beside its key and content.
const ENTRY_BYTES: usize = 80;

/// See the module.
pub struct KeyTable {
    table: HashTable<Slot>,
    hashes: Vec<u64>,
    vnodes: Vec<Vnode>,
    keys: Vec<KeyBytes>,
    flags: Vec<u8>,
    stamps: Vec<u64>,
    sizes: Vec<u32>,
    free: Vec<Slot>,
    queue: Queue,
    clock: bool,
    /// Clock's order of arrival in the queue.
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
            sizes: Vec::new(),
            free: Vec::new(),
            queue: Queue::default(),
            clock: policy == Eviction::Clock,
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
    /// parallel to the rows asked for. All are renewed to `stamp`.
    pub fn probe(
        &mut self,
        keys: &ChunkKeys,
        rows: Option<&[u32]>,
        stamp: u64,
        out: &mut Vec<Slot>,
    ) -> Probe {
        out.clear();
        let mut all = RESIDENT;
        let mut one = |this: &mut KeyTable, row: usize| {
            let slot = this.find_or_insert(keys.hashes[row], keys.vnode(row), keys.key(row), stamp);
            all &= this.flags[slot as usize];
            out.push(slot);
        };
        match rows {
            None => (0..keys.hashes.len()).for_each(|row| one(self, row)),
            Some(rows) => rows.iter().for_each(|&row| one(self, row as usize)),
        }
        if all & RESIDENT != 0 { Probe::AllResident } else { Probe::Mixed }
    }

    /// The slot of a key, made if new (then neither resident nor being fetched).
    #[inline]
    pub fn find_or_insert(&mut self, hash: u64, vnode: Vnode, key: &[u8], stamp: u64) -> Slot {
        let found = self
            .table
            .find(hash, |&s| self.hashes[s as usize] == hash && &*self.keys[s as usize] == key);
        if let Some(&slot) = found {
            self.stamps[slot as usize] = stamp;
            self.flags[slot as usize] |= REFERENCED;
            return slot;
        }
        self.insert(hash, vnode, key, stamp)
    }

    #[cold]
    fn insert(&mut self, hash: u64, vnode: Vnode, key: &[u8], stamp: u64) -> Slot {
        let key = KeyBytes::new(key);
        self.bytes += ENTRY_BYTES + key.heap_size();
        let slot = match self.free.pop() {
            Some(slot) => {
                let s = slot as usize;
                self.hashes[s] = hash;
                self.vnodes[s] = vnode;
                self.keys[s] = key;
                self.flags[s] = LIVE | (self.flags[s] & QUEUED);
                self.stamps[s] = stamp;
                self.sizes[s] = 0;
                slot
            }
            None => {
                self.hashes.push(hash);
                self.vnodes.push(vnode);
                self.keys.push(key);
                self.flags.push(LIVE);
                self.stamps.push(stamp);
                self.sizes.push(0);
                (self.keys.len() - 1) as Slot
            }
        };
        let hashes = &self.hashes;
        self.table.insert_unique(hash, slot, |&s| hashes[s as usize]);
        self.enqueue(slot);
        slot
    }

    fn enqueue(&mut self, slot: Slot) {
        let flags = &mut self.flags[slot as usize];
        if *flags & QUEUED == 0 {
            *flags |= QUEUED;
            let stamp = if self.clock {
                self.hand += 1;
                self.hand
            } else {
                self.stamps[slot as usize]
            };
            self.queue.insert(slot, stamp);
        }
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

    /// The content of a slot now takes `bytes`.
    #[inline]
    pub fn set_size(&mut self, slot: Slot, bytes: usize) {
        let size = &mut self.sizes[slot as usize];
        self.bytes = self.bytes - *size as usize + bytes;
        *size = bytes as u32;
    }

    #[inline]
    pub fn grow(&mut self, slot: Slot, bytes: isize) {
        let now = (self.sizes[slot as usize] as isize + bytes).max(0) as usize;
        self.set_size(slot, now);
    }

    /// Removes entries, oldest first, until at most `target` bytes are left or nothing can go.
    /// `release` frees the operator's content and says whether there was any.
    pub fn evict(&mut self, target: usize, mut release: impl FnMut(Slot) -> bool) -> usize {
        let mut evicted = 0;
        let mut pinned = Vec::new();
        // Every entry may be seen twice: once where it was, once where it belongs.
        let mut left = self.queue.len() * 2;
        while self.bytes > target && left > 0 {
            let Some((slot, due)) = self.queue.pop() else { break };
            left -= 1;
            let s = slot as usize;
            let flags = self.flags[s];
            self.flags[s] &= !QUEUED;
            if flags & LIVE == 0 {
                continue;
            }
            let renewed = if self.clock {
                self.flags[s] &= !REFERENCED;
                flags & REFERENCED != 0
            } else {
                Queue::bucket(self.stamps[s]) > due
            };
            if renewed {
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

/// A calendar queue over timestamps: buckets of `2^WIDTH_BITS` ticks. An entry's place may be older
/// than its stamp; whoever pops it puts it back.
#[derive(Default)]
struct Queue {
    /// Number of the front bucket.
    base: u64,
    buckets: VecDeque<Vec<Slot>>,
    len: usize,
}

impl Queue {
    const WIDTH_BITS: u32 = 3;
    /// Later timestamps share the last bucket until their turn comes nearer.
    const BUCKETS: usize = 1 << 16;

    fn bucket(stamp: u64) -> u64 {
        stamp >> Queue::WIDTH_BITS
    }

    fn len(&self) -> usize {
        self.len
    }

    fn insert(&mut self, slot: Slot, stamp: u64) {
        if self.len == 0 {
            self.buckets.clear();
            self.base = Queue::bucket(stamp);
        }
        let at = Queue::bucket(stamp).saturating_sub(self.base) as usize;
        let at = at.min(Queue::BUCKETS - 1);
        if at >= self.buckets.len() {
            self.buckets.resize_with(at + 1, Vec::new);
        }
        self.buckets[at].push(slot);
        self.len += 1;
    }

    /// The oldest entry and the number of the bucket it lay in.
    fn pop(&mut self) -> Option<(Slot, u64)> {
        while self.len > 0 {
            let front = self.buckets.front_mut()?;
            if let Some(slot) = front.pop() {
                self.len -= 1;
                return Some((slot, self.base));
            }
            self.buckets.pop_front();
            self.base += 1;
        }
        None
    }
}
