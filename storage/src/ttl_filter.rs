//! State cleaning: entries whose time lies below a table's bound are as good as gone. Reads leave them
//! out at once; merges of runs, in memory and on disk, drop them.
//!
//! The bound only rises, and its owner promises that nothing older is written any more. It is kept in
//! the job's version, so that after a restart nothing comes back.

use arrow::array::{
    Array, AsArray, BinaryArray, BooleanArray, RecordBatch, TimestampMicrosecondArray,
};
use arrow::buffer::BooleanBuffer;
use arrow::compute::filter_record_batch;
use millrace_common::access::RetentionBy;
use millrace_common::keys::VNODE_BYTES;

use crate::block::{Entries, Epochs};
use crate::error::Result;
use crate::merge::Mode;
use crate::table::RowStorage;

/// Entries below `bound` (microseconds) are gone; those without a time stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Retain {
    pub by: RetentionBy,
    pub bound: i64,
}

impl Retain {
    /// The entries that stay; `None`: all.
    fn mask(&self, keys: &BinaryArray, values: &RecordBatch) -> Option<BooleanArray> {
        let times = Times::new(self.by, keys, values)?;
        let stays = BooleanBuffer::collect_bool(keys.len(), |row| self.is_in_time(times.at(row)));
        (stays.count_set_bits() < keys.len()).then(|| BooleanArray::new(stays, None))
    }

    /// Whether an entry stays.
    pub fn keeps(&self, entries: &Entries, row: usize) -> bool {
        let times = Times::new(self.by, &entries.keys, &entries.values);
        times.is_none_or(|times| self.is_in_time(times.at(row)))
    }

    fn is_in_time(&self, time: Option<i64>) -> bool {
        time.is_none_or(|time| time >= self.bound)
    }

    /// Whether a merge may drop what is below the bound: where the time is not part of the key, an entry
    /// hides older ones of another time, which must not come to light.
    pub fn applies(&self, storage: RowStorage, mode: Mode) -> bool {
        match mode {
            Mode::Compact { bottom, .. } => {
                bottom || self.by == RetentionBy::Key || storage != RowStorage::Keyed
            }
            Mode::AsOf(_) | Mode::Written { .. } => false,
        }
    }

    pub fn entries(&self, entries: Entries) -> Result<Entries> {
        let Some(mask) = self.mask(&entries.keys, &entries.values) else { return Ok(entries) };
        let filter = |a: &dyn Array| arrow::compute::filter(a, &mask);
        Ok(Entries {
            keys: filter(&entries.keys)?.as_binary::<i32>().clone(),
            epochs: match &entries.epochs {
                Epochs::Uniform(epoch) => Epochs::Uniform(*epoch),
                Epochs::Each(each) => Epochs::Each(filter(each)?.as_primitive().clone()),
            },
            weights: match &entries.weights {
                Some(weights) => Some(filter(weights)?.as_primitive().clone()),
                None => None,
            },
            values: filter_record_batch(&entries.values, &mask)?,
        })
    }
}

/// Where the times of entries are.
enum Times<'a> {
    Keys(&'a BinaryArray),
    Values(&'a TimestampMicrosecondArray),
}

impl<'a> Times<'a> {
    /// `None`: the entries have none.
    fn new(by: RetentionBy, keys: &'a BinaryArray, values: &'a RecordBatch) -> Option<Times<'a>> {
        match by {
            RetentionBy::Key => Some(Times::Keys(keys)),
            RetentionBy::Value(column) => {
                values.columns().get(column)?.as_primitive_opt().map(Times::Values)
            }
        }
    }

    fn at(&self, row: usize) -> Option<i64> {
        match self {
            Times::Keys(keys) => key_time(keys.value(row)),
            Times::Values(times) => times.is_valid(row).then(|| times.value(row)),
        }
    }
}

/// The first key column as an i64; `None`: NULL. The key encoding is pinned by `common/src/keys.rs`.
fn key_time(key: &[u8]) -> Option<i64> {
    let column = key.get(VNODE_BYTES..VNODE_BYTES + 9)?;
    let (marker, value) = column.split_first()?;
    let value: [u8; 8] = value.try_into().ok()?;
    (*marker == 1).then(|| (u64::from_be_bytes(value) ^ (1 << 63)) as i64)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::array::ArrayRef;
    use arrow::datatypes::{DataType, TimeUnit};
    use millrace_common::keys::KeyCodec;

    use super::*;

    #[test]
    fn the_time_of_a_key_is_the_one_that_was_encoded() {
        let t = DataType::Timestamp(TimeUnit::Microsecond, None);
        let codec = KeyCodec::new([t]).unwrap();
        let times = vec![Some(i64::MIN), Some(-1), Some(0), Some(77), None];
        let column: ArrayRef = Arc::new(TimestampMicrosecondArray::from(times.clone()));
        let keys = codec.storage_keys(&[9; 5], &[column]).unwrap();
        let decoded: Vec<Option<i64>> = (0..5).map(|i| key_time(keys.value(i))).collect();
        assert_eq!(decoded, times);
    }
}
