//! Column hashing that is stable across releases: it decides vnodes, so it is part of the on-disk
//! format. Computed once per chunk and reused for routing, hash tables and sketches (§6).
//!
//! A fixed-width value is mixed by a 64×64→128 multiply-fold; strings are folded eight bytes at a
//! time by the same step. Columns combine in order. NULL has a hash of its own. Floats and
//! decimals are hashed by value (canonicalised; a column has one scale).

use arrow::array::{Array, ArrayRef, AsArray};
use arrow::datatypes::{ArrowPrimitiveType, IntervalUnit};
use arrow::datatypes::{
    DataType, Date32Type, Date64Type, Decimal128Type, Decimal256Type, DurationMicrosecondType,
    DurationMillisecondType, DurationNanosecondType, DurationSecondType, Float32Type, Float64Type,
    Int8Type, Int16Type, Int32Type, Int64Type, IntervalDayTimeType, IntervalMonthDayNanoType,
    IntervalYearMonthType, Time32MillisecondType, Time32SecondType, Time64MicrosecondType,
    Time64NanosecondType, TimeUnit, TimestampMicrosecondType, TimestampMillisecondType,
    TimestampNanosecondType, TimestampSecondType, UInt8Type, UInt16Type, UInt32Type, UInt64Type,
};
use arrow::error::ArrowError;

use crate::ids::{VNODE_COUNT, Vnode};
use crate::keys::canonicalise;

const SEED: u64 = 0x9e37_79b9_7f4a_7c15;
const K1: u64 = 0xa076_1d64_78bd_642f;
const K2: u64 = 0xe703_7ed1_a0b4_28db;
const NULL_HASH: u64 = 0x5851_f42d_4c95_7f2d;

#[inline]
fn fold(a: u64, b: u64) -> u64 {
    let p = u128::from(a) * u128::from(b);
    (p as u64) ^ ((p >> 64) as u64)
}

#[inline]
fn mix(hash: u64, value: u64) -> u64 {
    fold(hash ^ value ^ K1, value.rotate_left(32) ^ K2 ^ hash)
}

/// The stable hash of a byte string.
pub fn hash_bytes(bytes: &[u8]) -> u64 {
    mix_bytes(SEED, bytes)
}

#[inline]
fn mix_bytes(mut hash: u64, bytes: &[u8]) -> u64 {
    let mut chunks = bytes.chunks_exact(8);
    for c in &mut chunks {
        let word = u64::from_le_bytes(c.try_into().expect("chunks_exact(8) gives eight bytes"));
        hash = mix(hash, word);
    }
    let rest = chunks.remainder();
    let mut tail = [0u8; 8];
    tail[..rest.len()].copy_from_slice(rest);
    mix(hash, u64::from_le_bytes(tail) ^ ((bytes.len() as u64) << 56))
}

/// One 64-bit hash a row over `columns`, in order. No columns: every row hashes alike.
///
/// Errors only for a column type that cannot be a key (nested types).
pub fn hash_columns(columns: &[ArrayRef], rows: usize) -> Result<Vec<u64>, ArrowError> {
    let mut hashes = vec![SEED; rows];
    for column in columns {
        hash_column(column, &mut hashes)?;
    }
    Ok(hashes)
}

/// Goes on by one more column with what [`hash_columns`] gave of others: the hashes are those of all of them then.
///
/// Errors as it does.
pub fn hash_more(hashes: &mut [u64], column: &ArrayRef) -> Result<(), ArrowError> {
    hash_column(column, hashes)
}

/// The vnode of a hash. Bits 40–47: hash tables use the low bits and the topmost seven.
#[inline]
pub fn vnode_of(hash: u64) -> Vnode {
    ((hash >> 40) as usize & (VNODE_COUNT - 1)) as Vnode
}

/// Vnodes of many hashes.
pub fn vnodes(hashes: &[u64]) -> Vec<Vnode> {
    hashes.iter().map(|&h| vnode_of(h)).collect()
}

fn primitive<T: ArrowPrimitiveType>(
    column: &ArrayRef,
    hashes: &mut [u64],
    bits: impl Fn(T::Native) -> u64,
) {
    let a = column.as_primitive::<T>();
    if a.null_count() == 0 {
        for (h, v) in hashes.iter_mut().zip(a.values()) {
            *h = mix(*h, bits(*v));
        }
    } else {
        for (i, h) in hashes.iter_mut().enumerate() {
            *h = if a.is_null(i) { mix(*h, NULL_HASH) } else { mix(*h, bits(a.value(i))) };
        }
    }
}

fn bytes_like<'a>(values: impl Iterator<Item = Option<&'a [u8]>>, hashes: &mut [u64]) {
    for (h, v) in hashes.iter_mut().zip(values) {
        *h = match v {
            Some(v) => mix_bytes(*h, v),
            None => mix(*h, NULL_HASH),
        };
    }
}

fn wide(v: i128) -> u64 {
    let low = v as u64;
    let high = (v >> 64) as u64;
    // A value that fits 64 bits hashes like that value alone.
    if v == i128::from(low as i64) { low } else { fold(low ^ K2, high ^ K1) }
}

fn hash_column(column: &ArrayRef, h: &mut [u64]) -> Result<(), ArrowError> {
    match column.data_type() {
        DataType::Null => h.iter_mut().for_each(|x| *x = mix(*x, NULL_HASH)),
        DataType::Boolean => hash_booleans(column, h),
        DataType::Int8 => primitive::<Int8Type>(column, h, |v| i64::from(v) as u64),
        DataType::Int16 => primitive::<Int16Type>(column, h, |v| i64::from(v) as u64),
        DataType::Int32 => primitive::<Int32Type>(column, h, |v| i64::from(v) as u64),
        DataType::Int64 => primitive::<Int64Type>(column, h, |v| v as u64),
        DataType::UInt8 => primitive::<UInt8Type>(column, h, u64::from),
        DataType::UInt16 => primitive::<UInt16Type>(column, h, u64::from),
        DataType::UInt32 => primitive::<UInt32Type>(column, h, u64::from),
        DataType::UInt64 => primitive::<UInt64Type>(column, h, |v| v),
        DataType::Float32 => {
            primitive::<Float32Type>(&canonicalise(column), h, |v| u64::from(v.to_bits()));
        }
        DataType::Float64 => primitive::<Float64Type>(&canonicalise(column), h, f64::to_bits),
        DataType::Decimal128(_, _) => primitive::<Decimal128Type>(column, h, wide),
        DataType::Decimal256(_, _) => primitive::<Decimal256Type>(column, h, |v| {
            let (low, high) = v.to_parts();
            fold(wide(low as i128), wide(high) ^ K2)
        }),
        DataType::Date32 => primitive::<Date32Type>(column, h, |v| i64::from(v) as u64),
        DataType::Date64 => primitive::<Date64Type>(column, h, |v| v as u64),
        DataType::Time32(TimeUnit::Second) => {
            primitive::<Time32SecondType>(column, h, |v| v as u64)
        }
        DataType::Time32(_) => primitive::<Time32MillisecondType>(column, h, |v| v as u64),
        DataType::Time64(TimeUnit::Nanosecond) => {
            primitive::<Time64NanosecondType>(column, h, |v| v as u64);
        }
        DataType::Time64(_) => primitive::<Time64MicrosecondType>(column, h, |v| v as u64),
        DataType::Timestamp(unit, _) => match unit {
            TimeUnit::Second => primitive::<TimestampSecondType>(column, h, |v| v as u64),
            TimeUnit::Millisecond => primitive::<TimestampMillisecondType>(column, h, |v| v as u64),
            TimeUnit::Microsecond => primitive::<TimestampMicrosecondType>(column, h, |v| v as u64),
            TimeUnit::Nanosecond => primitive::<TimestampNanosecondType>(column, h, |v| v as u64),
        },
        DataType::Interval(unit) => hash_intervals(*unit, column, h),
        DataType::Duration(unit) => match unit {
            TimeUnit::Second => primitive::<DurationSecondType>(column, h, |v| v as u64),
            TimeUnit::Millisecond => primitive::<DurationMillisecondType>(column, h, |v| v as u64),
            TimeUnit::Microsecond => primitive::<DurationMicrosecondType>(column, h, |v| v as u64),
            TimeUnit::Nanosecond => primitive::<DurationNanosecondType>(column, h, |v| v as u64),
        },
        DataType::Utf8 => {
            bytes_like(column.as_string::<i32>().iter().map(|v| v.map(str::as_bytes)), h);
        }
        DataType::LargeUtf8 => {
            bytes_like(column.as_string::<i64>().iter().map(|v| v.map(str::as_bytes)), h);
        }
        DataType::Utf8View => {
            bytes_like(column.as_string_view().iter().map(|v| v.map(str::as_bytes)), h);
        }
        DataType::Binary => bytes_like(column.as_binary::<i32>().iter(), h),
        DataType::LargeBinary => bytes_like(column.as_binary::<i64>().iter(), h),
        DataType::FixedSizeBinary(_) => bytes_like(column.as_fixed_size_binary().iter(), h),
        DataType::List(_) => hash_lists(column, h)?,
        other => {
            return Err(ArrowError::NotYetImplemented(format!(
                "a column of type {other} cannot be a key"
            )));
        }
    }
    Ok(())
}

fn hash_booleans(column: &ArrayRef, h: &mut [u64]) {
    let a = column.as_boolean();
    for (i, x) in h.iter_mut().enumerate() {
        *x = mix(*x, if a.is_null(i) { NULL_HASH } else { u64::from(a.value(i)) + 1 });
    }
}

fn hash_intervals(unit: IntervalUnit, column: &ArrayRef, h: &mut [u64]) {
    match unit {
        IntervalUnit::YearMonth => primitive::<IntervalYearMonthType>(column, h, |v| v as u64),
        IntervalUnit::DayTime => primitive::<IntervalDayTimeType>(column, h, |v| {
            fold(v.days as u64 ^ K1, v.milliseconds as u64 ^ K2)
        }),
        IntervalUnit::MonthDayNano => primitive::<IntervalMonthDayNanoType>(column, h, |v| {
            fold((v.months as u64) << 32 ^ v.days as u64 ^ K1, v.nanoseconds as u64 ^ K2)
        }),
    }
}

fn hash_lists(column: &ArrayRef, h: &mut [u64]) -> Result<(), ArrowError> {
    let list = column.as_list::<i32>();
    let mut items = vec![SEED; list.values().len()];
    hash_column(list.values(), &mut items)?;
    for (row, x) in h.iter_mut().enumerate() {
        if list.is_null(row) {
            *x = mix(*x, NULL_HASH);
            continue;
        }
        let (from, to) = (list.value_offsets()[row], list.value_offsets()[row + 1]);
        *x = mix(*x, (to - from) as u64);
        items[from as usize..to as usize].iter().for_each(|item| *x = mix(*x, *item));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::array::{Int64Array, StringArray};

    use super::*;

    #[test]
    fn hashes_are_pinned() {
        let ints: ArrayRef = Arc::new(Int64Array::from(vec![Some(0), Some(1), None]));
        let strs: ArrayRef = Arc::new(StringArray::from(vec!["", "millrace", "x"]));
        let h = hash_columns(&[ints, strs], 3).unwrap();
        assert_eq!(format!("{h:016x?}"), PINNED);
    }
    const PINNED: &str = "[dc3d6aed197a9fa8, 8701156376b4d492, bbf5b2257c027269]";

    #[test]
    fn a_column_more_gives_the_hashes_of_all_columns() {
        let ints: ArrayRef = Arc::new(Int64Array::from(vec![Some(0), Some(1), None]));
        let strs: ArrayRef = Arc::new(StringArray::from(vec![Some(""), None, Some("x")]));
        for first in [vec![], vec![Arc::clone(&ints)], vec![Arc::clone(&strs), ints]] {
            let mut hashes = hash_columns(&first, 3).unwrap();
            hash_more(&mut hashes, &strs).unwrap();
            let all = [first, vec![Arc::clone(&strs)]].concat();
            assert_eq!(hashes, hash_columns(&all, 3).unwrap());
        }
    }

    #[test]
    fn vnodes_spread_evenly() {
        let ints: ArrayRef = Arc::new(Int64Array::from_iter_values(0..100_000));
        let mut counts = [0usize; VNODE_COUNT];
        for h in hash_columns(&[ints], 100_000).unwrap() {
            counts[usize::from(vnode_of(h))] += 1;
        }
        assert!(counts.iter().all(|&c| (250..=550).contains(&c)), "{counts:?}");
    }
}
