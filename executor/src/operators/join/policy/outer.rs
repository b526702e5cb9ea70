//! Left, right and full outer join: pairs, and rows of preserved sides that match nothing, with NULLs for the
//! other side's columns.

use super::{Contribution, MatchCounts, MatchStatus, Policy};

/// See the module.
pub struct Outer {
    /// By side.
    pub preserved: [bool; 2],
}

impl Policy for Outer {
    fn emits_pairs(&self) -> bool {
        true
    }

    fn match_counts(&self, side: usize) -> MatchCounts {
        if self.preserved[side] { MatchCounts::Kept } else { MatchCounts::None }
    }

    fn contribution(&self, status: MatchStatus) -> Contribution {
        match status {
            MatchStatus::Unmatched | MatchStatus::Unknown => Contribution::ROW,
            MatchStatus::Matched => Contribution::NOTHING,
        }
    }
}

#[cfg(test)]
mod tests {
    use arrow::datatypes::DataType;

    use super::super::NullKeys;
    use super::super::testing::{columns, contributions, numbers};
    use super::*;

    const LEFT: Outer = Outer { preserved: [true, false] };

    #[test]
    fn rows_leave_by_themselves_while_they_match_nothing() {
        let [unmatched, _, matched] = contributions(&LEFT);
        assert_eq!((unmatched, matched), (Contribution::ROW, Contribution::NOTHING));
        assert!(LEFT.emits_pairs());
        assert!(!LEFT.is_append_only());
    }

    #[test]
    fn matches_are_counted_on_preserved_sides() {
        let counts = |outer: &Outer| [0, 1].map(|side| outer.match_counts(side));
        let (kept, none) = (MatchCounts::Kept, MatchCounts::None);
        assert_eq!(counts(&LEFT), [kept, none]);
        assert_eq!(counts(&Outer { preserved: [false, true] }), [none, kept]);
        assert_eq!(counts(&Outer { preserved: [true, true] }), [kept, kept]);
    }

    #[test]
    fn rows_with_a_null_key_are_emitted_on_preserved_sides() {
        assert_eq!(LEFT.null_keys(0), NullKeys::Emitted);
        assert_eq!(LEFT.null_keys(1), NullKeys::Dropped);
    }

    #[test]
    fn the_other_sides_columns_are_null() {
        let int = [DataType::Int64, DataType::Int64, DataType::Int64];
        let full = Outer { preserved: [true, true] };
        let values = |side| -> Vec<_> {
            columns(&full, side, [None; 2], &[3, 1, 0], &int).iter().map(numbers).collect()
        };
        let nulls = vec![None, None];
        let (first, second) = (vec![Some(1), Some(2)], vec![Some(10), Some(20)]);
        assert_eq!(values(0), [nulls.clone(), second.clone(), first]);
        assert_eq!(values(1), [second, nulls.clone(), nulls]);
    }
}
