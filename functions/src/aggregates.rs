//! `sum` and `avg` with PostgreSQL's types, and its names for aggregates that DataFusion calls
//! otherwise.
//!
//! | argument | sum | avg |
//! |---|---|---|
//! | smallint, integer | bigint | numeric(38,16) |
//! | bigint | numeric(38,0) | numeric(38,16) |
//! | numeric(p,s) | numeric(38,s) | numeric of scale max(s, 16) |
//! | real | real | double precision |
//! | double precision | double precision | double precision |
//! | interval | interval | interval |
//!
//! Floats are summed exactly ([`ExactSum`]), so that the result does not depend on the order of rows, in
//! batch as in views.

use std::sync::{Arc, OnceLock};

use arrow::array::*;
use arrow::datatypes::*;
use datafusion::common::{Result, ScalarValue};
use datafusion::error::DataFusionError;
use datafusion::functions_aggregate::bool_and_or::{bool_and_udaf, bool_or_udaf};
use datafusion::logical_expr::function::{AccumulatorArgs, StateFieldsArgs};
use datafusion::logical_expr::utils::AggregateOrderSensitivity;
use datafusion::logical_expr::{
    Accumulator, AggregateUDF, AggregateUDFImpl, Signature, Volatility,
};
use millrace_common::types::UNCONSTRAINED_NUMERIC;
use millrace_common::{ExactSum, SqlError, SqlState};

use super::cast::fit;
use super::kernels::out_of_range;
use super::parse::numeric_overflow;
use crate::error::external;

/// Ours, and DataFusion's under PostgreSQL's names.
pub fn functions() -> Vec<Arc<AggregateUDF>> {
    let every = AggregateUDF::clone(&bool_and_udaf()).with_aliases(["every"]);
    let mut all = vec![sum_udaf(), avg_udaf(), Arc::new(every), bool_or_udaf()];
    all.extend(super::statistics::functions());
    all.extend(super::ordered::functions());
    all.extend([super::string_agg::string_agg(), super::jsonb_agg::jsonb_agg()]);
    all
}

pub fn sum_udaf() -> Arc<AggregateUDF> {
    static F: OnceLock<Arc<AggregateUDF>> = OnceLock::new();
    Arc::clone(F.get_or_init(|| Arc::new(AggregateUDF::from(Sum::new(false)))))
}

pub fn avg_udaf() -> Arc<AggregateUDF> {
    static F: OnceLock<Arc<AggregateUDF>> = OnceLock::new();
    Arc::clone(F.get_or_init(|| Arc::new(AggregateUDF::from(Sum::new(true)))))
}

#[derive(Debug, PartialEq, Eq, Hash)]
struct Sum {
    average: bool,
    signature: Signature,
}

impl Sum {
    fn new(average: bool) -> Sum {
        Sum { average, signature: Signature::user_defined(Volatility::Immutable) }
    }
}

/// What an argument is read as.
fn argument(t: &DataType) -> Option<DataType> {
    Some(match t {
        DataType::Int8 | DataType::UInt8 | DataType::Int16 => DataType::Int16,
        DataType::UInt16 | DataType::Int32 => DataType::Int32,
        DataType::UInt32 | DataType::Int64 | DataType::UInt64 => DataType::Int64,
        DataType::Float32 | DataType::Float64 | DataType::Decimal128(_, _) => t.clone(),
        DataType::Float16 => DataType::Float32,
        DataType::Interval(_) => DataType::Interval(IntervalUnit::MonthDayNano),
        // sum('1') and sum(NULL): PostgreSQL says the former is not unique; a null is a float.
        DataType::Null => DataType::Float64,
        _ => return None,
    })
}

/// The result type of `sum` or `avg` of an argument type.
pub fn result_type(average: bool, t: &DataType) -> Option<DataType> {
    let t = argument(t)?;
    Some(match (&t, average) {
        (DataType::Int16 | DataType::Int32, false) => DataType::Int64,
        (DataType::Int64, false) => DataType::Decimal128(38, 0),
        (DataType::Int16 | DataType::Int32 | DataType::Int64, true) => DataType::Decimal128(38, 16),
        (DataType::Decimal128(p, s), average) => {
            if (*p, *s) == UNCONSTRAINED_NUMERIC {
                t
            } else {
                let scale = if average { (*s).max(16) } else { *s };
                let precision = if (38, scale) == UNCONSTRAINED_NUMERIC { 37 } else { 38 };
                DataType::Decimal128(precision, scale)
            }
        }
        (DataType::Float32, true) => DataType::Float64,
        _ => t,
    })
}

impl AggregateUDFImpl for Sum {
    fn name(&self) -> &str {
        if self.average { "avg" } else { "sum" }
    }

    fn signature(&self) -> &Signature {
        &self.signature
    }

    fn coerce_types(&self, args: &[DataType]) -> Result<Vec<DataType>> {
        match args {
            [t] => match argument(t) {
                Some(t) => Ok(vec![t]),
                None => Err(external(undefined_aggregate(self.name(), args))),
            },
            _ => Err(external(SqlError::new(
                SqlState::UNDEFINED_FUNCTION,
                format!("function {} with {} arguments does not exist", self.name(), args.len()),
            ))),
        }
    }

    fn return_type(&self, args: &[DataType]) -> Result<DataType> {
        match args.first().and_then(|t| result_type(self.average, t)) {
            Some(t) => Ok(t),
            None => Err(external(undefined_aggregate(self.name(), args))),
        }
    }

    fn accumulator(&self, args: AccumulatorArgs) -> Result<Box<dyn Accumulator>> {
        let input = args.expr_fields.first().map(|f| f.data_type().clone());
        let input = input.unwrap_or(DataType::Null);
        let state = SumState {
            count: 0,
            number: Number::new(&input),
            input,
            output: args.return_field.data_type().clone(),
            average: self.average,
        };
        Ok(match args.is_distinct {
            true => Box::new(Distinct { seen: Default::default(), state }),
            false => Box::new(state),
        })
    }

    fn create_sliding_accumulator(&self, args: AccumulatorArgs) -> Result<Box<dyn Accumulator>> {
        self.accumulator(args)
    }

    fn state_fields(&self, args: StateFieldsArgs) -> Result<Vec<FieldRef>> {
        if args.is_distinct {
            let input = args.input_fields.first().map_or(DataType::Null, |f| f.data_type().clone());
            let item = Arc::new(Field::new_list_field(input, true));
            return Ok(vec![Arc::new(Field::new("values", DataType::List(item), true))]);
        }
        Ok(vec![
            Arc::new(Field::new("count", DataType::Int64, false)),
            Arc::new(Field::new("sum", DataType::Binary, false)),
        ])
    }

    fn order_sensitivity(&self) -> AggregateOrderSensitivity {
        AggregateOrderSensitivity::Insensitive
    }
}

/// Values as the state of an accumulator.
pub fn list_state(values: &[ScalarValue], item: &DataType) -> ScalarValue {
    ScalarValue::List(ScalarValue::new_list_nullable(values, item))
}

/// What [`list_state`] made, one list a row.
pub fn lists_of(states: &[ArrayRef]) -> Result<&ListArray> {
    states.first().and_then(|s| s.as_list_opt::<i32>()).ok_or_else(malformed_state)
}

/// Of states that no accumulator of the function has made.
pub fn malformed_state() -> DataFusionError {
    external(SqlError::internal("malformed aggregate state"))
}

/// What PostgreSQL says of a call that no function fits.
pub fn undefined_aggregate(function: &str, args: &[DataType]) -> SqlError {
    let types: Vec<String> =
        args.iter().map(|t| crate::types::type_name(&Some(t.clone()))).collect();
    SqlError::new(
        SqlState::UNDEFINED_FUNCTION,
        format!("function {function}({}) does not exist", types.join(", ")),
    )
    .with_hint(
        "No function matches the given name and argument types. You might need to add explicit \
         type casts.",
    )
}

/// A running exact sum.
#[derive(Debug)]
enum Number {
    /// Integers and the digits of numerics. 64 bits more than any value: a sum cannot wrap.
    Integer(i256),
    Float(ExactSum),
    Interval {
        months: i64,
        days: i64,
        us: i128,
    },
}

impl Number {
    fn new(t: &DataType) -> Number {
        match t {
            DataType::Float32 | DataType::Float64 => Number::Float(ExactSum::new()),
            DataType::Interval(_) => Number::Interval { months: 0, days: 0, us: 0 },
            _ => Number::Integer(i256::ZERO),
        }
    }

    fn to_bytes(&self) -> Vec<u8> {
        match self {
            Number::Integer(v) => v.to_le_bytes().to_vec(),
            Number::Float(s) => s.to_bytes(),
            Number::Interval { months, days, us } => {
                let mut out = months.to_le_bytes().to_vec();
                out.extend(days.to_le_bytes());
                out.extend(us.to_le_bytes());
                out
            }
        }
    }

    fn merge(&mut self, bytes: &[u8]) -> Result<()> {
        let bad = malformed_state;
        match self {
            Number::Integer(v) => {
                let other = i256::from_le_bytes(bytes.try_into().map_err(|_| bad())?);
                *v = v.wrapping_add(other);
            }
            Number::Float(s) => s.merge(&ExactSum::from_bytes(bytes).ok_or_else(bad)?),
            Number::Interval { months, days, us } => {
                if bytes.len() != 32 {
                    return Err(bad());
                }
                let word = |r: std::ops::Range<usize>| bytes[r].try_into().map_err(|_| bad());
                *months += i64::from_le_bytes(word(0..8)?);
                *days += i64::from_le_bytes(word(8..16)?);
                *us += i128::from_le_bytes(bytes[16..32].try_into().map_err(|_| bad())?);
            }
        }
        Ok(())
    }

    /// Adds all values of an array `sign` times.
    fn add(&mut self, array: &ArrayRef, sign: i64) -> Result<()> {
        match self {
            Number::Integer(total) => {
                let part = match array.data_type() {
                    DataType::Int16 => small_sum(array.as_primitive::<Int16Type>()),
                    DataType::Int32 => small_sum(array.as_primitive::<Int32Type>()),
                    DataType::Int64 => small_sum(array.as_primitive::<Int64Type>()),
                    DataType::Decimal128(_, _) => {
                        let values = array.as_primitive::<Decimal128Type>();
                        values
                            .iter()
                            .flatten()
                            .fold(i256::ZERO, |sum, v| sum.wrapping_add(i256::from_i128(v)))
                    }
                    other => return Err(unexpected(other)),
                };
                *total = match sign {
                    1 => total.wrapping_add(part),
                    _ => total.wrapping_sub(part),
                };
            }
            Number::Float(sum) => match array.data_type() {
                DataType::Float32 => {
                    let values = array.as_primitive::<Float32Type>();
                    values.iter().flatten().for_each(|v| sum.add(f64::from(v), sign));
                }
                DataType::Float64 => {
                    let values = array.as_primitive::<Float64Type>();
                    values.iter().flatten().for_each(|v| sum.add(v, sign));
                }
                other => return Err(unexpected(other)),
            },
            Number::Interval { months, days, us } => {
                for v in array.as_primitive::<IntervalMonthDayNanoType>().iter().flatten() {
                    *months += sign * i64::from(v.months);
                    *days += sign * i64::from(v.days);
                    *us += i128::from(sign) * i128::from(v.nanoseconds / 1000);
                }
            }
        }
        Ok(())
    }
}

fn unexpected(t: &DataType) -> datafusion::error::DataFusionError {
    external(SqlError::internal(format!("sum over {t}")))
}

fn small_sum<T: ArrowPrimitiveType>(values: &PrimitiveArray<T>) -> i256
where
    T::Native: Into<i64>,
{
    let sum: i128 = values.iter().flatten().map(|v| i128::from(v.into())).sum();
    i256::from_i128(sum)
}

#[derive(Debug)]
struct SumState {
    count: i64,
    number: Number,
    input: DataType,
    output: DataType,
    average: bool,
}

impl SumState {
    fn add(&mut self, values: &[ArrayRef], sign: i64) -> Result<()> {
        let array = &values[0];
        self.count += sign * (array.len() - array.logical_null_count()) as i64;
        self.number.add(array, sign)
    }

    fn result(&self) -> Result<ScalarValue, SqlError> {
        match &self.number {
            Number::Integer(total) => self.integer(*total),
            Number::Float(sum) => {
                let range = |what: &str| {
                    SqlError::new(
                        SqlState::NUMERIC_VALUE_OUT_OF_RANGE,
                        format!("value out of range: {what}"),
                    )
                };
                if sum.overflows() {
                    return Err(range("overflow"));
                }
                let v = sum.value();
                let v = if self.average { v / self.count as f64 } else { v };
                Ok(match self.output {
                    DataType::Float32 => {
                        let narrow = v as f32;
                        if narrow.is_infinite() && v.is_finite() {
                            return Err(range("overflow"));
                        }
                        ScalarValue::Float32(Some(narrow))
                    }
                    _ => ScalarValue::Float64(Some(v)),
                })
            }
            Number::Interval { months, days, us } => {
                let us = i64::try_from(*us).map_err(|_| {
                    SqlError::new(SqlState::DATETIME_FIELD_OVERFLOW, "interval out of range")
                })?;
                let total = super::datetime::interval(*months, *days, us)?;
                let v = match self.average {
                    true => super::datetime::scale(total, self.count as f64, true)?,
                    false => total,
                };
                Ok(ScalarValue::IntervalMonthDayNano(Some(v)))
            }
        }
    }

    fn integer(&self, total: i256) -> Result<ScalarValue, SqlError> {
        let total = total.to_i128().ok_or_else(numeric_overflow);
        match self.output {
            DataType::Int64 => match i64::try_from(total?) {
                Ok(v) => Ok(ScalarValue::Int64(Some(v))),
                Err(_) => Err(out_of_range("bigint")),
            },
            DataType::Decimal128(p, s) => {
                let from = match self.input {
                    DataType::Decimal128(_, s) => s,
                    _ => 0,
                };
                let v = match self.average {
                    true => {
                        super::kernels::divide(total?, i128::from(self.count), i32::from(s - from))?
                    }
                    false => fit(total?, i32::from(from), p, s)?,
                };
                Ok(ScalarValue::Decimal128(Some(v), p, s))
            }
            _ => Err(SqlError::internal("sum of unexpected type")),
        }
    }
}

impl Accumulator for SumState {
    fn update_batch(&mut self, values: &[ArrayRef]) -> Result<()> {
        self.add(values, 1)
    }

    fn retract_batch(&mut self, values: &[ArrayRef]) -> Result<()> {
        self.add(values, -1)
    }

    fn supports_retract_batch(&self) -> bool {
        true
    }

    fn evaluate(&mut self) -> Result<ScalarValue> {
        if self.count == 0 {
            return ScalarValue::try_from(&self.output);
        }
        self.result().map_err(external)
    }

    fn size(&self) -> usize {
        let heap = match &self.number {
            Number::Float(s) => s.heap_size(),
            _ => 0,
        };
        size_of::<SumState>() + heap
    }

    fn state(&mut self) -> Result<Vec<ScalarValue>> {
        let bytes = self.number.to_bytes();
        Ok(vec![ScalarValue::Int64(Some(self.count)), ScalarValue::Binary(Some(bytes))])
    }

    fn merge_batch(&mut self, states: &[ArrayRef]) -> Result<()> {
        let counts = states[0].as_primitive::<Int64Type>();
        let sums = states[1].as_binary::<i32>();
        for (count, bytes) in counts.iter().zip(sums) {
            if let (Some(count), Some(bytes)) = (count, bytes) {
                self.count += count;
                self.number.merge(bytes)?;
            }
        }
        Ok(())
    }
}

/// DISTINCT: collects the values, sums them at the end.
#[derive(Debug)]
struct Distinct {
    seen: std::collections::HashSet<ScalarValue>,
    state: SumState,
}

impl Accumulator for Distinct {
    fn update_batch(&mut self, values: &[ArrayRef]) -> Result<()> {
        let array = millrace_common::keys::canonicalise(&values[0]);
        for i in 0..array.len() {
            if array.is_valid(i) {
                self.seen.insert(ScalarValue::try_from_array(&array, i)?);
            }
        }
        Ok(())
    }

    fn evaluate(&mut self) -> Result<ScalarValue> {
        if !self.seen.is_empty() {
            let values = ScalarValue::iter_to_array(self.seen.drain())?;
            self.state.add(&[values], 1)?;
        }
        self.state.evaluate()
    }

    fn size(&self) -> usize {
        size_of::<Distinct>() + self.seen.capacity() * size_of::<ScalarValue>()
    }

    fn state(&mut self) -> Result<Vec<ScalarValue>> {
        let values: Vec<ScalarValue> = self.seen.drain().collect();
        Ok(vec![list_state(&values, &self.state.input)])
    }

    fn merge_batch(&mut self, states: &[ArrayRef]) -> Result<()> {
        for list in lists_of(states)?.iter().flatten() {
            self.update_batch(&[list])?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use crate::testing::check_aggregates;

    #[test]
    fn sums_and_averages_of_integers() {
        check_aggregates(&[
            ("sum", "int2", "32767; 32767; NULL", "65534"),
            ("sum", "int4", "2147483647; 2147483647", "4294967294"),
            ("sum", "int8", "9223372036854775807; 9223372036854775807", "18446744073709551614"),
            ("sum", "int4", "NULL; NULL", "NULL"),
            ("sum", "int4", "", "NULL"),
            ("sum", "int4", "-5", "-5"),
            ("avg", "int4", "NULL; NULL", "NULL"),
            ("avg", "int8", "", "NULL"),
            ("avg", "int4", "1; 2; 4; 5", "3.0000000000000000"),
        ]);
    }

    #[test]
    fn averages_have_sixteen_digits() {
        check_aggregates(&[
            ("avg", "int4", "1; 2; 2", "1.6666666666666667"),
            ("avg", "int8", "-1; -2; -2", "-1.6666666666666667"),
            ("avg", "numeric(10,2)", "0.01; 0.02; 0.02", "0.0166666666666667"),
            (
                "avg",
                "numeric(20,18)",
                "0.000000000000000001; 0.000000000000000002",
                "0.000000000000000002",
            ),
        ]);
    }

    #[test]
    fn sums_of_numerics_keep_the_scale() {
        check_aggregates(&[
            ("sum", "numeric(10,2)", "1.10; 2.25; -0.05", "3.30"),
            ("sum", "numeric(10,2)", "0.00", "0.00"),
            ("sum", "numeric", "1.10; 2.2", "3.3"),
            ("sum", "numeric(38,0)", "99999999999999999999999999999999999999; 1", "error 22003"),
            (
                "sum",
                "numeric(38,0)",
                "99999999999999999999999999999999999999; 1; -1",
                "99999999999999999999999999999999999999",
            ),
        ]);
    }

    #[test]
    fn floats_are_summed_exactly() {
        check_aggregates(&[
            // PostgreSQL adds in the order of rows: here it would lose the one.
            ("sum", "float8", "1e16; 1; -1e16", "1"),
            ("sum", "float8", "0.1; 0.2; 0.3", "0.6"),
            ("avg", "float8", "1e16; 1; -1e16; 1", "0.5"),
            ("sum", "float8", "1e308; 1e308; -1e308", "1e+308"),
            ("sum", "float8", "1e308; 1e308", "error 22003"),
            ("sum", "float8", "1; Infinity", "Infinity"),
            ("sum", "float8", "Infinity; -Infinity", "NaN"),
            ("sum", "float8", "1; NaN; Infinity", "NaN"),
            ("avg", "float4", "1; 2", "1.5"),
            ("sum", "float4", "3e38; 3e38", "error 22003"),
            ("sum", "float4", "1.5; 2.25; NULL", "3.75"),
        ]);
    }

    #[test]
    fn sums_of_intervals() {
        check_aggregates(&[
            ("sum", "interval", "1 mon; 2 days; -03:00", "1 mon 2 days -03:00:00"),
            ("avg", "interval", "1 day; 2 days", "1 day 12:00:00"),
            ("avg", "interval", "1 mon; 00:00", "15 days"),
            ("sum", "interval", "NULL", "NULL"),
            ("sum", "interval", "2147483647 days; 1 day", "error 22008"),
        ]);
    }

    #[test]
    fn distinct_values_count_once() {
        check_aggregates(&[
            ("distinct sum", "int4", "1; 2; 2; NULL; 1", "3"),
            ("distinct avg", "int4", "1; 3; 3", "2.0000000000000000"),
            ("distinct sum", "numeric(5,2)", "1.50; 1.5; 2", "3.50"),
            ("distinct sum", "float8", "0.5; 0.5; NaN; NaN", "NaN"),
            ("distinct sum", "int4", "", "NULL"),
        ]);
    }

    #[test]
    fn logical_aggregates() {
        check_aggregates(&[
            ("bool_and", "bool", "true; NULL; true", "true"),
            ("bool_and", "bool", "true; false", "false"),
            ("every", "bool", "true; true", "true"),
            ("bool_or", "bool", "false; NULL", "false"),
            ("bool_or", "bool", "NULL", "NULL"),
            ("every", "bool", "", "NULL"),
        ]);
    }

    #[test]
    fn other_types_have_no_sum() {
        check_aggregates(&[
            ("sum", "text", "a", "error 42883"),
            ("avg", "date", "2024-01-01", "error 42883"),
        ]);
    }
}
