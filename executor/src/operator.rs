//! The seam between the task runtime and the operators (docs/design.md §6, §7).
//!
//! A task drives a tree of [`Operator`]s: it pushes whole chunks into ports, hands what they emit to
//! their parents, gives those that wait for state a turn with [`Operator::progress`], and at a barrier
//! drains each node, in topological order, before [`Operator::barrier`] and [`Operator::seal`]. A node that
//! holds too much until the barrier is drained before it too, for [`Operator::settle`].
//! An operator knows nothing of channels, epochs' numbers or other tasks; the runtime knows nothing
//! of keys. Rows of different keys may run in any order inside an epoch.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use futures::future::BoxFuture;
use millrace_common::access::RetentionBy;
use millrace_common::{DeltaChunk, EnvHandle, Epoch, JobId, Vnode};
use millrace_storage::{MemRun, TableWriter};
use tokio::sync::Notify;

use crate::error::ExecError;
use crate::error_sink::ErrorSink;
use crate::lookahead::Hint;
use crate::lookahead::operator::OperatorLookahead;
use crate::memory::MemoryGovernor;
use crate::options::ExecOptions;
use crate::stats::OperatorMetrics;

/// What an operator emits in one call: chunks in order. Empty chunks are dropped.
#[derive(Debug, Default)]
pub struct Output {
    chunks: Vec<DeltaChunk>,
    rows: usize,
}

impl Output {
    pub fn push(&mut self, chunk: DeltaChunk) {
        if !chunk.is_empty() {
            self.rows += chunk.num_rows();
            self.chunks.push(chunk);
        }
    }

    /// Rows in it so far: an operator that can explode ends its step when this is large.
    pub fn rows(&self) -> usize {
        self.rows
    }

    pub fn is_empty(&self) -> bool {
        self.chunks.is_empty()
    }

    /// All chunks; it is empty afterwards.
    pub fn take(&mut self) -> Vec<DeltaChunk> {
        self.rows = 0;
        std::mem::take(&mut self.chunks)
    }
}

/// A node's driver calls. Output goes to `out` in whole chunks. No call but `progress` and
/// `barrier` awaits anything.
pub trait Operator: Send {
    /// A chunk arrived at an input. Never waits: rows whose state is missing are parked.
    fn push(&mut self, port: usize, chunk: DeltaChunk, out: &mut Output) -> Result<(), ExecError>;

    /// Rows are parked beyond the bounds, or output is waiting for a further step: the task pulls
    /// no input until `progress` has made room.
    fn is_full(&self) -> bool {
        false
    }

    /// Fetches are under way, or rows are ready to run that `progress` will run.
    fn is_pending(&self) -> bool {
        false
    }

    /// Keys that rows will need at an input: their state may be read ahead. Changes no result, and nothing that
    /// [`Operator::is_pending`] counts. Never called while memory is tight.
    fn hint(&mut self, port: usize, hint: &Hint) -> Result<(), ExecError> {
        let _ = (port, hint);
        Ok(())
    }

    /// How many epochs ahead it is to be told what watermarks are likely: see [`Operator::expect`]. `None`: not now.
    fn foresight(&self) -> Option<u32> {
        None
    }

    /// The watermarks that an input is likely to have then, as in [`Operator::watermark`]: what they close may be read
    /// ahead. Changes no result. Called after a barrier, never while memory is tight.
    fn expect(&mut self, port: usize, columns: &[(usize, i64)]) -> Result<(), ExecError> {
        let _ = (port, columns);
        Ok(())
    }

    /// Reads are under way for which no row waits. Barriers do not wait for them either.
    fn is_prefetching(&self) -> bool {
        false
    }

    /// Memory is tight, and may stay so for long: reads of what watermarks are likely to close are given up.
    fn give_up_expected(&mut self) {}

    /// Completes when some fetch finished and its rows have run (output in `out`). Cancel-safe:
    /// dropped before completion it loses nothing, and the next call goes on. Called only while
    /// [`Operator::is_pending`] or [`Operator::is_prefetching`].
    fn progress<'a>(&'a mut self, out: &'a mut Output) -> BoxFuture<'a, Result<(), ExecError>> {
        let _ = out;
        Box::pin(std::future::ready(Ok(())))
    }

    /// The epoch's watermarks of an input: (column, microseconds), of the columns that have one by now.
    /// They never fall. Called before `barrier`, when all rows of the epoch are in.
    fn watermark(&mut self, port: usize, columns: &[(usize, i64)]) {
        let _ = (port, columns);
    }

    /// Rows of one of its state tables whose time is below the bound (microseconds) are never reached
    /// again: they may leave its caches, as they leave the store. Called before `barrier`.
    fn retain(&mut self, table: usize, by: RetentionBy, bound: i64) {
        let _ = (table, by, bound);
    }

    /// The epoch that ends: its wall-clock part is `now()`. Called before `barrier`.
    fn time(&mut self, epoch: Epoch) {
        let _ = epoch;
    }

    /// The epoch at which its output changes by itself next, as of the last barrier.
    fn due(&self) -> Option<Epoch> {
        None
    }

    /// It holds more until the barrier than its part of the memory: [`Operator::settle`] is due.
    fn is_over(&self) -> bool {
        false
    }

    /// Bytes that it holds until the barrier: changes, and state that they keep in memory.
    fn held(&self) -> usize {
        0
    }

    /// In the middle of an epoch, emits and writes what it would hold until the barrier; what cannot be told
    /// before all of the epoch is in stays. Called while [`Operator::is_over`] and not
    /// [`Operator::is_pending`]. Not cancelled, except by the end of the job.
    fn settle<'a>(&'a mut self, out: &'a mut Output) -> BoxFuture<'a, Result<(), ExecError>> {
        let _ = out;
        Box::pin(std::future::ready(Ok(())))
    }

    /// Settling has put out as much as a step may: it goes on with another [`Operator::settle`] when that has been passed
    /// on, and before anything else.
    fn is_settling(&self) -> bool {
        false
    }

    /// Nobody uses it, and memory is short: lets go of state beyond what its caches may keep.
    fn shed(&mut self, out: &mut Output) -> Result<(), ExecError> {
        let _ = out;
        Ok(())
    }

    /// The epoch ends: called after every input's barrier and after `progress` until
    /// `!is_pending()`. Grouped operators emit old → new; dirty state goes into the table writers.
    /// May read state, in batches. When it returns the node has nothing parked. Not cancelled,
    /// except by the end of the job.
    fn barrier<'a>(&'a mut self, out: &'a mut Output) -> BoxFuture<'a, Result<(), ExecError>> {
        let _ = out;
        Box::pin(std::future::ready(Ok(())))
    }

    /// Appends what this epoch wrote, after `barrier`.
    fn seal(&mut self, sealed: &mut Vec<MemRun>) -> Result<(), ExecError> {
        let _ = sealed;
        Ok(())
    }

    /// Counters that are committed with what was sealed.
    fn counters(&self, out: &mut BTreeMap<String, u64>) {
        let _ = out;
    }

    /// Heap bytes held: caches, parked rows, dirty state.
    fn memory_size(&self) -> usize {
        0
    }
}

/// Gives an operator the writer of one of the job's state tables, by local id. Each table is asked
/// for once a task.
pub type TableWriters<'a> = dyn Fn(usize) -> Result<TableWriter, ExecError> + Send + Sync + 'a;

/// What an operator gets when it is built.
pub struct OperatorContext<'a> {
    pub job: JobId,
    /// Which of the fragment's parallel tasks this is.
    pub task: usize,
    /// Vnodes the task owns; `0..256` for a singleton.
    pub vnodes: Range<Vnode>,
    /// By input port: the column that tells the event time of its rows.
    pub event_time: Vec<Option<usize>>,
    pub writers: &'a TableWriters<'a>,
    pub options: Arc<ExecOptions>,
    /// Where a failing expression is counted; the row's value becomes NULL.
    pub errors: Arc<ErrorSink>,
    /// This operator's counters; shared by its parallel instances.
    pub metrics: Arc<OperatorMetrics>,
    /// What it shares with the walkers; of this instance.
    pub lookahead: Arc<OperatorLookahead>,
    pub governor: Arc<MemoryGovernor>,
    /// Tells the task that its caches are to let go of what they may not keep: see [`Operator::shed`].
    pub shed: Arc<Notify>,
    pub clock: EnvHandle,
    /// The last epoch that the job's state has all of.
    pub restored: Epoch,
    /// Number of the next row of append-only state: see [`crate::sequence`].
    pub first_arrival: u64,
}

impl OperatorContext<'_> {
    /// The writer of the job's state table `local`.
    pub fn writer(&self, local: usize) -> Result<TableWriter, ExecError> {
        (self.writers)(local)
    }
}
