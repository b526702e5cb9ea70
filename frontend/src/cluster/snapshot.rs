//! Rows of a relation in a snapshot of its job's state, whoever has made it.

use std::ops::{Bound, Range};

use arrow::array::{Int64Array, RecordBatch, RecordBatchOptions, UInt32Array};
use arrow::error::ArrowError;
use futures::StreamExt;
use futures::stream::BoxStream;
use millrace_common::delta::take_rows;
use millrace_common::{SqlError, TableId, Vnode};
use millrace_rpc::catalog::Relation;
use millrace_storage::{ScanBatch, ScanOptions, Snapshot, StorageError};

use super::{BatchStream, KeyBounds, ScanRequest};
use crate::query::scan_parts;

/// Rows as they come.
pub type Rows = BoxStream<'static, Result<RecordBatch, StorageError>>;

/// The same for who knows nothing of storage.
pub fn told(rows: Rows) -> BatchStream {
    rows.map(|batch| batch.map_err(SqlError::from)).boxed()
}

/// The rows that a request asks for.
pub async fn scan(
    snapshot: &Snapshot,
    relation: &Relation,
    request: ScanRequest,
) -> Result<Rows, StorageError> {
    let table = TableId(relation.first_table_id);
    if let Some(keys) = request.keys {
        let found = snapshot.multi_get(table, keys).await?;
        let batch = found.values.project(&request.columns)?;
        return Ok(futures::stream::iter([Ok(batch)]).boxed());
    }
    let options = ScanOptions {
        projection: Some(request.columns),
        batch_rows: request.limit.map_or(8192, |l| l.clamp(1, 8192)),
        ..ScanOptions::default()
    };
    let Some(ranges) = request.ranges else { return Ok(counted(snapshot.scan(table, options))) };
    let bounds = |r: KeyBounds| (Bound::Included(r.from), Bound::Excluded(r.until));
    let ranges = ranges.into_iter().map(bounds).collect();
    Ok(counted(snapshot.scan_ranges(table, ranges, options)))
}

/// Whether a request is of all rows, so that they can be read in parts.
pub fn is_whole(request: &ScanRequest) -> bool {
    request.keys.is_none() && request.ranges.is_none() && request.limit.is_none()
}

/// The vnodes of each part of a scan of all rows.
pub fn parts(snapshot: &Snapshot, relation: &Relation) -> Result<Vec<Range<Vnode>>, StorageError> {
    let (rows, bytes) = snapshot.size(TableId(relation.first_table_id))?;
    Ok(scan_parts::parts(rows, bytes))
}

/// One part. Its runs are opened when it is its turn.
pub fn part(
    snapshot: &Snapshot,
    relation: &Relation,
    columns: &[usize],
    vnodes: Range<Vnode>,
) -> Rows {
    let (snapshot, table) = (snapshot.clone(), TableId(relation.first_table_id));
    let projection = Some(columns.to_vec());
    let options = ScanOptions { projection, vnodes: Some(vnodes), ..ScanOptions::default() };
    let opened = async move { counted(snapshot.scan(table, options)) };
    futures::stream::once(opened).flatten().boxed()
}

/// Rows as often as their multiplicity says.
fn counted(batches: BoxStream<'static, Result<ScanBatch, StorageError>>) -> Rows {
    batches.map(|b| b.and_then(|b| Ok(repeat(b.values, &b.weights)?))).boxed()
}

/// A row of multiplicity n as n rows.
pub fn repeat(values: RecordBatch, weights: &Int64Array) -> Result<RecordBatch, ArrowError> {
    if weights.values().iter().all(|w| *w == 1) {
        return Ok(values);
    }
    let indices: UInt32Array = weights
        .values()
        .iter()
        .enumerate()
        .flat_map(|(i, w)| std::iter::repeat_n(i as u32, usize::try_from(*w).unwrap_or(0)))
        .collect();
    if values.num_columns() == 0 {
        let options = RecordBatchOptions::new().with_row_count(Some(indices.len()));
        return RecordBatch::try_new_with_options(values.schema(), vec![], &options);
    }
    take_rows(&values, &indices)
}
