//! Tail slices read ahead of the jobs that need them: recovery knows from the log what all jobs will
//! replay, and reads it while the new leader's record is still on its way.
//!
//! Only a cache: names are never reused, so a slice that was read is right whenever it is asked for, and
//! one that could not be read is read again by its job.

use std::sync::Arc;

use bytes::Bytes;
use millrace_common::collections::HashMap;
use millrace_common::task::spawn;
use millrace_rpc::version::SliceRef;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};
use parking_lot::Mutex;
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;

/// Reads at the same time.
const PARALLEL: usize = 64;
/// Bytes read ahead at most; jobs read the rest themselves.
const MAX_BYTES: u64 = 128 << 20;

type Reading = JoinHandle<object_store::Result<Bytes>>;

/// Reads under way, by object and offset. Dropping it ends them.
#[derive(Debug, Default)]
pub struct TailPrefetch {
    reads: Mutex<HashMap<(String, u64), Reading>>,
}

impl TailPrefetch {
    /// Starts reading. Must be called on a runtime.
    pub fn start(
        store: &Arc<dyn ObjectStore>,
        slices: impl IntoIterator<Item = SliceRef>,
    ) -> TailPrefetch {
        let slots = Arc::new(Semaphore::new(PARALLEL));
        let mut bytes = 0;
        let fits = |slice: &SliceRef| {
            bytes += slice.length;
            bytes <= MAX_BYTES
        };
        let in_objects = slices.into_iter().filter(|s| !s.object.is_empty());
        let reads = in_objects.take_while(fits).map(|slice| {
            let (store, slots) = (Arc::clone(store), Arc::clone(&slots));
            let path = Path::from(slice.object.as_str());
            let range = slice.offset..slice.offset + slice.length;
            let read = spawn("read the tail ahead", async move {
                // The semaphore is never closed.
                let _slot = slots.acquire_owned().await;
                store.get_range(&path, range).await
            });
            ((slice.object, slice.offset), read)
        });
        TailPrefetch { reads: Mutex::new(reads.collect()) }
    }

    /// The slice, if it was read ahead and that went well.
    pub(crate) async fn take(&self, slice: &SliceRef) -> Option<Bytes> {
        let read = self.reads.lock().remove(&(slice.object.clone(), slice.offset))?;
        let bytes = read.await.ok()?.ok()?;
        (bytes.len() as u64 == slice.length).then_some(bytes)
    }
}

impl Drop for TailPrefetch {
    fn drop(&mut self) {
        for read in self.reads.get_mut().values() {
            read.abort();
        }
    }
}
