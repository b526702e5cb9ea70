//! Lookup join: left rows meet the right rows that there are when they come and are forgotten; right rows are kept
//! and emit nothing.

use super::{Contribution, MatchCounts, MatchStatus, Policy};

/// See the module.
pub struct Lookup {
    /// Left rows that meet nothing are emitted with NULLs for the right columns, else dropped.
    pub outer: bool,
}

impl Policy for Lookup {
    fn emits_pairs(&self) -> bool {
        true
    }

    /// What a left row has met stays, whatever becomes of the right side.
    fn match_counts(&self, side: usize) -> MatchCounts {
        if self.outer && side == 0 { MatchCounts::WhilePaired } else { MatchCounts::None }
    }

    fn contribution(&self, status: MatchStatus) -> Contribution {
        if self.outer && status != MatchStatus::Matched {
            Contribution::ROW
        } else {
            Contribution::NOTHING
        }
    }

    fn keeps(&self, side: usize) -> bool {
        side == 1
    }

    fn probes(&self, side: usize) -> bool {
        side == 0
    }
}

#[cfg(test)]
mod tests {
    use arrow::datatypes::DataType;

    use super::super::NullKeys;
    use super::super::testing::{columns, contributions, numbers};
    use super::*;

    #[test]
    fn left_rows_probe_and_right_rows_are_kept() {
        let lookup = Lookup { outer: true };
        assert_eq!(
            [0, 1].map(|s| (lookup.probes(s), lookup.keeps(s))),
            [(true, false), (false, true)]
        );
        assert!(lookup.emits_pairs());
    }

    #[test]
    fn only_an_outer_lookup_counts_what_left_rows_meet() {
        let counts = |outer| [0, 1].map(|side| Lookup { outer }.match_counts(side));
        assert_eq!(counts(true), [MatchCounts::WhilePaired, MatchCounts::None]);
        assert_eq!(counts(false), [MatchCounts::None; 2]);
    }

    #[test]
    fn a_left_row_without_a_match_is_padded_or_dropped() {
        let [unmatched, _, matched] = contributions(&Lookup { outer: true });
        assert_eq!((unmatched, matched), (Contribution::ROW, Contribution::NOTHING));
        assert_eq!(contributions(&Lookup { outer: false }), [Contribution::NOTHING; 3]);
        let int = [DataType::Int64, DataType::Int64];
        let made = columns(&Lookup { outer: true }, 0, [None; 2], &[0, 2], &int);
        assert_eq!(numbers(&made[0]), [Some(1), Some(2)]);
        assert_eq!(numbers(&made[1]), [None, None]);
    }

    #[test]
    fn a_null_key_meets_nothing() {
        let null_keys = |outer| [0, 1].map(|side| Lookup { outer }.null_keys(side));
        assert_eq!(null_keys(true), [NullKeys::Emitted, NullKeys::Dropped]);
        assert_eq!(null_keys(false), [NullKeys::Dropped; 2]);
    }
}
