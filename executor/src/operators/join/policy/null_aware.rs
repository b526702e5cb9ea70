//! Null-aware joins (NOT IN, as an anti or a mark join): a NULL on either side makes it unknown whether two rows
//! match.
//!
//! Rows are told apart by key only in the comparison of pairs: all of them are under one encoded key.

use arrow::array::{Array, ArrayRef};
use arrow::buffer::BooleanBuffer;
use arrow::compute::kernels::cmp::eq;

use super::{Contribution, MatchCounts, MatchStatus, NullKeys, OutputColumns, OwnRows, Policy};
use crate::error::ExecError;
use crate::operators::expr::truth;

/// A policy whose keys are compared in three-valued logic. See the module.
pub struct NullAware {
    /// What rows contribute, given their matches.
    pub of: Box<dyn Policy>,
}

impl Policy for NullAware {
    fn emits_pairs(&self) -> bool {
        self.of.emits_pairs()
    }

    fn match_counts(&self, side: usize) -> MatchCounts {
        self.of.match_counts(side)
    }

    fn contribution(&self, status: MatchStatus) -> Contribution {
        self.of.contribution(status)
    }

    fn is_append_only(&self) -> bool {
        self.of.is_append_only()
    }

    fn null_keys(&self, _: usize) -> NullKeys {
        NullKeys::Paired
    }

    fn key_comparison(&self, keys: Vec<(usize, usize)>) -> Option<ThreeValuedKeys> {
        (!keys.is_empty()).then_some(ThreeValuedKeys { keys })
    }

    fn columns(&self, rows: &OwnRows<'_>, output: &OutputColumns) -> Vec<ArrayRef> {
        self.of.columns(rows, output)
    }
}

/// Keys that are compared pair by pair. Never empty.
pub struct ThreeValuedKeys {
    /// Positions in left columns then right columns.
    keys: Vec<(usize, usize)>,
}

impl ThreeValuedKeys {
    /// Of as many pairs, those whose keys are equal, and those whose keys may be equal: none of their columns
    /// differ, and some are NULL. `column` gives the values of a position.
    pub fn compare(
        &self,
        pairs: usize,
        mut column: impl FnMut(usize) -> Result<ArrayRef, ExecError>,
    ) -> Result<(BooleanBuffer, BooleanBuffer), ExecError> {
        let (mut equal, mut possible) =
            (BooleanBuffer::new_set(pairs), BooleanBuffer::new_set(pairs));
        for &(left, right) in &self.keys {
            let same = eq(&column(left)?, &column(right)?)?;
            equal = &equal & &truth(&same);
            if let Some(nulls) = same.nulls() {
                possible = &possible & &(same.values() | &!nulls.inner());
            } else {
                possible = &possible & same.values();
            }
        }
        let unknown = &possible & &!&equal;
        Ok((equal, unknown))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::array::Int64Array;

    use super::super::testing::contributions;
    use super::super::{Mark, SemiAnti};
    use super::*;

    #[test]
    fn not_in_emits_rows_that_are_known_to_have_no_match() {
        let anti = NullAware { of: Box::new(SemiAnti::anti(0)) };
        let (row, nothing) = (Contribution::ROW, Contribution::NOTHING);
        assert_eq!(contributions(&anti), [row, nothing, nothing]);
        assert_eq!([0, 1].map(|s| anti.null_keys(s)), [NullKeys::Paired; 2]);
        assert_eq!(anti.match_counts(0), MatchCounts::Kept);
    }

    #[test]
    fn an_unknown_match_is_a_null_mark() {
        let mark = NullAware { of: Box::new(Mark) };
        assert_eq!(contributions(&mark).map(|c| c.mark), [Some(false), None, Some(true)]);
    }

    #[test]
    fn without_keys_nothing_is_compared() {
        assert!(NullAware { of: Box::new(Mark) }.key_comparison(vec![]).is_none());
    }

    #[test]
    fn keys_are_equal_differ_or_are_unknown() {
        let columns = [
            vec![Some(1), Some(1), None, None, None],
            vec![Some(1), Some(2), Some(2), Some(2), None],
            vec![Some(1), Some(1), Some(1), Some(1), None],
            vec![Some(1), Some(1), Some(2), Some(3), None],
        ];
        let columns = columns.map(|c| Arc::new(Int64Array::from(c)) as ArrayRef);
        let keys = ThreeValuedKeys { keys: vec![(0, 2), (1, 3)] };
        let (equal, unknown) = keys.compare(5, |c| Ok(Arc::clone(&columns[c]))).unwrap();
        assert_eq!(equal.iter().collect::<Vec<_>>(), [true, false, false, false, false]);
        // A column that differs settles it whatever is NULL beside it.
        assert_eq!(unknown.iter().collect::<Vec<_>>(), [false, false, true, false, true]);
    }
}
