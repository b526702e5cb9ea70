//! Our enumerations as the numbers of the stored format. Numbers are never reused.

use arrow::datatypes::TimeUnit;
use datafusion::logical_expr::{Operator, WindowFrameUnits};
use millrace_common::access::AccessClass;
use millrace_functions::aggregate_kind::AggFunc;
use millrace_functions::versions;
use millrace_functions::window_call::RankFunction;
use millrace_rpc::catalog::RowStorage;

use crate::JoinKind;
use crate::codec::CodecError;

/// An edge that carries rows.
pub const EDGE_ROWS: u32 = 1;

/// An enumeration with a number for every variant.
pub trait Numbered: Copy + PartialEq + Sized + 'static {
    const NAME: &'static str;
    const ALL: &'static [(Self, u32)];

    fn number(self) -> Result<u32, CodecError> {
        let found = Self::ALL.iter().find(|(v, _)| *v == self);
        found.map(|(_, n)| *n).ok_or_else(|| CodecError::Encode(Self::NAME.into()))
    }

    fn from_number(n: u32) -> Result<Self, CodecError> {
        let found = Self::ALL.iter().find(|(_, have)| *have == n);
        found
            .map(|(v, _)| *v)
            .ok_or_else(|| CodecError::Damaged(format!("{} has no number {n}", Self::NAME)))
    }
}

macro_rules! numbered {
    ($type:ident, $name:literal, $($variant:ident = $number:literal),* $(,)?) => {
        impl Numbered for $type {
            const NAME: &'static str = $name;
            const ALL: &'static [($type, u32)] = &[$(($type::$variant, $number)),*];
        }
    };
}

numbered!(RowStorage, "row storage", Keyed = 1, Multiset = 2, Append = 3);
numbered!(
    AccessClass,
    "access class",
    PointUpdate = 1,
    Append = 2,
    RangeRead = 3,
    Lookup = 4,
    Merge = 5,
);
numbered!(
    AggFunc,
    "aggregate function",
    Count = 1,
    Sum = 2,
    Avg = 3,
    Min = 4,
    Max = 5,
    BoolAnd = 6,
    BoolOr = 7,
    VarPop = 8,
    VarSamp = 9,
    StddevPop = 10,
    StddevSamp = 11,
    CovarPop = 12,
    CovarSamp = 13,
    Corr = 14,
    BitAnd = 15,
    BitOr = 16,
    BitXor = 17,
    StringAgg = 20,
    ArrayAgg = 21,
    FirstValue = 22,
    LastValue = 23,
    PercentileCont = 24,
    PercentileDisc = 25,
    Mode = 26,
    JsonbObjectAgg = 27,
    RegrCount = 40,
    RegrAvgx = 41,
    RegrAvgy = 42,
    RegrSxx = 43,
    RegrSyy = 44,
    RegrSxy = 45,
    RegrSlope = 46,
    RegrIntercept = 47,
    RegrR2 = 48,
);
numbered!(
    JoinKind,
    "join kind",
    Inner = 1,
    LeftOuter = 2,
    RightOuter = 3,
    FullOuter = 4,
    LeftSemi = 5,
    RightSemi = 6,
    LeftAnti = 7,
    RightAnti = 8,
    LeftMark = 9,
);
numbered!(RankFunction, "ranking function", RowNumber = 1, Rank = 2, DenseRank = 3);
numbered!(WindowFrameUnits, "window frame units", Rows = 1, Range = 2, Groups = 3);
numbered!(TimeUnit, "time unit", Second = 1, Millisecond = 2, Microsecond = 3, Nanosecond = 4);
numbered!(
    Operator,
    "binary operator",
    Eq = 1,
    NotEq = 2,
    Lt = 3,
    LtEq = 4,
    Gt = 5,
    GtEq = 6,
    Plus = 7,
    Minus = 8,
    Multiply = 9,
    Divide = 10,
    Modulo = 11,
    And = 12,
    Or = 13,
    IsDistinctFrom = 14,
    IsNotDistinctFrom = 15,
    RegexMatch = 16,
    RegexIMatch = 17,
    RegexNotMatch = 18,
    RegexNotIMatch = 19,
    LikeMatch = 20,
    ILikeMatch = 21,
    NotLikeMatch = 22,
    NotILikeMatch = 23,
    BitwiseAnd = 24,
    BitwiseOr = 25,
    BitwiseXor = 26,
    BitwiseShiftRight = 27,
    BitwiseShiftLeft = 28,
    StringConcat = 29,
    AtArrow = 30,
    ArrowAt = 31,
);

/// An aggregate's number and version, as a stored graph names it. The first version is 0: it is not written.
pub fn of_aggregate(func: AggFunc) -> Result<(u32, u32), CodecError> {
    let version = versions::of_aggregate(func);
    Ok((func.number()?, if version == 1 { 0 } else { version }))
}

/// The aggregate that a stored graph names. A version that this release does not have is an error that says which.
pub fn aggregate(number: u32, version: u32) -> Result<AggFunc, CodecError> {
    aggregate_in(AggFunc::ALL, versions::of_aggregate, number, version)
}

/// Versions of one aggregate have one number.
fn aggregate_in(
    all: &[(AggFunc, u32)],
    version_of: impl Fn(AggFunc) -> u32,
    number: u32,
    version: u32,
) -> Result<AggFunc, CodecError> {
    let version = version.max(1);
    let versions = || all.iter().filter(|(_, n)| *n == number).map(|(func, _)| *func);
    match (versions().find(|func| version_of(*func) == version), versions().next()) {
        (Some(func), _) => Ok(func),
        (None, Some(other)) => {
            Err(CodecError::UnknownFunction { name: other.name().to_owned(), version })
        }
        (None, None) => AggFunc::from_number(number),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_aggregate_is_found_by_its_number_and_version() {
        for (func, number) in AggFunc::ALL {
            let named = of_aggregate(*func).unwrap();
            assert_eq!(named.0, *number);
            assert_eq!(aggregate(named.0, named.1).unwrap(), *func);
        }
        // The first version is not written.
        assert_eq!(of_aggregate(AggFunc::Count).unwrap(), (1, 0));
        assert_eq!(aggregate(1, 1).unwrap(), AggFunc::Count);
        let error = aggregate(2, 7).unwrap_err().to_string();
        assert_eq!(error, "the function sum, version 7, is not known to this release");
        assert!(matches!(aggregate(1000, 0), Err(CodecError::Damaged(_))));
    }

    #[test]
    fn a_kept_aggregate_shares_the_number_of_the_changed_one() {
        // As if sum were at version 2, and this variant what it was before.
        let all = [(AggFunc::Sum, 2), (AggFunc::BitXor, 2)];
        let version_of = |func| if func == AggFunc::Sum { 2 } else { 1 };
        let found = |version| aggregate_in(&all, version_of, 2, version);
        assert_eq!(found(2).unwrap(), AggFunc::Sum);
        assert_eq!(found(0).unwrap(), AggFunc::BitXor);
        assert!(matches!(found(3), Err(CodecError::UnknownFunction { version: 3, .. })));
    }
}
