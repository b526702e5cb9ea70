//! The aggregate functions that views maintain.

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AggFunc {
    /// `count(*)` or `count(x)`.
    Count,
    /// Integers and numerics exactly, floats by an exact order-independent sum.
    Sum,
    Avg,
    Min,
    Max,
    BoolAnd,
    BoolOr,
    /// Variances and roots of them: exact sums ([`crate::exact_aggregates`]).
    VarPop,
    VarSamp,
    StddevPop,
    StddevSamp,
    /// Of the pairs (y, x) that `pair_entry` makes, also from exact sums.
    CovarPop,
    CovarSamp,
    Corr,
    RegrCount,
    RegrAvgx,
    RegrAvgy,
    RegrSxx,
    RegrSyy,
    RegrSxy,
    RegrSlope,
    RegrIntercept,
    RegrR2,
    BitAnd,
    BitOr,
    BitXor,
    /// Of the entries that `collect_entry` makes, in their order: see [`crate::ordered_entries`].
    StringAgg,
    ArrayAgg,
    FirstValue,
    LastValue,
    PercentileCont,
    PercentileDisc,
    Mode,
    JsonbObjectAgg,
}

impl AggFunc {
    /// Whether the result is made of all values of the group, in order.
    pub fn is_collected(self) -> bool {
        use AggFunc as F;
        matches!(
            self,
            F::StringAgg
                | F::ArrayAgg
                | F::FirstValue
                | F::LastValue
                | F::PercentileCont
                | F::PercentileDisc
                | F::Mode
                | F::JsonbObjectAgg
        )
    }
}
