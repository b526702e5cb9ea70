//! Sources and sinks: the outside world behind one trait (docs/design.md §4, "Roots").
//!
//! A [`Source`] is a set of replayable splits. Its content is fixed by meta as an offset a split
//! and epoch; readers regenerate or re-read exactly the rows between two offsets, at their own
//! pace, so two views over one source agree and a recovery repeats nothing.

pub mod error;
pub mod nexmark;
pub mod options;

use std::sync::Arc;

use arrow::datatypes::SchemaRef;
use arrow::record_batch::RecordBatch;
use async_trait::async_trait;
use millrace_common::SqlError;
use millrace_rpc::catalog::Relation;

pub use error::ConnectorError;

/// The hidden last column of a source: a number that is unique in the stream and ascending with
/// the offset of a split.
pub const ROW_ID: &str = "_row_id";

/// A stream of rows in replayable splits.
pub trait Source: Send + Sync {
    /// The declared columns, then [`ROW_ID`].
    fn schema(&self) -> SchemaRef;

    /// Identifiers of the splits; fixed for the life of a source.
    fn splits(&self) -> Vec<u32>;

    /// The offset (exclusive) up to which a split has rows at `now_ms`, for a source that exists
    /// since `started_ms` (both wall-clock milliseconds). `u64::MAX`: as many as one can take.
    fn available(&self, split: u32, started_ms: u64, now_ms: u64) -> u64;

    /// Reads a split from `offset` (inclusive). `columns`: positions in [`Source::schema`]; only
    /// they are produced.
    fn reader(
        &self,
        split: u32,
        offset: u64,
        columns: &[usize],
    ) -> Result<Box<dyn SplitReader>, ConnectorError>;
}

/// A position in a split.
#[async_trait]
pub trait SplitReader: Send {
    /// The next rows before offset `until`, at most `max_rows` (≥ 1) of them, and the offset after
    /// them. A batch may be empty when the offsets passed hold no rows of this relation. `None`
    /// when `until` is reached.
    async fn read(
        &mut self,
        until: u64,
        max_rows: usize,
    ) -> Result<Option<(RecordBatch, u64)>, ConnectorError>;
}

/// Opens the source that a catalog entry describes.
pub fn create_source(relation: &Relation) -> Result<Arc<dyn Source>, SqlError> {
    match connector_name(relation)? {
        "nexmark" => Ok(Arc::new(nexmark::NexmarkSource::new(relation)?)),
        other => Err(unknown_connector(other)),
    }
}

/// Checks options and columns of a source that is about to be created.
pub fn validate(relation: &Relation) -> Result<(), SqlError> {
    create_source(relation).map(|_| ())
}

fn connector_name(relation: &Relation) -> Result<&str, SqlError> {
    relation.option("connector").ok_or_else(|| {
        options::invalid("missing option \"connector\"")
            .with_hint("Add WITH (connector = 'nexmark', …).")
    })
}

fn unknown_connector(name: &str) -> SqlError {
    options::invalid(format!("unknown connector \"{name}\""))
        .with_hint("Available connectors: nexmark.")
}
