//! Order-preserving key bytes (docs/design.md §9): `vnode u16 BE | encoded columns`.
//!
//! The encoding of columns is arrow-row's, after canonicalisation (−0 → 0, every NaN → one NaN), so
//! that equal values have equal bytes and byte order is SQL order. It is an on-disk format: the
//! golden test below pins its bytes; a new arrow major that changes them must not be taken in
//! without a migration.

use std::sync::Arc;

use arrow::array::{
    Array, ArrayRef, AsArray, BinaryArray, BinaryBuilder, Float32Array, Float64Array, ListArray,
    RecordBatch,
};
use arrow::compute::SortOptions;
use arrow::datatypes::{DataType, Schema};
use arrow::error::ArrowError;
use arrow_row::{RowConverter, Rows, SortField};

use crate::ids::Vnode;

/// Bytes of the vnode in front of every key.
pub const VNODE_BYTES: usize = 2;

/// Encodes the same list of column types, again and again.
#[derive(Debug)]
pub struct KeyCodec {
    converter: RowConverter,
    floats: bool,
}

impl KeyCodec {
    /// Ascending, nulls first, for every column: the encoding of identity.
    pub fn new(types: impl IntoIterator<Item = DataType>) -> Result<KeyCodec, ArrowError> {
        KeyCodec::with_options(types.into_iter().map(|t| (t, SortOptions::default())))
    }

    /// The encoding of identity of `columns` of `schema`.
    pub fn for_columns(schema: &Schema, columns: &[usize]) -> Result<KeyCodec, ArrowError> {
        KeyCodec::new(columns.iter().map(|&c| schema.field(c).data_type().clone()))
    }

    /// With a sort direction per column, for ordered state.
    pub fn with_options(
        fields: impl IntoIterator<Item = (DataType, SortOptions)>,
    ) -> Result<KeyCodec, ArrowError> {
        let mut floats = false;
        let fields = fields
            .into_iter()
            .map(|(t, o)| {
                floats |= holds_floats(&t);
                SortField::new_with_options(t, o)
            })
            .collect();
        Ok(KeyCodec { converter: RowConverter::new(fields)?, floats })
    }

    /// The encoded rows, without a vnode. Good for in-memory identity.
    pub fn rows(&self, columns: &[ArrayRef]) -> Result<Rows, ArrowError> {
        if self.floats {
            let canonical: Vec<ArrayRef> = columns.iter().map(canonicalise).collect();
            self.converter.convert_columns(&canonical)
        } else {
            self.converter.convert_columns(columns)
        }
    }

    /// The same for rows that may have no columns: these are `count` rows, all equal.
    pub fn rows_of(&self, columns: &[ArrayRef], count: usize) -> Result<Rows, ArrowError> {
        if !columns.is_empty() {
            return self.rows(columns);
        }
        let mut rows = self.converter.empty_rows(count, 0);
        let parser = self.converter.parser();
        (0..count).for_each(|_| rows.push(parser.parse(&[])));
        Ok(rows)
    }

    /// Encoded rows, some of them with bytes at their end.
    pub(crate) fn with_suffixes<const N: usize>(
        &self,
        rows: &Rows,
        suffix: impl Fn(usize) -> Option<[u8; N]>,
    ) -> Rows {
        let count = rows.num_rows();
        let mut out = self.converter.empty_rows(count, rows.size() + count * N);
        let parser = self.converter.parser();
        for (i, row) in rows.iter().enumerate() {
            match suffix(i) {
                None => out.push(row),
                Some(suffix) => out.push(parser.parse(&[row.data(), &suffix].concat())),
            }
        }
        out
    }

    /// Storage keys: the row's vnode, then its encoded columns. One key a row, never null.
    pub fn storage_keys(
        &self,
        vnodes: &[Vnode],
        columns: &[ArrayRef],
    ) -> Result<BinaryArray, ArrowError> {
        Ok(with_vnodes(vnodes, &self.rows_of(columns, vnodes.len())?))
    }

    /// The columns of encoded rows (without vnode bytes).
    pub fn decode<'a>(
        &self,
        rows: impl IntoIterator<Item = &'a [u8]>,
    ) -> Result<Vec<ArrayRef>, ArrowError> {
        let parser = self.converter.parser();
        self.converter.convert_rows(rows.into_iter().map(|r| parser.parse(r)))
    }
}

/// Storage keys of encoded rows: each row's vnode stands before its bytes.
pub(crate) fn with_vnodes(vnodes: &[Vnode], rows: &Rows) -> BinaryArray {
    let bytes = rows.size();
    let mut out = BinaryBuilder::with_capacity(vnodes.len(), bytes + vnodes.len() * VNODE_BYTES);
    let mut key = Vec::with_capacity(64);
    for (vnode, row) in vnodes.iter().zip(rows.iter()) {
        key.clear();
        key.extend_from_slice(&vnode.to_be_bytes());
        key.extend_from_slice(row.data());
        out.append_value(&key);
    }
    out.finish()
}

fn holds_floats(t: &DataType) -> bool {
    match t {
        DataType::List(item) => item.data_type().is_floating(),
        t => t.is_floating(),
    }
}

/// The columns of a batch at `indices`.
pub fn columns_at(batch: &RecordBatch, indices: &[usize]) -> Vec<ArrayRef> {
    indices.iter().map(|&i| Arc::clone(batch.column(i))).collect()
}

/// The one NaN that values have, whatever made it: they are compared by their bits in many places. Every float that is read
/// or computed passes here or by [`with_one_nan`].
pub fn one_nan<T: Copy + PartialOrd + From<f32>>(value: T) -> T {
    if value.partial_cmp(&value).is_none() { T::from(f32::NAN) } else { value }
}

/// The same of all values of an array of floats. Other arrays pass.
pub fn with_one_nan(array: &ArrayRef) -> ArrayRef {
    use arrow::datatypes::{Float32Type, Float64Type};
    match array.data_type() {
        DataType::Float64 => match array.as_primitive_opt::<Float64Type>() {
            Some(a) if a.values().iter().any(|v| v.is_nan()) => {
                Arc::new(a.unary::<_, Float64Type>(one_nan))
            }
            _ => Arc::clone(array),
        },
        DataType::Float32 => match array.as_primitive_opt::<Float32Type>() {
            Some(a) if a.values().iter().any(|v| v.is_nan()) => {
                Arc::new(a.unary::<_, Float32Type>(one_nan))
            }
            _ => Arc::clone(array),
        },
        _ => Arc::clone(array),
    }
}

/// One bit pattern for every value: −0 becomes 0 and every NaN the same NaN. Other arrays pass.
pub fn canonicalise(array: &ArrayRef) -> ArrayRef {
    match array.data_type() {
        DataType::Float64 => {
            let a = array.as_any().downcast_ref::<Float64Array>().expect("data type was checked");
            Arc::new(a.unary::<_, arrow::datatypes::Float64Type>(|v| {
                if v.is_nan() { f64::NAN } else { v + 0.0 }
            }))
        }
        DataType::Float32 => {
            let a = array.as_any().downcast_ref::<Float32Array>().expect("data type was checked");
            Arc::new(a.unary::<_, arrow::datatypes::Float32Type>(|v| {
                if v.is_nan() { f32::NAN } else { v + 0.0 }
            }))
        }
        DataType::List(item) if item.data_type().is_floating() => {
            let list = array.as_any().downcast_ref::<ListArray>().expect("data type was checked");
            Arc::new(ListArray::new(
                Arc::clone(item),
                list.offsets().clone(),
                canonicalise(list.values()),
                list.nulls().cloned(),
            ))
        }
        _ => Arc::clone(array),
    }
}

#[cfg(test)]
mod tests {
    use arrow::array::{Int64Array, StringArray};

    use super::*;

    #[test]
    fn bytes_are_pinned() {
        let codec = KeyCodec::new([DataType::Int64, DataType::Utf8]).unwrap();
        let ints: ArrayRef = Arc::new(Int64Array::from(vec![Some(1), None, Some(-1)]));
        let strs: ArrayRef = Arc::new(StringArray::from(vec![Some("ab"), Some(""), None]));
        let keys = codec.storage_keys(&[0x0102, 0, 255], &[ints, strs]).unwrap();
        let hex = |i: usize| keys.value(i).iter().map(|b| format!("{b:02x}")).collect::<String>();
        assert_eq!(hex(0), "010201800000000000000102616200000000000002");
        assert_eq!(hex(1), "000000000000000000000001");
        assert_eq!(hex(2), "00ff017fffffffffffffff00");
    }

    #[test]
    fn equal_floats_have_equal_bytes() {
        let codec = KeyCodec::new([DataType::Float64]).unwrap();
        let other_nan = f64::from_bits(f64::NAN.to_bits() ^ 1);
        let a: ArrayRef = Arc::new(Float64Array::from(vec![-0.0, 0.0, f64::NAN, other_nan]));
        let rows = codec.rows(&[a]).unwrap();
        assert_eq!(rows.row(0), rows.row(1));
        assert_eq!(rows.row(2), rows.row(3));
        assert!(rows.row(2) > rows.row(0));
    }

    #[test]
    fn nan_is_one_bit_pattern() {
        let other = f64::from_bits(f64::NAN.to_bits() ^ 1);
        for v in [other, -f64::NAN, -other] {
            assert_eq!(one_nan(v).to_bits(), f64::NAN.to_bits());
            assert_eq!(one_nan(v as f32).to_bits(), f32::NAN.to_bits());
        }
        let a: ArrayRef = Arc::new(Float64Array::from(vec![Some(-0.0), None, Some(-f64::NAN)]));
        let settled = with_one_nan(&a);
        let values = settled.as_primitive::<arrow::datatypes::Float64Type>();
        assert_eq!(values.value(0).to_bits(), (-0.0f64).to_bits());
        assert!(values.is_null(1));
        assert_eq!(values.value(2).to_bits(), f64::NAN.to_bits());
    }

    #[test]
    fn rows_without_columns_are_rows() {
        let codec = KeyCodec::new([]).unwrap();
        let rows = codec.rows_of(&[], 3).unwrap();
        assert_eq!(rows.num_rows(), 3);
        assert_eq!(rows.row(0), rows.row(2));
        assert_eq!(codec.storage_keys(&[1, 2], &[]).unwrap().len(), 2);
    }
}
