//! Join policies: what the kind of a join decides, apart from the pairing of rows.
//!
//! A policy says whether a pair of matching rows is a row of the output, on which sides matches are counted,
//! what a row of such a side contributes by itself given its matches, and what becomes of rows with a NULL
//! in their key. All of this is fixed when a join is built and gathered in [`Rules`], so that no row costs a
//! call; the columns of rows that are emitted by themselves are asked for once a chunk.
//!
//! Invariant: what a row contributes by itself is a function of its [`MatchStatus`] alone.

mod inner;
mod lookup;
mod mark;
mod null_aware;
mod outer;
mod semi_anti;

use arrow::array::ArrayRef;
use millrace_graph::{Join, JoinKind};

pub use self::inner::Inner;
pub use self::lookup::Lookup;
pub use self::mark::Mark;
pub use self::null_aware::{NullAware, ThreeValuedKeys};
pub use self::outer::Outer;
pub use self::semi_anti::SemiAnti;
use super::emitter::{OutputColumns, OwnRows, padded};

/// Whether a row has matches on the other side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MatchStatus {
    /// No row matches.
    Unmatched,
    /// No row matches, but of some it is not known, because a key is NULL (null-aware joins).
    Unknown,
    Matched,
}

/// What a row contributes to the output by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Contribution {
    pub is_emitted: bool,
    /// Of a mark join: the mark it is emitted with.
    pub mark: Option<bool>,
}

impl Contribution {
    pub const NOTHING: Contribution = Contribution { is_emitted: false, mark: None };
    pub const ROW: Contribution = Contribution { is_emitted: true, mark: None };

    pub const fn marked(mark: Option<bool>) -> Contribution {
        Contribution { is_emitted: true, mark }
    }
}

/// How the matches of a side's rows are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MatchCounts {
    /// Not at all: its rows contribute nothing by themselves.
    None,
    /// While a chunk is paired, to emit its rows' contributions at once and for good.
    WhilePaired,
    /// As long as the row is there: its contribution follows the changes of the other side. The side is *preserved*.
    Kept,
}

/// What becomes of a row with a NULL in its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NullKeys {
    /// NULL is a key like any other here.
    Paired,
    /// It matches nothing; it is emitted at once as a row without a match, and not kept.
    Emitted,
    /// It matches nothing and contributes nothing.
    Dropped,
}

/// See the module. Sides: 0 is left, 1 is right.
pub trait Policy: Send + Sync {
    /// Whether a pair of matching rows is a row of the output.
    fn emits_pairs(&self) -> bool;

    fn match_counts(&self, side: usize) -> MatchCounts;

    /// What a row of a side with match counts contributes by itself.
    fn contribution(&self, status: MatchStatus) -> Contribution;

    /// Rows of this side are kept, so that later rows of the other side meet them.
    fn keeps(&self, side: usize) -> bool {
        let _ = side;
        true
    }

    /// Rows that arrive on this side are paired with the rows of the other side.
    fn probes(&self, side: usize) -> bool {
        let _ = side;
        true
    }

    /// Neither what the join emits nor the rows of its sides are ever retracted.
    fn is_append_only(&self) -> bool {
        false
    }

    /// A NULL key matches nothing, so such a row has the status of one without a match for good.
    fn null_keys(&self, side: usize) -> NullKeys {
        let counted = self.match_counts(side) != MatchCounts::None;
        if counted && self.contribution(MatchStatus::Unmatched).is_emitted {
            NullKeys::Emitted
        } else {
            NullKeys::Dropped
        }
    }

    /// The comparison of keys, given as positions in left columns then right columns, that is made for each
    /// pair. `None`: equal encoded keys match.
    fn key_comparison(&self, keys: Vec<(usize, usize)>) -> Option<ThreeValuedKeys> {
        let _ = keys;
        None
    }

    /// Output columns of rows that are emitted by themselves: by default the other side's are NULL.
    fn columns(&self, rows: &OwnRows<'_>, output: &OutputColumns) -> Vec<ArrayRef> {
        padded(rows, output)
    }
}

/// The policy of a join. `append_only`: nothing that it emits is ever retracted.
#[deny(clippy::wildcard_enum_match_arm)]
pub fn of(join: &Join, append_only: bool) -> Box<dyn Policy> {
    let policy: Box<dyn Policy> = match join.kind {
        JoinKind::Inner => Box::new(Inner { append_only }),
        JoinKind::LeftOuter => Box::new(Outer { preserved: [true, false] }),
        JoinKind::RightOuter => Box::new(Outer { preserved: [false, true] }),
        JoinKind::FullOuter => Box::new(Outer { preserved: [true, true] }),
        JoinKind::LeftSemi => Box::new(SemiAnti::semi(0)),
        JoinKind::RightSemi => Box::new(SemiAnti::semi(1)),
        JoinKind::LeftAnti => Box::new(SemiAnti::anti(0)),
        JoinKind::RightAnti => Box::new(SemiAnti::anti(1)),
        JoinKind::LeftMark => Box::new(Mark),
    };
    if join.null_aware { Box::new(NullAware { of: policy }) } else { policy }
}

/// The answers of a policy that the pairing of rows depends on, by side.
#[derive(Clone, Copy)]
pub struct Rules {
    pub emits_pairs: bool,
    /// Sides with [`MatchCounts::Kept`].
    pub preserved: [bool; 2],
    /// Sides with [`MatchCounts::WhilePaired`].
    pub counts_while_paired: [bool; 2],
    pub keeps: [bool; 2],
    pub probes: [bool; 2],
    pub null_keys: [NullKeys; 2],
    unmatched: Contribution,
    unknown: Contribution,
    matched: Contribution,
}

impl Rules {
    /// `null_equals_null`: NULL keys are equal to each other, whatever the policy.
    pub fn of(policy: &dyn Policy, null_equals_null: bool) -> Rules {
        let sides = [0, 1];
        let null_keys = match null_equals_null {
            true => [NullKeys::Paired; 2],
            false => sides.map(|side| policy.null_keys(side)),
        };
        Rules {
            emits_pairs: policy.emits_pairs(),
            preserved: sides.map(|side| policy.match_counts(side) == MatchCounts::Kept),
            counts_while_paired: sides
                .map(|side| policy.match_counts(side) == MatchCounts::WhilePaired),
            keeps: sides.map(|side| policy.keeps(side)),
            probes: sides.map(|side| policy.probes(side)),
            null_keys,
            unmatched: policy.contribution(MatchStatus::Unmatched),
            unknown: policy.contribution(MatchStatus::Unknown),
            matched: policy.contribution(MatchStatus::Matched),
        }
    }

    /// Whether rows of some side have a match state.
    #[inline]
    pub fn is_any_preserved(&self) -> bool {
        self.preserved[0] || self.preserved[1]
    }

    #[inline]
    pub fn contribution(&self, status: MatchStatus) -> Contribution {
        match status {
            MatchStatus::Unmatched => self.unmatched,
            MatchStatus::Unknown => self.unknown,
            MatchStatus::Matched => self.matched,
        }
    }
}

#[cfg(test)]
pub(super) mod testing {
    //! Rows and output columns for the tests of policies.

    use std::sync::Arc;

    use arrow::array::{ArrayRef, BooleanArray, Int64Array};
    use arrow::datatypes::{DataType, Field, Schema};

    use super::super::emitter::{OutputColumns, OwnRows};
    use super::{Contribution, MatchStatus, Policy};

    /// What a row contributes without a match, with unknown matches, and with a match.
    pub fn contributions(policy: &dyn Policy) -> [Contribution; 3] {
        [MatchStatus::Unmatched, MatchStatus::Unknown, MatchStatus::Matched]
            .map(|status| policy.contribution(status))
    }

    /// The output columns of the rows (1, 10) and (2, 20) of a side; both sides have two columns.
    pub fn columns(
        policy: &dyn Policy,
        side: usize,
        marks: [Option<bool>; 2],
        positions: &[usize],
        types: &[DataType],
    ) -> Vec<ArrayRef> {
        let columns = [[1, 2], [10, 20]].map(|c| Arc::new(Int64Array::from_iter_values(c)) as _);
        let marks = Arc::new(BooleanArray::from(marks.to_vec()));
        let fields = types.iter().map(|t| Field::new("c", t.clone(), true)).collect::<Vec<_>>();
        let output = OutputColumns {
            left_width: 2,
            positions: positions.to_vec(),
            schema: Arc::new(Schema::new(fields)),
        };
        policy.columns(&OwnRows { side, columns: &columns, marks, count: 2 }, &output)
    }

    /// The values of an integer column.
    pub fn numbers(column: &ArrayRef) -> Vec<Option<i64>> {
        column.as_any().downcast_ref::<Int64Array>().unwrap().iter().collect()
    }
}

#[cfg(test)]
mod tests {
    use millrace_graph::{JoinSide, SideState};
    use millrace_rpc::catalog::RowStorage;

    use super::*;

    fn rules(kind: JoinKind, null_aware: bool, null_equals_null: bool) -> Rules {
        let side = || JoinSide {
            keys: vec![0],
            vnode: vec![0],
            state: SideState {
                table: 0,
                storage: RowStorage::Multiset,
                unique_key: vec![],
                unique_per_key: false,
            },
        };
        let join = Join {
            kind,
            left: side(),
            right: side(),
            residual: None,
            null_aware,
            null_equals_null,
            output: vec![],
        };
        Rules::of(of(&join, false).as_ref(), null_equals_null)
    }

    #[test]
    fn kinds_have_their_pairs_and_preserved_sides() {
        let cases = [
            (JoinKind::Inner, true, [false, false]),
            (JoinKind::LeftOuter, true, [true, false]),
            (JoinKind::RightOuter, true, [false, true]),
            (JoinKind::FullOuter, true, [true, true]),
            (JoinKind::LeftSemi, false, [true, false]),
            (JoinKind::RightSemi, false, [false, true]),
            (JoinKind::LeftAnti, false, [true, false]),
            (JoinKind::RightAnti, false, [false, true]),
            (JoinKind::LeftMark, false, [true, false]),
        ];
        for (kind, emits_pairs, preserved) in cases {
            let rules = rules(kind, false, false);
            assert_eq!((rules.emits_pairs, rules.preserved), (emits_pairs, preserved), "{kind:?}");
            assert_eq!((rules.keeps, rules.probes), ([true; 2], [true; 2]), "{kind:?}");
            assert_eq!(rules.counts_while_paired, [false; 2], "{kind:?}");
        }
    }

    #[test]
    fn null_keys_that_are_equal_by_declaration_are_paired() {
        for kind in [JoinKind::Inner, JoinKind::FullOuter, JoinKind::LeftAnti] {
            assert_eq!(rules(kind, false, true).null_keys, [NullKeys::Paired; 2]);
        }
    }

    #[test]
    fn a_null_aware_join_keeps_the_contributions_of_its_kind() {
        for kind in [JoinKind::LeftAnti, JoinKind::LeftMark] {
            let (plain, aware) = (rules(kind, false, false), rules(kind, true, false));
            assert_eq!(aware.null_keys, [NullKeys::Paired; 2]);
            assert_eq!(aware.preserved, plain.preserved);
            for status in [MatchStatus::Unmatched, MatchStatus::Unknown, MatchStatus::Matched] {
                assert_eq!(aware.contribution(status), plain.contribution(status));
            }
        }
    }
}
