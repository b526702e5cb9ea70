//! What is told of rows of a table's connector that have been read and have not entered the table.

use std::sync::Arc;

use arrow::array::{Int64Array, RecordBatch};
use futures::future::BoxFuture;
use millrace_common::DeltaChunk;
use millrace_rpc::catalog::Relation;

use super::rows::FeedRows;
use crate::dml::{Announced, Sequencer};
use crate::error::ExecError;
use crate::lookahead::keys_ahead::KeysAhead;
use crate::lookahead::read_ahead::{RawBatch, Told};

/// Announces rows as those of a statement that has been received, and has the table's own lookup of what is at their keys
/// read ahead.
pub struct FeedAhead {
    rows: FeedRows,
    sequencer: Arc<Sequencer>,
}

impl FeedAhead {
    /// Fails as the feed does: see [`FeedRows::new`].
    pub fn new(relation: &Relation, sequencer: Arc<Sequencer>) -> Result<FeedAhead, ExecError> {
        // What fails is reported when the rows enter.
        let rows = FeedRows::new(relation, Arc::clone(&sequencer), Arc::default())?;
        sequencer.note_read_ahead();
        Ok(FeedAhead { rows, sequencer })
    }

    /// Rows as they will enter, but for their hidden row ids and times of arrival.
    fn complete(
        &self,
        rows: RecordBatch,
        weights: Option<Int64Array>,
    ) -> Result<DeltaChunk, ExecError> {
        self.rows.complete(rows, weights, |_| 0)
    }
}

impl Told for FeedAhead {
    fn announce(&self, batch: &RawBatch) -> Option<Announced> {
        self.sequencer.announce_with(|| {
            let complete = self.complete(batch.rows.clone(), batch.weights.clone());
            complete.into_iter().collect()
        })
    }

    fn wants_prefetches(&self) -> bool {
        self.sequencer.looks_up_ahead()
    }

    fn prefetch(
        &self,
        rows: RecordBatch,
        weights: Option<Int64Array>,
        keys: KeysAhead,
    ) -> Option<BoxFuture<'static, ()>> {
        let complete = self.complete(rows, weights);
        let read = complete.and_then(|rows| self.sequencer.look_up_ahead(rows, keys));
        read.unwrap_or_else(|error| {
            // The rows themselves will tell, if it is of any importance.
            tracing::debug!(%error, "keys of a connector's rows could not be looked up ahead");
            None
        })
    }
}
