//! Segments: objects that hold one or many runs and slices (docs/design.md §9).
//!
//! Names are `data/<incarnation>/<counter>.seg`. The incarnation comes from the meta log and is never
//! given twice, so no name is ever reused and an overwriting put is safe to repeat.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use object_store::path::Path;
use object_store::{ObjectStore, PutMode, PutPayload};

use crate::error::{Result, StorageError};
use crate::object::PutWatch;

/// Folder of all segments, below the store's prefix.
pub const DATA_PREFIX: &str = "data";

/// Hands out names and run ids of one incarnation.
#[derive(Debug)]
pub struct ObjectNamer {
    incarnation: u64,
    /// Of segments alone: names without holes are remembered as few ranges once they are deleted.
    segments: AtomicU64,
    runs: AtomicU64,
}

impl ObjectNamer {
    pub fn new(incarnation: u64) -> ObjectNamer {
        ObjectNamer { incarnation, segments: AtomicU64::new(1), runs: AtomicU64::new(1) }
    }

    pub fn incarnation(&self) -> u64 {
        self.incarnation
    }

    /// A fresh segment name.
    pub fn next_segment(&self) -> String {
        segment_name(self.incarnation, self.segments.fetch_add(1, Ordering::Relaxed))
    }

    /// A fresh run id: incarnation in the high half.
    pub fn next_run_id(&self) -> u64 {
        let number = self.runs.fetch_add(1, Ordering::Relaxed);
        (self.incarnation << 32) | (number & u64::from(u32::MAX))
    }
}

pub fn segment_name(incarnation: u64, counter: u64) -> String {
    format!("{DATA_PREFIX}/{incarnation}/{counter}.seg")
}

/// The (incarnation, counter) of a segment's name; `None` for other objects. For garbage collection.
pub fn parse_segment_name(name: &str) -> Option<(u64, u64)> {
    let mut parts = name.strip_prefix(DATA_PREFIX)?.strip_prefix('/')?.split('/');
    let incarnation = parts.next()?.parse().ok()?;
    let counter = parts.next()?.strip_suffix(".seg")?.parse().ok()?;
    parts.next().is_none().then_some((incarnation, counter))
}

/// Packs byte strings into one object. Nothing is copied; the put gathers the parts.
#[derive(Debug)]
pub struct SegmentWriter {
    name: String,
    parts: Vec<Bytes>,
    length: u64,
}

impl SegmentWriter {
    pub fn new(name: String) -> SegmentWriter {
        SegmentWriter { name, parts: Vec::new(), length: 0 }
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn len(&self) -> u64 {
        self.length
    }

    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Appends a run or slice; returns its offset in the object.
    pub fn add(&mut self, bytes: Bytes) -> u64 {
        let offset = self.length;
        self.length += bytes.len() as u64;
        if !bytes.is_empty() {
            self.parts.push(bytes);
        }
        offset
    }

    /// One put; the object is durable when this returns. Returns its length.
    pub async fn finish(self, store: &Arc<dyn ObjectStore>) -> Result<u64> {
        self.finish_watched(store, &PutWatch::default()).await
    }

    /// As [`SegmentWriter::finish`]; `watch` is told how the put goes on.
    pub async fn finish_watched(
        self,
        store: &Arc<dyn ObjectStore>,
        watch: &PutWatch,
    ) -> Result<u64> {
        let payload = PutPayload::from_iter(self.parts);
        store
            .put_opts(&Path::from(self.name.as_str()), payload, watch.options(PutMode::Overwrite))
            .await
            .map_err(|e| StorageError::from_store("write", self.name, e))?;
        Ok(self.length)
    }
}

#[cfg(test)]
mod tests {
    use object_store::ObjectStoreExt;
    use object_store::memory::InMemory;

    use super::*;

    #[tokio::test]
    async fn parts_lie_where_add_said() {
        let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let namer = ObjectNamer::new(7);
        let mut w = SegmentWriter::new(namer.next_segment());
        let name = w.name().to_string();
        assert_eq!(w.add(Bytes::from_static(b"abc")), 0);
        assert_eq!(w.add(Bytes::from_static(b"defg")), 3);
        assert_eq!(w.finish(&store).await.unwrap(), 7);
        let got = store.get_range(&Path::from(name.as_str()), 3..7).await.unwrap();
        assert_eq!(&got[..], b"defg");
    }

    #[test]
    fn names_parse_back_and_never_repeat() {
        let namer = ObjectNamer::new(7);
        let (a, b) = (namer.next_segment(), namer.next_segment());
        assert_ne!(a, b);
        assert_eq!(parse_segment_name(&a), Some((7, 1)));
        assert_eq!(parse_segment_name("meta/log/1"), None);
        assert_eq!(namer.next_run_id() >> 32, 7);
    }
}
