//! The keys of a hint on its way: columns, and which of their rows are meant.
//!
//! A hint is sent inside the process. So it refers to the columns that the announced rows have anyway, and copies no
//! value, as long as that keeps little in memory beside what it means. If the rows are part of much, or few of many are
//! meant, it has a copy of its keys.

use std::sync::Arc;

use arrow::array::{Array, ArrayRef, UInt32Array};
use arrow::compute::take;

use crate::error::ExecError;
use crate::state::arena::column_bytes;

/// Columns of so many bytes are referred to, whatever is meant of them, ...
const FEW_BYTES: usize = 4 << 10;
/// ... and of so many if what is meant is no less than this part of them.
const MANY_BYTES: usize = 256 << 10;
const FEW_OF: usize = 32;

/// Which rows of some columns are meant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Selection {
    All(usize),
    Listed(Box<[u32]>),
    /// By a bit each, from this row on; so many in all.
    Marked {
        from: u32,
        marks: Box<[u8]>,
        count: usize,
    },
}

impl Selection {
    /// `rows`: some of `all`, ascending. Takes the form with the fewest bytes.
    pub fn of(rows: &[u32], all: usize) -> Selection {
        let (Some(&from), Some(&last)) = (rows.first(), rows.last()) else {
            return Selection::Listed(Box::default());
        };
        if rows.len() == all {
            return Selection::All(all);
        }
        let marks = last.abs_diff(from) as usize / 8 + 1;
        if marks >= size_of_val(rows) || !rows.is_sorted() {
            return Selection::Listed(rows.into());
        }
        let mut marks = vec![0; marks].into_boxed_slice();
        for row in rows {
            let at = row - from;
            marks[at as usize / 8] |= 1 << (at % 8);
        }
        Selection::Marked { from, marks, count: rows.len() }
    }

    pub fn count(&self) -> usize {
        match self {
            Selection::All(count) | Selection::Marked { count, .. } => *count,
            Selection::Listed(rows) => rows.len(),
        }
    }

    pub fn bytes(&self) -> usize {
        match self {
            Selection::All(_) => 0,
            Selection::Listed(rows) => size_of_val(&**rows),
            Selection::Marked { marks, .. } => marks.len(),
        }
    }

    /// `None`: all.
    fn rows(&self) -> Option<UInt32Array> {
        Some(match self {
            Selection::All(_) => return None,
            Selection::Listed(rows) => UInt32Array::from(rows.to_vec()),
            Selection::Marked { from, marks, .. } => {
                let is_marked = |at: &usize| marks[at / 8] >> (at % 8) & 1 == 1;
                let rows = (0..marks.len() * 8).filter(is_marked).map(|at| from + at as u32);
                UInt32Array::from_iter_values(rows)
            }
        })
    }
}

/// See the module.
pub struct SentKeys {
    columns: Vec<ArrayRef>,
    rows: Selection,
    /// The columns are copies of what is meant, made for it.
    is_copy: bool,
    /// Bytes of what is kept in memory by referring to it, as far as this one is to answer for it.
    pub share: usize,
}

impl SentKeys {
    /// A copy of the values.
    pub fn copied(columns: Vec<ArrayRef>) -> SentKeys {
        let count = columns.first().map_or(0, |column| column.len());
        SentKeys { columns, rows: Selection::All(count), is_copy: true, share: 0 }
    }

    pub fn count(&self) -> usize {
        self.rows.count()
    }

    /// Bytes made for it alone.
    pub fn own_bytes(&self) -> usize {
        let copied = if self.is_copy { self.columns.iter().map(column_bytes).sum() } else { 0 };
        self.rows.bytes() + copied
    }

    /// Whether a column is one of its copies.
    pub fn has_copied(&self, column: &ArrayRef) -> bool {
        self.is_copy && self.columns.iter().any(|own| Arc::ptr_eq(own, column))
    }

    /// The columns of what is meant.
    pub fn into_columns(self) -> Result<Vec<ArrayRef>, ExecError> {
        let Some(rows) = self.rows.rows() else { return Ok(self.columns) };
        let taken = self.columns.iter().map(|column| take(column, &rows, None));
        Ok(taken.collect::<Result<_, _>>()?)
    }
}

/// Columns that hints may refer to, and how much is meant of them.
pub struct Referred {
    columns: Vec<ArrayRef>,
    /// Bytes that are kept by referring to them.
    kept: usize,
    /// Rows that all hints mean.
    meant: usize,
}

impl Referred {
    /// To columns of which hints mean so many rows. `None`: to copy them is better.
    pub fn to(columns: Vec<ArrayRef>, meant: usize) -> Option<Referred> {
        // A column may be a part of larger buffers, which stay as they are.
        let kept: usize = columns.iter().map(|column| column.get_array_memory_size()).sum();
        let rows = columns.first().map_or(0, |column| column.len()).max(1);
        let of_rows = || columns.iter().map(column_bytes).sum::<usize>();
        let is_little =
            kept <= FEW_BYTES || kept <= MANY_BYTES && of_rows() * meant / rows * FEW_OF >= kept;
        (is_little && meant > 0).then_some(Referred { columns, kept, meant })
    }

    /// Bytes of those columns that are none of `known`: they were made to tell the keys.
    pub fn bytes_made(&self, known: &[ArrayRef]) -> usize {
        let is_known = |column: &ArrayRef| known.iter().any(|k| Arc::ptr_eq(k, column));
        self.columns.iter().filter(|column| !is_known(column)).map(column_bytes).sum()
    }

    /// Bytes that are kept for each row that is meant.
    pub fn bytes_by_row(&self) -> usize {
        self.kept.div_ceil(self.meant)
    }

    /// The keys of these rows.
    pub fn keys(&self, rows: &[u32]) -> SentKeys {
        let all = self.columns.first().map_or(0, |column| column.len());
        SentKeys {
            columns: self.columns.clone(),
            rows: Selection::of(rows, all),
            is_copy: false,
            share: self.bytes_by_row() * rows.len(),
        }
    }
}

#[cfg(test)]
mod tests {
    use arrow::array::{AsArray, Int64Array};
    use arrow::datatypes::Int64Type;

    use super::*;

    fn ints(count: i64) -> ArrayRef {
        Arc::new(Int64Array::from_iter_values((0..count).map(|i| i * 10)))
    }

    #[test]
    fn a_selection_brings_the_rows_that_are_meant_in_few_bytes() {
        let (few, many): (Vec<u32>, Vec<u32>) = (vec![5, 900], (300..556).collect());
        let every: Vec<u32> = (0..512).step_by(2).collect();
        let column = ints(1_000);
        for (rows, most) in [(&few, 8), (&many, 32), (&every, 64), (&vec![7], 1)] {
            let referred = Referred { kept: 0, meant: 1, columns: vec![Arc::clone(&column)] };
            let keys = referred.keys(rows);
            assert_eq!(keys.count(), rows.len());
            assert!(keys.own_bytes() <= most, "{} bytes", keys.own_bytes());
            let taken = keys.into_columns().unwrap();
            let expected: Vec<i64> = rows.iter().map(|row| i64::from(*row) * 10).collect();
            assert_eq!(taken[0].as_primitive::<Int64Type>().values(), &expected[..]);
        }
        let all: Vec<u32> = (0..1_000).collect();
        let referred = Referred::to(vec![Arc::clone(&column)], 1_000).unwrap();
        let keys = referred.keys(&all);
        assert_eq!((keys.own_bytes(), keys.count()), (0, 1_000));
        assert!(Arc::ptr_eq(&keys.into_columns().unwrap()[0], &column));
    }

    #[test]
    fn much_is_not_kept_for_little() {
        let small = ints(100);
        assert!(Referred::to(vec![Arc::clone(&small)], 1).is_some());
        let large = ints(8_192);
        let refer = |meant| Referred::to(vec![Arc::clone(&large)], meant);
        assert!(refer(100).is_none(), "few of many rows");
        let referred = refer(8_192).unwrap();
        assert!(referred.bytes_by_row() >= size_of::<i64>());
        // A part of a statement with many rows.
        for (all, of_them) in [(1_000_000, 8_192), (20_000, 50)] {
            let part = ints(all).slice(0, of_them);
            assert!(Referred::to(vec![part], of_them).is_none(), "{of_them} of {all} rows");
        }
    }

    #[test]
    fn columns_that_were_made_to_tell_keys_are_counted() {
        let (own, made) = (ints(10), ints(20));
        let columns = vec![Arc::clone(&own), Arc::clone(&made)];
        let referred = Referred { kept: 0, meant: 1, columns };
        assert_eq!(referred.bytes_made(&[own]), 160);
    }
}
