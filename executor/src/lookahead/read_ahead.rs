//! Rows of a source that are read before the epoch that hands them out (docs/design.md §8).
//!
//! A leaf lends the reader of a split when the split's epoch is read; a [`ReadingAhead`] goes on with it beside the
//! leaf's task, as far as epochs are fixed or about to be, and announces what it finds. Never beyond what the source
//! was last said to have: of a source that makes its rows itself none is made before its time. What is read is kept raw,
//! as the reader gave it. What depends on the epoch is applied by the leaf when it hands rows out: which rows are late,
//! whether a bad row fails or counts, how far the split has come. A batch that does not end where the leaf needs it to,
//! as when an epoch was fixed otherwise than planned, is thrown away and read again.

use std::collections::VecDeque;
use std::sync::Arc;

use arrow::record_batch::RecordBatch;
use futures::StreamExt;
use futures::future::BoxFuture;
use futures::stream::FuturesUnordered;
use millrace_common::RelationId;
use millrace_connector::{BadRow, ConnectorError, OnError, Position, SplitReader};
use millrace_graph::lookahead::Place;
use millrace_rpc::services::MetaService;
use parking_lot::Mutex;
use tokio::sync::{Notify, watch};

use super::uncommitted::{Announced, Uncommitted};
use crate::input::watermark::SourceWatermark;
use crate::memory::{MemoryClass, MemoryGovernor, Reservation};

/// What is held of one split at most, and of all of the process: beyond it nothing more is read, so that one batch of
/// each split may be above it.
const SPLIT_BYTES: usize = 4 << 20;
pub(super) const PROCESS_BYTES: usize = 64 << 20;

/// What a read of a split has given.
pub struct RawBatch {
    pub rows: RecordBatch,
    /// The offset behind it.
    pub after: u64,
    /// Where the next row begins, if the reader knows.
    pub position: Option<Position>,
    pub bad_rows: Vec<BadRow>,
    /// To those that look ahead.
    pub announced: Option<Announced>,
}

impl RawBatch {
    /// The outcome of a read; bad rows count even if it has failed.
    pub fn of(
        result: millrace_connector::ReadResult,
        reader: &mut dyn SplitReader,
    ) -> (Result<Option<RawBatch>, ConnectorError>, Vec<BadRow>) {
        let bad_rows = reader.take_bad_rows();
        match result {
            Ok(Some((rows, after))) => {
                let position = reader.position();
                let batch = RawBatch { rows, after, position, bad_rows, announced: None };
                (Ok(Some(batch)), Vec::new())
            }
            Ok(None) => (Ok(None), bad_rows),
            Err(error) => (Err(error), bad_rows),
        }
    }

    fn memory_size(&self) -> usize {
        self.rows.get_array_memory_size()
    }
}

/// What is read ahead of a leaf's splits, and with what.
pub struct ReadFrom {
    pub relation: RelationId,
    pub watermark: Option<SourceWatermark>,
    pub meta: Arc<dyn MetaService>,
    /// Rows asked for at once.
    pub read_rows: usize,
    pub governor: Arc<MemoryGovernor>,
    /// Those that look ahead of the leaf; rows are announced as the leaf hands them out. `None`: nobody ever does.
    pub followers: Option<Arc<Uncommitted>>,
}

/// A split whose reader is lent.
struct Lent {
    split: u32,
    /// Tells one lending from the next.
    lending: u64,
    /// `None`: it is being read, or was lost by an error.
    reader: Option<Box<dyn SplitReader>>,
    is_reading: bool,
    /// The leaf waits for what is being read.
    is_wanted: bool,
    /// Where the reader is.
    offset: u64,
    /// How far it may go, where that is not for meta to say.
    until: Option<u64>,
    held: VecDeque<RawBatch>,
    bytes: usize,
}

struct State {
    splits: Vec<Lent>,
    lendings: u64,
    /// Of all splits' bytes.
    account: Reservation,
    /// The leaf, or what reads ahead of it, is gone.
    is_over: bool,
}

impl State {
    fn split(&mut self, split: u32) -> Option<&mut Lent> {
        self.splits.iter_mut().find(|s| s.split == split)
    }

    fn recount(&mut self) {
        let bytes = self.splits.iter().map(|s| s.bytes).sum();
        self.account.set(bytes);
    }

    /// Whether a split's reader is there, and may go on as far as memory is concerned.
    fn may_read(&self, at: usize, governor: &MemoryGovernor) -> bool {
        let split = &self.splits[at];
        split.reader.is_some()
            && split.bytes < SPLIT_BYTES
            && governor.used_by(MemoryClass::Ahead) < PROCESS_BYTES
            && !governor.is_tight()
    }
}

struct Shared {
    state: Mutex<State>,
    /// There is a reader, or room.
    lent: Notify,
    /// A read has ended.
    read: Notify,
}

/// The leaf's end.
pub struct ReadAhead(Arc<Shared>);

/// What goes on with the readers that a leaf has lent. Ends with the leaf.
pub struct ReadingAhead {
    from: ReadFrom,
    shared: Arc<Shared>,
}

/// What the leaf gets of a split.
pub enum Taken {
    Batch(RawBatch),
    /// Nothing is held. `None`: it was not lent, or lost by an error.
    Reader(Option<Box<dyn SplitReader>>),
}

/// For one leaf of one task.
pub fn read_ahead(from: ReadFrom) -> (ReadAhead, ReadingAhead) {
    let state = State {
        splits: Vec::new(),
        lendings: 0,
        account: from.governor.account(MemoryClass::Ahead),
        is_over: false,
    };
    let shared = Shared { state: Mutex::new(state), lent: Notify::new(), read: Notify::new() };
    let shared = Arc::new(shared);
    (ReadAhead(Arc::clone(&shared)), ReadingAhead { from, shared })
}

impl ReadAhead {
    /// Lets a split be read ahead from `offset`, where its reader is; up to `until`, else as far as meta says. One that
    /// is lent already may go so far from now on.
    pub fn lend(
        &self,
        split: u32,
        reader: &mut Option<Box<dyn SplitReader>>,
        offset: u64,
        until: Option<u64>,
    ) {
        let mut state = self.0.state.lock();
        if state.is_over {
            return;
        }
        if reader.is_none() {
            if let Some(lent) = state.split(split) {
                lent.until = until;
                self.0.lent.notify_one();
            }
            return;
        }
        state.lendings += 1;
        let lent = Lent {
            split,
            lending: state.lendings,
            reader: reader.take(),
            is_reading: false,
            is_wanted: false,
            offset,
            until,
            held: VecDeque::new(),
            bytes: 0,
        };
        match state.split(split) {
            Some(known) => *known = lent,
            None => state.splits.push(lent),
        }
        drop(state);
        self.0.lent.notify_one();
    }

    /// What follows of a split: waits for what is being read of it. Cancel-safe.
    pub async fn take(&self, split: u32) -> Taken {
        loop {
            let mut ended = std::pin::pin!(self.0.read.notified());
            ended.as_mut().enable();
            if let Some(taken) = self.try_take(split) {
                return taken;
            }
            ended.await;
        }
    }

    fn try_take(&self, split: u32) -> Option<Taken> {
        let mut state = self.0.state.lock();
        let is_over = state.is_over;
        let Some(lent) = state.split(split) else { return Some(Taken::Reader(None)) };
        if let Some(batch) = lent.held.pop_front() {
            lent.bytes -= batch.memory_size();
            state.recount();
            drop(state);
            self.0.lent.notify_one();
            return Some(Taken::Batch(batch));
        }
        if lent.is_reading && !is_over {
            lent.is_wanted = true;
            return None;
        }
        let reader = lent.reader.take();
        state.splits.retain(|s| s.split != split);
        Some(Taken::Reader(reader))
    }

    /// Throws away what is held of a split, and its reader.
    pub fn discard(&self, split: u32) {
        let mut state = self.0.state.lock();
        state.splits.retain(|s| s.split != split);
        state.recount();
    }

    /// Where the reader of a split is that is lent.
    pub fn position_of_the_reader(&self, split: u32) -> Option<Position> {
        self.0.state.lock().split(split)?.held.back()?.position
    }
}

impl Drop for ReadAhead {
    fn drop(&mut self) {
        self.0.state.lock().is_over = true;
        self.0.lent.notify_one();
    }
}

/// The outcome of a read, with the reader.
struct Read {
    split: u32,
    lending: u64,
    /// `None`: nothing that the leaf could use.
    batch: Option<RawBatch>,
    reader: Box<dyn SplitReader>,
}

impl ReadingAhead {
    /// Until the leaf is gone.
    pub async fn run(self) {
        let mut changes = self.from.meta.changes(self.from.relation);
        let mut reads = FuturesUnordered::new();
        let shared = Arc::clone(&self.shared);
        loop {
            let mut lent = std::pin::pin!(shared.lent.notified());
            lent.as_mut().enable();
            if let Some(changes) = &mut changes {
                changes.mark_unchanged();
            }
            if self.shared.state.lock().is_over {
                return;
            }
            reads.extend(self.next_reads());
            tokio::select! {
                Some(read) = reads.next() => self.keep(read),
                () = lent => {}
                () = changed(&mut changes) => {}
            }
        }
    }

    /// Of every split that may be read, the next read.
    fn next_reads(&self) -> Vec<BoxFuture<'static, Read>> {
        let mut state = self.shared.state.lock();
        let mut reads = Vec::new();
        for at in 0..state.splits.len() {
            if !state.may_read(at, &self.from.governor) {
                continue;
            }
            let lent = &mut state.splits[at];
            let bound = match lent.until {
                Some(until) => Some(until).filter(|until| *until > lent.offset),
                None => self.from.meta.source_ahead(self.from.relation, lent.split, lent.offset),
            };
            if let (Some(until), Some(reader)) = (bound, lent.reader.take()) {
                lent.is_reading = true;
                reads.push(self.read(lent.split, lent.lending, until, lent.offset, reader));
            }
        }
        reads
    }

    fn read(
        &self,
        split: u32,
        lending: u64,
        until: u64,
        offset: u64,
        mut reader: Box<dyn SplitReader>,
    ) -> BoxFuture<'static, Read> {
        reader.extend(&self.from.meta.source_parts(self.from.relation));
        if let Some(value) = self.from.meta.option(self.from.relation, "on_error") {
            reader.set_on_error(OnError::named(&value));
        }
        let rows = self.from.read_rows;
        Box::pin(async move {
            let result = reader.read(until, rows).await;
            let (result, _) = RawBatch::of(result, reader.as_mut());
            // An error is the leaf's to meet, when it reads the same.
            let usable = |b: &RawBatch| b.after > offset && b.after <= until;
            let batch = result.ok().flatten().filter(usable);
            Read { split, lending, batch, reader }
        })
    }

    /// Keeps what was read, if the leaf has not given it up.
    fn keep(&self, mut read: Read) {
        if let Some(batch) = &mut read.batch
            && !self.is_wanted(read.split)
        {
            batch.announced = self.announce(&batch.rows);
        }
        let mut state = self.shared.state.lock();
        let lent = state.split(read.split).filter(|lent| lent.lending == read.lending);
        if let Some(lent) = lent {
            (lent.is_reading, lent.is_wanted) = (false, false);
            if let Some(batch) = read.batch {
                lent.offset = batch.after;
                lent.reader = Some(read.reader);
                lent.bytes += batch.memory_size();
                lent.held.push_back(batch);
            }
            state.recount();
        }
        drop(state);
        self.shared.read.notify_waiters();
    }

    /// The leaf waits for what is being read: a hint would come with the rows.
    fn is_wanted(&self, split: u32) -> bool {
        self.shared.state.lock().split(split).is_some_and(|lent| lent.is_wanted)
    }

    /// Tells those that look ahead of rows as the leaf hands them out.
    fn announce(&self, rows: &RecordBatch) -> Option<Announced> {
        let rows = || match &self.from.watermark {
            None => vec![rows.clone()],
            // What fails is reported when the leaf computes it.
            Some(w) => w.asked(rows.clone(), &Arc::default()).into_iter().collect(),
        };
        self.from.followers.as_ref()?.announce(self.from.relation, Place::Entry, None, rows)
    }
}

impl Drop for ReadingAhead {
    /// The leaf reads by itself, from where it is.
    fn drop(&mut self) {
        self.shared.state.lock().is_over = true;
        self.shared.read.notify_waiters();
    }
}

/// More may be ahead.
async fn changed(changes: &mut Option<watch::Receiver<u64>>) {
    let told = match changes {
        Some(changes) => changes.changed().await.is_ok(),
        None => false,
    };
    if !told {
        std::future::pending::<()>().await;
    }
}
