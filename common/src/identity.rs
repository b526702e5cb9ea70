//! What tells rows apart (docs/design.md §3): the values of their columns, and of floats that are zero
//! the sign.
//!
//! −0 and 0 are equal: one group, one key, and they join. They are not the same value, though: shown, or
//! taken apart by an expression, they differ. So a row that is kept under its own bytes keeps its zeros. Its
//! bytes are those of its values ([`KeyCodec`]); where some zero is negative, eight more follow that say which.

use arrow::array::{Array, ArrayRef, AsArray, BinaryArray};
use arrow::datatypes::{DataType, Float32Type, Float64Type, Schema};
use arrow::error::ArrowError;
use arrow_row::Rows;

use crate::hash::hash_columns;
use crate::ids::Vnode;
use crate::keys::{KeyCodec, with_vnodes};

const MIX: u64 = 0x9e37_79b9_7f4a_7c15;

/// Encodes some columns of rows, as values or so that different rows have different bytes.
#[derive(Debug)]
pub struct RowCodec {
    codec: KeyCodec,
    columns: Vec<usize>,
    /// Whether the zeros of all columns are told apart, those that are not encoded among them.
    zeros: bool,
}

impl RowCodec {
    /// Of `columns` as values: rows with equal ones have equal bytes.
    pub fn of_values(schema: &Schema, columns: &[usize]) -> Result<RowCodec, ArrowError> {
        let codec = KeyCodec::for_columns(schema, columns)?;
        Ok(RowCodec { codec, columns: columns.to_vec(), zeros: false })
    }

    /// Of rows whose other columns are known to be equal.
    pub fn of_rows(schema: &Schema, columns: &[usize]) -> Result<RowCodec, ArrowError> {
        let zeros = schema.fields().iter().any(|f| holds_floats(f.data_type()));
        Ok(RowCodec { zeros, ..RowCodec::of_values(schema, columns)? })
    }

    /// Of all columns.
    pub fn whole(schema: &Schema) -> Result<RowCodec, ArrowError> {
        RowCodec::of_rows(schema, &(0..schema.fields().len()).collect::<Vec<_>>())
    }

    /// Nothing is ever encoded.
    pub fn is_empty(&self) -> bool {
        self.columns.is_empty() && !self.zeros
    }

    /// Encodes `count` rows, given with all of their columns.
    pub fn rows(&self, all: &[ArrayRef], count: usize) -> Result<Rows, ArrowError> {
        let columns: Vec<ArrayRef> =
            self.columns.iter().map(|&c| ArrayRef::clone(&all[c])).collect();
        let rows = self.codec.rows_of(&columns, count)?;
        let signs = if self.zeros { negative_zeros(all, count) } else { None };
        match signs {
            None => Ok(rows),
            Some(signs) => Ok(self.codec.with_suffixes(&rows, |row| {
                Some(signs[row]).filter(|&s| s != 0).map(u64::to_be_bytes)
            })),
        }
    }

    /// Storage keys: the row's vnode, then its bytes. One key a row, never null.
    pub fn storage_keys(
        &self,
        vnodes: &[Vnode],
        all: &[ArrayRef],
    ) -> Result<BinaryArray, ArrowError> {
        Ok(with_vnodes(vnodes, &self.rows(all, vnodes.len())?))
    }
}

/// One hash a row, in memory only: as [`hash_columns`], but −0 and 0 differ.
pub fn hash_rows(columns: &[ArrayRef], rows: usize) -> Result<Vec<u64>, ArrowError> {
    let mut hashes = hash_columns(columns, rows)?;
    for (hash, sign) in hashes.iter_mut().zip(negative_zeros(columns, rows).unwrap_or_default()) {
        *hash = hash.wrapping_add(sign.wrapping_mul(MIX));
    }
    Ok(hashes)
}

/// For every row a number that says which of its zeros are negative; 0: none. `None`: no row has any.
pub fn negative_zeros(columns: &[ArrayRef], rows: usize) -> Option<Vec<u64>> {
    let mut signs: Option<Vec<u64>> = None;
    let mut note = |row: usize, column: usize, element: usize| {
        let sign = &mut signs.get_or_insert_with(|| vec![0; rows])[row];
        let place = ((column as u64) << 32) + element as u64 + 1;
        *sign = (sign.rotate_left(9) ^ place).wrapping_mul(MIX).max(1);
    };
    for (c, column) in columns.iter().enumerate() {
        match column.data_type() {
            DataType::List(item) if item.data_type().is_floating() => {
                let list = column.as_list::<i32>();
                let zeros = zeros(list.values());
                let mut at = 0;
                for row in (0..list.len()).filter(|_| !zeros.is_empty()) {
                    let offsets = list.value_offsets();
                    let (start, end) = (offsets[row] as usize, offsets[row + 1] as usize);
                    at += zeros[at..].partition_point(|&z| z < start);
                    for zero in zeros[at..].iter().take_while(|&&z| z < end) {
                        if list.is_valid(row) {
                            note(row, c, zero - start);
                        }
                    }
                }
            }
            _ => zeros(column).into_iter().for_each(|row| note(row, c, 0)),
        }
    }
    signs
}

/// Where an array of floats has negative zeros.
fn zeros(array: &ArrayRef) -> Vec<usize> {
    let found: Vec<usize> = match array.data_type() {
        DataType::Float64 => {
            let values = array.as_primitive::<Float64Type>().values().iter().enumerate();
            values.filter(|(_, v)| v.to_bits() == 1 << 63).map(|(i, _)| i).collect()
        }
        DataType::Float32 => {
            let values = array.as_primitive::<Float32Type>().values().iter().enumerate();
            values.filter(|(_, v)| v.to_bits() == 1 << 31).map(|(i, _)| i).collect()
        }
        _ => return Vec::new(),
    };
    found.into_iter().filter(|&i| array.is_valid(i)).collect()
}

fn holds_floats(t: &DataType) -> bool {
    match t {
        DataType::List(item) => item.data_type().is_floating(),
        t => t.is_floating(),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::array::{Float32Array, Float64Array, Int64Array, ListArray};
    use arrow::datatypes::Field;

    use super::*;

    fn schema() -> Schema {
        let list = DataType::List(Arc::new(Field::new("item", DataType::Float64, true)));
        Schema::new(vec![
            Field::new("i", DataType::Int64, true),
            Field::new("f", DataType::Float64, true),
            Field::new("r", DataType::Float32, true),
            Field::new("l", list, true),
        ])
    }

    fn columns() -> Vec<ArrayRef> {
        let lists =
            [vec![0.0, 0.0], vec![-0.0, 0.0], vec![0.0, -0.0], vec![0.0, 0.0], vec![0.0, 0.0]];
        let lists = lists.map(|l| Some(l.into_iter().map(Some).collect::<Vec<_>>()));
        vec![
            Arc::new(Int64Array::from(vec![1; 5])),
            Arc::new(Float64Array::from(vec![Some(0.0), Some(0.0), Some(0.0), Some(-0.0), None])),
            Arc::new(Float32Array::from(vec![0.0, 0.0, 0.0, 0.0, -0.0])),
            Arc::new(ListArray::from_iter_primitive::<Float64Type, _, _>(lists)),
        ]
    }

    #[test]
    fn zeros_of_two_signs_are_one_value_and_two_rows() {
        let (schema, columns) = (schema(), columns());
        let same = RowCodec::of_values(&schema, &[0, 1]).unwrap().rows(&columns, 5).unwrap();
        assert_eq!(same.row(0), same.row(3));
        for codec in [RowCodec::whole(&schema), RowCodec::of_rows(&schema, &[])] {
            let rows = codec.unwrap().rows(&columns, 5).unwrap();
            let mut distinct: Vec<Vec<u8>> = rows.iter().map(|r| r.data().to_vec()).collect();
            distinct.sort();
            distinct.dedup();
            assert_eq!(distinct.len(), 5);
        }
        let hashes = hash_rows(&columns, 5).unwrap();
        assert_ne!(hashes[0], hashes[3]);
        assert_eq!(
            hash_columns(&columns[..2], 5).unwrap()[0],
            hash_columns(&columns[..2], 5).unwrap()[3]
        );
    }

    #[test]
    fn bytes_are_pinned() {
        let schema = Schema::new(vec![
            Field::new("f", DataType::Float64, true),
            Field::new("r", DataType::Float32, true),
        ]);
        let columns: Vec<ArrayRef> = vec![
            Arc::new(Float64Array::from(vec![0.0, -0.0, 0.0, -0.0])),
            Arc::new(Float32Array::from(vec![0.0, 0.0, -0.0, -0.0])),
        ];
        let rows = RowCodec::whole(&schema).unwrap().rows(&columns, 4).unwrap();
        let hex =
            |i: usize| rows.row(i).data().iter().map(|b| format!("{b:02x}")).collect::<String>();
        let values = "0180000000000000000180000000";
        let signs = ["", "9e3779b97f4a7c15", "1d81f5ce7f4a7c15", "f2567c642fef1801"];
        for (i, sign) in signs.into_iter().enumerate() {
            assert_eq!(hex(i), format!("{values}{sign}"));
        }
    }

    #[test]
    fn rows_without_negative_zeros_have_the_bytes_of_their_values() {
        let (schema, columns) = (schema(), columns());
        let first: Vec<ArrayRef> = columns.iter().map(|c| c.slice(0, 1)).collect();
        let keys = RowCodec::whole(&schema).unwrap().storage_keys(&[7], &first).unwrap();
        let all: Vec<usize> = (0..4).collect();
        let values =
            KeyCodec::for_columns(&schema, &all).unwrap().storage_keys(&[7], &first).unwrap();
        assert_eq!(keys, values);
        assert!(negative_zeros(&first, 1).is_none());
        let sliced: Vec<ArrayRef> = columns.iter().map(|c| c.slice(2, 3)).collect();
        let (part, whole) =
            (negative_zeros(&sliced, 3).unwrap(), negative_zeros(&columns, 5).unwrap());
        assert_eq!(part, whole[2..]);
    }
}
