//! Sources and sinks: the outside world behind one trait (docs/design.md §4, "Roots").
//!
//! A [`Source`] is a set of replayable splits. The leader has a process that reads the source ask what
//! there is ([`Source::poll`]) and fixes in the log how far each split's content goes; readers regenerate
//! or re-read exactly the rows between two such offsets, at their own pace, so two views over one source
//! agree and a recovery repeats nothing.
//!
//! Offsets are the connector's own: rows, messages, bytes. A row belongs to the offset at which it
//! begins, so that any number is a place where an epoch may end.

pub mod batch;
pub mod columns;
pub mod datagen;
pub mod decode;
pub mod error;
pub mod fs;
pub mod generated;
#[cfg(feature = "kafka")]
pub mod kafka;
pub mod nexmark;
pub mod options;
pub mod paths;
pub mod sink;

use std::sync::Arc;

use arrow::array::Int64Array;
use arrow::datatypes::SchemaRef;
use arrow::record_batch::RecordBatch;
use async_trait::async_trait;
use millrace_common::SqlError;
use millrace_rpc::catalog::Relation;
use millrace_rpc::services::SourceParts;

pub use error::ConnectorError;
pub use millrace_rpc::source_poll::{Known, More, Polled};
pub use options::OnError;

/// The hidden last column of a source: a number that is unique in the stream and ascending with
/// the offset of a split.
pub const ROW_ID: &str = "_row_id";

/// A stream of rows in replayable splits.
#[async_trait]
pub trait Source: Send + Sync {
    /// The relation's columns, hidden ones included.
    fn schema(&self) -> SchemaRef;

    /// Asks the outside what there is beyond what is known. Must be cheap when nothing is new, and
    /// answer or fail in bounded time; it is not called again before it has answered.
    async fn poll(&self, known: &Known) -> Result<Polled, ConnectorError>;

    /// How many offsets a row takes, roughly: 1 where offsets count rows, more where they count bytes.
    fn offsets_per_row(&self) -> u64 {
        1
    }

    /// Opens a split for reading. `columns`: positions in [`Source::schema`]; only they are produced.
    fn open(&self, at: ReadFrom, columns: &[usize]) -> OpenResult;
}

/// The reader of a split.
pub type OpenResult = Result<Box<dyn SplitReader>, ConnectorError>;

/// Where to begin to read a split.
#[derive(Clone, Debug)]
pub struct ReadFrom {
    pub split: u32,
    /// The first row is the first that begins here or later.
    pub offset: u64,
    /// Where that row begins, if a reader that came to `offset` before has said so ([`SplitReader::position`]).
    pub position: Option<Position>,
    pub parts: SourceParts,
}

/// Exactly where a row begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position {
    pub offset: u64,
    /// Lines of its file before it.
    pub line: u64,
}

/// Rows, and the offset after them; `None`: there are no more.
pub type ReadResult = Result<Option<(RecordBatch, u64)>, ConnectorError>;

/// A place in a split, and the rows from there on.
#[async_trait]
pub trait SplitReader: Send {
    /// The next rows that begin before offset `until`, at most `max_rows` (≥ 1) of them, and the offset
    /// after them. A batch may be empty when the offsets passed hold no rows of this relation. `None`
    /// when `until` is reached.
    async fn read(&mut self, until: u64, max_rows: usize) -> ReadResult;

    /// Weights of the rows that the last `read` gave: −1 deletes the row of this key. `None`: all +1.
    fn weights(&mut self) -> Option<Int64Array> {
        None
    }

    /// Where the next row begins, where that is not the offset and costs something to find out.
    fn position(&self) -> Option<Position> {
        None
    }

    /// Rows that could not be read, since the last call.
    fn take_bad_rows(&mut self) -> Vec<BadRow> {
        Vec::new()
    }

    /// What a row that cannot be read does from now on.
    fn set_on_error(&mut self, on_error: OnError) {
        let _ = on_error;
    }

    /// The source has more parts now.
    fn extend(&mut self, parts: &SourceParts) {
        let _ = parts;
    }
}

/// A row that was skipped.
#[derive(Clone, Debug)]
pub struct BadRow {
    /// File or partition.
    pub place: String,
    /// What is wrong, and in which line or at which offset.
    pub error: SqlError,
}

const CONNECTORS: &str = "datagen, fs, kafka, nexmark";

/// Opens the source that a catalog entry describes.
pub fn create_source(relation: &Relation) -> Result<Arc<dyn Source>, SqlError> {
    match connector_name(relation)? {
        "nexmark" => Ok(Arc::new(nexmark::NexmarkSource::new(relation)?)),
        "datagen" => Ok(Arc::new(datagen::DatagenSource::new(relation)?)),
        "fs" => Ok(Arc::new(fs::FsSource::new(relation)?)),
        #[cfg(feature = "kafka")]
        "kafka" => Ok(Arc::new(kafka::KafkaSource::new(relation)?)),
        #[cfg(not(feature = "kafka"))]
        "kafka" => Err(SqlError::unsupported("connector \"kafka\" in this build")
            .with_hint("Build with the feature \"kafka\".")),
        other => Err(unknown_connector(other)),
    }
}

/// Checks options and columns of a source that is about to be created.
pub fn validate(relation: &Relation) -> Result<(), SqlError> {
    options::rate_limit(relation)?;
    create_source(relation).map(|_| ())
}

fn connector_name(relation: &Relation) -> Result<&str, SqlError> {
    relation.option("connector").ok_or_else(|| {
        options::invalid("missing option \"connector\"")
            .with_hint("Add WITH (connector = 'fs', …).")
    })
}

fn unknown_connector(name: &str) -> SqlError {
    options::invalid(format!("unknown connector \"{name}\""))
        .with_hint(format!("Available connectors: {CONNECTORS}."))
}
