//! Inner join: pairs, and nothing else.

use super::{Contribution, MatchCounts, MatchStatus, Policy};

/// See the module.
pub struct Inner {
    /// Nothing that the join emits is ever retracted.
    pub append_only: bool,
}

impl Policy for Inner {
    fn emits_pairs(&self) -> bool {
        true
    }

    fn match_counts(&self, _: usize) -> MatchCounts {
        MatchCounts::None
    }

    fn contribution(&self, _: MatchStatus) -> Contribution {
        Contribution::NOTHING
    }

    /// Every row may be in a pair that was emitted, so rows are not retracted either.
    fn is_append_only(&self) -> bool {
        self.append_only
    }
}

#[cfg(test)]
mod tests {
    use super::super::NullKeys;
    use super::super::testing::contributions;
    use super::*;

    #[test]
    fn rows_contribute_nothing_by_themselves() {
        let inner = Inner { append_only: false };
        assert!(inner.emits_pairs());
        assert_eq!(contributions(&inner), [Contribution::NOTHING; 3]);
        for side in [0, 1] {
            assert_eq!(inner.match_counts(side), MatchCounts::None);
            assert_eq!(inner.null_keys(side), NullKeys::Dropped);
        }
    }

    #[test]
    fn only_an_append_only_join_has_append_only_sides() {
        assert!(Inner { append_only: true }.is_append_only());
        assert!(!Inner { append_only: false }.is_append_only());
    }
}
