//! Hints at random, for tests: an operator that announces keys of recent rows to itself.
//!
//! Some come before their rows and some after; some are repeated, late, for another input, or for no row at all. Since
//! hints change no result, whatever holds without them must hold with them.

use std::collections::{BTreeMap, VecDeque};

use arrow::array::RecordBatch;
use arrow::datatypes::SchemaRef;
use futures::FutureExt;
use futures::future::BoxFuture;
use millrace_common::access::RetentionBy;
use millrace_common::{DeltaChunk, EnvHandle, Epoch};
use millrace_graph::{Node, Operator as Op};
use millrace_storage::MemRun;

use super::{Due, Hint};
use crate::error::ExecError;
use crate::operator::{Operator, Output};
use crate::state::keys::KeyReader;

/// Chunks whose keys are remembered.
const RECENT: usize = 32;
/// Keys of a hint, at most.
const KEYS: u64 = 4;

/// See the module.
pub struct RandomHints {
    inner: Box<dyn Operator>,
    /// Of the keys of each port.
    readers: Vec<KeyReader>,
    recent: VecDeque<(usize, RecordBatch)>,
    epoch: u64,
    env: EnvHandle,
}

impl RandomHints {
    /// Around the operator of a node, if it keeps state by key.
    pub fn around(
        inner: Box<dyn Operator>,
        node: &Node,
        inputs: &[SchemaRef],
        env: &EnvHandle,
    ) -> Result<Box<dyn Operator>, ExecError> {
        let readers = keys_of(node)
            .iter()
            .zip(inputs)
            .map(|((keys, vnode), schema)| KeyReader::new(schema, keys, vnode))
            .collect::<Result<Vec<_>, _>>()?;
        if readers.is_empty() {
            return Ok(inner);
        }
        let recent = VecDeque::new();
        Ok(Box::new(RandomHints { inner, readers, recent, epoch: 0, env: env.clone() }))
    }

    fn below(&self, bound: u64) -> u64 {
        self.env.random() % bound.max(1)
    }

    /// Announces some keys, or none.
    fn announce(&mut self) -> Result<(), ExecError> {
        while self.below(2) == 0 {
            let at = self.below(self.recent.len() as u64) as usize;
            let Some((port, batch)) = self.recent.get(at) else { return Ok(()) };
            let keys = self.below(KEYS) + 1;
            let from = self.below(batch.num_rows() as u64) as usize;
            let rows = (keys as usize).min(batch.num_rows() - from);
            let keys = self.readers[*port].read(&batch.slice(from, rows))?;
            let times = match self.below(2) {
                0 => Vec::new(),
                _ => (0..rows).map(|_| self.env.random() as i64 >> 12).collect(),
            };
            let due = match self.below(3) {
                0 => Due::default(),
                _ => Due::at(self.epoch.saturating_add(self.below(3)).max(1)),
            };
            // What is known of a key at one input may be told at another.
            let port = if self.below(4) == 0 { 1 - (*port).min(1) } else { *port };
            let port = port.min(self.readers.len() - 1);
            self.inner.hint(port, &Hint { node: 0, port, keys, times, due })?;
        }
        Ok(())
    }
}

/// The key columns and vnode columns of each input of a node.
fn keys_of(node: &Node) -> Vec<(Vec<usize>, Vec<usize>)> {
    match &node.op {
        Op::Aggregate(p) => vec![(p.group.clone(), p.vnode.clone())],
        Op::TopN(p) => vec![(p.group.clone(), p.vnode.clone())],
        Op::Window(p) => vec![(p.group.clone(), p.vnode.clone())],
        Op::Join(p) if !p.null_aware => {
            [&p.left, &p.right].map(|side| (side.keys.clone(), side.vnode.clone())).to_vec()
        }
        Op::Lookup(p) => vec![
            (p.left_keys.clone(), p.left_vnode.clone()),
            (p.right.keys.clone(), p.right.vnode.clone()),
        ],
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
        self.inner.hint(port, hint)
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

    fn settle<'a>(&'a mut self, out: &'a mut Output) -> BoxFuture<'a, Result<(), ExecError>> {
        self.inner.settle(out)
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
