//! A state table in memory whose reads complete when the test's scheduler says so, in any order.

use std::collections::BTreeMap;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};

use arrow::array::{Array, BinaryArray, Int64Array, RecordBatch, UInt32Array};
use arrow::datatypes::SchemaRef;
use futures::{StreamExt, stream};
use millrace_rpc::catalog::RowStorage;
use millrace_storage::cache::Priority;
use millrace_storage::{Found, Lookup, MemRun, Part, ReadClass, Reading, StorageError};
use parking_lot::Mutex;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tokio::sync::oneshot;

use crate::error::ExecError;
use crate::state::StateTable;
use crate::state::arena::gather_batch;
use crate::state::delayed::cut_at;

/// How many reads are answered at once where only some are delayed.
const AT_ONCE: f64 = 0.2;

type Entries = BTreeMap<Vec<u8>, (i64, RecordBatch)>;

/// What all readers and writers of one table share; survives the operator.
#[derive(Clone)]
pub struct FakeTable {
    pub schema: SchemaRef,
    storage: RowStorage,
    entries: Arc<Mutex<Entries>>,
    delays: Arc<Mutex<Option<StdRng>>>,
    /// Of the reads that may be delayed some are not.
    finds_some: bool,
    /// Reads complete when this has moved on.
    turn: Option<Arc<AtomicUsize>>,
    /// Reads complete when the test says so.
    held: Option<Arc<Mutex<Vec<HeldRead>>>>,
    /// Not 0: these come in parts, see [`cut_at`], each of which completes by itself.
    cut: usize,
    pub rounds: Arc<Mutex<usize>>,
    /// Rows in all answers.
    pub rows_read: Arc<Mutex<usize>>,
}

impl FakeTable {
    /// `delay`: reads take a random number of polls; otherwise all are answered at once.
    pub fn new(schema: SchemaRef, storage: RowStorage, delay: Option<u64>) -> FakeTable {
        FakeTable {
            schema,
            storage,
            entries: Arc::default(),
            delays: Arc::new(Mutex::new(delay.map(StdRng::seed_from_u64))),
            finds_some: false,
            turn: None,
            held: None,
            cut: 0,
            rounds: Arc::default(),
            rows_read: Arc::default(),
        }
    }

    /// The same table, which finds in memory what some of the reads ask for that would be delayed.
    pub fn finding_some(self) -> FakeTable {
        FakeTable { finds_some: true, ..self }
    }

    /// Reads complete in the turn after the one in which they were asked for.
    pub fn in_turns(schema: SchemaRef, storage: RowStorage, turn: Arc<AtomicUsize>) -> FakeTable {
        FakeTable { turn: Some(turn), ..FakeTable::new(schema, storage, None) }
    }

    /// Reads complete by [`FakeTable::answer_one`] and [`FakeTable::fail_one`].
    pub fn held(schema: SchemaRef, storage: RowStorage) -> FakeTable {
        FakeTable { held: Some(Arc::default()), ..FakeTable::new(schema, storage, None) }
    }

    /// The same table, each of whose reads completes in two parts, when the test says so.
    pub fn held_in_parts(self) -> FakeTable {
        FakeTable { held: Some(Arc::default()), cut: 1, ..self }
    }

    /// Nothing is stored, and nothing is read.
    pub fn clear(&self) {
        self.entries.lock().clear();
        self.held.iter().for_each(|held| held.lock().clear());
    }

    /// The same table, whose reads are answered at once.
    pub fn answered(&self) -> FakeTable {
        FakeTable { held: None, ..self.clone() }
    }

    /// Lets one read complete, of those of a class the first or the last; whether there was one.
    pub fn answer_one(&self, ahead: bool, is_last: bool) -> bool {
        self.take_held(ahead, is_last).is_some_and(|read| read.done.send(None).is_ok())
    }

    /// Lets the first read ahead of rows fail.
    pub fn fail_one(&self) -> bool {
        let failed = Some(StorageError::internal("a read that fails"));
        self.take_held(true, false).is_some_and(|read| read.done.send(failed).is_ok())
    }

    fn take_held(&self, ahead: bool, is_last: bool) -> Option<HeldRead> {
        let mut held = self.held.as_ref()?.lock();
        // Of reads that were given up nobody waits.
        held.retain(|read| !read.done.is_closed());
        let of_class = |read: &HeldRead| (read.class.get().priority == Priority::Prefetch) == ahead;
        let at =
            if is_last { held.iter().rposition(of_class) } else { held.iter().position(of_class) };
        at.map(|at| held.remove(at))
    }

    /// The classes of reads that have not completed.
    pub fn classes(&self) -> Vec<Priority> {
        let held = self.held.iter().flat_map(|held| {
            let held = held.lock();
            held.iter().map(|read| read.class.get().priority).collect::<Vec<_>>()
        });
        held.collect()
    }

    /// Reads that have not completed.
    pub fn waiting(&self) -> usize {
        let held = self.held.as_ref().map(|held| held.lock());
        held.map_or(0, |held| held.iter().filter(|read| !read.done.is_closed()).count())
    }

    pub fn len(&self) -> usize {
        self.entries.lock().values().filter(|e| e.0 > 0).count()
    }

    fn answer(&self, found: Vec<(u32, Vec<u8>, i64, RecordBatch)>, asked: usize) -> Lookup {
        *self.rounds.lock() += 1;
        *self.rows_read.lock() += found.len();
        let batches: Vec<&RecordBatch> = found.iter().map(|f| &f.3).collect();
        let picks: Vec<(usize, usize)> = (0..found.len()).map(|i| (i, 0)).collect();
        let values = gather_batch(&self.schema, &batches, &picks).unwrap();
        let answer = Found {
            input: UInt32Array::from_iter_values(found.iter().map(|f| f.0)),
            keys: BinaryArray::from_iter_values(found.iter().map(|f| &f.1)),
            weights: Int64Array::from_iter_values(found.iter().map(|f| f.2)),
            values,
        };
        if let Some(turn) = &self.turn {
            let turn = Arc::clone(turn);
            let asked_in = turn.load(Ordering::Relaxed);
            let part = Part::whole(answer, asked);
            let next = Box::pin(async move {
                poll_fn(|cx| {
                    cx.waker().wake_by_ref();
                    if turn.load(Ordering::Relaxed) > asked_in {
                        Poll::Ready(())
                    } else {
                        Poll::Pending
                    }
                })
                .await;
                Ok::<_, StorageError>(part)
            });
            return Lookup::Pending(Reading::new(stream::once(next).boxed()));
        }
        if let Some(held) = &self.held {
            let parts = match self.cut {
                0 => vec![Part::whole(answer, asked)],
                cut => cut_at(&answer, cut, asked).unwrap(),
            };
            let mut done = Vec::new();
            let parts: Vec<_> = parts
                .into_iter()
                .map(|part| {
                    let (send, wait) = oneshot::channel::<Option<StorageError>>();
                    done.push(send);
                    (part, wait)
                })
                .collect();
            let parts = stream::iter(parts).then(|(part, wait)| async move {
                match wait.await {
                    Ok(None) => Ok(part),
                    Ok(Some(e)) => Err(e),
                    Err(_) => std::future::pending().await,
                }
            });
            let reading = Reading::new(parts.boxed());
            let read = |done| HeldRead { class: reading.class(), done };
            held.lock().extend(done.into_iter().map(read));
            return Lookup::Pending(reading);
        }
        match &mut *self.delays.lock() {
            None => Lookup::Ready(answer),
            Some(rng) => {
                if self.finds_some && rng.random_bool(AT_ONCE) {
                    return Lookup::Ready(answer);
                }
                let cut = rng.random_range(0..asked.max(1));
                let parts = match cut {
                    0 => vec![Part::whole(answer, asked)],
                    _ => cut_at(&answer, cut, asked).unwrap(),
                };
                let delayed = |part| Delayed { polls: rng.random_range(0..6), part: Some(part) };
                let parts: Vec<Delayed> = parts.into_iter().map(delayed).collect();
                Lookup::Pending(Reading::new(stream::iter(parts).then(|part| part).boxed()))
            }
        }
    }
}

/// A read that waits for the test. Its class is set after it was asked for.
struct HeldRead {
    class: ReadClass,
    done: oneshot::Sender<Option<StorageError>>,
}

struct Delayed {
    polls: usize,
    part: Option<Part>,
}

impl Future for Delayed {
    type Output = Result<Part, StorageError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if self.polls > 0 {
            self.polls -= 1;
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        Poll::Ready(Ok(self.part.take().expect("polled after completion")))
    }
}

impl StateTable for FakeTable {
    fn write(
        &mut self,
        keys: BinaryArray,
        weights: Option<Int64Array>,
        values: RecordBatch,
    ) -> Result<(), ExecError> {
        assert_eq!(keys.len(), values.num_rows());
        assert_eq!(values.num_columns(), self.schema.fields().len());
        let mut entries = self.entries.lock();
        for i in 0..keys.len() {
            let weight = weights.as_ref().map_or(1, |w| w.value(i));
            let key = keys.value(i).to_vec();
            let row = values.slice(i, 1);
            match self.storage {
                RowStorage::Multiset => {
                    let entry = entries.entry(key.clone()).or_insert((0, row));
                    entry.0 += weight;
                    if entry.0 == 0 {
                        entries.remove(&key);
                    }
                }
                RowStorage::Keyed if weight <= 0 => drop(entries.remove(&key)),
                RowStorage::Keyed => drop(entries.insert(key, (weight, row))),
                RowStorage::Append => {
                    assert!(weight == 1 && entries.insert(key, (1, row)).is_none());
                }
            }
        }
        Ok(())
    }

    fn multi_get(&self, keys: BinaryArray) -> Lookup {
        let entries = self.entries.lock();
        let mut found = Vec::new();
        for (i, key) in keys.iter().enumerate() {
            let key = key.unwrap();
            if let Some((weight, row)) = entries.get(key).filter(|e| e.0 > 0) {
                found.push((i as u32, key.to_vec(), *weight, row.clone()));
            }
        }
        self.answer(found, keys.len())
    }

    fn multi_scan(&self, prefixes: BinaryArray, limit: Option<usize>) -> Lookup {
        let entries = self.entries.lock();
        let mut found = Vec::new();
        for (i, prefix) in prefixes.iter().enumerate() {
            let prefix = prefix.unwrap();
            let rows = entries
                .range(prefix.to_vec()..)
                .take_while(|(k, _)| k.starts_with(prefix))
                .filter(|(_, e)| e.0 > 0)
                .take(limit.unwrap_or(usize::MAX));
            for (key, (weight, row)) in rows {
                found.push((i as u32, key.clone(), *weight, row.clone()));
            }
        }
        self.answer(found, prefixes.len())
    }

    fn multi_range(&self, starts: BinaryArray, ends: BinaryArray, limit: Option<usize>) -> Lookup {
        let entries = self.entries.lock();
        let mut found = Vec::new();
        for i in 0..starts.len() {
            let rows = entries
                .range(starts.value(i).to_vec()..ends.value(i).to_vec())
                .filter(|(_, e)| e.0 > 0)
                .take(limit.unwrap_or(usize::MAX));
            for (key, (weight, row)) in rows {
                found.push((i as u32, key.clone(), *weight, row.clone()));
            }
        }
        self.answer(found, starts.len())
    }

    fn seal(&mut self) -> Result<Vec<MemRun>, ExecError> {
        assert!(self.entries.lock().values().all(|e| e.0 > 0), "negative weights at a barrier");
        Ok(Vec::new())
    }

    fn value_schema(&self) -> SchemaRef {
        Arc::clone(&self.schema)
    }

    /// Delayed tables never claim to be empty, so that their reads are exercised.
    fn is_empty(&self) -> bool {
        self.turn.is_none()
            && self.held.is_none()
            && self.delays.lock().is_none()
            && self.entries.lock().is_empty()
    }
}
