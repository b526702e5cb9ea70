//! Rows that a leaf reads from the store, read before they are asked for (docs/design.md §8): the next step of a first
//! scan while the last is processed and committed, and the next part of a change that does not fit into memory.
//!
//! A stream is driven beside the leaf's task. What it gives waits, a bounded number of bytes of it, and is announced
//! meanwhile: keys of a part are read ahead while rows of the part before are processed. Which rows an epoch has is the
//! leaf's affair: it takes no more than belong to it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use futures::StreamExt;
use futures::future::BoxFuture;
use futures::stream::{BoxStream, FuturesUnordered};
use millrace_common::{DeltaChunk, Epoch, RelationId};
use millrace_graph::lookahead::Place;
use millrace_storage::StorageError;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};

use super::read_ahead::process_bytes;
use super::uncommitted::{Announced, Uncommitted};
use crate::error::ExecError;
use crate::memory::{MemoryClass, MemoryGovernor, Reservation};

/// What waits of one stream at most; one item may be larger.
const STREAM_BYTES: usize = 4 << 20;
/// Rows of it: more keys than these cannot be read ahead at once.
const STREAM_ROWS: usize = 8_192;

/// What was read ahead, until it is handed out.
pub struct Held<T> {
    item: T,
    announced: Option<Announced>,
    room: Option<(OwnedSemaphorePermit, Reservation)>,
}

impl<T> Held<T> {
    /// What is read when it is asked for.
    pub fn now(item: T) -> Held<T> {
        Held { item, announced: None, room: None }
    }

    /// The rows are those of an epoch that is being read.
    pub fn hand_out(self, epoch: Epoch) -> T {
        drop(self.room);
        if let Some(announced) = self.announced {
            announced.committed(epoch);
        }
        self.item
    }
}

/// Items as they are handed out.
pub type HeldStream<T> = BoxStream<'static, Result<Held<T>, ExecError>>;

/// For one leaf of one task.
pub struct StreamAhead {
    relation: RelationId,
    followers: Arc<Uncommitted>,
    governor: Arc<MemoryGovernor>,
    pumps: mpsc::UnboundedSender<BoxFuture<'static, ()>>,
}

/// What drives the streams of one leaf. Ends with it.
pub struct Pumps(mpsc::UnboundedReceiver<BoxFuture<'static, ()>>);

/// A leaf's streams, and what drives them. `followers` are told of rows as the leaf hands them out.
pub fn stream_ahead(
    relation: RelationId,
    followers: Arc<Uncommitted>,
    governor: Arc<MemoryGovernor>,
) -> (StreamAhead, Pumps) {
    let (pumps, driven) = mpsc::unbounded_channel();
    (StreamAhead { relation, followers, governor, pumps }, Pumps(driven))
}

impl Pumps {
    /// Until the leaf is gone.
    pub async fn run(mut self) {
        let mut pumps = FuturesUnordered::new();
        loop {
            tokio::select! {
                pump = self.0.recv() => match pump {
                    Some(pump) => pumps.push(pump),
                    None => return,
                },
                Some(()) = pumps.next() => {}
            }
        }
    }
}

enum Sent<T> {
    Item(Held<T>),
    Failed(StorageError),
    End,
}

/// What reads a stream for a leaf.
struct Pump<T> {
    relation: RelationId,
    followers: Arc<Uncommitted>,
    governor: Arc<MemoryGovernor>,
    room: Arc<Semaphore>,
    to: mpsc::UnboundedSender<Sent<T>>,
    /// The leaf has nothing and waits.
    is_awaited: Arc<AtomicBool>,
}

impl StreamAhead {
    /// Somebody wants to know.
    pub fn is_followed(&self) -> bool {
        self.followers.following() > 0
    }

    /// Tells of rows of an epoch, as the leaf will hand them out.
    pub fn tell(&self, epoch: Epoch, rows: &DeltaChunk) {
        let announced =
            self.followers.announce(self.relation, Place::Leaf, Some(epoch), || vec![rows.clone()]);
        if let Some(announced) = announced {
            announced.committed(epoch);
        }
    }

    /// The same items, read before they are asked for. `rows`: those of an item as the leaf hands them out.
    pub fn drive<T: Send + 'static>(
        &self,
        stream: BoxStream<'static, Result<T, StorageError>>,
        rows: impl Fn(&T) -> Option<DeltaChunk> + Send + Sync + 'static,
    ) -> HeldStream<T> {
        let (to, mut items) = mpsc::unbounded_channel();
        let is_awaited = Arc::new(AtomicBool::new(true));
        let pump = Pump {
            relation: self.relation,
            followers: Arc::clone(&self.followers),
            governor: Arc::clone(&self.governor),
            room: Arc::new(Semaphore::new(STREAM_BYTES)),
            to,
            is_awaited: Arc::clone(&is_awaited),
        };
        // If nobody drives it, the channel is closed.
        let _ = self.pumps.send(Box::pin(pump.run(stream, rows)));
        futures::stream::poll_fn(move |cx| {
            let next = items.poll_recv(cx);
            is_awaited.store(next.is_pending(), Ordering::Relaxed);
            next.map(|sent| match sent {
                Some(Sent::Item(item)) => Some(Ok(item)),
                Some(Sent::Failed(error)) => Some(Err(error.into())),
                Some(Sent::End) => None,
                None => Some(Err(ExecError::internal("what reads ahead of a leaf has ended"))),
            })
        })
        .boxed()
    }
}

impl<T: Send + 'static> Pump<T> {
    async fn run(
        self,
        mut stream: BoxStream<'static, Result<T, StorageError>>,
        rows: impl Fn(&T) -> Option<DeltaChunk> + Send + Sync + 'static,
    ) {
        let work = async {
            loop {
                let sent = match stream.next().await {
                    Some(Ok(item)) => Sent::Item(self.hold(item, &rows).await),
                    Some(Err(error)) => Sent::Failed(error),
                    None => Sent::End,
                };
                let is_last = !matches!(sent, Sent::Item(_));
                if self.to.send(sent).is_err() || is_last {
                    return;
                }
            }
        };
        tokio::select! {
            biased;
            // Nobody wants the rest.
            () = self.to.closed() => {}
            () = work => {}
        }
    }

    /// An item, announced, when there is room for it.
    async fn hold(&self, item: T, rows: &(impl Fn(&T) -> Option<DeltaChunk> + Sync)) -> Held<T> {
        let rows = rows(&item);
        let bytes = rows.as_ref().map_or(0, |rows| rows.batch.get_array_memory_size());
        let count = rows.as_ref().map_or(0, DeltaChunk::num_rows);
        let is_short = self.governor.is_tight()
            || self.governor.used_by(MemoryClass::Ahead) > process_bytes(&self.governor);
        // Where memory is short one item waits at a time.
        let wanted = match is_short {
            true => STREAM_BYTES,
            false => bytes.max(count * (STREAM_BYTES / STREAM_ROWS)).clamp(1, STREAM_BYTES),
        };
        let permit = Arc::clone(&self.room).acquire_many_owned(wanted as u32).await;
        // What the leaf waits for it gets at once.
        let announced = match rows {
            Some(rows) if !self.is_awaited.swap(false, Ordering::Relaxed) => {
                self.followers.announce(self.relation, Place::Leaf, None, || vec![rows])
            }
            _ => None,
        };
        let mut account = self.governor.account(MemoryClass::Ahead);
        account.set(bytes);
        // Nobody closes it.
        Held { item, announced, room: permit.ok().map(|permit| (permit, account)) }
    }
}

/// Items that are read when they are asked for.
pub fn unhurried<T: Send + 'static>(
    stream: BoxStream<'static, Result<T, StorageError>>,
) -> HeldStream<T> {
    stream.map(|item| Ok(Held::now(item?))).boxed()
}

#[cfg(test)]
mod tests {
    use arrow::array::{ArrayRef, Int64Array, RecordBatch};

    use super::*;

    const R: RelationId = RelationId(7);

    fn batch(first: i64, rows: i64) -> RecordBatch {
        let column: ArrayRef = Arc::new(Int64Array::from_iter_values(first..first + rows));
        RecordBatch::try_from_iter([("a", column)]).unwrap()
    }

    fn batches(count: i64, rows: i64) -> BoxStream<'static, Result<RecordBatch, StorageError>> {
        futures::stream::iter((0..count).map(move |i| Ok(batch(i * rows, rows)))).boxed()
    }

    fn ahead() -> (Arc<Uncommitted>, Arc<MemoryGovernor>, StreamAhead, Pumps) {
        let (followers, governor) = (Arc::<Uncommitted>::default(), MemoryGovernor::new(1 << 30));
        let (ahead, pumps) = stream_ahead(R, Arc::clone(&followers), Arc::clone(&governor));
        (followers, governor, ahead, pumps)
    }

    async fn settle() {
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn what_follows_is_read_and_announced_while_an_item_is_processed() {
        let (followers, governor, ahead, pumps) = ahead();
        let mut following = followers.follow(R, vec![Place::Leaf]);
        let driver = tokio::spawn(pumps.run());
        let mut items =
            ahead.drive(batches(3, 10), |batch| Some(DeltaChunk::inserts(batch.clone())));
        assert_eq!(items.next().await.unwrap().unwrap().hand_out(Epoch(5)), batch(0, 10));
        settle().await;
        let told = following.next().await.unwrap();
        assert_eq!((told.place, told.rows.len()), (Place::Leaf, 1));
        assert_eq!(told.rows[0].batch, batch(10, 10));
        assert!(governor.used_by(MemoryClass::Ahead) > 0 && !told.due.has_passed(u64::MAX));
        assert_eq!(items.next().await.unwrap().unwrap().hand_out(Epoch(6)), batch(10, 10));
        assert!(told.due.has_passed(6) && !told.due.has_passed(5), "with the epoch that took it");
        let last = following.next().await.unwrap();
        drop(items);
        settle().await;
        assert!(last.due.has_passed(2), "it was never handed out");
        assert_eq!(governor.used_by(MemoryClass::Ahead), 0);
        drop(ahead);
        driver.await.unwrap();
    }

    #[tokio::test]
    async fn what_waits_is_bounded_and_nothing_is_missing() {
        let (_, governor, ahead, pumps) = ahead();
        tokio::spawn(pumps.run());
        let rows = STREAM_ROWS as i64 / 4;
        let mut items =
            ahead.drive(batches(30, rows), |batch| Some(DeltaChunk::inserts(batch.clone())));
        let first = items.next().await.unwrap().unwrap();
        settle().await;
        let one = batch(0, rows).get_array_memory_size();
        assert_eq!(governor.used_by(MemoryClass::Ahead), 4 * one, "the first is with the leaf");
        drop(first);
        let mut count = 1;
        while let Some(item) = items.next().await {
            assert_eq!(item.unwrap().hand_out(Epoch(1)), batch(count * rows, rows));
            count += 1;
        }
        assert_eq!((count, governor.used_by(MemoryClass::Ahead)), (30, 0));
    }

    #[tokio::test]
    async fn a_stream_that_nobody_drives_fails_and_does_not_end() {
        let (_, _, ahead, pumps) = ahead();
        drop(pumps);
        let mut items = ahead.drive(batches(3, 10), |_| None);
        assert!(items.next().await.unwrap().is_err());
    }
}
