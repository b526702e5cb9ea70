//! The timestamp-aware cache: key → slot, one per state table (or pair of tables with one key) and
//! task, above the store (docs/design.md §7).
//!
//! It owns keys, residency, age and sizes; what a slot holds (accumulators, rows) lies in columns of
//! the operator, indexed by slot. Three policies say which entry goes first:
//!
//! - *Timestamp*: the one whose latest use lies furthest back in time, that is in event time where rows bring
//!   it ([`Stamps`](super::stamps::Stamps)). A late row does not make an entry older, and one that is
//!   needed at a later time may be stamped with it in advance: a stamp never goes back, unless the entry was read ahead
//!   and its rows have not come ([`KeyTable::expire`]).
//! - *LRU*: the one whose latest use lies furthest back in the order of arrival.
//! - *Clock*: the next around the ring that has not been used since the hand passed it.
//!
//! An entry's place in the [`EvictionQueue`] may be before its stamp: renewing an entry is one store to the
//! stamp, and its place is corrected when it comes to the front, so hits cost nothing.
//!
//! A slot may be evicted when it is not pinned (no parked rows, nothing unwritten, no read under way). One that is not
//! resident holds nothing: it was read ahead, and the answer was dropped.
//! Operators write what is dirty before they ask for victims. "Absent" is an ordinary resident entry
//! with nothing in it. While `complete`, every key that exists is here, so a new key is known to be
//! absent without a read; evicting an entry that holds something ends that.

use std::ops::Range;
use std::sync::Arc;

use hashbrown::HashTable;
use millrace_common::Vnode;
use millrace_common::fault_injection::is_planted;

use super::eviction_queue::EvictionQueue;
use super::keys::{ChunkKeys, KeyBytes};
use super::stamps::ChunkStamps;
use crate::lookahead::presence::{Presence, of_input};
use crate::lookahead::slack::PORTS;
use crate::options::Eviction;

mod invariants;
#[cfg(test)]
mod tests;

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
/// It is being read ahead of rows: not to be evicted.
const PREFETCHING: u8 = 64;
/// A hint has said that rows of it will come, and they have not: to be evicted last.
const DUE: u8 = 128;

/// Bytes an entry costs beside its key and content: columns, hash table and queue, with the room that they grow into.
pub const ENTRY_BYTES: usize = 120;

/// The queue may have this many outdated entries beside two for each slot before it is made anew.
const OUTDATED: usize = 1_024;

/// See the module.
pub struct KeyTable {
    table: HashTable<Slot>,
    hashes: Vec<u64>,
    vnodes: Vec<Vnode>,
    keys: Vec<KeyBytes>,
    flags: Vec<u8>,
    /// When each was last used; of Clock: when the hand last passed it. Lowered by [`KeyTable::expire`] only.
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
    /// Of entries that are due.
    due_bytes: usize,
    complete: bool,
    dirty: Vec<Slot>,
    /// Where walkers see what is resident, while they want to.
    presence: Option<Arc<Presence>>,
    /// What they tell apart there: the first port of the keys' rows, and one past the last.
    ports: Range<usize>,
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
            due_bytes: 0,
            complete,
            dirty: Vec::new(),
            presence: None,
            ports: 0..PORTS,
        }
    }

    /// Walkers know rows of the keys by this port only.
    pub fn set_port(&mut self, port: usize) {
        self.ports = port..port + 1;
    }

    /// Notes there from now on which keys are [present](Self::note_present) and which leave.
    pub fn set_presence(&mut self, presence: Option<Arc<Presence>>) {
        self.presence = presence;
    }

    pub fn presence(&self) -> Option<&Arc<Presence>> {
        self.presence.as_ref()
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

    /// Bytes of entries that are due.
    pub fn due_bytes(&self) -> usize {
        self.due_bytes
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

    pub fn hash(&self, slot: Slot) -> u64 {
        self.hashes[slot as usize]
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

    #[inline]
    pub fn is_prefetching(&self, slot: Slot) -> bool {
        self.flags[slot as usize] & PREFETCHING != 0
    }

    pub fn set_prefetching(&mut self, slot: Slot, is: bool) {
        self.set(slot, PREFETCHING, is);
    }

    #[inline]
    pub fn is_due(&self, slot: Slot) -> bool {
        self.flags[slot as usize] & DUE != 0
    }

    pub fn set_due(&mut self, slot: Slot, is: bool) {
        match (self.is_due(slot), is) {
            (false, true) => self.due_bytes += self.bytes_of(slot),
            (true, false) => self.due_bytes -= self.bytes_of(slot),
            _ => {}
        }
        self.set(slot, DUE, is);
    }

    /// An entry was read for rows that have not come: it leaves before all others, until it is used or expected again.
    pub fn expire(&mut self, slot: Slot) {
        let s = slot as usize;
        self.flags[s] &= !REFERENCED;
        self.stamps[s] = 0;
        self.enqueue(slot);
    }

    fn bytes_of(&self, slot: Slot) -> usize {
        let s = slot as usize;
        ENTRY_BYTES + self.keys[s].heap_size() + self.sizes[s] as usize
    }

    fn set(&mut self, slot: Slot, flag: u8, is: bool) {
        let flags = &mut self.flags[slot as usize];
        *flags = if is { *flags | flag } else { *flags & !flag };
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

    /// What a row stamps its entry with.
    pub fn stamp_of(&self, stamps: &ChunkStamps, row: usize) -> u64 {
        match self.policy {
            Eviction::Timestamp => stamps.time(row),
            Eviction::Lru => stamps.arrival(row),
            Eviction::Clock => 0,
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

    /// The slot of a key that is known.
    pub fn find(&self, hash: u64, key: &[u8]) -> Option<Slot> {
        let is_it = |&s: &Slot| self.hashes[s as usize] == hash && &*self.keys[s as usize] == key;
        self.table.find(hash, is_it).copied()
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

    /// Rows that come for a slot at an input find what they need: walkers need not tell of them.
    pub fn note_present(&self, slot: Slot, port: usize) {
        if let Some(presence) = &self.presence {
            presence.set(of_input(self.hashes[slot as usize], self.ports.start + port));
        }
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
        if self.is_due(slot) {
            self.due_bytes = self.due_bytes - size as usize + bytes as usize;
        }
    }

    #[inline]
    pub fn grow(&mut self, slot: Slot, bytes: isize) {
        let now = (self.sizes[slot as usize] as isize + bytes).max(0) as usize;
        self.set_size(slot, now);
    }

    /// Removes entries in the policy's order, those that are due last, until at most `target` bytes are left or nothing
    /// can go. `content` is what the entries stand for: `epoch` says of it which epoch brings the rows of an entry that is
    /// due, `release` frees it and says whether there was any.
    pub fn evict<C>(
        &mut self,
        target: usize,
        content: &mut C,
        epoch: impl Fn(&C, Slot) -> u64,
        mut release: impl FnMut(&mut C, Slot) -> bool,
    ) -> usize {
        let mut evicted = 0;
        let (mut pinned, mut due) = (Vec::new(), Vec::new());
        let dirty = if is_planted("evicted-dirty-entry-read") { 0 } else { DIRTY };
        let pins = FETCHING | PREFETCHING | dirty;
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
            } else if flags & pins != 0 {
                pinned.push(slot);
            } else if self.is_expected(slot) {
                due.push(slot);
            } else {
                self.evict_one(slot, content, &mut release);
                evicted += 1;
            }
        }
        // Of those that are due the most distant ones first: of the last epoch, and in it of the last time.
        if self.bytes > target {
            due.sort_by_cached_key(|&slot| epoch(&*content, slot));
        }
        while self.bytes > target
            && let Some(slot) = due.pop()
        {
            self.evict_one(slot, content, &mut release);
            evicted += 1;
        }
        for slot in pinned.into_iter().chain(due) {
            self.enqueue(slot);
        }
        evicted
    }

    fn evict_one<C>(
        &mut self,
        slot: Slot,
        content: &mut C,
        release: &mut impl FnMut(&mut C, Slot) -> bool,
    ) {
        if release(content, slot) {
            self.complete = false;
        }
        self.remove(slot);
    }

    /// Whether rows of an entry are expected: it leaves after others.
    fn is_expected(&self, slot: Slot) -> bool {
        let is = self.is_due(slot) || self.is_seen_coming(slot);
        is != is_planted("due-entry-evicted-first")
    }

    /// Whether a walker has seen rows of an entry coming.
    fn is_seen_coming(&self, slot: Slot) -> bool {
        let hash = self.hashes[slot as usize];
        let is_due =
            |p: &Arc<Presence>| self.ports.clone().any(|port| p.is_due(of_input(hash, port)));
        self.presence.as_ref().is_some_and(is_due)
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

    /// Gives back the memory of the places of entries, if all have left: what slots named before means nothing then.
    /// Whether there was any.
    pub fn give_back(&mut self) -> bool {
        if !self.table.is_empty() || !self.dirty.is_empty() || self.keys.is_empty() {
            return false;
        }
        *self = KeyTable {
            hand: self.hand,
            presence: self.presence.take(),
            ports: self.ports.clone(),
            ..KeyTable::new(self.policy, self.complete)
        };
        true
    }

    /// Drops an entry whose content the operator has freed.
    pub fn remove(&mut self, slot: Slot) {
        let s = slot as usize;
        if let Ok(entry) = self.table.find_entry(self.hashes[s], |&o| o == slot) {
            entry.remove();
        }
        if let Some(presence) = &self.presence {
            self.ports.clone().for_each(|port| presence.clear(of_input(self.hashes[s], port)));
        }
        self.set_due(slot, false);
        self.bytes -= self.bytes_of(slot);
        self.keys[s] = KeyBytes::new(&[]);
        self.flags[s] &= QUEUED;
        self.sizes[s] = 0;
        self.free.push(slot);
    }
}
