//! The tail: commits of all jobs, packed into few objects (docs/design.md §9).
//!
//! One put is in flight; commits that arrive meanwhile wait and share the next. So a lone commit pays
//! one put without delay, and under load the number of puts does not grow with the number of jobs.
//! Slices below a threshold cost no put at all: they ride in the log record.

use std::sync::Arc;

use bytes::Bytes;
use millrace_common::crash;
use millrace_common::task::spawn;
use millrace_rpc::version::SliceRef;
use object_store::ObjectStore;
use parking_lot::Mutex;
use tokio::sync::oneshot;

use crate::error::{Result, StorageError};
use crate::segment::{ObjectNamer, SegmentWriter};

/// Bytes of one tail segment, beyond which waiting slices go into the next.
const SEGMENT_BYTES: usize = 64 << 20;

struct Waiting {
    bytes: Bytes,
    done: oneshot::Sender<Result<SliceRef>>,
}

#[derive(Default)]
struct Queue {
    waiting: Vec<Waiting>,
    put_in_flight: bool,
}

struct Inner {
    store: Arc<dyn ObjectStore>,
    namer: Arc<ObjectNamer>,
    queue: Mutex<Queue>,
}

pub(crate) struct Tail {
    inner: Arc<Inner>,
    inline_bytes: usize,
}

impl Tail {
    pub fn new(store: Arc<dyn ObjectStore>, namer: Arc<ObjectNamer>, inline_bytes: usize) -> Tail {
        Tail { inner: Arc::new(Inner { store, namer, queue: Mutex::default() }), inline_bytes }
    }

    /// Makes a slice durable, or inline: then the log record makes it so.
    pub async fn put(&self, bytes: Bytes, sequence: u64) -> Result<SliceRef> {
        if bytes.len() <= self.inline_bytes {
            let length = bytes.len() as u64;
            return Ok(SliceRef { inline: bytes, length, sequence, ..SliceRef::default() });
        }
        let (done, slice) = oneshot::channel();
        let start = {
            let mut queue = self.inner.queue.lock();
            queue.waiting.push(Waiting { bytes, done });
            !std::mem::replace(&mut queue.put_in_flight, true)
        };
        if start {
            // A task of its own: a caller that goes away must not take the others' put with it.
            spawn("write tail segments", put_all(Arc::clone(&self.inner)));
        }
        let stopped =
            |_| StorageError::internal("the tail writer stopped before the slice was written");
        let slice = slice.await.map_err(stopped)??;
        Ok(SliceRef { sequence, ..slice })
    }
}

async fn put_all(inner: Arc<Inner>) {
    loop {
        let batch = {
            let mut queue = inner.queue.lock();
            let mut bytes = 0;
            let fits = queue.waiting.iter().take_while(|w| {
                bytes += w.bytes.len();
                bytes <= SEGMENT_BYTES
            });
            let n = fits.count().max(1).min(queue.waiting.len());
            if n == 0 {
                queue.put_in_flight = false;
                return;
            }
            queue.waiting.drain(..n).collect::<Vec<_>>()
        };
        put_segment(&inner, batch).await;
    }
}

async fn put_segment(inner: &Inner, batch: Vec<Waiting>) {
    let mut segment = SegmentWriter::new(inner.namer.next_segment());
    let slices: Vec<(SliceRef, Waiting)> = batch
        .into_iter()
        .map(|w| {
            let slice = SliceRef {
                object: segment.name().to_string(),
                offset: segment.add(w.bytes.clone()),
                length: w.bytes.len() as u64,
                ..SliceRef::default()
            };
            (slice, w)
        })
        .collect();
    crash::point("storage-before-tail-put");
    let written = segment.finish(&inner.store).await;
    crash::point("storage-after-tail-put");
    for (slice, waiting) in slices {
        // A receiver that is gone no longer wants to know.
        let _ = waiting.done.send(written.as_ref().map(|_| slice).map_err(StorageError::clone));
    }
}
