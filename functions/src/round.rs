//! `floor` and `ceil`: numerics lose their digits; and times that lose digits of their seconds.

use std::sync::{Arc, OnceLock};

use arrow::array::*;
use arrow::datatypes::*;
use datafusion::common::{Result, ScalarValue};
use datafusion::logical_expr::{
    ColumnarValue, ScalarFunctionArgs, ScalarUDF, ScalarUDFImpl, Signature, Volatility,
};
use millrace_common::{SqlError, SqlState};

use super::cast::fit;
use super::times::us_of;
use crate::error::external;

pub fn functions() -> Vec<Arc<ScalarUDF>> {
    static ALL: OnceLock<Vec<Arc<ScalarUDF>>> = OnceLock::new();
    ALL.get_or_init(|| {
        [Kind::Floor, Kind::Ceil]
            .map(|kind| {
                let signature = Signature::user_defined(Volatility::Immutable);
                let aliases = match kind {
                    Kind::Ceil => vec!["ceiling".to_owned()],
                    _ => Vec::new(),
                };
                Arc::new(ScalarUDF::from(Round { kind, signature, aliases }))
            })
            .into()
    })
    .clone()
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Kind {
    Floor,
    Ceil,
}

#[derive(Debug, PartialEq, Eq, Hash)]
struct Round {
    kind: Kind,
    signature: Signature,
    aliases: Vec<String>,
}

impl Round {
    fn apply(&self, array: &ArrayRef) -> Result<ArrayRef> {
        Ok(match array.data_type() {
            DataType::Decimal128(_, scale) => {
                let scale = i32::from(*scale);
                let kind = self.kind;
                let values: Decimal128Array = array
                    .as_primitive::<Decimal128Type>()
                    .try_unary(|v| whole(v, scale, kind))
                    .map_err(external)?;
                Arc::new(values.with_precision_and_scale(38, 0)?)
            }
            _ => {
                let array = arrow::compute::cast(array, &DataType::Float64)?;
                let kind = self.kind;
                let values =
                    array.as_primitive::<Float64Type>().unary::<_, Float64Type>(|v| match kind {
                        Kind::Floor => v.floor(),
                        Kind::Ceil => v.ceil(),
                    });
                Arc::new(values)
            }
        })
    }
}

/// `v / 10^scale` without digits after the point.
fn whole(v: i128, scale: i32, kind: Kind) -> Result<i128, SqlError> {
    let kept = match 10i128.checked_pow(scale.max(0) as u32) {
        Some(unit) => match kind {
            Kind::Floor => v.div_euclid(unit),
            Kind::Ceil => -(-v).div_euclid(unit),
        },
        None => 0,
    };
    fit(kept, 0, 38, 0)
}

impl ScalarUDFImpl for Round {
    fn name(&self) -> &str {
        match self.kind {
            Kind::Floor => "floor",
            Kind::Ceil => "ceil",
        }
    }

    fn aliases(&self) -> &[String] {
        &self.aliases
    }

    fn signature(&self) -> &Signature {
        &self.signature
    }

    /// A numeric stays, everything else is a float.
    fn coerce_types(&self, args: &[DataType]) -> Result<Vec<DataType>> {
        match args {
            [t @ DataType::Decimal128(_, _)] => Ok(vec![t.clone()]),
            [t] if t.is_numeric() || *t == DataType::Null => Ok(vec![DataType::Float64]),
            _ => {
                let names: Vec<String> =
                    args.iter().map(|t| crate::types::type_name(&Some(t.clone()))).collect();
                Err(external(SqlError::new(
                    millrace_common::SqlState::UNDEFINED_FUNCTION,
                    format!("function {}({}) does not exist", self.name(), names.join(", ")),
                )))
            }
        }
    }

    fn return_type(&self, args: &[DataType]) -> Result<DataType> {
        Ok(result_type(args))
    }

    fn is_strict(&self) -> bool {
        true
    }

    fn invoke_with_args(&self, args: ScalarFunctionArgs) -> Result<ColumnarValue> {
        Ok(match &args.args[0] {
            ColumnarValue::Array(a) => ColumnarValue::Array(self.apply(a)?),
            ColumnarValue::Scalar(s) => {
                let one = self.apply(&s.to_array()?)?;
                ColumnarValue::Scalar(ScalarValue::try_from_array(&one, 0)?)
            }
        })
    }
}

/// A whole numeric of a numeric, else a float.
pub fn result_type(args: &[DataType]) -> DataType {
    match args.first() {
        Some(DataType::Decimal128(_, _)) => DataType::Decimal128(38, 0),
        _ => DataType::Float64,
    }
}

/// 2000-01-01, from which PostgreSQL counts times.
pub const EPOCH_2000_US: i64 = 946_684_800_000_000;

/// Microseconds rounded to a number of digits of a second, half of a unit away from the origin.
pub fn rounded(us: i64, digits: i32, origin: i64) -> i64 {
    let unit = 10u64.pow(6 - digits.clamp(0, 6) as u32);
    let since = us.saturating_sub(origin);
    let whole = (since.unsigned_abs() + unit / 2) / unit * unit;
    let whole = i64::try_from(whole).unwrap_or(i64::MAX);
    origin.saturating_add(whole * since.signum())
}

/// A column of times whose seconds are rounded to a number of digits; other columns as they are.
pub fn round_seconds(array: &ArrayRef, digits: u32) -> Result<ArrayRef, SqlError> {
    let digits = digits as i32;
    let nanos = |us: i64| {
        us.checked_mul(1000).ok_or_else(|| {
            SqlError::new(SqlState::DATETIME_FIELD_OVERFLOW, "interval out of range")
        })
    };
    Ok(match array.data_type() {
        DataType::Timestamp(TimeUnit::Microsecond, _) => {
            let us = array.as_primitive::<TimestampMicrosecondType>();
            let rounded: TimestampMicrosecondArray =
                us.unary(|v| rounded(v, digits, EPOCH_2000_US));
            Arc::new(rounded.with_data_type(array.data_type().clone()))
        }
        DataType::Time64(TimeUnit::Microsecond) => {
            let us = array.as_primitive::<Time64MicrosecondType>();
            Arc::new(us.unary::<_, Time64MicrosecondType>(|v| rounded(v, digits, 0)))
        }
        DataType::Interval(IntervalUnit::MonthDayNano) => {
            let i = array.as_primitive::<IntervalMonthDayNanoType>();
            Arc::new(i.try_unary::<_, IntervalMonthDayNanoType, SqlError>(|v| {
                let us = rounded(us_of(v), digits, 0);
                Ok(IntervalMonthDayNano::new(v.months, v.days, nanos(us)?))
            })?)
        }
        _ => Arc::clone(array),
    })
}

#[cfg(test)]
mod tests {
    use crate::testing::check;

    #[test]
    fn numerics_stay_numerics() {
        check(&[
            ("floor(2.7)", "2"),
            ("floor(-2.1)", "-3"),
            ("ceil(2.1)", "3"),
            ("ceiling(-2.9)", "-2"),
            ("ceil(-0.5)", "0"),
            ("floor(0.00)", "0"),
            ("floor(NULL::numeric)", "NULL"),
            ("ceil('0.0000000000000001'::numeric)", "1"),
            ("floor('-0.0000000000000001'::numeric)", "-1"),
            ("ceil('99999999999999999999.5'::numeric)", "100000000000000000000"),
        ]);
    }

    #[test]
    fn everything_else_is_a_float() {
        check(&[
            ("floor('2.7'::float8)", "2"),
            ("floor('-2.1'::float4)", "-3"),
            ("ceil('-0.5'::float8)", "-0"),
            ("ceil('NaN'::float8)", "NaN"),
            ("floor('-Infinity'::float8)", "-Infinity"),
            ("floor(5)", "5"),
            ("ceil('-7'::int8)", "-7"),
            ("ceil(NULL)", "NULL"),
        ]);
    }

    #[test]
    fn seconds_are_rounded_half_away_from_2000() {
        check(&[
            ("round_seconds('2024-01-01 00:00:00.5'::timestamp, 0)", "2024-01-01 00:00:01"),
            ("round_seconds('1999-12-31 23:59:59.5'::timestamp, 0)", "1999-12-31 23:59:59"),
            ("round_seconds('1969-12-31 23:59:58.25'::timestamptz, 1)", "1969-12-31 23:59:58.2+00"),
            (
                "round_seconds('2024-01-01 00:00:00.123456'::timestamp, 3)",
                "2024-01-01 00:00:00.123",
            ),
            (
                "round_seconds('2024-01-01 00:00:00.123456'::timestamp, 6)",
                "2024-01-01 00:00:00.123456",
            ),
            ("round_seconds('12:00:00.0005'::time, 3)", "12:00:00.001"),
            ("round_seconds('23:59:59.9999'::time, 0)", "24:00:00"),
            ("round_seconds('-1.5 seconds'::interval, 0)", "-00:00:02"),
            (
                "round_seconds('1 mon -2 days 00:00:00.45'::interval, 1)",
                "1 mon -2 days +00:00:00.5",
            ),
        ]);
    }
}
