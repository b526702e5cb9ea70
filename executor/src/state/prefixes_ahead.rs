//! Reads ahead of rows, of the entries under prefixes of a state table (docs/design.md §8): for an operator that asks for
//! them by itself, and keeps no entry of a key in memory.
//!
//! What is found is kept until a row asks for it, or until the epoch that was to bring the row has passed. Whatever is
//! written under a prefix ends what is kept or being read of it: so what a row gets is all that is stored. The owner tells
//! what it writes ([`PrefixesAhead::written`]); a prefix is complete, so nothing is written under it by writing under
//! another.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use arrow::array::{Array, BinaryArray, BinaryBuilder};
use futures::future::{AbortHandle, BoxFuture, FutureExt, abortable};
use futures::stream::{FuturesUnordered, StreamExt};
use millrace_common::Epoch;
use millrace_common::collections::HashMap;
use millrace_storage::{Found, Lookup};
use tokio::time::Instant;

use super::arena::batch_bytes;
use super::delayed::of_strings;
use super::keyed::{MAX_KEYS_AHEAD, MAX_ROWS, few_enough};
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
/// What a prefix takes at least, for the bound on how many are read.
const MIN_ENTRY: usize = 128;
/// Barriers after which a prefix is let go of whose epoch was never told.
const MAX_BARRIERS: u64 = 256;

/// See the module. Of one table of an operator in one task.
pub struct PrefixesAhead {
    expected: HashMap<KeyBytes, Expected>,
    reads: FuturesUnordered<BoxFuture<'static, Option<Answer>>>,
    rounds: VecDeque<Round>,
    /// Of the last round.
    number: u64,
    /// Bytes of answers of which something is kept.
    held: Arc<AtomicUsize>,
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
}

enum Ahead {
    /// In this round.
    Reading(u64),
    Here(Kept),
}

/// The entries of a prefix.
struct Kept {
    answer: Arc<Found>,
    rows: Range<usize>,
    _memory: Arc<HeldBytes>,
}

/// Bytes of an answer, as long as something of it is kept.
struct HeldBytes {
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
}

/// What was found under the prefixes of a round; `None`: the read has failed.
struct Answer {
    number: u64,
    prefixes: BinaryArray,
    found: Option<Found>,
}

impl PrefixesAhead {
    pub fn new(env: &Env) -> PrefixesAhead {
        PrefixesAhead {
            expected: HashMap::default(),
            reads: FuturesUnordered::new(),
            rounds: VecDeque::new(),
            number: 0,
            held: Arc::default(),
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
        let mut room = self.room();
        let mut missing = BinaryBuilder::new();
        let counted = &self.env.metrics.lookahead;
        for prefix in prefixes.iter().flatten() {
            if let Some(known) = self.expected.get_mut(prefix) {
                let epochs = known.due.epoch().zip(due.epoch());
                if epochs.is_none_or(|(known, new)| known <= new) {
                    (known.due, known.barrier) = (due.clone(), self.barriers);
                }
                counted.resident.add(u64::from(matches!(known.ahead, Ahead::Here(_))));
            } else if room == 0 {
                counted.dropped.add(1);
            } else {
                room -= 1;
                let (due, barrier) = (due.clone(), self.barriers);
                let ahead = Ahead::Reading(self.number + 1);
                let new = Expected { due, barrier, ahead };
                self.expected.insert(KeyBytes::new(prefix), new);
                missing.append_value(prefix);
            }
        }
        missing.finish()
    }

    /// How many more prefixes may be read ahead.
    fn room(&mut self) -> usize {
        let requests = self.env.metrics.lookahead.ahead_requests.load(Ordering::Relaxed);
        if self.env.governor.is_tight() || !self.budget.has_some(&self.env.clock, requests) {
            return 0;
        }
        let room = MAX_KEYS_AHEAD.saturating_sub(self.expected.len());
        room.min(self.room_bytes() / MIN_ENTRY)
    }

    /// How many more bytes may be kept.
    fn room_bytes(&self) -> usize {
        let most = MOST_BYTES.min(self.env.options.cache_bytes / 4);
        most.saturating_sub(self.held.load(Ordering::Relaxed))
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
        let number = self.number;
        match lookup.counted(&counted.ahead_requests) {
            Lookup::Ready(found) => self.arrived(Answer { number, prefixes, found: Some(found) }),
            Lookup::Pending(reading) => {
                let read =
                    async move { Answer { number, prefixes, found: reading.whole().await.ok() } };
                let (read, handle) = abortable(read);
                let began = self.env.clock.now();
                self.rounds.push_back(Round { number, began, read: handle });
                self.reads.push(read.map(Result::ok).boxed());
            }
        }
    }

    /// A read ahead is under way.
    pub fn is_reading(&self) -> bool {
        !self.reads.is_empty()
    }

    /// Waits for one, if there is any. Cancel-safe.
    pub async fn completed(&mut self) {
        let Some(Some(answer)) = self.reads.next().await else { return };
        let number = answer.number;
        if let Some(round) = self.rounds.iter().find(|round| round.number == number) {
            self.notes.note_read(self.env.clock.elapsed(round.began));
        }
        self.rounds.retain(|round| round.number != number);
        self.arrived(answer);
    }

    /// Keeps what was found under prefixes that are still waited for, if it is all and not too much.
    fn arrived(&mut self, Answer { number, prefixes, found }: Answer) {
        self.budget.charge_bytes(found.as_ref().map_or(0, |found| batch_bytes(&found.values)));
        let room = self.room_bytes();
        let few = found.as_ref().map(|found| few_enough(found, prefixes.len(), room));
        let mut few = few.unwrap_or_default();
        few.retain(|&i| {
            let known = self.expected.get(prefixes.value(i as usize));
            known.is_some_and(|e| matches!(e.ahead, Ahead::Reading(of) if of == number))
        });
        // Of what is not kept nothing stays in memory.
        let found = match found {
            Some(found) if few.len() < prefixes.len() => of_strings(&found, &few).ok(),
            found => found,
        };
        let found = found.map(Arc::new);
        let bytes = found.as_ref().map_or(0, |found| batch_bytes(&found.values));
        let memory = Arc::new(HeldBytes::new(bytes, &self.held, &self.env));
        let counted = &self.env.metrics.lookahead;
        for (i, prefix) in (0u32..).zip(prefixes.iter().flatten()) {
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
            let (answer, _memory) = (Arc::clone(answer), Arc::clone(&memory));
            expected.ahead = Ahead::Here(Kept { answer, rows, _memory });
        }
    }

    /// A row asks for a prefix: all that is stored under it, if that was read ahead, as rows of an answer.
    pub fn take(&mut self, prefix: &[u8]) -> Option<(Arc<Found>, Range<usize>)> {
        let Expected { ahead, .. } = self.expected.remove(prefix)?;
        let counted = &self.env.metrics.lookahead;
        self.counts.used += 1;
        match ahead {
            Ahead::Reading(_) => {
                counted.late.add(1);
                self.counts.late += 1;
                None
            }
            Ahead::Here(Kept { answer, rows, .. }) => {
                counted.in_time.add(1);
                Some((answer, rows))
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
    pub fn note_read(&mut self, asked: Instant) {
        self.notes.note_read(self.env.clock.elapsed(asked));
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
            last = round.number;
        }
        if last == 0 {
            return;
        }
        let before = self.expected.len();
        self.expected.retain(|_, expected| match expected.ahead {
            Ahead::Reading(number) => number > last,
            Ahead::Here(_) => true,
        });
        self.env.metrics.lookahead.dropped.add((before - self.expected.len()) as u64);
    }
}
