//! A query's way through a source: the rows that jobs see up to an epoch, read by the connector.

use std::sync::Arc;

use arrow::array::RecordBatch;
use futures::StreamExt;
use millrace_common::SqlError;
use millrace_connector::{ReadFrom, SplitReader};
use millrace_executor::ExecError;
use millrace_executor::error_sink::ErrorSink;
use millrace_executor::input::watermark::{SourceWatermark, SplitWatermark};
use millrace_rpc::catalog::Relation;
use millrace_rpc::log::SplitMarkAt;
use millrace_rpc::services::SourceParts;

use super::{BatchStream, ScanRequest};

/// Rows of a source made at a time.
const SOURCE_BATCH: usize = 8192;

/// What the log says of a source as of an epoch.
pub struct SourceAt {
    /// (split, where its content ends).
    pub offsets: Vec<(u32, u64)>,
    pub parts: SourceParts,
    pub marks: Vec<SplitMarkAt>,
}

/// The rows of a source up to an epoch, split by split.
pub fn scan_source(
    relation: &Relation,
    at: SourceAt,
    request: &ScanRequest,
) -> Result<BatchStream, SqlError> {
    let SourceAt { offsets, parts, marks } = at;
    let source = millrace_connector::create_source(relation)?;
    let watermark = SourceWatermark::of(relation, &request.columns).map_err(ExecError::into_sql)?;
    let columns = watermark.as_ref().map_or(&request.columns, |w| &w.columns).clone();
    // What fails is NULL, and told by nobody: this is a query.
    let errors = request.null_errors.then(|| Arc::new(ErrorSink::default()));
    let splits = futures::stream::iter(offsets.into_iter().map(move |(split, until)| {
        let parts = parts.clone();
        let start = parts.start(split);
        let at = ReadFrom { split, offset: start, position: None, parts };
        let reader = source.open(at, &columns).map_err(SqlError::from);
        let mut progress = SplitWatermark::default();
        progress.set_floors(split, &marks);
        let watermark = watermark.clone();
        let errors = errors.clone();
        let scan = SplitScan { reader, until, at: start, watermark, errors, progress };
        futures::stream::unfold(Some(scan), |scan| async move { scan?.next().await })
    }));
    Ok(splits.flatten().boxed())
}

/// A query's way through one split: the same rows that jobs see, late ones left out.
struct SplitScan {
    reader: Result<Box<dyn SplitReader>, SqlError>,
    until: u64,
    at: u64,
    watermark: Option<SourceWatermark>,
    /// `None`: a generated column that fails is an error.
    errors: Option<Arc<ErrorSink>>,
    progress: SplitWatermark,
}

impl SplitScan {
    async fn next(mut self) -> Option<(Result<RecordBatch, SqlError>, Option<SplitScan>)> {
        let reader = match &mut self.reader {
            Ok(reader) => reader,
            Err(e) => return Some((Err(e.clone()), None)),
        };
        let until = self.until.min(self.progress.raise(self.at));
        let (batch, after) = match reader.read(until, SOURCE_BATCH).await {
            Ok(Some(read)) => read,
            Ok(None) => return None,
            Err(e) => return Some((Err(SqlError::from(e)), None)),
        };
        self.at = after;
        match self.on_time(batch) {
            Ok(batch) => Some((Ok(batch), Some(self))),
            Err(e) => Some((Err(e), None)),
        }
    }

    fn on_time(&mut self, batch: RecordBatch) -> Result<RecordBatch, SqlError> {
        let Some(w) = &self.watermark else { return Ok(batch) };
        let batch = w.complete(batch, self.errors.as_ref()).map_err(ExecError::into_sql)?;
        let advanced = w.expr.advance(&batch, &mut self.progress.running);
        let (stays, _) = advanced.map_err(ExecError::into_sql)?;
        let asked: Vec<usize> = (0..w.width).collect();
        let arrow = |e: arrow::error::ArrowError| SqlError::internal(e.to_string());
        let batch = batch.project(&asked).map_err(arrow)?;
        match stays {
            None => Ok(batch),
            Some(mask) => arrow::compute::filter_record_batch(&batch, &mask).map_err(arrow),
        }
    }
}
