//! Channels between the tasks of a job: chunks in order, barriers in band, bounded in bytes
//! (docs/design.md §6).
//!
//! A channel connects one sending task with one receiving task. Its credits are bytes: a chunk takes
//! its size from the channel's budget when sent and gives it back when received; one larger than the
//! whole budget takes all of it, so it passes alone. Barriers need no credit. Behind the two traits a
//! network transport can take the local one's place.
//!
//! [`Dispatcher`] is the sending end of a fragment: it routes rows by vnode, joins small pieces up to
//! `coalesce_rows` and splits large chunks, so that receivers see chunks of useful size.

use std::sync::Arc;
use std::task::{Context, Poll};

use arrow::array::UInt32Array;
use async_trait::async_trait;
use futures::future::join_all;
use millrace_common::hash::{hash_columns, vnode_of};
use millrace_common::keys::columns_at;
use millrace_common::{DeltaChunk, Epoch, VNODE_COUNT};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};

use crate::error::ExecError;
use crate::memory::{MemoryClass, MemoryGovernor, Reservation};
use crate::options::ExecOptions;
use crate::watermark::WatermarkSet;

/// The marker that ends an epoch (docs/design.md §2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Barrier {
    /// The epoch before: inputs are read in `(prev, epoch]`.
    pub prev: Epoch,
    pub epoch: Epoch,
    /// The job still scans its inputs' snapshots; `epoch` is the snapshot's.
    pub backfill: bool,
    /// Inputs of a later stage wait with their first scan.
    pub stage: u32,
    /// Of a rebuild whose scans are done: the relation changes by the difference now.
    pub swap: bool,
}

impl Barrier {
    /// Whether an input of a stage takes no step of its first scan.
    pub fn holds_scan(&self, stage: u32) -> bool {
        self.backfill && stage > self.stage
    }
}

/// What travels in a channel.
#[derive(Debug)]
pub enum Message {
    Chunk(DeltaChunk),
    /// The end of an epoch, and what the sender knows of the watermarks at it.
    Barrier(Arc<Barrier>, Arc<WatermarkSet>),
}

#[async_trait]
pub trait ChunkSender: Send {
    /// Waits for credit. An error means that the receiver is gone.
    async fn send(&mut self, message: Message) -> Result<(), ExecError>;
}

pub trait ChunkReceiver: Send {
    /// The next message in order; `None`: the sender is gone.
    fn poll_recv(&mut self, cx: &mut Context<'_>) -> Poll<Option<Message>>;
}

/// A message with the credit it holds until it is received.
type Carried = (Message, Option<(OwnedSemaphorePermit, Reservation)>);

struct LocalSender {
    queue: mpsc::UnboundedSender<Carried>,
    credits: Arc<Semaphore>,
    budget: usize,
    governor: Arc<MemoryGovernor>,
}

struct LocalReceiver {
    queue: mpsc::UnboundedReceiver<Carried>,
}

/// A channel inside the process with `budget` bytes of credit.
pub fn local_channel(
    budget: usize,
    governor: &Arc<MemoryGovernor>,
) -> (Box<dyn ChunkSender>, Box<dyn ChunkReceiver>) {
    let budget = budget.clamp(1, u32::MAX as usize >> 1);
    let (queue, receiver) = mpsc::unbounded_channel();
    let credits = Arc::new(Semaphore::new(budget));
    let sender = LocalSender { queue, credits, budget, governor: Arc::clone(governor) };
    (Box::new(sender), Box::new(LocalReceiver { queue: receiver }))
}

#[async_trait]
impl ChunkSender for LocalSender {
    async fn send(&mut self, message: Message) -> Result<(), ExecError> {
        let held = match &message {
            Message::Barrier(..) => None,
            Message::Chunk(chunk) => {
                let bytes = chunk.memory_size();
                let credit = bytes.clamp(1, self.budget) as u32;
                let permit = Arc::clone(&self.credits).acquire_many_owned(credit).await;
                let mut account = self.governor.account(MemoryClass::Channel);
                account.set(bytes);
                Some((permit.map_err(|_| ExecError::Stopped)?, account))
            }
        };
        self.queue.send((message, held)).map_err(|_| ExecError::Stopped)
    }
}

impl ChunkReceiver for LocalReceiver {
    fn poll_recv(&mut self, cx: &mut Context<'_>) -> Poll<Option<Message>> {
        self.queue.poll_recv(cx).map(|m| m.map(|(message, _held)| message))
    }
}

/// Which of `parallelism` tasks owns a vnode.
pub fn owner(vnode: u16, parallelism: usize) -> usize {
    usize::from(vnode) * parallelism / VNODE_COUNT
}

/// The vnodes that task `task` of `parallelism` owns.
pub fn owned_vnodes(task: usize, parallelism: usize) -> std::ops::Range<u16> {
    let start = |t: usize| (t * VNODE_COUNT).div_ceil(parallelism) as u16;
    start(task)..start(task + 1)
}

/// Pieces waiting to be sent to one task.
#[derive(Default)]
struct Pending {
    pieces: Vec<DeltaChunk>,
    rows: usize,
}

struct Target {
    sender: Box<dyn ChunkSender>,
    pending: Pending,
    /// Full chunks, in order.
    ready: Vec<DeltaChunk>,
}

/// The sending end of a fragment's task.
pub struct Dispatcher {
    hash: Vec<usize>,
    targets: Vec<Target>,
    chunk_rows: usize,
    coalesce_rows: usize,
}

impl Dispatcher {
    /// `senders[t]` leads to task `t` of the receiving fragment.
    pub fn new(
        hash: Vec<usize>,
        senders: Vec<Box<dyn ChunkSender>>,
        options: &ExecOptions,
    ) -> Dispatcher {
        let targets = senders
            .into_iter()
            .map(|sender| Target { sender, pending: Pending::default(), ready: Vec::new() })
            .collect();
        Dispatcher {
            hash,
            targets,
            chunk_rows: options.chunk_rows.max(1),
            coalesce_rows: options.coalesce_rows.max(1),
        }
    }

    /// Routes a chunk; nothing is sent yet.
    pub fn push(&mut self, chunk: DeltaChunk) -> Result<(), ExecError> {
        if chunk.is_empty() {
            return Ok(());
        }
        if self.targets.len() == 1 || self.hash.is_empty() {
            return self.queue(0, chunk);
        }
        let columns = columns_at(&chunk.batch, &self.hash);
        let hashes = hash_columns(&columns, chunk.num_rows())?;
        let parallelism = self.targets.len();
        let mut rows: Vec<Vec<u32>> = vec![Vec::new(); parallelism];
        for (i, &h) in hashes.iter().enumerate() {
            rows[owner(vnode_of(h), parallelism)].push(i as u32);
        }
        for (target, rows) in rows.into_iter().enumerate() {
            if rows.len() == chunk.num_rows() {
                return self.queue(target, chunk);
            }
            if !rows.is_empty() {
                self.queue(target, chunk.take(&UInt32Array::from(rows))?)?;
            }
        }
        Ok(())
    }

    fn queue(&mut self, target: usize, chunk: DeltaChunk) -> Result<(), ExecError> {
        let (chunk_rows, coalesce) = (self.chunk_rows, self.coalesce_rows);
        let target = &mut self.targets[target];
        target.pending.rows += chunk.num_rows();
        target.pending.pieces.push(chunk);
        if target.pending.rows >= coalesce {
            target.complete(chunk_rows)?;
        }
        Ok(())
    }

    /// Sends the chunks that have a useful size. Waits for credit of each target on its own, so a
    /// slow receiver delays only the sender, never another receiver of what is already routed.
    pub async fn flush(&mut self) -> Result<(), ExecError> {
        if self.targets.iter().all(|t| t.ready.is_empty()) {
            return Ok(());
        }
        if let [only] = self.targets.as_mut_slice() {
            return only.send().await;
        }
        for sent in join_all(self.targets.iter_mut().map(Target::send)).await {
            sent?;
        }
        Ok(())
    }

    /// Sends all there is, then the barrier, to every target.
    pub async fn barrier(
        &mut self,
        barrier: &Arc<Barrier>,
        marks: &Arc<WatermarkSet>,
    ) -> Result<(), ExecError> {
        for target in &mut self.targets {
            target.complete(self.chunk_rows)?;
        }
        self.flush().await?;
        for target in &mut self.targets {
            let message = Message::Barrier(Arc::clone(barrier), Arc::clone(marks));
            target.sender.send(message).await?;
        }
        Ok(())
    }
}

impl Target {
    /// Moves what is pending to the chunks to be sent.
    fn complete(&mut self, chunk_rows: usize) -> Result<(), ExecError> {
        let Some(first) = self.pending.pieces.first() else { return Ok(()) };
        let whole = DeltaChunk::concat(&first.schema(), &self.pending.pieces)?;
        self.pending = Pending::default();
        let rows = whole.num_rows();
        if rows <= chunk_rows {
            self.ready.push(whole);
            return Ok(());
        }
        // Equal parts, so that no tiny rest remains.
        let part = rows.div_ceil(rows.div_ceil(chunk_rows));
        for offset in (0..rows).step_by(part) {
            self.ready.push(whole.slice(offset, part.min(rows - offset)));
        }
        Ok(())
    }

    async fn send(&mut self) -> Result<(), ExecError> {
        for chunk in std::mem::take(&mut self.ready) {
            self.sender.send(Message::Chunk(chunk)).await?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use arrow::array::{ArrayRef, AsArray, Int64Array, RecordBatch};
    use arrow::datatypes::Int64Type;

    use super::*;

    fn ints(values: impl IntoIterator<Item = i64>) -> DeltaChunk {
        let column: ArrayRef = Arc::new(Int64Array::from_iter_values(values));
        DeltaChunk::inserts(RecordBatch::try_from_iter([("a", column)]).unwrap())
    }

    async fn recv(receiver: &mut Box<dyn ChunkReceiver>) -> Message {
        std::future::poll_fn(|cx| receiver.poll_recv(cx)).await.unwrap()
    }

    #[test]
    fn tasks_own_all_vnodes_once() {
        for parallelism in 1..=9 {
            let mut next = 0;
            for task in 0..parallelism {
                let range = owned_vnodes(task, parallelism);
                assert_eq!(range.start, next);
                assert!(range.clone().all(|v| owner(v, parallelism) == task));
                next = range.end;
            }
            assert_eq!(usize::from(next), VNODE_COUNT);
        }
    }

    #[tokio::test]
    async fn rows_reach_the_owner_in_chunks_of_useful_size_before_the_barrier() {
        let governor = MemoryGovernor::new(1 << 30);
        let options = ExecOptions { coalesce_rows: 100, chunk_rows: 150, ..ExecOptions::default() };
        let (senders, mut receivers): (Vec<_>, Vec<_>) =
            (0..3).map(|_| local_channel(1 << 20, &governor)).unzip();
        let mut dispatcher = Dispatcher::new(vec![0], senders, &options);
        for i in 0..100 {
            dispatcher.push(ints(i * 10..i * 10 + 10)).unwrap();
            dispatcher.flush().await.unwrap();
        }
        dispatcher.push(ints(1_000..3_000)).unwrap();
        let barrier = Arc::new(Barrier {
            prev: Epoch(0),
            epoch: Epoch(1),
            backfill: false,
            stage: 0,
            swap: false,
        });
        dispatcher.barrier(&barrier, &Arc::default()).await.unwrap();
        let mut seen = Vec::new();
        for (task, receiver) in receivers.iter_mut().enumerate() {
            let mut chunks = 0;
            while let Message::Chunk(chunk) = recv(receiver).await {
                chunks += 1;
                assert!(chunk.num_rows() <= 150);
                let column = chunk.batch.column(0);
                for h in hash_columns(&[Arc::clone(column)], chunk.num_rows()).unwrap() {
                    assert_eq!(owner(vnode_of(h), 3), task);
                }
                seen.extend(column.as_primitive::<Int64Type>().values().iter().copied());
            }
            assert!(chunks < 15, "{chunks} chunks");
        }
        seen.sort_unstable();
        assert_eq!(seen, (0..3_000).collect::<Vec<i64>>());
        assert_eq!(governor.used(), 0);
    }

    #[tokio::test]
    async fn a_full_channel_holds_the_sender_back_but_lets_one_huge_chunk_pass() {
        let governor = MemoryGovernor::new(1 << 30);
        let (mut sender, mut receiver) = local_channel(64, &governor);
        sender.send(Message::Chunk(ints(0..1_000))).await.unwrap();
        let second = tokio::spawn(async move { sender.send(Message::Chunk(ints(0..10))).await });
        tokio::task::yield_now().await;
        assert!(!second.is_finished());
        recv(&mut receiver).await;
        second.await.unwrap().unwrap();
    }
}
