//! Uncommitted writes of a transaction block laid over a scan: the block's own rows in place of those
//! of the snapshot that have the same storage key.

use std::sync::Arc;

use arrow::array::{ArrayRef, BinaryArray, BooleanArray, RecordBatch};
use millrace_common::SqlError;
use millrace_executor::dml::StagedTable;
use millrace_rpc::catalog::Relation;

use super::snapshot_table::encode_keys;
use crate::cluster::ScanRequest;
use crate::dml::rows::{arrow_error, filter};

#[derive(Clone)]
pub struct Overlay {
    staged: Arc<StagedTable>,
    /// Columns of the table that the scan is to give.
    columns: Vec<usize>,
    /// Where the scan's batches hold the key columns.
    key: Vec<usize>,
}

impl Overlay {
    /// Has the scan read the key columns too.
    pub fn new(
        staged: Arc<StagedTable>,
        relation: &Relation,
        request: &mut ScanRequest,
    ) -> Overlay {
        let columns = request.columns.clone();
        let key = relation.key.iter().map(|&k| {
            let k = k as usize;
            request.columns.iter().position(|&c| c == k).unwrap_or_else(|| {
                request.columns.push(k);
                request.columns.len() - 1
            })
        });
        let key = key.collect();
        Overlay { staged, columns, key }
    }

    /// The block's own rows, of these keys if any are named.
    pub fn rows(&self, keys: Option<&BinaryArray>) -> Result<RecordBatch, SqlError> {
        let rows = match keys {
            Some(keys) => self.staged.rows_at(keys)?.1,
            None => self.staged.rows()?,
        };
        rows.project(&self.columns).map_err(arrow_error)
    }

    /// Rows of the snapshot that the block has not written, without the columns read for their keys.
    pub fn unwritten(
        &self,
        relation: &Relation,
        scanned: &RecordBatch,
    ) -> Result<RecordBatch, SqlError> {
        let key: Vec<ArrayRef> = self.key.iter().map(|&k| scanned.column(k).clone()).collect();
        let keys = encode_keys(relation, &key)?;
        let stays: BooleanArray =
            (0..scanned.num_rows()).map(|row| Some(!self.staged.wrote(keys.value(row)))).collect();
        let wanted: Vec<usize> = (0..self.columns.len()).collect();
        let scanned = scanned.project(&wanted).map_err(arrow_error)?;
        if stays.true_count() == scanned.num_rows() {
            Ok(scanned)
        } else {
            filter(&scanned, &stays)
        }
    }
}
