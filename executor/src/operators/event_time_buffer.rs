//! Rows kept in order of an instant: EMIT ON WINDOW CLOSE and temporal filters.
//!
//! Both write what comes into a state table `vnode | instant | other columns → row`, without reading
//! anything, and at a barrier read the rows whose turn has come, a range of each vnode.
//!
//! - *Window close* (the event-time buffer of EMIT ON WINDOW CLOSE) holds rows back. When the watermark of the
//!   column has passed a row's instant, no further
//!   change of it can come: what the changes net to is emitted, once. The table is cleaned by the same
//!   watermark (`storage/src/ttl_filter.rs`), so a row that was emitted is not found again, after a restart
//!   neither. The range that the next watermarks are likely to close is read ahead ([`RangeAhead`]).
//! - *Upper bound* (`now() < instant`) passes rows on, and retracts them when the epoch's wall-clock time
//!   reaches their instant.
//!   They are taken out of the table in the same epoch.
//! - *Lower bound* (`now() >= instant`) holds rows back until the epoch's wall-clock time reaches their
//!   instant, and takes them out of the
//!   table then. Rows whose instant has come pass.
//!
//! Rows without an instant are in no window and pass no comparison with `now()`: they vanish.

use std::ops::Range;

use arrow::array::{Array, AsArray, BinaryArray, BinaryBuilder, BooleanArray, Int64Array};
use arrow::buffer::BooleanBuffer;
use arrow::datatypes::{SchemaRef, TimestampMicrosecondType};
use futures::FutureExt;
use futures::future::BoxFuture;
use millrace_common::identity::RowCodec;
use millrace_common::{DeltaChunk, Epoch, Vnode};
use millrace_graph::BufferMode;
use millrace_storage::{Lookup, MemRun};

use super::{BuildContext, Built, Env};
use crate::error::ExecError;
use crate::operator::{Operator, Output};
use crate::state::fetch::wait;
use crate::state::keys::{KeyReader, append_storage_key};
use crate::state::{RangeAhead, StateTable};

/// Rows read of one vnode at once.
const STEP: usize = 4_096;

/// See the module.
pub struct EventTimeBuffer {
    mode: BufferMode,
    column: usize,
    keys: KeyReader,
    /// What tells rows apart beyond their values.
    apart: RowCodec,
    table: Box<dyn StateTable>,
    schema: SchemaRef,
    vnodes: Range<Vnode>,
    /// Rows below have had their turn.
    done: i64,
    /// Rows below have it at this barrier.
    bound: i64,
    /// Nothing in the table is below this.
    earliest: i64,
    /// Of *Window close*.
    ahead: Option<RangeAhead>,
    epoch: Epoch,
    env: Env,
}

impl EventTimeBuffer {
    /// Builds the operator of a node. Fails where the graph does not fit it.
    pub fn build(hold: &millrace_graph::EventTimeBuffer, ctx: BuildContext<'_>) -> Built {
        let input = &ctx.input(0)?;
        let BuildContext { env, tables, .. } = ctx;
        let table = tables(hold.table)?;
        let others = (0..input.fields().len()).filter(|c| *c != hold.column);
        let columns: Vec<usize> = [hold.column].into_iter().chain(others).collect();
        Ok(Box::new(EventTimeBuffer {
            mode: hold.mode,
            column: hold.column,
            keys: KeyReader::new(input, &columns, &hold.vnode)?,
            apart: RowCodec::of_rows(input, &[])?,
            schema: super::nullable(input),
            vnodes: if hold.vnode.is_empty() { 0..1 } else { env.vnodes.clone() },
            earliest: if table.is_empty() { i64::MAX } else { i64::MIN },
            // What had its turn before a restart is below.
            done: match hold.mode {
                BufferMode::WindowClose => table.bound().unwrap_or(i64::MIN),
                BufferMode::UpperBound | BufferMode::LowerBound => after(env.restored),
            },
            table,
            bound: i64::MIN,
            ahead: (hold.mode == BufferMode::WindowClose).then(|| RangeAhead::measured(&env)),
            epoch: env.restored,
            env,
        }))
    }

    /// The rows that have an instant which is still to come; and of *Appear* the others that have one.
    fn ahead(&mut self, chunk: DeltaChunk, out: &mut Output) -> Result<DeltaChunk, ExecError> {
        let times = chunk.batch.column(self.column);
        let times = times
            .as_primitive_opt::<TimestampMicrosecondType>()
            .ok_or_else(|| ExecError::internal("an instant that is no timestamp"))?;
        let mut earliest = self.earliest;
        let stays = BooleanBuffer::collect_bool(times.len(), |i| {
            let stays = times.is_valid(i) && times.value(i) >= self.done;
            if stays {
                earliest = earliest.min(times.value(i));
            }
            stays
        });
        self.earliest = earliest;
        if self.mode == BufferMode::LowerBound {
            let come = BooleanBuffer::collect_bool(times.len(), |i| {
                times.is_valid(i) && times.value(i) < self.done
            });
            if come.count_set_bits() > 0 {
                out.push(chunk.filter(&BooleanArray::new(come, None))?);
            }
        }
        if stays.count_set_bits() == times.len() {
            return Ok(chunk);
        }
        Ok(chunk.filter(&BooleanArray::new(stays, None))?)
    }

    /// Emits the rows in [done, bound).
    async fn advance(&mut self, out: &mut Output) -> Result<(), ExecError> {
        let (from, to) = (self.done.max(self.earliest), self.bound);
        if from < to {
            let mut ranges: Vec<(Vec<u8>, Vec<u8>)> =
                self.vnodes.clone().map(|v| (position(v, from), position(v, to))).collect();
            while !ranges.is_empty() {
                ranges = self.step(ranges, out).await?;
            }
            self.earliest = self.earliest.max(to);
            if let Some(ahead) = &mut self.ahead {
                ahead.close(to);
            }
        }
        self.done = self.done.max(to);
        Ok(())
    }

    /// One round of reads; gives what is left of the ranges.
    async fn step(
        &mut self,
        ranges: Vec<(Vec<u8>, Vec<u8>)>,
        out: &mut Output,
    ) -> Result<Vec<(Vec<u8>, Vec<u8>)>, ExecError> {
        let starts = BinaryArray::from_iter_values(ranges.iter().map(|r| &r.0));
        let ends = BinaryArray::from_iter_values(ranges.iter().map(|r| &r.1));
        self.env.metrics.fetch_rounds.add(1);
        let lookup = self.table.multi_range(starts, ends, Some(STEP));
        let found = match &mut self.ahead {
            Some(ahead) => ahead.wait(lookup).await?,
            None => wait(lookup).await?,
        };
        let mut counts = vec![0usize; ranges.len()];
        let mut last = vec![0usize; ranges.len()];
        for (at, &input) in found.input.values().iter().enumerate() {
            counts[input as usize] += 1;
            last[input as usize] = at;
        }
        let mut left = Vec::new();
        for (i, (_, end)) in ranges.into_iter().enumerate() {
            if counts[i] >= STEP {
                let mut next = found.keys.value(last[i]).to_vec();
                next.push(0);
                left.push((next, end));
            }
        }
        if found.values.num_rows() > 0 {
            let values = found.values.with_schema(SchemaRef::clone(&self.schema))?;
            let weights = match self.mode {
                BufferMode::WindowClose => found.weights,
                BufferMode::UpperBound | BufferMode::LowerBound => {
                    let minus =
                        Int64Array::from_iter_values(found.weights.values().iter().map(|w| -w));
                    self.table.write(found.keys, Some(minus.clone()), values.clone())?;
                    if self.mode == BufferMode::UpperBound { minus } else { found.weights }
                }
            };
            let chunk = DeltaChunk::new(values, Some(weights));
            super::emit_sliced(chunk, self.env.options.chunk_rows, out);
        }
        Ok(left)
    }

    /// Looks for the first row that is left.
    async fn find_earliest(&mut self) -> Result<(), ExecError> {
        let mut starts = BinaryBuilder::new();
        let mut ends = BinaryBuilder::new();
        for v in self.vnodes.clone() {
            starts.append_value(position(v, self.done));
            ends.append_value((v + 1).to_be_bytes());
        }
        let found = wait(self.table.multi_range(starts.finish(), ends.finish(), Some(1))).await?;
        let times = found.values.column(self.column);
        let times = times.as_primitive_opt::<TimestampMicrosecondType>();
        self.earliest = times.and_then(arrow::compute::min).unwrap_or(i64::MAX);
        Ok(())
    }
}

/// At most `limit` rows with an instant in [from, to), of each vnode.
pub(super) fn read_range(
    table: &dyn StateTable,
    vnodes: &Range<Vnode>,
    (from, to): (i64, i64),
    limit: usize,
) -> Lookup {
    let edge = |time| BinaryArray::from_iter_values(vnodes.clone().map(|v| position(v, time)));
    table.multi_range(edge(from), edge(to), Some(limit))
}

/// The first instant that has not come at an epoch.
fn after(epoch: Epoch) -> i64 {
    (epoch.millis() as i64).saturating_mul(1_000).saturating_add(1)
}

/// The first key of a vnode with an instant (see `KeyCodec`: ascending, NULLs before).
pub(super) fn position(vnode: Vnode, time: i64) -> Vec<u8> {
    let mut key = vnode.to_be_bytes().to_vec();
    key.push(1);
    key.extend_from_slice(&((time as u64) ^ (1 << 63)).to_be_bytes());
    key
}

impl Operator for EventTimeBuffer {
    fn push(&mut self, _: usize, chunk: DeltaChunk, out: &mut Output) -> Result<(), ExecError> {
        let chunk = self.ahead(chunk, out)?;
        if chunk.is_empty() {
            return Ok(());
        }
        let keys = self.keys.read(&chunk.batch)?;
        let apart = self.apart.rows(chunk.batch.columns(), chunk.num_rows())?;
        let mut encoded = BinaryBuilder::new();
        let mut scratch = Vec::with_capacity(64);
        for i in 0..chunk.num_rows() {
            let parts: [&[u8]; 2] = [keys.key(i), apart.row(i).data()];
            append_storage_key(&mut encoded, &mut scratch, keys.vnode(i), &parts);
        }
        let encoded = encoded.finish();
        self.table.write(encoded, chunk.weights.clone(), chunk.batch.clone())?;
        if self.mode == BufferMode::UpperBound {
            out.push(chunk);
        }
        Ok(())
    }

    fn watermark(&mut self, _: usize, columns: &[(usize, i64)]) {
        if let Some((_, value)) = columns.iter().find(|(c, _)| *c == self.column)
            && self.mode == BufferMode::WindowClose
        {
            self.bound = self.bound.max(*value);
        }
    }

    fn foresight(&self) -> Option<u32> {
        self.ahead.as_ref()?.foresight()
    }

    fn expect(&mut self, _: usize, columns: &[(usize, i64)]) -> Result<(), ExecError> {
        let EventTimeBuffer { table, vnodes, ahead: Some(ahead), .. } = self else { return Ok(()) };
        if let Some(&(_, to)) = columns.iter().find(|(c, _)| *c == self.column) {
            let from = self.done.max(self.earliest);
            // Their blocks, and none of the rows.
            ahead.expect(from, to, |from, to| read_range(table.as_ref(), vnodes, (from, to), 0));
        }
        Ok(())
    }

    fn give_up_expected(&mut self) {
        if let Some(ahead) = &mut self.ahead {
            ahead.give_up();
        }
    }

    fn is_prefetching(&self) -> bool {
        self.ahead.as_ref().is_some_and(RangeAhead::is_reading)
    }

    fn progress<'a>(&'a mut self, _: &'a mut Output) -> BoxFuture<'a, Result<(), ExecError>> {
        async move {
            if let Some(ahead) = &mut self.ahead {
                ahead.progress().await;
            }
            Ok(())
        }
        .boxed()
    }

    fn time(&mut self, epoch: Epoch) {
        self.epoch = epoch;
        if self.mode != BufferMode::WindowClose {
            self.bound = self.bound.max(after(epoch));
        }
    }

    fn due(&self) -> Option<Epoch> {
        let waits = self.mode != BufferMode::WindowClose && self.earliest < i64::MAX;
        waits.then(|| Epoch::from_millis(u64::try_from(self.earliest).unwrap_or(0).div_ceil(1_000)))
    }

    fn barrier<'a>(&'a mut self, out: &'a mut Output) -> BoxFuture<'a, Result<(), ExecError>> {
        async move {
            let moved = self.done < self.bound;
            self.advance(out).await?;
            if self.mode != BufferMode::WindowClose && moved && self.earliest <= self.done {
                self.find_earliest().await?;
            }
            if let Some(ahead) = &mut self.ahead {
                ahead.pass(self.epoch);
            }
            Ok(())
        }
        .boxed()
    }

    fn seal(&mut self, sealed: &mut Vec<MemRun>) -> Result<(), ExecError> {
        sealed.extend(self.table.seal()?);
        Ok(())
    }
}
