//! Hints at random, for tests: an operator that announces keys of recent rows to itself, and mishandles the hints that
//! it gets.
//!
//! Its own come before their rows or after; some are repeated, late, for another input, or for no row at all. Of those
//! that walkers send some are lost, doubled, delayed, taken out of order or corrupted. Since hints change no result,
//! whatever holds without them must hold with them.

use std::collections::{BTreeMap, VecDeque};
use std::iter;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, Int64Array, RecordBatch, UInt32Array, new_null_array};
use arrow::compute::take;
use arrow::datatypes::DataType;
use futures::FutureExt;
use futures::future::BoxFuture;
use millrace_common::access::RetentionBy;
use millrace_common::keys::columns_at;
use millrace_common::{DeltaChunk, EnvHandle, Epoch};
use millrace_graph::{Node, Operator as Op};
use millrace_storage::MemRun;

use super::chain::Carried;
use super::{DELETED_PORT, Due, HINT_KEYS, Hint, HintTimes};
use crate::error::ExecError;
use crate::operator::{Operator, Output};

/// Chunks whose keys are remembered.
const RECENT: usize = 32;
/// Keys of a hint, at most.
const KEYS: u64 = 4;
/// Hints that are delayed at a time.
const DELAYED: usize = 16;

/// See the module.
pub struct RandomHints {
    inner: Box<dyn Operator>,
    /// What is read by key ([`millrace_graph::lookahead::Lookahead::port`]): the input, and its columns that are the key.
    keys: Vec<(usize, Vec<usize>)>,
    /// A lookup that keeps what rows had met that are deleted.
    lookup: Option<millrace_graph::Lookup>,
    recent: VecDeque<(usize, RecordBatch)>,
    /// Hints of others, by port.
    delayed: Vec<(usize, Hint)>,
    epoch: u64,
    env: EnvHandle,
}

impl RandomHints {
    /// Around the operator of a node, if it keeps state by key.
    pub fn around(inner: Box<dyn Operator>, node: &Node, env: &EnvHandle) -> Box<dyn Operator> {
        let keys = keys_of(node);
        if keys.is_empty() {
            return inner;
        }
        let (recent, delayed) = (VecDeque::new(), Vec::new());
        let lookup = match &node.op {
            Op::Lookup(lookup) => Some(lookup.clone()),
            _ => None,
        };
        let env = env.clone();
        Box::new(RandomHints { inner, keys, lookup, recent, delayed, epoch: 0, env })
    }

    fn below(&self, bound: u64) -> u64 {
        self.env.random() % bound.max(1)
    }

    /// Announces some keys, or none.
    fn announce(&mut self) -> Result<(), ExecError> {
        while self.below(2) == 0 {
            let at = self.below(self.recent.len() as u64) as usize;
            let Some((input, batch)) = self.recent.get(at) else { return Ok(()) };
            let of_input: Vec<usize> =
                (0..self.keys.len()).filter(|&port| self.keys[port].0 == *input).collect();
            let pick = self.below(of_input.len() as u64) as usize;
            let Some(&port) = of_input.get(pick) else { return Ok(()) };
            let keys = self.below(KEYS) + 1;
            let from = self.below(batch.num_rows() as u64) as usize;
            let rows = (keys as usize).min(batch.num_rows() - from);
            let batch = batch.slice(from, rows);
            let (port, columns) = match self.told_by(port, batch.num_columns()) {
                Some(told_by) => (DELETED_PORT, columns_at(&batch, &told_by)),
                None => (port, columns_at(&batch, &self.keys[port].1)),
            };
            // What is known of a key at one input may be told at another.
            let port = if self.below(4) == 0 { self.other(port) } else { port };
            let (times, due) = (self.times(rows), self.due());
            self.inner.hint(port, &Hint { node: 0, port, columns, times, due, carried: None })?;
        }
        self.release()
    }

    /// The columns by which it is told what rows of an input had met, if that is announced now.
    fn told_by(&self, port: usize, width: usize) -> Option<Vec<usize>> {
        let lookup = self.lookup.as_ref().filter(|_| port == 0 && self.below(2) == 0)?;
        lookup.told_by(width)
    }

    /// Takes in hints that were delayed, the last ones first or the first ones.
    fn release(&mut self) -> Result<(), ExecError> {
        while !self.delayed.is_empty() && self.below(3) == 0 {
            let at = self.below(self.delayed.len() as u64) as usize;
            let (port, hint) = self.delayed.swap_remove(at);
            self.inner.hint(port, &hint)?;
        }
        Ok(())
    }

    /// Passes a hint on, once or more often, now or later, as it is or not, or forgets it.
    fn mishandle(&mut self, port: usize, hint: &Hint) -> Result<(), ExecError> {
        let times = match self.below(8) {
            0 => return Ok(()),
            1 => 2,
            2 if self.delayed.len() < DELAYED => {
                self.delayed.push((port, copy(hint)));
                return Ok(());
            }
            3 => {
                let (port, corrupted) = self.corrupt(port, hint);
                return self.inner.hint(port, &corrupted);
            }
            _ => 1,
        };
        (0..times).try_for_each(|_| self.inner.hint(port, hint))
    }

    /// A hint with another input, other keys, other times, another epoch, of another form, or for chains with wrong
    /// columns; and its input.
    fn corrupt(&self, port: usize, hint: &Hint) -> (usize, Hint) {
        let mut corrupted = copy(hint);
        let count = hint.count();
        match self.below(7) {
            0 => return (self.other(port), corrupted),
            1 => {
                let columns = hint.columns.iter().map(|column| self.nonsense(column));
                corrupted.columns = columns.collect();
            }
            2 => corrupted.times = self.times(count),
            3 => corrupted.times = self.times(self.below(count as u64) as usize),
            4 => self.deform(&mut corrupted.columns),
            5 => {
                let wrong = hint.carried.as_ref().map(|carried| self.miscarry(carried));
                corrupted.carried = wrong.map(Arc::new);
            }
            _ => corrupted.due = self.due(),
        }
        (port, corrupted)
    }

    /// What is carried for chains: nothing but NULLs, of other rows, in another order, or of another form.
    fn miscarry(&self, carried: &Carried) -> Carried {
        let mut columns = carried.columns.clone();
        match self.below(4) {
            0 => columns.iter_mut().for_each(|c| *c = new_null_array(c.data_type(), c.len())),
            1 => columns.iter_mut().for_each(|c| *c = self.shuffled(c)),
            2 => columns.reverse(),
            _ => self.deform(&mut columns),
        }
        carried.with_columns(columns)
    }

    /// As many values of a column, some of them several times.
    fn shuffled(&self, column: &ArrayRef) -> ArrayRef {
        let rows = column.len() as u64;
        let picked = UInt32Array::from_iter_values((0..rows).map(|_| self.below(rows) as u32));
        take(column, &picked, None).unwrap_or_else(|_| Arc::clone(column))
    }

    /// Columns that are none of the operator's keys, or of too many.
    fn deform(&self, columns: &mut Vec<ArrayRef>) {
        match self.below(4) {
            0 => drop(columns.pop()),
            1 => columns.extend(columns.first().cloned()),
            2 => {
                *columns =
                    columns.iter().map(|c| new_null_array(c.data_type(), HINT_KEYS + 1)).collect()
            }
            _ => {
                *columns =
                    columns.iter().map(|c| new_null_array(&DataType::Null, c.len())).collect()
            }
        }
    }

    /// A column of as many values that have nothing to do with these.
    fn nonsense(&self, column: &ArrayRef) -> ArrayRef {
        match column.data_type() {
            DataType::Int64 => {
                let values = (0..column.len()).map(|_| self.env.random() as i64);
                Arc::new(Int64Array::from_iter_values(values))
            }
            other => new_null_array(other, column.len()),
        }
    }

    fn other(&self, port: usize) -> usize {
        (1 - port.min(1)).min(self.keys.len() - 1)
    }

    fn times(&self, keys: usize) -> HintTimes {
        let times = (0..keys).map(|_| self.env.random() as i64 >> 12);
        match self.below(3) {
            0 => HintTimes::None,
            1 => HintTimes::OfKey(self.below(2) as usize),
            _ => HintTimes::of(&times.collect::<Vec<_>>()),
        }
    }

    fn due(&self) -> Due {
        match self.below(3) {
            0 => Due::default(),
            _ => Due::at(self.epoch.saturating_add(self.below(3)).max(1)),
        }
    }
}

fn copy(hint: &Hint) -> Hint {
    let Hint { node, port, .. } = *hint;
    let (columns, times) = (hint.columns.clone(), hint.times.clone());
    Hint { node, port, columns, times, due: hint.due.clone(), carried: hint.carried.clone() }
}

/// What a node reads by key: by port the input, and its columns that are the key.
fn keys_of(node: &Node) -> Vec<(usize, Vec<usize>)> {
    match &node.op {
        Op::Aggregate(p) => {
            let values = p.counted_values().into_iter();
            let values = values.map(|v| [p.group.as_slice(), &[v.arg]].concat());
            iter::once(p.group.clone()).chain(values).map(|key| (0, key)).collect()
        }
        Op::TopN(p) => vec![(0, p.group.clone())],
        Op::Window(p) => vec![(0, p.group.clone())],
        Op::Join(p) if !p.null_aware => {
            vec![(0, p.left.keys.clone()), (1, p.right.keys.clone())]
        }
        Op::Lookup(p) => vec![(0, p.left_keys.clone()), (1, p.right.keys.clone())],
        _ => Vec::new(),
    }
}

impl Operator for RandomHints {
    fn push(&mut self, port: usize, chunk: DeltaChunk, out: &mut Output) -> Result<(), ExecError> {
        if !chunk.is_empty() {
            if self.recent.len() == RECENT {
                self.recent.pop_front();
            }
            self.recent.push_back((port, chunk.batch.clone()));
        }
        self.announce()?;
        self.inner.push(port, chunk, out)?;
        self.announce()
    }

    fn is_full(&self) -> bool {
        self.inner.is_full()
    }

    fn is_pending(&self) -> bool {
        self.inner.is_pending()
    }

    fn hint(&mut self, port: usize, hint: &Hint) -> Result<(), ExecError> {
        self.mishandle(port, hint)?;
        self.release()
    }

    fn foresight(&self) -> Option<u32> {
        self.inner.foresight()
    }

    fn expect(&mut self, port: usize, columns: &[(usize, i64)]) -> Result<(), ExecError> {
        self.inner.expect(port, columns)
    }

    fn give_up_expected(&mut self) {
        self.inner.give_up_expected();
    }

    fn is_prefetching(&self) -> bool {
        self.inner.is_prefetching()
    }

    fn progress<'a>(&'a mut self, out: &'a mut Output) -> BoxFuture<'a, Result<(), ExecError>> {
        self.inner.progress(out)
    }

    fn watermark(&mut self, port: usize, columns: &[(usize, i64)]) {
        self.inner.watermark(port, columns);
    }

    fn retain(&mut self, table: usize, by: RetentionBy, bound: i64) {
        self.inner.retain(table, by, bound);
    }

    fn time(&mut self, epoch: Epoch) {
        self.epoch = epoch.0;
        self.inner.time(epoch);
    }

    fn due(&self) -> Option<Epoch> {
        self.inner.due()
    }

    fn is_over(&self) -> bool {
        self.inner.is_over()
    }

    fn held(&self) -> usize {
        self.inner.held()
    }

    fn settle<'a>(&'a mut self, out: &'a mut Output) -> BoxFuture<'a, Result<(), ExecError>> {
        self.inner.settle(out)
    }

    fn is_settling(&self) -> bool {
        self.inner.is_settling()
    }

    fn shed(&mut self, out: &mut Output) -> Result<(), ExecError> {
        self.inner.shed(out)
    }

    fn barrier<'a>(&'a mut self, out: &'a mut Output) -> BoxFuture<'a, Result<(), ExecError>> {
        async move {
            self.inner.barrier(out).await?;
            self.announce()
        }
        .boxed()
    }

    fn seal(&mut self, sealed: &mut Vec<MemRun>) -> Result<(), ExecError> {
        self.inner.seal(sealed)?;
        self.announce()
    }

    fn counters(&self, out: &mut BTreeMap<String, u64>) {
        self.inner.counters(out);
    }

    fn memory_size(&self) -> usize {
        self.inner.memory_size()
    }
}
