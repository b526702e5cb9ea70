//! What staged rows come to when they meet each other and the table's own: the last step of a load, a batch of keys
//! at a time, with memory bounded whatever came.

use std::cmp::Ordering;

use arrow::array::{Array, AsArray, BooleanArray, Int64Array, RecordBatch};
use arrow::compute;
use millrace_common::{SqlError, SqlState};
use millrace_storage::StorageError;
use millrace_storage::block::Entries;
use millrace_storage::stage::{Merged, Repeated, Staging};

use super::{DmlError, InsertConflict, OnRepeat, Sequencer};
use crate::error::ExecError;

/// New rows after ON CONFLICT.
pub(super) struct Resolved {
    pub staging: Staging,
    /// Rows that take effect.
    pub kept: u64,
    /// By how many rows the table grows.
    pub row_count: i64,
}

fn stored(e: StorageError) -> DmlError {
    DmlError::Sql(e.into())
}

fn computed(e: arrow::error::ArrowError) -> DmlError {
    DmlError::Sql(ExecError::from(e).into_sql())
}

/// The rows to link of those that were staged, one a key: all of them, or those whose key is free.
pub(super) async fn conflicts(
    table: &Sequencer,
    staged: &Staging,
    on_conflict: InsertConflict,
    spill_bytes: usize,
) -> Result<Resolved, DmlError> {
    let staging = table.stage(Repeated::Add).map_err(|e| DmlError::Sql(e.into_sql()))?;
    let mut out = Resolved { staging, kept: 0, row_count: 0 };
    let mut merged = staged.merged().map_err(stored)?;
    while let Some(batch) = merged.next().await.map_err(stored)? {
        let found = table.rows_at(batch.keys.clone()).await?;
        let mut free = vec![true; batch.len()];
        found.input.values().iter().for_each(|row| free[*row as usize] = false);
        let fresh = free.iter().filter(|f| **f).count();
        out.row_count += fresh as i64;
        match on_conflict {
            InsertConflict::Overwrite => {
                out.kept += batch.len() as u64;
                write(&mut out.staging, &batch.keys, &batch.values, None, 1)?;
            }
            _ => {
                out.kept += fresh as u64;
                write(&mut out.staging, &batch.keys, &batch.values, Some(free), 1)?;
            }
        }
        spill(&mut out.staging, spill_bytes).await?;
    }
    spill(&mut out.staging, 0).await?;
    Ok(out)
}

/// Writes the rows that the mask picks, each with a weight.
fn write(
    to: &mut Staging,
    keys: &arrow::array::BinaryArray,
    values: &RecordBatch,
    picked: Option<Vec<bool>>,
    weight: i64,
) -> Result<(), DmlError> {
    let (keys, values) = match picked {
        None => (keys.clone(), values.clone()),
        Some(mask) => {
            let mask = BooleanArray::from(mask);
            let keys = compute::filter(keys, &mask).map_err(computed)?;
            let values = compute::filter_record_batch(values, &mask).map_err(computed)?;
            (keys.as_binary::<i32>().clone(), values)
        }
    };
    let weights = (weight != 1).then(|| Int64Array::from_value(weight, keys.len()));
    to.write(keys, weights, values).map_err(stored)
}

async fn spill(staging: &mut Staging, above: usize) -> Result<(), DmlError> {
    if staging.memory_size() > above {
        staging.spill().await.map_err(stored)?;
    }
    Ok(())
}

/// A stream of staged entries, one at a time.
struct Cursor {
    merged: Merged,
    batch: Option<Entries>,
    at: usize,
}

impl Cursor {
    async fn open(staging: &Staging) -> Result<Cursor, DmlError> {
        let mut merged = staging.merged().map_err(stored)?;
        let batch = merged.next().await.map_err(stored)?;
        Ok(Cursor { merged, batch, at: 0 })
    }

    fn key(&self) -> Option<&[u8]> {
        self.batch.as_ref().map(|b| b.keys.value(self.at))
    }

    /// Whether this entry is the last of its batch.
    fn ends_batch(&self) -> bool {
        self.batch.as_ref().is_none_or(|b| self.at + 1 >= b.len())
    }

    async fn next_batch(&mut self) -> Result<(), DmlError> {
        self.batch = self.merged.next().await.map_err(stored)?;
        self.at = 0;
        Ok(())
    }
}

/// Checks that the new rows of a change have keys of their own, and stages the deletions of keys that no new row
/// takes: those of the others are replaced where they are.
pub(super) async fn moves(
    table: &Sequencer,
    removed: &Staging,
    added: &Staging,
    on_repeat: OnRepeat,
    spill_bytes: usize,
) -> Result<Staging, DmlError> {
    let mut gone = table.stage(Repeated::Add).map_err(|e| DmlError::Sql(e.into_sql()))?;
    let (mut old, mut new) = (Cursor::open(removed).await?, Cursor::open(added).await?);
    // Of the batches under way: whose key the other side does not have.
    let (mut only_old, mut only_new) = (Vec::new(), Vec::new());
    loop {
        let order = match (old.key(), new.key()) {
            (None, None) => break,
            (Some(_), None) => Ordering::Less,
            (None, Some(_)) => Ordering::Greater,
            (Some(a), Some(b)) => a.cmp(b),
        };
        if order.is_le() {
            only_old.push(order.is_lt());
            if old.ends_batch() {
                if let Some(batch) = &old.batch {
                    let picked = std::mem::take(&mut only_old);
                    write(&mut gone, &batch.keys, &batch.values, Some(picked), -1)?;
                    spill(&mut gone, spill_bytes).await?;
                }
                old.next_batch().await?;
            } else {
                old.at += 1;
            }
        }
        if order.is_ge() {
            only_new.push(order.is_gt());
            if new.ends_batch() {
                if let Some(batch) = new.batch.clone() {
                    let only_new = std::mem::take(&mut only_new);
                    check_new(table, &batch, only_new, on_repeat).await?;
                }
                new.next_batch().await?;
            } else {
                new.at += 1;
            }
        }
    }
    spill(&mut gone, 0).await?;
    Ok(gone)
}

/// No two of a batch's new rows have one key, and no row that stays has one of theirs.
async fn check_new(
    table: &Sequencer,
    batch: &Entries,
    only_new: Vec<bool>,
    on_repeat: OnRepeat,
) -> Result<(), DmlError> {
    let twice = batch.weights.as_ref().and_then(|w| w.values().iter().position(|w| *w > 1));
    if let Some(row) = twice {
        return Err(match on_repeat {
            OnRepeat::Duplicate => table.duplicate(&batch.values, row, None),
            OnRepeat::SecondTime => second_time().into(),
        });
    }
    let mask = BooleanArray::from(only_new);
    let keys = compute::filter(&batch.keys, &mask).map_err(computed)?;
    let found = table.rows_at(keys.as_binary::<i32>().clone()).await?;
    let Some(nth) = found.input.values().iter().min() else { return Ok(()) };
    let row = (0..mask.len()).filter(|i| mask.value(*i)).nth(*nth as usize).unwrap_or(0);
    Err(table.duplicate(&batch.values, row, None))
}

/// ON CONFLICT DO UPDATE met one key twice.
pub fn second_time() -> SqlError {
    SqlError::new(
        SqlState("21000"),
        "ON CONFLICT DO UPDATE command cannot affect row a second time",
    )
    .with_hint(
        "Ensure that no rows proposed for insertion within the same command have duplicate constrained values.",
    )
}
