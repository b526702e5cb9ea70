//! Keyed state: rows wait for their keys only, in order; hints change no result.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use arrow::array::{ArrayRef, AsArray, BinaryArray, Int64Array, RecordBatch, StringArray};
use arrow::datatypes::{DataType, Field, Int64Type, Schema};
use futures::FutureExt;
use futures::executor::block_on;
use millrace_common::keys::columns_at;
use millrace_common::{DeltaChunk, EnvHandle, Epoch};
use millrace_rpc::catalog::RowStorage;
use millrace_storage::{Found, Lookup};
use rand::Rng;

use super::fake::FakeTable;
use super::history::{Row, chunk, schema};
use super::model::PLANTED;
use super::seeded;
use crate::error::ExecError;
use crate::error_sink::ErrorSink;
use crate::lookahead::chain::{Carried, chain_to};
use crate::lookahead::operator::OperatorLookahead;
use crate::lookahead::{Due, HINT_KEYS, Hint, HintTimes};
use crate::memory::{MemoryClass, MemoryGovernor};
use crate::operators::Env;
use crate::options::{Eviction, ExecOptions};
use crate::state::fetch::wait;
use crate::state::gate::Ready;
use crate::state::keyed::Missing;
use crate::state::keys::{KeyReader, storage_keys};
use crate::state::{Entries, KeyedState, Slot, StateTable};
use crate::stats::OperatorMetrics;

const ENTRY: usize = 64;
/// The column that is said to tell event times. Its type tells none: only hints bring them.
pub(super) const EVENT_TIME: usize = 1;

/// How many rows each key has had.
pub(super) struct Counts {
    table: FakeTable,
    of: Vec<i64>,
    /// Rows need nothing of their keys' entries.
    pub is_free: bool,
}

impl Entries for Counts {
    fn ensure(&mut self, capacity: usize) {
        self.of.resize(capacity, 0);
    }

    fn missing(&self, _: Slot, is_resident: bool, _: usize, _: i64) -> Missing {
        [!is_resident && !self.is_free, false]
    }

    fn read(&self, _: usize, keys: BinaryArray) -> Lookup {
        self.table.multi_get(keys)
    }

    fn load(&mut self, _: usize, slots: &[Slot], found: &Found) -> Result<(), ExecError> {
        slots.iter().for_each(|&slot| self.absent(slot));
        let counts = found.values.column(0).as_primitive::<Int64Type>();
        for (row, &input) in found.input.values().iter().enumerate() {
            self.of[slots[input as usize] as usize] = counts.value(row);
        }
        Ok(())
    }

    fn absent(&mut self, slot: Slot) {
        self.of[slot as usize] = 0;
    }

    fn size(&self, _: Slot) -> usize {
        ENTRY
    }

    fn release(&mut self, slot: Slot) -> bool {
        self.of[slot as usize] != 0
    }
}

/// Counts the rows of keys, as an operator would.
pub(super) struct Counter {
    pub state: KeyedState<Counts>,
    pub metrics: Arc<OperatorMetrics>,
    pub lookahead: Arc<OperatorLookahead>,
    /// Ids of the rows that have run.
    pub ran: Vec<i64>,
}

impl Counter {
    /// It asks for announced keys at once.
    pub fn new(table: &FakeTable, options: ExecOptions) -> Counter {
        Counter::collecting(table, ExecOptions { prefetch_window: Duration::ZERO, ..options })
    }

    /// It collects announced keys as long as the options say.
    pub fn collecting(table: &FakeTable, options: ExecOptions) -> Counter {
        let metrics = OperatorMetrics::new(0, 0, "test");
        let lookahead = OperatorLookahead::new(&Arc::default());
        let env = Env {
            options: Arc::new(options),
            errors: Arc::new(ErrorSink::default()),
            metrics: Arc::clone(&metrics),
            clock: EnvHandle::default(),
            governor: MemoryGovernor::new(1 << 30),
            lookahead: Arc::clone(&lookahead),
            shed: Arc::default(),
            vnodes: 0..256,
            restored: Epoch::ZERO,
            first_arrival: 0,
            event_time: vec![Some(EVENT_TIME)],
        };
        let entries = Counts { table: table.clone(), of: Vec::new(), is_free: false };
        let reader = KeyReader::new(&schema(), &[0], &[]).unwrap();
        let state = KeyedState::new(entries, vec![reader], table.is_empty(), &env);
        Counter { state, metrics, lookahead, ran: Vec::new() }
    }

    pub fn run(&mut self, Ready { chunk, slots, .. }: Ready) {
        let ids = chunk.batch.column(3).as_primitive::<Int64Type>();
        for (row, &slot) in slots.iter().enumerate() {
            self.state.keys.mark_dirty(slot);
            self.state.entries.of[slot as usize] += 1;
            self.ran.push(ids.value(row));
        }
    }

    pub fn push(&mut self, chunk: DeltaChunk) {
        if let Some(ready) = self.state.admit(0, chunk).unwrap() {
            self.run(ready);
        }
    }

    pub fn progress(&mut self) {
        let ready = block_on(self.state.completed()).unwrap();
        ready.into_iter().for_each(|ready| self.run(ready));
    }

    /// Goes on without waiting.
    pub fn turn(&mut self) {
        let Some(ready) = self.state.completed().now_or_never() else { return };
        ready.unwrap().into_iter().for_each(|ready| self.run(ready));
    }

    pub fn settle(&mut self) {
        while self.state.is_fetching() {
            self.progress();
        }
        assert!(self.state.is_settled());
    }

    pub fn hint(&mut self, keys: &[i64], event_time: i64) {
        self.announce(keys, vec![event_time; keys.len()], &Due::default());
    }

    /// Of rows without an event time.
    pub fn hint_due(&mut self, keys: &[i64], due: &Due) {
        self.announce(keys, Vec::new(), due);
    }

    fn announce(&mut self, keys: &[i64], times: Vec<i64>, due: &Due) {
        let chunk = rows(keys.iter().map(|&key| (key, 0)));
        let (columns, times) = (columns_at(&chunk.batch, &[0]), HintTimes::of(&times));
        let hint = Hint { node: 0, port: 0, columns, times, due: due.clone(), carried: None };
        self.state.hint(0, &hint).unwrap();
    }

    pub fn write(&mut self) {
        let dirty = self.state.keys.take_dirty();
        let of_slot = |&s: &Slot| (self.state.keys.vnode(s), self.state.keys.key(s));
        let keys = storage_keys(dirty.iter().map(of_slot));
        let counts = dirty.iter().map(|&s| self.state.entries.of[s as usize]);
        let values = counts_batch(counts.collect());
        self.state.entries.table.write(keys, None, values).unwrap();
    }

    pub fn make_room(&mut self) {
        if self.state.is_over() {
            self.write();
            self.state.evict().unwrap();
        }
    }

    pub fn is_resident(&mut self, key: i64) -> bool {
        let chunk = rows([(key, 0)].into_iter());
        let (slots, _) = self.state.probe(0, &chunk).unwrap();
        self.state.keys.is_resident(slots[0])
    }
}

pub(super) fn counts_batch(counts: Vec<i64>) -> RecordBatch {
    let schema = Schema::new(vec![Field::new("n", DataType::Int64, true)]);
    RecordBatch::try_new(Arc::new(schema), vec![Arc::new(Int64Array::from(counts))]).unwrap()
}

/// Rows of (key, id).
pub(super) fn rows(of: impl Iterator<Item = (i64, i64)>) -> DeltaChunk {
    let row = |(key, id)| -> (Row, i64) { ((Some(key), None, None, id), 1) };
    chunk(&of.map(row).collect::<Vec<_>>())
}

pub(super) fn table(delay: Option<u64>) -> FakeTable {
    FakeTable::new(counts_batch(Vec::new()).schema(), RowStorage::Keyed, delay)
}

/// What is stored for keys `0..keys`.
pub(super) fn stored(table: &FakeTable, keys: i64) -> BTreeMap<i64, i64> {
    let reader = KeyReader::new(&schema(), &[0], &[]).unwrap();
    let read = reader.read(&rows((0..keys).map(|key| (key, 0))).batch).unwrap();
    let asked = storage_keys((0..keys as usize).map(|row| (read.vnode(row), read.key(row))));
    let found = block_on(wait(table.multi_get(asked))).unwrap();
    let counts = found.values.column(0).as_primitive::<Int64Type>();
    let count = |(row, &input): (usize, &u32)| (i64::from(input), counts.value(row));
    found.input.values().iter().enumerate().map(count).collect()
}

#[test]
fn rows_wait_for_their_own_keys_only_and_in_order() {
    for seed in 0..20 {
        let table = table(Some(seed));
        let mut counter = Counter::new(&table, ExecOptions::default());
        counter.push(rows([(7, 0)].into_iter()));
        counter.settle();
        assert_eq!(counter.ran, [0]);
        counter.push(rows([(1, 1), (7, 2), (2, 3), (1, 4)].into_iter()));
        assert_eq!(counter.ran, [0, 2], "a row of a key in memory runs at once");
        counter.push(rows([(1, 5), (2, 6)].into_iter()));
        counter.settle();
        let place = |id: i64| counter.ran.iter().position(|ran| *ran == id).unwrap();
        assert!(place(1) < place(4) && place(4) < place(5) && place(3) < place(6));
        assert_eq!(counter.ran.len(), 7);
        assert_eq!(*table.rounds.lock(), 2, "keys being read are not asked for again");
    }
}

#[test]
fn nothing_is_read_while_every_key_is_in_memory() {
    let table = table(None);
    let mut counter = Counter::new(&table, ExecOptions::default());
    counter.hint(&[1, 2], 1);
    counter.push(rows([(1, 0), (3, 1)].into_iter()));
    counter.push(rows([(3, 2)].into_iter()));
    assert_eq!(counter.ran, [0, 1, 2]);
    assert_eq!((*table.rounds.lock(), counter.metrics.cache_misses.get()), (0, 0));
}

#[test]
fn hints_that_are_early_late_doubled_or_wrong_change_no_result() {
    let _unplanted = PLANTED.read();
    for (seed, ref mut rng) in seeded(200, 2000) {
        let table = table(rng.random_bool(0.8).then_some(seed));
        let options = ExecOptions {
            cache_bytes: rng.random_range(1..3_000),
            eviction: [Eviction::Timestamp, Eviction::Lru, Eviction::Clock][rng.random_range(0..3)],
            ..ExecOptions::default()
        };
        let mut expected: BTreeMap<i64, i64> = BTreeMap::new();
        let mut counter = match seed % 2 {
            0 => Counter::new(&table, options),
            _ => Counter::collecting(&table, options),
        };
        for epoch in 2..rng.random_range(3..7) {
            for _ in 0..rng.random_range(1..15) {
                if rng.random_bool(0.6) {
                    let keys: Vec<i64> = (0..6).map(|_| rng.random_range(0..40)).collect();
                    counter.hint(&keys, rng.random_range(0..100));
                }
                let keys: Vec<i64> = (0..5).map(|_| rng.random_range(0..30)).collect();
                keys.iter().for_each(|key| *expected.entry(*key).or_default() += 1);
                counter.push(rows(keys.into_iter().map(|key| (key, 0))));
                let is_reading = counter.state.is_fetching() || counter.state.is_prefetching();
                if is_reading && rng.random_bool(0.4) {
                    counter.progress();
                }
                counter.make_room();
            }
            counter.settle();
            counter.state.pass(Epoch(epoch));
            counter.write();
            counter.state.unpin();
            counter.make_room();
            assert_eq!(stored(&table, 40), expected, "seed {seed}");
        }
    }
}

#[test]
fn broken_keyed_state_is_noticed() {
    let table = table(Some(1));
    let mut counter = Counter::new(&table, ExecOptions::default());
    counter.push(rows([(1, 1), (2, 2)].into_iter()));
    counter.state.check_invariants().unwrap();
    let fetched: Vec<Slot> = counter.state.keys.slots().collect();
    counter.state.keys.set_resident(fetched[0]);
    let broken = counter.state.check_invariants().unwrap_err();
    assert!(broken.contains("which nothing fetches"), "{broken}");
    counter.state.keys.set_fetching(fetched[0]);
    counter.settle();
    counter.state.check_invariants().unwrap();
    counter.state.keys.set_fetching(fetched[1]);
    let broken = counter.state.check_invariants().unwrap_err();
    assert!(broken.contains("waits for 0 answers"), "{broken}");
}

#[test]
fn hints_that_are_none_of_the_operators_are_dropped() {
    let table = FakeTable::held(counts_batch(Vec::new()).schema(), RowStorage::Keyed);
    let mut counter = Counter::new(&table, ExecOptions::default());
    counter.push(rows([(1, 0)].into_iter()));
    let ints = |keys: i64| -> ArrayRef { Arc::new(Int64Array::from_iter_values(0..keys)) };
    let texts: ArrayRef = Arc::new(StringArray::from(vec!["1", "2"]));
    let narrow: ArrayRef = Arc::new(arrow::array::Int32Array::from(vec![1, 2]));
    let hint = |columns: Vec<ArrayRef>| {
        let (times, due) = (HintTimes::None, Due::default());
        Hint { node: 0, port: 0, columns, times, due, carried: None }
    };
    let timed = |times| Hint { times, ..hint(vec![ints(2)]) };
    let carried = Carried {
        chain: chain_to(Vec::new()),
        columns: vec![ints(1)],
        due: Due::default(),
        is_alone: false,
        account: MemoryGovernor::new(1 << 20).account(MemoryClass::Channel),
    };
    let mut dropped = 0;
    let mut refuse = |port, wrong: Hint, keys: u64| {
        counter.state.hint(port, &wrong).unwrap();
        dropped += keys;
        let counted = counter.metrics.lookahead.read();
        assert_eq!((counted.dropped, counted.hinted, counted.prefetched), (dropped, 0, 0));
    };
    refuse(0, hint(Vec::new()), 1);
    refuse(0, hint(vec![ints(0)]), 1);
    refuse(0, hint(vec![ints(2), ints(2)]), 2);
    refuse(0, hint(vec![ints(2), ints(3)]), 2);
    refuse(0, hint(vec![texts]), 2);
    refuse(0, hint(vec![narrow]), 2);
    refuse(0, hint(vec![ints(HINT_KEYS as i64 + 1)]), HINT_KEYS as u64 + 1);
    refuse(0, timed(HintTimes::of(&[1, 2, 3])), 2);
    refuse(0, timed(HintTimes::OfKey(0)), 2);
    refuse(0, timed(HintTimes::OfKey(7)), 2);
    refuse(0, Hint { carried: Some(Arc::new(carried)), ..hint(vec![ints(2)]) }, 2);
    refuse(1, hint(vec![ints(2)]), 2);
    // One of as many as there may be is taken in, and the row finds its state.
    counter.state.hint(0, &hint(vec![ints(HINT_KEYS as i64)])).unwrap();
    assert_eq!(counter.metrics.lookahead.hinted.get(), HINT_KEYS as u64);
    while table.answer_one(false, false) || table.answer_one(true, false) {
        counter.turn();
    }
    counter.settle();
    assert_eq!(counter.ran, [0]);
}
