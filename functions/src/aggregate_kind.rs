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
    /// The name of the SQL function; a variant that keeps an earlier version of an aggregate has the same.
    pub fn name(self) -> &'static str {
        use AggFunc as F;
        match self {
            F::Count => "count",
            F::Sum => "sum",
            F::Avg => "avg",
            F::Min => "min",
            F::Max => "max",
            F::BoolAnd => "bool_and",
            F::BoolOr => "bool_or",
            F::VarPop => "var_pop",
            F::VarSamp => "var_samp",
            F::StddevPop => "stddev_pop",
            F::StddevSamp => "stddev_samp",
            F::CovarPop => "covar_pop",
            F::CovarSamp => "covar_samp",
            F::Corr => "corr",
            F::RegrCount => "regr_count",
            F::RegrAvgx => "regr_avgx",
            F::RegrAvgy => "regr_avgy",
            F::RegrSxx => "regr_sxx",
            F::RegrSyy => "regr_syy",
            F::RegrSxy => "regr_sxy",
            F::RegrSlope => "regr_slope",
            F::RegrIntercept => "regr_intercept",
            F::RegrR2 => "regr_r2",
            F::BitAnd => "bit_and",
            F::BitOr => "bit_or",
            F::BitXor => "bit_xor",
            F::StringAgg => "string_agg",
            F::ArrayAgg => "array_agg",
            F::FirstValue => "first_value",
            F::LastValue => "last_value",
            F::PercentileCont => "percentile_cont",
            F::PercentileDisc => "percentile_disc",
            F::Mode => "mode",
            F::JsonbObjectAgg => "jsonb_object_agg",
        }
    }

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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ordered, statistics};

    #[test]
    fn an_aggregate_has_the_name_of_its_function() {
        for func in [AggFunc::VarPop, AggFunc::StddevSamp, AggFunc::RegrR2, AggFunc::BitXor] {
            assert_eq!(statistics::by_name(func.name()), Some(func));
        }
        for func in [AggFunc::PercentileCont, AggFunc::Mode, AggFunc::JsonbObjectAgg] {
            assert_eq!(ordered::by_name(func.name()), Some(func));
        }
    }

    #[test]
    fn what_is_collected_has_no_exact_sums() {
        let collected = ["percentile_cont", "percentile_disc", "mode", "jsonb_object_agg"];
        for func in collected.into_iter().map(|name| ordered::by_name(name).unwrap()) {
            assert!(func.is_collected() && !func.is_exact(), "{func:?}");
        }
        for name in ["var_pop", "stddev_samp", "corr", "regr_count", "bit_xor"] {
            let func = statistics::by_name(name).unwrap();
            assert!(func.is_exact() && !func.is_collected(), "{func:?}");
        }
    }

    #[test]
    fn counts_sums_and_extremes_are_neither() {
        use AggFunc as F;
        for func in [F::Count, F::Sum, F::Avg, F::Min, F::Max, F::BoolAnd, F::BoolOr] {
            assert!(!func.is_collected() && !func.is_exact(), "{func:?}");
        }
    }

    #[test]
    fn values_in_order_are_collected() {
        use AggFunc as F;
        for func in [F::StringAgg, F::ArrayAgg, F::FirstValue, F::LastValue] {
            assert!(func.is_collected(), "{func:?}");
        }
    }
}
