//! The value tables of one aggregate and the reads of them under way.
//!
//! Reads go out when rows arrive, a chunk's together: the counts of DISTINCT values that are not in memory, and
//! the best values of groups whose MIN or MAX a retraction may have taken away. The counts are read ahead of rows that
//! hints announce; what a retraction may take away is known only with the row. Nothing is written to a value table
//! before the barrier, so such a read finds what there was when the epoch began, whenever it is answered, and each is
//! made once an epoch. What then remains (beyond the bounds, or known only when all of the epoch's changes
//! are) is asked of all tables together at the barrier, in one round.
//!
//! An epoch with too many changes is settled in parts, while no read is under way: then the table is what the
//! rest of the epoch begins with. Only changes that leave no value with a negative count are made before the
//! barrier, because a read does not show such a count.

use std::sync::Arc;

use arrow::buffer::BooleanBuffer;
use arrow::datatypes::SchemaRef;
use futures::future::{BoxFuture, select_all};
use futures::{FutureExt, TryFutureExt};
use millrace_common::collections::{HashMap, HashSet};
use millrace_common::{DeltaChunk, Epoch};
use millrace_functions::aggregate_kind::AggFunc;
use millrace_graph::Aggregate;
use millrace_storage::{Found, Lookup, MemRun};

use super::accumulator::{Accumulator, Rows};
use super::values::{Request, ValueTable};
use crate::error::ExecError;
use crate::error_sink::ErrorSink;
use crate::lookahead::Hint;
use crate::lookahead::presence::Presence;
use crate::operators::Env;
use crate::state::keyed::SeenInside;
use crate::state::{Fetches, KeyTable, Slot, StateTable};

/// Reads under way before the barrier, at most.
const EARLY_READS: usize = 64;
/// Bytes of keys they ask for, at most.
const EARLY_BYTES: usize = 4 << 20;

/// A request that is under way, or answered from memory.
pub struct Question {
    pub request: Request,
    pub lookup: Lookup,
    /// Of the keys asked for.
    pub bytes: usize,
}

/// What was asked of which table.
struct Asked {
    table: usize,
    request: Request,
    bytes: usize,
}

/// See the module.
#[derive(Default)]
pub struct ValueTables {
    tables: Vec<ValueTable>,
    /// Positions of those of [`Aggregate::counted_values`].
    counted: Vec<usize>,
    reads: Fetches<Asked>,
    /// Of the keys of `reads`.
    bytes: usize,
}

impl ValueTables {
    /// One table for each that the calls name.
    pub fn new(
        aggregate: &Aggregate,
        input: &SchemaRef,
        tables: &mut dyn FnMut(usize) -> Result<Box<dyn StateTable>, ExecError>,
        env: &Env,
    ) -> Result<ValueTables, ExecError> {
        let mut at: HashMap<usize, usize> = HashMap::default();
        let mut made: Vec<ValueTable> = Vec::new();
        let (calls, counted) = (&aggregate.calls, aggregate.counted_values());
        for (i, call) in calls.iter().enumerate() {
            let Some(local) = call.state.map(|state| state.table) else { continue };
            let at = match at.get(&local) {
                Some(&at) => at,
                None => {
                    let of_table =
                        || calls.iter().filter(|c| c.state.is_some_and(|v| v.table == local));
                    let is_extreme = |f: AggFunc| matches!(f, AggFunc::Min | AggFunc::Max);
                    let extremes = of_table().any(|c| is_extreme(c.func));
                    let number = counted.iter().position(|values| values.table == local);
                    let kinds = (number.map(|number| 1 + number), extremes);
                    let of = (aggregate, call);
                    made.push(ValueTable::new(tables(local)?, of, kinds, input, env)?);
                    at.insert(local, made.len() - 1);
                    made.len() - 1
                }
            };
            match call.func {
                AggFunc::Min | AggFunc::Max => made[at].add_extreme(i),
                func if func.is_collected() => made[at].add_collected(i),
                _ => made[at].add_distinct(i),
            }
        }
        let counted = counted.iter().filter_map(|values| at.get(&values.table).copied()).collect();
        Ok(ValueTables { tables: made, counted, reads: Fetches::default(), bytes: 0 })
    }

    /// There are no value tables.
    pub fn is_none(&self) -> bool {
        self.tables.is_empty()
    }

    /// No change of the epoch is waiting for the barrier.
    pub fn is_empty(&self) -> bool {
        self.tables.iter().all(ValueTable::is_empty)
    }

    /// No read is under way that rows wait for.
    pub fn is_idle(&self) -> bool {
        self.reads.is_empty() && !self.tables.iter().any(ValueTable::is_fetching)
    }

    /// Counts are being read that no row waits for.
    pub fn is_prefetching(&self) -> bool {
        self.tables.iter().any(ValueTable::is_prefetching)
    }

    fn counted_mut(&mut self) -> impl Iterator<Item = &mut ValueTable> {
        self.tables.iter_mut().filter(|table| table.counts_distinct())
    }

    /// Rows with values of groups will come; whether the port is that of some.
    pub fn hint(&mut self, port: usize, hint: &Hint) -> Result<bool, ExecError> {
        let Some(&at) = port.checked_sub(1).and_then(|number| self.counted.get(number)) else {
            return Ok(false);
        };
        self.tables[at].hint(hint)?;
        Ok(true)
    }

    /// An epoch ends, all rows of which have run: what the tables have seen of it.
    pub fn pass(&mut self, epoch: Epoch) -> Vec<SeenInside> {
        self.counted_mut().map(|table| table.pass(epoch)).collect()
    }

    /// Walkers see there which counts are in memory, if they look.
    pub fn share_presence(&mut self, presence: Option<&Arc<Presence>>) {
        self.counted_mut().for_each(|table| table.share_presence(presence));
    }

    /// Groups whose column `at` is below the bound are never asked for again.
    pub fn close(&mut self, at: usize, bound: i64) {
        self.counted_mut().for_each(|table| table.close(at, bound));
    }

    /// The watermarks of the input have moved.
    pub fn watermark(&mut self, port: usize, columns: &[(usize, i64)]) {
        self.counted_mut().for_each(|table| table.watermark(port, columns));
    }

    fn may_ask(&self) -> bool {
        let (mut reads, mut bytes) = (self.reads.len(), self.bytes);
        for (of_counts, their_bytes) in self.tables.iter().map(ValueTable::reads) {
            reads += of_counts;
            bytes += their_bytes;
        }
        reads < EARLY_READS && bytes < EARLY_BYTES
    }

    /// Rows of groups in memory.
    pub fn update(
        &mut self,
        chunk: &DeltaChunk,
        slots: &[Slot],
        keys: &KeyTable,
        accumulators: &[Accumulator],
    ) -> Result<(), ExecError> {
        let weights = chunk.weights.as_ref().map(|w| &w.values()[..]);
        for t in 0..self.tables.len() {
            let ask = self.may_ask();
            let table = &mut self.tables[t];
            let rows = Rows { slots, weights, mask: table.mask(&chunk.batch) };
            table.update(&rows, chunk.batch.column(table.arg), keys, ask)?;
            if ask {
                let questions = table.questions(keys, accumulators)?;
                self.submit(t, keys, questions)?;
            }
        }
        Ok(())
    }

    /// Rows that come while their groups are read: the old counts of their values are read at the same time.
    pub fn ask_ahead(
        &mut self,
        chunk: &DeltaChunk,
        slots: &[Slot],
        keys: &KeyTable,
        accumulators: &[Accumulator],
    ) -> Result<(), ExecError> {
        let missing: BooleanBuffer = slots.iter().map(|&slot| !keys.is_resident(slot)).collect();
        let nothing = vec![0; slots.len()];
        for t in 0..self.tables.len() {
            if !self.tables[t].counts_distinct() || !self.may_ask() {
                continue;
            }
            let table = &mut self.tables[t];
            let mask = match table.mask(&chunk.batch) {
                Some(mask) => &mask & &missing,
                None => missing.clone(),
            };
            let rows = Rows { slots, weights: Some(&nothing), mask: Some(mask) };
            table.update(&rows, chunk.batch.column(table.arg), keys, true)?;
            let questions = table.questions(keys, accumulators)?;
            self.submit(t, keys, questions)?;
        }
        Ok(())
    }

    /// Bytes of the epoch's changes.
    pub fn pending_bytes(&self) -> usize {
        self.tables.iter().map(ValueTable::pending_bytes).sum()
    }

    /// Bytes of what is remembered of a group's values.
    pub fn group_bytes(&self, slot: Slot) -> usize {
        self.tables.iter().map(|table| table.best_bytes(slot)).sum()
    }

    fn submit(
        &mut self,
        table: usize,
        keys: &KeyTable,
        questions: Vec<Question>,
    ) -> Result<(), ExecError> {
        for Question { request, lookup, bytes } in questions {
            self.bytes += bytes;
            if let Some((asked, found)) =
                self.reads.submit(Asked { table, request, bytes }, lookup)?
            {
                self.arrived(keys, asked, found);
            }
        }
        Ok(())
    }

    fn arrived(&mut self, keys: &KeyTable, asked: Asked, found: Found) {
        self.bytes -= asked.bytes;
        self.tables[asked.table].arrived(keys, asked.request, found);
    }

    /// Waits for a read, of those ahead of rows, too, and takes its answer in. Cancel-safe; while one is under way.
    pub async fn completed(&mut self, keys: &KeyTable) -> Result<(), ExecError> {
        let ValueTables { tables, reads, .. } = self;
        let mut waits: Vec<BoxFuture<'_, Result<Vec<(Asked, Found)>, ExecError>>> = Vec::new();
        if !reads.is_empty() {
            waits.push(reads.completed().boxed());
        }
        let reading =
            tables.iter_mut().filter(|table| table.is_fetching() || table.is_prefetching());
        waits.extend(reading.map(|table| table.counts_arrived().map_ok(|()| Vec::new()).boxed()));
        if waits.is_empty() {
            return Ok(());
        }
        let (answers, _, others) = select_all(waits).await;
        drop(others);
        for (asked, found) in answers? {
            self.arrived(keys, asked, found);
        }
        Ok(())
    }

    /// The barrier: applies the epoch's changes. Writes counts, feeds DISTINCT calls, sets MIN and MAX. What is still
    /// to be read is read in one round for all tables.
    pub async fn resolve(
        &mut self,
        keys: &KeyTable,
        accumulators: &mut [Accumulator],
        errors: &ErrorSink,
    ) -> Result<(), ExecError> {
        let waiting = vec![HashSet::default(); self.tables.len()];
        self.apply(keys, accumulators, errors, &waiting).await
    }

    /// In the middle of an epoch: applies the changes that can be told already. Groups with others stay as they are:
    /// which ones.
    pub async fn settle(
        &mut self,
        keys: &KeyTable,
        accumulators: &mut [Accumulator],
        errors: &ErrorSink,
    ) -> Result<HashSet<Slot>, ExecError> {
        let mut waiting = Vec::with_capacity(self.tables.len());
        let mut groups = HashSet::default();
        for table in &mut self.tables {
            let entries = table.waiting(keys).await?;
            groups.extend(table.groups_of(&entries));
            waiting.push(entries);
        }
        self.apply(keys, accumulators, errors, &waiting).await?;
        Ok(groups)
    }

    async fn apply(
        &mut self,
        keys: &KeyTable,
        accumulators: &mut [Accumulator],
        errors: &ErrorSink,
        waiting: &[HashSet<Slot>],
    ) -> Result<(), ExecError> {
        debug_assert!(self.is_idle());
        let mut begun = Vec::with_capacity(self.tables.len());
        for (t, waiting) in waiting.iter().enumerate() {
            let (resolving, questions) = self.tables[t].begin(keys, accumulators, waiting)?;
            begun.push(resolving);
            self.submit(t, keys, questions)?;
        }
        while !self.is_idle() {
            self.completed(keys).await?;
        }
        for ((table, resolving), waiting) in self.tables.iter_mut().zip(begun).zip(waiting) {
            table.finish(resolving, keys, accumulators, errors, waiting).await?;
        }
        Ok(())
    }

    /// A group that has no state yet: it has no values.
    pub fn created(&mut self, slot: Slot) {
        self.tables.iter_mut().for_each(|table| table.created(slot));
    }

    /// Keeps the counts in memory within their budget.
    pub fn make_room(&mut self) -> Result<(), ExecError> {
        self.tables.iter_mut().try_for_each(ValueTable::make_room)
    }

    /// The same where no rows have used them.
    pub fn shed(&mut self) -> Result<(), ExecError> {
        self.tables.iter_mut().try_for_each(ValueTable::shed)
    }

    pub fn forget(&mut self, slot: Slot) {
        self.tables.iter_mut().for_each(|table| table.forget(slot));
    }

    pub fn seal(&mut self, sealed: &mut Vec<MemRun>) -> Result<(), ExecError> {
        for table in &mut self.tables {
            sealed.extend(table.table().seal()?);
        }
        Ok(())
    }

    pub fn memory_size(&self) -> usize {
        self.tables.iter().map(ValueTable::memory_size).sum::<usize>() + self.bytes
    }
}
