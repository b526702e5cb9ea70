//! Who is told of rows that are read ahead.

use std::sync::Arc;

use arrow::array::Int64Array;
use arrow::record_batch::RecordBatch;
use futures::future::BoxFuture;
use millrace_common::{DeltaChunk, RelationId};
use millrace_graph::lookahead::Place;

use super::RawBatch;
use crate::input::watermark::SourceWatermark;
use crate::lookahead::keys_ahead::KeysAhead;
use crate::lookahead::uncommitted::{Announced, Uncommitted};

/// Who is told of rows before the leaf hands them out.
pub trait Told: Send + Sync {
    /// Tells those that look ahead of the leaf of rows that have been read. `None`: there are none.
    fn announce(&self, batch: &RawBatch) -> Option<Announced>;

    /// Whether state is to be read for the rows that are handed out next.
    fn wants_prefetches(&self) -> bool {
        false
    }

    /// A read of that state, for which nobody waits; `keys` tell of it. `None`: there is nothing to read.
    fn prefetch(
        &self,
        rows: RecordBatch,
        weights: Option<Int64Array>,
        keys: KeysAhead,
    ) -> Option<BoxFuture<'static, ()>> {
        let _ = (rows, weights, keys);
        None
    }
}

/// Those that look at rows of a job's leaf.
pub struct LeafFollowers {
    pub relation: RelationId,
    pub watermark: Option<SourceWatermark>,
    /// `None`: nobody ever does.
    pub uncommitted: Option<Arc<Uncommitted>>,
}

impl Told for LeafFollowers {
    /// Rows as the leaf hands them out.
    fn announce(&self, batch: &RawBatch) -> Option<Announced> {
        let rows = || match &self.watermark {
            None => vec![DeltaChunk::inserts(batch.rows.clone())],
            // What fails is reported when the leaf computes it.
            Some(w) => {
                let asked = w.asked(batch.rows.clone(), &Arc::default());
                asked.into_iter().map(DeltaChunk::inserts).collect()
            }
        };
        self.uncommitted.as_ref()?.announce(self.relation, Place::Entry, None, rows)
    }
}
