//! Keyed state ahead of rows (docs/design.md §8): what hints announce is read, and kept until its rows have come.
//!
//! An entry becomes resident by an answer only, never by a hint. A row finds the entry as it would without hints: one
//! that needs what is being read asks for it again, as demand, which shares the store's answer. One that needs no read
//! runs at once: it is noted beside what is under way, where the entries take notes, else it makes that stale. So an
//! entry takes in an answer only together with every row of it that has run since the question.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use millrace_common::Epoch;
use millrace_common::collections::HashSet;
use millrace_common::fault_injection::is_planted;
use millrace_storage::{Found, Lookup};

use super::{Entries, KeyedState, Missing, TABLES};
use crate::error::ExecError;
use crate::lookahead::operator::EpochReads;
use crate::lookahead::{Due, Hint};
use crate::state::Slot;
use crate::state::arena::batch_bytes;
use crate::state::cache::ENTRY_BYTES;
use crate::state::collected::Gathered;
use crate::state::keys::{ChunkKeys, storage_keys};
use crate::state::prefetch::{Ahead, AheadAnswer};

/// Rows of a key that are read ahead: one with as many is not kept, since rows may need only some.
pub const MAX_ROWS: usize = 4_096;
/// Bytes of them: one with more is not kept either.
pub const MAX_BYTES: usize = 256 << 10;
/// Keys that may be read ahead at once.
pub const MAX_KEYS_AHEAD: usize = 8_192;
/// What an entry takes at least, for the bound on how many are due.
const MIN_ENTRY: usize = 128;
/// So many bytes of an answer are taken in whatever is due.
const MIN_ROOM: usize = 4 << 10;

/// Of a hint, with their times if there are any.
struct HintedKeys {
    keys: ChunkKeys,
    times: Vec<i64>,
}

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
        let count = hint.count() as u64;
        let metrics = Arc::clone(&self.env.metrics);
        let counted = &metrics.lookahead;
        let Some(HintedKeys { keys, times }) = self.read_hint(port, hint) else {
            counted.dropped.add(count.max(1));
            return Ok(());
        };
        counted.hinted.add(count);
        if self.keys.is_complete() {
            counted.resident.add(count);
            self.chain(hint, &keys);
            return Ok(());
        }
        if hint.due.has_passed(self.passed) {
            counted.dropped.add(count);
            return Ok(());
        }
        // What only others want is not read for this operator.
        let is_alone = hint.carried.as_ref().is_some_and(|carried| carried.is_alone);
        let room = if is_alone { 0 } else { self.room_ahead() };
        let mut sorted = self.sort(port, &keys, &times, room);
        self.drop_closed(&mut sorted)?;
        counted.resident.add(sorted.resident);
        if !is_alone {
            counted.dropped.add(sorted.dropped);
        }
        for &(slot, _) in &sorted.due {
            self.keys.set_due(slot, true);
        }
        self.due.mark(&hint.due, port, sorted.due);
        self.collect(sorted.missing, &hint.due)?;
        self.chain(hint, &keys);
        Ok(())
    }

    /// The keys of a hint; `None`: it is none for this input.
    fn read_hint(&self, port: usize, hint: &Hint) -> Option<HintedKeys> {
        let reader = self.readers.get(port).filter(|_| hint.is_whole())?;
        let keys = reader.read_columns(&hint.columns)?;
        Some(HintedKeys { keys, times: hint.times.read(&hint.columns)? })
    }

    /// What of a hint's keys is in memory, is being read, and is to be read: so many of them at most.
    fn sort(&mut self, port: usize, keys: &ChunkKeys, times: &[i64], mut room: usize) -> Sorted {
        let stamps = self.stamps.at(keys.hashes.len(), times);
        let mut sorted = Sorted::default();
        let mut seen = HashSet::default();
        for row in 0..keys.hashes.len() {
            let (hash, vnode, key) = (keys.hashes[row], keys.vnode(row), keys.key(row));
            let known = self.keys.find(hash, key);
            let is_late = times.get(row).is_some_and(|time| self.is_late(port, *time));
            if is_late || !self.env.vnodes.contains(&vnode) || known.is_none() && room == 0 {
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
                self.note_present(slot, port);
                sorted.resident += 1;
                if known.is_none() {
                    // The next key may get its slot.
                    seen.remove(&slot);
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

    /// Whether rows of an event time at an input are late, or older than what is kept. The least time is none.
    fn is_late(&self, port: usize, time: i64) -> bool {
        time != i64::MIN && self.floors.get(port).is_some_and(|floor| time < *floor)
    }

    /// Walkers need not tell of a key for rows at an input, if what those that add need of it is here.
    pub(super) fn note_present(&self, slot: Slot, port: usize) {
        if self.keys.is_resident(slot)
            && self.entries.missing(slot, true, port, 1) == Missing::default()
        {
            self.keys.note_present(slot, port);
        }
    }

    /// How many more keys may be read ahead: what is due may hold half of the cache, and reads have a budget.
    fn room_ahead(&mut self) -> usize {
        let requests = self.env.metrics.lookahead.ahead_requests.load(Ordering::Relaxed);
        if !self.budget.has_some(&self.env.clock, requests) {
            return 0;
        }
        let entry = (self.keys.bytes() / self.keys.len().max(1)).max(MIN_ENTRY);
        let reading = self.reads.ahead.count();
        // Those that are being read hold nothing yet but their keys.
        let expected = reading * (entry - ENTRY_BYTES.min(entry));
        let room = self.room_bytes().saturating_sub(expected) / entry;
        room.min(MAX_KEYS_AHEAD.saturating_sub(reading))
    }

    /// How many more bytes may be due.
    fn room_bytes(&mut self) -> usize {
        let held = self.held();
        let budget = self.limits.cache_budget(&self.env, held, false);
        (budget / 2).saturating_sub(self.keys.due_bytes())
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

    /// Entries are to be read ahead: they wait for others that may be read with them.
    fn collect(&mut self, missing: [Vec<Slot>; TABLES], due: &Due) -> Result<(), ExecError> {
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
        self.reads.ahead.collect(missing, due, &self.env.clock);
        if self.reads.ahead.is_full() || self.env.options.prefetch_window.is_zero() {
            self.ask_collected()?;
        }
        Ok(())
    }

    /// Reads ahead, in one round, what was collected and is still wanted.
    pub(super) fn ask_collected(&mut self) -> Result<(), ExecError> {
        self.give_up_closed()?;
        let Gathered { slots, dues } = self.reads.ahead.begin(&self.env.clock);
        let mut answers = Vec::new();
        for (table, slots) in slots.into_iter().enumerate().filter(|(_, s)| !s.is_empty()) {
            self.env.metrics.lookahead.prefetched.add(slots.len() as u64);
            let keys = storage_keys(slots.iter().map(|&s| (self.keys.vnode(s), self.keys.key(s))));
            let lookup = self.entries.read_ahead(table, keys, MAX_ROWS);
            let closed = self.closed.map(|(_, bound)| bound);
            let asked = self.reads.ahead.ask(table, slots, closed);
            let requests = &self.env.metrics.lookahead.ahead_requests;
            match Due::of_class(&dues, lookup).counted(requests) {
                Lookup::Ready(found) => answers.push(AheadAnswer { asked, found: Ok(found) }),
                Lookup::Pending(reading) => self.reads.ahead.submit(asked, reading),
            }
        }
        self.load_ahead(answers).map(drop)
    }

    /// What is collected of keys that have been closed since is not read.
    fn give_up_closed(&mut self) -> Result<(), ExecError> {
        let Some((at, bound)) = self.closed else { return Ok(()) };
        let collected = self.reads.ahead.slots().filter(|&slot| self.is_collected(slot));
        for slot in self.below(collected.collect(), at, bound)? {
            self.give_up_collected(slot);
        }
        Ok(())
    }

    /// An entry is to be read ahead from some table, and was not asked for.
    fn is_collected(&self, slot: Slot) -> bool {
        (0..TABLES).any(|table| self.reads.ahead.is_collected(slot, table))
    }

    /// An entry is not asked for that was collected.
    fn give_up_collected(&mut self, slot: Slot) {
        self.env.metrics.lookahead.dropped.add(1);
        for table in 0..TABLES {
            if self.reads.ahead.is_collected(slot, table) {
                self.abandon_ahead(slot, table);
            }
        }
    }

    /// Takes in what was read ahead, for entries that still wait for it; those that have come.
    pub(super) fn load_ahead(&mut self, answers: Vec<AheadAnswer>) -> Result<Vec<Slot>, ExecError> {
        let mut complete = Vec::new();
        for AheadAnswer { asked, found } in answers {
            if let Some(began) = asked.began {
                self.note_read(began);
                self.reads.ahead.note_took(self.env.clock.elapsed(began));
            }
            let all = asked.slots.len();
            let room = self.room_bytes().max(MIN_ROOM);
            let (mut good, found) = match found {
                Ok(found) => {
                    self.budget.charge_bytes(batch_bytes(&found.values));
                    (self.good_for(&asked, &found, room)?, found)
                }
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
            let found = match is_planted("read-before-raised-bound") {
                true => found,
                false => self.entries.within_bound(table, found)?,
            };
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
        self.follow(&complete);
        Ok(complete)
    }

    /// The positions of entries that an answer is good for: they wait for it, it is all that there is of them and not
    /// too much, there is room for so many bytes, and their keys have not been closed since it was asked.
    fn good_for(&self, asked: &Ahead, found: &Found, room: usize) -> Result<Vec<u32>, ExecError> {
        let awaits = |i: &u32| self.reads.ahead.awaits(asked, asked.slots[*i as usize]);
        let bytes = |rows: Range<usize>| batch_bytes(&found.values.slice(rows.start, rows.len()));
        let few = few_enough(found, asked.slots.len(), room, bytes);
        let mut good: Vec<u32> = few.into_iter().filter(awaits).collect();
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
            self.abandon_ahead(slot, asked.table);
        }
    }

    /// What is read ahead from a table for an entry will not be taken in, if anything is.
    pub fn abandon_ahead(&mut self, slot: Slot, table: usize) {
        if !self.waits_for(slot, table) {
            return;
        }
        if self.reads.ahead.settle(slot, table) {
            self.keys.set_prefetching(slot, false);
        }
        self.entries.forget_notes(table, slot);
        self.resize(slot);
    }

    /// Whether an entry waits for what is read ahead from a table, or is to be.
    #[inline]
    fn waits_for(&self, slot: Slot, table: usize) -> bool {
        self.keys.is_prefetching(slot) && self.reads.ahead.of(slot)[table]
    }

    /// Whether a table has been asked for an entry ahead of rows, so that its answer lacks what is written now.
    #[inline]
    pub fn is_read_ahead(&self, slot: Slot, table: usize) -> bool {
        self.waits_for(slot, table) && !self.reads.ahead.is_collected(slot, table)
    }

    fn count_absent(&self, slots: &[Slot], found: &Found) {
        let mut is_present = vec![false; slots.len()];
        found.input.values().iter().for_each(|&i| is_present[i as usize] = true);
        let absent = is_present.iter().filter(|is| !**is).count();
        self.env.metrics.lookahead.absent.add(absent as u64);
    }

    /// A row needs these tables of an entry that is being read ahead, or (none) runs without: what is read ahead from
    /// them is not waited for any more, or, where no notes are taken, at all.
    pub(super) fn overtake(&mut self, slot: Slot, needed: Missing) {
        let runs = needed == Missing::default();
        if runs && E::TAKES_NOTES {
            return;
        }
        let tables = (0..TABLES).filter(|&table| runs || needed[table]);
        tables.for_each(|table| self.abandon_ahead(slot, table));
    }

    /// Rows have come for entries at an input: those that were due for it are so no longer.
    pub(super) fn touch(&mut self, port: usize, slots: &[Slot]) {
        let metrics = Arc::clone(&self.env.metrics);
        let counted = &metrics.lookahead;
        for &slot in slots {
            if !self.keys.is_due(slot) {
                continue;
            }
            let Some(touched) = self.due.touch(slot, port) else { continue };
            if touched.is_over {
                self.keys.set_due(slot, false);
            }
            if self.is_collected(slot) {
                // The hint was too late. The row asks for what it needs.
                if touched.is_over {
                    self.give_up_collected(slot);
                }
                continue;
            }
            if !touched.is_used {
                continue;
            }
            if self.keys.is_prefetching(slot) {
                counted.late.add(1);
                self.epoch_reads.used += 1;
                self.epoch_reads.late += 1;
            } else if self.keys.is_resident(slot) {
                counted.in_time.add(1);
                self.epoch_reads.used += 1;
            }
        }
    }

    /// An epoch ends, all rows of which have run: marks of rows that have not come go. Reads ahead stay under way.
    pub(super) fn pass_marks(&mut self, epoch: Epoch) {
        self.passed = self.passed.max(epoch.0);
        self.give_up();
        self.prune_chains();
        for (slot, mark) in self.due.pass(epoch.0) {
            self.keys.set_due(slot, false);
            if mark.is_in_vain() {
                // The hint has stamped it as if it had been used.
                self.keys.expire(slot);
            }
            if self.is_collected(slot) {
                self.give_up_collected(slot);
            } else if mark.is_read {
                self.env.metrics.lookahead.unused.add(1);
                self.epoch_reads.unused += 1;
            }
        }
    }

    /// [`KeyedState::pass_marks`], and it is decided whether hints are wanted.
    pub fn pass(&mut self, epoch: Epoch) {
        self.pass_marks(epoch);
        if is_planted("prefetch-lost-at-barrier") {
            let lost = self.reads.ahead.slots().filter(|&slot| !self.keys.is_fetching(slot));
            for slot in lost.collect::<Vec<Slot>>() {
                (0..TABLES).for_each(|table| self.abandon_ahead(slot, table));
                self.entries.absent(slot);
                self.set_resident(slot);
            }
        }
        let mut reads = std::mem::take(&mut self.epoch_reads);
        if self.env.options.random_hints {
            // For tests: hints are wanted whatever is read.
            reads = EpochReads { missed: 1, ..EpochReads::default() };
        }
        self.end_notes(epoch, reads);
        if let Some(presence) = self.activation.epoch(reads) {
            self.keys.set_presence(presence);
        }
        if let Some(presence) = self.keys.presence() {
            presence.next_round();
        }
    }

    /// Reads that take too long are given up, so that none keeps a version of the state.
    fn give_up(&mut self) {
        for (slot, table) in self.reads.ahead.give_up(&self.env.clock) {
            self.env.metrics.lookahead.dropped.add(1);
            let waits = self.reads.ahead.of(slot) != Missing::default();
            self.keys.set_prefetching(slot, waits);
            self.entries.forget_notes(table, slot);
            self.resize(slot);
        }
    }

    /// Rows of an earlier event time (microseconds) at an input are late by its watermark, or older than what is kept:
    /// hints of them are dropped.
    pub fn raise_floor(&mut self, port: usize, micros: i64) {
        if let Some(floor) = self.floors.get_mut(port) {
            *floor = micros.max(*floor);
        }
    }

    /// The watermarks of an input have moved.
    pub fn watermark(&mut self, port: usize, columns: &[(usize, i64)]) {
        let time = self.env.event_time.get(port).copied().flatten();
        let own = columns.iter().find(|(column, _)| Some(*column) == time);
        if let Some(&(_, micros)) = own {
            self.raise_floor(port, micros);
        }
    }

    /// Reads are under way that no row waits for.
    pub fn is_prefetching(&self) -> bool {
        !self.reads.ahead.is_idle()
    }
}

/// The positions of those of `asked` strings of which an answer has all and not too much, as many as there is room for.
/// `bytes` are those of some of its rows.
pub fn few_enough(
    found: &Found,
    asked: usize,
    mut room: usize,
    bytes: impl Fn(Range<usize>) -> usize,
) -> Vec<u32> {
    let mut rows = vec![0; asked];
    found.input.values().iter().for_each(|&i| rows[i as usize] += 1);
    let is_large = bytes(0..found.len()) > MAX_BYTES.min(room);
    let mut from = 0;
    let mut few = Vec::with_capacity(asked);
    // What was found is in the order of the strings.
    for (i, rows) in (0u32..).zip(rows) {
        let bytes = if is_large { bytes(from..from + rows) } else { 0 };
        if rows < MAX_ROWS && bytes <= MAX_BYTES.min(room) {
            few.push(i);
            room -= bytes;
        }
        from += rows;
    }
    few
}
