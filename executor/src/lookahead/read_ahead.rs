//! Rows of a source that are read before the epoch that hands them out (docs/design.md §8).
//!
//! Who reads the source, the leaf of a job or the feed of a table, is called the leaf here: to a feed, its epochs are
//! what the log says the splits have. A leaf lends the reader of a split when it has read a batch; a
//! [`ReadingAhead`] goes on with it beside the leaf's task, as far as epochs are fixed or about to be, and announces
//! what it finds. Splits to which a job's leaf has not come it opens itself ([`first`]). Never beyond what the source was
//! last said to have: of a source that makes its rows itself none is made before its time. What is read is kept raw, as
//! the reader gave it. What depends on the epoch is applied by the leaf when it hands rows out: which rows are late,
//! whether a bad row fails or counts, how far the split has come. A batch that does not end where the leaf needs it to,
//! as when an epoch was fixed otherwise than planned, is thrown away and read again. So is what no leaf takes for a
//! while: a job that stands still holds nothing.

mod first;
#[cfg(test)]
mod tests;
mod told;

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use arrow::array::{Array, Int64Array};
use arrow::record_batch::RecordBatch;
use futures::StreamExt;
use futures::future::BoxFuture;
use futures::stream::FuturesUnordered;
use millrace_common::task::spawn_blocking;
use millrace_common::{EnvHandle, RelationId};
use millrace_connector::{BadRow, ConnectorError, OnError, Position, SplitReader};
use millrace_rpc::services::{MetaService, SourceParts};
use parking_lot::Mutex;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep_until};

use self::first::First;
pub use self::first::Unread;
pub use self::told::{LeafFollowers, Told};
use super::keys_ahead::KeysAhead;
use super::uncommitted::Announced;
use crate::memory::{MemoryClass, MemoryGovernor, Reservation};

/// What is held of one split at most, and of all of the process: beyond it nothing more is read, so that one batch of
/// each split may be above it.
const SPLIT_BYTES: usize = 4 << 20;
const PROCESS_BYTES: usize = 64 << 20;
/// What the process may hold is this part of the memory limit, where that is less.
const PROCESS_PART: usize = 16;
/// Of a batch, and of a bad row beside its texts, with what the allocator adds.
const BATCH_BYTES: usize = 512;
const BAD_ROW_BYTES: usize = size_of::<BadRow>() + 256;
/// Reads of state for rows that a leaf hands out next, at a time.
const PREFETCHES: usize = 4;
/// A leaf that takes nothing for so long stands still.
const STANDS_STILL: Duration = Duration::from_secs(10);

/// What the process may hold of rows that are read before their epochs.
pub(super) fn process_bytes(governor: &MemoryGovernor) -> usize {
    PROCESS_BYTES.min(governor.limit() / PROCESS_PART)
}

/// What a read of a split has given.
pub struct RawBatch {
    pub rows: RecordBatch,
    /// See [`SplitReader::weights`].
    pub weights: Option<Int64Array>,
    /// The offset behind it.
    pub after: u64,
    /// Where the next row begins, if the reader knows.
    pub position: Option<Position>,
    pub bad_rows: Vec<BadRow>,
    /// To those that look ahead.
    pub announced: Option<Announced>,
    /// What is read ahead for its rows.
    pub keys: KeysAhead,
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
                let (weights, position) = (reader.weights(), reader.position());
                let (announced, keys) = (None, KeysAhead::default());
                let batch = RawBatch { rows, weights, after, position, bad_rows, announced, keys };
                (Ok(Some(batch)), Vec::new())
            }
            Ok(None) => (Ok(None), bad_rows),
            Err(error) => (Err(error), bad_rows),
        }
    }

    pub(crate) fn memory_size(&self) -> usize {
        let of = |bad: &BadRow| BAD_ROW_BYTES + bad.place.len() + bad.error.message.len();
        let bad_rows: usize = self.bad_rows.iter().map(of).sum();
        let weights = self.weights.as_ref().map_or(0, Array::get_array_memory_size);
        BATCH_BYTES + self.rows.get_array_memory_size() + weights + bad_rows
    }
}

/// What is read ahead of a leaf's splits, and with what.
pub struct ReadFrom {
    pub relation: RelationId,
    pub meta: Arc<dyn MetaService>,
    /// Rows asked for at once.
    pub read_rows: usize,
    pub governor: Arc<MemoryGovernor>,
    pub clock: EnvHandle,
    pub told: Box<dyn Told>,
    /// Splits to which the leaf has not come. `None`: they wait until it does.
    pub unread: Option<Box<dyn Unread>>,
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
    /// Nothing is ahead, as meta has said; until it says that something has changed.
    is_at_end: bool,
    /// Where what is held begins, ...
    begins: u64,
    /// ... and where the reader is.
    offset: u64,
    /// How far it may go before meta is asked. In steps of a first scan, and for a feed, it goes no further.
    until: Option<u64>,
    held: VecDeque<RawBatch>,
    bytes: usize,
    /// State has been asked for, for the first batch that is held.
    is_prefetched: bool,
    /// It was opened for the leaf, and nothing has been read of it yet.
    is_first: bool,
}

struct State {
    splits: Vec<Lent>,
    first: First,
    lendings: u64,
    /// Of all splits' bytes.
    account: Reservation,
    /// When the leaf last took something.
    taken: Instant,
    /// The leaf, or what reads ahead of it, is gone.
    is_over: bool,
}

impl State {
    fn split(&mut self, split: u32) -> Option<&mut Lent> {
        self.splits.iter_mut().find(|s| s.split == split)
    }

    /// Takes in the reader of a split, which is at `offset`.
    fn lend(&mut self, split: u32, reader: Box<dyn SplitReader>, offset: u64, until: Option<u64>) {
        self.lendings += 1;
        let lent = Lent {
            split,
            lending: self.lendings,
            reader: Some(reader),
            is_reading: false,
            is_wanted: false,
            is_at_end: false,
            begins: offset,
            offset,
            until,
            held: VecDeque::new(),
            bytes: 0,
            is_prefetched: false,
            is_first: false,
        };
        match self.split(split) {
            Some(known) => *known = lent,
            None => self.splits.push(lent),
        }
    }

    /// Gives up what is lent of a split; for [`close`].
    fn remove(&mut self, split: u32) -> Vec<Lent> {
        let (own, others): (Vec<Lent>, Vec<Lent>) =
            self.splits.drain(..).partition(|s| s.split == split);
        self.splits = others;
        self.recount();
        own
    }

    fn recount(&mut self) {
        let bytes = self.splits.iter().map(|s| s.bytes).sum();
        self.account.set(bytes);
    }

    /// Whether a split's reader is there, and may go on as far as memory is concerned.
    fn may_read(&self, at: usize, governor: &MemoryGovernor) -> bool {
        let split = &self.splits[at];
        split.reader.is_some() && split.bytes < SPLIT_BYTES && has_room(governor)
    }
}

/// Whether the process may hold more.
fn has_room(governor: &MemoryGovernor) -> bool {
    governor.used_by(MemoryClass::Ahead) < process_bytes(governor) && !governor.is_tight()
}

struct Shared {
    state: Mutex<State>,
    clock: EnvHandle,
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
enum Taken {
    Batch(Box<RawBatch>),
    /// Nothing is held. `None`: it was not lent, or lost by an error.
    Reader(Option<Box<dyn SplitReader>>),
}

/// For one leaf of one task.
pub fn read_ahead(from: ReadFrom) -> (ReadAhead, ReadingAhead) {
    let state = State {
        splits: Vec::new(),
        first: First::default(),
        lendings: 0,
        account: from.governor.account(MemoryClass::Ahead),
        taken: from.clock.now(),
        is_over: false,
    };
    let shared = Arc::new(Shared {
        state: Mutex::new(state),
        clock: from.clock.clone(),
        lent: Notify::new(),
        read: Notify::new(),
    });
    (ReadAhead(Arc::clone(&shared)), ReadingAhead { from, shared })
}

impl ReadAhead {
    /// Lets a split be read ahead from `offset`, where its reader is: first up to `until`, then as far as meta says, in
    /// a first scan not further. One that is lent already may go so far from now on.
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
        match reader.take() {
            Some(reader) => state.lend(split, reader, offset, until),
            None => {
                // What meta has said stays true where nothing is changed.
                let changes = |lent: &&mut Lent| until.is_none() || lent.until != until;
                let Some(lent) = state.split(split).filter(changes) else { return };
                lent.until = until;
                lent.is_at_end = false;
            }
        }
        drop(state);
        self.0.lent.notify_one();
    }

    /// The next rows of a split, if they were read ahead and may be handed out as they are: they lie in `within`, from its
    /// beginning on, and no bad row among them `fails`. Throws them away where they may not; where there are none, takes
    /// the reader back and tells it of `parts`. Cancel-safe.
    pub async fn take_batch(
        &self,
        split: u32,
        reader: &mut Option<Box<dyn SplitReader>>,
        parts: &SourceParts,
        within: Range<u64>,
        fails: impl FnOnce() -> bool,
    ) -> Option<RawBatch> {
        match self.take(split, within.start).await {
            Taken::Batch(batch) => {
                let fails = !batch.bad_rows.is_empty() && fails();
                if batch.after <= within.end && !fails {
                    return Some(*batch);
                }
                self.discard(split);
            }
            Taken::Reader(Some(mut lent)) => {
                lent.extend(parts);
                *reader = Some(lent);
            }
            Taken::Reader(None) => {}
        }
        None
    }

    /// What follows of a split from `offset` on: waits for what is being read of it. Cancel-safe.
    async fn take(&self, split: u32, offset: u64) -> Taken {
        loop {
            let mut ended = std::pin::pin!(self.0.read.notified());
            ended.as_mut().enable();
            if let Some(taken) = self.try_take(split, offset) {
                return taken;
            }
            ended.await;
        }
    }

    fn try_take(&self, split: u32, offset: u64) -> Option<Taken> {
        let mut state = self.0.state.lock();
        let is_over = state.is_over;
        state.taken = self.0.clock.now();
        state.first.met.insert(split);
        let Some(lent) = state.split(split) else { return Some(Taken::Reader(None)) };
        if lent.begins != offset {
            // It does not go on where the leaf is.
            let elsewhere = state.remove(split);
            drop(state);
            close(elsewhere);
            return Some(Taken::Reader(None));
        }
        if let Some(batch) = lent.held.pop_front() {
            lent.bytes -= batch.memory_size();
            lent.begins = batch.after;
            lent.is_prefetched = false;
            state.recount();
            drop(state);
            self.0.lent.notify_one();
            return Some(Taken::Batch(Box::new(batch)));
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
        let own = self.0.state.lock().remove(split);
        close(own);
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
        let mut seen = None;
        let mut reads = FuturesUnordered::new();
        let mut prefetches: FuturesUnordered<BoxFuture<'static, ()>> = FuturesUnordered::new();
        let shared = Arc::clone(&self.shared);
        loop {
            let mut lent = std::pin::pin!(shared.lent.notified());
            lent.as_mut().enable();
            let now = changes.as_mut().map(|changes| *changes.borrow_and_update());
            if now.is_none() || now != seen {
                self.look_again();
                seen = now;
            }
            if self.shared.state.lock().is_over {
                return;
            }
            let has_more = self.open_first();
            reads.extend(self.next_reads());
            let under_way = prefetches.len();
            prefetches.extend(self.next_prefetches(under_way));
            tokio::select! {
                Some(read) = reads.next() => {
                    self.keep(read);
                    // A reader that makes its rows itself never waits.
                    tokio::task::yield_now().await;
                }
                Some(()) = prefetches.next() => {}
                () = tokio::task::yield_now(), if has_more => {}
                () = lent => {}
                () = changed(&mut changes) => {}
                () = self.until_it_stands_still() => self.give_back(),
            }
        }
    }

    /// Something may be ahead of every split.
    fn look_again(&self) {
        let mut state = self.shared.state.lock();
        state.splits.iter_mut().for_each(|split| split.is_at_end = false);
        state.first.is_at_end = false;
    }

    /// Until the leaf has taken nothing for a while of what is held for it; for ever where nothing is.
    async fn until_it_stands_still(&self) {
        let taken = {
            let state = self.shared.state.lock();
            (state.account.bytes() > 0).then_some(state.taken)
        };
        match taken {
            Some(taken) => sleep_until(taken + STANDS_STILL).await,
            None => std::future::pending().await,
        }
    }

    /// Throws away what is held, unless the leaf has taken something: it reads by itself when it goes on.
    fn give_back(&self) {
        let mut state = self.shared.state.lock();
        if state.splits.iter().any(|split| split.is_wanted) {
            // It waits for a slow read.
            state.taken = self.shared.clock.now();
        }
        if self.shared.clock.elapsed(state.taken) < STANDS_STILL {
            return;
        }
        let given_back = std::mem::take(&mut state.splits);
        state.recount();
        drop(state);
        close(given_back);
    }

    /// Of every split that may be read, the next read.
    fn next_reads(&self) -> Vec<BoxFuture<'static, Read>> {
        let mut state = self.shared.state.lock();
        let may_read = |at: &usize| state.may_read(*at, &self.from.governor);
        let readable: Vec<usize> = (0..state.splits.len()).filter(may_read).collect();
        let asks_beyond = state.first.asks_beyond();
        let ends = self.ends(readable.iter().map(|&at| &state.splits[at]), asks_beyond);
        let mut reads = Vec::new();
        for (at, bound) in readable.into_iter().zip(ends) {
            let lent = &mut state.splits[at];
            lent.is_at_end = bound.is_none();
            // A reader that stands at the end stays, for what follows.
            let Some(until) = bound else { continue };
            if let Some(reader) = lent.reader.take() {
                lent.is_reading = true;
                reads.push(self.read(lent.split, lent.lending, until, lent.offset, reader));
            }
        }
        reads
    }

    /// Reads of state for the first batches that are held, as many as may begin beside those under way.
    fn next_prefetches(&self, under_way: usize) -> Vec<BoxFuture<'static, ()>> {
        let told = &self.from.told;
        if !told.wants_prefetches() || self.from.governor.is_tight() {
            return Vec::new();
        }
        let first = |lent: &mut Lent| {
            let batch = lent.held.front().filter(|_| !lent.is_prefetched)?;
            let next = (batch.rows.clone(), batch.weights.clone(), batch.keys.clone());
            lent.is_prefetched = true;
            Some(next)
        };
        let room = PREFETCHES.saturating_sub(under_way);
        let next: Vec<_> =
            self.shared.state.lock().splits.iter_mut().filter_map(first).take(room).collect();
        let reads = next.into_iter();
        reads.filter_map(|(rows, weights, keys)| told.prefetch(rows, weights, keys)).collect()
    }

    /// How far each of these splits may be read now; meta is asked once. `asks_beyond`: of those that have come as far as
    /// the leaf has said, too.
    fn ends<'a>(
        &self,
        splits: impl Iterator<Item = &'a Lent>,
        asks_beyond: bool,
    ) -> Vec<Option<u64>> {
        let mut asked = Vec::new();
        let mut ends = Vec::new();
        for lent in splits {
            let end = lent.until.filter(|until| *until > lent.offset);
            let asks = lent.until.is_none() || (end.is_none() && asks_beyond);
            if asks && !lent.is_at_end {
                asked.push((ends.len(), (lent.split, lent.offset)));
            }
            ends.push(end);
        }
        let (places, splits): (Vec<usize>, Vec<(u32, u64)>) = asked.into_iter().unzip();
        if !splits.is_empty() {
            let found = self.from.meta.source_ahead(self.from.relation, &splits);
            places.into_iter().zip(found).for_each(|(at, end)| ends[at] = end);
        }
        ends
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
            batch.announced = self.from.told.announce(batch);
        }
        let mut state = self.shared.state.lock();
        let lent = state.split(read.split).filter(|lent| lent.lending == read.lending);
        let mut unused = Some(read.reader);
        if let Some(lent) = lent {
            (lent.is_reading, lent.is_wanted, lent.is_first) = (false, false, false);
            if let Some(batch) = read.batch {
                lent.offset = batch.after;
                lent.reader = unused.take();
                lent.bytes += batch.memory_size();
                lent.held.push_back(batch);
            }
            state.recount();
        }
        drop(state);
        self.shared.read.notify_waiters();
        close(unused);
    }

    /// The leaf waits for what is being read: a hint would come with the rows.
    fn is_wanted(&self, split: u32) -> bool {
        self.shared.state.lock().split(split).is_some_and(|lent| lent.is_wanted)
    }
}

impl Drop for ReadingAhead {
    /// The leaf reads by itself, from where it is.
    fn drop(&mut self) {
        self.shared.state.lock().is_over = true;
        self.shared.read.notify_waiters();
    }
}

/// Drops readers, or what holds them: a client of another system may take its time to leave.
fn close<T>(readers: impl IntoIterator<Item = T, IntoIter: ExactSizeIterator>)
where
    T: Send + 'static,
{
    let readers = readers.into_iter();
    if readers.len() > 0 {
        let readers: Vec<_> = readers.collect();
        spawn_blocking("close readers of a source", move || drop(readers));
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
