//! Reads ahead of rows, of the entries under prefixes of a state table (docs/design.md §8): for an operator that asks for
//! them by itself, and keeps no entry of a key in memory.
//!
//! What is found is kept until a row asks for it, or until the epoch that was to bring the row has passed. Whatever is
//! written under a prefix ends what is kept or being read of it: so what a row gets is all that is stored. The owner tells
//! what it writes ([`PrefixesAhead::written`]); a prefix is complete, so nothing is written under it by writing under
//! another.
//!
//! Answers are taken part by part, and no further than there is room for what they bring. What is still to be found counts
//! by what was found lately.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use arrow::array::{Array, BinaryArray, BinaryBuilder};
use futures::future::{AbortHandle, BoxFuture, FutureExt, abortable};
use futures::stream::{FuturesUnordered, StreamExt};
use millrace_common::Epoch;
use millrace_common::collections::HashMap;
use millrace_storage::{Found, Lookup, Part, Reading};
use tokio::time::Instant;

use super::arena::batch_bytes;
use super::delayed::of_strings;
use super::keyed::{MAX_BYTES, MAX_KEYS_AHEAD, MAX_ROWS, few_enough};
use super::prefetch::PATIENCE;
use super::prefetch_budget::PrefetchBudget;
use super::{KeyBytes, StateTable};
use crate::lookahead::Due;
use crate::lookahead::operator::EpochReads;
use crate::lookahead::slack::EpochNotes;
use crate::memory::{MemoryClass, Reservation};
use crate::operators::Env;

/// Bytes of what is kept at most, and no more than a quarter of what caches may hold.
const MOST_BYTES: usize = 16 << 20;
/// What a prefix takes beside its own bytes, and what is expected under one before anything was found.
const MIN_ENTRY: usize = 128;
/// A longer prefix is not read ahead: each entry under it has it in its key.
const MAX_PREFIX: usize = 4 << 10;
/// What an entry that was found takes beside its key and its value.
const FOUND_ENTRY: usize = 16;
/// Prefixes by whose answers the next ones are estimated, about.
const ESTIMATED_BY: usize = 1_024;
/// Barriers after which a prefix is let go of whose epoch was never told.
const MAX_BARRIERS: u64 = 256;

/// See the module. Of one table of an operator in one task.
pub struct PrefixesAhead {
    expected: HashMap<KeyBytes, Expected>,
    reads: FuturesUnordered<BoxFuture<'static, Option<Answer>>>,
    rounds: VecDeque<Round>,
    /// Of the last round.
    number: u64,
    /// Bytes of prefixes, and of answers of which something is kept.
    held: Arc<AtomicUsize>,
    /// Bytes that are expected of the rounds.
    under_way: usize,
    /// Prefixes that were answered, and bytes that were found under them. Older ones count less and less.
    answered: (usize, usize),
    budget: PrefetchBudget,
    barriers: u64,
    /// The last epoch that has ended.
    passed: u64,
    /// Since the last barrier.
    notes: EpochNotes,
    counts: EpochReads,
    env: Env,
}

/// A prefix that rows are expected for.
struct Expected {
    due: Due,
    /// Barriers before it was announced.
    barrier: u64,
    ahead: Ahead,
    /// Of the prefix itself.
    _memory: HeldBytes,
}

enum Ahead {
    /// In this round.
    Reading(u64),
    Here(Kept),
}

/// The entries of a prefix.
pub struct Kept {
    /// Of others, too.
    pub answer: Arc<Found>,
    pub rows: Range<usize>,
    /// The answer's.
    pub memory: Arc<HeldBytes>,
}

/// Bytes that count as held until this is dropped.
pub struct HeldBytes {
    held: Arc<AtomicUsize>,
    account: Reservation,
}

impl HeldBytes {
    fn new(bytes: usize, held: &Arc<AtomicUsize>, env: &Env) -> HeldBytes {
        let mut account = env.governor.account(MemoryClass::Cache);
        account.set(bytes);
        held.fetch_add(bytes, Ordering::Relaxed);
        HeldBytes { held: Arc::clone(held), account }
    }
}

impl Drop for HeldBytes {
    fn drop(&mut self) {
        self.held.fetch_sub(self.account.bytes(), Ordering::Relaxed);
    }
}

/// A read that is not answered from memory.
struct Round {
    number: u64,
    began: Instant,
    read: AbortHandle,
    /// Prefixes that are not answered.
    left: usize,
    /// Bytes that are expected of each.
    each: usize,
}

/// What was found under some of the prefixes of a round; `None`: the read has failed.
struct Answer {
    number: u64,
    prefixes: BinaryArray,
    part: Option<Part>,
    /// What follows.
    reading: Reading,
}

impl PrefixesAhead {
    pub fn new(env: &Env) -> PrefixesAhead {
        PrefixesAhead {
            expected: HashMap::default(),
            reads: FuturesUnordered::new(),
            rounds: VecDeque::new(),
            number: 0,
            held: Arc::default(),
            under_way: 0,
            answered: (1, MIN_ENTRY),
            budget: PrefetchBudget::new(env.options.prefetch_requests, env.options.prefetch_bytes),
            barriers: 0,
            passed: env.restored.0.max(1),
            notes: EpochNotes::default(),
            counts: EpochReads::default(),
            env: env.clone(),
        }
    }

    /// Rows that an epoch brings will ask for these prefixes, each of which is there once: reads what is stored under
    /// them. Never waits, and changes no result.
    pub fn hint(&mut self, prefixes: &BinaryArray, due: &Due, table: &dyn StateTable) {
        self.give_up();
        let count = prefixes.len() as u64;
        let counted = &self.env.metrics.lookahead;
        counted.hinted.add(count);
        if due.has_passed(self.passed) {
            counted.dropped.add(count);
        } else {
            let missing = self.expect(prefixes, due);
            self.read(missing, due, table);
        }
    }

    /// Rows are expected for prefixes; those that are to be read for it.
    fn expect(&mut self, prefixes: &BinaryArray, due: &Due) -> BinaryArray {
        let (mut left, mut room) = self.room();
        let each = self.answer_bytes();
        let mut missing = BinaryBuilder::new();
        let counted = &self.env.metrics.lookahead;
        for prefix in prefixes.iter().flatten() {
            if let Some(known) = self.expected.get_mut(prefix) {
                let epochs = known.due.epoch().zip(due.epoch());
                if epochs.is_none_or(|(known, new)| known <= new) {
                    (known.due, known.barrier) = (due.clone(), self.barriers);
                }
                counted.resident.add(u64::from(matches!(known.ahead, Ahead::Here(_))));
            } else {
                // It is in the question, too.
                let own = MIN_ENTRY + 2 * prefix.len();
                if left == 0 || own + each > room || prefix.len() > MAX_PREFIX {
                    counted.dropped.add(1);
                    continue;
                }
                (left, room) = (left - 1, room - own - each);
                let (due, barrier) = (due.clone(), self.barriers);
                let ahead = Ahead::Reading(self.number + 1);
                let _memory = HeldBytes::new(own, &self.held, &self.env);
                let new = Expected { due, barrier, ahead, _memory };
                self.expected.insert(KeyBytes::new(prefix), new);
                missing.append_value(prefix);
            }
        }
        missing.finish()
    }

    /// How many more prefixes may be read ahead, and how many bytes they and what is found under them may take.
    fn room(&mut self) -> (usize, usize) {
        let requests = self.env.metrics.lookahead.ahead_requests.load(Ordering::Relaxed);
        if self.env.governor.is_tight() || !self.budget.has_some(&self.env.clock, requests) {
            return (0, 0);
        }
        let left = MAX_KEYS_AHEAD.saturating_sub(self.expected.len());
        (left, self.room_bytes().saturating_sub(self.under_way))
    }

    /// How many more bytes may be kept.
    fn room_bytes(&self) -> usize {
        self.most_bytes().saturating_sub(self.held.load(Ordering::Relaxed))
    }

    fn most_bytes(&self) -> usize {
        MOST_BYTES.min(self.env.options.cache_bytes / 4)
    }

    /// What is likely to be found under a prefix. However much that is, there is room for one if nothing is kept.
    fn answer_bytes(&self) -> usize {
        let (prefixes, bytes) = self.answered;
        (bytes / prefixes.max(1)).min(MAX_BYTES).min(self.most_bytes() / 2)
    }

    fn note_answered(&mut self, prefixes: usize, bytes: usize) {
        let (all, of_all) = self.answered;
        let (all, of_all) = (all + prefixes, of_all.saturating_add(bytes));
        let is_enough = all > ESTIMATED_BY;
        self.answered = if is_enough { (all / 2, of_all / 2) } else { (all, of_all) };
    }

    fn read(&mut self, prefixes: BinaryArray, due: &Due, table: &dyn StateTable) {
        if prefixes.is_empty() {
            return;
        }
        self.number += 1;
        let counted = &self.env.metrics.lookahead;
        counted.prefetched.add(prefixes.len() as u64);
        let lookup = table.multi_scan(prefixes.clone(), Some(MAX_ROWS));
        let lookup = Due::of_class(std::slice::from_ref(due), lookup);
        let (number, left) = (self.number, prefixes.len());
        match lookup.counted(&counted.ahead_requests) {
            Lookup::Ready(found) => self.arrived(number, &prefixes, Part::whole(found, left)),
            Lookup::Pending(reading) => {
                let (began, each) = (self.env.clock.now(), self.answer_bytes());
                let read = self.read_on(number, prefixes, reading);
                self.under_way += left * each;
                self.rounds.push_back(Round { number, began, read, left, each });
            }
        }
    }

    /// Reads the next part of an answer.
    fn read_on(&mut self, number: u64, prefixes: BinaryArray, mut reading: Reading) -> AbortHandle {
        let read = async move {
            let part = reading.next().await.ok();
            Answer { number, prefixes, part, reading }
        };
        let (read, handle) = abortable(read);
        self.reads.push(read.map(Result::ok).boxed());
        handle
    }

    /// A read ahead is under way.
    pub fn is_reading(&self) -> bool {
        !self.reads.is_empty()
    }

    /// Waits for a part of one, if there is any. Cancel-safe.
    pub async fn completed(&mut self) {
        let Some(Some(answer)) = self.reads.next().await else { return };
        let Answer { number, prefixes, part, reading } = answer;
        let answered = part.as_ref().map_or(0, |part| part.asked.len());
        let mut goes_on = part.as_ref().is_some_and(|part| !part.is_last);
        if let Some(round) = self.rounds.iter_mut().find(|round| round.number == number) {
            self.notes.note_read(self.env.clock.elapsed(round.began));
            round.left = round.left.saturating_sub(answered);
            self.under_way = self.under_way.saturating_sub(answered * round.each);
        }
        if let Some(part) = part {
            self.arrived(number, &prefixes, part);
            // What follows would be dropped.
            goes_on = goes_on && self.room_bytes() >= self.answer_bytes();
        }
        if !goes_on {
            self.end_round(number);
            return;
        }
        let read = self.read_on(number, prefixes, reading);
        if let Some(round) = self.rounds.iter_mut().find(|round| round.number == number) {
            round.read = read;
        }
    }

    /// Nothing more is read in a round: what has not been answered is not waited for any more.
    fn end_round(&mut self, number: u64) {
        let at = self.rounds.iter().position(|round| round.number == number);
        let Some(round) = at.and_then(|at| self.rounds.remove(at)) else { return };
        self.under_way = self.under_way.saturating_sub(round.left * round.each);
        if round.left > 0 {
            self.drop_reading(|of| of == number);
        }
    }

    /// Prefixes that are read in these rounds are not waited for any more.
    fn drop_reading(&mut self, rounds: impl Fn(u64) -> bool) {
        let before = self.expected.len();
        self.expected.retain(|_, expected| match expected.ahead {
            Ahead::Reading(number) => !rounds(number),
            Ahead::Here(_) => true,
        });
        self.env.metrics.lookahead.dropped.add((before - self.expected.len()) as u64);
    }

    /// Keeps what was found under prefixes that are still waited for, if it is all and not too much.
    fn arrived(&mut self, number: u64, prefixes: &BinaryArray, part: Part) {
        let Part { asked, found, .. } = part;
        self.budget.charge_bytes(batch_bytes(&found.values));
        self.note_answered(asked.len(), found_bytes(&found, 0..found.len()));
        let room = self.room_bytes();
        let mut few = few_enough(&found, asked.len(), room, |rows| found_bytes(&found, rows));
        few.retain(|&i| {
            let known = self.expected.get(prefixes.value(asked[i as usize] as usize));
            known.is_some_and(|e| matches!(e.ahead, Ahead::Reading(of) if of == number))
        });
        // Copied: of what is not kept nothing stays in memory, nor of the block that it lies in.
        let found = of_strings(&found, &few).ok().map(Arc::new);
        let bytes = found.as_ref().map_or(0, |found| found_bytes(found, 0..found.len()));
        let memory = Arc::new(HeldBytes::new(bytes, &self.held, &self.env));
        let counted = &self.env.metrics.lookahead;
        for (i, &position) in (0u32..).zip(&asked) {
            let prefix = prefixes.value(position as usize);
            let waits = |e: &&mut Expected| matches!(e.ahead, Ahead::Reading(of) if of == number);
            let Some(expected) = self.expected.get_mut(prefix).filter(waits) else {
                counted.stale.add(1);
                continue;
            };
            let Some((answer, at)) = found.as_ref().zip(few.binary_search(&i).ok()) else {
                counted.dropped.add(1);
                self.expected.remove(prefix);
                continue;
            };
            let inputs = answer.input.values();
            let at = at as u32;
            let rows = inputs.partition_point(|&i| i < at)..inputs.partition_point(|&i| i <= at);
            counted.absent.add(u64::from(rows.is_empty()));
            let (answer, memory) = (Arc::clone(answer), Arc::clone(&memory));
            expected.ahead = Ahead::Here(Kept { answer, rows, memory });
        }
    }

    /// A row asks for a prefix: all that is stored under it, if that was read ahead.
    pub fn take(&mut self, prefix: &[u8]) -> Option<Kept> {
        let Expected { ahead, .. } = self.expected.remove(prefix)?;
        let counted = &self.env.metrics.lookahead;
        self.counts.used += 1;
        match ahead {
            Ahead::Reading(_) => {
                counted.late.add(1);
                self.counts.late += 1;
                None
            }
            Ahead::Here(kept) => {
                counted.in_time.add(1);
                Some(kept)
            }
        }
    }

    /// Entries under these prefixes are written.
    pub fn written(&mut self, prefixes: &BinaryArray) {
        if self.expected.is_empty() {
            return;
        }
        for prefix in prefixes.iter().flatten() {
            let ended = self.expected.remove(prefix);
            self.note_unused(u64::from(ended.is_some()));
        }
    }

    fn note_unused(&mut self, prefixes: u64) {
        self.env.metrics.lookahead.unused.add(prefixes);
        self.counts.unused += prefixes;
    }

    /// Rows have come that ask for prefixes, ...
    pub fn note_rows(&mut self, port: usize) {
        if let Some(began) = self.notes.began.get_mut(port) {
            began.get_or_insert(self.env.clock.now());
        }
    }

    /// ... for so many of which they wait, ...
    pub fn note_missed(&mut self, prefixes: u64) {
        self.env.metrics.lookahead.missed.add(prefixes);
        self.counts.missed += prefixes;
    }

    /// ... and the read that was asked for them then is answered.
    pub fn note_wait(&mut self, asked: Instant) {
        self.notes.note_wait(self.env.clock.elapsed(asked));
    }

    /// An epoch ends, all rows of which have asked for what they need. What its rows, and its reads, were.
    pub fn pass(&mut self, epoch: Epoch) -> (EpochNotes, EpochReads) {
        self.give_up();
        self.passed = self.passed.max(epoch.0);
        self.barriers += 1;
        let (before, barriers) = (self.expected.len(), self.barriers);
        self.expected.retain(|_, expected| {
            let is_old = barriers - expected.barrier >= MAX_BARRIERS;
            !is_old && !expected.due.has_passed(epoch.0)
        });
        self.note_unused((before - self.expected.len()) as u64);
        (std::mem::take(&mut self.notes), std::mem::take(&mut self.counts))
    }

    /// Memory is tight: what is kept is let go of.
    pub fn shed(&mut self) {
        let before = self.expected.len();
        self.expected.retain(|_, expected| matches!(expected.ahead, Ahead::Reading(_)));
        self.note_unused((before - self.expected.len()) as u64);
    }

    /// Reads that take too long are given up, so that none keeps a version of the state.
    fn give_up(&mut self) {
        let mut last = 0;
        while self.rounds.front().is_some_and(|r| self.env.clock.elapsed(r.began) > PATIENCE) {
            let Some(round) = self.rounds.pop_front() else { break };
            round.read.abort();
            self.under_way = self.under_way.saturating_sub(round.left * round.each);
            last = round.number;
        }
        if last > 0 {
            self.drop_reading(|number| number <= last);
        }
    }
}

/// Bytes of entries of an answer.
fn found_bytes(found: &Found, rows: Range<usize>) -> usize {
    let offsets = found.keys.value_offsets();
    let keys = (offsets[rows.end] - offsets[rows.start]) as usize;
    let values = batch_bytes(&found.values.slice(rows.start, rows.len()));
    keys + rows.len() * FOUND_ENTRY + values
}
