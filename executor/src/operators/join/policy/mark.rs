//! Mark join: every left row, with whether it has matches as a last column.

use std::sync::Arc;

use arrow::array::ArrayRef;

use super::{Contribution, MatchCounts, MatchStatus, OutputColumns, OwnRows, Policy};

/// See the module.
pub struct Mark;

impl Policy for Mark {
    fn emits_pairs(&self) -> bool {
        false
    }

    fn match_counts(&self, side: usize) -> MatchCounts {
        if side == 0 { MatchCounts::Kept } else { MatchCounts::None }
    }

    fn contribution(&self, status: MatchStatus) -> Contribution {
        Contribution::marked(match status {
            MatchStatus::Unmatched => Some(false),
            MatchStatus::Unknown => None,
            MatchStatus::Matched => Some(true),
        })
    }

    /// The position after the left columns is the mark.
    fn columns(&self, rows: &OwnRows<'_>, output: &OutputColumns) -> Vec<ArrayRef> {
        let column = |&c: &usize| Arc::clone(rows.columns.get(c).unwrap_or(&rows.marks));
        output.positions.iter().map(column).collect()
    }
}

#[cfg(test)]
mod tests {
    use arrow::array::AsArray;
    use arrow::datatypes::DataType;

    use super::super::NullKeys;
    use super::super::testing::{columns, contributions, numbers};
    use super::*;

    #[test]
    fn every_left_row_leaves_with_its_status_as_the_mark() {
        let marks = contributions(&Mark).map(|c| c.mark);
        assert_eq!(marks, [Some(false), None, Some(true)]);
        assert!(contributions(&Mark).iter().all(|c| c.is_emitted));
        assert_eq!([0, 1].map(|s| Mark.match_counts(s)), [MatchCounts::Kept, MatchCounts::None]);
    }

    #[test]
    fn a_left_row_with_a_null_key_is_emitted_as_one_without_a_match() {
        assert_eq!([0, 1].map(|s| Mark.null_keys(s)), [NullKeys::Emitted, NullKeys::Dropped]);
    }

    #[test]
    fn the_mark_follows_the_left_columns() {
        let marks = [Some(true), None];
        let made = columns(&Mark, 0, marks, &[2, 0], &[DataType::Boolean, DataType::Int64]);
        assert_eq!(made[0].as_boolean().iter().collect::<Vec<_>>(), marks);
        assert_eq!(numbers(&made[1]), [Some(1), Some(2)]);
    }
}
