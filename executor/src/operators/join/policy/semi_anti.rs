//! Semi and anti join: rows of one side that have matches, or that have none. The other side decides only.

use std::sync::Arc;

use arrow::array::ArrayRef;

use super::{Contribution, MatchCounts, MatchStatus, OutputColumns, OwnRows, Policy};

/// See the module.
pub struct SemiAnti {
    side: usize,
    /// The status of the rows that are emitted.
    emitted: MatchStatus,
}

impl SemiAnti {
    /// Rows of `side` that have matches.
    pub fn semi(side: usize) -> SemiAnti {
        SemiAnti { side, emitted: MatchStatus::Matched }
    }

    /// Rows of `side` that are known to have no matches.
    pub fn anti(side: usize) -> SemiAnti {
        SemiAnti { side, emitted: MatchStatus::Unmatched }
    }
}

impl Policy for SemiAnti {
    fn emits_pairs(&self) -> bool {
        false
    }

    fn match_counts(&self, side: usize) -> MatchCounts {
        if side == self.side { MatchCounts::Kept } else { MatchCounts::None }
    }

    fn contribution(&self, status: MatchStatus) -> Contribution {
        if status == self.emitted { Contribution::ROW } else { Contribution::NOTHING }
    }

    /// Output positions are those of the side itself.
    fn columns(&self, rows: &OwnRows<'_>, output: &OutputColumns) -> Vec<ArrayRef> {
        output.positions.iter().map(|&c| Arc::clone(&rows.columns[c])).collect()
    }
}

#[cfg(test)]
mod tests {
    use arrow::datatypes::DataType;

    use super::super::NullKeys;
    use super::super::testing::{columns, contributions, numbers};
    use super::*;

    #[test]
    fn semi_emits_rows_with_matches_and_anti_rows_without() {
        let (row, nothing) = (Contribution::ROW, Contribution::NOTHING);
        assert_eq!(contributions(&SemiAnti::semi(0)), [nothing, nothing, row]);
        assert_eq!(contributions(&SemiAnti::anti(0)), [row, nothing, nothing]);
    }

    #[test]
    fn matches_are_counted_on_the_side_that_is_emitted() {
        for join in [SemiAnti::semi(1), SemiAnti::anti(1)] {
            assert_eq!(join.match_counts(0), MatchCounts::None);
            assert_eq!(join.match_counts(1), MatchCounts::Kept);
            assert!(!join.emits_pairs());
        }
    }

    #[test]
    fn a_null_key_passes_anti_and_fails_semi() {
        assert_eq!([0, 1].map(|s| SemiAnti::semi(0).null_keys(s)), [NullKeys::Dropped; 2]);
        let anti = [0, 1].map(|s| SemiAnti::anti(0).null_keys(s));
        assert_eq!(anti, [NullKeys::Emitted, NullKeys::Dropped]);
    }

    #[test]
    fn positions_are_those_of_the_side_that_is_emitted() {
        for side in [0, 1] {
            let made = columns(&SemiAnti::anti(side), side, [None; 2], &[1], &[DataType::Int64]);
            assert_eq!(made.iter().map(numbers).collect::<Vec<_>>(), [[Some(10), Some(20)]]);
        }
    }
}
