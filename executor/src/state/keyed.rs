//! Keyed state: what an operator with state by key does with a chunk (docs/design.md §7), once for all of
//! them. What the entry of a key holds, how it is read and how large it is, is the operator's [`Entries`].
//!
//! A chunk's keys are probed in one pass. Rows whose state is in memory run; the others are parked, and
//! what they miss is asked for in one batched read. When an answer comes its entries are loaded and the rows
//! that waited for them run as one batch. Where every key that exists is in memory nothing is asked for. What hints
//! announce is read ahead of rows ([`hints`]).
//!
//! Invariants: a row is parked only while its key is being fetched; a key is fetched once at a time; entries
//! that are being fetched or read ahead, or are dirty, stay.

use arrow::array::{BinaryArray, UInt32Array};
use millrace_common::{DeltaChunk, Vnode};
use millrace_storage::{Found, Lookup};
use tokio::time::Instant;

use super::cache::Probe;
use super::due::DueMarks;
use super::gate::Ready;
use super::keys::{ChunkKeys, KeyReader, storage_keys};
use super::limits::Limits;
use super::prefetch_budget::PrefetchBudget;
use super::{Answers, Divide, KeyGate, KeyTable, Reads, Slot, Stamps};
use crate::error::ExecError;
use crate::lookahead::operator::{Activation, EpochReads};
use crate::lookahead::slack::EpochNotes;
use crate::operators::Env;

mod chains;
mod closed;
mod hints;
mod inside;
mod invariants;
mod notes;

use self::chains::Chains;
pub use self::chains::{Met, MostMet};
pub use self::inside::SeenInside;
pub use hints::{MAX_BYTES, MAX_KEYS_AHEAD, MAX_ROWS, few_enough};

/// State tables that one entry is read from at most.
pub const TABLES: usize = 2;

/// Which of its state tables an entry must still be read from.
pub type Missing = [bool; TABLES];

/// What an operator keeps for each key, in columns indexed by slot, and the state tables it comes from.
pub trait Entries {
    /// An entry may be resident without the rows of one of its tables; [`Entries::missing`] tells.
    const IS_PARTIAL: bool = false;

    /// Rows that need nothing of an entry may be written while it is read ahead: they are noted beside it, so that what
    /// comes is what was read and the rows noted since it was asked. Else such a row makes the read stale.
    const TAKES_NOTES: bool = false;

    /// Makes room for slots below `capacity`.
    fn ensure(&mut self, capacity: usize);

    /// What a row of this port and weight needs of an entry and is not in memory.
    fn missing(&self, slot: Slot, is_resident: bool, port: usize, weight: i64) -> Missing {
        let _ = (slot, port, weight);
        [!is_resident, false]
    }

    /// Reads a table's state of keys, given as storage keys.
    fn read(&self, table: usize, keys: BinaryArray) -> Lookup;

    /// [`Entries::read`] ahead of rows. Of an entry with this many rows in the table the rest need not be read: it is
    /// not kept.
    fn read_ahead(&self, table: usize, keys: BinaryArray, rows: usize) -> Lookup {
        let _ = rows;
        self.read(table, keys)
    }

    /// What is read ahead from a table for an entry will not be taken in: lets go of the rows noted meanwhile.
    fn forget_notes(&mut self, table: usize, slot: Slot) {
        let _ = (table, slot);
    }

    /// What was read ahead without the rows that the table's retention has dropped since.
    fn within_bound(&self, table: usize, found: Found) -> Result<Found, ExecError> {
        let _ = table;
        Ok(found)
    }

    /// Takes in what was read from a table for entries; one of which nothing was found has nothing there.
    fn load(&mut self, table: usize, slots: &[Slot], found: &Found) -> Result<(), ExecError>;

    /// Entries have all that was asked for: derives what follows from several tables.
    fn complete(&mut self, slots: &[Slot]) -> Result<(), ExecError> {
        let _ = slots;
        Ok(())
    }

    /// The rows that a row of this port meets under the keys of entries, as far as they are in memory and `most` allows.
    fn met(
        &self,
        port: usize,
        slots: &[Slot],
        most: &MostMet,
        columns: &[usize],
    ) -> Result<Met, ExecError> {
        let _ = (port, slots, most, columns);
        Ok(Met::default())
    }

    /// Nothing is stored for the key of an entry.
    fn absent(&mut self, slot: Slot);

    /// Bytes of an entry's content.
    fn size(&self, slot: Slot) -> usize;

    /// Lets go of an entry's content; whether the store may have something of its key.
    fn release(&mut self, slot: Slot) -> bool;

    /// Bytes held for all entries.
    fn held(&self, keys: &KeyTable) -> usize {
        keys.bytes()
    }

    /// All entries have left: gives back their places, too.
    fn give_back(&mut self) {}

    /// Entries have left: gives back what they shared with others.
    fn compact(&mut self, keys: &KeyTable) -> Result<(), ExecError> {
        let _ = keys;
        Ok(())
    }
}

/// A read from one table for these entries.
pub struct Request {
    table: usize,
    slots: Vec<Slot>,
    /// When it was asked; `None`: it was answered from memory.
    asked: Option<Instant>,
}

impl Divide for Request {
    fn divide(&self, asked: &[u32]) -> Request {
        let slots = asked.iter().map(|&i| self.slots[i as usize]).collect();
        Request { slots, ..*self }
    }
}

/// See the module.
pub struct KeyedState<E> {
    pub keys: KeyTable,
    pub entries: E,
    /// Of the keys of each port.
    readers: Vec<KeyReader>,
    gate: KeyGate,
    reads: Reads<Request>,
    /// Reads under way for each slot that rows wait for.
    outstanding: Vec<u8>,
    /// Entries that rows are expected for.
    due: DueMarks,
    budget: PrefetchBudget,
    /// Rows of hints that wait for entries.
    chains: Chains,
    activation: Activation,
    epoch_reads: EpochReads,
    notes: EpochNotes,
    stamps: Stamps,
    limits: Limits,
    /// Of a key column: keys below are never asked for again.
    closed: Option<(usize, i64)>,
    /// By port, in microseconds: rows of an earlier event time are late, or older than what is kept.
    floors: Vec<i64>,
    /// The last epoch that has ended.
    passed: u64,
    /// Keys below have left.
    swept: i64,
    /// Slots of a chunk that is done with.
    scratch: Vec<Slot>,
    /// Rows since the invariants were last checked.
    unchecked: usize,
    env: Env,
}

impl<E: Entries> KeyedState<E> {
    /// `readers`: of the keys of each port. `is_empty`: nothing is stored.
    pub fn new(entries: E, readers: Vec<KeyReader>, is_empty: bool, env: &Env) -> KeyedState<E> {
        env.metrics.lookahead.epochs.join();
        let mut state = KeyedState::inner(entries, readers, is_empty, env);
        if !is_empty && let Some(presence) = state.activation.begin() {
            state.keys.set_presence(presence);
        }
        state
    }

    /// State inside of an operator whose keyed state is another: that one decides whether hints are wanted, and this is
    /// [passed](Self::pass_inside) with it.
    pub fn inner(entries: E, readers: Vec<KeyReader>, is_empty: bool, env: &Env) -> KeyedState<E> {
        KeyedState {
            keys: KeyTable::new(env.options.eviction, is_empty),
            entries,
            floors: vec![i64::MIN; readers.len()],
            readers,
            gate: KeyGate::new(),
            reads: Reads::new(env.options.prefetch_window, &env.clock),
            outstanding: Vec::new(),
            due: DueMarks::default(),
            budget: PrefetchBudget::new(env.options.prefetch_requests, env.options.prefetch_bytes),
            chains: Chains::default(),
            activation: Activation::new(&env.lookahead, &env.governor, env.options.lookahead_value),
            epoch_reads: EpochReads::default(),
            notes: EpochNotes::default(),
            stamps: Stamps::new(&env.event_time),
            limits: Limits::new(env),
            closed: None,
            passed: env.restored.0.max(1),
            swept: i64::MIN,
            scratch: Vec::new(),
            unchecked: 0,
            env: env.clone(),
        }
    }

    pub fn reader(&self, port: usize) -> &KeyReader {
        &self.readers[port]
    }

    /// The slots of a chunk's keys, made where they are new.
    pub fn probe(
        &mut self,
        port: usize,
        chunk: &DeltaChunk,
    ) -> Result<(Vec<Slot>, Probe), ExecError> {
        self.note_rows(port);
        let keys = self.readers[port].read(&chunk.batch)?;
        let stamps = self.stamps.of(port, chunk);
        let mut slots = std::mem::take(&mut self.scratch);
        slots.reserve(chunk.num_rows());
        let probe = self.keys.probe(&keys, None, &stamps, &mut slots);
        self.grow();
        if !self.due.is_empty() {
            self.touch(port, &slots);
        }
        Ok((slots, probe))
    }

    /// The slot of one key; a known one keeps its stamp.
    pub fn slot(&mut self, hash: u64, vnode: Vnode, key: &[u8]) -> Slot {
        self.slot_used_at(hash, vnode, key, 0)
    }

    /// The slot of one key, which is used at the time of a stamp ([`KeyTable::stamp`] of what it belongs to).
    pub fn slot_used_at(&mut self, hash: u64, vnode: Vnode, key: &[u8], stamp: u64) -> Slot {
        let slot = self.keys.find_or_insert(hash, vnode, key, stamp);
        self.grow();
        slot
    }

    fn grow(&mut self) {
        if self.outstanding.len() < self.keys.capacity() {
            let capacity = self.keys.capacity().next_power_of_two();
            self.outstanding.resize(capacity, 0);
            self.entries.ensure(capacity);
        }
    }

    /// Gives back the slots of a chunk whose rows have run.
    pub fn recycle(&mut self, slots: Vec<Slot>) {
        self.scratch = slots;
    }

    /// Takes in a chunk: its rows that can run; the others are parked.
    pub fn admit(&mut self, port: usize, chunk: DeltaChunk) -> Result<Option<Ready>, ExecError> {
        let (slots, probe) = self.probe(port, &chunk)?;
        self.admit_slots(port, chunk, slots, probe)
    }

    /// [`KeyedState::admit`] for a chunk that has been probed.
    pub fn admit_slots(
        &mut self,
        port: usize,
        chunk: DeltaChunk,
        slots: Vec<Slot>,
        probe: Probe,
    ) -> Result<Option<Ready>, ExecError> {
        if probe == Probe::AllResident && !E::IS_PARTIAL {
            self.env.metrics.cache_hits.add(slots.len() as u64);
            self.unchecked += slots.len();
            return Ok(Some(Ready { port, chunk, slots }));
        }
        self.admit_probed(port, chunk, slots)
    }

    /// [`KeyedState::admit`] for a chunk whose rows have slots.
    pub fn admit_probed(
        &mut self,
        port: usize,
        chunk: DeltaChunk,
        slots: Vec<Slot>,
    ) -> Result<Option<Ready>, ExecError> {
        self.request(port, &slots, |row| chunk.weight(row))?;
        if !slots.iter().any(|&slot| self.keys.is_fetching(slot)) {
            return Ok(Some(Ready { port, chunk, slots }));
        }
        let (mut run, mut run_slots, mut park, mut park_slots) = (vec![], vec![], vec![], vec![]);
        for (row, &slot) in slots.iter().enumerate() {
            let waits = self.keys.is_fetching(slot);
            let (rows, row_slots) =
                if waits { (&mut park, &mut park_slots) } else { (&mut run, &mut run_slots) };
            rows.push(row as u32);
            row_slots.push(slot);
        }
        self.env.metrics.parked_rows.add(park.len() as u64);
        self.gate.park(port, &chunk, &park, &park_slots);
        self.limits.set_parked(self.gate.bytes());
        self.debug_check(slots.len());
        if run.is_empty() {
            return Ok(None);
        }
        let chunk = chunk.take(&UInt32Array::from(run))?;
        Ok(Some(Ready { port, chunk, slots: run_slots }))
    }

    /// Asks for what rows with these slots miss. `weight` is a row's. Afterwards each has all that it needs, or its
    /// entry is being fetched.
    pub fn request(
        &mut self,
        port: usize,
        slots: &[Slot],
        weight: impl Fn(usize) -> i64,
    ) -> Result<(), ExecError> {
        let (known, mut any_answered) = self.request_once(port, slots, &weight)?;
        self.env.metrics.cache_hits.add(known);
        // The first row of a key has asked for itself only: where it was answered at once, others may need more. (Rows
        // that are parked ask again when they are freed.) What is read ahead and was not asked for is overtaken now,
        // unless rows are noted beside it.
        while E::IS_PARTIAL && any_answered {
            (_, any_answered) = self.request_once(port, slots, &weight)?;
        }
        Ok(())
    }

    /// Asks in one round, for each key what its first row misses; how many rows miss nothing, and whether anything was
    /// answered at once.
    fn request_once(
        &mut self,
        port: usize,
        slots: &[Slot],
        weight: &impl Fn(usize) -> i64,
    ) -> Result<(u64, bool), ExecError> {
        let mut missing: [Vec<Slot>; TABLES] = Default::default();
        let mut known = 0;
        for (row, &slot) in slots.iter().enumerate() {
            if self.keys.is_fetching(slot) {
                continue;
            }
            let is_resident = self.keys.is_resident(slot);
            let tables = self.entries.missing(slot, is_resident, port, weight(row));
            if self.keys.is_prefetching(slot) {
                self.overtake(slot, tables);
            }
            if !is_resident && self.keys.is_complete() {
                self.entries.absent(slot);
                self.set_resident(slot);
                known += 1;
            } else if tables == Missing::default() {
                if !is_resident {
                    self.set_resident(slot);
                }
                known += 1;
            } else {
                for (of_table, _) in missing.iter_mut().zip(tables).filter(|(_, is)| *is) {
                    of_table.push(slot);
                    self.outstanding[slot as usize] += 1;
                }
                self.keys.set_fetching(slot);
            }
        }
        Ok((known, self.fetch(missing)?))
    }

    /// Whether anything was answered at once, and is loaded.
    fn fetch(&mut self, missing: [Vec<Slot>; TABLES]) -> Result<bool, ExecError> {
        let mut answered = Vec::new();
        for (table, slots) in missing.into_iter().enumerate().filter(|(_, m)| !m.is_empty()) {
            self.env.metrics.cache_misses.add(slots.len() as u64);
            let keys = storage_keys(slots.iter().map(|&s| (self.keys.vnode(s), self.keys.key(s))));
            let lookup = self.entries.read(table, keys);
            let lookup = lookup.counted(&self.env.metrics.lookahead.demand_requests);
            let asked = slots.len() as u64;
            let began = lookup.is_pending().then(|| self.env.clock.now());
            let request = Request { table, slots, asked: began };
            match self.reads.demand.submit_divided(request, lookup)? {
                Some(answer) => answered.push(answer),
                None => {
                    self.env.metrics.fetch_rounds.add(1);
                    self.env.metrics.lookahead.missed.add(asked);
                    self.epoch_reads.missed += asked;
                }
            }
        }
        let any_answered = !answered.is_empty();
        if any_answered {
            self.load(answered)?;
        }
        Ok(any_answered)
    }

    /// Takes in answers; the entries that have all that was asked for.
    fn load(&mut self, answers: Vec<(Request, Found)>) -> Result<Vec<Slot>, ExecError> {
        let mut complete = Vec::new();
        for (Request { table, slots, asked }, found) in answers {
            asked.into_iter().for_each(|asked| self.note_wait(asked));
            self.entries.load(table, &slots, &found)?;
            for slot in slots {
                let outstanding = &mut self.outstanding[slot as usize];
                *outstanding -= 1;
                if *outstanding == 0 {
                    complete.push(slot);
                }
            }
        }
        self.entries.complete(&complete)?;
        for &slot in &complete {
            self.set_resident(slot);
        }
        self.follow(&complete);
        Ok(complete)
    }

    fn set_resident(&mut self, slot: Slot) {
        self.keys.set_resident(slot);
        self.resize(slot);
        if self.keys.presence().is_some() {
            (0..self.readers.len()).for_each(|port| self.note_present(slot, port));
        }
    }

    /// The content of an entry has changed.
    pub fn resize(&mut self, slot: Slot) {
        self.keys.set_size(slot, self.entries.size(slot));
    }

    /// Waits for answers; the rows they free. Cancel-safe; empty when nothing is under way.
    pub async fn completed(&mut self) -> Result<Vec<Ready>, ExecError> {
        let answers = self.reads.completed().await?;
        self.take_in(answers)
    }

    /// Takes in answers; the rows they free.
    pub fn take_in(&mut self, answers: Answers<Request>) -> Result<Vec<Ready>, ExecError> {
        let slots = self.load_all(answers)?;
        let rows = slots.len();
        let ready = self.gate.take(slots);
        self.limits.set_parked(self.gate.bytes());
        self.debug_check(rows);
        ready
    }

    /// Takes in answers; the entries that rows have waited for and that have all that was asked for.
    fn load_all(&mut self, answers: Answers<Request>) -> Result<Vec<Slot>, ExecError> {
        self.load_ahead(answers.ahead)?;
        if answers.is_collected {
            self.ask_collected()?;
        }
        self.load(answers.demand)
    }

    /// The reads under way, the entries and their keys, for an operator that waits for other reads too.
    pub fn parts(&mut self) -> (&mut Reads<Request>, &mut E, &KeyTable) {
        (&mut self.reads, &mut self.entries, &self.keys)
    }

    /// [`KeyedState::completed`] where nothing is parked: the entries that are here now.
    pub async fn arrived(&mut self) -> Result<Vec<Slot>, ExecError> {
        let answers = self.reads.completed().await?;
        self.load_all(answers)
    }

    /// Reads are under way that rows wait for.
    pub fn is_fetching(&self) -> bool {
        !self.reads.demand.is_empty()
    }

    /// How many.
    pub fn reads(&self) -> usize {
        self.reads.demand.len()
    }

    /// Nothing is parked and no read is under way that rows wait for, as at a barrier.
    pub fn is_settled(&self) -> bool {
        self.gate.is_empty() && !self.is_fetching()
    }

    /// Invariant at a barrier: nothing is parked or being read for rows, here or (`others`) in the operator's other reads.
    /// Rows that were still parked would be lost.
    pub fn check_settled(&mut self, others: bool) -> Result<(), ExecError> {
        self.debug_check(0);
        if self.is_settled() && others {
            return Ok(());
        }
        Err(ExecError::internal("rows are still waiting for state at a barrier"))
    }

    /// Whether to stop pulling input.
    pub fn is_full(&self) -> bool {
        self.is_full_beside(false)
    }

    /// [`KeyedState::is_full`] of an operator that may have other reads under way.
    pub fn is_full_beside(&self, others: bool) -> bool {
        self.limits.is_full(&self.env, &self.gate, !self.is_fetching() && !others)
    }

    /// Bytes held for all entries.
    pub fn held(&self) -> usize {
        self.entries.held(&self.keys)
    }

    /// Bytes of chunks that have parked rows.
    pub fn parked_bytes(&self) -> usize {
        self.gate.bytes()
    }

    /// Whether entries must leave, now that rows have used them.
    pub fn is_over(&mut self) -> bool {
        let held = self.held();
        let budget = self.limits.cache_budget(&self.env, held, true);
        self.limits.is_over(held, budget)
    }

    /// Lets go of what an unused cache may not keep; of places, too, if that is all. Not while slots are referred to.
    pub fn shed(&mut self) -> Result<(), ExecError> {
        let held = self.held();
        let budget = self.limits.cache_budget(&self.env, held, false);
        if self.limits.is_over(held, budget) {
            self.evict()?;
        }
        let is_free = self.is_settled() && !self.is_prefetching() && self.due.is_empty();
        if is_free && self.keys.give_back() {
            (self.outstanding, self.scratch) = Default::default();
            self.entries.give_back();
            self.limits.evicted(self.held(), usize::MAX);
        }
        Ok(())
    }

    /// Entries that are not pinned leave, oldest first, until what is held is within the budget.
    pub fn evict(&mut self) -> Result<(), ExecError> {
        let held = self.held();
        let budget = self.limits.cache_budget(&self.env, held, false);
        let (bytes, keep) = (self.keys.bytes(), budget - budget / 8);
        let target = match bytes.checked_sub(held) {
            // Entries that cannot leave are not in `held`.
            Some(stay) => stay + keep,
            // Bytes by key do not count waste: the target is scaled by what is really held.
            None => (bytes as f64 * keep as f64 / held as f64) as usize,
        };
        let KeyedState { keys, entries, due, epoch_reads, env, .. } = &mut *self;
        let epoch = |due: &DueMarks, slot: Slot| due.epoch(slot);
        let release = |due: &mut DueMarks, slot: Slot| {
            if due.take(slot).is_some_and(|mark| mark.is_read) {
                epoch_reads.unused += 1;
                env.metrics.lookahead.unused.add(1);
            }
            entries.release(slot)
        };
        let evicted = keys.evict(target, due, epoch, release);
        self.debug_check(evicted * 16);
        self.entries.compact(&self.keys)?;
        let held = self.held();
        self.limits.evicted(held, budget);
        Ok(())
    }

    /// Gives back what is wasted; see [`Entries::compact`].
    pub fn compact(&mut self) -> Result<(), ExecError> {
        self.entries.compact(&self.keys)
    }

    /// Bytes that the last eviction had to leave; 0: all there is can be evicted.
    pub fn pinned(&self) -> usize {
        self.limits.pinned()
    }

    /// Nothing is pinned any more.
    pub fn unpin(&mut self) {
        self.limits.unpinned();
    }

    /// An entry leaves, whatever it holds; what is stored of it is not asked for again.
    pub fn remove(&mut self, slot: Slot) {
        (0..TABLES).for_each(|table| self.abandon_ahead(slot, table));
        self.due.take(slot);
        self.entries.release(slot);
        self.keys.remove(slot);
    }
}
