//! PostgreSQL's aggregates whose state is exact sums ([`super::exact_aggregates`]), in batch.
//!
//! | function | argument | result |
//! |---|---|---|
//! | `var_pop`, `var_samp` (`variance`), `stddev_pop`, `stddev_samp` (`stddev`) | integers, numeric |
//! numeric, as of `avg` |
//! | the same | real, double precision | double precision |
//! | `covar_pop`, `covar_samp`, `corr`, `regr_…` | two numbers | double precision; `regr_count`: bigint |
//! | `bit_and`, `bit_or`, `bit_xor` | integers | the argument's type |

use std::collections::HashMap;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray};
use arrow::datatypes::{DataType, Field, FieldRef};
use datafusion::common::{Result, ScalarValue};
use datafusion::logical_expr::function::{AccumulatorArgs, StateFieldsArgs};
use datafusion::logical_expr::utils::AggregateOrderSensitivity;
use datafusion::logical_expr::{
    Accumulator, AggregateUDF, AggregateUDFImpl, Signature, Volatility,
};

use super::aggregates::{list_state, lists_of, malformed_state, result_type, undefined_aggregate};
use super::exact_aggregates::{Exact, ExactCall, Shape, column, pairs};
use crate::aggregate_kind::AggFunc;
use crate::error::external;

/// Names and aliases.
const FUNCTIONS: [(AggFunc, &str, &[&str]); 19] = [
    (AggFunc::VarPop, "var_pop", &[]),
    (AggFunc::VarSamp, "var_samp", &["variance"]),
    (AggFunc::StddevPop, "stddev_pop", &[]),
    (AggFunc::StddevSamp, "stddev_samp", &["stddev"]),
    (AggFunc::CovarPop, "covar_pop", &[]),
    (AggFunc::CovarSamp, "covar_samp", &[]),
    (AggFunc::Corr, "corr", &[]),
    (AggFunc::RegrCount, "regr_count", &[]),
    (AggFunc::RegrAvgx, "regr_avgx", &[]),
    (AggFunc::RegrAvgy, "regr_avgy", &[]),
    (AggFunc::RegrSxx, "regr_sxx", &[]),
    (AggFunc::RegrSyy, "regr_syy", &[]),
    (AggFunc::RegrSxy, "regr_sxy", &[]),
    (AggFunc::RegrSlope, "regr_slope", &[]),
    (AggFunc::RegrIntercept, "regr_intercept", &[]),
    (AggFunc::RegrR2, "regr_r2", &[]),
    (AggFunc::BitAnd, "bit_and", &[]),
    (AggFunc::BitOr, "bit_or", &[]),
    (AggFunc::BitXor, "bit_xor", &[]),
];

pub fn functions() -> Vec<Arc<AggregateUDF>> {
    let one = |(func, name, aliases): &(AggFunc, &'static str, &[&str])| {
        Arc::new(AggregateUDF::from(Statistic {
            func: *func,
            name,
            aliases: aliases.iter().map(|a| a.to_string()).collect(),
            signature: Signature::user_defined(Volatility::Immutable),
        }))
    };
    FUNCTIONS.iter().map(one).collect()
}

/// The function of this name, aliases left out.
pub fn by_name(name: &str) -> Option<AggFunc> {
    FUNCTIONS.iter().find(|f| f.1 == name).map(|f| f.0)
}

#[derive(Debug, PartialEq, Eq, Hash)]
struct Statistic {
    func: AggFunc,
    name: &'static str,
    aliases: Vec<String>,
    signature: Signature,
}

impl Statistic {
    /// What an argument is read as.
    fn argument(&self, t: &DataType) -> Option<DataType> {
        use DataType as D;
        let number = t.is_numeric() || *t == D::Null;
        match self.func.shape() {
            Shape::Pair => number.then_some(D::Float64),
            Shape::Bits => Some(match t {
                D::Int8 | D::UInt8 | D::Int16 => D::Int16,
                D::UInt16 | D::Int32 => D::Int32,
                D::UInt32 | D::Int64 | D::Null => D::Int64,
                _ => return None,
            }),
            _ => Some(match t {
                D::Int8 | D::UInt8 | D::Int16 => D::Int16,
                D::UInt16 | D::Int32 => D::Int32,
                D::UInt32 | D::Int64 | D::UInt64 => D::Int64,
                D::Decimal128(_, _) => t.clone(),
                D::Float16 | D::Float32 | D::Float64 | D::Null => D::Float64,
                _ => return None,
            }),
        }
    }

    /// The type of what [`ExactCall`] takes.
    fn entry(&self, args: &[FieldRef]) -> DataType {
        match (self.func.shape(), args.first()) {
            (Shape::Pair, _) | (_, None) => DataType::Binary,
            (_, Some(arg)) => arg.data_type().clone(),
        }
    }
}

impl AggregateUDFImpl for Statistic {
    fn name(&self) -> &str {
        self.name
    }

    fn aliases(&self) -> &[String] {
        &self.aliases
    }

    fn signature(&self) -> &Signature {
        &self.signature
    }

    fn coerce_types(&self, args: &[DataType]) -> Result<Vec<DataType>> {
        let wanted = if self.func.shape() == Shape::Pair { 2 } else { 1 };
        let known: Option<Vec<DataType>> = args.iter().map(|t| self.argument(t)).collect();
        match known {
            Some(types) if types.len() == wanted => Ok(types),
            _ => Err(external(undefined_aggregate(self.name, args))),
        }
    }

    fn return_type(&self, args: &[DataType]) -> Result<DataType> {
        let arg = args.first().and_then(|t| self.argument(t));
        let t = match (self.func.shape(), &arg) {
            (Shape::Pair, _) if self.func == AggFunc::RegrCount => Some(DataType::Int64),
            (Shape::Pair, _) => Some(DataType::Float64),
            (Shape::Bits, _) => arg,
            (_, Some(t)) => result_type(true, t),
            _ => None,
        };
        t.ok_or_else(|| external(undefined_aggregate(self.name, args)))
    }

    fn accumulator(&self, args: AccumulatorArgs) -> Result<Box<dyn Accumulator>> {
        let entry = self.entry(args.expr_fields);
        let call = ExactCall::new(self.func, &entry).map_err(external)?;
        let state = Accumulated {
            state: call.empty(),
            call,
            n: 0,
            pair: self.func.shape() == Shape::Pair,
            // Over no pairs there are no pairs; every other result is NULL.
            empty: if self.func == AggFunc::RegrCount { Some(0) } else { None },
            output: args.return_field.data_type().clone(),
        };
        Ok(match args.is_distinct {
            true => Box::new(Distinct { seen: HashMap::new(), entry, state }),
            false => Box::new(state),
        })
    }

    fn create_sliding_accumulator(&self, args: AccumulatorArgs) -> Result<Box<dyn Accumulator>> {
        self.accumulator(args)
    }

    fn state_fields(&self, args: StateFieldsArgs) -> Result<Vec<FieldRef>> {
        let t = match args.is_distinct {
            true => {
                let item = Field::new_list_field(self.entry(args.input_fields), true);
                DataType::List(Arc::new(item))
            }
            false => DataType::Binary,
        };
        Ok(vec![Arc::new(Field::new("state", t, true))])
    }

    fn order_sensitivity(&self) -> AggregateOrderSensitivity {
        AggregateOrderSensitivity::Insensitive
    }
}

#[derive(Debug)]
struct Accumulated {
    call: ExactCall,
    state: Exact,
    /// Values so far.
    n: i64,
    pair: bool,
    empty: Option<i64>,
    output: DataType,
}

impl Accumulated {
    /// The arguments as one column.
    fn entries(&self, values: &[ArrayRef]) -> ArrayRef {
        match (self.pair, values) {
            (true, [y, x, ..]) => Arc::new(pairs(y, x)),
            _ => Arc::clone(&values[0]),
        }
    }

    fn add(&mut self, entries: &ArrayRef, sign: i64) -> Result<()> {
        let values = self.call.values(entries).map_err(external)?;
        let nulls = entries.logical_nulls();
        for row in 0..entries.len() {
            if nulls.as_ref().is_none_or(|n| n.is_valid(row)) {
                self.state.add(&values, row, sign);
                self.n += sign;
            }
        }
        Ok(())
    }
}

impl Accumulator for Accumulated {
    fn update_batch(&mut self, values: &[ArrayRef]) -> Result<()> {
        self.add(&self.entries(values), 1)
    }

    fn retract_batch(&mut self, values: &[ArrayRef]) -> Result<()> {
        self.add(&self.entries(values), -1)
    }

    fn supports_retract_batch(&self) -> bool {
        true
    }

    fn evaluate(&mut self) -> Result<ScalarValue> {
        if self.n == 0 {
            return match self.empty {
                Some(n) => Ok(ScalarValue::Int64(Some(n))),
                None => ScalarValue::try_from(&self.output),
            };
        }
        let result = self.call.result(&self.state, &self.output).map_err(external)?;
        let column = column(vec![result], &self.output).map_err(external)?;
        ScalarValue::try_from_array(&column, 0)
    }

    fn size(&self) -> usize {
        size_of::<Accumulated>() + self.state.size()
    }

    fn state(&mut self) -> Result<Vec<ScalarValue>> {
        let mut bytes = self.n.to_le_bytes().to_vec();
        bytes.extend(self.state.to_bytes());
        Ok(vec![ScalarValue::Binary(Some(bytes))])
    }

    fn merge_batch(&mut self, states: &[ArrayRef]) -> Result<()> {
        let bad = malformed_state;
        for bytes in states[0].as_binary::<i32>().iter().flatten() {
            let (n, state) = bytes.split_at_checked(8).ok_or_else(bad)?;
            self.n += i64::from_le_bytes(n.try_into().map_err(|_| bad())?);
            self.state.merge(&self.call.read(state).map_err(external)?);
        }
        Ok(())
    }
}

/// DISTINCT: a value counts while it is there at all.
#[derive(Debug)]
struct Distinct {
    seen: HashMap<ScalarValue, i64>,
    entry: DataType,
    state: Accumulated,
}

impl Distinct {
    fn add(&mut self, entries: &ArrayRef, sign: i64) -> Result<()> {
        let entries = millrace_common::keys::canonicalise(entries);
        let mut changed = Vec::new();
        for row in 0..entries.len() {
            if entries.is_null(row) {
                continue;
            }
            let value = ScalarValue::try_from_array(&entries, row)?;
            let count = self.seen.entry(value.clone()).or_insert(0);
            let before = *count;
            *count += sign;
            if (before > 0) != (*count > 0) {
                changed.push(value.clone());
            }
            if *count == 0 {
                self.seen.remove(&value);
            }
        }
        if changed.is_empty() {
            return Ok(());
        }
        self.state.add(&ScalarValue::iter_to_array(changed)?, sign)
    }
}

impl Accumulator for Distinct {
    fn update_batch(&mut self, values: &[ArrayRef]) -> Result<()> {
        self.add(&self.state.entries(values), 1)
    }

    fn retract_batch(&mut self, values: &[ArrayRef]) -> Result<()> {
        self.add(&self.state.entries(values), -1)
    }

    fn supports_retract_batch(&self) -> bool {
        true
    }

    fn evaluate(&mut self) -> Result<ScalarValue> {
        self.state.evaluate()
    }

    fn size(&self) -> usize {
        size_of::<Distinct>() + self.seen.capacity() * (size_of::<ScalarValue>() + 16)
    }

    fn state(&mut self) -> Result<Vec<ScalarValue>> {
        let values: Vec<ScalarValue> = self.seen.keys().cloned().collect();
        Ok(vec![list_state(&values, &self.entry)])
    }

    fn merge_batch(&mut self, states: &[ArrayRef]) -> Result<()> {
        for list in lists_of(states)?.iter().flatten() {
            self.add(&list, 1)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use crate::testing::check_aggregates;

    #[test]
    fn variances_of_integers_are_numerics() {
        check_aggregates(&[
            ("var_pop", "int4", "1; 2; 3; 4", "1.2500000000000000"),
            ("var_samp", "int4", "1; 2; 3; 4", "1.6666666666666667"),
            ("variance", "int8", "10; 20", "50.0000000000000000"),
            ("stddev_pop", "int2", "2; 4; 4; 4; 5; 5; 7; 9", "2.0000000000000000"),
            ("stddev_samp", "int4", "1; 3", "1.4142135623730950"),
            ("stddev", "numeric(10,2)", "1.50; 2.50; 3.50", "1.0000000000000000"),
            ("var_pop", "int4", "5", "0.0000000000000000"),
            ("var_samp", "int4", "5", "NULL"),
            ("stddev_samp", "int4", "", "NULL"),
            ("var_pop", "int4", "NULL; NULL", "NULL"),
            ("var_pop", "int8", "9223372036854775807; 9223372036854775807", "0.0000000000000000"),
        ]);
    }

    #[test]
    fn variances_of_floats() {
        check_aggregates(&[
            ("var_pop", "float8", "1; 2; 3; 4", "1.25"),
            ("var_samp", "float8", "1", "NULL"),
            ("var_pop", "float8", "7", "0"),
            ("stddev_pop", "float8", "1; NaN", "NaN"),
            ("var_pop", "float8", "1; Infinity", "NaN"),
            ("stddev_samp", "float4", "1.5; 2.5", "0.7071067811865476"),
            ("var_pop", "float8", "NULL", "NULL"),
        ]);
    }

    #[test]
    fn pairs_count_where_both_are_there() {
        check_aggregates(&[
            ("covar_pop", "float8|float8", "1|2; 2|4; 3|6", "1.3333333333333333"),
            ("covar_samp", "float8|float8", "1|2; 2|4; NULL|1", "1"),
            ("covar_samp", "float8|float8", "1|2", "NULL"),
            ("corr", "float8|float8", "1|2; 2|4; 3|6", "1"),
            ("corr", "float8|float8", "1|2; 1|4", "NULL"),
            ("corr", "float8|float8", "3|1; 2|2; 1|3", "-1"),
            ("regr_count", "float8|float8", "1|2; NULL|4; 3|NULL", "1"),
            ("regr_count", "float8|float8", "", "0"),
            ("regr_avgx", "float8|float8", "1|2; 2|4", "3"),
            ("regr_avgy", "float8|float8", "1|2; 2|4; 9|NULL", "1.5"),
            ("regr_sxx", "float8|float8", "1|2; 2|4", "2"),
            ("regr_syy", "float8|float8", "1|2; 2|4", "0.5"),
            ("regr_sxy", "float8|float8", "1|2; 2|4", "1"),
            ("regr_slope", "float8|float8", "1|2; 2|4", "0.5"),
            ("regr_slope", "float8|float8", "1|2; 2|2", "NULL"),
            ("regr_intercept", "float8|float8", "3|2; 5|4", "1"),
            ("regr_r2", "float8|float8", "1|1; 1|2", "1"),
            ("regr_r2", "float8|float8", "1|1; 2|1", "NULL"),
            ("corr", "float8|float8", "1|1; NaN|2", "NaN"),
            ("corr", "float8|float8", "1|1; Infinity|2", "NaN"),
            ("corr", "float8|float8", "", "NULL"),
        ]);
    }

    #[test]
    fn bits() {
        check_aggregates(&[
            ("bit_and", "int4", "12; 10; NULL", "8"),
            ("bit_or", "int4", "12; 10", "14"),
            ("bit_xor", "int4", "12; 10; 6", "0"),
            ("bit_and", "int2", "-1; 255", "255"),
            ("bit_or", "int8", "-9223372036854775808; 1", "-9223372036854775807"),
            ("bit_xor", "int8", "-1; -1", "0"),
            ("bit_and", "int4", "NULL", "NULL"),
            ("bit_xor", "int4", "", "NULL"),
            ("distinct bit_xor", "int4", "5; 5; 3", "6"),
            ("distinct var_pop", "int4", "1; 1; 3", "1.0000000000000000"),
        ]);
    }
}
