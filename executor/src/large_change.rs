//! The change of a keyed relation in an epoch that is too large to be held (docs/design.md §6).
//!
//! What a key changes by in an epoch comes in any order and in pieces: only their sum says which row is
//! there afterwards. So pieces that do not fit are sorted by key and row, written to the store as runs that
//! no version names, and added up by a merge when the epoch ends.

use std::sync::Arc;

use arrow::array::BinaryArray;
use millrace_common::keys::columns_at;
use millrace_common::planted::is_planted;
use millrace_common::{DeltaChunk, TableId, Vnode};
use millrace_storage::JobStore;
use millrace_storage::stage::{Merged, Staging};

use crate::error::ExecError;
use crate::layout::RowLayout;
use crate::state::arena::new_batch;

/// Pieces of a change, outside memory. Dropping it deletes them.
pub(crate) struct LargeChange {
    layout: Arc<RowLayout>,
    staging: Staging,
}

impl LargeChange {
    pub fn begin(
        layout: &Arc<RowLayout>,
        store: &Arc<JobStore>,
        table: TableId,
    ) -> Result<LargeChange, ExecError> {
        Ok(LargeChange { layout: Arc::clone(layout), staging: store.begin_staging(table)? })
    }

    /// Takes a piece out of memory. Rows that come again in later pieces add up.
    pub async fn add(&mut self, chunk: &DeltaChunk) -> Result<(), ExecError> {
        let vnodes = self.layout.vnodes(&chunk.batch)?;
        let keys = self.layout.keys(&chunk.batch, &vnodes)?;
        let all: Vec<usize> = (0..chunk.batch.num_columns()).collect();
        let rows = self.layout.identity.rows(&columns_at(&chunk.batch, &all))?;
        let identities = BinaryArray::from_iter_values(
            keys.iter().flatten().zip(rows.iter()).map(|(key, row)| [key, row.as_ref()].concat()),
        );
        self.staging.write(identities, chunk.weights.clone(), chunk.batch.clone());
        Ok(self.staging.spill().await?)
    }

    /// The whole change, consolidated, in parts that hold all rows of their keys.
    pub fn read(&self) -> Result<Parts, ExecError> {
        Ok(Parts {
            layout: Arc::clone(&self.layout),
            merged: self.staging.merged()?,
            last: None,
            ended: false,
        })
    }
}

/// A part of a change and its storage keys.
pub(crate) struct Part {
    pub chunk: DeltaChunk,
    pub keys: BinaryArray,
    pub vnodes: Vec<Vnode>,
}

/// Reads a change, ascending by key.
pub(crate) struct Parts {
    layout: Arc<RowLayout>,
    merged: Merged,
    /// Rows of a key of which more may come.
    last: Option<DeltaChunk>,
    ended: bool,
}

impl Parts {
    pub async fn next(&mut self) -> Result<Option<Part>, ExecError> {
        while !self.ended {
            let mut chunks: Vec<DeltaChunk> = self.last.take().into_iter().collect();
            match self.merged.next().await? {
                Some(entries) => {
                    let columns = entries.values.columns().to_vec();
                    let batch = new_batch(&self.layout.schema, columns, entries.values.num_rows())?;
                    chunks.push(DeltaChunk::new(batch, entries.weights));
                }
                None => self.ended = true,
            }
            if chunks.is_empty() {
                continue;
            }
            let chunk = DeltaChunk::concat(&self.layout.schema, &chunks)?;
            let vnodes = self.layout.vnodes(&chunk.batch)?;
            let keys = self.layout.keys(&chunk.batch, &vnodes)?;
            let rows = chunk.num_rows();
            let whole = match self.ended {
                true => rows,
                false if is_planted("set-aside-twice") => rows,
                false => (0..rows)
                    .rev()
                    .find(|&r| keys.value(r) != keys.value(rows - 1))
                    .map_or(0, |r| r + 1),
            };
            if whole < rows {
                self.last = Some(chunk.slice(whole, rows - whole));
            }
            if whole > 0 {
                let (chunk, keys) = (chunk.slice(0, whole), keys.slice(0, whole));
                return Ok(Some(Part { chunk, keys, vnodes: vnodes[..whole].to_vec() }));
            }
        }
        Ok(None)
    }
}
