//! Keyed state ahead of rows (docs/design.md §8): what hints announce is read, and kept until its rows have come.
//!
//! An entry becomes resident by an answer only, never by a hint. A row finds the entry as it would without hints: one
//! that needs what is being read asks for it again, as demand, which shares the store's answer; one that needs no read
//! runs at once, and makes what is under way stale. So an entry takes in an answer only if no row of it has run since
//! the question.

use std::sync::Arc;

use millrace_common::Epoch;
use millrace_common::collections::HashSet;
use millrace_common::fault_injection::is_planted;
use millrace_storage::cache::Priority;
use millrace_storage::{Found, Lookup};

use super::{Entries, KeyedState, Missing, TABLES};
use crate::error::ExecError;
use crate::lookahead::Hint;
use crate::lookahead::operator::EpochReads;
use crate::state::Slot;
use crate::state::keys::storage_keys;
use crate::state::prefetch::{Ahead, AheadAnswer};

/// Rows of a key that are read ahead: one with as many is not kept, since rows may need only some.
pub const MAX_ROWS: usize = 4_096;
/// Keys that may be read ahead at once.
const MAX_KEYS: usize = 8_192;
/// What an entry takes at least, for the bound on how many are due.
const MIN_ENTRY: usize = 128;

/// What a hint comes to.
#[derive(Default)]
struct Sorted {
    /// To be read, by table.
    missing: [Vec<Slot>; TABLES],
    /// Due, and whether they are read for it.
    due: Vec<(Slot, bool)>,
    resident: u64,
    dropped: u64,
}

impl<E: Entries> KeyedState<E> {
    /// Rows of these keys will come to a port: reads what rows that add need of them, and keeps it until they have
    /// come, or are not to be expected any more. Never waits, and changes no result.
    pub fn hint(&mut self, port: usize, hint: &Hint) -> Result<(), ExecError> {
        self.give_up();
        let count = hint.keys.hashes.len() as u64;
        let metrics = Arc::clone(&self.env.metrics);
        let counted = &metrics.lookahead;
        counted.hinted.add(count);
        if self.keys.is_complete() {
            counted.resident.add(count);
            return Ok(());
        }
        let mut sorted = self.sort(port, hint);
        self.drop_closed(&mut sorted)?;
        counted.resident.add(sorted.resident);
        counted.dropped.add(sorted.dropped);
        for &(slot, _) in &sorted.due {
            self.keys.set_due(slot, true);
        }
        self.due.mark(&hint.due, sorted.due);
        self.prefetch(sorted.missing)
    }

    /// What of a hint's keys is in memory, is being read, and is to be read.
    fn sort(&mut self, port: usize, hint: &Hint) -> Sorted {
        let keys = &hint.keys;
        let stamps = self.stamps.at(keys.hashes.len(), &hint.times);
        let mut room = self.room_ahead();
        let mut sorted = Sorted::default();
        let mut seen = HashSet::default();
        for row in 0..keys.hashes.len() {
            let (hash, vnode, key) = (keys.hashes[row], keys.vnode(row), keys.key(row));
            let known = self.keys.find(hash, key);
            if !self.env.vnodes.contains(&vnode) || known.is_none() && room == 0 {
                sorted.dropped += 1;
                continue;
            }
            let slot = self.slot_used_at(hash, vnode, key, self.keys.stamp_of(&stamps, row));
            if self.keys.is_fetching(slot) || !seen.insert(slot) {
                continue;
            }
            let is_resident = self.keys.is_resident(slot);
            let needed = self.entries.missing(slot, is_resident, port, 1);
            let reading = self.reads.ahead.of(slot);
            if needed == Missing::default() {
                self.note_present(slot);
                sorted.resident += 1;
                if known.is_none() {
                    self.remove(slot);
                    continue;
                }
            }
            let asked = (0..TABLES).filter(|&table| needed[table] && !reading[table]);
            let asked: Vec<usize> = asked.collect();
            if !asked.is_empty() && room == 0 {
                sorted.dropped += 1;
                continue;
            }
            sorted.due.push((slot, !asked.is_empty()));
            if !asked.is_empty() {
                room -= 1;
                self.keys.set_prefetching(slot, true);
            }
            asked.into_iter().for_each(|table| sorted.missing[table].push(slot));
        }
        sorted
    }

    /// Walkers need not tell of a key that is here.
    fn note_present(&self, slot: Slot) {
        if self.keys.is_resident(slot)
            && let Some(presence) = self.keys.presence()
        {
            presence.set(self.keys.hash(slot));
        }
    }

    /// How many more keys may be read ahead: what is due may hold half of the cache.
    fn room_ahead(&mut self) -> usize {
        let held = self.held();
        let budget = self.limits.cache_budget(&self.env, held, false);
        let entry = (self.keys.bytes() / self.keys.len().max(1)).max(MIN_ENTRY);
        let due = (budget / 2 / entry).saturating_sub(self.due.len());
        due.min(MAX_KEYS.saturating_sub(self.reads.ahead.count()))
    }

    /// Keys that are closed are not read.
    fn drop_closed(&mut self, sorted: &mut Sorted) -> Result<(), ExecError> {
        let Some((at, bound)) = self.closed else { return Ok(()) };
        let asked = sorted.due.iter().filter(|(_, is_asked)| *is_asked).map(|(slot, _)| *slot);
        let closed = self.below(asked.collect(), at, bound)?;
        sorted.dropped += closed.len() as u64;
        for slot in closed {
            sorted.due.retain(|(other, _)| *other != slot);
            sorted.missing.iter_mut().for_each(|of_table| of_table.retain(|s| *s != slot));
            let waits = self.reads.ahead.of(slot) != Missing::default();
            self.keys.set_prefetching(slot, waits);
        }
        Ok(())
    }

    /// Reads entries ahead, in one round.
    fn prefetch(&mut self, missing: [Vec<Slot>; TABLES]) -> Result<(), ExecError> {
        if missing.iter().all(Vec::is_empty) {
            return Ok(());
        }
        if is_planted("hint-marks-resident") {
            for &slot in missing.iter().flatten() {
                self.keys.set_prefetching(slot, false);
                self.entries.absent(slot);
                self.set_resident(slot);
            }
            return Ok(());
        }
        self.reads.ahead.begin(&self.env.clock);
        let mut answers = Vec::new();
        for (table, slots) in missing.into_iter().enumerate().filter(|(_, m)| !m.is_empty()) {
            self.env.metrics.lookahead.prefetched.add(slots.len() as u64);
            let keys = storage_keys(slots.iter().map(|&s| (self.keys.vnode(s), self.keys.key(s))));
            let lookup = self.entries.read_ahead(table, keys, MAX_ROWS);
            let closed = self.closed.map(|(_, bound)| bound);
            let asked = self.reads.ahead.ask(table, slots, closed);
            match lookup.of_class(Priority::Prefetch) {
                Lookup::Ready(found) => answers.push(AheadAnswer { asked, found: Ok(found) }),
                Lookup::Pending(reading) => self.reads.ahead.submit(asked, reading),
            }
        }
        self.load_ahead(answers).map(drop)
    }

    /// Takes in what was read ahead, for entries that still wait for it; those that have come.
    pub(super) fn load_ahead(&mut self, answers: Vec<AheadAnswer>) -> Result<Vec<Slot>, ExecError> {
        let mut complete = Vec::new();
        for AheadAnswer { asked, found } in answers {
            let all = asked.slots.len();
            let (mut good, found) = match found {
                Ok(found) => (self.good_for(&asked, &found)?, found),
                Err(_) => {
                    self.refuse(&asked, &[]);
                    continue;
                }
            };
            if is_planted("stale-prefetch-kept") {
                good = (0..all as u32).collect();
            }
            self.refuse(&asked, &good);
            if good.is_empty() {
                continue;
            }
            let (Ahead { table, slots, .. }, found) = asked.pick(&good, found)?;
            let found = self.entries.within_bound(table, found)?;
            self.entries.load(table, &slots, &found)?;
            self.count_absent(&slots, &found);
            for slot in slots {
                if self.reads.ahead.settle(slot, table) {
                    self.keys.set_prefetching(slot, false);
                    if !self.keys.is_fetching(slot) {
                        complete.push(slot);
                    }
                }
                self.resize(slot);
            }
        }
        self.entries.complete(&complete)?;
        for &slot in &complete {
            self.set_resident(slot);
        }
        Ok(complete)
    }

    /// The positions of entries that an answer is good for: they wait for it, it is all that there is of them, and
    /// their keys have not been closed since it was asked.
    fn good_for(&self, asked: &Ahead, found: &Found) -> Result<Vec<u32>, ExecError> {
        let mut rows = vec![0; asked.slots.len()];
        found.input.values().iter().for_each(|&i| rows[i as usize] += 1);
        let good = (0u32..).zip(&asked.slots).zip(rows);
        let good = good
            .filter(|((_, slot), rows)| *rows < MAX_ROWS && self.reads.ahead.awaits(asked, **slot));
        let mut good: Vec<u32> = good.map(|((i, _), _)| i).collect();
        if let Some((at, bound)) = self.closed.filter(|(_, bound)| Some(*bound) != asked.closed) {
            let slots = good.iter().map(|&i| asked.slots[i as usize]).collect();
            let closed = self.below(slots, at, bound)?;
            good.retain(|&i| !closed.contains(&asked.slots[i as usize]));
        }
        Ok(good)
    }

    /// Entries of an answer other than the good ones do not wait for it any more.
    fn refuse(&mut self, asked: &Ahead, good: &[u32]) {
        let mut good = good.iter().copied().peekable();
        for (i, &slot) in (0u32..).zip(&asked.slots) {
            if good.next_if_eq(&i).is_some() {
                continue;
            }
            if !self.reads.ahead.awaits(asked, slot) {
                self.env.metrics.lookahead.stale.add(1);
                continue;
            }
            self.env.metrics.lookahead.dropped.add(1);
            if self.reads.ahead.settle(slot, asked.table) {
                self.keys.set_prefetching(slot, false);
            }
        }
    }

    fn count_absent(&self, slots: &[Slot], found: &Found) {
        let mut is_present = vec![false; slots.len()];
        found.input.values().iter().for_each(|&i| is_present[i as usize] = true);
        let absent = is_present.iter().filter(|is| !**is).count();
        self.env.metrics.lookahead.absent.add(absent as u64);
    }

    /// A row needs these tables of an entry that is being read ahead, or (none) runs without: what is read ahead from
    /// them, or at all, is not waited for any more.
    pub(super) fn overtake(&mut self, slot: Slot, needed: Missing) {
        let runs = needed == Missing::default();
        if runs && is_planted("blind-write-during-prefetch-lost") {
            return;
        }
        let mut is_done = false;
        for table in (0..TABLES).filter(|&table| runs || needed[table]) {
            is_done = self.reads.ahead.settle(slot, table);
        }
        if is_done {
            self.keys.set_prefetching(slot, false);
        }
    }

    /// Rows have come for entries: those that were due are so no longer.
    pub(super) fn touch(&mut self, slots: &[Slot]) {
        let counted = &self.env.metrics.lookahead;
        for &slot in slots {
            if !self.keys.is_due(slot) {
                continue;
            }
            self.keys.set_due(slot, false);
            if !self.due.take(slot).is_some_and(|mark| mark.is_read) {
                continue;
            }
            if self.keys.is_prefetching(slot) {
                counted.late.add(1);
                self.epoch_reads.used += 1;
            } else if self.keys.is_resident(slot) {
                counted.in_time.add(1);
                self.epoch_reads.used += 1;
            }
        }
    }

    /// An epoch ends, all rows of which have run: marks of rows that have not come go, and it is decided whether hints
    /// are wanted. Reads ahead stay under way.
    pub fn pass(&mut self, epoch: Epoch) {
        self.give_up();
        for (slot, mark) in self.due.pass(epoch.0) {
            self.keys.set_due(slot, false);
            if mark.is_read {
                self.env.metrics.lookahead.unused.add(1);
                self.epoch_reads.unused += 1;
            }
        }
        if is_planted("prefetch-lost-at-barrier") {
            let lost = self.reads.ahead.slots().filter(|&slot| !self.keys.is_fetching(slot));
            for slot in lost.collect::<Vec<Slot>>() {
                self.overtake(slot, Missing::default());
                self.entries.absent(slot);
                self.set_resident(slot);
            }
        }
        let EpochReads { missed, used, unused } = std::mem::take(&mut self.epoch_reads);
        if let Some(presence) = self.activation.epoch(EpochReads { missed, used, unused }) {
            self.keys.set_presence(presence);
        }
        if let Some(presence) = self.keys.presence() {
            presence.next_round();
        }
    }

    /// Reads that take too long are given up, so that none keeps a version of the state.
    fn give_up(&mut self) {
        for slot in self.reads.ahead.give_up(&self.env.clock) {
            self.env.metrics.lookahead.dropped.add(1);
            self.keys.set_prefetching(slot, false);
        }
    }

    /// Reads are under way that no row waits for.
    pub fn is_prefetching(&self) -> bool {
        !self.reads.ahead.is_idle()
    }
}
