//! Leaves of a task: where rows enter it (docs/design.md §4, "subscribe").
//!
//! A leaf yields chunks and, at the end of each epoch, its barrier. Exchange leaves get both from
//! their channels. The others are told by the job's cuts what to read: a [`Reader`] produces exactly
//! the rows of `(prev, epoch]`, so a job's content at an epoch depends on nothing but the epoch.
//! Every wait is cancel-safe: what was polled and dropped goes on at the next call.

pub mod estimate;
pub mod exchange;
pub mod generated;
pub mod position;
pub mod relations;
pub mod source;
pub mod subscribe;
pub mod values;
pub mod watermark;

use std::collections::BTreeMap;
use std::sync::Arc;

use async_trait::async_trait;
use millrace_common::DeltaChunk;
use millrace_rpc::version::BackfillPosition;
use tokio::sync::mpsc;

use crate::error::ExecError;
use crate::exchange::{Barrier, Message};
use crate::watermark::WatermarkSet;

/// One input of a task.
#[async_trait]
pub trait Leaf: Send {
    /// The next chunk or barrier. Cancel-safe.
    async fn next(&mut self) -> Result<Message, ExecError>;

    /// How far its first scan has come, as of the last barrier; nothing when it has none.
    fn positions(&self, out: &mut Vec<BackfillPosition>) {
        let _ = out;
    }

    /// Rows its first scan has read since the last call.
    fn take_scanned(&mut self) -> u64 {
        0
    }

    /// What it knows by itself of watermarks, as of the last barrier; an exchange has only what others
    /// told it.
    fn marks(&self) -> WatermarkSet {
        WatermarkSet::default()
    }

    /// What is to be committed with the epoch besides, by name.
    fn counters(&self, out: &mut BTreeMap<String, u64>) {
        let _ = out;
    }
}

/// Reads one input's rows of one epoch after the other.
#[async_trait]
pub trait Reader: Send {
    /// From now on `next` yields the rows of this epoch.
    fn begin(&mut self, barrier: &Barrier) -> Result<(), ExecError>;

    /// The epoch's next rows; `None` at its end. Cancel-safe.
    async fn next(&mut self) -> Result<Option<DeltaChunk>, ExecError>;

    /// See [`Leaf::positions`].
    fn positions(&self, out: &mut Vec<BackfillPosition>);

    /// See [`Leaf::take_scanned`].
    fn take_scanned(&mut self) -> u64 {
        0
    }

    /// See [`Leaf::watermark`]. Asked at the end of an epoch.
    fn marks(&self) -> WatermarkSet {
        WatermarkSet::default()
    }

    /// See [`Leaf::counters`].
    fn counters(&self, out: &mut BTreeMap<String, u64>) {
        let _ = out;
    }
}

/// A leaf whose epochs are the job's cuts.
pub struct CutLeaf<R> {
    cuts: mpsc::UnboundedReceiver<Arc<Barrier>>,
    current: Option<Arc<Barrier>>,
    reader: R,
}

impl<R: Reader> CutLeaf<R> {
    pub fn new(cuts: mpsc::UnboundedReceiver<Arc<Barrier>>, reader: R) -> CutLeaf<R> {
        CutLeaf { cuts, current: None, reader }
    }
}

#[async_trait]
impl<R: Reader> Leaf for CutLeaf<R> {
    async fn next(&mut self) -> Result<Message, ExecError> {
        if self.current.is_none() {
            let barrier = self.cuts.recv().await.ok_or(ExecError::Stopped)?;
            self.reader.begin(&barrier)?;
            self.current = Some(barrier);
        }
        if let Some(chunk) = self.reader.next().await? {
            return Ok(Message::Chunk(chunk));
        }
        match self.current.take() {
            Some(barrier) => Ok(Message::Barrier(barrier, Arc::new(self.reader.marks()))),
            None => Err(ExecError::internal("an input ended an epoch that did not begin")),
        }
    }

    fn positions(&self, out: &mut Vec<BackfillPosition>) {
        self.reader.positions(out);
    }

    fn take_scanned(&mut self) -> u64 {
        self.reader.take_scanned()
    }
    fn marks(&self) -> WatermarkSet {
        self.reader.marks()
    }

    fn counters(&self, out: &mut BTreeMap<String, u64>) {
        self.reader.counters(out);
    }
}
