//! The change of a relation between two epochs, derived from its rows (docs/design.md §4): state
//! tables of relations keep versions down to the horizon, so nothing is stored twice.
//!
//! Only runs and blocks with entries in the interval are read. For `Keyed` tables they name the keys
//! that were written; one batched read a chunk fetches those keys' rows as of the interval's start,
//! and rows that came out the same vanish. Where all that was written says that its keys were new
//! (see `slice`), there are no such rows, and nothing is fetched.

use std::ops::Range;
use std::sync::Arc;

use arrow::array::{
    Array, ArrayRef, BinaryArray, BooleanArray, Int64Array, RecordBatch, UInt32Array,
};
use arrow::compute;
use arrow::compute::kernels::cmp;
use arrow::error::ArrowError;
use arrow::row::{RowConverter, SortField};
use futures::StreamExt;
use futures::stream::BoxStream;
use millrace_common::{DeltaChunk, Epoch, TableId, Vnode};
use millrace_rpc::catalog::RowStorage;

use crate::block::Entries;
use crate::entry::{Found, Gather, rebuild};
use crate::error::Result;
use crate::merge::{Merger, Mode};
use crate::snapshot::{Snapshot, key_range, table_sources};
use crate::version::TableVersion;

/// Rows of one chunk of changes.
const CHUNK_ROWS: usize = 4096;

/// The net change of a table in (from, to]: old rows −1, new rows +1 (`Multiset`: their weights).
/// `at` reads as of `from` and sees everything up to `to`.
pub(crate) fn changes(
    at: Snapshot,
    id: TableId,
    to: Epoch,
    vnodes: Range<Vnode>,
) -> BoxStream<'static, Result<DeltaChunk>> {
    match written(&at, id, to, &vnodes) {
        Err(e) => futures::stream::once(futures::future::ready(Err(e))).boxed(),
        Ok((merger, replaces)) => {
            futures::stream::try_unfold((merger, at), move |(mut merger, at)| async move {
                while let Some(entries) = merger.next().await.map_err(|e| at.explain(e))? {
                    let chunk = to_delta(&at, id, entries, replaces).await?;
                    if !chunk.is_empty() {
                        return Ok(Some((chunk, (merger, at))));
                    }
                }
                Ok(None)
            })
            .boxed()
        }
    }
}

/// What was written, and whether any of it may have replaced a row.
fn written(at: &Snapshot, id: TableId, to: Epoch, vnodes: &Range<Vnode>) -> Result<(Merger, bool)> {
    let table = at.table(id)?;
    let mode = Mode::Written { from: at.epoch(), to };
    let range = key_range(None, Some(vnodes));
    let sources = table_sources(at.committed(), table, mode, &range, None)?;
    let schema = Arc::clone(table.schema());
    let merger = Merger::new(table.desc.storage, mode, schema, CHUNK_ROWS, sources);
    Ok((merger, may_replace(table, mode)))
}

/// Whether any of what was written may have replaced a row of before. It did not if all keys were new when they were
/// written: one that had a row at the start would have been deleted since, by an entry that is not of a new key.
fn may_replace(table: &TableVersion, mode: Mode) -> bool {
    let mut in_memory = table.mem.iter().filter(|run| mode.wants(run.min_epoch, run.max_epoch));
    let mut on_disk = table.disk.iter().map(|run| run.meta());
    in_memory.any(|run| !run.new_keys)
        || on_disk.any(|run| mode.wants(Epoch(run.min_epoch), Epoch(run.max_epoch)))
}

/// `replaces`: one of the entries may have replaced a row.
async fn to_delta(
    at: &Snapshot,
    id: TableId,
    entries: Entries,
    replaces: bool,
) -> Result<DeltaChunk> {
    let desc = Arc::clone(&at.table(id)?.desc);
    if desc.storage != RowStorage::Keyed {
        let rows = entries.len();
        let batch = rebuild(&desc.value_schema, entries.values.columns().to_vec(), rows)?;
        return Ok(DeltaChunk::new(batch, entries.weights));
    }
    let old = match replaces {
        true => at.multi_get(id, entries.keys.clone()).await?,
        false => Found::empty(&desc.value_schema),
    };
    Ok(keyed_delta(&desc.value_schema, old, &entries)?)
}

/// Old rows −1 and new rows +1 of the written keys, without those whose row is the same.
fn keyed_delta(
    schema: &arrow::datatypes::SchemaRef,
    old: Found,
    new: &Entries,
) -> std::result::Result<DeltaChunk, arrow::error::ArrowError> {
    let unchanged = unchanged(&old, new)?;
    let empty = BinaryArray::from(Vec::<&[u8]>::new());
    let as_entries = |values: RecordBatch| Entries {
        keys: empty.clone(),
        epochs: crate::block::Epochs::Uniform(Epoch::ZERO),
        weights: None,
        values,
    };
    let mut picks = Vec::with_capacity(old.len() + new.len());
    let mut weights = Vec::with_capacity(picks.capacity());
    let mut olds = old.input.values().iter().enumerate().peekable();
    for row in 0..new.len() {
        let before = olds.next_if(|(_, input)| **input as usize == row);
        if let Some((o, _)) = before {
            if unchanged.value(o) {
                continue;
            }
            picks.push((0, o));
            weights.push(-1);
        }
        if new.weight(row) > 0 {
            picks.push((1, row));
            weights.push(1);
        }
    }
    let sides = [as_entries(old.values), as_entries(new.values.clone())];
    let batch = Gather::new(&picks).values(schema, &sides)?;
    Ok(DeltaChunk::new(batch, Some(Int64Array::from(weights))))
}

/// For each old row, whether the new row of its key is the same.
fn unchanged(
    old: &Found,
    new: &Entries,
) -> std::result::Result<BooleanArray, arrow::error::ArrowError> {
    let inputs: &UInt32Array = &old.input;
    let kept = inputs.values().iter().map(|&i| new.weight(i as usize) > 0);
    let mut same = BooleanArray::from_iter(kept.map(Some));
    for (column, before) in old.values.columns().iter().enumerate() {
        let after: ArrayRef = compute::take(new.values.column(column), inputs, None)?;
        let equal = alike(before, &after)?;
        same = compute::and(&same, &equal)?;
    }
    debug_assert_eq!(same.null_count(), 0);
    Ok(same)
}

/// Where two columns are equal, NULLs being equal. Arrays and the like have no such kernel: they are encoded.
fn alike(before: &ArrayRef, after: &ArrayRef) -> std::result::Result<BooleanArray, ArrowError> {
    if !before.data_type().is_nested() {
        return cmp::not_distinct(before, after);
    }
    let converter = RowConverter::new(vec![SortField::new(before.data_type().clone())])?;
    let old = converter.convert_columns(&[Arc::clone(before)])?;
    let new = converter.convert_columns(&[Arc::clone(after)])?;
    Ok((0..before.len()).map(|i| Some(old.row(i) == new.row(i))).collect())
}
